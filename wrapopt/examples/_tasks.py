"""Data sets, models and errors of the examples."""

import ast
import collections
from collections.abc import Callable
import contextlib
import itertools
import pathlib
import re
import sys
import sysconfig
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from wrapopt import _extras
from wrapopt.examples import _report

tf1 = tf.compat.v1
layers = keras.layers
cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits


def load_scans():
  """The 1,797 scans of digits: images and labels."""
  digits = _extras.load("sklearn.datasets").load_digits()
  return ((digits.images[..., np.newaxis] / 16).astype(np.float32),
          digits.target.astype(np.int32))


def load_digits(seed):
  """The scans as ((images, labels) to train on, (images, labels) held out)."""
  images, labels = load_scans()
  train_x, test_x, train_y, test_y = _extras.load(
      "sklearn.model_selection").train_test_split(
          images, labels, test_size=1 / 3, random_state=seed, stratify=labels)
  return (train_x, train_y), (test_x, test_y)


def accuracy_of(outputs, labels):
  return float(np.mean(np.argmax(outputs, axis=-1) == labels))


def batches(data, size, seed):
  """Random batches, for ever."""
  rng = np.random.default_rng(seed)
  while True:
    batch = rng.choice(len(data[0]), size, replace=False)
    yield tuple(x[batch] for x in data)


def dataset(data, size, seed):
  """Random batches, for ever, as a data set for `fit`."""
  return tf.data.Dataset.from_tensor_slices(data).shuffle(
      data[0].shape[0], seed=seed).repeat().batch(size)


# The net of the digits, in TensorFlow 1 and in Keras.


def logits_of(images):
  """A net of two convolutions and two dense layers, [batch, 8, 8, 1] in."""

  def layer(name, x, *shape):
    with tf1.variable_scope(name):
      kernel = tf1.get_variable(
          "kernel", shape, initializer=tf1.variance_scaling_initializer(2.0))
      bias = tf1.get_variable(
          "bias", shape[-1:], initializer=tf1.zeros_initializer())
      return bias + (tf.matmul(x, kernel) if len(shape) == 2 else
                     tf.nn.conv2d(x, kernel, strides=1, padding="SAME"))

  relu, pool = tf.nn.relu, lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID")
  x = pool(relu(layer("conv1", images, 3, 3, 1, 16)))
  x = pool(relu(layer("conv2", x, 3, 3, 16, 32)))
  x = relu(layer("dense1", tf.reshape(x, [-1, 128]), 128, 64))
  return layer("dense2", x, 64, 10)


class GraphNet:
  """A net in the current graph, and data.

  Attributes:
    loss: The mean loss of a batch.
    samples: The number of samples to train on.
  """

  def __init__(self, data, held_out, size, seed, logits=logits_of,
               record=contextlib.nullcontext):
    """Makes the net.

    Args:
      data: (inputs, labels) to train on.
      held_out: (inputs, labels) to evaluate on.
      size: The size of a batch.
      seed: The seed of the batches.
      logits: A function of inputs that makes the net.
      record: A function that returns the context in which weights are read.
    """
    self._batches = batches(data, size, seed)
    self._held_out, self.samples = held_out, len(data[0])
    self._inputs = x, y = [
        tf1.placeholder(part.dtype, [None, *part.shape[1:]]) for part in data]
    with record():
      self._logits = logits(x)
      self.loss = tf.reduce_mean(cross_entropy(y, self._logits))

  def train(self, session, train_op, steps=1):
    for _ in range(steps):
      session.run(train_op, dict(zip(self._inputs, next(self._batches))))

  def outputs(self, session):
    """The logits of the inputs that are held out."""
    return session.run(self._logits, {self._inputs[0]: self._held_out[0]})

  def accuracy(self, session):
    return accuracy_of(self.outputs(session), self._held_out[1])


def make_net():
  return _make_convolutional((16, 32), lambda n: [
      layers.Conv2D(n, 3, padding="same", activation="relu")], 64, 10)


# Other nets.


def make_normalized(*filters):
  """A net of the digits: convolutions with batch normalizations."""
  return _make_convolutional(filters, lambda n: [
      layers.Conv2D(n, 3, padding="same", use_bias=False),
      layers.BatchNormalization(), layers.ReLU()], 10)


