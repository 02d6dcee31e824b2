"""Branches that may hold ref variables."""

import contextlib

import tensorflow as tf


def cond(accept, step, has_refs):
  """Runs `step`, which returns what it did or None, where `accept` is true.

  Args:
    accept: A scalar bool tensor.
    step: A function.
    has_refs: Whether it updates ref variables.

  Returns:
    A tensor that is there when the step was taken, or was not; in eager mode,
    None.
  """
  if tf.executing_eagerly():
    if accept:
      step()
    return None

  def taken():
    done = step()
    if done is None:
      return tf.constant(True)
    with tf.control_dependencies([done]):
      return tf.identity(True)

  # A branch of control flow v2 gets the value of a ref variable, not the
  # variable.
  with control_flow_v1() if has_refs else contextlib.nullcontext():
    return tf.cond(accept, taken, lambda: tf.constant(False))


@contextlib.contextmanager
def control_flow_v1():
  """`tf.cond` as in TensorFlow 1: its branches are parts of the graph."""
  if not tf.compat.v1.control_flow_v2_enabled():
    yield
    return
  tf.compat.v1.disable_control_flow_v2()
  try:
    yield
  finally:
    tf.compat.v1.enable_control_flow_v2()
