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
from wrapopt.checkpoints import _places

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = tuple(map(np.dtype, _native.DTYPES))

# The variable that holds the note of a snapshot, a string.
NOTE = "wrapopt/snapshot"

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
  """A checkpoint to read.

  A subclass sets `kind` and `specs`, and defines `_is_optimizer_state` and
  `_read`.

  Attributes:
    kind: The name of the format, for users.
    path: Its path.
    specs: {name of a variable: Spec}.
    note: The note of a snapshot, a dict, or None.
    drops_pages: Whether to drop what is read from the page cache.
  """
  kind = ""
  drops_pages = False

  def __init__(self, path):
    self.path = path
    # Before anything is read.
    self._stamps = {file: _stamp(file) for file in self._files()}
    self.specs = {}
    self.note = None
    self._placed = _places.Reader({})

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

  def can_slice(self, name):
    """Whether some rows of a variable can be read alone."""
    return name in self._placed

  def moving_statistics(self):
    """Names of variables that are statistics of batch normalizations."""
    return sorted(name for name in self.specs
                  if re.search("moving_(mean|variance)", name))

  def verify(self):
    """Verifies the checksums that reads do not verify.

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

  def read(self, name, rows=None, into=None):
    """The value of a variable.

    Args:
      name: Its name.
      rows: A slice of its first dimension, if `can_slice`; None for all rows.
      into: A contiguous array of the value's shape and dtype for the result, or
        None. It may be ignored.

    Returns:
      An array, which may be `into`.

    Raises:
      OSError: If the variable cannot be read.
    """
    try:
      if name not in self._placed:
        return self._read(name, rows, into)
      spec = self.specs[name]
      if into is None:
        into = np.empty(spec.shape, spec.dtype)
      if into.size:
        begin = rows.start * spec.nbytes // spec.shape[0] if rows else 0
        self._placed.read(name, begin, into, self.drops_pages)
      return into
    except Exception as e:
      raise OSError(f"Variable '{name}' of {self.path} cannot be read: "
                    f"{e}") from e

  def _read(self, name, rows, into):
    """The value of a variable that has no Place."""
    raise NotImplementedError

  def close(self):
    self._placed.close()


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
