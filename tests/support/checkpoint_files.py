"""Small checkpoints of all formats, and readers that share no code with ours.

Nothing here needs Keras: its files are written with h5py and zipfile.
"""

import io
import json
import os
import re
import zipfile

import h5py
import ml_dtypes
import numpy as np
import tensorflow as tf

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32),
          np.dtype(np.float64))
WEIGHTS = "model.weights.h5"
NOTE = "wrapopt/snapshot"

# {format: ending of the paths}.
ENDINGS = {"tensorflow": "", "objects": "", "tensorflow-snapshots": "",
           "h5": ".weights.h5", "h5-snapshots": ".weights.h5",
           "keras": ".keras", "sharded": ".weights.json"}
# Nothing in an HDF5 file says whether its bytes are those that were written.
WITHOUT_CHECKSUMS = ("h5", "h5-snapshots", "sharded")


def _values(seed, last):
  rng = np.random.default_rng(seed)
  x = lambda *shape: np.asarray(rng.standard_normal(shape), np.float32)
  return {"dense/kernel": x(20, 7).astype(
      np.float64 if last else np.float32), "dense/bias": x(7),
          "norm/scale": x(5, 3).astype(np.float16),
          "norm/brain": x(9).astype(BFLOAT16), "scalar": x(),
          "empty": x(0, 2), "step": np.int64(seed), "sliced": x(4, 3)}


def write(format, path, seed, last):  # pylint: disable=redefined-builtin
  """Writes a checkpoint.

  Args:
    format: One of `ENDINGS`.
    path: Its path.
    seed: The numbers in it.
    last: Whether it is the last input: the dtypes in it.
  """
  values = _values(seed, last)
  note = json.dumps({"step": 100 * (seed % 10 + 1),
                     "steps": 100 * (seed % 10 + 1), "decay": "x",
                     "gamma": 6.94, "dtypes": {}, "others": [
                         "layers/step" if format.startswith("h5") else "step"
                     ]})
  if format.startswith("tensorflow"):
    sliced = values.pop("sliced")
    values["text"] = np.array([b"some", b"words"], object)
    if "snapshots" in format:
      values[NOTE] = np.array(note.encode(), object)
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=[*values, "sliced", "sliced"],
        shape_and_slices=[""] * len(values) + ["4 3 0,2:0,3", "4 3 2,2:0,3"],
        tensors=[*map(tf.constant, values.values()), sliced[:2], sliced[2:]])
  elif format == "objects":
    model, optimizer = tf.Module(), tf.Module()
    for name, value in values.items():
      setattr(model, name.replace("/", "_"), tf.Variable(value))
    # As an optimizer of Keras with a schedule, whose state is not averaged; but
    # what it trains is.
    optimizer._iterations = tf.Variable(np.int64(seed))
    optimizer._variables = [optimizer._iterations,
                            tf.Variable(np.float32(seed))]
    optimizer._trainable_variables = [model.dense_kernel]
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(path)
  elif format == "keras":
    file = io.BytesIO()
    _write_h5(file, values, seed)
    with zipfile.ZipFile(path, "w") as archive:
      archive.writestr("metadata.json", json.dumps({"keras_version": "3"}))
      archive.writestr("config.json", json.dumps({"name": f"model {seed}"}),
                       zipfile.ZIP_DEFLATED)
      archive.writestr(WEIGHTS, file.getvalue())
  elif format == "sharded":
    shards = [path.removesuffix(".json") + f"_{i}.weights.h5" for i in range(2)]
    names = sorted(values)
    for shard, part in zip(shards, (names[::2], names[1::2])):
      _write_h5(shard, {name: values[name] for name in part}, seed)
    with open(path, "w", encoding="utf-8") as file:
      json.dump({"metadata": {}, "weight_map": {
          "/layers": [os.path.basename(shard) for shard in shards]}}, file)
  else:
    if "snapshots" in format:
      values[NOTE] = note
    _write_h5(path, values, seed)


def _write_h5(to, values, seed):
  with h5py.File(to, "w") as file:
    for name, value in values.items():
      if name == NOTE:
        file[name] = value
        continue
      key, of_bytes = f"layers/{name}", value.dtype == BFLOAT16
      file.create_dataset(key, data=value.view("V2") if of_bytes else value,
                          **({"chunks": (6, 7), "compression": "gzip",
                              "shuffle": True} if name == "dense/kernel" else
                             {}))
      if of_bytes:
        file[key].attrs["dtype"] = "bfloat16"
    file.require_group("layers").attrs["name"] = "layers"
    if "dense/bias" in values:
      # That of the model, of a GAN, of a part that was compiled.
      for at in "", "g_", "layers/part/":
        file[f"{at}optimizer/vars/0"] = np.int64(seed)
        file[f"{at}optimizer/vars/1"] = np.float32([seed, 2])
      file["layers/words"] = "some words"
      file["layers/again"] = h5py.SoftLink("/layers/dense/bias")
      file["layers/same"] = file["layers/dense/bias"]


def values_of(path):
  """{name: array} of a checkpoint of TensorFlow, as it reads them."""
  reader = tf.train.load_checkpoint(str(path))
  return {name: reader.get_tensor(name)
          for name in reader.get_variable_to_shape_map()}


