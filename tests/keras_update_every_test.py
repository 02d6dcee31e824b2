"""Averages that move in every n-th step, in Keras.

The reference is a model in NumPy float64 over the values after steps. Averages
here are rounded three times in each update, to 2^-24 of numbers below 16.
"""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_versions
import wrapopt
from wrapopt import checkpoints
import wrapopt.keras as wk

K = keras.optimizers

STEPS = {"eager": lambda f: f,
         "function": lambda f: tf.function(f, autograph=False),
         "jit": lambda f: tf.function(f, autograph=False, jit_compile=True)}
INNER = {"sgd": lambda: K.SGD(1.0), "adam": lambda: K.Adam(0.1),
         "lazy_adam": lambda: wk.LazyAdam(0.1), "nadam": lambda: K.Nadam(0.1)}


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.clear_session()
  keras.utils.set_random_seed(0)


def average_of(start, history, decay, every, start_step=0):
  """The average after each of the values.

  Args:
    start: The value before the first step.
    history: The values after steps.
    decay: A function of the number of the update, from 1.
    every: The averages move in the steps after `start_step` that it divides.
    start_step: The number of steps before averaging begins.
  """
  s, result = np.float64(start), []
  for t, value in enumerate(history, 1 - start_step):
    value = np.float64(value)
    if t <= 0:
      s = value
    elif t % every == 0:
      s = s + (1 - decay(t // every)) * (value - s)
    result.append(s)
  return result


def assert_close(got, expected, updates=10):
  np.testing.assert_allclose(got, expected, rtol=0,
                             atol=3 * updates * 16 * 2**-24)


def moving(inner="sgd", decay=0.5, **kwargs):
  return wk.MovingAverage(INNER[inner](), decay, **kwargs)


def train(opt, w, steps, mode="eager", gradient=lambda t: -1.0):
  """Returns the values after steps, and [the average of each decay]."""
  step = STEPS[mode](lambda g: opt.apply([tf.fill(w.shape, g)], [w]))
  values, averages = [], []
  for t in steps:
    step(tf.constant(gradient(t), tf.float32))
    values.append(w.numpy())
    averages.append([opt.average(w, d).numpy() for d in opt.decays()])
  return values, averages


def average_is(opt, w):
  return opt.average(w).numpy().item()


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("inner", ["sgd", "momentum"])
def test_a_trajectory(mode, inner):
  # The variable is 1, 2, ..., 7. In steps 3 and 6, the average goes half of
  # the way to it: from 0 to 3/2, and from there to 15/4.
  w = keras.Variable([0.0])
  opt = wk.MovingAverage(
      K.SGD(1.0) if inner == "sgd" else K.SGD(1.0, momentum=0.0), 0.5,
      update_every=3)
  values, averages = train(opt, w, range(7), mode)
  assert np.ravel(values).tolist() == [1, 2, 3, 4, 5, 6, 7]
  assert np.ravel(averages).tolist() == [0, 0, 1.5, 1.5, 1.5, 3.75, 3.75]
  assert opt.average_steps() == 7


@pytest.mark.parametrize("start_step", [0, 2])
@pytest.mark.parametrize("inner, mode", [
    *((inner, mode) for inner in INNER for mode in ("eager", "function")),
    ("adam", "jit"), ("nadam", "jit")])
def test_decays_count_updates(inner, mode, start_step):
  """A PowerDecay, the limit by a count of updates, and dynamic_decay."""
  noise = np.random.default_rng(0).normal(size=17).astype(np.float32)
  gradient = lambda t: noise[t]
  start = np.float32([1, 2])
  for kwargs, limit in (({}, lambda t: 1), (
      {"num_updates": 11}, lambda t: 3 / 12), (
          {"dynamic_decay": True}, lambda t: t / (9 + t))):
    w = keras.Variable(start)
    opt = moving(inner, [wrapopt.PowerDecay(gamma=1), 0.9], update_every=4,
                 start_step=start_step, **kwargs)
    values, averages = train(opt, w, range(17), mode, gradient)
    for k, decay in enumerate([lambda t: (1 - 1 / t)**2,
                               lambda t, limit=limit: min(0.9, limit(t))]):
      assert_close([row[k] for row in averages],
                   average_of(start, values, decay, 4, start_step))


def test_a_function_is_called_once_in_each_step():
  w, calls = keras.Variable([0.0]), []
  opt = moving(update_every=2, num_updates=lambda: calls.append(1) or 100)
  _, averages = train(opt, w, range(4))
  assert len(calls) == 4
  assert np.ravel(averages).tolist() == [0, 1, 1, 2.5]


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32",
                                   "float64"])
