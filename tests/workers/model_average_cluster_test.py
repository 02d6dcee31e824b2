"""ModelAverageOptimizer between processes: traces, restarts, lost workers."""

import concurrent.futures
import itertools
import os
import signal
import time

import pytest

import model_average_task
from processes import wait_until
from wrapopt.examples import _cluster

WORKERS = 3  # With the chief.
_prefixes = (f"job{i}" for i in itertools.count())


def new_cluster(**jobs):
  return _cluster.Cluster(model_average_task.FUNCTIONS,
                          preload=["model_average_task"], **jobs)


@pytest.fixture(scope="module")
def cluster():
  # Two parameter servers: one has the step and half of the variables.
  with new_cluster(ps=2, chief=1, worker=WORKERS - 1) as c:
    yield c


class Job:
  """Workers that train the same model.

  Attributes:
    reports: What each worker has reported.
    results: What each will return.
  """

  def __init__(self, cluster, **options):
    self._cluster = cluster
    self._options = {"prefix": next(_prefixes), **options}
    self._pool = concurrent.futures.ThreadPoolExecutor()
    self.reports = {}
    self.results = {}

  def start(self, job, number=0, **options):
    """Has a task train; returns once it has a session."""
    task = self._cluster.tasks[job, number]
    reports = self.reports[job, number] = []
    task.tell("train", **{**self._options, **options})
    self.results[job, number] = self._pool.submit(task.answer, reports.append)
    wait_until(lambda: reports or self.results[job, number].done(),
               f"no session of {task.name}")

  def until_step(self, step, job, number=0):
    """Waits until a task has taken so many steps."""
    wait_until(lambda: (len(self.reports[job, number]) > step or
                        self.results[job, number].done()),
               f"no step {step} of {job} {number}")

  def result(self, job, number=0):
    return self.results[job, number].result(60)


def two_workers(cluster, **options):
  """A Job of a chief, whose first step is of 1, and a worker: of 2."""
  job = Job(cluster, **options)
  job.start("chief", gradient=-1.0)
  job.start("worker", gradient=-2.0)
  return job


def own(log, model=0):
  """Of a log: the first variable after each step; the second is the same."""
  assert all(entry[model][0][0] == entry[model][0][1] for entry in log)
  return [entry[model][0][0] for entry in log]


def center(log, model=0):
  assert all(entry[model][1][0] == entry[model][1][1] for entry in log)
  return [entry[model][1][0] for entry in log]


def steps(log, model=0):
  return [entry[model][2] for entry in log]


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("v2", [True, False])
def test_the_trace_of_1_15(cluster, v2, use_resource):
  """Steps of 1 and 2, averaged every second step.

  The first round has the mean of 2 and 4, and so on.
  """
  job = two_workers(cluster, steps=6, v2=v2, use_resource=use_resource)
  chief, worker = job.result("chief"), job.result("worker")
  assert own(chief) == [0, 1, 3, 4, 6, 7, 9]
  assert own(worker) == [0, 2, 3, 5, 6, 8, 9]
  assert center(chief) == center(worker) == [0, 0, 3, 3, 6, 6, 9]
  assert steps(chief) == steps(worker) == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.by_day(0)
def test_a_worker_starts_from_the_centers(cluster):
  job = Job(cluster, steps=2)
  job.start("chief", gradient=-1.0, initial=5.0)
  job.start("worker", gradient=-2.0, initial=7.0)
  assert own(job.result("chief")) == [5, 6, 8]
  assert own(job.result("worker")) == [5, 7, 8]


