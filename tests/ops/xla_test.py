"""XLA's kernels in plain HLO: the numbers of the CPU kernels, in place.

For programs that call the CPU kernels, see xla_calls_test.py.
"""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

import numerics
import wrapopt
from modes import called
from processes import printed_by
from wrapopt import _native
from wrapopt import ops
from wrapopt._loader import ops as raw
from xla_programs import (
    DTYPES, instructions, jit, Problem, program, RULES, SHAPES)

v1 = tf.compat.v1.train


@pytest.fixture(autouse=True)
def plain_hlo(monkeypatch):
  """On this CPU, what a program for another device would be."""
  monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", "hlo")


def assert_compiled(function, op, *args):
  """The op is in the program, and no array that it reads is a constant."""
  hlo = program(function, *args)
  assert f'op_type="{op}"' in hlo
  assert "custom-call" not in hlo
  for shape in re.findall(r"= \w+\[([\d,]+)\]\S* constant\(", hlo):
    assert 0 in map(int, shape.split(",")), f"a constant of shape {shape}"


def test_the_check_of_a_program():
  v = tf.Variable([0.0, 0.0])
  assign = jit(lambda x: ops.averaging_assign([v], [x]))
  assert_compiled(assign, "Wrapopt>AveragingAssign", tf.constant([1.0, 2.0]))
  with pytest.raises(AssertionError, match="Wrapopt>Exchange"):
    assert_compiled(assign, "Wrapopt>Exchange", tf.constant([1.0, 2.0]))
  assign = jit(lambda: ops.averaging_assign([v], [tf.constant([1.0, 2.0])]))
  with pytest.raises(AssertionError, match="a constant of shape 2"):
    assert_compiled(assign, "Wrapopt>AveragingAssign")


@pytest.mark.by_day(13)
@pytest.mark.parametrize("dtypes", DTYPES, ids=numerics.name_of)
@pytest.mark.parametrize("rule, nesterov", [
    (rule, nesterov) for rule in RULES for nesterov in (False, True)
    if not nesterov or "use_nesterov?" in _native.rules()[rule].scalars])
def test_a_step(rule, nesterov, dtypes):
  # Of an op on single numbers, the shape does not matter: see the next test.
  problem = Problem(rule, dtypes, [(), (2, 0), (3, 5)], nesterov)
  step = jit(problem.apply)
  step(*problem.args())
  problem.check(problem.grads)
  assert_compiled(step, "Wrapopt>Apply", *problem.args())


@pytest.mark.parametrize("rule", ["Adam", "Ftrl", "Momentum"])
def test_a_step_whose_numbers_are_known(rule):
  problem = Problem(rule, DTYPES[2], SHAPES)
  step = jit(lambda grads: problem.apply(grads, problem.scalars,
                                         problem.decays, True))
  step([tf.constant(g) for g in problem.grads])
  problem.check(problem.grads)


NOT_FINITE = (np.nan, np.inf, -np.inf)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("dtypes", [DTYPES[2], DTYPES[5]], ids=numerics.name_of)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_accepted_changes_nothing(rule, dtypes):
  for sparse in False, True:
    problem = Problem(rule, dtypes, [(3, 2)])
    grad = tf.constant(np.resize(NOT_FINITE, (3, 2)).astype(dtypes[1]))
    _, scalars, decays, refused = problem.args(accept=False)

    @jit
    def step(grad, scalars, decays, accept):
      if sparse:  # pylint: disable=cell-var-from-loop
        grad = tf.IndexedSlices(grad, tf.constant([2, 0, 2]), [3, 2])
      problem.apply([grad], scalars, decays, accept)  # pylint: disable=cell-var-from-loop

    step(grad, scalars, decays, refused)
    problem.check_unchanged()
    # The same program takes a step where it may.
    step(tf.ones_like(grad), scalars, decays, tf.constant(True))
    assert step.experimental_get_tracing_count() == 1
    for got, [want] in zip(problem.all_values(), problem.before):
      assert (got != want).any()


def test_what_is_known_not_to_be_accepted_is_not_in_the_program():
  problem = Problem("Momentum", DTYPES[2], [(3,)])
  args = problem.args()[:-1]
  step = jit(lambda *args: problem.apply(*args, accept=False))
  step(*args)
  problem.check_unchanged()
  assert "multiply" not in program(step, *args)


