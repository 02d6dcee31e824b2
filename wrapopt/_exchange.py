"""Puts averages in place of their variables, in eager mode."""

import tensorflow as tf

from wrapopt import _lazy
from wrapopt import _replicas
from wrapopt import ops


def same_dtype(a, b):
  return _lazy.raw(a).dtype.base_dtype == _lazy.raw(b).dtype.base_dtype


def put_in_place(pairs):
  """Puts averages in place of their variables.

  Args:
    pairs: (variable, average) pairs. A pair of one dtype exchanges its buffers.
      In other pairs, the average is converted and assigned to the variable.

  Returns:
    A function that restores all values.
  """
  pairs = _replicas.components(pairs)
  # Of all averages of the variables, not only of these.
  _lazy.settle([v for v, _ in pairs])
  same = [pair for pair in pairs if same_dtype(*pair)]

  def trade():
    if same:
      ops.exchange([v for v, _ in same], [_lazy.raw(s) for _, s in same])

  others = [pair for pair in pairs if not same_dtype(*pair)]
  raw = [(v, v.read_value()) for v, _ in others]
  trade()
  for variable, average in others:
    variable.assign(tf.cast(average, variable.dtype))

  def back():
    trade()
    for variable, value in raw:
      variable.assign(value)

  return back
