"""The kernels on a GPU: every rule, dtype and image, and their launches.

The tests of the ops also run on the GPU, and test errors and more.
"""

import os
import re

import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_all
import modes
import numerics
from gpu_support import arrays, LAZY_RULES, Log, on, rows_of, rule_of, RULES
from modes import mode  # pylint: disable=unused-import
from numerics import DOUBLE, KERNELS_OF
from processes import run_forks, run_python
import wrapopt
from wrapopt import _native
from wrapopt._loader import ops as _raw
from wrapopt.ops import apply
from wrapopt.ops import averaging_assign
from wrapopt.ops import ema_update

tf1 = tf.compat.v1
train = tf1.train

# Below, at and above what a thread, a block and a chunk take; and nothing.
SHAPES = [(), (0,), (1,), (7,), (8,), (9,), (2, 1023), (2048,), (2049,),
          (70_001,)]

# A real one has kernels of TensorFlow's, and keeps no log.
IS_FAKE = "WRAPOPT_FAKE_GPU_LOG" in os.environ

on_the_fake_gpu = pytest.mark.skipif(not IS_FAKE, reason="there is a real GPU")


def kernel(rule, dtype):
  rule = KERNELS_OF.get(rule, rule)
  return f"{rule}_{'double' if dtype == DOUBLE else 'float'}"


@pytest.mark.parametrize("pair", [p for p in numerics.PAIRS
                                  if p[0] != numerics.FLOAT or p[0] == p[1]],
                         ids=lambda p: "-".join(d.name for d in p))
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gives_the_bits_of_the_cpu(rule, pair):
  rng = np.random.default_rng(1)
  dtype, other = pair
  states, scalars = rule_of(rule)
  values = [arrays(rng, rule, states, shape, dtype) for shape in SHAPES]
  grads = [np.asarray(rng.normal(size=shape), other) for shape in SHAPES]
  averages = [[np.asarray(rng.normal(size=shape), other) for shape in SHAPES]
              for _ in range(2)]
  found = []
  log = Log()
  for device in (modes.OTHERS, modes.VARIABLES):
    variables = [on(device, row) for row in values]
    shadows = [on(device, row) for row in averages]
    apply(rule, {state: [row[i] for row in variables]
                 for i, state in enumerate(states)},
          [tf.constant(g) for g in grads],
          dict(zip([s.rstrip("?") for s in scalars],
                   (bool(x > 0.5) if s.endswith("?") else x for s, x in zip(
                       scalars, numerics.scalars(rule))))),
          shadows=shadows, decay=[0.75, 0.9])
    found.append([v.numpy() for row in variables + shadows for v in row])
    assert all(device in v.device for row in variables for v in row)
  assert_all(numerics.assert_same_numbers, *reversed(found))
  # The variable of no elements is left out.
  log.assert_launched((kernel(rule, dtype), len(SHAPES) - 1))


@pytest.mark.parametrize("pair", [p for p in numerics.PAIRS
                                  if p[0] in (p[1], numerics.FLOAT)],
                         ids=lambda p: "-".join(d.name for d in p))
def test_averages_give_the_bits_of_the_cpu(pair):
  # All storages of values and shadows, which rules do not have.
  shadow_dtype, dtype = pair
  rng = np.random.default_rng(2)
  values = [np.asarray(rng.normal(size=shape), dtype) for shape in SHAPES]
  averages = [[np.asarray(rng.normal(size=shape), shadow_dtype)
               for shape in SHAPES] for _ in range(3)]
  found = []
  log = Log()
  for device in (modes.OTHERS, modes.VARIABLES):
    shadows = [on(device, row) for row in averages]
    ema_update(shadows, on(device, values), [0.75, 0., 1.])
    found.append([v.numpy() for row in shadows for v in row])
  assert_all(numerics.assert_same_numbers, *reversed(found))
  log.assert_launched((kernel("Average", dtype), len(SHAPES) - 1))


@pytest.mark.parametrize("pair", [(numerics.HALF, numerics.HALF),
                                  (numerics.BFLOAT16, numerics.FLOAT),
                                  (numerics.FLOAT, numerics.FLOAT),
                                  (DOUBLE, DOUBLE)],
                         ids=lambda p: "-".join(d.name for d in p))
