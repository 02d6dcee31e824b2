"""The format of TensorFlow.

A Saver and `tf.train.Checkpoint` use the same one.
"""

import contextlib
import glob
import json
import os
import re

import numpy as np

from wrapopt._tf import tf
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

# An object-based checkpoint names the children of its objects, not their
# classes. An object is an optimizer if it has slots, or the children of one of
# these: an optimizer of Keras, one that scales losses in graphs, a gate around
# an optimizer without slots.
_CHILDREN_OF_OPTIMIZERS = (
    {"_iterations", "_variables"}, {"_iterations", "_learning_rate"},
    {"base_optimizer", "loss_scale"},
    {"stale_counter", "staleness_histogram"})

# The limit of bytes that wait to be written to a data file, and of its size;
# or one variable, if that is more.
_DATA_FILE = 256 << 20


class TensorFlowSink(_sink.Sink):
  """Writes a TensorFlow checkpoint."""

  def __init__(self, path, note=None, like=None, made=None):
    super().__init__(path, note, like)
    self._parts = []  # Prefixes of checkpoints with one data file.
    self._waiting = {}  # {name: an array, or a Source to copy it from}
    self._bytes = 0
    if note is not None:
      self.write(_source.NOTE, np.array(json.dumps(note).encode(), object))
    self._how = made

  def write(self, name, value):
    self._add(name, value, value.nbytes)

  def copy(self, source, name):
    self._add(name, source, source.specs[name].nbytes)

  def _add(self, name, value, nbytes):
    if self._waiting and self._bytes + nbytes > _DATA_FILE:
      self._save()
    self._waiting[name] = value
    self._bytes += nbytes

  def _save(self):
    """Writes what waits to a part."""
    waiting, self._waiting, self._bytes = self._waiting, {}, 0
    self._parts.append(
        os.path.join(self._directory, "parts", str(len(self._parts))))
    with self._writing(), _session() as session:
      tensors, feeds, copied = [], {}, {}
      for name, value in waiting.items():
        if isinstance(value, np.ndarray):
          tensor = tf.compat.v1.placeholder(
              tf.string if value.dtype == object else value.dtype, value.shape)
          feeds[tensor] = value
        else:
          # The dtype may be one that NumPy lacks.
          [tensor] = tf.raw_ops.RestoreV2(
              prefix=value.path, tensor_names=[name], shape_and_slices=[""],
              dtypes=[value.dtypes[name]])
          copied[tensor.op] = name, value.path
        tensors.append(tensor)
      try:
        _run(session, tf.raw_ops.SaveV2(
            prefix=self._parts[-1], tensor_names=[*waiting],
            shape_and_slices=[""] * len(waiting), tensors=tensors), feeds)
      except _Failed as e:
        if e.op in copied:
          raise _source.unread(*copied[e.op], e) from e
        raise

  def _finish(self):
    self._save()
    prefix = os.path.join(self._directory, os.path.basename(self.path))
    with _session() as session:
      _run(session, tf.raw_ops.MergeV2Checkpoints(
          checkpoint_prefixes=self._parts, destination_prefix=prefix))
    index, *data = _files_of(prefix)
    # The data files are not a checkpoint without the index.
    files = [*data, index]
    if self._how is not None:
      # The format has no metadata.
      files.insert(0, prefix + ".made.json")
      with open(files[0], "w", encoding="utf-8") as file:
        file.write(self._how + "\n")
    return files

  def _replace(self, files):
    # An old index must not be next to new data files.
    for file in _files_of(self.path):
      with contextlib.suppress(FileNotFoundError):
        os.unlink(file)
        _files.to_disk(self._parent)
    super()._replace(files)


@contextlib.contextmanager
def _session():
  """A session on the CPU, in the calling thread and in a graph of its own."""
  config = tf.compat.v1.ConfigProto(
      device_count={"GPU": 0}, inter_op_parallelism_threads=-1)
  with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
    yield session


class _Failed(OSError):
  """The reason why an op failed.

  Attributes:
    op: The op.
  """
  op = None


