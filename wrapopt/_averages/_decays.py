"""The decays of an optimizer, in each step."""

import collections.abc
import math
import numbers
import typing
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _decay
from wrapopt._averages import _replicas


class _Given(_decay.Shape):
  """A number, tensor, variable or callable as a decay."""

  def __init__(self, value):
    self._value = value
    self.is_called = _is_called(value)

  def at(self, t):
    return value_now(self._value)


def checked(average_decay):
  """Checks an argument `average_decay`.

  Args:
    average_decay: A number, a PowerDecay, a HalfLife or a BEMA, or a sequence
      or an array of different ones; or one scalar tensor or variable, or a
      callable.

  Returns:
    A list of decays, without a HalfLife.

  Raises:
    TypeError: If it has another type.
    ValueError: If a number is out of range, or decays repeat.
  """
  if isinstance(average_decay, np.ndarray) and average_decay.ndim == 0:
    average_decay = average_decay[()]
  several = (isinstance(average_decay, np.ndarray) or
             isinstance(average_decay, collections.abc.Sequence) and
             not isinstance(average_decay, (str, bytes)))
  decays = [_plain(decay)
            for decay in (average_decay if several else [average_decay])]
  if not decays:
    raise ValueError("`average_decay` must hold at least one decay, got none.")
  for decay in decays:
    if isinstance(decay, numbers.Real) and not isinstance(decay, bool):
      if not 0 <= decay <= 1:
        raise ValueError(f"`average_decay` must be in [0, 1], got {decay}.")
    elif isinstance(decay, _decay.Shape):
      pass
    elif several and not isinstance(decay, bool):
      raise ValueError(
          "A sequence of `average_decay` must hold numbers, PowerDecays, "
          f"HalfLives and BEMAs, got {decay!r}. Pass a tensor, variable or "
          "callable alone.")
    elif isinstance(decay, tf.Variable) or tf.is_tensor(decay):
      if not decay.shape.is_compatible_with([]):
        raise ValueError(
            "`average_decay` must be a scalar if it is a tensor or a variable, "
            f"got one of shape {decay.shape}.")
    elif isinstance(decay, bool) or not callable(decay):
      raise TypeError(
          "`average_decay` must be a number, a PowerDecay, a HalfLife or a "
          "BEMA, a sequence of these, a scalar tensor or variable, or a "
          f"callable, got {decay!r}.")
  if several and len(set(decays)) != len(decays):
    raise ValueError(f"`average_decay` must hold different decays, got "
                     f"{average_decay}.")
  return decays


def _plain(decay):
  return decay.decay if isinstance(decay, _decay.HalfLife) else decay


def check_update_every(decays, every):
  """Raises an error if the burn-in of a BEMA does not end with an update."""
  for decay in decays:
    if is_derived(decay) and decay.get_config()["burn_in"] % every:
      raise ValueError(f"`update_every` must divide the burn_in of {decay!r}, "
                       f"got {every}.")


def with_origins(decays):
  """Decays, and then those of the other variables that a BEMA needs."""
  return [*decays, *map(_decay.Origin, filter(is_derived, decays))]


def is_derived(decay):
  """Whether its average follows from several variables."""
  return isinstance(decay, _decay.BEMA)


def place_of_origin(decay, decays):
  """The place in the result of `with_origins` of the v_0 of a BEMA."""
  return decays.index(_decay.Origin(decay))


def moving(decays, at_once=True):
  """The places in the result of `with_origins` of averages that steps move.

  Args:
    decays: That result.
    at_once: Whether the averages move from the first step on.
  """
  return [k for k, decay in enumerate(decays)
          if not (at_once and isinstance(decay, _decay.Origin) and decay.stays)]


def need_count(decays):
  """Whether one of an optimizer's decays depends on the number of the step."""
  return any(decay.needs_count for decay in map(_shape, decays))


def of_step(decays, steps, due, counts, every):
  """The decays of a step: a list of numbers or float64 tensors.

  Args:
    decays: What `with_origins` returns.
    steps: The number of steps of the averages before it; None if no decay
      needs it.
    due: As of `is_due`, or None.
    counts: Counts of steps: numbers or tensors. With n of them as updates, the
      decays that warm up are at most (1 + n) / (10 + n).
    every: The number of steps between two updates.
  """
  decays = list(map(_shape, decays))
  t = (_periods(steps, every) + 1
       if any(decay.needs_count for decay in decays) else None)
  now = [decay.at(t * every if decay.counts_steps else t) for decay in decays]
  for n in (_periods(n, every) for n in counts):
    now = [warmed_up(x, n) if decay.warms_up else x
           for decay, x in zip(decays, now)]
  return where_due(due, now)


