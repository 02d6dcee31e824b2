"""Sessions of TensorFlow 1 style code."""

import tensorflow as tf


def raw(session):
  """The `tf.compat.v1.Session` behind `session`, or behind the default one.

  A monitored session's hooks do not see what runs in it.

  Args:
    session: A session, a `MonitoredSession`, or None for the default session.

  Returns:
    A `tf.compat.v1.Session`.

  Raises:
    RuntimeError: If `session` is None and there is no default session.
  """
  return in_raw(session, lambda session: session)


def in_raw(session, do):
  """Returns the result of `do`, a function of the `tf.compat.v1.Session`.

  A `MonitoredSession` whose cluster lost a task is made anew, as in its `run`;
  then `do` is called again, with the session that is there now.

  Args:
    session: As in `raw`.
    do: A function of a `tf.compat.v1.Session`.

  Returns:
    The result of `do`.

  Raises:
    RuntimeError: If `session` is None and there is no default session.
  """
  if session is None:
    session = tf.compat.v1.get_default_session()
    if session is None:
      raise RuntimeError(
          "`session` must be given in a graph where there is no default "
          "session, got None.")
  if not hasattr(session, "run_step_fn"):
    return do(session)

  def step(step_context):
    # Its session is not the one to use: TensorFlow passes the closed session
    # when it calls a step function again in a new one.
    del step_context
    return do(session.run_step_fn(lambda step_context: step_context.session))

  return session.run_step_fn(step)
