"""Asynchronous training of a Keras model, with a slow worker.

A coordinator, two parameter servers and three workers, each a process on this
machine, train one small convolutional net on scikit-learn's scans of digits
with `tf.distribute.ParameterServerStrategy`. The last worker is stopped most of
the time, at any point of a step, so its gradients come from old weights.

The same is trained three times: by Keras's Adam; with a gate that admits all
gradients and only counts; and with `wrapopt.keras.DropStaleGradient`, which
drops gradients beyond a limit.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time

from wrapopt import _extras
from wrapopt.examples import _cluster
from wrapopt.examples import _command
from wrapopt.examples import digits

_WORKERS = 3
_BATCH = 16
_LEARNING_RATE = 0.002
_EVERYTHING = 1 << 40  # As a limit.


def train(task, steps, limit, seed):
  """Trains as the coordinator.

  Args:
    task: Its `_cluster.Task`.
    steps: The number of steps to schedule.
    limit: The largest staleness to admit, or None for no gate.
    seed: The seed of the initial weights and the batches.

  Returns:
    A dict: "scheduled", "iterations", "accuracy", "seconds", and with a gate
    "admitted_histogram" and "dropped_histogram".
  """
  import keras
  import tensorflow as tf

  from wrapopt.examples import keras_digits
  import wrapopt.keras

  data, held_out = digits.load_digits(seed)
  if task.strategy is None:
    task.strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(task.spec), rpc_layer="grpc"))
    task.coordinator = tf.distribute.coordinator.ClusterCoordinator(
        task.strategy)
  strategy, coordinator = task.strategy, task.coordinator

  keras.utils.set_random_seed(seed)
  with strategy.scope():
    model = keras_digits.make_model()
    optimizer = keras.optimizers.Adam(_LEARNING_RATE)
    if limit is not None:
      optimizer = wrapopt.keras.DropStaleGradient(optimizer, limit)
    optimizer.build(model.trainable_variables)
  loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  def gradients(images, labels):
    with tf.GradientTape() as tape:
      loss = loss_of(labels, model(images, training=True))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])

  @tf.function
  def step(iterator):
    def replica(images, labels):
      if limit is None:
        found = gradients(images, labels)
      else:
        with optimizer.record_step():  # Before the weights are read.
          found = gradients(images, labels)
      optimizer.apply(found, model.trainable_variables)

    strategy.run(replica, args=next(iterator))

  def batches():
    return tf.data.Dataset.from_tensor_slices(data).shuffle(
        len(data[0])).repeat().batch(_BATCH)

  iterator = iter(coordinator.create_per_worker_dataset(batches))
  start = time.perf_counter()
  for _ in range(steps):
    coordinator.schedule(step, args=(iterator,))
  while not coordinator.done():
    task.report(int(optimizer.iterations))
    time.sleep(0.1)
  coordinator.join()
  found = {"scheduled": steps, "iterations": int(optimizer.iterations),
           "seconds": time.perf_counter() - start,
           "accuracy": digits.accuracy_of(
               model(held_out[0]).numpy(), held_out[1])}
  if limit is not None:
    stats = optimizer.staleness_stats()
    found.update(admitted_histogram=stats.admitted_histogram.tolist(),
                 dropped_histogram=stats.dropped_histogram.tolist())
  return found


class _Slowly(threading.Thread):
  """Stops a process most of the time, until `end`."""

  def __init__(self, pid, rest):
    super().__init__(daemon=True)
    self._pid, self._rest, self._ended = pid, rest, threading.Event()

  def run(self):
    while not self._ended.is_set():
      os.kill(self._pid, signal.SIGSTOP)
      self._ended.wait(self._rest)
      os.kill(self._pid, signal.SIGCONT)
      time.sleep(self._rest / 10)

  def end(self):
    self._ended.set()
    self.join()


def plot(runs, limit, path):
  """Draws histograms of staleness, and the steps that were counted."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  figure, axes = plt.subplots(
      1, 3, figsize=(13, 4.5), layout="constrained",
      gridspec_kw={"width_ratios": [5, 5, 3]})
  for ax, name in zip(axes, ("no limit", f"limit {limit}")):
    run = runs[name]
    for of, color in ("admitted", "tab:blue"), ("dropped", "tab:red"):
      counts = run[f"{of}_histogram"]
      ax.bar(range(len(counts)), counts, 0.9, color=color,
             label=f"{of}: {sum(counts)}")
    ax.set_yscale("symlog", linthresh=1)
    ax.set_xlabel("staleness (updates that the weights lacked;\nthe last bar: "
                  f"{len(counts) - 1} and more)")
    ax.set_ylabel("gradients")
    ax.set_title(f"DropStaleGradient, {name}: {run['accuracy']:.1%} right")
    ax.legend()
  names = list(runs)
  lost = [run["scheduled"] - run["iterations"] - sum(
      run.get("dropped_histogram", ())) for run in runs.values()]
  bars = axes[2].bar(range(len(names)), lost, color="tab:orange")
  axes[2].bar_label(bars)
  axes[2].set_xticks(range(len(names)), names)
  axes[2].set_title("steps not counted")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _more_than_0(text):
  value = float(text)
  if not value > 0:
    raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
  return value


