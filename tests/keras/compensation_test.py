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


def trained(gate, w, apply, sparse, in_function, gradient):
  """Three times two gradients of the same weights, one after the other."""
  def two():
    pairs = []
    for _ in range(2):
      with gate.record_step() as recorded:
        pairs.append((recorded, gradient(lambda: loss_of(w, sparse))))
    for recorded, g in pairs:
      apply(recorded, g)

  function = tf.function(two) if in_function else two
  for _ in range(3):
    function()


@pytest.mark.parametrize("in_function", [False, True],
                         ids=["eager", "function"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_numbers_are_those_of_version_1(policy, dtype, sparse, in_function):
  start = np.arange(6, dtype=np.float32).reshape(3, 2) / 8 - 0.25

  def tape_gradient(w, loss):
    with tf.GradientTape() as tape:
      tape.watch(w)
      value = loss()
    return tape.gradient(value, w)

  v = keras.Variable(start, dtype=dtype)
  gate = wk.DropStaleGradient(K.SGD(0.125), 5, policy=POLICIES[policy])
  gate.build([v])
  trained(gate, v.value, lambda recorded, g: gate.apply_recorded(
      recorded, [g], [v]), sparse, in_function,
          lambda loss: tape_gradient(v.value, loss))

  w = tf.Variable(tf.cast(start, dtype))
  step = tf.Variable(0, dtype=tf.int64)
  twin = wrapopt.DropStaleGradientOptimizer(
      tf1.train.GradientDescentOptimizer(0.125), 5, global_step=step,
      policy=POLICIES[policy])
  trained(twin, w, lambda recorded, g: twin.apply_gradients(
      [(g, w)], step, recorded=recorded), sparse, in_function,
          lambda loss: tape_gradient(w, loss))
  assert int(gate.iterations) == int(step) == 6
  np.testing.assert_array_equal(np.float64(v.value), np.float64(w))
  plain = wk.DropStaleGradient(K.SGD(0.125), 5)
  u = keras.Variable(start, dtype=dtype)
  plain.build([u])
  trained(plain, u.value, lambda recorded, g: plain.apply_recorded(
      recorded, [g], [u]), sparse, in_function,
          lambda loss: tape_gradient(u.value, loss))
  if dtype != "bfloat16":  # A difference may be lost in rounding.
    assert (np.float64(u.value) != np.float64(v.value)).any()


def test_averages_follow_the_compensated_step():
  v = keras.Variable([1.0], dtype="float64")
  gate = wk.DropStaleGradient(K.SGD(0.5), 5, policy=POLICIES["constant"])
  opt = wk.MovingAverage(gate, 0.75)
  opt.build([v])

  @tf.function
  def two():
    with gate.record_step():
      first = v.value * 1.0
      second = v.value * 2.0
    opt.apply([first], [v])
    with gate.record_step():  # Of later weights, but the gradient is older.
      opt.apply([second], [v])

  two()
  # 1 - 0.5 * 1; then 0.5 - 0.5 (2 + 0.5 * 4 * (0.5 - 1)).
  np.testing.assert_allclose(v.value, [0.0], atol=1e-15)
  average = 1 + 0.25 * (0.5 - 1)
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
  fresh, new = make()
  fresh.assign([v + 0.0 for v in (1.0, 2.0)])
  step(fresh, new)
  copy = wk.DropStaleGradient.from_config(gate.get_config())
  assert copy._policy == POLICIES["gap"]


def test_what_is_refused():
  policy = POLICIES["gap"]
  with pytest.raises(ValueError, match="must not compensate.*Nadam"):
    wk.DropStaleGradient(K.Nadam(), 1, policy=policy)
  v = keras.Variable(np.ones([3, 2]))
  gate = wk.DropStaleGradient(K.Adam(), 1, policy=policy)
  gate.build([v])
  rows = tf.IndexedSlices(tf.ones([1, 2]), [1], [3, 2])
  before = v.numpy()
  with pytest.raises(NotImplementedError, match="one native op, got one of"):
    with gate.record_step() as recorded:
      tf.convert_to_tensor(v.value)
    gate.apply_recorded(recorded, [rows], [v])
  np.testing.assert_array_equal(v.value, before)
  assert int(gate.iterations) == 0
  assert wrapopt.ops.staleness_record(gate.iterations.value)[1] == 0

  # The weights of a gradient that no read of the variable precedes.
  @tf.function
  def step():
    with gate.record_step():
      pass
    gate.apply([tf.ones([3, 2])], [v])

  with pytest.raises(ValueError, match="weights that a gradient was computed"):
    step()
