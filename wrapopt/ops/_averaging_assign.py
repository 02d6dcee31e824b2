"""Moves variables towards a weighted mean."""

import collections
from collections.abc import Sequence
import numbers
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from wrapopt._types import Float, Operation
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops import _lagging
from wrapopt.ops import _variables
from wrapopt.ops._scalars import float64
from wrapopt.ops._scalars import float64_vector


@_emit.not_converted
def averaging_assign(targets: Any, sources: Sequence[Any], weights: Any = None,
                     rate: Float = 1.0, use_locking: bool = True,
                     name: Optional[str] = None) -> Optional[Operation]:
  """Moves variables towards the weighted mean of others, in place.

  For each variable with sources `x[0], x[1], ...` and targets `t[0], t[1], ...`

      m = weights[0] * x[0] + weights[1] * x[1] + ...
      t[j] += rate * (m - t[j])

  in one pass over memory: each source is read once and each target written
  once, however many they are. A target may be a source of its own mean: the
  mean is that of the values before the op. float16 and bfloat16 are computed in
  float32 and rounded once, so the mean of large numbers does not overflow.

  One native op serves all variables that share a device and dtypes. It checks
  all of its variables before it changes any. It holds their locks, so it is
  atomic to other ops of wrapopt and to TensorFlow's own locking updates.

  Example:

  >>> a, b, center = (tf.Variable([x, 0.]) for x in (1., 5., 0.))
  >>> wrapopt.ops.averaging_assign([center], [[a], [b]])
  >>> center.numpy()
  array([3., 0.], dtype=float32)

  In elastic averaging with the moving rate 1/4, a worker and a center each move
  by 1/4 of their difference. Their mean is half way between them, so the rate
  here is 1/2.

  >>> wrapopt.ops.averaging_assign([[a], [b]], [[a], [b]], rate=0.5)
  >>> a.numpy(), b.numpy()
  (array([2., 0.], dtype=float32), array([4., 0.], dtype=float32))

  Args:
    targets: N variables of dtype float16, bfloat16, float32 or float64; or M
      lists or tuples of N variables, if each mean has M targets. One variable
      may stand for a sequence of one.
    sources: N variables or tensors; or S lists or tuples of N. They have the
      shape of their targets. The sources and targets of one mean are of one
      dtype, but float32 may stand beside float16, or beside bfloat16. For a
      variable on another device, pass its `read_value()`.
    weights: S finite numbers, scalar tensors or variables, or one vector of
      them; `None` for 1 / S each, the mean. Their sum need not be 1. A source
      of weight 0 does not count, even if it holds infinity or NaN. The sum is
      taken in the order of the sources, but variables before tensors.
    rate: A number in [0, 1], or a scalar tensor or variable of any floating
      dtype. 1 assigns the mean, even if a target holds infinity or NaN. 0
      leaves the targets unchanged.
    use_locking: Whether the targets are locked against other updates.
    name: A name for the operation.

  Returns:
    The `tf.Operation` in a `tf.compat.v1` graph, to be run; `None` in eager
    mode and inside a `tf.function`, which runs it in program order.

  Raises:
    TypeError: If `targets` are not variables, or dtypes or kinds of variables
      do not match.
    ValueError: If numbers of variables, of weights or shapes do not match, one
      target is named twice, or a target is a source of another variable's mean;
      in a graph, if a weight or rate that is a constant is out of range.
    tf.errors.InvalidArgumentError: When it runs: a weight or rate is out of
      range or NaN, or a rule is broken that could not be checked before.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.

  References: Zhang, Choromanska and LeCun, "Deep learning with elastic
  averaging SGD", NeurIPS 2015; Izmailov et al., "Averaging weights leads to
  wider optima and better generalization", UAI 2018 (`rate` 1 / (n + 1) for the
  n-th model after the first); Zhang, Lucas, Hinton and Ba, "Lookahead
  optimizer", NeurIPS 2019 (targets and sources fast and slow, weights alpha and
  1 - alpha).
  """
  targets = [(subject, _check.variables(subject, row))
             for subject, row in _named_rows("targets", targets)]
  count = len(targets[0][1])
  with tf.name_scope(name or "AveragingAssign"):
    sources = _named_rows("sources", sources)
    for role, rows in ("target", targets), ("source", sources):
      for subject, row in rows:
        if len(row) != count:
          raise ValueError(f"`{subject}` must hold one {role} for each of the "
                           f"{count} variables, got {len(row)}. Several "
                           f"{role}s of each are several lists.")
    sources = [(subject, _convert_sources(subject, row, targets[0][1]))
               for subject, row in sources]
    weights = _check_weights(weights, len(sources))
    _check_targets(targets, sources)
    groups = collections.defaultdict(list)
    for i, first in enumerate(targets[0][1]):
      dtype = first.dtype.base_dtype
      like = f"{targets[0][0]}[{i}]"
      for subject, row in targets + sources:
        _check.kind(f"{subject}[{i}]", row[i], like, first)
        dtype = _check_mixed_dtype(f"{subject}[{i}]", row[i], dtype)
        _check.shape(f"{subject}[{i}]", row[i], like, first)
      groups[_variables.is_ref(first), first.device, dtype,
             tuple(row[i].dtype.base_dtype for _, row in targets),
             tuple((isinstance(row[i], tf.Variable), row[i].dtype.base_dtype)
                   for _, row in sources)].append(i)
    updates = []
    for (_, _, dtype, _, kinds), members in groups.items():
      flat = lambda rows: [row[i] for row in rows for i in members]  # pylint: disable=cell-var-from-loop
      # The op takes variables before tensors.
      order = sorted(range(len(kinds)), key=lambda s: not kinds[s][0])
      written = flat([row for _, row in targets])
      read = flat([sources[s][1] for s in order if kinds[s][0]])
      tensors = flat([sources[s][1] for s in order if not kinds[s][0]])
      with _emit.host_of(written[0]):
        arguments = {
            "tensors": tensors, "weights": _weight_vector(weights, order),
            "rate": float64(rate), "N": len(members), "T": dtype,
            "use_locking": use_locking}
      with (tf.control_dependencies(_lagging.settle(written)),
            _emit.device_of(written[0])):
        updates.append(_emit.of_variables(
            "averaging_assign", {"targets": written, "sources": read},
            **arguments))
    return _emit.result(updates)