@pytest.mark.by_day(0)
def test_slots_are_the_workers_own(cluster):
  """A session of a worker that is not the chief is ready; momentum goes on."""
  job = two_workers(cluster, steps=4, inner="momentum")
  # Steps of 1, 2, 3, 4 and of 2, 4, 6, 8: means 4.5, and 4.5 + 10.5.
  assert own(job.result("chief")) == [0, 1, 4.5, 7.5, 15]
  assert own(job.result("worker")) == [0, 2, 4.5, 10.5, 15]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("moving_average, chief, worker", [
    # Own values are 0, 1, 3 and 0, 2, 3, where the third is a round's mean.
    ("around", [0, 0.5, 1.75], [0, 1, 2]),
    # Before the round they are 2 and 4.
    ("inside", [0, 0.5, 1.25], [0, 1, 2.5]),
])
def test_moving_averages_are_the_workers_own(cluster, moving_average, chief,
                                             worker):
  """A session of a worker that is not the chief is ready."""
  job = two_workers(cluster, steps=2, moving_average=moving_average)
  for name, want in (("chief", chief), ("worker", worker)):
    assert [entry[0][3] for entry in job.result(name)] == [[x] * 2
                                                           for x in want]
    assert own(job.result(name))[-1] == 3


@pytest.mark.by_day(0)
def test_adam(cluster):
  job = Job(cluster, steps=4, inner="adam", interval=4)
  job.start("chief", gradient=-1.0)
  job.start("worker", gradient=1.0)
  # Whatever the gradient, a step is the learning rate.
  chief, worker = own(job.result("chief")), own(job.result("worker"))
  assert chief == pytest.approx([0, 0.5, 1, 1.5, 0], abs=1e-5)
  assert worker == pytest.approx([0, -0.5, -1, -1.5, 0], abs=1e-5)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_the_mean_of_large_numbers_is_one(cluster, dtype):
  job = Job(cluster, steps=1, interval=1, num_worker=3, initial=32768.0,
            dtype=dtype)
  job.start("chief", gradient=-16384.0)
  for i, gradient in enumerate((-8192.0, 0.0)):
    job.start("worker", i, gradient=gradient)
  # In half, the sum of two is infinity.
  assert center(job.result("chief")) == [32768, 40960]


@pytest.mark.by_day(0)
def test_two_optimizers(cluster):
  """In one graph, of one name; each has rounds of its own."""
  job = two_workers(cluster, steps=4, models=2)
  for log in job.result("chief"), job.result("worker"):
    assert center(log) == [0, 0, 3, 3, 6]
    assert center(log, 1) == [0, 0, 6, 6, 12]
    assert steps(log, 1) == [0, 0, 1, 1, 2]


@pytest.mark.by_day(0)
def test_two_jobs(cluster):
  """Two workers of one cluster train different models at the same time."""
  jobs = [Job(cluster, steps=20, num_worker=1) for _ in range(2)]
  # Each is the chief of its own model, but only a chief may be one.
  jobs[0].start("chief", gradient=-1.0)
  jobs[1].start("worker", gradient=-2.0, chief=True)
  assert center(jobs[0].result("chief"))[-1] == 20
  assert center(jobs[1].result("worker"))[-1] == 40


