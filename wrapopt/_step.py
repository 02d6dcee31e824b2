"""A step on its way through the wrappers, and the optimizer that takes it.

A wrapper passes a `Step` to what it wraps, changed as the wrapper sees fit, and
gets a `Taken` back. The optimizer inside of all wrappers takes the step with
`take`.
"""

import contextlib
import typing

import tensorflow as tf

from wrapopt import _bundle
from wrapopt import _control_flow
from wrapopt import _fused
from wrapopt import _lookup_cache
from wrapopt import ops

_Optimizer = tf.compat.v1.train.Optimizer


class Averages(typing.NamedTuple):
  """Averages of the variables that a step is to update.

  Attributes:
    shadows: A function that gives rows of averages of a list of variables, one
      row for each decay.
    decays: A function that gives the decays of this step. It takes the step
      variable that is yet to count this step, or None.
    begin: A function that is called before a step that `update` follows. It
      takes the step's gradients and whether the step leaves rows alone that a
      sparse gradient lacks. It returns operations to run before the step, and
      what `update` must know.
    update: A function of the operation that takes the step (or None), of what
      `decays` takes, and of what `begin` has returned for it, if anything. It
      updates the averages, and returns an operation that has done both (or
      None).
    last: Whether they must be updated by an operation of their own, after the
      step is taken and counted.
    count_update: A function of operations that have updated the averages, and of
      whether the step is accepted. It counts the update where that is so, and
      returns the operations to run for all of it, a list. `update` calls it by
      itself.
  """
  shadows: typing.Callable[[list[tf.Variable]], list[list[tf.Variable]]]
  decays: typing.Callable[[typing.Any], list[typing.Any]]
  begin: typing.Callable[[list, bool], tuple[list, typing.Any]]
  update: typing.Callable[..., typing.Any]
  last: bool
  count_update: typing.Callable[[list, typing.Any], list]


class Step(typing.NamedTuple):
  """What `apply_gradients` is asked for.

  Attributes:
    grads_and_vars: A list of (gradient, variable). A gradient is a tensor,
      `tf.IndexedSlices` or None.
    global_step: The step variable to increment, or None.
    name: As in `tf.compat.v1.train.Optimizer.apply_gradients`.
    options: What else the inner optimizer's `apply_gradients` takes.
    accept: True, or a scalar bool tensor. If it is false, nothing is changed.
    transform: A function that is applied to each accepted gradient, or None.
    averages: The Averages that this step updates, or None.
    one_pass: Whether a native op is to take the step where there is one. None
      if no wrapper has asked for it; False if one has forbidden it.
  """
  grads_and_vars: list
  global_step: tf.Variable | None = None
  name: str | None = None
  options: dict[str, typing.Any] = {}
  accept: typing.Any = True
  transform: typing.Callable | None = None
  averages: Averages | None = None
  one_pass: bool | None = None

  def with_one_pass(self, fused):
    """This step as a wrapper whose argument is `fused` wants it taken."""
    allowed = fused is not False and self.one_pass is not False
    return self._replace(one_pass=allowed)


class Taken(typing.NamedTuple):
  """What has become of a Step.

  Attributes:
    done: An operation or tensor that is there when the step was taken or was
      found to be not accepted; None if there is none, as in eager mode.
    counted: Whether `global_step` is incremented by it.
  """
  done: typing.Any
  counted: bool


# What an `apply_gradients` of TensorFlow takes beside what a Step has of its own.
_OPTIONS = {"skip_gradients_aggregation"}


def take(opt, step):
  """Has an optimizer that is no wrapper of this package take a step.

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
  # An optimizer with a method of its own may want the step for more.
  counts = (not is_gated or is_late or
            type(opt).apply_gradients is not _Optimizer.apply_gradients)

  def apply(step):
    first, of_step = averages.begin(
        step.grads_and_vars, _fused.leaves_rows(opt)) if averages else ([], None)
    with tf.control_dependencies(first):
      applied = opt.apply_gradients(
          step.grads_and_vars, global_step=step.global_step if counts else None,
          name=step.name, **step.options)
    return Taken(follow(applied, averages,
                        None if counts else step.global_step, of_step), counts)

  return where_accepted(opt, step, apply)


def where_accepted(opt, step, apply):
  """Takes a step if and where it is accepted.

  Args:
    opt: The optimizer that takes it.
    step: A Step.
    apply: A function that takes a Step that is accepted, and gives a Taken.

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
    applied: The operation or tensor that tells that the step was taken, or None.
    averages: Averages, or None.
    counted_by: The step variable that is yet to count this step, or None.
    of_step: What `averages.begin` has returned for `update`, if it was called.

  Returns:
    `applied`, or an operation that has updated the averages too, or None.
  """
  return (applied if averages is None
          else averages.update(applied, counted_by, of_step))


def group(*operations, name=None):
  """An operation that has run all of these, of which some may be None."""
  operations = [op for op in operations if op is not None]
  return (None if tf.executing_eagerly() or not operations
          else tf.group(*operations, name=name))


def checked_gradients(grads_and_vars):
  """[(tensor or IndexedSlices or None, variable)].

  Args:
    grads_and_vars: What a user gave, an iterable.

  Returns:
    A list.

  Raises:
    TypeError: If what should be a gradient cannot be made a tensor.
  """
  pairs = _lookup_cache.Pairs(grads_and_vars)
  if {type(g) for g, _ in pairs} == {_bundle.EagerTensor}:
    return pairs
  return _lookup_cache.Pairs(
      (None if g is None else _fused.gradient(g, v), v) for g, v in pairs)


def _create_slots(opt, step):
  """Makes the slots of an optimizer before a branch of a `cond` does."""
  with _names_of_non_slots(), tf.init_scope():
    opt._create_slots([v for g, v in step.grads_and_vars if g is not None])


@contextlib.contextmanager
def _names_of_non_slots():
  # In TensorFlow 1.15 the branch of a cond made the inner optimizer's variables
  # that are no slots: checkpoints hold `cond/beta1_power`.
  if (tf.executing_eagerly() or
      tf.compat.v1.executing_eagerly_outside_functions() or
      tf.compat.v1.control_flow_v2_enabled()):
    yield
  else:
    with tf.name_scope("cond"):
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

  A gradient that has to travel to the variable's machine does so only if it is
  accepted: else something empty goes in its place. On one machine it stays what
  it is, for there is nothing to save, unless it is to be transformed.

  Args:
    step: A Step.

  Returns:
    Its `grads_and_vars` with other gradients.
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

  # Not a shape that is known: there are two.
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
