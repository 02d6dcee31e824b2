"""cc/gpu/check: programs that need a real GPU."""

import re
import subprocess

import pytest

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def gpu(request, monkeypatch):
  """The fake GPU, in the environment of processes to be."""
  monkeypatch.setenv("LD_LIBRARY_PATH", request.config.getoption("--fake_gpu"))


def check(program, *args):
  """Runs a program that must find no fault; returns what it prints."""
  process = subprocess.run([f"cc/gpu/check/{program}", *args],
                           capture_output=True, text=True, check=False)
  assert process.returncode == 0, process.stdout + process.stderr
  return process.stdout


def test_arrays_that_lie_far_apart(monkeypatch, tmp_path):
  # Of these 19 GiB few are touched.
  monkeypatch.setenv("WRAPOPT_FAKE_GPU_MEMORY", "19")
  monkeypatch.setenv("WRAPOPT_FAKE_GPU_LOG", str(tmp_path / "log"))
  assert check("large", "far").splitlines()[1:] == [
      "right: arrays 17 GiB apart"]
  log = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
  # A launch for each of two variables.
  assert [line.split()[-1] for line in log if line.startswith("launch")] == [
      "1", "1"]


def test_large_arrays_take_much_memory():
  assert re.findall("NOT CHECKED: .* need (.*) of", check("large")) == [
      "10 GB", "18 GiB"]


# Of the fake GPU, this tests the command alone.


def test_bandwidth():
  text = check("bandwidth", "100000")
  assert text.count("of a copy's") == text.count(" 2^15 ") == 36
  launches = re.findall(r"(\d+) launches for (\d+) variables", text)
  assert len(launches) == 36
  for count, variables in launches:
    assert int(count) <= -(-int(variables) // 145)
