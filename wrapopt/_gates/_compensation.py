"""Compensates the gradients of a step for their age."""

import typing

import tensorflow as tf

from wrapopt import ops
from wrapopt._gates import _origins


class Compensated(typing.NamedTuple):
  """How the gradients of a step are compensated.

  Attributes:
    policy: One of `_policies.COMPENSATING`.
    origins: {id of a variable: the weights of its gradient, a tensor}.
    states: {state of the policy: {id of a variable: its slot}}.
  """
  policy: typing.Any
  origins: dict[int, tf.Tensor]
  states: dict[str, dict]

  def of(self, variables):
    """The `ops.Compensation` of some variables."""
    return ops.Compensation(
        self.policy._rule, [self.origins[id(v)] for v in variables],
        {name: [slots[id(v)] for v in variables]
         for name, slots in self.states.items()}, self.policy._scalars)

  def take(self, pairs):
    """Compensates gradients before a step that no native op takes.

    Args:
      pairs: A list of (gradient, variable).

    Returns:
      The same with other gradients, and a function of the operation of the step
      that returns an operation that runs after it, or None.
    """
    taken, measures = [], []
    for g, v in pairs:
      if g is None:
        taken.append((g, v))
        continue
      with ops.device_of(v):
        g, measure = self._take(g, v)
      taken.append((g, v))
      measures.append((v, measure))

    def after(done):
      if self.policy._rule != "GapAware":
        return done
      measured = []
      with tf.control_dependencies([] if done is None else [done]):
        for v, measure in measures:
          with ops.device_of(v):
            measured.append(measure())
      if tf.executing_eagerly():
        return done
      return tf.group(*[getattr(op, "op", op) for op in measured
                        if op is not None])

    return taken, after

  def _take(self, g, v):
    """The compensated gradient of a variable, and a function after the step."""
    is_sparse = isinstance(g, tf.IndexedSlices)
    origin = self.origins[id(v)]
    if is_sparse:
      # Gradients of one row are summed, and the first origin counts.
      indices, group = tf.unique(g.indices)
      count = tf.size(indices)
      first = tf.math.unsorted_segment_min(
          tf.range(tf.size(g.indices)), group, count)
      values = tf.math.unsorted_segment_sum(
          _computed(g.values), group, count)
      origin = tf.gather(origin, first)
    else:
      indices, values = None, _computed(g)

    def read(variable):
      if ops.is_ref_variable(variable):
        # Not the tensor that was made with the variable, nor its buffer.
        value = _origins.copy_of(variable._ref())
        return value if indices is None else tf.gather(value, indices)
      return (variable.read_value() if indices is None
              else tf.gather(variable, indices))

    def assign(variable, value):
      if indices is None:
        return variable.assign(value, read_value=False)
      return variable.scatter_update(tf.IndexedSlices(value, indices))

    slots = {name: slots[id(v)] for name, slots in self.states.items()}
    before = _computed(read(v))
    delay = before - _computed(origin)
    scalars = {name: tf.constant(x, values.dtype)
               for name, x in self.policy._scalars.items()}
    assigned = []
    if self.policy._rule == "GapAware":
      size = read(slots["step_size"])
      is_first = tf.equal(size, 0)
      gap = 1 + tf.abs(delay) / tf.where(is_first, tf.ones_like(size), size)
      moved = tf.where(is_first, values, values / gap)
    else:
      by = scalars["lambda"]
      if slots:
        mean_square = read(slots["mean_square"])
        mean_square += scalars["rate"] * (tf.square(values) - mean_square)
        assigned.append(assign(slots["mean_square"], mean_square))
        by /= tf.sqrt(mean_square + scalars["epsilon"])
      moved = tf.where(tf.equal(delay, 0), values,
                       values + by * values * delay * values)

    def measure():
      distance = tf.abs(_computed(read(v)) - before)
      size = read(slots["step_size"])
      return assign(slots["step_size"], tf.where(
          tf.equal(size, 0), distance,
          size + scalars["rate"] * (distance - size)))

    with tf.control_dependencies([] if tf.executing_eagerly() else [
        getattr(x, "op", x) for x in assigned if x is not None]):
      moved = tf.identity(tf.cast(moved, g.dtype))
    if is_sparse:
      moved = tf.IndexedSlices(moved, indices, g.dense_shape)
    return moved, measure


def _computed(x):
  return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
