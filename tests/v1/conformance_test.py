"""Every wrapper around every optimizer of `tf.compat.v1.train`.

The test discovers wrappers and optimizers. If it cannot make a new one, a test
fails.
"""

import contextlib
import dataclasses
import inspect
import re

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import GRAPH_MODES
from training import MODES
from training import apply_ops
from training import assert_close_traces
from training import assert_ema_step
from training import assert_same_bits
from training import graph_of
from training import recorded
from training import session_of
from training import train

v1 = tf.compat.v1.train

# Each with arguments that make a step large against the roundings.
INNER = {
    "gradient_descent": lambda step: v1.GradientDescentOptimizer(0.5),
    "momentum": lambda step: v1.MomentumOptimizer(0.5, 0.75),
    "nesterov": lambda step: v1.MomentumOptimizer(0.5, 0.75, use_nesterov=True),
    "adagrad": lambda step: v1.AdagradOptimizer(0.5),
    "adagrad_da": lambda step: v1.AdagradDAOptimizer(0.5, step),
    # Betas of few bits: in bfloat16, in which the stock optimizer computes,
    # 1 - 0.999 is nothing, and no second moment is ever counted.
    "adam": lambda step: v1.AdamOptimizer(0.5, 0.5, 0.75, epsilon=0.01),
    "adadelta": lambda step: v1.AdadeltaOptimizer(200.0, epsilon=0.01),
    "rms_prop": lambda step: v1.RMSPropOptimizer(
        0.5, momentum=0.25, epsilon=0.01),
    "rms_prop_centered": lambda step: v1.RMSPropOptimizer(
        0.5, centered=True, epsilon=0.01),
    "ftrl": lambda step: v1.FtrlOptimizer(0.5),
    "proximal_gradient_descent":
        lambda step: v1.ProximalGradientDescentOptimizer(
            0.5, l1_regularization_strength=0.25),
    "proximal_adagrad":
        lambda step: v1.ProximalAdagradOptimizer(
            0.5, l2_regularization_strength=0.25),
}

# Those that have an op which takes their step and the averages in one pass.
ONE_PASS = {"gradient_descent", "momentum", "nesterov", "adagrad", "adam",
            "adadelta", "rms_prop", "rms_prop_centered", "ftrl"}
# The argument `fused`: one pass where there is an op for it, or two always.
FUSED = (None, False)

# Not an inner optimizer: a wrapper itself, whose step is not taken by the op
# that it returns but by a thread that a hook starts, once enough workers have
# sent their gradients.
NO_INNER = {v1.SyncReplicasOptimizer}

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

# What TensorFlow has no kernel for, or passes a float32 scalar to.
_LOW_PRECISION = {f"{kind}_{d.name}" for kind in ("dense", "sparse")
                  for d in (tf.float16, tf.bfloat16)}
_NOT_FLOAT32 = {*_LOW_PRECISION, "dense_float64", "sparse_float64"}
UNSUPPORTED = {
    "adagrad_da": _LOW_PRECISION,
    "rms_prop": {"sparse_bfloat16"},
    "rms_prop_centered": {"sparse_bfloat16"},
    "proximal_gradient_descent": _NOT_FLOAT32,
    "proximal_adagrad": _NOT_FLOAT32,
}
DECAYS = (0.5, 0.0, 1.0)


@dataclasses.dataclass
class Case:
  """How a wrapper is tested.

  Attributes:
    make: A function of the inner optimizer and of `fused` that makes the
      wrapper with settings under which variables and slots must be those of the
      inner optimizer.
    check: A function of the wrapper's Trace and of the mode: what else must
      hold.
    getter: A function that makes the custom getter of the variables, where the
      wrapper needs one. Such a wrapper is for graphs alone.
    make_hook: A function of the wrapper that makes the hook of its sessions.
  """
  make: object
  check: object
  getter: object = lambda: None
  make_hook: object = None


