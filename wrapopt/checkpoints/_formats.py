"""The formats of checkpoints, found by the names of files.

The formats are those of TensorFlow (a Saver and `tf.train.Checkpoint` use the
same one), of Keras (`.weights.h5`, `.weights.json` with its shards, `.keras`,
and any other HDF5 file of variables) and of safetensors. A snapshot is a
checkpoint of one of the first two with a note that describes its averages.

The file of a format holds two classes: a Source reads a checkpoint and says how
its files are named, and a Sink writes one. A new format needs one such file and
one line in `FORMATS`.
"""

import os
import re

from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _keras
from wrapopt.checkpoints import _safetensors
from wrapopt.checkpoints import _sharded
from wrapopt.checkpoints import _tensorflow

# The first format that owns a name is the format of that name.
FORMATS = (
    _keras.KerasSource,
    _h5.H5Source,
    _sharded.ShardedSource,
    _safetensors.SafetensorsSource,
    _tensorflow.TensorFlowSource,  # The last: it owns all other names.
)


def format_of(path):
  """The class of Sources that owns a path."""
  return next(found for found in FORMATS if found.owns(path))


def ending_of(path):
  """The ending of the names of outputs that are like a checkpoint."""
  return format_of(path).output().ending


def open_source(path):
  """Opens a checkpoint.

  Args:
    path: A file of Keras, or the prefix of a TensorFlow checkpoint's files;
      one that `expand` gives.

  Returns:
    A Source.

  Raises:
    OSError: If it cannot be read.
    ValueError: If its contents do not fit its name.
  """
  with _files.naming(path, "cannot be read"):
    return format_of(path)(path)


def expand(path):
  """The checkpoints of a path.

  Args:
    path: The path of a checkpoint, of its file that ends in ".index", or of a
      directory, which means all checkpoints in it.

  Returns:
    A list of paths. Those of a directory are sorted by name, with numbers in
    names sorted by value.

  Raises:
    FileNotFoundError: If there is no checkpoint.
    ValueError: If a JSON file of sharded weights has other contents.
  """
  path = _files.path("inputs", path)
  if not os.path.isdir(path):
    path = format_of(path).path_of(path)
    if not format_of(path).exists(path):
      raise FileNotFoundError(
          f"There is no checkpoint '{path}'. Pass a .weights.h5 or .keras "
          "file, or the prefix of a TensorFlow checkpoint, which is the part "
          "before '.index'.")
    return [path]
  names = {name for name in os.listdir(path)
           if not name.startswith(".") and name.endswith(_endings())}
  for name in [*names]:
    names.difference_update(format_of(name).parts(os.path.join(path, name)))
  for known in FORMATS:
    names = {*known.main_of(names)} or names
  found = {os.path.join(path, format_of(name).path_of(name)) for name in names}
  if not found:
    raise FileNotFoundError(f"There is no checkpoint in the directory {path}.")
  return sorted(found, key=lambda name: [
      int(part) if part.isdigit() else part
      for part in re.split(r"(\d+)", os.path.basename(name))])


def _endings():
  """The `endings` of all formats."""
  return tuple(ending for known in FORMATS for ending in known.endings)


def output_of(path, like, max_shard_bytes):
  """The path of the main file of an output.

  Args:
    path: The argument `output` of `wrapopt.checkpoints.merge`.
    like: A Source.
    max_shard_bytes: As there.
  """
  known = format_of(like.path).output()
  if path.endswith(_endings()) and not known.owns(path):
    return path  # `check_output` refuses it.
  file = known.file_in(path, like, max_shard_bytes)
  if file != path and os.path.lexists(path) and not (
      os.path.isdir(path) and not os.listdir(path)):
    raise FileExistsError(f"The output {path} must be a new directory, got one "
                          "that has files. Choose another output.")
  return file


# Files of weights, and of the state of a training, in the folder of a model.
_OF_TRAINING = re.compile(
    r"\..*|.*\.(safetensors|index\.json|bin|pt|pth|h5|keras|ckpt|msgpack|gguf|"
    r"onnx)|(trainer|optimizer|scheduler|scaler|rng)_?state.*")


def rest_of(source):
  """The paths of files beside a checkpoint that belong to its model."""
  if not isinstance(source, _safetensors.SafetensorsSource):
    raise ValueError("`copy_rest` must be False but for models in folders of "
                     f"their own, as in safetensors, got {source.path}.")
  folder = os.path.dirname(os.path.abspath(source.path))
  return [os.path.join(folder, name) for name in sorted(os.listdir(folder))
          if not _OF_TRAINING.fullmatch(name) and os.path.isfile(
              os.path.join(folder, name))]


def check_output(path, like):
  """Checks the path of an output that has the format of a Source.

  Args:
    path: The path of the output.
    like: A Source.

  Raises:
    ValueError: If the path does not end in a name, or the name belongs to
      another format.
    FileExistsError: If the output exists.
  """
  if os.path.basename(path) in ("", os.curdir, os.pardir):
    raise ValueError("The output must end in the name of a file, got "
                     f"'{path}'. Pass a path such as 'averages/model'.")
  wanted = format_of(like.path).output()
  if format_of(path) is not wanted or wanted.path_of(path) != path:
    raise ValueError(
        f"The name of the output must {wanted.rule(_endings())}, since the "
        f"last input is {like.path}, got {path}.")
  # A checkpoint of another format may have the same path.
  for file in path, *(known.file_of(path) for known in FORMATS):
    if os.path.lexists(file):
      raise FileExistsError(
          f"The output {file} exists. Remove it, or choose another output.")