def sparse_grad(rng, indices, shape, dtype):
  """Rows for an array of a shape, and their sums in float64."""
  values = rng.standard_normal((len(indices), *shape[1:])).astype(dtype)
  sums = np.zeros(shape)
  within = [(i, v) for i, v in zip(indices, values) if 0 <= i < shape[0]]
  for i, v in within:
    sums[i] += np.float64(v)
  return values, sums, np.unique([i for i, _ in within]).astype(int)


def sparse_step(problem):
  """A program whose step has rows of values, and no dense gradients."""
  @jit
  def step(values, indices, _, scalars, decays, accept):
    problem.apply([tf.IndexedSlices(v, indices) for v in values], scalars,
                  decays, accept)
  return step


INDICES = {
    "one": [3],
    "none": [],
    "in any order": [4, 0, 2],
    "of one row": [2, 2, 2, 2],
    "all and more": [0, 1, 2, 3, 4, 1, 1, 0],
    "out of range": [-1, 1, 5, 1, 7, 0, 4, -2**31, 2**31 - 1],
}


@pytest.mark.by_day(3)
@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("rule", ["Adam", "Momentum"])
def test_indices(rule, indices):
  shapes = [(5,), (5, 3), (5, 2, 2)]
  problem = Problem(rule, DTYPES[2], shapes)
  rng = np.random.default_rng(1)
  values, sums, rows = zip(*[
      sparse_grad(rng, indices, shape, np.float32) for shape in shapes])
  step = sparse_step(problem)
  args = [tf.constant(v) for v in values], tf.constant(
      np.int32(indices)), *problem.args()
  step(*args)
  problem.check(sums, rows)
  assert 'op_type="Wrapopt>Apply"' in program(step, *args)


@pytest.mark.by_day(5)
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[3], DTYPES[5]],
                         ids=numerics.name_of)
@pytest.mark.parametrize("rule", RULES)
def test_a_sparse_step(rule, dtypes):
  shape = (6, 3)
  problem = Problem(rule, dtypes, [shape])
  # Of one row no more than one gradient: their sum is rounded in their order.
  values, sums, rows = sparse_grad(
      np.random.default_rng(2), [5, 1, 2], shape, dtypes[1])
  sparse_step(problem)([tf.constant(values)],
                       tf.constant([5, 1, 2], tf.int64), *problem.args())
  problem.check([sums], [rows])


@pytest.mark.parametrize("index_dtype", [tf.int32, tf.int64])
def test_an_index_that_is_wide_does_not_become_another(index_dtype):
  # 2**32 + 1 is 1 in 32 bits.
  v = tf.Variable(np.zeros((3, 1), np.float32))

  @jit
  def step(indices):
    grad = tf.IndexedSlices(tf.ones([2, 1]), indices)
    ops.apply("GradientDescent", {"var": [v]}, [grad], {"lr": 1.0})

  far = 2**32 + 1 if index_dtype == tf.int64 else 2**31 - 1
  step(tf.constant([far, 2], index_dtype))
  assert v.numpy().ravel().tolist() == [0, 0, -1]


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
@pytest.mark.parametrize("rule", ["Adam", "Momentum"])
def test_a_sparse_step_of_an_empty_variable(rule, shape):
  problem = Problem(rule, DTYPES[2], [shape])
  sparse_step(problem)([tf.ones((2, shape[1]))], tf.constant([1, 1]),
                       *problem.args())
  problem.check_unchanged()


# Shapes that are bounded, but not known


@pytest.mark.parametrize("rule", ["Adam", "Momentum"])
def test_a_sparse_gradient_of_dynamic_size(rule):
  problem = Problem(rule, DTYPES[2], [(5, 2)])

  @jit
  def step(values, indices, wanted, scalars, decays):
    # The program has room for all of them.
    problem.apply([tf.IndexedSlices(tf.boolean_mask(values, wanted),
                                    tf.boolean_mask(indices, wanted))],
                  scalars, decays, True)

  values = np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])
  indices = np.int32([4, 0, 1, 0])
  _, scalars, decays, _ = problem.args()
  wanted = np.array([True, False, True, False])
  args = (tf.constant(values), tf.constant(indices), tf.constant(wanted),
          scalars, decays)
  step(*args)
  assert "<=4" in program(step, *args)
  sums = np.zeros((5, 2))
  sums[[4, 1]] = values[[0, 2]]
  problem.check([sums], [np.array([1, 4])])
  # Another size, the same program.
  step(*args[:2], tf.constant([False] * 4), scalars, decays)
  assert step.experimental_get_tracing_count() == 1


