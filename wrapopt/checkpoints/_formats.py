"""Reads and writes checkpoints of several formats.

A `Source` is a checkpoint to read, a `Sink` one to write. The formats are those
of TensorFlow (a Saver and `tf.train.Checkpoint` use the same one) and of Keras
(`.weights.h5`, `.weights.json` with its shards, `.keras`, and any other HDF5
file of variables). A snapshot is such a checkpoint with a note that describes
its averages.
"""

import collections
import contextlib
import fcntl
import glob
import io
import json
import os
import re
import shutil
import tempfile
import threading
import time
import typing
import zipfile
import zlib

import h5py
import ml_dtypes
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from wrapopt.checkpoints import _bundles
from wrapopt.checkpoints import _places
from wrapopt.checkpoints import _trees

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32),
          np.dtype(np.float64))

# The variable that holds the note of a snapshot, a string.
_NOTE = "wrapopt/snapshot"

# So many bytes are written to a file before they are sent to the disk.
SEND = 128 << 20

# So many bytes of variables are copied at once, or one variable.
_COPIED = 64 << 20

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_PARTIAL = ".partial"
_WEIGHTS = "model.weights.h5"  # In a .keras file.

# A file system may give changes that are this close the same time: a tick of
# its clock, with a margin.
_TICK_SECONDS = 0.02

# Names of layers that are batch normalizations.
_BATCH_NORM = re.compile(r"batch_?norm|(^|_)bn(\d|_|$)", re.IGNORECASE)


class NamedError(OSError):
  """An error whose text names the file."""


@contextlib.contextmanager
def naming(path, what):
  """Makes all errors OSErrors or ValueErrors whose text names a file.

  Args:
    path: The path of the file.
    what: What failed, such as "cannot be read".
  """
  try:
    yield
  except Exception as e:
    if isinstance(e, NamedError) or path in str(e) and (
        isinstance(e, OSError) or type(e) is ValueError):
      raise
    named = NamedError(f"{path} {what}: {e or type(e).__name__}")
    named.errno = getattr(e, "errno", None)
    raise named from e


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
    # Before anything is read.
    self._stamps = {file: _stamp(file) for file in self._files()}
    self.specs = {}
    self.note = None
    self._placed = _places.Reader({})

  def _files(self):
    """The paths of the files of the checkpoint that are there."""
    return [self.path]

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

  def moving_statistics(self):
    """Names of variables that are statistics of batch normalizations."""
    return sorted(name for name in self.specs
                  if re.search("moving_(mean|variance)", name))

  def verify(self):
    """Verifies the checksums that reads do not verify.

    Raises:
      OSError: If one is wrong.
    """

  def check_unchanged(self):
    """Checks that no other program has written to the files.

    Not all formats have checksums, and none has one of all of its files.

    Raises:
      OSError: If a file is not the one that was there at first.
    """
    for file, stamp in self._stamps.items():
      if _stamp(file) != stamp:
        raise _changed(file)

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


def _stamp(path):
  """What is another for each version of a file.

  If the file has just been written, it waits until a change would give it
  another time.

  Raises:
    OSError: If the file is being written.
  """
  for _ in range(2):
    stat = os.stat(path)
    age = time.time() - stat.st_mtime
    if not 0 <= age < _TICK_SECONDS:
      return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
    time.sleep(_TICK_SECONDS)
  raise _changed(path)


def _changed(path):
  return NamedError(f"The file {path} must not change while it is read, but "
                    "something writes to it. Use a copy of it.")


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
        for name, dtype in self._reader.get_variable_to_dtype_map().items()
        if dtype != tf.variant}
    if self.specs.pop(_NOTE, None):
      self.note = json.loads(self._reader.get_tensor(_NOTE))
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


