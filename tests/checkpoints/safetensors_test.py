"""Checkpoints of safetensors: files, shards, dtypes, errors."""

import contextlib
import io
import json
import os
import subprocess
import sys
import types

import h5py
import ml_dtypes
import numpy as np
import pytest
import safetensors

from wrapopt import checkpoints
from wrapopt.checkpoints import __main__ as command
from wrapopt.checkpoints import _merge
from wrapopt.checkpoints import _safetensors

KINDS = {kind: np.dtype(dtype) for kind, dtype in _safetensors._DTYPES.items()}
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
  """Parts of three numbers, in two threads."""
  monkeypatch.setattr(_merge, "_PART", 3)
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def write(path, tensors, metadata=None, kinds=None):
  """Writes a file as the format is described, in the order of a dict."""
  names = {dtype: kind for kind, dtype in KINDS.items()}
  header, end = {"__metadata__": metadata} if metadata else {}, 0
  for name, x in tensors.items():
    header[name] = {
        "dtype": (kinds or {}).get(name) or names[x.dtype],
        "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
    end += x.nbytes
  text = json.dumps(header).encode()
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(len(text).to_bytes(8, "little") + text +
                   b"".join(x.tobytes() for x in tensors.values()))
  return path


def write_shards(folder, *shards, **others):
  """Writes shards and their index; returns the path of the index."""
  n = len(shards)
  files = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
  for file, tensors in zip(files, shards):
    write(folder / file, tensors, {"format": "pt"})
  (folder / INDEX).write_text(json.dumps({
      "metadata": {"total_size": 0, "kept": "yes"},
      "weight_map": {name: file for file, tensors in zip(files, shards)
                     for name in tensors}, **others}))
  return folder / INDEX


def parts_of(path):
  """(header, the bytes after it) of a file."""
  raw = path.read_bytes()
  begin = 8 + int.from_bytes(raw[:8], "little")
  return json.loads(raw[8:begin]), raw[begin:]


def read(path):
  """(metadata, {name: (dtype, array)}) of a file, by the library."""
  header, data = parts_of(path)
  with safetensors.safe_open(path, "np") as file:
    found = {}
    for name in file.keys():
      tensor = file.get_slice(name)
      found[name] = tensor.get_dtype(), np.frombuffer(
          data[slice(*header[name]["data_offsets"])],
          KINDS[tensor.get_dtype()]).reshape(tensor.get_shape())
    return file.metadata(), found


def values_of(rng, dtype, shape):
  return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("kind", [
    kind for kind, dtype in KINDS.items() if dtype in (
        *_merge._source.FLOATS,)])
def test_each_dtype_is_rounded_once(tmp_path, kind):
  rng, dtype = np.random.default_rng(0), KINDS[kind]
  values = [values_of(rng, dtype, (50, 7)) for _ in range(3)]
  paths = [write(tmp_path / f"{i}.safetensors", {
      "w": x, "empty": x[:0], "scalar": x[0, 0]})
           for i, x in enumerate(values)]
  checkpoints.merge(paths, tmp_path / "out.safetensors", [1, 2, 3])
  _, found = read(tmp_path / "out.safetensors")
  total = -0.0
  for weight, x in zip((1, 2, 3), values):
    total = total + weight * x.astype(np.float64)
  total /= 6
  # The nearest number of the dtype, found among all of its neighbours.
  got = found["w"][1]
  assert found["w"][0] == kind and got.dtype == dtype
  assert found["empty"][1].shape == (0, 7) and found["scalar"][1].shape == ()
  wide = got.astype(np.float64)
  width = f"u{dtype.itemsize}"
  for step in -1, 1:
    other = (got.view(width) + np.array(step).astype(width)).view(dtype)
    other = other.astype(np.float64)
    is_there = np.isfinite(other)
    assert (np.abs(wide - total)[is_there] <=
            np.abs(other - total)[is_there]).all()


def test_rounding_is_that_of_one_step():
  """Halfway between two bfloat16 numbers, and a little more or less."""
  for dtype in ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn:
    low = np.array([1.0, 1.125, -1.0, 0.0]).astype(dtype)
    high = (low.view(f"u{low.itemsize}") + 1).view(low.dtype)
    low, high = low.astype(np.float64), high.astype(np.float64)
    middle = (low + high) / 2
    for sign, expected in (1, high), (-1, low):
      near = middle + sign * np.sign(high - low) * 1e-13 * np.abs(middle)
      np.testing.assert_array_equal(
          _merge._rounded(near, np.dtype(dtype)).astype(np.float64), expected)


@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 10])
def test_a_mean_halfway_is_rounded_to_even(tmp_path, count):
  """Late checkpoints in bfloat16 differ in the last bit: often, by a half."""
  x = np.arange(0x3f80, 0x3f80 + 64, dtype=np.uint16)
  up = np.random.default_rng(0).integers(0, 2, (count, 64)).astype(np.uint16)
  for i in range(count):
    write(tmp_path / f"{i}.safetensors",
          {"w": (x + up[i]).view(ml_dtypes.bfloat16)})
  checkpoints.merge(tmp_path, tmp_path / "out.safetensors")
  # Halfway, the even one of two numbers.
  twice = 2 * up.sum(0, dtype=np.int64)
  want = x + (twice > count) + ((twice == count) & (x & 1))
  _, found = read(tmp_path / "out.safetensors")
  np.testing.assert_array_equal(found["w"][1].view(np.uint16), want)


