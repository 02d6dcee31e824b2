"""The one-pass step of a Keras optimizer, with its variables on a GPU."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import modes
import numerics
import wrapopt.keras
from wrapopt import ops

# By the name of their rule.
INNER = {
    "KerasSGD": lambda: keras.optimizers.SGD(0.5, weight_decay=0.25),
    "KerasMomentum": lambda: keras.optimizers.SGD(0.5, momentum=0.75,
                                                  nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.5),
    "Lion": lambda: keras.optimizers.Lion(0.5),
}
# Those of them that leave rows alone which a sparse gradient lacks.
LAZY = {
    "LazyAdam": lambda: wrapopt.keras.LazyAdam(0.5),
    "KerasSGD": lambda: keras.optimizers.SGD(0.5),
}
STEPS = 2


@pytest.fixture(autouse=True)
def zeros_are_copied(monkeypatch):
  """A fake GPU has none of TensorFlow's kernels, such as that of `tf.zeros`."""
  monkeypatch.setattr(
      keras.initializers.Zeros, "__call__",
      lambda self, shape, dtype=None: tf.constant(np.zeros(shape, dtype)))


def launched():
  """What the fake GPU was asked to run: [(kernel, its variables)].

  A real one keeps no such log: None.
  """
  path = os.environ.get("WRAPOPT_FAKE_GPU_LOG")
  if path is None:
    return None
  if not os.path.exists(path):
    return []
  with open(path, encoding="utf-8") as f:
    lines = [line.split() for line in f if line.startswith("launch")]
  return [(words[1].split("_", 2)[2], int(words[words.index("variables") + 1]))
          for words in lines if "variables" in words]


def train(inner, device, lazy=False):
  """The variables, slots and averages after STEPS steps on a device."""
  rng = np.random.default_rng(0)
  shapes = [(3, 2), (5, 4)] if lazy else [(3, 2), (5,), ()]
  arrays = [[rng.normal(size=shape).astype(np.float32) for shape in shapes]
            for _ in range(1 + STEPS)]
  with tf.device(device):
    values = [tf.Variable(x) for x in arrays[0]]
  opt = wrapopt.keras.MovingAverage(inner(), 0.75)
  opt.build(values)
  for t, grads in enumerate(arrays[1:]):
    opt.apply([tf.IndexedSlices(tf.constant(g[:2]), tf.constant([2, t]),
                                g.shape) if lazy else tf.constant(g)
               for g in grads], values)
  assert all(opt.is_lazy(v) == lazy for v in values)
  row = [opt.average(v).value for v in values]
  slots = [v.value for v in opt.inner_optimizer.variables[2:]]
  assert all(device in v.device for v in values + row + slots)
  return [v.numpy() for v in values + slots + row]


@pytest.mark.parametrize("rule", INNER)
def test_a_step_gives_the_bits_of_the_cpu(rule):
  want = train(INNER[rule], modes.OTHERS)
  before = launched()
  got = train(INNER[rule], modes.VARIABLES)
  for a, b in zip(want, got, strict=True):
    numerics.assert_same_numbers(b, a)
  if before is not None:
    # One for each step, of three variables.
    assert launched()[len(before):] == [(f"{rule}_float", 3)] * STEPS


@pytest.mark.parametrize("rule", LAZY)
def test_rows_of_averages_lag_behind(rule):
  want = train(LAZY[rule], modes.OTHERS, lazy=True)
  before = launched()
  got = train(LAZY[rule], modes.VARIABLES, lazy=True)
  for a, b in zip(want, got, strict=True):
    numerics.assert_same_numbers(b, a)
  if before is not None:
    # Of a step, rows 2 and t of two variables; then the averages are read.
    after = launched()[len(before):]
    kernel = numerics.KERNELS_OF.get(rule, rule)
    assert after[:STEPS] == [(f"{kernel}_float", 4)] * STEPS
    assert set(after[STEPS:]) == {("CatchUp_float", 1)}


def test_a_gate_counts_on_the_cpu():
  """Keras makes `iterations` on a GPU, where no op can count updates."""
  inner = keras.optimizers.SGD(0.5)
  inner._iterations._initialize(on_gpu(np.int64(3)))
  opt = wrapopt.keras.MovingAverage(
      wrapopt.keras.DropStaleGradient(inner, 0), 0.5)
  assert "CPU:0" in inner.iterations.value.device
  w = on_gpu(np.ones(5, np.float32))
  opt.build([w])
  for _ in range(2):
    with opt.inner_optimizer.record_step():
      opt.apply([tf.constant(np.ones(5, np.float32))], [w])
  assert inner.iterations.numpy() == 5
  np.testing.assert_array_equal(w.numpy(), np.zeros(5))
  np.testing.assert_array_equal(opt.average(w).value.numpy(), np.full(5, .375))


@pytest.mark.parametrize("traced", [False, True])
def test_ops_refuse_to_count_on_a_gpu(traced):
  step, counter = on_gpu(np.int64(3)), tf.Variable(0.)
  histogram = tf.Variable(np.zeros([2, 4], np.int64))
  calls = [lambda: ops.staleness_record(step), lambda: ops.begin_update(step),
           lambda: ops.staleness_gate(step, counter, histogram, 0, 1)]
  for call in calls:
    with pytest.raises(ValueError, match="`step` must be on a CPU.*GPU:0"):
      (tf.function(call) if traced else call)()


def on_gpu(value):
  with tf.device(modes.VARIABLES):
    return tf.Variable(value, trainable=False)
