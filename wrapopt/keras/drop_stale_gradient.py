"""Asynchronous training of Keras models that drops gradients of old weights."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import threading
from typing import Any, Optional, Union
import weakref

import keras
import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _compensation
from wrapopt._gates import _origins
from wrapopt._gates import _policies
from wrapopt._gates import _records
from wrapopt._gates import _staleness
from wrapopt._types import Integer, Tensor
from wrapopt.keras import _wrapper
from wrapopt.keras._steps import _admission
from wrapopt.keras._steps import _step
from wrapopt.keras._steps import _views
from wrapopt.keras._variables import value_of


@keras.saving.register_keras_serializable("wrapopt")
class DropStaleGradient(_wrapper.WrapperOptimizer):
  """Drops gradients that were computed from old weights.

  For several workers that share a model and do not wait for each other: those
  of a `tf.distribute.ParameterServerStrategy` with a `ClusterCoordinator`, or
  threads of one process. The staleness of a gradient is the number of updates
  that its weights may miss: those that other workers had begun and not
  completed when this worker began to read the weights, and those that were
  admitted after that. If it is at most the limit, the inner optimizer takes the
  step. If not, only the counters change, and the gradient is not sent to the
  parameter servers.

  One native op on the device of `iterations`, which this class moves from a GPU
  to its host, decides and counts, atomically. No step is taken with a gradient
  whose weights miss more than `staleness` steps, however many workers race. If
  a worker dies during a step, the step is not counted, and its place is free
  again.

  `iterations` is the number of steps that were taken. Each has a number of its
  own, which Adam's correction, schedules and decays of averages use. Keras
  itself reads and assigns the count, so that steps of several workers get lost.

  A worker records the step before it reads the weights:

      @tf.function
      def train(images, labels):
        with optimizer.record_step():
          with tf.GradientTape() as tape:
            loss = loss_of(model(images, training=True), labels)
          gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

  `fit` records no step, and raises an error. To use it, write such a
  `train_step` for the model. The gate runs on the host: XLA can compile the
  gradients, but not the step, so call `compile(..., jit_compile=False)`.

  Threads that train a model share the optimizer, and call its `build` first. A
  step of SGD, Adam, AdamW, Adagrad, RMSprop or Lion that is one op locks only
  the variables that it changes; other steps wait for each other, also those of
  a policy that compensates.

  Example, a gradient whose weights miss one update:

  >>> w = keras.Variable([1.0])
  >>> opt = wrapopt.keras.DropStaleGradient(keras.optimizers.SGD(0.5), 0)
  >>> opt.build([w])
  >>> with opt.record_step() as recorded:
  ...   gradient = w.value
  >>> opt.apply_recorded(recorded, [gradient], [w])
  >>> opt.apply_recorded(recorded, [gradient], [w])  # Dropped.
  >>> print(w.numpy(), int(opt.iterations), opt.staleness_stats().dropped)
  [0.5] 1 1

  References: `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15;
  Zhang, Gupta, Lian and Liu, "Staleness-aware async-SGD for distributed deep
  learning", IJCAI 2016, for `policy="scale"`.

  The same as `wrapopt.DropStaleGradientOptimizer`, but that the count is the
  optimizer's `iterations`, and a gradient has the record of its `tf.function`,
  or of its thread.
  """

  in_op = True
  is_gate = True

  def __init__(
      self, optimizer: Union[str, dict[str, Any], keras.optimizers.Optimizer],
      staleness: Integer, name: Optional[str] = None, *,
      policy: Union[str, _policies.DelayCompensation, _policies.GapAware,
                    Callable[[Tensor], Any]] = "drop",
      sum_duplicates: bool = False) -> None:
    """Wraps `optimizer`.

    Args:
      optimizer: A Keras optimizer, or its name or configuration.
      staleness: The limit: an integer. A negative limit drops every gradient.
      name: The name of the optimizer.
      policy: How an admitted gradient is applied. "drop": unchanged. "scale":
        divided by max(1, its staleness). A function: multiplied by the result
        of the function, whose argument is the staleness, a scalar int64 tensor,
        at least 0. It is called once a step. A `wrapopt.DelayCompensation` or
        `wrapopt.GapAware`: compensated for the way of the weights since they
        were read, after Keras has clipped it; gradients of one row are summed
        first. For low precision it is float32, which is rounded if the inner
        optimizer is not `fused`. The guide "Training with several workers"
        tells the cost. In eager mode, each record then holds the weights of its
        step. Every policy drops a gradient beyond the limit.
      sum_duplicates: If a batch names a row of an embedding several times,
        whether the row's gradients are summed before Adam, AdamW, Adagrad or
        RMSprop squares them, as `LazyAdam` does. One op then takes the step.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer, or `staleness` is not
        an integer.
      ValueError: If `policy` is neither of the two names nor a function, or the
        optimizer must not be in a gate. A step raises it if a function returns
        no scalar.
    """
    super().__init__(optimizer, name, sum_duplicates)
    self._count_on_cpu()
    self._limit = _staleness.checked_limit(value_of(staleness))
    if not isinstance(policy, _policies.COMPENSATING) and (
        policy not in ("drop", "scale") and not callable(policy)):
      raise ValueError("`policy` must be 'drop', 'scale' or a function of the "
                       "staleness, or a DelayCompensation() or GapAware(), got "
                       f"{policy!r}.")
    self._policy = policy
    self._records = _Records()
    for x in [self.inner_optimizer, *_views.within(self)]:
      if (any(_views.optimizers_in(x)) and
          not _step.is_wrapper(x)):
        raise ValueError(
            "`optimizer` of a DropStaleGradient must not be or hold an "
            "optimizer that holds others, whose steps would be admitted one by "
            f"one, got {type(x).__qualname__}. Wrap one optimizer.")

  def _count_on_cpu(self):
    """Moves `iterations` from a GPU, where Keras makes it, to its host."""
    count = value_of(self._iterations)
    if (not isinstance(count, tf.distribute.DistributedValues) and
        tf.DeviceSpec.from_string(count.device).device_type == "GPU"):
      with tf.init_scope(), ops.host_of(count):
        self._iterations._initialize(count.numpy())

  def _make_state(self, variables):
    # On the server of `iterations`.
    self._stale_counter = self._store.make_count(
        "stale_counter", 0.0, dtype="float32")
    self._histogram = self._store.make_count(
        "staleness_histogram", np.zeros([2, _staleness.BUCKETS], np.int64))

    self._memory = {
        name: {
            self._var_key(v): self._store.make_count(
                f"{name}_{i}", np.zeros(v.shape, np.float32),
                dtype=_compensation.computed_dtype(value_of(v).dtype).name,
                near=value_of(v))
            for i, v in enumerate(variables)
            if not self._overwrite_variable_with_gradient(v)}
        for name in (self._policy._states if self._compensates() else ())}

  def _settle(self):
    super()._settle()
    self._take_aborted_back()

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    if save_type == "checkpoint":
      self._take_aborted_back()
    return super()._trackable_children(save_type, **kwargs)

  def _take_aborted_back(self):
    """Takes steps that have failed out of the histogram, in eager mode."""
    if self.built and tf.executing_eagerly():
      ops.take_aborted_back(*(
          _replicas.values(value_of(v))[0]
          for v in (self._iterations, self._histogram)))

  @contextlib.contextmanager
  def record_step(self) -> Iterator[Tensor]:
    """Records the step; ops of the `with` block read weights after that.

    Compute the gradients in the block. Then call `apply` or `apply_gradients`
    once, in the same `tf.function`, or in eager mode in the same thread.

    Yields:
      The record, an int64 scalar, for `apply_recorded`.
    """
    self._check_not_compiled()
    recorded, _ = ops.staleness_record(value_of(self._iterations))
    records = self._records
    if tf.executing_eagerly():
      records.last = recorded
    else:
      records.of_graph[tf.compat.v1.get_default_graph()] = recorded.op.name
    keeping: Any = contextlib.nullcontext()
    if self._compensates() and tf.executing_eagerly():
      weights = _origins.Weights(map(value_of, self._trainable_variables))
      recorded._wrapopt_weights = weights
      keeping = weights.of_block()
    with keeping, _records.reads_after(recorded):
      yield recorded

  @ops.not_converted
  def apply_recorded(
      self, recorded: Tensor, grads: Sequence[Any],
      trainable_variables: Optional[Sequence[keras.Variable]] = None) -> None:
    """As `apply`, for gradients of a record that is given.

    By default, gradients have the record on which they depend in their
    `tf.function`, or else its last one; in eager mode the last one of this
    thread, which then serves once.

    As with `apply`, wrappers around this optimizer do not follow the step: make
    the gate the outermost one.

    Args:
      recorded: The record, which `record_step` yielded. It may serve several
        times.
      grads: As in `apply`.
      trainable_variables: As there.

    Raises:
      TypeError: If `recorded` is not an integer scalar.
      Others as `apply`.
    """
    records = self._records
    records.given = _checked_record(recorded)
    if recorded is records.last:
      records.last = None
    try:
      self.apply(grads, trainable_variables)
    finally:
      records.given = None

  def _check_not_compiled(self):
    _staleness.check_not_compiled(
        type(self).__name__, " For fit(), call compile(jit_compile=False).")

  def _admit(self, iterations, grads_and_vars, token):
    self._check_not_compiled()
    grads = [g for g, _ in grads_and_vars]
    compensation = self._compensation(grads_and_vars)
    verdict = ops.staleness_gate(
        iterations, value_of(self._stale_counter),
        value_of(self._histogram), self._recorded(iterations, grads),
        self._limit, token=token)
    try:
      with tf.device(None), tf.device(grads[0].device):
        factor = (None if self._compensates() else
                  _staleness.factor(self._policy, verdict.staleness))
    except BaseException:
      del verdict  # The traceback would keep its ticket alive.
      raise
    return _admission.Admitted(
        verdict.accept, verdict.number, verdict.ticket,
        None if factor is None else
        lambda g: _staleness.multiplied(g, factor), compensation)

  def _compensates(self):
    return isinstance(self._policy, _policies.COMPENSATING)

  def _compensation(self, grads_and_vars):
    """The `_compensation.Compensated` of a step, or None."""
    if not self._compensates():
      return None
    if tf.executing_eagerly():
      recorded = self._records.given
      if recorded is None:
        recorded = self._records.last
      weights = getattr(recorded, "_wrapopt_weights", None)
      found = _origins.of_values(
          grads_and_vars, lambda g, v: weights and weights.get(v))
    else:
      found = _origins.in_graph(grads_and_vars)
    return _compensation.Compensated(self._policy, found, {
        name: {id(v): value_of(row[self._var_key(v)])
               for _, v in grads_and_vars}
        for name, row in self._memory.items()})

  def _recorded(self, iterations, grads):
    """The record of gradients: a tensor."""
    records = self._records
    if records.given is not None:
      return records.given
    if tf.executing_eagerly():
      found, records.last = [records.last], None
    else:
      found = [op.outputs[0] for op in _records.records_before(
          [_records.tensor_of(g).op for g in grads])]
      # Others are of other optimizers.
      found = [t for t in found if _records.from_outside(t.op.inputs[0]) is
               _records.from_outside(_records.graph_input(iterations))]
      if not found:
        graph = tf.compat.v1.get_default_graph()
        name = records.of_graph.pop(graph, None)
        found = [name and graph.get_operation_by_name(name).outputs[0]]
    if found[0] is None:
      raise ValueError(
          "The step must be recorded before gradients are computed, got "
          "gradients without a record. Compute them in `with "
          "optimizer.record_step():`; for fit(), in a train_step() of the "
          "model. A record serves one apply().")
    # The oldest of several records counts.
    with ops.device_of(iterations):
      return tf.reduce_min(tf.stack(found)) if found[1:] else found[0]

  def staleness_stats(self) -> _staleness.StalenessStats:
    """The numbers of gradients that were admitted and dropped, of all workers.

    Admitted gradients whose step has failed do not count. In a `tf.function`
    that calls this method, they count until the next step.

    Returns:
      A `StalenessStats`: tensors, or NumPy arrays in eager mode.

    Raises:
      RuntimeError: If the optimizer is not built.
    """
    self._require_built("staleness_stats")
    self._take_aborted_back()
    return _staleness.stats(value_of(self._histogram))

  def write_summaries(self) -> None:
    """Writes the summaries of the gate to TensorBoard's default writer.

    `Gradient_staleness_percentage` is the dropped fraction, in [0, 1];
    `staleness/admitted` and `staleness/dropped` are histograms of the
    staleness, in updates. With a ClusterCoordinator, the coordinator calls it.

    Raises:
      RuntimeError: If the optimizer is not built.
    """
    self._require_built("write_summaries")
    self._take_aborted_back()
    histogram = value_of(self._histogram)
    _staleness.write(_staleness.summaries(histogram, {"staleness": histogram}),
                     value_of(self._iterations))

  def get_config(self) -> dict[str, Any]:
    policy = self._policy
    return {**super().get_config(), "staleness": int(self._limit),
            "policy": policy if isinstance(policy, str) else
            {"policy": type(policy).__name__, **dataclasses.asdict(policy)}
            if isinstance(policy, _policies.COMPENSATING) else
            keras.saving.serialize_keras_object(policy)}

  @classmethod
  def from_config(cls, config, custom_objects=None):
    policy = config.get("policy")
    if isinstance(policy, dict) and "policy" in policy:
      [cls_of] = [x for x in _policies.COMPENSATING
                  if x.__name__ == policy["policy"]]
      config = {**config, "policy": cls_of(
          **{k: x for k, x in policy.items() if k != "policy"})}
    elif isinstance(policy, dict):  # A function.
      config = {**config, "policy": keras.saving.deserialize_keras_object(
          config["policy"], custom_objects=custom_objects)}
    return super().from_config(config, custom_objects)


def _checked_record(recorded):
  """The argument `recorded`; raises an error if it is no record."""
  try:
    x = recorded if tf.is_tensor(recorded) else np.asarray(recorded)
    if tf.as_dtype(x.dtype).is_integer and (
        x.shape.rank in (0, None) if tf.is_tensor(x) else x.ndim == 0):
      return recorded
  except TypeError:
    pass
  raise TypeError("`recorded` must be the record that record_step() yielded, "
                  f"an int64 scalar, got {recorded!r}.")


class _Records(threading.local):
  """The records of gradients for which none is found.

  Attributes:
    last: The last one of this thread, in eager mode, or None.
    given: The argument of the `apply` of this thread, or None.
    of_graph: {graph: name of the op of its last one}.
  """

  def __init__(self):
    self.last = self.given = None
    self.of_graph = weakref.WeakKeyDictionary()
