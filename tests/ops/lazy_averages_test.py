"""Averages of which a step moves only the touched rows."""

import contextlib
import itertools
import threading
import warnings

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import tensorflow as tf
import wrapopt

from arrays import assert_close, assert_same_bits, values as values_of
import modes
from modes import mode  # pylint: disable=unused-import
import numerics
from training import in_mode, type_of
from wrapopt import _loader
from wrapopt._averages import _may_be_lazy

tf1 = tf.compat.v1
ops = wrapopt.ops

ROWS, COLUMNS = 7, 3
DECAYS = [0.9, 0.0, 1.0]
MODES = [modes.Eager(), modes.Function(), modes.Jit(), modes.Graph(True)]

# Inner optimizers that leave rows alone which a sparse gradient lacks.
INNER = {
    "sgd": lambda: tf1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.5, 0.9),
    "adagrad": lambda: tf1.train.AdagradOptimizer(0.5),
    "adadelta": lambda: tf1.train.AdadeltaOptimizer(0.5),
    "ftrl": lambda: tf1.train.FtrlOptimizer(0.5),
    "rms_prop": lambda: tf1.train.RMSPropOptimizer(0.5),
    "lazy_adam": lambda: wrapopt.LazyAdamOptimizer(0.5),
}


# The fake GPU has no kernel of TensorFlow's. In a session these need none, in
# other modes "sgd" needs none.
_ON_GPU = ("sgd", "momentum", "rms_prop")


def _cpu_unless(on_gpu):
  return () if on_gpu else (pytest.mark.cpu("takes TensorFlow's kernels"),)


def table(dtype="float32"):
  return np.linspace(-1, 1, ROWS * COLUMNS).reshape(
      ROWS, COLUMNS).astype(dtype)


def gradient(step, count=4):
  """(values, indices) of a step: some rows, one of them twice."""
  rng = np.random.default_rng(step)
  indices = rng.integers(0, ROWS, count)
  indices[-1] = indices[0]
  return rng.normal(size=(count, COLUMNS)).astype(np.float32), indices


class Training:
  """Steps of an optimizer in a mode, and what its variable was after each."""

  def __init__(self, mode, opt, variable):
    self._mode, self.opt, self.variable = mode, opt, variable
    self.history = []
    if isinstance(mode, modes.Graph):
      values = tf1.placeholder(variable.dtype, [None, COLUMNS])
      indices = tf1.placeholder(tf.int64, [None])
      self._sparse = values, indices, self._apply(values, indices)
      mode.session.run(tf1.global_variables_initializer())
      self._sparse_step = None
    else:
      def sparse(values, indices):
        self._apply(values, indices)

      def dense(values):
        opt.apply_gradients([(values, variable)])

      self._sparse_step, self._dense_step = (
          in_mode(f, mode.name) for f in (sparse, dense))

  def _apply(self, values, indices):
    return self.opt.apply_gradients(
        [(tf.IndexedSlices(values, indices, [ROWS, COLUMNS]), self.variable)])

  def sparse(self, values, indices):
    if self._sparse_step is None:
      feed_values, feed_indices, op = self._sparse
      self._mode.session.run(op, {feed_values: values, feed_indices: indices})
    else:
      self._sparse_step(tf.constant(values, self.variable.dtype),
                        tf.constant(indices))
    self._record()

  def dense(self, values):
    self._dense_step(tf.constant(values, self.variable.dtype))
    self._record()

  def _record(self):
    [value] = self._mode.values([self.variable])
    self.history.append(value.astype(np.float64))

  def averages(self, start, decays):
    """What the averages of the recorded values are: in float64."""
    result = []
    for k, decay in enumerate(decays):
      average = start.astype(np.float64)
      for t, value in enumerate(self.history):
        average += (1 - (decay(t) if callable(decay) else decay)) * (
            value - average)
      result.append(average)
    return result


def raw(mode, variable):
  """What an average holds, whether or not it is up to date."""
  with contextlib.nullcontext() if mode.name != "graph" else (
      mode.graph.as_default()), tf.device(variable.device):
    value = tf.raw_ops.ReadVariableOp(resource=variable.rows.handle,
                                      dtype=variable.dtype)
  return mode.session.run(value) if mode.name == "graph" else value.numpy()


