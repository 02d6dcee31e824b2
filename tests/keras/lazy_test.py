"""Embeddings in Keras: rows that a batch names twice, replicas, weight decay.

both/averages_test.py has the averages of the rows of a step,
both/lazy_adam_test.py has LazyAdam.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicas  # pylint: disable=unused-import
from training import in_mode
import wrapopt.keras as wk

K = keras.optimizers
ROWS, COLUMNS = 6, 2


def table():
  return np.linspace(-1, 1, ROWS * COLUMNS, dtype=np.float32).reshape(
      ROWS, COLUMNS)


def gradient(t):
  rng = np.random.default_rng(t)
  return (tf.constant(rng.normal(size=(3, COLUMNS)), tf.float32),
          tf.constant([t % ROWS, (2 * t + 1) % ROWS, t % ROWS]))


def train(opt, w, steps, mode="eager"):
  """Takes steps; returns what the variable was after each."""
  # A variable may have two gradients in turn.
  def step(values, indices):
    opt.apply([tf.IndexedSlices(values, indices, tf.constant(
        [ROWS, COLUMNS]))], [w])

  step, history = in_mode(step, mode), []
  for t in steps:
    step(*gradient(t))
    history.append(w.numpy().astype(np.float64))
  return history


def average_of(start, history, decay):
  result = start.astype(np.float64)
  for value in history:
    result += (1 - decay) * (value - result)
  return result


SQUARES = {
    "adam": lambda: K.Adam(0.1), "adamw": lambda: K.AdamW(0.1),
    "amsgrad": lambda: K.Adam(0.1, amsgrad=True, weight_decay=0.1),
    "adagrad": lambda: K.Adagrad(0.1),
    "adagrad_decay": lambda: K.Adagrad(0.1, weight_decay=0.1),
    "rmsprop": lambda: K.RMSprop(0.1),
    "centered": lambda: K.RMSprop(0.1, centered=True),
    "rmsprop_momentum": lambda: K.RMSprop(0.1, momentum=0.5)}

WRAP = {"average": wk.MovingAverage, "swa": wk.SWA,
        "lookahead": lambda *args, **kwargs: wk.Lookahead(*args, 100, **kwargs)}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@pytest.mark.parametrize("name", SQUARES)
def test_a_row_that_is_named_twice_trains_as_in_the_inner_optimizer(name, mode):
  """Keras squares each gradient of a row, and then sums."""
  plain = keras.Variable(table())
  opt = SQUARES[name]()
  opt.build([plain])
  want = train(opt, plain, range(4), mode)
  for wrap in WRAP if mode == "eager" else ["average"]:
    w = keras.Variable(table())
    wrapper = WRAP[wrap](SQUARES[name]())
    wrapper.build([w])
    got = train(wrapper, w, range(4), mode)
    np.testing.assert_allclose(got, want, rtol=2e-6, err_msg=wrap)
    if wrap == "average":
      assert wrapper.is_lazy(w) == (name == "adagrad")
      np.testing.assert_allclose(
          wrapper.average(w), average_of(table(), got, 0.99), rtol=1e-5)


@pytest.mark.parametrize("name", SQUARES)
def test_duplicates_are_summed_on_request(name):
  """As if the batch named each row once, with the sum."""
  w, other = keras.Variable(table()), keras.Variable(table())
  wrapper = wk.MovingAverage(SQUARES[name](), 0.9, sum_duplicates=True)
  opt = SQUARES[name]()
  for t in range(3):
    values, indices = gradient(t)
    wrapper.apply([tf.IndexedSlices(values, indices, [ROWS, COLUMNS])], [w])
    unique, at = tf.unique(indices)
    opt.apply([tf.IndexedSlices(
        tf.math.unsorted_segment_sum(values, at, len(unique)), unique,
        [ROWS, COLUMNS])], [other])
  np.testing.assert_allclose(w, other, atol=1e-5)
  again = wk.MovingAverage.from_config(wrapper.get_config())
  assert again.sum_duplicates is True
  with pytest.raises(TypeError, match="`sum_duplicates` must be"):
    wk.SWA("adam", sum_duplicates="yes")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("wrapped", [False, True])
def test_lazy_adam_in_replicas(wrapped, replicas):
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"][:replicas])
  with strategy.scope():
    w = keras.Variable(table())
    opt = wk.LazyAdam(0.1)
    if wrapped:
      opt = wk.MovingAverage(opt, 0.5)
    opt.build([w])

  @tf.function
  def step():
    strategy.run(lambda: opt.apply(
        [tf.IndexedSlices(tf.ones([1, COLUMNS]), tf.constant([1]),
                          tf.constant([ROWS, COLUMNS]))], [w]))

  step()
  assert not wrapped or not opt.is_lazy(w)
  alone = keras.Variable(table())
  other = wk.LazyAdam(0.1)
  other.apply([tf.IndexedSlices(
      tf.fill([1, COLUMNS], float(replicas)),
      tf.constant([1]), tf.constant([ROWS, COLUMNS]))], [alone])
  for v in strategy.experimental_local_results(w.value):
    np.testing.assert_allclose(v, alone, rtol=1e-6)


def test_lookahead_moves_rows_that_no_gradient_touches():
  """So averages inside must not lag behind."""
  w = keras.Variable(table())
  averaged = wk.MovingAverage(K.SGD(0.5), 0.5)
  opt = wk.Lookahead(averaged, sync_period=2, slow_step_size=0.5)
  opt.build([w])
  value = table().astype(np.float64)
  slow, average = value.copy(), value.copy()
  for t in range(7):
    opt.apply([tf.IndexedSlices(tf.ones([1, COLUMNS]), tf.constant([t % 2]),
                                [ROWS, COLUMNS])], [w])
    value[t % 2] -= 0.5
    average += 0.5 * (value - average)
    if t % 2:
      slow += 0.5 * (value - slow)
      value = slow.copy()
  np.testing.assert_allclose(w.numpy(), value, atol=1e-6)
  np.testing.assert_allclose(averaged.average(w).numpy(), average, atol=1e-6)
  assert not averaged.is_lazy(w)


def test_weight_decay_that_is_switched_on_catches_up_first():
  w = keras.Variable(table())
  opt = wk.MovingAverage(K.SGD(0.5), 0.9)
  opt.build([w])
  history = train(opt, w, range(3))
  opt.weight_decay = 0.1
  history += train(opt, w, range(3, 6))
  np.testing.assert_allclose(opt.average(w), average_of(
      table(), history, 0.9), rtol=1e-5, atol=1e-6)
