"""Averages of some variables: the argument `variables`, in Keras.

both/averages_test.py has what averages of some variables hold.
"""

import copy
import warnings

import h5py
import keras
import numpy as np
from numpy.testing import assert_equal
import pytest
import tensorflow as tf

import keras_versions
from training import stepping
import wrapopt.keras as wk

K = keras.optimizers

WRAPPERS = {"MovingAverage": lambda opt, **k: wk.MovingAverage(opt, 0.75, **k),
            "SWA": lambda opt, **k: wk.SWA(opt, 0, 2, **k)}


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.clear_session()
  keras.utils.set_random_seed(0)


@keras.saving.register_keras_serializable("some_variables_test")
def of_kernels(variable):
  return variable.path.endswith("kernel")


CHOSEN = {"whole": None, "kernels": of_kernels,
          "biases": lambda v: v.path.endswith("bias")}


def trained(make):
  """Trains what `make` makes; returns it, variables, and the values of `w`."""
  variables = {name: keras.Variable(np.float32(x), name=name) for name, x in (
      ("w", [1, 2, 3]), ("raw", [4, 5]), ("table", [[1], [1]]))}
  opt, history = make(variables), []
  opt.build(list(variables.values()))
  for t in range(4):
    opt.apply([tf.fill(v.shape, t + 1.0) for v in variables.values()])
    history.append(variables["w"].numpy())
  return opt, variables, history


def test_swa_of_some_variables():
  opt, variables, history = trained(lambda v: wk.SWA(
      K.Adam(0.1), 0, 2, variables=[v["w"]]))
  whole, want, _ = trained(lambda v: wk.SWA(K.Adam(0.1), 0, 2))
  for name, v in variables.items():
    np.testing.assert_array_equal(v, want[name])
  np.testing.assert_array_equal(opt.average(variables["w"]),
                                whole.average(want["w"]))
  # It counts steps 0 and 2.
  np.testing.assert_allclose(opt.average(variables["w"]), np.mean(
      np.float64(history[::2]), 0), rtol=0, atol=2 * 3 * 8 * 2**-24)
  with pytest.raises(KeyError, match="that this .* averages, got .*'raw', which"
                     " its argument `variables` exclu"):
    opt.average(variables["raw"])
  # Nothing but averages of this one.
  assert len(opt._store.state.pairs()) == 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("select", [
    lambda vs: vs, lambda vs: [v.value for v in vs],
    lambda vs: tuple(v.path for v in vs),
    lambda vs: tuple(f"model/{v.path}" for v in vs),
    lambda vs: [vs[1].path, vs[0]],
    lambda vs: lambda v: any(v is x for x in vs)],
                         ids=["list", "values", "paths", "longer", "mixed",
                              "function"])
def test_ways_to_select(select, wrapper):
  opt, variables, _ = trained(lambda v: WRAPPERS[wrapper](
      K.SGD(0.5), variables=select([v["w"], v["table"]])))
  assert [v.name for _, v in opt._store.state.pairs()] == ["w", "table"]
  with opt.averaged_weights():
    # 4 and 5, less 0.5 (1 + 2 + 3 + 4).
    assert variables["raw"].numpy().tolist() == [-1, 0]
    assert variables["w"].numpy()[0] != -4


