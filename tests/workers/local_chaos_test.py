"""Processes and links of local training fail at random, for a short time.

`local_chaos.py` measures more: see CONTRIBUTING.md.
"""

import re

import numpy as np
import pytest

import local_job
import local_worker
from processes import run_python


@pytest.mark.parametrize("algorithm", local_job.RULES)
def test_random_faults(algorithm, tmp_path):
  done = run_python(
      "-m", "local_chaos", "--algorithm", algorithm, "--workers", "3",
      "--rates", "900", "--minutes", "1", "--start-secs", "1",
      "--folder", str(tmp_path))
  assert done.returncode == 0, (done.stdout, done.stderr)
  print(done.stdout)
  kinds = re.findall(r"\| (\d+) / (\d+) / (\d+) \|", done.stdout)
  kills, pauses, cuts = np.sum(np.array(kinds, int), axis=0)
  assert kills and pauses
  assert bool(cuts) != ("Links stay up" in done.stdout)


def lines(rounds=6):
  """Log lines of a job of two workers; the second one is killed in round 3."""
  found, center, velocity = [], np.zeros(7), np.zeros(7)

  def note(name, round_, **facts):
    found.append({
        "name": name, "place": [round_, 5], "time": 3 * round_,
        "checksum": str(center), "sample": center.tolist(), **facts})

  for name in "w0", "w1":
    note(name, 0, begun=-1)
  for round_ in range(1, rounds):
    members = ["w0"] if round_ == 3 else ["w0", "w1"]
    mean = np.average([local_worker.sample(local_worker.delta(n))
                       for n in members], axis=0,
                      weights=[local_worker.weight(n) for n in members])
    velocity = 0.9 * velocity - mean
    center = center - 0.7 * (0.9 * velocity - mean)
    for name in members:
      note(name, round_, counted=True, workers=members, secs=1.0)
    if round_ == 3:
      note("w1", round_, begun=8)
  return found


def test_the_books_of_a_job():
  books = local_job.Books(lines())
  assert (books.unseen, books.momenta_lost) == (0, 0)
  assert books.members[3, 5] == ("w0",)
  # Without the first round, from which the time counts.
  assert books.steps(0, 100) == (3 + 3 + 1 + 3 + 3, 15)
  # Nobody saw a round: the next one starts from its center.
  some = [line for line in lines() if line["place"][0] != 2]
  assert local_job.Books(some).unseen == 1


@pytest.mark.parametrize("broken, error", [
    ({"sample": [0.5] * 7, "checksum": "other"}, "checksum"),
    ({"workers": ["w0", "w1"]}, "do not move"),
    ({"workers": ["w1"]}, "w1"),
])
def test_books_that_do_not_balance(broken, error):
  found = lines()
  [line] = [x for x in found if x["place"][0] == 3 and x.get("counted")]
  line.update(broken)
  with pytest.raises(AssertionError, match=error):
    local_job.Books(found)


def test_a_momentum_that_is_lost():
  found = lines(4)
  # In one part, round 2 begins with a velocity of 0.
  mean = local_worker.sample(local_worker.delta("w0")) / 3 + (
      2 / 3 * local_worker.sample(local_worker.delta("w1")))
  for line in found:
    if line["place"][0] == 2:
      part = local_worker.PARTS[1]
      line["sample"][part] = (
          np.array(found[2]["sample"]) + 0.7 * 1.9 * mean)[part].tolist()
  assert local_job.Books(
      [x for x in found if x["place"][0] < 3]).momenta_lost == 1
