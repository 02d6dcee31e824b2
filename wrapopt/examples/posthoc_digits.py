"""Trains a Keras model of digits, and chooses the average after the training.

The run keeps averages of two relative widths, 0.05 and 0.10, and writes
snapshots of them. After the training, averages of other widths are computed
from these files, at several points of the training, and evaluated. Only for
comparison, the run also keeps averages of five other widths. They show that the
computed averages equal those that the run would have kept.
"""

import os
import sys
import time

import h5py
import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt import checkpoints
from wrapopt.examples import _command
from wrapopt.examples import _results
from wrapopt.examples import digits
from wrapopt.examples import keras_digits
import wrapopt.keras

_BATCH = 8
_LEARNING_RATE = 0.02
_MOMENTUM = 0.9
_STEPS_PER_EPOCH = 50
_KEPT = (0.05, 0.10)  # Widths of the snapshots.
_TRACKED = (0.03, 0.07, 0.15, 0.20, 0.25)  # Widths for comparison.
_WIDTHS = (0.03, 0.04, 0.05, 0.07, 0.10, 0.13, 0.15, 0.20, 0.25)
_SNAPSHOTS = 16  # The number of snapshots of each average.
_POINTS = (0.25, 0.5, 1.0)  # Fractions of the training.


class Progress(keras.callbacks.Callback):
  """Shows the progress of the training."""

  def __init__(self, bar):
    super().__init__()
    self._bar = bar

  def on_train_batch_end(self, batch, logs=None):
    self._bar.update()


