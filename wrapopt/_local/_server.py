"""A worker's session with one server of a center."""

import collections
import itertools
import math
import socket
import time
import typing

import numpy as np
import tensorflow as tf

from wrapopt._loader import ops as raw
from wrapopt._local import _codes
from wrapopt._local import _interrupts
from wrapopt._local import _layout

tf1 = tf.compat.v1

# A server that was lost, or restarted and knows the session no more.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError,
        tf.errors.CancelledError)

# A server that is stopped answers no call. Calls that do not wait for other
# workers end after this time, or at the worker's deadline.
_CALL_SECS = 60.0

# After its end, a wait for other workers gets this time for its answer. Also
# the least time for a call.
_ANSWER_SECS = 5.0

# Of calls that begin and end a session, or until the deadline. A session with a
# server that is gone waits for it when it ends.
_SESSION_SECS = 5.0
_LEAST_SESSION_SECS = 2.0

# A call with values takes about this time, so that other workers' calls get
# through a slow link in between; and it carries at most and at first so many
# bytes, but one piece at least.
_VALUES_SECS = 0.5
_MOST_BYTES = 16 * 2**20
_FIRST_BYTES = 256 * 2**10

# A frame of HTTP/2.
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def check_addresses(servers):
  """Raises an error if it is no list of addresses."""
  if isinstance(servers, str) or not servers or not all(
      isinstance(s, str) and s for s in servers):
    raise ValueError("`servers` must be a list of addresses such as "
                     f"'host:port', got {servers!r}.")
  if len({*servers}) < len(servers):
    raise ValueError("`servers` must name each server once, got "
                     f"{list(servers)!r}.")


class Known(typing.NamedTuple):
  """What the server that leads tells, as the ops encode it.

  Attributes:
    texts: The vector of strings, for other ops.
    place: (round, generation); round -1 without a center.
    closed: Whether the round takes no more values.
    turn: The worker's turn, or -1.
    workers: The names of the members of the round that have values.
    without_values: Those of the others.
  """
  texts: typing.Any
  place: tuple
  closed: bool
  turn: int
  workers: tuple
  without_values: tuple

  @classmethod
  def read(cls, texts):
    round_, generation, closed, turn, *_ = map(int, texts[0].split())
    named = collections.Counter(name.decode() for name in texts[1:])
    return cls(texts, (round_, generation), bool(closed), turn,
               tuple(name for name, times in named.items() if times == 1),
               tuple(name for name, times in named.items() if times > 1))

  def at(self, place):
    """The same of another place."""
    *_, closed, turn, turns = self.texts[0].decode().split(maxsplit=4)
    numbers = " ".join(map(str, [*place, closed, turn, turns]))
    return self.read([numbers.encode(), *self.texts[1:]])


class State(typing.NamedTuple):
  """What a server holds.

  Attributes:
    place: As of Known, also `closed` and `workers`.
    values: The number of vectors of the center; 0 without one.
    velocities: The number of velocities.
    of_other_job: Whether the center is of a job that another server leads, or
      that this one led before it was restarted.
    is_anew: Whether its job has begun anew, without this worker's center.
    left: The names of the workers that have left; of the server that leads.
  """
  place: tuple
  closed: bool
  workers: tuple
  values: int
  velocities: int
  of_other_job: bool
  is_anew: bool
  left: tuple


