"""Runs the example of asynchronous training."""

import json
import uuid

from matplotlib import image
import numpy as np
import pytest

import processes
from wrapopt.examples import async_digits

MODULE = "wrapopt.examples.async_digits"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
  out = tmp_path_factory.mktemp("async") / "a" / "b"
  mark = uuid.uuid4().hex
  done = processes.run_python("-m", MODULE, "--steps", "300", "--rest", "1.0",
                              "--seed", "3", "--out", str(out), MARK=mark)
  assert done.returncode == 0, done.stderr
  return out, done.stdout, mark


def test_the_slow_worker_is_dropped_and_the_others_are_not(ran):
  out, stdout, _ = ran
  results = json.loads((out / "results.json").read_text())
  *others, slow = results["workers"]
  for worker in (*others, slow):
    assert worker["admitted"] + worker["dropped"] == worker["tried"]
    for kind in ("admitted", "dropped"):
      assert sum(worker[f"{kind}_histogram"]) == worker[kind]
    assert sum(worker["admitted_histogram"][results["limit"] + 1:]) == 0
  # Its last gradients may be fresh: the others have ended.
  assert slow["dropped"] >= 1 and slow["admitted"] <= 2
  assert all(w["tried"] > 50 and w["dropped"] == 0 for w in others)
  # Each worker may begin one more before it sees the end.
  assert 300 <= sum(w["admitted"] for w in results["workers"]) <= 303
  assert results["accuracy"] > 0.6  # Of a guess, 0.1.
  rows = [line.split() for line in stdout.splitlines()]
  assert ["0", str(others[0]["tried"])] in [row[:2] for row in rows]
  assert ["2,", "slow", str(slow["tried"])] in [row[:3] for row in rows]
  assert [str(out / "staleness.png")] in rows


def test_the_histogram_is_an_image(ran):
  pixels = image.imread(ran[0] / "staleness.png")
  assert pixels.shape == (600, 960, 4)
  # Matplotlib's blue, orange and red: each worker has bars.
  for color in ((31, 119, 180), (255, 127, 14), (214, 39, 40)):
    same = np.abs(pixels[..., :3] * 255 - color).max(axis=-1) < 1
    assert same.sum() > 100, color


def test_no_process_is_left(ran):
  processes.wait_until(lambda: not processes.marked(ran[2]),
                       "processes are left")


def test_no_process_is_left_of_one_that_is_killed(tmp_path):
  # Itself, the one that forks, its helper, and four tasks.
  processes.kill_in_the_middle(
      MODULE, "--steps", "1000000", "--out", str(tmp_path), least=6,
      log=tmp_path / "err")


@pytest.mark.parametrize("arguments", [
    ["--steps", "0"], ["--limit", "-1"], ["--rest", "-1"], ["--rest", "x"]])
def test_arguments_are_checked(arguments, capsys):
  with pytest.raises(SystemExit) as e:
    async_digits.main(arguments)
  assert e.value.code == 2
  assert f"argument {arguments[0]}: " in capsys.readouterr().err
