"""Trains a Keras model of handwritten digits, and averages its weights.

A small convolutional net learns scikit-learn's 1,797 scans of digits with
momentum, in small batches and with a learning rate that is too high to
converge: the accuracy of the weights fluctuates, and that of their averages is
nearly stable. Validation uses the averages, with the callback
`EvaluateWithAverages`. At the end the model holds the averages, and a plain
Keras model loads their file.
"""

import os

import keras

from wrapopt.examples import _command
from wrapopt.examples import _tasks
from wrapopt.examples import digits
import wrapopt.keras


def run(out="results/keras_digits", steps=2000, seed=0):
  keras.utils.set_random_seed(seed)
  data, held_out = _tasks.load_digits(seed)
  model = _tasks.make_net()
  model.compile(
      wrapopt.keras.MovingAverage(
          keras.optimizers.SGD(0.02, momentum=0.9), 0.99, dynamic_decay=True),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"])
  rows = fit(model, _tasks.dataset(data, 8, seed), held_out, steps, 40)
  _tasks.show_curve(rows, digits.MEASURES, digits.TITLE,
                    os.path.join(out, "curves.png"), digits.SHOWN)
  save(model, _tasks.make_net(), out, held_out[0])
  return {"fused": model.optimizer.fused, "curve": rows}


def fit(model, batches, held_out, steps, evaluations):
  """Trains; returns the rows of a `_tasks.Curve`."""
  curve = _tasks.Curve(held_out)
  evaluations = min(evaluations, steps)
  model.fit(batches, epochs=evaluations, steps_per_epoch=steps // evaluations,
            validation_data=held_out, validation_batch_size=4096, shuffle=False,
            verbose=0, callbacks=[wrapopt.keras.EvaluateWithAverages(), curve,
                                  _tasks.progress()])
  return curve.rows


def save(model, plain, out, inputs):
  """Saves the averages, which a model holds after `fit`, and loads them."""
  weights = os.path.join(out, "averaged.weights.h5")
  model.save_weights(weights)
  plain.load_weights(weights)
  _tasks.check_restored(weights, *(
      m.predict(inputs, verbose=0) for m in (plain, model)))
  print(f"Plain Keras loads the averaged model, bit for bit, from\n{weights}")


main = _command.command("keras_digits", __doc__, run)

if __name__ == "__main__":
  main()
