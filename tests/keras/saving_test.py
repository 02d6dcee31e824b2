"""Files and checkpoints of Keras models with averages."""

import ast
import contextlib
import copy
import functools
import os
import warnings

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import arrays
from arrays import assert_same, values
import keras_versions
from model_files import load_by, save_by
from processes import printed_by
import wrapopt.keras
from wrapopt.keras import Lookahead
from wrapopt.keras import MovingAverage
from wrapopt.keras import SWA
from wrapopt.keras._steps import _views

optimizers = keras.optimizers


@pytest.fixture(autouse=True)
def _seed_and_warnings():
  keras.utils.set_random_seed(0)
  with warnings.catch_warnings():
    # As Keras tells of what it could not load.
    warnings.simplefilter("error", UserWarning)
    yield


def data():
  x = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
  return x, x.sum(1, keepdims=True)


def make(optimizer=None, dtype=None, built=True):
  # Names that Keras makes differ from one model to the next.
  model = keras.Sequential([
      keras.Input((3,)), keras.layers.Dense(4, "tanh", dtype=dtype),
      keras.layers.Dense(4, dtype=dtype), keras.layers.Dense(1, dtype=dtype)])
  if optimizer is not None:
    model.compile(optimizer, loss="mse", jit_compile=False)
    if built:
      model.optimizer.build(model.trainable_variables)
  return model


not_built = functools.partial(make, built=False)


def train(model, steps=3):
  for _ in range(steps):
    model.train_on_batch(*data())
  return model


# Steps are of 1e-3.
assert_close = functools.partial(arrays.assert_close, rtol=0, atol=1e-6)


def averages(model, optimizer=None, **kwargs):
  optimizer = optimizer or model.optimizer
  return [optimizer.average(v, **kwargs).numpy()
          for v in model.trainable_variables]


def everything(model):
  """All that a step changes or reads."""
  opts = [model.optimizer, *_views.within(model.optimizer)]
  return values([*model.weights, *(v for opt in opts for v in opt.variables),
                 *state(model.optimizer)])


KINDS = {
    "moving_average": lambda: MovingAverage("adam", [0.9, 0.5]),
    "counted": lambda: MovingAverage("adam", [
        wrapopt.PowerDecay(gamma=1), wrapopt.HalfLife(fraction=0.3), 0.9],
                                     update_every=2),
    "late": lambda: MovingAverage("adam", 0.5, start_step=4),
    "swa": lambda: SWA("adam", average_period=2),
    "lookahead": lambda: Lookahead("adam", 2),
    "nested": lambda: Lookahead(MovingAverage(SWA("adam", 0, 2), 0.5), 2),
    "loss_scale_around": lambda: optimizers.LossScaleOptimizer(
        MovingAverage("adam", 0.5)),
    "loss_scale_inside": lambda: MovingAverage(
        optimizers.LossScaleOptimizer(optimizers.Adam()), 0.5),
    "loss_scale_between": lambda: Lookahead(
        optimizers.LossScaleOptimizer(MovingAverage("adam", 0.5)), 2),
    "multi_inside": lambda: MovingAverage(
        optimizers.MultiOptimizer(optimizers.OptimizerMap(
            optimizers.Adam(), {".*bias": optimizers.SGD(0.1, 0.9)})), 0.5),
    "schedule": lambda: MovingAverage(optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), 0.5),
    "accumulation": lambda: MovingAverage(
        optimizers.Adam(gradient_accumulation_steps=2), 0.5),
}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", keras_versions.cases(KINDS))
def test_files_and_checkpoints_round_trip(kind, tmp_path):
  model = train(make(KINDS[kind]()))
  want = everything(model)
  config = model.optimizer.get_config()
  given = copy.deepcopy(config)
  assert type(model.optimizer).from_config(given).get_config() == config
  # Keras's own take apart what they are given.
  assert given == config or kind == "loss_scale_around"
  model.save(tmp_path / "model.keras")
  loaded = keras.models.load_model(tmp_path / "model.keras")
  assert_same(everything(loaded), want)
  assert loaded.optimizer.get_config() == config
  model.save_weights(tmp_path / "model.weights.h5")
  with h5py.File(tmp_path / "model.weights.h5") as f:
    # Of Keras's wrapper: ours have the structure of the optimizer inside.
    names = []
    f.visit(names.append)
    assert any("inner_optimizer" in name for name in names) == (
        kind == "loss_scale_around")
  other = make(KINDS[kind]())
  other.load_weights(tmp_path / "model.weights.h5")
  assert_same(everything(other), want)
  if kind == "multi_inside":
    # A checkpoint of Keras's MultiOptimizer has no state of its optimizers.
    return
  path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(
      str(tmp_path / "ckpt"))
  third = make(KINDS[kind]())
  tf.train.Checkpoint(model=third, optimizer=third.optimizer).read(
      path).assert_consumed()
  assert_same(everything(third), want)
  # Before anything is built.
  fourth = make()
  optimizer = KINDS[kind]()
  status = tf.train.Checkpoint(model=fourth, optimizer=optimizer).read(path)
  fourth.compile(optimizer, loss="mse", jit_compile=False)
  fourth.optimizer.build(fourth.trainable_variables)
  status.assert_consumed()
  assert_same(everything(fourth), want)
  # All go on alike.
  want = everything(train(model))
  for m in loaded, other, third, fourth:
    assert_same(everything(train(m)), want)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("around", [lambda opt: opt,
                                    optimizers.LossScaleOptimizer],
                         ids=["bare", "loss_scale"])
