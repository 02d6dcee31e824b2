"""A step between z and x around that of an optimizer.

Meanwhile the variables hold the optimizer's z, and the variables of z hold x.
"""

from wrapopt._averages import _interpolation
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
    schedule: A schedule of _interpolation.py.
    decays: The weight decay at y of each variable.
  """

  def __init__(self, variables, z, state, schedule, decays):
    self._pairs = list(zip(variables, z))
    self._state, self._schedule, self._decays = state, schedule, decays
    self._before, self._state_before, self._motion = [], None, None

  def read(self):
    """Reads what `begin` changes."""
    self._before = [(v.read_value(), z.read_value()) for v, z in self._pairs]
    self._state_before = self._state.read_value()

  def begin(self, motion):
    """Puts z in place of y."""
    self._motion = motion
    share = _interpolation.shared(self._state_before[_interpolation.SHARE],
                                 self._schedule.momentum)
    for (v, z), (y, z_value), decay in zip(self._pairs, self._before,
                                           self._decays):
      z.assign(_interpolation.x_of(y, z_value, share))
      v.assign(_interpolation.start(y, z_value, motion, decay))

  def undo(self):
    """In eager mode, undoes `begin`, if it has run."""
    for (v, z), (y, z_value) in zip(self._pairs, self._before):
      v.assign(y)
      z.assign(z_value)

  def end(self):
    """Puts y in place of z, and notes the step."""
    for v, z in self._pairs:
      x, z_value = z.read_value(), v.read_value()
      v.assign(_interpolation.y_of(x, z_value, self._motion,
                                  self._schedule.momentum))
      z.assign(z_value)
    self._state.assign(self._motion.state)
