"""Public functions over the raw ops: many variables in one native call.

They take variables, not tensors: resource variables (the default of
TensorFlow 2) and the ref variables of TensorFlow 1 graphs. They run eagerly,
inside a `tf.function`, and in a `tf.Graph`.

`apply`, `averaging_assign`, `ema_update` and `exchange` can also be part of a
program that XLA compiles, for CPU, GPU or TPU: in a
`tf.function(jit_compile=True)`, or by autoclustering. Such a program updates
resource variables in place. On a CPU, it calls the CPU kernels of `apply`,
`ema_update`, `catch_up` and `sparse_ema_update`. All else is plain HLO. Numbers
of plain HLO agree with those of the CPU's kernels to rounding, but for subnormal
numbers on a GPU. What is wrong with shapes, dtypes and numbers that are known
when it is compiled is an error then. A decay or an index out of range that is
known only when the program runs is an error of a call. Plain HLO cannot refuse
it: an index out of range is left out, and of a decay, rate or weight out of
range comes what the formula gives. `read_packed`
and `assign_packed` are not compiled. The others are the parameter server's side
of asynchronous training, and run on the host only.

In a `tf.function` that XLA does not compile, `apply` and `ema_update` take the
handles of all their variables as one tensor: TensorFlow hands over each tensor
that a function captures at a price, in every call. They run in program order
with all else that takes one of the variables. `tf.saved_model.save` saves such a
`tf.function`, and `jit_compile=True` compiles it, since both trace it once more;
a concrete function of it they refuse.

Subnormal numbers, those between zero and the smallest normal number, are zero
to arithmetic, with their sign: operands and results, of float32, bfloat16 and
float64 (below 2^-126, 2^-126 and 2^-1022). TensorFlow's own ops and XLA compute
so on a CPU, where subnormal numbers may be slow. Subnormal float16 numbers are
normal float32 numbers, and count. On a GPU, too, the ops' kernels compute so, as
TensorFlow's do, but float64 keeps its subnormal numbers, which a GPU cannot
flush. What XLA compiles for a GPU keeps those of float32 too, unless
`XLA_FLAGS=--xla_gpu_ftz=true` is set. On a CPU a copy, such as of decay 0 or
rate 1, keeps all bits; on a GPU it is arithmetic, too.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import math
import numbers
import re
import typing
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf

from wrapopt import _bundle
from wrapopt import _native
from wrapopt._loader import ops as _raw
from wrapopt._types import (
    Bool, Float, Gradient, Integer, Operation, String, Tensor, Variable,
    Variables)

__all__ = [
    "StalenessVerdict",
    "apply",
    "assign_packed",
    "averaging_assign",
    "averaging_gather",
    "averaging_mean",
    "averaging_next",
    "averaging_push",
    "averaging_rounds",
    "averaging_wait",
    "catch_up",
    "ema_update",
    "exchange",
    "read_packed",
    "sparse_ema_update",
    "staleness_complete",
    "staleness_gate",
    "staleness_record",
]

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_LOW_PRECISION = (tf.float16, tf.bfloat16)

# AutoGraph would rewrite their loops over variables, whose number is known, and
# take longer for that than for all else while a function is traced.
not_converted = tf.autograph.experimental.do_not_convert


@not_converted
def averaging_assign(targets: Any, sources: Sequence[Any], weights: Any = None,
                     rate: Float = 1.0, use_locking: bool = True,
                     name: Optional[str] = None) -> Optional[Operation]:
  """Moves variables towards the weighted mean of others, in place.

  For each variable with sources `x[0], x[1], ...` and targets `t[0], t[1], ...`

      m = weights[0] * x[0] + weights[1] * x[1] + ...
      t[j] += rate * (m - t[j])

  in one pass over memory: each source is read once and each target written
  once, however many they are. A target may be a source of its own mean: all of
  them see the values from before. float16 and bfloat16 are computed in float32
  and rounded once, so that a mean of large numbers does not overflow.

  One native op serves all variables that share a device and dtypes. It checks
  all of its variables before it changes any, and holds their locks, so that it
  is atomic to other ops of wrapopt and to TensorFlow's own locking updates.

  Example:

  >>> a, b, center = (tf.Variable([x, 0.]) for x in (1., 5., 0.))
  >>> wrapopt.ops.averaging_assign([center], [[a], [b]])
  >>> center.numpy()
  array([3., 0.], dtype=float32)

  A worker and a center draw each other nearer, as in elastic averaging with the
  moving rate 1/4: the mean is half way between them, so the rate is twice that.

  >>> wrapopt.ops.averaging_assign([[a], [b]], [[a], [b]], rate=0.5)
  >>> a.numpy(), b.numpy()
  (array([2., 0.], dtype=float32), array([4., 0.], dtype=float32))

  Args:
    targets: N variables of dtype float16, bfloat16, float32 or float64; or M
      lists or tuples of N variables, where each has M targets. One variable may
      stand for a sequence of one.
    sources: N variables or tensors; or S lists or tuples of N. They have the
      shape of their targets. They and the targets of one variable are of one
      dtype, but for some that are float32 where others are float16, or where
      others are bfloat16. Of a variable on another device, pass what
      `read_value()` returns.
    weights: S finite numbers, scalar tensors or variables, or one vector of
      them; `None` for 1 / S each, the mean. Their sum need not be 1. A source
      of weight 0 does not count, infinity and NaN included. The sum is taken in
      their order, but of a variable's sources, those that are variables come
      before those that are tensors.
    rate: A number in [0, 1], or a scalar tensor or variable of any floating
      dtype. 1 assigns the mean, whatever the targets held; 0 leaves them alone.
    use_locking: Whether the targets are locked against other updates.
    name: A name for the operation.

  Returns:
    The `tf.Operation` in a `tf.compat.v1` graph, to be run; `None` in eager
    mode and inside a `tf.function`, which runs it in program order.

  Raises:
    TypeError: If `targets` are not variables, or dtypes or kinds of variables
      do not go together.
    ValueError: If numbers of variables, of weights or shapes do not match, a
      number is out of range, one target is named twice, or a target is a source
      of another variable's mean.
    tf.errors.InvalidArgumentError: When it runs: a weight or rate tensor out of
      range or NaN, or what could not be known before.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.

  References: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging
  SGD", NeurIPS 2015; Izmailov et al., "Averaging weights leads to wider optima
  and better generalization", UAI 2018 (`rate` 1 / (n + 1) for the n-th model
  after the first); Zhang, Lucas, Hinton and Ba, "Lookahead optimizer", NeurIPS
  2019 (targets and sources fast and slow, weights alpha and 1 - alpha).
  """
  targets = [(subject, _variables(subject, row))
             for subject, row in _rows("targets", targets)]
  count = len(targets[0][1])
  with tf.name_scope(name or "AveragingAssign"):
    sources = _rows("sources", sources)
    for what, rows in ("target", targets), ("source", sources):
      for subject, row in rows:
        if len(row) != count:
          raise ValueError(f"`{subject}` must hold one {what} for each of the "
                           f"{count} variables, got {len(row)}. Several "
                           f"{what}s of each are several lists.")
    sources = [(subject, _sources(subject, row, targets[0][1]))
               for subject, row in sources]
    weights = _weights(weights, len(sources))
    if isinstance(rate, numbers.Real) and not 0 <= float(rate) <= 1:
      raise ValueError(f"`rate` must be in [0, 1], got {rate}.")

    _check_targets(targets, sources)
    groups = collections.defaultdict(list)
    for i, first in enumerate(targets[0][1]):
      dtype = first.dtype.base_dtype
      like = f"{targets[0][0]}[{i}]"
      for subject, row in targets + sources:
        _check_kind(f"{subject}[{i}]", row[i], like, first)
        dtype = _check_mixed_dtype(f"{subject}[{i}]", row[i], dtype)
        _check_shape(f"{subject}[{i}]", row[i], like, first)
      groups[is_ref_variable(first), first.device, dtype,
             tuple(row[i].dtype.base_dtype for _, row in targets),
             tuple((isinstance(row[i], tf.Variable), row[i].dtype.base_dtype)
                   for _, row in sources)].append(i)
    updates = []
    for (is_ref, _, dtype, _, kinds), members in groups.items():
      flat = lambda rows: [row[i] for row in rows for i in members]  # pylint: disable=cell-var-from-loop
      # The op takes variables before tensors.
      order = sorted(range(len(kinds)), key=lambda s: not kinds[s][0])
      written = flat([row for _, row in targets])
      read = flat([sources[s][1] for s in order if kinds[s][0]])
      tensors = flat([sources[s][1] for s in order if not kinds[s][0]])
      with host_of(written[0]):
        arguments = {
            "tensors": tensors, "weights": _weight_vector(weights, order),
            "rate": float64(rate), "N": len(members), "T": dtype,
            "use_locking": use_locking}
      with device_of(written[0]):
        if is_ref:
          update = _raw.wrapopt_averaging_assign_ref(written, read, **arguments)
          _not_with_tensors(update, written[0])
          updates.append(_named(update, targets=written, sources=read))
        else:
          updates.append(_raw.wrapopt_averaging_assign(
              [t.handle for t in written], [s.handle for s in read],
              **arguments))
    return _result(updates)


@not_converted
def averaging_rounds(num_workers: int, shared_name: str, container: str = "",
                     name: Optional[str] = None) -> Tensor:
  """The rounds of averaging that a group of workers makes, on one device.

  This and the five functions after it are the parameter server's side of model
  averaging. Rounds are numbered, and one of them is open: at first -1, a round
  like others for workers that do not wait until their chief opens round 0. In
  each round, all workers
  `averaging_push` their values; one of them, the chief, waits in
  `averaging_gather` for those who come, takes the mean of their values with
  `averaging_mean`, and opens the next round with `averaging_next`; the others
  `averaging_wait` for that.

  No thread of the server is held by those who wait. A wait ends with its step:
  when the session is closed, the step is cancelled, or its process is killed.

  Where the variables to average are on several devices, each has rounds of its
  own. Those of one device lead: workers are gathered and waited for there. The
  others' follow: a push to a later round opens it.

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
    num_workers: How many workers there are, at least 1. At most so many sets of
      values are held, those of the open round.
    shared_name: A string. Who gives the same name, from whatever graph, session
      or process, shares the rounds that are on one device.
    container: A string: the resource container that holds the rounds, if not
      the default one.
    name: A name for the operation.

  Returns:
    A scalar resource tensor on the current device, which it must not leave. It
    is made anew in each graph.

  Raises:
    ValueError: If `num_workers` is less than 1, or `shared_name` is empty.
    tf.errors.InvalidArgumentError: When it runs: the rounds of this name have
      another `num_workers`.

  Reference: the accumulators and the token queue of
  `tf.contrib.opt.ModelAverageOptimizer` of TensorFlow 1.15. There, values of one
  round may count in another, and who waits waits for ever.
  """
  if num_workers < 1:
    raise ValueError(f"`num_workers` must be at least 1, got {num_workers}.")
  if not shared_name:
    raise ValueError("`shared_name` must name the rounds, got an empty string.")
  return _raw.wrapopt_averaging_rounds(
      num_workers=num_workers, shared_name=shared_name, container=container,
      name=name)


@not_converted
def averaging_push(rounds: Tensor, worker: String, round: Integer,  # pylint: disable=redefined-builtin
                   values: Sequence[Union[Tensor, Variable]],
                   name: Optional[str] = None) -> Tensor:
  """Leaves a worker's values with a round.

  They replace those that the worker left with the same round, and are refused
  where it is over, or gathered already, or below 0. A round that is yet to come
  is opened by this. Accepted or not, `averaging_gather` takes the worker for
  alive.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    worker: A string, or a scalar string tensor: the worker's name. At most
      `num_workers` different ones may push to a round.
    round: An integer, or a scalar integer tensor or variable.
    values: A list or tuple of tensors or variables of dtype float16, bfloat16,
      float32 or float64. For `averaging_mean`, each is a vector that holds the
      elements of some centers one after another. What nobody else holds, such
      as the result of a `tf.concat`, is kept without a copy.
    name: A name for the operation.

  Returns:
    A scalar bool tensor: whether the values are part of the round.

  Raises:
    TypeError: If a value is of another dtype.
    tf.errors.InvalidArgumentError: When it runs: the round has the values of
      `num_workers` others. ValueError where `worker` or `round` is known to be
      no scalar.
  """
  values = [_read(value) for value in values]
  with device_of(rounds):
    values = [tf.convert_to_tensor(value) for value in values]
    for i, value in enumerate(values):
      _check_dtype(f"values[{i}]", value, _FLOATS)
    return _raw.wrapopt_averaging_push(rounds, worker, _int64(round), values,
                                       name=name)


@not_converted
def averaging_gather(rounds: Tensor, round: Integer, min_workers: Integer,  # pylint: disable=redefined-builtin
                     timeout_secs: Float, name: Optional[str] = None) -> Tensor:
  """Waits for the workers of the open round, and closes it for others.

  It waits until all `num_workers` have pushed; where `min_workers` is less than
  that, only until `min_workers` have, and with them all who are expected. When
  `timeout_secs` have passed, it takes those who came, if they are `min_workers`,
  or fails.

  Expected are all, until a round is made of those who came in time: from then
  on, these and all who have pushed since, be it too late. So a dead worker is
  waited for once, not in each round, and again when it is back. When all
  `num_workers` have come, and after a reset, all are expected again.

  To gather a round again gives the same workers.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    round: An integer, or a scalar integer tensor or variable: the open round.
    min_workers: The same, in [1, `num_workers`].
    timeout_secs: A number of seconds greater than 0, infinity for no deadline;
      or a scalar tensor or variable of any floating dtype.
    name: A name for the operation.

  Returns:
    A string tensor of shape [M]: the sorted names of those whose values make up
    the round, `min_workers` <= M <= `num_workers`.

  Raises:
    ValueError: If `timeout_secs` is a number, but not greater than 0.
    tf.errors.InvalidArgumentError: When it runs: an argument is out of range.
    tf.errors.DeadlineExceededError: When it runs: too few came in time.
    tf.errors.FailedPreconditionError: When it runs: another round is open, or
      somebody else opened one meanwhile.
    tf.errors.CancelledError: When it runs: its step was cancelled.
    tf.errors.AbortedError: When it runs: the rounds were deleted, with all of
      their container.
  """
  with device_of(rounds):
    return _raw.wrapopt_averaging_gather(
        rounds, _int64(round), _int64(min_workers), _timeout(timeout_secs),
        name=name)


@not_converted
def averaging_mean(rounds: Tensor, round: Integer, workers: Tensor,  # pylint: disable=redefined-builtin
                   centers: Variables, value: int = 0,
                   name: Optional[str] = None) -> Optional[Operation]:
  """Assigns the mean of workers' values to variables, in place.

  In one pass over memory: each value is read once and each center written once.
  float16 and bfloat16 are computed in float32 and rounded once. It is a running
  mean, `m += (x[k] - m) / k` for k = 1, 2, ..., so that the mean of values that
  are all the same is exactly that, and the mean of large float16 values does not
  overflow.

  One native op serves all centers. It checks all before it changes any, and
  holds their locks. The values stay until the next round is opened: to do it
  again gives the same.

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
    TypeError: If `centers` are not variables of one such dtype, or some are ref
      variables and some are not.
    ValueError: If they are on different devices, or `value` is negative.
    tf.errors.InvalidArgumentError: When it runs: a value is of another dtype or
      size, or there is none of this number; `workers` names nobody, or somebody
      twice; a center is named twice.
    tf.errors.FailedPreconditionError: When it runs: another round is open, a
      worker has not pushed to it, or a center is not initialized.
  """
  centers = _variables("centers", centers)
  first = centers[0]
  _check_dtype("centers[0]", first, _FLOATS)
  _check_alike("centers", centers, "Each device has rounds of its own.")
  if value < 0:
    raise ValueError(f"`value` must be at least 0, got {value}.")
  with device_of(first):
    arguments = {"rounds": rounds, "round": _int64(round), "workers": workers,
                 "value": value, "name": name}
    if is_ref_variable(first):
      return _result([_named(
          _raw.wrapopt_averaging_mean_ref(centers=centers, **arguments),
          centers=centers)])
    return _result([_raw.wrapopt_averaging_mean(
        centers=[c.handle for c in centers], T=first.dtype, **arguments)])


@not_converted
def averaging_next(rounds: Tensor, round: Integer, reset: bool = False,  # pylint: disable=redefined-builtin
                   name: Optional[str] = None) -> Tensor:
  """Ends a round and opens the next one.

  Its values are dropped, and all who wait for its end are answered. Rounds that
  have not come that far, of a device that does not lead, move on to there.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    round: An integer, or a scalar integer tensor or variable: the round that
      ends.
    reset: `True` for a chief that begins, or begins again: ends whatever round
      is open, ignores `round`, and all workers are expected again.
    name: A name for the operation.

  Returns:
    A scalar int64 tensor: the number of the round that is open now.

  Raises:
    tf.errors.FailedPreconditionError: When it runs: the round is over already.
  """
  with device_of(rounds):
    return _raw.wrapopt_averaging_next(rounds, _int64(round), reset=reset,
                                       name=name)


@not_converted
def averaging_wait(rounds: Tensor, round: Integer, timeout_secs: Float,  # pylint: disable=redefined-builtin
                   worker: str = "", name: Optional[str] = None) -> Tensor:
  """Waits for the end of a round: while this round is the open one.

  Example: see `averaging_rounds`.

  Args:
    rounds: From `averaging_rounds`.
    round: An integer, or a scalar integer tensor or variable. -1 waits for a
      chief to open the rounds; one that is not open is not waited for.
    timeout_secs: As for `averaging_gather`.
    worker: A string, who waits: the next gather expects this worker, too.
    name: A name for the operation.

  Returns:
    A scalar int64 tensor: the number of the round that is open then.

  Raises:
    ValueError: If `timeout_secs` is a number, but not greater than 0.
    tf.errors.DeadlineExceededError: When it runs: the round did not end in time.
    tf.errors.CancelledError, tf.errors.AbortedError: As `averaging_gather`.
  """
  with device_of(rounds):
    return _raw.wrapopt_averaging_wait(
        rounds, _int64(round), _timeout(timeout_secs), worker=worker,
        name=name)


@not_converted
def ema_update(shadows: Any, values: Variables,
               decay: Union[Float, Sequence[Float]],
               name: Optional[str] = None) -> Optional[Operation]:
  """Updates exponential moving averages of variables, in place.

  For each value `v` and its shadow `s`

      s += (1 - decay) * (v - s)

  in one pass over memory. Several decays cost one read of the values, however
  many they are. `1 - decay` is computed in float64; float16 and bfloat16 are
  averaged in float32 and rounded once.

  One native op serves all variables that share a device and a dtype. It checks
  all of its variables before it changes any, and holds their locks, so that it
  is atomic to other ops of wrapopt and to TensorFlow's own locking updates.

  Example:

  >>> v, s = tf.Variable([1., 2.]), tf.Variable([0., 0.])
  >>> wrapopt.ops.ema_update([s], [v], decay=0.75)
  >>> s.numpy()
  array([0.25, 0.5 ], dtype=float32)

  Args:
    shadows: N variables, the averages; or K sequences of N variables where
      `decay` is a sequence of K. Each has the shape of its value, and its dtype
      or float32 where the value is float16 or bfloat16.
    values: N variables of dtype float16, bfloat16, float32 or float64. They are
      only read. One variable may stand for a sequence of one here and above.
    decay: A number in [0, 1], or a scalar tensor or variable of any floating
      dtype; or a sequence of K of these. 0 copies the value, 1 leaves the
      shadow alone.
    name: A name for the operation.

  Returns:
    The `tf.Operation` in a `tf.compat.v1` graph, to be run; `None` in eager
    mode and inside a `tf.function`, which runs it in program order.

  Raises:
    TypeError: If `values` or `shadows` are not variables of these dtypes.
    ValueError: If the numbers of variables or their shapes do not match, or a
      decay is a number outside [0, 1].
    tf.errors.InvalidArgumentError: When it runs: a decay tensor outside [0, 1]
      or NaN, one shadow named twice, or what could not be known before.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.

  Reference: Polyak and Juditsky, "Acceleration of stochastic approximation by
  averaging", SIAM J. Control Optim. 30(4), 1992.
  """
  values = _variables("values", values)
  for i, value in enumerate(values):
    _check_dtype(f"values[{i}]", value, _FLOATS)
  if isinstance(decay, (list, tuple)) and not decay:
    raise ValueError("`decay` must hold at least one decay, got none.")
  decays, shadows = _shadows(decay, shadows, values, "values")

  groups = collections.defaultdict(list)
  for i, value in enumerate(values):
    groups[is_ref_variable(value), value.device, value.dtype.base_dtype,
           tuple(row[i].dtype.base_dtype for row in shadows)].append(i)
  with tf.name_scope(name or "EmaUpdate"):
    updates = []
    for (is_ref, _, _, shadow_dtypes), members in groups.items():
      # All decays whose shadows are of one dtype go into one op: in practice,
      # all of them.
      for dtype in sorted(set(shadow_dtypes), key=lambda d: d.name):
        chosen = [k for k, d in enumerate(shadow_dtypes) if d == dtype]
        flat = [shadows[k][i] for k in chosen for i in members]
        read = [values[i] for i in members]
        with host_of(read[0]):
          vector = _float64_vector([decays[k] for k in chosen])
        with device_of(read[0]):
          if is_ref:
            updates.append(_named(
                _raw.wrapopt_ema_update_ref(flat, read, vector),
                shadows=flat, values=read))
          else:
            updates.append(_ema_update(list(map(_taken, flat)),
                                       list(map(_taken, read)), vector,
                                       read[0], dtype))
    return _result(updates)


def _ema_update(shadows, values, decays, first, shadow_dtype):
  """Emits the op of `ema_update` on handles, of variables like `first`."""
  bundle = None
  if not tf.executing_eagerly() and _bundle.allowed():
    bundle = _bundle.make(shadows + values, first.device)
  dtypes = {"T": first.dtype, "S": shadow_dtype}
  if bundle is None:
    return _raw.wrapopt_ema_update(shadows, values, decays, **dtypes)
  return _raw.wrapopt_ema_update_bundle(
      bundle, decays, N=len(values), NK=len(shadows), **dtypes)


@not_converted
def catch_up(shadows: Variables, values: Variables, log_decays: Variables,
             indices: Sequence[Any] = (),
             name: Optional[str] = None) -> Optional[Operation]:
  """Brings averages up to date of which steps have moved some rows only.

  A step that leaves row `r` of a value `v` as it is moves the row's average `s`
  towards a constant. Several such steps do so by the product of their decays.
  So `apply` and `sparse_ema_update` with `log_decays` leave such rows alone, and
  their cost does not depend on the size of the table. This function makes up for
  all steps that a row has missed, exactly:

      s[r] += (1 - exp(l[R] - l[r])) (v[r] - s[r])

  where `l` are the log decays of `v`, and R is the number of its rows. Call it
  before an average is read or written, and before anything but these functions
  changes a value. It costs nothing where no step was taken since the last call.

  Example:

  >>> v, s = tf.Variable([[1.], [2.]]), tf.Variable([[0.], [0.]])
  >>> log_decays = tf.Variable(tf.zeros([3], tf.float64))
  >>> wrapopt.ops.sparse_ema_update([s], [v], [log_decays], [[0]], decay=0.75)
  >>> s.numpy()[:, 0]
  array([0.25, 0.  ], dtype=float32)
  >>> wrapopt.ops.catch_up([s], [v], [log_decays])
  >>> s.numpy()[:, 0]
  array([0.25, 0.5 ], dtype=float32)

  Args:
    shadows: N variables, the averages, each of the shape of its value, and of
      its dtype or float32 where the value is float16 or bfloat16.
    values: N variables with rows, of dtype float16, bfloat16, float32 or
      float64. They are only read.
    log_decays: N float64 variables of shape [R + 1]. The last element is the sum
      of log(decay) over all steps; element `r` is that sum when row `r` was last
      up to date. They start at zeros; one that is not initialized counts as
      zeros.
    indices: Empty: all rows catch up, and the log decays become zeros. Or N
      int32 or int64 vectors: these rows do.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    As `ema_update`.
  """
  values, shadows, log_decays = _lazy_variables(values, shadows, log_decays)
  indices = [tf.convert_to_tensor(x) for x in indices]
  updates = []
  with tf.name_scope(name or "CatchUp"):
    for members in _alike(values, shadows, indices):
      # Not compiled by chance: before a session's initializers have run, it
      # finds nothing to catch up with, and XLA no values.
      with device_of(values[members[0]]), _compiled_where(False):
        updates.append(_raw.wrapopt_catch_up(
            [shadows[i]._handle for i in members],
            [values[i].handle for i in members],
            [log_decays[i]._handle for i in members],
            [indices[i] for i in members] if indices else [],
            T=values[members[0]].dtype, S=shadows[members[0]].dtype))
    return _result(updates)


@not_converted
def sparse_ema_update(shadows: Any, values: Variables, log_decays: Variables,
                      indices: Sequence[Any],
                      decay: Union[Float, Sequence[Float]],
                      name: Optional[str] = None) -> Optional[Operation]:
  """Updates averages after a step that has changed some rows of their values.

  As `ema_update`, at the cost of these rows: the others lag behind until
  `catch_up`. Before the step that changes the values, these rows must catch up:

      wrapopt.ops.catch_up(shadows, values, log_decays, indices)
      ... the step ...
      wrapopt.ops.sparse_ema_update(shadows, values, log_decays, indices, decay)

  Args:
    shadows: As in `catch_up`.
    values: As in `catch_up`.
    log_decays: As in `catch_up`.
    indices: N int32 or int64 vectors: the rows that the step has changed. A row
      may be named several times, and moves once.
    decay: A number in [0, 1], or a scalar tensor or variable of any floating
      dtype.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    As `ema_update`; tf.errors.InvalidArgumentError also for an index out of
    range.
  """
  values, shadows, log_decays = _lazy_variables(values, shadows, log_decays)
  indices = [tf.convert_to_tensor(x) for x in indices]
  if len(indices) != len(values):
    raise ValueError(f"`indices` must hold one vector for each of the "
                     f"{len(values)} values, got {len(indices)}.")
  [decay], _ = _shadows([decay], [shadows], values, "values")
  updates = []
  with tf.name_scope(name or "SparseEmaUpdate"):
    for members in _alike(values, shadows, indices):
      first = values[members[0]]
      with host_of(first):
        vector = _float64_vector([decay])
      with device_of(first):
        updates.append(_raw.wrapopt_sparse_ema_update(
            [shadows[i]._handle for i in members],
            [values[i].handle for i in members],
            [log_decays[i]._handle for i in members],
            [indices[i] for i in members], vector,
            T=first.dtype, S=shadows[members[0]].dtype))
    return _result(updates)


@not_converted
def exchange(a: Variables, b: Variables,
             name: Optional[str] = None) -> Optional[Operation]:
  """Exchanges the values of pairs of variables, bit for bit.

  The two of a pair trade buffers: the cost is that of two pointers, whatever
  their size. (Compiled by XLA, whose variables stay in their buffers, it copies
  them.)

  Example:

  >>> a, b = tf.Variable([1., 2.]), tf.Variable([3., 4.])
  >>> wrapopt.ops.exchange([a], [b])
  >>> a.numpy(), b.numpy()
  (array([3., 4.], dtype=float32), array([1., 2.], dtype=float32))

  Args:
    a: N variables of numeric dtypes, all different. One variable may stand for
      a sequence of one.
    b: N variables, different from those in `a`. Each has the dtype and shape of
      its partner.
    name: A name for the operation.

  Returns:
    The `tf.Operation` in a `tf.compat.v1` graph, to be run; `None` in eager
    mode and inside a `tf.function`, which runs it in program order.

  Raises:
    TypeError: If `a` or `b` are not variables, or a pair differs in dtype.
    ValueError: If their numbers or shapes do not match.
    tf.errors.InvalidArgumentError: When it runs: one variable is named twice,
      or what could not be known before.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.
  """
  a, b = _variables("a", a), _variables("b", b)
  if len(a) != len(b):
    raise ValueError("`b` must hold one variable for each of the "
                     f"{len(a)} in `a`, got {len(b)}.")
  groups = collections.defaultdict(list)
  for i, (x, y) in enumerate(zip(a, b)):
    _check_dtype(f"b[{i}]", y, (x.dtype.base_dtype,))
    _check_shape(f"b[{i}]", y, f"a[{i}]", x)
    # A ref op's variables are of one dtype; handles tell their own.
    groups[is_ref_variable(x), x.device,
           x.dtype.base_dtype if is_ref_variable(x) else None].append((x, y))
  with tf.name_scope(name or "Exchange"):
    exchanges = []
    for (is_ref, _, _), pairs in groups.items():
      with device_of(pairs[0][0]):
        xs, ys = map(list, zip(*pairs))
        if is_ref:
          exchanges.append(_named(_raw.wrapopt_exchange_ref(xs, ys),
                                  a=xs, b=ys))
        else:
          exchanges.append(_raw.wrapopt_exchange(
              [x.handle for x in xs], [y.handle for y in ys]))
    return _result(exchanges)


@not_converted
def read_packed(variables: Variables, name: Optional[str] = None) -> Tensor:
  """Reads variables into one vector, which crosses to another device as one.

  One native op reads all of them, under their locks. The vector shares no
  memory with them.

  Example:

  >>> a, b = tf.Variable([[1., 2.], [3., 4.]]), tf.Variable(5.)
  >>> packed = wrapopt.ops.read_packed([a, b])
  >>> packed.numpy()
  array([1., 2., 3., 4., 5.], dtype=float32)
  >>> wrapopt.ops.assign_packed([a, b], 2 * packed)
  >>> print(b.numpy())
  10.0

  Args:
    variables: N variables on one device and of one dtype, numeric or bool. One
      variable may stand for a sequence of one.
    name: A name for the operation.

  Returns:
    A tensor of rank 1 on the variables' device: the elements of all N, in their
    order, each in row-major order.

  Raises:
    TypeError: If they are not variables of one dtype, or some are ref variables
      and some are not.
    ValueError: If they are on different devices.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.
  """
  variables = _packed_variables(variables)
  with device_of(variables[0]):
    if is_ref_variable(variables[0]):
      packed = _raw.wrapopt_read_packed_ref(variables, name=name)
      _named(packed.op, variables=variables)
      return packed
    return _raw.wrapopt_read_packed([v.handle for v in variables],
                                    T=variables[0].dtype, name=name)


@not_converted
def assign_packed(variables: Variables, packed: Tensor,
                  name: Optional[str] = None) -> Optional[Operation]:
  """Assigns the parts of a vector to variables, in place.

  One native op assigns all. It checks all before it changes any, and holds
  their locks.

  Example: see `read_packed`.

  Args:
    variables: N variables as for `read_packed`, all different and initialized.
    packed: A tensor of rank 1 and of their dtype, as `read_packed` makes it of
      such variables.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    TypeError: As `read_packed`, or if `packed` is of another dtype.
    ValueError: If they are on different devices, or `packed` is misshapen. As
      tf.errors.InvalidArgumentError, when it runs, where that is not known
      before.
    tf.errors.InvalidArgumentError: When it runs: a variable is named twice.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.
  """
  variables = _packed_variables(variables)
  first = variables[0]
  with device_of(first):
    packed = tf.convert_to_tensor(packed)
    _check_dtype("packed", packed, (first.dtype.base_dtype,))
    if is_ref_variable(first):
      assigned = _raw.wrapopt_assign_packed_ref(variables, packed, name=name)
      _not_with_tensors(assigned, first)
      return _result([_named(assigned, variables=variables)])
    return _result([_raw.wrapopt_assign_packed(
        [v.handle for v in variables], packed, name=name)])


@not_converted
def apply(rule: str, states: Mapping[str, Sequence[Variable]],
          grads: Sequence[Gradient], scalars: Mapping[str, Any],
          shadows: Any = (), decay: Any = (), accept: Bool = True,
          use_locking: bool = True, name: Optional[str] = None,
          log_decays: Sequence[Any] = ()) -> Optional[Operation]:
  """Takes an optimizer's step and averages the result, in one pass over memory.

  For each variable, its slots and its gradient, the update rule of that name
  (its mathematics: cc/rules/<rule>.h, and the documentation of the raw op);
  then for each shadow `s` of the new variable `v`

      s += (1 - decay) (v - s)

  Both happen to a part of the arrays while it is in the processor's cache.
  One native op serves all variables that share a device and dtypes. float16 and
  bfloat16 are computed in float32 and rounded once; a result that is not a
  number is a NaN on every processor, but its sign and payload may depend on the
  instruction set.

  Example:

  >>> v, s = tf.Variable([1., 2.]), tf.Variable([1., 2.])
  >>> wrapopt.ops.apply("GradientDescent", {"var": [v]}, [tf.constant([1., 1.])],
  ...                   {"lr": 0.5}, shadows=[s], decay=0.5)
  >>> v.numpy(), s.numpy()
  (array([0.5, 1.5], dtype=float32), array([0.75, 1.75], dtype=float32))

  Args:
    rule: The name of an update rule, such as "Momentum". The error of a name
      that is none lists them all.
    states: A dict from the names of the rule's states ("var" and the slots) to
      sequences of N variables, float16, bfloat16, float32 or float64. All
      states of a variable have its shape and dtype.
    grads: N tensors or `tf.IndexedSlices`, of the variable's shape, and of its
      dtype or float32 where it is float16 or bfloat16. Duplicate indices are
      summed. A sparse gradient updates the rows that it holds, or all rows, as
      in TensorFlow (Adam) and Keras (Lion). Averages move in all rows.
    scalars: A dict from the names of the rule's scalars to numbers, tensors or
      variables; for attributes (`use_nesterov`) to bools.
    shadows: As in `ema_update`, or empty for none.
    decay: As in `ema_update`, or empty for none.
    accept: A bool, or a scalar bool tensor. Where false, nothing is changed,
      and the op returns at once. (Compiled by XLA for another device than a
      CPU, a step that changes nothing takes as long as one that does, unless
      the tensor is a constant.)
    use_locking: Whether the variables are locked against other updates.
    name: A name for the operation.
    log_decays: Empty, or for each shadow a variable as in `catch_up` or None.
      A shadow that has one, of a variable with a sparse gradient, moves in the
      rows that the gradient holds; the others lag behind until `catch_up`. Only
      for a rule that changes no other row, and not on a GPU.

  Returns:
    As `ema_update`.

  Raises:
    As `ema_update`; tf.errors.InvalidArgumentError also for an index out of
    range, but not where XLA has compiled it to plain HLO. An op checks all of its variables
    before it changes any.
  """
  return Update(rule, states, shadows, decay).run(
      grads, scalars, decay, accept, use_locking, name, log_decays)


class Update:
  """The variables of an update, checked once for all of its steps: see `apply`.

  It holds resource variables that are trained by their handles only.
  """

  def __init__(self, rule, states, shadows=(), decay=(), bundled=None):
    """Checks variables.

    Args:
      rule: As in `apply`.
      states: As there.
      shadows: As there.
      decay: As there. Each step may have others.
      bundled: Whether the op takes all handles as one tensor, if it can. By
        default only in a `tf.function`: to make that tensor takes as long as a
        step.
    """
    if rule not in _UPDATES:
      raise ValueError(f"`rule` must be one of {', '.join(sorted(_UPDATES))}, "
                       f"got {rule!r}.")
    states = {state: _variables(f"states['{state}']", variables)
              for state, variables in states.items()}
    if "var" not in states:
      raise ValueError(f"`states` must hold 'var', got {sorted(states)}.")
    variables = states["var"]
    for state, slots in states.items():
      if len(slots) != len(variables):
        raise ValueError(
            f"`states['{state}']` must hold one variable for each of the "
            f"{len(variables)} in states['var'], got {len(slots)}.")
      for i, (slot, var) in enumerate(zip(slots, variables)):
        _check_dtype(f"states['{state}'][{i}]", slot,
                     _FLOATS if state == "var" else (var.dtype.base_dtype,))
        _check_shape(f"states['{state}'][{i}]", slot, f"states['var'][{i}]",
                     var)
    _, shadows = _shadows(decay, shadows, variables, "states['var']")
    self._rule = rule
    self._bundled = bundled
    self._variables = [_Updated(v, [row[i] for row in shadows])
                       for i, v in enumerate(variables)]
    self._states = {state: list(slots) for state, slots in states.items()}
    self._states["var"] = list(map(_taken, variables))
    self._shadows = shadows
    self._groups = {}  # By the kinds of the gradients.

  def run(self, grads, scalars, decay=(), accept=True, use_locking=True,
          name=None, log_decays=()):
    """Takes a step; arguments and result are as in `apply`."""
    decays = _decays(decay)
    grads = list(grads)
    if len(grads) != len(self._variables):
      raise ValueError(f"`grads` must hold one gradient for each of the "
                       f"{len(self._variables)} variables, got {len(grads)}.")
    log_decays = [list(row) for row in log_decays]
    kinds = _one_kind(grads)
    if kinds is None:
      grads, kinds = zip(*[
          _gradient_and_kind(
              grad, lambda i=i: _is_lazy(log_decays, self._shadows, i))
          for i, grad in enumerate(grads)])
    groups = self._groups.get(kinds)
    if groups is None:
      groups = self._groups[kinds] = self._grouped(
          kinds if isinstance(kinds, tuple) else [kinds] * len(grads))
    updates = []
    with tf.name_scope(name or f"Apply{self._rule}"):
      for group in groups:
        arguments = (
            list(grads) if len(groups) == 1 else
            [grads[i] for i in group.members],
            scalars, decays, accept, use_locking)
        bundle = self._bundle_of(group)
        updates.append(
            self._take_listed(group, *arguments, log_decays)
            if bundle is None else
            self._take_bundled(group, bundle, *arguments))
    return _result(updates)

  def _grouped(self, kinds):
    """What one op each can update, by the kinds of the gradients: a list."""
    groups = {}
    for i, (variable, kind) in enumerate(zip(self._variables, kinds)):
      grad_dtype, indices_dtype, lazy = _kind_of(kind)
      if grad_dtype not in _shadow_dtypes(variable.dtype):
        raise TypeError(
            f"`grads[{i}]` must be of dtype "
            f"{' or '.join(d.name for d in _shadow_dtypes(variable.dtype))}, "
            f"got {grad_dtype.name} for '{variable.name}'.")
      key = (variable.is_ref, variable.device, variable.dtype, grad_dtype,
             variable.shadow_dtype, indices_dtype, lazy)
      if key not in groups:
        groups[key] = _Group(variable, indices_dtype, lazy)
      groups[key].members.append(i)
    return list(groups.values())

  def _rows(self, group, rows):
    """The group's part of some rows, as one list of what an op takes."""
    return [_taken(row[i]) for row in rows for i in group.members]

  def _bundle_of(self, group):
    """The handles that the group's op takes as one tensor, or None."""
    first = group.first
    if (first.is_ref or group.indices_dtype or
        self._bundled is None and tf.executing_eagerly() or
        not _bundle.allowed()):
      return None
    if group.bundle is None:
      states = [self._states[state]
                for state in _native.rules()[self._rule].states]
      group.bundle = _bundle.make(self._rows(group, states + self._shadows),
                                  first.device)
      group.may_lag = [row[i] for row in self._shadows for i in group.members
                       if hasattr(row[i], "log_decays")]
    # To take their handles would bring them up to date.
    up_to_date = not tf.executing_eagerly() or not group.may_lag or (
        not type(group.may_lag[0]).any_is_lazy) or all(
            s.log_decays is None for s in group.may_lag)
    return group.bundle if up_to_date else None

  def _take_bundled(self, group, bundle, grads, scalars, decays, accept,
                    use_locking):
    first = group.first
    with host_of(first):
      scalars = _float64_vector(_in_order(self._rule, scalars))
      decays = _float64_vector(decays)
      accept = tf.convert_to_tensor(accept)
    with device_of(first):
      return _raw.wrapopt_apply_bundle(
          bundle, grads, scalars, decays, accept, rule=self._rule,
          NK=len(self._shadows) * len(grads), T=first.dtype,
          S=first.shadow_dtype, use_locking=use_locking)

  def _take_listed(self, group, grads, scalars, decays, accept, use_locking,
                   log_decays):
    first, sparse = group.first, group.indices_dtype
    op = getattr(_raw, f"wrapopt_{'sparse_' if sparse else ''}apply_"
                 f"{_UPDATES[self._rule]}{'_ref' if first.is_ref else ''}")
    arguments = {state: self._rows(group, [slots])
                 for state, slots in self._states.items()}
    if group.lazy:
      # Not `handle`, which belongs to an average that has caught up.
      arguments["shadows"], arguments["log_decays"] = (
          [row[i]._handle for row in rows for i in group.members]
          for rows in (self._shadows, log_decays))
    else:
      arguments["shadows"] = self._rows(group, self._shadows)
      if sparse and not first.is_ref:
        arguments["log_decays"] = []
    if sparse:
      arguments["grad"] = [g.values for g in grads]
      arguments["indices"] = [g.indices for g in grads]
    else:
      arguments["grad"] = grads
    if not first.is_ref:  # Handles do not tell.
      arguments.update(T=first.dtype, S=first.shadow_dtype)
    # However many rows a sparse gradient has.
    shapes_known = all(
        g.shape.rank is not None and
        g.shape[1 if sparse else 0:].is_fully_defined()
        for g in arguments["grad"])
    allowed = accept is True or shapes_known
    with host_of(first):
      arguments.update(
          {k: v if isinstance(v, bool) else float64(v)
           for k, v in scalars.items()},
          decays=_float64_vector(decays),
          accept=tf.convert_to_tensor(accept))
    with device_of(first), _compiled_where(allowed):
      update = op(**arguments, use_locking=use_locking)
    if first.is_ref:
      _not_with_tensors(update, first)
      _named(update, **arguments)
    return update


