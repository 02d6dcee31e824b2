"""DropStaleGradientOptimizer: dropped gradients, state and statistics."""

import glob
import itertools

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from modes import control_flow
from training import GRAPH_MODES
from training import ancestors
from training import assert_same_bits
from training import graph_of
from training import sgd
from training import session_of
from wrapopt._averages import _replicas
from wrapopt._gates import _tokens

tf1 = tf.compat.v1
v1 = tf1.train
Drop = wrapopt.DropStaleGradientOptimizer

INNER = {
    "gradient_descent": lambda: v1.GradientDescentOptimizer(0.5),
    "momentum": lambda: v1.MomentumOptimizer(0.5, 0.75),
    "adam": lambda: v1.AdamOptimizer(0.5, 0.5, 0.75, epsilon=0.01),
}
both_paths = pytest.mark.parametrize("fused", [None, False],
                                     ids=["fused", "cond"])
PLACES = [(kind, v2) for kind in GRAPH_MODES for v2 in (False, True)]


@pytest.fixture(params=["eager", "function", *PLACES],
                ids=lambda p: (p if isinstance(p, str)
                               else f"{p[0]}-v{1 + p[1]}"))
def place(request):
  """Eager, in a tf.function, and in graphs of all kinds."""
  if isinstance(request.param, str):
    yield request.param
    return
  kind, v2 = request.param
  with control_flow(v2), graph_of(kind):
    yield kind


@pytest.fixture(params=PLACES, ids=lambda p: f"{p[0]}-v{1 + p[1]}")
def graph(request):
  kind, v2 = request.param
  with control_flow(v2), graph_of(kind):
    yield kind


def make_step(dtype=tf.int64):
  return tf1.Variable(0, dtype=dtype, trainable=False, name="global_step")


def one_variable(initial=8.0, **kwargs):
  """(variable, step, gate of staleness 0)."""
  w, step = tf1.Variable(initial, name="w"), make_step()
  return w, step, Drop(sgd(), 0, global_step=step, **kwargs)


class Model:
  """Two variables whose gradients are given, with a dense and a sparse one."""

  def __init__(self, place, wrap, step_dtype=tf.int64):
    self.place = place
    self.step = make_step(step_dtype)
    self.dense = tf1.Variable([1.0, 2.0], name="dense")
    self.sparse = tf1.Variable([[1.0], [2.0], [3.0]], name="sparse")
    self.none = tf1.Variable(7.0, name="none")
    self.limit = tf1.Variable(0, dtype=tf.int32, trainable=False, name="limit")
    self.opt = wrap(self)
    self.session = None
    if place == "eager":
      self._apply = self._build
    elif place == "function":
      @tf.function
      def function(recorded):
        done = self._build(recorded)
        # An operation must not be returned.
        return None if isinstance(done, tf.Operation) else done

      self._apply = function
    else:
      self.recorded = tf1.placeholder(tf.int64, [])
      self.train = self._build(self.recorded)
      self.stats = self.opt.staleness_stats() if (
          isinstance(self.opt, Drop)) else None
      self.session = tf1.Session()
      self.session.run(tf1.global_variables_initializer())

  def _build(self, recorded):
    # Row 2 has two gradients.
    pairs = iter([
        (tf.constant([1.0, -2.0]), self.dense),
        (tf.IndexedSlices(tf.constant([[1.0], [2.0], [0.5]]),
                          tf.constant([2, 0, 2])), self.sparse),
        (None, self.none)])
    gated = any(isinstance(opt, Drop) for opt in (
        self.opt, getattr(self.opt, "_optimizer", None)))
    arguments = {"recorded": recorded} if gated else {}
    return self.opt.apply_gradients(pairs, self.step, **arguments)

  def apply(self, recorded):
    """One update from weights of that step; the result of apply_gradients."""
    if self.session:
      return self.session.run(self.train, {self.recorded: recorded})
    return self._apply(tf.constant(recorded, tf.int64))

  def state(self):
    """All there is but the gate's counters: {name: array}."""
    variables = [self.step, self.dense, self.sparse, self.none] + [
        v for v in self.opt.variables() if "stale" not in v.name]
    return dict(zip([v.name for v in variables], self.read(variables)))

  def read(self, variables):
    if self.session:
      return [np.array(x) for x in self.session.run(list(variables))]
    return [np.array(v.numpy()) for v in variables]


