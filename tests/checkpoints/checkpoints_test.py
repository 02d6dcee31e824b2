"""Averages of checkpoints: formats, numbers, errors."""

import os
import re
import types
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import checkpoint_files
import wrapopt
from checkpoint_files import values_of
from numerics import BFLOAT16
from numerics import DTYPES
from numerics import assert_same_bits
from training import sgd
from wrapopt import checkpoints
from wrapopt.checkpoints import __main__ as command
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _merge
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source
from wrapopt.checkpoints import _tensorflow
import wrapopt.keras

v1 = tf.compat.v1


def rounded_once(x, dtype):
  """float64 numbers, rounded to nearest even in one go."""
  if dtype != BFLOAT16:
    with np.errstate(over="ignore"):
      return x.astype(dtype)
  # ml_dtypes goes by way of float32, and rounds twice.
  exponent = np.frexp(np.where(np.isfinite(x), x, 0))[1]
  unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
  with np.errstate(over="ignore", invalid="ignore"):
    return (np.rint(x / unit) * unit).astype(BFLOAT16)


def mean_of(values, dtype, weights=None):
  """The reference: NumPy in float64, in order, rounded once."""
  total, unit = 0, 1 if weights else len(values)
  weights = weights or [1] * len(values)
  for weight, value in zip(weights, values):
    total = total + np.float64(weight) * np.asarray(value).astype(np.float64)
  return rounded_once(np.asarray(total / unit), np.dtype(dtype))


# Numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_numpys_in_float64_rounded_once(dtype, monkeypatch):
  monkeypatch.setattr(_merge, "_BLOCK", 1000)
  rng = np.random.default_rng(0)
  for size in (0, 1, 999, 1000, 2001):
    # Of every input dtype, and with numbers that one of two roundings hits.
    inputs = [(rng.standard_normal(size) * 10.0**rng.integers(-3, 4)).astype(d)
              for d in (*DTYPES, dtype)]
    weights = list(rng.uniform(-1, 1, len(inputs)))
    sums = np.full(size, -0.0)
    for x, weight in zip(inputs, weights):
      _merge._add(sums, x, weight)
    assert_same_bits(_merge._rounded(sums, dtype),
                     mean_of(inputs, dtype, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_once(dtype):
  # Just beside the middle of two neighbors, where float32 in between would
  # round to the middle, and then to even: 1 + 2^-k (1 + 2^-30) and its like.
  bits = {np.dtype(np.float16): 11, BFLOAT16: 8}.get(dtype, 24)
  middle = 1 + 2.0**-bits
  values = np.array([middle * (1 + 2.0**-40), middle * (1 - 2.0**-40), middle,
                     1 + 3 * 2.0**-bits, 65519.999999, 65520, 1e-8, 2.0**-25,
                     2.0**-25 * (1 + 2.0**-50), 2.0**-134 * (1 + 2.0**-40),
                     2.0**-134, 3.4e38, 3.3961775292304601e38, 1e300, 5e-324,
                     0.0, -0.0, np.inf, np.nan])
  values = np.concatenate([values, -values[:-1]])
  sums = np.full(values.shape, -0.0)
  _merge._add(sums, values, 1.0)
  output, expected = _merge._rounded(sums, dtype), rounded_once(values, dtype)
  assert output.dtype == dtype
  np.testing.assert_array_equal(output.astype(np.float64),
                                expected.astype(np.float64))
  assert (np.signbit(output) == np.signbit(expected))[~np.isnan(values)].all()


# All formats and functions


@pytest.mark.parametrize("data_file", [1, 1 << 28])
@pytest.mark.parametrize("function, options, weights", [
    (checkpoints.merge, {}, [1, 1, 1]),
    (checkpoints.merge, {"weights": [4, 6, 10]}, [4, 6, 10]),
    (checkpoints.lawa, {"window": 2}, [0, 1, 1]),
    (checkpoints.ema, {"progress": True}, [0.25, 0.25, 0.5])])
@pytest.mark.parametrize("kind", checkpoint_files.ENDINGS)
def test_each_format(tmp_path, monkeypatch, kind, function, options, weights,
                     data_file):
  monkeypatch.setattr(_tensorflow, "_DATA_FILE", data_file)
  paths = [str(tmp_path / f"in-{i}{checkpoint_files.ENDINGS[kind]}")
           for i in range(3)]
  for i, path in enumerate(paths):
    checkpoint_files.write(kind, path, i, i == 2)
  inputs = [checkpoint_files.contents(kind, path) for path in paths]
  to = "h5" if kind == "sharded" else kind
  output = str(tmp_path / "out") + checkpoint_files.ENDINGS[to]
  function(paths, output, **options)
  expected = checkpoint_files.mean(inputs, weights)
  expected.pop(checkpoint_files.NOTE, None)
  assert not checkpoint_files.difference(
      checkpoint_files.contents(to, output), expected, inputs[-1])
  assert not list(tmp_path.glob(".*"))


# TensorFlow's checkpoints


def save_by_saver(path, values):
  with tf.Graph().as_default(), v1.Session() as session:
    saver = v1.train.Saver({
        name: v1.Variable(tf.constant(value), use_resource=True)
        for name, value in values.items()})
    session.run(v1.global_variables_initializer())
    return saver.save(session, str(path), write_meta_graph=False)


def test_a_trajectory(tmp_path):
  for step, w in (1, 1.0), (2, 3.0), (3, 7.0):
    save_by_saver(tmp_path / f"run-{step}",
                  {"w": np.float32([w]), "global_step": np.int64(step)})
  paths = [tmp_path / f"run-{step}" for step in (1, 2, 3)]
  checkpoints.merge(paths[:2], tmp_path / "mean")
  assert values_of(tmp_path / "mean") == {"w": [2.0], "global_step": 2}
  checkpoints.merge(paths, tmp_path / "weighted", weights=[2, 1, 1])
  assert values_of(tmp_path / "weighted") == {"w": [3.0], "global_step": 3}
  checkpoints.lawa(paths, tmp_path / "lawa", window=2)
  assert values_of(tmp_path / "lawa") == {"w": [5.0], "global_step": 3}
  # 1, half way to 3 is 2, half way to 7 is 4.5.
  checkpoints.ema(paths, tmp_path / "ema", decay=0.5)
  assert values_of(tmp_path / "ema") == {"w": [4.5], "global_step": 3}


def test_only_says_what_is_averaged(tmp_path):
  for i in 1, 2:
    save_by_saver(tmp_path / f"run-{i}", {
        "w": np.float32(i), "w/Adam": np.float32(i), "step": np.int32(i)})
  checkpoints.merge(tmp_path, tmp_path / "out" / "mean", only="^w$")
  assert values_of(tmp_path / "out" / "mean") == {
      "w": 1.5, "w/Adam": 2, "step": 2}
  checkpoints.merge(tmp_path, tmp_path / "out" / "all")
  assert values_of(tmp_path / "out" / "all")["w/Adam"] == 1.5


def test_slots_in_the_file_of_a_saver(tmp_path, capsys):
  inputs = [save_by_saver(tmp_path / f"run-{i}", {
      "w": np.float32([i]), "w/Adam": np.float32([i]), "w/b": np.float32(i)})
            for i in range(2)]
  command.main(["merge", *inputs, "--output", str(tmp_path / "a"), "--quiet"])
  out, err = capsys.readouterr()
  assert out.endswith(f"{tmp_path / 'a'}: mean of the inputs\n"
                      "  averaged: 3 variables, 3 numbers of float32\n"
                      "  copied: 0 variables\n")
  assert ("note: 1 averaged variables, such as 'w/Adam', have names of slots. "
          "A Saver's file does not distinguish slots from weights. Choose"
         ) in err
  command.main(["merge", *inputs, "--output", str(tmp_path / "b"), "--quiet",
                "--only", "^w(/b)?$"])
  out, err = capsys.readouterr()
  assert "copied: 1 variables, 1 without a match of '^w(/b)?$'\n" in out
  assert not err


def test_a_partitioned_variable_of_many_rows(tmp_path):
  # From 64 on, the number of a slice's row is not ASCII in the key of the
  # slice.
  def make(value, parts):
    variables = [
        v1.get_variable("w", [300, 2], initializer=v1.constant_initializer(
            value), partitioner=v1.fixed_size_partitioner(parts)),
        v1.get_variable("counts", [200], tf.int64, v1.constant_initializer(
            value), partitioner=v1.fixed_size_partitioner(parts))]
    return v1.train.Saver(variables), [v.as_tensor() for v in variables]

  for i in 1, 3:
    with tf.Graph().as_default(), v1.Session() as session:
      saver, _ = make(i, 3)
      session.run(v1.global_variables_initializer())
      saver.save(session, str(tmp_path / f"in-{i}"), write_meta_graph=False)
  checkpoints.merge([tmp_path / "in-1", tmp_path / "in-3"], tmp_path / "out")
  # In other parts.
  with tf.Graph().as_default(), v1.Session() as session:
    saver, tensors = make(0, 2)
    saver.restore(session, str(tmp_path / "out"))
    w, counts = session.run(tensors)
  np.testing.assert_array_equal(w, np.full((300, 2), 2))
  np.testing.assert_array_equal(counts, np.full(200, 3))


def test_the_state_of_an_iterator(tmp_path):
  def make(i):
    iterator = iter(tf.data.Dataset.range(10))
    for _ in range(i):
      next(iterator)
    return tf.train.Checkpoint(w=tf.Variable([float(i)]), iterator=iterator)

  for i in 1, 3:
    make(i).write(str(tmp_path / f"in-{i}"))
  checkpoints.merge([tmp_path / "in-1", tmp_path / "in-3"], tmp_path / "out")
  got = make(0)
  got.read(str(tmp_path / "out")).assert_consumed()
  assert got.w.numpy() == [2] and next(got.iterator).numpy() == 3


@pytest.mark.parametrize("kind", ["keras", "v1"])
def test_object_based_checkpoints(tmp_path, kind):
  def make(seed):
    if kind == "keras":
      model, opt = make_model(seed), keras.optimizers.Adam(0.1)
      variables = model.trainable_variables
    else:
      model, opt = tf.Module(), v1.train.AdamOptimizer(0.1)
      model.w = tf.Variable(np.float32([seed, 2]))
      model.seen = tf.Variable(seed)
      variables = [model.w]
    for _ in range(seed + 1):
      opt.apply_gradients([(tf.ones(v.shape), v) for v in variables])
    return model, tf.train.Checkpoint(model=model, opt=opt)

  made = [make(seed) for seed in range(3)]
  paths = [c.save(str(tmp_path / f"run/{i}")) for i, (_, c) in enumerate(made)]
  checkpoints.merge(paths, tmp_path / "mean")
  last, got = values_of(paths[-1]), values_of(tmp_path / "mean")
  assert got.keys() == last.keys()
  # Rates, slots, powers and counts are the last one's.
  state = [name for name in got if "SLOT" in name or "_power" in name or
           name.startswith(("opt/_learning", "opt/_iter", "opt/_variables"))]
  assert len(state) == (2 + 12 if kind == "keras" else 2 + 2)
  for name in state:
    assert np.array_equal(got[name], last[name]), name

  model, checkpoint = make(0)
  checkpoint.restore(str(tmp_path / "mean")).assert_consumed()
  assert model.variables
  for got, *of_inputs in zip(model.variables, *[m.variables for m, _ in made]):
    if got.dtype in ("float32", tf.float32):
      assert_same_bits(got.numpy(), mean_of(
          [v.numpy() for v in of_inputs], np.float32))
    else:
      assert np.array_equal(got.numpy(), of_inputs[-1].numpy())


def with_schedule(optimizer=keras.optimizers.Adam, **kwargs):
  return optimizer(keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.5),
                   **kwargs)


def multi_optimizer():
  optimizers = keras.optimizers.OptimizerMap(with_schedule())
  optimizers["w"] = keras.optimizers.SGD(momentum=0.9)
  return keras.optimizers.MultiOptimizer(optimizers)


def assert_means(variables, models, dtype=np.float32, weights=None):
  """Variables have the means of those of models."""
  for got, *of_inputs in zip(variables, *[m.variables for m in models]):
    assert_same_bits(got.numpy(), mean_of(
        [v.numpy() for v in of_inputs], dtype, weights))


OPTIMIZERS = {
    "SGD": keras.optimizers.SGD,
    "SGD with a schedule": lambda: with_schedule(keras.optimizers.SGD),
    "Adam with a schedule": with_schedule,
    "use_ema": lambda: with_schedule(use_ema=True),
    "Adafactor": lambda: with_schedule(keras.optimizers.Adafactor),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        with_schedule()),
    "MultiOptimizer": multi_optimizer,
    "MovingAverage": lambda: wrapopt.keras.MovingAverage(with_schedule(), 0.9),
    "SWA": lambda: wrapopt.keras.SWA(with_schedule(), 0, 1),
    "Lookahead": lambda: wrapopt.keras.Lookahead(with_schedule(), 2),
    "ScheduleFree": lambda: wrapopt.keras.ScheduleFree("sgd"),
    "PrimalAverage": lambda: wrapopt.keras.PrimalAverage(
        with_schedule(), 0.7, 0.9),
    "LazyAdam": lambda: with_schedule(wrapopt.keras.LazyAdam),
    "two in LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        wrapopt.keras.SWA(wrapopt.keras.MovingAverage(with_schedule(), 0.9),
                          0, 1)),
}