def test_a_batch_of_dynamic_size():
  """Dense gradients have the variables' shape, whatever the batch is."""
  w = tf.Variable([[1.0], [2.0]])
  opt = wrapopt.MovingAverageOptimizer(v1.GradientDescentOptimizer(1.0), 0.5)

  @jit
  def train(batch):
    rows = tf.boolean_mask(batch, batch[:, 0] > 0)
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(rows @ w)
    opt.apply_gradients([(tape.gradient(loss, w), w)])

  train(tf.constant([[1.0, 0.25], [-9.0, 9.0], [1.0, 0.5]]))
  assert w.numpy().ravel().tolist() == [-1, 1.25]
  assert opt.average(w).numpy().ravel().tolist() == [0, 1.625]


@pytest.mark.parametrize("update, text", [
    (lambda v, x: ops.apply("GradientDescent", {"var": [v]}, [x], {"lr": 1.0}),
     r"grad\[0\]"),
    (lambda v, x: ops.averaging_assign([v], [x]), r"tensors\[0\]"),
], ids=["apply", "averaging_assign"])
def test_a_tensor_of_dynamic_size_for_a_whole_variable(update, text):
  v = tf.Variable(np.ones(3, np.float32), shape=tf.TensorShape(None))
  with pytest.raises(
      tf.errors.InvalidArgumentError,
      match=text + r" must have a shape that is known at compile time, "
      r"got f32\[<=3\]"):
    jit(lambda x: update(v, tf.boolean_mask(x, x > 0)))(
        tf.constant([1., -1, 1]))
  assert v.numpy().tolist() == [1, 1, 1]


# What is refused, in the same words as by the CPU's kernels


# A constant of which an op's shape function knows nothing, and XLA knows all.
hidden = tf.function(lambda x: x, autograph=False)


def raw_sgd(var, grad, scalars=(1.0,), shadows=(), decays=(), accept=True):
  raw.wrapopt_apply(
      [v.handle for v in (var, *shadows)], grad=[grad], indices=[],
      scalars=tf.constant(scalars, tf.float64),
      decays=hidden(tf.constant(decays, tf.float64)),
      accept=tf.constant(accept), rule="GradientDescent", NK=len(shadows),
      T=tf.float32, S=tf.float32)


def raw_averaging_assign(targets, sources, **kwargs):
  arguments = {"weights": [1.0], "rate": 1.0, **kwargs}
  raw.wrapopt_averaging_assign(
      targets=[v.handle for v in targets], sources=[v.handle for v in sources],
      tensors=[], N=len(targets), T=tf.float32,
      **{k: hidden(tf.constant(x, tf.float64)) for k, x in arguments.items()})


def sgd(variables, grads):
  ops.apply("GradientDescent", {"var": variables}, grads, {"lr": 1.0})


def rows(*shape):
  return tf.IndexedSlices(tf.ones(shape), tf.zeros(shape[:1], tf.int32))


# (sizes of float32 vectors, () for a scalar; what is refused of them).
REFUSED = {
    "shadow": ([3, 2], lambda s, v: ops.ema_update([s], [v], 0.5)),
    "shadow twice": ([2, 2, 2],
                     lambda s, v, w: ops.ema_update([s, s], [v, w], 0.5)),
    "shadow is value": ([2], lambda s: ops.ema_update([s], [s], 0.5)),
    "slot": ([2, 3], lambda v, a: ops.apply(
        "Momentum", {"var": [v], "accum": [a]}, [tf.ones([2])],
        {"lr": 1.0, "momentum": 1.0})),
    "gradient": ([2], lambda v: sgd([v], [tf.ones([3])])),
    "variable twice": ([2], lambda v: sgd([v, v], [tf.ones([2])] * 2)),
    "row": ([2], lambda v: sgd([v], [rows(1, 2)])),
    "rows of a scalar": ([()], lambda v: sgd([v], [rows(1)])),
    "shadow of a step": ([2, 3], lambda v, s: raw_sgd(
        v, tf.ones([2]), shadows=[s], decays=[0.5])),
    "decay": ([2, 2], lambda v, s: raw_sgd(
        v, tf.ones([2]), shadows=[s], decays=[1.5])),
    "decay that is no number": ([2, 2], lambda v, s: raw_sgd(
        v, tf.ones([2]), shadows=[s], decays=[np.nan])),
    "target": ([2, 3, 2],
               lambda t, u, x: ops.averaging_assign([[t], [u]], [[x]])),
    "source": ([2, 3], lambda t, x: ops.averaging_assign([t], [x])),
    "tensor": ([2], lambda t: ops.averaging_assign([t], [tf.ones([3])])),
    "target of another": ([2, 2], lambda t, u: raw_averaging_assign(
        [t, u], [u, t])),
    "rate": ([2, 2], lambda t, x: raw_averaging_assign([t], [x], rate=1.5)),
    "weight": ([2, 2], lambda t, x: raw_averaging_assign(
        [t], [x], weights=[np.inf])),
    "partner": ([2, 3], lambda a, b: ops.exchange([a], [b])),
    "partner is itself": ([2], lambda a: ops.exchange([a], [a])),
}


