"""Numbers for updates, and the gate that admits them by their staleness."""

import typing
from typing import Optional

import tensorflow as tf
from tensorflow.python.eager import context

from wrapopt import _bundle
from wrapopt._loader import ops as _raw
from wrapopt._types import Integer, Operation, Tensor, Variable
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops._scalars import int64


def _check_counts(subject, variable):
  """Raises an error unless a variable may count updates."""
  _check.variable(subject, variable)
  # A variable of a TensorFlow 1 graph goes where the op can run.
  if (isinstance(getattr(variable, "handle", None), _bundle.EagerTensor) and
      tf.DeviceSpec.from_string(variable.device).device_type == "GPU"):
    raise ValueError(
        f"`{subject}` must be on a CPU, which counts the updates, got "
        f"'{variable.name}' on {variable.device}. Make it in a block `with "
        "tf.device(\"CPU:0\"):`.")


class StalenessVerdict(typing.NamedTuple):
  """The decision of `staleness_gate`.

  Attributes:
    accept: A scalar bool tensor: whether the update is admitted.
    staleness: A scalar int64 tensor: how many updates its weights may miss. It
      is negative if the step was set back since the record. -1 if an earlier
      try with its token is over.
    ticket: A scalar resource tensor, for `staleness_complete`. It owns the
      admission: an update is aborted if the last reference to its ticket is
      dropped before the update is complete.
    number: A scalar int64 tensor: the number of the update, see `begin_update`;
      -1 if it is not admitted.
  """
  accept: tf.Tensor
  staleness: tf.Tensor
  ticket: tf.Tensor
  number: tf.Tensor


@_emit.not_converted
def staleness_record(step: Variable,
                     name: Optional[str] = None) -> tuple[Tensor, Tensor]:
  """Records the step, before a worker reads the weights.

  Example: see `staleness_gate`.

  Args:
    step: A scalar variable on a CPU, int32 or int64: the number of completed
      updates.
    name: A name for the operation.

  Returns:
    Two scalar int64 tensors: the argument `recorded` of `staleness_gate`, and
    the number of updates in flight: admitted, but not complete.

  Raises:
    TypeError: If `step` is not a variable.
    ValueError: If it is on a GPU. In a graph: it is of another dtype or no
      scalar.
    tf.errors.InvalidArgumentError: The same, when it runs.
    tf.errors.FailedPreconditionError: When it runs: it is not initialized.
  """
  _check_counts("step", step)
  with _emit.device_of(step):
    return tuple(_emit.of_variables(
        "staleness_record", {"step": step}, name=name))


@_emit.not_converted
def staleness_gate(step: Variable, stale_counter: Variable, histogram: Variable,
                   recorded: Tensor, limit: Integer,
                   name: Optional[str] = None, *,
                   token: Integer = -1) -> StalenessVerdict:
  """Admits an update if its weights miss at most `limit` other updates.

  The staleness of an update is the number of updates that its weights may miss:
  those in flight when its worker recorded the step, and those admitted since.
  The update is admitted if `0 <= limit` and `staleness <= limit`. Decision and
  counting are one atomic step, whatever the number of threads, sessions and
  processes. So the weights of an update never miss more than `limit` others
  when it is admitted.

  An admitted update is in flight until `staleness_complete`. If its step fails
  or its worker dies first, its ticket is dropped, and the update is aborted. It
  may have changed weights, so it counts in the staleness of others like a
  complete update.

  Example:

  >>> step = tf.Variable(0, dtype=tf.int64)
  >>> counter = tf.Variable(0.0)
  >>> histogram = tf.Variable(tf.zeros([2, 4], tf.int64))
  >>> recorded, _ = wrapopt.ops.staleness_record(step)
  >>> for _ in range(2):  # Two updates from the same weights.
  ...   verdict = wrapopt.ops.staleness_gate(
  ...       step, counter, histogram, recorded, limit=0)
  ...   print(verdict.accept.numpy(), verdict.staleness.numpy())
  ...   wrapopt.ops.staleness_complete(verdict.ticket, step)
  True 0
  False 1
  >>> print(step.numpy(), counter.numpy())
  1 1.0

  Args:
    step: A scalar variable, int32 or int64: the number of completed updates.
    stale_counter: A scalar float32 variable: the number of dropped updates.
    histogram: An int64 variable of shape [2, B]: how many updates of each
      staleness were admitted ([0]) and dropped ([1]). The last bucket also
      counts those staler than B - 1. The first also counts those below 0, which
      occur if the step is set back. An update that is aborted counts until the
      next call.
    recorded: An int64 scalar, from `staleness_record`.
    limit: An integer, or a scalar integer tensor or variable. If it is
      negative, every update is dropped.
    name: A name for the operation.
    token: An integer, or a scalar integer tensor, that is the same for all
      tries of an update and different for all others; -1, or any negative
      number, for none. If an earlier try is complete or was dropped, this one
      is not admitted and not counted: `accept` is False, `staleness` and
      `number` are -1, and `staleness_complete` ignores its ticket. If the
      earlier try was aborted, this one is an update as any other. If the
      earlier one is in flight, the op waits for its end, but no longer than a
      second: then the earlier one will not be counted.

  Returns:
    A `StalenessVerdict`.

  Raises:
    TypeError: If a variable is not one.
    ValueError: If a variable is on a GPU. In a graph: a variable is of another
      dtype or misshapen.
    tf.errors.InvalidArgumentError: The same, when it runs, or a variable is
      named twice. Nothing is changed then.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.

  Reference: `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15,
  whose check and update are not atomic.
  """
  _check_counts("step", step)
  _check_counts("stale_counter", stale_counter)
  _check_counts("histogram", histogram)
  with _emit.device_of(step):
    return StalenessVerdict(*_emit.of_variables(
        "staleness_gate", {"step": step, "stale_counter": stale_counter,
                           "histogram": histogram},
        recorded=int64(recorded), limit=int64(limit), token=int64(token),
        name=name))