def same(got, want):
  assert_same_bits([got[name] for name in sorted(want)],
                   [want[name] for name in sorted(want)])


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda d: d.name)
def test_a_trajectory(place, dtype):
  model = Model(place, lambda m: Drop(v1.GradientDescentOptimizer(0.5), 1),
                dtype)
  # 1 - 0.5 * 1 and 2 - 0.5 * -2; rows: 1 - 0.5 * 2, 2, 3 - 0.5 * (1 + 0.5).
  assert model.apply(0) == 0
  dense, sparse, none, step = model.read(
      [model.dense, model.sparse, model.none, model.step])
  np.testing.assert_array_equal(dense, [0.5, 3.0])
  np.testing.assert_array_equal(sparse, [[0.0], [2.0], [2.25]])
  assert none == 7 and step == 1 and step.dtype == dtype
  assert model.apply(0) == 0  # Stale by one.
  before = model.state()
  assert model.apply(0) == 1  # By two.
  same(model.state(), before)
  assert before["global_step:0"] == 2
  stats = (model.session.run(model.stats) if model.session
           else model.opt.staleness_stats())
  assert (stats.admitted, stats.dropped, stats.drop_rate) == (2, 1, 1 / 3)
  assert stats.admitted_histogram.tolist() == [1, 1] + [0] * 62
  assert stats.dropped_histogram.tolist() == [0, 0, 1] + [0] * 61


def test_names_of_1_15(graph):
  with tf1.variable_scope("scope"):
    model = Model(graph, lambda m: Drop(INNER["adam"](), 0))
  names = {v.op.name for v in model.opt.variables()}
  assert {"scope/stale_counter", "scope/staleness_histogram"} <= names
  counter, = [v for v in model.opt.variables() if "stale_counter" in v.name]
  assert counter.dtype.base_dtype == tf.float32 and counter.shape.rank == 0
  assert counter in tf1.global_variables() and not counter.trainable
  assert counter.device == model.step.device
  assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [model.train.op]


def beta_powers():
  return sorted(v.op.name for v in tf1.global_variables()
                if "beta" in v.op.name)


@pytest.mark.parametrize("wrap", [
    lambda opt: Drop(opt, 0), lambda opt: Drop(opt, 0, fused=False),
    lambda opt: Drop(wrapopt.CrossShardOptimizer(opt), 0)],
                         ids=["fused", "cond", "wrapper"])
@pytest.mark.parametrize("scope", ["", "scope"])
def test_names_do_not_depend_on_other_conds(graph, wrap, scope):
  """So that all workers share variables, if one of them has a cond more."""
  def model(conds):
    with graph_of(graph), tf1.name_scope(scope):
      for _ in range(conds):
        tf.cond(tf.constant(True), lambda: 1.0, lambda: 2.0)
      Model(graph, lambda m: wrap(INNER["adam"]()))
      return beta_powers()

  # A branch of 1.15's cond made them.
  prefix = "" if tf1.control_flow_v2_enabled() else "cond/"
  prefix = f"{scope}/{prefix}" if scope else prefix
  names = [f"{prefix}beta1_power", f"{prefix}beta2_power"]
  assert model(0) == model(1) == model(3) == names


def test_names_of_two_gates_and_several_calls(graph):
  model = Model(graph, lambda m: Drop(INNER["adam"](), 0))
  other = Drop(INNER["adam"](), 0)
  with other.record_step(model.step):
    pairs = [(tf.ones([2]), model.dense)]
  other.apply_gradients(pairs, model.step)
  prefix = "" if tf1.control_flow_v2_enabled() else "cond/"
  assert beta_powers() == [f"{prefix}beta{i}_power{suffix}" for i in (1, 2)
                           for suffix in ("", "_1")]
  other.apply_gradients(pairs, model.step)
  assert sorted(v.op.name for v in tf1.global_variables()
                if "stale" in v.op.name) == [
                    "stale_counter", "stale_counter_1", "staleness_histogram",
                    "staleness_histogram_1"]


