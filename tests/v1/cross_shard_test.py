"""CrossShardOptimizer: one shard, shards of a TPU, replicas of strategies.

Without a TPU, its graphs are compared with TensorFlow's own, and run with
collectives that are computed here.
"""

import contextlib
import functools
import itertools
import json

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_function

import wrapopt
from processes import run_python
from training import GRAPH_MODES
from training import ancestors
from training import assert_same_bits
from training import graph_of
from training import ops_of_type
from training import session_of
from training import slots_of
from training import train
from wrapopt.examples import _cluster

SHARDS = 4
# Before TensorFlow starts: a device for each replica.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * SHARDS)

v1 = tf.compat.v1.train
Reduction = tf.compat.v1.losses.Reduction
REDUCTIONS = (Reduction.MEAN, Reduction.SUM)
DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
ONE_GROUP = [[0, 1, 2, 3]]
PAIRS = [[0, 1], [2, 3]]
# None; neighbours; groups and shards in any order; all in one, and each alone.
GROUPS = (None, PAIRS, [[3, 0], [1, 2]], [[2, 1, 3, 0]], [[1], [0], [2], [3]])
CASES = [*((Reduction.MEAN, groups) for groups in GROUPS),
         (Reduction.SUM, GROUPS[2])]
INNER = {
    # A row that the gradient does not have keeps its momentum.
    "momentum": lambda: v1.MomentumOptimizer(0.5, 0.75),
    # The moments of such a row decay.
    "adam": lambda: v1.AdamOptimizer(0.5, 0.5, 0.75, epsilon=0.01),
}


def sgd():
  return v1.GradientDescentOptimizer(0.5)


def sharded(*args, make=sgd, **kwargs):
  return wrapopt.CrossShardOptimizer(make(), *args, **kwargs)


# The model: each shard's loss is linear in its variables, with coefficients of
# few bits, so that all sums are exact in any order.

STEPS = 3


def initial_values(dtype=np.float32):
  return {"matrix": np.array([[1, -0.5], [2, 3], [-1.5, 0.25]], dtype),
          "scalar": np.array(2, dtype),
          "empty": np.zeros([0, 2], dtype),
          "table": np.array([[1, 2], [3, 4], [5, 6], [7, 8]], dtype),
          # Has no gradient.
          "unused": np.array([1], dtype)}


def coefficients(dtype=np.float32):
  """{variable: an array of its gradient by step and shard}."""
  step, shard = np.ogrid[:STEPS, :SHARDS]
  size = (1 + step) * (1 - shard * 1.5)
  return {
      "matrix": np.multiply.outer(
          size, np.array([[1, -2], [0.5, 1.5], [-2, 2.5]])).astype(dtype),
      "scalar": size.astype(dtype),
      "empty": np.zeros([STEPS, SHARDS, 0, 2], dtype),
      "table": np.multiply.outer(
          size, np.array([[1, 2], [0.5, -1], [-0.25, 4]])).astype(dtype)}


def looked_up():
  """Rows of the table, by shard: one row twice, the last row by no shard."""
  return np.array([[0, 1, 0], [1, 1, 1], [2, 0, 2], [2, 2, 1]], np.int32)


def loss_of(variables, coefficients, rows):
  """A scalar whose gradients are `coefficients`, those of the table sparse."""
  terms = [variables[name] * coefficients[name]
           for name in ("matrix", "scalar", "empty")]
  terms.append(tf.gather(variables["table"], rows) * coefficients["table"])
  return tf.add_n([tf.reduce_sum(term) for term in terms])


def group_gradients(group, reduction, dtype=np.float32):
  """For each step, what the inner optimizer of a group must get."""
  scale = 1 / len(group) if reduction == Reduction.MEAN else 1
  steps = []
  for step in range(STEPS):
    gradients = {name: (x[step, group] * dtype(scale))
                 for name, x in coefficients(dtype).items()}
    table = (np.concatenate(gradients.pop("table")),
             np.concatenate(looked_up()[group]))
    steps.append({**{name: x.sum(0, dtype=dtype)
                     for name, x in gradients.items()},
                  "table": table, "unused": None})
  return steps


def expected(make_inner, groups, reduction, dtype=np.float32):
  """For each shard, the Trace of a bare inner optimizer on what its group has.
  """
  traces = {}
  for group in groups or ONE_GROUP:
    trace = train("eager", lambda step: make_inner(), initial_values(dtype),
                  group_gradients(group, reduction, dtype))
    traces.update((shard, trace) for shard in group)
  return [traces[shard] for shard in range(SHARDS)]


