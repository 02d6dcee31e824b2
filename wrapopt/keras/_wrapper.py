"""The base classes of the wrappers of Keras optimizers."""

import collections.abc
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import copy
import threading
import typing
from typing import Any, Literal, Optional, Union
import warnings

import keras
from keras.src import backend
from keras.src.saving.keras_saveable import KerasSaveable
import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt import _decays
from wrapopt import _exchange
from wrapopt import _inner_keras
from wrapopt import _lazy
from wrapopt import _replicas
from wrapopt import ops
from wrapopt.keras import _steps
from wrapopt.keras import batch_norm as _batch_norm

_value = _inner_keras.value

def _is_made(wrapper):
  return "_held" in vars(wrapper)


def _of_inner(name):
  """An attribute that reads and writes that of the inner optimizer."""
  def read(self):
    return getattr(self._inner(), name) if _is_made(self) else None

  def write(self, value):
    # Keras's constructor sets it before the inner optimizer is known.
    if _is_made(self):
      setattr(self._inner(), name, value)

  return property(read, write)


class WrapperOptimizer(keras.optimizers.Optimizer, _steps.Follower):
  """A Keras optimizer around another one, with averages of the weights.

  Learning rate, count of steps, clipping, accumulation, weight decay and loss
  scaling are the inner optimizer's. When saved or restored, the wrapper has the
  structure of the inner optimizer, plus the averages.
  """

  # TensorFlow tracks the inner optimizer instead, see `_trackable_children`.
  _self_setattr_tracking = False

  # The reason why a public class must not hold another of its class.
  why_not_twice: Optional[str] = None

  def __init__(self, optimizer, name, sum_duplicates):
    if isinstance(optimizer, (str, dict)):
      optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
      raise TypeError(
          "`optimizer` must be a Keras optimizer, or the name or configuration "
          f"of one, got {type(optimizer).__module__}."
          f"{type(optimizer).__qualname__}. For an optimizer of "
          "tf.compat.v1.train, use the wrappers in `wrapopt`.")
    public = next(c for c in type(self).__mro__ if "why_not_twice" in vars(c))
    if any(isinstance(x, public)
           for x in [optimizer, *_steps.within(optimizer)]):
      raise ValueError(
          f"`optimizer` of {public.__name__} must not be or hold a "
          f"{public.__name__}: {self.why_not_twice}. Got "
          f"{type(optimizer).__qualname__}.")
    for x in [optimizer, *_steps.within(optimizer)]:
      for name_of in ("apply", "apply_gradients"):
        if isinstance(x, WrapperOptimizer) and (
            getattr(type(x), name_of) is not getattr(WrapperOptimizer,
                                                     name_of)):
          raise ValueError(
              f"`optimizer` of {public.__name__} must not be or hold a wrapper "
              f"that overrides {name_of}(), which would not be called, got "
              f"{type(x).__qualname__}. Make it the outermost wrapper.")
    super().__init__(learning_rate=_no_rate, name=name)
    # The inner optimizer's count replaces that of Keras's constructor.
    self._untrack_variable(self._iterations)
    vars(self)["_iterations"] = optimizer._iterations
    # In an object that neither Keras nor TensorFlow tracks.
    self._held = _Held(optimizer)
    self.sum_duplicates = _checks.boolean("sum_duplicates", sum_duplicates)
    # Keras saves the state under the name of its class.
    kind = type(self).__name__
    self._state = type(f"{kind}Averages", (State,), {})(
        f"wrapopt_{kind}", self._settle)

  # Steps

  def _inner(self):
    """The optimizer that this wraps."""
    return self._held.optimizer

  @property
  def fused(self) -> bool:
    """Whether one native op takes the inner optimizer's step: a bool.

    Even if True, the inner optimizer takes the step in a `tf.distribute`
    strategy.
    """
    return all(map(_inner_keras.has_rule, _steps.innermost(self)))

  def build(self, variables: Sequence[keras.Variable]) -> None:
    """Makes the variables of the inner optimizer and of this one.

    Args:
      variables: The variables to train. If the inner optimizer is built, those
        that it was built with are trained instead.
    """
    if self.built:
      return
    inner = self._inner()
    # It may train all of its variables later, when layers are not frozen.
    variables = list(inner._trainable_variables if inner.built else variables)
    self._check_variables(variables)
    if not inner.built:
      with backend.name_scope(inner.name, caller=inner):
        inner.build(variables)
      inner.built = True
    self.__dict__.update(
        _trainable_variables=variables, built=True,
        _trainable_variables_indices={
            self._var_key(v): i for i, v in enumerate(variables)})
    # After the build, in which Keras's MultiOptimizer makes its optimizers.
    self._held.followed = _steps.followed(inner, [self])
    # Variables are made eagerly, even if a tf.function is being traced.
    with tf.init_scope(), backend.name_scope(self.name, caller=self):
      self._make_state(variables)

  def _check_variables(self, variables):
    """Raises an error for variables for which `_make_state` would fail."""

  def _make_state(self, variables):
    """Makes the variables of this wrapper."""
    raise NotImplementedError

  def _make_average(self, variable, name, dtype=None):
    """Makes a variable that starts at the value of another one, if it has one.

    Args:
      variable: A trained variable.
      name: The kind of the new variable, such as "average".
      dtype: Its dtype; by default that of `variable`.

    Returns:
      A `keras.Variable`.
    """
    value = _value(variable)
    dtype = dtype or value.dtype
    path = path_of(variable)
    has_value = bool(value.is_initialized())
    with self._distribution_strategy.extended.colocate_vars_with(value):
      average = self.add_variable(
          shape=value.shape, dtype=tf.as_dtype(dtype).name,
          initializer=((lambda shape, dtype: tf.cast(value, dtype))
                       if has_value else "zeros"),
          name=f"{path.replace('/', '_')}_{name}")
    average = self._wrap_average(average, variable)
    self._state.add(name, average, variable)
    return average

  def _wrap_average(self, average, variable):
    """What stands for a new average, a `keras.Variable`, of a variable."""
    del variable
    return average

  def _make_count(self, name, value, seeded=None, missing=None):
    """Makes an int64 variable that is saved and restored with the averages.

    Args:
      name: Its name.
      value: Its value at the start, and if a file has no averages.
      seeded: Its value after averages are seeded; by default `value`.
      missing: Its value if a file has averages and not this count; by default
        `value`.

    Returns:
      A `keras.Variable`.
    """
    count = self.add_variable(
        shape=(), dtype="int64", name=name,
        initializer=lambda shape, dtype: tf.constant(value, dtype, shape))
    self._state.add_count(name, count, Count(
        value, value if seeded is None else seeded,
        value if missing is None else missing))
    return count

  def _make_counts(self, name, *args, **kwargs):
    """Makes a count for each optimizer in `_parts`: a Row by their keys."""
    return Row({
        key: self._make_count(name + (f"_{i}" if i else ""), *args, **kwargs)
        for i, key in enumerate(self._parts())})

  def _parts(self):
    """{`Step.part`: optimizer} of the optimizers inside that take steps.

    There are several in a MultiOptimizer. One that trains nothing takes none.
    """
    return {opt._var_key(opt._trainable_variables[0]): opt
            for opt in _steps.innermost(self)
            if opt.built and opt._trainable_variables}

  # An average that has not begun is its variable. Averages begin with the first
  # step that they follow. Until then, all that reads them, and the first step,
  # calls `_settle`.

  def _make_begun(self):
    """Makes the variable that tells whether the averages have begun: 0 or 1."""
    self._held.marks = True
    return self._make_count("begun", 0, seeded=1, missing=1)

  def _has_begun(self):
    """Whether the averages have begun: a bool."""
    return int(self._begun.numpy()) != 0

  def _mark_begun(self):
    """Notes, in a step, that the averages have begun."""
    if tf.executing_eagerly():
      if self._held.is_marked:
        return
      self._held.is_marked = True
    self._begun.value.assign(1)

  def _settle(self):
    """Sets averages that have not begun to their variables' values."""
    if not self.built or self._state.is_in_place():
      return
    with tf.init_scope():
      self._state.complete()
      if not self._has_begun():
        self._state.seed_values()

  def _begin(self):
    """Prepares the averages for a step, when it is taken or traced."""
    if self._state.has_new_values():
      self._held.is_settled = self._held.is_marked = False
    # An eager step may only accumulate, or fail, before the first one that the
    # averages follow.
    may_begin = (self._held.marks and not self._held.is_marked and
                 tf.executing_eagerly())
    if may_begin or not self._held.is_settled:
      self._settle()
      # TensorFlow initializes variables of a model that is built in a
      # tf.function after the trace, and traces the function again.
      with tf.init_scope():
        self._held.is_settled = all(
            _value(v).is_initialized() for v in self._trainable_variables)

  @ops.not_converted
  def apply(
      self, grads: Sequence[Any],
      trainable_variables: Optional[Sequence[keras.Variable]] = None) -> None:
    """Takes the inner optimizer's step, and updates the averages.

    Args:
      grads: A list of gradients: tensors, `tf.IndexedSlices` or None.
      trainable_variables: As many variables. They may be left out once the
        optimizer is built.

    Raises:
      ValueError: If no variable has a gradient, or a variable is not one that
        the optimizer was built with.
      RuntimeError: If the averages are in place of the weights.
      NotImplementedError: If the inner optimizer takes a step in a way that
        averages cannot follow.
    """
    grads = list(grads)
    if grads:
      with tf.control_dependencies(self._prepare(trainable_variables)):
        self._held.followed.apply(grads, trainable_variables)

  def _prepare(self, trainable_variables):
    """Prepares for a step; returns the operations that it must wait for."""
    self._refuse_in_place("apply")
    if not self.built:
      if trainable_variables is None:
        raise ValueError(
            "`trainable_variables` must be given to the first apply(), got "
            "None. Or call build(trainable_variables) first.")
      trainable_variables = list(trainable_variables)
      self.build(trainable_variables)
    for wrapper in self._wrappers():
      wrapper._begin()
    return _exchange.check(
        [_value(wrapper._state.place) for wrapper in self._wrappers()
         if wrapper._state.place is not None])

  @ops.not_converted
  def apply_gradients(self, grads_and_vars):
    """As `apply`, by the `apply_gradients` of the inner optimizer.

    `fit` calls it.

    Args:
      grads_and_vars: An iterable of (gradient, variable).

    Returns:
      The variable that counts the steps.
    """
    grads_and_vars = list(grads_and_vars)
    first = self._prepare([v for _, v in grads_and_vars])
    with tf.control_dependencies(first):
      self._held.followed.apply_gradients(grads_and_vars)
    return self.iterations

  def _found(self, variable, *rows):
    """The value of a variable in the first row that has it."""
    for row in rows:
      if self._var_key(variable) in row:
        return row[self._var_key(variable)]
    raise KeyError(
        f"`variable` must be one that this {type(self).__name__} was built "
        f"with, got '{path_of(variable)}'. A copy of a model has variables of "
        "its own.")

  def _require_built(self, what):
    if not self.built:
      raise RuntimeError(
          f"{what}() must be called after the first step, or after "
          f"build(variables), got a {type(self).__name__} that is not built.")

  # Attributes and methods of the inner optimizer.

  @property
  def iterations(self):
    return self._inner().iterations

  @property
  def learning_rate(self):
    return self._inner().learning_rate

  @learning_rate.setter
  def learning_rate(self, learning_rate):
    self._inner().learning_rate = learning_rate

  weight_decay = _of_inner("weight_decay")
  clipnorm = _of_inner("clipnorm")
  global_clipnorm = _of_inner("global_clipnorm")
  clipvalue = _of_inner("clipvalue")
  gradient_accumulation_steps = _of_inner("gradient_accumulation_steps")

  @property
  def loss_scale_factor(self):
    if not _is_made(self):
      return None
    scaling = self._loss_scaling()
    if scaling is None:
      return self._inner().loss_scale_factor
    return scaling.dynamic_scale if scaling.built else scaling.initial_scale

  @loss_scale_factor.setter
  def loss_scale_factor(self, factor):
    if not _is_made(self):
      return
    # A LossScaleOptimizer of Keras sets it in its inner optimizer.
    if self._loss_scaling() is not None:
      raise ValueError(
          f"`loss_scale_factor` of a {type(self).__qualname__} around a "
          "LossScaleOptimizer must not be set, neither by the user nor by "
          "another LossScaleOptimizer around it: gradients would be unscaled "
          "twice. Pass auto_scale_loss=False to compile(), which otherwise "
          "wraps the optimizer of a mixed_float16 model in one.")
    self._inner().loss_scale_factor = factor

  def _loss_scaling(self):
    """The LossScaleOptimizer inside, or None."""
    return next((x for x in _steps.within(self)
                 if isinstance(x, keras.optimizers.LossScaleOptimizer)), None)

  def scale_loss(self, loss):
    return self._inner().scale_loss(loss)

  def exclude_from_weight_decay(self, var_list=None, var_names=None):
    # Keras's LossScaleOptimizer and MultiOptimizer do not pass it on.
    for opt in _steps.innermost(self):
      opt.exclude_from_weight_decay(var_list, var_names)

  def finalize_variable_values(self, var_list):
    self._inner().finalize_variable_values(var_list)

  # State

  @property
  def variables(self):
    """The variables of the inner optimizer, without averages.

    Keras's LossScaleOptimizer saves this list.
    """
    return self._inner().variables

  def set_weights(self, weights):
    self._inner().set_weights(weights)

  def save_own_variables(self, store):
    self._inner().save_own_variables(store)

  def load_own_variables(self, store):
    self._inner().load_own_variables(store)

  @property
  def averages_of_wrappers(self):
    """The objects with which Keras saves and loads the averages: a list."""
    # Keras does not look into `_held`: also those inside of its own optimizers.
    return [wrapper._state for wrapper in reversed(self._wrappers())]

  def _refuse_in_place(self, what):
    for wrapper in self._wrappers():
      wrapper._state.refuse_in_place(what)

  def _wrappers(self):
    """This wrapper and the wrappers inside: a list."""
    return [opt for opt in [self, *_steps.within(self)]
            if isinstance(opt, WrapperOptimizer)]

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    if save_type == "checkpoint":  # It would hold the two exchanged.
      self._refuse_in_place("tf.train.Checkpoint.write")
    return {**self._inner()._trackable_children(save_type, **kwargs),
            self._state.name: self._state}

  def _lookup_dependency(self, name, *args, **kwargs):
    if name == self._state.name:
      self._refuse_in_place("tf.train.Checkpoint.read")
      return self._state
    return self._inner()._lookup_dependency(name, *args, **kwargs)

  @property
  def _deferred_dependencies(self):
    # Values from a checkpoint for variables that the inner optimizer will make
    # later. It looks them up then.
    self._inner()._maybe_initialize_trackable()
    return self._inner()._deferred_dependencies

  def get_config(self) -> dict[str, Any]:
    return {"optimizer": keras.saving.serialize_keras_object(self._inner()),
            "name": self.name, "sum_duplicates": self.sum_duplicates}

  @classmethod
  def from_config(cls, config, custom_objects=None):
    # A copy, because Keras modifies its argument.
    optimizer = keras.saving.deserialize_keras_object(
        copy.deepcopy(config["optimizer"]), custom_objects=custom_objects)
    return cls(**{**config, "optimizer": optimizer})