def test_the_learning_rate_of_a_step_is_that_before_it(graph):
  """A rate that is a tensor is read before this update is counted."""
  model = Model(graph, lambda m: Drop(v1.GradientDescentOptimizer(
      tf.cast(m.step, tf.float32) + 1), 0))
  for step in range(4):
    before, = model.read([model.dense])
    model.apply(step)
    after, = model.read([model.dense])
    np.testing.assert_array_equal(before - after, [step + 1, -2 * (step + 1)])


def test_an_inner_optimizer_with_an_apply_gradients_of_its_own(place):
  class Mine(v1.GradientDescentOptimizer):

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
      assert global_step is not None
      return super().apply_gradients(grads_and_vars, global_step, name)

  model = Model(place, lambda m: Drop(Mine(0.5), 0))
  for recorded in (0, 1, 1):
    model.apply(recorded)
  dense, step = model.read([model.dense, model.step])
  np.testing.assert_array_equal(dense, [0.0, 4.0])
  assert step == 2


# With averages


@pytest.mark.parametrize("outer", ["gate", "averages"])
def test_a_decay_that_is_called_sees_the_step_incremented(outer, place):
  def wrap(model):
    average = lambda inner: wrapopt.MovingAverageOptimizer(
        inner, 0.9, num_updates=lambda: model.step.read_value())
    sgd = v1.GradientDescentOptimizer(1.0)
    return Drop(average(sgd), 0) if outer == "gate" else average(Drop(sgd, 0))

  model = Model(place, wrap)
  averages = (model.opt._optimizer if outer == "gate" else model.opt)
  model.apply(0)
  average, = model.read([averages.average(model.dense)])
  np.testing.assert_allclose((average[1] - 2) / 2, 0.818182, rtol=1e-6)


# Which step a gradient belongs to


def test_pairs_of_calls_do_not_mix_in_eager_mode():
  w, step, opt = one_variable()
  old = opt.compute_gradients(lambda: w, [w])
  other = opt.compute_gradients(lambda: w, [w])
  opt.apply_gradients(other, step)
  new = opt.compute_gradients(lambda: w, [w])
  assert opt.apply_gradients(old, step).numpy() == 1
  assert opt.apply_gradients(new, step).numpy() == 1
  assert w.numpy() == 6 and step.numpy() == 2
  # What is kept of a gradient goes with it.
  assert len(opt._records._of_gradient) == 3
  del old, other, new
  assert not opt._records._of_gradient


def test_pairs_of_calls_do_not_mix_in_a_graph(graph):
  w, step, opt = one_variable()
  losses = [w * 1.0, w * 2.0]
  pairs = [opt.compute_gradients(loss, [w]) for loss in losses]
  # Changed on the way, in the order in which they were not computed.
  clipped = [[(tf.clip_by_norm(g, 9.0), v)] for p in pairs for g, v in p]
  trains = [opt.apply_gradients(p, step) for p in clipped[::-1]][::-1]
  records = [ops for ops in map(records_before, trains)]
  assert records[0] != records[1] and all(len(r) == 1 for r in records)


def records_before(x):
  return {op for op in ancestors(x) if "StalenessRecord" in op.type}


@pytest.mark.parametrize("way", ["block", "callable", "neither"])
def test_weights_are_read_after_the_record(graph, way):
  w, step, opt = one_variable([1.0, 2.0])
  losses = []

  def loss():
    losses.append(tf.reduce_sum(tf.square(w)))
    return losses[-1]

  if way == "block":
    with opt.record_step():
      built = loss()
  pairs = opt.compute_gradients(
      {"block": lambda: built, "callable": lambda: loss,
       "neither": loss}[way](), [w])
  handle = w.handle if hasattr(w, "handle") else w._ref()
  readers = [op for op in ancestors(losses[0])
             if any(t is handle for t in op.inputs)]
  assert readers
  for op in readers:
    # 1.15 records before the gradients only.
    assert bool(records_before(op)) == (way != "neither")
  train = opt.apply_gradients(pairs, step)
  assert len(records_before(train)) == 1
  with session_of() as session:
    session.run(train)
    np.testing.assert_array_equal(session.run(w), [-1.0, -2.0])
  # Outside, a variable is read as ever.
  assert not records_before(tf.convert_to_tensor(w).op)


