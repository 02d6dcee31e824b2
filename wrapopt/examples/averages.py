"""Compares averages of handwritten digits.

  decays  averages of several decays, with and without warm-up, and SWA, at
          several points of a training. The net has batch normalizations. Each
          average is evaluated with three statistics of them: those of the raw
          weights, averaged ones (`average_batch_norm=True`), and recalibrated
          ones. The tables show means over seeds.
  widths  averages that are chosen after the training. The run keeps averages of
          two relative widths, 0.05 and 0.10, and writes snapshots of them.
          Averages of other widths are computed from these files, at several
          points of the training. Only for comparison, the run also keeps
          averages of five other widths. They show that the computed averages
          equal those that the run would have kept.
"""

import collections
import os

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import checkpoints
from wrapopt.examples import _command
from wrapopt.examples import _plots
from wrapopt.examples import _tasks
import wrapopt.keras

_DECAYS = {  # A decay of 0 gives the weights themselves.
    "raw weights": 0.0, "0.99": 0.99, "0.999": 0.999,
    "PowerDecay(0.05)": wrapopt.PowerDecay(0.05),
    "PowerDecay(0.1)": wrapopt.PowerDecay(0.1)}
_WARM_UP, _SWA = "0.99, warm-up", "SWA of the last half"
_STATISTICS = ("raw", "averaged", "recalibrated")
_KEPT = (0.05, 0.10)  # Widths of the snapshots.
_TRACKED = (0.03, 0.07, 0.15, 0.20, 0.25)  # Widths for comparison.
_WIDTHS = (0.03, 0.04, 0.05, 0.07, 0.10, 0.13, 0.15, 0.20, 0.25)
_SNAPSHOTS = 16  # The number of snapshots of each average.
_AT = (4, 8, 16)  # Snapshots after which averages are computed.


def evaluate_averages(wrap, statistics, points, seed):
  """Trains, and evaluates the averages of an optimizer.

  Args:
    wrap: A function of Keras's optimizer and the number of batches of an epoch
      that returns an optimizer with averages.
    statistics: The statistics of batch normalizations, of _STATISTICS.
    points: The numbers of epochs after which to evaluate.
    seed: The seed of split, weights and batches.

  Returns:
    A list of the accuracies after these epochs, for each decay.
  """
  keras.utils.set_random_seed(seed)
  data, held_out = _tasks.load_digits(seed)
  scans = tf.data.Dataset.from_tensor_slices(data)
  batches = scans.shuffle(len(data[0]), seed=seed).batch(32)
  model = _tasks.make_normalized(16, 32)
  model.compile(
      wrap(keras.optimizers.SGD(0.05, momentum=0.9), len(batches)),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=["accuracy"])
  history = model.fit(
      batches, epochs=points[-1], shuffle=False, verbose=0,
      validation_data=held_out, validation_freq=points,
      callbacks=[wrapopt.keras.EvaluateWithAverages(
          decay="all",
          # In the order of the scans: to read `batches` would change the order
          # in later epochs.
          recalibrate=(scans.batch(32) if statistics == "recalibrated"
                       else False))])
  return [accuracies for name, accuracies in history.history.items()
          if name.startswith("val_accuracy")]


