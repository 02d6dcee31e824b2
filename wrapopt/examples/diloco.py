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

from wrapopt import server as server_module
from wrapopt.examples import _cluster
from wrapopt.examples import _report
from wrapopt.examples import _study
from wrapopt.examples import _tasks
import wrapopt.keras

tf1 = tf.compat.v1

_WORKERS, _BATCH = 4, 32
_BEFORE = 16  # Characters that the net of the text sees.
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
# by the moving rate of elastic averaging, of all workers together. The default
# moving rate also divides by the period. In the 20 rounds of the text, the
# center would move less than a third of the way to the workers.
_CENTERS = {"elastic": (0.9, 0.45), **dict.fromkeys(_DILOCO, (0.7, 0.35))}
_SETTINGS = {way: [*itertools.product((1, 2, 4, 8), _CENTERS[way])]
             if way in _CENTERS else [(2.0**i,) for i in range(-2, 6)]
             for way in WAYS}


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


# They load a function of a seed: the samples to train on, and others.
TASKS = {
    "digits": _tasks.classes(lambda _: _tasks.load_digits, _tasks.make_net),
    "text": _tasks.predictions(
        "character", _load_text, lambda: _tasks.make_letters_net(_BEFORE))}
# {task: (its learning rate, steps in a round)}.
_RATES_AND_STEPS = {"digits": (1e-3, 20), "text": (2e-3, 50)}


# How a worker, or a coordinator, trains in a way. These return the model, a
# function that takes a step, one that returns the weights to evaluate, and one
# that returns the bytes sent in so many rounds.


def _in_worker(task, of):
  """A worker in TensorFlow 2."""
  strategy = tf.distribute.get_strategy()
  if of.way == "synchronous":
    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {"worker": of.addresses},
        "task": {"type": "worker", "index": task.number}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
  keras.utils.set_random_seed(of.seed)
  model, _, step = _tasks.make_step(
      strategy, TASKS[of.subject], lambda: keras.optimizers.Adam(of.rate))
  step, variables = tf.function(step), model.trainable_variables
  batches = _tasks.batches(
      of.data, _BATCH * (_WORKERS if of.way == "all data" else 1),
      [of.seed, task.number])
  take = lambda _: step(*map(tf.constant, next(batches)))
  if of.way not in _LOCAL:
    return model, take, lambda: variables, lambda rounds: (
        4 * model.count_params() * of.every * rounds
        if of.way == "synchronous" else 0)

  make = wrapopt.LocalSGD if of.way == "LocalSGD" else functools.partial(
      wrapopt.DiLoCo, outer_learning_rate=of.center, **_DILOCO[of.way])
  local = make(variables, of.addresses, f"worker-{task.number}", _WORKERS,
               of.every, round_timeout_secs=120, name="job")
  sent = {}

  def take_locally(_):
    take(_)
    local.step()
    if report := local.report:
      sent[report.fragment, report.round] = report.sent

  # Fragments get their centers at other steps than these.
  return (model, take_locally,
          lambda: wrapopt.read_center(of.addresses, "job").values,
          lambda _: sum(sent.values()))


