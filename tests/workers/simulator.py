"""Simulates workers and servers of local training in virtual time.

The workers run the real `_member.py` and `_server.py`, the servers the real
rounds in C++. TensorFlow's session and the arithmetic of the kernels are
models. In some schedules, one worker trains by a real DiLoCo, maybe in
fragments and with exchanges in the background. A seeded
scheduler delays, loses and repeats calls; it kills, stops and restarts workers
and servers. The same seed gives the same schedule:

    python simulator.py --seeds 1000         # Many schedules.
    python simulator.py --seed 17            # One; its faults are shrunk.
    python simulator.py --seed 17 --faults '[[5, "kill_server", 0, 2.0]]'

One thread holds the baton: the thread that waits runs the events until it is
its own turn or that of another.
"""

import argparse
import heapq
import itertools
import json
import math
import os
import random
import sys
import threading
import time
import types

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# pylint: disable=wrong-import-position
import numpy as np
import tensorflow as tf

import _rounds
import codes
import local_parts
import wrapopt
from wrapopt._local import _exchanges
from wrapopt._local import _job_number
from wrapopt._local import _layout
from wrapopt._local import _member
from wrapopt._local import _server
from wrapopt._local import _settings
from wrapopt._local import _training

DEADLINE_SECS = 20.0
# A call of the user may take this time in addition, if a server hangs: a call,
# the end of its session, the last attempts, another session, its call and its
# end, each 5 s.
SLACK_SECS = 30.0
# A call may take this time after Ctrl-C: it ends, and another one that gives up
# a turn, with its session, if the lead hangs.
INTERRUPT_SECS = 12.5
_END_SECS = 1.0
RATE, MOMENTUM = 0.7, 0.9
# Faults end after this number of rounds. Then each worker must count in some.
ROUNDS, QUIET_ROUNDS = 16, 4
MOST_SECS = 40 * DEADLINE_SECS
FAULTS = {
    # The longest time, in seconds.
    "kill_worker": 1.5 * DEADLINE_SECS,
    "stop_worker": 2 * DEADLINE_SECS,
    "kill_server": DEADLINE_SECS,
    "stop_server": 1.5 * DEADLINE_SECS,
    "cut": DEADLINE_SECS,  # A worker's connection with a server.
    "interrupt": 1.0,  # A worker's call, by Ctrl-C.
    "restart_all": DEADLINE_SECS,  # The workers, from checkpoints.
}


class Violation(Exception):
  """An invariant does not hold."""


class Killed(BaseException):
  """Unwinds the thread of a worker that was killed."""


class Leave(Exception):
  """Ends a process. Its worker comes back as another one after some seconds."""

  def __init__(self, secs=math.inf):
    super().__init__()
    self.secs = secs


def error(code, text):
  return tf.compat.v1.errors.exception_type_from_error_code(code)(
      None, None, text)


def mapped(call, *args):
  """Calls a function of `_rounds`, with the errors of TensorFlow."""
  try:
    return call(*args)
  except Exception as e:  # pylint: disable=broad-exception-caught
    if len(e.args) != 2:
      raise
    raise error(*e.args) from None


class Thread:
  """A process in a thread, which runs while it holds the baton."""

  def __init__(self, world, name, run):
    self.world, self.name, self._run = world, name, run
    self.owner = self  # The one of the main thread of the process.
    self.baton = threading.Lock()
    self.baton.acquire()
    self.is_due = False
    self.is_killed = False
    self.interrupts = False  # Its next call, or this one.
    self.interrupted = None  # When that was.
    self.is_over = False
    self.stopped_until = 0.0
    self.stopped_secs = 0.0
    self.skew = 0.0
    self.members = []  # One for each fragment.
    self.took_at = {}  # By Member: when it began to take its center.
    self.tries = 0  # To make members.
    # By Member: (its place, the errors of its codes); by fragment: the place
    # where it does not know if its values count, since the answer was lost.
    self.errors, self.unsure = {}, {}
    self.turn = None  # The last one: (incarnation of the lead, its number).
    # The fragments and names of workers: told last, and told before it entered.
    self.hears_left, self.knows_left = set(), set()

  def start(self):
    thread = threading.Thread(target=self._main, daemon=True)
    thread.start()
    self.resume()

  def _main(self):
    self.baton.acquire()
    world = self.world
    world.current = self
    try:
      if not self.is_killed:
        self._run(self)
    except Killed:
      pass
    except BaseException as e:  # pylint: disable=broad-exception-caught
      world.fail(e)
    self.is_over = True
    if self.is_due:  # It was killed while it ran.
      world.due.remove(self)
    world.pass_on()

  def resume(self):
    """To be called by an event: lets it run."""
    if self.is_over or self.is_due:
      return
    if self.stopped_until > self.world.now and not self.is_killed:
      self.world.at(self.stopped_until, self.resume)
      return
    self.is_due = True
    self.world.due.append(self)

  def block(self):
    """Waits until it is resumed, and runs the events of all until then."""
    world = self.world
    world.run_until(self)
    world.current = self
    if self.is_killed:
      raise Killed()

  def sleep(self, secs):
    world, end = self.world, self.world.now + secs
    while True:
      world.at(end, self.resume)
      self.block()
      if world.now >= end:
        return


class BackgroundCall(Thread):
  """Stands for `_interrupts.Call`: another thread of the same process."""

  def __init__(self, function):
    owner = Session.world.current
    self._function, self._outcome = function, None
    super().__init__(owner.world, owner.name, BackgroundCall._call)
    self.owner, self.skew = owner, owner.skew
    self.hears_left, self.knows_left = owner.hears_left, owner.knows_left
    self.world.background.append(self)
    self.start()

  is_killed = property(lambda self: self.owner.is_killed or self.owner.is_over,
                       lambda *_: None)
  stopped_until = property(lambda self: self.owner.stopped_until,
                           lambda *_: None)

  def _call(self):
    try:
      self._outcome = self._function(), None
    except Exception as e:  # pylint: disable=broad-exception-caught
      self._outcome = None, e
    self.owner.resume()

  def wait(self):
    me = self.owner
    while self._outcome is None:
      if me.interrupts:
        me.interrupts, me.interrupted = False, self.world.now
        raise KeyboardInterrupt()
      me.block()

  def result(self):
    self.wait()
    result, failed = self._outcome
    if failed is not None:
      raise failed
    return result

  def stop(self):
    pass  # Nothing outlives a process.


class Clock:
  """Stands for the module `time`."""

  def __init__(self, world):
    self._world = world

  def monotonic(self):
    return self._world.now

  def time_ns(self):
    return int((1e9 + self._world.now + self._world.current.skew) * 1e9)

  def sleep(self, secs):
    self._world.current.sleep(secs)


class Call:
  """A call of a session that is under way."""

  def __init__(self, worker, server, session, op, feeds):
    self.worker, self.server, self.session = worker, server, session
    fragment, _, self.op = op.rpartition("/")
    self.part, self.feeds = server.parts[int(fragment or 0)], feeds
    self.tries = worker.owner.tries
    self.answer = None  # (value, error).
    self.cancel = None
    self.waits = True  # At the server.

  def end(self, value=None, lost=None):
    if self.answer is None:
      self.answer = value, lost
      self.worker.resume()