@pytest.mark.parametrize("way", ["weights", "checkpoint"])
def test_to_a_run_with_averages_and_back(way, around, tmp_path):
  path = str(tmp_path / "run.weights.h5")
  save, load = (functools.partial(f, way, path) for f in (save_by, load_by))
  bare = train(make(around(optimizers.Adam())))
  save(bare)
  averaging = make(around(MovingAverage(optimizers.Adam(), 0.5)))
  opt = averaging.optimizer
  if not isinstance(opt, MovingAverage):
    opt = opt.inner_optimizer
  load(averaging)
  if way == "checkpoint":
    opt.seed_averages()
  assert_same(values(averaging.weights), values(bare.weights))
  assert_same(averages(averaging, opt), values(bare.trainable_variables))
  # The steps are as in the bare run, up to what the one-pass op rounds.
  train(bare)
  train(averaging)
  assert_close(values(averaging.weights), values(bare.weights))
  save(averaging)
  back = make(around(optimizers.Adam()))
  load(back)
  assert_same(values(back.weights), values(averaging.weights))
  train(back)
  train(averaging)
  assert_close(values(back.weights), values(averaging.weights))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_variables(dtype, tmp_path):
  model = train(make(MovingAverage("sgd", 0.9), dtype=dtype))
  want = everything(model)
  assert all(s.dtype == np.float32 for s in averages(model))
  model.save(tmp_path / "model.keras")
  assert_same(everything(keras.models.load_model(tmp_path / "model.keras")),
              want)
  with model.optimizer.averaged_weights(model):
    inside = values(model.weights)
    model.save(tmp_path / "averaged.keras")
  assert_same(inside, [s.astype(v.dtype) for s, v in zip(
      averages(model), inside)])
  loaded = keras.models.load_model(tmp_path / "averaged.keras")
  assert_same(values(loaded.weights), inside)
  assert_same(everything(model), want)


@pytest.mark.by_day(0)
def test_one_more_decay_starts_at_the_weights(tmp_path):
  path = tmp_path / "run.weights.h5"
  model = train(make(MovingAverage("adam", 0.9)))
  model.save_weights(path)
  other = make(MovingAverage("adam", [0.9, 0.5]))
  other.load_weights(path)
  assert_same(averages(other), averages(model))
  assert_same(averages(other, decay=0.5), values(model.trainable_variables))


def test_another_model(tmp_path):
  path = tmp_path / "run.weights.h5"
  whole = train(make(MovingAverage("sgd", 0.9)))
  whole.save_weights(path)
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always", UserWarning)
    model = make(MovingAverage("sgd", 0.9))
    model.layers[0].trainable = False
    model.compile(MovingAverage("sgd", 0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
  assert all("Skipping variable loading" in str(w.message) for w in found)
  assert_same(averages(model), averages(whole)[2:])
  # A layer of another shape, where that is asked for.
  keras.utils.set_random_seed(1)
  model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4),
                            keras.layers.Dense(4), keras.layers.Dense(2)])
  model.compile(MovingAverage("sgd", 0.9), loss="mse")
  model.optimizer.build(model.trainable_variables)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    model.load_weights(path, skip_mismatch=True)
    found = averages(model)
  assert_same(found[4:], values(model.trainable_variables)[4:])


def test_two_variables_of_one_path(tmp_path):
  def run():
    variables = [keras.Variable(np.float32([i]), name="v") for i in range(2)]
    opt = MovingAverage(optimizers.SGD(1.0), 0.5)
    opt.build(variables)
    return variables, opt

  variables, opt = run()
  opt.apply([tf.ones([1]), -tf.ones([1])], variables)
  path = tf.train.Checkpoint(opt=opt).write(str(tmp_path / "ckpt"))
  others, restored = run()
  tf.train.Checkpoint(opt=restored).read(path).assert_consumed()
  assert [float(restored.average(v)[0]) for v in others] == [-0.5, 1.5]


@pytest.mark.by_day(0)
def test_saving_inside_averaged_weights(tmp_path):
  model = train(make(MovingAverage("adam", 0.5)))
  want, average = everything(model), averages(model)
  raw = values(model.weights)
  whole, plain = tmp_path / "averaged.keras", tmp_path / "averaged.weights.h5"
  with model.optimizer.averaged_weights():
    model.save(whole)
    model.save_weights(plain)
    with pytest.raises(ValueError, match="load_weights.. must not be called"):
      model.load_weights(plain)
  assert_same(everything(model), want)
  loaded = keras.models.load_model(whole)
  assert_same(values(loaded.weights), average)
  assert_same(averages(loaded), average)
  bare = make("adam")
  bare.load_weights(plain)
  assert_same(values(bare.weights), average)
  # Those of a part of the model alone.
  with model.optimizer.averaged_weights(model.layers[0]):
    model.save_weights(plain)
  loaded.load_weights(plain)
  assert_same(values(loaded.weights), average[:2] + raw[2:])
  assert_same(averages(loaded), average)


PLAIN = """
import sys
sys.modules["wrapopt"] = None
import keras, numpy as np, tensorflow as tf
weights, exported, x, wants = sys.argv[1:]
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"),
                          keras.layers.Dense(4), keras.layers.Dense(1)])
model.load_weights(weights)
x, want = np.load(x), np.load(wants)
np.testing.assert_allclose(model(x), want, rtol=1e-5)
loaded = tf.saved_model.load(exported)
np.testing.assert_allclose(loaded.serve(x), want, rtol=1e-5)
"""


def test_plain_keras_loads_exported_averages(tmp_path):
  model = train(make(MovingAverage("adam", 0.5)))
  x = data()[0]
  paths = [str(tmp_path / name) for name in (
      "averaged.weights.h5", "exported", "x.npy", "want.npy")]
  raw = np.array(model(x))
  with model.optimizer.averaged_weights():
    model.save_weights(paths[0])
    model.export(paths[1], verbose=False)
    want = np.array(model(x))
  assert np.abs(want - raw).max() > 1e-4
  np.save(paths[2], x)
  np.save(paths[3], want)
  printed_by("-c", PLAIN, *paths)


