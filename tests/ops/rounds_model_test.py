"""The averaging rounds of two servers against a model, in random programs.

Workers run the ops of the protocol in any order, and so stop anywhere. After
each call, the servers must be in the state of the model. Calls that wait are
made with a deadline, or in threads. No test can tell when a call of a thread
has come to where it waits. So the test makes no calls whose effect would depend
on that, and joins a thread as soon as the model answers its call.
"""

import threading
import typing

import hypothesis
from hypothesis import stateful
from hypothesis import strategies
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import execute

from processes import wait_until
from wrapopt._loader import ops as raw

WORKERS = ("a", "b", "c")
ALL = len(WORKERS)
LEAD, OTHER = 0, 1
MOST_TURNS = 2
SOON = 0.01  # Seconds.
JOIN_SECONDS = 60
N = 2  # The number of vectors; each has one element.


class Known(typing.NamedTuple):
  """What the lead tells: see `Wrapopt>AveragingRounds`."""
  place: tuple
  closed: bool
  turn: int
  newest: int
  alive: frozenset
  workers: tuple

  @classmethod
  def read(cls, texts):
    round_, generation, closed, turn, newest, *alive = map(
        int, texts[0].split())
    return cls((round_, generation), bool(closed), turn, newest,
               frozenset(alive), tuple(w.decode() for w in texts[1:]))

  def texts(self):
    numbers = [*self.place, int(self.closed), self.turn, self.newest,
               *sorted(self.alive)]
    return np.array([" ".join(map(str, numbers)), *self.workers], object)

  def is_over(self, turn):
    return turn <= self.newest and turn not in self.alive


class Staged(typing.NamedTuple):
  """The values that a worker has sent: {vector: value}."""
  place: tuple
  turn: int
  values: dict


