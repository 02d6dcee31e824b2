"""LocalSGD and DiLoCo: numbers, workers that stop, servers that are lost."""

import collections
from concurrent import futures
import http.server
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_same
from local_parts import Oracle, run_all, Servers, steps_of, wait_alone
from processes import wait_until
import wrapopt
from wrapopt import server as server_module
from wrapopt._local import _checkpoints
from wrapopt._local import _exchanges
from wrapopt._local import _interrupts
from wrapopt._local import _job_number
from wrapopt._local import _layout
from wrapopt._local import _member
from wrapopt._local import _server


X = tf.Variable([0.0], name="x")


@pytest.fixture
def server():
  return server_module.start()


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}_servers")
def servers(request):
  """Targets of new servers in this process."""
  made = [server_module.start() for _ in range(request.param)]
  yield [s.target for s in made]


def make(cls, variables, servers, worker, num_workers, **kwargs):
  kwargs = {"round_timeout_secs": 20, "sync_every": 2, **kwargs}
  return cls(variables, servers, worker, num_workers, **kwargs)


def member(local):
  return local._exchanges.fragments[0].member


def grad(worker, round_, shape):
  return np.float32(np.random.default_rng([worker, round_]).normal(size=shape))


def test_first_outer_step_goes_1_33_of_the_way_to_the_mean(
    server, monkeypatch):
  # Center 1, mean 0: D = 1, b = 1, center = 1 - 0.7 (1 + 0.9) = -0.33. Then
  # the mean is 1 below: D = 1, b = 1.9, center = -0.33 - 0.7 (1 + 1.71).
  w = tf.Variable(1.0)
  local = make(wrapopt.DiLoCo, [w], [server.target], "a", 1, sync_every=1)
  with pytest.raises(ValueError, match="`steps` must be at least 1, got 0"):
    local.step(steps=0)
  with monkeypatch.context() as patch:  # Memory as it may come.
    patch.setattr(_layout.Layout, "empty", lambda self: [np.ones(1, "f")])
    assert member(local).read("velocities")[1] == [np.zeros(1)]
  w.assign_sub(1.0)
  local.step()
  assert w.numpy() == pytest.approx(-0.33, abs=1e-6)
  w.assign_sub(1.0)
  local.step()
  assert w.numpy() == pytest.approx(-0.33 - 0.7 * 2.71, abs=1e-6)


def test_calls_of_a_round(servers, monkeypatch):
  options, enter = _server.tf1.RunOptions, _server.Server.enter
  waits, turns = [], []
  monkeypatch.setattr(
      _server.tf1, "RunOptions", lambda timeout_in_ms: waits.append(
          timeout_in_ms) or options(timeout_in_ms=timeout_in_ms))
  monkeypatch.setattr(_server.Server, "enter", lambda self, *args: (
      turns.append(args[-1]) or enter(self, *args)))
  w = tf.Variable(tf.zeros([9]))
  local = make(wrapopt.LocalSGD, [w], servers, "w0", 1, sync_every=1)
  for name in "stage", "_read":  # At once, of all servers.

    def call(*args, of=getattr(_server.Server, name),
             all_here=threading.Barrier(len(servers))):
      all_here.wait(30)
      return of(*args)

    monkeypatch.setattr(_server.Server, name, call)
  monkeypatch.setattr(_member, "_POLL_SECS", None)  # It looks for nothing.
  waits.clear()
  w.assign_add(tf.ones([9]))
  local.step()
  assert local.report.counted
  np.testing.assert_array_equal(w, np.ones(9))
  assert len(waits) == 8 * len(servers) + (len(servers) > 1)
  # A call that waits for others has 5 seconds more, to answer.
  assert min(waits) == 5000 and max(waits) <= 25_000
  restores, sends = turns  # A quarter of a deadline, and the rest of it.
  assert restores == 5.0 <= sends <= 20.0


def test_a_worker_waits_for_another_one_that_has_a_later_center():
  with Servers() as servers:
    local, late = (make(
        wrapopt.LocalSGD, [tf.Variable([1.0, 2.0])], servers.addresses, name, 2,
        sync_every=1, min_workers=1, grace_secs=0) for name in "ab")
    local.step()
    local.step()
    servers.restart(1)
    with futures.ThreadPoolExecutor(1) as pool:
      waits = pool.submit(late.step)
      time.sleep(1)
      local.step()
      waits.result()
    assert local.round == 3 and local.report.counted
    assert late.round > 1 and not late.report.counted
    run_all(local.close, late.close)  # Else they wait for lost servers.


def test_a_first_center_that_the_lead_did_not_get(monkeypatch):
  servers = [server_module.start().target for _ in range(2)]
  new = lambda: make(wrapopt.LocalSGD, [tf.Variable([1.0, 2.0])], servers, "a",
                     1, round_timeout_secs=5)
  restore = _server.Server.restore
  with monkeypatch.context() as patch:
    patch.setattr(_server.Server, "restore", lambda self, *args: (
        fails() if self._leads else restore(self, *args)))
    with pytest.raises(OSError, match="no one reads"):
      new()
  with pytest.raises(tf.errors.DeadlineExceededError,
                     match="round -1; .* of round 0$"):
    wrapopt.read_center(servers, "local_sgd", timeout_secs=0.1)
  assert new().round == 0


def test_a_round_that_begins_again_while_a_worker_waits(monkeypatch, server):
  wait, times = _server.Server.wait_for_close, []
  read, reads = _server.Server.read, []

  def begin_again(self, place, *args):
    times.append(place)
    if len(times) == 1:
      assert self.restore(place[1], (place[0], place[1] + 1))
    return wait(self, place, *args)

  monkeypatch.setattr(_server.Server, "wait_for_close", begin_again)
  w = tf.Variable([1.0])
  local = make(wrapopt.LocalSGD, [w], [server.target], "a", 1, sync_every=1)
  monkeypatch.setattr(  # At first, the center is another one meanwhile.
      _server.Server, "read", lambda *args: reads.append(args) or (
          len(reads) > 1 and read(*args)))
  w.assign([3.0])
  local.step()
  assert (w.numpy(), local.round, local.report.counted) == (3, 1, True)


@pytest.mark.parametrize("call", ["follow", "stage"])
def test_a_server_that_refuses_values_is_asked_again(call, monkeypatch):
  servers = [server_module.start().target for _ in range(2)]
  w = tf.Variable([1.0, 2.0])
  local = make(wrapopt.LocalSGD, [w], servers, "a", 1, sync_every=1,
               round_timeout_secs=5)
  of, asked = getattr(_server.Server, call), []
  monkeypatch.setattr(_server.Server, call, lambda *args: (
      asked.append(args) or len(asked) > 1 and of(*args)))
  wait, waits = _server.Server.wait_for_close, []
  monkeypatch.setattr(_server.Server, "wait_for_close", lambda *args: (
      waits.append(args) or wait(*args)))
  w.assign([3.0, 4.0])
  local.step()
  assert local.round == 1 and local.report.counted
  assert len(asked) > 1 and len(waits) == 1  # For no round without values.
  np.testing.assert_array_equal(w, [3.0, 4.0])


def test_states_of_servers_are_those_of_one_time(monkeypatch):
  servers = [server_module.start().target for _ in range(2)]
  local, other = (make(
      wrapopt.LocalSGD, [tf.Variable([1.0, 2.0])], servers, name, 2,
      sync_every=1, min_workers=1, grace_secs=0) for name in "ab")
  state, seen = _server.Server.state, []

  def look(*args):
    seen.append(args)
    if len(seen) == 2:  # Between the lead and the other server.
      other.step()
    return state(*args)

  monkeypatch.setattr(_server.Server, "state", look)
  assert [s.place[0] for s in member(local)._states()[0]] == [1, 1]


