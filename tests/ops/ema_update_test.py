"""ema_update and its ops: numbers, graphs, errors, concurrent readers."""

import contextlib
import pathlib
import threading

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_same_bits
import modes
import numerics
from modes import (
    address, at_build, builds, called, handle_of, handles, native_name,
    op_types, refused, shown, tf1, unknown_shape)
from modes import mode  # pylint: disable=unused-import
from numerics import name_of, random
from processes import printed_by
from wrapopt import _native
from wrapopt._loader import ops as raw
from wrapopt.ops import ema_update

FLOAT = np.float32
BFLOAT16 = ml_dtypes.bfloat16

# (dtype of the value, of the shadow)
PAIRS = [(np.float16, np.float16), (np.float16, FLOAT), (BFLOAT16, BFLOAT16),
         (BFLOAT16, FLOAT), (FLOAT, FLOAT), (np.float64, np.float64)]

InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError


def zeros(mode, *shape, dtype=FLOAT, name=None):
  return mode.variable(np.zeros(shape, dtype), name=name)


# Numbers


def test_a_trajectory(mode):
  # The shadow goes a quarter of the way to 4: from 0 to 1. Then a quarter of
  # the remaining 3, then of the remaining 2.25.
  value, shadow = mode.variable([4.]), mode.variable([0.])
  seen = []
  for _ in range(3):
    mode.run(lambda: ema_update([shadow], [value], decay=0.75))
    seen.append(mode.values([shadow])[0].item())
  assert seen == [1, 1.75, 2.3125]
  assert mode.values([value])[0].item() == 4


# Empty, scalar, less than a vector, and around the size of a block.
SHAPES = [(), (0,), (1,), (3, 0), (7,), (2, 5), (4095,), (4096,), (4097,),
          (3, 5000)]


@pytest.mark.parametrize("averages", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_the_formula(mode, pair, averages):
  rng = np.random.default_rng(1)
  decays = [0.9, 0.5, 0.9999][:averages]
  values = [random(rng, shape, pair[0]) for shape in SHAPES]
  shadows = [[random(rng, shape, pair[1]) for shape in SHAPES] for _ in decays]
  v = [mode.variable(x) for x in values]
  s = [[mode.variable(x) for x in row] for row in shadows]

  if averages == 1:
    mode.run(lambda: ema_update(s[0], v, decays[0]))
  else:
    mode.run(lambda: ema_update(s, v, decays))

  for k, decay in enumerate(decays):
    for i, got in enumerate(mode.values(s[k])):
      [(want, tolerance)] = numerics.reference(
          "Ema", [shadows[k][i]], [values[i]], [1 - decay])
      assert got.dtype == pair[1]
      numerics.assert_close(got, want, tolerance, f"shadow {k} of {SHAPES[i]}")
  assert_same_bits(mode.values(v), values)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("pair", [(FLOAT, FLOAT), (BFLOAT16, FLOAT)],
                         ids=name_of)
@pytest.mark.parametrize("use_resource", [True, False])
def test_a_large_update_runs_in_parallel_to_the_same_bits(pair, use_resource):
  rng = np.random.default_rng(2)
  sizes = [700_001, 3, 0, 400_000, 4097]
  values = [random(rng, size, pair[0]) for size in sizes]
  shadows = [[random(rng, size, pair[1]) for size in sizes] for _ in range(2)]
  results = []
  for threads in (1, 4):
    with modes.with_threads(use_resource, threads) as mode:
      v = [mode.variable(x) for x in values]
      s = [[mode.variable(x) for x in row] for row in shadows]
      mode.run(lambda: ema_update(s, v, [0.9, 0.99]))
      results.append([mode.values(row) for row in s])
  for k, decay in enumerate([0.9, 0.99]):
    for i, _ in enumerate(sizes):
      [(want, tolerance)] = numerics.reference(
          "Ema", [shadows[k][i]], [values[i]], [1 - decay])
      numerics.assert_close(results[0][k][i], want, tolerance)
      numerics.assert_same_bits(results[1][k][i], results[0][k][i])


def other_threads_that_run(function):
  """The threads that get a processor while this one is in `function`."""
  def slices():
    result = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
      with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        result[task.name] = (task / "schedstat").read_text().split()[2]
    return result

  before = slices()
  function()
  return {thread for thread, n in slices().items()
          if n != before.get(thread)} - {str(threading.get_native_id())}


@pytest.mark.cpu("watches threads")
def test_a_large_update_is_parallel_and_a_small_one_is_not():
  # Eager ops run in the thread that calls them.
  def update(elements):
    value, shadow = (tf.Variable(tf.ones(elements)) for _ in range(2))
    return lambda: ema_update([shadow], [value], 0.5)

  large, small = update(4_000_000), update(20_000)
  # On a busy machine this thread may have done it all before others begin.
  assert any(other_threads_that_run(large) for _ in range(50))
  # A thread may have a reason of its own to run, but not each time.
  assert not all(other_threads_that_run(small) for _ in range(10))


@pytest.mark.parametrize("dtype", [FLOAT, np.float64])
def test_one_minus_decay_keeps_its_digits(mode, dtype):
  # In float32 it is 1.7e-5 off.
  want = dtype(1 - 0.9999)
  value = mode.variable(np.ones(1, dtype))
  decay = mode.variable(np.float64(0.9999))
  given = {
      "number": lambda: 0.9999,
      "numpy": lambda: np.float64(0.9999),
      "tensor": lambda: tf.constant(0.9999, tf.float64),
      "variable": lambda: decay,
  }
  for name, make in given.items():
    shadow = zeros(mode, 1, dtype=dtype)
    mode.run(lambda: ema_update([shadow], [value], make()))
    assert mode.values([shadow])[0].item() == want, name
  # A number beside a tensor, too.
  s, t = zeros(mode, 1, dtype=dtype), zeros(mode, 1, dtype=dtype)
  mode.run(lambda: ema_update([[s], [t]], [value],
                              [0.9999, given["tensor"]()]))
  assert [x.item() for x in mode.values([s, t])] == [want, want]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32])
