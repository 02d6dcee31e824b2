"""Training between an iterate z and its average x, for all optimizers.

Schedule-Free learning and generalized primal averaging are this with other
weights of the new z in x. The symbols are those of cc/rules/schedule_free.h.
"""

import collections
import typing

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from wrapopt import _bundle
from wrapopt import _checks
from wrapopt import ops
from wrapopt._averages import _absence
from wrapopt._averages import _derivation
from wrapopt._averages import _replicas
from wrapopt._averages import _swap

# The place in the state of a schedule, a vector of float64, that holds the
# share of x in what all variables hold now (`momentum`, or 1 where they hold x
# itself), or EACH_ITS_OWN. Only then, the share of each variable counts.
SHARE = -1
EACH_ITS_OWN = 0.0

# {rule of an optimizer: its rule between z and x, if it keeps its first
# moment}, of both halves.
_RULES = {
    "Adam": "PrimalAverageAdam",
    **dict.fromkeys(("Adagrad", "KerasAdagrad"), "ScheduleFreeAdagrad"),
    **dict.fromkeys(("RMSProp", "KerasRMSProp"), "ScheduleFreeRMSProp"),
    **dict.fromkeys(("GradientDescent", "KerasSGD"), "ScheduleFreeSGD")}


def rule_between(rule, schedule):
  """The rule of a step between z and x: its name, or None.

  Args:
    rule: The name of the optimizer's own rule.
    schedule: A schedule.
  """
  name = _RULES.get(rule)
  return ("ScheduleFreeAdam" if name == "PrimalAverageAdam" and
          schedule.replaces_momentum else name)


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
#   motion(state, learning_rate, share)
#                       the Motion of the next step, from the state before it,
#                       a number, tensor or variable, and the result of `settle`


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

  def motion(self, state, learning_rate, share):
    maths, (steps, weights, largest, before), rate = _numbers(
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
      return _motion(maths, rate, c, before, self.momentum,
                     [steps + 1, weights, largest, share])


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

  def motion(self, state, learning_rate, share):
    maths, (steps, before), rate = _numbers(state, learning_rate)
    return _motion(maths, rate, 1 - self.average_decay, before, self.momentum,
                   [steps + 1, share])


def _numbers(state, learning_rate):
  """(module of functions, the numbers of a state, learning rate)."""
  rate = ops.float64(tf.convert_to_tensor(learning_rate))
  # In eager mode, numbers of NumPy take a tenth of the time of tensors.
  if tf.executing_eagerly():
    return np, state.numpy(), np.float64(rate)
  return tf, tf.unstack(state), rate


def _motion(maths, rate, c, before, momentum, state):
  of_x = momentum * (1 - c)
  return Motion(rate, c, 1 - of_x / shared(before, momentum), 1 - of_x,
                maths.stack(state))


def shared(share, own):
  """The share of a variable, from that in the state and its own."""
  if not tf.is_tensor(share):
    return np.where(share == EACH_ITS_OWN, own, share)
  return tf.where(_is(share, EACH_ITS_OWN), ops.float64(own), share)


def _is(share, number):
  """Whether a share is a number: a bool or a tensor."""
  # Tensors of TensorFlow 1 have no ==.
  return (tf.equal(share, ops.float64(number)) if tf.is_tensor(share) else
          share == number)


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
  """A state whose variables hold x: arrays."""
  state = np.array(state)
  state[SHARE] = 1
  return state


def with_share(state, share):
  """A state with another share: a tensor."""
  return tf.concat([state[:SHARE], tf.fill([1], ops.float64(share))], 0)


class Trained(typing.NamedTuple):
  """A variable of a step, its z, and the variable of its own share."""
  variable: typing.Any
  z: typing.Any
  share: typing.Any


def settle(state, momentum, trained, others, is_all, cond=tf.cond):
  """Lets the variables of a step hold one share of x, before the step.

  After the state was set to a share other than `momentum`, as at the end of
  `fit`, a step changes that of its own variables alone: all others hold what
  they held, and from then on, each variable has its own share.

  In the usual step, all have the share `momentum`, and this reads nothing but
  the state.

  Args:
    state: The value of the state before the step.
    momentum: The momentum of the schedule.
    trained: A function that returns the Trained of the step.
    others: A function that returns the shares of other variables.
    is_all: Whether these are all others that will ever be.
    cond: As `tf.cond`.

  Returns:
    The share for the state after the step: a number or a tensor. What depends
    on it runs after the variables are settled.
  """
  before = (state.numpy() if tf.executing_eagerly() else state)[SHARE]

  each = lambda: tf.convert_to_tensor(_is(before, EACH_ITS_OWN))

  def read():
    return tf.stack([t.share.read_value() for t in trained()])

  def look():
    own = read()
    is_apart = tf.reduce_any(tf.not_equal(own, ops.float64(momentum)))
    return cond(tf.logical_or(is_apart, tf.logical_not(each())),
                lambda: settled(own), lambda: ops.float64(EACH_ITS_OWN))

  def settled(own):
    done = []

    def assign(after, values):
      # What was read of a ref variable changes with it.
      with tf.control_dependencies([] if tf.executing_eagerly() else after):
        done.extend([v.assign(x, read_value=False) for v, x in values])

    goal, left = ops.float64(momentum), others()
    # Else, the state says all: in XLA, each assignment is an output.
    notes = left or not is_all
    is_apart = tf.logical_and(each(), tf.not_equal(own, goal))
    for (v, z, share), moves, by in zip(
        trained(), tf.unstack(is_apart), tf.unstack(1 - momentum / own)):
      y = v.read_value()
      value = tf.where(moves, _towards(y, z.read_value(), by), y)
      assign([own, value], [(v, value), *[(share, goal)] * bool(notes)])
    are_one = tf.constant(True)
    if left:
      now = tf.convert_to_tensor(shared(
          before, tf.stack([share.read_value() for share in left])))
      assign([now], zip(left, tf.unstack(now)))
      are_one = tf.reduce_all(tf.equal(now, goal))
    if not is_all:
      are_one = tf.logical_and(are_one, tf.logical_not(each()))
    with tf.control_dependencies([op for op in done if op is not None and
                                  not tf.executing_eagerly()]):
      return tf.where(are_one, goal, ops.float64(EACH_ITS_OWN))

  if tf.executing_eagerly():
    return look().numpy() if before != momentum else momentum
  if control_flow_util.GraphOrParentsInXlaContext(
      tf.compat.v1.get_default_graph()):
    # It has all variables as arguments anyway, and fuses this into the step.
    # As in the op of the step, an average in place is a FailedPrecondition.
    with tf.control_dependencies(_swap.check([t.z for t in trained()])):
      return settled(read())
  moved, left = trained(), others()
  bundles = [None]
  if _bundle.allowed() and tf.inside_function():
    handles = collections.defaultdict(list)
    for t in moved:
      handles[t.variable.device].append(t.variable.handle)
    bundles = [_bundle.make(row, device) for device, row in handles.items()]
  if any(bundle is None for bundle in bundles):
    return cond(_is(before, momentum), lambda: ops.float64(momentum), look)

  # A branch captures each variable that it names, which costs time in every
  # call. So this one, which is seldom taken, calls Python.
  def called():
    for bundle in bundles:  # They tell TensorFlow what the branch changes.
      tf.identity(bundle)
    return tf.ensure_shape(tf.py_function(
        lambda state: np.float64(settle(
            state, momentum, lambda: moved, lambda: left, is_all)),
        [state], tf.float64), [])

  return cond(_is(before, momentum), lambda: ops.float64(momentum), called)


def x_of(y, z, share):
  """x, if `y` has the share `share` of x and the rest of z: a tensor."""
  return _towards(y, z, 1 - 1 / share)


def _towards(y, z, by):
  """`y`, moved by a part `by` of the way to `z`: a tensor."""
  dtype = _derivation.computed_in(y.dtype)
  like, y = y.dtype, tf.cast(y, dtype)
  return tf.cast(y + tf.cast(by, dtype) * (tf.cast(z, dtype) - y), like)


def start(y, z, motion, weight_decay_at_y):
  """Where the inner optimizer's step starts: a tensor."""
  if not weight_decay_at_y:
    return tf.identity(z)
  dtype = _derivation.computed_in(y.dtype)
  by = tf.cast(motion.rate * weight_decay_at_y, dtype)
  return tf.cast(tf.cast(z, dtype) - by * tf.cast(y, dtype), z.dtype)


def y_of(x, z, motion, momentum):
  """y after a step to `z`, from x before it: a tensor."""
  dtype = _derivation.computed_in(x.dtype)
  like, x, z = x.dtype, tf.cast(x, dtype), tf.cast(z, dtype)
  x = x + tf.cast(ops.float64(motion.c), dtype) * (z - x)
  return tf.cast(x + (1 - momentum) * (z - x), like)


class Points(typing.NamedTuple):
  """z, the state and the schedule, for a step of tf.compat.v1.

  Attributes:
    z: The variables that hold the z of the step's variables. In eager mode the
      same list in each step, by which facts are found.
    state: The variable that holds the state of the schedule.
    schedule: The schedule.
    settle: A function of the value of the state that calls the function of this
      name.
  """
  z: list
  state: tf.Variable
  schedule: typing.Any
  settle: typing.Callable


class Interpolated(_derivation.Derived):
  """x, which follows from y and z: `rows` holds z."""

  def __init__(self, variable, z, state, share):
    """Makes the average of a variable.

    Args:
      variable: The variable, which holds y.
      z: The variable that holds z.
      state: The variable that holds the state of the schedule.
      share: The variable that holds the variable's own share.
    """
    super().__init__(variable, z, [z, state])
    self.share = share

  def read_value(self, at_once=None):
    del at_once
    _absence.check(self.rows)
    z, state = self.saved
    return x_of(self.variable.read_value(), z.read_value(),
                shared(state.read_value()[SHARE], self.share.read_value()))

  def of_replicas(self):
    return [Interpolated(*parts) for parts in zip(*map(
        _replicas.values, (self.variable, *self.saved, self.share)))]
