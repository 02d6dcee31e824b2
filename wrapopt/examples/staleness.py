"""Compares what asynchronous training may do with old gradients.

M workers train shared weights without waiting for each other. One process
simulates them, so that the delays are exact: each worker holds a gradient of
the weights at which it began. One worker after the other applies its gradient
and begins with the new weights, in turn ("in turn": each gradient misses M - 1
updates), or at random ("random": it misses M - 1 updates in the mean).

Three small models learn real data that need no download:

  digits  scikit-learn's 1,797 scans of digits, in a net of two layers
  cancer  scikit-learn's 569 tissue samples, in a net of two layers
  words   the next word of the standard library's docstrings, from embeddings
          of the three words before it

All train by gradient descent with the same number of gradients:

  asynchronous   without a gate
  dropped        DropStaleGradientOptimizer drops what misses more than M / 2
  scaled         policy="scale": divided by the staleness
  DC-ASGD-a      policy=DelayCompensation(lambda_)
  gap-aware      policy=GapAware()

The learning rate is the one with the least error of one worker (sequential
training) on other data (validation), and lambda_ the one with the least error
of the most workers in turn; of equal ones the largest. Both come from a grid,
with a seed that is not one of the table. The table and the plot have the mean,
the least and the largest error of all seeds. A perplexity of 9999 stands for
any above it.
"""

import os
import sys
import time
from typing import Callable, NamedTuple

import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt.examples import _command
from wrapopt.examples import _results

_BATCH = 16
_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_LAMBDAS = (0.1, 0.5, 2.0)
_TUNING_SEED = 1000
_EVALUATIONS = 12
_WORKERS = (4, 8, 16)
_ORDERS = ("in turn", "random")
_NO_LIMIT = 1 << 30
_VOCABULARY = 800
_CONTEXT = 3
_FILES = 120  # Of the standard library.
_DIVERGED = 9999.0  # The greatest perplexity that is shown.

SEQUENTIAL, ASYNCHRONOUS, DROPPED, SCALED, COMPENSATED, GAP = (
    "sequential", "asynchronous", "dropped", "scaled", "DC-ASGD-a", "gap-aware")
METHODS = (ASYNCHRONOUS, DROPPED, SCALED, COMPENSATED, GAP)
_COLORS = {SEQUENTIAL: "black", ASYNCHRONOUS: "tab:gray", DROPPED: "tab:red",
           SCALED: "tab:orange", COMPENSATED: "tab:blue", GAP: "tab:green"}


class Task(NamedTuple):
  """A task.

  Attributes:
    load: A function that returns (inputs, targets) to train, to tune and to
      measure on.
    shapes: The shapes of the weights, of which vectors begin at zero.
    outputs: A function of weights and inputs: the logits.
    error: A function of targets, logits and the mean loss: the error.
    label: What the error is.
  """
  load: Callable
  shapes: list
  outputs: Callable
  error: Callable
  label: str


