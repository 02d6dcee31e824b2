"""The records of steps, and which of them gradients have."""

import contextlib
import threading
import typing
import weakref

import tensorflow as tf

from wrapopt import ops
from wrapopt._gates import _origins
from wrapopt._gates import _records

tf1 = tf.compat.v1


class Record(typing.NamedTuple):
  """A record of a step.

  Attributes:
    recorded: An int64 scalar.
    step: The variable that counts steps. None if a graph's tensors imply it.
  """
  recorded: tf.Tensor
  step: tf.Variable | None


class Recorder:
  """The records of an optimizer.

  Attributes:
    known: The variables whose values eager records keep, or None if they keep
      none.
  """

  def __init__(self, keeps_weights):
    self.known = _origins.TrainedVariables() if keeps_weights else None
    # The record of gradients for which none is found: in a graph, the name of
    # the graph's last one, or None once it has served; in eager mode, this
    # thread's last one.
    self._last_in_graph = weakref.WeakKeyDictionary()
    self._eager = threading.local()
    # In eager mode, by the id of a gradient: (weak reference, record).
    self._of_gradient = {}
    # The open blocks of this thread.
    self._blocks = threading.local()

  @contextlib.contextmanager
  def block(self, record):
    """The block in which gradients are computed that have a record."""
    self.remember(record)
    blocks = self._blocks.__dict__.setdefault("open", [])
    blocks.append(record)
    try:
      with self.reads_after(record.recorded), self._keeping(record.recorded):
        yield
    finally:
      blocks.pop()

  @contextlib.contextmanager
  def _keeping(self, recorded):
    """Keeps the weights of gradients that a block computes in eager mode."""
    if self.known is None or not tf.executing_eagerly():
      yield
      return
    recorded._wrapopt_weights = _origins.Weights(self.known)
    with recorded._wrapopt_weights.of_block():
      yield

  def reads_after(self, recorded):
    """The context in which ops read weights after a record."""
    if self.known is not None:
      return _records.reads_after(recorded, _origins.copy_of)
    return _records.reads_after(recorded)

  def open_block(self):
    """The innermost block of `record_step` that builds this graph, or None."""
    for record in reversed(self._blocks.__dict__.get("open", [])):
      if _records.graph_of(record.recorded) is _graph_here():
        return record
    return None

  def remember(self, record):
    """Makes a record the last one of this graph, or of this thread."""
    graph = _graph_here()
    if graph is None:
      self._eager.last = record
    else:
      self._last_in_graph[graph] = record.recorded.op.name

  def before(self, loss):
    """The record that was made before `loss` was built, or None."""
    if not callable(loss) and tf.is_tensor(loss) and not tf.executing_eagerly():
      found = _records.records_before([loss.op])
      if found:
        return Record(found[-1].outputs[0], None)
    return self.open_block()

  def remember_gradient(self, gradient, record):
    """Notes the record of an eager gradient."""
    tensor = _records.tensor_of(gradient)
    key = id(tensor)
    self._of_gradient[key] = (
        weakref.ref(tensor, lambda _: self._of_gradient.pop(key, None)), record)

  def weights_of(self, gradient, variable, recorded):
    """The weights that an eager gradient was computed from, or None."""
    record = self._of_gradient.get(id(_records.tensor_of(gradient)))
    if recorded is None and record and record[0]() is not None:
      recorded = record[1].recorded
    elif recorded is None and (last := getattr(self._eager, "last", None)):
      recorded = last.recorded
    weights = getattr(recorded, "_wrapopt_weights", None)
    return weights and weights.get(variable)

  def of(self, gradients, step):
    """The record of these gradients: an int64 scalar."""
    records = (self._recorded_eagerly(gradients, step)
               if tf.executing_eagerly() else
               self._recorded_in_graph(gradients, step))
    if not records:
      raise ValueError(
          "The step must be recorded before gradients are computed, got "
          "gradients without a record. Take them from compute_gradients of "
          "this optimizer (or call minimize); or compute them in `with "
          "opt.record_step(global_step) as recorded:` and pass `recorded` to "
          "apply_gradients. In eager mode and in a tf.function, a record "
          "serves one apply_gradients.")
    # The oldest of several records counts.
    with ops.device_of(step):
      return tf.reduce_min(tf.stack(records)) if records[1:] else records[0]

  def _recorded_eagerly(self, gradients, step):
    last = getattr(self._eager, "last", None)
    found = [self._of_gradient.get(id(_records.tensor_of(g)))
             for g in gradients]
    records = [r[1] for r in found if r and r[0]() is not None]
    records = records or ([last] if last is not None else [])
    for record in records:
      if record.step is not step:
        raise _another_step(step, record.step.name)
    if any(record is last for record in records):
      # Later gradients need a record of their own.
      self._eager.last = None
    return [record.recorded for record in records]

  def _recorded_in_graph(self, gradients, step):
    graph = tf1.get_default_graph()
    last = self._last_before(graph)
    found = _records.records_before(
        [_records.tensor_of(g).op for g in gradients]) or (
            [last] if last is not None else [])
    handle = _records.from_outside(_records.graph_input(step))
    for op in found:
      if _records.from_outside(op.inputs[0]) is not handle:
        raise _another_step(step, op.inputs[0].name)
    if last in found and tf1.executing_eagerly_outside_functions():
      # As in eager mode. Not deleted, because other branches may look it up.
      self._last_in_graph[graph] = None
    return [op.outputs[0] for op in found]

  def _last_before(self, graph):
    """The op of the record that is the last one in a graph, or None."""
    while graph is not None:
      if graph in self._last_in_graph:
        name = self._last_in_graph[graph]
        return name and graph.get_operation_by_name(name)
      # In a branch, gradients may come from the graph around it.
      graph = getattr(graph, "outer_graph", None)
    return None


def _graph_here():
  return None if tf.executing_eagerly() else tf1.get_default_graph()


def _another_step(step, recorded):
  return ValueError(
      "`global_step` must be the step variable that was recorded, "
      f"'{recorded}', got '{step.name}'. Pass the optimizer the right one as "
      "`global_step`.")
