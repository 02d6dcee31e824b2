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
import gc
import statistics

import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._types import V1Optimizer
from wrapopt.bench import harness
from wrapopt.bench.stream_limit import StreamLimit
from wrapopt.elastic_average import ElasticAverageCustomGetter
from wrapopt.elastic_average import ElasticAverageOptimizer
from wrapopt.examples import _cluster
from wrapopt.model_average import ModelAverageCustomGetter
from wrapopt.model_average import ModelAverageOptimizer

_tf1 = tf.compat.v1
_PARTS = ("op", "round", "step")
_SOURCES = (2, 4, 8)
_WORKERS = 2
_ADD_N = "tf.add_n, assign"
_ACCUMULATORS = "accumulators"
_ROUNDS = ("wrapopt", _ACCUMULATORS)
_INNER = "GradientDescent"
_STEPS = (_INNER, "ModelAverage", "ElasticAverage")
# The number of calls in a turn, since one call is short.
_STEPS_OF_TURN = 20


def add_arguments(parser):
  harness.add_arguments(parser)
  # Nine copies of BERT, twice, exceed the memory of most machines.
  parser.set_defaults(sets=["2x4096x4096", "resnet50", "400x256"])
  parser.add_argument(
      "--parts", nargs="+", choices=_PARTS, metavar="PART", default=_PARTS,
      help=f"the parts to measure, of {', '.join(_PARTS)}; default all")


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  results = []
  n_rounds = harness.rounds(options)
  for name in options.sets:
    shapes = harness.VARIABLE_SETS[name]
    if "op" in options.parts:
      for sources in _SOURCES:
        results += measure_op(name, shapes, sources, n_rounds)
    if "round" in options.parts:
      results += measure_round(name, shapes, n_rounds)
    if "step" in options.parts:
      results += measure_step(name, shapes, n_rounds)
  return results


def measure_op(name, shapes, sources, n_rounds):
  """Compares means of variables on one set of them and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    sources: The number of variables of each shape in a mean.
    n_rounds: The number of turns of each contender.

  Returns:
    A list of dicts, one for each row of the table.
  """
  numbers = sum(harness.sizes(shapes))
  moved = 4 * numbers * (sources + 2)
  limits, place_limits = _limits(shapes, sources)
  session, contenders, place_session = _in_session(shapes, sources)
  with contextlib.closing(session):
    seconds = harness.alternate(
        {**limits, **contenders}, n_rounds, f"{name}, S = {sources}",
        places=[place_limits, place_session])
  # Free the memory for the next set.
  del contenders, place_limits, place_session
  gc.collect()

  return harness.report_passes(
      f"{name}: {len(shapes)} variables, {numbers:,} numbers, S = {sources}",
      seconds, limits, moved, (_ADD_N, "of_add_n", "x add_n"),
      {"part": "op", "set": name, "sources": sources, "rounds": n_rounds})


def _limits(shapes, sources):
  """{name: function that makes a pass}, and a function for new arrays."""
  limit = None

  def place():
    nonlocal limit
    limit = None  # Not both at once.
    limit = StreamLimit(*harness.streams(shapes, 1, sources))

  return {f"streaming limit, {n} thread{'s' if n > 1 else ''}":
              lambda n=n: limit.run(n)
          for n in sorted({1, harness.threads()})}, place


def _in_session(shapes, sources):
  """The session, {name: function that assigns once}, and as in `_limits`."""
  graph = tf.Graph()
  with graph.as_default(), tf.device("/cpu:0"):
    # In the same order as the arrays of the streaming limit.
    placed = []
    rows = []
    for row in range(sources + 1):
      rows.append([])
      for i, shape in enumerate(shapes):
        v = tf.Variable(lambda shape=shape: tf.zeros(shape), trainable=False)
        rows[-1].append(v)
        with tf.control_dependencies(placed):
          placed = [v.assign(harness.numbers(shape, (row, i))).op]
    targets, rows = rows[0], rows[1:]
    contenders = {
        "wrapopt": ops.averaging_assign(targets, rows),
        _ADD_N: tf.group(*[
            target.assign(tf.add_n([v.read_value() for v in vs]) / sources).op
            for target, *vs in zip(targets, *rows)])}
    state = [_sample(row) for row in (targets, *rows)]
  session = _tf1.Session(graph=graph)

  def place():
    session.run(placed)

  contenders = {name: session.make_callable(op)
                for name, op in contenders.items()}
  place()
  check_means(contenders, lambda: session.run(state), place)
  return session, contenders, place


