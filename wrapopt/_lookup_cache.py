"""A cache of facts about a list of variables, for eager steps.

Each eager step looks up the same facts about the same hundreds of variables.
The cache finds them by the identity of the variables in the list.
"""

import weakref

# The number of lists that a cache holds.
_MOST = 16


class LookupCache:
  """Facts about lists of variables.

  If a variable is deleted, its lists are dropped, because another variable may
  get the same `id`. The facts must not hold the variables.
  """

  def __init__(self):
    self._facts = {}  # By the ids of a list.
    self._refs = {}

  def __reduce__(self):
    # A copy starts empty.
    return LookupCache, ()

  def get(self, variables):
    """The dict that `begin` returned for this list of variables, or None."""
    return self._facts.get(tuple(map(id, variables)))

  def begin(self, variables):
    """Adds and returns a new dict for facts about these variables."""
    for oldest in list(self._facts)[:1 - _MOST]:
      self._forget(oldest)
    key, cache = tuple(map(id, variables)), weakref.ref(self)

    def deleted(_):
      if (self := cache()) is not None:
        self._forget(key)

    self._refs[key] = [weakref.ref(v, deleted) for v in variables]
    facts = self._facts[key] = {}
    return facts

  def _forget(self, key):
    # Another thread may have deleted it.
    self._facts.pop(key, None)
    self._refs.pop(key, None)
