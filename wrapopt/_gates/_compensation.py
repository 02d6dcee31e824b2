"""Compensates the gradients of a step for their age."""

import typing

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _origins


def computed_dtype(dtype):
  """That of a policy's arithmetic and states, for a variable of `dtype`."""
  return tf.float64 if dtype.base_dtype == tf.float64 else tf.float32


class Compensated(typing.NamedTuple):
  """How the gradients of a step are compensated.

  The policies are computed in the order of operations that is written here, so
  that all halves and modes give the same bits. Where the weights have not
  moved, a gradient stays the same to the bit, even if it is infinite.

  Attributes:
    policy: One of `_policies.COMPENSATING`.
    origins: {id of a variable: the weights of its gradient, a tensor}.
    states: {state of the policy: {id of a variable: its slot}}.
  """
  policy: typing.Any
  origins: dict[int, tf.Tensor]
  states: dict[str, dict]

  def take(self, pairs, in_float32=False):
    """Compensates gradients before a step.

    Args:
      pairs: A list of (gradient, variable).
      in_float32: Whether gradients of low precision become float32, not rounded
        again.

    Returns:
      The same with other gradients, in which no row is listed twice, and a
      function of the operation of the step that returns an operation that runs
      after it, or None.
    """
    taken, measures = [], []
    for g, v in pairs:
      if g is None:
        taken.append((g, v))
        continue
      with ops.device_of(v):
        moved, measure = self._take(
            g, v, computed_dtype(g.dtype) if in_float32 else g.dtype)
      taken.append((moved, v))
      measures.append((v, measure))

    def after(done):
      if not self._is_gap_aware():
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

  def _is_gap_aware(self):
    return "step_size" in self.states

  def _take(self, g, v, dtype):
    """The gradient of a variable, of a dtype, and a function after the step."""
    is_sparse = isinstance(g, tf.IndexedSlices)
    origin = self.origins[id(v)]
    slots = {name: _replicas.values(slots[id(v)])[0]
             for name, slots in self.states.items()}
    [v] = _replicas.values(v)
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

    before = _computed(read(v))
    delay = before - _computed(origin)
    scalars = {name: tf.constant(x, values.dtype)
               for name, x in self.policy._scalars.items()}
    assigned = []
    if self._is_gap_aware():
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
        # In graphs, TensorFlow would make a / sqrt(b) a product with rsqrt(b).
        by = tf.math.divide_no_nan(
            by, tf.sqrt(mean_square + scalars["epsilon"]))
      # g^2 would overflow where lambda is 1 / |g|.
      moved = tf.where(tf.equal(delay, 0), values,
                       values + by * values * delay * values)

    def measure():
      distance = tf.abs(_computed(read(v)) - before)
      size = read(slots["step_size"])
      rate = scalars["rate"]
      return assign(slots["step_size"], tf.where(
          tf.equal(size, 0), distance, size - rate * size + rate * distance))

    with tf.control_dependencies([] if tf.executing_eagerly() else [
        getattr(x, "op", x) for x in assigned if x is not None]):
      moved = tf.identity(tf.cast(moved, dtype))
    if is_sparse:
      moved = tf.IndexedSlices(moved, indices, g.dense_shape)
    return moved, measure


def _computed(x):
  return tf.cast(x, computed_dtype(x.dtype))
