"""Embeddings in Keras: averages of the rows of a step, and LazyAdam."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import wrapopt.keras as wk

import numerics

# Before TensorFlow starts: a device for each of two replicas.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2)

K = keras.optimizers
ROWS, COLUMNS = 6, 2

# Those that leave rows alone which a sparse gradient lacks, and others.
LAZY = {"sgd": lambda: K.SGD(0.5), "adagrad": lambda: K.Adagrad(0.5),
        "lazy_adam": lambda: wk.LazyAdam(0.5)}
DENSE = {"momentum": lambda: K.SGD(0.5, momentum=0.9),
         "adam": lambda: K.Adam(0.5), "nadam": lambda: K.Nadam(0.5),
         "decay": lambda: K.SGD(0.5, weight_decay=0.1)}

STEPS = {"eager": lambda f: f,
         "function": lambda f: tf.function(f, autograph=False),
         "jit": lambda f: tf.function(f, autograph=False, jit_compile=True)}


def table():
  return np.linspace(-1, 1, ROWS * COLUMNS, dtype=np.float32).reshape(
      ROWS, COLUMNS)


def gradient(t):
  rng = np.random.default_rng(t)
  return (tf.constant(rng.normal(size=(3, COLUMNS)), tf.float32),
          tf.constant([t % ROWS, (2 * t + 1) % ROWS, t % ROWS]))


def train(opt, w, steps, mode="eager"):
  """Takes steps; returns what the variable was after each."""
  # A variable may have two gradients in turn.
  def step(values, indices):
    opt.apply([tf.IndexedSlices(values, indices, tf.constant(
        [ROWS, COLUMNS]))], [w])

  step, history = STEPS[mode](step), []
  for t in steps:
    step(*gradient(t))
    history.append(w.numpy().astype(np.float64))
  return history


def average_of(start, history, decay):
  result = start.astype(np.float64)
  for value in history:
    result += (1 - decay) * (value - result)
  return result


def raw(average):
  """What an average holds, whether or not it is up to date."""
  return getattr(average, "rows", average).numpy()


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("inner", [*LAZY, *DENSE])
def test_averages(inner, mode):
  w = keras.Variable(table())
  opt = wk.MovingAverage({**LAZY, **DENSE}[inner](), [0.9, 0.5])
  opt.build([w])
  history = train(opt, w, range(4), mode)
  behind = raw(opt.average(w))
  assert opt.is_lazy(w) == (inner in LAZY)
  for decay in (0.9, 0.5):
    np.testing.assert_allclose(opt.average(w, decay),
                               average_of(table(), history, decay),
                               rtol=1e-5, atol=1e-6)
  # It lagged behind before it was read, and only then.
  assert np.array_equal(behind, raw(opt.average(w))) == (inner in DENSE)
  with opt.averaged_weights():
    np.testing.assert_allclose(w, average_of(table(), history, 0.9),
                               rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(w, history[-1])


@pytest.mark.parametrize("mode", STEPS)
def test_lazy_adam(mode):
  """The touched rows are those of Adam; the others do not move."""
  w = keras.Variable(table())
  opt = wk.LazyAdam(0.1, beta_1=0.8, beta_2=0.9)
  opt.build([w])
  history = train(opt, w, range(4), mode)
  value, m, v = (x.astype(np.float64) for x in (
      table(), np.zeros_like(table()), np.zeros_like(table())))
  for t, got in enumerate(history):
    values, indices = (x.numpy() for x in gradient(t))
    total = np.zeros_like(value)
    np.add.at(total, indices, values)
    rows = np.unique(indices)
    m[rows] += 0.2 * (total[rows] - m[rows])
    v[rows] += 0.1 * (total[rows] ** 2 - v[rows])
    rate = 0.1 * np.sqrt(1 - 0.9 ** (t + 1)) / (1 - 0.8 ** (t + 1))
    value[rows] -= rate * m[rows] / (np.sqrt(v[rows]) + 1e-7)
    np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)


def test_lazy_adam_of_a_dense_gradient_is_adam():
  grads = np.ones([ROWS, COLUMNS], np.float32)
  found = []
  for opt in (wk.LazyAdam(0.1), K.Adam(0.1)):
    w = keras.Variable(table())
    for t in range(3):
      opt.apply([tf.constant(grads * (t + 1))], [w])
    found.append(w.numpy())
  np.testing.assert_array_equal(*found)
  with pytest.raises(ValueError, match="`amsgrad` of LazyAdam must be False"):
    wk.LazyAdam(amsgrad=True)


SQUARES = {
    "adam": lambda: K.Adam(0.1), "adamw": lambda: K.AdamW(0.1),
    "amsgrad": lambda: K.Adam(0.1, amsgrad=True, weight_decay=0.1),
    "adagrad": lambda: K.Adagrad(0.1),
    "adagrad_decay": lambda: K.Adagrad(0.1, weight_decay=0.1),
    "rmsprop": lambda: K.RMSprop(0.1),
    "centered": lambda: K.RMSprop(0.1, centered=True),
    "rmsprop_momentum": lambda: K.RMSprop(0.1, momentum=0.5)}

WRAP = {"average": wk.MovingAverage, "swa": wk.SWA,
        "lookahead": lambda *args, **kwargs: wk.Lookahead(*args, 100, **kwargs)}


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("name", SQUARES)
def test_a_row_that_is_named_twice_trains_as_in_the_inner_optimizer(name, mode):
  """Keras squares each gradient of a row, and then sums."""
  plain = keras.Variable(table())
  opt = SQUARES[name]()
  opt.build([plain])
  want = train(opt, plain, range(4), mode)
  for wrap in WRAP if mode == "eager" else ["average"]:
    w = keras.Variable(table())
    wrapper = WRAP[wrap](SQUARES[name]())
    wrapper.build([w])
    got = train(wrapper, w, range(4), mode)
    np.testing.assert_allclose(got, want, rtol=2e-6, err_msg=wrap)
    if wrap == "average":
      assert wrapper.is_lazy(w) == (name == "adagrad")
      np.testing.assert_allclose(
          wrapper.average(w), average_of(table(), got, 0.99), rtol=1e-5)


@pytest.mark.parametrize("name", SQUARES)
def test_duplicates_are_summed_on_request(name):
  """As if the batch named each row once, with the sum."""
  w, other = keras.Variable(table()), keras.Variable(table())
  wrapper = wk.MovingAverage(SQUARES[name](), 0.9, sum_duplicates=True)
  opt = SQUARES[name]()
  for t in range(3):
    values, indices = gradient(t)
    wrapper.apply([tf.IndexedSlices(values, indices, [ROWS, COLUMNS])], [w])
    unique, at = tf.unique(indices)
    opt.apply([tf.IndexedSlices(
        tf.math.unsorted_segment_sum(values, at, len(unique)), unique,
        [ROWS, COLUMNS])], [other])
  np.testing.assert_allclose(w, other, atol=1e-5)
  again = wk.MovingAverage.from_config(wrapper.get_config())
  assert again.sum_duplicates is True
  with pytest.raises(TypeError, match="`sum_duplicates` must be"):
    wk.SWA("adam", sum_duplicates="yes")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("wrapped", [False, True])
def test_lazy_adam_in_replicas(wrapped, replicas):
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"][:replicas])
  with strategy.scope():
    w = keras.Variable(table())
    opt = wk.LazyAdam(0.1)
    if wrapped:
      opt = wk.MovingAverage(opt, 0.5)
    opt.build([w])

  @tf.function
  def step():
    strategy.run(lambda: opt.apply(
        [tf.IndexedSlices(tf.ones([1, COLUMNS]), tf.constant([1]),
                          tf.constant([ROWS, COLUMNS]))], [w]))

  step()
  assert not wrapped or not opt.is_lazy(w)
  alone = keras.Variable(table())
  other = wk.LazyAdam(0.1)
  other.apply([tf.IndexedSlices(
      tf.fill([1, COLUMNS], float(replicas)),
      tf.constant([1]), tf.constant([ROWS, COLUMNS]))], [alone])
  for v in strategy.experimental_local_results(w.value):
    np.testing.assert_allclose(v, alone, rtol=1e-6)


def test_a_constraint_keeps_averages_dense():
  w = keras.Variable(table())
  w.constraint = keras.constraints.NonNeg()
  opt = wk.MovingAverage(K.SGD(0.5), 0.9)
  opt.build([w])
  history = train(opt, w, range(3))
  assert not opt.is_lazy(w)
  np.testing.assert_allclose(opt.average(w),
                             average_of(table(), history, 0.9), rtol=1e-5)


def test_lookahead_moves_rows_that_no_gradient_touches():
  """So averages inside must not lag behind."""
  w = keras.Variable(table())
  averaged = wk.MovingAverage(K.SGD(0.5), 0.5)
  opt = wk.Lookahead(averaged, sync_period=2, slow_step_size=0.5)
  opt.build([w])
  value = table().astype(np.float64)
  slow, average = value.copy(), value.copy()
  for t in range(7):
    opt.apply([tf.IndexedSlices(tf.ones([1, COLUMNS]), tf.constant([t % 2]),
                                [ROWS, COLUMNS])], [w])
    value[t % 2] -= 0.5
    average += 0.5 * (value - average)
    if t % 2:
      slow += 0.5 * (value - slow)
      value = slow.copy()
  np.testing.assert_allclose(w.numpy(), value, atol=1e-6)
  np.testing.assert_allclose(averaged.average(w).numpy(), average, atol=1e-6)
  assert not averaged.is_lazy(w)


def test_weight_decay_that_is_switched_on_catches_up_first():
  w = keras.Variable(table())
  opt = wk.MovingAverage(K.SGD(0.5), 0.9)
  opt.build([w])
  history = train(opt, w, range(3))
  opt.weight_decay = 0.1
  history += train(opt, w, range(3, 6))
  np.testing.assert_allclose(opt.average(w), average_of(
      table(), history, 0.9), rtol=1e-5, atol=1e-6)


def model_of_embedding(opt, jit_compile=True):
  keras.utils.set_random_seed(1)
  model = keras.Sequential([
      keras.Input([2], dtype="int32"), keras.layers.Embedding(50, 4),
      keras.layers.Flatten(), keras.layers.Dense(1)])
  model.compile(opt, "mse", jit_compile=jit_compile)
  return model


@pytest.mark.parametrize("jit", [False, True])
def test_fit_save_and_go_on(jit, tmp_path):
  """A model that is trained, saved and loaded, against its dense twin."""
  x = np.random.default_rng(0).integers(0, 50, [16, 2])
  y = x.sum(1, keepdims=True) / 50.0

  def fit(model):
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0,
              callbacks=[wk.EvaluateWithAverages()], validation_data=(x, y))

  lazy = model_of_embedding(wk.MovingAverage(K.SGD(0.5), 0.9), jit)
  fit(lazy)
  assert lazy.optimizer.is_lazy(lazy.layers[0].embeddings)
  assert not lazy.optimizer.is_lazy(lazy.layers[-1].kernel)
  path = str(tmp_path / "model.keras")
  lazy.save(path)
  fit(lazy)
  # A general path: what is averaged by the op that follows the step is dense.
  dense = model_of_embedding(wk.MovingAverage(OwnSGD(0.5), 0.9), jit)
  fit(dense)
  fit(dense)
  assert not dense.optimizer.is_lazy(dense.layers[0].embeddings)
  loaded = keras.saving.load_model(path)
  fit(loaded)
  for a, b, c in zip(*(m.trainable_variables for m in (lazy, dense, loaded))):
    want = dense.optimizer.average(b)
    np.testing.assert_allclose(lazy.optimizer.average(a), want, rtol=1e-4,
                               atol=1e-6)
    np.testing.assert_allclose(loaded.optimizer.average(c), want, rtol=1e-4,
                               atol=1e-6)


class OwnSGD(K.SGD):
  """A subclass, which may have overridden anything."""


def test_checkpoints(tmp_path):
  w = keras.Variable(table())
  opt = wk.MovingAverage(K.Adagrad(0.5), 0.9)
  opt.build([w])
  history = train(opt, w, range(4))
  path = tf.train.Checkpoint(w=w.value, opt=opt).save(str(tmp_path / "c"))
  assert not any("log_decays" in n for n, _ in tf.train.list_variables(path))
  for before in (0, 3):
    w2 = keras.Variable(table())
    opt2 = wk.MovingAverage(K.Adagrad(0.5), 0.9)
    opt2.build([w2])
    train(opt2, w2, range(before))
    tf.train.Checkpoint(w=w2.value, opt=opt2).restore(path)
    more = train(opt2, w2, [4, 5])
    np.testing.assert_allclose(opt2.average(w2), average_of(
        table(), history + more, 0.9), rtol=1e-5, atol=1e-6)
    numerics.assert_same_bits(w2.numpy(), more[-1].astype(np.float32))