def _in_coordinator(task, of):
  """Has workers take steps; one of its steps is one of each, in the mean."""
  keras.utils.set_random_seed(of.seed)
  model, optimizer, step = _tasks.make_step(
      task.strategy, TASKS[of.subject], lambda: wrapopt.keras.DropStaleGradient(
          keras.optimizers.Adam(of.rate), _STALENESS))

  def batches():
    worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    return _tasks.dataset(tuple(tf.constant(quarters)[worker]
                                for quarters in of.data), _BATCH, of.seed)

  schedule = task.scheduler(step, batches)

  def take(waits):
    for _ in range(_WORKERS):
      schedule()
    if waits:
      task.coordinator.join()

  # A dropped gradient is not sent.
  return model, take, lambda: model.trainable_variables, lambda _: (
      model.count_params() * int(optimizer.iterations) * 4 // _WORKERS)


def _in_session(task, of):
  """A worker in a session of TensorFlow 1."""
  keras.utils.set_random_seed(of.seed)
  model = TASKS[of.subject].make_model()
  getter, variables = wrapopt.ElasticAverageCustomGetter(task.device), []

  def logits(x):
    variables.extend(tf1.get_variable(f"w{i}", initializer=w)
                     for i, w in enumerate(weights))
    # Keras makes no variables in this graph, but its layers compute there.
    return model.stateless_call(variables, [], x)[0]

  weights = model.get_weights()
  with tf.Graph().as_default() as graph, tf1.device(task.placement()):
    with tf1.variable_scope("", custom_getter=getter, use_resource=True):
      net = _tasks.GraphNet(of.data, of.held_out, _BATCH,
                            [of.seed, task.number], logits)
    opt = wrapopt.ElasticAverageOptimizer(
        tf1.train.AdamOptimizer(of.rate, epsilon=1e-7),  # As Keras.
        _WORKERS, getter, of.every, of.center / _WORKERS, rho=0)
    train_op, start = opt.minimize(net.loss), opt.get_init_op(task.number)
  session = task.session(graph)
  session.run(start)
  return (model, lambda _: net.train(session, train_op),
          lambda: session.run([getter.centers[v] for v in variables]),
          lambda rounds: 4 * model.count_params() * rounds)


def _train(task, of):
  """Yields rows after each step: those of the rounds until then.

  A row has the steps, the seconds, the bytes sent and the error. The first one
  is of no steps.
  """
  way = {"asynchronous": _in_coordinator, "elastic": _in_session}.get(
      of.way, _in_worker)
  model, take, weights, sent = way(task, of)
  late = _DILOCO.get(of.way, {}).get("overlap_steps", 0)
  seconds, rows = 0.0, []
  for steps in itertools.count():
    start = time.perf_counter()
    ended = steps in (0, late + of.every * len(rows))
    if steps:
      take(ended or steps == 1)
    if steps > 1:  # The first step traces.
      seconds += time.perf_counter() - start
    if ended:
      # In all workers, so that none runs ahead while the clock stands.
      now = weights()
      rows.append((of.every * len(rows), seconds, sent(len(rows)),
                   TASKS[of.subject].error_of(
                       lambda x, now=now: model.stateless_call(now, [], x)[0],
                       of.held_out)))
    yield rows


# What the processes do.


def serve(task):
  """Starts a server of wrapopt, and returns its address."""
  task.server = server_module.start()
  return task.server.target


def prepare(task, **of):
  """Begins to train, with the first step."""
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.get_logger().setLevel("ERROR")
  task.training = _train(task, types.SimpleNamespace(**of))
  next(task.training)
  next(task.training)


def train(task, steps):
  """Takes the other steps, until all rows are there; returns them."""
  return next(rows for rows in task.training if rows[-1][0] >= steps)


def run(task, way, setting, seed, steps, data, held_out):
  """Trains; returns the rows of the first worker, or of the coordinator."""
  n = 1 if way in ("alone", "all data") else _WORKERS
  quarters = tuple(x[:len(x) // _WORKERS * _WORKERS].reshape(
      _WORKERS, -1, *x.shape[1:]) for x in data)
  with _cluster.Cluster(
      [serve, prepare, train], [_tasks.__name__, server_module.__name__],
      coordinator=True, ps=1, worker=n) as cluster:
    other = cluster.tasks["coordinator", 0]  # Outside the cluster.
    trainers = {other: quarters} if way == "asynchronous" else {
        cluster.tasks["worker", k]: data if way == "all data" else
        tuple(x[k] for x in quarters) for k in range(n)}
    addresses = [other.ask("serve")] if way in _LOCAL else [
        f"localhost:{port}" for port in _cluster.free_ports(n)]
    rate, every = _RATES_AND_STEPS[task]
    of = {"subject": task, "way": way, "rate": setting[0] * rate,
          "center": setting[-1], "every": every, "seed": seed,
          "addresses": addresses, "held_out": held_out}
    _cluster.ask_all("prepare", {trainer: {**of, "data": part}
                                 for trainer, part in trainers.items()})
    return _cluster.ask_all(
        "train", dict.fromkeys(trainers, {"steps": steps}))[0]


def compare(out="results/diloco", steps=1000, tasks=tuple(TASKS), ways=WAYS,
            seeds=3, quick=False):
  """Tunes ways, and trains in them.

  They take the steps up to the end of a round.
  """
  if quick:
    steps = min(steps, 100)

  # A seed has a split of its own. The errors are those after each round.
  trainer_of = lambda name, split, _: lambda way, setting, seed, *_: run(
      name, way, setting, seed, steps, *split(seed))

  def cells(of):
    _, seconds, sent, _ = np.mean(of["errors"], axis=0)[-1]
    return ("x " + ", ".join(f"{x:g}" for x in of["best"]),
            f"{sent / 1e6:.2f}", f"{seconds:.1f}",
            *(f"{error:.2f}" for _, error in of["tried"]))

  results = _study.compare(
      TASKS, tasks, {way: _SETTINGS[way] for way in ways}, trainer_of, steps,
      [seeds], seeds, quick)["tasks"]
  panels = []
  for name, found in results.items():
    label = TASKS[name].label
    tried = max(len(of["tried"]) for of in found.values())
    _study.print_table(
        f"{name}: {label}, held out, and of all settings that were tried",
        found, ["setting", "MB sent", "seconds", *["tried"] * tried], cells)
    rows = {way: np.array(of["errors"]) for way, of in found.items()}
    # After the start. They differ between seeds only in asynchronous training.
    sent = {way: of.mean(axis=0)[1:, 2] / 1e6 for way, of in rows.items()}
    ends = [x for of in sent.values() for x in of if x] or [0.1, 1]
    panels += [({
        way: (sent[way], of[:, 1:, 3], _STYLES[way]) if sent[way].any() else
             # Those that send nothing have a line at the error in the end.
             ([min(ends), max(ends)], of[:, [-1, -1], 3], _STYLES[way])
        for way, of in rows.items()}, {
            "title": f"{name}, over MB sent (dotted: none)", "ylabel": label,
            "xscale": "log"}), ({
        way: (of.mean(axis=0)[:, 1], of[..., 3], _STYLES[way])
        for way, of in rows.items()}, {
            "title": f"{name}, over seconds", "ylabel": label})]
  _report.draw_curves(
      out / "diloco.png",
      f"{_WORKERS} workers; band: the least and the largest of the seeds",
      "", panels)
  return {"tasks": results}


main = _report.command("diloco", __doc__, compare)

if __name__ == "__main__":
  main()
