"""Snapshots of averages, and averages of any width computed from them."""

import json
import os
import shutil

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from checkpoint_files import values_of
from snapshot_kills import check_whole
from snapshot_kills import kill_in_a_loop
from training import descend
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import moving
from training import sgd
from wrapopt import checkpoints
from wrapopt.checkpoints import __main__ as command
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _profiles
from wrapopt.checkpoints import _tensorflow
import wrapopt.keras

v1 = tf.compat.v1

NARROW, WIDE = wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)


# Profiles


def weights_of(gamma, steps, of):
  """What each of `of` steps weighs in an average, written as in PowerDecay."""
  weights = np.zeros(of)
  for t in range(1, steps + 1):
    beta = (1 - 1 / t)**(gamma + 1)
    weights *= beta
    weights[t - 1] += 1 - beta
  return weights


def test_inner_products():
  # In pieces of a step a PowerDecay's weights are the integrals of its profile.
  n = 4000
  for a, b in [((16.97, n), (6.94, n)), ((16.97, n), (6.94, n // 2)),
               ((0.0, n // 4), (3.0, n)), ((1.5, n), (1.5, n))]:
    got = _profiles.inner_product(_profiles.Profile(*a), _profiles.Profile(*b))
    assert got == _profiles.inner_product(_profiles.Profile(*b),
                                          _profiles.Profile(*a))
    want = weights_of(*a, n) @ weights_of(*b, n)
    assert got == pytest.approx(want, rel=1e-3)


def profiles(n, steps=1000):
  return [_profiles.Profile(d.gamma, steps * (i + 1) / n)
          for i in range(n) for d in (NARROW, WIDE)]


@pytest.mark.parametrize("width, error", [
    (0.03, 4e-2), (0.07, 4e-3), (0.15, 1e-2), (0.2, 2.5e-2), (0.25, 8e-2)])
def test_fits(width, error):
  snapshots = profiles(16)
  wanted = _profiles.Profile(wrapopt.PowerDecay(width).gamma, 1000)
  fit = _profiles.fit(snapshots, wanted)
  assert fit.weights.sum() == pytest.approx(1, abs=1e-12)
  # What docs say, and the distance of the weights themselves.
  assert 0.8 * error < fit.error < error
  total = sum(w * weights_of(s.gamma, round(s.steps), 1000)
              for w, s in zip(fit.weights, [
                  s._replace(steps=round(s.steps)) for s in snapshots]))
  want = weights_of(wanted.gamma, 1000, 1000)
  assert np.linalg.norm(total - want) / np.linalg.norm(want) == pytest.approx(
      fit.error, rel=0.05)
  # No other weights of sum 1 are nearer.
  gram = np.array([[_profiles.inner_product(a, b) for b in snapshots]
                   for a in snapshots])
  products = np.array([_profiles.inner_product(s, wanted) for s in snapshots])
  slope = gram @ fit.weights - products
  assert np.ptp(slope) < 1e-6 * np.abs(products).max()


def test_a_snapshot_itself_is_its_own_fit():
  fit = _profiles.fit(profiles(16), _profiles.Profile(WIDE.gamma, 1000))
  np.testing.assert_allclose(fit.weights, [0] * 31 + [1], atol=1e-6)
  assert fit.error < 1e-6
  fit = _profiles.fit(profiles(1)[:1], _profiles.Profile(WIDE.gamma, 1000))
  assert fit.weights == [1] and fit.error > 0.1


@pytest.mark.parametrize("gamma", [0, 1e-300, 1e150, 1e155, 1e308])
def test_exponents_far_from_those_of_snapshots(gamma):
  fit = _profiles.fit(profiles(16), _profiles.Profile(gamma, 1000))
  assert fit.weights.sum() == pytest.approx(1)
  assert 0.2 < fit.error <= 1 + 1e-9


# Sessions


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_snapshots_of_a_session(tmp_path, kind, dtype):
  directory = tmp_path / "snapshots"
  step = v1.train.get_or_create_global_step()
  opt = moving([NARROW, 0.5], shadow_dtype=tf.float32)
  v = v1.get_variable("v", [3], initializer=v1.zeros_initializer)
  h = v1.get_variable("h", [2], tf.float16, v1.zeros_initializer)
  parts = v1.get_variable("parts", [4, 2], initializer=v1.zeros_initializer,
                          partitioner=v1.fixed_size_partitioner(2))
  train = descend(opt, v, h, *parts, step=step)
  hook = checkpoints.SnapshotHook(opt, directory, 3, dtype)
  with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
    for _ in range(7):
      session.run(train)
  for decay in NARROW, 0.5:
    for at in 3, 6:
      values = values_of(directory / f"snapshot-{at}-{decay}")
      average = 0.0  # Of 1, 2, ..., of which each step has one.
      for t in range(1, at + 1):
        beta = 0.5 if decay == 0.5 else (1 - 1 / t)**(NARROW.gamma + 1)
        average = beta * average + (1 - beta) * t
      note = json.loads(values.pop("wrapopt/snapshot"))
      assert (note["step"], note["steps"]) == (at, at)
      assert note["gamma"] == (None if decay == 0.5 else NARROW.gamma)
      assert {name: x.shape for name, x in values.items()} == {
          "v": (3,), "h": (2,), "parts": (4, 2)}
      for x in values.values():
        assert x.dtype == (ml_dtypes.bfloat16 if dtype else np.float32)
        np.testing.assert_allclose(np.float64(x), average,
                                   rtol=2**-8 if dtype else 1e-6)
  assert {f.name.split(".")[0].split("-")[1] for f in directory.iterdir()} == {
      "3", "6"}
  # A plain Saver loads what is made of them, in the dtypes of the variables.
  checkpoints.posthoc([directory / f"snapshot-{i}-{NARROW}" for i in (3, 6)],
                      tmp_path / "out", gamma=NARROW.gamma)
  with graph_of(kind), v1.Session() as session:
    h = v1.get_variable("h", [2], tf.float16)
    parts = v1.get_variable("parts", [4, 2],
                            partitioner=v1.fixed_size_partitioner(2))
    v1.train.Saver([h, parts]).restore(session, str(tmp_path / "out"))
    np.testing.assert_array_equal(
        session.run(h), values_of(tmp_path / "out")["h"])


def test_a_hook_is_checked(tmp_path):
  opt = moving(NARROW)
  for error, match, args in [
      (TypeError, "`opt` must be a wrapopt.MovingAverageOptimizer, .*, got ",
       (sgd(), tmp_path, 1)),
      (TypeError, "`save_steps` must be an integer", (opt, tmp_path, 1.5)),
      (ValueError, "`save_steps` must be at least 1", (opt, tmp_path, 0)),
      (TypeError, "`directory` must be a path, .* got 5", (opt, 5, 1)),
      (ValueError, "`directory` must be the path of a directory, got ''",
       (opt, "", 1)),
      (ValueError, "`dtype` must be None, float16, bfloat16 or float32, got "
       "float64", (opt, tmp_path, 1, "float64"))]:
    with pytest.raises(error, match=match):
      checkpoints.SnapshotHook(*args)
  assert checkpoints.SnapshotHook(
      opt, os.fsencode(tmp_path), 1)._snapshots.directory == str(tmp_path)
  with graph_of("resource"):
    hook = checkpoints.SnapshotHook(opt, tmp_path, 1)
    with pytest.raises(RuntimeError, match="needs a global step"):
      hook.begin()
    v1.train.get_or_create_global_step()
    with pytest.raises(RuntimeError, match="Must call apply_gradients"):
      hook.begin()


def test_no_snapshot_while_the_averages_are_in_place(tmp_path):
  with graph_of("resource"):
    step = v1.train.get_or_create_global_step()
    v = v1.get_variable("v", initializer=0.0)
    opt = moving(0.5)
    train = descend(opt, v, step=step)
    others = step.assign_add(5)  # The steps of other workers.
    hook = checkpoints.SnapshotHook(opt, tmp_path, 3)
    with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
      session.run(train)
      with opt.averaged_weights(session):
        session.run(others)
        assert session.run(v) == 0.5
      assert not list(tmp_path.iterdir())
      assert session.run(v) == 1
  values = values_of(tmp_path / "snapshot-6-0.5")
  assert values["v"] == 0.5


# Keras


def digits_like():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((256, 8)).astype(np.float32)
  return x, (x @ rng.standard_normal((8, 3))).argmax(1)


def make_model(decays, optimizer=None):
  keras.utils.set_random_seed(0)
  model = keras.Sequential([
      keras.Input((8,)), keras.layers.Dense(16, activation="relu"),
      keras.layers.BatchNormalization(), keras.layers.Dense(3)])
  model.compile(
      optimizer or wrapopt.keras.MovingAverage(
          keras.optimizers.SGD(0.1), decays),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"])
  return model


def loaded(path):
  """A plain model with the weights of a file."""
  model = make_model([NARROW], keras.optimizers.SGD(0.1))
  model.load_weights(path)
  return model


def fit(model, *callbacks):
  """An epoch of 16 steps."""
  model.fit(*digits_like(), batch_size=16, verbose=0,
            callbacks=list(callbacks))


class Record(keras.callbacks.Callback):
  """Keeps the weights of each step."""

  def __init__(self):
    super().__init__()
    self.weights = []

  def on_train_batch_end(self, batch, logs=None):
    self.weights.append(np.concatenate([
        np.ravel(v.numpy()) for v in self.model.trainable_variables]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with snapshots: (model, its directory, weights of each step)."""
  directory = tmp_path_factory.mktemp("run")
  widths = [0.03, 0.07, 0.15, 0.2, 0.25]
  model = make_model([NARROW, WIDE, *map(wrapopt.PowerDecay, widths)])
  record = Record()
  x, y = digits_like()
  model.fit(x, y, batch_size=16, epochs=10, verbose=0, callbacks=[
      wrapopt.keras.Snapshots(directory / "snapshots", 10), record])
  return model, directory, np.array(record.weights, np.float64)


def two_of(directory):
  return sorted(
      path for path in (directory / "snapshots").iterdir()
      if path.name.endswith((f"-{NARROW}.weights.h5", f"-{WIDE}.weights.h5")))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("width", [0.03, 0.07, 0.15, 0.2, 0.25])
def test_widths_made_afterwards_are_those_that_were_tracked(run, width,
                                                            tmp_path):
  model, directory, weights = run
  snapshots = two_of(directory)
  assert len(snapshots) == 32
  output = tmp_path / "width.weights.h5"
  fit = checkpoints.posthoc(snapshots, output, width)
  plain = loaded(output)
  got, tracked = (np.concatenate([np.ravel(x) for x in of]) for of in (
      [v.numpy() for v in plain.trainable_variables],
      [model.optimizer.average(v, wrapopt.PowerDecay(width)).numpy()
       for v in model.trainable_variables]))
  # The difference is a sum of values of steps, whose weights have this norm and
  # the sum 0: by Cauchy and Schwarz. Float32 averages of 160 steps.
  size = np.linalg.norm(weights_of(wrapopt.PowerDecay(width).gamma, 160, 160))
  bound = 1.05 * fit.error * size * np.linalg.norm(
      weights - weights.mean(axis=0), axis=0)
  rounding = 3 * 160 * 2**-24 * np.abs(weights).max(axis=0) * np.abs(
      fit.weights).sum()
  assert (np.abs(got - tracked) <= bound + rounding).all()
  # Which is much less than what the choice of the width changes.
  narrow = np.concatenate([np.ravel(model.optimizer.average(v, NARROW))
                           for v in model.trainable_variables])
  if width != 0.07:
    assert np.linalg.norm(got - tracked) < (
        0.1 * np.linalg.norm(narrow - tracked))
  # What there is beside the weights is that of the last snapshot.
  for a, b in zip(plain.non_trainable_variables,
                  model.non_trainable_variables):
    np.testing.assert_array_equal(a, b)


def test_a_snapshot_is_a_file_of_the_model(run):
  model, directory, _ = run
  path = directory / "snapshots" / f"snapshot-160-{WIDE}.weights.h5"
  for v, u in zip(model.trainable_variables, loaded(path).trainable_variables):
    np.testing.assert_array_equal(model.optimizer.average(v, WIDE), u)
  with h5py.File(path) as file:
    assert "optimizer" not in file
    note = json.loads(file["wrapopt/snapshot"][()])
  assert note == {"step": 160, "steps": 160, "gamma": WIDE.gamma,
                  "decay": str(WIDE), "dtypes": {}, "others": [
                      f"layers/batch_normalization/vars/{i}" for i in (2, 3)]}


def test_an_earlier_time(run, tmp_path):
  _, directory, _ = run
  checkpoints.posthoc(two_of(directory), tmp_path / "early.weights.h5",
                      gamma=WIDE.gamma, steps=np.int64(80))
  with h5py.File(tmp_path / "early.weights.h5") as got, h5py.File(
      directory / "snapshots" / f"snapshot-80-{WIDE}.weights.h5") as want:
    name = "layers/dense/vars/0"
    np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6)
    assert "wrapopt" not in got


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_as_large(run, tmp_path, dtype):
  model = make_model([NARROW, WIDE])
  fit(model, wrapopt.keras.Snapshots(tmp_path / "snapshots", 4, dtype))
  loaded(tmp_path / "snapshots" / f"snapshot-16-{WIDE}.weights.h5")
  checkpoints.posthoc(tmp_path / "snapshots", tmp_path / "out.weights.h5", 0.1)
  with h5py.File(tmp_path / "out.weights.h5") as file:
    got = file["layers/dense/vars/0"]
    assert got.dtype == np.float32
    want = model.optimizer.average(model.trainable_variables[0], WIDE).numpy()
    np.testing.assert_allclose(
        got, want, rtol=2e-3 if dtype == "float16" else 2**-7, atol=1e-3)


def test_what_does_not_fit_into_float16_is_an_error(tmp_path):
  model = make_model(NARROW)
  model.trainable_variables[0].assign(
      np.full(model.trainable_variables[0].shape, 1e5))
  with pytest.raises(ValueError, match="must be at most 65504 in magnitude"):
    fit(model, wrapopt.keras.Snapshots(tmp_path, 4, "float16"))
  assert not list(tmp_path.iterdir())


def test_an_error_of_the_thread_ends_the_training(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError):
    fit(make_model(NARROW), wrapopt.keras.Snapshots(tmp_path / "file", 4))
  with pytest.raises(ValueError, match="Snapshots needs an optimizer that "
                     "keeps averages, such as .*, got SGD, which model.com"):
    fit(make_model(NARROW, keras.optimizers.SGD()),
        wrapopt.keras.Snapshots(tmp_path, 4))


@pytest.mark.parametrize("wrapper", [
    wrapopt.keras.SWA, wrapopt.keras.Lookahead])
def test_other_averages(wrapper, tmp_path):
  model = make_model(None, wrapper(keras.optimizers.SGD(0.1)))
  snapshots = wrapopt.keras.Snapshots(tmp_path, 16)
  if wrapper is wrapopt.keras.Lookahead:
    with pytest.raises(ValueError, match="got Lookahead, which model.compile"):
      fit(model, snapshots)
    return
  fit(model, snapshots)
  path = tmp_path / "snapshot-16-average.weights.h5"
  with h5py.File(path) as file:
    np.testing.assert_array_equal(
        file["layers/dense/vars/0"],
        model.optimizer.average(model.trainable_variables[0]))
  with pytest.raises(ValueError, match="must be a snapshot of a PowerDecay, "
                     "got a snapshot with the decay None"):
    checkpoints.posthoc(path, tmp_path / "out.weights.h5", 0.1)


def test_averages_of_batch_normalizations_are_in_snapshots(tmp_path):
  model = make_model(None, wrapopt.keras.MovingAverage(
      keras.optimizers.SGD(0.1), NARROW, average_batch_norm=True))
  fit(model, wrapopt.keras.EvaluateWithAverages(),
      wrapopt.keras.Snapshots(tmp_path, 16))
  # After fit the model holds its averages.
  with h5py.File(tmp_path / f"snapshot-16-{NARROW}.weights.h5") as file:
    np.testing.assert_array_equal(
        file["layers/batch_normalization/vars/2"],
        model.layers[1].moving_mean.numpy())


@pytest.mark.parametrize("built", [True, False])
def test_factors_that_keras_merges_have_no_snapshots(tmp_path, built):
  model = make_model(None, wrapopt.keras.MovingAverage(
      keras.optimizers.SGD(0.1), NARROW))
  if built:  # Then, the frozen kernel has an average, too.
    model.optimizer.build(model.trainable_variables)
  layer = next(x for x in model.layers if isinstance(x, keras.layers.Dense))
  layer.enable_lora(2)
  with pytest.raises(ValueError, match="got '.*(lora_kernel_a|kernel)', which "
                     ".* does not save.*merged kernel has no average"):
    fit(model, wrapopt.keras.Snapshots(tmp_path, 16))
  assert not list(tmp_path.iterdir())


def test_snapshots_with_and_without_averages_of_a_variable(tmp_path):
  for step, averaged in (1, ["v", "m"]), (2, ["v"]):
    writer = checkpoints._snapshots.Snapshots(tmp_path / "run", 1, None)
    writer.begin(0)
    x = np.ones(3, np.float32)
    writer.write(lambda path, note: _h5.H5Sink(path + ".h5", note), step,
                 NARROW, step,
                 {name: (x, x.dtype) for name in averaged},
                 {} if "m" in averaged else {"m": x})
    writer.end()
  with pytest.raises(ValueError, match="Variable 'm' must be averaged in all "
                     "inputs or in none, got one of dtype float32 in .*-1-.* "
                     "and one without an average in .*-2-"):
    checkpoints.posthoc(tmp_path / "run", tmp_path / "new" / "out.h5", 0.1)
  assert not (tmp_path / "new").exists()


def test_what_is_no_snapshot(run, tmp_path):
  _, directory, _ = run
  model = make_model(NARROW)
  model.save_weights(tmp_path / "plain.weights.h5")
  out = tmp_path / "out.weights.h5"
  with pytest.raises(ValueError, match="plain.weights.h5 must be a snapshot of "
                     "a PowerDecay, got a checkpoint that is not a"):
    checkpoints.posthoc(tmp_path / "plain.weights.h5", out, 0.1)
  for steps in 200, True, "80":
    with pytest.raises(ValueError, match="`steps` must be a number .* 160, got "
                       f"{steps!r}"):
      checkpoints.posthoc(two_of(directory), out, 0.1, steps=steps)
  with pytest.raises(ValueError, match="`steps` must be at least the steps of"):
    checkpoints.posthoc(two_of(directory), out, 0.1, steps=2)
  with pytest.raises(TypeError, match="one of `relative_width` and `gamma`"):
    checkpoints.posthoc(two_of(directory), out)
  assert not out.exists()


@pytest.mark.parametrize("change", [
    {"others": None}, {"others": ["v0"]}, {"dtypes": {"v0": "float32"}},
    {"steps": "2"}, {"odd": 1}, None])
def test_a_damaged_note(run, tmp_path, change):
  path = tmp_path / "damaged.weights.h5"
  shutil.copy(two_of(run[1])[0], path)
  checkpoints.merge([path, path], tmp_path / "out.weights.h5")
  with h5py.File(path, "r+") as file:
    note = json.loads(file["wrapopt/snapshot"][()])
    file["wrapopt/snapshot"][()] = json.dumps(change and {**note, **change})
  with pytest.raises(OSError, match="damaged.weights.h5 .*'wrapopt/snapshot'"
                     " must describe the snapshot, got "):
    checkpoints.merge([path, path], tmp_path / "out.weights.h5")


# The command


def accuracy(path):
  """What test_sweep evaluates."""
  return loaded(path).evaluate(*digits_like(), verbose=0)[1]


def recalibrated(path):
  """The same, with statistics of batch normalizations that fit the weights."""
  model = loaded(path)
  x, _ = digits_like()
  wrapopt.keras.recalibrate_batch_norm(model, [x])
  before = model.layers[0](x).numpy()
  np.testing.assert_allclose(model.layers[1].moving_mean, before.mean(0),
                             rtol=1e-4, atol=1e-5)
  return model.evaluate(*digits_like(), verbose=0)[1]


@pytest.mark.parametrize("evaluate", [accuracy, recalibrated])
def test_sweep(run, tmp_path, capsys, evaluate):
  _, directory, _ = run
  command.main(["posthoc", *map(str, two_of(directory)),
                "--sweep", "0.05", "0.2",
                "--evaluate", f"snapshots_test:{evaluate.__name__}", "--quiet",
                "--output", str(tmp_path / "sweep")])
  with open(tmp_path / "sweep" / "results.json", encoding="utf-8") as file:
    rows = json.load(file)
  assert [row["relative_width"] for row in rows] == [0.05, 0.2]
  assert all(0.5 < row["quality"] <= 1 for row in rows)
  assert rows[0]["error"] < 1e-6 < rows[1]["error"]
  assert (tmp_path / "sweep" / "quality.png").stat().st_size > 1000
  printed = capsys.readouterr()
  assert "0.05" in printed.out
  assert (" has moving statistics of batch normalizations, 2 variables such as "
          "'layers/batch_normalization/vars/3'. They do not fit averaged "
          f"weights. The function snapshots_test:{evaluate.__name__} must "
          "recalibrate them before it evaluates" in printed.err)
  assert not list((directory / "snapshots").glob(".*"))


def test_a_sweep_that_fails_leaves_nothing(run, tmp_path, capsys):
  _, directory, _ = run
  for inputs, widths, error in [
      ([tmp_path / "none"], ["0.05"], "There is no checkpoint '.*none'"),
      (two_of(directory), ["0.05", "2"], "relative_width"),
      (two_of(directory), ["0.05"], "no such data")]:
    with pytest.raises(SystemExit, match=error):
      command.main(["posthoc", *map(str, inputs), "--sweep", *widths,
                    "--evaluate", "snapshots_test:failing", "--quiet",
                    "--output", str(tmp_path / "a" / "sweep")])
    assert not (tmp_path / "a").exists()
  with pytest.raises(SystemExit):
    command.main(["posthoc", *map(str, two_of(directory)), "--sweep",
                  "--evaluate", "snapshots_test:failing", "--output", ""])
  assert "--output: must be a directory, got ''" in capsys.readouterr().err


def failing(path):
  """What the test above evaluates."""
  raise OSError("no such data")


class Norms(keras.Model):
  """Batch normalizations under names of attributes and of classes."""

  def __init__(self):
    super().__init__()
    self.first = keras.layers.BatchNormalization()
    self.second = keras.layers.BatchNormalization(name="stem_bn", scale=False)
    self.rest = [keras.layers.BatchNormalization(name="x", center=False),
                 keras.layers.LayerNormalization(), keras.layers.Dense(2)]

  def call(self, x):
    for layer in self.first, self.second, *self.rest:
      x = layer(x)
    return x


def test_moving_statistics_are_found(tmp_path, capsys):
  model = Norms()
  model(np.zeros((2, 3), np.float32))
  paths = [tmp_path / "a.weights.h5", tmp_path / "a.keras", tmp_path / "a"]
  model.save_weights(paths[0])
  model.compile("adam", "mse")
  model.optimizer.build(model.trainable_variables)
  model.save(paths[1])
  tf.train.Checkpoint(model=model, opt=model.optimizer).write(str(paths[2]))
  for path in paths:
    output = path.with_name("mean." + path.name)
    command.main(["lawa", str(path), "--window", "1", "--quiet", "--output",
                  str(output)])
    source = _formats.open_source(str(path))
    names = source.moving_statistics()
    source.close()
    assert (f"note: {output} has moving statistics of batch normalizations, "
            f"{len(names)} variables such as '{names[-1]}'. They do not fit "
            "averaged weights. Load the output into the model, then compute "
            "them again: wrapopt.keras.recalibrate") in capsys.readouterr().err
    if path.suffix:
      assert names == ["first/vars/2", "first/vars/3", *(
          f"layers/batch_normalization_{k}/vars/{i}"
          for k in (1, 2) for i in (1, 2))]
    else:  # Keras does not track lists there.
      assert names == [
          f"model/{layer}/moving_{which}/.ATTRIBUTES/VARIABLE_VALUE"
          for layer in ("first", "second") for which in ("mean", "variance")]
  keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save_weights(
      tmp_path / "plain.weights.h5")
  command.main(["lawa", str(tmp_path / "plain.weights.h5"), "--window", "1",
                "--quiet", "--output", str(tmp_path / "out.weights.h5")])
  assert "note" not in capsys.readouterr().err


def test_command(run, tmp_path, capsys):
  _, directory, _ = run
  paths = [str(p) for p in two_of(directory)]
  for arguments in (
      ["merge", *paths[:2], "--weights", "1", "3"], ["ema", *paths[:3]],
      ["lawa", *paths, "--window", "3"],
      ["posthoc", *paths, "--relative-width", "0.08"]):
    output = tmp_path / f"{arguments[0]}.weights.h5"
    command.main([*arguments, "--quiet", "--output", str(output)])
    assert output.exists()
  assert ("of 32 snapshots, error of the profile 0.30%" in
          capsys.readouterr().out)
  command.main(["list", paths[-1], str(tmp_path / "ema.weights.h5"),
                "--variables"])
  out = capsys.readouterr().out
  assert "snapshot of step 90, decay power_6.9372, 90 steps averaged" in out
  assert "averaged: 6 variables, 227 numbers of float32" in out, out
  assert "averaged  layers/dense/vars/0  float32 [8, 16]" in out
  with pytest.raises(SystemExit, match="error: The output .* exists"):
    command.main(["merge", *paths[:2], "--quiet",
                  "--output", str(tmp_path / "ema.weights.h5")])
  with pytest.raises(SystemExit):
    command.main(["posthoc", *paths, "--sweep", "--output", "x"])
  assert "--sweep and --evaluate must be given" in capsys.readouterr().err


# Kills


@pytest.mark.parametrize("sizes", [(1, 1 << 20), (1 << 20, 1)])
def test_whenever_it_is_killed_all_that_is_there_is_whole(
    tmp_path, monkeypatch, sizes):
  seen = set()

  def watch(where, name):
    function = getattr(where, name)

    def watched(*args, **kwargs):
      seen.update(check_whole(tmp_path, 2))
      result = function(*args, **kwargs)
      seen.update(check_whole(tmp_path, 2))
      return result

    monkeypatch.setattr(where, name, watched)

  for where, name in (
      (_files, "to_disk"), (os, "replace"), (os, "unlink"),
      *((sink, name) for sink in (_h5.H5Sink, _tensorflow.TensorFlowSink)
        for name in ("write", "_finish"))):
    watch(where, name)
  # The second is written in place of the first, in as many data files or not.
  for steps, size in enumerate(sizes, 1):
    monkeypatch.setattr(_tensorflow, "_DATA_FILE", size)
    value = np.full(3, steps, np.float32)
    for make in (
        lambda path, note: _h5.H5Sink(path + ".h5", note),
        _tensorflow.TensorFlowSink):
      writer = checkpoints._snapshots.Snapshots(tmp_path, 1, None)
      writer.begin(0)
      writer.write(make, 7, None, steps,
                   {"a": (value, value.dtype), "b": (value, value.dtype)})
      writer.end()
  assert seen == {(kind, steps) for kind in ("HDF5", "TensorFlow")
                  for steps in (1, 2)}
  count = 3 if sizes[1] == 1 else 1
  assert {name.removeprefix("snapshot-7-average.")
          for name in os.listdir(tmp_path)} == {"h5", "index", *(
              f"data-{i:05d}-of-{count:05d}" for i in range(count))}


def test_a_kill_leaves_whole_snapshots_only(tmp_path):
  # Many kills: snapshot_kills_test.py.
  directory = kill_in_a_loop(tmp_path / "snapshots", 1, 0.3)
  # The next run removes what a killed one has not finished.
  (directory / ".snapshot-7-x.partial").mkdir()
  checkpoints._snapshots.Snapshots(directory, 1, None).begin(0)
  assert not list(directory.glob(".*"))
