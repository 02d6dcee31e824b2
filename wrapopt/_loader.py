"""Imports TensorFlow, checks its version and ABI, and loads the native library.

A library for another TensorFlow fails in the dynamic linker with a mangled
name, or loads and crashes later. So this module compares versions and ABIs
first, and its errors name the difference.
"""

from wrapopt import _native  # First: its error is clearer than TensorFlow's.
from wrapopt import sysconfig


def _import_tensorflow():
  """Imports TensorFlow; raises ImportError if no library fits it."""
  try:
    import tensorflow as tf
  except ModuleNotFoundError as e:
    if e.name != "tensorflow":
      raise
    sysconfig._build_for(None)  # Raises the error.

  build = sysconfig._build_for(tf.__version__)
  if tf.sysconfig.CXX11_ABI_FLAG != build["cxx11_abi"]:
    raise sysconfig._error(
        build, f"a TensorFlow with the C++ ABI flag {build['cxx11_abi']}",
        f"a TensorFlow {tf.__version__} with _GLIBCXX_USE_CXX11_ABI="
        f"{tf.sysconfig.CXX11_ABI_FLAG}")
  namespace = sysconfig._absl_namespace(tf.sysconfig.get_include())
  # Without headers the namespace is unknown; a mismatch fails in the linker.
  if namespace is not None and namespace != build["absl_namespace"]:
    raise sysconfig._error(
        build,
        f"a TensorFlow with the absl namespace '{build['absl_namespace']}'",
        f"a TensorFlow {tf.__version__} with "
        + (f"'{namespace}'" if namespace else "none"))
  return tf, build


def _load():
  """Opens the library, which registers its ops; returns TensorFlow."""
  tf, build = _import_tensorflow()
  library = sysconfig.get_lib()
  try:
    tf.load_library(library)
  except (OSError, tf.errors.NotFoundError) as e:
    raise sysconfig._error(
        build, f"TensorFlow {build['tensorflow']}",
        f"a TensorFlow {tf.__version__} that cannot load {library} ({e})"
    ) from None
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

del _native