def assert_step(trace, step, values, slots):
  """A shard holds after this step what a Trace does."""
  assert_same_bits(values, trace.values[1 + step])
  assert slots.keys() == trace.slots[step].keys()
  assert_same_bits(slots.values(), trace.slots[step].values())


def assert_groups_differ(histories, groups):
  """Shards share the history of their group, which is no other group's."""
  last = [np.concatenate([np.ravel(x) for x in history[-1]])
          for history in histories]
  of = {shard: group for group in map(tuple, groups or ONE_GROUP)
        for shard in group}
  for a, b in itertools.combinations(range(SHARDS), 2):
    assert np.array_equal(last[a], last[b]) == (of[a] == of[b]), (a, b)


# One shard.


def graph_def(kind, make, context=contextlib.nullcontext):
  """The nodes of a graph in which `make()` trains."""
  with graph_of(kind) as graph, context():
    variables = {name: tf.compat.v1.get_variable(name, initializer=x)
                 for name, x in initial_values().items()}
    loss = loss_of(variables, {k: x[0, 0] for k, x in coefficients().items()},
                   looked_up()[0])
    step = v1.get_or_create_global_step()
    make().minimize(loss, step, name="train")
    return [str(node) for node in graph.as_graph_def().node]


@pytest.mark.parametrize("groups", [None, [[0]]])
@pytest.mark.parametrize("context", [
    contextlib.nullcontext, lambda: tpu_function.tpu_shard_context(1)],
                         ids=["none", "tpu"])
@pytest.mark.parametrize("kind", GRAPH_MODES)
def test_the_graph_of_one_shard_is_that_of_the_inner(kind, context, groups):
  got = graph_def(kind, lambda: sharded(
      make=INNER["adam"], group_assignment=groups), context)
  assert got == graph_def(kind, INNER["adam"])


def test_one_replica_is_one_shard():
  strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
  w, opt = in_scope(strategy, [1.0, 2.0], group_assignment=[[0]])
  strategy.run(lambda: opt.minimize(lambda: 4 * w, var_list=[w]))
  assert w.numpy().tolist() == [-1, 0]


# A TPU.


