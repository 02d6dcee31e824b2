"""The inner optimizers of TensorFlow that have a one-pass op.

The type must match exactly: a subclass may have overridden any method.
"""

import contextlib
import inspect
import operator
import typing
import weakref

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.training import optimizer as tf_optimizer

from wrapopt import _lookup_cache
from wrapopt import _native
from wrapopt import _types
from wrapopt import lazy_adam
from wrapopt import ops
from wrapopt._averages import _interpolation
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt._v1._graphs import _control_flow

_train = tf.compat.v1.train


class _Rule(typing.NamedTuple):
  """Maps an inner optimizer to `wrapopt.ops.apply`.

  The argument of `scalars` is the optimizer, after its `_prepare`.
  """
  rule: str  # The name in cc/rules/rules.h.
  slots: dict[str, str]  # State of the rule: slot of the optimizer.
  scalars: typing.Callable[[typing.Any], dict[str, typing.Any]]


def _gradient_descent(opt):
  del opt
  return _Rule("GradientDescent", {},
               lambda o: {"lr": o._learning_rate_tensor})


def _momentum(opt):
  return _Rule(
      "Momentum", {"accum": "momentum"},
      lambda o: {"lr": o._learning_rate_tensor,
                 "momentum": o._momentum_tensor,
                 "use_nesterov": bool(opt._use_nesterov)})


def _adagrad(opt):
  del opt
  return _Rule("Adagrad", {"accum": "accumulator"},
               lambda o: {"lr": o._learning_rate_tensor})


def _adadelta(opt):
  del opt
  return _Rule(
      "Adadelta", {"accum": "accum", "accum_update": "accum_update"},
      lambda o: {"lr": o._lr_t, "rho": o._rho_t, "epsilon": o._epsilon_t})


def _rms_prop(opt):
  slots = {"rms": "rms", "mom": "momentum"}
  if opt._centered:
    slots["mg"] = "mg"
  return _Rule(
      "CenteredRMSProp" if opt._centered else "RMSProp", slots,
      lambda o: {"lr": o._learning_rate_tensor, "rho": o._decay_tensor,
                 "momentum": o._momentum_tensor, "epsilon": o._epsilon_tensor})


def _adam(opt):
  del opt
  def scalars(o):
    beta1_power, beta2_power = o._get_beta_accumulators()
    return {"lr": o._lr_t, "beta1": o._beta1_t, "beta2": o._beta2_t,
            "epsilon": o._epsilon_t, "weight_decay": 0.0,
            "use_nesterov": False, "beta1_power": beta1_power,
            "beta2_power": beta2_power}
  return _Rule("Adam", {"m": "m", "v": "v"}, scalars)


def _ftrl(opt):
  power = opt._learning_rate_power
  if not isinstance(power, (int, float)) or power != -0.5:
    return None  # The op computes a square root, not any power.
  def scalars(o):
    shrinkage = o._l2_shrinkage_regularization_strength
    return {"lr": o._learning_rate_tensor,
            "l1": o._l1_regularization_strength_tensor,
            "l2": o._adjusted_l2_regularization_strength_tensor,
            "l2_shrinkage": (0.0 if shrinkage <= 0 else
                             o._l2_shrinkage_regularization_strength_tensor)}
  return _Rule("Ftrl", {"accum": "accum", "linear": "linear"}, scalars)


def _lazy_adam(opt):
  return _adam(opt)._replace(rule="LazyAdam")


_RULES = {
    lazy_adam.LazyAdamOptimizer: _lazy_adam,
    _train.AdadeltaOptimizer: _adadelta,
    _train.AdagradOptimizer: _adagrad,
    _train.AdamOptimizer: _adam,
    _train.FtrlOptimizer: _ftrl,
    _train.GradientDescentOptimizer: _gradient_descent,
    _train.MomentumOptimizer: _momentum,
    _train.RMSPropOptimizer: _rms_prop,
}


_NAMES = frozenset(
    name for cls in _RULES for name, _ in inspect.getmembers(
        cls, inspect.isfunction) if not name.startswith("__"))

