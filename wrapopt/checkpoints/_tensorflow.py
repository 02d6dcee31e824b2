"""The format of TensorFlow.

A Saver and `tf.train.Checkpoint` use the same one.
"""

import contextlib
import glob
import json
import os
import threading

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from wrapopt.checkpoints import _bundles
from wrapopt.checkpoints import _format
from wrapopt.checkpoints import _places
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class TensorFlowSource(_source.Source):
  """A checkpoint of TensorFlow."""
  kind = "TensorFlow"

  def __init__(self, path):
    super().__init__(path)
    self._reader = tf.train.load_checkpoint(path)
    self._lock = threading.Lock()  # A reader is not thread-safe.
    shapes = self._reader.get_variable_to_shape_map()
    self.specs = {
        name: _source.Spec(tuple(shapes[name]), np.dtype(dtype.as_numpy_dtype))
        for name, dtype in self._reader.get_variable_to_dtype_map().items()
        if dtype != tf.variant}
    if self.specs.pop(_source.NOTE, None):
      self.note = _source.note_of(self._reader.get_tensor(_source.NOTE),
                                  self.specs)
    bundle = _bundles.bundle_of(path)
    self._placed = _places.Reader(bundle.places)
    self._variants = bundle.variants
    self._state = (_state_of_optimizers(self._reader.get_tensor(_GRAPH))
                   if _GRAPH in self.specs else set())

  def _files(self):
    # An old checkpoint is one file.
    return [file for file in (self.path, self.path + ".index",
                              *glob.glob(glob.escape(self.path) + ".data-*"))
            if os.path.isfile(file)]

  def _is_optimizer_state(self, name):
    return name in self._state

  def _read(self, name, rows, into):
    del rows, into
    with self._lock:
      return np.asarray(self._reader.get_tensor(name), self.specs[name].dtype)

  def variants(self):
    """Yields what `_bundles.Writer.copy` takes, for each of dtype variant."""
    with contextlib.closing(_places.Reader({
        name: place for name, (_, place) in self._variants.items()})) as reader:
      for name, (entry, place) in self._variants.items():
        data = np.empty(place.size, np.uint8)
        reader.read(name, 0, data, self.drops_pages)
        yield name, entry, data


def _state_of_optimizers(graph):
  """Keys of optimizers' variables in an object-based checkpoint."""
  graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(graph)
  found, todo = set(), []
  for node in graph.nodes:
    children = {child.local_name: child.node_id for child in node.children}
    # An optimizer of TensorFlow has slots, one of Keras these children.
    if node.slot_variables or {"_iterations", "_learning_rate"} <= {*children}:
      todo.extend(children.values())
      todo.extend(slot.slot_variable_node_id for slot in node.slot_variables)
  # An optimizer may refer to the model, whose variables are not its state.
  model = _reached(graph, 0, without={*todo})
  keys = set()
  while todo:
    node_id = todo.pop()
    if node_id not in found and node_id not in model:
      found.add(node_id)
      node = graph.nodes[node_id]
      keys.update(a.checkpoint_key for a in node.attributes)
      todo.extend(child.node_id for child in node.children)
  return keys


def _reached(graph, root, without):
  found, todo = set(), [root]
  while todo:
    node_id = todo.pop()
    if node_id not in found and node_id not in without:
      found.add(node_id)
      todo.extend(child.node_id for child in graph.nodes[node_id].children)
  return found


class TensorFlowSink(_sink.Sink):
  """Writes a TensorFlow checkpoint."""

  def __init__(self, path, specs, note=None):
    """`specs` are {name: Spec} of the variables that are written."""
    super().__init__(path)
    self._specs = specs
    try:
      with self._writing():
        self._bundle = _bundles.Writer(
            os.path.join(self._directory, os.path.basename(path)))
    except BaseException:
      super().discard()
      raise
    if note is not None:
      self.write([(_source.NOTE, None,
                   np.array(json.dumps(note).encode(), object))])

  def write(self, values):
    with self._writing():
      for name, rows, value in values:
        self._bundle.write(name, value, value.shape if rows is None
                           else self._specs[name].shape)
        self._send(value.nbytes, self._bundle.flush, self._bundle.data)

  def copy(self, source, names):
    super().copy(source, names)
    for name, entry, data in source.variants():
      with self._writing():
        self._bundle.copy(name, entry, data)

  def _finish(self):
    self._bundle.close()
    yield self._bundle.data
    # The other file is not a checkpoint without it.
    yield self._bundle.index

  def discard(self):
    with contextlib.suppress(OSError):  # It writes what is left.
      self._bundle.discard()
    super().discard()


class TensorFlow(_format.Format):
  """Checkpoints of TensorFlow, named by the prefix of their files.

  It is the last of the formats: it owns all names.
  """
  Source, Sink = TensorFlowSource, TensorFlowSink
  endings = (".index",)
  ending = ""

  @classmethod
  def owns(cls, path):
    return True

  @classmethod
  def rule(cls, endings):
    *others, last = map(repr, endings)
    return f"not end in {', '.join(others)} or {last}"

  @classmethod
  def exists(cls, path):
    # An old checkpoint has no ".index" file.
    return tf.compat.v1.train.checkpoint_exists(path)

  @classmethod
  def path_of(cls, file):
    return file.removesuffix(".index")

  @classmethod
  def file_of(cls, path):
    return path + ".index"

  @classmethod
  def sink_like(cls, source, path, specs):
    return TensorFlowSink(path, specs)
