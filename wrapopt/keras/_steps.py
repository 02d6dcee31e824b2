"""How a Keras optimizer's step is taken with what wrappers do after it.

Keras's own code clips and accumulates gradients, scales losses, applies
constraints and counts. Only the innermost update of the variables is another.
"""

import typing

import keras
import tensorflow as tf

from wrapopt import _inner_keras
from wrapopt import ops

_interim = tf.__internal__.distribute.interim


class Step(typing.NamedTuple):
  """A step that an optimizer has taken, or is about to take.

  Attributes:
    iterations: How many steps it had taken before: an int64 scalar.
    variables: The tf.Variables that it updates.
    keys: Their keys.
  """
  iterations: typing.Any
  variables: list
  keys: list

  def of(self, row):
    """The variables of a dict from keys, in the order of `variables`."""
    return [row[key] for key in self.keys]


def followed(opt, followers):
  """A view of an optimizer whose steps are followed by what wrappers do.

  A view shares all attributes of the optimizer, and is of a subclass of its
  class. The optimizer itself is left as it is.

  Args:
    opt: A `keras.optimizers.Optimizer`, which may hold others, as Keras's
      LossScaleOptimizer and MultiOptimizer do.
    followers: Wrappers, the innermost first.

  Returns:
    A view.
  """
  if isinstance(opt, Follower):
    return followed(opt.inner(), [opt, *followers])
  held = _held(opt)
  if held:
    return _view(opt, {name: _property(name, followers) for name in held})
  cls = type(opt)
  return _view(opt, {
      # A part of the update.
      "_apply_weight_decay": lambda self, variables: None,
      "_backend_update_step": lambda self, grads, variables, learning_rate: (
          _update(self, cls, grads, variables, learning_rate, followers))})


def innermost(opt):
  """The optimizers that take the steps of an optimizer: a list."""
  if isinstance(opt, Follower):
    return innermost(opt.inner())
  held = [x for xs in _held(opt).values()
          for x in (xs if isinstance(xs, list) else [xs])]
  return [x for h in held for x in innermost(h)] or [opt]


class Follower:
  """What `followed` asks of a wrapper."""

  def inner(self):
    """The optimizer that this wraps."""
    raise NotImplementedError

  def averages(self, step):
    """(rows of averages, decays) for the pass of the update itself, or None.

    Args:
      step: A Step, which is about to be taken.
    """
    del step

  def follow(self, step):
    """Does what this wrapper does after a step.

    Args:
      step: A Step, which was taken.
    """
    raise NotImplementedError


def _view(opt, attributes):
  cls = type(opt)
  view = object.__new__(type(cls.__name__, (cls,), {
      "__module__": cls.__module__, "__doc__": cls.__doc__, **attributes}))
  # Keras would take it for one of its attributes.
  object.__setattr__(view, "__dict__", vars(opt))
  return view


def _held(opt):
  """{attribute: optimizer or list of optimizers} that `opt` holds itself."""
  def is_optimizer(x):
    return isinstance(x, keras.optimizers.Optimizer)

  return {name: x for name, x in vars(opt).items()
          if is_optimizer(x) or
          isinstance(x, list) and x and all(map(is_optimizer, x))}


def _property(name, followers):
  views = {}  # By id.

  def seen(opt):
    if id(opt) not in views:
      views[id(opt)] = followed(opt, followers)
    return views[id(opt)]

  def get(self):
    held = vars(self)[name]
    return list(map(seen, held)) if isinstance(held, list) else seen(held)

  return property(get)


@ops.not_converted
def _update(opt, cls, grads, variables, learning_rate, followers):
  """Updates variables as `cls` does for `opt`, and then has wrappers follow."""
  for follower in followers:
    follower.stepped = True
  values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
  keys = [opt._var_key(v) for v in variables]
  iterations = tf.convert_to_tensor(opt.iterations)
  if tf.distribute.has_strategy():
    cls._apply_weight_decay(opt, variables)
    cls._backend_update_step(opt, grads, variables, learning_rate)
    _interim.maybe_merge_call(
        lambda strategy, iterations: _follow(
            followers, Step(_one(strategy, iterations), values, keys)),
        opt._distribution_strategy, iterations)
    return
  step = Step(iterations, values, keys)
  rule = _inner_keras.rule_of(opt, cls)
  if rule is None:
    cls._apply_weight_decay(opt, variables)
    cls._backend_update_step(opt, grads, variables, learning_rate)
    _follow(followers, step)
    return
  first, *others = followers
  averages = first.averages(step)
  _inner_keras.apply(opt, cls, rule, grads, variables, learning_rate,
                     *(averages or ((), ())))
  _follow(others if averages else followers, step)


def _follow(followers, step):
  for follower in followers:
    follower.follow(step)


def _one(strategy, value):
  return strategy.experimental_local_results(value)[0]
