"""The widths of power-function averages, whose decay is a `PowerDecay`."""

import math

from wrapopt import _checks

# The relative width of the uniform mean, whose gamma is 0.
_WIDEST = 1 / math.sqrt(12)


def relative_width_of(gamma):
  """The relative width of the average with exponent `gamma`."""
  # Nothing here overflows.
  return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


def gamma_of(relative_width):
  """The exponent of the average with a relative width."""
  width = _checks.number("relative_width", relative_width)
  if width > _WIDEST * (1 + 1e-15):
    raise ValueError("`relative_width` must be at most 1/sqrt(12), 0.288675, "
                     f"got {width}.")
  # Bisection, since the width falls as gamma rises. The width of the upper
  # bound is less than `width`, since relative_width_of(gamma) < 1 / (gamma +
  # 2).
  low, high = 0.0, 1 / width
  while low < (middle := (low + high) / 2) < high:
    if relative_width_of(middle) > width:
      low = middle
    else:
      high = middle
  return 0.0 if width >= _WIDEST else high


def exponent(relative_width, gamma):
  """The exponent of a `PowerDecay` with these arguments."""
  if (relative_width is None) == (gamma is None):
    raise TypeError("PowerDecay takes one of `relative_width` and `gamma`, got "
                    f"{relative_width!r} and {gamma!r}.")
  return (gamma_of(relative_width) if gamma is None else
          _checks.number("gamma", gamma, 0))