@pytest.mark.by_day(2)
@pytest.mark.parametrize("dtype, groups", [
    *((dtype, None) for dtype in DTYPES),
    *((tf.float32, groups) for groups in GROUPS[1:])],
                         ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", GRAPH_MODES)
def test_a_tpu_graph_is_tensorflows(kind, reduction, dtype, groups):
  def nodes(cls):
    with graph_of(kind) as graph, tpu_function.tpu_shard_context(SHARDS):
      x, y, z = (tf.compat.v1.get_variable(
          name, shape, dtype, tf.compat.v1.zeros_initializer())
                 for name, shape in zip("xyz", ([3, 2], [], [2])))
      with tf.device("/cpu:1"):
        loss = tf.reduce_sum(x * 2) + y * y
      opt = cls(INNER["adam"](), reduction, group_assignment=groups)
      opt.minimize(loss, v1.get_or_create_global_step(), [x, y, z],
                   colocate_gradients_with_ops=True)
      assert len(ops_of_type("CrossReplicaSum")) == 2
      return [str(node) for node in graph.as_graph_def().node]

  assert nodes(wrapopt.CrossShardOptimizer) == nodes(
      tf.compat.v1.tpu.CrossShardOptimizer)


class Pod:
  """Runs a graph on shards whose collectives are computed here."""

  def __init__(self, graph):
    # Only what runs is placed on a device: that needs its kernel.
    config = tf.compat.v1.ConfigProto(
        graph_options=tf.compat.v1.GraphOptions(place_pruned_graph=True))
    self._sessions = [tf.compat.v1.Session(graph=graph, config=config)
                      for _ in range(SHARDS)]
    self._collectives = [op for op in graph.get_operations()
                         if op.type in ("CrossReplicaSum", "AllToAll")]

  def __enter__(self):
    return self

  def __exit__(self, *args):
    for session in self._sessions:
      session.close()

  def run(self, fetches, feeds=None):
    """What each shard has for `fetches`. Without feeds, nothing is exchanged.
    """
    for op in self._collectives if feeds else []:
      groups = tf.get_static_value(op.inputs[1]).tolist()
      sent = [session.run(op.inputs[0], feed)
              for session, feed in zip(self._sessions, feeds)]
      for group in groups:
        for i, shard in enumerate(group):
          feeds[shard][op.outputs[0]] = self._received(
              op, i, [sent[other] for other in group])
    return [session.run(fetches, feed) for session, feed
            in zip(self._sessions, feeds or [None] * SHARDS)]

  def _received(self, op, i, sent):
    if op.type == "CrossReplicaSum":
      return np.sum(sent, 0, dtype=sent[0].dtype)
    split, join, count = (op.get_attr(name)
                          for name in ("split_dimension", "concat_dimension",
                                       "split_count"))
    assert count == len(sent)
    return np.concatenate([np.split(x, count, split)[i] for x in sent], join)


@pytest.mark.parametrize("reduction, groups", CASES, ids=str)
@pytest.mark.parametrize("kind", GRAPH_MODES)
@pytest.mark.parametrize("inner", INNER)
def test_a_tpu_trains(inner, kind, reduction, groups):
  want = expected(INNER[inner], groups, reduction)
  with graph_of(kind) as graph, tpu_function.tpu_shard_context(SHARDS):
    variables = {name: tf.compat.v1.get_variable(name, initializer=x)
                 for name, x in initial_values().items()}
    feeds = {name: tf.compat.v1.placeholder(tf.float32, x.shape[2:])
             for name, x in coefficients().items()}
    rows = tf.compat.v1.placeholder(tf.int32, [3])
    opt = sharded(reduction, make=INNER[inner], group_assignment=groups)
    train_op = opt.minimize(lambda: loss_of(variables, feeds, rows),
                            var_list=list(variables.values()))
    types = [op.type for op in ancestors(train_op)]
    # The table's rows and their indices; all else is dense.
    assert types.count("AllToAll") == 2
    assert types.count("CrossReplicaSum") == 3
    state = [list(variables.values()), slots_of(opt, variables.values())]
    histories = [[] for _ in range(SHARDS)]
    with Pod(graph) as pod:
      pod.run(tf.compat.v1.global_variables_initializer())
      for step in range(STEPS):
        pod.run(train_op, [
            {**{feeds[name]: x[step, shard]
                for name, x in coefficients().items()},
             rows: looked_up()[shard]} for shard in range(SHARDS)])
        for shard, (values, slots) in enumerate(pod.run(state)):
          histories[shard].append(values)
          assert_step(want[shard], step, values, slots)
  assert_groups_differ(histories, groups)


@pytest.mark.parametrize("index_type", [tf.int32, tf.int64])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_rows_on_a_tpu_keep_their_types(dtype, index_type):
  with tf.Graph().as_default(), tpu_function.tpu_shard_context(2):
    table = tf.Variable(tf.zeros([5, 2], dtype))
    taken = []

    class Inner(v1.GradientDescentOptimizer):

      def apply_gradients(self, grads_and_vars, *args, **kwargs):
        taken.extend(grads_and_vars)
        return super().apply_gradients(grads_and_vars, *args, **kwargs)

    given = tf.IndexedSlices(tf.ones([3, 2], dtype),
                             tf.constant([0, 1, 0], index_type), [5, 2])
    wrapopt.CrossShardOptimizer(Inner(1.0)).apply_gradients([(given, table)])
    [(gradient, _)] = taken
    assert gradient.values.dtype == dtype
    assert gradient.indices.dtype == index_type
    assert gradient.values.shape == [6, 2] and gradient.indices.shape == [6]
    assert tf.get_static_value(gradient.dense_shape).tolist() == [5, 2]
    # A TPU has no collectives of 64 bit integers.
    assert {op.inputs[0].dtype for op in ops_of_type("AllToAll")} == {
        dtype, tf.int32}


def test_groups_of_a_tpu_strategy():
  # As good as one, but for its devices: replicas in which a TPU's computation
  # is built.
  with tf.Graph().as_default():
    strategy = tf.distribute.MirroredStrategy(
        [f"/cpu:{i}" for i in range(SHARDS)])
    w, opt = in_scope(strategy, [1.0], group_assignment=PAIRS)

    def replica():
      with tpu_function.tpu_shard_context(SHARDS):
        opt.apply_gradients([(tf.constant([1.0]), w)])

    strategy.run(replica)
    updates = ops_of_type("ResourceApplyGradientDescent")
    sums = [[x for x in ancestors(update) if x.type == "CrossReplicaSum"]
            for update in updates]
    # Summed once, each copy's own.
    assert [len(x) for x in sums] == [1] * SHARDS
    assert len(set(itertools.chain(*sums))) == SHARDS
    assert not ops_of_type("AddN")


def test_what_is_summed_already_is_left_on_a_tpu():
  with tf.Graph().as_default(), tpu_function.tpu_shard_context(2):
    w = tf.Variable([1.0])
    sharded().apply_gradients([(tf.constant([1.0]), w)],
                                 skip_gradients_aggregation=True)
    assert not ops_of_type("CrossReplicaSum")


# Strategies.


@pytest.fixture(scope="module")
def strategy():
  return tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(SHARDS)])


