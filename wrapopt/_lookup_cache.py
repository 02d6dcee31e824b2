"""A cache of facts about a list of variables, for eager steps.

Each eager step looks up the same facts about the same hundreds of variables.
The cache finds them by the identity of the variables in the list.
"""

import functools
import weakref

# The number of lists that a cache holds.
_MOST = 16


class Pairs(list):
  """[(gradient, variable)] of a step, which nobody changes."""

  @functools.cached_property
  def trained(self):
    """The gradients that are not None, and their variables: two sequences."""
    pairs = [pair for pair in self if pair[0] is not None]
    return ([g for g, _ in pairs], Variables(v for _, v in pairs))


class Variables(tuple):
  """Variables, with the key of their list in a `LookupCache`."""

  @functools.cached_property
  def key(self):
    return tuple(map(id, self))


def trained(grads_and_vars):
  """`Pairs.trained` of any list."""
  return (grads_and_vars if isinstance(grads_and_vars, Pairs)
          else Pairs(grads_and_vars)).trained


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
    return self._facts.get(_key(variables))

  def add(self, variables):
    """Adds and returns a new dict for facts about these variables."""
    for oldest in list(self._facts)[:1 - _MOST]:
      self._forget(oldest)
    key, cache = _key(variables), weakref.ref(self)

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


def _key(variables):
  return (variables if isinstance(variables, Variables)
          else Variables(variables)).key
