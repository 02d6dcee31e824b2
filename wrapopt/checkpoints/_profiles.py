"""Power-function profiles: which sum of snapshots is nearest to an average.

The average of gamma after t steps weighs the value of time tau, 0 <= tau <= t,
with the profile

    p(tau) = (gamma + 1) tau^gamma / t^(gamma + 1)

and a PowerDecay has exactly this weight for the value of a step, over the unit
of time that the step takes. A sum of snapshots has the sum of their profiles.
So that of a wanted average is approximated in the sense of least squares over
tau.

Reference: Karras et al., "Analyzing and improving the training dynamics of
diffusion models" (EDM2), 2023, arXiv 2312.02696, appendix C.3. Deviations: the
weights sum to 1, so that what all snapshots agree in stays as it is.
"""

import typing

import numpy as np


class Profile(typing.NamedTuple):
  """The profile of an average.

  Attributes:
    gamma: Its exponent.
    steps: t, how many steps it has taken.
  """
  gamma: float
  steps: float


class Fit(typing.NamedTuple):
  """A sum of snapshots.

  Attributes:
    weights: One for each snapshot, an array of sum 1.
    error: The distance of its profile from the wanted one, relative to the
      size of that: norms of functions of tau. 0 is exact.
  """
  weights: np.ndarray
  error: float


def inner_product(a, b):
  """The integral of the product of two profiles over tau."""
  if a.steps > b.steps:
    a, b = b, a
  # t^(...) with the two times as a ratio, which neither over- nor underflows.
  return ((a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1) / b.steps *
          (a.steps / b.steps)**b.gamma)


def fit(snapshots, wanted):
  """The sum of snapshots that is nearest to a profile.

  Args:
    snapshots: Profiles of the snapshots.
    wanted: A Profile.

  Returns:
    A Fit.
  """
  # In units of each snapshot's own norm, which differ by orders of magnitude.
  norms = np.sqrt([inner_product(s, s) for s in snapshots])
  gram = np.array([[inner_product(a, b) for b in snapshots] for a in snapshots])
  gram /= np.outer(norms, norms)
  size = inner_product(wanted, wanted)
  products = np.array([inner_product(s, wanted) for s in snapshots]) / norms
  # x = x0 + N y, where the weights x / norms sum to 1 whatever y is.
  ones = 1 / norms
  x0 = ones / (ones @ ones)
  free = np.linalg.svd(ones[None])[2][1:].T
  # The Gram matrix is nearly singular where snapshots overlap: singular values
  # that are rounding errors are left out.
  y = np.linalg.lstsq(free.T @ gram @ free, free.T @ (products - gram @ x0),
                      rcond=None)[0]
  x = x0 + free @ y
  error = max(0.0, x @ gram @ x - 2 * x @ products + size)
  return Fit(x / norms, float(np.sqrt(error / size)))
