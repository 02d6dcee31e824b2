"""Snapshots of the averages that a Keras optimizer keeps."""

import copy
import io
from typing import Any, Union

import keras
from keras.src.saving import saving_lib
import numpy as np
import tensorflow as tf

from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _snapshots
from wrapopt.checkpoints import _trees
from wrapopt.keras import _optimizers
from wrapopt.keras._steps import _views


class Snapshots(keras.callbacks.Callback):
  """Writes snapshots of averages during `fit`.

  A snapshot is a `.weights.h5` file of the model with the averages of one decay
  in place of its weights; `model.load_weights` loads it. It also holds the
  other variables of the model, such as statistics of batch normalizations, but
  no state of the optimizer. A thread writes the file, which appears once it is
  complete and on the disk. `wrapopt.checkpoints.posthoc` computes averages of
  any width from snapshots.

  Example:

      model.compile(wrapopt.keras.MovingAverage(
          "adam", [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)]), ...)
      model.fit(..., callbacks=[wrapopt.keras.Snapshots("run/snapshots", 500)])
  """

  def __init__(
      self, directory: str, save_steps: int, dtype: Any = None, *,
      optimizer: Union[None, str, keras.optimizers.Optimizer] = None) -> None:
    """Makes the callback.

    Args:
      directory: The directory of the snapshots.
      save_steps: The number of optimizer steps between snapshots.
      dtype: The dtype in which averages are stored: "float32", "float16",
        "bfloat16", or None for their own dtypes. float16 and bfloat16 halve the
        files. Averages computed from them have the dtypes of the variables.
      optimizer: The optimizer whose averages are written and whose steps are
        counted, or the name of the attribute of the model that holds it; by
        default that of `compile`.

    Raises:
      TypeError: If `save_steps` is not an integer, or `optimizer` neither an
        optimizer nor a name.
      ValueError: If an argument is out of range. In `fit`, if Keras's files
        lack a variable that has an average, such as a factor of LoRA.
    """
    super().__init__()
    self._snapshots = _snapshots.Snapshots(directory, save_steps, dtype)
    self._optimizer = _optimizers.checked_optimizer(optimizer)
    self._trains = None

  def set_model(self, model):
    optimizer = _optimizers.optimizer_of(model, self._optimizer, "Snapshots")
    averaging = _optimizers.averaging(optimizer)
    if len(averaging) != 1:
      raise ValueError(
          "Snapshots needs exactly one optimizer that keeps averages, such as "
          "wrapopt.keras.MovingAverage, got "
          f"{type(optimizer).__qualname__} with {len(averaging)}. Put "
          "one wrapper around all other optimizers.")
    super().set_model(model)
    self._trains = optimizer

  def __deepcopy__(self, memo):
    """A copy that has no model yet: KerasTuner makes one for each trial."""
    copied = copy.copy(self)
    memo[id(self)] = copied
    copied._snapshots = self._snapshots.copy()
    copied._model = copied._trains = None
    return copied

  def on_train_begin(self, logs=None):
    [optimizer] = _optimizers.averaging(self._trains)
    if optimizer.built:  # Not only when the first snapshot is due.
      _check_saved(_Layout(self.model), optimizer, self.model)
    self._snapshots.begin(self._step())

  def _step(self):
    return int(self._trains.iterations)

  def on_train_batch_end(self, batch, logs=None):
    step = self._step()
    if self._snapshots.is_due(step):
      self._write(step)

  def on_train_end(self, logs=None):
    self._snapshots.end()

  def _write(self, step):
    [optimizer] = _optimizers.averaging(self._trains)
    layout = _Layout(self.model)
    _check_saved(layout, optimizer, self.model)
    for decay, steps, average_of in optimizer.averages_by_decay(self.model):
      averages, others = {}, {}
      for name, value in layout.values.items():
        average = (average_of(value) if isinstance(value, keras.Variable)
                   else None)
        if average is not None:
          averages[name] = (_array(average), np.dtype(
              tf.as_dtype(value.dtype).as_numpy_dtype))
        else:
          others[name] = _array(value)
      self._snapshots.write(
          lambda path, note: _h5.H5Sink(path + ".weights.h5", note, layout),
          step, decay, steps, averages, others)


def _check_saved(layout, optimizer, model):
  """Raises an error if a file of Keras lacks a variable that has an average."""
  saved = set(map(id, layout.values.values()))
  for v, _ in optimizer._averages.pairs(model.variables, 0):
    if id(v) not in saved:
      raise ValueError(
          "Snapshots must be of a model whose files hold each variable that "
          f"has an average, got '{v.path}', which '{model.name}' does not "
          "save. Keras merges the factors of LoRA into the kernel: the merged "
          "kernel has no average. Use the callback ModelCheckpoint in "
          "EvaluateWithAverages.")


def _array(x):
  return np.array(keras.ops.convert_to_numpy(x))


class _Layout(saving_lib.H5IOStore):
  """The layout of a model's variables in Keras's files.

  Attributes:
    values: {name of a dataset: a `keras.Variable`, or another value that a
      layer saves}.
    file: An HDF5 file in memory, with the groups and no datasets.
    datasets: An empty dict.
    trees: As of a `_h5.H5Source`.
  """

  def __init__(self, model):
    super().__init__(io.BytesIO(), mode="w")
    self.values = {}
    self.file, self.datasets = self.h5_file, {}
    saving_lib._save_state(
        model, weights_store=self, assets_store=None, inner_path="",
        visited_saveables={id(x) for x in _views.optimizers_in(model)})
    self.trees = [_trees.tree_of(self.file)]

  def __setitem__(self, key, value):
    if not self._h5_entry_initialized:
      self._create_h5_group(self._h5_entry_path)
    self.values[f"{self._h5_entry_group.name}/{key}".lstrip("/")] = value
