"""The decays of moving averages, for all optimizers."""

import collections.abc
import math
import numbers
import typing
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._types import Float, Integer


class _Decay:
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
    return isinstance(other, _Decay) and str(self) == str(other)

  def __hash__(self):
    return hash(str(self))

  def get_config(self) -> dict[str, Any]:
    """The arguments, which Keras saves: a dict."""
    raise NotImplementedError

  @classmethod
  def from_config(cls, config):
    """Makes a decay from the result of `get_config`."""
    return cls(**config)


class _Given(_Decay):
  """A number, tensor, variable or callable as a decay."""

  def __init__(self, value):
    self._value = value
    self.is_called = _is_called(value)

  def at(self, t):
    return value_now(self._value)


class PowerDecay(_Decay):
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
    if (relative_width is None) == (gamma is None):
      raise TypeError(
          "PowerDecay takes one of `relative_width` and `gamma`, got "
          f"{relative_width!r} and {gamma!r}.")
    self._gamma = (gamma_of(relative_width) if gamma is None else
                   _checks.number("gamma", gamma, 0))

  @property
  def gamma(self) -> float:
    """The exponent: a float."""
    return self._gamma

  @property
  def relative_width(self) -> float:
    """The standard deviation as a fraction of the run: a float."""
    return relative_width_of(self._gamma)

  def at(self, t: Union[Float, Integer]) -> tf.Tensor:
    """The decay of step t, which is at least 1: a float64 tensor."""
    return tf.exp((self._gamma + 1) * tf.math.log1p(-1 / ops.float64(t)))

  def __repr__(self):
    return f"PowerDecay(gamma={self._gamma:.6g})"

  def __str__(self):
    return f"power_{self._gamma:.6g}"

  def get_config(self) -> dict[str, Any]:
    """The arguments, which Keras saves: a dict."""
    return {"gamma": self._gamma}