class Session:
  """Stands for TensorFlow's session."""

  world = None

  def __init__(self, target, graph, config):
    del graph
    self._server = self.world.servers[int(target.rpartition("s")[2])]
    self._secs = config.operation_timeout_in_ms / 1000
    self._incarnation = None
    self._calls = []

  def close(self):
    world, server = self.world, self._server
    me = world.current
    if me.is_killed:
      raise Killed()
    for call in self._calls:
      world.cancel_later(call)
    self._calls.clear()
    if self._incarnation and (server.is_cut_from(me) or not server.answers):
      me.sleep(self._secs if me.interrupted is None else _END_SECS)

  def run(self, fetches, feeds, options):
    world, server = self.world, self._server
    me = world.current
    if me.is_killed:
      raise Killed()
    if self._incarnation is None:
      if server.is_cut_from(me) or not server.answers:
        me.sleep(self._secs)
        if server.is_cut_from(me) or not server.answers:
          raise error(tf.errors.DEADLINE_EXCEEDED, "Deadline Exceeded")
      self._incarnation = server.incarnation
    call = Call(me, server, self, fetches if isinstance(fetches, str) else
                fetches[0], feeds)
    self._calls = [c for c in self._calls if c.answer is None] + [call]
    world.count_call(call)
    if call.op == "arrive":
      unsure, i = me.owner.unsure, call.part.fragment
      unsure[i] = me.owner.members[i].place
    value, lost = self._wait(call, options.timeout_in_ms / 1000)
    world.count_call(call)
    if call.op == "arrive" and lost is None:
      unsure.pop(i, None)
    if lost is not None:
      raise lost
    i = call.part.fragment
    if call.op == "state" and server.index == 0:
      me.hears_left -= {(i, name) for name in world.names}
      me.hears_left |= {(i, name.decode()) for name in value[3] if value[2][0]}
    elif call.op == "enter":
      me.knows_left |= {(j, name) for j, name in me.hears_left if j == i}
      me.turn = self._incarnation, value[0].split()[3]
    return value

  def _wait(self, call, secs):
    world, me = self.world, self.world.current
    world.send(call)
    timer = world.at(world.now + secs, lambda: call.end(
        lost=error(tf.errors.DEADLINE_EXCEEDED, "Deadline Exceeded")))
    while call.answer is None:
      if me.interrupts:
        me.interrupts, me.interrupted = False, world.now
        if self._server.index == 0:
          me.turn = None  # It may not ask a lead that may have stopped.
        raise KeyboardInterrupt()
      me.block()
    timer[2] = None
    if call.answer[1] is not None:
      world.cancel_later(call)
    return call.answer

  @property
  def incarnation(self):
    return self._incarnation


class Known:
  """The encoding of the kernels."""

  @staticmethod
  def with_values(texts):
    """The members of a round that have values: those without come twice."""
    names = [x.decode() for x in texts[1:]]
    return tuple(sorted(x for x in names if names.count(x) == 1))

  @staticmethod
  def read(texts):
    return _rounds.Known([int(x) for x in texts[0].split()],
                         list(dict.fromkeys(x.decode() for x in texts[1:])))


class Server:
  """A server, with a part of each fragment."""

  def __init__(self, world, index, plan):
    self.world, self.index = world, index
    self.incarnation = 0
    self.is_up = False
    self.stopped_until = 0.0
    self.cut = {}  # Until when, by worker.
    self.calls = {}  # Those that may have an answer, in order: keys.
    self.parts = [Part(self, i, plan.num_workers)
                  for i in range(plan.fragments)]

  def start(self):
    self.incarnation += 1
    self.is_up = True
    for part in self.parts:
      part.start()

  def kill(self):
    self.is_up = False
    for call in list(self.calls):
      self.world.at(self.world.now + self.world.delay(), lambda call=call:
                    call.end(lost=tf.errors.UnavailableError(
                        None, None, "Socket closed")))
    self.calls.clear()

  @property
  def answers(self):
    return self.is_up and self.stopped_until <= self.world.now

  def is_cut_from(self, worker):
    return self.cut.get(worker.name, 0.0) > self.world.now

  def deliver(self, call, replies=True):
    """An event: a call arrives."""
    world = self.world
    if not self.is_up:
      return call.end(lost=tf.errors.UnavailableError(
          None, None, "Connection refused"))
    if not self.answers:
      return world.at(self.stopped_until, lambda: self.deliver(call, replies))
    if call.op in _NAMING and (world.is_replaced(call.worker) or
                               call.tries < call.worker.owner.tries):
      # The next process of a worker starts later than such a call arrives.
      return None
    if call.session.incarnation != self.incarnation:
      return call.end(
          lost=error(tf.errors.ABORTED, "Session handle is not found"))
    def reply(value, lost):
      call.waits = False
      if replies:
        self._reply(call, value, lost)
    self.calls[call] = None
    call.part.take(call, reply)

  def _reply(self, call, value, lost):
    world = self.world
    if call.answer is not None:
      return
    incarnation = self.incarnation
    def arrive():
      if self.is_cut_from(call.worker):
        return world.at(self.cut[call.worker.name], arrive)
      if incarnation == self.incarnation and self.is_up:
        self.calls.pop(call, None)
        call.end(value, lost)
    world.at(world.now + world.delay(), arrive)


