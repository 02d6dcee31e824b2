"""The decays of moving averages."""

import math
from typing import Any, Optional, Union

import tensorflow as tf

from wrapopt import _checks
from wrapopt import _widths
from wrapopt import ops
from wrapopt._types import Float, Integer


class Shape:
  """A decay, as optimizers use it.

  A decay profile, such as `PowerDecay`, defines `at`, `__str__`, `__repr__` and
  `get_config`.

  Attributes:
    needs_count: Whether it depends on the number of the update.
    counts_steps: Whether it depends on the number of the step instead.
    warms_up: Whether a count of updates limits it at the start.
    is_called: Whether a user's function computes it, after the step.
  """

  needs_count = False
  counts_steps = False
  warms_up = True
  is_called = False

  def at(self, t):
    """The decay of update or step t, from 1 (None if it needs no count)."""
    raise NotImplementedError

  def __str__(self):
    """The decay in names of averages, which tell two decays apart by it."""
    raise NotImplementedError

  def __eq__(self, other):
    return isinstance(other, Shape) and str(self) == str(other)

  def __hash__(self):
    return hash(str(self))

  def get_config(self) -> dict[str, Any]:
    """The arguments, which Keras saves: a dict."""
    raise NotImplementedError

  @classmethod
  def from_config(cls, config):
    """Makes a decay from the result of `get_config`."""
    return cls(**config)


class PowerDecay(Shape):
  """A decay whose average covers a fixed fraction of the run so far.

  In step t of the averages, counted from 1,

      beta_t = (1 - 1/t)^(gamma + 1)
      s = beta_t s + (1 - beta_t) v

  so that the value of step tau has the weight

      (tau^(gamma + 1) - (tau - 1)^(gamma + 1)) / t^(gamma + 1)

  a power function of tau. The first decay is 0, so the average starts at the
  first value, whatever it held before. Unlike a number, a PowerDecay needs no
  warm-up and fits every length of the run: `num_updates` and `dynamic_decay` do
  not limit it. Any other PowerDecay can be computed after training from the
  averages of two, see `wrapopt.checkpoints.posthoc`.

  The relative width is the standard deviation of that weight over tau, as a
  fraction of t:

      relative_width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3))

  A relative width of 0.05 is a gamma of 16.97, one of 0.10 a gamma of 6.94.

  t counts the updates of the optimizer's averages: one count for all variables,
  of the steps that change weights, or of every n-th of them with the argument
  `update_every=n`. With `start_step`, it counts the updates from that step. A
  step that only accumulates gradients, that loss scaling skips or that a gate
  drops does not count. A variable without a gradient in a step keeps its
  average in that step. `seed_averages` resets t. t is saved and restored with
  the averages.

  Example, with the mean of all values after steps:

  >>> w = tf.Variable([0.0])
  >>> opt = wrapopt.MovingAverageOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(1.0),
  ...     [wrapopt.PowerDecay(gamma=0), wrapopt.PowerDecay(0.1)])
  >>> for _ in range(3):
  ...   opt.minimize(lambda: -w, var_list=[w])
  >>> opt.average(w).numpy()  # Of 1, 2 and 3.
  array([2.], dtype=float32)

  Reference: Karras et al., "Analyzing and improving the training dynamics of
  diffusion models" (EDM2), 2023, arXiv 2312.02696, section 3.1 and appendix C.
  """

  needs_count = True
  # Its average moves fast at the start anyway.
  warms_up = False

  def __init__(self, relative_width: Optional[float] = None, *,
               gamma: Optional[float] = None) -> None:
    """Makes a decay of a relative width, or of a gamma.

    Args:
      relative_width: A number greater than 0 and at most 1/sqrt(12), 0.2887,
        which is the mean of all steps.
      gamma: Instead of `relative_width`, a finite number of at least 0.

    Raises:
      TypeError: If both or none are given, or the argument is not a number.
      ValueError: If the argument is out of range.
    """
    self._gamma = _widths.exponent(relative_width, gamma)

  @property
  def gamma(self) -> float:
    """The exponent: a float."""
    return self._gamma

  @property
  def relative_width(self) -> float:
    """The standard deviation as a fraction of the run: a float."""
    return _widths.relative_width_of(self._gamma)

  def at(self, t: Union[Float, Integer]) -> tf.Tensor:
    """The decay of step t, which is at least 1: a float64 tensor."""
    t = ops.float64(t)
    # No logarithm of 0 in between, which enable_check_numerics() refuses.
    later = tf.exp((self._gamma + 1) * tf.math.log1p(-1 / tf.maximum(
        t, tf.constant(2, tf.float64))))
    return tf.where(t > 1, later, tf.zeros_like(later))

  def __repr__(self):
    return f"PowerDecay(gamma={self._gamma:.6g})"

  def __str__(self):
    return f"power_{self._gamma:.6g}"

  def get_config(self) -> dict[str, Any]:
    """The arguments, which Keras saves: a dict."""
    return {"gamma": self._gamma}


