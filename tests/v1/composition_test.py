"""Wrappers in wrappers: how a step is taken, or an error."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import GRAPH_MODES
from training import MODES
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import moving
from training import session_of
from training import sgd
from training import train
from wrapopt import _composition
from wrapopt._v1 import _wrapper
from wrapopt._v1._steps import _step

tf1 = tf.compat.v1

SYNC = tf1.train.SyncReplicasOptimizer
CROSS, DROP, ELASTIC, MODEL, MOVING = NAMES = (
    "CrossShardOptimizer", "DropStaleGradientOptimizer",
    "ElasticAverageOptimizer", "ModelAverageOptimizer",
    "MovingAverageOptimizer")
# Their numbers are in both/interpolated_test.py.
PRIMAL, FREE = BETWEEN = ("PrimalAverageOptimizer", "ScheduleFreeOptimizer")
WORKERS = {ELASTIC, MODEL}

RATE = 0.5
DECAY = 0.5
POWER = wrapopt.PowerDecay(gamma=1)
LIMIT = 2
PERIOD = 2
MOVING_RATE = 0.25

INITIAL = ([1.0, -2.0], [[1.0], [2.0], [3.0]])


def is_refused(chain):
  return any(pair in _composition.REFUSED
             for pair in itertools.combinations(chain, 2))


def chains(length, names=NAMES):
  return list(itertools.product(names, repeat=length))


def name_of(chain):
  return "-".join(name.removesuffix("Optimizer") for name in chain)


class Wrapped:
  """A chain of wrappers of variables, in a graph."""

  def __init__(self, chain, fused=None):
    self.chain, self.fused = chain, fused
    self.getters = {
        name: getattr(wrapopt, name.replace("Optimizer", "CustomGetter"))(
            "/cpu:0") for name in sorted(WORKERS & set(chain))}
    self.getter = next(iter(self.getters.values()), None)
    with tf1.variable_scope("", custom_getter=self.getter):
      self.variables = [tf1.get_variable(f"v{i}", initializer=np.float32(x))
                        for i, x in enumerate(INITIAL)]
    self.step = tf1.Variable(0, dtype=tf.int64, trainable=False, name="step")
    self.opt = sgd(RATE)
    self.wrappers = {}
    for name in reversed(chain):
      self.opt = self.wrappers[name] = self.wrap(name)

  def wrap(self, name):
    if name == MOVING:
      return wrapopt.MovingAverageOptimizer(
          self.opt, [DECAY, POWER], num_updates=self.step,
          fused=self.fused)
    if name == DROP:
      return wrapopt.DropStaleGradientOptimizer(
          self.opt, LIMIT, policy="scale", fused=self.fused)
    if name == CROSS:
      return wrapopt.CrossShardOptimizer(self.opt)
    if name in BETWEEN:
      return getattr(wrapopt, name)(self.opt)
    if name == MODEL:
      return wrapopt.ModelAverageOptimizer(
          self.opt, 1, True, self.getters[MODEL], PERIOD)
    return wrapopt.ElasticAverageOptimizer(
        self.opt, 1, self.getters[ELASTIC], PERIOD, MOVING_RATE, rho=0.0)

  def apply(self):
    v, w = self.variables
    gradients = [
        (tf.constant([1.0, 4.0]), v),
        # Row 2 has two gradients.
        (tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]),
                          tf.constant([2, 0, 2]), [3, 1]), w)]
    options = {"recorded": tf.constant(0, tf.int64)} if (
        DROP in self.chain) else {}
    return self.opt.apply_gradients(gradients, self.step, **options)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("chain", [
    c for c in chains(2) if not is_refused(c)], ids=name_of)
def test_how_a_step_of_a_pair_is_taken(chain, mode, fused):
  """A round or exchange comes between it and averages.

  For the numbers, see test_chains of fuzz/fuzz_programs_test.py.
  """
  with graph_of(mode) as graph:
    wrapped = Wrapped(chain, fused)
    wrapped.apply()
    graph_def = graph.as_graph_def()
    op_types = {node.op for part in (graph_def.node, *[
        f.node_def for f in graph_def.library.function]) for node in part}
    asks = {MOVING, DROP} & set(chain)
    one_pass = fused is None and bool(asks) and not (
        chain[0] in asks and chain[1] in WORKERS)
    assert getattr(wrapped.opt, "fused", one_pass) == one_pass
    assert any(t.startswith("Wrapopt>EmaUpdate") for t in op_types) == (
        MOVING in chain and not one_pass)
    if wrapped.getter is not None:
      # What else there is is the worker's own: others would wait for it.
      assert {v.op.name for v in tf1.global_variables()} == {
          "step", *(f"global_center_variable/v{i}" for i in (0, 1)),
          *(["stale_counter", "staleness_histogram"] if DROP in chain else [])}


@pytest.mark.parametrize("fused", [None, False])
def test_an_exchange_moves_rows_that_no_gradient_touches(fused):
  """So averages inside must not lag behind."""
  value = np.array(INITIAL[1])
  average, center = value.copy(), value.copy()
  with graph_of("resource"):
    getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
    with tf1.variable_scope("", custom_getter=getter):
      w = tf1.get_variable("w", initializer=np.float32(value))
    step = tf1.Variable(0, dtype=tf.int64, trainable=False, name="step")
    inner = wrapopt.MovingAverageOptimizer(sgd(RATE), DECAY, fused=fused)
    opt = wrapopt.ElasticAverageOptimizer(inner, 1, getter, PERIOD,
                                          MOVING_RATE, rho=0.0)
    row = tf1.placeholder(tf.int64, [1])
    train = opt.apply_gradients(
        [(tf.IndexedSlices(tf.constant([[2.0]]), row, [3, 1]), w)], step)
    hook = opt.make_session_run_hook(True, 0)
    hook.begin()
    with session_of() as session:
      hook.after_create_session(session, tf.train.Coordinator())
      for t in range(5):
        session.run(train, {row: [t % 2]})
        value[t % 2] -= RATE * 2.0
        average += (1 - DECAY) * (value - average)
        if t % PERIOD == PERIOD - 1:
          difference = MOVING_RATE * (value - center)
          value -= difference
          center += difference
      np.testing.assert_allclose(session.run([w, inner.average(w)]),
                                 [value, average], atol=1e-6)
  assert not inner.is_lazy(w)


def test_no_step_around_an_exchange_while_averages_are_in_place():
  """The inner optimizer has no average, so its op cannot refuse."""
  with graph_of("resource"):
    getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
    with tf1.variable_scope("", custom_getter=getter):
      w = tf1.get_variable("w", initializer=[1.0])
    opt = wrapopt.MovingAverageOptimizer(
        wrapopt.ElasticAverageOptimizer(sgd(RATE), 1, getter), DECAY)
    train = opt.apply_gradients([(tf.constant([2.0]), w)])
    with session_of() as session:
      session.run(train)
      before = session.run(w)
      with opt.averaged_weights(session):
        in_place = session.run(w)
        with pytest.raises(tf.errors.FailedPreconditionError):
          session.run(train)
        assert session.run(w) == in_place
      assert session.run(w) == before
      session.run(train)


@pytest.mark.by_day(40)
@pytest.mark.parametrize("chain", [
    c for n, names in ((2, (*NAMES, *BETWEEN)), (3, NAMES))
    for c in chains(n, names) if is_refused(c)], ids=name_of)
def test_refusals(chain):
  pairs = [p for p in itertools.combinations(chain, 2)
           if p in _composition.REFUSED]
  with graph_of("resource"):
    with pytest.raises(ValueError) as error:
      Wrapped(chain)
  assert any(f"`opt` of {outer} must not be or hold a {inner}: " +
             _composition.REFUSED[outer, inner] in str(error.value)
             for outer, inner in pairs)


class Foreign(tf1.train.Optimizer):
  """An optimizer that holds another, and tells nobody what that does."""

  def __init__(self, opt):
    super().__init__(False, "Foreign")
    self.held = opt

  def apply_gradients(self, *args, **kwargs):
    return self.held.apply_gradients(*args, **kwargs)


class Twice(wrapopt.CrossShardOptimizer):
  """A subclass with a step of its own."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    return super().apply_gradients(
        [(2 * g, v) for g, v in grads_and_vars], *args, **kwargs)


