"""Settings of all tests."""

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
  parser.addoption("--engine", help="archive of the CPU engine's objects")
  parser.addoption("--wheel", help="the wheel to test")


@pytest.fixture(scope="session", autouse=True)
def _package_is_the_built_one():
  """tools/quickstart installs wrapopt too; no test may run that copy."""
  yield
  package = sys.modules.get("wrapopt")
  runfiles = os.environ.get("TEST_SRCDIR")
  if package and runfiles:
    assert package.__file__.startswith(runfiles), package.__file__
