"""The arguments, counts and summaries of all gates."""

import typing

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from wrapopt import _checks
from wrapopt import ops
from wrapopt._gates import _tokens

tf1 = tf.compat.v1

BUCKETS = 64


class StalenessStats(typing.NamedTuple):
  """The number of admitted and dropped updates, of all workers together.

  Tensors in a graph and in a `tf.function`, NumPy arrays in eager mode.

  Attributes:
    admitted: int64 scalar, the number of admitted updates.
    dropped: int64 scalar, the number of dropped ones.
    drop_rate: float64 scalar, the dropped fraction, in [0, 1]; 0 before the
      first update.
    admitted_histogram: int64, [64]: the numbers of admitted updates of
      staleness 0, 1, ... 62, and of 63 or more.
    dropped_histogram: The same numbers of dropped updates.
  """
  admitted: typing.Any
  dropped: typing.Any
  drop_rate: typing.Any
  admitted_histogram: typing.Any
  dropped_histogram: typing.Any


def check_not_compiled(subject, more=""):
  """Raises an error in a function that XLA is to compile.

  Args:
    subject: The class of the gate.
    more: The end of the error.
  """
  if not tf.executing_eagerly() and (
      control_flow_util.GraphOrParentsInXlaContext(
          tf.compat.v1.get_default_graph())):
    raise NotImplementedError(
        f"{subject} must not be used in a function that XLA compiles "
        "(jit_compile=True): the gate runs on the host. Compile a function of "
        f"the gradients alone, and call it inside of record_step().{more}")


def stats(histogram):
  """The `StalenessStats` of a histogram: in eager mode of NumPy arrays."""
  with ops.device_of(histogram):
    found = _stats(histogram)
  if tf.executing_eagerly():
    return StalenessStats(*(x.numpy() for x in found))
  return found


def _stats(histogram):
  counts = histogram.read_value()
  admitted, dropped = tf.reduce_sum(counts[0]), tf.reduce_sum(counts[1])
  rate = tf.math.divide_no_nan(tf.cast(dropped, tf.float64),
                               tf.cast(admitted + dropped, tf.float64))
  return StalenessStats(admitted, dropped, rate, counts[0], counts[1])


def checked_limit(staleness):
  """The argument `staleness` of a gate, checked."""
  if isinstance(staleness, tf.Variable) or tf.is_tensor(staleness):
    if not staleness.dtype.base_dtype.is_integer:
      raise TypeError("`staleness` must be an integer, got a tensor of dtype "
                      f"{staleness.dtype.base_dtype.name}.")
    return staleness
  return _checks.integer("staleness", staleness)


def factor(policy, staleness):
  """By what a policy multiplies admitted gradients, or None for nothing.

  Args:
    policy: "drop", "scale", or a function of the staleness.
    staleness: A scalar int64 tensor. It is negative if the step was set back,
      or if an earlier try of the update is over.
  """
  if policy == "drop":
    return None
  if policy == "scale":
    return 1 / tf.cast(tf.maximum(staleness, 1), tf.float64)
  found = policy(tf.maximum(staleness, 0))
  try:
    by = ops.float64(found)
    by.shape.assert_has_rank(0)
  except (TypeError, ValueError, tf.errors.OpError):
    raise ValueError("`policy` must return a number or a scalar tensor, got "
                     f"{found!r}.") from None
  return by


def multiplied(gradient, factor):
  """A gradient times a factor: a tensor, or `tf.IndexedSlices`."""
  by = tf.cast(factor, gradient.dtype)
  if isinstance(gradient, tf.IndexedSlices):
    return tf.IndexedSlices(gradient.values * by, gradient.indices,
                            gradient.dense_shape)
  return gradient * by


def summaries(histogram, bars_of=(), rates_of=()):
  """The summaries of a gate.

  Args:
    histogram: The variable with the counts of all workers.
    bars_of: {prefix of tags: variable with counts that are shown as bars}.
    rates_of: {prefix of tags: variable of which the drop rate is shown}.

  Yields:
    (tag, name of TensorBoard's plugin, function that returns the value).
  """
  def drop_rate(histogram):
    with ops.device_of(histogram):
      return _stats(histogram).drop_rate

  def bars(histogram, of):
    with ops.device_of(histogram):
      return _bars(getattr(_stats(histogram), f"{of}_histogram"))

  yield ("Gradient_staleness_percentage", "scalars",
         lambda: drop_rate(histogram))
  for prefix in rates_of:
    yield (f"{prefix}/drop_rate", "scalars",
           lambda v=rates_of[prefix]: drop_rate(v))
  for prefix in bars_of:
    for of in "admitted", "dropped":
      yield (f"{prefix}/{of}", "histograms",
             lambda v=bars_of[prefix], of=of: bars(v, of))


def _bars(counts):
  """[64] counts as TensorBoard's histograms: [64, 3] of left, right, count."""
  left = np.arange(BUCKETS) - 0.5
  return tf.stack([tf.constant(left, tf.float64),
                   tf.constant(left + 1, tf.float64),
                   tf.cast(counts, tf.float64)], axis=1)


def metadata(plugin):
  """The metadata of a summary of a plugin of TensorBoard."""
  return tf.compat.v1.SummaryMetadata(
      plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin))


def write(found, step):
  """Writes summaries in TensorFlow 2, if there is a summary writer.

  Args:
    found: The result of `summaries`.
    step: The step variable.
  """
  step = tf.cast(step.read_value(), tf.int64)
  for tag, plugin, value in found:
    # The functions are called only if there is a summary writer.
    tf.summary.write(
        tag, (lambda value=value: tf.cast(value(), tf.float32))
        if plugin == "scalars" else value, step, metadata(plugin))


def count(histogram, verdict, token):
  """Counts a verdict in the histogram of a worker, if there is one.

  Args:
    histogram: A variable, or None.
    verdict: A `wrapopt.ops.StalenessVerdict`.
    token: As in `wrapopt.ops.staleness_gate`.

  Returns:
    An operation to run, or None.
  """
  if histogram is None:
    return None
  count = tf.ones([1], tf.int64)
  if token is not _tokens.NONE:
    # An earlier try was counted.
    is_over = ~verdict.accept & tf.equal(verdict.staleness, -1)
    count = tf.where(is_over, tf.zeros_like(count), count)
  bucket = tf.clip_by_value(verdict.staleness, 0, BUCKETS - 1)
  row = tf.where(verdict.accept, tf.constant(0, tf.int64), 1)
  one = tf.scatter_nd(tf.reshape(tf.stack([row, bucket]), [1, 2]), count,
                      tf.constant([2, BUCKETS], tf.int64))
  with ops.device_of(histogram):
    added = histogram.assign_add(one, read_value=False)
  return None if tf.executing_eagerly() else getattr(added, "op", added)


def make_summaries(found):
  """Makes the ops of the summaries that `summaries` returns, in a graph."""
  # The summaries do not wait for the update: the merged summary may also run
  # without it.
  for tag, plugin, value in found:
    if plugin == "scalars":
      tf1.summary.scalar(tag, value())
    else:
      tf1.summary.tensor_summary(
          tag, value(), summary_metadata=metadata(plugin))
