"""Settings for all tests."""

import gc
import os
import sys

import hypothesis
import pytest

# The same examples on every run, and none fails for being slow.
hypothesis.settings.register_profile(
    "wrapopt", database=None, deadline=None, derandomize=True)
hypothesis.settings.load_profile("wrapopt")


def pytest_addoption(parser):
  # Outputs of the build that one test each looks at: see BUILD.
  parser.addoption("--loops", help="archive of the CPU engine's loops")
  parser.addoption("--fake_gpu", help="folder of the fake GPU's libraries")
  parser.addoption("--wheel", help="the wheel to test")
  parser.addoption("--device", help="where tests put their variables, e.g. "
                   "GPU:0; what they put nowhere stays on the CPU")


def pytest_configure(config):
  config.addinivalue_line(
      "markers", "cpu(why): does not run with variables on a GPU")
  config.addinivalue_line(
      "markers", "by_day(n): runs at most n cases by day; see tools/cases.py")


def pytest_collection_finish():
  # What TensorFlow has made by now stays. Without it, a collection of garbage,
  # such as that of keras.utils.clear_session(), is ten times as fast.
  gc.collect()
  gc.freeze()


# Before tools/cases.py divides them between day and night.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
  if config.getoption("--device"):
    # What XLA compiles for a GPU needs a real one.
    left_out = [item for item in items if item.get_closest_marker("cpu") or
                "jit" in item.name.partition("[")[2].strip("]").split("-")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
  return (yield)


@pytest.fixture(scope="session", autouse=True)
def _device(request):
  """Enters the CPU, and tells `modes` where variables go."""
  device = request.config.getoption("--device")
  if device is None:
    yield
    return
  import modes  # pylint: disable=g-import-not-at-top
  import tensorflow as tf  # pylint: disable=g-import-not-at-top
  tf.config.set_soft_device_placement(False)
  modes.VARIABLES, modes.OTHERS = f"/device:{device}", "/device:CPU:0"
  with tf.device(modes.OTHERS):
    yield


@pytest.fixture(scope="session", autouse=True)
def _package_is_the_built_one():
  """tools/quickstart installs wrapopt too; no test may run that copy."""
  yield
  package = sys.modules.get("wrapopt")
  runfiles = os.environ.get("TEST_SRCDIR")
  if package and runfiles:
    assert package.__file__.startswith(runfiles), package.__file__