def test_the_oldest_record_counts(graph):
  w, step, opt = one_variable()
  with opt.record_step():
    one = w * 1.0
  with opt.record_step():
    two = w * 1.0
  [(a, _)] = opt.compute_gradients(one, [w])
  [(b, _)] = opt.compute_gradients(two, [w])
  train = opt.apply_gradients([(a + b, w)], step)
  assert len(records_before(train)) == 2
  first, second = sorted(records_before(train), key=lambda op: op._id)
  with session_of() as session:
    for feeds, dropped in (({first.outputs[0]: -1}, 1),
                           ({second.outputs[0]: -1}, 2), ({}, 2)):
      assert session.run(train, feeds) == dropped


def test_the_step_of_the_graph(graph):
  w, step = tf1.Variable(8.0, name="w"), tf1.train.get_or_create_global_step()
  opt = Drop(v1.GradientDescentOptimizer(1.0), 0)
  [record] = records_before(opt.minimize(w * 1.0, step))
  assert record.inputs[0] is (
      step.handle if hasattr(step, "handle") else step._ref())


@pytest.mark.by_day(1)
@both_paths
@pytest.mark.parametrize("limit", [-1, np.array(-1), np.int64(-2**63)])
def test_a_negative_limit_drops_all(place, limit, fused):
  """As in the test of 1.15 for it."""
  model = Model(place, lambda m: Drop(INNER["adam"](), limit, fused=fused))
  assert model.apply(0) == 1
  before = model.state()
  assert [model.apply(0), model.apply(100)] == [2, 3]
  after = model.state()
  same(after, before)
  np.testing.assert_array_equal(
      model.read([model.step, model.dense])[1], [1, 2])
  assert after[model.step.name] == 0


# Policies


@both_paths
@pytest.mark.parametrize("policy", ["scale", "function"])
def test_what_is_scaled(place, policy, fused):
  """The gradients of staleness 0, 1 and 2 count 1, 1, 1/2, or as told.

  One from before the step was set back counts as one of staleness 0.
  """
  function = lambda staleness: 1.0 / (1.0 + tf.cast(staleness, tf.float32))
  model = Model(place, lambda m: Drop(
      v1.GradientDescentOptimizer(1.0), 2,
      policy="scale" if policy == "scale" else function, fused=fused))
  factors = [1, 1, 1 / 2] if policy == "scale" else [1, 1 / 2, 1 / 3]
  for recorded, dropped, factor in zip(
      [0, 0, 0, 0, 100], [0, 0, 0, 1, 1], [*factors, 0, 1]):
    before = model.read([model.dense, model.sparse])
    assert model.apply(recorded) == dropped
    after = model.read([model.dense, model.sparse])
    for x, y, g in zip(before, after, ([1, -2], [[2], [0], [1.5]])):
      np.testing.assert_allclose(x - y, np.multiply(factor, g), atol=1e-6)


@both_paths
def test_a_policy_is_called_once_for_all_gradients(place, fused):
  calls, steps = [], []

  class Counted(Drop):

    def _take(self, step):
      steps.append(None)
      return super()._take(step)

  def policy(staleness):
    calls.append(staleness)
    return 1.0

  model = Model(place, lambda m: Counted(sgd(), 2, policy=policy, fused=fused))
  model.apply(0)
  assert len(calls) == len(steps) > 0


# Errors


@pytest.mark.parametrize("arguments, error, text", [
    *(({"staleness": x}, TypeError, "`staleness` must be an integer, got")
      for x in (1.0, np.float32(2), "1", None, True, np.array([1]),
                np.array(1.0))),
    ({"staleness": lambda: tf.constant(1.0)}, TypeError,
     "must be an integer, got a tensor of dty"),
    ({"policy": "halve"}, ValueError, "`policy` must be 'drop', 'scale' or"),
    ({"worker": ""}, ValueError, "`worker` must be a name, got ''"),
    ({"fused": "no"}, TypeError,
     r"`fused` must be None \(if there is an op\), True or False, got 'no'"),
    ({"opt": None}, TypeError, "`opt` must be a tf.compat.v1.train.Optimizer"),
    ({"global_step": 3}, TypeError, "`global_step` must be a variable"),
    ({"opt": v1.ProximalGradientDescentOptimizer(1.0), "fused": True},
     ValueError, "`fused` must not be True")])
