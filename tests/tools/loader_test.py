"""`import wrapopt`: its errors, its effects, and their limits."""

import importlib
import json
import os
import shutil
import sys

from packaging.version import Version
import pytest
import tensorflow as tf

import wrapopt
from processes import printed_by, run_python
from wrapopt import sysconfig

BUILD = sysconfig._build_for(tf.__version__)
LIBRARY = os.path.basename(BUILD["path"])
_MAJOR, _MINOR = map(int, tf.__version__.split(".")[:2])
MINOR = f"{_MAJOR}.{_MINOR}"

# Stands in for TensorFlow where it must differ from the one that is installed.
# To open the library is the last step of the loader.
FAKE_TENSORFLOW = """
__version__ = {version!r}

class sysconfig:
  CXX11_ABI_FLAG = {abi!r}
  get_include = staticmethod(lambda: {include!r})

class errors:
  class NotFoundError(Exception):
    pass

def load_library(path):
  raise RuntimeError(f"opened {{path}}")
"""

OPTIONS_H = """
#define ABSL_OPTION_USE_INLINE_NAMESPACE {inline}
#define ABSL_OPTION_INLINE_NAMESPACE_NAME {namespace}
"""


@pytest.fixture
def import_beside(tmp_path):
  """A function that imports wrapopt beside a fake TensorFlow."""

  def run(version=tf.__version__, abi=tf.sysconfig.CXX11_ABI_FLAG, inline=1,
          namespace=BUILD["absl_namespace"]):
    if namespace is not None:
      header = tmp_path / "include" / "absl" / "base" / "options.h"
      header.parent.mkdir(parents=True)
      header.write_text(OPTIONS_H.format(inline=inline, namespace=namespace))
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(
        FAKE_TENSORFLOW.format(version=version, abi=abi,
                               include=str(tmp_path / "include")))
    return _error("-c", "import wrapopt", path=tmp_path)

  return run


def _error(*args, path, **env):
  """The last line of an interpreter that finds a wrapopt in `path`, and fails.
  """
  process = run_python(*args, pythonpath=[str(path)], **env)
  assert process.returncode == 1, process
  return process.stderr.strip().splitlines()[-1]


EACH_IMPORT = pytest.mark.parametrize("arguments", [
    ("-c", "import wrapopt"), ("-c", "import wrapopt.sysconfig"),
    ("-m", "wrapopt")], ids=" ".join)


@EACH_IMPORT
def test_the_source_tree(tmp_path, arguments):
  tree = tmp_path / "wrapopt"
  shutil.copytree(os.path.dirname(wrapopt.__file__), tree,
                  ignore=shutil.ignore_patterns("*.so"))
  # -S: without TensorFlow, which there is no need for.
  error = _error("-S", *arguments, path=tmp_path)
  assert error == (
      f"ImportError: {tree} must hold the native library of wrapopt, got only "
      "its sources. Python searches the current folder before the installed "
      "packages. Run Python in another folder, or as `python -P`. To build and "
      "install wrapopt, run ./tools/quickstart.")


@EACH_IMPORT
def test_a_wheel_as_an_archive(tmp_path, arguments):
  wheel = tmp_path / "wrapopt-0.1.0-py3-none-any.whl"
  package = os.path.dirname(wrapopt.__file__)
  shutil.copytree(package, tmp_path / "tree" / "wrapopt",
                  ignore=lambda folder, names: [
                      x for x in names if "." in x and not x.endswith(".py")])
  os.replace(shutil.make_archive(str(wheel), "zip", tmp_path / "tree"), wheel)
  error = _error("-S", *arguments, path=wheel)
  assert error == (
      f"ImportError: {wheel}/wrapopt must be a folder, got a part of an "
      "archive, from which no native library can be loaded. Install wrapopt "
      "with pip on each machine. For Spark, pass an environment that contains "
      "it with --archives, instead of the wheel with --py-files.")


def test_a_native_library_that_cannot_be_opened(tmp_path):
  tree = tmp_path / "wrapopt"
  shutil.copytree(os.path.dirname(wrapopt.__file__), tree)
  (library,) = tree.glob("_wrapopt_native.so")
  library.unlink()
  library.write_bytes(b"no library")
  error = _error("-c", "import wrapopt", path=tmp_path)
  assert error.startswith(f"ImportError: {library}: file too short")


