"""Averages of checkpoints: formats, numbers, errors."""

import contextlib
import functools
import os
import re
import types
import zipfile

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from wrapopt import _native
from wrapopt import checkpoints
from wrapopt.checkpoints import __main__ as command
from wrapopt.checkpoints import _bundles
from wrapopt.checkpoints import _format
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _merge
from wrapopt.checkpoints import _places
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source

v1 = tf.compat.v1

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32),
          np.dtype(np.float64)]


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
  weights = weights or [1 / len(values)] * len(values)
  total = 0
  for weight, value in zip(weights, values):
    total = total + np.float64(weight) * np.asarray(value).astype(np.float64)
  return rounded_once(np.asarray(total), np.dtype(dtype))


def assert_same_bits(got, expected):
  got, expected = np.asarray(got), np.asarray(expected)
  assert got.dtype == expected.dtype and got.shape == expected.shape
  kind = f"u{got.dtype.itemsize}"
  np.testing.assert_array_equal(np.atleast_1d(got).view(kind),
                                np.atleast_1d(expected).view(kind))


# The kernel


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_numpys_in_float64_rounded_once(dtype, isa):
  rng = np.random.default_rng(0)
  for size in (0, 1, 7, 2047, 2048, 5001):
    # Of every input dtype, and with numbers that one of two roundings hits.
    inputs = [(rng.standard_normal(size) * 10.0**rng.integers(-3, 4)).astype(d)
              for d in (*DTYPES, dtype)]
    weights = list(rng.uniform(-1, 1, len(inputs)))
    expected = mean_of(inputs, dtype, weights)
    output = np.full(size, 7, dtype)
    _native.merge(inputs, weights, None, output, True, 0, size, isa)
    assert_same_bits(output, expected)
    # In two goes, of which the second has the rest.
    sums, output = np.full(size, np.nan), np.full(size, 7, dtype)
    _native.merge(inputs[:2], weights[:2], sums, None, True, 0, size, isa)
    _native.merge(inputs[2:], weights[2:], sums, output, False, 0, size, isa)
    assert_same_bits(output, expected)