def decays(out="results/averages/decays", epochs=(1, 2, 4, 16), seeds=3):
  """Averages of several decays, and statistics of batch normalizations."""
  del out
  points = sorted(set(epochs))
  trainings = [  # (averages, statistics, as in `evaluate_averages`)
      *((_DECAYS, statistics, lambda sgd, _, of=statistics:
         wrapopt.keras.MovingAverage(sgd, list(_DECAYS.values()),
                                     average_batch_norm=of == "averaged"))
        for statistics in _STATISTICS),
      ([_WARM_UP], "recalibrated", lambda sgd, _:
       wrapopt.keras.MovingAverage(sgd, 0.99, dynamic_decay=True)),
      ([_SWA], "recalibrated", lambda sgd, batches: wrapopt.keras.SWA(
          sgd, start_averaging=points[-1] // 2, steps_per_epoch=batches))]
  found = collections.defaultdict(list)  # {(average, statistics): [of seeds]}
  for seed in _command.progress(range(seeds), unit="seed"):
    for names, statistics, wrap in trainings:
      for name, accuracies in zip(names, evaluate_averages(
          wrap, statistics, points, seed), strict=True):
        found[name, statistics].append(accuracies)

  def show(title, rows):
    _command.print_table(
        title, ["after epochs", *points],
        # The mean of SWA begins in the last half.
        [[name, *("" if name == _SWA and point <= points[-1] // 2
                  else f"{accuracy:.1%}" for point, accuracy in zip(
                      points, np.mean(found[key], axis=0)))]
         for name, key in rows])

  show("held-out accuracy by average; statistics are recalibrated",
       [(name, (name, "recalibrated")) for name in (*_DECAYS, _WARM_UP, _SWA)])
  for average in "raw weights", "0.99", "PowerDecay(0.1)":
    show(f"held-out accuracy of {average} by statistics",
         [(x, (average, x)) for x in _STATISTICS])
  return {"rows": [
      {"average": name, "statistics": statistics, "accuracies": accuracies}
      for (name, statistics), accuracies in found.items()]}


def train_with_snapshots(data, steps, seed, directory):
  """Trains, and writes snapshots of averages into a directory."""
  keras.utils.set_random_seed(seed)
  model = _tasks.make_net()
  model.compile(
      wrapopt.keras.MovingAverage(
          keras.optimizers.SGD(0.02, momentum=0.9),
          [wrapopt.PowerDecay(width) for width in (*_KEPT, *_TRACKED)]),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  model.fit(_tasks.dataset(data, 8, seed), epochs=_SNAPSHOTS,
            steps_per_epoch=steps // _SNAPSHOTS, shuffle=False, verbose=0,
            callbacks=[
                wrapopt.keras.Snapshots(directory, steps // _SNAPSHOTS),
                _tasks.progress()])


def widths(out="results/averages/widths", steps=2000, seed=0):
  """Averages of several widths, computed after the training."""
  every = max(1, steps // _SNAPSHOTS)
  directory = os.path.join(out, "snapshots")
  data, held_out = _tasks.load_digits(seed)
  train_with_snapshots(data, every * _SNAPSHOTS, seed, directory)

  model = _tasks.make_net()

  def accuracy(path):
    model.load_weights(path)
    return _tasks.accuracy_of(model.predict(held_out[0], verbose=0),
                              held_out[1])

  def loaded():
    return np.concatenate(
        [np.ravel(w) for w in model.get_weights()]).astype(np.float64)

  def snapshot(width, i):
    return os.path.join(directory, f"snapshot-{i * every}-"
                        f"{wrapopt.PowerDecay(width)}.weights.h5")

  rows = []
  for at in _AT:
    inputs = [snapshot(width, i) for width in _KEPT for i in range(1, at + 1)]
    for width in _command.progress(_WIDTHS, unit="width"):
      [made] = checkpoints.sweep(inputs, accuracy, [width])
      row = {"steps": at * every, "width": width, "accuracy": made.quality,
             "profile_error": made.error}
      if width in _TRACKED:
        computed = loaded()
        row["tracked_accuracy"] = accuracy(snapshot(width, at))
        row["weights_error"] = float(np.linalg.norm(computed - loaded()) /
                                     np.linalg.norm(loaded()))
      rows.append(row)

  _command.print_table(
      "accuracy on held-out scans, and how far the weights are from tracked "
      "ones", ["steps", "width", "afterwards", "profile", "tracked", "weights"],
      [[row["steps"], row["width"], f"{row['accuracy']:.2%}",
        f"{row['profile_error']:.2%}", *(
            [f"{row['tracked_accuracy']:.2%}", f"{row['weights_error']:.3%}"]
            if "weights_error" in row else [])] for row in rows])
  curves = {}
  for i, at in enumerate(_AT):
    for label, key, style in (("computed", "accuracy", f"C{i}.-"),
                              ("tracked", "tracked_accuracy", f"C{i}o")):
      shown = [row for row in rows if row["steps"] == at * every and key in row]
      curves[f"{label}, {at * every} steps"] = (
          [row["width"] for row in shown],
          [100 * row[key] for row in shown], style)
  best = max(rows[-len(_WIDTHS):], key=lambda row: row["accuracy"])
  print(f"The best width at the end: {best['width']}, {best['accuracy']:.2%}.")
  _plots.draw_curves(
      os.path.join(out, "widths.png"),
      "the width of the average, chosen after training", "relative width",
      [_plots.Panel("", "held-out accuracy (%)", curves)], shown=(0, 1))
  print(directory)
  return {"rows": rows, "best": best, "snapshots": len(os.listdir(directory))}


main = _command.command("averages", __doc__, decays, widths)

if __name__ == "__main__":
  main()
