"""averaging_assign and its ops: numbers, aliases, graphs, errors."""

import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_same_bits
import isas
import modes
import numerics
from modes import (
    address, at_build, builds, called, handle_of, handles, native_name,
    op_types, put_into_copy_on_read_mode, refused, shown, tf1, unknown_shape)
from modes import mode  # pylint: disable=unused-import
from numerics import BFLOAT16, DOUBLE, FLOAT, HALF, name_of, random
from threads import in_threads
from wrapopt._loader import ops as raw
from wrapopt.ops import averaging_assign

InvalidArgument = tf.errors.InvalidArgumentError

# Dtypes of (targets, sources) that go together.
DTYPES = [
    ((HALF,), (HALF,)), ((HALF,), (HALF, HALF, HALF)), ((FLOAT,), (HALF, HALF)),
    ((HALF,), (FLOAT, HALF)), ((HALF, FLOAT), (FLOAT, HALF, HALF)),
    ((BFLOAT16,), (BFLOAT16, BFLOAT16)), ((FLOAT,), (BFLOAT16,)),
    ((BFLOAT16, FLOAT), (FLOAT, FLOAT)), ((FLOAT, BFLOAT16), (BFLOAT16, FLOAT)),
    ((FLOAT,), (FLOAT,)), ((FLOAT, FLOAT, FLOAT), (FLOAT,) * 8),
    ((DOUBLE,), (DOUBLE, DOUBLE)), ((DOUBLE, DOUBLE), (DOUBLE,))]

# Empty, scalar, less than a vector, and around the size of a block.
SHAPES = [(), (0,), (1,), (3, 0), (7,), (2, 5), (511,), (512,), (513,),
          (3, 5000)]

# That no binary format holds exactly; their sum is not 1.
WEIGHTS = [0.1, 0.7, -0.3, 0.2, 0.6, 0.1, 0.9, -0.1]
RATE = 0.3


def constants(arrays):
  """Tensors of which a graph's optimizer knows nothing."""
  return [tf1.placeholder_with_default(a, shape=a.shape) for a in arrays]


# Numbers


def test_a_trajectory(mode):
  # The mean of 2 and 6 is 4. A quarter of the way there from 0 is 1. Then a
  # quarter of the remaining 3, then of the remaining 2.25.
  a, b, target = (mode.variable(FLOAT.type([x])) for x in (2, 6, 0))
  seen = []
  for _ in range(3):
    mode.run(lambda: averaging_assign([target], [[a], [b]], rate=0.25))
    seen.append(mode.values([target])[0].item())
  assert seen == [1, 1.75, 2.3125]
  assert [x.item() for x in mode.values([a, b])] == [2, 6]


def test_subnormal_numbers_are_taken_for_zero(mode):
  tiny = 2**-126  # The smallest normal number.
  target, a, b = (mode.variable(np.float32(x)) for x in (
      [7, 7, 7], [tiny / 2, 1.5 * tiny, 4 * tiny],
      [tiny / 2, 1.5 * tiny, 2 * tiny]))
  mode.run(lambda: averaging_assign([target], [[a], [b]]))
  numerics.assert_same_bits(mode.values([target])[0],
                            np.float32([0, 0, 3 * tiny]))


@pytest.mark.by_day(7)
@pytest.mark.parametrize("what", ["variables", "tensors", "both"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=name_of)
def test_the_formula(mode, dtypes, what):
  rng = np.random.default_rng(1)
  targets, sources = (
      [[random(rng, shape, dtype) for shape in SHAPES] for dtype in row]
      for row in dtypes)
  weights = WEIGHTS[:len(sources)]
  t = [[mode.variable(x) for x in row] for row in targets]
  tensor = {"variables": lambda k: False, "tensors": lambda k: True,
            "both": lambda k: k % 2 == 0}[what]
  v = [None if tensor(k) else [mode.variable(x) for x in row]
       for k, row in enumerate(sources)]

  mode.run(lambda: averaging_assign(
      t, [row if row else constants(sources[k]) for k, row in enumerate(v)],
      weights, RATE))

  for row, given in zip(t, targets):
    for i, got in enumerate(mode.values(row)):
      want, tolerance = numerics.averaging_assign(
          given[i], [x[i] for x in sources], weights, RATE)
      assert got.dtype == given[i].dtype
      numerics.assert_close(got, want, tolerance, f"of shape {SHAPES[i]}")
  for row, given in zip(v, sources):
    if row:
      assert_same_bits(mode.values(row), given)


def sizes_and_arrays(dtypes):
  rng = np.random.default_rng(2)
  sizes = [700_001, 3, 0, 300_000, 513]
  return [[[random(rng, size, dtype) for size in sizes] for dtype in row]
          for row in dtypes]


@pytest.mark.parametrize("dtypes", [((FLOAT, FLOAT), (FLOAT, FLOAT)),
                                    ((BFLOAT16, FLOAT), (FLOAT, BFLOAT16)),
                                    ((DOUBLE,), (DOUBLE,))], ids=name_of)
@pytest.mark.parametrize("use_resource", [True, False])
def test_a_large_mean_runs_in_parallel_to_the_same_bits(dtypes, use_resource):
  targets, sources = sizes_and_arrays(dtypes)
  weights = WEIGHTS[:len(sources) + 1]
  results = []
  for threads in (1, 4):
    with modes.with_threads(use_resource, threads) as mode:
      t, s = ([[mode.variable(x) for x in row] for row in rows]
              for rows in (targets, sources))
      # One of the targets is a source, too.
      mode.run(lambda: averaging_assign(t, s + t[:1], weights, RATE))
      results.append([x for row in t for x in mode.values(row)])
  assert_same_bits(*results)
  each = [(given, i) for given in targets for i in range(len(given))]
  for got, (given, i) in zip(results[0], each):
    numerics.assert_close(got, *numerics.averaging_assign(
        given[i], [x[i] for x in sources + targets[:1]], weights, RATE))


# Runs in a process for each instruction set.
ON_ISA = """
import sys
import numpy as np
import tensorflow as tf
import averaging_assign_test as test
from wrapopt.ops import averaging_assign

results = []
for dtypes in test.DTYPES:
  targets, sources = test.specials(dtypes)
  t, s = ([[tf.Variable(x) for x in row] for row in rows]
          for rows in (targets, sources))
  averaging_assign(t, s, test.WEIGHTS[:len(s)], test.RATE)
  results += [v.numpy() for row in t for v in row]
np.savez(sys.argv[1], *[r.view(f"u{r.itemsize}") for r in results])
"""


def specials(dtypes):
  """Random numbers, and in one of the arrays infinities, NaNs and extremes."""
  rng = np.random.default_rng(3)
  shapes = [(), (0,), (33,), (1025,), (3000,)]
  targets, sources = ([[random(rng, shape, dtype) for shape in shapes]
                       for dtype in row] for row in dtypes)
  for row in targets + sources:
    numbers = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 65504, 2**-24, 2**-14,
                        1e-3])
    at = rng.permutation(row[-1].size)[:numbers.size]
    row[-1][at] = numbers.astype(row[-1].dtype)
  return targets, sources


