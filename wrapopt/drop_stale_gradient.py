"""Asynchronous training that drops gradients of old weights."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
from typing import Any, Optional, Union

import tensorflow as tf

from wrapopt import _checks
from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _memory
from wrapopt._gates import _policies
from wrapopt._gates import _recorder
from wrapopt._gates import _records
from wrapopt._gates import _staleness
from wrapopt._gates import _tokens
from wrapopt._types import (
    Gradient, GradsAndVars, Integer, Loss, Operation, Tensor, V1Optimizer,
    Variable)
from wrapopt._v1._averages import _slots
from wrapopt._v1._steps import _gate
from wrapopt._v1._steps import _gate_counts
from wrapopt._v1._steps import _step
from wrapopt._v1._wrapper import WrapperOptimizer

tf1 = tf.compat.v1


class DropStaleGradientOptimizer(WrapperOptimizer):
  """Drops gradients that were computed from old weights.

  For asynchronous training: several workers compute gradients of shared weights
  and apply them without waiting for each other. The staleness of a gradient is
  the number of updates that its weights may miss. These are the updates that
  other workers had begun and not completed when this worker began to read the
  weights, and the updates that were admitted after that. If the staleness is at
  most the limit, the inner optimizer applies the gradient. If not, only the
  counters change, and the gradient is not sent to the parameter servers.

  One native op on the device of the global step decides and counts, atomically.
  No admitted update is computed from weights that miss more than `staleness`
  updates, however many workers run concurrently. If a worker dies during an
  update, its slot is released.

  State: the variables `stale_counter` (float32 scalar, the number of dropped
  gradients) and `staleness_histogram` (int64, [2, 64], see `staleness_stats`).
  They are not trainable, are on the device of the global step, and are named in
  the variable scope of the first `apply_gradients`; further instances there get
  `stale_counter_1` and so on. A checkpoint of 1.15 has no
  `staleness_histogram`: leave that variable out of the Saver that restores one.

  With control flow version 1, the inner optimizer's other variables than slots
  are named as in a 1.15 graph with one cond: `cond/beta1_power`. The names do
  not depend on other conds. The migration guide restores a checkpoint with
  `cond_2/beta1_power`.

  With `policy=wrapopt.DelayCompensation()` or `wrapopt.GapAware()`, the step of
  an admitted gradient needs the weights that the gradient was computed from,
  which cost memory: see the guide "Training with several workers". The state of
  a policy is in slots of this optimizer, with the same names in checkpoints:
  `mean_square` and `step_size`, float32 for low precision, else of the
  variable's dtype. TensorFlow's ops compensate before the inner optimizer's
  step, in float32 for low precision. A native op takes the gradient as it is;
  another step takes it rounded to its dtype. If the variables are those of a
  `tf.distribute.ParameterServerStrategy`, a lock covers all of it. Elsewhere,
  in sessions and in threads, steps do not wait for each other: another one may
  come between the compensation and the step.

  TensorBoard shows `drop_rate` of `staleness_stats` as
  `Gradient_staleness_percentage`, a number in [0, 1].

  Example, a gradient whose weights miss one update:

  >>> w, step = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64)
  >>> opt = wrapopt.DropStaleGradientOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(0.5), staleness=0,
  ...     global_step=step)
  >>> one = opt.compute_gradients(lambda: w, [w])
  >>> two = opt.compute_gradients(lambda: w, [w])
  >>> _ = opt.apply_gradients(one, step)
  >>> _ = opt.apply_gradients(two, step)  # Dropped.
  >>> print(w.numpy(), step.numpy(), opt.staleness_stats().dropped)
  0.5 1 1

  In a graph: `train_op = opt.minimize(loss, global_step)`. The step must be
  recorded before the weights are read. If `loss` was built earlier, TensorFlow
  may read them first. So build the loss as below, or pass `minimize` a function
  that builds it:

      with opt.record_step():
        loss = model(images)
      train_op = opt.minimize(loss, global_step)

  References: `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15;
  Zhang, Gupta, Lian and Liu, "Staleness-aware async-SGD for distributed deep
  learning", IJCAI 2016, for `policy="scale"`.

  Differences from 1.15: check and update are atomic; staleness counts updates
  that had begun when the step was recorded; `record_step`; callable losses,
  eager mode, `tf.function`, `tf.train.Checkpoint`; several instances and
  several calls in a graph; `policy`, `staleness_stats`, `worker`; the gated op
  is the TRAIN_OP; the summary `Gradient_staleness_percentage` is the dropped
  fraction of all updates, not the number of dropped ones over the global step
  plus 1. Arguments are checked: the step must be the recorded one, of dtype
  int32 or int64; `opt` must be a `tf.compat.v1.train.Optimizer`. Its slots and
  checkpoints are the gate's. A `tf.distribute` strategy is an error: it has no
  asynchronous workers.
  """

  def __init__(self, opt: V1Optimizer, staleness: Integer,
               use_locking: bool = False, name: str = "DropStaleGradient", *,
               policy: Union[str, Callable[[Tensor], Any],
                             _policies.DelayCompensation,
                             _policies.GapAware] = "drop",
               global_step: Optional[Variable] = None,
               worker: Optional[str] = None,
               fused: Optional[bool] = None) -> None:
    """Wraps `opt`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      staleness: The limit: an integer, or a scalar integer tensor or variable.
        A negative limit drops every gradient.
      use_locking: Has no effect, as in 1.15; the gate always locks. That of
        `opt` locks the variables: without it, two admitted updates at the same
        time may lose one of the two, as without the gate.
      name: The name of the optimizer.
      policy: How an admitted gradient is applied. "drop": unchanged. "scale":
        divided by max(1, its staleness). For gradient descent this divides the
        update, as in staleness-aware SGD; optimizers that normalize gradients
        undo a part of it. A function: multiplied by the result of the function,
        whose argument is the staleness, a scalar int64 tensor, at least 0. It
        is called once a step, in a graph once for all steps. A
        `DelayCompensation` or `GapAware`: changed by the difference of the
        weights that it was computed from and those that it is applied to, see
        there and below. Every policy drops a gradient beyond the limit.
      global_step: The step variable. By default, the argument of `minimize` or
        `apply_gradients`; for `compute_gradients` and `record_step`, the
        graph's global step.
      worker: A name for this worker, such as "worker_1". If given, gradients of
        this optimizer object are also counted in a local variable. TensorBoard
        shows the counts as `<worker>/staleness/admitted`,
        `<worker>/staleness/dropped` and `<worker>/drop_rate`.
      fused: Whether a native op takes the inner optimizer's step. None: if
        there is one. True: raise an error if there is none. False: never. The
        numbers agree to rounding.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`, `staleness`
        is not an integer, `global_step` is not a variable, or `fused` is
        neither None nor a bool.
      ValueError: If `policy` is none of these, `fused` is True and there is no
        such op, or `opt` contains a `DropStaleGradientOptimizer` or a
        `SyncReplicasOptimizer`.
    """
    super().__init__(opt, name)
    del use_locking
    staleness = _staleness.checked_limit(staleness)
    if (not isinstance(policy, _policies.COMPENSATING) and
        policy not in ("drop", "scale") and
        (not callable(policy) or policy in _policies.COMPENSATING)):
      raise ValueError("`policy` must be 'drop', 'scale' or a function of the "
                       "staleness, or a DelayCompensation() or GapAware(), got "
                       f"{policy!r}.")
    if global_step is not None:
      global_step = _checks.global_step(global_step)
    if worker is not None and not (isinstance(worker, str) and worker):
      raise ValueError(f"`worker` must be a name, got {worker!r}.")
    self._fused = _checks.fused(fused)
    if fused and not self.fused:
      raise ValueError(
          f"`fused` must not be True: {type(opt).__qualname__} with these "
          "arguments has no op that takes its step. Leave `fused` at None.")
    self._limit = staleness
    self._policy = policy
    self._global_step = global_step
    self._worker = worker
    if self._compensates():
      self._slots = {name: _slots.Slots() for name in policy._states}
    self._forget()

  def _forget(self):
    """Makes the attributes that a copy of this object does not share."""
    self._records = _recorder.Recorder(self._compensates())
    self._memory = (_memory.Memory(self, self._policy, self._records)
                    if self._compensates() else None)
    self._counts = _gate_counts.GateCounts(self, self._worker)

  def __getstate__(self):
    state = dict(vars(self))
    for name in "_records", "_memory", "_counts":
      del state[name]
    return state

  def __setstate__(self, state):
    vars(self).update(state)
    self._forget()

  @property
  def fused(self) -> bool:
    """Whether a native op takes the inner optimizer's step: a bool.

    Even if True, the inner optimizer takes the step if a variable has a
    constraint or is listed twice.
    """
    return self._fuses()

  def _fuses(self):
    return self._fused is not False and super()._fuses()

  # Recording the step

  @contextlib.contextmanager
  def record_step(self, global_step: Optional[Variable] = None, *,
                  variables: Sequence[Variable] = ()) -> Iterator[Tensor]:
    """Records the step; ops of the `with` block read weights after that.

    `compute_gradients` and `minimize` do this for a `loss` that is a function.
    A `loss` that is a tensor exists before they are called: build it in such a
    block. Its gradients then have the record of the block. In the block, the
    conversion of a ref variable to a tensor is a new read, as it always is for
    resource variables.

    Args:
      global_step: The step variable; by default the constructor's or the
        graph's.
      variables: In eager mode, for a policy that compensates: variables whose
        gradients a `tf.function` computes in the block. The record keeps their
        values. It knows the variables of earlier steps, and those that the
        block itself reads.

    Yields:
      The record, an int64 scalar: the argument `recorded` of `apply_gradients`.

    Raises:
      TypeError: If `global_step` is not an integer variable.
      ValueError: If there is no global step.
    """
    step = (self._find_step() if global_step is None
            else _checks.global_step(global_step))
    _staleness.check_not_compiled(type(self).__name__)
    recorded, _ = ops.staleness_record(step)
    if self._compensates():
      self._records.known.add(variables)
    with self._records.block(_recorder.Record(recorded, step)):
      yield recorded

  def _compensates(self):
    return isinstance(self._policy, _policies.COMPENSATING)

  def _find_step(self):
    if self._global_step is not None:
      return self._global_step
    step = _checks.step_of_graph()
    if step is None:
      raise ValueError(
          "A global step is required, got a graph without one. Make one with "
          "tf.compat.v1.train.get_or_create_global_step(), or pass the "
          "optimizer one as `global_step`.")
    return _checks.global_step(step)

  def compute_gradients(
      self, loss: Loss, *args: Any,
      **kwargs: Any) -> list[tuple[Optional[Gradient], Variable]]:
    """Records the step, then lets the inner optimizer compute gradients.

    Args:
      loss: A tensor, or a function that returns one. A function is called after
        the step is recorded. For a tensor, see `record_step`.
      *args: See `tf.compat.v1.train.Optimizer.compute_gradients`.
      **kwargs: See there.

    Returns:
      A list of (gradient, variable).

    Raises:
      ValueError: If there is no global step.
    """
    records = self._records
    record = records.before(loss)
    if record is None:
      with self.record_step() as recorded:
        record = records.open_block()
        pairs = self._compute(recorded, loss, args, kwargs)
    else:
      records.remember(record)
      with records.reads_after(record.recorded):
        pairs = self._compute(record.recorded, loss, args, kwargs)
    if tf.executing_eagerly():
      for g, _ in pairs:
        if g is not None:
          records.remember_gradient(g, record)
    return pairs

  def _compute(self, recorded, loss, args, kwargs):
    if kwargs.get("grad_loss") is not None and not tf.executing_eagerly():
      # A `grad_loss` may become a gradient itself, which must have a record.
      with tf.control_dependencies([recorded]):
        kwargs = {**kwargs,
                  "grad_loss": tf.nest.map_structure(
                      tf.identity, kwargs["grad_loss"])}
    return super().compute_gradients(loss, *args, **kwargs)

  def _recording(self, loss, global_step):
    if global_step is None:
      global_step = self._global_step
    if global_step is None or self._records.before(loss) is not None:
      return contextlib.nullcontext()
    return self.record_step(global_step)

  # Applying gradients

  @ops.not_converted
  def apply_gradients(self, grads_and_vars: GradsAndVars,
                      global_step: Optional[Variable] = None,
                      name: Optional[str] = None, *,
                      recorded: Optional[Tensor] = None,
                      origins: Optional[Sequence[Optional[Tensor]]] = None,
                      **kwargs: Any) -> Optional[Operation]:
    """Applies gradients if they are fresh enough.

    Staleness is counted from the step that was recorded by the
    `compute_gradients` that returned these gradients, even if they were changed
    since. A gradient of a `tf.GradientTape`, and in eager mode a gradient that
    was changed since, may have no record. Its record is then `recorded`, if
    given, or that of the last `compute_gradients` or `record_step`, in eager
    mode of this thread. In eager mode and in a `tf.function`, that record
    serves one `apply_gradients`.

    Args:
      grads_and_vars: An iterable of (gradient, variable).
      global_step: The step variable, which an admitted update increments; by
        default the constructor's. It must be the recorded one.
      name: A name for the operations.
      recorded: The record that `record_step` yielded, for gradients that do not
        come from `compute_gradients`.
      origins: For a policy that compensates: for each pair, the weights that
        the gradient was computed from, a tensor of the shape of the gradient
        (of `tf.IndexedSlices`, of its values), or None. By default they are
        found, see the class.
      **kwargs: Further arguments of the inner optimizer.

    Returns:
      A float32 scalar tensor: the number of dropped gradients, from all
      workers, after this one. In a graph, running it takes the gated step.

    Raises:
      TypeError: If `global_step` is not an integer variable.
      ValueError: If there is no variable, no gradient or no global step, if
        another global step was recorded, or if no step was recorded; if a
        policy compensates, and the weights of a gradient are not found.
    """
    if recorded is not None:
      kwargs["recorded"] = recorded
    if origins is not None:
      kwargs["origins"] = origins
    return _step.apply_gradients(self._take, grads_and_vars, global_step, name,
                                 kwargs)

  def _take(self, step):
    _check_pairs(step.grads_and_vars)
    global_step = (self._global_step if step.global_step is None
                   else step.global_step)
    if global_step is None:
      raise ValueError(
          "`global_step` must be the step variable, which counts updates, got "
          "None.")
    _checks.global_step(global_step)
    if _replicas.share_steps():
      raise NotImplementedError(
          f"{type(self).__name__} must not be used in a tf.distribute "
          "strategy, whose replicas share one step. Use it between "
          "asynchronous workers.")
    _staleness.check_not_compiled(type(self).__name__)
    gradients = [g for g, _ in step.grads_and_vars if g is not None]
    options = dict(step.options)
    recorded = options.pop("recorded", None)
    origins = options.pop("origins", None)
    if self._memory is not None:
      compensation = self._memory.compensated(step.grads_and_vars, recorded,
                                              origins)
    elif origins is None:
      compensation = None
    else:
      raise ValueError("`origins` must be None for this `policy`, "
                       f"{self._policy!r}, which does not use them.")
    if recorded is None:
      recorded = self._records.of(gradients, global_step)
    counts = self._counts.of_step(global_step, gradients[0].device)
    token = (_tokens.next_of_function(global_step)
             if _replicas.is_shared(global_step) else _tokens.NONE)
    # Control edges only, so that a dropped gradient is not transferred.
    with tf.control_dependencies(_records.when_ready(gradients)):
      verdict = ops.staleness_gate(
          global_step, counts.stale_counter, counts.histogram, recorded,
          self._limit, token=token)
    counted = complete = None
    if not tf.executing_eagerly():
      counted = _staleness.count(counts.worker_histogram, verdict, token)
    if not tf.executing_eagerly() or verdict.accept:
      try:
        with _records.new_stateful_ops() as new:
          taken = self._inner._take(step.with_fused(self._fused)._replace(
              global_step=global_step, options=options, gate=_gate.Gate(
                  verdict.accept, compensation or self._transform(
                      verdict.staleness, gradients[0].device))))
      except BaseException:
        # The update is in flight as long as its ticket exists, and the
        # traceback would keep the ticket alive.
        del verdict
        raise
      after = [*([] if taken.done is None else [taken.done]), *new]
      with tf.control_dependencies(after):
        complete = ops.staleness_complete(verdict.ticket, global_step,
                                          increment=not taken.counted)
    if tf.executing_eagerly():
      _staleness.count(counts.worker_histogram, verdict, token)
      _staleness.write(self._counts.summaries(counts), global_step)
      return _step.Taken(counts.stale_counter.read_value(), True)
    after = [op for op in (complete, verdict.accept, counted) if op is not None]
    with tf.control_dependencies(after), ops.device_of(counts.stale_counter):
      # The identity runs after the update: `read_value` of a ref variable may
      # return the variable's own buffer.
      counter = tf.identity(counts.stale_counter.read_value(),
                            name=step.name or self._name)
    if tf1.executing_eagerly_outside_functions():
      _staleness.write(self._counts.summaries(counts), global_step)
    return _step.Taken(counter, True)

  # Slots of the policy

  def _create_slots(self, var_list):
    super()._create_slots(var_list)
    if self._memory is not None:
      self._memory.make(var_list)

  def _create_or_restore_slot_variable(self, slot_variable_position, slot_name,
                                       variable):
    if slot_name in self._own_slot_names() and tf.executing_eagerly():
      # The base class would make one of the variable's dtype.
      self._memory.make([variable])
    super()._create_or_restore_slot_variable(
        slot_variable_position=slot_variable_position, slot_name=slot_name,
        variable=variable)

  def _transform(self, staleness, device):
    """Applies the policy to an admitted gradient."""
    # Once for all gradients, because a policy may be random.
    with tf.device(None), tf.device(device):
      factor = _staleness.factor(self._policy, staleness)
    return factor if factor is None else (
        lambda g: _staleness.multiplied(g, factor))

  # Counts for users

  def staleness_stats(
      self, worker: bool = False) -> _staleness.StalenessStats:
    """The numbers of updates that this gate has admitted and dropped.

    Admitted updates whose step has failed do not count in eager mode. In a
    graph, they count until the next update of the gate. With `worker`, those of
    a graph or a `tf.function` always count.

    Args:
      worker: True: the updates of this optimizer object, since its local
        variable was initialized; the constructor must have been given a
        `worker`. False: the updates of all workers.

    Returns:
      A `StalenessStats`: tensors, or NumPy arrays in eager mode.

    Raises:
      RuntimeError: Before the first `apply_gradients`.
      ValueError: If `worker` is True and the constructor was given no name.
    """
    if worker and self._worker is None:
      raise ValueError("`worker` must not be True for an optimizer without the "
                       "name of its worker. Pass `worker` to the constructor.")
    histogram = self._counts.histogram(worker)
    return _staleness.stats(histogram)


def _check_pairs(grads_and_vars):
  """Checks what the inner optimizer checks, before the gate decides."""
  if not grads_and_vars:
    raise ValueError("No variables provided.")
  for _, v in grads_and_vars:
    if not isinstance(v, tf.Variable):
      raise NotImplementedError(f"Trying to update a Tensor: {v!r}")
  if all(g is None for g, _ in grads_and_vars):
    raise ValueError("No gradients provided for any variable: "
                     f"{[v.name for _, v in grads_and_vars]}.")
