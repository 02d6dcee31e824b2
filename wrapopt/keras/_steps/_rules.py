"""The Keras optimizers that have a one-pass op.

The type must match exactly: a subclass may have overridden any method.
"""

import operator
import typing

import keras
import tensorflow as tf

from wrapopt import _lookup_cache
from wrapopt import _native
from wrapopt import ops
from wrapopt._averages import _interpolation
from wrapopt._averages import _lazy
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt.keras._variables import value_of

_optimizers = keras.optimizers


class _Rule(typing.NamedTuple):
  """Maps an optimizer to `wrapopt.ops.apply`."""
  rule: str  # The name in cc/rules/rules.h.
  slots: dict[str, list]  # State of the rule: slots, one for each variable.
  scalars: dict[str, typing.Any]  # All but the learning rate and weight decay.
  decays_weights: bool = True  # Whether the rule has a weight decay.
  # Whether the op and Keras update the same rows for a sparse gradient.
  sparse: bool = True
  # Whether the rule squares gradients. If a batch names a row several times,
  # Keras squares each of the row's gradients; the op sums them before.
  squares: bool = False


def _sgd(opt):
  if opt.momentum == 0:
    return _Rule("KerasSGD", {}, {})
  return _Rule("KerasMomentum", {"velocity": opt.momentums},
               {"momentum": opt.momentum, "use_nesterov": bool(opt.nesterov)})


def adam(opt):
  """The rule of Adam."""
  # The number of this step, counted from 1.
  t = ops.float64(opt.iterations + 1)
  scalars = {"beta1": opt.beta_1, "beta2": opt.beta_2, "epsilon": opt.epsilon,
             "beta1_power": tf.pow(ops.float64(opt.beta_1), t),
             "beta2_power": tf.pow(ops.float64(opt.beta_2), t)}
  slots = {"m": opt._momentums, "v": opt._velocities}
  if opt.amsgrad:
    return _Rule("AdamWithAmsgrad", {**slots, "vhat": opt._velocity_hats},
                 scalars, squares=True)
  return _Rule("Adam", slots, {**scalars, "use_nesterov": False}, squares=True)


def _adagrad(opt):
  return _Rule("KerasAdagrad", {"accum": opt._accumulators},
               {"epsilon": opt.epsilon}, squares=True)


def _rms_prop(opt):
  slots = {"rms": opt._velocities}
  scalars = {"rho": opt.rho, "epsilon": opt.epsilon}
  name = "RMSProp"
  if opt.centered:
    name = "CenteredRMSProp"
    slots["mg"] = opt._average_gradients
  if opt.momentum == 0:
    return _Rule(f"Keras{name}", slots, scalars, squares=True)
  return _Rule(name, {**slots, "mom": opt._momentums},
               {**scalars, "momentum": opt.momentum}, decays_weights=False,
               sparse=False, squares=True)


def _lion(opt):
  return _Rule("Lion", {"m": opt._momentums},
               {"beta1": opt.beta_1, "beta2": opt.beta_2})


_RULES = {
    _optimizers.Adagrad: _adagrad,
    _optimizers.Adam: adam,
    _optimizers.AdamW: adam,
    _optimizers.Lion: _lion,
    _optimizers.RMSprop: _rms_prop,
    _optimizers.SGD: _sgd,
}

# The methods of an optimizer that its one-pass op does the work of.
PASSED_OVER = frozenset({"_distributed_tf_update_step", "assign", "assign_add",
                         "assign_sub", "update_step"})

# {class: {name: method}}, to see if somebody has replaced one in the class.
_METHODS = {
    cls: {name: getattr(cls, name) for name in [
        *PASSED_OVER, "apply", "apply_gradients", "_all_reduce_sum_gradients",
        "_apply_weight_decay", "_backend_apply_gradients",
        "_backend_update_step"]} for cls in _RULES}


def add_rule(cls, name):
  """Makes `name` the rule of a subclass of Adam, one of this package."""
  _RULES[cls] = lambda opt: adam(opt)._replace(rule=name, squares=False)
  _METHODS[cls] = {}


def has_rule(cls):
  """Whether the optimizers of a class have a one-pass op."""
  return cls in _RULES and all(
      getattr(cls, name) is method for name, method in _METHODS[cls].items())


def touches_few_rows(opt):
  """Whether `opt` may change only the rows that a sparse gradient touches."""
  rule = rule_of(opt, type(opt)) if opt.built else None
  return _plan.touches_few_rows(rule and rule.rule)


def rule_of(opt, cls):
  """The rule of `opt`, which is of class `cls`, or None."""
  return _RULES[cls](opt) if has_rule(cls) else None


def may_be_interpolated(opt):
  """Whether an optimizer has a rule of these, by its class and arguments."""
  return (type(opt) in (_optimizers.Adagrad, _optimizers.Adam,
                        _optimizers.AdamW, _optimizers.RMSprop,
                        _optimizers.SGD) and has_rule(type(opt)) and
          not any(getattr(opt, name, 0)
                  for name in ("amsgrad", "centered", "momentum")))


