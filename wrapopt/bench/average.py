"""Averages of weights: the averaging op, and a round of averaging in a cluster.

The mean of S variables into another one, in a v1 session. Compares
`wrapopt.ops.averaging_assign` with

  tf.add_n              of the S, times 1 / S, and an assignment
  the streaming limit   native threads that add S arrays to another one

GB/s counts the least traffic of a pass: each source is read, each target is
read and written. More traffic does not give a contender more GB/s.

Then a round of two workers and a parameter server, which are processes on this
machine: it takes the mean of the workers' weights, and the workers resume from
it. Compares `wrapopt.ModelAverageOptimizer` with

  accumulators          a ConditionalAccumulator for each variable and a queue
                        of tokens, as in TensorFlow 1.15

without a step of training. Counts the transfers of tensors between processes,
and their bytes, from the workers' step stats.

Then a step between rounds, of one worker and a parameter server: of gradient
descent alone, and in `wrapopt.ModelAverageOptimizer` and
`wrapopt.ElasticAverageOptimizer`. Counts the nodes that run in each process,
the calls between the two for a tensor, dead or not, and the transferred bytes.

All variables are float32. All contenders are checked to compute the mean.
"""

import contextlib
import time

import numpy as np
import tensorflow as tf

from wrapopt._types import V1Optimizer
from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt.elastic_average import ElasticAverageCustomGetter
from wrapopt.elastic_average import ElasticAverageOptimizer
from wrapopt.examples import _cluster
from wrapopt.model_average import ModelAverageCustomGetter
from wrapopt.model_average import ModelAverageOptimizer
from wrapopt import ops

_tf1 = tf.compat.v1
_SOURCES = (2, 4, 8)
_WORKERS = 2
_ADD_N = "tf.add_n, assign"
_ACCUMULATORS = "accumulators"
_ROUNDS = ("wrapopt", _ACCUMULATORS)
_INNER = "GradientDescent"
_STEPS = (_INNER, "ModelAverage", "ElasticAverage")


def add_arguments(parser):
  # Nine copies of BERT, twice, exceed the memory of most machines.
  harness.add_sets(parser, ["2x4096x4096", "resnet50", "400x256"])
  harness.add_choice(parser, "parts", _PARTS)


def contests(options):
  for name, shapes in harness.chosen_sets(options):
    for part in options.parts:
      yield from _PARTS[part](name, shapes, {"part": part, "set": name})


def _means(name, shapes, facts):
  for sources in _SOURCES:
    contest = harness.Contest(
        f"{sets.described(name, shapes)}, S = {sources}",
        {**facts, "sources": sources}, peers={"of_add_n": _ADD_N},
        expected=expected, streams=(shapes, sources))
    contest.add(*harness.in_session(
        lambda sources=sources: graph(shapes, sources)), written=1)
    yield contest


def graph(shapes, sources):
  """As `harness.in_session` wants it."""
  rows = [[tf.Variable(lambda shape=shape: tf.zeros(shape), trainable=False)
           for shape in shapes] for _ in range(sources + 1)]
  targets, *of_sources = rows
  return {
      "wrapopt": ops.averaging_assign(targets, of_sources),
      _ADD_N: tf.group(*[
          target.assign(tf.add_n([v.read_value() for v in vs]) / sources).op
          for target, *vs in zip(targets, *of_sources)]),
  }, sets.filled(rows, range(sources + 1)), {
      "the mean" if k == 0 else f"source {k}": harness.sample(row)
      for k, row in enumerate(rows)}


def expected(name, before, after):
  """The mean of the sources, and the sources, for `harness.check`."""
  del name, after
  want = {what: (x, 0) for what, x in before.items() if what != "the mean"}
  mean = np.mean([x for x, _ in want.values()], axis=0)
  return {"the mean": (mean, 1e-6), **want}  # All are in [0, 1).


# A round of a cluster. The functions of its processes come first.


class _NoTraining(V1Optimizer):
  """An optimizer that changes no weights, to measure only the round."""

  def __init__(self):
    super().__init__(use_locking=False, name="NoTraining")

  def _apply_dense(self, grad, var):
    return tf.no_op()

  def _resource_apply_dense(self, grad, handle):
    return tf.no_op()