class Part:
  """A fragment on a server: the rounds in C++, and a model of the kernels."""

  def __init__(self, server, fragment, num_workers):
    self.world, self.server, self.index = server.world, server, server.index
    self.fragment, self._num_workers = fragment, num_workers
    self._ring = math.inf

  @property
  def oracle(self):
    return self.world.oracles[self.fragment]

  def start(self):
    self.rounds = _rounds.Server("sim", self._num_workers)
    self.id = self.world.random_number()
    self.job = 0
    self.values, self.velocities = [], []
    self.mean, self.weight = [], 0.0
    self.opened = [self.world.now] * 2  # When the last round began, and this.
    self._ring = math.inf

  def take(self, call, reply):
    """A call arrives."""
    self.rounds.set_now(self.world.now)
    try:
      value = getattr(self, "_" + call.op)(call, reply, **call.feeds)
    except tf.errors.OpError as e:
      reply(None, e)
    else:
      if value is not NotImplemented:
        reply(value, None)
    self._watch_timer()
    if self.index == 0:
      self._check_waits()

  def _check_waits(self):
    """A round does not wait for workers that have left."""
    world, known = self.world, self.rounds.known()
    if int(known.texts[0].split()[2]) or not known.workers or not any(
        call.op == "close" and call.part is self and call.waits and
        call.feeds["place"] == known.place for call in self.server.calls):
      return
    missing = world.names - {*known.workers}
    if missing and all(world.must_know_left(w, known.workers, self.fragment)
                       for w in missing):
      raise Violation(f"round {known.place} of {known.workers} waits for "
                      f"{missing}, who have left")

  def _watch_timer(self):
    due = self.rounds.next_ring()
    if due < self._ring:
      self._ring = due
      incarnation = self.server.incarnation
      self.world.at(due, lambda: self._ring_due(incarnation))

  def _ring_due(self, incarnation):
    server = self.server
    if incarnation != server.incarnation or not server.is_up:
      return
    if not server.answers:
      self.world.at(server.stopped_until, lambda: self._ring_due(incarnation))
      return
    self._ring = math.inf
    self.rounds.set_now(self.world.now)
    self.rounds.ring_due()
    self._watch_timer()

  # The kernels.

  def _add_to_mean(self):
    for weight, values in self.rounds.take_values():
      self.weight += weight
      if not self.mean:
        self.mean = [np.array(v) for v in values]
        continue
      for mean, value in zip(self.mean, values):
        mean += weight / self.weight * (value - mean)

  def _start(self, call, reply, answer, **kwargs):
    def done(code, text, known):
      if code:
        return reply(None, error(code, text))
      try:
        value = answer(known)
      except tf.errors.OpError as e:
        return reply(None, e)
      return reply(value, None)
    call.cancel = self.rounds.start(done=done, **kwargs)
    return NotImplemented

  def _state(self, call, reply, **_):
    known = self.rounds.known()
    numbers = (len(self.values), len(self.velocities), self.rounds.staged(),
               self.id, self.job)
    left = [name.encode() for name in self.rounds.left()]
    return known.place, known.texts, numbers, left

  def _join(self, call, reply, *, worker, process, resumes):
    return mapped(self.rounds.join, worker, process, resumes)

  def _enter(self, call, reply, *, worker, process, place, most_turns,
             turn_secs, timeout_secs):
    what = _rounds.For.TURN if most_turns else _rounds.For.RESTORE
    return self._start(
        call, reply, lambda known: known.texts, what=what,
        place=_rounds.Place(*place), worker=worker, process=process,
        most_turns=most_turns, turn_secs=turn_secs, timeout_secs=timeout_secs)

  def _close(self, call, reply, *, place, min_workers, timeout_secs,
             grace_secs, **_):
    return self._start(
        call, reply, lambda known: known.texts, what=_rounds.For.CLOSE,
        place=_rounds.Place(*place), min_workers=min_workers,
        grace_secs=grace_secs, timeout_secs=timeout_secs)

  def _center(self, call, reply, *, worker, timeout_secs, first, count,
              what="values", **_):
    def read(_):
      values = getattr(self, what)
      if not 0 <= first < first + count <= len(values):
        raise error(tf.errors.FAILED_PRECONDITION,
                    f"index {first} of {len(values)}")
      return (self.rounds.known().place,
              np.concatenate(values[first:first + count]))
    return self._start(call, reply, read, what=_rounds.For.READ,
                       worker=worker, timeout_secs=timeout_secs)

  def _codes(self, call, reply, **kwargs):
    return self._center(call, reply, what="codes", **kwargs)

  def _stage(self, call, reply, *, worker, known, weight, count, first,
             uint8=None, **feeds):
    known = Known.read(known)
    restores = known.place[1] > self.rounds.known().place[1]
    if not restores and not self.values:
      raise error(tf.errors.FAILED_PRECONDITION,
                  "must have a center before values are sent")
    values = [feeds[key].copy() for key in ("float32", "float64")
              if key in feeds]
    if uint8 is not None:
      values = [codes.decode(uint8, self.values[first].size, self.world.dtype)]
    accepted = self.rounds.stage(worker, known, weight, count, first, values)
    self._add_to_mean()
    return accepted

  def _arrive(self, call, reply, *, worker, known, **_):
    accepted, now = mapped(self.rounds.arrive, worker, Known.read(known))
    self._add_to_mean()
    return accepted, now.texts

  def _release(self, call, reply, *, worker, turn, **_):
    return self.rounds.release(worker, int(turn))

  def _leave(self, call, reply, *, worker, process):
    return self.rounds.leave(worker, process)

  def _follow(self, call, reply, *, known, **_):
    accepted = self.rounds.follow(Known.read(known))
    self._add_to_mean()
    return accepted

  def _step(self, call, reply, *, known, learning_rate, momentum, **_):
    texts, known = known, Known.read(known)
    if mapped(self.rounds.check_closed, known):
      self._add_to_mean()
      if not self.values or self.weight and len(self.mean) != len(self.values):
        raise error(tf.errors.FAILED_PRECONDITION,
                    "must have a center and a mean before the step")
      dtype = self.world.dtype
      for vectors in self.velocities, self.errors:
        vectors[:] = vectors or [np.zeros_like(v) for v in self.values]
      self.codes = []
      for i, mean in enumerate(self.mean):
        way = -mean if dtype else self.values[i] - mean
        self.velocities[i] = momentum * self.velocities[i] + way
        update = -learning_rate * (way + momentum * self.velocities[i])
        if dtype:
          code, update, self.errors[i] = codes.encode_values(
              np.float32(update), np.float32(0), self.errors[i], dtype)
          self.codes.append(code)
        self.values[i] = self.values[i] + update
      self.mean, self.weight = [], 0.0
      mapped(self.rounds.next)
      self.oracle.stepped(self, known.place, Known.with_values(texts))
    return self.rounds.known().place

  def _restore(self, call, reply, *, worker, from_generation, place, job, **_):
    before = self.rounds.known().place
    restored, values = mapped(self.rounds.restore, worker,
                              int(from_generation), _rounds.Place(*place))
    if restored:
      self.mean, self.weight, self.job = [], 0.0, job
    if values:
      n = self.world.num_pieces(self.index)
      ends = 2 * n if self.world.dtype else n
      self.values, self.errors, self.velocities, self.codes = (
          values[:n], values[n:ends], values[ends:], [])
    if restored:
      self.oracle.restored(self, before, bool(values))
    return restored


