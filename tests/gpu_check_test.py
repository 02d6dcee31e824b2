"""cc/gpu/check, which compares the kernels with the CPU's."""

import subprocess

import pytest

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def gpu(request, monkeypatch):
  """The fake GPU, in the environment of processes to be."""
  monkeypatch.setenv("LD_LIBRARY_PATH",
                     request.config.getoption("--fake_gpu"))


def check(*args):
  return subprocess.run(["cc/gpu/check", *args], capture_output=True, text=True,
                        check=False)


@pytest.mark.parametrize("cc", [60, 90])
def test_numbers(monkeypatch, cc):
  monkeypatch.setenv("WRAPOPT_FAKE_GPU_CC", str(cc))
  process = check("numbers")
  assert process.returncode == 0, process.stdout + process.stderr
  assert process.stdout.splitlines()[1:] == [
      "no memory for 2^32 elements: not checked", "127 of 127 right"]


def test_bandwidth(tmp_path):
  # Of the fake one, that is a test of the command alone.
  process = check("bandwidth", "100000")
  assert process.returncode == 0, process.stderr
  assert process.stdout.count("of a copy's") == 36