@pytest.mark.by_day(15)
@pytest.mark.parametrize(
    "inner, fused, mode",
    [pytest.param(inner, fused, mode, marks=_cpu_unless(
        fused is None and inner in (
            _ON_GPU if mode.name == "graph" else _ON_GPU[:1])))
     for inner in INNER for fused in (None, False) for mode in MODES
     # The others' sparse steps XLA has from this package only.
     if fused is None or mode.name != "jit" or inner in ("sgd", "lazy_adam")],
    ids=lambda x: getattr(x, "name", str(x)), indirect=["mode"])
def test_rows_move_and_the_others_catch_up(mode, inner, fused):
  w = mode.variable(table(), name="w")
  opt = wrapopt.MovingAverageOptimizer(INNER[inner](), DECAYS, fused=fused)
  training = Training(mode, opt, w)
  start = table()
  for t in range(6):
    before = ([raw(mode, opt.average(w, d)) for d in DECAYS] if t else
              [start] * 3)
    values, indices = gradient(t)
    training.sparse(values, indices)
    assert opt.is_lazy(w)
    untouched = np.setdiff1d(np.arange(ROWS), indices)
    assert len(untouched)
    for was, decay in zip(before, DECAYS):
      now = raw(mode, opt.average(w, decay))
      numerics.assert_same_bits(now[untouched], was[untouched])
    touched = np.unique(indices)
    np.testing.assert_allclose(
        raw(mode, opt.average(w, 0.9))[touched],
        training.averages(start, [0.9])[0][touched], rtol=1e-5, atol=1e-6)
  got = mode.values([opt.average(w, d) for d in DECAYS])
  assert_close(got, training.averages(start, DECAYS), rtol=1e-5, atol=1e-6)
  # Exact at the ends.
  numerics.assert_same_bits(got[1], mode.values([w])[0])
  numerics.assert_same_bits(got[2], start)


