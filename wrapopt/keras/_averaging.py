"""The base class of the Keras wrappers whose averages replace weights."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import threading
from typing import Any, Literal, Optional, Union
import warnings

import keras
from keras.src import backend
import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt import _composition
from wrapopt._averages import _decay
from wrapopt._averages import _in_place
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt.keras import _chosen
from wrapopt.keras import _copies
from wrapopt.keras import _left
from wrapopt.keras import _state
from wrapopt.keras import _steps
from wrapopt.keras import _wrapper
from wrapopt.keras import batch_norm as _batch_norm
from wrapopt.keras._variables import path_of, value_of


# Held while averages are put in place of their variables, or back.
_swapping = threading.RLock()


class AveragingOptimizer(_wrapper.WrapperOptimizer):
  """A wrapper whose averages replace the weights in an evaluation.

  Attributes:
    keeps_raw_weights: Whether `fit` ends with the raw weights in the model.
    averages_batch_norm: Whether it averages statistics of batch normalizations.
  """

  averages_batch_norm = False
  # Whether an average follows from the variable itself.
  follows_variables = False

  def __init__(self, optimizer, name, keep_raw_weights, sum_duplicates,
               variables=None):
    super().__init__(optimizer, name, sum_duplicates)
    # In an object that neither Keras nor TensorFlow tracks.
    self._untracked.chosen = _chosen.checked(variables)
    self._untracked.stay = _left.Stay()
    self.keeps_raw_weights = _checks.boolean("keep_raw_weights",
                                             keep_raw_weights)
    for x in _steps.within(self):
      if isinstance(x, AveragingOptimizer) and x.follows_variables:
        raise ValueError(
            f"`optimizer` of a {type(self).__name__} must not be or hold a "
            f"{type(x).__name__} with a BEMA, which follows from the weights "
            "that this one replaces. Use one of the two.")
    for x in _steps.within(self) if keep_raw_weights else ():
      if x.use_ema if not isinstance(x, _wrapper.WrapperOptimizer) else (
          isinstance(x, AveragingOptimizer) and not x.keeps_raw_weights):
        raise ValueError(
            f"`optimizer` of a {type(self).__name__} with "
            "keep_raw_weights=True must not be or hold an optimizer that puts "
            "its averages in the weights at the end of fit(), got "
            f"{type(x).__qualname__}. Pass "
            + ("keep_raw_weights=True"
               if isinstance(x, _wrapper.WrapperOptimizer)
               else "use_ema=False") + " to it.")

  def _check_variables(self, variables):
    self._candidates(variables)

  def _candidates(self, variables):
    """{index: variable} of the variables that are averaged.

    The index is that among the variables that can be averaged.
    """
    return _chosen.of(self._untracked.chosen, type(self).__name__, [
        v for v in variables if not self._overwrite_variable_with_gradient(v)])

  def _found(self, variable, *rows):
    key = self._var_key(variable)
    if (self._untracked.chosen is not None and
        not any(key in row for row in rows) and
        key in map(self._var_key, self._trainable_variables)):
      raise KeyError(
          f"`variable` must be one that this {type(self).__name__} averages, "
          f"got '{path_of(variable)}', which its argument `variables` "
          "excludes. It is evaluated as it is.")
    return super()._found(variable, *rows)

  def build(self, variables: Sequence[keras.Variable]) -> None:
    if self.built:
      return
    super().build(variables)
    with tf.init_scope(), backend.name_scope(self.name, caller=self), (
        _replicas.colocated(value_of(self._iterations))):
      self._state.place = self.add_variable(
          shape=(), dtype="int64", name="place", initializer="zeros")

  def average(self, variable: keras.Variable) -> Any:
    """The average of a variable.

    Args:
      variable: A variable that the optimizer was built with.

    Returns:
      The `keras.Variable` that holds its average. Before the first step, an
      average is its variable: to set it there, call `seed_averages` before.

    Raises:
      RuntimeError: If the optimizer is not built, or the average is in place of
        its variable.
      KeyError: If the optimizer does not have the variable, or does not average
        it.
    """
    self._require_built("average")
    self._seed_unbegun()
    return self._readable("average", self._found(variable, self._rows[0]))

  def _readable(self, what, average):
    """What method `what` returns: an average, which must have a value."""
    _in_place.check(_lazy.stored(value_of(average)),
                    f"{what}() must not be called")
    return average

  def seed_averages(self) -> None:
    """Sets every average to its variable's current value.

    For a run that resumes from a checkpoint without averages: restore it with
    `tf.train.Checkpoint`, then call this. Keras's own loading seeds missing
    averages itself. The averages have then begun: from now on, only steps and
    your own code change them.

    Raises:
      RuntimeError: If the optimizer is not built, or averages are in place.
    """
    self._require_built("seed_averages")
    self._refuse_swapped_in("seed_averages")
    self._state.seed()

  @contextlib.contextmanager
  def averaged_weights(
      self, model: Optional[keras.Model] = None, *,
      decay: Optional[_decay.Decay] = None) -> Iterator[None]:
    """Puts the averages in place of the weights for a `with` block.

    Inside the block, every averaged variable holds its average, and the average
    has no value: `average` and reads of what it gave before raise an error.
    If a `tf.Variable` was taken before, or a `tf.function` traced before,
    TensorFlow's own op fails with its words, such as "Trying to read variable
    with wrong dtype. Expected float got INVALID". Leave the block first, or
    read the variable. After the block, also after an exception, both have their
    own values again, bit for bit. Buffers are exchanged: nothing is copied.
    Only if an average has another dtype than its variable, it is converted and
    copied into the variable.

    A step inside the block would start at the averages, and the averages would
    then contain it. So it raises an error and changes neither: a RuntimeError,
    or in a `tf.function` that was traced or compiled before, a
    `tf.errors.FailedPreconditionError`.

    Nor must anything else change the averaged variables, such as a step of
    another optimizer, or `set_weights`. At the end of the block, this is an
    error, too, and variables and averages get their values from before the
    block. In the block, a probe may train variables of its own.

    Args:
      model: The model whose variables get their averages; by default all
        variables of the optimizer. If given, the statistics of its batch
        normalizations are restored after the block, too, so that the block may
        call `recalibrate_batch_norm`.
      decay: Which of several decays; by default the first.

    Yields:
      None.

    Raises:
      RuntimeError: If the optimizer is not built, averages of this optimizer or
        of one inside are in place already, or a variable that has an average
        has left the model, as after `model.quantize`. After the block, if an
        average or an averaged variable was assigned in it, or a variable has
        left the model: all others then have their own values again.
      ValueError: If the optimizer averages no variable of `model`, or does not
        have the decay.
    """
    with self.swapped_in(model, decay, must_stay=True), (
        contextlib.nullcontext() if model is None
        else _batch_norm.restored(model)):
      yield

  @contextlib.contextmanager
  def swapped_in(self, model=None, decay=None, must_stay=False):
    """As `averaged_weights`, for a block that changes no variable.

    Args:
      model: As in `averaged_weights`.
      decay: As in `averaged_weights`.
      must_stay: Whether it is checked that the block changes no variable.
    """
    self._require_built("averaged_weights")
    with _swapping:
      self._refuse_swapped_in("averaged_weights")
      pairs = self._averaged(model, decay)
      self._state.swap_in([(value_of(v), value_of(s)) for v, s in pairs],
                          *self._beside(pairs, decay), must_stay=must_stay)
    try:
      yield
    finally:
      with _swapping:
        self._state.swap_out()
    self._check_left(model, "All other variables have their own values again. ")

  def averaged_model(
      self, model: keras.Model, *, decay: Optional[_decay.Decay] = None,
      recalibrate: Union[None, Iterable[Any], Literal[False]] = None,
  ) -> keras.Model:
    """Makes a copy of a model whose weights are the averages.

    The copy is not compiled, and shares nothing with the model. It is made by
    the model's `get_config` and `from_config`, and if these fail, by
    `keras.models.clone_model`, whose copy of a functional model is one of no
    other class. Weights without an average, such as those of frozen layers and
    those that `variables` excludes, are copied. Before any weight is set, the
    layers and weights of the copy are compared with those at the same places in
    the model.

    Example:

        optimizer.averaged_model(model, recalibrate=dataset).export("served")

    A model that is quantized loses the variables that have averages. So
    quantize the copy:

        optimizer.averaged_model(model).quantize("int8")

    Args:
      model: A model with variables that the optimizer averages.
      decay: Which of several decays; by default the first.
      recalibrate: A finite data set of training batches, with which
        `recalibrate_batch_norm` is called on the copy. None or False keeps the
        statistics of batch normalizations; None also warns, if the model has
        any that are trained, and the optimizer does not average them.

    Returns:
      A `keras.Model`.

    Raises:
      TypeError: If `model` is not a Keras model, or `recalibrate` is not a data
        set that can be read several times.
      RuntimeError: If the optimizer is not built, averages are in place, or a
        variable that has an average has left the model.
      ValueError: If the optimizer averages no variable of `model` or does not
        have the decay, if Keras cannot copy the model, if the copy has other
        layers or weights, or if `recalibrate` is infinite.
    """
    if not isinstance(model, keras.Model):
      raise TypeError(f"`model` must be a Keras model, got {model!r}.")
    _batch_norm.check_recalibrate(recalibrate)
    self._require_built("averaged_model")
    self._refuse_swapped_in("averaged_model")
    with self.swapped_in(model, decay):
      weights = model.get_weights()
    copied = _copies.copied(model, weights)
    if recalibrate is not None and recalibrate is not False:
      _batch_norm.recalibrate_batch_norm(copied, recalibrate)
    elif (recalibrate is None and not self.averages_batch_norm and
          _batch_norm.trained(model)):
      warnings.warn(_batch_norm.warning("averaged_model() copies averages of",
                                        model), stacklevel=2)
    return copied

  def _index_of(self, decay):
    """The index of a decay's row of averages; 0 for None."""
    if decay is not None:
      raise ValueError(f"`decay` must be None for a {type(self).__name__}, "
                       f"which keeps one average, got {decay}.")
    return 0

  def _averaged(self, model, decay=None):
    """The (variable, average) pairs of a model, by default all."""
    self._seed_unbegun()
    self._check_left(model)
    if model is None:
      return self._of(self._trainable_variables, decay)
    # Also of layers that have been frozen since.
    found = self._of(model.variables, decay)
    if self._rows[0] and not found:
      raise ValueError(
          f"`model` must have variables that this {type(self).__name__} "
          f"averages, got '{model.name}', which has none of them. A copy of a "
          "model has variables of its own.")
    return found

  def _check_left(self, model, before=""):
    """Raises an error if a variable that has an average has left its layer.

    Args:
      model: A model that must have had the variable, or None.
      before: A sentence of the error.
    """
    self._untracked.stay.check(self, model, before)

  def _of(self, variables, decay=None):
    row = self._rows[self._index_of(decay)]
    return [(v, row[self._var_key(v)]) for v in variables
            if self._var_key(v) in row]

  def averages_by_decay(self, model: keras.Model) -> list[Any]:
    """The averages of a model's variables, for snapshots.

    Returns:
      A list of (decay or None, number of steps of the averages or None,
      function). The function maps a variable to its average or None.
    """
    self._refuse_swapped_in("averages_by_decay")
    averages = {id(v): s for v, s in self._averaged(model)}
    return [(None, None, lambda v: averages.get(id(v)))]

  def set_model(self, model: keras.Model) -> None:
    """Sets the model that the optimizer trains."""
    if not isinstance(model, keras.Model):
      raise TypeError(f"`model` must be a Keras model, got {model!r}.")
    if self.built:
      self._check_left(model)

  def decays(self):
    """The names or decays of the averages, the default first: a list."""
    return [None]

  def check_batches_per_epoch(self, batches, fewer=0):
    """Raises an error if the averages are for epochs of other lengths.

    Args:
      batches: The number of batches in an epoch of `fit`.
      fewer: By how much it may be lower.
    """

  def check_decay(self, decay):
    """Raises an error if the optimizer does not have a decay or None."""
    self._index_of(decay)

  def assign_averages(self, model, decay):
    """Sets the variables of a model to their averages."""
    self._refuse_swapped_in("assign_averages")
    self._assign(self._averaged(model, decay))

  def _assign(self, pairs):
    """Sets variables to their averages: (variable, average) pairs."""
    _state.assign_all(pairs)

  def note_weights(self, variables):
    """Notes the variables' values, averages with which `fit` has ended."""
    if not _replicas.is_shared(value_of(self._iterations)):  # Else, not here.
      self._state.note_weights(_wrapper.steps_of(self), [
          v for v, _ in self._of(variables)])

  def warn_of_set_weights(self, variables):
    """Warns if variables were set after `fit` and averages not."""
    found = self._state.set_since(_wrapper.steps_of(self), variables)
    if found is not None:
      warnings.warn(
          "fit() goes on from averages of weights that are no longer in the "
          f"model: '{path_of(found)}' was set after the last fit(), its "
          "average was not. If the training begins anew, call "
          "optimizer.seed_averages() before fit().")

  def _beside(self, pairs, decay):
    """Arguments `more` and `saved` of `State.swap_in`."""
    del pairs, decay
    return (), lambda swapped_in: ()

  def check_no_file_waits(self):
    """Raises an error if averages of a file wait for the build."""
    if self._state.has_late():
      raise RuntimeError(
          f"A {type(self).__name__} must be built before it is evaluated with "
          "the averages of a file that was loaded, got one that is not. Call "
          "its build(variables), or pass `part` to EvaluateWithAverages.")

  @contextlib.contextmanager
  def _adopting(self, model):
    """Sets all averages of a model to its variables, if the block sets these.

    Args:
      model: A model whose variables are averages.

    Yields:
      None.
    """
    variables = [v for value, _ in self._averaged(model)
                 for v in _replicas.values(value_of(value))]
    before = [v.read_value() for v in variables]
    yield
    if all(np.array_equal(x, v) for x, v in zip(before, variables)):
      return
    its = {self._var_key(v) for v in model.variables}
    for average, variable in self._state.pairs():
      if self._var_key(variable) in its:
        _state.seed(average, variable)

  def finalize_variable_values(self, var_list):
    """Sets variables to their averages, as Keras does at the end of `fit`.

    With `keep_raw_weights`, they keep their values.

    Args:
      var_list: Variables that the optimizer was built with.

    Raises:
      RuntimeError: Without `keep_raw_weights`, if the averages are in place of
        the weights, or a variable that has an average has left its layer. Then,
        no variable is set.
    """
    if self.built:
      if not self.keeps_raw_weights:
        self._refuse_swapped_in("finalize_variable_values")
        self._check_left(None)
      self._seed_unbegun()  # Before averages inside change the variables.
    super().finalize_variable_values(var_list)
    if self.built and not self.keeps_raw_weights:
      pairs = list(self._finalized(var_list))
      self._assign(pairs)
      self.note_weights([v for v, _ in pairs])
      self._warn_of_raw(var_list)

  def _warn_of_raw(self, var_list):
    """Warns of frozen variables that keep raw weights at the end of `fit`."""
    its = set(map(self._var_key, var_list))
    raw = [v for v, s in self._of(self._trainable_variables)
           if self._var_key(v) not in its and not v.trainable
           and not np.array_equal(tf.cast(s, v.dtype), v)]
    if raw:
      warnings.warn(
          f"fit() ends with the raw weights of '{path_of(raw[0])}', "
          "which is frozen, and with the averages of the others. Call "
          "compile() after you have changed which variables are trained, as by "
          "`trainable` or enable_lora(). To evaluate its average, too, use "
          "averaged_weights(model) or averaged_model(model).")

  def _finalized(self, var_list):
    """The (variable, average) pairs with which `fit` ends."""
    return self._of(var_list)

  def _check_writable(self):
    # No model that is loaded has the variables.
    if self.built:
      self._check_left(None)
    super()._check_writable()

  def _refuse_swap_ema_weights(self):
    name = type(self).__name__
    raise ValueError(
        f"SwapEMAWeights must not be used with a {name}: it exchanges averages "
        f"of Keras's use_ema, not those of {name}. Use "
        "wrapopt.keras.EvaluateWithAverages() instead.")

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), "keep_raw_weights": self.keeps_raw_weights}

  def _config_of_variables(self):
    """The argument `variables` in a configuration."""
    return {"variables": _chosen.serialized(
        self._untracked.chosen, type(self).__name__,
        self._trainable_variables if self.built else ())}

  @classmethod
  def from_config(cls, config, custom_objects=None):
    if isinstance(config.get("variables"), dict):  # A function.
      config = {**config, "variables": keras.saving.deserialize_keras_object(
          config["variables"], custom_objects=custom_objects)}
    return super().from_config(config, custom_objects)


