"""The base class of the optimizers that train between z and its average x."""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any, Optional

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _interpolation
from wrapopt._averages import _replicas
from wrapopt._types import GradsAndVars, Operation, Session, Variable
from wrapopt._v1 import _wrapper
from wrapopt._v1._averages import _averaging
from wrapopt._v1._averages import _points
from wrapopt._v1._averages import _slots
from wrapopt._v1._evaluation._swapping_saver import SwappingSaver
from wrapopt._v1._graphs import _control_flow
from wrapopt._v1._steps import _rules
from wrapopt._v1._steps import _step

_train = tf.compat.v1.train


class InterpolatingOptimizer(_wrapper.WrapperOptimizer):
  """Trains z by gradients at y, between z and its average x."""

  # The names of the slots that hold z, and of the variable that holds the state
  # of the schedule.
  _slot_name: str
  _state_name: str

  def __init__(self, opt, name, schedule):
    """Wraps an optimizer.

    Args:
      opt: The inner optimizer.
      name: The name of this one.
      schedule: A schedule of _averages/_interpolation.py.
    """
    super().__init__(opt, name)
    self._averages = _points.Points(self, schedule)
    self._schedule = schedule
    _check_innermost(self._innermost(), type(self).__name__, schedule)

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
        listed twice or has a constraint, or a method of the inner optimizer was
        replaced.
      NotImplementedError: In a CentralStorageStrategy or a TPUStrategy.
      RuntimeError: In eager mode, inside `averaged_weights`.
    """
    return _step.apply_gradients(self._take, grads_and_vars, global_step, name,
                                 kwargs)

  def _take(self, step):
    trained = [v for g, v in step.grads_and_vars if g is not None]
    if not trained:  # TensorFlow has an error for it.
      return self._inner._take(step)
    _check_innermost(self._innermost(), type(self).__name__, self._schedule)
    _check_strategy(type(self).__name__)
    _check_trained(trained, type(self).__name__)
    points, share = self._averages, self._averages.share
    variables = points.trained(step)
    [z], _ = points.by_decay(variables)
    graph = _slots.graph_of_state()
    if tf.distribute.has_strategy():
      # Out of the replicas, TensorFlow finds no slots.
      shares = {id(v): share(v)
                for v in [*variables, *points.averaged.of(graph)]}
      share = lambda variable: shares[id(variable)]

    def trained():
      return [_interpolation.Trained(*parts) for v, its_z in zip(variables, z)
              for parts in zip(*map(_replicas.values, (v, its_z, share(v))))]

    def others():
      here = set(map(id, variables))
      return [x for v in points.averaged.of(graph) if id(v) not in here
              for x in _replicas.values(share(v))]

    def settle(state):
      # A later `minimize` may make further ones.
      settled = functools.partial(
          _interpolation.settle, state, self._schedule.momentum, is_all=False)
      if tf.executing_eagerly():
        return settled(trained, others)
      moved, left = trained(), others()
      used = [*sum(map(list, moved), []), *left]
      if _control_flow.may_be_seldom(used):
        of = _control_flow.in_seldom
        moved = [_interpolation.Trained(*map(of, t)) for t in moved]
        left, cond = list(map(of, left)), _control_flow.seldom(used)
      else:
        cond = (_control_flow.cond_of_refs
                if any(map(ops.is_ref_variable, used)) else tf.cond)
      return settled(lambda: moved, lambda: left, cond=cond)

    return self._inner._take(step._replace(averages=_interpolation.Points(
        z, points.state_of(graph), self._schedule, settle)))

  def _fuses(self):
    return False  # A MovingAverageOptimizer cannot be around this one.

  # State

  def _create_slots(self, var_list):
    opt = self._innermost()
    with _rules.with_slots(opt, _rules.interpolated_rule_of(
        opt, self._schedule)):
      super()._create_slots(var_list)

  def _touches_few_rows(self):
    return False

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
    return self._averages.average(var, 0)

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
    return _averaging.readable([self._averages.stored(var, 0)], "z")[0]

  def average_steps(self) -> None:
    """None: the state of the schedule counts the steps."""

  def averages_by_decay(self, graph: Any) -> list[Any]:
    """Returns [(None, [(variable, x)])] of a graph (None: eager mode).

    Raises:
      RuntimeError: If there was no step yet, or in eager mode, inside
        `averaged_weights`.
    """
    return self._averages.readable_by_decay(graph)

  def seed_averages(self, session: Optional[Session] = None) -> None:
    """Starts anew at the values of the variables, which all points get.

    For a run that resumes from a checkpoint of another optimizer.

    Args:
      session: In a graph, the session; by default the default session. The
        graph may be finalized.

    Raises:
      RuntimeError: If there was no step yet, or the averages are in place.
    """
    self._averages.seed(session, self._schedule.initial_state())

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
    `tf.errors.FailedPreconditionError`. If anything else has changed a variable
    in the block, such as a step of another optimizer, this is an error at its
    end in eager mode. A session does not see it. The variables hold y again.

    Args:
      session: In a graph, the session; by default the default session. The
        graph may be finalized. x and y go through the memory of this process.

    Yields:
      None.

    Raises:
      RuntimeError: If there was no step yet, or the averages are in place
        already. After the block, if z was assigned or restored in it, or in
        eager mode a variable.
    """
    with self._averages.in_place(session, 0):
      yield

  def swapping_saver(self, var_list: Any = None, name: str = "swapping_saver",
                     **kwargs: Any) -> SwappingSaver:
    """A Saver that writes x under the names of the variables.

    In its files, `v` holds x, `v/<slot>` z and `v/<slot>/y` what the variable
    holds, where `<slot>` is the name of the slot that holds z. A plain
    `tf.compat.v1.train.Saver` restores the averaged model from such a file, and
    the training goes on from it. This saver restores the state that was saved.

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
    return self._averages.swapping_saver(0, var_list, name, kwargs)


def _check_innermost(opt, outer, schedule):
  """Raises an error if an optimizer has no op, or a momentum of its own."""
  name = type(opt).__qualname__
  if _rules.interpolated_rule_of(opt, schedule) is None:
    raise ValueError(
        f"`opt` of a {outer} must be exactly a GradientDescentOptimizer, "
        "AdamOptimizer, AdagradOptimizer or RMSPropOptimizer (not centered) of "
        f"tf.compat.v1.train, without momentum, got {name}.")
  allowed: tuple[float, ...]
  if isinstance(opt, _train.RMSPropOptimizer):
    attribute, value, allowed = "momentum", opt._momentum, (0,)
  elif isinstance(opt, _train.AdamOptimizer) and schedule.replaces_momentum:
    attribute, value, allowed = "beta1", opt._beta1, (0, schedule.momentum)
  else:
    return
  if not (isinstance(value, (int, float)) and value in allowed):
    why = "would act twice" if schedule.replaces_momentum else "has no op"
    raise ValueError(
        f"`opt` of a {outer} must have no momentum, which {why}, got {name} "
        f"with {attribute}={value} and a {outer} with "
        f"momentum={schedule.momentum}. Pass {attribute}="
        + " or ".join(map(str, reversed(allowed))) + f" to {name}.")


def _check_strategy(outer):
  """Raises an error in a strategy in which no op takes the step."""
  if not _replicas.will_have_copies():
    strategy = type(tf.distribute.get_strategy()).__name__
    raise NotImplementedError(
        f"A {outer} must be in a strategy whose replicas have their own "
        f"variables, got a {strategy}. Use a MirroredStrategy, or the wrapper "
        "of wrapopt.keras.")


def _check_trained(variables, outer):
  """Raises an error for variables that no step of this kind can train."""
  if len(set(map(id, variables))) != len(variables):
    raise ValueError(
        f"A {outer} must get each variable once in a step, got one twice. Add "
        "its gradients.")
  for v in variables:
    if getattr(v, "constraint", None) is not None:
      raise ValueError(
          f"A variable that a {outer} trains must have no constraint, since "
          "the averaged weights would not satisfy it, got "
          f"'{v.name}' with {v.constraint!r}.")