def test_what_is_copied(tmp_path, monkeypatch):
  """Integers, bools, and dtypes that NumPy lacks, from the last input."""
  monkeypatch.setattr(_safetensors, "_CHUNK", 2)
  for i in range(2):
    write(tmp_path / f"{i}.safetensors", {
        "mask": np.array([i == 1]), "bn.num_batches_tracked": np.int64(i + 5),
        "bn.running_mean": np.float32([i, 1]),
        "z": np.complex64([1j * i]), "odd": np.uint8([i, 7, 9])},
          {"format": "pt", "made by": str(i)}, {"odd": "F8_E8M0"})
  out = tmp_path / "out.safetensors"
  command.main(["merge", f"{tmp_path}/0.safetensors",
                f"{tmp_path}/1.safetensors", "--output", str(out)])
  header, data = parts_of(out)
  assert header["odd"]["dtype"] == "F8_E8M0"
  assert (out.stat().st_size - len(data)) % 8 == 0
  for name, x in header.items():  # Numbers are aligned.
    if x.get("dtype") in KINDS:
      assert x["data_offsets"][0] % KINDS[x["dtype"]].itemsize == 0, name
  assert data[slice(*header["odd"]["data_offsets"])] == bytes([1, 7, 9])
  assert header["__metadata__"]["format"] == "pt"
  assert header["__metadata__"]["made by"] == "1"
  made = json.loads(header["__metadata__"]["wrapopt"])
  assert made["by"] == "merge" and made["weights"] == [.5, .5]
  assert made["inputs"] == [f"{tmp_path}/{i}.safetensors" for i in range(2)]
  with safetensors.safe_open(out, "np") as file:
    assert file.get_tensor("bn.num_batches_tracked") == 6
    assert file.get_tensor("mask").all()
    np.testing.assert_array_equal(file.get_tensor("bn.running_mean"), [.5, 1])
    np.testing.assert_array_equal(file.get_tensor("z"), [1j])


@pytest.fixture
def run(tmp_path):
  """Folders of a run, with shards, a configuration and a state of training."""
  rng = np.random.default_rng(1)
  for step in 900, 1000:
    folder = tmp_path / f"checkpoint-{step}"
    write_shards(folder, {"b": values_of(rng, np.float32, (3, 2))},
                 {"a": values_of(rng, np.float32, 5),
                  "c": values_of(rng, np.float32, 9)})
    (folder / "config.json").write_text(f'{{"step": {step}}}')
    (folder / "optimizer.pt").write_bytes(b"state")
    (folder / "trainer_state.json").write_text("{}")
  return tmp_path


def means(run):
  found = {}
  for folder in "checkpoint-900", "checkpoint-1000":
    for shard in sorted((run / folder).glob("*.safetensors")):
      for name, (_, x) in read(shard)[1].items():
        found[name] = found.get(name, 0) + x.astype(np.float64) / 2
  return {name: np.float32(x) for name, x in found.items()}


def read_all(folder):
  index = json.loads((folder / INDEX).read_text())
  found = {}
  for name, file in index["weight_map"].items():
    found[name] = read(folder / file)[1][name][1]
  return index, found


@pytest.mark.parametrize("size, files", [(None, 2), (60, 2), ("20B", 3)])
def test_folders_with_shards(run, size, files):
  checkpoints.merge([run / "checkpoint-900", run / "checkpoint-1000"],
                    run / "merged", copy_rest=True, max_shard_size=size)
  index, found = read_all(run / "merged")
  assert len({*index["weight_map"].values()}) == files
  assert index["metadata"] == {"total_size": 80, "kept": "yes"}
  expected = means(run)
  assert found.keys() == expected.keys()
  for name, x in found.items():
    np.testing.assert_array_equal(x, expected[name])
  assert sorted(f.name for f in (run / "merged").iterdir() if
                f.suffix != ".safetensors") == ["config.json", INDEX]
  assert json.loads((run / "merged/config.json").read_text())["step"] == 1000