@pytest.mark.parametrize("variables, error, text", [
    ([], ValueError, "`variables` must hold at least one variable"),
    ([3], TypeError, r"`variables\[0\]` must be a variable or the path of one"),
    ("w", TypeError, "`variables` must be None"),
    (True, TypeError, "`variables` must be None"),
])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bad_arguments(wrapper, variables, error, text):
  with pytest.raises(error, match=text):
    WRAPPERS[wrapper]("sgd", variables=variables)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bad_variables_change_nothing(wrapper):
  a, b = keras.Variable([0.0], name="a"), keras.Variable([0.0], name="b")
  c, c2 = (keras.Variable([0.0], name="c") for _ in range(2))
  for given, trained, error, text in (
      ([a, b], [a], ValueError, "or their paths, got 'b', which is none of "
       "them. It trains 'a'"),
      (["a", "x"], [a, b], ValueError, "got 'x', which is none of them. It "
       "trains 'a', 'b'"),
      (["c"], [c, c2], ValueError, "'c', which is a path of several of them"),
      (lambda v: False, [a, b], ValueError, "must select at least one variable,"
       " got False for all 2"),
      (lambda v: None, [a], TypeError, "must return True or False, got None "
       "for 'a'")):
    opt = WRAPPERS[wrapper]("sgd", variables=given)
    for _ in range(2):
      with pytest.raises(error, match=text):
        opt.apply([tf.ones(1)] * len(trained), trained)
    assert not opt.built and not opt.inner_optimizer.built
    assert [v.numpy() for v in trained] == [0] * len(trained)


def model_of(wrapper="MovingAverage", inner=None, **kwargs):
  model = keras.Sequential([
      keras.Input((3,)), keras.layers.Dense(3, "tanh", name="one"),
      keras.layers.Dense(3, name="two"),
      keras.layers.BatchNormalization(name="norm")])
  for layer in model.layers[:2]:
    layer.set_weights([np.eye(3), np.zeros(3)])
  kwargs.setdefault("variables", of_kernels)
  model.compile(WRAPPERS[wrapper](inner or K.Adam(0.1), **kwargs), "mse",
                jit_compile=False)
  model.optimizer.build(model.trainable_variables)
  return model


def data():
  x = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
  return x, x[:, ::-1]


def fit(model, steps=4, **kwargs):
  model.fit(*data(), batch_size=4, epochs=steps // 4, verbose=0, shuffle=False,
            **kwargs)


def name_of(variable):
  # Keras loads a model with other first parts of paths.
  return "/".join(variable.path.split("/")[-2:])


def by_name(model):
  return {name_of(v): v.numpy() for v in model.variables}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_evaluations_use_the_others_as_they_are(wrapper, tmp_path):
  model = model_of(wrapper, keep_raw_weights=True)
  files = str(tmp_path / "best.weights.h5")
  fit(model, callbacks=[
      wk.Snapshots(tmp_path / "snapshots", 4),
      wk.EvaluateWithAverages(
          keras.callbacks.ModelCheckpoint(files, save_weights_only=True),
          recalibrate=False)])
  opt = model.optimizer
  raw = by_name(model)
  averaged = {**raw, **{
      name_of(v): opt.average(v).numpy()
      for v in model.trainable_variables if of_kernels(v)}}
  assert not np.array_equal(averaged["two/kernel"], raw["two/kernel"])
  copied = opt.averaged_model(model, recalibrate=False)
  assert_equal(by_name(copied), averaged)
  with opt.averaged_weights(model):
    assert_equal(by_name(model), averaged)
  assert_equal(by_name(model), raw)
  [snapshot] = (tmp_path / "snapshots").glob("*")
  for path in (files, str(snapshot)):
    other = model_of(wrapper)
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # A snapshot has no optimizer.
      other.load_weights(path)
    assert_equal(by_name(other), averaged)
  # fit() ends with the averages of these.
  model = model_of(wrapper)
  fit(model)
  assert_equal(by_name(model), averaged)


