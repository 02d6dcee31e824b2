"""Trains variables with given gradients, and computes expected averages."""

import collections
import contextlib
import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import numerics
import wrapopt

v1 = tf.compat.v1

# Where a step runs: eagerly, in a `tf.function`, and in a session of a graph
# with ref or with resource variables.
MODES = ("eager", "function", "ref", "resource")
GRAPH_MODES = ("ref", "resource")


@contextlib.contextmanager
def graph_of(kind):
  """A new default graph whose variables are of `kind`: "ref" or "resource"."""
  with tf.Graph().as_default() as graph:
    v1.get_variable_scope().set_use_resource(kind == "resource")
    yield graph


@contextlib.contextmanager
def entered(mode):
  """The graph of one of GRAPH_MODES; nothing in other modes."""
  with graph_of(mode) if mode in GRAPH_MODES else contextlib.nullcontext():
    yield


@pytest.fixture(params=GRAPH_MODES)
def kind(request):
  """A graph of ref or of resource variables; or, given to it, another mode."""
  with entered(request.param):
    yield request.param


def sgd(rate=1.0):
  return v1.train.GradientDescentOptimizer(rate)


def moving(*args, **kwargs):
  """Averages around gradient descent at the rate 1."""
  return wrapopt.MovingAverageOptimizer(sgd(), *args, **kwargs)


def descend(opt, *variables, step=None):
  """A step that adds one to each variable, where the learning rate is one."""
  return opt.apply_gradients([(-tf.ones_like(v), v) for v in variables],
                             global_step=step)


def in_mode(function, mode):
  """The function for "eager"; traced for "function", compiled for "jit"."""
  return function if mode == "eager" else tf.function(
      function, jit_compile=mode == "jit")


def stepping(opt, variables, mode="eager", as_fit=False):
  """A function of gradients, which takes the step of a Keras optimizer."""
  opt.build(variables)
  if as_fit:
    step = lambda *grads: opt.apply_gradients(zip(grads, variables))
  else:
    step = lambda *grads: opt.apply(list(grads), variables)
  return in_mode(step, mode)


def native_ops(function, *args):
  """Numbers of wrapopt's ops in the graph of a tf.function, by type."""
  graph = function.get_concrete_function(*args).graph.as_graph_def()
  nodes = [*graph.node,
           *(n for f in graph.library.function for n in f.node_def)]
  return collections.Counter(
      n.op.partition(">")[2] + n.attr["rule"].s.decode()
      for n in nodes if n.op.startswith("Wrapopt>"))


def session_of(graph=None, target="", **config):
  """A session in which the graph's variables are initialized."""
  graph = graph or v1.get_default_graph()
  # An empty configuration would leave out logical devices of the process.
  session = v1.Session(target, graph,
                       v1.ConfigProto(**config) if config else None)
  with graph.as_default():
    session.run(v1.global_variables_initializer())
    session.run(v1.local_variables_initializer())
  return session


def ancestors(op):
  """All ops that run when `op`, or what makes this tensor, runs; with it."""
  op = getattr(op, "op", op)
  seen, pending = set(), [op]
  while pending:
    op = pending.pop()
    if op not in seen:
      seen.add(op)
      pending += [t.op for t in op.inputs] + list(op.control_inputs)
  return seen


def graphs_in(graph):
  """A graph and those of the branches in it."""
  yield graph
  for op in graph.get_operations():
    if op.type in ("If", "StatelessIf"):
      for branch in "then_branch", "else_branch":
        yield from graphs_in(
            graph._get_function(op.get_attr(branch).name).graph)


def reads_of(variables, operations):
  """Those of `operations` that read the variables."""
  sources = {v.op for v in variables}
  return {op for op in operations if op.type in (
      "ReadVariableOp", "Identity", "Wrapopt>ReadPacked",
      "Wrapopt>ReadPackedRef") and sources & {t.op for t in op.inputs}}


def ops_of_type(type_, graph=None):
  graph = graph or v1.get_default_graph()
  return [op for op in graph.get_operations() if type_of(op) == type_]


def ops_that_run(graph, fetch, feeds=None, runs=1):
  """What runs in the last of some runs, in one process with 8 devices.

  Returns:
    {type: number of ops that ran}, and all nodes of the devices' graphs.
  """
  metadata = v1.RunMetadata()
  with session_of(graph, device_count={"CPU": 8}) as session:
    for _ in range(runs - 1):
      session.run(fetch, feeds)
    session.run(fetch, feeds, run_metadata=metadata,
                options=v1.RunOptions(
                    trace_level=v1.RunOptions.FULL_TRACE,
                    output_partition_graphs=True))
  nodes = [node for part in metadata.partition_graphs for node in part.node]
  types = {node.name: node.op for node in nodes}
  return collections.Counter(
      types[node.node_name] for device in metadata.step_stats.dev_stats
      for node in device.node_stats if node.node_name in types), nodes