def test_keras_is_there_as_for_users():
  # Most other tests spare the time that its import takes.
  assert "keras.src.optimizers" in sys.modules


@pytest.mark.parametrize("program", [
    "wrapopt.MovingAverageOptimizer", "from wrapopt import PowerDecay, ops",
    "from wrapopt import *", "wrapopt.checkpoints.SnapshotHook"])
def test_no_tensorflow(program, tmp_path):
  """The first name that needs it raises an error; checkpoints do not."""
  for package in "numpy", "h5py", "ml_dtypes":
    os.symlink(os.path.dirname(importlib.import_module(package).__file__),
               tmp_path / package)
  # -S: without the folder that TensorFlow is installed in.
  error = _error(
      "-S", "-c", f"import wrapopt, wrapopt.checkpoints\n{program}",
      path=tmp_path)
  assert error.startswith(
      f"ImportError: wrapopt {wrapopt.__version__} was built for TensorFlow "
      f"{MINOR}.*, but found none in /")
  assert f"pip install 'tensorflow-cpu=={MINOR}.*'" in error


def test_a_module_that_tensorflow_misses_is_named(tmp_path):
  (tmp_path / "tensorflow.py").write_text("import no_such_module")
  error = _error("-c", "import wrapopt", path=tmp_path)
  assert error == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.parametrize("version", [
    f"{_MAJOR}.{_MINOR - 1}.1", f"{_MAJOR}.{_MINOR + 1}.0-rc0",
    f"{_MAJOR + 1}.{_MINOR}.0"])
def test_another_minor_version(import_beside, version):
  error = import_beside(version=version)
  assert error.startswith(
      f"ImportError: wrapopt {wrapopt.__version__} was built for TensorFlow "
      f"{MINOR}.*, but found TensorFlow {version}. To mend this, ")
  assert f"pip install 'tensorflow-cpu=={MINOR}.*'" in error
  assert "or build wrapopt for the TensorFlow that is installed" in error


def test_several_libraries(tmp_path):
  """The library of the version is chosen; an error names all versions."""
  tree = tmp_path / "wrapopt"
  shutil.copytree(os.path.dirname(wrapopt.__file__), tree)
  for minor in 9, _MINOR + 1:
    other = {**BUILD, "tensorflow": f"{_MAJOR}.{minor}.0"}
    (tree / f"_wrapopt_ops_{_MAJOR}_{minor}.json").write_text(json.dumps(other))
  beside = str(tmp_path), os.path.dirname(tf.__path__[0])
  program = "import wrapopt; print(wrapopt.sysconfig.get_lib())"
  process = run_python("-c", program, pythonpath=beside,
                       TF_USE_LEGACY_KERAS="1")
  assert process.stdout == f"{tree}/{LIBRARY}\n", process.stderr
  error = _error("-S", "-c", "import wrapopt; wrapopt.ops", path=tmp_path)
  assert (f"was built for TensorFlow {_MAJOR}.9.*, {MINOR}.*, "
          f"{_MAJOR}.{_MINOR + 1}.*, but found none in") in error


def test_another_cxx11_abi(import_beside):
  built = tf.sysconfig.CXX11_ABI_FLAG
  error = import_beside(abi=1 - built)
  assert error.startswith(
      f"ImportError: wrapopt {wrapopt.__version__} was built for a TensorFlow "
      f"with the C++ ABI flag {built}, but found a TensorFlow "
      f"{tf.__version__} with _GLIBCXX_USE_CXX11_ABI={1 - built}. "
      "To mend this, build wrapopt for the TensorFlow that is installed")


@pytest.mark.parametrize("inline, namespace, found", [
    (1, "lts_20990101", "'lts_20990101'"),
    (0, "head", "none"),
])
def test_another_absl_namespace(import_beside, inline, namespace, found):
  error = import_beside(inline=inline, namespace=namespace)
  assert error.startswith(
      f"ImportError: wrapopt {wrapopt.__version__} was built for a TensorFlow "
      f"with the absl namespace '{BUILD['absl_namespace']}', but found a "
      f"TensorFlow {tf.__version__} with {found}. "
      "To mend this, build wrapopt for the TensorFlow that is installed")


