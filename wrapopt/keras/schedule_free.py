"""Schedule-Free learning: an average of the weights instead of a schedule."""

from typing import Any, Optional, Union

import keras

from wrapopt._averages import _interpolation as _schedules
from wrapopt.keras import _wrapper
from wrapopt.keras._averages import _points

# Attributes of Keras's optimizers that give them a momentum.
_MOMENTA = ("momentum", "beta_1", "adam_beta_1")


@keras.saving.register_keras_serializable("wrapopt")
class ScheduleFree(_points.Methods, _wrapper.WrapperOptimizer):
  """Trains with a constant learning rate and evaluates an average.

  The inner optimizer trains `z`, by gradients at `y`, and `x` is the average of
  all `z`. In step t, counted from 1,

      y = (1 - momentum) z + momentum x
      z = the inner optimizer's step from z, by the gradient at y
      x = (1 - c) x + c z

      c = w_t / (w_1 + ... + w_t)
      w_t = t^r (the largest learning rate until t)^weight_lr_power

  The variables of the model hold y in the training, and one more variable for
  each holds z. x is the average: it follows from the two, needs no memory, and
  is what one evaluates and ships. As with the other wrappers, `average`,
  `averaged_weights` and `averaged_model` give it, `EvaluateWithAverages`
  evaluates it, and `fit` ends with it in the model. A later `fit` continues the
  training from it: its first gradient is that at x. All three points start at
  the value of the variable before the first step.

  No schedule of the learning rate is needed, and the number of steps is not
  known beforehand. The rate is larger than with a schedule: for SGD 10 to 50
  times, for Adam 1 to 10 times that of the plain optimizer. It must not decay.

  If the inner optimizer is exactly one of Keras's SGD, Adam, AdamW, Adagrad and
  RMSprop (not centered, without AMSGrad), one native op takes the step and the
  averaging in one pass over memory (`fused`). Around SGD that takes the memory
  of SGD with momentum, around Adam that of Adam, since Schedule-Free learning
  replaces the momentum. Around any other optimizer, and in a
  CentralStorageStrategy or a TPUStrategy, the inner optimizer takes its own
  step from z.

  The inner optimizer must have no momentum, which would act twice. That of Adam
  and AdamW is taken over: their `beta_1` must be `momentum` or 0, and they keep
  no first moments. From then on, the optimizer is part of this one: do not use
  it alone.

  The weight decay of the inner optimizer shrinks z. `weight_decay_at_y` takes
  its part from y, as the authors' own AdamWScheduleFree does.

  The step with the sparse gradient of an embedding is that of the dense one: y
  moves in all rows towards z, in each step, so no row can wait. Gradients of
  one row are summed first.

  Example:

  >>> w = keras.Variable([0.0])
  >>> opt = wrapopt.keras.ScheduleFree(keras.optimizers.SGD(1.0), 0.5)
  >>> for _ in range(2):
  ...   opt.apply([tf.constant([-1.0])], [w])
  >>> opt.z(w).numpy(), opt.average(w).numpy()  # x: the mean of 1 and 2.
  (array([2.], dtype=float32), array([1.5], dtype=float32))
  >>> w.numpy()
  array([1.75], dtype=float32)

  In a model: `model.compile(wrapopt.keras.ScheduleFree("adam"), ...)`.

  After you have set the weights yourself in the middle of a training, call
  `seed_averages`: z and x do not follow them.

  Half-precision variables: x follows from y with the precision of y. Use
  float32 variables, such as those of Keras's policy mixed_bfloat16.

  References: Defazio, Yang, Mehta, Mishchenko, Khaled and Cutkosky, "The road
  less scheduled", NeurIPS 2024, arXiv 2405.15682; the authors' package
  `schedulefree` for PyTorch, whose ScheduleFreeWrapper has the same numbers.

  Differences from `schedulefree`: `averaged_weights` and the end of `fit`
  replace the modes `train()` and `eval()`; Adam is Keras's, whose epsilon is
  not divided by the bias correction; a step with a learning rate of 0 at the
  start changes nothing.

  Differences from `keras.optimizers.ScheduleFreeAdamW`: x can be evaluated and
  saved; the warm-up counts in the weights of the average; weight decay acts on
  z; x is not computed from a z of after the step, as by Keras 3.15.
  """

  def __init__(
      self, optimizer: Union[str, dict[str, Any], keras.optimizers.Optimizer],
      momentum: float = 0.9, warmup_steps: int = 0,
      weight_lr_power: float = 2.0, r: float = 0.0, name: Optional[str] = None,
      *, weight_decay_at_y: float = 0.0,
      keep_raw_weights: bool = False) -> None:
    """Wraps `optimizer`.

    Args:
      optimizer: A Keras optimizer, or its name or configuration.
      momentum: The weight of x in the point y at which gradients are taken: a
        number greater than 0 and at most 1. Long runs gain from 0.95 or 0.98.
      warmup_steps: The number of steps in which the learning rate rises
        linearly to its value: an int. The authors advise a warm-up for Adam.
      weight_lr_power: The power of the largest learning rate so far in the
        weight of a step: a number of at least 0.
      r: The power of the number of a step in its weight: a number of at least
        0. 0 is the mean of all z, larger ones favour the latest.
      name: The name of the optimizer.
      weight_decay_at_y: The part of y, times the learning rate, that each step
        takes from z: a number of at least 0. Variables that are excluded from
        the inner optimizer's weight decay are excluded here.
      keep_raw_weights: Whether `fit` ends with y in the model. By default, it
        ends with x.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer, or an argument has a
        wrong type.
      ValueError: If a number is out of range, `optimizer` has a momentum, keeps
        averages itself, or is or holds another wrapper that keeps averages.
    """
    super().__init__(optimizer, name, sum_duplicates=True)
    self._averages = _points.Points(
        self, keep_raw_weights, _schedules.schedule_free(
            momentum, warmup_steps, weight_lr_power, r, weight_decay_at_y))

  def _check_innermost(self, opt, points):
    ours, takes_over = points.schedule.momentum, points.takes_over(type(opt))
    for momentum in _MOMENTA:
      value = getattr(opt, momentum, None)
      if value and not (takes_over and value == ours):
        name = type(opt).__qualname__
        raise ValueError(
            "`optimizer` of a ScheduleFree must have no momentum, which would "
            f"act twice, got {name} with {momentum}={value} and a ScheduleFree "
            f"with momentum={ours}. Pass {momentum}="
            f"{f'{ours} or ' if takes_over else ''}0 to {name}.")
