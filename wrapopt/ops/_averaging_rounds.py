"""The parameter server's side of model averaging."""

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow as tf

from wrapopt._loader import ops as _raw
from wrapopt._types import (
    Float, Integer, Operation, String, Tensor, Variable, Variables)
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops import _variables
from wrapopt.ops._scalars import float64
from wrapopt.ops._scalars import int64


@_emit.not_converted
def averaging_rounds(num_workers: int, shared_name: str, container: str = "",
                     name: Optional[str] = None) -> Tensor:
  """The averaging rounds of a group of workers, on one device.

  This and the five functions after it are the parameter server's side of model
  averaging. Rounds are numbered, and one of them is open: at first round -1,
  which ends when the chief opens round 0. One of the workers is the chief. In
  each round

  - all workers `averaging_push` their values;
  - the chief waits for these values in `averaging_gather`, assigns their mean
    with `averaging_mean`, and opens the next round with `averaging_next`;
  - the other workers wait for the next round in `averaging_wait`.

  A wait holds no thread of the server. It ends with its step: when the session
  is closed, the step is cancelled, or its process is killed.

  If the variables to average are on several devices, each device has rounds of
  its own. The rounds of one device lead: the functions that wait take these.
  The others follow: a push to a later round opens it.

  Example, of a worker and a chief in one program:

  >>> rounds = wrapopt.ops.averaging_rounds(2, shared_name="example")
  >>> center = tf.Variable([0., 0.])
  >>> r = wrapopt.ops.averaging_next(rounds, 0, reset=True)
  >>> for worker, value in ("chief", [1., 2.]), ("worker", [3., 4.]):
  ...   accepted = wrapopt.ops.averaging_push(rounds, worker, r, [value])
  ...   print(accepted.numpy())
  True
  True
  >>> came = wrapopt.ops.averaging_gather(rounds, r, 2, timeout_secs=60)
  >>> wrapopt.ops.averaging_mean(rounds, r, came, [center])
  >>> center.numpy()
  array([2., 3.], dtype=float32)
  >>> print(wrapopt.ops.averaging_next(rounds, r).numpy())
  1
  >>> print(wrapopt.ops.averaging_wait(rounds, r, timeout_secs=60).numpy())
  1

  Args:
    num_workers: The number of workers, at least 1. The server holds the values
      of at most this number of workers, those of the open round.
    shared_name: A string. All graphs, sessions and processes that give the same
      name share the rounds on one device.
    container: A string: the resource container that holds the rounds, if not
      the default one.
    name: A name for the operation.

  Returns:
    A scalar resource tensor on the current device, which it must not leave.
    Each graph needs one of its own.

  Raises:
    ValueError: If `shared_name` is empty, or in a graph, if `num_workers` is
      less than 1.
    tf.errors.InvalidArgumentError: When it runs: the rounds of this name have
      another `num_workers`, or it is less than 1.

  Reference: the accumulators and the token queue of
  `tf.contrib.opt.ModelAverageOptimizer` of TensorFlow 1.15. There, a round may
  count values of another round, and a worker may wait for ever.
  """
  if not shared_name:
    raise ValueError("`shared_name` must name the rounds, got an empty string.")
  return _raw.wrapopt_averaging_rounds(
      num_workers=num_workers, shared_name=shared_name, container=container,
      name=name)


@_emit.not_converted
def averaging_push(rounds: Tensor, worker: String, round: Integer,  # pylint: disable=redefined-builtin
                   values: Sequence[Union[Tensor, Variable]],
                   name: Optional[str] = None) -> Tensor:
  """Adds a worker's values to a round.

  They replace those that the worker has pushed to the same round. They are
  refused if the round is over, is already gathered, or is below 0. A push to a
  later round than the open one opens that round. `averaging_gather` takes the
  worker for alive, whether its values are accepted or not.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    worker: A string, or a scalar string tensor: the worker's name. At most
      `num_workers` different workers may push to a round.
    round: An integer, or a scalar integer tensor or variable.
    values: A list or tuple of tensors or variables of dtype float16, bfloat16,
      float32 or float64. For `averaging_mean`, each is a vector that holds the
      elements of some centers one after another. A tensor with no other
      reference, such as the result of a `tf.concat`, is kept without a copy.
    name: A name for the operation.

  Returns:
    A scalar bool tensor: whether the values are part of the round.

  Raises:
    TypeError: If a value is of another dtype.
    ValueError: If `worker` or `round` is not a scalar. If its shape is known
      only at run time, that is a tf.errors.InvalidArgumentError.
    tf.errors.InvalidArgumentError: When it runs: the round has the values of
      `num_workers` others.
  """
  values = [_variables.read_value(value) for value in values]
  with _emit.device_of(rounds):
    values = [tf.convert_to_tensor(value) for value in values]
    for i, value in enumerate(values):
      _check.dtype(f"values[{i}]", value, _check.FLOATS)
    return _raw.wrapopt_averaging_push(rounds, worker, int64(round), values,
                                       name=name)


