"""Averages that move in every n-th step.

averages_test.py has what they hold in each way to train, and that files, seeds
and averages in place go on in the period.
"""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import averages
import keras_versions
from modes import address
from training import graph_of
from training import moving as wrap
import wrapopt
from wrapopt import checkpoints
import wrapopt.keras as wk

v1 = tf.compat.v1
K = keras.optimizers


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.clear_session()
  keras.utils.set_random_seed(0)


def settings(average_decay=0.5, update_every=2, **kwargs):
  return lambda run: dict(average_decay=average_decay,
                          update_every=update_every, **kwargs)


def moving(inner="sgd", decay=0.5, **kwargs):
  return wk.MovingAverage(averages.INNER[inner][1](), decay, **kwargs)


each_jit = pytest.mark.parametrize("jit", [None, False, True])


def averages_after(opt, w, steps, jit=None, inner=None):
  """What w and its average are after steps with each of these gradients."""
  opt.build([w])
  step = lambda g: opt.apply([g], [w])
  if jit is not None:  # None: eagerly.
    step = tf.function(step, autograph=False, jit_compile=jit)
  found = []
  for g in steps:
    step(tf.constant([g], tf.float32))
    found.append((w.numpy().item(), (inner or opt).average(w).numpy().item()))
  return found


@pytest.mark.by_day(3)
@pytest.mark.parametrize("way", averages.WAYS, ids=str)
def test_a_trajectory(way):
  # The variable is 1, 2, ..., 7. In steps 3 and 6, the average goes half of
  # the way to it: from 0 to 3/2, and from there to 15/4.
  with averages.running(way, {"w": np.zeros(1, np.float32)},
                        settings(update_every=3)) as run:
    found = []
    for _ in range(7):
      run.step(-1)
      found.append((run.value("w").item(), run.average("w").item()))
  assert found == [(1, 0), (2, 0), (3, 1.5), (4, 1.5), (5, 1.5), (6, 3.75),
                   (7, 3.75)]


@pytest.mark.by_day(2)
@pytest.mark.parametrize("way", [
    way for way in averages.WAYS if way.one_pass and not way.is_graph], ids=str)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32,
                                   tf.float64])
def test_a_step_between_changes_no_bit(way, dtype):
  """Also NaN, infinity, and the least numbers; with one decay and with two."""
  dtype = dtype.as_numpy_dtype
  start = {"w": np.array([np.nan, np.inf, -0.0, 1e-7, 1], dtype),
           "empty": np.zeros([0], dtype), "scalar": np.array(1, dtype)}
  of_keras = {} if way.half == "v1" else {"shadow_dtype": np.dtype(dtype).name}
  for decays in 0.5, [0.5, wrapopt.PowerDecay(gamma=0)]:
    with averages.running(way, start, settings(decays, 3, **of_keras)) as run:
      read = lambda: [run.average(name, d).tobytes() for name in start
                      for d in run.averaging._averages.decays]
      run.step(1)
      for t in range(2, 7):
        before = read()
        run.step(1)
        assert (read() != before) == (t % 3 == 0), t
      assert run.average("scalar") != 1


# That a step between reads and writes no memory of an average is a test of the
# engine: Pass.LeavesAveragesOfRateZeroAlone in tests/cc. That the kernels get
# there: whoever holds the value of an average makes the next update copy it.


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_step_between_does_not_copy_averages(mode, fused):
  w = tf.Variable(tf.zeros([1000]))
  opt = wrap(0.5, update_every=3, fused=fused, lazy=False)
  step = lambda: opt.apply_gradients([(-tf.ones(1000), w)]) and None
  if mode == "function":
    step = tf.function(step, autograph=False)
  step()
  held = opt.average(w).read_value()  # Shares the buffer.
  for is_due in (False, True, False):
    at = address(opt.average(w).read_value())
    step()
    assert (address(opt.average(w).read_value()) != at) == is_due
  assert (held.numpy() == 0).all() and (opt.average(w).numpy() == 1.5).all()


@pytest.mark.parametrize("way", [
    way for way in averages.WAYS if way.mode == "eager" and not way.one_pass],
                         ids=str)
