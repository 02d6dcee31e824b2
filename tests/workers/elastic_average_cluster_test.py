"""Elastic averaging between real processes, through monitored sessions."""

import pytest

import elastic_average_task
from wrapopt.examples import _cluster

CHIEF, WORKER = 0, 1


@pytest.fixture(scope="module")
def cluster():
  with _cluster.Cluster(elastic_average_task.FUNCTIONS,
                        preload=["elastic_average_task"], ps=2,
                        worker=2) as c:
    yield c


def start_both(cluster, **arguments):
  """Starts the chief and the worker, and returns them."""
  tasks = [cluster.tasks["worker", i] for i in (CHIEF, WORKER)]
  for task in tasks:
    # One after the other: a monitored session that finds its variables without
    # values looks again half a minute later.
    task.ask("start", **arguments)
  return tasks


def test_two_workers(cluster):
  """The trace of the test of this name in v1/elastic_average_test.py."""
  tasks = start_both(cluster, prefix="trace")
  centers, local = tasks[WORKER].ask("devices", prefix="trace")
  assert centers == ["/job:ps/task:0", "/job:ps/task:1"]
  assert local == {"/job:worker/task:1"}
  for x, y, center, saw_x, saw_y, step in [
      (1.0, 2.0, 0.0, 0.0, 0.0, 0),
      (1.0, 2.5, 2.5, 0.0, 1.0, 2),
      (2.0, 4.5, 2.5, 0.0, 1.0, 2),
      (2.75, 4.625, 4.625, 2.5, 2.75, 4)]:
    for task in tasks:
      task.ask("train", prefix="trace")
    for task, value, saw in ((tasks[0], x, saw_x), (tasks[1], y, saw_y)):
      assert task.ask("values", prefix="trace") == {
          "variables": [value, 10 - value], "centers": [center, 10 - center],
          "seen": [saw, 10 - saw], "step": step}


@pytest.mark.by_day(0)
def test_synchronous_start(cluster):
  """The chief waits for the worker, which comes later."""
  chief, worker = [cluster.tasks["worker", i] for i in (CHIEF, WORKER)]
  chief.tell("start", prefix="synchronous", synchronous=True)
  worker.tell("start", prefix="synchronous", synchronous=True, delay=2.0)
  (_, began), (entered, _) = chief.answer(), worker.answer()
  assert began > entered
  # Who starts again finds the other started.
  chief.ask("start", prefix="synchronous", synchronous=True)


@pytest.mark.by_day(0)
def test_adam(cluster):
  """A session that is not the chief's waits for none of its slots."""
  tasks = start_both(cluster, prefix="adam", inner="Adam")
  # The first steps of Adam are by its learning rate, whatever the gradient.
  for task, expected in zip(tasks, ([0.5, 9.5], [0.75, 9.25])):
    got = task.ask("train", prefix="adam", steps=2)
    assert got["centers"] == pytest.approx(expected, abs=1e-5)
    assert got["variables"] == got["centers"]


# The last ones: they cost the worker its session.
@pytest.mark.by_day(0)
def test_restart_of_the_chief(cluster, tmp_path):
  """It goes on from the centers of its checkpoint, and so does the other."""
  arguments = {"prefix": "restart", "checkpoint_dir": str(tmp_path)}
  chief, worker = start_both(cluster, **arguments)
  chief.ask("train", prefix="restart", steps=2)
  worker.ask("train", prefix="restart", steps=2)
  # The chief saves after its own exchanges.
  saved = chief.ask("train", prefix="restart", steps=2)
  worker.ask("train", prefix="restart", steps=2)
  chief = cluster.restart("worker", CHIEF)
  chief.ask("start", **arguments)
  for task in chief, worker:
    got = task.ask("values", prefix="restart")
    assert got["step"] == saved["step"]
    assert got["centers"] == saved["centers"]
    if task is chief:
      assert got["variables"] == got["seen"] == got["centers"]
  # The worker takes two steps of 2 from its place, or from the center where
  # it has lost its session with the chief; then both meet half way.
  before = worker.ask("values", prefix="restart")
  after = worker.ask("train", prefix="restart", steps=2)
  assert after["step"] == saved["step"] + 1
  assert after["seen"] == saved["centers"]
  middle = (before["variables"][0] + 4 + saved["centers"][0]) / 2
  assert after["variables"] == after["centers"] == [middle, 10 - middle]


def test_restart_of_a_parameter_server(cluster, tmp_path):
  """Both start anew from the centers of the chief's checkpoint."""
  arguments = {"prefix": "server", "checkpoint_dir": str(tmp_path)}
  chief, worker = start_both(cluster, **arguments)
  for task in chief, worker, chief:
    saved = task.ask("train", prefix="server", steps=2)
  lost = worker.ask("train", prefix="server", steps=2)
  assert lost["step"] > saved["step"] and lost["centers"] != saved["centers"]
  cluster.restart("ps", 0)
  for task in chief, worker:
    got = task.ask("values", prefix="server")
    assert got["step"] == saved["step"]
    assert got["variables"] == got["seen"] == got["centers"] == saved["centers"]
  after = worker.ask("train", prefix="server", steps=2)
  assert after["step"] == saved["step"] + 1
  # Two steps of 2, and half of the way back; the center comes to meet it.
  assert after["variables"] == after["centers"] == [
      saved["centers"][0] + 2, saved["centers"][1] - 2]
