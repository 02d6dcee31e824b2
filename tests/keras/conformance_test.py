"""Every wrapper of `wrapopt.keras` around every optimizer of Keras.

The test discovers wrappers and optimizers. If it cannot make a new one, a test
fails.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import re
import runpy
import threading

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import arrays
from inner_optimizers import (
    ADAM, FUSED, HAS_MUON, INNER, NAMES, UNFUSED, tensors, values_at_start,
    variables_of)
import keras_versions
import numerics
from training import in_mode, native_ops, stepping
import wrapopt
import wrapopt.keras as wk
from wrapopt import _composition
from wrapopt.keras import _wrapper
from wrapopt.keras._steps import _step

K = keras.optimizers

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


# Their gradients and rates change before the update: no news for XLA.
NO_JIT = {"SGD clipnorm", "SGD clipvalue", "SGD global_clipnorm",
          "SGD loss_scale_factor", "SGD schedule"}

# No optimizer: a base class that takes no step, and a table of optimizers.
NO_INNER = {K.Optimizer, getattr(K, "OptimizerMap", K.Optimizer),
            *(() if HAS_MUON else (K.Muon,))}

# (dtype of variables, dtype of gradients).
DTYPES = {
    "float32": (numerics.FLOAT, numerics.FLOAT),
    "float64": (numerics.DOUBLE, numerics.DOUBLE),
    # Gradients that a user computed in the policy's compute dtype.
    "mixed_float16": (numerics.FLOAT, numerics.HALF),
    "mixed_bfloat16": (numerics.FLOAT, numerics.BFLOAT16),
    "float16": (numerics.HALF, numerics.HALF),
    "bfloat16": (numerics.BFLOAT16, numerics.BFLOAT16),
}

# What bare Keras itself does not do, as a test says: it divides no sparse
# gradient by a loss scale, and Muon multiplies float64 by float32.
NO_SPARSE = {"SGD loss_scale_factor"}
NO_FLOAT64 = {"Muon"} & INNER.keys()

MODES = ("eager", "function", "jit")
DECAYS = (0.5, 0.875)
START, PERIOD = 1, 2
SYNC, STEP_SIZE = 2, 0.25
STEPS = 4

WRAPPERS = {
    "MovingAverage": lambda opt: wk.MovingAverage(opt, DECAYS),
    "SWA": lambda opt: wk.SWA(opt, START, PERIOD),
    "Lookahead": lambda opt: wk.Lookahead(opt, SYNC, STEP_SIZE),
}


def averages_of(opt, variables):
  """Its rows of averages: lists of arrays. An optimizer of Keras has none."""
  rows = opt._store.rows if isinstance(opt, _wrapper.WrapperOptimizer) else []
  return [arrays.values(row[opt._var_key(v)] for v in variables)
          for row in rows]


Trace = collections.namedtuple("Trace", "names values averages function opt")


def train(make, mode, dtypes, sync=None, sparse=True, names=NAMES):
  """What variables and averages are before the first and after each step.

  Args:
    make: A function that makes the optimizer.
    mode: "eager", "function" or "jit".
    dtypes: Of variables and of gradients.
    sync: None, or a function of a step's number and the variables' values after
      it, which gives others.
    sparse: Whether the table has sparse gradients.
    names: Of the variables.
  """
  variables, opt = variables_of(dtypes[0], names), make()
  function = stepping(opt, variables, mode)
  values, averages = [], []

  def record():
    values.append(arrays.values(variables))
    averages.append(averages_of(opt, variables))

  record()
  for t in range(STEPS):
    function(*tensors(t, dtypes[1], sparse, names))
    if sync:
      for v, x in zip(variables, sync(t, arrays.values(variables))):
        v.assign(x)
    record()
  if mode != "eager":
    assert function.experimental_get_tracing_count() == 1
  return Trace(names, values, averages, function, opt)


def slow_weights():
  """A `sync` of `train`: Lookahead in float64."""
  slow = list(map(np.float64, (values_at_start()[n] for n in NAMES)))

  def sync(t, fast):
    if (t + 1) % SYNC:
      return fast
    for i, v in enumerate(fast):
      slow[i] = slow[i] + STEP_SIZE * (np.float64(v) - slow[i])
    return [s.astype(v.dtype) for s, v in zip(slow, fast)]

  return sync


@functools.cache
def bare(inner, dtypes, lookahead):
  return train(INNER[inner], "eager", dtypes,
               slow_weights() if lookahead else None,
               sparse=inner not in NO_SPARSE).values


def tolerance(dtype):
  # Some eight roundings of four steps from numbers below 4.
  return 32 * 4 * float(ml_dtypes.finfo(dtype).eps)


def assert_variables(trace, inner, wrapper, dtypes, exact):
  narrow = dtypes[0] in (numerics.HALF, numerics.BFLOAT16)
  # Keras rounds after every operation, and we after the last.
  want = bare(inner, dtypes if inner in UNFUSED or not narrow else
              DTYPES["float32"], wrapper == "Lookahead")
  moved = 0
  for t, (row, want_row) in enumerate(zip(trace.values, want)):
    want_row = dict(zip(NAMES, want_row))
    for name, got in zip(trace.names, row):
      x = want_row[name]
      context = f"{name} after {t} steps"
      if exact:
        numerics.assert_same_bits(got, x, context)
      else:
        numerics.assert_close(got, np.float64(x), tolerance(dtypes[0]) * (
            2.0**-4 if narrow else 1), context)
      if name not in ("empty", "unused"):
        start = np.float64(values_at_start()[name])
        moves = np.abs(np.float64(got) - start)
        assert np.isfinite(moves).all(), context
        moved = max(moved, moves.max())
  assert moved > 0.1


def check_averages(trace, wrapper, dtypes, fused_by_xla=False):
  """Against the formula in float64, from the values that were recorded.

  XLA may give the average a value of Keras's step before it rounds that to a
  narrower dtype: `fused_by_xla`.
  """
  narrow = dtypes[0] in (numerics.HALF, numerics.BFLOAT16)
  kept_as = numerics.FLOAT if narrow else dtypes[0]
  for t, (before, after) in enumerate(zip(trace.averages, trace.averages[1:])):
    for k, (row, new_row) in enumerate(zip(before, after)):
      for name, s, new, v in zip(
          trace.names, row, new_row, trace.values[t + 1]):
        context = f"row {k} of {name} after {t + 1} steps"
        assert new.dtype == kept_as, context
        if wrapper == "MovingAverage":
          rate = 1 - DECAYS[k] if name != "unused" else 0
        elif wrapper == "SWA":
          n, rest = divmod(t - START, PERIOD)
          rate = 1 / (n + 1) if t >= START and rest == 0 else 0
        else:
          # Fast weights are slow ones when they return to them.
          if (t + 1) % SYNC == 0:
            # XLA may contract the multiplication for one of the two.
            eps = float(ml_dtypes.finfo(v.dtype).eps)
            numerics.assert_close(new, np.float64(v), eps * np.abs(
                np.float64(v)), context)
          rate = None
        if rate == 0:
          numerics.assert_same_bits(new, s, context)
        elif rate:
          unrounded = 0
          if fused_by_xla and narrow:
            unrounded = (rate * float(ml_dtypes.finfo(v.dtype).eps) / 2
                         * np.abs(np.float64(v)))
          [(want, allowed)] = numerics.reference("Ema", [s], [v], [rate])
          numerics.assert_close(new, want, allowed + unrounded, context)


def cases():
  """Each inner optimizer in each wrapper, and in each mode; dtypes alternate.

  Each wrapper and mode meets each dtype. Tracing and compiling takes long: one
  wrapper for an optimizer there.
  """
  wrappers, dtypes = list(WRAPPERS), list(DTYPES)
  found = [(inner, wrapper, "eager", dtypes[i % 6])
           for i, inner in enumerate(INNER) for wrapper in wrappers]
  for mode, left_out in (("function", ()), ("jit", NO_JIT)):
    for i, inner in enumerate(x for x in INNER if x not in left_out):
      found.append((inner, wrappers[i % 3], mode, dtypes[i // 3 % 6]))
  return [case for case in found
          if case[0] not in NO_FLOAT64 or case[3] != "float64"]


@pytest.mark.parametrize("make, want", [
    # w goes 1, 2, 3; s goes half of the way to it.
    (lambda opt: wk.MovingAverage(opt, 0.5), [(1, 0.5), (2, 1.25), (3, 2.125)]),
    # w goes 1, 2, 3, 4, 5; s is w, then the mean of 2, then of 2 and 4.
    (lambda opt: wk.SWA(opt, 1, 2), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]),
    # Every second step, w goes back to the half of the way.
    (lambda opt: wk.Lookahead(opt, 2, 0.5),
     [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2)])], ids=list(WRAPPERS))
def test_in_the_head(make, want):
  """Values of a variable, and of its average, after steps of SGD by 1."""
  w, opt, seen = keras.Variable([0.0]), make(K.SGD(1.0)), []
  for _ in want:
    opt.apply([tf.constant([-1.0])], [w])
    s = opt.average(w) if hasattr(opt, "average") else opt.slow_weights(w)
    seen.append((float(w.numpy()[0]), float(s.numpy()[0])))
  assert seen == want


@pytest.mark.parametrize("kind", ["number", "variable", "callable"])
def test_num_updates(kind):
  count = tf.Variable(0.0)
  given = {"number": 8, "variable": count, "callable": count.read_value}[kind]
  opt = wk.MovingAverage(K.SGD(1.0), 0.9, num_updates=given)
  w = keras.Variable([0.0])
  opt.build([w])
  step = tf.function(lambda: opt.apply([tf.constant([-1.0])], [w]))
  step()
  # (1 + 0) / (10 + 0) at 0, and (1 + 8) / (10 + 8) at 8.
  s = 0.5 if kind == "number" else 0.9
  np.testing.assert_allclose(opt.average(w), [s], rtol=1e-6)
  count.assign(8.0)  # Of now: TF Addons reads it once, when it is made.
  step()
  np.testing.assert_allclose(opt.average(w), [s + (2 - s) / 2], rtol=1e-6)


@pytest.mark.parametrize("version, serves", [
    ("2.15.0", False), ("3.11.3", False), ("3.12.0", True), ("3.100.1", True),
    ("3.16.0.dev2026102704", True), ("4.0.0", False)])
def test_versions_of_keras(version, serves, monkeypatch):
  monkeypatch.setattr(keras, "version", lambda: version)
  with (contextlib.nullcontext() if serves else pytest.raises(
      ImportError, match=f"needs Keras 3.12 or a later .* got Keras {version}"
  )):
    runpy.run_path(wk.__file__)


def test_nothing_is_missing():
  classes = {x for x in vars(wk).values()
             if inspect.isclass(x) and issubclass(x, K.Optimizer) and
             # One wraps none, one trains none and two train other points:
             # gate_test.py, interpolated_test.py.
             x not in (wk.DropStaleGradient, wk.LazyAdam, wk.PrimalAverage,
                       wk.ScheduleFree)}
  assert {c.__name__ for c in classes} == set(WRAPPERS) <= set(wk.__all__)
  assert {type(WRAPPERS[name](K.SGD())) for name in WRAPPERS} == classes
  found = {x for x in vars(K).values() if inspect.isclass(x)} - NO_INNER
  assert {type(make()) for make in INNER.values()} == found
  seen = [case for case in cases() if case[0] not in NO_FLOAT64]
  assert ({case[:2] for case in seen} ==
          set(itertools.product(INNER.keys() - NO_FLOAT64, WRAPPERS)))
  assert ({case[::2] for case in seen} ==
          set(itertools.product(INNER.keys() - NO_FLOAT64, MODES)) -
          set(itertools.product(NO_JIT, ["jit"])))
  assert ({case[1:] for case in seen} ==
          set(itertools.product(WRAPPERS, MODES, DTYPES)))


@pytest.mark.parametrize("inner, dtype, sparse", [
    *((inner, "float32", True) for inner in NO_SPARSE),
    *((inner, "float64", False) for inner in NO_FLOAT64)])
def test_what_keras_does_not_do(inner, dtype, sparse):
  with pytest.raises((TypeError, tf.errors.InvalidArgumentError)):
    train(INNER[inner], "eager", DTYPES[dtype], sparse=sparse)


@pytest.mark.by_day(10)
@pytest.mark.parametrize("inner, wrapper, mode, dtype", cases())
def test_steps(inner, wrapper, mode, dtype):
  dtypes = DTYPES[dtype]
  # XLA takes seconds for Keras's ops of a single variable.
  short = inner in UNFUSED and mode == "jit"
  names = ["kernel", "scalar", "unused"] if short else NAMES
  trace = train(lambda: WRAPPERS[wrapper](INNER[inner]()), mode, dtypes,
                sparse=inner not in NO_SPARSE, names=names)
  assert trace.opt.fused == (inner in FUSED)
  # Graphs are rewritten before they run.
  exact = inner in UNFUSED and mode == "eager" and wrapper != "Lookahead"
  assert_variables(trace, inner, wrapper, dtypes, exact)
  check_averages(trace, wrapper, dtypes, inner in UNFUSED and mode == "jit")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", ["Adam", "Nadam"])
def test_one_op_for_the_whole_model(inner, wrapper):
  dtypes = DTYPES["float32"]
  trace = train(lambda: WRAPPERS[wrapper](INNER[inner]()), "function", dtypes,
                sparse=False)
  found = native_ops(trace.function, *tensors(0, dtypes[1], sparse=False))
  want = {"Apply" + inner: 1} if inner == "Adam" else {}
  if wrapper == "Lookahead":
    want["AveragingAssign"] = 1
  elif wrapper == "SWA" or inner == "Nadam":
    want["EmaUpdate"] = 1
  if wrapper != "Lookahead":  # Are averages in place of the weights?
    want["CheckInitialized"] = 1
  assert found == want


@pytest.mark.parametrize("inner, op", [
    ("SGD", "ApplyKerasSGD"), ("SGD momentum", "ApplyKerasMomentum"),
    ("Adam", "ApplyAdam"), ("AdamW", "ApplyAdam"),
    ("Adam AMSGrad", "ApplyAdamWithAmsgrad"), ("Adagrad", "ApplyKerasAdagrad"),
    ("RMSprop", "ApplyKerasRMSProp"),
    ("RMSprop centered", "ApplyKerasCenteredRMSProp"),
    ("RMSprop momentum", "ApplyRMSProp"), ("Lion", "ApplyLion")])
def test_the_op_is_in_what_xla_compiles(inner, op):
  names = ["kernel", "scalar"]
  variables = variables_of(numerics.FLOAT, names)
  step = stepping(wk.MovingAverage(INNER[inner](), DECAYS), variables, "jit")
  args = tensors(0, numerics.FLOAT, names=names)
  hlo = step.experimental_get_compiler_ir(*args)("hlo")
  # What Keras would have done in ops of TensorFlow is not there.
  assert set(re.findall(r'op_type="(Wrapopt>\w+)"', hlo)) == {"Wrapopt>Apply"}
  assert set(native_ops(step, *args)) - {"CheckInitialized"} == {op}


OF_MANY = {
    "average": lambda: wk.MovingAverage(K.SGD(0.25), DECAYS),
    "average_of_adam": lambda: wk.MovingAverage(K.Adam(0.25), DECAYS),
    "schedule_free": lambda: wk.ScheduleFree(K.SGD(0.25)),
    "schedule_free_adam": lambda: wk.ScheduleFree(K.AdamW(0.25)),
    "primal_average": lambda: wk.PrimalAverage(K.AdamW(0.25), 0.75, 0.5),
}


class ManyWeights(keras.layers.Layer):
  """A layer whose weights have four shapes, of which one is empty."""

  def build(self, _):
    self.many = [self.add_weight(shape=shape, initializer="random_normal")
                 for _ in range(75) for shape in ((), (3,), (2, 5), (0,))]

  def call(self, x):
    x = keras.ops.mean(x)
    return tf.stack([tf.reduce_sum(w * w - x * w) for w in self.many])[None]


@pytest.mark.parametrize("name", OF_MANY)
@pytest.mark.parametrize("how", ["function", "fit"])
def test_300_variables_that_xla_compiles(how, name):
  """One op takes the step, and gives the bits of a step without XLA."""
  found = []
  for jit in False, True:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([1]), ManyWeights()])
    opt = OF_MANY[name]()
    step = stepping(opt, model.trainable_variables,
                    "jit" if jit else "function")
    before = arrays.values(model.weights)
    if how == "fit":
      model.compile(opt, lambda y, got: tf.reduce_sum(y * got), jit_compile=jit)
      model.fit(np.ones([4, 1]), np.ones([4, 1]), batch_size=1, verbose=0)
    else:
      for scale in 1.0, -0.5:
        grads = [tf.constant(scale * (w + 1)) for w in before]
        step(*grads)
      if jit:
        hlo = step.experimental_get_compiler_ir(*grads)("optimized_hlo")
        assert hlo.count('custom_call_target="wrapopt_apply"') == 1
    found.append(arrays.values((
        *model.weights, *opt.variables, *map(opt.average, model.weights))))
    assert len(model.weights) == 300
    assert all((v != w).all() for v, w in zip(found[-1], before))
  # In fit, XLA computes the gradients in another order.
  arrays.assert_close(*found, rtol=0, atol=0 if how == "function" else 1e-5)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("averages", [1, 3])
@pytest.mark.parametrize("name, slots", [("SGD", 0), ("Adam", 2)])
def test_what_a_step_captures(name, slots, averages, jit):
  """Each tensor that a function captures costs time in every call."""
  n = 5
  weights = [keras.Variable(np.ones(3)) for _ in range(n)]
  opt = wk.MovingAverage(getattr(K, name)(), [0.5, 0.75, 0.875][:averages])
  step = stepping(opt, weights, "jit" if jit else "function")
  found = step.get_concrete_function(*[tf.ones(3)] * n).captured_inputs
  # XLA must see each variable. Else there is one tensor of all their handles.
  assert len(found) <= (n * (1 + slots + averages) if jit else 1) + 4


MODE = pytest.mark.parametrize("mode", MODES)


# (outer, inner) of all that make sense; of the others there is an error.
NESTED = [(outer, inner) for outer in WRAPPERS for inner in WRAPPERS
          if outer != inner]


@MODE
@pytest.mark.parametrize("outer, inner", NESTED)
def test_nested(outer, inner, mode):
  """Each follows the steps of what it holds, as in this model."""
  w = keras.Variable([2.0])
  held = WRAPPERS[inner](K.SGD(0.5))
  opt = WRAPPERS[outer](held)
  step = stepping(opt, [w], mode)
  assert opt.fused
  v = 2.0
  rows = {name: [2.0] * (2 if name == "MovingAverage" else 1)
          for name in (outer, inner)}
  for t, grad in enumerate((1.0, -2.0, 4.0, 1.0)):
    step(tf.constant([grad]))
    v -= 0.5 * grad
    for name in (inner, outer):
      if name == "MovingAverage":
        rows[name] = [s + (1 - d) * (v - s) for s, d in zip(rows[name], DECAYS)]
      elif name == "SWA" and t in (1, 3):
        rows[name] = [s + (v - s) / {1: 1, 3: 2}[t] for s in rows[name]]
      elif name == "Lookahead" and t in (1, 3):
        v = rows[name][0] + STEP_SIZE * (v - rows[name][0])
        rows[name] = [v]
    np.testing.assert_array_equal(w.numpy(), [v])
    for name, x in ((inner, held), (outer, opt)):
      np.testing.assert_array_equal(np.ravel(averages_of(x, [w])), rows[name])


@keras_versions.needs("MultiOptimizer")
@pytest.mark.parametrize("name", WRAPPERS)
def test_no_wrapper_in_itself(name):
  make = WRAPPERS[name]
  between = {"it": lambda opt: opt, "LossScaleOptimizer": K.LossScaleOptimizer,
             "MultiOptimizer": lambda opt: K.MultiOptimizer(
                 K.OptimizerMap(opt)),
             **{other: WRAPPERS[other] for other in WRAPPERS if other != name}}
  for kind in between.values():
    held = kind(make(K.SGD(0.5)))
    with pytest.raises(ValueError, match=(
        f"`optimizer` of {name} must not be or hold a {name}: .*. Got "
        f"{type(held).__name__}")):
      make(held)


@pytest.mark.by_day(1)
@keras_versions.needs("MultiOptimizer")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_within_a_multi_optimizer(wrapper):
  """A wrapper of a part, around both, and another around all."""
  part = WRAPPERS[wrapper](K.SGD(0.5))
  other = next(make for name, make in WRAPPERS.items() if name != wrapper)
  opt = other(K.MultiOptimizer(K.OptimizerMap(K.SGD(0.25), {"a": part})))
  a, b = keras.Variable([2.0], name="a"), keras.Variable([2.0], name="b")
  alone = other(WRAPPERS[wrapper](K.SGD(0.5))), other(K.SGD(0.25))
  plain = keras.Variable([2.0]), keras.Variable([2.0])
  for _ in range(4):
    opt.apply([tf.constant([1.0])] * 2, [a, b])
    for x, p in zip(alone, plain):
      x.apply([tf.constant([1.0])], [p])
  for x, p, v in zip(alone, plain, (a, b)):
    np.testing.assert_array_equal(v.numpy(), p.numpy())
    np.testing.assert_array_equal(averages_of(opt, [v]), averages_of(x, [p]))
  np.testing.assert_array_equal(
      averages_of(part, [a]),
      averages_of(alone[0].inner_optimizer, [plain[0]]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_the_inner_optimizers(wrapper):
  inner = K.SGD(0.5, clipnorm=2.0, weight_decay=0.25, loss_scale_factor=8.0)
  opt = {"MovingAverage": wk.MovingAverage, "SWA": wk.SWA,
         "Lookahead": lambda opt: wk.Lookahead(opt, 100)}[wrapper](inner)
  assert opt.learning_rate is inner.learning_rate
  assert (opt.clipnorm, opt.weight_decay, opt.clipvalue) == (2.0, 0.25, None)
  assert opt.scale_loss(3.0) == 24.0
  opt.learning_rate, opt.clipnorm, opt.loss_scale_factor = 0.125, None, None
  opt.weight_decay, opt.global_clipnorm = None, 0.5
  w = keras.Variable([2.0])
  opt.build([w])
  opt.apply([tf.constant([4.0])])
  np.testing.assert_array_equal(w.numpy(), [2.0 - 0.125 * 0.5])
  assert (opt.iterations is inner.iterations) and int(opt.iterations) == 1
  assert opt.variables[:len(inner.variables)] == inner.variables
  names = [v.path for v in opt.variables]
  assert len(set(names)) == len(names)
  # A schedule in the place of a number.
  opt.learning_rate = K.schedules.PiecewiseConstantDecay([1], [1.0, 0.25])
  assert not any(v is inner.learning_rate for v in opt.variables)
  for value in (1.0, 0.25):
    before = w.numpy()
    opt.apply([tf.constant([0.25])])
    np.testing.assert_array_equal(w.numpy(), before - value * 0.25)


@pytest.mark.by_day(1)
@MODE
@pytest.mark.parametrize("inner", [K.SGD, K.Adamax], ids=["fused", "unfused"])
def test_averages_are_of_constrained_weights(inner, mode):
  w = keras.Variable([1.0, -1.0])
  w.constraint = keras.constraints.NonNeg()
  opt = wk.SWA(wk.MovingAverage(wk.Lookahead(inner(4.0), 2, 0.5), 0.5), 0, 1)
  step = stepping(opt, [w], mode)
  step(tf.constant([1.0, -1.0]))
  now = w.numpy()
  assert now[0] == 0 and now[1] > 0
  np.testing.assert_array_equal(opt.average(w), now)
  np.testing.assert_array_equal(opt.inner_optimizer.average(w),
                                [0.5, (now[1] - 1) / 2])
  step(tf.constant([1.0, 0.0]))
  # The slow weight went from 1 to 0.5, not further.
  assert w.numpy()[0] == 0.5


@MODE
@pytest.mark.parametrize("accumulated", [None, 2])
@pytest.mark.parametrize("inner", [K.SGD, K.Adamax], ids=["fused", "unfused"])
def test_a_constraint_acts_once(inner, accumulated, mode):
  def trained(wrap, steps, as_fit=False):
    w = keras.Variable([1.0])
    w.constraint = lambda w: w / 2  # Tells how often it acts.
    opt = wrap(inner(0.0, gradient_accumulation_steps=accumulated))
    step, seen = stepping(opt, [w], mode, as_fit), []
    for _ in range(steps):
      step(tf.constant([1.0]))
      seen.append(w.numpy().item())
    return opt, w, seen

  steps = 2 * (accumulated or 1)
  _, _, plain = trained(lambda opt: opt, steps)
  # Keras constrains the weights in each call, also if it only accumulates.
  assert plain == [0.5**(i + 1) for i in range(steps)]
  for wrap in (wk.SWA, wk.MovingAverage, wk.Lookahead,
               lambda opt: wk.SWA(wk.Lookahead(opt), 0, 1)):
    opt, w, found = trained(wrap, steps)
    assert found == plain
    if wrap is wk.SWA:
      continue  # It counts none of these steps.
    if isinstance(opt, wk.SWA):
      # Of the weights after those calls that take a step.
      stepped = plain[steps // 2 - 1::steps // 2]
      assert opt.average(w).numpy() == np.mean(stepped)
  if mode != "jit":
    opt, w, found = trained(lambda opt: wk.MovingAverage(opt, 0.5), steps, True)
    assert found == plain
    start = 1 if accumulated is None or mode != "eager" else 0.5
    assert opt.average(w).numpy() == (
        start / 4 + stepped[0] / 4 + stepped[1] / 2)
  # The second step moves the weights to the slow ones: they are constrained.
  opt, w, found = trained(lambda opt: wk.Lookahead(opt, 2, 0.5), steps)
  start = 1 if accumulated is None or mode != "eager" else 0.5
  slow = (start + plain[-1]) / 2
  assert opt.slow_weights(w).numpy() == slow
  assert found == [*plain[:-1], slow / 2]


@MODE
@pytest.mark.parametrize("inner", [K.SGD, K.Adamax], ids=["fused", "unfused"])
def test_averages_of_weights_that_keras_overwrites(inner, mode):
  """`ema_overwrite_frequency`: Keras writes its own averages to the weights."""
  w = keras.Variable([1.0])
  opt = wk.SWA(inner(0.5, use_ema=True, ema_momentum=0.5,
                     ema_overwrite_frequency=2), 0, 1)
  step, seen = stepping(opt, [w], mode), []
  for _ in range(4):
    step(tf.constant([1.0]))
    seen.append(w.numpy().item())
  np.testing.assert_allclose(seen[:2], [0.5, 0.25], atol=1e-6)  # It did.
  np.testing.assert_allclose(opt.average(w), [np.mean(seen)], rtol=1e-6)


def test_averages_follow_steps_after_a_count_that_failed():
  fails = [True]

  def count():
    if fails:
      raise ValueError("no count")
    return 0

  w = keras.Variable([1.0])
  w.constraint = keras.constraints.NonNeg()  # Averages follow it.
  opt = wk.MovingAverage(keras.optimizers.SGD(1.0), 0.5, num_updates=count)
  with pytest.raises(ValueError, match="no count"):
    opt.apply([tf.constant([1.0])], [w])
  np.testing.assert_array_equal(w, [1.0])
  fails.clear()
  opt.apply([tf.constant([1.0])], [w])
  # The decay is (1 + 0) / (10 + 0): 1 + 0.9 * (0 - 1).
  np.testing.assert_allclose(opt.average(w), [0.1], rtol=1e-6)


@pytest.mark.parametrize("constraint", [None, lambda w: w])
def test_averages_of_keras_are_of_its_own_step(constraint):
  """Not of the weights to which a Lookahead moves, with and without one."""
  v = keras.Variable([1.0])
  v.constraint = constraint
  opt = wk.Lookahead(K.SGD(1.0, use_ema=True, ema_momentum=0.0), 2, 0.5)
  for _ in range(2):
    opt.apply([tf.constant([1.0])], [v])
  # 1, 0, -1, which is half-way to 1 moved to 0.
  assert v.numpy() == [0.0]
  assert opt.inner_optimizer._model_variables_moving_average[0].numpy() == [-1.0]


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("inner", [K.SGD, K.Adamax], ids=["fused", "unfused"])
@pytest.mark.parametrize("method", [
    "apply", "apply_gradients", "_backend_apply_gradients"])
def test_averages_of_weights_that_a_subclass_changes_last(method, inner, mode):
  def halves(self, *args):
    getattr(inner, method)(self, *args)
    for v in self._trainable_variables:
      v.assign(v / 2)

  for as_fit in [True] if method == "apply_gradients" else [False, True]:
    w = keras.Variable([1.0])
    opt = wk.MovingAverage(type("Own", (inner,), {method: halves})(0.0), 0.5)
    step = stepping(opt, [w], mode, as_fit)
    for average in (0.75, 0.5):
      step(tf.constant([1.0]))
      assert opt.average(w).numpy() == average


def test_a_constraint_that_is_not_convex():
  """Averages are of what the model holds, not of Lookahead's interpolation."""
  w = keras.Variable([[1.0], [0.0]])
  w.constraint = keras.constraints.UnitNorm()
  opt = wk.MovingAverage(wk.Lookahead(K.SGD(1.0), 1, 0.5), 0.0)
  opt.apply([tf.constant([[1.0], [-1.0]])], [w])
  np.testing.assert_allclose(w, [[0.5**0.5]] * 2, rtol=1e-6)
  np.testing.assert_allclose(opt.average(w), w, rtol=1e-6)


