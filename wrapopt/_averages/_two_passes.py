"""A step between z and x around that of an optimizer.

Meanwhile the variables hold the optimizer's z, and the variables of z hold x.
"""

import tensorflow as tf

from wrapopt._averages import _interpolated
from wrapopt._averages import _replicas


def replicas_of(variables, z, state, schedule, decays):
  """The `Replica` of each replica, a list, from the variables of all."""
  return [Replica(*parts, schedule, decays) for parts in zip(
      zip(*map(_replicas.values, variables)), zip(*map(_replicas.values, z)),
      _replicas.values(state))]


class Replica:
  """The variables of a replica in a step.

  Args:
    variables: The variables, which hold y.
    z: The variables of their z.
    state: That of the state of the schedule.
    schedule: A schedule of _interpolated.py.
    decays: The weight decay at y of each variable.
  """

  def __init__(self, variables, z, state, schedule, decays):
    self._pairs = list(zip(variables, z))
    self._state, self._schedule, self._decays = state, schedule, decays
    self._before, self._state_before, self._motion = [], None, None

  def read(self):
    """Reads what `begin` changes; returns the state of the schedule."""
    self._before = [(v.read_value(), z.read_value()) for v, z in self._pairs]
    self._state_before = self._state.read_value()
    return self._state_before

  def begin(self, motion):
    """Puts z in place of y: an operation, or None."""
    self._motion = motion
    share = _interpolated.shared(self._state_before[_interpolated.SHARE],
                                 self._schedule.momentum)
    done = []
    for (v, z), (y, z_value), decay in zip(self._pairs, self._before,
                                           self._decays):
      x = _interpolated.x_of(y, z_value, share)
      start = _interpolated.start(y, z_value, motion, decay)
      with tf.control_dependencies(
          [] if tf.executing_eagerly() else [x, start]):
        done += [z.assign(x, read_value=False),
                 v.assign(start, read_value=False)]
    return group(done)

  def undo(self):
    """In eager mode, undoes `begin`, if it has run."""
    for (v, z), (y, z_value) in zip(self._pairs, self._before):
      v.assign(y)
      z.assign(z_value)

  def end(self):
    """Puts y in place of z, and notes the step: an operation, or None."""
    read = [(z.read_value(), v.read_value()) for v, z in self._pairs]
    done = []
    for (v, z), (x, z_value) in zip(self._pairs, read):
      y = _interpolated.y_of(x, z_value, self._motion, self._schedule.momentum)
      with tf.control_dependencies(
          [] if tf.executing_eagerly() else [y, z_value]):
        done += [v.assign(y, read_value=False),
                 z.assign(tf.identity(z_value), read_value=False)]
    done.append(self._state.assign(self._motion.state, read_value=False))
    return group(done)


def group(operations):
  """One operation for some, which may be None."""
  operations = [op for op in operations if op is not None]
  return (None if tf.executing_eagerly() or not operations
          else tf.group(*operations))
