"""Paths of wrapopt's files, for other programs.

This file imports neither TensorFlow nor the rest of wrapopt. So a program that
must not import them, such as a build, runs it: `python wrapopt/sysconfig.py`
prints the path of the library.
"""

import importlib.metadata
import json
import os
import re
import sys

__all__ = ["get_lib"]


def get_lib() -> str:
  """Returns the path of the library with the ops and kernels.

  Each minor version of TensorFlow has its own library. This is the one for the
  TensorFlow that is imported, or else installed. The function does not import
  it. A program that does not import wrapopt loads the ops with
  `tf.load_op_library(path)`, and a program without Python with
  `TF_LoadLibrary`. The library needs the others in its folder.

  Raises:
    ImportError: if there is no TensorFlow, or no library for its version.
  """
  version = getattr(sys.modules.get("tensorflow"), "__version__", None)
  return _build_for(version or _installed_version())["path"]


def _folder():
  """Returns the folder of the libraries."""
  folder = os.path.dirname(os.path.abspath(__file__))
  if not os.path.isdir(folder):
    raise ImportError(
        f"{folder} must be a folder, got a part of an archive, from which no "
        "native library can be loaded. Install wrapopt with pip on each "
        "machine. For Spark, pass an environment that contains it with "
        "--archives, instead of the wheel with --py-files.")
  if not os.path.exists(os.path.join(folder, "_wrapopt_native.so")):
    raise ImportError(
        f"{folder} must hold the native library of wrapopt, got only its "
        "sources. Python searches the current folder before the installed "
        "packages. Run Python in another folder, or as `python -P`. To build "
        "and install wrapopt, run ./tools/quickstart.")
  return folder


def _minor(version):
  return ".".join(version.split(".")[:2])


def _builds():
  """Returns facts about each library, that for the oldest TensorFlow first."""
  builds, folder = [], _folder()
  for name in os.listdir(folder):
    if re.fullmatch(r"_wrapopt_ops_\d+_\d+\.json", name):
      path = os.path.join(folder, name)
      with open(path, encoding="utf-8") as f:
        builds.append({**json.load(f),
                       "path": path.removesuffix("json") + "so"})
  return sorted(builds, key=lambda build: [
      int(part) for part in _minor(build["tensorflow"]).split(".")])


def _build_for(version):
  """Returns facts about the library for a version of TensorFlow.

  Args:
    version: of TensorFlow; None if there is none.
  """
  builds = _builds()
  for build in builds:
    if version and _minor(version) == _minor(build["tensorflow"]):
      return build
  minors = [f"{_minor(build['tensorflow'])}.*" for build in builds]
  raise _error(
      builds[-1], "TensorFlow " + ", ".join(minors),
      f"TensorFlow {version}" if version else f"none in {sys.prefix}",
      f"pip install 'tensorflow-cpu=={minors[-1]}', or, for GPUs, "
      f"'tensorflow=={minors[-1]}'" + (f"; or {_REBUILD}" if version else ""))


_REBUILD = ("build wrapopt for the TensorFlow that is installed "
            "(./tools/quickstart in its sources)")


def _error(build, subject, found, remedy=_REBUILD):
  return ImportError(f"wrapopt {build['wrapopt']} was built for {subject}, but "
                     f"found {found}. To mend this, {remedy}.")


def _installed_version():
  """Returns the version of the installed TensorFlow, None if there is none.

  The build uses the same function.
  """
  for name in importlib.metadata.packages_distributions().get("tensorflow", []):
    files = importlib.metadata.files(name) or []
    if any(str(file) == "tensorflow/__init__.py" for file in files):
      return importlib.metadata.version(name)
  return None


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


if __name__ == "__main__":
  print(get_lib())
