"""Trains embeddings that predict the next word, and averages them.

Like a recommender, the model predicts the next item from the last ones. The
words are those of the docstrings in Python's standard library. The last words,
alone and combined, are hashed to the rows of a table of 262,144 rows. From the
sum of these rows, the model computes a score for each of the 2,000 most
frequent words.

`wrapopt.keras.LazyAdam` inside `wrapopt.keras.MovingAverage` trains the table
and averages it. Both cost only the rows that a batch touches: `python -m
wrapopt.bench embedding --modes keras --optimizers LazyAdam` measures it.
Validation uses the averages, with the callback `EvaluateWithAverages`. At the
end the model holds the averages, and a plain Keras model loads their file.
"""

import itertools

import keras
import numpy as np

from wrapopt.examples import _report
from wrapopt.examples import _tasks
from wrapopt.examples import keras_digits
import wrapopt.keras

_ROWS, _WIDTH = 2**18, 64
_VOCABULARY = 2000  # Including one entry for all other words.
# The combinations of last words, counted backwards from 1, that are looked up.
_FEATURES = ((1,), (2,), (3,), (1, 2), (1, 2, 3))
MEASURES = {
    "perplexity": lambda logs: float(np.exp(logs["loss"])),
    "words among the first ten (%)": lambda logs: 100 * logs["hits"]}


def run(out="results/embeddings", steps=3000, files=10000, seed=0):
  keras.utils.set_random_seed(seed)
  documents = _tasks.read_documents(files)
  data, held_out = make_samples(documents, seed)
  model = _tasks.compiled(
      make_model(), wrapopt.keras.MovingAverage(
          wrapopt.keras.LazyAdam(0.01), 0.995, dynamic_decay=True),
      keras.metrics.SparseTopKCategoricalAccuracy(10, name="hits"),
      jit_compile=False)
  rows = keras_digits.fit(model, _tasks.dataset(data, 256, seed), held_out,
                          steps, 20)
  _tasks.show_curve(
      rows, MEASURES, "the next word in the standard library's documentation",
      out, (0.05, 0.95))
  keras_digits.save(model, make_model(), out, held_out[0][:4096])
  return {"curve": rows,
          "lazy": model.optimizer.is_lazy(model.layers[0].embeddings),
          "documents": len(documents),
          "words": {"trained_on": len(data[0]), "held_out": len(held_out[0])},
          "trained_rows": len(np.unique(data[0]))}


def make_model():
  return _tasks.make_embedded(len(_FEATURES), _ROWS, _WIDTH, _VOCABULARY)


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
  numbers = _tasks.numbers_of(itertools.chain(*documents[n_held_out:]))

  def samples(documents):
    longest = max(map(max, _FEATURES))
    # Word 0 precedes a document and replaces unknown words.
    last, words = _tasks.windows(longest, *(
        [0] * longest + [numbers.get(w, 0) for w in d] for d in documents))
    rows = [_hash(i, *(last[:, -back] for back in feature))
            for i, feature in enumerate(_FEATURES)]
    return (np.stack(rows, axis=1),
            np.where(words < _VOCABULARY, words, 0).astype(np.int32))

  return samples(documents[n_held_out:]), samples(documents[:n_held_out])


def _hash(feature, *words):
  """The rows of the table for a feature, from arrays of its word numbers."""
  result = np.full(words[0].shape, feature, np.uint64)
  for word in words:
    result = (result ^ word.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    result ^= result >> np.uint64(29)
  return (result % np.uint64(_ROWS)).astype(np.int32)


main = _report.command("embeddings", __doc__, run)

if __name__ == "__main__":
  main()
