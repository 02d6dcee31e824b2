"""`wrapopt.PowerDecay` and `wrapopt.HalfLife` in v1 optimizers and in Keras."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import GRAPH_MODES
from training import graph_of
from training import session_of
from training import type_of
from wrapopt._averages import _decays
import wrapopt.checkpoints
import wrapopt.keras

v1 = tf.compat.v1


def power_average(values, gamma):
  """The reference: after each of the values, in float64."""
  average, averages = 0.0, []
  for t, value in enumerate(values, 1):
    beta = (1 - 1 / t)**(gamma + 1)
    average = beta * average + (1 - beta) * np.float64(value)
    averages.append(average)
  return averages


# A float32 average is rounded three times in each step, to 2^-24 of what it is.
def assert_close(got, expected, steps=20):
  scale = np.abs(expected).max() + 1
  assert abs(float(got) - expected[-1]) <= 3 * steps * 2**-24 * scale


# Decays


def test_widths_and_exponents():
  assert wrapopt.PowerDecay(0.05).gamma == pytest.approx(16.97, abs=0.005)
  assert wrapopt.PowerDecay(0.10).gamma == pytest.approx(6.94, abs=0.005)
  assert wrapopt.PowerDecay(gamma=0).relative_width == pytest.approx(
      1 / math.sqrt(12), rel=1e-15)
  assert wrapopt.PowerDecay(1 / math.sqrt(12)).gamma == 0
  for width in (1e-300, 1e-160, 1e-6, 0.003, 0.05, 0.1, 0.25, 0.2886):
    decay = wrapopt.PowerDecay(width)
    assert decay.relative_width == pytest.approx(width, rel=1e-14)
    # The standard deviation of the weights of a long run.
    if width > 0.01:
      tau = np.arange(200000) + 0.5
      p = tau**decay.gamma / np.sum(tau**decay.gamma)
      mean = np.sum(p * tau)
      deviation = np.sqrt(np.sum(p * (tau - mean)**2))
      assert deviation / 200000 == pytest.approx(width, rel=1e-4)


def test_half_lives():
  decay = wrapopt.HalfLife(steps=10).decay
  assert decay**10 == pytest.approx(0.5, rel=1e-15)
  decay = wrapopt.HalfLife(fraction=0.05).decay
  # The weight of the first 95 % of a run.
  assert 0.95**(decay.gamma + 1) == pytest.approx(0.5, rel=1e-14)
  assert wrapopt.HalfLife(fraction=0.5).decay == wrapopt.PowerDecay(gamma=0)


@pytest.mark.parametrize("make, error, match", [
    (lambda: wrapopt.PowerDecay(), TypeError, "one of `relative_width` and "),
    (lambda: wrapopt.PowerDecay(0.1, gamma=3), TypeError, "got 0.1 and 3"),
    (lambda: wrapopt.PowerDecay("0.1"), TypeError,
     "must be a number, got '0.1'"),
    (lambda: wrapopt.PowerDecay(0), ValueError, "finite and greater than 0"),
    (lambda: wrapopt.PowerDecay(0.3), ValueError, "at most 1/sqrt"),
    (lambda: wrapopt.PowerDecay(math.nan), ValueError, "must be finite"),
    (lambda: wrapopt.PowerDecay(gamma=-0.1), ValueError,
     "at least 0, got -0.1"),
    (lambda: wrapopt.PowerDecay(gamma=math.inf), ValueError, "must be finite"),
    (lambda: wrapopt.HalfLife(), TypeError, "one of `steps` and `fraction`"),
    (lambda: wrapopt.HalfLife(steps=0), ValueError, "greater than 0, got 0"),
    (lambda: wrapopt.HalfLife(fraction=0.6), ValueError,
     "at most 0.5, got 0.6"),
    (lambda: wrapopt.MovingAverageOptimizer(
        v1.train.GradientDescentOptimizer(1.0),
        [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.05)]),
     ValueError, "must hold different decays"),
])
def test_what_is_refused(make, error, match):
  with pytest.raises(error, match=match):
    make()


# v1. Steps that a gate drops do not count: see keras_fuzz_programs_test.py.


def descending(decay, **kwargs):
  return wrapopt.MovingAverageOptimizer(
      v1.train.GradientDescentOptimizer(1.0), decay, **kwargs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
def test_a_trajectory(mode, fused):
  # gamma 0 is the mean of all values after steps: 1, 2, 3, 4. What the average
  # started at, 0, does not count. The other decay has a trajectory of its own.
  opt = descending([wrapopt.PowerDecay(gamma=0), 0.5], fused=fused)
  w = tf.Variable([0.0])

  def step():
    opt.apply_gradients([(-tf.ones(1), w)])

  if mode != "eager":
    step = tf.function(step, jit_compile=mode == "jit")
  averages = []
  for _ in range(4):
    step()
    averages.append(float(opt.average(w)[0]))
  assert averages == [1.0, 1.5, 2.0, 2.5]
  assert opt.average(w, 0.5).numpy() == [3.0625]
  assert opt.average_steps().numpy() == 4


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", GRAPH_MODES)
def test_graphs_and_savers(kind, fused, tmp_path):
  decays = [wrapopt.PowerDecay(0.1), wrapopt.HalfLife(fraction=0.2), 0.9]
  values = np.random.default_rng(0).standard_normal(12).cumsum()
  expected = [power_average(values, wrapopt.PowerDecay(0.1).gamma),
              power_average(values, wrapopt.HalfLife(fraction=0.2).decay.gamma)]

  def build():
    opt = descending(decays, fused=fused)
    w = v1.get_variable("w", initializer=0.0)
    value = v1.placeholder(tf.float32, [])
    gradient = tf.identity(w) - value
    return opt, w, value, opt.apply_gradients([(gradient, w)])

  with graph_of(kind):
    opt, w, value, train = build()
    names = [v.op.name for v in v1.global_variables()]
    assert names[1:] == [
        "average_steps", "w/ExponentialMovingAverage",
        "w/ExponentialMovingAverage_power_2.10628",
        "w/ExponentialMovingAverage_0.9"]
    saver = v1.train.Saver()
    # All averages in one pass, with the step where that has an op.
    assert [type_of(op).removesuffix("Ref")
            for op in v1.get_default_graph().get_operations()
            if op.type.startswith(("Wrapopt>Apply", "Wrapopt>Ema"))] == [
                "Wrapopt>ApplyGradientDescent" if fused
                else "Wrapopt>EmaUpdate"]
    with session_of() as session:
      session.run(v1.global_variables_initializer())
      for x in values[:7]:
        session.run(train, {value: x})
      path = saver.save(session, str(tmp_path / "model"))
  with graph_of(kind):
    opt, w, value, train = build()
    saver = v1.train.Saver()
    with session_of() as session:
      saver.restore(session, path)
      for x in values[7:]:
        session.run(train, {value: x})
      assert session.run(opt.average_steps()) == 12
      for decay, want in zip(decays, expected):
        assert_close(session.run(opt.average(w, decay)), want)
      opt.seed_averages(session)
      assert session.run(opt.average_steps()) == 0
      session.run(train, {value: 5.0})
      assert session.run(opt.average(w)) == session.run(w)


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoints_of_objects(fused, tmp_path):
  def make():
    w = tf.Variable([0.0])
    opt = descending(wrapopt.PowerDecay(0.1), fused=fused)
    return w, opt, tf.train.Checkpoint(w=w, opt=opt)

  def train(opt, w, steps):
    for _ in range(steps):
      opt.apply_gradients([(-tf.ones(1), w)])

  w, opt, checkpoint = make()
  train(opt, w, 6)
  path = checkpoint.save(str(tmp_path / "model"))
  train(opt, w, 6)
  other, other_opt, checkpoint = make()
  status = checkpoint.restore(path)
  train(other_opt, other, 6)
  status.assert_consumed()
  assert other_opt.average_steps().numpy() == 12
  assert other_opt.average(other).numpy() == opt.average(w).numpy()
  assert_close(opt.average(w)[0], power_average(
      range(1, 13), wrapopt.PowerDecay(0.1).gamma))


def test_an_error_counts_no_step():
  opt = descending(wrapopt.PowerDecay(gamma=0))
  w = tf.Variable([0.0])
  opt.apply_gradients([(-tf.ones(1), w)])
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
    opt.apply_gradients([(tf.ones(3), w)])
  assert opt.average_steps().numpy() == 1


@pytest.mark.parametrize("fused", [True, False])
def test_in_a_strategy(fused):
  strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
  with strategy.scope():
    w = tf.Variable([0.0])
    opt = descending(wrapopt.PowerDecay(gamma=0), fused=fused)
  for _ in range(3):
    strategy.run(lambda: opt.apply_gradients([(-tf.ones(1), w)]))
  assert opt.average(w).numpy() == [2.0]


def test_without_a_power_decay_nothing_is_counted():
  opt = descending(wrapopt.HalfLife(steps=1))
  w = tf.Variable([0.0])
  opt.apply_gradients([(-tf.ones(1), w)])
  assert opt.average(w).numpy() == [0.5]
  assert opt.average_steps() is None
  assert len(opt.variables()) == 1


# Keras


def keras_step(opt, w):
  opt.apply([tf.constant([-1.0])], [w])


@pytest.mark.parametrize("inner", [
    keras.optimizers.SGD, keras.optimizers.Nadam])
@pytest.mark.parametrize("jit", [None, False, True])
def test_keras_averages(inner, jit):
  opt = wrapopt.keras.MovingAverage(
      inner(1.0), [wrapopt.PowerDecay(0.1), wrapopt.HalfLife(steps=3)])
  w = keras.Variable([0.0])
  opt.build([w])
  step = lambda: keras_step(opt, w)
  step = step if jit is None else tf.function(step, jit_compile=jit)
  values = []
  for _ in range(5):
    step()
    values.append(w.numpy()[0])
  assert_close(opt.average(w).numpy()[0], power_average(
      values, wrapopt.PowerDecay(0.1).gamma))
  assert opt.average_steps() == 5


def test_keras_counts_steps_that_change_weights():
  opt = wrapopt.keras.MovingAverage(
      keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
      wrapopt.PowerDecay(gamma=0))
  w = keras.Variable([0.0])
  for _ in range(6):
    keras_step(opt, w)
  assert (w.numpy(), opt.average(w).numpy()) == ([3.0], [2.0])
  assert opt.average_steps() == 3


def test_keras_averages_begin_with_the_first_step_that_they_see():
  inner = keras.optimizers.SGD(1.0)
  w = keras.Variable([0.0])
  for _ in range(10):
    inner.apply([tf.constant([-1.0])], [w])
  opt = wrapopt.keras.MovingAverage(inner, wrapopt.PowerDecay(gamma=0))
  for _ in range(3):
    keras_step(opt, w)
  assert opt.average(w).numpy() == [12.0]
  opt.seed_averages()
  assert opt.average_steps() == 0
  keras_step(opt, w)
  assert opt.average(w).numpy() == [14.0]


def test_keras_start_step():
  opt = wrapopt.keras.MovingAverage(
      keras.optimizers.SGD(1.0), wrapopt.PowerDecay(gamma=0), start_step=2,
      num_updates=0)
  w = keras.Variable([0.0])
  averages = []
  for _ in range(5):
    keras_step(opt, w)
    averages.append(float(opt.average(w).numpy()[0]))
  assert averages == [1, 2, 3, 3.5, 4]


# (1 + n) / (10 + n), and the decays of a gamma of 1.
LIMITS = [(1 + n) / (10 + n) for n in range(12)]
POWERS = [(1 - 1 / t)**2 for t in range(1, 7)]


def decays_taken(average, step, value):
  """The decays of six steps, by which an average of 5 has moved."""
  taken, s = [], 5.0
  for _ in range(6):
    step()
    before, s, v = s, average(), value()
    taken.append((s - v) / (before - v))
  return taken


@pytest.mark.parametrize("decay, of_number", [
    (0.9, 0.9), (wrapopt.HalfLife(steps=10), 2**-0.1),
    (wrapopt.PowerDecay(gamma=1), None)], ids=str)
@pytest.mark.parametrize("trained, arguments, limits, powers", [
    (0, {}, [1] * 6, POWERS), (0, {"dynamic_decay": True}, LIMITS, POWERS),
    (4, {"dynamic_decay": True}, LIMITS[4:], POWERS),
    (0, {"num_updates": 3}, LIMITS[3:4] * 6, POWERS),
    (0, {"num_updates": 3, "dynamic_decay": True},
     LIMITS[:3] + LIMITS[3:4] * 3, POWERS),
    (0, {"start_step": 2, "dynamic_decay": True}, [0, 0, *LIMITS],
     [0, 0, *POWERS]),
    (4, {"start_step": 6, "dynamic_decay": True}, [0, 0, *LIMITS],
     [0, 0, *POWERS])], ids=str)
def test_what_limits_a_decay_in_keras(decay, of_number, trained, arguments,
                                      limits, powers):
  """As the docstring says: numbers are limited, and no PowerDecay is."""
  w, inner = keras.Variable([5.0 + trained]), keras.optimizers.SGD(1.0)
  for _ in range(trained):
    inner.apply([tf.ones([1])], [w])
  opt = wrapopt.keras.MovingAverage(inner, decay, **arguments)
  taken = decays_taken(lambda: opt.average(w).numpy()[0],
                       lambda: opt.apply([tf.ones([1])], [w]),
                       lambda: w.numpy()[0])
  want = powers if of_number is None else np.minimum(limits, of_number)
  np.testing.assert_allclose(taken, want[:6], atol=1e-5)


@pytest.mark.parametrize("decay, of_number", [
    (lambda: 0.9, 0.9), (lambda: wrapopt.HalfLife(steps=10), 2**-0.1),
    (lambda: tf.constant(0.9), 0.9), (lambda: tf.Variable(0.9), 0.9),
    (lambda: lambda: 0.9, 0.9), (lambda: wrapopt.PowerDecay(gamma=1), None)],
                         ids=["number", "half-life", "tensor", "variable",
                              "callable", "power"])
def test_what_limits_a_decay(decay, of_number):
  count = tf.Variable(0, dtype=tf.int64)
  for num_updates, limits in ((3, LIMITS[3:4] * 6), (count, LIMITS[1:]),
                              (lambda: count + 1, LIMITS[2:])):
    count.assign(0)
    w = tf.Variable(5.0)
    opt = wrapopt.MovingAverageOptimizer(
        v1.train.GradientDescentOptimizer(1.0), decay(), num_updates)
    taken = decays_taken(
        lambda w=w, opt=opt: opt.average(w).numpy(),
        lambda w=w, opt=opt: opt.apply_gradients([(tf.ones([]), w)], count),
        w.numpy)
    want = POWERS if of_number is None else np.minimum(limits[:6], of_number)
    np.testing.assert_allclose(taken, want, atol=1e-5)


# A new decay profile


@keras.saving.register_keras_serializable("power_decay_test")
class Linear(_decays._Decay):
  """Rises from 0 to `last` within `steps` steps."""

  needs_count = True
  warms_up = False
  gamma = 1.0  # Not that of a PowerDecay.

  def __init__(self, last, steps):
    self._config = {"last": last, "steps": steps}

  def at(self, t):
    last, steps = self._config.values()
    return last * tf.minimum((tf.cast(t, tf.float64) - 1) / steps, 1.0)

  def __repr__(self):
    return f"Linear({self})"

  def __str__(self):
    return "linear_{last}_{steps}".format(**self._config)

  def get_config(self):
    return self._config


def test_a_decay_profile_is_one_class(tmp_path):
  w = tf.Variable([0.0])
  opt = wrapopt.MovingAverageOptimizer(
      v1.train.GradientDescentOptimizer(1.0), [0.0, Linear(0.5, 2)])
  averages = []
  for _ in range(4):
    opt.minimize(lambda: -w, var_list=[w])
    averages.append(float(opt.average(w, Linear(0.5, 2)).numpy()[0]))
  # The decays are 0, 0.25, 0.5 and 0.5.
  assert averages == [1, 1.75, 2.375, 3.1875]
  assert opt.average_name(w, Linear(0.5, 2)).endswith("Average_linear_0.5_2")
  with pytest.raises(ValueError, match="must hold different decays.*Linear"):
    wrapopt.MovingAverageOptimizer(
        v1.train.GradientDescentOptimizer(1.0), [Linear(0.5, 2)] * 2)
  # Keras saves and loads it; a snapshot is none of a PowerDecay.
  model = make_model([Linear(0.5, 2), 0.5])
  x = np.ones((2, 3), np.float32)
  model.fit(x, x[:, :1], verbose=0, callbacks=[
      wrapopt.keras.Snapshots(tmp_path, save_steps=1)])
  model.save(tmp_path / "model.keras")
  loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
  assert loaded.decays() == [Linear(0.5, 2), 0.5]
  [snapshot] = tmp_path.glob("*linear*")
  with pytest.raises(ValueError, match="of a PowerDecay, got .* linear_0.5_2"):
    wrapopt.checkpoints.posthoc([snapshot], tmp_path / "out.weights.h5", 0.1)


def make_model(decay):
  keras.utils.set_random_seed(0)
  model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
  model.compile(wrapopt.keras.MovingAverage(
      keras.optimizers.Adam(0.1), decay), "mse")
  return model


@pytest.mark.parametrize("how", ["keras", "weights", "checkpoint"])
def test_keras_saves_and_restores(how, tmp_path):
  x = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
  fit = lambda model: [model.train_on_batch(x, x[:, :1]) for _ in range(4)]
  decays = [wrapopt.PowerDecay(0.1), wrapopt.HalfLife(fraction=0.3), 0.9]
  model = make_model(decays)
  fit(model)
  if how == "keras":
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    assert other.optimizer.get_config() == model.optimizer.get_config()
  else:
    other = make_model(decays)
    other.optimizer.build(other.trainable_variables)
    if how == "weights":
      model.save_weights(tmp_path / "model.weights.h5")
      other.load_weights(tmp_path / "model.weights.h5")
    else:
      path = tf.train.Checkpoint(model=model, opt=model.optimizer).save(
          str(tmp_path / "model"))
      tf.train.Checkpoint(model=other, opt=other.optimizer).restore(
          path).assert_consumed()
  fit(model)
  fit(other)
  assert other.optimizer.average_steps() == 8
  for decay in decays:
    for v, u in zip(model.trainable_variables, other.trainable_variables):
      np.testing.assert_array_equal(model.optimizer.average(v, decay),
                                    other.optimizer.average(u, decay))


def test_keras_file_without_averages_begins_anew(tmp_path):
  x = np.ones((4, 3), np.float32)
  plain = make_model(0.9)
  plain.compile(keras.optimizers.Adam(0.1), "mse")
  for _ in range(3):
    plain.train_on_batch(x, x[:, :1])
  plain.save_weights(tmp_path / "plain.weights.h5")
  model = make_model(wrapopt.PowerDecay(0.1))
  model.train_on_batch(x, x[:, :1])
  model.load_weights(tmp_path / "plain.weights.h5")
  assert model.optimizer.average_steps() == 0
  model.train_on_batch(x, x[:, :1])
  assert model.optimizer.average_steps() == 1
  for v in model.trainable_variables:
    np.testing.assert_array_equal(model.optimizer.average(v), v.value)


# Rows that lag behind


def of_rows(rows, gamma, steps, rate=1.0):
  """Values and averages of a table of 4 rows, of which steps move some."""
  values, averages = np.zeros((4, 1)), np.zeros((4, 1))
  for t in range(1, steps + 1):
    values[list(rows[t - 1])] += rate
    beta = (1 - 1 / t)**(gamma + 1)
    averages = beta * averages + (1 - beta) * values
  return values, averages


ROWS = [(0, 1), (1,), (0, 3), (1, 3), (3,), (0,)]  # Row 2 never moves.


@pytest.mark.parametrize("mode", ["eager", "function", "resource", "keras"])
def test_rows_that_lag_behind_catch_up(mode, tmp_path):
  decays = [wrapopt.PowerDecay(0.1), wrapopt.PowerDecay(gamma=0)]
  gradient = lambda rows: tf.IndexedSlices(
      -tf.ones([tf.size(rows), 1]), rows, [4, 1])
  expected = [of_rows(ROWS, d.gamma, 6) for d in decays]
  if mode == "resource":
    with graph_of("resource"):
      step = v1.train.get_or_create_global_step()
      opt = descending(decays)
      w = v1.get_variable("w", initializer=np.zeros((4, 1), np.float32))
      rows = v1.placeholder(tf.int32, [None])
      train = opt.apply_gradients([(gradient(rows), w)], step)
      assert opt.is_lazy(w)
      hook = wrapopt.checkpoints.SnapshotHook(opt, tmp_path, 6)
      with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        for of_step in ROWS:
          session.run(train, {rows: of_step})
        got = session.run([opt.average(w, d) for d in decays])
    # A snapshot has caught up, too.
    for decay, (_, want) in zip(decays, expected):
      np.testing.assert_allclose(tf.train.load_variable(
          str(tmp_path / f"snapshot-6-{decay}"), "w"), want, atol=1e-5)
  else:
    if mode == "keras":
      w = keras.Variable(np.zeros((4, 1)))
      opt = wrapopt.keras.MovingAverage(keras.optimizers.SGD(1.0), decays)
      opt.build([w])
      step = lambda rows: opt.apply([gradient(rows)], [w])
    else:
      w, opt = tf.Variable(np.zeros((4, 1), np.float32)), descending(decays)
      def step(rows):
        opt.apply_gradients([(gradient(rows), w)])
    if mode == "function":
      step = tf.function(step, reduce_retracing=True)
    for of_step in ROWS:
      step(tf.constant(of_step))
    assert mode == "function" or opt.is_lazy(w)
    got = [opt.average(w, d).numpy() for d in decays]
  for average, (_, want) in zip(got, expected):
    np.testing.assert_allclose(average, want, rtol=0, atol=1e-5)
