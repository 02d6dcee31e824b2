"""A callback that puts averages in place of the weights in evaluations."""

from collections.abc import Iterable
import contextlib
from typing import Any, Optional

import keras
from keras.src.utils import python_utils

from wrapopt import _decays
from wrapopt.keras import _wrapper
from wrapopt.keras import snapshots


class EvaluateWithAverages(keras.callbacks.Callback):
  """Makes `evaluate`, `predict` and validation in `fit` use averaged weights.

  Averages are in place while the model computes a batch. After an exception or
  an interrupt, the raw weights are in place again. The callbacks in `callbacks`
  also run with averages in place: `on_epoch_end`, and `on_train_batch_end` if
  the callback implements it.

  Example:

      model.compile(wrapopt.keras.MovingAverage("adam", 0.999), ...)
      model.fit(..., validation_data=..., callbacks=[
          wrapopt.keras.EvaluateWithAverages([
              keras.callbacks.ModelCheckpoint("best.keras",
                                              save_best_only=True),
              keras.callbacks.EarlyStopping(patience=3,
                                            restore_best_weights=True)]),
          keras.callbacks.BackupAndRestore("backup")])
      model.evaluate(..., callbacks=[wrapopt.keras.EvaluateWithAverages()])

  After `fit`, the model holds the averages, as with Keras's `use_ema`. If a
  callback in `callbacks` then sets weights, like EarlyStopping, the averages
  of all decays are set to these weights.

  The averages are those of the outermost wrapper that keeps averages, which may
  be inside Keras's LossScaleOptimizer or MultiOptimizer. A float32 average of a
  float16 or bfloat16 variable is converted for each batch. All other averages
  exchange buffers with their variables.
  """

  def __init__(
      self, callbacks: Optional[Iterable[keras.callbacks.Callback]] = None, *,
      decay: Optional[_decays.Decay] = None) -> None:
    """Makes the callback.

    Args:
      callbacks: A callback, or a list of callbacks, to run with the averages in
        place. Do not pass BackupAndRestore, which saves the state of the
        training and needs the raw weights, nor Snapshots, which reads the
        averages itself: pass them to `fit`.
      decay: Which of an optimizer's decays; by default the first. `fit` then
        ends with these averages in the weights.

    Raises:
      TypeError: If `callbacks` contains anything but callbacks.
      ValueError: If `callbacks` contains a BackupAndRestore or a Snapshots.
    """
    super().__init__()
    self._decay = decay
    if isinstance(callbacks, keras.callbacks.Callback):
      callbacks = [callbacks]
    self._callbacks = list(callbacks or ())
    for callback in self._callbacks:
      if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError("`callbacks` must be Keras callbacks, got "
                        f"{type(callback).__qualname__}.")
      if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "`callbacks` must not contain a BackupAndRestore: it would resume "
            "the training from averages. Pass it to fit() next to "
            "EvaluateWithAverages.")
      if isinstance(callback, snapshots.Snapshots):
        raise ValueError(
            "`callbacks` must not contain a Snapshots: while averages are in "
            "place, it would write raw weights as averages. Pass it to fit() "
            "next to EvaluateWithAverages.")
    self._at_batch_end = [
        c for c in self._callbacks if getattr(c, "save_freq", None) != "epoch"
        and not _are_default(c, "on_batch_end", "on_train_batch_end")]
    # Keras then does not wait for results that no callback uses.
    for name in ("on_train_batch_end", "on_test_batch_end",
                 "on_predict_batch_end"):
      if all(_are_default(c, "on_batch_end", name) for c in self._callbacks):
        setattr(self, name, getattr(super(), name))
    self._functions: list[Any] = []

  def set_params(self, params):
    super().set_params(params)
    for callback in self._callbacks:
      callback.set_params(params)

  def set_model(self, model):
    if not _wrapper.averaging(model.optimizer):
      raise ValueError(
          "EvaluateWithAverages needs an optimizer that keeps averages, such "
          "as wrapopt.keras.MovingAverage, got "
          f"{type(model.optimizer).__qualname__}.")
    for optimizer in _wrapper.averaging(model.optimizer):
      optimizer.check_decay(self._decay)
    super().set_model(model)
    self._functions = [_Function(model, kind, self._in_place)
                       for kind in ("test", "predict")]
    for callback in self._callbacks:
      callback.set_model(model)

  @contextlib.contextmanager
  def _in_place(self):
    model = self.model
    if not model.optimizer.built:
      with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    with contextlib.ExitStack() as stack:
      for optimizer in _wrapper.averaging(model.optimizer):
        if optimizer.built:  # Part of a MultiOptimizer may train nothing.
          stack.enter_context(optimizer.in_place(model, self._decay))
      yield

  def on_train_begin(self, logs=None):
    for optimizer in _wrapper.averaging(self.model.optimizer):
      optimizer.know(self.model)
    self._call("on_train_begin", logs)

  def on_train_end(self, logs=None):
    found = [x for x in _wrapper.averaging(self.model.optimizer) if x.built]
    if self._decay is not None:  # Keras has put the first in place.
      for optimizer in found:
        optimizer.assign_averages(self.model, self._decay)
    self._call("on_train_end", logs)
    if self._callbacks:
      for optimizer in found:
        optimizer.adopt(self.model, self._decay)

  def on_epoch_begin(self, epoch, logs=None):
    self._call("on_epoch_begin", epoch, logs)

  def on_epoch_end(self, epoch, logs=None):
    if self._callbacks:
      with self._in_place():
        self._call("on_epoch_end", epoch, logs)

  def on_train_batch_begin(self, batch, logs=None):
    self._call("on_train_batch_begin", batch, logs)

  def on_train_batch_end(self, batch, logs=None):
    if self._at_batch_end:
      with self._in_place():
        for callback in self._at_batch_end:
          callback.on_train_batch_end(batch, logs)

  def on_test_begin(self, logs=None):
    self._call("on_test_begin", logs)

  def on_test_end(self, logs=None):
    self._functions[0].put_back()
    self._call("on_test_end", logs)

  def on_test_batch_begin(self, batch, logs=None):
    self._call("on_test_batch_begin", batch, logs)
    self._functions[0].put()

  def on_test_batch_end(self, batch, logs=None):
    self._call("on_test_batch_end", batch, logs)

  def on_predict_begin(self, logs=None):
    self._call("on_predict_begin", logs)

  def on_predict_end(self, logs=None):
    self._functions[1].put_back()
    self._call("on_predict_end", logs)

  def on_predict_batch_begin(self, batch, logs=None):
    self._call("on_predict_batch_begin", batch, logs)
    self._functions[1].put()

  def on_predict_batch_end(self, batch, logs=None):
    self._call("on_predict_batch_end", batch, logs)

  def _call(self, method, *args):
    for callback in self._callbacks:
      getattr(callback, method)(*args)


class _Function:
  """Replaces a model's test or predict function by one with averages in place.

  Keras calls `make_test_function` at the start of each evaluation. If an
  exception has left the replacement, this call restores the model's function.
  """

  def __init__(self, model, kind, in_place):
    self._model, self._in_place = model, in_place
    self._name, self._make_name = f"{kind}_function", f"make_{kind}_function"
    self._own = self._other = None

  def put(self):
    """Replaces the function, unless it is already replaced."""
    model, own = self._model, getattr(self._model, self._name)
    if self._other is not None and own is self._other:
      return

    def other(data):
      with self._in_place():
        return own(data)

    def make(force=False):
      self.put_back()
      getattr(model, self._make_name)(force)

    self._own, self._other = own, other
    setattr(model, self._name, other)
    setattr(model, self._make_name, make)

  def put_back(self):
    """Restores the model's function, if it is replaced."""
    model = self._model
    if self._other is not None and getattr(model, self._name) is self._other:
      setattr(model, self._name, self._own)
    if self._make_name in vars(model):
      delattr(model, self._make_name)
    self._own = self._other = None


def _are_default(callback, *names):
  return all(python_utils.is_default(getattr(callback, n)) for n in names)
