"""The base class of checkpoints to write."""

import fcntl
import os
import shutil
import tempfile

from wrapopt.checkpoints import _files

_PARTIAL = ".partial"


class Sink:
  """A checkpoint to write. It appears complete, in `publish`.

  A subclass defines `write`, `copy` and `_finish`.

  Before, its files are in a temporary directory next to it, whose name begins
  with a dot and ends in ".partial". A killed process leaves this directory. The
  next Sink of the same path removes it.

  Attributes:
    path: Its path.
  """

  def __init__(self, path, note=None, like=None, made=None):
    """Makes the directory.

    Args:
      path: The path of the checkpoint.
      note: The note of a snapshot, a dict, or None.
      like: A Source of the same format whose structure is copied, or None.
      made: What it says of how it was made, a text, or None.
    """
    del note, like, made
    self.path = path
    self._others = []
    self._parent = os.path.dirname(os.path.abspath(path))
    prefix = os.path.basename(path) + "."
    with self._writing():
      self._made = _files.make_directories(self._parent)
      try:
        remove_partial(self._parent, prefix)
        self._directory = tempfile.mkdtemp(
            prefix="." + prefix, suffix=_PARTIAL, dir=self._parent)
        self._lock = _locked(self._directory)
      except BaseException:
        _files.remove_empty(self._made)
        raise

  def _writing(self):
    """A context whose errors name the output."""
    return _files.naming(self.path, "cannot be written")

  def write(self, name, value, *part):
    """Writes a variable, an array; or a part of it, as `Source.read` reads."""
    raise NotImplementedError

  def copy(self, source, name):
    """Copies a variable of a Source of the same format."""
    raise NotImplementedError

  def add(self, paths):
    """Copies other files, which appear beside the checkpoint, before it."""
    for path in paths:
      name = os.path.basename(path)
      self._others.append(os.path.join(self._directory, name))
      with _files.naming(path, "cannot be copied"):
        if os.path.lexists(os.path.join(self._parent, name)):
          raise FileExistsError(f"{name} exists beside {self.path}. Remove it, "
                                "or choose another output")
        shutil.copyfile(path, self._others[-1])

  def publish(self, check=None):
    """Makes the complete checkpoint appear; replaces one of the same name.

    Args:
      check: A function to call once the checkpoint is complete. If it raises,
        the checkpoint does not appear.
    """
    with self._writing():
      files = [*self._others, *self._finish()]
      for file in files:
        _files.to_disk(file)
    if check is not None:
      check()
    with self._writing():
      self._replace(files)

  def _replace(self, files):
    """Moves files out of the temporary directory, in their order."""
    for file in files:
      os.replace(file, os.path.join(self._parent, os.path.basename(file)))
    _files.to_disk(self._parent)

  def _finish(self):
    """Completes the files of the checkpoint, in `_directory`.

    Returns:
      A list of their paths; the last file completes the checkpoint.
    """
    raise NotImplementedError

  def discard(self):
    """Removes files that are not published."""
    shutil.rmtree(self._directory, ignore_errors=True)
    _files.remove_empty(self._made)
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None


def remove_partial(directory, prefix):
  """Removes partial checkpoints of killed processes in a directory.

  Args:
    directory: Its path.
    prefix: The prefix of the names of the checkpoints.
  """
  for name in os.listdir(directory):
    if name.startswith("." + prefix) and name.endswith(_PARTIAL):
      path = os.path.join(directory, name)
      lock = _locked(path)
      if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked(directory):
  """A descriptor that holds the lock of a directory as long as it is open.

  Returns:
    A descriptor; None if another process holds the lock, or if there are no
    locks here.
  """
  descriptor = None
  try:
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
  except OSError:
    if descriptor is not None:
      os.close(descriptor)
    return None