def test_arguments(arguments, error, text):
  with pytest.raises(error, match=text):
    Drop(**{"opt": sgd(), "staleness": 0, **{
        name: x() if callable(x) else x for name, x in arguments.items()}})


def test_no_global_step(graph):
  w = tf1.Variable(1.0, name="w")
  with pytest.raises(ValueError, match="A global step is required, got a "):
    Drop(sgd(), 0).compute_gradients(w * 1.0, [w])
  with pytest.raises(ValueError, match="`global_step` must be the step variab"):
    Drop(sgd(), 0).apply_gradients([(tf.constant(1.0), w)])


def test_nothing_recorded(place):
  w, step = tf1.Variable(1.0, name="w"), make_step()

  def train():
    Drop(sgd(), 0).apply_gradients([(tf.constant(1.0), w)], step)

  with pytest.raises(ValueError, match="The step must be recorded before gra"):
    (tf.function(train) if place == "function" else train)()


def test_another_step(place):
  w, step, other = tf1.Variable(1.0, name="w"), make_step(), make_step()
  opt = Drop(sgd(), 0, global_step=step)

  def train():
    loss = (lambda: w * 1.0) if place in ("eager", "function") else w * 1.0
    opt.apply_gradients(opt.compute_gradients(loss, [w]), other)

  with pytest.raises(ValueError,
                     match="must be the step variable that was rec"):
    (tf.function(train) if place == "function" else train)()


def test_staleness_stats_come_after_the_first_step():
  with pytest.raises(RuntimeError, match="after the first apply_gradients"):
    Drop(sgd(), 0).staleness_stats()


def test_a_step_that_is_no_integer():
  w = tf.Variable(1.0)
  with pytest.raises(TypeError, match="variable of dtype int32 or int64"):
    Drop(sgd(), 0).minimize(lambda: w, tf.Variable(0.0), [w])


def test_a_failed_step_changes_nothing_and_is_not_in_flight(graph):
  """A misshapen gradient is seen by the op that would apply it."""
  w, step, opt = one_variable([1.0, 2.0])
  gradient = tf1.placeholder(tf.float32, None)
  with opt.record_step():
    train = opt.apply_gradients([(gradient, w)], step)
  record = wrapopt.ops.staleness_record(step)
  with session_of() as session:
    with pytest.raises(tf.errors.InvalidArgumentError):
      session.run(train, {gradient: [1.0]})
    assert session.run(record) == (1, 0)
    np.testing.assert_array_equal(session.run(w), [1.0, 2.0])
    assert session.run(train, {gradient: [1.0, 1.0]}) == 0
    np.testing.assert_array_equal(session.run(w), [0.0, 1.0])


@pytest.mark.parametrize("fused", [None, False])
def test_a_failed_eager_step_is_not_in_flight(fused):
  w, step, opt = one_variable([1.0, 2.0], fused=fused, worker="worker_1")
  admitted = lambda: [int(opt.staleness_stats(worker).admitted)
                      for worker in (False, True)]

  def apply(gradient):
    with opt.record_step() as recorded:
      pass
    return opt.apply_gradients([(tf.constant(gradient), w)], step,
                               recorded=recorded)

  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as error:
    apply([1.0])
  # As a notebook keeps the traceback of its last error.
  assert error.tb is not None
  assert wrapopt.ops.staleness_record(step)[1] == 0
  for _ in range(2):
    assert admitted() == [0, 0]
  assert apply([1.0, 1.0]).numpy() == 0
  np.testing.assert_array_equal(w.numpy(), [0.0, 1.0])
  assert admitted() == [1, 1] and step.numpy() == 1


def gradients_of_a_tape(w):
  with tf.GradientTape() as tape:
    loss = 1.0 * w
  return [(tape.gradient(loss, w), w)]


@pytest.mark.parametrize("run", [lambda f: f, tf.function],
                         ids=["eager", "function"])
