"""wrapopt.ops.apply and its ops: effects and errors."""

import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_same_bits
import modes
import numerics
from modes import mode  # pylint: disable=unused-import
from modes import refused
from wrapopt import _native
from wrapopt.ops import apply
from wrapopt.ops import averaging_assign
from wrapopt.ops import ema_update
from wrapopt.ops import exchange

tf1 = tf.compat.v1

RULES = sorted(name for name, rule in _native.rules().items()
               if rule.is_update)

InvalidArgument = (tf.errors.InvalidArgumentError, ValueError)


def sgd(var, grad, lr=0.5, **kwargs):
  return apply("GradientDescent", {"var": [var]}, [grad], {"lr": lr}, **kwargs)


def test_a_trajectory(mode):
  # Momentum 1/2, rate 1, gradient 1: the velocity is 1, then 1.5, so 4 becomes
  # 3, then 1.5. An average of decay 1/2 follows half way: 3.5, then 2.5.
  v, a, s = (mode.variable(np.float32([x])) for x in (4, 0, 4))
  seen = []
  for _ in range(2):
    mode.run(lambda: apply(
        "Momentum", {"var": [v], "accum": [a]}, [tf.constant([1.0])],
        {"lr": 1.0, "momentum": 0.5}, shadows=[s], decay=0.5))
    seen.append([x.item() for x in mode.values([v, a, s])])
  assert seen == [[3, 1, 3.5], [1.5, 1.5, 2.5]]


# XLA's kernels: see xla_test.
@modes.only(modes.Eager(), *modes.graphs())
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step(mode, rule, sparse):
  info = _native.rules()[rule]
  rng = np.random.default_rng(0)
  before = [rng.uniform(0.1, 1, (5, 3)).astype(np.float32) for _ in info.states]
  states = [mode.variable(x) for x in before]
  numbers = [1.0 if name.endswith("?") else x
             for name, x in zip(info.scalars, numerics.scalars(rule))]
  scalars = {name.rstrip("?"): bool(x) if name.endswith("?") else x
             for name, x in zip(info.scalars, numbers)}
  indices = [4, 1] if sparse else list(range(5))
  grad = np.zeros((5, 3), np.float32)
  grad[indices] = rng.standard_normal((len(indices), 3))

  def step():
    tensor = tf.constant(grad[indices])
    if sparse:
      tensor = tf.IndexedSlices(tensor, tf.constant(indices), [5, 3])
    return apply(rule, {name: [x] for name, x in zip(info.states, states)},
                 [tensor], scalars)

  mode.run(step)
  rows = list(range(5)) if info.all_rows else indices
  others = np.setdiff1d(range(5), rows)
  reference = numerics.reference(
      rule, [x[rows] for x in before], [grad[rows]], numbers)
  for name, got, old, (want, tolerance) in zip(
      info.states, mode.values(states), before, reference, strict=True):
    numerics.assert_close(got[rows], want, tolerance, name)
    numerics.assert_same_bits(got[others], old[others], name)


@pytest.mark.parametrize("accept", [False, True])
def test_accept(mode, accept):
  v, s = mode.variable(np.float32([1])), mode.variable(np.float32([1]))
  mode.run(lambda: sgd(v, tf.constant([1.0]), shadows=[s], decay=0.5,
                       accept=tf.constant(accept)))
  assert [x.item() for x in mode.values([v, s])] == (
      [0.5, 0.75] if accept else [1, 1])


def test_averages_of_one_variable_have_one_dtype():
  v, *shadows = (tf.Variable([1.0], dtype=dtype)
                 for dtype in (tf.float16, tf.float16, tf.float32))
  with pytest.raises(TypeError, match="The shadows of 'Variable:0' must be of "
                     "one dtype, got float16 and float32"):
    sgd(v, tf.ones([1], tf.float16), shadows=[[s] for s in shadows],
        decay=[0.5, 0.9])
  assert v.numpy() == 1


def test_what_is_refused_by_accept_is_not_looked_at(mode):
  # Not even a gradient that is not a number.
  v = mode.variable(np.float32([1, 2]))
  mode.run(lambda: sgd(v, tf.constant([np.nan, np.inf]), accept=False))
  numerics.assert_same_bits(mode.values([v])[0], np.float32([1, 2]))


