"""Reads variables directly from the files of checkpoints.

A variable that is contiguous in a file is read from there, without a copy and
without a lock, and in parts.
"""

import os
import typing

import h5py
import numpy as np

from wrapopt import _native

# The size of a read in bytes. Twice the largest pages of the page cache: those
# of smaller reads are not dropped in time.
AT_ONCE = 4 << 20

class Place(typing.NamedTuple):
  """Bytes of a file.

  Attributes:
    path: The path of the file.
    offset: The first byte.
    size: The number of bytes.
    checksum: Their CRC-32C, or None.
  """
  path: str
  offset: int
  size: int
  checksum: int | None = None


class Reader:
  """Reads the variables of a checkpoint that have a place."""

  def __init__(self, places, descriptor=None):
    """Makes a reader.

    Args:
      places: {name: Place}.
      descriptor: The descriptor of their file, if it is open. Another file may
        have replaced it under its path. By default the files are opened.
    """
    self._places = places
    self._descriptor = descriptor
    self._files = {}
    self._read = {}  # {name: (bytes read from the start, their checksum)}

  def __contains__(self, name):
    return name in self._places

  def read(self, name, begin, into, drop):
    """Reads a part of a variable.

    If the parts of a variable are read in order, its checksum is checked.

    Args:
      name: Its name.
      begin: The first byte of the part.
      into: A contiguous array of the size of the part.
      drop: As in `read`.

    Raises:
      OSError: If the file is too short, or its checksum is wrong.
    """
    place = self._places[name]
    view = into.reshape(-1).view(np.uint8)
    done, checksum = self._read.get(name, (0, 0))
    if begin == 0:
      done, checksum = 0, 0
    is_checked = place.checksum is not None and done == begin
    for at in range(0, view.size, AT_ONCE):
      part = view[at:at + AT_ONCE]
      self._fill(place, begin + at, part, drop)
      if is_checked:
        checksum = _native.crc32c(part, checksum)
    if is_checked:
      done += view.size
      self._read[name] = done, checksum
      if done == place.size and checksum != place.checksum:
        raise OSError(f"the file {place.path} is damaged: the checksum of "
                      f"bytes {place.offset} to {place.offset + place.size} is "
                      f"{checksum:#010x}, written as {place.checksum:#010x}")

  def _fill(self, place, begin, view, drop):
    descriptor = self._descriptor
    if descriptor is None:
      if place.path not in self._files:
        self._files[place.path] = os.open(place.path, os.O_RDONLY)
      descriptor = self._files[place.path]
    while view.size:
      got = read(descriptor, view, place.offset + begin, drop)
      if not got:
        raise OSError(f"the file {place.path} ends before byte "
                      f"{place.offset + place.size}")
      begin += got
      view = view[got:]

  def close(self):
    for descriptor in self._files.values():
      os.close(descriptor)
    self._files.clear()


def is_too_much(nbytes):
  """Whether the page cache cannot keep the inputs of a merge."""
  return nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def read(descriptor, into, offset, drop):
  """Reads bytes of a file.

  Args:
    descriptor: The descriptor of a file that is read in order.
    into: A writable buffer.
    offset: The first byte to read.
    drop: Whether to drop the bytes from the page cache. They would displace
      others, and the kernel would have to find a free page for each.

  Returns:
    The number of bytes read, 0 at the end of the file.
  """
  got = os.preadv(descriptor, [into], offset)
  # Whole blocks, since the rest of the last one is still to be read.
  first, end = (x // AT_ONCE * AT_ONCE for x in (offset, offset + got))
  if drop and end > first:
    os.posix_fadvise(descriptor, first, end - first, os.POSIX_FADV_DONTNEED)
  return got


def of_hdf5(path, begin, datasets):
  """The places of the floating-point variables of an HDF5 file.

  Args:
    path: The path of the file that contains it.
    begin: Its offset in that file.
    datasets: {name: dataset}.

  Returns:
    {name: Place} of the datasets that are contiguous and have a type of this
    machine.
  """
  places = {}
  for name, dataset in datasets.items():
    offset = dataset.id.get_offset()
    # HDF5 has floating-point types of any layout, for which `dtype` is only
    # wide enough.
    if (offset is not None and
        dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype)) and
        dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and
        not dataset.external):
      places[name] = Place(
          path, begin + offset, dataset.size * dataset.dtype.itemsize)
  return places
