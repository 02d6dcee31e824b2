"""Weights with which checkpoints of a constant rate give those of a decay.

A run at a constant learning rate goes from checkpoint 0 to the last one, k, by
updates. Their weighted mean, with weights c_j of sum 1, is checkpoint 0 and the
same updates, where those between checkpoints i - 1 and i have the weight

    w_i = c_i + c_(i+1) + ... + c_k

So c_j = w_j - w_(j+1), with w_0 = 1 and w_(k+1) = 0, is the result of a rate
that decays by the factors w_1, ..., w_k, if the gradients were the same. Here
w_i is the mean of the shape of a decay over the steps between the two.

Reference: Tian et al., "WSM: decay-free learning rate schedule via checkpoint
merging for LLM pre-training", ICLR 2026, arXiv 2507.17634. Deviation: w_i is a
mean over steps, so that checkpoints may have any distances.
"""

import os
import re

import numpy as np

from wrapopt import _checks
from wrapopt.checkpoints import _profiles

# {name: (the factor of the rate, and its integral from 0) after the part s of a
# decay}.
SHAPES = {
    "linear": (lambda s: 1 - s, lambda s: s - s * s / 2),
    "cosine": (lambda s: (1 + np.cos(np.pi * s)) / 2,
               lambda s: (s + np.sin(np.pi * s) / np.pi) / 2),
    "1-sqrt": (lambda s: 1 - np.sqrt(s), lambda s: s - s**1.5 * 2 / 3),
}

# The number of points at which the fit of `of_averages` compares factors.
_POINTS = 4096


def fit(sources, shape, decay_steps, steps):
  """The weights of inputs of a decay.

  Args:
    sources: Sources.
    shape: The argument `decay` of `wrapopt.checkpoints.merge`.
    decay_steps: As there.
    steps: As there.

  Returns:
    A `_profiles.Fit`.
  """
  if not isinstance(shape, str) or shape not in SHAPES:
    raise ValueError(f"`decay` must be {', '.join(SHAPES)} or None, got "
                     f"{shape!r}.")
  gammas = [s.note["gamma"] if s.note else None for s in sources]
  steps = _steps(sources, steps, are_averages=None not in gammas)
  longest = steps[-1] - steps[0]
  if decay_steps is None:
    decay_steps = longest
  if not _checks.is_number(decay_steps) or not 0 < decay_steps <= longest:
    raise ValueError(
        "`decay_steps` must be a number greater than 0 and at most the steps "
        f"from the first input to the last, {longest:g}, got {decay_steps!r}.")
  if None not in gammas:
    return of_averages([_profiles.Profile(*p) for p in zip(gammas, steps)],
                       shape, decay_steps)
  # A decay of 0 keeps the weights themselves.
  averages = [s for s in sources if s.note and s.note["decay"] not in (
      "0", "0.0")]
  if averages:
    raise ValueError(
        f"{averages[0].path} must be a checkpoint of weights, or all inputs "
        "snapshots of a PowerDecay, got a snapshot with the decay "
        f"{averages[0].note['decay']}.")
  return _profiles.Fit(of_weights(steps, shape, decay_steps), 0.0)


def _steps(sources, steps, are_averages):
  """The step of each Source: an array."""
  if steps is None:
    steps = [s.note["steps" if are_averages else "step"] if s.note else
             _step_of_name(s.path) for s in sources]
  steps = _checks.sequence("steps", steps)
  if len(steps) != len(sources) or not all(
      _checks.is_number(x) and x >= 0 for x in steps):
    raise ValueError(f"`steps` must hold a number of at least 0 for each of "
                     f"the {len(sources)} inputs, got {steps!r}.")
  steps = np.asarray(steps, np.float64)
  rises = np.diff(steps) >= 0 if are_averages else np.diff(steps) > 0
  if not rises.all() or not steps[0] < steps[-1]:
    raise ValueError(
        "The inputs of a decay must be at least two, in the order of training, "
        f"got the steps {', '.join(f'{x:g}' for x in steps)}.")
  return steps


def _step_of_name(path):
  """The number at the end of a checkpoint's name, before its endings.

  Or that of its folder, as in 'checkpoint-1000/model.safetensors'.
  """
  step = _number_of(path)
  if step is None:
    raise ValueError(
        f"{path} must have a name that ends with its step, such as "
        "'model-1000', 'model.ckpt-1000' or 'model-1000.weights.h5', got none. "
        "Pass `steps`.")
  return step


def _number_of(path):
  folder, name = os.path.split(os.path.abspath(path))
  for text in name, os.path.basename(folder):
    found = re.search(r"(?<!\d)(?<!\d\.)(\d+)$",
                      re.sub(r"(\.[A-Za-z]\w*)+$", "", text))
    if found is not None:
      return int(found[1])
    if not name.startswith("model.safetensors"):
      break
  return None


def check_order(paths):
  """Raises a ValueError if the numbers at the ends of names do not rise."""
  steps = [_number_of(path) for path in paths]
  for i in range(len(steps) - 1):
    if None not in steps and steps[i] > steps[i + 1]:
      raise ValueError(
          f"The inputs must be in the order of training, got {paths[i]} before "
          f"{paths[i + 1]}. Pass their directory, or sort them by number (`ls "
          "-v`).")


def of_weights(steps, shape, decay_steps):
  """The weights of checkpoints of a run's weights.

  Args:
    steps: The steps of the checkpoints, which rise: an array.
    shape: A key of SHAPES.
    decay_steps: The length of the decay, which ends at the last checkpoint.

  Returns:
    An array of sum 1.
  """
  _, integral = SHAPES[shape]
  s = (steps - steps[-1] + decay_steps) / decay_steps
  # Before the decay, the factor is 1.
  of_updates = np.diff(np.where(s < 0, s, integral(np.maximum(s, 0))))
  factors = [1.0, *(of_updates / np.diff(s)), 0.0]
  return 0.0 - np.diff(factors)


def of_averages(profiles, shape, decay_steps):
  """A sum of power-function averages whose updates have these factors.

  An average of gamma after t steps has the updates of step tau <= t with the
  factor 1 - (tau / t)^(gamma + 1).

  Args:
    profiles: The `_profiles.Profile` of each average.
    shape: A key of SHAPES.
    decay_steps: The length of the decay, which ends with the latest average.

  Returns:
    A `_profiles.Fit`: least squares over tau. The error is that of the factors,
    divided by the norm of what the decay takes from 1.
  """
  end = max(p.steps for p in profiles)
  tau = (np.arange(_POINTS) + 0.5) / _POINTS * end
  factor, _ = SHAPES[shape]
  wanted = factor(np.maximum((tau - end + decay_steps) / decay_steps, 0))
  of_each = np.array([1 - np.minimum(tau / p.steps, 1)**(p.gamma + 1)
                      for p in profiles]).T
  # The weights sum to 1, so that a value that all share is not changed.
  first, *others = of_each.T
  differences = (np.array(others).reshape(-1, _POINTS) - first).T
  free = np.linalg.lstsq(differences, wanted - first, rcond=1e-10)[0]
  weights = np.array([1 - free.sum(), *free])
  return _profiles.Fit(weights, float(
      np.linalg.norm(of_each @ weights - wanted) /
      np.linalg.norm(1 - wanted)))
