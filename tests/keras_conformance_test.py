"""Every wrapper of `wrapopt.keras` around every optimizer of Keras.

Wrappers and optimizers are found, not listed: a new one is tested, or the test
that nothing is missing fails.
"""

import collections
import functools
import inspect
import itertools
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import numerics
import wrapopt
import wrapopt.keras as wk

K = keras.optimizers

# For MirroredStrategy: before anything runs.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2)

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def decaying(opt):
  opt.exclude_from_weight_decay(var_names=["excluded"])
  return opt


def by_name(variable, table, others):
  return table if "table" in variable.path else others


def by_function():
  """Keras's MultiOptimizer, which finds what it holds when it is built."""
  table, others = K.SGD(0.25), K.Adamax(**ADAM)
  return K.MultiOptimizer(lambda v: by_name(v, table, others))


# Betas and rates are binary fractions: Keras rounds them to the variable's
# dtype before it computes with them.
ADAM = {"learning_rate": 0.125, "beta_1": 0.75, "beta_2": 0.5, "epsilon": 0.25}
RMS = {"learning_rate": 0.125, "rho": 0.75, "epsilon": 0.25}

FUSED = {
    "SGD": lambda: decaying(K.SGD(0.125, weight_decay=0.25)),
    "SGD momentum": lambda: decaying(
        K.SGD(0.125, momentum=0.75, weight_decay=0.25)),
    "SGD Nesterov": lambda: K.SGD(0.125, momentum=0.75, nesterov=True),
    "SGD clipnorm": lambda: K.SGD(0.5, clipnorm=0.5),
    "SGD clipvalue": lambda: K.SGD(0.5, clipvalue=0.5),
    "SGD global_clipnorm": lambda: K.SGD(0.5, global_clipnorm=0.5),
    "SGD loss_scale_factor": lambda: K.SGD(0.5, loss_scale_factor=4.0),
    "SGD schedule": lambda: K.SGD(
        K.schedules.ExponentialDecay(0.125, 1, decay_rate=0.5)),
    "Adam": lambda: K.Adam(**ADAM),
    "Adam AMSGrad": lambda: decaying(
        K.Adam(amsgrad=True, weight_decay=0.25, **ADAM)),
    "AdamW": lambda: decaying(K.AdamW(weight_decay=0.25, **ADAM)),
    "Adagrad": lambda: decaying(
        K.Adagrad(0.125, epsilon=0.25, weight_decay=0.25)),
    "RMSprop": lambda: decaying(K.RMSprop(weight_decay=0.25, **RMS)),
    "RMSprop centered": lambda: decaying(
        K.RMSprop(centered=True, weight_decay=0.25, **RMS)),
    "RMSprop momentum": lambda: decaying(
        K.RMSprop(momentum=0.5, weight_decay=0.25, **RMS)),
    "RMSprop centered, momentum": lambda: K.RMSprop(
        centered=True, momentum=0.5, **RMS),
    "Lion": lambda: decaying(
        K.Lion(0.125, beta_1=0.75, beta_2=0.5, weight_decay=0.25)),
    "LossScaleOptimizer": lambda: K.LossScaleOptimizer(
        K.SGD(0.125), initial_scale=2.0),
}
UNFUSED = {
    "Adadelta": lambda: K.Adadelta(2.0, epsilon=0.25),
    "Adafactor": lambda: K.Adafactor(0.125, epsilon_1=0.25),
    "Adamax": lambda: decaying(K.Adamax(weight_decay=0.25, **ADAM)),
    "Ftrl": lambda: K.Ftrl(0.125),
    "Lamb": lambda: K.Lamb(**ADAM),
    "MultiOptimizer": lambda: K.MultiOptimizer(
        K.OptimizerMap(K.Adamax(**ADAM), {".*table.*": K.SGD(0.25)})),
    "MultiOptimizer by function": by_function,
    "Muon": lambda: decaying(K.Muon(0.125, weight_decay=0.25)),
    "Nadam": lambda: K.Nadam(**ADAM),
    "ScheduleFreeAdamW": lambda: K.ScheduleFreeAdamW(**ADAM),
}
INNER = {**FUSED, **UNFUSED}

# No optimizer: a base class that takes no step, and a table of optimizers.
NO_INNER = {K.Optimizer, K.OptimizerMap}

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
NO_FLOAT64 = {"Muon"}

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

SHAPES = {"kernel": (3, 2), "table": (5, 2), "scalar": (), "empty": (0,),
          "excluded": (2,), "unused": (2,)}
NAMES = list(SHAPES)
ROWS = ([4, 1], [0, 1], [2, 3], [4, 0])


@functools.cache
def values_at_start():
  rng = np.random.default_rng(1)
  return {name: rng.integers(-16, 17, shape) / 8
          for name, shape in SHAPES.items()}


@functools.cache
def gradients(step):
  """Quarters, so that sums and low precision are exact; None of `unused`."""
  rng = np.random.default_rng(2 + step)
  return {name: rng.integers(1, 9, shape) * rng.choice([-0.25, 0.25], shape)
          for name, shape in SHAPES.items() if name != "unused"}


def variables_of(dtype, names=NAMES):
  return [keras.Variable(values_at_start()[name], dtype=dtype.name, name=name)
          for name in names]


def tensors(step, dtype, sparse=True, names=NAMES):
  found = []
  for name in names:
    grad = gradients(step).get(name)
    if grad is not None:
      grad = tf.constant(grad, dtype)
      if name == "table" and sparse:
        rows = ROWS[step % len(ROWS)]
        grad = tf.IndexedSlices(tf.gather(grad, rows), tf.constant(rows),
                                tf.constant(SHAPES[name]))
    found.append(grad)
  return found


