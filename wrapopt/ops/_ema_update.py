"""Updates of averages."""

import collections
from collections.abc import Sequence
from typing import Any, Optional, Union

import tensorflow as tf

from wrapopt import _bundle
from wrapopt._types import Float, Operation, Variables
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops import _lagging
from wrapopt.ops import _variables
from wrapopt.ops._scalars import float64_vector


@_emit.not_converted
def ema_update(shadows: Any, values: Variables,
               decay: Union[Float, Sequence[Float]],
               name: Optional[str] = None) -> Optional[Operation]:
  """Updates exponential moving averages of variables, in place.

  For each value `v` and its shadow `s`

      s += (1 - decay) * (v - s)

  in one pass over memory. The values are read once for all decays. `1 - decay`
  is computed in float64; float16 and bfloat16 are averaged in float32 and
  rounded once.

  One native op serves all variables that share a device and a dtype. It checks
  all of its variables before it changes any. It holds their locks, so it is
  atomic to other ops of wrapopt and to TensorFlow's own locking updates.

  Example:

  >>> v, s = tf.Variable([1., 2.]), tf.Variable([0., 0.])
  >>> wrapopt.ops.ema_update([s], [v], decay=0.75)
  >>> s.numpy()
  array([0.25, 0.5 ], dtype=float32)

  Args:
    shadows: N variables, the averages; or K sequences of N variables if `decay`
      is a sequence of K. Each has the shape of its value, and its dtype or, if
      the value is float16 or bfloat16, float32.
    values: N variables of dtype float16, bfloat16, float32 or float64. They are
      only read. One variable may stand for a sequence of one here and above.
    decay: A number in [0, 1], or a scalar tensor or variable of any floating
      dtype; or a sequence of K of these. 0 copies the value, 1 leaves the
      shadow unchanged. On a CPU, and on a GPU without XLA, the op then neither
      reads nor writes the shadow.
    name: A name for the operation.

  Returns:
    The `tf.Operation` in a `tf.compat.v1` graph, to be run; `None` in eager
    mode and inside a `tf.function`, which runs it in program order.

  Raises:
    TypeError: If `values` or `shadows` are not variables of these dtypes.
    ValueError: If the numbers of variables or their shapes do not match, or a
      decay is a number outside [0, 1].
    tf.errors.InvalidArgumentError: When it runs: a decay tensor outside [0, 1]
      or NaN (a ValueError if it is a constant of a graph), one shadow named
      twice, or a rule is broken that could not be checked before.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.

  Reference: Polyak and Juditsky, "Acceleration of stochastic approximation by
  averaging", SIAM J. Control Optim. 30(4), 1992.
  """
  values = _check.variables("values", values)
  for i, value in enumerate(values):
    _check.dtype(f"values[{i}]", value, _check.FLOATS)
  if isinstance(decay, (list, tuple)) and not decay:
    raise ValueError("`decay` must hold at least one decay, got none.")
  decays, shadows = _check.shadows(decay, shadows, values, "values")

  groups = collections.defaultdict(list)
  for i, value in enumerate(values):
    groups[_variables.is_ref(value), value.device, value.dtype.base_dtype,
           tuple(row[i].dtype.base_dtype for row in shadows)].append(i)
  with tf.name_scope(name or "EmaUpdate"):
    updates = []
    for (is_ref, _, _, shadow_dtypes), members in groups.items():
      # One op serves all decays whose shadows are of one dtype: in practice,
      # all of them.
      for dtype in sorted(set(shadow_dtypes), key=lambda d: d.name):
        chosen = [k for k, d in enumerate(shadow_dtypes) if d == dtype]
        flat = [shadows[k][i] for k in chosen for i in members]
        read = [values[i] for i in members]
        with _emit.host_of(read[0]):
          vector = float64_vector([decays[k] for k in chosen])
        with (tf.control_dependencies(_lagging.settle(flat)),
              _emit.device_of(read[0])):
          updates.append(_update(flat, read, vector, is_ref))
    return _emit.result(updates)


def _update(shadows, values, decays, is_ref):
  """Emits the op of `ema_update`."""
  first = values[0]
  variables = list(map(_variables.handle_or_ref, shadows + values))
  bundle = None
  if not (is_ref or tf.executing_eagerly()) and _bundle.allowed():
    bundle = _bundle.make(variables, first.device)
    variables = variables if bundle is None else [bundle]
  with _emit.compiled_where(bundle is None):
    return _emit.of_variables(
        "ema_update", {"variables": variables}, decays=decays, N=len(values),
        NK=len(shadows), T=first.dtype.base_dtype,
        S=shadows[0].dtype.base_dtype)
