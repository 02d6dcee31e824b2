"""Compares Schedule-Free learning with a constant and with a decaying rate.

Five small models learn real data that need no download, each with four
optimizers: Adam with a constant learning rate, Adam with a cosine schedule,
Keras's ScheduleFreeAdamW and `wrapopt.keras.ScheduleFree("adam")`. The error on
held-out data is measured over the steps of the training:

  digits        scikit-learn's 1,797 scans of digits, in a net of two layers
  digits_conv   the same, in a convolutional net with batch normalizations
  diabetes      scikit-learn's 442 patients, a regression
  tokens        the scans again, as 64 tokens with an embedding of each value
  text          the next character of the docstrings of the first files of the
                standard library, in lower case, from the 12 before it

All optimizers take the same number of steps and begin with the same warm-up.
The learning rate of each, which is the peak of the cosine schedule, comes from
one grid: the one with the least error on other data (validation) at the end of
runs with seeds that are not those of the table. Nothing else is tuned. The
table and the plot have the mean, the least and the largest error of all seeds.

Adam and Keras's ScheduleFreeAdamW are evaluated with the weights in the model;
the latter are y, since it does not give its averages. wrapopt's ScheduleFree is
evaluated with its averages x. The statistics of batch normalizations are
recalibrated for all four, so that only the weights differ. If Keras has no
ScheduleFreeAdamW, it is left out.
"""

import contextlib
import itertools
import os

import keras
import numpy as np
import tensorflow as tf

from wrapopt import _extras
from wrapopt.examples import _command
from wrapopt.examples import _plots
from wrapopt.examples import _tasks
import wrapopt.keras

layers = keras.layers

_BATCH = 32
_WARMUP = 0.05  # The part of the steps in which the rate rises.
_AT = (4, 2, 1)  # The table has the steps divided by these.
_LETTERS = " abcdefghijklmnopqrstuvwxyz"
_WINDOW = 12  # Characters from which the next one is predicted.

_CONSTANT, _COSINE, _KERAS, _WRAPOPT = (
    "Adam, constant", "Adam, cosine", "Keras ScheduleFreeAdamW, y",
    "wrapopt ScheduleFree, x")
_STYLES = {_CONSTANT: "C7.-", _COSINE: "C2.-", _KERAS: "C1.-",
           _WRAPOPT: "C0.-"}
CONTENDERS = tuple(
    contender for contender in _STYLES
    # Older versions of Keras 3 lack it.
    if contender != _KERAS or hasattr(keras.optimizers, "ScheduleFreeAdamW"))


def make_optimizer(contender, warmup):
  if contender == _KERAS:
    return keras.optimizers.ScheduleFreeAdamW(warmup_steps=warmup)
  if contender == _WRAPOPT:
    return wrapopt.keras.ScheduleFree("adam", warmup_steps=warmup)
  return keras.optimizers.Adam()


def rates_of(contender, rate, steps, warmup):
  """The learning rates of all steps, without the warm-up of an optimizer."""
  t = np.arange(steps, dtype=np.float32)
  if contender in (_KERAS, _WRAPOPT):
    return np.full(steps, rate, np.float32)
  rates = rate * np.minimum(1, (t + 1) / warmup)
  if contender == _COSINE:
    done = np.clip((t - warmup) / max(1, steps - warmup), 0, 1)
    rates *= (1 + np.cos(np.pi * done)) / 2
  return rates.astype(np.float32)


def _split_text(files):
  text = " ".join(itertools.chain.from_iterable(_tasks.read_documents(files)))
  numbers = np.array([_LETTERS.index(c) for c in text], np.int32)

  def samples(numbers):
    windows = np.lib.stride_tricks.sliding_window_view(numbers, _WINDOW + 1)
    return windows[:, :-1].copy(), windows[:, -1].copy()

  # Neighbours overlap, so that parts of the text must be split.
  ends = [len(numbers) * 8 // 10, len(numbers) * 9 // 10]
  training, *others = map(samples, np.split(numbers, ends))
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
        lambda y, outputs: tf.square(y - outputs), _tasks.unexplained,
        "variance not explained (%)"),
    "tokens": _tasks.Task(
        _tasks.split_tokens, lambda: keras.Sequential([
            keras.Input((64,), dtype="int32"), layers.Embedding(64 * 17, 16),
            layers.GlobalAveragePooling1D(), layers.Dense(32, "relu"),
            layers.Dense(10)]),
        *_tasks.CLASSES),
    "text": _tasks.Task(
        _split_text, lambda: keras.Sequential([
            keras.Input((_WINDOW,), dtype="int32"),
            layers.Embedding(len(_LETTERS), 16), layers.Flatten(),
            layers.Dense(128, "relu"), layers.Dense(len(_LETTERS))]),
        _tasks.cross_entropy, _tasks.perplexity, "perplexity of a character"),
}