class Jump(_wrapper.WrapperOptimizer):
  """A wrapper without averages: adds 10 after each second step."""

  changes_weights = True

  def _make_state(self, variables):
    pass

  def _follow(self, step):
    def jump():
      for v in step.variables:
        v.assign_add(tf.fill(v.shape, 10.0))

    _step.where((step.iterations + 1) % 2 == 0, jump)


@MODE
@pytest.mark.parametrize("is_outside", [False, True])
def test_a_wrapper_without_averages(is_outside, mode):
  jump = lambda opt: Jump(opt, "jump", sum_duplicates=False)
  average = lambda opt: wk.MovingAverage(opt, 0.5)
  w = keras.Variable([0.0])
  opt = (average(jump(K.SGD(1.0))) if is_outside else jump(average(K.SGD(1.0))))
  step = stepping(opt, [w], mode)
  for _ in range(2):
    step(tf.constant([-1.0]))
  # Of 1 and 12, or of 1 and 2.
  assert w.numpy() == [12.0]
  assert (opt if is_outside else opt.inner_optimizer).average(w).numpy() == [
      6.25 if is_outside else 1.25]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mode", ["function", "jit"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_built_where_it_is_traced(wrapper, mode):
  found = []
  for how in mode, "eager":
    w, opt = tf.Variable([2.0]), WRAPPERS[wrapper](K.Adam(**ADAM))
    step = in_mode(lambda grad: opt.apply([grad], [w]), how)
    for _ in range(2):
      step(tf.constant([1.0]))
    assert int(opt.iterations) == 2
    found.append([w.numpy(), averages_of(opt, [w])])
  arrays.assert_close(*found, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_a_model_that_is_built_where_it_is_traced(jit):
  """Its variables have no values yet when the optimizer is built."""
  model = keras.Sequential([keras.layers.Dense(
      1, use_bias=False, kernel_initializer=keras.initializers.Constant(2.0))])
  moving = wk.MovingAverage(K.SGD(1.0), 0.5)
  opt = wk.Lookahead(wk.SWA(moving, 0, 1), 2, 0.5)
  model.compile(opt, lambda _, y: tf.reduce_mean(y), jit_compile=jit)
  for v, average, mean in ((1.0, 1.5, 1.0), (1.0, 0.75, 0.5)):
    model.train_on_batch(np.ones((4, 1)), np.ones((4, 1)))
    [w] = model.trainable_variables
    # The second step went from 1 to 0, and back half of the way to 2.
    np.testing.assert_array_equal(
        [x.numpy().item()
         for x in (w, moving.average(w), opt.inner_optimizer.average(w))],
        [v, average, mean])


@pytest.mark.by_day(0)
@pytest.mark.parametrize("policy, jit", [("mixed_float16", True),
                                         ("mixed_bfloat16", False)])
def test_models_of_mixed_precision(policy, jit):
  """compile() and train as with the bare optimizer; weights are float32.

  Under mixed_float16, Keras wraps a LossScaleOptimizer around ours.
  """
  finals = []
  for ours in (False, True):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((2,), dtype="int32"),
        keras.layers.Embedding(5, 4, dtype=policy),
        keras.layers.Flatten(), keras.layers.Dense(1, dtype=policy)])
    model.dtype_policy = policy
    opt = K.SGD(0.125, momentum=0.5)
    if ours:
      opt = wk.Lookahead(wk.SWA(wk.MovingAverage(opt, DECAYS), 0, 1), 100)
    model.compile(opt, "mse", jit_compile=jit)
    assert (model.optimizer is opt) == (policy != "mixed_float16")
    x, y = np.array([[0, 1], [2, 3]]), np.array([[1.0], [2.0]])
    for _ in range(3):
      model.train_on_batch(x, y)
    finals.append(arrays.values(model.trainable_variables))
  arrays.assert_close(*finals, rtol=1e-7, atol=2**-18)
  swa, moving = opt.inner_optimizer, opt.inner_optimizer.inner_optimizer
  for v in model.trainable_variables:
    assert moving.average(v).dtype == swa.average(v).dtype == "float32"
    distance = [np.abs(s - v.numpy()).max() for s in (
        moving.average(v, DECAYS[0]).numpy(),
        moving.average(v, DECAYS[1]).numpy(), swa.average(v).numpy())]
    assert 0 < distance[0] < distance[1] and distance[2] > 0
  # Keras has the last step of fit() put the averages into the weights.
  model.fit(x, y, verbose=0)
  for v in model.trainable_variables:
    numerics.assert_same_bits(v.numpy(), swa.average(v).numpy())