@pytest.mark.cpu("is about the CPU's kernels")
def test_instruction_sets_agree_bit_for_bit(tmp_path):
  wanted = []
  for dtypes in DTYPES:
    targets, sources = specials(dtypes)
    for given, *x in [each for row in targets for each in zip(row, *sources)]:
      with np.errstate(invalid="ignore"):
        wanted.append((given.dtype, *numerics.averaging_assign(
            given, x, WEIGHTS[:len(x)], RATE)))
  isas.assert_agree(isas.results_of(ON_ISA, tmp_path), wanted)


def sum_in_order(arrays, weights, dtype):
  """The weighted sum as the op takes it, in float32 or float64."""
  compute = DOUBLE if dtype == DOUBLE else FLOAT
  total = None
  for array, weight in zip(arrays, weights):
    term = compute.type(weight) * array.astype(compute)
    total = term if total is None else total + term
  return total.astype(dtype)


# To the bit: XLA may round a product and a sum once.
@modes.only(*modes.UNCOMPILED)
@pytest.mark.parametrize("dtypes", DTYPES, ids=name_of)
def test_rate_one_assigns_the_sum(mode, dtypes):
  # Whatever the target holds: no infinity and no NaN stays, nor what a large
  # number would swallow.
  rng = np.random.default_rng(4)
  sources = [random(rng, 6, dtype) for dtype in dtypes[1]]
  t = [mode.variable(np.array([np.inf, -np.inf, np.nan, 6e4, 0, 1], dtype))
       for dtype in dtypes[0]]
  s = [mode.variable(x) for x in sources]
  mode.run(lambda: averaging_assign([[x] for x in t], [[x] for x in s],
                                    WEIGHTS[:len(s)]))
  assert_same_bits(mode.values(t), [
      sum_in_order(sources, WEIGHTS, dtype) for dtype in dtypes[0]])


def test_the_order_of_the_sum(mode):
  # A float32 of 1e8 swallows a 1.
  x = [mode.variable(FLOAT.type([v])) for v in (1e8, 1, -1e8)]
  t = mode.variable(FLOAT.type([7]))
  for order, want in (([0, 1, 2], 0), ([0, 2, 1], 1), ([1, 0, 2], 0)):
    mode.run(lambda: averaging_assign([t], [[x[k]] for k in order], [1, 1, 1]))  # pylint: disable=cell-var-from-loop
    assert mode.values([t])[0].item() == want
  # Variables come before tensors, each with its own weight.
  given = lambda: [constants([np.array([1e8], FLOAT)]), [x[0]], [x[1]]]  # pylint: disable=g-long-lambda-assignment
  for make in (list, tf.constant):
    mode.run(lambda: averaging_assign([t], given(), make([-1., 1., 1.])))  # pylint: disable=cell-var-from-loop
    assert mode.values([t])[0].item() == 0
    mode.run(lambda: averaging_assign([t], given(), make([-1., 0.5, 0.])))  # pylint: disable=cell-var-from-loop
    assert mode.values([t])[0].item() == -5e7


def test_a_single_source_is_copied(mode):
  for dtype in (HALF, BFLOAT16, FLOAT, DOUBLE):
    source = np.array([1, -0.0, 0, 1e-3, np.inf, -np.inf], dtype)
    s, t = mode.variable(source), mode.variable(np.full(6, np.nan, dtype))
    mode.run(lambda: averaging_assign(t, s))
    numerics.assert_same_bits(mode.values([t])[0], source)


