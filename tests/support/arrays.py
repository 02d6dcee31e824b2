"""Compares lists of arrays."""

import numpy as np

import numerics


def values(variables):
  """The variables' values."""
  return [v.numpy() for v in variables]


def assert_all(check, got, want, *args, **kwargs):
  """Each pair of arrays in two lists, or lists of lists, passes a check."""
  for g, w in zip(got, want, strict=True):
    if isinstance(g, list) and isinstance(w, list):
      assert_all(check, g, w, *args, **kwargs)
    else:
      check(g, w, *args, **kwargs)


def assert_same(got, want):
  """Two lists hold the same numbers."""
  assert_all(np.testing.assert_array_equal, got, want)


def assert_same_bits(got, want):
  """Two lists are equal bit for bit, and in their dtypes."""
  assert_all(numerics.assert_same_bits, got, want)


def assert_close(got, want, rtol=1e-7, atol=0.0):
  """Two lists are equal within the tolerances of np.testing."""
  assert_all(np.testing.assert_allclose, got, want, rtol=rtol, atol=atol)
