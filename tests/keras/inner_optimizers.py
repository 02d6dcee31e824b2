"""All optimizers of Keras, and variables and gradients for them."""

import functools

import keras
import numpy as np
import tensorflow as tf

K = keras.optimizers


def decaying(opt):
  opt.exclude_from_weight_decay(var_names=["excluded"])
  return opt


# Betas and rates are binary fractions: Keras rounds them to the variable's
# dtype before it computes with them.
ADAM = {"learning_rate": 0.125, "beta_1": 0.75, "beta_2": 0.5, "epsilon": 0.25}
RMS = {"learning_rate": 0.125, "rho": 0.75, "epsilon": 0.25}

FUSED = {
    "SGD": lambda: decaying(K.SGD(0.125, weight_decay=0.25)),
    "SGD momentum": lambda: decaying(
        K.SGD(0.125, momentum=0.75, weight_decay=0.25)),
    "SGD Nesterov": lambda: K.SGD(0.125, momentum=0.75, nesterov=True),
    "SGD clipnorm": lambda: K.SGD(0.5, clipnorm=0.5),
    "SGD clipvalue": lambda: K.SGD(0.5, clipvalue=0.5),
    "SGD global_clipnorm": lambda: K.SGD(0.5, global_clipnorm=0.5),
    "SGD loss_scale_factor": lambda: K.SGD(0.5, loss_scale_factor=4.0),
    "SGD schedule": lambda: K.SGD(
        K.schedules.ExponentialDecay(0.125, 1, decay_rate=0.5)),
    "Adam": lambda: K.Adam(**ADAM),
    "Adam AMSGrad": lambda: decaying(
        K.Adam(amsgrad=True, weight_decay=0.25, **ADAM)),
    "AdamW": lambda: decaying(K.AdamW(weight_decay=0.25, **ADAM)),
    "Adagrad": lambda: decaying(
        K.Adagrad(0.125, epsilon=0.25, weight_decay=0.25)),
    "RMSprop": lambda: decaying(K.RMSprop(weight_decay=0.25, **RMS)),
    "RMSprop centered": lambda: decaying(
        K.RMSprop(centered=True, weight_decay=0.25, **RMS)),
    "RMSprop momentum": lambda: decaying(
        K.RMSprop(momentum=0.5, weight_decay=0.25, **RMS)),
    "RMSprop centered, momentum": lambda: K.RMSprop(
        centered=True, momentum=0.5, **RMS),
    "Lion": lambda: decaying(
        K.Lion(0.125, beta_1=0.75, beta_2=0.5, weight_decay=0.25)),
    "LossScaleOptimizer": lambda: K.LossScaleOptimizer(
        K.SGD(0.125), initial_scale=2.0),
}
UNFUSED = {
    "Adadelta": lambda: K.Adadelta(2.0, epsilon=0.25),
    "Adafactor": lambda: K.Adafactor(0.125, epsilon_1=0.25),
    "Adamax": lambda: decaying(K.Adamax(weight_decay=0.25, **ADAM)),
    "Ftrl": lambda: K.Ftrl(0.125),
    "Lamb": lambda: K.Lamb(**ADAM),
    "MultiOptimizer": lambda: K.MultiOptimizer(
        K.OptimizerMap(K.Adamax(**ADAM), {".*table.*": K.SGD(0.25)})),
    # It finds what it holds when it is built.
    "MultiOptimizer by function": lambda: K.MultiOptimizer(
        lambda v, parts=(K.SGD(0.25), K.Adamax(**ADAM)): parts[
            "table" not in v.path]),
    "Muon": lambda: decaying(K.Muon(0.125, weight_decay=0.25)),
    "Nadam": lambda: K.Nadam(**ADAM),
    "ScheduleFreeAdamW": lambda: K.ScheduleFreeAdamW(**ADAM),
}

# Keras 3.12 lacks some, and its Muon takes no step.
HAS_MUON = hasattr(K, "MultiOptimizer")
INNER = {name: make for name, make in {**FUSED, **UNFUSED}.items()
         if hasattr(K, name.split()[0].rstrip(",")) and (
             name != "Muon" or HAS_MUON)}

SHAPES = {"kernel": (3, 2), "table": (5, 2), "scalar": (), "empty": (0,),
          "excluded": (2,), "unused": (2,)}
NAMES = list(SHAPES)
ROWS = ([4, 1], [0, 1], [2, 3], [4, 0])


@functools.cache
def values_at_start():
  rng = np.random.default_rng(1)
  return {name: rng.integers(-16, 17, shape) / 8
          for name, shape in SHAPES.items()}


@functools.cache
def gradients(step):
  """Quarters, so that sums and low precision are exact; None of `unused`."""
  rng = np.random.default_rng(2 + step)
  return {name: rng.integers(1, 9, shape) * rng.choice([-0.25, 0.25], shape)
          for name, shape in SHAPES.items() if name != "unused"}


def variables_of(dtype, names=NAMES):
  return [keras.Variable(values_at_start()[name], dtype=dtype.name, name=name)
          for name in names]


def tensors(step, dtype, sparse=True, names=NAMES):
  found = []
  for name in names:
    grad = gradients(step).get(name)
    if grad is not None:
      grad = tf.constant(grad, dtype)
      if name == "table" and sparse:
        rows = ROWS[step % len(ROWS)]
        grad = tf.IndexedSlices(tf.gather(grad, rows), tf.constant(rows),
                                tf.constant(SHAPES[name]))
    found.append(grad)
  return found
