"""Averages in place of their variables, in eager mode."""

import tensorflow as tf

from wrapopt import _replicas
from wrapopt import ops


def same_dtype(a, b):
  return a.dtype.base_dtype == b.dtype.base_dtype


def put_in_place(pairs):
  """Puts averages in place of their variables.

  Args:
    pairs: (variable, average) pairs. Those of one dtype exchange their buffers;
      of others the variable takes the average's value, converted.

  Returns:
    A function that puts all back as it was.
  """
  pairs = _replicas.components(pairs)
  same = [pair for pair in pairs if same_dtype(*pair)]
  trade = (lambda: ops.exchange(*zip(*same))) if same else (lambda: None)
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
