"""The base class of the wrappers of Keras optimizers."""

from collections.abc import Sequence
import contextlib
import copy
import threading
from typing import Any, Optional

import keras
from keras.src import backend
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable

from wrapopt import _checks
from wrapopt import _composition
from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt.keras import _attributes
from wrapopt.keras._averages import _store
from wrapopt.keras._steps import _methods
from wrapopt.keras._steps import _rules
from wrapopt.keras._steps import _views
from wrapopt.keras._variables import path_of, value_of


class WrapperOptimizer(_attributes.InnerAttributes, keras.optimizers.Optimizer):
  """A Keras optimizer around another one, with averages of the weights.

  Learning rate, count of steps, clipping, accumulation, weight decay and loss
  scaling are the inner optimizer's. When saved or restored, the wrapper has the
  structure of the inner optimizer, plus the averages.

  Attributes:
    changes_weights: Whether `_follow` may change weights that the step did not.
      It then calls the step's `constrain`.
    in_op: Whether its work is done in the op, if the step is one op.
    is_gate: Whether `_admit` decides which steps are taken. It does not follow
      them.
    sum_duplicates: The argument of the wrapper.
  """

  changes_weights = False
  in_op = False
  is_gate = False

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
                                _views.within(optimizer))
    for x in [optimizer, *_views.within(optimizer)]:
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
    self._inside = _attributes.Inside(optimizer)
    _methods.check(self, self._optimizers())
    self.sum_duplicates = _checks.boolean("sum_duplicates", sum_duplicates)
    self._store = _store.Store(self)

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
    return all(map(self._fuses, _views.innermost(self)))

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
      with backend.name_scope(inner.name, caller=inner), self._building():
        inner.build(variables)
      inner.built = True
    self.__dict__.update(
        _trainable_variables=variables, built=True,
        _trainable_variables_indices={
            self._var_key(v): i for i, v in enumerate(variables)})
    self._store.without_gradient = set(map(self._var_key, variables))
    # After the build, in which Keras's MultiOptimizer makes its optimizers.
    self._inside.view = _views.followed(inner, [self])
    # Variables are made eagerly, even if a tf.function is being traced.
    with tf.init_scope(), backend.name_scope(self.name, caller=self):
      self._make_state(variables)
      self._store.state.finish()
      if self._averages is not None:
        with _replicas.colocated(value_of(self._iterations)):
          self._store.state.block.place = self.add_variable(
              shape=(), dtype="int64", name="place", initializer="zeros")

  def _refuse_holders(self):
    """Raises an error if an optimizer inside holds others, in a cluster."""
    for x in _views.within(self):
      if (any(_views.optimizers_in(x)) and
          not isinstance(x, WrapperOptimizer)):
        raise NotImplementedError(
            f"`optimizer` of {type(self).__name__} must not be or hold a "
            f"{type(x).__qualname__} in a ParameterServerStrategy: its own "
            "state would lose steps of workers. Wrap one optimizer.")

  # What a wrapper defines: what it keeps, and what it does before and after a
  # step. See _inner.py, which calls it.

  @staticmethod
  def _fuses(opt):
    """Whether a native op takes the step of an optimizer inside."""
    return _rules.has_rule(type(opt))

  def _check_variables(self, variables):
    """Raises an error for variables for which `_make_state` would fail."""
    if self._averages is not None:
      self._averages.check_variables(variables)

  def _building(self):
    """The context in which the inner optimizer is built."""
    return contextlib.nullcontext()

  def _make_state(self, variables):
    """Makes the variables of this wrapper, in its `_store`.

    If it makes averages, it also calls the store's `make_begun`, and `_follow`
    calls its `mark_begun`.
    """
    raise NotImplementedError

  def _settle(self):
    """Brings up to date what is saved."""
    self._store.seed_unbegun()

  def _admit(self, iterations, grads_and_vars, token):
    """Asks for the admission of a step.

    Args:
      iterations: The tf.Variable that counts the steps.
      grads_and_vars: The gradients that are not None, and their tf.Variables.
      token: As in `wrapopt.ops.staleness_gate`.

    Returns:
      An `_admission.Admitted`.
    """
    raise NotImplementedError

  def _take(self, step, inner, grads, variables, learning_rate):
    """Takes a step itself, in place of the optimizer.

    A wrapper that does so has no other around it or inside.

    Args:
      step: A Step, which is about to be taken.
      inner: The `_inner.Inner` of the optimizer.
      grads: Gradients: tensors or `tf.IndexedSlices`.
      variables: Their variables.
      learning_rate: The learning rate of the step.

    Returns:
      Whether it has taken it.
    """
    return False

  def _averages_of(self, step):
    """The averages to update in the op of the step, or None.

    Args:
      step: A Step, which is about to be taken. Only the averages that this
        returns may lag behind after it.

    Returns:
      Rows of averages, one for each decay, and the decays. A variable that
      is not averaged has None in each row.
    """

  def _ahead(self):
    """Reads what the wrapper needs before Keras counts a step."""

  def _note_update(self):
    """Notes that the averages of `_averages_of` have been updated."""

  def _follow(self, step):
    """Does the work of this wrapper after a step.

    Args:
      step: A Step, which was taken.
    """
    raise NotImplementedError

  def _averageable(self, variables):
    """Those of some variables that may have an average: a list."""
    return [v for v in variables
            if not self._overwrite_variable_with_gradient(v)]

  # A step

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
        self._inside.view.apply(grads, trainable_variables)

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
          not w.built or w._store.may_begin() for w in wrappers):
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
    if any(w._store.without_gradient for w in wrappers):
      keys = {self._var_key(v) for g, v in zip(
          grads, trainable_variables or self._trainable_variables)
              if g is not None}
    for wrapper in wrappers:
      wrapper._store.prepare(keys)
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
      self._inside.view.apply_gradients(grads_and_vars)
    return self.iterations

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
    if not _attributes.is_asked_for_all():
      return [*inner]
    if self._store.statistics is not None:
      self._store.statistics.make_if_known()
    return [*inner, *self._store.state.variables()]

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
    # Keras does not look into `_inside`: also those in its own optimizers.
    return [wrapper._store.state for wrapper in reversed(self._wrappers())]

  def _refuse_swapped_in(self, what, instead=""):
    _refuse_swapped_in(self._wrappers(), what, instead)

  def _optimizers(self):
    """This wrapper and all optimizers inside: a list."""
    return [self, *_views.within(self)]

  def _wrappers(self):
    """This wrapper and the wrappers inside: a list."""
    return _wrappers_of(self._optimizers())

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    return {**(self._store.write_check.children()
               if save_type == "checkpoint" else {}),
            **self.inner_optimizer._trackable_children(save_type, **kwargs),
            self._store.state.name: self._store.state}

  def _check_writable(self):
    """Raises an error if no checkpoint can hold this optimizer now."""
    # No model that is loaded has the variables.
    if self.built and self._averages is not None:
      self._averages.check_attached(None)
    # It would hold the two exchanged.
    self._refuse_swapped_in("tf.train.Checkpoint.write", _TO_A_FILE)

  def _lookup_dependency(self, name, *args, **kwargs):
    if name == self._store.state.name:
      self._refuse_swapped_in("tf.train.Checkpoint.read")
      return self._store.state
    return self.inner_optimizer._lookup_dependency(name, *args, **kwargs)

  @property
  def _deferred_dependencies(self):
    # Values from a checkpoint for variables that the inner optimizer will make
    # later. It looks them up then.
    self.inner_optimizer._maybe_initialize_trackable()
    return self.inner_optimizer._deferred_dependencies

  def get_config(self) -> dict[str, Any]:
    inner = keras.saving.serialize_keras_object(self.inner_optimizer)
    config = {"optimizer": inner, "name": self.name,
              "sum_duplicates": self.sum_duplicates}
    return config if self._averages is None else self._averages.config(config)

  @classmethod
  def from_config(cls, config, custom_objects=None):
    def made(x):
      if isinstance(x, (list, tuple)):
        return [*map(made, x)]
      # Optimizers, decays and functions. Keras modifies its argument.
      return (keras.saving.deserialize_keras_object(
          copy.deepcopy(x), custom_objects=custom_objects)
              if isinstance(x, dict) and "class_name" in x else x)

    return cls(**{name: made(x) for name, x in config.items()})


def _wrappers_of(optimizers):
  return [opt for opt in optimizers if isinstance(opt, WrapperOptimizer)]


def _check_in_place(wrappers):
  """Operations that fail while averages of wrappers are in place."""
  return _swap.check([
      value_of(wrapper._store.state.block.place) for wrapper in wrappers
      if wrapper._store.state.block.place is not None])


def _refuse_swapped_in(wrappers, what, instead=""):
  for wrapper in wrappers:
    wrapper._store.state.block.refuse(what, instead)


# How averages get into a file.
_TO_A_FILE = (
    ". To write the averages into a file, call the model's save_weights() in "
    "the block, or write the copy that averaged_model(model) makes")


# Held while a step is prepared, and during some first steps.
_first_steps = threading.RLock()


def _no_rate():
  """A learning rate for Keras's constructor, which makes no variable for it."""
