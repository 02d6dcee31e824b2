"""Where wrapopt keeps what other programs need of it."""

import os
import re

__all__ = ["get_lib"]


def get_lib() -> str:
  """Returns the path of the library with the ops and kernels.

  `tf.load_op_library(path)` makes the ops usable in a program that does not
  import wrapopt, and `TF_LoadLibrary` in one without Python. It must run the
  TensorFlow that this wrapopt was built for: `python -m wrapopt` says which.
  """
  return os.path.join(os.path.dirname(os.path.abspath(__file__)),
                      "_wrapopt_ops.so")


def _absl_namespace(include):
  """Returns the inline namespace of the absl whose headers are in `include`.

  It is part of the mangled name of every symbol of absl, so that a library can
  only be loaded beside the one it was compiled with. Returns "" where absl has
  none, and None where TensorFlow came without these headers. The build asks
  the same function.
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
