"""The gate of Keras in a cluster: steps that a coordinator schedules.

One worker and two parameter servers, each a process on this machine. A step
reads all weights, sends a gradient for each, and is taken by Momentum:

  Keras             keras.optimizers.SGD itself, which may lose its count
  ungated           the same in a wrapper: one op on each server
  gated, admitted   inside of wrapopt.keras.DropStaleGradient
  gated, dropped    the same with a limit that admits nothing

A benchmark of the gate, with `--cluster`.
"""

import statistics

import numpy as np

from wrapopt.bench import harness
from wrapopt.examples import _cluster

_RATE, _MOMENTUM = 1e-3, 0.9
_KERAS = "Keras"
_NAMES = (_KERAS, "ungated", "gated, admitted", "gated, dropped")


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  results = []
  with _cluster.Cluster([prepare, turn], preload=[__name__, "wrapopt.keras"],
                        coordinator=True, ps=2, worker=1) as cluster:
    task = cluster.tasks["coordinator", 0]
    for name in options.sets:
      shapes = harness.VARIABLE_SETS[name]
      task.ask("prepare", shapes=shapes)
      seconds = harness.alternate(
          {contender: harness.RemoteContender(
              lambda calls, c=contender: task.ask("turn", of=c, calls=calls))
           for contender in _NAMES}, harness.rounds(options), name)
      found = [{
          "part": "cluster", "set": name, "contender": contender,
          "milliseconds": 1e3 * statistics.median(times),
          "spread": harness.spread(times),
          "of_keras": harness.speedup(seconds[_KERAS], times),
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


def prepare(task, shapes):
  """Makes the variables and steps of all contenders, and checks the steps."""
  import keras
  import tensorflow as tf

  from wrapopt.keras import DropStaleGradient
  from wrapopt.keras import _steps

  if task.strategy is None:
    task.strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(task.spec), rpc_layer="grpc"))
    task.coordinator = tf.distribute.coordinator.ClusterCoordinator(
        task.strategy)
  strategy = task.strategy

  def step_of(name):
    with strategy.scope():
      weights = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
      optimizer = keras.optimizers.SGD(_RATE, momentum=_MOMENTUM)
      gate = None
      if name.startswith("gated"):
        gate = optimizer = DropStaleGradient(
            optimizer, 10**9 if name.endswith("admitted") else -1)
      optimizer.build(weights)
      if name == "ungated":
        optimizer = _steps.followed(optimizer, [_steps.Alone()])

    @tf.function
    def step():
      def replica():
        if gate is None:
          gradients = [0.5 * w.value.read_value() for w in weights]
        else:
          with gate.record_step():
            gradients = [0.5 * w.value.read_value() for w in weights]
        optimizer.apply(gradients, weights)
      strategy.run(replica)

    return weights, step

  task.contenders = {name: step_of(name) for name in _NAMES}
  for name, (weights, _) in task.contenders.items():
    turn(task, name, 1)
    want = 1.0 if name.endswith("dropped") else 1 - 0.5 * _RATE
    if not all(np.allclose(w.numpy(), want, rtol=0, atol=1e-6)
               for w in weights):
      raise AssertionError(f"{name}: a wrong step.")


def turn(task, of, calls):
  """Takes steps one after the other; returns the seconds of a step."""
  import time

  _, step = task.contenders[of]
  start = time.perf_counter()
  for _ in range(calls):
    task.coordinator.schedule(step)
    task.coordinator.join()
  return (time.perf_counter() - start) / calls
