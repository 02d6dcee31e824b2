"""Elastic averaging: workers explore around a shared center."""

from collections.abc import Iterable
import functools
import numbers
import time
from typing import Any, Optional

import tensorflow as tf

from wrapopt import _checks
from wrapopt import ops
from wrapopt._types import (
    Float, Gradient, GradsAndVars, Integer, Loss, Operation, SessionRunHook,
    V1Optimizer, Variable)
from wrapopt._v1._evaluation import _swapping_saver
from wrapopt._v1._graphs import _control_flow
from wrapopt._v1._steps import _step
from wrapopt._v1._workers import _centers
from wrapopt._v1._workers import _elastic
from wrapopt._v1._wrapper import WrapperOptimizer

tf1 = tf.compat.v1

LOCAL_CENTER = "local_center_variable"


class ElasticAverageCustomGetter(_centers.CenterGetter):
  """Makes local variables of a worker, and centers that all workers share.

  The `custom_getter` of a variable scope in which a worker builds its model for
  `ElasticAverageOptimizer`, under a `replica_device_setter`.

  It makes the same variables as `ModelAverageCustomGetter`, and one more: for a
  variable `<name>` and its center `global_center_variable/<name>`, the worker's
  copy of the center from the last exchange, `local_center_variable/<name>`, not
  trainable, in LOCAL_VARIABLES, on `worker_device`.

  Example:

  >>> import tensorflow.compat.v1 as tf1
  >>> getter = wrapopt.ElasticAverageCustomGetter("/job:worker/task:0")
  >>> with tf.Graph().as_default(), tf1.device(tf1.train.replica_device_setter(
  ...     cluster={"ps": ["ps:1"], "worker": ["worker:1"]})):
  ...   with tf1.variable_scope("model", custom_getter=getter):
  ...     w = tf1.get_variable("w", [2])
  ...   for v in tf1.global_variables() + tf1.local_variables():
  ...     print(v.op.name, v.device)
  global_center_variable/model/w /job:ps/task:0
  model/w /job:worker/task:0
  local_center_variable/model/w /job:worker/task:0

  Raises, when the getter is called:
    RuntimeError: In eager mode.
    NotImplementedError: In a `tf.distribute` strategy.

  Reference: `tf.contrib.opt.ElasticAverageCustomGetter` of TensorFlow 1.15.

  Differences from 1.15: the caller's collections are kept, and may be None;
  reuse; all three variables start with the same value, even with a random
  initializer or one of a file; only the worker's variable has regularizers and
  constraints.
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
    self.local_centers = _centers.VariableMap()
    # Their names in 1.15.
    self._global_map = self.centers
    self._local_map = self.local_centers

  def _make_copies(self, getter, name, variable, kwargs):
    super()._make_copies(getter, name, variable, kwargs)
    with tf.device(self.worker_device):
      self._copy(getter, f"{LOCAL_CENTER}/{name}", variable, kwargs,
                 tf1.GraphKeys.LOCAL_VARIABLES, self.local_centers)


class ElasticAverageOptimizer(WrapperOptimizer):
  """Trains a model per worker, and pulls worker and center to each other.

  Each of `num_worker` asynchronous workers trains local variables. After every
  `communication_period` of its steps, it exchanges with the centers on the
  parameter servers. With `v` the worker's variable and `c` its center, both
  before the exchange,

      local_center = c
      v += moving_rate (c - v)
      c += moving_rate (v - c)

  Between two exchanges, each gradient pulls towards the center of the last
  exchange: `compute_gradients` adds to the loss

      rho / 2 sum |v - local_center|^2

  The centers are the model. The workers may differ from it and from each other.
  This explores more than asynchronous descent, with a fraction of its traffic.

  An exchange packs variables: for up to 24 MiB of them, or for one larger
  variable, one tensor carries the worker's values to the parameter server and
  one carries the centers back. A native op updates each side. The ops lock the
  centers, so that no update of another worker is lost.

  A step between exchanges runs the inner optimizer's step and some dozen other
  nodes, whatever the number of variables. It transfers no value. A session
  starts all of its graph, so each step makes a call for each tensor of an
  exchange, which is answered that there is none.

  `global_step` counts the exchanges of all workers, not steps.

  An `ElasticAverageCustomGetter` makes the variables. State: `local_step`
  (int32 scalar, the number of this worker's steps; further instances get
  `local_step_1` and so on), and the inner optimizer's variables. All of these
  are in LOCAL_VARIABLES, on the worker's device, and not in a checkpoint. The
  checkpoint holds `global_center_variable/<name>`. The hook of
  `make_session_run_hook` starts each worker from the centers, restored or not.

  Example of a single worker with a center at 0. It takes two steps of 1, then
  worker and center move half of the way to each other:

  >>> import tensorflow.compat.v1 as tf1
  >>> with tf.Graph().as_default():
  ...   getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
  ...   with tf1.variable_scope("", custom_getter=getter):
  ...     w = tf1.get_variable("w", initializer=0.0)
  ...   opt = wrapopt.ElasticAverageOptimizer(
  ...       tf1.train.GradientDescentOptimizer(1.0), 1, getter,
  ...       communication_period=2, moving_rate=0.5, rho=0.0)
  ...   train = opt.minimize(-w, tf1.train.get_or_create_global_step())
  ...   [center] = [v for v in tf1.global_variables() if "center" in v.name]
  ...   hooks = [opt.make_session_run_hook(is_chief=True, task_index=0)]
  ...   with tf1.train.MonitoredTrainingSession(hooks=hooks) as session:
  ...     for _ in range(4):
  ...       session.run(train)
  ...       print(*session.run([w, center]))
  1.0 0.0
  1.0 1.0
  2.0 1.0
  2.0 2.0

  References: Zhang, Choromanska and LeCun, "Deep learning with elastic
  averaging SGD", NeurIPS 2015 (there `moving_rate` is alpha, and
  `communication_period` tau);
  `tf.contrib.opt.ElasticAverageOptimizer` of TensorFlow 1.15.

  Differences from 1.15: any subset of variables; the learning rate may be a
  callable or unknown; resource variables; control flow version 2; `synchronous`
  does not deadlock; several instances in a graph and in a cluster; `get_slot`,
  `get_slot_names` and `variables` are the inner optimizer's; few transfers, and
  none between exchanges; a worker takes one step at a time; no exchange is
  lost; `apply_gradients` returns an operation, which is the TRAIN_OP. Arguments
  are checked: `moving_rate` must be in [0, 1]; `rho`, given or computed from
  the learning rate, must not be negative, since it would drive worker and
  center apart; numbers of workers or steps must be integers of at least 1;
  `var_list` must not be empty (1.15 then trained all variables). `opt` must be
  a `tf.compat.v1.train.Optimizer`, and `ea_custom_getter` an
  `ElasticAverageCustomGetter`. Shapes must be known when the graph is built,
  because a transfer holds many values.
  """

  BETA = 0.9

  def __init__(self, opt: V1Optimizer, num_worker: int,
               ea_custom_getter: ElasticAverageCustomGetter,
               communication_period: Integer = 10,
               moving_rate: Optional[Float] = None, rho: Optional[Float] = None,
               use_locking: bool = True, synchronous: bool = False,
               name: str = "ElasticAverageOptimizer", *,
               start_timeout_secs: float = 600) -> None:
    """Wraps `opt`, in the graph of one worker.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      num_worker: The number of workers, the chief included.
      ea_custom_getter: The `ElasticAverageCustomGetter` that makes the trained
        variables, before or after this call.
      communication_period: The number of a worker's steps from one exchange to
        the next: an integer of at least 1, or a scalar integer tensor or
        variable.
      moving_rate: The fraction of their distance that worker and center each
        move in an exchange: a number in [0, 1], or a scalar tensor or variable.
        By default `0.9 / communication_period / num_worker`, as in 1.15. With
        that, the center is far behind after a few hundred exchanges of a long
        period: try `0.9 / num_worker`.
      rho: The stiffness of the pull between exchanges: a number of at least 0,
        or a scalar tensor or variable. The number 0 adds nothing to the loss.
        By default `moving_rate` divided by the learning rate of the optimizer
        inside all wrappers, if its learning rate scales gradients.
      use_locking: Has no effect, as in 1.15; the centers are always locked.
      synchronous: Whether the hook makes each worker wait until all workers
        have started. A restarted worker does not wait. A restarted job does not
        wait either, if its parameter servers kept running.
      name: The name of the optimizer.
      start_timeout_secs: The time that the hook waits if `synchronous`, in
        seconds.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`,
        `ea_custom_getter` is not an `ElasticAverageCustomGetter`, a count is
        not an integer, or another argument has a wrong type.
      ValueError: If a number is out of range, or `rho` is not given and the
        learning rate is not known.
      RuntimeError: In eager mode.
      NotImplementedError: In a `tf.distribute` strategy.
    """
    super().__init__(opt, name)
    del use_locking
    _centers.require_graph(type(self).__name__)
    num_worker = _checks.integer("num_worker", num_worker, least=1)
    communication_period = _centers.check_period("communication_period",
                                                 communication_period)
    if not isinstance(ea_custom_getter, ElasticAverageCustomGetter):
      raise TypeError(
          "`ea_custom_getter` must be the ElasticAverageCustomGetter of the "
          f"model's variables, got {ea_custom_getter!r}.")
    if moving_rate is None:
      if not isinstance(communication_period, int):
        raise ValueError("`moving_rate` must be given if "
                         "`communication_period` is not an integer, got "
                         f"{communication_period!r}.")
      moving_rate = self.BETA / communication_period / num_worker
    else:
      moving_rate = _checks.number_or_tensor("moving_rate", moving_rate,
                                             _checks.fraction)
    if rho is not None:
      rho = _checks.number_or_tensor(
          "rho", rho, functools.partial(_checks.number, least=0))
    _centers.check_seconds("start_timeout_secs", start_timeout_secs)
    self._num_worker = num_worker
    self._getter = ea_custom_getter
    self._period = communication_period
    self._moving_rate = moving_rate
    self._rho = rho
    self._rho_lr = (
        _elastic.learning_rate(self._innermost()) if rho is None else None)
    self._synchronous = _checks.boolean_or_01("synchronous", synchronous)
    self._start_timeout_secs = start_timeout_secs
    self._local_step = _centers.make_local_step(ea_custom_getter.worker_device)

  # Training

  def compute_gradients(
      self, loss: Loss, var_list: Optional[Iterable[Variable]] = None,
      *args: Any, **kwargs: Any) -> list[tuple[Optional[Gradient], Variable]]:
    """Computes gradients of the loss and of the pull towards the centers.

    Args:
      loss: A tensor, or a function that returns one.
      var_list: The variables to train; by default all trainable ones.
      *args: See `tf.compat.v1.train.Optimizer.compute_gradients`.
      **kwargs: See there.

    Returns:
      A list of (gradient, variable).

    Raises:
      ValueError: If there is no variable, or the getter did not make one.
    """
    if var_list is None:
      var_list = tf1.trainable_variables()
    var_list = [v for x in tf.nest.flatten(var_list)
                for v in _centers.slices(x)]
    pairs = list(zip(var_list, self._copies(var_list)[1]))
    rho = self._rho_now()
    if pairs and not (isinstance(rho, numbers.Real) and rho == 0):
      total = lambda loss: loss + tf.cast(_elastic.penalty(rho, pairs),
                                          loss.dtype)
      loss_of_model = loss
      loss = ((lambda: total(tf.convert_to_tensor(loss_of_model())))
              if callable(loss) else total(tf.convert_to_tensor(loss)))
    return super().compute_gradients(loss, var_list, *args, **kwargs)

  def _rho_now(self):
    if self._rho is not None:
      return self._rho
    rate, lr = self._moving_rate, self._rho_lr
    if callable(lr) and not isinstance(lr, tf.Variable):
      lr = lr()
    if isinstance(rate, numbers.Real) and isinstance(lr, numbers.Real):
      return rate / lr
    return ops.float64(rate) / ops.float64(lr)

  @ops.not_converted
  def apply_gradients(self, grads_and_vars: GradsAndVars,
                      global_step: Optional[Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[Operation]:
    """Takes a step of the inner optimizer, and exchanges if due.

    Args:
      grads_and_vars: An iterable of (gradient, variable). A variable with a
        None gradient is neither trained nor exchanged.
      global_step: A variable that an exchange increments, or None.
      name: A name for the operation.
      **kwargs: Further arguments of the inner optimizer.

    Returns:
      An `Operation`. A worker must take one step at a time: two concurrent
      steps are a `tf.errors.InvalidArgumentError`.

    Raises:
      ValueError: If there is no variable, none has a gradient, or the getter
        did not make one.
    """
    return _step.apply_gradients(self._take, grads_and_vars, global_step, name,
                                 kwargs)

  def _take(self, step):
    self._getter.follow_files()
    return _step.where_accepted(self, step, self._take_accepted)

  def _touches_few_rows(self):
    # An exchange changes all rows.
    return False

  def _take_accepted(self, step):
    # The inner optimizer refuses anything that is not a variable.
    variables = list({v.ref(): v for g, v in step.grads_and_vars
                      if g is not None and isinstance(v, tf.Variable)}.values())
    centers, local_centers = self._copies(variables)
    stepped = _step.take_inside(self, step)
    steps = [] if step.global_step is None else [step.global_step]
    with tf.name_scope(self._name):
      due, not_due, counted = _centers.count_step(self._local_step, stepped,
                                                  self._period)
      exchanged = _elastic.exchange(variables, centers, local_centers,
                                    self._moving_rate, steps, counted, due)
      with ops.host_of(self._local_step):
        with tf.control_dependencies(exchanged):
          taken = tf.identity(due)
        done = _control_flow.join(taken, not_due)
    with ops.device_of(self._local_step):
      train = tf.group(done, counted, name=step.name or self._name)
    return _step.Taken(_step.follow(train, step.averages), True)

  def _making_state(self):
    return _centers.worker_state(self._getter.worker_device)

  def _fuses(self):
    return False  # An exchange may follow the inner optimizer's step.

  def _copies(self, variables):
    """(the centers of `variables`, the worker's copies of the centers)."""
    return (list(map(self._getter.center_of, variables)),
            [self._getter.local_centers[v] for v in variables])

  # Starting

  def get_init_op(self, task_index: int) -> Operation:
    """An operation that a worker runs before its first step.

    Args:
      task_index: The number of this worker, different from those of the others,
        in [0, num_worker). It matters only if `synchronous`.

    Returns:
      An operation that sets the worker's variables, and its copies of the
      centers, to the centers. If `synchronous`, it also marks this worker as
      started. The operation does not wait for the others; the hook does.

    Raises:
      ValueError: If there is no variable yet, or `task_index` is out of range.
    """
    if self._synchronous and not 0 <= task_index < self._num_worker:
      raise ValueError(f"`task_index` must be in [0, {self._num_worker}), got "
                       f"{task_index}.")
    self._getter.follow_files()
    variables = self._getter.centers.in_graph()
    if not variables:
      raise ValueError(
          "The custom getter must have made at least one variable, got none. "
          "Build the model first.")
    centers, local_centers = self._copies(variables)
    with tf.name_scope(f"{self._name}/init"):
      init = _centers.copy_packed(centers, variables, local_centers)
      if not self._synchronous:
        return init
      with tf.control_dependencies([init]):
        return self._on_started(task_index, lambda handle: (
            tf.raw_ops.AssignVariableOp(resource=handle, value=True)))

  def _on_started(self, task_index, function):
    """Calls `function` with the handle of the mark that a worker has started.

    A worker has started if the resource of its number exists. It needs no
    initialization, and no checkpoint holds it.
    """
    center = self._getter.centers[self._getter.centers.in_graph()[0]]
    with ops.device_of(center):
      return function(tf.raw_ops.VarHandleOp(
          dtype=tf.bool, shape=[],
          shared_name=f"{center.op.name}/{self._name}/"
          f"{self._local_step.op.name}/started_{task_index}"))

  def _started(self):
    """A bool vector: for each worker, whether it has started."""
    return tf.stack([
        self._on_started(i, lambda handle: tf.raw_ops.VarIsInitializedOp(
            resource=handle)) for i in range(self._num_worker)])

  def make_session_run_hook(self, is_chief: bool,
                            task_index: int) -> SessionRunHook:
    """The hook that every worker's session needs.

    It starts the worker from the centers whenever its session is created: at
    the start, after a restore, and after a failure.

    Args:
      is_chief: Whether this is the chief. It has no effect.
      task_index: As in `get_init_op`.

    Returns:
      A `tf.compat.v1.train.SessionRunHook`. If `synchronous`, it raises a
      `tf.errors.DeadlineExceededError` if a worker has not started in time.
    """
    del is_chief
    return _StartHook(self, task_index)

  # Checkpoints

  def swapping_saver(self, var_list: Any = None, name: str = "swapping_saver",
                     **kwargs: Any) -> _swapping_saver.SwappingSaver:
    """A Saver that writes centers under the names of the variables.

    For the program that evaluates or serves the model: its plain
    `tf.compat.v1.train.Saver` restores such a file into variables that were
    made without the getter. In a worker's graph, this saver restores the
    centers.

    Args:
      var_list: The variables to save: None for all trainable variables, an
        iterable of variables, or a dict from names to variables. Variables
        without a center are saved unchanged.
      name: A name for the saver's operations.
      **kwargs: Arguments of `tf.compat.v1.train.Saver`.

    Returns:
      A `tf.compat.v1.train.Saver`.

    Raises:
      RuntimeError: If there is no center yet.
    """
    if not self._getter.centers.in_graph():
      raise RuntimeError(
          "swapping_saver needs at least one center, got none. Make the "
          "variables with the ElasticAverageCustomGetter first.")
    if var_list is None:
      var_list = tf1.trainable_variables()
    return tf1.train.Saver(
        _swapping_saver.replaced(var_list, self._getter.centers), name=name,
        **kwargs)


class _StartHook(SessionRunHook):
  """See `ElasticAverageOptimizer.make_session_run_hook`."""

  _PAUSE_SECS = 0.1

  def __init__(self, opt, task_index):
    self._opt, self._task_index = opt, task_index

  def begin(self):
    self._start = self._opt.get_init_op(self._task_index)
    if self._opt._synchronous:
      self._started = self._opt._started()

  def after_create_session(self, session, coord):
    session.run(self._start)
    if self._opt._synchronous:
      self._wait(session, coord)

  def _wait(self, session, coord):
    # The worker polls: a wait on the parameter server would outlive the worker.
    timeout = self._opt._start_timeout_secs
    deadline = time.monotonic() + timeout
    while not coord.should_stop():
      missing = [i for i, started in enumerate(session.run(self._started))
                 if not started]
      if not missing:
        return
      if time.monotonic() > deadline:
        raise tf.errors.DeadlineExceededError(
            None, None,
            f"All {self._opt._num_worker} workers must start within {timeout} "
            f"seconds (`start_timeout_secs`), but workers {missing} have not.")
      time.sleep(self._PAUSE_SECS)
