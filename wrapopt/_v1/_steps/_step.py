"""A step that wrappers pass to their inner optimizers.

The outermost wrapper makes a `Step`. Each wrapper changes it and passes it to
its inner optimizer, and gets a `Taken` back. `Inner` takes the step with an
optimizer that is no wrapper.
"""

import contextlib
import typing
import uuid
import weakref

import tensorflow as tf

from wrapopt import _bundle
from wrapopt import _checks
from wrapopt import _lookup_cache
from wrapopt import ops
from wrapopt._averages import _interpolation
from wrapopt._averages import _plan
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt._gates import _records
from wrapopt._gates import _step_lock
from wrapopt._gates import _tokens
from wrapopt._v1._graphs import _control_flow
from wrapopt._v1._steps import _gate
from wrapopt._v1._steps import _rules

_Optimizer = tf.compat.v1.train.Optimizer

# {optimizer: the variable that has its lock, and which lock}.
_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Step(typing.NamedTuple):
  """A request to `apply_gradients`.

  Attributes:
    grads_and_vars: A list of (gradient, variable). A gradient is a tensor,
      `tf.IndexedSlices` or None.
    global_step: The step variable to increment, or None.
    name: As in `tf.compat.v1.train.Optimizer.apply_gradients`.
    options: Further arguments of the inner optimizer's `apply_gradients`.
    gate: Its `_gate.Gate`, or None.
    averages: The `_plan.StepAverages` that this step updates, the
      `_interpolation.Points` of a step between z and x, which has no gate, or
      None.
    fused: Whether a native op takes the step if there is one. None if no
      wrapper has set it; False if one has disabled it.
    only_touched: False if a wrapper may change rows that no gradient touches,
      after the step. Averages must not lag behind then.
  """
  grads_and_vars: list
  global_step: tf.Variable | None = None
  name: str | None = None
  options: dict[str, typing.Any] = {}
  gate: _gate.Gate | None = None
  averages: _plan.StepAverages | _interpolation.Points | None = None
  fused: bool | None = None
  only_touched: bool = True

  @property
  def accept(self):
    """True, or the `accept` of its gate."""
    return True if self.gate is None else self.gate.accept

  @property
  def is_interpolated(self):
    """Whether it is a step between z and x."""
    return isinstance(self.averages, _interpolation.Points)

  def with_fused(self, fused):
    """This step with the argument `fused` of a wrapper."""
    allowed = fused is not False and self.fused is not False
    return self._replace(fused=allowed)


class Taken(typing.NamedTuple):
  """The result of a Step.

  Attributes:
    done: An operation or tensor that runs after the step was taken or skipped;
      None if there is none, as in eager mode.
    counted: Whether the step increments `global_step`.
  """
  done: typing.Any
  counted: bool


