"""Batch normalization under averaged weights."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_close, assert_same, values
from fit_callbacks import at_batch_end, at_epoch_end
import keras_versions
import replicas  # pylint: disable=unused-import
import wrapopt.keras as wk

layers = keras.layers
recalibrate = wk.recalibrate_batch_norm

# Keras 3.12 has no batch renormalization.
RENORM = ({"renorm": True}
          if hasattr(layers.BatchNormalization(), "renorm") else {})


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.set_random_seed(0)


def data(n=50):
  rng = np.random.default_rng(0)
  x = (rng.standard_normal((n, 6, 3)) * [1, 2, 3] + [5, 0, -1])
  return np.float32(x), np.float32(x.sum((1, 2))[:, None] / 10)


def batches(x, size=16):
  """The last one is smaller than the others."""
  return tf.data.Dataset.from_tensor_slices(x).batch(size)


def make(optimizer=None, **kwargs):
  model = keras.Sequential([
      keras.Input((6, 3)), layers.BatchNormalization(name="first"),
      layers.Dropout(0.5), layers.Dense(4, "relu"),
      layers.BatchNormalization(name="second", **kwargs), layers.Flatten(),
      layers.Dense(1)])
  model.compile(optimizer or "sgd", loss="mse")
  return model


def evaluate(model, *found):
  """The loss of a model, evaluated with callbacks."""
  return model.evaluate(*data(), verbose=0, callbacks=list(found))


def statistics(model, name):
  layer = model.get_layer(name)
  return layer.moving_mean.numpy(), layer.moving_variance.numpy()


def moments(x):
  """In float64, over all but channels."""
  return np.float64(x).mean((0, 1)), np.float64(x).var((0, 1))


# The result is rounded to float32, and so are inputs of the second layer.
close = functools.partial(assert_close, rtol=2e-6, atol=2e-6)


@pytest.mark.by_day(0)
def test_statistics_are_those_of_the_data_set():
  model, (x, y) = make(), data()
  weights = values(model.trainable_variables)
  recalibrate(model, tf.data.Dataset.zip(batches(x), batches(y)))
  close(statistics(model, "first"), moments(x))
  # The second sees what the first gives, by the statistics of each batch.
  dense = model.layers[2]
  seen = []
  for batch in batches(x):
    mean, variance = moments(batch)
    normal = (batch - mean) / np.sqrt(variance + 1e-3)
    seen.append(np.maximum(normal @ np.float64(dense.kernel), 0))
  close(statistics(model, "second"), moments(np.concatenate(seen)))
  assert_same(model.trainable_variables, weights)
  # One batch of all, from a generator of x alone.
  recalibrate(model, iter([x]))
  close(statistics(model, "first"), moments(x))


def test_large_means_do_not_cancel():
  model = keras.Sequential([keras.Input((6, 3)), layers.BatchNormalization()])
  x = data()[0] + np.float32(3e4)
  recalibrate(model, batches(x))
  close(statistics(model, model.layers[0].name), moments(x))


def test_training_and_inference_are_as_before():
  model, (x, y) = make(), data()
  recalibrate(model, batches(x))
  layer = model.get_layer("first")
  assert layer.momentum == 0.99 and layer.trainable
  assert "call" not in vars(layer)
  mean, variance = statistics(model, "first")
  np.testing.assert_allclose(
      layer(x, training=False), (x - mean) / np.sqrt(variance + 1e-3),
      rtol=1e-5, atol=1e-5)
  layer(x + 100, training=True)
  np.testing.assert_allclose(layer.moving_mean, mean + 1, rtol=1e-4, atol=1e-4)


def test_other_layers():
  x = data()[0]
  mask = np.arange(50) % 2 == 0
  model = keras.Sequential([
      keras.Input((6, 3)), layers.Masking(0.0),
      layers.BatchNormalization(name="masked", center=False),
      layers.Permute((2, 1)),
      layers.BatchNormalization(axis=1, name="renorm", **RENORM),
      layers.BatchNormalization(axis=1, name="frozen", trainable=False)])
  recalibrate(model, batches(x * mask[:, None, None]))
  close(statistics(model, "masked"), moments(x[mask]))
  renorm = model.get_layer("renorm")
  if RENORM:
    np.testing.assert_allclose(
        renorm.moving_stddev, np.sqrt(renorm.moving_variance + 1e-3), rtol=1e-6)
    np.testing.assert_array_equal(renorm.renorm_mean, renorm.moving_mean)
  assert (renorm.moving_variance.numpy() != 1).all()
  close(statistics(model, "frozen"), (np.zeros(3), np.ones(3)))
  # A layer that sees nothing, and a model without any.
  recalibrate(model, batches(x * 0))
  assert np.isfinite(statistics(model, "masked")).all()
  recalibrate(keras.Sequential([keras.Input((3,)), layers.Dense(1)]), [])


def test_errors_change_nothing():
  model, (x, _) = make(), data()
  before = values(model.variables)

  def fails():
    yield x
    raise KeyboardInterrupt

  for dataset, error, match in [
      (x, TypeError, "must be an iterable of batches.*got ndarray"),
      (3, TypeError, "must be an iterable of batches.*got int"),
      ([], ValueError, "must have at least one batch"),
      (batches(x).repeat(), ValueError, "must be finite"),
      (fails(), KeyboardInterrupt, None)]:
    with pytest.raises(error, match=match):
      recalibrate(model, dataset)
    assert not any("call" in vars(layer) for layer in model.layers)
    assert_same(model.variables, before)


@pytest.mark.by_day(0)
def test_recalibration_inside_averaged_weights_is_put_back():
  model, (x, y) = make(wk.MovingAverage("sgd", 0.5)), data()
  for _ in range(2):
    model.train_on_batch(x, y)
  before = values(model.variables)
  with model.optimizer.averaged_weights(model):
    recalibrate(model, batches(x))
    close(statistics(model, "first"), moments(x))
  assert_same(model.variables, before)


OPTIMIZERS = {
    "fused": lambda: "adam", "general": lambda: "nadam",
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(), {".*kernel": keras.optimizers.Adam()}))}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inner,jit", [
    ("fused", True), ("fused", False), ("general", True), pytest.param(
        "several", False, marks=keras_versions.needs("MultiOptimizer"))])
def test_averaged_statistics(inner, jit):
  model = make(wk.MovingAverage(
      OPTIMIZERS[inner](), [0.75, 0.5], average_batch_norm=True))
  model.jit_compile = jit
  x, y = data()
  opt, first = model.optimizer, model.get_layer("first")
  opt.set_model(model)
  want = np.zeros(3)  # As before the first step.
  for _ in range(3):
    model.train_on_batch(x, y)
    want = 0.75 * want + 0.25 * first.moving_mean.numpy()
  raw = statistics(model, "first")
  with opt.averaged_weights(model):
    got = statistics(model, "first")
  np.testing.assert_allclose(got[0], want, rtol=1e-5)
  assert np.abs(got[0] - raw[0]).max() > 1e-3
  np.testing.assert_array_equal(statistics(model, "first"), raw)


def test_averaged_statistics_in_fit_and_files(tmp_path):
  make_one = lambda: make(wk.MovingAverage("sgd", 0.5, average_batch_norm=True))
  x, y = data()
  with pytest.raises(RuntimeError, match="must know the model"):
    make_one().fit(x, y, verbose=0)
  model = make_one()
  callback = wk.EvaluateWithAverages()
  seen = []

  def watch(logs):
    with model.optimizer.averaged_weights(model):
      want = evaluate(model)
    seen.append((logs["val_loss"], want, statistics(model, "first")))
    model.save(tmp_path / "model.keras")

  model.fit(x, y, verbose=0, epochs=2, validation_data=(x, y),
            callbacks=[callback, at_epoch_end(watch)])
  for val_loss, want, _ in seen:
    assert val_loss == want
  loaded = keras.models.load_model(tmp_path / "model.keras")
  np.testing.assert_array_equal(statistics(loaded, "first"), seen[-1][2])
  np.testing.assert_allclose(evaluate(loaded, callback), seen[-1][0], rtol=1e-6)
  # fit ended with the averages of all.
  np.testing.assert_allclose(evaluate(model), seen[-1][0], rtol=1e-6)
  assert np.abs(statistics(model, "first")[0] - seen[-1][2][0]).max() > 1e-4


@pytest.mark.by_day(0)
def test_by_default_averages_are_evaluated_with_the_statistics_as_they_are():
  model, (x, y) = make(wk.MovingAverage("sgd", 0.5)), data()
  model.train_on_batch(x, y)
  raw = statistics(model, "first")
  with model.optimizer.averaged_weights(model):
    np.testing.assert_array_equal(statistics(model, "first"), raw)


def test_averaged_statistics_in_a_strategy():
  with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = make(wk.MovingAverage("sgd", 0.5, average_batch_norm=True))
  x, y = data(48)
  seen = []

  watch = at_batch_end(lambda: seen.append(statistics(model, "first")[0]))
  model.fit(x, y, verbose=0, epochs=1, batch_size=16, callbacks=[
      wk.EvaluateWithAverages(), watch])
  want = np.zeros(3)
  for mean in seen:
    want = 0.5 * want + 0.5 * mean
  np.testing.assert_allclose(statistics(model, "first")[0], want, rtol=1e-5)
  assert np.abs(want - seen[-1]).max() > 1e-3
  # What one device computes is what all hold.
  recalibrate(model, batches(x))
  close(statistics(model, "first"), moments(x))
  for value in model.get_layer("first").moving_mean.value.values:
    np.testing.assert_allclose(value, moments(x)[0], rtol=2e-6, atol=2e-6)


class Scaled(layers.BatchNormalization):
  """Scales its inputs, which a training sees."""

  def call(self, inputs, training=None, mask=None):
    return super().call(inputs * 10 if training else inputs, training=training)


class Own(layers.BatchNormalization):

  def call(self, inputs, training=None, mask=None):
    return inputs - self.moving_mean


def test_subclasses():
  x, _ = data()
  model = keras.Sequential([keras.Input((6, 3)), Scaled()])
  recalibrate(model, batches(x))
  close(statistics(model, model.layers[0].name), moments(np.float64(x) * 10))
  assert type(model.layers[0]) is Scaled
  model = keras.Sequential([
      keras.Input((6, 3)), layers.BatchNormalization(name="first"), Own()])
  before = values(model.variables)
  with pytest.raises(ValueError, match=r"`call` of Own must call super\(\)"):
    recalibrate(model, batches(x))
  assert_same(model.variables, before)
  model.layers[-1].trainable = False
  recalibrate(model, batches(x))
  close(statistics(model, "first"), moments(x))


def test_a_model_that_is_not_built():
  x, _ = data()
  for built in (False, True):
    model = keras.Sequential([layers.BatchNormalization(name="first")])
    model.built = built  # As a subclass whose build() makes nothing.
    with pytest.raises(ValueError, match="must be built, got .*'first' has no"):
      recalibrate(model, batches(x))


def test_a_part_of_the_model_is_not_the_model():
  x, y = data()
  model = make(wk.MovingAverage("sgd", 0.5, average_batch_norm=True))
  opt = model.optimizer
  opt.build(model.trainable_variables)
  part = keras.Sequential(model.layers[:1])
  with pytest.raises(RuntimeError, match="must know the model"):
    with opt.averaged_weights(part):
      pass
  opt.set_model(part)
  opt.set_model(model)
  model.train_on_batch(x, y)
  second = model.get_layer("second")
  np.testing.assert_allclose(opt.average(second.moving_mean),
                             second.moving_mean / 2, rtol=1e-5)
  raw = values(second.variables)
  with opt.averaged_weights(part):
    assert_same(second.variables, raw)
  # The whole model, once averages of a part are made.
  model = make(wk.MovingAverage("sgd", 0.5, average_batch_norm=True))
  part = keras.Sequential(model.layers[:1])
  model.optimizer.set_model(part)
  model.train_on_batch(x, y)
  with pytest.raises(ValueError, match="must know the whole model before .*"
                     "second/moving_mean' has no average"):
    model.optimizer.set_model(model)


def make_averaged(average_decay=0.5, **kwargs):
  return make(wk.MovingAverage(
      keras.optimizers.SGD(0.1), average_decay, **kwargs))


class Passes:
  """Batches that can be read several times; counts the times."""

  def __init__(self, x):
    self._x, self.number = x, 0

  def __iter__(self):
    self.number += 1
    return iter(batches(self._x))


@pytest.mark.parametrize("mode", [
    {}, {"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_evaluate_recalibrates(mode):
  model, (x, y) = make_averaged(), data()
  model.compile(model.optimizer, "mse", **mode)
  for _ in range(3):
    model.train_on_batch(x, y)
  raw, passes = values(model.weights), Passes(x)
  callback = wk.EvaluateWithAverages(recalibrate=passes)
  got = model.evaluate(x, y, batch_size=10, verbose=0, callbacks=[callback])
  outputs = model.predict(x, batch_size=10, verbose=0, callbacks=[callback])
  assert passes.number == 2  # Once per evaluation, not once per batch.
  assert_same(values(model.weights), raw)
  without = model.evaluate(x, y, batch_size=10, verbose=0, callbacks=[
      wk.EvaluateWithAverages(recalibrate=False)])
  assert abs(got - without) > 1e-2 * without
  with model.optimizer.averaged_weights(model):
    recalibrate(model, batches(x))
    want = model.evaluate(x, y, batch_size=10, verbose=0)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(
        outputs, model.predict(x, batch_size=10, verbose=0), rtol=1e-5,
        atol=1e-6)


def test_fit_recalibrates(tmp_path):
  """It trains as without; what it evaluates and saves is recalibrated."""
  x, y = data()
  seen, raw = [], []

  class Watch(keras.callbacks.Callback):

    def __init__(self, found):
      super().__init__()
      self._found = found

    def on_epoch_end(self, epoch, logs=None):
      self._found.append((logs["val_loss"], values(self.model.weights)))

  def fit(dataset, *found):
    keras.utils.set_random_seed(0)
    model = make_averaged()
    model.fit(x, y, batch_size=10, epochs=3, verbose=0, shuffle=False,
              validation_data=(x, y), callbacks=[
                  wk.EvaluateWithAverages(
                      found, recalibrate=dataset), Watch(raw)])
    return model

  passes = Passes(x)
  model = fit(passes, Watch(seen), keras.callbacks.ModelCheckpoint(
      str(tmp_path / "{epoch}.keras")))
  assert passes.number == 3
  recalibrated = raw[:]
  raw.clear()
  fit(False)
  assert_same([weights for _, weights in recalibrated],
              [weights for _, weights in raw])
  plain = make()
  for epoch, (val_loss, saved) in enumerate(seen):
    plain.set_weights(saved)
    np.testing.assert_allclose(evaluate(plain), val_loss, rtol=1e-5)
    close(statistics(plain, "first"), moments(x))
    loaded = keras.models.load_model(tmp_path / f"{epoch + 1}.keras")
    assert_same(values(loaded.weights), saved)
  # fit ends with the averages and the statistics that fit them.
  assert_same(values(model.weights), seen[-1][1])
  assert np.abs(statistics(model, "first")[0] - raw[-1][1][2]).max() > 1e-2


def test_the_model_is_traced_once():
  x, y = data(48)
  traces = []

  class Counts(layers.Layer):

    def call(self, x):
      traces.append(x.shape)
      return x

  model = keras.Sequential([keras.Input((6, 3)), Counts(),
                            layers.BatchNormalization(name="first"),
                            layers.Flatten(), layers.Dense(1)])
  model.compile(wk.MovingAverage("sgd", [0.9, 0.5]), loss="mse")

  def fit(callback, epochs):
    model.fit(x, y, epochs=epochs, verbose=0, validation_data=(x, y),
              callbacks=[callback])
    traces.clear()

  callback = wk.EvaluateWithAverages(recalibrate=batches(x), decay="all")
  fit(callback, 1)
  for _ in range(2):
    evaluate(model, callback)
  assert not traces
  # Not if another set of layers is to be recalibrated.
  model.get_layer("first").trainable = False
  before = statistics(model, "first")
  evaluate(model, callback)
  assert_same(statistics(model, "first"), before)


def test_fit_without_validation_recalibrates_at_its_end():
  model, (x, y), passes = make_averaged([0.9, 0.5]), data(), None
  passes = Passes(x)
  model.fit(x, y, epochs=2, verbose=0, callbacks=[
      wk.EvaluateWithAverages(recalibrate=passes, decay=0.5)])
  assert passes.number == 1
  close(statistics(model, "first"), moments(x))
  for v in model.trainable_variables:
    np.testing.assert_array_equal(v, model.optimizer.average(v, 0.5))


def test_early_stopping_restores_recalibrated_statistics():
  model, (x, y) = make_averaged(), data()
  losses = model.fit(
      x, y, epochs=6, verbose=0, validation_data=(x, y), callbacks=[
          wk.EvaluateWithAverages(
              keras.callbacks.EarlyStopping(patience=2, mode="max",
                                            monitor="val_loss",
                                            restore_best_weights=True),
              recalibrate=batches(x))]).history["val_loss"]
  assert 2 < len(losses) and losses[0] == max(losses)
  np.testing.assert_allclose(evaluate(model), losses[0], rtol=1e-5)


@pytest.mark.by_day(0)
def test_a_failed_recalibration_changes_nothing():
  model, (x, y) = make_averaged(), data()
  model.train_on_batch(x, y)
  before = values(model.weights)

  class Fails(Passes):

    def __iter__(self):
      yield x
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    evaluate(model, wk.EvaluateWithAverages(recalibrate=Fails(x)))
  assert_same(values(model.weights), before)


def test_recalibrating_in_a_strategy():
  with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = make_averaged()
  x, y = data(48)
  model.fit(x, y, verbose=0, batch_size=16, callbacks=[
      wk.EvaluateWithAverages(recalibrate=False)])
  model.train_on_batch(x, y)
  before = values(model.weights)
  callback = wk.EvaluateWithAverages(recalibrate=batches(x))
  got = model.evaluate(x, y, verbose=0, callbacks=[callback])
  assert_same(values(model.weights), before)
  copied = model.optimizer.averaged_model(model, recalibrate=batches(x))
  copied.compile(loss="mse")
  np.testing.assert_allclose(got, copied.evaluate(x, y, verbose=0), rtol=1e-5)


def test_a_warning_if_nothing_is_chosen():
  x, y = data()
  match = ("EvaluateWithAverages evaluates averages of the weights with moving "
           "statistics of the raw weights.*Pass recalibrate=dataset.*"
           "average_batch_norm=True.*recalibrate=False")
  model, callback = make_averaged(), wk.EvaluateWithAverages()
  with pytest.warns(UserWarning, match=match) as found:
    model.fit(x, y, verbose=0, validation_data=(x, y), callbacks=[callback])
    evaluate(model, callback)
  assert len([w for w in found if "statistics" in str(w.message)]) == 1
  with pytest.warns(UserWarning, match="averaged_model.. copies averages of"):
    model.optimizer.averaged_model(model)


@pytest.mark.filterwarnings("error:.*moving statistics.*")
def test_no_warning_if_something_is_chosen():
  x = data()[0]
  model = make_averaged()
  for dataset in batches(x), False:
    evaluate(model, wk.EvaluateWithAverages(recalibrate=dataset))
  model.optimizer.averaged_model(model, recalibrate=False)
  # Those of frozen layers do not depend on the weights that are trained.
  for name in "first", "second":
    model.get_layer(name).trainable = False
  evaluate(model, wk.EvaluateWithAverages())
  evaluate(make_averaged(average_batch_norm=True), wk.EvaluateWithAverages())


@pytest.mark.parametrize("dataset, error, match", [
    (iter([1]), TypeError, "several times, got the iterator list_iterator"),
    (True, TypeError, "`recalibrate` must be an iterable of batches.*got bool"),
    (np.zeros(3), TypeError, "must be an iterable of batches.*got ndarray"),
    (batches(np.zeros(3)).repeat(), ValueError, "`recalibrate` must be finite"),
], ids=["iterator", "bool", "array", "infinite"])
def test_what_recalibrates_is_checked(dataset, error, match):
  with pytest.raises(error, match=match):
    wk.EvaluateWithAverages(recalibrate=dataset)
  model = make_averaged()
  model.optimizer.build(model.trainable_variables)
  with pytest.raises(error, match=match):
    model.optimizer.averaged_model(model, recalibrate=dataset)


def test_what_does_not_go_with_recalibrating():
  x = data()[0]
  with pytest.raises(ValueError, match="runs after each batch.*"
                     "got ModelCheckpoint. Use save_freq"):
    wk.EvaluateWithAverages(keras.callbacks.ModelCheckpoint(
        "a.keras", save_freq=2), recalibrate=batches(x))
  with pytest.raises(ValueError, match="must not be given if the optimizer "
                     "averages the statistics.*Remove average_batch_norm"):
    evaluate(make_averaged(average_batch_norm=True),
             wk.EvaluateWithAverages(recalibrate=batches(x)))


def test_swa_of_epochs_with_recalibrated_statistics():
  """Epochs 2 and 4 of 0 to 4 count."""
  x, y = data(48)
  dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
  opt = wk.SWA(keras.optimizers.SGD(0.1), 2, 2, steps_per_epoch=len(dataset))
  model = make(opt)
  seen = []

  watch = at_epoch_end(
      lambda logs: seen.append(values(model.trainable_variables)))
  model.fit(dataset, epochs=5, verbose=0, callbacks=[
      watch, wk.EvaluateWithAverages(recalibrate=dataset)])
  for v, *two in zip(model.trainable_variables, seen[2], seen[4], strict=True):
    np.testing.assert_allclose(v, sum(map(np.float64, two)) / 2, rtol=1e-6,
                               atol=1e-7)
  close(statistics(model, "first"), moments(x))


# Which statistics are averaged.

class Networks(keras.Model):
  """A network that is trained, and another one that follows it by hand."""

  def __init__(self, teacher_is_frozen=False, **kwargs):
    super().__init__()
    self.student, self.teacher = (keras.Sequential([
        keras.Input((6, 3)), layers.Dense(4),
        keras.Sequential([layers.BatchNormalization(**kwargs)]),
        layers.Flatten(), layers.Dense(1)]) for _ in range(2))
    self.teacher.trainable = not teacher_is_frozen

  def call(self, x, training=None):
    return self.student(x, training=training)

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
    weights = self.student.trainable_weights
    self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    for v, w in zip(self.teacher.weights, self.student.weights):
      v.assign(w + 1)
    return {"loss": loss}


network_statistics = wk.batch_norm.statistics


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"center": False, "scale": False}],
                         ids=["", "without_weights"])
def test_another_network_keeps_its_statistics(frozen, kwargs):
  model, (x, y) = Networks(frozen, **kwargs), data()
  model.compile(wk.MovingAverage(
      "sgd", 0.5, average_batch_norm=True), loss="mse")
  opt, raw = model.optimizer, []

  watch = at_batch_end(lambda: raw.append([
      values(network_statistics(network))
      for network in (model.student, model.teacher)]))
  model.fit(x, y, verbose=0, batch_size=16, callbacks=[
      wk.EvaluateWithAverages(), watch])
  student, teacher = map(network_statistics, (model.student, model.teacher))
  assert_same(teacher, raw[-1][1])
  assert_same(student, [opt.average(v).numpy() for v in student])
  assert all((v.numpy() != w).any() for v, w in zip(student, raw[-1][0]))
  with opt.averaged_weights(model):
    assert_same(teacher, raw[-1][1])
  with pytest.raises(KeyError, match="moving_mean"):
    opt.average(teacher[0])


def test_layers_that_belong_to_what_is_trained():
  model, (x, y) = make(), data()
  first, second = model.get_layer("first"), model.get_layer("second")
  for v in (first.gamma, first.beta):
    v.trainable = False  # The layer still follows its inputs.
  second.trainable = False
  opt = wk.MovingAverage("sgd", 0.5, average_batch_norm=True)
  opt.set_model(model)
  model.compile(opt, loss="mse")
  model.train_on_batch(x, y)
  np.testing.assert_allclose(opt.average(first.moving_mean),
                             first.moving_mean / 2, rtol=1e-5)
  with pytest.raises(KeyError, match="moving_mean"):
    opt.average(second.moving_mean)


@keras.saving.register_keras_serializable("wrapopt_test")
def is_second(layer):
  return layer.name == "second"


def test_chosen_statistics_and_files(tmp_path):
  def run(chosen):
    keras.utils.set_random_seed(0)
    opt = wk.MovingAverage("sgd", 0.5, average_batch_norm=chosen)
    model, (x, y) = make(opt), data()
    opt.set_model(model)
    for _ in range(2):
      model.train_on_batch(x, y)
    return model, opt, [model.get_layer(name).moving_mean
                        for name in ("first", "second")]

  model, opt, (_, second) = run(True)
  want = opt.average(second).numpy()
  model.save_weights(tmp_path / "all.weights.h5")
  model, opt, (first, second) = run(is_second)
  assert opt._store.statistics
  assert_same([opt.average(second).numpy()], [want])
  with pytest.raises(KeyError, match="moving_mean"):
    opt.average(first)
  model.save(tmp_path / "model.keras")
  loaded = keras.models.load_model(tmp_path / "model.keras")
  loaded.optimizer.set_model(loaded)
  assert loaded.optimizer.get_config() == opt.get_config()
  [(_, average)] = [
      pair for pair in loaded.optimizer._store.statistics.pairs(0)
      if pair[0] is loaded.get_layer("second").moving_mean]
  assert_same([average.numpy()], [want])
  # A file of more statistics.
  opt.average(second).assign(want * 0)
  model.load_weights(tmp_path / "all.weights.h5")
  assert_same([opt.average(second).numpy()], [want])


# Two programs: the names of layers, and those of them that are frozen.
FILES = {
    "same": ("ab", "", "ab", ""),
    "order": ("ab", "", "ba", ""),
    "names": ("ab", "", "cd", ""),
    "towers": ("ab", "b", "ab", "a"),
    "towers without names": ([None] * 2, "1", [None] * 2, "0"),
    "another layer": ("ab", "", "abc", ""),
}


class Parts(keras.Model):
  """Keras loads its optimizer before one of its layers, and after others."""

  def __init__(self, parts):
    super().__init__(name="m")
    self.a, self.z, *self.more = parts
    self(np.zeros((1, 3), np.float32))

  def call(self, x, training=None):
    return sum(layer(x, training=training) for layer in self.layers)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("way", ["weights", "weights made", "checkpoint",
                                 "checkpoint made", "tree"])
@pytest.mark.parametrize("case", FILES)
def test_averages_of_statistics_go_where_their_statistics_go(case, way, eager,
                                                             tmp_path):
  """An average begins anew if the file has none of its variable's value."""
  x = data()[0][:, 0]

  def program(names, frozen):
    keras.utils.clear_session(free_memory=False)
    model = Parts([layers.BatchNormalization(name=name) for name in names])
    rng = np.random.default_rng(len(names))
    for i, layer in enumerate(model.layers):
      layer.trainable = str(i) not in frozen and layer.name not in list(frozen)
      for v in layer.variables:
        v.assign(rng.uniform(1, 2, v.shape))
    opt = wk.MovingAverage("sgd", 0.5, average_batch_norm=True)
    model.compile(opt, "mse", jit_compile=False, run_eagerly=eager)
    opt.set_model(model)
    return model

  def pairs(model):
    return [(s, v) for v, s in model.optimizer._store.statistics.pairs(0)]

  of, to = program(*FILES[case][:2]), program(*FILES[case][2:])
  for _ in range(2):
    of.train_on_batch(x, x)
  wants = {v.numpy().tobytes(): s.numpy() for s, v in pairs(of)}
  if way.endswith("made") or way == "tree":
    to.optimizer.build(to.trainable_variables)
  if way.endswith("made"):
    pairs(to)
  path = str(tmp_path / "of.weights.h5")
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always", UserWarning)
    if way.startswith("weights"):
      of.save_weights(path)
      to.load_weights(path, skip_mismatch=True)
    elif way == "tree":
      to.set_state_tree(of.get_state_tree(value_format="numpy_array"))
    else:
      tf.train.Checkpoint(model=to).read(
          tf.train.Checkpoint(model=of).write(path))
    loaded = {v.path: v.numpy() for v in to.variables}
    to.train_on_batch(x, x)
  is_told = any("has no average named 'average_0.5_of_batch_norm'" in
                str(w.message) for w in found)
  begins = []
  for s, v in pairs(to):
    value = loaded[v.path]
    want = wants.get(value.tobytes(), value)
    begins.append(value.tobytes() not in wants)
    if not np.allclose(s, (want + v) / 2, rtol=1e-6):
      # An eager step runs the model before averages begin: the values do not
      # tell any more whose they are.
      assert eager and is_told and case != "same"
      np.testing.assert_allclose(s, v, rtol=1e-6)
      begins[-1] = True
  assert any(begins) == is_told or way == "tree"
  if case == "same":
    assert not any(begins)


@pytest.mark.parametrize("chosen,error,match", [
    ("second", TypeError, "`average_batch_norm` must be"),
    (lambda layer: 1, TypeError, "A function `average_batch_norm` must return "
     "True or False, got 1 for 'first'"),
    (lambda layer: False, ValueError, "must select at least one")])
def test_what_chooses_statistics_is_checked(chosen, error, match):
  with pytest.raises(error, match=match):
    opt = wk.MovingAverage("sgd", average_batch_norm=chosen)
    model, (x, y) = make(opt), data()
    opt.set_model(model)
    model.train_on_batch(x, y)


def test_a_function_that_is_not_registered():
  opt = wk.MovingAverage("sgd", average_batch_norm=lambda x: True)
  with pytest.raises(ValueError, match="`average_batch_norm` of a MovingAverage"
                     " that is saved must be True or False, or a function"):
    opt.get_config()
