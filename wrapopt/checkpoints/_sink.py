"""The base class of checkpoints to write."""

import contextlib
import fcntl
import os
import shutil
import tempfile

from wrapopt.checkpoints import _files

# So many bytes are written to a file before they are sent to the disk.
SEND = 128 << 20

# So many bytes of variables are copied at once, or one variable.
_COPIED = 64 << 20

_PARTIAL = ".partial"


class Sink:
  """A checkpoint to write. It appears complete, in `publish`.

  A subclass defines `write` and `_finish`.

  Before, its files are in a temporary directory next to it, whose name begins
  with a dot and ends in ".partial". A killed process leaves this directory. The
  next Sink of the same path removes it.

  Attributes:
    path: Its path.
    drops_pages: Whether to drop what is on the disk from the page cache.
  """
  drops_pages = False

  def __init__(self, path):
    self.path = path
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
    self._unsent = 0  # Bytes written since the last were sent to the disk.

  def _writing(self):
    """A context whose errors name the output."""
    return _files.naming(self.path, "cannot be written")

  def write(self, values):
    """Writes variables: [(name, rows, array)]; `rows` None means all rows.

    The parts of a variable must follow each other in the order of its rows.
    """
    raise NotImplementedError

  def copy(self, source, names):
    """Copies variables of a Source of the same format."""
    batch, total = [], 0
    for name in names:
      batch.append((name, None, source.read(name)))
      total += source.specs[name].nbytes
      if total > _COPIED:
        self.write(batch)
        batch, total = [], 0
    if batch:
      self.write(batch)

  def _send(self, nbytes, flush, file):
    """Sends a file, after `nbytes` more, to the disk while others are read."""
    self._unsent += nbytes
    if self._unsent >= SEND:
      flush()
      _files.to_disk(file, self.drops_pages)
      self._unsent = 0

  def publish(self, check=None):
    """Makes the complete checkpoint appear; replaces one of the same name.

    Args:
      check: A function to call once the checkpoint is complete. If it raises,
        the checkpoint does not appear.
    """
    with self._writing():
      files = list(self._finish())
      for file in files:
        _files.to_disk(file, self.drops_pages)
    if check is not None:
      check()
    with self._writing():
      self._replace(files)

  def _replace(self, files):
    to = [os.path.join(self._parent, os.path.basename(f)) for f in files]
    if len(files) > 1:
      # The old last file must not be next to the new first one.
      with contextlib.suppress(FileNotFoundError):
        os.unlink(to[-1])
        _files.to_disk(self._parent)
    for file, name in zip(files, to):
      os.replace(file, name)
    _files.to_disk(self._parent)

  def _finish(self):
    """Completes the files of the checkpoint, in `_directory`.

    Returns:
      An iterable of their paths; the last file completes the checkpoint.
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
