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
import functools

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import checkpoints
from wrapopt.examples import _report
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
    wrap: A function of Keras's optimizer that returns one with averages.
    statistics: The statistics of batch normalizations, of _STATISTICS.
    points: The numbers of epochs after which to evaluate.
    seed: The seed of split, weights and batches.

  Returns:
    A list of the accuracies after these epochs, for each decay.
  """
  keras.utils.set_random_seed(seed)
  data, held_out = _tasks.load_digits(seed)
  scans = tf.data.Dataset.from_tensor_slices(data)
  # In the order of the scans: to read the batches of the training would change
  # the order in later epochs.
  recalibrate = statistics == "recalibrated" and scans.batch(32)
  model = _tasks.compiled(_tasks.make_normalized(16, 32), wrap(
      keras.optimizers.SGD(0.05, momentum=0.9)))
  history = model.fit(
      scans.shuffle(len(data[0]), seed=seed).batch(32), epochs=points[-1],
      shuffle=False, verbose=0, validation_data=held_out,
      validation_freq=points, callbacks=[wrapopt.keras.EvaluateWithAverages(
          decay="all", recalibrate=recalibrate)]).history
  return [history[name] for name in history if name.startswith("val_accuracy")]


def decays(out="results/averages/decays", epochs=(1, 2, 4, 16), seeds=3):
  """Averages of several decays, and statistics of batch normalizations."""
  del out
  points, average = sorted(set(epochs)), wrapopt.keras.MovingAverage
  trainings = [  # (averages, statistics, as in `evaluate_averages`)
      *((_DECAYS, of, functools.partial(
          average, average_decay=list(_DECAYS.values()),
          average_batch_norm=of == "averaged")) for of in _STATISTICS),
      ([_WARM_UP], "recalibrated", functools.partial(
          average, average_decay=0.99, dynamic_decay=True)),
      ([_SWA], "recalibrated", functools.partial(
          wrapopt.keras.SWA, start_averaging=points[-1] // 2,
          steps_per_epoch=38))]
  found = collections.defaultdict(list)  # {(average, statistics): [of seeds]}
  for seed in _report.progress(range(seeds), unit="seed"):
    for names, statistics, wrap in trainings:
      for name, accuracies in zip(names, evaluate_averages(
          wrap, statistics, points, seed), strict=True):
        found[name, statistics].append(accuracies)

  def show(title, rows):
    _report.print_table(
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


def widths(out="results/averages/widths", steps=2000, seed=0):
  """Averages of several widths, computed after the training."""
  every, directory = max(1, steps // _SNAPSHOTS), out / "snapshots"
  keras.utils.set_random_seed(seed)
  data, (images, labels) = _tasks.load_digits(seed)
  _tasks.compiled(_tasks.make_net(), wrapopt.keras.MovingAverage(
      keras.optimizers.SGD(0.02, momentum=0.9),
      [*map(wrapopt.PowerDecay, _KEPT + _TRACKED)])).fit(
          _tasks.dataset(data, 8, seed), epochs=_SNAPSHOTS,
          steps_per_epoch=every, shuffle=False, verbose=0, callbacks=[
              wrapopt.keras.Snapshots(directory, every), _tasks.progress()])
  model = _tasks.make_net()

  def accuracy(path):
    model.load_weights(path)
    return _tasks.accuracy_of(model.predict(images, verbose=0), labels)

  def loaded():
    return np.concatenate([*map(np.ravel, model.get_weights())], dtype=float)

  def snapshot(width, i):
    return str(directory / f"snapshot-{i * every}-"
               f"{wrapopt.PowerDecay(width)}.weights.h5")

  rows = []
  for at in _AT:
    inputs = [snapshot(width, i) for width in _KEPT for i in range(1, at + 1)]
    for width in _report.progress(_WIDTHS, unit="width"):
      [made] = checkpoints.sweep(inputs, accuracy, [width])
      row = {"steps": at * every, "width": width, "accuracy": made.quality,
             "profile_error": made.error}
      if width in _TRACKED:
        computed = loaded()
        row["tracked_accuracy"] = accuracy(snapshot(width, at))
        row["weights_error"] = float(np.linalg.norm(computed - loaded()) /
                                     np.linalg.norm(loaded()))
      rows.append(row)

  formats = ("", "", ".2%", ".2%", ".2%", ".3%")
  _report.print_table(
      "accuracy on held-out scans, and how far the weights are from tracked "
      "ones", ["steps", "width", "afterwards", "profile", "tracked", "weights"],
      [map(format, row.values(), formats) for row in rows])
  curves = {}
  for i, at in enumerate(_AT):
    for label, key, style in (("computed", "accuracy", f"C{i}.-"),
                              ("tracked", "tracked_accuracy", f"C{i}o")):
      x, y = zip(*((row["width"], 100 * row[key]) for row in rows
                   if row["steps"] == at * every and key in row))
      curves[f"{label}, {at * every} steps"] = x, y, style
  best = max(rows[-len(_WIDTHS):], key=lambda row: row["accuracy"])
  print(f"The best width at the end: {best['width']}, {best['accuracy']:.2%}.")
  _report.draw_curves(
      out / "widths.png",
      "the width of the average, chosen after training", "relative width",
      [(curves, {"ylabel": "held-out accuracy (%)"})], shown=(0, 1))
  print(directory)
  return {"rows": rows, "best": best,
          "snapshots": len([*directory.iterdir()])}


main = _report.command("averages", __doc__, decays, widths)

if __name__ == "__main__":
  main()
