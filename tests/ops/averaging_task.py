"""The worker of averaging_rounds_test.py in a cluster, and its ops."""

import math

import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._loader import ops as raw

tf1 = tf.compat.v1

FIRST = (0, 1)  # The place that `opened` begins.


def rounds(shared_name, num_workers=2, **attributes):
  """Rounds of one number in a variable."""
  return raw.wrapopt_averaging_rounds(
      shared_name=shared_name, num_workers=num_workers, **{
          "dtypes": [tf.float32], "sizes": [1], "holds_center": False,
          **attributes})


def opened(handle, worker=""):
  """Begins a generation, with the center of a worker if it has sent one."""
  return raw.wrapopt_averaging_restore(handle, worker, 0, FIRST, 0)


def enter(handle, worker, place=FIRST, most_turns=99):
  """What the lead knows, once the worker has a turn."""
  return raw.wrapopt_averaging_enter(
      handle, worker, 0, place, most_turns, math.inf, math.inf).known


def bring(handle, worker, values=((0.,),), place=FIRST, weight=1.):
  """Makes a worker a member: (whether it is one, what the lead knows)."""
  known = enter(handle, worker, place)
  staged = raw.wrapopt_averaging_stage(
      handle, worker, known, weight, len(values), 0, values)
  with tf.control_dependencies([staged]):
    return raw.wrapopt_averaging_arrive(handle, worker, known)


def closed(handle, min_workers, place=FIRST, timeout_secs=math.inf,
           grace_secs=math.inf):
  return raw.wrapopt_averaging_close(
      handle, place, min_workers, timeout_secs, grace_secs)


def mean(handle, known, variables, sizes=None):
  """Ends a round. First come variables that are no refs."""
  resources = [v.handle for v in variables if not ops.is_ref_variable(v)]
  refs = [v for v in variables if ops.is_ref_variable(v)]
  return raw.wrapopt_averaging_mean(
      handle, known, resources, refs,
      sizes=[len(variables)] if sizes is None else sizes)


def gate():
  """(step, ...) for a staleness gate."""
  with tf1.variable_scope("gate", use_resource=True):
    return [tf1.get_variable(name, shape, dtype, tf1.zeros_initializer(),
                             trainable=False)
            for name, shape, dtype in (("step", [], tf.int64),
                                       ("counter", [], tf.float32),
                                       ("histogram", [2, 2], tf.int64))]


def wait(task, shared_name, path):
  """Waits for two workers, and makes a file when it does."""
  def begun():
    with open(path, "w", encoding="utf-8"):
      return np.int64(0)

  with tf.Graph().as_default() as graph:
    with tf.device("/job:ps/task:0"):
      step, counter, histogram = gate()
      handle = rounds(shared_name)
      restored = opened(handle)
      verdict = ops.staleness_gate(step, counter, histogram, 0, 9)
    with tf.control_dependencies([restored, verdict.accept]):
      with tf.device(task.device):
        begins = tf.numpy_function(begun, [], tf.int64)
    with tf.control_dependencies([begins]), tf.device("/job:ps/task:0"):
      known = closed(handle, 2)
    with tf.control_dependencies([known]):
      done = ops.staleness_complete(verdict.ticket, step)
    init = tf1.global_variables_initializer()
  with task.session(graph) as session:
    session.run(init)
    session.run(done)


FUNCTIONS = (wait,)
