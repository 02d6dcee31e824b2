"""XLA programs for the CPU: an op calls its kernel, which works in place."""

import re

import numpy as np
import pytest
import tensorflow as tf

import numerics
import wrapopt
from arrays import assert_same_bits
from processes import printed_by
from threads import in_threads
from wrapopt import _native
from wrapopt import ops
from xla_programs import (
    DTYPES, instructions, jit, Problem, program, RULES, SHAPES)

v1 = tf.compat.v1.train


def calls(hlo):
  """The names of what a program calls."""
  return re.findall(r'custom_call_target="(\w+)"', hlo)


def all_problems(dtypes, shapes):
  return [Problem(rule, dtypes, shapes, nesterov)
          for rule in RULES for nesterov in (False, True)
          if not nesterov or "use_nesterov?" in _native.rules()[rule].scalars]


# The numbers


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtypes", DTYPES, ids=numerics.name_of)
def test_each_rule_gives_the_bits_of_the_cpu_kernel(dtypes):
  problems = all_problems(dtypes, SHAPES)
  eager = all_problems(dtypes, SHAPES)

  @jit
  def step(args):
    for problem, of_problem in zip(problems, args):
      problem.apply(*of_problem)

  refused = [(grads, scalars, [np.float64(9)] * 2, tf.constant(False))
             for grads, scalars, _, _ in (p.args() for p in problems)]
  step(refused)  # Reads nothing of it, not even the decays.
  for problem in problems:
    problem.check_unchanged()
  args = [p.args() for p in problems]
  step(args)
  for problem, twin, of_problem in zip(problems, eager, args):
    twin.apply(*of_problem)
    assert_same_bits(problem.all_values(), twin.all_values())
    problem.check(problem.grads)
  assert calls(program(step, args)) == ["wrapopt_apply"] * len(problems)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("dtypes", DTYPES, ids=numerics.name_of)
def test_each_rule_gives_the_bits_of_the_cpu_kernel_for_rows(dtypes):
  shapes = [(5,), (5, 3), (4, 2, 2), (3, 0)]
  problems, eager = all_problems(dtypes, shapes), all_problems(dtypes, shapes)
  rng = np.random.default_rng(1)
  indices = [3, 0, 3], [2, 1], [0, 0, 0, 0], [1]
  values = [rng.standard_normal((len(i), *shape[1:])).astype(dtypes[1])
            for i, shape in zip(indices, shapes)]

  def apply(of, values, indices, args):
    for problem, (_, scalars, decays, accept) in zip(of, args):
      problem.apply([tf.IndexedSlices(v, i) for v, i in zip(values, indices)],
                    scalars, decays, accept)

  step = jit(lambda *args: apply(problems, *args))
  args = [p.args() for p in problems]
  for index_dtype in tf.int32, tf.int64:
    given = ([tf.constant(v) for v in values],
             [tf.constant(i, index_dtype) for i in indices], args)
    step(*given)
    apply(eager, *given)
    for problem, twin in zip(problems, eager):
      assert_same_bits(problem.all_values(), twin.all_values())
  assert calls(program(step, *given)) == (
      ["wrapopt_sparse_apply"] * len(problems))


@pytest.mark.parametrize("value, shadow", [
    *((d, d) for d in numerics.DTYPES), (numerics.HALF, numerics.FLOAT),
    (numerics.BFLOAT16, numerics.FLOAT)], ids=numerics.name_of)
def test_ema_update_gives_the_bits_of_the_cpu_kernel(value, shadow):
  rng = np.random.default_rng(0)
  values = [tf.Variable(np.asarray(rng.normal(size=shape)).astype(value))
            for shape in SHAPES]
  compiled, eager = (
      [[tf.Variable(np.ones(shape, shadow)) for shape in SHAPES]
       for _ in range(2)] for _ in range(2))
  update = jit(lambda d: ops.ema_update(compiled, values, [0.9, d]))
  for decay in 0.5, 0.25:
    update(tf.constant(decay, tf.float64))
    ops.ema_update(eager, values, [0.9, decay])
  assert_same_bits([s.numpy() for row in compiled for s in row],
              [s.numpy() for row in eager for s in row])
  assert calls(program(update, tf.constant(0.5, tf.float64))) == [
      "wrapopt_ema_update"]


