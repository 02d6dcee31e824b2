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

from concurrent import futures
import contextlib
import itertools
import os
import signal
import threading
import time

import keras
import numpy as np
import tensorflow as tf

from wrapopt.examples import _cluster
from wrapopt.examples import _report
from wrapopt.examples import _study
from wrapopt.examples import _tasks
import wrapopt.keras

tf1 = tf.compat.v1

_WORKERS, _BATCH, _NO_LIMIT = 3, 16, 1 << 40


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
  def logits(x):
    read = _tasks.logits_of(x)
    with tf.control_dependencies([
        tf.numpy_function(lambda _: time.sleep(rest), [read], [])]):
      return tf.identity(read)  # And thereby the gradients, after the rest.

  with tf.Graph().as_default() as graph, tf1.device(task.placement()):
    tf1.set_random_seed(seed)
    tf1.get_variable_scope().set_use_resource(True)
    global_step = tf1.train.get_or_create_global_step()
    opt = wrapopt.DropStaleGradientOptimizer(
        tf1.train.GradientDescentOptimizer(0.02), limit,
        worker=f"worker_{task.number}")
    net = _tasks.GraphNet(*_tasks.load_digits(seed), _BATCH,
                          [seed, task.number], logits, opt.record_step)
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


def _histograms(stats):
  return {"admitted": stats.admitted_histogram.tolist(),
          "dropped": stats.dropped_histogram.tolist()}


