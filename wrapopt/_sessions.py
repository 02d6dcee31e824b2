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
  if session is None:
    session = tf.compat.v1.get_default_session()
    if session is None:
      raise RuntimeError(
          "`session` must be given in a graph where there is no default "
          "session, got None.")
  if hasattr(session, "run_step_fn"):
    return session.run_step_fn(lambda step_context: step_context.session)
  return session