@pytest.mark.parametrize("rule", RULES)
def test_rows_give_the_bits_of_the_cpu(rule, pair):
  dtype, other = pair
  states, scalars = rule_of(rule)
  # More rows, and more gradients of one row, than a launch takes; no row
  # twice; no row at all; rows of no elements.
  shapes = [(9000, 3), (40, 5), (30, 2), (5, 0)]
  rng = np.random.default_rng(3)
  values = [arrays(rng, rule, states, shape, dtype) for shape in shapes]
  grads = [rows_of(rng, shapes[0], 30_000, other),
           tf.IndexedSlices(
               tf.constant(np.asarray(rng.normal(size=(20, 5)), other)),
               tf.constant(rng.permutation(40)[:20]), shapes[1]),
           rows_of(rng, shapes[2], 0, other),
           rows_of(rng, shapes[3], 3, other)]
  found = []
  for device in (modes.OTHERS, modes.VARIABLES):
    variables = [on(device, row) for row in values]
    averages = on(device, [np.zeros(shape, dtype) for shape in shapes])
    apply(rule, {state: [row[i] for row in variables]
                 for i, state in enumerate(states)},
          grads, dict(zip([s.rstrip("?") for s in scalars],
                          (True if s.endswith("?") else x for s, x in zip(
                              scalars, numerics.scalars(rule))))),
          shadows=[averages], decay=[0.75])
    found.append([v.numpy() for row in [*variables, averages] for v in row])
  assert_all(numerics.assert_same_numbers, *reversed(found))


# Rows of averages that lag behind

def lazy_steps(device, rule, values, averages, steps, decays, finish):
  """What variables on a device are after some steps, with their log decays."""
  states, scalars = rule_of(rule)
  variables = [on(device, row) for row in values]
  shadows = [on(device, row) for row in averages]
  with tf.device(device):
    log_decays = [[tf.Variable(np.zeros(len(v) + 2)) for v in row]
                  for row in averages]
  for grads, decay in zip(steps, decays):
    apply(rule, {state: [row[i] for row in variables]
                 for i, state in enumerate(states)},
          grads, dict(zip([s.rstrip("?") for s in scalars],
                          (True if s.endswith("?") else x for s, x in zip(
                              scalars, numerics.scalars(rule))))),
          shadows=shadows, decay=decay, log_decays=log_decays)
  finish(shadows, [row[0] for row in variables], log_decays)
  return [*(v.numpy() for row in [*variables, *shadows] for v in row),
          # Only the CPU keeps the address of the value.
          *(v.numpy()[:-1] for row in log_decays for v in row)]


@pytest.mark.by_day(5)
@pytest.mark.parametrize("pair", [(numerics.HALF, numerics.HALF),
                                  (numerics.BFLOAT16, numerics.FLOAT),
                                  (numerics.FLOAT, numerics.FLOAT),
                                  (DOUBLE, DOUBLE)],
                         ids=lambda p: "-".join(d.name for d in p))
@pytest.mark.parametrize("rule", LAZY_RULES)
def test_lazy_rows_give_the_bits_of_the_cpu(rule, pair):
  dtype, other = pair
  rng = np.random.default_rng(5)
  # More rows than a launch takes; a row of several blocks; rows that are read
  # by 16 bytes; one of more elements than kMaxRowElements; none at all.
  shapes = [(3000, 3), (6, 5000), (40, 2, 8), (30,), (3, 70_000), (0, 4),
            (4, 0)]
  counts = [4000, 3, 30, 20, 2, 0, 2]
  values = [arrays(rng, rule, rule_of(rule)[0], shape, dtype)
            for shape in shapes]
  averages = [[np.asarray(rng.normal(size=shape), other) for shape in shapes]
              for _ in range(4)]
  steps = [[rows_of(rng, shape, count * (step != 2), other)
            for shape, count in zip(shapes, counts)] for step in range(4)]
  decays = [[decay, 0., 1., 0.7] for decay in (0.9, 0.5, 1., 0.999)]

  def finish(shadows, variables, log_decays):
    for row, logs in zip(shadows, log_decays):
      # Of one of them no row, of the others some.
      wrapopt.ops.catch_up(row[:3], variables[:3], logs[:3], [
          np.int64(rows) for rows in ([], [5, 1, 5], [7, 8, 9, 20])])
    wrapopt.ops.catch_up(shadows[1], variables, log_decays[1])

  found = [lazy_steps(device, rule, values, averages, steps, decays, finish)
           for device in (modes.OTHERS, modes.VARIABLES)]
  assert_all(numerics.assert_same_numbers, *reversed(found))


