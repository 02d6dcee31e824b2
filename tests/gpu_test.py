"""The kernels on a GPU: every rule, dtype and image, and how they are launched.

What the ops refuse, and much else, is in the tests of the ops, which run on the
GPU too.
"""

import os

import numpy as np
import pytest
import tensorflow as tf

import modes
import numerics
from modes import mode  # pylint: disable=unused-import
from numerics import DOUBLE
from wrapopt import _native
from wrapopt.ops import apply
from wrapopt.ops import averaging_assign
from wrapopt.ops import ema_update

RULES = sorted(rule for rule, (_, inputs, _) in _native.rules().items()
               if inputs == ["grad"])

# Below, at and above what a thread, a block and a chunk take; and nothing.
SHAPES = [(), (0,), (1,), (7,), (8,), (9,), (2, 1023), (2048,), (2049,),
          (70_001,)]


class Log:
  """What the fake GPU was asked to do; a real one keeps no such log."""

  def __init__(self):
    self._path = os.environ.get("WRAPOPT_FAKE_GPU_LOG")
    self._begin = len(self._lines())

  def _lines(self):
    if not self._path or not os.path.exists(self._path):
      return []
    with open(self._path, encoding="utf-8") as f:
      return f.read().splitlines()

  def assert_launched(self, *want):
    """`want`: (kernel without its size, variables) of all launches."""
    if not self._path:
      return
    launched = [line.split() for line in self._lines()[self._begin:]
                if line.startswith("launch")]
    got = [(words[1].split("_", 2)[2],
            int(words[words.index("variables") + 1])
            if "variables" in words else None) for words in launched]
    assert got == list(want)


def rule_of(name):
  states, _, scalars = _native.rules()[name]
  return states, scalars


def arrays(rng, rule, states, shape, dtype):
  not_negative = numerics.NOT_NEGATIVE.get(rule, ())
  return [np.asarray(np.abs(x) + 0.5 if state in not_negative else x, dtype)
          for state in states for x in [rng.normal(size=shape)]]


def on(device, values):
  with tf.device(device):
    return [tf.Variable(x, trainable=False) for x in values]


def kernel(rule, dtype):
  return f"{rule}_{'double' if dtype == DOUBLE else 'float'}"


@pytest.mark.parametrize("pair", [p for p in numerics.PAIRS
                                  if p[0] != numerics.FLOAT or p[0] == p[1]],
                         ids=lambda p: "-".join(d.name for d in p))
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gives_the_bits_of_the_cpu(rule, pair):
  rng = np.random.default_rng(1)
  dtype, other = pair
  states, scalars = rule_of(rule)
  values = [arrays(rng, rule, states, shape, dtype) for shape in SHAPES]
  grads = [np.asarray(rng.normal(size=shape), other) for shape in SHAPES]
  averages = [[np.asarray(rng.normal(size=shape), other) for shape in SHAPES]
              for _ in range(2)]
  found = []
  log = Log()
  for device in (modes.OTHERS, modes.VARIABLES):
    variables = [on(device, row) for row in values]
    shadows = [on(device, row) for row in averages]
    apply(rule, {state: [row[i] for row in variables]
                 for i, state in enumerate(states)},
          [tf.constant(g) for g in grads],
          dict(zip([s.rstrip("?") for s in scalars],
                   (bool(x > 0.5) if s.endswith("?") else x for s, x in zip(
                       scalars, numerics.scalars(rule, len(scalars)))))),
          shadows=shadows, decay=[0.75, 0.9])
    found.append([v.numpy() for row in variables + shadows for v in row])
    assert all(device in v.device for row in variables for v in row)
  for want, got in zip(*found, strict=True):
    numerics.assert_same_bits(got, want)
  # The variable of no elements is left out.
  log.assert_launched((kernel(rule, dtype), len(SHAPES) - 1))