class Clip(_wrapper.WrapperOptimizer):
  """A wrapper that `_composition` does not know."""

  def __init__(self, opt):
    super().__init__(opt, "Clip")

  def _take(self, step):
    return self._inner._take(step._replace(grads_and_vars=[
        (tf.clip_by_value(g, -1.0, 1.0), v) for g, v in step.grads_and_vars]))

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return _step.apply_gradients(self._take, grads_and_vars, global_step, name,
                                 {})


def test_a_new_wrapper_hides_nothing():
  with graph_of("resource"):
    v = tf1.get_variable("v", initializer=0.0)
    step = tf1.train.get_or_create_global_step()
    gate = wrapopt.DropStaleGradientOptimizer(sgd(), 0)
    opt = wrapopt.MovingAverageOptimizer(Clip(gate), 0.5)
    apply = opt.minimize(-4.0 * v, step)
    with session_of() as session:
      for _ in range(2):
        session.run(apply)
      # 0 and 1 give 0.5, and 2 gives 1.25.
      assert session.run([v, opt.average(v), step]) == [2.0, 1.25, 2]


@pytest.mark.parametrize("hide", [Foreign, Twice])
def test_what_another_optimizer_hides(hide):
  with graph_of("resource"):
    hidden = hide(wrapopt.DropStaleGradientOptimizer(sgd(), 0))
    with pytest.raises(ValueError, match="must not be or hold a DropStale.*: "
                       f".* does not tell .* Wrap {type(hidden).__qualname__} "
                       r"around both. Got .*\(DropStaleGradientOptimizer"):
      wrapopt.MovingAverageOptimizer(hidden)
    wrapopt.DropStaleGradientOptimizer(hide(moving()), 0)


