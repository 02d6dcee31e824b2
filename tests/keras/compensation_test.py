"""Delay compensation in the gate of Keras.

The numbers are those of the gate of tf.compat.v1, whose tests compare it with a
model.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
import wrapopt.keras as wk

tf1 = tf.compat.v1
K = keras.optimizers
POLICIES = {
    "constant": wrapopt.DelayCompensation(0.5, adaptive=False),
    "adaptive": wrapopt.DelayCompensation(0.5, decay=0.75),
    "gap": wrapopt.GapAware(0.75),
}


def loss_of(w, sparse):
  rows = tf.gather(w, [0, 2, 0]) if sparse else tf.convert_to_tensor(w)
  return tf.reduce_sum(rows * rows * rows)


def two_steps(gate, w, apply, sparse, in_function):
  """A function of two gradients of the same weights, one after the other."""
  def two():
    pairs = []
    for _ in range(2):
      with gate.record_step() as recorded:
        with tf.GradientTape() as tape:
          tape.watch(w)
          loss = loss_of(w, sparse)
        pairs.append((recorded, tape.gradient(loss, w)))
    for recorded, g in pairs:
      apply(recorded, g)

  return tf.function(two) if in_function else two


@pytest.mark.parametrize("in_function", [False, True],
                         ids=["eager", "function"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_numbers_are_those_of_version_1(policy, dtype, sparse, in_function):
  start = np.arange(6, dtype=np.float32).reshape(3, 2) / 8 - 0.25

  step = tf.Variable(0, dtype=tf.int64)
  opt = wrapopt.DropStaleGradientOptimizer(
      tf1.train.GradientDescentOptimizer(0.125), 5, global_step=step,
      policy=POLICIES[policy])
  w = tf.Variable(tf.cast(start, dtype))
  two = two_steps(opt, w, lambda recorded, g: opt.apply_gradients(
      [(g, w)], step, recorded=recorded), sparse, in_function)
  for _ in range(3):
    two()
  assert int(step) == 6
  found = []
  for given in POLICIES[policy], "drop":
    v = keras.Variable(start, dtype=dtype)
    gate = wk.DropStaleGradient(K.SGD(0.125), 5, policy=given)
    gate.build([v])
    two = two_steps(gate, v.value, lambda recorded, g: gate.apply_recorded(
        recorded, [g], [v]), sparse, in_function)
    for _ in range(3):
      two()
    assert int(gate.iterations) == 6
    found.append(np.float64(v.value))
  np.testing.assert_array_equal(found[0], np.float64(w))
  if dtype != "bfloat16":  # A difference may be lost in rounding.
    assert (found[0] != found[1]).any()


def test_averages_follow_the_compensated_step():
  v = keras.Variable([1.0], dtype="float64")
  gate = wk.DropStaleGradient(K.SGD(0.5), 5, policy=POLICIES["constant"])
  opt = wk.MovingAverage(gate, 0.75)
  opt.build([v])

  @tf.function
  def two():
    with gate.record_step():
      first = v.value * -2.0
      second = v.value * 2.0
    opt.apply([first], [v])
    with gate.record_step():  # Of later weights, but the gradient is older.
      opt.apply([second], [v])

  two()
  # 1 + 0.5 * 2; then 2 - 0.5 (2 + 0.5 * 4 * (2 - 1)).
  np.testing.assert_allclose(v.value, [0.0], atol=1e-15)
  average = 1 + 0.25 * (2 - 1)
  np.testing.assert_allclose(tf.convert_to_tensor(opt.average(v)),
                             [average + 0.25 * (0 - average)], rtol=1e-15)


def test_the_state_is_saved(tmp_path):
  def make():
    v = keras.Variable([1.0, 2.0])
    gate = wk.DropStaleGradient(K.SGD(0.5), 5, policy=POLICIES["gap"])
    gate.build([v])
    return v, gate

  def step(v, gate):
    with gate.record_step() as recorded:
      g = v.value * 1.0
    gate.apply_recorded(recorded, [g], [v])
    gate.apply_recorded(recorded, [g], [v])

  v, gate = make()
  step(v, gate)
  path = tf.train.Checkpoint(opt=gate, v=v.value).write(str(tmp_path / "c"))
  other, again = make()
  tf.train.Checkpoint(opt=again, v=other.value).read(path).assert_consumed()
  for pair in (v, gate), (other, again):
    step(*pair)
  np.testing.assert_array_equal(v.value, other.value)
  copy = wk.DropStaleGradient.from_config(gate.get_config())
  assert copy._policy == POLICIES["gap"]


def compensated(policy, g, delay, memory):
  """The gradient of a step and the state before it, in NumPy."""
  if isinstance(policy, wrapopt.GapAware):
    gap = 1 + np.abs(delay) / np.where(memory == 0, 1, memory)
    return np.where(memory == 0, g, g / gap), memory
  by = policy.lambda_
  if policy.adaptive:
    memory = policy.decay * memory + (1 - policy.decay) * g * g
    by = by / np.sqrt(memory + policy.epsilon)
  return g + by * g * g * delay, memory


INNER = {
    "Nadam": lambda: K.Nadam(0.125),
    "Ftrl": lambda: K.Ftrl(0.125),
    "Adam": lambda: K.Adam(0.125),
    "AdamW clipped": lambda: K.AdamW(0.125, weight_decay=0.25, clipnorm=0.5),
    "SGD constraint": lambda: K.SGD(0.125),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sparse, in_function", [
    (False, False), (False, True), (True, True)],
                         ids=["eager", "function", "sparse"])
@pytest.mark.parametrize("policy", ["adaptive", "gap"])
@pytest.mark.parametrize("inner", INNER)
def test_any_inner_optimizer(inner, policy, sparse, in_function):
  """The steps are those of the gradients that NumPy computes."""
  policy = POLICIES[policy]
  start = np.arange(6).reshape(3, 2) / 8 - 0.25
  v, twin = (keras.Variable(start, dtype="float64") for _ in range(2))
  if "constraint" in inner:
    v.constraint = twin.constraint = lambda w: tf.round(w * 64) / 64
  gate = wk.DropStaleGradient(INNER[inner](), 5, policy=policy)
  plain = wk.DropStaleGradient(INNER[inner](), 5, sum_duplicates=gate.fused)
  gate.build([v])
  plain.build([twin])
  # Keras clips the gradients of the model, not what comes of them.
  most, plain.inner_optimizer.clipnorm = plain.inner_optimizer.clipnorm, None
  assert gate.fused == (inner not in ("Nadam", "Ftrl"))

  step = two_steps(gate, v.value, lambda recorded, g: gate.apply_recorded(
      recorded, [g], [v]), sparse, in_function)
  memory, rows = np.zeros_like(start), [0, 2] if sparse else [0, 1, 2]
  times = np.array([[2], [0], [1]]) if sparse else 1
  for _ in range(3):
    step()
    origin = twin.numpy()
    g = 3 * origin**2
    if most:
      g = g * min(1, most / np.sqrt(np.sum(times * g * g)))
    g = g * times
    for _ in range(2):
      before = twin.numpy()
      taken, new = compensated(policy, g, before - origin, memory)
      with plain.record_step() as recorded:
        pass
      plain.apply_recorded(recorded, [
          tf.IndexedSlices(taken[rows], rows, [3, 2]) if sparse else
          tf.constant(taken)], [twin])
      if isinstance(policy, wrapopt.GapAware):
        size = np.abs(twin.numpy() - before)
        new = np.where(memory == 0, size,
                       policy.decay * memory + (1 - policy.decay) * size)
      memory[rows] = new[rows]
    np.testing.assert_allclose(v.numpy(), twin.numpy(), rtol=1e-12, atol=1e-14)
    for row in gate._memory.values():
      [slot] = row.values()
      np.testing.assert_allclose(slot.numpy(), memory, rtol=1e-12, atol=1e-14)
  assert int(gate.iterations) == 6


def test_weights_that_are_not_known_are_refused():
  gate = wk.DropStaleGradient(K.Adam(), 1, policy=POLICIES["gap"])
  v = keras.Variable(np.ones([3, 2]))
  gate.build([v])

  # The weights of a gradient that no read of the variable precedes.
  @tf.function
  def step():
    with gate.record_step():
      pass
    gate.apply([tf.ones([3, 2])], [v])

  with pytest.raises(ValueError, match="weights that a gradient was computed"):
    step()