def contents(format, path):  # pylint: disable=redefined-builtin
  """All that a checkpoint holds.

  Args:
    format: One of `ENDINGS`. The output of "sharded" is of the format "h5".
    path: Its path.

  Returns:
    {name: array, bytes, or a str for what cannot be read}.
  """
  if format.startswith("tensorflow") or format == "objects":
    dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    return {name: np.asarray(value, dtypes[name].as_numpy_dtype)
            for name, value in values_of(path).items()}
  if format == "keras":
    with zipfile.ZipFile(path) as archive:
      found = {name: archive.read(name) for name in archive.namelist()}
    weights = io.BytesIO(found.pop(WEIGHTS))
    return {**found, **_contents_of_h5(weights)}
  if format == "sharded":
    with open(path, encoding="utf-8") as file:
      shards = json.load(file)["weight_map"].values()
    found = {}
    for name in sorted({name for names in shards for name in names}):
      found.update(_contents_of_h5(os.path.join(os.path.dirname(path), name)))
    return found
  return _contents_of_h5(path)


def _contents_of_h5(file):
  found = {}
  with h5py.File(file, "r") as file:
    _add(found, file["/"], "", {h5py.h5o.get_info(file.id).addr: "/"})
  return found


def _add(found, group, prefix, known):
  for key in group:
    name = prefix + key
    if isinstance(group.get(key, getlink=True), h5py.SoftLink):
      found[name] = f"link to {group.get(key, getlink=True).path}"
      continue
    item = group[key]
    first = known.setdefault(h5py.h5o.get_info(item.id).addr, name)
    if first != name:
      found[name] = f"link to {first}"
      continue
    try:
      for attribute in item.attrs:
        found[f"{name}@{attribute}"] = item.attrs[attribute]
    except RuntimeError as e:  # Only the last input's are needed.
      found[f"{name}@"] = f"cannot be read: {type(e).__name__}"
    if isinstance(item, h5py.Dataset):
      try:
        value = np.asarray(item[()])
        if item.attrs.get("dtype") == "bfloat16":
          value = value.view(BFLOAT16)
        found[name] = value
      except (OSError, RuntimeError) as e:
        found[name] = f"cannot be read: {type(e).__name__}"
    elif isinstance(item, h5py.Group):
      _add(found, item, name + "/", known)


def note_of(of):
  """The note of a snapshot in its contents."""
  return json.loads(of[NOTE][()])


def is_averaged(name, value):
  return (isinstance(value, np.ndarray) and value.dtype in FLOATS and
          not re.search("(^|/|g_)optimizer/", name))


def mean(inputs, weights):
  """What the weighted mean of checkpoints holds: NumPy in float64, in order.

  Args:
    inputs: [contents].
    weights: [float]; or [int], and the sum is divided by that of these.

  Returns:
    Contents, with the float64 numbers of what is averaged.
  """
  unit = sum(weights) if isinstance(weights[0], int) else 1
  last = inputs[-1]
  result = dict(last)
  for name, value in last.items():
    if is_averaged(name, value):
      total = np.zeros(value.shape)
      for of, weight in zip(inputs, weights):
        if weight:
          total = total + weight * np.asarray(of[name], np.float64)
      result[name] = total / unit
  return result


def difference(got, expected, dtypes):
  """How contents differ, or None.

  Args:
    got: Contents of an output.
    expected: From `mean`.
    dtypes: Contents that have the dtypes of the output, the last input's.

  Returns:
    A string or None.
  """
  if got.keys() != expected.keys():
    return f"names: {sorted(got.keys() ^ expected.keys())}"
  for name, value in expected.items():
    x = got[name]
    if is_averaged(name, dtypes[name]):
      if x.dtype != dtypes[name].dtype or x.shape != value.shape:
        return f"'{name}': {x.dtype}{x.shape}, not {dtypes[name].dtype}"
      # One rounding, to a dtype with so many bits.
      with np.errstate(over="ignore", invalid="ignore"):
        unit = float(ml_dtypes.finfo(x.dtype).eps)
        tiny = float(ml_dtypes.finfo(x.dtype).smallest_subnormal)
        x = np.asarray(x, np.float64)
        most = float(ml_dtypes.finfo(dtypes[name].dtype).max)
        is_close = (np.abs(x - value) <= unit * np.abs(value) + tiny) | (
            x == value) | (np.isnan(x) & np.isnan(value)) | (
                np.isinf(x) & (np.abs(value) > most))
      if not is_close.all():
        return f"numbers of '{name}': {x}, not {value}"
    elif isinstance(value, np.ndarray):
      if (x.dtype, x.shape) != (value.dtype, value.shape) or not (
          np.array_equal(x, value) or x.tobytes() == value.tobytes()):
        return f"'{name}': {x!r}, not {value!r}"
    elif isinstance(value, str) and value.startswith("cannot"):
      continue  # A copy of what is damaged.
    elif re.sub(r"\s", "", repr(x)) != re.sub(r"\s", "", repr(value)):
      return f"'{name}': {x!r}, not {value!r}"
  return None
