"""Reads and writes checkpoints of several formats.

A `Source` is a checkpoint to read, a `Sink` one to write. The formats are those
of TensorFlow (a Saver and `tf.train.Checkpoint` use the same one) and of Keras
(`.weights.h5`, `.keras`, and any other HDF5 file of variables). A snapshot is
such a checkpoint with a note that describes its averages.
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

from wrapopt.checkpoints import _bundles
from wrapopt.checkpoints import _places

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32),
          np.dtype(np.float64))

# The variable that holds the note of a snapshot, a string.
_NOTE = "wrapopt/snapshot"

# So many bytes are written to a file before they are sent to the disk.
SEND = 128 << 20

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_PARTIAL = ".partial"
_WEIGHTS = "model.weights.h5"  # In a .keras file.


class Spec(typing.NamedTuple):
  """The shape and dtype of a variable."""
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
    path: Its path.
    specs: {name of a variable: Spec}.
    note: The note of a snapshot, a dict, or None.
    drops_pages: Whether to drop what is read from the page cache.
  """
  kind = ""
  drops_pages = False

  def __init__(self, path):
    self.path = path
    self.specs = {}
    self.note = None
    self._placed = _places.Reader({})

  def is_averaged(self, name):
    """Whether a variable is averaged by default.

    State of optimizers is not. In a snapshot, only averages are.
    """
    return not (self._is_optimizer_state(name) or
                self.note and name in self.note["others"])

  def _is_optimizer_state(self, name):
    raise NotImplementedError

  def dtype(self, name):
    """The dtype of the variable in the model; a snapshot may be narrower."""
    if self.note and name in self.note["dtypes"]:
      return np.dtype(getattr(ml_dtypes, self.note["dtypes"][name], None) or
                      self.note["dtypes"][name])
    return self.specs[name].dtype

  def can_slice(self, name):
    """Whether some rows of a variable can be read alone."""
    return name in self._placed

  def read(self, name, rows=None, into=None):
    """The value of a variable.

    Args:
      name: Its name.
      rows: A slice of its first dimension, if `can_slice`; None for all rows.
      into: A contiguous array of the value's shape and dtype for the result, or
        None. It may be ignored.

    Returns:
      An array, which may be `into`.

    Raises:
      OSError: If the variable cannot be read.
    """
    try:
      if name not in self._placed:
        return self._read(name, rows, into)
      spec = self.specs[name]
      if into is None:
        into = np.empty(spec.shape, spec.dtype)
      if into.size:
        begin = rows.start * spec.nbytes // spec.shape[0] if rows else 0
        self._placed.read(name, begin, into, self.drops_pages)
      return into
    except Exception as e:
      raise OSError(f"Variable '{name}' of {self.path} cannot be read: "
                    f"{e}") from e

  def _read(self, name, rows, into):
    """The value of a variable that has no Place."""
    raise NotImplementedError

  def close(self):
    self._placed.close()


class _TensorFlow(Source):
  """A checkpoint of TensorFlow."""
  kind = "TensorFlow"

  def __init__(self, path):
    super().__init__(path)
    self._reader = tf.train.load_checkpoint(path)
    self._lock = threading.Lock()  # A reader is not thread-safe.
    shapes = self._reader.get_variable_to_shape_map()
    self.specs = {
        name: Spec(tuple(shapes[name]), np.dtype(dtype.as_numpy_dtype))
        for name, dtype in self._reader.get_variable_to_dtype_map().items()}
    if self.specs.pop(_NOTE, None):
      self.note = json.loads(self._reader.get_tensor(_NOTE))
    self._placed = _places.Reader(_bundles.places_of(path))
    self._state = (_state_of_optimizers(self._reader.get_tensor(_GRAPH))
                   if _GRAPH in self.specs else set())

  def _is_optimizer_state(self, name):
    return name in self._state

  def _read(self, name, rows, into):
    del rows, into
    with self._lock:
      return np.asarray(self._reader.get_tensor(name), self.specs[name].dtype)


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