class _H5(Source):
  """An HDF5 file of variables, as Keras writes it.

  Attributes:
    trees: [Tree] of its files.
    datasets: {name of a variable: dataset}.
  """
  kind = "HDF5"

  def __init__(self, path):
    super().__init__(path)
    self._open(h5py.File(path, "r"))

  def _open(self, file, begin=0, descriptor=None):
    """Reads the structure of a file.

    Args:
      file: The `h5py.File`.
      begin: Its offset in the file of `descriptor`.
      descriptor: The descriptor of the file that contains it, or None.
    """
    self._file = file
    tree = _trees.tree_of(file)
    self.trees = [tree]
    self.datasets = tree.datasets
    note = self.datasets.pop(_NOTE, None)
    if note is not None:
      self.note = json.loads(note[()])
      del tree.groups[os.path.dirname(_NOTE)]
    self.specs = {name: Spec(dataset.shape, _dtype(dataset))
                  for name, dataset in self.datasets.items()}
    self._placed = _places.Reader(
        _places.of_hdf5(self.path, begin, {
            name: dataset for name, dataset in self.datasets.items()
            if self.specs[name].dtype in FLOATS}),
        file.id.get_vfd_handle() if descriptor is None else descriptor)

  def can_slice(self, name):
    return True

  def moving_statistics(self):
    # Keras's files have the names of layers and the numbers of variables.
    numbers = collections.defaultdict(list)
    for name, dataset in self.datasets.items():
      match = re.fullmatch(r"(?:.*/)?([^/]+)/vars/(\d+)", name)
      if (match and not self._is_optimizer_state(name) and
          any(_BATCH_NORM.search(str(layer)) for layer in (
              match[1], dataset.parent.attrs.get("name", "")))):
        numbers[os.path.dirname(name)].append(int(match[2]))
    # Scale and offset come first, if there are any.
    return sorted([*super().moving_statistics(), *(
        f"{group}/{i}" for group, of_layer in numbers.items()
        for i in sorted(of_layer)[-2:])])

  def _is_optimizer_state(self, name):
    # "optimizer" in Keras 3, "optimizer_weights" in older files.
    return re.match("optimizer(_weights)?/", name) is not None

  def is_copied_by_value(self, name):
    """Whether to copy a variable by `read`; HDF5 copies all others.

    HDF5 copies data of any type. A read is faster, and also finds data that is
    in other files.
    """
    dataset = self.datasets[name]
    return name in self._placed or dataset.is_virtual or bool(dataset.external)

  def _read(self, name, rows, into):
    dataset, spec = self.datasets[name], self.specs[name]
    if into is None:
      into = np.empty(spec.shape, spec.dtype)
    if into.size:
      dataset.read_direct(_stored(into), rows)
    return into

  def close(self):
    super().close()
    self._file.close()


def _dtype(dataset):
  # HDF5 has no bfloat16. Keras stores its bytes, and an attribute.
  name = dataset.attrs.get("dtype")
  return BFLOAT16 if name == "bfloat16" else dataset.dtype.newbyteorder("=")


def _stored(array):
  return array.view("V2") if array.dtype == BFLOAT16 else array


class _Sharded(_H5):
  """Sharded weights of Keras: several HDF5 files, and a JSON file of them."""
  kind = "sharded HDF5"

  def __init__(self, path):
    Source.__init__(self, path)
    self._shards = []
    try:
      for name in shards_of(path):
        shard = os.path.join(os.path.dirname(path), name)
        with naming(path, f"names the shard {shard}, which cannot be read"):
          self._shards.append(_H5(shard))
    except BaseException:
      self.close()
      raise
    self.trees = [tree for shard in self._shards for tree in shard.trees]
    self._of = {name: shard for shard in self._shards for name in shard.specs}
    self.datasets = {name: shard.datasets[name]
                     for name, shard in self._of.items()}
    self.specs = {name: shard.specs[name] for name, shard in self._of.items()}

  def check_unchanged(self):
    super().check_unchanged()
    for shard in self._shards:
      shard.check_unchanged()

  def is_copied_by_value(self, name):
    return self._of[name].is_copied_by_value(name)

  def read(self, name, rows=None, into=None):
    shard = self._of[name]
    shard.drops_pages = self.drops_pages
    return shard.read(name, rows, into)

  def close(self):
    for shard in self._shards:
      shard.close()


