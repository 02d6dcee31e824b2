"""Variables that are only a part of what an optimizer trains.

Schedule-Free learning, primal averaging and Lookahead keep a second point next
to each variable. Code that moves only the variable leaves this point behind.
"""

import weakref

from wrapopt._averages import _replicas


def note(variable, other):
  """Notes that an optimizer keeps `other`, a variable, next to a variable."""
  for v in _replicas.values(variable):
    v._wrapopt_other = weakref.ref(other)


def check(variables, who):
  """Raises an error if `who` must not move the variables alone."""
  for v in sum(map(_replicas.values, variables), []):
    other = getattr(v, "_wrapopt_other", lambda: None)()
    if other is not None:
      raise ValueError(
          f"{who} must not share '{v.name}' alone, which a "
          "ScheduleFree, PrimalAverage or Lookahead trains together with "
          f"'{other.name}': that would not follow the center. Use the "
          "optimizer inside, or a MovingAverage around it.")