def check_averages(trace, mode):
  slots = [f"ExponentialMovingAverage_{d}" for d in DECAYS]
  count = 0
  for i, initial in enumerate(trace.values[0]):
    # No gradient, no average.
    averaged = any((slots[0], i) in time for time in trace.slots)
    changed = any((time[i] != initial).any() for time in trace.values)
    assert averaged == changed
    if not averaged:
      continue
    before = initial
    for value, time in zip(trace.values[1:], trace.slots):
      value = value[i]
      half, copy, still = (time[slot, i] for slot in slots)
      assert_ema_step(half, before, value, 0.5)
      assert_same_bits([copy, still], [value, initial])
      before = half
      count += 1
    assert np.abs(np.float64(half) - np.float64(initial)).max() > 0.1
  assert count == STEPS * sum(
      not v.name.startswith("none") for v in trace.variables)
  if mode == "eager":
    return
  ref = "Ref" if mode == "ref" else ""
  names = [v.name for v in trace.variables if not v.name.startswith("none")]
  updates = trace.op_types.count(f"Wrapopt>EmaUpdate{ref}")
  if trace.optimizer.fused:
    # An op for each dtype, and for each of dense and sparse.
    assert len(apply_ops(trace.op_types)) == len(names) and updates == 0
  else:
    assert not apply_ops(trace.op_types)
    assert updates == len(dtypes_with_gradients(trace))


def check_nothing_is_added(trace, mode):
  del mode
  assert not [t for t in trace.op_types
              if re.match("CrossReplica|AllToAll|Collective", t)]


def dtypes_with_gradients(trace):
  return {v.dtype.base_dtype for v in trace.variables
          if not v.name.startswith("none")}


def check_exchanges(trace, mode):
  # Of the worker's variables, and of the centers.
  op = f"Wrapopt>AveragingAssign{'Ref' if mode == 'ref' else ''}"
  assert trace.op_types.count(op) == 2 * len(dtypes_with_gradients(trace))


def check_rounds(trace, mode):
  del mode
  assert trace.op_types.count("Wrapopt>AveragingMean") == 1


def getter_of_scope(make):
  """The custom getter that made the variables; in eager mode, another."""
  return tf.compat.v1.get_variable_scope().custom_getter or make()


def check_gate(trace, mode):
  # All fresh, so all admitted; the last of them was the last of the steps.
  counts = trace.others[-1]
  assert counts["stale_counter"] == 0
  histogram = counts["staleness_histogram"]
  assert histogram[0, 0] == histogram.sum() == STEPS
  if mode != "eager":
    assert trace.op_types.count(
        f"Wrapopt>StalenessGate{'Ref' if mode == 'ref' else ''}") == 1


def elastic_getter():
  return wrapopt.ElasticAverageCustomGetter("/cpu:0")


def model_getter():
  return wrapopt.ModelAverageCustomGetter("/cpu:0")


WRAPPERS = {
    # There is one shard.
    wrapopt.CrossShardOptimizer: Case(
        lambda inner, fused: wrapopt.CrossShardOptimizer(inner),
        check_nothing_is_added),
    wrapopt.DropStaleGradientOptimizer: Case(
        lambda inner, fused: wrapopt.DropStaleGradientOptimizer(
            inner, 0, fused=fused),
        check_gate),
    # Centers that do not move, and do not pull.
    wrapopt.ElasticAverageOptimizer: Case(
        lambda inner, fused: wrapopt.ElasticAverageOptimizer(
            inner, 1, getter_of_scope(elastic_getter), communication_period=1,
            moving_rate=0.0, rho=0.0),
        check_exchanges, elastic_getter,
        lambda opt: opt.make_session_run_hook(is_chief=True, task_index=0)),
    # The mean of one worker.
    wrapopt.ModelAverageOptimizer: Case(
        lambda inner, fused: wrapopt.ModelAverageOptimizer(
            inner, 1, True, getter_of_scope(model_getter), interval_steps=1),
        check_rounds, model_getter, lambda opt: opt.make_session_run_hook()),
    wrapopt.MovingAverageOptimizer: Case(
        lambda inner, fused: wrapopt.MovingAverageOptimizer(
            inner, DECAYS, fused=fused),
        check_averages),
}
FOR_GRAPHS = [wrapper for wrapper in WRAPPERS if WRAPPERS[wrapper].getter()]


