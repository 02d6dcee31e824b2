"""The base class of checkpoints to read."""

import json
import os
import re
import time
import typing

import ml_dtypes
import numpy as np

from wrapopt import _native
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _sink

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIDE_FLOATS = tuple(map(np.dtype, _native.DTYPES))
FLOATS = (*WIDE_FLOATS, *map(np.dtype, (
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2fnuz)))

# The variable that holds the note of a snapshot, a string.
NOTE = "wrapopt/snapshot"

# The name of what the metadata of a file say of how it was made.
MADE = "wrapopt"

# The types of its values.
_OF_NOTE = {"step": int, "steps": (int, float, type(None)), "decay": str,
            "gamma": (int, float, type(None)), "others": list, "dtypes": dict}

# A file system may give changes that are this close the same time: a tick of
# its clock, with a margin.
_TICK_SECONDS = 0.02


class Spec(typing.NamedTuple):
  """The shape and dtype of a variable."""
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def size(self):
    return int(np.prod(self.shape, dtype=np.int64))

  @property
  def nbytes(self):
    return self.size * self.dtype.itemsize


class Source:
  """A checkpoint to read. Its class is a format: how its files are named.

  A subclass sets `kind`, `endings` and `specs`, and defines
  `_is_optimizer_state` and `_read`. One that can also be written sets `Sink`
  and `ending`; another one defines `output`.

  Each checkpoint has a main file. For most formats, its name is the path of the
  checkpoint.

  Attributes:
    kind: The name of the format, for users.
    Sink: The class of a checkpoint of this format to write.
    endings: The endings of the names of main files. An output needs the first.
    ending: The ending of names that the program chooses.
    in_parts: Whether threads may read parts of variables, and a Sink of the
      format writes them.
    path: Its path.
    specs: {name of a variable: Spec}.
    note: The note of a snapshot, a dict, or None.
  """
  kind: str
  Sink: type[_sink.Sink]
  endings: tuple[str, ...]
  ending: str
  in_parts = False

  @classmethod
  def owns(cls, path):
    """Whether the path of a checkpoint has a name of this format."""
    return path.endswith(cls.endings)

  @classmethod
  def rule(cls, endings):
    """The rule for names of outputs, as an error says it after "must".

    Args:
      endings: The `endings` of all formats.

    Returns:
      A string.
    """
    del endings
    return f"end in '{cls.endings[0]}'"

  @classmethod
  def exists(cls, path):
    """Whether there is a checkpoint of this path."""
    return os.path.exists(path)

  @classmethod
  def path_of(cls, file):
    """The path of the checkpoint that has a main file."""
    return file

  @classmethod
  def file_of(cls, path):
    """The path of the main file of a checkpoint."""
    return path

  @classmethod
  def parts(cls, path):
    """The names of files of a checkpoint that look like checkpoints.

    Args:
      path: The path of a checkpoint.

    Returns:
      A list of the names of other files in its directory.

    Raises:
      ValueError: If the contents of the checkpoint do not fit its name.
    """
    del path
    return []

  @classmethod
  def file_in(cls, directory, like, max_shard_bytes):
    """The path of an output in a new directory; `directory` if it is that.

    Args:
      directory: The path of the output.
      like: The last input.
      max_shard_bytes: As in `wrapopt.checkpoints.merge`.
    """
    if max_shard_bytes is not None:
      raise ValueError(f"`max_shard_size` must be None for {cls.kind} files, "
                       f"which have no shards, got {max_shard_bytes} bytes.")
    del like
    return directory

  @classmethod
  def main_of(cls, names):
    """The names of files that are the checkpoint of a directory.

    Args:
      names: Those of all main files there.

    Returns:
      A list. If it is empty, all are checkpoints.
    """
    del names
    return []

  @classmethod
  def output(cls):
    """The format of an output whose last input has this format."""
    return cls

  def __init__(self, path):
    self.path = path
    # Before anything is read.
    self._stamps = {file: _stamp(file) for file in self._files()}
    self.specs = {}
    self.note = None

  def _files(self):
    """The paths of the files of the checkpoint that are there."""
    return [self.path]

  def is_averaged(self, name):
    """Whether a variable is averaged by default.

    State of optimizers is not. In a snapshot, only averages are.
    """
    return not (self._is_optimizer_state(name) or
                self.note and name in self.note["others"])

  def _is_optimizer_state(self, name):
    """Whether a variable is state of an optimizer."""
    raise NotImplementedError

  def dtype(self, name):
    """The dtype of the variable in the model; a snapshot may be narrower."""
    if self.note and name in self.note["dtypes"]:
      return np.dtype(getattr(ml_dtypes, self.note["dtypes"][name], None) or
                      self.note["dtypes"][name])
    return self.specs[name].dtype

  def moving_statistics(self):
    """Names of variables that are statistics of batch normalizations."""
    return sorted(name for name in self.specs
                  if re.search("moving_(mean|variance)", name))

  def quantized(self, names):
    """Variables of integers or float8 whose scale may be averaged.

    Args:
      names: Those of the variables that are averaged.

    Returns:
      {name of the variable: name of the scale}.
    """
    scales, numbered = {}, {}
    for name in names:
      layer, own = self._split(name)
      if "scale" in own:
        scales[layer] = name
      elif own.isdigit():  # As in files of Keras.
        numbered[layer] = name
    found = {}
    for name, spec in self.specs.items():
      layer, _ = self._split(name)
      scale = scales.get(layer) or (
          spec.dtype.itemsize == 1 and numbered.get(layer))
      if (scale and scale != name and spec.size > 1 and
          spec.dtype not in WIDE_FLOATS and spec.dtype.kind != "b" and
          not self._is_optimizer_state(name)):
        found[name] = scale
    return found

  def _split(self, name):
    """(name of the layer, name in it) of a variable."""
    layer, _, own = name.removesuffix(
        "/.ATTRIBUTES/VARIABLE_VALUE").rpartition("/")
    return layer, own

  def verify(self):
    """Verifies the checksums that `read` does not verify.

    Raises:
      OSError: If one is wrong.
    """

  def check_unchanged(self):
    """Checks that no other program has written to the files.

    Not all formats have checksums, and none has one of all of its files.

    Raises:
      OSError: If a file is not the one that was there at first.
    """
    for file, stamp in self._stamps.items():
      if _stamp(file) != stamp:
        raise _changed(file)

  def read(self, name, *part):
    """The value of a variable: an array.

    Args:
      name: Its name.
      *part: Nothing, or the numbers of the first element and of the one after
        the last, of the flat array, in a format that is `in_parts`.

    Raises:
      OSError: If the variable cannot be read.
    """
    try:
      return self._read(name, *part)
    except Exception as e:
      raise unread(name, self.path, e) from e

  def _read(self, name):
    """The value of a variable: an array of its dtype in `specs`."""
    raise NotImplementedError

  def close(self):
    """Closes the files."""


