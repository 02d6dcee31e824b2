"""Files of safetensors, alone or as shards with an index.

The library checks a file. Its tensors are read here, since the library reads a
third as fast and knows no float8 in NumPy. Its writer takes all tensors at
once; the one below writes each when it comes.
"""

import json
import math
import os
import re
import typing

import ml_dtypes
import numpy as np

from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source

_INDEX = ".safetensors.index.json"
_FILE = ".safetensors"
_CHUNK = 1 << 20

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32,
    "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_, "C64": np.complex64}


class _Tensor(typing.NamedTuple):
  """A tensor in a file.

  Attributes:
    file: The path of the file.
    begin: The place of its first byte.
    nbytes: The number of its bytes.
    kind: Its dtype, as the format writes it.
    shape: Its shape, a list.
  """
  file: str
  begin: int
  nbytes: int
  kind: str
  shape: list


def _read_header(path):
  """(metadata, {name: _Tensor}) of a file, which the library checks."""
  try:
    import safetensors
  except ModuleNotFoundError:
    raise ImportError(
        f"To read {path}, the Python module 'safetensors' must be installed: "
        "pip install safetensors") from None
  with safetensors.safe_open(path, "np") as checked, open(path, "rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    metadata = header.pop("__metadata__", {})
    if header.keys() != set(checked.keys()):
      raise ValueError("names of tensors must differ, got one twice")
  return metadata, {
      name: _Tensor(path, 8 + size + info["data_offsets"][0],
                    info["data_offsets"][1] - info["data_offsets"][0],
                    info["dtype"], info["shape"])
      for name, info in header.items()}


class SafetensorsSink(_sink.Sink):
  """Writes a file of safetensors, or shards with an index."""

  def __init__(self, path, note=None, like=None, made=None,
               max_shard_bytes=None):
    del note
    super().__init__(path)
    self._open = {}  # {path: descriptor}
    self._tensors = {}  # Those of the output.
    try:
      with self._writing():
        self._lay_out(like, made, max_shard_bytes)
    except BaseException:
      self.discard()
      raise

  def _lay_out(self, like, made, max_shard_bytes):
    """Makes the files, in their whole length."""
    name = os.path.basename(self.path)
    metadata = {**like.metadata, **({_source.MADE: made} if made else {})}
    if not name.endswith(_INDEX):
      self._make(name, like.tensors, metadata)
      return
    shards = like.shards() if max_shard_bytes is None else _shards_of_size(
        like.tensors, max_shard_bytes)
    self._index = {"metadata": {
        **like.index_metadata,
        "total_size": sum(t.nbytes for t in like.tensors.values())},
                   "weight_map": {}}
    for i, names in enumerate(shards):
      shard = (f"{name.removesuffix(_INDEX)}-{i + 1:05d}-of-{len(shards):05d}"
               f"{_FILE}")
      if os.path.lexists(os.path.join(self._parent, shard)):
        raise FileExistsError(f"the shard {shard} exists. Remove it, or choose "
                              "another output")
      self._make(shard, {n: like.tensors[n] for n in names}, metadata)
      self._index["weight_map"].update(dict.fromkeys(names, shard))

  def _make(self, name, tensors, metadata):
    """Makes a file with its header, and room for tensors like `tensors`."""
    path = os.path.join(self._directory, name)
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    # As the library does it: the numbers of a tensor are aligned.
    order = sorted(tensors, key=lambda n: (-_itemsize(tensors[n]), n))
    for n in order:
      tensor = tensors[n]
      header[n] = {"dtype": tensor.kind, "shape": tensor.shape,
                   "data_offsets": [end, end + tensor.nbytes]}
      end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    for n in order:
      self._tensors[n] = tensors[n]._replace(
          file=path, begin=begin + header[n]["data_offsets"][0])
    self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                               0o666)
    # A full disk fails here.
    os.posix_fallocate(self._open[path], 0, begin + end)
    _write_at(self._open[path], len(text).to_bytes(8, "little") + text, 0)

  def write(self, name, value, *part):
    tensor, begin = self._tensors[name], part[0] if part else 0
    with self._writing():
      _write_at(self._open[tensor.file], value.reshape(-1).view(np.uint8),
                tensor.begin + begin * value.itemsize)

  def copy(self, source, name):
    tensor, old = self._tensors[name], source.tensors[name]
    for at in range(0, old.nbytes, _CHUNK):
      data = source.read_bytes(name, at, min(_CHUNK, old.nbytes - at))
      with self._writing():
        _write_at(self._open[tensor.file], data, tensor.begin + at)

  def _finish(self):
    files = [*self._open]
    while self._open:
      os.close(self._open.popitem()[1])
    if self.path.endswith(_INDEX):
      files.append(os.path.join(self._directory, os.path.basename(self.path)))
      with open(files[-1], "w", encoding="utf-8") as file:
        json.dump(self._index, file, indent=2, sort_keys=True)
        file.write("\n")
    return files

  def discard(self):
    while self._open:
      os.close(self._open.popitem()[1])
    super().discard()