def test_a_decay_of_any_floating_dtype(mode, dtype):
  shadow, value = zeros(mode, 1), mode.variable([1.])
  mode.run(lambda: ema_update([shadow], [value], tf.constant(0.75, dtype)))
  assert mode.values([shadow])[0].item() == 0.25


def test_decay_one_leaves_the_shadow_alone(mode):
  for value_dtype, shadow_dtype in PAIRS:
    shadow = np.array([1, -0.0, 2, 3, 4, np.inf, np.nan], shadow_dtype)
    s = mode.variable(shadow)
    v = mode.variable(np.array([5, 6, np.inf, -np.inf, np.nan, 1, 1],
                               value_dtype))
    mode.run(lambda: ema_update([s], [v], 1))
    numerics.assert_same_bits(mode.values([s])[0], shadow)


def test_decay_zero_copies_the_value(mode):
  # In the formula alone a large shadow swallows a small value, and what is not
  # finite stays for good.
  for value_dtype, shadow_dtype in PAIRS:
    value = np.array([1, 1e-3, -0.0, 5, 1, 2, 3, np.inf], value_dtype)
    v = mode.variable(value)
    s = mode.variable(np.array([0, 6e4, 7, -3, np.inf, np.nan, -np.inf, 1],
                               shadow_dtype))
    mode.run(lambda: ema_update([s], [v], 0))
    numerics.assert_same_bits(mode.values([s])[0], value.astype(shadow_dtype))


@pytest.mark.parametrize("shadow_dtype", [np.float16, FLOAT])
def test_subnormal_halves_count(mode, shadow_dtype):
  # TensorFlow's threads flush subnormals of float; those of half are normal
  # there. Enough of them for several threads.
  count = 1 << 20 if isinstance(mode, modes.Graph) else 1 << 10
  value = np.resize(np.arange(0, 1 << 10, 2, np.uint16), count).view(np.float16)
  v, s = mode.variable(value), zeros(mode, count, dtype=shadow_dtype)
  mode.run(lambda: ema_update([s], [v], 0.5))
  numerics.assert_same_bits(
      mode.values([s])[0], (value.astype(FLOAT) / 2).astype(shadow_dtype))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT, np.float64])
