"""Shared by the tests of XLA's kernels: steps of any rule, and programs."""

import re

import numpy as np
import tensorflow as tf

import arrays
import numerics
from numerics import random
from wrapopt import _native
from wrapopt import ops

RULES = sorted(name for name, rule in _native.rules().items()
               if rule.is_update)
# Dtypes of (variable, gradient, shadow).
DTYPES = [
    *((dtype, dtype, dtype) for dtype in numerics.DTYPES),
    *((dtype, numerics.FLOAT, numerics.FLOAT)
      for dtype in (numerics.HALF, numerics.BFLOAT16)),
]
SHAPES = [(), (0,), (7,), (3, 5), (2, 0)]


def jit(function):
  # What AutoGraph would convert is the test: the ops' functions forbid it.
  return tf.function(function, jit_compile=True, autograph=False)


def program(function, *args, stage="hlo"):
  return function.experimental_get_compiler_ir(*args)(stage=stage)


def instructions(hlo):
  """[(shape, opcode, what follows)] of all computations."""
  return re.findall(r"^ +(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$", hlo,
                    re.MULTILINE)


class Problem:
  """Variables of several shapes for one rule, in NumPy and in TensorFlow."""

  def __init__(self, rule, dtypes, shapes, nesterov=False, seed=0):
    rng = np.random.default_rng(seed)
    self.rule = rule
    self.dtypes = dtypes
    var, grad, shadow = dtypes
    info = _native.rules()[rule]
    names, scalars = info.states, info.scalars
    self.names = names
    numbers = numerics.scalars(rule)
    self.attributes = {s[:-1]: nesterov for s in scalars if s.endswith("?")}
    self.scalars = {s: x for s, x in zip(scalars, numbers)
                    if not s.endswith("?")}
    self.numbers = [float(nesterov) if s.endswith("?") else x
                    for s, x in zip(scalars, numbers)]
    self.decays = [0.9, 0.5]
    # States in [0.1, 1): some must not be negative.
    self.before = [[rng.uniform(0.1, 1, shape).astype(var) for shape in shapes]
                   for _ in names]
    self.shadows_before = [
        [random(rng, shape, shadow) for shape in shapes] for _ in self.decays]
    self.grads = [random(rng, shape, grad) for shape in shapes]
    self.states = {name: [tf.Variable(x) for x in row]
                   for name, row in zip(names, self.before)}
    self.shadows = [[tf.Variable(x) for x in row]
                    for row in self.shadows_before]

  def apply(self, grads, scalars, decays, accept):
    ops.apply(self.rule, self.states, grads, {**self.attributes, **scalars},
              shadows=self.shadows, decay=decays, accept=accept)

  def args(self, accept=True):
    """Tensors for `apply`: nothing of it is known when it is compiled."""
    return ([tf.constant(g) for g in self.grads],
            {k: tf.constant(x, tf.float64) for k, x in self.scalars.items()},
            [tf.constant(d, tf.float64) for d in self.decays],
            tf.constant(accept))

  def all_values(self):
    return [v.numpy() for row in (*self.states.values(), *self.shadows)
            for v in row]

  def check_unchanged(self):
    before = [x for row in (*self.before, *self.shadows_before) for x in row]
    arrays.assert_same_bits(self.all_values(), before)

  def check(self, grads, rows=None):
    """Asserts one step of dense gradients, of variables or of some rows.

    A rule that moves all rows moves the others, too.
    """
    if _native.rules()[self.rule].all_rows:
      rows = None
    for i, grad in enumerate(grads):
      before = [row[i] for row in self.before]
      got = [self.states[name][i].numpy() for name in self.names]
      touched = slice(None) if rows is None else rows[i]
      if rows is not None:
        others = np.setdiff1d(np.arange(len(before[0])), touched)
        arrays.assert_same_bits([g[others] for g in got],
                                [b[others] for b in before])
      reference = numerics.reference(
          self.rule, [b[touched] if b.ndim else b for b in before],
          [grad[touched] if grad.ndim else grad], self.numbers)
      for name, g, (want, tolerance) in zip(self.names, got, reference):
        numerics.assert_close(g[touched] if g.ndim else g, want, tolerance,
                              f"{name}[{i}] of {self.rule}")
      # The average is that of what the variable holds, rounded.
      for row, row_before, decay in zip(
          self.shadows, self.shadows_before, self.decays):
        [(want, tolerance)] = numerics.reference(
            "Ema", [row_before[i]], [got[0]], [1 - decay])
        numerics.assert_close(row[i].numpy(), want, tolerance,
                              f"shadow of decay {decay} of {self.rule}[{i}]")
