"""Generalized primal averaging: gradients near a moving average."""

from wrapopt._averages import _interpolation as _schedules
from wrapopt._types import V1Optimizer
from wrapopt._v1 import _interpolation


class PrimalAverageOptimizer(_interpolation.InterpolatingOptimizer):
  """Trains at a point near a moving average, and evaluates the average.

  The inner optimizer trains `z`, by gradients at `y`, and `x` is a moving
  average of `z`. In each step,

      y = (1 - momentum) z + momentum x
      z = the inner optimizer's step from z, by the gradient at y
      x = average_decay x + (1 - average_decay) z

  As with `ScheduleFreeOptimizer`, whose x is the mean of all z, the variables
  hold y in the training, one more variable for each holds z, and x follows from
  the two. x is the average, which one evaluates and ships: by
  `averaged_weights` or `swapping_saver`. Other than there, Adam keeps its first
  moment, and the learning rate follows the schedule that it would follow
  without this wrapper.

  One native op per device and dtype takes the step and the averaging in one
  pass over memory. The inner optimizer is exactly one of `tf.compat.v1.train`:
  `GradientDescentOptimizer`, `AdamOptimizer`, `AdagradOptimizer`, or
  `RMSPropOptimizer` that is not centered and has no momentum.

  The step with a sparse gradient is that of the dense one: y moves in all rows
  towards z, in each step, so no row can wait.

  State: for each trained variable of name `<v>`, a variable `<v>/PrimalAverage`
  of the same shape and dtype, not trainable, which holds z. It starts as the
  average of a `MovingAverageOptimizer`. For all of them `primal_average`, a
  float64 vector: the number of steps, and the weight of x in what the variables
  hold.

  After you have set the variables yourself in the middle of a training, call
  `seed_averages`: z and x do not follow them.

  One worker must take the steps: two that race would count wrongly, so a
  `DropStaleGradientOptimizer` cannot be around this one. A
  CentralStorageStrategy and a TPUStrategy are refused.

  Example, eager:

  >>> w = tf.Variable([0.0])
  >>> opt = wrapopt.PrimalAverageOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(1.0), 0.5, 0.5)
  >>> for _ in range(2):
  ...   opt.minimize(lambda: -w, var_list=[w])
  >>> opt.z(w).numpy(), opt.average(w).numpy()  # x: 0, 0.5, 1.25.
  (array([2.], dtype=float32), array([1.25], dtype=float32))
  >>> with opt.averaged_weights():
  ...   print(w.numpy())
  [1.25]

  References: Defazio, Mishchenko, Raman, Shi and Xiao, "Smoothing DiLoCo with
  primal averaging for faster training of LLMs", 2025, arXiv 2512.17131; the
  authors' GPAAdamW for PyTorch, in the repository facebookresearch/optimizers,
  whose `train_interp_coeff` (mu_y) is `momentum` and whose `eval_interp_coeff`
  (mu_x) is `average_decay`.

  Differences from GPAAdamW: `averaged_weights` replaces the modes `train()` and
  `eval()`; Adam is TensorFlow's, whose epsilon is not divided by the bias
  correction.
  """

  _slot_name = "PrimalAverage"
  _state_name = "primal_average"

  def __init__(self, opt: V1Optimizer, momentum: float = 0.7,
               average_decay: float = 0.9967,
               name: str = "PrimalAverageOptimizer") -> None:
    """Wraps `opt`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      momentum: The weight of x in the point y at which gradients are taken: a
        number greater than 0 and at most 1. x has the precision of y divided by
        it.
      average_decay: The weight of the old x in the new one: a number in [0, 1].
        With 0, x, y and z are one, which the inner optimizer trains.
      name: The name of the optimizer.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`, or an
        argument has a wrong type.
      ValueError: If a number is out of range, there is no op for the inner
        optimizer, or `opt` contains another wrapper that keeps averages, or a
        gate.
    """
    super().__init__(opt, name,
                     _schedules.primal_average(momentum, average_decay))
