"""Averages of optimizers that train between z and its average x."""

import numpy as np

from wrapopt import ops
from wrapopt._averages import _companions
from wrapopt._averages import _interpolation
from wrapopt._v1._averages import _averaging
from wrapopt._v1._averages import _slots


class Points(_averaging.Averages):
  """The points z and x of an optimizer.

  The variables hold y, one more variable for each holds z, and x follows. The
  share, a number for all variables or for each, tells whether they hold y or x.
  """

  def __init__(self, opt, schedule):
    super().__init__(opt, opt._slot_name)
    self._schedule, self._state_name = schedule, opt._state_name
    self._share_slot = f"{opt._slot_name}/share"
    opt._slots[self._share_slot] = _slots.Slots()

  def make(self, variables, sparse):
    if variables:
      self._opt._create_non_slot_variable(
          np.array(self._schedule.initial_state()), self._state_name,
          variables[0])
    super().make(variables, sparse)

  def make_of_variable(self, variable, is_sparse):
    super().make_of_variable(variable, is_sparse)
    self._opt._get_or_make_slot(
        variable, ops.float64(self._schedule.momentum), self._share_slot,
        self._share_slot)
    _companions.note(variable, self.stored(variable, 0))

  def state_of(self, graph):
    """The variable that holds the state of the schedule."""
    return self.non_slot(self._state_name, graph)

  def share(self, variable):
    """The variable that holds the share of a variable."""
    return self._opt._slot(variable, self._share_slot)

  def read(self, variable, k):
    return _interpolation.Interpolated(
        variable, self.stored(variable, k),
        self.state_of(_slots.graph_of(variable)), self.share(variable))

  def _slot_of_saved(self, name):
    return name

  def _counts_of(self, graph):
    return [self.state_of(graph)]

  def _firsts(self, graph):
    return []
