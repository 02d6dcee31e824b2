"""Steps of workers that a ClusterCoordinator schedules."""

import functools
import itertools
import json
import pathlib
import re
import tempfile

from google.protobuf import text_format
import numpy as np
import pytest
import tensorflow as tf

from coordinator_program import GRADIENTS, STEPS
import lost_server_task
from processes import run_python, wait_until
from wrapopt.examples import _cluster


def run_program(*names):
  """Runs parts of it; returns {part: {case: what it found}}."""
  parts = {"graphs": {}}
  with tempfile.TemporaryDirectory() as folder:
    done = run_python(
        "-m", "coordinator_program", *names,
        CUDA_VISIBLE_DEVICES="-1", no_grpc_proxy="localhost",
        TF_DUMP_GRAPH_PREFIX=folder, TF_DUMP_GRAPH_GROUPS="main",
        TF_DUMP_GRAPH_NAME_FILTER="locked_step")
    # The graphs of functions, just before TensorFlow cuts them into parts for
    # the servers.
    for path in pathlib.Path(folder).glob("*.main.before_partition.pbtxt"):
      parts["graphs"][path.name.partition(".")[0]] = text_format.Parse(
          path.read_text(), tf.compat.v1.GraphDef())
  assert done.returncode == 0, done.stderr
  for line in done.stdout.splitlines():
    part, case, got = json.loads(line)
    parts.setdefault(part, {})[case] = got
  return parts


@pytest.fixture(scope="module", name="found")
def _found():
  return run_program("races", "locked", "on_a_worker", "traffic",
                     "second_tries", "refused", "embeddings", "averages")


def test_each_step_is_counted_and_has_a_number_of_its_own():
  cases = run_program("counts")["counts"]
  assert len(cases) == 14
  for name, got in cases.items():
    if name.startswith("Keras"):
      continue  # How many it loses depends on time.
    assert got["servers"] == 2, name
    assert got["iterations"] == STEPS, name
    if "Adafactor" in name and "DropStale" not in name:
      # Steps of several ops have their numbers in the order in which they are
      # taken: constant gradients have the same numbers in any order.
      assert (got["w"], got["other"]) == (-0.001000000047497451, pytest.approx(
          -0.002384231142276269, rel=1e-12)), name
    if "SGD" in name:
      # The sum of 2^-number over the steps: with 53 bits it is 2 - 2^-59 for
      # the numbers 0 to 59 alone.
      assert got["w"] == pytest.approx(4 - 2, abs=1e-12), name
      assert got["other"] == pytest.approx(-2, abs=1e-12), name


class Adam:
  """Adam of one weight and its average, for many orders at once."""

  def __init__(self, start):
    self.w = self.average = start
    self.m = self.v = 0.0

  def step(self, g, number):
    t = number + 1
    self.m = self.m + (g - self.m) * (1 - 0.5)
    self.v = self.v + (g * g - self.v) * (1 - 0.75)
    rate = 0.25 * np.sqrt(1 - 0.75**t) / (1 - 0.5**t)
    self.w = self.w - rate * self.m / (np.sqrt(self.v) + 1e-7)
    self.average = self.average + (self.w - self.average) * 0.5


@pytest.mark.parametrize("case", ["Adam", "LazyAdam", "gated"])
def test_racing_steps_have_an_order_on_each_server(case, found):
  """Any order, and any numbers: 24 * 24 ways."""
  n = len(GRADIENTS)
  orders = np.array(list(itertools.permutations(range(n))))
  numbers = np.tile(orders, (len(orders), 1)).T
  orders = np.repeat(orders, len(orders), axis=0).T
  for attempt in range(2):
    got = found["races"][f"{case} {attempt}"]
    assert got["iterations"] == n
    # The weights are on two servers.
    for i, (start, scale) in enumerate(((0.0, 1.0), (1.0, 2.0))):
      want = Adam(np.full(orders.shape[1], start))
      for order, number in zip(orders, numbers):
        want.step(scale * GRADIENTS[order], number)
      same = np.isclose(want.w, got["values"][i], rtol=1e-9, atol=0)
      if got["averages"] is not None:
        same &= np.isclose(want.average, got["averages"][i], rtol=1e-9, atol=0)
      assert same.any()
      assert same.mean() < 0.1


@pytest.mark.by_day(0)
def test_functions_of_several_steps_do_not_wait_for_themselves():
  several = run_program("several")["several"]
  assert several.pop("MovingAverage") == several.pop("DropStaleGradient") == [
      24, 8]
  assert len(several) == 4
  for name, counts in several.items():
    assert counts == [14], name


