"""Reads and writes the files of TensorFlow's checkpoints, tensor bundles.

The data file holds the bytes of the variables, the index file a LevelDB table
of their names, shapes, dtypes, places and checksums. Unlike TensorFlow, this
module reads and writes variables in parts.
"""

import struct
import typing

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from wrapopt import _native
from wrapopt.checkpoints import _places

# The last 8 bytes of a LevelDB table.
_MAGIC = 0xdb4775248b80fb57


class Bundle(typing.NamedTuple):
  """The variables of a TensorFlow checkpoint whose bytes are contiguous.

  Others are read by TensorFlow: strings, and variables in slices.

  Attributes:
    places: {name: Place} of floating-point variables.
    variants: {name: (BundleEntryProto, Place)} of variables of dtype variant,
      such as the states of iterators. Their checksums are not those of the
      bytes.
  """
  places: dict[str, _places.Place]
  variants: dict[str, tuple]


def bundle_of(prefix):
  """The Bundle of a TensorFlow checkpoint; `prefix` is that of its files."""
  bundle = Bundle({}, {})
  try:
    with open(prefix + ".index", "rb") as file:
      table = dict(_table(file.read()))
  except FileNotFoundError:
    return bundle  # An old checkpoint, without an index file.
  header = tensor_bundle_pb2.BundleHeaderProto.FromString(table.pop(b""))
  if header.endianness != tensor_bundle_pb2.BundleHeaderProto.LITTLE:
    return bundle
  for key, value in table.items():
    if key.startswith(b"\0"):
      continue  # A slice. Its key is no name, but binary.
    entry = tensor_bundle_pb2.BundleEntryProto.FromString(value)
    dtype = tf.as_dtype(entry.dtype)
    count = int(np.prod([d.size for d in entry.shape.dim], dtype=np.int64))
    place = _places.Place(
        f"{prefix}.data-{entry.shard_id:05d}-of-{header.num_shards:05d}",
        entry.offset, entry.size)
    if dtype == tf.variant:
      bundle.variants[key.decode()] = entry, place
    elif (dtype.is_floating and not entry.slices and
          entry.size == count * dtype.size):
      bundle.places[key.decode()] = place._replace(
          checksum=_unmasked(entry.crc32c))
  return bundle


class Writer:
  """Writes a checkpoint with one data file.

  Attributes:
    data: The path of the data file.
    index: The path of the index file, which `close` writes.
  """

  def __init__(self, prefix):
    self.data = prefix + ".data-00000-of-00001"
    self.index = prefix + ".index"
    self._file = open(self.data, "wb")
    self._entries = {}
    self._checksums = {}  # Of the entries, except those of `copy`.

  def write(self, name, value, shape):
    """Writes a variable, or its next rows.

    Args:
      name: Its name.
      value: An array. The first rows of a variable follow the last ones of
        another.
      shape: The shape of the variable.
    """
    if name not in self._entries:
      self._entries[name] = _entry(
          value.dtype, shape, offset=self._file.tell())
      self._checksums[name] = 0
    if value.dtype == object:
      data, checksum = _strings(value)
    else:
      data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
      checksum = _native.crc32c(data, self._checksums[name])
    self._file.write(data)
    self._entries[name].size += len(data)
    self._checksums[name] = checksum

  def copy(self, name, entry, data):
    """Copies a variable with its checksum.

    Args:
      name: Its name.
      entry: Its BundleEntryProto.
      data: Its bytes.
    """
    self._entries[name] = copy = tensor_bundle_pb2.BundleEntryProto()
    copy.CopyFrom(entry)
    copy.shard_id, copy.offset = 0, self._file.tell()
    self._file.write(data)

  def flush(self):
    """Passes the data to the operating system."""
    self._file.flush()

  def discard(self):
    """Closes the data file; without an index file there is no checkpoint."""
    self._file.close()

  def close(self):
    """Ends the data file and writes the index file."""
    self._file.close()
    for name, checksum in self._checksums.items():
      self._entries[name].crc32c = _masked(checksum)
    header = tensor_bundle_pb2.BundleHeaderProto(num_shards=1)
    header.version.producer = 1
    rows = {b"": header, **{
        name.encode(): entry for name, entry in self._entries.items()}}
    with open(self.index, "wb") as file:
      file.write(_as_table(sorted(
          (key, row.SerializeToString()) for key, row in rows.items())))


