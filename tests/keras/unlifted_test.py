"""Models that a tf.function builds, and gives their values when it runs.

TensorFlow lifts initial values out of the first trace, and assigns them before
the function runs. It cannot lift those under a control dependency on an
argument. The graph then initializes the variables, in its first run.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt.keras as wk

K = keras.optimizers

pytestmark = pytest.mark.skipif(
    keras.version() >= "3.16", reason="Keras 3.16 gives variables their values "
    "while a function is traced")


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.set_random_seed(0)


def step_of(model, opt, x):
  """Takes a step under control dependencies on an argument: the loss."""
  with tf.GradientTape() as tape:
    loss = tf.reduce_mean(model(x, training=True) ** 2)
  grads = tape.gradient(loss, model.trainable_variables)
  with tf.control_dependencies([tf.debugging.check_numerics(loss, "")]):
    opt.apply_gradients(zip(grads, model.trainable_variables))
  return loss


class Checked(keras.Sequential):

  def train_step(self, data):
    return {"loss": step_of(self, self.optimizer, data)}


class Seen(keras.callbacks.Callback):
  """Records what a function returns after each step."""

  def __init__(self, function):
    super().__init__()
    self.function, self.values = function, []

  def on_train_batch_end(self, batch, logs=None):
    self.values.append(self.function())


# {name: (wrapper of an optimizer, the average of a variable)}.
WRAPPERS = {
    "MovingAverage": (lambda o: wk.MovingAverage(o, 0.5), lambda o: o.average),
    "SWA": (lambda o: wk.SWA(o, 0, 1), lambda o: o.average),
    "Lookahead": (wk.Lookahead, lambda o: o.slow_weights),
    "ScheduleFree": (wk.ScheduleFree, lambda o: o.average),
    "z": (wk.ScheduleFree, lambda o: o.z),
    "PrimalAverage": (wk.PrimalAverage, lambda o: o.average),
    "MovingAverage of Lookahead": (
        lambda o: wk.MovingAverage(wk.Lookahead(o, 1), 0.5),
        lambda o: o.average),
    "LossScaleOptimizer": (
        lambda o: K.LossScaleOptimizer(wk.MovingAverage(o, 0.5)),
        lambda o: o.inner_optimizer.average),
}


@pytest.mark.by_day(0)
def test_tensorflow_cannot_lift():
  """Otherwise, this file tests nothing."""
  model, opt = keras.Sequential([keras.layers.Dense(1)]), K.Adam()
  have_values = []

  @tf.function
  def step(x):
    with tf.init_scope():
      have_values.append([
          bool(v.value.is_initialized()) for v in model.trainable_variables])
    step_of(model, opt, x)

  step(tf.ones([2, 3]))
  # It runs the first trace, and has not before it makes the second.
  assert have_values == [[], [False, False]]


def pairs_of(model, average_of):
  return [(np.array(v.numpy()), tf.convert_to_tensor(average_of(v)).numpy())
          for v in model.trainable_variables]


def made(name, inner, rate):
  """A wrapper by its name, and the function that reads its averages."""
  make, average_of = WRAPPERS[name]
  momentum = inner is K.Adam and make is wk.ScheduleFree
  return (opt := make(inner(rate, beta_1=0.9 if momentum else 0.0))), (
      average_of(opt))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("inner", [K.Adam, K.Adamax], ids=["fused", "unfused"])
def test_an_average_of_weights_that_stay(name, inner):
  opt, average_of = made(name, inner, 0.0)
  model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
  step = tf.function(lambda x: step_of(model, opt, x))
  for n in (4, 4, 2):  # The last is traced anew.
    step(tf.ones([n, 4]))
    pairs = pairs_of(model, average_of)
    assert np.any(pairs[0][0])
    for value, average in pairs:
      np.testing.assert_array_equal(average, value)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["MovingAverage", "Lookahead", "z"])
def test_fit(name):
  opt, average_of = made(name, K.Adam, 0.0)
  model = Checked([keras.layers.Dense(3), keras.layers.Dense(1)])
  model.compile(opt, jit_compile=False)
  seen = Seen(lambda: pairs_of(model, average_of))
  model.fit(np.ones([12, 4], np.float32), batch_size=4, verbose=0,
            callbacks=[seen])
  assert len(seen.values) == 3
  for pairs in seen.values:
    assert np.any(pairs[0][0])
    for value, average in pairs:
      np.testing.assert_array_equal(average, value)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inner", [
    lambda: K.Adam(0.25), lambda: K.SGD(0.25, momentum=0.5),
    lambda: wk.LazyAdam(0.25)], ids=["Adam", "Momentum", "LazyAdam"])
def test_numbers(inner):
  """Embeddings, batch normalization, and weights that move."""
  model = keras.Sequential([
      keras.layers.Embedding(5, 3), keras.layers.BatchNormalization(),
      keras.layers.Dense(1)])
  opt = wk.MovingAverage(inner(), 0.5, average_batch_norm=True)
  opt.set_model(model)
  before = []

  @tf.function
  def step(x):
    model(x)  # Builds it.
    first = [tf.identity(v) for v in model.trainable_variables]
    step_of(model, opt, x)
    return first

  for batch in ([[0], [1]], [[1], [1]], [[3], [0]]):
    first = [v.numpy() for v in step(tf.constant(batch))]
    norm = model.layers[1]
    variables = [*model.trainable_variables, norm.moving_mean,
                 norm.moving_variance]
    if not before:
      # The forward pass comes before the averages begin.
      before = [*first, *(v.numpy() for v in variables[-2:])]
      expected = [v.astype(np.float64) for v in before]
    expected = [(s + v.numpy()) / 2 for s, v in zip(expected, variables)]
  assert np.any(before[0] != variables[0].numpy())
  for s, v in zip(expected, variables):
    # Three updates, of three roundings each.
    np.testing.assert_allclose(opt.average(v).numpy(), s, rtol=0,
                               atol=9 * np.abs(s).max() * 2**-24)


def test_a_decay_that_a_checkpoint_lacks(tmp_path):
  """Its average starts at the weights, which the checkpoint lacks, too."""
  def trained(opt, restored=None):
    model = keras.Sequential([keras.layers.Dense(2)])
    checkpoint = tf.train.Checkpoint(optimizer=opt)
    if restored:
      checkpoint.restore(restored)
      opt.learning_rate = 0.0
    step = tf.function(lambda x: step_of(model, opt, x))
    step(tf.ones([2, 3]))
    step(tf.ones([2, 3]))
    return model.trainable_variables[0], checkpoint

  opt = wk.MovingAverage(K.Adam(0.25), 0.5)
  v, checkpoint = trained(opt)
  average = opt.average(v).numpy()
  opt = wk.MovingAverage(K.Adam(0.25), [0.5, 0.75])
  w, _ = trained(opt, checkpoint.write(str(tmp_path / "checkpoint")))
  np.testing.assert_array_equal(opt.average(w, 0.75), w)
  np.testing.assert_allclose(opt.average(w, 0.5), (average + 3 * w) / 4,
                             rtol=1e-5)
