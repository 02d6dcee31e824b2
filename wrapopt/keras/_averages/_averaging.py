"""The averages of a wrapper that replace its weights in an evaluation."""

import contextlib
import threading
import warnings

import keras
import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt._averages import _absence
from wrapopt._averages import _kept_averages
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt.keras._averages import _assignments
from wrapopt.keras._averages import _choice
from wrapopt.keras._averages import _store
from wrapopt.keras._evaluation import _detachment
from wrapopt.keras._steps import _step
from wrapopt.keras._steps import _views
from wrapopt.keras._variables import path_of, value_of


# Held while averages are put in place of their variables, or back.
_swapping = threading.RLock()


class Averages(_kept_averages.KeptAverages):
  """Averages in a `_store.Store`. Keras does not track this object.

  Attributes:
    follows_variables: Whether an average follows from the variable itself.
  """

  def __init__(self, optimizer, keep_raw_weights, variables=None,
               decays=(None,), **kwargs):
    """Makes no average yet.

    Args:
      optimizer: The wrapper.
      keep_raw_weights: Its argument.
      variables: Its argument.
      decays: The result of `_decays.checked`; None for a wrapper without.
      **kwargs: Further arguments of `_kept_averages.KeptAverages`.
    """
    super().__init__(list(decays), **kwargs)
    self._optimizer, self._store = optimizer, optimizer._store
    self._chosen = _choice.checked(variables)
    self._detachment_check = _detachment.DetachmentCheck()
    self.follows_variables = self.decays != self.public
    optimizer.keeps_raw_weights = _checks.boolean("keep_raw_weights",
                                                  keep_raw_weights)
    for x in _views.within(optimizer):
      self._check_inside(x, of(x))

  def _check_inside(self, x, its):
    """Raises an error for an optimizer inside.

    Args:
      x: The optimizer.
      its: Its Averages, or None.
    """
    outer, name = type(self._optimizer).__name__, type(x).__qualname__
    if its is not None and its.follows_variables:
      raise ValueError(
          f"`optimizer` of a {outer} must not be or hold a "
          f"{type(x).__name__} with a BEMA, which follows from the weights "
          "that this one replaces. Use one of the two.")
    if self.follows_variables and (x.use_ema or its is not None):
      raise ValueError(
          "`optimizer` of a MovingAverage with a BEMA must not be or hold an "
          "optimizer that puts averages in the weights, from which the BEMA "
          f"follows, got {name}. Use one of the two.")
    is_wrapper = _step.is_wrapper(x)
    if self._optimizer.keeps_raw_weights and (
        its is not None and not x.keeps_raw_weights if is_wrapper
        else x.use_ema):
      raise ValueError(
          f"`optimizer` of a {outer} with keep_raw_weights=True must not be or "
          "hold an optimizer that puts its averages in the weights at the end "
          f"of fit(), got {name}. Pass " + (
              "keep_raw_weights=True" if is_wrapper else "use_ema=False") +
          " to it.")

  def _key(self, variable):
    return self._optimizer._var_key(variable)

  # Which they are

  def check_variables(self, variables):
    """Raises an error for variables that cannot be averaged."""
    self.candidates(variables)

  def candidates(self, variables):
    """{index: variable} of the variables that are averaged.

    The index is that among the variables that can be averaged.
    """
    return _choice.of(self._chosen, type(self._optimizer).__name__,
                      self._optimizer._averageable(variables))

  def config(self, config):
    """A configuration of the wrapper, with the arguments of this."""
    return {**config, "keep_raw_weights": self._optimizer.keeps_raw_weights,
            "variables": _choice.serialized(
                self._chosen, type(self._optimizer).__name__,
                self._optimizer._trainable_variables
                if self._optimizer.built else ())}

  def index_of(self, decay):
    if decay is not None and self.public == [None]:
      raise ValueError(
          f"`decay` must be None for a {type(self._optimizer).__name__}, "
          f"which keeps one average, got {decay}.")
    return super().index_of(decay)

  def stored(self, variable, k):
    return self._store.rows[k].get(self._key(variable))

  def value_of(self, variable):
    return value_of(variable)

  def group_of(self, variable):
    return self._store.part_of[self._key(variable)]

  def found(self, variable, *rows):
    """The average of a variable in the first row that has it."""
    key = self._key(variable)
    if (self._chosen is not None and not any(key in row for row in rows) and
        key in map(self._key, self._optimizer._trainable_variables)):
      raise KeyError(
          f"`variable` must be one that this {type(self._optimizer).__name__} "
          f"averages, got '{path_of(variable)}', which its argument "
          "`variables` excludes. It is evaluated as it is.")
    return self._store.found(variable, *rows)

  def readable(self, what, average):
    """What method `what` returns: an average, which must have a value."""
    _absence.check(_lazy.stored(value_of(average)),
                    f"{what}() must not be called")
    return average

  def average(self, variable, decay=None):
    """The average of a variable or statistic."""
    self._optimizer._require_built("average")
    self._store.seed_unbegun()
    k, statistics = self.index_of(decay), self._store.statistics
    found = self.readable("average", self.found(
        variable, self._store.rows[k],
        *(statistics.rows[k:k + 1] if statistics else ())))
    return (tf.convert_to_tensor(self.read(variable, k))
            if self.is_corrected(variable, k) and
            self.stored(variable, k) is found else found)

  def of_model(self, model, decay=None):
    """The (variable, average) pairs of a model, by default all."""
    self._store.seed_unbegun()
    self.check_attached(model)
    k, statistics = self.index_of(decay), self._store.statistics
    # Also of layers that have been frozen since.
    found = self.pairs(self._optimizer._trainable_variables if model is None
                       else model.variables, k)
    if model is not None and self._store.rows[0] and not found:
      raise ValueError(
          f"`model` must have variables that this "
          f"{type(self._optimizer).__name__} averages, got '{model.name}', "
          "which has none of them. A copy of a model has variables of its own.")
    if statistics is None:
      return found
    if (not statistics.knows_model() and isinstance(model, keras.Model) and
        len(found) == len(self._store.rows[0])):
      self.set_model(model)  # It has all variables that the optimizer trains.
    return found + statistics.pairs(k, model)

  def by_decay(self, model, steps=None):
    """As `averages_by_decay`, after a number of steps."""
    self._optimizer._require_built("averages_by_decay")
    self._optimizer._refuse_swapped_in("averages_by_decay")
    self.set_model(model)
    found = [{id(v): s for v, s in self.of_model(model, decay)}
             for decay in self.public]
    return [(decay, steps, lambda v, row=row: row.get(id(v)))
            for decay, row in zip(self.public, found)]

  def set_model(self, model):
    """Sets the model that the optimizer trains."""
    if not isinstance(model, keras.Model):
      raise TypeError(f"`model` must be a Keras model, got {model!r}.")
    if self._optimizer.built:
      self.check_attached(model)
    if self._store.statistics is not None:
      self._store.statistics.set_model(model)

  def check_attached(self, model, before=""):
    """Raises an error if a variable that has an average has left its layer.

    Args:
      model: A model that must have had the variable, or None.
      before: A sentence of the error.
    """
    self._detachment_check.check(self._optimizer, model, before)

  def check_no_file_waits(self):
    """Raises an error if averages of a file wait for the build."""
    if self._store.state.has_late():
      raise RuntimeError(
          f"A {type(self._optimizer).__name__} must be built before it is "
          "evaluated with the averages of a file that was loaded, got one that "
          "is not. Call its build(variables), or pass `part` to "
          "EvaluateWithAverages.")

  # In place of the weights

  @contextlib.contextmanager
  def in_place(self, model=None, decay=None, must_stay=False):
    """As `averaged_weights`, for a block that changes no variable.

    Args:
      model: As in `averaged_weights`.
      decay: As in `averaged_weights`.
      must_stay: Whether it is checked that the block changes no variable.
    """
    self._optimizer._require_built("averaged_weights")
    state = self._store.state

    # In a file, as when `fit` has ended: the averages stay what they are.
    def saved(swapped_in):
      return [pair for s in self._all_corrected() for pair in zip(
          s.saved, (s.value_in_block(swapped_in), s.variable))]

    with _swapping:
      self._optimizer._refuse_swapped_in("averaged_weights")
      pairs = self.of_model(model, decay)
      state.block.enter([(value_of(v), value_of(s)) for v, s in pairs],
                    self._all_corrected(but=self.index_of(decay)), saved,
                    must_stay=must_stay)
    try:
      yield
    finally:
      with _swapping:
        state.block.leave()
    self.check_attached(
        model, "All other variables have their own values again. ")

  def _all_corrected(self, but=None):
    return self.corrected(self._optimizer._trainable_variables, but)

  def assign(self, model, decay):
    """Sets the variables of a model to their averages."""
    self._optimizer._refuse_swapped_in("assign_averages")
    self._assign(self.of_model(model, decay))

  def _assign(self, pairs):
    """Sets variables to their averages: (variable, average) pairs."""
    held = [(part, part.read_value()) for s in self._all_corrected()
            for part in s.of_replicas()]
    _assignments.assign_all(pairs)
    for part, value in held:
      part.hold(value)

  @contextlib.contextmanager
  def adopting(self, model):
    """Sets all averages of a model to its variables, if the block sets these.

    Args:
      model: A model whose variables are averages.

    Yields:
      None.
    """
    variables = [v for value, _ in self.of_model(model)
                 for v in _replicas.values(value_of(value))]
    before = [v.read_value() for v in variables]
    yield
    if all(np.array_equal(x, v) for x, v in zip(before, variables)):
      return
    its = set(map(self._key, model.variables))
    for average, variable in self._store.state.pairs():
      if self._key(variable) in its:
        _assignments.seed(average, variable)

  # At the end of `fit`

  def before_end(self):
    """Prepares for `end`, before averages inside change the variables."""
    if not self._optimizer.keeps_raw_weights:
      self._optimizer._refuse_swapped_in("finalize_variable_values")
      self.check_attached(None)
    self._store.seed_unbegun()

  def end(self, var_list):
    """Sets variables to their averages."""
    if self._optimizer.keeps_raw_weights:
      return
    pairs = self.pairs(var_list, 0) + (
        self._store.statistics.pairs(0) if self._store.statistics else [])
    self._assign(pairs)
    self.note_weights([v for v, _ in pairs])
    self._warn_of_raw(set(map(self._key, var_list)))

  def _warn_of_raw(self, its):
    """Warns of frozen variables that keep raw weights at the end of `fit`."""
    raw = [v for v, s in self.pairs(self._optimizer._trainable_variables, 0)
           if self._key(v) not in its and not v.trainable
           and not np.array_equal(tf.cast(s, v.dtype), v)]
    if raw:
      warnings.warn(
          f"fit() ends with the raw weights of '{path_of(raw[0])}', "
          "which is frozen, and with the averages of the others. Call "
          "compile() after you have changed which variables are trained, as by "
          "`trainable` or enable_lora(). To evaluate its average, too, use "
          "averaged_weights(model) or averaged_model(model).")

  def note_weights(self, variables):
    """Notes the variables' values, averages with which `fit` has ended."""
    if not _replicas.is_shared(value_of(self._optimizer._iterations)):
      self._store.state.note_weights(_store.steps_of(self._optimizer), [
          v for v, _ in self.pairs(variables, 0)])

  def warn_of_set_weights(self, variables):
    """Warns if variables were set after `fit` and averages not."""
    found = self._store.state.set_since(_store.steps_of(self._optimizer),
                                        variables)
    if found is not None:
      warnings.warn(
          "fit() goes on from averages of weights that are no longer in the "
          f"model: '{path_of(found)}' was set after the last fit(), its "
          "average was not. If the training begins anew, call "
          "optimizer.seed_averages() before fit().")


def of(opt):
  """The Averages of an optimizer, or None if it has none."""
  found = getattr(opt, "_averages", None)
  # Not one of an earlier import.
  return found if isinstance(found, Averages) else None