def _named_rows(subject, given):
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


def _convert_sources(subject, row, targets):
  """`row` as a list in which all but variables are tensors."""
  sources = []
  for i, (source, target) in enumerate(zip(row, targets)):
    if not isinstance(source, tf.Variable):
      try:
        with _emit.device_of(target):
          source = tf.convert_to_tensor(source)
      except (TypeError, ValueError):
        raise TypeError(f"`{subject}[{i}]` must be a variable or a tensor, got "
                        f"{source!r}.") from None
    sources.append(source)
  return sources


def _check_targets(targets, sources):
  """Each variable must be one target, and a source only of its own mean.

  The op checks this too, but only among its own variables.

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


def _check_mixed_dtype(subject, x, dtype):
  """Checks the dtype of one source or target beside those before it.

  Args:
    subject: The name of `x`.
    x: A variable or tensor.
    dtype: The dtype of those before it, each of which is of this dtype or of
      float32.

  Returns:
    The same for `x` and those before it.
  """
  if dtype == tf.float32:
    _check.dtype(subject, x, (dtype, *_check.LOW_PRECISION))
    return x.dtype.base_dtype
  _check.dtype(subject, x, _check.shadow_dtypes(dtype)
               if dtype in _check.FLOATS else _check.FLOATS)
  return dtype


def _check_weights(weights, count):
  """`weights` as a list of `count` or as one vector."""
  if weights is None:
    return [1 / count] * count
  if isinstance(weights, tf.Variable) or tf.is_tensor(weights):
    return weights
  if isinstance(weights, numbers.Real):
    raise TypeError("`weights` must be a sequence, one weight for each source, "
                    f"got {weights}.")
  weights = list(weights)
  if len(weights) != count:
    raise ValueError(f"`weights` must hold one weight for each of the {count} "
                     f"sources, got {len(weights)}.")
  return weights


def _weight_vector(weights, order):
  """The weights in the order of the op's sources."""
  if isinstance(weights, list):
    return float64_vector([weights[s] for s in order])
  weights = float64(weights)
  if order == sorted(order):
    return weights
  # A gather accepts more weights than it takes.
  return tf.gather(tf.ensure_shape(weights, [len(order)]), order)
