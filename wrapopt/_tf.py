"""TensorFlow, for modules that are also of use without it."""

import importlib.util
import sys

from wrapopt import sysconfig

is_there = ("tensorflow" in sys.modules or
            importlib.util.find_spec("tensorflow") is not None)


class _Missing:
  """Stands for TensorFlow where there is none: its use is an error."""

  def __getattr__(self, name):
    sysconfig._build_for(None)


def refuse(module, names):
  """The `__getattr__` of a module whose names need TensorFlow, without it."""
  def getattr_of_module(name):
    if name in names:
      sysconfig._build_for(None)
    raise AttributeError(f"module '{module}' has no attribute '{name}'")
  return getattr_of_module


if is_there:
  import tensorflow as tf  # pylint: disable=unused-import
else:
  tf = _Missing()
