"""The block in which averages are in place, and what files get in it.

If a model is saved with averages in place, these are its weights. A file that
is written in the block has them as averages, too.
"""

import contextlib
import typing

import tensorflow as tf

from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt.keras._variables import value_of


class Block:
  """A block of `averaged_weights`, or none now.

  Attributes:
    place: A variable that has no value in the block, or None.
  """

  def __init__(self):
    self.place = None
    self._swapped_in = None  # A `_swap.SwappedIn`.
    self._saved = None  # See `enter`.

  def is_entered(self):
    """Whether averages are in place of their variables."""
    return self._swapped_in is not None

  def refuse(self, what, instead=""):
    """Raises an error while averages are in place.

    Args:
      what: The name of the method that was called.
      instead: What else to do than to leave the block first.
    """
    if self.is_entered():
      raise RuntimeError(
          f"{what}() must not be called inside averaged_weights(): the "
          "averages are in place of the weights. Leave the `with` block first"
          f"{instead}.")

  def enter(self, pairs, more, saved, must_stay):
    """Puts averages in place of their variables.

    Args:
      pairs: (variable, average) pairs.
      more: Other variables that are to have no value meanwhile.
      saved: A function of the `_swap.SwappedIn`: (average, value) pairs of
        averages that a file gets with another value than their own. Only a
        file that is written in the block computes them.
      must_stay: Whether nobody may change the variables meanwhile.
    """
    self._saved = saved
    self._swapped_in = _swap.SwappedIn(pairs, [value_of(self.place), *more],
                                       must_stay)

  def leave(self):
    """Undoes `enter`."""
    try:
      self._swapped_in.swap_out()
    finally:
      self._swapped_in = self._saved = None

  def averages_in_file(self):
    """A function that maps an average to the array that a file gets now."""
    saved = {id(_lazy.stored(value_of(s))): value for s, value in (
        self._saved(self._swapped_in) if self._swapped_in else ())}

    def in_file(average):
      stored = value_of(average)
      value = saved.get(id(_lazy.stored(stored)))
      if value is None and self._swapped_in:
        value = self._swapped_in.value(stored)
      return tf.cast(stored if value is None else value, average.dtype).numpy()

    return in_file

  def count_in_file(self, variable, count):
    """What a file gets now of a variable with a `_state.CountValues`."""
    value = variable.numpy()
    return count.swapped_in(value) if self._swapped_in else value


class Shown(typing.NamedTuple):
  """A variable in a state tree that is made in the block.

  Attributes:
    path: Its path.
    value: Its value: an array.
  """
  path: str
  value: typing.Any

  def numpy(self):
    return self.value

  def assign(self, value):
    raise RuntimeError(
        f"'{self.path}' must not be assigned inside averaged_weights(): the "
        "averages are in place of the weights. Leave the `with` block first.")


class OtherValues:
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