@pytest.mark.by_day(10)
@pytest.mark.parametrize("sizes, build", REFUSED.values(), ids=REFUSED)
def test_what_the_cpu_refuses_is_refused_in_the_same_words(sizes, build):
  # Nothing is known of their shapes while a function is traced: what refuses
  # is a kernel.
  variables = [
      tf.Variable(np.ones(size, np.float32), shape=tf.TensorShape(None),
                  name=f"v{i}") for i, size in enumerate(sizes)]
  said = []
  for run in (lambda: build(*variables), jit(lambda: build(*variables))):
    with pytest.raises(tf.errors.InvalidArgumentError) as e:
      run()
    # The rest is about where it was said.
    said.append(re.split(r"\n| \{\{function_node| \[Op:", re.sub(
        r"^\{\{function_node.*?\}\} ", "", e.value.message))[0])
  eager, compiled = said
  assert compiled == eager
  assert re.match(r"\w+(\[\d+\])? (\(variable 'v\d(/\d+)?'\) )?(misshapen: |"
                  r"must |and )", eager), eager
  for v in variables:
    assert (v.numpy() == 1).all()


def test_a_variable_that_has_no_value_yet():
  v, s = tf.Variable([1.0]), tf.Variable([1.0])
  empty = UninitializedVariable(shape=[1], dtype=tf.float32, name="empty")
  for build in (lambda: ops.ema_update([s, empty], [v, v], 0.5),
                lambda: ops.exchange([s], [empty])):
    with pytest.raises(tf.errors.FailedPreconditionError, match=(
        rf"(shadows|b)\[\d\] {called('empty')} is not initialized: run its "
        "initializer first")):
      jit(build)()
  assert v.numpy() == s.numpy() == 1


# Training


def train(compiled, make_inner, dtype, steps=3):
  """Trains a model with rows and a kernel.

  Args:
    compiled: Whether XLA compiles the step.
    make_inner: Makes the inner optimizer.
    dtype: Of the variables.
    steps: How many steps to take.

  Returns:
    What the variables, slots and averages hold, and the step's function with
    its arguments.
  """
  rng = np.random.default_rng(0)
  table = tf.Variable(tf.cast(rng.uniform(-1, 1, (7, 4)), dtype), name="table")
  kernel = tf.Variable(tf.cast(rng.uniform(-1, 1, (4, 3)), dtype),
                       name="kernel")
  bias = tf.Variable(tf.zeros([3], dtype), name="bias")
  step = tf.Variable(0, dtype=tf.int64)
  opt = wrapopt.MovingAverageOptimizer(
      make_inner(), [0.75, 0.5], num_updates=step, shadow_dtype=tf.float32)

  @tf.function(jit_compile=compiled)
  def take(ids, labels):
    with tf.GradientTape() as tape:
      hidden = tf.tanh(tf.nn.embedding_lookup(table, ids))
      loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(
          labels=labels, logits=hidden @ kernel + bias))
    variables = [table, kernel, bias]
    opt.apply_gradients(zip(tape.gradient(loss, variables), variables),
                        global_step=step)
    return loss

  batch = tf.constant([1, 6, 1]), tf.constant([0, 2, 1])
  for _ in range(steps):
    take(*batch)
  assert step.numpy() == steps
  state = [table, kernel, bias, *sorted(opt.variables(),
                                        key=lambda v: v.name)]
  assert opt.is_lazy(table) == (not _native.rules()[
      type(make_inner()).__name__.removesuffix("Optimizer")].all_rows)
  return [tf.cast(v, tf.float64).numpy() for v in state], take, batch


INNER = {
    "Adam": lambda: v1.AdamOptimizer(0.125, 0.5, 0.75, epsilon=0.125),
    "Momentum": lambda: v1.MomentumOptimizer(0.125, 0.5, use_nesterov=True),
    "Ftrl": lambda: v1.FtrlOptimizer(0.125),
}