def test_other_subnormal_numbers_are_taken_for_zero(mode, dtype):
  tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
  # Enough of them for several threads.
  count = 1 << 18 if isinstance(mode, modes.Graph) else 1 << 4
  v, s, u = (mode.variable(np.resize(np.array(x, dtype), count)) for x in (
      [tiny / 4, tiny / 4, 0, tiny], [0, tiny / 4, 1.5 * tiny, 3 * tiny], [7]))
  mode.run(lambda: ema_update([[s], [u]], [v], [0.25, 0]))
  want, copy = [0, 0, 0, 1.5 * tiny], [tiny / 4, tiny / 4, 0, tiny]
  if "GPU" in str(modes.VARIABLES):
    if dtype == np.float64:
      # A GPU has no way to flush these.
      want[:3] = [0.1875 * tiny, 0.25 * tiny, 0.375 * tiny]
    else:
      copy[:2] = [0, 0]  # Arithmetic there, with a weight of 1.
  got, copied = mode.values([s, u])
  numerics.assert_same_bits(got, np.resize(np.array(want, dtype), count))
  numerics.assert_same_bits(copied, np.resize(np.array(copy, dtype), count))


def test_one_value_may_have_two_shadows(mode):
  s, t, v = zeros(mode, 1), zeros(mode, 1), mode.variable([1.])
  mode.run(lambda: ema_update([s, t], [v, v], 0.5))
  assert [x.item() for x in mode.values([s, t])] == [0.5, 0.5]


def test_variables_in_other_forms(mode):
  s, v = zeros(mode, 1), mode.variable([1.])
  mode.run(lambda: ema_update(s, v, 0.5))
  assert mode.values([s])[0].item() == 0.5
  mode.run(lambda: ema_update(iter([s]), iter([v]), 0.5))
  assert mode.values([s])[0].item() == 0.75


def test_mixed_dtypes(mode):
  values = [mode.variable(np.ones(2, dtype))
            for dtype in (FLOAT, np.float16, BFLOAT16, np.float64, BFLOAT16)]
  rows = [[zeros(mode, 2, dtype=dtype) for dtype in dtypes] for dtypes in (
      (FLOAT, FLOAT, BFLOAT16, np.float64, FLOAT),
      (FLOAT, np.float16, FLOAT, np.float64, FLOAT),
      (FLOAT, FLOAT, FLOAT, np.float64, BFLOAT16))]
  mode.run(lambda: ema_update(rows, values, [0.5, 0.75, 0.25]))
  for row, want in zip(rows, (0.5, 0.25, 0.75)):
    assert [x.tolist() for x in mode.values(row)] == [[want, want]] * 5


# Graphs


@modes.only(*modes.graphs())
@pytest.mark.parametrize("variables, averages", [(400, 1), (20, 3)])
def test_one_op_serves_all_variables(mode, variables, averages):
  name = {"graph": "Wrapopt>EmaUpdate",
          "ref-graph": "Wrapopt>EmaUpdateRef"}[mode.name]
  added = {}
  for count in (1, variables):
    values = [mode.uninitialized(FLOAT([1])) for _ in range(count)]
    rows = [[mode.uninitialized(FLOAT([0])) for _ in values]
            for _ in range(averages)]
    before = len(op_types(mode.graph))
    op = ema_update(rows, values, [0.5] * averages)
    added[count] = op_types(mode.graph)[before:]
    assert op.type == name
    assert op.get_attr("N") == count
    assert op.get_attr("NK") == count * averages
  # The op, its decays and the bundle of handles, and nothing for each variable.
  types = ["Const", *({"ref-graph": ["Wrapopt>EmaUpdateRef"]}.get(
      mode.name, ["Wrapopt>BundleByName", "Wrapopt>EmaUpdate"]))]
  assert added[variables] == added[1] == types
  mode.session.run(tf1.global_variables_initializer())
  mode.session.run(op)
  assert [x.tolist() for row in rows for x in mode.values(row)] == (
      [[0.5]] * variables * averages)


def test_one_op_serves_400_variables_in_a_function():
  values = [tf.Variable([1.]) for _ in range(400)]
  shadows = [tf.Variable([0.]) for _ in values]
  update = tf.function(lambda: ema_update(shadows, values, 0.5))
  types = op_types(update.get_concrete_function().graph)
  assert types.count("Wrapopt>EmaUpdate") == 1
  assert set(types) == {"Placeholder", "Const", "Wrapopt>EmaUpdate"}