@pytest.mark.by_day(0)
def test_copies():
  opt = copy.deepcopy(MovingAverage("adam", 0.5))
  assert opt.get_config()["average_decay"] == 0.5
  model = train(make(MovingAverage("adam", 0.5)))
  other = copy.deepcopy(model)
  assert_same(everything(other), everything(model))
  train(other)
  assert_same(averages(train(model)), averages(other))


def keys_that_end(file, ending):
  found = []
  file.visit(found.append)
  return [key for key in found if key.endswith(ending)]


def without_owners(path):
  """A file of Keras without what tells whose the averages are."""
  with h5py.File(path, "r+") as file:
    for key in keys_that_end(file, ".variables"):
      del file[key]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("way", ["model", "weights", "checkpoint"])
def test_files_of_averages_that_have_not_begun(way, tmp_path):
  path = str(tmp_path / ("m.keras" if way == "model" else "m.weights.h5"))
  model = make(MovingAverage("sgd", 0.5))
  if way == "model":
    model.save(path)
    model = keras.models.load_model(path)
  else:
    save_by(way, path, model)
    load_by(way, path, model)
  before = [v + 100 for v in values(model.weights)]
  model.set_weights(before)
  assert_same(averages(model), before)
  train(model, 1)
  for v, s, w in zip(values(model.weights), averages(model), before):
    np.testing.assert_allclose(s, (v + w) / 2, rtol=1e-6)


@pytest.mark.parametrize("wrapper", [
    lambda: MovingAverage(optimizers.SGD(1.0), 0.5),
    lambda: Lookahead(optimizers.SGD(1.0), 8),
    lambda: SWA(optimizers.SGD(1.0))])
def test_they_begin_again_after_a_read_of_a_state_of_before(wrapper, tmp_path):
  v = keras.Variable([4.0])
  opt = wrapper()
  opt.build([v])
  path = str(tmp_path / "checkpoint")
  state = tf.train.Checkpoint(v=v.value, opt=opt)
  average = (opt.slow_weights if isinstance(opt, Lookahead) else opt.average)
  step = lambda: opt.apply([tf.constant([1.0])], [v])
  state.write(path)
  want = []
  for restored in (False, True):
    if restored:
      state.read(path)
      assert average(v).numpy() == [4]
    for _ in range(2):
      step()
      want.append(average(v).numpy().item())
  assert want[:2] == want[2:]
  assert want[1] != v.numpy().item()


@keras.saving.register_keras_serializable("tests")
def seven():
  return 7.0


@pytest.mark.parametrize("make_count", [
    lambda: 8, lambda: np.float32(8), lambda: np.array(8.0), lambda: seven,
    lambda: tf.constant(8.0)], ids=["int", "float32", "array", "function",
                                    "tensor"])
def test_num_updates_in_a_file(make_count, tmp_path):
  given, path = make_count(), tmp_path / "model.keras"
  model = train(make(MovingAverage("sgd", 0.9, num_updates=given)))
  model.save(path)
  loaded = keras.models.load_model(path)
  assert loaded.optimizer._num_updates == given
  assert_same(everything(train(loaded)), everything(train(model)))


@pytest.mark.parametrize("make_count", [
    lambda: tf.Variable(8.0), lambda: keras.Variable(8.0), lambda: lambda: 8.0,
    lambda: tf.Variable(8.0).read_value],
                         ids=["tf", "keras", "lambda", "method"])
def test_num_updates_that_no_file_can_hold(make_count, tmp_path):
  given = make_count()
  model = train(make(MovingAverage("sgd", 0.9, num_updates=given)))
  with pytest.raises(ValueError, match=(
      "`num_updates` of a MovingAverage that is saved must be a number, .* got "
      ".*save_weights")):
    model.save(tmp_path / "model.keras")
  path = tmp_path / "model.weights.h5"
  model.save_weights(path)
  other = make(MovingAverage("sgd", 0.9, num_updates=given))
  other.load_weights(path)
  assert_same(everything(other), everything(model))


def test_a_copy_of_a_model_has_no_averages():
  model = train(make(MovingAverage("sgd", 0.5)))
  with pytest.raises(ValueError, match="`model` must have variables that this "
                     "MovingAverage averages, got '.*', which has none"):
    with model.optimizer.averaged_weights(keras.models.clone_model(model)):
      pass
  # Frozen layers have theirs.
  average = averages(model)
  model.layers[0].trainable = False
  with model.optimizer.averaged_weights(model):
    assert_same(values(model.weights), average)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("way", ["weights", "checkpoint"])
def test_averages_are_known_by_their_decays(way, tmp_path):
  path = str(tmp_path / "run.weights.h5")
  save = functools.partial(save_by, way, path)

  def load(model):
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", UserWarning)
      load_by(way, path, model)
    return model

  model = train(make(MovingAverage("sgd", [0.9, 0.5])))
  save(model)
  other = load(make(MovingAverage("sgd", [0.5, 0.9])))
  for decay in (0.9, 0.5):
    assert_same(averages(other, decay=decay), averages(model, decay=decay))
  one = load(make(MovingAverage("sgd", 0.5)))
  with (pytest.warns(UserWarning, match="checkpoint has averages named 'average"
                     "_0.9', which the optimizer lacks") if way == "checkpoint"
        else contextlib.nullcontext()):
    assert_same(averages(one), averages(model, decay=0.5))
  save(one)
  two = load(make(MovingAverage("sgd", [0.9, 0.5])))
  assert_same(averages(two, decay=0.5), averages(model, decay=0.5))
  assert_same(averages(two), values(model.trainable_variables))


