"""Trains embeddings that predict the next word, and averages them.

Like a recommender, the model predicts the next item from the last ones. The
words are those of the docstrings in Python's standard library. The last words,
alone and combined, are hashed to the rows of a table of 262,144 rows. From the
sum of these rows, the model computes a score for each of the 2,000 most
frequent words.

`wrapopt.keras.LazyAdam` inside `wrapopt.keras.MovingAverage` trains the table
and averages it. Both cost only the rows that a batch touches. Validation uses
the averages, with the callback `EvaluateWithAverages`. At the end the model
holds the averages, and a plain Keras model loads their file. Last, the example
compares the times of a step with this average, without one, and with Keras's
`use_ema`.
"""

import ast
import collections
import itertools
import os
import re
import statistics
import sys
import sysconfig
import time

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt.bench import harness
from wrapopt.examples import _command
from wrapopt.examples import _results
import wrapopt.keras

_ROWS, _WIDTH = 2**18, 64
_VOCABULARY = 2000  # Including one entry for all other words.
# The combinations of last words, counted backwards from 1, that are looked up.
_FEATURES = ((1,), (2,), (3,), (1, 2), (1, 2, 3))
_BATCH = 256
_LEARNING_RATE = 0.01
_DECAY = 0.995
_EVALUATIONS = 20
_HITS = "hits"  # The share of samples whose word is among the first ten.
_TIMED = _NO_AVERAGE, _WRAPOPT, _USE_EMA = (
    "no average", "wrapopt.keras.MovingAverage", "use_ema")


def read_documents(limit=None):
  """The docstrings of the standard library, as lists of words.

  Args:
    limit: The number of source files to read; by default all.
  """
  root = sysconfig.get_path("stdlib")
  paths = []
  for folder, folders, files in os.walk(root):
    # Skip other installed packages, and files with hardly any words.
    folders[:] = sorted(set(folders) - {
        "__pycache__", "dist-packages", "idle_test", "site-packages", "test",
        "tests"})
    paths += [os.path.join(folder, name) for name in sorted(files)
              if name.endswith(".py")]
  documents = []
  with _extras.load("tqdm").tqdm(paths[:limit], unit="file",
                                 file=sys.stderr) as progress:
    for path in progress:
      with open(path, "rb") as f:
        try:
          tree = ast.parse(f.read())
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


def make_samples(documents, seed):
  """The documents as ((rows, words) to train on, (rows, words) held out).

  Args:
    documents: Lists of words.
    seed: The seed of the split.

  Returns:
    Two pairs of arrays. For each word, `rows` has the rows of the table for the
    words before it, and `words` its number in the vocabulary, 0 for others.
  """
  order = np.random.default_rng(seed).permutation(len(documents))
  documents = [documents[i] for i in order]
  n_held_out = len(documents) // 10
  counts = collections.Counter(
      itertools.chain.from_iterable(documents[n_held_out:]))
  numbers = {word: i + 1 for i, (word, _) in enumerate(counts.most_common())}

  def samples(documents):
    longest = max(max(f) for f in _FEATURES)
    # Word 0 precedes a document and replaces unknown words.
    words = np.array([n for document in documents for n in (
        *[0] * longest, *(numbers.get(word, 0) for word in document))])
    starts = np.cumsum([0, *(longest + len(d) for d in documents[:-1])])
    is_word = np.ones(len(words), bool)
    for i in range(longest):
      is_word[starts + i] = False
    at = np.flatnonzero(is_word)
    rows = [_hash(i, *(words[at - back] for back in feature))
            for i, feature in enumerate(_FEATURES)]
    return (np.stack(rows, axis=1),
            np.where(words[at] < _VOCABULARY, words[at], 0).astype(np.int32))

  return samples(documents[n_held_out:]), samples(documents[:n_held_out])


def _hash(feature, *words):
  """The rows of the table for a feature, from arrays of its word numbers."""
  result = np.full(words[0].shape, feature, np.uint64)
  for word in words:
    result = ((result ^ word.astype(np.uint64)) *
              np.uint64(0x9E3779B97F4A7C15))
    result ^= result >> np.uint64(29)
  return (result % np.uint64(_ROWS)).astype(np.int32)


