"""Compares ways to train with four workers, by the bytes that they send.

  alone        one worker, which sends nothing
  synchronous  `tf.distribute.MultiWorkerMirroredStrategy` sums the gradients of
               all workers in each step
  LocalSGD     `wrapopt.LocalSGD`: the mean of all workers in each round
  DiLoCo       `wrapopt.DiLoCo`: an outer step towards the mean in each round

Each worker is a process on this machine, and has a quarter of the data. Two
tasks, which need no download:

  digits  scikit-learn's 1,797 scans of digits, in a net of two convolutions;
          rounds of 20 steps
  text    the next character of the standard library's docstrings, from the 16
          before it, in a net of two layers; rounds of 50 steps

All take the same number of steps of Adam, at one rate, which was not tuned for
any of them. The first worker measures the error on other data after each round:
that of the center for LocalSGD and DiLoCo.

The bytes are those that a worker sends: weights, or gradients in their size.
An all-reduce may send up to twice as much. The seconds are without start,
first step and evaluations. All processes share the processors and the memory of
one machine, so they say nothing about workers that a network connects.
"""

from collections.abc import Callable
from concurrent import futures
import json
import multiprocessing
import os
import time
from typing import NamedTuple

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

layers = keras.layers

_WORKERS = 4
_BATCH = 32
_LOCAL = {"LocalSGD": wrapopt.LocalSGD, "DiLoCo": wrapopt.DiLoCo}
_STYLES = {"alone": "C7:", "synchronous": "C2--", "LocalSGD": "C1.-",
           "DiLoCo": "C0.-"}
WAYS = tuple(_STYLES)

_BEFORE = 16  # Characters that the net of the text sees.
_CHARACTERS = " abcdefghijklmnopqrstuvwxyz"


def _split_text(documents, seed):
  """Holds out a fifth of the documents."""

  def samples(documents):
    text = "".join(" ".join(words) + " " for words in documents)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.array([_CHARACTERS.index(c) for c in text], np.int32), _BEFORE + 1)
    return windows[:, :-1], windows[:, -1]

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
    rate: The learning rate.
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
        _tasks.Task(None, lambda: keras.Sequential([
            keras.Input((_BEFORE,), dtype="int32"),
            layers.Embedding(len(_CHARACTERS), 16), layers.Flatten(),
            layers.Dense(128, "relu"), layers.Dense(len(_CHARACTERS))]),
                    _tasks.cross_entropy, _tasks.perplexity,
                    "perplexity of a character"), 2e-3, 50),
}


class Trainer:
  """A worker, which trains in one of WAYS.

  Attributes:
    rows: After each round: (steps, seconds, bytes sent, error).
  """

  def __init__(self, task_name, way, worker, addresses, seed, data, held_out):
    if way == "synchronous":
      os.environ["TF_CONFIG"] = json.dumps({
          "cluster": {"worker": addresses},
          "task": {"type": "worker", "index": worker}})
      strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
      strategy = tf.distribute.get_strategy()
    self._task = task = TASKS[task_name]
    self._batches = _tasks.batches(data, _BATCH, [seed, worker])
    self._held_out = held_out
    keras.utils.set_random_seed(seed)
    with strategy.scope():
      self._model = task.measure.make_model()
      optimizer = keras.optimizers.Adam(task.rate)
      optimizer.build(self._model.trainable_variables)
    variables = self._model.trainable_variables
    self._local = _LOCAL[way](
        variables, addresses, f"worker-{worker}", _WORKERS, task.sync_every,
        round_timeout_secs=120) if way in _LOCAL else None
    self._sent_in_step = sum(v.value.dtype.size * int(np.prod(v.shape))
                             for v in variables) if way == "synchronous" else 0

    def replica(x, y):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(task.measure.loss(y, self._model(x)))
        # Keras sums the gradients of the replicas.
        loss /= strategy.num_replicas_in_sync
      optimizer.apply(tape.gradient(loss, [v.value for v in variables]),
                      variables)

    self._step = tf.function(lambda x, y: strategy.run(replica, (x, y)))
    self._steps = self._sent = 0
    self._seconds = 0.0
    self.rows = []
    self._evaluate()

  def step(self):
    start = time.perf_counter()
    self._step(*map(tf.constant, next(self._batches)))
    self._steps += 1
    self._sent += self._sent_in_step
    ended = self._steps % self._task.sync_every == 0
    if self._local:
      self._local.step()
      self._sent += self._local.report.sent if ended else 0
    if self._steps > 1:
      self._seconds += time.perf_counter() - start
    if ended:
      self._evaluate()

  def _evaluate(self):
    # In all workers, so that none runs ahead while the clock stands.
    self.rows.append((self._steps, self._seconds, self._sent,
                      self._task.measure.error_of(self._model, self._held_out)))


# What the processes do.


def serve(task):
  """Starts a server, and returns its address."""
  task.server = server_module.start()
  return task.server.target


