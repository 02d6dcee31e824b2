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


def is_wrapper(opt):
  """Whether an optimizer is a wrapper of this package, which follows steps."""
  # Not by its class, whose module imports this one.
  return hasattr(type(opt), "_follow")


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
