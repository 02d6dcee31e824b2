"""Trainings between z and x in float64, written from papers, and their Runs.

Defazio et al., "The road less scheduled", NeurIPS 2024, arXiv 2405.15682:
equations 6 to 8, with the weights of its section 4.4 (warm-up and powers).
Defazio et al., "Smoothing DiLoCo with primal averaging for faster training of
LLMs", 2025, arXiv 2512.17131: generalized primal averaging.
"""

import typing

import keras
import numpy as np
import tensorflow as tf

import averages
import wrapopt
import wrapopt.keras as wk

train = tf.compat.v1.train
K = keras.optimizers
START = np.linspace(-2, 2, 12).reshape(4, 3)
# The beta1 of an Adam that keeps its first moment.
PRIMAL_BETA = 0.875


class Inner:
  """An optimizer: z' from z and the gradient."""

  def __init__(self, kind, weight_decay=0.0, *, beta1=0.0, beta2=0.999, rho=0.9,
               epsilon=1e-7, start=0.0):
    self.kind, self.weight_decay, self.beta1 = kind, weight_decay, beta1
    self.beta2, self.rho, self.epsilon = beta2, rho, epsilon
    self.moment, self.slot, self.t = 0.0, start, 0

  def __call__(self, z, g, lr):
    self.t += 1
    if self.kind == "SGD":
      u = g
    elif self.kind == "Adam":
      self.moment = self.beta1 * self.moment + (1 - self.beta1) * g
      self.slot = self.beta2 * self.slot + (1 - self.beta2) * g * g
      u = self.moment / (1 - self.beta1**self.t) * np.sqrt(
          1 - self.beta2**self.t) / (np.sqrt(self.slot) + self.epsilon)
    elif self.kind == "RMSprop":
      self.slot = self.rho * self.slot + (1 - self.rho) * g * g
      u = g / np.sqrt(self.slot + self.epsilon)
    else:
      assert self.kind == "Adagrad"
      self.slot = self.slot + g * g
      u = g / np.sqrt(self.slot + self.epsilon)
    return z - lr * self.weight_decay * z - lr * u


class Model:
  """x, y and z of one variable."""

  def __init__(self, start, inner, momentum=0.9, warmup_steps=0,
               weight_lr_power=2.0, r=0.0, weight_decay_at_y=0.0,
               average_decay=None):
    self.x = self.z = np.asarray(start, np.float64)
    self.average_decay = average_decay  # None: Schedule-Free learning.
    self.inner, self.momentum, self.warmup_steps = inner, momentum, warmup_steps
    self.weight_lr_power, self.r = weight_lr_power, r
    self.weight_decay_at_y = weight_decay_at_y
    self.t, self.weights, self.largest = 0, 0.0, 0.0

  @property
  def y(self):
    return (1 - self.momentum) * self.z + self.momentum * self.x

  def step(self, g, lr):
    self.t += 1
    if self.warmup_steps:
      lr = lr * min(1.0, self.t / self.warmup_steps)
    self.largest = max(self.largest, lr)
    weight = self.t**self.r * self.largest**self.weight_lr_power
    self.weights += weight
    c = (1 - self.average_decay if self.average_decay is not None else
         weight / self.weights if self.weights else 0.0)
    z = self.z - lr * self.weight_decay_at_y * self.y
    self.z = self.inner(z, np.asarray(g, np.float64), lr)
    self.x = (1 - c) * self.x + c * self.z


class Optimizer(typing.NamedTuple):
  """An inner optimizer in both halves.

  Attributes:
    v1: A function of the rate and of the first beta; None if there is none.
    keras: A function of the first beta and of other arguments.
    rate: Its rate in Keras.
    of_v1: What the model takes for that of TensorFlow.
    of_keras: The same for that of Keras; None if the model does not have it.
  """
  v1: typing.Any
  keras: typing.Any
  rate: float
  of_v1: typing.Any
  of_keras: typing.Any


