"""What the tests of kernels on a GPU share."""

import collections
import os

import numpy as np
import tensorflow as tf

import numerics
from wrapopt import _native

RULES = sorted(name for name, rule in _native.rules().items() if rule.is_update)
LAZY_RULES = [rule for rule in RULES if not _native.rules()[rule].all_rows]


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

  @property
  def launched(self):
    """[(kernel without its size, variables)] of all launches."""
    launches = [line.split() for line in self._lines()[self._begin:]
                if line.startswith("launch")]
    return [(words[1].split("_", 2)[2],
             int(words[words.index("variables") + 1])
             if "variables" in words else None) for words in launches]

  @property
  def kinds(self):
    """The kinds of all launches: a set of "small" and "large"."""
    return {line.split()[1].split("_")[1]
            for line in self._lines()[self._begin:]
            if line.startswith("launch")}

  def assert_only_launches(self):
    new = self._lines()[self._begin:]
    assert not self._path or {line.split()[0] for line in new} == {"launch"}

  def assert_launched(self, *want):
    assert not self._path or self.launched == list(want)

  def assert_launched_in_any_order(self, *want, reads=False):
    """If `reads`, averages of one variable have caught up besides."""
    got = collections.Counter(self.launched)
    if reads and self._path:
      assert got.pop(("CatchUp_float", 1)) > 0
    assert not self._path or got == collections.Counter(want)


def rule_of(name):
  rule = _native.rules()[name]
  return rule.states, rule.scalars


def arrays(rng, rule, states, shape, dtype):
  not_negative = numerics.NOT_NEGATIVE.get(rule, ())
  return [np.asarray(np.abs(x) + 0.5 if state in not_negative else x, dtype)
          for state in states for x in [rng.normal(size=shape)]]


def on(device, values):
  with tf.device(device):
    return [tf.Variable(x, trainable=False) for x in values]


def rows_of(rng, shape, count, dtype):
  """A sparse gradient with some rows several times, one very often."""
  indices = rng.integers(0, shape[0], count)
  indices[: count // 3] = 1
  values = np.asarray(rng.normal(size=(count, *shape[1:])), dtype)
  return tf.IndexedSlices(tf.constant(values), tf.constant(indices), shape)
