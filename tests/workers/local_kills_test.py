"""Workers of a DiLoCo are killed at each point of a round, and come back."""

import collections
import itertools
import json
import os
import random
import signal

import numpy as np
import tensorflow as tf

import local_kills_task as task
from local_parts import FORKS, Oracle, Process
from processes import wait_until


class Job:
  """Two servers, and workers that run until the end."""

  def __init__(self, num_workers, most_pushes, folder, saves=False):
    self.folder = folder
    self.most_pushes = most_pushes
    self.saves = saves
    self.names = [f"w{i}" for i in range(num_workers)]
    self.workers = {}
    self.start_all()

  def start_all(self):
    self.servers = [Process() for _ in range(2)]
    for name in self.names:
      self.start(name)

  def start(self, name):
    self.workers[name] = FORKS.Process(target=task.run, args=(
        name, [s.address for s in self.servers], len(self.names),
        self.most_pushes, self.folder, self.saves))
    self.workers[name].start()

  def path(self, name):
    return os.path.join(self.folder, name)

  def lines(self, name):
    """The lines of a worker's log, as dicts."""
    try:
      with open(self.path(f"{name}.log"), encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]
    except FileNotFoundError:
      return []

  def wait_for_counted(self, name, known):
    """Waits until a worker counts in a round, after its first `known` lines."""
    wait_until(lambda: any(line.get("counted")
                           for line in self.lines(name)[known:]),
               lambda: f"{name} does not count; {self.exits()}")

  def exits(self):
    return {name: w.exitcode for name, w in self.workers.items()}

  def kill(self, name, point, others_go_on):
    """Lets a worker die at a point of its next round, and starts it again.

    Args:
      name: The worker.
      point: One of `task.POINTS`.
      others_go_on: Whether it comes back after the others have ended rounds
        without it, instead of at once.
    """
    with open(self.path("order"), "w", encoding="utf-8") as f:
      f.write(point)
    os.rename(self.path("order"), self.path(f"die_{name}"))
    self.workers[name].join(60)
    assert self.workers[name].exitcode == -signal.SIGKILL, (point, self.exits())
    if others_go_on:
      other = next(x for x in self.names if x != name)
      for _ in range(3):
        self.wait_for_counted(other, len(self.lines(other)))
    known = len(self.lines(name))
    self.start(name)
    self.wait_for_counted(name, known)

  def end(self):
    with open(self.path("stop"), "w", encoding="utf-8"):
      pass
    for name, worker in self.workers.items():
      worker.join(60)
      assert worker.exitcode == 0, (name, self.exits())

  def close(self):
    for worker in self.workers.values():
      worker.kill()
      worker.join()
    for server in self.servers:
      server.kill()


def check(lines, kills):
  """Checks the lines of all workers' logs."""
  of_round = collections.defaultdict(list)
  for line in lines:
    of_round[line["round"]].append(line)
  assert sorted(of_round) == list(range(max(of_round) + 1))
  oracle = Oracle(np.zeros_like(of_round[0][0]["sample"]))
  late = 0
  for round_, noted in sorted(of_round.items()):
    # Also those that have come back.
    assert len({line["checksum"] for line in noted}) == 1, noted
    if round_ > 0:
      # A worker that came after the end was not told the members.
      [members] = {tuple(line["workers"]) for line in noted
                   if line.get("workers")}
      for line in noted:
        assert line.get("counted", False) <= (line["name"] in members)
      oracle.end_round([
          oracle.center + task.sample(task.delta(name, round_ - 1))
          for name in members], [task.weight(name) for name in members])
      late += max((line["secs"] for line in noted if line.get("counted")),
                  default=0) > 0.9 * task.TIMEOUT_SECS
    np.testing.assert_allclose(
        noted[0]["sample"], oracle.center, rtol=0,
        atol=1e-6 * (round_ + 1) * (1 + np.abs(oracle.center).max()))
  # No round but the one of a kill, and the last, waited for a worker.
  assert late <= kills + 1, (late, kills)
  longest = max(line.get("secs", 0) for line in lines)
  # Two deadlines would be more.
  assert longest < task.TIMEOUT_SECS + 5, longest
  return max(of_round), late, longest


def run(num_workers, kills, folder, most_pushes=4):
  job = Job(num_workers, most_pushes, str(folder))
  choose = random.Random(num_workers)
  try:
    for name in job.names:
      job.wait_for_counted(name, 0)
    for i, point in zip(range(kills), itertools.cycle(task.POINTS)):
      # In two cycles, each point gets both.
      others_go_on = (i + i // len(task.POINTS)) % 2 == 0
      job.kill(choose.choice(job.names), point, others_go_on)
    job.end()
    rounds, late, longest = check(sum(map(job.lines, job.names), []), kills)
    print(f"{num_workers} workers, {kills} kills, {rounds} rounds, of which "
          f"{late} waited for a deadline; the longest took {longest:.1f} s")
  finally:
    job.close()


def test_a_kill_at_each_point(tmp_path):
  run(4, len(task.POINTS), tmp_path)


def test_a_kill_at_each_point_where_workers_send_one_after_the_other(tmp_path):
  """A worker that dies in its turn holds up the others."""
  run(2, len(task.POINTS), tmp_path, most_pushes=1)


def test_a_job_that_was_killed(tmp_path):
  """New servers and workers go on from its last checkpoint."""
  job = Job(2, 4, str(tmp_path), saves=True)
  try:
    for _ in range(3):
      for name in job.names:
        job.wait_for_counted(name, len(job.lines(name)))
    job.close()
    last = tf.train.load_checkpoint(job.path("checkpoints"))
    [key] = [k for k in last.get_variable_to_shape_map() if "/round" in k]
    saved = int(last.get_tensor(key))
    assert saved >= 1
    before = {name: job.lines(name) for name in job.names}
    job.start_all()
    for name in job.names:
      job.wait_for_counted(name, len(before[name]))
    job.end()
    lines = [line for name in job.names for line in before[name]
             if line["round"] <= saved]
    for name in job.names:
      after = job.lines(name)[len(before[name]):]
      assert after[0]["round"] >= saved, (after[0], saved)
      lines += after
    check(lines, kills=2)
  finally:
    job.close()
