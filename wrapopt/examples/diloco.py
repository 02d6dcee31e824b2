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

from collections.abc import Callable
from concurrent import futures
import functools
import json
import os
import time
from typing import NamedTuple, Optional

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt import server as server_module
from wrapopt.examples import _cluster
from wrapopt.examples import _command
from wrapopt.examples import _plots
from wrapopt.examples import _tasks
import wrapopt.keras

tf1 = tf.compat.v1
layers = keras.layers

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


class Setting(NamedTuple):
  """What is tuned.

  Attributes:
    rate: The learning rate of Adam, as a multiple of the task's.
    center: How fast the center moves: the outer rate of DiLoCo, or the moving
      rate of elastic averaging, of all workers. Or None.
  """
  rate: float
  center: Optional[float] = None

  def __str__(self):
    return f"rate x {self.rate:g}" + (
        f", center {self.center:g}" if self.center else "")


# As many for each way.
_SETTINGS = {way: [Setting(2.0**i) for i in range(-2, 6)] for way in WAYS}
# The default moving rate also divides by the period. In the 20 rounds of the
# text, the center would move less than a third of the way to the workers.
for _way in "elastic", *_DILOCO:
  _SETTINGS[_way] = [Setting(rate, center) for rate in (1, 2, 4, 8) for center
                     in ((0.9, 0.45) if _way == "elastic" else (0.7, 0.35))]

_BEFORE = 16  # Characters that the net of the text sees.


def _split_text(documents, seed):
  """Holds out a fifth of the documents."""
  samples = lambda of: _tasks.windows(_tasks.letters_of(of), _BEFORE)
  held_out = set(range(seed % 5, len(documents), 5))
  # A worker's quarter are modules that follow each other.
  training = samples([d for i, d in enumerate(documents) if i not in held_out])
  order = np.random.default_rng(seed)
  x, y = samples([documents[i] for i in sorted(held_out)])
  some = order.permutation(len(x))[:8000]
  return training, (x[some], y[some])


class Task(NamedTuple):
  """A task.

  Attributes:
    read: A function of the number of files of the standard library.
    split: A function of what `read` returns and a seed: the (inputs, targets)
      to train on, and others.
    measure: The model and its error.
    rate: A learning rate.
    sync_every: The steps in a round.
  """
  read: Callable
  split: Callable
  measure: _tasks.Task
  rate: float
  sync_every: int


TASKS = {
    "digits": Task(
        lambda files: None, lambda read, seed: _tasks.load_digits(seed),
        _tasks.Task(None, _tasks.make_net, *_tasks.CLASSES), 1e-3, 20),
    "text": Task(
        _tasks.read_documents, _split_text,
        _tasks.Task(None, lambda: _tasks.make_letters_net(_BEFORE),
                    *_tasks.LETTERS), 2e-3, 50),
}


class Trainer:
  """Trains a model.

  Attributes:
    rows: After each round: (steps, seconds, bytes sent, error).
  """

  _overlap = 0  # Steps after a round until the worker gets the center.

  def __init__(self, task_name, seed, held_out, setting, strategy):
    self._task, self._held_out = TASKS[task_name], held_out
    self._rate = setting.rate * self._task.rate
    self._strategy = strategy
    keras.utils.set_random_seed(seed)
    with strategy.scope():
      self._model = self._task.measure.make_model()
    self._variables = self._model.trainable_variables
    self._size = sum(v.value.dtype.size * int(np.prod(v.shape))
                     for v in self._variables)
    self._steps = self._sent = 0
    self._seconds = 0.0
    self.rows = []

  def _keras_step(self, wrap=lambda opt: opt):
    """An optimizer, and a function of a batch that takes a step with it."""
    with self._strategy.scope():
      optimizer = wrap(keras.optimizers.Adam(self._rate))
      optimizer.build(self._variables)
    return optimizer, _tasks.step_of(self._strategy, self._model, optimizer,
                                     self._task.measure.loss)

  def step(self):
    start = time.perf_counter()
    self._steps += 1
    ended = self._steps == self._overlap + (
        self._task.sync_every * len(self.rows))
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
        self._task.sync_every * len(self.rows), self._seconds, self._sent,
        self._task.measure.error_of(
            lambda x: self._model.stateless_call(weights, [], x)[0],
            self._held_out)))


