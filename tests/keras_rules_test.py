"""Rules that TensorFlow lacks and Keras has: Keras's numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import numerics
from wrapopt.ops import apply


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("weight_decay", [None, 0.5])
def test_lion(weight_decay, sparse):
  rng = np.random.default_rng(0)
  start = rng.standard_normal((5, 3)).astype(np.float32)
  theirs, ours = keras.Variable(start), tf.Variable(start)
  moments = tf.Variable(np.zeros_like(start))
  opt = keras.optimizers.Lion(0.125, beta_1=0.75, beta_2=0.5,
                              weight_decay=weight_decay)
  for indices in ([4, 1, 4], [0, 1], [2]):
    values = rng.standard_normal((len(indices), 3)).astype(np.float32)
    grad = tf.IndexedSlices(tf.constant(values), tf.constant(indices), [5, 3])
    if not sparse:
      grad = tf.convert_to_tensor(grad)
    opt.apply([grad], [theirs])
    apply("Lion", {"var": [ours], "m": [moments]}, [grad],
          {"lr": 0.125, "beta1": 0.75, "beta2": 0.5,
           "weight_decay": weight_decay or 0.0})
    # Each rounds a step of order 1 some six times.
    for got, want in (ours, theirs), (moments, opt.variables[2]):
      numerics.assert_close(got.numpy(), np.float64(want),
                            np.full(start.shape, 6 * 2.0**-23))
  # All rows moved on, as if the gradient were dense.
  assert (moments.numpy()[4] != 0).all()
