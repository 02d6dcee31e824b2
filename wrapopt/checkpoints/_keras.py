"""Keras models: archives with the variables in an HDF5 file."""

import io
import os
import zipfile

import h5py

from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _source

_WEIGHTS = "model.weights.h5"  # In a .keras file.


class KerasSink(_h5.H5Sink):
  """Writes a copy of a Keras model with other variables."""

  def __init__(self, path, note=None, like=None, made=None):
    super().__init__(path, note, like, made)
    self._model = like

  def _finish(self):
    [weights] = super()._finish()
    whole = weights + ".whole"
    with zipfile.ZipFile(whole, "w") as archive:
      for info, data in self._model.files():
        if data is None:
          archive.write(weights, _WEIGHTS)
        else:
          archive.writestr(zipfile.ZipInfo(info.filename, info.date_time), data)
    os.replace(whole, weights)
    return [weights]


class KerasSource(_h5.H5Source):
  """A Keras model: an archive with the variables in an HDF5 file."""
  kind = "Keras"
  Sink = KerasSink
  endings = (".keras",)
  ending = ".keras"

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
    self._open(h5py.File(self._part, "r"))

  def verify(self):
    with self._reading(), zipfile.ZipFile(self.path) as archive:
      damaged = archive.testzip()
      if damaged is not None:
        raise OSError(f"the checksum of {damaged} is wrong")

  def files(self):
    """Yields the files in it: a ZipInfo and its bytes, None for the weights."""
    with self._reading(), zipfile.ZipFile(self.path) as archive:
      for info in archive.infolist():
        if not info.is_dir():
          yield info, (None if info.filename == _WEIGHTS else
                       archive.read(info))

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
    header = os.pread(self._file.fileno(), 30, info.header_offset)
    self._begin = (info.header_offset + 30 +
                   int.from_bytes(header[26:28], "little") +
                   int.from_bytes(header[28:30], "little"))
    self._size = info.file_size
    self._at = 0

  def readable(self):
    return True

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
    got = os.preadv(self._file.fileno(), [view], self._begin + self._at)
    self._at += got
    return got

  def close(self):
    self._file.close()
    super().close()
