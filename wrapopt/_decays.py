"""The decays of moving averages, whatever the kind of optimizer."""

import collections.abc
import numbers

import numpy as np
import tensorflow as tf

from wrapopt import ops


def checked(average_decay):
  """The decays of an argument `average_decay`.

  Args:
    average_decay: A number, or a sequence or an array of different numbers; or
      one scalar tensor or variable, or a callable.

  Returns:
    A list.

  Raises:
    TypeError: If it is none of these.
    ValueError: If a number is out of range, or decays repeat.
  """
  if isinstance(average_decay, np.ndarray) and average_decay.ndim == 0:
    average_decay = average_decay[()]
  several = (isinstance(average_decay, np.ndarray) or
             isinstance(average_decay, collections.abc.Sequence) and
             not isinstance(average_decay, (str, bytes)))
  decays = list(average_decay) if several else [average_decay]
  if not decays:
    raise ValueError("`average_decay` must hold at least one decay, got none.")
  for decay in decays:
    if isinstance(decay, numbers.Real):
      if not 0 <= decay <= 1:
        raise ValueError(f"`average_decay` must be in [0, 1], got {decay}.")
    elif several:
      raise ValueError(
          "A sequence of `average_decay` must hold numbers, got "
          f"{decay!r}. A tensor, variable or callable stands alone.")
    elif isinstance(decay, tf.Variable) or tf.is_tensor(decay):
      if not decay.shape.is_compatible_with([]):
        raise ValueError(
            "`average_decay` must be a scalar where it is a tensor or a "
            f"variable, got one of shape {decay.shape}.")
    elif not callable(decay):
      raise TypeError(
          "`average_decay` must be a number, a sequence of numbers, a scalar "
          f"tensor or variable, or a callable, got {decay!r}.")
  if several and len(set(decays)) != len(decays):
    raise ValueError(f"`average_decay` must hold different decays, got "
                     f"{average_decay}.")
  return decays


def check_num_updates(num_updates):
  """Refuses what is no count of updates; None is none."""
  if isinstance(num_updates, numbers.Real):
    if num_updates < 0:
      raise ValueError(f"`num_updates` must be at least 0, got {num_updates}.")
  elif not (num_updates is None or callable(num_updates) or
            isinstance(num_updates, (np.ndarray, tf.Variable)) or
            tf.is_tensor(num_updates)):
    raise TypeError("`num_updates` must be a number, tensor, variable or "
                    f"callable, got {num_updates!r}.")


def index_of(decay, decays):
  """Which of an optimizer's decays `decay` is; None is the first."""
  if decay is None:
    return 0
  if decay not in decays:
    raise ValueError(f"`decay` must be one of this optimizer's, {decays}, got "
                     f"{decay}.")
  return decays.index(decay)


def value_now(x):
  """A number, tensor, variable or callable as a number or tensor."""
  if isinstance(x, tf.Variable):
    # Not a conversion: that of a ref variable reads whenever it likes.
    return x.read_value()
  return x() if callable(x) else x


def warmed_up(decays, num_updates):
  """Decays that are at most (1 + num_updates) / (10 + num_updates): a list."""
  n = ops.float64(num_updates)
  at_most = (1 + n) / (10 + n)
  return [tf.minimum(ops.float64(decay), at_most) for decay in decays]