class AveragingOptimizer(WrapperOptimizer):
  """A wrapper whose averages replace the weights in an evaluation.

  Attributes:
    keeps_raw_weights: Whether `fit` ends with the raw weights in the model.
    averages_batch_norm: Whether it averages statistics of batch normalizations.
  """

  averages_batch_norm = False

  def __init__(self, optimizer, name, keep_raw_weights, sum_duplicates):
    super().__init__(optimizer, name, sum_duplicates)
    self.keeps_raw_weights = _checks.boolean("keep_raw_weights", keep_raw_weights)
    for x in _steps.within(self) if keep_raw_weights else ():
      if x.use_ema if not isinstance(x, WrapperOptimizer) else (
          isinstance(x, AveragingOptimizer) and not x.keeps_raw_weights):
        raise ValueError(
            f"`optimizer` of a {type(self).__name__} with "
            "keep_raw_weights=True must not be or hold an optimizer that puts "
            "its averages in the weights at the end of fit(), got "
            f"{type(x).__qualname__}. Pass "
            + ("keep_raw_weights=True" if isinstance(x, WrapperOptimizer)
               else "use_ema=False") + " to it.")

  def build(self, variables: Sequence[keras.Variable]) -> None:
    if self.built:
      return
    super().build(variables)
    with tf.init_scope(), backend.name_scope(self.name, caller=self):
      self._state.place = self.add_variable(
          shape=(), dtype="int64", name="place", initializer="zeros")

  def average(self, variable: keras.Variable) -> Any:
    """The average of a variable.

    Args:
      variable: A variable that the optimizer was built with.

    Returns:
      The `keras.Variable` that holds its average.

    Raises:
      RuntimeError: If the optimizer is not built.
      KeyError: If the optimizer does not have the variable.
    """
    self._require_built("average")
    self._settle()
    return self._found(variable, self._rows[0])

  def seed_averages(self) -> None:
    """Sets every average to its variable's current value.

    For a run that resumes from a checkpoint without averages: restore it with
    `tf.train.Checkpoint`, then call this. Keras's own loading seeds missing
    averages itself.

    Raises:
      RuntimeError: If the optimizer is not built, or averages are in place.
    """
    self._require_built("seed_averages")
    self._refuse_in_place("seed_averages")
    self._state.seed()

  @contextlib.contextmanager
  def averaged_weights(
      self, model: Optional[keras.Model] = None, *,
      decay: Optional[_decays.Decay] = None) -> Iterator[None]:
    """Puts the averages in place of the weights for a `with` block.

    Inside the block, every trained variable holds its average, and the average
    has no value: TensorFlow refuses to read it. After the block, also after an
    exception, both have their own values again, bit for bit. Buffers are
    exchanged: nothing is copied. Only if an average has another dtype than its
    variable, it is converted and copied into the variable.

    A step inside the block would start at the averages, and the averages would
    then contain it. So it raises an error and changes neither: a RuntimeError,
    or in a `tf.function` that was traced or compiled before, a
    `tf.errors.FailedPreconditionError`.

    Args:
      model: The model whose variables get their averages; by default all
        variables of the optimizer. If given, the statistics of its batch
        normalizations are restored after the block, too, so that the block may
        call `recalibrate_batch_norm`.
      decay: Which of several decays; by default the first.

    Yields:
      None.

    Raises:
      RuntimeError: If the optimizer is not built, or averages of this optimizer
        or of one inside are in place already. After the block, if an average
        was assigned in it.
      ValueError: If the optimizer averages no variable of `model`, or does not
        have the decay.
    """
    with self.in_place(model, decay), (
        contextlib.nullcontext() if model is None
        else _batch_norm.restored(model)):
      yield

  @contextlib.contextmanager
  def in_place(self, model=None, decay=None):
    """As `averaged_weights`, for a block that changes no variable."""
    self._require_built("averaged_weights")
    with _exchanging:
      self._refuse_in_place("averaged_weights")
      self._state.put_in_place([
          (_value(v), _value(s)) for v, s in self._averaged(model, decay)])
    try:
      yield
    finally:
      with _exchanging:
        self._state.put_back()

  def averaged_model(
      self, model: keras.Model, *, decay: Optional[_decays.Decay] = None,
      recalibrate: Union[None, Iterable[Any], Literal[False]] = None,
  ) -> keras.Model:
    """Makes a copy of a model whose weights are the averages.

    The copy is not compiled, and shares nothing with the model. It is made by
    `keras.models.clone_model`, which can copy functional and sequential models,
    and others that have `get_config`. Weights without an average, such as those
    of frozen layers, are copied.

    Example:

        optimizer.averaged_model(model, recalibrate=dataset).export("served")

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
      RuntimeError: If the optimizer is not built, or averages are in place.
      ValueError: If the optimizer averages no variable of `model` or does not
        have the decay, if Keras cannot copy the model, or if `recalibrate` is
        infinite.
    """
    if not isinstance(model, keras.Model):
      raise TypeError(f"`model` must be a Keras model, got {model!r}.")
    _batch_norm.check_recalibrate(recalibrate)
    self._require_built("averaged_model")
    with self.in_place(model, decay):
      weights = model.get_weights()
    copied = _clone(model)
    copied.set_weights(weights)
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
    self._settle()
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
    self._refuse_in_place("averages_by_decay")
    averages = {id(v): s for v, s in self._averaged(model)}
    return [(None, None, lambda v: averages.get(id(v)))]

  def set_model(self, model: keras.Model) -> None:
    """Sets the model that the optimizer trains."""
    if not isinstance(model, keras.Model):
      raise TypeError(f"`model` must be a Keras model, got {model!r}.")

  def decays(self):
    """What tells the averages apart, the default first: a list."""
    return [None]

  def check_batches_per_epoch(self, batches):
    """Raises an error if the averages are for epochs of other lengths."""

  def check_decay(self, decay):
    """Raises an error if the optimizer does not have a decay or None."""
    self._index_of(decay)

  def assign_averages(self, model, decay):
    """Sets the variables of a model to their averages."""
    assign_all(self._averaged(model, decay))

  def _adopt(self, model, decay=None):
    """Sets all averages of a model to its variables, if these are no averages.

    A callback has set the variables then.
    """
    pairs = _replicas.components(
        [(_value(v), _value(s)) for v, s in self._averaged(model, decay)])
    if all(np.array_equal(tf.cast(s, v.dtype), v) for v, s in pairs):
      return
    its = {self._var_key(v) for v in model.variables}
    for average, variable in self._state.pairs():
      if self._var_key(variable) in its:
        _seed(average, variable)

  def finalize_variable_values(self, var_list):
    """Sets variables to their averages, as Keras does at the end of `fit`.

    With `keep_raw_weights`, they keep their values.

    Args:
      var_list: Variables that the optimizer was built with.
    """
    if self.built:
      self._settle()  # Before averages inside change the variables.
    super().finalize_variable_values(var_list)
    if self.built and not self.keeps_raw_weights:
      assign_all(self._finalized(var_list))

  def _finalized(self, var_list):
    """The (variable, average) pairs with which `fit` ends."""
    return self._of(var_list)

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), "keep_raw_weights": self.keeps_raw_weights}


