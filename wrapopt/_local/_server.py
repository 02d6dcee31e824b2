"""A worker's session with one server of a center."""

import typing

import tensorflow as tf

from wrapopt._loader import ops as raw

tf1 = tf.compat.v1

# A server that is stopped answers no call. Calls that do not wait for other
# workers end after this time.
_CALL_SECS = 60.0

# Of calls that begin and end a session. A session with a server that is gone
# waits for it when it ends.
_SESSION_SECS = 5.0


class State(typing.NamedTuple):
  """What a server holds.

  Attributes:
    place: (round, generation) of the open round; round -1 without a center.
    closed: Whether the round takes no more values.
    values: The number of vectors of the center; 0 without one.
    velocities: The number of velocities.
    workers: The names of the members of the round.
  """
  place: tuple
  closed: bool
  values: int
  velocities: int
  workers: tuple


class Turn(typing.NamedTuple):
  """What the server that leads knows, and the others are told.

  Attributes:
    turn: This worker's turn, or -1.
    workers: The members of the round.
    turns: The turns that are alive.
    newest: The newest turn.
  """
  turn: int
  workers: typing.Any
  turns: typing.Any
  newest: int


class Server:
  """The ops of one server's rounds. Each method is one call to the server."""

  def __init__(self, address, name, worker, process, settings, num_workers,
               layout, index):
    self.address = address
    self._target = address if "://" in address else f"grpc://{address}"
    self._worker = worker
    self._process = process
    self._layout = layout
    self._pieces = layout.pieces[index]
    self._stepped = layout.stepped[index]
    self._session = None
    with tf.Graph().as_default() as self._graph, tf.device("/cpu:0"):
      self._build(name, settings, num_workers)

  def _build(self, name, settings, num_workers):
    """Makes the ops: one graph, so that the session compiles it once."""
    rounds = raw.wrapopt_averaging_rounds(
        num_workers=num_workers, shared_name=name, settings=settings)
    fed = self._fed = {
        key: tf1.placeholder(dtype, shape, name=key)
        for key, dtype, shape in [
            ("round", tf.int64, []), ("generation", tf.int64, []),
            ("turn", tf.int64, []), ("newest", tf.int64, []),
            ("most_turns", tf.int64, []), ("count", tf.int64, []),
            ("first", tf.int64, []), ("min_workers", tf.int64, []),
            ("from_generation", tf.int64, []), ("velocities", tf.int64, []),
            ("weight", tf.float64, []), ("timeout_secs", tf.float64, []),
            ("turn_secs", tf.float64, []), ("grace_secs", tf.float64, []),
            ("learning_rate", tf.float64, []), ("momentum", tf.float64, []),
            ("workers", tf.string, [None]), ("turns", tf.int64, [None]),
            ("worker", tf.string, []), ("process", tf.int64, [])]}
    place = {"round": fed["round"], "generation": fed["generation"]}
    worker = fed["worker"]
    get = lambda *keys: {key: fed[key] for key in keys}
    self._state = raw.wrapopt_averaging_state(rounds)
    self._enter = raw.wrapopt_averaging_enter(
        rounds, worker, fed["process"], **place,
        **get("most_turns", "turn_secs", "timeout_secs"))
    self._arrive = raw.wrapopt_averaging_arrive(
        rounds, worker, **place, **get("turn"))
    self._follow = raw.wrapopt_averaging_follow(
        rounds, **place, **get("newest", "workers", "turns"))
    self._close = raw.wrapopt_averaging_close(
        rounds, **place, **get("min_workers", "timeout_secs", "grace_secs"))
    self._step = raw.wrapopt_averaging_outer_step(
        rounds, **place, **get("learning_rate", "momentum", "workers"),
        stepped=tf.constant(self._stepped, tf.int64))
    self._restore = raw.wrapopt_averaging_restore(
        rounds, worker, **place, **get("from_generation", "velocities"))
    self._stage, self._center = {}, {}
    for dtype in {*self._layout.dtypes, *self._layout.center_dtypes}:
      value = fed[dtype.name] = tf1.placeholder(dtype, [None])
      self._stage[dtype] = raw.wrapopt_averaging_stage(
          rounds, worker, **place, **get("turn", "weight", "count", "first"),
          values=[value])
      if dtype in self._layout.center_dtypes:
        for velocity in False, True:
          self._center[dtype, velocity] = raw.wrapopt_averaging_center(
              rounds, fed["first"], T=dtype, velocity=velocity)

  def connect(self):
    """Begins a session, after the first or a lost one."""
    self.close()
    # The server is alone in its cluster: no other task delays the session.
    config = tf1.ConfigProto(isolate_session_state=False)
    config.operation_timeout_in_ms = int(_SESSION_SECS * 1000)
    self._session = tf1.Session(self._target, self._graph, config)

  def close(self):
    session, self._session = self._session, None
    if session is not None:
      try:
        session.close()
      except tf.errors.OpError:
        pass  # The server is gone, and the session with it.

  def _run(self, fetches, place=None, wait_secs=0.0, **values):
    if self._session is None:
      self.connect()
    if place is not None:
      values["round"], values["generation"] = place
    values.update(worker=self._worker, process=self._process)
    secs = min(wait_secs, 1e6) + _CALL_SECS
    return self._session.run(
        fetches, {self._fed[key]: value for key, value in values.items()},
        tf1.RunOptions(timeout_in_ms=int(secs * 1000)))

  def state(self):
    numbers, workers = self._run(self._state)
    round_, generation, closed, count, velocities, _ = map(int, numbers)
    return State((round_, generation), bool(closed), count, velocities,
                 tuple(w.decode() for w in workers))

  def enter(self, place, most_turns, secs):
    """Waits for a turn; to restore a center if `most_turns` is 0."""
    return Turn(*self._run(
        tuple(self._enter), place, secs, most_turns=most_turns, turn_secs=secs,
        timeout_secs=secs))

  def follow(self, place, known):
    return self._run(self._follow, place, newest=known.newest,
                     workers=known.workers, turns=known.turns)

  def stage(self, place, turn, weight, vectors, velocities=()):
    """Sends this server's pieces of vectors, one call for each.

    Args:
      place: Where they belong.
      turn: This worker's turn.
      weight: Their weight in the mean.
      vectors: A vector for each group.
      velocities: The same of the velocities, for a center; or none.

    Returns:
      Whether the server accepted all, and the number of bytes.
    """
    pieces = [vectors[p.group][p.begin:p.end] for p in self._pieces]
    if velocities:
      pieces += [velocities[p.group][p.begin:p.end]
                 for p in self._pieces[:self._stepped]]
    sent = 0
    for first, piece in enumerate(pieces):
      dtype = tf.as_dtype(piece.dtype)
      if not self._run(self._stage[dtype], place, turn=turn, weight=weight,
                       count=len(pieces), first=first, **{dtype.name: piece}):
        return False, sent
      sent += piece.nbytes
    return True, sent

  def arrive(self, place, turn):
    """Returns whether the worker is a member now, and a Turn."""
    accepted, *known = self._run(tuple(self._arrive), place, turn=turn)
    return accepted, Turn(-1, *known)

  def wait_for_close(self, place, min_workers, secs, grace_secs):
    return self._run(self._close, place, secs, min_workers=min_workers,
                     timeout_secs=secs, grace_secs=grace_secs)

  def step(self, place, workers, learning_rate, momentum):
    return self._run(self._step, place, workers=workers,
                     learning_rate=learning_rate, momentum=momentum)

  def restore(self, from_generation, place, has_velocities=False):
    return self._run(self._restore, place, from_generation=from_generation,
                     velocities=self._stepped if has_velocities else 0)

  def read(self, place, vectors, velocities=False):
    """Reads this server's pieces of the center into vectors.

    Args:
      place: That of the center.
      vectors: A vector for each group.
      velocities: Whether to read the velocities instead.

    Returns:
      Whether the center was of `place` all the time.
    """
    if velocities and not self.state().velocities:
      return self.state().place == place  # They are 0.
    pieces = self._pieces[:self._stepped] if velocities else self._pieces
    for i, p in enumerate(pieces):
      dtype = self._layout.center_dtypes[p.group]
      *at, value = self._run(tuple(self._center[dtype, velocities]), first=i)
      if tuple(at) != place:
        return False
      vectors[p.group][p.begin:p.end] = value
    return True


