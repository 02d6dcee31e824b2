"""Defects of averages in Keras itself, which wrapopt's averages do not have.

Each test also tests Keras's own `use_ema`, and fails if Keras mends the defect.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from arrays import values
from fit_callbacks import Fails, Stop
from training import stepping
import wrapopt.keras
from wrapopt.keras import MovingAverage

optimizers = keras.optimizers


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.set_random_seed(0)


def theirs(optimizer=optimizers.SGD, momentum=0.5, **kwargs):
  return optimizer(use_ema=True, ema_momentum=momentum, **kwargs)


def ours(optimizer=optimizers.SGD, momentum=0.5, **kwargs):
  return MovingAverage(optimizer(**kwargs), momentum)


def average_of(opt, variable):
  if isinstance(opt, MovingAverage):
    return opt.average(variable)
  return opt._model_variables_moving_average[opt._get_variable_index(variable)]


def data():
  x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
  return x, x.sum(1, keepdims=True)


def make(opt):
  model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "tanh"),
                            keras.layers.Dense(1)])
  model.compile(opt, loss="mse", jit_compile=False)
  return model


def trained(opt):
  model = make(opt)
  for _ in range(5):
    model.train_on_batch(*data())
  return model


def changed(model, before):
  """How many weights are not bit for bit as before."""
  return sum(int((v.numpy() != w).sum())
             for v, w in zip(model.weights, before, strict=True))


CALLBACKS = {"theirs": (theirs, keras.callbacks.SwapEMAWeights),
             "ours": (ours, wrapopt.keras.EvaluateWithAverages)}


@pytest.mark.by_day(0)
def test_evaluate_gives_the_weights_back_exactly():
  counts = {}
  for name, (make_optimizer, callback) in CALLBACKS.items():
    model = trained(make_optimizer(learning_rate=0.05))
    before = values(model.weights)
    model.evaluate(*data(), verbose=0, callbacks=[callback()])
    counts[name] = changed(model, before)
  assert counts["theirs"] > 100
  assert counts["ours"] == 0


@pytest.mark.by_day(1)
@pytest.mark.parametrize("weight,average", [(1e8, 1.0), (3e38, 3e38)])
def test_weights_and_averages_of_any_size_trade_places(weight, average):
  results = {}
  for name, (make_optimizer, callback) in CALLBACKS.items():
    model = trained(make_optimizer())
    kernel = model.layers[-1].kernel
    kernel.assign(np.full(kernel.shape, weight))
    average_of(model.optimizer, kernel).assign(np.full(kernel.shape, average))
    model.predict(data()[0], verbose=0, callbacks=[callback()])
    if name == "theirs":  # It has forgotten to put them back: see below.
      swap = callback()
      swap.set_model(model)
      swap._swap_variables()
    results[name] = (np.unique(kernel.numpy()).tolist(), np.unique(
        average_of(model.optimizer, kernel).numpy()).tolist())
  want = ([float(np.float32(weight))], [float(np.float32(average))])
  assert results["theirs"] != want
  assert results["ours"] == want


@pytest.mark.by_day(1)
@pytest.mark.parametrize("way", ["interrupted evaluate", "predict"])
def test_averages_do_not_stay_in_place(way):
  shares = {}
  for name, (make_optimizer, callback) in CALLBACKS.items():
    model = trained(make_optimizer(learning_rate=0.05))
    before = values(model.weights)
    x, y = data()
    if way == "predict":
      model.predict(x, verbose=0, callbacks=[callback()])
    else:
      with pytest.raises(Stop):
        model.evaluate(x, y, verbose=0, callbacks=[
            callback(), Fails("on_test_batch_end")])
    shares[name] = changed(model, before) / sum(v.size for v in before)
  # How many weights Keras changes differs from one version to the next.
  assert shares["theirs"] > 0.1
  assert shares["ours"] == 0


@pytest.mark.by_day(0)
def test_averages_of_bfloat16_weights_move():
  moved = {}
  for name, make_optimizer in ("theirs", theirs), ("ours", ours):
    variable = keras.Variable(np.ones(4), dtype="bfloat16")
    opt = make_optimizer(momentum=0.999, learning_rate=1.0)
    opt.build([variable])
    opt.apply([tf.zeros([4], tf.bfloat16)], [variable])
    variable.assign(2 * np.ones(4))
    for _ in range(300):
      opt.apply([tf.zeros([4], tf.bfloat16)], [variable])
    moved[name] = np.float64(
        np.array(average_of(opt, variable).numpy(), np.float32)) - 1
  np.testing.assert_array_equal(moved["theirs"], 0)
  # 300 float32 roundings of about 1.
  np.testing.assert_allclose(moved["ours"], 1 - 0.999**300, atol=300 * 2.0**-24)


def test_steps_that_only_accumulate_move_no_average():
  moves = {}
  for name, make_optimizer in ("theirs", theirs), ("ours", ours):
    variable = keras.Variable(np.float32([0]))
    opt = make_optimizer(learning_rate=1.0, gradient_accumulation_steps=4)
    opt.build([variable])
    moves[name] = []
    before = 0.0
    for _ in range(12):
      opt.apply([tf.constant([-1.0])], [variable])
      now = float(average_of(opt, variable)[0])
      moves[name].append(now != before)
      before = now
  assert moves["ours"] == 3 * [False, False, False, True]
  assert sum(moves["theirs"]) > 3


@pytest.mark.by_day(0)
def test_averages_can_be_switched_on_for_a_run(tmp_path):
  path = tmp_path / "run.weights.h5"
  bare = trained(optimizers.Adam(0.01))
  bare.save_weights(path)
  kept = {}
  for name, make_optimizer in ("theirs", theirs), ("ours", ours):
    model = make(make_optimizer(optimizers.Adam, learning_rate=0.01))
    model.optimizer.build(model.trainable_variables)
    with warnings.catch_warnings(record=True) as found:
      warnings.simplefilter("always", UserWarning)
      model.load_weights(path)
    found = [w for w in found if issubclass(w.category, UserWarning)]
    kept[name] = int(model.optimizer.iterations.numpy()), bool(found)
    averages = [average_of(model.optimizer, v)
                for v in model.trainable_variables]
    if name == "ours":
      assert changed(model, values(averages)) == 0
    else:
      assert all((s.numpy() == 0).all() for s in averages)
  assert kept["theirs"] == (0, True)
  assert kept["ours"] == (5, False)


def count_ops(opt, layers=20):
  variables = [keras.Variable(np.zeros([2, 2], np.float32))
               for _ in range(layers)]
  step = stepping(opt, variables, "function")
  graph = step.get_concrete_function(*[tf.TensorSpec([2, 2])] * layers).graph
  return len(graph.get_operations())


def test_the_graph_of_a_step_is_small():
  bare = count_ops(optimizers.Adam())
  assert count_ops(theirs(optimizers.Adam)) - bare > 200
  assert count_ops(ours(optimizers.Adam)) < bare / 2
  # Where the inner optimizer takes its own step, one op averages.
  bare = count_ops(optimizers.Nadam())
  assert count_ops(theirs(optimizers.Nadam)) - bare > 200
  # A capture and a handle of each average, and a few that all share.
  assert count_ops(ours(optimizers.Nadam)) - bare <= 50


def of_model_garden(gradients, decay, start_step, dynamic_decay):
  """Averages of official.modeling.optimization.ExponentialMovingAverage.

  In NumPy float64, by its formula: the average starts at 0, the number of a
  step is counted from 1, and before step `start_step`, the decay is 0.
  """
  weight, average, averages = np.array([1.0, 2.0]), np.zeros(2), []
  for t, gradient in enumerate(gradients, 1):
    weight = weight - 0.125 * gradient
    d = (0 if t < start_step else min(
        decay, (1 + t - start_step) / (10 + t - start_step))
         if dynamic_decay else decay)
    average = average + (1 - d) * (weight - average)
    averages.append(average)
  return averages


@pytest.mark.by_day(2)
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("start", [0, 1, 2, 4])
@pytest.mark.parametrize("is_late", [False, True])
def test_numbers_of_the_model_garden(start, dynamic, mode, is_late):
  """The arguments are those of the guide "Moving to wrapopt"."""
  w = keras.Variable([1.0, 2.0])
  if is_late:  # The averages move after Keras has counted the step.
    w.constraint = keras.constraints.Constraint()
  inner = optimizers.SGD(0.125)
  kwargs = {"start_step": max(start - 1, 0), "dynamic_decay": dynamic}
  if start == 0 and dynamic:
    kwargs = {"num_updates": lambda: inner.iterations + 1}
  opt = MovingAverage(inner, 0.375, **kwargs)
  step = stepping(opt, [w], mode)
  if start < 2:
    opt.seed_averages()
    opt.average(w).assign([0.0, 0.0])
  gradients = np.random.default_rng(0).integers(-8, 9, (8, 2)) / 4
  for gradient, want in zip(gradients, of_model_garden(
      gradients, 0.375, start, dynamic), strict=True):
    step(tf.constant(gradient, tf.float32))
    # Three roundings in each of up to eight steps, of numbers less than 4.
    np.testing.assert_allclose(opt.average(w), want, rtol=0, atol=24 * 2**-23)