class TestLostWorkers:

  options = {"num_worker": 3, "min_workers": 2, "round_timeout_secs": 2.0}

  def test_killed_before_it_has_come(self, cluster, tmp_path):
    """Two go on without it. Restarted, it starts from the centers."""
    job = Job(cluster, interval=1, **self.options)
    back = str(tmp_path / "back")
    job.start("chief", gradient=-1.0, steps=5, hold={3: back})
    job.start("worker", 0, gradient=-3.0, steps=5, hold={3: back})
    job.start("worker", 1, gradient=-8.0, steps=9, hold={1: "/none"})
    job.until_step(1, "worker", 1)
    cluster.tasks["worker", 1].kill()
    # One round of three, two of two.
    job.until_step(3, "chief")
    job.until_step(3, "worker", 0)
    assert center(job.reports["chief", 0]) == [0, 4, 6, 8]
    cluster.restart("worker", 1)
    job.start("worker", 1, gradient=-8.0, steps=2)
    assert own(job.reports["worker", 1])[0] == 8
    open(back, "w", encoding="utf-8").close()
    assert center(job.result("chief")) == [0, 4, 6, 8, 12, 16]
    assert own(job.result("worker", 0)) == own(job.result("chief"))
    assert own(job.result("worker", 1)) == [8, 12, 16]

  def test_a_dead_worker_costs_one_timeout(self, cluster, tmp_path):
    job = Job(cluster, interval=1, steps=8, num_worker=3, min_workers=2,
              round_timeout_secs=3.0)
    go = str(tmp_path / "go")
    job.start("chief", gradient=-1.0, hold={0: go})
    job.start("worker", 0, gradient=-3.0, hold={0: go})
    job.start("worker", 1, gradient=-8.0, hold={0: "/none"})
    cluster.restart("worker", 1)
    start = time.monotonic()
    open(go, "w", encoding="utf-8").close()
    assert center(job.result("chief")) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    # Not one for each of the 8 rounds.
    assert 3 <= time.monotonic() - start < 24

  def test_killed_in_a_round(self, cluster, tmp_path):
    """What it sent counts."""
    job = Job(cluster, interval=1, **self.options)
    go = str(tmp_path / "go")
    job.start("chief", gradient=-1.0, steps=2, hold={0: go})
    job.start("worker", 0, gradient=-3.0, steps=2, hold={0: go})
    job.start("worker", 1, gradient=-8.0, steps=2)
    time.sleep(1)  # It waits in the round, where it cannot report.
    assert len(job.reports["worker", 1]) == 1
    cluster.restart("worker", 1)
    open(go, "w", encoding="utf-8").close()
    assert center(job.result("chief")) == [0, 4, 6]
    assert own(job.result("worker", 0)) == [0, 4, 6]

  def test_stopped_and_resumed(self, cluster, tmp_path):
    """Two go on without it; later it starts from the centers, and counts."""
    job = Job(cluster, interval=1, **self.options)
    stopped, back = str(tmp_path / "stopped"), str(tmp_path / "back")
    job.start("chief", gradient=-1.0, steps=6, hold={1: stopped, 4: back})
    job.start("worker", 0, gradient=-3.0, steps=6, hold={4: back})
    job.start("worker", 1, gradient=-8.0, steps=4, hold={1: stopped})
    job.until_step(1, "worker", 1)
    pid = cluster.tasks["worker", 1].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
      open(stopped, "w", encoding="utf-8").close()
      job.until_step(4, "chief")
      assert center(job.reports["chief", 0]) == [0, 4, 6, 8, 10]
    finally:
      os.kill(pid, signal.SIGCONT)
    # It sends what it has of the second round, is refused, and starts anew.
    job.until_step(2, "worker", 1)
    assert own(job.reports["worker", 1]) == [0, 4, 10]
    open(back, "w", encoding="utf-8").close()
    assert center(job.result("chief")) == [0, 4, 6, 8, 10, 14, 18]
    assert own(job.result("worker", 1)) == [0, 4, 10, 14, 18]

  def test_too_few_are_an_error(self, cluster):
    job = Job(cluster, steps=1, interval=1, num_worker=2,
              round_timeout_secs=1.0)
    job.start("chief", gradient=-1.0)
    with pytest.raises(RuntimeError, match=(
        r"(?s)DeadlineExceededError.* got values of 1 workers within 1 seconds "
        r"\('/job:chief/task:0'\), but needs 2 of 2")):
      job.result("chief")

  def test_a_worker_that_waited_in_vain(self, cluster, tmp_path):
    """It has an error. It has sent what it had, and another goes on with it."""
    go = str(tmp_path / "go")
    job = Job(cluster, steps=1, interval=1, round_timeout_secs=1.0)
    job.start("chief", gradient=-1.0, hold={0: go})
    job.start("worker", gradient=-3.0)
    with pytest.raises(RuntimeError, match=(
        "(?s)DeadlineExceededError.*round 0 .* within 1 seconds")):
      job.result("worker")
    open(go, "w", encoding="utf-8").close()
    assert center(job.result("chief")) == [0, 2]

  def test_no_chief_is_an_error(self, cluster):
    job = Job(cluster, steps=0, num_worker=2)
    job.start("chief", gradient=-1.0)
    job.result("chief")  # It has initialized the variables.
    with pytest.raises(RuntimeError, match=(
        "(?s)DeadlineExceededError.*No chief of 'another' .* 1.0 seconds")):
      job.start("worker", gradient=-1.0, chief_timeout_secs=1.0,
                rounds_name="another")
      job.result("worker")

  def test_a_chief_that_is_killed_stops_nobody(self, cluster):
    job = Job(cluster, interval=1, **self.options)
    job.start("chief", gradient=-1.0, steps=9, hold={1: "/none"})
    job.start("worker", 0, gradient=-3.0, steps=3)
    job.start("worker", 1, gradient=-8.0, steps=3)
    job.until_step(1, "chief")
    cluster.restart("chief", 0)
    for worker in 0, 1:
      # The mean of three, and then of two.
      assert center(job.result("worker", worker)) == [0, 4, 9.5, 15]


