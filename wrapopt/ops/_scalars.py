"""Scalar arguments of an op: numbers, tensors and variables, as tensors."""

import numbers

import numpy as np
import tensorflow as tf

from wrapopt.ops import _variables


class _Element:
  """A scalar that is an element of a float64 vector, taken where it is used."""

  def __init__(self, vector, index, dtype):
    self._vector, self._index, self._dtype = vector, index, dtype

  def __tf_tensor__(self, dtype=None, name=None):
    element = tf.unstack(self._vector)[self._index]
    return tf.cast(element, dtype or self._dtype, name=name)


def together(scalars, like):
  """Scalars that travel to other machines as one tensor.

  Args:
    scalars: Numbers, bools, tensors and variables.
    like: A tensor on the device where they are joined.

  Returns:
    A list of scalars for the functions of this module.
  """
  known = [isinstance(x, (bool, numbers.Real)) for x in scalars]
  others = [_variables.read_value(x) for x, k in zip(scalars, known) if not k]
  if len(others) <= 1:
    return list(scalars)
  with tf.device(None), tf.device(like.device):
    vector = tf.stack(list(map(float64, others)))
  elements = (_Element(vector, i, tf.bool if x.dtype == tf.bool else tf.float64)
              for i, x in enumerate(map(tf.convert_to_tensor, others)))
  return [x if k else next(elements) for x, k in zip(scalars, known)]


def float64(x):
  """A number, tensor or variable as a float64 scalar, with all its digits."""
  if isinstance(x, _Element):
    return tf.convert_to_tensor(x, tf.float64)
  x = _variables.read_value(x)
  if isinstance(x, numbers.Real):
    # TensorFlow would keep a tensor of each Python number for ever.
    x = np.array(x, np.float64)
  if tf.is_tensor(x):
    return tf.cast(x, tf.float64)
  return _constant(x)


def int64(x):
  """An integer, tensor or variable as an int64 tensor."""
  return tf.cast(_variables.read_value(x), tf.int64)


def float64_vector(scalars):
  """Numbers, tensors and variables as one float64 vector."""
  if tf.executing_eagerly():
    # Reading each value is cheaper than an op for each.
    scalars = [x.numpy().item() if tf.is_tensor(x) and x.shape.rank == 0 else x
               for x in map(_variables.read_value, scalars)]
  if all(isinstance(scalar, numbers.Real) for scalar in scalars):
    return _constant(np.array(scalars, np.float64))
  return tf.stack([float64(scalar) for scalar in scalars])


def _constant(x):
  if not tf.inside_function():
    return tf.constant(x, tf.float64)
  with tf.control_dependencies(None):  # It need not wait for another machine.
    return tf.constant(x, tf.float64)
