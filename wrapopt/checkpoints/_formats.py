"""The formats of checkpoints: how variables are read, and written whole.

A `Source` is a checkpoint to read, a `Sink` one to write. Of TensorFlow: the
files of a Saver and of `tf.train.Checkpoint`, which are one format. Of Keras:
`.weights.h5`, `.keras`, and any other HDF5 file of variables. A snapshot is
such a checkpoint with a note of what it is an average of.
"""

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
import threading
import typing
import zipfile

import h5py
import ml_dtypes
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from wrapopt.checkpoints import _places

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32),
          np.dtype(np.float64))

# The variable in which a snapshot has its note, a string.
_NOTE = "wrapopt/snapshot"

# Bytes of a file of a TensorFlow checkpoint.
_SHARD = 128 << 20

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_PARTIAL = ".partial"
_WEIGHTS = "model.weights.h5"  # In a .keras file.


class Spec(typing.NamedTuple):
  """What is known of a variable before it is read."""
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def size(self):
    return int(np.prod(self.shape, dtype=np.int64))

  @property
  def nbytes(self):
    return self.size * self.dtype.itemsize


class Source:
  """A checkpoint to read.

  Attributes:
    path: Where it is.
    specs: {name of a variable: Spec}.
    note: The note of a snapshot, a dict, or None.
  """
  kind = ""

  def __init__(self, path):
    self.path = path
    self.specs = {}
    self.note = None
    self._placed = _places.Reader({})

  def is_averaged(self, name):
    """Whether a variable is averaged by default.

    Not that which an optimizer keeps for itself, and in a snapshot only
    averages.
    """
    return not (self._is_optimizer_state(name) or
                self.note and name in self.note["others"])

  def _is_optimizer_state(self, name):
    raise NotImplementedError

  def dtype(self, name):
    """The dtype of the variable in the model: a snapshot's may be narrower."""
    if self.note and name in self.note["dtypes"]:
      return np.dtype(getattr(ml_dtypes, self.note["dtypes"][name], None) or
                      self.note["dtypes"][name])
    return self.specs[name].dtype

  def can_slice(self, name):
    """Whether rows of a variable can be read without the others."""
    return name in self._placed

  def read(self, name, rows=None, into=None):
    """The value of a variable.

    Args:
      name: Its name.
      rows: A slice of its first dimension, if it `can_slice`.
      into: A contiguous array of the value's shape and dtype, that may be used.

    Returns:
      An array, which may be `into`.

    Raises:
      OSError: If it cannot be read.
    """
    try:
      if name not in self._placed:
        return self._read(name, rows, into)
      spec = self.specs[name]
      if into is None:
        into = np.empty(spec.shape, spec.dtype)
      if into.size:
        begin = rows.start * spec.nbytes // spec.shape[0] if rows else 0
        self._placed.read(name, begin, into)
      return into
    except Exception as e:
      raise OSError(f"Variable '{name}' of {self.path} cannot be read: "
                    f"{e}") from e

  def _read(self, name, rows, into):
    """The same of a variable that has no place."""
    raise NotImplementedError

  def close(self):
    self._placed.close()


class _TensorFlow(Source):
  """A checkpoint of TensorFlow."""
  kind = "TensorFlow"

  def __init__(self, path):
    super().__init__(path)
    self._reader = tf.train.load_checkpoint(path)
    self._lock = threading.Lock()  # A reader serves one thread at a time.
    shapes = self._reader.get_variable_to_shape_map()
    self.specs = {
        name: Spec(tuple(shapes[name]), np.dtype(dtype.as_numpy_dtype))
        for name, dtype in self._reader.get_variable_to_dtype_map().items()}
    if self.specs.pop(_NOTE, None):
      self.note = json.loads(self._reader.get_tensor(_NOTE))
    self._placed = _places.Reader(_places.of_tensorflow(path))
    self._state = (_state_of_optimizers(self._reader.get_tensor(_GRAPH))
                   if _GRAPH in self.specs else set())

  def _is_optimizer_state(self, name):
    return name in self._state

  def _read(self, name, rows, into):
    del rows, into
    with self._lock:
      return np.asarray(self._reader.get_tensor(name))


def _state_of_optimizers(graph):
  """Keys of the variables that are optimizers' in an object-based checkpoint."""
  graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(graph)
  found, todo = set(), []
  for node in graph.nodes:
    children = {child.local_name: child.node_id for child in node.children}
    # Those of TensorFlow have slots; Keras's have these.
    if node.slot_variables or {"_iterations", "_learning_rate"} <= {*children}:
      todo.extend(children.values())
      todo.extend(slot.slot_variable_node_id for slot in node.slot_variables)
  # An optimizer may know the model: what the model has by itself is not its.
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


