"""A worker's part in the rounds of servers that hold a center."""

import functools
import time
import typing

import numpy as np
import tensorflow as tf

from wrapopt._local import _codes
from wrapopt._local import _interrupts
from wrapopt._local import _server

_POLL_SECS = 0.1
# After its deadline, a worker that slept looks for the center for this time. A
# wait in it takes a second.
_LAST_SECS = 2.0
_LEAST_SECS = 1.0


class RoundArguments(typing.NamedTuple):
  """How rounds end: see `LocalTraining`."""
  min_workers: int
  round_timeout_secs: float
  grace_secs: float
  most_pushes: int
  learning_rate: float
  momentum: float


class Report(typing.NamedTuple):
  """What became of a round.

  Attributes:
    round: The number of the round that is open now.
    counted: Whether this worker's values are part of the last round.
    workers: The names of its members, if this worker waited for its end.
    not_finite: The names of workers whose values did not count, since they were
      not finite.
    secs: The time it took.
    sent: The number of bytes of values that this worker has sent.
    received: The number of bytes of values that it has received.
    fragment: The index of the fragment of the variables.
  """
  round: int
  counted: bool
  workers: tuple
  not_finite: tuple
  secs: float
  sent: int
  received: int
  fragment: int = 0


def _is_same(a, b):
  """Whether two centers are the same."""
  return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b))