def test_a_traced_dense_step_keeps_the_average_dense():
  w = tf.Variable(table())
  opt = wrapopt.MovingAverageOptimizer(INNER["sgd"](), 0.9)
  training = Training(modes.Function(), opt, w)
  training.dense(table())
  training.sparse(*gradient(0))
  assert not opt.is_lazy(w)
  training.dense(table())
  np.testing.assert_allclose(opt.average(w), training.averages(
      table(), [0.9])[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shadow_dtype", [None, tf.float32])
@modes.only(*MODES)
def test_dtypes(mode, dtype, shadow_dtype):
  dtype = tf.as_dtype(dtype)
  w = mode.variable(tf.cast(table(), dtype) if mode.name != "graph" else
                    table().astype(dtype.as_numpy_dtype), name="w")
  opt = wrapopt.MovingAverageOptimizer(INNER["sgd"](), 0.9,
                                       shadow_dtype=shadow_dtype)
  training = Training(mode, opt, w)
  for t in range(5):
    training.sparse(*gradient(t))
  assert opt.is_lazy(w)
  [got] = mode.values([opt.average(w)])
  assert got.dtype == (shadow_dtype.as_numpy_dtype if shadow_dtype and
                       dtype.size == 2 else dtype.as_numpy_dtype)
  coarse = got.dtype.itemsize == 2
  np.testing.assert_allclose(
      got.astype(np.float64),
      training.averages(np.asarray(tf.cast(tf.cast(table(), dtype), tf.float64))
                        if mode.name != "graph" else
                        table().astype(dtype.as_numpy_dtype), [0.9])[0],
      rtol=3e-2 if coarse else 1e-5, atol=3e-2 if coarse else 1e-6)


def test_5000_steps_are_more_exact_than_dense_ones():
  rows, steps, count = 40, 5000, 4
  rng = np.random.default_rng(0)
  indices = rng.integers(0, rows, [steps, count])
  values = 0.01 * rng.normal(size=[steps, count, 2]).astype(np.float32)
  decays = np.minimum(0.9999, (1 + np.arange(steps)) / (10 + np.arange(steps)))
  start = rng.normal(size=[rows, 2]).astype(np.float32)
  w, lazy, dense = (tf.Variable(start) for _ in range(3))
  log_decays = tf.Variable(tf.zeros([rows + 2], tf.float64))

  @tf.function
  def run():
    for t in tf.range(steps):
      decay = tf.constant(decays)[t]
      ops.apply("GradientDescent", {"var": [w]},
                [tf.IndexedSlices(tf.constant(values)[t],
                                  tf.constant(indices)[t])],
                {"lr": 0.5}, [lazy], decay, log_decays=[[log_decays]])
      ops.ema_update([dense], [w], decay)

  run()
  ops.catch_up([lazy], [w], [log_decays])
  value, want = start.copy(), start.astype(np.float64)
  for t in range(steps):
    total = np.zeros_like(value)
    np.add.at(total, indices[t], values[t])
    value -= np.float32(0.5) * total
    want += (1 - decays[t]) * (value - want)
  np.testing.assert_array_equal(w, value)
  error = [np.abs(x.numpy() - want).max() for x in (lazy, dense)]
  assert error[0] <= error[1] < 1e-4
  assert not np.any(log_decays)


@hypothesis.given(
    lags=strategies.lists(strategies.floats(-900, 0), min_size=1, max_size=80))
@hypothesis.settings(max_examples=50, deadline=None)
def test_the_rate_of_a_lag(lags):
  n = len(lags)
  with tf.device(modes.VARIABLES):
    shadow = tf.Variable(np.zeros([n, 1]))
    value = tf.Variable(np.ones([n, 1]))
    log_decays = tf.Variable(np.array([-1 - x for x in lags] + [-1.0, 0.0]))
  ops.catch_up([shadow], [value], [log_decays])
  want = -np.expm1(-1.0 - np.array([-1 - x for x in lags]))
  np.testing.assert_allclose(shadow.numpy()[:, 0], want, rtol=4e-16)
  assert not np.any(log_decays.numpy())


def test_subnormal_numbers_are_taken_for_zero():
  """In Python's own thread, which keeps them."""
  tiny = 2**-126  # The smallest normal number.
  shadow, value = (tf.Variable(np.float32([x]).T) for x in (
      [tiny / 2, 3 * tiny, tiny], [0, 0, tiny / 2]))
  log_decays = tf.Variable([0, 0, 0, np.log(0.5), 0], dtype=tf.float64)
  ops.catch_up([shadow], [value], [log_decays])
  # The last: half of the distance to zero is subnormal, so it does not move.
  numerics.assert_same_bits(shadow.numpy()[:, 0],
                            np.float32([0, 1.5 * tiny, tiny]))


# Reading. both/averages_test.py has files of whole tables.


def test_savers_of_a_partitioned_table(tmp_path):
  value = np.full([ROWS, COLUMNS], 0.5)
  average, step = value + 1, np.zeros([ROWS, COLUMNS])
  step[1], step[4] = 1, 0.5
  with tf.Graph().as_default(), tf1.Session() as session:
    w = tf1.get_variable(
        "w", [ROWS, COLUMNS], use_resource=True,
        partitioner=tf1.fixed_size_partitioner(3),
        initializer=tf1.constant_initializer(0.5))
    opt = wrapopt.MovingAverageOptimizer(INNER["sgd"](), 0.9)
    train = opt.minimize(tf.reduce_sum(tf.nn.embedding_lookup(w, [1, 1, 4])))
    shadows = opt.average(list(w))
    # Elsewhere than the values, so that each step moves all rows of an average.
    away = [s.assign_add(tf.ones_like(s), read_value=False) for s in shadows]
    session.run(tf1.global_variables_initializer())
    session.run(away)
    history = [value - (n + 1) * step for n in range(5)]
    want = list(itertools.accumulate(
        history, lambda s, v: s + 0.1 * (v - s), initial=average))

    def run(steps):
      for _ in range(steps):
        session.run(train)

    run(3)
    savers = {False: tf1.train.Saver(), True: opt.swapping_saver()}
    for swaps, saver in savers.items():
      path = saver.save(session, str(tmp_path / str(swaps)))
      reader = tf.train.load_checkpoint(path)
      # Plain averages, and nothing else.
      names = ["w", "w/ExponentialMovingAverage"]
      assert sorted(reader.get_variable_to_shape_map()) == names
      for name, x in zip(names[::-1] if swaps else names,
                         (history[2], want[3])):
        np.testing.assert_allclose(reader.get_tensor(name), x, rtol=1e-6,
                                   atol=1e-6)
    # In a session that goes on: what it lacked since counts no more.
    for swaps, saver in savers.items():
      run(2)
      saver.restore(session, str(tmp_path / str(swaps)))
      run(2)
      np.testing.assert_allclose(np.concatenate(session.run(shadows)), want[5],
                                 rtol=1e-6, atol=1e-6)


# Where it is not valid


@pytest.mark.parametrize("order", ["around", "inside"])
@pytest.mark.parametrize("name", ["Elastic", "Model"])
@pytest.mark.parametrize("fused", [None, False])
def test_an_average_over_workers_moves_all_rows(name, order, fused):
  with modes.Graph(True).entered() as mode:
    getter = getattr(wrapopt, f"{name}AverageCustomGetter")("/cpu:0")
    with tf1.variable_scope("", custom_getter=getter):
      w = tf1.get_variable("w", initializer=table(), use_resource=True)
    step = tf1.train.get_or_create_global_step()

    def workers(inner):
      if name == "Elastic":
        return wrapopt.ElasticAverageOptimizer(inner, 1, getter, 2)
      return wrapopt.ModelAverageOptimizer(inner, 1, True, getter, 2)

    inner = INNER["sgd"]()
    moving = wrapopt.MovingAverageOptimizer(
        workers(inner) if order == "around" else inner, 0.9, fused=fused)
    opt = moving if order == "around" else workers(moving)
    values, indices = map(tf.constant, gradient(0))
    opt.apply_gradients(
        [(tf.IndexedSlices(values, indices, [ROWS, COLUMNS]), w)], step)
    assert not moving.is_lazy(w)
    assert isinstance(moving.average(w), tf.Variable)
    assert not [op for op in mode.graph.get_operations()
                if op.type == "Wrapopt>CatchUp"]


@pytest.fixture
def warned(monkeypatch):
  """The warnings of a test, as in a new process."""
  monkeypatch.setattr(_may_be_lazy, "_told", itertools.count())
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    yield found


def test_averages_of_ref_variables_follow_whoever_writes(warned):
  with modes.Graph(False).entered() as mode:
    w = mode.variable(table(), name="w")
    opt = wrapopt.MovingAverageOptimizer(INNER["lazy_adam"](), 0.9)
    training = Training(mode, opt, w)
    value = tf1.placeholder(tf.float32, w.shape)
    doubled, scattered = w.assign(value), tf1.scatter_add(w, [1], value[:1])
    training.sparse(*gradient(0))
    mode.session.run(doubled, {value: 2 * training.history[-1]})
    training.sparse(*gradient(1))
    mode.session.run(scattered, {value: table() + 1})
    training.sparse(*gradient(2))
    assert not opt.is_lazy(w)
    np.testing.assert_allclose(
        mode.values(opt.averages()), training.averages(table(), [0.9]),
        rtol=1e-5, atol=1e-6)
  assert len(warned) == 1 and "averages of 'w:0', because" in str(
      warned[0].message)


_GETTER = wrapopt.ModelAverageCustomGetter("/cpu:0")

# Arguments of `take_step`.
STEPS = {name: {"inner": inner} for name, inner in INNER.items()} | {
    "adam": {"inner": lambda: tf1.train.AdamOptimizer(0.5)},
    "subclass": {"inner": lambda: type(
        "Own", (tf1.train.GradientDescentOptimizer,), {})(0.5)},
    "two passes": {"fused": False},
    "several averages": {"average_decay": [0.9, 0.99]},
    "called decay": {"average_decay": lambda: 0.9},
    "gate outside": {"around": lambda opt: wrapopt.DropStaleGradientOptimizer(
        opt, 0)},
    "gate inside": {"inner": lambda: wrapopt.DropStaleGradientOptimizer(
        INNER["sgd"](), 0)},
    "workers": {"getter": _GETTER,
                "around": lambda opt: wrapopt.ModelAverageOptimizer(
                    opt, 1, True, _GETTER)},
    "lazy=False": {"lazy": False},
    "in any order": {"sequential_update": False},
    "dense gradient": {"is_sparse": False},
    "dense first": {"is_sparse": False, "again": True},
    "twice": {"times": 2},
    "not averaged": {"variables": lambda v: False},
    "update_every": {"update_every": 2},
}


def take_step(use_resource, inner=INNER["sgd"], around=lambda opt: opt,
              getter=None, is_sparse=True, again=False, times=1,
              average_decay=0.9, **kwargs):
  """Builds a step in a new graph. Returns whether rows may lag behind."""
  with tf.Graph().as_default():
    with tf1.variable_scope("", custom_getter=getter,
                            use_resource=use_resource):
      w = tf1.get_variable("w", initializer=table())
    moving = wrapopt.MovingAverageOptimizer(inner(), average_decay, **kwargs)
    opt = around(moving)
    count = tf1.train.get_or_create_global_step()
    for is_sparse in [is_sparse, True][:1 + again]:
      loss = tf.reduce_sum(tf.nn.embedding_lookup(w, [1, 4]) if is_sparse
                           else w)
      opt.apply_gradients(opt.compute_gradients(loss, [w]) * times, count)
    is_lazy = moving.average(w) is not None and moving.is_lazy(w)
    # A step without log decays moves all rows.
    assert is_lazy == any(
        op.node_def.attr["NL"].i
        for op in tf1.get_default_graph().get_operations()
        if type_of(op).startswith("Wrapopt>Sparse"))
    return is_lazy


@pytest.mark.by_day(6)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_says_once_what_resource_variables_gain(warned, step):
  is_lazy = take_step(True, **STEPS[step])
  assert not warned
  for _ in range(2):
    assert not take_step(False, **STEPS[step])
  assert len(warned) == is_lazy
  assert all("tf.compat.v1.enable_resource_variables()" in str(w.message)
             for w in warned)


def test_the_warning_of_ref_variables_may_be_an_error(monkeypatch):
  monkeypatch.setattr(_may_be_lazy, "_told", itertools.count())
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="because it is a ref variable"):
      take_step(False)


def test_a_variable_that_is_named_twice_catches_up_first():
  w = tf.Variable(table())
  opt = wrapopt.MovingAverageOptimizer(INNER["sgd"](), 0.9)
  training = Training(modes.Eager(), opt, w)
  for t in range(3):
    training.sparse(*gradient(t))
  values, indices = gradient(3)
  grad = tf.IndexedSlices(tf.constant(values), tf.constant(indices))
  opt.apply_gradients([(grad, w), (grad, w)])
  training._record()
  np.testing.assert_allclose(opt.average(w), training.averages(
      table(), [0.9])[0], rtol=1e-5, atol=1e-6)


def test_a_dropped_step_advances_nothing():
  w, step = tf.Variable(table()), tf.Variable(0, dtype=tf.int64)
  opt = wrapopt.DropStaleGradientOptimizer(
      wrapopt.MovingAverageOptimizer(INNER["sgd"](), 0.9), staleness=0,
      global_step=step)

  def minimize():
    opt.minimize(lambda: tf.nn.embedding_lookup(w, [1, 1, 4]), step, [w])

  minimize()
  average = opt._optimizer.average(w)
  assert opt._optimizer.is_lazy(w)
  before = average.log_decays.numpy(), average.numpy(), w.numpy()
  late = opt.compute_gradients(
      lambda: tf.nn.embedding_lookup(w, [1, 1, 4]), [w])
  step.assign_add(5)
  opt.apply_gradients(late, step)
  after = average.log_decays.numpy(), average.numpy(), w.numpy()
  assert_same_bits(before[1:], after[1:])


def test_the_step_moves_rows_by_one_op():
  with tf.Graph().as_default() as graph:
    w = tf1.get_variable("w", initializer=table(), use_resource=True)
    opt = wrapopt.MovingAverageOptimizer(INNER["adagrad"](), [0.9, 0.99])
    opt.minimize(tf.reduce_sum(tf.nn.embedding_lookup(w, [1, 1, 4])))
    [op] = [op for op in graph.get_operations() if "Apply" in op.type]
    assert type_of(op) == "Wrapopt>SparseApplyAdagrad"
    assert op.get_attr("NL") == 2
    assert not any("Ema" in op.type for op in graph.get_operations())


# The ops


def lazy(shape=(ROWS, COLUMNS)):
  return [variable(np.zeros(shape, np.float32)),
          variable(np.ones(shape, np.float32)),
          variable(np.zeros(shape[0] + 2))]


def variable(value):
  with tf.device(modes.VARIABLES):
    return tf.Variable(value)


# {argument: a function of the other arguments, which are right}.
@pytest.mark.parametrize("wrong, error, text", [
    ({"log_decays": lambda of: variable(np.zeros(3))},
     tf.errors.InvalidArgumentError,
     r"log_decays\[0\].* misshapen: got \[3\] but expected \[9\]"),
    ({"log_decays": lambda of: variable(np.zeros(9, np.float32))}, TypeError,
     r"`log_decays\[0\]` .*must be of dtype float64"),
    ({"shadow": lambda of: variable(0.0), "value": lambda of: variable(1.0)},
     tf.errors.InvalidArgumentError, "scalar"),
    ({"indices": lambda of: [[0, 7]]}, tf.errors.InvalidArgumentError,
     r"indices\[0\]\[1\] must be in \[0, 7\), .* got 7"),
    ({"indices": lambda of: [[[0, 1]]]}, tf.errors.InvalidArgumentError,
     r"indices\[0\] misshapen: got \[1,2\] but expected \[M\]"),
    ({"value": lambda of: of["shadow"]}, tf.errors.InvalidArgumentError,
     "are one variable"),
    ({"indices": lambda of: [[0], [1]]}, ValueError,
     "one vector for each of the 1 values, got 2"),
    ({"decay": lambda of: 2}, ValueError, r"must be in \[0, 1\], got 2")])
def test_errors_change_nothing(wrong, error, text):
  given = dict(zip(("shadow", "value", "log_decays"), lazy()),
               indices=[[0, 1]], decay=0.5)
  given.update({name: make(given) for name, make in wrong.items()})
  *variables, indices, decay = given.values()
  before = values_of(variables)
  with pytest.raises(error, match=text):
    ops.sparse_ema_update(*([v] for v in variables), indices, decay)
  assert_same_bits(values_of(variables), before)


def test_variables_that_are_refused():
  shadow, value, log_decays = lazy()
  with pytest.raises(ValueError, match="one variable for each of the 1 values, "
                     "got 2"):
    ops.sparse_ema_update([shadow], [value], [log_decays] * 2, [[0]], 0.5)
  rows = np.zeros([ROWS, COLUMNS], np.float32)
  with tf.Graph().as_default():
    shadow, value, log_decays = (
        tf1.Variable(x, use_resource=is_resource) for x, is_resource in (
            (rows, True), (rows, False), (np.zeros(ROWS + 2), True)))
    with pytest.raises(TypeError, match=r"`values\[0\]` .* must be a resource "
                       "variable, got a ref variable"):
      ops.sparse_ema_update([shadow], [value], [log_decays], [[0]], 0.5)


def test_indices_of_some_values_only():
  rows = [lazy() for _ in range(2)]
  for row in rows:  # Something to catch up with.
    row[2].assign(tf.fill(row[2].shape, tf.constant(-1, tf.float64)))
  before = values_of(sum(rows, []))
  run = lambda: _loader.ops.wrapopt_catch_up(  # pylint: disable=g-long-lambda-assignment
      *([v.handle for v in column] for column in zip(*rows)), [[0, 1]],
      T=tf.float32, S=tf.float32)
  text = ("indices must be none or one vector for each of the 2 values, got 1")
  with pytest.raises(tf.errors.InvalidArgumentError, match=text):
    run()
  with pytest.raises(ValueError, match=text):
    tf.function(run)()
  assert_same_bits(values_of(sum(rows, [])), before)


def test_autoclustering_does_not_compile_what_catches_up():
  """A session may read averages before its initializers have run."""
  update = tf.function(lambda s, w, log: ops.catch_up([s], [w], [log]))
  [op] = [op for op in update.get_concrete_function(
      *lazy()).graph.get_operations() if op.type == "Wrapopt>CatchUp"]
  assert not op.get_attr("_XlaCompile")


def test_a_rule_that_moves_all_rows_refuses_log_decays():
  shadow, w, log_decays = lazy()
  m, v = lazy()[0], lazy()[0]
  scalars = dict(lr=.1, beta1=.9, beta2=.9, epsilon=.1, weight_decay=0,
                 beta1_power=.9, beta2_power=.9)
  with pytest.raises(tf.errors.InvalidArgumentError,
                     match="log_decays must be empty for Adam"):
    ops.apply("Adam", {"var": [w], "m": [m], "v": [v]},
              [tf.IndexedSlices(tf.ones([1, COLUMNS]), [0])], scalars,
              [shadow], 0.9, log_decays=[[log_decays]])
  np.testing.assert_array_equal(w.numpy(), np.ones([ROWS, COLUMNS]))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (4,), (3, 2, 2), (5, 1200)])