def test_a_step_copies_the_values_once(monkeypatch):
  """From the variable's buffer; what is sent are parts of the copy."""
  flatten, stage = _layout.Layout.flatten, _server.Server.stage
  seen = {}

  def note_flatten(self, values, dtypes):
    seen["values"], seen["copy"] = values, flatten(self, values, dtypes)
    return seen["copy"]

  def note_stage(self, known, weight, arrays):
    seen["sent"] = arrays
    return stage(self, known, weight, arrays)

  w = tf.Variable(tf.zeros([1000]))
  local = make(wrapopt.LocalSGD, [w], [server_module.start().target], "a", 1,
               sync_every=1)
  monkeypatch.setattr(_layout.Layout, "flatten", note_flatten)
  monkeypatch.setattr(_server.Server, "stage", note_stage)
  w.assign_add(tf.ones([1000]))
  buffer = np.asarray(w.read_value())
  local.step()
  [values], [copy] = seen["values"], seen["copy"]
  assert np.shares_memory(values, buffer)
  assert not np.shares_memory(copy, buffer)
  assert all(np.shares_memory(part, copy) for part in seen["sent"])
  assert sum(part.size for part in seen["sent"]) == 1000


def test_steps_of_functions_and_of_python_are_counted_together():
  """Before a function is traced, between its calls, and after them."""
  local = make(wrapopt.LocalSGD, [tf.Variable([1.0])],
               [server_module.start().target], "a", 1, sync_every=7,
               weight="examples")
  function = tf.function(lambda: local.step(examples=3))
  weights, sync = [], member(local).sync
  member(local).sync = lambda vectors, weight: (
      weights.append(weight), sync(vectors, weight))[1]
  with tf.GradientTape() as tape:
    for round_ in 1, 2:
      for step in (*[lambda: local.step(tf.constant(2))] * 2, function,
                   lambda: local.step(5), function, function):
        assert local.round == round_ - 1
        step()
      (function if round_ == 1 else lambda: local.step(3))()
      assert local.round == round_ and steps_of(local) == 0
  assert weights == [2 * 2 + 4 * 3 + 5] * 2
  assert {v.name for v in tape.watched_variables()} <= {"Variable:0"}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("traced", [False, True])
def test_steps_of_threads_are_all_counted(traced):
  local = make(wrapopt.LocalSGD, [tf.Variable([1.0])],
               [server_module.start().target], "a", 1, sync_every=10**6)
  some = tf.function(local.step) if traced else local.step
  run_all(*[lambda step=step: [step() for _ in range(1000)]
            for step in (some, local.step) * 2])
  assert steps_of(local) == 4000


@pytest.mark.parametrize("restores", [False, True])
def test_steps_before_a_center_was_taken_are_forgotten(restores, tmp_path):
  w = tf.Variable([1.0])
  local = make(wrapopt.LocalSGD, [w], [server_module.start().target], "a", 1,
               sync_every=3)
  checkpoint = tf.train.Checkpoint(local=local)
  local.step(steps=3)
  path = checkpoint.save(str(tmp_path / "c"))
  w.assign_add([1.0])
  local.step()
  if restores:
    checkpoint.restore(path)
    local.step()  # Takes the center.
  else:
    local.take_center()
  assert w.numpy() == [1.0] and steps_of(local) == 0
  for round_ in 1, 1, 2:
    local.step()
    assert local.round == round_


def test_a_checkpoint_that_is_not_of_the_job(tmp_path, server):
  def new(x, cls=wrapopt.LocalSGD, **kwargs):
    w = tf.Variable([x])
    return w, make(cls, [w], [server.target], "a", 1, sync_every=1, **kwargs)

  _, other = new(5.0, wrapopt.DiLoCo, name="other")
  other.step()
  path = tf.train.Checkpoint(local=other).save(str(tmp_path / "c"))
  w, local = new(1.0)
  with pytest.raises(tf.errors.InvalidArgumentError, match="another process"):
    new(7.0, checkpoint=path)
  # The refused worker has changed nothing on the server.
  assert wrapopt.read_center([server.target], "local_sgd").values == [1.0]
  local.step()
  tf.train.Checkpoint(local=local).restore(path)  # Of the same round.
  assert member(local).place[1] > 0  # That of the servers.
  local.step()
  assert w.numpy() == [5.0] and local.round == 1
  _, third = new(1.0, name="third", checkpoint=path)
  for x, velocities in (third, 0), (other, 1):
    assert member(x)._lead.state(True)[0].velocities == velocities


def test_an_older_center_keeps_the_number_of_its_job():
  job = _job_number.Job(True)
  for number in -5, 9:  # The job that this worker is in, and a newer one.
    job.look(True, True, 0, number, number > 0)
    if number < 0:
      job.take()
  assert job.number == 9  # It would join that.
  job.replace(True, False)
  assert job.number == -5


@pytest.mark.parametrize("values, is_finite", [
    (np.full(9, 6e4, np.float16), True), (np.full(9, 3e38, np.float32), True),
    (np.float32(), True), (np.zeros([0, 2]), True),
    (np.array([1, math.nan]), False),
    (np.array([math.inf, -math.inf], np.float32), False)])
def test_numbers_are_finite_whose_sum_is_not(values, is_finite):
  w = tf.Variable(0.0)
  assert (_exchanges.not_finite([w], [values]) is None) == is_finite


@pytest.mark.by_day(0)
def test_rounds_in_a_function(servers):
  v, w = tf.Variable([1.0, 2.0, 3.0]), tf.Variable(1.0)
  local = make(wrapopt.DiLoCo, [v, w], servers, "a", 1, sync_every=3)

  @tf.function
  def step(i):
    v.assign_add(i * tf.constant([1.0, -1.0, 2.0]))
    w.assign_sub(i)
    local.step()
    return v.read_value(), w.read_value()  # Of the center, after a round.

  oracle = Oracle([1.0, 2.0, 3.0, 1.0])
  for r in range(10):
    moved = oracle.center.copy()
    for i in range(3):
      got = np.append(*step(tf.constant(float(r + i))))
      moved += (r + i) * np.float64([1, -1, 2, -1])
      want = oracle.end_round([moved], [1]) if i == 2 else moved
      np.testing.assert_allclose(got, want, rtol=1e-5)
  assert local.round == 10 and step.experimental_get_tracing_count() == 1


def test_a_missing_worker_costs_one_deadline(servers):
  def worker(k):
    w = tf.Variable([0.0, 0.0, 0.0])
    local = make(wrapopt.LocalSGD, [w], servers, f"w{k}", 3, min_workers=2,
                 round_timeout_secs=2, sync_every=1)
    for _ in range(4):
      w.assign_add([1.0 + k] * 3)
      local.step()
    return w.numpy(), local.report

  for value, report in run_all(lambda: worker(0), lambda: worker(1)):
    np.testing.assert_array_equal(value, [6.0] * 3)
    # Only the first round waited.
    assert report.workers == ("w0", "w1") and report.secs < 2


def test_a_late_worker_takes_the_center_and_overwrites_nothing(servers):
  w = tf.Variable([1.0, 2.0, 3.0])
  local = make(wrapopt.LocalSGD, [w], servers, "a", 2, min_workers=1,
               grace_secs=0, sync_every=1)
  for _ in range(3):
    w.assign_add([1.0] * 3)
    local.step()
  fresh = tf.Variable([100.0] * 3)
  other = make(wrapopt.LocalSGD, [fresh], servers, "b", 2, min_workers=1,
               grace_secs=0, sync_every=1)
  np.testing.assert_array_equal(fresh.numpy(), [4.0, 5.0, 6.0])
  w.assign_add([1.0] * 3)
  local.step()
  # Round 3 is over, so values that started from its center do not count.
  fresh.assign_add([50.0] * 3)
  other.step()
  np.testing.assert_array_equal(fresh.numpy(), [5.0, 6.0, 7.0])
  assert not other.report.counted and other.round == 4


@pytest.mark.parametrize("how", ["leave", "with"])
def test_rounds_go_on_without_workers_that_have_left(servers, how):
  """All workers are needed, but for those."""
  rounds = {"a": [6], "b": [2, 2], "c": [1]}  # Of each worker's visits.
  back = threading.Event()

  def worker(name):
    w = tf.Variable([0.0, 0.0, 0.0])
    local = make(wrapopt.LocalSGD, [w], servers, name, 3, sync_every=1,
                 round_timeout_secs=60)
    seen = []
    for visit, n in enumerate(rounds[name]):
      if visit:
        back.wait(60)
        local.take_center()
      for _ in range(n):
        w.assign_add([1.0, 1.0, 1.0])
        local.step()
        seen.append((local.round, "".join(local.report.workers)))
        if (name, local.round) == ("a", 4):  # Alone.
          back.set()
          lead = member(local)._lead
          wait_until(lambda: lead.state(True)[0].left == ("c",),
                     "b is not back")
      if how == "leave":
        local.leave()
      else:
        with local:
          pass
    np.testing.assert_array_equal(w, [float(local.round)] * 3)
    return seen

  a, b, c = run_all(*[lambda name=name: worker(name) for name in rounds])
  assert a == [(1, "abc"), (2, "ab"), (3, "a"), (4, "a"), (5, "ab"), (6, "ab")]
  assert b == [a[0], a[1], a[4], a[5]] and c == a[:1]


