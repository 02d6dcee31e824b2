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

from collections.abc import Callable
import contextlib
import itertools
import os
import sys
import time
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from wrapopt import _extras
from wrapopt.examples import _command
from wrapopt.examples import _results
from wrapopt.examples import embeddings
import wrapopt.keras

_BATCH = 32
_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_WARMUP = 0.05  # The part of the steps in which the rate rises.
_TUNING_SEEDS = (1000, 1001)
_EVALUATIONS = 12
_AT = (4, 2, 1)  # The table has the steps divided by these.
_FILES = 120  # Of the standard library.
_LETTERS = " abcdefghijklmnopqrstuvwxyz"
_WINDOW = 12  # Characters from which the next one is predicted.

_CONSTANT, _COSINE, _KERAS, _WRAPOPT = (
    "Adam, constant", "Adam, cosine", "Keras ScheduleFreeAdamW, y",
    "wrapopt ScheduleFree, x")
_COLORS = {_CONSTANT: "tab:gray", _COSINE: "tab:green", _KERAS: "tab:orange",
           _WRAPOPT: "tab:blue"}
CONTENDERS = tuple(
    contender for contender in _COLORS
    # Older versions of Keras 3 lack it.
    if contender != _KERAS or hasattr(keras.optimizers, "ScheduleFreeAdamW"))


class Split(NamedTuple):
  """The (inputs, targets) of a task, to train, to tune and to measure on."""
  training: tuple
  validation: tuple
  held_out: tuple


class Task(NamedTuple):
  """A task.

  Attributes:
    load: A function of the number of files of the standard library that
      returns a Split.
    make_model: A function that makes a Keras model.
    loss: A function of targets and outputs: the loss of each sample.
    error: A function of targets, outputs and the mean loss: the error.
    label: What the error is.
  """
  load: Callable[[int], Split]
  make_model: Callable[[], keras.Model]
  loss: Callable
  error: Callable
  label: str