def warmed_up(decay, num_updates):
  """A decay, but at most (1 + num_updates) / (10 + num_updates)."""
  n = ops.float64(num_updates)
  return tf.minimum(ops.float64(decay), (1 + n) / (10 + n))


# Averages that move in every n-th step: n is `every`. A decay of exactly 1 does
# not move an average. The native ops then neither read nor write it.


def is_due(steps, every):
  """Whether averages move in a step.

  Args:
    steps: The number of steps of the averages before it: an integer tensor.
    every: An int.

  Returns:
    A bool in eager mode, or if it is always True; else a tensor.
  """
  if every == 1:
    return True
  if tf.executing_eagerly():
    return (int(steps) + 1) % every == 0
  return tf.equal((steps + 1) % every, 0)


def _periods(n, every):
  """The number of updates in `n` steps: a tensor or number of its dtype."""
  return n if every == 1 else n // every


def where_due(due, decays):
  """The decays of a step in which averages move if `due`, as of `is_due`."""
  if due is None or due is True:
    return decays
  if due is False:
    return unmoved(decays)
  return [tf.where(due, ops.float64(decay), tf.constant(1, tf.float64))
          for decay in decays]


def unmoved(decays):
  """The decays of a step that moves no average."""
  return [1.0] * len(decays)


class Schedule(typing.NamedTuple):
  """The decays of an optimizer of tf.compat.v1, and what they depend on.

  Attributes:
    decays: What `with_origins` returns.
    num_updates: A count of updates by which they warm up, or None.
    steps: The variable that counts the steps of the averages, or None.
    every: The averages move in each step of this number of steps.
  """
  decays: list
  num_updates: Any
  steps: Optional[tf.Variable]
  every: int = 1

  @property
  def is_called(self):
    """Whether a user's function must be called after the step."""
    return _is_called(self.num_updates) or any(
        decay.is_called for decay in map(_shape, self.decays))

  def now(self, counted_by=None):
    """The decays of this step: numbers, or float64 tensors.

    Args:
      counted_by: A variable that this step will increment, or None. The decays
        count the increment.
    """
    steps = due = None
    if self.steps is not None:
      steps = _replicas.values(self.steps)[0].read_value()
      due = is_due(steps, self.every)
      # A user's function is called once in each step.
      if due is False and not self.is_called:
        return unmoved(self.decays)
    counts = []
    if self.num_updates is not None:
      n = ops.float64(value_now(self.num_updates))
      counts.append(n + 1 if self.num_updates is counted_by else n)
    return of_step(self.decays, steps, due, counts, self.every)

  def count(self, updates, accept=True):
    """Counts a step of the averages.

    Args:
      updates: The operations that update them: a list.
      accept: Whether the step is accepted: a bool, or a scalar tensor of it.

    Returns:
      The operations to run: a list.
    """
    if self.steps is None:
      return updates
    with tf.control_dependencies(updates):
      counted = [v.assign_add(tf.cast(accept, tf.int64), read_value=False)
                 for v in _replicas.values(self.steps)]
    return updates + [op for op in counted if op is not None]


def check_num_updates(num_updates):
  """Raises an error if `num_updates` is not a count of updates or None."""
  if isinstance(num_updates, np.ndarray) and num_updates.ndim == 0:
    num_updates = num_updates[()]
  if isinstance(num_updates, numbers.Real) and not isinstance(num_updates,
                                                              bool):
    if not math.isfinite(num_updates):
      raise ValueError(f"`num_updates` must be finite, got {num_updates}.")
    if num_updates < 0:
      raise ValueError(f"`num_updates` must be at least 0, got {num_updates}.")
  elif isinstance(num_updates, tf.Variable) or tf.is_tensor(num_updates):
    if not num_updates.shape.is_compatible_with([]):
      raise ValueError(
          "`num_updates` must be a scalar if it is a tensor or a variable, got "
          f"one of shape {num_updates.shape}.")
  elif not (num_updates is None or callable(num_updates)):
    raise TypeError("`num_updates` must be a number, tensor, variable or "
                    f"callable, got {num_updates!r}.")


def index_of(decay, decays):
  """The index of `decay` in an optimizer's decays; 0 for None."""
  if decay is None:
    return 0
  decay = _plain(decay)
  if decay not in decays:
    raise ValueError(f"`decay` must be one of this optimizer's, {decays}, got "
                     f"{decay}.")
  return decays.index(decay)


def value_now(x):
  """A number, tensor, variable or callable as a number or tensor."""
  if isinstance(x, tf.Variable):
    # Not a conversion: the time at which it reads a ref variable is undefined.
    return x.read_value()
  return x() if callable(x) else x


def _shape(x):
  """A decay, as `checked` returns it, as a `_decay.Shape`."""
  return x if isinstance(x, _decay.Shape) else _Given(x)


def _is_called(x):
  return callable(x) and not isinstance(x, tf.Variable)