def test_an_eager_step_between_runs_no_op_for_averages(way, monkeypatch):
  calls = []
  monkeypatch.setattr(
      wrapopt.ops, "ema_update", lambda *args: calls.append(args))
  with averages.running(way, dict.fromkeys("wh", np.float32([0])), settings(
      [0.5, wrapopt.PowerDecay(gamma=0)], 3, num_updates=5)) as run:
    for _ in range(7):
      run.step(-1)
      calls.append(None)
  # The third and the sixth.
  assert [i for i, call in enumerate(calls) if call] == [2, 6]


# The steps that count. v1/some_variables_test.py tests those a gate drops.


def test_an_error_counts_no_step():
  w = tf.Variable([0.0])
  opt = wrap(0.5, update_every=2)
  opt.apply_gradients([(-tf.ones(1), w)])
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
    opt.apply_gradients([(-tf.ones(3), w)])
  assert opt.average_steps().numpy() == 1
  opt.apply_gradients([(-tf.ones(1), w)])
  assert opt.average(w).numpy() == 1


@pytest.mark.by_day(3)
@pytest.mark.parametrize("way", averages.WAYS, ids=str)
def test_a_step_without_a_gradient_of_a_variable_counts(way):
  with averages.running(way, dict.fromkeys("ab", np.float32([0])),
                        settings()) as run:
    for a, b in ([-1], [-1]), ([-1], None), ([-1], [-1]), (None, [-1]):
      run.step({"a": a, "b": b})
    # In step 2, a moves to 2/2; in step 4, b to 3/2.
    assert [run.average(name) for name in "ab"] == [1, 1.5]


