"""KerasTuner, whose own callback saves the best epoch of each trial."""

import foreign  # Before packages of others.
import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import wrapopt.keras
from wrapopt.keras import EvaluateWithAverages


def data(n, seed):
  x = np.random.default_rng(seed).standard_normal((n, 4)).astype(np.float32)
  return x, x.sum(1, keepdims=True)


def search(folder, optimizer, callback, normalizes=False):
  """Searches; returns the best score and a function that makes its model."""
  def build(hp):
    keras.utils.set_random_seed(0)
    norm = [keras.layers.BatchNormalization()] if normalizes else []
    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(hp.Choice("units", [4, 8]), "tanh"), *norm,
        keras.layers.Dense(1)])
    model.compile(optimizer(), "mse")
    return model

  tuner = keras_tuner.RandomSearch(
      build, objective="val_loss", max_trials=2, seed=1, directory=folder)
  tuner.search(*data(256, 0), epochs=2, validation_data=data(64, 1),
               callbacks=[callback], verbose=0)
  [best] = tuner.oracle.get_best_trials()
  return best.score, lambda: tuner.get_best_models()[0]


def loss_of(model, *callbacks):
  return model.evaluate(*data(64, 1), verbose=0, callbacks=list(callbacks))


def adam(**kwargs):
  return keras.optimizers.Adam(0.1, **kwargs)


OPTIMIZERS = {
    "moving_average": lambda: wrapopt.keras.MovingAverage(adam(), 0.9),
    "bema": lambda: wrapopt.keras.MovingAverage(adam(), wrapopt.BEMA()),
    "primal_average": lambda: wrapopt.keras.PrimalAverage(
        adam(), average_decay=0.5),
    "swa": lambda: wrapopt.keras.SWA(adam(), average_period=2),
    "schedule_free": lambda: wrapopt.keras.ScheduleFree(adam()),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_best_model_has_the_best_score(kind, tmp_path):
  score, best = search(tmp_path, OPTIMIZERS[kind],
                       EvaluateWithAverages(swap_on_epoch=True))
  model = best()
  np.testing.assert_allclose(loss_of(model), score, rtol=1e-6)
  # Its averages, too, which the file had before the optimizer was built.
  np.testing.assert_allclose(loss_of(model, EvaluateWithAverages()), score,
                             rtol=1e-6)


def test_raw_weights_in_the_file_have_their_averages_beside_them(tmp_path):
  score, best = search(tmp_path, OPTIMIZERS["moving_average"],
                       EvaluateWithAverages())
  model = best()
  np.testing.assert_allclose(loss_of(model, EvaluateWithAverages()), score,
                             rtol=1e-6)
  assert abs(loss_of(model) - score) > 0.1 * score


def test_recalibrated_statistics(tmp_path):
  batches = tf.data.Dataset.from_tensor_slices(data(256, 0)[0]).batch(64)
  score, best = search(
      tmp_path, OPTIMIZERS["moving_average"],
      EvaluateWithAverages(swap_on_epoch=True, recalibrate=batches),
      normalizes=True)
  np.testing.assert_allclose(loss_of(best()), score, rtol=1e-6)


def test_the_same_as_averages_of_keras(tmp_path):
  """If this fails, KerasTuner or Keras has changed."""
  score, best = search(
      tmp_path, lambda: adam(use_ema=True, ema_momentum=0.9),
      keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
  np.testing.assert_allclose(loss_of(best()), score, rtol=1e-6)
