"""An average whose rows may lag behind, with the attributes of Keras."""

from wrapopt._averages import _lazy
from wrapopt.keras import _average


class LazyAverage(_lazy.LazyAverage):
  """An average of a variable with rows. Reading it brings it up to date.

  It is no `keras.Variable`, but Keras and TensorFlow convert it to a tensor
  like one. It has a `keras.Variable`'s methods to read and assign it. Make the
  optimizer with `lazy=False` to get a variable.

  Attributes:
    path: Its name.
  """

  def __init__(self, average, variable):
    """Makes an average.

    Args:
      average: A new `keras.Variable` that holds it.
      variable: The `tf.Variable` that it is an average of.
    """
    super().__init__(average.value, variable, average.path)
    self._keras_name, self.path = average.name, average.path

  def assign(self, *args, **kwargs):
    _average.note_assigned(self)
    return super().assign(*args, **kwargs)

  @property
  def name(self):
    return self._keras_name

  @property
  def dtype(self):
    return self._dtype.name

  @property
  def shape(self):
    return tuple(self._shape)

  @property
  def ndim(self):
    return len(self._shape)

  @property
  def value(self):
    """The average itself, which has the methods of a `tf.Variable`."""
    return self