def prepare(task, **settings):
  """Makes a trainer and takes its first step, which traces."""
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.get_logger().setLevel("ERROR")
  task.trainer = Trainer(worker=task.number, **settings)
  task.trainer.step()


def train(task, steps):
  """Takes the other steps; returns the rows."""
  for _ in range(steps - 1):
    task.trainer.step()
  return task.trainer.rows


class _Job:
  """A context with the processes of one training."""

  def __init__(self):
    self._context = multiprocessing.get_context("forkserver")
    self._context.set_forkserver_preload(
        [_cluster.__name__, _tasks.__name__, server_module.__name__])
    self._all = []

  def start(self, job, n):
    started = []
    for number in range(n):
      started.append(_cluster.Process(
          self._context, {f.__name__: f for f in (serve, prepare, train)}, {},
          job, number))
      self._all.append(started[-1])
    self.answers(started)
    return started

  def answers(self, processes):
    """The answers of all; the error of the first that fails."""
    with futures.ThreadPoolExecutor(len(processes)) as pool:
      waiting = [pool.submit(p.answer) for p in processes]
      try:
        for done in futures.as_completed(waiting):
          done.result()
      except BaseException:
        self.__exit__()  # Others may wait for the one that failed.
        raise
      return [done.result() for done in waiting]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self._all:
      process.kill()


def run(name, way, seed, steps, data, held_out):
  """Trains with all workers; returns the rows of the first."""
  n = 1 if way == "alone" else _WORKERS
  with _Job() as job:
    if way in _LOCAL:
      addresses = [job.start("server", 1)[0].ask("serve")]
    else:
      # pylint: disable-next=protected-access
      addresses = [f"localhost:{port}" for port in _cluster._free_ports(n)]
    workers = job.start("worker", n)
    for k, worker in enumerate(workers):
      worker.tell(
          "prepare", task_name=name, way=way, addresses=addresses,
          seed=seed,
          data=tuple(np.array_split(x, _WORKERS)[k] for x in data),
          held_out=held_out)
    job.answers(workers)
    for worker in workers:
      worker.tell("train", steps=steps)
    return job.answers(workers)[0]


def compare(out="results/diloco", steps=1000, tasks=tuple(TASKS), seeds=3,
            seed=0, quick=False):
  """Trains in all ways.

  The steps are rounded up to whole rounds.
  """
  found = {}
  with _extras.load("tqdm").tqdm(
      total=len(tasks) * seeds * len(WAYS)) as progress:
    for name in tasks:
      task = TASKS[name]
      of_task = min(steps, 100) if quick else steps
      of_task += -of_task % task.sync_every
      read = task.read(12 if quick else 120)
      found[name] = {way: [] for way in WAYS}
      for s in range(seed, seed + seeds):
        data, held_out = task.split(read, s)
        for way in WAYS:
          progress.set_postfix_str(f"{name}: {way}")
          found[name][way].append(run(name, way, s, of_task, data, held_out))
          progress.update()

  table, panels = [], []
  for name, of_ways in found.items():
    over_bytes, over_time = {}, {}
    for way, rows in of_ways.items():
      # Of each seed; the number of bytes is the same.
      steps_, seconds, sent, errors = np.moveaxis(np.array(rows), -1, 0)
      last = errors[:, -1]
      table.append([
          name, way, int(steps_[0, -1]), f"{last.mean():.2f}",
          f"{last.min():.2f}", f"{last.max():.2f}", f"{sent[0, -1] / 1e6:.2f}",
          f"{seconds[:, -1].mean():.1f}"])
      over_time[way] = seconds.mean(axis=0), errors, _STYLES[way]
      if sent.any():
        over_bytes[way] = (np.log10(sent[0, 1:] / 1e6), errors[:, 1:],
                           _STYLES[way])
    ends = np.concatenate([x for x, _, _ in over_bytes.values()])
    alone = np.array(of_ways["alone"])[:, -1:, 3]
    over_bytes["alone, in the end: 0 bytes"] = (
        [ends.min(), ends.max()], np.repeat(alone, 2, axis=1), _STYLES["alone"])
    label = TASKS[name].measure.label
    panels += [_plots.Panel(f"{name}, over log10(MB sent)", label, over_bytes),
               _plots.Panel(f"{name}, over seconds", label, over_time)]
  _command.print_table(
      f"errors on held-out data: the mean, least and largest of {seeds} seeds; "
      "what a worker sent",
      ["task", "way", "steps", "error", "least", "largest", "MB sent",
       "seconds"], table)
  path = os.path.join(out, "diloco.png")
  _plots.draw_curves(
      path, f"{_WORKERS} workers; band: the least and the largest of the seeds",
      "", panels)
  print(path)
  return {"tasks": found}


def main(argv=None):
  _command.main("diloco", __doc__, argv, compare)


if __name__ == "__main__":
  main()
