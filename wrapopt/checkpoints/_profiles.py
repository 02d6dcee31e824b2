"""Power-function profiles: fits a sum of snapshots to a wanted average.

The average of gamma after t steps weighs the value at time tau, 0 <= tau <= t,
with the profile

    p(tau) = (gamma + 1) tau^gamma / t^(gamma + 1)

The weight of a step in a PowerDecay is the integral of the profile over the
step's unit of time. The profile of a sum of snapshots is the sum of their
profiles. The weights of the sum are the least-squares fit, over tau, to the
profile of the wanted average.

Reference: Karras et al., "Analyzing and improving the training dynamics of
diffusion models" (EDM2), 2023, arXiv 2312.02696, appendix C.3. Deviation: the
weights sum to 1, so that a value that all snapshots share is not changed.
"""

import math
import typing

import numpy as np


class Profile(typing.NamedTuple):
  """The profile of an average.

  Attributes:
    gamma: Its exponent.
    steps: t, the number of its steps.
  """
  gamma: float
  steps: float


class Fit(typing.NamedTuple):
  """A sum of snapshots.

  Attributes:
    weights: An array of sum 1, with a weight for each snapshot.
    error: The distance of its profile from the wanted one, divided by the norm
      of the wanted one: norms of functions of tau. 0 is exact.
  """
  weights: np.ndarray
  error: float


def inner_product(a, b):
  """The integral of the product of two profiles over tau."""
  if a.steps > b.steps:
    a, b = b, a
  # Neither the ratio of the two times nor numbers in this unit, a power of two,
  # overflow or underflow.
  unit = math.ldexp(1, -math.frexp(b.gamma + 1)[1])
  return ((a.gamma + 1) * ((b.gamma + 1) * unit) /
          (a.gamma * unit + b.gamma * unit + unit) / b.steps *
          (a.steps / b.steps)**b.gamma)


def fit(snapshots, wanted):
  """Fits a sum of snapshots to a profile.

  Args:
    snapshots: Profiles of the snapshots.
    wanted: A Profile.

  Returns:
    A Fit.
  """
  # In units of each snapshot's norm: the norms differ by orders of magnitude.
  norms = np.sqrt([inner_product(s, s) for s in snapshots])
  gram = np.array([[inner_product(a, b) for b in snapshots] for a in snapshots])
  gram /= np.outer(norms, norms)
  size = inner_product(wanted, wanted)
  products = np.array([inner_product(s, wanted) for s in snapshots]) / norms
  # x = x0 + N y, where the weights x / norms sum to 1 for each y.
  ones = 1 / norms
  x0 = ones / (ones @ ones)
  free = np.linalg.svd(ones[None])[2][1:].T
  # The Gram matrix is nearly singular if snapshots overlap. lstsq drops
  # singular values that are rounding errors.
  y = np.linalg.lstsq(free.T @ gram @ free, free.T @ (products - gram @ x0),
                      rcond=None)[0]
  x = x0 + free @ y
  error = max(0.0, x @ gram @ x - 2 * x @ products + size)
  return Fit(x / norms, float(np.sqrt(error / size)))
