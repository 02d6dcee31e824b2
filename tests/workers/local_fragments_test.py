"""Fragments of local training, and exchanges that overlap with steps."""

import atexit
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_same
from local_parts import run_all, Servers, steps_of, wait_alone
from processes import wait_until
import wrapopt
from wrapopt import server as server_module
from wrapopt._local import _checkpoints
from wrapopt._local import _fragments
from wrapopt._local import _member
from wrapopt._local import _server
from wrapopt._local import _settings

# Variables of 3, 4, 1 and 6 numbers, in fragments [3], [4, 1] and [6].
SHAPES = (3,), (2, 2), (), (6,)


def make(variables, servers, worker="a", num_workers=1, cls=wrapopt.DiLoCo,
         **kwargs):
  kwargs = {"round_timeout_secs": 20, "sync_every": 6, **kwargs}
  return cls(variables, servers, worker, num_workers, **kwargs)


def zeros():
  return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def train(local, steps):
  for _ in range(steps):
    for v in local.variables:
      v.assign_add(tf.ones(v.shape))
    local.step()
  return [v.numpy() for v in local.variables]


@pytest.fixture
def server():
  return server_module.start()


@pytest.fixture
def servers():
  made = [server_module.start() for _ in range(2)]
  yield [s.target for s in made]


@pytest.mark.parametrize("count", range(1, 6))
def test_the_largest_fragment_is_as_small_as_can_be(count):
  rng = np.random.default_rng(count)
  for _ in range(50):
    sizes = rng.integers(0, 9, size=rng.integers(5, 9))
    sizes[rng.choice(len(sizes), 5, replace=False)] += 1
    ends = _fragments.divide(
        [_settings.Variable("v", [int(n)], tf.float32, False) for n in sizes],
        count)
    largest = lambda ends: max(
        sizes[i:j].sum() for i, j in zip([0, *ends], ends))
    got = [sizes[i:j].sum() for i, j in zip([0, *ends], ends)]
    assert len(got) == count and min(got) > 0 and ends[-1] == len(sizes)
    assert largest(ends) == min(
        largest([*cuts, len(sizes)])
        for cuts in itertools.combinations(range(1, len(sizes)), count - 1))


def test_bad_arguments(servers):
  for kwargs, error in (
      ({"fragments": 4}, "`sync_every` must be a multiple of fragments = 4, "
       "got 6"),
      ({"fragments": 6}, "at most the number of variables with elements, 4, "
       ".* got 6"),
      ({"fragments": 0}, "`fragments` must be at least 1"),
      ({"overlap_steps": -1}, "`overlap_steps` must be at least 0"),
      ({"overlap_steps": 2, "fragments": 3}, "sync_every / fragments = 2, got "
       "2")):
    with pytest.raises(ValueError, match=error):
      make([*zeros(), tf.Variable(tf.zeros([0]))], servers, **kwargs)


@pytest.mark.by_day(0)
def test_workers_of_other_fragments_are_refused(servers):
  make(zeros(), servers, "a", 2)
  with pytest.raises(tf.errors.InvalidArgumentError, match=(
      "have class = DiLoCo, got class = DiLoCo, fragment 0 of 3")):
    make(zeros(), servers, "b", 2, fragments=3)


def test_a_step_returns_while_values_travel(server):
  """The other worker comes later, and this one goes on until then."""
  w = tf.Variable([0.0])
  local = make([w], [server.target], "a", 2, wrapopt.LocalSGD, sync_every=4,
               overlap_steps=3, local_weight=0.5)
  for _ in range(6):
    w.assign_add([1.0])
    local.step()
  assert w.numpy() == [6.0] and local.report is None
  v = tf.Variable([0.0])
  other = make([v], [server.target], "b", 2, wrapopt.LocalSGD, sync_every=4)
  v.assign([2.0])
  other.step(steps=4)
  w.assign_add([1.0])
  local.step()
  # The mean of 4 and 2 is the center; the worker is at 7 by then.
  assert v.numpy() == [3.0] and w.numpy() == [(3 + 7) / 2]
  assert local.report.counted and local.report.workers == ("a", "b")
  w.assign_add([1.0])
  local.step()  # It has sent 6 in round 1.
  other.step(steps=4)
  assert v.numpy() == [(6 + 3) / 2]


def test_all_fragments_are_of_the_worker_that_begins(servers, monkeypatch):
  """Another one comes between its fragments."""
  one, two = zeros(), [tf.Variable(tf.ones(shape)) for shape in SHAPES]
  other = threading.Thread(target=lambda: make(
      two, servers, "b", 2, fragments=3))
  started, start = [], _member.Member.start

  def start_and_let_other_come(self, initial, saved=None):
    start(self, initial, saved)
    started.append(self)
    if started == [self]:
      other.start()
      wait_until(lambda: len(started) > 1, "b has not come")
      time.sleep(0.5)  # It waits for the next fragment.

  monkeypatch.setattr(_member.Member, "start", start_and_let_other_come)
  make(one, servers, "a", 2, fragments=3)
  other.join(60)
  assert len(started) == 6
  for v in *one, *two:
    np.testing.assert_array_equal(v, tf.zeros(v.shape))