def test_averages_that_are_not_loaded(tmp_path):
  path = tmp_path / "run.weights.h5"
  train(make(MovingAverage("sgd", [0.9, 0.5]))).save_weights(path)
  with pytest.warns(UserWarning, match=(
      "The file has averages named 'average_0.5', which the optimizer lacks. "
      "They are not loaded")):
    make(MovingAverage("sgd", 0.9)).load_weights(path)


UNBUILT = {
    **{kind: KINDS[kind] for kind in ("nested", "loss_scale_between")},
    "primal_average": lambda: wrapopt.keras.PrimalAverage("adam"),
    "schedule_free": lambda: wrapopt.keras.ScheduleFree("adam"),
    "counted": lambda: MovingAverage(SWA("adam", 0, 2), wrapopt.PowerDecay(
        gamma=1), update_every=2),
    "gate": lambda: wrapopt.keras.DropStaleGradient(
        MovingAverage("adam", 0.5), 1,
        policy=wrapopt.DelayCompensation(adaptive=True)),
    "multi_around": lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(
        MovingAverage("adam", 0.5), {
            ".*bias": SWA("sgd", 0, 2), "nothing": Lookahead("sgd")})),
}


def load_before_build(model, path):
  with warnings.catch_warnings():
    # Keras does not load the state of its own optimizer.
    warnings.filterwarnings("ignore", "Skipping variable loading")
    model.load_weights(path)


def state(opt):
  """The averages and counts of all wrappers."""
  wrappers = [x for x in [opt, *_views.within(opt)] if hasattr(x, "_store")]
  return [x for w in wrappers for x in [
      *(average for average, _ in w._store.state.pairs()),
      *(count for count, _ in w._store.state._counts.values())]]


@pytest.mark.parametrize("kind", keras_versions.cases(UNBUILT))
def test_a_file_before_the_optimizer_is_built(kind, tmp_path):
  path = str(tmp_path / "run.weights.h5")
  another = str(tmp_path / "another.weights.h5")
  model = make(UNBUILT[kind]())
  train(model, 2 if kind != "gate" else 0)
  model.save_weights(another)
  train(model, 3 if kind != "gate" else 0)
  for i, x in enumerate(state(model.optimizer)):
    x.assign(x + (i + 1) * (kind == "gate"))
  model.save_weights(path)
  want = values(state(model.optimizer))
  # Another one before, and one that is saved without a build.
  first = not_built(UNBUILT[kind]())
  load_before_build(first, another)
  load_before_build(first, path)
  os.remove(path)
  first.save_weights(path)
  second = not_built(UNBUILT[kind]())
  load_before_build(second, path)
  checkpoint = tf.train.Checkpoint(optimizer=second.optimizer).write(path)
  third = not_built(UNBUILT[kind]())
  tf.train.Checkpoint(optimizer=third.optimizer).read(checkpoint)
  for m in first, second, third:
    if m is third and kind.startswith("multi"):
      continue  # Keras's checkpoints do not have its optimizers.
    m.optimizer.build(m.trainable_variables)
    with warnings.catch_warnings():
      warnings.filterwarnings("ignore", ".* are taken in their order")
      for opt in [m.optimizer, *_views.within(m.optimizer)]:
        if hasattr(opt, "_store"):
          opt._store.seed_unbegun()
    if kind == "counted":
      # Keras has lost the count of steps: the first step is that long ago.
      assert m.optimizer.average_steps() == model.optimizer.average_steps()
      next(iter(m.optimizer._store.counts.values())).assign(0)
    assert_same(values(state(m.optimizer)), want)


def test_a_file_before_a_build_that_it_does_not_fit(tmp_path):
  path = str(tmp_path / "run.weights.h5")
  model = train(make(MovingAverage("sgd", [0.9, 0.5])))
  model.save_weights(path)
  other = not_built(MovingAverage("sgd", 0.9))
  load_before_build(other, path)
  with pytest.warns(UserWarning, match="'average_0.5', which the optimizer la"):
    other.optimizer.build(other.trainable_variables)
  assert_same(averages(other), averages(model))
  other = not_built(MovingAverage("sgd", 0.9))
  other.layers[0].trainable = False
  train(make(MovingAverage("sgd", 0.9))).save_weights(path)
  without_owners(path)
  load_before_build(other, path)
  with pytest.warns(UserWarning, match="must have 4 averages .* got 6"):
    other.optimizer.build(other.trainable_variables)
  assert_same(averages(other), values(other.trainable_variables))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("built", [True, False])
def test_a_checkpoint_of_an_earlier_version_after_another(built, tmp_path,
                                                          monkeypatch):
  """It does not say whose its averages are; the one before does."""
  layers = lambda: [dense(), dense(), dense()]
  first = tf.train.Checkpoint(opt=fitted(
      stack(layers(), frozen=[0])).optimizer).write(str(tmp_path / "1"))
  model = fitted(stack(layers()))
  state = model.optimizer._store.state
  monkeypatch.setattr(
      state, "_trackable_children", lambda *args, **kwargs: {
          name: x for name, x in type(state)._trackable_children(
              state, *args, **kwargs).items() if name != "variables"},
      raising=False)
  second = tf.train.Checkpoint(model=model).write(str(tmp_path / "2"))
  other = stack(layers())
  if built:
    other.optimizer.build(other.trainable_variables)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    tf.train.Checkpoint(opt=other.optimizer).read(first)
    tf.train.Checkpoint(model=other).read(second)
    other.optimizer.build(other.trainable_variables)
    assert_same(averages(other), averages(model))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("around", [
    optimizers.LossScaleOptimizer,
    lambda opt: optimizers.MultiOptimizer(optimizers.OptimizerMap(opt, {
        ".*bias": optimizers.SGD(0.1)}))], ids=["loss_scale", "multi"])
