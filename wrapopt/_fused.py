"""Which inner optimizers have a one-pass op, and how their state is read.

Only an optimizer of exactly one of these types is taken apart: a subclass may
have overridden anything.
"""

import typing

import tensorflow as tf

from wrapopt import _control_flow
from wrapopt import _lazy
from wrapopt import _native
from wrapopt import lazy_adam
from wrapopt import ops

_train = tf.compat.v1.train


class _Rule(typing.NamedTuple):
  """How an inner optimizer maps to `wrapopt.ops.apply`.

  The functions take the optimizer, whose `_prepare` has run.
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
    return None  # The op has a square root, not any power.
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


def rule_of(opt):
  """The rule of an inner optimizer, or None where it has no one-pass op."""
  find = _RULES.get(type(opt))
  return find(opt) if find else None


def leaves_rows(opt):
  """Whether `opt` leaves rows alone that a sparse gradient lacks."""
  rule = rule_of(opt)
  return rule is not None and not _native.rules()[rule.rule].all_rows


def can_apply(grads_and_vars):
  """Whether these gradients can be applied by one op."""
  variables = [v for g, v in grads_and_vars if g is not None]
  return (
      bool(variables) and
      # A strategy reduces gradients between its replicas first.
      not tf.distribute.has_strategy() and
      all(isinstance(v, tf.Variable) and v.constraint is None
          for v in variables) and
      # A variable that is named twice is updated twice.
      len({v.ref() for v in variables}) == len(variables))


@ops.not_converted
def apply_gradients(opt, rule, step):
  """What `opt.apply_gradients` does, with averages of the result, in one pass.

  Args:
    opt: The inner optimizer.
    rule: Its `rule_of`.
    step: A `_step.Step`, for whose gradients `can_apply`. The global step is
      incremented only if `step.accept` is True; if that is a tensor, whoever
      has made it counts the step.

  Returns:
    As `opt.apply_gradients`.
  """
  grads, variables = zip(*[(g, v) for g, v in step.grads_and_vars
                           if g is not None])
  averages = step.averages
  with tf.init_scope():
    opt._create_slots(variables)
  with tf.name_scope(step.name or opt._name) as scope:
    opt._prepare()
    states = {"var": list(variables)}
    for state, slot in rule.slots.items():
      states[state] = [opt.get_slot(v, slot) for v in variables]
    shadows = [averages.shadows(v) for v in variables] if averages else []
    lazy = leaves_rows(opt)
    log_decays = [
        lazy and isinstance(g, tf.IndexedSlices) and _lazy.begin(of_variable) or
        [None] * len(of_variable) for g, of_variable in zip(grads, shadows)]
    update = ops.apply(
        rule.rule, states, grads, rule.scalars(opt),
        shadows=[list(row) for row in zip(*shadows)],
        decay=averages.decays(step.global_step) if averages else [],
        accept=step.accept, use_locking=opt._use_locking,
        log_decays=zip(*log_decays))
    updates = [] if update is None else [update]
    if averages:
      updates = averages.count_update(updates, step.accept)
    if step.global_step is None or step.accept is not True:
      done = _finish(opt, updates, scope, step.accept)
    else:
      with tf.control_dependencies(_operations(opt._finish(updates, "update"))):
        with ops.device_of(step.global_step):
          done = step.global_step.assign_add(1, name=scope, read_value=False)
    return done if tf.executing_eagerly() else _operations(done)[0]


def _finish(opt, updates, name, accept):
  """What the inner optimizer does after its updates, where `accept`."""
  if accept is True or (
      type(opt)._finish is tf.compat.v1.train.Optimizer._finish):
    return opt._finish(updates, name)
  has_refs = any(ops.is_ref_variable(v) for v in opt._non_slot_variables())
  with tf.control_dependencies(updates):
    return _control_flow.cond(accept, lambda: opt._finish([], name), has_refs)


def gradient(gradient, variable):
  """A gradient as a tensor or `tf.IndexedSlices`; else raises a TypeError."""
  # In eager mode what cannot be converted is a ValueError, else a TypeError.
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