def test_what_is_wrong_first_is_named_first(import_beside):
  other = f"{_MAJOR}.{_MINOR - 1}.0"
  assert f"but found TensorFlow {other}." in import_beside(
      version=other, abi=1 - tf.sysconfig.CXX11_ABI_FLAG, namespace="other")


@pytest.mark.parametrize("differs", [
    {},
    {"version": MINOR + ".7"},
    {"namespace": None},  # A TensorFlow that came without headers.
])
def test_a_tensorflow_that_fits_gets_the_library(import_beside, differs):
  error = import_beside(**differs)
  assert error == f"RuntimeError: opened {wrapopt.sysconfig.get_lib()}"


@pytest.mark.parametrize("content, why", [
    (b"no library", "file too short"), (None, "does not exist")])
def test_a_library_that_cannot_be_opened(tmp_path, content, why):
  shutil.copytree(os.path.dirname(wrapopt.__file__), tmp_path / "wrapopt")
  library = tmp_path / "wrapopt" / LIBRARY
  library.unlink()
  if content:
    library.write_bytes(content)
  error = _error("-c", "import wrapopt", path=tmp_path,
                 TF_USE_LEGACY_KERAS="1")
  assert error.startswith(
      f"ImportError: wrapopt {wrapopt.__version__} was built for TensorFlow "
      f"{BUILD['tensorflow']}, but found a TensorFlow {tf.__version__} "
      f"that cannot load {library} (")
  assert why in error
  assert "To mend this, build wrapopt for the TensorFlow" in error


def test_facts_of_the_build():
  assert BUILD["wrapopt"] == wrapopt.__version__
  # pip writes 2.22.0rc0, TensorFlow itself 2.22.0-rc0.
  assert Version(BUILD["tensorflow"]) == Version(tf.__version__)
  assert BUILD["cxx11_abi"] == tf.sysconfig.CXX11_ABI_FLAG
  # The namespace as it stands in the symbols of TensorFlow's library.
  namespace = BUILD["absl_namespace"]
  with open(os.path.join(tf.sysconfig.get_lib(),
                         "libtensorflow_framework.so.2"), "rb") as f:
    assert f"4absl{len(namespace)}{namespace}6Status".encode() in f.read()


IMPORT = """
import importlib
import logging
import os
import pkgutil
import signal
import sys
import threading
import warnings

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry

def state():
  return {
      "environment": dict(os.environ),
      "path": list(sys.path),
      "threads": threading.active_count(),
      "signals": [signal.getsignal(s) for s in signal.valid_signals()],
      "warnings": list(warnings.filters),
      "log handlers": list(logging.getLogger().handlers),
      "tf log": (tf.get_logger().level, list(tf.get_logger().handlers)),
      "eager": tf.executing_eagerly(),
      "v2 behavior": tf.compat.v1.executing_eagerly_outside_functions(),
      "resource variables": tf.compat.v1.resource_variables_enabled(),
      # Its creation fixes the devices and the number of threads.
      "runtime": context.context()._context_handle,
      "default graph": len(tf.compat.v1.get_default_graph().get_operations()),
  }

def recorded(load, calls):
  return lambda path: calls.append(path) or load(path)

opened, made = [], []
tf.load_library = recorded(tf.load_library, opened)
tf.load_op_library = recorded(tf.load_op_library, made)
modules, before = set(sys.modules), state()

import wrapopt

after = state()
for name, value in before.items():
  assert after[name] == value, (name, value, after[name])
assert before["runtime"] is None
others = {m for m in sys.modules if not m.startswith("wrapopt")} - modules
assert not others, others
assert op_def_registry.get("Wrapopt>EmaUpdate")

for module in pkgutil.iter_modules(wrapopt.__path__, "wrapopt."):
  if (module.name != "wrapopt.__main__"
      and not module.name.startswith("wrapopt._wrapopt_")):
    assert (not module.ispkg or module.name not in sys.modules or
            module.name.removeprefix("wrapopt.") in (
                "_averages", "_gates", "_local", "_v1", "ops")), module.name
    importlib.import_module(module.name)
assert opened == [wrapopt.sysconfig.get_lib()], opened
assert not made, made

value, shadow = tf.Variable([8.0, 4.0]), tf.Variable([0.0, 0.0])
for decay in 0.75, 0.5:
  wrapopt.ops.ema_update([shadow], [value], decay)
  wrapopt.ops.exchange([shadow], [value])
assert value.numpy().tolist() == [5.0, 2.5], value
assert opened == made == [wrapopt.sysconfig.get_lib()], made
"""


