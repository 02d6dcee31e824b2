"""Compares averages, and statistics of batch normalizations, on digits.

A small net with batch normalizations learns scikit-learn's 1,797 scans of
digits with momentum and a constant learning rate. At several points of the
training, the averages of several decays are evaluated on held-out scans, each
with three statistics of the batch normalizations: those of the raw weights,
averaged ones (`average_batch_norm=True`), and recalibrated ones. The tables
show means over seeds.
"""

import collections
import contextlib
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

_BATCH = 32
_LEARNING_RATE = 0.05
_MOMENTUM = 0.9
_RAW = "raw weights"
_AVERAGES = {  # {name: (decay, whether dynamic_decay is set)}
    "0.99": (0.99, False),
    "0.99, warm-up": (0.99, True),
    "0.999": (0.999, False),
    "PowerDecay(0.05)": (wrapopt.PowerDecay(0.05), False),
    "PowerDecay(0.1)": (wrapopt.PowerDecay(0.1), False),
}
_SWA = "SWA of the last half"
_STATISTICS = ("raw", "averaged", "recalibrated")


def make_model():
  layers = keras.layers
  convolution = lambda filters: [
      layers.Conv2D(filters, 3, padding="same", use_bias=False),
      layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]
  return keras.Sequential([
      keras.Input((8, 8, 1)), *convolution(16), *convolution(32),
      layers.Flatten(), layers.Dense(10)])


class Evaluate(keras.callbacks.Callback):
  """Evaluates averages at the end of some epochs.

  Attributes:
    rows: A list of (epoch, average, statistics, accuracy).
  """

  def __init__(self, averages, batches, held_out, epochs, progress):
    """Makes the callback.

    Args:
      averages: {name: (wrapper, decay)}; (None, None) are the raw weights.
      batches: The data set to recalibrate with.
      held_out: (images, labels) to evaluate on.
      epochs: The numbers of epochs after which to evaluate.
      progress: A progress bar, which moves by one for each epoch.
    """
    super().__init__()
    self.rows = []
    self._averages, self._batches = averages, batches
    self._held_out, self._epochs = held_out, epochs
    self._progress = progress

  def on_epoch_end(self, epoch, logs=None):
    self._progress.update()
    if epoch + 1 in self._epochs:
      for name, (wrapper, decay) in self._averages.items():
        self._add_all(epoch + 1, name, wrapper, decay)

  def _add(self, epoch, name, statistics):
    logs = self.model.evaluate(*self._held_out, verbose=0, return_dict=True)
    self.rows.append((epoch, name, statistics, logs["accuracy"]))

  def _add_all(self, epoch, name, wrapper, decay):
    model = self.model
    raw = [v.numpy() for v in model.non_trainable_variables]

    def restore():
      for variable, value in zip(model.non_trainable_variables, raw):
        variable.assign(value)

    with (contextlib.nullcontext() if wrapper is None else
          wrapper.averaged_weights(model, decay=decay)):
      if isinstance(wrapper, wrapopt.keras.MovingAverage):
        self._add(epoch, name, "averaged")
      restore()
      self._add(epoch, name, "raw")
      wrapopt.keras.recalibrate_batch_norm(model, self._batches)
      self._add(epoch, name, "recalibrated")
    restore()


def train(seed, points, progress):
  """Trains twice: with the averages without, and with those with warm-up.

  Args:
    seed: The seed of split, weights and batches.
    points: The numbers of epochs after which to evaluate.
    progress: A progress bar.

  Returns:
    The rows of `Evaluate`.
  """
  data, held_out = digits.load_digits(seed)
  rows = []
  for warm_up in False, True:
    keras.utils.set_random_seed(seed)
    dataset = tf.data.Dataset.from_tensor_slices(data)
    batches = dataset.shuffle(len(data[0]), seed=seed).batch(_BATCH)
    decays = {name: decay for name, (decay, warms_up) in _AVERAGES.items()
              if warms_up == warm_up}
    moving = wrapopt.keras.MovingAverage(
        keras.optimizers.SGD(_LEARNING_RATE, momentum=_MOMENTUM),
        list(decays.values()), dynamic_decay=warm_up, average_batch_norm=True)
    averages = {name: (moving, decay) for name, decay in decays.items()}
    optimizer = moving
    if not warm_up:
      averages[_RAW] = None, None
    else:
      optimizer = wrapopt.keras.SWA(
          moving, start_averaging=points[-1] // 2, steps_per_epoch=len(batches))
      averages[_SWA] = optimizer, None
    model = make_model()
    moving.set_model(model)
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"])
    # In the order of the scans: to read `batches` would change the order in
    # later epochs.
    evaluate = Evaluate(averages, dataset.batch(_BATCH), held_out, points,
                        progress)
    model.fit(batches, epochs=points[-1], shuffle=False, verbose=0,
              callbacks=[evaluate])
    rows += evaluate.rows
  return rows


def print_table(title, names, points, accuracy_of):
  print(f"\n{title}")
  print("after epochs".ljust(24) + "".join(f"{p:>8}" for p in points))
  for name in names:
    found = [accuracy_of(point, name) for point in points]
    print(name.ljust(24) + "".join(
        " " * 8 if x is None else f"{x:>8.1%}" for x in found))


def main(argv=None):
  start = time.perf_counter()
  parser = _command.parser("averages_digits", __doc__)
  parser.add_argument(
      "--epochs", type=_command.count, nargs="+", default=[1, 2, 4, 16],
      metavar="N", help="epochs after which to evaluate; default 1 2 4 16")
  _command.add_out(parser, "averages_digits")
  parser.add_argument("--seeds", type=_command.count, default=3,
                      help="the number of seeds; default %(default)s")
  options = parser.parse_args(argv)
  _command.prepare(options.out, "sklearn", "tqdm")

  points = sorted(set(options.epochs))
  found = collections.defaultdict(list)
  with _extras.load("tqdm").tqdm(
      total=2 * options.seeds * points[-1], unit="epoch",
      file=sys.stderr) as progress:
    for seed in range(options.seeds):
      for *key, accuracy in train(seed, points, progress):
        found[tuple(key)].append(accuracy)
  means = {key: float(np.mean(accuracies))
           for key, accuracies in found.items()}
  results_path = _results.write(
      options.out, {
          "rows": [{"epochs": epoch, "average": name, "statistics": statistics,
                    "accuracies": accuracies}
                   for (epoch, name, statistics), accuracies in found.items()],
          "seconds": round(time.perf_counter() - start, 2),
      }, tf, keras, np)

  print_table(
      "held-out accuracy by average; statistics are recalibrated",
      [_RAW, *_AVERAGES, _SWA], points,
      # The mean of SWA begins in the last half.
      lambda epoch, name: None if name == _SWA and epoch <= points[-1] // 2
      else means[epoch, name, "recalibrated"])
  for average in _RAW, "0.99", "PowerDecay(0.1)":
    print_table(
        f"held-out accuracy of {average} by statistics",
        [x for x in _STATISTICS if (points[0], average, x) in means], points,
        lambda epoch, statistics, of=average: means[epoch, of, statistics])
  print(f"\n{results_path}")


if __name__ == "__main__":
  main()
