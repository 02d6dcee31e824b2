"""DiLoCo of real processes, in all ways to train, is what NumPy makes of it."""

import os

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from local_parts import FORKS, Oracle, Process

ROUNDS = 20


def steps_of(k):
  """The number of steps of worker k in a round, which is its weight."""
  return 1 + k % 3


def deltas(k):
  """How far its steps go: [rounds, steps, 5]."""
  return np.random.default_rng(k).normal(
      size=(ROUNDS, steps_of(k), 5)).astype(np.float32)


def train(way, k, num_workers, servers, pipe):
  """A process: sends the center after ROUNDS rounds."""
  xs = deltas(k).reshape([-1, 5])
  diloco = lambda variables: wrapopt.DiLoCo(
      variables, servers, f"w{k}", num_workers, steps_of(k),
      round_timeout_secs=120)
  if way == "fit":
    pipe.send(fit(xs, diloco))
    return
  w = tf.Variable(tf.zeros([5]))
  local = diloco([w])

  def step(x):
    w.assign_add(x)
    local.step()

  if way == "function":
    step = tf.function(step)
  for x in xs:
    step(tf.constant(x))
  pipe.send(w.numpy())


def fit(xs, diloco):
  os.environ.pop("TF_USE_LEGACY_KERAS", None)
  import keras  # pylint: disable=g-import-not-at-top
  import wrapopt.keras  # pylint: disable=g-import-not-at-top,redefined-outer-name
  model = keras.Sequential([keras.Input([5]), keras.layers.Dense(
      1, use_bias=False, kernel_initializer="zeros")])
  # Gradient descent adds the batch to the weights.
  model.compile(keras.optimizers.SGD(1.0),
                lambda y, p: -tf.reduce_sum(p, axis=-1))
  model.fit(xs, np.zeros(len(xs)), 1, verbose=0, shuffle=False, callbacks=[
      wrapopt.keras.LocalRounds(diloco(model.trainable_variables))])
  return model.get_weights()[0][:, 0]


@pytest.mark.parametrize("num_workers", [2, 4], ids="{}_workers".format)
@pytest.mark.parametrize("num_servers", [1, 2], ids="{}_servers".format)
@pytest.mark.parametrize("way", ["eager", "function", "fit"])
def test_the_oracle(way, num_servers, num_workers):
  servers = [Process() for _ in range(num_servers)]
  workers = []
  try:
    for k in range(num_workers):
      pipe, end = FORKS.Pipe()
      worker = FORKS.Process(target=train, args=(
          way, k, num_workers, [s.address for s in servers], end), daemon=True)
      worker.start()
      end.close()
      workers.append((worker, pipe))
    centers = [pipe.recv() for _, pipe in workers]
  finally:
    for process in *[w for w, _ in workers], *servers:
      process.kill()
  oracle = Oracle(np.zeros(5))
  for r in range(ROUNDS):
    oracle.end_round(
        [oracle.center + deltas(k)[r].sum(axis=0) for k in range(num_workers)],
        [steps_of(k) for k in range(num_workers)])
  for center in centers:
    np.testing.assert_array_equal(center, centers[0])
    np.testing.assert_allclose(center, oracle.center, rtol=0, atol=1e-4)
