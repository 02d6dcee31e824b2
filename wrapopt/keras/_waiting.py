"""Averages of variables that had no value when the averages were to start.

A `tf.function` that makes variables may also be what gives them values. Their
averages start in its graph.
"""

from tensorflow.python.ops import resource_variable_ops

from wrapopt.keras import _assign
from wrapopt.keras import _followers
from wrapopt.keras._variables import value_of


class Waiting:
  """Averages that start now, or wait for their variables."""

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
        _assign.seed(average, variable)
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
        _assign.seed(average, variable)
      self._wait.assign(False)

    _followers.where(self._wait.read_value(), start)