def unread(name, path, cause):
  """The error that a variable of a checkpoint cannot be read."""
  return _files.NamedError(
      f"Variable '{name}' of {path} cannot be read: {cause}")


def note_of(text, specs):
  """The note of a snapshot.

  Args:
    text: What the variable NOTE holds.
    specs: {name of another variable: Spec}.

  Returns:
    A dict.

  Raises:
    ValueError: If it is damaged, as far as can be seen.
  """
  note = json.loads(text)
  if not (isinstance(note, dict) and note.keys() == _OF_NOTE.keys() and
          all(isinstance(note[key], kind) for key, kind in _OF_NOTE.items()) and
          {*note["others"], *note["dtypes"]} <= specs.keys() and
          {*note["dtypes"].values()} <= {dtype.name for dtype in FLOATS}):
    raise ValueError(f"'{NOTE}' must describe the snapshot, got {text!r}. The "
                     "file is damaged.")
  return note


def weight_map(path, what):
  """The "weight_map" of a JSON file: a dict.

  Args:
    path: The path of the file.
    what: Who writes such a file.

  Raises:
    ValueError: If the file has other contents, or names a file of another
      folder.
  """
  try:
    with open(path, encoding="utf-8") as file:
      found = {**json.load(file)["weight_map"]}
    names = {name for value in found.values() for name in (
        [value] if isinstance(value, str) else value)}
    if not all(isinstance(name, str) for name in names):
      raise TypeError("a name is no string")
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(
        f"{path} must be a JSON file with a 'weight_map', as {what}, got other "
        f"contents: {type(e).__name__}: {e}. Save the weights again.") from e
  for name in names:
    if name in ("", os.curdir, os.pardir) or name != os.path.basename(name):
      raise ValueError(f"{path} must name files of its own folder, got "
                       f"{name!r}. Save the weights again.")
  return found


def _stamp(path):
  """What is another for each version of a file.

  If the file has just been written, it waits until a change would give it
  another time.

  Raises:
    OSError: If the file is being written.
  """
  for _ in range(2):
    stat = os.stat(path)
    age = time.time() - stat.st_mtime
    if not 0 <= age < _TICK_SECONDS:
      return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
    time.sleep(_TICK_SECONDS)
  raise _changed(path)


def _changed(path):
  return _files.NamedError(
      f"The file {path} must not change while it is read, but something writes "
      "to it. Use a copy of it.")
