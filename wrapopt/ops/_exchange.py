"""Exchanges the values of variables."""

import collections
from typing import Optional

import tensorflow as tf

from wrapopt._types import Operation, Variables
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops import _lagging
from wrapopt.ops import _variables


@_emit.not_converted
def exchange(a: Variables, b: Variables,
             name: Optional[str] = None) -> Optional[Operation]:
  """Exchanges the values of pairs of variables, bit for bit.

  The two variables of a pair exchange their buffers. The cost is that of two
  pointers, whatever their size. (A program that XLA compiles copies the values,
  because its variables stay in their buffers.)

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
      or a rule is broken that could not be checked before.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.
  """
  a, b = _check.variables("a", a), _check.variables("b", b)
  if len(a) != len(b):
    raise ValueError("`b` must hold one variable for each of the "
                     f"{len(a)} in `a`, got {len(b)}.")
  groups = collections.defaultdict(list)
  for i, (x, y) in enumerate(zip(a, b)):
    _check.dtype(f"b[{i}]", y, (x.dtype.base_dtype,))
    _check.shape(f"b[{i}]", y, f"a[{i}]", x)
    # The variables of a ref op are of one dtype. Handles know their own.
    is_ref = _variables.is_ref(x)
    groups[is_ref, x.device,
           x.dtype.base_dtype if is_ref else None].append((x, y))
  with tf.name_scope(name or "Exchange"):
    exchanges = []
    for pairs in groups.values():
      xs, ys = map(list, zip(*pairs))
      with (tf.control_dependencies(_lagging.settle(xs + ys)),
            _emit.device_of(xs[0])):
        exchanges.append(_emit.of_variables("exchange", {"a": xs, "b": ys}))
    return _emit.result(exchanges)
