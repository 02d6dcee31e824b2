"""What LocalSGD and DiLoCo share."""

import itertools
import os
import sys

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.trackable import base as trackable

from wrapopt import _checks
from wrapopt._averages import _partial
from wrapopt._averages import _swap
from wrapopt._gates import _staleness
from wrapopt._loader import ops as raw
from wrapopt._local import _codes
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
    report: What became of the last round of this worker, or None: with the
      attributes `round`, `counted` (whether the worker's values are part of
      it), `workers` (the names of its members), `not_finite` (the names of
      workers whose values did not count, since they were not finite), `secs`,
      `sent` and `received` (numbers of bytes of values).
  """

  def __init__(self, variables, servers, worker, num_workers, sync_every,
               min_workers, round_timeout_secs, grace_secs, weight,
               local_weight, averaged, dtype, learning_rate, momentum,
               most_pushes, progress, only_finite, name, resume, checkpoint):
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
    if bad := self._not_finite(initial):
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
    settings = _settings.Settings(
        subject, len(servers), num_workers, learning_rate, momentum, weight,
        dtype, described)
    self._layout = _layout.Layout(described, len(servers), dtype)
    job = _server.Job(resume)
    self._member = _member.Member(
        worker,
        [_server.Server(address, name, worker, settings.write(s), num_workers,
                        self._layout, s, job)
         for s, address in enumerate(servers) if self._layout.pieces[s]],
        self._layout,
        _member.Rules(min_workers, float(round_timeout_secs), grace_secs,
                      most_pushes, learning_rate, momentum))
    self._worker = worker
    self._has_velocities = momentum > 0
    with tf.device("/cpu:0"):
      self._steps = tf.Variable(0, trainable=False, dtype=tf.int64,
                                name="steps")
      self._examples = tf.Variable(0, trainable=False, dtype=tf.int64,
                                   name="examples")
      # The round of the center that the variables were assigned last; -1 for
      # none. If it is not the member's, an error came between, or a restore:
      # the values must not count.
      self._held = tf.Variable(-1, trainable=False, dtype=tf.int64,
                               name="held")
    self.report = None
    self._member.start(
        self._layout.flatten(initial, self._layout.center_dtypes),
        checkpoint and self._read_checkpoint(checkpoint))
    self._assign(self._from_center())

  @property
  def round(self):
    """The round that is open: an int, the number of rounds that ended."""
    return self._member.place[0]

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
      if int(count) >= self.sync_every:
        self._assign(self._sync(*(v.numpy() for v in self._state)))
      return

    _partial.check(self.variables, type(self).__name__)
    _interrupts.watch()

    def sync():
      code, message, *state = tf.numpy_function(
          self._try_sync,
          # A function orders what it reads itself, and not what Python reads.
          [v.read_value() for v in self._state],
          [tf.int32, tf.string, *(v.dtype for v in self._state)])
      with tf.control_dependencies(
          [raw.wrapopt_averaging_raise(code, message)]):
        self._assign([tf.ensure_shape(value, v.shape)
                      for v, value in zip(self._state, state)])
      return tf.constant(0)

    tf.cond(count >= self.sync_every, sync, lambda: tf.constant(0))

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
    self._member.leave()

  def close(self):
    """Ends the sessions with the servers, and does not tell them.

    Rounds wait for the worker, as for one that was killed.
    """
    self._member.close()

  def __enter__(self):
    return self

  def __exit__(self, cls, *_):
    if cls is None:
      self.leave()
    else:
      self.close()

  @property
  def _state(self):
    """The variables whose values `_sync` gets and returns."""
    return [self._steps, self._examples, self._held, *self.variables]

  def holds_center(self):
    """Whether the variables were trained from the center of the open round.

    They were not if a checkpoint was restored, a round ended in an error, or
    others have ended it meanwhile. Eager: asks the servers. Returns a bool.
    """
    return (int(self._held.numpy()) == self.round and
            self._member.is_current())

  def scalars(self):
    """The numbers of the last round for TensorBoard, a dict by name, or {}.

    In each round, `step` writes them to the default writer of `tf.summary`, if
    there is one, with the number of the round as their step: `rounds/workers`
    (the number of members), `rounds/seconds`, `rounds/bytes_sent`,
    `rounds/bytes_received`, and `rounds/not_finite/NAME`, 1 for each worker
    whose values did not count.
    """
    report = self.report
    if report is None:
      return {}
    return {"rounds/workers": len(report.workers),
            "rounds/seconds": report.secs,
            "rounds/bytes_sent": report.sent,
            "rounds/bytes_received": report.received,
            **{f"rounds/not_finite/{w}": 1 for w in report.not_finite}}

  def take_center(self):
    """Assigns the center of the servers, and forgets the steps since a round.

    Call it eagerly after other code has assigned to the variables, so that what
    it assigned is not sent as if it were trained from the center.

    Raises:
      tf.errors.DeadlineExceededError: If the servers have no center within
        `round_timeout_secs`.
    """
    self._assign(self._restart())

  def _try_sync(self, *state):
    """As `_sync`, in a graph: first the code of an error, and its text."""
    try:
      with _interrupts.heeded():
        return [np.int32(0), "", *self._sync(*state)]
    except KeyboardInterrupt:
      return [np.int32(0), "", *state]  # Python raises it after the function.
    except tuple(_CODES) as e:
      code = next(code for cls, code in _CODES.items() if isinstance(e, cls))
      return [np.int32(getattr(e, "error_code", code)),
              getattr(e, "message", str(e)), *state]

  def _sync(self, steps, examples, held, *values):
    """Takes part in a round.

    Args:
      steps: The number of steps since the last round.
      examples: The number of their examples.
      held: The round of the center that the variables were trained from.
      *values: The values of the variables.

    Returns:
      What to `_assign` after it.
    """
    _partial.check(self.variables, type(self).__name__)
    for v in self.variables:
      _swap.check_unoccupied(v, "step() must not take part in a round")
    if held != self.round:
      return self._restart()
    weight = {"equal": 1, "steps": int(steps),
              "examples": int(examples)}[self._weight]
    if weight <= 0:
      raise ValueError("`examples` must be more than 0 in a round, got "
                       f"{weight}.")
    if bad := self._not_finite(values):
      tf.get_logger().warning(
          "The values of worker '%s' do not count in round %d, since they are "
          "not finite, '%s' for one. It takes the center. If this goes on, the "
          "state of its optimizer may not be finite either: restart the "
          "worker.", self._worker, self.round, bad)
    report = self._member.sync(
        None if bad else self._layout.flatten(values, self._layout.dtypes),
        float(weight))
    self.report = report
    if self._progress:
      print(f"round {report.round}: {len(report.workers)} workers "
            f"({', '.join(report.workers)}), {report.secs:.2f} s, "
            f"{report.sent / 1e6:.2f} MB sent, "
            f"{report.received / 1e6:.2f} MB received"
            + ("" if report.counted else f"; '{self._worker}' did not count")
            + (f"; not finite: {', '.join(report.not_finite)}"
               if report.not_finite else ""),
            file=sys.stderr, flush=True)
    for key, value in self.scalars().items():
      tf.summary.write(key, tf.constant(value, tf.float32), report.round,
                       _staleness.metadata("scalars"))
    if report.not_finite and not report.workers:
      raise tf.errors.InvalidArgumentError(None, None, (
          f"No worker of round {report.round - 1} has finite values, got NaN "
          f"or infinity of {', '.join(report.not_finite)}. The center stays: "
          "reduce the learning rate, or clip gradients, and restart the "
          "workers from the center or a checkpoint."))
    # A worker that missed the round has nothing to mix in.
    return self._from_center(values if report.counted else None)

  def _from_center(self, local=None):
    """What to `_assign`, from the center and this worker's values."""
    values = self._layout.split(self._member.center)
    if local is not None and self._local_weight:
      w = self._local_weight
      values = [c + w * (np.asarray(v, c.dtype) - c)
                for c, v in zip(values, local)]
    with np.errstate(over="ignore"):
      values = [np.asarray(c, v.dtype.as_numpy_dtype)
                for c, v in zip(values, self.variables)]
    if bad := self._not_finite(values):
      raise tf.errors.InvalidArgumentError(None, None, (
          f"The center of round {self.round} must be finite in the variables' "
          f"dtypes, got NaN or infinity for '{bad}': reduce the outer learning "
          "rate or its momentum, and restore a checkpoint."))
    return [np.int64(0), np.int64(0), np.int64(self.round), *values]

  def _not_finite(self, values):
    """The name of a variable whose value is not finite, None without any.

    None also if values that are not finite count.
    """
    return next((v.name for v, x in zip(self.variables, values)
                 if self._only_finite and not np.isfinite(x).all()), None)

  def _assign(self, state):
    """Assigns the values of all variables, and then their round and counts."""
    steps, examples, round_, *values = state
    with tf.control_dependencies(_lagging.settle(self.variables)):
      assigned = [v.assign(x) for v, x in zip(self.variables, values)]
    with tf.control_dependencies(
        [] if tf.executing_eagerly() else [x.op for x in assigned]):
      self._held.assign(round_)
      self._steps.assign(steps)
      self._examples.assign(examples)

  def _restart(self):
    """Takes the center, whatever the worker has done: as `_sync`."""
    self._member.start(None)
    return self._from_center()

  # For tf.train.Checkpoint.

  def _serialize_to_tensors(self):
    place, center = self._member.read()
    tensors = {"round": tf.constant(place[0], tf.int64),
               "variables": tf.constant([v.write() for v in self._described])}
    tensors.update((f"center_{g}", tf.constant(x))
                   for g, x in enumerate(center))
    for key, what, has in (
        ("velocity", "velocities", self._has_velocities),
        ("error", "errors", self._layout.travels)):
      if not has:
        continue
      at, vectors = self._member.read(what)
      if at != place:
        return self._serialize_to_tensors()
      tensors.update((f"{key}_{g}", tf.constant(x))
                     for g, x in enumerate(vectors))
    if self._layout.travels:
      tensors["worker"] = tf.constant(self._worker)
      tensors.update((f"own_error_{g}", tf.constant(x)) for g, x in enumerate(
          self._member.errors or [np.zeros_like(c) for c in center]))
    return tensors

  def _restore_from_tensors(self, restored_tensors):
    self._member.restore(*self._saved(
        {key: x.numpy() for key, x in restored_tensors.items()}))
    # The next step takes the center, after all variables were restored.
    self._held.assign(-1)
    self._steps.assign(self.sync_every)

  def _read_checkpoint(self, path):
    """As `_saved`; None if `path` is a directory without checkpoints."""
    folder, path = os.fspath(path), os.fspath(path)
    if not tf.io.gfile.exists(path + ".index"):
      path = tf.train.latest_checkpoint(folder)
      if path is None:
        tf.get_logger().warning(
            "There is no checkpoint in %s: worker '%s' begins without one.",
            folder, self._worker)
        return None
    reader = tf.train.load_checkpoint(path)
    objects = {}  # Their tensors, by the names of objects that have a center.
    for key in reader.get_variable_to_shape_map():
      name, _, tensor = key.rpartition("/.ATTRIBUTES/")
      objects.setdefault(name, {})[tensor] = key
    objects = {name: keys for name, keys in objects.items()
               if {"round", "center_0", "variables"} <= keys.keys()}
    if len(objects) != 1:
      raise ValueError(
          "`checkpoint` must be of a tf.train.Checkpoint with one LocalSGD or "
          f"DiLoCo, got {path!r} with {len(objects)} of them"
          + (f": {', '.join(sorted(objects))}" if objects else "") + ".")
    (_, keys), = objects.items()
    return self._saved({tensor: reader.get_tensor(key)
                        for tensor, key in keys.items()})

  def _saved(self, tensors):
    """The arguments of `Member.restore`, of a checkpoint's tensors by name."""
    described = [
        _settings.Variable.read(text.decode()) for text in tensors["variables"]]
    for i, (got, v) in enumerate(itertools.zip_longest(
        described, self._described)):
      if got is None or v is None or got[1:] != v[1:]:
        raise ValueError(
            "A checkpoint must have the center of the same variables, in the "
            f"same order, got for variable {i}: {got and got.write()!r} in the "
            f"file, {v and v.write()!r} here.")
    get = lambda what: [tensors[key] for key in sorted(tensors)
                        if key.startswith(what)]
    center, velocities, lost, errors = map(
        get, ("center_", "velocity_", "error_", "own_error_"))
    if self._only_finite and not all(
        np.isfinite(x).all() for x in [*center, *velocities, *lost, *errors]):
      raise ValueError("The center and the velocity of a checkpoint must be "
                       "finite, got NaN or infinity: restore an earlier one.")
    # Errors of another worker are still that worker's.
    is_own = tensors.get("worker") == self._worker.encode()
    return (int(tensors["round"]), center,
            velocities if self._has_velocities else [],
            lost if self._layout.travels else [],
            errors if self._layout.travels and is_own else [])


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
