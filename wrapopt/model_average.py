"""Averages the weights of workers that train independently of each other."""

import time
from typing import Any, Optional

import tensorflow as tf

from wrapopt import _checks
from wrapopt import ops
from wrapopt._local import _in_graph
from wrapopt._types import (
    GradsAndVars, Integer, Operation, SessionRunHook, V1Optimizer, Variable)
from wrapopt._v1._graphs import _control_flow
from wrapopt._v1._steps import _step
from wrapopt._v1._workers import _centers
from wrapopt._v1._workers import _stops
from wrapopt._v1._wrapper import WrapperOptimizer

tf1 = tf.compat.v1

_ROUND_TIMEOUT_SECS = 600.0
_CHIEF_TIMEOUT_SECS = 1200.0
_POLL_SECS = 0.1


class ModelAverageCustomGetter(_centers.CenterGetter):
  """Makes local variables of a worker, and centers that all workers share.

  The `custom_getter` of a variable scope in which a worker builds its model for
  `ModelAverageOptimizer`, under a `replica_device_setter`.

  A trainable variable `<name>` becomes a local variable of the worker: on
  `worker_device`, in the collection LOCAL_VARIABLES instead of
  GLOBAL_VARIABLES, and in the other collections that the caller names. The
  getter also makes its center, which all workers share:
  `global_center_variable/<name>`, not trainable, in GLOBAL_VARIABLES, of the
  same dtype and shape, on the device that the caller's scope chooses. The
  center starts with the initial value of the worker's variable, without reading
  the variable: also with that of `tf.compat.v1.train.init_from_checkpoint` or
  `warm_start`, if `get_init_op`, the hook or `apply_gradients` is called after
  it. A center that has such an initializer itself keeps it. A
  `PartitionedVariable` has a center for each slice. A variable that is reused
  keeps its center.

  Other variables are not changed, except that those of LOCAL_VARIABLES are
  placed on `worker_device`.

  Example, of one worker and a parameter server:

  >>> import tensorflow.compat.v1 as tf1
  >>> getter = wrapopt.ModelAverageCustomGetter("/job:worker/task:0")
  >>> with tf.Graph().as_default(), tf1.device(tf1.train.replica_device_setter(
  ...     cluster={"ps": ["ps:1"], "worker": ["worker:1"]})):
  ...   with tf1.variable_scope("model", custom_getter=getter):
  ...     w = tf1.get_variable("w", [2])
  ...   [center] = tf1.global_variables()
  ...   for v in w, center:
  ...     print(v.op.name, v.device)
  model/w /job:worker/task:0
  global_center_variable/model/w /job:ps/task:0

  Raises, when the getter is called:
    RuntimeError: In eager mode.
    NotImplementedError: In a `tf.distribute` strategy.

  Reference: `tf.contrib.opt.ModelAverageCustomGetter` of TensorFlow 1.15.

  Differences from 1.15: the caller's collections are kept, and may be None;
  reuse; partitioned and resource variables; centers start at the values of a
  file that initializes the worker's variables.
  """

  def __init__(self, worker_device: str) -> None:
    """Makes the getter of one worker.

    Args:
      worker_device: The device of the worker's variables, as in `tf.device`,
        such as "/job:worker/task:0".

    Raises:
      ValueError: If `worker_device` is a string that names no device.
    """
    super().__init__(worker_device)
    # Its name in 1.15.
    self._local_2_global = self.centers


