"""Averages that move in every n-th step, in tf.compat.v1.

The reference is a model in NumPy float64 over the values after steps. Averages
here are rounded three times in each update, to 2^-24 of numbers below 16.
"""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from training import GRAPH_MODES
from training import graph_of
from training import session_of
import wrapopt

v1 = tf.compat.v1

FUSED = (None, False)
TRACED = ("eager", "function", "jit")
ROWS = 6


def sgd():
  return v1.train.GradientDescentOptimizer(1.0)


def wrap(decay=0.5, inner=sgd, **kwargs):
  return wrapopt.MovingAverageOptimizer(inner(), decay, **kwargs)


def average_of(start, history, decay, every, first=1):
  """The average after each of the values.

  Args:
    start: The value before the first step.
    history: The values after steps.
    decay: A function of the number of the update, from 1.
    every: The averages move in the steps that it divides.
    first: The number of the first of these steps.
  """
  s, result = np.float64(start), []
  for t, value in enumerate(history, first):
    if t % every == 0:
      s = s + (1 - decay(t // every)) * (np.float64(value) - s)
    result.append(s)
  return result


def assert_close(got, expected, updates=10):
  np.testing.assert_allclose(got, expected, rtol=0,
                             atol=3 * updates * 16 * 2**-24)


def values_of(mode, steps, opt_of, gradient=lambda t: -1.0):
  """Trains one variable from 0; returns its values, and its averages."""
  values, averages = [], []
  graph = graph_of(mode) if mode in GRAPH_MODES else contextlib.nullcontext()
  with graph:
    if mode in GRAPH_MODES:
      w = v1.get_variable("w", initializer=[0.0, 0.0])
      g = v1.placeholder(tf.float32, [])
      opt = opt_of(w)
      op = opt.apply_gradients([(tf.fill([2], g), w)])
      decays = [d for d, _ in opt.averages_by_decay(w.graph)]
      with session_of() as session:
        for t in range(steps):
          session.run(op, {g: gradient(t)})
          value, *average = session.run([w, *[opt.average(w, d)
                                              for d in decays]])
          values.append(value[0])
          averages.append([s[0] for s in average])
    else:
      w = tf.Variable([0.0, 0.0])
      opt = opt_of(w)
      step = lambda g: opt.apply_gradients([(tf.fill([2], g), w)]) and None
      if mode != "eager":
        step = tf.function(step, jit_compile=mode == "jit", autograph=False)
      for t in range(steps):
        step(tf.constant(gradient(t), tf.float32))
        values.append(w.numpy()[0])
        averages.append([s.numpy()[0] for d, row in opt.averages_by_decay(None)
                         for _, s in row])
  return values, np.array(averages)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("mode", [*TRACED, *GRAPH_MODES])
def test_a_trajectory(mode, fused):
  # The variable is 1, 2, ..., 7. In steps 3 and 6, the average goes half of
  # the way to it: from 0 to 3/2, and from there to 15/4.
  values, averages = values_of(
      mode, 7, lambda w: wrap(0.5, fused=fused, update_every=3))
  assert values == [1, 2, 3, 4, 5, 6, 7]
  assert [s.item() for s in averages[:, 0]] == [
      0, 0, 1.5, 1.5, 1.5, 3.75, 3.75]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("mode", [*TRACED, *GRAPH_MODES])
def test_decays_count_updates(mode, fused):
  """A PowerDecay, and the limit by a count of updates."""
  noise = np.random.default_rng(0).normal(size=17).astype(np.float32)

  def opt_of(w):
    del w
    return wrap([wrapopt.PowerDecay(gamma=1), 0.9], fused=fused,
                update_every=4, num_updates=11)

  values, averages = values_of(mode, 17, opt_of, lambda t: noise[t])
  assert_close(averages[:, 0], average_of(
      0, values, lambda t: (1 - 1 / t)**2, 4))
  # 11 // 4 is 2.
  assert_close(averages[:, 1], average_of(0, values, lambda t: 3 / 12, 4))


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_global_step_as_the_count(mode, fused):
  w, count = tf.Variable([0.0]), tf.Variable(0, dtype=tf.int64)
  opt = wrap(0.9, num_updates=count, update_every=3, fused=fused)
  step = lambda: opt.apply_gradients([(-tf.ones(1), w)], count) and None
  if mode == "function":
    step = tf.function(step, autograph=False)
  for _ in range(7):
    step()
  # In step t, the count is t: decays 2/11 and 3/12 of updates 1 and 2.
  assert_close(opt.average(w).numpy()[0], average_of(
      0, range(1, 8), lambda t: min(0.9, (1 + t) / (10 + t)), 3)[-1])


@pytest.mark.parametrize("fused", FUSED)
def test_a_function_is_called_once_in_each_step(fused):
  w, calls = tf.Variable([0.0]), []
  opt = wrap(lambda: calls.append("decay") or 0.5, fused=fused, update_every=2,
             num_updates=lambda: calls.append("number") or 100)
  for _ in range(4):
    opt.apply_gradients([(-tf.ones(1), w)])
  assert sorted(calls) == ["decay"] * 4 + ["number"] * 4
  assert opt.average(w).numpy() == 2.5


@pytest.mark.parametrize("mode", TRACED)
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32,
                                   tf.float64])
