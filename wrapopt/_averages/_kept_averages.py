"""The averages that an optimizer keeps: one for each variable and decay.

The optimizers of tf.compat.v1 store them in slots, those of Keras in variables
of Keras. Which there are and how they are read is the same.
"""

import typing

from wrapopt._averages import _bias_correction
from wrapopt._averages import _decays


class KeptAverages:
  """The averages of an optimizer. A subclass stores them.

  Attributes:
    public: The decays that users know: a list.
    decays: These, and those of other variables that a BEMA needs.
    moving: The places in `decays` of those that steps move.
  """

  def __init__(self, decays, start_step=0, update_every=1, steps_now=None):
    """Makes no average yet.

    Args:
      decays: The result of `_decays.checked`, or [None].
      start_step: The number of steps before the averages move.
      update_every: The number of steps between two updates of the averages.
      steps_now: A function of a group, see `group_of`, that returns the number
        of steps of its averages now: an int64 tensor. A BEMA needs it.
    """
    self.public, self.decays = decays, _decays.with_origins(decays)
    self.moving = _decays.moving(self.decays, at_once=not start_step)
    _decays.check_update_every(decays, update_every)
    self.steps_now = steps_now

  def stored(self, variable, k):
    """The average of decay number `k` that is stored, or None."""
    raise NotImplementedError

  def is_corrected(self, variable, k):
    """Whether that average follows from several variables."""
    del variable
    return _decays.is_derived(self.decays[k])

  def group_of(self, variable):
    """What has one count of steps of averages: a key."""
    raise NotImplementedError

  def value_of(self, variable):
    """The tf.Variable of a variable or of what is stored."""
    return variable

  def index_of(self, decay):
    """The number of a decay; 0 for None."""
    return _decays.index_of(decay, self.public)

  def moving_of(self, rows):
    """Selects the entries of averages that steps move, from a list."""
    return [rows[k] for k in self.moving]

  def read(self, variable, k):
    """The average of decay number `k`: a variable, a Derived or None."""
    found = self.stored(variable, k)
    if found is None or not self.is_corrected(variable, k):
      return found
    origin = self.stored(
        variable, _decays.place_of_origin(self.decays[k], self.decays))
    return _bias_correction.BiasCorrected(
        *map(self.value_of, (variable, found, origin)), self.decays[k],
        _StepsNow(self, self.group_of(variable)))

  def pairs(self, variables, k):
    """The (variable, average) pairs of those that are averaged: a list."""
    return [(v, s) for v in variables
            if (s := self.read(v, k)) is not None]

  def corrected(self, variables, but=None):
    """The averages of all decays but one that are corrected: a list."""
    return [s for k in range(len(self.public)) if k != but
            for v in variables if self.is_corrected(v, k)
            for s in [self.read(v, k)] if s is not None]


class _StepsNow(typing.NamedTuple):
  """A function of the number of steps, equal for averages of one group."""
  kept: KeptAverages
  group: typing.Any

  def __call__(self):
    return self.kept.steps_now(self.group)