class _Updated:
  """What an `Update` has to know of a variable."""

  def __init__(self, variable, shadows):
    self.name = variable.name
    self.dtype = variable.dtype.base_dtype
    self.device = variable.device
    self.is_ref = is_ref_variable(variable)
    dtypes = {s.dtype.base_dtype for s in shadows}
    if len(dtypes) > 1:
      raise TypeError(f"The shadows of '{self.name}' must be of one dtype, got "
                      f"{' and '.join(sorted(d.name for d in dtypes))}.")
    self.shadow_dtype = dtypes.pop() if dtypes else self.dtype


class _Group:
  """Variables that one op updates.

  Attributes:
    first: What is known of one of them.
    indices_dtype: That of sparse gradients; None for dense ones.
    lazy: Whether rows of their averages lag behind.
    members: Their places among all variables of an `Update`.
    bundle: Their handles as one tensor, once it is made.
    may_lag: Then, those of their averages that other steps may leave behind.
  """

  def __init__(self, first, indices_dtype, lazy):
    self.first = first
    self.indices_dtype = indices_dtype
    self.lazy = lazy
    self.members = []
    self.bundle = None
    self.may_lag = ()


def _one_kind(grads):
  """The kind of all gradients, if they are eager, dense and of one dtype."""
  try:
    kinds = set(map(_bundle.EagerTensor._datatype_enum, grads))
  except TypeError:  # Another class.
    return None
  return kinds.pop() if len(kinds) == 1 else None