def assert_averaged(paths, output, names):
  """Asserts that an output has means of these variables, else the last."""
  *_, last = inputs = [values_of(path) for path in paths]
  got = values_of(output)
  for name, value in got.items():
    if name in names:
      assert_same_bits(value, mean_of([x[name] for x in inputs], np.float32))
      assert not np.array_equal(value, last[name])
    else:
      assert np.array_equal(value, last[name]), name


@pytest.mark.by_day(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_of_each_optimizer_of_keras_is_copied(tmp_path, optimizer):
  paths = {True: [], False: []}
  for seed in range(2):
    w = keras.Variable(np.ones((2, 3), np.float32), name="w")
    opt = OPTIMIZERS[optimizer]()
    for i in range(seed + 2):
      opt.apply([tf.fill([2, 3], i + 1.0)], [w])
    for has_w in paths:
      checkpoint = tf.train.Checkpoint(
          part=tf.train.Checkpoint(opt=opt, **{"w": w} if has_w else {}))
      paths[has_w].append(checkpoint.save(str(tmp_path / f"{seed}{has_w}/c")))
  for has_w, inputs in paths.items():
    checkpoints.merge(inputs, tmp_path / f"mean{has_w}")
    # The optimizer refers to the variable that it trains, too.
    assert_averaged(inputs, tmp_path / f"mean{has_w}", {
        f"part/{x}/.ATTRIBUTES/VARIABLE_VALUE" for x in (
            "w", "opt/_trainable_variables/0",
            "opt/inner_optimizer/_trainable_variables/0")})


@pytest.mark.by_day(2)
@pytest.mark.parametrize("opt", [
    lambda: v1.train.MomentumOptimizer(0.1, 0.9), wrapopt.LazyAdamOptimizer,
    lambda: wrapopt.MovingAverageOptimizer(
        sgd(0.1), [wrapopt.PowerDecay(0.1), 0.9]),
    lambda: wrapopt.ScheduleFreeOptimizer(sgd(0.1)),
    lambda: wrapopt.PrimalAverageOptimizer(
        v1.train.AdamOptimizer(0.1), 0.7, 0.9),
    lambda: wrapopt.DropStaleGradientOptimizer(sgd(0.1), 3),
    lambda: v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
        v1.train.AdamOptimizer(0.1), v1.mixed_precision.DynamicLossScale(
            8.0, increment_period=1))],
                         ids=["Momentum", "LazyAdam", "MovingAverage",
                              "ScheduleFree", "PrimalAverage", "gate",
                              "loss scale"])
def test_the_state_of_each_optimizer_of_tensorflow_is_copied(tmp_path, opt):
  paths = []
  for seed in range(2):
    with tf.Graph().as_default(), v1.Session() as session:
      w = v1.get_variable("w", initializer=np.float32([1, 2]),
                          use_resource=True)
      step = v1.train.get_or_create_global_step()
      optimizer = opt()
      train = optimizer.minimize(tf.reduce_sum(w * w), step)
      checkpoint = tf.train.Checkpoint(
          part=tf.train.Checkpoint(optimizer=optimizer, w=w))
      paths.append(str(tmp_path / f"{seed}/c"))
      session.run([v1.global_variables_initializer(),
                   v1.local_variables_initializer()])
      for _ in range(seed + 2):
        session.run(train)
      # Also what would only change later.
      for variable in {*v1.global_variables()} - {w, step}:
        session.run(variable.assign(tf.cast(
            tf.fill(variable.shape, seed + 2), variable.dtype)))
      paths[-1] = checkpoint.save(paths[-1])
  checkpoints.merge(paths, tmp_path / "mean")
  assert_averaged(paths, tmp_path / "mean",
                  {"part/w/.ATTRIBUTES/VARIABLE_VALUE"})


