"""Asynchronous training of a digits classifier, with a slow worker.

One parameter server and three workers, each a process on this machine, train
one small convolutional net on scikit-learn's scans of digits. No worker waits
for another. The last worker sleeps between reading the weights and sending its
gradients, so its gradients come from old weights.
`wrapopt.DropStaleGradientOptimizer` drops these, and hardly any others.
"""

import argparse
import json
import os
import time

import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt.examples import _cluster
from wrapopt.examples import _command
from wrapopt.examples import digits

tf1 = tf.compat.v1

_WORKERS = 3
_BATCH = 16
_LEARNING_RATE = 0.02
_COLORS = ("tab:blue", "tab:orange", "tab:red")


def train(task, steps, limit, rest, seed):
  """Trains as a worker.

  Args:
    task: Its `_cluster.Task`.
    steps: The global step at which to stop.
    limit: The largest staleness to admit.
    rest: The time to sleep between reading weights and sending gradients, in
      seconds.
    seed: The seed of the initial weights, and with the worker's number of the
      batches.

  Returns:
    A dict: "tried", "admitted", "dropped", "admitted_histogram",
    "dropped_histogram" and "seconds" of this worker's training.
  """
  data, _ = digits.load_digits(seed)
  rng = np.random.default_rng([seed, task.number])
  with tf.Graph().as_default() as graph, tf1.device(task.placement()):
    tf1.set_random_seed(seed)
    tf1.get_variable_scope().set_use_resource(True)
    global_step = tf1.train.get_or_create_global_step()
    images = tf1.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf1.placeholder(tf.int32, [None])
    opt = wrapopt.DropStaleGradientOptimizer(
        tf1.train.GradientDescentOptimizer(_LEARNING_RATE), limit,
        worker=f"worker_{task.number}")
    with opt.record_step():  # Before the weights are read.
      loss = _loss(images, labels)
    with tf.control_dependencies([loss]):
      rested = tf.numpy_function(
          lambda: time.sleep(rest), [], [], stateful=True)
    grads_and_vars = opt.compute_gradients(loss)
    with tf.control_dependencies([rested]):
      grads_and_vars = [(tf.identity(g), v) for g, v in grads_and_vars]
    train_op = opt.apply_gradients(grads_and_vars, global_step)
    stats = opt.staleness_stats(worker=True)
    init = tf1.global_variables_initializer()
    local_init = tf1.local_variables_initializer()
    missing = tf1.report_uninitialized_variables(tf1.global_variables())
    now = global_step.read_value()

  with task.session(graph) as session:
    if task.number == 0:
      session.run(init)
    while session.run(missing).size:
      time.sleep(0.05)
    session.run(local_init)
    start, tried = time.perf_counter(), 0
    while session.run(now) < steps:
      batch = rng.choice(len(data[0]), _BATCH, replace=False)
      session.run(train_op, {images: data[0][batch], labels: data[1][batch]})
      tried += 1
    counts = session.run(stats)
    seconds = time.perf_counter() - start
  return {"tried": tried, "admitted": int(counts.admitted),
          "dropped": int(counts.dropped), "seconds": seconds,
          "admitted_histogram": counts.admitted_histogram.tolist(),
          "dropped_histogram": counts.dropped_histogram.tolist()}


def evaluate(task, seed):
  """The accuracy of the parameter servers' weights on held-out scans."""
  _, held_out = digits.load_digits(seed)
  with tf.Graph().as_default() as graph, tf1.device(task.placement()):
    tf1.get_variable_scope().set_use_resource(True)
    logits = digits.logits_of(tf.constant(held_out[0]))
  with task.session(graph) as session:
    return digits.accuracy_of(session.run(logits), held_out[1])


def _loss(images, labels):
  return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels=labels, logits=digits.logits_of(images)))


def plot(workers, limit, path):
  """Draws a histogram of staleness, with a color for each worker."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
  width = 0.8 / len(workers)
  for i, (worker, color) in enumerate(zip(workers, _COLORS)):
    counts = np.add(worker["admitted_histogram"], worker["dropped_histogram"])
    axes.bar(np.arange(len(counts)) + (i - 1) * width, counts, width,
             color=color, label=f"worker {i}: {worker['dropped']} of "
             f"{worker['tried']} dropped")
  axes.axvline(limit + 0.5, color="black", linestyle="--",
               label=f"limit {limit}")
  axes.set_yscale("symlog", linthresh=1)
  axes.set_xlabel("staleness (updates that the weights lacked; the last bar: "
                  f"{len(counts) - 1} and more)")
  axes.set_ylabel("gradients")
  axes.set_title("Asynchronous SGD on scikit-learn digits: worker "
                 f"{len(workers) - 1} is slow")
  axes.legend()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _at_least(least, kind):
  def parse(text):
    value = kind(text)
    if not value >= least:
      raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return value
  parse.__name__ = kind.__name__  # The name in errors.
  return parse


def main(argv=None):
  parser = _command.parser("async_digits", __doc__)
  parser.add_argument("--steps", type=_at_least(1, int), default=2000,
                      help="updates, of all workers; default %(default)s")
  parser.add_argument("--limit", type=_at_least(0, int), default=20,
                      help="the largest staleness to admit; default "
                      "%(default)s")
  parser.add_argument("--rest", type=_at_least(0, float), default=0.5,
                      metavar="SECONDS", help="how long the slow worker rests "
                      "in each step; default %(default)s")
  _command.add_out(parser, "async_digits")
  _command.add_seed(parser)
  options = parser.parse_args(argv)
  _command.prepare(options.out, "matplotlib", "sklearn")

  start = time.perf_counter()
  with _cluster.Cluster([train, evaluate], preload=[digits.__name__], ps=1,
                        worker=_WORKERS) as cluster:
    tasks = [cluster.tasks["worker", i] for i in range(_WORKERS)]
    for task in tasks:
      task.tell("train", steps=options.steps, limit=options.limit,
                rest=options.rest if task is tasks[-1] else 0.0,
                seed=options.seed)
    workers = [task.answer() for task in tasks]
    accuracy = tasks[0].ask("evaluate", seed=options.seed)

  staleness = os.path.join(options.out, "staleness.png")
  plot(workers, options.limit, staleness)
  print(f"{'worker':>8}  {'gradients':>9}  {'a second':>8}  {'admitted':>8}  "
        f"{'dropped':>8}  {'drop rate':>9}")
  for i, w in enumerate(workers):
    name = f"{i}, slow" if i == _WORKERS - 1 else str(i)
    print(f"{name:>8}  {w['tried']:>9}  {w['tried'] / w['seconds']:>8.1f}  "
          f"{w['admitted']:>8}  {w['dropped']:>8}  "
          f"{w['dropped'] / max(1, w['tried']):>9.1%}")
  print(f"\nAfter {sum(w['admitted'] for w in workers)} updates with a limit "
        f"of {options.limit}: {accuracy:.2%} of the held-out scans are right.")
  results = os.path.join(options.out, "results.json")
  with open(results, "w", encoding="utf-8") as f:
    json.dump({"workers": workers, "accuracy": accuracy,
               "limit": options.limit, "rest": options.rest,
               "seed": options.seed,
               "seconds": round(time.perf_counter() - start, 2)}, f, indent=2)
    f.write("\n")
  print(f"{staleness}\n{results}")


if __name__ == "__main__":
  main()
