"""Programs of KerasHub, KerasRS, KerasTuner and scikeras, audited."""

import foreign  # Finds the packages. pylint: disable=unused-import

import keras
import keras_hub
import keras_rs
import keras_tuner
import numpy as np
import pytest
from scikeras import wrappers as scikeras
import tensorflow as tf
import tf_keras

import auditor
from auditor import WRAPPERS
import wrapopt
import wrapopt.keras

# Others' layers are many; a graph that Grappler rewrites differs in more bits.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

K = keras.optimizers
MODELS = keras_hub.models
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 20, size=[10, 6])
CLASSES = RNG.integers(0, 2, size=[10])
IMAGES = RNG.normal(size=[10, 16, 16, 3]).astype(np.float32)

WRAPPER = pytest.mark.parametrize("wrapper", [
    "BEMA", "MovingAverage", "SWA", "MovingAverage of Lookahead"])


@pytest.fixture(autouse=True)
def _policy():
  yield
  keras.config.set_dtype_policy("float32")


def bert():
  backbone = MODELS.BertBackbone(20, 2, 2, 8, 16, max_sequence_length=6)
  return MODELS.BertTextClassifier(backbone, num_classes=2), (
      {"token_ids": TOKENS, "segment_ids": np.zeros_like(TOKENS),
       "padding_mask": np.ones_like(TOKENS)}, CLASSES)


def gpt2():
  backbone = MODELS.GPT2Backbone(20, 2, 2, 8, 16, max_sequence_length=6)
  return MODELS.GPT2CausalLM(backbone), (
      {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)},
      np.roll(TOKENS, -1, axis=1))


def vit():
  backbone = MODELS.ViTBackbone((16, 16, 3), (8, 8), 2, 2, 8, 16,
                                dropout_rate=0.1)
  return MODELS.ViTImageClassifier(backbone, num_classes=2), (IMAGES, CLASSES)


def resnet():
  backbone = MODELS.ResNetBackbone(
      [64], [3], [64, 8], [1, 1], [1, 2], "basic_block",
      image_shape=(16, 16, 3))
  return MODELS.ResNetImageClassifier(backbone, num_classes=2), (
      IMAGES, CLASSES)


def trained(make, opt, change=lambda model: None, **options):
  """A program that trains a KerasHub model."""
  def program(watch):
    model, (x, y) = make()
    change(model)
    model.compile(
        watch.wrap(opt()),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options)
    # KerasHub's models would preprocess texts.
    keras.Model.fit(model, x, y, batch_size=2, epochs=1, shuffle=False,
                    verbose=0, callbacks=[watch])

  return program


@WRAPPER
@pytest.mark.parametrize("make", [bert, gpt2, vit, resnet])
@pytest.mark.parametrize("opt", [
    lambda: K.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0),
    lambda: K.Adamax(0.01)], ids=["fused", "unfused"])
def test_keras_hub(make, opt, wrapper):
  auditor.audit(trained(make, opt), WRAPPERS[wrapper])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
  keras.config.set_dtype_policy(policy)
  auditor.audit(trained(bert, lambda: K.SGD(0.01, momentum=0.5)),
                WRAPPERS["MovingAverage"])


@pytest.mark.parametrize("make", [bert, gpt2])
def test_lora(make):
  def change(model):
    model.backbone.enable_lora(2)

  auditor.audit(trained(make, lambda: K.AdamW(0.01), change),
                WRAPPERS["MovingAverage"])


