"""Three workers that train independently on digits, and average their weights.

One parameter server, a chief and two workers, each a process on this machine.
Each worker has a third of scikit-learn's scans of digits and trains a small
convolutional net with momentum. Every few steps `wrapopt.ModelAverageOptimizer`
replaces the weights of all workers by their mean. At the end the example prints
the accuracy of each worker's weights before the last mean, of the mean, and of
two nets that one worker trained alone, on a third of the scans and on all.

--kill-worker kills the last worker in the middle of the run. The others
continue without it.
"""

import argparse
import json
import os
import sys
import time

import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt.examples import _cluster
from wrapopt.examples import _command
from wrapopt.examples import digits

tf1 = tf.compat.v1

_WORKERS = 3  # Including the chief.
_BATCH = 8
_LEARNING_RATE = 0.02
_MOMENTUM = 0.9
_INTERVAL = 20
# For late or dead workers.
_ROUND_SECONDS = 20.0
_COLORS = ("tab:blue", "tab:orange", "tab:red")


class _Batches:
  """Random batches of a part of the scans."""

  def __init__(self, data, part, parts, seed):
    self._images, self._labels = [x[part::parts] for x in data]
    self._rng = np.random.default_rng([seed, part, parts])
    self.scans = len(self._labels)

  def next(self):
    chosen = self._rng.choice(self.scans, _BATCH, replace=False)
    return self._images[chosen], self._labels[chosen]


class _Model:
  """The net in the current graph."""

  def __init__(self):
    self.images = tf1.placeholder(tf.float32, [None, 8, 8, 1])
    self.labels = tf1.placeholder(tf.int32, [None])
    self.logits = digits.logits_of(self.images)
    self.loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=self.labels, logits=self.logits))

  def feeds(self, batch):
    return dict(zip((self.images, self.labels), batch))

  def accuracy(self, session, held_out):
    logits = session.run(self.logits, {self.images: held_out[0]})
    return digits.accuracy_of(logits, held_out[1])


def average(task, rounds, seed):
  """Trains as a worker of the cluster.

  Args:
    task: Its `_cluster.Task`. The chief's reports the number of rounds that are
      over, first 0 once other workers may start.
    rounds: The number of rounds.
    seed: The seed of the split, the weights and the batches.

  Returns:
    A dict: the numbers "scans" and "steps" of its training, and "curve": for
    each of its rounds the number, and the accuracies before and after.
  """
  is_chief = task.job == "chief"
  data, held_out = digits.load_digits(seed)
  batches = _Batches(data, 0 if is_chief else 1 + task.number, _WORKERS, seed)
  getter = wrapopt.ModelAverageCustomGetter(task.device)
  with tf.Graph().as_default(), tf1.device(task.placement()):
    tf1.set_random_seed(seed)
    with tf1.variable_scope("", custom_getter=getter, use_resource=True):
      model = _Model()
    global_step = tf1.train.get_or_create_global_step()
    opt = wrapopt.ModelAverageOptimizer(
        tf1.train.MomentumOptimizer(_LEARNING_RATE, _MOMENTUM), _WORKERS,
        is_chief, getter, _INTERVAL, min_workers=2,
        round_timeout_secs=_ROUND_SECONDS)
    train_op = opt.minimize(model.loss, global_step)
    with tf1.train.MonitoredTrainingSession(
        task.server.target, is_chief, config=task.config(),
        hooks=[opt.make_session_run_hook()]) as session:
      if is_chief:
        task.report(0)
      # Not by `run_step_fn`: in a recreated session, it passes the old session,
      # which is closed, to the function.
      evaluate = lambda: model.accuracy(session, held_out)
      steps, over, curve = 0, 0, []
      while over < rounds:
        for _ in range(_INTERVAL - 1):
          session.run(train_op, model.feeds(batches.next()))
        own = evaluate()
        session.run(train_op, model.feeds(batches.next()))
        steps += _INTERVAL
        over = int(session.run(global_step))
        curve.append((over, own, evaluate()))
        if is_chief:
          task.report(over)
  return {"scans": batches.scans, "steps": steps, "curve": curve}


def alone(task, steps, parts, seed):
  """Trains one net on a part of the scans, or on all; returns its accuracy."""
  del task
  data, held_out = digits.load_digits(seed)
  batches = _Batches(data, 0, parts, seed)
  with tf.Graph().as_default():
    tf1.set_random_seed(seed)
    model = _Model()
    train_op = tf1.train.MomentumOptimizer(
        _LEARNING_RATE, _MOMENTUM).minimize(model.loss)
    with tf1.Session() as session:
      session.run(tf1.global_variables_initializer())
      for _ in range(steps):
        session.run(train_op, model.feeds(batches.next()))
      return {"scans": batches.scans, "steps": steps,
              "accuracy": model.accuracy(session, held_out)}