def test_decays_in_a_function_wait_for_nothing():
  """Whatever the update waits for may run on another machine."""
  value, shadow, before = (tf.Variable([x]) for x in (1., 2., 3.))

  @tf.function
  def update():
    with tf.control_dependencies([before.read_value()]):
      ema_update([shadow], [value], 0.5)

  [op] = [op for op in update.get_concrete_function().graph.get_operations()
          if op.type == "Wrapopt>EmaUpdate"]
  assert op.control_inputs
  assert [x.op.control_inputs for x in op.inputs if x.dtype == tf.float64] == [
      []]


@modes.only(*modes.graphs())
def test_one_op_for_each_pair_of_dtypes(mode):
  values = [mode.variable(np.ones(2, dtype))
            for dtype in (FLOAT, np.float64) * 3]
  shadows = [mode.variable(np.zeros(2, dtype))
             for dtype in (FLOAT, np.float64) * 3]
  before = len(op_types(mode.graph))
  op = ema_update(shadows, values, 0.5, name="averages")
  added = op_types(mode.graph)[before:]
  assert sum("EmaUpdate" in added_type for added_type in added) == 2
  # The one that is returned runs both.
  assert isinstance(op, tf.Operation)
  assert op.name.startswith("averages/")
  mode.session.run(op)
  assert all(x.tolist() == [0.5, 0.5] for x in mode.values(shadows))


# Refusals. Each names the input and both sides, and changes nothing.


def good(mode, dtype=FLOAT):
  """A value and a shadow that changes when something is updated too early."""
  return (mode.variable(np.array([1, 2], dtype), name="v0"),
          mode.variable(np.array([3, 4], dtype), name="s0"))


def raw_op(ref, shadows, values, decays, T=tf.float32, S=tf.float32):  # pylint: disable=invalid-name
  op = raw.wrapopt_ema_update_ref if ref else raw.wrapopt_ema_update
  variables = [*shadows, *values]
  return op(variables if ref else handles(variables), decays, N=len(values),
            NK=len(shadows), T=T, S=S)


def raw_update(mode, shadows, values, decays, T=tf.float32, S=tf.float32):  # pylint: disable=invalid-name
  return raw_op(mode.name == "ref-graph", shadows, values, decays, T, S)


def test_a_shadow_twice(mode):
  v, s = good(mode)
  w, t = mode.variable([5., 6.], name="w"), mode.variable([7., 8.], name="t")
  once = " are one variable: a variable that is updated must be named once"
  refused(mode, [v, s, w, t], InvalidArgument,
          rf"shadows\[1\] {called('t')} and shadows\[2\] {called('t')}{once}",
          lambda: ema_update([s, t, t], [v, v, w], 0.5))
  # Decays have shadows of their own.
  refused(mode, [v, s, w, t], InvalidArgument,
          rf"shadows\[1\] {called('t')} and shadows\[3\] {called('t')}{once}",
          lambda: ema_update([[s, t], [w, t]], [v, v], [0.5, 0.9]))


def test_a_shadow_that_is_a_value(mode):
  v, s = good(mode)
  w = mode.variable([5., 6.], name="w")
  refused(mode, [v, s, w], InvalidArgument,
          rf"shadows\[1\] {called('w')} and values\[0\] {called('w')} are one "
          "variable", lambda: ema_update([s, w], [w, v], 0.5))


@pytest.mark.cpu("destroys by an op of the CPU")
@modes.only(modes.Eager(), modes.Function(), modes.Graph(True))
def test_a_variable_that_was_destroyed(mode):
  v, s = good(mode)
  handle = lambda: tf.raw_ops.VarHandleOp(  # pylint: disable=g-long-lambda-assignment
      dtype=tf.float32, shape=[2], shared_name=f"destroyed-{mode.name}")
  mode.run(lambda: tf.raw_ops.AssignVariableOp(resource=handle(),
                                               value=[1., 2.]))
  update = lambda: raw_update(mode, [s, handle()], [v, v], [0.5])
  mode.run(update)
  assert mode.values([s])[0].tolist() == [2, 3]
  mode.run(lambda: tf.raw_ops.DestroyResourceOp(resource=handle()))
  refused(mode, [v, s], FailedPrecondition,
          rf"shadows\[1\] {called('destroyed-' + mode.name)} is not "
          "initialized: run its initializer first", update)