def test_an_optimizer_around_saves_what_it_saves_of_a_bare_one(around,
                                                               tmp_path):
  found = []
  for inner in optimizers.Adam(), MovingAverage(optimizers.Adam(), 0.5):
    path = tmp_path / "run.weights.h5"
    train(make(around(inner))).save_weights(path)
    with h5py.File(path) as file:
      found.append({key: value.shape for key, value in
                    file["optimizer/vars"].items()})
  assert found[0] == found[1]


@pytest.mark.parametrize("built", [True, False])
def test_files_and_checkpoints_in_turn(built, tmp_path):
  path = str(tmp_path / "run.weights.h5")
  model = train(make(MovingAverage("sgd", 0.5)))
  model.save_weights(path)
  file = averages(model)
  checkpoint = tf.train.Checkpoint(model=train(model)).write(path + "1")
  lacks = tf.train.Checkpoint(model=make(MovingAverage("sgd", 0.9))).write(
      path + "2")
  found = {}
  for order in [(path, checkpoint), (checkpoint, path), (lacks, path)]:
    other = make(MovingAverage("sgd", 0.5), built=built)
    for name in order:
      if name == path:
        load_before_build(other, path)
      else:
        tf.train.Checkpoint(model=other).read(name)
    other.optimizer.build(other.trainable_variables)
    found[order] = averages(other)
  assert_same(found[path, checkpoint], averages(model))
  assert_same(found[checkpoint, path], file)
  assert_same(found[lacks, path], file)


# Whose the averages in a file are.

OWNERS = {
    "average": lambda: MovingAverage("sgd", 0.9),
    "bema": lambda: MovingAverage("sgd", wrapopt.BEMA(burn_in=0)),
    "swa": lambda: SWA("sgd", 0, 1),
    "lookahead": lambda: Lookahead("sgd", 5),
    "schedule_free": lambda: wrapopt.keras.ScheduleFree("sgd"),
    "primal_average": lambda: wrapopt.keras.PrimalAverage("sgd"),
}


def rows(model):
  """The averages of each trained variable: a list of lists of arrays."""
  opt = model.optimizer
  opt._store.seed_unbegun()
  of = {id(v): [] for v in model.trainable_variables}
  for s, v in opt._store.state.pairs():
    if not hasattr(s, "starts_at"):  # No share, which is a number.
      of[id(v)].append(s.numpy())
  return [of[id(v)] for v in model.trainable_variables]


def dense(name=None):
  return keras.layers.Dense(3, name=name)


class Scaled(keras.layers.Layer):
  """A scalar variable, whose value alone tells whose an average is."""

  def build(self, shape):
    self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

  def call(self, x):
    return self.scale * x


def stack(layers, name=None, frozen=(), kind="average"):
  model = keras.Sequential([keras.Input((3,)), *layers], name=name)
  for i in frozen:
    model.layers[i].trainable = False
  model.compile(OWNERS[kind](), "mse", jit_compile=False)
  return model


class Parts(keras.Model):
  """Keras loads its optimizer before one of its parts, and after another."""

  def __init__(self, layers, kind):
    super().__init__()
    self.a, self.z = layers
    self(np.zeros((1, 3), np.float32))
    self.compile(OWNERS[kind](), "mse", jit_compile=False)

  def call(self, x):
    return self.z(self.a(x))


def fitted(model):
  x = data()[0]
  for _ in range(3):
    model.train_on_batch(x, x[:, ::-1])
  return model


def moved(of, to, way, tmp_path):
  """Saves a model and loads it into another one; returns the warnings."""
  path = str(tmp_path / "moved.weights.h5")
  built = way.endswith("built")
  optimizer = to.optimizer
  if built:
    optimizer.build(to.trainable_variables)
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always", UserWarning)
    if way.startswith("weights"):
      of.save_weights(path)
      to.load_weights(path)
    else:
      tf.train.Checkpoint(model=of).read(
          tf.train.Checkpoint(model=of).write(path))
      tf.train.Checkpoint(model=to).read(path)
    optimizer.build(to.trainable_variables)
    optimizer._store.seed_unbegun()
  return [str(w.message) for w in found if w.category is UserWarning
          if "Skipping variable loading" not in str(w.message)]


WAYS = ["weights", "weights built", "checkpoint", "checkpoint built"]


def seeded(model):
  return [[v] * len(row) for v, row in zip(
      values(model.trainable_variables), rows(model))]


# Each kind and each way, and two kinds in each way.
KINDS_AND_WAYS = [(kind, way) for kind in OWNERS for way in WAYS if
                  way == "weights" or kind in ("average", "primal_average")]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind,way", KINDS_AND_WAYS)
@pytest.mark.parametrize("named", [True, False])
def test_averages_of_one_tower_are_not_the_others(named, way, kind, tmp_path):
  def program(trained):
    keras.utils.clear_session(free_memory=False)
    x = keras.Input((3,))
    towers = [[dense(name and f"{name}_{i}") for i in range(2)]
              for name in (("users", "items") if named else (None, None))]
    for layer in towers[not trained]:
      layer.trainable = False
    model = keras.Model(x, towers[0][1](towers[0][0](x)) +
                        towers[1][1](towers[1][0](x)))
    model.compile(OWNERS[kind](), "mse", jit_compile=False)
    return model

  of, to = fitted(program(0)), program(1)
  told = moved(of, to, way, tmp_path)
  assert any("has no average named" in text for text in told)
  assert_same(rows(to), seeded(to))
  # The next step is that of averages which begin.
  fitted(to)
  assert any(not np.array_equal(s, v) for s, v in zip(rows(to), seeded(to)))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind,way", KINDS_AND_WAYS)
