"""The base classes of the wrappers of Keras optimizers."""

from collections.abc import Sequence
import contextlib
import copy
import threading
from typing import Any, Optional

import keras
from keras.src import backend
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable

from wrapopt import _checks
from wrapopt import _composition
from wrapopt import _types
from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt._averages import _unwritable
from wrapopt.keras import _average
from wrapopt.keras import _beginning
from wrapopt.keras import _followers
from wrapopt.keras import _methods
from wrapopt.keras import _of_inner
from wrapopt.keras import _rules
from wrapopt.keras import _state
from wrapopt.keras import _steps
from wrapopt.keras._variables import path_of, value_of


class WrapperOptimizer(_of_inner.OfInner, _beginning.Beginning,
                       keras.optimizers.Optimizer, _followers.Follower):
  """A Keras optimizer around another one, with averages of the weights.

  Learning rate, count of steps, clipping, accumulation, weight decay and loss
  scaling are the inner optimizer's. When saved or restored, the wrapper has the
  structure of the inner optimizer, plus the averages.
  """

  # TensorFlow tracks the inner optimizer instead, see `_trackable_children`.
  _self_setattr_tracking = False

  def __init__(self, optimizer, name, sum_duplicates):
    if isinstance(optimizer, (str, dict)):
      optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
      raise _composition.wrong_kind(
          "optimizer", "a Keras 3 optimizer, or its name or configuration",
          type(self), optimizer)
    _composition.check_in_keras(type(self), optimizer,
                                _steps.within(optimizer))
    for x in [optimizer, *_steps.within(optimizer)]:
      _composition.check_import(f"`optimizer` of {type(self).__name__}", x,
                                WrapperOptimizer)
      for name_of in ("apply", "apply_gradients"):
        if isinstance(x, WrapperOptimizer) and (
            getattr(type(x), name_of) is not getattr(WrapperOptimizer,
                                                     name_of)):
          raise ValueError(
              f"`optimizer` of {type(self).__name__} must not be or hold a "
              f"wrapper that overrides {name_of}(), which would not be called, "
              f"got {type(x).__qualname__}. Make it the outermost wrapper.")
    super().__init__(learning_rate=_no_rate, name=name)
    # The inner optimizer's count replaces that of Keras's constructor.
    self._untrack_variable(self._iterations)
    vars(self)["_iterations"] = optimizer._iterations
    # In an object that neither Keras nor TensorFlow tracks.
    self._untracked = _Untracked(optimizer)
    self._untracked.refusal = _unwritable.Refusal(self._check_writable)
    _methods.check(self, self._optimizers())
    self.sum_duplicates = _checks.boolean("sum_duplicates", sum_duplicates)
    # Keras saves the state under the name of its class.
    kind = type(self).__name__
    self._state = type(f"{kind}Averages", (_state.State,), {})(
        f"wrapopt_{kind}", self._seed_unbegun,
        lambda: [steps_of(opt) for opt in _steps.innermost(self)])

  @property
  def inner_optimizer(self) -> keras.optimizers.Optimizer:
    """The optimizer that this wraps, as in Keras's LossScaleOptimizer."""
    if _of_inner.is_asked_by_swap_ema_weights():
      # It would go past this wrapper, into the inner optimizer. Without the
      # attribute, it reads `_model_variables_moving_average` here.
      raise AttributeError(
          "SwapEMAWeights must read averages of the wrapper, got a read of its "
          "inner_optimizer.")
    return self._untracked.optimizer

  def __dir__(self):
    # Keras saves what `dir` lists: the inner optimizer would be in files twice.
    return [name for name in super().__dir__() if name != "inner_optimizer"]

  # Steps

  @property
  def fused(self) -> bool:
    """Whether one native op takes the inner optimizer's step: a bool.

    Even if True, the inner optimizer takes the step in a CentralStorageStrategy
    and in a TPUStrategy.
    """
    return all(map(_rules.has_rule, map(type, _steps.innermost(self))))

  def build(self, variables: Sequence[keras.Variable]) -> None:
    """Makes the variables of the inner optimizer and of this one.

    Args:
      variables: The variables to train. If the inner optimizer is built, those
        that it was built with are trained instead.
    """
    if self.built:
      return
    inner = self.inner_optimizer
    if _replicas.is_shared(value_of(inner._iterations)):
      self._refuse_holders()
    # It may train all of its variables later, when layers are not frozen.
    variables = list(inner._trainable_variables if inner.built else variables)
    for v in variables:
      if isinstance(value_of(v), sharded_variable.ShardedVariable):
        raise ValueError(
            f"A variable that a {type(self).__name__} trains must not be a "
            "ShardedVariable, which Keras cannot train, got "
            f"'{path_of(v)}'. Make a tf.Variable in the scope of the "
            "strategy, and pass its `variables`, one on each server.")
    self._check_variables(variables)
    if not inner.built:
      with backend.name_scope(inner.name, caller=inner):
        inner.build(variables)
      inner.built = True
    self.__dict__.update(
        _trainable_variables=variables, built=True,
        _trainable_variables_indices={
            self._var_key(v): i for i, v in enumerate(variables)})
    self._untracked.without_gradient = set(map(self._var_key, variables))
    # After the build, in which Keras's MultiOptimizer makes its optimizers.
    self._untracked.followed = _steps.followed(inner, [self])
    # Variables are made eagerly, even if a tf.function is being traced.
    with tf.init_scope(), backend.name_scope(self.name, caller=self):
      self._make_state(variables)
      self._state.finish()

  def _refuse_holders(self):
    """Raises an error if an optimizer inside holds others, in a cluster."""
    for x in _steps.within(self):
      if (any(_steps.optimizers_in(x)) and
          not isinstance(x, _followers.Follower)):
        raise NotImplementedError(
            f"`optimizer` of {type(self).__name__} must not be or hold a "
            f"{type(x).__qualname__} in a ParameterServerStrategy: its own "
            "state would lose steps of workers. Wrap one optimizer.")

  def _check_variables(self, variables):
    """Raises an error for variables for which `_make_state` would fail."""

  def _make_state(self, variables):
    """Makes the variables of this wrapper.

    If it makes averages, it also sets `_begun` to `_make_begun()`, and
    `_follow` calls `_mark_begun`.
    """
    raise NotImplementedError

  def _make_average(self, variable, name, dtype=None, i=None):
    """Makes a variable that starts at the value of another one, if it has one.

    Args:
      variable: A trained variable.
      name: The kind of the new variable, such as "average".
      dtype: Its dtype; by default that of `variable`.
      i: As in `_state.State.add`.

    Returns:
      A `keras.Variable`.
    """
    value = value_of(variable)
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
    self._state.add(name, average, variable, i)
    return average

  def _wrap_average(self, average, variable):
    """What stands for a new average, a `keras.Variable`, of a variable."""
    del variable
    return _average.Average.of(average)

  def _make_count(self, name, value, seeded=None, *, dtype="int64", near=None,
                  **kwargs):
    """Makes a variable that is saved and restored with the averages.

    Args:
      name: Its name.
      value: Its value at the start, and if a file lacks it.
      seeded: Its value after averages are seeded; by default `value`.
      dtype: Its dtype.
      near: In a cluster, a tf.Variable on the server where it is made; by
        default that of `iterations`.
      **kwargs: `swapped_in`: a function that maps its value to the one that is
        saved while averages are in place. `in_files`: a `_state.InFiles`.

    Returns:
      A `keras.Variable`.
    """
    with _replicas.colocated(
        value_of(self._iterations) if near is None else near):
      count = self.add_variable(
          shape=np.shape(value), dtype=dtype, name=name,
          initializer=lambda shape, dtype: tf.constant(value, dtype, shape))
    _average.Kept.of(count)
    self._state.add_count(name, count, _state.Count(
        value, value if seeded is None else seeded, **kwargs))
    return count

  def _make_counts(self, name, *args, in_files=None, **kwargs):
    """Makes a count for each optimizer in `_parts`: a Row by their keys.

    Args:
      name: The name of the first one.
      *args: Arguments of `_make_count`.
      in_files: None, or a function of an optimizer and the end of its count's
        name that returns a `_state.InFiles`.
      **kwargs: Further ones.
    """
    ends = ["", *(f"_{i}" for i in range(1, len(self._parts())))]
    return _state.Row({
        key: self._make_count(
            name + end, *args, in_files=in_files and in_files(opt, end),
            **kwargs)
        for (key, opt), end in zip(self._parts().items(), ends)})

  def _parts(self):
    """{`Step.part`: optimizer} of the optimizers inside that take steps.

    There are several in a MultiOptimizer. One that trains nothing takes none.
    """
    return {opt._var_key(opt._trainable_variables[0]): opt
            for opt in _steps.innermost(self)
            if opt.built and opt._trainable_variables}

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
      if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
      with self._prepared(grads, trainable_variables):
        self._untracked.followed.apply(grads, trainable_variables)

  @contextlib.contextmanager
  def _prepared(self, grads, trainable_variables):
    """The context of a step."""
    optimizers = self._optimizers()
    _methods.check(self, optimizers)
    wrappers = _wrappers_of(optimizers)
    # Threads may share a gate. A step that finds that averages have not begun
    # sets them to the weights, which must not be those after another's step.
    preparing = taking = contextlib.nullcontext()
    if any(w.is_gate for w in wrappers):
      preparing = _first_steps
      if tf.executing_eagerly() and any(
          not w.built or w._untracked.marks and not w._untracked.is_marked
          for w in wrappers):
        taking = _first_steps
    with taking:
      with preparing:
        first = self._prepare(grads, trainable_variables, wrappers)
      with tf.control_dependencies(first):
        yield

  def _prepare(self, grads, trainable_variables, wrappers):
    """Prepares for a step; returns the operations that it must wait for."""
    _refuse_swapped_in(wrappers, "apply")
    if not self.built:
      if trainable_variables is None:
        raise ValueError(
            "`trainable_variables` must be given to the first apply(), got "
            "None. Or call build(trainable_variables) first.")
      self.build(trainable_variables)
      # A MultiOptimizer has made its optimizers now.
      wrappers = self._wrappers()
    keys = set()
    if any(w._untracked.without_gradient for w in wrappers):
      keys = {self._var_key(v) for g, v in zip(
          grads, trainable_variables or self._trainable_variables)
              if g is not None}
    for wrapper in wrappers:
      wrapper._prepare_averages(keys)
    # In a step that asks for admission, only that has to wait.
    return [] if _replicas.is_shared(value_of(self._iterations)) else (
        _check_in_place(wrappers))

  def _checks(self):
    return _check_in_place(self._wrappers())

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
    if getattr(self.apply, "__func__", None) is not WrapperOptimizer.apply:
      self.apply(*zip(*grads_and_vars))  # As Keras calls a user's.
      return self.iterations
    with self._prepared(*map(list, zip(*grads_and_vars))):
      self._untracked.followed.apply_gradients(grads_and_vars)
    return self.iterations

  def _found(self, variable, *rows):
    """The value of a variable in the first row that has it."""
    for row in rows:
      if self._var_key(variable) in row:
        return row[self._var_key(variable)]
    raise KeyError(
        f"`variable` must be one that this {type(self).__name__} was built "
        f"with, got '{path_of(variable)}'. A copy of a model has "
        "variables of its own.")

  def _require_built(self, what):
    if not self.built:
      raise RuntimeError(
          f"{what}() must be called after the first step, or after "
          f"build(variables), got a {type(self).__name__} that is not built.")

  # State

  @property
  def variables(self):
    """The variables of the inner optimizer, the averages and their counts.

    So Keras's `get_state_tree` and `OrbaxCheckpoint` have them. In a block of
    `averaged_weights`, an average that is in place of its variable has the
    value that a file gets there.
    """
    inner = self.inner_optimizer.variables
    if not _of_inner.is_asked_for_all():
      return [*inner]
    self._make_late_averages()
    return [*inner, *self._state.variables()]

  def _make_late_averages(self):
    """Makes averages that the first step would make, if it can."""

  def set_weights(self, weights):
    """Sets `variables`, or those of the inner optimizer alone.

    Args:
      weights: Their values: a list.
    """
    weights = list(weights)
    inner = self.inner_optimizer.variables
    own = self.variables[len(inner):]
    self._refuse_swapped_in("set_weights")
    self.inner_optimizer.set_weights(weights[:len(inner)])
    for v, value in zip(own, weights[len(inner):]):
      v.assign(value)

  def save_own_variables(self, store):
    self.inner_optimizer.save_own_variables(store)

  def load_own_variables(self, store):
    self.inner_optimizer.load_own_variables(store)

  @property
  def averages_of_wrappers(self):
    """The objects with which Keras saves and loads the averages: a list."""
    # Keras does not look into `_untracked`: also those in its own optimizers.
    return [wrapper._state for wrapper in reversed(self._wrappers())]

  def _refuse_swapped_in(self, what, instead=""):
    _refuse_swapped_in(self._wrappers(), what, instead)

  def _optimizers(self):
    """This wrapper and all optimizers inside: a list."""
    return [self, *_steps.within(self)]

  def _wrappers(self):
    """This wrapper and the wrappers inside: a list."""
    return _wrappers_of(self._optimizers())

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    return {**(self._untracked.refusal.children()
               if save_type == "checkpoint" else {}),
            **self.inner_optimizer._trackable_children(save_type, **kwargs),
            self._state.name: self._state}

  def _check_writable(self):
    """Raises an error if no checkpoint can hold this optimizer now."""
    # It would hold the two exchanged.
    self._refuse_swapped_in("tf.train.Checkpoint.write", _TO_A_FILE)

  def _lookup_dependency(self, name, *args, **kwargs):
    if name == self._state.name:
      self._refuse_swapped_in("tf.train.Checkpoint.read")
      return self._state
    return self.inner_optimizer._lookup_dependency(name, *args, **kwargs)

  @property
  def _deferred_dependencies(self):
    # Values from a checkpoint for variables that the inner optimizer will make
    # later. It looks them up then.
    self.inner_optimizer._maybe_initialize_trackable()
    return self.inner_optimizer._deferred_dependencies

  def get_config(self) -> dict[str, Any]:
    inner = keras.saving.serialize_keras_object(self.inner_optimizer)
    return {"optimizer": inner, "name": self.name,
            "sum_duplicates": self.sum_duplicates}

  @classmethod
  def from_config(cls, config, custom_objects=None):
    # A copy, because Keras modifies its argument.
    optimizer = keras.saving.deserialize_keras_object(
        copy.deepcopy(config["optimizer"]), custom_objects=custom_objects)
    return cls(**{**config, "optimizer": optimizer})


