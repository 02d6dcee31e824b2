"""Variables that are only a part of what an optimizer trains.

Schedule-Free learning, primal averaging and Lookahead keep a second point next
to each variable. Who moves the variable alone, leaves that behind.
"""

import weakref

from wrapopt._averages import _replicas


def note(variable, other):
  """Notes that an optimizer keeps `other`, a variable, next to a variable."""
  for v in _replicas.values(variable):
    v._wrapopt_other = weakref.ref(other)


def check(variable, who):
  """Raises an error if `who` must not move a variable alone."""
  for v in _replicas.values(variable):
    other = getattr(v, "_wrapopt_other", lambda: None)()
    if other is not None:
      raise ValueError(
          f"{who} must not share '{variable.name}' alone, which a "
          "ScheduleFree, PrimalAverage or Lookahead trains together with "
          f"'{other.name}': that would not follow the center. Use the "
          "optimizer inside, or a MovingAverage around it.")