@pytest.mark.parametrize("is_class", [True, False])
def test_a_model_that_is_built_again(is_class, way, kind, tmp_path):
  make_model = ((lambda: Parts([dense(), dense()], kind)) if is_class else
                lambda: stack([dense(), dense()], kind=kind))
  keras.utils.clear_session(free_memory=False)
  dense()  # Such as one of a part of the program that ran before.
  of = fitted(make_model())
  want = rows(of)
  assert not moved(of, again := make_model(), way, tmp_path)
  assert_same(rows(again), want)
  # Before the first step, all biases are 0.
  new = make_model()
  new.optimizer.build(new.trainable_variables)
  assert not moved(new, make_model(), way, tmp_path)
  # Its second layer has the path of the first one.
  keras.utils.clear_session(free_memory=False)
  assert not moved(of, again := make_model(), way, tmp_path)
  assert_same(rows(again), want)


# A checkpoint of Keras also has the list of trained variables of the optimizer,
# by which TensorFlow restores the weights themselves.
@pytest.mark.by_day(1)
@pytest.mark.parametrize("way", WAYS[:-1])
def test_blocks_that_overlap_in_part(way, tmp_path):
  make_model = lambda frozen: stack(
      [dense("block_1"), dense("block_2"), dense("block_3")], "blocks", frozen)
  of, to = fitted(make_model([2])), make_model([0])
  told = moved(of, to, way, tmp_path)
  assert any("of 'blocks/block_3/kernel' and 1 more, but of "
             "'blocks/block_1/kernel' and 1 more" in text for text in told)
  assert_same(rows(to), rows(of)[2:] + seeded(to)[2:])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("way", WAYS)
def test_layers_of_other_names(way, tmp_path):
  of = fitted(stack([dense("a"), Scaled(name="c"), dense("b")], "one"))
  to = stack([dense("first"), Scaled(name="third"), dense("second")], "two")
  told = moved(of, to, way, tmp_path)
  assert_same(rows(to), rows(of))
  assert not told or way != "weights"


@pytest.mark.parametrize("built", [True, False])
def test_a_new_head(built, tmp_path):
  path = str(tmp_path / "run.weights.h5")
  of = fitted(stack([dense("body"), dense("head")], "m"))
  of.save_weights(path)
  to = stack([dense("body"), dense("head")], "m")
  if built:
    to.optimizer.build(to.trainable_variables)
  new = values(to.layers[1].weights)
  to.load_weights(path)
  if built:
    assert_same(rows(to), rows(of))
    return
  to.layers[1].set_weights(new)
  with pytest.warns(UserWarning, match="of 'm/head/kernel'"):
    to.optimizer.build(to.trainable_variables)
    got = rows(to)
  assert_same(got[:2] + seeded(to)[2:], rows(of)[:2] + got[2:])


def test_frozen_layers_that_changed_since_a_backup(tmp_path):
  """And another number of variables, in any order."""
  x = data()[0]
  layers = lambda: [dense("a"), dense("b"), dense("c")]

  def fit(model, epochs):
    class Stop(keras.callbacks.Callback):
      def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
          raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
      model.fit(x, x, epochs=epochs, verbose=0, callbacks=[
          keras.callbacks.BackupAndRestore(tmp_path / "backup"),
          *([Stop()] if epochs == 5 else [])])

  of = stack(layers(), "m", frozen=[0])
  fit(of, 5)
  with warnings.catch_warnings(record=True):
    warnings.simplefilter("always", UserWarning)
    to = stack(layers(), "m", frozen=[1])
    before = rows(of)
    read = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: read.append(rows(to)))
    to.fit(x, x, epochs=4, verbose=0, callbacks=[
        keras.callbacks.BackupAndRestore(tmp_path / "backup"), callback])
  assert_same(read[0][2:], before[2:])


WITH_FACTORS = {
    "dense": lambda: [keras.Input((3,)), dense("a"), dense("b")],
    "einsum": lambda: [
        keras.Input((3,)), keras.layers.EinsumDense(
            "ab,bc->ac", 3, bias_axes="c", name="a"), dense("b")],
    "embedding": lambda: [
        keras.Input((3,), dtype="int32"), keras.layers.Embedding(
            9, 2, name="a"), keras.layers.Flatten(), dense("b")],
    "conv": lambda: [
        keras.Input((3, 1)), keras.layers.Conv1D(2, 2, name="a"),
        keras.layers.Flatten(), dense("b")],
}


@pytest.mark.by_day(3)
@pytest.mark.parametrize("kind,way,layer,quantized", [
    *((kind, "model", "dense", None) for kind in OWNERS),
    *(("average", way, "dense", None) for way in (
        "weights", "weights built", "earlier", "checkpoint built", "tree")),
    *((kind, way, layer, None) for kind in ("average", "swa", "lookahead")
      for way in ("model", "weights", "checkpoint built", "tree")
      for layer in list(WITH_FACTORS)[1:]),
    *((kind, way, "dense", quantized) for quantized in ("before", "after")
      for kind in ("average", "swa", "lookahead")
      for way in ("model", "weights", "checkpoint built", "tree"))])