def _gradient_and_kind(grad, is_lazy):
  """A gradient as a tensor or tensors, and what `_kind_of` takes."""
  if isinstance(grad, tf.IndexedSlices):
    grad = tf.IndexedSlices(tf.convert_to_tensor(grad.values),
                            tf.convert_to_tensor(grad.indices))
    return grad, (grad.dtype.base_dtype, grad.indices.dtype, is_lazy())
  grad = tf.convert_to_tensor(grad)
  # A ref op's output is a ref.
  return grad, grad.dtype.base_dtype.as_datatype_enum


def _kind_of(kind):
  """(dtype, dtype of the indices or None, whether averages are to lag)."""
  return (kind if isinstance(kind, tuple)
          else (tf.as_dtype(kind), None, False))


def _taken(variable):
  """What an op takes of a variable: a ref, or a handle."""
  if isinstance(variable, tf.Variable) and not is_ref_variable(variable):
    return variable.handle
  return variable  # A ref, or a handle already.


def _in_order(rule, scalars):
  """The scalars of a rule, a dict, as a list in the order of the rule."""
  # Attributes have a default.
  given = {name[:-1]: False for name in _native.rules()[rule].scalars
           if name.endswith("?")} | scalars
  names = [name.removesuffix("?") for name in _native.rules()[rule].scalars]
  if given.keys() != set(names):
    raise ValueError(f"`scalars` must hold {', '.join(names)}, got "
                     f"{', '.join(sorted(scalars))}.")
  return [float(x) if isinstance(x, bool) else x
          for x in map(given.get, names)]