def type_of(op):
  """The type of an op; for Apply with its rule, as Wrapopt>SparseApplyAdam."""
  if not op.type.startswith("Wrapopt>Apply"):
    return op.type
  return (f"Wrapopt>{'Sparse' if op.get_attr('NI') else ''}Apply"
          f"{op.get_attr('rule').decode()}"
          f"{op.type.removeprefix('Wrapopt>Apply')}")


def is_packed(op):
  """Whether an op takes the handles of its variables as one tensor."""
  return op.inputs[0].dtype == tf.resource and op.inputs[0].shape.rank == 1


def ema_op(kind):
  """The type of the native op of an average, in a graph of this kind."""
  return "Wrapopt>EmaUpdateRef" if kind == "ref" else "Wrapopt>EmaUpdate"


def exchange_op(kind):
  return "Wrapopt>ExchangeRef" if kind == "ref" else "Wrapopt>Exchange"


def assert_ema_step(after, before, value, decay):
  """`after` is the average `before`, one step towards `value`."""
  rate = 1 - np.float64(decay)
  [(want, tolerance)] = numerics.reference("Ema", [before], [value], [rate])
  numerics.assert_close(after, want, tolerance)


def assert_same_bits(got, want):
  """Two iterables of arrays are equal bit for bit."""
  for i, (x, y) in enumerate(zip(got, want, strict=True)):
    numerics.assert_same_bits(x, y, f"in array {i}")


def apply_ops(op_types):
  """Those of the types that take a step and update averages in one pass."""
  return [t for t in op_types if re.match(r"Wrapopt>(Sparse)?Apply", t)]


@dataclasses.dataclass
class Trace:
  """What a run held, before its first step and after each.

  Attributes:
    values: For each time, the variables.
    slots: For each time, a dict from (slot name, index of the variable).
    others: For each time, a dict from names to the optimizer's other variables.
    traces: After each step, how often it had been traced (mode "function").
    op_types: The types of the ops of the graph and its branches, or of the
      function; none in mode "eager".
    optimizer: What ran.
    variables: What it ran on.
  """
  values: list = dataclasses.field(default_factory=list)
  slots: list = dataclasses.field(default_factory=list)
  others: list = dataclasses.field(default_factory=list)
  traces: list = dataclasses.field(default_factory=list)
  op_types: list = dataclasses.field(default_factory=list)
  optimizer: object = None
  variables: list = dataclasses.field(default_factory=list)


def assert_close_histories(got, want):
  """Two ways to take the same steps have gone through the same numbers.

  An array may differ by one eps of its dtype for each step, of the sum of what
  was added up in it: its largest value and all of its changes. A way that
  rounds more often than the other, in a narrower type, needs no more.

  Args:
    got: {key: array after each step}, which may have more keys.
    want: The same.
  """
  assert want.keys() <= got.keys()
  for key, history in want.items():
    x = np.stack([np.float64(value) for value in history])
    operands = np.abs(x).max(axis=0) + np.abs(np.diff(x, axis=0)).sum(axis=0)
    eps = float(ml_dtypes.finfo(history[0].dtype).eps)
    for g, w in zip(got[key], history, strict=True):
      assert g.dtype == w.dtype, key
      numerics.assert_close(g, np.float64(w), len(history) * eps * operands,
                            key)


def assert_close_traces(got, want):
  """The histories of two Traces are close; `got` may have more slots."""
  def histories(trace):
    found = {("var", i): values
             for i, values in enumerate(zip(*trace.values, strict=True))}
    for times in (trace.slots, trace.others):
      for key in times[-1]:
        found[key] = [time[key] for time in times]
    return found

  assert_close_histories(histories(got), histories(want))