def make_model():
  layers = keras.layers
  return keras.Sequential([
      keras.Input((len(_FEATURES),), dtype="int32"),
      layers.Embedding(_ROWS, _WIDTH),
      layers.GlobalAveragePooling1D(),
      layers.Dense(_VOCABULARY),
  ])


def _compiled(optimizer):
  model = make_model()
  model.compile(
      optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=[keras.metrics.SparseTopKCategoricalAccuracy(10, name=_HITS)],
      jit_compile=False)
  return model


class Curve(keras.callbacks.Callback):
  """Shows progress, and also evaluates the raw weights.

  Attributes:
    rows: A list of dicts: the step, and for the raw and the averaged weights
      the perplexity and the share of hits.
  """

  def __init__(self, held_out, progress):
    super().__init__()
    self.rows = []
    self._held_out, self._progress = held_out, progress

  def on_train_batch_end(self, batch, logs=None):
    self._progress.update()

  def on_epoch_end(self, epoch, logs=None):
    # `val_` is for the averages; this call has no callback, so it is for the
    # raw weights.
    raw = self.model.evaluate(*self._held_out, batch_size=4096, verbose=0,
                              return_dict=True)
    self.rows.append({
        "step": int(self.model.optimizer.iterations.numpy()),
        "raw_perplexity": float(np.exp(raw["loss"])),
        "averaged_perplexity": float(np.exp(logs["val_loss"])),
        "raw_hits": raw[_HITS],
        "averaged_hits": logs["val_" + _HITS]})
    self._progress.set_postfix(
        raw=f"{self.rows[-1]['raw_perplexity']:.1f}",
        averaged=f"{self.rows[-1]['averaged_perplexity']:.1f}")


def train(data, held_out, steps, seed):
  """Trains a model.

  Args:
    data: (rows, words) to train on.
    held_out: (rows, words) to evaluate on.
    steps: The number of optimizer steps.
    seed: The seed of the initial weights and the batches.

  Returns:
    The model, and the rows of its `Curve`.
  """
  keras.utils.set_random_seed(seed)
  batches = tf.data.Dataset.from_tensor_slices(data).shuffle(
      len(data[0]), seed=seed).repeat().batch(_BATCH)
  model = _compiled(wrapopt.keras.MovingAverage(
      wrapopt.keras.LazyAdam(_LEARNING_RATE), _DECAY, dynamic_decay=True))
  evaluations = min(_EVALUATIONS, steps)
  with _extras.load("tqdm").tqdm(total=steps, unit="step",
                                 file=sys.stderr) as progress:
    curve = Curve(held_out, progress)
    model.fit(batches, epochs=evaluations, steps_per_epoch=steps // evaluations,
              validation_data=held_out, validation_batch_size=4096,
              shuffle=False, verbose=0,
              callbacks=[wrapopt.keras.EvaluateWithAverages(), curve])
  return model, curve.rows


def time_steps(data, n_rounds):
  """Milliseconds of a training step, for each way of averaging."""
  batches = [tuple(map(tf.constant, (x[i:i + _BATCH] for x in data)))
             for i in range(0, len(data[0]) - _BATCH + 1, _BATCH)][:500]
  lazy_adam = lambda **kwargs: wrapopt.keras.LazyAdam(_LEARNING_RATE, **kwargs)
  optimizers = {
      _NO_AVERAGE: lazy_adam(),
      _WRAPOPT: wrapopt.keras.MovingAverage(lazy_adam(), _DECAY),
      _USE_EMA: lazy_adam(use_ema=True, ema_momentum=_DECAY),
  }
  steps = {}
  for name, optimizer in optimizers.items():
    model = _compiled(optimizer)
    optimizer.build(model.trainable_variables)
    # The function that `fit` calls, without an iterator.
    function = tf.function(model.train_step, reduce_retracing=True)
    steps[name] = (lambda function=function, batches=itertools.cycle(batches):
                   function(next(batches)))
  seconds = harness.alternate(steps, n_rounds, "a step")
  return {name: 1e3 * statistics.median(times)
          for name, times in seconds.items()}