class BEMA(_Decay):
  """An average that is corrected for its lag: BEMA.

  After step t of the averages, counted from 1, a moving average of the variable
  v moves, and the average is that and a part of the way that v went:

      beta_t = (lag + multiplier t)^-ema_power
      s = (1 - beta_t) s + beta_t v

      average = s + alpha_t (v - v_0)
      alpha_t = (lag + multiplier t)^-bias_power

  v_0 is the value of v after `burn_in` steps, until which s is v, too. t counts
  the steps of the optimizer's averages, as for a PowerDecay, also with
  `update_every=n`, when s moves in each n-th step alone. Between two moves, the
  average follows with v and t. `num_updates` and `dynamic_decay` do not limit
  this decay. `seed_averages` resets t and v_0.

  State: s is the average of a usual decay; one more copy of the weights holds
  v_0. No step reads or writes it. The average itself is in no variable: it is
  computed when it is read. So `average` returns a tensor. `averaged_weights`
  keeps a copy of the variables, and gives them back bit for bit. When `fit`
  ends with the average in the variable, s and v_0 are set to the same, so that
  the average is still that; t goes on. The average of a variable that is not
  trainable, such as a moving variance, is s: corrected, it could be negative.
  While other workers or threads train, s
  and v may be of different steps.

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
    return "BEMA(" + ", ".join(
        f"{name}={value:g}" for name, value in self._config.items()) + ")"

  def __str__(self):
    return "_".join(["bema", *(f"{x:g}" for x in self._config.values())])

  def get_config(self) -> dict[str, Any]:
    """The arguments, which Keras saves: a dict."""
    return self._config


class _Origin(_Decay):
  """That of the variable that holds v_0 of a BEMA: it moves in the burn-in."""

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

# The relative width of the uniform mean, whose gamma is 0.
_WIDEST = 1 / math.sqrt(12)


def relative_width_of(gamma):
  """The relative width of the average with exponent `gamma`."""
  # Nothing here overflows.
  return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


def gamma_of(relative_width):
  """The exponent of the average with a relative width."""
  width = _checks.number("relative_width", relative_width)
  if width > _WIDEST * (1 + 1e-15):
    raise ValueError("`relative_width` must be at most 1/sqrt(12), 0.288675, "
                     f"got {width}.")
  # Bisection, since the width falls as gamma rises. The width of the upper
  # bound is less than `width`, since relative_width_of(gamma) < 1 / (gamma +
  # 2).
  low, high = 0.0, 1 / width
  while low < (middle := (low + high) / 2) < high:
    if relative_width_of(middle) > width:
      low = middle
    else:
      high = middle
  return 0.0 if width >= _WIDEST else high


def checked(average_decay):
  """Checks an argument `average_decay`.

  Args:
    average_decay: A number, a PowerDecay, a HalfLife or a BEMA, or a sequence
      or an array of different ones; or one scalar tensor or variable, or a
      callable.

  Returns:
    A list of decays, without a HalfLife.

  Raises:
    TypeError: If it has another type.
    ValueError: If a number is out of range, or decays repeat.
  """
  if isinstance(average_decay, np.ndarray) and average_decay.ndim == 0:
    average_decay = average_decay[()]
  several = (isinstance(average_decay, np.ndarray) or
             isinstance(average_decay, collections.abc.Sequence) and
             not isinstance(average_decay, (str, bytes)))
  decays = [_plain(decay)
            for decay in (average_decay if several else [average_decay])]
  if not decays:
    raise ValueError("`average_decay` must hold at least one decay, got none.")
  for decay in decays:
    if isinstance(decay, numbers.Real) and not isinstance(decay, bool):
      if not 0 <= decay <= 1:
        raise ValueError(f"`average_decay` must be in [0, 1], got {decay}.")
    elif isinstance(decay, _Decay):
      pass
    elif several and not isinstance(decay, bool):
      raise ValueError(
          "A sequence of `average_decay` must hold numbers, PowerDecays, "
          f"HalfLives and BEMAs, got {decay!r}. Pass a tensor, variable or "
          "callable alone.")
    elif isinstance(decay, tf.Variable) or tf.is_tensor(decay):
      if not decay.shape.is_compatible_with([]):
        raise ValueError(
            "`average_decay` must be a scalar if it is a tensor or a variable, "
            f"got one of shape {decay.shape}.")
    elif isinstance(decay, bool) or not callable(decay):
      raise TypeError(
          "`average_decay` must be a number, a PowerDecay, a HalfLife or a "
          "BEMA, a sequence of these, a scalar tensor or variable, or a "
          f"callable, got {decay!r}.")
  if several and len(set(decays)) != len(decays):
    raise ValueError(f"`average_decay` must hold different decays, got "
                     f"{average_decay}.")
  return decays


def _plain(decay):
  return decay.decay if isinstance(decay, HalfLife) else decay


def check_update_every(decays, every):
  """Raises an error if the burn-in of a BEMA does not end with an update."""
  for decay in decays:
    if is_derived(decay) and decay.get_config()["burn_in"] % every:
      raise ValueError(f"`update_every` must divide the burn_in of {decay!r}, "
                       f"got {every}.")


def with_origins(decays):
  """Decays, and then those of the other variables that a BEMA needs."""
  return [*decays, *map(_Origin, filter(is_derived, decays))]


def is_derived(decay):
  """Whether its average follows from several variables."""
  return isinstance(decay, BEMA)


def place_of_origin(decay, decays):
  """The place in the result of `with_origins` of the v_0 of a BEMA."""
  return decays.index(_Origin(decay))


def moving(decays, at_once=True):
  """The places in the result of `with_origins` of averages that steps move.

  Args:
    decays: That result.
    at_once: Whether the averages move from the first step on.
  """
  return [k for k, decay in enumerate(decays)
          if not (at_once and isinstance(decay, _Origin) and decay.stays)]


def need_count(decays):
  """Whether one of an optimizer's decays depends on the number of the step."""
  return any(decay.needs_count for decay in map(_decay, decays))


def of_step(decays, t, counts=(), every=1):
  """The decays of a step: a list of numbers or float64 tensors.

  Args:
    decays: What `with_origins` returns.
    t: A function that returns the number of the update, from 1.
    counts: Counts of updates n: numbers or tensors. They limit the decays that
        warm up to at most (1 + n) / (10 + n).
    every: The number of steps between two updates.
  """
  decays = list(map(_decay, decays))
  t = t() if any(decay.needs_count for decay in decays) else None
  now = [decay.at(t * every if decay.counts_steps else t) for decay in decays]
  for n in counts:
    now = [warmed_up(x, n) if decay.warms_up else x
           for decay, x in zip(decays, now)]
  return now


def warmed_up(decay, num_updates):
  """A decay, but at most (1 + num_updates) / (10 + num_updates)."""
  n = ops.float64(num_updates)
  return tf.minimum(ops.float64(decay), (1 + n) / (10 + n))


# Averages that move in every n-th step: n is `every`. A decay of exactly 1 does
# not move an average. The native ops then neither read nor write it.


