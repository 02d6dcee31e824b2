"""Compares all averages of this package with schedules of the learning rate.

Five small models learn real data that need no download. The error on held-out
data is measured over the steps of the training:

  digits        scikit-learn's 1,797 scans of digits, in a net of two layers
  digits_conv   the same, in a convolutional net with batch normalizations
  diabetes      scikit-learn's 442 patients, a regression
  tokens        the scans again, as 64 tokens with an embedding of each value
  text          the next character of the docstrings of the first files of the
                standard library, in lower case, from the 12 before it

All contenders use Adam, and take the same number of steps:

  constant       a constant rate, after a warm-up
  cosine         a rate that falls to 0 by a cosine, after a warm-up
  EMA            averages of a PowerDecay, in the run at a constant rate
  SWA, LAWA      the mean of the latest weights of that run
  WSM            the same weights, merged as a linear decay of the rate
  BEMA           averages that are corrected for their lag, in the same run
  Schedule-Free  wrapopt.keras.ScheduleFree
  GPA            wrapopt.keras.PrimalAverage, after the warm-up
  Keras's y      Keras's ScheduleFreeAdamW, evaluated with the weights in the
                 model, since it does not give its averages

The learning rate of each, which is the peak of a schedule, comes from one grid,
and one setting from three values: the length of the warm-up, the width of the
average, the part of the run that it covers, bias_power, momentum or
average_decay. Chosen is what has the least error on other data (validation) at
the end of runs with seeds that are not those of the table. The statistics of
batch normalizations are recalibrated for all. The table and the figure have the
mean, the least and the largest error of all seeds.

A run that is killed starts from the beginning. Commands for some of the tasks
can run beside each other.
"""

import collections
import functools
import itertools

import keras
import numpy as np
import tensorflow as tf

from wrapopt.checkpoints import _rate_decay
from wrapopt.examples import _report
from wrapopt.examples import _study
from wrapopt.examples import _tasks
import wrapopt.keras

_BATCH, _WINDOW = 32, 12  # Characters from which the next one is predicted.
_WARMUP = 0.05  # The part of the steps in which the rate rises.
_KEPT = 48  # Weights that a run keeps, for means and merges.
_PARTS = (0.1, 0.2, 0.4)  # Of the run so far.
_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SETTINGS = {  # {contender: the values of its setting}
    "constant": (0.02, 0.05, 0.1), "cosine": (0.02, 0.05, 0.1),
    "EMA": (0.05, 0.1, 0.2), "SWA, LAWA": _PARTS, "WSM": _PARTS,
    "BEMA": (0.2, 0.4, 0.8), "Schedule-Free": (0.8, 0.9, 0.95),
    "GPA": (0.97, 0.99, 0.997), "Keras's y": (0.8, 0.9, 0.95)}
if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
  del SETTINGS["Keras's y"]  # Older versions of Keras 3 lack it.
_AVERAGES = ("EMA", "SWA, LAWA", "WSM", "BEMA")  # Of the constant rate.
_STYLES = dict(zip(SETTINGS, (
    "k.:", "C2.-", "C0.-", "C4.-", "C5.-", "C1.-", "C3.-", "C6.-", "C7.:")))