@_emit.not_converted
def averaging_gather(rounds: Tensor, round: Integer, min_workers: Integer,  # pylint: disable=redefined-builtin
                     timeout_secs: Float, name: Optional[str] = None) -> Tensor:
  """Waits for the workers of the open round, and closes it for others.

  It waits until all `num_workers` workers have pushed. If `min_workers` is less
  than that, it waits until `min_workers` workers and all expected workers have
  pushed. After `timeout_secs` it takes the workers that have pushed, or fails
  if they are fewer than `min_workers`.

  At first, all workers are expected. After a timeout, the workers of that round
  are expected, and all that push later, even too late for a round. So a dead
  worker delays one round, not each one, and is expected again when it is back.
  After a round with all `num_workers`, and after a reset, all are expected
  again.

  To gather a round again gives the same workers, even if they are fewer than
  the new `min_workers`.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    round: An integer, or a scalar integer tensor or variable: the open round.
    min_workers: The same, in [1, `num_workers`].
    timeout_secs: A number of seconds greater than 0, infinity for no deadline;
      or a scalar tensor or variable of any floating dtype.
    name: A name for the operation.

  Returns:
    A string tensor of shape [M]: the sorted names of the workers whose values
    make up the round, `min_workers` <= M <= `num_workers`.

  Raises:
    ValueError: In a graph: `timeout_secs` is a constant, and not greater than
      0.
    tf.errors.InvalidArgumentError: When it runs: an argument is out of range.
    tf.errors.DeadlineExceededError: When it runs: too few workers pushed in
      time.
    tf.errors.FailedPreconditionError: When it runs: another round is open, or
      was opened during the wait.
    tf.errors.CancelledError: When it runs: its step was cancelled.
    tf.errors.AbortedError: When it runs: the rounds were deleted, with all of
      their container.
  """
  with _emit.device_of(rounds):
    return _raw.wrapopt_averaging_gather(
        rounds, int64(round), int64(min_workers), float64(timeout_secs),
        name=name)


@_emit.not_converted
def averaging_mean(rounds: Tensor, round: Integer, workers: Tensor,  # pylint: disable=redefined-builtin
                   centers: Variables, value: int = 0,
                   name: Optional[str] = None) -> Optional[Operation]:
  """Assigns the mean of workers' values to variables, in place.

  In one pass over memory: each value is read once and each center written once.
  float16 and bfloat16 are computed in float32 and rounded once. It is a running
  mean, `m += (x[k] - m) / k` for k = 1, 2, ... So the mean of equal values is
  exactly that value, and the mean of large float16 values does not overflow.

  One native op serves all centers. It checks all before it changes any, and
  holds their locks. The values stay until the next round is opened: to run the
  op again gives the same mean.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`, on the device of the centers.
    round: An integer, or a scalar integer tensor or variable: the open round.
    workers: A string tensor of shape [M], from `averaging_gather`; M >= 1.
    centers: N variables on one device and of one dtype: float16, bfloat16,
      float32 or float64. One variable may stand for a sequence of one.
    value: Which of the values that each worker pushed. It is a vector of the
      centers' dtype that holds the elements of all N, in their order, each in
      row-major order.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    TypeError: If `centers` are not variables, the first is not of such a dtype,
      or some are ref variables and some are not.
    ValueError: If they are on different devices; in a graph, if they are of
      different dtypes or `value` is negative.
    tf.errors.InvalidArgumentError: When it runs: centers are of different
      dtypes or `value` is negative; a value is of another dtype or
      size, or a worker has no value of this number; `workers` is empty, or
      holds a name twice; a center is named twice.
    tf.errors.FailedPreconditionError: When it runs: another round is open, a
      worker has not pushed to it, or a center is not initialized.
  """
  centers = _check.variables("centers", centers)
  first = centers[0]
  _check.dtype("centers[0]", first, _check.FLOATS)
  _check.alike("centers", centers, "Each device has rounds of its own.")
  with _emit.device_of(first):
    arguments = {"rounds": rounds, "round": int64(round), "workers": workers,
                 "value": value, "name": name}
    if _variables.is_ref(first):
      return _emit.result([_emit.set_variable_names(
          _raw.wrapopt_averaging_mean_ref(centers=centers, **arguments),
          centers=centers)])
    return _emit.result([_raw.wrapopt_averaging_mean(
        centers=[c.handle for c in centers], T=first.dtype, **arguments)])


@_emit.not_converted
def averaging_next(rounds: Tensor, round: Integer, reset: bool = False,  # pylint: disable=redefined-builtin
                   name: Optional[str] = None) -> Tensor:
  """Ends a round and opens the next one.

  The values of the round are dropped, and all waits for its end return. Rounds
  that follow, on another device, skip to the next round if they are behind.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    round: An integer, or a scalar integer tensor or variable: the round that
      ends.
    reset: `True` for a chief that starts or restarts: ends the open round,
      ignores `round`, and all workers are expected again.
    name: A name for the operation.

  Returns:
    A scalar int64 tensor: the number of the round that is open now.

  Raises:
    tf.errors.FailedPreconditionError: When it runs: the round is already over.
  """
  with _emit.device_of(rounds):
    return _raw.wrapopt_averaging_next(rounds, int64(round), reset=reset,
                                       name=name)


@_emit.not_converted
def averaging_wait(rounds: Tensor, round: Integer, timeout_secs: Float,  # pylint: disable=redefined-builtin
                   worker: str = "", name: Optional[str] = None) -> Tensor:
  """Waits while a round is open.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    round: An integer, or a scalar integer tensor or variable. -1 waits until a
      chief opens the rounds. If the round is not open, the op returns at once.
    timeout_secs: As for `averaging_gather`.
    worker: A string: the worker that waits. The next gather expects it, too.
    name: A name for the operation.

  Returns:
    A scalar int64 tensor: the number of the round that is open then.

  Raises:
    ValueError, tf.errors.InvalidArgumentError: As `averaging_gather`, for
      `timeout_secs`.
    tf.errors.DeadlineExceededError: When it runs: the round did not end in
      time.
    tf.errors.CancelledError, tf.errors.AbortedError: As `averaging_gather`.
  """
  with _emit.device_of(rounds):
    return _raw.wrapopt_averaging_wait(
        rounds, int64(round), float64(timeout_secs), worker=worker,
        name=name)
