"""LazyAdamOptimizer: Adam that updates only the rows in a sparse gradient."""

import numpy as np
import pytest
import tensorflow as tf
import wrapopt

import modes
from modes import mode  # pylint: disable=unused-import

tf1 = tf.compat.v1
MODES = (*modes.UNCOMPILED, modes.Jit())


def start():
  return np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)


def steps(mode, opt, w, grads, n):
  """Takes n steps with the gradients that `grads` makes."""
  if isinstance(mode, modes.Graph):
    train = opt.apply_gradients([(grads(), w)])
    mode.session.run(tf1.global_variables_initializer())
    for _ in range(n):
      mode.session.run(train)
    return
  for _ in range(n):
    mode.run(lambda: opt.apply_gradients([(grads(), w)]))


def sparse():
  return tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, -6.0]]),
                          tf.constant([1, 3, 1]), tf.constant([5, 2]))


@modes.only(*MODES)
def test_touched_rows_are_adams(mode):
  w = mode.variable(start(), name="w")
  opt = wrapopt.LazyAdamOptimizer(0.1, 0.8, 0.9, 1e-3)
  steps(mode, opt, w, sparse, 3)
  value = start().astype(np.float64)
  m, v = np.zeros_like(value), np.zeros_like(value)
  g, rows = np.array([[6.0, -4.0], [3.0, 4.0]]), [1, 3]
  for t in range(1, 4):
    m[rows] += 0.2 * (g - m[rows])
    v[rows] += 0.1 * (g * g - v[rows])
    rate = 0.1 * np.sqrt(1 - 0.9 ** t) / (1 - 0.8 ** t)
    value[rows] -= rate * m[rows] / (np.sqrt(v[rows]) + 1e-3)
  got = mode.values([w, opt.get_slot(w, "m"), opt.get_slot(w, "v")])
  for x, want in zip(got, (value, m, v)):
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-7)


@modes.only(*MODES)
def test_a_dense_gradient_is_adams(mode):
  found = []
  for cls in (wrapopt.LazyAdamOptimizer, tf1.train.AdamOptimizer):
    w = mode.variable(start(), name=f"w_{cls.__name__}")
    steps(mode, cls(0.1), w, lambda: tf.constant(start() ** 2), 2)
    found += mode.values([w])
  np.testing.assert_array_equal(*found)


def test_gathered_rows_of_a_scalar_are_refused():
  w = tf.Variable(1.0)
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
    wrapopt.LazyAdamOptimizer().apply_gradients(
        [(tf.IndexedSlices(tf.ones([1]), tf.constant([0])), w)])