def test_gradients_of_a_tape(run):
  """A record serves once: it tells nothing of later gradients."""
  w, step, opt = one_variable()

  def minimize():
    opt.minimize(lambda: 1.0 * w, step, [w])

  def recorded():
    with opt.record_step():
      pairs = gradients_of_a_tape(w)
    opt.apply_gradients(pairs, step)

  def not_recorded():
    opt.apply_gradients(gradients_of_a_tape(w), step)

  def steps(*each):
    def take():
      for one in each:
        one()
    run(take)()

  steps(minimize)
  for before in minimize, recorded:
    with pytest.raises(ValueError, match="a record serves one apply_gradients"):
      steps(before, not_recorded)
  w.assign(7.0), step.assign(1)  # Eager steps were taken before the error.
  steps(*[recorded] * 3)
  assert w.numpy() == 4 and step.numpy() == 4
  assert opt.staleness_stats().dropped == 0


def test_a_function_that_xla_compiles():
  """XLA has no gate, and says so; gradients can be compiled."""
  w, step, opt = one_variable()
  gradient = tf.function(lambda: 2 * w, jit_compile=True)

  def take():
    with opt.record_step():
      pairs = [(gradient(), w)]
    opt.apply_gradients(pairs)

  with opt.record_step() as recorded:
    g = gradient()
  for refused in (take, tf.function(take),
                  lambda: opt.minimize(lambda: w * w, step, [w]),
                  lambda: opt.apply_gradients([(g, w)], recorded=recorded)):
    with pytest.raises(NotImplementedError, match=(
        "DropStaleGradientOptimizer must not be used in a function that XLA .*"
        r"inside of record_step\(\)\.")):
      tf.function(refused, jit_compile=True, autograph=False)()
  assert w.numpy() == 8 and step.numpy() == 0
  tf.function(take)()
  assert w.numpy() == -8 and step.numpy() == 1


def test_a_record_serves_either_branch_of_a_function():
  w, step, opt = one_variable()

  @tf.function
  def train(g, twice):
    with opt.record_step():
      pass  # Nothing here leads to the gradient.
    if twice:
      opt.apply_gradients([(2 * g, w)], step)
    else:
      opt.apply_gradients([(g, w)], step)

  for twice in True, False:
    train(tf.constant(1.0), tf.constant(twice))
  assert w.numpy() == 5 and step.numpy() == 2


def test_a_record_serves_all_ops_of_a_graph(graph):
  """It is made anew in each run of a session."""
  w, step, opt = one_variable()
  with opt.record_step():
    pass  # Nothing here leads to the gradients.
  trains = [opt.apply_gradients([(tf.constant(g), w)], step)
            for g in (1.0, 2.0)]
  with session_of() as session:
    for train in trains:
      assert session.run(train) == 0
    assert session.run([w, step]) == [5, 2]


# In branches and loops


# TensorFlow's branches of version 2 take no ref variable to update.
in_branches = pytest.mark.parametrize("graph", [
    (kind, v2) for kind, v2 in PLACES if kind == "resource" or not v2],
                                      indirect=True)


def in_a_branch(apply):
  def taken():
    with tf.control_dependencies([apply()]):
      return tf.constant(1)
  return tf.cond(tf1.placeholder_with_default(True, []), taken,
                 lambda: tf.constant(0))


def in_a_loop(apply):
  def body(i):
    with tf.control_dependencies([apply()]):
      return i + 1
  return tf1.while_loop(lambda i: i < 1, body, [tf.constant(0)])


def in_a_branch_of_a_loop(apply):
  return in_a_loop(lambda: in_a_branch(apply))


each_inside = pytest.mark.parametrize("inside", [
    in_a_branch, in_a_loop, in_a_branch_of_a_loop])