def variants(wrappers):
  """Each wrapper, with each `fused` that it takes."""
  return [pytest.param(wrapper, fused, id=f"{wrapper.__name__}-{fused}")
          for wrapper in wrappers
          for fused in (FUSED if hasattr(wrapper, "fused") else (False,))]

STEPS = 3
SHAPE = (3, 2)


def initial_values(inner):
  """A variable for each dtype and each kind of gradient."""
  start = np.array([[1.0, -0.5], [2.0, 3.0], [-1.5, 0.25]])
  return {f"{kind}_{dtype.name}": start.astype(dtype.as_numpy_dtype)
          for kind in ("dense", "sparse", "none") for dtype in DTYPES
          if f"{kind}_{dtype.name}" not in UNSUPPORTED.get(inner, ())}


def gradients(names):
  """For each step, gradients for variables of these names."""
  def gradient(step, name):
    kind, dtype = name.split("_")
    dtype = tf.as_dtype(dtype).as_numpy_dtype
    # Of few bits, so that the sum of the two for row 0 is exact.
    rows = np.array([[1.0, -2.0], [0.5, 1.5], [-2.0, 2.5]]) * (1 + step / 4)
    if kind == "none":
      return None
    if kind == "dense":
      return rows.astype(dtype)
    return rows.astype(dtype), np.array([0, 2, 0], np.int32)

  return [{name: gradient(step, name) for name in names}
          for step in range(STEPS)]


def public_optimizers(module):
  return {x for x in vars(module).values() if inspect.isclass(x)
          and issubclass(x, tf.compat.v1.train.Optimizer)}


def test_no_wrapper_is_left_out():
  # One wraps none, and two train other points: both/interpolated_test.py.
  others = {wrapopt.LazyAdamOptimizer, wrapopt.PrimalAverageOptimizer,
            wrapopt.ScheduleFreeOptimizer}
  assert set(WRAPPERS) | others == public_optimizers(wrapopt)
  assert wrapopt.MovingAverageOptimizer in WRAPPERS


@pytest.mark.parametrize("wrapper", [
    *WRAPPERS, wrapopt.PrimalAverageOptimizer, wrapopt.ScheduleFreeOptimizer])
def test_the_inner_optimizer(wrapper):
  inner = v1.GradientDescentOptimizer(1.0)
  case = WRAPPERS.get(wrapper)
  with tf.Graph().as_default():
    opt = case.make(inner, None) if case else wrapper(inner)
  assert opt.inner_optimizer is inner


def test_no_inner_optimizer_is_left_out():
  with tf.Graph().as_default():
    step = v1.get_or_create_global_step()
    tested = {type(make(step)) for make in INNER.values()}
  assert tested | NO_INNER | {v1.Optimizer} == public_optimizers(v1)


@pytest.mark.parametrize("inner, name", [
    (inner, name) for inner in UNSUPPORTED for name in UNSUPPORTED[inner]])
def test_what_is_unsupported_fails_without_a_wrapper(inner, name):
  dtype = tf.as_dtype(name.split("_")[1])
  initial = {name: np.zeros(SHAPE, dtype.as_numpy_dtype)}
  with pytest.raises((TypeError, tf.errors.InvalidArgumentError),
                     match="float32|No OpKernel was registered"):
    train("ref", INNER[inner], initial, gradients(initial))


@pytest.fixture(scope="module")
def bare():
  """The Trace of a bare inner optimizer, made once."""
  made = {}

  def get(inner, mode):
    if (inner, mode) not in made:
      initial = initial_values(inner)
      made[inner, mode] = train(mode, INNER[inner], initial, gradients(initial))
    return made[inner, mode]

  return get


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper, fused", variants(WRAPPERS))
def test_wrapper(wrapper, inner, fused, mode, bare):
  case = WRAPPERS[wrapper]
  initial = initial_values(inner)
  run = lambda: train(
      mode, lambda step: case.make(INNER[inner](step), fused), initial,
      gradients(initial), case.getter(), case.make_hook)
  if wrapper in FOR_GRAPHS and mode not in GRAPH_MODES:
    with pytest.raises(RuntimeError, match=f"{wrapper.__name__} must be used "
                       "in a tf.Graph, got eager mode"):
      run()
    return
  expected = bare(inner, mode)
  got = run()
  one_pass = fused is None and inner in ONE_PASS
  assert getattr(got.optimizer, "fused", False) == one_pass
  if one_pass:
    assert_close_traces(got, expected)
  else:
    for g, e in zip(got.values, expected.values, strict=True):
      assert_same_bits(g, e)
    for attribute in ("slots", "others"):
      for g, e in zip(getattr(got, attribute), getattr(expected, attribute),
                      strict=True):
        assert e.keys() <= g.keys()
        assert_same_bits([g[k] for k in e], e.values())
  assert got.traces == got.traces[:1] * len(got.traces)
  case.check(got, mode)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("other", [False, True], ids=["same", "other"])