class Lagging:
  """A table, its average and how that lags behind."""

  def __init__(self, dtype=np.float32, rows=6):
    rng = np.random.default_rng(0)
    self.table = tf.Variable(rng.normal(size=(rows, 3)).astype(dtype))
    self.average = tf.Variable(rng.normal(size=(rows, 3)).astype(np.float32))
    self.log_decays = tf.Variable(np.zeros(rows + 2))

  def apply(self, indices, decay, accept=True):
    grad = tf.IndexedSlices(tf.ones([indices.shape[0], 3], self.table.dtype),
                            indices, [6, 3])
    ops.apply("GradientDescent", {"var": [self.table]}, [grad], {"lr": 0.25},
              shadows=[[self.average]], decay=[decay], accept=accept,
              log_decays=[[self.log_decays]])

  def catch_up(self, *indices):
    ops.catch_up([self.average], [self.table], [self.log_decays], indices)

  def other_step(self, indices, decay):
    """A step of an optimizer that has no native op."""
    self.catch_up(indices)
    self.table.scatter_sub(tf.IndexedSlices(
        tf.ones([indices.shape[0], 3], self.table.dtype), indices))
    ops.sparse_ema_update([self.average], [self.table], [self.log_decays],
                          [indices], decay)

  def values(self):
    # But where the buffer of the table is.
    return [self.table.numpy(), self.average.numpy(),
            self.log_decays.numpy()[:-1]]


@pytest.mark.parametrize("on_cpu", ["call", "hlo"])
@pytest.mark.parametrize("dtype", [np.float32, numerics.BFLOAT16],
                         ids=lambda d: np.dtype(d).name)
def test_averages_that_lag_behind(dtype, on_cpu, monkeypatch):
  monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", on_cpu)
  compiled, eager = Lagging(dtype), Lagging(dtype)
  steps = [(compiled, jit(compiled.apply), jit(compiled.other_step),
            jit(compiled.catch_up)),
           (eager, eager.apply, eager.other_step, eager.catch_up)]
  decay = tf.constant(0.75, tf.float64)
  for of, apply, other_step, catch_up in steps:
    apply(tf.constant([4, 1, 4]), decay, tf.constant(True))
    apply(tf.constant([0, 0, 0]), decay, tf.constant(False))
    other_step(tf.constant([5, 1]), decay)
    # Some rows lag behind in what the other way of running hands over.
    of.apply(tf.constant([2]), decay)
    apply(tf.constant([4, 0, 4]), decay, tf.constant(True))
  if on_cpu == "call":
    assert_same_bits(compiled.values(), eager.values())
    assert compiled.log_decays.numpy().any()
  for of, _, _, catch_up in steps:
    catch_up()
    assert not of.log_decays.numpy().any()
  numerics.assert_close(
      np.float64(compiled.average.numpy()), np.float64(eager.average.numpy()),
      16 * np.finfo(np.float32).eps * np.ones((6, 3)), "average")
  _, apply, other_step, catch_up = steps[0]
  got = [calls(hlo) for hlo in (
      program(apply, tf.constant([4, 1, 4]), decay, tf.constant(True)),
      program(other_step, tf.constant([5, 1]), decay), program(catch_up))]
  assert got == ([["wrapopt_sparse_apply"], ["wrapopt_move_rows"] * 2,
                  ["wrapopt_move_rows"]] if on_cpu == "call" else [[]] * 3)


# In place


def train_step(shadow_dtype=None):
  """A step of a model, as Keras and users write it, and its state."""
  rng = np.random.default_rng(0)
  table = tf.Variable(np.float32(rng.normal(size=(9, 16))), name="table")
  kernels = [tf.Variable(np.float32(rng.normal(size=(16, 16))) / 4)
             for _ in range(6)]
  biases = [tf.Variable(np.zeros(16, np.float32)) for _ in range(6)]
  opt = wrapopt.MovingAverageOptimizer(
      v1.MomentumOptimizer(0.125, 0.5), [0.75, 0.5], shadow_dtype=shadow_dtype)

  @jit
  def step(ids, targets):
    with tf.GradientTape() as tape:
      x = tf.gather(table, ids)
      for kernel, bias in zip(kernels, biases):
        x = tf.tanh(x @ kernel + bias)
      loss = tf.reduce_mean(tf.square(x - targets))
    variables = [table, *kernels, *biases]
    opt.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

  batch = tf.constant([1, 8, 1, 3]), tf.ones([4, 16])
  step(*batch)
  return step, batch, opt