def run_cluster(rounds, seed, kill_worker):
  """Trains; returns the result of each worker, None for a killed one."""
  tqdm = _extras.load("tqdm").tqdm
  with _cluster.Cluster([average, alone], preload=[digits.__name__], ps=1,
                        chief=1, worker=_WORKERS - 1) as cluster, \
      tqdm(total=rounds, unit="round", file=sys.stderr) as progress:
    chief, *workers = tasks = [
        task for (job, _), task in cluster.tasks.items() if job != "ps"]
    killed = []

    def on_round(over):
      if over == 0:
        for worker in workers:
          worker.tell("average", rounds=rounds, seed=seed)
      progress.update(over - progress.n)
      if kill_worker and not killed and over >= rounds // 2:
        killed.append(workers[-1])
        workers[-1].kill()
        progress.write(f"{workers[-1].name} was killed after {over} rounds.")

    chief.tell("average", rounds=rounds, seed=seed)
    results = [chief.answer(on_round)]
    results += [None if w in killed else w.answer() for w in workers]
    steps = rounds * _INTERVAL
    baselines = [chief.ask("alone", steps=steps, parts=parts, seed=seed)
                 for parts in (_WORKERS, 1)]
    return dict(zip((t.name for t in tasks), results)), baselines


def plot(workers, baselines, path):
  """Draws held-out accuracy over the rounds."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
  every = []
  for (name, worker), color in zip(workers.items(), _COLORS):
    if worker is not None:
      rounds, own, mean = zip(*worker["curve"])
      every += own
      axes.plot(rounds, 100 * np.array(own), color=color, linewidth=1,
                label=f"{name}, just before the mean")
  rounds, _, mean = zip(*next(iter(workers.values()))["curve"])
  axes.plot(rounds, 100 * np.array(mean), color="black", linewidth=2,
            label="the mean")
  for baseline, style in zip(baselines, (":", "--")):
    axes.axhline(100 * baseline["accuracy"], color="gray", linestyle=style,
                 label=f"alone, {baseline['scans']} scans, in the end")
  axes.set_ylim(bottom=max(0, 100 * np.quantile(every, 0.1) - 4), top=100.5)
  axes.set_xlabel(f"rounds, of {_INTERVAL} steps of each worker")
  axes.set_ylabel("held-out accuracy (%)")
  axes.set_title("Model averaging on scikit-learn digits")
  axes.grid(alpha=0.3)
  axes.legend(loc="lower right")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _rounds(text):
  rounds = int(text)
  if rounds < 2:
    raise argparse.ArgumentTypeError(f"must be at least 2, got {text}")
  return rounds


def main(argv=None):
  parser = _command.parser("cluster_digits", __doc__)
  parser.add_argument("--rounds", type=_rounds, default=60,
                      help=f"rounds of {_INTERVAL} steps; default %(default)s")
  parser.add_argument("--kill-worker", action="store_true",
                      help="kill the last worker when half of them are over")
  _command.add_out(parser, "cluster_digits")
  _command.add_seed(parser)
  options = parser.parse_args(argv)
  _command.prepare(options.out, "matplotlib", "sklearn", "tqdm")

  start = time.perf_counter()
  workers, baselines = run_cluster(options.rounds, options.seed,
                                   options.kill_worker)
  curves = os.path.join(options.out, "curves.png")
  plot(workers, baselines, curves)
  print(f"{'':>22}  {'scans':>5}  {'steps':>6}  {'own':>7}  {'mean':>7}")
  for name, worker in workers.items():
    if worker is None:
      print(f"{name:>22}  killed")
      continue
    _, own, mean = worker["curve"][-1]
    print(f"{name:>22}  {worker['scans']:>5}  {worker['steps']:>6}  {own:>7.2%}"
          f"  {mean:>7.2%}")
  for baseline in baselines:
    print(f"{'alone':>22}  {baseline['scans']:>5}  {baseline['steps']:>6}  "
          f"{baseline['accuracy']:>7.2%}")
  print("\nAccuracy on held-out scans: of a worker's own weights just before "
        "the last mean,\nand of that mean.")
  results = os.path.join(options.out, "results.json")
  with open(results, "w", encoding="utf-8") as f:
    json.dump({"workers": workers, "alone": baselines,
               "rounds": options.rounds, "seed": options.seed,
               "seconds": round(time.perf_counter() - start, 2)}, f, indent=2)
    f.write("\n")
  print(f"{curves}\n{results}")


if __name__ == "__main__":
  main()