class SafetensorsSource(_source.Source):
  """A file of safetensors, or shards with an index.

  Attributes:
    tensors: {name: _Tensor}.
    metadata: {name: text}, of all of its files.
    index_metadata: What the index says of it.
  """
  kind = "safetensors"
  Sink = SafetensorsSink
  endings = (_FILE, _INDEX)
  ending = _FILE
  in_parts = True

  @classmethod
  def rule(cls, endings):
    return (f"end in '{_FILE}' or, for shards, in '{_INDEX}', or be that of a "
            "new directory")

  @classmethod
  def parts(cls, path):
    return sorted({*_weight_map(path).values()}) if path.endswith(
        _INDEX) else []

  @classmethod
  def file_in(cls, directory, like, max_shard_bytes):
    if cls.owns(directory):
      if max_shard_bytes is not None and not directory.endswith(_INDEX):
        raise ValueError(
            f"With `max_shard_size` the name of the output must end in "
            f"'{_INDEX}' or be that of a new directory, got {directory}.")
      return directory
    name = os.path.basename(like.path)
    if max_shard_bytes is not None and not name.endswith(_INDEX):
      name = name.removesuffix(_FILE) + _INDEX
    return os.path.join(directory, name)

  @classmethod
  def main_of(cls, names):
    # Other files beside it are those of adapters, or of an optimizer.
    return [name for name in (f"model{_FILE}", f"model{_INDEX}")
            if name in names]

  def __init__(self, path):
    super().__init__(path)
    self.tensors, self.metadata, self.index_metadata = {}, {}, {}
    if path.endswith(_INDEX):
      self._read_shards(path)
    else:
      self.metadata, self.tensors = _read_header(path)
    self.specs = {name: _source.Spec(tuple(t.shape), _dtype(t))
                  for name, t in self.tensors.items()}

  def _read_shards(self, path):
    weight_map = _weight_map(path)
    with open(path, encoding="utf-8") as file:
      self.index_metadata = json.load(file).get("metadata") or {}
    for shard in self._files()[1:]:
      name = os.path.basename(shard)
      with _files.naming(
          path, f"names the shard {shard}, which cannot be read"):
        metadata, tensors = _read_header(shard)
      its = {n for n, of in weight_map.items() if of == name}
      if its != tensors.keys():
        raise ValueError(
            f"{path} must name the tensors of its shards, but {name} "
            f"{'lacks' if its - tensors.keys() else 'has, unnamed,'} "
            f"'{min(its ^ tensors.keys())}'. Write the checkpoint again.")
      self.metadata.update(metadata)
      self.tensors.update(tensors)

  def _files(self):
    folder = os.path.dirname(self.path)
    return [self.path, *(os.path.join(folder, name)
                         for name in self.parts(self.path))]

  def shards(self):
    """The names of the tensors of each file: a list of lists."""
    found = {}
    for name, tensor in self.tensors.items():
      found.setdefault(tensor.file, []).append(name)
    return [found[file] for file in sorted(found)]

  def moving_statistics(self):
    return sorted({*super().moving_statistics(), *(
        name for name in self.specs
        if re.search(r"(^|\.)running_(mean|var)$", name))})

  def _is_optimizer_state(self, name):
    return False

  def _split(self, name):
    layer, _, own = name.rpartition(".")
    return layer, own

  def read_bytes(self, name, at, nbytes):
    """Some bytes of a tensor, from number `at` on: an array of uint8."""
    tensor, data = self.tensors[name], np.empty(nbytes, np.uint8)
    # Several threads read, and there may be more shards than a process may have
    # open files.
    with open(tensor.file, "rb") as file:
      file.seek(tensor.begin + at)
      if file.readinto(data) < nbytes:
        raise EOFError("the file has become shorter")
    return data

  def _read(self, name, *part):
    spec = self.specs[name]
    begin, end = part or (0, spec.size)
    width = spec.dtype.itemsize
    value = self.read_bytes(name, begin * width, (end - begin) * width).view(
        spec.dtype)
    return value if part else value.reshape(spec.shape)


def _dtype(tensor):
  """The dtype of a tensor in NumPy; bytes if it has none."""
  if tensor.kind in _DTYPES:
    return np.dtype(_DTYPES[tensor.kind])
  return np.dtype(f"V{_itemsize(tensor)}")


def _itemsize(tensor):
  if tensor.kind in _DTYPES:
    return np.dtype(_DTYPES[tensor.kind]).itemsize
  return max(1, tensor.nbytes // max(1, math.prod(tensor.shape)))


def _write_at(descriptor, data, at):
  data = memoryview(data).cast("B")
  while data:
    written = os.pwrite(descriptor, data, at)
    data, at = data[written:], at + written


def _shards_of_size(tensors, most):
  """As `shards`: of at most `most` bytes each, or of one tensor."""
  shards, left = [], 0
  for name, tensor in tensors.items():
    if not shards or tensor.nbytes > left:
      shards.append([])
      left = most
    shards[-1].append(name)
    left -= tensor.nbytes
  return shards


def _weight_map(path):
  """{name of a tensor: name of its file} of an index."""
  return _source.weight_map(path, "an index of safetensors has it")
