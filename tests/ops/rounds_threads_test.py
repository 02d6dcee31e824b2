"""The kernels of the averaging rounds, called by threads that stop anywhere.

Their calls are cancelled, and the two servers destroyed, while others wait.
`cc/rounds_test` and the simulator test the rules of the rounds.
"""

import collections
import itertools
import math
import random
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import execute

from threads import in_threads
from wrapopt._loader import ops as raw

WORKERS = "abc"
N = 2  # The number of vectors; each has one element.
TURN_SECS, WAIT_SECS, LONG_SECS = 0.05, 0.2, 30.
_count = itertools.count()


def values(worker, place):
  """The values that a worker sends to the round of a place, or restores."""
  return [np.float32(ord(worker) % 7 + 10 * i + place[0]) for i in range(N)]


def run(steps, calls=None):
  for _ in itertools.islice(steps, calls):
    pass


class Cluster:
  """The names of the servers, the lead first."""

  def __init__(self):
    self._names = [f"threads {next(_count)}" for _ in range(2)]
    self.managers = {w: cancellation.CancellationManager() for w in WORKERS}
    self.rounds = collections.Counter()  # By the number of members.

  def handles(self):
    return [raw.wrapopt_averaging_rounds(
        num_workers=len(WORKERS), dtypes=N * [tf.float32], sizes=N * [1],
        shared_name=name) for name in self._names]

  def disturb(self, rng):
    if rng.random() < 0.3:
      tf.raw_ops.DestroyResourceOp(resource=rng.choice(self.handles()))
      return
    worker, new = rng.choice(WORKERS), cancellation.CancellationManager()
    old, self.managers[worker] = self.managers[worker], new
    old.start_cancel()


class Worker:
  """It can stop after each call, as these methods are generators."""

  def __init__(self, cluster, name, least=1, wait_secs=WAIT_SECS):
    self._cluster, self._name = cluster, name
    self._least, self._wait_secs = least, wait_secs
    self._servers = cluster.handles()
    self._lead, self._other = self._servers

  def _wait(self, op, *inputs):
    """A call that waits, and may be cancelled: what the lead knows then."""
    dtypes = {float: tf.float64, str: tf.string}
    tensors = [tf.constant(x, dtypes.get(type(x), tf.int64)) for x in inputs]
    return execute.execute_with_cancellation(
        f"Wrapopt>Averaging{op}", 1 + (op == "Enter"), [self._lead, *tensors],
        (), context.context(), self._cluster.managers[self._name])[-1].numpy()

  def _enter(self, place, most_turns):
    known = self._wait("Enter", self._name, 0, place, most_turns, TURN_SECS,
                       self._wait_secs)
    return known, int(known[0].split()[3]) >= 0

  def _states(self):
    """[((round, generation), whether there is a center)] of the servers."""
    states = map(raw.wrapopt_averaging_state, self._servers)
    return [(tuple(map(int, s.place)), int(s.numbers[0]) > 0) for s in states]

  def _stage(self, server, known, sent):
    for i, x in enumerate(sent):
      raw.wrapopt_averaging_stage(server, self._name, known, 1., N, i, [[x]])
      yield

  def take_part(self):
    """Takes part in the open round, and checks the center that it ends with."""
    place = self._states()[0][0]
    known, has_turn = self._enter(place, 2)
    yield
    if has_turn:
      for server in (self._other, self._lead):
        yield from self._stage(server, known, values(self._name, place))
      accepted, known = raw.wrapopt_averaging_arrive(
          self._lead, self._name, known)
      yield
      if not accepted:
        return
    known = self._wait("Close", place, self._least, self._wait_secs, math.inf)
    yield
    if not (members := [w.decode() for w in known[1:]]):
      return  # A new generation has begun.
    next_ = place[0] + 1, place[1]
    for server in (self._other, self._lead):
      raw.wrapopt_averaging_outer_step(server, known, 1., 0., 0)
      yield
      for i, mean in enumerate(np.mean([values(w, place) for w in members], 0)):
        at, center = raw.wrapopt_averaging_center(
            server, self._name, i, 1, self._wait_secs, T=tf.float32)
        assert tuple(at.numpy()) != next_ or abs(center[0] - mean) < 1e-4, (
            place, members, center, mean)
    self._cluster.rounds[len(members)] += 1

  def mend(self):
    """Gives a center to the servers, if one has none or they differ."""
    before = self._states()
    time.sleep(TURN_SECS)  # They differ while a round ends.
    (place, _), (other, _) = states = self._states()
    if states != before or place == other and all(c for _, c in states):
      return
    known, has_turn = self._enter(place, 0)
    yield
    new = max(place[0], other[0], 0), 1 + max(place[1], other[1])
    if not has_turn or self._states() != states:
      return
    numbers = known[0].split()
    known = np.array([b" ".join([b"%d %d" % new, *numbers[2:]])], object)
    for server, (old, _) in ((self._other, states[1]), (self._lead, states[0])):
      yield from self._stage(server, known, values(self._name, new))
      raw.wrapopt_averaging_restore(server, self._name, old[1], new, 0)
      yield

  def round(self):
    """The round of both servers; None if it differs, or one has no center."""
    (place, has), (other, has_other) = self._states()
    return place[0] if place == other and has and has_other else None


# At a deadline; when a step is cancelled; if rounds are destroyed while a call
# waits, or before it; when they are made anew, without a center.
ERRORS = (tf.errors.DeadlineExceededError, tf.errors.CancelledError,
          tf.errors.AbortedError, tf.errors.InvalidArgumentError,
          tf.errors.FailedPreconditionError)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("seed", range(3))
def test_rounds_go_on(seed):
  cluster, errors, ended = Cluster(), collections.Counter(), []

  def work(name):
    rng = random.Random(f"{seed} {name}")
    while not ended:
      worker = Worker(cluster, name)
      try:  # It often stops.
        run(itertools.chain(worker.mend(), worker.take_part()),
            rng.choice([None, rng.randrange(20)]))
      except ERRORS as e:
        errors[type(e)] += 1

  def disturb():
    rng, n = random.Random(seed), 0
    while n < 30 or not {ERRORS[1], ERRORS[2]} <= errors.keys() and n < 300:
      time.sleep(rng.uniform(0, 0.2))
      cluster.disturb(rng)
      n += 1
    ended.append(n)

  in_threads(*[lambda w=w: work(w) for w in WORKERS], disturb)
  # All is well once nobody disturbs them.
  mender = Worker(cluster, "a", 3, LONG_SECS)
  while mender.round() is None:
    run(mender.mend())
  before = cluster.rounds[3]
  for _ in range(3):
    in_threads(*[lambda w=w: run(Worker(
        cluster, w, 3, LONG_SECS).take_part()) for w in WORKERS])
  assert cluster.rounds[3] == before + 3 * len(WORKERS)
  for server in cluster.handles():
    assert raw.wrapopt_averaging_state(server).numbers[2] == 0  # Staged.


@pytest.mark.parametrize("calls", range(10))
def test_a_worker_that_stops_anywhere(calls):
  """After so many calls of b, a ends the round."""
  cluster = Cluster()
  a, b = Worker(cluster, "a"), Worker(cluster, "b")
  run(a.mend())
  run(b.take_part(), calls)
  run(a.take_part())
  assert a.round() == 1 + (calls == 9)
  # b is a member once it has arrived; a is not once the round is closed.
  assert cluster.rounds == {2 if calls == 6 else 1: 1}