def _accumulators(pairs, is_chief, step):
  """A round as in TensorFlow 1.15.

  Args:
    pairs: [(this worker's variable, its center)].
    is_chief: Whether this worker is the chief.
    step: The global step, which counts the rounds.

  Returns:
    An operation.
  """
  pushed, means = [], []
  for local, center in pairs:
    with ops.device_of(center):
      accumulator = _tf1.ConditionalAccumulator(
          tf.float32, center.shape, shared_name=f"{center.name}/var_accum")
      pushed.append(accumulator.apply_grad(local.read_value(), step))
      means.append(accumulator.take_grad(_WORKERS))
  with ops.device_of(step):
    queue = tf.queue.FIFOQueue(-1, [tf.bool], [()], shared_name="sync_queue")
  with tf.control_dependencies(pushed):
    if is_chief:
      ended = []
      for mean, (_, center) in zip(means, pairs):
        with ops.device_of(center):
          ended.append(center.assign(mean).op)
      with ops.device_of(step):
        ended.append(step.assign_add(1).op)
        with tf.control_dependencies(ended):
          synced = queue.enqueue_many(tf.fill([_WORKERS - 1], False))
    else:
      synced = queue.dequeue()
  with tf.control_dependencies([synced]):
    return tf.group(*[local.assign(center.read_value()).op
                      for local, center in pairs])


def start(task, shapes):
  """Makes this worker's graph and session, once the chief has made its own."""
  is_chief = task.number == 0
  getter = ModelAverageCustomGetter(task.device)
  graph = tf.Graph()
  with graph.as_default(), _tf1.device(task.placement()):
    step = _tf1.train.get_or_create_global_step()
    with _tf1.variable_scope("", custom_getter=getter, use_resource=True):
      weights = [_tf1.get_variable(f"w{i}", shape, tf.float32,
                                   _tf1.zeros_initializer())
                 for i, shape in enumerate(shapes)]
    pairs = list(getter.centers.items())
    opt = ModelAverageOptimizer(_NoTraining(), _WORKERS, is_chief, getter,
                                interval_steps=1)
    rounds = {
        "wrapopt": opt.apply_gradients([(v, v) for v in weights], step).op,
        _ACCUMULATORS: _accumulators(pairs, is_chief, step)}
    fill = tf.group(*[
        v.assign(sets.numbers(v.shape, (task.number, i))).op
        for i, v in enumerate(weights)])
    state = [harness.sample(row) for row in zip(*pairs)]
    _begin(task, rounds, [opt.make_session_run_hook()], is_chief)
  task.fill = task.training.make_callable(fill)
  task.state = task.training.make_callable(state)


def _begin(task, ops, hooks, is_chief=True):
  """Starts a session of the current graph, in which `take` runs an op."""
  init = [_tf1.local_variables_initializer()]
  if is_chief:
    init.append(_tf1.global_variables_initializer())
  for hook in hooks:
    hook.begin()
  # Not closed: it lasts as long as the process.
  task.training, task.ops = task.session(_tf1.get_default_graph()), ops
  task.training.run(init)
  for hook in hooks:
    hook.after_create_session(task.training, None)
  task.calls = {name: task.training.make_callable(op)
                for name, op in ops.items()}


def take(task, contender, calls):
  """Makes rounds or steps; returns the seconds of one."""
  start = time.perf_counter()
  for _ in range(calls):
    task.calls[contender]()
  return (time.perf_counter() - start) / calls


def check_round(task, contender):
  """Makes a round. Returns samples of weights and centers, before and after."""
  task.fill()
  before = task.state()
  task.calls[contender]()
  return before, task.state()


def transfers(task, contender):
  """Bytes of each of the tensors that cross when this worker runs an op."""
  most = []
  # A server reports its transfers later.
  for _ in range(10):
    seen = [sum(output.tensor_description.allocation_description
                .requested_bytes for output in node.output)
            for device in _traced(task, contender).step_stats.dev_stats
            for node in device.node_stats if node.node_name == "RecvTensor"]
    most = max(most, seen, key=len)
  return most


def _traced(task, contender):
  metadata = _tf1.RunMetadata()
  task.training.run(
      task.ops[contender], run_metadata=metadata,
      options=_tf1.RunOptions(trace_level=_tf1.RunOptions.FULL_TRACE,
                              output_partition_graphs=True))
  return metadata