def _clone(model):
  """A copy of a model, with initial weights, that is not compiled."""
  def shapes(model):
    return [tuple(v.shape) for v in model.weights]

  # clone_model compiles the copy of a compiled model, with a new optimizer.
  compiled = model.compiled
  try:
    model.compiled = False
    copied = keras.models.clone_model(model)
  except Exception as e:
    raise _not_copied(model, f"{e}\n") from e
  finally:
    model.compiled = compiled
  if shapes(copied) != shapes(model):
    raise _not_copied(
        model, f"The copy has {len(copied.weights)} weights, the model "
        f"{len(model.weights)}, or their shapes differ. ")
  return copied


def _not_copied(model, why):
  return ValueError(
      "`model` must be one that keras.models.clone_model can copy, got "
      f"'{model.name}', a {type(model).__qualname__}. {why}Give the class "
      "get_config() and build(), or make the copy yourself and call its "
      "set_weights(model.get_weights()) inside averaged_weights(model).")


def averaging(optimizer):
  """The outermost optimizers that keep averages: a list."""
  if isinstance(optimizer, AveragingOptimizer):
    return [optimizer]
  return [found for inner in _steps.held_by(optimizer)
          for found in averaging(inner)]


def _no_rate():
  """A learning rate for Keras's constructor, which makes no variable for it."""


