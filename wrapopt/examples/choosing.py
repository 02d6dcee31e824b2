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
import os

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt.checkpoints import _rate_decay
from wrapopt.examples import _command
from wrapopt.examples import _plots
from wrapopt.examples import _study
from wrapopt.examples import _tasks
import wrapopt.keras

_BATCH = 32
_WARMUP = 0.05  # The part of the steps in which the rate rises.
_KEPT = 48  # Weights that a run keeps, for means and merges.
_WINDOW = 12  # Characters from which the next one is predicted.
_PARTS = (0.1, 0.2, 0.4)  # Of the run so far.
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
  t = np.arange(steps, dtype=np.float32)
  if contender in ("Keras's y", "Schedule-Free"):
    return np.full(steps, rate, np.float32)
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
  if isinstance(optimizer, (wrapopt.keras.PrimalAverage,
                            wrapopt.keras.ScheduleFree)):
    return {None: [optimizer.average(v).numpy() for v in variables]}
  found = {None: [v.numpy() for v in variables]}
  if not isinstance(optimizer, wrapopt.keras.MovingAverage):
    return found
  names = [(name, x) for name in ("EMA", "BEMA") for x in SETTINGS[name]]
  for name, decay in zip(names, optimizer.decays(), strict=True):
    found[name] = [tf.convert_to_tensor(optimizer.average(v, decay)).numpy()
                   for v in variables]
  steps = np.array([*kept], np.float64)
  for part in _PARTS:
    begin = steps[-1] * (1 - part)
    merge = lambda weights: [
        np.tensordot(weights, x, 1).astype(np.float32)
        for x in map(np.stack, zip(*kept.values()))]
    latest = (steps >= begin) / np.sum(steps >= begin)
    found["SWA, LAWA", part] = merge(latest)
    found["WSM", part] = merge(
        _rate_decay.of_weights(steps, "linear", steps[-1] - begin)
        if len(steps) > 1 and begin >= steps[0] else latest)
  return found


def _split_text(files):
  letters = _tasks.letters_of(_tasks.read_documents(files))[:-1]
  # Neighbours overlap, so that parts of the text must be split.
  ends = [len(letters) * 8 // 10, len(letters) * 9 // 10]
  training, *others = (_tasks.windows(_WINDOW, part)
                       for part in np.split(letters, ends))
  return _tasks.Split(training, *((x[:20000], y[:20000]) for x, y in others))


TASKS = {
    "digits": _tasks.Task(
        _tasks.split_scans, lambda: _tasks.make_dense((8, 8, 1), 64, 10),
        *_tasks.CLASSES),
    "digits_conv": _tasks.Task(
        _tasks.split_scans, lambda: _tasks.make_normalized(8, 16),
        *_tasks.CLASSES),
    "diabetes": _tasks.Task(
        _tasks.split_diabetes, lambda: _tasks.make_dense((10,), 16, 1),
        *_tasks.REGRESSION),
    "tokens": _tasks.Task(
        _tasks.split_tokens, lambda: _tasks.make_embedded(
            64, 64 * 17, 16, keras.layers.GlobalAveragePooling1D(), 32, 10),
        *_tasks.CLASSES),
    "text": _tasks.Task(
        _split_text, lambda: _tasks.make_letters_net(_WINDOW),
        *_tasks.LETTERS),
}


class Trainer:
  """Trains a model as one contender does, several times, traced once."""

  def __init__(self, task, split, steps, contender, setting):
    self._task, self._split, self._steps = task, split, steps
    self._run = contender, setting
    self._model, self._optimizer = model, optimizer = self._make(0)
    self._evaluated = evaluated = task.make_model()
    x, y = map(tf.constant, split.training)
    self._calibration = list(tf.data.Dataset.from_tensor_slices(x).batch(256))

    # Traced once for any number of batches and samples.
    @tf.function(input_signature=[tf.TensorSpec([None, _BATCH], tf.int32),
                                  tf.TensorSpec([None], tf.float32)])
    def train(batches, rates):
      for i in tf.range(tf.shape(batches)[0]):
        optimizer.learning_rate.assign(rates[i])
        with tf.GradientTape() as tape:
          outputs = model(tf.gather(x, batches[i]), training=True)
          loss = tf.reduce_mean(task.loss(tf.gather(y, batches[i]), outputs))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    self._train = train
    self._predict = tf.function(
        lambda x: evaluated(x, training=False),
        input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)])

  def _make(self, seed):
    keras.utils.set_random_seed(seed)
    model = self._task.make_model()
    optimizer = make_optimizer(*self._run, self._steps)
    optimizer.build(model.trainable_variables)
    return model, optimizer

  def _reset(self, seed):
    """Sets weights and state to those of a new model and optimizer."""
    model, optimizer = self._make(seed)
    self._model.set_weights(model.get_weights())
    state = {}
    optimizer.save_own_variables(state)
    self._optimizer.load_own_variables(state)
    if hasattr(optimizer, "seed_averages"):
      self._optimizer.seed_averages()

  def run(self, seed, rate, points, part):
    """Trains from the start.

    Args:
      seed: The seed of the weights and of the batches.
      rate: The learning rate, the peak of a schedule.
      points: The numbers of steps after which to evaluate.
      part: The part of the split to evaluate on.

    Returns:
      {key of `weights_of`: the errors after these numbers of steps}.
    """
    self._reset(seed)
    rng = np.random.default_rng(seed)
    n = len(self._split.training[0])
    batches = rng.integers(n, size=(self._steps, _BATCH), dtype=np.int32)
    rates = rates_of(*self._run, rate, self._steps)
    variables = self._model.trainable_variables
    kept, errors, begin = {}, collections.defaultdict(list), 0
    for end in sorted({*points, *_command.points(self._steps, _KEPT)}):
      self._train(batches[begin:end], rates[begin:end])
      kept[end] = [v.numpy() for v in variables]
      begin = end
      if end in points:
        for name, weights in weights_of(
            self._optimizer, variables, kept).items():
          errors[name].append(self._evaluate(weights, part))
    return errors

  def _evaluate(self, weights, part):
    for v, value in zip(self._evaluated.trainable_variables, weights,
                        strict=True):
      v.assign(value)
    wrapopt.keras.recalibrate_batch_norm(self._evaluated, self._calibration)
    return self._task.error_of(self._predict, getattr(self._split, part))