def numbers(variables):
  return [np.array(v.value.numpy()) for v in variables]


def averages_of(opt, variables):
  """Its rows of averages: lists of arrays."""
  rows = opt._rows if hasattr(opt, "_rows") else [opt._slow]
  return [numbers(row[opt._var_key(v)] for v in variables) for row in rows]


Trace = collections.namedtuple("Trace", "names values averages function opt")


def train(make, mode, dtypes, sync=None, sparse=True, names=NAMES):
  """What variables and averages are before the first and after each step.

  Args:
    make: A function that makes the optimizer.
    mode: "eager", "function" or "jit".
    dtypes: Of variables and of gradients.
    sync: Called with the variables' values after each step, gives others.
    sparse: Whether the table has sparse gradients.
    names: Of the variables.
  """
  variables = variables_of(dtypes[0], names)
  opt = make()
  opt.build(variables)
  is_ours = isinstance(opt, wk._wrapper.WrapperOptimizer)

  def step(grads):
    opt.apply(grads, variables)

  function = step
  if mode != "eager":
    function = tf.function(step, jit_compile=mode == "jit")
  values, averages = [], []

  def record():
    values.append(numbers(variables))
    averages.append(averages_of(opt, variables) if is_ours else [])

  record()
  for t in range(STEPS):
    function(tensors(t, dtypes[1], sparse, names))
    if sync:
      for v, x in zip(variables, sync(t, numbers(variables))):
        v.assign(x)
    record()
  if mode != "eager":
    assert function.experimental_get_tracing_count() == 1
  return Trace(names, values, averages, function, opt)


@functools.cache
def bare(inner, dtypes):
  return train(INNER[inner], "eager", dtypes,
               sparse=inner not in NO_SPARSE).values


@functools.cache
def bare_lookahead(inner, dtypes):
  """Keras's steps, and the moves of slow weights between them in float64."""
  slow = list(map(np.float64, (values_at_start()[n] for n in NAMES)))

  def sync(t, fast):
    if (t + 1) % SYNC:
      return fast
    for i, v in enumerate(fast):
      slow[i] = slow[i] + STEP_SIZE * (np.float64(v) - slow[i])
    return [s.astype(v.dtype) for s, v in zip(slow, fast)]

  return train(INNER[inner], "eager", dtypes, sync,
               sparse=inner not in NO_SPARSE).values


def tolerance(dtype):
  # Some eight roundings of four steps from numbers below 4.
  return 32 * 4 * float(ml_dtypes.finfo(dtype).eps)


def assert_variables(trace, inner, wrapper, dtypes, exact):
  want = (bare_lookahead if wrapper == "Lookahead" else bare)
  narrow = dtypes[0] in (numerics.HALF, numerics.BFLOAT16)
  if inner in UNFUSED or not narrow:
    want = want(inner, dtypes)
  else:  # Keras rounds after every operation, and we after the last.
    want = want(inner, (numerics.FLOAT, numerics.FLOAT))
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


def assert_ema(before, value, rate, got, context):
  [(want, allowed)] = numerics.reference("Ema", [before], [value], [rate])
  numerics.assert_close(got, want, allowed, context)


def check_averages(trace, wrapper, dtypes):
  """Against the formula in float64, from the values that were recorded."""
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
          assert_ema(s, v, rate, new, context)


def cases():
  """Each inner optimizer in each wrapper, and in each mode; dtypes alternate.

  Each wrapper and mode meets each dtype. Tracing and compiling takes long: one
  wrapper for an optimizer there.
  """
  wrappers, dtypes, found = list(WRAPPERS), list(DTYPES), []
  for i, inner in enumerate(INNER):
    for wrapper in wrappers:
      found.append((inner, wrapper, "eager", dtypes[i % 6]))
    other = dtypes[(i + i // 6 + 1) % 6]
    found.append((inner, wrappers[i % 3], "function", other))
    found.append((inner, wrappers[(i + 1) % 3], "jit", other))
  return [case for case in found
          if case[0] not in NO_FLOAT64 or case[3] != "float64"]


def test_nothing_is_missing():
  classes = {x for x in vars(wk).values() if inspect.isclass(x)}
  assert {c.__name__ for c in classes} == set(WRAPPERS) == set(wk.__all__)
  assert {type(WRAPPERS[name](K.SGD())) for name in WRAPPERS} == classes
  found = {x for x in vars(K).values() if inspect.isclass(x)} - NO_INNER
  assert {type(make()) for make in INNER.values()} == found
  seen = [case for case in cases() if case[0] not in NO_FLOAT64]
  assert ({case[:2] for case in seen} ==
          set(itertools.product(INNER.keys() - NO_FLOAT64, WRAPPERS)))
  assert ({case[::2] for case in seen} ==
          set(itertools.product(INNER.keys() - NO_FLOAT64, MODES)))
  assert ({case[1:] for case in seen} ==
          set(itertools.product(WRAPPERS, MODES, DTYPES)))


@pytest.mark.parametrize("inner, dtype, sparse", [
    *((inner, "float32", True) for inner in NO_SPARSE),
    *((inner, "float64", False) for inner in NO_FLOAT64)])
def test_what_keras_does_not_do(inner, dtype, sparse):
  with pytest.raises((TypeError, tf.errors.InvalidArgumentError)):
    train(INNER[inner], "eager", DTYPES[dtype], sparse=sparse)


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
  check_averages(trace, wrapper, dtypes)
