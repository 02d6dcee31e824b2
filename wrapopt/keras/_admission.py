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


class Steps:
  """The steps of an optimizer that is no wrapper, and of its copies."""

  def __init__(self, cls, wrapper):
    self._cls, self._wrapper = cls, wrapper
    self._taken = threading.local()

  @property
  def number(self):
    """The `Number` of the step that this thread takes, or None."""
    return getattr(self._taken, "number", None)

  @property
  def accept(self):
    """True, or a bool tensor: whether the op takes the step of this thread."""
    return True if self.number is None else self._taken.accept

  @property
  def compensation(self):
    """As in `Admitted`, of the step of this thread."""
    return None if self.number is None else self._taken.compensation

  def ask_first(self, opt, gate):
    """Whether a step has to ask for admission.

    Args:
      opt: The optimizer, of the class of these Steps.
      gate: The `_steps.Follower` that admits steps, or None.
    """
    return self.number is None and (
        gate is not None or _replicas.is_shared(_iterations(opt)))

  @contextlib.contextmanager
  def asking(self, opt, grads, variables, gate, checks, is_one_op):
    """The context of a step that asks for admission.

    Args:
      opt: The optimizer.
      grads: Gradients: tensors, `tf.IndexedSlices` or None.
      variables: Their variables.
      gate: As in `ask_first`.
      checks: The operations that it must wait for.
      is_one_op: Whether the step is one op on each server.

    Yields:
      An `_Asked`, for `taking`.
    """
    iterations = _iterations(opt)
    shared = _replicas.is_shared(iterations)
    _refuse(opt, self._cls.__qualname__)
    if shared:
      _replicas.check_single_replica(self._wrapper)
    else:
      _replicas.check_alone(type(gate).__name__, iterations)
    # Workers take one step at a time if an op of it reads what another one
    # writes. Without a gate, this is also the order of their numbers. A gate
    # may drop a step, which need not wait for the others.
    locks_first = gate is None and not is_one_op
    with _replicas.alone(shared):
      # Not before the gradients are ready, so that few steps are in flight at a
      # time. Control edges only: a gradient does not travel before it is
      # admitted.
      with tf.control_dependencies(None):
        token = (_tokens.next_of_function(iterations) if shared else
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
  def taking(self, asked):
    """The context in which a step is taken that was admitted."""
    iterations = asked._iterations
    self._taken.accept, self._taken.is_one_op = asked._told, asked._is_one_op
    self._taken.compensation = asked._compensation
    with (_step_lock.held(iterations) if asked._locks else
          contextlib.nullcontext()):
      self._taken.number = Number(asked._number, iterations.dtype)
      try:
        with _records.new_stateful_ops() as new:
          yield
      finally:
        self._taken.number = None
      with tf.control_dependencies(_records.updates(new)):
        ops.staleness_complete(asked._ticket, iterations)

  def arrived(self, opt, grads, variables):
    """The gradients of a step, on the servers of their variables.

    Args:
      opt: The optimizer.
      grads: Its gradients, without None.
      variables: The tf.Variables.

    Returns:
      The gradients, and the operations that wait until all have arrived. A
      worker that dies before changes nothing on any server.
    """
    if self.number is None or not self._taken.is_one_op or (
        tf.executing_eagerly() or not _replicas.is_shared(_iterations(opt))):
      return grads, []  # Those of other steps have arrived before the lock.
    with tf.control_dependencies(None):
      there, arrived = _at_servers(grads, variables, _iterations(opt))
      for i, variable in enumerate(variables):
        with ops.device_of(variable):
          there[i] = _rules.cast(there[i], variable.dtype)
    return there, arrived

  @contextlib.contextmanager
  def scalars(self, opt):
    """The context in which scalars of a step are computed.

    In an asynchronous step this is the server that has the number.

    Args:
      opt: The optimizer.
    """
    if self.number is None or not _replicas.is_shared(_iterations(opt)):
      yield
      return
    with ops.device_of(_iterations(opt)):
      yield


def _iterations(opt):
  """The tf.Variable that counts the steps of an optimizer."""
  return _rules.value(vars(opt)["_iterations"])


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