@pytest.mark.parametrize("use_locking", [True, False])
def test_rate_zero_changes_nothing(mode, use_locking):
  for dtype in (HALF, BFLOAT16, FLOAT, DOUBLE):
    # A NaN with a payload, too.
    target = np.array([1, -0.0, np.inf, 3, 0], dtype)
    target.view(f"u{dtype.itemsize}")[4] = (
        np.array(np.nan, dtype).view(f"u{dtype.itemsize}") + 5)
    t = mode.variable(target)
    s = mode.variable(np.array([5, 6, 7, np.nan, np.inf], dtype))
    mode.run(lambda: averaging_assign([t], [s], rate=0,
                                      use_locking=use_locking))
    numerics.assert_same_bits(mode.values([t])[0], target)


def test_a_source_of_weight_zero_does_not_count(mode):
  for dtype in (HALF, BFLOAT16, FLOAT, DOUBLE):
    bad = mode.variable(np.array([np.nan, np.inf, -np.inf], dtype))
    good = mode.variable(np.array([1, 2, 3], dtype))
    t = mode.variable(np.zeros(3, dtype))
    for sources, weights in (([[bad], [good]], [0, 1]),
                             ([[good], [bad]], [1, 0])):
      mode.run(lambda: averaging_assign([t], sources, weights))  # pylint: disable=cell-var-from-loop
      assert mode.values([t])[0].tolist() == [1, 2, 3]
      mode.run(lambda: averaging_assign([t], [[bad]], [0]))
      assert mode.values([t])[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype, large", [
    (HALF, 60000), (BFLOAT16, 2.0**127), (FLOAT, 2.0**127),
    (DOUBLE, 2.0**1023)],
                         ids=name_of)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_mean_of_large_numbers_does_not_overflow(mode, dtype, large, count):
  x = [mode.variable(np.array([large, -large], dtype)) for _ in range(count)]
  t = mode.variable(np.zeros(2, dtype))
  mode.run(lambda: averaging_assign([t], [[v] for v in x]))
  got = mode.values([t])[0].astype(DOUBLE)
  want = np.array([large, -large], dtype).astype(DOUBLE)
  eps = 2.0**-52 if dtype == DOUBLE else 2.0**-23
  step = 0 if dtype in (FLOAT, DOUBLE) else numerics.ml_dtypes.finfo(dtype).eps
  assert np.all(np.abs(got / want - 1) <= 2 * count * eps + float(step) / 2)


def test_weights_and_rates_of_all_kinds(mode):
  a, b = mode.variable(FLOAT.type([1])), mode.variable(FLOAT.type([3]))
  scalar = mode.variable(np.float64(0.25))
  vector = mode.variable(np.array([0.25, 0.75]))
  given = {
      "list": lambda: ([0.25, 0.75], 0.5),
      "numpy": lambda: (np.array([0.25, 0.75]), np.float32(0.5)),
      "iterator": lambda: (iter([0.25, 0.75]), 0.5),
      "tensors": lambda: ([tf.constant(0.25), tf.constant(0.75, tf.float64)],
                          tf.constant(0.5, tf.bfloat16)),
      "beside numbers": lambda: ([scalar, 0.75], 2 * scalar.read_value()),
      "vector": lambda: (tf.constant([0.25, 0.75], tf.float16), 0.5),
      "unknown shape": lambda: (
          tf1.placeholder_with_default(np.array([0.25, 0.75]), None), 0.5),
      "variable": lambda: (vector, 0.5),
  }
  for name, make in given.items():
    t = mode.variable(FLOAT.type([0]))
    # 1 * 0.25 + 3 * 0.75 is 2.5, of which half.
    mode.run(lambda: averaging_assign([t], [[a], [b]], *make()))  # pylint: disable=cell-var-from-loop
    assert mode.values([t])[0].item() == 1.25, name


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE], ids=name_of)
def test_weights_and_rate_keep_their_digits(mode, dtype):
  weight, rate = 1 / 3, 1 - 0.9999
  one = mode.variable(np.ones(1, dtype))
  t, u = (mode.variable(np.zeros(1, dtype)) for _ in range(2))
  mode.run(lambda: averaging_assign([t], [one], [weight]))
  mode.run(lambda: averaging_assign([u], [one], rate=rate))
  assert mode.values([t])[0].item() == dtype.type(weight)
  assert mode.values([u])[0].item() == dtype.type(rate)


def test_mixed_dtypes(mode):
  dtypes = (FLOAT, HALF, BFLOAT16, DOUBLE, BFLOAT16)
  # The last takes another op than the third: its target is float32.
  targets = [mode.variable(np.zeros(2, dtype))
             for dtype in (*dtypes[:-1], FLOAT)]
  rows = [[mode.variable(np.full(2, x, dtype)) for dtype in dtypes]
          for x in (1, 3)]
  mode.run(lambda: averaging_assign(targets, rows, rate=0.5))
  assert [x.tolist() for x in mode.values(targets)] == [[1, 1]] * 5


def test_iterators_and_single_variables(mode):
  a, t = mode.variable(FLOAT.type([4])), mode.variable(FLOAT.type([0]))
  mode.run(lambda: averaging_assign(t, a, rate=0.5))
  assert mode.values([t])[0].item() == 2
  mode.run(lambda: averaging_assign(iter([t]), iter([a]), rate=0.5))
  assert mode.values([t])[0].item() == 3
  mode.run(lambda: averaging_assign(([t],), [(a,), [a]], rate=0.5))
  assert mode.values([t])[0].item() == 3.5
  # What is no variable is one source, not a row of them.
  for make in (lambda: tf.constant([8.]), lambda: np.array([8], FLOAT)):
    mode.run(lambda: averaging_assign(t, make()))  # pylint: disable=cell-var-from-loop
    assert mode.values([t])[0].item() == 8
    mode.run(lambda: averaging_assign(t, a))