class StalenessVerdict(typing.NamedTuple):
  """What `staleness_gate` decided.

  Attributes:
    accept: A scalar bool tensor: whether the update is admitted.
    staleness: A scalar int64 tensor: how many updates its weights may lack.
    ticket: A scalar resource tensor, for `staleness_complete`. It owns the
      admission: when the last reference to it goes, an update that is not
      complete is taken for aborted.
  """
  accept: tf.Tensor
  staleness: tf.Tensor
  ticket: tf.Tensor


@not_converted
def staleness_record(step: Variable,
                     name: Optional[str] = None) -> tuple[Tensor, Tensor]:
  """Records the step, before a worker reads the weights.

  Example: see `staleness_gate`.

  Args:
    step: A scalar variable, int32 or int64: the number of completed updates.
    name: A name for the operation.

  Returns:
    Two scalar int64 tensors: what `staleness_gate` takes as `recorded`, and the
    number of updates that are in flight, admitted and not complete.

  Raises:
    TypeError: If `step` is not such a variable.
    tf.errors.FailedPreconditionError: When it runs: it is not initialized.
  """
  _check_step(step)
  with device_of(step):
    if is_ref_variable(step):
      return tuple(_raw.wrapopt_staleness_record_ref(step, name=name))
    return tuple(_raw.wrapopt_staleness_record(step.handle, name=name))