@pytest.mark.by_day(0)
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32, tf.float64],
                         ids=lambda d: d.name)
@pytest.mark.parametrize("rule", INNER)
def test_moving_average_optimizer_in_one_program(rule, dtype):
  want, _, _ = train(False, INNER[rule], dtype)
  got, step, batch = train(True, INNER[rule], dtype)
  # The gradients are XLA's too: all are of order 1, and so is what is summed.
  eps = float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)
  for i, (g, w) in enumerate(zip(got, want, strict=True)):
    numerics.assert_close(g, w, 64 * eps * np.ones_like(w), i)

  hlo = program(step, *batch, stage="optimized_hlo")
  for op in "Wrapopt>Apply", "Tanh", "TanhGrad":
    assert f'op_type="{op}"' in hlo, op
  for host in ("custom-call", "infeed", "outfeed", "send(", "recv("):
    assert host not in hlo
  header = hlo.split("\n", 1)[0]
  # And the step, and what tells how the averages of the table lag behind.
  lazy = not _native.rules()[rule].all_rows
  assert header.count("may-alias") == len(got) + 1 + 2 * lazy


@pytest.mark.parametrize("rule", RULES)
def test_variables_are_written_in_place(rule):
  problem = Problem(rule, DTYPES[2], [(3, 5)])
  step = jit(lambda grads: problem.apply(grads, problem.scalars,
                                         problem.decays, True))
  hlo = program(step, [tf.constant(g) for g in problem.grads],
                stage="optimized_hlo")
  assert hlo.split("\n", 1)[0].count("may-alias") == len(problem.all_values())
  # Not by a copy of each: only a state whose old value is wanted beside its new
  # one has one, as Ftrl's accumulator. Some other state is not so.
  assert hlo.count(" copy(") < len(problem.names)


def passes(hlo, rows):
  """Instructions of an optimized program that go over so many rows.

  Those that change some rows in place do not, nor the body of a loop, which
  makes the sums of log decays smaller once in thousands of steps.
  """
  roots = {name: instructions(body)[-1][1] for name, body in re.findall(
      r"^%(\S+) \(.*?\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)}
  found = []
  for shape, kind, what in instructions(hlo[hlo.index("ENTRY"):]):
    if kind == "fusion":
      kind = roots[re.search(r"calls=%([\w.-]+)", what)[1]]
    if re.search(rf"\[({rows}|{rows + 2})[,\]]", shape) and kind not in (
        "parameter", "bitcast", "tuple", "dynamic-update-slice", "scatter",
        "while"):
      found.append(f"{shape} {kind}")
  return found


LAZY = {
    "GradientDescent": lambda: v1.GradientDescentOptimizer(0.125),
    "Momentum": INNER["Momentum"],
    "Adagrad": lambda: v1.AdagradOptimizer(0.125),
    "LazyAdam": lambda: wrapopt.LazyAdamOptimizer(0.125),
}


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64],
                         ids=lambda d: d.name)
@pytest.mark.parametrize("rule, decays", [
    *itertools.product(LAZY, ([0.5], [0.5, 0.75])), ("LazyAdam", [])])
def test_a_step_of_rows_costs_its_rows(rule, decays, dtype):
  table = tf.Variable(tf.ones([1000, 8], dtype))
  opt = LAZY[rule]()
  if decays:
    opt = wrapopt.MovingAverageOptimizer(opt, decays)

  @jit
  def step(grad, indices):
    opt.apply_gradients([(tf.IndexedSlices(grad, indices, [1000, 8]), table)])

  batch = tf.ones([16, 8], dtype), tf.constant([3] * 4 + [*range(12)])
  step(*batch)
  hlo = program(step, *batch, stage="optimized_hlo")
  assert passes(hlo, 1000) == []
  # The table, its averages and their log decays.
  assert hlo.count("may-alias") >= 1 + 2 * len(decays)
  # The old rows of the table have one user: XLA may fuse a gather into each of
  # its users, and copies the table for one that comes after the write.
  hlo = program(step, *batch)
  table_in_hlo = re.search(r"(%\S+) = \w+\[1000,8\]\S* parameter", hlo)[1]
  [old] = re.findall(rf"(%\S+) = \S+ gather\(\S+ {table_in_hlo},", hlo)
  assert len(re.findall(rf" {old}[,)]", hlo)) == 1