def in_mode(mode, function):
  return tf.function(function) if mode == "function" else function


def copies(strategy, variable):
  return [x.numpy() for x in strategy.experimental_local_results(variable)]


def in_scope(strategy, value, *args, **kwargs):
  """A variable that each replica has, and its optimizer."""
  with strategy.scope():
    return tf.Variable(value), sharded(*args, **kwargs)


def mine(x):
  """This replica's row."""
  context = tf.distribute.get_replica_context()
  return tf.gather(x, context.replica_id_in_sync_group)


def averaging(opt):
  return wrapopt.MovingAverageOptimizer(opt, 0.5, fused=False)


def averaged_momentum():
  return averaging(INNER["momentum"]())


# A bare optimizer, and that one over shards.
SHARDED = {
    **{name: (make, functools.partial(sharded, make=make))
       for name, make in INNER.items()},
    "CrossShardOptimizer(MovingAverageOptimizer)": (
        averaged_momentum, functools.partial(sharded, make=averaged_momentum)),
    "MovingAverageOptimizer(CrossShardOptimizer)": (
        averaged_momentum,
        lambda *args: averaging(sharded(*args, make=INNER["momentum"]))),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name, mode, reduction, groups", [
    *(("adam", "eager", *case) for case in CASES),
    *(("adam", "function", Reduction.MEAN, groups)
      for groups in (None, GROUPS[2], GROUPS[4])),
    *(("momentum", "function", Reduction.SUM, groups)
      for groups in (None, GROUPS[2])),
    *((name, mode, Reduction.MEAN, GROUPS[2]) for name in SHARDED
      if "Moving" in name for mode in ("eager", "function"))], ids=str)
def test_replicas_train(strategy, name, mode, reduction, groups):
  make_bare, make = SHARDED[name]
  want = expected(make_bare, groups, reduction)
  with strategy.scope():
    variables = {name: tf.Variable(x) for name, x in initial_values().items()}
    # It names no aggregation, and needs none in several groups either.
    step_count = tf.Variable(0, dtype=tf.int64)
    opt = make(reduction, "CrossShard", groups)
  traces = 0

  def run(coefficients):
    nonlocal traces
    traces += 1

    def replica():
      of_replica = {name: mine(x) for name, x in coefficients.items()}
      opt.minimize(lambda: loss_of(variables, of_replica, mine(looked_up())),
                   step_count, list(variables.values()))

    strategy.run(replica)

  run = in_mode(mode, run)
  histories = [[] for _ in range(SHARDS)]
  for step in range(STEPS):
    run({name: tf.constant(x[step]) for name, x in coefficients().items()})
    assert copies(strategy, step_count) == [step + 1] * SHARDS
    values = [copies(strategy, v) for v in variables.values()]
    slots = {key: copies(strategy, slot)
             for key, slot in slots_of(opt, variables.values()).items()}
    for shard in range(SHARDS):
      histories[shard].append([x[shard] for x in values])
      assert_step(want[shard], step, histories[shard][-1],
                  {key: x[shard] for key, x in slots.items()})
    if step == 0:
      first = traces
  assert_groups_differ(histories, groups)
  assert traces == (STEPS if mode == "eager" else first)


class Taking(v1.GradientDescentOptimizer):
  """Keeps the gradients that it applies, as they reach a variable's copy."""

  def __init__(self):
    super().__init__(1.0)
    self.dense, self.sparse = [], []

  def _resource_apply_dense(self, grad, handle):
    self.dense.append(grad)
    return super()._resource_apply_dense(grad, handle)

  def _resource_apply_sparse_duplicate_indices(self, grad, handle, indices):
    self.sparse.append((grad, indices))
    return super()._resource_apply_sparse_duplicate_indices(grad, handle,
                                                            indices)


@pytest.mark.parametrize("mode, dtype, index_type", [
    *(("eager", dtype, tf.int32) for dtype in DTYPES),
    ("function", tf.bfloat16, tf.int32), ("function", tf.float32, tf.int64)],
                         ids=lambda x: getattr(x, "name", x))
