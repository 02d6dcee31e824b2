"""What is remembered of a list of variables from one eager step to the next.

A step asks the same of the same hundreds of variables as the one before. So it
asks once, and knows the list again by the identity of its variables.
"""

import weakref

# Lists of one optimizer that are remembered at a time.
_MOST = 16


class Memory:
  """What is known of lists of variables.

  A list is forgotten with the first of its variables that is deleted, for
  another may get that one's place in memory. What is remembered must not hold
  the variables.
  """

  def __init__(self):
    self._facts = {}  # By the ids of a list.
    self._refs = {}

  def __reduce__(self):
    # A copy finds out itself.
    return Memory, ()

  def get(self, variables):
    """The dict that `begin` gave for these, in this order, or None."""
    return self._facts.get(tuple(map(id, variables)))

  def begin(self, variables):
    """A new dict, for what is to be remembered of these variables."""
    for oldest in list(self._facts)[:1 - _MOST]:
      self._forget(oldest)
    key, memory = tuple(map(id, variables)), weakref.ref(self)

    def gone(_):
      if (self := memory()) is not None:
        self._forget(key)

    self._refs[key] = [weakref.ref(v, gone) for v in variables]
    facts = self._facts[key] = {}
    return facts

  def _forget(self, key):
    # Another thread may have been here.
    self._facts.pop(key, None)
    self._refs.pop(key, None)
