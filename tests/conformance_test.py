"""Every wrapper around every optimizer of `tf.compat.v1.train`.

Wrappers and optimizers are found, not listed: a new one is tested, or the test
that nothing is missing fails.
"""

import dataclasses
import inspect
import re

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import MODES
from training import apply_ops
from training import assert_close_traces
from training import assert_ema_step
from training import assert_same_bits
from training import recorded
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
  """
  make: object
  check: object


def check_averages(trace, mode):
  name = "ExponentialMovingAverage"
  slots = [name if k == 0 else f"{name}_{d}" for k, d in enumerate(DECAYS)]
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
    assert updates == len({v.dtype.base_dtype for v in trace.variables
                           if not v.name.startswith("none")})


def check_nothing_is_added(trace, mode):
  del mode
  assert not [t for t in trace.op_types
              if re.match("CrossReplica|AllToAll|Collective", t)]


def check_gate(trace, mode):
  # All fresh, so all admitted; the last of them was the last of the steps.
  counts = trace.others[-1]
  assert counts["stale_counter"] == 0
  histogram = counts["staleness_histogram"]
  assert histogram[0, 0] == histogram.sum() == STEPS
  if mode != "eager":
    assert trace.op_types.count(
        f"Wrapopt>StalenessGate{'Ref' if mode == 'ref' else ''}") == 1


WRAPPERS = {
    # There is one shard.
    wrapopt.CrossShardOptimizer: Case(
        lambda inner, fused: wrapopt.CrossShardOptimizer(inner),
        check_nothing_is_added),
    wrapopt.DropStaleGradientOptimizer: Case(
        lambda inner, fused: wrapopt.DropStaleGradientOptimizer(
            inner, 0, fused=fused),
        check_gate),
    wrapopt.MovingAverageOptimizer: Case(
        lambda inner, fused: wrapopt.MovingAverageOptimizer(
            inner, DECAYS, fused=fused),
        check_averages),
}
# Each wrapper, with each `fused` that it takes.
VARIANTS = [pytest.param(wrapper, fused, id=f"{wrapper.__name__}-{fused}")
            for wrapper in WRAPPERS
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
  assert set(WRAPPERS) == public_optimizers(wrapopt)
  assert wrapopt.MovingAverageOptimizer in WRAPPERS


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
@pytest.mark.parametrize("wrapper, fused", VARIANTS)
def test_wrapper(wrapper, inner, fused, mode, bare):
  expected = bare(inner, mode)
  initial = initial_values(inner)
  got = train(
      mode, lambda step: WRAPPERS[wrapper].make(INNER[inner](step), fused),
      initial, gradients(initial))
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
  WRAPPERS[wrapper].check(got, mode)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper, fused", VARIANTS)
def test_save_and_restore(wrapper, inner, fused, tmp_path):
  class Model:

    def __init__(self, start):
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

  one = Model([1.0, 2.0])
  one.train()
  path = one.checkpoint.save(str(tmp_path / "model"))
  saved = one.state()
  one.train()
  two = Model([5.0, 7.0])
  two.train()
  two.checkpoint.restore(path).assert_consumed()
  assert_same_bits(two.state(), saved)
  two.train()
  assert_same_bits(two.state(), one.state())
