"""Trains a Keras model of handwritten digits, and averages its weights.

A small convolutional net learns scikit-learn's 1,797 scans of digits with
momentum, in small batches and with a learning rate that is too high to
converge: the accuracy of the weights fluctuates, and that of their averages is
nearly stable. Validation uses the averages, with the callback
`EvaluateWithAverages`. At the end the model holds the averages, and a plain
Keras model loads their file.
"""

import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt.examples import _command
from wrapopt.examples import _results
from wrapopt.examples import digits
import wrapopt.keras

_BATCH = 8
_LEARNING_RATE = 0.02
_MOMENTUM = 0.9
_DECAY = 0.99
_STEPS_PER_EPOCH = 50


def make_model():
  layers = keras.layers
  return keras.Sequential([
      keras.Input((8, 8, 1)),
      layers.Conv2D(16, 3, padding="same", activation="relu"),
      layers.MaxPooling2D(),
      layers.Conv2D(32, 3, padding="same", activation="relu"),
      layers.MaxPooling2D(),
      layers.Flatten(),
      layers.Dense(64, activation="relu"),
      layers.Dense(10),
  ])


class Curve(keras.callbacks.Callback):
  """Shows progress, and also evaluates the raw weights.

  Attributes:
    rows: A list of (step, raw accuracy, averaged accuracy).
  """

  def __init__(self, held_out, progress):
    super().__init__()
    self.rows = []
    self._held_out, self._progress = held_out, progress

  def on_train_batch_end(self, batch, logs=None):
    self._progress.update()

  def on_epoch_end(self, epoch, logs=None):
    # `val_` is for the averages; this call has no callback, so it is for the
    # raw weights.
    raw = self.model.evaluate(*self._held_out, verbose=0, return_dict=True)
    self.rows.append(((epoch + 1) * _STEPS_PER_EPOCH, raw["accuracy"],
                      logs["val_accuracy"]))
    self._progress.set_postfix(raw=f"{self.rows[-1][1]:.2%}",
                               averaged=f"{self.rows[-1][2]:.2%}")


def train(data, held_out, epochs, seed):
  """Trains a model.

  Args:
    data: (images, labels) to train on.
    held_out: (images, labels) to evaluate on.
    epochs: The number of epochs, of 50 steps each.
    seed: The seed of the initial weights and the batches.

  Returns:
    The model, and the rows of its `Curve`.
  """
  keras.utils.set_random_seed(seed)
  batches = tf.data.Dataset.from_tensor_slices(data).shuffle(
      len(data[0]), seed=seed).repeat().batch(_BATCH)
  model = make_model()
  model.compile(
      wrapopt.keras.MovingAverage(
          keras.optimizers.SGD(_LEARNING_RATE, momentum=_MOMENTUM), _DECAY,
          dynamic_decay=True),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"])
  with _extras.load("tqdm").tqdm(
      total=epochs * _STEPS_PER_EPOCH, unit="step",
      file=sys.stderr) as progress:
    curve = Curve(held_out, progress)
    model.fit(batches, epochs=epochs, steps_per_epoch=_STEPS_PER_EPOCH,
              validation_data=held_out, shuffle=False, verbose=0,
              callbacks=[wrapopt.keras.EvaluateWithAverages(), curve])
  return model, curve.rows


def main(argv=None):
  start = time.perf_counter()
  parser = _command.parser("keras_digits", __doc__)
  parser.add_argument(
      "--epochs", type=_command.count, default=40,
      help=f"epochs of {_STEPS_PER_EPOCH} steps; default %(default)s")
  _command.add_out(parser, "keras_digits")
  _command.add_seed(parser)
  options = parser.parse_args(argv)
  _command.prepare(options.out, "matplotlib", "sklearn", "tqdm")

  data, held_out = digits.load_digits(options.seed)
  model, curve = train(data, held_out, options.epochs, options.seed)
  weights = os.path.join(options.out, "averaged.weights.h5")
  model.save_weights(weights)
  plain = make_model()
  plain.load_weights(weights)
  averaged_logits, restored_logits = (
      m.predict(held_out[0], verbose=0) for m in (model, plain))
  if not np.array_equal(restored_logits, averaged_logits):
    off = np.abs(restored_logits - averaged_logits).max()
    sys.exit(f"The model restored from {weights} is not the averaged one: "
             f"logits differ by {off}")

  _, raw, averaged = curve[-1]
  restored = digits.accuracy_of(restored_logits, held_out[1])
  curves = os.path.join(options.out, "curves.png")
  digits.plot(curve, curves)
  results = {
      "raw_accuracy": raw,
      "averaged_accuracy": averaged,
      "restored_accuracy": restored,
      "epochs": options.epochs,
      "steps": int(model.optimizer.iterations.numpy()),
      "seed": options.seed,
      "fused": model.optimizer.fused,
      "seconds": round(time.perf_counter() - start, 2),
      "images": {"trained_on": len(data[0]), "held_out": len(held_out[0])},
      "curve": [dict(zip(("step", "raw", "averaged"), row)) for row in curve],
  }
  results_path = _results.write(options.out, results, tf, keras, np)

  digits.print_table(curve, len(held_out[0]))
  print(f"\nThe averaged model, loaded by plain Keras: {restored:.2%}, logits "
        "equal bit for bit.")
  print(f"{curves}\n{results_path}\n{weights}")


if __name__ == "__main__":
  main()