@each_inside
@in_branches
def test_applied_inside_of_what_it_was_computed_outside(graph, inside):
  w, step, opt = one_variable()
  pairs = opt.compute_gradients(w * 2.0, [w])
  old = opt.compute_gradients(w * 3.0, [w])
  train = inside(lambda: opt.apply_gradients(pairs, step))
  late = inside(lambda: opt.apply_gradients(old, step))
  with pytest.raises(ValueError, match="must be the step variable that was "):
    inside(lambda: opt.apply_gradients(pairs, make_step()))
  last = records_before(old[0][0])
  assert len(last) == 1 and last != records_before(pairs[0][0])
  recorded = next(iter(last)).outputs[0]
  with session_of() as session:
    session.run(train)
    assert session.run([w, step]) == [6, 1]
    # This gradient is of weights that lack the update.
    session.run(late, {recorded: 0})
    assert session.run([w, step]) == [6, 1]
    session.run(late)
    assert session.run([w, step]) == [3, 2]


@each_inside
@in_branches
def test_recorded_inside(graph, inside):
  """There the op that records takes the step through a Switch or an Enter."""
  w, step, opt = one_variable()
  train = inside(lambda: opt.minimize(w * 2.0, step, [w]))
  with pytest.raises(ValueError, match="must be the step variable that was "):
    inside(lambda: opt.apply_gradients(
        opt.compute_gradients(w * 2.0, [w]), make_step()))
  with session_of() as session:
    session.run(train)
    assert session.run([w, step]) == [6, 1]


@in_branches
def test_inside_of_a_loss_scale_optimizer(graph):
  w, step = tf1.Variable(8.0, name="w"), make_step()
  opt = tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(
      Drop(sgd(), 0, global_step=step), "dynamic")
  factor = tf1.placeholder(tf.float32, [])
  train = opt.minimize(w * factor, step, [w])
  with session_of() as session:
    for x, want in ((1.0, [7, 1]), (np.inf, [7, 1]), (2.0, [5, 2])):
      session.run(train, {factor: x})
      assert session.run([w, step]) == want


def test_inside_of_an_if_of_a_function():
  w, step, opt = one_variable()

  @tf.function
  def train(flag):
    with opt.record_step():
      with tf.GradientTape() as tape:
        loss = 2.0 * w
    gradient = tape.gradient(loss, w)
    if flag:
      opt.apply_gradients([(gradient, w)], step)

  for flag in (True, False, True):
    train(tf.constant(flag))
  assert w.numpy() == 4 and step.numpy() == 2
  assert opt.staleness_stats().dropped == 0


# TensorBoard


def summaries(folder):
  found = {}
  for path in glob.glob(f"{folder}/*"):
    for event in tf1.train.summary_iterator(path):
      for value in event.summary.value:
        found[value.tag] = (value.metadata.plugin_data.plugin_name,
                            value.simple_value if value.HasField("simple_value")
                            else tf.make_ndarray(value.tensor))
  return found


def check_summaries(found):
  """Two admitted updates and two dropped ones of staleness 1."""
  # The dropped fraction of all.
  assert found["Gradient_staleness_percentage"][1] == 0.5
  assert found["w0/drop_rate"][1] == 0.5
  for name, counts in (("admitted", [2, 0]), ("dropped", [0, 2])):
    plugin, bars = found[f"w0/staleness/{name}"]
    assert plugin == "histograms" and bars.shape == (64, 3)
    np.testing.assert_array_equal(
        bars[:2], [[-0.5, 0.5, counts[0]], [0.5, 1.5, counts[1]]])
    assert bars[2:, 2].sum() == 0


def test_summaries_in_a_graph(graph, tmp_path):
  model = Model(graph, lambda m: Drop(sgd(), 0, worker="w0"))
  merged = tf1.summary.merge_all()
  model.session.run(tf1.local_variables_initializer())

  def written(folder):
    with tf1.Graph().as_default(), tf1.summary.FileWriter(folder) as writer:
      writer.add_summary(model.session.run(merged), 3)
    return summaries(folder)

  before = written(tmp_path / "before")
  assert before["Gradient_staleness_percentage"][1] == 0
  for recorded in (0, 0, 1, 1):
    model.apply(recorded)
  check_summaries(written(tmp_path / "after"))
  # Looking at them is no step.
  assert model.read([model.step]) == [2]


