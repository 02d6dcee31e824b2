"""Who asks for the attributes of a wrapper that are the inner optimizer's."""

import sys

import keras


def is_made(wrapper):
  """Whether the constructor of a wrapper knows the inner optimizer."""
  return "_inside" in vars(wrapper)


def forwarded(name):
  """An attribute that reads and writes that of the inner optimizer."""
  def read(self):
    return getattr(self.inner_optimizer, name) if is_made(self) else None

  def write(self, value):
    # Keras's constructor sets it before the inner optimizer is known.
    if is_made(self):
      setattr(self.inner_optimizer, name, value)

  return property(read, write)


def is_asked_by_swap_ema_weights():
  """Whether Keras's SwapEMAWeights reads the property that calls this."""
  return (sys._getframe(2).f_globals.get("__name__") ==
          keras.callbacks.SwapEMAWeights.__module__)


def is_asked_for_all():
  """Whether the property `variables` that calls this is to have averages, too.

  Keras's LossScaleOptimizer and MultiOptimizer save and load the variables of
  the optimizers in them by their numbers. The averages are saved apart, and
  files without wrappers fit.
  """
  frame = sys._getframe(2)
  while frame is not None and frame.f_code.co_name == "variables":
    frame = frame.f_back
  return frame is None or frame.f_code.co_name not in (
      "save_own_variables", "load_own_variables")
