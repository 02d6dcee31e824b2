"""Compares ways to train with four workers, by the bytes that they send.

  alone         one worker, which sends nothing
  all data      one worker that has all data and takes batches of all workers
  synchronous   `tf.distribute.MultiWorkerMirroredStrategy` sums the gradients
                of all workers in each step
  asynchronous  `tf.distribute.ParameterServerStrategy` takes a step with the
                gradient of each worker, and `wrapopt.keras.DropStaleGradient`
                drops those that miss more than 8 steps
  elastic       `wrapopt.ElasticAverageOptimizer`, in sessions of TensorFlow 1:
                worker and center move towards each other in each round
  LocalSGD      `wrapopt.LocalSGD`: the mean of all workers in each round
  DiLoCo        `wrapopt.DiLoCo`: an outer step towards the mean in each round
  bfloat16, int8, int4
                DiLoCo whose values travel in this `dtype`
  fragments     DiLoCo of two groups of variables, which have rounds in turn
  overlap       DiLoCo whose values travel during the next 5 steps
  streaming     int4, fragments and overlap: Streaming DiLoCo

Each worker is a process on this machine, and has a quarter of the data. Two
tasks, which need no download:

  digits  scikit-learn's 1,797 scans of digits, in a net of two convolutions;
          rounds of 20 steps
  text    the next character of the standard library's docstrings, from the 16
          before it, in a net of two layers; rounds of 50 steps

All workers compute the same number of gradients for Adam. Asynchronous training
takes a step with each of them, so its weights take four times as many steps as
those of the others.

Each way is tuned by as many runs, with another seed, so another split of the
data: eight rates of Adam; for elastic averaging four, with two rates of the
center; for each DiLoCo four, with two outer rates. The setting of the least
error in the end is the one that is compared. Rounds have as many steps in all
ways.

The first worker measures the error on other data after each round: that of the
center for elastic averaging, LocalSGD and DiLoCo, which `overlap` and
`streaming` have 5 steps later. Asynchronous workers have no rounds: after as
many steps, they wait while the coordinator measures.

The bytes are those that a worker sends: weights, or gradients in their size,
without dropped ones. An all-reduce may send up to twice as much. The bytes that
a worker receives are not counted; asynchronous workers read the weights in each
step.

The seconds are without start, first step and evaluations. Those of asynchronous
training have the waits before evaluations. All processes share the processors
and the memory of one machine, so the seconds say nothing about workers that a
network connects.
"""

import functools
import itertools
import json
import os
import time
import types

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import server as server_module
from wrapopt.examples import _cluster
from wrapopt.examples import _command
from wrapopt.examples import _plots
from wrapopt.examples import _study
from wrapopt.examples import _tasks
import wrapopt.keras

tf1 = tf.compat.v1

_WORKERS = 4
_BATCH = 32
# A gradient misses about 3 steps, one of each other worker. If it misses more
# than 8, the others took more than two each.
_STALENESS = 2 * _WORKERS
_OVERLAP = {"overlap_steps": 5, "local_weight": 0.5}
_DILOCO = {  # {way: arguments of `wrapopt.DiLoCo`}
    "DiLoCo": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"}, "fragments": {"fragments": 2},
    "overlap": _OVERLAP,
    "streaming": {"dtype": "int4", "fragments": 2, **_OVERLAP}}
_LOCAL = ("LocalSGD", *_DILOCO)
_STYLES = {"alone": "C7:", "all data": "k:", "synchronous": "C2--",
           "asynchronous": "C3--", "elastic": "C4.-", "LocalSGD": "C1.-",
           "DiLoCo": "C0.-", "bfloat16": "C1--", "int8": "C2-.", "int4": "C3:",
           "fragments": "C4-", "overlap": "C5-", "streaming": "C6.-"}
WAYS = tuple(_STYLES)

# Eight runs tune each way. They choose the learning rate of Adam, as a multiple
# of the task's, and how fast the center moves: by the outer rate of DiLoCo, or
# by the moving rate of elastic averaging, of all workers together.
_SETTINGS: dict[str, list[tuple]] = {
    way: [(2.0**i,) for i in range(-2, 6)] for way in WAYS}
