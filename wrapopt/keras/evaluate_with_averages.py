"""A callback that puts averages in place of the weights in evaluations."""

from collections.abc import Iterable
import contextlib
import itertools
from typing import Any, Literal, Optional, Union
import warnings

import keras
from keras.src.utils import python_utils

from wrapopt._averages import _decays
from wrapopt.keras import _averaging
from wrapopt.keras import batch_norm
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
  of all decays are set to these weights. An optimizer with
  `keep_raw_weights=True` keeps the raw weights in the model.

  The moving statistics of batch normalizations come from the raw weights and do
  not fit the averages. With `recalibrate=dataset`, each evaluation first
  computes those that fit, as `recalibrate_batch_norm` does, in one pass over
  the data set. They are in place together with the averages, also for
  `callbacks` and at the end of `fit`. During the training, the model keeps its
  own statistics, bit for bit.

  With `decay="all"`, validation in `fit` evaluates the averages of all decays.
  The names of the logs of all but the first end in the decay, such as
  `val_loss_0.5`. A callback in `callbacks` that monitors one of these logs runs
  with the averages of that decay in place. It needs `mode`, since Keras does
  not know these names:

      model.compile(wrapopt.keras.MovingAverage("adam", [0.999, 0.99]), ...)
      model.fit(..., validation_data=..., callbacks=[
          wrapopt.keras.EvaluateWithAverages([
              keras.callbacks.ModelCheckpoint(
                  "0.99.keras", monitor="val_loss_0.99", mode="min",
                  save_best_only=True),
          ], decay="all")])

  The averages are those of the outermost wrapper that keeps averages, which may
  be inside Keras's LossScaleOptimizer or MultiOptimizer. A float32 average of a
  float16 or bfloat16 variable is converted for each batch. All other averages
  exchange buffers with their variables.
  """

  def __init__(
      self, callbacks: Optional[Iterable[keras.callbacks.Callback]] = None, *,
      decay: Union[None, _decays.Decay, Literal["all"]] = None,
      recalibrate: Union[None, Iterable[Any], Literal[False]] = None) -> None:
    """Makes the callback.

    Args:
      callbacks: A callback, or a list of callbacks, to run with the averages in
        place. Do not pass BackupAndRestore, which saves the state of the
        training and needs the raw weights, nor Snapshots, which reads the
        averages itself: pass them to `fit`.
      decay: Which of an optimizer's decays; by default the first. `fit` then
        ends with these averages in the weights. "all": the first, and
        validation in `fit` evaluates the others, too.
      recalibrate: A finite data set of training batches, as for
        `recalibrate_batch_norm`, which can be read several times. If `fit`
        reads the same `tf.data.Dataset` with a `shuffle`, the order of its
        later epochs changes. None or False keeps the statistics of batch
        normalizations; None also warns, if the model has any that are trained,
        and the optimizer does not average them.

    Raises:
      TypeError: If `callbacks` contains anything but callbacks, or
        `recalibrate` is not a data set that can be read several times.
      ValueError: If `callbacks` contains a BackupAndRestore, a SwapEMAWeights
        or a Snapshots, or with `recalibrate` a callback that runs after each
        batch; or if `recalibrate` is infinite.
    """
    super().__init__()
    if isinstance(decay, str) and decay != "all":
      raise ValueError(f"`decay` must be a decay, None or \"all\", got "
                       f"{decay!r}.")
    self._decay = decay
    batch_norm.check_recalibrate(recalibrate)
    self._dataset = None if recalibrate is False else recalibrate
    self._recalibration = batch_norm.Recalibration(self._dataset)
    self._warns = recalibrate is None
    self._recalibrated: Optional[batch_norm.Recalibrated] = None
    self._others: dict[str, EvaluateWithAverages] = {}  # By suffix of logs.
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
      if isinstance(callback, keras.callbacks.SwapEMAWeights):
        raise ValueError(
            "`callbacks` must not contain a SwapEMAWeights: it exchanges "
            "averages of Keras's use_ema. Remove it.")
      if isinstance(callback, snapshots.Snapshots):
        raise ValueError(
            "`callbacks` must not contain a Snapshots: while averages are in "
            "place, it would write raw weights as averages. Pass it to fit() "
            "next to EvaluateWithAverages.")
    self._at_batch_end = [
        c for c in self._callbacks if getattr(c, "save_freq", None) != "epoch"
        and not _are_default(c, "on_batch_end", "on_train_batch_end")]
    if self._at_batch_end and self._dataset is not None:
      raise ValueError(
          "`callbacks` must not contain one that runs after each batch if "
          "`recalibrate` is given: it would need a pass over the data set "
          f"each time, got {type(self._at_batch_end[0]).__qualname__}. Use "
          "save_freq=\"epoch\", or pass it to fit() next to "
          "EvaluateWithAverages.")
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
    found = _averaging.averaging(model.optimizer)
    if not found:
      raise ValueError(
          "EvaluateWithAverages needs an optimizer that keeps averages, such "
          "as wrapopt.keras.MovingAverage, got "
          f"{type(model.optimizer).__qualname__}.")
    decays = found[0].decays() if self._decay == "all" else [self._decay]
    for optimizer in found:
      for decay in decays:
        optimizer.check_decay(decay)
    self._check_end(found)
    self._check_batch_norm(model, found)
    super().set_model(model)
    self._evaluated = decays[0]
    self._recalibrated = None
    self._functions = [_Function(model, kind, self._swapped_in)
                       for kind in ("test", "predict")]
    for callback in self._callbacks:
      callback.set_model(model)
    self._others = {
        f"_{decay}": EvaluateWithAverages(
            decay=decay,
            recalibrate=False if self._dataset is None else self._dataset)
        for decay in decays[1:]}
    for other in self._others.values():
      other._recalibration = self._recalibration
      other.set_model(model)

  def _check_end(self, found):
    """Raises an error if the weights at the end of `fit` are not clear."""
    keeps = {optimizer.keeps_raw_weights for optimizer in found}
    if len(keeps) > 1:
      raise ValueError(
          "`keep_raw_weights` must be the same for all optimizers that keep "
          "averages in one model, got True and False.")
    if keeps == {True} and any(
        isinstance(c, keras.callbacks.EarlyStopping) and c.restore_best_weights
        for c in self._callbacks):
      raise ValueError(
          "`callbacks` must not contain an EarlyStopping with "
          "restore_best_weights=True if the optimizer has "
          "keep_raw_weights=True: it sets the weights to averages at the end "
          "of fit(). Save the best averages with a ModelCheckpoint.")

  def _check_batch_norm(self, model, found):
    """Raises an error or warns if statistics do not fit the averages."""
    averages = any(optimizer.averages_batch_norm for optimizer in found)
    if self._dataset is not None and averages:
      raise ValueError(
          "`recalibrate` must not be given if the optimizer averages the "
          "statistics of batch normalizations, got both. Remove "
          "average_batch_norm=True.")
    if self._warns and not averages and batch_norm.trained(model):
      self._warns = False
      warnings.warn(batch_norm.warning(
          "EvaluateWithAverages evaluates averages of", model))

  @contextlib.contextmanager
  def _swapped_in(self):
    model = self.model
    if not model.optimizer.built:
      with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    with contextlib.ExitStack() as stack:
      for optimizer in _averaging.averaging(model.optimizer):
        if optimizer.built:  # Part of a MultiOptimizer may train nothing.
          stack.enter_context(optimizer.swapped_in(model, self._evaluated))
      if self._dataset is not None:
        if self._recalibrated is None:
          self._recalibrated = self._recalibration.of(model)
        stack.enter_context(self._recalibrated.swapped_in())
      yield

  def _forget(self):
    """Discards recalibrated statistics: the weights may have changed."""
    for callback in (self, *self._others.values()):
      callback._recalibrated = None

  def _run(self, callbacks, method, *args):
    """Runs callbacks with the averages in place that they monitor."""

    def evaluator(callback):
      monitor = getattr(callback, "monitor", None)
      return next((other for suffix, other in self._others.items()
                   if isinstance(monitor, str) and monitor.startswith("val_")
                   and monitor.endswith(suffix)), self)

    for found, group in itertools.groupby(callbacks, evaluator):
      with found._swapped_in():
        for callback in group:
          getattr(callback, method)(*args)

  def on_train_begin(self, logs=None):
    batches = (self.params or {}).get("steps")
    for optimizer in _averaging.averaging(self.model.optimizer):
      optimizer.set_model(self.model)
      if batches is not None:
        optimizer.check_batches_per_epoch(batches)
    self._call("on_train_begin", logs)

  def on_train_end(self, logs=None):
    found = [x for x in _averaging.averaging(self.model.optimizer)
             if x.built and not x.keeps_raw_weights]
    if found:
      if self._decay is not None:  # Keras has put the first in place.
        for optimizer in found:
          optimizer.assign_averages(self.model, self._evaluated)
      if self._dataset is not None:
        (self._recalibrated or self._recalibration.of(self.model)).assign()
    with contextlib.ExitStack() as stack:
      for optimizer in found if self._callbacks else ():
        stack.enter_context(optimizer._adopting(self.model))
      self._call("on_train_end", logs)

  def on_epoch_begin(self, epoch, logs=None):
    self._call("on_epoch_begin", epoch, logs)

  def on_epoch_end(self, epoch, logs=None):
    if self._others and any(name.startswith("val_") for name in logs or ()):
      logs.update(self._logs_of_others())
    self._run(self._callbacks, "on_epoch_end", epoch, logs)

  def _logs_of_others(self):
    """Evaluates the averages of the other decays: the logs, a dict."""
    found = {}
    for suffix, other in self._others.items():
      # On the data of the validation that has just ended.
      logs = self.model.evaluate(
          verbose=0, callbacks=[other], return_dict=True,
          _use_cached_eval_dataset=True)
      found.update({f"val_{name}{suffix}": x for name, x in logs.items()})
    return found

  def on_train_batch_begin(self, batch, logs=None):
    self._forget()
    self._call("on_train_batch_begin", batch, logs)

  def on_train_batch_end(self, batch, logs=None):
    self._run(self._at_batch_end, "on_train_batch_end", batch, logs)

  def on_test_begin(self, logs=None):
    self._recalibrated = None
    self._call("on_test_begin", logs)

  def on_test_end(self, logs=None):
    self._functions[0].swap_out()
    self._call("on_test_end", logs)

  def on_test_batch_begin(self, batch, logs=None):
    self._call("on_test_batch_begin", batch, logs)
    self._functions[0].put()

  def on_test_batch_end(self, batch, logs=None):
    self._call("on_test_batch_end", batch, logs)

  def on_predict_begin(self, logs=None):
    self._recalibrated = None
    self._call("on_predict_begin", logs)

  def on_predict_end(self, logs=None):
    self._functions[1].swap_out()
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
    self._model, self._swapped_in = model, in_place
    self._name, self._make_name = f"{kind}_function", f"make_{kind}_function"
    self._own = self._other = None

  def put(self):
    """Replaces the function, unless it is already replaced."""
    model, own = self._model, getattr(self._model, self._name)
    if self._other is not None and own is self._other:
      return

    def other(data):
      with self._swapped_in():
        return own(data)

    def make(force=False):
      self.swap_out()
      getattr(model, self._make_name)(force)

    self._own, self._other = own, other
    setattr(model, self._name, other)
    setattr(model, self._make_name, make)

  def swap_out(self):
    """Restores the model's function, if it is replaced."""
    model = self._model
    if self._other is not None and getattr(model, self._name) is self._other:
      setattr(model, self._name, self._own)
    if self._make_name in vars(model):
      delattr(model, self._make_name)
    self._own = self._other = None


def _are_default(callback, *names):
  return all(python_utils.is_default(getattr(callback, n)) for n in names)