# {class: {name: method}}, to see if somebody has replaced one in the class.
_METHODS = {
    cls: {name: getattr(cls, name) for name in _NAMES
          if name in vars(cls) or name == "apply_gradients"} for cls in _RULES}


def rule_of(opt):
  """The rule of an inner optimizer, or None if it has no one-pass op.

  It has none if a method was set on it or on its class: the op would not call
  it.
  """
  cls = type(opt)
  if cls not in _RULES or not _NAMES.isdisjoint(vars(opt)) or any(
      getattr(cls, name) is not method
      for name, method in _METHODS[cls].items()):
    return None
  return _RULES[cls](opt)


def interpolated_rule_of(opt, schedule):
  """The rule of a step between z and x around an optimizer, or None.

  Args:
    opt: A `tf.compat.v1.train.Optimizer`, without momentum if it is an
      RMSPropOptimizer.
    schedule: A schedule of _averages/_interpolation.py.
  """
  rule = rule_of(opt)
  name = rule and _interpolation.rule_between(rule.rule, schedule)
  if name is None:
    return None
  has = _native.rules()[name]

  def scalars(o):
    # TensorFlow's optimizers lack these.
    found = {"epsilon": 0.0, "weight_decay": 0.0, **rule.scalars(o)}
    return {k: x for k, x in found.items() if k in has.scalars}

  return _Rule(name, {state: slot for state, slot in rule.slots.items()
                      if state in has.states}, scalars)


def can_apply(opt, grads_and_vars):
  """Whether `opt` can apply these gradients by one op."""
  _, variables = _lookup_cache.trained(grads_and_vars)
  if not variables or not _replicas.have_copies():
    return False
  return (_cached(opt, variables) is not None or
          all(isinstance(v, tf.Variable) and v.constraint is None and
              v.dtype.base_dtype in _types.FLOATS for v in variables) and
          # A variable that is listed twice is updated twice.
          len({v.ref() for v in variables}) == len(variables))


@ops.not_converted
def apply_gradients(opt, rule, step, counts=True):
  """Replaces `opt.apply_gradients`, with averages of the result, in one pass.

  Args:
    opt: The inner optimizer.
    rule: The result of `rule_of(opt)`.
    step: A `_step.Step`; `can_apply` must be True for its gradients.
    counts: Whether to increment its global step, if it has one.

  Returns:
    The same as `opt.apply_gradients`.
  """
  grads, variables = _lookup_cache.trained(step.grads_and_vars)
  averages = step.averages
  grads = _reduced(grads, variables, step)
  has_shadows = averages is not None and averages.has_trained
  shadows = averages.stored_by_decay if has_shadows else ()
  plan = _plan.Plan(
      grads, variables, averages.shadows_by_decay if has_shadows else (),
      rule=rule.rule,
      only_touched=step.only_touched and has_shadows and averages.in_order,
      untrained=averages.untrained if averages else ())
  first = plan.first
  if averages and not has_shadows:
    first = first + _swap.check(s for row in averages.untrained for _, s in row)
  update = _update_of(opt, rule, variables, shadows)

  def scalars_and_decays():
    opt._prepare()
    decays = averages.schedule.now(step.global_step) if averages else []
    return rule.scalars(opt), decays

  def end(*updates):
    updates = list(updates)
    if averages:
      with tf.control_dependencies(updates):
        done = plan.update_untrained(decays, step.accept)
      updates = averages.schedule.count(
          updates if done is None else [done], step.accept)
    return _end(opt, step, variables, updates, scope, counts)

  with tf.name_scope(step.name or opt._name) as scope:
    scalars, decays = _replicas.merged(scalars_and_decays)()
    with tf.control_dependencies(first):
      done = plan.run(
          update, grads, scalars, decays if shadows else [],
          step.accept, opt._use_locking)
    return _replicas.merged(end)(*done)


