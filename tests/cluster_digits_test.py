"""Runs the example of model averaging."""

import json
import uuid

from matplotlib import image
import numpy as np
import pytest

import processes
from wrapopt.examples import cluster_digits

MODULE = "wrapopt.examples.cluster_digits"
ROUNDS = 20
STEPS = 20  # Of a round.


@pytest.fixture(scope="module", params=[False, True], ids=["all", "killed"])
def ran(request, tmp_path_factory):
  out = tmp_path_factory.mktemp("cluster") / "a" / "b"
  mark = uuid.uuid4().hex
  done = processes.run_python(
      "-m", MODULE, "--rounds", str(ROUNDS), "--seed", "3", "--out", str(out),
      *["--kill-worker"] * request.param, MARK=mark)
  print(done.stderr)  # For a test that fails: why sessions were made anew.
  assert done.returncode == 0, done.stderr
  return out, done, mark, request.param


def test_the_workers_agree_after_each_round(ran):
  out, done, _, killed = ran
  results = json.loads((out / "results.json").read_text())
  workers = results["workers"]
  assert list(workers) == ["/job:chief/task:0", "/job:worker/task:0",
                           "/job:worker/task:1"]
  assert (workers["/job:worker/task:1"] is None) == killed
  there = [w for w in workers.values() if w]
  assert sum(w["scans"] for w in there) <= results["alone"][1]["scans"]
  chief = there[0]
  assert [row[0] for row in chief["curve"]] == list(range(1, ROUNDS + 1))
  means = {row[0]: row[2] for row in chief["curve"]}
  for worker in there:
    assert worker["steps"] == STEPS * len(worker["curve"])
    # A loaded machine may have made it late for some.
    assert len(worker["curve"]) > ROUNDS / 2
    for over, _, mean in worker["curve"]:
      assert mean == means[over]
  own = np.array([[row[1] for row in w["curve"]][-5:] for w in there])
  assert own.std() > 0  # They train apart.
  # A guess is right in a tenth of all cases.
  assert means[ROUNDS] > 0.7
  assert means[ROUNDS] >= own.mean() - 0.02
  # What is printed.
  text = done.stdout
  assert f"{means[ROUNDS]:>7.2%}" in text and str(out / "curves.png") in text
  assert ("killed" in text) == killed
  assert f"{ROUNDS}/{ROUNDS}" in done.stderr  # Progress.


def test_the_curves_are_an_image(ran):
  pixels = image.imread(ran[0] / "curves.png")
  assert pixels.shape == (600, 960, 4)
  # Matplotlib's blue and orange: the chief and the first worker.
  for color in ((31, 119, 180), (255, 127, 14)):
    same = np.abs(pixels[..., :3] * 255 - color).max(axis=-1) < 1
    assert same.sum() > 100, color


def test_no_process_is_left(ran):
  processes.wait_until(lambda: not processes.marked(ran[2]),
                       "processes are left")


def test_no_process_is_left_of_one_that_is_killed(tmp_path):
  # Itself, the one that forks, its helper, and four tasks.
  processes.kill_in_the_middle(
      MODULE, "--rounds", "1000000", "--out", str(tmp_path), least=6,
      log=tmp_path / "err")


@pytest.mark.parametrize("rounds", ["1", "x"])
def test_arguments_are_checked(rounds, capsys):
  with pytest.raises(SystemExit) as e:
    cluster_digits.main(["--rounds", rounds])
  assert e.value.code == 2
  assert "argument --rounds: " in capsys.readouterr().err