class TestRestarts:

  def test_of_the_chief(self, cluster, tmp_path):
    """The workers go on with the restored model."""
    job = Job(cluster, interval=2, checkpoint=str(tmp_path / "checkpoint"))
    job.start("chief", gradient=-1.0, steps=9, hold={5: "/none"})
    job.start("worker", gradient=-2.0, steps=8)
    # Two rounds are over, and of the third the worker has waited.
    job.until_step(5, "chief")
    job.until_step(5, "worker")
    cluster.restart("chief", 0)
    job.start("chief", gradient=-1.0, steps=2, initial=100.0)
    chief, worker = job.result("chief"), job.result("worker")
    assert own(chief) == [6, 7, 9]
    assert center(chief) == [6, 6, 9]
    assert steps(chief) == [2, 2, 3]
    # Its sixth step was in the round that the new chief ended.
    assert own(worker) == [0, 2, 3, 5, 6, 8, 6, 8, 9]
    assert steps(worker)[-1] == 3

  def test_of_the_parameter_server(self, tmp_path):
    """The chief restores the centers there, and all start from them."""
    go = str(tmp_path / "go")
    with new_cluster(ps=1, chief=1, worker=1) as c:
      job = two_workers(c, interval=2, steps=9, hold={5: go},
                        checkpoint=str(tmp_path / "checkpoint"))
      job.until_step(5, "chief")
      job.until_step(5, "worker")
      c.restart("ps", 0)
      open(go, "w", encoding="utf-8").close()
      chief, worker = job.result("chief"), job.result("worker")
    assert own(chief) == [0, 1, 3, 4, 6, 7, 7, 9, 10, 12]
    assert center(chief) == [0, 0, 3, 3, 6, 6, 6, 9, 9, 12]
    assert steps(chief) == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert own(worker) == [0, 2, 3, 5, 6, 8, 8, 9, 11, 12]

  def test_of_all(self, tmp_path):
    """1.15 went on from initial values, and saved those."""
    options = {"checkpoint": str(tmp_path), "interval": 2, "prefix": "job",
               "initial": 1.0}
    with new_cluster(ps=1, chief=1, worker=1) as c:
      job = two_workers(c, steps=4, **options)
      assert center(job.result("chief")) == [1, 1, 4, 4, 7]
      job.result("worker")
    with new_cluster(ps=1, chief=1, worker=1) as c:
      job = two_workers(c, steps=2, **options)
      chief, worker = job.result("chief"), job.result("worker")
      assert own(chief) == [7, 8, 10]
      assert own(worker) == [7, 9, 10]
      assert steps(chief) == [2, 2, 3]
