"""The gate of Keras in a cluster: steps that a coordinator schedules.

Workers and two parameter servers, each a process on this machine. A step reads
all weights and sends a gradient for each. One worker takes steps with momentum:

  Keras             keras.optimizers.SGD itself, which may lose its count
  ungated           the same in a wrapper: one op on each server
  gated, admitted   inside of wrapopt.keras.DropStaleGradient
  gated, dropped    the same with a limit that admits nothing

With --workers, so many workers race, for each number, with steps of three
kinds: tiny ones, tiny ones that also wait for 20 ms, and those of a model of
21 MB. The optimizers are

  Keras's Adam        keras.optimizers.Adam itself, which may lose its count
  MovingAverage       wrapopt.keras.MovingAverage around it
  DropStaleGradient   wrapopt.keras.DropStaleGradient around it, admitted

A benchmark of the gate, with `--cluster`.
"""

import numpy as np

from wrapopt.bench import harness
from wrapopt.examples import _cluster

_RATE, _MOMENTUM = 1e-3, 0.9
_OF_SETS = ("Keras", "ungated", "gated, admitted", "gated, dropped")
_OF_WORKERS = ("Keras's Adam", "MovingAverage", "DropStaleGradient")
# {kind of step: (shapes of the variables, seconds of waiting)}.
KINDS = {
    "tiny": ([(8,)] * 4, 0.0),
    "waiting": ([(8,)] * 4, 0.02),
    "21 MB": ([(1280, 1024)] * 4, 0.0),
}


def contests(options):
  if options.workers:
    for workers in options.workers:
      for kind, (shapes, wait) in KINDS.items():
        yield from _contest(
            _OF_WORKERS, shapes, wait, workers,
            f"{kind}, {workers} worker{'s' * (workers > 1)}",
            {"part": "workers", "kind": kind, "workers": workers},
            peers={"of_keras": _OF_WORKERS[0]}, figure="steps_per_second",
            turn_seconds=0.5 * workers)
  else:
    for name, shapes in harness.chosen_sets(options):
      yield from _contest(
          _OF_SETS, shapes, 0.0, 1,
          f"{name}: {len(shapes)} variables on two parameter servers",
          {"part": "cluster", "set": name},
          peers={"x_keras": "Keras", "x_ungated": "ungated"})


def _contest(names, shapes, wait, workers, *title, **how):
  """Yields a contest of steps that a cluster takes."""
  with _cluster.Cluster(
      [prepare, turn], preload=[__name__, "wrapopt.keras"], coordinator=True,
      ps=2, worker=workers) as cluster:
    task = cluster.tasks["coordinator", 0]
    contest = harness.Contest(*title, **how)
    task.ask("prepare", names=names, shapes=shapes, wait=wait)
    contest.add({name: harness.RemoteContender(
        lambda calls, of=name: task.ask("turn", of=of, calls=calls))
                 for name in names})
    yield contest


def _optimizer(name):
  """The optimizer of a contender."""
  import keras

  from wrapopt.keras import DropStaleGradient
  from wrapopt.keras import MovingAverage

  inner = (keras.optimizers.SGD(_RATE, momentum=_MOMENTUM) if name in _OF_SETS
           else keras.optimizers.Adam(_RATE))
  if name == "MovingAverage":
    return MovingAverage(inner, 0.999)
  if name in ("gated, admitted", "gated, dropped", "DropStaleGradient"):
    return DropStaleGradient(inner, -1 if name == "gated, dropped" else 10**9)
  return inner


def prepare(task, names, shapes, wait):
  """Makes the variables and steps of all contenders, and checks the steps."""
  import keras
  import tensorflow as tf
  from tensorflow.python.data.experimental.ops import testing

  from wrapopt.keras import _followers
  from wrapopt.keras import _steps

  strategy = tf.distribute.ParameterServerStrategy(
      tf.distribute.cluster_resolver.SimpleClusterResolver(
          tf.train.ClusterSpec(task.spec), rpc_layer="grpc"))
  task.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

  def waited():
    """0, after `wait` seconds in which the worker's cores are free."""
    # Such a data set also waits before its end.
    return tf.cast(tf.data.Dataset.range(0).apply(
        testing.sleep(round(1e6 * wait))).reduce(
            np.int64(0), lambda total, x: total + x), tf.float32)

  def gradients_of(weights):
    values = [w.value.read_value() for w in weights]
    late = waited() if wait else 0.0
    return [0.5 * value + late for value in values]

  def step_of(name):
    with strategy.scope():
      weights = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
      optimizer = _optimizer(name)
      optimizer.build(weights)
      record = getattr(optimizer, "record_step", None)
      if name == "ungated":
        optimizer = _steps.followed(optimizer, [_followers.NoFollower()])

    @tf.function
    def step():
      def replica():
        if record is None:
          gradients = gradients_of(weights)
        else:
          with record():
            gradients = gradients_of(weights)
        optimizer.apply(gradients, weights)
      strategy.run(replica)

    return weights, step

  task.contenders = {name: step_of(name) for name in names}
  for name, (weights, _) in task.contenders.items():
    turn(task, name, 1)
    # The first step of Adam is one of the learning rate.
    change = {"gated, dropped": 0.0}.get(
        name, 0.5 * _RATE if name in _OF_SETS else _RATE)
    if not all(np.allclose(w.numpy(), 1 - change, rtol=0, atol=1e-6)
               for w in weights):
      raise AssertionError(f"{name}: a wrong step.")


def turn(task, of, calls):
  """Takes steps, as many at a time as workers; returns the seconds of one."""
  import time

  _, step = task.contenders[of]
  start = time.perf_counter()
  for _ in range(calls):
    task.coordinator.schedule(step)
  task.coordinator.join()
  return (time.perf_counter() - start) / calls
