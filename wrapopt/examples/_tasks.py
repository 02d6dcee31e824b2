"""Data sets, models and errors of the examples."""

import ast
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
from wrapopt.examples import _command
from wrapopt.examples import _plots

tf1 = tf.compat.v1
layers = keras.layers


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

  x = tf.nn.relu(layer("conv1", images, 3, 3, 1, 16))
  x = tf.nn.max_pool2d(x, 2, 2, "VALID")
  x = tf.nn.relu(layer("conv2", x, 3, 3, 16, 32))
  x = tf.nn.max_pool2d(x, 2, 2, "VALID")
  x = tf.reshape(x, [-1, 2 * 2 * 32])
  x = tf.nn.relu(layer("dense1", x, 2 * 2 * 32, 64))
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
    self._held_out = held_out
    self.samples = len(data[0])
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
  return stack(
      [keras.Input((8, 8, 1)),
       layers.Conv2D(16, 3, padding="same", activation="relu"),
       layers.MaxPooling2D(),
       layers.Conv2D(32, 3, padding="same", activation="relu"),
       layers.MaxPooling2D(), layers.Flatten()], 64, 10)


# Other nets.


def stack(first, *sizes):
  """The layers `first`, and dense layers of these sizes."""
  *hidden, last = sizes
  return keras.Sequential([
      *first, *(layers.Dense(size, "relu") for size in hidden),
      layers.Dense(last)])


def make_normalized(*filters):
  """A net of the digits: convolutions with batch normalizations."""
  convolutions = itertools.chain.from_iterable(
      (layers.Conv2D(n, 3, padding="same", use_bias=False),
       layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D())
      for n in filters)
  return stack([keras.Input((8, 8, 1)), *convolutions, layers.Flatten()], 10)


def make_dense(shape, *sizes):
  return stack([keras.Input(shape), layers.Flatten()], *sizes)


def make_embedded(length, rows, width, join, *sizes):
  """Looks up `length` numbers, joins what is found by a layer, then dense."""
  return stack([keras.Input((length,), dtype="int32"),
                layers.Embedding(rows, width), join], *sizes)


def make_letters_net(before):
  """A net that predicts a letter from those before it."""
  return make_embedded(before, len(_LETTERS), 16, layers.Flatten(), 128,
                       len(_LETTERS))


def step_of(strategy, model, optimizer, loss):
  """A function of inputs and targets that takes a step in a strategy.

  `loss` is as in `Task`.
  """
  record = getattr(optimizer, "record_step", contextlib.nullcontext)
  variables = model.trainable_variables

  def replica(x, y):
    with record(), tf.GradientTape() as tape:  # Before weights are read.
      # Keras sums the gradients of the replicas.
      mean = tf.reduce_mean(loss(y, model(x))) / strategy.num_replicas_in_sync
    gradients = tape.gradient(mean, [v.value for v in variables])
    # Dense, because a batch has more letters than the embedding has rows.
    optimizer.apply([tf.convert_to_tensor(g) for g in gradients], variables)

  return lambda x, y: strategy.run(replica, (x, y))


# Raw and averaged weights in a training.


class Curve(keras.callbacks.Callback):
  """Evaluates the raw weights, beside EvaluateWithAverages.

  Attributes:
    rows: A list of dicts: the step, and the logs of raw and averaged weights.
  """

  def __init__(self, held_out):
    super().__init__()
    self.rows = []
    self._held_out = held_out

  def on_epoch_end(self, epoch, logs=None):
    # `val_` is for the averages; this call has no callback, so it is for the
    # raw weights.
    raw = self.model.evaluate(*self._held_out, batch_size=4096, verbose=0,
                              return_dict=True)
    self.rows.append({
        "step": int(self.model.optimizer.iterations.numpy()), "raw": raw,
        "averaged": {name: logs["val_" + name] for name in raw}})


def progress():
  """A callback with a progress bar."""
  return _extras.load("tqdm.keras").TqdmCallback(verbose=0)