def test_what_a_step_sends(found):
  traffic = found["traffic"]
  applied = {f"Wrapopt>ApplyAdam on ps:{i}": 1 for i in range(2)}
  for n in 2, 20, 3:
    keras, average, gate = [
        traffic[f"{name} {n}"]
        for name in ("Keras", "MovingAverage", "DropStaleGradient")]
    for ours in average, gate:
      assert {name: k for name, k in ours["updates"].items()
              if "Apply" in name} == applied
      # No server begins before the gradients are on all. No step locks others.
      assert ours["arrived"] == {"Wrapopt>LockSteps": [],
                                 "Wrapopt>Apply": ["ps:0 and ps:1"]}
      # TensorFlow may wait for ever for one that it was sending to a worker
      # which has died.
      assert not ours["arguments"]
    # Each weight and gradient, the learning rate, and all scalars of the step.
    assert average["tensors"] == 2 * n + 2
    sent = average["tensors"] + average["controls"]
    assert sent <= keras["tensors"] + keras["controls"]
    if n == 20:
      assert sent <= 2 * n + 6 < keras["tensors"] + keras["controls"] - n / 2
    if n == 3:
      # Outside of the branch that takes the step, the weights, but no
      # gradient.
      assert gate["tensors"] <= n + 2
    else:
      # Small gradients do not wait for an answer. The record of the step is
      # waited for by the worker and by the other server.
      assert gate["tensors"] == average["tensors"]
      assert gate["controls"] <= average["controls"] + 2


def held(graph):
  """Where the ops that wait for a lock run, and what they need of a worker.

  Args:
    graph: A GraphDef of which TensorFlow has placed and optimized the nodes.

  Returns:
    The tasks of these ops, and the ops on workers that they need: those whose
    tensors they take, and those whose end they wait for, unless the lock has
    waited for it.
  """
  nodes = {node.name: node for node in graph.node}
  task = {name: re.search("job:(.*?)/replica:0/task:(.)", node.device).groups()
          for name, node in nodes.items()}
  tensors = {name: {x.split(":")[0] for x in node.input if x[0] != "^"}
             for name, node in nodes.items()}
  needs = {name: tensors[name] | {x[1:] for x in node.input if x[0] == "^"}
           for name, node in nodes.items()}

  @functools.cache
  def ancestors(name):
    seen, pending = {name}, [name]
    while pending:
      new = needs[pending.pop()] - seen
      seen |= new
      pending += new
    return seen

  [lock] = [name for name in nodes if nodes[name].op == "Wrapopt>LockSteps"]
  [release] = [name for name in nodes
               if nodes[name].op == "Wrapopt>UnlockSteps"]
  came = {(x, task[name]) for name in ancestors(lock) for x in needs[name]}
  after = [name for name in nodes if lock in ancestors(name) and
           release not in ancestors(name) - {name}]
  return {task[name] for name in after}, [
      f"{x} for {name}"
      for name in set().union(*map(ancestors, after)) - ancestors(lock)
      for x in needs[name] if task[x][0] == "worker" and (
          x in tensors[name] or (x, task[name]) not in came)]


def test_an_op_of_a_locked_step_on_a_worker(found):
  assert re.search("All ops of a step that several workers share must be on "
                   "servers, .*, got 'cond/.*' of type Identity on "
                   "'/job:worker", found["on_a_worker"]["error"])


def test_a_step_with_a_lock_needs_no_worker(found):
  """Once it has the lock, and whatever the worker does."""
  assert len(found["locked"]) == 13
  for name, function in found["locked"].items():
    assert held(found["graphs"][function]) == (
        {("ps", "0"), ("ps", "1")}, []), name


def test_a_second_try_changes_nothing(found):
  for states in found["second_tries"].values():
    assert states[::2] == states[1::2]
  # gamma and beta, and the averages, which move in steps 2 and 4. The moving
  # statistics count the tries before.
  assert [x[0] for x in states[-1][:6]] == [-3, -4, -1.5, -2.5, 3.5, 4.5]


def test_a_step_that_is_refused_changes_nothing(found):
  cases = found["refused"]
  assert len(cases) == 3
  for name, got in cases.items():
    assert got == {"same": True, "dropped": 5, "admitted": 0,
                   "branches": name == "GapAware"}, name


@pytest.mark.by_day(0)
def test_gradients_of_old_weights_are_compensated():
  cases = run_program("compensation")["compensation"]
  for name, got in cases.items():
    assert (got["iterations"], got["servers"]) == (6, 2), name
    for here, there in zip(got["here"], got["there"]):
      np.testing.assert_allclose(there, here, rtol=1e-14, err_msg=name)
  assert len({str(got["here"]) for got in cases.values()}) == 3


@pytest.mark.parametrize("kind", ["SGD", "LazyAdam"])
def test_a_table_on_two_servers(kind, found):
  got = found["embeddings"][kind]
  lazy, dense = got["None"], got["False"]
  assert lazy["is lazy"] and not dense["is lazy"]
  for both in got.values():
    assert both["iterations"] == 6
    assert both["in place"] == both["averages"] != both["values"]
    assert both["back"] == both["values"]
  np.testing.assert_array_equal(lazy["values"], dense["values"])
  np.testing.assert_allclose(lazy["averages"], dense["averages"], rtol=1e-12)
  # Only rows travel.
  assert lazy["reads"] == 2 and lazy["whole"] == 0
  assert all(name.startswith("Wrapopt>SparseApply") or "Assign" in name
             for name in lazy["updates"])