def test_a_train_step_has_one_call_for_all_its_kernels_and_copies_none():
  step, batch, opt = train_step()
  hlo = program(step, *batch, stage="optimized_hlo")
  assert sorted(calls(hlo)) == ["wrapopt_apply", "wrapopt_sparse_apply"]
  header = hlo.split("\n", 1)[0]
  # 13 variables, a velocity and two averages of each, and the table's two log
  # decays.
  assert header.count("may-alias") == 13 * 4 + 2
  for target, states in ("wrapopt_apply", 12 * 4), ("wrapopt_sparse_apply", 6):
    call, = [line for line in hlo.splitlines()
             if f'custom_call_target="{target}"' in line]
    # Each result is in the buffer of an operand.
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?\)\})", call)[1]
    assert aliases.count("(") == states
  # The table is not copied, and no kernel but the first: what that is read for
  # last is the gradient of the table, which the other call waits for.
  entry = hlo[hlo.index("\nENTRY"):]
  copied = [(shape, rest) for shape, opcode, rest in instructions(entry)
            if opcode == "copy" and re.match(r"f32\[\d+,\d+\]", shape)]
  assert all(shape.startswith("f32[16,16]") and
             re.match(r"%(arg3|copy)\.\d+\)", rest)
             for shape, rest in copied), copied
  # And none of the averages is computed by XLA.
  assert hlo.count("fusion(") < 13 * 4


def test_large_gradients_need_not_be_in_memory_at_once():
  """A call has 1 MB of them, or one variable. Small variables share a call."""
  shapes = [(512, 512), (2,), (512, 256), (512, 256), (512, 1024), (3,), (4,)]
  values = [tf.Variable(tf.ones(shape)) for shape in shapes]
  shadows = [tf.Variable(tf.zeros(shape)) for shape in shapes]

  @jit
  def step(x, decay):
    ops.apply("GradientDescent", {"var": values}, [v * x for v in values],
              {"lr": 1.0}, shadows=shadows, decay=decay)

  inputs = tf.constant(2.0), tf.constant(0.5, tf.float64)
  hlo = program(step, *inputs, stage="optimized_hlo")
  assert calls(hlo) == ["wrapopt_apply"] * 4  # Of 1, 3, 1 and 2 variables.
  assert sorted(
      re.search(r"output_to_operand_aliasing=\{(.*?\)\})", line)[1].count("(")
      for line in hlo.splitlines()
      if 'custom_call_target="wrapopt_apply"' in line) == [2, 2, 4, 6]
  step(*inputs)
  with pytest.raises(tf.errors.InvalidArgumentError, match="decays"):
    step(inputs[0], tf.constant(2.0, tf.float64))
  for variables, want in (values, -1), (shadows, -0.5):
    assert all(np.all(v.numpy() == want) for v in variables)


def test_the_check_of_copies():
  """XLA copies a kernel whose old value is wanted, and the check sees it."""
  w = tf.Variable(np.ones((8, 16), np.float32))

  @jit
  def step(grad):
    before = w.read_value()
    ops.apply("GradientDescent", {"var": [w]}, [grad], {"lr": 1.0})
    return before

  grad = tf.ones([8, 16])
  assert (step(grad).numpy() == 1).all() and (w.numpy() == 0).all()
  hlo = program(step, grad, stage="optimized_hlo")
  assert ("f32[8,16]{1,0}", "copy") in [x[:2] for x in instructions(hlo)]


def test_weights_that_are_read_before_and_after_a_step():
  w, s = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])

  @jit
  def step(grad):
    before = w.read_value()
    ops.apply("GradientDescent", {"var": [w]}, [grad], {"lr": 1.0},
              shadows=[s], decay=0.5)
    after = w.read_value()
    ops.apply("GradientDescent", {"var": [w]}, [before], {"lr": 1.0},
              shadows=[s], decay=0.5)
    return before, after, before - after, w + 0, s.read_value()

  got = step(tf.constant([1.0, 3.0]))
  assert [x.numpy().tolist() for x in got] == [
      [1, 2], [0, -1], [1, 3], [-1, -3], [-0.5, -1.75]]
  assert w.numpy().tolist() == [-1, -3] and s.numpy().tolist() == [-0.5, -1.75]


