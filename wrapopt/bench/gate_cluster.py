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

import statistics

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


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  return _of_workers(options) if options.workers else _of_sets(options)


def _of_sets(options):
  results = []
  with _started(1) as cluster:
    for name in options.sets:
      shapes = harness.VARIABLE_SETS[name]
      seconds = _measured(cluster, _OF_SETS, shapes, 0.0, options, name)
      found = [{
          "part": "cluster", "set": name, "contender": contender,
          "milliseconds": 1e3 * statistics.median(times),
          "spread": harness.spread(times),
          "of_keras": harness.speedup(seconds["Keras"], times),
          "of_ungated": harness.speedup(seconds["ungated"], times),
          "rounds": harness.rounds(options),
      } for contender, times in seconds.items()]
      print(f"\n{name}: {len(shapes)} variables on two parameter servers")
      print(harness.table(
          ("", "ms", "+-", "x Keras", "x ungated"),
          [(r["contender"], f"{r['milliseconds']:.3f}", f"{r['spread']:.0%}",
            f"{r['of_keras']:.3f}", f"{r['of_ungated']:.3f}")
           for r in found]), flush=True)
      results += found
  return results


def _of_workers(options):
  results = []
  for workers in options.workers:
    with _started(workers) as cluster:
      for kind, (shapes, wait) in KINDS.items():
        label = f"{kind}, {workers} worker{'s' * (workers > 1)}"
        seconds = _measured(cluster, _OF_WORKERS, shapes, wait, options, label,
                            turn_seconds=0.5 * workers)
        found = [{
            "part": "workers", "kind": kind, "workers": workers,
            "contender": contender,
            "steps_per_second": 1 / statistics.median(times),
            "spread": harness.spread(times),
            # The ratio of speeds.
            "of_keras": harness.speedup(times, seconds[_OF_WORKERS[0]]),
            "rounds": harness.rounds(options),
        } for contender, times in seconds.items()]
        print(f"\n{label}")
        print(harness.table(
            ("", "steps/s", "+-", "x Keras"),
            [(r["contender"], f"{r['steps_per_second']:.1f}",
              f"{r['spread']:.0%}", f"{r['of_keras']:.3f}")
             for r in found]), flush=True)
        results += found
  return results


def _started(workers):
  return _cluster.Cluster([prepare, turn], preload=[__name__, "wrapopt.keras"],
                          coordinator=True, ps=2, worker=workers)


def _measured(cluster, names, shapes, wait, options, label, **more):
  """{contender: [seconds of a step in each round]}."""
  task = cluster.tasks["coordinator", 0]
  task.ask("prepare", names=names, shapes=shapes, wait=wait)
  return harness.alternate(
      {name: harness.RemoteContender(
          lambda calls, of=name: task.ask("turn", of=of, calls=calls))
       for name in names}, harness.rounds(options), label, **more)


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

  from wrapopt.keras import _steps

  if task.strategy is None:
    task.strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(task.spec), rpc_layer="grpc"))
    task.coordinator = tf.distribute.coordinator.ClusterCoordinator(
        task.strategy)
  strategy = task.strategy

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
        optimizer = _steps.followed(optimizer, [_steps.Alone()])

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
