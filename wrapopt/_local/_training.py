"""What LocalSGD and DiLoCo share."""

import atexit
import functools
import itertools
import sys
import typing

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.trackable import base as trackable

from wrapopt import _checks
from wrapopt._averages import _partial
from wrapopt._averages import _swap
from wrapopt._gates import _staleness
from wrapopt._loader import ops as raw
from wrapopt._local import _checkpoints
from wrapopt._local import _fragments
from wrapopt._local import _interrupts
from wrapopt._local import _layout
from wrapopt._local import _member
from wrapopt._local import _server
from wrapopt._local import _settings
from wrapopt._v1 import _centers
from wrapopt.ops import _lagging

_WEIGHTS = ("steps", "examples", "equal")
# A graph raises no others than errors of TensorFlow.
_CODES = {
    tf.errors.OpError: None,  # They have their own.
    NotImplementedError: tf.errors.UNIMPLEMENTED,
    RuntimeError: tf.errors.FAILED_PRECONDITION,
    TypeError: tf.errors.INVALID_ARGUMENT,
    ValueError: tf.errors.INVALID_ARGUMENT,
}
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class _Turn(typing.NamedTuple):
  """What `step` may do when something is due.

  Attributes:
    call: A function of the values of `notes` and `variables`, which returns new
      ones.
    notes: The counts, and the `held` of the fragments.
    variables: The shared variables.
    assigns: Whether it returns new values of the shared variables.
  """
  call: typing.Callable
  notes: list
  variables: list
  assigns: bool = True

  @property
  def assigned(self):
    return [*self.notes, *(self.variables if self.assigns else [])]


class _Exchange(typing.NamedTuple):
  """A fragment's part in a round, in another thread.

  Attributes:
    fragment: The Fragment.
    steps, examples: The numbers of those whose values it sends, since the last
      round of any fragment.
    call: The `_interrupts.Call`, which returns a Report.
  """
  fragment: _fragments.Fragment
  steps: int
  examples: int
  call: typing.Any


