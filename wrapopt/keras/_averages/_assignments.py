"""Assignments to averages, counts and weights by this package, not by users."""

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt.keras._steps import _step
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


class Waiting:
  """Averages that start now, or wait for their variables.

  A `tf.function` that makes variables may also be what gives them values. Their
  averages start in its graph.
  """

  def __init__(self):
    # (average, variable) pairs, and a variable that tells whether these still
    # have to start.
    self._pairs, self._wait = [], None

  def start(self, pairs):
    """Sets averages to the values of their variables, now or when they run.

    Args:
      pairs: (average, variable) pairs, beside those that wait.
    """
    if self._wait is not None and not self._wait.numpy():
      self._pairs = []  # The graph has run.
    pairs = {id(pair[0]): pair for pair in [*self._pairs, *pairs]}.values()
    self._pairs = []
    for average, variable in pairs:
      if value_of(variable).is_initialized():
        seed(average, variable)
      else:
        self._pairs.append((average, variable))
    if self._pairs and self._wait is None:
      # Not one of each replica.
      self._wait = resource_variable_ops.ResourceVariable(True, trainable=False)
    if self._wait is not None:
      self._wait.assign(bool(self._pairs))

  def start_in_graph(self):
    """Before a step, starts the averages that wait for their variables."""
    if not self._pairs:
      return

    def start():
      for average, variable in self._pairs:
        seed(average, variable)
      self._wait.assign(False)

    _step.where(self._wait.read_value(), start)