@pytest.mark.cpu("stacks handles")
@modes.only(modes.Eager(), modes.Function(), modes.Graph(True))
def test_another_number_of_handles(mode):
  v, s = good(mode)
  t = mode.variable([7., 8.])
  refused(mode, [v, s, t], at_build(mode, InvalidArgument),
          r"variables must be 4 \(2 shadows, 2 values\), got 5",
          lambda: raw_update(mode, [s, tf.stack([s.handle, t.handle])], [v, v],
                             [0.5]))


@modes.only(modes.Eager(), modes.Function(), modes.Graph(True))
def test_another_dtype_than_the_op_s(mode):
  v, s = good(mode)
  t, w = zeros(mode, 2), mode.variable(np.array([5., 6.]), name="w")
  name = " " + called("w") if mode.name == "eager" else ""
  refused(mode, [v, s, t, w], at_build(mode, InvalidArgument),
          rf"values\[1\]{name} must be of dtype float.*, got double",
          lambda: raw_update(mode, [s, t], [v, w], [0.5]))
  refused(mode, [v, s, w], at_build(mode, InvalidArgument),
          rf"shadows\[1\]{name} must be of dtype float.*, got double",
          lambda: raw_update(mode, [s, w], [v, v], [0.5]))


def test_another_shape(mode):
  v, s = good(mode)
  t = mode.variable([5., 6., 7.], name="t")
  refused(mode, [v, s, t], ValueError,
          r"`shadows\[1\]` \('t:0'\) misshapen: got \(3,\) but expected \(2,\) "
          r"\(the shape of values\[1\], 'v0:0'\)\.",
          lambda: ema_update([s, t], [v, v], 0.5))
  # The op itself says so when the graph is built, where there is one.
  t_name, v_name = (" " + called(name) if mode.name == "eager" else ""
                    for name in ("t", "v0"))
  refused(mode, [v, s, t], at_build(mode, InvalidArgument),
          rf"shadows\[1\]{t_name} misshapen: got \[3\] but expected \[2\] "
          rf"\(the shape of values\[1\]{v_name}\)",
          lambda: raw_update(mode, [s, t], [v, v], [0.5]))


def test_another_shape_that_shows_when_it_runs(mode):
  v, s = good(mode)
  t = mode.variable([5., 6., 7.], name="t", shape=tf.TensorShape(None))
  w = mode.variable([5., 6., 7.], name="w", shape=tf.TensorShape(None))
  refused(mode, [v, s, t], InvalidArgument,
          rf"shadows\[1\] {called('t')} misshapen: got \[3\] but expected "
          rf"\[2\] \(the shape of values\[1\] {called('v0')}\)",
          lambda: ema_update([s, t], [v, v], 0.5))
  mode.run(lambda: ema_update([t, s], [w, v], 0))
  assert [x.tolist() for x in mode.values([t, s])] == [[5, 6, 7], [1, 2]]


@pytest.mark.parametrize("bad", [-0.5, 1.5, np.nan, np.inf])
def test_a_decay_outside_its_range(mode, bad):
  v, s = good(mode)
  t = mode.variable([7., 8.])
  for rows, decays, k in (([s, t], bad, 0), ([[s, s], [t, t]], [0.5, bad], 1)):
    refused(mode, [v, s, t], ValueError,
            rf"`decay\[{k}\]` must be in \[0, 1\], got {bad}\.",
            lambda: ema_update(rows, [v, v], decays))  # pylint: disable=cell-var-from-loop
  for make, error in ((tf.constant, at_build(mode, InvalidArgument)),
                      (unknown_shape, InvalidArgument)):
    refused(mode, [v, s, t], error,
            rf"decays\[0\] must be in \[0, 1\], got {bad}",
            lambda: ema_update([s, t], [v, v], make(bad)))  # pylint: disable=cell-var-from-loop
    refused(mode, [v, s, t], error,
            rf"decays\[1\] must be in \[0, 1\], got {bad}",
            lambda: ema_update([[s], [t]], [v], [0.5, make(bad)]))  # pylint: disable=cell-var-from-loop


@pytest.mark.parametrize("decays, got", [
    ([0.5, 0.5], r"\[2\]"), ([], r"\[0\]"), (0.5, r"\[\]"),
    ([[0.5]], r"\[1,1\]")])