def test_an_optimizer_that_refers_to_the_model(tmp_path):
  paths = {name: [] for name in ("beside", "root", "first")}
  for seed in range(2):
    model, opt = tf.Module(), tf.Module()
    model.w, model.mean = tf.Variable([1.0 + seed]), tf.Variable([2.0 + seed])
    slot, rate = tf.Variable([3.0 + seed]), tf.Variable(4.0 + seed)
    opt._iterations = tf.Variable(seed)
    opt._learning_rate, opt._variables = rate, [slot]
    opt._trainable_variables, opt.model = [model.w], model
    for name, checkpoint in {
        # The rate is at two places.
        "beside": tf.train.Checkpoint(a=rate, b=slot, model=model, opt=opt),
        "root": tf.train.Checkpoint(root=opt),
        "first": tf.train.Checkpoint(a=opt, b=model)}.items():
      paths[name].append(checkpoint.write(str(tmp_path / f"{name}-{seed}")))
  for name, averaged in {
      "beside": {"model/w", "model/mean"}, "root": {"_trainable_variables/0"},
      "first": {"b/w", "b/mean"}}.items():
    output = tmp_path / f"{name}-mean"
    checkpoints.merge(paths[name], output)
    assert_averaged(paths[name], output, {
        f"{x}/.ATTRIBUTES/VARIABLE_VALUE" for x in averaged})


# Keras's files


@keras.saving.register_keras_serializable("checkpoints_test")
class Counts(keras.layers.Layer):
  """A layer whose first variable is an integer, as an optimizer's."""

  def build(self, shape):
    del shape
    self.count = self.add_weight(shape=(), dtype="int64", trainable=False)
    self.table = self.add_weight(shape=(2, 3), trainable=False)


class Adversarial(keras.Model):
  """Optimizers at many places, and layers with names of optimizers."""

  def __init__(self):
    super().__init__(name="vars_of_optimizer")
    part = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    part.compile(wrapopt.keras.SWA(with_schedule(), 0, 1), "mse")
    part.optimizer.build(part.trainable_variables)
    self.generator = keras.Sequential([part, keras.layers.Dense(2)])
    self.optimizer_net = keras.layers.Dense(2, name="optimizer")
    self.vars, self.adam = Counts(name="counts"), keras.layers.Dense(3)
    for layer in self.optimizer_net, self.vars, self.adam:
      layer.build((None, 3))
    self.g_optimizer = keras.optimizers.LossScaleOptimizer(
        wrapopt.keras.MovingAverage(with_schedule(name="g"), 0.9))
    self.last_step = with_schedule(keras.optimizers.SGD, momentum=0.9,
                                   name="sgd-d")
    self.opts = [with_schedule(keras.optimizers.Lion, name="x"),
                 keras.optimizers.SGD(momentum=0.9, name="y")]
    self.by_part = {"a": wrapopt.keras.ScheduleFree("sgd", name="z")}
    for opt in (self.g_optimizer, self.last_step, *self.opts,
                *self.by_part.values()):
      opt.build(self.adam.trainable_variables)
    self.built = True


def test_optimizers_of_keras_at_any_place(tmp_path, capsys):
  paths = [tmp_path / f"{i}.weights.h5" for i in range(2)]
  for i, path in enumerate(paths):
    Adversarial().save_weights(path)
    with h5py.File(path, "r+") as file:
      file.visititems(lambda _, item: (
          item.write_direct(np.full(item.shape, i, item.dtype))
          if isinstance(item, h5py.Dataset) and item.size else None))
    with zipfile.ZipFile(path.with_suffix("").with_suffix(".keras"), "w") as z:
      z.write(path, "model.weights.h5")
  of_weights = {
      *(f"{layer}/vars/{i}" for i in (0, 1) for layer in (
          "generator/layers/sequential/layers/dense", "generator/layers/dense",
          "layers/dense", "adam")), "layers/counts/vars/1"}
  for ending in ".weights.h5", ".keras":
    inputs = [tmp_path / f"{i}{ending}" for i in range(2)]
    output = tmp_path / f"mean{ending}"
    command.main(["merge", *map(str, inputs), "--output", str(output),
                  "--quiet", "--verbose"])
    got = checkpoint_files.contents(ending.split(".")[-1], output)
    assert {name for name, value in got.items() if isinstance(
        value, np.ndarray) and (value == 0.5).all()} == of_weights
  # All others are 1, and said to be.
  out = capsys.readouterr().out
  assert ("mean.keras: mean of the inputs\n  averaged: 9 variables, 40 numbers "
          "of float32\n  copied: 48 variables, 31 in the state of an "
          "optimizer, 13 of dtype int64, 4 of dtype uint8\n"
          "  averaged  adam/vars/0  ") in out, out
  assert ("  copied    layers/counts/vars/0  int64 [], of dtype int64\n"
          "  averaged  layers/counts/vars/1  float32 [2, 3]\n") in out