def plot(curve, path):
  """Draws the quality on held-out words, raw and averaged, over the steps."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  figure, axes = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
  steps = [row["step"] for row in curve]
  for ax, what, label, factor in (
      (axes[0], "perplexity", "held-out perplexity", 1),
      (axes[1], "hits", "held-out words among the first ten (%)", 100)):
    for weights, color in (("raw", "tab:orange"), ("averaged", "tab:blue")):
      ax.plot(steps, [factor * row[f"{weights}_{what}"] for row in curve],
              marker=".", color=color, label=f"{weights} weights")
    ax.set_xlabel("optimizer steps")
    ax.set_ylabel(label)
    ax.grid(alpha=0.3)
  # Shows the lower range; the first steps may be far above.
  shown = [row[f"{w}_perplexity"] for row in curve for w in ("raw", "averaged")]
  axes[0].set_ylim(0.95 * min(shown), 1.05 * np.quantile(shown, 0.9))
  axes[0].legend(loc="upper right")
  figure.suptitle("the next word in the standard library's documentation, "
                  f"LazyAdam, averages of decay {_DECAY}")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def print_table(curve, held_out):
  """Prints some rows of a curve, including the last."""
  print(f"\n{held_out:,} held-out words: perplexity, and how many are among "
        "the first ten")
  print(f"{'step':>8}  {'raw':>8}  {'averaged':>8}  {'raw':>8}  "
        f"{'averaged':>8}")
  stride = max(1, len(curve) // 8)
  for row in curve[::-1][::stride][::-1]:
    print(f"{row['step']:>8}  {row['raw_perplexity']:>8.1f}  "
          f"{row['averaged_perplexity']:>8.1f}  {row['raw_hits']:>8.2%}  "
          f"{row['averaged_hits']:>8.2%}")


def main(argv=None):
  start = time.perf_counter()
  parser = _command.parser("embeddings", __doc__)
  parser.add_argument("--steps", type=_command.count, default=3000,
                      help="steps of the optimizer; default %(default)s")
  parser.add_argument("--files", type=_command.count, metavar="N",
                      help="read N source files only; default all")
  _command.add_out(parser, "embeddings")
  _command.add_seed(parser)
  options = parser.parse_args(argv)
  _command.prepare(options.out, "matplotlib", "tqdm")

  documents = read_documents(options.files)
  data, held_out = make_samples(documents, options.seed)
  model, curve = train(data, held_out, options.steps, options.seed)
  table = model.layers[0].embeddings
  weights = os.path.join(options.out, "averaged.weights.h5")
  model.save_weights(weights)
  plain = make_model()
  plain.load_weights(weights)
  averaged_logits, restored_logits = (
      m.predict(held_out[0][:4096], verbose=0) for m in (model, plain))
  if not np.array_equal(restored_logits, averaged_logits):
    off = np.abs(restored_logits - averaged_logits).max()
    sys.exit(f"The model restored from {weights} is not the averaged one: "
             f"logits differ by {off}")
  steps_taken = int(model.optimizer.iterations.numpy())
  lazy = model.optimizer.is_lazy(table)
  del model, plain, table
  keras.utils.clear_session()
  milliseconds = time_steps(data, 5)

  curves = os.path.join(options.out, "curves.png")
  plot(curve, curves)
  results = {
      **{key: value for key, value in curve[-1].items() if key != "step"},
      "steps": steps_taken,
      "seed": options.seed,
      "lazy": lazy,
      "milliseconds": milliseconds,
      "seconds": round(time.perf_counter() - start, 2),
      "documents": len(documents),
      "words": {"trained_on": len(data[0]), "held_out": len(held_out[0])},
      "table": {"rows": _ROWS, "width": _WIDTH,
                "trained_rows": len(np.unique(data[0]))},
      "curve": curve,
  }
  results_path = _results.write(options.out, results, tf, keras, np)

  print_table(curve, len(held_out[0]))
  print(f"\na step of {_BATCH} samples, {_BATCH * len(_FEATURES):,} indices of "
        f"a table of {_ROWS:,} x {_WIDTH}")
  for name, ms in milliseconds.items():
    print(f"{name:<28}  {ms:>8.2f} ms  "
          f"{ms / milliseconds[_NO_AVERAGE]:>6.2f} x")
  print("\nThe averaged model, loaded by plain Keras: logits equal bit for "
        "bit.")
  print(f"{curves}\n{results_path}\n{weights}")


if __name__ == "__main__":
  main()