def test_loss_scaling_twice():
  inside = wk.MovingAverage(K.LossScaleOptimizer(K.SGD(0.5)))
  for around in (K.LossScaleOptimizer, wk.SWA):
    if around is wk.SWA:
      inside = wk.SWA(inside)
    with pytest.raises(ValueError, match="gradients would be unscaled twice"):
      K.LossScaleOptimizer(inside)


class OwnUpdate(K.SGD):

  def apply(self, grads, trainable_variables=None):
    for grad, v in zip(grads, trainable_variables):
      v.assign_sub(grad)


class OwnUpdateInFit(K.SGD):

  def apply_gradients(self, grads_and_vars):
    for grad, v in grads_and_vars:
      v.assign_sub(grad)


class Centralized(K.SGD):

  def apply(self, grads, trainable_variables=None):
    super().apply([g - tf.reduce_mean(g) for g in grads], trainable_variables)


class CentralizedInFit(K.SGD):

  def apply_gradients(self, grads_and_vars):
    return super().apply_gradients(
        [(g - tf.reduce_mean(g), v) for g, v in grads_and_vars])


class OfTwo(K.SGD):
  """Trains matrices itself, and all others by another optimizer."""

  def __init__(self, kind):
    super().__init__(0.5)
    self.others = kind(K.Adam(0.5))

  def build(self, variables):
    super().build(variables[:1])
    [other] = tf.nest.flatten(self.others)
    other.build(variables[1:])

  def apply(self, grads, trainable_variables=None):
    super().apply(grads[:1], trainable_variables[:1])
    [other] = tf.nest.flatten(self.others)
    other.apply(grads[1:], trainable_variables[1:])