def make_model(seed=0, dtype="float32"):
  keras.utils.set_random_seed(seed)
  layers = keras.layers
  model = keras.Sequential([
      keras.Input((4,)), layers.Dense(8, dtype=dtype),
      layers.BatchNormalization(dtype=dtype),
      layers.Dense(1, dtype=dtype)], name="model")
  for v in model.variables:
    v.assign(np.random.default_rng(seed).standard_normal(v.shape))
  return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("ending", ["weights.h5", "keras"])
def test_files_of_keras(tmp_path, ending, dtype):
  models = [make_model(seed, dtype) for seed in range(3)]
  paths = []
  for i, model in enumerate(models):
    model.compile(keras.optimizers.Adam(0.1 * (i + 1)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(10 * i)
    paths.append(tmp_path / f"run/{i}.{ending}")
    paths[-1].parent.mkdir(exist_ok=True)
    if ending == "keras":
      model.save(paths[-1])
    else:
      model.save_weights(paths[-1])
  output = tmp_path / f"mean.{ending}"
  checkpoints.merge(tmp_path / "run", output, [1, 2, 1])
  if ending == "keras":
    loaded = keras.models.load_model(output)
    with zipfile.ZipFile(output) as got, zipfile.ZipFile(paths[-1]) as last:
      assert got.namelist() == last.namelist()
      assert got.read("config.json") == last.read("config.json")
  else:
    loaded = make_model(7, dtype)
    loaded.compile(keras.optimizers.Adam(0.5), "mse")
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(output)
  assert_means(loaded.variables, models, tf.as_dtype(dtype).as_numpy_dtype,
               [0.25, 0.5, 0.25])
  assert loaded.optimizer.iterations.numpy() == 20
  np.testing.assert_array_equal(loaded.optimizer.learning_rate.numpy(),
                                models[-1].optimizer.learning_rate.numpy())
  assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_all_that_an_hdf5_file_may_hold(tmp_path, libver):
  source, out = tmp_path / "in.h5", tmp_path / "out.h5"
  with h5py.File(source, "w", libver=libver) as file:
    file["w"] = np.ones(3, np.float32)
    file["string"], file["none"] = "a", h5py.Empty("f4")
    file["empty"] = np.zeros((0, 2), np.int32)
    file.create_dataset("chunked", data=np.full((64, 3), 2, ">f4"),
                        chunks=(8, 3), compression="gzip")
    lists = file.create_dataset("lists", (2,), h5py.vlen_dtype(np.int32))
    lists[0], lists[1] = [1, 2], [3]
    file["pairs"] = np.array([(1, 2)], [("x", np.float32), ("y", np.int32)])
    file["type"], file["flag"] = np.dtype(np.float64), True
    file.create_dataset("rows", data=np.arange(6), chunks=(2,),
                        maxshape=(None,), compression="gzip")
    file.create_dataset("outside", (2,), np.int32, external=str(
        tmp_path / "raw"))[:] = [4, 5]
    file["group/tied"], file["group/soft"] = file["w"], h5py.SoftLink("/w")
    file["group/top"] = file["/"]
    attributes = file["w"].attrs
    attributes["string"], attributes["none"] = "b", h5py.Empty("f4")
    attributes.create("lists", np.array([np.int32([1]), np.int32([2, 3])],
                                        object), dtype=lists.dtype)
    file["group"].attrs["big"] = np.zeros(
        1 << 17 if libver == "latest" else 8, np.uint8)
  checkpoints.merge([source, source], out, [3, 1])
  (tmp_path / "raw").unlink()
  with h5py.File(source) as last, h5py.File(out) as got:
    assert list(got) == list(last)
    for name in "string", "flag", "pairs", "empty":
      assert got[name].dtype == last[name].dtype
      assert np.array_equal(got[name][()], last[name][()])
    assert got["chunked"].dtype == np.float32
    assert (got["chunked"][()] == 2).all()
    assert got["none"].shape is None and got["type"].dtype == np.float64
    assert [list(x) for x in got["lists"]] == [[1, 2], [3]]
    assert got["rows"].compression == "gzip" and got["rows"][5] == 5
    assert list(got["outside"]) == [4, 5]
    assert list(got["w"]) == [1, 1, 1] and got["w"] == got["group/tied"]
    assert got["group"].get("soft", getlink=True).path == "/w"
    assert got["group/top"] == got["/"]
    assert got["w"].attrs["string"] == "b"
    assert got["w"].attrs["none"] == h5py.Empty("f4")
    assert [list(x) for x in got["w"].attrs["lists"]] == [[1], [2, 3]]
    assert got["group"].attrs["big"].shape == last["group"].attrs["big"].shape
  checkpoints.merge([out, out], tmp_path / "again.h5")


def test_sharded_weights(tmp_path):
  models = [make_model(seed) for seed in range(2)]
  for i, model in enumerate(models):
    (tmp_path / f"run/{i}").mkdir(parents=True)
    model.save_weights(tmp_path / f"run/{i}/m.weights.json",
                       max_shard_size=200 / 2**30)
  inputs = [tmp_path / f"run/{i}" for i in range(2)]
  assert len(list(inputs[0].glob("*.h5"))) > 1
  checkpoints.merge(inputs, tmp_path / "mean.weights.h5")
  # Beside a file of the same model in one piece.
  models[0].save_weights(tmp_path / "run/0.weights.h5")
  checkpoints.merge([tmp_path / "run/0.weights.h5", inputs[1]],
                    tmp_path / "mixed.weights.h5")
  for output in "mean", "mixed":
    loaded = make_model(7)
    loaded.load_weights(tmp_path / f"{output}.weights.h5")
    assert_means(loaded.variables, models)
  out = tmp_path / "out.weights.json"
  refused(tmp_path, ValueError, r"must end in '.h5', since the last input is "
          r".*m.weights.json, got .*out.weights.json", inputs, out)
  (tmp_path / "odd.weights.json").write_text("[]")
  refused(tmp_path, ValueError, "odd.weights.json must be a JSON file with a "
          "'weight_map', as .*, got other", tmp_path / "odd.weights.json", out)
  next(inputs[0].glob("*.h5")).unlink()
  refused(tmp_path, OSError, "m_0000.*.weights.h5", inputs,
          tmp_path / "new" / "out.weights.h5")


def test_an_hdf5_type_that_numpy_lacks(tmp_path):
  # bfloat16 as a type of HDF5, which h5py reads as float32.
  bfloat16 = h5py.h5t.IEEE_F32LE.copy()
  bfloat16.set_fields(15, 7, 8, 0, 7)
  bfloat16.set_size(2)
  bfloat16.set_ebias(127)
  values = [np.float32([1, 2.5, -3]), np.float32([2, 0.5, 8])]
  paths = [tmp_path / f"in-{i}.h5" for i in range(2)]
  for path, value in zip(paths, values):
    with h5py.File(path, "w") as file:
      dataset = h5py.h5d.create(file.id, b"w", bfloat16,
                                h5py.h5s.create_simple((3,)))
      dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, value)
  checkpoints.merge(paths, tmp_path / "out.h5")
  with h5py.File(tmp_path / "out.h5") as file:
    assert_same_bits(file["w"][()], mean_of(values, np.float32))


# What is refused


@pytest.fixture
def two(tmp_path):
  return [save_by_saver(tmp_path / f"in-{i}", {
      "w": np.float32([i, 2]), "b": np.float32(i)}) for i in range(2)]


def refused(tmp_path, error, match, *args, function=checkpoints.merge,
            **kwargs):
  before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}
  with pytest.raises(error, match=match):
    function(*args, **kwargs)
  assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("given, match", [
    ({"base": "x"}, "`base` must be given with `blend`, got 'x' alone"),
    ({"blend": np.nan}, "`blend` must be a finite number, got nan"),
    ({"blend": "0.5"}, "`blend` must be a finite number, got '0.5'"),
    ({"blend": 0.5, "base": "two"}, "must be the path of one checkpoint, got"),
    ({"decay_steps": 3}, "must be given with `decay`, got 3 and None"),
    ({"decay": "linear", "weights": [1, 1]}, "must be None with `decay`"),
    ({"copy_rest": True}, "`copy_rest` must be False but for models in folder"),
    ({"max_shard_size": 9}, "`max_shard_size` must be None for .* files, .* 9"),
    ({"weights": [1]}, "`weights` must hold one number for each of the 2 "
     "inputs, got 1"),
    ({"weights": [1, np.nan]}, "`weights` must be finite"),
    ({"weights": [1, -1]}, "sum of `weights` must be greater than 0, got 0"),
    ({"weights": [True, True]}, "`weights` must be finite numbers, got .True, "
     "True"),
    ({"decay": ["linear"]}, r"`decay` must be linear, .* got \['linear'\]"),
    ({"only": "nothing"}, "variables to average that match 'nothing', got 'b', "
     "'w'"),
    *(({"only": only}, "`only` must be a regular expression, got "
       f"{re.escape(repr(only))}: ") for only in ("(", b"w", 5, ["w"])),
])
def test_arguments_that_are_refused(given, match, two, tmp_path):
  if given.get("base") == "two":
    given = {**given, "base": two}
  refused(tmp_path, ValueError, match, two, tmp_path / "out", **given)