def lazy(count=300, width=3):
  """A value, its average, its log decays."""
  return on(modes.VARIABLES, [
      np.float32(np.arange(count * width).reshape(count, width)),
      np.zeros([count, width], np.float32), np.zeros([count + 2])])


def test_catching_up_and_the_step_are_one_launch():
  v, s, log_decays = lazy()
  (s2, log_decays2), (m,) = lazy()[1:], on(
      modes.VARIABLES, [np.zeros([300, 3], np.float32)])

  def step(indices):
    log = Log()
    apply("Momentum", {"var": [v], "accum": [m]}, [tf.IndexedSlices(
        tf.ones([len(indices), 3]), np.int64(indices), [300, 3])],
          {"lr": 1., "momentum": 0.5}, shadows=[[s], [s2]], decay=[0.5, 0.75],
          log_decays=[[log_decays], [log_decays2]])
    return log

  for _ in range(2):
    step([1, 2, 9]).assert_launched(("Momentum_float", 2),
                                    ("Mark_double", None))
  step([4, 4]).assert_launched(("Sum_float", None), ("Momentum_float", 1),
                               ("Mark_double", None))
  step([]).assert_launched(("Mark_double", None))
  # All of a table's rows are as one.
  log = Log()
  wrapopt.ops.catch_up([s, s2], [v, v], [log_decays, log_decays2])
  log.assert_launched(("CatchUp_float", 2))
  np.testing.assert_allclose(s.numpy()[5], 15 / 16 * v.numpy()[5])
  np.testing.assert_allclose(s2.numpy()[5], (1 - 0.75 ** 4) * v.numpy()[5])
  assert not np.any(log_decays.numpy()) and not np.any(log_decays2.numpy())


def test_rows_catch_up_before_another_step():
  v, s, log_decays = lazy()
  log = Log()
  wrapopt.ops.catch_up([s], [v], [log_decays], [[2, 1, 2]])
  wrapopt.ops.sparse_ema_update([s], [v], [log_decays], [[2, 1, 2]], 0.5)
  log.assert_launched(("CatchUp_float", 1), ("Mark_double", None),
                      ("Average_float", 1), ("Mark_double", None))
  assert s.numpy()[1:4].tolist() == [[1.5, 2, 2.5], [3, 3.5, 4], [0, 0, 0]]
  np.testing.assert_allclose(log_decays.numpy()[[0, 1, 2, 3, -2]],
                             np.log([1, 0.5, 0.5, 1, 0.5]))


def test_log_decays_without_a_value():
  v, s, _ = lazy()
  with tf.device(modes.VARIABLES):
    log_decays = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[302])
  log = Log()
  arguments = [s.handle], [v.handle], [log_decays]
  dtypes = {"T": tf.float32, "S": tf.float32}
  _raw.wrapopt_catch_up(*arguments, [], **dtypes)
  log.assert_launched()
  _raw.wrapopt_sparse_ema_update(*arguments, [tf.constant([1])],
                                tf.constant([0.5], tf.float64), **dtypes)
  read = tf.raw_ops.ReadVariableOp(resource=log_decays, dtype=tf.float64)
  np.testing.assert_allclose(read.numpy()[[0, 1, -2]], np.log([1, 0.5, 0.5]))


def test_sums_of_log_decays_stay_small():
  found = []
  for device in modes.OTHERS, modes.VARIABLES:
    with tf.device(device):
      v = tf.Variable(np.float32([[1, 2], [3, 4], [5, 6]]))
      s = tf.Variable(np.zeros([3, 2], np.float32))
      log_decays = tf.Variable([-9000., -9979., -9978.5, -9980., 0.],
                               dtype=tf.float64)
    for decay in (0.5, 0.0, 0.25):
      wrapopt.ops.sparse_ema_update([s], [v], [log_decays], [[1]], decay)
    found.append(log_decays.numpy()[:-1])
    wrapopt.ops.catch_up([s], [v], [log_decays])
    found.append(s.numpy())
  assert -1e4 <= found[0][-1] < -1
  for got, want in zip(found[2:], found[:2]):
    numerics.assert_same_bits(got, want)
  # Rows 0 and 2 missed a decay of 0.
  np.testing.assert_array_equal(found[3][[0, 2]], [[1, 2], [5, 6]])