def averaging(optimizer):
  """The outermost optimizers that keep averages: a list."""
  if isinstance(optimizer, AveragingOptimizer):
    return [optimizer]
  return [found for inner in _steps.optimizers_in(optimizer)
          for found in averaging(inner)]


def checked_optimizer(optimizer):
  """An argument `optimizer` of a callback, checked."""
  if optimizer is None or isinstance(optimizer,
                                     (str, keras.optimizers.Optimizer)):
    return optimizer
  raise TypeError("`optimizer` must be a Keras optimizer or the name of an "
                  f"attribute of the model, got {optimizer!r}.")


def optimizer_of(model, optimizer, subject):
  """The optimizer of a model that keeps averages, or that holds some that do.

  Args:
    model: A Keras model.
    optimizer: The argument of a callback: the optimizer, the name of the
      attribute that holds it, or None for that of `compile`.
    subject: The name of the callback.

  Raises:
    ValueError: If it keeps no averages.
  """
  found, where = optimizer, "was passed as `optimizer`"
  if optimizer is None:
    found = getattr(model, "optimizer", None)
    where = "model.compile() holds" + (
        " by default" if type(found) is keras.optimizers.RMSprop else "")
  elif isinstance(optimizer, str):
    found, where = getattr(model, optimizer, None), f"is model.{optimizer}"
  if isinstance(found, keras.optimizers.Optimizer) and averaging(found):
    return found
  _composition.check_import(f"The optimizer of {subject}", found,
                            AveragingOptimizer)
  others = [name for name, x in vars(model).items()
            if isinstance(x, keras.optimizers.Optimizer) and averaging(x)]
  raise ValueError(
      f"{subject} needs an optimizer that keeps averages, such as "
      "wrapopt.keras.MovingAverage, got "
      f"{None if found is None else type(found).__qualname__}, which {where}. "
      + (f"Pass {' or '.join(f'optimizer={x!r}' for x in others)}, the "
         "attribute of the model that keeps some." if others else
         "If another optimizer trains the model, pass it as `optimizer`."))