def test_files_that_are_no_checkpoints(tmp_path):
  (tmp_path / "empty").mkdir()
  refused(tmp_path, FileNotFoundError, "no checkpoint in the directory .*empty",
          tmp_path / "empty", tmp_path / "out")
  for name, kwargs, match in (
      ("other", {}, "must contain model.weights.h5, got"),
      ("model.weights.h5", {"compression": zipfile.ZIP_DEFLATED},
       "must contain an uncompressed model.weights.h5")):
    with zipfile.ZipFile(tmp_path / "a.keras", "w", **kwargs) as archive:
      archive.writestr(name, "x" * 99)
    refused(tmp_path, ValueError, match, tmp_path / "a.keras",
            tmp_path / "b.keras")


@pytest.mark.parametrize("values, at, error", [
    ({"w": np.float32([1, 2])}, 1,
     r"odd must have the variable 'b', which .*in-1 has, got 'w'\. All inputs"),
    ({"w": np.float32([1]), "b": np.float32(0)}, 1,
     r"Variable 'w' of .*odd misshapen: got \[1\] but expected \[2\] \(its "
     r"shape in .*in-1\)"),
    ({"w": np.int32([1, 2]), "b": np.float32(0)}, 1,
     r"Variable 'w' of .*odd must be of dtype float16, bfloat16, float32, "
     r"float64 or float8, as in .*in-1, got int32"),
    ({"w": np.float32([1, 2]), "b": np.float32(0), "c": np.float32(0)}, 1,
     r"odd must not have variables that .*in-1 lacks, got 'c'"),
    # The last tells the dtypes.
    *(({"w": w, "b": np.float32(0)}, 2,
       "Variable 'w' must be averaged in all inputs or in none, got one of "
       rf"dtype float32 in .*in-0 and one of dtype {w.dtype} in .*odd\. All "
       "inputs must be of one model")
      for w in (np.int32([1, 2]), np.array([b"x", b"y"], object))),
])
def test_inputs_that_do_not_go_together(tmp_path, two, values, at, error):
  two.insert(at, save_by_saver(tmp_path / "odd", values))
  refused(tmp_path, ValueError, error, two, tmp_path / "new" / "out")


