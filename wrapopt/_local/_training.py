"""What LocalSGD and DiLoCo share."""

import functools
import threading
import typing

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.trackable import base as trackable

from wrapopt import _checks
from wrapopt._averages import _companions
from wrapopt._averages import _swap
from wrapopt._loader import ops as raw
from wrapopt._local import _checkpoints
from wrapopt._local import _codes
from wrapopt._local import _exchanges
from wrapopt._local import _fragments
from wrapopt._local import _interrupts
from wrapopt._local import _job_number
from wrapopt._local import _layout
from wrapopt._local import _member
from wrapopt._local import _server
from wrapopt._local import _settings
from wrapopt._v1._workers import _centers
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


class LocalTraining(trackable.Trackable):
  """A worker that trains its variables, and shares a center at intervals.

  A `tf.train.Checkpoint` of it holds the center of the servers, its velocity
  and its round; with a `dtype`, also what codes have lost, on the servers and
  of this worker, which alone takes that back. If it is restored, the servers
  take the center, unless theirs is of a later round, and the worker takes that
  of the servers in the next `step`, instead of a round.

  Attributes:
    variables: The shared variables, a list of `tf.Variable`s.
    sync_every: The number of inner steps in a round.
    fragments: The number of groups of variables that have rounds of their own.
    overlap_steps: The number of steps in which values travel.
  """

  def __init__(self, variables, servers, worker, num_workers, sync_every,
               min_workers, round_timeout_secs, grace_secs, weight,
               local_weight, averaged, dtype, learning_rate, momentum,
               most_pushes, progress, only_finite, name, resume, checkpoint,
               fragments, overlap_steps):
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
    self.fragments = _checks.integer("fragments", fragments, least=1)
    interval, rest = divmod(self.sync_every, fragments)
    if rest:
      raise ValueError("`sync_every` must be a multiple of fragments = "
                       f"{fragments}, got {sync_every}.")
    self.overlap_steps = _checks.integer(
        "overlap_steps", overlap_steps, least=0)
    if overlap_steps >= interval:
      raise ValueError(
          "`overlap_steps` must be less than the number of steps between two "
          f"exchanges, sync_every / fragments = {interval}, got "
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
    self._weighs_examples = weight == "examples"
    _checks.fraction("local_weight", local_weight)
    progress = _checks.boolean("progress", progress)
    self._only_finite = _checks.boolean("only_finite", only_finite)
    if dtype is not None and not (isinstance(dtype, str) and
                                  dtype in _codes.DTYPES):
      raise ValueError(f"`dtype` must be None or one of {_codes.DTYPES}, got "
                       f"{dtype!r}.")
    doubles = [v.name for v in self.variables if v.dtype == tf.float64]
    if dtype and doubles:
      raise ValueError(
          f"`dtype` must be None for variables of dtype float64, got {dtype!r} "
          f"and '{doubles[0]}': they travel as they are.")
    most_pushes = _checks.integer("most_pushes", most_pushes, least=1)
    initial = [v.numpy() for v in self.variables]
    if self._only_finite and (
        bad := _exchanges.not_finite(self.variables, initial)):
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
    arguments = _member.RoundArguments(
        min_workers, float(round_timeout_secs), grace_secs, most_pushes,
        learning_rate, momentum)

    def fragment(i, begin, end):
      of_fragment = described[begin:end]
      layout = _layout.Layout(of_fragment, len(servers), dtype)
      settings = _settings.Settings(
          subject, len(servers), num_workers, learning_rate, momentum, weight,
          dtype, of_fragment, (i, fragments))
      job = _job_number.Job(resume)
      return _fragments.Fragment(
          i, self.variables[begin:end], layout, _member.Member(
              worker,
              [_server.Server(address, _settings.name_of(name, i), worker,
                              settings.write(s), num_workers, layout, s, job)
               for s, address in enumerate(servers) if layout.pieces[s]],
              layout, arguments))

    ends = _fragments.divide(described, fragments)
    of = [fragment(i, begin, end)
          for i, (begin, end) in enumerate(zip([0, *ends], ends))]
    own = self._exchanges = _exchanges.Exchanges(
        of, interval, overlap_steps, worker, weight, local_weight,
        self._only_finite, progress)
    self._worker = worker
    self._has_velocities = momentum > 0
    with tf.device("/cpu:0"):
      self._steps = tf.Variable(0, trainable=False, dtype=tf.int64,
                                name="steps")
      self._examples = tf.Variable(0, trainable=False, dtype=tf.int64,
                                   name="examples")
      # The number of steps at which a turn is due.
      self._due = tf.Variable(0, trainable=False, dtype=tf.int64, name="due")
    counts = [self._steps, self._examples, self._due]
    # Their values, of which Python adds to the first two between turns: an op
    # for it would take a millisecond where steps are slow and caches cold. None
    # if the variables have them.
    self._counts = None
    self._counting = threading.Lock()
    self._is_traced = False  # A function changes the variables.
    self._turns = [
        _Turn(own.restart, [*counts, *self._held], self.variables),
        *(_Turn(functools.partial(own.end, f), [*counts, f.held], f.variables)
          for f in of),
        *(_Turn(functools.partial(own.begin, f), counts, f.variables, False)
          for f in of if overlap_steps)]
    self._assign(self._turns[0], own.start(
        initial, checkpoint and self._read_checkpoint(checkpoint)))

  @property
  def round(self):
    """The number of rounds that ended, an int: of all fragments together."""
    return self._exchanges.round

  @property
  def report(self):
    """What became of the last round of this worker, or None.

    It has the attributes `round`, `counted` (whether the worker's values are
    part of it), `workers` (the names of its members), `not_finite` (the names
    of workers whose values did not count, since they were not finite), `secs`,
    `sent` and `received` (numbers of bytes of values), and `fragment` (its
    index).
    """
    return self._exchanges.report

  @property
  def _held(self):
    return [f.held for f in self._exchanges.fragments]

  def step(self, examples=None, steps=1):
    """Counts an inner step, and takes part in a round if one is due.

    Call it after each step of the inner optimizer, eagerly or in a
    `tf.function`. In most steps, it only counts. Every `sync_every` steps, it
    sends the variables to the servers, waits for the end of the round, and
    assigns the center. With `fragments`, it does so with one of them every
    `sync_every / fragments` steps. With `overlap_steps`, another thread sends
    and waits, and a later call assigns, which also raises the thread's errors.

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
    if examples is None and self._weighs_examples:
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
    if eager:
      if self._count(steps, 0 if examples is None else int(examples)):
        self._take_turn()
      return

    with tf.init_scope(), self._counting:
      self._write_counts()
      self._is_traced = True
    if examples is not None:
      self._examples.assign_add(tf.cast(examples, tf.int64))
    count = self._steps.assign_add(steps)
    _companions.check(self.variables, type(self).__name__)
    _interrupts.watch()
    tf.cond(count >= self._due, self._take_turn_in_graph,
            lambda: tf.constant(0))

  def _count(self, steps, examples):
    """Counts a step, eagerly; returns whether a turn is due."""
    with self._counting:
      if self._is_traced:
        self._examples.assign_add(examples)
        return int(self._steps.assign_add(steps)) >= int(self._due)
      self._counts = self._counts or [
          int(v) for v in (self._steps, self._examples, self._due)]
      self._counts[0] += steps
      self._counts[1] += examples
      is_due = self._counts[0] >= self._counts[2]
      if is_due:
        self._write_counts()
      return is_due

  def _write_counts(self):
    if self._counts:
      self._steps.assign(self._counts[0])
      self._examples.assign(self._counts[1])
      self._counts = None

  def _take_turn(self):
    turn = self._turns[self._exchanges.next(*(v.numpy() for v in self._held))]
    self._check()
    # Without a copy, which an update makes while the value is held.
    self._assign(turn, turn.call(*(
        np.asarray(v.read_value()) for v in [*turn.notes, *turn.variables])))

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
        tf.numpy_function(
            self._exchanges.next, [v.read_value() for v in self._held],
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
    _companions.check(self.variables, type(self).__name__)
    for v in self.variables:
      _swap.check_unoccupied(v, "step() must not take part in a round")

  def leave(self):
    """Lets rounds go on without this worker: it is done.

    From now on, no round waits for it, and it counts as one of `min_workers`.
    The last worker goes on alone. The variables stay as they are: the steps
    since the last round are this worker's own. Its next `step` or `take_center`
    brings it back. No effect if another process has taken the worker's name.
    Values that travel arrive before, and no step assigns the center of their
    round.

    A `with` block calls it at its end. If the block ends with an exception, it
    only calls `close`, so the worker is missing.

    Raises:
      tf.errors.DeadlineExceededError: If the server that leads does not answer
        within `round_timeout_secs`. Also others of `step`, if values travel.
    """
    self._exchanges.leave()

  def close(self):
    """Ends the sessions with the servers, and does not tell them.

    Values that travel may count or not. Rounds wait for the worker, as for one
    that was killed.
    """
    self._exchanges.close()

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
    return self._exchanges.are_current([int(v.numpy()) for v in self._held])

  def scalars(self):
    """The numbers of the last round for TensorBoard, a dict by name, or {}.

    In each round, `step` writes them to the default writer of `tf.summary`, if
    there is one, with the number of the round as their step: `rounds/workers`
    (the number of members), `rounds/seconds`, `rounds/bytes_sent`,
    `rounds/bytes_received`, `rounds/not_finite/NAME`, 1 for each worker whose
    values did not count, and with fragments `rounds/fragment`. Their step
    counts the rounds of all fragments.
    """
    return self._exchanges.scalars()

  def take_center(self):
    """Assigns the center of the servers, and forgets the steps since a round.

    Call it eagerly after other code has assigned to the variables, so that what
    it assigned is not sent as if it were trained from the center. It waits for
    values that travel.

    Raises:
      tf.errors.DeadlineExceededError: If the servers have no center within
        `round_timeout_secs`.
    """
    self._assign(self._turns[0], self._exchanges.restart())

  def _assign(self, turn, state):
    """Assigns values of a turn: those of shared variables, then the notes."""
    noted, values = state[:len(turn.notes)], state[len(turn.notes):]
    assigned = []
    if turn.assigns:
      with tf.control_dependencies(_lagging.settle(turn.variables)):
        assigned = [v.assign(x) for v, x in zip(turn.variables, values)]
    with self._counting, tf.control_dependencies(
        [] if tf.executing_eagerly() else [x.op for x in assigned]):
      for v, x in zip(turn.notes, noted):
        v.assign(x)
      self._counts = None  # Else, they would be those of before.

  # For tf.train.Checkpoint.

  def _serialize_to_tensors(self):
    self._exchanges.wait()
    return _checkpoints.write(self._described, self._worker, [
        f.read(self._has_velocities) for f in self._exchanges.fragments])

  def _restore_from_tensors(self, restored_tensors):
    self._exchanges.restore(self._read_tensors(
        {key: x.numpy() for key, x in restored_tensors.items()}))
    # The next step takes the center, after all variables were restored.
    with self._counting:
      for v in self._held:
        v.assign(-1)
      self._due.assign(0)
      self._counts = None

  def _read_checkpoint(self, path):
    return self._read_tensors(_checkpoints.find(path, self._worker))

  def _read_tensors(self, tensors):
    """For each fragment what `Member.restore` takes; None if there are none."""
    saved = tensors and _checkpoints.read(
        self._described, self._worker, tensors, self._exchanges.fragments,
        self._only_finite)
    if saved and not self._has_velocities:
      saved = [(round_, center, [], *errors)
               for round_, center, _, *errors in saved]
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
