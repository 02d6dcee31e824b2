"""The first step of averages, from which their number of steps follows."""

import numpy as np
import tensorflow as tf

from wrapopt._averages import _replicas
from wrapopt.keras._averages import _state
from wrapopt.keras._averages import _store

# That of averages that have not begun. Other negative numbers are those of
# steps that `iterations` does not count.
UNBEGUN = -1


class FirstStep:
  """The first steps of the averages in a `_store.Store`, its `counts`."""

  def __init__(self, store, start_step, update_every):
    self._store, self._start, self._every = store, start_step, update_every

  def make(self):
    """Makes the counts."""
    self._store.make_counts("first_average_step", UNBEGUN,
                            in_files=self._in_files)
    for part, opt in self._store.parts().items():
      first = self._store.counts[part].value
      if _replicas.is_shared(first):
        # Each of several workers might take the first step.
        first.assign(_store.steps_of(opt))

  def _in_files(self, opt, end):
    """What Keras's files have in place of the first step of the averages.

    Their number of steps, since Keras does not load `iterations` if the
    optimizer is not built. The first step is then that many steps before 0. One
    less is stored, since -1 is that of averages that have not begun.

    Args:
      opt: The optimizer whose steps are counted.
      end: The end of the name.
    """
    def to_file(first):
      return np.int64(-1 if first == UNBEGUN else
                      self._since(_store.steps_of(opt), int(first)))

    def from_file(steps):
      if steps < 0:
        return UNBEGUN
      first = _store.steps_of(opt) - int(steps)
      if not steps and first < self._start:
        return 0  # They wait for `start_step`.
      return first - (first < 0)  # -1 is taken.

    def of_earlier(first):
      # With an average from a file, the next update is not the first one.
      return first if first == UNBEGUN else from_file(max(
          self._since(_store.steps_of(opt), int(first)), self._every))

    return _state.InFiles(f"average_steps{end}", to_file, from_file, of_earlier)

  def _since(self, iterations, first):
    """The number of steps of averages that have begun: a number or a tensor.

    Args:
      iterations: The number of steps of the optimizer.
      first: The first step of the averages, as it is stored.
    """
    if not tf.is_tensor(first):
      return max(iterations - (
          first + 1 if first < 0 else max(first, self._start)), 0)
    begun = tf.where(first < 0, first + 1, tf.maximum(first, self._start))
    return tf.maximum(iterations - begun, tf.constant(0, tf.int64))

  def steps_now(self, part):
    """The number of steps of a part's averages until now: an int64 tensor."""
    first = self._store.counts[part].value.read_value()
    iterations = tf.cast(tf.convert_to_tensor(
        self._store.parts()[part].iterations), tf.int64)
    return tf.where(first == UNBEGUN, tf.constant(0, tf.int64),
                    self._since(iterations, first))

  def total(self):
    """The number of steps of the first part's averages: an int."""
    part, opt = next(iter(self._store.parts().items()))
    self._store.seed_unbegun()  # Which takes the count of a file.
    first = int(self._store.counts[part].numpy())
    return 0 if first == UNBEGUN else self._since(_store.steps_of(opt), first)

  def steps_before(self, step, from_start):
    """The numbers of steps before a Step: (of the averages, since the start).

    If the averages have not begun, they begin with this step. So they do if
    they began with a later step, after the count was set back.

    Args:
      step: The Step.
      from_start: Whether the second number is needed.
    """
    first, iterations = self._store.counts[step.part].value, step.iterations
    if tf.executing_eagerly() and self._every > 1:
      # Numbers cost less than ops.
      iterations, begun = int(iterations), int(first.read_value())
      if begun == UNBEGUN or begun > iterations:
        first.assign(begun := iterations)
      return (self._since(iterations, begun),
              iterations - (begun + 1 if begun < 0 else self._start))
    begun = first.read_value()
    # A step that is not taken has no number.
    begins = step.accept & ((begun == UNBEGUN) | (begun > iterations))
    begun = tf.where(begins, iterations, begun)
    first.assign(begun)
    since = iterations - (tf.where(begun < 0, begun + 1, self._start)
                          if from_start else 0)
    return self._since(iterations, begun), since