@pytest.mark.parametrize("make", [bert, gpt2, vit, resnet])
@pytest.mark.parametrize("has_lora", [False, True])
def test_copies(make, has_lora):
  """A copy is of the model's class, and has the averages' outputs."""
  if has_lora and make is resnet:
    return  # KerasHub has none for convolutions.
  model, (x, y) = make()
  if has_lora:
    model.backbone.enable_lora(2)
  opt = wrapopt.keras.MovingAverage(K.AdamW(0.01), 0.5)
  model.compile(
      opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  keras.Model.fit(model, x, y, batch_size=2, verbose=0)
  opt.learning_rate = 0.1
  model.train_on_batch(x, y)  # The raw weights are other ones.
  copied = opt.averaged_model(model, recalibrate=False)
  assert type(copied) is type(model)
  raw = keras.Model.predict(model, x, verbose=0)
  with opt.averaged_weights(model):
    weights, want = model.get_weights(), keras.Model.predict(
        model, x, verbose=0)
  for got, w in zip(copied.get_weights(), weights, strict=True):
    np.testing.assert_array_equal(got, w)
  got = keras.Model.predict(copied, x, verbose=0)
  np.testing.assert_array_equal(got, want)
  assert np.abs(got - raw).max() > 1e-4


@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_copy_that_is_quantized(make, mode):
  """As a model whose weights are set to the averages by hand."""
  model, (x, y) = make()
  opt = wrapopt.keras.MovingAverage(K.AdamW(0.01), 0.5)
  model.compile(
      opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  keras.Model.fit(model, x, y, batch_size=2, verbose=0)
  opt.learning_rate = 0.1
  model.train_on_batch(x, y)
  by_hand, _ = make()
  with opt.averaged_weights(model):
    by_hand.set_weights(model.get_weights())
  before = model.get_weights()
  copied = opt.averaged_model(model)
  for m in copied, by_hand:
    m.quantize(mode)
    assert any(v.dtype == "int8" for v in m.weights)  # Also in int4.
  for v, w in zip(model.get_weights(), before, strict=True):
    np.testing.assert_array_equal(v, w)
  np.testing.assert_array_equal(keras.Model.predict(copied, x, verbose=0),
                                keras.Model.predict(by_hand, x, verbose=0))
  with pytest.raises(RuntimeError, match="must stay in its model, got '"):
    with opt.averaged_weights(model):
      model.quantize(mode)


@pytest.mark.parametrize("make", [
    tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.SGD])
def test_optimizers_of_tf_keras(make):
  for wrap in wrapopt.keras.MovingAverage, wrapopt.MovingAverageOptimizer:
    with pytest.raises(TypeError, match=(
        r"an optimizer of tf_keras \(Keras 2\)\. wrapopt has no wrappers")):
      wrap(make())


class Ranking(keras.Model):
  """A deep and cross network on embeddings of users and items."""

  def __init__(self):
    super().__init__()
    self.users = keras.layers.Embedding(20, 4)
    self.items = keras.layers.Embedding(20, 4)
    self.cross = keras_rs.layers.FeatureCross()
    self.top = keras.layers.Dense(1)

  def call(self, inputs):
    found = keras.ops.concatenate(
        [self.users(inputs["user"]), self.items(inputs["item"])], axis=-1)
    return self.top(self.cross(found, found))


class Retrieval(keras.Model):
  """Two towers, whose candidates are the batch's items."""

  def __init__(self):
    super().__init__()
    self.users = keras.layers.Embedding(20, 4)
    self.items = keras.layers.Embedding(20, 4)
    self.without = keras_rs.layers.RemoveAccidentalHits()
    self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

  def call(self, inputs):
    return self.users(inputs["user"]), self.items(inputs["item"])

  def compute_loss(self, x, y, y_pred, sample_weight, training=True):
    users, items = y_pred
    logits = keras.ops.matmul(users, keras.ops.transpose(items))
    labels = keras.ops.eye(keras.ops.shape(logits)[0])
    return self.loss_fn(labels, self.without(logits, labels, x["item"]))


@WRAPPER
@pytest.mark.parametrize("make", [Ranking, Retrieval])
@pytest.mark.parametrize("opt", [K.Adagrad, K.Adam, K.SGD])
def test_keras_rs(make, opt, wrapper):
  def program(watch):
    model = make()
    model.compile(watch.wrap(opt(0.1)), "mse" if make is Ranking else None)
    x = {"user": TOKENS[:, 0], "item": TOKENS[:, 1]}
    model.fit(x, CLASSES.astype(np.float32), batch_size=2, epochs=2,
              shuffle=False, verbose=0, callbacks=[watch])

  auditor.audit(program, WRAPPERS[wrapper])


@WRAPPER
def test_keras_tuner(wrapper, tmp_path):
  def program(watch):
    def build(choices):
      model = keras.Sequential([
          keras.Input([3]),
          keras.layers.Dense(choices.Choice("units", [2, 3]), "relu"),
          keras.layers.Dense(1)])
      model.compile(watch.wrap(K.Adam(0.01)), "mse")
      return model

    tuner = keras_tuner.GridSearch(
        build, "val_loss", max_trials=2, directory=tmp_path,
        project_name="tuned", overwrite=True)
    x = IMAGES[:, 0, 0]
    tuner.search(x, CLASSES, validation_data=(x, CLASSES), batch_size=2,
                 epochs=2, shuffle=False, verbose=0, callbacks=[watch])

  watch = auditor.audit(program, WRAPPERS[wrapper])
  # The tuner builds one more model, to look at its size.
  assert len([run for run in watch.runs if run.records]) == 2


@WRAPPER
def test_scikeras(wrapper):
  def program(watch):
    def build():
      model = keras.Sequential([
          keras.Input([3]), keras.layers.Dense(2, "relu"),
          keras.layers.Dense(1, "sigmoid")])
      model.compile(watch.wrap(K.Adam(0.01)), "binary_crossentropy")
      return model

    regressor = scikeras.KerasRegressor(
        build, batch_size=2, epochs=2, verbose=0, callbacks=[watch],
        fit__shuffle=False, random_state=0)
    regressor.fit(IMAGES[:, 0, 0], CLASSES)

  auditor.audit(program, WRAPPERS[wrapper])
