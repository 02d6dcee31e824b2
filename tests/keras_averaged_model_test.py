"""Standalone copies of models, with the averages as weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt.keras

layers = keras.layers


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.set_random_seed(0)


def data(n=32):
  x = np.random.default_rng(0).standard_normal((n, 3)).astype(np.float32)
  return x, x.sum(axis=1, keepdims=True)


@keras.saving.register_keras_serializable("wrapopt_test")
class Subclass(keras.Model):

  def __init__(self, units, **kwargs):
    super().__init__(**kwargs)
    self.units = units
    self.first, self.last = layers.Dense(units), layers.Dense(1)

  def call(self, x):
    return self.last(self.first(x))

  def get_config(self):
    return {**super().get_config(), "units": self.units}


class WithoutConfig(keras.Model):

  def __init__(self, layer):
    super().__init__()
    self.layer = layer

  def call(self, x):
    return self.layer(x)


def functional():
  x = keras.Input((3,))
  frozen = layers.Dense(4, trainable=False)
  return keras.Model(x, layers.Dense(1)(layers.Dropout(0.5)(frozen(x))))


MODELS = {
    "functional": functional,
    "sequential": lambda: keras.Sequential([layers.Dense(4), layers.Dense(1)]),
    "nested": lambda: keras.Sequential([
        keras.Input((3,)), keras.Sequential([layers.Dense(4)]),
        layers.Dense(1)]),
    "subclass": lambda: Subclass(4),
}


def trained(model, *args, **kwargs):
  model.compile(wrapopt.keras.MovingAverage(
      keras.optimizers.SGD(0.1), *args, **kwargs), loss="mse")
  for _ in range(3):
    model.train_on_batch(*data())
  return model


@pytest.mark.parametrize("kind", MODELS)
def test_copy(kind):
  model, (x, _) = trained(MODELS[kind](), [0.9, 0.5]), data()
  opt, raw = model.optimizer, model.get_weights()
  for decay in None, 0.9, 0.5:
    copied = opt.averaged_model(model, decay=decay)
    with opt.averaged_weights(model, decay=decay):
      want = model.predict(x, verbose=0)
      weights = model.get_weights()
    for got, w in zip(copied.get_weights(), weights, strict=True):
      np.testing.assert_array_equal(got, w)
    np.testing.assert_array_equal(copied.predict(x, verbose=0), want)
    assert not copied.compiled and model.compiled
    assert model.optimizer is opt
  # Neither changes with the other.
  model.train_on_batch(*data())
  np.testing.assert_array_equal(copied.predict(x, verbose=0), want)
  model.set_weights(raw)
  copied.compile("sgd", loss="mse")
  copied.train_on_batch(*data())
  for got, w in zip(model.get_weights(), raw, strict=True):
    np.testing.assert_array_equal(got, w)


def test_batch_normalizations():
  make = lambda: keras.Sequential([
      keras.Input((3,)), layers.BatchNormalization(), layers.Dense(1)])
  model, (x, _) = trained(make(), 0.5), data()
  dataset = tf.data.Dataset.from_tensor_slices(x + 5).batch(10)
  before = model.get_weights()
  copied = model.optimizer.averaged_model(model, recalibrate=dataset)
  np.testing.assert_allclose(copied.layers[0].moving_mean,
                             np.float64(x + 5).mean(0), rtol=1e-6)
  for got, w in zip(model.get_weights(), before, strict=True):
    np.testing.assert_array_equal(got, w)
  copied = model.optimizer.averaged_model(model, recalibrate=False)
  np.testing.assert_array_equal(copied.layers[0].moving_mean,
                                model.layers[0].moving_mean)
  model = make()
  opt = wrapopt.keras.MovingAverage("sgd", 0.5, average_batch_norm=True)
  opt.set_model(model)
  model.compile(opt, loss="mse")
  for _ in range(3):
    model.train_on_batch(*data())
  copied = opt.averaged_model(model)
  np.testing.assert_array_equal(copied.layers[0].moving_mean,
                                opt.average(model.layers[0].moving_mean))


def test_half_precision():
  model = keras.Sequential([
      keras.Input((3,)), layers.Dense(1, dtype="bfloat16")])
  trained(model, 0.9)
  copied = model.optimizer.averaged_model(model)
  for v, s in zip(copied.weights, model.weights, strict=True):
    assert v.dtype == "bfloat16"
    np.testing.assert_array_equal(
        tf.cast(v, "float32"),
        tf.cast(tf.cast(model.optimizer.average(s), "bfloat16"), "float32"))


def test_swa():
  model = MODELS["functional"]()
  opt = wrapopt.keras.SWA("sgd", average_period=1)
  model.compile(opt, loss="mse")
  model.fit(*data(), batch_size=8, verbose=0)
  copied = opt.averaged_model(model)
  np.testing.assert_array_equal(copied.trainable_variables[0],
                                opt.average(model.trainable_variables[0]))


def test_errors():
  model = trained(functional(), 0.9)
  opt = model.optimizer
  with pytest.raises(TypeError, match="`model` must be a Keras model, got 3"):
    opt.averaged_model(3)
  with pytest.raises(ValueError, match="must have variables that this"):
    opt.averaged_model(functional())
  with pytest.raises(ValueError, match="`decay` must be one of"):
    opt.averaged_model(model, decay=0.3)
  with opt.averaged_weights():
    with pytest.raises(RuntimeError, match="must not be called inside"):
      opt.averaged_model(model)
  with pytest.raises(RuntimeError, match=r"averaged_model\(\) must be called "
                     "after the first step"):
    wrapopt.keras.SWA("sgd").averaged_model(model)
  other = trained(WithoutConfig(layers.Dense(1)), 0.9)
  with pytest.raises(ValueError, match=r"(?s)from_config\(\) or keras.models."
                     "clone_model can copy, got '.*', a WithoutConfig.*Give the "
                     r"class get_config\(\) and"):
    other.optimizer.averaged_model(other)
  assert other.compiled
