"""Caches what an eager step looks up about its variables, for the next step.

A step asks the same questions about the same hundreds of variables as the one
before it. The cache knows a list of variables by the identity of its elements.
"""

import functools
import weakref

# Lists of one optimizer that are cached at a time.
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
  """A dict for each list of variables.

  A list is forgotten when one of its variables is deleted, because another
  variable may get the same id. Values in the cache must not hold the variables.
  """

  def __init__(self):
    self._facts = {}  # By the ids of a list.
    self._refs = {}

  def __reduce__(self):
    # A copy of the optimizer looks up again.
    return LookupCache, ()

  def get(self, variables):
    """The dict that `begin` returned for these, in this order, or None."""
    return self._facts.get(_key(variables))

  def begin(self, variables):
    """A new dict for these variables."""
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
