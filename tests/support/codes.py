"""Codes of vectors in NumPy, as cc/engine/codes.h defines them."""

import numpy as np

from numerics import BFLOAT16

DTYPES = ("bfloat16", "int8", "int4")
_BLOCK = 128
_TINY = np.finfo(np.float32).tiny


def flushed(x):
  """Subnormal numbers become zeros of the same sign."""
  return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


@np.errstate(all="ignore")
def encode(x, dtype):
  """(code, decoded numbers) of a float32 vector."""
  x = flushed(np.float32(x))
  if dtype == "bfloat16":
    rounded = x.astype(BFLOAT16)
    return rounded.view(np.uint8), rounded.astype(np.float32)
  most = np.float32(127 if dtype == "int8" else 7)
  code, decoded = [np.zeros(0, np.uint8)], [np.zeros(0, np.float32)]
  for begin in range(0, len(x), _BLOCK):
    block = x[begin:begin + _BLOCK]
    scale = flushed(np.max(np.abs(block)) / most)
    if not np.isfinite(scale):
      scale = np.float32(np.nan)
    numbers = (np.rint(block / scale) if scale > 0 else
               np.zeros_like(block)).astype(np.int8)
    decoded.append(numbers * scale)
    code.append(np.frombuffer(scale.tobytes(), np.uint8))
    if dtype == "int4":
      halves = np.append(numbers, np.zeros(len(numbers) % 2, np.int8)) & 15
      numbers = halves[::2] | halves[1::2] << 4
    code.append(numbers.view(np.uint8))
  return np.concatenate(code), np.concatenate(decoded)


def decode(code, size, dtype):
  """The numbers of a code."""
  if dtype == "bfloat16":
    return code.view(BFLOAT16).astype(np.float32)
  decoded = [np.zeros(0, np.float32)]
  for begin in range(0, size, _BLOCK):
    count = min(_BLOCK, size - begin)
    scale, code = code[:4].copy().view(np.float32), code[4:]
    if dtype == "int4":
      bytes_ = code[:(count + 1) // 2].astype(np.int8)
      numbers = np.stack([bytes_ << 4 >> 4, bytes_ >> 4], 1).ravel()[:count]
      code = code[len(bytes_):]
    else:
      numbers, code = code[:count].view(np.int8), code[count:]
    decoded.append(numbers * scale)
  assert not code.size
  return np.concatenate(decoded)


@np.errstate(all="ignore")
def encode_values(values, center, error, dtype):
  """(code, decoded, new error) of how far values are from a center."""
  x = flushed(flushed(values) - flushed(center))
  x = flushed(x + flushed(error))
  code, decoded = encode(x, dtype)
  return code, decoded, flushed(x - decoded)
