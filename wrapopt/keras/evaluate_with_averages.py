"""A callback that puts averages in place of the weights in evaluations."""

from collections.abc import Iterable
import contextlib
import copy
import functools
import itertools
from typing import Any, Literal, Optional, Union
import warnings

import keras
from keras.src.utils import python_utils

from wrapopt import _checks
from wrapopt._averages import _decay
from wrapopt.keras import _optimizers
from wrapopt.keras import batch_norm
from wrapopt.keras import snapshots
from wrapopt.keras import swa
from wrapopt.keras._evaluation import _callback_after
from wrapopt.keras._evaluation import _callbacks
from wrapopt.keras._evaluation import _swapped_function
from wrapopt.keras._steps import _views

_REFUSED = {
    keras.callbacks.BackupAndRestore:
        "a BackupAndRestore: it would resume the training from averages. Pass "
        "it to fit() next to EvaluateWithAverages.",
    keras.callbacks.SwapEMAWeights:
        "a SwapEMAWeights: it exchanges averages of Keras's use_ema. Remove "
        "it.",
    snapshots.Snapshots:
        "a Snapshots: while averages are in place, it would write raw weights "
        "as averages. Pass it to fit() next to EvaluateWithAverages.",
}


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

  With `swap_on_epoch=True`, the same holds for the callbacks that come after
  this one in the list of `fit`, but only in `on_epoch_end`. It is for callbacks
  that a program adds by itself, such as the one with which KerasTuner saves the
  best epoch. Those before it see the raw weights. So pass BackupAndRestore
  before it:

      tuner.search(..., callbacks=[
          wrapopt.keras.EvaluateWithAverages(swap_on_epoch=True)])

  A callback that keeps weights of an epoch, such as EarlyStopping with
  `restore_best_weights`, must see the averages that validation evaluates. Else,
  it keeps the raw weights, with a warning. If a callback changes an averaged
  variable while the averages are in place, as by a training of its own, this is
  an error. A `test_step` must not do it either, which is not checked.

  After `fit`, the model holds the averages, as with Keras's `use_ema`. If one
  of these callbacks then sets weights, like EarlyStopping, the averages of all
  decays are set to these weights. An optimizer with `keep_raw_weights=True`
  keeps the raw weights in the model.

  The moving statistics of batch normalizations come from the raw weights and do
  not fit the averages. With `recalibrate=dataset`, each evaluation first
  computes those that fit, as `recalibrate_batch_norm` does, in one pass over
  the data set. They are in place together with the averages, also for
  `callbacks` and at the end of `fit`. During the training, the model keeps its
  own statistics, bit for bit.

  With `decay="all"`, validation in `fit` evaluates each batch with the averages
  of all decays. Metrics, seeds and other variables that are not trained have
  values of their own for each decay; a metric that keeps its state elsewhere is
  refused. The training goes on with the state of the first, and the callbacks'
  `on_test_...` methods see its logs. The names of the logs of all but the first
  end in the decay, such as `val_loss_0.5`. A callback in `callbacks` that
  monitors one of these logs runs with the averages of that decay in place. It
  needs `mode`, since Keras does not know these names:

      model.compile(wrapopt.keras.MovingAverage("adam", [0.999, 0.99]), ...)
      model.fit(..., validation_data=..., callbacks=[
          wrapopt.keras.EvaluateWithAverages([
              keras.callbacks.ModelCheckpoint(
                  "0.99.keras", monitor="val_loss_0.99", mode="min",
                  save_best_only=True),
          ], decay="all")])

  A model may have optimizers that `compile` does not hold, such as a GAN with
  one for each of its networks. `optimizer` names the one whose averages are
  used, and `part` the network that it trains. `fit` then ends with its averages
  in the model, too. For several of them, pass a callback for each:

      gan.compile(d_optimizer=keras.optimizers.Adam(),
                  g_optimizer=wrapopt.keras.MovingAverage("adam", 0.999))
      gan.fit(..., callbacks=[wrapopt.keras.EvaluateWithAverages(
          optimizer="g_optimizer", part="generator")])

  The averages are those of the outermost wrapper that keeps averages, which may
  be inside Keras's LossScaleOptimizer or MultiOptimizer. A float32 average of a
  float16 or bfloat16 variable is converted for each batch. All other averages
  exchange buffers with their variables.
  """

  def __init__(
      self, callbacks: Optional[Iterable[keras.callbacks.Callback]] = None, *,
      decay: Union[None, _decay.Decay, Literal["all"]] = None,
      recalibrate: Union[None, Iterable[Any], Literal[False]] = None,
      swap_on_epoch: bool = False,
      optimizer: Union[None, str, keras.optimizers.Optimizer] = None,
      part: Union[None, str, keras.Model] = None) -> None:
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
      swap_on_epoch: Whether callbacks that come after this one in the list of
        `fit` run `on_epoch_end` with the averages in place.
      optimizer: The optimizer whose averages are used, or the name of the
        attribute of the model that holds it; by default that of `compile`.
      part: The model in the model whose weights the optimizer trains, or the
        name of the attribute that holds it; by default the whole model.
        `recalibrate` then has its inputs.

    Raises:
      TypeError: If `callbacks` contains anything but callbacks, `recalibrate`
        is not a data set that can be read several times, or another argument
        has a wrong type.
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
    self._warns = recalibrate is None
    self._swap_on_epoch = _checks.boolean("swap_on_epoch", swap_on_epoch)
    self._optimizer = _optimizers.checked_optimizer(optimizer)
    if part is not None and not isinstance(part, (str, keras.Model)):
      raise TypeError("`part` must be a Keras model or the name of an "
                      f"attribute of the model, got {part!r}.")
    self._part = part
    self._callbacks = _callbacks.checked(callbacks, _REFUSED)
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
    self._forget_model()

  def _forget_model(self):
    """Sets all that `set_model` sets to what it is before."""
    self._model = None
    self._trains = None
    self._recalibration = batch_norm.Recalibration(self._dataset)
    # By suffix of logs, that of the first decay is "": the decays, the
    # statistics for each, the evaluations of all others.
    self._decays, self._recalibrated, self._others = {}, {}, {}
    # Whether all are evaluated, and the logs of all others.
    self._is_fit, self._logs_of_others = False, None
    # Whether the first epoch tells how many batches an epoch has.
    self._counts_batches, self._last_batch = False, 0
    self._functions = []

  def __deepcopy__(self, memo):
    """A copy that has no model yet: KerasTuner makes one for each trial."""
    copied = object.__new__(type(self))
    # They stay what they are: TensorFlow cannot copy a data set, and a copy of
    # an optimizer trains nothing.
    memo.update((id(x), x)
                for x in (self._dataset, self._optimizer, self._part))
    memo[id(self)] = copied
    copied._dataset = self._dataset
    copied._forget_model()
    for name, value in vars(self).items():
      if name not in vars(copied):
        vars(copied)[name] = copy.deepcopy(value, memo)
    return copied

  def set_params(self, params):
    super().set_params(params)
    for callback in self._callbacks:
      callback.set_params(params)

  def set_model(self, model):
    optimizer = _optimizers.optimizer_of(model, self._optimizer,
                                        type(self).__name__)
    found = _optimizers.averaging(optimizer)
    decays = found[0].decays() if self._decay == "all" else [self._decay]
    for x in found:
      for decay in decays:
        x._averages.index_of(decay)
    part = self._part_of(model)
    after = (_callback_after.CallbackAfter.all_after(self)
             if self._swap_on_epoch else [])
    self._check_others(model, found)
    _callbacks.check_end(found, [*self._callbacks, *after])
    self._check_batch_norm(part, found)
    super().set_model(model)
    self._trains = optimizer, part
    self._decays = {f"_{decay}" if k else "": decay
                    for k, decay in enumerate(decays)}
    self._is_fit = False
    self._recalibrated, self._others = {}, {}
    self._functions = [
        _swapped_function.SwappedFunction(model, kind, self._swapped_in)
        for kind in ("test", "predict")]
    for callback in self._callbacks:
      callback.set_model(model)
    if self._swap_on_epoch:
      _callback_after.CallbackAfter.replace_after(self)

  def _part_of(self, model):
    part = (getattr(model, self._part, None) if isinstance(self._part, str)
            else model if self._part is None else self._part)
    if not isinstance(part, keras.Model):
      raise ValueError(
          "`part` must be the name of an attribute of the model that is a "
          f"Keras model, got '{self._part}' for '{model.name}', whose "
          f"attribute is {part!r}.")
    return part

  def _averaging(self):
    """The optimizers that keep averages: a list."""
    return _optimizers.averaging(self._trains[0])

  def _check_others(self, model, found):
    """Raises an error or warns if other callbacks do not fit this one."""
    for x in found:
      x._refuse_swapped_in(
          f"{type(self).__name__}.set_model",
          ", or, in a callback of an EvaluateWithAverages, pass no other one to"
          " evaluate() or predict()")
    callbacks = _callback_after.CallbackAfter.list_with(self)
    its = _all_wrappers(found)
    for where, other in _evaluators(callbacks, "callbacks"):
      if other is not self and its & _all_wrappers(_optimizers.averaging(
          _optimizers.optimizer_of(model, other._optimizer,
                                  type(other).__name__))):
        raise ValueError(
            f"Only one {type(self).__name__} must put the averages of an "
            f"optimizer in place, got another {type(other).__name__}, "
            f"{where}. Pass all their callbacks to one; decay=\"all\" "
            "evaluates several decays.")
    i = next((i for i, c in enumerate(callbacks) if c is self), 0)
    for c in callbacks[:i] if self._swap_on_epoch else callbacks:
      monitor = getattr(c, "monitor", None)
      if (getattr(c, "restore_best_weights", False)
          and not found[0].keeps_raw_weights) or (
              getattr(c, "save_best_only", False)
              and isinstance(monitor, str) and monitor.startswith("val_")):
        name = type(c).__name__
        warnings.warn(
            f"{name} keeps the raw weights of an epoch, and validation "
            f"evaluates the averages: '{monitor}' is not that of the weights "
            f"that it keeps. Pass it to {type(self).__name__}: "
            f"callbacks=[{type(self).__name__}([{name}(...)]), ...].")

  def _check_batch_norm(self, model, found):
    """Raises an error or warns if statistics do not fit the averages."""
    averages = any(x._store.statistics is not None for x in found)
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
  def _swapped_in(self, suffix="", must_stay=False):
    optimizer, part = self._trains
    if not optimizer.built and (
        self._optimizer is None or self._part is not None and part.built):
      with self.model.distribute_strategy.scope():
        optimizer.build(part.trainable_variables)
    with contextlib.ExitStack() as stack:
      for x in self._averaging():
        if x.built:
          stack.enter_context(x._averages.in_place(
              part, self._decays[suffix], must_stay))
        else:  # Part of a MultiOptimizer may train nothing.
          x._averages.check_no_file_waits()
      if self._dataset is not None:
        if suffix not in self._recalibrated:
          self._recalibrated[suffix] = self._recalibration.of(part)
        stack.enter_context(self._recalibrated[suffix].swapped_in())
      yield

  def _run(self, callbacks, method, *args):
    """Runs callbacks with the averages in place that they monitor."""

    def suffix_of(callback):
      monitor = getattr(callback, "monitor", None)
      return next((suffix for suffix in self._decays
                   if suffix and isinstance(monitor, str)
                   and monitor.startswith("val_")
                   and monitor.endswith(suffix)), "")

    for suffix, group in itertools.groupby(callbacks, suffix_of):
      with self._swapped_in(suffix, must_stay=True):
        for callback in group:
          getattr(callback, method)(*args)

  def on_train_begin(self, logs=None):
    self._is_fit = True
    if len(self._decays) > 1 and not _has_keras_test_function(self.model):
      raise ValueError(
          "`decay` must not be \"all\" for a model with a "
          "make_test_function() of its own, got "
          f"{type(self.model).__qualname__}: other decays must evaluate the "
          "batches that it draws. Pass one decay.")
    batches = (self.params or {}).get("steps")
    self._counts_batches = batches is None
    for optimizer in self._averaging():
      optimizer.set_model(self._trains[1])
      optimizer._averages.warn_of_set_weights(
          self._trains[1].variables)
    if batches is not None:
      self._check_batches(batches)
    self._call("on_train_begin", logs)

  def _check_batches(self, batches, fewer=0):
    # Another optimizer may take any number of steps in a batch.
    for optimizer in self._averaging() if self._optimizer is None else ():
      for x in [optimizer, *_views.within(optimizer)]:
        if isinstance(x, swa.SWA):
          x.check_batches_per_epoch(batches, fewer)

  def on_train_end(self, logs=None):
    part = self._trains[1]
    built = [x for x in self._averaging() if x.built]
    if self._optimizer is not None:  # Keras knows only that of compile().
      for optimizer in built:
        optimizer.finalize_variable_values(optimizer._trainable_variables)
    found = [x for x in built if not x.keeps_raw_weights]
    if found:
      if self._decay is not None:  # The first is in place.
        for optimizer in found:
          optimizer._averages.assign(part, self._decays[""])
      if self._dataset is not None:
        (self._recalibrated.get("") or self._recalibration.of(part)).assign()
    self._end(self._callbacks, logs)

  def _end(self, callbacks, logs):
    """Runs `on_train_end` of callbacks, which may set averages."""
    with contextlib.ExitStack() as stack:
      for optimizer in self._averaging() if callbacks else ():
        if optimizer.built and not optimizer.keeps_raw_weights:
          stack.enter_context(optimizer._averages.adopting(
              self._trains[1]))
      for callback in callbacks:
        callback.on_train_end(logs)
    for optimizer in self._averaging():
      if optimizer.built and not optimizer.keeps_raw_weights:
        optimizer._averages.note_weights(self._trains[1].variables)

  def on_epoch_begin(self, epoch, logs=None):
    self._call("on_epoch_begin", epoch, logs)

  def on_epoch_end(self, epoch, logs=None):
    if self._counts_batches and not self.model.stop_training:
      self._counts_batches = False  # Keras now knows the number, too.
      # Keras has found no data for the last batch that it began.
      self._check_batches(self._last_batch, self.model.steps_per_execution - 1)
    if len(self._decays) > 1 and any(
        name.startswith("val_") for name in logs or ()):
      if not self._is_fit:
        raise RuntimeError(
            "An EvaluateWithAverages(decay=\"all\") must not be passed to "
            "evaluate() or predict() while fit() uses it, got such a call. "
            "Pass another one.")
      logs.update(self._logs_of_others)
    self._run(self._callbacks, "on_epoch_end", epoch, logs)

  def on_train_batch_begin(self, batch, logs=None):
    self._last_batch = batch
    self._recalibrated = {}  # The weights may change.
    self._call("on_train_batch_begin", batch, logs)

  def on_train_batch_end(self, batch, logs=None):
    self._run(self._at_batch_end, "on_train_batch_end", batch, logs)

  def on_test_begin(self, logs=None):
    self._recalibrated, self._others = {}, {}
    self._call("on_test_begin", logs)

  def on_test_end(self, logs=None):
    self._functions[0].swap_out()
    self._functions[0].others = []
    self._logs_of_others = {
        f"val_{name}{suffix}": x for suffix, other in self._others.items()
        for name, x in other.result().items()}
    self._others = {}
    self._call("on_test_end", logs)

  def on_test_batch_begin(self, batch, logs=None):
    self._call("on_test_batch_begin", batch, logs)
    if self._is_fit and not self._others:
      self._others = {
          suffix: _swapped_function.OtherEvaluation(
              self.model, functools.partial(self._swapped_in, suffix))
          for suffix in self._decays if suffix}
      self._functions[0].others = list(self._others.values())
    self._functions[0].put()

  def on_test_batch_end(self, batch, logs=None):
    self._call("on_test_batch_end", batch, logs)

  def on_predict_begin(self, logs=None):
    self._recalibrated = {}
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


def _evaluators(callbacks, where):
  """(where it is, callback) of all EvaluateWithAverages: an iterator."""
  for i, callback in enumerate(callbacks):
    if isinstance(callback, EvaluateWithAverages):
      place = f"{where}[{i}]"
      yield place, callback
      yield from _evaluators(callback._callbacks,
                             f"in that of {place}: callbacks")


def _all_wrappers(optimizers):
  """The ids of optimizers and of all wrappers inside: a set."""
  return {id(x) for opt in optimizers for x in opt._wrappers()}


def _has_keras_test_function(model):
  name = "make_test_function"
  return getattr(type(model), name) is getattr(keras.Model, name)


def _are_default(callback, *names):
  return all(python_utils.is_default(getattr(callback, n)) for n in names)