class BEMA(Shape):
  """An average that is corrected for its lag: BEMA.

  After step t of the averages, counted from 1, a moving average of the variable
  v moves, and the average is that and a part of the way that v went:

      beta_t = (lag + multiplier t)^-ema_power
      s = (1 - beta_t) s + beta_t v

      average = s + alpha_t (v - v_0)
      alpha_t = (lag + multiplier t)^-bias_power

  v_0 is the value of v after `burn_in` steps, until which s is v, too. t counts
  the steps that change weights; with Keras's `start_step`, those after it. With
  `update_every=n`, s moves in each n-th of them, and t counts all: between two
  moves, the average follows with v and t. `num_updates` and `dynamic_decay` do
  not limit this decay. `seed_averages` resets t and v_0.

  State: s is the average of a usual decay; one more copy of the weights holds
  v_0. No step reads or writes it. The average itself is in no variable: it is
  computed when it is read. So `average` returns a tensor. `averaged_weights`
  keeps a copy of the variables, and gives them back bit for bit. When `fit`
  ends with the average in the variable, s and v_0 are set to the same, so that
  the average is still that; t goes on. The average of a variable that is not
  trainable, such as a moving variance, is s: corrected, it could be negative.
  While other workers or threads train, s and v may be of different steps.

  Example:

  >>> w = tf.Variable([0.0])
  >>> opt = wrapopt.MovingAverageOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(1.0),
  ...     wrapopt.BEMA(lag=1, ema_power=1, bias_power=1))
  >>> for _ in range(3):
  ...   opt.minimize(lambda: -w, var_list=[w])
  >>> opt.average(w).numpy()  # s: 0, 1/2, 1, 3/2; and 1/4 of 3.
  array([2.25], dtype=float32)

  Reference: Block and Zhang, "EMA without the lag: bias-corrected iterate
  averaging schemes", 2025, arXiv 2508.00180. The defaults are those of the
  paper's runs, which have `update_every=400`, and of TRL's BEMACallback. The
  authors' program and TRL have a least beta_t in addition, of 1e-4 and 0;
  1e-4 is that of step 10^8. In TRL, the weights between two updates are those
  of the last one.
  """

  needs_count = True
  counts_steps = True
  warms_up = False

  def __init__(self, lag: float = 10, multiplier: float = 1.0,
               ema_power: float = 0.5, bias_power: float = 0.2,
               burn_in: int = 0) -> None:
    """Makes a decay.

    Args:
      lag: rho, a finite number of at least 1.
      multiplier: gamma, a finite number of at least 0.
      ema_power: kappa, a finite number of at least 0. With 0, s is v.
      bias_power: eta, a finite number of at least 0. A large one corrects
        nothing.
      burn_in: tau, an int of at least 0, a multiple of `update_every`.

    Raises:
      TypeError: If an argument is not a number, or `burn_in` no integer.
      ValueError: If an argument is out of range.
    """
    self._config = {
        "lag": _checks.number("lag", lag, 1),
        "multiplier": _checks.number("multiplier", multiplier, 0),
        "ema_power": _checks.number("ema_power", ema_power, 0),
        "bias_power": _checks.number("bias_power", bias_power, 0),
        "burn_in": _checks.integer("burn_in", burn_in, 0)}

  def at(self, t: Union[Float, Integer]) -> Float:
    """1 - beta_t, the decay of s in step t: a number or a float64 tensor."""
    return self._after_burn_in(t, 1 - self._to_the("ema_power", t))

  def correction(self, t: Union[Float, Integer]) -> Float:
    """alpha_t after step t: a number or a float64 tensor."""
    return self._to_the("bias_power", t)

  def _to_the(self, power, t):
    # In eager mode, numbers take a tenth of the time of tensors.
    t = float(t) if tf.executing_eagerly() else ops.float64(t)
    lag, multiplier = self._config["lag"], self._config["multiplier"]
    return (lag + multiplier * t)**-self._config[power]

  def _after_burn_in(self, t, value):
    """A value in step t, or 0 in the burn-in, when s and v_0 become v."""
    burns_in = t <= self._config["burn_in"]
    if tf.executing_eagerly():
      return 0.0 if bool(burns_in) else value
    return tf.where(burns_in, tf.constant(0, tf.float64), ops.float64(value))

  def __repr__(self):
    return "BEMA(" + ", ".join(map("=".join, self._texts().items())) + ")"

  def __str__(self):
    # In names of tf.compat.v1, no + may stand.
    return "_".join(["bema", *self._texts().values()]).replace("+", "")

  def _texts(self):
    """The arguments in all digits, since names of two decays must differ."""
    return {name: str(value).removesuffix(".0")
            for name, value in self._config.items()}

  def get_config(self) -> dict[str, Any]:
    """The arguments, which Keras saves: a dict."""
    return self._config