def _wrappers_of(optimizers):
  return [opt for opt in optimizers if isinstance(opt, WrapperOptimizer)]


def _check_in_place(wrappers):
  """Operations that fail while averages of wrappers are in place."""
  return _swap.check([
      value_of(wrapper._state.place) for wrapper in wrappers
      if wrapper._state.place is not None])


def _refuse_swapped_in(wrappers, what, instead=""):
  for wrapper in wrappers:
    wrapper._state.refuse_swapped_in(what, instead)


# How averages get into a file.
_TO_A_FILE = (
    ". To write the averages into a file, call the model's save_weights() in "
    "the block, or write the copy that averaged_model(model) makes")


# Held while a step is prepared, and during some first steps.
_first_steps = threading.RLock()


def _no_rate():
  """A learning rate for Keras's constructor, which makes no variable for it."""


class _Untracked:
  """An optimizer and, once it is built, its view."""

  def __init__(self, optimizer):
    self.optimizer, self.followed = optimizer, None
    # Whether, in this process, the averages were settled for a step, and marked
    # as begun.
    self.is_seeded = self.is_marked = False
    self.marks = False  # Whether a step marks the averages as begun.
    # The keys of variables that had no gradient in this process. The average of
    # one that is not frozen is its value, which the user's code may change.
    self.without_gradient = set()


def steps_of(opt):
  """The number of steps that an optimizer has taken: an int."""
  return int(tf.convert_to_tensor(opt.iterations))


def float32_for_half(dtype):
  """The dtype of averages: float32 for float16 and bfloat16, else `dtype`."""
  dtype = tf.as_dtype(dtype)
  return tf.float32 if dtype in _types.LOW_PRECISION else dtype
