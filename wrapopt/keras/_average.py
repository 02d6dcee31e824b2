"""An average that no row of lags behind: a variable of Keras."""

import keras

from wrapopt._averages import _in_place


class Average(keras.Variable):
  """An average. While it is in place of its variable, nobody can read it."""

  @classmethod
  def of(cls, variable):
    """Makes a `keras.Variable` an Average: the same object."""
    variable.__class__ = cls
    return variable

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