class Oracle:
  """Computes each center of a fragment by the rule, from what was meant."""

  def __init__(self, world, fragment):
    self._world, self._fragment = world, fragment
    self.meant = {}  # (worker, round): [(vectors, weight, errors, thread)].
    self._held = {}  # (place, server): (center, velocity, errors).
    self._lives = {}  # The same: the incarnation of the server.
    # (round, server): by the bytes of its centers, the first center of each.
    self._of_round = {}
    self._jobs = {}  # place: the job of the center.
    self._restored_at = 0.0
    self._was_saved = set()  # The first centers of checkpoints.
    self._chosen = {}  # place: which of `meant` each member may have sent.
    # The place of the round that ended: its members that had values.
    self.members = {}

  def mean_to_send(self, thread, vectors, weight):
    """Notes values, or what their codes tell, and what these lose."""
    world, member, lost = self._world, thread.members[self._fragment], None
    if world.dtype and vectors is not None:
      errors = member.errors or [np.zeros_like(v) for v in vectors]
      parts = [codes.encode_values(
          *(world.part(x, i) for x in (vectors, member.center, errors)),
          world.dtype)[1:] for i in range(world.num_servers)]
      vectors, lost = map(world.whole, zip(*parts))
    self.meant.setdefault((thread.name, member.place[0]), []).append(
        (vectors, weight, lost, thread))

  def check_errors(self, thread):
    """A worker takes errors over if the values that have them count."""
    if len(thread.members) <= self._fragment:
      return
    member = thread.members[self._fragment]
    place, old = thread.errors.get(member, (None, ()))
    thread.errors[member] = member.place, member.errors
    if place in (None, member.place) or not self._world.dtype:
      right = [old]
    else:
      meant = self.meant.get((thread.name, place[0]), [])
      workers = self.members.get(place, ())
      counted = {choice[workers.index(thread.name)]
                 for choice in self._chosen.get(place, ())
                 if thread.name in workers}
      right = [lost for i, (_, _, lost, by) in enumerate(meant)
               if by is thread and i in counted] or [old]
      if thread.unsure.get(self._fragment) == place or (
          member.place[1] != place[1]):  # Or the round has begun again.
        right = [old, *(x[2] for x in meant if x[3] is thread)]
    if not any(np.allclose(member.errors or [0], x or [0], rtol=0, atol=1e-5)
               for x in right):
      raise Violation(f"{thread.name} keeps errors {member.errors} from "
                      f"{place} to {member.place}, which should be one of "
                      f"{right}")

  def _record(self, server, velocity, first):
    lost = np.concatenate(server.errors or [
        np.zeros_like(v) for v in server.values])
    place = server.rounds.known().place
    center = np.concatenate(server.values)
    key = place, server.index
    # One that was lost with its server, and that nobody holds, is forgotten.
    if key in self._held and not np.array_equal(
        self._held[key][0], center) and (
            self._lives[key] == server.server.incarnation or
            self._world.is_held(place, self._fragment)):
      raise Violation(f"server {server.index} has two centers of {place}")
    self._held[key] = center, velocity, lost
    self._lives[key] = server.server.incarnation
    centers = self._of_round.setdefault((place[0], server.index), {})
    centers.setdefault(center.tobytes(), first)
    self._jobs[place] = server.job
    server.opened = [server.opened[1], self._world.now]

  def restored(self, server, before, has_values):
    place = server.rounds.known().place
    center = np.concatenate(server.values)
    first = self._first(place[0], server.index, center)
    has_stepped = (before[0] - 1, before[1]) in self.members
    if place[0] < before[0] and has_stepped and max(
        self._world.lost_at, self._restored_at) < server.opened[0]:
      raise Violation(f"server {server.index} goes from {before} to {place}, "
                      "and none was lost")
    if place[0] > 0 and first is None:
      raise Violation(f"server {server.index} gets a center of round "
                      f"{place[0]} that no round had")
    self._restored_at = self._world.now
    velocity = np.zeros_like(center)
    if not has_values:
      velocity = self._held[before, server.index][1]
    elif server.velocities:
      velocity = np.concatenate(server.velocities)
    self._record(server, velocity, first or center.tobytes())

  def _first(self, round_, server, center):
    return self._of_round.get((round_, server), {}).get(center.tobytes())

  def stepped(self, server, place, workers):
    center, velocity, lost = self._held[place, server.index]
    if self.members.setdefault(place, workers) != workers:
      raise Violation(f"round {place} has two sets of members: "
                      f"{self.members[place]}, {workers}")
    got, right = np.concatenate(server.values), {}
    left = np.concatenate(server.errors)
    is_coded = self._world.dtype is not None
    near = {"rtol": 1e-5, "atol": 1e-5} if is_coded else {
        "rtol": 1e-9, "atol": 1e-9}
    sent = [[(i, x) for i, x in enumerate(self.meant.get((w, place[0]), ()))
             if x[0] is not None] for w in workers]
    if not workers and np.array_equal([got, left], [center, lost]):
      right[()] = velocity
    for choice in itertools.product(*sent) if workers else ():
      values = [self._world.part(x[0], server.index) for _, x in choice]
      mean = np.average(values, axis=0, weights=[x[1] for _, x in choice])
      way = -mean if is_coded else center - mean
      new = MOMENTUM * velocity + way
      update = -RATE * (way + MOMENTUM * new)
      if np.allclose(got + left, center + lost + update, **near):
        right[tuple(i for i, _ in choice)] = new
    chosen = self._chosen.setdefault(place, set(right)) & set(right)
    if not chosen:
      raise Violation(
          f"server {server.index} has a center of {workers} in {place} that is "
          "not the rule's, or other values than the other servers")
    self._chosen[place] = chosen
    self._record(server, right[next(iter(chosen))],
                 self._first(place[0], server.index, center))

  def check_center(self, member, before):
    for index in range(self._world.num_servers):
      held = self._held.get((member.place, index))
      if held is None or not np.array_equal(
          held[0], self._world.part(member.center, index)):
        raise Violation(f"a worker holds a center of {member.place} that "
                        f"server {index} did not have")
    # The older one of two jobs goes on, if clocks agree.
    first = self._first_of(member.place)
    job = self._jobs[member.place]
    if before in self._jobs and first not in (
        self._first_of(before), *self._was_saved):
      was, agree = self._jobs[before], not self._world.is_skewed
      if agree and before[0] > 0 and (was > 0 or was >= job and job < 0):
        raise Violation(f"{member._name} of job {was} takes the center of "
                        f"another, {job}: {before}, {member.place}")

  def saved(self, rng):
    """(round, center, velocities, errors) of a checkpoint, or None."""
    servers = range(self._world.num_servers)
    places = [p for p in self._jobs
              if all((p, s) in self._held for s in servers)]
    if not places:
      return None
    first = self._first_of(places[-1])
    place = rng.choice([p for p in places if self._first_of(p) == first][-3:])
    self._was_saved.add(first)
    return place[0], *(
        self._world.whole([self._held[place, s][i] for s in servers])
        for i in range(3))

  def is_of_checkpoint(self, place):
    """Whether a center goes back to a checkpoint, and not to the first one."""
    return place in self._jobs and self._first_of(place) in self._was_saved

  def _first_of(self, place):
    return self._first(place[0], 0, self._held[place, 0][0])


def generation(texts):
  return int(texts[0].split()[1])


class Plan:
  """The settings of a schedule, which its seed alone decides."""

  def __init__(self, seed, faults=None):
    rng = random.Random(seed)
    self.seed = seed
    self.num_servers = rng.choice([1, 2, 2, 3])
    self.num_workers = rng.choice([1, 2, 3, 3])
    # The worker that trains by a real DiLoCo, in each tenth schedule.
    self.trains = seed % 10 == 9 and f"w{seed // 10 % self.num_workers}"
    self.fragments, self.overlap_steps = random.Random(f"{seed}").choice(
        [(1, 0), (1, 1), (2, 0), (2, 1), (3, 1)]) if self.trains else (1, 0)
    self.dtype = random.Random(f"{seed} dtype").choice(
        [None, None, *codes.DTYPES])
    self.min_workers = rng.choice([1, 1, self.num_workers])
    self.grace = rng.choice([math.inf, math.inf, 0.0, 2.0])
    self.most_pushes = rng.choice([1, 4])
    # Those that start first; all that are restarted resume.
    self.resume = rng.choice([True, True, False])
    self.loss = rng.choice([0.0, 0.0, 0.005, 0.02])
    self.not_finite = rng.choice([0.0, 0.0, 0.1])  # Of values.
    self.repeat = rng.choice([0.0, 0.02])
    self.skew = rng.choice([0.0, 100.0])
    late = rng.choice([0.002, 0.002, 0.7 * DEADLINE_SECS])
    self.server_starts = [rng.uniform(0, late)
                          for _ in range(self.num_servers)]
    self.worker_starts = [rng.uniform(0, late)
                          for _ in range(self.num_workers)]
    self.train_secs = [rng.choice([0.5, 0.5, 2.0, 1.2 * DEADLINE_SECS])
                       for _ in range(self.num_workers)]
    # Some workers leave: {name: (after how many rounds, for how long, how they
    # come back, the faults soon after)}.
    self.leaves = {}
    for i in range(rng.choice([0, 0, self.num_workers])):
      if rng.random() < 0.6:
        self.leaves[f"w{i}"] = (
            rng.randrange(1, 10), rng.choice([0.5, 5.0, 1.5 * DEADLINE_SECS]),
            rng.choice(["call", "process", "never"][:3 if i else 2]),
            [[rng.randrange(40), "kill_server", 0, 1.0],
             [rng.randrange(40), "kill_worker", rng.randrange(12), 1.0],
            ][:rng.choice([0, 0, 1, 2])])
    # (op, which of its calls, kind, seconds): the worker that calls.
    self.targeted = [
        (rng.choice(["restore", "restore", "step", "arrive", "close",
                     "center"]),
         rng.randrange(1, 20), rng.choice(["stop_worker", "kill_worker"]),
         rng.uniform(0, FAULTS["stop_worker"]))
        for _ in range(rng.choice([0, 0, 2]))]
    # A worker stops in a restore, for longer than its turn.
    if rng.random() < 0.2:
      self.targeted.append(("stage to restore", rng.randrange(1, 5),
                            "stop_worker", rng.uniform(0.3, 1.5) *
                            DEADLINE_SECS))
    self.faults = []  # (at which call, kind, target, seconds), sorted.
    at = 0
    per_round = self.num_workers * (6 + 6 * self.num_servers)
    for _ in range(rng.choice([0, 1, 2, 4, 8])):
      at += rng.randrange(1, 4 * per_round)
      kind = rng.choice(list(FAULTS))
      self.faults.append([
          at, kind, rng.randrange(12),
          rng.choice([0.05, 1.0, rng.uniform(0, FAULTS[kind])])])
      if rng.random() < 0.3:  # Two at a time.
        kind = rng.choice(list(FAULTS))
        self.faults.append([at + rng.randrange(3), kind, rng.randrange(12),
                            rng.uniform(0, FAULTS[kind])])
    if faults is not None:
      self.faults = [list(f) for f in faults]


