"""Schedule-Free learning: an average of the weights instead of a schedule."""

from wrapopt._averages import _interpolation as _schedules
from wrapopt._types import V1Optimizer
from wrapopt._v1 import _interpolation


class ScheduleFreeOptimizer(_interpolation.InterpolatingOptimizer):
  """Trains with a constant learning rate and evaluates an average.

  The inner optimizer trains `z`, by gradients at `y`, and `x` is the average of
  all `z`. In step t, counted from 1,

      y = (1 - momentum) z + momentum x
      z = the inner optimizer's step from z, by the gradient at y
      x = (1 - c) x + c z

      c = w_t / (w_1 + ... + w_t)
      w_t = t^r (the largest learning rate until t)^weight_lr_power

  The variables hold y in the training, and one more variable for each holds z.
  x is the average: it follows from the two, needs no memory, and is what one
  evaluates and ships. `averaged_weights` puts it in place of the variables for
  a `with` block. `swapping_saver` writes it into a checkpoint under the
  variables' names.

  One native op per device and dtype takes the step and the averaging in one
  pass over memory. The inner optimizer is exactly one of `tf.compat.v1.train`:
  `GradientDescentOptimizer`, `AdamOptimizer`, `AdagradOptimizer`, or
  `RMSPropOptimizer` that is not centered. It must have no momentum, which would
  act twice. That of Adam is taken over: its `beta1` must be `momentum` or 0,
  and it makes no first moments.

  The step with a sparse gradient is that of the dense one: y moves in all rows
  towards z, in each step, so no row can wait.

  State: for each trained variable of name `<v>`, a variable `<v>/ScheduleFree`
  of the same shape and dtype, not trainable, which holds z. It starts as the
  average of a `MovingAverageOptimizer`. For all of them `schedule_free`, a
  float64 vector: the number of steps, the sum of their weights, the largest
  learning rate, and the weight of x in what the variables hold.

  After you have set the variables yourself in the middle of a training, call
  `seed_averages`: z and x do not follow them.

  One worker must take the steps: two that race would count wrongly, so a
  `DropStaleGradientOptimizer` cannot be around this one. A
  CentralStorageStrategy and a TPUStrategy are refused.

  Example, eager:

  >>> w = tf.Variable([0.0])
  >>> opt = wrapopt.ScheduleFreeOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(1.0), momentum=0.5)
  >>> for _ in range(2):
  ...   opt.minimize(lambda: -w, var_list=[w])
  >>> opt.z(w).numpy(), opt.average(w).numpy()  # x: the mean of 1 and 2.
  (array([2.], dtype=float32), array([1.5], dtype=float32))
  >>> with opt.averaged_weights():
  ...   print(w.numpy())
  [1.5]

  References: Defazio, Yang, Mehta, Mishchenko, Khaled and Cutkosky, "The road
  less scheduled", NeurIPS 2024, arXiv 2405.15682; the authors' package
  `schedulefree` for PyTorch.

  Differences from `schedulefree`: `averaged_weights` replaces the modes
  `train()` and `eval()`; Adam is TensorFlow's, whose epsilon is not divided by
  the bias correction.
  """

  _slot_name = "ScheduleFree"
  _state_name = "schedule_free"

  def __init__(self, opt: V1Optimizer, momentum: float = 0.9,
               warmup_steps: int = 0, weight_lr_power: float = 2.0,
               r: float = 0.0, name: str = "ScheduleFreeOptimizer", *,
               weight_decay_at_y: float = 0.0) -> None:
    """Wraps `opt`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      momentum: The weight of x in the point y at which gradients are taken: a
        number greater than 0 and at most 1.
      warmup_steps: The number of steps in which the learning rate rises
        linearly to its value: an int.
      weight_lr_power: The power of the largest learning rate so far in the
        weight of a step: a number of at least 0.
      r: The power of the number of a step in its weight: a number of at least
        0. 0 is the mean of all z, larger ones favour the latest.
      name: The name of the optimizer.
      weight_decay_at_y: The part of y, times the learning rate, that each step
        takes from z: a number of at least 0.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`, or an
        argument has a wrong type.
      ValueError: If a number is out of range, there is no op for the inner
        optimizer, it has a momentum, or `opt` contains another wrapper that
        keeps averages, or a gate.
    """
    super().__init__(opt, name, _schedules.schedule_free(
        momentum, warmup_steps, weight_lr_power, r, weight_decay_at_y))
