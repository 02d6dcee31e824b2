"""./tools/wheel: the Pythons with which it tests the wheel."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

FILES = ("requirements.txt", "tools/setup", "tools/wheel")

BAZEL = """#!/bin/bash
[ "$1" = --version ] && echo bazel 4.2.3
[ "$1" = cquery ] && echo bazel-bin/p-1-py3-none-any.whl
exit 0
"""
# An interpreter of one version, and of environments that it makes. It tells of
# the programs that it runs.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) echo VERSION ;;
  "-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *_smoke.py*|*digits*|*pytest*|"-m wrapopt") echo "VERSION $*" >>"$CALLS"
    [ "VERSION" != "$BROKEN" ] ;;
esac
"""


@pytest.fixture
def run(tmp_path):
  """Runs the command where there are some Pythons: (process, calls)."""
  for path in FILES:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    shutil.copy(path, tmp_path / path)

  def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)

  program(tmp_path / "bin/bazel", BAZEL)
  program(tmp_path / "bin/nvidia-smi", "#!/bin/bash\nexit 9\n")
  program(tmp_path / ".venv/bin/python", PYTHON.replace("VERSION", "3.11"))
  for version in "3.10", "3.11":
    program(tmp_path / f"bin/python{version}",
            PYTHON.replace("VERSION", version))
  # One of pyenv's, and its shim for one that is not there.
  program(tmp_path / ".pyenv/versions/3.12.9/bin/python",
          PYTHON.replace("VERSION", "3.12"))
  for version in "3.12", "3.13":
    program(tmp_path / f"bin/python{version}", "#!/bin/bash\nexit 127\n")
  (tmp_path / ".venv" / ".installed").write_text(
      "tensorflow-cpu==2.21.0\n" + pathlib.Path("requirements.txt").read_text())

  def command(*args, **env):
    calls = tmp_path / "calls"
    calls.write_text("")
    process = subprocess.run(
        ["tools/wheel", *args], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={
            **os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
            "HOME": str(tmp_path), "BAZEL": "bazel", "CALLS": str(calls),
            "BROKEN": "", **env})
    return process, calls.read_text()

  return command


def test_all_that_are_there(run):
  process, calls = run()
  assert process.returncode == 0, process.stdout + process.stderr
  for version in "3.10", "3.11", "3.12":
    assert f"{version} -m wrapopt\n" in calls
    assert f"{version} -m wrapopt.examples.digits --steps 100 " in calls
    for test in "wheel_smoke.py ", "docs_test.py -k":
      assert re.search(rf"^{version} .*/tests/tools/{test}", calls, re.M)
  assert process.stdout.endswith(
      "The wheel works with Python 3.10 3.11 3.12\n"
      "Not tried, because missing: 3.13\n")


def test_one_of_the_day_is_not_that_of_the_tests(run):
  process, calls = run("--of-the-day")
  assert process.returncode == 0, process.stdout + process.stderr
  (version,) = {line.split()[0] for line in calls.splitlines()}
  assert version in ("3.10", "3.12") and "docs_test.py" not in calls
  assert f"The wheel works with Python {version}\n" in process.stdout


def test_a_version(run):
  process, calls = run("3.12")
  assert process.returncode == 0, process.stdout + process.stderr
  assert {line.split()[0] for line in calls.splitlines()} == {"3.12"}


@pytest.mark.parametrize("name", ["3.13", "/no/such/python"])
def test_one_that_is_not_there(run, name):
  process, calls = run(name)
  assert process.returncode != 0 and not calls
  assert "FAILED: finding interpreters" in process.stderr


def test_a_wheel_that_does_not_work(run):
  process, _ = run(BROKEN="3.12")
  assert process.returncode != 0
  assert re.search(r"FAILED: .*, Python 3\.12\n", process.stderr)
  assert "The wheel works" not in process.stdout
