"""Shows what gates do with stale gradients of asynchronous workers.

  session      a parameter server and three workers, each a process on this
               machine, train digits in sessions of TensorFlow 1. The last
               worker rests between reading the weights and sending its
               gradients. `wrapopt.DropStaleGradientOptimizer` drops these, and
               hardly any others.
  coordinator  a coordinator, two parameter servers and three workers train a
               Keras model of digits with
               `tf.distribute.ParameterServerStrategy`. The last worker is
               stopped most of the time, at any point of a step. The same is
               trained three times: by Keras's Adam, with a gate that admits all
               gradients and only counts, and with
               `wrapopt.keras.DropStaleGradient`, which drops gradients beyond a
               limit.
  policies     compares what asynchronous training may do with old gradients.

In `policies`, M workers train shared weights without waiting for each other.
One process simulates them, so that the delays are exact: each worker holds a
gradient of the weights at which it began. One worker after the other applies
its gradient and begins with the new weights, in turn ("in turn": each gradient
misses M - 1 updates), or at random ("random": it misses M - 1 updates in the
mean). Three small models learn real data that need no download:

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

import collections
import contextlib
import itertools
import os
import signal
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt.examples import _cluster
from wrapopt.examples import _command
from wrapopt.examples import _plots
from wrapopt.examples import _study
from wrapopt.examples import _tasks
import wrapopt.keras

tf1 = tf.compat.v1

_WORKERS = 3
_BATCH = 16
_NO_LIMIT = 1 << 40


def train(task, steps, limit, rest, seed):
  """Trains in a session of a worker.

  Args:
    task: Its `_cluster.Task`.
    steps: The global step at which to stop.
    limit: The largest staleness to admit.
    rest: The time to rest between reading weights and sending gradients, in
      seconds.
    seed: The seed of the initial weights, and with the worker's number of the
      batches.

  Returns:
    The results of this worker, a dict.
  """
  data, held_out = _tasks.load_digits(seed)
  with tf.Graph().as_default() as graph, tf1.device(task.placement()):
    tf1.set_random_seed(seed)
    tf1.get_variable_scope().set_use_resource(True)
    global_step = tf1.train.get_or_create_global_step()
    opt = wrapopt.DropStaleGradientOptimizer(
        tf1.train.GradientDescentOptimizer(0.02), limit,
        worker=f"worker_{task.number}")
    net = _tasks.GraphNet(data, held_out, _BATCH, [seed, task.number],
                          lambda x: _later(_tasks.logits_of(x), rest),
                          opt.record_step)
    train_op = opt.minimize(net.loss, global_step)
    stats = opt.staleness_stats(worker=True)
    now = global_step.read_value()

  with task.session(graph) as session:
    tried = 0
    while session.run(now) < steps:
      net.train(session, train_op)
      tried += 1
    return {"tried": tried, "accuracy": net.accuracy(session),
            **_histograms(session.run(stats))}


def _later(logits, rest):
  """The logits, and thereby the gradients, after a rest in seconds."""

  def wait(x):
    time.sleep(rest)
    return x

  return tf.grad_pass_through(lambda x: tf.ensure_shape(
      tf.numpy_function(wait, [x], x.dtype), x.shape))(logits)


def _histograms(stats):
  return {"admitted": stats.admitted_histogram.tolist(),
          "dropped": stats.dropped_histogram.tolist()}


def session(out="results/staleness/session", steps=2000, limit=20, rest=0.5,
            seed=0):
  """Workers in sessions of TensorFlow 1, one of them slow."""
  with _cluster.Cluster([train], preload=[_tasks.__name__], ps=1,
                        worker=_WORKERS) as cluster:
    workers = [cluster.tasks["worker", i] for i in range(_WORKERS)]
    found = _cluster.ask_all("train", {worker: {
        "steps": steps, "limit": limit, "seed": seed,
        "rest": rest if worker is workers[-1] else 0.0} for worker in workers})

  names = [*map(str, range(_WORKERS - 1)), f"{_WORKERS - 1}, slow"]
  tried, admitted, dropped = ([np.sum(worker[of]) for worker in found]
                              for of in ("tried", "admitted", "dropped"))
  _command.print_table(
      f"after {sum(admitted)} updates with a limit of {limit}: "
      # The worker that ends last has measured the accuracy.
      f"{found[-1]['accuracy']:.2%} of the held-out scans are right",
      ["worker", "gradients", "admitted", "dropped"],
      zip(names, tried, admitted, dropped))
  _plots.draw_staleness(out, "", {
      f"asynchronous SGD with a limit of {limit}": {
          f"worker {name}: {n} dropped": np.add(w["admitted"], w["dropped"])
          for name, w, n in zip(names, found, dropped)}})
  return {"workers": found}


def coordinate(task, steps, limit, seed):
  """Trains a Keras model as the coordinator.

  Args:
    task: Its `_cluster.Task`.
    steps: The number of steps to schedule.
    limit: The largest staleness to admit, or None for no gate.
    seed: The seed of the initial weights and the batches.

  Returns:
    The results of the steps, a dict.
  """
  data, held_out = _tasks.load_digits(seed)
  keras.utils.set_random_seed(seed)
  with task.strategy.scope():
    model = _tasks.make_net()
    optimizer = keras.optimizers.Adam(0.002)
    if limit is not None:
      optimizer = wrapopt.keras.DropStaleGradient(optimizer, limit)
    optimizer.build(model.trainable_variables)
  schedule = task.scheduler(
      _tasks.step_of(task.strategy, model, optimizer, _tasks.cross_entropy),
      lambda: _tasks.dataset(data, _BATCH, None))
  for _ in range(steps):
    schedule()
  while not task.coordinator.done():
    task.report(int(optimizer.iterations))
    time.sleep(0.1)
  task.coordinator.join()
  outputs = model(held_out[0]).numpy()
  return {"iterations": int(optimizer.iterations),
          "accuracy": _tasks.accuracy_of(outputs, held_out[1]), **(
              {"admitted": [], "dropped": []} if limit is None
              else _histograms(optimizer.staleness_stats()))}


@contextlib.contextmanager
def _slow(pid, rest):
  """A context in which a process is stopped for most of the time."""
  ended = threading.Event()

  def run():
    while not ended.is_set():
      os.kill(pid, signal.SIGSTOP)
      ended.wait(rest)
      os.kill(pid, signal.SIGCONT)
      time.sleep(rest / 10)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def coordinator(out="results/staleness/coordinator", steps=2000, limit=8,
                rest=0.2, seed=0):
  """Workers of a coordinator in Keras, one of them slow."""
  runs = {}
  with _cluster.Cluster([coordinate], preload=[_tasks.__name__],
                        coordinator=True, ps=2, worker=_WORKERS) as cluster:
    task = cluster.tasks["coordinator", 0]
    slow = cluster.tasks["worker", _WORKERS - 1].process.pid
    with _slow(slow, rest):
      for name, of in (("Keras", None), ("no limit", _NO_LIMIT),
                       (f"limit {limit}", limit)):
        with _command.progress(total=steps, desc=name) as progress:
          task.tell("coordinate", steps=steps, limit=of, seed=seed)
          runs[name] = task.answer(lambda n, p=progress: p.update(n - p.n))

  _command.print_table(
      f"after {steps} scheduled steps",
      ["", "iterations", "dropped", "lost", "right"],
      [[name, run["iterations"], sum(run["dropped"]),
        steps - run["iterations"] - sum(run["dropped"]),
        f"{run['accuracy']:.1%}"] for name, run in runs.items()])
  _plots.draw_staleness(out, "DropStaleGradient", {
      name: {f"{of}: {sum(run[of])}": run[of] for of in ("admitted", "dropped")}
      for name, run in runs.items() if name != "Keras"})
  return {"runs": runs}


# The policies, with simulated workers.
_TUNING_SEED = 1000
_ORDERS = ("in turn", "random")
_VOCABULARY = 800
_CONTEXT = 3

_STYLES = {"sequential": "k.-", "asynchronous": "C7.-", "dropped": "C3.-",
           "scaled": "C1.-", "DC-ASGD-a": "C0.-", "gap-aware": "C2.-"}
_SEQUENTIAL, *METHODS = _STYLES


def _split_words(files):
  documents = _tasks.read_documents(files)
  counts = collections.Counter(sorted(w for d in documents for w in d))
  number = {word: i + 1 for i, (word, _) in enumerate(
      counts.most_common(_VOCABULARY - 1))}  # 0: another word.
  training, *others = _tasks.split(*_tasks.windows(_CONTEXT, *(
      np.array([number.get(w, 0) for w in d], np.int32) for d in documents)))
  return _tasks.Split(training, *((x[:4000], y[:4000]) for x, y in others))


TASKS = {
    "digits": _tasks.Task(
        _tasks.split_scans, lambda: _tasks.make_dense((8, 8, 1), 32, 10),
        *_tasks.CLASSES),
    "cancer": _tasks.Task(
        _tasks.split_cancer, lambda: _tasks.make_dense((30,), 16, 2),
        *_tasks.CLASSES),
    "words": _tasks.Task(
        _split_words, lambda: _tasks.make_embedded(
            _CONTEXT, _VOCABULARY, 16, keras.layers.GlobalAveragePooling1D(),
            _VOCABULARY), *_tasks.WORDS),
}


def make_optimizer(method, workers, rate, lambda_, step):
  """The optimizer of a method, and whether it is a gate."""
  descent = tf1.train.GradientDescentOptimizer(rate)
  if method in ("sequential", "asynchronous"):
    return descent, False
  policy = {"dropped": "drop", "scaled": "scale", "gap-aware":
            wrapopt.GapAware(), "DC-ASGD-a": wrapopt.DelayCompensation(lambda_)
           }[method]
  limit = workers // 2 if method == "dropped" else _NO_LIMIT
  return wrapopt.DropStaleGradientOptimizer(
      descent, limit, policy=policy, global_step=step), True


class Simulation:
  """Trains a model as several workers would, several times, traced once."""

  def __init__(self, task, files=120):
    self._task, self._split = task, task.load(files)
    self._model = task.make_model()
    self.weights = [v.value for v in self._model.trainable_variables]

    @tf.function
    def gradients(x, y):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(task.loss(y, self._model(x)))
      return tape.gradient(loss, self.weights)

    self._gradients = gradients

  def run(self, method, workers, order, rate, lambda_, seed, points, part):
    """Trains.

    Args:
      method: One of METHODS, or "sequential".
      workers: Their number.
      order: One of the orders.
      rate: The learning rate.
      lambda_: Of the delay compensation.
      seed: Of weights, batches and random orders.
      points: After how many gradients the error is measured, in order.
      part: The part of the split that it is measured on.

    Returns:
      The errors, and the statistics of the gate, or None.
    """
    rng = np.random.default_rng(seed)
    for w in self.weights:
      w.assign(rng.standard_normal(w.shape) / np.sqrt(w.shape[0])
               if len(w.shape) > 1 else np.zeros(w.shape))
    step = tf.Variable(0, dtype=tf.int64)
    opt, is_gate = make_optimizer(method, workers, rate, lambda_, step)
    x, y = self._split.training

    def begin():
      batch = rng.integers(len(x), size=_BATCH)
      data = tf.constant(x[batch]), tf.constant(y[batch])
      if not is_gate:
        return self._gradients(*data), {}
      with opt.record_step(variables=self.weights) as recorded:
        return self._gradients(*data), {"recorded": recorded}

    errors = []
    held = [begin() for _ in range(workers)]
    for i in range(points[-1]):
      worker = i % workers if order == "in turn" else rng.integers(workers)
      gradients, record = held[worker]
      opt.apply_gradients(zip(gradients, self.weights), **record)
      held[worker] = begin()
      if i + 1 in points:
        errors.append(self._task.error_of(
            self._model, getattr(self._split, part)))
    return errors, opt.staleness_stats() if is_gate else None


def policies(out="results/staleness/policies", steps=800, tasks=tuple(TASKS),
             seeds=3, quick=False):
  """The ways to treat old gradients: drop, scale, compensate them."""
  points = _command.points(steps, 4 if quick else 12)
  grid = {"rates": (0.3,), "lambdas": (0.5,), "workers": (2, 4),
          "orders": _ORDERS[:1]} if quick else {
              # The largest of equal ones: delays matter most with it.
              "rates": (10.0, 3.0, 1.0, 0.3, 0.1, 0.03),
              "lambdas": (2.0, 0.5, 0.1), "workers": (4, 8, 16),
              "orders": _ORDERS}
  sequential = _SEQUENTIAL, 1, "in turn"
  compensated = "DC-ASGD-a", max(grid["workers"]), "in turn"

  def trainer_of(name, found):
    simulation = Simulation(TASKS[name], 12 if quick else 120)

    def train(contender, setting, *how):
      rate, lambda_ = (found[of].best if of in found else setting
                       for of in (sequential, compensated))
      errors, _ = simulation.run(*contender, rate, lambda_, *how)
      return errors

    return train

  found = _study.compare(
      tasks, {sequential: grid["rates"], compensated: grid["lambdas"]} | {
          of: () for of in itertools.product(
              METHODS, grid["workers"], grid["orders"]) if of != compensated},
      trainer_of, points, [_TUNING_SEED], range(seeds))

  results = {}
  for name, of_task in found.items():
    rate, lambda_ = of_task[sequential], of_task[compensated]
    results[name] = {
        "rate": rate.best, "lambda": lambda_.best,
        "validation": {"rate": dict(rate.tried), "lambda": dict(lambda_.tried)},
        "errors": {order: {workers: {
            _SEQUENTIAL: rate.errors, **{
                method: of_task[method, workers, order].errors
                for method in METHODS}} for workers in grid["workers"]}
                   for order in grid["orders"]}}
    for order, by_workers in results[name]["errors"].items():
      _command.print_table(
          f"{name}: {TASKS[name].label}, held out; workers {order}; rate "
          f"{rate.best:g}, lambda {lambda_.best:g}", ["workers", *by_workers],
          [[method, *(_study.of_seeds(errors[method])
                      for errors in by_workers.values())]
           for method in _STYLES])
  _plots.draw_curves(
      os.path.join(out, "curves.png"),
      "held-out error; band: the least and the largest of the seeds",
      "gradients", [
          _study.panel(f"{name}, {m} workers in turn", TASKS[name].label,
                       points, of["errors"]["in turn"][m], _STYLES)
          for m in (grid["workers"][0], grid["workers"][-1])
          for name, of in results.items()])
  return {"points": points, **grid, "tasks": results}


main = _command.command("staleness", __doc__, session, coordinator, policies)

if __name__ == "__main__":
  main()
