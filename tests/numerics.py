"""The update rules in float64 NumPy, and how far a kernel may be from them.

The rules are written from their formulas. A kernel's result is right when

    |got - want| <= k * eps * sum |operands|  +  half a step of the storage

k: the roundings that the formula takes. Each is at most half an eps of
  something that is no larger than the sum; the other half is for the reference,
  which rounds too where the kernel computes in float64.
eps: of the type that the kernel computes in: float64 for float64, else float32.
half a step: what the rounding to a narrower storage may add.
"""

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF, FLOAT, DOUBLE = (np.dtype(f"float{bits}") for bits in (16, 32, 64))
DTYPES = (HALF, BFLOAT16, FLOAT, DOUBLE)

# Storage of (states, inputs): of one dtype, or one is float32 and the other
# narrower.
PAIRS = ((HALF, HALF), (HALF, FLOAT), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT),
         (FLOAT, FLOAT), (FLOAT, HALF), (FLOAT, BFLOAT16), (DOUBLE, DOUBLE))


def ema(states, inputs, scalars):
  """s' = s + r (v - s)."""
  (s,), (v,), (r,) = states, inputs, scalars
  return [(s + r * (v - s), np.abs(s) + np.abs(r) * (np.abs(v) + np.abs(s)))]


# {rule: (reference, k)}. A reference takes float64 states, inputs and scalars,
# and gives the new value and sum |operands| of each state.
RULES = {
    # Rounded: the rate where it becomes float32, difference, product, sum.
    "Ema": (ema, 4),
}


def reference(rule, states, inputs, scalars):
  """What `rule` makes of arrays of any dtype: (values, tolerances) in float64.

  Args:
    rule: Its name.
    states: Arrays.
    inputs: Arrays.
    scalars: Numbers.

  Returns:
    A list with (new value, how far from it a kernel's may be) for each state.
  """
  formula, k = RULES[rule]
  new = formula([np.asarray(s, DOUBLE) for s in states],
                [np.asarray(i, DOUBLE) for i in inputs], scalars)
  storage = ml_dtypes.finfo(states[0].dtype)
  compute = ml_dtypes.finfo(DOUBLE if states[0].dtype == DOUBLE else FLOAT)
  results = []
  for value, operands in new:
    tolerance = k * (float(compute.eps) * operands
                     + float(compute.smallest_subnormal))
    if storage.bits < compute.bits:
      tolerance = tolerance + np.maximum(
          float(storage.eps) * np.abs(value),
          float(storage.smallest_subnormal)) / 2
    results.append((value, tolerance))
  return results


def assert_close(got, want, tolerance, context=""):
  """Asserts |got - want| <= tolerance, and shows the first that is not."""
  got = np.asarray(got, DOUBLE)
  assert got.shape == np.shape(want), (got.shape, np.shape(want), context)
  # So put, a NaN is wrong too.
  wrong = ~(np.abs(got - want) <= tolerance)
  if wrong.any():
    _show(wrong, got, want, context, tolerance)


def assert_same_bits(got, want, context=""):
  """Asserts that two arrays of one dtype are equal bit for bit."""
  got, want = np.asarray(got), np.asarray(want)
  assert (got.dtype, got.shape) == (want.dtype, want.shape), context
  wrong = _bits(got) != _bits(want)
  if wrong.any():
    _show(wrong, got, want, context)


def assert_same_numbers(got, want, context=""):
  """The same, but for a NaN, which may be any NaN."""
  got, want = np.asarray(got), np.asarray(want)
  assert (got.dtype, got.shape) == (want.dtype, want.shape), context
  wrong = (_bits(got) != _bits(want)) & ~(np.isnan(got) & np.isnan(want))
  if wrong.any():
    _show(wrong, got, want, context)


def _bits(array):
  return np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(
      array.shape)


def _show(wrong, got, want, context, tolerance=None):
  """Fails with the first mismatch and its neighbours."""
  at = int(np.flatnonzero(wrong)[0])
  near = slice(max(0, at - 2), at + 3)
  lines = [f"{int(wrong.sum())} of {wrong.size} differ, the first at [{at}] "
           f"{context}"]
  for name, array in (("got", got), ("want", want), ("tolerance", tolerance)):
    if array is not None:
      array = np.broadcast_to(array, wrong.shape).ravel()
      lines.append(f"  {name}[{near.start}:{near.stop}] = {array[near]!r}")
  raise AssertionError("\n".join(lines))
