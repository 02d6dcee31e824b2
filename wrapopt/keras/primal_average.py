"""Generalized primal averaging: gradients near a moving average."""

from typing import Any, Optional, Union

import keras

from wrapopt._averages import _interpolation as _schedules
from wrapopt.keras import _wrapper
from wrapopt.keras import lazy_adam
from wrapopt.keras._averages import _points


@keras.saving.register_keras_serializable("wrapopt")
class PrimalAverage(_points.Methods, _wrapper.WrapperOptimizer):
  """Trains at a point near a moving average, and evaluates the average.

  The inner optimizer trains `z`, by gradients at `y`, and `x` is a moving
  average of `z`. In each step,

      y = (1 - momentum) z + momentum x
      z = the inner optimizer's step from z, by the gradient at y
      x = average_decay x + (1 - average_decay) z

  As with `ScheduleFree`, whose x is the mean of all z, the variables of the
  model hold y in the training, one more variable for each holds z, and x
  follows from the two. x is the average, which one evaluates and ships:
  `average`, `averaged_weights` and `averaged_model` give it,
  `EvaluateWithAverages` evaluates it, and `fit` ends with it in the model. A
  later `fit` continues the training from it: its first gradient is that at x.
  All three points start at the value of the variable before the first step.

  Other than in `ScheduleFree`, the inner optimizer keeps its momentum, and the
  learning rate follows the schedule that it would follow without this wrapper.
  With a momentum of 1 and SGD inside, this is the primal averaging form of
  Nesterov's momentum. With the same decay, `MovingAverage` has the same average
  of weights that are trained by gradients at themselves.

  If the inner optimizer is exactly one of Keras's SGD, Adam, AdamW, Adagrad and
  RMSprop (not centered, without AMSGrad and momentum), one native op takes the
  step and the averaging in one pass over memory (`fused`). That takes one copy
  of the weights more than the inner optimizer alone. Around any other
  optimizer, and in a CentralStorageStrategy or a TPUStrategy, the inner
  optimizer takes its own step from z.

  The weight decay of the inner optimizer shrinks z.

  The step with the sparse gradient of an embedding is that of the dense one: y
  moves in all rows towards z, in each step, so no row can wait. Gradients of
  one row are summed first.

  Example:

  >>> w = keras.Variable([0.0])
  >>> opt = wrapopt.keras.PrimalAverage(keras.optimizers.SGD(1.0), 0.5, 0.5)
  >>> for _ in range(2):
  ...   opt.apply([tf.constant([-1.0])], [w])
  >>> opt.z(w).numpy(), opt.average(w).numpy()  # x: 0, 0.5, 1.25.
  (array([2.], dtype=float32), array([1.25], dtype=float32))
  >>> w.numpy()
  array([1.625], dtype=float32)

  In a model: `model.compile(wrapopt.keras.PrimalAverage("adam"), ...)`.

  After you have set the weights yourself in the middle of a training, call
  `seed_averages`: z and x do not follow them.

  Half-precision variables: x follows from y with the precision of y. Use
  float32 variables, such as those of Keras's policy mixed_bfloat16.

  References: Defazio, Mishchenko, Raman, Shi and Xiao, "Smoothing DiLoCo with
  primal averaging for faster training of LLMs", 2025, arXiv 2512.17131; the
  authors' GPAAdamW for PyTorch, in the repository facebookresearch/optimizers,
  whose `train_interp_coeff` (mu_y) is `momentum` and whose `eval_interp_coeff`
  (mu_x) is `average_decay`.

  Differences from GPAAdamW: `averaged_weights` and the end of `fit` replace the
  modes `train()` and `eval()`; any inner optimizer; Adam is Keras's, whose
  epsilon is not divided by the bias correction. Weight decay shrinks z as in
  the paper's formulas, and x and y follow. In GPAAdamW since its commit
  5b6bd7e, y takes only 1 - mu_x of what z loses; before, the decay was a part
  of y in the gradient.
  """

  def __init__(
      self, optimizer: Union[str, dict[str, Any], keras.optimizers.Optimizer],
      momentum: float = 0.7, average_decay: float = 0.9967,
      name: Optional[str] = None, *, keep_raw_weights: bool = False) -> None:
    """Wraps `optimizer`.

    Args:
      optimizer: A Keras optimizer, or its name or configuration.
      momentum: The weight of x in the point y at which gradients are taken: a
        number greater than 0 and at most 1. x has the precision of y divided by
        it.
      average_decay: The weight of the old x in the new one: a number in [0, 1].
        With 0, x, y and z are one, which the inner optimizer trains. The
        default is for runs of some ten thousand steps: a shorter run needs a
        smaller one.
      name: The name of the optimizer.
      keep_raw_weights: Whether `fit` ends with y in the model. By default, it
        ends with x.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer, or an argument has a
        wrong type.
      ValueError: If a number is out of range, `optimizer` is or holds a
        LazyAdam, keeps averages itself, or is or holds another wrapper that
        keeps averages.
    """
    super().__init__(optimizer, name, sum_duplicates=True)
    self._averages = _points.Points(
        self, keep_raw_weights,
        _schedules.primal_average(momentum, average_decay))

  def _check_innermost(self, opt, points):
    if isinstance(opt, lazy_adam.LazyAdam):
      raise ValueError(
          "`optimizer` of a PrimalAverage must not be or hold a LazyAdam, "
          f"since all rows move in each step, got {type(opt).__qualname__}. "
          "Use keras.optimizers.Adam.")