def test_shards_in_one_file_and_back(run):
  checkpoints.merge(run / "checkpoint-900", run / "one.safetensors")
  _, found = read(run / "one.safetensors")
  _, before = read_all(run / "checkpoint-900")
  assert all(np.array_equal(found[name][1], x) for name, x in before.items())
  checkpoints.merge(run / "one.safetensors", run / "new", max_shard_size=30)
  index, found = read_all(run / "new") if (run / "new" / INDEX).exists() else (
      None, None)
  assert index is None  # Its name is that of the input.
  assert len([*(run / "new").glob("one-*-of-00003.safetensors")]) == 3


def test_other_files_in_a_folder(run):
  """A model's folder may hold an adapter, which is no checkpoint of it."""
  write(run / "checkpoint-1000" / "adapter_model.safetensors",
        {"other": np.float32([1])})
  checkpoints.merge([run / "checkpoint-900", run / "checkpoint-1000"],
                    run / "merged")
  assert read_all(run / "merged")[1].keys() == means(run).keys() - {"other"}


def test_other_formats_tell_how_they_were_made(tmp_path):
  for i in range(2):
    with h5py.File(tmp_path / f"{i}.h5", "w") as file:
      file["w"] = np.float32([i])
  checkpoints.merge(tmp_path, tmp_path / "out.h5")
  with h5py.File(tmp_path / "out.h5") as file:
    assert json.loads(file.attrs["wrapopt"])["weights"] == [.5, .5]


def test_decay_and_order_of_folders(run):
  """The step is that of the folder."""
  out = run / "out.safetensors"
  fitted = checkpoints.merge([run / "checkpoint-900", run / "checkpoint-1000"],
                             out, decay="linear")
  np.testing.assert_allclose(fitted.weights, [.5, .5])
  for function in checkpoints.lawa, checkpoints.ema:
    with pytest.raises(ValueError, match="must be in the order of training"):
      function(sorted(run.glob("checkpoint-*")), run / "no.safetensors",
               **({"window": 2} if function is checkpoints.lawa else {}))
  assert not (run / "no.safetensors").exists()


@pytest.mark.parametrize("base", [None, "base"])
def test_blend(tmp_path, base):
  rng = np.random.default_rng(2)
  values = [values_of(rng, np.float32, 8) for _ in range(4)]
  paths = [write(tmp_path / f"{name}.safetensors", {"w": x})
           for name, x in zip(["a-1", "a-2", "a-3", "base"], values)]
  checkpoints.merge(
      paths[:3], tmp_path / "out.safetensors", blend=0.7,
      base=base and tmp_path / "base.safetensors")
  of_base = values[3 if base else 2].astype(np.float64)
  mean = np.mean([x.astype(np.float64) for x in values[:3]], axis=0)
  np.testing.assert_allclose(
      read(tmp_path / "out.safetensors")[1]["w"][1],
      .3 * of_base + .7 * mean, rtol=1e-7)


def test_a_dry_run_and_the_first_lines(run, capsys):
  inputs = [str(run / "checkpoint-900"), str(run / "checkpoint-1000")]
  before = sorted(run.rglob("*"))
  command.main(["merge", *inputs, "--weights", "1", "3", "--output",
                str(run / "out"), "--dry-run"])
  printed = capsys.readouterr().out
  assert f"    0.250000  {run}/checkpoint-900/{INDEX}\n" in printed
  assert "  averaged: 3 variables, 20 numbers of float32\n" in printed
  assert "reads 160 bytes, writes 80 bytes" in printed
  assert "nothing was written" in printed and sorted(run.rglob("*")) == before
  command.main(["merge", *inputs, "--output", str(run / "out")])
  assert "    0.500000  " in capsys.readouterr().out
  assert (run / "out" / INDEX).exists()


def test_all_differences_are_named(tmp_path):
  paths = [write(tmp_path / f"{i}.safetensors", tensors) for i, tensors in
           enumerate([{"a": np.float32([1]), "b": np.float32([1])},
                      {"a": np.float32([1, 2]), "c": np.float32([1])}])]
  with pytest.raises(ValueError) as e:
    checkpoints.merge(paths, tmp_path / "out.safetensors")
  assert "Variable 'a'" in str(e.value) and "variable 'c'" in str(e.value)
  assert "got 'b'" in str(e.value)


