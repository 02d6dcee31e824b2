"""Compares ways to train with four workers: by the bytes that they send.

  alone        one worker, with a quarter of the data, sends nothing
  synchronous  `tf.distribute.MultiWorkerMirroredStrategy` sums the gradients of
               all workers in each step
  LocalSGD     `wrapopt.LocalSGD`: the mean of all workers every H steps
  DiLoCo       `wrapopt.DiLoCo`: an outer step with momentum every H steps

Each worker is a process on this machine and has a quarter of the training data.
The tasks:

  digits  scikit-learn's 1,797 scans of digits, in a net of two convolutions
  text    the next character of the standard library's docstrings, from the 16
          before it, in a net of two layers

All take the same number of steps of Adam. The first worker measures the error
on other data: of its weights, or of the center right after a round. The bytes
are those that a worker sends: for the synchronous workers, the size of their
gradients, of which an all-reduce may send twice as much. The seconds do not
count evaluations; four workers share the processors of one machine, whose
connections are fast, so the time says less than the bytes.
"""

from concurrent import futures
import json
import multiprocessing
import os
import time

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

_WORKERS = 4
_BATCH = 32
_STYLES = {"alone": "C7:", "synchronous": "C2--", "LocalSGD": "C1.-",
           "DiLoCo": "C0.-"}
_LOCAL = {"LocalSGD": wrapopt.LocalSGD, "DiLoCo": wrapopt.DiLoCo}
_SEEN = 16  # Characters before the next one.
_LETTERS = " abcdefghijklmnopqrstuvwxyz"


def _read_text(files):
  text = " ".join(word for document in _tasks.read_documents(files)
                  for word in document)
  return np.array([_LETTERS.index(c) for c in text], np.int32)


