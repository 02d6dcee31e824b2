"""Averages that move in the rows that a step changes."""

import collections
from collections.abc import Sequence
from typing import Any, Optional, Union

import tensorflow as tf

from wrapopt._loader import ops as _raw
from wrapopt._types import Float, Operation, Variables
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops import _variables
from wrapopt.ops._scalars import float64_vector


@_emit.not_converted
def catch_up(shadows: Variables, values: Variables, log_decays: Variables,
             indices: Sequence[Any] = (),
             name: Optional[str] = None) -> Optional[Operation]:
  """Brings averages up to date after steps that changed some rows only.

  If a step leaves row `r` of a value `v` unchanged, the row's average `s` moves
  towards a constant. Several such steps together move it by the product of
  their decays. So `apply` and `sparse_ema_update` with `log_decays` do not
  touch such rows, and their cost does not depend on the size of the table. This
  function applies all steps that a row has missed, exactly:

      s[r] += (1 - exp(l[R] - l[r])) (v[r] - s[r])

  where `l` are the log decays of `s`, and R is the number of its rows. Call it
  before an average is read or written, and before any other op changes a value.
  It costs nothing if no step was taken since the last call; on a GPU it then
  reads the log decays. If something else has given a value on a CPU another
  buffer while rows of its average lag behind, it logs an error.

  Example:

  >>> v, s = tf.Variable([[1.], [2.]]), tf.Variable([[0.], [0.]])
  >>> log_decays = tf.Variable(tf.zeros([4], tf.float64))
  >>> wrapopt.ops.sparse_ema_update([s], [v], [log_decays], [[0]], decay=0.75)
  >>> s.numpy()[:, 0]
  array([0.25, 0.  ], dtype=float32)
  >>> wrapopt.ops.catch_up([s], [v], [log_decays])
  >>> s.numpy()[:, 0]
  array([0.25, 0.5 ], dtype=float32)

  Args:
    shadows: N variables, the averages, each of the shape of its value, and of
      its dtype or, if the value is float16 or bfloat16, float32.
    values: N variables with rows, of dtype float16, bfloat16, float32 or
      float64. They are only read.
    log_decays: N float64 variables of shape [R + 2]. Element R is the sum of
      log(decay) over all steps. Element `r` is that sum when row `r` was last
      up to date. The last element belongs to the ops. They start at zeros. One
      that is not initialized counts as zeros.
    indices: Empty: all rows catch up, and the log decays become zeros. Or N
      int32 or int64 vectors: these rows do.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    As `ema_update`.
  """
  values, shadows, log_decays = _checked(values, shadows, log_decays)
  indices = [tf.convert_to_tensor(x) for x in indices]
  updates = []
  with tf.name_scope(name or "CatchUp"):
    for members in _groups(values, shadows, indices):
      # Not autoclustered: before a session's initializers have run, the op has
      # nothing to do, but XLA would miss the values.
      with _emit.device_of(values[members[0]]), _emit.compiled_where(False):
        updates.append(_raw.wrapopt_catch_up(
            [shadows[i].handle for i in members],
            [values[i].handle for i in members],
            [log_decays[i].handle for i in members],
            [indices[i] for i in members] if indices else [],
            T=values[members[0]].dtype, S=shadows[members[0]].dtype))
    return _emit.result(updates)


@_emit.not_converted
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
  values, shadows, log_decays = _checked(values, shadows, log_decays)
  indices = [tf.convert_to_tensor(x) for x in indices]
  if len(indices) != len(values):
    raise ValueError(f"`indices` must hold one vector for each of the "
                     f"{len(values)} values, got {len(indices)}.")
  [decay], _ = _check.shadows([decay], [shadows], values, "values")
  updates = []
  with tf.name_scope(name or "SparseEmaUpdate"):
    for members in _groups(values, shadows, indices):
      first = values[members[0]]
      with _emit.host_of(first):
        vector = float64_vector([decay])
      with _emit.device_of(first):
        updates.append(_raw.wrapopt_sparse_ema_update(
            [shadows[i].handle for i in members],
            [values[i].handle for i in members],
            [log_decays[i].handle for i in members],
            [indices[i] for i in members], vector,
            T=first.dtype, S=shadows[members[0]].dtype))
    return _emit.result(updates)


def _checked(values, shadows, log_decays):
  """The arguments of these names as lists, checked."""
  values = _check.variables("values", values)
  _, [shadows] = _check.shadows([0], [shadows], values, "values")
  log_decays = _check.variables("log_decays", log_decays)
  if len(log_decays) != len(values):
    raise ValueError(f"`log_decays` must hold one variable for each of the "
                     f"{len(values)} values, got {len(log_decays)}.")
  for i, (value, x) in enumerate(zip(values, log_decays)):
    _check.dtype(f"values[{i}]", value, _check.FLOATS)
    _check.dtype(f"log_decays[{i}]", x, (tf.float64,))
    for subject, y in (("values", value), ("shadows", shadows[i]),
                       ("log_decays", x)):
      if _variables.is_ref(y):
        raise TypeError(f"`{subject}[{i}]` ('{y.name}') must be a resource "
                        "variable, got a ref variable.")
  return values, shadows, log_decays


def _groups(values, shadows, indices):
  """Lists of the positions that one op serves."""
  groups = collections.defaultdict(list)
  for i, (value, shadow) in enumerate(zip(values, shadows)):
    groups[value.device, value.dtype, shadow.dtype,
           indices[i].dtype if indices else None].append(i)
  return groups.values()