class Worker(Trainer):
  """A worker in TensorFlow 2."""

  def __init__(self, task, way, addresses, data, seed, setting, **settings):
    self._synchronous = way == "synchronous"
    if self._synchronous:
      os.environ["TF_CONFIG"] = json.dumps({
          "cluster": {"worker": addresses},
          "task": {"type": "worker", "index": task.number}})
    super().__init__(
        seed=seed, setting=setting, **settings,
        strategy=tf.distribute.MultiWorkerMirroredStrategy()
        if self._synchronous else tf.distribute.get_strategy())
    self._batches = _tasks.batches(
        data, _BATCH * (_WORKERS if way == "all data" else 1),
        [seed, task.number])
    _, step = self._keras_step()
    self._step = tf.function(step)
    self._local = None
    if way in _LOCAL:
      self._addresses = addresses
      make = functools.partial(
          wrapopt.DiLoCo, outer_learning_rate=setting.center, **_DILOCO[way]
      ) if way in _DILOCO else wrapopt.LocalSGD
      self._local = make(
          self._variables, addresses, f"worker-{task.number}", _WORKERS,
          self._task.sync_every, round_timeout_secs=120, name="job")
      self._overlap = self._local.overlap_steps

  def _take(self, ended):
    self._step(*map(tf.constant, next(self._batches)))
    if self._synchronous:
      self._sent += self._size
    if self._local:
      before = self._local.report
      self._local.step()
      if self._local.report is not before:
        self._sent += self._local.report.sent

  def _weights(self):
    # Fragments get their centers at other steps than this one.
    return wrapopt.read_center(self._addresses, "job").values if (
        self._local) else super()._weights()


class Coordinator(Trainer):
  """Has workers take steps; one of its steps is one of each, in the mean."""

  def __init__(self, task, way, addresses, data, seed, **settings):
    del way, addresses
    super().__init__(seed=seed, **settings, strategy=task.strategy)
    self._coordinator = task.coordinator
    self._optimizer, step = self._keras_step(
        lambda opt: wrapopt.keras.DropStaleGradient(opt, _STALENESS))

    def batches():
      worker = (tf.distribute.coordinator
                .experimental_get_current_worker_index())
      return tf.data.Dataset.from_tensor_slices(tuple(
          tf.constant(quarters)[worker] for quarters in data)).shuffle(
              len(data[0][0]), seed).repeat().batch(_BATCH)

    self._step = tf.function(lambda iterator: step(*next(iterator)))
    self._iterator = iter(self._coordinator.create_per_worker_dataset(batches))

  def _take(self, ended):
    for _ in range(_WORKERS):
      self._coordinator.schedule(self._step, (self._iterator,))
    if ended or self._steps == 1:
      self._coordinator.join()
      # A dropped gradient is not sent.
      self._sent = self._size * int(self._optimizer.iterations) // _WORKERS


class Elastic(Trainer):
  """A worker in a session of TensorFlow 1."""

  def __init__(self, task, way, addresses, data, seed, setting, **settings):
    del way, addresses
    super().__init__(seed=seed, setting=setting, **settings,
                     strategy=tf.distribute.get_strategy())
    self._batches = _tasks.batches(data, _BATCH, [seed, task.number])
    weights = self._model.get_weights()
    getter = wrapopt.ElasticAverageCustomGetter(task.device)
    with tf.Graph().as_default() as graph, tf1.device(task.placement()):
      self._inputs = x, y = [
          tf1.placeholder(part.dtype, (None, *part.shape[1:])) for part in data]
      with tf1.variable_scope("", custom_getter=getter, use_resource=True):
        variables = [tf1.get_variable(f"w{i}", initializer=w)
                     for i, w in enumerate(weights)]
      # Keras makes no variables in this graph, but its layers compute there.
      outputs, _ = self._model.stateless_call(variables, [], x)
      opt = wrapopt.ElasticAverageOptimizer(
          tf1.train.AdamOptimizer(self._rate, epsilon=1e-7),  # As Keras.
          _WORKERS, getter, self._task.sync_every,
          setting.center / _WORKERS, rho=0)
      self._train_op = opt.minimize(
          tf.reduce_mean(self._task.measure.loss(y, outputs)))
      self._centers = [getter.centers[v] for v in variables]
      start = opt.get_init_op(task.number)
    self._session = task.session(graph)
    self._session.run(start)

  def _take(self, ended):
    self._session.run(
        self._train_op, dict(zip(self._inputs, next(self._batches))))
    self._sent += self._size if ended else 0

  def _weights(self):
    return self._session.run(self._centers)


# What the processes do.


def serve(task):
  """Starts a server of wrapopt, and returns its address."""
  task.server = server_module.start()
  return task.server.target


def prepare(task, way, **settings):
  """Makes a trainer and takes its first step, which traces."""
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.get_logger().setLevel("ERROR")
  make = {"asynchronous": Coordinator, "elastic": Elastic}.get(way, Worker)
  task.trainer = make(task, way, **settings)
  task.trainer.evaluate()
  task.trainer.step()