def test_summaries_in_eager_mode(tmp_path):
  model = Model("eager", lambda m: Drop(sgd(), 0, worker="w0"))
  with tf.summary.create_file_writer(str(tmp_path)).as_default():
    for recorded in (0, 0, 1, 1):
      model.apply(recorded)
  check_summaries(summaries(tmp_path))


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_second_try_counts_nothing(mode, monkeypatch):
  """Updates that were admitted or dropped; without a token each try counts."""
  model = Model(mode, lambda m: Drop(sgd(), 0, worker="w0"))
  monkeypatch.setattr(_replicas, "is_shared", lambda variable: True)
  token = tf.Variable(0, dtype=tf.int64)
  monkeypatch.setattr(_tokens, "next_of_function",
                      lambda step: token.read_value())
  for tries, counts in (((7, 0), (7, 0)), (1, 0)), (((8, 0), (8, 0)), (1, 1)), (
      ((_tokens.NONE, 0), (_tokens.NONE, 9)), (2, 2)):
    for given, recorded in tries:
      token.assign(given)
      model.apply(recorded)
    for worker in False, True:
      stats = model.opt.staleness_stats(worker)
      assert (stats.admitted, stats.dropped) == counts, (given, worker)


def test_tokens(monkeypatch):
  """Each place in a function that runs once in a try has a token of its own."""
  step = tf.Variable(0, dtype=tf.int64)
  assert _tokens._of_closure() == _tokens.NONE
  monkeypatch.setattr(_tokens, "_counted", itertools.count(32**7 - 1))
  assert [_tokens._next_number() for _ in range(3)] == [32**7 - 1, 0, 1]
  assert _tokens._IN_FUNCTION > 4
  monkeypatch.setattr(_tokens, "_IN_FUNCTION", 4)
  token = lambda: tf.cast(_tokens.next_of_function(step), tf.int64)

  @tf.function
  def function(in_branch):
    first, several = token(), tf.constant(0, tf.int64)
    if in_branch:
      several = tf.cond(
          in_branch, token, lambda: tf.constant(0, tf.int64))
    looped = tf.constant(0, tf.int64)
    for _ in tf.range(1):
      looped = token()
    with tf.init_scope():
      eager = token()
    return (first, several, looped, tf.function(token)(), eager, token(),
            token(), token(), token())

  for number in 0, 1, 32**7 - 1, 98765432100 % 32**7:
    monkeypatch.setattr(_tokens, "_of_closure", lambda: number)  # pylint: disable=cell-var-from-loop
    got = [int(x) for x in function(tf.constant(True))]
    assert got == [4 * number, 4 * number + 1, -1, -1, -1] + [
        4 * number + 2, 4 * number + 3, -1, -1], number
  graph = function.get_concrete_function(tf.constant(True))
  assert graph.output_shapes[0] == []
  monkeypatch.setattr(_tokens, "_of_closure", lambda: _tokens.NONE)
  assert max(map(int, function(tf.constant(True)))) < 0
  with tf.Graph().as_default():
    assert _tokens.next_of_function(step) == _tokens.NONE


def test_a_worker_counts_from_its_start(graph):
  model = Model(graph, lambda m: Drop(sgd(), 0, worker="w0"))
  stats = model.stats, model.opt.staleness_stats(worker=True)
  start = tf1.local_variables_initializer()
  model.session.run(start)
  for recorded in (0, 1, 1):
    model.apply(recorded)
  model.session.run(start)
  model.apply(2)
  assert [(s.admitted, s.dropped) for s in model.session.run(stats)] == [
      (3, 1), (1, 0)]
  model.session.run(model.step.assign(100))
  model.apply(2)  # The last count is of all that miss as many or more.
  for found in model.session.run(stats):
    assert found.dropped_histogram[-1] == 1


def test_checkpoints_of_a_saver(graph, tmp_path):
  model = Model(graph, lambda m: Drop(INNER["adam"](), 0))
  saver = tf1.train.Saver()
  for recorded in (0, 0):
    model.apply(recorded)
  saved = model.state()
  path = saver.save(model.session, str(tmp_path / "model"))
  model.apply(1)
  saver.restore(model.session, path)
  same(model.state(), saved)
  stats = model.session.run(model.stats)
  assert (stats.admitted, stats.dropped) == (1, 1)
  assert tf.train.load_variable(path, "stale_counter") == 1
