"""Variables of Keras that are state of a wrapper."""

import weakref

import keras

from wrapopt._averages import _in_place


# {id of a variable of these classes: the `_state.State` that it is part of}.
# The state knows its variables: a copy, or a later object of that id, is none.
states: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def note_assigned(variable):
  """Tells the state of a variable that others than this package assign it."""
  state = states.get(id(variable))
  if state is not None:
    state.note_assigned(variable)


class Kept(keras.Variable):
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