class _H5(Source):
  """A file of variables in HDF5, as Keras writes it."""
  kind = "HDF5"

  def __init__(self, path):
    super().__init__(path)
    self._open(h5py.File(path, "r"))

  def _open(self, file, begin=0, descriptor=None):
    self.file = file
    self.datasets = {}
    self.file.visititems(self._add)
    note = self.datasets.pop(_NOTE, None)
    self.note = note and json.loads(note[()])
    self.specs = {name: Spec(dataset.shape, _dtype(dataset))
                  for name, dataset in self.datasets.items()}
    self._placed = _places.Reader(
        _places.of_hdf5(self.path, begin, {
            name: dataset for name, dataset in self.datasets.items()
            if self.specs[name].dtype in FLOATS}),
        file.id.get_vfd_handle() if descriptor is None else descriptor)

  def can_slice(self, name):
    return True

  def _add(self, name, item):
    if isinstance(item, h5py.Dataset):
      self.datasets[name] = item

  def _is_optimizer_state(self, name):
    # "optimizer" of Keras 3, "optimizer_weights" of its older files.
    return re.match("optimizer(_weights)?/", name) is not None

  def _read(self, name, rows, into):
    dataset, spec = self.datasets[name], self.specs[name]
    if spec.dtype.kind == "O":  # Strings.
      return dataset[()]
    if into is None:
      into = np.empty(spec.shape, spec.dtype)
    if into.size:
      dataset.read_direct(_stored(into), rows)
    return into

  def close(self):
    super().close()
    self.file.close()


def _dtype(dataset):
  # HDF5 has no bfloat16. Keras has its bytes, and says so.
  name = dataset.attrs.get("dtype")
  return BFLOAT16 if name == "bfloat16" else dataset.dtype.newbyteorder("=")


def _stored(array):
  return array.view("V2") if array.dtype == BFLOAT16 else array


class _Keras(_H5):
  """A model of Keras: an archive with its variables in HDF5."""
  kind = "Keras"

  def __init__(self, path):
    Source.__init__(self, path)
    with zipfile.ZipFile(path) as archive:
      if _WEIGHTS not in archive.namelist():
        raise ValueError(
            f"{path} must hold a {_WEIGHTS}, got {archive.namelist()}. Save the "
            "model with model.save().")
      info = archive.getinfo(_WEIGHTS)
      if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{path} must hold its {_WEIGHTS} uncompressed, as Keras writes it. "
            "Load it with Keras, and save it anew.")
    # Buffered, it reads as much as it is asked for.
    self._part = io.BufferedReader(_Part(path, info))
    self._open(h5py.File(self._part, "r"), self._part.raw.begin,
               self._part.fileno())

  def close(self):
    super().close()
    self._part.close()


class _Part(io.RawIOBase):
  """A file that is stored in an archive: a part of it.

  `ZipFile.open` reads all that is before a place to go back to it.
  """

  def __init__(self, path, info):
    super().__init__()
    self._file = open(path, "rb", buffering=0)
    # In front of the part: 30 bytes, which end with the lengths of two strings.
    header = os.pread(self.fileno(), 30, info.header_offset)
    self.begin = (info.header_offset + 30 +
                  int.from_bytes(header[26:28], "little") +
                  int.from_bytes(header[28:30], "little"))
    self._size = info.file_size
    self._at = 0

  def readable(self):
    return True

  def fileno(self):
    return self._file.fileno()

  def seekable(self):
    return True

  def tell(self):
    return self._at

  def seek(self, offset, whence=os.SEEK_SET):
    self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at,
                         os.SEEK_END: self._size}[whence]
    return self._at

  def readinto(self, buffer):
    view = memoryview(buffer).cast("B")
    view = view[:max(0, self._size - self._at)]
    got = os.preadv(self.fileno(), [view], self.begin + self._at)
    self._at += got
    return got

  def close(self):
    self._file.close()
    super().close()


def kind_of(path):
  """The class of the format that a path is named for."""
  if path.endswith(".keras"):
    return _Keras
  if path.endswith((".h5", ".hdf5")):
    return _H5
  return _TensorFlow


def ending_of(path):
  """What the names of files of a path's format end in."""
  return {_Keras: ".keras", _H5: ".weights.h5", _TensorFlow: ""}[kind_of(path)]


