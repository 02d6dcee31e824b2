"""Sessions of TensorFlow 1 style code."""

import tensorflow as tf


def raw(session):
  """The `tf.compat.v1.Session` inside `session`, or inside the default one.

  A run in it calls no hooks of a monitored session.

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

  If its cluster lost a task, a `MonitoredSession` is recreated, as in its
  `run`. Then `do` is called again, with the new session.

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
          "`session` must be given in a graph without a default session, got "
          "None.")
  if not hasattr(session, "run_step_fn"):
    return do(session)

  def step(step_context):
    # Not its session: TensorFlow passes the closed session when it calls a step
    # function again in a new one.
    del step_context
    return do(session.run_step_fn(lambda step_context: step_context.session))

  return session.run_step_fn(step)