def start_steps(task, shapes):
  """Makes this worker's graph and session of steps without a round."""
  never = 2**30
  graph = tf.Graph()
  with graph.as_default(), _tf1.device(task.placement()):
    step = _tf1.train.get_or_create_global_step()
    getters = dict(zip(_STEPS, (None, ModelAverageCustomGetter(task.device),
                                ElasticAverageCustomGetter(task.device))))
    inner = lambda: _tf1.train.GradientDescentOptimizer(0.0)
    optimizers = {
        _INNER: inner(),
        "ModelAverage": ModelAverageOptimizer(
            inner(), 1, True, getters["ModelAverage"], never),
        "ElasticAverage": ElasticAverageOptimizer(
            inner(), 1, getters["ElasticAverage"], never, rho=0.0)}
    steps = {}
    for name, opt in optimizers.items():
      with _tf1.variable_scope(
          name, custom_getter=getters[name], use_resource=True), (
              contextlib.nullcontext() if getters[name]
              else tf.device(task.device)):
        weights = [_tf1.get_variable(f"w{i}", shape, tf.float32,
                                     _tf1.zeros_initializer())
                   for i, shape in enumerate(shapes)]
      done = opt.apply_gradients([(v.read_value(), v) for v in weights],
                                 step if getters[name] else None)
      steps[name] = getattr(done, "op", done)
    _begin(task, steps, [
        optimizers["ModelAverage"].make_session_run_hook(),
        optimizers["ElasticAverage"].make_session_run_hook(True, 0)])


def what_runs(task, contender):
  """Figures of the ops that run in a step."""
  metadata = _traced(task, contender)
  ran = {"worker": 0, "ps": 0}
  for device in metadata.step_stats.dev_stats:
    ran[tf.DeviceSpec.from_string(device.device).job] += sum(
        node.node_name not in ("_SOURCE", "RecvTensor")
        for node in device.node_stats)
  return {
      "worker_nodes": ran["worker"], "ps_nodes": ran["ps"],
      "calls": sum(node.op in ("_Recv", "_HostRecv") and
                   node.attr["send_device"].s != node.attr["recv_device"].s
                   for graph in metadata.partition_graphs
                   for node in graph.node),
      "bytes": sum(transfers(task, contender))}


_FUNCTIONS = start, take, check_round, transfers, start_steps, what_runs


def _rounds(name, shapes, facts):
  with _cluster.Cluster(_FUNCTIONS, preload=[__name__], ps=1,
                        worker=_WORKERS) as cluster:
    workers = [cluster.tasks["worker", i] for i in range(_WORKERS)]

    def all_do(function, **arguments):
      for worker in workers:
        worker.tell(function, **arguments)
      return [worker.answer() for worker in workers]

    all_do("start", shapes=shapes)
    for contender in _ROUNDS:
      check_round_of(contender, all_do("check_round", contender=contender))
    crossed = {c: sum(all_do("transfers", contender=c), []) for c in _ROUNDS}
    contest = harness.Contest(
        f"{sets.described(name, shapes)}, a round of {_WORKERS} workers and "
        "a parameter server", facts, peers={"of_accumulators": _ACCUMULATORS})
    contest.add({c: lambda c=c: all_do("take", contender=c, calls=1)
                 for c in _ROUNDS}, figures={
                     c: {"transfers": len(sizes), "megabytes": sum(sizes) / 1e6}
                     for c, sizes in crossed.items()})
    yield contest


def check_round_of(contender, answers):
  """Raises an error unless all workers have the mean of their values.

  Args:
    contender: Its name.
    answers: The result of check_round of each worker.
  """
  want = np.mean([np.array(before[0], np.float64)
                  for before, _ in answers], axis=0)
  for number, (_, after) in enumerate(answers):
    harness.check_close(contender, {
        f"{what} of worker {number}": (got, want, 1e-6)
        for what, got in zip(("the weights", "the centers"), after)})


def _steps(name, shapes, facts):
  with _cluster.Cluster(_FUNCTIONS, preload=[__name__], ps=1,
                        worker=1) as cluster:
    worker = cluster.tasks["worker", 0]
    worker.ask("start_steps", shapes=shapes)
    contest = harness.Contest(
        f"{name}: {len(shapes)} variables, a step between rounds of a worker "
        "and a parameter server", facts, peers={"adds_milliseconds": _INNER})
    contest.add({c: harness.RemoteContender(
        lambda calls, c=c: worker.ask("take", contender=c, calls=calls))
                 for c in _STEPS}, figures={
                     c: worker.ask("what_runs", contender=c) for c in _STEPS})
    yield contest


_PARTS = {"op": _means, "round": _rounds, "step": _steps}
