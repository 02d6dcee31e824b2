"""The tasks of the cluster of model_average_cluster_test.py."""

import os
import time

import numpy as np
import tensorflow as tf

import sessions
import wrapopt
from wrapopt._v1._graphs import _sessions

tf1 = tf.compat.v1

INNER = {
    "gradient_descent": lambda: tf1.train.GradientDescentOptimizer(1.0),
    # For steps of 1, 2 and so on of a constant gradient.
    "momentum": lambda: tf1.train.MomentumOptimizer(1.0, 1.0),
    "adam": lambda: tf1.train.AdamOptimizer(0.5),
}


def train(task, prefix, gradient, steps, num_worker=2, interval=2, inner=
          "gradient_descent", initial=0.0, dtype="float32", v2=True,
          use_resource=True, hold=None, checkpoint=None, models=1, chief=False,
          moving_average=None, rounds_name="rounds", **options):
  """Trains models of two variables with a constant gradient.

  Reports "ready" once it has a session, and what it has of each model at that
  time and after each step: [its own values of both, both centers, its global
  step], and their moving averages if there are any.

  Args:
    task: Its `_cluster.Task`.
    prefix: Of the names.
    gradient: What a step of gradient descent subtracts from both variables.
    steps: How many steps to take.
    num_worker: How many workers there are.
    interval: How many steps a round has.
    inner: A key of INNER.
    initial: What the first model's variables start from.
    dtype: Of the first variable; the second is of float32.
    v2: Whether control flow is of version 2.
    use_resource: Whether variables are resource variables.
    hold: {number of steps: a file to wait for before the next}.
    checkpoint: Where the chief has its checkpoints, with one for each round.
    chief: Whether it is the chief, whatever its job.
    models: How many models, each with an optimizer of its own. The gradient of
      the second is twice that of the first, and so on.
    moving_average: None, or whether a MovingAverageOptimizer of decay 0.5 is
      "inside" of the ModelAverageOptimizer or "around" it.
    rounds_name: The name of the ModelAverageOptimizer.
    **options: Of the optimizers.

  Returns:
    What it reported.
  """
  (tf1.enable_control_flow_v2 if v2 else tf1.disable_control_flow_v2)()
  is_chief = chief or task.job == "chief"
  fetches, hooks, train_ops = [], [], []
  with tf.Graph().as_default(), tf1.device(task.placement()):
    for m in range(models):
      getter = wrapopt.ModelAverageCustomGetter(task.device)
      with tf1.variable_scope(f"{prefix}{m}" if m else prefix,
                              use_resource=use_resource):
        step = (tf1.train.create_global_step() if m == 0 else
                tf1.get_variable("step", [], tf.int64, tf1.zeros_initializer(),
                                 trainable=False))
        with tf1.variable_scope("model", custom_getter=getter):
          variables = [
              tf1.get_variable(name, [2], d, tf1.constant_initializer(initial))
              for name, d in (("a", dtype), ("b", "float32"))]
        opt = INNER[inner]()
        if moving_average == "inside":
          opt = average = wrapopt.MovingAverageOptimizer(opt, 0.5)
        opt = rounds = wrapopt.ModelAverageOptimizer(
            opt, num_worker, is_chief, getter, interval, name=rounds_name,
            **options)
        if moving_average == "around":
          opt = average = wrapopt.MovingAverageOptimizer(opt, 0.5)
        train_ops.append(opt.apply_gradients(
            [(tf.fill([2], tf.constant(gradient * (m + 1), v.dtype.base_dtype)),
              v) for v in variables], step))
        hooks.append(rounds.make_session_run_hook())
        fetches.append([[v.read_value() for v in variables],
                        [getter.centers[v].read_value() for v in variables],
                        step.read_value(),
                        [average.average(v).read_value() for v in variables]
                        if moving_average else []])

    def report(session):
      # No hook, for some would save or stop.
      values = _sessions.in_raw(session, lambda raw: raw.run(fetches))
      # Both elements are the same.
      one = lambda xs: [float(np.unique(x).item()) for x in xs]
      log.append([[one(m[0]), one(m[1]), int(m[2]), one(m[3])]
                  for m in values])
      task.report(log[-1])

    log = []
    with tf1.train.MonitoredTrainingSession(
        task.server.target, is_chief, checkpoint, hooks=hooks,
        save_checkpoint_steps=1 if checkpoint else None,
        save_summaries_steps=None, save_summaries_secs=None,
        config=task.config()) as session:
      report(session)
      for i in range(steps):
        if hold and i in hold:
          while not os.path.exists(hold[i]):
            time.sleep(0.02)
        sessions.again(lambda: session.run(train_ops))
        report(session)
  return log


FUNCTIONS = (train,)
