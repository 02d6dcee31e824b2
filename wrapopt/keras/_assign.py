"""Assignments to averages, counts and weights by this package, not by users."""

import tensorflow as tf

from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt.keras._variables import value_of


def load(average, variable, value):
  """Assigns an average its value from a file, or seeds it.

  A value of another shape belongs to another variable; Keras has reported it.
  """
  if value is not None and tuple(value.shape) == tuple(average.shape):
    for s in _replicas.values(value_of(average)):
      _store(s, tf.cast(value, s.dtype))
  else:
    seed(average, variable)


def assign_all(pairs):
  """Assigns averages to their variables: (variable, average) pairs."""
  pairs = _replicas.components((value_of(v), value_of(s)) for v, s in pairs)
  # For all averages of the variables, not only these.
  _lazy.settle([v for v, _ in pairs])
  for v, s in pairs:
    v.assign(tf.cast(s, v.dtype))


def seed(average, variable):
  """Sets an average to its variable, or to its number `starts_at`."""
  start = getattr(average, "starts_at", None)
  for s, v in _replicas.components([(value_of(average), value_of(variable))]):
    _store(s, tf.cast(v, s.dtype) if start is None else start)


def _store(average, value):
  """Assigns as this package, and not a user, does."""
  if isinstance(average, _lazy.LazyAverage):
    _lazy.LazyAverage.assign(average, value)
  else:
    average.assign(value)


def assign(variable, number):
  # In a replica, a variable of all replicas cannot be assigned.
  for v in _replicas.values(variable.value):
    v.assign(number)
