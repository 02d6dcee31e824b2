"""Standalone copies of models, with the averages as weights."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import arrays
import wrapopt.keras as wk

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


def enter(opt, *args):
  with opt.averaged_weights(*args):
    pass


def trained(model, *args, run_eagerly=False):
  model.compile(wk.MovingAverage(keras.optimizers.SGD(0.1), *args),
                loss="mse", run_eagerly=run_eagerly)
  for _ in range(3):
    model.train_on_batch(*data())
  return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", MODELS)
def test_copy(kind):
  model, (x, _) = trained(MODELS[kind](), [0.9, 0.5]), data()
  opt, raw = model.optimizer, model.get_weights()
  for decay in None, 0.9, 0.5:
    copied = opt.averaged_model(model, decay=decay)
    with opt.averaged_weights(model, decay=decay):
      want = model.predict(x, verbose=0)
      weights = model.get_weights()
    arrays.assert_same(copied.get_weights(), weights)
    np.testing.assert_array_equal(copied.predict(x, verbose=0), want)
    assert not copied.compiled and model.compiled
    assert model.optimizer is opt
  # Neither changes with the other.
  model.train_on_batch(*data())
  np.testing.assert_array_equal(copied.predict(x, verbose=0), want)
  model.set_weights(raw)
  copied.compile("sgd", loss="mse")
  copied.train_on_batch(*data())
  arrays.assert_same(model.get_weights(), raw)


def assert_right(model, x):
  """Asserts that the copy of a model is one, and returns it."""
  copied = model.optimizer.averaged_model(model, recalibrate=False)
  with model.optimizer.averaged_weights(model):
    want = model(x).numpy()
  assert type(copied) is type(model) and not copied.compiled
  assert len(copied.weights) == len(model.weights)
  np.testing.assert_array_equal(copied(x), want)
  assert np.abs(model(x) - want).max() > 1e-3
  return copied


@keras.saving.register_keras_serializable("wrapopt_test")
class Tied(keras.Model):
  """A functional model of a class, with tied weights, as in KerasHub."""

  def __init__(self, activation="relu", **kwargs):
    table, x = layers.Dense(3, activation), keras.Input((3,))
    backbone = keras.Sequential([keras.Input((3,)), table, layers.Dense(3)])
    super().__init__(x, layers.Dense(1)(table(backbone(x))), **kwargs)
    self.activation, self.backbone = activation, backbone
    self.compile("sgd")  # As classes of KerasHub do.

  def get_config(self):
    return {"activation": self.activation, "name": self.name}

  @classmethod
  def from_config(cls, config):
    return cls(**config)


class TiedLayer(layers.Layer):
  """A layer with the kernel of another one, and weights in no attribute."""

  def __init__(self, of, **kwargs):
    super().__init__(**kwargs)
    self.of = of

  def build(self, shape):
    scale = self.add_weight(shape=(3,), initializer="ones", name="scale")
    shift = self.add_weight(shape=(3,), name="shift")
    self.scaled = lambda x: x * scale + shift

  def call(self, x):
    return self.scaled(keras.ops.matmul(x, keras.ops.transpose(self.of.kernel)))


@keras.saving.register_keras_serializable("wrapopt_test")
class Autoencoder(keras.Model):
  """A subclass with tied weights, a list and a dict of layers."""

  def __init__(self, order="ab", **kwargs):
    super().__init__(**kwargs)
    self.order = order
    for name in order:  # The order of the weights.
      setattr(self, name, layers.Dense(3))
    self.blocks = {"x": layers.Dense(3, "tanh"), "y": [layers.Dense(3)]}
    self.tied = TiedLayer(self.a)

  def call(self, x):
    x = self.blocks["y"][0](self.blocks["x"](self.a(x)))
    return self.b(self.tied(x))

  def get_config(self):  # Without the order.
    return super().get_config()


def with_shared_layers(nested=False):
  """A layer that is called twice, also in a model in the model."""
  shared, x = layers.Dense(3, "tanh"), keras.Input((3,))
  inner = keras.Sequential([keras.Input((3,)), shared, layers.Dense(3)])
  y = inner(x) if nested else layers.Dense(3)(shared(x))
  return keras.Model(x, layers.Dense(1)(shared(y)))


@pytest.mark.parametrize("make", [
    lambda: Tied("tanh"), with_shared_layers, Autoencoder,
    lambda: Autoencoder("ba")],
    ids=["tied", "shared", "subclass", "other_order"])
def test_tied_weights(make):
  model, (x, _) = trained(make(), 0.9, run_eagerly=True), data()
  copied = assert_right(model, x)
  if isinstance(model, Autoencoder):  # By the attributes, not by the order.
    np.testing.assert_array_equal(
        copied.a.kernel, model.optimizer.average(model.a.kernel))


def test_lora():
  model, (x, y) = functional(), data()
  model.layers[1].enable_lora(2)
  assert_right(trained(model, 0.9, run_eagerly=True), x)
  model = Subclass(4)
  model(x)
  model.first.enable_lora(2)  # Which its configuration does not say.
  assert_right(trained(model, 0.9, run_eagerly=True), x)


def test_inputs_of_several_kinds():
  model = Named(4)
  x, y = data()
  model.compile(wk.MovingAverage(
      keras.optimizers.SGD(0.1), 0.9), loss="mse", run_eagerly=True)
  for _ in range(3):
    model.train_on_batch({"left": x, "right": 2 * x}, y)
  assert_right(model, {"left": x, "right": 2 * x})


@keras.saving.register_keras_serializable("wrapopt_test")
class Named(Subclass):

  def call(self, x):
    return self.last(self.first(x["left"]) + x["right"][:, :1])


@keras.saving.register_keras_serializable("wrapopt_test")
class Forgetful(Subclass):
  """Its configuration leaves out what its layers were made with."""

  def __init__(self, units, activation="relu", layer=None, **kwargs):
    super().__init__(units, **kwargs)
    self.first = layer or layers.Dense(units, activation)


@keras.saving.register_keras_serializable("wrapopt_test")
class Itself(Subclass):

  @classmethod
  def from_config(cls, config):
    return cls.made


def itself():
  Itself.made = Itself(1)
  return Itself.made


def swapped():
  """A model whose layers have been replaced by each other."""
  model = Forgetful(1)
  model.first, model.last = model.last, model.first
  return model


@pytest.mark.parametrize("make, why", [
    (lambda: Forgetful(1, "tanh"), "has another 'activation' in the copy"),
    (lambda: Forgetful(1, layer=layers.Dense(
        1, "relu", dtype="mixed_bfloat16")), "has another 'compute_dtype' in"),
    (lambda: Forgetful(1, layer=layers.EinsumDense("bi,io->bo", 1)),
     "is a EinsumDense, in the copy a Dense"),
    (lambda: Forgetful(1, layer=layers.Dense(1, "relu", use_bias=False)),
     "another 'use_bias'"),
    (lambda: Forgetful(1, layer=layers.Dense(2, "relu")), "another 'units'"),
    (itself, "The copy shares variables with the model"),
    # Keras does not restore it from a file either.
    (lambda: with_shared_layers(True), "copy has 8 weights, the model 6"),
    (swapped, "has another 'activation' in the copy")])
def test_copies_that_are_wrong(make, why):
  model = make()
  model.compile(wk.MovingAverage("sgd"), loss="mse")
  model(data()[0])
  model.optimizer.build(model.trainable_variables)
  before = model.get_weights()
  with pytest.raises(ValueError, match=why):
    model.optimizer.averaged_model(model)
  arrays.assert_same(model.get_weights(), before)
  assert model.compiled


def test_batch_normalizations():
  make = lambda: keras.Sequential([
      keras.Input((3,)), layers.BatchNormalization(), layers.Dense(1)])
  model, (x, _) = trained(make(), 0.5), data()
  dataset = tf.data.Dataset.from_tensor_slices(x + 5).batch(10)
  before = model.get_weights()
  copied = model.optimizer.averaged_model(model, recalibrate=dataset)
  np.testing.assert_allclose(copied.layers[0].moving_mean,
                             np.float64(x + 5).mean(0), rtol=1e-6)
  arrays.assert_same(model.get_weights(), before)
  copied = model.optimizer.averaged_model(model, recalibrate=False)
  np.testing.assert_array_equal(copied.layers[0].moving_mean,
                                model.layers[0].moving_mean)
  model = make()
  opt = wk.MovingAverage("sgd", 0.5, average_batch_norm=True)
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


@pytest.mark.by_day(0)
def test_swa():
  model = MODELS["functional"]()
  opt = wk.SWA("sgd", average_period=1)
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
    wk.SWA("sgd").averaged_model(model)
  other = trained(WithoutConfig(layers.Dense(1)), 0.9)
  with pytest.raises(ValueError, match=r"(?s)from_config\(\) or keras.models."
                     "clone_model can copy, got '.*', a WithoutConfig.*Give "
                     r"the class get_config\(\) and"):
    other.optimizer.averaged_model(other)
  assert other.compiled


# A variable that has an average has left its model.

LEFT = ("averages must stay in its model, got '.*{}', which has left '{}'.* "
        r"Copy the model before, .* optimizer.averaged_model\(model\)")

WRAPPERS = {
    "MovingAverage": lambda: wk.MovingAverage("adam", 0.5),
    "SWA": lambda: wk.SWA("adam", 0, 1),
    "PrimalAverage": lambda: wk.PrimalAverage("adam"),
    "ScheduleFree": lambda: wk.ScheduleFree("adam"),
    "inside": lambda: wk.Lookahead(
        wk.MovingAverage("adam", 0.5)),
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
  opt = model.optimizer.inner_optimizer if name == "inside" else model.optimizer
  biases = [layer.bias for layer in model.layers]
  raw = [v.numpy() for v in biases]
  # The error comes after the others are restored.
  with pytest.raises(RuntimeError, match="All other variables have their own"):
    with opt.averaged_weights(*[model] if name != "SWA" else []):
      averages = [v.numpy() for v in biases]
      model.quantize("int8")
  assert all((a != b).all() for a, b in zip(averages, raw))
  arrays.assert_same(biases, raw)

  callback = wk.EvaluateWithAverages()
  for entry in [
      lambda: enter(opt, model), lambda: enter(opt),
      lambda: opt.averaged_model(model),
      lambda: opt.averages_by_decay(model), lambda: opt.set_model(model),
      lambda: model.evaluate(*data(), verbose=0, callbacks=[callback]),
      lambda: model.fit(*data(), verbose=0, callbacks=[callback]),
      lambda: opt.finalize_variable_values(biases),
      lambda: tf.train.Checkpoint(opt=opt).write(str(tmp_path / "c"))]:
    with raises_left():
      entry()
    arrays.assert_same(biases, raw)
  with raises_left():
    model.fit(*data(), verbose=0)
  model.export(tmp_path / "exported", verbose=False)
  with pytest.warns(UserWarning, match="gets averages of variables that have "
                    "left the model, as '.*first/kernel'"):
    model.save(tmp_path / "model.keras")


@keras.saving.register_keras_serializable("wrapopt_test")
class Table(layers.Layer):
  """A table that may grow."""

  def build(self, _):
    self.table = self.add_weight(shape=(3, 1), initializer="ones", name="table")

  def call(self, x):
    # Sparse gradients: rows of averages may lag behind.
    return tf.gather(self.table.value, tf.cast(x[:, 0], tf.int32))

  def grow(self, how):
    old = self.table
    self._tracker.unlock()
    if how == "removed":
      self._untrack_variable(old)
    self.table = self.add_weight(
        shape=(6, 1), initializer=lambda *_, **__: tf.pad(
            old.value, [[0, 3], [0, 0]]), name="table")
    self._tracker.lock()


@pytest.mark.parametrize("how", ["removed", "beside"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_table_that_grows(name, how, tmp_path):
  """A step and an evaluation refuse it, and a new optimizer trains it."""
  opt = WRAPPERS[name]()
  averaging = opt.inner_optimizer if name == "inside" else opt
  model = keras.Sequential([keras.Input((1,)), Table(), layers.Dense(1)])
  model.compile(opt, loss="mse", run_eagerly=True)
  x, y = np.array([[0.0], [2.0]]), np.zeros((2, 1))
  model.train_on_batch(x, y)
  table = model.layers[0]
  table.grow(how)
  before = [v.numpy() for v in model.weights]
  with pytest.raises(ValueError, match="variables it was originally built"):
    model.train_on_batch(x, y)

  callback = wk.EvaluateWithAverages()
  for entry in [
      lambda: enter(averaging, model), lambda: averaging.averaged_model(model),
      lambda: model.evaluate(x, y, verbose=0, callbacks=[callback])]:
    with pytest.raises(RuntimeError, match=(
        "got '.*table', which has left" if how == "removed" else
        "got '.*/table', of which 'table.*' has another one that .* Compile "
        "the model with a new optimizer, and set its averages")):
      entry()
  arrays.assert_same(model.weights, before)
  opt = WRAPPERS[name]()
  model.compile(opt, loss="mse", run_eagerly=True)
  model.fit(x + 3, y + 5, verbose=0)
  averaging = opt.inner_optimizer if name == "inside" else opt
  with averaging.averaged_weights(model):
    assert (table.table.numpy()[[3, 5]] != 0).all()
  model.evaluate(x, y, verbose=0, callbacks=[callback])
  tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))


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
  arrays.assert_same(copied.weights, want.weights)
  assert copied.layers[0]._kernel.dtype == "int8"
  arrays.assert_same(model.weights, raw)


def test_a_part_has_lost_nothing():
  opt = wk.MovingAverage("sgd", 0.5)
  a, b = two_layers(), two_layers()  # With layers of the same names.
  variables = a.trainable_variables + b.trainable_variables
  opt.build(variables)
  opt.apply([tf.ones(v.shape) for v in variables], variables)
  for model in a, b:
    model.compile(opt, loss="mse")
  encoder = keras.Sequential(a.layers[:1])
  for model in a, b, encoder:
    enter(opt, model)
  b.quantize("int8")
  a.layers[0].trainable = False
  for model in a, encoder:
    enter(opt, model)
  for args in [b], []:
    with raises_left():
      enter(opt, *args)
  # A layer that was removed, or another one in its place.
  a.pop()
  enter(opt, a)
  opt.averaged_model(a)
  a.add(layers.Dense(1, name="other"))
  with raises_left("last/kernel", a.name):
    enter(opt, a)
  a.compile("sgd")  # It has had the variable.
  with raises_left("last/kernel", a.name):
    enter(opt, a)
  enter(opt, encoder)


def test_what_fit_trains_and_does_not_end_with():
  model = two_layers(WRAPPERS["MovingAverage"]())
  model.fit(*data(), verbose=0)
  # Keras goes on training the kernel until the next compile().
  model.layers[0].enable_lora(2)
  with pytest.warns(UserWarning, match="ends with the raw weights of '.*first/"
                    "kernel', which is frozen"):
    model.fit(*data(), verbose=0)


class CopiedTwice(Subclass):
  """While it is copied, a second thread begins to copy it, and ends later."""

  second = None

  def get_config(self):
    if self.second is not None:
      if threading.current_thread() is not self.second:
        self.second.start()
        self.entered.wait(0.5)  # It does not enter.
      else:
        self.entered.set()
        assert self.may_end.wait(600)
    return super().get_config()


@pytest.mark.by_day(0)
def test_a_model_is_compiled_when_two_threads_have_copied_it():
  model, (x, y) = CopiedTwice(4), data()
  model.compile(wk.MovingAverage("sgd"), "mse")
  model.fit(x, y, verbose=0)
  copy = lambda: model.optimizer.averaged_model(model)
  second = threading.Thread(target=copy, daemon=True)
  model.entered, model.may_end = threading.Event(), threading.Event()
  model.second = second
  copy()
  model.may_end.set()
  second.join()
  assert model.compiled and model.entered.is_set()