class _H5(Source):
  """An HDF5 file of variables, as Keras writes it."""
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
    # "optimizer" in Keras 3, "optimizer_weights" in older files.
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
  # HDF5 has no bfloat16. Keras stores its bytes, and an attribute.
  name = dataset.attrs.get("dtype")
  return BFLOAT16 if name == "bfloat16" else dataset.dtype.newbyteorder("=")


def _stored(array):
  return array.view("V2") if array.dtype == BFLOAT16 else array


class _Keras(_H5):
  """A Keras model: an archive with the variables in an HDF5 file."""
  kind = "Keras"

  def __init__(self, path):
    Source.__init__(self, path)
    with zipfile.ZipFile(path) as archive:
      if _WEIGHTS not in archive.namelist():
        raise ValueError(
            f"{path} must contain {_WEIGHTS}, got {archive.namelist()}. Save "
            "the model with model.save().")
      info = archive.getinfo(_WEIGHTS)
      if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{path} must contain an uncompressed {_WEIGHTS}, as Keras writes "
            "it, got a compressed one. Load the model with Keras and save it "
            "again.")
    # A buffered reader returns as many bytes as requested.
    self._part = io.BufferedReader(_Part(path, info))
    self._open(h5py.File(self._part, "r"), self._part.raw.begin,
               self._part.fileno())

  def close(self):
    super().close()
    self._part.close()


class _Part(io.RawIOBase):
  """An uncompressed file in an archive.

  Unlike this class, the file of `ZipFile.open` seeks backwards by reading from
  the start again.
  """

  def __init__(self, path, info):
    super().__init__()
    self._file = open(path, "rb", buffering=0)
    # The header: 30 bytes, which end with the lengths of the two strings that
    # follow.
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
  """The Source class for the name of a path."""
  if path.endswith(".keras"):
    return _Keras
  if path.endswith((".h5", ".hdf5")):
    return _H5
  return _TensorFlow


def ending_of(path):
  """The ending of file names in a path's format."""
  return {_Keras: ".keras", _H5: ".weights.h5", _TensorFlow: ""}[kind_of(path)]


def open_source(path):
  """Opens a checkpoint.

  Args:
    path: A file of Keras, or the prefix of a TensorFlow checkpoint's files.

  Returns:
    A Source.

  Raises:
    OSError: If there is no checkpoint, or it cannot be read.
    ValueError: If its contents do not fit its name.
  """
  kind = kind_of(path)
  # An old TensorFlow checkpoint has no ".index" file.
  if not (tf.compat.v1.train.checkpoint_exists(path) if kind is _TensorFlow
          else os.path.exists(path)):
    raise FileNotFoundError(
        f"There is no checkpoint {path}. Pass a .weights.h5 or .keras file, or "
        "the prefix of a TensorFlow checkpoint, which is the part before "
        "'.index'.")
  try:
    return kind(path)
  except (OSError, ValueError):
    raise
  except Exception as e:
    raise OSError(f"{path} cannot be read: {e}") from e