def _split_text(ids):
  windows = np.lib.stride_tricks.sliding_window_view(ids, _SEEN + 1)
  # The samples that are held out overlap no others.
  held_out = windows[-len(windows) // 5:][:20_000]
  training = windows[:-len(windows) // 5 - _SEEN]
  return [(part[:, :-1], part[:, -1]) for part in (training, held_out)]


def _text_net():
  return keras.Sequential([
      keras.Input((_SEEN,), dtype="int32"),
      keras.layers.Embedding(len(_LETTERS), 16), keras.layers.Flatten(),
      keras.layers.Dense(128, "relu"), keras.layers.Dense(len(_LETTERS))])


# {name: (function of the number of files that reads the data; function of these
# that returns the samples to train on and others; function that makes a net;
# learning rate; steps between rounds)}
TASKS = {
    "digits": (lambda files: _tasks.load_digits(0), lambda read: read,
               _tasks.make_net, 1e-3, 20),
    "text": (_read_text, _split_text, _text_net, 2e-3, 50)}


def train(task, way, seed, k, addresses, steps, points, read):
  """Trains worker `k`, in a process of its own.

  Args:
    task: One of TASKS.
    way: One of _STYLES.
    seed: Of weights and batches.
    k: The number of the worker.
    addresses: Of the workers ("synchronous") or the servers.
    steps: The number of steps.
    points: The number of steps between evaluations.
    read: The data.

  Returns:
    A list of (steps, seconds, bytes sent, error in percent).
  """
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.get_logger().setLevel("ERROR")
  strategy = tf.distribute.get_strategy()
  if way == "synchronous":
    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": k}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
  _, split, make, rate, sync_every = TASKS[task]
  data, held_out = split(read)
  batches = _tasks.batches([x[k::_WORKERS] for x in data], _BATCH,
                           seed * _WORKERS + k)
  keras.utils.set_random_seed(seed)
  with strategy.scope():
    model = make()
    optimizer = keras.optimizers.Adam(rate)
    optimizer.build(model.trainable_variables)
  values = model.trainable_variables
  size = sum(4 * int(np.prod(v.shape)) for v in values)
  local = way in _LOCAL and _LOCAL[way](
      values, addresses, f"worker-{k}", _WORKERS, sync_every,
      round_timeout_secs=120)

  def update(x, y):
    with tf.GradientTape() as tape:
      # Keras sums the gradients of replicas.
      loss = _tasks.loss_of(y, model(x)) / strategy.num_replicas_in_sync
    optimizer.apply(tape.gradient(loss, values), values)

  step = tf.function(lambda x, y: strategy.run(update, (x, y)))
  rows, sent, seconds = [], 0, 0.0

  def evaluate(steps):
    if k == 0:
      rows.append((steps, seconds, sent, float(_tasks.wrong(
          held_out[1], model(held_out[0]).numpy(), None))))

  evaluate(0)
  for i, (x, y) in zip(range(1, steps + 1), batches):
    start = time.perf_counter()
    step(tf.constant(x), tf.constant(y))
    if local:
      local.step()
      sent += local.report.sent if i % sync_every == 0 else 0
    elif way == "synchronous":
      sent += size
    if i > 1:  # Not the trace.
      seconds += time.perf_counter() - start
    if i % points == 0:
      evaluate(i)
  return rows


def _job(context, task, way, seed, steps, points, read):
  """The rows of the first worker of a job."""
  count = 1 if way == "alone" else _WORKERS
  server = server_module.start() if way in _LOCAL else None
  addresses = ([server.target] if server else
               [f"localhost:{p}" for p in _cluster._free_ports(count)])
  with futures.ProcessPoolExecutor(count, context) as pool:
    workers = [pool.submit(train, task, way, seed, k, addresses, steps, points,
                           read) for k in range(count)]
    try:
      return [worker.result() for worker in workers][0]
    except BaseException:
      # The others wait for the one that failed.
      for process in pool._processes.values():
        process.kill()
      raise


def compare(out="results/diloco", steps=1000, tasks=tuple(TASKS), seeds=3,
            files=300, quick=False):
  """Trains in all ways."""
  if quick:
    steps, files = 100, 20
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload([__name__])
  found, rows, panels = {}, [], []
  with _extras.load("tqdm").tqdm(
      total=len(tasks) * len(_STYLES) * seeds) as progress:
    for task in tasks:
      sync_every = TASKS[task][-1]
      found[task] = {}
      read = TASKS[task][0](files)
      for way in _STYLES:
        found[task][way] = []
        for seed in range(seeds):
          found[task][way].append(_job(context, task, way, seed, steps,
                                       sync_every, read))
          progress.update()
  for task, of_ways in found.items():
    by_bytes, by_time = {}, {}
    for way, of_seeds in of_ways.items():
      _, seconds, sent, errors = np.moveaxis(np.array(of_seeds), -1, 0)
      last = errors[:, -1]
      rows.append([task, way, f"{last.mean():.2f}", f"{last.min():.2f}",
                   f"{last.max():.2f}", f"{sent[0, -1] / 1e6:.2f}",
                   f"{seconds[:, -1].mean():.1f}"])
      by_time[way] = seconds.mean(axis=0), errors, _STYLES[way]
      if sent.any():
        by_bytes[way] = (np.maximum(sent[0], 1e4) / 1e6, errors, _STYLES[way])
    panels += [_plots.Panel(f"{task}: by seconds", "wrong (%)", by_time),
               _plots.Panel(f"{task}: by MB sent (logarithmic)", "wrong (%)",
                            {way: (np.log10(x), y, style) for way, (x, y, style)
                             in by_bytes.items()})]
  _command.print_table(
      f"wrong (%) after {steps} steps, of {seeds} seeds",
      ["task", "way", "mean", "least", "largest", "MB sent", "seconds"], rows)
  path = os.path.join(out, "diloco.png")
  _plots.draw_curves(path, "four workers; band: the least and the largest seed",
                     "seconds, or log10 of the MB that a worker sends", panels)
  print(path)
  return {"table": rows, "curves": found}


def main(argv=None):
  _command.main("diloco", __doc__, argv, compare)


if __name__ == "__main__":
  main()
