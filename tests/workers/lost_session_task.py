"""The tasks of the cluster of lost_session_cluster_test.py."""

import tensorflow as tf

import sessions
import wrapopt

tf1 = tf.compat.v1

_open = {}  # The session, and what is run in it.


def start(task, checkpoint):
  """Trains one step, which is saved."""
  with tf.Graph().as_default(), tf1.device(task.placement()):
    v = tf1.get_variable("v", initializer=0.0)
    opt = wrapopt.MovingAverageOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), 0.5)
    train = opt.apply_gradients([(tf.constant(-1.0), v)],
                                tf1.train.get_or_create_global_step())
    session = tf1.train.MonitoredTrainingSession(
        task.server.target, checkpoint_dir=checkpoint, config=task.config(),
        save_checkpoint_steps=1, save_summaries_steps=None,
        log_step_count_steps=None)
    session.run(train)
  _open.update(session=session, opt=opt, state=[v, opt.average(v)])


def averaged(task):
  """The variable and its average before and after, the variable inside."""
  del task
  session, opt, state = _open["session"], _open["opt"], _open["state"]
  with session.graph.as_default():
    seen = [session.run(state)]
    with opt.averaged_weights(session):
      seen.append(session.run(state[:1]))
    seen.append(session.run(state))
  return [[x.item() for x in xs] for xs in seen]


def seeded(task):
  """The same after `seed_averages`, the first to come to the session."""
  del task
  session, opt, state = _open["session"], _open["opt"], _open["state"]
  with session.graph.as_default():
    sessions.again(lambda: opt.seed_averages(session))
    return [x.item() for x in session.run(state)]


FUNCTIONS = (start, averaged, seeded)