def synchronized(opt):
  return SYNC(opt, 1)


@pytest.mark.parametrize("between", [
    lambda opt: opt, Foreign, wrapopt.CrossShardOptimizer])
@pytest.mark.parametrize("name, wrap, remedy", [
    (DROP, lambda opt: wrapopt.DropStaleGradientOptimizer(opt, 0),
     f"around the {DROP}"),
    (MOVING, wrapopt.MovingAverageOptimizer, f"around the {MOVING}"),
    (ELASTIC, lambda opt: wrapopt.ElasticAverageOptimizer(
        opt, 1, wrapopt.ElasticAverageCustomGetter("/cpu:0"), rho=0.0),
     "Use one of the two"),
    (MODEL, lambda opt: wrapopt.ModelAverageOptimizer(
        opt, 1, True, wrapopt.ModelAverageCustomGetter("/cpu:0")),
     "Use one of the two")])
def test_what_would_not_see_synchronized_steps(name, wrap, remedy, between):
  with graph_of("resource") as graph:
    opt = between(synchronized(sgd()))
    with pytest.raises(ValueError, match=f"`opt` of {name} must not be or hold "
                       rf"a SyncReplicasOptimizer: .*{remedy}. Got .*"
                       r"SyncReplicasOptimizer\(GradientDescent"):
      wrap(opt)
    assert not graph.get_operations()


@pytest.mark.parametrize("wrap", [
    lambda opt: synchronized(wrapopt.DropStaleGradientOptimizer(opt, 0)),
    lambda opt: synchronized(wrapopt.CrossShardOptimizer(opt)),
    lambda opt: wrapopt.CrossShardOptimizer(synchronized(opt))])
def test_synchronized_steps(wrap, kind):
  step = tf1.train.get_or_create_global_step()
  v = tf1.get_variable("v", initializer=0.0)
  averaging = moving(0.5)
  opt = wrap(averaging)
  train = opt.minimize(tf.constant(-1.0) * v, step)
  sync = opt if isinstance(opt, SYNC) else opt._optimizer
  # The thread of the chief would run the ops of its queue runner.
  with session_of() as session:
    session.run([sync.chief_init_op, sync.get_init_tokens_op()])
    for _ in range(2):
      session.run(sync.local_step_init_op)
      session.run(train)
      session.run(sync.get_chief_queue_runner().enqueue_ops)
    # 0 and 1 give 0.5, and 2 gives 1.25.
    assert session.run([v, averaging.average(v), step]) == [2.0, 1.25, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_subclass_with_a_step_of_its_own(mode):
  """What it does with gradients is not passed over."""
  trace = train(mode, lambda step: wrapopt.MovingAverageOptimizer(
      Twice(sgd()), 0.5),
                {"v": np.float32([1])}, [{"v": np.float32([1])}])
  assert not trace.optimizer.fused
  assert trace.values[1] == [[-1.0]]
  assert trace.slots == [{("ExponentialMovingAverage", 0): [0.0]}]