def test_a_step_between_changes_no_bit(mode, dtype):
  """Also NaN, infinity, and the least numbers; with one decay and with two."""
  start = np.array([np.nan, np.inf, -0.0, 1e-7, 1], dtype.as_numpy_dtype)
  for decays in (0.5, [0.5, wrapopt.PowerDecay(gamma=0)]):
    w, empty = tf.Variable(start), tf.Variable(tf.zeros([0], dtype))
    scalar = tf.Variable(tf.cast(1, dtype))
    opt = wrap(decays, update_every=3)

    def step():
      opt.apply_gradients([(tf.ones_like(v), v) for v in (w, empty, scalar)])

    if mode != "eager":
      step = tf.function(step, jit_compile=mode == "jit", autograph=False)
    for t in range(1, 7):
      before = [s.numpy().tobytes() for s in opt.averages()]
      step()
      after = [s.numpy().tobytes() for s in opt.averages()]
      if before and t % 3 != 0:
        assert after == before, t
      elif before:
        assert after != before, t
    assert opt.average(scalar).numpy() != 1


# That a step between reads and writes no memory of an average is a test of the
# engine: Pass.LeavesAveragesOfRateZeroAlone in tests/cc. That the kernels get
# there: whoever holds the value of an average makes the next update copy it.


def address(variable):
  return np.frombuffer(memoryview(variable.read_value()),
                       np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_step_between_does_not_copy_averages(mode, fused):
  w = tf.Variable(tf.zeros([1000]))
  opt = wrap(0.5, update_every=3, fused=fused, lazy=False)
  step = lambda: opt.apply_gradients([(-tf.ones(1000), w)]) and None
  if mode == "function":
    step = tf.function(step, autograph=False)
  step()
  held = opt.average(w).read_value()  # Shares the buffer.
  for is_due in (False, True, False):
    at = address(opt.average(w))
    step()
    assert (address(opt.average(w)) != at) == is_due
  assert (held.numpy() == 0).all() and (opt.average(w).numpy() == 1.5).all()


def test_an_eager_step_between_runs_no_op_for_averages(monkeypatch):
  w, h = tf.Variable([0.0]), tf.Variable([0.0])
  opt = wrap([0.5, wrapopt.PowerDecay(gamma=0)], fused=False, update_every=3,
             num_updates=tf.Variable(5))
  steps = [lambda: opt.apply_gradients([(-tf.ones(1), w), (-tf.ones(1), h)])]
  calls = []
  monkeypatch.setattr(
      wrapopt.ops, "ema_update", lambda *args: calls.append(args))
  for _ in range(7):
    steps[0]()
    calls.append(None)
  # The third and the sixth.
  assert [i for i, call in enumerate(calls) if call] == [2, 6]


# Sparse gradients, with averages whose rows lag behind.


@pytest.mark.parametrize("lazy", [None, False])
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("mode", [*TRACED, "resource", "ref"])
def test_rows(mode, fused, lazy):
  if mode == "jit" and fused is False:
    pytest.skip("XLA cannot compile TensorFlow's sparse step")
  steps, every = 11, 3
  rng = np.random.default_rng(1)
  rows = rng.integers(0, ROWS, (steps, 3)).astype(np.int32)
  grads = rng.normal(size=(steps, 3, 2)).astype(np.float32)
  start = rng.normal(size=(ROWS, 2)).astype(np.float32)
  decays = [0.75, wrapopt.PowerDecay(gamma=2)]
  history, read = [], []
  with (graph_of(mode) if mode in GRAPH_MODES else contextlib.nullcontext()):
    opt = wrap(decays, update_every=every, fused=fused, lazy=lazy)
    apply = lambda g, i: opt.apply_gradients(
        [(tf.IndexedSlices(g, i, tf.constant([ROWS, 2])), w)])
    if mode in GRAPH_MODES:
      w = v1.get_variable("w", initializer=start)
      g, i = (v1.placeholder(tf.float32, [3, 2]),
              v1.placeholder(tf.int32, [3]))
      op = apply(g, i)
      with session_of() as session:
        for t in range(steps):
          session.run(op, {g: grads[t], i: rows[t]})
          history.append(session.run(w))
          if t % 4 == 3:  # Not in each step: rows lag behind.
            read.append((t, session.run([opt.average(w, d) for d in decays])))
    else:
      w = tf.Variable(start)
      step = lambda g, i: apply(g, i) and None
      if mode != "eager":
        step = tf.function(step, jit_compile=mode == "jit", autograph=False)
      for t in range(steps):
        step(tf.constant(grads[t]), tf.constant(rows[t]))
        history.append(w.numpy())
        if t % 4 == 3:
          read.append((t, [opt.average(w, d).numpy() for d in decays]))
      assert opt.is_lazy(w) == (lazy is None)
  for k, decay in enumerate([lambda t: 0.75, lambda t: (1 - 1 / t)**3]):
    expected = average_of(start, history, decay, every)
    for t, averages in read:
      assert_close(averages[k], expected[t])


# What is counted, saved and restored.


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_steps_that_a_gate_drops_are_not_counted(mode):
  steps = tf.Variable(0, dtype=tf.int64, trainable=False)
  w = tf.Variable([0.0])
  moving = wrap(0.5, update_every=2)
  gate = wrapopt.DropStaleGradientOptimizer(moving, 0, global_step=steps)

  def apply(recorded):
    gate.apply_gradients([(-tf.ones(1), w)], steps, recorded=recorded)

  def record():
    with gate.record_step(steps) as recorded:
      pass
    return recorded

  if mode == "function":
    def take(stale):
      @tf.function(autograph=False)
      def step():
        recorded = record()
        if stale:
          steps.assign_add(1)
        apply(recorded)
      return step
    take = {stale: take(stale) for stale in (False, True)}
  else:
    def of(stale):
      recorded = record()
      if stale:
        steps.assign_add(1)
      apply(recorded)
    take = {stale: lambda stale=stale: of(stale) for stale in (False, True)}
  averages = []
  for stale in (False, True, True, False, True, False, False):
    take[stale]()
    averages.append((w.numpy().item(), moving.average(w).numpy().item()))
  assert averages == [(1, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1),
                      (4, 2.5)]
  assert moving.average_steps().numpy() == 4


def test_an_error_counts_no_step():
  w = tf.Variable([0.0])
  opt = wrap(0.5, update_every=2)
  opt.apply_gradients([(-tf.ones(1), w)])
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
    opt.apply_gradients([(-tf.ones(3), w)])
  assert opt.average_steps().numpy() == 1
  opt.apply_gradients([(-tf.ones(1), w)])
  assert opt.average(w).numpy() == 1


def test_a_step_without_a_gradient_of_a_variable_counts():
  a, b = tf.Variable([0.0]), tf.Variable([0.0])
  opt = wrap(0.5, update_every=2)
  for pair in ([a, b], [a], [a, b], [b]):
    opt.apply_gradients([(-tf.ones(1), v) for v in pair])
  # In step 2, a moves to 2/2; in step 4, b to 3/2.
  assert [opt.average(v).numpy() for v in (a, b)] == [1, 1.5]


def test_names_are_those_of_before():
  for every, names in (1, []), (2, ["average_steps"]):
    with graph_of("resource"):
      w = v1.get_variable("w", initializer=[0.0])
      wrap(0.5, update_every=every).apply_gradients([(tf.ones(1), w)])
      assert [v.op.name for v in v1.global_variables()] == [
          "w", *names, "w/ExponentialMovingAverage"]


@pytest.mark.parametrize("kind", GRAPH_MODES)
def test_a_saver_goes_on_in_the_period(kind, tmp_path):
  noise = np.random.default_rng(2).normal(size=12)
  decay = wrapopt.PowerDecay(gamma=1)

  def train(steps, path, restored=None):
    with graph_of(kind):
      w = v1.get_variable("w", initializer=0.0)
      g = v1.placeholder(tf.float32, [])
      opt = wrap(decay, update_every=5)
      op = opt.apply_gradients([(g, w)])
      saver = v1.train.Saver()
      with session_of() as session:
        if restored:
          saver.restore(session, restored)
        for t in steps:
          session.run(op, {g: noise[t]})
        return (saver.save(session, str(tmp_path / path)),
                session.run([w, opt.average(w), opt.average_steps()]))

  whole = train(range(12), "whole")[1]
  path, state = train(range(7), "a")
  assert state[2] == 7
  assert train(range(7, 12), "b", path)[1] == whole


@pytest.mark.parametrize("fused", FUSED)
def test_a_checkpoint_goes_on_in_the_period(fused, tmp_path):
  def make():
    w = tf.Variable([0.0])
    opt = wrap(0.5, update_every=3, fused=fused)
    return w, opt, tf.train.Checkpoint(w=w, opt=opt)

  def take(w, opt, steps):
    for _ in range(steps):
      opt.apply_gradients([(-tf.ones(1), w)])

  w, opt, saved = make()
  take(w, opt, 2)
  path = saved.write(str(tmp_path / "saved"))
  w, opt, saved = make()
  saved.read(path)
  take(w, opt, 1)
  assert opt.average(w).numpy() == 1.5
  take(w, opt, 3)
  assert opt.average(w).numpy() == 3.75
  # A period begins when averages are seeded.
  take(w, opt, 1)
  opt.seed_averages()
  assert opt.average_steps().numpy() == 0 and opt.average(w).numpy() == 7
  take(w, opt, 2)
  assert opt.average(w).numpy() == 7
  take(w, opt, 1)
  assert opt.average(w).numpy() == 8.5


def test_seeding_in_a_session():
  with graph_of("resource"):
    w = v1.get_variable("w", initializer=0.0)
    opt = wrap(0.5, update_every=2)
    op = opt.apply_gradients([(-tf.ones([]), w)])
    with session_of() as session:
      session.run(op)
      opt.seed_averages(session)
      assert session.run([opt.average(w), opt.average_steps()]) == [1, 0]
      session.run(op)
      assert session.run(opt.average(w)) == 1
      session.run(op)
      assert session.run(opt.average(w)) == 2


def test_averages_in_place_in_a_step_between():
  w = tf.Variable([0.0])
  opt = wrap(0.5, update_every=2)
  step = tf.function(lambda: opt.apply_gradients([(-tf.ones(1), w)]) and None)
  step()
  step()  # The average is 1, w is 2.
  with opt.averaged_weights():
    assert w.numpy() == 1
    with pytest.raises(tf.errors.FailedPreconditionError):
      step()
  assert [w.numpy(), opt.average(w).numpy()] == [2, 1]


@pytest.mark.parametrize("make", [
    lambda opt: opt,
    lambda opt: wrapopt.CrossShardOptimizer(opt),
], ids=["alone", "cross_shard"])
def test_around_it(make):
  w = tf.Variable([0.0])
  opt = wrap(0.5, update_every=2)
  outer = make(opt)
  for _ in range(4):
    outer.apply_gradients([(-tf.ones(1), w)])
  assert opt.average(w).numpy() == 2.5


@pytest.mark.parametrize("every, error, text", [
    (0, ValueError, "`update_every` must be at least 1, got 0"),
    (-3, ValueError, "must be at least 1, got -3"),
    (2.0, TypeError, "`update_every` must be an integer, got 2.0"),
    (True, TypeError, "must be an integer, got True"),
    (None, TypeError, "must be an integer, got None"),
])
def test_bad_arguments(every, error, text):
  with pytest.raises(error, match=text):
    wrap(update_every=every)
