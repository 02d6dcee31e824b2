"""LocalRounds: local training in `fit`."""

import keras
import numpy as np
import pytest

import wrapopt
import wrapopt.keras
from wrapopt import server as server_module

X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def fitted(optimizer, local_of=None, epochs=2, **kwargs):
  keras.utils.set_random_seed(1)
  model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4),
                            keras.layers.Dense(1)])
  model.compile(optimizer, "mse", **kwargs)
  callbacks = []
  if local_of is not None:
    local = local_of(model.trainable_variables)
    callbacks.append(wrapopt.keras.LocalRounds(local, batch_size=8))
  model.fit(X, Y, 8, epochs, verbose=0, shuffle=False, callbacks=callbacks)
  return model.get_weights(), local if callbacks else None


def local_of(cls, sync_every, server, **kwargs):
  return lambda variables: cls(variables, [server.target], "a", 1, sync_every,
                               round_timeout_secs=20, **kwargs)


@pytest.mark.parametrize("steps_per_execution", [1, 2, 4])
def test_one_worker_of_local_sgd_trains_as_alone(steps_per_execution):
  # 6 batches in an epoch: with 4 steps, an execution has the last 2 alone.
  server = server_module.start()
  kwargs = {"steps_per_execution": steps_per_execution}
  want, _ = fitted("adam", **kwargs)
  got, local = fitted("adam", local_of(wrapopt.LocalSGD, 4, server), **kwargs)
  assert local.round == 12 // 4 if steps_per_execution < 4 else 2
  for a, b in zip(got, want):
    np.testing.assert_array_equal(a, b)


def test_the_outer_step_and_examples():
  server = server_module.start()
  sgd = lambda: keras.optimizers.SGD(0.01)
  got, local = fitted(sgd(), local_of(
      wrapopt.DiLoCo, 6, server, weight="examples"), epochs=1)
  alone, _ = fitted(sgd(), epochs=1)
  begin, _ = fitted(sgd(), epochs=0)
  assert local.round == 1
  for a, b, c in zip(got, alone, begin):
    np.testing.assert_allclose(a, c + 1.33 * (b - c), rtol=1e-5, atol=1e-6)


def test_an_average_is_that_of_the_weights_of_the_worker():
  server = server_module.start()
  averaged = lambda: wrapopt.keras.MovingAverage(keras.optimizers.SGD(0.01),
                                                 0.5)
  # The mean of one worker changes nothing, and `fit` ends with the averages.
  want, _ = fitted(averaged())
  got, local = fitted(averaged(), local_of(wrapopt.LocalSGD, 3, server))
  assert local.round == 4
  for a, b in zip(got, want):
    np.testing.assert_array_equal(a, b)


def test_what_is_refused():
  server = server_module.start()
  of = local_of(wrapopt.LocalSGD, 3, server)
  with pytest.raises(ValueError, match="`steps_per_execution` must divide"):
    fitted("sgd", of, steps_per_execution=2)
  for wrapper in (wrapopt.keras.ScheduleFree, wrapopt.keras.PrimalAverage,
                  wrapopt.keras.Lookahead):
    with pytest.raises(ValueError, match="must not share the variables"):
      fitted(wrapper(keras.optimizers.SGD(0.1)), of)
  with pytest.raises(TypeError, match="`local` must be"):
    wrapopt.keras.LocalRounds("local")
