"""Workers of a DiLoCo are killed at each point of a round, and come back."""

import itertools
import random

import tensorflow as tf

import local_job
import local_worker

TIMEOUT_SECS = 6.0


def new_job(num_workers, folder, most_pushes=4, saves=False):
  job = local_job.Job(num_workers, folder, saves=saves, options={
      "min_workers": 1, "round_timeout_secs": TIMEOUT_SECS,
      "most_pushes": most_pushes})
  job.start_all()
  return job


def kill(job, name, point, others_go_on):
  """Lets a worker die at a point of its next round, and starts it again.

  Args:
    job: The Job.
    name: The worker.
    point: One of `local_worker.POINTS`.
    others_go_on: Whether it comes back after the others have ended rounds
      without it, instead of at once.
  """
  job.kill_at(name, point)
  if others_go_on:
    other = next(x for x in job.names if x != name)
    for _ in range(3):
      job.wait_for_counted(other, len(job.lines(other)))
  known = len(job.lines(name))
  job.start(name)
  job.wait_for_counted(name, known)


def check(lines, kills):
  """Checks the lines of all workers' logs, of one generation or two."""
  books = local_job.Books(lines)
  # A worker that came after the end was not told the members.
  assert not books.unseen and not books.momenta_lost
  secs = {}
  for line in lines:
    if line.get("counted"):
      place = tuple(line["place"])
      secs[place] = max(secs.get(place, 0), line["secs"])
  # No round but the one of a kill, and the last, waited for a worker.
  late = sum(s > 0.9 * TIMEOUT_SECS for s in secs.values())
  assert late <= kills + 1, (late, kills)
  longest = max(line.get("secs", 0) for line in lines)
  # Two deadlines would be more.
  assert longest < TIMEOUT_SECS + 5, longest
  return len(books.members), late, longest


def run(num_workers, kills, folder, most_pushes=4):
  job = new_job(num_workers, folder, most_pushes)
  choose = random.Random(num_workers)
  try:
    for name in job.names:
      job.wait_for_counted(name, 0)
    points = local_worker.POINTS
    for i, point in zip(range(kills), itertools.cycle(points)):
      # In two cycles, each point gets both.
      others_go_on = (i + i // len(points)) % 2 == 0
      kill(job, choose.choice(job.names), point, others_go_on)
    job.end()
    rounds, late, longest = check(job.all_lines(), kills)
    print(f"{num_workers} workers, {kills} kills, {rounds} rounds, of which "
          f"{late} waited for a deadline; the longest took {longest:.1f} s")
  finally:
    job.close()


def test_a_kill_at_each_point(tmp_path):
  run(4, len(local_worker.POINTS), tmp_path)


def test_a_kill_at_each_point_where_workers_send_one_after_the_other(tmp_path):
  """A worker that dies in its turn holds up the others."""
  run(2, len(local_worker.POINTS), tmp_path, most_pushes=1)


def test_a_job_that_was_killed(tmp_path):
  """New servers and workers go on from its last checkpoint."""
  job = new_job(2, tmp_path, saves=True)
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
             if line["place"][0] <= saved]
    for name in job.names:
      after = job.lines(name)[len(before[name]):]
      assert after[0]["place"][0] >= saved, (after[0], saved)
      lines += after
    check(lines, kills=2)
  finally:
    job.close()