class Trainer:
  """Trains a model for one contender, several times, traced once."""

  def __init__(self, task, split, contender, steps):
    self._task, self._split, self._contender = task, split, contender
    self._steps, self._warmup = steps, max(1, round(_WARMUP * steps))
    self._model, self._optimizer = model, optimizer = self._make(0)
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
        lambda x: model(x, training=False),
        input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)])

  def _make(self, seed):
    keras.utils.set_random_seed(seed)
    model = self._task.make_model()
    optimizer = make_optimizer(self._contender, self._warmup)
    optimizer.build(model.trainable_variables)
    return model, optimizer

  def _reset(self, seed):
    """Sets weights and state to those of a new model and optimizer."""
    model, optimizer = self._make(seed)
    self._model.set_weights(model.get_weights())
    state = {}
    optimizer.save_own_variables(state)
    self._optimizer.load_own_variables(state)
    if self._contender == _WRAPOPT:
      self._optimizer.seed_averages()

  def run(self, seed, rate, points, part):
    """Trains from the start.

    Args:
      seed: The seed of the weights and of the batches.
      rate: The learning rate, the peak of a schedule.
      points: The numbers of steps after which to evaluate.
      part: The part of the split to evaluate on.

    Returns:
      The errors after these numbers of steps: a list.
    """
    self._reset(seed)
    rng = np.random.default_rng(seed)
    n = len(self._split.training[0])
    batches = rng.integers(n, size=(self._steps, _BATCH), dtype=np.int32)
    rates = rates_of(self._contender, rate, self._steps, self._warmup)
    errors = []
    for begin, end in zip([0, *points], points):
      self._train(batches[begin:end], rates[begin:end])
      errors.append(self._evaluate(getattr(self._split, part)))
    return errors

  def _evaluate(self, data):
    model = self._model
    statistics = [v.numpy() for v in model.non_trainable_variables]
    with (self._optimizer.averaged_weights(model)
          if self._contender == _WRAPOPT else contextlib.nullcontext()):
      wrapopt.keras.recalibrate_batch_norm(model, self._calibration)
      error = self._task.error_of(self._predict, data)
    for v, value in zip(model.non_trainable_variables, statistics, strict=True):
      v.assign(value)
    return error


def compare(name, rates, tuning_seeds, seeds, points, files, progress):
  """Trains a task with all contenders.

  Args:
    name: The name of the task.
    rates: The learning rates to choose from.
    tuning_seeds: The seeds of the runs that choose.
    seeds: The number of seeds of the runs that are measured.
    points: The numbers of steps after which to evaluate; the last is the
      number of steps.
    files: The number of files of the standard library to read.
    progress: A progress bar, which moves by one for each run.

  Returns:
    {contender: {"rate": the chosen one, "validation": {rate: error},
    "errors": the errors on held-out data after `points`, of each seed}}.
  """
  task = TASKS[name]
  split = task.load(files)
  found = {}
  for contender in CONTENDERS:
    progress.set_postfix_str(f"{name}: {contender}")
    trainer = Trainer(task, split, contender, points[-1])

    def run_all(seeds, *args, trainer=trainer):
      errors = [trainer.run(seed, *args) for seed in seeds]
      progress.update(len(seeds))
      return errors

    rate, validation = _tasks.least(rates, lambda rate, run_all=run_all: float(
        np.mean(run_all(tuning_seeds, rate, points[-1:], "validation"))))
    found[contender] = {
        "rate": rate, "validation": validation,
        "errors": run_all(range(seeds), rate, points, "held_out")}
  return found


def run(out="results/schedule_free", steps=1200, tasks=tuple(TASKS), seeds=3,
        quick=False):
  points = _command.points(steps, 4 if quick else 12)
  rates = (0.003, 0.01) if quick else (
      0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
  tuning_seeds = (1000,) if quick else (1000, 1001)
  runs = len(rates) * len(tuning_seeds) + seeds
  with _extras.load("tqdm").tqdm(
      total=len(tasks) * len(CONTENDERS) * runs) as progress:
    found = {name: compare(name, rates, tuning_seeds, seeds, points,
                           12 if quick else 120, progress) for name in tasks}

  shown = [i for i, point in enumerate(points)
           if point in {steps // part for part in _AT}]
  for name, rows in found.items():

    def cells(row):
      errors = np.array(row["errors"])
      # It might be better beyond the grid.
      edge = "*" if row["rate"] in (rates[0], rates[-1]) else ""
      return [*(f"{x:.2f}" for x in errors.mean(axis=0)[shown]),
              f"{errors[:, -1].min():.2f} - {errors[:, -1].max():.2f}",
              f"{row['rate']:g}{edge}"]

    _command.print_table(
        f"{name}: {TASKS[name].label}, held out (*: the end of the grid)",
        ["after steps", *(points[i] for i in shown), "least - largest", "rate"],
        [[contender, *cells(row)] for contender, row in rows.items()])
  path = os.path.join(out, "curves.png")
  _plots.draw_curves(
      path, "held-out error; band: the least and the largest of the seeds",
      "optimizer steps", [_plots.Panel(name, TASKS[name].label, {
          contender: (points, row["errors"], _STYLES[contender])
          for contender, row in rows.items()})
                          for name, rows in found.items()])
  print(path)
  return {"rates": rates, "tuning_seeds": tuning_seeds, "points": points,
          "tasks": found}


def main(argv=None):
  _command.main("schedule_free", __doc__, argv, run)


if __name__ == "__main__":
  main()