def test_a_worker_that_fails_has_not_left(server):
  new = lambda name, **kwargs: make(
      wrapopt.LocalSGD, [tf.Variable([1.0])], [server.target], name, 2,
      sync_every=1, round_timeout_secs=1, **kwargs)
  local = new("a")
  with pytest.raises(ZeroDivisionError), new("b") as other:
    1 / 0  # pylint: disable=pointless-statement
  assert member(other)._lead._session is None
  with pytest.raises(tf.errors.DeadlineExceededError, match=", but needs 2"):
    local.step()
  other.leave()
  local.step()
  assert local.report.workers == ("a",)


@pytest.mark.parametrize("lost", [0, 1], ids=["the_lead", "another"])
def test_a_server_that_is_restarted_is_told_who_has_left(lost):
  with Servers() as servers:
    new = lambda name: make(
        wrapopt.LocalSGD, [tf.Variable([1.0, 2.0])], servers.addresses, name, 2,
        sync_every=1, round_timeout_secs=1e6)
    local, other = new("a"), new("b")
    other.leave()
    local.step()
    servers.restart(lost)
    local.step()
    assert local.round == 2 and local.report.workers == ("a",)
    local.close()  # It would wait for servers that are gone.
    assert member(local)._lead._session is None


@pytest.mark.by_day(1)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("cls", [wrapopt.LocalSGD, wrapopt.DiLoCo])
def test_values_that_are_not_finite_do_not_count(cls, bad, servers, caplog):
  """In round 1, those of worker 1. It steps eagerly, the others in functions.

  Nobody waits for it: with min_workers = 3, that would end in an error.
  """
  shape = [5]
  weight = "equal" if cls is wrapopt.LocalSGD else "steps"

  def worker(k):
    w = tf.Variable(tf.zeros(shape))
    local = make(cls, [w], servers, f"w{k}", 3, weight=weight, sync_every=1)
    step = local.step if k == 1 else tf.function(local.step)
    reports = []
    for r in range(3):
      w.assign_add(grad(k, r, shape))
      if (k, r) == (1, 1):
        w[3].assign(bad)
      step(steps=k + 1)
      assert type(local.round) is int  # For JSON.
      reports.append(local.report)
    return w.numpy(), reports

  got = run_all(*[lambda k=k: worker(k) for k in range(3)])
  oracle = (Oracle(np.zeros(shape)) if cls is wrapopt.DiLoCo else
            Oracle(np.zeros(shape), 1, 0))
  for r in range(3):
    of = [0, 2] if r == 1 else [0, 1, 2]
    oracle.end_round([oracle.center + grad(k, r, shape) for k in of],
                     [1 if weight == "equal" else k + 1 for k in of])
  for k, (w, reports) in enumerate(got):
    np.testing.assert_allclose(w, oracle.center, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(w, got[0][0])
    assert [r.counted for r in reports] == [True, k != 1, True]
    assert [r.workers for r in reports] == [
        ("w0", "w1", "w2"), ("w0", "w2"), ("w0", "w1", "w2")]
    assert [r.not_finite for r in reports] == [(), ("w1",), ()]
  [said] = [r.getMessage() for r in caplog.records
            if "not finite" in r.getMessage()]
  assert said.startswith("The values of worker 'w1' do not count in round 1")


def test_a_worker_without_values_does_not_begin_the_grace(server):
  v, w = tf.Variable([np.float16(1)]), tf.Variable([np.float16(1)])
  bad, good = [
      make(wrapopt.LocalSGD, [x], [server.target], name, 2, min_workers=1,
           grace_secs=0, sync_every=1) for x, name in ((v, "bad"), (w, "good"))]
  v.assign([np.float16(60000)])
  v.assign_add(v)  # Infinite in float16.
  thread = threading.Thread(target=bad.step)
  thread.start()
  [lead] = member(good)._servers
  while lead.state(True)[1].without_values != ("bad",):
    pass
  w.assign([np.float16(3)])
  good.step()
  thread.join()
  for local in bad, good:
    assert local.report.workers == ("good",)
    assert local.report.not_finite == ("bad",)
    assert local.scalars()["rounds/not_finite/bad"] == 1
  assert v.numpy() == w.numpy() == [3]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("traced", [False, True])
def test_a_round_without_finite_values_is_an_error(traced, servers):
  def worker(k):
    w = tf.Variable([1.0] * 3)
    local = make(wrapopt.DiLoCo, [w], servers, f"w{k}", 2, sync_every=1)
    step = tf.function(local.step) if traced else local.step
    w.assign_sub([1.0] * 3)
    step()
    before = w.numpy()
    w.assign([1.0, np.nan, 1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=(
        "No worker of round 1 has finite values, got .* of w0, w1")):
      step()
    step()  # Takes the center.
    np.testing.assert_array_equal(w.numpy(), before)
    assert local.round == 2
    w.assign_sub([1.0] * 3)
    step()
    return w.numpy(), local.report

  oracle = Oracle(np.ones(3))
  for _ in range(2):
    oracle.end_round([oracle.center - 1], [1])
  for w, report in run_all(*[lambda k=k: worker(k) for k in range(2)]):
    assert report.counted and report.not_finite == ()
    np.testing.assert_allclose(w, oracle.center, rtol=0, atol=1e-6)


def test_a_center_that_is_not_finite_is_an_error(tmp_path, server):
  with pytest.raises(ValueError, match="must be finite.* got 'v:0' with NaN"):
    make(wrapopt.LocalSGD, [tf.Variable(np.nan, name="v")], [server.target],
         "a", 1)
  # The outer step goes 2.1 times the way.
  w = tf.Variable(0.0, dtype=tf.float16, name="w")
  local = make(wrapopt.DiLoCo, [w], [server.target], "a", 1, sync_every=1,
               outer_learning_rate=1.1)
  w.assign(60000)
  with pytest.raises(tf.errors.InvalidArgumentError, match=(
      "center of round 1 must be finite in the .* dtypes, got .* 'w:0'")):
    local.step()
  # They count if the user wants it.
  w = tf.Variable(1.0)
  local = make(wrapopt.DiLoCo, [w], [server.target], "a", 1, sync_every=1,
               only_finite=False, name="any")
  w.assign(np.nan)
  local.step()
  assert local.report.counted and np.isnan(w.numpy())
  checkpoint = tf.train.Checkpoint(local=local)
  path = checkpoint.save(str(tmp_path / "x"))
  checkpoint.restore(path)  # The servers have the same.
  w.assign(1.0)
  local = make(wrapopt.DiLoCo, [w], [server.target], "a", 1, name="finite")
  with pytest.raises(ValueError, match="of a checkpoint must be finite"):
    tf.train.Checkpoint(local=local).restore(path)
  assert local.round == 0


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_ctrl_c_ends_a_wait_at_once(traced, stopped):
  """Also in a round of a server that has stopped, with a deadline of 600 s."""
  with Servers(1) as servers:
    worker, pipe = servers.start(wait_alone, traced, servers.addresses[0], 0)
    watcher = make(wrapopt.LocalSGD, [tf.Variable([1.0, 2.0])],
                   servers.addresses, "other", 2)
    [lead] = member(watcher)._servers
    while lead.state(True)[0].workers != ("alone",):
      pass
    if stopped:
      servers[0].stop()
    os.kill(worker.pid, signal.SIGINT)
    assert pipe.poll(60) and pipe.recv() == "KeyboardInterrupt"
    w, steps, round_ = pipe.recv()
    # A function goes on to its end, without rounds.
    taken = 3 if traced else 1
    assert (w, steps, round_) == ([1.0 + taken, 2.0 + taken], taken, 0)


def test_all_calls_at_once_end_with_ctrl_c(monkeypatch):
  monkeypatch.setattr(_interrupts, "_END_SECS", 60.0)
  monkeypatch.setattr(_interrupts.Call.stop, "__defaults__", (60.0,))
  ended, both_end = {"a": [], "b": []}, threading.Barrier(2)
  later = {"a": "call", "b": "cancel"}  # What ends last.

  def waits(name):
    event = threading.Event()
    note = lambda what: ended[name].append(
        (what, threading.current_thread().daemon))

    def end(what):
      if what == later[name]:
        time.sleep(0.05)
      note(what)

    def call():
      event.wait()
      end("call")

    def cancel():
      both_end.wait(30)
      event.set()
      end("cancel")

    try:
      _interrupts.run(call, cancel)
    finally:
      note("run")

  call = _interrupts.Call(lambda: _interrupts.at_once(
      [lambda: waits("a"), lambda: waits("b")]))
  call.stop()  # As Ctrl-C.
  with pytest.raises(KeyboardInterrupt):
    call.result()
  # No thread is one that the end of the program waits for.
  for *both, last in ended.values():
    assert sorted(both) == [("call", True), ("cancel", True)]
    assert last == ("run", True)


def test_ctrl_c_of_a_forked_child_is_not_one_of_the_parent():
  program = """if True:
      import os, signal, threading
      from wrapopt._local import _interrupts
      threading.excepthook = lambda *_: os._exit(2)
      thread = threading.Thread(target=_interrupts.watch)  # No effect there.
      thread.start()
      thread.join()
      _, end = os.pipe()
      os.set_blocking(end, False)
      signal.set_wakeup_fd(end)
      files = os.listdir("/proc/self/fd")
      _interrupts.watch()  # That of other code stays.
      print(_interrupts.count(), signal.set_wakeup_fd(-1) == end and
            os.listdir("/proc/self/fd") == files)
      _interrupts.watch()
      child = os.fork()
      if not child:
        try:
          os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
          os._exit(_interrupts.count())
        os._exit(1)
      _, status = os.waitpid(child, 0)
      before = _interrupts.count()
      try:
        os.kill(os.getpid(), signal.SIGINT)
      except KeyboardInterrupt:
        print(status, before, _interrupts.count())"""
  got = subprocess.run([sys.executable, "-c", program], check=True,
                       capture_output=True, text=True)
  assert got.stdout.split() == ["0", "True", "0", "0", "1"], got.stderr


@pytest.mark.parametrize("late", [False, True])
def test_what_a_server_lacks_is_told_rather_than_a_lost_one(
    late, monkeypatch, server):
  local = make(wrapopt.LocalSGD, [tf.Variable(1.0)], [server.target], "a", 1,
               round_timeout_secs=0.2)
  monkeypatch.setattr(_member, "_LAST_SECS", 0.0)
  lacks = tf.errors.DeadlineExceededError(None, None, "values of 'b'")
  errors = [tf.errors.UnavailableError(None, None, "lost")] * 100
  errors.insert(1 if late else 0, lacks)

  def attempt():
    raise errors.pop(0)

  with pytest.raises(tf.errors.DeadlineExceededError, match="values of 'b'"):
    member(local)._until_deadline(attempt)
  assert len(errors) < 99  # Another one came after it.


def test_a_last_attempt_begins_after_the_deadline(server):
  local = make(wrapopt.LocalSGD, [tf.Variable(1.0)], [server.target], "a", 1,
               round_timeout_secs=0.1)
  attempts = iter([lambda: time.sleep(0.2), lambda: "done"])
  assert member(local)._until_deadline(lambda: next(attempts)()) == "done"


def test_errors_in_a_function_are_those_of_the_docstring(monkeypatch, server):
  w = tf.Variable([1.0])
  local = make(wrapopt.DiLoCo, [w], [server.target], "a", 2, sync_every=1,
               round_timeout_secs=1)
  step = tf.function(local.step)
  with pytest.raises(tf.errors.DeadlineExceededError) as raised:
    step()
  text = str(raised.value)
  assert len(re.findall("got values of 1 workers .* needs 2 of 2", text)) == 1
  assert "Traceback" not in text and len(text.splitlines()) < 25
  for error, cls in ((RuntimeError, tf.errors.FailedPreconditionError),
                     (ValueError, tf.errors.InvalidArgumentError),
                     (TypeError, tf.errors.InvalidArgumentError)):
    monkeypatch.setattr(member(local), "sync", lambda *_, e=error: fails(e))
    with pytest.raises(cls, match="no one reads this") as raised:
      step()
    assert str(raised.value).count("no one reads this") == 1
  assert w.numpy() == [1.0] and steps_of(local) == 4


@pytest.mark.by_day(0)
def test_another_process_of_the_same_name_is_an_error(server):
  new = lambda name, **kwargs: make(
      wrapopt.LocalSGD, [tf.Variable([1.0])], [server.target], name, 2,
      sync_every=1, min_workers=1, grace_secs=0, **kwargs)
  first = new("a")
  with pytest.raises(tf.errors.InvalidArgumentError, match=(
      "worker 'a' of .* is another process already, and round 0 is open: a "
      "restarted worker passes resume=True")):
    new("a")
  first.step()  # The other one has changed nothing.
  second = new("a", resume=True)
  second.step()
  first.step()  # It takes the center.
  for call in first.step, first.take_center:
    with pytest.raises(tf.errors.InvalidArgumentError,
                       match="'a' .* is another process now"):
      call()
  second.step()
  new("b")
  for resume, rule in (False, "a restarted worker"), (True, "give each worker"):
    with pytest.raises(tf.errors.InvalidArgumentError, match=(
        f"have num_workers = 2, but 'c' came to round . after 'a', 'b': {rule}"
    )):
      new("c", resume=resume)


# What a second worker gives, which differs from the first one's, and the error.
OTHER_SETTINGS = {
    "servers in another order": (
        lambda a, b, v: ([b, a], v, {}),
        "have place in the list of servers = 1, got place in .* = 0"),
    "one server twice": (
        lambda a, b, v: ([a, a.replace("localhost", "127.0.0.1")], v, {}),
        "have place in the list of servers = 0, got place in .* = 1"),
    "a server less": (
        lambda a, b, v: ([a], v, {}),
        "have number of servers = 2, got number of servers = 1"),
    "variables in another order": (
        lambda a, b, v: ([a, b], [v[0], v[2], v[1]], {}),
        r"have variable 1 = float32 \[4, 3\], stepped \(\"v1:0\"\), got "
        r"variable 1 = float32 \[4\], stepped \(\"v2:0\"\)"),
    "a transposed variable": (
        lambda a, b, v: (
            [a, b], [v[0], tf.Variable(tf.zeros([3, 4]), name="t"), v[2]], {}),
        r"\[4, 3\], stepped \(\"v1:0\"\), got variable 1 = float32 \[3, 4\]"
        r", stepped \(\"t:0\"\)"),
    "other sizes of the same sum": (
        lambda a, b, v: ([a, b], [v[0], *(
            tf.Variable(tf.zeros([n])) for n in (13, 3))], {}),
        r"\[4, 3\], .* got variable 1 = float32 \[13\]"),
    "another dtype": (
        lambda a, b, v: (
            [a, b], [*v[:2], tf.Variable(tf.zeros([4], tf.bfloat16))], {}),
        "have variable 2 = float32 .* got variable 2 = bfloat16"),
    "another role": (
        lambda a, b, v: ([a, b], v[:2], {"averaged": v[2:]}),
        "2 = float32 .* stepped .* got variable 2 = float32 .* averaged"),
    "a variable less": (
        lambda a, b, v: ([a, b], v[:2], {}),
        "have number of variables = 3, got number of variables = 2"),
    "another rule of weights": (
        lambda a, b, v: ([a, b], v, {"weight": "equal"}),
        "have weight = 'steps', got weight = 'equal'"),
    "other codes": (
        lambda a, b, v: ([a, b], v, {"dtype": "int8"}),
        "have dtype = None, got dtype = 'int8'"),
    "another rate": (
        lambda a, b, v: ([a, b], v, {"outer_learning_rate": 0.5}),
        "have outer_learning_rate = 0.7, got outer_learning_rate = 0.5"),
    "another momentum": (
        lambda a, b, v: ([a, b], v, {"outer_momentum": 0.5}),
        "have outer_momentum = 0.9, got outer_momentum = 0.5"),
    "another number of workers": (
        lambda a, b, v: ([a, b], v, {"num_workers": 3}),
        "have num_workers = 2, got num_workers = 3"),
    "another class": (
        lambda a, b, v: ([a, b], v, {"cls": wrapopt.LocalSGD}),
        "have class = DiLoCo, got class = LocalSGD")}


def test_other_settings_are_an_error():
  a, b = [server_module.start().target for _ in range(2)]
  shapes = [2], [4, 3], [4]
  names = [f"v{i}" for i in range(3)]
  variables = [tf.Variable(tf.ones(shape), name=name)
               for shape, name in zip(shapes, names)]

  def worker(name, servers, variables, cls=wrapopt.DiLoCo, num_workers=2,
             **kwargs):
    return make(cls, variables, servers, name, num_workers, name="job",
                min_workers=1, grace_secs=0, round_timeout_secs=3, **kwargs)

  first = worker("a", [a, b], variables)
  for case, (given, error) in OTHER_SETTINGS.items():
    servers, others, kwargs = given(a, b, variables)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
      worker("b", servers, others, **kwargs)
    assert re.search(f"averaging rounds 'job' .*{error}", str(raised.value)), (
        case, str(raised.value))
  with pytest.raises(ValueError, match="`servers` must name each server once"):
    worker("b", [a, a], variables)
  # Nobody has noticed. Names may differ: Keras counts them up.
  second = worker("b", [a, b], [
      tf.Variable(tf.zeros(shape), name="of_b") for shape in shapes])
  for local in first, second, second:  # The second one is late at first.
    local.step(steps=2)
  assert second.report.counted and second.round == 2


@pytest.mark.by_day(0)
def test_a_worker_that_was_refused_leaves_nothing_on_servers():
  a, b = [server_module.start().target for _ in range(2)]
  new = lambda servers: make(
      wrapopt.LocalSGD, [tf.Variable([1.0, 2.0])], servers, "a", 1)
  with pytest.raises(tf.errors.InvalidArgumentError, match="= 0, got .* = 1"):
    new([a, a.replace("localhost", "127.0.0.1")])
  time.sleep(1.1)  # Until then, the worker may be at it.
  new([b, a])


@pytest.mark.parametrize("begun", [0, 1])
def test_a_server_of_another_job(begun):
  """A worker whose other server is a wrong one."""
  a, b, c, d, e, f = [server_module.start().target for _ in range(6)]
  new = lambda name, servers, x: make(
      wrapopt.LocalSGD, [tf.Variable([x, x])], servers, name, 3, sync_every=1,
      min_workers=1, grace_secs=0, round_timeout_secs=1)
  first = new("a", [a, b], 1.0)
  for _ in range(begun):
    first.step()
  # As if a or b had lost its part.
  for servers, rounds in ([c, b], (-1, begun)), ([a, d], (begun, -1)):
    with pytest.raises(tf.errors.DeadlineExceededError, match=(
        "lost their center.* Open rounds: .*: {}, .*: {}$".format(*rounds))):
      new("b", servers, 2.0)
  first.step()
  assert first.round == begun + 1
  # Servers of two jobs of one name.
  new("d", [e, f], 3.0)
  with pytest.raises(tf.errors.InvalidArgumentError, match=(
      "server .* must hold a center of this worker's job, got round 0 of")):
    new("b", [a, f], 2.0)


def test_a_second_job_does_not_go_on_from_the_center_of_the_first(servers):
  def new(x, worker="a", **kwargs):
    w = tf.Variable([x, x, x])
    return make(wrapopt.LocalSGD, [w], servers, worker, 1, sync_every=1,
                **kwargs), w

  local, w = new(1.0)
  w.assign_add([1.0] * 3)
  local.step()
  # The second run of a notebook.
  for worker in "ab":
    with pytest.raises(tf.errors.InvalidArgumentError, match=(
        "a new job has another name, or begins after the old one is dropped")):
      new(5.0, worker)
  _, w = new(5.0, resume=True)
  np.testing.assert_array_equal(w, [2.0] * 3)
  _, w = new(5.0, name="second")
  np.testing.assert_array_equal(w, [5.0] * 3)
  assert server_module.drop(servers, "local_sgd")
  assert not server_module.drop(servers, "local_sgd")
  other, w = new(5.0)
  np.testing.assert_array_equal(w, [5.0] * 3)
  for call in local.step, local.take_center:  # Of the first run.
    with pytest.raises(tf.errors.InvalidArgumentError,
                       match="round 0 of another job of the same name"):
      call()
  other.step()
  assert other.round == 1


def test_a_center_is_read_by_no_worker(servers):
  weights, statistic = tf.Variable([1.0, 2.0]), tf.Variable(
      [[3.0]], dtype=tf.float64, name="statistic")
  names = ["a", "b"]
  new = lambda name: make(
      wrapopt.DiLoCo, [weights], servers, name, 2, min_workers=1, sync_every=1,
      round_timeout_secs=2, averaged=[statistic], name="job")
  with futures.ThreadPoolExecutor(1) as pool:  # It waits for a center.
    early = pool.submit(wrapopt.read_center, servers, "job")
    local, _ = [new(name) for name in names]
    assert early.result().round == 0
  local.step()  # Waits for b, once.
  center = wrapopt.read_center(servers, "job")
  assert center.round == 1 and center.names == ["Variable:0", "statistic:0"]
  np.testing.assert_array_equal(center.values[0], [1.0, 2.0])
  np.testing.assert_array_equal(center.values[1], [[3.0]])
  assert [x.dtype for x in center.values] == [np.float32, np.float64]
  local.step()
  assert local.report.secs < 2  # The round has not waited for the reader.
  with pytest.raises(tf.errors.DeadlineExceededError, match=(
      "must have a center named 'other' within 0.1 .*: 'job' of round 2")):
    wrapopt.read_center(servers, "other", timeout_secs=0.1)
  with pytest.raises(tf.errors.DeadlineExceededError, match="1: no answer"):
    wrapopt.read_center(["localhost:1"], "job", timeout_secs=0.1)
  if len(servers) > 1:
    for wrong in servers[::-1], [server_module.start().target, servers[0]]:
      with pytest.raises(ValueError, match="in the order of its workers, got"):
        wrapopt.read_center(wrong, "job")
  many = servers + [server_module.start().target for _ in servers]
  local = make(wrapopt.LocalSGD, [weights], many, "a", 1, name="small")
  np.testing.assert_array_equal(
      wrapopt.read_center(many, "small").values, [[1.0, 2.0]])


def test_commands_for_servers(capsys, monkeypatch, server):
  address = server.target.removeprefix("grpc://")

  def command(*words):
    monkeypatch.setattr(sys, "argv", ["server", *words])
    server_module.main()
    return capsys.readouterr().out.splitlines()

  assert command("list", address) == [f"{address}:"]
  make(wrapopt.LocalSGD, [tf.Variable([1.0, 2.0], name="w")], [address], "a", 1)
  assert command("list", address) == [
      f"{address}:", "  local_sgd: round 0, 0.00 MB, idle for 0 s",
      "    class = LocalSGD", "    number of servers = 1",
      "    place in the list of servers = 0", "    num_workers = 1",
      "    outer_learning_rate = 1.0", "    outer_momentum = 0.0",
      "    weight = 'steps'", "    dtype = None",
      "    number of variables = 1",
      '    variable 0 = float32 [2], stepped ("w:0")']
  assert server_module.drop_idle(server.target, 60) == []
  assert server_module.drop_idle(server.target, -1) == ["local_sgd"]
  make(wrapopt.LocalSGD, [tf.Variable([1.0])], [address], "a", 1)
  assert command("drop", "local_sgd", address) == []
  with pytest.raises(SystemExit, match="no server has a job named 'local_sgd'"):
    command("drop", "local_sgd", address)
  with pytest.raises(SystemExit, match="localhost:1 does not answer"):
    command("list", "localhost:1")
  with pytest.raises(SystemExit):
    command("--keep-days", "0")
  assert "--keep-days must be more than 0" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_and_mixes(dtype, servers):
  def worker(k):
    w = tf.Variable(tf.zeros([5], dtype))
    statistic = tf.Variable([0.0, 0.0])
    local = make(wrapopt.DiLoCo, [w], servers, f"w{k}", 2, sync_every=1,
                 averaged=[statistic], local_weight=0.5)
    w.assign(tf.fill([5], tf.cast(k * 2.0, dtype)))
    statistic.assign([k * 4.0, 1.0])
    local.step()
    return tf.cast(w, "float64").numpy(), statistic.numpy()

  center = 0.7 * 1.9  # The mean is 1.
  for k, (w, statistic) in enumerate(
      run_all(lambda: worker(0), lambda: worker(1))):
    np.testing.assert_allclose(w, [(center + 2.0 * k) / 2] * 5, rtol=(
        1e-6 if dtype == "float64" else 8e-3))
    np.testing.assert_allclose(statistic, [(2.0 + 4.0 * k) / 2, 1.0])


def test_examples_are_weights(server):
  def worker(k):
    w = tf.Variable([0.0])
    local = make(wrapopt.LocalSGD, [w], [server.target], f"w{k}", 2,
                 sync_every=2, weight="examples")
    w.assign([4.0 * k])
    local.step(examples=1 + k)
    local.step(examples=tf.constant(1 - k))
    return w.numpy()

  for got in run_all(lambda: worker(0), lambda: worker(1)):
    np.testing.assert_allclose(got, [2.0])  # Two examples each.
  local = make(wrapopt.LocalSGD, [tf.Variable([0.0])], [server.target], "w0", 2,
               sync_every=1, weight="examples", resume=True)
  with pytest.raises(ValueError, match="`examples` must be given"):
    local.step()
  with pytest.raises(ValueError, match="`examples` must be more than 0 in a "
                     "round, got 0"):
    local.step(examples=0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("in_graph", [False, True], ids=["python", "graph"])
def test_examples_of_a_round_are_those_of_its_steps(
    in_graph, monkeypatch, server):
  w = tf.Variable([0.0])
  local = make(wrapopt.LocalSGD, [w], [server.target], "a", 1, sync_every=5,
               weight="examples")
  weights, sync = [], member(local).sync
  monkeypatch.setattr(member(local), "sync", lambda vectors, weight: (
      weights.append(weight) or sync(vectors, weight)))

  @tf.function
  def train():
    for i in tf.range(1, 6) if in_graph else range(1, 6):
      w.assign_add([1.0])
      local.step(examples=i)

  for _ in range(30):
    train()
  assert weights == [15] * 30


def test_step_in_a_function_that_xla_compiles_is_an_error(server):
  w = tf.Variable([0.0])
  local = make(wrapopt.LocalSGD, [w], [server.target], "a", 1)
  with pytest.raises(NotImplementedError, match="XLA compiles"):
    tf.function(local.step, jit_compile=True)()


@pytest.mark.parametrize("dtype, momentum", [
    (None, 0.9), ("int4", 0.9), ("int4", 0.0)])
def test_checkpoints(tmp_path, servers, dtype, momentum):
  def train(local, w, rounds):
    for _ in range(2 * rounds):
      w.assign_add([0.5, 0.2, 0.1, 0.03])
      local.step()
    return w.numpy()

  make_diloco = lambda w, names, **kwargs: make(
      wrapopt.DiLoCo, [w], names, "a", 1, dtype=dtype, outer_momentum=momentum,
      **kwargs)
  new = lambda names: make_diloco(
      tf.Variable([0.0] * 4), names, resume=True)
  w = tf.Variable([0.0] * 4)
  local = make_diloco(w, servers)
  assert not np.any(member(local).read("velocities")[1][0])  # There are none.
  train(local, w, 3)
  errors = member(local).errors
  path = tf.train.Checkpoint(local=local).save(str(tmp_path / "c"))
  assert ("velocity_0" in _checkpoints.find(path, "a")) == bool(momentum)
  want = train(local, w, 2)
  # Later servers keep their center.
  tf.train.Checkpoint(local=new(servers)).restore(path).assert_consumed()
  assert local.round == 5

  others = [server_module.start() for _ in servers]
  v = tf.Variable([7.0] * 4)
  again = make_diloco(v, [s.target for s in others])
  tf.train.Checkpoint(local=again).restore(path).assert_consumed()
  v.assign_add([100.0] * 4)
  again.step()  # Takes the center.
  assert again.round == 3
  np.testing.assert_array_equal(member(again).errors, errors)
  np.testing.assert_array_equal(train(again, v, 2), want)
  if dtype and len(servers) < 3:  # Which have more numbers than one each.
    assert np.any(errors)
    # What a worker's codes have lost is not another's.
    other = wrapopt.DiLoCo(
        [tf.Variable([0.0] * 4)], [server_module.start().target
                                   for _ in servers], "b", 1, 2,
        dtype=dtype, outer_momentum=momentum, checkpoint=path)
    assert other.round == 3 and not member(other).errors
    assert member(other).read("errors")[1][0].any()


@pytest.mark.parametrize("given, error, message", [
    ({"variables": []}, ValueError, "`variables` must have elements, got none"),
    ({"variables": [3.0]}, TypeError, "`variables` must be variables, got 3.0"),
    ({"averaged": [tf.Variable(1, name="n")]}, TypeError, "`averaged` must be "
     "of dtype float16, .* got 'n:0' of dtype int32"),
    ({"variables": [tf.Variable([0.0], shape=[None], name="rows")]}, ValueError,
     "`variables` must have known shapes, got 'rows:0' of shape"),
    ({"variables": [X, X]}, ValueError, "each variable once, got one twice"),
    ({"servers": "localhost:1"}, ValueError, "`servers` must be a list of "
     "addresses such as 'host:port', got 'localhost:1'"),
    ({"servers": []}, ValueError, r"a list of addresses .*, got \[\]"),
    ({"servers": [""]}, ValueError, r"a list of addresses .*, got \[''\]"),
    ({"worker": ""}, ValueError, "`worker` must be a name, got ''"),
    ({"worker": 1}, ValueError, "`worker` must be a name, got 1"),
    ({"num_workers": 0}, ValueError, "`num_workers` must be at least 1, got 0"),
    ({"sync_every": 0}, ValueError, "`sync_every` must be at least 1, got 0"),
    ({"min_workers": 0}, ValueError, "`min_workers` must be at least 1, got 0"),
    ({"min_workers": 3}, ValueError, "`min_workers` must be at most 2, the "
     "number of workers, got 3"),
    ({"round_timeout_secs": 0}, ValueError, "`round_timeout_secs` must be"),
    ({"grace_secs": -1}, ValueError, "`grace_secs` must be .*at least 0"),
    ({"weight": "rows"}, ValueError, "`weight` must be one of .*, got 'rows'"),
    ({"local_weight": 2}, ValueError, "`local_weight` must be"),
    ({"progress": 2}, TypeError, "`progress` must be True or False"),
    ({"only_finite": None}, TypeError, "`only_finite` must be True or False"),
    ({"most_pushes": 0}, ValueError, "`most_pushes` must be at least 1, got 0")
], ids=str)
def test_arguments_that_are_refused(given, error, message):
  given = {"variables": [X], "servers": ["localhost:1"], "worker": "a",
           "num_workers": 2, **given}
  with pytest.raises(error, match=message):
    make(wrapopt.LocalSGD, **given)


def test_a_graph_is_refused():
  with tf.Graph().as_default(), pytest.raises(
      RuntimeError, match="DiLoCo must be made eagerly, got a graph"):
    make(wrapopt.DiLoCo, [X], ["localhost:1"], "a", 1)


@pytest.mark.parametrize("dtype, of, error", [
    ("int16", "float32", r"None or one of .*'int4'\), got 'int16'"),
    (tf.bfloat16, "float32", "None or one of .*, got tf.bfloat16"),
    ("int8", "float64", "None for variables of dtype float64, got 'int8' and "
     "'x:0'")])
def test_codes_that_are_refused(dtype, of, error):
  x, y = [tf.Variable(tf.zeros([1], of), name=name) for name in "xy"]
  for variables, averaged in ([tf.Variable([0.0])], [x, y]), ([x], []):
    with pytest.raises(ValueError, match="`dtype` must be " + error):
      make(wrapopt.DiLoCo, variables, ["localhost:1"], "a", 1, dtype=dtype,
           averaged=averaged)


@pytest.mark.by_day(0)
def test_codes_of_several_dtypes_in_a_function(servers):
  """A worker without finite values does not count, and loses no errors."""
  variables = [tf.Variable(tf.zeros([300], "float16")),
               tf.Variable(tf.zeros([200]))]
  statistic = tf.Variable(tf.zeros([3]))
  local = make(wrapopt.DiLoCo, variables, servers, "a", 1, dtype="int8",
               sync_every=1, averaged=[statistic])
  step = tf.function(local.step)
  rng = np.random.default_rng(1)
  for r in range(6):
    distance = rng.normal(size=500) + 0.5
    if r == 3:
      distance[400] = np.nan
    center, errors = member(local).center, member(local).errors
    for v, d in zip(variables, np.split(distance, [300])):
      v.assign_add(tf.cast(d, v.dtype))
    statistic.assign([r, 1.0, 2.0])
    if r == 3:
      with pytest.raises(tf.errors.InvalidArgumentError, match="No worker of"):
        step()
      local.take_center()
      assert_same(member(local).center, center)
      assert member(local).errors is errors
      continue
    step()
    assert local.report.counted
    # One byte for each number, and scales.
    assert 503 < local.report.sent == local.report.received < 503 + 4 * 13
    assert abs(statistic.numpy() - [r, 1.0, 2.0]).max() < 0.05


def test_progress_and_scalars(tmp_path, capsys, server):
  w = tf.Variable([1.0, 2.0])
  local = make(wrapopt.LocalSGD, [w], [server.target], "a", 1, progress=True)
  with tf.summary.create_file_writer(str(tmp_path)).as_default():
    for _ in range(4):
      local.step()
  w.assign([1.0, np.nan])
  with pytest.raises(tf.errors.InvalidArgumentError, match="of round 2 has"):
    local.step(steps=2)
  lines = capsys.readouterr().err.splitlines()
  sent = r", \d+\.\d\d s, 0\.00 MB sent, 0\.00 MB received"
  for line, want in zip([line for line in lines if "round" in line], [
      rf"round 1: 1 workers \(a\){sent}", rf"round 2: 1 workers \(a\){sent}",
      rf"round 3: 0 workers \(\){sent}; 'a' did not count; not finite: a"],
                        strict=True):
    assert re.fullmatch(want, line), line
  seen = collections.defaultdict(list)
  [path] = map(str, tmp_path.iterdir())
  for event in tf.compat.v1.train.summary_iterator(path):
    for value in event.summary.value:
      seen[value.tag].append((event.step, float(tf.make_ndarray(value.tensor))))
  assert seen["rounds/workers"] == [(1, 1.0), (2, 1.0)]
  for key in "sent", "received":
    assert seen["rounds/bytes_" + key] == [(1, 8.0), (2, 8.0)]
  assert [at for at, _ in seen["rounds/seconds"]] == [1, 2]


@pytest.mark.parametrize("traced", [False, True])
def test_a_worker_that_has_missed_the_center_takes_it(
    traced, monkeypatch, server):
  """The round has ended, but an error comes before the center is assigned."""
  w = tf.Variable(0.0)
  local = make(wrapopt.DiLoCo, [w], [server.target], "a", 1, sync_every=1,
               progress=True)
  step = tf.function(local.step) if traced else local.step
  with monkeypatch.context() as patch:
    patch.setattr("builtins.print", fails)
    w.assign_sub(1.0)
    with pytest.raises(Exception, match="no one reads"):
      step()
  assert local.round == 1 and w.numpy() == -1.0
  assert not local.holds_center()
  w.assign_sub(1.0)
  step()  # Its values did not start from the center of round 1.
  assert local.round == 1 and w.numpy() == pytest.approx(-1.33)
  w.assign_sub(1.0)
  step()
  # b = 0.9 + 1: as if nothing had happened.
  assert local.round == 2
  assert w.numpy() == pytest.approx(-1.33 - 0.7 * (1 + 0.9 * 1.9))


def fails(error=OSError, *_, **__):
  error = error if isinstance(error, type) else OSError
  raise error("no one reads this")


def test_a_send_that_fails_gives_up_its_turn(servers, monkeypatch):
  """Otherwise the next one would wait for its end, which is the deadline's."""
  stage, enter = _server.Server.stage, _server.Server.enter
  failed, alive = [], []

  def fail_once(self, *args):
    if failed == [] and self.address == servers[-1]:
      failed.append(True)
      raise tf.errors.UnavailableError(None, None, "lost")
    return stage(self, *args)

  def enter_and_note(self, *args):
    alive.append(self.state(True)[1].texts[0].split()[5:])
    return enter(self, *args)

  monkeypatch.setattr(_server.Server, "stage", fail_once)
  monkeypatch.setattr(_server.Server, "enter", enter_and_note)
  w = tf.Variable([0.0, 0.0, 0.0])
  local = make(wrapopt.LocalSGD, [w], servers, "a", 1, most_pushes=1)
  # Also of the turn in which it sent the first center.
  assert alive == [[], []]
  failed.clear()
  w.assign_add([1.0, 1.0, 1.0])
  local.step(steps=2)
  assert local.report.counted and alive == 4 * [[]]


def test_an_error_is_not_searched_for_names_of_ops(server):
  """TensorFlow's session searches the text, in the square of its length."""
  w = tf.Variable(1.0)
  local = make(wrapopt.LocalSGD, [w], [server.target], "a", 1)
  [server] = member(local)._servers
  server.state(True)
  text = "{{node " + "[[{{" * 100_000

  def fail(*_):
    raise tf.errors.AbortedError(None, None, text)

  with pytest.raises(tf.errors.AbortedError) as raised:
    server._session._do_call(fail)
  assert raised.value.message == text


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_call_takes_half_a_second_of_a_slow_link(monkeypatch, dtype, server):
  rate, now, calls = math.inf, 0.0, []  # Bytes a second; seconds; bytes.
  run = _server.Server._run

  def run_slowly(self, fetches, wait_secs=None, **values):
    nonlocal now
    got = run(self, fetches, wait_secs, **values)
    size = sum(np.asarray(x).nbytes for x in
               [*values.values(), *tf.nest.flatten(got)])
    now += size / rate
    calls.append(size)
    return got

  monkeypatch.setattr(_server.Server, "_run", run_slowly)
  monkeypatch.setattr(_server, "time", types.SimpleNamespace(
      monotonic=lambda: now, time_ns=time.time_ns))
  w = tf.Variable(tf.zeros([3 * 2**20 + 1]))  # Of 12 MiB and 4 bytes.
  local = make(wrapopt.LocalSGD, [w], [server.target], "a", 1, sync_every=1,
               dtype=dtype)
  large = lambda: [size for size in calls if size > 1000]
  piece = 2**18 if dtype is None else 2**16 + 2**11
  # The first center, up and down: more in each call.
  assert [round(size / 2**18) for size in large()] == 2 * [1, 2, 4, 8, 16, 17]
  for rate, once, most in [
      (math.inf, False, 16 * 2**20), (1.25e6, True, 0.5 * 1.25e6),
      (1e5, True, piece), (math.inf, True, 16 * 2**20)]:
    for _ in range(1 + once):  # After the first round, the speed is known.
      calls.clear()
      w.assign_add(tf.ones_like(w))
      local.step()
      assert local.report.counted
    size = 4 * (3 * 2**20 + 1) if dtype is None else (
        3 * 2**20 + 1 + 4 * (3 * 2**13 + 1))
    assert local.report.sent == local.report.received == size
    assert max(large()) < most + 1000
    assert len(large()) == 2 * -(-48 // (most // piece))


def test_a_server_ends_cleanly():
  with subprocess.Popen(
      [sys.executable, "-m", "wrapopt.server"], stdout=subprocess.PIPE,
      text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}) as process:
    line = process.stdout.readline()
    assert line.startswith("wrapopt server listens at port "), line
    w = tf.Variable(1.0)
    make(wrapopt.LocalSGD, [w], [f"localhost:{line.split()[-1]}"], "a", 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stdout.read() == "wrapopt server ends\n"


def test_a_worker_waits_for_a_server_that_starts_later():
  with Servers(1) as servers:
    servers[0].kill()
    timer = threading.Timer(7.0, servers.restart)
    timer.start()
    # Longer than TensorFlow's session waits for a server.
    local = make(wrapopt.LocalSGD, [tf.Variable(1.0)], servers.addresses, "a",
                 1, round_timeout_secs=60)
    assert local.round == 0
    local.close()
    timer.join()


def test_an_error_tells_what_is_at_the_addresses(monkeypatch, server):
  begin, waits = _server.open_session, []
  monkeypatch.setattr(_server, "open_session",
                      lambda *args: waits.append(args[2]) or begin(*args))
  with Servers() as servers, http.server.HTTPServer(
      ("localhost", 0), http.server.BaseHTTPRequestHandler) as web:
    threading.Thread(target=web.serve_forever, daemon=True).start()
    servers[0].stop()
    servers[1].kill()
    addresses = [*servers.addresses, f"localhost:{web.server_port}",
                 server.target]
    with pytest.raises(tf.errors.DeadlineExceededError) as raised:
      make(wrapopt.LocalSGD, [tf.Variable(tf.zeros([4]))], addresses, "a", 1,
           round_timeout_secs=1)
    web.shutdown()
  for address, what in zip(addresses, (
      "does not answer", "refused the connection", "is another program than a",
      "answers")):
    assert f"{address} {what}" in str(raised.value)
  for text in "Start the servers that are missing", ". Last error: ":
    assert text in str(raised.value)
  assert {*waits} == {_server._LEAST_SESSION_SECS}  # The deadline is nearer.


@pytest.mark.parametrize("port", [99999, -1, "in use"])
def test_a_port_that_no_server_can_have(port, monkeypatch, capsys):
  with socket.socket() as other:
    if port == "in use":
      other.bind(("", 0))
      other.listen()
      port, want = other.getsockname()[1], "cannot listen at port {}: another"
    else:
      want = "`port` must be in .0, 65535., 0 for a free one, got {}"
    with pytest.raises((OSError, ValueError),
                       match=want.format(port)) as raised:
      server_module.start(port)
    monkeypatch.setattr(sys, "argv", ["server", "--port", str(port)])
    with pytest.raises(SystemExit):
      server_module.main()
  assert str(raised.value) in capsys.readouterr().err


@pytest.mark.parametrize("begins", ["anew", "with its checkpoint"])
def test_a_job_that_has_begun_anew_does_not_overtake_in_silence(
    begins, monkeypatch, tmp_path):
  """While a worker is away that holds a later center."""
  with Servers(1) as servers:
    def new(name, **kwargs):
      w = tf.Variable([0.0, 0.0])
      return w, make(
          wrapopt.LocalSGD, [w], servers.addresses, name, 2, sync_every=1,
          min_workers=1, round_timeout_secs=2, grace_secs=0, resume=True,
          **kwargs)

    def train(w, local, rounds):
      for _ in range(rounds):
        w.assign_add([1.0, 1.0])
        local.step()

    first = new("a")
    path = tf.train.Checkpoint(local=first[1]).save(str(tmp_path / "c"))
    train(*first, 2)
    servers.restart()
    second = new("b", checkpoint=path if begins != "anew" else None)
    train(*second, 1)
    # By a clock that is behind, it gives its center of round 2.
    monkeypatch.setattr(_member, "time", types.SimpleNamespace(**{
        **vars(time), "time_ns": lambda: 0}))
    train(*first, 1)
    assert [x.round for _, x in (first, second)] == [3, 1]
    train(*second, 1)  # It takes that of round 3.
    assert second[1].round == 3 and second[0].numpy()[0] == 3.0
    first[1].close()
    servers.restart()
    second = new("b")  # As a process that knows nothing.
    train(*second, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=(
        "got round 3: the servers have lost it, and are in round 4 of a job "
        "that others have begun anew. Restart this worker")):
      train(*first, 1)
    train(*second, 1)
    assert new("a")[1].round == second[1].round == 5
    path = tf.train.Checkpoint(local=second[1]).save(str(tmp_path / "later"))
    second[1].close()
    servers.restart()
    second = new("b")
    train(*second, 1)
    first = new("a", checkpoint=path if begins == "anew" else None)
    tf.train.Checkpoint(local=first[1]).restore(path)
    assert first[1].round == 5
    servers.restart()
    train(*second, 4)  # On from a center that was replaced.
    with pytest.raises(tf.errors.InvalidArgumentError, match="got round 5: "):
      train(*first, 1)
    run_all(first[1].close, second[1].close)  # Else they wait for servers.


@pytest.mark.parametrize("lost", ["one", "the lead", "all", "none"])
def test_a_job_whose_workers_are_lost_begins_with_a_checkpoint(
    lost, tmp_path, caplog):
  """And maybe some servers with them."""
  with Servers() as servers:
    folder = tmp_path / "local"
    def new(**kwargs):
      w = tf.Variable([0.0] * 4)
      return w, make(wrapopt.DiLoCo, [w], servers.addresses, "a", 1,
                     sync_every=1, round_timeout_secs=4, resume=True,
                     checkpoint=folder, **kwargs)

    def train(w, local, rounds):
      for _ in range(rounds):
        w.assign_add([0.5] * 4)
        local.step()
      return w.numpy()

    w, local = new()
    assert f"There is no checkpoint in {folder}: worker 'a'" in caplog.text
    train(w, local, 2)
    tf.train.Checkpoint(of=[local]).save(str(folder / "c"))
    want = train(w, local, 1)
    local.close()
    for i in {"one": [1], "the lead": [0], "all": [0, 1], "none": []}[lost]:
      servers.restart(i)
    w, local = new()
    if lost == "none":  # The servers have a later center.
      assert local.round == 3
    else:
      assert local.round == 2
      train(w, local, 1)  # Also with the velocity of the checkpoint.
    np.testing.assert_array_equal(w, want)
    local.close()  # It would wait for servers that are gone.


def test_a_checkpoint_of_other_variables_is_an_error(tmp_path, server):
  new = lambda variables, **kwargs: make(
      wrapopt.LocalSGD, variables, [server.target], "a", 1,
      resume=True, **kwargs)
  v, w = tf.Variable(tf.ones([2, 3])), tf.Variable([1.0])
  local = new([v, w], name="one")
  save = lambda name, **kwargs: tf.train.Checkpoint(**kwargs).save(
      str(tmp_path / name))
  path, two = save("a", local=local), save("b", x=local, y=new([w], name="y"))
  turned = tf.Variable(tf.ones([3, 2]))
  for n, (variables, i, of) in enumerate((
      ([turned, w], 0, r"float32 \[3, 2\]"), ([w, v], 0, r"float32 \[1\]"),
      ([v, w, tf.Variable([2.0])], 2, r"None in the file, 'float32 \[1\]"),
      ([v], 1, "None here"))):
    with pytest.raises(ValueError, match=(
        f"the same variables, in the same order, got for variable {i}: .*{of}"
    )):
      new(variables, checkpoint=path, name="other")
    other = new(variables, name=f"other {n}")
    with pytest.raises(ValueError, match="the same variables, in the same ord"):
      tf.train.Checkpoint(local=other).restore(path)
  for path, n in (two, "2 of them: x, y"), (save("c", w=w), "0 of them"):
    with pytest.raises(ValueError, match=n):
      new([v, w], checkpoint=path)
  # It takes that of another object of the same variables.
  assert new([v, w], checkpoint=tmp_path / "a-1", name="z").round == 0


@pytest.mark.by_day(0)
def test_momentum_that_is_lost_restarts_with_a_warning(caplog):
  with Servers() as servers, caplog.at_level("WARNING", "tensorflow"):
    w = tf.Variable([0.0] * 4)
    local = make(wrapopt.DiLoCo, [w], servers.addresses, "a", 1, sync_every=1)

    def go():
      begin = w.numpy()
      w.assign_sub([1.0] * 4)
      local.step()
      return w.numpy() - begin

    np.testing.assert_allclose(go(), [-1.33] * 4, rtol=1e-6)
    assert "restarts" not in caplog.text
    servers.restart(1)
    moved = go()
    assert (f"outer momentum of server {servers.addresses[1]} restarts in "
            "round 1.") in caplog.text
    # b = 1.9 where the velocity was kept, and 1 where it was lost.
    np.testing.assert_allclose(moved, [-1.897] * 2 + [-1.33] * 2, rtol=1e-6)
    local.close()  # It would wait for servers that are gone.
