"""The staleness gate: the cost of an admitted and of a dropped step.

Momentum steps with given gradients, in a v1 session on float32 resource
variables. Compares `wrapopt.DropStaleGradientOptimizer` with

  ungated, one op        the op of the gate's step, without a gate
  ungated, stock         MomentumOptimizer
  tf.cond around stock   the same after a comparison of steps, as in 1.15

Admitted and dropped steps alternate. The benchmark checks that admitted steps
change the variables correctly and dropped steps do not change them. The cost of
a dropped step must not depend on the size of the variables, and only a little
on their number.

With --workers, it measures instead steps of Keras that a coordinator schedules,
on so many workers that race, for each number, and two parameter servers, each a
process on this machine. A step reads all weights and sends a gradient for each.
There are three kinds: tiny ones, tiny ones that also wait for 20 ms, and those
of a model of 21 MB. The optimizers are

  Keras's Adam        keras.optimizers.Adam itself, which may lose its count
  MovingAverage       wrapopt.keras.MovingAverage around it
  DropStaleGradient   wrapopt.keras.DropStaleGradient around it, admitted
"""

import contextlib
import time

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from wrapopt._v1._steps import _rules
from wrapopt._v1._steps import _step
from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt.bench import step as step_bench
from wrapopt.drop_stale_gradient import DropStaleGradientOptimizer
from wrapopt.examples import _cluster

_RATE, _MOMENTUM = 1e-3, 0.9
_UNGATED, _STOCK, _COND = (
    "ungated, one op", "ungated, stock", "tf.cond around stock, admitted")
_ALL, _NONE = 10**9, -1  # Limits of staleness.
# {contender: (a wrapper of Keras's half around Adam, its argument), or none}.
_OF_WORKERS = {
    "Keras's Adam": (),
    "MovingAverage": ("MovingAverage", 0.999),
    "DropStaleGradient": ("DropStaleGradient", _ALL)}
# {kind of step: (shapes of the variables, seconds of waiting)}.
KINDS = {
    "tiny": ([(8,)] * 4, 0.0), "waiting": ([(8,)] * 4, 0.02),
    "21 MB": ([(1280, 1024)] * 4, 0.0)}


def add_arguments(parser):
  harness.add_sets(parser)
  parser.add_argument(
      "--workers", nargs="+", type=int, default=(), metavar="N",
      help="instead of the sets, three kinds of steps of Keras, of N workers "
      "that race")


def contests(options):
  for workers in options.workers:
    for kind, (shapes, wait) in KINDS.items():
      yield from _in_cluster(shapes, wait, workers, kind)
  for name in options.sets if not options.workers else ():
    shapes = sets.VARIABLE_SETS[name]
    contest = harness.Contest(
        sets.described(name), {"set": name},
        peers={"x_ungated": _UNGATED, "x_stock": _STOCK, "x_cond": _COND},
        expected=expected)
    contest.add(*harness.in_session(lambda shapes=shapes: graph(shapes)))
    yield contest


def expected(name, before, after):
  """What a step makes of weights and momenta, for `harness.check`."""
  del after
  weights, momenta = before["weights"], before["momenta"]
  if not name.endswith("dropped"):
    momenta = _MOMENTUM * momenta + before["gradients"]
    weights = weights - _RATE * momenta
  return {"weights": (weights, 1e-5), "momenta": (momenta, 1e-5)}


def graph(shapes):
  """As `harness.in_session` wants it."""
  weights, gradients = (step_bench.variables(shapes) for _ in range(2))
  step = tf.compat.v1.train.get_or_create_global_step()
  inner = tf.compat.v1.train.MomentumOptimizer(_RATE, _MOMENTUM)
  pairs = [(g.read_value(), v) for g, v in zip(gradients, weights)]

  def gated(limit):
    opt = DropStaleGradientOptimizer(inner, tf.constant(limit, tf.int64))
    with opt.record_step(step):
      return opt.apply_gradients(pairs, step).op

  def compared(limit):
    recorded = step + 0

    def admitted():
      with tf.control_dependencies([inner.apply_gradients(pairs, step)]):
        return tf.constant(0.0)

    with tf.control_dependencies([recorded]):
      return tf.cond(step - recorded <= limit, admitted,
                     lambda: tf.constant(1.0)).op

  trains = {
      _UNGATED: _rules.apply_gradients(
          inner, _rules.rule_of(inner), _step.Step(pairs, step)),
      "gated, admitted": gated(_ALL),
      _STOCK: inner.apply_gradients(pairs, step),
      _COND: compared(_ALL),
      "gated, dropped": gated(_NONE),
      "tf.cond around stock, dropped": compared(_NONE),
  }
  rows = [weights, [inner.get_slot(v, "momentum") for v in weights], gradients]
  return trains, sets.filled(rows, range(3)), dict(zip(
      ("weights", "momenta", "gradients"), map(harness.sample, rows)))


def _in_cluster(shapes, wait, workers, kind):
  """Yields a contest of steps that a cluster takes."""
  with _cluster.Cluster(
      [prepare, turn], preload=[__name__, "wrapopt.keras"], coordinator=True,
      ps=2, worker=workers) as cluster:
    task = cluster.tasks["coordinator", 0]
    contest = harness.Contest(
        f"{kind}, {workers} worker{'s' * (workers > 1)}",
        {"part": "workers", "kind": kind, "workers": workers},
        peers={"of_keras": "Keras's Adam"}, figure="steps_per_second",
        turn_seconds=0.5 * workers)
    task.ask("prepare", shapes=shapes, wait=wait)
    contest.add({name: harness.RemoteContender(
        lambda calls, of=name: task.ask("turn", of=of, calls=calls))
                 for name in _OF_WORKERS})
    yield contest


# These run in the coordinator's process.


def prepare(task, shapes, wait):
  """Makes the variables and steps of all contenders, and checks the steps."""
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras

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
    with task.strategy.scope():
      weights = [keras.Variable(np.ones(shape, np.float32)) for shape in shapes]
      optimizer = keras.optimizers.Adam(_RATE)
      if wrapper := _OF_WORKERS[name]:
        optimizer = getattr(wrapopt.keras, wrapper[0])(optimizer, wrapper[1])
      optimizer.build(weights)
      record = getattr(optimizer, "record_step", contextlib.nullcontext)

    @tf.function
    def step():
      def replica():
        with record():
          gradients = gradients_of(weights)
        optimizer.apply(gradients, weights)
      task.strategy.run(replica)

    return weights, step

  task.contenders = {name: step_of(name) for name in _OF_WORKERS}
  for name, (weights, _) in task.contenders.items():
    turn(task, name, 1)
    # The first step of Adam is one of the learning rate.
    if not all(np.allclose(w.numpy(), 1 - _RATE, rtol=0, atol=1e-6)
               for w in weights):
      raise AssertionError(f"{name}: a wrong step.")


def turn(task, of, calls):
  """Takes steps, as many at a time as workers; returns the seconds of one."""
  _, step = task.contenders[of]
  start = time.perf_counter()
  for _ in range(calls):
    task.coordinator.schedule(step)
  task.coordinator.join()
  return (time.perf_counter() - start) / calls
