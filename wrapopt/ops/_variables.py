"""The handles, shapes and dtypes of variables that ops take."""

import tensorflow as tf


def is_ref(variable):
  """Whether a variable is one of TensorFlow 1's, without a handle."""
  return not hasattr(variable, "handle")


def handle_or_ref(variable):
  """The handle of a resource variable; a ref variable, or a handle, itself."""
  if isinstance(variable, tf.Variable) and not is_ref(variable):
    return variable.handle
  return variable


def read_value(x):
  """The present value of a variable; else `x` itself.

  TensorFlow orders no control dependency before the conversion of a ref
  variable to a tensor.
  """
  return x.read_value() if isinstance(x, tf.Variable) else x