def _split_text(files):
  letters = _tasks.letters_of(_tasks.read_documents(files))[:-1]
  # Neighbours overlap, so that parts of the text must be split.
  ends = [len(letters) * 8 // 10, len(letters) * 9 // 10]
  return _tasks.split_of([_tasks.windows(_WINDOW, part)
                          for part in np.split(letters, ends)], most=20000)


TASKS = {
    "digits": _tasks.classes(
        _tasks.split_scans, lambda: _tasks.make_dense((8, 8, 1), 64, 10)),
    "digits_conv": _tasks.classes(
        _tasks.split_scans, lambda: _tasks.make_normalized(8, 16)),
    "diabetes": _tasks.regression(
        _tasks.split_diabetes, lambda: _tasks.make_dense((10,), 16, 1)),
    "tokens": _tasks.classes(_tasks.split_tokens, lambda: (
        _tasks.make_embedded(64, 64 * 17, 16, 32, 10))),
    "text": _tasks.predictions(
        "character", _split_text, lambda: _tasks.make_letters_net(_WINDOW))}


def make_optimizer(contender, setting, steps):
  """The optimizer of a contender that is no average of another."""
  if contender == "Schedule-Free":
    return wrapopt.keras.ScheduleFree(
        keras.optimizers.Adam(beta_1=setting), setting, _steps(_WARMUP, steps))
  if contender == "GPA":
    return wrapopt.keras.PrimalAverage("adam", average_decay=setting)
  if contender == "Keras's y":
    return keras.optimizers.ScheduleFreeAdamW(
        beta_1=setting, warmup_steps=_steps(_WARMUP, steps))
  if (contender, setting) == ("constant", _WARMUP):
    return wrapopt.keras.MovingAverage("adam", [
        *map(wrapopt.PowerDecay, SETTINGS["EMA"]),
        *(wrapopt.BEMA(bias_power=power) for power in SETTINGS["BEMA"])])
  return keras.optimizers.Adam()


def _steps(part, steps):
  return max(1, round(part * steps))


def rates_of(contender, setting, rate, steps):
  """The learning rates of all steps, without the warm-up of an optimizer."""
  if contender in ("Keras's y", "Schedule-Free"):
    return np.full(steps, rate, np.float32)
  t = np.arange(steps, dtype=np.float32)
  warmup = _steps(_WARMUP if contender == "GPA" else setting, steps)
  rates = rate * np.minimum(1, (t + 1) / warmup)
  if contender == "cosine":
    done = np.clip((t - warmup) / max(1, steps - warmup), 0, 1)
    rates *= (1 + np.cos(np.pi * done)) / 2
  return rates.astype(np.float32)


def weights_of(optimizer, variables, kept):
  """The weights to evaluate now.

  Args:
    optimizer: The optimizer.
    variables: The variables that it trains.
    kept: {step: weights} so far.

  Returns:
    A dict: those of the run itself under None, and those of its averages under
    (contender, setting).
  """
  values = lambda read: [tf.convert_to_tensor(read(v)).numpy()
                         for v in variables]
  if isinstance(optimizer, (wrapopt.keras.PrimalAverage,
                            wrapopt.keras.ScheduleFree)):
    return {None: values(optimizer.average)}
  found = {None: values(lambda v: v)}
  if not isinstance(optimizer, wrapopt.keras.MovingAverage):
    return found
  names = [(name, x) for name in ("EMA", "BEMA") for x in SETTINGS[name]]
  for name, decay in zip(names, optimizer.decays(), strict=True):
    found[name] = values(lambda v, decay=decay: optimizer.average(v, decay))
  steps = np.array([*kept], np.float64)
  for part in _PARTS:
    begin = steps[-1] * (1 - part)
    shares = {"SWA, LAWA": (steps >= begin) / np.sum(steps >= begin)}
    shares["WSM"] = (
        _rate_decay.of_weights(steps, "linear", steps[-1] - begin)
        if len(steps) > 1 and begin >= steps[0] else shares["SWA, LAWA"])
    for name, share in shares.items():
      found[name, part] = [np.tensordot(share, np.stack(x), 1).astype(
          np.float32) for x in zip(*kept.values())]
  return found


def make_trainer(task, split, steps, contender, setting):
  """A function that trains as a contender does, any number of times.

  It is traced once.

  Args:
    task: A `_tasks.Task`.
    split: Its data.
    steps: The steps of a training.
    contender, setting: As in `SETTINGS`.

  Returns:
    A function of the learning rate, which is the peak of a schedule, of a seed,
    the numbers of steps after which to evaluate, and the part of the split to
    evaluate on. It returns {key of `weights_of`: errors}.
  """
  def make(seed):
    keras.utils.set_random_seed(seed)
    return _tasks.make_step(tf.distribute.get_strategy(), task, lambda: (
        make_optimizer(contender, setting, steps)), dense=False)

  model, optimizer, step = make(0)
  evaluated = task.make_model()
  predict = tf.function(lambda x: evaluated(x, training=False))
  x, y = map(tf.constant, split["training"])
  samples = list(tf.data.Dataset.from_tensor_slices(x).batch(256))

  # Traced once for any number of batches.
  @tf.function(input_signature=[tf.TensorSpec([None, _BATCH], tf.int32),
                                tf.TensorSpec([None], tf.float32)])
  def train(batches, rates):
    for i in tf.range(tf.shape(batches)[0]):
      optimizer.learning_rate.assign(rates[i])
      step(tf.gather(x, batches[i]), tf.gather(y, batches[i]))

  def error_of(weights, part):
    for v, value in zip(evaluated.trainable_variables, weights, strict=True):
      v.assign(value)
    wrapopt.keras.recalibrate_batch_norm(evaluated, samples)
    return task.error_of(predict, split[part])

  def run_once(rate, seed, points, part):
    # Weights and state are those of a new model and optimizer.
    new_model, new_optimizer, _ = make(seed)
    model.set_weights(new_model.get_weights())
    new_optimizer.save_own_variables(state := {})
    optimizer.load_own_variables(state)
    if hasattr(optimizer, "seed_averages"):
      optimizer.seed_averages()
    batches = np.random.default_rng(seed).integers(
        len(x), size=(steps, _BATCH), dtype=np.int32)
    rates = rates_of(contender, setting, rate, steps)
    variables, kept, begin = model.trainable_variables, {}, 0
    errors = collections.defaultdict(list)
    for end in sorted({*points, *_report.points(steps, _KEPT)}):
      train(batches[begin:end], rates[begin:end])
      kept[end] = [v.numpy() for v in variables]
      begin = end
      for name, weights in weights_of(
          optimizer, variables, kept).items() if end in points else ():
        errors[name].append(error_of(weights, part))
    return errors

  return run_once


def run(out="results/choosing", steps=1200, tasks=tuple(TASKS), seeds=3,
        quick=False):
  def trainer_of(name, split, _):
    trainer = functools.cache(functools.partial(
        make_trainer, TASKS[name], split, steps))

    @functools.cache  # The averages of a run share it.
    def errors_of(contender, value, *how):
      return trainer(contender, value)(*how)

    def train(contender, setting, *how):
      value, rate = setting
      if contender in _AVERAGES:
        return errors_of("constant", _WARMUP, rate, *how)[contender, value]
      return errors_of(contender, value, rate, *how)[None]

    return train

  def cells(of):
    value, rate = of["best"]
    # It might be better beyond the grid.
    return f"{rate:g}" + "*" * (rate in (_RATES[0], _RATES[-1])), value

  results = _study.compare(
      TASKS, tasks, {contender: [*itertools.product(values, _RATES)]
                     for contender, values in SETTINGS.items()},
      trainer_of, steps, (1000, 1001), seeds, quick)
  panels = []
  for name, found in results["tasks"].items():
    label = TASKS[name].label
    _study.print_table(
        f"{name}: {label}, held out, after {steps} steps (*: the end of the "
        "grid)", found, ["rate", "setting"], cells)
    panels.append(_study.panel(name, label, found, results["points"], _STYLES))
  _report.draw_curves(out / "curves.png", "held-out error, mean of the seeds",
                      "optimizer steps", panels)
  return results


main = _report.command("choosing", __doc__, run)

if __name__ == "__main__":
  main()
