"""Policies of gates for the age of an admitted gradient."""

import dataclasses
from typing import Optional

from wrapopt import _checks

# Less would be zero in float32.
_LEAST_EPSILON = 1e-37


@dataclasses.dataclass(frozen=True)
class DelayCompensation:
  """Compensates a gradient for the way of the weights since, as in DC-ASGD.

  The argument `policy` of a `DropStaleGradientOptimizer`. A gradient `g` was
  computed from the weights `w_bak`, and is applied to `w`. Its first-order
  correction is the Hessian times `w - w_bak`; the diagonal of the outer product
  of the gradient with itself stands for the Hessian. In each element

      g' = g + lambda g^2 (w - w_bak)

  with a constant lambda = `lambda_` (DC-ASGD-c), or an adaptive one (DC-ASGD-a)
  that has about the same effect whatever the size of the gradients:

      mean_square = decay mean_square + (1 - decay) g^2
      lambda      = lambda_ / sqrt(mean_square + epsilon)

  The inner optimizer takes its step with g'. Where w is w_bak, g' is g to the
  bit.

  State: with an adaptive lambda, a slot `mean_square` for each variable, in
  gradient units squared. It begins at zero, as in the paper, without a
  correction: in the first 1 / (1 - decay) steps, lambda is larger.

  Example: two gradients of w^2 / 2 at w = 1. The second one is applied after
  the first one has moved w to 0.5: 1 - 0.5 (1 1 0.5) = 0.75 instead of 1.

  >>> w, step = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64)
  >>> opt = wrapopt.DropStaleGradientOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(0.5), staleness=1,
  ...     global_step=step,
  ...     policy=wrapopt.DelayCompensation(lambda_=0.5, adaptive=False))
  >>> one = opt.compute_gradients(lambda: w * w / 2, [w])
  >>> two = opt.compute_gradients(lambda: w * w / 2, [w])
  >>> _ = opt.apply_gradients(one, step)
  >>> _ = opt.apply_gradients(two, step)  # 0.5 - 0.5 (1 - 0.5 1 0.5).
  >>> print(w.numpy())
  0.125

  Attributes:
    lambda_: At least 0. None: 2 if adaptive, else 0.04, of the paper's
      experiments.
    adaptive: Whether lambda adapts to the size of the gradients.
    decay: Of `mean_square`, in [0, 1). With 0, lambda is lambda_ / |g|.
    epsilon: Added to `mean_square`, at least 1e-37.

  Raises:
    TypeError: If an argument is not a number, or `adaptive` is not a bool.
    ValueError: If one is out of range.

  Reference: Zheng et al., "Asynchronous stochastic gradient descent with delay
  compensation", ICML 2017, arXiv 1609.08326.
  """
  lambda_: Optional[float] = None
  adaptive: bool = True
  decay: float = 0.95
  epsilon: float = 1e-7

  def __post_init__(self):
    _checks.boolean("adaptive", self.adaptive)
    if self.lambda_ is not None:
      _checks.number("lambda_", self.lambda_, least=0)
    _check_decay(self.decay)
    _checks.number("epsilon", self.epsilon, least=_LEAST_EPSILON)

  # For the gate.

  @property
  def _states(self):
    return ("mean_square",) if self.adaptive else ()

  @property
  def _scalars(self):
    lambda_ = self.lambda_
    if lambda_ is None:
      lambda_ = 2.0 if self.adaptive else 0.04
    return {"lambda": lambda_, **(
        {"rate": 1 - self.decay, "epsilon": self.epsilon} if self.adaptive
        else {})}


@dataclasses.dataclass(frozen=True)
class GapAware:
  """Divides a gradient by the way of the weights since, counted in steps.

  The argument `policy` of a `DropStaleGradientOptimizer`. A gradient `g` was
  computed from the weights `w_bak`, and is applied to `w`. In each element

      g' = g / G,   G = 1 + |w - w_bak| / step_size

  `step_size` is the running mean of the size of a step of this element, in the
  units of the weights. So the gap G is 1 plus the number of average steps
  between the two weights. The inner optimizer takes its step with g', from w to
  w'; then

      step_size = decay step_size + (1 - decay) |w' - w|

  but the first step that moves an element sets its `step_size` to |w' - w|.
  Until then, G is 1. Where w is w_bak, g' is g to the bit.

  The paper estimates the size of a step of gradient descent with momentum: the
  largest learning rate so far, times the root of the running mean of the
  squared momentum. This class measures the steps that were taken, with the
  divided gradients and the learning rate of each, so that it serves any inner
  optimizer.

  State: a slot `step_size` for each variable.

  Example: two gradients of w^2 / 2 at w = 1. The first step is 0.5 long. The
  second gradient misses a way of 0.5, one average step: it is divided by 2.

  >>> w, step = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64)
  >>> opt = wrapopt.DropStaleGradientOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(0.5), staleness=1,
  ...     global_step=step, policy=wrapopt.GapAware())
  >>> one = opt.compute_gradients(lambda: w * w / 2, [w])
  >>> two = opt.compute_gradients(lambda: w * w / 2, [w])
  >>> _ = opt.apply_gradients(one, step)
  >>> _ = opt.apply_gradients(two, step)
  >>> print(w.numpy())
  0.25

  Attributes:
    decay: Of `step_size`, in [0, 1).

  Raises:
    TypeError: If `decay` is not a number.
    ValueError: If it is out of range.

  Reference: Barkai, Hakimi and Schuster, "Gap-aware mitigation of gradient
  staleness", ICLR 2020, arXiv 1909.10802.
  """
  decay: float = 0.99

  def __post_init__(self):
    _check_decay(self.decay)

  # For the gate.

  _states = ("step_size",)

  @property
  def _scalars(self):
    return {"rate": 1 - self.decay}


COMPENSATING = (DelayCompensation, GapAware)


def _check_decay(decay):
  _checks.fraction("decay", decay)
  if decay == 1:
    raise ValueError("`decay` must be less than 1, got 1: the state would "
                     "never change.")