def test_a_step_between_changes_no_bit(mode, dtype):
  start = np.array([np.nan, np.inf, -0.0, 1e-7, 1])
  w = keras.Variable(tf.cast(start, dtype), dtype=dtype, name="w")
  empty = keras.Variable(np.zeros([0]), dtype=dtype, name="empty")
  scalar = keras.Variable(1.0, dtype=dtype, name="scalar")
  variables = [w, empty, scalar]
  opt = wk.MovingAverage(K.SGD(1.0), [0.5, wrapopt.PowerDecay(gamma=0)],
                         update_every=3, shadow_dtype=dtype)
  opt.build(variables)
  step = STEPS[mode](lambda: opt.apply([tf.ones_like(v.value) for v in
                                        variables]))
  for t in range(1, 7):
    before = [s.numpy().tobytes() for s, _ in opt._state.pairs()]
    step()
    after = [s.numpy().tobytes() for s, _ in opt._state.pairs()]
    assert (after != before) == (t % 3 == 0), t


def test_an_eager_step_between_runs_no_op_for_averages(monkeypatch):
  w = keras.Variable([0.0])
  opt = moving("nadam", [0.5, 0.25], update_every=3)
  calls = []
  monkeypatch.setattr(
      wrapopt.ops, "ema_update", lambda *args: calls.append(args))
  for _ in range(7):
    opt.apply([tf.ones(1)], [w])
    calls.append(None)
  # The third and the sixth.
  assert [i for i, call in enumerate(calls) if call] == [2, 6]


@pytest.mark.parametrize("sum_duplicates, lazy", [
    (False, None), (True, None), (True, False)])
@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("inner", ["sgd", "adagrad", "lazy_adam"])
def test_rows(inner, mode, sum_duplicates, lazy):
  steps, every, rows_of_table = 11, 3, 6
  rng = np.random.default_rng(1)
  rows = rng.integers(0, rows_of_table, (steps, 3))
  grads = rng.normal(size=(steps, 3, 2)).astype(np.float32)
  start = rng.normal(size=(rows_of_table, 2)).astype(np.float32)
  decays = [0.75, wrapopt.PowerDecay(gamma=2)]
  w = keras.Variable(start)
  opt = wk.MovingAverage(
      K.Adagrad(0.1) if inner == "adagrad" else INNER[inner](), decays,
      update_every=every, lazy=lazy, sum_duplicates=sum_duplicates)
  step = STEPS[mode](lambda g, i: opt.apply(
      [tf.IndexedSlices(g, i, tf.constant([rows_of_table, 2]))], [w]))
  history, read = [], []
  for t in range(steps):
    step(tf.constant(grads[t]), tf.constant(rows[t]))
    history.append(w.numpy())
    if t % 4 == 3:  # Not in each step: rows lag behind.
      read.append((t, [opt.average(w, d).numpy() for d in decays]))
  assert opt.is_lazy(w) == (lazy is None)
  for k, decay in enumerate([lambda t: 0.75, lambda t: (1 - 1 / t)**3]):
    expected = average_of(start, history, decay, every)
    for t, averages in read:
      assert_close(averages[k], expected[t])


# What is counted.