def test_another_number_of_decays(mode, decays, got):
  v, s = good(mode)
  decays = np.array(decays)
  text = rf"decays misshapen: got {got} but expected \[1\] \(one decay for each"
  refused(mode, [v, s], at_build(mode, InvalidArgument), text,
          lambda: raw_update(mode, [s], [v], decays))
  refused(mode, [v, s], InvalidArgument, text,
          lambda: raw_update(mode, [s], [v], unknown_shape(decays)))


def test_shadows_that_make_no_rows(mode):
  v, s = good(mode)
  others = [mode.variable([7., 8.]) for _ in range(2)]
  refused(mode, [v, s, *others], at_build(mode, InvalidArgument),
          "shadows must be N * K variables for N = 2 values, got 3".replace(
              "*", r"\*"),
          lambda: raw_update(mode, [s, *others], [v, v], [0.5]))


V, S = tf.Variable([1.]), tf.Variable([0.])


@pytest.mark.parametrize("shadows, values, decay, error, text", [
    ([], [], 0.5, ValueError, "`values` must hold at least one variable, got "
     "none."),
    ([], [V], 0.5, ValueError, "`shadows` must hold at least one variable, got "
     "none."),
    ([S], [V, V], 0.5, ValueError, "`shadows` must hold one variable for each "
     "of the 2 values, got 1."),
    ([[S], [S, S]], [V], [0.5, 0.5], ValueError, "`shadows[1]` must hold one "
     "variable for each of the 1 values, got 2."),
    ([[S]], [V], [0.5, 0.5], ValueError, "`shadows` must hold one sequence of "
     "variables for each of the 2 decays, got 1."),
    ([], [V], [], ValueError, "`decay` must hold at least one decay, got "
     "none."),
    ([S], [V], -0.5, ValueError, "`decay[0]` must be in [0, 1], got -0.5."),
    ([S], [1.0], 0.5, TypeError, "`values[0]` must be a variable, got 1.0."),
    ([[S], [None]], [V], [0.5, 0.5], TypeError, "`shadows[1][0]` must be a "
     "variable, got None."),
    ([S], [tf.Variable([1], name="i")], 0.5, TypeError, "`values[0]` ('i:0') "
     "must be of dtype float16 or bfloat16 or float32 or float64, got int32."),
    ([tf.Variable([1.], name="f")],
     [tf.Variable([1.], dtype=tf.float64)], 0.5, TypeError, "`shadows[0]` "
     "('f:0') must be of dtype float64, got float32."),
    ([tf.Variable([1.], name="f", dtype=tf.bfloat16)],
     [tf.Variable([1.], dtype=tf.float16)], 0.5, TypeError, "`shadows[0]` "
     "('f:0') must be of dtype float16 or float32, got bfloat16."),
])
def test_what_the_function_refuses(shadows, values, decay, error, text):
  with pytest.raises(error) as e:
    ema_update(shadows, values, decay)
  assert str(e.value) == text
  assert S.numpy() == 0


# Shape functions


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("shadow, value, fits", [
    ([], [], True), ([0], [0], True), ([2, 3], [2, 3], True),
    (None, [2, 3], True), ([2, 3], None, True), (None, None, True),
    ([None, 3], [2, 3], True), ([None, 3], [2, None], True),
    ([2, 3], [3, 2], False), ([None, 4], [2, 3], False), ([2], [2, 1], False),
    ([], [1], False), ([None, None], [None], False),
])
def test_shapes(ref, shadow, value, fits):
  with tf.Graph().as_default():
    # The first of each is good; the second shadow of the second value is not.
    values = [handle_of(ref, tf.float32, [5]),
              handle_of(ref, tf.float32, value)]
    shadows = [handle_of(ref, tf.float32, shape)
               for shape in ([5], value, [5], shadow)]
    builds(fits, lambda: raw_op(ref, shadows, values, [0.5, 0.5]),
           f"shadows[3] misshapen: got {shown(shadow)} but expected "
           f"{shown(value)} (the shape of values[1])")


@pytest.mark.parametrize("shape, fits", [
    (None, True), ([None], True), ([2], True), ([3], False), ([], False),
    ([None, 1], False)])