def test_a_buffer_that_somebody_else_holds_stays_as_it_is():
  w, s = tf.Variable(np.ones(4, np.float32)), tf.Variable(np.zeros(4, "f"))
  step = jit(lambda: ops.apply("GradientDescent", {"var": [w]}, [tf.ones([4])],
                               {"lr": 1.0}, shadows=[s], decay=0.5))
  held = w.read_value(), s.read_value()
  step()
  step()
  assert [x.numpy().tolist() for x in held] == [[1] * 4, [0] * 4]
  assert w.numpy().tolist() == [-1] * 4 and s.numpy().tolist() == [-0.5] * 4


def test_arrays_that_are_equal_are_not_one():
  """XLA knows that two arrays hold the same, and must not make them one."""
  names = _native.rules()["Adam"].states
  states = {name: [tf.Variable([0.0, 0.0])] for name in names}
  scalars = {"lr": 1.0, "beta1": 0.5, "beta2": 0.5, "epsilon": 0.125,
             "weight_decay": 0.0, "beta1_power": 0.5, "beta2_power": 0.5}

  def step(x):
    for (state,) in states.values():
      state.assign(x / 2)
    ops.apply("Adam", states, [x / 2], scalars)

  x = tf.constant([1.0, -4.0])
  got = []
  for run in step, jit(step):
    run(x)
    got.append([states[name][0].numpy() for name in names])
  assert_same_bits(*got)
  assert len(set(map(tuple, got[0]))) == 3


def test_a_gradient_that_is_the_variable():
  dense, table = tf.Variable([4.0, 8.0]), tf.Variable([[4.0], [8.0], [0.0]])

  @jit
  def step():
    ops.apply("GradientDescent", {"var": [dense]}, [dense.read_value()],
              {"lr": 0.25})
    # Row 1 moves by row 0, and row 0 by row 1: by what they were before.
    ops.apply("GradientDescent", {"var": [table]},
              [tf.IndexedSlices(table.read_value(), tf.constant([1, 0, 2]))],
              {"lr": 0.25})

  step()
  assert dense.numpy().tolist() == [3, 6]
  assert table.numpy().ravel().tolist() == [2, 7, 0]


def test_a_variable_that_is_a_constant_first():
  w = tf.Variable([0.0, 0.0])

  @jit
  def step():
    w.assign([4.0, 8.0])
    ops.apply("GradientDescent", {"var": [w]}, [tf.ones([2])], {"lr": 1.0})

  for _ in range(2):
    step()
    assert w.numpy().tolist() == [3, 7]


# What is known when the program runs


@pytest.mark.parametrize("sparse", [False, True])
def test_a_decay_out_of_range_changes_nothing(sparse):
  w, s = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])
  given = tf.ones([2])
  if sparse:
    given = tf.IndexedSlices(given, tf.constant([0, 1]))

  def step(decay):
    ops.apply("GradientDescent", {"var": [w]}, [given], {"lr": 1.0},
              shadows=[s], decay=decay)

  compiled = jit(step)
  for decay in 1.5, -0.5, np.nan:
    decay = tf.constant(decay, tf.float64)
    said = []
    for run in step, compiled:
      with pytest.raises(tf.errors.InvalidArgumentError) as e:
        run(decay)
      said.append(re.search(r"decays\[0\] must be in \[0, 1\], got [-\w.]+",
                            e.value.message)[0])
    assert said[0] == said[1]
    assert w.numpy().tolist() == [1, 2] and s.numpy().tolist() == [0, 0]
  compiled(tf.constant(0.5, tf.float64))
  assert w.numpy().tolist() == [0, 1] and s.numpy().tolist() == [0, 0.5]


def test_an_index_out_of_range_changes_nothing():
  # A name that a program's text must not take for its own.
  w = tf.Variable(np.ones((3, 1), np.float32), name='a"\\\n b')
  other = tf.Variable(np.ones((3, 1), np.float32), name="other")

  def step(indices):
    grads = [tf.IndexedSlices(tf.ones([2, 1], other.dtype), i)
             for i in (tf.constant([0, 1], indices.dtype), indices)]
    ops.apply("GradientDescent", {"var": [other, w]}, grads, {"lr": 1.0})

  compiled = jit(step)
  for dtype, bad in (tf.int32, 3), (tf.int32, -1), (tf.int64, 2**32 + 1):
    indices = tf.constant([0, bad], dtype)
    said = []
    for run in step, compiled:
      with pytest.raises(tf.errors.InvalidArgumentError) as e:
        run(indices)
      said.append(re.search(r"indices\[1\]\[1\] must be in .*? got -?\d+",
                            e.value.message, re.DOTALL)[0])
    assert said[0] == said[1], said
    assert f"got {bad}" in said[0]
    assert (w.numpy() == 1).all() and (other.numpy() == 1).all()
  compiled(tf.constant([0, 2]))
  assert w.numpy().ravel().tolist() == [0, 1, 0]


