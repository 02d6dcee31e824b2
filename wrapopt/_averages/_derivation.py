"""Averages that no variable holds: they follow from several variables."""

import typing

import numpy as np
import tensorflow as tf

from wrapopt import _types
from wrapopt import ops


class Derived:
  """An average that follows from its variable and others.

  It converts to a tensor. In a graph, a session can fetch it.

  Attributes:
    variable: The variable.
    rows: The variable of the average's own that has no value while averages are
      in place of their variables, so that nobody reads this one then.
    saved: What a file must have beside the variable. The first is `rows`, or an
      average whose rows may lag behind.
    dtype: Its dtype.
  """

  def __init__(self, variable, rows, saved):
    self.variable, self.rows, self.saved = variable, rows, saved
    self.dtype = rows.dtype.base_dtype

  # What averages have in common whose vectors, of all their elements, follow
  # from those of their variables by `read_packed`; None if they do not.
  alike: typing.Any = None

  def read_packed(self, averages, at_once):
    """The elements of averages that are `alike`, as of `ops.read_packed`.

    Args:
      averages: Averages, with this one.
      at_once: As for `read_value`.
    """
    raise NotImplementedError

  def read_value(self, at_once=None):
    """Its value now: a tensor of its dtype.

    Args:
      at_once: A dictionary for what is the same for several averages that are
        read at once, or None.
    """
    raise NotImplementedError

  def of_replicas(self):
    """The averages of the components of a strategy's variable: a list."""
    raise NotImplementedError

  def make_element(self):
    """In a graph, makes the tensor that sessions fetch."""
    with tf.name_scope(f"{self.rows.op.name}/x/"), ops.device_of(self.rows):
      tf.identity(self.read_value(), name="value")

  def _as_graph_element(self):
    # By name: who holds this object holds no part of a graph.
    return self.rows.graph.get_tensor_by_name(
        f"{self.rows.op.name}/x/value:0")

  def __array__(self, dtype=None, copy=None):
    del copy  # It is computed each time.
    return np.array(self.read_value(), dtype)


def computed_in(dtype):
  """The dtype in which numbers of `dtype` are computed."""
  return tf.float32 if dtype in _types.LOW_PRECISION else dtype


tf.register_tensor_conversion_function(
    Derived, lambda x, dtype=None, name=None, as_ref=False: (
        x.read_value() if dtype is None else tf.cast(x.read_value(), dtype)))
