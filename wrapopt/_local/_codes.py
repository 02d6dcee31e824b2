"""Codes of vectors: see cc/engine/codes.h."""

import numpy as np

from wrapopt import _native

DTYPES = ("bfloat16", "int8", "int4")  # In the order of the enumeration `Code`.
_BLOCK = 128  # The numbers that have a scale together.
_SCALE_BYTES = 4


def size(dtype, numbers):
  """The bytes of the code of so many numbers."""
  if dtype == "bfloat16":
    return 2 * numbers
  return -(-numbers // _BLOCK) * _SCALE_BYTES + (
      numbers if dtype == "int8" else -(-numbers // 2))


def encode(values, center, error, dtype, new_error):
  """Codes how far values are from a center, in one pass.

  Args:
    values: A vector of float16, bfloat16 or float32.
    center, error: Vectors of float32.
    dtype: One of DTYPES.
    new_error: A vector of float32 that gets what the code loses of values -
      center + error.

  Returns:
    The code, a vector of bytes.
  """
  n = values.size
  _native.check("values", values, n, "", _native.DTYPES[:-1])
  for subject, x in ("center", center), ("error", error), (
      "new_error", new_error):
    _native.check(subject, x, n, "the size of values", ["float32"],
                  is_written=x is new_error)
  code = np.empty(size(dtype, n), np.uint8)
  _native.encode(DTYPES.index(dtype), values, center, error, code, new_error)
  return code


def add(center, code, dtype, moved):
  """Moves a center by a code.

  Args:
    center: A vector of float32.
    code: That of `encode`, or those of several vectors of whole blocks, one
      after the other.
    dtype: One of DTYPES.
    moved: A vector of float32 that gets the center, moved.
  """
  n = center.size
  _native.check("center", center, n, "", ["float32"])
  _native.check("code", code, size(dtype, n), "that of center", ["uint8"])
  _native.check("moved", moved, n, "the size of center", ["float32"],
                is_written=True)
  _native.add_decoded(DTYPES.index(dtype), center, code, moved)