def _make_convolutional(filters, block, *sizes):
  return _stack([keras.Input((8, 8, 1)), *itertools.chain.from_iterable(
      [*block(n), layers.MaxPooling2D()] for n in filters),
                 layers.Flatten()], *sizes)


def make_dense(shape, *sizes):
  return _stack([keras.Input(shape), layers.Flatten()], *sizes)


def make_embedded(length, rows, width, *sizes,
                  join=layers.GlobalAveragePooling1D):
  """Looks up `length` numbers, joins what is found by a layer, then dense."""
  return _stack([keras.Input((length,), dtype="int32"),
                 layers.Embedding(rows, width), join()], *sizes)


def make_letters_net(before):
  """A net that predicts a letter from those before it."""
  return make_embedded(before, len(_LETTERS), 16, 128, len(_LETTERS),
                       join=layers.Flatten)


def _stack(first, *sizes):
  """The layers `first`, and dense layers of these sizes."""
  return keras.Sequential([
      *first, *(layers.Dense(size, "relu") for size in sizes[:-1]),
      layers.Dense(sizes[-1])])


def make_step(strategy, task, make_optimizer, dense=True):
  """A Keras model, and a function of a batch that takes a step, in a strategy.

  Args:
    strategy: The strategy.
    task: A `Task`.
    make_optimizer: A function that makes the optimizer.
    dense: Whether gradients are made dense. It is faster if a batch has more
      letters than the embedding has rows. Keras's Adam moves only the rows that
      a sparse gradient has.

  Returns:
    The model, the optimizer, and a function of inputs and targets.
  """
  with strategy.scope():
    model, optimizer = task.make_model(), make_optimizer()
    variables = model.trainable_variables
    optimizer.build(variables)
  record = getattr(optimizer, "record_step", contextlib.nullcontext)

  def replica(x, y):
    with record(), tf.GradientTape() as tape:  # Before weights are read.
      losses = task.loss(y, model(x, training=True))
      # Keras sums the gradients of the replicas.
      mean = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
    gradients = tape.gradient(mean, [v.value for v in variables])
    optimizer.apply([tf.convert_to_tensor(g) if dense else g
                     for g in gradients], variables)

  return model, optimizer, lambda x, y: strategy.run(replica, (x, y))


# Raw and averaged weights in a training.


def compiled(model, optimizer, metric="accuracy", **how):
  model.compile(
      optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=[metric], **how)
  return model


def progress():
  """A callback with a progress bar."""
  return _extras.load("tqdm.keras").TqdmCallback(verbose=0)


def check_restored(path, restored, averaged):
  """Ends the program if a restored model has other outputs."""
  if not np.array_equal(restored, averaged):
    sys.exit(f"The model restored from {path} is not the averaged one: logits "
             f"differ by {np.abs(restored - averaged).max()}")