for _way in _DILOCO:
  _SETTINGS[_way] = [*itertools.product((1, 2, 4, 8), (0.7, 0.35))]
# The default moving rate also divides by the period. In the 20 rounds of the
# text, the center would move less than a third of the way to the workers.
_SETTINGS["elastic"] = [*itertools.product((1, 2, 4, 8), (0.9, 0.45))]

_BEFORE = 16  # Characters that the net of the text sees.


def _load_text(files):
  """A function of a seed, which holds out a fifth of the documents."""
  documents = _tasks.read_documents(files)
  samples = lambda of: _tasks.windows(_BEFORE, _tasks.letters_of(of))

  def split(seed):
    # A worker's quarter are modules that follow each other.
    training = [d for i, d in enumerate(documents) if (i - seed) % 5]
    x, y = samples(documents[seed % 5::5])
    some = np.random.default_rng(seed).permutation(len(x))[:8000]
    return samples(training), (x[some], y[some])

  return split


# `load` returns a function of a seed: the samples to train on, and others.
TASKS = {
    "digits": _tasks.Task(
        lambda files: _tasks.load_digits, _tasks.make_net, *_tasks.CLASSES),
    "text": _tasks.Task(
        _load_text, lambda: _tasks.make_letters_net(_BEFORE), *_tasks.LETTERS),
}
_RATES = {"digits": 1e-3, "text": 2e-3}
_SYNC_EVERY = {"digits": 20, "text": 50}  # The steps in a round.


class Trainer:
  """Trains a model.

  Attributes:
    rows: After each round: (steps, seconds, bytes sent, error).
  """

  _overlap = 0  # Steps after a round until the worker gets the center.

  def __init__(self, of, strategy=None):
    """Makes a trainer of what `run` tells."""
    self._task, self._held_out = TASKS[of.task_name], of.held_out
    self._sync_every = _SYNC_EVERY[of.task_name]
    self._rate = of.setting[0] * _RATES[of.task_name]
    self._strategy = strategy or tf.distribute.get_strategy()
    keras.utils.set_random_seed(of.seed)
    with self._strategy.scope():
      self._model = self._task.make_model()
    self._variables = self._model.trainable_variables
    self._size = 4 * self._model.count_params()
    self._steps = self._sent = 0
    self._seconds = 0.0
    self.rows = []

  def _keras_step(self, wrap=lambda opt: opt):
    """An optimizer, and a function of a batch that takes a step with it."""
    with self._strategy.scope():
      optimizer = wrap(keras.optimizers.Adam(self._rate))
      optimizer.build(self._variables)
    return optimizer, _tasks.step_of(self._strategy, self._model, optimizer,
                                     self._task.loss)

  def step(self):
    start = time.perf_counter()
    self._steps += 1
    ended = self._steps == self._overlap + self._sync_every * len(self.rows)
    self._take(ended)
    if self._steps > 1:
      self._seconds += time.perf_counter() - start
    if ended:
      self.evaluate()

  def _weights(self):
    """The weights to evaluate."""
    return self._variables

  def evaluate(self):
    # In all workers, so that none runs ahead while the clock stands.
    weights = self._weights()
    self.rows.append((
        self._sync_every * len(self.rows), self._seconds, self._sent,
        self._task.error_of(
            lambda x: self._model.stateless_call(weights, [], x)[0],
            self._held_out)))