def test_factors_that_keras_merges(quantized, layer, way, kind, tmp_path):
  x = np.arange(48).reshape(16, 3) % 9
  y = x[:, ::-1] / 9
  if layer == "conv":
    x = x[..., None]
  if layer != "embedding":
    x = x / 9

  def make_model():
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential(WITH_FACTORS[layer](), name="m")
    if quantized == "before":
      model.quantize("int8")
    for part in model.layers[:2 if quantized else 1]:
      part.enable_lora(2)
    if quantized == "after":
      model.quantize("int8")
    model.compile(OWNERS[kind](), "mse", jit_compile=False)
    return model

  with warnings.catch_warnings(record=True) as found:
    # Keras tells which layers it does not quantize.
    warnings.simplefilter("always", UserWarning)
    of, to = make_model(), make_model()
    for _ in range(3):
      of.train_on_batch(x, y)
    path = str(tmp_path / ("m.keras" if way == "model" else "m.weights.h5"))
    if way == "tree":
      to.optimizer.build(to.trainable_variables)
      to.set_state_tree(of.get_state_tree(value_format="numpy_array"))
    elif way.startswith("checkpoint"):
      moved(of, to, way, tmp_path)
    elif way == "model":
      of.save(path)
      to = keras.models.load_model(path)
    else:
      with pytest.MonkeyPatch.context() as patch:
        if way == "earlier":  # Which saved them.
          patch.setattr(wrapopt.keras._averages._last_file, "_MERGED", ())
        of.save_weights(path)
      if way == "earlier":
        without_owners(path)
      if way != "weights":
        to.optimizer.build(to.trainable_variables)
      to.load_weights(path)
      to.optimizer.build(to.trainable_variables)
  merges = way in ("model", "weights", "weights built", "earlier")
  assert (merges and way != "earlier") == any(
      f"The file gets no averages of 'm/{of.layers[0].name}/lora_" in
      str(w.message) for w in found)
  factors = ["lora" in v.path for v in to.trainable_variables]
  assert sum(factors) == (4 if quantized else 2)
  # Keras loads zeros, and only what no factor is has its average back.
  for got, want, fresh, is_factor in zip(rows(to), rows(of), seeded(to),
                                         factors, strict=True):
    assert_same(got, fresh if merges and is_factor else want)
  # Keras rounds a merged kernel to int8 again.
  atol = 0.05 if quantized and merges else 1e-5
  np.testing.assert_allclose(to(x), of(x), atol=atol)
  # As the averages in a program that has those of all but the factors.
  for model in of, to:
    for v, row, is_factor in zip(model.trainable_variables, rows(model),
                                 factors):
      if not (merges and is_factor):
        v.assign(row[0])
  np.testing.assert_allclose(to(x), of(x), atol=atol)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind,earlier", [
    ("counted", False), ("counted", True), ("late", False), ("dynamic", False),
    ("dynamic", True), ("bema", False)])
def test_counts_of_a_file_before_the_optimizer_is_built(kind, earlier,
                                                         tmp_path):
  """Keras's own count of steps begins at 0 again."""
  path = str(tmp_path / "run.weights.h5")
  make_optimizer = {
      **KINDS,
      "dynamic": lambda: MovingAverage("adam", 0.9, dynamic_decay=True),
      "bema": lambda: MovingAverage("adam", wrapopt.BEMA(burn_in=0))}[kind]
  model = train(make(make_optimizer()), 7)
  model.save_weights(path)
  if earlier:
    with h5py.File(path, "r+") as file:
      for key in keys_that_end(file, "average_steps"):
        del file[key]
        file[key.replace("average_steps", "first_average_step")] = np.int64(0)
  other = not_built(make_optimizer())
  load_before_build(other, path)
  other.optimizer.build(other.trainable_variables)
  assert int(other.optimizer.iterations) == 0
  n = model.optimizer.average_steps()
  if earlier:  # It tells only that there was an update.
    n = 2 if kind == "counted" else 1
  assert other.optimizer.average_steps() == n
  before = averages(other)
  assert_same(before, averages(model))
  train(other, 1)
  assert other.optimizer.average_steps() == n + 1
  # The average of the file is part of the new one.
  train(other, 1)
  for s, v in zip(averages(other), values(other.trainable_variables)):
    assert not np.array_equal(s, v)


# State trees, of which Keras's OrbaxCheckpoint makes its files.

TREES = {
    **OWNERS,
    "rows": lambda: MovingAverage(optimizers.SGD(0.1), 0.9),
    "nested": KINDS["nested"],
    "loss_scale_around": KINDS["loss_scale_around"],
    "loss_scale_between": KINDS["loss_scale_between"],
    "multi_around": lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(
        MovingAverage("adam", 0.5), {".*bias": SWA("sgd", 0, 2)})),
    "counted": KINDS["counted"],
}


def named(kind):
  """A model whose variables have the same paths in each program."""
  keras.utils.clear_session(free_memory=False)
  model = keras.Sequential([
      keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 2),
      keras.layers.Flatten(), dense("a"), dense("b")], name="named")
  model.compile(TREES[kind](), "mse", jit_compile=False)
  model.optimizer.build(model.trainable_variables)
  return model


def train_named(model, steps):
  x = np.arange(12, dtype=np.int32).reshape(4, 3) % 4
  for _ in range(steps):
    model.train_on_batch(x, np.ones((4, 3), np.float32))
    x = x + 1
  return model


def all_state(model):
  for opt in [model.optimizer, *_views.within(model.optimizer)]:
    getattr(opt, "_seed_unbegun", lambda: None)()
  return values(model.weights) + values(state(model.optimizer))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", TREES)
def test_state_trees_have_the_averages(kind):
  model = train_named(named(kind), 3)
  if kind == "rows":
    assert model.optimizer.is_lazy(model.layers[0].embeddings)
  tree = model.get_state_tree(value_format="numpy_array")
  want = all_state(model)
  other = named(kind)
  other.set_state_tree(tree)
  assert_same(all_state(other), want)
  tf.nest.map_structure(np.testing.assert_array_equal,
                        other.get_state_tree(value_format="numpy_array"), tree)
  # A later state of the same program.
  later = train_named(named(kind), 5)
  later.set_state_tree(tree)
  assert_same(all_state(later), want)
  want = all_state(train_named(model, 2))
  for m in other, later:
    assert_same(all_state(train_named(m, 2)), want)
  # One of before the first step.
  fresh = named(kind).get_state_tree(value_format="numpy_array")
  want = all_state(train_named(named(kind), 2))
  again = named(kind)
  again.set_state_tree(fresh)
  train_named(again, 1)
  again.set_state_tree(fresh)
  start = {v.path: v.numpy() for v in again.weights}
  first = named(kind)
  for v in first.weights:
    v.assign(start[v.path])
  assert_same(all_state(train_named(again, 2)),
              all_state(train_named(first, 2)))