@pytest.mark.parametrize("mode", STEPS)
def test_steps_that_accumulate_are_not_counted(mode):
  w = keras.Variable([0.0])
  opt = wk.MovingAverage(K.SGD(1.0, gradient_accumulation_steps=2), 0.5,
                         update_every=2)
  values, averages = train(opt, w, range(9), mode)
  assert np.ravel(values).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4]
  assert np.ravel(averages).tolist() == [0, 0, 0, 1, 1, 1, 1, 2.5, 2.5]


@pytest.mark.parametrize("mode", STEPS)
def test_steps_that_loss_scaling_skips_are_not_counted(mode):
  w = keras.Variable([0.0])
  inner = moving(update_every=2)
  opt = K.LossScaleOptimizer(inner, initial_scale=1.0)
  opt.build([w])
  step = STEPS[mode](lambda g: opt.apply([g * opt.dynamic_scale], [w]))
  averages = []
  for g in (-1, np.nan, np.inf, -1, np.nan, -1, -1):
    step(tf.constant([g], tf.float32))
    averages.append((w.numpy().item(), average_is(inner, w)))
  assert averages == [(1, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1),
                      (4, 2.5)]


def test_the_count_begins_with_the_averages():
  w = keras.Variable([0.0])
  inner = K.SGD(1.0)
  for _ in range(3):
    inner.apply([-tf.ones(1)], [w])
  opt = wk.MovingAverage(inner, 0.5, update_every=2)
  # From 3: the second step is to 5.
  _, averages = train(opt, w, range(4))
  assert np.ravel(averages).tolist() == [3, 4, 4, 5.5]
  opt.seed_averages()
  # From 7.
  _, averages = train(opt, w, range(2))
  assert np.ravel(averages).tolist() == [7, 8]
  assert opt.average_steps() == 2


@keras_versions.needs("MultiOptimizer")
@pytest.mark.parametrize("mode", STEPS)
def test_in_a_multi_optimizer(mode):
  a, b = (keras.Variable([0.0], name=name) for name in "ab")
  of_a, of_b = K.SGD(1.0), K.SGD(2.0)
  opt = wk.MovingAverage(
      K.MultiOptimizer(lambda v: of_a if v.path == "a" else of_b), 0.5,
      update_every=2)
  opt.build([a, b])
  step = STEPS[mode](lambda: opt.apply([-tf.ones(1), -tf.ones(1)], [a, b]))
  averages = []
  for _ in range(4):
    step()
    averages.append([average_is(opt, v) for v in (a, b)])
  assert averages == [[0, 0], [1, 2], [1, 2], [2.5, 5]]


def test_around_lookahead_and_of_some_variables():
  a, b = (keras.Variable([0.0], name=name) for name in "ab")
  opt = wk.MovingAverage(wk.Lookahead(K.SGD(1.0), 2), 0.5, update_every=2,
                         variables=["a"])
  for _ in range(4):
    opt.apply([-tf.ones(1), -tf.ones(1)], [a, b])
  # 1, 1 (slow), 2, 2: the average moves to 1/2 and 5/4.
  assert [a.numpy(), b.numpy(), average_is(opt, a)] == [2, 2, 1.25]


def test_statistics_of_batch_normalizations():
  norm = keras.layers.BatchNormalization(momentum=0.5)
  model = keras.Sequential([keras.Input((1,)), norm])
  opt = moving(update_every=2, average_batch_norm=True)
  model.compile(opt, "mse", jit_compile=False)
  opt.set_model(model)
  opt.build(model.trainable_variables)
  means = [0.0]
  averages = []
  for t in range(4):
    x = np.full((4, 1), t + 1, np.float32)
    model.train_on_batch(x, x)
    means.append(norm.moving_mean.numpy()[0])
    averages.append(opt.average(norm.moving_mean).numpy()[0])
  assert means == [0, 0.5, 1.25, 2.125, 3.0625]
  assert averages == [0, 0.625, 0.625, 1.84375]