def apply_gradients(take, grads_and_vars, global_step, name, options):
  """The `apply_gradients` of a wrapper.

  Args:
    take: Its `_take`.
    grads_and_vars: As there; gradients are converted to tensors.
    global_step: As there.
    name: As there.
    options: Further arguments, a dict.

  Returns:
    The `done` of the step's Taken.
  """
  collection = tf.compat.v1.GraphKeys.TRAIN_OP
  train_ops = tf.compat.v1.get_collection(collection)
  done = take(Step(checked_gradients(grads_and_vars),
                   _checks.variable_of(global_step), name, options)).done
  if not tf.executing_eagerly():
    # Replaces the train op of the inner optimizer.
    tf.compat.v1.get_collection_ref(collection)[:] = [
        *train_ops, getattr(done, "op", done)]
  return done


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
    is_one_op = self._is_one_op(step)
    if step.gate and is_one_op:  # A gradient may not have to travel.
      ready = _records.when_ready(gradients)
    else:  # Nobody waits while they travel.
      if step.gate:
        step = _withheld(step)
      gradients, variables = zip(*step.grads_and_vars)
      gradients, ready = _records.at_servers(gradients, variables, near)
      step = step._replace(grads_and_vars=list(zip(gradients, variables)))
    # A gate has asked already. A step between z and x cannot be skipped.
    asks = (not step.gate and not step.is_interpolated and
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
    if step.is_interpolated or step.gate and step.gate.compensation:
      return False
    schedule = step.averages and step.averages.schedule
    return (self._native_rule(step) is not None and
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
      taken = self._update(step._replace(gate=_gate.Gate(accept)))
    with tf.control_dependencies(_records.updates(new)):
      ops.staleness_complete(ticket, step.global_step,
                             increment=not taken.counted)
    return taken._replace(counted=True)

  def _update(self, step):
    """Takes a step that was admitted, or has to ask nobody."""
    opt = self._opt
    if step.is_interpolated:
      if not _replicas.have_copies():  # Out of the replicas: an error.
        return Taken(opt.apply_gradients(step.grads_and_vars), True)
      return Taken(_rules.apply_interpolated(opt, step), True)
    averages, gate = step.averages, step.gate
    rule = self._native_rule(step)
    if rule is not None:
      take = lambda step: Taken(
          _rules.apply_gradients(opt, rule, step, counts=not gate), not gate)
      if gate and gate.compensation:
        return where_accepted(opt, step, take, in_float32=True)
      if gate:
        _create_slots(opt, step)
        step = _withheld(step)
      return take(step)
    rule = _rules.rule_of(opt)
    is_late = averages is not None and averages.schedule.is_called
    # An overridden `apply_gradients` may use the global step for more.
    counts = (not gate or is_late or
              getattr(opt.apply_gradients, "__func__", None) is not
              _Optimizer.apply_gradients)

    def apply(step):
      plan = _plan_of(step, rule)
      with tf.control_dependencies(
          [*plan.first, *check(step), *plan.catch_up()]), plan.moving():
        applied = opt.apply_gradients(
            step.grads_and_vars, name=step.name, **step.options,
            global_step=step.global_step if counts else None)
      return Taken(_after(applied, averages, plan.update,
                          None if counts else step.global_step), counts)

    return where_accepted(opt, step, apply)

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


def check(step):
  """Makes a step fail while the averages that follow it are in place.

  Args:
    step: A Step, which changes variables before its averages.

  Returns:
    The operations that the step must wait for: a list.
  """
  if step.averages is None:
    return []
  variables = [v for g, v in step.grads_and_vars
               if g is not None and isinstance(v, tf.Variable)]
  return _swap.check([
      *(s for row in step.averages.of(variables) for s in row if s is not None),
      *(s for row in step.averages.untrained for _, s in row)])


def take_inside(wrapper, step):
  """Takes an accepted step of a wrapper's inner optimizer.

  The wrapper itself counts the step, and then updates the averages of those
  around it, by `follow`.

  Args:
    wrapper: The wrapper, which may then change all rows.
    step: A Step.

  Returns:
    The `done` of the inner Taken.
  """
  with wrapper._making_state(), tf.control_dependencies(check(step)):
    return wrapper._inner._take(step._replace(
        global_step=None, name=None, averages=None, only_touched=False)).done


def where_accepted(opt, step, apply, in_float32=False):
  """Takes a step if it is accepted.

  Args:
    opt: The optimizer that takes it.
    step: A Step.
    apply: A function that takes an accepted Step and returns a Taken.
    in_float32: As in `_compensation.Compensated.take`.

  Returns:
    A Taken.
  """
  gate = step.gate
  if gate is None:
    return apply(step)
  _create_slots(opt, step)
  counted = []

  def taken():
    pairs = gate.transformed(step.grads_and_vars)
    after = lambda done: done
    if gate.compensation:
      with tf.control_dependencies(check(step)):
        pairs, after = gate.compensation.take(pairs, in_float32)
    # In this branch, a withheld gradient is the gradient itself.
    pairs = [(g if isinstance(g, (type(None), tf.IndexedSlices)) or
              g.shape.rank is not None else tf.ensure_shape(g, v.shape), v)
             for g, v in pairs]
    done, counts = apply(step._replace(grads_and_vars=pairs, gate=None))
    counted.append(counts)
    return after(done)

  done = _control_flow.cond(gate.accept, taken, _any_ref(step.grads_and_vars))
  return Taken(done, all(counted))


def follow(applied, averages):
  """Updates averages after a step that a wrapper has taken.

  Args:
    applied: An operation or tensor that runs after the step, or None.
    averages: `_plan.StepAverages`, or None.

  Returns:
    `applied`, or an operation that has also updated the averages, or None.
  """
  return applied if averages is None else _after(
      applied, averages, averages.update)


def _after(applied, averages, update, counted_by=None):
  """As `follow`.

  Args:
    applied: As there.
    averages: As there.
    update: A function of the decays of the step, which updates the averages.
    counted_by: The step variable that will count this step, or None.

  Returns:
    As `follow`.
  """
  if averages is None:
    return applied
  schedule = averages.schedule
  first = [applied] if averages.in_order and applied is not None else []

  def update_and_count():
    done = update(schedule.now(counted_by))
    return _plan.joined(schedule.count([] if done is None else [done]))

  with tf.control_dependencies(first):
    updated = _replicas.merged(update_and_count)()
  # An update that runs after the step stands for both.
  return updated if first and updated is not None else group(applied, updated)


def group(*operations, name=None):
  """An operation that runs after all `operations` that are not None."""
  operations = [op for op in operations if op is not None]
  return (None if tf.executing_eagerly() or not operations
          else tf.group(*operations, name=name))


def checked_gradients(grads_and_vars):
  """Converts gradients to tensors.

  Args:
    grads_and_vars: An iterable of (gradient, variable).

  Returns:
    A list of (tensor or IndexedSlices or None, variable).

  Raises:
    TypeError: If a gradient cannot be converted to a tensor.
  """
  pairs = _lookup_cache.Pairs(grads_and_vars)
  if {type(g) for g, _ in pairs} == {_bundle.EagerTensor}:
    return pairs
  return _lookup_cache.Pairs(
      (None if g is None else _rules.gradient(g, v), v) for g, v in pairs)


def _withheld(step):
  """A step for an op that ignores gradients if it is not accepted."""
  gate = step.gate
  return step._replace(grads_and_vars=gate.withheld(step.grads_and_vars),
                       gate=_gate.Gate(gate.accept, gate.compensation))


def _create_slots(opt, step):
  """Makes the slots of an optimizer outside of the branches of a `cond`."""
  with _names_of_non_slots(), tf.init_scope():
    opt._create_slots([v for g, v in step.grads_and_vars if g is not None])


@contextlib.contextmanager
def _names_of_non_slots():
  # In TensorFlow 1.15, the branch of a cond made the non-slot variables of the
  # inner optimizer: checkpoints hold `cond/beta1_power`. Not `cond_1` and so on
  # after other conds: workers whose graphs differ in these share the variables.
  if (tf.executing_eagerly() or
      tf.compat.v1.executing_eagerly_outside_functions() or
      tf.compat.v1.control_flow_v2_enabled()):
    yield
  else:
    outer = tf.compat.v1.get_default_graph().get_name_scope()
    with tf.name_scope(f"{outer}/cond/" if outer else "cond/"):
      yield


def _any_ref(grads_and_vars):
  return any(isinstance(v, tf.Variable) and ops.is_ref_variable(v)
             for _, v in grads_and_vars)
