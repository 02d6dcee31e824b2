"""Trains a Keras model of handwritten digits, and averages its weights.

A small convolutional net learns scikit-learn's 1,797 scans of digits with
momentum, in small batches and with a learning rate that is too high to
converge: the accuracy of the weights fluctuates, and that of their averages is
nearly stable. Validation uses the averages, with the callback
`EvaluateWithAverages`. At the end the model holds the averages, and a plain
Keras model loads their file.
"""

import keras

from wrapopt.examples import _report
from wrapopt.examples import _tasks
from wrapopt.examples import digits
import wrapopt.keras


def run(out="results/keras_digits", steps=2000, seed=0):
  keras.utils.set_random_seed(seed)
  data, held_out = _tasks.load_digits(seed)
  model = _tasks.compiled(_tasks.make_net(), wrapopt.keras.MovingAverage(
      keras.optimizers.SGD(0.02, momentum=0.9), 0.99, dynamic_decay=True))
  rows = fit(model, _tasks.dataset(data, 8, seed), held_out, steps, 40)
  _tasks.show_curve(rows, digits.MEASURES, digits.TITLE, out, digits.SHOWN)
  save(model, _tasks.make_net(), out, held_out[0])
  return {"fused": model.optimizer.fused, "curve": rows}


def fit(model, batches, held_out, steps, evaluations):
  """Trains; returns rows as of `_tasks.show_curve`."""
  rows, evaluations = [], min(evaluations, steps)

  def compare(_, logs):
    # `val_` is for the averages; this call has no callback, so it is for the
    # raw weights.
    raw = model.evaluate(*held_out, batch_size=4096, verbose=0,
                         return_dict=True)
    rows.append({"step": int(model.optimizer.iterations.numpy()), "raw": raw,
                 "averaged": {name: logs["val_" + name] for name in raw}})

  model.fit(batches, epochs=evaluations, steps_per_epoch=steps // evaluations,
            validation_data=held_out, validation_batch_size=4096, shuffle=False,
            verbose=0, callbacks=[
                wrapopt.keras.EvaluateWithAverages(), _tasks.progress(),
                keras.callbacks.LambdaCallback(on_epoch_end=compare)])
  return rows


def save(model, plain, out, inputs):
  """Saves the averages, which a model holds after `fit`, and loads them."""
  weights = str(out / "averaged.weights.h5")
  model.save_weights(weights)
  plain.load_weights(weights)
  _tasks.check_restored(weights, plain.predict(inputs, verbose=0),
                        model.predict(inputs, verbose=0))
  print(f"Plain Keras loads the averaged model, bit for bit, from\n{weights}")


main = _report.command("keras_digits", __doc__, run)

if __name__ == "__main__":
  main()
