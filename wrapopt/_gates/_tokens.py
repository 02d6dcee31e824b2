"""Tokens, by which a gate knows the tries of one function.

A ClusterCoordinator runs a function again if its worker has died, which may
have completed it just before. All tries have the same token, so that the second
one counts nothing: see `wrapopt.ops.staleness_gate`.
"""

import itertools
import secrets
import sys
import weakref

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_v2_func_graphs

NONE = -1

# Each function has so many tokens.
_IN_FUNCTION = 1 << 10
# The first of them is told by its digits: each is one more argument of the
# function, so few are better.
_BASE, _DIGITS = 32, 7
# {graph of a function: how many it has taken}.
_taken: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def next_of_function(step):
  """The next token of the function that is traced here.

  Args:
    step: A variable on the server whose gate is asked.

  Returns:
    A scalar int64 tensor, or NONE: in eager mode, in a loop, and in a function
    that another one calls. All of these may run several times in one try.
  """
  outermost = tf.compat.v1.get_default_graph()
  while isinstance(outermost, control_flow_v2_func_graphs.CondBranchFuncGraph):
    outermost = outermost.outer_graph
  # In tf.init_scope(), it is that of the function.
  if (tf.executing_eagerly() or type(outermost) is not func_graph.FuncGraph or
      isinstance(outermost.outer_graph, func_graph.FuncGraph)):
    return NONE
  i = _taken[outermost] = _taken.get(outermost, -1) + 1
  if i >= _IN_FUNCTION:
    return NONE
  # Not in a branch, whose graph TensorFlow would not feed. An op that takes a
  # placeholder would leave it to that one to wait for what both depend on, and
  # a placeholder does not wait.
  with outermost.as_default(), tf.control_dependencies(None):
    server = step.device
    digits = outermost.capture_call_time_value(
        _Digits(server), [tf.TensorSpec([], tf.resource)] * _DIGITS,
        key=f"wrapopt token {server}")
    with tf.device(None), tf.device(server):
      token = i + tf.add_n([
          _BASE**k * _IN_FUNCTION * tf.raw_ops.ReadVariableOp(
              resource=digit, dtype=tf.int64)
          for k, digit in enumerate(digits)])
      token.set_shape([])  # TensorFlow does not know that of a digit.
      return token


class _Digits:
  """Returns the digits of the scheduled function that this thread runs.

  These are handles of variables on a server. A tensor would be sent to the
  worker, and TensorFlow may wait for ever for a tensor that it was sending to a
  worker that has died.
  """

  def __init__(self, server):
    with tf.init_scope(), tf.device(None), tf.device(server):
      self._handles = [_handle_of(digit) for digit in [*range(_BASE), -1]]

  def __call__(self):
    number = _of_closure()
    if number == NONE:  # The token is less than 0, as NONE.
      return [self._handles[-1]] * _DIGITS
    return [self._handles[number // _BASE**k % _BASE] for k in range(_DIGITS)]


def _handle_of(value):
  handle = tf.raw_ops.VarHandleOp(
      dtype=tf.int64, shape=[], shared_name=context.anonymous_name())
  tf.raw_ops.AssignVariableOp(
      resource=handle, value=tf.constant(value, tf.int64))
  return handle


def _of_closure():
  """The number of the scheduled function that this thread runs, or NONE."""
  frame = sys._getframe()
  while frame is not None:
    if frame.f_code is _EXECUTE:
      closure = frame.f_locals["self"]
      # One that schedules a Python function may call others many times.
      return (vars(closure).setdefault("_wrapopt_token", _next_number())
              if hasattr(closure, "_concrete_function") else NONE)
    frame = frame.f_back
  return NONE


def _next_number():
  """A number that no other of the next _BASE**_DIGITS calls returns."""
  return next(_counted) % _BASE**_DIGITS


_counted = itertools.count(secrets.randbelow(_BASE**_DIGITS))
_EXECUTE = cluster_coordinator.Closure.execute_on.__code__