class Member:
  """One worker.

  The first server leads: see cc/protocols/rounds.h.

  Attributes:
    place: (round, generation) of the center that this worker holds, or None.
    center: That center: a vector for each group.
    errors: What the codes of this worker's values have lost, and the next code
      adds: a vector for each group, or none for zeros.
  """

  def __init__(self, name, servers, layout, arguments):
    self._name = name
    self._servers = servers
    self._lead, *self._others = servers
    self._layout = layout
    self._arguments = arguments
    self.place = None
    self.center = None
    self.errors = ()
    # (codes of values, what they lose); the place and that of those sent last,
    # which are its errors once they count; and of those, if the lead has them.
    self._codes = self._sent = self._counted = None
    self._has_taken = False  # A center of the servers.
    # Of a center from a checkpoint: velocities and errors of the servers, and
    # (round, errors) of this worker.
    self._velocities = self._lost = ()
    self._saved_errors = None
    self._have_left = ()  # The names of workers.

  def start(self, initial, saved=None):
    """Takes the center; `initial` becomes it if no server has one.

    Args:
      initial: A vector for each group of the center.
      saved: The arguments of `restore`, of a checkpoint; or None.
    """
    def take():
      if saved:
        self._lead.join()  # The servers may take its center.
      place = self._settle(initial)
      self._lead.join()
      return self._pull(place)
    if saved:
      self._hold(*saved)
    self._until_deadline(take)

  def sync(self, vectors, weight):
    """Takes part in a round, and takes the center that it ends with.

    Args:
      vectors: A vector for each group: this worker's values; None if these do
        not count.
      weight: Their weight in the mean.

    Returns:
      A Report.
    """
    began, before = time.monotonic(), self.place
    sent, received = self._bytes()
    self._codes, self._closed = None, (before, (), ())
    self._until_deadline(lambda: self._take_part(vectors, weight))
    # After a restart of a server, the round may have had other members.
    (round_, generation), members, not_finite = self._closed
    if self.place != (round_ + 1, generation):
      members = not_finite = ()
    counted = self._name in members
    now = self._bytes()
    return Report(self.place[0], counted, members, not_finite,
                  time.monotonic() - began, now[0] - sent, now[1] - received)

  def _bytes(self):
    """Of values: those sent, and those received."""
    return (sum(s.sent for s in self._servers),
            sum(s.received for s in self._servers))

  def read(self, what="center"):
    """Reads the "center", or its "velocities" or "errors".

    Returns:
      place, a vector for each group.
    """
    def read():
      place = self._settle()
      vectors = self._layout.empty()
      for vector in vectors:
        vector.fill(0)
      return self._read(place, vectors, what) and (place, vectors)
    return self._until_deadline(read)

  def restore(self, round_, center, velocities, lost=(), errors=()):
    """The servers take a center, unless they have a later one.

    If a server has lost its part of a later one, they wait for a worker that
    holds it, as in `_settle`.

    Args:
      round_: Its round.
      center: A vector for each group.
      velocities: The same, or none.
      lost: The same: the errors of the servers.
      errors: The same of this worker, which are those of that round.
    """
    if self.place[0] <= round_:
      self._hold(round_, center, velocities, lost, errors)
    self.start(None)

  def is_current(self):
    """Whether no round has ended since this worker took the center."""
    place, = self._until_deadline(lambda: [self._settle()])
    return place == self.place

  def leave(self):
    """Lets rounds go on without this worker, until it takes part again."""
    self._until_deadline(lambda: self._lead.leave() or True)
    self.close()

  def close(self):
    for server in self._servers:
      server.close()

  def _until_deadline(self, attempt):
    """Calls `attempt` until it returns a true value, which is returned.

    The last attempts begin after the deadline: a worker that was stopped takes
    the center that the others have made, maybe in new sessions.
    """
    secs = self._arguments.round_timeout_secs
    self._begun = time.monotonic()
    self._deadline = self._begun + secs
    for server in self._servers:
      server.deadline = self._deadline
    failed, end = None, None
    while True:
      now = time.monotonic()
      if now > self._deadline:
        end = end or now + _LAST_SECS
        if now > end:
          break
      try:
        done = attempt()
        if done:
          return done
        end = None  # The servers have moved on meanwhile.
      except tf.errors.DeadlineExceededError as e:
        failed = e
      except _server.LOST as e:
        if not isinstance(failed, tf.errors.DeadlineExceededError):
          failed = e
      time.sleep(_POLL_SECS)
    if isinstance(failed, tf.errors.DeadlineExceededError):
      raise failed
    raise tf.errors.DeadlineExceededError(None, None, (
        f"Worker '{self._name}' found no center on the servers within {secs} "
        f"seconds. {'; '.join(s.look() for s in self._servers)}. Start the "
        "servers that are missing, correct their addresses, or wait longer; if "
        "they have lost it, restore a checkpoint (`checkpoint=`)."
        + (f" Last error: {failed.message}" if failed else ""))) from failed

  def _left(self):
    """The seconds that a wait may take."""
    return max(self._deadline - time.monotonic(), _LEAST_SECS)

  def _take_part(self, vectors, weight):
    place = self._settle()
    if place != self.place:
      held = self.place, self.center
      if not self._pull(place):
        return False
      (round_, _), center = held
      # After a restart of a server, the round may begin again.
      return place[0] != round_ or not _is_same(center, self.center)
    arrays = self._encode(vectors)
    # A turn is long enough to send values, also after the deadline.
    known = self._lead.enter(
        place, self._arguments.most_pushes, self._left(),
        max(self._left(), self._arguments.round_timeout_secs / 4))
    if known.turn >= 0:
      pushed = False
      try:
        pushed = self._push(known, arrays, weight)
      finally:
        if not pushed:
          self._lead.release(known.turn)
      if not pushed:
        return False
    # `_left`: waiting for a turn, behind a worker that stopped, may have taken
    # the time that the round would wait for that worker.
    known = self._lead.wait_for_close(
        place, self._arguments.min_workers, self._left(),
        self._arguments.grace_secs)
    place = None
    if self._name in known.workers:  # The lead's answer may have been lost.
      self._counted = self._sent
    if known.workers or known.without_values:
      self._closed = known.place, known.workers, known.without_values
      place = self._step(known)
    place = place or self._settle()
    return place[0] > self.place[0] and self._pull(place)

  def _encode(self, vectors):
    """What to send of vectors: for each server, an array for each span.

    Errors that this leaves are those of the worker once its values count. If
    it begins again from the same center, it sends the same.
    """
    if vectors is None:
      return [()] * len(self._servers)
    dtype = self._layout.travels
    if not dtype:
      return [server.parts(vectors) for server in self._servers]
    if not self._codes:
      errors = self.errors or [np.zeros_like(c) for c in self.center]
      codes, left = [], [np.empty_like(c) for c in self.center]
      for server in self._servers:
        codes.append([])
        for g, begin, end in server.spans:
          codes[-1].append(_codes.encode(
              *(x[g][begin:end] for x in (vectors, self.center, errors)), dtype,
              left[g][begin:end]))
      self._codes = codes, left
    return self._codes[0]

  def _push(self, known, arrays, weight):
    """Sends the values to all servers, then arrives: whether it succeeded."""
    for server in self._others:
      if not server.follow(known):
        return False
    # At once: workers that send to one server after another would wait for
    # each other, while the links of the other servers are idle.
    if not all(_interrupts.at_once(
        functools.partial(server.stage, known, weight, of_server)
        for server, of_server in zip(self._servers, arrays))):
      return False
    self._sent = self._codes and (self.place, self._codes[1])
    accepted, known = self._lead.arrive(known)
    if accepted:
      self._counted = self._sent
      for server in self._others:
        server.follow(known)
    return accepted

  def _step(self, known):
    """Lets the servers take the outer step, the lead last.

    Returns:
      The place that is open on all of them, or None if places differ.
    """
    outer = self._arguments.learning_rate, self._arguments.momentum
    places = [server.step(known, *outer)
              for server in [*self._others, self._lead]]
    return places[0] if len(set(places)) == 1 else None

  def _pull(self, place):
    vectors = self._layout.empty()
    follows = self._layout.travels and self.place == (place[0] - 1, place[1])
    if not self._read(place, vectors, held=self.center if follows else None):
      return False
    if self.place == (place[0], -1) and not _is_same(vectors, self.center):
      # A checkpoint of another center of the same round is restored.
      states, _ = self._states()
      if all(s.place == place for s in states):
        self._restore(states, self.place, self.center, self._lost,
                      self._velocities)
      return False
    if self._sent and self._sent[0] != place:
      if self._counted and self._sent[0][1] == place[1]:
        self.errors = self._sent[1]
      self._sent = self._counted = None
    if self._saved_errors and self._saved_errors[0] == place[0]:
      self.errors = self._saved_errors[1]  # They are not in a later center.
    self.place, self.center, self._saved_errors = place, vectors, None
    self._velocities = self._lost = ()
    self._has_taken = True
    self._lead.take()
    return True

  def _hold(self, round_, center, velocities, lost=(), errors=()):
    """Holds the center of a checkpoint, as if this worker had taken it."""
    self.place = round_, -1
    self.center, self._velocities, self._lost = center, velocities, lost
    self._saved_errors = errors and (round_, errors)

  def _read(self, place, vectors, what="center", held=None):
    return all(_interrupts.at_once(
        functools.partial(s.read, place, vectors, self._left(), what, held)
        for s in self._servers))

  def _states(self):
    """The states of all servers at one time, and what the lead knows then."""
    before = None
    while True:
      states, (known, *_) = zip(*[
          s.state(self._has_taken) for s in self._servers])
      # States only move on: equal ones did not change in between.
      if not self._others or states == before:
        for server, state in zip(self._servers, states):
          server.check(state)
        if states[0].values:  # Otherwise it knows nobody.
          self._tell_left(states[0].left)
        return states, known
      before = states

  def _tell_left(self, left):
    """Tells a lead that was restarted who has left, except who came back."""
    forgotten = sorted({*self._have_left} - {*left})
    self._have_left = (
        *left, *(w for w in forgotten if self._lead.tell_left(w)))

  def _settle(self, initial=None):
    """Waits until all servers have the center of one place: returns it.

    The round of the place is not less than that of this worker's center, which
    the servers take if it is of the latest round. If one has a part of a later
    round, a worker that holds its center may come: for half the deadline, so
    that a round fits in the other half.

    Args:
      initial: The center if nothing was trained yet, or None.
    """
    while True:
      states, known = self._states()
      lead, *others = states
      latest = max(s.place[0] for s in states)
      if lead.is_anew and self.place[0] <= lead.place[0]:
        raise tf.errors.InvalidArgumentError(None, None, (
            f"Worker '{self._name}' must hold the latest center of its job, "
            f"got round {self.place[0]}: the servers have lost it, and are in "
            f"round {lead.place[0]} of a job that others have begun anew. "
            "Restart this worker to take that center; or end the others, drop "
            "the job and restore a checkpoint."))
      if all(s.values and s.place == lead.place for s in states) and (
          self.place is None or self.place[0] <= latest):
        return lead.place
      round_, generation = lead.place
      now = time.monotonic()
      if lead.closed and all(
          s.values and s.place in (lead.place, (round_ + 1, generation))
          for s in others):
        # Its members have stopped between two servers.
        self._step(known)
        continue
      if self.place is None:
        # The lead gets its part last: another server has lost its own, or is
        # not that of the other workers.
        if latest <= 0 and initial is not None and not lead.values and not any(
            s.of_other_job for s in others):
          self._restore(states, (0, -1), initial)
          continue
      elif self.place[0] >= latest or now > (
          self._begun + self._arguments.round_timeout_secs / 2):
        self._restore(states, self.place, self.center, self._lost,
                      self._velocities)
        continue
      if now > self._deadline:
        raise tf.errors.DeadlineExceededError(None, None, (
            "Some servers have lost their center, and no worker that holds it "
            f"came within {self._arguments.round_timeout_secs} seconds: start "
            "a worker that has it again, give the servers that the other "
            "workers have, or restore a checkpoint (`checkpoint=`). Open "
            "rounds: "
            + ", ".join(
                f"{server.address}: {s.place[0]}"
                for server, s in zip(self._servers, states))))
      time.sleep(_POLL_SECS)

  def _restore(self, states, held, center, lost=(), velocities=()):
    """Begins a generation on all servers, with a center where it is needed.

    Args:
      states: Those of the servers, in which something is wrong.
      held: (round, generation) of `center`.
      center: A vector for each group.
      lost: The same, the servers' errors; or none.
      velocities: The same, or none.
    """
    # A worker that stops in its turn holds up no other for long; one that is
    # only slow may go on after its turn, if no other has restored meanwhile.
    known = self._lead.enter(states[0].place, 0, self._left(),
                             self._arguments.round_timeout_secs / 4)
    if known.turn < 0:
      return
    try:
      if self._states()[0] == states:
        self._restore_in_turn(known, states, held, center, lost, velocities)
    finally:
      self._lead.release(known.turn)

  def _restore_in_turn(self, known, states, held, center, lost, velocities):
    # Later than that of a worker whose servers have lost all.
    generation = max(time.time_ns() // 10**6,
                     1 + max(s.place[1] for s in states))
    place = held[0], generation
    self._lead.replace(held[0] < max(s.place[0] for s in states), held[1] == -1)
    known = known.at(place)
    for server, state in reversed(list(zip(self._servers, states))):
      if not (state.values and state.place == held):
        server.stage_center(known, center, lost, velocities)
        if self._arguments.momentum and held[0] > 0 and not velocities:
          tf.get_logger().warning(
              "The outer momentum of server %s restarts in round %d.",
              server.address, held[0])
      try:
        if not server.restore(state.place[1], place):
          return
      except tf.errors.FailedPreconditionError:
        return  # A round has ended meanwhile, and dropped what was sent.
