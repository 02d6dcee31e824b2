"""The base class of checkpoint formats."""

import os

from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source


class Format:
  """A checkpoint format: how its files are named, read and written.

  A format is a class without instances. A format that is only read has neither
  `Sink` nor `ending`, and its `output` is another format.

  Each checkpoint has a main file. For most formats, its name is the path of the
  checkpoint.

  Attributes:
    Source: The class of a checkpoint to read.
    Sink: The class of a checkpoint to write. It is called with a path, {name:
      Spec}, and a Source whose structure it copies.
    endings: The endings of the names of main files. An output needs the first.
    ending: The ending of names that the program chooses.
  """
  Source: type[_source.Source]
  Sink: type[_sink.Sink]
  endings: tuple[str, ...]
  ending: str

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
  def output(cls):
    """The format of an output whose last input has this format."""
    return cls

  @classmethod
  def sink_like(cls, source, path, specs):
    """A Sink of this format with the structure of a Source.

    Args:
      source: A Source of a format whose `output` is this one.
      path: The path of the output.
      specs: {name: Spec} of the variables that are written. `Sink.copy` copies
        the others.

    Returns:
      A Sink.
    """
    return cls.Sink(path, specs, source)
