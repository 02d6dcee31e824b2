"""Keras models: archives with the variables in an HDF5 file."""

import io
import os
import zipfile
import zlib

import h5py
import numpy as np

from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _format
from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _places
from wrapopt.checkpoints import _source

_WEIGHTS = "model.weights.h5"  # In a .keras file.


class KerasSource(_h5.H5Source):
  """A Keras model: an archive with the variables in an HDF5 file."""
  kind = "Keras"

  def __init__(self, path):
    _source.Source.__init__(self, path)
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
    return _files.naming(self.path, "is damaged: use another copy of it")

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


class KerasSink(_h5.H5Sink):
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


class Keras(_format.Format):
  """Keras models."""
  Source, Sink = KerasSource, KerasSink
  endings = (".keras",)
  ending = ".keras"
