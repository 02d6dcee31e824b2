"""Which steps of an optimizer are taken, and with which number.

A step of Keras has the number that its optimizer has counted so far. Keras
counts by reading `iterations` and assigning the sum. So if several workers
share the optimizer and do not wait for each other, steps are lost from the
count, and two steps may have one number. A step of this module begins with a
number of its own, on the server that holds the count, and is counted when all
of its changes are made. A gate may also refuse it.
"""

import contextlib
import operator
import threading
import typing

import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _records
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


class _Asked:
  """A step that has asked for admission.

  Attributes:
    accept: Whether to take it: True, or a scalar bool tensor.
  """

  def __init__(self, iterations, admitted, lock, only_op):
    self.accept = True if only_op else admitted.accept
    self._iterations, self._lock = iterations, lock
    self._number, self._transform = admitted.number, admitted.transform
    # The frames of a traceback would keep a ticket or a lock alive.
    self._ticket, self._locked = admitted.ticket, None
    # What the op of the step is told, if nothing else can refuse it.
    self._told = admitted.accept if only_op else True
    self._compensation = admitted.compensation
    # The operations that wait until its gradients are on all servers.
    self._arrived = []

  def wait_for_gradients(self, locked):
    """Lets a lock wait for the gradients, so that nobody waits meanwhile."""
    if not tf.executing_eagerly():
      _records.let_wait(locked.op, self._arrived)

  def transformed(self, grads):
    """The gradients with which to take it."""
    return grads if self._transform is None else [
        g if g is None else self._transform(g) for g in grads]


class Steps:
  """The steps of an optimizer that is no wrapper, and of its copies."""

  def __init__(self, cls, wrapper):
    self._cls, self._wrapper = cls, wrapper
    self._taken = threading.local()
    self._lock = _replicas.StepLock()

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
    lock = None if locks_first or is_one_op else self._lock
    with _replicas.alone(shared), _records.new_stateful_ops() as new:
      # Not before the gradients are ready, so that few steps are in flight at a
      # time. Control edges only: a gradient does not travel before it is
      # admitted.
      with tf.control_dependencies(None):
        ready = _records.when_ready([g for g in grads if g is not None])
      token = _tokens.next_of_function() if shared else _tokens.NONE
      first, locked, asked = [*ready, *checks], [], None
      try:
        if locks_first:
          with tf.control_dependencies(first):
            locked.append(self._lock.acquire(iterations))
          first = [] if tf.executing_eagerly() else [*first, *locked]
        with tf.control_dependencies(first):
          admitted = (Admitted(*ops.begin_update(iterations, token=token))
                      if gate is None else gate._admit(
                          iterations, [(g, _rules.value(v)) for g, v in zip(
                              grads, variables) if g is not None], token))
        # Without a gate only the second try of a step is refused.
        asked = _Asked(iterations, admitted, lock,
                       only_op=gate is None and is_one_op)
        del admitted
        yield asked
      except BaseException:
        locked.clear()
        raise
      finally:
        if asked is not None:
          asked._ticket = asked._locked = None
    if locked:
      asked.wait_for_gradients(locked[0])
      # The op that counts the step waits for all else, on all servers.
      with tf.control_dependencies(
          [op for op in new if op.type == "Wrapopt>StalenessComplete"] or
          _records.updates(new)):
        self._lock.release(locked.pop(), iterations)

  @contextlib.contextmanager
  def taking(self, asked):
    """The context in which a step is taken that was admitted."""
    iterations, lock = asked._iterations, asked._lock
    first = []
    if lock is not None:
      asked._locked = lock.acquire(iterations)
      first = [] if tf.executing_eagerly() else [asked._locked]
    self._taken.number = Number(asked._number, iterations.dtype)
    self._taken.accept = asked._told
    self._taken.compensation = asked._compensation
    self._taken.arrived = asked._arrived
    try:
      with _records.new_stateful_ops() as new, tf.control_dependencies(first):
        yield
    finally:
      self._taken.number = None
    if lock is not None:
      asked.wait_for_gradients(asked._locked)
    with tf.control_dependencies(_records.updates(new)):
      ops.staleness_complete(asked._ticket, iterations)
      if lock is not None:
        lock.release(asked._locked, iterations)

  def at_servers(self, opt, grads, variables):
    """The gradients of a step, on the servers of their variables.

    Args:
      opt: The optimizer.
      grads: Its gradients, without None.
      variables: The tf.Variables.

    Returns:
      The gradients, and the operations that wait until all have arrived. A
      worker that dies before changes nothing on any server.
    """
    if self.number is None or tf.executing_eagerly() or not (
        _replicas.is_shared(_iterations(opt))):
      return grads, []
    there = []
    with tf.control_dependencies(None):  # They do not wait for the lock.
      for grad, variable in zip(grads, variables):
        with ops.device_of(variable):
          there.append(tf.nest.map_structure(
              tf.identity, _rules.cast(grad, variable.dtype),
              expand_composites=True))
      with ops.device_of(_iterations(opt)):
        arrived = [tf.group(*tf.nest.flatten(there, expand_composites=True))]
    self._taken.arrived += arrived
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
