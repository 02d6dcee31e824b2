"""Snapshots of the averages that a Keras optimizer keeps."""

import io
from typing import Any

import keras
from keras.src.saving import saving_lib
import numpy as np
import tensorflow as tf

from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _snapshots
from wrapopt.keras import evaluate_with_averages


class Snapshots(keras.callbacks.Callback):
  """Writes averages as snapshots, while `fit` goes on.

  A snapshot is a `.weights.h5` file of the model with the averages of one decay
  in place of its weights: `model.load_weights` loads it. Beside them it holds
  what else the model has, such as statistics of batch normalizations, and no
  state of the optimizer. A thread writes it, and it appears when it is whole
  and on the disk. `wrapopt.checkpoints.posthoc` makes averages of any width of
  snapshots.

  Example:

      model.compile(wrapopt.keras.MovingAverage(
          "adam", [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)]), ...)
      model.fit(..., callbacks=[wrapopt.keras.Snapshots("run/snapshots", 500)])
  """

  def __init__(self, directory: str, save_steps: int,
               dtype: Any = None) -> None:
    """Makes the callback.

    Args:
      directory: Where snapshots are written.
      save_steps: Every how many steps of the optimizer.
      dtype: What the averages are stored in: "float32", "float16", "bfloat16",
        or None for their own dtypes. float16 and bfloat16 halve the files; what
        is made of them is of the dtype of the variables again.

    Raises:
      TypeError: If `save_steps` is no integer.
      ValueError: If an argument is out of range.
    """
    super().__init__()
    self._snapshots = _snapshots.Snapshots(directory, save_steps, dtype)

  def set_model(self, model):
    averaging = evaluate_with_averages.averaging(model.optimizer)
    if len(averaging) != 1:
      raise ValueError(
          "Snapshots needs one optimizer that keeps averages, such as "
          f"wrapopt.keras.MovingAverage, got {type(model.optimizer).__qualname__}"
          f" with {len(averaging)}. Put the wrapper around the others.")
    super().set_model(model)

  def on_train_begin(self, logs=None):
    self._snapshots.begin(self._step())

  def _step(self):
    return int(self.model.optimizer.iterations)

  def on_train_batch_end(self, batch, logs=None):
    step = self._step()
    if self._snapshots.is_due(step):
      self._write(step)

  def on_train_end(self, logs=None):
    self._snapshots.end()

  def _write(self, step):
    [optimizer] = evaluate_with_averages.averaging(self.model.optimizer)
    layout = _Layout(self.model)
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
          lambda path, specs, note: _formats.H5Sink(
              path + ".weights.h5", specs, layout, note),
          step, decay, steps, averages, others)


def _array(x):
  return np.array(keras.ops.convert_to_numpy(x))


class _Layout(saving_lib.H5IOStore):
  """Where Keras has a model's variables in its files.

  Attributes:
    values: {name of a dataset: a `keras.Variable`, or what else a layer saves}.
    file: A file of HDF5 in memory, with the groups and nothing in them.
    datasets: None of them.
  """

  def __init__(self, model):
    super().__init__(io.BytesIO(), mode="w")
    self.values = {}
    self.file, self.datasets = self.h5_file, {}
    saving_lib._save_state(
        model, weights_store=self, assets_store=None, inner_path="",
        visited_saveables={id(model.optimizer)})

  def __setitem__(self, key, value):
    if not self._h5_entry_initialized:
      self._create_h5_group(self._h5_entry_path)
    self.values[f"{self._h5_entry_group.name}/{key}".lstrip("/")] = value