def test_passes_over_rows_are_found():
  table = tf.Variable(tf.ones([1000, 8]))

  @jit
  def step():
    table.assign(table * 2)

  assert len(passes(program(step, stage="optimized_hlo"), 1000)) == 1


AUTOCLUSTERED = """
import sys
import numpy as np
import tensorflow as tf
import wrapopt

v1 = tf.compat.v1
make = lambda: wrapopt.MovingAverageOptimizer(
    v1.train.MomentumOptimizer(0.25, 0.5), 0.5)
def loss_of(w, e):
  return (tf.reduce_sum(tf.square(w)) +
          tf.reduce_sum(tf.square(tf.gather(e, [0, 2, 0])))) / 2
start = np.float32([1, 2, 3])
if sys.argv[1] == "function":
  w, e, opt = tf.Variable(start), tf.Variable(start), make()
  @tf.function
  def step():
    with tf.GradientTape() as tape:
      loss = loss_of(w, e)
    opt.apply_gradients(zip(tape.gradient(loss, [w, e]), [w, e]))
  for _ in range(2):
    step()
  values = [x.numpy() for x in (w, e, opt.average(w), opt.average(e))]
else:
  with tf.Graph().as_default():
    use_resource = sys.argv[1] == "session"
    w, e = (v1.get_variable(n, initializer=start, use_resource=use_resource)
            for n in "we")
    opt = make()
    step = opt.minimize(loss_of(w, e))
    with v1.Session() as session:
      session.run(v1.global_variables_initializer())
      for _ in range(2):
        session.run(step)
      values = session.run([w, e, opt.average(w), opt.average(e)])
print([value.tolist() for value in values])
"""
CLUSTERS = ("--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit "
            "--tf_xla_min_cluster_size=1")