@each_jit
def test_steps_that_accumulate_are_not_counted(jit):
  opt = wk.MovingAverage(K.SGD(1.0, gradient_accumulation_steps=2), 0.5,
                         update_every=2)
  assert averages_after(opt, keras.Variable([0.0]), [-1] * 9, jit) == [
      (0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (3, 1), (4, 2.5),
      (4, 2.5)]
  assert opt.average_steps() == 4


@pytest.mark.by_day(1)
@each_jit
def test_steps_that_loss_scaling_skips_are_not_counted(jit):
  inner = moving(update_every=2)
  opt = K.LossScaleOptimizer(inner, initial_scale=2.0)
  # A step that is skipped halves the scale.
  steps = (-2, np.nan, np.inf, -0.5, np.nan, -0.25, -0.25)
  assert averages_after(opt, keras.Variable([0.0]), steps, jit, inner) == [
      (1, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (4, 2.5)]


def test_the_count_begins_with_the_averages():
  w = keras.Variable([0.0])
  inner = K.SGD(1.0)
  for _ in range(3):
    inner.apply([-tf.ones(1)], [w])
  opt = wk.MovingAverage(inner, 0.5, update_every=2)
  # From 3: the second step is to 5.
  assert averages_after(opt, w, [-1] * 4) == [(4, 3), (5, 4), (6, 4), (7, 5.5)]


@each_jit
@keras_versions.needs("MultiOptimizer")
def test_in_a_multi_optimizer(jit):
  a, b = (keras.Variable([0.0], name=name) for name in "ab")
  of_a, of_b = K.SGD(1.0), K.SGD(2.0)
  opt = wk.MovingAverage(
      K.MultiOptimizer(lambda v: of_a if v.path == "a" else of_b), 0.5,
      update_every=2)
  opt.build([a, b])
  step = lambda: opt.apply([-tf.ones(1), -tf.ones(1)], [a, b])
  if jit is not None:
    step = tf.function(step, autograph=False, jit_compile=jit)
  for want in [0, 0], [1, 2], [1, 2], [2.5, 5]:
    step()
    assert [opt.average(v).numpy() for v in (a, b)] == want


def test_around_lookahead_and_of_some_variables():
  a, b = (keras.Variable([0.0], name=name) for name in "ab")
  opt = wk.MovingAverage(wk.Lookahead(K.SGD(1.0), 2), 0.5, update_every=2,
                         variables=["a"])
  for _ in range(4):
    opt.apply([-tf.ones(1), -tf.ones(1)], [a, b])
  # 1, 1 (slow), 2, 2: the average moves to 1/2 and 5/4.
  assert [a.numpy(), b.numpy(), opt.average(a).numpy()] == [2, 2, 1.25]


def test_inside_cross_shard():
  w, opt = tf.Variable([0.0]), wrap(0.5, update_every=2)
  for _ in range(4):
    wrapopt.CrossShardOptimizer(opt).apply_gradients([(-tf.ones(1), w)])
  assert opt.average(w).numpy() == 2.5


def test_statistics_of_batch_normalizations():
  norm = keras.layers.BatchNormalization(momentum=0.5)
  model = keras.Sequential([keras.Input((1,)), norm])
  opt = moving(update_every=2, average_batch_norm=True)
  model.compile(opt, "mse", jit_compile=False)
  opt.set_model(model)
  opt.build(model.trainable_variables)
  found = []
  for t in range(4):
    x = np.full((4, 1), t + 1, np.float32)
    model.train_on_batch(x, x)
    found.append((norm.moving_mean.numpy()[0],
                  opt.average(norm.moving_mean).numpy()[0]))
  assert found == [(0.5, 0), (1.25, 0.625), (2.125, 0.625), (3.0625, 1.84375)]


def test_constraints():
  w = keras.Variable([0.0])
  w.constraint = lambda w: tf.minimum(w, 3.0)
  assert averages_after(moving(update_every=2), w, [-1] * 4) == [
      (1, 0), (2, 1), (3, 1), (3, 2)]


# Files.


def test_names_are_those_of_before(tmp_path):
  for every, names in (1, []), (2, ["average_steps"]):
    with graph_of("resource"):
      w = v1.get_variable("w", initializer=[0.0])
      wrap(0.5, update_every=every).apply_gradients([(tf.ones(1), w)])
      assert [v.op.name for v in v1.global_variables()] == [
          "w", *names, "w/ExponentialMovingAverage"]

  def names_in_keras(every):
    path = tf.train.Checkpoint(opt=model_of(every).optimizer).write(
        str(tmp_path / "x"))
    return {name for name, _ in tf.train.list_variables(path)}

  assert {name.split("/")[2] for name in
          names_in_keras(3) - names_in_keras(1)} == {"first_average_step"}


def model_of(every, decay=0.5):
  model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
  model.compile(moving("adam", decay, update_every=every), "mse",
                jit_compile=False)
  model.optimizer.build(model.trainable_variables)
  return model


def data():
  x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
  return x, x[:, :1]


def test_a_file_of_every_step_goes_on(tmp_path):
  """It lacks the first step: the count begins with the next one."""
  model = model_of(1)
  for _ in range(4):
    model.train_on_batch(*data())
  model.save_weights(tmp_path / "model.weights.h5")
  other = model_of(3)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    other.load_weights(tmp_path / "model.weights.h5")
  w = other.trainable_variables[0]
  before = other.optimizer.average(w).numpy()
  for t in range(1, 4):
    other.train_on_batch(*data())
    assert np.array_equal(other.optimizer.average(w), before) == (t < 3)


def test_snapshots_count_steps_until_the_last_update(tmp_path):
  model = model_of(3, wrapopt.PowerDecay(gamma=1))
  model.fit(*data(), batch_size=1, verbose=0, callbacks=[
      wk.Snapshots(tmp_path / "s", 5)])
  [path] = (tmp_path / "s").glob("*")
  # Of 5 steps, averages moved last in the third.
  for steps in 2, 3:
    with (pytest.raises(ValueError, match="at least the steps of the first")
          if steps == 2 else contextlib.nullcontext()):
      checkpoints.posthoc([path], tmp_path / "o.weights.h5", gamma=1,
                          steps=steps)


@pytest.mark.parametrize("make", [wrap, moving])
@pytest.mark.parametrize("every, error, text", [
    (0, ValueError, "`update_every` must be at least 1, got 0"),
    (-3, ValueError, "must be at least 1, got -3"),
    (2.0, TypeError, "`update_every` must be an integer, got 2.0"),
    (True, TypeError, "must be an integer, got True"),
    (None, TypeError, "must be an integer, got None"),
])
def test_bad_arguments(every, error, text, make):
  with pytest.raises(error, match=text):
    make(update_every=every)