def open_source(path):
  """Opens a checkpoint.

  Args:
    path: A file of Keras, or the prefix of a TensorFlow checkpoint's files.

  Returns:
    A Source.

  Raises:
    OSError: If there is none, or it cannot be read.
    ValueError: If it is not what its name says.
  """
  kind = kind_of(path)
  # A TensorFlow checkpoint may be of the format before ".index".
  if not (tf.compat.v1.train.checkpoint_exists(path) if kind is _TensorFlow
          else os.path.exists(path)):
    raise FileNotFoundError(
        f"There is no checkpoint {path}. Name a .weights.h5 or .keras file, or "
        "the prefix of a TensorFlow checkpoint, which is what stands before "
        "'.index'.")
  try:
    return kind(path)
  except (OSError, ValueError):
    raise
  except Exception as e:
    raise OSError(f"{path} cannot be read: {e}") from e


def expand(path):
  """The checkpoints that a path stands for.

  Args:
    path: Of a checkpoint, of a file of one that ends in ".index", or of a
      directory, which stands for all checkpoints in it.

  Returns:
    A list of paths. Those of a directory are in the order of their names, in
    which numbers count as such.

  Raises:
    FileNotFoundError: If a directory has none.
  """
  path = os.fspath(path)
  if not os.path.isdir(path):
    return [path.removesuffix(".index")]
  found = {os.path.join(path, name.removesuffix(".index"))
           for name in os.listdir(path)
           if not name.startswith(".") and
           name.endswith((".index", ".h5", ".hdf5", ".keras"))}
  if not found:
    raise FileNotFoundError(f"There is no checkpoint in the directory {path}.")
  return sorted(found, key=lambda name: [
      int(part) if part.isdigit() else part
      for part in re.split(r"(\d+)", os.path.basename(name))])


# Writing


class Sink:
  """A checkpoint to write. It appears when it is whole, in `publish`.

  Until then it is in a directory beside it, whose name begins with a dot and
  ends in ".partial". A process that is killed leaves that directory behind.
  """

  def __init__(self, path):
    self.path = path
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    self._directory = tempfile.mkdtemp(
        prefix=f".{os.path.basename(path)}.", suffix=_PARTIAL, dir=parent)
    self._parent = parent

  def write(self, values):
    """Writes variables: [(name, rows, array)], where None is for all rows.

    The rows of a variable come in their order, none missing.
    """
    raise NotImplementedError

  def publish(self):
    """Has the checkpoint appear, in place of one of its name, when it is whole.
    """
    files = list(self._finish())
    for file in files:
      _to_disk(file)
    to = [os.path.join(self._parent, os.path.basename(f)) for f in files]
    if len(files) > 1:
      # Another's last file must not stand beside this one's first.
      with contextlib.suppress(FileNotFoundError):
        os.unlink(to[-1])
        _to_disk(self._parent)
    for file, name in zip(files, to):
      os.replace(file, name)
    _to_disk(self._parent)

  def _finish(self):
    """Files of the checkpoint, of which the last makes it one: an iterable."""
    raise NotImplementedError

  def discard(self):
    """Removes what is not published."""
    shutil.rmtree(self._directory, ignore_errors=True)


