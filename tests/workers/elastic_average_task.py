"""A worker of elastic_average_cluster_test.py."""

import time

import tensorflow as tf

import sessions
import wrapopt

tf1 = tf.compat.v1
INNER = {"GradientDescent": lambda: tf1.train.GradientDescentOptimizer(1.0),
         "Adam": lambda: tf1.train.AdamOptimizer(0.5)}
# By the prefix of its variables: a worker's session, and what it fetches.
_open = {}


def start(task, prefix, inner="GradientDescent", checkpoint_dir=None, delay=0,
          **kwargs):
  """Opens a session of a training; says when.

  Worker i walks by i + 1, from (0, 10) and on two parameter servers, the one
  way in the first variable and the other way in the second.

  Args:
    task: This task.
    prefix: A name for the training.
    inner: The inner optimizer.
    checkpoint_dir: Of the chief, which is worker 0.
    delay: How many seconds to wait before.
    **kwargs: Arguments of the ElasticAverageOptimizer.

  Returns:
    When it was ready to start, and when it had started.
  """
  time.sleep(delay)
  entered = time.monotonic()
  getter = wrapopt.ElasticAverageCustomGetter(task.device)
  with tf.Graph().as_default(), tf1.device(task.placement()):
    with tf1.variable_scope(prefix, custom_getter=getter):
      variables = [tf1.get_variable(f"v{i}", initializer=x)
                   for i, x in enumerate((0.0, 10.0))]
      step = tf1.train.get_or_create_global_step()
      opt = wrapopt.ElasticAverageOptimizer(
          INNER[inner](), 2, getter, communication_period=2, moving_rate=0.5,
          rho=0.0, **kwargs)
    walk = task.number + 1.0
    train = opt.minimize(walk * (variables[1] - variables[0]), step)
    fetches = {"variables": variables, "step": step,
               "centers": [getter._global_map[v] for v in variables],
               "seen": [getter._local_map[v] for v in variables]}
    session = tf1.train.MonitoredTrainingSession(
        task.server.target, is_chief=task.number == 0,
        hooks=[opt.make_session_run_hook(task.number == 0, task.number)],
        checkpoint_dir=checkpoint_dir, save_checkpoint_steps=1,
        save_summaries_steps=None, save_summaries_secs=None,
        log_step_count_steps=None, max_wait_secs=60)
  began = time.monotonic()
  _open[prefix] = session, train, fetches
  return entered, began


def train(task, prefix, steps=1):
  """Takes steps; returns values after them, as `values` does."""
  session, train_op, _ = _open[prefix]
  with session.graph.as_default():
    for _ in range(steps):
      session.run(train_op)
  return values(task, prefix)


def values(task, prefix):
  """{what: [numbers of the two variables]}, and the global step."""
  del task
  session, _, fetches = _open[prefix]
  with session.graph.as_default():
    got = sessions.again(lambda: session.run(fetches))
    return tf.nest.map_structure(float, got)


def devices(task, prefix):
  """Of the two centers, and of all local variables."""
  del task
  session, _, fetches = _open[prefix]
  with session.graph.as_default():
    return ([v.device for v in fetches["centers"]],
            {v.device for v in tf1.local_variables()})


FUNCTIONS = (start, train, values, devices)
