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
  with pytest.raises(ValueError, match="(?s)that keras.models.clone_model can "
                     "copy, got '.*', a WithoutConfig.*Give the class "
                     r"get_config\(\) and"):
    other.optimizer.averaged_model(other)
  assert other.compiled


# A variable that has an average has left its model.

LEFT = ("averages must stay in its model, got '.*{}', which has left '{}'.* "
        r"Copy the model before, .* optimizer.averaged_model\(model\)")

WRAPPERS = {
    "MovingAverage": lambda: wrapopt.keras.MovingAverage("adam", 0.5),
    "SWA": lambda: wrapopt.keras.SWA("adam", 0, 1),
    "ScheduleFree": lambda: wrapopt.keras.ScheduleFree("adam"),
    "inside": lambda: wrapopt.keras.Lookahead(
        wrapopt.keras.MovingAverage("adam", 0.5)),
}


def two_layers(opt=None):
  model = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="first"),
                            layers.Dense(1, name="last")])
  if opt is not None:
    model.compile(opt, loss="mse")
    for _ in range(3):
      model.train_on_batch(*data())
  return model


def raises_left(variable="first/kernel", layer="first"):
  return pytest.raises(RuntimeError, match=LEFT.format(variable, layer))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_that_is_quantized(name, tmp_path):
  model = two_layers(WRAPPERS[name]())
  opt = model.optimizer._inner() if name == "inside" else model.optimizer
  biases = [layer.bias for layer in model.layers]
  raw = [v.numpy() for v in biases]
  # The error comes after the others are restored.
  with pytest.raises(RuntimeError, match="All other variables have their own"):
    with opt.averaged_weights(*[model] if name != "SWA" else []):
      averages = [v.numpy() for v in biases]
      model.quantize("int8")
  assert all((a != b).all() for a, b in zip(averages, raw))
  for v, w in zip(biases, raw, strict=True):
    np.testing.assert_array_equal(v, w)

  def enter(*args):
    with opt.averaged_weights(*args):
      raise AssertionError

  callback = wrapopt.keras.EvaluateWithAverages()
  for entry in [
      lambda: enter(model), enter, lambda: opt.averaged_model(model),
      lambda: opt.averages_by_decay(model), lambda: opt.set_model(model),
      lambda: model.evaluate(*data(), verbose=0, callbacks=[callback]),
      lambda: model.fit(*data(), verbose=0, callbacks=[callback]),
      lambda: opt.finalize_variable_values(biases),
      lambda: tf.train.Checkpoint(opt=opt).write(str(tmp_path / "c"))]:
    with raises_left():
      entry()
    for v, w in zip(biases, raw, strict=True):
      np.testing.assert_array_equal(v, w)
  with raises_left():
    model.fit(*data(), verbose=0)
  with pytest.warns(UserWarning, match="gets averages of variables that have "
                    "left the model, as '.*first/kernel'"):
    model.save(tmp_path / "model.keras")


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_copy_that_is_quantized(mode):
  model = two_layers(WRAPPERS["MovingAverage"]())
  raw = model.get_weights()
  copied = model.optimizer.averaged_model(model)
  copied.quantize(mode)
  want = two_layers()
  with model.optimizer.averaged_weights(model):
    want.set_weights(model.get_weights())
  want.quantize(mode)
  for got, w in zip(copied.weights, want.weights, strict=True):
    np.testing.assert_array_equal(got, w)
  assert copied.layers[0]._kernel.dtype == "int8"
  for v, w in zip(model.weights, raw, strict=True):
    np.testing.assert_array_equal(v, w)


def test_a_part_has_lost_nothing():
  opt = wrapopt.keras.MovingAverage("sgd", 0.5)
  a, b = two_layers(), two_layers()  # With layers of the same names.
  variables = a.trainable_variables + b.trainable_variables
  opt.build(variables)
  opt.apply([tf.ones(v.shape) for v in variables], variables)
  for model in a, b:
    model.compile(opt, loss="mse")
  encoder = keras.Sequential(a.layers[:1])

  def enter(*args):
    with opt.averaged_weights(*args):
      pass

  for model in a, b, encoder:
    enter(model)
  b.quantize("int8")
  a.layers[0].trainable = False
  for model in a, encoder:
    enter(model)
  with raises_left():
    enter(b)
  with raises_left():
    enter()
  # A layer that was removed, or another one in its place.
  a.pop()
  enter(a)
  opt.averaged_model(a)
  a.add(layers.Dense(1, name="other"))
  with raises_left("last/kernel", a.name):
    enter(a)
  a.compile("sgd")  # It has had the variable.
  with raises_left("last/kernel", a.name):
    enter(a)
  enter(encoder)


def test_what_fit_trains_and_does_not_end_with():
  model = two_layers(WRAPPERS["MovingAverage"]())
  model.fit(*data(), verbose=0)
  # Keras goes on training the kernel until the next compile().
  model.layers[0].enable_lora(2)
  with pytest.warns(UserWarning, match="ends with the raw weights of '.*first/"
                    "kernel', which is frozen"):
    model.fit(*data(), verbose=0)
