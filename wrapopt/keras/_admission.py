"""Which steps of an optimizer are taken, and with which number.

A step of Keras has the number that its optimizer has counted so far. Keras
counts by reading `iterations` and assigning the sum. So if several workers
share the optimizer and do not wait for each other, steps are lost from the
count, and two steps may have one number. A step of this module begins with a
number of its own, on the server that holds the count, and is counted when all
of its changes are made. A gate may also refuse it.
"""

import contextlib
import math
import operator
import threading
import typing

import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _records
from wrapopt._gates import _step_lock
from wrapopt._gates import _tokens
from wrapopt.keras import _followers
from wrapopt.keras import _inner
from wrapopt.keras import _rules


class Admitted(typing.NamedTuple):
  """An answer to a step that asks for admission.

  Attributes:
    accept: True, or a scalar bool tensor: whether it is taken.
    number: Its number, a scalar int64 tensor.
    ticket: As in `wrapopt.ops.StalenessVerdict`.
    transform: A function that is applied to each gradient, or None.
    compensation: The `_compensation.Compensated` of the step, or None.
  """
  accept: typing.Any
  number: tf.Tensor
  ticket: tf.Tensor
  transform: typing.Callable | None = None
  compensation: typing.Any = None


class Number:
  """The number of a step, in the place of `iterations` while it is taken.

  Schedules compute with it as with a variable of Keras.
  """

  name = path = "iteration"
  ndim = 0

  def __init__(self, number, dtype):
    with tf.device(None), tf.device(number.device):
      self.value = tf.cast(number, dtype)
    self.dtype, self.shape = self.value.dtype.name, self.value.shape

  def __tf_tensor__(self, dtype=None, name=None):
    return tf.convert_to_tensor(self.value, dtype, name=name)

  def assign_add(self, value):
    """Does nothing: the step is counted at its end."""
    del value

  def numpy(self):
    return self.value.numpy()

  def __int__(self):
    return int(self.value)

  def __pos__(self):
    return self.value

  def __float__(self):
    return float(self.value)

  def __array__(self, dtype=None):
    return np.asarray(self.value.numpy(), dtype)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq",
              "ne", "lt", "le", "gt", "ge"):
  _function = getattr(operator, _name)
  setattr(Number, f"__{_name}__",
          lambda self, x, f=_function: f(self.value, x))
  setattr(Number, f"__r{_name}__",
          lambda self, x, f=_function: f(x, self.value))
for _name in ("neg", "abs"):
  setattr(Number, f"__{_name}__",
          lambda self, f=getattr(operator, _name): f(self.value))


# Gradients of so many bytes are sent as fast as a question about them.
_SMALL = 1 << 16


class _Asked:
  """A step that has asked for admission.

  Attributes:
    accept: Whether to take it: True, or a scalar bool tensor.
  """

  def __init__(self, iterations, admitted, pairs, gate, is_one_op):
    # Without a gate only the second try of a step is refused. Small gradients
    # need not wait on the worker for the answer of a gate.
    only_op = is_one_op and (gate is None or (
        not tf.executing_eagerly() and _replicas.is_shared(iterations) and
        _bytes(g for g, _ in pairs) <= _SMALL))
    self.accept = True if only_op else admitted.accept
    self._iterations, self._pairs = iterations, pairs
    self._locks = gate is not None and not is_one_op
    self._is_one_op = is_one_op
    self._number = admitted.number
    if only_op:  # A refused step has none, but schedules are called with it.
      with ops.device_of(iterations):
        self._number = tf.maximum(self._number, tf.constant(0, tf.int64))
    self._transform = admitted.transform
    # The frames of a traceback would keep a ticket alive.
    self._ticket = admitted.ticket
    # What the op of the step is told, if nothing else can refuse it.
    self._told = admitted.accept if only_op else True
    self._compensation = admitted.compensation

  def grads(self):
    """The gradients with which to take it."""
    grads, variables = zip(*self._pairs)
    if self._transform is not None:
      grads = [g if g is None else self._transform(g) for g in grads]
    if self._locks and _replicas.is_shared(self._iterations):
      grads, _ = _at_servers(grads, variables, self._iterations)
    return grads


class _View(_inner.View):
  """A view in which a step may have a number of its own."""

  @property
  def _iterations(self):
    return self.wrapopt_inner.number or vars(self)["_iterations"]

  def _get_current_learning_rate(self):
    inner = self.wrapopt_inner
    with inner.at_number():
      found = super()._get_current_learning_rate()
      return found if inner.number is None else tf.convert_to_tensor(found)

  def _all_reduce_sum_gradients(self, grads_and_vars):
    return (super()._all_reduce_sum_gradients(grads_and_vars)
            if self.wrapopt_inner.number is None else grads_and_vars)