@pytest.mark.parametrize("index", [-1, 300])
def test_a_bad_index_of_lazy_rows_is_refused(index):
  v, s, log_decays = lazy()
  wrapopt.ops.sparse_ema_update([s], [v], [log_decays], [[1]], 0.5)
  before = [x.numpy() for x in (v, s, log_decays)]
  grad = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, index]), [300, 3])
  text = rf"indices\[0\]\[1\] must be in \[0, 300\), .* got {index}"
  with pytest.raises(tf.errors.InvalidArgumentError, match=text):
    apply("GradientDescent", {"var": [v]}, [grad], {"lr": 1.}, [s], 0.5,
          log_decays=[[log_decays]])
  for call in (lambda: wrapopt.ops.catch_up([s], [v], [log_decays],
                                            [grad.indices]),
               lambda: wrapopt.ops.sparse_ema_update(
                   [s], [v], [log_decays], [grad.indices], 0.5)):
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
      call()
  for x, was in zip((v, s, log_decays), before):
    numerics.assert_same_bits(x.numpy(), was)


def test_few_launches_serve_many_variables():
  count = 3000
  v = on(modes.VARIABLES, [np.float32([i]) for i in range(count)])
  m = on(modes.VARIABLES, [np.float32([0]) for _ in range(count)])
  s = on(modes.VARIABLES, [np.float32([i]) for i in range(count)])
  log = Log()
  apply("Momentum", {"var": v, "accum": m}, [tf.constant([1.])] * count,
        {"lr": 1., "momentum": 0.5}, shadows=s, decay=0.5)
  assert [x.numpy().item() for x in v] == [i - 1 for i in range(count)]
  assert [x.numpy().item() for x in s] == [i - 0.5 for i in range(count)]
  log.assert_launched(("Momentum_float", 1633), ("Momentum_float", 1367))
  log = Log()
  ema_update(s, v, 0.)
  log.assert_launched(("Average_float", 2724), ("Average_float", 276))


@pytest.mark.parametrize("dtype", [numerics.HALF, numerics.FLOAT],
                         ids=lambda d: d.name)
@pytest.mark.parametrize("indices, variables", [
    # In order: as they are; in another: each by itself.
    (range(10, 210), 1), (range(209, 9, -1), 200),
    # Some twice: their sums are in order.
    ([*range(209, 9, -1), *range(50, 100)], 1),
    # Two gaps.
    ([*range(10, 60), *range(61, 100), *range(250, 300)], 3)])
def test_rows_that_follow_each_other_are_as_one(dtype, indices, variables):
  rng = np.random.default_rng(4)
  value = np.asarray(rng.normal(size=(300, 3)), dtype)
  grad = np.asarray(rng.normal(size=(len(indices), 3)), dtype)
  found = []
  for device in (modes.OTHERS, modes.VARIABLES):
    v, m = on(device, [value, np.zeros_like(value)])
    log = Log()
    apply("Momentum", {"var": [v], "accum": [m]}, [tf.IndexedSlices(
        tf.constant(grad), tf.constant(list(indices)), value.shape)],
          {"lr": 1., "momentum": 0.5})
    found.append([v.numpy(), m.numpy()])
  assert_all(numerics.assert_same_numbers, *reversed(found))
  # The first may be their sums.
  assert not IS_FAKE or log.launched[-1] == ("Momentum_float", variables)


def test_an_update_copies_what_somebody_reads():
  (v,), (s,) = on(modes.VARIABLES, [np.float32([4])]), on(
      modes.VARIABLES, [np.float32([0])])
  with tf.device(modes.VARIABLES):
    held, held_value = s.read_value(), v.read_value()
  ema_update([s], [v], 0.5)
  averaging_assign([s], [[v], [s]], [1, 1])
  apply("GradientDescent", {"var": [v]}, [tf.constant([1.])], {"lr": 1.})
  assert [x.numpy().item() for x in (v, s, held, held_value)] == [3, 6, 0, 4]
  assert all(modes.VARIABLES in x.device for x in (v, s, held, held_value))