class Server:
  """The model of a server. Its methods are ops; an error is its class's name.

  Attributes:
    expected: The workers that a round waits for, or None for all.
    ended: The last place that has ended, and its members.
    members: {worker: {vector: value}} of the open round, as they came.
    staged: {worker: Staged}.
    center: A value for each vector, or None.
  """

  def __init__(self):
    self.place, self.closed, self.members, self.staged = (-1, 0), False, {}, {}
    self.newest, self.alive, self.last = -1, frozenset(), 0
    self.owners = {}  # Of all turns that this server gave.
    self.expected, self.ended, self.center = None, ((-1, 0), ()), None

  def known(self, turn=-1, place=None):
    return Known(place or self.place, self.closed, turn, self.newest,
                 self.alive, tuple(self.members))

  def _has_staged(self, worker, place):
    staged = self.staged.get(worker)
    return staged is not None and (staged.place == place and
                                   len(staged.values) == N)

  def _drop_over(self):
    known = self.known()
    self.staged = {w: s for w, s in self.staged.items()
                   if s.place[1] > self.place[1] or not known.is_over(s.turn)}

  def follow(self, known):
    if known.place != self.place:
      return False
    for worker in known.workers:
      if worker not in self.members and self._has_staged(worker, self.place):
        self.members[worker] = self.staged.pop(worker).values
    if known.newest > self.newest:
      self.newest, self.alive = known.newest, known.alive
      self._drop_over()
    return True

  def stage(self, worker, known, values):
    restores = known.place[1] > self.place[1]
    if not restores and self.center is None:
      return "FailedPreconditionError"
    self.follow(known)
    if not restores and (
        known.place != self.place or self.closed or worker in self.members or
        self.known().is_over(known.turn)):
      return False
    old = self.staged.get(worker)
    if old is None or old[:2] != (known.place, known.turn):
      old = Staged(known.place, known.turn, {})
    self.staged[worker] = old._replace(values={**old.values, **values})
    return True

  def arrive(self, worker, known):
    accepted = (known.place == self.place and not self.closed and
                known.turn in self.alive and
                self._has_staged(worker, self.place) and
                self.staged[worker].turn == known.turn)
    if accepted:
      self.members[worker] = self.staged.pop(worker).values
      self.end_turn(known.turn)
    return accepted

  def forget_turns(self, worker):
    """It enters again."""
    for turn in sorted(self.alive):
      if self.owners.get(turn) == worker:
        self.end_turn(turn)

  def end_turn(self, turn):
    self.alive -= {turn}
    self._drop_over()

  def meet(self, worker):
    """A worker enters."""
    if self.expected is not None:
      self.expected |= {worker}

  def turn(self, worker, place, most):
    """What the worker is told, or None if it must wait."""
    turn = -1
    if place == self.place and (not most or not (
        self.closed or worker in self.members)):
      if len(self.alive) >= max(most, 1):
        return None
      turn = self.last = self.newest = self.last + 1
      self.owners[turn] = worker
      self.alive |= {turn}
    return self.known(turn, place)

  def close(self, place, min_workers, is_late=False):
    """What the worker is told, or None if it must wait."""
    came = frozenset(self.members)
    if place != self.place:
      workers = self.ended[1] if place == self.ended[0] else ()
      return Known(place, True, -1, -1, frozenset(), workers)
    if not self.closed:
      if is_late and len(came) >= min_workers:
        self.expected = came
      elif not (len(came) == ALL or self.expected is not None and
                self.expected <= came and len(came) >= min_workers):
        return "DeadlineExceededError" if is_late else None
      self.closed = True
      if len(came) == ALL:
        self.expected = None
    return Known(place, True, -1, -1, frozenset(), tuple(sorted(came)))

  def _open(self, place):
    self.ended = (place[0] - 1, place[1]), tuple(sorted(self.members))
    self.place, self.closed, self.members, self.staged = place, False, {}, {}
    self.alive = frozenset()

  def end(self, known):
    if known.place == self.place:
      self.follow(known)
      if (not known.closed or known.workers != tuple(sorted(self.members)) or
          not self.members or self.center is None):
        return "FailedPreconditionError"
      self.center = [np.mean([v[i] for v in self.members.values()])
                     for i in range(N)]
      self._open((self.place[0] + 1, self.place[1]))
    return self.place

  def restore(self, worker, from_generation, place):
    if from_generation != self.place[1] or place[1] <= from_generation:
      return False
    if self._has_staged(worker, place):
      values = self.staged[worker].values
      self.center = [values[i] for i in range(N)]
    elif place[0] != self.place[0]:
      return "FailedPreconditionError"
    self.newest, self.expected = self.last, None
    self._open(place)
    return True


class Thread:
  """A call that waits, in a thread of its own."""

  def __init__(self, op, inputs):
    self.manager = cancellation.CancellationManager()
    self._answer = None
    self._call = op, inputs
    self._thread = threading.Thread(target=self._body, daemon=True)
    self._thread.start()

  def _body(self):
    op, inputs = self._call
    try:
      found = execute.execute_with_cancellation(
          f"Wrapopt>Averaging{op}", 1 + (op == "Enter"), inputs, (),
          context.context(), self.manager)
      self._answer = Known.read(found[-1].numpy())
    except tf.errors.OpError as e:
      self._answer = f"{type(e).__name__}: {e}"
    except BaseException as e:  # pylint: disable=broad-exception-caught
      self._answer = e

  def join(self):
    self._thread.join(JOIN_SECONDS)
    assert not self._thread.is_alive(), "it waits for ever"
    return self._answer


def integer(x):
  return tf.constant(x, tf.int64)


def double(x):
  return tf.constant(x, tf.float64)


_worker = strategies.sampled_from(WORKERS)
_server = strategies.sampled_from([LEAD, OTHER])
_delta = strategies.sampled_from([0, 0, 0, 0, -1, 1])
_value = strategies.integers(-9, 9)
_least = strategies.integers(1, ALL)
_index = strategies.integers(0, 5)
_count = 0


