"""The innermost optimizer in wrappers, and its step."""

import contextlib
import uuid
import weakref

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt._gates import _records
from wrapopt._gates import _step_lock
from wrapopt._gates import _tokens
from wrapopt._v1._steps import _rules
from wrapopt._v1._steps import _step

_Optimizer = tf.compat.v1.train.Optimizer

# {optimizer: the variable that has its lock, and which lock}.
_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

# Arguments of TensorFlow's `apply_gradients` that are not attributes of a Step.
_OPTIONS = {"skip_gradients_aggregation"}


class Inner:
  """The protocol of wrappers, for an optimizer that is not one of them.

  It may be of TensorFlow, or of a user.
  """

  def __init__(self, opt):
    self._opt = opt

  def _take(self, step):
    """Takes a step, and updates its averages.

    Args:
      step: A Step.

    Returns:
      A Taken.
    """
    gradients = [g for g, _ in step.grads_and_vars if g is not None]
    near = next((v for _, v in step.grads_and_vars if _replicas.is_shared(v)),
                None)
    if near is None or not gradients:
      return self._update(step)
    _replicas.check_single_replica(type(self._opt).__name__)
    is_one_op, is_gated = self._is_one_op(step), step.accept is not True
    if is_gated and is_one_op:  # A gradient may not have to travel.
      ready = _records.when_ready(gradients)
    else:  # Nobody waits while they travel.
      if is_gated:
        step = step._replace(grads_and_vars=_step.withhold(step),
                             transform=None)
      gradients, variables = zip(*step.grads_and_vars)
      gradients, ready = _records.at_servers(gradients, variables, near)
      step = step._replace(grads_and_vars=list(zip(gradients, variables)))
    # A gate has asked already. A step between z and x cannot be skipped.
    asks = (not is_gated and not step.points and
            _replicas.is_shared(step.global_step))
    token = _tokens.next_of_function(step.global_step) if asks else _tokens.NONE
    # What TensorFlow's optimizers read and assign, such as Adam's powers, would
    # lose steps of other workers.
    with _replicas.unreplicated(True), (
        tf.control_dependencies(ready) if is_one_op else
        _step_lock.locked(*_locks.setdefault(
            self._opt, (near, uuid.uuid4().hex)), first=ready)):
      return self._take_by_token(step, token)

  def _is_one_op(self, step):
    """Whether a step is one op on each server, which reads no count."""
    schedule = step.averages and step.averages.schedule
    return (step.points is None and step.compensation is None and
            self._native_rule(step) is not None and
            type(self._opt)._finish is _Optimizer._finish and
            (not schedule or
             schedule.steps is None and schedule.num_updates is None))

  def _native_rule(self, step):
    """The rule of the op that takes a step, or None."""
    rule, averages = _rules.rule_of(self._opt), step.averages
    is_late = averages is not None and averages.schedule.is_called
    return rule if (
        rule is not None and step.fused and not is_late and
        step.options.keys() <= _OPTIONS and
        _rules.can_apply(self._opt, step.grads_and_vars)) else None

  def _take_by_token(self, step, token):
    """Takes a step, unless an earlier try with its token has taken it."""
    if token is _tokens.NONE:
      return self._update(step)
    accept, _, ticket = ops.begin_update(step.global_step, token=token)
    with _records.new_stateful_ops() as new:
      taken = self._update(step._replace(accept=accept))
    with tf.control_dependencies(_records.updates(new)):
      ops.staleness_complete(ticket, step.global_step,
                             increment=not taken.counted)
    return taken._replace(counted=True)

  def _update(self, step):
    """Takes a step that was admitted, or has to ask nobody."""
    opt = self._opt
    if step.points is not None:
      if not _replicas.have_copies():  # Out of the replicas: an error.
        return _step.Taken(opt.apply_gradients(step.grads_and_vars), True)
      return _step.Taken(_rules.apply_interpolated(opt, step), True)
    is_gated = step.accept is not True
    averages = step.averages
    rule = self._native_rule(step)
    if rule is not None:
      take = lambda step: _step.Taken(
          _rules.apply_gradients(opt, rule, step, counts=not is_gated),
          not is_gated)
      if step.compensation is not None:
        return _step.where_accepted(opt, step, take, in_float32=True)
      if is_gated:
        _step.create_slots(opt, step)
        step = step._replace(grads_and_vars=_step.withhold(step))
      return take(step)
    rule = _rules.rule_of(opt)
    is_late = averages is not None and averages.schedule.is_called
    # An overridden `apply_gradients` may use the global step for more.
    counts = (not is_gated or is_late or
              getattr(opt.apply_gradients, "__func__", None) is not
              _Optimizer.apply_gradients)

    def apply(step):
      plan = _plan_of(step, rule)
      with tf.control_dependencies(
          [*plan.first, *_step.check(step), *plan.catch_up()]), plan.moving():
        applied = opt.apply_gradients(
            step.grads_and_vars, name=step.name, **step.options,
            global_step=step.global_step if counts else None)
      return _step.Taken(_step.after(applied, averages, plan.update,
                          None if counts else step.global_step), counts)

    return _step.where_accepted(opt, step, apply)

  def _build(self, variables):
    pass

  def _making_state(self):
    return contextlib.nullcontext()

  def _recording(self, loss, global_step):
    del loss, global_step
    return contextlib.nullcontext()

  def _fuses(self):
    return _rules.rule_of(self._opt) is not None

  def _innermost(self):
    return self._opt

  def _touches_few_rows(self):
    rule = _rules.rule_of(self._opt)
    return _plan.touches_few_rows(rule and rule.rule)


def _plan_of(step, rule):
  """The Plan of a step that an optimizer takes without a native op.

  Args:
    step: A Step.
    rule: The optimizer's `_fused` rule, or None.
  """
  pairs = [(g, v) for g, v in step.grads_and_vars
           if g is not None and isinstance(v, tf.Variable)]
  variables = [v for _, v in pairs]
  averages = step.averages
  return _plan.Plan(
      [g for g, _ in pairs], variables,
      averages.of(variables) if averages else (), rule=rule and rule.rule,
      only_touched=(step.only_touched and averages is not None and
                    averages.in_order),
      untrained=averages.untrained if averages else ())