def session(out="results/staleness/session", steps=2000, limit=20, rest=0.5,
            seed=0):
  """Workers in sessions of TensorFlow 1, one of them slow."""
  with _cluster.Cluster([train], preload=[_tasks.__name__], ps=1,
                        worker=_WORKERS) as cluster:
    found = _cluster.ask_all("train", {cluster.tasks["worker", k]: {
        "steps": steps, "limit": limit, "seed": seed,
        "rest": rest if k == _WORKERS - 1 else 0.0} for k in range(_WORKERS)})

  names = [*map(str, range(_WORKERS - 1)), f"{_WORKERS - 1}, slow"]
  tried, admitted, dropped = ([np.sum(worker[of]) for worker in found]
                              for of in ("tried", "admitted", "dropped"))
  _report.print_table(
      f"after {sum(admitted)} updates with a limit of {limit}: "
      # The worker that ends last has measured the accuracy.
      f"{found[-1]['accuracy']:.2%} of the held-out scans are right",
      ["worker", "gradients", "admitted", "dropped"],
      zip(names, tried, admitted, dropped))
  _report.draw_staleness(out / "staleness.png", "", {
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
  data, (images, labels) = _tasks.load_digits(seed)
  keras.utils.set_random_seed(seed)
  adam = lambda: keras.optimizers.Adam(0.002)
  model, optimizer, step = _tasks.make_step(
      task.strategy, _tasks.classes(_tasks.split_scans, _tasks.make_net),
      adam if limit is None else lambda: (
          wrapopt.keras.DropStaleGradient(adam(), limit)))
  schedule = task.scheduler(step, lambda: _tasks.dataset(data, _BATCH, None))
  for _ in range(steps):
    schedule()
  task.coordinator.join()
  return {"iterations": int(optimizer.iterations),
          "accuracy": _tasks.accuracy_of(model(images).numpy(), labels), **(
              {"admitted": [], "dropped": []} if limit is None
              else _histograms(optimizer.staleness_stats()))}


@contextlib.contextmanager
def _slow(pid, rest):
  """A context in which a process is stopped for most of the time."""
  ended = threading.Event()

  def stop():
    while not ended.wait(rest / 10):
      os.kill(pid, signal.SIGSTOP)
      ended.wait(rest)
      os.kill(pid, signal.SIGCONT)

  with futures.ThreadPoolExecutor() as pool:
    pool.submit(stop)
    try:
      yield
    finally:
      ended.set()


def coordinator(out="results/staleness/coordinator", steps=2000, limit=8,
                rest=0.2, seed=0):
  """Workers of a coordinator in Keras, one of them slow."""
  runs = {}
  with _cluster.Cluster(
      [coordinate], preload=[_tasks.__name__], coordinator=True, ps=2,
      worker=_WORKERS) as cluster, _slow(
          cluster.tasks["worker", _WORKERS - 1].process.pid, rest):
    task = cluster.tasks["coordinator", 0]
    for name, of in _report.progress([("Keras", None), ("no limit", _NO_LIMIT),
                                      (f"limit {limit}", limit)], unit="run"):
      runs[name] = task.ask("coordinate", steps=steps, limit=of, seed=seed)

  _report.print_table(
      f"after {steps} scheduled steps",
      ["", "iterations", "dropped", "lost", "right"],
      [[name, run["iterations"], sum(run["dropped"]),
        steps - run["iterations"] - sum(run["dropped"]),
        f"{run['accuracy']:.1%}"] for name, run in runs.items()])
  _report.draw_staleness(out / "staleness.png", "DropStaleGradient", {
      name: {f"{of}: {sum(run[of])}": run[of] for of in ("admitted", "dropped")}
      for name, run in runs.items() if name != "Keras"})
  return {"runs": runs}


# The policies, with simulated workers.
_ORDERS = ("in turn", "random")
_VOCABULARY, _CONTEXT = 800, 3
_STYLES = {"sequential": "k.-", "asynchronous": "C7.-", "dropped": "C3.-",
           "scaled": "C1.-", "DC-ASGD-a": "C0.-", "gap-aware": "C2.-"}
_SEQUENTIAL, *METHODS = _STYLES


def _split_words(files):
  documents = _tasks.read_documents(files)
  numbers = _tasks.numbers_of(sorted(itertools.chain(*documents)),
                              _VOCABULARY - 1)
  return _tasks.split(*_tasks.windows(_CONTEXT, *(
      np.int32([numbers.get(w, 0) for w in d]) for d in documents)), most=4000)


TASKS = {
    "digits": _tasks.classes(
        _tasks.split_scans, lambda: _tasks.make_dense((8, 8, 1), 32, 10)),
    "cancer": _tasks.classes(
        _tasks.split_cancer, lambda: _tasks.make_dense((30,), 16, 2)),
    "words": _tasks.predictions("word", _split_words, lambda: (
        _tasks.make_embedded(_CONTEXT, _VOCABULARY, 16, _VOCABULARY)))}


def make_optimizer(method, workers, rate, lambda_):
  """The optimizer of a method."""
  descent = tf1.train.GradientDescentOptimizer(rate)
  if method in ("sequential", "asynchronous"):
    return descent
  return wrapopt.DropStaleGradientOptimizer(
      descent, workers // 2 if method == "dropped" else _NO_LIMIT,
      global_step=tf.Variable(0, dtype=tf.int64), policy={
          "dropped": "drop", "scaled": "scale", "gap-aware": wrapopt.GapAware(),
          "DC-ASGD-a": wrapopt.DelayCompensation(lambda_)}[method])


def make_simulation(task, split):
  """A function that trains as several workers would, traced once.

  Args:
    task: A `_tasks.Task`.
    split: Its data.

  Returns:
    A function of a method, the number of workers, one of the orders, the
    learning rate, the lambda of the delay compensation, the seed of weights,
    batches and orders, the numbers of gradients after which the error is
    measured, and the part of the split that it is measured on. It returns the
    errors, the weights, and the optimizer.
  """
  model, (x, y) = task.make_model(), split["training"]
  weights = [v.value for v in model.trainable_variables]

  @tf.function
  def gradients_of(x, y):
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(task.loss(y, model(x)))
    return tape.gradient(loss, weights)

  def run(method, workers, order, rate, lambda_, seed, points, part):
    rng = np.random.default_rng(seed)
    for w in weights:
      w.assign(rng.standard_normal(w.shape) / np.sqrt(w.shape[0])
               if len(w.shape) > 1 else np.zeros(w.shape))
    opt = make_optimizer(method, workers, rate, lambda_)

    def begin():
      batch = rng.integers(len(x), size=_BATCH)
      data = tf.constant(x[batch]), tf.constant(y[batch])
      if not hasattr(opt, "record_step"):
        return gradients_of(*data), {}
      with opt.record_step(variables=weights) as recorded:
        return gradients_of(*data), {"recorded": recorded}

    errors, held = [], [begin() for _ in range(workers)]
    for i in range(points[-1]):
      worker = i % workers if order == "in turn" else rng.integers(workers)
      gradients, record = held[worker]
      opt.apply_gradients(zip(gradients, weights), **record)
      held[worker] = begin()
      if i + 1 in points:
        errors.append(task.error_of(model, split[part]))
    return errors, weights, opt

  return run


def _name(method, workers, order):
  return method if method == _SEQUENTIAL else (
      f"{method}, {workers} workers {order}")


def policies(out="results/staleness/policies", steps=800, tasks=tuple(TASKS),
             seeds=3, quick=False):
  """The ways to treat old gradients: drop, scale, compensate them."""
  workers, orders = ((2, 4), _ORDERS[:1]) if quick else ((4, 8, 16), _ORDERS)
  runs = {_name(*run): run for run in (
      (_SEQUENTIAL, 1, "in turn"), ("DC-ASGD-a", workers[-1], "in turn"),
      *itertools.product(METHODS, workers, orders))}
  # The largest of equal rates and lambdas: delays matter most with it.
  tuned = dict(zip(runs, ((10.0, 3.0, 1.0, 0.3, 0.1, 0.03), (2.0, 0.5, 0.1))))

  def trainer_of(name, split, found):
    simulate = make_simulation(TASKS[name], split)

    def train(run, setting, *how):
      settings = [found[of]["best"] if of in found else setting for of in tuned]
      return simulate(*runs[run], *settings, *how)[0]

    return train

  results = _study.compare(TASKS, tasks, dict.fromkeys(runs, ()) | tuned,
                           trainer_of, steps, [1000], seeds, quick)
  for name, found in results["tasks"].items():
    rate, lambda_ = (found[of]["best"] for of in tuned)
    for order in orders:
      _report.print_table(
          f"{name}: {TASKS[name].label}, held out; workers {order}; rate "
          f"{rate:g}, lambda {lambda_:g}", ["workers", *workers],
          [[method, *(_study.of_seeds(found[_name(method, m, order)])
                      for m in workers)] for method in _STYLES])
  _report.draw_curves(
      out / "curves.png",
      "held-out error; band: the least and the largest of the seeds",
      "gradients", [
          _study.panel(f"{name}, {m} workers in turn", TASKS[name].label, {
              method: found[_name(method, m, "in turn")] for method in _STYLES},
                       results["points"], _STYLES)
          for m in (workers[0], workers[-1])
          for name, found in results["tasks"].items()])
  return results


main = _report.command("staleness", __doc__, session, coordinator, policies)

if __name__ == "__main__":
  main()