class ModelAverageOptimizer(WrapperOptimizer):
  """Trains a model per worker, and replaces them by their mean at intervals.

  Each worker trains local variables. Every `interval_steps` steps of the inner
  optimizer it sends their values to the parameter servers and waits. The
  parameter servers add the values to a running mean, in float (double for
  double). Once those of all M workers have come,

      center = (1 / M) sum_k local_k

  Then the global step is incremented, and every worker resumes from the
  centers. This is a round. The global step counts rounds, not steps of the
  inner optimizer. The order of the sum, that in which the workers come, may
  show in the last bits.

  Each of the `num_worker` workers builds the same graph, makes its variables
  with a `ModelAverageCustomGetter` under
  `tf.compat.v1.train.replica_device_setter`, and gives its session the hook of
  `make_session_run_hook`. The hook starts the worker from the centers, after
  they were initialized or restored from a checkpoint.

  Slow and dead workers: a round ends `round_timeout_secs` after a worker has
  reached it, if at least `min_workers` workers have sent their values. Late or
  restarted workers resume from the centers and take part in the next round.
  After a worker has missed a round, no round waits for it until it returns.
  With too few workers, the step of those that wait fails with
  `tf.errors.DeadlineExceededError`, which names the workers that came. No
  worker is special in a round. One is the chief of the sessions: it initializes
  the centers or restores them, and all workers then start from these.

  A step between rounds runs the inner optimizer's step and some dozen other
  nodes, whatever the number of variables. It transfers no value. A session
  starts all of its graph, so each step makes a call for each tensor of a round,
  which is answered that there is none: two for up to 24 MiB of variables or
  for one larger variable, and two more for a parameter server.

  State: the parameter servers hold a center for each variable and, while a
  round is open, its mean and the values of a few workers that send theirs at
  the time. The worker holds the variables `local_step` (int32 scalar, the
  number of its steps) and `local_round` (int64 [2], its round and the round's
  generation). The worker's variables and the inner optimizer's slots are in
  LOCAL_VARIABLES and not in a checkpoint. The checkpoint holds the centers as
  `global_center_variable/<name>`, and the global step.

  Example of one worker, in one process:

  >>> with tf.Graph().as_default():
  ...   getter = wrapopt.ModelAverageCustomGetter("/cpu:0")
  ...   with tf.compat.v1.variable_scope("", custom_getter=getter):
  ...     w = tf.compat.v1.get_variable("w", initializer=1.0)
  ...   step = tf.compat.v1.train.get_or_create_global_step()
  ...   opt = wrapopt.ModelAverageOptimizer(
  ...       tf.compat.v1.train.GradientDescentOptimizer(0.25), 1, True, getter,
  ...       interval_steps=2)
  ...   train_op = opt.minimize(w, step)
  ...   with tf.compat.v1.train.MonitoredTrainingSession(
  ...       hooks=[opt.make_session_run_hook()]) as session:
  ...     for _ in range(4):
  ...       _ = session.run(train_op)
  ...     print(*session.run([w, step]))
  0.0 2

  References: `tf.contrib.opt.ModelAverageOptimizer` of TensorFlow 1.15; Zhang,
  De Sa, Mitliagkas and Re, "Parallel SGD: when does averaging help?", 2016.

  Differences from 1.15: workers start from the centers after initialization and
  after a restore (1.15 overwrote restored centers with initial values);
  deadlines, `min_workers`, and restarted workers, the chief included; a worker
  sends its values in a few transfers instead of one for each variable, and
  sends none between rounds; the sum does not overflow in half precision; all
  dtypes; resource variables and control flow v2; the inner optimizer's
  variables are local, so that the session of a worker that is not the chief
  becomes ready; `local_step` is on the worker, whatever the device scope of the
  constructor; a worker takes one step at a time; several instances in one graph
  or in one cluster. Arguments are checked: numbers of workers must be integers
  of at least 1, and so must an `interval_steps` that is a number; workers
  without a device must have names. `opt` must be a
  `tf.compat.v1.train.Optimizer`, and `ma_custom_getter` a
  `ModelAverageCustomGetter`. Shapes must be known when the graph is built,
  because a transfer holds many values.
  """

  def __init__(self, opt: V1Optimizer, num_worker: int, is_chief: bool,
               ma_custom_getter: ModelAverageCustomGetter,
               interval_steps: Integer = 100, use_locking: bool = True,
               name: str = "ModelAverageOptimizer", *,
               min_workers: Optional[int] = None,
               round_timeout_secs: Optional[float] = None,
               chief_timeout_secs: Optional[float] = None,
               worker: Optional[str] = None) -> None:
    """Wraps `opt`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`, for the variables of this worker.
      num_worker: The number of workers, including the chief.
      is_chief: Whether this worker is the chief of the sessions. There is
        exactly one.
      ma_custom_getter: The `ModelAverageCustomGetter` that makes the variables.
      interval_steps: The number of steps of this worker in a round: an integer
        of at least 1, or a scalar integer tensor or variable.
      use_locking: Has no effect, as in 1.15; the averaging always locks.
      name: The name of the optimizer, the same for all workers.
      min_workers: The number of workers that end a round after
        `round_timeout_secs`, from 1 to `num_worker`; by default `num_worker`.
      round_timeout_secs: The time that a worker waits in a round for the
        others, in seconds; by default 600.
      chief_timeout_secs: The time that the hook of a worker waits for that of
        the chief, in seconds; by default 1200, or twice `round_timeout_secs` if
        that is more. A worker in a round waits as long, after
        `round_timeout_secs`, while a chief that has restarted restores.
      worker: The name of this worker, different from all others and the same
        after a restart; by default the `worker_device` of the getter. A single
        worker needs no name.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`,
        `ma_custom_getter` is not a `ModelAverageCustomGetter`, `is_chief` is
        not a bool, or a number of workers or steps is not an integer.
      ValueError: If a number is out of its range.
      RuntimeError: In eager mode.
    """
    super().__init__(opt, name)
    del use_locking
    is_chief = _checks.boolean_or_01("is_chief", is_chief)
    num_worker = _checks.integer("num_worker", num_worker, least=1)
    interval_steps = _centers.check_period("interval_steps", interval_steps)
    if not isinstance(ma_custom_getter, ModelAverageCustomGetter):
      raise TypeError("`ma_custom_getter` must be the ModelAverageCustomGetter "
                      "that makes the variables, got "
                      f"{type(ma_custom_getter).__qualname__}.")
    if min_workers is None:
      min_workers = num_worker
    min_workers = _checks.integer("min_workers", min_workers, least=1)
    if min_workers > num_worker:
      raise ValueError(
          f"`min_workers` must be at most {num_worker}, the number of workers, "
          f"got {min_workers}.")
    if round_timeout_secs is None:
      round_timeout_secs = _ROUND_TIMEOUT_SECS
    _centers.check_seconds("round_timeout_secs", round_timeout_secs)
    if chief_timeout_secs is None:
      chief_timeout_secs = max(_CHIEF_TIMEOUT_SECS, 2 * round_timeout_secs)
    _centers.check_seconds("chief_timeout_secs", chief_timeout_secs)
    if worker is not None and not (isinstance(worker, str) and worker):
      raise ValueError(f"`worker` must be a name, got {worker!r}.")
    _centers.require_graph(type(self).__name__)
    self._getter = ma_custom_getter
    self._interval_steps = interval_steps
    self._device = ma_custom_getter.worker_device
    self._rounds = [self._new_rounds()]
    worker = worker or self._rounds[0].local_step.device
    if not worker and num_worker > 1:
      raise ValueError(
          "`worker` must be a name if the getter's worker_device is None and "
          "there are several workers, got None.")
    self._is_chief = is_chief
    self._member = _in_graph.Member(worker or "worker", num_worker, min_workers,
                                    float(round_timeout_secs),
                                    chief_timeout_secs)
    self._applied = 0  # The number of calls of `apply_gradients`.
    self._starts: list[Any] = []  # What `get_init_op` has made.

  def _new_rounds(self):
    return _in_graph.Rounds(self.get_name(), self._device)

  @ops.not_converted
  def apply_gradients(self, grads_and_vars: GradsAndVars,
                      global_step: Optional[Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[Operation]:
    """Applies gradients to this worker's variables, and averages if due.

    Args:
      grads_and_vars: An iterable of (gradient, variable). Variables without a
        gradient are not averaged.
      global_step: The step variable, which counts the rounds.
      name: A name for the returned tensor.
      **kwargs: Further arguments of the inner optimizer.

    Returns:
      A scalar bool tensor: whether this step ended a round. Running it takes
      the step. A worker must take one step at a time: two concurrent steps are
      a `tf.errors.InvalidArgumentError`.

    Raises:
      TypeError: If `global_step` is not a variable.
      ValueError: If there is no variable, no gradient or no global step, or
        `ma_custom_getter` did not make a variable.
    """
    return _step.apply_gradients(self._take, grads_and_vars, global_step, name,
                                 kwargs)

  def _take(self, step):
    self._getter.follow_files()
    taken = _step.where_accepted(self, step, self._take_accepted)
    for start in self._starts:
      start.also_in(self._open_rounds()[-1])
    return taken

  def _open_rounds(self):
    """The rounds of all `apply_gradients`: a list."""
    return self._rounds[:self._applied]

  def _touches_few_rows(self):
    # An exchange changes all rows.
    return False

  def _take_accepted(self, step):
    if not step.grads_and_vars:
      raise ValueError("Must supply at least one variable")
    if step.global_step is None:
      raise ValueError("Global step is required")
    if not isinstance(step.global_step, tf.Variable):
      raise TypeError("`global_step` must be a variable, got "
                      f"{step.global_step!r}.")
    pairs = [(v, self._getter.center_of(v)) for g, v in step.grads_and_vars
             if g is not None]
    stepped = _step.take_inside(self, step)
    if self._applied == len(self._rounds):
      self._rounds.append(self._new_rounds())
    rounds = self._rounds[self._applied]
    self._applied += 1

    due, not_due, counted = _centers.count_step(
        rounds.local_step, stepped, self._interval_steps)
    started = self._member.take_part(rounds, pairs, counted, due,
                                     step.global_step)
    with ops.host_of(rounds.local_step):
      with tf.control_dependencies([started]):
        averaged = tf.identity(due)
      with tf.control_dependencies([counted]):
        only_stepped = tf.identity(not_due)
      done = tf.identity(_control_flow.join(averaged, only_stepped),
                         step.name or self._name)
    return _step.Taken(_step.follow(done, step.averages), True)

  def _making_state(self):
    return _centers.worker_state(self._device)

  def _fuses(self):
    return False  # A round may follow the inner optimizer's step.

  def get_init_op(self) -> Operation:
    """An operation that starts this worker's variables from the centers.

    The hook of `make_session_run_hook` runs it. Without the hook, run it in
    each worker once all variables are initialized. It may be made before or
    after `apply_gradients`.

    Returns:
      An operation.

    Raises:
      ValueError: If `ma_custom_getter` has made no variable yet.
    """
    self._getter.follow_files()
    pairs = [(v, self._getter.center_of(v))
             for v in self._getter.centers.in_graph()]
    if not pairs:
      raise ValueError("The list of local_variables should not be empty. Build "
                       "the model first, with the ModelAverageCustomGetter.")
    start = self._member.start(pairs)
    for rounds in self._open_rounds():
      start.also_in(rounds)
    self._starts.append(start)
    return start.op

  def make_session_run_hook(self) -> SessionRunHook:
    """A hook that starts this worker from the centers.

    Give it to the worker's session, such as
    `tf.compat.v1.train.MonitoredTrainingSession`. Whenever a session is
    created, after initialization or a restore, the hook of the chief begins a
    new round, since the centers may be others. The hook of another worker waits
    until the chief has begun one. Then the hook runs `get_init_op`.

    Returns:
      A `tf.compat.v1.train.SessionRunHook`. It raises a
      `tf.errors.DeadlineExceededError` if no chief comes within
      `chief_timeout_secs`.
    """
    return _Hook(self)


class _Hook(SessionRunHook):
  """See `ModelAverageOptimizer.make_session_run_hook`."""

  def __init__(self, optimizer):
    self._optimizer = optimizer

  def begin(self):
    opt = self._optimizer
    self._init = opt.get_init_op()
    if not opt._is_chief:
      self._ready = opt._member.are_open(opt._open_rounds())
      return
    # The session initializes or restores the centers before it calls the hook.
    # Meanwhile other workers must not end a round.
    _stops.stop_before_writes(opt._member.stop(opt._open_rounds()),
                              opt._getter.centers)
    self._ready = opt._member.begin(opt._open_rounds())

  def after_create_session(self, session, coord):
    opt = self._optimizer
    limit = opt._member.chief_timeout_secs
    deadline = time.monotonic() + limit
    # The worker polls: a wait on the server would outlive the worker.
    while not opt._is_chief and not session.run(self._ready):
      if coord is not None and coord.should_stop():
        return
      if time.monotonic() > deadline:
        raise tf.errors.DeadlineExceededError(
            None, None, f"No chief of '{opt.get_name()}' has begun a round "
            f"within {limit} seconds (`chief_timeout_secs`): "
            "start the chief with its hook.")
      time.sleep(_POLL_SECS)
    if opt._is_chief:
      session.run(self._ready)
    session.run(self._init)
