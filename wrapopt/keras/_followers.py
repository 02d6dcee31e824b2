"""The interface between the step of an optimizer and the wrappers around it."""

import typing

import tensorflow as tf

from wrapopt import _lookup_cache
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt.keras._variables import value_of


class Step(typing.NamedTuple):
  """A step that an optimizer has taken, or is about to take.

  Attributes:
    iterations: The number of steps before this one: an int64 scalar.
    variables: The tf.Variables that it updates.
    keys: Their keys.
    trained: (tf.Variable, key) of all variables of the optimizer, also of those
      without a gradient.
    moved: (tf.Variable, key, constraint or None) of those that a wrapper may
      move after the step, if there is one that moves weights. Not of frozen
      ones.
    cache: A `LookupCache` of the optimizer that takes it, for eager steps.
    accept: True, or a scalar bool tensor: whether it is taken. If it is a
      tensor, one op takes it, or nothing.
    compensation: A `_compensation.Compensated`, or None.
    after: A function that runs after the step, before followers, or None.
    ahead: {id of a follower: what it asked for before Keras took the step}, if
      followers run after Keras has counted it; else None.
  """
  iterations: typing.Any
  variables: list
  keys: list
  trained: list
  moved: list
  cache: _lookup_cache.LookupCache
  accept: typing.Any = True
  compensation: typing.Any = None
  after: typing.Callable | None = None
  ahead: typing.Any = None

  @property
  def part(self):
    """The key of the first variable of the optimizer that takes the step."""
    return self.trained[0][1]

  def pairs(self, row):
    """[(updated variable, its value in a dict from keys)] of all replicas."""
    return _pairs(zip(self.variables, self.keys), row)

  def all_pairs(self, row):
    """The same for all variables that the optimizer trains."""
    return _pairs(self.trained, row)

  def moved_pairs(self, row):
    """The same for those that a wrapper may move."""
    return _pairs(((v, key) for v, key, _ in self.moved), row)

  def constrain(self):
    """Applies constraints to weights that a wrapper has moved."""
    for variable, _, constraint in self.moved:
      for v in _replicas.values(variable) if constraint is not None else ():
        v.assign(constraint(v.read_value()))


def _pairs(keyed, row):
  """Those of (variable, key) pairs that a row has, with its values."""
  return _replicas.components(
      (variable, _lazy.stored(value_of(row[key])))
      for variable, key in keyed if key in row)


class Follower:
  """The interface of a wrapper, which follows the steps of an optimizer.

  Attributes:
    changes_weights: Whether `_follow` may change weights that the step did not.
      It then calls the step's `constrain`.
    in_pass: Whether its work is done in the pass of a step that is one op.
    is_gate: Whether `_admit` decides which steps are taken. It does not follow
      them.
    sum_duplicates: The argument of the wrapper.
  """

  changes_weights = False
  in_pass = False
  is_gate = False
  sum_duplicates = False

  @property
  def inner_optimizer(self):
    """The optimizer that this wraps."""
    raise NotImplementedError

  def _checks(self):
    """Operations that fail if no step may be taken now: a list."""
    return []

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
    del step, inner, grads, variables, learning_rate
    return False

  def _averages_of(self, step):
    """The averages to update in the pass of the step, or None.

    Args:
      step: A Step, which is about to be taken. Only the averages that this
        returns may lag behind after it.

    Returns:
      Rows of averages, one for each decay, and the decays. A variable that
      is not averaged has None in each row.
    """
    del step

  def _ahead(self):
    """Reads what the follower needs before Keras counts a step."""

  def _note_update(self):
    """Notes that the averages of `_averages_of` have been updated."""

  def _follow(self, step):
    """Does the work of this wrapper after a step.

    Args:
      step: A Step, which was taken.
    """
    raise NotImplementedError


class NoFollower(Follower):
  """Does nothing: for steps that no wrapper follows."""

  in_pass = True

  def _follow(self, step):
    del step


def where(condition, function):
  """Calls `function` if `condition`, True or a scalar bool tensor, is true."""
  if condition is True or tf.executing_eagerly():
    if condition:
      function()
    return

  def called():
    function()
    return True

  tf.cond(condition, called, lambda: False)


def follow(followers, step, is_taken=True):
  """Runs followers after a step, if `is_taken`: True, or a bool tensor."""
  def run():
    if step.after is not None:
      step.after()
    for follower in followers:
      follower._follow(step)

  _replicas.merged(lambda: where(is_taken, run))()