def _to_disk(path):
  """Returns when a file or directory is on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


class TensorFlowSink(Sink):
  """Writes a checkpoint of TensorFlow, in files of some `_SHARD` bytes."""

  def __init__(self, path, specs, note=None):
    """`specs`: {name: Spec} of variables that are written by rows."""
    super().__init__(path)
    self._specs = specs
    self._parts = []
    self._values = {}  # What the next file will hold.
    self._coming = None  # The variable of which some rows are written.
    if note is not None:
      self.write([(_NOTE, None, np.array(json.dumps(note).encode(), object))])

  def write(self, values):
    for name, rows, value in values:
      if rows is not None:
        shape, dtype = self._specs[name]
        if rows.start == 0:
          self._coming = np.empty(shape, dtype)
        self._coming[rows] = value
        if rows.stop < shape[0]:
          continue
        value, self._coming = self._coming, None
      self._values[name] = value
    if sum(x.nbytes for x in self._values.values()) >= _SHARD:
      self._write_part()

  def _write_part(self):
    part = os.path.join(self._directory, f"part-{len(self._parts)}")
    self._parts.append(part)
    values, self._values = self._values, {}

    def save():
      tensors = [tf.compat.v1.placeholder(
          tf.as_dtype(x.dtype) if x.dtype != object else tf.string, x.shape)
                 for x in values.values()]
      return tf.raw_ops.SaveV2(
          prefix=part, tensor_names=list(values),
          shape_and_slices=[""] * len(values), tensors=tensors), dict(
              zip(tensors, values.values()))

    _run(save)

  def _finish(self):
    if self._values:
      self._write_part()
    prefix = os.path.join(self._directory, os.path.basename(self.path))
    _run(lambda: (tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=self._parts, destination_prefix=prefix,
        delete_old_dirs=False), {}))
    for i in range(len(self._parts)):
      yield f"{prefix}.data-{i:05d}-of-{len(self._parts):05d}"
    # Without it, the others are no checkpoint.
    yield prefix + ".index"


def _run(build):
  """Runs the op that `build` makes, in whatever mode TensorFlow is in."""
  with tf.Graph().as_default(), tf.device("/cpu:0"):
    op, feed = build()
    with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(
        device_count={"GPU": 0})) as session:
      session.run(op, feed)


class H5Sink(Sink):
  """Writes a file of variables in HDF5."""

  def __init__(self, path, specs, like=None, note=None):
    """Makes the file.

    Args:
      path: Where it is to appear.
      specs: {name: Spec} of all variables.
      like: What has a `file` of HDF5 and its `datasets`, whose groups and
        attributes it gets, or None.
      note: Of a snapshot, a dict.
    """
    super().__init__(path)
    self._name = os.path.join(self._directory, os.path.basename(path))
    try:
      self._file = h5py.File(self._name, "w")
      if like is not None:
        _copy_attributes(like.file, self._file)
        like.file.visititems(self._copy_group)
      for name, spec in specs.items():
        of_bytes = spec.dtype == BFLOAT16
        dataset = self._file.create_dataset(
            name, spec.shape,
            "V2" if of_bytes else
            h5py.string_dtype() if spec.dtype == object else spec.dtype)
        if like is not None and name in like.datasets:
          _copy_attributes(like.datasets[name], dataset, without="dtype")
        if of_bytes:
          dataset.attrs["dtype"] = "bfloat16"
      if note is not None:
        self._file[_NOTE] = json.dumps(note)
    except BaseException:
      self.discard()
      raise

  def _copy_group(self, name, item):
    if isinstance(item, h5py.Group) and name != os.path.dirname(_NOTE):
      _copy_attributes(item, self._file.require_group(name))

  def write(self, values):
    for name, rows, value in values:
      if value.size:
        self._file[name][() if rows is None else rows] = _stored(value)

  def _finish(self):
    self._file.close()
    yield self._name

  def discard(self):
    with contextlib.suppress(Exception):
      self._file.close()
    super().discard()


def remove_partial(directory, prefix):
  """Removes what killed processes have left of checkpoints in a directory.

  Args:
    directory: Its path.
    prefix: What the names of the checkpoints begin with.
  """
  for name in os.listdir(directory):
    if name.startswith("." + prefix) and name.endswith(_PARTIAL):
      shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def _copy_attributes(source, to, without=None):
  for name, value in source.attrs.items():
    if name != without:
      to.attrs[name] = value


class KerasSink(H5Sink):
  """Writes a model of Keras: another one's, with these variables."""

  def __init__(self, path, specs, like):
    super().__init__(path, specs, like)
    self._like = like

  def _finish(self):
    for weights in super()._finish():
      whole = weights + ".whole"
      with zipfile.ZipFile(self._like.path) as archive, zipfile.ZipFile(
          whole, "w") as to:
        for info in archive.infolist():
          if info.filename == _WEIGHTS:
            to.write(weights, _WEIGHTS)
          elif not info.is_dir():
            with archive.open(info) as source, to.open(
                zipfile.ZipInfo(info.filename, info.date_time), "w",
                force_zip64=True) as target:
              shutil.copyfileobj(source, target)
      os.replace(whole, weights)
      yield weights


def sink_like(source, path, specs):
  """A Sink for variables in the format, and with the structure, of a Source."""
  if isinstance(source, _TensorFlow):
    return TensorFlowSink(path, specs)
  return (KerasSink if isinstance(source, _Keras) else H5Sink)(
      path, specs, source)


def check_output(path, like):
  """Refuses where no checkpoint like a Source can be written.

  Args:
    path: Of the output.
    like: A Source.

  Raises:
    ValueError: If the name is of another format.
    FileExistsError: If something is there already.
  """
  kind = kind_of(path)
  if kind is not type(like):
    endings = {_Keras: "'.keras'", _H5: "'.h5'"}
    wanted = (f"end in {endings[type(like)]}" if type(like) in endings else
              "not end in '.keras', '.h5' or '.hdf5'")
    raise ValueError(f"The output must {wanted}, as it is of the format of "
                     f"{like.path}, got {path}.")
  for file in path, path + ".index":
    if os.path.exists(file):
      raise FileExistsError(
          f"The output {file} exists. Remove it, or name another output.")
