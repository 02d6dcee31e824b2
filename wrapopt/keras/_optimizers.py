"""The optimizers of a model that keep averages."""

import keras

from wrapopt import _composition
from wrapopt.keras import _wrapper
from wrapopt.keras._averages import _averaging
from wrapopt.keras._steps import _views


def averaging(optimizer):
  """The outermost optimizers that keep averages: a list."""
  if _averaging.of(optimizer) is not None:
    return [optimizer]
  return [found for inner in _views.optimizers_in(optimizer)
          for found in averaging(inner)]


def checked_optimizer(optimizer):
  """An argument `optimizer` of a callback, checked."""
  if optimizer is None or isinstance(optimizer,
                                     (str, keras.optimizers.Optimizer)):
    return optimizer
  raise TypeError("`optimizer` must be a Keras optimizer or the name of an "
                  f"attribute of the model, got {optimizer!r}.")


def optimizer_of(model, optimizer, subject):
  """The optimizer of a model that keeps averages, or that holds some that do.

  Args:
    model: A Keras model.
    optimizer: The argument of a callback: the optimizer, the name of the
      attribute that holds it, or None for that of `compile`.
    subject: The name of the callback.

  Raises:
    ValueError: If it keeps no averages.
  """
  found, where = optimizer, "was passed as `optimizer`"
  if optimizer is None:
    found = getattr(model, "optimizer", None)
    where = "model.compile() holds" + (
        " by default" if type(found) is keras.optimizers.RMSprop else "")
  elif isinstance(optimizer, str):
    found, where = getattr(model, optimizer, None), f"is model.{optimizer}"
  if isinstance(found, keras.optimizers.Optimizer) and averaging(found):
    return found
  _composition.check_import(f"The optimizer of {subject}", found,
                            _wrapper.WrapperOptimizer)
  others = [name for name, x in vars(model).items()
            if isinstance(x, keras.optimizers.Optimizer) and averaging(x)]
  raise ValueError(
      f"{subject} needs an optimizer that keeps averages, such as "
      "wrapopt.keras.MovingAverage, got "
      f"{None if found is None else type(found).__qualname__}, which {where}. "
      + (f"Pass {' or '.join(f'optimizer={x!r}' for x in others)}, the "
         "attribute of the model that keeps some." if others else
         "If another optimizer trains the model, pass it as `optimizer`."))