class Worker(Trainer):
  """A worker in TensorFlow 2."""

  _local = None

  def __init__(self, task, of):
    self._of = of
    if of.way == "synchronous":
      os.environ["TF_CONFIG"] = json.dumps({
          "cluster": {"worker": of.addresses},
          "task": {"type": "worker", "index": task.number}})
      super().__init__(of, tf.distribute.MultiWorkerMirroredStrategy())
    else:
      super().__init__(of)
    self._batches = _tasks.batches(
        of.data, _BATCH * (_WORKERS if of.way == "all data" else 1),
        [of.seed, task.number])
    self._step = tf.function(self._keras_step()[1])
    if of.way in _LOCAL:
      make = wrapopt.LocalSGD if of.way == "LocalSGD" else functools.partial(
          wrapopt.DiLoCo, outer_learning_rate=of.setting[1], **_DILOCO[of.way])
      self._local = make(
          self._variables, of.addresses, f"worker-{task.number}", _WORKERS,
          self._sync_every, round_timeout_secs=120, name="job")
      self._overlap = self._local.overlap_steps

  def _take(self, ended):
    self._step(*map(tf.constant, next(self._batches)))
    if self._of.way == "synchronous":
      self._sent += self._size
    if self._local:
      before = self._local.report
      self._local.step()
      if self._local.report is not before:
        self._sent += self._local.report.sent

  def _weights(self):
    # Fragments get their centers at other steps than this one.
    return wrapopt.read_center(self._of.addresses, "job").values if (
        self._local) else super()._weights()


class Coordinator(Trainer):
  """Has workers take steps; one of its steps is one of each, in the mean."""

  def __init__(self, task, of):
    super().__init__(of, task.strategy)
    self._optimizer, step = self._keras_step(
        lambda opt: wrapopt.keras.DropStaleGradient(opt, _STALENESS))

    def batches():
      worker = (tf.distribute.coordinator
                .experimental_get_current_worker_index())
      return _tasks.dataset(
          tuple(tf.constant(quarters)[worker] for quarters in of.data), _BATCH,
          of.seed)

    self._schedule = task.scheduler(step, batches)
    self._join = task.coordinator.join

  def _take(self, ended):
    for _ in range(_WORKERS):
      self._schedule()
    if ended or self._steps == 1:
      self._join()
      # A dropped gradient is not sent.
      self._sent = self._size * int(self._optimizer.iterations) // _WORKERS


class Elastic(Trainer):
  """A worker in a session of TensorFlow 1."""

  def __init__(self, task, of):
    super().__init__(of)
    weights = self._model.get_weights()
    getter = wrapopt.ElasticAverageCustomGetter(task.device)

    def logits(x):
      self._variables = [tf1.get_variable(f"w{i}", initializer=w)
                         for i, w in enumerate(weights)]
      # Keras makes no variables in this graph, but its layers compute there.
      return self._model.stateless_call(self._variables, [], x)[0]

    with tf.Graph().as_default() as graph, tf1.device(task.placement()):
      with tf1.variable_scope("", custom_getter=getter, use_resource=True):
        self._net = _tasks.GraphNet(of.data, of.held_out, _BATCH,
                                    [of.seed, task.number], logits)
      opt = wrapopt.ElasticAverageOptimizer(
          tf1.train.AdamOptimizer(self._rate, epsilon=1e-7),  # As Keras.
          _WORKERS, getter, self._sync_every, of.setting[1] / _WORKERS, rho=0)
      self._train_op = opt.minimize(self._net.loss)
      self._centers = [getter.centers[v] for v in self._variables]
      start = opt.get_init_op(task.number)
    self._session = task.session(graph)
    self._session.run(start)

  def _take(self, ended):
    self._net.train(self._session, self._train_op)
    self._sent += self._size if ended else 0

  def _weights(self):
    return self._session.run(self._centers)


# What the processes do.


def serve(task):
  """Starts a server of wrapopt, and returns its address."""
  task.server = server_module.start()
  return task.server.target


def prepare(task, **of):
  """Makes a trainer and takes its first step, which traces."""
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.get_logger().setLevel("ERROR")
  make = {"asynchronous": Coordinator, "elastic": Elastic}.get(
      of["way"], Worker)
  task.trainer = make(task, types.SimpleNamespace(**of))
  task.trainer.evaluate()
  task.trainer.step()


def train(task, steps):
  """Takes the other steps, until all rows are there; returns them."""
  while task.trainer.rows[-1][0] < steps:
    task.trainer.step()
  return task.trainer.rows


