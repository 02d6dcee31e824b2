"""Paths of wrapopt's files, for other programs."""

import os
import re

__all__ = ["get_lib"]


def get_lib() -> str:
  """Returns the path of the library with the ops and kernels.

  A program that does not import wrapopt loads the ops with
  `tf.load_op_library(path)`, and a program without Python with
  `TF_LoadLibrary`. The program must use the TensorFlow version that wrapopt was
  built for; `python -m wrapopt` prints it.
  """
  return os.path.join(os.path.dirname(os.path.abspath(__file__)),
                      "_wrapopt_ops.so")


def _absl_namespace(include):
  """Returns the inline namespace of the absl whose headers are in `include`.

  The namespace is part of the mangled name of every symbol of absl, so a
  library works only with the absl it was compiled with. Returns "" if absl has
  no inline namespace, and None if TensorFlow has no such headers. The build
  uses the same function.
  """
  try:
    with open(os.path.join(include, "absl", "base", "options.h"),
              encoding="utf-8") as f:
      options = dict(re.findall(r"^#define (ABSL_OPTION_\w+) (\w+)$",
                                f.read(), re.MULTILINE))
  except FileNotFoundError:
    return None
  if options.get("ABSL_OPTION_USE_INLINE_NAMESPACE") == "0":
    return ""
  return options.get("ABSL_OPTION_INLINE_NAMESPACE_NAME")
