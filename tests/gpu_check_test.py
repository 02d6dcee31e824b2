"""cc/gpu/check: programs that check and measure the GPU kernels."""

import collections
import re
import subprocess

import pytest

import numerics

# As many as there are rules, number types and sizes for.
ALL_RIGHT = r"(\d+) of \1 right"

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def gpu(request, monkeypatch):
  """The fake GPU, in the environment of processes to be."""
  monkeypatch.setenv("LD_LIBRARY_PATH",
                     request.config.getoption("--fake_gpu"))


def check(program, *args):
  return subprocess.run([f"cc/gpu/check/{program}", *args],
                        capture_output=True, text=True,
                        check=False)


def test_numbers(monkeypatch, tmp_path):
  # Of these 19 GiB few are touched.
  monkeypatch.setenv("WRAPOPT_FAKE_GPU_MEMORY", "19")
  monkeypatch.setenv("WRAPOPT_FAKE_GPU_LOG", str(tmp_path / "log"))
  process = check("numbers")
  assert process.returncode == 0, process.stdout + process.stderr
  assert re.fullmatch(ALL_RIGHT, "\n".join(process.stdout.splitlines()[1:]))
  log = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
  launches = [line.split()[1:] for line in log if line.startswith("launch")]
  # Each kernel: of small and large tables, and those that compensate.
  kernels = collections.defaultdict(set)
  for words in launches:
    _, kind, name = words[0].split("_", 2)
    kernels[kind == "compensated"].add(name)
  of_rules = {f"{rule}_{number}" for number in ("float", "double")
              for rule in numerics.WITH_GPU_KERNELS}
  assert kernels[True] == of_rules
  assert kernels[False] == of_rules | {"Mark_double"} | {
      f"{kernel}_{number}" for number in ("float", "double")
      for kernel in ("Average", "CatchUp", "Sum")}
  # One long variable, and two far from each other, take two launches each.
  assert [words[2] for words in launches[-4:-2]] == ["65536", "13"]
  assert [words[-1] for words in launches[-2:]] == ["1", "1"]
  assert sum(line.startswith("graph") for line in log) == 3


def test_numbers_with_small_tables(monkeypatch):
  monkeypatch.setenv("WRAPOPT_FAKE_GPU_CC", "60")
  process = check("numbers")
  assert process.returncode == 0, process.stdout + process.stderr
  first, second = process.stdout.splitlines()[1:]
  assert first == "no memory for arrays 17 GiB apart: not checked"
  assert re.fullmatch(ALL_RIGHT, second)


def test_huge_takes_much_memory():
  process = check("huge")
  assert process.returncode == 0, process.stderr
  assert "NOT CHECKED: needs 10 GB" in process.stdout


# Of the fake one, these test the commands alone.


def test_bandwidth():
  process = check("bandwidth", "100000")
  assert process.returncode == 0, process.stderr
  assert process.stdout.count("of a copy's") == 36
  launches = re.findall(r"(\d+) launches for (\d+) variables", process.stdout)
  assert len(launches) == 36
  for count, variables in launches:
    assert int(count) <= -(-int(variables) // 145)


def test_chunks():
  process = check("chunks", "100000")
  assert process.returncode == 0, process.stderr
  assert process.stdout.count(" 2^15 ") == 8