def refused(folder, match, *args, error=(OSError, ValueError), **kwargs):
  before = sorted(folder.rglob("*"))
  with pytest.raises(error, match=match):
    checkpoints.merge(*args, **kwargs)
  assert sorted(folder.rglob("*")) == before


def test_bad_files(tmp_path):
  good = write(tmp_path / "good.safetensors", {"w": np.float32([1, 2])})
  data, out = good.read_bytes(), tmp_path / "new" / "out.safetensors"
  header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}
  text = json.dumps(header).encode()
  for name, bad in {
      "truncated": data[:-3], "short": data[:5], "none": b"",
      "overlap": len(text).to_bytes(8, "little") + text + bytes(12),
      "large header": (200_000_000).to_bytes(8, "little") + data[8:],
      "no json": (8).to_bytes(8, "little") + b"x" * 20}.items():
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(bad)
    refused(tmp_path, f"{name}.safetensors cannot be read", [good, path], out)
  refused(tmp_path, "There is no checkpoint",
          [good, tmp_path / "missing.safetensors"], out)
  refused(tmp_path, "exists. Remove it", [good, good], good)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "..",
                                  "sub/x.safetensors", ""])
def test_an_index_that_names_files_elsewhere(tmp_path, name):
  write(tmp_path / "x.safetensors", {"w": np.float32([1])})
  folder = tmp_path / "model"
  write_shards(folder, {"w": np.float32([1])}, weight_map={"w": name})
  refused(tmp_path, "must name files of its own folder", folder / INDEX,
          tmp_path / "out.safetensors")


def test_an_index_that_is_not_that_of_its_shards(tmp_path):
  index = write_shards(tmp_path, {"a": np.float32([1])}, {"b": np.float32([1])})
  content = json.loads(index.read_text())
  for change, match in (
      ({"c": content["weight_map"]["a"]}, "lacks 'c'"),
      ({"a": content["weight_map"]["b"]}, "lacks 'a'"),
      ({"b": "gone.safetensors"}, "cannot be read: .*gone.safetensors")):
    index.write_text(json.dumps({
        **content, "weight_map": {**content["weight_map"], **change}}))
    refused(tmp_path, match, index, tmp_path / "out.safetensors")
  index.write_text("[]")
  refused(tmp_path, "must be a JSON file with a 'weight_map'", index,
          tmp_path / "out.safetensors")


def test_inputs_of_other_dtypes(tmp_path):
  """Other floating-point numbers are averaged, integers are refused."""
  values = np.float32([1 + 2**-20, 3]), np.float64([2, 9]), np.float16([5, 7])
  paths = [write(tmp_path / f"{x.dtype}.safetensors", {"w": x}) for x in values]
  checkpoints.merge(paths, tmp_path / "out.safetensors")
  kind, found = read(tmp_path / "out.safetensors")[1]["w"]
  assert kind == "F16"
  np.testing.assert_array_equal(found, np.float16(
      sum(x.astype(np.float64) for x in values) / 3))
  other = write(tmp_path / "other.safetensors", {"w": np.int32([1, 2])})
  new = tmp_path / "new" / "out.safetensors"
  refused(tmp_path, "must be of dtype .* got int32", [other, *paths], new)
  refused(tmp_path, "must have floating-point variables to average",
          [paths[0], other], new)


@pytest.mark.parametrize("function, options", [
    (checkpoints.merge, {"weights": [1, 2, 4]}),
    (checkpoints.merge, {"weights": [1e-300, 3e-300, 7e-300]}),
    (checkpoints.merge, {"blend": .3, "base": "2.safetensors"}),
    (checkpoints.merge, {"decay": "1-sqrt", "steps": [1, 2, 5]}),
    (checkpoints.ema, {"decay": .7, "only": "w"})])
