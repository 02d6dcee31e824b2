"""Variables of Keras that are state of a wrapper."""

import keras

from wrapopt._averages import _in_place


class Kept(keras.Variable):
  """A variable that Keras's state trees set by `assign`, as users may.

  Attributes:
    was_assigned: A function of it that is called then. The package itself
      assigns to its `value`.
  """

  was_assigned = staticmethod(lambda variable: None)

  @classmethod
  def of(cls, variable):
    """Makes a `keras.Variable` one of this class: the same object."""
    variable.__class__ = cls
    return variable

  def assign(self, value):
    self.was_assigned(self)
    return super().assign(value)


class Average(Kept):
  """An average. While it is in place of its variable, nobody can read it."""

  @property
  def value(self):
    _in_place.check(self._value)
    return self.stored

  @property
  def stored(self):
    """The tf.Variable that holds it, for code that does not read it."""
    return super().value

  def __repr__(self):
    if not _in_place.has_no_value(self._value):
      return super().__repr__()
    return (f"<Variable path={self.path}, shape={self.shape}, "
            f"dtype={self.dtype}, in place of its variable>")

  def __reduce_ex__(self, protocol):
    _in_place.check(self._value)  # A copy reads it.
    return super().__reduce_ex__(protocol)
