"""The memory bandwidth of this machine, the limit of the ops."""

import ctypes
import os

_library = ctypes.CDLL(os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "_stream_limit.so"))
_library.wrapopt_stream_pass.restype = ctypes.c_double


class StreamLimit:
  """A threaded loop that only adds.

  It adds the arrays of each list in `read` to the arrays at the same position
  of each list in `written`. All are contiguous arrays of float32; those at the
  same position have the same size. It also writes to arrays that are read-only
  in NumPy, such as tensors.
  """

  def __init__(self, read, written):
    self._arrays = read, written  # Keeps them alive.
    sizes = [array.size for array in [*read, *written][0]]

    def pointers(rows):
      data = [array.ctypes.data for row in rows for array in row]
      return ctypes.c_size_t(len(rows)), (ctypes.c_void_p * len(data))(*data)

    self._arguments = (
        ctypes.c_size_t(len(sizes)), (ctypes.c_size_t * len(sizes))(*sizes),
        *pointers(read), *pointers(written))
    self.bytes = 4 * sum(sizes) * (len(read) + 2 * len(written))

  def run(self, threads):
    """Returns the seconds of one pass over every array."""
    return _library.wrapopt_stream_pass(*self._arguments, threads)