def show_curve(rows, measures, title, out, shown):
  """Prints and draws a training.

  Args:
    rows: Dicts: the "step", and the logs of "raw" and "averaged" weights.
    measures: {name: function of logs}.
    title: The title of the figure.
    out: The folder of the figure.
    shown: As in `_report.draw_curves`.
  """
  styles = {"raw": "C1.-", "averaged": "C0.-"}
  steps = [row["step"] for row in rows]
  found = {(name, weights): [measure(row[weights]) for row in rows]
           for name, measure in measures.items() for weights in styles}
  lines = [[step, *map("{:.2f}".format, of_step)]
           for step, *of_step in zip(steps, *found.values())]
  _report.print_table(
      " and ".join(measures), ["step", *list(styles) * len(measures)],
      lines[::-1][::max(1, len(rows) // 8)][::-1])
  _report.draw_curves(out / "curves.png", title, "optimizer steps", [
      ({f"{weights} weights": (steps, found[name, weights], style)
        for weights, style in styles.items()}, {"ylabel": name})
      for name in measures], shown)


# Small tasks on which optimizers are compared.


class Task(NamedTuple):
  """A task.

  Attributes:
    load: A function of the number of files of the standard library that
      returns (inputs, targets) for "training", "validation" and "held_out", or
      a function of a seed that splits the samples.
    make_model: A function that makes a Keras model.
    loss: A function of targets and outputs: the loss of each sample.
    error: A function of targets, outputs and the mean loss: the error.
    label: What the error is.
  """
  load: Callable
  make_model: Callable[[], keras.Model]
  loss: Callable
  error: Callable
  label: str

  def error_of(self, predict, data):
    """The error of `predict`, a function of inputs, on (inputs, targets)."""
    x, y = data
    outputs = predict(tf.constant(x))
    loss = float(tf.reduce_mean(self.loss(y, outputs)))
    return float(self.error(y, outputs.numpy(),
                            loss if np.isfinite(loss) else np.inf))


def _parts(n):
  """The numbers of n samples: half to train on, a sixth, a third to measure."""
  order = np.random.default_rng(0).permutation(n)
  return np.split(order, [n // 2, n * 2 // 3])


def split(x, y, most=None):
  return split_of([(x[part], y[part]) for part in _parts(len(x))], most)


def split_of(parts, most):
  """(inputs, targets) by use; at most so many to tune and to measure on."""
  training, *others = parts
  return {"training": training, **{use: (x[:most], y[:most]) for use, (x, y) in
                                   zip(("validation", "held_out"), others)}}


def _scaled(values):
  """With mean 0 and standard deviation 1 in the samples to train on."""
  training = values[_parts(len(values))[0]]
  return np.float32((values - training.mean(axis=0)) / training.std(axis=0))


def split_scans(_):
  return split(*load_scans())


def split_tokens(_):
  """The scans as 64 tokens: each pixel has 17 values, and rows of its own."""
  images, labels = load_scans()
  return split(np.int32(16 * images).reshape(-1, 64) +
               17 * np.arange(64, dtype=np.int32), labels)


def split_cancer(_):
  """569 tissue samples."""
  x, y = _extras.load("sklearn.datasets").load_breast_cancer(return_X_y=True)
  return split(_scaled(x), y.astype(np.int32))


def split_diabetes(_):
  """442 patients, a regression."""
  x, y = _extras.load("sklearn.datasets").load_diabetes(return_X_y=True)
  return split(_scaled(x), _scaled(y[:, np.newaxis]))


def classes(load, make_model):
  """A `Task` whose targets are classes."""
  return Task(load, make_model, cross_entropy, lambda y, outputs, _: 100 *
              np.mean(np.argmax(outputs, axis=-1) != y), "wrong (%)")


def predictions(what, load, make_model):
  """A `Task` whose targets are words or letters; perplexities to 9999."""
  return Task(load, make_model, cross_entropy, lambda _, outputs, loss: np.exp(
      min(loss, np.log(9999))), f"perplexity of a {what}")


def regression(load, make_model):
  return Task(load, make_model, lambda y, outputs: tf.square(y - outputs),
              lambda y, _, loss: 100 * loss / np.var(y),
              "variance not explained (%)")


_LETTERS = " abcdefghijklmnopqrstuvwxyz"


def letters_of(documents):
  """The numbers of the letters of lists of words."""
  return np.array([_LETTERS.index(c) for words in documents for word in words
                   for c in word + " "], np.int32)


def numbers_of(words, most=None):
  """{word: its number} of the most frequent ones; 0 is for others."""
  return {word: i + 1 for i, (word, _) in enumerate(
      collections.Counter(words).most_common(most))}


def windows(before, *sequences):
  """(the numbers before it, a number) of all numbers but the first ones."""
  found = np.concatenate([
      np.lib.stride_tricks.sliding_window_view(numbers, before + 1)
      for numbers in sequences if len(numbers) > before])
  return found[:, :-1], found[:, -1]


def read_documents(limit=None):
  """The docstrings of the standard library, as lists of words.

  Args:
    limit: The number of source files to read; by default all.
  """
  # Without other installed packages, and files with hardly any words.
  skipped = {"__pycache__", "dist-packages", "idle_test", "site-packages",
             "test", "tests"}
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  paths = sorted((path for path in root.rglob("*.py")
                  if not skipped.intersection(path.relative_to(root).parts)),
                 key=lambda path: (path.parent.parts, path.name))
  documents = {}  # Without duplicates, which could be on both sides of a split.
  for path in _report.progress(paths[:limit], unit="file"):
    with contextlib.suppress(SyntaxError):  # Templates, errors on purpose.
      for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef,
                             ast.AsyncFunctionDef)):
          text = (ast.get_docstring(node) or "").lower()
          documents[tuple(re.findall("[a-z]+", text))] = None
  return [words for words in documents if words]