@pytest.mark.parametrize("isa", _native.cpu_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_once(dtype, isa):
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
  output = np.empty(values.size, dtype)
  _native.merge([values], [1.0], None, output, True, 0, values.size, isa)
  expected = rounded_once(values, dtype)
  np.testing.assert_array_equal(output.astype(np.float64),
                                expected.astype(np.float64))
  assert (np.signbit(output) == np.signbit(expected))[~np.isnan(values)].all()


def test_the_kernel_refuses_what_does_not_fit():
  x = np.zeros(4, np.float32)
  with pytest.raises(ValueError, match="inputs must hold at least one"):
    _native.merge([], [], None, x, True, 0, 4)
  with pytest.raises(ValueError, match="takes 1 weights, got 2"):
    _native.merge([x], [1, 2], None, x, True, 0, 4)
  with pytest.raises(ValueError,
                     match=r"inputs\[1\] misshapen: got 3 elements"):
    _native.merge([x, x[:3]], [1, 2], None, x, True, 0, 4)
  with pytest.raises(ValueError, match="at most 4, got 0 and 5"):
    _native.merge([x], [1], None, x, True, 0, 5)
  with pytest.raises(ValueError, match="sums must be an array unless"):
    _native.merge([x], [1], None, x, False, 0, 4)
  with pytest.raises(ValueError, match="one of sums and output"):
    _native.merge([x], [1], None, None, True, 0, 4)
  with pytest.raises(ValueError, match="sums must be of dtype float64"):
    _native.merge([x], [1], x, None, True, 0, 4)
  with pytest.raises(ValueError, match="got int32"):
    _native.merge([x.astype(np.int32)], [1], None, x, True, 0, 4)
  with pytest.raises(ValueError, match="contiguous"):
    _native.merge([x[::2]], [1], None, x[:2].copy(), True, 0, 2)


# TensorFlow's checkpoints


def values_of(path):
  reader = tf.train.load_checkpoint(str(path))
  return {name: reader.get_tensor(name)
          for name in reader.get_variable_to_shape_map()}


def save_by_saver(path, values):
  with tf.Graph().as_default(), v1.Session() as session:
    saver = v1.train.Saver({
        name: v1.Variable(tf.constant(value), use_resource=True)
        for name, value in values.items()})
    session.run(v1.global_variables_initializer())
    return saver.save(session, str(path), write_meta_graph=False)


def some_values(seed, dtypes=("float32",) * 4):
  rng = np.random.default_rng(seed)
  shapes = {"a": (3, 5), "b/kernel": (700, 300), "scalar": (), "empty": (0, 2)}
  values = {name: np.asarray(rng.standard_normal(shape)).astype(dtype)
            for (name, shape), dtype in zip(shapes.items(), dtypes)}
  return {**values, "global_step": np.int64(seed * 100),
          "flag": np.bool_(seed % 2)}


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


def test_a_mean_of_files_of_a_saver(tmp_path, monkeypatch):
  # Several variables a batch, several inputs at once, and the file is sent to
  # the disk several times.
  inputs = [some_values(seed, dtypes) for seed, dtypes in enumerate([
      ("float64", "float16", "float32", "float32"),
      ("float32", "float32", "float64", "float32"),
      ("float16", "bfloat16", "float64", "float32"),
      ("float32", "float32", "bfloat16", "float16")])]
  paths = [save_by_saver(tmp_path / f"in-{i}", x)
           for i, x in enumerate(inputs)]
  weights = [0.1, 0.2, 0.3, 0.4]
  for in_flight, send in (1, 1), (1 << 20, 1 << 30), (1 << 30, 1):
    monkeypatch.setattr(checkpoints._merge, "_IN_FLIGHT", in_flight)
    monkeypatch.setattr(_sink, "_COPIED", in_flight)
    monkeypatch.setattr(_sink, "SEND", send)
    output = tmp_path / f"out-{in_flight}-{send}"
    checkpoints.merge(paths, output, weights, progress=True)
    got = values_of(output)
    assert got.keys() == inputs[0].keys()
    for name, last in inputs[-1].items():
      if last.dtype in DTYPES:
        last = mean_of([x[name] for x in inputs], last.dtype, weights)
      assert_same_bits(got[name], last)
  assert not list(tmp_path.glob(".*"))

  with tf.Graph().as_default(), v1.Session() as session:
    # A plain Saver loads it, a part of a variable too.
    parts = v1.get_variable(
        "a", (3, 5), use_resource=True,
        partitioner=v1.fixed_size_partitioner(3))
    kernel = v1.get_variable("b/kernel", (700, 300))
    v1.train.Saver([parts, kernel]).restore(session, str(output))
    assert_same_bits(session.run(parts.as_tensor()), got["a"])
    assert_same_bits(session.run(kernel), got["b/kernel"])


def test_only_says_what_is_averaged(tmp_path):
  for i in 1, 2:
    save_by_saver(tmp_path / f"run-{i}", {
        "w": np.float32(i), "w/Adam": np.float32(i), "step": np.int32(i)})
  checkpoints.merge(tmp_path, tmp_path / "out" / "mean", only="^w$")
  assert values_of(tmp_path / "out" / "mean") == {
      "w": 1.5, "w/Adam": 2, "step": 2}
  checkpoints.merge(tmp_path, tmp_path / "out" / "all")
  assert values_of(tmp_path / "out" / "all")["w/Adam"] == 1.5


def test_a_partitioned_variable_of_many_rows(tmp_path):
  # From 64 on, the number of a slice's row is not ASCII in the key of the
  # slice.
  for i in 1, 3:
    with tf.Graph().as_default(), v1.Session() as session:
      parts = v1.get_variable(
          "parts", [300, 2], initializer=v1.constant_initializer(i),
          partitioner=v1.fixed_size_partitioner(3))
      counts = v1.get_variable(
          "counts", [200], tf.int64, v1.constant_initializer(i),
          partitioner=v1.fixed_size_partitioner(2))
      session.run(v1.global_variables_initializer())
      v1.train.Saver([parts, counts]).save(
          session, str(tmp_path / f"in-{i}"), write_meta_graph=False)
  checkpoints.merge([tmp_path / "in-1", tmp_path / "in-3"], tmp_path / "out")
  got = values_of(tmp_path / "out")
  np.testing.assert_array_equal(got["parts"], np.full((300, 2), 2))
  np.testing.assert_array_equal(got["counts"], np.full(200, 3))


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


# Keras's files


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
def test_files_of_keras(tmp_path, ending, dtype, monkeypatch):
  monkeypatch.setattr(checkpoints._merge, "_PART", 16)
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
  for got, *of_inputs in zip(loaded.variables, *[m.variables for m in models]):
    assert_same_bits(got.numpy(), mean_of(
        [v.numpy() for v in of_inputs],
        BFLOAT16 if dtype == "bfloat16" else dtype, [0.25, 0.5, 0.25]))
  assert loaded.optimizer.iterations.numpy() == 20
  np.testing.assert_array_equal(loaded.optimizer.learning_rate.numpy(),
                                models[-1].optimizer.learning_rate.numpy())
  assert not list(tmp_path.glob(".*"))


def test_an_hdf5_file_of_another_kind(tmp_path):
  for i in range(2):
    with h5py.File(tmp_path / f"in-{i}.h5", "w") as file:
      file.attrs["what"] = "a test"
      file.create_dataset("g/chunked", data=np.full((64, 3), i, ">f4"),
                          chunks=(8, 3), compression="gzip")
      file["g/strings"] = np.array([b"x", b"yy"], object)
      file["g/half"] = np.float16(i)
      file.create_group("nothing").attrs["n"] = 3
  checkpoints.merge(tmp_path, tmp_path / "out" / "mean.h5")
  with h5py.File(tmp_path / "out" / "mean.h5") as file:
    assert file.attrs["what"] == "a test" and file["nothing"].attrs["n"] == 3
    assert (file["g/chunked"][()] == 0.5).all()
    assert file["g/strings"][1] == b"yy" and file["g/half"][()] == 0.5


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_all_that_an_hdf5_file_may_hold(tmp_path, libver):
  source, out = tmp_path / "in.h5", tmp_path / "out.h5"
  with h5py.File(source, "w", libver=libver) as file:
    file["w"] = np.ones(3, np.float32)
    file["string"], file["none"] = "a", h5py.Empty("f4")
    file["empty"] = np.zeros((0, 2), np.int32)
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
    for got, *of_inputs in zip(loaded.variables,
                               *[m.variables for m in models]):
      assert_same_bits(got.numpy(), mean_of(
          [v.numpy() for v in of_inputs], np.float32))
  out = tmp_path / "out.weights.json"
  refused(tmp_path, ValueError, r"must end in '.h5', since the last input is "
          r".*m.weights.json, got .*out.weights.json", checkpoints.merge,
          inputs, out)
  (tmp_path / "odd.weights.json").write_text("[]")
  refused(tmp_path, ValueError, "odd.weights.json must be a JSON file with a "
          "'weight_map', as .*, got other", checkpoints.merge,
          tmp_path / "odd.weights.json", out)
  next(inputs[0].glob("*.h5")).unlink()
  refused(tmp_path, OSError, "m_0000.*.weights.h5", checkpoints.merge, inputs,
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


def refused(tmp_path, error, match, function, *args, **kwargs):
  before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}
  with pytest.raises(error, match=match):
    function(*args, **kwargs)
  assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("values, error", [
    ({"w": np.float32([1, 2])},
     r"odd must have the variable 'b', which .*in-1 has, got 'w'\. All inputs"),
    ({"w": np.float32([1]), "b": np.float32(0)},
     r"Variable 'w' of .*odd misshapen: got \[1\] but expected \[2\] \(its "
     r"shape in .*in-1\)"),
    ({"w": np.int32([1, 2]), "b": np.float32(0)},
     r"Variable 'w' of .*odd must be of dtype float16, bfloat16, float32, "
     r"float64, as in .*in-1, got int32"),
    ({"w": np.float32([1, 2]), "b": np.float32(0), "c": np.float32(0)},
     r"odd must not have variables that .*in-1 lacks, got 'c'"),
])
def test_inputs_that_do_not_go_together(tmp_path, two, values, error):
  odd = save_by_saver(tmp_path / "odd", values)
  refused(tmp_path, ValueError, error, checkpoints.merge,
          [two[0], odd, two[1]], tmp_path / "new" / "out")


@pytest.mark.parametrize("last, error", [
    (np.int32([1, 2]), r"got one of dtype float32 in .*in-0 and one of dtype "
     r"int32 in .*last\. All inputs must be of one model"),
    (np.array([b"x", b"y"], object), "got one of dtype float32 in .*in-0 and "
     "one of dtype object in .*last"),
])
def test_an_average_of_weights_is_not_a_copy(tmp_path, two, last, error):
  last = save_by_saver(tmp_path / "last", {"w": last, "b": np.float32(0)})
  refused(tmp_path, ValueError, "Variable 'w' must be averaged in all inputs "
          "or in none, " + error, checkpoints.merge, [*two, last],
          tmp_path / "new" / "out")


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
    refused(tmp_path, ValueError, error, checkpoints.merge,
            tmp_path / f"{name}.h5", tmp_path / "new" / "out.h5")


@pytest.mark.parametrize("output", ["", "out/", "new/out/", "new/..", "."])
def test_outputs_without_a_name(tmp_path, monkeypatch, two, output):
  monkeypatch.chdir(tmp_path)
  refused(tmp_path, ValueError, "The output must end in the name of a file, "
          f"got '{output}'. Pass a path", checkpoints.merge, two, output)


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
    refused(tmp_path, ValueError, error, checkpoints.merge, inputs,
            tmp_path / "out", weights)


def test_bad_arguments(tmp_path, two):
  out = tmp_path / "out"
  for error, match, function, args, kwargs in [
      (ValueError, "`inputs` must hold at least one path", checkpoints.merge,
       ([], out), {}),
      (FileNotFoundError, "There is no checkpoint .*none", checkpoints.merge,
       ([*two, tmp_path / "none"], out), {}),
      (FileNotFoundError, "There is no checkpoint .*none.keras",
       checkpoints.merge, ([*two, tmp_path / "none.keras"], out), {}),
      (ValueError, "`weights` must hold one number for each of the 2 inputs, "
       "got 1", checkpoints.merge, (two, out, [1]), {}),
      (ValueError, "`weights` must be finite", checkpoints.merge,
       (two, out, [1, np.nan]), {}),
      (ValueError, "sum of `weights` must be greater than 0, got 0",
       checkpoints.merge, (two, out, [1, -1]), {}),
      (ValueError, "`decay` must be in", checkpoints.ema, (two, out, 1.5), {}),
      (ValueError, "`window` must be an integer from 1 to the number of "
       "inputs, 2, got 3", checkpoints.lawa, (two, out, 3), {}),
      (FileNotFoundError, "There is no checkpoint .*none", checkpoints.lawa,
       (tmp_path / "none", out), {}),
      (ValueError, "must not end in '.keras', '.h5'", checkpoints.merge,
       (two, tmp_path / "out.weights.h5"), {}),
      (ValueError, "must not end in .* or '.index'", checkpoints.merge,
       (two, tmp_path / "out.index"), {}),
      (FileExistsError, "in-0.index exists. Remove it", checkpoints.merge,
       (two, two[0]), {}),
      (ValueError, "variables to average that match 'nothing', got 'b', 'w'",
       checkpoints.merge, (two, out), {"only": "nothing"}),
  ]:
    refused(tmp_path, error, match, function, *args, **kwargs)


def test_variables_are_read_from_where_they_are(tmp_path):
  # Hundreds of names, in several blocks of the index, which shortens them.
  values = {f"layer_{i // 9}/kernel_{i % 9}": np.full((1 + i % 5, 3), i, dtype)
            for i in range(400)
            for dtype in [(np.float16, np.float32, np.float64)[i % 3]]}
  values.update({"none": np.zeros((0, 4), np.float32),
                 "scalar": np.float32(3), "step": np.int64(7)})
  save_by_saver(tmp_path / "in", values)
  with contextlib.closing(
      _formats.open_source(str(tmp_path / "in"))) as source:
    assert [n for n in values if not source.can_slice(n)] == ["step"]
    for name, value in values.items():
      assert_same_bits(source.read(name), value)
    rows = np.empty((2, 3), values["layer_0/kernel_4"].dtype)
    source.read("layer_0/kernel_4", slice(1, 3), rows)
    assert_same_bits(rows, values["layer_0/kernel_4"][1:3])


def test_files_are_those_that_tensorflow_writes(tmp_path):
  rng = np.random.default_rng(0)
  values = {f"v{i:03d}": rng.random(i % 4).astype(dtype)
            for i, dtype in enumerate(50 * [
                "bool", "int8", "uint16", "int64", "float64", "complex64",
                BFLOAT16])}
  values.update({
      "scalar": np.ones((), np.float32), "cube": np.ones((2, 3, 4), np.float16),
      "empty": np.zeros((0, 2), np.int32), "no string": np.zeros(0, object),
      "rows": rng.random((9, 5), np.float32),
      "string": np.array(b"a\0", object),
      "strings": np.array([[b"", b"x" * 127], [b"y" * 128, b"z" * 70_000]],
                          object)})
  names = sorted(values)
  theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
  tf.raw_ops.SaveV2(prefix=theirs, tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=[tf.constant(values[name]) for name in names])
  writer = _bundles.Writer(ours)
  for name in names:
    parts = np.split(values[name], [2, 7]) if name == "rows" else [values[name]]
    for part in parts:
      writer.write(name, part, values[name].shape)
  writer.close()
  for ending in ".data-00000-of-00001", ".index":
    with open(theirs + ending, "rb") as a, open(ours + ending, "rb") as b:
      a, b = a.read(), b.read()
    if ending == ".index":  # TensorFlow's keys share prefixes.
      a, b = (dict(_bundles._table(x)) for x in (a, b))
    assert a == b
  reader = tf.train.load_checkpoint(ours)
  for name, value in values.items():
    np.testing.assert_array_equal(
        np.asarray(reader.get_tensor(name), value.dtype), value)


@pytest.mark.parametrize("isa", _native.cpu_isas())
def test_the_checksum(isa):
  crc32c = functools.partial(_native.crc32c, isa=isa)
  # RFC 3720, appendix B.4.
  assert crc32c(np.zeros(32, np.uint8)) == 0x8a9136aa
  assert crc32c(np.arange(32, dtype=np.uint8)) == 0x46dd794e
  data = np.frombuffer(b"123456789", np.uint8)
  assert crc32c(data) == 0xe3069283
  for cut in range(10):
    assert crc32c(data[cut:], crc32c(data[:cut])) == 0xe3069283
  # Long enough for several rounds of the instructions' three chains.
  data = np.random.default_rng(0).integers(256, size=20_001, dtype=np.uint8)
  for cut in 0, 1, 6143, 6144, 12_289:
    assert crc32c(data[cut:], crc32c(data[:cut])) == 0xcd6dc5df
  with pytest.raises(ValueError, match="array must be contiguous"):
    crc32c(data[::2])


@pytest.mark.parametrize("is_too_much", [False, True])
def test_inputs_larger_than_the_page_cache(tmp_path, monkeypatch, is_too_much):
  monkeypatch.setattr(_places, "AT_ONCE", 4096)
  monkeypatch.setattr(_places, "is_too_much", lambda nbytes: is_too_much)
  dropped = []
  monkeypatch.setattr(
      os, "posix_fadvise", lambda file, first, size, advice:
      dropped.append((os.path.basename(os.readlink(f"/proc/self/fd/{file}")),
                      first, size, advice)))
  values = [some_values(seed) for seed in range(2)]
  paths = [save_by_saver(tmp_path / f"in-{i}", v) for i, v in enumerate(values)]
  checkpoints.merge(paths, tmp_path / "out")
  reader = tf.train.load_checkpoint(str(tmp_path / "out"))
  for name in ("a", "b/kernel", "scalar"):
    assert_same_bits(reader.get_tensor(name), mean_of(
        [v[name] for v in values], np.float32))
  # All whole blocks of each input, once, and the output.
  size = os.path.getsize(paths[0] + ".data-00000-of-00001")
  assert sorted(dropped) == ([
      (f"in-{i}.data-00000-of-00001", first, 4096, os.POSIX_FADV_DONTNEED)
      for i in range(2) for first in range(0, size - 4095, 4096)] + [
          (f"out.{ending}", 0, 0, os.POSIX_FADV_DONTNEED)
          for ending in ("data-00000-of-00001", "index")]
                             if is_too_much else [])


def test_a_damaged_part_of_a_variable(tmp_path, monkeypatch):
  # One bit, in the last of several parts that are read after each other.
  monkeypatch.setattr(_merge, "_PART", 1 << 10)
  paths = [tmp_path / f"in-{i}" for i in range(2)]
  for path in paths:
    save_by_saver(path, {"a": np.ones(3, np.float32),
                         "w": np.ones((999, 7), np.float32)})
  data = f"{paths[1]}.data-00000-of-00001"
  with open(data, "r+b") as file:
    file.seek(-2, os.SEEK_END)
    byte, = file.read(1)
    file.seek(-2, os.SEEK_END)
    file.write(bytes([byte ^ 1]))
  refused(tmp_path, OSError, "Variable 'w' of .*in-1 cannot be read: the file "
          ".*in-1.data-00000-of-00001 is damaged: the checksum of bytes 12 to "
          "27984", checkpoints.merge, paths, tmp_path / "out")
  os.truncate(data, 20000)
  refused(tmp_path, OSError, "Variable 'w' of .*in-1 cannot be read: the file "
          ".*-of-00001 ends before byte 27984",
          checkpoints.merge, paths, tmp_path / "out")


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_damaged_archive(tmp_path, which):
  # One bit anywhere in a file of Keras: it is refused, or it changes nothing.
  paths = [tmp_path / f"in-{i}.keras" for i in range(2)]
  for i, path in enumerate(paths):
    make_model(i).save(path)
  contents = lambda path: {
      name: archive.read(name) for archive in [zipfile.ZipFile(path)]
      for name in archive.namelist()}
  checkpoints.merge(paths, tmp_path / "expected.keras")
  expected = contents(tmp_path / "expected.keras")
  damaged = paths[which == "last"]
  whole = damaged.read_bytes()
  with zipfile.ZipFile(damaged) as archive:
    weights = archive.getinfo("model.weights.h5")
  rng = np.random.default_rng(0)
  count = 0
  for at in [*rng.integers(weights.header_offset + 60, weights.file_size, 20),
             *rng.integers(0, weights.header_offset, 5),
             *rng.integers(weights.header_offset + weights.file_size,
                           len(whole), 15)]:
    data = bytearray(whole)
    data[at] ^= 1 << rng.integers(8)
    damaged.write_bytes(data)
    out = tmp_path / "new" / f"{at}.keras"
    try:
      checkpoints.merge(paths, out)
    except (OSError, ValueError) as e:
      assert damaged.name in str(e)
      assert not out.parent.exists() or not list(out.parent.glob(f"*{at}*"))
      count += 1
    else:
      assert contents(out) == expected
  assert count >= 20
  data = bytearray(whole)
  data[weights.file_size // 2] ^= 1
  damaged.write_bytes(data)
  refused(tmp_path, OSError, f"The file .*{damaged.name} is damaged: the "
          "checksum of model.weights.h5 is 0x.*, written as 0x.*"
          "Use another copy",
          checkpoints.merge, paths, tmp_path / "more" / "out.keras")


def test_a_damaged_index(tmp_path, two):
  with open(two[0] + ".index", "r+b") as file:
    file.seek(5)
    byte, = file.read(1)
    file.seek(5)
    file.write(bytes([byte ^ 1]))
  refused(tmp_path, (OSError, ValueError), "in-0", checkpoints.merge, two,
          tmp_path / "out")


def test_a_file_that_is_damaged(tmp_path, two):
  data = two[0] + ".data-00000-of-00001"
  with open(data, "r+b") as file:
    file.write(b"\xff")
  refused(tmp_path, OSError, "Variable '[bw]' of .*in-0 cannot be read: ",
          checkpoints.merge, two, tmp_path / "new" / "folder" / "out")
  (tmp_path / "odd.h5").write_bytes(b"not HDF5")
  refused(tmp_path, OSError, "odd.h5|signature", checkpoints.merge,
          tmp_path / "odd.h5", tmp_path / "out.h5")
  (tmp_path / "odd.keras").write_bytes(b"not a zip")
  refused(tmp_path, OSError, "odd.keras cannot be read", checkpoints.merge,
          tmp_path / "odd.keras", tmp_path / "out.keras")


def test_directories_are_in_the_order_of_their_numbers(tmp_path):
  for i in 10, 9, 100:
    save_by_saver(tmp_path / f"model.ckpt-{i}", {"w": np.float32(i)})
  checkpoints.lawa(tmp_path, tmp_path / "out" / "mean", window=2)
  assert values_of(tmp_path / "out" / "mean") == {"w": 55}


# A new format


class NpzSource(_source.Source):
  kind = "NPZ"

  def __init__(self, path):
    super().__init__(path)
    with np.load(path) as file:
      self._values = dict(file)
    self.specs = {name: _source.Spec(value.shape, value.dtype)
                  for name, value in self._values.items()}

  def _is_optimizer_state(self, name):
    return name.startswith("optimizer")

  def _read(self, name, rows, into):
    return self._values[name]


class NpzSink(_sink.Sink):

  def __init__(self, path, specs, like):
    super().__init__(path)
    self._values = {}

  def write(self, values):
    self._values.update({name: value for name, _, value in values})

  def _finish(self):
    path = os.path.join(self._directory, os.path.basename(self.path))
    np.savez(path, **self._values)
    yield path


class Npz(_format.Format):
  Source, Sink = NpzSource, NpzSink
  endings = (".npz",)
  ending = ".npz"


def test_a_format_is_one_file_and_one_line(
    tmp_path, monkeypatch, capsys, two):
  monkeypatch.setattr(_formats, "FORMATS", (Npz, *_formats.FORMATS))
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
       "'weights.json' or '.index'")]:
    output = tmp_path / "new" / name
    refused(tmp_path, ValueError, "^" + re.escape(
        f"The name of the output must {rule}, since the last input is "
        f"{inputs[-1]}, got {output}.") + "$", checkpoints.merge, inputs,
      output)


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