def test_the_number_of_rows_may_be_known_only_then():
  table = tf.Variable(np.zeros((5, 2), np.float32))

  @jit
  def step(values, indices, wanted):
    ops.apply("GradientDescent", {"var": [table]},
              [tf.IndexedSlices(tf.boolean_mask(values, wanted),
                                tf.boolean_mask(indices, wanted))],
              {"lr": 1.0})

  # What does not count is no row of the table.
  indices = tf.constant([4, 99, 1, 4])
  step(tf.ones([4, 2]), indices, tf.constant([True, False, True, True]))
  assert table.numpy()[:, 0].tolist() == [0, -1, 0, 0, -2]
  step(tf.ones([4, 2]), indices, tf.constant([False] * 4))
  assert table.numpy()[:, 0].tolist() == [0, -1, 0, 0, -2]


# Programs that run at once


def test_programs_that_run_at_once():
  # Large enough for several threads each.
  size, count = 300_000, 8

  def body():
    w = tf.Variable(np.zeros(size, np.float32))
    table = tf.Variable(np.zeros((size // 8, 8), np.float32))
    s = tf.Variable(np.zeros(size, np.float32))
    rows = tf.range(size // 8)

    @jit
    def step(grad):
      ops.apply("GradientDescent", {"var": [w]}, [grad], {"lr": 1.0},
                shadows=[s], decay=0.5)
      ops.apply("GradientDescent", {"var": [table]},
                [tf.IndexedSlices(tf.reshape(grad, table.shape), rows)],
                {"lr": 1.0})

    for _ in range(count):
      step(tf.ones([size]))
    assert (w.numpy() == -count).all() and (table.numpy() == -count).all()
    want = 0
    for i in range(1, count + 1):
      want = (want - i) / 2
    assert (s.numpy() == want).all()

  in_threads(*[body] * 4)


def test_a_function_that_is_called_at_once():
  """A call may begin with what another began with, too; none is torn."""
  w = tf.Variable(np.zeros(100_000, np.float32))
  step = jit(lambda: ops.apply("GradientDescent", {"var": [w]},
                               [tf.ones_like(w)], {"lr": 1.0}))
  step()
  in_threads(*[lambda: [step() for _ in range(10)]] * 4)
  # XLA reads variables, runs, and writes: a step may be taken from what another
  # began with. None is half of one.
  values = set(w.numpy())
  assert len(values) == 1 and -41 <= min(values) <= -11, values


# The choice


def test_the_choice(monkeypatch):
  w, s = tf.Variable([1.0]), tf.Variable([0.0])
  update = lambda: jit(lambda: ops.ema_update([s], [w], 0.5))
  for name, expected in ("", ["wrapopt_ema_update"]), (
      "call", ["wrapopt_ema_update"]), ("hlo", []):
    monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", name)
    assert calls(program(update())) == expected
  monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", "gpu")
  with pytest.raises(
      tf.errors.InvalidArgumentError,
      match="WRAPOPT_XLA_ON_CPU must be 'call' or 'hlo', got 'gpu'"):
    update()()


SAVED = """
import sys
import tensorflow as tf
import wrapopt

class Model(tf.Module):
  def __init__(self):
    self.w, self.s = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])

  @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([2])])
  def step(self, grad):
    wrapopt.ops.apply("GradientDescent", {"var": [self.w]}, [grad], {"lr": 1.0},
                      shadows=[self.s], decay=0.5)
    return self.s.read_value()

if sys.argv[2] == "save":
  tf.saved_model.save(Model(), sys.argv[1])
else:
  model = tf.saved_model.load(sys.argv[1])
  print(model.step(tf.ones([2])).numpy().tolist(), model.w.numpy().tolist())
"""


def test_a_saved_model(tmp_path):
  for what, printed in ("save", ""), ("load", "[0.0, 0.5] [0.0, 1.0]\n"):
    assert printed == printed_by("-c", SAVED, str(tmp_path / "model"), what)