def test_shapes(shape):
  shadow, w, log_decays = lazy(shape)
  indices = [0, 2, 0] if shape[0] else []
  grad = tf.IndexedSlices(tf.ones([len(indices), *shape[1:]]),
                          tf.constant(indices, tf.int32))
  for _ in range(2):
    ops.apply("GradientDescent", {"var": [w]}, [grad], {"lr": 0.5}, [shadow],
              0.5, log_decays=[[log_decays]])
  ops.catch_up([shadow], [w], [log_decays])
  want = np.full(shape, 0.75)
  if shape[0]:
    want[0] = (0 + 0) / 2 * 0.5 + -1 * 0.5
    want[2] = 0.5 / 2 * 0.5 + 0 * 0.5
  np.testing.assert_allclose(shadow.numpy(), want)


def test_threads_step_and_read_one_table():
  """Reads run beside steps; what is left is the exact average."""
  w = tf.Variable(tf.zeros([64, 8]))
  opt = wrapopt.MovingAverageOptimizer(INNER["sgd"](), 1.0)
  opt.apply_gradients([(tf.IndexedSlices(tf.ones([1, 8]), [0]), w)])
  average, errors = opt.average(w), []

  def step(row):
    try:
      for _ in range(50):
        opt.apply_gradients(
            [(tf.IndexedSlices(tf.ones([2, 8]), [row, row]), w)])
    except Exception as e:  # Reported below.
      errors.append(e)

  threads = [threading.Thread(target=step, args=(row,)) for row in range(4)]
  for thread in threads:
    thread.start()
  while any(thread.is_alive() for thread in threads):
    average.numpy()
  assert not errors
  np.testing.assert_array_equal(average, tf.zeros([64, 8]))
  np.testing.assert_array_equal(w[1:4], tf.fill([3, 8], -50.0))


