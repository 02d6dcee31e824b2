"""A step that wrappers pass to their inner optimizers.

A wrapper passes a `Step`, which it may change, to its inner optimizer, and gets
a `Taken` back. The optimizer inside of all wrappers takes the step with `take`.
"""

import contextlib
import typing

import tensorflow as tf

from wrapopt import _bundle
from wrapopt import _control_flow
from wrapopt import _exchange
from wrapopt import _fused
from wrapopt import _lazy
from wrapopt import _lookup_cache
from wrapopt import ops

_Optimizer = tf.compat.v1.train.Optimizer


class Averages(typing.NamedTuple):
  """The averages that a step must update.

  Attributes:
    shadows: A function of a list of variables. It returns rows of their
      averages, one row for each decay.
    decays: A function of the step variable that will count this step, or of
      None. It returns the decays of this step.
    begin: A function to call before a step. Its arguments are the gradients of
      the step, their variables, and whether the step changes only the rows that
      a sparse gradient touches. It returns the results of `_lazy.before_step`.
    update: A function to call after the step. Its arguments are the operation
      that takes the step (or None), the argument of `decays`, and the second
      result of `_begin`, if it was called. It updates and counts the averages,
      and returns an operation for the step and the update (or None).
    last: Whether a separate operation must update the averages, after the step
      is taken and counted.
    count_update: A function of the operations that update the averages, and of
      whether the step is accepted. It counts an accepted update, and returns
      the list of operations to run. `update` calls it itself.
  """
  shadows: typing.Callable[[list[tf.Variable]], list[list[tf.Variable]]]
  decays: typing.Callable[[typing.Any], list[typing.Any]]
  begin: typing.Callable[[list, list, bool], tuple[list, list]]
  update: typing.Callable[..., typing.Any]
  last: bool
  count_update: typing.Callable[[list, typing.Any], list]


class Step(typing.NamedTuple):
  """A request to `apply_gradients`.

  Attributes:
    grads_and_vars: A list of (gradient, variable). A gradient is a tensor,
      `tf.IndexedSlices` or None.
    global_step: The step variable to increment, or None.
    name: As in `tf.compat.v1.train.Optimizer.apply_gradients`.
    options: Further arguments of the inner optimizer's `apply_gradients`.
    accept: True, or a scalar bool tensor. If it is false, nothing changes.
    transform: A function that is applied to each accepted gradient, or None.
    averages: The Averages that this step updates, or None.
    one_pass: Whether a native op takes the step if there is one. None if no
      wrapper has set it; False if one has disabled it.
    leaves_rows: False if a wrapper may change rows that no gradient touches,
      after the step. Averages must not lag behind then.
  """
  grads_and_vars: list
  global_step: tf.Variable | None = None
  name: str | None = None
  options: dict[str, typing.Any] = {}
  accept: typing.Any = True
  transform: typing.Callable | None = None
  averages: Averages | None = None
  one_pass: bool | None = None
  leaves_rows: bool = True

  def with_one_pass(self, fused):
    """This step with `one_pass` set by the argument `fused` of a wrapper."""
    allowed = fused is not False and self.one_pass is not False
    return self._replace(one_pass=allowed)


class Taken(typing.NamedTuple):
  """The result of a Step.

  Attributes:
    done: An operation or tensor that runs after the step was taken or skipped;
      None if there is none, as in eager mode.
    counted: Whether the step increments `global_step`.
  """
  done: typing.Any
  counted: bool


# Arguments of TensorFlow's `apply_gradients` that are not attributes of a Step.
_OPTIONS = {"skip_gradients_aggregation"}


def take(opt, step):
  """Takes a step with an optimizer that is not a wrapper of this package.

  Args:
    opt: A `tf.compat.v1.train.Optimizer`.
    step: A Step.

  Returns:
    A Taken.
  """
  is_gated = step.accept is not True
  averages = step.averages
  is_late = averages is not None and averages.last
  rule = _fused.rule_of(opt) if step.one_pass else None
  if (rule is not None and not is_late and step.options.keys() <= _OPTIONS and
      _fused.can_apply(opt, step.grads_and_vars)):
    if is_gated:
      _create_slots(opt, step)
      step = step._replace(grads_and_vars=_hold_back(step))
    return Taken(_fused.apply_gradients(opt, rule, step), not is_gated)
  # An overridden `apply_gradients` may use the global step for more.
  counts = (not is_gated or is_late or
            type(opt).apply_gradients is not _Optimizer.apply_gradients)

  def apply(step):
    first, of_step = _begin(opt, step)
    averages = [s for _, of_variable in of_step.values() for s in of_variable]
    with tf.control_dependencies(first), _lazy.moving(averages):
      applied = opt.apply_gradients(
          step.grads_and_vars, global_step=step.global_step if counts else None,
          name=step.name, **step.options)
    return Taken(follow(applied, step.averages,
                        None if counts else step.global_step, of_step), counts)

  return where_accepted(opt, step, apply)