def take_aborted_back(step, histogram):
  """Takes aborted updates out of a histogram, in eager mode.

  The next `staleness_gate` would do so. Here it is called for an update that it
  refuses and that counters of its own count, so that nothing else changes.

  Args:
    step: As in `staleness_gate`.
    histogram: As there.
  """
  with _emit.device_of(step):
    counters = []
    # Not by tf.Variable, which is a strategy's variable in its scope.
    for zeros in tf.zeros([]), tf.zeros(histogram.shape, tf.int64):
      handle = tf.raw_ops.VarHandleOp(dtype=zeros.dtype, shape=zeros.shape,
                                      shared_name=context.anonymous_name())
      tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
      counters.append(handle)
    _raw.wrapopt_staleness_gate(step.handle, *counters, recorded=0, limit=-1,
                                token=-1)
    admitted, refused = tf.unstack(tf.raw_ops.ReadVariableOp(
        resource=counters[1], dtype=tf.int64))
    tf.raw_ops.AssignAddVariableOp(
        resource=histogram.handle,
        value=tf.stack([admitted, tf.zeros_like(refused)]))


@_emit.not_converted
def begin_update(
    step: Variable, name: Optional[str] = None, *,
    token: Integer = -1) -> tuple[Tensor, Tensor, Tensor]:
  """Begins an update, and gives it a number that no other update has.

  For workers that count their updates in one variable, and need the count for
  the update: for Adam's correction of the bias, or a schedule. To read the
  variable and to increment it later would give several updates one number.

  The number is the least that no update in flight or complete has. If the step
  of an update fails or its worker dies, the next update gets its number. So
  after N updates, the step is N and they had the numbers 0 to N - 1, if nothing
  but `staleness_complete` changes the step.

  Example:

  >>> step = tf.Variable(0, dtype=tf.int64)
  >>> _, one, ticket = wrapopt.ops.begin_update(step)
  >>> _, two, lost = wrapopt.ops.begin_update(step)
  >>> print(one.numpy(), two.numpy(), step.numpy())
  0 1 0
  >>> wrapopt.ops.staleness_complete(ticket, step)
  >>> del lost
  >>> print(wrapopt.ops.begin_update(step)[1].numpy(), step.numpy())
  1 1

  Args:
    step: A scalar variable, int32 or int64: the number of completed updates.
    name: A name for the operation.
    token: As in `staleness_gate`.

  Returns:
    Three scalar tensors: whether to take the update, a bool, which is false if
    an earlier try with its token is over; the number, int64, which is -1 then;
    and the ticket, a resource, for `staleness_complete`, as in a
    `StalenessVerdict`.

  Raises:
    As `staleness_record`.
  """
  _check_counts("step", step)
  with _emit.device_of(step):
    return tuple(_emit.of_variables(
        "begin_update", {"step": step}, token=int64(token), name=name))


@_emit.not_converted
def staleness_complete(ticket: Tensor, step: Variable, increment: bool = True,
                       name: Optional[str] = None) -> Optional[Operation]:
  """Ends an update that was admitted, and ignores a dropped one.

  Run it after all changes of the update.

  Example: see `staleness_gate`.

  Args:
    ticket: From `staleness_gate` or `begin_update`.
    step: The step variable of that call.
    increment: Whether to increment the step, atomically with the completion. If
      it is False, increment the step between the changes and this op.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    TypeError, ValueError: As `staleness_record`.
    tf.errors.InvalidArgumentError: When it runs: `step` is not that gate's.
    tf.errors.FailedPreconditionError: When it runs: the update is already
      complete.
  """
  _check_counts("step", step)
  with _emit.device_of(step):
    return _emit.result([_emit.of_variables(
        "staleness_complete", {"step": step}, ticket=ticket,
        increment=increment, name=name)])