def _reduced(grads, variables, step):
  """The gradients; in replicas of a strategy, their sums."""
  if not _replicas.share_steps() or step.options.get(
      "skip_gradients_aggregation"):
    return grads
  sums = tf.distribute.get_replica_context().all_reduce(
      tf.distribute.ReduceOp.SUM, list(grads))
  # TensorFlow's sum of empty tensors has the shape [0].
  return [tf.zeros_like(v) if 0 in v.shape else g
          for g, v in zip(sums, variables)]


def _end(opt, step, variables, updates, scope, counts):
  """Ends a step after its updates, as TensorFlow's `apply_gradients`.

  Args:
    opt: The inner optimizer.
    step: The `_step.Step`.
    variables: The variables that have a gradient.
    updates: The operations that update them, in all replicas.
    scope: The name of the step.
    counts: As in `apply_gradients`.

  Returns:
    The same as `apply_gradients`.
  """
  counts = counts and step.global_step is not None
  if not _replicas.share_steps():
    done = _finish(opt, updates, "update" if counts else scope, step.accept)
    if counts:
      with tf.control_dependencies(_operations(done)):
        with ops.device_of(step.global_step):
          done = step.global_step.assign_add(1, name=scope, read_value=False)
    return done if tf.executing_eagerly() else _operations(done)[0]
  extended = tf.distribute.get_strategy().extended
  done = extended.update_non_slot(
      extended.non_slot_devices(variables),
      lambda: opt._finish(updates, "update"), group=False)
  with tf.control_dependencies([op for x in done for op in _operations(x)]):
    done = [v.assign_add(1, read_value=False) for v in (
        _replicas.values(step.global_step) if counts else ())] or [tf.no_op()]
  return None if tf.executing_eagerly() else tf.group(*done, name=scope)


@ops.not_converted
def apply_interpolated(opt, step):
  """As `apply_gradients`, for a step between z and x.

  Args:
    opt: The inner optimizer; `interpolated_rule_of` is not None.
    step: A `_step.Step` that `is_interpolated`.

  Returns:
    The same as `opt.apply_gradients`.
  """
  points = step.averages
  rule = interpolated_rule_of(opt, points.schedule)
  grads, variables = _lookup_cache.trained(step.grads_and_vars)
  grads = _reduced(grads, variables, step)
  plan = _plan.Plan(grads, variables, rule=rule.rule)
  update = _update_of(opt, rule, variables, (), points.z)

  def scalars_and_motion():
    opt._prepare()
    scalars = rule.scalars(opt)
    state = points.state.read_value()
    share = points.settle(state)
    motion = points.schedule.motion(state, scalars["lr"], share)
    return scalars, motion, share

  def end(*updates):
    counted = []
    for state in _replicas.values(points.state):
      with tf.control_dependencies(updates), ops.device_of(state):
        counted += _operations(state.assign(motion.state, read_value=False))
    return _end(opt, step, variables, counted if updates else [], scope,
                counts=True)

  with tf.name_scope(step.name or opt._name) as scope:
    # Where the gradients were taken, the variables may change now.
    with tf.control_dependencies(
        [] if tf.executing_eagerly() else
        tf.nest.flatten(list(grads), expand_composites=True)):
      scalars, motion, share = _replicas.merged(scalars_and_motion)()
    with tf.control_dependencies(plan.first + (
        [] if tf.executing_eagerly() else [share])):
      done = plan.run(
          update, grads,
          {**scalars, "lr": motion.rate, "pull": motion.pull,
           "push": motion.push,
           "weight_decay_at_y": points.schedule.weight_decay_at_y},
          [], True, opt._use_locking)
    return _replicas.merged(end)(*done)


@contextlib.contextmanager
def with_slots(opt, rule):
  """Lets an optimizer make only the slots of a rule, by their usual names."""
  def only(make, position):
    def made(var, *args):
      if args[position - 1] in rule.slots.values():
        return make(var, *args)
      # Takes the name: those of one optimizer differ by a number.
      with tf.compat.v1.variable_scope(None, f"{var._shared_name}/{args[-1]}"):
        return None

    return made

  vars(opt).update(
      _zeros_slot=only(opt._zeros_slot, 1),
      _get_or_make_slot=only(opt._get_or_make_slot, 2),
      _get_or_make_slot_with_initializer=only(
          opt._get_or_make_slot_with_initializer, 4))
  try:
    yield
  finally:
    for name in ("_zeros_slot", "_get_or_make_slot",
                 "_get_or_make_slot_with_initializer"):
      del vars(opt)[name]