class AtMost3(keras.constraints.Constraint):

  def __call__(self, w):
    return tf.minimum(w, 3.0)


def test_constraints():
  w = keras.Variable([0.0])
  w.constraint = AtMost3()
  opt = moving(update_every=2)
  _, averages = train(opt, w, range(4))
  assert np.ravel(averages).tolist() == [0, 1, 1, 2]


# Files.


def model_of(**kwargs):
  model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
  model.layers[0].set_weights([np.ones((3, 1)), np.zeros(1)])
  kwargs = {"decay": [wrapopt.PowerDecay(gamma=1), 0.5], "update_every": 3,
            **kwargs}
  model.compile(moving("adam", **kwargs), "mse", jit_compile=False)
  model.optimizer.build(model.trainable_variables)
  return model


def fit(model, steps):
  x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
  for _ in range(steps):
    model.train_on_batch(x, x[:, :1])


@pytest.mark.parametrize("how", ["keras", "weights", "checkpoint"])
def test_files_go_on_in_the_period(how, tmp_path):
  model = model_of()
  fit(model, 5)
  if how == "keras":
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    assert other.optimizer.get_config() == model.optimizer.get_config()
    assert other.optimizer.get_config()["update_every"] == 3
  else:
    other = model_of()
    fit(other, 1)
    if how == "weights":
      model.save_weights(tmp_path / "model.weights.h5")
      other.load_weights(tmp_path / "model.weights.h5")
    else:
      path = tf.train.Checkpoint(model=model, opt=model.optimizer).save(
          str(tmp_path / "model"))
      tf.train.Checkpoint(model=other, opt=other.optimizer).restore(
          path).assert_consumed()
  for _ in range(5):
    for (s, _), (r, _) in zip(model.optimizer._state.pairs(),
                              other.optimizer._state.pairs()):
      np.testing.assert_array_equal(s, r)
    for m in model, other:
      fit(m, 1)


def test_names_are_those_of_before(tmp_path):
  def names(**kwargs):
    model = model_of(decay=0.5, **kwargs)
    path = tf.train.Checkpoint(opt=model.optimizer).write(str(tmp_path / "x"))
    return {name for name, _ in tf.train.list_variables(path)}

  assert {name.split("/")[2] for name in
          names() - names(update_every=1)} == {"first_average_step"}


def test_a_file_of_every_step_goes_on(tmp_path):
  """It lacks the first step: the count begins with the next one."""
  model = model_of(decay=0.5, update_every=1)
  fit(model, 4)
  model.save_weights(tmp_path / "model.weights.h5")
  other = model_of(decay=0.5)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    other.load_weights(tmp_path / "model.weights.h5")
  w = other.trainable_variables[0]
  before = other.optimizer.average(w).numpy()
  for t in range(1, 4):
    fit(other, 1)
    assert np.array_equal(other.optimizer.average(w), before) == (t < 3)


def test_snapshots_count_steps_until_the_last_update(tmp_path):
  model = model_of(decay=wrapopt.PowerDecay(gamma=1))
  x = np.ones((5, 3), np.float32)
  model.fit(x, x[:, :1], batch_size=1, verbose=0, callbacks=[
      wk.Snapshots(tmp_path / "s", 5)])
  [path] = (tmp_path / "s").glob("*")
  # Of 5 steps, averages moved last in the third.
  for steps in 2, 3:
    with (pytest.raises(ValueError, match="at least the steps of the first")
          if steps == 2 else contextlib.nullcontext()):
      checkpoints.posthoc([path], tmp_path / "o.weights.h5", gamma=1,
                          steps=steps)


@pytest.mark.parametrize("every, error, text", [
    (0, ValueError, "`update_every` must be at least 1, got 0"),
    (2.0, TypeError, "`update_every` must be an integer, got 2.0"),
    (True, TypeError, "must be an integer, got True"),
])
def test_bad_arguments(every, error, text):
  with pytest.raises(error, match=text):
    moving(update_every=every)