def check_restored(path, restored, averaged):
  """Ends the program if a restored model has other outputs."""
  if not np.array_equal(restored, averaged):
    sys.exit(f"The model restored from {path} is not the averaged one: logits "
             f"differ by {np.abs(restored - averaged).max()}")


def show_curve(rows, measures, title, path, shown):
  """Prints and draws the rows of a `Curve`.

  Args:
    rows: As in `Curve`.
    measures: {name: function of logs}.
    title: The title of the figure.
    path: The path of the figure.
    shown: As in `_plots.draw_curves`.
  """
  stride = max(1, len(rows) // 8)
  _command.print_table(
      " and ".join(measures), ["step", *("raw", "averaged") * len(measures)],
      [[row["step"], *(f"{measure(row[weights]):.2f}"
                       for measure in measures.values()
                       for weights in ("raw", "averaged"))]
       for row in rows[::-1][::stride][::-1]])
  steps = [row["step"] for row in rows]
  _plots.draw_curves(path, title, "optimizer steps", [
      _plots.Panel("", name, {
          f"{weights} weights": (
              steps, [measure(row[weights]) for row in rows], style)
          for weights, style in (("raw", "C1.-"), ("averaged", "C0.-"))})
      for name, measure in measures.items()], shown)


# Small tasks on which optimizers are compared.


class Split(NamedTuple):
  """The (inputs, targets) of a task, to train, to tune and to measure on."""
  training: tuple
  validation: tuple
  held_out: tuple


class Task(NamedTuple):
  """A task.

  Attributes:
    load: A function of the number of files of the standard library that
      returns a Split, or a function of a seed that splits the samples.
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


def split(x, y):
  return Split(*((x[part], y[part]) for part in _parts(len(x))))


def _scaled(values):
  """With mean 0 and standard deviation 1 in the samples to train on."""
  training = values[_parts(len(values))[0]]
  return ((values - training.mean(axis=0)) /
          training.std(axis=0)).astype(np.float32)


def split_scans(_):
  return split(*load_scans())


def split_tokens(_):
  """The scans as 64 tokens: each pixel has 17 values, and rows of its own."""
  images, labels = load_scans()
  return split((16 * images).astype(np.int32).reshape(-1, 64) +
               17 * np.arange(64, dtype=np.int32), labels)


def split_cancer(_):
  """569 tissue samples."""
  x, y = _extras.load("sklearn.datasets").load_breast_cancer(return_X_y=True)
  return split(_scaled(x), y.astype(np.int32))


def split_diabetes(_):
  """442 patients, a regression."""
  x, y = _extras.load("sklearn.datasets").load_diabetes(return_X_y=True)
  return split(_scaled(x), _scaled(y[:, np.newaxis]))


# Arguments of `Task`.
cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
CLASSES = (
    cross_entropy, lambda y, outputs, loss: 100 * np.mean(
        np.argmax(outputs, axis=-1) != y), "wrong (%)")
REGRESSION = (
    lambda y, outputs: tf.square(y - outputs),
    lambda y, outputs, loss: 100 * loss / np.var(y),
    "variance not explained (%)")
# A perplexity is at most 9999.
WORDS = (cross_entropy, lambda y, outputs, loss: np.exp(
    min(loss, np.log(9999))), "perplexity of a word")
LETTERS = (*WORDS[:2], "perplexity of a character")


_LETTERS = " abcdefghijklmnopqrstuvwxyz"


def letters_of(documents):
  """The numbers of the letters of lists of words."""
  return np.array([_LETTERS.index(c) for words in documents for word in words
                   for c in word + " "], np.int32)


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
  documents = []
  for path in _command.progress(paths[:limit], unit="file"):
    try:
      tree = ast.parse(path.read_bytes())
    except SyntaxError:
      continue  # Templates, and files with errors on purpose.
    for node in ast.walk(tree):
      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef,
                           ast.AsyncFunctionDef)):
        words = re.findall("[a-z]+", (ast.get_docstring(node) or "").lower())
        if words:
          documents.append(tuple(words))
  # Without duplicates, which could be on both sides of the split.
  return list(dict.fromkeys(documents))