def test_subnormal_numbers_are_taken_for_zero(mode):
  tiny = 2**-126  # The smallest normal number.
  v, s = (mode.variable(np.float32(x)) for x in (
      [tiny / 4, 1.5 * tiny, 3 * tiny], [tiny / 2, tiny / 2, 0]))
  mode.run(lambda: sgd(v, np.float32([0, 2.25 * tiny, 2 * tiny]), shadows=[s],
                       decay=0.5))
  got_v, got_s = mode.values([v, s])
  numerics.assert_same_bits(got_v, np.float32([0, 0, 2 * tiny]))
  numerics.assert_same_bits(got_s, np.float32([0, 0, tiny]))


def test_subnormal_gradients_of_a_row_are_taken_for_zero(mode):
  tiny = 2**-126
  v = mode.variable(np.zeros((2, 2), np.float32))
  # Three quarters of the smallest normal number, twice: they do not add up.
  grad = np.float32([[0.75 * tiny, 4 * tiny]] * 2)
  mode.run(lambda: sgd(v, tf.IndexedSlices(tf.constant(grad),
                                           tf.constant([1, 1]))))
  numerics.assert_same_numbers(mode.values([v])[0],
                               np.float32([[0, 0], [0, -4 * tiny]]))


@pytest.mark.parametrize("use_locking", [False, True])
@pytest.mark.parametrize("indices", [[1, 0, 1], [2, 0, 1]])
def test_rows(mode, indices, use_locking):
  # Duplicates add up; a row without a gradient stays.
  v = mode.variable(np.zeros((4, 2), np.float32))
  grad = np.float32([[1, 2], [3, 4], [5, 6]])
  mode.run(lambda: sgd(
      v, tf.IndexedSlices(tf.constant(grad), tf.constant(indices), [4, 2]),
      use_locking=use_locking))
  want = np.zeros((4, 2), np.float32)
  np.subtract.at(want, indices, 0.5 * grad)
  numerics.assert_same_bits(mode.values([v])[0], want)


