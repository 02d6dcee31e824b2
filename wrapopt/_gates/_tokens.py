"""Tokens, by which a gate knows the tries of one function.

A ClusterCoordinator runs a function again if its worker has died, which may
have completed it just before. All tries have the same token, so that the second
one counts nothing: see `wrapopt.ops.staleness_gate`.
"""

import itertools
import secrets
import sys
import threading
import weakref

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_v2_func_graphs

NONE = -1

# Each function has so many tokens.
_IN_FUNCTION = 1 << 10
# The first of them is told by its digits. While a worker is stopped, a tensor
# that it has to be sent lets all others wait: these it soon has. Each digit is
# one more argument of the function, so few are better.
_BASE, _DIGITS = 32, 7
# {graph of a function: how many it has taken}.
_taken: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def next_of_function():
  """The next token of the function that is traced here.

  Returns:
    A scalar int64 tensor, or NONE: in eager mode, in a loop, and in a function
    that another one calls. All of these may run several times in one try.
  """
  graph = tf.compat.v1.get_default_graph()
  if tf.executing_eagerly() or not isinstance(graph, func_graph.FuncGraph):
    return NONE
  outermost = graph
  while isinstance(outermost, control_flow_v2_func_graphs.CondBranchFuncGraph):
    outermost = outermost.outer_graph
  if type(outermost) is not func_graph.FuncGraph or isinstance(
      outermost.outer_graph, func_graph.FuncGraph):
    return NONE
  i = _taken[outermost] = _taken.get(outermost, -1) + 1
  if i >= _IN_FUNCTION:
    return NONE

  # Not in a branch, whose graph TensorFlow would not feed. An op that takes a
  # placeholder would leave it to that one to wait for what both depend on, and
  # a placeholder does not wait.
  with outermost.as_default(), tf.control_dependencies(None):
    digits = outermost.capture_call_time_value(
        _digits_now, [tf.TensorSpec([], tf.int64)] * _DIGITS,
        key="wrapopt token")
    powers = [_BASE**k * _IN_FUNCTION for k in range(_DIGITS)]
    return tf.reduce_sum(tf.stack(digits) * powers) + i


def _digits_now():
  """The digits of the scheduled function that this thread runs: tensors.

  All are -1 if there is none: its token is less than 0, as NONE.
  """
  number = _of_closure()
  with _making:
    if not _tensors:
      # Not on the worker: they would wait for it, with Python's lock.
      with tf.init_scope(), tf.device(None):
        _tensors.extend(tf.constant(np.array(digit, np.int64))
                        for digit in [*range(_BASE), -1])
  if number == NONE:
    return [_tensors[-1]] * _DIGITS
  return [_tensors[number // _BASE**k % _BASE] for k in range(_DIGITS)]


# The tensors of the digits, and of -1.
_tensors: list = []
_making = threading.Lock()


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
  # An odd factor changes all digits, so that a worker soon has been sent each.
  return next(_counted) * _FACTOR % _BASE**_DIGITS


_FACTOR = 0x9e3779b97f4a7c15
_counted = itertools.count(secrets.randbelow(_BASE**_DIGITS))
_EXECUTE = cluster_coordinator.Closure.execute_on.__code__
