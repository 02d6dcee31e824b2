"""A model's functions that evaluate a batch, with averages in place."""

import contextlib


class SwappedFunction:
  """Replaces a model's test or predict function by one with averages in place.

  Keras calls `make_test_function` at the start of each evaluation. If an
  exception has left the replacement, this call restores the model's function.
  Several callbacks share the replacement.
  """

  def __init__(self, model, kind, in_place):
    self._model, self._in_place = model, in_place
    self._name, self._make_name = f"{kind}_function", f"make_{kind}_function"

  def _replacement(self):
    """The `_Replacement` in the model, or None."""
    return getattr(getattr(self._model, self._name), "replacement", None)

  def put(self):
    """Replaces the function, unless it is already replaced."""
    replacement = self._replacement()
    if replacement is None:
      replacement = _Replacement(getattr(self._model, self._name))

      def other(data):
        return replacement(data)

      def make(force=False):
        self._restore()
        getattr(self._model, self._make_name)(force)

      other.replacement = replacement
      setattr(self._model, self._name, other)
      setattr(self._model, self._make_name, make)
    if self._in_place not in replacement.in_place:
      replacement.in_place.append(self._in_place)

  def swap_out(self):
    """Restores the model's function, if it is replaced."""
    replacement = self._replacement()
    if replacement is not None and self._in_place in replacement.in_place:
      replacement.in_place.remove(self._in_place)
    if replacement is None or not replacement.in_place:
      self._restore()

  def _restore(self):
    replacement = self._replacement()
    if replacement is not None:
      setattr(self._model, self._name, replacement.own)
    if self._make_name in vars(self._model):
      delattr(self._model, self._make_name)


class _Replacement:
  """A function of a model, called with averages in place.

  Attributes:
    own: The model's function.
    in_place: Functions without arguments that return context managers.
  """

  def __init__(self, own):
    self.own, self.in_place = own, []

  def __call__(self, data):
    with contextlib.ExitStack() as stack:
      for in_place in self.in_place:
        stack.enter_context(in_place())
      return self.own(data)