def test_the_import_opens_the_library_and_has_no_other_effect():
  """The first op makes the functions of all ops."""
  assert printed_by("-c", IMPORT) == ""


AGAIN = """
import importlib
import sys

import keras
import numpy as np
import tensorflow as tf

import wrapopt
import wrapopt.checkpoints
import wrapopt.keras

v1 = tf.compat.v1

def modules():
  return sorted((name, module) for name, module in sys.modules.items()
                if name.split(".")[0] == "wrapopt")

def train():
  wk = wrapopt.keras
  for opt in wk.SWA(wk.MovingAverage(wk.LazyAdam(), 0.5), 0, 1), wk.Lookahead(
      wk.DropStaleGradient("sgd", 3)), wk.ScheduleFree("sgd"):
    v = keras.Variable(np.ones(2, np.float32))
    opt.build([v])
    if isinstance(opt, wk.Lookahead):
      with opt.inner_optimizer.record_step():
        opt.apply([tf.ones([2])], [v])
    else:
      tf.function(lambda: opt.apply([tf.ones([2])], [v]))()
  model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
  model.compile(wk.MovingAverage("sgd", 0.5), "mse")
  x = np.ones([4, 2])
  model.fit(x, x[:, 0], verbose=0, validation_data=(x, x[:, 0]),
            callbacks=[wk.EvaluateWithAverages()])
  with tf.Graph().as_default(), v1.Session() as session:
    e = v1.get_variable("e", [9, 4], use_resource=True)
    opt = wrapopt.MovingAverageOptimizer(wrapopt.LazyAdamOptimizer(), 0.9)
    train_op = opt.minimize(tf.reduce_sum(tf.gather(e, [1, 2])),
                            v1.train.get_or_create_global_step())
    gradient, = tf.gradients(opt.average(e) ** 2, [opt.average(e)])
    assert gradient is not None
    session.run(v1.global_variables_initializer())
    session.run(train_op)
    meta_graph = v1.train.export_meta_graph()
  with tf.Graph().as_default():
    v1.train.import_meta_graph(meta_graph)
    lazy, = v1.get_collection("wrapopt_lazy_averages")
    assert isinstance(lazy, importlib.import_module(
        "wrapopt._averages._lazy").LazyAverage)
  return model, opt

model, opt = train()
for _ in range(2):
  for name, _ in modules():
    del sys.modules[name]
  import wrapopt
  import wrapopt.checkpoints
  import wrapopt.keras
train()
of_keras = keras.layers.Layer._post_untrack_variable.of_keras
assert of_keras.__module__.split(".")[0] == "keras", of_keras

# Objects of the first import go on, and are not taken for others.
model.fit(np.ones([4, 2]), np.ones(4), verbose=0)
for call in [
    lambda: wrapopt.keras.SWA(model.optimizer, 0, 1),
    lambda: model.fit(np.ones([4, 2]), np.ones(4), verbose=0, callbacks=[
        wrapopt.keras.EvaluateWithAverages()]),
    lambda: wrapopt.DropStaleGradientOptimizer(opt, 3),
    lambda: wrapopt.checkpoints.SnapshotHook(opt, "none", 1)]:
  try:
    call()
  except ValueError as e:
    assert "must be made with the wrapopt that is imported now, got a " in (
        str(e)), e
  else:
    raise AssertionError("nothing is said")

for _, module in modules():
  importlib.reload(module)
"""


def test_importing_again():
  printed_by("-c", AGAIN)