class World:
  """One schedule."""

  def __init__(self, plan, verbose=False):
    self._plan, self._verbose = plan, verbose
    self._rng = random.Random(~plan.seed)
    self.now = 0.0
    self._events, self._numbers = [], itertools.count()
    self.due = []
    self.current = None
    self._main = Thread(self, "main", None)
    self.violation = None
    self.calls = 0
    self._calls_of = {}  # By op.
    self._faults = sorted(plan.faults)
    self._server_trouble = [0.0]  # The times at which it ends.
    self._worker_trouble = [0.0]
    self.num_servers = plan.num_servers
    self.dtype = plan.dtype
    self.variable = (_VARIABLE._replace(dtype=tf.float32) if plan.dtype else
                     _VARIABLE)
    self.layout = _layout.Layout([self.variable], plan.num_servers, plan.dtype)
    self.servers = [Server(self, i, plan) for i in range(plan.num_servers)]
    self.oracles = [Oracle(self, i) for i in range(plan.fragments)]
    self._workers = {}
    self.background = []  # BackgroundCalls.
    self.lost_at = self._all_lost_at = -1.0  # A server, all centers.
    self.is_skewed = plan.skew > 0
    self.names = {f"w{i}" for i in range(plan.num_workers)}
    self._leaves = dict(plan.leaves)
    self._has_left = {}  # By name: the incarnation of the lead that knows it.
    self._gone = set()  # Those that do not come back.
    self._quiet_since = None
    self._quiet_rounds = {}
    self.round = 0
    self._ends = False
    self.rounds_done = 0

  # Events.

  def at(self, when, do):
    event = [when, next(self._numbers), do]
    heapq.heappush(self._events, event)
    return event

  def fail(self, e):
    if self.violation is None:
      self.violation = e
    self._ends = True

  def _step(self):
    """Runs one event."""
    if not self._events:
      self.fail(Violation("nothing will ever happen"))
      return
    when, _, do = heapq.heappop(self._events)
    if do is None:
      return
    self.now = max(self.now, when)
    try:
      do()
    except Exception as e:  # pylint: disable=broad-exception-caught
      self.fail(e)

  def run_until(self, thread):
    while True:
      if self._ends and thread is not self._main:
        self._hand_to(self._main, thread)
        return
      if thread.is_due:
        thread.is_due = False
        self.due.remove(thread)
        return
      if self.due:
        other = self.due.pop(0)
        other.is_due = False
        self._hand_to(other, thread)
        return
      self._step()

  def pass_on(self):
    """A thread that ends gives the baton away."""
    while True:
      if self._ends or not self._events and not self.due:
        self._main.baton.release()
        return
      if self.due:
        other = self.due.pop(0)
        other.is_due = False
        other.baton.release()
        return
      self._step()

  def _hand_to(self, other, thread):
    if other is thread:
      return
    other.baton.release()
    thread.baton.acquire()

  # The network.

  def random_number(self):
    return self._rng.getrandbits(62) + 1

  def delay(self):
    x = self._rng.random()
    if x < 0.9:
      return 0.0005 + 0.002 * x
    return 0.1 if x < 0.98 else 1.0

  def _say(self, *text):
    if self._verbose:
      print(f"{self.now:9.3f}", *text)

  def send(self, call):
    x, server = self._rng.random(), call.server
    arrival = self.now + self.delay()
    lossy = self._quiet_since is None
    # TCP sends again what a cut has lost.
    arrival = max(arrival, server.cut.get(call.worker.name, 0.0))
    lost = lossy and x < self._plan.loss
    if lost:
      # The connection is lost. The server may get the call, now or later.
      self.trouble(0.0)
      self.at(arrival + self.delay(), lambda: call.end(
          lost=tf.errors.UnavailableError(None, None, "Connection reset")))
      if self._rng.random() < 0.5:
        return
    self.at(arrival, lambda: server.deliver(call, not lost))
    if lossy and call.op in _REPEATABLE and (
        self._rng.random() < self._plan.repeat):
      self.at(arrival + 10 * self.delay(),
              lambda: server.deliver(call, False))

  def cancel_later(self, call):
    if self._rng.random() < 0.9:
      incarnation = call.server.incarnation
      def cancel():
        server = call.server
        if call.cancel and server.answers and (
            server.incarnation == incarnation):
          call.part.rounds.set_now(self.now)
          call.cancel()
      self.at(self.now + self.delay(), cancel)

  # Faults.

  def trouble(self, secs, of_servers=True):
    (self._server_trouble if of_servers else self._worker_trouble).append(
        self.now + secs)

  def count_call(self, call):
    self._say(call.worker.name, "->", call.server.index, call.op,
              "" if call.answer is None else call.answer)
    self.calls += 1
    if call.answer is None and self._quiet_since is None:
      kind_of_call = call.op
      if call.op == "stage" and call.server.is_up and (
          generation(call.feeds["known"]) >
          generation(call.part.rounds.known().texts)):
        kind_of_call = "stage to restore"
      n = self._calls_of[kind_of_call] = self._calls_of.get(
          kind_of_call, 0) + 1
      for op, which, kind, secs in self._plan.targeted:
        if (op, which) == (kind_of_call, n):
          self._do(call, kind, 0, secs)
    while self._faults and self._faults[0][0] <= self.calls:
      self._do(call, *self._faults.pop(0)[1:])
    me = call.worker
    if me.is_killed:
      raise Killed()
    if me.stopped_until > self.now:
      me.sleep(me.stopped_until - self.now)

  def _do(self, call, kind, target, secs):
    self._say("FAULT", kind, target, secs)
    # Half of the targets are who calls and who is called.
    names = list(self._workers)
    name = call.worker.name if target < 6 else names[target % len(names)]
    server = (call.server if target % 2 else
              self.servers[target // 2 % len(self.servers)])
    worker = self._workers[name]
    if kind == "kill_worker":
      self._kill(worker, secs, None)
    elif kind == "restart_all":
      saved = self._saved()
      for worker in self._workers.values():
        self._kill(worker, self._rng.uniform(0, secs), saved)
      for server in [[], [server], self.servers][target % 3]:
        if server.is_up:
          self._lose(server)
          self.at(self.now + secs, server.start)
      self.trouble(secs)
    elif kind == "stop_worker":
      if self.alive(worker) and worker.stopped_until <= self.now:
        worker.stopped_until = self.now + secs
        worker.stopped_secs += secs
        self.trouble(secs, False)
    elif kind == "interrupt":
      worker.interrupts = True
      worker.resume()
    elif kind == "cut":
      server.cut[name] = self.now + secs
      self.trouble(secs)
    elif not server.is_up:
      pass
    elif kind == "kill_server":
      self._lose(server)
      self.trouble(secs)
      self.at(self.now + secs, server.start)
    else:
      server.stopped_until = self.now + secs
      self.trouble(secs)

  def _kill(self, worker, secs, saved):
    if not self.alive(worker):
      return
    worker.is_killed = True
    for thread in [worker, *self.background]:
      thread.owner is not worker or thread.is_due or thread.resume()
    self.trouble(secs, False)
    self.at(self.now + secs + 0.001,
            lambda: self._start_worker(worker.name, True, saved))

  def _lose(self, server):
    server.kill()
    self.lost_at = self.now
    if not all(any(
        s.is_up and s.parts[i].rounds.known().place[0] > 0
        for s in self.servers) for i in range(self._plan.fragments)):
      self._all_lost_at = self.now

  def _saved(self):
    """For each fragment (round, center, velocities); None if one has none."""
    saved = [oracle.saved(self._rng) for oracle in self.oracles]
    return None if None in saved else saved

  def is_replaced(self, worker):
    return self._workers[worker.name] is not worker.owner

  def is_held(self, place, fragment):
    """Whether a worker holds the center of a place."""
    return any(m.place == place for w in self._workers.values()
               for m in w.members[fragment:fragment + 1])

  def alive(self, worker):
    return not worker.is_killed and not worker.is_over

  # Workers.

  def num_pieces(self, server):
    return len(self.layout.pieces[server])

  def part(self, vectors, server):
    return np.concatenate([vectors[p.group][p.begin:p.end]
                           for p in self.layout.pieces[server]])

  def whole(self, parts):
    """The vectors with these parts, one of each server."""
    vectors = self.layout.empty()
    for part, pieces in zip(parts, self.layout.pieces):
      for p in pieces:
        vectors[p.group][p.begin:p.end] = part[:p.end - p.begin]
        part = part[p.end - p.begin:]
    return vectors

  def _start_worker(self, name, resumes=True, saved=None):
    if self._ends:
      return
    self._has_left.pop(name, None)
    self._gone.discard(name)
    thread = Thread(self, name, self._run_worker)
    thread.resumes, thread.saved = resumes, saved
    thread.skew = self._rng.uniform(-1, 1) * self._plan.skew
    self._workers[name] = thread
    thread.start()

  def _run_worker(self, me):
    try:
      self._work(me)
    except Leave as e:
      if e.secs < math.inf:
        self.at(self.now + e.secs, lambda: self._start_worker(me.name))

  def _work(self, me):
    plan, rng = self._plan, self._rng
    index = int(me.name[1:])
    trainer = (Training if me.name == plan.trains else Trainer)(me, plan)
    initial = [[np.array([rng.random() for _ in x], x.dtype)
                for x in self.layout.empty()] for _ in self.oracles]
    while not self._try(me, lambda: trainer.start(initial, me.saved)):
      pass
    for member, saved in zip(me.members, me.saved or ()):
      if member.place[0] < saved[0]:
        raise Violation(f"{me.name} with a checkpoint of round {saved[0]} "
                        f"starts in {member.place}")
    rounds = 0
    while self._quiet_rounds is not None:
      if me.name in self._leaves and rounds >= self._leaves[me.name][0]:
        self._leave(me, trainer)
      rounds += 1
      secs = plan.train_secs[index] if self._quiet_since is None else 0.5
      me.sleep(secs * (0.5 + rng.random()))
      i = min(range(plan.fragments), key=lambda i: me.members[i].place[0])
      member, oracle = me.members[i], self.oracles[i]
      vectors = [c + np.array([rng.uniform(-1, 1) for _ in c], c.dtype)
                 for c in member.center]
      if self._quiet_since is None and rng.random() < plan.not_finite:
        vectors = None
      weight = float(1 + index)
      before = member.place
      oracle.mean_to_send(me, vectors, weight)
      report = self._try(me, lambda: trainer.sync(i, vectors, weight))
      if not report:
        self._try(me, lambda: (
            trainer.restore(me.saved) if me.saved else trainer.start(None)))
        continue
      if report.counted and not any(
          me.name in workers
          for place, workers in oracle.members.items()
          if place[0] == before[0]):
        raise Violation(f"{me.name} is said to count in {before}")
      self._note_round(me, report)

  def _leave(self, me, trainer):
    incarnation = self.servers[0].incarnation
    for worker in self._workers.values():  # It may have left and come back.
      for known in worker.hears_left, worker.knows_left:
        known -= {(i, me.name) for i in range(self._plan.fragments)}
    if not self._try(me, trainer.leave):
      return
    _, secs, way, faults = self._leaves.pop(me.name)
    if self._quiet_since is None:
      self._faults = sorted(
          self._faults + [[self.calls + f[0], *f[1:]] for f in faults])
    self._has_left[me.name] = incarnation
    if way == "never":
      self._gone.add(me.name)
      raise Leave()
    if way == "process":
      raise Leave(secs)
    me.sleep(secs)
    self._has_left.pop(me.name, None)

  def must_know_left(self, name, members, fragment):
    """Whether the lead must know that a worker has left."""
    return name in self._has_left and (
        self._has_left[name] == self.servers[0].incarnation or any(
            (fragment, name) in self._workers[w].knows_left for w in members
            if w in self._workers))

  def _note_round(self, me, report):
    if self._quiet_rounds is None:
      return
    self.round = max(self.round, report.round)
    if self._quiet_since is None:
      return
    if report.counted or self._plan.grace < math.inf:
      counts = self._quiet_rounds
      counts[me.name] = counts.get(me.name, 0) + 1
      if all(counts.get(name, 0) >= QUIET_ROUNDS
             for name in self.names - self._gone):
        self._quiet_rounds = None  # All is well.

  def _try(self, me, call):
    """Calls a method of Member, and checks how it ends."""
    begun, stopped = self.now, me.stopped_secs
    before = [(m, m.place) for m in me.members]
    failed = result = None
    try:
      result = call() or True
    except tf.errors.OpError as e:
      failed = e
    except KeyboardInterrupt:
      self._say(me.name, "interrupted")
      took, me.interrupted = self.now - me.interrupted, None
      took -= me.stopped_secs - stopped
      if took > INTERRUPT_SECS:
        raise Violation(f"{me.name} ends {took:.1f} s after Ctrl-C") from None
      lead = self.servers[0]
      if me.turn and max(self._server_trouble) < begun and (
          lead.incarnation == me.turn[0] and
          me.turn[1] in lead.parts[0].rounds.known().texts[0].split()[5:]):
        raise Violation(f"{me.name} keeps its turn after Ctrl-C") from None
      if self._rng.random() < 0.5:
        raise Leave(1.0) from None
      return self._try(me, call)
    places = [m.place for m in me.members]
    for oracle in self.oracles:
      oracle.check_errors(me)
    self._say(me.name, "done", *places, failed or "")
    if me.interrupted is not None:
      raise Violation(f"Ctrl-C does not end a call of {me.name}")
    took = self.now - begun - (me.stopped_secs - stopped)
    if took > len(places) * (DEADLINE_SECS + SLACK_SECS):
      raise Violation(f"{me.name} waited {took:.1f} s; {failed}") from failed
    for m, was in before:
      if was and m.place[0] < was[0]:
        raise Violation(f"{me.name} went from {was} to {m.place}")
    if failed is None:
      before = dict(before)
      for m, oracle in zip(me.members, self.oracles):
        if m.place != before.get(m):
          me.took_at[m] = begun
        oracle.check_center(m, before.get(m))
      return result
    if any(x in str(failed) for x in ("begun anew", "another job")) and (
        self._may_begin_anew(me, begun) or
        any(oracle.is_of_checkpoint(place)
            for oracle, place in zip(self.oracles, places))):
      raise Leave(1.0) from failed
    if not isinstance(failed, tf.errors.DeadlineExceededError):
      raise Violation(f"{me.name}: {failed!r}") from failed
    if "restart" not in str(failed) and "start" not in str(failed) and (
        "restore" not in str(failed)):
      raise Violation(f"says not what to do: {failed}") from failed
    if not self._may_fail(me, begun, failed):
      raise Violation(f"{me.name} has no reason for: {failed}") from failed

  def _is_held(self, fragment):
    """Whether a worker holds its center of the latest round."""
    latest = max(s.parts[fragment].rounds.known().place[0]
                 for s in self.servers if s.is_up)
    return any(
        self.alive(w) and w.name not in self._has_left and
        m.place and m.place[0] >= latest
        for w in self._workers.values()
        for m in w.members[fragment:fragment + 1])

  def _may_begin_anew(self, me, begun):
    """Whether others may have begun anew without this worker's center."""
    took = [me.took_at.get(m, 0.0) for m in me.members if m.place]
    if not took or self._all_lost_at < min(took):
      return False
    # It was in no call, had trained nothing, or waited for a session and a call
    # that hung.
    return self._all_lost_at < begun or any(
        m.place and m.place[0] == 0 for m in me.members) or (
        max(self._server_trouble + self._worker_trouble) > self.now - 10)

  def _may_fail(self, worker, begun, failed):
    if self._quiet_rounds is None:
      return True
    if "have lost their center" in str(failed) and not all(
        map(self._is_held, range(self._plan.fragments))):
      # No worker knows better: do what the error says.
      worker.saved = worker.saved or self._saved()
      if worker.saved and self._rng.random() < 0.5:
        return True
      for server in self.servers:
        if server.is_up:
          self._lose(server)
          server.start()
      self.trouble(0.0)
      return True
    unknown = [w for w in sorted(self._gone)
               if not all(self.must_know_left(w, self.names, i)
                          for i in range(self._plan.fragments))]
    if "but needs" in str(failed) and unknown:
      # The lead was lost before it has told others.
      for name in unknown:
        self._start_worker(name)
      self.trouble(0.0, False)  # Others wait for them at the same time.
      return True
    # A fault that ended long ago is no reason.
    recently = self.now - DEADLINE_SECS / 2 + 2
    if any(end > max(recently, begun) for end in self._server_trouble):
      return True
    workers = self._plan.min_workers
    if "gave no turn" in str(failed) or "have lost" in str(failed):
      # A worker that stops in its turn keeps it for as long as a deadline. A
      # worker that holds the center may be stopped, or train.
      workers = 2
    if workers == 1:
      return False
    # Slow workers and those that are gone may be too many.
    slow = any(secs > DEADLINE_SECS / 3 for secs in self._plan.train_secs)
    return slow or any(end > begun - DEADLINE_SECS for end in (
        self._worker_trouble + self._server_trouble))

  # The schedule.

  def run(self):
    """Returns None, or what is wrong."""
    plan = self._plan
    clock = Clock(self)
    _member.time = _server.time = _job_number.time = clock
    _job_number.secrets = types.SimpleNamespace(randbits=self._rng.getrandbits)
    _server._Session, Session.world = Session, self
    _training._server = types.SimpleNamespace(
        Server=SimulatedServer, check_addresses=_server.check_addresses)
    _training._member = types.SimpleNamespace(
        Member=_new_member, RoundArguments=_member.RoundArguments)
    _server._interrupts = types.SimpleNamespace(run=self._run_call)
    _exchanges._interrupts = types.SimpleNamespace(Call=BackgroundCall)
    # One after another, so that a seed makes one schedule.
    _member._interrupts = types.SimpleNamespace(
        at_once=lambda functions: [function() for function in functions])
    for server, when in zip(self.servers, plan.server_starts):
      self.at(when, server.start)
      self._server_trouble.append(when)
    for i, when in enumerate(plan.worker_starts):
      self.at(when, lambda i=i: self._start_worker(f"w{i}", plan.resume))
      self._worker_trouble.append(when)
    self.current = self._main
    self.at(0, self._watch)
    try:
      while not self._ends:
        self._main.block()
      self._check_end()
    except Exception as e:  # pylint: disable=broad-exception-caught
      self.fail(e)
    for worker in [*self._workers.values(), *self.background]:
      if not worker.is_over:
        worker.owner.is_killed = True
        worker.baton.release()
        self._main.baton.acquire()
    return self.violation

  def _run_call(self, call, cancel):
    """A call stays in the worker's thread, which holds the baton."""
    try:
      return call()
    except KeyboardInterrupt:
      cancel()
      raise

  def _watch(self):
    """An event, each second."""
    if self._quiet_since is None:
      past = max(self._server_trouble + self._worker_trouble) <= self.now
      if past and (self.round >= ROUNDS and not self._faults or
                   self.now > MOST_SECS):
        self._faults.clear()
        self._quiet_since = self.now
    elif self._quiet_rounds is not None:
      slowest = max(self._plan.train_secs) * 1.5 + DEADLINE_SECS
      if self.now > self._quiet_since + 4 * QUIET_ROUNDS * slowest:
        self.fail(Violation(f"rounds do not go on: {self._quiet_rounds} since "
                            f"{self._quiet_since:.0f}"))
    elif all(w.is_over for w in self._workers.values()):
      self.at(self.now + 2 * DEADLINE_SECS, self._end)
      return
    self.at(self.now + 1.0, self._watch)

  def _end(self):
    self._ends = True

  def _check_end(self):
    if self.violation is not None:
      return
    self.rounds_done = self.round
    for part in itertools.chain(*(s.parts for s in self.servers)):
      alive = part.rounds.known().texts[0].split()[5:]
      if part.rounds.staged():
        raise Violation(f"server {part.index} holds "
                        f"{part.rounds.staged()} workers' values")
      if part.index == 0 and alive:
        raise Violation(f"turns {alive} live on")


class _Same(dict):

  def __missing__(self, key):
    return key


class SimulatedServer(_server.Server):
  """The real one without a graph."""

  def _build(self, name, *_):
    prefix = name.partition("/")[2] + "/"  # The fragment.
    self._fed = _Same()
    for op in ("state", "arrive"):
      setattr(self, "_" + op, [prefix + op])
    self._enter = types.SimpleNamespace(known=prefix + "enter")
    for op in ("join", "release", "leave", "follow", "close", "step",
               "restore"):
      setattr(self, "_" + op, prefix + op)
    self._stage = dict.fromkeys(
        [None, tf.float32, tf.float64, tf.uint8], prefix + "stage")
    self.look = lambda: f"{self.address} is simulated"
    self._center = {(tf.float32, "center"): [prefix + "center"],
                    (tf.float64, "center"): [prefix + "center"],
                    (tf.uint8, "codes"): [prefix + "codes"]}


class Trainer:
  """A worker that takes part in rounds by the Members of its fragments."""

  def __init__(self, me, plan):
    self._me, self._plan, self._members = me, plan, me.members

  def _make(self):
    """Makes the Members, again if their start has failed."""
    me, plan, layout = self._me, self._plan, self._me.world.layout
    resumes, me.resumes = me.resumes, True  # If this fails.
    me.members.clear()
    me.tries += 1
    for i in range(plan.fragments):
      job = _job_number.Job(resumes)
      servers = [
          SimulatedServer(f"s{s}", _settings.name_of("sim", i), me.name, "",
                          plan.num_workers, layout, s, job)
          for s in range(plan.num_servers)]
      me.members.append(_member.Member(
          me.name, servers, layout, _member.RoundArguments(
              plan.min_workers, DEADLINE_SECS, plan.grace, plan.most_pushes,
              RATE, MOMENTUM)))

  def start(self, initial, saved=None):
    begins = initial is not None
    if begins:
      self._make()
    for i, m in enumerate(self._members):
      m.start(initial[i] if begins else None, saved and saved[i])
      begins = begins and np.array_equal(initial[i], m.center)

  def sync(self, i, vectors, weight):
    return self._members[i].sync(vectors, weight)

  def restore(self, saved):
    for m, of_fragment in zip(self._members, saved):
      m.restore(*of_fragment)

  def leave(self):
    for m in self._members:
      m.leave()


class DiLoCo(wrapopt.DiLoCo):

  def _read_checkpoint(self, saved):
    return saved


class Training:
  """A worker that trains variables by DiLoCo, with the methods of a Trainer."""

  def __init__(self, me, plan):
    self._me, self._plan, self._local = me, plan, None
    v = me.world.variable
    self._variables = [tf.Variable(tf.zeros(v.shape, v.dtype))
                       for _ in range(plan.fragments)]

  def start(self, initial, saved=None):
    if initial is None:
      self._local.take_center()
      self._is_first = True
      return self._check()
    me, plan = self._me, self._plan
    for v, (x,) in zip(self._variables, initial):
      v.assign(x)
    resumes, me.resumes = me.resumes, True  # If this fails.
    me.members.clear()
    me.tries += 1
    self._is_first = True
    self._local = DiLoCo(
        self._variables, [f"s{i}" for i in range(plan.num_servers)], me.name,
        plan.num_workers, sync_every=2 * plan.fragments,
        min_workers=plan.min_workers, round_timeout_secs=DEADLINE_SECS,
        grace_secs=plan.grace if plan.grace < math.inf else None,
        weight="examples", outer_learning_rate=RATE, outer_momentum=MOMENTUM,
        dtype=plan.dtype, most_pushes=plan.most_pushes, name="sim",
        resume=resumes, checkpoint=saved, fragments=plan.fragments,
        overlap_steps=plan.overlap_steps)
    self._check()

  def _check(self):
    if not all(np.array_equal(v.numpy(), m.center[0]) for v, m in zip(
        self._variables, self._me.members)):
      raise Violation(f"{self._me.name} has not the center in its variables")

  def sync(self, i, vectors, weight):
    local, before = self._local, self._local.report
    weight -= local._exchanges.fragments[i].examples
    if self._is_first:  # Else an error came between.
      self._is_first = False
      v, (c,) = self._variables[i], self._me.members[i].center
      v.assign(c * np.nan if vectors is None else
               vectors[0] + (v.numpy() - c))
      if not local_parts.steps_of(local):
        local.step(weight - 1)
        weight = 1
    else:
      weight = 0
    try:
      local.step(weight)
      if local._exchanges._exchange:
        self._me.sleep(self._me.world.delay())
        local.step(0)
    except tf.errors.InvalidArgumentError as e:
      if "No worker of round" not in e.message:
        raise
    else:
      self._check()
      self._is_first = True
    if local.report is before:  # It took the center instead.
      round_ = self._me.members[i].place[0]
      return _member.Report(round_, False, (), (), 0.0, 0, 0)
    return local.report

  def restore(self, saved):
    local = self._local
    rounds, *vectors = zip(*saved)
    tensors = {"round": rounds,
               "variables": [v.write() for v in local._described]}
    for what, of in zip(("center", "velocity", "error"), vectors):
      tensors[f"{what}_0"] = np.concatenate([x for x, in of])
    local._restore_from_tensors(
        {key: tf.constant(x) for key, x in tensors.items()})
    self.start(None)

  def leave(self):
    self._local.leave()


def _new_member(*args):
  member = _member.Member(*args)
  Session.world.current.members.append(member)
  return member


_REPEATABLE = ("state", "join", "arrive", "release", "leave", "follow", "step",
               "restore")
_NAMING = ("join", "enter", "leave")  # These tell the process of a name.
_VARIABLE = _settings.Variable("v", [5], tf.float64, False)  # Of a fragment.


def run(seed, faults=None, verbose=False):
  world = World(Plan(seed, faults), verbose)
  return world.run(), world


def shrink(seed):
  """The fewest faults with which the seed fails."""
  faults = Plan(seed).faults
  i = 0
  while i < len(faults):
    fewer = faults[:i] + faults[i + 1:]
    if run(seed, fewer)[0] is not None:
      faults = fewer
    else:
      i += 1
  return faults


def command(seed):
  """What repeats a schedule that fails, with the fewest faults."""
  return (f"python tests/workers/simulator.py --seed {seed} --faults "
          f"'{json.dumps(shrink(seed))}'")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seed", type=int)
  parser.add_argument("--first", type=int, default=0)
  parser.add_argument("--seeds", type=int, default=100)
  parser.add_argument("--most", type=int, default=5, help="of failures")
  parser.add_argument("--faults", type=json.loads)
  parser.add_argument("--verbose", action="store_true")
  args = parser.parse_args()
  tf.get_logger().setLevel("ERROR")
  if args.seed is not None:
    faults = args.faults
    if faults is None and run(args.seed)[0] is not None:
      faults = shrink(args.seed)
    violation, world = run(args.seed, faults, args.verbose)
    print(vars(world._plan))
    print(f"--seed {args.seed} --faults '{json.dumps(faults)}': {violation!r}")
    return violation is not None
  failed = rounds = 0
  began = time.monotonic()
  for n, seed in enumerate(range(args.first, args.first + args.seeds)):
    violation, world = run(seed)
    rounds += world.round
    if violation is not None:
      failed += 1
      print(f"seed {seed}, after {n + 1} schedules: {violation!r}"[:600],
            flush=True)
      if failed >= args.most:
        break
  secs = time.monotonic() - began
  print(f"{n + 1} schedules, {rounds} rounds, {failed} failed, {secs:.1f} s")
  return failed > 0


if __name__ == "__main__":
  sys.exit(main())
