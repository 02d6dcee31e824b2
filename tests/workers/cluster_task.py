"""The tasks of the cluster of cluster_test.py."""

import contextlib
import os
import time

import numpy as np
import tensorflow as tf

import race
import wrapopt
from wrapopt import ops

tf1 = tf.compat.v1
LIMIT = 0


class Graph:
  """A graph of one worker, with what all of them share."""

  def __init__(self, task, prefix):
    self.task = task
    self.graph = tf.Graph()
    self.prefix = prefix

  @contextlib.contextmanager
  def build(self):
    with self.graph.as_default(), tf1.device(self.task.placement()):
      with tf1.variable_scope(self.prefix, use_resource=True):
        self.step = tf1.get_variable(
            "global_step", [], tf.int64, tf1.zeros_initializer(),
            trainable=False)
        yield

  def session(self):
    """A session, once the first worker has initialized the variables."""
    return self.task.session(self.graph)


def update_log(task, updates, native):
  """Races for one gate; an answer has times as race.py has them."""
  g = Graph(task, f"race_{native}")
  with g.build():
    counter = tf1.get_variable("stale_counter", [], tf.float32,
                               tf1.zeros_initializer(), trainable=False)
    histogram = tf1.get_variable("histogram", [2, 8], tf.int64,
                                 tf1.zeros_initializer(), trainable=False)

    def time_after(tensor, seconds=0.0):
      def now():
        time.sleep(seconds)
        return np.int64(race.now())

      with tf.control_dependencies([tensor]), tf.device(task.device):
        return tf.numpy_function(now, [], tf.int64, stateful=True)

    if native:
      recorded, _ = ops.staleness_record(g.step)
    else:
      with tf1.colocate_with(g.step):
        recorded = g.step + 0
    read = time_after(recorded)
    asked = time_after(read)
    with tf.control_dependencies([asked]):
      if native:
        verdict = ops.staleness_gate(g.step, counter, histogram, recorded,
                                     LIMIT)
        accept = verdict.accept
      else:
        with tf1.colocate_with(g.step):
          accept = g.step - recorded <= LIMIT
    admitted = time_after(accept)
    changed = time_after(admitted, 5e-4)  # An update takes a while.
    with tf.control_dependencies([changed]):
      if native:
        done = ops.staleness_complete(verdict.ticket, g.step)
      else:
        with tf1.colocate_with(g.step):
          done = g.step.assign_add(tf.cast(accept, tf.int64), read_value=False)
    with tf.control_dependencies([done.op if hasattr(done, "op") else done]):
      times = tf.stack([read, asked, admitted, changed])
    state = (g.step.read_value(), counter.read_value(), histogram.read_value())
  with g.session() as session:
    run = session.make_callable([accept, times])
    log = [times.tolist() for accept, times in (run() for _ in range(updates))
           if accept]
    step, dropped, counts = session.run(state)
  return {"log": log, "tries": updates, "step": int(step),
          "dropped": float(dropped), "histogram": counts.tolist()}


def trained(task, prefix, limit, fused=None, v2=True, inner=None):
  """A graph that trains a weight of 4 MB with a dense gradient."""
  (tf1.enable_control_flow_v2 if v2 else tf1.disable_control_flow_v2)()
  g = Graph(task, prefix)
  with g.build():
    w = tf1.get_variable("w", [1 << 20], tf.float32, tf1.zeros_initializer())
    g.limit = tf1.placeholder_with_default(tf.constant(limit, tf.int64), [])
    opt = wrapopt.DropStaleGradientOptimizer(
        inner or tf1.train.MomentumOptimizer(0.5, 0.9), g.limit, fused=fused,
        global_step=g.step)
    # Computed by the worker, of what only the worker has.
    x = tf.random.uniform([1 << 20])
    g.train = opt.minimize(tf.reduce_sum(x * w), g.step, [w])
    g.stats = opt.staleness_stats()
  return g


class Hanging(tf1.train.GradientDescentOptimizer):
  """Stops for good between the gate and the end of an update."""

  def __init__(self, task, path):
    super().__init__(1.0)
    self._task, self._path = task, path

  def _resource_apply_dense(self, grad, handle):
    def hang(x):
      with open(self._path, "w", encoding="utf-8"):
        pass
      time.sleep(600)
      return x

    with tf1.colocate_with(None, True), tf.device(self._task.device):
      held = tf.numpy_function(hang, [grad], tf.float32)
    held.set_shape(grad.shape)
    return super()._resource_apply_dense(held, handle)


def traffic(task, prefix, fused, v2):
  """What a parameter server gets and runs for a gradient.

  Returns:
    {"admitted" or "dropped": {"received": [what and how much],
                               "ran": [nodes]}}.
  """
  g = trained(task, prefix, 0, fused, v2)
  answer = {}
  with g.session() as session:
    for name, limit in (("admitted", 0), ("dropped", -1)):
      steps = [stats(session, g.train, {g.limit: limit}) for _ in range(10)]
      # A server hands in what it noted of its transfers when it gets to it.
      answer[name] = max(steps, key=lambda step: len(step["received"]))
  return answer


def embedding(task, prefix, rows):
  """What a parameter server gets for a step of a table, and the average."""
  g = Graph(task, prefix)
  with g.build():
    w = tf1.get_variable("w", [rows, 16], tf.float32, tf1.ones_initializer(),
                         use_resource=True)
    opt = wrapopt.MovingAverageOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), 0.5)
    g.train = opt.minimize(
        tf.reduce_sum(tf.nn.embedding_lookup(w, [3, 5, 3])), var_list=[w])
    log_decays = opt.average(w).log_decays
    assert opt.is_lazy(w) and log_decays.device == w.device, w.device
    some = tf.gather(opt.average(w), [0, 3, 5])
  with g.session() as session:
    steps = [stats(session, g.train, {}) for _ in range(4)]
    return {"step": max(steps, key=lambda step: len(step["received"])),
            "average": session.run(some)[:, 0].tolist()}


def stats(session, fetch, feeds):
  metadata = tf1.RunMetadata()
  session.run(fetch, feeds, run_metadata=metadata, options=tf1.RunOptions(
      trace_level=tf1.RunOptions.FULL_TRACE))
  nodes = [node for device in metadata.step_stats.dev_stats
           if "/job:ps/" in device.device for node in device.node_stats]
  return {"received": [node.timeline_label for node in nodes
                       if node.node_name == "RecvTensor"],
          "ran": [node.timeline_label for node in nodes
                  if node.node_name != "RecvTensor"]}


def train(task, prefix, limit, until):
  """Trains until there is a file of this name."""
  g = trained(task, prefix, limit)
  made = 0
  with g.session() as session:
    while not os.path.exists(until):
      session.run(g.train)
      made += 1
    return {"made": made, "dropped": int(session.run(g.stats.dropped))}


def hang(task, prefix, limit, path):
  """Begins an update that never ends."""
  g = trained(task, prefix, limit, inner=Hanging(task, path))
  with g.session() as session:
    session.run(g.train)


FUNCTIONS = (update_log, traffic, embedding, train, hang)