def run(out="results/choosing", steps=1200, tasks=tuple(TASKS), seeds=3,
        quick=False):
  points = _command.points(steps, 4 if quick else 12)
  rates = (0.003, 0.01) if quick else (
      0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
  tuning_seeds = (1000,) if quick else (1000, 1001)

  def trainer_of(name, found):
    del found
    task = TASKS[name]
    split = task.load(12 if quick else 120)
    trainer = functools.cache(functools.partial(Trainer, task, split, steps))

    @functools.cache  # The averages of a run share it.
    def errors_of(contender, value, rate, seed, points, part):
      return trainer(contender, value).run(seed, rate, points, part)

    def train(contender, setting, *how):
      value, rate = setting
      if contender in _AVERAGES:
        return errors_of("constant", _WARMUP, rate, *how)[contender, value]
      return errors_of(contender, value, rate, *how)[None]

    return train

  found = _study.compare(
      tasks, {name: [*itertools.product(
          values[1:2] if quick else values, rates)]
              for name, values in SETTINGS.items()},
      trainer_of, points, tuning_seeds, range(seeds))

  def cells(setting, rate):
    # It might be better beyond the grid.
    return f"{rate:g}" + "*" * (rate in (rates[0], rates[-1])), setting

  _study.print_tables(
      found, TASKS, f"held out, after {steps} steps (*: the end of the grid)",
      ["rate", "setting"], lambda of: cells(*of.best))
  _plots.draw_curves(
      os.path.join(out, "curves.png"), "held-out error, mean of the seeds",
      "optimizer steps", [
          _study.panel(name, TASKS[name].label, points, {
              contender: of.errors for contender, of in of_task.items()},
                       _STYLES) for name, of_task in found.items()])
  return {"rates": rates, "tuning_seeds": tuning_seeds, "points": points,
          "tasks": {name: {contender: {
              "setting": of.best[0], "rate": of.best[1],
              "validation": [(*tried, error) for tried, error in of.tried],
              "errors": of.errors} for contender, of in of_task.items()}
                    for name, of_task in found.items()}}


main = _command.command("choosing", __doc__, run)

if __name__ == "__main__":
  main()
