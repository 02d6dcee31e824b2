"""`wrapopt.PowerDecay` and `wrapopt.HalfLife` in v1 optimizers and in Keras.

averages_test.py has the averages themselves, limits of decays, and files.
"""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import GRAPH_MODES
from training import graph_of
from training import moving
from training import type_of
from wrapopt._averages import _decay
import wrapopt.checkpoints
import wrapopt.keras

v1 = tf.compat.v1


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
    (lambda: moving(num_updates=math.inf), ValueError,
     "`num_updates` must be finite, got inf"),
    (lambda: moving([wrapopt.PowerDecay(0.05)] * 2), ValueError,
     "must hold different decays"),
])
def test_what_is_refused(make, error, match):
  with pytest.raises(error, match=match):
    make()


def test_half_lives_as_keys():
  lives = {wrapopt.HalfLife(steps=10): 1, wrapopt.HalfLife(fraction=0.1): 2}
  assert lives[wrapopt.HalfLife(steps=10.0)] == 1
  assert lives[wrapopt.HalfLife(fraction=0.1)] == 2
  assert repr([*lives]) == "[HalfLife(steps=10), HalfLife(fraction=0.1)]"


# v1. Steps that a gate drops do not count: see fuzz/fuzz_programs_test.py.


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", GRAPH_MODES)
def test_names_and_ops_in_a_graph(kind, fused):
  decays = [wrapopt.PowerDecay(0.1), wrapopt.HalfLife(fraction=0.2), 0.9]
  with graph_of(kind) as graph:
    w = v1.get_variable("w", initializer=0.0)
    moving(decays, fused=fused).apply_gradients([(tf.identity(w), w)])
    assert [v.op.name for v in v1.global_variables()] == [
        "w", "average_steps", "w/ExponentialMovingAverage",
        "w/ExponentialMovingAverage_power_2.10628",
        "w/ExponentialMovingAverage_0.9"]
    # All averages in one pass, with the step where that has an op.
    assert [type_of(op).removesuffix("Ref") for op in graph.get_operations()
            if op.type.startswith(("Wrapopt>Apply", "Wrapopt>Ema"))] == [
                "Wrapopt>ApplyGradientDescent" if fused
                else "Wrapopt>EmaUpdate"]


def test_a_snapshot_of_rows_that_lag_behind(tmp_path):
  decay = wrapopt.PowerDecay(gamma=0)
  with graph_of("resource"):
    step = v1.train.get_or_create_global_step()
    w = v1.get_variable("w", initializer=np.zeros((3, 1), np.float32))
    row, opt = v1.placeholder(tf.int32, [1]), moving(decay)
    train = opt.apply_gradients(
        [(tf.IndexedSlices(-tf.ones([1, 1]), row, [3, 1]), w)], step)
    assert opt.is_lazy(w)
    hook = wrapopt.checkpoints.SnapshotHook(opt, tmp_path, 3)
    with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
      for i in 0, 1, 1:
        session.run(train, {row: [i]})
  # The mean of 1, 1, 1 and that of 0, 1, 2.
  np.testing.assert_allclose(tf.train.load_variable(
      str(tmp_path / f"snapshot-3-{decay}"), "w"), [[1], [1], [0]], rtol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_in_a_strategy(fused):
  strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
  with strategy.scope():
    w = tf.Variable([0.0])
    opt = moving(wrapopt.PowerDecay(gamma=0), fused=fused)
  for _ in range(3):
    strategy.run(lambda: opt.apply_gradients([(-tf.ones(1), w)]))
  assert opt.average(w).numpy() == [2.0]


# A new decay profile


@keras.saving.register_keras_serializable("power_decay_test")
class Linear(_decay.Shape):
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
  opt = moving([0.0, Linear(0.5, 2)])
  averages = []
  for _ in range(4):
    opt.minimize(lambda: -w, var_list=[w])
    averages.append(float(opt.average(w, Linear(0.5, 2)).numpy()[0]))
  # The decays are 0, 0.25, 0.5 and 0.5.
  assert averages == [1, 1.75, 2.375, 3.1875]
  assert opt.average_name(w, Linear(0.5, 2)).endswith("Average_linear_0.5_2")
  with pytest.raises(ValueError, match="must hold different decays.*Linear"):
    moving([Linear(0.5, 2)] * 2)
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


@pytest.mark.by_day(0)
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