def shards_of(path):
  """The names of the HDF5 files of sharded weights.

  Args:
    path: The path of their JSON file.

  Returns:
    A sorted list.

  Raises:
    ValueError: If the file has other contents.
  """
  try:
    with open(path, encoding="utf-8") as file:
      weight_map = json.load(file)["weight_map"]
    return sorted({name for names in weight_map.values() for name in (
        [names] if isinstance(names, str) else names)})
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(
        f"{path} must be a JSON file with a 'weight_map', as "
        "model.save_weights writes it for sharded weights, got other contents: "
        f"{type(e).__name__}: {e}. Save the weights again.") from e


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

  def verify(self):
    self._part.raw.verify(self.drops_pages)
    with self.archive() as archive:
      for info in archive.infolist():
        if info.filename != _WEIGHTS:
          for _ in self.parts_of(archive, info):
            pass

  def archive(self):
    """The open `ZipFile`."""
    with self._reading():
      return zipfile.ZipFile(self.path)

  def parts_of(self, archive, info):
    """Yields the bytes of a file in the archive, and verifies its checksum."""
    with self._reading(), archive.open(info) as file:
      while data := file.read(_places.AT_ONCE):
        yield data

  def _reading(self):
    return naming(self.path, "is damaged: use another copy of it")

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
    self._checksum = info.CRC
    self._at = 0

  def verify(self, drop):
    """Reads all, and verifies the checksum; `drop` as in `_places.read`."""
    buffer = np.empty(_places.AT_ONCE, np.uint8)
    at = checksum = 0
    while at < self._size:
      got = _places.read(self.fileno(), buffer[:self._size - at],
                         self.begin + at, drop)
      if not got:
        break
      checksum = zlib.crc32(buffer[:got], checksum)
      at += got
    if checksum != self._checksum:
      raise OSError(
          f"The file {self._file.name} is damaged: the checksum of {_WEIGHTS} "
          f"is {checksum:#010x}, written as {self._checksum:#010x}. Use "
          "another copy of it.")

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
  if path.endswith("weights.json"):
    return _Sharded
  if path.endswith((".h5", ".hdf5")):
    return _H5
  return _TensorFlow


def ending_of(path):
  """The ending of file names in a path's format."""
  return _ENDINGS[output_kind(kind_of(path))]


def output_kind(kind):
  """The Source class for an output that is like one of the class `kind`."""
  return _H5 if kind is _Sharded else kind


_ENDINGS = {_Keras: ".keras", _H5: ".weights.h5", _TensorFlow: ""}


def open_source(path):
  """Opens a checkpoint.

  Args:
    path: A file of Keras, or the prefix of a TensorFlow checkpoint's files;
      one that `expand` gives.

  Returns:
    A Source.

  Raises:
    OSError: If it cannot be read.
    ValueError: If its contents do not fit its name.
  """
  with naming(path, "cannot be read"):
    return kind_of(path)(path)


def expand(path):
  """The checkpoints of a path.

  Args:
    path: The path of a checkpoint, of its file that ends in ".index", or of a
      directory, which means all checkpoints in it.

  Returns:
    A list of paths. Those of a directory are sorted by name, with numbers in
    names sorted by value.

  Raises:
    FileNotFoundError: If there is no checkpoint.
    ValueError: If a JSON file of sharded weights has other contents.
  """
  path = os.fspath(path)
  if not os.path.isdir(path):
    path = path.removesuffix(".index")
    # An old TensorFlow checkpoint has no ".index" file.
    if not (tf.compat.v1.train.checkpoint_exists(path)
            if kind_of(path) is _TensorFlow else os.path.exists(path)):
      raise FileNotFoundError(
          f"There is no checkpoint '{path}'. Pass a .weights.h5 or .keras "
          "file, or the prefix of a TensorFlow checkpoint, which is the part "
          "before '.index'.")
    return [path]
  names = {name for name in os.listdir(path) if not name.startswith(".") and
           name.endswith((".index", ".h5", ".hdf5", ".keras", "weights.json"))}
  for name in [name for name in names if name.endswith(".json")]:
    names.difference_update(shards_of(os.path.join(path, name)))
  found = {os.path.join(path, name.removesuffix(".index")) for name in names}
  if not found:
    raise FileNotFoundError(f"There is no checkpoint in the directory {path}.")
  return sorted(found, key=lambda name: [
      int(part) if part.isdigit() else part
      for part in re.split(r"(\d+)", os.path.basename(name))])


# Writing


