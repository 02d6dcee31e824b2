"""Views of Keras optimizers in wrappers, and the optimizers in others."""

import keras
import tensorflow as tf

from wrapopt.keras._steps import _inner
from wrapopt.keras._steps import _step
from wrapopt.keras._variables import value_of


def followed(opt, wrappers):
  """Makes a view of an optimizer whose steps are followed by wrappers' work.

  A view shares all attributes of the optimizer, and is of a subclass of its
  class. The optimizer is not changed.

  Args:
    opt: A `keras.optimizers.Optimizer`, which may hold others, like Keras's
      LossScaleOptimizer and MultiOptimizer.
    wrappers: Wrappers, the innermost first.

  Returns:
    A view.
  """
  if _step.is_wrapper(opt):
    return followed(opt.inner_optimizer, [opt, *wrappers])
  attributes = _attributes_with_optimizers(opt)
  if attributes:
    return view(opt, {
        "_backend_update_step": _refused(type(opt), list(attributes), wrappers),
        **{name: _property(name, wrappers) for name in attributes}})
  iterations = value_of(vars(opt)["_iterations"])
  inner = (_inner.AskingInner(type(opt), wrappers, iterations)
           if _inner.asks(iterations, wrappers) else
           _inner.Inner(type(opt), wrappers))
  inner.opt = view(opt, {"wrapopt_inner": inner}, inner.View)
  return inner.opt


def _refused(cls, names, wrappers):
  def update(self, grads, variables, learning_rate):
    raise NotImplementedError(
        f"{cls.__qualname__} inside of {type(wrappers[-1]).__name__} must "
        "leave all steps to the optimizers that it holds in "
        f"{', '.join(f'`{name}`' for name in names)}, got a step of its own, "
        "which no average would follow. Use keras.optimizers.MultiOptimizer to "
        "train variables by several optimizers.")

  return update


def view(opt, attributes, *mixins):
  """An object that shares all attributes of an optimizer but some.

  Args:
    opt: A `keras.optimizers.Optimizer`.
    attributes: {name: attribute of the class} of the others.
    *mixins: Classes before the class of the optimizer.
  """
  cls = type(opt)
  seen = object.__new__(type(cls.__name__, (*mixins, cls), {
      "__module__": cls.__module__, "__doc__": cls.__doc__, **attributes}))
  # Keras's __setattr__ would track it as an attribute.
  object.__setattr__(seen, "__dict__", vars(opt))
  return seen


def _attributes_with_optimizers(opt):
  """{attribute: optimizer, or a list, tuple or dict of some} of `opt`."""
  def is_optimizer(x):
    if isinstance(x, dict):
      x = list(x.values())
    return isinstance(x, keras.optimizers.Optimizer) or (
        isinstance(x, (list, tuple)) and x and all(map(is_optimizer, x)))

  return {name: x for name, x in vars(opt).items() if is_optimizer(x)}


def _property(name, wrappers):
  views = {}  # By id.

  def seen(opt):
    if id(opt) not in views:
      views[id(opt)] = followed(opt, wrappers)
    return views[id(opt)]

  def get(self):
    return tf.nest.map_structure(seen, vars(self)[name])

  return property(get)


def within(opt):
  """All optimizers inside of an optimizer, at any depth: an iterator."""
  for x in optimizers_in(opt):
    yield x
    yield from within(x)


def optimizers_in(opt):
  """The optimizers that an optimizer holds directly: a list."""
  if _step.is_wrapper(opt):
    return [opt.inner_optimizer]
  return [x for xs in _attributes_with_optimizers(opt).values()
          for x in tf.nest.flatten(xs)]


def innermost(opt):
  """The optimizers inside of all others, which take the steps: a list."""
  return [x for x in [opt, *within(opt)] if not any(within(x))]