# Targets that are sources


def test_lookahead(mode):
  # slow += alpha (fast - slow), then fast = slow; slow in float32.
  fast = mode.variable(np.array([1], BFLOAT16))
  slow = mode.variable(FLOAT.type([1 + 2**-12]))
  mode.run(lambda: averaging_assign([[fast], [slow]], [[fast], [slow]],
                                    [0.5, 0.5]))
  assert [v.item() for v in mode.values([fast, slow])] == [1, 1 + 2**-13]


@pytest.mark.parametrize("use_locking", [True, False])
@pytest.mark.parametrize("dtype", [HALF, FLOAT, DOUBLE], ids=name_of)
def test_targets_that_are_sources(mode, dtype, use_locking):
  # Each element of each is read before one of them is written: in one block
  # and across blocks.
  rng = np.random.default_rng(5)
  given = [[random(rng, size, dtype) for size in (3, 1500, 0)]
           for _ in range(3)]
  a, b, c = ([mode.variable(x) for x in row] for row in given)
  weights = WEIGHTS[:4]
  # One of the two targets, one that is none, and the other target, twice.
  mode.run(lambda: averaging_assign([a, b], [b, c, a, b], weights, RATE,
                                    use_locking))
  for row, before in ((a, given[0]), (b, given[1])):
    for i, got in enumerate(mode.values(row)):
      numerics.assert_close(got, *numerics.averaging_assign(
          before[i], [given[k][i] for k in (1, 2, 0, 1)], weights, RATE))
  assert_same_bits(mode.values(c), given[2])


def test_one_source_of_several_variables(mode):
  s = mode.variable(FLOAT.type([4]))
  t, u = (mode.variable(FLOAT.type([0])) for _ in range(2))
  mode.run(lambda: averaging_assign([t, u], [[s, s], [s, s]], rate=0.5))
  assert [x.item() for x in mode.values([t, u])] == [2, 2]


def test_a_source_that_is_the_value_of_a_target(mode):
  # A tensor may be the buffer of a target. In place, the first target would
  # change it for the second.
  t, u = (mode.variable(np.arange(2000, dtype=np.float32) * x) for x in (1, 3))
  mode.run(lambda: averaging_assign([[t], [u]], [[t.read_value()], [u]],
                                    rate=0.5))
  for got, before in zip(mode.values([t, u]), (1, 3)):
    want = np.arange(2000) * (before + 0.5 * (2 - before))
    numerics.assert_same_bits(got, want.astype(FLOAT))


# Graphs


@modes.only(*modes.graphs())
@pytest.mark.parametrize("variables, targets, sources",
                         [(400, 1, 2), (20, 3, 4)])
def test_one_op_serves_all_variables(mode, variables, targets, sources):
  name = {"graph": "Wrapopt>AveragingAssign",
          "ref-graph": "Wrapopt>AveragingAssignRef"}[mode.name]
  added = {}
  for count in (1, variables):
    t, s = ([[mode.uninitialized(FLOAT.type([k + 1])) for _ in range(count)]
             for k in range(rows)] for rows in (targets, sources))
    before = len(op_types(mode.graph))
    op = averaging_assign(t, s, rate=0.5)
    added[count] = op_types(mode.graph)[before:]
    assert op.type == name
    assert op.get_attr("N") == count
    assert len(op.inputs) == (targets + sources) * count + 2
  # The op, its weights and its rate, and nothing for each variable.
  assert added[variables] == added[1] == ["Const", "Const", name]
  mode.session.run(tf1.global_variables_initializer())
  mode.session.run(op)
  mean = (sources + 1) / 2
  assert [mode.values(row) for row in t] == [
      [np.array([(k + 1 + mean) / 2])] * variables for k in range(targets)]


@modes.only(*modes.graphs())
def test_the_op_is_told_about_locks(mode):
  s, t = (mode.uninitialized(FLOAT.type([0])) for _ in range(2))
  for use_locking in (False, True):
    op = averaging_assign(t, s, use_locking=use_locking)
    assert op.get_attr("use_locking") == use_locking


@modes.only(*modes.graphs())
def test_one_op_for_each_combination_of_dtypes(mode):
  # A float16 target of float32 sources, and the other way round.
  dtypes = [(FLOAT, FLOAT), (HALF, FLOAT), (FLOAT, HALF), (FLOAT, FLOAT)]
  t, s = ([mode.variable(np.full(2, x, d[x])) for d in dtypes]
          for x in (0, 1))
  before = len(op_types(mode.graph))
  op = averaging_assign(t, s, rate=0.5, name="means")
  added = op_types(mode.graph)[before:]
  assert sum("AveragingAssign" in kind for kind in added) == 3
  # The one that is returned runs all.
  assert op.name.startswith("means/")
  mode.session.run(op)
  assert all(x.tolist() == [0.5, 0.5] for x in mode.values(t))


