"""Runs the example of a coordinator."""

import json
import uuid

from matplotlib import image
import numpy as np
import pytest

import processes
from wrapopt.examples import coordinator_digits

MODULE = "wrapopt.examples.coordinator_digits"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
  out = tmp_path_factory.mktemp("coordinator") / "a"
  mark = uuid.uuid4().hex
  done = processes.run_python(
      "-m", MODULE, "--steps", "250", "--limit", "5", "--rest", "0.3", "--seed",
      "3", "--out", str(out), MARK=mark)
  assert done.returncode == 0, done.stderr
  return out, done.stdout, mark


def test_each_step_is_admitted_or_dropped_and_counted(ran):
  out, stdout, _ = ran
  runs = json.loads((out / "results.json").read_text())["runs"]
  assert list(runs) == ["Keras", "no limit", "limit 5"]
  for name, run in runs.items():
    assert run["scheduled"] == 250
    assert run["iterations"] <= 250
    assert run["accuracy"] > 0.4  # Of a guess, 0.1.
    if name != "Keras":
      admitted, dropped = (sum(run[f"{of}_histogram"])
                           for of in ("admitted", "dropped"))
      assert run["iterations"] == admitted == 250 - dropped
  assert sum(runs["no limit"]["dropped_histogram"]) == 0
  assert sum(runs["limit 5"]["admitted_histogram"][6:]) == 0
  assert "iterations" in stdout and str(out) in stdout


def test_the_histograms_are_an_image(ran):
  pixels = image.imread(ran[0] / "coordinator_digits.png")
  assert pixels.shape == (540, 1560, 4)
  blue = np.abs(pixels[..., :3] * 255 - (31, 119, 180)).max(axis=-1) < 1
  assert blue.sum() > 100


def test_no_process_is_left(ran):
  processes.wait_until(lambda: not processes.marked(ran[2]),
                       "processes are left")


@pytest.mark.parametrize("arguments", [
    ["--steps", "0"], ["--limit", "-1"], ["--rest", "0"], ["--rest", "x"]])
def test_arguments_are_checked(arguments, capsys):
  with pytest.raises(SystemExit) as e:
    coordinator_digits.main(arguments)
  assert e.value.code == 2
  assert f"argument {arguments[0]}: " in capsys.readouterr().err