@pytest.mark.parametrize("kind", [
    lambda x: x, lambda x: [x], lambda x: (x,), lambda x: {"adam": x}],
                         ids=["attribute", "list", "tuple", "dict"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_that_takes_steps_and_holds_another(wrapper, kind):
  a, b = keras.Variable([[2.0]]), keras.Variable([2.0])
  opt = WRAPPERS[wrapper](OfTwo(kind))
  with pytest.raises(NotImplementedError, match=(
      f"OfTwo inside of {wrapper} must leave all steps to the optimizers that "
      "it holds in `others`")):
    opt.apply([tf.ones([1, 1]), tf.ones([1])], [a, b])


class OfUsers(wk.MovingAverage):

  def apply(self, grads, trainable_variables=None):
    super().apply([-g for g in grads], trainable_variables)


def test_wrappers_of_users():
  w = keras.Variable([1.0])
  opt = K.LossScaleOptimizer(OfUsers(K.SGD(1.0)), 1.0)
  opt.apply([tf.constant([1.0])], [w])
  assert w.numpy() == 2
  with pytest.raises(ValueError, match=r"overrides apply\(\), which would not"
                     " be called, got OfUsers"):
    wk.SWA(opt)


@pytest.mark.parametrize("own, centralized, mode", [
    (OwnUpdate, Centralized, "eager"), (OwnUpdate, Centralized, "function"),
    (OwnUpdateInFit, CentralizedInFit, "eager")])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_optimizers_of_users(wrapper, own, centralized, mode):
  """fit() calls apply_gradients(), and so do we."""
  w, as_fit = keras.Variable([1.0, 2.0]), own is OwnUpdateInFit
  step = stepping(WRAPPERS[wrapper](own(0.5)), [w], mode, as_fit)
  with pytest.raises(NotImplementedError, match=(
      f"{own.__name__} inside of {wrapper} must update variables by "
      "`_backend_update_step`")):
    step(tf.constant([1.0, 3.0]))
  w.assign([1.0, 2.0])
  opt = WRAPPERS[wrapper](centralized(0.5))
  assert as_fit or not opt.fused
  step = stepping(opt, [w], mode, as_fit)
  step(tf.constant([1.0, 3.0]))
  np.testing.assert_array_equal(w.numpy(), [1.5, 1.5])
  if wrapper == "MovingAverage":
    np.testing.assert_array_equal(opt.average(w), [1.25, 1.75])


class OwnUpdateElsewhere(K.SGD):
  """Updates variables itself in other threads, once `may_end` is set."""

  def __init__(self):
    super().__init__(0.5)
    self.began, self.may_end = threading.Event(), threading.Event()

  def apply(self, grads, trainable_variables=None):
    if threading.current_thread() is threading.main_thread():
      super().apply(grads, trainable_variables)
      return
    self.began.set()
    assert self.may_end.wait(600)
    trainable_variables[0].assign_sub(grads[0])


def test_a_step_of_another_thread_hides_no_own_update():
  w, inner, errors = keras.Variable([1.0]), OwnUpdateElsewhere(), []
  step = stepping(wk.MovingAverage(inner), [w], "eager")

  def run():
    with pytest.raises(NotImplementedError, match="_backend_update_step"):
      step(tf.constant([1.0]))
    errors.append("raised")

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  assert inner.began.wait(600)
  step(tf.constant([1.0]))  # It reaches `_backend_update_step` meanwhile.
  inner.may_end.set()
  thread.join()
  assert errors == ["raised"]


def test_no_step_while_averages_are_in_place():
  """Of none of the wrappers."""
  w = keras.Variable([1.0])
  swa = wk.SWA(wk.MovingAverage(K.SGD(1.0), 0.5), 0, 1)
  moving = swa.inner_optimizer
  opt = wk.Lookahead(swa)
  opt.apply([tf.constant([1.0])], [w])
  for x in (swa, moving):
    before = arrays.values((w, *opt.variables))
    with x.averaged_weights():
      for y in (opt, swa, moving) if x is moving else (opt, swa):
        with pytest.raises(RuntimeError, match=r"apply\(\) must not be called"):
          y.apply([tf.constant([1.0])], [w])
    arrays.assert_same_bits(arrays.values((w, *opt.variables)), before)


@pytest.mark.parametrize("make, error, text", [
    (lambda opt: wk.MovingAverage(opt, 1.5), ValueError,
     r"`average_decay` must be in \[0, 1\], got 1.5"),
    (lambda opt: wk.MovingAverage(opt, []), ValueError, "at least one decay"),
    *((lambda opt, decay=decay: wk.MovingAverage(opt, decay), TypeError,
       "`average_decay` must be a number, .* got True") for decay in (
           True, [0.5, True])),
    (lambda opt: wk.MovingAverage(opt, float("nan")), ValueError,
     r"`average_decay` must be in \[0, 1\], got nan"),
    *((lambda opt, n=n: wk.MovingAverage(opt, num_updates=n), ValueError,
       f"`num_updates` must be finite, got {n}")
      for n in (float("nan"), float("inf"))),
    (lambda opt: wk.MovingAverage(opt, num_updates=True), TypeError,
     "`num_updates` must be a number, .* got True"),
    (lambda opt: wk.MovingAverage(opt, dynamic_decay="no"), TypeError,
     "`dynamic_decay` must be True or False, got 'no'"),
    (lambda opt: wk.MovingAverage(opt, average_batch_norm=1), TypeError,
     "`average_batch_norm` must be True or False, got 1"),
    *((lambda opt, make=make: make(opt).set_model(None), TypeError,
       "`model` must be a Keras model, got None")
      for make in (wk.MovingAverage, wk.SWA)),
    (lambda opt: wk.MovingAverage(opt, shadow_dtype=""), TypeError,
     "`shadow_dtype` must be float16, bfloat16, float32 or float64, got ''"),
    (lambda opt: wk.MovingAverage(opt, [0.5, 0.5]), ValueError,
     "different decays"),
    (lambda opt: wk.MovingAverage(opt, tf.constant(0.5)), TypeError,
     "`average_decay` must be a number, a PowerDecay, a HalfLife or a BEMA"),
    (lambda opt: wk.MovingAverage(opt, "0.5"), TypeError, "average_decay"),
    (lambda opt: wk.MovingAverage(opt, num_updates=-1), ValueError,
     "`num_updates` must be at least 0, got -1"),
    (lambda opt: wk.MovingAverage(opt, num_updates="1"), TypeError,
     "`num_updates` must be a number, tensor, variable or callable, got '1'"),
    (lambda opt: wk.MovingAverage(opt, start_step=-1), ValueError,
     "`start_step` must be at least 0, got -1"),
    (lambda opt: wk.MovingAverage(opt, start_step=1.5), TypeError,
     "`start_step` must be an integer, got 1.5"),
    (lambda opt: wk.MovingAverage(opt, shadow_dtype="int32"), TypeError,
     "`shadow_dtype` must be float16, bfloat16, float32 or float64, got"),
    (lambda opt: wk.SWA(opt, average_period=0), ValueError,
     "`average_period` must be at least 1, got 0"),
    (lambda opt: wk.SWA(opt, start_averaging=-1), ValueError,
     "`start_averaging` must be at least 0, got -1"),
    (lambda opt: wk.SWA(opt, average_period=True), TypeError,
     "`average_period` must be an integer, got True"),
    (lambda opt: wk.Lookahead(opt, 0), ValueError,
     "`sync_period` must be at least 1, got 0"),
    (lambda opt: wk.Lookahead(opt, 2, 1.5), ValueError,
     r"`slow_step_size` must be in \[0, 1\], got 1.5"),
    (lambda opt: wk.Lookahead(opt, 2, "1"), TypeError,
     "`slow_step_size` must be a number, got '1'"),
    *((lambda opt, make=make: make(tf.compat.v1.train.AdamOptimizer()),
       TypeError, "`optimizer` must be a Keras 3 optimizer, or .*AdamOptimizer")
      for make in WRAPPERS.values())])
def test_arguments(make, error, text):
  with pytest.raises(error, match=text):
    make(K.SGD(0.5))


def of_package(*modules):
  """An object whose class and bases are from these modules."""
  cls = object
  for module in reversed(modules):
    cls = type("Adam", (cls,), {"__module__": module})
  return cls()


# {kind: (an object, what an error calls it)}. The modules are those of tf_keras
# 2.21.0 and of TensorFlow Addons 0.23.0, which TensorFlow 2.21 cannot import.
KINDS = {
    "v1": (tf.compat.v1.train.AdamOptimizer(), "tf.compat.v1.train"),
    "keras": (K.Adam(), "Keras 3"),
    "ours": (wk.SWA("sgd"), "Keras 3"),
    "tf_keras": (of_package("tf_keras.src.optimizers.adam"),
                 r"tf_keras \(Keras 2\)"),
    "scaling": (of_package("mine", "tf_keras.src.optimizers.optimizer"),
                r"tf_keras \(Keras 2\)"),
    "addons": (of_package(
        "tensorflow_addons.optimizers.moving_average",
        "tf_keras.src.optimizers.legacy.optimizer_v2"), "TensorFlow Addons"),
}
NO_OPTIMIZERS = {
    "layer": (keras.layers.Dense(1), r"core.dense.Dense\.$"),
    "number": (3, r"builtins.int\.$"),
    "class": (K.Adam, "the class .*Adam. Make an optimizer: call the class.$"),
}
OF_V1 = {
    "CrossShardOptimizer": ((), "The wrappers in wrapopt.keras are"),
    "DropStaleGradientOptimizer": ((1,), "Use wrapopt.keras.DropStaleGradient"),
    "ElasticAverageOptimizer": (
        (1, wrapopt.ElasticAverageCustomGetter("/cpu:0")), "The wrappers in"),
    "ModelAverageOptimizer": (
        (1, True, wrapopt.ModelAverageCustomGetter("/cpu:0")),
        "The wrappers in"),
    "MovingAverageOptimizer": ((), "Use wrapopt.keras.MovingAverage for"),
    "PrimalAverageOptimizer": ((), "Use wrapopt.keras.PrimalAverage for"),
    "ScheduleFreeOptimizer": ((), "Use wrapopt.keras.ScheduleFree for"),
}
OF_KERAS = {
    "DropStaleGradient": ((1,), "Use wrapopt.DropStaleGradientOptimizer for"),
    "Lookahead": ((), "The wrappers in wrapopt are for it"),
    "MovingAverage": ((), "Use wrapopt.MovingAverageOptimizer for"),
    "PrimalAverage": ((), "Use wrapopt.PrimalAverageOptimizer for"),
    "SWA": ((), "The wrappers in wrapopt are for it"),
    "ScheduleFree": ((), "Use wrapopt.ScheduleFreeOptimizer for"),
}


@pytest.mark.parametrize("kind", {**KINDS, **NO_OPTIMIZERS})
def test_optimizers_of_another_kind(kind):
  assert {*OF_V1} == {*_composition.NAMES}
  assert {*OF_KERAS} == {n for n in wk.__all__ if isinstance(
      getattr(wk, n), type) and issubclass(getattr(wk, n),
                                           _wrapper.WrapperOptimizer)}
  for module, wrappers, own, must in (
      (wrapopt, OF_V1, ("v1",), "`opt` must be a tf.compat.v1.train.Optimizer"),
      (wk, OF_KERAS, ("keras", "ours"), "`optimizer` must be a Keras 3")):
    for name, (args, remedy) in wrappers.items():
      if kind in own:
        continue
      if kind in NO_OPTIMIZERS:
        got, says = NO_OPTIMIZERS[kind]
      else:
        got, called = KINDS[kind]
        if kind in ("tf_keras", "scaling", "addons"):
          remedy = "wrapopt has no wrappers for these. Use the optimizer of"
        says = f".*, an optimizer of {called}. {remedy}"
      with pytest.raises(TypeError, match=f"^{must}.*, got .*{says}"):
        getattr(module, name)(got, *args)


def test_shadow_dtypes():
  w = {dtype: keras.Variable([1.0], dtype=dtype)
       for dtype in ("float16", "bfloat16", "float32", "float64")}
  kept_as = lambda opt, dtype: (opt.build([w[dtype]]),
                                opt.average(w[dtype]).dtype)[1]
  for dtype, want in (("float16", "float32"), ("bfloat16", "float32"),
                      ("float32", "float32"), ("float64", "float64")):
    assert kept_as(wk.MovingAverage(K.SGD(0.5)), dtype) == want
    assert kept_as(wk.MovingAverage(K.SGD(0.5), shadow_dtype=dtype),
                   dtype) == dtype
    assert kept_as(wk.SWA(K.SGD(0.5)), dtype) == want
  for dtype, asked in (("float32", "bfloat16"), ("float32", "float64"),
                       ("float64", "float32"), ("float16", "bfloat16")):
    opt = wk.MovingAverage(K.SGD(0.5), shadow_dtype=asked)
    with pytest.raises(ValueError, match=(
        f"`shadow_dtype` must be {dtype}.*, got {asked}, for '")):
      opt.build([w[dtype]])
    assert not opt.built


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_errors_of_steps(wrapper):
  w, other = keras.Variable([1.0]), keras.Variable([1.0])
  opt = WRAPPERS[wrapper](K.SGD(0.5))
  with pytest.raises(ValueError, match="`trainable_variables` must be given"):
    opt.apply([tf.constant([1.0])])
  assert opt.apply([]) is None and not opt.built
  opt.build([w])
  for grads, variables, text in (
      ([None], [w], "No gradients provided"),
      ([tf.constant([1.0])], [other], "Unknown variable"),
      ([tf.constant([1.0])] * 2, None, "Received a list of 2 gradients")):
    with pytest.raises(ValueError, match=text):
      opt.apply(grads, variables)
  assert w.numpy() == 1 and int(opt.iterations) == 0
  name = "average" if wrapper != "Lookahead" else "slow_weights"
  with pytest.raises(KeyError, match=(
      f"`variable` must be one that this {wrapper} was built with, got "
      f"'{other.path}'")):
    getattr(opt, name)(other)
  with pytest.raises(RuntimeError, match="must be called after the first step"):
    getattr(WRAPPERS[wrapper](K.SGD(0.5)), name)(w)


@pytest.mark.parametrize("given", [
    "adam", {"class_name": "Adam", "config": {}}])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_by_name_and_configuration(wrapper, given):
  assert type(WRAPPERS[wrapper](given).inner_optimizer) is K.Adam


def test_the_inner_optimizer():
  inner = K.SGD()
  for wrap in *WRAPPERS.values(), lambda opt: wk.DropStaleGradient(opt, 1):
    opt = wrap(inner)
    assert opt.inner_optimizer is inner
    with pytest.raises(AttributeError):
      opt.inner_optimizer = K.Adam()


@pytest.mark.parametrize("inner", [K.SGD, K.AdamW, K.Adamax])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_without_weight_decay_may_be_those_of_layers(wrapper, inner):
  finals = []
  for wrap in (lambda opt: opt, WRAPPERS[wrapper]):
    model = keras.Sequential([
        keras.Input((2,)), keras.layers.Dense(2, name="body"),
        keras.layers.LayerNormalization(name="layer_norm"),
        keras.layers.Dense(1, name="head")])
    for i, v in enumerate(model.trainable_variables):
      v.assign(np.full(v.shape, i + 1))
    opt = wrap(inner(0.125, weight_decay=0.5))
    opt.exclude_from_weight_decay(var_names=["head/bias", "layer_norm"])
    opt.apply([tf.ones(v.shape) for v in model.trainable_variables],
              model.trainable_variables)
    finals.append(arrays.values(model.trainable_variables))
  arrays.assert_close(*finals, rtol=4e-6)


def test_swa_around_an_optimizer_that_has_trained():
  # The first counted step replaces the average, whatever came before.
  w = keras.Variable([0.0])
  sgd = K.SGD(1.0)
  for _ in range(5):
    sgd.apply([tf.constant([-1.0])], [w])
  opt = wk.SWA(sgd, 2, 2)
  step = stepping(opt, [w], "function")
  for want in (6, 7, 7, 8, 8, 9):  # After 6 steps w; then of 7; 7, 9; ...
    step(tf.constant([-1.0]))
    assert opt.average(w).numpy() == want
  opt.seed_averages()
  assert opt.average(w).numpy() == w.numpy() == 11
  step(tf.constant([-1.0]))
  step(tf.constant([-1.0]))
  assert opt.average(w).numpy() == 13


@keras_versions.needs("MultiOptimizer")
def test_parts_of_a_multi_optimizer_count_their_own_steps():
  """The first trains nothing, another has trained before."""
  a, b = (keras.Variable([0.0], name=name) for name in "ab")
  trained = K.SGD(1.0)
  for _ in range(3):
    trained.apply([tf.constant([-1.0])], [a])
  inner = K.MultiOptimizer(K.OptimizerMap(
      K.SGD(1.0), {"nothing": K.SGD(), "a": trained}))
  moving = wk.MovingAverage(inner, wrapopt.PowerDecay(gamma=0))
  opt = wk.SWA(moving, 0, 1)
  for _ in range(3):
    opt.apply([tf.constant([-1.0])] * 2, [a, b])
  assert moving.average_steps() == 3
  for x in (moving, opt):  # Of 4, 5 and 6, and of 1, 2 and 3.
    np.testing.assert_allclose(
        [x.average(v).numpy().item() for v in (a, b)], [5, 2], rtol=1e-6)


def late_weights(opt, w):
  """Trains from a weight of 10 that is set after the optimizer is built."""
  opt.build([w])
  w.assign([10.0])
  for _ in range(2):
    opt.apply([tf.constant([-1.0])], [w])


def test_averages_begin_at_the_values_before_the_first_step():
  w = keras.Variable([0.0])
  late_weights(opt := wk.MovingAverage(K.SGD(1.0), 0.5), w)
  assert opt.average(w).numpy() == 11.25  # Of 10, 11 and 12.
  w.assign([0.0])
  late_weights(opt := wk.Lookahead(K.SGD(1.0), 2), w)
  assert w.numpy() == opt.slow_weights(w).numpy() == 11
  w.assign([20.0])
  opt.seed_slow_weights()
  for _ in range(2):
    opt.apply([tf.constant([-1.0])], [w])
  assert w.numpy() == 21


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_averages_that_have_not_begun_are_variables(wrapper):
  w = keras.Variable([0.0])
  opt = WRAPPERS[wrapper](K.SGD(1.0, gradient_accumulation_steps=2))
  step = stepping(opt, [w], "function")
  step(tf.constant([-1.0]))
  w.assign([10.0])
  read = opt.slow_weights if wrapper == "Lookahead" else opt.average
  assert read(w).numpy() == 10
  if wrapper != "Lookahead":
    with opt.averaged_weights():
      assert w.numpy() == 10
    opt.finalize_variable_values([w])
    assert w.numpy() == 10
  step(tf.constant([-1.0]))
  w.assign([20.0])
  # SWA counts the second step, Lookahead moves after it.
  assert read(w).numpy() == {
      "MovingAverage": 10.5, "SWA": 20, "Lookahead": 10}[wrapper]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_average_begins_with_a_step_that_fails(wrapper):
  w = keras.Variable([1.0])
  opt = WRAPPERS[wrapper](K.SGD(1.0))
  opt.build([w])
  with pytest.raises(Exception, match="shape"):
    opt.apply([tf.ones([2])], [w])
  w.assign([3.0])
  read = opt.slow_weights if wrapper == "Lookahead" else opt.average
  assert read(w).numpy() == 3


@pytest.mark.by_day(0)
def test_one_thread_at_a_time_has_averages_in_place():
  w = keras.Variable([1.0], dtype="bfloat16")
  opt = wk.MovingAverage(K.SGD(1.0), 0.5)
  opt.apply([tf.constant([1.0])], [w])  # The weight is 0, the average 0.5.
  barrier, seen = threading.Barrier(2), []

  def enter():
    for _ in range(300):
      barrier.wait()
      try:
        with opt.averaged_weights():
          seen.append(float(w.numpy()[0]))
      except RuntimeError as e:
        assert "must not be called inside averaged_weights" in str(e)

  threads = [threading.Thread(target=enter) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(seen) >= 300 and set(seen) == {0.5}
  assert w.numpy() == 0 and opt.average(w).numpy() == 0.5


@pytest.mark.by_day(1)
@pytest.mark.parametrize("constraint", [None, lambda w: w / 4])
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_layers_that_are_frozen_later_keep_their_weights(
    wrapper, mode, constraint):
  a, b = (keras.Variable([1.0], name=name) for name in "ab")
  a.constraint = constraint
  opt = WRAPPERS[wrapper](K.SGD(1.0))
  opt.build([a, b])
  grad = tf.constant([-1.0])

  def train(variables, steps):
    step = lambda: opt.apply([grad for _ in variables], variables)
    step = tf.function(step) if mode == "function" else step
    for _ in range(steps):
      step()

  read = opt.slow_weights if wrapper == "Lookahead" else opt.average
  train([a, b], SYNC - 1)  # The last step before slow weights would move.
  before, average = a.numpy(), read(a).numpy()
  a.trainable = False
  train([b], SYNC)
  assert a.numpy() == before
  if wrapper != "SWA":  # The mean of all counted steps.
    assert read(a).numpy() == average
  a.trainable = True
  train([a, b], SYNC)
  assert a.numpy() != before
  # A gradient that the user gives trains it.
  a.trainable, before = False, a.numpy()
  train([a, b], 1)
  assert a.numpy() != before


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weight_decay_is_excluded_at_any_depth(wrapper):
  w = keras.Variable([1.0], name="w")
  opt = WRAPPERS[wrapper](K.LossScaleOptimizer(
      wk.SWA(K.SGD(1.0, weight_decay=0.5)) if wrapper != "SWA" else
      K.SGD(1.0, weight_decay=0.5), 1.0))
  opt.exclude_from_weight_decay([w])
  opt.apply([tf.constant([1.0])], [w])
  assert w.numpy() == 0


@pytest.mark.parametrize("wrap", [
    lambda opt: wk.MovingAverage(opt, 0.5), wk.ScheduleFree, wk.SWA],
                         ids=["MovingAverage", "ScheduleFree", "SWA"])
@pytest.mark.parametrize("inner", [
    lambda: K.SGD(0.5), lambda: K.Adafactor(0.5)], ids=["fused", "unfused"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_variable_that_has_no_gradient(wrap, inner, mode):
  """The user's code may change it, such as the weights of a teacher."""
  v, teacher = keras.Variable([1.0]), keras.Variable([5.0])
  opt = wrap(inner())
  step = stepping(opt, [v, teacher], mode)
  for value in 6.0, 8.0:
    step(tf.constant([1.0]), None)
    assert teacher.numpy() == (5.0 if value == 6.0 else 6.0)
    teacher.assign([value])
  with opt.averaged_weights():
    assert teacher.numpy() == 8.0 and v.numpy() != 8.0
  opt.finalize_variable_values([v, teacher])
  assert teacher.numpy() == 8.0
  if not isinstance(opt, wk.SWA):
    # Its average begins with its first gradient.
    opt.apply([tf.constant([0.0]), tf.constant([0.0])], [v, teacher])
    assert tf.convert_to_tensor(opt.average(teacher)) == teacher.numpy()
