"""The admission of steps, and their numbers.

A step of Keras has the number that its optimizer has counted so far. Keras
counts by reading `iterations` and assigning the sum. So if several workers
share the optimizer and do not wait for each other, steps are lost from the
count, and two steps may have one number. A step of this module begins with a
number of its own, on the server that holds the count, and is counted when all
of its changes are made. A gate may also refuse it.
"""

import math
import operator
import typing

import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _records
from wrapopt.keras._variables import value_of


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


class StepNumber:
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
  setattr(StepNumber, f"__{_name}__",
          lambda self, x, f=_function: f(self.value, x))
  setattr(StepNumber, f"__r{_name}__",
          lambda self, x, f=_function: f(x, self.value))
for _name in ("neg", "abs"):
  setattr(StepNumber, f"__{_name}__",
          lambda self, f=getattr(operator, _name): f(self.value))


# Gradients of so many bytes are sent as fast as a question about them.
_SMALL = 1 << 16


class Asked:
  """A step that has asked for admission.

  Attributes:
    accept: Whether to take it: True, or a scalar bool tensor.
    accept_in_op: What the op of the step is told, if it alone can refuse it.
    number: Its number.
    ticket: As in `Admitted`; None at the end, since the frames of a traceback
      would keep it alive.
    is_one_op: Whether it is one op on each server.
    locks: Whether it locks others out while it is taken.
    compensation: As in `Admitted`.
  """

  def __init__(self, iterations, admitted, pairs, gate, is_one_op):
    # Without a gate only the second try of a step is refused. Small gradients
    # need not wait on the worker for the answer of a gate.
    op_decides = is_one_op and (gate is None or (
        not tf.executing_eagerly() and _replicas.is_shared(iterations) and
        _bytes(g for g, _ in pairs) <= _SMALL))
    self.accept = True if op_decides else admitted.accept
    self._iterations, self._pairs = iterations, pairs
    self.locks = gate is not None and not is_one_op
    self.is_one_op = is_one_op
    self.number = admitted.number
    if op_decides:  # A refused step has none, but schedules are called with it.
      with ops.device_of(iterations):
        self.number = tf.maximum(self.number, tf.constant(0, tf.int64))
    self._transform = admitted.transform
    self.ticket = admitted.ticket
    self.accept_in_op = admitted.accept if op_decides else True
    self.compensation = admitted.compensation

  def grads(self):
    """The gradients with which to take it."""
    grads, variables = zip(*self._pairs)
    if self._transform is not None:
      grads = [g if g is None else self._transform(g) for g in grads]
    if self.locks and _replicas.is_shared(self._iterations):
      grads, _ = at_servers(grads, variables, self._iterations)
    return grads


def _bytes(grads):
  """The bytes of gradients, infinity if unknown."""
  return sum(
      t.dtype.size * (math.inf if t.shape.num_elements() is None
                      else t.shape.num_elements())
      for t in (_records.tensor_of(g) for g in grads if g is not None))


def at_servers(grads, variables, iterations):
  return _records.at_servers(grads, map(value_of, variables), iterations)


def refuse(opt, name):
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
