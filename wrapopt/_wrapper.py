"""The base class of the wrappers of `tf.compat.v1.train.Optimizer`."""

import contextlib
import operator
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from wrapopt import _composition
from wrapopt import _fused
from wrapopt import _step
from wrapopt import ops
from wrapopt._types import Gradient, GradsAndVars, Loss, Operation, Variable


class WrapperOptimizer(tf.compat.v1.train.Optimizer):
  """Forwards the whole base interface to the optimizer that it wraps.

  In a `tf.train.Checkpoint` the wrapper has the structure of the inner
  optimizer, plus the wrapper's slots. So a checkpoint of the bare inner
  optimizer restores into the wrapper, and the other way round.
  """

  def __init__(self, opt, name):
    if not isinstance(opt, tf.compat.v1.train.Optimizer):
      raise TypeError(
          "`opt` must be a tf.compat.v1.train.Optimizer, got "
          f"{type(opt).__module__}.{type(opt).__qualname__}.")
    _composition.check(type(self), opt)
    super().__init__(use_locking=False, name=name)
    self._optimizer = opt

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    # If a subclass overrides only `apply_gradients`, wrappers around it call
    # that, and not `_take`.
    if "apply_gradients" in vars(cls):
      cls._has_own_step = "_take" not in vars(cls)

  # The protocol of wrappers. These methods forward to the inner optimizer; a
  # wrapper overrides some. The `_take` of each wrapper calls that of the next
  # one inside.

  _has_own_step = False

  def _take(self, step):
    """Takes a step if `step.accept` is true.

    Args:
      step: A `_step.Step`.

    Returns:
      A `_step.Taken`.
    """
    return self._take_inner(step)

  def _take_inner(self, step):
    """Takes a step with the inner optimizer, as `_take`."""
    if self._inner_wrapper is not None:
      return self._inner_wrapper._take(step)
    return _step.take(self._optimizer, step)

  def _making_state(self):
    """The context in which state variables are made.

    A wrapper enters that of its inner optimizer to make its own state.

    Returns:
      A context manager.
    """
    if self._inner_wrapper is not None:
      return self._inner_wrapper._making_state()
    return contextlib.nullcontext()

  def _recording(self, loss, global_step):
    """The context in which gradients for a step are computed.

    Args:
      loss: As in `minimize`.
      global_step: As in `minimize`.

    Returns:
      A context manager.
    """
    if self._inner_wrapper is not None:
      return self._inner_wrapper._recording(loss, global_step)
    return contextlib.nullcontext()

  def _has_one_pass(self):
    """Whether a native op can take the inner step and update averages."""
    if self._inner_wrapper is not None:
      return self._inner_wrapper._has_one_pass()
    return _fused.rule_of(self._optimizer) is not None

  def _innermost(self):
    """The optimizer inside of all wrappers."""
    if self._inner_wrapper is not None:
      return self._inner_wrapper._innermost()
    return self._optimizer

  def _leaves_rows(self):
    """Whether a step changes only the rows that a sparse gradient touches."""
    if self._inner_wrapper is not None:
      return self._inner_wrapper._leaves_rows()
    return _fused.leaves_rows(self._optimizer)

  @property
  def _inner_wrapper(self):
    """The inner optimizer, if it implements this protocol, or None."""
    opt = self._optimizer
    if isinstance(opt, WrapperOptimizer) and not opt._has_own_step:
      return opt
    return None

  # The public interface.

  def compute_gradients(
      self, *args: Any,
      **kwargs: Any) -> list[tuple[Optional[Gradient], Variable]]:
    """See `tf.compat.v1.train.Optimizer.compute_gradients` of the inner."""
    return self._optimizer.compute_gradients(*args, **kwargs)

  def minimize(self, loss: Loss, global_step: Optional[Variable] = None,
               *args: Any, **kwargs: Any) -> Optional[Operation]:
    """See `tf.compat.v1.train.Optimizer.minimize`."""
    with self._recording(loss, global_step):
      # Of a plain super(), AutoGraph looks for `self` in the frames of all
      # callers, which keep what is in them from then on.
      return super(WrapperOptimizer, self).minimize(
          loss, global_step, *args, **kwargs)

  @ops.not_converted
  def apply_gradients(self, grads_and_vars: GradsAndVars,
                      global_step: Optional[Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[Operation]:
    """See `tf.compat.v1.train.Optimizer.apply_gradients`."""
    train_ops = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP)
    taken = self._take(_step.Step(
        _step.checked_gradients(grads_and_vars), variable_of(global_step), name,
        kwargs))
    if not tf.executing_eagerly():
      # Replaces the train op of the inner optimizer.
      tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)[:] = [
          *train_ops, getattr(taken.done, "op", taken.done)]
    return taken.done

  def _create_slots(self, var_list):
    """Makes all variables of a step, outside of the branches of a `cond`."""
    with self._making_state():
      self._optimizer._create_slots(var_list)

  # Slots: the wrapper's are in its `_slots`; all others are the inner
  # optimizer's.

  def _own_slot_names(self):
    return sorted(self._slots)

  def get_slot(self, var: Variable, name: str) -> Optional[Variable]:
    """The slot `name` of `var`, of the wrapper or of the inner optimizer."""
    if name in self._own_slot_names():
      return super().get_slot(var, name)
    return self._optimizer.get_slot(var, name)

  def get_slot_names(self) -> list[str]:
    """Names of the slots of the inner optimizer and of the wrapper."""
    return sorted({*self._optimizer.get_slot_names(), *self._own_slot_names()})

  def variables(self) -> list[Variable]:
    """The state of the inner optimizer and of the wrapper in this graph."""
    own = super().variables()
    return sorted(self._optimizer.variables() + own, key=lambda v: v.name)

  # tf.train.Checkpoint. The inner optimizer is not a child of the wrapper:
  # TensorFlow would find its slots twice, and raise an error. Instead, its
  # children and slots are also those of the wrapper.

  def _trackable_children(self, *args, **kwargs):
    return {**self._optimizer._trackable_children(*args, **kwargs),
            **super()._trackable_children(*args, **kwargs)}

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
    owner = (super() if slot_name in self._own_slot_names()
             else self._optimizer)
    owner._create_or_restore_slot_variable(
        slot_variable_position=slot_variable_position, slot_name=slot_name,
        variable=variable)