def _sample(variables):
  """A sample of the numbers of each variable."""
  return tf.concat(
      [tf.reshape(v, [-1])[::max(1, v.shape.num_elements() // 100)]
       for v in variables], axis=0)


def check_means(contenders, state, reset):
  """Raises an error unless each contender assigns the mean, and nothing else.

  Args:
    contenders: {name: function that assigns once}.
    state: A function that returns the target and its sources.
    reset: A function that assigns the target another value.
  """
  for name, assign in contenders.items():
    reset()
    _, *before = state()
    assign()
    target, *after = state()
    want = np.mean(np.array(before, np.float64), axis=0)
    _check(name, "the mean", target, want)
    for source, was in zip(after, before):
      _check(name, "a source", source, was)


def _check(name, what, got, want):
  if not np.allclose(got, want, rtol=0, atol=1e-6):  # All are in [0, 1).
    raise AssertionError(f"{name}: {what} is off by "
                         f"{np.abs(got - want).max():.3g}.")


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
        v.assign(harness.numbers(v.shape, (task.number, i))).op
        for i, v in enumerate(weights)])
    state = [_sample(row) for row in zip(*pairs)]
    hook = opt.make_session_run_hook()
    hook.begin()
    init = [_tf1.local_variables_initializer()]
    if is_chief:
      init.append(_tf1.global_variables_initializer())
  # Not closed: it lasts as long as the process.
  task.session_of_rounds = session = task.session(graph)
  session.run(init)
  hook.after_create_session(session, None)
  run = lambda op: session.make_callable(op)  # pylint: disable=unnecessary-lambda
  task.rounds, task.ops = {name: run(op) for name, op in rounds.items()}, rounds
  task.fill, task.state = run(fill), run(state)


def make_round(task, contender):
  task.rounds[contender]()


def check_round(task, contender):
  """Makes a round. Returns samples of weights and centers, before and after."""
  task.fill()
  before = task.state()
  task.rounds[contender]()
  return before, task.state()


def transfers(task, contender):
  """[(bytes, label)] of the tensors that cross in this worker's round."""
  return _crossed(task.session_of_rounds, task.ops[contender])


def _crossed(session, op):
  most = []
  # A server reports its transfers later.
  for _ in range(10):
    metadata = _tf1.RunMetadata()
    session.run(
        op, run_metadata=metadata,
        options=_tf1.RunOptions(trace_level=_tf1.RunOptions.FULL_TRACE))
    seen = [(sum(output.tensor_description.allocation_description
                 .requested_bytes for output in node.output),
             node.timeline_label)
            for device in metadata.step_stats.dev_stats
            for node in device.node_stats if node.node_name == "RecvTensor"]
    most = max(most, seen, key=len)
  return most


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
    init = [_tf1.global_variables_initializer(),
            _tf1.local_variables_initializer()]
    hooks = [opt.make_session_run_hook(*arguments) for opt, arguments in (
        (optimizers["ModelAverage"], ()),
        (optimizers["ElasticAverage"], (True, 0)))]
    for hook in hooks:
      hook.begin()
  # Not closed: it lasts as long as the process.
  task.session_of_steps = session = task.session(graph)
  session.run(init)
  for hook in hooks:
    hook.after_create_session(session, None)
  task.step_ops = steps
  task.steps = {name: session.make_callable(op) for name, op in steps.items()}


def make_steps(task, contender):
  for _ in range(_STEPS_OF_TURN):
    task.steps[contender]()


def what_runs(task, contender):
  """({job: nodes that run in a step}, calls for tensors, transferred bytes)."""
  metadata = _tf1.RunMetadata()
  task.session_of_steps.run(
      task.step_ops[contender], run_metadata=metadata,
      options=_tf1.RunOptions(trace_level=_tf1.RunOptions.FULL_TRACE,
                              output_partition_graphs=True))
  ran = {"worker": 0, "ps": 0}
  for device in metadata.step_stats.dev_stats:
    ran[tf.DeviceSpec.from_string(device.device).job] += sum(
        node.node_name not in ("_SOURCE", "RecvTensor")
        for node in device.node_stats)
  calls = sum(node.op in ("_Recv", "_HostRecv") and
              node.attr["send_device"].s != node.attr["recv_device"].s
              for graph in metadata.partition_graphs for node in graph.node)
  crossed = _crossed(task.session_of_steps, task.step_ops[contender])
  return ran, calls, sum(size for size, _ in crossed)