def expand(path):
  """The checkpoints of a path.

  Args:
    path: The path of a checkpoint, of its file that ends in ".index", or of a
      directory, which means all checkpoints in it.

  Returns:
    A list of paths. Those of a directory are sorted by name, with numbers in
    names sorted by value.

  Raises:
    FileNotFoundError: If a directory contains no checkpoint.
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
  """A checkpoint to write. It appears complete, in `publish`.

  Before, its files are in a temporary directory next to it, whose name begins
  with a dot and ends in ".partial". A killed process leaves this directory.

  Attributes:
    path: Its path.
    drops_pages: Whether to drop what is on the disk from the page cache.
  """
  drops_pages = False

  def __init__(self, path):
    self.path = path
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    self._directory = tempfile.mkdtemp(
        prefix=f".{os.path.basename(path)}.", suffix=_PARTIAL, dir=parent)
    self._parent = parent
    self._unsent = 0  # Bytes written since the last were sent to the disk.

  def write(self, values):
    """Writes variables: [(name, rows, array)]; `rows` None means all rows.

    The parts of a variable must follow each other in the order of its rows.
    """
    raise NotImplementedError

  def _send(self, nbytes, flush, file):
    """Sends a file, after `nbytes` more, to the disk while others are read."""
    self._unsent += nbytes
    if self._unsent >= SEND:
      flush()
      to_disk(file, self.drops_pages)
      self._unsent = 0

  def publish(self):
    """Makes the complete checkpoint appear; replaces one of the same name."""
    files = list(self._finish())
    for file in files:
      to_disk(file, self.drops_pages)
    to = [os.path.join(self._parent, os.path.basename(f)) for f in files]
    if len(files) > 1:
      # The old last file must not be next to the new first one.
      with contextlib.suppress(FileNotFoundError):
        os.unlink(to[-1])
        to_disk(self._parent)
    for file, name in zip(files, to):
      os.replace(file, name)
    to_disk(self._parent)

  def _finish(self):
    """The files of the checkpoint, an iterable; the last one completes it."""
    raise NotImplementedError

  def discard(self):
    """Removes files that are not published."""
    shutil.rmtree(self._directory, ignore_errors=True)


def to_disk(path, drop=False):
  """Returns when a file or directory is on the disk.

  Args:
    path: Its path.
    drop: Whether to drop it from the page cache.
  """
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
    if drop:
      os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
  finally:
    os.close(descriptor)


class TensorFlowSink(Sink):
  """Writes a TensorFlow checkpoint."""

  def __init__(self, path, specs, note=None):
    """`specs` are {name: Spec} of all variables."""
    super().__init__(path)
    self._specs = specs
    self._bundle = _bundles.Writer(
        os.path.join(self._directory, os.path.basename(path)))
    if note is not None:
      self._bundle.write(_NOTE, np.array(json.dumps(note).encode(), object), ())

  def write(self, values):
    for name, _, value in values:
      self._bundle.write(name, value, self._specs[name].shape)
      self._send(value.nbytes, self._bundle.flush, self._bundle.data)

  def _finish(self):
    self._bundle.close()
    yield self._bundle.data
    # The other file is not a checkpoint without it.
    yield self._bundle.index

  def discard(self):
    self._bundle.discard()
    super().discard()


class H5Sink(Sink):
  """Writes an HDF5 file of variables."""

  def __init__(self, path, specs, like=None, note=None):
    """Makes the file.

    Args:
      path: Its path.
      specs: {name: Spec} of all variables.
      like: An object with an HDF5 `file` and its `datasets`, whose groups and
        attributes are copied, or None.
      note: The note of a snapshot, a dict, or None.
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
        self._send(value.nbytes, self._file.flush, self._name)

  def _finish(self):
    self._file.close()
    yield self._name

  def discard(self):
    with contextlib.suppress(Exception):
      self._file.close()
    super().discard()


def remove_partial(directory, prefix):
  """Removes partial checkpoints of killed processes in a directory.

  Args:
    directory: Its path.
    prefix: The prefix of the names of the checkpoints.
  """
  for name in os.listdir(directory):
    if name.startswith("." + prefix) and name.endswith(_PARTIAL):
      shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def _copy_attributes(source, to, without=None):
  for name, value in source.attrs.items():
    if name != without:
      to.attrs[name] = value


class KerasSink(H5Sink):
  """Writes a copy of a Keras model with other variables."""

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
  """A Sink of the format and structure of a Source."""
  if isinstance(source, _TensorFlow):
    return TensorFlowSink(path, specs)
  return (KerasSink if isinstance(source, _Keras) else H5Sink)(
      path, specs, source)


def check_output(path, like):
  """Checks the path of an output that has the format of a Source.

  Args:
    path: The path of the output.
    like: A Source.

  Raises:
    ValueError: If the name belongs to another format.
    FileExistsError: If the output exists.
  """
  kind = kind_of(path)
  if kind is not type(like):
    endings = {_Keras: "'.keras'", _H5: "'.h5'"}
    wanted = (f"end in {endings[type(like)]}" if type(like) in endings else
              "not end in '.keras', '.h5' or '.hdf5'")
    raise ValueError(f"The name of the output must {wanted}, since the output "
                     f"has the format of {like.path}, got {path}.")
  for file in path, path + ".index":
    if os.path.exists(file):
      raise FileExistsError(
          f"The output {file} exists. Remove it, or choose another output.")