def test_types_in_groups(strategy, mode, dtype, index_type):
  with strategy.scope():
    dense = tf.Variable(tf.zeros([2], dtype))
    table = tf.Variable(tf.zeros([4, 1], dtype))
    inner = Taking()
    opt = wrapopt.CrossShardOptimizer(inner, group_assignment=[[0, 2], [3, 1]])

  def replica():
    shard = tf.distribute.get_replica_context().replica_id_in_sync_group
    # So many rows as the number of the shard says: also none.
    rows = tf.range(shard)
    opt.apply_gradients([
        (tf.cast([shard, -shard], dtype), dense),
        (tf.IndexedSlices(tf.ones([shard, 1], dtype),
                          tf.cast(rows, index_type), [4, 1]), table)])

  in_mode(mode, lambda: strategy.run(replica))()
  assert [x.tolist() for x in copies(strategy, dense)] == [
      [-2, 2], [-4, 4], [-2, 2], [-4, 4]]
  assert [x[:, 0].tolist() for x in copies(strategy, table)] == [
      [-1, -1, 0, 0], [-2, -1, -1, 0], [-1, -1, 0, 0], [-2, -1, -1, 0]]
  assert {x.dtype for x in inner.dense} == {dtype}
  assert {(x.dtype, i.dtype) for x, i in inner.sparse} == {(dtype, index_type)}
  if mode == "function":
    assert {tuple(x.shape) for x in inner.dense} == {(2,)}


def test_what_is_not_finite_stays_in_its_group(strategy):
  w, opt = in_scope(strategy, [1.0] * 3, Reduction.SUM, group_assignment=PAIRS)
  gradients = tf.constant([[np.nan, np.inf, 2], [2, 2, 2], [4] * 3, [0] * 3])
  strategy.run(lambda: opt.apply_gradients([(mine(gradients), w)]))
  np.testing.assert_array_equal(
      copies(strategy, w), [[np.nan, -np.inf, -1]] * 2 + [[-1, -1, -1]] * 2)


def test_the_collectives_of_a_step(strategy):
  with strategy.scope():
    w, table = tf.Variable(tf.zeros([6])), tf.Variable(tf.zeros([1000, 3]))

  def collectives(groups):
    with strategy.scope():
      opt = sharded(group_assignment=groups)

    @tf.function
    def step():
      strategy.run(lambda: opt.minimize(
          lambda: tf.reduce_sum(w) + tf.reduce_sum(tf.gather(table, [5, 7])),
          var_list=[w, table]))

    graph = step.get_concrete_function().graph
    functions = [graph.as_graph_def().node] + [
        f.node_def for f in graph.as_graph_def().library.function]
    assert any(node.op == "ResourceScatterAdd"
               for nodes in functions for node in nodes)
    return [[op for op in graph.get_operations() if op.type == type_]
            for type_ in ("CollectiveReduceV2", "CollectiveGatherV2")]

  for groups, elements in ((None, 6), (PAIRS, 12)):
    reduces, gathers = collectives(groups)
    # One for each replica.
    assert [op.inputs[0].shape for op in reduces] == [[elements]] * SHARDS
    # How many rows there are; the rows are in the branches of a cond.
    assert len(gathers) == SHARDS
  assert collectives([[0], [1], [2], [3]]) == [[], []]


def test_constraints_in_groups(strategy):
  with strategy.scope():
    w = tf.Variable([0.0], constraint=lambda x: tf.clip_by_value(x, -2, 2))
    opt = sharded(Reduction.SUM, group_assignment=PAIRS)
  gradients = tf.constant([[1.0], [1.0], [-3.0], [-4.0]])
  strategy.run(lambda: opt.apply_gradients([(mine(gradients), w)]))
  assert copies(strategy, w) == [-1, -1, 2, 2]


@pytest.mark.parametrize("groups", [None, PAIRS], ids=str)
@pytest.mark.parametrize("outside", [False, True])
def test_dynamic_loss_scaling(strategy, outside, groups):
  # Its apply_gradients calls that of its inner optimizer from a merge_call, in
  # replicas that are entered anew; and it takes no more than in 1.15.
  scaled = tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
  with strategy.scope():
    w = tf.Variable([1.0])
    opt = (scaled(sharded(group_assignment=groups), "dynamic") if outside
           else sharded(make=lambda: scaled(sgd(), "dynamic"),
                        group_assignment=groups))
  coefficients = tf.constant([[2.0], [6.0], [-4.0], [-12.0]])
  strategy.run(lambda: opt.minimize(lambda: w * mine(coefficients),
                                    var_list=[w]))
  assert [float(x[0]) for x in copies(strategy, w)] == (
      [-1, -1, 5, 5] if groups else [2, 2, 2, 2])


