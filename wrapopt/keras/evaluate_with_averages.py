"""Averages in place of the weights wherever Keras evaluates a model."""

from collections.abc import Iterable
import contextlib
from typing import Any, Optional

import keras
from keras.src.utils import python_utils

from wrapopt.keras import _steps
from wrapopt.keras import _wrapper


class EvaluateWithAverages(keras.callbacks.Callback):
  """Has `evaluate`, `predict` and validation in `fit` use averaged weights.

  Averages are in place while the model computes a batch, and at no other time:
  no exception and no interrupt leaves them there. The callbacks that it is
  given see them too where they save the model or keep its weights: at the end
  of an epoch, and of a training batch for a callback with a method for that.

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

  `fit` ends with the averages in the model, as Keras does for `use_ema`. If a
  callback of this one then sets weights, as EarlyStopping does, these are the
  averages from there on.

  The averages are those of the outermost wrapper that has some: around or
  inside Keras's LossScaleOptimizer and MultiOptimizer too. float16 and bfloat16
  variables with float32 averages are converted at each batch; all others trade
  buffers.
  """

  def __init__(
      self,
      callbacks: Optional[Iterable[keras.callbacks.Callback]] = None) -> None:
    """Makes the callback.

    Args:
      callbacks: A callback, or a list of callbacks, that are to see the
        averages. A BackupAndRestore must stand beside this one: it saves the
        state of the training, which is of the raw weights.

    Raises:
      TypeError: If `callbacks` are no callbacks.
      ValueError: If one is a BackupAndRestore.
    """
    super().__init__()
    if isinstance(callbacks, keras.callbacks.Callback):
      callbacks = [callbacks]
    self._callbacks = list(callbacks or ())
    for callback in self._callbacks:
      if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError("`callbacks` must be Keras callbacks, got "
                        f"{type(callback).__qualname__}.")
      if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "`callbacks` must not hold a BackupAndRestore: it would resume the "
            "training from averages. Give it to fit() beside "
            "EvaluateWithAverages.")
    self._at_batch_end = [
        c for c in self._callbacks if getattr(c, "save_freq", None) != "epoch"
        and not _are_default(c, "on_batch_end", "on_train_batch_end")]
    # Keras need not wait for results of which no callback wants to know.
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
    if not averaging(model.optimizer):
      raise ValueError(
          "EvaluateWithAverages needs an optimizer that keeps averages, such "
          "as wrapopt.keras.MovingAverage, got "
          f"{type(model.optimizer).__qualname__}.")
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
      for optimizer in averaging(model.optimizer):
        stack.enter_context(optimizer.in_place(model))
      yield

  def on_train_begin(self, logs=None):
    for optimizer in averaging(self.model.optimizer):
      optimizer.know(self.model)
    self._call("on_train_begin", logs)

  def on_train_end(self, logs=None):
    self._call("on_train_end", logs)
    if self._callbacks:
      for optimizer in averaging(self.model.optimizer):
        optimizer.adopt(self.model)

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


def averaging(optimizer):
  """The outermost optimizers with averages to evaluate: a list."""
  if isinstance(optimizer, _wrapper.AveragingOptimizer):
    return [optimizer]
  return [found for inner in _steps.held_by(optimizer)
          for found in averaging(inner)]


class _Function:
  """A model's test or predict function, replaced by one with averages in place.

  Keras calls `make_test_function` where it begins to evaluate in any way. That
  puts the model's own function back, if an exception has left the other.
  """

  def __init__(self, model, kind, in_place):
    self._model, self._in_place = model, in_place
    self._name, self._make_name = f"{kind}_function", f"make_{kind}_function"
    self._own = self._other = None

  def put(self):
    """Replaces the function, unless it is replaced already."""
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
    """Puts the model's own function back, if it is replaced."""
    model = self._model
    if self._other is not None and getattr(model, self._name) is self._other:
      setattr(model, self._name, self._own)
    if self._make_name in vars(model):
      delattr(model, self._make_name)
    self._own = self._other = None


def _are_default(callback, *names):
  return all(python_utils.is_default(getattr(callback, n)) for n in names)
