"""Merges that give the result of a learning rate's decay (WSM)."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import moving
from wrapopt import checkpoints
from wrapopt.checkpoints import __main__ as command
from wrapopt.checkpoints import _rate_decay
import wrapopt.keras

v1 = tf.compat.v1
END = 400
SHAPES = {"linear": lambda s: 1 - s,
          "cosine": lambda s: 0.5 + 0.5 * np.cos(np.pi * s),
          "1-sqrt": lambda s: 1 - s**0.5}


def updates():
  """The updates of a run's steps: gradients that ignore the rate."""
  return np.random.default_rng(1).normal(size=(END, 3)) * 0.1


def decayed(shape, decay_steps, edges):
  """The weights after the decay, with the mean factor between two edges."""
  t = np.arange(END)
  # In the middle of each thousandth of a step.
  s = (t[:, None] + (np.arange(1000) + 0.5) / 1000 - END + decay_steps) / (
      decay_steps)
  factors = SHAPES[shape](np.maximum(s, 0)).mean(1)
  for begin, end in zip(edges, edges[1:]):
    factors[begin:end] = factors[begin:end].mean()
  factors[:edges[0]] = 1
  return factors @ updates()


def merged(output):
  return tf.train.load_variable(str(output), "v")


def write(folder, steps, name="model-{}"):
  weights = np.concatenate([np.zeros((1, 3)), updates().cumsum(0)])
  paths = [str(folder / name.format(t)) for t in steps]
  with tf.Graph().as_default(), v1.Session() as session:
    v = v1.get_variable("v", initializer=weights[0])
    saver = v1.train.Saver([v], max_to_keep=len(steps))
    for t, path in zip(steps, paths):
      v.load(weights[t], session)
      saver.save(session, path)
  return paths


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay_steps, steps", [
    (None, [300, 325, 350, 375, 400]),  # The decay begins at the first.
    (90, [0, 100, 301, 320, 390, 391, 400]),
    (1, [10, 399, 400])])
def test_the_result_is_that_of_the_decay(tmp_path, shape, decay_steps, steps):
  paths = write(tmp_path, steps)
  fitted = checkpoints.merge(paths, tmp_path / "out", decay=shape,
                             decay_steps=decay_steps)
  assert fitted.error == 0 and min(fitted.weights) >= 0
  assert sum(fitted.weights) == pytest.approx(1, abs=1e-12)
  np.testing.assert_allclose(
      merged(tmp_path / "out"),
      decayed(shape, decay_steps or END - steps[0], steps), atol=1e-6)


def test_weights_in_the_head():
  # Halves of the first and of the last: the factors are 7/8, 5/8, 3/8, 1/8.
  got = _rate_decay.of_weights(np.arange(5.0), "linear", 4)
  np.testing.assert_allclose(got, [1 / 8, 1 / 4, 1 / 4, 1 / 4, 1 / 8])
  # Only the last update decays, to one half.
  got = _rate_decay.of_weights(np.arange(5.0), "linear", 1)
  np.testing.assert_allclose(got, [0, 0, 0, 0.5, 0.5])


@pytest.mark.parametrize("shape, decay_steps, error", [
    ("linear", 80, 0.01), ("cosine", 80, 0.004), ("1-sqrt", 80, 0.03),
    ("linear", 200, 0.002)])
def test_snapshots_of_averages(tmp_path, shape, decay_steps, error):
  """Averages that a run wrote, of two widths, give the decay of its weights."""
  with tf.Graph().as_default():
    v = v1.get_variable("v", initializer=np.zeros(3))
    step = v1.train.get_or_create_global_step()
    opt = wrapopt.MovingAverageOptimizer(
        v1.train.GradientDescentOptimizer(-1.0),
        [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)])
    grad = v1.placeholder(tf.float64, [3])
    train = opt.apply_gradients([(grad, v)], step)
    hook = checkpoints.SnapshotHook(opt, str(tmp_path / "snapshots"), END // 16)
    with v1.train.MonitoredSession(hooks=[hook]) as session:
      for g in updates():
        session.run(train, {grad: g})
  fitted = checkpoints.merge(tmp_path / "snapshots", tmp_path / "out",
                             decay=shape, decay_steps=decay_steps)
  assert error / 3 < fitted.error < error
  want = decayed(shape, decay_steps, range(END + 1))
  last = updates().sum(0)
  apart = np.linalg.norm(merged(tmp_path / "out") - want)
  # The averages' first step counts as one at time 1, not 0 to 1.
  assert apart < 0.1 * np.linalg.norm(last - want)


@pytest.mark.by_day(0)
def test_snapshots_of_weights(tmp_path):
  """A decay of 0 keeps the weights themselves."""
  model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
  model.compile(wrapopt.keras.MovingAverage("sgd", 0.0), "mse")
  seen = []
  x = np.random.default_rng(1).normal(size=(96, 3))
  model.fit(x, x.sum(1), 8, verbose=0, shuffle=False, callbacks=[
      wrapopt.keras.Snapshots(tmp_path / "snapshots", 4),
      keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: (
          seen.append(model.get_weights()[0]) if batch % 4 == 3 else None))])
  checkpoints.merge(tmp_path / "snapshots", tmp_path / "out.weights.h5",
                    decay="linear")
  model.load_weights(tmp_path / "out.weights.h5", skip_mismatch=True)
  np.testing.assert_allclose(
      model.get_weights()[0], 0.25 * seen[0] + 0.5 * seen[1] + 0.25 * seen[2],
      1e-6)


