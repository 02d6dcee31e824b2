"""Averages of an optimizer that `compile` does not hold: a GAN in fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import arrays
from arrays import assert_close, assert_same
from fit_callbacks import at_epoch_end
import wrapopt.keras
from wrapopt.keras import EvaluateWithAverages
from wrapopt.keras import MovingAverage

DECAY = 0.5


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.set_random_seed(0)


class Gan(keras.Model):
  """As in Keras's guide, without `call`."""

  def __init__(self, normalizes=False):
    super().__init__()
    self.generator, self.discriminator = (keras.Sequential([
        keras.Input((2,)), keras.layers.Dense(3, activation),
        *[keras.layers.BatchNormalization() for _ in range(normalizes)],
        keras.layers.Dense(size)]) for activation, size in (
            (None, 2), ("relu", 1)))

  def compile(self, d_optimizer, g_optimizer, **kwargs):
    super().compile(**kwargs)
    self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

  def train_step(self, real):
    losses = []
    for part, optimizer in [(self.discriminator, self.d_optimizer),
                            (self.generator, self.g_optimizer)]:
      with tf.GradientTape() as tape:
        fake = self.generator(real, training=True)
        score = self.discriminator(fake, training=True)
        loss = tf.reduce_mean(score)
        if part is self.discriminator:
          loss = tf.reduce_mean(self.discriminator(real, training=True)) - loss
      losses.append(loss)
      grads = tape.gradient(loss, part.trainable_variables)
      optimizer.apply_gradients(zip(grads, part.trainable_variables))
    return {"d_loss": losses[0], "g_loss": losses[1]}

  def test_step(self, real):
    return {"score": tf.reduce_mean(self.discriminator(self.generator(real)))}


def data(n=24):
  return np.random.default_rng(0).standard_normal((n, 2)).astype(np.float32)


def sgd():
  return keras.optimizers.SGD(0.05)


def values(part):
  return arrays.values(part.weights)


class Watch(keras.callbacks.Callback):
  """Computes the averages of a part of the model, of its trainable weights."""

  def __init__(self, part):
    super().__init__()
    self.part, self.averages, self.raw = part, None, None

  def _weights(self):
    part = getattr(self.model, self.part)
    return [v.numpy().astype(np.float64) for v in part.trainable_variables]

  def on_train_batch_begin(self, batch, logs=None):
    if self.averages is None:
      self.averages = self._weights()

  def on_train_batch_end(self, batch, logs=None):
    self.raw = self._weights()
    self.averages = [s + (1 - DECAY) * (v - s)
                     for s, v in zip(self.averages, self.raw)]


def score(generator, discriminator):
  gan = Gan()
  gan.generator.set_weights(generator)
  gan.discriminator.set_weights(discriminator)
  return float(tf.reduce_mean(gan.discriminator(gan.generator(data()))))


@pytest.mark.parametrize("mode", [
    {}, {"run_eagerly": True}, {"steps_per_execution": 2}],
                         ids=["function", "eager", "steps"])
def test_fit_ends_with_the_averages_of_the_generator(mode):
  gan = Gan()
  gan.compile(sgd(), MovingAverage(sgd(), DECAY), **mode)
  watch = Watch("generator"), Watch("discriminator")
  losses = []
  keep = at_epoch_end(lambda logs: losses.append((
      logs["val_score"], watch[0].raw, watch[0].averages, watch[1].raw)))
  callback = EvaluateWithAverages(optimizer="g_optimizer")
  x = data()
  gan.fit(x, batch_size=12, epochs=2, verbose=0, validation_data=(x,),
          validation_batch_size=24, callbacks=[callback, *watch, keep])
  if "steps_per_execution" not in mode:  # Watch sees each step.
    for got, raw, averages, discriminator in losses:
      np.testing.assert_allclose(got, score(averages, discriminator), rtol=1e-4)
      assert abs(got - score(raw, discriminator)) > 1e-3
    assert_close(values(gan.generator), watch[0].averages, 1e-5, 1e-6)
  average = [gan.g_optimizer.average(v).numpy() for v in gan.generator.weights]
  assert_same(values(gan.generator), average)
  assert_same(values(gan.discriminator), watch[1].raw)
  # A later one goes on.
  gan.fit(x, verbose=0, callbacks=[callback])


def test_each_of_two_optimizers_with_averages():
  gan = Gan()
  gan.compile(MovingAverage(sgd(), DECAY, keep_raw_weights=True),
              keras.optimizers.LossScaleOptimizer(MovingAverage(sgd(), DECAY),
                                                  initial_scale=1.))
  watch = Watch("generator"), Watch("discriminator")
  seen = []
  keep = at_epoch_end(lambda logs: seen.append((
      logs["val_score"], [watch[0].averages, watch[1].averages],
      [values(gan.generator), values(gan.discriminator)])))
  pair = [EvaluateWithAverages(optimizer=name, swap_on_epoch=True)
          for name in ("g_optimizer", "d_optimizer")]
  x = data()
  gan.fit(x, batch_size=12, epochs=2, verbose=0, validation_data=(x,),
          validation_batch_size=24, callbacks=[*pair, *watch, keep])
  for got, averages, weights in seen:
    np.testing.assert_allclose(got, score(*averages), rtol=1e-4)
    assert_close(weights, averages, 1e-5, 1e-6)
  assert_close(values(gan.generator), watch[0].averages, 1e-5, 1e-6)
  assert_same(values(gan.discriminator), watch[1].raw)
  # Nothing is left in the model.
  plain = gan.evaluate(x, verbose=0)
  np.testing.assert_allclose(
      plain, score(values(gan.generator), values(gan.discriminator)), rtol=1e-4)
  gan.d_optimizer.averaged_weights
  assert abs(gan.evaluate(x, verbose=0, callbacks=pair[1:]) - plain) > 1e-4
  assert gan.evaluate(x, verbose=0, callbacks=pair[1:]) == (
      gan.evaluate(x, verbose=0, callbacks=pair))
  assert gan.evaluate(x, verbose=0) == plain