_FUNCTIONS = (start, make_round, check_round, transfers, start_steps,
              make_steps, what_runs)


def measure_round(name, shapes, n_rounds):
  """Compares rounds of a cluster on one set of variables and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    n_rounds: How often each contender has its turn.

  Returns:
    A list of dicts: what is in a row of the table.
  """
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
    crossed = {contender: sum(all_do("transfers", contender=contender), [])
               for contender in _ROUNDS}
    seconds = harness.alternate(
        {contender: lambda c=contender: all_do("make_round", contender=c)
         for contender in _ROUNDS}, n_rounds, f"{name}, a round")
  results = [{
      "part": "round",
      "set": name,
      "contender": contender,
      "milliseconds": 1e3 * statistics.median(times),
      "spread": harness.spread(times),
      "of_accumulators": harness.speedup(times, seconds[_ACCUMULATORS]),
      "transfers": len(crossed[contender]),
      "megabytes": sum(size for size, _ in crossed[contender]) / 1e6,
      "rounds": n_rounds,
  } for contender, times in seconds.items()]
  numbers = sum(harness.sizes(shapes))
  print(f"\n{name}: {len(shapes)} variables, {numbers:,} numbers, a round of "
        f"{_WORKERS} workers and a parameter server")
  print(harness.table(
      ("", "ms", "+-", "x accumulators", "transfers", "MB"),
      [(r["contender"], f"{r['milliseconds']:.2f}", f"{r['spread']:.0%}",
        f"{r['of_accumulators']:.2f}", f"{r['transfers']}",
        f"{r['megabytes']:.2f}") for r in results]), flush=True)
  return results


def check_round_of(contender, answers):
  """Raises an error unless all workers have the mean of their values.

  Args:
    contender: Its name.
    answers: The result of check_round of each worker.
  """
  want = np.mean([np.array(before[0], np.float64)
                  for before, _ in answers], axis=0)
  for _, (weights, center) in answers:
    _check(contender, "a center", center, want)
    _check(contender, "a weight", weights, want)


def measure_step(name, shapes, n_rounds):
  """Compares steps between rounds on one set of variables and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    n_rounds: How often each contender has its turn.

  Returns:
    A list of dicts: what is in a row of the table.
  """
  with _cluster.Cluster(_FUNCTIONS, preload=[__name__], ps=1,
                        worker=1) as cluster:
    worker = cluster.tasks["worker", 0]
    worker.ask("start_steps", shapes=shapes)
    ran = {contender: worker.ask("what_runs", contender=contender)
           for contender in _STEPS}
    seconds = harness.alternate(
        {contender: lambda c=contender: worker.ask("make_steps", contender=c)
         for contender in _STEPS}, n_rounds, f"{name}, a step")
  results = [{
      "part": "step",
      "set": name,
      "contender": contender,
      "milliseconds": 1e3 * statistics.median(times) / _STEPS_OF_TURN,
      "spread": harness.spread(times),
      "milliseconds_more": 1e3 * statistics.median(
          np.subtract(times, seconds[_INNER])) / _STEPS_OF_TURN,
      "worker_nodes": ran[contender][0]["worker"],
      "ps_nodes": ran[contender][0]["ps"],
      "calls": ran[contender][1],
      "bytes": ran[contender][2],
      "rounds": n_rounds,
  } for contender, times in seconds.items()]
  print(f"\n{name}: {len(shapes)} variables, a step between rounds of a worker "
        "and a parameter server")
  print(harness.table(
      ("", "ms", "+-", "ms more", "nodes", "nodes of ps", "calls", "bytes"),
      [(r["contender"], f"{r['milliseconds']:.2f}", f"{r['spread']:.0%}",
        f"{r['milliseconds_more']:.2f}", f"{r['worker_nodes']}",
        f"{r['ps_nodes']}", f"{r['calls']}", f"{r['bytes']}")
       for r in results]), flush=True)
  return results