def many_rows(dtype, index_dtype):
  """Sparse gradients: many short rows, few long ones, one row very often."""
  rng = np.random.default_rng(5)
  result = []
  for count, shape in ((70_000, (3000, 5)), (40, (9, 1300))):
    indices = rng.integers(0, shape[0], count)
    indices[rng.permutation(count)[:count // 3]] = 1
    indices[indices == 2] = 3  # No gradient for this row.
    result.append((np.asarray(rng.normal(size=(count, *shape[1:])), dtype),
                   indices.astype(index_dtype), shape))
  return result


@pytest.mark.cpu("compares the CPU's threads")
@pytest.mark.parametrize("pair, index_dtype", [
    ((numerics.FLOAT, numerics.FLOAT), np.int64),
    ((numerics.HALF, numerics.HALF), np.int32),
    ((numerics.BFLOAT16, numerics.FLOAT), np.int64),
    ((numerics.DOUBLE, numerics.DOUBLE), np.int32)],
    ids=lambda x: "-".join(d.name for d in x) if isinstance(x, tuple)
    else x.__name__)
@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("rule", ["Momentum", "Adam"])
def test_many_rows_are_summed_in_parallel_as_they_come(
    rule, use_resource, pair, index_dtype):
  dtype, grad_dtype = pair
  info = _native.rules()[rule]
  scalars = {name.rstrip("?"): False if name.endswith("?") else x
             for name, x in zip(info.scalars, numerics.scalars(rule))}
  grads = many_rows(grad_dtype, index_dtype)
  rng = np.random.default_rng(6)
  values = [[np.asarray(rng.uniform(0.1, 1, shape), dtype)
             for _, _, shape in grads] for _ in info.states]
  results = []

  def step(threads, slices):
    with modes.with_threads(use_resource, threads) as mode:
      states = [[mode.variable(x) for x in row] for row in values]
      mode.run(lambda: apply(
          rule, dict(zip(info.states, states)),
          [tf.IndexedSlices(tf.constant(x), tf.constant(i), shape)
           for x, i, shape in slices], scalars))
      results.append([x for row in states for x in mode.values(row)])

  # Sums one gradient after the other, and then each row has one gradient.
  sums = []
  for x, indices, shape in grads:
    total = np.zeros(shape, np.promote_types(grad_dtype, np.float32))
    np.add.at(total, indices, x.astype(total.dtype))
    rows = np.unique(indices)
    sums.append((total[rows], rows, shape))
  step(1, sums)
  for threads in (1, 4):
    step(threads, grads)
    assert_same_bits(results[-1], results[0])


@modes.only(*modes.UNCOMPILED)
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_the_first_of_many_indices_out_of_range(mode, index_dtype):
  v = mode.variable(np.ones((4, 2), np.float32))
  indices = np.zeros(70_000, index_dtype)
  indices[[20_000, 20_001, 60_000]] = 4, -1, 5
  refused(
      mode, [v], tf.errors.InvalidArgumentError,
      r"indices\[0\]\[20000\] must be in \[0, 4\), the rows of .*, got 4",
      lambda: sgd(v, tf.IndexedSlices(tf.ones([70_000, 2]),
                                      tf.constant(indices))))


@modes.only(*modes.UNCOMPILED)
@pytest.mark.parametrize("indices", [[1, 2, 0, 3], [1, 2, 1, 0]])
def test_a_gradient_that_is_the_variable(mode, indices):
  value = np.float32([[1, 2], [4, 8], [16, 32], [64, 128]])
  v = mode.variable(value)
  # A ref variable's value is its buffer, not a copy.
  mode.run(lambda: sgd(v, tf.IndexedSlices(tf.convert_to_tensor(v),
                                           tf.constant(indices))))
  want = value.copy()
  np.subtract.at(want, indices, 0.5 * value)
  numerics.assert_same_bits(mode.values([v])[0], want)


# XLA leaves it out: see xla_test.
@modes.only(*modes.UNCOMPILED)
@pytest.mark.parametrize("bad", [-1, 4])
def test_an_index_out_of_range(mode, bad):
  v = mode.variable(np.ones((4, 2), np.float32))
  other = mode.variable(np.ones((4, 2), np.float32))
  good = tf.IndexedSlices
  refused(
      mode, [v, other], tf.errors.InvalidArgumentError,
      rf"indices\[1\]\[1\] must be in \[0, 4\), the rows of .*, got {bad}",
      lambda: apply(
          "GradientDescent", {"var": [other, v]},
          [good(tf.ones([1, 2]), tf.constant([0]), [4, 2]),
           good(tf.ones([2, 2]), tf.constant([0, bad]), [4, 2])],
          {"lr": 1.0}))


def test_a_gradient_of_another_shape(mode):
  v, s = mode.variable(np.float32([1, 2])), mode.variable(np.float32([1, 2]))
  refused(mode, [v, s], InvalidArgument, r"grad\[0\] misshapen: got \[3\] but "
          r"expected \[2\]",
          lambda: sgd(v, tf.ones([3]), shadows=[s], decay=0.5))


def test_one_variable_twice(mode):
  v = mode.variable(np.float32([1, 2]))
  refused(mode, [v], tf.errors.InvalidArgumentError, "are one variable",
          lambda: apply("GradientDescent", {"var": [v, v]},
                        [tf.ones([2])] * 2, {"lr": 1.0}))


# Arguments in the order in which the kernel finds them: the states in the
# rule's order, whatever the dict's, and then the shadows.
IN_A_COND = {
    "apply": (("var", "rms", "mom", "shadows"), lambda var, rms, mom, shadow:
              apply("RMSProp", {"mom": [mom], "var": [var], "rms": [rms]},
                    [tf.ones([2])],
                    {"lr": 1.0, "rho": 0.5, "momentum": 0.5, "epsilon": 1.0},
                    shadows=[shadow], decay=0.5)),
    "averaging_assign": (("targets", "sources"), lambda target, source:
                         averaging_assign([target], [[source], [target]])),
    "ema_update": (("shadows", "values"), lambda shadow, value:
                   ema_update([shadow], [value], 0.5)),
    "exchange": (("a", "b"), lambda a, b: exchange([a], [b])),
}


@pytest.mark.parametrize("function, bad", [
    (function, i) for function, (arguments, _) in IN_A_COND.items()
    for i in range(len(arguments))])
@modes.only(*modes.graphs())
def test_a_variable_is_called_by_its_name_in_a_cond(mode, function, bad):
  arguments, build = IN_A_COND[function]
  variables = [
      mode.variable(np.ones(3 if i == bad else 2, np.float32),
                    name=f"called_{argument}", shape=tf.TensorShape(None))
      for i, argument in enumerate(arguments)]

  def branch():
    with tf.control_dependencies([build(*variables)]):
      return tf.constant(1)

  with modes.control_flow(v2=False):
    went = tf.cond(tf1.placeholder_with_default(True, []), branch,
                   lambda: tf.constant(0))
  with pytest.raises(tf.errors.InvalidArgumentError, match=(
      rf"{arguments[bad]}\[0\] {modes.called('called_' + arguments[bad])}")):
    mode.session.run(went)


def test_a_reader_keeps_its_value():
  v = tf.Variable([1.0, 2.0])
  for use_locking in (False, True):
    before = v.read_value()
    want = before.numpy().copy()
    sgd(v, tf.ones([2]), use_locking=use_locking)
    numerics.assert_same_bits(before.numpy(), want)
    assert (v.numpy() != want).all()


def test_what_the_function_refuses():
  v = tf.Variable([1.0])
  with pytest.raises(ValueError, match="`rule` must be one of Adadelta"):
    apply("Sgd", {"var": [v]}, [tf.ones([1])], {"lr": 1.0})
  with pytest.raises(ValueError, match=r"`rule` must be one of .*got \['x'\]"):
    apply(["x"], {"var": [v]}, [tf.ones([1])], {"lr": 1.0})
  with pytest.raises(ValueError, match=r"`grads\[0\]` must be the gradient of "
                     "'Variable:0', got None. Leave out"):
    sgd(v, None)
  with pytest.raises(TypeError, match="`grads` must be a sequence, got None"):
    apply("GradientDescent", {"var": [v]}, None, {"lr": 1.0})
  with pytest.raises(ValueError, match="one gradient for each of the 1"):
    apply("GradientDescent", {"var": [v]}, [], {"lr": 1.0})
  with pytest.raises(TypeError, match=r"`grads\[0\]` must be of dtype float32"):
    sgd(v, tf.ones([1], tf.float64))
  with pytest.raises(TypeError, match=r"states\['accum'\]\[0\]"):
    apply("Momentum",
          {"var": [v], "accum": [tf.Variable([1.0], dtype="double")]},
          [tf.ones([1])], {"lr": 1.0, "momentum": 0.5})
  with pytest.raises(ValueError, match="`states` must hold var, accum, got va"):
    apply("Momentum", {"var": [v]}, [tf.ones([1])],
          {"lr": 1.0, "momentum": 0.5})
  with pytest.raises(ValueError, match="`scalars` must hold lr, got momentum"):
    apply("GradientDescent", {"var": [v]}, [tf.ones([1])], {"momentum": 0.5})
  for lags, refused in (1, "a variable, got 1"), (v, "of dtype float64, got"):
    with pytest.raises(TypeError, match=rf"`log_decays\[0\]\[0\]` .*{refused}"):
      apply("GradientDescent", {"var": [v]}, [tf.IndexedSlices([1.0], [0])],
            {"lr": 1.0}, [[tf.Variable([1.0])]], [0.5], log_decays=[[lags]])


def test_an_average_is_checked_after_a_variable_without_one():
  v, w, average = (tf.Variable([1.0, 2.0], name=name) for name in "vwa")
  for shadows, error in (
      ([[None, tf.Variable([1.0])]], r"`shadows\[0\]\[1\]` .*shape"),
      ([[None, average], [average, None]], r"got both for .*\[0\], 'v:0'")):
    with pytest.raises(ValueError, match=error):
      apply("GradientDescent", {"var": [v, w]}, [tf.ones([2])] * 2,
            {"lr": 1.0}, shadows, [0.5] * len(shadows))
  for x in v, w, average:
    assert x.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("shape, accept, is_compiled", [
    ([None, 3], None, True), ([None, None], None, False), (None, None, False),
    (None, True, True)])
def test_xla_compiles_steps_whose_gradients_have_rows_of_a_shape(
    shape, accept, is_compiled):
  """They have any number of rows. Or the step is always accepted."""
  with tf.Graph().as_default():
    v = tf1.get_variable("v", [4, 3], use_resource=True)
    grad = tf.IndexedSlices(tf1.placeholder(tf.float32, shape),
                            tf1.placeholder(tf.int64, [None]))
    op = sgd(v, grad, accept=accept or tf1.placeholder(tf.bool, []))
    assert ("_XlaCompile" not in op.node_def.attr) == is_compiled