# {inner optimizer: LookupCache of its `_CachedUpdate`s}.
_caches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _CachedUpdate(typing.NamedTuple):
  """An `ops.Update` of eager mode, and its parts.

  Attributes:
    averages: The list by which it is found.
    slots: For each slot name of the optimizer, a list.
    update: The `ops.Update`.
  """
  averages: typing.Any
  slots: dict[str, list]
  update: ops.Update


def _cached(opt, variables):
  """The cached facts about `variables` in eager mode, or None."""
  cache = _caches.get(opt) if tf.executing_eagerly() else None
  return cache and cache.get(variables)


def _update_of(opt, rule, variables, shadows, z=None):
  """The `ops.Update` of a step; makes the missing slots of the optimizer.

  Args:
    opt: The inner optimizer.
    rule: The result of `rule_of(opt)`.
    variables: The variables that have a gradient.
    shadows: Rows of their averages.
    z: Their z, between z and x.

  Returns:
    An `ops.Update`.
  """
  averages = shadows if z is None else z
  facts = _cached(opt, variables)
  # Several wrappers, each with its averages, may share the inner optimizer.
  found = facts and facts.get((rule.rule, id(averages)))
  if found and all(
      all(map(operator.is_, row, map(
          opt._slots.get(slot, {}).get, facts["keys"])))
      for slot, row in found.slots.items()):
    return found.update

  def make_slots():
    with tf.init_scope(), (contextlib.nullcontext() if z is None
                           else with_slots(opt, rule)):
      opt._create_slots(variables)

  _replicas.merged(make_slots)()
  slots = {slot: [opt.get_slot(v, slot) for v in variables]
           for slot in rule.slots.values()}
  states = {"var": variables, **({} if z is None else {"z": z}),
            **{state: slots[slot] for state, slot in rule.slots.items()}}
  if _replicas.share_steps():
    here = lambda row: list(map(_replicas.here, row))
    states = {name: here(row) for name, row in states.items()}
    shadows = list(map(here, shadows))
  cacheable = tf.executing_eagerly() and all(
      isinstance(v, resource_variable_ops.BaseResourceVariable)
      for v in variables)
  update = ops.Update(rule.rule, states, list(shadows), [0.0] * len(shadows),
                      packed=cacheable or None)
  if cacheable:
    if facts is None:
      cache = _caches.setdefault(opt, _lookup_cache.LookupCache())
      facts = cache.add(variables)
      facts["keys"] = list(map(tf_optimizer._var_key, variables))
    facts[rule.rule, id(averages)] = _CachedUpdate(averages, slots, update)
  return update


def _finish(opt, updates, name, accept):
  """Runs the inner optimizer's `_finish` after its updates, if `accept`."""
  if accept is True or (
      type(opt)._finish is tf.compat.v1.train.Optimizer._finish):
    return opt._finish(updates, name)
  has_refs = any(ops.is_ref_variable(v) for v in opt._non_slot_variables())
  with tf.control_dependencies(updates):
    return _control_flow.cond(accept, lambda: opt._finish([], name), has_refs)


def gradient(gradient, variable):
  """Converts a gradient to a tensor or `tf.IndexedSlices`."""
  # A failed conversion is a ValueError in eager mode, else a TypeError.
  try:
    tensor = tf.compat.v1.convert_to_tensor_or_indexed_slices(gradient)
  except (TypeError, ValueError):
    tensor = None
  if not isinstance(tensor, (tf.Tensor, tf.IndexedSlices)):
    raise TypeError(
        "Gradient must be a tensor, a tf.IndexedSlices or None, got "
        f"{gradient!r} for '{variable.name}'.")
  return tensor


def _operations(x):
  if x is None:
    return []
  return [x if isinstance(x, tf.Operation) else x.op]
