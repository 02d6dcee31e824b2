"""The gate in a real cluster: races, transferred bytes, a killed worker."""

import re

import pytest
import tensorflow as tf

import cluster_task
from processes import wait_until
import race
from wrapopt import ops
from wrapopt.examples import _cluster

tf1 = tf.compat.v1
WORKERS = 3
UPDATES = 400


@pytest.fixture(scope="module")
def cluster():
  with _cluster.Cluster(cluster_task.FUNCTIONS, preload=["cluster_task"],
                        ps=1, worker=WORKERS) as c:
    yield c


def workers(cluster):
  return [cluster.tasks["worker", i] for i in range(WORKERS)]


def all_do(cluster, name, **arguments):
  for worker in workers(cluster):
    worker.tell(name, **arguments)
  return [worker.answer() for worker in workers(cluster)]


def test_lacking():
  # One after the other: each reads what the last one changed.
  assert race.lacking([(10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3)
                       for i in range(3)]).tolist() == [0, 0, 0]
  # All read at 0, and are admitted one after the other.
  assert race.lacking([(0, 2 * i, 2 * i + 1, 90) for i in range(3)]
                     ).tolist() == [0, 1, 2]
  assert race.lacking([]).size == 0


@pytest.mark.by_day(0)
def test_the_bound_holds_between_processes(cluster):
  answers = all_do(cluster, "update_log", updates=UPDATES, native=True)
  log = [entry for answer in answers for entry in answer["log"]]
  assert race.lacking(log).max() <= cluster_task.LIMIT
  # The last one to end saw all.
  last = max(answers, key=lambda a: (sum(map(sum, a["histogram"])), a["step"]))
  assert last["step"] == len(log) == sum(last["histogram"][0])
  assert last["dropped"] == WORKERS * UPDATES - len(log)
  assert sum(last["histogram"][1]) == last["dropped"]


def test_the_judge_sees_what_check_then_apply_lets_through(cluster):
  answers = all_do(cluster, "update_log", updates=UPDATES, native=False)
  lacking = race.lacking([e for answer in answers for e in answer["log"]])
  assert lacking.max() > cluster_task.LIMIT


def received(steps):
  """Bytes that the parameter server received in a step."""
  units = {"B": 1, "KB": 2**10, "MB": 2**20}
  sizes = [re.match(r"\[([\d.]+)(B|KB|MB)\]", label)
           for label in steps["received"]]
  assert sizes and all(sizes), steps["received"]
  return sum(float(size[1]) * units[size[2]] for size in sizes)


def test_of_an_embedding_only_touched_rows_cross_the_network(cluster):
  worker = workers(cluster)[0]
  for rows in (100, 100000):
    answer = worker.ask("embedding", prefix=f"rows_{rows}", rows=rows)
    # Three rows of 16 numbers, their indices, and what a step takes besides.
    assert 3 * 16 * 4 <= received(answer["step"]) < 3 * 16 * 4 + 200
    # Rows of no gradient, of two and of one.
    average = [1.0, 1.0, 1.0]
    value = [1.0, 1.0, 1.0]
    for _ in range(4):
      value = [v - g for v, g in zip(value, (0, 2, 1))]
      average = [a + 0.5 * (v - a) for a, v in zip(average, value)]
    assert answer["average"] == average


def ran(steps, op):
  return sum(f" = {op}(" in label for label in steps["ran"])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("v2", [True, False])
def test_dropped_gradients_are_not_sent(cluster, fused, v2):
  """Read from the step stats of the parameter server."""
  answer = workers(cluster)[0].ask("traffic", prefix=f"t_{fused}_{v2}",
                                   fused=fused, v2=v2)
  # The same transfers, of other sizes: nothing was left out of the notes.
  edges = [sorted(re.search(r"(edge_\d+)_", label)[1]
                  for label in steps["received"]) for steps in answer.values()]
  assert edges[0] == edges[1]
  assert received(answer["admitted"]) >= 2**22  # The gradient.
  assert received(answer["dropped"]) < 1000
  for steps in answer.values():
    assert ran(steps, "Wrapopt>StalenessGate") == 1
    assert ran(steps, "Wrapopt>StalenessComplete") == 1
  op = "ResourceApplyMomentum" if fused is False else "Wrapopt>Apply"
  assert ran(answer["admitted"], op) == 1
  if fused is False:
    assert ran(answer["dropped"], op) == 0


# The last one: it costs a worker.
@pytest.mark.by_day(0)
def test_a_worker_that_is_killed_in_the_middle_of_an_update(cluster, tmp_path):
  *others, victim = workers(cluster)
  stop, hangs = tmp_path / "stop", tmp_path / "hangs"
  # No update of two others and one in flight is as stale as that.
  for worker in others:
    worker.tell("train", prefix="killed", limit=9, until=str(stop))
  victim.tell("hang", prefix="killed", limit=9, path=str(hangs))
  with tf.Graph().as_default() as graph, tf.device("/job:ps/task:0"):
    with tf1.variable_scope("killed", use_resource=True):
      step, counter, histogram = [
          tf1.get_variable(name, shape, dtype, trainable=False)
          for name, shape, dtype in (("global_step", [], tf.int64),
                                     ("stale_counter", [], tf.float32),
                                     ("staleness_histogram", [2, 64],
                                      tf.int64))]
    record = ops.staleness_record(step)
    recorded = tf1.placeholder(tf.int64, [])
    verdict = ops.staleness_gate(step, counter, histogram, recorded, 0)
    with tf.control_dependencies(
        [ops.staleness_complete(verdict.ticket, step)]):
      admitted = tf.identity(verdict.accept)
  target = f"grpc://{cluster.spec['ps'][0]}"
  # The server must not wait for workers that are gone.
  with tf1.Session(target, graph=graph, config=tf1.ConfigProto(
      device_filters=["/job:ps"])) as session:
    wait_until(hangs.exists, "no admitted update")
    assert session.run(record)[1] >= 1
    step_then = session.run(step)
    wait_until(lambda: session.run(step) > step_then + 5, "no steps beside it")
    victim.kill()
    step_then = session.run(step)
    wait_until(lambda: session.run(step) > step_then + 5, "no steps after it")
    stop.touch()
    answers = [worker.answer() for worker in others]
    assert [a["dropped"] for a in answers] == [0, 0]
    wait_until(lambda: session.run(record)[1] == 0, "no end of the dead update")

    # It never got to increment the step, and counts as one that was made.
    now, _ = session.run(record)
    assert session.run(step) == sum(a["made"] for a in answers) == now - 1
    # The limit is what it was: 0, exactly.
    assert not session.run(admitted, {recorded: now - 1})
    assert session.run(admitted, {recorded: now})
    assert not session.run(admitted, {recorded: now})
    assert session.run(admitted, {recorded: now + 1})