def check_integer(subject, x):
  """`x` as an int; raises a TypeError if it is no int and no NumPy integer."""
  try:
    if not isinstance(x, bool):
      return operator.index(x)
  except TypeError:
    pass
  raise TypeError(f"`{subject}` must be an integer, got {x!r}.")


def check_bool(subject, x):
  """`x` as a bool; raises a TypeError if it is no bool, 0 or 1."""
  if isinstance(x, (bool, np.bool_)) or isinstance(x, int) and x in (0, 1):
    return bool(x)
  raise TypeError(f"`{subject}` must be True or False, got {x!r}.")


def check_fused(fused):
  """The argument `fused` of a wrapper, checked."""
  if fused is None:
    return None
  try:
    return check_bool("fused", fused)
  except TypeError:
    raise TypeError("`fused` must be None (if there is an op), True or False, "
                    f"got {fused!r}.") from None


def variable_of(step):
  """The variable of `step`, if `step` is the tensor of a ref variable.

  `tf.compat.v1.train.get_global_step` returns a tensor if it finds a ref
  variable only by its name.

  Args:
    step: A step variable, a tensor, or another argument of the caller.

  Returns:
    The variable; `step` itself, if it is not the tensor of a variable.
  """
  if isinstance(step, tf.Tensor) and not tf.executing_eagerly():
    for v in (*tf.compat.v1.global_variables(),
              *tf.compat.v1.local_variables()):
      if v.name == step.name:
        return v
  return step


def check_global_step(step):
  """The variable of `step`; raises a TypeError if it is not an integer."""
  step = variable_of(step)
  if (not isinstance(step, tf.Variable) or
      step.dtype.base_dtype not in (tf.int32, tf.int64)):
    raise TypeError("`global_step` must be a variable of dtype int32 or int64, "
                    f"got {step!r}.")
  return step
