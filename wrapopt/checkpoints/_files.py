"""Errors that name files, new directories, and data on the disk."""

import contextlib
import os


class NamedError(OSError):
  """An error whose text names the file."""


@contextlib.contextmanager
def naming(path, what):
  """Makes all errors OSErrors or ValueErrors whose text names a file.

  Args:
    path: The path of the file.
    what: What failed, such as "cannot be read".
  """
  try:
    yield
  except Exception as e:
    if isinstance(e, NamedError) or type(e) is ValueError and path in str(e):
      raise
    named = NamedError(f"{path} {what}: {e or type(e).__name__}")
    named.errno = getattr(e, "errno", None)
    raise named from e


def path(subject, x):
  """`x` as a string; raises a TypeError if it is no path."""
  try:
    return os.fsdecode(x)
  except TypeError:
    raise TypeError(f"`{subject}` must be a path, a string, bytes or an "
                    f"os.PathLike, got {x!r}.") from None


def make_directories(path):
  """Makes a directory and its parents.

  Args:
    path: Its path.

  Returns:
    The paths of those that were not there, children first.
  """
  made = []
  parent = os.path.abspath(path)
  while not os.path.isdir(parent):
    made.append(parent)
    parent = os.path.dirname(parent)
  os.makedirs(path, exist_ok=True)
  return made


def remove_empty(directories):
  """Removes the empty ones of directories; children come first."""
  for directory in directories:
    with contextlib.suppress(OSError):
      os.rmdir(directory)


def to_disk(path):
  """Returns when a file or directory is on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
