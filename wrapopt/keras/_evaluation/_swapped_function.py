"""A model's functions that evaluate a batch, with averages in place."""

import contextlib
import itertools

from keras.src.backend.common import global_state
from keras.src.utils import python_utils

from wrapopt.keras import batch_norm
from wrapopt.keras._evaluation import _block


class SwappedFunction:
  """Replaces a model's test or predict function by one with averages in place.

  Keras calls `make_test_function` at the start of each evaluation. If an
  exception has left the replacement, this call restores the model's function.
  Several callbacks share the replacement.

  Attributes:
    in_place: A function without arguments that returns a context manager.
    others: `OtherEvaluation`s, which evaluate the same batches.
  """

  def __init__(self, model, kind, in_place):
    self._model, self.in_place, self.others = model, in_place, []
    self._name, self._make_name = f"{kind}_function", f"make_{kind}_function"

  def _replacement(self):
    """The `_Replacement` in the model, or None."""
    return getattr(getattr(self._model, self._name), "replacement", None)

  def put(self):
    """Replaces the function, unless it is already replaced."""
    replacement = self._replacement()
    if replacement is None:
      replacement = _Replacement(self._model,
                                 getattr(self._model, self._name))

      def other(data):
        return replacement(data)

      def make(force=False):
        self._restore()
        getattr(self._model, self._make_name)(force)

      other.replacement = replacement
      setattr(self._model, self._name, other)
      setattr(self._model, self._make_name, make)
    if self not in replacement.members:
      replacement.members.append(self)

  def swap_out(self):
    """Restores the model's function, if it is replaced."""
    replacement = self._replacement()
    if replacement is not None and self in replacement.members:
      replacement.members.remove(self)
    if replacement is None or not replacement.members:
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
    members: The `SwappedFunction`s.
  """

  def __init__(self, model, own):
    self._model, self.own, self.members = model, own, []

  def __call__(self, data):
    others = [(m, other) for m in self.members for other in m.others]
    if not others:
      return self._call(data)
    # Drawn again, the batches may be others.
    batches = list(itertools.islice(data, self._model.steps_per_execution))
    if not batches:
      raise StopIteration
    logs = self._call(iter(batches))
    for member, other in others:
      other.logs = self._call(iter(batches), {member: other})
    return logs

  def _call(self, data, instead=()):
    """Calls the function, with another's averages `instead` of a member's."""
    with contextlib.ExitStack() as stack:
      for member in self.members:
        stack.enter_context(dict(instead).get(member, member).in_place())
      return self.own(data)


class OtherEvaluation:
  """An evaluation of the batches of another one.

  Metrics, seeds and other variables that no optimizer trains have values of
  their own in it.

  Attributes:
    logs: Those of the last batches.
  """

  def __init__(self, model, averages):
    """Prepares it, before the first batch of the other one.

    Args:
      model: The model.
      averages: A function without arguments that returns a context manager.
    """
    self._model, self._averages, self.logs = model, averages, None
    found = _state_of(model)
    self._known = found.keys()
    self._state = [_block.OtherValues(found.values())]

  @contextlib.contextmanager
  def in_place(self):
    """Puts its averages and its state in place for a `with` block."""
    with self._state_in_place(), self._averages():
      yield

  @contextlib.contextmanager
  def _state_in_place(self):
    is_first = len(self._state) == 1
    if is_first:
      # The first batch of the other one has made these metrics.
      _check_metrics(self._model)
      self._state.append(_block.OtherValues(
          [v for key, v in _state_of(self._model).items()
           if key not in self._known]))
    with contextlib.ExitStack() as stack:
      for state in self._state:
        stack.enter_context(state.swapped_in())
      if is_first:
        self._model.reset_metrics()
      yield

  def result(self):
    """The logs of the evaluation, a dict, as Keras makes them."""
    with self._state_in_place():
      return python_utils.pythonify_logs(
          self._model._get_metrics_result_or_logs(self.logs))


def _state_of(model):
  """Variables that an evaluation may change: {id: variable}."""
  layers = model._flatten_layers()
  metrics = [*model.metrics, *(m for x in layers for m in x._metrics)]
  found = [*model.non_trainable_variables,
           *(v for m in metrics for v in m.variables)]
  # Keras 3.12 has no constant for this name.
  seeds = global_state.get_global_attribute("global_seed_generator")
  if seeds is not None:
    found.append(seeds.state)
  # Frozen weights, too, may have averages in their place.
  weights = {id(v) for x in layers for v in x._trainable_variables}
  weights |= set(map(id, batch_norm.statistics(model)))
  return {id(v): v for v in found if id(v) not in weights}


def _check_metrics(model):
  # Those of `compile` are in a metric, which is built when it is used.
  for m in (x for m in model.metrics for x in getattr(m, "metrics", [m])):
    if not m.variables:
      raise ValueError(
          "Metrics must keep their state in variables if `decay` is \"all\", "
          f"got '{m.name}', a {type(m).__qualname__} that has none. Make them "
          "by add_variable(), or pass one decay.")