def run(task_name, way, setting, seed, steps, data, held_out):
  """Trains; returns the rows of the first worker, or of the coordinator."""
  n = 1 if way in ("alone", "all data") else _WORKERS
  quarters = tuple(x[:len(x) // _WORKERS * _WORKERS].reshape(
      _WORKERS, -1, *x.shape[1:]) for x in data)
  with _cluster.Cluster(
      [serve, prepare, train], [_tasks.__name__, server_module.__name__],
      coordinator=True, ps=1, worker=n) as cluster:
    other = cluster.tasks["coordinator", 0]  # Outside the cluster.
    if way == "asynchronous":
      trainers = {other: quarters}
    else:
      trainers = {cluster.tasks["worker", k]: data if way == "all data" else
                  tuple(x[k] for x in quarters) for k in range(n)}
    addresses = [other.ask("serve")] if way in _LOCAL else [
        f"localhost:{port}" for port in _cluster.free_ports(n)]
    _cluster.ask_all("prepare", {trainer: {
        "task_name": task_name, "way": way, "setting": setting, "seed": seed,
        "addresses": addresses, "data": part, "held_out": held_out}
                                 for trainer, part in trainers.items()})
    return _cluster.ask_all(
        "train", {trainer: {"steps": steps} for trainer in trainers})[0]


def compare(out="results/diloco", steps=1000, tasks=tuple(TASKS), ways=WAYS,
            seeds=3, seed=0, quick=False):
  """Tunes ways, and trains in them.

  The steps are rounded up to whole rounds.
  """
  if quick:
    steps = min(steps, 100)

  def trainer_of(name, found):
    del found
    split = TASKS[name].load(12 if quick else 120)

    def train(way, setting, seed, points, part):
      del points, part  # After each round. A seed has a split of its own.
      return run(name, way, setting, seed,
                 steps + -steps % _SYNC_EVERY[name], *split(seed))

    return train

  found = _study.compare(
      tasks, {way: _SETTINGS[way][2:4] if quick else _SETTINGS[way]
              for way in ways},
      trainer_of, (), [seed + seeds], range(seed, seed + seeds))
  for name, of_ways in found.items():
    _command.print_table(
        f"{name}: errors of the settings that were tried, and the best",
        ["way", "best", *["error"] * max(
            len(of.tried) for of in of_ways.values())],
        [[way, _shown(of.best), *(f"{error:.2f}" for _, error in of.tried)]
         for way, of in of_ways.items()])
  show(out, found)
  return {"tasks": {name: {way: of.errors for way, of in of_ways.items()}
                    for name, of_ways in found.items()},
          "tuned": {name: {way: of.tried for way, of in of_ways.items()}
                    for name, of_ways in found.items()}}


def show(out, found):
  """Prints and draws {task: {way: Found}}."""

  def cells(of):
    _, seconds, sent, _ = np.mean(of.errors, axis=0)[-1]
    return _shown(of.best), f"{sent / 1e6:.2f}", f"{seconds:.1f}"

  _study.print_tables(found, TASKS, "held out", [
      "setting", "MB sent", "seconds"], cells)
  panels = []
  for name, of_ways in found.items():
    over_bytes, over_time = {}, {}
    rows = {way: np.array(of.errors) for way, of in of_ways.items()}
    # After the start. They differ between seeds only in asynchronous training.
    sent = {way: of.mean(axis=0)[1:, 2] / 1e6 for way, of in rows.items()}
    ends = [x for of in sent.values() for x in of if x] or [0.1, 1]
    for way, of in rows.items():
      over_time[way] = of.mean(axis=0)[:, 1], of[..., 3], _STYLES[way]
      over_bytes[way] = (
          (sent[way], of[:, 1:, 3], _STYLES[way]) if sent[way].any() else
          # Those that send nothing have a line at the error in the end.
          ([min(ends), max(ends)], of[:, [-1, -1], 3], _STYLES[way]))
    label = TASKS[name].label
    panels += [_plots.Panel(f"{name}, over MB sent (dotted: none)", label,
                            over_bytes, "log"),
               _plots.Panel(f"{name}, over seconds", label, over_time)]
  _plots.draw_curves(
      os.path.join(out, "diloco.png"),
      f"{_WORKERS} workers; band: the least and the largest of the seeds",
      "", panels)


def _shown(setting):
  return "x " + ", ".join(f"{x:g}" for x in setting)


main = _command.command("diloco", __doc__, compare)

if __name__ == "__main__":
  main()
