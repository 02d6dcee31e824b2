"""Shared libraries that Python and TensorFlow load."""

# The copts of functions that _wrapopt_native.so exports: see .bazelrc.
EXPORTED = [
    "-fvisibility=default",
    "-fno-gnu-unique",
]

# The second contains most of XLA.
_TENSORFLOW = [
    "@local_config_tf//:libtensorflow_framework.so.2",
    "@local_config_tf//:libtensorflow_cc.so.2",
]

def _shared_library(name, inputs, linkopts, exports = "exports", **kwargs):
    script = "//tools:{}.lds".format(exports)
    native.cc_binary(
        name = name,
        additional_linker_inputs = inputs + [script],
        linkopts = linkopts + [
            "-Wl,--version-script=$(location %s)" % script,
            # No symbol table: the dynamic one is what the linker reads.
            "-Wl,-s",
        ],
        linkshared = True,
        linkstatic = True,
        **kwargs
    )

def tf_shared_library(name, core, **kwargs):
    """A library for tf.load_op_library.

    TensorFlow's libraries, and `core`, which lies beside this one, are named to
    the linker directly, not through cc_import: that would write Bazel's _solib
    folders into the RUNPATH.
    """
    libraries = [core] + _TENSORFLOW
    _shared_library(
        name,
        inputs = libraries,
        linkopts = ["$(location %s)" % library for library in libraries] + [
            # For ldd, and for a process that has not imported TensorFlow: the
            # package is next to `tensorflow` in site-packages.
            "-Wl,-rpath,$$ORIGIN:$$ORIGIN/../tensorflow",
            # An undefined symbol is an error here, not at load time.
            "-Wl,-z,defs",
        ],
        **kwargs
    )

def native_library(name, **kwargs):
    """A library without TensorFlow and Python, for Python's ctypes."""
    _shared_library(
        name,
        inputs = [],
        linkopts = [
            # By which a library that links it finds it.
            "-Wl,-soname,%s" % name,
            # Calls within the library are direct.
            "-Wl,-Bsymbolic",
            "-Wl,-z,defs",
        ],
        **kwargs
    )

def tf_python_module(name, **kwargs):
    """A Python module in C++, for a process that has imported TensorFlow.

    It finds Python's symbols in the interpreter, hence no -z defs.

    Args:
      name: the target for those who import it; the module has a `_` before.
      **kwargs: as of a cc_binary.
    """
    library = "_%s.so" % name
    _shared_library(
        library,
        inputs = _TENSORFLOW,
        linkopts = ["$(location %s)" % file for file in _TENSORFLOW],
        **kwargs
    )
    native.py_library(
        name = name,
        testonly = kwargs.get("testonly", False),
        data = [library],
        imports = ["."],
    )