@not_converted
def staleness_gate(step: Variable, stale_counter: Variable, histogram: Variable,
                   recorded: Tensor, limit: Integer,
                   name: Optional[str] = None) -> StalenessVerdict:
  """Admits an update if the weights that it was computed from are fresh enough.

  The staleness of an update is the number of updates that its weights may lack:
  those in flight when its worker recorded the step, and those admitted since.
  It is admitted where `0 <= limit` and `staleness <= limit`. Decision and
  counting are one atomic step, whatever the number of threads, sessions and
  processes: at the admission of an update its weights never lack more than
  `limit` others.

  An admitted update is in flight until `staleness_complete`, or until its
  ticket is gone, because the step that made it failed or its worker was killed.
  Such an update may have changed weights, so for the staleness of others it
  counts as one that was made.

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
      staleness were admitted ([0]) and dropped ([1]). The last bucket holds
      those of at least B - 1 too, the first those below 0: of a step that was
      set back.
    recorded: An int64 scalar, from `staleness_record`.
    limit: An integer, or a scalar integer tensor or variable. Negative: drops
      every update.
    name: A name for the operation.

  Returns:
    A `StalenessVerdict`.

  Raises:
    TypeError: If a variable is not one, or of another dtype.
    tf.errors.InvalidArgumentError: When it runs: a variable is misshapen, or
      one is named twice. Nothing is changed then. As ValueError where that is
      known before.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.

  Reference: `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15,
  whose check and update are not atomic.
  """
  _check_step(step)
  _check_variable("stale_counter", stale_counter)
  _check_dtype("stale_counter", stale_counter, (tf.float32,))
  _check_variable("histogram", histogram)
  _check_dtype("histogram", histogram, (tf.int64,))
  state = (step, stale_counter, histogram)
  with device_of(step):
    arguments = (_int64(recorded), _int64(limit))
    if is_ref_variable(step):
      return StalenessVerdict(*_raw.wrapopt_staleness_gate_ref(
          *state, *arguments, name=name))
    return StalenessVerdict(*_raw.wrapopt_staleness_gate(
        *[v.handle for v in state], *arguments, name=name))