def _begin(opt, step):
  """Prepares averages for a step that an optimizer takes without a native op.

  Args:
    opt: The optimizer.
    step: A Step.

  Returns:
    The operations that the step must wait for. And for each variable of which
    averages move in the touched rows only, by its reference: the indices of the
    rows, which have caught up, and the averages.
  """
  grads_and_vars = [(g, v) for g, v in step.grads_and_vars
                    if g is not None and isinstance(v, tf.Variable)]
  grads, variables = [g for g, _ in grads_and_vars], [
      v for _, v in grads_and_vars]
  if step.averages is None:
    return _lazy.before_step(grads, variables)[0], {}
  first, lazy = step.averages.begin(
      grads, variables, step.leaves_rows and _fused.leaves_rows(opt) and
      # A variable that is listed twice is updated twice.
      len({v.ref() for v in variables}) == len(variables))
  first += check(step)
  rows = {v.ref(): (g.indices, averages)
          for g, v, averages in zip(grads, variables, lazy) if averages}
  for indices, averages in rows.values():
    first += [op for s in averages if (op := s.catch_up(indices)) is not None]
  return first, rows


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
  return _exchange.check(
      s for row in step.averages.shadows(variables) for s in row)


def where_accepted(opt, step, apply):
  """Takes a step if it is accepted.

  Args:
    opt: The optimizer that takes it.
    step: A Step.
    apply: A function that takes an accepted Step and returns a Taken.

  Returns:
    A Taken.
  """
  if step.accept is True:
    return apply(step)
  _create_slots(opt, step)
  counted = []

  def taken():
    done, counts = apply(step._replace(
        grads_and_vars=_transformed(step), accept=True, transform=None))
    counted.append(counts)
    return done

  done = _control_flow.cond(step.accept, taken, _any_ref(step.grads_and_vars))
  return Taken(done, all(counted))


def follow(applied, averages, counted_by=None, of_step=None):
  """Updates averages after a step.

  Args:
    applied: An operation or tensor that runs after the step, or None.
    averages: Averages, or None.
    counted_by: The step variable that will count this step, or None.
    of_step: The second result of `_begin`, if it was called.

  Returns:
    `applied`, or an operation that has also updated the averages, or None.
  """
  return (applied if averages is None
          else averages.update(applied, counted_by, of_step))


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
      (None if g is None else _fused.gradient(g, v), v) for g, v in pairs)


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


# Gradients


def _transformed(step):
  if step.transform is None:
    return step.grads_and_vars
  return [(g if g is None else _on_device_of(g, step.transform), v)
          for g, v in step.grads_and_vars]


def _hold_back(step):
  """Gradients for an op that ignores them if the step is not accepted.

  If a gradient and its variable are on different machines, an empty tensor
  replaces a gradient that is not accepted, to save the transfer. On one
  machine, a gradient is not changed, unless `step.transform` applies.

  Args:
    step: A Step.

  Returns:
    The `grads_and_vars` of the step with these gradients.
  """
  if tf.executing_eagerly():
    return _transformed(step)
  held = []
  for g, v in step.grads_and_vars:
    if g is not None and (step.transform is not None or _travels(g, v)):
      g = _on_device_of(
          g, lambda g: _held_back(step.accept, g, step.transform))
    held.append((g, v))
  return held


def _held_back(accept, g, transform):
  sparse = isinstance(g, tf.IndexedSlices)

  def admitted():
    h = transform(g) if transform else g
    return ([tf.identity(h.values), tf.identity(h.indices)] if sparse
            else [tf.identity(h)])

  def dropped():
    parts = (g.values, g.indices) if sparse else (g,)
    return [tf.zeros([0], part.dtype) for part in parts]

  # The static shape is unknown, because the branches have different ones.
  parts = tf.cond(accept, admitted, dropped)
  if not sparse:
    return parts[0] if isinstance(parts, (list, tuple)) else parts
  return tf.IndexedSlices(*parts, dense_shape=g.dense_shape)


def _on_device_of(g, function):
  with tf.device(None), tf.device(g.device):
    return function(g)


def _travels(g, v):
  """Whether a gradient is on another machine of a cluster than its variable."""
  def task(device):
    spec = tf.DeviceSpec.from_string(device or "")
    return spec.job, spec.replica or 0, spec.task or 0
  home = task(v.device)
  return home[0] not in (None, "localhost") and task(g.device) != home