def _split(x, y):
  """Half of the samples to train on, a sixth to tune, a third to measure."""
  order = np.random.default_rng(0).permutation(len(x))
  parts = np.split(order, [len(x) // 2, len(x) * 2 // 3])
  return Split(*((x[part], y[part]) for part in parts))


def _load_digits(_):
  images, labels = _extras.load("sklearn.datasets").load_digits(return_X_y=True)
  return _split((images.reshape(-1, 8, 8, 1) / 16).astype(np.float32),
                labels.astype(np.int32))


def _load_tokens(_):
  images, labels = _extras.load("sklearn.datasets").load_digits(return_X_y=True)
  # Each pixel has 17 values, and rows of the table of its own.
  return _split(images.astype(np.int32) + 17 * np.arange(64, dtype=np.int32),
                labels.astype(np.int32))


def _load_diabetes(_):
  x, y = _extras.load("sklearn.datasets").load_diabetes(return_X_y=True)
  split = _split(x, y)
  (mean, std), (y_mean, y_std) = (
      (a.mean(axis=0), a.std(axis=0)) for a in split.training)
  return Split(*(
      (((x - mean) / std).astype(np.float32),
       ((y - y_mean) / y_std).astype(np.float32)[:, np.newaxis])
      for x, y in split))


def _load_text(files):
  text = " ".join(itertools.chain.from_iterable(
      embeddings.read_documents(files)))
  numbers = np.array([_LETTERS.index(c) for c in text], np.int32)

  def samples(numbers):
    windows = np.lib.stride_tricks.sliding_window_view(numbers, _WINDOW + 1)
    return windows[:, :-1].copy(), windows[:, -1].copy()

  # Neighbours overlap, so that parts of the text must be split.
  ends = [len(numbers) * 8 // 10, len(numbers) * 9 // 10]
  training, *others = map(samples, np.split(numbers, ends))
  return Split(training, *((x[:20000], y[:20000]) for x, y in others))


def _make_mlp():
  return keras.Sequential([
      keras.Input((8, 8, 1)), keras.layers.Flatten(),
      keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])


def _make_convolutions():
  layers = keras.layers
  convolution = lambda filters: [
      layers.Conv2D(filters, 3, padding="same", use_bias=False),
      layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]
  return keras.Sequential([
      keras.Input((8, 8, 1)), *convolution(8), *convolution(16),
      layers.Flatten(), layers.Dense(10)])


def _make_regression():
  return keras.Sequential([
      keras.Input((10,)), keras.layers.Dense(16, "relu"),
      keras.layers.Dense(1)])


def _make_embedding():
  return keras.Sequential([
      keras.Input((64,), dtype="int32"), keras.layers.Embedding(64 * 17, 16),
      keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(32, "relu"),
      keras.layers.Dense(10)])


def _make_language_model():
  return keras.Sequential([
      keras.Input((_WINDOW,), dtype="int32"),
      keras.layers.Embedding(len(_LETTERS), 16), keras.layers.Flatten(),
      keras.layers.Dense(128, "relu"), keras.layers.Dense(len(_LETTERS))])


def _cross_entropy(y, outputs):
  return tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)


def _wrong(y, outputs, loss):
  del loss
  return 100 * np.mean(np.argmax(outputs, axis=-1) != y)


def _unexplained(y, outputs, loss):
  del outputs
  return 100 * loss / np.var(y)


def _perplexity(y, outputs, loss):
  del y, outputs
  return np.exp(loss)


_CLASSES = (_cross_entropy, _wrong, "wrong (%)")
TASKS = {
    "digits": Task(_load_digits, _make_mlp, *_CLASSES),
    "digits_conv": Task(_load_digits, _make_convolutions, *_CLASSES),
    "diabetes": Task(_load_diabetes, _make_regression,
                     lambda y, outputs: tf.square(y - outputs),
                     _unexplained, "variance not explained (%)"),
    "tokens": Task(_load_tokens, _make_embedding, *_CLASSES),
    "text": Task(_load_text, _make_language_model, _cross_entropy, _perplexity,
                 "perplexity of a character"),
}


def _make_optimizer(contender, warmup):
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


class Trainer:
  """Trains a model for one contender, several times, traced once."""

  def __init__(self, task, split, contender, steps):
    self._task, self._split, self._contender = task, split, contender
    self._steps, self._warmup = steps, max(1, round(_WARMUP * steps))
    self._starts = {}  # {seed: (weights, state of the optimizer)}
    self._model, self._optimizer = self._make(0)
    self._calibration = list(tf.data.Dataset.from_tensor_slices(
        split.training[0]).batch(256))
    x, y = split.training
    x, y = tf.constant(x), tf.constant(y)
    model, optimizer = self._model, self._optimizer

    # Of any number of batches or samples: traced once.
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

    self._train = train.get_concrete_function()
    self._predict = tf.function(
        lambda x: model(x, training=False)).get_concrete_function(
            tf.TensorSpec([None, *x.shape[1:]], x.dtype))

  def _make(self, seed):
    keras.utils.set_random_seed(seed)
    model = self._task.make_model()
    optimizer = _make_optimizer(self._contender, self._warmup)
    optimizer.build(model.trainable_variables)
    return model, optimizer

  def _reset(self, seed):
    """Sets weights and state to those of a new model and optimizer."""
    if seed not in self._starts:
      model, optimizer = self._make(seed)
      state = {}
      optimizer.save_own_variables(state)
      self._starts[seed] = model.get_weights(), state
    weights, state = self._starts[seed]
    self._model.set_weights(weights)
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
    errors, done = [], 0
    for point in points:
      self._train(tf.constant(batches[done:point]),
                  tf.constant(rates[done:point]))
      errors.append(self._evaluate(getattr(self._split, part)))
      done = point
    return errors

  def _evaluate(self, data):
    model = self._model
    statistics = [v.numpy() for v in model.non_trainable_variables]
    with contextlib.ExitStack() as stack:
      if self._contender == _WRAPOPT:
        stack.enter_context(self._optimizer.averaged_weights(model))
      wrapopt.keras.recalibrate_batch_norm(model, self._calibration)
      x, y = data
      outputs = self._predict(tf.constant(x))
      loss = tf.reduce_mean(self._task.loss(y, outputs))
      error = self._task.error(y, outputs.numpy(), loss.numpy())
    for v, value in zip(model.non_trainable_variables, statistics, strict=True):
      v.assign(value)
    return float(error)


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

    def run(*args, trainer=trainer):
      errors = trainer.run(*args)
      progress.update()
      return errors

    validation = {
        rate: float(np.mean([run(seed, rate, points[-1:], "validation")
                             for seed in tuning_seeds]))
        for rate in rates}
    # A run that diverges has a loss that is not a number.
    rate = min(rates, key=lambda r: np.nan_to_num(validation[r], nan=np.inf))
    found[contender] = {
        "rate": rate, "validation": validation,
        "errors": [run(seed, rate, points, "held_out")
                   for seed in range(seeds)]}
  return found


def print_table(results, points, rates):
  """Prints means, and the range at the end, after some numbers of steps."""
  shown = sorted({points[-1] // part for part in _AT} & set(points))
  for name, found in results.items():
    print(f"\n{name}: {TASKS[name].label}, held out")
    print("after steps".ljust(28) + "".join(f"{p:>8}" for p in shown) +
          "      least - largest      rate")
    for contender, row in found.items():
      errors = np.array(row["errors"])
      means = errors.mean(axis=0)
      last = errors[:, -1]
      # It might be better beyond the grid.
      edge = "*" if row["rate"] in (min(rates), max(rates)) else ""
      print(contender.ljust(28) +
            "".join(f"{means[points.index(p)]:>8.2f}" for p in shown) +
            f"{last.min():>11.2f} - {last.max():<7.2f}{row['rate']:>10g}{edge}")
  print("\n* the end of the grid of rates")


def plot(results, points, path):
  """Draws the held-out errors over the steps, with a panel for each task."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
  axes = axes.flat
  for ax, (name, found) in zip(axes, results.items()):
    for contender, row in found.items():
      color = _COLORS[contender]
      errors = np.array(row["errors"])
      ax.plot(points, errors.mean(axis=0), color=color, marker=".",
              label=contender)
      ax.fill_between(points, errors.min(axis=0), errors.max(axis=0),
                      color=color, alpha=0.15, linewidth=0)
    # The first errors are far above.
    errors = np.array([row["errors"] for row in found.values()])
    least, top = errors.min(), np.quantile(errors.mean(axis=1), 0.85)
    room = 0.1 * (top - least) or 1
    ax.set_ylim(least - room, top + room)
    ax.set_title(name)
    ax.set_xlabel("optimizer steps")
    ax.set_ylabel(TASKS[name].label)
    ax.grid(alpha=0.3)
  lines = axes[0].get_legend_handles_labels()
  for ax in axes[len(results):]:
    ax.axis("off")
  figure.legend(*lines, loc="lower right", borderaxespad=3)
  figure.suptitle("held-out error; band: the least and the largest of the "
                  "seeds")
  figure.savefig(path, dpi=100)
  plt.close(figure)


def main(argv=None):
  start = time.perf_counter()
  parser = _command.parser("schedule_free", __doc__)
  parser.add_argument("--steps", type=_command.count, default=1200,
                      help="steps of the optimizer; default %(default)s")
  _command.add_tasks(parser, TASKS)
  parser.add_argument("--quick", action="store_true",
                      help="two learning rates, tuned with one seed, four "
                      "evaluations and a short text: to see that it runs")
  _command.add_out(parser, "schedule_free")
  options = parser.parse_args(argv)
  _command.prepare(options.out, "matplotlib", "sklearn", "tqdm")

  rates, tuning_seeds = _RATES, _TUNING_SEEDS
  files, evaluations = _FILES, _EVALUATIONS
  if options.quick:
    rates, tuning_seeds = (0.003, 0.01), _TUNING_SEEDS[:1]
    files, evaluations = 12, 4
  steps = options.steps
  points = _command.evaluation_points(steps, evaluations)
  tasks = list(dict.fromkeys(options.tasks))
  runs = len(rates) * len(tuning_seeds) + options.seeds
  with _extras.load("tqdm").tqdm(
      total=len(tasks) * len(CONTENDERS) * runs, unit="run",
      file=sys.stderr) as progress:
    results = {name: compare(name, rates, tuning_seeds, options.seeds, points,
                             files, progress)
               for name in tasks}
  curves = os.path.join(options.out, "curves.png")
  plot(results, points, curves)
  results_path = _results.write(
      options.out, {
          "steps": steps, "seeds": options.seeds, "batch": _BATCH,
          "rates": rates, "tuning_seeds": tuning_seeds, "points": points,
          "tasks": results,
          "seconds": round(time.perf_counter() - start, 2),
      }, tf, keras, np, _extras.load("sklearn"))
  print_table(results, points, rates)
  print(f"\n{curves}\n{results_path}")


if __name__ == "__main__":
  main()