def train(mode, make_optimizer, initial, steps, getter=None, make_hook=None):
  """Trains variables on gradients.

  Args:
    mode: One of MODES.
    make_optimizer: A function of the global step that makes the optimizer.
    initial: A dict from names to the initial values of variables.
    steps: For each step, a dict from names to gradients: arrays; None; or
      (values, indices), arrays as well.
    getter: In a graph, the custom getter of its variables.
    make_hook: In a graph, a function of the optimizer that makes a session hook
      for it.

  Returns:
    A Trace. `values` are also of the time before the first step.
  """
  if mode in GRAPH_MODES:
    with graph_of(mode) as graph:
      v1.get_variable_scope().set_custom_getter(getter)
      return _train_session(graph, make_optimizer, initial, steps, make_hook)
  variables = {n: tf.Variable(x, name=n) for n, x in initial.items()}
  global_step = tf.Variable(0, dtype=tf.int64, trainable=False,
                            name="global_step")
  opt = make_optimizer(global_step)
  trace = Trace(optimizer=opt, variables=list(variables.values()))
  trace.values.append([v.numpy() for v in trace.variables])
  count = 0

  def step(gradients):
    nonlocal count
    count += 1
    with recorded(opt, global_step):
      opt.apply_gradients(
          [(_gradient(gradients[n], initial[n].shape), variables[n])
           for n in variables], global_step=global_step)

  if mode == "function":
    step = tf.function(step)
  for gradients in steps:
    step(_tensors(gradients, initial))
    if mode == "function":
      trace.traces.append(count)
    trace.values.append([v.numpy() for v in trace.variables])
    trace.slots.append({k: v.numpy() for k, v in _slots(trace).items()})
    trace.others.append({k: v.numpy() for k, v in _others(trace).items()})
  if mode == "function":
    # Not a new trace: the structure of the arguments is that of the calls.
    graph = step.get_concrete_function(_tensors(steps[0], initial)).graph
    assert count == trace.traces[-1]
    trace.op_types = list(map(type_of, graph.get_operations()))
  return trace


def recorded(opt, global_step):
  """Where gradients that come from elsewhere may be applied."""
  opt = next((o for o in (opt, getattr(opt, "_optimizer", None))
              if isinstance(o, wrapopt.DropStaleGradientOptimizer)), None)
  if opt is not None:
    return opt.record_step(global_step)
  return contextlib.nullcontext()


def _tensors(gradients, initial):
  return tf.nest.map_structure(
      lambda x: None if x is None else tf.constant(x),
      {name: gradients[name] for name in initial})


def _gradient(x, shape):
  return tf.IndexedSlices(*x, shape) if isinstance(x, tuple) else x


def slots_of(opt, variables):
  """{(name, index of the variable): slot}."""
  return {(name, i): opt.get_slot(v, name) for name in opt.get_slot_names()
          for i, v in enumerate(variables)
          if opt.get_slot(v, name) is not None}


def _slots(trace):
  return slots_of(trace.optimizer, trace.variables)


def _others(trace):
  slots = {slot.ref() for slot in _slots(trace).values()}
  # Eager names are made unique in the process: x, x_1, ...
  return {re.sub(r"(_\d+)?:0$", "", v.name): v
          for v in trace.optimizer.variables() if v.ref() not in slots}


def _train_session(graph, make_optimizer, initial, steps, make_hook):
  variables = {n: v1.get_variable(n, initializer=x) for n, x in initial.items()}
  global_step = v1.train.get_or_create_global_step()
  opt = make_optimizer(global_step)
  trace = Trace(optimizer=opt, variables=list(variables.values()))
  feeds = tf.nest.map_structure(
      lambda x: (None if x is None else v1.placeholder(x.dtype, x.shape)),
      {name: steps[0][name] for name in initial})
  with recorded(opt, global_step):
    train_op = opt.apply_gradients(
        [(_gradient(feeds[n], initial[n].shape), variables[n])
         for n in variables], global_step=global_step)
  trace.op_types = list(map(type_of, graph.get_operations())) + [
      node.op for branch in graph.as_graph_def().library.function
      for node in branch.node_def]
  hook = make_hook(opt) if make_hook else v1.train.SessionRunHook()
  hook.begin()
  with session_of(graph) as session:
    hook.after_create_session(session, tf.train.Coordinator())
    # Together: a list that a session has not fetched before costs milliseconds.
    state = (trace.variables, _slots(trace), _others(trace))
    flat = tf.nest.flatten(state)

    def read():
      # Copied: what a session returns may be the variable's own buffer.
      return tf.nest.pack_sequence_as(
          state, [np.array(x) for x in session.run(flat)])

    trace.values.append(read()[0])
    for gradients in steps:
      session.run(train_op, {feed: x for feed, x in zip(
          tf.nest.flatten(feeds),
          tf.nest.flatten({n: gradients[n] for n in feeds}))
                             if feed is not None})
      for value, at in zip(read(), (trace.values, trace.slots, trace.others)):
        at.append(value)
  return trace