def is_due(steps, every):
  """Whether averages move in a step.

  Args:
    steps: The number of steps of the averages before it: an integer tensor.
    every: An int.

  Returns:
    A bool in eager mode, or if it is always True; else a tensor.
  """
  if every == 1:
    return True
  if tf.executing_eagerly():
    return (int(steps) + 1) % every == 0
  return tf.equal((steps + 1) % every, 0)


def periods(n, every):
  """The number of updates in `n` steps: a tensor or number of its dtype."""
  return n if every == 1 else n // every


def where_due(due, decays):
  """The decays of a step in which averages move if `due`, as of `is_due`."""
  if due is None or due is True:
    return decays
  if due is False:
    return unmoved(decays)
  return [tf.where(due, ops.float64(decay), tf.constant(1, tf.float64))
          for decay in decays]


def unmoved(decays):
  """The decays of a step that moves no average."""
  return [1.0] * len(decays)


class Schedule(typing.NamedTuple):
  """The decays of an optimizer of tf.compat.v1, and what they depend on.

  Attributes:
    decays: What `with_origins` returns.
    num_updates: A count of updates by which they warm up, or None.
    steps: The variable that counts the steps of the averages, or None.
    every: The averages move in each step of this number of steps.
  """
  decays: list
  num_updates: Any
  steps: Optional[tf.Variable]
  every: int = 1

  @property
  def is_called(self):
    """Whether a user's function must be called after the step."""
    return _is_called(self.num_updates) or any(
        decay.is_called for decay in map(_decay, self.decays))

  def now(self, counted_by=None):
    """The decays of this step: numbers, or float64 tensors.

    Args:
      counted_by: A variable that this step will increment, or None. The decays
        count the increment.
    """
    steps = due = None
    if self.steps is not None:
      steps = _replicas.values(self.steps)[0].read_value()
      due = is_due(steps, self.every)
      # A user's function is called once in each step.
      if due is False and not self.is_called:
        return unmoved(self.decays)
    counts = []
    if self.num_updates is not None:
      n = ops.float64(value_now(self.num_updates))
      n = n + 1 if self.num_updates is counted_by else n
      counts.append(periods(n, self.every))
    return where_due(due, of_step(
        self.decays, lambda: periods(steps, self.every) + 1, counts,
        self.every))

  def count(self, updates, accept=True):
    """Counts a step of the averages.

    Args:
      updates: The operations that update them: a list.
      accept: Whether the step is accepted: a bool, or a scalar tensor of it.

    Returns:
      The operations to run: a list.
    """
    if self.steps is None:
      return updates
    with tf.control_dependencies(updates):
      counted = [v.assign_add(tf.cast(accept, tf.int64), read_value=False)
                 for v in _replicas.values(self.steps)]
    return updates + [op for op in counted if op is not None]


def check_num_updates(num_updates):
  """Raises an error if `num_updates` is not a count of updates or None."""
  if isinstance(num_updates, np.ndarray) and num_updates.ndim == 0:
    num_updates = num_updates[()]
  if isinstance(num_updates, numbers.Real) and not isinstance(num_updates,
                                                              bool):
    if not math.isfinite(num_updates):
      raise ValueError(f"`num_updates` must be finite, got {num_updates}.")
    if num_updates < 0:
      raise ValueError(f"`num_updates` must be at least 0, got {num_updates}.")
  elif isinstance(num_updates, tf.Variable) or tf.is_tensor(num_updates):
    if not num_updates.shape.is_compatible_with([]):
      raise ValueError(
          "`num_updates` must be a scalar if it is a tensor or a variable, got "
          f"one of shape {num_updates.shape}.")
  elif not (num_updates is None or callable(num_updates)):
    raise TypeError("`num_updates` must be a number, tensor, variable or "
                    f"callable, got {num_updates!r}.")


def index_of(decay, decays):
  """The index of `decay` in an optimizer's decays; 0 for None."""
  if decay is None:
    return 0
  decay = _plain(decay)
  if decay not in decays:
    raise ValueError(f"`decay` must be one of this optimizer's, {decays}, got "
                     f"{decay}.")
  return decays.index(decay)


def value_now(x):
  """A number, tensor, variable or callable as a number or tensor."""
  if isinstance(x, tf.Variable):
    # Not a conversion: the time at which it reads a ref variable is undefined.
    return x.read_value()
  return x() if callable(x) else x


def _decay(x):
  """A decay, as `checked` returns it, as a `_Decay`."""
  return x if isinstance(x, _Decay) else _Given(x)


def _is_called(x):
  return callable(x) and not isinstance(x, tf.Variable)