@not_converted
def staleness_complete(ticket: Tensor, step: Variable, increment: bool = True,
                       name: Optional[str] = None) -> Optional[Operation]:
  """Ends an update that `staleness_gate` admitted; others it leaves alone.

  Run it after all changes of the update.

  Example: see `staleness_gate`.

  Args:
    ticket: From the verdict.
    step: The step variable of that gate.
    increment: Whether to increment the step, atomically with the completion. If
      not, somebody else has to, between the changes and this.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    TypeError: If `step` is not a scalar variable, int32 or int64.
    tf.errors.InvalidArgumentError: When it runs: it is not that gate's step.
    tf.errors.FailedPreconditionError: When it runs: the update is complete
      already.
  """
  _check_step(step)
  with device_of(step):
    if is_ref_variable(step):
      return _result([_raw.wrapopt_staleness_complete_ref(
          ticket, step, increment=increment, name=name)])
    return _result([_raw.wrapopt_staleness_complete(
        ticket, step.handle, increment=increment, name=name)])


# {update rule: what TensorFlow calls it in the Python functions of its ops}
_UPDATES = {
    rule: re.sub("(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", rule).lower()
    for rule, info in _native.rules().items() if info.is_update}


def _decays(decay):
  """A list of decays, of which those that are numbers are checked."""
  decays = list(decay) if isinstance(decay, (list, tuple)) else [decay]
  for k, d in enumerate(decays):
    if isinstance(d, numbers.Real) and not 0 <= d <= 1:
      raise ValueError(f"`decay[{k}]` must be in [0, 1], got {d}.")
  return decays