def test_links_and_references_that_a_copy_would_lose(tmp_path):
  with h5py.File(tmp_path / "in.h5", "w") as file:
    file["w"] = np.ones(3, np.float32)
  for name, error in [
      ("link", "link.h5 must contain its variables, got the link 'x' to the "
       "file in.h5. Replace"),
      ("reference", "reference.h5 must not contain HDF5 references, which .*, "
       "got one in '/x'"),
      ("of_attribute", "of_attribute.h5 must not contain HDF5 references, "
       "which .*, got one in '/w'")]:
    with h5py.File(tmp_path / f"{name}.h5", "w") as file:
      file["w"] = np.ones(3, np.float32)
      if name == "link":
        file["x"] = h5py.ExternalLink("in.h5", "w")
      elif name == "reference":
        file["x"] = file["w"].ref
      else:
        file["w"].attrs["x"] = file["w"].ref
    refused(tmp_path, ValueError, error, tmp_path / f"{name}.h5",
            tmp_path / "new" / "out.h5")


@pytest.mark.parametrize("output", ["", "out/", "new/out/", "new/..", "."])
def test_outputs_without_a_name(tmp_path, monkeypatch, two, output):
  monkeypatch.chdir(tmp_path)
  refused(tmp_path, ValueError, "The output must end in the name of a file, "
          f"got '{output}'. Pass a path", two, output)


def test_large_and_small_weights(tmp_path):
  for i in 1, 3:
    save_by_saver(tmp_path / f"in-{i}", {"w": np.float32(i)})
  inputs = [tmp_path / "in-1", tmp_path / "in-3"]
  for i, (weights, mean) in enumerate([
      ([1e308, 1e308], 2), ([1.7e308, -1e308], (1.7 - 3) / 0.7),
      ([5e-324, 5e-324], 2), ([1, 1e308], 3)]):
    checkpoints.merge(inputs, tmp_path / f"out-{i}", weights)
    assert values_of(tmp_path / f"out-{i}") == {
        "w": pytest.approx(mean, rel=1e-6)}
  for weights, error in [
      ([10**400, 1], "must be finite"), ([-1e308, -1e308], "greater than 0")]:
    refused(tmp_path, ValueError, error, inputs, tmp_path / "out", weights)


def test_bad_arguments(tmp_path, two):
  out = tmp_path / "out"
  for error, match, args, *kwargs in [
      (ValueError, "`inputs` must hold at least one path", ([], out)),
      *((FileNotFoundError, f"There is no checkpoint .*{name}",
         ([*two, tmp_path / name], out)) for name in ("none", "none.keras")),
      *((ValueError, f"`decay` must be a number in .* got {decay!r}",
         (two, out, decay), {"function": checkpoints.ema})
        for decay in (1.5, True, "x")),
      (TypeError, "`weights` must be a sequence, got 3", (two, out, 3)),
      (TypeError, "`steps` must be a sequence, got 3", (two, out),
       {"decay": "linear", "steps": 3}),
      (TypeError, "`inputs` must be a sequence, got 5", (5, out)),
      (TypeError, "`inputs` must be a path, .* got None", ([*two, None], out)),
      (TypeError, "`output` must be a path, .* got 5", (two, 5)),
      (TypeError, "`relative_widths` must be a sequence, got 0.1",
       (two, len, 0.1), {"function": checkpoints.sweep}),
      (TypeError, "`evaluate` must be a function of a path, got 'f'",
       (two, "f", [0.1]), {"function": checkpoints.sweep}),
      (ValueError, "`window` must be an integer from 1 to the number of "
       "inputs, 2, got 3", (two, out, 3), {"function": checkpoints.lawa}),
      (FileNotFoundError, "There is no checkpoint .*none",
       (tmp_path / "none", out), {"function": checkpoints.lawa}),
      (ValueError, "must not end in '.keras', '.h5'",
       (two, tmp_path / "out.weights.h5")),
      (ValueError, "must not end in .* or '.index'",
       (two, tmp_path / "out.index")),
      (FileExistsError, "in-0.index exists. Remove it", (two, two[0]))]:
    refused(tmp_path, error, match, *args, **dict(*kwargs))


def test_paths_may_be_bytes(tmp_path, two):
  out = tmp_path / "out"
  checkpoints.merge([os.fsencode(path) for path in two], os.fsencode(out))
  checkpoints.lawa(os.fsencode(two[1]), tmp_path / "last", 1)
  assert values_of(out)["b"] == 0.5 and values_of(tmp_path / "last")["b"] == 1


@pytest.mark.parametrize("ending", ["", ".keras", ".h5"])
@pytest.mark.parametrize("size", [235, 240, 300])
def test_a_name_of_an_output_that_is_too_long(tmp_path, monkeypatch, two,
                                              ending, size):
  monkeypatch.chdir(tmp_path)
  if ending:
    checkpoint_files.write(ending[1:], f"in-1{ending}", 1, True)
    two = [f"in-1{ending}"]
  # TensorFlow appends ".data-00000-of-00001".
  output = "x" * (size - len(ending)) + ending
  if size == 235:
    checkpoints.merge(two, output)
    size, output = 236, "x" + output
    if ending:
      return
  # Where the graph was made says nothing to a user.
  refused(tmp_path, OSError, f"^{output} cannot be written: (?s:(?!Graph).)*"
          "File name too long", two, output)


@pytest.mark.parametrize("name", ["model.pt", "model.npz", "saved_model.pb",
                                  "model"])
