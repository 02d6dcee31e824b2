"""The first step of averages.

An average that has not begun is its variable. Averages begin with the first
step that they follow. Until then, all that reads them, and the first step,
calls `_seed_unbegun`.
"""

import tensorflow as tf

from wrapopt._averages import _replicas
from wrapopt.keras._variables import value_of


class Beginning:
  """A mixin of wrappers: their averages begin with the first step."""

  def _make_begun(self):
    """Makes the variable that tells whether the averages have begun: 0 or 1."""
    self._untracked.marks = True
    return self._make_count("begun", 0, seeded=1)

  def _has_begun(self):
    """Whether the averages have begun: a bool."""
    return int(self._begun.numpy()) != 0

  def _mark_begun(self):
    """Notes, in a step, that the averages have begun."""
    if tf.executing_eagerly():
      if self._untracked.is_marked:
        return
      self._untracked.is_marked = True
    with _replicas.near(self._begun.value):
      self._begun.value.assign(1)

  def _seed_unbegun(self):
    """Sets averages that have not begun to their variables' values."""
    if not self.built or self._state.is_swapped_in():
      return
    with tf.init_scope():
      self._state.complete()
      # A wrapper without averages has nothing that begins.
      if self._state.pairs() and not self._has_begun():
        self._state.seed_values()
      elif self._untracked.without_gradient:
        keys = self._untracked.without_gradient
        self._state.seed_values(
            lambda average, v: v.trainable and self._var_key(v) in keys and
            not self._state.was_set(average))

  def _prepare_averages(self, keys):
    """Prepares the averages for a step, when it is taken or traced.

    Args:
      keys: Those of the variables that have a gradient.
    """
    # The first replica prepares those of all, before any weight has changed. In
    # eager mode, its weights have decayed when the next one comes here.
    if not _replicas.is_first():
      return
    if self._state.has_new_values():
      self._untracked.is_seeded = self._untracked.is_marked = False
    # An eager step may only accumulate, or fail, before the first one that the
    # averages follow.
    may_begin = (self._untracked.marks and not self._untracked.is_marked and
                 tf.executing_eagerly())
    if may_begin or not self._untracked.is_seeded:
      self._seed_unbegun()
      # Variables of a model that is built in a tf.function have no value yet.
      # TensorFlow traces the function again, and gives them values in between,
      # if it can.
      with tf.init_scope():
        self._untracked.is_seeded = all(
            value_of(v).is_initialized() for v in self._trainable_variables)
      self._state.start_in_graph()
    elif not self._untracked.without_gradient.isdisjoint(keys):
      self._seed_unbegun()
    self._untracked.without_gradient.difference_update(keys)
