"""The base class of the wrappers of `tf.compat.v1.train.Optimizer`."""

from collections.abc import Iterable
from typing import Any, Optional

import tensorflow as tf
from tensorflow.python.saved_model import save_context

from wrapopt import _composition
from wrapopt._types import Gradient, Loss, Operation, Variable
from wrapopt._v1._averages import _averaging
from wrapopt._v1._averages import _slots
from wrapopt._v1._steps import _step


class WrapperOptimizer(tf.compat.v1.train.Optimizer):
  """Forwards the whole base interface to the optimizer that it wraps.

  In a `tf.train.Checkpoint` the wrapper has the structure of the inner
  optimizer, plus the wrapper's slots. So a checkpoint of the bare inner
  optimizer restores into the wrapper, and the other way round.
  """

  # The `_averaging.Averages` that it keeps in its slots, or None.
  _averages: Any = None

  def __init__(self, opt, name):
    if not isinstance(opt, tf.compat.v1.train.Optimizer):
      raise _composition.wrong_kind(
          "opt", "a tf.compat.v1.train.Optimizer", type(self), opt)
    _composition.check(type(self), opt)
    _composition.check_import(f"`opt` of {type(self).__name__}", opt,
                              WrapperOptimizer)
    super().__init__(use_locking=False, name=name)
    self._optimizer = opt

  def __reduce_ex__(self, protocol):
    if self._averages is not None:
      self._averages.check_copied()
    return super().__reduce_ex__(protocol)

  @property
  def inner_optimizer(self) -> tf.compat.v1.train.Optimizer:
    """The optimizer that this wraps."""
    return self._optimizer

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    # If a subclass overrides only `apply_gradients`, wrappers around it call
    # that, and not `_take`.
    if "apply_gradients" in vars(cls):
      cls._has_own_step = "_take" not in vars(cls)

  # The protocol of wrappers, which calls from the outside to the inside. A
  # wrapper overrides some of these methods. `_step.Inner` ends the chain.

  _has_own_step = False

  def _take(self, step):
    """Takes a step if `step.accept` is true.

    Args:
      step: A `_step.Step`.

    Returns:
      A `_step.Taken`.
    """
    return self._inner._take(step)

  def _making_state(self):
    """The context in which state variables are made.

    A wrapper enters that of its inner optimizer to make its own state.

    Returns:
      A context manager.
    """
    return self._inner._making_state()

  def _recording(self, loss, global_step):
    """The context in which gradients for a step are computed.

    Args:
      loss: As in `minimize`.
      global_step: As in `minimize`.

    Returns:
      A context manager.
    """
    return self._inner._recording(loss, global_step)

  def _fuses(self):
    """Whether a native op can take the inner step and update averages."""
    return self._inner._fuses()

  def _innermost(self):
    """The optimizer inside of all wrappers."""
    return self._inner._innermost()

  def _touches_few_rows(self):
    """Whether a step changes only the rows that a sparse gradient touches."""
    return self._inner._touches_few_rows()

  @property
  def _inner(self):
    """The object that implements this protocol for the inner optimizer."""
    opt = self._optimizer
    if isinstance(opt, WrapperOptimizer) and not (
        opt._has_own_step or "apply_gradients" in vars(opt)):
      return opt
    return _step.Inner(opt)

  # The public interface.

  def compute_gradients(
      self, loss: Loss, *args: Any,
      **kwargs: Any) -> list[tuple[Optional[Gradient], Variable]]:
    """See `tf.compat.v1.train.Optimizer.compute_gradients` of the inner.

    A `loss` that is a function may also read ref variables.
    """
    if (callable(loss) and not isinstance(self._optimizer, WrapperOptimizer) and
        not tf.compat.v1.executing_eagerly_outside_functions()):
      # TensorFlow would look for its variables in a tape, which does not see
      # ref variables.
      loss = loss()
    return self._optimizer.compute_gradients(loss, *args, **kwargs)

  def minimize(self, loss: Loss, global_step: Optional[Variable] = None,
               *args: Any, **kwargs: Any) -> Optional[Operation]:
    """See `tf.compat.v1.train.Optimizer.minimize`."""
    with self._recording(loss, global_step):
      # Of a plain super(), AutoGraph looks for `self` in the frames of all
      # callers, which keep what is in them from then on.
      return super(WrapperOptimizer, self).minimize(
          loss, global_step, *args, **kwargs)

  def build(self, variables: Iterable[Variable]) -> None:
    """Makes the averages of variables before the first step.

    A step makes them, too. Call this if the graph of the step reads them, such
    as the loss of a mean teacher, and before `apply_gradients`:

        opt.build(tf.compat.v1.trainable_variables())
        teacher = model(images, weights=opt.average(w))
        train_op = opt.minimize(loss(model(images, w), teacher))

    A variable that no step trains keeps its average. In a graph, the rows of
    these averages do not lag behind: each step moves all of them.

    Args:
      variables: An iterable of variables. Those that have averages, and those
        that an argument `variables` does not choose, are left out.

    Raises:
      TypeError: If it holds anything else, or an averaged variable is not of a
        floating dtype.
      ValueError: If a variable is of another graph.
      RuntimeError: In eager mode, while an average is in place of a variable.
    """
    parts = []
    for i, x in enumerate(variables):
      of_x = _slots.parts_of(x)
      if of_x is None:
        raise TypeError(f"`variables[{i}]` must be a variable, got {x!r}.")
      parts += of_x
    for v in parts:
      if _slots.graph_of(v) is not _slots.graph_of_state():
        raise ValueError(
            "`variables` must hold variables of this graph, or of eager mode, "
            f"got '{v.name}' of another one.")
    with self._making_state():
      self._build(list({id(v): v for v in parts}.values()))

  def _build(self, variables):
    """As `build`, of checked variables: a list."""
    self._inner._build(variables)
    if self._averages is not None:
      self._averages.build(variables)

  def _create_slots(self, var_list):
    """Makes all variables of a step, outside of the branches of a `cond`."""
    with self._making_state():
      self._optimizer._create_slots(var_list)
    if self._averages is not None:
      self._averages.create(var_list)

  # Slots: the wrapper's are in its `_slots`; all others are the inner
  # optimizer's.

  def _own_slot_names(self):
    return sorted(self._slots)

  def get_slot(self, var: Variable, name: str) -> Optional[Variable]:
    """The slot `name` of `var`, of the wrapper or of the inner optimizer.

    Args:
      var: A variable.
      name: A string, such as "momentum". "ExponentialMovingAverage" is the
        average of the first decay.

    Returns:
      A variable, or None.

    Raises:
      RuntimeError: In eager mode, if it is an average that is in place of its
        variable.
    """
    return (self._slot(var, name) if self._averages is None else
            self._averages.slot_in_place(var, name))

  def _slot(self, var, name):
    """As `get_slot`, also of an average that is in place of its variable."""
    if name in self._own_slot_names():
      if not save_context.in_save_context():  # A SavedModel has no slots.
        _slots.check_whole(var)
      return super().get_slot(var, name)
    return self._optimizer.get_slot(var, name)

  def get_slot_names(self) -> list[str]:
    """Names of the slots of the inner optimizer and of the wrapper."""
    return sorted({*self._optimizer.get_slot_names(), *self._own_slot_names()})

  def variables(self) -> list[Variable]:
    """The state of the inner optimizer and of the wrapper in this graph.

    Returns:
      A list.

    Raises:
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    own = super().variables()
    if self._averages is not None:
      _averaging.readable(own, "variables")
    return sorted(self._optimizer.variables() + own, key=lambda v: v.name)

  # tf.train.Checkpoint. The inner optimizer is not a child of the wrapper:
  # TensorFlow would find its slots twice, and raise an error. Instead, its
  # children and slots are also those of the wrapper.

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    return {**(self._averages.write_check.children()
               if self._averages is not None and save_type == "checkpoint"
               else {}),
            **self._optimizer._trackable_children(save_type, **kwargs),
            **super()._trackable_children(save_type, **kwargs)}

  def _lookup_dependency(self, name, *args, **kwargs):
    found = super()._lookup_dependency(name, *args, **kwargs)
    if found is not None:
      return found
    return self._optimizer._lookup_dependency(name, *args, **kwargs)

  @property
  def _deferred_dependencies(self):
    # Values from a checkpoint for non-slot variables (Adam's beta powers) that
    # the inner optimizer will make later. It looks them up then.
    self._optimizer._maybe_initialize_trackable()
    return self._optimizer._deferred_dependencies

  def _create_or_restore_slot_variable(self, slot_variable_position, slot_name,
                                       variable):
    if self._averages is not None:
      slot_name = self._averages.slot_to_restore(slot_name, variable)
      if slot_name is None:
        return
    owner = (super() if slot_name in self._own_slot_names()
             else self._optimizer)
    owner._create_or_restore_slot_variable(
        slot_variable_position=slot_variable_position, slot_name=slot_name,
        variable=variable)