class AskingInner(_inner.Inner):
  """An `Inner` whose steps ask for admission, or have their own numbers."""

  View = _View

  def __init__(self, cls, wrappers, iterations):
    super().__init__(cls, wrappers)
    self._gate = next((f for f in wrappers if f.is_gate), None)
    self._iterations = iterations
    self._is_shared = _replicas.is_shared(iterations)
    self._taken = threading.local()

  @property
  def number(self):
    """The `Number` of the step that this thread takes, or None."""
    return getattr(self._taken, "number", None)

  def take(self, grads, variables, apply):
    if self.number is not None or all(g is None for g in grads):
      super().take(grads, variables, apply)
      return
    grads = [g if g is None or isinstance(g, tf.IndexedSlices) else
             tf.convert_to_tensor(g) for g in grads]

    def take():
      grads = asked.grads()
      with self._taking(asked):
        super(AskingInner, self).take(grads, variables, apply)

    with self._asking(grads, variables) as asked:
      _followers.where(asked.accept, take)

  def _is_one_op(self, grads, variables):
    """Whether a step is one op on each server, which locks its variables."""
    sparse = any(isinstance(g, tf.IndexedSlices) for g in grads)
    return (_rules.has_rule(self.cls) and
            all(f.in_pass for f in self.followers) and
            not any(getattr(v, "constraint", None) for v in variables) and
            not (sparse and (self.opt.weight_decay is not None or (
                not self._sums and
                _rules.rule_of(self.opt, self.cls).squares))))

  @contextlib.contextmanager
  def _asking(self, grads, variables):
    """The context of a step that asks for admission.

    Args:
      grads: Gradients: tensors, `tf.IndexedSlices` or None.
      variables: Their variables.

    Yields:
      An `_Asked`.
    """
    iterations, gate = self._iterations, self._gate
    checks = self.outermost._checks()
    is_one_op = self._is_one_op(grads, variables)
    _refuse(self.opt, self.cls.__qualname__)
    if self._is_shared:
      _replicas.check_single_replica(type(self.outermost).__name__)
    else:
      _replicas.check_alone(type(gate).__name__, iterations)
    # Workers take one step at a time if an op of it reads what another one
    # writes. Without a gate, this is also the order of their numbers. A gate
    # may drop a step, which need not wait for the others.
    locks_first = gate is None and not is_one_op
    with _replicas.alone(self._is_shared):
      # Not before the gradients are ready, so that few steps are in flight at a
      # time. Control edges only: a gradient does not travel before it is
      # admitted.
      with tf.control_dependencies(None):
        token = (_tokens.next_of_function(iterations) if self._is_shared else
                 _tokens.NONE)
        if locks_first:
          grads, ready = _at_servers(grads, variables, iterations)
        else:
          ready = _records.when_ready([g for g in grads if g is not None])
      first, asked = [*ready, *checks], None
      try:
        with (_step_lock.held(iterations, first=first) if locks_first else
              contextlib.nullcontext()):
          with tf.control_dependencies([] if locks_first else first):
            admitted = (
                Admitted(*ops.begin_update(iterations, token=token))
                if gate is None else gate._admit(
                    iterations, [(g, _rules.value(v)) for g, v in zip(
                        grads, variables) if g is not None], token))
          asked = _Asked(iterations, admitted, list(zip(grads, variables)),
                         gate, is_one_op)
          del admitted
          yield asked
      finally:
        if asked is not None:
          asked._ticket = None

  @contextlib.contextmanager
  def _taking(self, asked):
    """The context in which a step is taken that was admitted."""
    iterations = self._iterations
    with (_step_lock.held(iterations) if asked._locks else
          contextlib.nullcontext()):
      self._taken.asked = asked
      self._taken.number = Number(asked._number, iterations.dtype)
      try:
        with _records.new_stateful_ops() as new:
          yield
      finally:
        self._taken.number = self._taken.asked = None
      with tf.control_dependencies(_records.updates(new)):
        ops.staleness_complete(asked._ticket, iterations)

  @ops.not_converted
  def update(self, grads, variables, learning_rate):
    arrived = []
    # A worker that dies before all gradients have arrived changes nothing on
    # any server. Those of other steps have arrived before the lock.
    if (self._is_shared and not tf.executing_eagerly() and
        self.number is not None and self._taken.asked._is_one_op):
      with tf.control_dependencies(None):
        grads, arrived = _at_servers(grads, variables, self._iterations)
        for i, variable in enumerate(map(_rules.value, variables)):
          with ops.device_of(variable):
            grads[i] = _rules.cast(grads[i], variable.dtype)
    with tf.control_dependencies(arrived):
      super().update(grads, variables, learning_rate)

  def _step(self, variables):
    step = super()._step(variables)
    asked = None if self.number is None else self._taken.asked
    return step if asked is None else step._replace(
        accept=asked._told, compensation=asked._compensation)

  def at_number(self):
    # In an asynchronous step, the server that has the number.
    return (ops.device_of(self._iterations)
            if self.number is not None and self._is_shared else
            super().at_number())


def asks(iterations, wrappers):
  """Whether the steps of an optimizer in wrappers ask for admission."""
  return _replicas.is_shared(iterations) or any(f.is_gate for f in wrappers)


def _bytes(grads):
  """The bytes of gradients, infinity if unknown."""
  return sum(
      t.dtype.size * (math.inf if t.shape.num_elements() is None
                      else t.shape.num_elements())
      for t in (_records.tensor_of(g) for g in grads if g is not None))


def _at_servers(grads, variables, iterations):
  return _records.at_servers(grads, map(_rules.value, variables), iterations)


def _refuse(opt, name):
  """Raises an error for an optimizer whose own state several workers share."""
  if opt.gradient_accumulation_steps:
    raise NotImplementedError(
        f"`gradient_accumulation_steps` of {name} must be None if several "
        "workers share the optimizer, which would mix their gradients, got "
        f"{opt.gradient_accumulation_steps}. Sum the gradients of several "
        "batches in the worker's function.")
  if opt.use_ema:
    raise NotImplementedError(
        f"`use_ema` of {name} must be False if several workers share the "
        "optimizer, whose averages would lose steps, got True. Use "
        "wrapopt.keras.MovingAverage.")