class Rounds(stateful.RuleBasedStateMachine):
  """Workers that enter, send, arrive, close, end and restore."""

  def __init__(self):
    super().__init__()
    global _count
    _count += 1
    self.names = [f"model {_count} of {s}" for s in ("lead", "other")]
    self.handles = [self._made(name) for name in self.names]
    self.models = [Server(), Server()]
    self.told = {w: Known((-1, 0), False, -1, -1, frozenset(), ())
                 for w in WORKERS}
    self.heard = [*self.told.values()]  # What anybody was told, newest last.
    self.processes = dict.fromkeys(WORKERS, 0)
    # Calls that wait: ("Close", place, min_workers) or ("Enter", place, worker)
    # -> Thread.
    self.waits = {}
    self.read = [None, None]  # The centers that were read last.

  @staticmethod
  def _made(name):
    return raw.wrapopt_averaging_rounds(
        num_workers=ALL, dtypes=N * [tf.float32], sizes=N * [1],
        shared_name=name)

  @property
  def lead(self):
    return self.models[LEAD]

  def run(self, op, server, *args):
    """What an op returns, or the name of its error's class."""
    function = getattr(raw, f"wrapopt_averaging_{op}")
    try:
      return function(self.handles[server], *args)
    except tf.errors.OpError as e:
      return type(e).__name__

  def both(self, op, server, model, *args):
    """Runs an op of one output, which must be that of the model."""
    got = self.run(op, server, *args)
    if not isinstance(got, str):
      got = tuple(got.numpy().tolist()) if got.shape.rank else bool(got)
    assert got == model, (op, args)
    self.settle()
    return got

  def settle(self):
    """Joins the calls that the model answers now."""
    self.join(self.answered())

  def answered(self):
    """What the model answers now: [(key, thread, what it is told)]."""
    for key, thread in list(self.waits.items()):
      op, place, of = key
      known = (self.lead.close(place, of) if op == "Close" else
               self.lead.turn(of, place, MOST_TURNS))
      if known is not None:
        del self.waits[key]
        return [(key, thread, known), *self.answered()]
    return []

  def join(self, answered):
    for key, thread, known in answered:
      assert thread.join() == known, key
      self.hear(known, key[2] if key[0] == "Enter" else None)

  def hear(self, known, worker=None):
    if worker is not None:
      self.told[worker] = known
    self.heard.append(known)

  def at(self, delta):
    """The lead's place, or a wrong one."""
    round_, generation = self.lead.place
    return round_ + delta, generation

  @stateful.invariant()
  def states(self):
    for server, model in enumerate(self.models):
      place, known, numbers, _ = self.run("state", server)
      assert tuple(place.numpy()) == model.place
      assert Known.read(known.numpy()) == model.known()._replace(
          workers=tuple(sorted(model.members)))
      has_center = model.center is not None
      assert list(numbers.numpy()[:3]) == [N * has_center, 0, len(model.staged)]
      if not has_center or model.center is self.read[server]:
        continue
      self.read[server] = model.center
      model.meet("a")  # One that reads.
      for i in range(N):
        _, value = self.run("center", server, "a", i, 9., tf.float32)
        np.testing.assert_allclose(value, [model.center[i]], atol=1e-5)

  def enter(self, worker, place, most=MOST_TURNS, turn_secs=np.inf):
    """Enters, or fails: whether it is told something."""
    for key in [*self.waits]:
      if key[::2] == ("Enter", worker):  # It might come after this one.
        self.cancel(key)
    self.lead.meet(worker)
    self.lead.forget_turns(worker)
    answered = self.answered()
    want = self.lead.turn(worker, place, most)
    got = self.run("enter", LEAD, worker, self.processes[worker], place, most,
                   turn_secs, SOON if want is None else JOIN_SECONDS)
    self.join(answered)
    if want is None:
      assert got == "DeadlineExceededError"
      return False
    assert Known.read(got.known.numpy()) == want and got.turn == want.turn
    self.hear(want, worker)
    return True

  @stateful.rule(worker=_worker, delta=_delta)
  def enters(self, worker, delta):
    self.enter(worker, self.at(delta))

  @stateful.rule(worker=_worker)
  def enters_for_a_short_turn(self, worker):
    if self.enter(worker, self.lead.place, turn_secs=SOON):
      turn = self.told[worker].turn
      # The turn may be over before the next call.
      wait_until(lambda: turn not in Known.read(
          self.run("state", LEAD).known.numpy()).alive, "the turn is over")
      if turn >= 0:
        self.lead.end_turn(turn)
    self.settle()

  @stateful.rule(worker=_worker)
  def another_process(self, worker):
    """It takes the worker's name."""
    if any(key[::2] == ("Enter", worker) for key in self.waits):
      return  # The error depends on which of the two comes first.
    old = self.processes[worker]
    self.enter(worker, (-9, 0))  # It has been there.
    self.processes[worker] += 1
    self.enter(worker, (-9, 0))
    assert self.run("enter", LEAD, worker, old, (-9, 0), 1, 1., 1.) == (
        "InvalidArgumentError")

  @stateful.rule(worker=_worker, server=_server, value=_value,
                 parts=strategies.sampled_from([(0, 1), (0, 1), (0,), (1,)]))
  def stages(self, worker, server, value, parts):
    known, values = self.told[worker], {i: value + 10 * i for i in parts}
    self.both("stage", server, self.models[server].stage(
        worker, known, values), worker, known.texts(), 1., N, parts[0],
              [[float(v)] for v in values.values()])

  @stateful.rule(worker=_worker)
  def arrives(self, worker):
    known, waited = self.told[worker], bool(self.waits)
    want = self.lead.arrive(worker, known)
    accepted, now = self.run("arrive", LEAD, worker, known.texts())
    now = Known.read(now.numpy())
    assert bool(accepted) == want
    # It may be told of what other calls do then, or not.
    assert now.workers == self.lead.known().workers
    assert waited or now == self.lead.known()
    self.settle()
    self.hear(now)

  @stateful.rule(which=_index)
  def follows(self, which):
    known = self.heard[-1 - which % len(self.heard)]
    self.both("follow", OTHER, self.models[OTHER].follow(known), known.texts())

  @stateful.rule(delta=_delta, min_workers=_least)
  def closes(self, delta, min_workers):
    place = self.at(delta)
    want = self.lead.close(place, min_workers)
    secs = JOIN_SECONDS
    if want is None:
      if any(op == "Enter" for op, *_ in self.waits):
        return  # Whether that worker is expected depends on what came first.
      want, secs = self.lead.close(place, min_workers, is_late=True), SOON
    got = self.run("close", LEAD, place, min_workers, secs, np.inf)
    if not isinstance(got, str):
      got = Known.read(got.numpy())
      self.hear(got)
    assert got == want
    self.settle()

  @stateful.rule(which=_index, server=_server)
  def ends(self, which, server):
    known = self.heard[-1 - which % len(self.heard)]
    self.both("outer_step", server, self.models[server].end(known),
              known.texts(), 1., 0., 0)

  @stateful.rule(worker=_worker, round_=strategies.integers(0, 3),
                 stop=strategies.integers(0, 9), sends=_index, value=_value)
  def restores(self, worker, round_, stop, sends, value):
    """A worker gives a center to the servers, the lead last, or stops."""
    if not self.enter(worker, self.lead.place, most=0):
      return
    if self.told[worker].turn < 0:
      return
    place = round_, 1 + max(m.place[1] for m in self.models)
    known = self.told[worker]._replace(place=place)
    values = {i: value + 10 * i for i in range(N)}
    for server in (OTHER, LEAD):
      model, from_generation = self.models[server], self.models[server].place[1]
      if sends & (1 + server) or sends > 3:
        if stop <= 2 * server:
          return
        self.both("stage", server, model.stage(worker, known, values), worker,
                  known.texts(), 1., N, 0, [[float(v)] for v in
                                            values.values()])
      if stop <= 2 * server + 1:
        return
      self.both("restore", server, model.restore(
          worker, from_generation, place), worker, from_generation, place, 0)

  @stateful.rule(worker=_worker, value=_value)
  def finishes(self, worker, value):
    """Whatever others have done, a worker can end a round on both servers."""
    is_good = lambda: self.lead.place == self.models[OTHER].place and all(
        m.center is not None for m in self.models)
    if not is_good():
      self.restores(worker, 7, 99, 5, value)
    if not is_good():
      return  # Somebody has a turn for ever.
    place = self.lead.place
    self.enter(worker, place, most=99)
    if self.told[worker].turn >= 0:
      for server in (OTHER, LEAD):
        self.stages(worker, server, value, (0, 1))
      self.arrives(worker)
    if not self.lead.closed and any(op == "Enter" for op, *_ in self.waits):
      return
    self.closes(0, 1)
    for server in (OTHER, LEAD):
      self.ends(0, server)
      assert self.models[server].place == (place[0] + 1, place[1])

  @stateful.rule(min_workers=_least)
  def closes_in_a_thread(self, min_workers):
    place = self.lead.place
    self.wait(("Close", place, min_workers), [
        integer(place), integer(min_workers), double(np.inf), double(np.inf)])

  @stateful.rule(worker=_worker)
  def enters_in_a_thread(self, worker):
    place, expected = self.lead.place, self.lead.expected
    if (expected is None or worker in expected) and not any(
        op == "Enter" for op, *_ in self.waits) and not any(
            self.lead.owners.get(turn) == worker for turn in self.lead.alive):
      self.wait(("Enter", place, worker), [
          tf.constant(worker), integer(self.processes[worker]), integer(place),
          integer(MOST_TURNS), double(np.inf), double(np.inf)])

  def wait(self, key, inputs):
    if key not in self.waits:
      self.waits[key] = Thread(key[0], [self.handles[LEAD], *inputs])
      self.settle()

  @stateful.rule(which=_index)
  def cancels(self, which):
    if self.waits:
      self.cancel(sorted(self.waits)[which % len(self.waits)])

  def cancel(self, key):
    thread = self.waits.pop(key)
    thread.manager.start_cancel()
    answer = thread.join()
    assert str(answer).startswith("CancelledError"), (key, answer)

  @stateful.rule(server=_server)
  def restarts(self, server):
    """The server loses all that it holds."""
    for _ in range(len(self.waits)):
      self.cancels(0)
    self.destroy(server)
    self.handles[server] = self._made(self.names[server])
    self.models[server] = Server()
    if server == LEAD:
      self.processes = dict.fromkeys(WORKERS, 0)

  def destroy(self, server):
    tf.raw_ops.DestroyResourceOp(resource=self.handles[server])

  def teardown(self):
    self.destroy(LEAD)
    for key, thread in self.waits.items():
      # The latter if it comes only now.
      assert str(thread.join()).startswith((
          "AbortedError", "InvalidArgumentError")), key
    self.destroy(OTHER)


