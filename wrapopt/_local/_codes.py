"""Codes of vectors: see cc/engine/codes.h."""

import tensorflow as tf

from wrapopt._loader import ops as raw

DTYPES = ("bfloat16", "int8", "int4")
_BLOCK = 128  # The numbers that have a scale together.
_SCALE_BYTES = 4


def size(dtype, numbers):
  """The bytes of the code of so many numbers."""
  if dtype == "bfloat16":
    return 2 * numbers
  return -(-numbers // _BLOCK) * _SCALE_BYTES + (
      numbers if dtype == "int8" else -(-numbers // 2))


def encode(values, center, error, dtype):
  """(code, error): of how far values are from a center, and what it loses."""
  with tf.device("/cpu:0"):
    return tuple(x.numpy() for x in raw.wrapopt_encode(
        values, center, error, dtype=dtype))


def add(center, code, dtype):
  """The center, moved by a code."""
  with tf.device("/cpu:0"):
    return raw.wrapopt_add_decoded(center, code, dtype=dtype).numpy()
