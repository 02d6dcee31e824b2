"""LazyAdam in both halves: Adam of the rows in a sparse gradient alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import averages
import wrapopt
import wrapopt.keras as wk

tf1 = tf.compat.v1

each_way = pytest.mark.parametrize(
    "way", [way for way in averages.WAYS if way.one_pass], ids=str)
START = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)
LAZY = wrapopt.LazyAdamOptimizer, wk.LazyAdam
ADAM = tf1.train.AdamOptimizer, keras.optimizers.Adam


def running(way, classes, *args):
  """A Run of a table, without averages."""
  return averages.running(
      way, {"table": START}, lambda run: {},
      lambda run: classes[way.half == "keras"](*args),
      wrappers=(lambda opt: opt,) * 2)


@each_way
def test_touched_rows_are_adams(way):
  """The others do not move."""
  value, m, v = START.astype(np.float64), np.zeros([5, 2]), np.zeros([5, 2])
  with running(way, LAZY, 0.1, 0.8, 0.9, 1e-3) as run:
    for t in range(1, 5):
      rng = np.random.default_rng(t)
      values, rows = rng.normal(size=(3, 2)), [t % 5, (2 * t + 1) % 5, t % 5]
      run.step({"table": (values, rows)})
      total = np.zeros([5, 2])
      np.add.at(total, rows, values)
      m[rows] += 0.2 * (total - m)[rows]
      v[rows] += 0.1 * (total**2 - v)[rows]
      rate = 0.1 * np.sqrt(1 - 0.9**t) / (1 - 0.8**t)
      value[rows] -= (rate * m / (np.sqrt(v) + 1e-3))[rows]
      np.testing.assert_allclose(run.value("table"), value, rtol=1e-5,
                                 atol=1e-6)
    if way.half == "v1":
      table = run.variables["table"]
      for got, want in zip(run.read(*(run.opt.get_slot(table, name)
                                      for name in "mv")), (m, v)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.by_day(2)
@each_way
def test_a_dense_gradient_is_adams(way):
  found = []
  for classes in LAZY, ADAM:
    with running(way, classes, 0.1) as run:
      for t in range(3):
        run.step({"table": START**2 + t})
      found.append(run.value("table"))
  if way.half == "keras" and way.mode != "eager":
    # In these modes Keras's own ops round otherwise.
    np.testing.assert_allclose(*found, rtol=1e-6)
  else:
    np.testing.assert_array_equal(*found)


def test_gathered_rows_of_a_scalar_are_refused():
  w = tf.Variable(1.0)
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
    wrapopt.LazyAdamOptimizer().apply_gradients(
        [(tf.IndexedSlices(tf.ones([1]), tf.constant([0])), w)])


def test_amsgrad_is_refused():
  with pytest.raises(ValueError, match="`amsgrad` of LazyAdam must be False"):
    wk.LazyAdam(amsgrad=True)
