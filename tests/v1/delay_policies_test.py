"""Policies of the gate that compensate gradients for their age.

A gradient's weights are old if other steps come between its reads and its own
step. In eager mode the test takes these steps in between. In a function and in
a session, an op between the reads and the gradient takes them.
"""

import copy
import os
import re

import numpy as np
import pytest
import tensorflow as tf

import arrays
import numerics
import wrapopt
from modes import control_flow
from training import GRAPH_MODES
from training import ancestors
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import graphs_in
from training import ops_of_type
from training import session_of
from training import sgd
from wrapopt.examples import _cluster

tf1 = tf.compat.v1
v1 = tf1.train
Drop = wrapopt.DropStaleGradientOptimizer

POLICIES = {
    "constant": wrapopt.DelayCompensation(0.5, adaptive=False),
    "adaptive": wrapopt.DelayCompensation(0.5, decay=0.75, epsilon=0.01),
    "gap": wrapopt.GapAware(0.75),
}
START = np.array([0.75, -1.0, 0.5])


class Server:
  """The shared weights in float64 NumPy: w^4 / 4 is minimized."""

  def __init__(self, policy, momentum=0.0, start=START):
    self.policy, self.momentum = policy, momentum
    self.w, self.accum = np.array(start), np.zeros_like(start)
    self.memory = np.zeros_like(start)

  @staticmethod
  def gradient(w):
    return w ** 3

  def apply(self, g, origin):
    policy, before = self.policy, self.w.copy()
    delay = self.w - origin
    if isinstance(policy, wrapopt.GapAware):
      gap = np.ones_like(g)
      known = self.memory > 0
      gap[known] += np.abs(delay[known]) / self.memory[known]
      g = g / gap
    else:
      by = policy.lambda_
      if policy.adaptive:
        self.memory = policy.decay * self.memory + (1 - policy.decay) * g * g
        by = by / np.sqrt(self.memory + policy.epsilon)
      g = g + by * g * g * delay
    self.accum = self.momentum * self.accum + g
    self.w = self.w - 0.25 * self.accum
    if isinstance(policy, wrapopt.GapAware):
      size = np.abs(self.w - before)
      self.memory = np.where(self.memory == 0, size, policy.decay * self.memory
                             + (1 - policy.decay) * size)


def inner(momentum, use_locking=False):
  return (v1.MomentumOptimizer(0.25, momentum, use_locking) if momentum
          else v1.GradientDescentOptimizer(0.25, use_locking))


def gated(policy, staleness=5, make=lambda: inner(0), start=START, **kwargs):
  """(variable, global step, gate)."""
  w, step = tf.Variable(start), tf.Variable(0, dtype=tf.int64)
  return w, step, Drop(make(), staleness, global_step=step,
                       policy=POLICIES.get(policy, policy), **kwargs)


def loss_of(w):
  return tf.reduce_sum(tf.pow(w, 4)) / 4


def slots_of(opt, variable):
  return {name: opt.get_slot(variable, name)
          for name in ("mean_square", "step_size")
          if opt.get_slot(variable, name) is not None}


