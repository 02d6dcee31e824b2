"""Methods that users set on an instance of an optimizer.

Keras calls such a method in the place of the class's. A step of a wrapper would
pass some of them over: it replaces methods of the class, takes an update in a
native op, and does not call the wrapper's own.
"""

import functools
import inspect

import keras

from wrapopt.keras._steps import _rules
from wrapopt.keras._steps import _step
from wrapopt.keras._steps import _views

_Optimizer = keras.optimizers.Optimizer

# An innermost optimizer's: a view of it replaces them, or calls the class's.
_REPLACED = frozenset({
    "apply", "apply_gradients", "_all_reduce_sum_gradients",
    "_apply_weight_decay", "_backend_apply_gradients",
    "_backend_increment_gradient_accumulators", "_backend_update_step",
    "_get_current_learning_rate"})
_OF_RULES = _REPLACED | _rules.PASSED_OVER

# A wrapper's, which it calls or inherits as they are.
_CALLED = frozenset({
    "_check_super_called", "_get_variable_index", "_obj_type",
    "_overwrite_variable_with_gradient", "_track_variable",
    "_untrack_variable", "_var_key", "add_variable"})


def check(outermost, optimizers):
  """Raises an error for methods that a step would pass over.

  Args:
    outermost: A wrapper.
    optimizers: It, and all optimizers inside, each before those that it holds.
  """
  for opt in optimizers:
    names = _passed_over(opt, opt is outermost, opt is optimizers[-1])
    if names:
      cls, found = type(opt).__qualname__, ", ".join(sorted(names))
      raise NotImplementedError(
          f"A step of {type(outermost).__qualname__} must call all methods "
          f"that are set on an optimizer, got {found} of {cls}, "
          "which it would pass over. " + (
              "Override it in a subclass of the optimizer inside."
              if _step.is_wrapper(opt) else
              f"Make a subclass of {cls} that overrides it."))


def _passed_over(opt, is_outermost, is_last):
  """The names of methods that a step would pass over."""
  cls, own = type(opt), vars(opt)
  if _step.is_wrapper(opt):
    uncalled, overridden = _uncalled(cls, is_outermost)
    return overridden or own.keys() & uncalled
  if not is_last and any(_views.optimizers_in(opt)):
    # It would take a step of the optimizers that `opt` holds, and not of views
    # of them.
    return {name for name, x in own.items()
            if callable(x) and callable(getattr(cls, name, None))}
  return own.keys() & (_OF_RULES if _rules.has_rule(cls) else _REPLACED)


@functools.cache
def _uncalled(cls, is_outermost):
  """Methods of Keras that no step of a class of wrappers calls on a wrapper.

  Returns:
    A set of names, and those that a subclass of the wrapper overrides.
  """
  ours = [c for c in cls.__mro__ if c.__module__.startswith("wrapopt.")]
  methods = {
      name: method
      for name, method in inspect.getmembers(_Optimizer, inspect.isfunction)
      if method.__module__.startswith("keras.") and
      not name.startswith("__") and name not in _CALLED and
      not any(name in vars(c) for c in ours)}
  inside = () if is_outermost else ("apply", "apply_gradients")
  return {*methods, *inside}, {
      name for name, method in methods.items()
      if getattr(cls, name) is not method}
