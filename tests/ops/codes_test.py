"""Codes of vectors: to the bit what NumPy makes of them."""

import numpy as np
import pytest

import codes
from numerics import BFLOAT16, DOUBLE, FLOAT, HALF
from threads import in_threads
from wrapopt._local import _codes

LENGTHS = [0, 1, 2, 3, 127, 128, 129, 255, 256, 257, 1000, 100_000]


def same(got, want):
  """Equal bits; a NaN equals any other."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype and got.shape == want.shape
  if got.dtype == FLOAT:
    nan = np.isnan(got)
    np.testing.assert_array_equal(nan, np.isnan(want))
    got, want = got[~nan].view(np.uint32), want[~nan].view(np.uint32)
  np.testing.assert_array_equal(got, want)


def encode(values, center, error, dtype):
  new_error = np.empty_like(error)
  return _codes.encode(values, center, error, dtype, new_error), new_error


def add(center, code, dtype):
  moved = np.empty_like(center)
  _codes.add(center, code, dtype, moved)
  return moved


def check(values, center, error, dtype):
  code, new_error = encode(values, center, error, dtype)
  want, decoded, left = codes.encode_values(
      values.astype(FLOAT), center, error, dtype)
  same(code, want)
  assert len(want) == _codes.size(dtype, len(values))
  same(new_error, left)
  same(codes.decode(want, len(values), dtype), decoded)
  with np.errstate(all="ignore"):
    moved = codes.flushed(codes.flushed(center) + decoded)
  same(add(center, code, dtype), moved)
  return decoded


def test_a_trajectory():
  # max = 127, so the scale is 1. 0.5 and 1.5 are ties, which go to even.
  x = np.array([127, 0.5, 1.5, -3.25], FLOAT)
  zeros = np.zeros(4, FLOAT)
  code, error = encode(x, zeros, zeros, "int8")
  assert bytes(code) == np.float32(1).tobytes() + bytes(
      [127, 0, 2, 256 - 3])
  assert error.tolist() == [0, 0.5, -0.5, -0.25]
  # What is lost comes next: 0.5 + 0.5 = 1.
  code, error = encode(x, zeros, error, "int8")
  assert code[4:].tolist() == [127, 1, 1, 256 - 4]  # -3.5 to even.
  assert error.tolist() == [0, 0, 0, 0.5]
  # max = 7: the same with halves of bytes, the first one low.
  code, error = encode(x - np.array([120, 0, 0, 0], FLOAT), zeros, zeros,
                       "int4")
  assert bytes(code) == np.float32(1).tobytes() + b"\x07\xd2"
  assert add(zeros + 1, code, "int4").tolist() == [8, 1, 3, -2]


@pytest.mark.parametrize("dtype", codes.DTYPES)
@pytest.mark.parametrize("of", [HALF, BFLOAT16, FLOAT], ids=str)
def test_all_lengths(of, dtype):
  rng = np.random.default_rng(len(dtype))
  for n in LENGTHS:
    values, center, error = rng.normal(size=[3, n]).astype(FLOAT)
    decoded = check(values.astype(of), center, error / 8, dtype)
    if n > 3 and dtype == "int8":
      assert np.abs(decoded).max() > 0.5


@pytest.mark.parametrize("dtype", codes.DTYPES)
def test_special_numbers(dtype):
  rng = np.random.default_rng(1)
  tiny = np.finfo(FLOAT).tiny
  for special in (0.0, -0.0, np.inf, -np.inf, np.nan, tiny, tiny / 2, -tiny,
                  100 * tiny, 127 * tiny, 3e38, -3e38, 1e-42):
    for scale in 0.0, tiny, 1.0:
      values, center, error = FLOAT.type(
          scale * rng.normal(size=[3, 300])).copy()
      values[[5, 130]] = special
      center[7] = -special
      error[299] = special
      check(values, center, error, dtype)


@pytest.mark.parametrize("dtype", codes.DTYPES)
def test_errors_are_small_and_nothing_is_lost(dtype):
  rng = np.random.default_rng(2)
  error, sent = np.zeros(500, FLOAT), np.zeros(500)
  values = rng.normal(size=[50, 500]).astype(FLOAT)
  for x in values:
    code, error = encode(x, np.zeros_like(x), error, dtype)
    sent += codes.decode(code, 500, dtype)
  np.testing.assert_allclose(sent + error, values.sum(axis=0, dtype=float),
                             atol=1e-4)
  assert np.abs(error).max() < {"bfloat16": .02, "int8": .03, "int4": .6}[dtype]


def test_codes_of_pieces_are_the_code_of_all():
  x = np.random.default_rng(3).normal(size=1000).astype(FLOAT)
  zeros = np.zeros_like(x)
  for dtype in codes.DTYPES:
    whole, _ = encode(x, zeros, zeros, dtype)
    parts = [encode(x[a:b], zeros[a:b], zeros[a:b], dtype)[0]
             for a, b in ((0, 256), (256, 384), (384, 1000))]
    same(np.concatenate(parts), whole)
    same(add(zeros, whole, dtype), codes.encode(x, dtype)[1])


def test_in_threads():
  x = np.random.default_rng(4).normal(size=100_000).astype(FLOAT)
  want = codes.encode(x, "int4")[0]
  def run():
    for _ in range(5):
      same(encode(x, x * 0, x * 0, "int4")[0], want)
  in_threads(*[run] * 4)


def test_an_error_may_take_the_place_of_the_last_one():
  x, center, error = np.random.default_rng(5).normal(size=[3, 300]).astype(
      FLOAT)
  want, left = encode(x, center, error, "int4")
  same(_codes.encode(x, center, error, "int4", error), want)
  same(error, left)
  moved = add(center, want, "int4")
  _codes.add(center, want, "int4", center)
  same(center, moved)


def fixed(x):
  x.flags.writeable = False
  return x


@pytest.mark.parametrize("text, call", [
    ("values must be of dtype float16, bfloat16 or float32, got float64",
     lambda x, code: _codes.encode(x.astype(DOUBLE), x, x, "int8", x)),
    ("values must be contiguous",
     lambda x, code: _codes.encode(x[::2], x[:2], x[:2], "int8", x[:2])),
    ("center misshapen: got 3 elements but expected 4 (the size of values)",
     lambda x, code: _codes.encode(x, x[:3], x, "int8", x)),
    ("error must be of dtype float32, got float16",
     lambda x, code: _codes.encode(x, x, x.astype(HALF), "int8", x)),
    ("new_error misshapen: got 3 elements but expected 4 (the size of values)",
     lambda x, code: _codes.encode(x, x, x, "int8", x[:3].copy())),
    ("new_error is not writeable",
     lambda x, code: _codes.encode(x, x, x, "int8", fixed(x.copy()))),
    ("center must be of dtype float32, got float64",
     lambda x, code: _codes.add(x.astype(DOUBLE), code, "int8", x)),
    ("code misshapen: got 7 elements but expected 8 (that of center)",
     lambda x, code: _codes.add(x, code[:-1], "int8", x)),
    ("code must be of dtype uint8, got int8",
     lambda x, code: _codes.add(x, code.view(np.int8), "int8", x)),
    ("moved is not writeable",
     lambda x, code: _codes.add(x, code, "int8", fixed(x.copy())))])
def test_arrays_that_are_refused(text, call):
  x = np.ones(4, FLOAT)
  code, _ = encode(x, x * 0, x * 0, "int8")
  with pytest.raises(ValueError) as e:
    call(x, code)
  assert text in str(e.value)
  assert x.tolist() == [1] * 4