def _split(x, y):
  """Half of the samples to train on, a sixth to tune, a third to measure."""
  order = np.random.default_rng(0).permutation(len(x))
  parts = np.split(order, [len(x) // 2, len(x) * 2 // 3])
  return [(x[part], y[part]) for part in parts]


def _load_digits():
  x, y = _extras.load("sklearn.datasets").load_digits(return_X_y=True)
  return _split((x / 16).astype(np.float32), y.astype(np.int32))


def _load_cancer():
  x, y = _extras.load("sklearn.datasets").load_breast_cancer(return_X_y=True)
  parts = _split(x, y.astype(np.int32))
  mean, std = parts[0][0].mean(axis=0), parts[0][0].std(axis=0)
  return [(((x - mean) / std).astype(np.float32), y) for x, y in parts]


def _load_words():
  # Here, because it imports Keras.
  from wrapopt.examples import embeddings  # pylint: disable=g-import-not-at-top
  documents = embeddings.read_documents(_FILES)
  words, counts = np.unique([w for d in documents for w in d],
                            return_counts=True)
  frequent = words[np.argsort(-counts, kind="stable")[:_VOCABULARY - 1]]
  number = {word: i + 1 for i, word in enumerate(frequent)}  # 0: another word.
  samples = [
      [number.get(w, 0) for w in document[i:i + _CONTEXT + 1]]
      for document in documents for i in range(len(document) - _CONTEXT)]
  samples = np.array(samples, np.int32)
  training, *others = _split(samples[:, :-1], samples[:, -1])
  return [training, *((x[:4000], y[:4000]) for x, y in others)]


def _layers(w, x):
  return tf.matmul(tf.nn.relu(tf.matmul(x, w[0]) + w[1]), w[2]) + w[3]


def _embedding(w, x):
  mean = tf.reduce_mean(tf.nn.embedding_lookup(w[0], x), axis=1)
  return tf.matmul(mean, w[1]) + w[2]


def _wrong(y, logits, loss):
  del loss
  return 100 * float(np.mean(np.argmax(logits, axis=-1) != y))


def _perplexity(y, logits, loss):
  del y, logits
  return float(np.exp(min(loss, np.log(_DIVERGED))))


TASKS = {
    "digits": Task(_load_digits, [(64, 32), (32,), (32, 10), (10,)], _layers,
                   _wrong, "wrong (%)"),
    "cancer": Task(_load_cancer, [(30, 16), (16,), (16, 2), (2,)], _layers,
                   _wrong, "wrong (%)"),
    "words": Task(_load_words,
                  [(_VOCABULARY, 16), (16, _VOCABULARY), (_VOCABULARY,)],
                  _embedding, _perplexity, "perplexity of a word"),
}


class Simulation:
  """Trains a model as several workers would, several times, traced once."""

  def __init__(self, task):
    self._task, self._data = task, task.load()
    self._weights = [tf.Variable(np.zeros(shape, np.float32))
                     for shape in task.shapes]

    @tf.function
    def gradients(x, y):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(self._losses(x, y))
      return tape.gradient(loss, self._weights)

    self._gradients = gradients

  def _losses(self, x, y):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        y, self._task.outputs(self._weights, x))

  def error(self, part):
    """The error on the data to tune (1) or to measure (2) on."""
    x, y = self._data[part]
    logits = self._task.outputs(self._weights, x).numpy()
    loss = float(tf.reduce_mean(self._losses(x, y)))
    return self._task.error(
        y, logits, loss if np.isfinite(loss) else np.inf)

  def _make_optimizer(self, method, workers, rate, lambda_, step):
    descent = tf.compat.v1.train.GradientDescentOptimizer(rate)
    if method in (SEQUENTIAL, ASYNCHRONOUS):
      return descent
    policy = {DROPPED: "drop", SCALED: "scale", GAP: wrapopt.GapAware(),
              COMPENSATED: wrapopt.DelayCompensation(lambda_)}[method]
    limit = workers // 2 if method == DROPPED else _NO_LIMIT
    return wrapopt.DropStaleGradientOptimizer(
        descent, limit, policy=policy, global_step=step)

  def run(self, method, workers, order, rate, lambda_, seed, points, part):
    """Trains.

    Args:
      method: One of METHODS, or SEQUENTIAL.
      workers: Their number.
      order: One of the orders.
      rate: The learning rate.
      lambda_: Of the delay compensation.
      seed: Of weights, batches and random orders.
      points: After how many gradients the error is measured, in order.
      part: As in `error`.

    Returns:
      The errors, and the part of the gradients that were dropped.
    """
    rng = np.random.default_rng(seed)
    for w in self._weights:
      w.assign(rng.standard_normal(w.shape) / np.sqrt(w.shape[0])
               if len(w.shape) > 1 else np.zeros(w.shape))
    step = tf.Variable(0, dtype=tf.int64)
    opt = self._make_optimizer(method, workers, rate, lambda_, step)
    is_gated = isinstance(opt, wrapopt.DropStaleGradientOptimizer)
    x, y = self._data[0]

    def begin():
      batch = rng.integers(len(x), size=_BATCH)
      data = tf.constant(x[batch]), tf.constant(y[batch])
      if not is_gated:
        return self._gradients(*data), {}
      with opt.record_step(variables=self._weights) as recorded:
        return self._gradients(*data), {"recorded": recorded}

    errors = []
    held = [begin() for _ in range(workers)]
    for i in range(points[-1]):
      worker = i % workers if order == _ORDERS[0] else rng.integers(workers)
      gradients, record = held[worker]
      opt.apply_gradients(zip(gradients, self._weights), **record)
      held[worker] = begin()
      if i + 1 in points:
        errors.append(self.error(part))
    dropped = float(opt.staleness_stats().drop_rate) if is_gated else 0.0
    return errors, dropped


def _least(candidates, error):
  # A run that diverges has an error that is not a number.
  errors = {c: float(np.nan_to_num(error(c), nan=np.inf)) for c in candidates}
  # Of equal ones the largest, with which delays matter most.
  return min(candidates, key=lambda c: (errors[c], -c)), errors


def compare(name, rates, lambdas, workers, orders, seeds, points, progress):
  """Tunes and trains a task with all methods.

  Args:
    name: One of TASKS.
    rates: The grid of learning rates.
    lambdas: The grid of `lambda_`.
    workers: Numbers of workers.
    orders: Of _ORDERS.
    seeds: The number of seeds.
    points: After how many gradients the error is measured.
    progress: A progress bar, which counts runs.

  Returns:
    A dict for results.json.
  """
  simulation = Simulation(TASKS[name])

  def run(*args):
    progress.set_postfix_str(f"{name}: {args[0]}, {args[1]} workers")
    errors, dropped = simulation.run(*args)
    progress.update()
    return {"errors": errors, "dropped": dropped}

  def last(*args):
    return run(*args, _TUNING_SEED, points[-1:], 1)["errors"][0]

  rate, of_rates = _least(
      rates, lambda r: last(SEQUENTIAL, 1, _ORDERS[0], r, None))
  lambda_, of_lambdas = _least(
      lambdas,
      lambda l: last(COMPENSATED, max(workers), _ORDERS[0], rate, l))

  def train(method, m, order):
    return [run(method, m, order, rate, lambda_, seed, points, 2)
            for seed in range(seeds)]

  return {
      "rate": rate, "lambda": lambda_,
      "validation": {"rate": of_rates, "lambda": of_lambdas},
      SEQUENTIAL: train(SEQUENTIAL, 1, _ORDERS[0]),
      "workers": {order: {m: {method: train(method, m, order)
                              for method in METHODS} for m in workers}
                  for order in orders}}


def _last(runs):
  return np.array([run["errors"][-1] for run in runs])


def print_table(results):
  """Prints means and ranges of the errors at the end."""
  for name, found in results.items():
    print(f"\n{name}: {TASKS[name].label}, held out; rate {found['rate']:g}, "
          f"lambda {found['lambda']:g}")
    for order, by_workers in found["workers"].items():
      print(order.ljust(14) + "".join(
          f"{f'{m} workers':>29}" for m in by_workers))

      def cell(runs):
        errors = _last(runs)
        return (f"{errors.mean():>9.2f} ({errors.min():.2f} - "
                f"{errors.max():.2f})").rjust(29)

      print(SEQUENTIAL.ljust(14) + cell(found[SEQUENTIAL]))
      for method in METHODS:
        print(method.ljust(14) + "".join(
            cell(of[method]) for of in by_workers.values()))


def plot(results, points, path):
  """Draws errors over gradients, for the fewest and the most workers."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained",
                              squeeze=False)
  for column, (name, found) in enumerate(results.items()):
    by_workers = found["workers"][_ORDERS[0]]
    for ax, m in zip(axes[:, column], (min(by_workers), max(by_workers))):
      rows = {SEQUENTIAL: found[SEQUENTIAL], **by_workers[m]}
      curves = {}
      for method, runs in rows.items():
        errors = np.array([run["errors"] for run in runs])
        curves[method] = errors.mean(axis=0)
        ax.plot(points, curves[method], color=_COLORS[method], marker=".",
                label=method)
        ax.fill_between(points, errors.min(axis=0), errors.max(axis=0),
                        color=_COLORS[method], alpha=0.12, linewidth=0)
      # The first errors are far above, and those of what diverges.
      shown = np.array([curve for curve in curves.values()
                        if curve[-1] <= 10 * curves[SEQUENTIAL][-1]])
      low, top = shown.min(), np.quantile(shown, 0.9)
      room = 0.1 * (top - low) or 1
      ax.set_ylim(low - room, top + room)
      ax.set_title(f"{name}, {m} workers in turn")
      ax.set_xlabel("gradients")
      ax.set_ylabel(TASKS[name].label)
      ax.grid(alpha=0.3)
  for ax in axes[:, len(results):].flat:
    ax.axis("off")
  axes[0, 0].legend()
  figure.suptitle("held-out error; band: the least and the largest of the "
                  "seeds")
  figure.savefig(path, dpi=100)
  plt.close(figure)


def main(argv=None):
  start = time.perf_counter()
  parser = _command.parser("staleness", __doc__)
  parser.add_argument("--steps", type=_command.count, default=800,
                      help="gradients of each run; default %(default)s")
  _command.add_tasks(parser, TASKS)
  parser.add_argument("--quick", action="store_true",
                      help="one learning rate and one lambda, 2 and 4 workers "
                      "in turn, four evaluations: to see that it runs")
  _command.add_out(parser, "staleness")
  options = parser.parse_args(argv)
  _command.prepare(options.out, "matplotlib", "sklearn", "tqdm")

  rates, lambdas, workers, orders = _RATES, _LAMBDAS, _WORKERS, _ORDERS
  evaluations = _EVALUATIONS
  if options.quick:
    rates, lambdas, workers, orders = (0.3,), (0.5,), (2, 4), _ORDERS[:1]
    evaluations = 4
  points = _command.evaluation_points(options.steps, evaluations)
  tasks = list(dict.fromkeys(options.tasks))
  runs = len(rates) + len(lambdas) + options.seeds * (
      1 + len(workers) * len(orders) * len(METHODS))
  with _extras.load("tqdm").tqdm(total=len(tasks) * runs, unit="run",
                                 file=sys.stderr) as progress:
    results = {name: compare(name, rates, lambdas, workers, orders,
                             options.seeds, points, progress)
               for name in tasks}
  curves = os.path.join(options.out, "curves.png")
  plot(results, points, curves)
  path = _results.write(
      options.out, {
          "steps": options.steps, "seeds": options.seeds, "batch": _BATCH,
          "rates": rates, "lambdas": lambdas, "tuning_seed": _TUNING_SEED,
          "points": points, "tasks": results,
          "seconds": round(time.perf_counter() - start, 2),
      }, tf, np, _extras.load("sklearn"))
  print_table(results)
  print(f"\n{curves}\n{path}")


if __name__ == "__main__":
  main()
