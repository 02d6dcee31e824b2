"""The base class of the Keras wrappers that average moving statistics."""

from typing import Any
import weakref

import keras
import tensorflow as tf

from wrapopt import _checks
from wrapopt._averages import _chosen as _functions
from wrapopt._averages import _replicas
from wrapopt.keras import _averaging
from wrapopt.keras import _chosen
from wrapopt.keras import _state
from wrapopt.keras import batch_norm
from wrapopt.keras._variables import path_of


class StatisticsAveragingOptimizer(_averaging.AveragingOptimizer):
  """A wrapper that also averages statistics of batch normalizations."""

  # (variables, rows), of the model that it knows.
  _of_batch_norm: Any = ()

  def __init__(self, optimizer, name, keep_raw_weights, sum_duplicates,
               variables, average_batch_norm):
    super().__init__(optimizer, name, keep_raw_weights, sum_duplicates,
                     variables)
    # In an object that neither Keras nor TensorFlow tracks.
    self._untracked.average_batch_norm = average_batch_norm
    self.averages_batch_norm = callable(average_batch_norm) or _checks.boolean(
        "average_batch_norm", average_batch_norm)
    self._untracked.model = None

  def _make_rows(self, variables, suffix=""):
    """Makes averages of variables.

    Args:
      variables: {index: variable}, see `_state.State.add`.
      suffix: The end of their names.

    Returns:
      Rows, one for each decay.
    """
    raise NotImplementedError

  def set_model(self, model: keras.Model) -> None:
    """Sets the model, for `average_batch_norm`.

    For custom training loops: in `fit`, `EvaluateWithAverages` calls it.

    Args:
      model: The model that the optimizer trains.

    Raises:
      TypeError: If `model` is not a Keras model.
      ValueError: If the statistics of another model are averaged already, and
        `model` has more of them.
    """
    super().set_model(model)
    if not (self.built and self._of_batch_norm):
      self._untracked.model = weakref.ref(model)
      return
    _, rows = self._of_batch_norm
    for v in self._statistics_of(model).values():
      if self._var_key(v) not in rows[0]:
        raise ValueError(
            "A MovingAverage with average_batch_norm=True must know the whole "
            f"model before averages of its statistics are made, got the model "
            f"'{model.name}' later, whose '{path_of(v)}' has no "
            "average. Call set_model(model) first.")

  def _statistics(self):
    """(variables, rows of averages) of batch normalizations."""
    if not self.averages_batch_norm:
      return [], [{} for _ in self._rows]
    if not self._of_batch_norm:
      model = self._untracked.model and self._untracked.model()
      if model is None:
        raise RuntimeError(
            "With average_batch_norm=True the optimizer must know the model, "
            "got none. Pass fit() the callback EvaluateWithAverages, or call "
            "set_model(model).")
      variables = self._statistics_of(model)
      with tf.init_scope(), self._distribution_strategy.scope():
        rows = self._make_rows(variables, _state.OF_BATCH_NORM)
        self._state.take_late(_state.OF_BATCH_NORM)
      self._of_batch_norm = list(variables.values()), rows
    return self._of_batch_norm

  def _statistics_of(self, model):
    """As `batch_norm.averaged_statistics`, of those that are averaged."""
    chosen = self._untracked.average_batch_norm
    trained = set(map(self._var_key, self._trainable_variables))

    def averages(layer):
      if callable(chosen):
        return _functions.answer(chosen, layer, layer.name,
                                 "average_batch_norm")
      return batch_norm.is_trained(layer, model,
                                   lambda v: self._var_key(v) in trained)

    found = batch_norm.averaged_statistics(model, averages)
    if callable(chosen) and not found and batch_norm.statistics(model):
      raise ValueError(
          f"`average_batch_norm` of a {type(self).__name__} must select at "
          f"least one layer, got False for all in '{model.name}'. False, and "
          "no function, averages none.")
    return found

  def _make_late_averages(self):
    model = self._untracked.model and self._untracked.model()
    # Else some of the model's statistics may be made later.
    if self.built and model and all(
        layer.built for layer in model._flatten_layers()):
      self._statistics()

  def _prepare_averages(self, keys):
    # Averages must be there to begin. Those of all replicas are made together.
    if (_replicas.share_steps() and self.averages_batch_norm and
        not self._of_batch_norm):
      _replicas.merged(self._statistics)()
    self._statistics()
    if tf.executing_eagerly():
      self._state.keep_statistics()
    super()._prepare_averages(keys)

  def _batch_norm_pairs(self, step):
    """(variable, average) pairs of each replica: a list for each decay."""
    variables, rows = self._statistics()
    # One of the steps of a MultiOptimizer updates the statistics.
    first = self._var_key(self._trainable_variables[0])
    if all(key != first for _, key in step.trained):
      variables = []
    return [_replicas.components((v.value, row[self._var_key(v)].value)
                                 for v in variables) for row in rows]

  def _finalized(self, var_list):
    variables, rows = self._statistics()
    return super()._finalized(var_list) + [
        (v, rows[0][self._var_key(v)]) for v in variables]

  def _config_of_batch_norm(self):
    """The argument `average_batch_norm` in a configuration."""
    chosen = self._untracked.average_batch_norm
    return _chosen.serialized_function(
        chosen, "average_batch_norm", "True or False",
        type(self).__name__) if callable(chosen) else self.averages_batch_norm
