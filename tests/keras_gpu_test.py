"""The one-pass step of a Keras optimizer, with its variables on a GPU."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import modes
import numerics
import wrapopt.keras

INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.5, weight_decay=0.25),
    "SGD with momentum": lambda: keras.optimizers.SGD(
        0.5, momentum=0.75, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.5),
    "Lion": lambda: keras.optimizers.Lion(0.5),
}


def train(inner, device):
  """The variables, slots and averages after two steps on a device."""
  rng = np.random.default_rng(0)
  shapes = [(3, 2), (5,), ()]
  arrays = [[rng.normal(size=shape).astype(np.float32) for shape in shapes]
            for _ in range(3)]
  # What TensorFlow makes there is made of NumPy arrays: a fake GPU has none of
  # its kernels.
  with tf.device(device):
    values = [tf.Variable(x) for x in arrays[0]]
  opt = wrapopt.keras.MovingAverage(inner(), 0.75)
  opt.build(values)
  for grads in arrays[1:]:
    opt.apply([tf.constant(g) for g in grads], values)
  row = [opt.average(v).value for v in values]
  slots = [v.value for v in opt.inner().variables[2:]]
  assert all(device in v.device for v in values + row + slots)
  return [v.numpy() for v in values + slots + row]


@pytest.mark.parametrize("inner", INNER)
def test_a_step_gives_the_bits_of_the_cpu(inner):
  want = train(INNER[inner], modes.OTHERS)
  got = train(INNER[inner], modes.VARIABLES)
  for a, b in zip(want, got, strict=True):
    numerics.assert_same_numbers(b, a)
