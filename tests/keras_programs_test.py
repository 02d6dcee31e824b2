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

import auditor
from auditor import WRAPPERS

# Others' layers are many; a graph that Grappler rewrites differs in more bits.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

K = keras.optimizers
MODELS = keras_hub.models
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 20, size=[10, 6])
CLASSES = RNG.integers(0, 2, size=[10])
IMAGES = RNG.normal(size=[10, 16, 16, 3]).astype(np.float32)
WRAPPER = pytest.mark.parametrize("wrapper", [
    "MovingAverage", "SWA", "MovingAverage of Lookahead"])


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
      [4], [3], [4, 8], [1, 1], [1, 2], "basic_block", image_shape=(16, 16, 3))
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