def test_command(tmp_path, capsys):
  write(tmp_path, [100, 200, 300, 400])
  command.main(["merge", str(tmp_path), "--decay", "1-sqrt", "--decay-steps",
                "200", "--output", str(tmp_path / "out"), "--quiet"])
  assert capsys.readouterr().out.endswith(
      f"    0.138071  {tmp_path}/model-400\n"
      "  reads 72 bytes, writes 24 bytes, holds 96 bytes of values in memory\n"
      f"{tmp_path / 'out'}: of 3 of 4 inputs, error of the decay 0.00%\n"
      "  averaged: 1 variables, 3 numbers of float64\n"
      "  copied: 0 variables\n")
  np.testing.assert_allclose(
      merged(tmp_path / "out"), decayed("1-sqrt", 200, [200, 300, 400]),
      atol=1e-6)


@pytest.mark.parametrize("arguments, error", [
    ({"decay": "exponential"}, "`decay` must be linear, cosine, 1-sqrt or N"),
    ({"decay": "linear", "weights": [1, 1, 1]}, "`weights` must be None with"),
    ({"decay_steps": 3}, "`decay_steps` and `steps` must be given with"),
    ({"decay": "linear", "decay_steps": 101}, "at most the .* 100, got 101"),
    ({"decay": "linear", "decay_steps": 0}, "must be a number greater than 0"),
    ({"decay": "linear", "steps": [1, 2]}, "a number .* for each of the 3 in"),
    ({"decay": "linear", "steps": [1, 3, 2]}, "order of training, got the "
     "steps 1, 3, 2"),
])
def test_bad_arguments(tmp_path, arguments, error):
  paths = write(tmp_path, [300, 350, 400])
  with pytest.raises(ValueError, match=error):
    checkpoints.merge(paths, tmp_path / "out", **arguments)
  assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name, step", [
    ("model-1000", 1000), ("model.ckpt-1000", 1000), ("v1.5/model-10", 10),
    ("resnet-50.ckpt-1000", 1000), ("ckpt-7.weights.h5", 7), ("7.keras", 7),
    ("run-0100.ckpt", 100), ("weights.05.keras", 5), ("ckpt_9.best", 9),
    ("m-3.weights.json", 3), ("lr-0.5-1000.h5", 1000),
    ("weights.05-0.32.weights.h5", None), ("model.ckpt1000", None),
    ("v1.5", None), ("m.weights.h5", None)])
def test_the_step_in_a_name(name, step):
  if step is not None:
    assert _rate_decay._step_of_name(name) == step
  else:
    with pytest.raises(ValueError, match=f"^{name} must have a name that ends "
                       "with its step, such as 'model-1000', "):
      _rate_decay._step_of_name(name)


def test_the_default_names_of_tensorflow_1(tmp_path):
  paths = write(tmp_path, [350, 400], "model.ckpt-{}")
  checkpoints.merge(paths, tmp_path / "out", decay="linear")
  np.testing.assert_allclose(merged(tmp_path / "out"),
                             decayed("linear", 50, [350, 400]), atol=1e-6)


def test_steps_that_no_name_tells(tmp_path):
  paths = write(tmp_path, [350, 400], "model-{}-of-run")
  with pytest.raises(ValueError, match="a name that ends with its step, "):
    checkpoints.merge(paths, tmp_path / "out", decay="linear")
  with pytest.raises(ValueError, match="must be at least two"):
    checkpoints.merge(paths[:1], tmp_path / "out", decay="linear", steps=[1])
  checkpoints.merge(paths, tmp_path / "out", decay="linear", steps=[350, 400])
  np.testing.assert_allclose(merged(tmp_path / "out"),
                             decayed("linear", 50, [350, 400]), atol=1e-6)


def test_snapshots_of_another_decay(tmp_path):
  with tf.Graph().as_default():
    v = v1.get_variable("v", initializer=np.zeros(3))
    step, opt = v1.train.get_or_create_global_step(), moving(0.5)
    train = opt.minimize(tf.reduce_sum(v), step)
    hook = checkpoints.SnapshotHook(opt, str(tmp_path / "snapshots"), 1)
    with v1.train.MonitoredSession(hooks=[hook]) as session:
      for _ in range(3):
        session.run(train)
  with pytest.raises(ValueError, match="all inputs snapshots of a PowerDecay, "
                     "got a snapshot with the decay 0.5"):
    checkpoints.merge(tmp_path / "snapshots", tmp_path / "out", decay="linear")