def check(server, w, slots):
  np.testing.assert_allclose(w, server.w, rtol=1e-12, atol=1e-14)
  for slot in slots:
    np.testing.assert_allclose(slot, server.memory, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_workers_in_eager_mode(policy, momentum, fused):
  w, step, opt = gated(policy, make=lambda: inner(momentum), fused=fused)
  server = Server(POLICIES[policy], momentum)
  rng = np.random.default_rng(0)
  waiting = []
  for _ in range(4):
    waiting.append((opt.compute_gradients(lambda: loss_of(w), [w]),
                    server.w.copy()))
  for _ in range(12):
    pairs, origin = waiting.pop(rng.integers(4))
    opt.apply_gradients(pairs)
    if opt.staleness_stats().dropped == 0:
      server.apply(server.gradient(origin), origin)
    else:
      break
    waiting.append((opt.compute_gradients(lambda: loss_of(w), [w]),
                    server.w.copy()))
    check(server, w.numpy(), [s.numpy() for s in slots_of(opt, w).values()])
  assert step.numpy() >= 4
  assert len(slots_of(opt, w)) == (policy != "constant")


def test_a_gradient_beyond_the_limit_is_dropped():
  w, step, opt = gated("gap", 0)
  one, two = (opt.compute_gradients(lambda: loss_of(w), [w]) for _ in range(2))
  opt.apply_gradients(one)
  after, size = w.numpy(), opt.get_slot(w, "step_size").numpy()
  opt.apply_gradients(two)
  assert opt.staleness_stats().dropped == 1 and step.numpy() == 1
  numerics.assert_same_bits(w.numpy(), after)
  numerics.assert_same_bits(opt.get_slot(w, "step_size").numpy(), size)


def test_the_snapshot_of_a_record_stays_with_steps_of_tensorflow():
  # use_locking=False too: the lock is then taken for a variable that is held.
  for make in (lambda: inner(0), lambda: inner(0, True),
               lambda: v1.ProximalGradientDescentOptimizer(0.25)):
    start = np.float32(START)
    w, _, opt = gated("constant", 9, make, start)
    held = opt.compute_gradients(lambda: loss_of(w), [w])
    weights = opt._records._eager.last.recorded._wrapopt_weights.get(w)
    opt.apply_gradients(opt.compute_gradients(lambda: loss_of(w), [w]))
    numerics.assert_same_bits(weights.numpy(), start)
    assert (w.numpy() != start).all()
    opt.apply_gradients(held)
    assert opt.staleness_stats().admitted == 2


def test_a_tape_in_a_block_of_record_step():
  w, _, opt = gated("adaptive", 9)
  server = Server(POLICIES["adaptive"])
  with opt.record_step() as recorded:
    with tf.GradientTape() as tape:
      loss = loss_of(w)
  old = tape.gradient(loss, [w])
  with opt.record_step() as other, tf.GradientTape() as tape:
    loss = loss_of(w)
  opt.apply_gradients(zip(tape.gradient(loss, [w]), [w]), recorded=other)
  server.apply(server.gradient(START), START)
  opt.apply_gradients(zip(old, [w]), recorded=recorded)
  server.apply(server.gradient(START), START)
  check(server, w.numpy(), [opt.get_slot(w, "mean_square").numpy()])


def test_a_function_in_a_block_of_record_step():
  w, _, opt = gated("constant", 9)
  server = Server(POLICIES["constant"])

  @tf.function
  def gradient():
    with tf.GradientTape() as tape:
      loss = loss_of(w)
    return tape.gradient(loss, w)

  taken = []
  for _ in range(2):
    # No tape sees what the function reads; later steps know the variable.
    with opt.record_step(variables=[w]) as recorded:
      taken.append((gradient(), recorded))
  for g, recorded in taken:
    opt.apply_gradients([(g, w)], recorded=recorded)
    server.apply(server.gradient(START), START)
  check(server, w.numpy(), [])


# Graphs and functions: another worker's step is taken between the reads and the
# gradient.


def with_a_step_between(w, take):
  """The loss of w; `take` is called after w was read, before the gradient."""
  @tf.custom_gradient
  def wait(x):
    def gradient(upstream):
      [taken] = tf.numpy_function(lambda: (take(), np.float64(1))[1:], [],
                                  [tf.float64])
      with tf.control_dependencies([taken]):
        return tf.identity(upstream)

    return tf.identity(x), gradient

  return loss_of(wait(tf.identity(w)))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_function(policy, fused):
  w, step, opt = gated(policy, fused=fused)
  server = Server(POLICIES[policy])

  def other_step():
    opt.apply_gradients(opt.compute_gradients(lambda: loss_of(w), [w]))
    origin = server.w.copy()
    server.apply(server.gradient(origin), origin)

  @tf.function
  def train():
    opt.minimize(lambda: with_a_step_between(w, other_step), step, [w])

  for _ in range(3):
    origin = server.w.copy()
    train()
    server.apply(server.gradient(origin), origin)
    check(server, w.numpy(), [s.numpy() for s in slots_of(opt, w).values()])
  assert opt.staleness_stats().admitted_histogram[1] == 3
  types = {op.type for graph in graphs_in(train.get_concrete_function().graph)
           for op in graph.get_operations()}
  assert ("Wrapopt>Apply" in types) == (fused is None)


@pytest.fixture(scope="module")
def cluster():
  """A parameter server and a worker, in this process."""
  ports = zip(("ps", "worker"), _cluster.free_ports(2))
  spec = tf.train.ClusterSpec({
      job: [f"localhost:{port}"] for job, port in ports})
  # Both are held as long as the tests run.
  servers = [tf.distribute.Server(spec, job) for job in ("ps", "worker")]
  yield servers[1].target


def late_step(opt, step, other_loss, own_loss, gate=None):
  """A loss, and the op of its step, which comes after another one.

  Args:
    opt: The gate, or a wrapper around it.
    step: The global step.
    other_loss: A function that returns the loss of the other step.
    own_loss: A function of the op of the other step, which returns the loss.
    gate: The gate, if it is not `opt`.
  """
  gate = gate or opt
  with gate.record_step():
    loss = other_loss()
  other = opt.minimize(loss, step)
  with gate.record_step():
    loss = own_loss(other)
  return loss, opt.minimize(loss, step)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_parameter_server_keeps_the_weights(cluster, policy, kind):
  with tf.device("/job:ps/task:0/cpu:0"):
    w = tf1.get_variable("w", initializer=START)
    step = v1.get_or_create_global_step()
  with tf.device("/job:worker/task:0/cpu:0"):
    opt = Drop(inner(0), 5, policy=POLICIES[policy])
    loss, train = late_step(opt, step, lambda: loss_of(w), lambda other: (
        with_a_step_between(w, lambda: session.run(other))))
  [*_, origin] = [op for op in ancestors(loss.op)
                  if op.type in ("ReadVariableOp", "DeepCopy") and
                  op.outputs[0].shape == w.shape]
  server = Server(POLICIES[policy])
  with tf1.Session(cluster) as session:
    session.run(tf1.global_variables_initializer())
    trace = tf1.RunMetadata()
    session.run(train, options=tf1.RunOptions(
        trace_level=tf1.RunOptions.FULL_TRACE), run_metadata=trace)
    for _ in range(2):
      server.apply(server.gradient(START), START)
    # The weights stay where they were read.
    places = {node.node_name: stats.device
              for stats in trace.step_stats.dev_stats
              for node in stats.node_stats}
    step_ops = [name for name in places if re.match(
        "cond.*/(sub|mul|truediv|Abs|Select|Assign|.*Apply(Ref)?$)", name)
                # The end of a control edge, at the worker.
                and not re.search(r"_S\d+$", name)]
    assert len(step_ops) > 3
    for name in [origin.name, *step_ops]:
      # The gradient comes from there.
      assert "/job:ps/" in places[name] or name.endswith("/Switch"), name
    check(server, session.run(w),
          session.run(list(slots_of(opt, w).values())))


@pytest.mark.parametrize("kind", ["resource"], indirect=True)
def test_a_gradient_of_rows_that_were_not_read(kind):  # pylint: disable=unused-argument
  table = tf1.get_variable("table", initializer=np.ones([6, 2]))
  step = v1.get_or_create_global_step()
  opt = Drop(inner(0), 5, policy=POLICIES["gap"])
  with opt.record_step():
    rows = sum(tf.nn.embedding_lookup(table, [i]) for i in (1, 4))
  train = opt.apply_gradients(
      [(tf.IndexedSlices(rows, *map(tf.constant, ([3], [6, 2]))), table)], step)
  with session_of() as session:
    with pytest.raises(tf.errors.InvalidArgumentError,
                       match="must hold only rows that were read before it"):
      session.run(train)
    assert session.run(table).tolist() == [[1, 1]] * 6


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_embedding_in_a_graph(kind, lookups, policy):
  start = np.arange(1.0, 13).reshape(6, 2) / 8
  batches = [np.array([[4, 1], [1, 4]]), np.array([2, 1])][:lookups]
  others = [np.array([[1, 1], [5, 4]]), np.array([0, 4])][:lookups]
  table = tf1.get_variable("table", initializer=start)
  step = v1.get_or_create_global_step()
  opt = Drop(inner(0), 5, policy=POLICIES[policy])

  def loss_of_rows(batches, take=None):
    rows = [tf.nn.embedding_lookup(table, b) for b in batches]
    if take is None:
      return sum(map(loss_of, rows))
    return sum(with_a_step_between(r, take if i == 0 else lambda: None)
               for i, r in enumerate(rows))

  loss, train = late_step(
      opt, step, lambda: loss_of_rows(others), lambda other: (
          loss_of_rows(batches, lambda: session.run(other))))
  slots = list(slots_of(opt, table).values())
  with session_of() as session:
    session.run(train)
    got, memory = session.run([table, slots])
  servers = [Server(POLICIES[policy], start=row) for row in start]
  # First the other step, then that of the gradient of the start.
  for indices in (others, batches):
    indices = np.concatenate([b.ravel() for b in indices])
    for row in np.unique(indices):
      count = np.sum(indices == row)
      servers[row].apply(count * Server.gradient(start[row]), start[row])
  np.testing.assert_allclose(got, [s.w for s in servers], rtol=1e-12)
  for slot in memory:
    np.testing.assert_allclose(slot, [s.memory for s in servers], rtol=1e-12)
    assert (slot[3] == 0).all()
  if kind == "resource" and lookups == 1:
    # Only the rows that were read are held.
    assert ops_of_type("ResourceGather", loss.graph)
    assert [op.name for op in ops_of_type("ReadVariableOp", loss.graph)
            if op.inputs[0] is table.handle] == ["table/Read/ReadVariableOp"]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("make", [
    lambda: inner(0), lambda: inner(0.5), lambda: v1.AdamOptimizer(0.1),
    lambda: v1.FtrlOptimizer(0.1), lambda: v1.RMSPropOptimizer(0.1)],
                         ids=["sgd", "momentum", "adam", "ftrl", "rms_prop"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
@pytest.mark.parametrize("policy", POLICIES)
def test_alone_a_worker_trains_as_without_a_policy(policy, dtype, make):
  results = []
  for p in (POLICIES[policy], "drop"):
    w = tf.Variable(tf.constant([[1.0, -2.0], [0.5, 3.0], [1, 1]], dtype))
    bias = tf.Variable(tf.constant([0.25, 0.5], dtype))
    step = tf.Variable(0, dtype=tf.int64)
    opt = Drop(make(), 0, global_step=step, policy=p)

    @tf.function
    def train():
      opt.minimize(lambda: loss_of(
          tf.nn.embedding_lookup(w, [2, 0, 2]) + bias), step, [w, bias])

    for _ in range(3):
      train()
      opt.minimize(lambda: loss_of(
          tf.nn.embedding_lookup(w, [1, 0]) + bias), step, [w, bias])
    results.append([w.numpy(), bias.numpy(), *(
        slot.numpy() for v in (w, bias)
        for slot in map(lambda name, v=v: opt._optimizer.get_slot(v, name),
                        opt._optimizer.get_slot_names()))])
  for pair in zip(*results, strict=True):
    # Overflows end in NaN, whose sign says nothing.
    numerics.assert_same_bits(*(np.where(np.isnan(x), np.abs(x), x)
                                for x in pair))


@pytest.mark.parametrize("policy", POLICIES)
def test_averages_of_rows_that_lag_behind(policy):
  start = np.arange(1.0, 13).reshape(6, 2) / 8
  results = []
  for lazy in (None, False):
    table, _, gate = gated(policy, start=start)
    opt = wrapopt.MovingAverageOptimizer(gate, 0.5, lazy=lazy)
    taken = [gate.compute_gradients(
        lambda b=b: loss_of(tf.nn.embedding_lookup(table, b)), [table])
             for b in ([1, 1, 5], [4, 1], [0, 5])]
    for pairs in taken:
      opt.apply_gradients(pairs, gate._global_step)
    results.append([table.numpy(), opt.average(table).numpy()])
  arrays.assert_close(*results, rtol=1e-12)
  # The row of one gradient.
  server = Server(POLICIES[policy], start=start[4])
  server.apply(server.gradient(start[4]), start[4])
  np.testing.assert_allclose(results[0][0][4], server.w, rtol=1e-12)


@pytest.mark.parametrize("fused", [None, False])
def test_a_step_while_averages_are_in_place_changes_nothing(fused):
  with graph_of("resource"):
    w = tf1.get_variable("w", initializer=START)
    gate = Drop(inner(0), 5, policy=POLICIES["adaptive"], fused=fused)
    opt = wrapopt.MovingAverageOptimizer(gate, 0.5)
    with gate.record_step(v1.get_or_create_global_step()):
      loss = loss_of(w)
    train = opt.minimize(loss, v1.get_global_step())
    slot = gate.get_slot(w, "mean_square")
    with session_of() as session:
      session.run(train)
      before = session.run([w, slot])
      with opt.averaged_weights(session):
        with pytest.raises(tf.errors.OpError):
          session.run(train)
      arrays.assert_same(session.run([w, slot]), before)


# {name: makes wrappers of a gate and, if they need one, of a custom getter}.
AROUND = {
    "alone": lambda gate: gate(),
    "drop-moving": lambda gate: gate(
        lambda opt: wrapopt.MovingAverageOptimizer(opt, 0.5)),
    "moving-drop": lambda gate: wrapopt.MovingAverageOptimizer(gate(), 0.5),
    "drop-cross": lambda gate: gate(wrapopt.CrossShardOptimizer),
    "cross-drop": lambda gate: wrapopt.CrossShardOptimizer(gate()),
    "drop-model": lambda gate, getter: gate(
        lambda opt: wrapopt.ModelAverageOptimizer(opt, 1, True, getter, 100)),
    "drop-elastic": lambda gate, getter: gate(
        lambda opt: wrapopt.ElasticAverageOptimizer(
            opt, 1, getter, 100, rho=0.0)),
}
GETTERS = {"drop-model": wrapopt.ModelAverageCustomGetter,
           "drop-elastic": wrapopt.ElasticAverageCustomGetter}


@pytest.mark.by_day(3)
@pytest.mark.parametrize("kind", GRAPH_MODES)
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chain, v2", [
    *((chain, True) for chain in AROUND), ("alone", False)])
def test_a_graph(chain, v2, policy, fused, kind):
  """Alone, and with wrappers inside and around."""
  with control_flow(v2), graph_of(kind):
    getter = chain in GETTERS and GETTERS[chain]("/cpu:0")
    with tf1.variable_scope("", custom_getter=getter or None):
      w = tf1.get_variable("w", initializer=START)
    step = v1.get_or_create_global_step()
    gates = []

    def gate(inside=lambda opt: opt):
      gates.append(Drop(inside(inner(0)), 5, policy=POLICIES[policy],
                        fused=fused))
      return gates[-1]

    opt = AROUND[chain](gate, *([getter] if getter else []))
    [the_gate] = gates
    averages = [x.average for x in (opt, the_gate._optimizer)
                if isinstance(x, wrapopt.MovingAverageOptimizer)]
    server, average = Server(POLICIES[policy]), START

    def apply(origin):
      nonlocal average
      server.apply(server.gradient(origin), origin)
      average = (average + server.w) / 2

    def other_step(other):
      session.run(other)
      apply(server.w.copy())

    loss, train = late_step(
        opt, step, lambda: loss_of(w), lambda other: with_a_step_between(
            w, lambda: other_step(other)), the_gate)
    hooks = [x.make_session_run_hook(*args) for x, args in (
        (the_gate._optimizer, () if chain == "drop-model" else (True, 0)),)
             if getter]
    for hook in hooks:
      hook.begin()
    slots = slots_of(the_gate, w)
    averages = [of(w) for of in averages]
    admitted = the_gate.staleness_stats().admitted_histogram
    with session_of() as session:
      for hook in hooks:
        hook.after_create_session(session, tf.train.Coordinator())
      for _ in range(3):
        origin = server.w.copy()
        session.run(train)
        apply(origin)
        check(server, session.run(w), session.run([*slots.values()]))
        for x in session.run(averages):
          np.testing.assert_allclose(x, average, rtol=1e-12)
      # A worker's steps are none of the global step.
      assert session.run(admitted)[1] == (0 if getter else 3)
    if getter:  # What belongs to a worker's weights is the worker's own.
      assert not set(map(id, slots.values())) & set(
          map(id, tf1.global_variables()))
    if chain == "alone":
      names = {"mean_square": "DelayCompensation", "step_size": "GapAware"}
      assert [s.op.name for s in slots.values()] == [
          f"w/{names[s]}" for s in slots]
      types = {op.type for graph in graphs_in(loss.graph)
               for op in graph.get_operations()}
      assert ("Wrapopt>Apply" + "Ref" * (kind == "ref") in types) == (
          fused is None)


def trained(policy):
  """(variable, optimizer) after a step."""
  w, _, opt = gated(policy)
  opt.minimize(lambda: loss_of(w), var_list=[w])
  return w, opt


@pytest.mark.parametrize("policy", ["adaptive", "gap"])
@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_holds_the_state(tmp_path, policy, late):
  name = POLICIES[policy]._states[0]
  w, opt = trained(policy)
  path = tf.train.Checkpoint(w=w, opt=opt).write(str(tmp_path / "ckpt"))
  want = opt.get_slot(w, name).numpy()
  assert (want > 0).all()
  new, _, opt = gated(policy, start=np.zeros(3))
  if not late:
    opt.minimize(lambda: loss_of(new), var_list=[new])
  tf.train.Checkpoint(w=new, opt=opt).read(path)
  np.testing.assert_array_equal(opt.get_slot(new, name).numpy(), want)
  assert name in opt.get_slot_names()
  assert any(v is opt.get_slot(new, name) for v in opt.variables())


def test_a_saver_holds_the_state(tmp_path):
  with graph_of("resource"):
    w = tf1.get_variable("w", initializer=np.float32(START))
    opt = Drop(inner(0), 5, policy=wrapopt.DelayCompensation())
    with opt.record_step(v1.get_or_create_global_step()):
      loss = loss_of(w)
    train = opt.minimize(loss, v1.get_global_step())
    saver = v1.Saver()
    with session_of() as session:
      session.run(train)
      want = session.run(opt.get_slot(w, "mean_square"))
      path = saver.save(session, os.path.join(tmp_path, "model"))
  found = dict(tf.train.list_variables(path))
  assert found["w/DelayCompensation"] == [3]
  np.testing.assert_array_equal(
      tf.train.load_variable(path, "w/DelayCompensation"), want)
  np.testing.assert_allclose(want, 0.05 * np.float32(START) ** 6, rtol=1e-6)


@pytest.mark.parametrize("fused", [None, False])
def test_low_precision_is_compensated_in_float32(fused):
  w, step, opt = gated(
      wrapopt.DelayCompensation(1, adaptive=False), make=sgd,
      start=tf.ones([2], tf.bfloat16), fused=fused)
  with opt.record_step() as recorded:
    w.read_value()
  opt.apply_gradients([(tf.ones([2], tf.bfloat16), w)], recorded=recorded,
                      origins=[tf.constant([1 - 1 / 256, 1], tf.bfloat16)])
  # 1 - (1 + 1^2 / 256). An optimizer of TensorFlow gets 1: 1 + 1 / 256 is no
  # bfloat16.
  np.testing.assert_array_equal(
      np.float32(w), [-1 / 256 if fused is None else 0, 0])
  opt = Drop(inner(0), 5, global_step=step, policy=wrapopt.GapAware(),
             fused=fused)
  opt.minimize(lambda: loss_of(w), var_list=[w])
  assert opt.get_slot(w, "step_size").dtype == tf.float32


def test_a_copy_has_its_own_records():
  w, opt = trained("adaptive")
  other = copy.deepcopy(opt)
  assert other.get_slot_names() == opt.get_slot_names()
  assert list(other._records.known) == [] and list(opt._records.known)[0] is w


def test_given_origins():
  w, step, opt = gated("constant")
  with opt.record_step() as recorded:
    pass
  opt.apply_gradients([(tf.constant(START ** 3), w), (None, step)],
                      recorded=recorded, origins=[START - 0.5, None])
  server = Server(POLICIES["constant"])
  server.apply(START ** 3, START - 0.5)
  check(server, w.numpy(), [])


def test_weights_that_are_not_known_are_refused():
  w, step, opt = gated("constant")
  plain = Drop(inner(0), 5, global_step=step)
  with opt.record_step() as recorded:
    pass
  unknown = ("The weights that a gradient was computed from must be known for "
             r"this `policy`, got .*'Variable:0'")
  for gate, origins, error, text in (
      (opt, None, ValueError, unknown),
      (opt, [START, START], ValueError, "`origins` must hold one tensor or "
       "None for each of the 1 pairs, got 2"),
      (opt, [None], ValueError, r"`origins\[0\]` must be the weights"),
      (opt, [START[:2]], ValueError, r"`origins\[0\]` misshapen: got \(2,\) "
       r"but expected \(3,\) \(the shape of the gradient of"),
      (opt, [np.float32(START)], TypeError, r"`origins\[0\]` must be of dtype "
       "float64, that of 'Variable:0', got float32"),
      (plain, [START], ValueError, "`origins` must be None for this")):
    with pytest.raises(error, match=text):
      gate.apply_gradients([(tf.constant(START), w)], recorded=recorded,
                           origins=origins)

  @tf.function
  def train():
    with opt.record_step() as recorded:
      pass
    opt.apply_gradients([(tf.constant(START), w)], recorded=recorded)

  with pytest.raises(ValueError, match=unknown):
    train()
  assert step.numpy() == 0
  numerics.assert_same_bits(w.numpy(), START)


def test_a_ref_variable_that_was_read_in_place_is_refused():
  with graph_of("ref"):
    w = tf1.get_variable("w", initializer=START)
    step = v1.get_or_create_global_step()
    opt = Drop(inner(0), 5, policy=POLICIES["constant"])
    loss = loss_of(w)
    with opt.record_step() as recorded:
      pass
    gradients = tf1.gradients(loss, [w])
    with pytest.raises(ValueError, match="got a ref variable that is read in "
                       "place.*: 'w:0'. Build the loss in the block"):
      opt.apply_gradients(zip(gradients, [w]), step, recorded=recorded)
    for buffer in w._ref(), tf.identity(w._ref()):
      with pytest.raises(ValueError, match=r"`origins\[0\]` must be a copy of "
                         "the weights, got the buffer of 'w:0'"):
        opt.apply_gradients(zip(gradients, [w]), step, recorded=recorded,
                            origins=[buffer])


@pytest.mark.parametrize("make, error, text", [
    (lambda: wrapopt.DelayCompensation(-1), ValueError,
     "`lambda_` must be finite and at least 0, got -1"),
    (lambda: wrapopt.DelayCompensation("1"), TypeError,
     "`lambda_` must be a number, got '1'"),
    (lambda: wrapopt.DelayCompensation(adaptive=2), TypeError,
     "`adaptive` must be True or False, got 2"),
    (lambda: wrapopt.DelayCompensation(decay=1), ValueError,
     "`decay` must be less than 1, got 1"),
    (lambda: wrapopt.DelayCompensation(decay=-0.5), ValueError,
     r"`decay` must be in \[0, 1\], got -0.5"),
    (lambda: wrapopt.DelayCompensation(epsilon=0), ValueError,
     "`epsilon` must be finite and at least 1e-37, got 0"),
    (lambda: wrapopt.GapAware(1.0), ValueError, "`decay` must be less than 1"),
    (lambda: wrapopt.GapAware(None), TypeError, "`decay` must be a number"),
    (lambda: Drop(inner(0), 1, policy=wrapopt.GapAware), ValueError,
     r"`policy` must be 'drop', 'scale' or a function of the staleness, or a "
     r"DelayCompensation\(\) or GapAware\(\), got <class"),
])
def test_arguments_are_checked(make, error, text):
  with pytest.raises(error, match=text):
    make()


def test_policies_are_values():
  assert wrapopt.GapAware() == wrapopt.GapAware(0.99)
  assert hash(wrapopt.DelayCompensation()) == hash(
      wrapopt.DelayCompensation(None, True))
  with pytest.raises(AttributeError):
    wrapopt.GapAware().decay = 0.5