# Tables that grow.


@pytest.mark.parametrize("run", [lambda f: f, tf.function],
                         ids=["eager", "function"])
def test_a_larger_table_is_a_new_variable(run):
  """Its average starts at its values, and that of the old one stays."""
  old = tf.Variable(np.ones([3, 1]))
  opt = wrapopt.MovingAverageOptimizer(
      tf1.train.GradientDescentOptimizer(1.0), 0.5)

  def step(table, rows):
    def take():
      opt.apply_gradients([(tf.IndexedSlices(
          tf.ones([len(rows), 1], tf.float64), rows, table.shape), table)])

    run(take)()

  step(old, [0])
  new = tf.Variable(np.concatenate([old.numpy(), np.full([3, 1], 4.0)]))
  step(new, [0, 5])
  assert new.numpy()[:, 0].tolist() == [-1, 1, 1, 4, 4, 3]
  read = lambda v: tf.convert_to_tensor(opt.average(v)).numpy()[:, 0].tolist()
  assert read(new) == [-0.5, 1, 1, 4, 4, 3.5]
  assert read(old) == [0.5, 1, 1]
  with opt.averaged_weights():
    assert new.numpy()[:, 0].tolist() == [-0.5, 1, 1, 4, 4, 3.5]


@pytest.mark.parametrize("wrapper, inner", [
    ("average", "sgd"), ("average", "momentum"), ("average", "lazy_adam"),
    ("schedule_free", "sgd")])
def test_a_table_must_not_change_its_number_of_rows(wrapper, inner):
  table = tf.Variable(np.ones([3, 2]), shape=[None, 2])
  opt = INNER[inner]()
  opt = (wrapopt.ScheduleFreeOptimizer(opt) if wrapper == "schedule_free" else
         wrapopt.MovingAverageOptimizer(opt, 0.5))

  def step(row, rows):
    opt.apply_gradients([(tf.IndexedSlices(
        tf.ones([1, 2], tf.float64), [row], [rows, 2]), table)])

  step(0, 3)
  table.assign(np.full([6, 2], 5.0))
  with pytest.raises(tf.errors.InvalidArgumentError, match=(
      r"misshapen: got \[3,2\] but expected \[6,2\]")):
    step(5, 6)
  np.testing.assert_array_equal(table, np.full([6, 2], 5.0))
  with pytest.raises(tf.errors.InvalidArgumentError):
    with opt.averaged_weights():
      raise AssertionError
  np.testing.assert_array_equal(table, np.full([6, 2], 5.0))
