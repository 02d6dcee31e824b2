"""Imports TensorFlow, checks its version and ABI, and loads the native library.

A library for another TensorFlow fails in the dynamic linker with a mangled
name, or loads and crashes later. So this module compares versions and ABIs
first, and its errors name the difference.
"""

import sys

from wrapopt import _native
from wrapopt import sysconfig

_REBUILD = ("build wrapopt for the TensorFlow that is installed (./tools/"
            "quickstart in its sources)")


def _minor(version):
  return ".".join(version.split(".")[:2])


def _error(subject, built, found, remedy):
  return ImportError(f"wrapopt {_native.version} was built for {subject} "
                     f"{built}, but found {found}. To mend this, {remedy}.")


def _install():
  wanted = _minor(_native.tensorflow_version)
  return (f"pip install 'tensorflow-cpu=={wanted}.*', or, for GPUs, "
          f"'tensorflow=={wanted}.*'")


def _import_tensorflow():
  """Imports TensorFlow; raises ImportError if its library does not fit."""
  wanted = f"{_minor(_native.tensorflow_version)}.*"
  try:
    import tensorflow as tf
  except ModuleNotFoundError as e:
    if e.name != "tensorflow":
      raise
    raise _error("TensorFlow", wanted, f"none in {sys.prefix}",
                 _install()) from None

  if _minor(tf.__version__) != _minor(_native.tensorflow_version):
    raise _error("TensorFlow", wanted, f"TensorFlow {tf.__version__}",
                 f"{_install()}; or {_REBUILD}")
  if tf.sysconfig.CXX11_ABI_FLAG != _native.cxx11_abi:
    raise _error(
        "a TensorFlow with the C++ ABI", f"flag {_native.cxx11_abi}",
        f"a TensorFlow {tf.__version__} with _GLIBCXX_USE_CXX11_ABI="
        f"{tf.sysconfig.CXX11_ABI_FLAG}", _REBUILD)
  namespace = sysconfig._absl_namespace(tf.sysconfig.get_include())
  # Without headers the namespace is unknown; a mismatch fails in the linker.
  if namespace is not None and namespace != _native.absl_namespace:
    raise _error(
        "a TensorFlow with the absl namespace", f"'{_native.absl_namespace}'",
        f"a TensorFlow {tf.__version__} with "
        + (f"'{namespace}'" if namespace else "none"), _REBUILD)
  return tf


def _load():
  """Opens the library, which registers its ops; returns TensorFlow."""
  tf = _import_tensorflow()
  try:
    tf.load_library(sysconfig.get_lib())
  except (OSError, tf.errors.NotFoundError) as e:
    raise _error("TensorFlow", _native.tensorflow_version,
                 f"a TensorFlow {tf.__version__} that cannot load "
                 f"{sysconfig.get_lib()} ({e})", _REBUILD) from None
  return tf


class _Ops:
  """The Python functions of the ops, such as `ops.wrapopt_ema_update`.

  TensorFlow generates and compiles half a megabyte of Python for them, which
  takes much longer than opening the library. So the first use of a function
  makes them: an import and a parameter server do not.
  """

  def __getattr__(self, name):
    made = _tf.load_op_library(sysconfig.get_lib())
    vars(self).update(vars(made))
    return getattr(made, name)


_tf = _load()
ops = _Ops()