def _run(session, op, feeds=None):
  try:
    session.run(op, feeds)
  except tf.errors.OpError as e:
    # The reason is between the place in the program and that in the graph.
    reason = re.sub(r"(?s)^Graph execution error.*?\nNode: [^\n]*\n", "",
                    e.message)
    failed = _Failed(re.split(r"\s*\[\[\{\{node", reason)[0])
    failed.op = e.op
    raise failed from e


def _files_of(path):
  """The paths of the index file of a checkpoint, and of its data files."""
  return [path + ".index", *glob.glob(glob.escape(path) + ".data-*")]


class TensorFlowSource(_source.Source):
  """A checkpoint of TensorFlow, named by the prefix of its files.

  It is the last of the formats: it owns all names.
  """
  kind = "TensorFlow"
  Sink = TensorFlowSink
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
    return os.path.exists(cls.file_of(path)) or os.path.exists(path)

  @classmethod
  def path_of(cls, file):
    return file.removesuffix(".index")

  @classmethod
  def file_of(cls, path):
    return path + ".index"

  def __init__(self, path):
    super().__init__(path)
    try:
      self._reader = tf.train.load_checkpoint(path)
    except tf.errors.DataLossError as e:
      if os.path.exists(self.file_of(path)) or "sstable" not in e.message:
        raise
      # Checkpoints of the first TensorFlow are a file without an ending.
      raise ValueError(
          f"{path} must be a file of TensorFlow or Keras, got one of another "
          "format. Load other weights into the model, and save them with "
          "model.save_weights('x.weights.h5'). The variables of a SavedModel "
          "are the checkpoint 'variables/variables' in its folder.") from e
    self.dtypes = self._reader.get_variable_to_dtype_map()
    shapes = self._reader.get_variable_to_shape_map()
    # NumPy lacks variants, such as the states of iterators.
    self.specs = {
        name: _source.Spec(tuple(shapes[name]), np.dtype(
            object if dtype == tf.variant else dtype.as_numpy_dtype))
        for name, dtype in self.dtypes.items()}
    if self.specs.pop(_source.NOTE, None):
      self.note = _source.note_of(self._reader.get_tensor(_source.NOTE),
                                  self.specs)
    self._state = (_state_of_optimizers(self._reader.get_tensor(_GRAPH))
                   if _GRAPH in self.specs else set())

  def _files(self):
    # An old checkpoint is one file.
    return [file for file in (self.path, *_files_of(self.path))
            if os.path.isfile(file)]

  def _is_optimizer_state(self, name):
    return name in self._state

  def _read(self, name):
    return np.asarray(self._reader.get_tensor(name), self.specs[name].dtype)


def _state_of_optimizers(graph):
  """Keys of optimizers' variables in an object-based checkpoint."""
  from tensorflow.core.protobuf import trackable_object_graph_pb2
  graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(graph)
  optimizers, held, trained = set(), set(), set()
  for node_id, node in enumerate(graph.nodes):
    children = _children(node)
    if node.slot_variables or any(
        names <= children.keys() for names in _CHILDREN_OF_OPTIMIZERS):
      optimizers.add(node_id)
      # An optimizer of Keras refers to the variables that it trains.
      if "_trainable_variables" in children:
        trained.add(children.pop("_trainable_variables"))
      held.update(children.values())
      if "_variables" in children:
        held.update(_children(graph.nodes[children["_variables"]]).values())
      held.update(slot.slot_variable_node_id for slot in node.slot_variables)
  # It may also refer to the model, whose variables are not its state.
  own = {node_id for node_id in held if graph.nodes[node_id].attributes}
  model = _reached(graph, {0, *trained}, without=optimizers | own)
  return {attribute.checkpoint_key
          for node_id in _reached(graph, held, without=model)
          for attribute in graph.nodes[node_id].attributes}


def _children(node):
  return {child.local_name: child.node_id for child in node.children}


def _reached(graph, roots, without):
  found, todo = set(), [*roots]
  while todo:
    node_id = todo.pop()
    if node_id not in found and node_id not in without:
      found.add(node_id)
      todo.extend(_children(graph.nodes[node_id]).values())
  return found