def _shadows(decay, shadows, values, values_name):
  """(list of decays, list of as many lists of shadows), checked."""
  several = isinstance(decay, (list, tuple))
  decays = _decays(decay)
  shadows = [
      _variables(f"shadows[{k}]" if several else "shadows", row)
      for k, row in enumerate(shadows if several else [shadows])]
  if len(shadows) != len(decays):
    raise ValueError(
        "`shadows` must hold one sequence of variables for each of the "
        f"{len(decays)} decays, got {len(shadows)}.")
  for k, row in enumerate(shadows):
    subject = f"shadows[{k}]" if several else "shadows"
    if len(row) != len(values):
      raise ValueError(f"`{subject}` must hold one variable for each of the "
                       f"{len(values)} values, got {len(row)}.")
    for i, (shadow, value) in enumerate(zip(row, values)):
      _check_dtype(f"{subject}[{i}]", shadow, _shadow_dtypes(value.dtype))
      _check_shape(f"{subject}[{i}]", shadow, f"{values_name}[{i}]", value)
  return decays, shadows


def _lazy_variables(values, shadows, log_decays):
  """The arguments of `catch_up` as lists, checked."""
  values = _variables("values", values)
  _, [shadows] = _shadows([0], [shadows], values, "values")
  log_decays = _variables("log_decays", log_decays)
  if len(log_decays) != len(values):
    raise ValueError(f"`log_decays` must hold one variable for each of the "
                     f"{len(values)} values, got {len(log_decays)}.")
  for i, (value, x) in enumerate(zip(values, log_decays)):
    _check_dtype(f"values[{i}]", value, _FLOATS)
    _check_dtype(f"log_decays[{i}]", x, (tf.float64,))
    for subject, y in (("values", value), ("shadows", shadows[i]),
                       ("log_decays", x)):
      if is_ref_variable(y):
        raise TypeError(f"`{subject}[{i}]` ('{y.name}') must be a resource "
                        "variable, got a ref variable.")
  return values, shadows, log_decays


def _alike(values, shadows, indices):
  """Groups of positions that one op serves: lists."""
  groups = collections.defaultdict(list)
  for i, (value, shadow) in enumerate(zip(values, shadows)):
    groups[value.device, value.dtype, shadow.dtype,
           indices[i].dtype if indices else None].append(i)
  return groups.values()


def _is_lazy(log_decays, shadows, i):
  """Whether the shadows of variable `i` have log decays."""
  row = [of_decay[i] for of_decay in log_decays]
  if all(x is None for x in row):
    return False
  if len(row) != len(shadows) or any(x is None for x in row):
    raise ValueError(
        "`log_decays` must hold one variable for each shadow of a variable or "
        f"None for all of them, got {row} for variable {i}.")
  for k, x in enumerate(row):
    _check_variable(f"log_decays[{k}][{i}]", x)
    _check_dtype(f"log_decays[{k}][{i}]", x, (tf.float64,))
  return True


def _read(x):
  """A variable's value of now: the conversion of a ref variable is unordered."""
  return x.read_value() if isinstance(x, tf.Variable) else x


def _rows(subject, given):
  """[(name, sequence)] of the sequences in `given`, or of `given` itself."""
  if isinstance(given, (tf.Variable, np.ndarray)) or tf.is_tensor(given):
    given = [given]
  rows = list(given)
  nested = [isinstance(row, (list, tuple)) for row in rows]
  if rows and all(nested):
    return [(f"{subject}[{k}]", row) for k, row in enumerate(rows)]
  if any(nested):
    raise TypeError(f"`{subject}` must hold lists only or none, got "
                    f"{[type(row).__name__ for row in rows]}.")
  return [(subject, rows)]


def _sources(subject, row, targets):
  """The variables in `row`, and as tensors what else it holds."""
  sources = []
  for i, (source, target) in enumerate(zip(row, targets)):
    if not isinstance(source, tf.Variable):
      try:
        with device_of(target):
          source = tf.convert_to_tensor(source)
      except (TypeError, ValueError):
        raise TypeError(f"`{subject}[{i}]` must be a variable or a tensor, got "
                        f"{source!r}.") from None
    sources.append(source)
  return sources


def _check_targets(targets, sources):
  """Each variable must be one target, and a source only of its own mean.

  An op says so too, but knows no more than its own variables.

  Args:
    targets: [(name, variables)].
    sources: [(name, variables and tensors)].
  """
  places = {}
  for subject, row in targets:
    for i, target in enumerate(row):
      first, _ = places.setdefault(target.ref(), (f"{subject}[{i}]", i))
      if first != f"{subject}[{i}]":
        raise ValueError(
            f"`{first}` and `{subject}[{i}]` are one variable, "
            f"'{target.name}': a variable that is updated must be named once.")
  for subject, row in sources:
    for i, source in enumerate(row):
      if isinstance(source, tf.Variable):
        first, position = places.get(source.ref(), (None, i))
        if position != i:
          raise ValueError(
              f"`{first}` and `{subject}[{i}]` are one variable, "
              f"'{source.name}': a target may be a source of its own mean, not "
              "of another's.")


