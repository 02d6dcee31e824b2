"""Values of variables beside those that are in place."""

import contextlib

import tensorflow as tf

from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt.keras._variables import value_of


class Beside:
  """Values of variables, at first those that the variables have now."""

  def __init__(self, variables):
    self._pairs = [(v, _copy(v)) for variable in variables
                   for v in _replicas.values(value_of(variable))]

  @contextlib.contextmanager
  def swapped_in(self):
    """Puts them in place for a `with` block, which may change them."""
    in_place = _swap.SwappedIn(self._pairs)
    try:
      yield
    finally:
      in_place.swap_out()

  def assign(self):
    """Assigns them to the variables."""
    for variable, value in self._pairs:
      variable.assign(value)


def _copy(variable):
  # In eager mode, the two share memory until one of them changes.
  with tf.init_scope(), tf.device(variable.device):
    return tf.Variable(variable, trainable=False)