class LocalTraining(trackable.Trackable):
  """A worker that trains its variables, and shares a center at intervals.

  A `tf.train.Checkpoint` of it holds the center of the servers, its velocity
  and its round. If it is restored, the servers take the center, unless theirs
  is of a later round, and the worker takes that of the servers in the next
  `step`, instead of a round.

  Attributes:
    variables: The shared variables, a list of `tf.Variable`s.
    sync_every: The number of inner steps in a round.
    report: What became of the last round of this worker, or None: with the
      attributes `round`, `counted` (whether the worker's values are part of
      it), `workers` (the names of its members), `not_finite` (the names of
      workers whose values did not count, since they were not finite), `secs`
      and `sent` (the number of bytes).
  """

  def __init__(self, variables, servers, worker, num_workers, sync_every,
               min_workers, round_timeout_secs, grace_secs, weight,
               local_weight, averaged, learning_rate, momentum, most_pushes,
               progress, only_finite, name, resume, checkpoint, fragments,
               overlap_steps):
    subject = type(self).__name__
    self._stepped = _variables("variables", variables)
    self._averaged = _variables("averaged", averaged)
    self.variables = [*self._stepped, *self._averaged]
    if not tf.executing_eagerly():
      raise RuntimeError(f"{subject} must be made eagerly, got a graph: it "
                         "takes the center at once.")
    if len({id(v) for v in self.variables}) < len(self.variables):
      raise ValueError("`variables` and `averaged` must name each variable "
                       "once, got one twice.")
    if not sum(int(np.prod(v.shape)) for v in self._stepped):
      raise ValueError("`variables` must have elements, got none.")
    _server.check_addresses(servers)
    if not (isinstance(worker, str) and worker):
      raise ValueError(f"`worker` must be a name, got {worker!r}.")
    num_workers = _checks.integer("num_workers", num_workers, least=1)
    self.sync_every = _checks.integer("sync_every", sync_every, least=1)
    fragments = _checks.integer("fragments", fragments, least=1)
    self.interval, rest = divmod(self.sync_every, fragments)
    if rest:
      raise ValueError("`sync_every` must be a multiple of fragments = "
                       f"{fragments}, got {sync_every}.")
    self.overlap_steps = _checks.integer("overlap_steps", overlap_steps, least=0)
    if overlap_steps >= max(self.interval, 1 + (not overlap_steps)):
      raise ValueError(
          "`overlap_steps` must be less than the number of steps between two "
          f"exchanges, sync_every / fragments = {self.interval}, got "
          f"{overlap_steps}.")
    if min_workers is None:
      min_workers = num_workers
    min_workers = _checks.integer("min_workers", min_workers, least=1)
    if min_workers > num_workers:
      raise ValueError(f"`min_workers` must be at most {num_workers}, the "
                       f"number of workers, got {min_workers}.")
    _centers.check_seconds("round_timeout_secs", round_timeout_secs)
    grace_secs = (float("inf") if grace_secs is None else
                  _checks.number("grace_secs", grace_secs, least=0))
    if weight not in _WEIGHTS:
      raise ValueError(f"`weight` must be one of {_WEIGHTS}, got {weight!r}.")
    self._weight = weight
    _checks.fraction("local_weight", local_weight)
    self._local_weight = local_weight
    self._progress = _checks.boolean("progress", progress)
    self._only_finite = _checks.boolean("only_finite", only_finite)
    most_pushes = _checks.integer("most_pushes", most_pushes, least=1)
    initial = [v.numpy() for v in self.variables]
    if bad := self._not_finite(self.variables, initial):
      raise ValueError(
          f"`variables` and `averaged` must be finite, since they may become "
          f"the first center, got '{bad}' with NaN or infinity: initialize "
          "them, or load weights.")

    resume = _checks.boolean("resume", resume)
    described = self._described = [
        _settings.Variable(getattr(v, "path", v.name), x.shape.as_list(),
                           x.dtype, i >= len(self._stepped))
        for i, (v, x) in enumerate(
            zip([*variables, *averaged], self.variables))]
    rules = _member.Rules(min_workers, float(round_timeout_secs), grace_secs,
                          most_pushes, learning_rate, momentum)

    def fragment(i, begin, end):
      of_fragment = described[begin:end]
      layout = _layout.Layout(of_fragment, len(servers))
      settings = _settings.Settings(
          subject, len(servers), num_workers, learning_rate, momentum, weight,
          of_fragment, (i, fragments))
      job = _server.Job(resume)
      return _fragments.Fragment(
          i, self.variables[begin:end], layout, _member.Member(
              worker,
              [_server.Server(address, _settings.name_of(name, i), worker,
                              settings.write(s), num_workers, layout, s, job)
               for s, address in enumerate(servers) if layout.pieces[s]],
              layout, rules))

    ends = _fragments.divide(described, fragments)
    self._fragments = [
        fragment(i, begin, end)
        for i, (begin, end) in enumerate(zip([0, *ends], ends))]
    self._worker = worker
    self._has_velocities = momentum > 0
    with tf.device("/cpu:0"):
      self._steps = tf.Variable(0, trainable=False, dtype=tf.int64,
                                name="steps")
      self._examples = tf.Variable(0, trainable=False, dtype=tf.int64,
                                   name="examples")
      # The number of steps at which a turn is due.
      self._due = tf.Variable(0, trainable=False, dtype=tf.int64, name="due")
    self._exchange = None  # The one in flight.
    self.report = None
    counts = [self._steps, self._examples, self._due]
    ends = [_Turn(functools.partial(self._end, f), [*counts, f.held],
                  f.variables) for f in self._fragments]
    begins = [_Turn(functools.partial(self._begin, f), counts, f.variables,
                    False) for f in self._fragments if overlap_steps]
    self._turns = [*ends, *begins, _Turn(
        self._restart, [*counts, *(f.held for f in self._fragments)],
        self.variables)]
    self._start(initial, checkpoint and self._read_checkpoint(checkpoint))

  def _start(self, initial, saved):
    """Takes the center; `initial` becomes it if no server has one."""
    begins = True
    values = iter(initial)
    for i, f in enumerate(self._fragments):
      vectors = f.layout.flatten(
          [next(values) for _ in f.variables], f.layout.center_dtypes)
      f.member.start(vectors if begins else None, saved and saved[i])
      # If another worker has begun the job, all fragments are of that worker.
      begins = begins and all(map(np.array_equal, vectors, f.member.center))
    self._assign(self._turns[-1], self._from_centers())

  @property
  def round(self):
    """The number of rounds that ended, an int: of all fragments together."""
    return sum(f.round for f in self._fragments)

  def step(self, examples=None, steps=1):
    """Counts an inner step, and takes part in a round if one is due.

    Call it after each step of the inner optimizer, eagerly or in a
    `tf.function`. In most steps, it only counts. Every `sync_every` steps, it
    sends the variables to the servers, waits for the end of the round, and
    assigns the center.

    Args:
      examples: The number of examples in the batch, an integer or a scalar
        integer tensor; needed if the weight is "examples".
      steps: The number of steps to count.

    Raises:
      ValueError: If `examples` is missing, or a ScheduleFree, PrimalAverage or
        Lookahead trains the variables.
      RuntimeError: If averages are in place of the variables when a round is
        due, or in a replica of a strategy.
      NotImplementedError: In a function that XLA compiles.
      tf.errors.DeadlineExceededError: If fewer than `min_workers` workers came
        within `round_timeout_secs`, or a server was lost for as long.
      tf.errors.InvalidArgumentError: If another process has taken the worker's
        name, another job has the servers, no worker of the round has finite
        values, or the center is not finite.
      KeyboardInterrupt: On Ctrl-C, at once. A function that called `step` first
        ends, and waits for no round.

    Each call may raise the `tf.errors`, eagerly and in a function. In place of
    a `RuntimeError` or a `ValueError`, a call of a function that was traced
    raises a `tf.errors.FailedPreconditionError` or
    `tf.errors.InvalidArgumentError` with the same text.
    """
    steps = _checks.integer("steps", steps, least=1)
    if examples is None and self._weight == "examples":
      raise ValueError("`examples` must be given, since the worker's weight is "
                       "the number of examples, got None.")
    if tf.distribute.has_strategy() and not (
        tf.distribute.in_cross_replica_context()):
      raise RuntimeError("step() must be called after strategy.run(), once for "
                         "all replicas, got a call of a replica.")
    eager = tf.executing_eagerly()
    if not eager and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()):
      raise NotImplementedError(
          "step() must not be in a function that XLA compiles "
          "(jit_compile=True): it calls servers. Compile the function that "
          "takes the inner step, and call step() after it.")
    if examples is not None:
      self._examples.assign_add(tf.cast(examples, tf.int64))
    count = self._steps.assign_add(steps)
    if eager:
      if int(count) >= int(self._due):
        self._take_turn()
      return

    _partial.check(self.variables, type(self).__name__)
    _interrupts.watch()
    tf.cond(count >= self._due, self._take_turn_in_graph,
            lambda: tf.constant(0))

  def _take_turn(self):
    turn = self._turns[self._next(*(f.held.numpy() for f in self._fragments))]
    self._check()
    self._assign(turn, turn.call(
        *(v.numpy() for v in [*turn.notes, *turn.variables])))

  def _take_turn_in_graph(self):

    def take(turn):
      code, message, *state = tf.numpy_function(
          functools.partial(self._try, turn),
          # A function orders what it reads itself, and not what Python reads.
          [v.read_value() for v in [*turn.notes, *turn.variables]],
          [tf.int32, tf.string, *(v.dtype for v in turn.assigned)])
      with tf.control_dependencies(
          [raw.wrapopt_averaging_raise(code, message)]):
        self._assign(turn, [tf.ensure_shape(value, v.shape)
                            for v, value in zip(turn.assigned, state)])
      return tf.constant(0)

    return tf.switch_case(
        tf.numpy_function(self._next,
                          [f.held.read_value() for f in self._fragments],
                          tf.int32),
        [functools.partial(take, turn) for turn in self._turns])

  def _try(self, turn, *state):
    """As `turn.call`, in a graph: first the code of an error, and its text."""
    state_now = state[:len(turn.assigned)]
    try:
      with _interrupts.heeded():
        self._check()
        return [np.int32(0), "", *turn.call(*state)]
    except KeyboardInterrupt:
      # Python raises it after the function.
      return [np.int32(0), "", *state_now]
    except tuple(_CODES) as e:
      code = next(code for cls, code in _CODES.items() if isinstance(e, cls))
      return [np.int32(getattr(e, "error_code", code)),
              getattr(e, "message", str(e)), *state_now]

  def _check(self):
    _partial.check(self.variables, type(self).__name__)
    for v in self.variables:
      _swap.check_unoccupied(v, "step() must not take part in a round")

  def _next(self, *held):
    """The index of the turn that is due.

    Args:
      *held: The `held` of each fragment.
    """
    if self._exchange:
      return np.int32(self._exchange.fragment.index)
    if any(round_ != f.round for round_, f in zip(held, self._fragments)):
      return np.int32(len(self._turns) - 1)
    # The first one with the fewest rounds. So no two workers wait in rounds of
    # different fragments for each other, also if one has missed some rounds.
    f = min(self._fragments, key=lambda f: f.round)
    return np.int32(f.index +
                    (len(self._fragments) if self.overlap_steps else 0))

  def leave(self):
    """Lets rounds go on without this worker: it is done.

    From now on, no round waits for it, and it counts as one of `min_workers`.
    The last worker goes on alone. The variables stay as they are: the steps
    since the last round are this worker's own. Its next `step` or `take_center`
    brings it back. No effect if another process has taken the worker's name.

    A `with` block calls it at its end. If the block ends with an exception, it
    only calls `close`, so the worker is missing.

    Raises:
      tf.errors.DeadlineExceededError: If the server that leads does not answer
        within `round_timeout_secs`.
    """
    try:
      if self._exchange:
        self._tell(self._conclude())
    finally:
      for f in self._fragments:
        f.member.leave()

  def close(self):
    """Ends the sessions with the servers, and does not tell them.

    Rounds wait for the worker, as for one that was killed.
    """
    if self._exchange:
      self._exchange.call.stop()
      self._drop()
    for f in self._fragments:
      f.member.close()

  def __enter__(self):
    return self

  def __exit__(self, cls, *_):
    if cls is None:
      self.leave()
    else:
      self.close()

  def holds_center(self):
    """Whether the variables were trained from the center of the open round.

    They were not if a checkpoint was restored, a round ended in an error, or
    others have ended it meanwhile. Eager: asks the servers. Returns a bool.
    """
    return all(
        int(f.held.numpy()) == f.round and f.member.is_current()
        for f in self._fragments
        if not self._exchange or f is not self._exchange.fragment)

  def scalars(self):
    """The numbers of the last round for TensorBoard, a dict by name, or {}.

    In each round, `step` writes them to the default writer of `tf.summary`, if
    there is one, with the number of the round as their step: `rounds/workers`
    (the number of members), `rounds/seconds`, `rounds/bytes_sent`, and
    `rounds/not_finite/NAME`, 1 for each worker whose values did not count.
    """
    report = self.report
    if report is None:
      return {}
    return {"rounds/workers": len(report.workers),
            "rounds/seconds": report.secs,
            "rounds/bytes_sent": report.sent,
            **({"rounds/fragment": report.fragment}
               if len(self._fragments) > 1 else {}),
            **{f"rounds/not_finite/{w}": 1 for w in report.not_finite}}

  def take_center(self):
    """Assigns the center of the servers, and forgets the steps since a round.

    Call it eagerly after other code has assigned to the variables, so that what
    it assigned is not sent as if it were trained from the center.

    Raises:
      tf.errors.DeadlineExceededError: If the servers have no center within
        `round_timeout_secs`.
    """
    if self._exchange:
      self._conclude()
    self._assign(self._turns[-1], self._restart())

  def _begin(self, f, steps, examples, due, *values):
    """Sends the values of a fragment, in another thread."""
    del due
    call = _interrupts.Call(self._exchange_of(f, steps, examples, values))
    # Python must not end while the thread is in TensorFlow.
    atexit.register(call.stop)
    self._exchange = _Exchange(f, int(steps), int(examples), call)
    return [steps, examples, steps + self.overlap_steps]

  def _end(self, f, steps, examples, due, held, *values):
    """Sends the values of a fragment unless they are sent, and gets the center.

    Args:
      f: The Fragment.
      steps: The number of steps since the last round of any fragment.
      examples: The number of their examples.
      due, held: Not used.
      *values: The values of the variables.

    Returns:
      What to `_assign` after it.
    """
    del due, held
    if self._exchange:
      sent, sent_examples = self._exchange[1:3]
      report = self._conclude()
    else:
      sent, sent_examples = int(steps), int(examples)
      report = self._exchange_of(f, steps, examples, values)()
    self._tell(report._replace(fragment=f.index))
    for other in self._fragments:
      other.steps += sent
      other.examples += sent_examples
    f.steps = f.examples = 0
    # A worker that missed the round has nothing to mix in.
    return [steps - sent, examples - sent_examples, np.int64(self.interval),
            np.int64(f.round),
            *self._from_center(f, values if report.counted else None)]

  def _exchange_of(self, f, steps, examples, values):
    """A function that takes part in a fragment's round: it returns a Report."""
    weight = {"equal": 1, "steps": f.steps + int(steps),
              "examples": f.examples + int(examples)}[self._weight]
    if weight <= 0:
      raise ValueError("`examples` must be more than 0 in a round, got "
                       f"{weight}.")
    if bad := self._not_finite(f.variables, values):
      tf.get_logger().warning(
          "The values of worker '%s' do not count in round %d, since they are "
          "not finite, '%s' for one. It takes the center. If this goes on, the "
          "state of its optimizer may not be finite either: restart the "
          "worker.", self._worker, f.round, bad)
    return functools.partial(
        f.member.sync,
        None if bad else f.layout.flatten(values, f.layout.dtypes),
        float(weight))

  def _wait(self):
    """Waits until no exchange is in flight; the step that is due merges it."""
    if self._exchange:
      self._exchange.call.wait()

  def _conclude(self):
    """The Report of the exchange in flight, when it is over."""
    call = self._exchange.call
    call.wait()  # Ctrl-C ends the wait, and not the exchange.
    self._drop()
    return call.result()

  def _drop(self):
    if self._exchange:
      atexit.unregister(self._exchange.call.stop)
      self._exchange = None

  def _tell(self, report):
    """Notes and tells what became of a round; an error if it had no values."""
    self.report = report
    if self._progress:
      is_one = len(self._fragments) == 1
      print(("" if is_one else f"fragment {report.fragment}, ") +
            f"round {report.round}: {len(report.workers)} workers "
            f"({', '.join(report.workers)}), {report.secs:.2f} s, "
            f"{report.sent / 1e6:.2f} MB sent"
            + ("" if report.counted else f"; '{self._worker}' did not count")
            + (f"; not finite: {', '.join(report.not_finite)}"
               if report.not_finite else ""),
            file=sys.stderr, flush=True)
    for key, value in self.scalars().items():
      tf.summary.write(key, tf.constant(value, tf.float32), self.round,
                       _staleness.metadata("scalars"))
    if report.not_finite and not report.workers:
      raise tf.errors.InvalidArgumentError(None, None, (
          f"No worker of round {report.round - 1} has finite values, got NaN "
          f"or infinity of {', '.join(report.not_finite)}. The center stays: "
          "reduce the learning rate, or clip gradients, and restart the "
          "workers from the center or a checkpoint."))

  def _from_center(self, f, local=None):
    """A fragment's values to `_assign`, of the center and this worker's."""
    values = f.layout.split(f.member.center)
    if local is not None and self._local_weight:
      w = self._local_weight
      values = [c + w * (np.asarray(v, c.dtype) - c)
                for c, v in zip(values, local)]
    with np.errstate(over="ignore"):
      values = [np.asarray(c, v.dtype.as_numpy_dtype)
                for c, v in zip(values, f.variables)]
    if bad := self._not_finite(f.variables, values):
      raise tf.errors.InvalidArgumentError(None, None, (
          f"The center of round {f.round} must be finite in the variables' "
          f"dtypes, got NaN or infinity for '{bad}': reduce the outer learning "
          "rate or its momentum, and restore a checkpoint."))
    return values

  def _not_finite(self, variables, values):
    """The name of a variable whose value is not finite, None without any.

    None also if values that are not finite count.
    """
    return next((v.name for v, x in zip(variables, values)
                 if self._only_finite and not np.isfinite(x).all()), None)

  def _assign(self, turn, state):
    """Assigns values of a turn: those of shared variables, then the notes."""
    noted, values = state[:len(turn.notes)], state[len(turn.notes):]
    assigned = []
    if turn.assigns:
      with tf.control_dependencies(_lagging.settle(turn.variables)):
        assigned = [v.assign(x) for v, x in zip(turn.variables, values)]
    with tf.control_dependencies(
        [] if tf.executing_eagerly() else [x.op for x in assigned]):
      for v, x in zip(turn.notes, noted):
        v.assign(x)

  def _restart(self, *_):
    """Takes the center, whatever the worker has done: what to `_assign`."""
    for f in self._fragments:
      f.member.start(None)
    return self._from_centers()

  def _from_centers(self):
    """What to `_assign` to start from the center that this worker holds."""
    for f in self._fragments:
      f.steps = f.examples = 0
    return [np.int64(0), np.int64(0), np.int64(self.interval),
            *(np.int64(f.round) for f in self._fragments),
            *itertools.chain(*map(self._from_center, self._fragments))]

  # For tf.train.Checkpoint.

  def _serialize_to_tensors(self):
    self._wait()
    return _checkpoints.write(
        self._described,
        [f.read(self._has_velocities) for f in self._fragments])

  def _restore_from_tensors(self, restored_tensors):
    saved = self._read_tensors(
        {key: x.numpy() for key, x in restored_tensors.items()})
    self._wait()
    self._drop()
    for f, of_fragment in zip(self._fragments, saved):
      f.member.restore(*of_fragment)
      # The next step takes the center, after all variables were restored.
      f.held.assign(-1)
    self._due.assign(0)

  def _read_checkpoint(self, path):
    return self._read_tensors(_checkpoints.find(path, self._worker))

  def _read_tensors(self, tensors):
    """For each fragment (round, center, velocities); None if there are none."""
    saved = tensors and _checkpoints.read(
        self._described, tensors, self._fragments, self._only_finite)
    if saved and not self._has_velocities:
      saved = [(round_, center, []) for round_, center, _ in saved]
    return saved


def _variables(subject, variables):
  """The `tf.Variable`s of a list of these and of Keras's variables."""
  found = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v
           for v in variables]
  for v in found:
    if not isinstance(v, tf.Variable):
      raise TypeError(f"`{subject}` must be variables, got {v!r}.")
    if v.dtype not in _DTYPES:
      raise TypeError(
          f"`{subject}` must be of dtype float16, bfloat16, float32 or "
          f"float64, got '{v.name}' of dtype {v.dtype.name}.")
    if not v.shape.is_fully_defined():
      raise ValueError(f"`{subject}` must have known shapes, got '{v.name}' of "
                       f"shape {v.shape}.")
  return found