def _weights(weights, count):
  """`weights` as a list of `count` or as one vector, checked."""
  if weights is None:
    return [1 / count] * count
  if isinstance(weights, tf.Variable) or tf.is_tensor(weights):
    if not weights.shape.is_compatible_with([count]):
      raise ValueError(f"`weights` misshapen: got {weights.shape} but expected "
                       f"({count},) (one weight for each source).")
    return weights
  if isinstance(weights, numbers.Real):
    raise TypeError("`weights` must be a sequence, one weight for each source, "
                    f"got {weights}.")
  weights = list(weights)
  if len(weights) != count:
    raise ValueError(f"`weights` must hold one weight for each of the {count} "
                     f"sources, got {len(weights)}.")
  for s, weight in enumerate(weights):
    if isinstance(weight, numbers.Real) and not math.isfinite(weight):
      raise ValueError(f"`weights[{s}]` must be finite, got {weight}.")
  return weights


def _weight_vector(weights, order):
  """The weights in the order of the op's sources."""
  if isinstance(weights, list):
    return _float64_vector([weights[s] for s in order])
  weights = float64(weights)
  if order == sorted(order):
    return weights
  # A gather is content with more weights than it takes.
  return tf.gather(tf.ensure_shape(weights, [len(order)]), order)


def _check_kind(subject, x, like_subject, like):
  if isinstance(x, tf.Variable) and is_ref_variable(x) != is_ref_variable(like):
    kinds = {True: "ref", False: "resource"}
    raise TypeError(
        f"`{subject}` ('{x.name}') must be a {kinds[is_ref_variable(like)]} variable "
        f"as {like_subject} ('{like.name}') is, got a {kinds[is_ref_variable(x)]} "
        "variable.")


def _check_alike(subject, variables, reason):
  """All must be of one kind and dtype and on one device.

  Args:
    subject: What the variables are called.
    variables: A list.
    reason: Why they must be on one device.
  """
  first = variables[0]
  for i, variable in enumerate(variables):
    _check_kind(f"{subject}[{i}]", variable, f"{subject}[0]", first)
    _check_dtype(f"{subject}[{i}]", variable, (first.dtype.base_dtype,))
    if variable.device != first.device:
      raise ValueError(
          f"`{subject}[{i}]` ('{variable.name}') must be on the device of "
          f"`{subject}[0]` ('{first.name}'), '{first.device}', got "
          f"'{variable.device}'. {reason}")


def _check_mixed_dtype(subject, x, dtype):
  """What `dtype`, that of the others so far, becomes with that of `x`.

  Args:
    subject: What `x` is called.
    x: A variable or tensor.
    dtype: A dtype in which all others are, or are float32.

  Returns:
    The same for `x` and the others.
  """
  if dtype == tf.float32:
    _check_dtype(subject, x, (dtype, *_LOW_PRECISION))
    return x.dtype.base_dtype
  _check_dtype(subject, x, _shadow_dtypes(dtype) if dtype in _FLOATS
               else _FLOATS)
  return dtype


def float64(x):
  """A number, tensor or variable as a float64 scalar, with all its digits."""
  x = _read(x)
  return tf.cast(x, tf.float64) if tf.is_tensor(x) else tf.constant(
      x, tf.float64)


def _int64(x):
  """An integer, tensor or variable as an int64 tensor."""
  return tf.cast(_read(x), tf.int64)


def _timeout(timeout_secs):
  if isinstance(timeout_secs, numbers.Real) and not timeout_secs > 0:
    raise ValueError("`timeout_secs` must be greater than 0, infinity for no "
                     f"deadline, got {timeout_secs}.")
  return float64(timeout_secs)


def _variables(subject, variables):
  """`variables` as a list that holds nothing but variables."""
  if isinstance(variables, tf.Variable):
    variables = [variables]
  variables = list(variables)
  if not variables:
    raise ValueError(f"`{subject}` must hold at least one variable, got none.")
  for i, variable in enumerate(variables):
    _check_variable(f"{subject}[{i}]", variable)
  return variables


def _packed_variables(variables):
  variables = _variables("variables", variables)
  _check_alike("variables", variables,
               "A vector is read and assigned on one device.")
  return variables


def _check_variable(subject, variable):
  if not isinstance(variable, tf.Variable):
    raise TypeError(f"`{subject}` must be a variable, got {variable!r}.")


def is_ref_variable(variable):
  """Whether a variable is one of TensorFlow 1's, without a handle."""
  # First the class: to take an average's handle brings it up to date.
  return not (hasattr(type(variable), "handle") or hasattr(variable, "handle"))


def _named(op, **variables):
  """Tells an op on ref variables their names, for what it may have to say.

  Its inputs have these names too, but not in a `tf.cond` of control flow v1.

  Args:
    op: The op.
    **variables: The variables of each of its arguments.

  Returns:
    `op`.
  """
  names = [v.op.name.encode() for arg in op.op_def.input_arg if arg.is_ref
           for v in variables[arg.name]]
  value = tf.compat.v1.AttrValue()
  value.list.s.extend(names)
  op._set_attr("_variables", value)
  return op


def _not_with_tensors(op, variable):
  """Puts an op on ref variables where they are, tensors or not.

  TensorFlow colocates an op with its ref inputs, but counts its arguments as if
  none were a list: it takes a tensor for a variable.

  Args:
    op: The op.
    variable: One of its variables.
  """
  op._clear_attr("_class")
  op._set_device(variable.device)


@contextlib.contextmanager
def device_of(variable):
  """Where an op on a variable runs, whatever tf.device() the caller is in."""
  with tf.device(None), tf.device(variable.device):
    yield


def host_device(device):
  """The device where an op's scalars are: an op reads them on the host."""
  device = tf.DeviceSpec.from_string(device or "")
  if device.device_type in (None, "GPU"):
    device = device.replace(device_type="CPU", device_index=0)
  return device.to_string()


@contextlib.contextmanager
def host_of(variable):
  """Where such an op's scalars are computed."""
  with tf.device(None), tf.device(host_device(variable.device)):
    yield


def _compiled_where(allowed):
  """Whether XLA may make an op part of a cluster of its own choice.

  A step that is not accepted may have gradients of any shape, which a program
  for one shape would refuse.

  Args:
    allowed: A bool.

  Returns:
    A context manager.
  """
  if allowed or tf.executing_eagerly():
    return contextlib.nullcontext()
  return tf.xla.experimental.jit_scope(compile_ops=False)


def _check_step(step):
  _check_variable("step", step)
  _check_dtype("step", step, (tf.int32, tf.int64))


def _shadow_dtypes(dtype):
  dtype = dtype.base_dtype
  return (dtype, tf.float32) if dtype in _LOW_PRECISION else (dtype,)


def _called(subject, x):
  """"`values[0]` ('v:0')"; a tensor needs no name."""
  return (f"`{subject}` ('{x.name}')" if isinstance(x, tf.Variable)
          else f"`{subject}`")


def _check_dtype(subject, x, dtypes):
  if x.dtype.base_dtype not in dtypes:
    raise TypeError(
        f"{_called(subject, x)} must be of dtype "
        f"{' or '.join(d.name for d in dtypes)}, got "
        f"{x.dtype.base_dtype.name}.")


def _check_shape(subject, x, like_subject, like):
  if not x.shape.is_compatible_with(like.shape):
    raise ValueError(
        f"{_called(subject, x)} misshapen: got {x.shape} but expected "
        f"{like.shape} (the shape of {like_subject}, '{like.name}').")


def _float64_vector(scalars):
  """Numbers, tensors and variables as one float64 vector."""
  if tf.executing_eagerly():
    # Not one op for each.
    scalars = [x.numpy().item() if tf.is_tensor(x) and x.shape.rank == 0 else x
               for x in map(_read, scalars)]
  if all(isinstance(scalar, numbers.Real) for scalar in scalars):
    return tf.constant(np.array(scalars, np.float64))
  return tf.stack([float64(scalar) for scalar in scalars])


def _result(operations):
  """What a function over ops without outputs returns."""
  # Such an op is a tf.Operation while a graph is built. A tf.function must not
  # return one, and runs it without that; a graph needs it, to run it.
  if tf.compat.v1.executing_eagerly_outside_functions():
    return None
  if len(operations) == 1:
    return operations[0]
  with tf.device(None):
    return tf.group(*operations)
