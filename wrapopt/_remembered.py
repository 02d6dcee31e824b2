"""What is remembered of a list of variables from one step to the next."""

import weakref

# Lists of one optimizer that are remembered at a time.
_MOST = 16


class Facts(dict):
  """What is known of one list, by name. It must not hold the variables."""


class Memory:
  """Facts about lists of variables, by the identity of the variables.

  A list is forgotten with the first of its variables that is deleted: another
  variable may get its place in memory.
  """

  def __init__(self):
    self._facts = {}  # By the ids of a list.
    self._refs = {}

  def __reduce__(self):
    # A copy finds out itself.
    return Memory, ()

  def of(self, variables):
    """The Facts of these variables in this order; at first there are none."""
    key = tuple(map(id, variables))
    facts = self._facts.get(key)
    return self._begin(key, variables) if facts is None else facts

  def _begin(self, key, variables):
    for oldest in list(self._facts)[:1 - _MOST]:
      self._forget(oldest)
    memory = weakref.ref(self)

    def gone(_):
      if (self := memory()) is not None:
        self._forget(key)

    self._refs[key] = [weakref.ref(v, gone) for v in variables]
    facts = self._facts[key] = Facts()
    return facts

  def _forget(self, key):
    # Another thread may have been here.
    self._facts.pop(key, None)
    self._refs.pop(key, None)