@pytest.mark.by_day(0)
def test_statistics_of_batch_normalizations_are_averaged_in_any_case():
  model = model_of(average_batch_norm=True)
  model.optimizer.set_model(model)
  fit(model)
  norm = model.layers[-1]
  assert model.optimizer.average(norm.moving_mean) is not None
  with pytest.raises(KeyError, match="excludes"):
    model.optimizer.average(norm.gamma)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("how", ["function", "list", "paths"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_models_are_saved_as_a_whole(wrapper, how, tmp_path):
  model = model_of(wrapper)
  kernels = [v for v in model.trainable_variables if of_kernels(v)]
  opt = WRAPPERS[wrapper](K.Adam(0.1), variables={
      "function": of_kernels, "list": kernels,
      "paths": ["one/kernel", "sequential/two/kernel"]}[how])
  model.compile(opt, "mse", jit_compile=False)
  fit(model)
  config = opt.get_config()["variables"]
  assert (config["config"].endswith("of_kernels") if how == "function" else
          config == (["one/kernel", "sequential/two/kernel"]
                     if how == "paths" else [v.path for v in kernels]))
  model.save(tmp_path / "model.keras")
  other = keras.models.load_model(tmp_path / "model.keras")
  assert other.optimizer.get_config() == opt.get_config()
  for m in model, other:
    fit(m)
  assert_equal(by_name(other), by_name(model))
  for v, u in zip(model.trainable_variables, other.trainable_variables):
    if of_kernels(v):
      np.testing.assert_array_equal(opt.average(v), other.optimizer.average(u))
  assert len(other.optimizer._store.state.pairs()) == 2


def test_a_path_is_of_one_variable():
  model = model_of()
  opt = wk.MovingAverage("sgd", variables=["kernel"])
  with pytest.raises(ValueError, match="'kernel', which is a path of several"):
    opt.build(model.trainable_variables)


def test_what_cannot_be_saved(tmp_path):
  model = model_of(variables=lambda v: of_kernels(v))
  with pytest.raises(ValueError, match="function registered by keras.saving"):
    model.optimizer.get_config()
  model.save_weights(tmp_path / "model.weights.h5")
  a, b = (keras.Variable([0.0], name="w") for _ in range(2))
  opt = wk.MovingAverage("sgd", variables=[a])
  opt.build([a, b])
  with pytest.raises(ValueError, match="paths of their own, got 'w', which 2 "):
    opt.get_config()


@pytest.mark.by_day(0)
def test_without_the_argument_files_are_those_of_before(tmp_path):
  """And a file of other averages gives a warning, and seeds."""
  whole = model_of(variables=None)
  fit(whole)
  whole.save_weights(tmp_path / "whole.weights.h5")
  with h5py.File(tmp_path / "whole.weights.h5") as file:
    keys = []
    file.visit(lambda key: keys.append(key.rpartition("/")[2]))
  assert sorted(key for key in keys if key.startswith("average")) == [
      *(f"average_0.75.{i}" for i in range(6)), "average_0.75.variables",
      "averages_of_wrappers"]
  kernels, biases = (
      model_of(variables=CHOSEN[name]) for name in ("kernels", "biases"))
  for model in kernels, biases:
    fit(model)
  kernels.save_weights(tmp_path / "kernels.weights.h5")
  for model, file, text in (
      (whole, "kernels", "no average named 'average_0.75' of '.*bias' and 3 "),
      (biases, "kernels", "no average named 'average_0.75' of '.*bias'")):
    with pytest.warns(UserWarning, match=text):
      model.load_weights(tmp_path / f"{file}.weights.h5")
    for average, variable in model.optimizer._store.state.pairs():
      if not of_kernels(variable):
        np.testing.assert_array_equal(average, variable)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    kernels.load_weights(tmp_path / "whole.weights.h5")
    other = model_of()
    other.load_weights(tmp_path / "kernels.weights.h5")
  kernels = model_of()
  fit(kernels)
  for (got, _), (want, _) in zip(other.optimizer._store.state.pairs(),
                                 kernels.optimizer._store.state.pairs()):
    np.testing.assert_array_equal(got, want)


@pytest.mark.by_day(0)
def test_checkpoints(tmp_path):
  """An average is that of its variable, or starts at it."""
  models = {name: model_of(variables=of) for name, of in CHOSEN.items()}
  for model in models.values():
    fit(model)
    model.train_on_batch(*data())  # Averages are not the weights.
  paths = {name: tf.train.Checkpoint(model=m, opt=m.optimizer).write(
      str(tmp_path / name)) for name, m in models.items()}
  for to, of in (("kernels", "whole"), ("whole", "kernels"),
                 ("biases", "kernels"), ("kernels", "kernels")):
    model = model_of(variables=CHOSEN[to])
    with warnings.catch_warnings(record=True):
      warnings.simplefilter("always")
      tf.train.Checkpoint(model=model, opt=model.optimizer).read(paths[of])
      opt, source = model.optimizer, models[of]
      row = opt._store.rows[0]
      averages = [opt.average(v) if opt._var_key(v) in row else None
                  for v in model.trainable_variables]
    for v, u, average in zip(model.trainable_variables,
                             source.trainable_variables, averages):
      np.testing.assert_array_equal(v, u)
      if average is None:
        continue
      has = source.optimizer._var_key(u) in source.optimizer._store.rows[0]
      np.testing.assert_array_equal(
          average, source.optimizer.average(u) if has else u)


def test_the_others_take_an_op_of_their_own_without_averages():
  """Also if all of them have an average: then there is one op."""
  for chosen, expected in ((None, [[3, 6]]), (of_kernels, [[2, 4], [1, 0]])):
    variables = [keras.Variable(np.ones(2, np.float32), name=name)
                 for name in ("a_kernel", "b", "c_kernel")]
    opt = wk.MovingAverage(K.SGD(0.5), [0.5, 0.25], variables=chosen)
    step = stepping(opt, variables, "function")
    graph = step.get_concrete_function(*[tf.ones(2)] * 3).graph
    ops = [op for op in graph.get_operations() if op.type == "Wrapopt>Apply"]
    assert [[op.get_attr("N"), op.get_attr("NK")] for op in ops] == expected


@keras_versions.needs("MultiOptimizer")
def test_layers_without_averages_in_a_multi_optimizer():
  a, b = keras.Variable([0.0], name="a"), keras.Variable([0.0], name="b")
  of_a, of_b = K.SGD(1.0), K.SGD(0.5)
  opt = wk.MovingAverage(
      K.MultiOptimizer(lambda v: of_a if v.path == "a" else of_b), 0.5,
      variables=[a])
  opt.build([a, b])
  for _ in range(2):
    opt.apply([-tf.ones(1), -tf.ones(1)], [a, b])
  assert [a.numpy(), b.numpy(), opt.average(a).numpy()] == [2, 1, 1.25]
  with opt.averaged_weights():
    assert [a.numpy(), b.numpy()] == [1.25, 1]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("inner", [K.SGD, K.Nadam])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_of_the_others_alone(wrapper, inner, around):
  v, w = keras.Variable([4.0]), keras.Variable([8.0])
  opt = averaging = WRAPPERS[wrapper](inner(0.5), variables=lambda x: x is v)
  if around:
    opt = wk.Lookahead(opt)
  opt.build([v, w])
  opt.apply([None, tf.constant([1.0])], [v, w])
  assert w.numpy() != [8] and averaging.average(v).numpy() == [4]
  opt.apply([tf.constant([1.0]), None], [v, w])
  assert opt.iterations.numpy() == 2


def test_half_the_variables_may_have_another_dtype_than_averages():
  a = keras.Variable(np.zeros(2), dtype="float64", name="a")
  b = keras.Variable(np.zeros(2), dtype="float32", name="b")
  opt = wk.MovingAverage(K.SGD(1.0), 0.5, shadow_dtype="float64", variables=[a])
  opt.apply([-tf.ones(2, tf.float64), -tf.ones(2)], [a, b])
  assert opt.average(a).dtype == "float64"
  assert b.numpy().tolist() == [1, 1]


def test_copies():
  a, b = (keras.Variable([0.0], name=name) for name in "ab")
  opt = wk.MovingAverage(K.SGD(1.0), 0.5, variables=[a])
  copied = copy.deepcopy(opt)
  cloned = wk.MovingAverage.from_config(opt.get_config())
  for o in opt, copied, cloned:
    o.build([a, b])
    assert [v for _, v in o._store.state.pairs()] == [a]