def main(argv=None):
  parser = _command.parser("coordinator_digits", __doc__)
  parser.add_argument("--steps", type=_command.count, default=2000,
                      help="scheduled steps of each run; default %(default)s")
  parser.add_argument("--limit", type=_command.count, default=8,
                      help="the largest staleness to admit; default "
                      "%(default)s")
  parser.add_argument("--rest", type=_more_than_0, default=0.2,
                      metavar="SECONDS", help="how long the slow worker is "
                      "stopped at a time; default %(default)s")
  _command.add_out(parser, "coordinator_digits")
  _command.add_seed(parser)
  options = parser.parse_args(argv)
  _command.prepare(options.out, "keras", "matplotlib", "sklearn")

  start = time.perf_counter()
  runs = {}
  with _cluster.Cluster(
      [train], preload=["keras", digits.__name__, "wrapopt.keras"],
      coordinator=True, ps=2, worker=_WORKERS) as cluster:
    slowly = _Slowly(cluster.tasks["worker", _WORKERS - 1].process.pid,
                     options.rest)
    slowly.start()
    for name, limit in (("Keras", None), ("no limit", _EVERYTHING),
                        (f"limit {options.limit}", options.limit)):
      with _extras.load("tqdm").tqdm(total=options.steps, unit="step",
                                     desc=name, file=sys.stderr) as progress:
        task = cluster.tasks["coordinator", 0]
        task.tell("train", steps=options.steps, limit=limit, seed=options.seed)
        runs[name] = task.answer(lambda n, p=progress: p.update(n - p.n))
    slowly.end()

  path = os.path.join(options.out, "coordinator_digits.png")
  plot(runs, options.limit, path)
  print(f"{'':>10}  {'scheduled':>9}  {'iterations':>10}  {'dropped':>7}  "
        f"{'lost':>5}  {'right':>6}")
  for name, run in runs.items():
    dropped = sum(run.get("dropped_histogram", ()))
    lost = run["scheduled"] - run["iterations"] - dropped
    print(f"{name:>10}  {run['scheduled']:>9}  {run['iterations']:>10}  "
          f"{dropped:>7}  {lost:>5}  {run['accuracy']:>6.1%}")
  results = os.path.join(options.out, "results.json")
  with open(results, "w", encoding="utf-8") as f:
    json.dump({"runs": runs, "limit": options.limit, "rest": options.rest,
               "seed": options.seed,
               "seconds": round(time.perf_counter() - start, 2)}, f, indent=2)
    f.write("\n")
  print(f"{path}\n{results}")


if __name__ == "__main__":
  main()