def interpolated_rule_of(opt, cls, schedule):
  """The `_Rule` of a step between z and x, or None.

  Args:
    opt: A Keras optimizer.
    cls: Its class.
    schedule: A schedule of _averages/_interpolation.py.
  """
  rule = rule_of(opt, cls)
  name = rule and _interpolation.rule_between(rule.rule, schedule)
  if name is None:
    return None
  has = _native.rules()[name]
  return rule._replace(
      rule=name,
      slots={k: row for k, row in rule.slots.items() if k in has.states},
      scalars={k: x for k, x in rule.scalars.items() if k in has.scalars})


def apply_interpolated(opt, rule, step, grads, z, motion, schedule):
  """Takes a step between z and x, with one op for each device.

  The step moves all rows of a variable. So that of a sparse gradient is that of
  the dense one.

  Args:
    opt: A Keras optimizer, which is built.
    rule: The result of `interpolated_rule_of`.
    step: The `_step.Step`.
    grads: Gradients: tensors or `tf.IndexedSlices`.
    z: The variables that hold z of the variables of the gradients.
    motion: A `_interpolation.Motion`.
    schedule: The schedule.
  """
  values = _lookup_cache.Variables(step.variables)
  grads = reduced(opt, grads, values)
  plan = _plan.Plan(grads, values, rule=rule.rule)
  for decays_here, members in _by_decay(opt, values):
    chosen = lambda row: [row[i] for i in members]
    decay = lambda x: (x or 0.0) if decays_here else 0.0
    plan.run(
        update_of(opt, rule, values, members, step.cache, z=z), chosen(grads),
        {**rule.scalars, "lr": motion.rate, "pull": motion.pull,
         "push": motion.push, "weight_decay": decay(opt.weight_decay),
         "weight_decay_at_y": decay(schedule.weight_decay_at_y)},
        [], members=members)


def _by_decay(opt, values):
  """[(whether their weights decay, positions of variables)], without empty."""
  decay = [bool(opt._use_weight_decay(v)) for v in values]
  groups = [(x, [i for i, y in enumerate(decay) if y == x])
            for x in (True, False)]
  return [group for group in groups if group[1]]


class _CachedUpdate(typing.NamedTuple):
  """An `ops.Update` of eager mode, and the variables that it must be of."""
  variables: list
  update: ops.Update


def update_of(opt, rule, values, members, cache, averages=(), z=None):
  """The `ops.Update` of some variables of a step.

  Args:
    opt: A Keras optimizer.
    rule: A `_Rule`.
    values: The tf.Variables of the step.
    members: The positions of those to update.
    cache: A `LookupCache` of this optimizer's.
    averages: Rows of averages, one row for each decay.
    z: The variables that hold their z, between z and x.

  Returns:
    An `ops.Update`.
  """
  used = [x for row in (*rule.slots.values(), *averages, z or ()) for x in row]
  facts = cache.get(values) if tf.executing_eagerly() else None
  key = (rule.rule, _replicas.number(), *members)
  found = facts and facts.get(key)
  if found and len(found.variables) == len(used) and all(
      map(operator.is_, found.variables, used)):
    return found.update
  here = lambda x: _replicas.here(_lazy.stored(value_of(x)))
  chosen = lambda row: [here(row[i]) for i in members]
  indices = [opt._get_variable_index(values[i]) for i in members]
  update = ops.Update(
      rule.rule,
      {"var": chosen(values), **({} if z is None else {"z": chosen(z)}),
       **{state: [here(slots[i]) for i in indices]
          for state, slots in rule.slots.items()}},
      list(map(chosen, averages)), [0.0] * len(averages))
  if tf.executing_eagerly():
    facts = facts or cache.add(values)
    facts[key] = _CachedUpdate(used, update)
  return update


def reduced(opt, grads, values, by_keras=()):
  """The gradients for native ops: in a strategy, their sums over replicas.

  Args:
    opt: A Keras optimizer.
    grads: Gradients: tensors or `tf.IndexedSlices`.
    values: The tf.Variables of the gradients.
    by_keras: The positions of gradients that Keras sums.

  Returns:
    The gradients, with the dtypes of their variables.
  """
  if _replicas.share_steps():
    grads = list(grads)
    mine = [i for i in range(len(grads)) if i not in by_keras]
    for i, (grad, v) in zip(mine, opt._all_reduce_sum_gradients(
        [(grads[i], values[i]) for i in mine])):
      # TensorFlow's sum of empty tensors has the shape [0].
      grads[i] = tf.zeros_like(v) if 0 in v.shape else grad
  return [cast(g, v.dtype) for g, v in zip(grads, values)]


def cast(grad, dtype):
  """Casts a gradient, which may be sparse."""
  if isinstance(grad, tf.IndexedSlices):
    return tf.IndexedSlices(tf.cast(grad.values, dtype), grad.indices,
                            grad.dense_shape)
  return tf.cast(grad, dtype)