def test_gradients_are_the_shards_own_before_they_are_applied(strategy):
  w, opt = in_scope(strategy, [0.0], group_assignment=PAIRS)
  coefficients = tf.constant([[2.0], [8.0], [4.0], [8.0]])

  def replica():
    [(gradient, _)] = opt.compute_gradients(lambda: w * mine(coefficients), [w])
    opt.apply_gradients([(tf.minimum(gradient, 2.0), w)])
    return gradient

  gradients = strategy.run(replica)
  assert copies(strategy, gradients) == [1, 4, 2, 4]
  assert copies(strategy, w) == [-1.5, -1.5, -2, -2]


def test_what_a_checkpoint_of_groups_holds(strategy, tmp_path):
  w, opt = in_scope(strategy, [0.0], Reduction.SUM, make=INNER["momentum"],
                    group_assignment=PAIRS)
  gradients = tf.constant([[0.0], [1.0], [2.0], [3.0]])
  step = lambda: strategy.run(
      lambda: opt.apply_gradients([(mine(gradients), w)]))
  step()
  checkpoint = tf.train.Checkpoint(w=w, opt=opt)
  path = checkpoint.save(str(tmp_path / "model"))
  assert copies(strategy, w) == [-0.5, -0.5, -2.5, -2.5]
  step()
  checkpoint.restore(path).assert_consumed()
  assert copies(strategy, w) == [-0.5] * SHARDS
  assert copies(strategy, opt.get_slot(w, "momentum")) == [1] * SHARDS


def test_what_is_summed_already_is_left_in_replicas(strategy):
  with strategy.scope():
    w = tf.Variable([0.0])
  gradients = tf.constant([[1.0], [2.0], [3.0], [4.0]])
  for groups in (None, PAIRS):
    opt = sharded(group_assignment=groups)
    w.assign([0.0])
    strategy.run(lambda: opt.apply_gradients(
        [(mine(gradients), w)], skip_gradients_aggregation=True))
    assert copies(strategy, w) == [-0.5, -1, -1.5, -2]


