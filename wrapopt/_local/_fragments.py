"""Fragments: groups of a model's variables, with rounds of their own."""

import bisect

import numpy as np
import tensorflow as tf


def divide(variables, count):
  """Divides variables into contiguous groups, the largest as small as can be.

  All workers divide them in the same way.

  Args:
    variables: A list of `_settings.Variable`s.
    count: The number of groups.

  Returns:
    Their ends: a list of `count` indices.
  """
  sizes = [int(np.prod(v.shape)) * v.dtype.size for v in variables]
  filled = sum(size > 0 for size in sizes)
  if count > filled:
    raise ValueError(
        "`fragments` must be at most the number of variables with elements, "
        f"{filled}, since a variable is in one fragment, got {count}.")

  def ends(most):
    found, used, left = [], 0, filled
    for i, size in enumerate(sizes):
      # Each group gets a variable with elements.
      if size and used and (used + size > most or
                            left == count - len(found) - 1):
        found.append(i)
        used = 0
      used += size
      left -= size > 0
    return [*found, len(sizes)]

  sums = range(max(sizes, default=0), sum(sizes) + 1)
  return ends(sums[bisect.bisect_left(
      sums, True, key=lambda most: len(ends(most)) <= count)])


class Fragment:
  """A group of variables, and this worker's part in their rounds.

  Attributes:
    index: Its index.
    variables: A list of `tf.Variable`s.
    layout: Their `_layout.Layout`.
    member: The `_member.Member`.
    held: An int64 variable: the round of the center that the variables were
      assigned last; -1 for none. If it is not the member's, an error came
      between, or a restore: the values must not count.
    steps, examples: The numbers of steps and of examples since its last round,
      until the last round of any fragment.
  """

  def __init__(self, index, variables, layout, member):
    self.index = index
    self.variables = variables
    self.layout = layout
    self.member = member
    self.steps = self.examples = 0
    with tf.device("/cpu:0"):
      self.held = tf.Variable(-1, trainable=False, dtype=tf.int64, name="held")

  @property
  def round(self):
    """The round that is open: an int."""
    return self.member.place[0]

  def read(self, has_velocities):
    """What `_checkpoints.write` saves."""
    place, center = self.member.read()
    travels, split = self.layout.travels, self.layout.split
    values = [split(center)]
    for what, has in ("velocities", has_velocities), ("errors", travels):
      at, vectors = self.member.read(what) if has else (place, None)
      if at != place:
        return self.read(has_velocities)
      values.append(split(vectors) if has else [])
    own = self.member.errors or [np.zeros_like(c) for c in center]
    return place[0], *values, split(own) if travels else []