def test_shape_of_the_decays(shape, fits):
  with tf.Graph().as_default():
    variables = [handle_of(False, tf.float32, []) for _ in range(3)]
    decays = tf1.placeholder(tf.float64, shape)
    builds(fits, lambda: raw_op(False, variables[:2], variables[2:], decays),
           f"decays misshapen: got {shown(shape)} but expected [2] (one decay "
           "for each shadow")


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("value",
                         [tf.half, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("shadow",
                         [tf.half, tf.bfloat16, tf.float32, tf.float64])
def test_pairs_of_dtypes(ref, value, shadow):
  with tf.Graph().as_default():
    v, s = handle_of(ref, value, []), handle_of(ref, shadow, [])
    low = value in (tf.half, tf.bfloat16)
    builds((value.as_numpy_dtype, shadow.as_numpy_dtype) in PAIRS,
           lambda: raw_op(ref, [s], [v], [0.5], T=value, S=shadow),
           f"shadows must be of dtype {native_name(value)}, the values'"
           f"{', or float' if low else ''}, got {native_name(shadow)}")


# Readers


@pytest.mark.cpu("asks for addresses")
@modes.only(modes.Eager(), modes.Function())
def test_an_update_is_in_place_unless_somebody_reads(mode):
  value, shadow = mode.variable([4.] * 100), mode.variable([0.] * 100)
  update = lambda: mode.run(lambda: ema_update([shadow], [value], 0.75))
  update()
  before = address(shadow.read_value())
  update()
  assert address(shadow.read_value()) == before
  held, held_value = shadow.read_value(), value.read_value()
  update()
  # The reader keeps its buffer and what is in it; values need no copy.
  assert address(held) == before
  assert held.numpy().tolist() == [1.75] * 100
  assert address(shadow.read_value()) != before
  assert shadow.numpy().tolist() == [2.3125] * 100
  assert address(value.read_value()) == address(held_value)


def test_readers_of_some_of_many_shadows():
  values = [tf.Variable([4.]) for _ in range(5)]
  rows = [[tf.Variable([0.]) for _ in values] for _ in range(2)]
  held = [rows[0][1].read_value(), rows[1][0].read_value(),
          rows[1][4].read_value()]
  ema_update(rows, values, [0.75, 0.5])
  assert [x.numpy() for x in held] == [0, 0, 0]
  assert [s.numpy() for s in rows[0]] == [1] * 5
  assert [s.numpy() for s in rows[1]] == [2] * 5


# Processes


def run_in_process(code, **env):
  return printed_by("-c", "import tensorflow as tf\n" + code,
                    **env).splitlines()


@pytest.mark.cpu("is about several CPUs")
def test_variables_on_several_devices():
  assert run_in_process("""
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from wrapopt import ops
variables = []
for device in ("CPU:0", "CPU:1"):
  with tf.device(device):
    variables += [tf.Variable([4.]), tf.Variable([0.])]

def values():
  return [v.numpy().item() for v in variables]

v, s, far_v, far_s = variables
ops.ema_update([s, far_s], [v, far_v], 0.75)
print(values())
ops.exchange([v, far_v], [s, far_s])
print(values())
# A pair must be on one device.
for use in (lambda: ops.ema_update([s, far_s], [v, v], 0.5),
            lambda: ops.exchange([v, s], [far_s, far_v])):
  try:
    use()
    print("no error")
  except (tf.errors.InvalidArgumentError, ValueError):
    print(values())
""") == ["[4.0, 1.0, 4.0, 1.0]"] + ["[1.0, 4.0, 1.0, 4.0]"] * 3


@pytest.mark.cpu("is about the CPU's kernels")
def test_the_environment_names_no_instruction_set():
  lines = run_in_process("""
from wrapopt import ops
s = tf.Variable([0.])
try:
  ops.ema_update([s], [tf.Variable([4.])], 0.75)
except tf.errors.InvalidArgumentError as e:
  print(e.message)
print(s.numpy().item())
""", WRAPOPT_CPU_ISA="quantum")
  assert lines[0].find(
      "WRAPOPT_CPU_ISA: the CPU instruction set must be one that this "
      f"processor has ({', '.join(_native.cpu_isas())}), got 'quantum'") >= 0
  assert lines[-1] == "0.0"