@pytest.mark.parametrize("groups", [None, PAIRS], ids=str)
def test_replicas_in_a_session(groups):
  with tf.Graph().as_default():
    strategy = tf.distribute.MirroredStrategy(
        [f"/cpu:{i}" for i in range(SHARDS)])
    with strategy.scope():
      w = tf.compat.v1.get_variable("w", initializer=[1.0])
      table = tf.compat.v1.get_variable("t", initializer=[[1.0], [2.0], [3.0]])
      step = v1.get_or_create_global_step()
      opt = sharded(make=INNER["momentum"], group_assignment=groups)

    def replica():
      shard = tf.distribute.get_replica_context().replica_id_in_sync_group
      rate = tf.cast(shard, tf.float32) * 4
      return opt.minimize(
          rate * (w + tf.gather(table, shard // 2)), step, [w, table])

    train_op = strategy.experimental_local_results(strategy.run(replica))
    with session_of() as session:
      for _ in range(2):
        session.run(train_op)
      got = session.run([
          strategy.experimental_local_results(v) for v in (w, table, step)])
  # Gradients of 0, 4, 8 and 12; twice, with momentum: 2.75 times the step.
  if groups:
    want = [[1 - 2.75]] * 2 + [[1 - 2.75 * 5]] * 2
    rows = [[[1 - 2.75], [2], [3]]] * 2 + [[[1], [2 - 2.75 * 5], [3]]] * 2
  else:
    want = [[1 - 2.75 * 3]] * 4
    rows = [[[1 - 2.75 / 2], [2 - 2.75 * 5 / 2], [3]]] * 4
  np.testing.assert_array_equal(got[0], want)
  np.testing.assert_array_equal(got[1], rows)
  assert list(got[2]) == [2] * SHARDS


# Processes. Worker r's gradient is 2^r for `w`, and 2^(r + 1) for row r of a
# table: a sum tells whose gradients are in it.
WORKERS = """
import json
import multiprocessing
import os
import sys

import tensorflow as tf
import wrapopt

def work(workers, index):
  os.environ["TF_CONFIG"] = json.dumps({
      "cluster": {"worker": workers},
      "task": {"type": "worker", "index": index}})
  # A worker whose peers are gone must end.
  strategy = tf.distribute.MultiWorkerMirroredStrategy(
      communication_options=tf.distribute.experimental.CommunicationOptions(
          timeout_seconds=120))
  assert strategy.num_replicas_in_sync == len(workers)
  for groups in (None, [[0, 3], [2, 1]]):
    for wrap in (lambda f: f, tf.function):
      with strategy.scope():
        w, table = tf.Variable([0.0]), tf.Variable(tf.zeros([5, 1]))
        opt = wrapopt.CrossShardOptimizer(
            tf.compat.v1.train.MomentumOptimizer(1.0, 0.5),
            group_assignment=groups)

      def replica():
        shard = tf.distribute.get_replica_context().replica_id_in_sync_group
        rate = tf.cast(2 ** shard, tf.float32)
        opt.minimize(lambda: rate * (w + 2 * tf.gather(table, shard)),
                     var_list=[w, table])

      step = wrap(lambda: strategy.run(replica))
      step(), step()
      values = [float(x) for v in (w, table, opt.get_slot(table, "momentum"))
                for x in tf.reshape(v, [-1])]
      # In one piece: others write to the same pipe.
      os.write(1, f"{json.dumps([index, values])}\\n".encode())

# They start fast: the import is done, and nothing of TensorFlow has run yet.
processes = [
    multiprocessing.get_context("fork").Process(
        target=work, args=(sys.argv[1:], index), daemon=True)
    for index in range(len(sys.argv) - 1)]
for process in processes:
  process.start()
for process in processes:
  process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def test_workers_train():
  addresses = [f"localhost:{port}" for port in _cluster.free_ports(SHARDS)]
  process = run_python("-c", WORKERS, *addresses, CUDA_VISIBLE_DEVICES="-1",
                       no_grpc_proxy="localhost")
  assert process.returncode == 0, process.stderr
  lines = list(map(json.loads, process.stdout.splitlines()))
  for shard in range(SHARDS):
    want = []
    for groups in (ONE_GROUP, [[0, 3], [2, 1]]):
      [group] = [group for group in groups if shard in group]
      w = np.mean([2 ** r for r in group])
      rows = [2 ** (r + 1) / len(group) if r in group else 0 for r in range(5)]
      # The momentum of the second step is 1.5 times the first's.
      want += [[-2.5 * w, *(-2.5 * x for x in rows), *(1.5 * x for x in rows)]
              ] * 2
    assert [values for index, values in lines if index == shard] == want


# What is refused.


@pytest.mark.parametrize("arguments, error, text", [
    ({"make": object}, TypeError, r"`opt` must be a tf\.compat\.v1\.train"
     r"\.Optimizer, got builtins\.object"),
    *(({"reduction": x}, ValueError, "`reduction` must be .*, got")
      for x in ("mean", "weighted_sum_over_batch_size", None,
                tf.distribute.ReduceOp.SUM))])
def test_what_is_no_optimizer_and_no_reduction(arguments, error, text):
  with pytest.raises(error, match=text):
    sharded(**arguments)


@pytest.mark.parametrize("groups, text", [
    (3, "must be a list of lists of ints, got 3"),
    ([0, 1], r"must be a list of lists of ints, got \[0, 1\]"),
    *((x, "must be a list of lists of ints") for x in (
        [["0", "1"]], [[0.0, 1.0]])),
    *((x, "each shard once, got") for x in ([[0, 1], [1, 0]], [[0, 0]])),
    *((x, "must be a permutation of") for x in (
        [[0, 2]], [[1, 2]], [[-1, 0]], [[]])),
    *((x, "must be of one size, got") for x in (
        [[0, 1], [2]], [[0, 1], []]))], ids=str)
def test_what_is_no_assignment(groups, text):
  with pytest.raises(ValueError, match=f"`group_assignment` .*{text}"):
    sharded(group_assignment=groups)


@pytest.mark.parametrize("groups", [
    ((0, 1), (2, 3)), np.array(PAIRS), iter([[0, 1], range(2, 4)])],
                         ids=["tuples", "array", "iterators"])
def test_what_is_an_assignment(groups):
  opt = sharded(group_assignment=groups)
  for _ in range(2):  # An iterator is not used up.
    with tf.Graph().as_default(), tpu_function.tpu_shard_context(SHARDS):
      opt.minimize(tf.Variable([1.0]) * 2)
      [op] = ops_of_type("CrossReplicaSum")
      assert tf.get_static_value(op.inputs[1]).tolist() == PAIRS


def test_an_assignment_that_is_changed_later():
  groups = [[0, 1], [2, 3]]
  opt = sharded(group_assignment=groups)
  groups[0][0] = 7
  with tf.Graph().as_default(), tpu_function.tpu_shard_context(SHARDS):
    opt.minimize(tf.Variable([1.0]) * 2)


@pytest.mark.parametrize("context, shards", [
    (contextlib.nullcontext, 1),
    (lambda: tpu_function.tpu_shard_context(2), 2),
    (lambda: tpu_function.tpu_shard_context(8), 8)])
def test_another_number_of_shards(context, shards):
  text = (rf"`group_assignment` must be a permutation of range\({shards}\), "
          "the shards that there are here, got 4 shards in")
  with tf.Graph().as_default() as graph, context():
    w = tf.Variable([1.0])
    loss, gradient = w * 2, tf.constant([1.0])
    opt = sharded(group_assignment=PAIRS)
    before = len(graph.get_operations())
    with pytest.raises(ValueError, match=text):
      opt.compute_gradients(loss, [w])
    with pytest.raises(ValueError, match=text):
      opt.apply_gradients([(gradient, w)])
    assert len(graph.get_operations()) == before


def test_another_number_of_replicas(strategy):
  w, opt = in_scope(strategy, [1.0], group_assignment=[[0], [1]])
  with pytest.raises(ValueError, match=r"a permutation of range\(4\)"):
    strategy.run(lambda: opt.minimize(lambda: w, var_list=[w]))
  assert copies(strategy, w) == [1] * SHARDS


def test_outside_of_replicas(strategy):
  w, opt = in_scope(strategy, [1.0])
  with strategy.scope():
    for call in (lambda: opt.compute_gradients(lambda: w, [w]),
                 lambda: opt.apply_gradients([(tf.constant([1.0]), w)])):
      with pytest.raises(RuntimeError, match="must be used in a replica, got "
                         "the scope of a MirroredStrategy outside of its run"):
        call()
  assert copies(strategy, w) == [1] * SHARDS


def test_variables_of_central_storage():
  strategy = tf.distribute.experimental.CentralStorageStrategy(
      ["/cpu:0", "/cpu:1"])
  gradients = tf.constant([[2.0], [6.0]])
  for groups in (None, [[1, 0]]):
    w, opt = in_scope(strategy, [1.0], group_assignment=groups)
    strategy.run(lambda: opt.minimize(lambda: w * mine(gradients),
                                      var_list=[w]))
    assert w.numpy() == -1
  opt = sharded(group_assignment=[[0], [1]])
  with pytest.raises(ValueError, match="must have its own copy"):
    strategy.run(lambda: opt.apply_gradients([(mine(gradients), w)]))
  assert w.numpy() == -1


def test_a_variable_that_replicas_share(strategy):
  w, unused = tf.Variable([1.0], name="w"), tf.Variable([1.0])
  with strategy.scope():
    v = tf.Variable([1.0])
  opt = sharded(group_assignment=PAIRS)
  with pytest.raises(ValueError, match="must have its own copy of a variable "
                     r"if there are several groups, .*, got one copy for all "
                     r"of 'w:0'"):
    strategy.run(lambda: opt.apply_gradients(
        [(tf.constant([1.0]), v), (tf.constant([1.0]), w)]))
  assert w.numpy() == 1 and copies(strategy, v) == [1] * SHARDS
  strategy.run(lambda: opt.apply_gradients(
      [(tf.constant([2.0]), v), (None, unused)]))
  assert copies(strategy, v) == [-1] * SHARDS


def test_what_is_no_gradient(strategy):
  text = "Gradient must be a tensor, a tf.IndexedSlices or None, got"
  with tf.Graph().as_default(), tpu_function.tpu_shard_context(2):
    with pytest.raises(TypeError, match=text):
      sharded().apply_gradients([(object(), tf.Variable([1.0]))])
  w, opt = in_scope(strategy, [1.0], group_assignment=PAIRS)
  with pytest.raises(TypeError, match=text):
    strategy.run(lambda: opt.apply_gradients([(object(), w)]))


def test_no_gradients_at_all(strategy):
  with strategy.scope():
    v, count = tf.Variable([1.0], name="v"), tf.Variable(0)
  for groups in (None, PAIRS):
    opt = sharded(group_assignment=groups)
    with pytest.raises(ValueError, match="No gradients provided for any "
                       r"variable, got variables \['v:0'\]"):
      strategy.run(lambda: opt.apply_gradients([(None, v)], count))
    with pytest.raises(ValueError, match="No gradients provided"):
      strategy.run(lambda: opt.apply_gradients([], count))
  assert copies(strategy, count) == [0] * SHARDS
  with tf.Graph().as_default(), tpu_function.tpu_shard_context(2):
    with pytest.raises(ValueError, match="No gradients provided"):
      sharded().apply_gradients([(None, tf.Variable([1.0]))])
    with pytest.raises(ValueError, match="No variables provided"):
      sharded().apply_gradients([])