@pytest.mark.cpu("names its devices")
@modes.only(*modes.graphs(device_count={"CPU": 2}))
@pytest.mark.parametrize("scope", [None, "/cpu:1", "/device:GPU:7"])
def test_an_op_runs_where_its_targets_live(mode, scope):
  targets, sources = [], []
  for device in ("/device:CPU:0", "/device:CPU:1", "/device:CPU:0"):
    with tf.device(device):
      targets.append(mode.variable(FLOAT.type([0])))
      sources.append(mode.variable(FLOAT.type([1])))
  # A variable of another device is read there.
  far = []
  for source in (sources[1], sources[0], sources[1]):
    with tf.device(source.device):
      far.append(source.read_value())
  known = set(mode.graph.get_operations())
  with tf.device(scope):
    op = averaging_assign(targets, [sources, far], [0.5, 1])
    one = averaging_assign(targets[0], far[0], rate=0.5)
  updates = [op for op in mode.graph.get_operations()
             if op not in known and "AveragingAssign" in op.type]
  assert sorted((op.device, op.get_attr("N")) for op in updates) == [
      ("/device:CPU:0", 1), ("/device:CPU:0", 2), ("/device:CPU:1", 1)]
  mode.session.run(op)
  assert [x.item() for x in mode.values(targets)] == [1.5] * 3
  mode.session.run(one)
  assert mode.values(targets)[0].item() == 1.25


@pytest.mark.cpu("names its devices")
@modes.only(modes.Eager(), modes.Function())
def test_the_caller_is_in_the_scope_of_a_device_that_has_no_kernel(mode):
  s, t = mode.variable([4.]), mode.variable([0.])
  weights = mode.variable([1., 1.])
  with tf.device("/device:GPU:7"):
    mode.run(lambda: averaging_assign([t], [[s], [np.array([2], FLOAT)]],
                                      weights, rate=0.5))
  assert mode.values([t])[0].item() == 3


# Refusals. Each names the input and both sides, and changes nothing.


def good(mode, dtype=FLOAT):
  """A source and a target that changes when something is updated too early."""
  return (mode.variable(np.array([1, 2], dtype), name="s0"),
          mode.variable(np.array([3, 4], dtype), name="t0"))