@pytest.mark.parametrize(
    "wrapper, fused", variants([w for w in WRAPPERS if w not in FOR_GRAPHS]))
def test_save_and_restore(wrapper, inner, fused, other, tmp_path):
  """Also from one pass to two, and back."""
  class Model:

    def __init__(self, start, fused):
      self.dense, self.sparse = tf.Variable(start), tf.Variable(start)
      self.step = tf.Variable(0, dtype=tf.int64)
      self.opt = WRAPPERS[wrapper].make(INNER[inner](self.step), fused)
      self.checkpoint = tf.train.Checkpoint(
          dense=self.dense, sparse=self.sparse, step=self.step, opt=self.opt)

    def train(self):
      with recorded(self.opt, self.step):
        self.opt.apply_gradients(
            [(tf.constant([1.0, -2.0]), self.dense),
             (tf.IndexedSlices(tf.constant([3.0]), tf.constant([1]), [2]),
              self.sparse)], self.step)

    def state(self):
      # By variable: names are made unique in a process.
      slots = [self.opt.get_slot(v, name) for v in (self.dense, self.sparse)
               for name in self.opt.get_slot_names()]
      known = {v.ref() for v in slots}
      others = [v for v in self.opt.variables() if v.ref() not in known]
      return [v.numpy() for v in (self.dense, self.sparse, self.step, *slots,
                                  *others)]

  one = Model([1.0, 2.0], fused)
  one.train()
  path = one.checkpoint.save(str(tmp_path / "model"))
  saved = one.state()
  one.train()
  two = Model([5.0, 7.0], (None if fused is False else False)
              if other else fused)
  two.train()
  two.checkpoint.restore(path).assert_consumed()
  assert_same_bits(two.state(), saved)
  two.train()
  if other:  # One op rounds once.
    for a, b in zip(two.state(), one.state(), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6)
  else:
    assert_same_bits(two.state(), one.state())


@pytest.mark.parametrize("kind", GRAPH_MODES)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", FOR_GRAPHS)
def test_save_and_restore_of_centers(wrapper, inner, kind, tmp_path):
  case = WRAPPERS[wrapper]

  @contextlib.contextmanager
  def training(start, path=None):
    with graph_of(kind) as graph:
      getter = case.getter()
      with tf.compat.v1.variable_scope("", custom_getter=getter):
        v = tf.compat.v1.get_variable("v", initializer=start)
        step = v1.get_or_create_global_step()
        opt = case.make(INNER[inner](step), None)
      train_op = opt.apply_gradients([(tf.constant([1.0, -2.0]), v)], step)
      saver, hook = v1.Saver(), case.make_hook(opt)
      hook.begin()
      with session_of(graph) as session:
        if path:
          saver.restore(session, path)
        hook.after_create_session(session, tf.train.Coordinator())
        state = lambda: session.run([v, getter.centers[v], step])
        yield lambda: session.run(train_op), state, lambda: saver.save(
            session, str(tmp_path / "model"))

  with training([1.0, 2.0]) as (train_once, state, save):
    train_once()
    _, center, step = state()
    path = save()
  # The centers alone: what else there is, is the worker's.
  assert {name for name, _ in tf.train.list_variables(path)} == {
      "global_center_variable/v", "global_step"}
  with training([5.0, 7.0], path) as (train_once, state, _):
    assert_same_bits(state(), [center, center, step])
    train_once()
    assert state()[2] == step + 1 == 2