class _Held:
  """An optimizer and, once it is built, its view."""

  def __init__(self, optimizer):
    self.optimizer, self.followed = optimizer, None
    # Whether, in this process, the averages were settled for a step, and marked
    # as begun.
    self.is_settled = self.is_marked = False
    self.marks = False  # Whether a step marks the averages as begun.


# Held while averages are put in place of their variables, or back.
_exchanging = threading.RLock()


class Count(typing.NamedTuple):
  """Values of a count, see `WrapperOptimizer._make_count`."""
  value: int
  seeded: int
  missing: int


class Row(collections.abc.Mapping):
  """Averages by the key of their variable, in a mapping that is not tracked."""

  def __init__(self, averages):
    self._averages = averages

  def __getitem__(self, key):
    return self._averages[key]

  def __iter__(self):
    return iter(self._averages)

  def __len__(self):
    return len(self._averages)


# The suffix of names of averages that are made when the model is known.
OF_BATCH_NORM = "_of_batch_norm"


class State(KerasSaveable, tf.__internal__.tracking.AutoTrackable):
  """The averages of a wrapper, for saving and restoring.

  The key of an average is its name, such as "average", and its index among the
  averages of that name, as Keras does for an optimizer's variables: paths
  differ between the models of a process. The name of a moving average contains
  its decay. An average that a file lacks starts at its variable's value.

  Attributes:
    name: The name in checkpoints.
    place: A variable that has no value while averages are in place, or None.
  """

  # Only averages are tracked, see `add`.
  _self_setattr_tracking = False

  def __init__(self, name, settle):
    self.name = name
    self._settle = settle  # Called before averages are saved.
    self._is_loaded = False  # Whether Keras has loaded a file, see below.
    self._completed = -1  # The restored checkpoint that `complete` has seen.
    self._rows = collections.defaultdict(list)  # (average, variable) by name.
    self._in_files = {}  # Names in files, by name, where they differ.
    self._late = {}  # Values from a file for averages that are made later.
    self.place = None
    self._in_place = None  # The `_exchange.InPlace`, if averages are.
    self._counts = {}  # (variable, Count) by name.

  def _obj_type(self):
    return "Optimizer"

  def name_in_files(self, name, in_files):
    """Gives averages another name in files and checkpoints, before `add`.

    Those of earlier versions, which have them by `name`, are still read.
    """
    self._in_files[name] = in_files

  def add(self, name, average, variable):
    """Adds the next average of a name."""
    i = len(self._rows[name])
    self._rows[name].append((average, variable))
    in_files = self._in_files.get(name, name)
    self._track_trackable(_value(average), f"{in_files}.{i}")
    if in_files != name:
      self._handle_deferred_dependencies(f"{name}.{i}", _value(average))
    for key in f"{in_files}.{i}", f"{name}.{i}":
      if key in self._late:
        _load(average, variable, self._late.pop(key))

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    children = super()._trackable_children(save_type, **kwargs)
    # A function that is saved, such as a step, must find its variables.
    return (children if save_type == "checkpoint" or self.place is None
            else {**children, "place": _value(self.place)})

  def _lookup_dependency(self, name, *args, **kwargs):
    kind, _, i = name.rpartition(".")
    found = super()._lookup_dependency(name, *args, **kwargs)
    if found is None and kind in self._in_files:
      return super()._lookup_dependency(f"{self._in_files[kind]}.{i}", *args,
                                        **kwargs)
    return found

  def add_count(self, name, variable, value):
    """Adds a variable with a Count."""
    self._counts[name] = variable, value
    self._track_trackable(variable.value, name)

  def pairs(self):
    """All (average, variable) pairs."""
    return [pair for row in self._rows.values() for pair in row]

  def seed(self):
    """Sets all averages to the values of their variables."""
    self.complete()
    self.seed_values()
    for variable, count in self._counts.values():
      _assign(variable, count.seeded)

  def seed_values(self):
    """As `seed`, but leaves the counts."""
    for average, variable in self.pairs():
      if _value(variable).is_initialized():
        _seed(average, variable)

  def has_new_values(self):
    """Whether a file or checkpoint was loaded since the last call, if any."""
    is_loaded, self._is_loaded = self._is_loaded, False
    return is_loaded or _restored(self) != self._completed

  def complete(self):
    """Sets what the latest restored `tf.train.Checkpoint` lacked.

    An average starts at its variable's value, as if a file of Keras lacked it.
    """
    latest = _restored(self)
    if latest == self._completed:
      return
    self._completed = latest
    lacks = lambda variable: _restored(_value(variable)) < latest
    has_averages = False
    for average, variable in self.pairs():
      if not lacks(average):
        has_averages = True
      elif _value(variable).is_initialized():
        _seed(average, variable)
    for variable, count in self._counts.values():
      if lacks(variable):
        _assign(variable, count.missing if has_averages else count.value)
    # What the checkpoint has for variables that do not exist.
    _warn_unread({name.rpartition(".")[0] for name in
                  self._deferred_dependencies}, "checkpoint")

  def save_own_variables(self, store):
    self._settle()
    for name, row in self._rows.items():
      for i, (average, _) in enumerate(row):
        # If the model is saved with averages in place, these are its weights.
        value = self._in_place and self._in_place.value(_value(average))
        if value is None:
          value = _value(average)
        in_files = self._in_files.get(name, name)
        store[f"{in_files}.{i}"] = tf.cast(value, average.dtype).numpy()
    for name, (variable, _) in self._counts.items():
      store[name] = variable.numpy()

  def load_own_variables(self, store):
    self.refuse_in_place("load")
    self._is_loaded = True
    names = collections.Counter(key.rpartition(".")[0] for key in store.keys())
    has_averages = False
    unread = set(names)
    for name, row in self._rows.items():
      in_file = self._in_files.get(name, name)
      in_file = in_file if in_file in names else name
      found = names.get(in_file, 0)
      unread.discard(in_file)
      if found not in (0, len(row)):
        warnings.warn(
            f"The file must have {len(row)} averages named '{in_file}' like "
            f"the optimizer, got {found}. They start at the values of their "
            "variables.")
      for i, (average, variable) in enumerate(row):
        _load(average, variable,
              store[f"{in_file}.{i}"] if found == len(row) else None)
      has_averages |= found == len(row)
    for name, (variable, count) in self._counts.items():
      variable.assign(count.value if not has_averages else store[name]
                      if name in store.keys() else count.missing)
    # Copies, because the file will be closed.
    self._late = {
        f"{name}.{i}": np.array(store[f"{name}.{i}"])
        for name, found in names.items()
        if name in unread and name.endswith(OF_BATCH_NORM)
        for i in range(found)}
    _warn_unread(unread, "file", "" if self._rows else (
        " as it is not built: call optimizer.build(variables) before the file "
        "is loaded"))

  def is_in_place(self):
    """Whether averages are in place of their variables."""
    return self._in_place is not None

  def refuse_in_place(self, what):
    """Raises an error while averages are in place."""
    if self.is_in_place():
      raise RuntimeError(
          f"{what}() must not be called inside averaged_weights(): the "
          "averages are in place of the weights. Leave the `with` block first.")

  def put_in_place(self, pairs):
    """Exchanges (variable, average) pairs."""
    self._in_place = _exchange.InPlace(pairs, _value(self.place))

  def put_back(self):
    """Undoes `put_in_place`."""
    try:
      self._in_place.put_back()
    finally:
      self._in_place = None


