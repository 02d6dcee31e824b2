"""Shared libraries that Python and TensorFlow load."""

_EXPORTS = "//tools:exports.lds"

# The second contains most of XLA.
_TENSORFLOW = [
    "@local_config_tf//:libtensorflow_framework.so.2",
    "@local_config_tf//:libtensorflow_cc.so.2",
]

def _shared_library(name, inputs, linkopts, **kwargs):
    native.cc_binary(
        name = name,
        additional_linker_inputs = inputs + [_EXPORTS],
        linkopts = linkopts + [
            "-Wl,--version-script=$(location %s)" % _EXPORTS,
            # No symbol table, because nothing links against these libraries.
            "-Wl,-s",
        ],
        linkshared = True,
        linkstatic = True,
        **kwargs
    )

def tf_shared_library(name, **kwargs):
    """A library for tf.load_op_library.

    TensorFlow's libraries are named to the linker directly, not through
    cc_import: that would write Bazel's _solib folders into the RUNPATH.
    """
    _shared_library(
        name,
        inputs = _TENSORFLOW,
        linkopts = ["$(location %s)" % library for library in _TENSORFLOW] + [
            # For ldd, and for a process that has not imported TensorFlow: the
            # package is next to `tensorflow` in site-packages.
            "-Wl,-rpath,$$ORIGIN/../tensorflow",
            # An undefined symbol is an error here, not at load time.
            "-Wl,-z,defs",
        ],
        **kwargs
    )

def native_library(name, **kwargs):
    """A library for Python's ctypes, without TensorFlow and Python."""
    _shared_library(name, inputs = [], linkopts = ["-Wl,-z,defs"], **kwargs)

def tf_python_module(name, **kwargs):
    """A Python module in C++, for a process that has imported TensorFlow.

    `name` is PYBIND11_MODULE's, and `.so`. It finds Python's symbols in the
    interpreter, hence no -z defs.
    """
    _shared_library(
        name,
        inputs = _TENSORFLOW,
        linkopts = ["$(location %s)" % library for library in _TENSORFLOW],
        **kwargs
    )