@pytest.mark.by_day(0)
@pytest.mark.parametrize("mode", ["function", "session", "ref session"])
def test_autoclustering(mode, tmp_path):
  printed = printed_by(
      "-c", AUTOCLUSTERED, mode, TF_XLA_FLAGS=CLUSTERS,
      WRAPOPT_XLA_ON_CPU="",
      XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
  # 1: the velocity is 1, then 3/4 + 1/2, so 1 goes to 3/4 and 7/16, and its
  # average to 7/8 and 21/32. Row 0 has its gradient twice: 2, then 1 + 1.
  w, e = np.float64([7, 14, 21]) / 16, np.float64([0, 32, 21]) / 16
  averages = [np.float64([21, 42, 63]) / 32, np.float64([12, 64, 63]) / 32]
  assert printed == f"{[x.tolist() for x in (w, e, *averages)]}\n"
  types = set()
  for path in tmp_path.glob("*before_optimizations.txt"):
    types.update(re.findall(r'op_type="([^"]*)"', path.read_text()))
  # XLA compiles no op on a ref variable; it compiles the others.
  assert types
  # A read of an average of rows brings it up to date, in eager mode compiled,
  # too.
  types.discard("Wrapopt>ReadAverages")
  assert ({t for t in types if t.startswith("Wrapopt>")} ==
          (set() if mode == "ref session" else {"Wrapopt>Apply"}))


LATER = """
import os
import tensorflow as tf
import wrapopt
import wrapopt.keras
import keras

v1 = tf.compat.v1
from_the_start = "auto_jit" in os.environ["TF_XLA_FLAGS"]
def momentum():
  return v1.train.MomentumOptimizer(0.25, 0.5)
MAKE = {
    "Apply": lambda: wrapopt.MovingAverageOptimizer(momentum(), [0.5, 0.75]),
    "EmaUpdate": lambda: wrapopt.MovingAverageOptimizer(
        v1.train.ProximalGradientDescentOptimizer(0.25), 0.5),
    "ScheduleFree": lambda: wrapopt.ScheduleFreeOptimizer(
        v1.train.GradientDescentOptimizer(0.25)),
    "gate": lambda: wrapopt.DropStaleGradientOptimizer(
        wrapopt.MovingAverageOptimizer(momentum(), 0.5), 3, policy="scale"),
}
START = [1.0, 2.0, 4.0]
def loss_of(v):
  return tf.reduce_sum(tf.square(v)) / 2

def in_a_session(make, level):
  with tf.Graph().as_default() as graph:
    v = v1.get_variable("v", initializer=START, use_resource=True)
    opt, step = make(), v1.train.get_or_create_global_step()
    if hasattr(opt, "record_step"):
      with opt.record_step():
        loss = loss_of(v)
    else:
      loss = loss_of(v)
    train = opt.minimize(loss, global_step=step)
    assert from_the_start == ("Wrapopt>BundleByName" not in {
        op.type for op in graph.get_operations()})
    config = v1.ConfigProto()
    config.graph_options.optimizer_options.global_jit_level = level
    with v1.Session(config=config) as session:
      session.run([v1.global_variables_initializer(),
                   v1.local_variables_initializer()])
      for _ in range(3):
        session.run(train)
      return [x.tolist() for x in session.run(v1.global_variables())]

for name, make in MAKE.items():
  want = in_a_session(make, v1.OptimizerOptions.OFF)
  got = in_a_session(make, v1.OptimizerOptions.DEFAULT if from_the_start
                     else v1.OptimizerOptions.ON_2)
  assert got == want, (name, got, want)

def in_a_function(make):
  opt, v = make(), tf.Variable(START, name="v")
  @tf.function
  def train():
    with tf.GradientTape() as tape:
      loss = loss_of(v)
    opt.apply_gradients([(tape.gradient(loss, v), v)])
  def step():
    train()
    return [v.numpy().tolist(), *sorted(
        str(x.numpy().tolist()) for x in opt.variables())]
  return step

def in_fit(make):
  model = keras.Sequential([keras.Input([2]), keras.layers.Dense(
      1, kernel_initializer="ones")])
  model.compile(make(keras.optimizers.SGD(0.25)), "mse", jit_compile=False)
  def fit():
    x = tf.constant([[1.0, 0.5], [0.5, 1.0]])
    model.fit(x, tf.zeros([2, 1]), batch_size=1, shuffle=False, verbose=0)
    store = {}
    model.optimizer.save_own_variables(store)
    return [x.tolist() for x in [*model.get_weights(), *store.values()]]
  return fit

K = wrapopt.keras
def behind_a_gate(make):
  averages, v = make(), tf.Variable(START, name="v")
  opt = wrapopt.DropStaleGradientOptimizer(averages, 3)
  count = tf.Variable(0, dtype=tf.int64, name="count")
  @tf.function
  def train():
    with opt.record_step(count), tf.GradientTape() as tape:
      loss = loss_of(v)
    opt.apply_gradients([(tape.gradient(loss, v), v)], global_step=count)
  def step():
    train()
    return [v.numpy().tolist(), averages.average(v).numpy().tolist()]
  return step

twins = [(in_a_function(make), in_a_function(make))
         for name, make in MAKE.items() if name != "gate"]
# A gate takes the one of two passes in a tf.cond.
twins += [(behind_a_gate(MAKE[name]), behind_a_gate(MAKE[name]))
          for name in ("Apply", "EmaUpdate")]
twins += [(in_fit(make), in_fit(make)) for make in (
    lambda inner: K.MovingAverage(inner, 0.5),
    lambda inner: K.SWA(inner, average_period=1),
    lambda inner: K.Lookahead(inner, 2),
    lambda inner: K.ScheduleFree(inner))]
for twin, later in twins:
  tf.config.run_functions_eagerly(from_the_start)
  twin()
  tf.config.run_functions_eagerly(False)
  later()
tf.config.run_functions_eagerly(from_the_start)
want = [twin() for twin, _ in twins]
tf.config.run_functions_eagerly(False)
if not from_the_start:
  tf.config.optimizer.set_jit(True)
print(*[str(later()) == str(w) for (_, later), w in zip(twins, want)])
"""


@pytest.mark.parametrize("how", ["later", "file"])
def test_autoclustering_that_is_switched_on(how, tmp_path):
  # By a session, after a function was traced, after a fit; or by a file.
  flags = "--tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1"
  if how == "file":
    (tmp_path / "auto_jit").write_text(
        "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit "
        "--tf_xla_min_cluster_size=2")
    flags = str(tmp_path / "auto_jit")
  assert printed_by(
      "-c", LATER, WRAPOPT_XLA_ON_CPU="", TF_XLA_FLAGS=flags,
      XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
  ) == " ".join(["True"] * 9) + "\n"
  # XLA compiled the rest of the programs.
  hlo = "".join(path.read_text() for path in
                tmp_path.glob("*before_optimizations.txt"))
  assert 'op_type="AssignAddVariableOp"' in hlo
  # And our ops where they take no bundle: in the branches of Keras's fit, and
  # all if it is on from the start. Which it must not compile, see bundle_test.
  if how == "file":
    for op in "Apply", "EmaUpdate":
      assert f'op_type="Wrapopt>{op}"' in hlo


IN_BRANCHES = """
import keras
import tensorflow as tf
import wrapopt.keras

K, scaled = wrapopt.keras, keras.optimizers.LossScaleOptimizer
def sgd():
  return keras.optimizers.SGD(0.25)
def steps_of(opt):
  v = [keras.Variable([1.0, 2.0]), keras.Variable([[3.0]])]
  opt.build(v)
  step = tf.function(lambda g: opt.apply([g, g[None, :1]], v))
  def steps(n):
    for _ in range(n):
      step(tf.constant([64.0, 32.0]))
    return [x.numpy().tolist() for x in [*v, *opt.variables]]
  return steps

makers = [lambda: K.Lookahead(scaled(sgd(), initial_scale=8.0), 2),
          lambda: scaled(K.Lookahead(sgd(), 2), initial_scale=8.0),
          lambda: scaled(K.MovingAverage(sgd(), 0.5), initial_scale=8.0)]
pairs = [(steps_of(make()), steps_of(make())) for make in makers]
want = [(steps(1), steps(4), later(1))[1] for steps, later in pairs]
tf.config.optimizer.set_jit(True)
print(*[later(4) == w for (_, later), w in zip(pairs, want)])
"""


def test_autoclustering_of_branches_that_is_switched_on_later():
  assert printed_by("-c", IN_BRANCHES, WRAPOPT_XLA_ON_CPU="",
                    TF_XLA_FLAGS="--tf_xla_cpu_global_jit"
                    ) == "True True True\n"


GATED = """
import tensorflow.compat.v1 as tf
import wrapopt

with tf.Graph().as_default():
  w = tf.get_variable("w", initializer=[[1.0, 2.0]], use_resource=True)
  limit = tf.get_variable("limit", initializer=0, trainable=False)
  step = tf.train.get_or_create_global_step()
  opt = wrapopt.DropStaleGradientOptimizer(
      tf.train.GradientDescentOptimizer(0.25), limit, policy="scale")
  with opt.record_step():
    loss = tf.reduce_sum(tf.square(w))
  train = opt.minimize(loss, global_step=step)
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    # XLA compiles the first of all, and what comes again.
    for value in (-1, 0, 0, -1, -1, -1):
      session.run(limit.assign(value))
      session.run(train)
      print(session.run(w).ravel().tolist())
"""


def test_autoclustering_of_a_gate_that_holds_gradients_back():
  # A step that is dropped has gradients of another shape.
  printed = printed_by("-c", GATED, TF_XLA_FLAGS=CLUSTERS,
                       WRAPOPT_XLA_ON_CPU="")
  assert printed.splitlines() == [
      "[1.0, 2.0]", "[0.5, 1.0]", "[0.25, 0.5]", *["[0.25, 0.5]"] * 3]


LATE = """
import tensorflow as tf
assert tf.function(lambda x: x * 2, jit_compile=True)(tf.ones([])) == 2
import wrapopt
s, v = tf.Variable([1.0]), tf.Variable([1.0])
states = {"var": [v], "accum": [tf.Variable([0.0])]}
@tf.function(jit_compile=True)
def step(grad):
  wrapopt.ops.apply("Momentum", states, [grad], {"lr": 1.0, "momentum": 0.5},
                    shadows=[s], decay=0.5)
  wrapopt.ops.apply(
      "Momentum", states, [tf.IndexedSlices(grad, tf.constant([0]))],
      {"lr": 1.0, "momentum": 0.5})
  wrapopt.ops.ema_update([s], [v], 0.5)
  wrapopt.ops.averaging_assign([s], [[s], [v]])
  wrapopt.ops.exchange([s], [v])
step(tf.constant([1.0]))
# 1 goes to 0 and its average to 0.5; the next step's velocity is 1.5, and then
# the average goes to -0.5, and half of the way again.
print(v.numpy(), s.numpy())
print(step.experimental_get_compiler_ir(tf.constant([1.0]))("hlo"))
"""


def test_a_library_that_is_loaded_after_the_first_compilation():
  printed = printed_by("-c", LATE, WRAPOPT_XLA_ON_CPU="")
  values, hlo = printed.split("\n", 1)
  assert values == "[-1.] [-1.5]"
  assert set(re.findall(r'op_type="(Wrapopt>\w+)"', hlo)) == {
      f"Wrapopt>{name}" for name in ("Apply", "EmaUpdate", "AveragingAssign")}
