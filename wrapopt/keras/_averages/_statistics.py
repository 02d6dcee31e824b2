"""Averages of moving statistics of the batch normalizations of a model."""

import weakref

import tensorflow as tf

from wrapopt import _checks
from wrapopt._averages import _choice as _functions
from wrapopt._averages import _replicas
from wrapopt.keras import batch_norm
from wrapopt.keras._averages import _choice
from wrapopt.keras._averages import _last_file
from wrapopt.keras._variables import path_of


class Statistics:
  """The averages of statistics that an optimizer keeps.

  Attributes:
    variables: The statistics, once their averages are made: a list.
    rows: For each decay, {key of a statistic: its average}.
  """

  def __init__(self, optimizer, average_batch_norm, make_rows):
    """Makes no average yet.

    Args:
      optimizer: The wrapper.
      average_batch_norm: True, or a function of a layer.
      make_rows: A function of {index: variable}, as in `_state.State.add`, that
        returns `rows`.
    """
    self._optimizer, self._make_rows = optimizer, make_rows
    self._chosen = average_batch_norm
    self._model = lambda: None  # A weak reference.
    self.variables, self.rows = [], []

  def knows_model(self):
    """Whether `set_model` was called."""
    return isinstance(self._model, weakref.ref)

  def set_model(self, model):
    """Sets the model, or checks that it has no more statistics than before."""
    if not self.rows:
      self._model = weakref.ref(model)
    for v in self._of(model).values() if self.rows else ():
      if self._optimizer._var_key(v) not in self.rows[0]:
        raise ValueError(
            "A MovingAverage with average_batch_norm=True must know the whole "
            f"model before averages of its statistics are made, got the model "
            f"'{model.name}' later, whose '{path_of(v)}' has no "
            "average. Call set_model(model) first.")

  def make(self):
    """Makes the averages, if they are not made."""
    if self.rows:
      return
    model = self._model()
    if model is None:
      raise RuntimeError(
          "With average_batch_norm=True the optimizer must know the model, "
          "got none. Pass fit() the callback EvaluateWithAverages, or call "
          "set_model(model).")
    variables, state = self._of(model), self._optimizer._store.state
    with tf.init_scope(), self._optimizer._distribution_strategy.scope():
      rows = self._make_rows(variables)
      state.take_late(_last_file.OF_BATCH_NORM)
    self.variables, self.rows = list(variables.values()), rows

  def _of(self, model):
    """As `batch_norm.averaged_statistics`, of those that are averaged."""
    optimizer, chosen = self._optimizer, self._chosen
    trained = set(map(optimizer._var_key, optimizer._trainable_variables))

    def averages(layer):
      if callable(chosen):
        return _functions.answer(chosen, layer, layer.name,
                                 "average_batch_norm")
      return batch_norm.is_trained(layer, model,
                                   lambda v: optimizer._var_key(v) in trained)

    found = batch_norm.averaged_statistics(model, averages)
    if callable(chosen) and not found and batch_norm.statistics(model):
      raise ValueError(
          f"`average_batch_norm` of a {type(optimizer).__name__} must select at"
          f" least one layer, got False for all in '{model.name}'. False, and "
          "no function, averages none.")
    return found

  def make_if_known(self):
    """Makes the averages that the first step would make, if it can."""
    model = self._model()
    # Else some of the model's statistics may be made later.
    if self._optimizer.built and model and all(
        layer.built for layer in model._flatten_layers()):
      self.make()

  def prepare(self):
    """Prepares the averages for a step, when it is taken or traced."""
    # Averages must be there to begin. Those of all replicas are made together.
    if not self.rows:
      _replicas.merged(self.make)()
    if tf.executing_eagerly():
      self._optimizer._store.state.keep_statistics()

  def pairs(self, decay_number, model=None):
    """(variable, average) pairs of a decay: a list.

    Args:
      decay_number: The number of the decay.
      model: A model that must have the variables, or None.
    """
    self.make()
    key, row = self._optimizer._var_key, self.rows[decay_number]
    its = row if model is None else set(map(key, batch_norm.statistics(model)))
    return [(v, row[key(v)]) for v in self.variables if key(v) in its]

  def moved_pairs(self, step, decay_number):
    """Those of each replica that a Step moves."""
    key = self._optimizer._var_key
    # One of the steps of a MultiOptimizer updates the statistics.
    first = key(self._optimizer._trainable_variables[0])
    return [] if all(part != first for _, part in step.trained) else (
        _replicas.components((v.value, s.value)
                             for v, s in self.pairs(decay_number)))

  def config(self):
    """The argument `average_batch_norm` in a configuration."""
    return _choice.serialized_function(
        self._chosen, "average_batch_norm", "True or False",
        type(self._optimizer).__name__) if callable(self._chosen) else True


def checked(average_batch_norm):
  """An argument `average_batch_norm`, checked."""
  return (average_batch_norm if callable(average_batch_norm) else
          _checks.boolean("average_batch_norm", average_batch_norm))
