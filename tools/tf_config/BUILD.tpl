# Written by tools/tf_config/tf_configure.bzl.
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files([
    "environment.txt",
    "libtensorflow_cc.so.2",
    "libtensorflow_framework.so.2",
])

# What an op or a CPU kernel includes. Each header below is linked into the
# sandbox of each compile that depends on it, so the list is kept short: all
# 18,000 headers of the wheel would cost more time than the compile.
cc_library(
    name = "tf_headers",
    hdrs = glob(
        [
            "include/Eigen/**",
            "include/absl/**",
            "include/google/**",
            "include/ml_dtypes/**",
            "include/tensorflow/core/**/*.h",
            "include/tsl/**/*.h",
            "include/unsupported/**",
            "include/xla/tsl/**/*.h",
        ],
        exclude = [
            "**/_virtual_includes/**",
            "include/tensorflow/core/data/**",
            "include/tensorflow/core/distributed_runtime/**",
            "include/tensorflow/core/grappler/**",
            "include/tensorflow/core/ir/**",
            "include/tensorflow/core/runtime_fallback/**",
            "include/tensorflow/core/tfrt/**",
        ],
    ),
    # Both change the layout of types that cross into TensorFlow.
    defines = [
        "_GLIBCXX_USE_CXX11_ABI=%{CXX11_ABI}",
        "EIGEN_MAX_ALIGN_BYTES=64",
    ],
    includes = ["include"],
)

# What a GPU kernel includes on top: the class of TensorFlow's streams.
cc_library(
    name = "tf_stream_headers",
    hdrs = glob([
        "include/xla/*.pb.h",
        "include/xla/stream_executor/**/*.h",
    ]),
    deps = [":tf_headers"],
)

# What a kernel includes that a program of XLA calls.
cc_library(
    name = "tf_ffi_headers",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    deps = [":tf_headers"],
)

# What an XLA kernel includes on top. XLA's headers include those of
# HighwayHash and FarmHash, which the wheel keeps under external/.
cc_library(
    name = "tf_xla_headers",
    hdrs = glob(
        [
            "include/external/farmhash_archive/src/*.h",
            "include/external/highwayhash/highwayhash/*.h",
            "include/tensorflow/compiler/jit/*.h",
            "include/tensorflow/compiler/tf2xla/**/*.h",
            "include/tensorflow/core/**/*.h",
            "include/xla/**/*.h",
        ],
        exclude = [
            "include/xla/backends/gpu/autotuner/**",
            "include/xla/backends/gpu/codegen/**",
            "include/xla/backends/gpu/collectives/**",
            "include/xla/backends/gpu/runtime/**",
            "include/xla/codegen/**",
            "include/xla/mlir/**",
            "include/xla/mlir_hlo/**",
        ],
    ),
    includes = %{TF_XLA_INCLUDES},
    deps = [":tf_headers"],
)

cc_library(
    name = "pybind11",
    hdrs = glob([
        "pybind11_include/pybind11/**/*.h",
        "python_include/**/*.h",
    ]),
    includes = [
        "pybind11_include",
        "python_include",
    ],
)

py_runtime(
    name = "py3_runtime",
    interpreter_path = "%{PYTHON}",
    python_version = "PY3",
    stub_shebang = "#!%{PYTHON}",
)

py_runtime_pair(
    name = "py_runtime_pair",
    py3_runtime = ":py3_runtime",
)

toolchain(
    name = "py_toolchain",
    toolchain = ":py_runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