def test_a_table_and_an_optimizer_of_version_1(found):
  got = found["embeddings"]["v1"]
  assert got["there"]["is lazy"] == [True, True]
  assert got["there"] == got["here"]


@pytest.mark.parametrize("name, w, average", [
    # From 16, in steps of -1.5.
    ("Keras", 11.5, None), ("MovingAverage", 11.5, 12.8125),
    ("SWA", 11.5, (14.5 + 11.5) / 2), ("Lookahead", 13, 14.5)])
def test_averages_on_servers(name, w, average, found):
  got = found["averages"][name]
  rows = lambda x: [] if x is None else [[x], [16, x, 16]]
  first, *back, last = got["states"]
  assert first == rows(w) + rows(average)
  if back:
    assert back == [first] and got["in place"] == rows(average)
  ours, kept = got["devices"]
  assert len(set(ours)) == 2 and kept in ([], ours)
  if average:  # After the steps at once, it lies behind the weight.
    assert last[0] <= last[2] <= first[2]


def test_steps_of_optimizers_of_version_1():
  cases = run_program("v1")["v1"]
  assert len(cases) == 15
  for name, got in cases.items():
    assert got["count"] == STEPS, name
    assert got["servers"] == 2, name
    if "GradientDescent" in name:
      assert (got["w"], got["other"]) == (4 - STEPS / 8, -STEPS / 4), name
    if got["state"]:  # Adam's powers have lost no step either.
      assert got["state"] == pytest.approx(
          [0.9**(STEPS + 1), 0.999**(STEPS + 1)], rel=1e-5), name
    # A step and its average are one: whoever takes them, in whatever order,
    # the numbers of constant gradients are the same.
    twin = cases[name.replace("False", "True")]
    for key in {"w", "other", "average"} & {k for k in got if got[k]}:
      assert got[key] == pytest.approx(twin[key], rel=1e-12), name
  # As in one process.
  assert cases["MovingAverage(Ftrl), replicas=True"]["average"] == (
      pytest.approx(2.4293482825538857, rel=1e-12))


def test_workers_that_are_killed():
  for name, got in run_program("faults")["faults"].items():
    n, steps = got["scheduled"], got["iterations"]
    assert got["in flight"] == 0, name
    # No step is lost, none is taken twice, and none is half.
    assert got["w"] == [[-steps] * 3, [-steps] * 2], name
    if name != "gated":
      assert steps == n
    else:
      assert sum(got["admitted"]) == steps
      assert steps + got["dropped"] == n
      assert not any(got["admitted"][3:])  # The limit is 2.


def test_workers_that_are_stopped():
  """The others take 30 steps in each of the 20 stops."""
  for name, got in run_program("stops")["stops"].items():
    assert got["late"] == 0, name
    n = got["scheduled"]
    assert n >= 600 and got["iterations"] == n
    if name in ("MovingAverage", "PowerDecay", "DropStaleGradient", "Lookahead",
                "SWA", "constraint", "of version 1"):
      assert got["w"] == [[-n] * 3, [-n] * 2], name


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("name", lost_server_task.OPTIMIZERS)
def test_a_server_that_is_lost_in_a_step(name, server, tmp_path):
  """The steps end with an error, as Keras's, and a checkpoint is restored."""
  arguments = {"kind": name, "server": server, "path": str(tmp_path / "c")}
  with _cluster.Cluster(
      lost_server_task.FUNCTIONS, ["lost_server_task"], coordinator=True, ps=2,
      worker=2) as cluster:
    chief = cluster.tasks["coordinator", 0]
    chief.tell("lose", **arguments)
    saved, ends = chief.answer(lambda _: cluster.restart("ps", server))
    # Aborted, if a worker has reached the new server, which does not know it.
    assert {*ends} <= {"UnavailableError", "AbortedError"}
    states = []

    def has_resumed():
      chief = cluster.restart("coordinator", 0)
      try:
        states.extend(chief.ask("resume", **arguments))
        return True
      except RuntimeError as e:
        # The workers reach the new server after a while.
        assert "UnavailableError" in str(e)
        return False

    wait_until(has_resumed, "the new server is not found")
  (count, restored), (later, _) = states
  if name == "Keras":
    return  # How many steps it loses depends on time.
  assert (saved[0], count, later) == (4, 4, 8)
  # An optimizer of version 1 makes its slots in its first step, and restores
  # them there: before that step, only the weights are compared.
  assert restored and restored == saved[1][:len(restored)]