def raw_assign(mode, targets, sources, tensors=(), weights=None, rate=0.5, n=2,  # pylint: disable=too-many-arguments
               T=tf.float32):  # pylint: disable=invalid-name
  if weights is None:
    weights = [1.] * ((len(sources) + len(tensors)) // n)
  arguments = {"tensors": list(tensors), "weights": weights, "rate": rate,
               "N": n, "T": T}
  if mode.name == "ref-graph":
    return raw.wrapopt_averaging_assign_ref(targets, sources, **arguments)
  return raw.wrapopt_averaging_assign(handles(targets), handles(sources),
                                      **arguments)


ONCE = " are one variable: a variable that is updated must be named once"
OWN = (" are one variable: a target may be a source of its own mean, not of "
       "another's")


def test_a_target_twice(mode):
  s, t = good(mode)
  u, w = (mode.variable(FLOAT.type([5, 6]), name=name) for name in "uw")
  refused(mode, [s, t, u, w], InvalidArgument,
          rf"targets\[1\] {called('u')} and targets\[2\] {called('u')}{ONCE}",
          lambda: raw_assign(mode, [t, u, u, w], [s, s]))
  refused(mode, [s, t, u], ValueError,
          r"`targets\[0\]\[1\]` and `targets\[1\]\[0\]` are one variable, "
          "'u:0': a variable that is updated must be named once",
          lambda: averaging_assign([[t, u], [u, w]], [[s, s]]))


def test_a_target_that_is_a_source_of_another(mode):
  s, t = good(mode)
  u = mode.variable(FLOAT.type([5, 6]), name="u")
  # As sources of their own means they are welcome.
  refused(mode, [s, t, u], InvalidArgument,
          rf"targets\[1\] {called('u')} and sources\[2\] {called('u')}{OWN}",
          lambda: raw_assign(mode, [t, u], [t, u, u, s]))
  refused(mode, [s, t, u], ValueError,
          r"`targets\[1\]` and `sources\[1\]\[0\]` are one variable, 'u:0': a "
          "target may be a source of its own mean, not of another's",
          lambda: averaging_assign([t, u], [[t, u], [u, s]]))
  # Even where another op has the other.
  double = mode.variable(np.array([1., 2.]))
  refused(mode, [s, t, u, double], ValueError, "are one variable, 's0:0'",
          lambda: averaging_assign([s, double], [u, s]))


def test_another_dtype_than_the_op_s(mode):
  s, t = good(mode)
  d = mode.variable(np.array([5., 6.]), name="d")
  t2 = mode.variable(FLOAT.type([7, 8]), name="t2")
  h = mode.variable(np.array([1, 2], HALF), name="h")
  d_name, h_name, t2_name, s_name = (
      " " + called(name) if mode.name == "eager" else ""
      for name in ("d", "h", "t2", "s0"))
  values = lambda *variables: [v.read_value() for v in variables]
  for text, build in (
      (rf"sources\[1\]{d_name} must be of dtype float, the op's, got double",
       lambda: raw_assign(mode, [t], [s, d], n=1)),
      (rf"targets\[1\]{d_name} must be of dtype half, the op's, or float, got "
       "double", lambda: raw_assign(mode, [t, d], [s], n=1, T=tf.float16)),
      (r"tensors\[1\] must be of dtype float, the op's, got double",
       lambda: raw_assign(mode, [t], [], values(s, d), n=1)),
      # The rows of one op are of one dtype each.
      (rf"sources\[1\]{h_name} must be of dtype float \(the dtype of "
       rf"sources\[0\]{s_name}, the first of its row\), got half",
       lambda: raw_assign(mode, [t, t2], [s, h], T=tf.float16)),
      (rf"targets\[1\]{t2_name} must be of dtype half \(the dtype of "
       rf"targets\[0\]{h_name}, the first of its row\), got float",
       lambda: raw_assign(mode, [h, t2], [s, s], T=tf.float16)),
      (r"tensors\[1\] must be of dtype half \(the dtype of tensors\[0\], "
       r"the first of its row\), got float",
       lambda: raw_assign(mode, [t, t2], [], values(h, s), T=tf.float16))):
    refused(mode, [s, t, d, t2, h], at_build(mode, InvalidArgument), text,
            build)


def test_another_shape(mode):
  s, t = good(mode)
  w = mode.variable([5., 6., 7.], name="w")
  shape = r" misshapen: got \(3,\) but expected \(2,\) \(the shape of "
  for text, build in (
      (rf"`sources\[1\]` \('w:0'\){shape}targets\[1\], 's0:0'\)\.",
       lambda: averaging_assign([t, s], [t, w])),
      (rf"`targets\[1\]\[0\]` \('w:0'\){shape}targets\[0\]\[0\], 't0:0'\)\.",
       lambda: averaging_assign([[t], [w]], [s])),
      (rf"`sources\[0\]`{shape}targets\[0\], 't0:0'\)\.",
       lambda: averaging_assign([t], [w.read_value()]))):
    refused(mode, [s, t, w], ValueError, text, build)
  # The op itself says so when the graph is built, where there is one.
  w_name, t_name = (" " + called(name) if mode.name == "eager" else ""
                    for name in ("w", "t0"))
  for text, build in (
      (rf"sources\[1\]{w_name}", lambda: raw_assign(mode, [t], [s, w], n=1)),
      (rf"targets\[1\]{w_name}", lambda: raw_assign(mode, [t, w], [s], n=1)),
      (r"tensors\[1\]", lambda: raw_assign(
          mode, [t], [], [s.read_value(), w.read_value()], n=1))):
    refused(mode, [s, t, w], at_build(mode, InvalidArgument),
            rf"{text} misshapen: got \[3\] but expected \[2\] \(the shape of "
            rf"targets\[0\]{t_name}\)", build)


def test_another_shape_that_shows_when_it_runs(mode):
  s, t = good(mode)
  w, x = (mode.variable([5., 6., 7.], name=name, shape=tf.TensorShape(None))
          for name in "wx")
  shape = (r"got \[3\] but expected \[2\] \(the shape of targets\[1\] "
           rf"{called('t0')}\)")
  refused(mode, [s, t, w, x], InvalidArgument,
          rf"sources\[1\] {called('w')} misshapen: {shape}",
          lambda: averaging_assign([x, t], [w, w]))
  refused(mode, [s, t, w, x], InvalidArgument,
          rf"tensors\[1\] misshapen: {shape}",
          lambda: raw_assign(mode, [x, t], [], [
              w.read_value(), unknown_shape(np.ones(3, FLOAT))]))
  mode.run(lambda: averaging_assign([x, t], [w, s]))
  assert [v.tolist() for v in mode.values([x, t])] == [[5, 6, 7], [1, 2]]


@pytest.mark.parametrize("bad", [-0.5, 1.5, np.nan, np.inf])
def test_a_rate_outside_its_range(mode, bad):
  s, t = good(mode)
  text = rf"rate must be in \[0, 1\], got {bad}"
  for rate in (lambda: bad, lambda: tf.constant(bad)):
    refused(mode, [s, t], at_build(mode, InvalidArgument), text,
            lambda: averaging_assign([t], [s], rate=rate()))  # pylint: disable=cell-var-from-loop
  if mode.name == "jit":
    return  # HLO cannot refuse what is known when it runs.
  refused(mode, [s, t], InvalidArgument, text,
          lambda: averaging_assign([t], [s], rate=unknown_shape(bad)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite(mode, bad):
  s, t = good(mode)
  for weights, error in (
      (lambda: [1, bad], at_build(mode, InvalidArgument)),
      (lambda: tf.constant([1, bad]), at_build(mode, InvalidArgument)),
      (lambda: [1, tf.constant(bad)], at_build(mode, InvalidArgument)),
      (lambda: [1, unknown_shape(bad)], InvalidArgument)):
    if mode.name == "jit" and error is InvalidArgument:
      continue  # HLO cannot refuse what is known when it runs.
    refused(mode, [s, t], error, rf"weights\[1\] must be finite, got {bad}",
            lambda: averaging_assign([t], [[s], [s]], weights()))  # pylint: disable=cell-var-from-loop


@pytest.mark.parametrize("weights, got", [
    ([0.5], r"\[1\]"), ([], r"\[0\]"), (0.5, r"\[\]"),
    ([[0.5, 0.5]], r"\[1,2\]"),
    ([1, 1, 1], r"\[3\]")])
def test_another_number_of_weights(mode, weights, got):
  s, t = good(mode)
  weights = np.array(weights, DOUBLE)
  text = (rf"weights misshapen: got {got} but expected \[2\] \(one weight for "
          "each")
  refused(mode, [s, t], at_build(mode, InvalidArgument), text,
          lambda: raw_assign(mode, [t], [s, s], weights=weights, n=1))
  refused(mode, [s, t], InvalidArgument, text,
          lambda: raw_assign(mode, [t], [s, s], weights=unknown_shape(weights),
                             n=1))
  refused(mode, [s, t], at_build(mode, InvalidArgument), text,
          lambda: averaging_assign([t], [[s], [s]], tf.constant(weights)))
  # Also where they must be put into the op's order.
  refused(mode, [s, t], (InvalidArgument, ValueError),
          "misshapen|is not compatible with expected shape",
          lambda: averaging_assign([t], [[s.read_value()], [s]],
                                   unknown_shape(weights)))


@pytest.mark.parametrize("rate, got", [([0.5], r"\[1\]"), ([], r"\[0\]")])
def test_a_rate_that_is_no_scalar(mode, rate, got):
  s, t = good(mode)
  rate = np.array(rate, DOUBLE)
  text = rf"rate misshapen: got {got} but expected \[\] \(a scalar\)"
  refused(mode, [s, t], at_build(mode, InvalidArgument), text,
          lambda: raw_assign(mode, [t], [s], rate=rate, n=1))
  refused(mode, [s, t], InvalidArgument, text,
          lambda: raw_assign(mode, [t], [s], rate=unknown_shape(rate), n=1))


def test_lists_that_make_no_rows(mode):
  s, t = good(mode)
  u = mode.variable([5., 6.])
  v = mode.variable([5., 6.])
  for targets, sources, tensors, text in (
      ([t, u, v], [s, s], [], r"targets must be rows of N = 2, got 3"),
      ([t, u], [s, s, s], [], r"sources must be rows of N = 2, got 3"),
      ([t, u], [s, s], [0], r"tensors must be rows of N = 2, got 1"),
      ([t, u], [], [], "each variable must have a target and a source, got 1 "
       "targets and 0 sources")):
    refused(mode, [s, t, u, v], at_build(mode, InvalidArgument), text,
            lambda: raw_assign(mode, targets, sources,  # pylint: disable=cell-var-from-loop
                               [s.read_value() for _ in tensors],  # pylint: disable=cell-var-from-loop
                               weights=[1.]))


@modes.only(*modes.graphs())
def test_variables_of_both_kinds(mode):
  s, t = good(mode)
  kinds = ["a resource variable as {} \\('t0:0'\\) is, got a ref variable",
           "a ref variable as {} \\('t0:0'\\) is, got a resource variable"]
  other = tf1.Variable([1., 2.], name="other",
                       use_resource=mode.name == "ref-graph")
  kind = kinds[mode.name == "ref-graph"]
  refused(mode, [s, t], TypeError, r"`sources\[1\]\[0\]` \('other:0'\) must be "
          + kind.format(r"targets\[0\]"),
          lambda: averaging_assign([t], [[s], [other]]))
  refused(mode, [s, t], TypeError, r"`targets\[1\]\[0\]` \('other:0'\) must be "
          + kind.format(r"targets\[0\]\[0\]"),
          lambda: averaging_assign([[t], [other]], [s]))
  # Its value is welcome.
  mode.session.run(other.initializer)
  mode.run(lambda: averaging_assign(t, other.read_value()))
  assert mode.values([t])[0].tolist() == [1, 2]


S, T = tf.Variable([1.], name="S"), tf.Variable([0.], name="T")
U = tf.Variable([1.], name="U")
INT = tf.Variable([1], name="int")
D = tf.Variable([1.], name="D", dtype=tf.float64)
H, B = (tf.Variable([1.], dtype=dtype, name=dtype.name)
        for dtype in (tf.float16, tf.bfloat16))


@pytest.mark.parametrize("targets, sources, options, error, text", [
    ([], [], {}, ValueError, "`targets` must hold at least one variable, got "
     "none."),
    ([[]], [[]], {}, ValueError, "`targets[0]` must hold at least one "
     "variable, got none."),
    ([T], [], {}, ValueError, "`sources` must hold one source for each of the "
     "1 variables, got 0. Several sources of each are several lists."),
    ([T], [S, U], {}, ValueError, "`sources` must hold one source for each of "
     "the 1 variables, got 2. Several sources of each are several lists."),
    ([T], [[S], [S, U]], {}, ValueError, "`sources[1]` must hold one source "
     "for each of the 1 variables, got 2. Several sources of each are several "
     "lists."),
    ([[T], [S, U]], [[S]], {}, ValueError, "`targets[1]` must hold one target "
     "for each of the 1 variables, got 2. Several targets of each are several "
     "lists."),
    ([[T], S], [[S]], {}, TypeError, "`targets` must hold lists only or none, "
     "got ['list', 'ResourceVariable']."),
    ([1.0], [S], {}, TypeError, "`targets[0]` must be a variable, got 1.0."),
    ([T], [None], {}, TypeError, "`sources[0]` must be a variable or a tensor, "
     "got None."),
    ([T], [[S], ["x"]], {}, TypeError, "`sources[1][0]` must be of dtype "
     "float32 or float16 or bfloat16, got string."),
    ([INT], [INT], {}, TypeError, "`targets[0]` ('int:0') must be of dtype "
     "float16 or bfloat16 or float32 or float64, got int32."),
    ([T], [INT], {}, TypeError, "`sources[0]` ('int:0') must be of dtype "
     "float32 or float16 or bfloat16, got int32."),
    ([T], [D], {}, TypeError, "`sources[0]` ('D:0') must be of dtype float32 "
     "or float16 or bfloat16, got float64."),
    ([D], [T], {}, TypeError, "`sources[0]` ('T:0') must be of dtype float64, "
     "got float32."),
    ([H], [B], {}, TypeError, "`sources[0]` ('bfloat16:0') must be of dtype "
     "float16 or float32, got bfloat16."),
    ([T], [[H], [S], [B]], {}, TypeError, "`sources[2][0]` ('bfloat16:0') must "
     "be of dtype float16 or float32, got bfloat16."),
    ([T], [S], {"weights": [0.5, 0.5]}, ValueError, "`weights` must hold one "
     "weight for each of the 1 sources, got 2."),
    ([T], [S], {"weights": 1.0}, TypeError, "`weights` must be a sequence, one "
     "weight for each source, got 1.0."),
])
def test_what_the_function_refuses(targets, sources, options, error, text):
  with pytest.raises(error) as e:
    averaging_assign(targets, sources, **options)
  assert str(e.value) == text
  assert [v.numpy() for v in (S, T, U)] == [1, 0, 1]


# Shape functions


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("target, other, fits", [
    ([], [], True), ([0], [0], True), (None, [2, 3], True),
    ([2, 3], None, True), (None, None, True), ([None, 3], [2, None], True),
    ([3, 2], [2, 3], False), ([2, 3], [None, 4], False), ([1], [], False),
])
@pytest.mark.parametrize("where", ["targets[3]", "sources[1]", "tensors[1]"])
def test_shapes(ref, target, other, fits, where):
  with tf.Graph().as_default():
    handle = lambda shape: handle_of(ref, tf.float32, shape)
    # The first of each row is good.
    shapes = {name: other if name == where else target
              for name in ("targets[3]", "sources[1]", "tensors[1]")}
    targets = [handle(s) for s in ([5], target, [5], shapes["targets[3]"])]
    sources = [handle(s) for s in ([5], shapes["sources[1]"])]
    tensors = [tf1.placeholder(tf.float32, s)
               for s in ([5], shapes["tensors[1]"])]
    op = (raw.wrapopt_averaging_assign_ref if ref
          else raw.wrapopt_averaging_assign)
    builds(fits, lambda: op(targets, sources, tensors, [1., 1.], 1., N=2,
                            T=tf.float32),
           f"{where} misshapen: got {shown(other)} but expected "
           f"{shown(target)} (the shape of targets[1])")


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("dtype",
                         [tf.half, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("other",
                         [tf.half, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("where", ["targets[1]", "sources[0]", "tensors[0]"])
def test_dtypes(ref, dtype, other, where):
  fits = other == dtype or (other == tf.float32 and dtype in (tf.half,
                                                              tf.bfloat16))
  with tf.Graph().as_default():
    dtypes = {name: other if name == where else dtype
              for name in ("targets[1]", "sources[0]", "tensors[0]")}
    targets = [handle_of(ref, d, []) for d in (dtype, dtypes["targets[1]"])]
    op = (raw.wrapopt_averaging_assign_ref if ref
          else raw.wrapopt_averaging_assign)
    low = dtype in (tf.half, tf.bfloat16)
    builds(fits, lambda: op(
        targets, [handle_of(ref, dtypes["sources[0]"], [])],
        [tf1.placeholder(dtypes["tensors[0]"], [])], [1., 1.], 1., N=1,
        T=dtype),
           f"{where} must be of dtype {native_name(dtype)}, the op's"
           f"{', or float' if low else ''}, got {native_name(other)}")


# Readers


@pytest.mark.cpu("asks for addresses")
@modes.only(modes.Eager(), modes.Function())
@pytest.mark.parametrize("use_locking", [True, False])
def test_an_update_is_in_place_unless_somebody_reads(mode, use_locking):
  s, t = mode.variable([4.] * 100), mode.variable([0.] * 100)
  # The target is a source, too: it is counted once.
  update = lambda rate=0.5: mode.run(lambda: averaging_assign(  # pylint: disable=g-long-lambda-assignment
      [t], [[s], [t]], [0.5, 0.5], rate, use_locking))
  update()
  before = address(t.read_value())
  update()
  assert address(t.read_value()) == before
  held, held_source = t.read_value(), s.read_value()
  update(rate=0.)
  assert address(t.read_value()) == before
  update()
  # The reader keeps its buffer and what is in it; sources need no copy.
  assert address(held) == before
  assert held.numpy().tolist() == [1.75] * 100
  assert address(t.read_value()) != before
  assert t.numpy().tolist() == [2.3125] * 100
  assert address(s.read_value()) == address(held_source)


@pytest.mark.cpu("runs a sparse update of TensorFlow's")
@modes.only(modes.Eager(), modes.Function())
@pytest.mark.parametrize("sparse_source", [False, True])
@pytest.mark.parametrize("sparse_target", [False, True])
def test_copy_on_read_mode(mode, sparse_source, sparse_target):
  s, t = mode.variable([4., 4.]), mode.variable([0., 0.])
  if sparse_source:
    put_into_copy_on_read_mode(s)
  if sparse_target:
    put_into_copy_on_read_mode(t)
  held = [s.read_value(), t.read_value()]
  before = mode.values(held)
  mode.run(lambda: averaging_assign([t], [[s], [t]], [1, 0], rate=0.25))
  want = before[1] + (before[0] - before[1]) / 4
  assert t.numpy().tolist() == want.tolist()
  assert s.numpy().tolist() == before[0].tolist()
  assert_same_bits(mode.values(held), before)


# Threads


@pytest.mark.cpu("has threads of its own")
def test_no_update_is_lost():
  # Each adds 1 to every element of what it finds.
  size, turns, threads = 1_000_000, 50, 4
  t = tf.Variable(tf.zeros(size))
  one = tf.ones(size)

  def body():
    for _ in range(turns):
      averaging_assign([t], [[t], [one]], [1, 1])

  in_threads(*[body] * threads)
  assert np.unique(t.numpy()).tolist() == [turns * threads]