def test_batch_normalizations_of_the_part():
  gan = Gan(normalizes=True)
  gan.compile(sgd(), MovingAverage(sgd(), DECAY))
  x = data()
  with pytest.warns(UserWarning, match="batch normalizations of 'seq"):
    gan.fit(x, verbose=0, callbacks=[EvaluateWithAverages(
        optimizer="g_optimizer", part="generator")])
  raw = []
  keep = at_epoch_end(lambda logs: raw.append(values(gan.discriminator)))
  gan.fit(x, batch_size=12, verbose=0, validation_data=(x,), callbacks=[
      EvaluateWithAverages(optimizer="g_optimizer", part="generator",
                           recalibrate=[x]), keep])
  assert_same(values(gan.discriminator), raw[-1])
  first, norm, _ = gan.generator.layers
  seen = np.array(first(x), np.float64)
  np.testing.assert_allclose(norm.moving_mean, seen.mean(0), rtol=0, atol=1e-6)
  np.testing.assert_allclose(norm.moving_variance, seen.var(0), rtol=1e-5)
  gan = Gan(normalizes=True)
  gan.compile(sgd(), MovingAverage(sgd(), DECAY, average_batch_norm=True))
  gan.fit(x, batch_size=12, verbose=0, callbacks=[
      EvaluateWithAverages(optimizer=gan.g_optimizer, part=gan.generator),
      keep])
  assert_same(values(gan.discriminator), raw[-1])
  norm = gan.generator.layers[1]
  np.testing.assert_array_equal(
      norm.moving_mean, gan.g_optimizer.average(norm.moving_mean))


def test_a_file_before_the_first_step(tmp_path):
  path = tmp_path / "gan.weights.h5"
  x = data()

  def make():
    gan = Gan()
    gan.compile(sgd(), MovingAverage(sgd(), DECAY, keep_raw_weights=True))
    return gan

  gan = make()
  gan.fit(x, batch_size=12, verbose=0)
  gan.built = True
  gan.save_weights(path)
  found = dict(optimizer="g_optimizer", part="generator")
  want = gan.evaluate(x, verbose=0, callbacks=[EvaluateWithAverages(**found)])
  assert want != gan.evaluate(x, verbose=0)
  other = make()
  other.built = True
  other.load_weights(path)
  with pytest.raises(RuntimeError, match="must be built before it is evaluated "
                     ".*Call its build.variables., or pass `part`"):
    other.evaluate(x, verbose=0, callbacks=[
        EvaluateWithAverages(optimizer="g_optimizer")])
  assert other.evaluate(x, verbose=0, callbacks=[
      EvaluateWithAverages(**found)]) == want


@pytest.mark.by_day(0)
def test_snapshots_of_an_optimizer(tmp_path):
  gan = Gan()
  gan.compile(sgd(), MovingAverage(sgd(), DECAY, keep_raw_weights=True))
  gan.fit(data(), batch_size=12, verbose=0, callbacks=[
      wrapopt.keras.Snapshots(str(tmp_path), 2, optimizer="g_optimizer")])
  [path] = tmp_path.glob("*.h5")
  average = [gan.g_optimizer.average(v).numpy() for v in gan.generator.weights]
  raw = values(gan.discriminator)
  other = Gan()
  other.built = True
  other.load_weights(path)
  assert_same(values(other.generator), average)
  assert_same(values(other.discriminator), raw)


def test_errors_name_both():
  gan = Gan()
  gan.compile(sgd(), MovingAverage(sgd(), DECAY))
  x = data()
  for callback in EvaluateWithAverages(), wrapopt.keras.Snapshots("x", 1):
    with pytest.raises(ValueError, match=(
        "needs an optimizer that keeps averages, such as .*, got RMSprop, "
        "which model.compile.. holds by default. Pass "
        "optimizer='g_optimizer', the attribute of the model")):
      gan.fit(x, verbose=0, callbacks=[callback])
  for name, got in [("d_optimizer", "SGD, which is model.d_optimizer"),
                    ("generator", "Sequential, which is model.generator"),
                    ("no", "None, which is model.no"),
                    (sgd(), "SGD, which was passed as `optimizer`")]:
    with pytest.raises(ValueError, match=f"got {got}. Pass optimizer='g_opt"):
      gan.fit(x, verbose=0, callbacks=[EvaluateWithAverages(optimizer=name)])
  with pytest.raises(ValueError, match="`part` must be the name of .* got 'n"):
    gan.fit(x, verbose=0, callbacks=[
        EvaluateWithAverages(optimizer="g_optimizer", part="no")])
  for name in "optimizer", "part":
    with pytest.raises(TypeError, match=f"`{name}` must be a Keras .* got 7"):
      EvaluateWithAverages(**{name: 7})
  with pytest.raises(TypeError, match="`optimizer` must be a Keras .* got 7"):
    wrapopt.keras.Snapshots("x", 1, optimizer=7)
