"""Schedule-Free learning: an average of the weights instead of a schedule."""

from collections.abc import Iterator
import contextlib
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from wrapopt._averages import _schedule_free
from wrapopt._types import (
    GradsAndVars, Operation, Session, V1Optimizer, Variable)
from wrapopt._v1 import _averaging
from wrapopt._v1 import _slots
from wrapopt._v1 import _fused
from wrapopt._v1 import _step
from wrapopt._v1._swapping_saver import SwappingSaver

_train = tf.compat.v1.train

# The name of the variable that holds the state of the schedule.
_STATE = "schedule_free"


class ScheduleFreeOptimizer(_averaging.AveragingOptimizer):
  """Trains with a constant learning rate and evaluates an average.

  The inner optimizer trains `z`, by gradients at `y`, and `x` is the average of
  all `z`. In step t, counted from 1,

      y = (1 - momentum) z + momentum x
      z = the inner optimizer's step from z, by the gradient at y
      x = (1 - c) x + c z

      c = w_t / (w_1 + ... + w_t)
      w_t = t^r (the largest learning rate until t)^weight_lr_power

  The variables hold y in the training, and one more variable for each holds z.
  x is the average: it follows from the two, needs no memory, and is what one
  evaluates and ships. `averaged_weights` puts it in place of the variables for
  a `with` block. `swapping_saver` writes it into a checkpoint under the
  variables' names.

  One native op per device and dtype takes the step and the averaging in one
  pass over memory. The inner optimizer is exactly one of `tf.compat.v1.train`:
  `GradientDescentOptimizer`, `AdamOptimizer`, `AdagradOptimizer`, or
  `RMSPropOptimizer` that is not centered. It must have no momentum, which would
  act twice. That of Adam is taken over: its `beta1` must be `momentum` or 0,
  and it makes no first moments.

  The step with a sparse gradient is that of the dense one: y moves in all rows
  towards z, in each step, so no row can wait.

  State: for each trained variable of name `<v>`, a variable `<v>/ScheduleFree`
  of the same shape and dtype, not trainable, which holds z. It starts as the
  average of a `MovingAverageOptimizer`. For all of them `schedule_free`, a
  float64 vector: the number of steps, the sum of their weights, the largest
  learning rate, and the weight of x in what the variables hold.

  After you have set the variables yourself in the middle of a training, call
  `seed_averages`: z and x do not follow them.

  One worker must take the steps: two that race would count wrongly, so a
  `DropStaleGradientOptimizer` cannot be around this one. In a
  CentralStorageStrategy or a TPUStrategy, the inner optimizer takes its own
  step from z.

  Example, eager:

  >>> w = tf.Variable([0.0])
  >>> opt = wrapopt.ScheduleFreeOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(1.0), momentum=0.5)
  >>> for _ in range(2):
  ...   opt.minimize(lambda: -w, var_list=[w])
  >>> opt.z(w).numpy(), opt.average(w).numpy()  # x: the mean of 1 and 2.
  (array([2.], dtype=float32), array([1.5], dtype=float32))
  >>> with opt.averaged_weights():
  ...   print(w.numpy())
  [1.5]

  References: Defazio, Yang, Mehta, Mishchenko, Khaled and Cutkosky, "The road
  less scheduled", NeurIPS 2024, arXiv 2405.15682; the authors' package
  `schedulefree` for PyTorch.

  Differences from `schedulefree`: `averaged_weights` replaces the modes
  `train()` and `eval()`; Adam is TensorFlow's, whose epsilon is not divided by
  the bias correction.
  """

  _slot_name = "ScheduleFree"

  def __init__(self, opt: V1Optimizer, momentum: float = 0.9,
               warmup_steps: int = 0, weight_lr_power: float = 2.0,
               r: float = 0.0, name: str = "ScheduleFreeOptimizer", *,
               weight_decay_at_y: float = 0.0) -> None:
    """Wraps `opt`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      momentum: The weight of x in the point y at which gradients are taken: a
        number greater than 0 and at most 1.
      warmup_steps: The number of steps in which the learning rate rises
        linearly to its value: an int.
      weight_lr_power: The power of the largest learning rate so far in the
        weight of a step: a number of at least 0.
      r: The power of the number of a step in its weight: a number of at least
        0. 0 is the mean of all z, larger ones favour the latest.
      name: The name of the optimizer.
      weight_decay_at_y: The part of y, times the learning rate, that each step
        takes from z: a number of at least 0.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`, or an
        argument has a wrong type.
      ValueError: If a number is out of range, there is no op for the inner
        optimizer, it has a momentum, or `opt` contains another wrapper that
        keeps averages, or a gate.
    """
    super().__init__(opt, name, decays=[None])
    self._schedule = _schedule_free.checked(
        momentum, warmup_steps, weight_lr_power, r, weight_decay_at_y)
    _check_innermost(self._innermost(), self._schedule.momentum)

  # Steps

  def apply_gradients(self, grads_and_vars: GradsAndVars,
                      global_step: Optional[Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[Operation]:
    """Takes a step.

    Args:
      grads_and_vars: An iterable of (gradient, variable).
      global_step: A variable to increment by one.
      name: A name for the step.
      **kwargs: Further arguments; see
        `tf.compat.v1.train.Optimizer.apply_gradients`.

    Returns:
      In a graph, an operation. In eager mode, None.

    Raises:
      TypeError: If a variable is not of a floating dtype, or a gradient cannot
        be converted to a tensor.
      ValueError: If there is no variable, none has a gradient, a variable is
        listed twice or has a constraint.
      NotImplementedError: In a CentralStorageStrategy or a TPUStrategy, if the
        inner optimizer is an `AdamOptimizer` whose `beta1` is not 0.
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    step = _step.asked(grads_and_vars, global_step, name, kwargs)
    return _step.answer(step, self._take(step))

  def _take(self, step):
    trained = [v for g, v in step.grads_and_vars if g is not None]
    if not trained:  # TensorFlow has an error for it.
      return self._inner._take(step)
    _check_trained(trained)
    variables = self._trained_variables(step)
    averages, _ = self._shadows_by_decay(variables)
    graph = _slots.graph_of_state()
    return self._inner._take(step._replace(points=_schedule_free.Points(
        averages[0], self._non_slot(_STATE, graph), self._schedule)))

  def _has_one_pass(self):
    return False  # A MovingAverageOptimizer cannot be around this one.

  # State

  def _make_averages(self, variables, sparse):
    if variables:
      self._create_non_slot_variable(
          np.array(self._schedule.initial_state()), _STATE, variables[0])
    super()._make_averages(variables, sparse)

  def _make_average(self, variable, is_sparse):
    super()._make_average(variable, is_sparse)
    if not tf.executing_eagerly():
      [(_, average)] = self._pairs_of([variable], 0)
      for part in average.of_replicas():
        part.make_element()

  def _create_slots(self, var_list):
    opt = self._innermost()
    with _fused.with_slots(opt, _fused.schedule_free_rule_of(opt)):
      super()._create_slots(var_list)

  def _touches_few_rows(self):
    return False

  def _pairs_of(self, variables, k):
    return [(v, _schedule_free.Interpolated(
        v, self._shadow(v, k), self._non_slot(_STATE, _slots.graph_of(v))))
            for v in variables]

  def _slot_of_saved(self, name, position):
    return name

  def _counts_of(self, graph):
    return [self._non_slot(_STATE, graph)]

  def _firsts(self, graph):
    return []

  # The averages

  def average(self, var: Any) -> Any:
    """The averaged weights x of a variable.

    Args:
      var: A variable. For a `PartitionedVariable`, the result is a list.

    Returns:
      A tensor of the shape and dtype of the variable: in eager mode x now, in a
      graph x whenever a session runs it. None if `var` has had no gradient yet.

    Raises:
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    if not isinstance(var, tf.Variable):
      return [self.average(v) for v in var]
    if self._readable_z(var, "average") is None:
      return None
    [(_, average)] = self._pairs_of([var], 0)
    return (average.read_value() if _slots.graph_of(var) is None else
            average._as_graph_element())

  def z(self, var: Any) -> Any:
    """The variable that holds z, which the inner optimizer trains.

    Args:
      var: A variable. For a `PartitionedVariable`, the result is a list.

    Returns:
      A variable of its shape and dtype. None if `var` has had no gradient yet.

    Raises:
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    if not isinstance(var, tf.Variable):
      return [self.z(v) for v in var]
    return self._readable_z(var, "z")

  def _readable_z(self, variable, what):
    return _averaging.readable([self._shadow(variable, 0)], what)[0]

  def average_steps(self) -> None:
    """None: the state of the schedule counts the steps."""

  def averages_by_decay(self, graph: Any) -> list[Any]:
    """Returns [(None, [(variable, x)])] of a graph (None: eager mode).

    Raises:
      RuntimeError: If there was no step yet, or in eager mode, inside
        `averaged_weights`.
    """
    self._require_averages(graph, "averages_by_decay")
    _averaging.readable(self._averages(graph), "averages_by_decay")
    return [(None, self._pairs(graph, 0))]

  def seed_averages(self, session: Optional[Session] = None) -> None:
    """Starts anew at the values of the variables, which all points get.

    For a run that resumes from a checkpoint of another optimizer.

    Args:
      session: In a graph, the session; by default the default session. The
        graph may be finalized.

    Raises:
      RuntimeError: If there was no step yet, or the averages are in place.
    """
    self._seed(session, self._schedule.initial_state())

  @contextlib.contextmanager
  def averaged_weights(
      self, session: Optional[Session] = None) -> Iterator[None]:
    """Puts x in place of the variables for a `with` block.

    After the block, also after an exception, the variables hold y again, bit
    for bit. Inside, z has no value: `average` and `z` raise an error, and what
    was made before fails with TensorFlow's words, such as "Trying to read
    variable with wrong dtype. Expected float got INVALID". Leave the block
    first, or read the variable. A step raises an error and changes nothing: in
    eager mode and if a `tf.function` is traced in the block, a RuntimeError; in
    a session and in a `tf.function` that was traced or compiled before, a
    `tf.errors.FailedPreconditionError`.

    Args:
      session: In a graph, the session; by default the default session. The
        graph may be finalized. x and y go through the memory of this process.

    Yields:
      None.

    Raises:
      RuntimeError: If there was no step yet, or the averages are in place
        already. After the block, if z was assigned or restored in it.
    """
    with self._putting_in_place(session, 0):
      yield

  def swapping_saver(self, var_list: Any = None, name: str = "swapping_saver",
                     **kwargs: Any) -> SwappingSaver:
    """A Saver that writes x under the names of the variables.

    In its files, `v` holds x, `v/ScheduleFree` z and `v/ScheduleFree/y` what
    the variable holds. A plain `tf.compat.v1.train.Saver` restores the averaged
    model from such a file, and the training goes on from it. This saver
    restores the state that was saved.

    Args:
      var_list: As for `MovingAverageOptimizer.swapping_saver`.
      name: A name for the saver's operations.
      **kwargs: Arguments of `tf.compat.v1.train.Saver`.

    Returns:
      A `tf.compat.v1.train.Saver`. Inside `averaged_weights`, its `save` and
      `restore` raise a RuntimeError.

    Raises:
      RuntimeError: If there was no step yet.
      ValueError: If a variable is to be saved without its z or the state of the
        schedule, or z without its variable.
    """
    return self._make_swapping_saver(0, var_list, name, kwargs)


def _check_innermost(opt, momentum):
  """Raises an error if an optimizer has no op, or a momentum."""
  name = type(opt).__qualname__
  if _fused.schedule_free_rule_of(opt) is None:
    raise ValueError(
        "`opt` of a ScheduleFreeOptimizer must be exactly a "
        "GradientDescentOptimizer, AdamOptimizer, AdagradOptimizer or "
        "RMSPropOptimizer (not centered) of tf.compat.v1.train, without "
        f"momentum, got {name}.")
  if isinstance(opt, _train.AdamOptimizer):
    attribute, value, allowed = "beta1", opt._beta1, (0, momentum)
  elif isinstance(opt, _train.RMSPropOptimizer):
    attribute, value, allowed = "momentum", opt._momentum, (0,)
  else:
    return
  if not (isinstance(value, (int, float)) and value in allowed):
    raise ValueError(
        "`opt` of a ScheduleFreeOptimizer must have no momentum, which would "
        f"act twice, got {name} with {attribute}={value} and a "
        f"ScheduleFreeOptimizer with momentum={momentum}. Pass {attribute}="
        + " or ".join(map(str, reversed(allowed))) + f" to {name}.")


def _check_trained(variables):
  """Raises an error for variables that no step of this kind can train."""
  if len(set(map(id, variables))) != len(variables):
    raise ValueError(
        "A ScheduleFreeOptimizer must get each variable once in a step, got "
        "one twice. Add its gradients.")
  for v in variables:
    if getattr(v, "constraint", None) is not None:
      raise ValueError(
          "A variable that a ScheduleFreeOptimizer trains must have no "
          "constraint, since the averaged weights would not satisfy it, got "
          f"'{v.name}' with {v.constraint!r}.")