@pytest.mark.by_day(0)
def test_an_average_that_is_assigned_right_after_a_checkpoint_keeps(tmp_path):
  saved = train(make(MovingAverage("sgd", 0.9)))
  path = tf.train.Checkpoint(model=saved).write(str(tmp_path / "run"))
  model = train(make(MovingAverage("sgd", 0.5)))
  v = model.trainable_variables[0]
  average = model.optimizer.average(v)
  tf.train.Checkpoint(model=model).read(path)
  with pytest.warns(UserWarning, match="averages named 'average_0.9'"):
    average.assign(np.full(average.shape, 7.0))
    value = model.optimizer.average(v).numpy()
  assert (value == 7).all()


@pytest.mark.parametrize("kind", ["average", "bema", "primal_average", "swa"])
def test_a_state_tree_of_a_block_is_what_a_file_has(kind, tmp_path):
  model = train_named(named(kind), 3)
  path = tmp_path / "run.weights.h5"
  before = all_state(model)
  with model.optimizer.averaged_weights(model):
    tree = model.get_state_tree(value_format="numpy_array")
    model.save_weights(path)
    with pytest.raises(RuntimeError, match="must not be assigned inside aver"):
      model.set_state_tree(tree)
    for v in model.weights:
      v.assign(v)
  assert_same(all_state(model), before)
  of_tree, of_file = named(kind), named(kind)
  of_tree.set_state_tree(tree)
  of_file.load_weights(path)
  assert_same(all_state(of_tree), all_state(of_file))


def test_a_later_object_of_the_id_of_an_average_is_none():
  opt = train(make(MovingAverage("sgd", 0.5))).optimizer
  opt._store.state.has_new_values()
  other = wrapopt.keras._variables.StateVariable.of(keras.Variable([1.0]))
  wrapopt.keras._variables.states[id(other)] = opt._store.state
  other.assign([2.0])
  assert not opt._store.state.has_new_values()
  average, _ = opt._store.state.pairs()[0]
  average.assign(average + 1)
  assert opt._store.state.has_new_values()


def test_set_weights_takes_both_lengths():
  model = train(make(MovingAverage("adam", 0.5)))
  opt = model.optimizer
  saved = values(opt.variables)
  inner = values(opt.inner_optimizer.variables)
  assert len(saved) == len(inner) + 6 + 1
  train(model, 2)
  opt.set_weights(inner)
  assert_same(values(opt.inner_optimizer.variables), inner)
  assert not np.array_equal(opt.variables[-2], saved[-2])
  opt.set_weights(saved)
  assert_same(values(opt.variables), saved)


def test_averages_that_began_later_than_the_count_of_steps():
  """A file's averages began with step 5; Keras counts from 0 again."""
  v = keras.Variable([0.0])
  opt = MovingAverage(optimizers.SGD(1.0), wrapopt.PowerDecay(gamma=1))
  opt.build([v])
  opt._store.counts[opt._var_key(v)].assign(5)
  opt._store._begun.assign(1)
  for _ in range(3):
    opt.apply([tf.constant([-1.0])], [v])
  # Weights 1, 2 and 3 of the values 1, 2 and 3 would be 14 / 6.
  assert 0 < v.numpy() - opt.average(v).numpy()
  assert opt.average_steps() == 3


SERVE = """
import sys
sys.modules["wrapopt"] = None
import tensorflow as tf
for folder in sys.argv[1:]:
  served = tf.saved_model.load(folder)
  print(served.serve(tf.ones([1, 3])).numpy().tolist())
"""


def test_exported_models_run_where_wrapopt_is_not_installed(tmp_path):
  wrappers = {
      "MovingAverage": lambda: wrapopt.keras.MovingAverage("adam", 0.5),
      "SWA": lambda: wrapopt.keras.SWA("adam", 0),
      "Lookahead": lambda: wrapopt.keras.Lookahead("adam"),
      "ScheduleFree": lambda: wrapopt.keras.ScheduleFree("adam"),
      "PrimalAverage": lambda: wrapopt.keras.PrimalAverage("adam", 0.5, 0.5),
      "LazyAdam": wrapopt.keras.LazyAdam,
      "DropStaleGradient": lambda: wrapopt.keras.DropStaleGradient("adam", 1),
  }
  assert wrappers.keys() == {
      name for name, thing in vars(wrapopt.keras).items()
      if isinstance(thing, type) and issubclass(thing, optimizers.Optimizer)}
  expected = []
  for name, wrapper in wrappers.items():
    model = make()
    model.compile(wrapper(), "mse")
    if name != "DropStaleGradient":  # It needs a train_step() of its own.
      model.fit(*data(), batch_size=4, verbose=0)
    folder = tmp_path / name
    model.export(folder, verbose=False)
    expected.append(model(np.ones((1, 3))).numpy().tolist())
    assert b"Wrapopt" not in (folder / "saved_model.pb").read_bytes()
  printed = printed_by("-c", SERVE, *(str(tmp_path / name)
                                      for name in wrappers))
  printed = [ast.literal_eval(line) for line in printed.splitlines()]
  np.testing.assert_allclose(printed, expected, rtol=1e-6)