class Sink:
  """A checkpoint to write. It appears complete, in `publish`.

  Before, its files are in a temporary directory next to it, whose name begins
  with a dot and ends in ".partial". A killed process leaves this directory. The
  next Sink of the same path removes it.

  Attributes:
    path: Its path.
    drops_pages: Whether to drop what is on the disk from the page cache.
  """
  drops_pages = False

  def __init__(self, path):
    self.path = path
    self._parent = os.path.dirname(os.path.abspath(path))
    prefix = os.path.basename(path) + "."
    with self._writing():
      self._made = make_directories(self._parent)
      try:
        remove_partial(self._parent, prefix)
        self._directory = tempfile.mkdtemp(
            prefix="." + prefix, suffix=_PARTIAL, dir=self._parent)
        self._lock = _locked(self._directory)
      except BaseException:
        remove_empty(self._made)
        raise
    self._unsent = 0  # Bytes written since the last were sent to the disk.

  def _writing(self):
    """A context whose errors name the output."""
    return naming(self.path, "cannot be written")

  def write(self, values):
    """Writes variables: [(name, rows, array)]; `rows` None means all rows.

    The parts of a variable must follow each other in the order of its rows.
    """
    raise NotImplementedError

  def copy(self, source, names):
    """Copies variables of a Source of the same format."""
    batch, total = [], 0
    for name in names:
      batch.append((name, None, source.read(name)))
      total += source.specs[name].nbytes
      if total > _COPIED:
        self.write(batch)
        batch, total = [], 0
    if batch:
      self.write(batch)

  def _send(self, nbytes, flush, file):
    """Sends a file, after `nbytes` more, to the disk while others are read."""
    self._unsent += nbytes
    if self._unsent >= SEND:
      flush()
      to_disk(file, self.drops_pages)
      self._unsent = 0

  def publish(self, check=None):
    """Makes the complete checkpoint appear; replaces one of the same name.

    Args:
      check: A function to call once the checkpoint is complete. If it raises,
        the checkpoint does not appear.
    """
    with self._writing():
      files = list(self._finish())
      for file in files:
        to_disk(file, self.drops_pages)
    if check is not None:
      check()
    with self._writing():
      self._replace(files)

  def _replace(self, files):
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
    remove_empty(self._made)
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None


def make_directories(path):
  """Makes a directory and its parents.

  Args:
    path: Its path.

  Returns:
    The paths of those that were not there, children first.
  """
  made = []
  parent = os.path.abspath(path)
  while not os.path.isdir(parent):
    made.append(parent)
    parent = os.path.dirname(parent)
  os.makedirs(path, exist_ok=True)
  return made


def remove_empty(directories):
  """Removes the empty ones of directories; children come first."""
  for directory in directories:
    with contextlib.suppress(OSError):
      os.rmdir(directory)


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
      self.write([(_NOTE, None, np.array(json.dumps(note).encode(), object))])

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


class _Drain(io.FileIO):
  """A file for HDF5 to write to, in which no write fails.

  HDF5 crashes if it closes a file that it could not write, as on a full disk.
  So it does not learn of an error, and the sink raises it.

  Attributes:
    error: The first OSError, or None. Nothing is written after it.
  """

  def __init__(self, path):
    super().__init__(path, "w+")
    self.error = None

  def write(self, data):
    data = memoryview(data).cast("B")
    size = len(data)
    while data and self.error is None:
      try:
        data = data[super().write(data):]
      except OSError as e:
        self.error = e
    return size

  def truncate(self, size=None):
    try:
      return super().truncate(size) if self.error is None else size
    except OSError as e:
      self.error = e
      return size