def test_the_metadata_tell_how_to_make_it_again(tmp_path, monkeypatch, function,
                                                options):
  monkeypatch.chdir(tmp_path)
  rng = np.random.default_rng(3)
  for i in range(3):
    write(tmp_path / f"{i}.safetensors", {
        "w": values_of(rng, np.float32, 500), "v": np.float32([i])})
  function([f"{i}.safetensors" for i in range(3)], "out.safetensors", **options)
  metadata, found = read(tmp_path / "out.safetensors")
  made = json.loads(metadata["wrapopt"])
  checkpoints.merge(made["inputs"], "again.safetensors", made["weights"],
                    only=made["only"])
  _, again = read(tmp_path / "again.safetensors")
  for name, (kind, x) in found.items():
    assert again[name][0] == kind and again[name][1].tobytes() == x.tobytes()


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("has_tqdm", [False, True])
def test_a_bar_is_for_terminals_and_needs_tqdm(tmp_path, monkeypatch,
                                               is_terminal, has_tqdm):
  for i in range(2):
    write(tmp_path / f"{i}.safetensors", {"w": np.float32([i])})
  totals = []

  class Bar(contextlib.nullcontext):

    def update(self, size):
      totals[-1] -= size

  def tqdm(total, **kwargs):
    assert kwargs["unit"] == "B"
    totals.append(total)
    return Bar(Bar())

  monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=tqdm))
  monkeypatch.setattr(command.importlib.util, "find_spec",
                      lambda name: has_tqdm and name == "tqdm" or None)
  monkeypatch.setattr(sys, "stderr", io.StringIO())
  monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
  command.main(["merge", str(tmp_path), "--output",
                str(tmp_path / "out.safetensors")])
  # All bytes that are read come to the bar.
  assert totals == [0] * (is_terminal and has_tqdm)


def test_nan_is_refused_and_named(tmp_path):
  paths = [write(tmp_path / f"{i}.safetensors", {
      "ok": np.float32([np.inf]), "w": np.float32([1, x])})
           for i, x in enumerate([1, np.nan])]
  out = tmp_path / "out.safetensors"
  refused(tmp_path, "Variable 'w' must have no NaN, got some in .*1.safet",
          paths, out)
  checkpoints.merge(paths, out, allow_nan=True)
  assert np.isnan(read(out)[1]["w"][1]).tolist() == [False, True]


@pytest.mark.parametrize("name, dtype", [
    ("layer.weight", ml_dtypes.float8_e4m3fn), ("layer.qweight", np.int32)])
def test_quantized_weights(tmp_path, name, dtype):
  paths = [write(tmp_path / f"{i}.safetensors", {
      name: np.array([1, 1 + i]).astype(dtype),
      "layer.weight_scale": np.float32([i])}) for i in range(3)]
  out = tmp_path / "out.safetensors"
  refused(tmp_path, f"quantized variable '{name}'", paths, out)
  checkpoints.merge([paths[0], paths[0]], out)
  checkpoints.merge(paths, tmp_path / "chosen.safetensors", only="scale")


def test_outputs_that_are_there(run):
  one = run / "one.safetensors"
  write(one, {"w": np.float32([1])})
  refused(run, "must be a new directory, got one", run / "checkpoint-900",
          run / "checkpoint-1000")
  refused(run, "must end in '.safetensors' or", one, run / "x.keras")
  refused(run, "must end in '.safetensors.index.json' or", one,
          run / "x.safetensors", max_shard_size=5)
  for size in 0, -1, "5 parsecs", True, 1.5:
    refused(run, "`max_shard_size` must be", one, run / "new",
            max_shard_size=size)
  (run / "x").mkdir()
  (run / "x" / "config.json").write_text("mine")
  refused(run, "config.json exists", run / "checkpoint-900",
          run / "x" / INDEX, copy_rest=True)
  (run / "x" / "model-00001-of-00002.safetensors").write_text("mine")
  refused(run, "the shard model-00001-of-00002.safetensors exists",
          run / "checkpoint-900", run / "x" / INDEX)


def test_no_space(tmp_path, monkeypatch):
  path = write(tmp_path / "a.safetensors", {"w": np.float32([1, 2])})

  def full(*_):
    raise OSError(28, "No space left on device")
  monkeypatch.setattr(os, "posix_fallocate", full)
  refused(tmp_path, "out.safetensors cannot be written: .*No space left", path,
          tmp_path / "new" / "out.safetensors")


def test_memory_is_that_of_parts(tmp_path):
  """Five inputs take less than the one tensor of an input."""
  nbytes = 32 << 20
  paths = [write(tmp_path / f"{i}.safetensors", {
      "w": np.zeros(nbytes // 4, np.float32)}) for i in range(5)]
  small = write(tmp_path / "small.safetensors", {"w": np.float32([1])})
  program = (
      "import os, resource, sys\n"
      "from wrapopt import checkpoints\n"
      "os.sched_setaffinity(0, [*os.sched_getaffinity(0)][:2])\n"
      "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
      "checkpoints.merge(sys.argv[1], sys.argv[2])\n"
      "before = peak()\n"
      "checkpoints.merge(sys.argv[4:], sys.argv[3])\n"
      "print(peak() - before)\n")
  done = subprocess.run(
      [sys.executable, "-c", program, small,
       *(tmp_path / f"{name}.safetensors" for name in ("one", "out")), *paths],
      capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) < nbytes // 1024  # KB.