TestRounds = Rounds.TestCase
TestRounds.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=40, deadline=None,
    phases=[hypothesis.Phase.generate])


def test_a_worker_that_stops_anywhere():
  """Of the steps of b, only some are taken; then a ends the round."""
  for stop in range(8):
    machine = Rounds()
    machine.finishes("c", 3)
    steps = [lambda: machine.enters("b", 0),
             lambda: machine.stages("b", OTHER, 7, (0, 1)),
             lambda: machine.stages("b", LEAD, 7, (0,)),
             lambda: machine.stages("b", LEAD, 7, (1,)),
             lambda: machine.arrives("b"), lambda: machine.follows(0),
             lambda: machine.closes(0, 1), lambda: machine.ends(0, OTHER)]
    for step in steps[:stop + 1]:
      step()
      machine.states()
    if stop < 7:
      machine.finishes("a", 5)
    else:
      machine.ends(0, LEAD)
    machine.states()
    # b is a member once it has arrived; a is not once the round is closed.
    assert machine.lead.center == [
        x + (5 if stop < 4 else 6 if stop < 6 else 7) for x in (0, 10)]
    machine.teardown()


def test_another_state_is_seen():
  for name, value in ("newest", 5), ("place", (4, 4)), ("center", [1., 1.]):
    machine = Rounds()
    machine.finishes("c", 3)
    machine.states()
    setattr(machine.lead, name, value)
    with pytest.raises(AssertionError):
      machine.states()
    machine.teardown()