INNER = {
    "SGD": Optimizer(lambda rate, b: train.GradientDescentOptimizer(rate),
                     lambda b, **more: K.SGD(0.25, **more), 0.25, {}, {}),
    "Adam": Optimizer(lambda rate, b: train.AdamOptimizer(rate, b, 0.99),
                      lambda b, **more: K.Adam(0.0625, b, **more), 0.0625,
                      {"beta2": 0.99, "epsilon": 1e-8}, {}),
    "AdamW": Optimizer(
        None, lambda b, **more: K.AdamW(0.0625, beta_1=0.0, **more), 0.0625,
        None, {"kind": "Adam"}),
    "RMSprop": Optimizer(lambda rate, b: train.RMSPropOptimizer(rate),
                         lambda b, **more: K.RMSprop(0.0625, **more), 0.0625,
                         {"epsilon": 1e-10, "start": 1.0}, {}),
    "Adagrad": Optimizer(lambda rate, b: train.AdagradOptimizer(rate),
                         lambda b, **more: K.Adagrad(0.25, **more), 0.25,
                         {"start": 0.1, "epsilon": 0.0}, {"start": 0.1}),
    # Two passes.
    "Adam AMSGrad": Optimizer(
        None, lambda b, **more: K.Adam(0.0625, b, amsgrad=True, **more), 0.0625,
        None, None),
    "Adamax": Optimizer(
        None, lambda b, **more: K.Adamax(0.0625, beta_1=0.0, **more), 0.0625,
        None, None),
    "SGD Nesterov": Optimizer(
        None, lambda b, **more: K.SGD(0.0625, b, nesterov=True, **more), 0.0625,
        None, None),
}
SCHEDULES = {
    "plain": {},
    "warm-up": {"warmup_steps": 50, "momentum": 0.75},
    "powers": {"r": 1.5, "weight_lr_power": 1.0, "warmup_steps": 3},
    "decay at y": {"weight_decay_at_y": 0.125, "r": 0.5},
    "at x": {"momentum": 1.0, "weight_lr_power": 0.0},
    "primal average": {"momentum": 0.75, "average_decay": 0.875},
    "primal average, at x": {"momentum": 1.0, "average_decay": 0.5},
    "primal average, off": {"momentum": 0.5, "average_decay": 0.0},
}
# A schedule of each wrapper.
EACH = {"schedule_free": {}, "primal_average": SCHEDULES["primal average"]}


def running(way, inner="SGD", dtype=np.float64, around=lambda opt: opt,
            within=lambda opt: opt, arguments=None, **schedule):
  """A Run of averages.py, of a variable `v` at a rate that may change.

  Args:
    way: A Way.
    inner: A key of INNER.
    dtype: That of the variable.
    around: What wraps the wrapper.
    within: What the wrapper wraps, around the inner optimizer.
    arguments: More of an inner optimizer of Keras.
    **schedule: Arguments of the wrapper, which is a ScheduleFree unless they
      are those of a PrimalAverage.
  """
  is_primal = "average_decay" in schedule

  def make(run):
    # Schedule-Free learning takes the momentum over.
    beta = PRIMAL_BETA if is_primal else schedule.get("momentum", 0.9)
    if way.half == "keras":
      return INNER[inner].keras(beta, **(arguments or {}))
    run.rate = run.make(np.float32(0.25), "rate")
    return within(INNER[inner].v1(
        run.rate if way.is_graph else run.rate.read_value, beta))

  return averages.running(
      way, {"v": START.astype(dtype)}, lambda run: schedule, make, around,
      (wrapopt.PrimalAverageOptimizer, wk.PrimalAverage) if is_primal else
      (wrapopt.ScheduleFreeOptimizer, wk.ScheduleFree))


def points(run):
  """x, y and z."""
  opt, v = run.averaging, run.variables["v"]
  return run.read(opt.average(v), v, opt.z(v))


def settings(way, inner, schedule):
  """Arguments of `running`, with a weight decay in some of Keras."""
  decays = way.half == "keras" and (
      schedule in ("warm-up", "decay at y", "primal average") or
      inner == "AdamW")
  return {"arguments": {"weight_decay": 0.03125} if decays else {},
          **SCHEDULES[schedule]}


def trajectory(run, inner, arguments, steps=130, sparse=False, **schedule):
  """Trains by gradients at y, at a rate that changes; the model beside it.

  Yields:
    (the Model before the step, the gradient, the rate).
  """
  way, v = run.way, run.variables["v"]
  if way.half == "v1":
    rate, of = 0.25, INNER[inner].of_v1
  else:
    rate, of = INNER[inner].rate, INNER[inner].of_keras
  moment = {"beta1": PRIMAL_BETA} if (
      "average_decay" in schedule and inner == "Adam") else {}
  model = Model(START, of is not None and Inner(
      **{"kind": inner, **arguments, **moment, **of}), **schedule)
  rng = np.random.default_rng(1)
  for t in range(steps):
    if t in (60, 120):
      rate *= {60: 0.5, 120: 2.0}[t]
      if way.half == "keras":
        run.opt.learning_rate = rate
      elif way.is_graph:
        run.rate.load(rate, run.session)
      else:
        run.rate.assign(rate)
    # The noise of data, around a quadratic function.
    g = 0.5 * run.value("v") + rng.normal(size=START.shape)
    # Each row in two parts.
    run.step({"v": (np.concatenate([g, g]) / 2, [*range(4)] * 2)
              if sparse else g})
    yield model, g.astype(tf.as_dtype(v.dtype).base_dtype.as_numpy_dtype), rate