@modes.only(*modes.graphs())
def test_the_caller_names_the_gpu_only(mode):
  # What an op reads on the host is computed there, wherever the caller is.
  with tf.device(modes.VARIABLES):
    v, s = mode.variable([4.]), mode.variable([0.])
    decay = mode.variable(np.float64(0.5))
    op = ema_update([s], [v], decay)
    apply_op = apply("GradientDescent", {"var": [v]}, [tf.constant([1.])],
                     {"lr": tf.constant(1.)}, accept=True)
  assert modes.VARIABLES in op.device and modes.VARIABLES in apply_op.device
  for made in (op, apply_op):
    for x in made.inputs:
      if x.dtype in (tf.float64, tf.bool):
        assert "CPU" in x.device, x
  mode.session.run(op)
  assert [x.item() for x in mode.values([v, s])] == [4, 2]


@modes.only(*modes.graphs())
def test_a_step_allocates_and_copies_nothing(mode):
  # Of the variables' bytes: what TensorFlow's allocator keeps for itself is at
  # hand after the first step.
  with tf.device(modes.VARIABLES):
    v, m, s = (mode.variable([4.] * 3) for _ in range(3))
    grad = mode.variable([1.] * 3)
    op = apply("Momentum", {"var": [v], "accum": [m]}, [grad.read_value()],
               {"lr": 1., "momentum": 0.5}, shadows=[s], decay=0.5)
    # Ends when the GPU has come so far.
    with tf.control_dependencies([op]):
      done = tf.no_op()
  mode.session.run(done)
  log = Log()
  mode.session.run(done)
  log.assert_launched(("Momentum_float", 1))
  log.assert_only_launches()


LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_native", {_native.__file__!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
"""
IMAGES = """
((_, _, _, images),) = native.gpus()
print(*images, sep=",")
"""


@on_the_fake_gpu
def test_which_images_a_gpu_gets():
  def all_kinds(name):
    return f"{name},{name} large,{name} program"

  # (compute capability, driver): images.
  ptx = "compute_90 large,compute_90 program"
  wants = {
      (52, 12080): "", (60, 12080): "sm_60", (61, 12080): "sm_60",
      (70, 12080): all_kinds("sm_70"), (75, 12080): all_kinds("sm_70"),
      (80, 12080): all_kinds("sm_80"), (86, 12080): all_kinds("sm_80"),
      (89, 12080): all_kinds("sm_80"), (90, 12080): all_kinds("sm_90"),
      (90, 12000): "sm_90", (80, 12010): all_kinds("sm_80"),
      (100, 12080): all_kinds("sm_100"), (103, 12090): all_kinds("sm_100"),
      (110, 12090): ptx, (110, 12000): "",
      (120, 12080): all_kinds("sm_120"), (121, 12090): all_kinds("sm_120"),
      (130, 13000): ptx}
  found = run_forks(LOAD, IMAGES, [
      {"WRAPOPT_FAKE_GPU_CC": str(cc), "WRAPOPT_FAKE_GPU_DRIVER": str(driver)}
      for cc, driver in wants])
  assert dict(zip(wants, found, strict=True)) == {
      gpu: want + "\n" for gpu, want in wants.items()}


RUN = """
import numpy as np
import tensorflow as tf
from wrapopt import ops

def variables(count, x):
  with tf.device("/GPU:0"):
    return [tf.Variable(np.float32([x])) for _ in range(count)]

for count in 500, 1:
  v, s = variables(count, 2), variables(count, 0)
  ops.ema_update(s, v, 0.5)
  assert [x.numpy().item() for x in s] == [1] * count

states = {name: variables(200, 1) for name in ("var", "m", "v")}
shadows = variables(200, 1)
ops.apply("Adam", states, [tf.constant([1.])] * 200,
          dict(lr=0.1, beta1=0.9, beta2=0.9, epsilon=0., weight_decay=0.,
               use_nesterov=False, beta1_power=0.9, beta2_power=0.9),
          shadows=[shadows], decay=[0.5])
np.testing.assert_allclose([x.numpy().item() for x in shadows],
                           1 - 0.05 * np.sqrt(10), 1e-6)
