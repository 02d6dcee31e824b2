"""Schedule-Free learning in float64, written from the paper.

Defazio et al., "The road less scheduled", NeurIPS 2024, arXiv 2405.15682:
equations 6 to 8, with the weights of its section 4.4 (warm-up and powers).
"""

import numpy as np


class Inner:
  """An optimizer without momentum: z' from z and the gradient."""

  def __init__(self, kind, weight_decay=0.0, *, beta2=0.999, rho=0.9,
               epsilon=1e-7, start=0.0):
    self.kind, self.weight_decay = kind, weight_decay
    self.beta2, self.rho, self.epsilon = beta2, rho, epsilon
    self.slot, self.t = start, 0

  def __call__(self, z, g, lr):
    self.t += 1
    if self.kind == "SGD":
      u = g
    elif self.kind == "Adam":
      self.slot = self.beta2 * self.slot + (1 - self.beta2) * g * g
      u = g * np.sqrt(1 - self.beta2**self.t) / (
          np.sqrt(self.slot) + self.epsilon)
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
               weight_lr_power=2.0, r=0.0, weight_decay_at_y=0.0):
    self.x = self.z = np.asarray(start, np.float64)
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
    c = weight / self.weights if self.weights else 0.0
    z = self.z - lr * self.weight_decay_at_y * self.y
    self.z = self.inner(z, np.asarray(g, np.float64), lr)
    self.x = (1 - c) * self.x + c * self.z