class H5Sink(Sink):
  """Writes an HDF5 file of variables."""

  def __init__(self, path, specs, like=None, note=None):
    """Makes the file.

    Args:
      path: Its path.
      specs: {name: Spec} of the variables that are written.
      like: An object with an HDF5 `file` and its `datasets`, or a Source. Its
        groups, links and attributes are copied. None for none.
      note: The note of a snapshot, a dict, or None.
    """
    super().__init__(path)
    self._name = os.path.join(self._directory, os.path.basename(path))
    self._trees = ([] if like is None else like.trees if isinstance(like, _H5)
                   else [_trees.tree_of(like.file)])
    self._drain = self._file = None
    try:
      with self._writing():
        self._drain = _Drain(self._name)
      with self._drained():
        self._file = h5py.File(self._drain, "w", libver=max(
            map(_trees.libver_of, self._trees), key=bool, default=None))
        for tree in self._trees:
          _trees.copy_structure(tree, self._file)
        for name, spec in specs.items():
          self._create(name, spec,
                       None if like is None else like.datasets.get(name))
        if note is not None:
          self._file[_NOTE] = json.dumps(note)
    except BaseException:
      self.discard()
      raise

  @contextlib.contextmanager
  def _drained(self):
    """A context that raises the errors of the output file."""
    try:
      yield
    finally:
      if self._drain.error is not None:
        with self._writing():
          raise self._drain.error

  def _create(self, name, spec, like):
    of_bytes = spec.dtype == BFLOAT16
    dataset = self._file.create_dataset(
        name, spec.shape, "V2" if of_bytes else
        h5py.string_dtype() if spec.dtype == object else spec.dtype)
    if like is not None:
      _trees.copy_attributes(like, dataset, without="dtype")
    if of_bytes:
      dataset.attrs["dtype"] = "bfloat16"

  def copy(self, source, names):
    by_value = []
    with self._drained():
      for name in names:
        dataset = source.datasets[name]
        if source.is_copied_by_value(name):
          self._create(name, source.specs[name], dataset)
          by_value.append(name)
        else:
          _trees.copy_object(dataset, self._file, name)
    super().copy(source, by_value)

  def write(self, values):
    for name, rows, value in values:
      if value.size:
        with self._drained(), self._writing():
          self._file[name][() if rows is None else rows] = _stored(value)
          self._send(value.nbytes, self._file.flush, self._name)

  def _finish(self):
    with self._drained():
      for tree in self._trees:
        _trees.copy_hard_links(tree, self._file)
      self._file.close()
    self._drain.close()
    yield self._name

  def discard(self):
    for file in self._file, self._drain:
      with contextlib.suppress(Exception):
        if file is not None:
          file.close()
    super().discard()


def remove_partial(directory, prefix):
  """Removes partial checkpoints of killed processes in a directory.

  Args:
    directory: Its path.
    prefix: The prefix of the names of the checkpoints.
  """
  for name in os.listdir(directory):
    if name.startswith("." + prefix) and name.endswith(_PARTIAL):
      path = os.path.join(directory, name)
      lock = _locked(path)
      if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked(directory):
  """A descriptor that holds the lock of a directory as long as it is open.

  Returns:
    A descriptor; None if another process holds the lock, or if there are no
    locks here.
  """
  descriptor = None
  try:
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
  except OSError:
    if descriptor is not None:
      os.close(descriptor)
    return None


class KerasSink(H5Sink):
  """Writes a copy of a Keras model with other variables."""

  def __init__(self, path, specs, like):
    super().__init__(path, specs, like)
    self._like = like

  def _finish(self):
    for weights in super()._finish():
      whole = weights + ".whole"
      with self._like.archive() as archive, zipfile.ZipFile(whole, "w") as to:
        for info in archive.infolist():
          if info.filename == _WEIGHTS:
            to.write(weights, _WEIGHTS)
          elif not info.is_dir():
            with to.open(zipfile.ZipInfo(info.filename, info.date_time), "w",
                         force_zip64=True) as target:
              for data in self._like.parts_of(archive, info):
                target.write(data)
      os.replace(whole, weights)
      yield weights


def sink_like(source, path, specs):
  """A Sink of the format and structure of a Source.

  Args:
    source: A Source.
    path: The path of the output.
    specs: {name: Spec} of the variables that are written. `Sink.copy` copies
      the others.

  Returns:
    A Sink.
  """
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
    ValueError: If the path does not end in a name, or the name belongs to
      another format.
    FileExistsError: If the output exists.
  """
  if os.path.basename(path) in ("", os.curdir, os.pardir):
    raise ValueError("The output must end in the name of a file, got "
                     f"'{path}'. Pass a path such as 'averages/model'.")
  kind = output_kind(type(like))
  if kind_of(path) is not kind or path.endswith(".index"):
    wanted = {
        _Keras: "end in '.keras'", _H5: "end in '.h5'",
        _TensorFlow: "not end in '.keras', '.h5', '.hdf5', 'weights.json' or "
                     "'.index'"}[kind]
    raise ValueError(f"The name of the output must {wanted}, since the last "
                     f"input is {like.path}, got {path}.")
  for file in path, path + ".index":
    if os.path.lexists(file):
      raise FileExistsError(
          f"The output {file} exists. Remove it, or choose another output.")
