"""The worker of averaging_rounds_test.py in a cluster."""

import math

import numpy as np
import tensorflow as tf

from wrapopt import ops

tf1 = tf.compat.v1


def gate():
  """(step, ...) for a staleness gate."""
  with tf1.variable_scope("gate", use_resource=True):
    return [tf1.get_variable(name, shape, dtype, tf1.zeros_initializer(),
                             trainable=False)
            for name, shape, dtype in (("step", [], tf.int64),
                                       ("counter", [], tf.float32),
                                       ("histogram", [2, 2], tf.int64))]


def gather(task, shared_name, path):
  """Waits for two workers, and makes a file when it does."""
  def begun():
    with open(path, "w", encoding="utf-8"):
      return np.int64(0)

  with tf.Graph().as_default() as graph:
    with tf.device("/job:ps/task:0"):
      step, counter, histogram = gate()
      rounds = ops.averaging_rounds(2, shared_name)
      opened = ops.averaging_next(rounds, 0, reset=True)
      verdict = ops.staleness_gate(step, counter, histogram, 0, 9)
    with tf.control_dependencies([opened, verdict.accept]):
      with tf.device(task.device):
        begins = tf.numpy_function(begun, [], tf.int64)
    with tf.control_dependencies([begins]):
      workers = ops.averaging_gather(rounds, 0, 2, math.inf)
    with tf.control_dependencies([workers]):
      done = ops.staleness_complete(verdict.ticket, step)
    init = tf1.global_variables_initializer()
  with task.session(graph) as session:
    session.run(init)
    session.run(done)


FUNCTIONS = (gather,)
