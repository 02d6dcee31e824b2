"""Training between an iterate z and its average x, for all optimizers.

Schedule-Free learning and generalized primal averaging are this with other
weights of the new z in x. The symbols are those of cc/rules/schedule_free.h.
"""

import typing

import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt import ops
from wrapopt._averages import _derived
from wrapopt._averages import _in_place
from wrapopt._averages import _partial
from wrapopt._averages import _replicas

# The place in the state of a schedule, a vector of float64, that holds the
# share of x in what the variables hold now (`momentum`, or 1 where they hold x
# itself).
SHARE = -1


class Motion(typing.NamedTuple):
  """The numbers of one step.

  Attributes:
    rate: The learning rate, with warm-up.
    c: The weight of the new z in x.
    pull: See cc/rules/schedule_free.h.
    push: See there.
    state: The state of the schedule after the step.
  """
  rate: typing.Any
  c: typing.Any
  pull: typing.Any
  push: typing.Any
  state: typing.Any


# A schedule is the arguments of an optimizer, checked. All have
#
#   momentum            the weight of x in y: beta
#   weight_decay_at_y   the part of y, times the rate, that a step takes from z
#   replaces_momentum   whether the inner optimizer's own first moment is 0
#   initial_state()     the state before the first step: a list
#   motion(state, learning_rate)
#                       the Motion of the next step, from the state before it
#                       and a number, tensor or variable


class ScheduleFree(typing.NamedTuple):
  """The schedule of Schedule-Free learning: x is the mean of all z.

  Its state is the number of steps, the sum of their weights, the largest
  learning rate, and the share.

  Attributes:
    warmup_steps: The number of steps in which the learning rate rises.
    weight_lr_power: The power of the largest learning rate in a step's weight.
    r: The power of the number of the step in its weight.
  """
  momentum: float
  warmup_steps: int
  weight_lr_power: float
  r: float
  weight_decay_at_y: float

  @property
  def replaces_momentum(self):
    return True

  def initial_state(self):
    return [0.0, 0.0, 0.0, self.momentum]

  def motion(self, state, learning_rate):
    maths, (steps, weights, largest, share), rate = _numbers(
        state, learning_rate)
    # An infinity or an overflow gives the same numbers as in tensors.
    with np.errstate(all="ignore"):
      if self.warmup_steps:
        rate = rate * maths.minimum((steps + 1) / self.warmup_steps, 1.0)
      largest = maths.maximum(largest, rate)
      weight = (steps + 1)**self.r * largest**self.weight_lr_power
      weights = weights + weight
      # 0 while all rates are 0.
      c = weight / maths.maximum(weights, np.finfo(np.float64).tiny)
      return _motion(maths, rate, c, share, self.momentum,
                     [steps + 1, weights, largest])


class PrimalAverage(typing.NamedTuple):
  """The schedule of primal averaging: x is a moving average of z.

  Its state is the number of steps and the share.

  Attributes:
    average_decay: The weight of the old x in the new one.
  """
  momentum: float
  average_decay: float

  @property
  def replaces_momentum(self):
    return False

  @property
  def weight_decay_at_y(self):
    return 0.0

  def initial_state(self):
    return [0.0, self.momentum]

  def motion(self, state, learning_rate):
    maths, (steps, share), rate = _numbers(state, learning_rate)
    return _motion(maths, rate, 1 - self.average_decay, share, self.momentum,
                   [steps + 1])


def _numbers(state, learning_rate):
  """(module of functions, the numbers of a state, learning rate)."""
  rate = ops.float64(tf.convert_to_tensor(learning_rate))
  # In eager mode, numbers of NumPy take a tenth of the time of tensors.
  if tf.executing_eagerly():
    return np, state.numpy(), np.float64(rate)
  return tf, tf.unstack(state), rate


def _motion(maths, rate, c, share, momentum, counts):
  of_x = momentum * (1 - c)
  return Motion(rate, c, 1 - of_x / share, 1 - of_x,
                maths.stack([*counts, momentum]))


# These raise a TypeError if an argument has a wrong type, and a ValueError if
# it is out of range. A momentum of 0 would leave nothing of x in the variables.


def schedule_free(momentum, warmup_steps, weight_lr_power, r,
                  weight_decay_at_y):
  """The `ScheduleFree` of these arguments."""
  return ScheduleFree(
      _checks.number("momentum", momentum, most=1),
      _checks.integer("warmup_steps", warmup_steps, 0),
      _checks.number("weight_lr_power", weight_lr_power, 0),
      _checks.number("r", r, 0),
      _checks.number("weight_decay_at_y", weight_decay_at_y, 0))


def primal_average(momentum, average_decay):
  """The `PrimalAverage` of these arguments."""
  return PrimalAverage(
      _checks.number("momentum", momentum, most=1),
      _checks.number("average_decay", average_decay, 0, most=1))


def holding_x(state):
  """A state whose variables hold x: an array, or a tensor of a graph."""
  if tf.is_tensor(state) and not tf.executing_eagerly():
    return tf.concat([state[:SHARE], tf.ones([1], state.dtype)], 0)
  state = np.array(state)
  state[SHARE] = 1
  return state


def x_of(y, z, share):
  """x, if `y` has the share `share` of x and the rest of z: a tensor."""
  dtype = _derived.computed_in(y.dtype)
  apart = tf.cast(1 - 1 / share, dtype)
  y, like = tf.cast(y, dtype), y.dtype
  return tf.cast(y + apart * (tf.cast(z, dtype) - y), like)


def start(y, z, motion, weight_decay_at_y):
  """Where the inner optimizer's step starts: a tensor."""
  if not weight_decay_at_y:
    return tf.identity(z)
  dtype = _derived.computed_in(y.dtype)
  by = tf.cast(motion.rate * weight_decay_at_y, dtype)
  return tf.cast(tf.cast(z, dtype) - by * tf.cast(y, dtype), z.dtype)


def y_of(x, z, motion, momentum):
  """y after a step to `z`, from x before it: a tensor."""
  dtype = _derived.computed_in(x.dtype)
  like, x, z = x.dtype, tf.cast(x, dtype), tf.cast(z, dtype)
  x = x + tf.cast(motion.c, dtype) * (z - x)
  return tf.cast(x + (1 - momentum) * (z - x), like)


class Points(typing.NamedTuple):
  """z, the state and the schedule, for a step of tf.compat.v1.

  Attributes:
    z: The variables that hold the z of the step's variables. In eager mode the
      same list in each step, by which facts are found.
    state: The variable that holds the state of the schedule.
    schedule: The schedule.
  """
  z: list
  state: tf.Variable
  schedule: typing.Any


class Interpolated(_derived.Derived):
  """x, which follows from y and z: `rows` holds z."""

  def __init__(self, variable, z, state):
    """Makes the average of a variable.

    Args:
      variable: The variable, which holds y.
      z: The variable that holds z.
      state: The variable that holds the state of the schedule.
    """
    super().__init__(variable, z, [z, state])
    _partial.note(variable, z)

  def read_value(self):
    _in_place.check(self.rows)
    z, state = self.saved
    return x_of(self.variable.read_value(), z.read_value(),
                state.read_value()[SHARE])

  def of_replicas(self):
    return [Interpolated(*parts) for parts in zip(*map(
        _replicas.values, (self.variable, *self.saved)))]