@pytest.mark.parametrize("saves, restores", [(2, 2), (1, 2), (2, 1)])
def test_a_checkpoint_while_values_travel(saves, restores, tmp_path, servers):
  """It has the center of the round, and the next servers go on from it."""
  kwargs = {"overlap_steps": 1, "local_weight": 0.5}
  local = make(zeros(), servers, fragments=saves, **kwargs)
  train(local, 12)  # Of the last fragment, a round is under way.
  path = tf.train.Checkpoint(local=local).save(str(tmp_path / "c"))
  center = wrapopt.read_center(servers, "diloco")
  assert center.round == local.round == 2 * saves
  assert ("rounds/fragment" in local.scalars()) == (saves > 1)
  assert _checkpoints.find(path, "a")["round"].tolist() == (
      2 if saves == 1 else [2, 2])
  velocities = lambda local: list(itertools.chain(*(
      f.read(True)[2] for f in local._exchanges.fragments)))
  want = velocities(local)
  assert all(x.all() for x in want)
  train(local, 1 + 6)
  assert local.round == 3 * saves
  others = [server_module.start().target for _ in servers]
  again = make(zeros(), others, fragments=restores, **kwargs)
  train(again, 6 // restores)
  assert again._exchanges._exchange  # Values travel.
  assert again._exchanges.are_current([0, 5][:restores]) == (restores == 1)
  tf.train.Checkpoint(local=again).restore(path).assert_consumed()
  again.step()
  assert again.round == 2 * restores
  got = wrapopt.read_center(others, "diloco")
  assert_same(got.values, center.values)
  assert_same([v.numpy() for v in again.variables], center.values)
  named = make(zeros(), [server_module.start().target], fragments=restores,
               checkpoint=path, **kwargs)
  assert_same([v.numpy() for v in named.variables], center.values)
  for each in again, named:
    assert_same(velocities(each), want)
  assert_same(train(named, 7), train(again, 7))


def test_what_ends_an_exchange(servers, monkeypatch):
  at_exit = []
  monkeypatch.setattr(atexit, "register", at_exit.append)
  monkeypatch.setattr(atexit, "unregister", at_exit.remove)
  local = make(zeros(), servers, overlap_steps=2, name="one")
  train(local, 6)
  local.leave()
  assert local.round == 1 and local.report.counted
  np.testing.assert_array_equal(local.variables[2], 6.0)
  train(local, 1)
  np.testing.assert_array_equal(local.variables[2], 7.0)
  train(local, 1)  # It comes back with the center.
  np.testing.assert_allclose(local.variables[2], 1.33 * 6)
  train(local, 6)
  local.take_center()
  assert local.round == 2
  center = local.variables[2].numpy()
  assert center > 1.33 * 12
  train(local, 6)
  assert local.holds_center()
  local.close()
  assert local._exchanges._exchange is None
  assert at_exit == []
  train(local, 2 + 6)  # The exchange that was closed is done again, or over.
  local.leave()
  assert local._exchanges.fragments[0].member._lead._session is None


def test_an_exchange_that_waits_is_closed_at_once(server, monkeypatch):
  local = make(zeros(), [server.target], "a", 2, overlap_steps=2,
               round_timeout_secs=600)
  train(local, 6)
  call = local._exchanges._exchange.call
  [fragment] = local._exchanges.fragments
  lead = fragment.member._lead
  session = lead._session
  local.close()
  with pytest.raises(KeyboardInterrupt):
    call.result()
  assert session._closed
  monkeypatch.setattr(lead, "_run", None)
  lead.release()  # Asks nothing of a server that may have stopped.


def test_who_waits_for_an_exchange(server):
  """A checkpoint does, to save or to restore, and a step; Ctrl-C forgets none.
  """
  local = make(zeros(), [server.target])
  exchanges, call = local._exchanges, mock.Mock(stop=None)
  exchanges._exchange = types.SimpleNamespace(call=call)
  local._serialize_to_tensors()
  assert call.wait.call_count == 1
  exchanges.restore([])
  assert call.wait.call_count == 2 and exchanges._exchange is None
  exchanges._exchange = types.SimpleNamespace(call=call)
  call.wait.side_effect = KeyboardInterrupt
  with pytest.raises(KeyboardInterrupt):
    exchanges._conclude()
  assert exchanges._exchange


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_an_error_of_an_exchange_is_raised_at_its_end(traced, server):
  """What the server has of it counts in the next one."""
  w = tf.Variable([0.0])
  local = make([w], [server.target], "a", 2, wrapopt.LocalSGD, sync_every=4,
               overlap_steps=2, round_timeout_secs=1)
  step = tf.function(local.step) if traced else local.step
  for _ in range(5):
    w.assign_add([1.0])
    step()
  for _ in range(2):
    with pytest.raises(tf.errors.DeadlineExceededError, match="needs 2 of 2"):
      step()
      step()
      step()
  assert w.numpy() == [5.0] and local.round == 0
  v = tf.Variable([0.0])
  other = make([v], [server.target], "b", 2, wrapopt.LocalSGD, sync_every=1)
  step()
  other.step()
  assert v.numpy() == pytest.approx(4 * 4 / (4 + 1))
  step()
  step()
  assert_same([w.numpy()], [v.numpy()])
  assert steps_of(local) == 2


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_ctrl_c_ends_the_wait_for_an_exchange(traced):
  with Servers(1) as servers:
    worker, pipe = servers.start(wait_alone, traced, servers.addresses[0], 1)
    watcher = make([tf.Variable([1.0, 2.0])], servers.addresses, "other", 2,
                   wrapopt.LocalSGD)
    lead = watcher._exchanges.fragments[0].member._lead
    wait_until(lambda: lead.state(True)[0].workers == ("alone",), "no values")
    assert pipe.recv() == "waits"
    os.kill(worker.pid, signal.SIGINT)
    assert pipe.poll(60) and pipe.recv() == "KeyboardInterrupt"
    w, steps, round_ = pipe.recv()
    # A function goes on to its end, without rounds.
    taken = 5 if traced else 3
    assert (w, steps, round_) == ([1.0 + taken, 2.0 + taken], taken, 0)
    # The process ends while its values travel.
    worker.join(30)
    assert worker.exitcode == 0


def test_a_program_ends_while_values_travel():
  program = """if True:
      import tensorflow as tf
      import wrapopt
      import wrapopt.server
      server = wrapopt.server.start()
      w = tf.Variable([1.0])
      local = wrapopt.DiLoCo([w], [server.target], "a", 2, 3, overlap_steps=2)
      for _ in range(4):
        local.step()
      print("end", local.round)"""
  got = subprocess.run([sys.executable, "-c", program], check=True, timeout=120,
                       capture_output=True, text=True)
  assert got.stdout.split() == ["end", "0"], got.stderr


def test_readers_and_commands(servers, capsys, monkeypatch):
  variables = zeros()[:3]
  statistic = tf.Variable([5.0] * 6, name="a = b")
  local = make(variables, servers, fragments=3, averaged=[statistic],
               progress=True, name="job")
  train(local, 6)
  lines = capsys.readouterr().err.splitlines()
  assert [line.split(",")[:2] for line in lines if "round" in line] == [
      [f"fragment {i}", " round 1: 1 workers (a)"] for i in range(3)]
  assert local.report.fragment == local.scalars()["rounds/fragment"] == 2
  assert local.report.round == 1 and local.round == 3
  # Of 6 numbers, the second server has the half.
  assert local.report.sent == 6 * 4
  begin, sessions = _server.open_session, []
  monkeypatch.setattr(_server, "open_session", lambda *args: (
      sessions.append(begin(*args)) or sessions[-1]))
  center = wrapopt.read_center(servers, "job")
  assert all(session._closed for session in sessions)
  with pytest.raises(ValueError, match="must be a list of addresses"):
    wrapopt.read_center(servers[0], "job")
  assert center.round == 3 and center.names[3] == "a = b:0"
  # Steps since the rounds of the fragments.
  for got, v, since in zip(center.values, local.variables, (4, 2, 2, 0)):
    np.testing.assert_allclose(got, v.numpy() - since, rtol=1e-6)
  np.testing.assert_array_equal(center.values[3], np.full(6, 5.0 + 6))
  address = servers[0].removeprefix("grpc://")
  monkeypatch.setattr(sys, "argv", ["server", "list", address])
  server_module.main()
  listed = capsys.readouterr().out
  assert "job/2: round 1" in listed
  assert "    class = DiLoCo, fragment 2 of 3\n" in listed
  make(zeros(), servers, fragments=2, name="other")
  assert server_module.drop(servers, "job")
  assert not server_module.drop(servers, "job/1")
  assert server_module.drop(servers, "other/1")


def test_a_worker_that_missed_rounds_does_not_wait_for_others(servers):
  """It takes centers until it is where the others are."""
  kwargs = {"cls": wrapopt.LocalSGD, "fragments": 3, "sync_every": 3,
            "min_workers": 1, "grace_secs": 0}
  local = make(zeros(), servers, "a", 2, **kwargs)
  late = make(zeros(), servers, "b", 2, **kwargs)
  train(local, 4)
  rounds = lambda x: [f.round for f in x._exchanges.fragments]
  assert rounds(local) == [2, 1, 1] and rounds(late) == [0, 0, 0]
  train(late, 1)
  assert rounds(late) == [2, 0, 0] and not late.report.counted
  train(late, 2)
  assert rounds(late) == rounds(local)
  # Both are needed, and come to the same fragment.
  for x in local, late:
    x.leave()
  both = [make(zeros(), servers, name, 2, resume=True, **{
      **kwargs, "min_workers": 2, "grace_secs": None}) for name in "ab"]
  run_all(*[lambda x=x: train(x, 3) for x in both])
  assert rounds(both[0]) == rounds(both[1]) == [3, 2, 2]
  assert both[0].report.workers == ("a", "b")
