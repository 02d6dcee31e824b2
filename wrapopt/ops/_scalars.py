"""Scalar arguments of an op: numbers, tensors and variables, as tensors."""

import numbers
import typing

import numpy as np
import tensorflow as tf

from wrapopt.ops import _variables


class _Element(typing.NamedTuple):
  """A scalar that is an element of a vector, taken where it is used."""
  vector: tf.Tensor
  index: int


def together(scalars, like):
  """Scalars that travel to other machines as one tensor.

  Args:
    scalars: Numbers, bools, tensors and variables.
    like: A tensor on the device where they are joined.

  Returns:
    A list of scalars for the functions of this module.
  """
  known = [isinstance(x, (bool, numbers.Real)) for x in scalars]
  if sum(known) >= len(scalars) - 1:
    return list(scalars)
  with tf.device(None), tf.device(like.device):
    vector = tf.stack([float64(x) for x, k in zip(scalars, known) if not k])
  elements = (_Element(vector, i) for i in range(len(scalars)))
  return [x if k else next(elements) for x, k in zip(scalars, known)]


def float64(x):
  """A number, tensor or variable as a float64 scalar, with all its digits."""
  if isinstance(x, _Element):
    return x.vector[x.index]
  x = _variables.read_value(x)
  if isinstance(x, numbers.Real):
    # TensorFlow would keep a tensor of each Python number for ever.
    x = np.array(x, np.float64)
  return tf.cast(x, tf.float64) if tf.is_tensor(x) else tf.constant(
      x, tf.float64)


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
    return tf.constant(np.array(scalars, np.float64))
  return tf.stack([float64(scalar) for scalar in scalars])