def _warn_unread(names, source, why=""):
  """Warns of names of averages in a file that the optimizer lacks."""
  # Counts have no number, and so no name here.
  names = sorted(name for name in names
                 if name and not name.endswith(OF_BATCH_NORM))
  if names:
    warnings.warn(
        f"The {source} has averages named {', '.join(map(repr, names))}, which "
        f"the optimizer lacks{why}. They are not loaded.")


def _restored(trackable):
  """The number of the latest checkpoint that was restored into an object."""
  trackable._maybe_initialize_trackable()
  return trackable._update_uid


def _load(average, variable, value):
  """Assigns an average its value from a file, or seeds it.

  A value of another shape belongs to another variable; Keras has reported it.
  """
  if value is not None and tuple(value.shape) == tuple(average.shape):
    average.assign(value)
  else:
    _seed(average, variable)


def assign_all(pairs):
  """Assigns averages to their variables: (variable, average) pairs."""
  pairs = list(pairs)
  # Of all averages of the variables, not only of these.
  _lazy.settle([v for v, _ in _replicas.components(
      [(_value(v), _value(s)) for v, s in pairs])])
  for v, s in _replicas.components([(_value(v), _value(s)) for v, s in pairs]):
    v.assign(tf.cast(s, v.dtype))


def _seed(average, variable):
  for s, v in _replicas.components([(_value(average), _value(variable))]):
    s.assign(tf.cast(v, s.dtype))


def _assign(variable, number):
  # In a replica, a variable of all replicas cannot be assigned.
  for v in _replicas.values(variable.value):
    v.assign(number)


def path_of(variable):
  """The name of a variable in checkpoints."""
  return getattr(variable, "path", None) or variable.name.split(":")[0]


def where(condition, function):
  """Calls `function` if `condition`, a scalar bool tensor, is true."""
  if tf.executing_eagerly():
    if condition:
      function()
    return

  def called():
    function()
    return True

  tf.cond(condition, called, lambda: False)


def steps_of(opt):
  """The number of steps that an optimizer has taken: an int."""
  return int(tf.convert_to_tensor(opt.iterations))


def float32_for_half(dtype):
  """The dtype of averages: float32 for float16 and bfloat16, else `dtype`."""
  dtype = tf.as_dtype(dtype)
  return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