class _Pace:
  """How many bytes a call carries in one direction, by the last calls."""

  def __init__(self):
    self._most = _FIRST_BYTES

  def pieces(self, size):
    """The number of pieces of that size in the next call."""
    return max(1, int(self._most) // size)

  def note(self, size, secs):
    """Notes a call's bytes and its time. Short calls tell little of a link."""
    if 2 * size > self._most or secs > _VALUES_SECS:
      self._most = min(2 * max(self._most, size), _MOST_BYTES,
                       size * _VALUES_SECS / max(secs, 1e-6))


class _Session(tf.compat.v1.Session):
  """A session that does not search the texts of errors for names of ops.

  The text of an error may have all that a call has sent. Then TensorFlow's
  search takes minutes, in which no other thread of Python runs.
  """

  def _do_call(self, fn, *args):
    return fn(*args)


def open_session(address, graph, secs=_SESSION_SECS):
  # The server is alone in its cluster: no other task delays the session.
  config = tf1.ConfigProto(isolate_session_state=False)
  config.operation_timeout_in_ms = int(secs * 1000)
  return _Session(address if "://" in address else f"grpc://{address}", graph,
                  config)


class Server:
  """The ops of one server's rounds. Each method is one call to the server.

  If the server is lost, a call raises one of `LOST`, and the next call begins
  another session. DeadlineExceededError is the rounds' own.

  Attributes:
    address: That of the server.
    deadline: Until when a call may wait for the server, as of
      `time.monotonic`.
    spans: Its parts of the groups: Pieces, each of all that the server has of
      a group. A worker sends an array for each.
    sent: The bytes of values that it has got.
    received: The bytes of values that it has sent.
  """

  def __init__(self, address, name, worker, settings, num_workers, layout,
               index, job):
    self.address = address
    self.deadline = math.inf
    self._worker = worker
    self._layout = layout
    self._leads = index == 0
    self._job = job
    self._pieces = layout.pieces[index]
    self._stepped = layout.stepped[index]
    of_groups = [list(of_group) for _, of_group in itertools.groupby(
        self._pieces, lambda p: p.group)]
    self.spans = [p[0]._replace(end=p[-1].end) for p in of_groups]
    self._stepped_spans = sum(
        p[0] in self._pieces[:self._stepped] for p in of_groups)
    self.sent = self.received = 0
    self._up, self._down = _Pace(), _Pace()
    self._session = None
    self._is_interrupted = False
    with tf.Graph().as_default() as self._graph, tf.device("/cpu:0"):
      self._build(name, settings, num_workers)

  def _build(self, name, settings, num_workers):
    """Makes the ops: one graph, so that the session compiles it once."""
    groups = [p.group for p in self._pieces]
    rounds = raw.wrapopt_averaging_rounds(
        num_workers=num_workers, shared_name=name, settings=settings,
        travels=self._layout.travels or "",
        dtypes=[self._layout.center_dtypes[g] for g in groups],
        sizes=[p.end - p.begin for p in self._pieces])
    fed = self._fed = {
        key: tf1.placeholder(dtype, shape, name=key)
        for key, dtype, shape in [
            ("place", tf.int64, [2]), ("known", tf.string, [None]),
            ("most_turns", tf.int64, []), ("count", tf.int64, []),
            ("first", tf.int64, []), ("min_workers", tf.int64, []),
            ("from_generation", tf.int64, []), ("weight", tf.float64, []),
            ("timeout_secs", tf.float64, []), ("turn_secs", tf.float64, []),
            ("grace_secs", tf.float64, []), ("learning_rate", tf.float64, []),
            ("momentum", tf.float64, []), ("worker", tf.string, []),
            ("process", tf.int64, []), ("turn", tf.int64, []),
            ("job", tf.int64, []), ("resumes", tf.bool, [])]}
    get = lambda *keys: {key: fed[key] for key in keys}
    self._state = raw.wrapopt_averaging_state(rounds)
    self._join = raw.wrapopt_averaging_join(
        rounds, **get("worker", "process", "resumes"))
    self._enter = raw.wrapopt_averaging_enter(rounds, **get(
        "worker", "process", "place", "most_turns", "turn_secs",
        "timeout_secs"))
    self._arrive = raw.wrapopt_averaging_arrive(
        rounds, **get("worker", "known"))
    self._release = raw.wrapopt_averaging_release(
        rounds, **get("worker", "turn"))
    self._leave = raw.wrapopt_averaging_leave(
        rounds, **get("worker", "process"))
    self._follow = raw.wrapopt_averaging_follow(rounds, fed["known"])
    self._close = raw.wrapopt_averaging_close(rounds, **get(
        "place", "min_workers", "timeout_secs", "grace_secs"))
    self._step = raw.wrapopt_averaging_outer_step(
        rounds, **get("known", "learning_rate", "momentum"),
        stepped=tf.constant(self._stepped, tf.int64))
    self._restore = raw.wrapopt_averaging_restore(
        rounds, **get("worker", "from_generation", "place", "job"))
    stage = lambda *values: raw.wrapopt_averaging_stage(
        rounds, **get("worker", "known", "weight", "count", "first"),
        values=values)
    self._stage, self._center = {None: stage()}, {}
    for dtype in {*self._layout.dtypes, *self._layout.center_dtypes, tf.uint8}:
      value = fed[dtype.name] = tf1.placeholder(dtype, [None])
      self._stage[dtype] = stage(value)
      for what in (["codes"] if dtype == tf.uint8 else
                   ["center", "velocities", "errors"] *
                   (dtype in self._layout.center_dtypes)):
        self._center[dtype, what] = raw.wrapopt_averaging_center(
            rounds, index=fed["first"], T=dtype, what=what,
            **get("worker", "count", "timeout_secs"))

  def connect(self):
    """Begins a session, after the first or a lost one."""
    self.close()
    self._is_interrupted = False
    secs = min(_SESSION_SECS, max(self.deadline - time.monotonic(),
                                  _LEAST_SESSION_SECS))
    self._session = _interrupts.run(
        lambda: open_session(self.address, self._graph, secs), lambda: None)

  def close(self):
    session, self._session = self._session, None
    if session is not None:
      try:
        _interrupts.run(session.close, lambda: None)
      except tf.errors.OpError:
        pass  # The server is gone, and the session with it.

  def look(self):
    """What a connection to the address meets: a text for an error."""
    host, _, port = self.address.rpartition("://")[2].rpartition(":")
    try:
      with socket.create_connection((host, int(port)), 1.0) as connection:
        # As a gRPC client begins, and as its server answers: with its settings.
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
        answer = connection.recv(len(_SETTINGS))
    except ConnectionRefusedError:
      what = "refused the connection: no server runs there"
    except TimeoutError:
      what = "does not answer: it is stopped, or cannot be reached"
    except (OSError, ValueError) as e:
      what = f"cannot be reached: {e}"
    else:
      what = ("answers" if answer[3:4] == _SETTINGS[3:4] else
              "is another program than a server")
    return f"{self.address} {what}"

  def _run(self, fetches, wait_secs=None, **values):
    values = {"worker": self._worker, "process": self._job.process, **values}
    if wait_secs is None:
      secs = min(_CALL_SECS, max(self.deadline - time.monotonic(),
                                 _ANSWER_SECS))
    else:
      secs = min(wait_secs, 1e6) + _ANSWER_SECS
    try:
      if self._session is None:
        self.connect()
      session = self._session

      def cancel():
        self._session, self._is_interrupted = None, True
        session.close()

      return _interrupts.run(lambda: session.run(
          fetches, {self._fed[key]: value for key, value in values.items()},
          tf1.RunOptions(timeout_in_ms=int(secs * 1000))), cancel)
    except tf.errors.DeadlineExceededError as e:
      if "averaging rounds" in e.message:  # Their own deadline.
        raise
      self.close()
      raise tf.errors.UnavailableError(
          None, None, f"{self.address} did not answer") from e
    except LOST:
      self.close()
      raise

  def state(self, has_taken):
    """A State, and what the server knows.

    Args:
      has_taken: Whether this worker has taken a center.
    """
    _, texts, numbers, left = self._run(tuple(self._state))
    known = Known.read(texts)
    values, velocities, _, rounds, job = map(int, numbers)
    state = State(
        known.place, known.closed, known.workers, values, velocities,
        *self._job.look(self._leads, values > 0, rounds, job, has_taken),
        tuple(name.decode() for name in left))
    return state, known

  def check(self, state):
    """Raises an error if another job has the servers, as their states tell."""
    self._job.check(self.address, state)

  def join(self):
    """Makes the worker known by its name, at the server that leads."""
    self._run(self._join, resumes=self._job.resumes)

  def enter(self, place, most_turns, secs, turn_secs):
    """Waits for a turn; to restore a center if `most_turns` is 0."""
    return Known.read(self._run(
        self._enter.known, secs, place=place, most_turns=most_turns,
        turn_secs=turn_secs, timeout_secs=secs))

  def follow(self, known):
    return self._run(self._follow, known=known.texts)

  def parts(self, vectors):
    """This server's parts of a vector for each group: an array a span."""
    return [vectors[s.group][s.begin:s.end] for s in self.spans]

  def stage(self, known, weight, arrays):
    """Sends an array for each span, as many pieces in a call as take its time.

    Args:
      known: What the lead told when it gave this worker a turn.
      weight: Their weight in the mean.
      arrays: Numbers or codes; none of a worker without values.

    Returns:
      Whether the server accepted all.
    """
    if not arrays:
      return self._run(self._stage[None], known=known.texts, weight=0.0,
                       count=0, first=0)
    count = sum(-(-len(x) // self._piece(x.dtype)) for x in arrays)
    first = 0
    for array in arrays:
      dtype, piece = tf.as_dtype(array.dtype), self._piece(array.dtype)
      at = 0
      while at < len(array):
        pieces = self._up.pieces(piece * dtype.size)
        part = array[at:at + pieces * piece]
        begun = time.monotonic()
        if not self._run(self._stage[dtype], known=known.texts, weight=weight,
                         count=count, first=first, **{dtype.name: part}):
          return False
        self._up.note(part.nbytes, time.monotonic() - begun)
        self.sent += part.nbytes
        at += len(part)
        first += -(-len(part) // piece)
    return True

  def stage_center(self, known, center, errors, velocities):
    """Sends a center, as `stage`: with errors and velocities, or none."""
    arrays = self.parts(center)
    if self._layout.travels and (errors or velocities):
      arrays += (self.parts(errors) if errors else
                 [np.zeros_like(x) for x in arrays])
    if velocities:
      arrays += self.parts(velocities)[:self._stepped_spans]
    return self.stage(known, 1.0, arrays)

  def _piece(self, dtype):
    """The elements of a piece in an array, which may be a code."""
    return (_codes.size(self._layout.travels, _layout.PIECE)
            if dtype == np.uint8 else _layout.PIECE)

  def arrive(self, known):
    """Returns whether the worker is a member now, and what the lead knows."""
    accepted, texts = self._run(tuple(self._arrive), known=known.texts)
    return accepted, Known.read(texts)

  def release(self, turn=-1):
    """Gives up a turn, and ends this worker's reading.

    If the server is lost, both end for themselves. No error of it takes the
    place of an interrupt.
    """
    if self._is_interrupted:  # The server may have stopped.
      return
    try:
      self._run(self._release, 0, turn=turn)
    except LOST:
      pass

  def leave(self):
    """Lets rounds go on without this worker, at the server that leads."""
    self._run(self._leave)
    self._job.leave()

  def tell_left(self, worker):
    """Tells the server that leads of another worker: whether it has left."""
    return self._run(self._leave, worker=worker, process=0)

  def wait_for_close(self, place, min_workers, secs, grace_secs):
    """Waits for the end of a round: what the lead knows of it."""
    return Known.read(self._run(
        self._close, secs, place=place, min_workers=min_workers,
        timeout_secs=secs, grace_secs=grace_secs))

  def step(self, known, learning_rate, momentum):
    """Takes the outer step, unless the round is over: the place open then."""
    place = self._run(self._step, known=known.texts,
                      learning_rate=learning_rate, momentum=momentum)
    return tuple(map(int, place))

  def take(self):
    """The worker has taken the center of all servers."""
    self._job.take()

  def replace(self, is_older, is_saved):
    """As `Job.replace`."""
    self._job.replace(is_older, is_saved)

  def restore(self, from_generation, place):
    return self._run(self._restore, place=place, job=self._job.number,
                     from_generation=from_generation)

  def read(self, place, vectors, secs, what="center", held=None):
    """Reads this server's spans of the center into vectors.

    Args:
      place: That of the center.
      vectors: A vector for each group.
      secs: How long to wait for other workers that read.
      what: "center", "velocities" or "errors", for which vectors of zeros stay
        as they are if there are none.
      held: The center of the round before, a vector for each group, if codes
        may tell how it has moved.

    Returns:
      Whether the center was of `place` all the time.
    """
    what = "codes" if held else what
    try:
      return self._read(place, vectors, secs, what, held)
    except tf.errors.FailedPreconditionError:  # There are none.
      if what == "center":
        raise
    if held:
      return self.read(place, vectors, secs)
    self.release()
    # Not `state`: the servers' look at the job has an order.
    _, texts, *_ = self._run(tuple(self._state))
    return Known.read(texts).place == place

  def _read(self, place, vectors, secs, what, held):
    spans = (self.spans[:self._stepped_spans] if what == "velocities" else
             self.spans)
    first = 0
    for span in spans:
      dtype = (tf.uint8 if held else self._layout.center_dtypes[span.group])
      piece = self._piece(dtype.as_numpy_dtype) * dtype.size
      at = span.begin
      while at < span.end:
        end = min(at + self._down.pieces(piece) * _layout.PIECE, span.end)
        count = -(-(end - at) // _layout.PIECE)
        begun = time.monotonic()
        now, value = self._run(tuple(self._center[dtype, what]), secs,
                               first=first, count=count, timeout_secs=secs)
        self._down.note(value.nbytes, time.monotonic() - begun)
        self.received += value.nbytes
        if tuple(now) != place:
          self.release()
          return False
        to = vectors[span.group][at:end]
        if held:
          _codes.add(held[span.group][at:end], value, self._layout.travels, to)
        else:
          to[:] = value
        at, first = end, first + count
    self.release()
    return True