"""


def run(tmp_path, **settings):
  """What the fake GPU, so set, is asked for by updates of 500, 1 and 200."""
  log = tmp_path / "log"
  process = run_python("-c", RUN, WRAPOPT_FAKE_GPU_LOG=str(log), **{
      f"WRAPOPT_FAKE_GPU_{name}": str(x) for name, x in settings.items()})
  lines = log.read_text().splitlines() if log.exists() else []
  return process, [
      (words[1].removeprefix("wrapopt_").removesuffix("_float"), int(words[6]))
      for words in map(str.split, lines) if words[0] == "launch"]


@on_the_fake_gpu
@pytest.mark.parametrize("cc, driver, want", [
    # At most one launch for each 145 variables.
    (60, 12080, [("small_Average", 336), ("small_Average", 164),
                 ("small_Average", 1), ("small_Adam", 165),
                 ("small_Adam", 35)]),
    (90, 12080, [("large_Average", 500), ("small_Average", 1),
                 ("large_Adam", 200)]),
    # Text, of which there is only that for large tables.
    (130, 13000, [("large_Average", 500), ("large_Average", 1),
                  ("large_Adam", 200)])])
def test_each_size_of_tables(tmp_path, cc, driver, want):
  process, launches = run(tmp_path, CC=cc, DRIVER=driver)
  assert process.returncode == 0, process.stderr
  assert launches == want


@on_the_fake_gpu
def test_a_gpu_without_kernels(tmp_path):
  process, launches = run(tmp_path, CC=52)
  assert process.returncode != 0 and not launches
  assert re.search(
      r"Wrapopt>EmaUpdate could not run on the GPU: there are no kernels for "
      r"fake GPU \(compute capability 5\.2, driver for CUDA 12\.8\); this "
      r"wrapopt has images for sm_60, .*Place the variables on the CPU, or",
      process.stderr)


@on_the_fake_gpu
def test_the_command_tells_what_the_gpu_gets():
  process = run_python("-m", "wrapopt", WRAPOPT_FAKE_GPU_CC="86")
  assert ("  GPU 0        fake GPU, compute capability 8.6, driver for CUDA "
          "12.8: sm_80, sm_80 large, sm_80 program\n") in process.stdout


def optimize(mode, device, inner):
  """Three steps on variables there: what they and their slots hold."""
  with tf.device(device):
    variables = [tf1.Variable(np.float32(x), use_resource=mode.use_resource)
                 for x in ([4., 2.], [[1., 2.], [3., 4.], [5., 6.]])]
    opt = wrapopt.MovingAverageOptimizer(inner, [0.5, 0.9])

  def step():
    return opt.apply_gradients([
        (tf.constant([1., -2.]), variables[0]),
        (tf.IndexedSlices(tf.constant([[1., 2.], [3., 4.], [5., 6.]]),
                          tf.constant([2, 0, 2]), [3, 2]), variables[1])])

  if isinstance(mode, modes.Graph):
    op = step()
    mode.session.run(tf1.global_variables_initializer())
    for _ in range(3):
      mode.session.run(op)
  else:
    for _ in range(3):
      mode.run(step)
  state = [opt.get_slot(v, name) for name in sorted(opt.get_slot_names())
           for v in variables]
  assert len(state) >= 4
  assert all(device in v.device for v in variables + state), state
  values = mode.values(variables + state)
  with opt.averaged_weights(getattr(mode, "session", None), decay=0.9):
    return values + mode.values(variables)


# Of these, a session takes no kernel of TensorFlow's, of which the fake GPU has
# none.
INNER = {
    "GradientDescent": lambda: train.GradientDescentOptimizer(0.5),
    "Momentum": lambda: train.MomentumOptimizer(0.5, 0.9),
    "RMSProp": lambda: train.RMSPropOptimizer(0.5, momentum=0.9),
}
CASES = [(mode, rule) for mode in (modes.Eager(), modes.Function(),
                                   *modes.graphs()) for rule in INNER
         # Elsewhere such a kernel fills the slots.
         if isinstance(mode, modes.Graph) or rule == "GradientDescent"]
if not IS_FAKE:
  INNER |= {
      "Adadelta": lambda: train.AdadeltaOptimizer(0.5),
      "Adagrad": lambda: train.AdagradOptimizer(0.5),
      "Adam": lambda: train.AdamOptimizer(0.5),
      "Ftrl": lambda: train.FtrlOptimizer(0.5),
  }
  CASES = [(mode, rule) for mode in modes.UNCOMPILED for rule in INNER]


@pytest.mark.by_day(4)
@pytest.mark.parametrize("mode, rule", CASES,
                         ids=lambda x: getattr(x, "name", x),
                         indirect=["mode"])
def test_moving_averages(mode, rule):
  want = optimize(mode, modes.OTHERS, INNER[rule]())
  log = Log()
  got = optimize(mode, modes.VARIABLES, INNER[rule]())
  for x, y in zip(got, want, strict=True):
    numerics.assert_same_numbers(x, y)
  # One launch for each kind of gradient, in any order, and for rows one for
  # their sums and one that marks them; those of ref variables are dense.
  log.assert_launched_in_any_order(*[
      (f"{rule}_float", 1), ("Sum_float", None), (f"{rule}_float", 2),
      ("Mark_double", None) if mode.use_resource else ("Average_float", 1)] * 3,
                                   reads=mode.use_resource)


def lazy_average(mode, device, path):
  """An average after sparse and dense steps, as it is read and saved."""
  with tf.device(device):
    v = tf1.Variable(np.float32(np.arange(12).reshape(6, 2)), use_resource=True)
    opt = wrapopt.MovingAverageOptimizer(INNER["GradientDescent"](), 0.75)

  def sparse():
    return opt.apply_gradients([(tf.IndexedSlices(
        tf.constant([[1., 2.], [3., 4.]]), np.int64([4, 1]), [6, 2]), v)])

  def dense():
    return opt.apply_gradients([(tf.constant(np.ones([6, 2], np.float32)), v)])

  turns = [0, 0, 1, 0, 0, 1, 1, 0]
  if isinstance(mode, modes.Graph):
    steps = [sparse(), dense()]
    saver = opt.swapping_saver()
    mode.session.run(tf1.global_variables_initializer())
    for turn in turns:
      mode.session.run(steps[turn])
    saver.save(mode.session, path)
    name = v.op.name
  else:
    for turn in turns:
      mode.run([sparse, dense][turn])
    path = tf.train.Checkpoint(average=opt.average(v)).save(path)
    name = "average/.ATTRIBUTES/VARIABLE_VALUE"
  assert opt.is_lazy(v)
  assert device in opt.average(v).log_decays.device
  saved = tf.train.load_checkpoint(path).get_tensor(name)
  return [*mode.values([v, opt.average(v)]), saved]


@modes.only(modes.Eager(), modes.Function(), modes.Graph(True))
def test_lazy_averages_are_read_and_saved(mode, tmp_path):
  want = lazy_average(mode, modes.OTHERS, str(tmp_path / "cpu"))
  got = lazy_average(mode, modes.VARIABLES, str(tmp_path / "gpu"))
  for x, y in zip(got, want, strict=True):
    numerics.assert_same_bits(x, y)
  numerics.assert_same_bits(got[1], got[2])


@modes.only(*modes.graphs())
def test_rounds_of_workers_with_variables_on_the_gpu(mode):
  server, worker = (f"/job:localhost/task:0/device:{x}:0" for x in
                    ("CPU", "GPU"))
  getter = wrapopt.ModelAverageCustomGetter(worker)
  with tf.device(None), tf1.device(
      lambda op: op.device or (server if op.type in (
          "VarHandleOp", "VariableV2") else worker)), tf1.variable_scope(
              "", custom_getter=getter, use_resource=mode.use_resource):
    v = tf1.get_variable("v", initializer=[1., 2., 3.])
    w = tf1.get_variable("w", initializer=[[4.]])
    step = tf1.train.create_global_step()
    opt = wrapopt.ModelAverageOptimizer(
        # TensorFlow's own step would take its kernel.
        wrapopt.MovingAverageOptimizer(train.GradientDescentOptimizer(1.), 0.5),
        1, True, getter, interval_steps=2)
    train_op = opt.apply_gradients(
        [(tf.constant([1., 1., 1.]), v), (tf.constant([[1.]]), w)], step)
  centers = [getter.centers[x] for x in (v, w)]
  assert all("GPU" in x.device for x in (v, w))
  assert all("CPU" in x.device for x in centers)
  with tf1.Session(config=tf1.ConfigProto(
      allow_soft_placement=True)) as session:
    session.run([tf1.global_variables_initializer(),
                 tf1.local_variables_initializer()])
    log = Log()
    for i in range(1, 5):
      session.run(train_op)
      assert session.run(v).tolist() == [1 - i, 2 - i, 3 - i]
    log.assert_launched(*[("GradientDescent_float", 2)] * 4)
    assert session.run(step) == 2
    assert session.run(centers)[1].tolist() == [[0.]]
  packed = [op for op in mode.graph.get_operations() if "Packed" in op.type]
  assert any("GPU" in op.device for op in packed)
