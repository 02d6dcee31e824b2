"""Imports TensorFlow, checks its version and ABI, and loads the native library.

A library for another TensorFlow fails in the dynamic linker with a mangled
name, or loads and crashes later. So this module compares versions and ABIs
first, and its errors name the difference.
"""

from wrapopt import _native  # First: its error is clearer than TensorFlow's.
from wrapopt import sysconfig


def _fitting():
  """Returns TensorFlow and facts about the library that fits it.

  Raises:
    ImportError: if none fits.
  """
  try:
    import tensorflow as tf
    version = tf.__version__
  except ModuleNotFoundError as e:
    if e.name != "tensorflow":
      raise
    version = None
  build = sysconfig._build_for(version)
  found = f"a TensorFlow {version} with "
  if tf.sysconfig.CXX11_ABI_FLAG != build["cxx11_abi"]:
    raise sysconfig._error(
        build, f"a TensorFlow with the C++ ABI flag {build['cxx11_abi']}",
        f"{found}_GLIBCXX_USE_CXX11_ABI={tf.sysconfig.CXX11_ABI_FLAG}")
  namespace = sysconfig._absl_namespace(tf.sysconfig.get_include())
  # Without headers the namespace is unknown; a mismatch fails in the linker.
  if namespace is not None and namespace != build["absl_namespace"]:
    raise sysconfig._error(
        build,
        f"a TensorFlow with the absl namespace '{build['absl_namespace']}'",
        found + (f"'{namespace}'" if namespace else "none"))
  return tf, build


def _load():
  """Opens the library, which registers its ops; returns TensorFlow and it."""
  tf, build = _fitting()
  try:
    tf.load_library(build["path"])
  except (OSError, tf.errors.NotFoundError) as e:
    raise sysconfig._error(
        build, f"TensorFlow {build['tensorflow']}",
        f"a TensorFlow {tf.__version__} that cannot load {build['path']} ({e})"
    ) from None
  return tf, build["path"]


class _Ops:
  """The Python functions of the ops, such as `ops.wrapopt_ema_update`.

  TensorFlow generates and compiles half a megabyte of Python for them, which
  takes much longer than opening the library. So the first use of a function
  makes them: an import and a parameter server do not.
  """

  def __getattr__(self, name):
    made = _tf.load_op_library(_path)
    vars(self).update(vars(made))
    return getattr(made, name)


_tf, _path = _load()
ops = _Ops()

del _native