def train(data, epochs, seed, directory):
  """Trains, and writes snapshots.

  Args:
    data: (images, labels) to train on.
    epochs: The number of epochs, of 50 steps each.
    seed: The seed of the initial weights and the batches.
    directory: The directory of the snapshots.
  """
  keras.utils.set_random_seed(seed)
  batches = tf.data.Dataset.from_tensor_slices(data).shuffle(
      len(data[0]), seed=seed).repeat().batch(_BATCH)
  model = keras_digits.make_model()
  model.compile(
      wrapopt.keras.MovingAverage(
          keras.optimizers.SGD(_LEARNING_RATE, momentum=_MOMENTUM),
          [wrapopt.PowerDecay(width) for width in (*_KEPT, *_TRACKED)]),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  steps = epochs * _STEPS_PER_EPOCH
  with _extras.load("tqdm").tqdm(total=steps, unit="step", desc="training",
                                 file=sys.stderr) as bar:
    model.fit(batches, epochs=epochs, steps_per_epoch=_STEPS_PER_EPOCH,
              shuffle=False, verbose=0, callbacks=[
                  wrapopt.keras.Snapshots(directory, steps // _SNAPSHOTS),
                  Progress(bar)])


def snapshot(directory, step, width):
  """The path of a snapshot."""
  return os.path.join(
      directory, f"snapshot-{step}-{wrapopt.PowerDecay(width)}.weights.h5")


def weights_of(path):
  """The weights in a file of Keras: one long array."""
  found = []
  with h5py.File(path) as file:
    file["layers"].visititems(lambda _, item: found.append(
        np.ravel(item[()])) if isinstance(item, h5py.Dataset) else None)
  return np.concatenate(found).astype(np.float64)


def evaluate_widths(directory, steps_of_run, steps, evaluate, bar):
  """Computes averages at a step of the training, and evaluates them.

  Args:
    directory: The directory of the snapshots.
    steps_of_run: The number of steps of the whole training.
    steps: The step.
    evaluate: A function of a path, which returns an accuracy.
    bar: A progress bar, which moves by one for each width.

  Returns:
    A list of dicts.
  """
  every = steps_of_run // _SNAPSHOTS
  inputs = [snapshot(directory, step, width) for width in _KEPT
            for step in range(every, steps + 1, every)]
  rows = []
  for width in _WIDTHS:
    made = {}

    def look(path):
      made["weights"] = weights_of(path)
      return evaluate(path)

    [found] = checkpoints.sweep(inputs, look, [width])
    row = {"steps": steps, "relative_width": width,
           "profile_error": found.error, "accuracy": found.quality}
    if width in _TRACKED:
      tracked = snapshot(directory, steps, width)
      expected = weights_of(tracked)
      row["tracked_accuracy"] = evaluate(tracked)
      row["weights_error"] = float(
          np.linalg.norm(made["weights"] - expected) /
          np.linalg.norm(expected))
    rows.append(row)
    bar.update()
  return rows


def plot(rows, path):
  """Draws accuracy over width, of computed and of tracked averages."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
  for i, steps in enumerate(sorted({row["steps"] for row in rows})):
    of_point = [row for row in rows if row["steps"] == steps]
    axes.plot([row["relative_width"] for row in of_point],
              [100 * row["accuracy"] for row in of_point], color=f"C{i}",
              marker=".", label=f"made after {steps} steps")
    tracked = [row for row in of_point if "tracked_accuracy" in row]
    axes.plot([row["relative_width"] for row in tracked],
              [100 * row["tracked_accuracy"] for row in tracked], "o",
              color=f"C{i}", markersize=11, fillstyle="none",
              label=f"tracked, at {steps} steps")
  axes.set(xscale="log", xlabel="relative width of the average",
           ylabel="held-out accuracy (%)",
           title="scikit-learn digits: the width of the average, chosen after "
           "training")
  ticks = [row["relative_width"] for row in rows if row["steps"] == steps]
  axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
  axes.minorticks_off()
  axes.grid(alpha=0.3)
  axes.legend(loc="best", fontsize="small")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def print_table(rows, held_out):
  """Prints the rows of all points."""
  print(f"\naccuracy on {held_out} held-out scans, and how far the weights are "
        "from tracked ones")
  print(f"{'steps':>6}  {'width':>6}  {'afterwards':>10}  {'tracked':>8}  "
        f"{'profile':>8}  {'weights':>8}")
  for row in rows:
    tracked = ("" if "weights_error" not in row else
               f"{row['tracked_accuracy']:8.2%}  {row['profile_error']:8.2%}  "
               f"{row['weights_error']:8.3%}")
    print(f"{row['steps']:6}  {row['relative_width']:6.2f}  "
          f"{row['accuracy']:10.2%}  " +
          (tracked or f"{'':8}  {row['profile_error']:8.2%}"))


def main(argv=None):
  start = time.perf_counter()
  parser = _command.parser("posthoc_digits", __doc__)
  parser.add_argument(
      "--epochs", type=_command.count, default=40,
      help=f"epochs of {_STEPS_PER_EPOCH} steps; default %(default)s")
  _command.add_out(parser, "posthoc_digits")
  _command.add_seed(parser)
  options = parser.parse_args(argv)
  steps = options.epochs * _STEPS_PER_EPOCH
  if steps % _SNAPSHOTS:
    parser.error(f"argument --epochs: {options.epochs} epochs of "
                 f"{_STEPS_PER_EPOCH} steps must be a multiple of {_SNAPSHOTS} "
                 "steps, such as 8, 16 or 40")
  snapshots = os.path.join(options.out, "snapshots")
  _command.prepare(snapshots, "matplotlib", "sklearn", "tqdm")

  data, held_out = digits.load_digits(options.seed)
  train(data, options.epochs, options.seed, snapshots)
  plain = keras_digits.make_model()

  def evaluate(path):
    plain.load_weights(path)
    return digits.accuracy_of(plain.predict(held_out[0], verbose=0),
                              held_out[1])

  rows = []
  with _extras.load("tqdm").tqdm(
      total=len(_POINTS) * len(_WIDTHS), unit="width", desc="averages",
      file=sys.stderr) as bar:
    for point in _POINTS:
      rows += evaluate_widths(snapshots, steps, round(point * steps), evaluate,
                              bar)

  best = max((row for row in rows if row["steps"] == steps),
             key=lambda row: row["accuracy"])
  curves = os.path.join(options.out, "widths.png")
  plot(rows, curves)
  results = {
      "rows": rows,
      "best": best,
      "epochs": options.epochs,
      "steps": steps,
      "seed": options.seed,
      "snapshots": len(os.listdir(snapshots)),
      "seconds": round(time.perf_counter() - start, 2),
      "images": {"trained_on": len(data[0]), "held_out": len(held_out[0])},
  }
  results_path = _results.write(options.out, results, tf, keras, np)

  print_table(rows, len(held_out[0]))
  print(f"\nThe best width at the end: {best['relative_width']}, "
        f"{best['accuracy']:.2%}.")
  print(f"{curves}\n{results_path}\n{snapshots}")


if __name__ == "__main__":
  main()