def train(task, steps):
  """Takes the other steps, until all rows are there; returns them."""
  while task.trainer.rows[-1][0] < steps:
    task.trainer.step()
  return task.trainer.rows


def _answers(processes):
  """The answers of all; the error of the first that fails."""
  # Without `with`: others may wait for the one that failed.
  pool = futures.ThreadPoolExecutor(len(processes))
  waiting = [pool.submit(p.answer) for p in processes]
  for done in futures.as_completed(waiting):
    done.result()
  return [done.result() for done in waiting]


def run(name, way, setting, seed, steps, data, held_out):
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
    elif way == "all data":
      trainers = {cluster.tasks["worker", 0]: data}
    else:
      trainers = {cluster.tasks["worker", k]: tuple(x[k] for x in quarters)
                  for k in range(n)}
    addresses = [other.ask("serve")] if way in _LOCAL else [
        f"localhost:{port}" for port in _cluster.free_ports(n)]
    for trainer, part in trainers.items():
      trainer.tell("prepare", task_name=name, way=way, addresses=addresses,
                   seed=seed, data=part, held_out=held_out, setting=setting)
    _answers(trainers)
    for trainer in trainers:
      trainer.tell("train", steps=steps)
    return _answers(trainers)[0]


def compare(out="results/diloco", steps=1000, tasks=tuple(TASKS), ways=WAYS,
            seeds=3, seed=0, quick=False):
  """Tunes ways, and trains in them.

  The steps are rounded up to whole rounds.
  """
  found, tuned = {}, {}
  tried = {way: _SETTINGS[way][2:4] if quick else _SETTINGS[way]
           for way in ways}
  with _extras.load("tqdm").tqdm(total=len(tasks) * sum(
      len(settings) + seeds for settings in tried.values())) as progress:
    for name in tasks:
      task = TASKS[name]
      of_task = min(steps, 100) if quick else steps
      of_task += -of_task % task.sync_every
      read = task.read(12 if quick else 120)

      def rows(way, setting, s):
        progress.set_postfix_str(f"{name}: {way}, {setting}")
        # pylint: disable-next=cell-var-from-loop
        got = run(name, way, setting, s, of_task, *task.split(read, s))
        progress.update()
        return got

      found[name], tuned[name], table = {}, {}, []
      for way, settings in tried.items():
        best, errors = _tasks.least(settings, lambda setting, way=way: rows(
            way, setting, seed + seeds)[-1][-1])
        table.append([way, best, *(f"{e:.2f}" for e in errors.values())])
        tuned[name][way] = list(errors.items())
        found[name][way] = [rows(way, best, s)
                            for s in range(seed, seed + seeds)]
      _command.print_table(
          f"{name}: errors of the settings that were tried, and the best",
          ["way", "best", *["error"] * max(map(len, tried.values()))], table)
  show(out, found)
  return {"tasks": found, "tuned": tuned}


def show(out, found):
  """Prints and draws {task: {way: the rows of each seed}}."""
  table, panels = [], []
  for name, of_ways in found.items():
    over_bytes, over_time, ends = {}, {}, []
    for way, rows in of_ways.items():
      # Of each seed. The bytes differ only in asynchronous training.
      steps_, seconds, sent, errors = np.moveaxis(np.array(rows), -1, 0)
      sent = sent.mean(axis=0) / 1e6
      table.append([
          name, way, int(steps_[0, -1]), *_command.of_seeds(errors),
          f"{sent[-1]:.2f}", f"{seconds[:, -1].mean():.1f}"])
      over_time[way] = seconds.mean(axis=0), errors, _STYLES[way]
      if sent.any():
        over_bytes[way] = sent[1:], errors[:, 1:], _STYLES[way]
        ends += [sent[1], sent[-1]]
    # Of those that send nothing, the errors in the end.
    ends = ends or [0.1, 1]
    over_bytes = {way: over_bytes.get(way, (
        [min(ends), max(ends)],
        np.repeat(np.array(rows)[:, -1:, 3], 2, axis=1), _STYLES[way]))
                  for way, rows in of_ways.items()}
    label = TASKS[name].measure.label
    panels += [_plots.Panel(f"{name}, over MB sent (dotted: none)", label,
                            over_bytes, "log"),
               _plots.Panel(f"{name}, over seconds", label, over_time)]
  _command.print_table(
      "errors on held-out data: the mean, least and largest of the seeds; what "
      "a worker sent",
      ["task", "way", "steps", "error", "least", "largest", "MB sent",
       "seconds"], table)
  _plots.draw_curves(
      os.path.join(out, "diloco.png"),
      f"{_WORKERS} workers; band: the least and the largest of the seeds",
      "", panels)


def main(argv=None):
  _command.main("diloco", __doc__, argv, compare)


if __name__ == "__main__":
  main()
