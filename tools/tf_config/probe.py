"""Prints the facts about this interpreter that the build needs, as JSON.

Usage: probe.py WRAPOPT_PACKAGE_DIR [TENSORFLOW_FOLDER]

TensorFlow is located, not imported: an import takes seconds and logs. It is the
interpreter's, or the one that `pip install --target` put into a folder.
"""

import glob
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import runpy
import sys
import sysconfig


def package_dir(name):
  spec = importlib.util.find_spec(name)
  if spec is None:
    sys.exit(f"{sys.executable} has no package '{name}': "
             "run ./tools/quickstart, or set PYTHON_BIN_PATH")
  return os.path.realpath(list(spec.submodule_search_locations)[0])


def machine(tf):
  """The processor that TensorFlow was compiled for: the one to compile for."""
  with open(os.path.join(tf, "libtensorflow_framework.so.2"), "rb") as f:
    number = int.from_bytes(f.read(20)[18:], "little")  # ELF's e_machine.
  return {62: "x86_64", 183: "aarch64"}[number]


def nvrtc_version():
  try:
    return importlib.metadata.version("nvidia-cuda-nvrtc-cu12")
  except importlib.metadata.PackageNotFoundError as e:
    sys.exit(f"{sys.executable} has no package '{e.name}', which compiles the "
             "GPU kernels: run ./tools/quickstart, or pip install -r "
             "requirements.txt")


def compiled_in(include, tf_version, nvrtc):
  """What is compiled into the libraries, or compiles them, for tools/sbom.py.

  NOTICE names the same packages.
  """
  macros = {}
  for header in ("absl/base/config.h", "google/protobuf/runtime_version.h",
                 # Eigen before 5 has its version in the first, later in the
                 # second.
                 "Eigen/src/Core/util/Macros.h", "Eigen/Version"):
    if os.path.exists(os.path.join(include, header)):
      with open(os.path.join(include, header), encoding="utf-8") as f:
        macros.update(re.findall(
            r"^#define (\w+_(?:VERSION|PATCH_LEVEL)) (\d+)$", f.read(),
            re.MULTILINE))

  def version(*names):
    return ".".join(macros[name] for name in names)

  absl = version("ABSL_LTS_RELEASE_VERSION", "ABSL_LTS_RELEASE_PATCH_LEVEL")
  eigen = version(*(f"EIGEN_{part}_VERSION" for part in (
      ("MAJOR", "MINOR", "PATCH") if "EIGEN_PATCH_VERSION" in macros
      else ("WORLD", "MAJOR", "MINOR"))))
  number = int(macros["PROTOBUF_OSS_VERSION"])
  protobuf = f"{number // 1000 % 1000}.{number % 1000}"
  return [
      f"tensorflow {tf_version} Apache-2.0 pkg:pypi/tensorflow@{tf_version}",
      # They have no version of their own in the wheel.
      "xla ? Apache-2.0 pkg:github/openxla/xla",
      "ml_dtypes ? Apache-2.0 pkg:pypi/ml-dtypes",
      f"abseil {absl} Apache-2.0 pkg:github/abseil/abseil-cpp@{absl}",
      f"eigen {eigen} MPL-2.0 pkg:gitlab/libeigen/eigen@{eigen}",
      f"protobuf {protobuf} BSD-3-Clause "
      f"pkg:github/protocolbuffers/protobuf@v{protobuf}",
  ] + ([f"nvrtc {nvrtc} - pkg:pypi/nvidia-cuda-nvrtc-cu12@{nvrtc}"]
       if nvrtc else [])


def tensorflow_cxx11_abi(tf):
  """The value of _GLIBCXX_USE_CXX11_ABI that TensorFlow was compiled with.

  The mangled name of a function with a std::string argument depends on it.
  """
  with open(os.path.join(tf, "libtensorflow_framework.so.2"), "rb") as f:
    with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as library:
      attr = b"_ZN10tensorflow12OpDefBuilder4AttrE"
      return int(library.find(attr + b"NSt7__cxx11") >= 0)


def python_include(tf):
  # Debian's Python.h is in python3.11-dev; TensorFlow's wheel also has one.
  include = sysconfig.get_paths()["include"]
  if os.path.exists(os.path.join(include, "Python.h")):
    return include
  found = glob.glob(os.path.join(
      tf, "include", "external", "python_%d_%d_*" % sys.version_info[:2],
      "include", "python*", "Python.h"))
  if not found:
    sys.exit(f"{sys.executable} has no Python.h: "
             "apt-get install python%d.%d-dev" % sys.version_info[:2])
  return os.path.dirname(found[0])


def main():
  sys.path[:0] = sys.argv[2:]
  tf = package_dir("tensorflow")
  tf_include = os.path.join(tf, "include")

  def run(name):
    return runpy.run_path(os.path.join(sys.argv[1], name))

  sysconfig_of_wrapopt = run("sysconfig.py")

  tf_version = sysconfig_of_wrapopt["_installed_version"]()
  if tf_version is None:
    sys.exit(f"no distribution of {sys.executable} owns {tf}")

  processor, nvrtc = machine(tf), nvrtc_version()
  print(json.dumps({
      # TensorFlow's wheels for aarch64 have no CUDA.
      "compiled_in": compiled_in(tf_include, tf_version,
                                 nvrtc if processor == "x86_64" else None),
      "wrapopt_version": run("version.py")["__version__"],
      "python": sys.executable,
      "python_include": python_include(tf),
      "machine": processor,
      "tf_dir": tf,
      "tf_include": tf_include,
      "tf_version": tf_version,
      "cxx11_abi": tensorflow_cxx11_abi(tf),
      # The built package reads it with the same function at import.
      "absl_namespace": sysconfig_of_wrapopt["_absl_namespace"](tf_include),
      "nvrtc_version": nvrtc,
      "pybind11_include": os.path.join(package_dir("pybind11"), "include"),
      # Not wrapopt, which tools/quickstart installs into the interpreter: the
      # tests run the built one.
      "packages": sorted({
          f"{d.metadata['Name']}=={d.version}"
          for d in importlib.metadata.distributions()
          if d.metadata["Name"] != "wrapopt"
      }),
  }))


main()
