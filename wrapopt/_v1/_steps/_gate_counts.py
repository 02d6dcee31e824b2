"""The variables in which a gate of tf.compat.v1 counts."""

import typing
import weakref

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _staleness
from wrapopt._v1._graphs._unique_variable import get_unique_variable

tf1 = tf.compat.v1


class Counts(typing.NamedTuple):
  """The variables of a gate in a graph or in eager mode."""
  stale_counter: tf.Variable
  histogram: tf.Variable
  worker_histogram: tf.Variable | None


class GateCounts:
  """Makes and finds the counts of a gate.

  Args:
    opt: The optimizer, whose checkpoints hold those of all workers.
    worker: The name of the worker, or None.
  """

  def __init__(self, opt, worker):
    self._opt, self._worker = opt, worker
    # The step of eager mode, once a gradient has been applied.
    self._eager_step = None
    # By graph; by this object for eager mode.
    self._worker_histograms = weakref.WeakKeyDictionary()

  def of_step(self, step, worker_device):
    """The Counts of a gate that counts by the variable `step`."""
    opt, eager = self._opt, tf1.executing_eagerly_outside_functions()
    with tf.init_scope():
      graph = None if eager else tf1.get_default_graph()

      def variable(name, shape, dtype):
        key = (name, graph)
        if key not in opt._non_slot_dict:
          opt._maybe_initialize_trackable()
          with _replicas.colocated(step):
            v = get_unique_variable(
                name, shape, dtype, tf1.zeros_initializer(), step.device,
                tf1.GraphKeys.GLOBAL_VARIABLES, hasattr(step, "handle"))
          opt._handle_deferred_dependencies(name=name, trackable=v)
          opt._non_slot_dict[key] = v
        return opt._non_slot_dict[key]

      is_new = ("stale_counter", graph) not in opt._non_slot_dict
      counts = Counts(
          variable("stale_counter", [], tf.float32),
          variable("staleness_histogram", [2, _staleness.BUCKETS], tf.int64),
          self._worker_histogram(graph, worker_device))
      if eager:
        self._eager_step = step
      if is_new and graph is not None:
        _staleness.make_summaries(self.summaries(counts))
    return counts

  def _worker_histogram(self, graph, device):
    if self._worker is None:
      return None
    histograms = self._worker_histograms
    key = graph or self
    if key not in histograms:
      with tf.device(None), tf.device(device if graph else None):
        histograms[key] = tf1.Variable(
            tf.zeros([2, _staleness.BUCKETS], tf.int64), trainable=False,
            use_resource=True, name=f"{self._worker}/staleness_histogram",
            collections=[tf1.GraphKeys.LOCAL_VARIABLES])
    return histograms[key]

  def histogram(self, of_worker):
    """The histogram of all workers, or that of this one: a variable."""
    graph = (None if tf1.executing_eagerly_outside_functions()
             else tf1.get_default_graph())
    histogram = (
        self._worker_histograms.get(graph or self) if of_worker else
        self._opt._non_slot_dict.get(("staleness_histogram", graph)))
    if histogram is None:
      raise RuntimeError("staleness_stats() must be called after the first "
                         "apply_gradients or minimize in this graph.")
    if tf.executing_eagerly() and not of_worker and (
        self._eager_step is not None):
      ops.take_aborted_back(self._eager_step, histogram)
    return histogram

  def summaries(self, counts):
    """The summaries of Counts."""
    of_worker = counts.worker_histogram
    return _staleness.summaries(
        counts.histogram,
        *({} if of_worker is None else {name: of_worker}
          for name in (f"{self._worker}/staleness", self._worker)))