def _entry(dtype, shape, offset):
  entry = tensor_bundle_pb2.BundleEntryProto(
      dtype=(tf.string if dtype == object else tf.as_dtype(dtype)
             ).as_datatype_enum, offset=offset)
  entry.shape.SetInParent()  # Also that of a scalar is there.
  for size in shape:
    entry.shape.dim.add(size=size)
  return entry


def _strings(value):
  """The bytes of an array of strings in a file, and their checksum.

  Their lengths, a checksum, then the strings. The checksum is that of the
  lengths in 4 or 8 bytes each.
  """
  strings = [s.encode() if isinstance(s, str) else bytes(s)
             for s in value.reshape(-1)]
  of_lengths = b"".join(struct.pack("<I" if len(s) < 1 << 32 else "<Q", len(s))
                        for s in strings)
  checksum = _crc32c(of_lengths)
  tail = struct.pack("<I", _masked(checksum)) + b"".join(strings)
  return (b"".join(_as_varint(len(s)) for s in strings) + tail,
          _crc32c(tail, checksum))


def _crc32c(data, crc=0):
  return _native.crc32c(np.frombuffer(data, np.uint8), crc)


def _masked(crc):
  """Masks a checksum: files store it rotated by 15 bits, plus a constant."""
  return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff


def _unmasked(crc):
  """The checksum that `_masked` masks."""
  rotated = (crc - 0xa282ead8) & 0xffffffff
  return (rotated >> 17 | rotated << 15) & 0xffffffff


def _table(data):
  """Yields the keys and values of a LevelDB table, TensorFlow's index."""
  footer = data[-48:]
  magic, = struct.unpack("<Q", footer[-8:])
  if magic != _MAGIC:
    raise ValueError("The index of the checkpoint is damaged: it must end in "
                     f"{_MAGIC:#x}, got {magic:#x}.")
  at = 0
  for _ in range(2):  # The handle of the filters, then that of the index.
    offset, at = _varint(footer, at)
    size, at = _varint(footer, at)
  for _, handle in _block(data, offset, size):
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    yield from _block(data, offset, size)


def _block(data, offset, size):
  """Yields the keys and values of a block, whose keys share prefixes."""
  block, kind = data[offset:offset + size], data[offset + size]
  checksum, = struct.unpack_from("<I", data, offset + size + 1)
  found = _native.crc32c(np.frombuffer(data, np.uint8, size + 1, offset))
  if found != _unmasked(checksum):
    raise ValueError("The index of the checkpoint is damaged: the checksum of "
                     f"a block is {found:#010x}, written as "
                     f"{_unmasked(checksum):#010x}.")
  if kind != 0:
    raise ValueError("The index of the checkpoint must not be compressed, got "
                     f"compression {kind}. Save the checkpoint with TensorFlow "
                     "2.")
  restarts, = struct.unpack_from("<I", block, size - 4)
  at, end, key = 0, size - 4 - 4 * restarts, b""
  while at < end:
    shared, at = _varint(block, at)
    more, at = _varint(block, at)
    length, at = _varint(block, at)
    key = key[:shared] + block[at:at + more]
    at += more
    yield key, block[at:at + length]
    at += length


def _varint(data, at):
  """Decodes a number with 7 bits per byte; returns it and its end."""
  value = shift = 0
  while True:
    byte = data[at]
    at += 1
    value |= (byte & 0x7f) << shift
    shift += 7
    if byte < 0x80:
      return value, at


def _as_table(items):
  """The bytes of a LevelDB table: what `_table` reads.

  Args:
    items: A list of keys and values, sorted. They become one block.
  """
  table = b""

  def append(entries):
    nonlocal table
    block, restarts = b"", []
    for key, value in entries:
      restarts.append(len(block))
      # Shares no prefix with the key before it.
      block += b"".join([_as_varint(0), _as_varint(len(key)),
                         _as_varint(len(value)), key, value])
    restarts = restarts or [0]
    block += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    handle = _as_varint(len(table)) + _as_varint(len(block))
    block += b"\0"  # Not compressed.
    table += block + struct.pack("<I", _masked(_crc32c(block)))
    return handle

  data = append(items)
  footer = append([]) + append([(items[-1][0], data)])
  return table + footer.ljust(40, b"\0") + struct.pack("<Q", _MAGIC)


def _as_varint(value):
  """Encodes a number with 7 bits per byte."""
  result = bytearray()
  while value >= 0x80:
    result.append(value & 0x7f | 0x80)
    value >>= 7
  return bytes([*result, value])
