"""Runs in monitored sessions whose parameter server may go away."""

import tensorflow as tf


def again(run):
  """Calls `run`, and once more if TensorFlow has cancelled it: its result.

  A monitored session is made anew after an AbortedError or UnavailableError.
  By a race in TensorFlow, a step whose server went away ends at times with a
  CancelledError, which the caller gets; the next call makes the session anew.
  """
  try:
    return run()
  except tf.errors.CancelledError:
    return run()
