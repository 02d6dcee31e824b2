"""Variables of Keras that are state of a wrapper, and where others are."""

import weakref

import keras

from wrapopt._averages import _absence
from wrapopt._averages import _lazy


# {id of a variable of these classes: the `_state.State` that it is part of}.
# The state knows its variables: a copy, or a later object of that id, is none.
states: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def note_assigned(variable):
  """Tells the state of a variable that others than this package assign it."""
  state = states.get(id(variable))
  if state is not None:
    state.note_assigned(variable)


class StateVariable(keras.Variable):
  """A variable that Keras's state trees set by `assign`, as users may.

  The package itself assigns to its `value`.
  """

  @classmethod
  def of(cls, variable):
    """Makes a `keras.Variable` one of this class: the same object."""
    variable.__class__ = cls
    return variable

  def assign(self, value):
    note_assigned(self)
    return super().assign(value)


class Average(StateVariable):
  """An average. While it is in place of its variable, nobody can read it."""

  @property
  def value(self):
    _absence.check(self._value)
    return self.stored

  @property
  def stored(self):
    """The tf.Variable that holds it, for code that does not read it."""
    return super().value

  def __repr__(self):
    if not _absence.has_no_value(self._value):
      return super().__repr__()
    return (f"<Variable path={self.path}, shape={self.shape}, "
            f"dtype={self.dtype}, in place of its variable>")

  def __reduce_ex__(self, protocol):
    _absence.check(self._value)  # A copy reads it.
    return super().__reduce_ex__(protocol)


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
    note_assigned(self)
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


def value_of(variable):
  """The tf.Variable of a variable of Keras or TensorFlow."""
  if isinstance(variable, Average):
    return variable.stored
  return variable.value if isinstance(variable, keras.Variable) else variable


def path_of(variable):
  """The name of a variable in checkpoints."""
  return getattr(variable, "path", None) or variable.name.split(":")[0]
