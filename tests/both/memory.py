"""Measures the memory that a step leaves behind."""

import ctypes
import gc
import itertools
import re
import statistics
import sys
import typing


class Growth(typing.NamedTuple):
  """What each step leaves behind.

  Attributes:
    resident: Bytes of the process's memory.
    allocated: Bytes that `malloc` has given out. These do not fill holes that
      earlier tests left in the process's memory, as those of `resident` may.
    objects: Blocks of Python's own allocator, which `malloc` does not know.
  """
  resident: float
  allocated: float
  objects: float


# Bytes of the smallest Python object that a step could keep, about.
_OBJECT = 64


def per_step(growth):
  """The bytes that a step leaves behind: the worst of what was measured."""
  return max(growth.resident, growth.allocated, _OBJECT * growth.objects)


def growth(step, steps, samples=8):
  """The growth of memory after a warm-up of a fifth of the steps.

  Args:
    step: A function of no arguments.
    steps: How often it is called.
    samples: How often the memory is read.

  Returns:
    A Growth: slopes of lines through the samples. The medians of the slopes
    between all pairs: a jump that does not repeat, such as a cache that doubles
    its size or a new arena, does not matter.
  """
  gc.collect()
  gc.freeze()  # Collections, between samples, look at what is new only.
  try:
    for _ in range(steps // 5):
      step()
    each = (steps - steps // 5) // (samples - 1)
    reads = [_read()]
    for _ in range(samples - 1):
      for _ in range(each):
        step()
      reads.append(_read())
  finally:
    gc.unfreeze()
  pairs = list(itertools.combinations(range(samples), 2))
  return Growth(*(
      statistics.median((line[j] - line[i]) / (each * (j - i))
                        for i, j in pairs)
      for line in zip(*reads)))


def resident_bytes():
  """Bytes of this process in memory that no file backs, without garbage."""
  gc.collect()
  # The allocator otherwise keeps what is free.
  ctypes.CDLL(None).malloc_trim(0)
  with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
    return 1024 * int(re.search(r"Anonymous:\s*(\d+)", file.read())[1])


def _read():
  resident = resident_bytes()
  info = _mallinfo()
  return Growth(resident, info.uordblks + info.hblkhd, sys.getallocatedblocks())


class _Info(ctypes.Structure):
  _fields_ = [(name, ctypes.c_size_t) for name in (
      "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
      "uordblks", "fordblks", "keepcost")]


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Info
