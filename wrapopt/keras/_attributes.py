"""The attributes of a wrapper that are the inner optimizer's."""

import sys
from typing import Any

import keras

from wrapopt.keras._steps import _views


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


class Inside:
  """The optimizer inside, which neither Keras nor TensorFlow tracks here.

  Attributes:
    optimizer: It.
    view: Its view, once it is built.
  """

  def __init__(self, optimizer):
    self.optimizer, self.view = optimizer, None


class InnerAttributes:
  """The attributes and methods that a wrapper takes from the one inside."""

  built: bool
  _inside: Inside
  # The `_averaging.Averages` that replace the weights, or None. Its class is
  # also one of `_public_methods.PublicMethods`.
  _averages: Any = None

  @property
  def inner_optimizer(self) -> keras.optimizers.Optimizer:
    """The optimizer that this wraps, as in Keras's LossScaleOptimizer."""
    if is_asked_by_swap_ema_weights():
      # It would go past this wrapper, into the inner optimizer. Without the
      # attribute, it reads `_model_variables_moving_average` here.
      raise AttributeError(
          "SwapEMAWeights must read averages of the wrapper, got a read of its "
          "inner_optimizer.")
    return self._inside.optimizer

  @property
  def iterations(self):
    return self.inner_optimizer.iterations

  @property
  def learning_rate(self):
    return self.inner_optimizer.learning_rate

  @learning_rate.setter
  def learning_rate(self, learning_rate):
    self.inner_optimizer.learning_rate = learning_rate

  weight_decay = forwarded("weight_decay")
  clipnorm = forwarded("clipnorm")
  global_clipnorm = forwarded("global_clipnorm")
  clipvalue = forwarded("clipvalue")
  gradient_accumulation_steps = forwarded(
      "gradient_accumulation_steps")

  @property
  def use_ema(self):
    """Whether an optimizer inside keeps Keras's own averages."""
    if not is_made(self):
      return False
    if is_asked_by_swap_ema_weights():
      # It asks each optimizer of a MultiOptimizer around this; after a False,
      # the next one.
      for wrapper in self._wrappers():
        wrapper._refuse_swap_ema_weights()
    return any(opt.use_ema for opt in _views.innermost(self))

  @use_ema.setter
  def use_ema(self, value):
    if is_made(self):  # Else, Keras's constructor sets it.
      raise AttributeError(
          f"`use_ema` of a {type(self).__qualname__} must not be set, got "
          f"{value!r}. Pass it to the optimizer inside.")

  @property
  def loss_scale_factor(self):
    if not is_made(self):
      return None
    scaling = self._loss_scaling()
    if scaling is None:
      return self.inner_optimizer.loss_scale_factor
    return scaling.dynamic_scale if scaling.built else scaling.initial_scale

  @loss_scale_factor.setter
  def loss_scale_factor(self, factor):
    if not is_made(self):
      return
    # A LossScaleOptimizer of Keras sets it in its inner optimizer.
    if self._loss_scaling() is not None:
      raise ValueError(
          f"`loss_scale_factor` of a {type(self).__qualname__} around a "
          "LossScaleOptimizer must not be set, neither by the user nor by "
          "another LossScaleOptimizer around it: gradients would be unscaled "
          "twice. Pass auto_scale_loss=False to compile(), which otherwise "
          "wraps the optimizer of a mixed_float16 model in one.")
    self.inner_optimizer.loss_scale_factor = factor

  def _loss_scaling(self):
    """The LossScaleOptimizer inside, or None."""
    return next((x for x in _views.within(self)
                 if isinstance(x, keras.optimizers.LossScaleOptimizer)), None)

  def scale_loss(self, loss):
    return self.inner_optimizer.scale_loss(loss)

  def exclude_from_weight_decay(self, var_list=None, var_names=None):
    # Keras's LossScaleOptimizer and MultiOptimizer do not pass it on.
    for opt in _views.innermost(self):
      opt.exclude_from_weight_decay(var_list, var_names)

  def finalize_variable_values(self, var_list: Any) -> None:
    """Sets variables to their averages, as Keras does at the end of `fit`.

    With `keep_raw_weights`, and if no average replaces weights, they keep their
    values.

    Args:
      var_list: Variables that the optimizer was built with.

    Raises:
      RuntimeError: Without `keep_raw_weights`, if the averages are in place of
        the weights, or a variable that has an average has left its layer. Then,
        no variable is set.
    """
    averages = self._averages if self.built else None
    if averages is not None:
      averages.before_end()
    self.inner_optimizer.finalize_variable_values(var_list)
    if averages is not None:
      averages.end(var_list)

  @property
  def _model_variables_moving_average(self):
    """Averages of `use_ema`, which Keras's callback SwapEMAWeights reads."""
    for wrapper in self._wrappers():
      wrapper._refuse_swap_ema_weights()
    averages = {
        opt._var_key(v): average for opt in _views.innermost(self)
        if opt.use_ema and opt.built for v, average in zip(
            opt._trainable_variables, opt._model_variables_moving_average)}
    keys = list(map(self._var_key, self._trainable_variables))
    if not averages:  # As in an optimizer of Keras without use_ema.
      raise AttributeError("_model_variables_moving_average")
    if any(key not in averages for key in keys):
      raise ValueError(
          f"SwapEMAWeights must not be used with a {type(self).__qualname__} "
          "around several optimizers of which only some have use_ema=True. "
          "Pass it to all of them, or use wrapopt.keras.MovingAverage and "
          "EvaluateWithAverages() instead.")
    return [averages[key] for key in keys]

  def _refuse_swap_ema_weights(self):
    """Raises an error if an evaluation should not use those of `use_ema`."""
    if self._averages is not None:
      name = type(self).__name__
      raise ValueError(
          f"SwapEMAWeights must not be used with a {name}: it exchanges "
          f"averages of Keras's use_ema, not those of {name}. Use "
          "wrapopt.keras.EvaluateWithAverages() instead.")