def test_files_of_other_formats(tmp_path, name):
  (tmp_path / name).write_bytes(b"x" * 100)
  refused(tmp_path, ValueError, f"{name} must be a file of TensorFlow or "
          "Keras, got one of another format. Load other weights into the model",
          tmp_path / name, tmp_path / "out")


# The byte that is damaged: its place, or a file of an archive or data in it.
@pytest.mark.parametrize("ending, place, error", [
    (".data-00000-of-00001", 0, "Variable '[bw]' of .*in-{i} cannot be read: "),
    (".data-00000-of-00001", -1, "Variable '[bw]' of .*in-{i} cannot be read"),
    (".index", 5, "in-{i} cannot be read: "),
    (".keras", lambda i: np.float32([i, 2]).tobytes(), "in-{i}.keras is "
     "damaged: use another copy of it: the checksum of model.weights.h5 is "
     "wrong"),
    (".keras", "config.json", "in-{i}.keras is damaged: use another copy of "
     "it: "), (".h5", 0, "in-{i}.h5 cannot be read: "),
    (".keras", 0, "in-{i}.keras (is damaged|cannot be read)")])
@pytest.mark.parametrize("i", [0, 1])
def test_a_damaged_byte(tmp_path, two, ending, place, error, i):
  del two
  if ending.startswith((".keras", ".h5")):
    for k in range(2):
      checkpoint_files.write(ending[1:], str(tmp_path / f"in-{k}{ending}"), k,
                             True)
  path = tmp_path / f"in-{i}{ending}"
  data = bytearray(path.read_bytes())
  if callable(place):
    place = data.rindex(place(i))
  elif isinstance(place, str):
    with zipfile.ZipFile(path) as archive:
      info = archive.getinfo(place)
      # After the header, in the middle.
      place = info.header_offset + 30 + len(place) + info.compress_size // 2
  data[place] ^= 1
  path.write_bytes(data)
  output = ending if ending.startswith((".keras", ".h5")) else ""
  refused(tmp_path, OSError, error.format(i=i),
          [tmp_path / f"in-{k}{output}" for k in range(2)],
          tmp_path / "new" / "folder" / f"out{output}")


def test_directories_are_in_the_order_of_their_numbers(tmp_path):
  for i in 10, 9, 100:
    save_by_saver(tmp_path / f"model.ckpt-{i}", {"w": np.float32(i)})
  checkpoints.lawa(tmp_path, tmp_path / "out" / "mean", window=2)
  assert values_of(tmp_path / "out" / "mean") == {"w": 55}


# A new format


class NpzSink(_sink.Sink):

  def __init__(self, path, note=None, like=None, made=None):
    super().__init__(path)
    self._values = {}

  def write(self, name, value):
    self._values[name] = value

  def copy(self, source, name):
    self.write(name, source.read(name))

  def _finish(self):
    path = os.path.join(self._directory, os.path.basename(self.path))
    np.savez(path, **self._values)
    return [path]


class NpzSource(_source.Source):
  kind = "NPZ"
  Sink = NpzSink
  endings = (".npz",)
  ending = ".npz"

  def __init__(self, path):
    super().__init__(path)
    with np.load(path) as file:
      self._values = dict(file)
    self.specs = {name: _source.Spec(value.shape, value.dtype)
                  for name, value in self._values.items()}

  def _is_optimizer_state(self, name):
    return name.startswith("optimizer")

  def _read(self, name):
    return self._values[name]


def test_a_format_is_one_file_and_one_line(tmp_path, monkeypatch, capsys, two):
  monkeypatch.setattr(_formats, "FORMATS", (NpzSource, *_formats.FORMATS))
  (tmp_path / "in").mkdir()
  values = [{"w": np.float32([i, 2, 8]), "optimizer/m": np.float32(i),
             "step": np.int64(i)} for i in (1, 2, 6)]
  paths = [str(tmp_path / "in" / f"{i}.npz") for i in range(3)]
  for path, value in zip(paths, values):
    np.savez(path, **value)
  # In a directory too.
  checkpoints.merge(tmp_path / "in", tmp_path / "out.npz")
  with np.load(tmp_path / "out.npz") as out:
    assert out.files == ["w", "optimizer/m", "step"]
    assert_same_bits(out["w"], np.float32([3, 2, 8]))
    assert_same_bits(out["optimizer/m"], np.float32(6))
    assert_same_bits(out["step"], np.int64(6))
  command.main(["list", paths[0]])
  assert "0.npz: NPZ, 3 variables" in capsys.readouterr().out
  assert _formats.ending_of(paths[0]) == ".npz"
  # Errors know it.
  for inputs, name, rule in [
      (paths, "out.h5", "end in '.npz'"),
      (two, "x.npz", "not end in '.npz', '.keras', '.h5', '.hdf5', "
       "'weights.json', '.safetensors', '.safetensors.index.json' or "
       "'.index'")]:
    output = tmp_path / "new" / name
    refused(tmp_path, ValueError, "^" + re.escape(
        f"The name of the output must {rule}, since the last input is "
        f"{inputs[-1]}, got {output}.") + "$", inputs, output)


@pytest.mark.parametrize("last, name, rule", [
    ("in.keras", "out.h5", "end in '.keras'"),
    ("in.h5", "out.keras", "end in '.h5'"),
    ("in.hdf5", "out", "end in '.h5'"),
    # The output is one file.
    ("in.weights.json", "out.weights.json", "end in '.h5'")])
def test_names_of_outputs(tmp_path, last, name, rule):
  output, source = tmp_path / name, types.SimpleNamespace(path=last)
  with pytest.raises(ValueError, match="^" + re.escape(
      f"The name of the output must {rule}, since the last input is {last}, "
      f"got {output}.") + "$"):
    _formats.check_output(str(output), source)
