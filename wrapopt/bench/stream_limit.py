"""The memory bandwidth of this machine, the limit of the ops."""

import ctypes
import os

import numpy as np

_library = ctypes.CDLL(os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "_stream_limit.so"))
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_library.wrapopt_stream_pass.restype = ctypes.c_double
_library.wrapopt_stream_pass.argtypes = [
    ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t,
    _POINTERS, ctypes.c_size_t, _POINTERS, ctypes.c_int]


class StreamLimit:
  """A threaded loop that only adds.

  It adds the float32 arrays of each list in `read` to the arrays at the same
  position of each list in `written`. It also writes to arrays that are
  read-only in NumPy, such as tensors.
  """

  def __init__(self, read, written):
    """Makes the loop.

    Args:
      read: Lists of contiguous float32 arrays.
      written: The same.

    Raises:
      ValueError: if an array has another type, or the lists differ in their
        number of arrays or in the size of an array.
    """
    rows = [(f"{name}[{k}]", row)
            for name, rows in (("read", read), ("written", written))
            for k, row in enumerate(rows)]
    first, like = rows[0] if rows else ("", [])
    for subject, row in rows:
      if len(row) != len(like):
        raise ValueError(
            f"{subject} must hold one array for each of the {len(like)} in "
            f"{first}, got {len(row)}")
      for i, array in enumerate(row):
        if not (isinstance(array, np.ndarray) and array.dtype == np.float32
                and array.flags.c_contiguous):
          raise ValueError(f"{subject}[{i}] must be a float32 array")
        if array.size != like[i].size:
          raise ValueError(
              f"{subject}[{i}] misshapen: got {array.size} elements but "
              f"expected {like[i].size} (the size of {first}[{i}])")

    self._arrays = read, written  # Keeps them alive.
    sizes = [array.size for array in like]

    def pointers(rows):
      data = [array.ctypes.data for row in rows for array in row]
      return len(rows), (ctypes.c_void_p * len(data))(*data)

    self._arguments = (len(sizes), (ctypes.c_size_t * len(sizes))(*sizes),
                       *pointers(read), *pointers(written))
    self._bytes = 4 * sum(sizes) * (len(read) + 2 * len(written))

  def run(self, threads):
    """Returns the seconds of one pass over every array."""
    if threads < 1:
      raise ValueError(f"threads must be at least 1, got {threads}")
    return _library.wrapopt_stream_pass(*self._arguments, threads)

  @property
  def bytes(self):
    """Bytes that one pass moves."""
    return self._bytes
