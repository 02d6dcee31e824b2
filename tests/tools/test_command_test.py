"""./tools/test: the targets that it runs and the environments that it makes."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

FILES = ("requirements-tools.txt", "requirements.txt", "tools/setup",
         "tools/test")

# Stand for Bazel, whose `cquery` finds the targets in $NEEDING and whose
# `query` finds two, and for the interpreter of an environment. They write
# all calls to `calls`.
BAZEL = """#!/bin/bash
[ "$1" = --version ] && echo bazel 4.2.3 && exit
echo bazel "$@" >>calls
[ "$1" = cquery ] && printf '%s' "$NEEDING"
[ "$1" = query ] && printf '//tests:night\\n//tests:long\\n'
exit 0
"""
PYTHON = """#!/bin/bash
echo "$(basename "$0")" "$@" >>calls
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "${@: -1}/bin"
  cp "$0" "${@: -1}/bin/python"
fi
exit 0
"""


@pytest.fixture
def run(tmp_path):
  """Runs the command: (calls, whether it made .venv-tensorflow)."""
  for path in FILES:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    shutil.copy(path, tmp_path / path)
  for name, text in ("bazel", BAZEL), ("python", PYTHON), (
      "nvidia-smi", "#!/bin/bash\nexit 9\n"), ("chromium", ""), (
          "chromedriver", ""):
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / name).write_text(text)
    (tmp_path / "bin" / name).chmod(0o755)
  # It is there already, and is not made.
  (tmp_path / ".venv" / "bin").mkdir(parents=True)
  shutil.copy(tmp_path / "bin" / "python", tmp_path / ".venv" / "bin")
  (tmp_path / ".venv" / ".installed").write_text(
      "tensorflow-cpu==2.21.0\n" + pathlib.Path("requirements.txt").read_text())

  def process(*args, needing="", **env):
    return subprocess.run(
        ["tools/test", *args], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={
            **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "PYTHON": "python", "BAZEL": "bazel", "NEEDING": needing, **env})

  def command(*args, **options):
    done = process(*args, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    return calls, (tmp_path / ".venv-tensorflow" / ".installed").exists()

  command.process = process
  return command


def test_a_target_that_needs_no_cuda_wheel(run):
  calls, made = run("//tests:a", "//tests:b", "--test_filter=x")
  assert not made
  bazel = [call for call in calls if call.startswith("bazel")]
  assert bazel[0] == (
      "bazel cquery --test_filter=x --ui_event_filters=-info "
      "attr(tags, cuda-wheel, set(//tests:a //tests:b))")
  assert bazel[1].startswith("bazel test --test_filter=x //tests:a //tests:b ")
  assert not [call for call in calls if "pip" in call or "venv" in call]


def test_a_target_that_needs_it(run):
  calls, made = run("//tests:a", needing="//tests:a (1234567)\n")
  assert made
  assert [c for c in calls if "venv" in c] == [
      "python -m venv --clear .venv-tensorflow"]


def test_all_targets(run):
  calls, _ = run()
  assert any("set(//...)" in call for call in calls)
  assert any(call.startswith("bazel test //... ") for call in calls)


@pytest.mark.parametrize("tag, venv, package", [
    ("torch", ".venv-torch", "torch=="),
    ("programs", ".venv-programs", "keras-hub=="),
    ("browser", ".venv-tools", "selenium==")])
def test_environments_of_the_night(tag, venv, package, run, tmp_path):
  calls, _ = run("--nightly", needing="//tests:a (1)\n")
  assert any(f"attr(tags, {tag}, set(//... " in call for call in calls)
  assert package in (tmp_path / venv / ".installed").read_text()
  (tmp_path / "calls").unlink()
  calls, _ = run("//tests:a", needing="//tests:a (1)\n")
  assert not any(tag in call for call in calls)


def test_all_targets_and_those_of_the_night(run):
  calls, _ = run("--nightly")
  assert "bazel query --ui_event_filters=-info attr(tags, nightly, //...)" in (
      calls)
  assert any("set(//... //tests:night //tests:long)" in call for call in calls)
  assert any(call.startswith("bazel test //... //tests:night //tests:long ")
             for call in calls)


def test_another_keras(run, tmp_path):
  calls, _ = run("//tests:a", needing="//tests:a (1)\n", KERAS="3.12.0")
  assert any(call.endswith(
      "install tensorflow-cpu==2.21.0 keras==3.12.0 -r requirements.txt")
             for call in calls)
  for venv in ".venv", ".venv-tensorflow":
    assert "keras==3.12.0\n" in (tmp_path / venv / ".installed").read_text()
  # The next command brings back TensorFlow's choice.
  (tmp_path / "calls").unlink()
  calls, _ = run("//tests:a")
  assert any(call.endswith("install tensorflow-cpu==2.21.0 -r requirements.txt")
             for call in calls)


def test_another_tensorflow(run, tmp_path):
  calls, made = run("//tests:a", needing="//tests:a (1)\n",
                    TENSORFLOW="2.22.0rc0")
  assert made
  pip = [call for call in calls if "-m pip -q" in call]
  # Nothing of the other one is left, nor of its Keras.
  assert pip[0].endswith("uninstall -y tensorflow keras keras-nightly")
  assert pip[1].endswith(
      "install tensorflow-cpu==2.22.0rc0 -r requirements.txt")
  # Bazel has seen the packages as they were.
  assert calls.index("bazel shutdown") > calls.index(pip[1])
  for venv, wanted in (".venv", "tensorflow-cpu==2.22.0rc0"), (
      ".venv-tensorflow", "tensorflow==2.22.0rc0"):
    assert (tmp_path / venv / ".installed").read_text().startswith(
        f"{wanted}\n")
  # The next command brings back the one that is supported.
  (tmp_path / "calls").unlink()
  calls, _ = run("//tests:a")
  assert any(call.endswith("install tensorflow-cpu==2.21.0 -r requirements.txt")
             for call in calls)


@pytest.mark.parametrize("status", [0, 3])
def test_a_long_command_prints_the_time(run, tmp_path, status):
  sleep = tmp_path / "bin" / "sleep"
  sleep.write_text("#!/bin/bash\n[ $1 = 30 ] && exec /bin/sleep 0.1\n")
  sleep.chmod(0o755)
  python = tmp_path / ".venv" / "bin" / "python"
  python.write_text(python.read_text().replace(
      "exit 0",
      f"[[ $* != *install*-r* ]] || {{ /bin/sleep 1; exit {status}; }}"))
  outcome = run.process("//tests:a", TENSORFLOW="2.22.0rc0")
  assert (outcome.returncode == 0) == (status == 0)
  said = re.findall(r"^Python packages, in .*/\.venv: [01] seconds$",
                    outcome.stderr, re.M)
  assert len(said) > 2
  assert ("FAILED: Python packages" in outcome.stderr) == (status != 0)
  assert "Terminated" not in outcome.stderr


@pytest.mark.by_day(0)
def test_a_change_of_packages_that_fails_is_done_again(run, tmp_path):
  python = tmp_path / ".venv" / "bin" / "python"
  works = python.read_text()
  python.write_text(works.replace(
      "exit 0", '[[ "$*" != *install*==2.22.0rc0* ]]'))
  with pytest.raises(AssertionError, match="FAILED: Python packages"):
    run("//tests:a", TENSORFLOW="2.22.0rc0")
  python.write_text(works)
  calls, _ = run("//tests:a")
  assert any(call.endswith("install tensorflow-cpu==2.21.0 -r requirements.txt")
             for call in calls)