class Origin(Shape):
  """The decay of the variable that holds v_0 of a BEMA.

  In the burn-in, v_0 is v. Then it stays.
  """

  needs_count = True
  counts_steps = True
  warms_up = False

  def __init__(self, bema):
    self._bema = bema
    # Without a burn-in, it stays where the average begins.
    self.stays = not bema.get_config()["burn_in"]

  def at(self, t):
    return self._bema._after_burn_in(t, 1.0)

  def __repr__(self):
    return f"the v_0 of {self._bema!r}"

  def __str__(self):
    return f"{self._bema}_origin"


class HalfLife:
  """A decay given by its half-life.

  `HalfLife(steps=1000)` is the decay 2^(-1/1000): the latest 1000 steps have
  half of the average's weight. `HalfLife(fraction=0.05)` is the `PowerDecay`
  whose latest twentieth of the run so far has half of the weight, for every
  length of the run. With the argument `update_every` of an optimizer, `steps`
  are updates. `num_updates` and `dynamic_decay` limit the first, which is a
  number, and not the second.

  Use it as `average_decay` of an optimizer. The optimizer keeps its attribute
  `decay`: a number or a PowerDecay.

  Example:

  >>> round(wrapopt.HalfLife(steps=10).decay**10, 6)
  0.5
  >>> wrapopt.HalfLife(fraction=0.05).decay
  PowerDecay(gamma=12.5134)
  """

  def __init__(self, *, steps: Optional[float] = None,
               fraction: Optional[float] = None) -> None:
    """Makes a decay.

    Args:
      steps: A finite number greater than 0.
      fraction: Instead of `steps`, a number greater than 0 and at most 0.5,
        which is the mean of all steps.

    Raises:
      TypeError: If both or none are given, or the argument is not a number.
      ValueError: If the argument is out of range.
    """
    if (steps is None) == (fraction is None):
      raise TypeError("HalfLife takes one of `steps` and `fraction`, got "
                      f"{steps!r} and {fraction!r}.")
    self._config = {"steps": steps, "fraction": fraction}
    if steps is not None:
      self.decay = 2 ** (-1 / _checks.number("steps", steps))
    else:
      # (1 - fraction)^(gamma + 1) = 1/2.
      fraction = _checks.number("fraction", fraction, most=0.5)
      self.decay = PowerDecay(
          gamma=max(0.0, math.log(2) / -math.log1p(-fraction) - 1))

  def __eq__(self, other):
    return isinstance(other, HalfLife) and self.decay == other.decay

  def __hash__(self):
    return hash(self.decay)

  def __repr__(self):
    [(name, value)] = [x for x in self._config.items() if x[1] is not None]
    return f"HalfLife({name}={value})"

  def get_config(self) -> dict[str, Any]:
    """The arguments, which Keras saves: a dict."""
    return self._config

  @classmethod
  def from_config(cls, config):
    """Makes a decay from the result of `get_config`."""
    return cls(**config)


Decay = Union[float, BEMA, HalfLife, PowerDecay]
