"""No path reads an average of rows stale.

A twin of each optimizer has `lazy=False`: all rows of its averages move in each
step. The tests list the ways to read an average and the ways to change a table,
and compare both optimizers after the same calls. Random programs of them are in
fuzz/fuzz_programs_test.py.
"""

import contextlib
import copy
import os
import pickle
import tempfile
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import convert_to_constants
import arrays
from training import moving
from training import sgd
import wrapopt
import wrapopt.keras as wk

from wrapopt._averages import _lazy

tf1 = tf.compat.v1
ops = wrapopt.ops

ROWS, COLUMNS = 6, 2
DECAYS = [0.9, 0.5]


def table():
  return np.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS)


def gradient(t, count=2):
  """(values, indices)."""
  rng = np.random.default_rng(t)
  return rng.normal(size=[count, COLUMNS]), rng.integers(0, ROWS, count)


def sparse(t):
  return tf.IndexedSlices(*map(tf.constant, gradient(t)), [ROWS, COLUMNS])


class V1:
  """A table in float64, trained by an optimizer of tf.compat.v1."""

  def __init__(self, lazy, mode="eager", inner=None, wrap=lambda opt: opt):
    self.mode, self.t = mode, 0
    with tf.device("cpu:0"):
      self.w = tf.Variable(table(), name="w")
    self.opt = wrap(wrapopt.MovingAverageOptimizer(
        inner or sgd(0.5), DECAYS, lazy=lazy))
    self._steps = {}

  def apply(self, grad):
    self.opt.apply_gradients([(grad, self.w)])

  def step(self, t=None, dense=False):
    self.t += 1
    grad = sparse(self.t if t is None else t)
    if dense:
      grad = tf.convert_to_tensor(grad)
    if self.mode == "eager":
      self.apply(grad)
      return
    if dense not in self._steps:
      self._steps[dense] = tf.function(
          (lambda grad: self.apply(grad)) if dense else
          lambda values, indices: self.apply(
              tf.IndexedSlices(values, indices, [ROWS, COLUMNS])),
          autograph=False, jit_compile=self.mode == "jit" or None)
    self._steps[dense](*[grad] if dense else [grad.values, grad.indices])

  def average(self, k=0):
    return self.opt.average(self.w, DECAYS[k])

  def numpy(self):
    return [self.w.numpy(), *(self.average(k).numpy() for k in (0, 1))]

  def swapped(self, k=0):
    return self.opt.averaged_weights(decay=DECAYS[k])

  def checkpoint(self):
    return tf.train.Checkpoint(w=self.w, opt=self.opt)


class Keras(V1):
  """A table in float64, trained by an optimizer of Keras."""

  def __init__(self, lazy, mode="eager", inner=None, wrap=lambda opt: opt,
               **kwargs):
    self.mode, self.t = mode, 0
    self.w = keras.Variable(table(), dtype="float64", name="w")
    self.averaging = wk.MovingAverage(
        inner or keras.optimizers.SGD(0.5), DECAYS, lazy=lazy, **kwargs)
    self.opt = wrap(self.averaging)
    self.opt.build([self.w])
    self._steps = {}

  def apply(self, grad):
    self.opt.apply([grad], [self.w])

  def average(self, k=0):
    return self.averaging.average(self.w, DECAYS[k])

  def swapped(self, k=0):
    return self.averaging.averaged_weights(decay=DECAYS[k])

  def checkpoint(self):
    return tf.train.Checkpoint(w=self.w.value, opt=self.opt)


KINDS = {"v1": V1, "keras": Keras}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def twins(kind, steps=0, **kwargs):
  """The lazy and the dense one, after some steps."""
  made = [KINDS[kind](lazy, **kwargs) for lazy in (None, False)]
  for _ in range(steps):
    step_both(made)
  return made


def step_both(both):
  for trained in both:
    trained.step()


def lags(trained):
  """Whether rows of its averages lag behind now."""
  log_decays = trained.average().log_decays
  return log_decays is not None and log_decays.numpy()[ROWS] != 0


def assert_same(lazy, dense, rtol=1e-12):
  arrays.assert_close(lazy.numpy(), dense.numpy(), rtol=rtol, atol=1e-13)


# Reading

_ORDER = np.arange(ROWS)


def _in_thread(average):
  result = []
  thread = threading.Thread(target=lambda: result.append(average.numpy()))
  thread.start()
  thread.join()
  return result[0]


def _in_cond(average):
  return tf.function(lambda flag: tf.cond(
      flag, lambda: tf.convert_to_tensor(average) + 0,
      lambda: tf.zeros([ROWS, COLUMNS], tf.float64)))(tf.constant(True))


def _in_loop(average):
  return tf.function(lambda: tf.while_loop(
      lambda i, x: i < 1, lambda i, x: (i + 1, x + average),
      [tf.constant(0), tf.zeros([ROWS, COLUMNS], tf.float64)])[1])()


def _on_disk(average, tmp_path, **options):
  checkpoint = tf.train.Checkpoint(average=average)
  path = checkpoint.write(str(tmp_path / "one"), tf.train.CheckpointOptions(
      **options))
  checkpoint.sync() if hasattr(checkpoint, "sync") else None
  return tf.train.load_variable(path, "average/.ATTRIBUTES/VARIABLE_VALUE")


def _saved_model(average, tmp_path):
  module = tf.Module()
  module.average = average
  module.read = tf.function(lambda: average + 0, input_signature=[])
  module.read()
  tf.saved_model.save(module, str(tmp_path / "module"))
  loaded = tf.saved_model.load(str(tmp_path / "module"))
  np.testing.assert_array_equal(loaded.read(), loaded.average)
  return loaded.average


READS = {
    "numpy": lambda s: s.numpy(),
    "asarray": np.asarray,
    "array_of_dtype": lambda s: np.array(s, np.float32),
    "convert_to_tensor": tf.convert_to_tensor,
    "value": lambda s: (s.value() if callable(s.value) else s.value),
    "read_value": lambda s: (s if hasattr(s, "read_value") else s.value
                             ).read_value(),
    "square": tf.square, "reduce_sum": tf.reduce_sum, "norm": tf.norm,
    "concat": lambda s: tf.concat([s, s], 0),
    "stack": lambda s: tf.stack([s, s]),
    "transpose": tf.transpose,
    "einsum": lambda s: tf.einsum("ij->ji", s),
    "subtract": lambda s: tf.subtract(tf.ones([ROWS, COLUMNS], tf.float64), s),
    "matmul": lambda s: tf.matmul(s, tf.ones([COLUMNS, 3], tf.float64)),
    "cast": lambda s: tf.cast(s, tf.float32),
    "operators": lambda s: 2. * s + s / 3. - (-s) * s ** 2,
    "reflected": lambda s: tf.ones([ROWS, COLUMNS], tf.float64) - s,
    "compare": lambda s: s > 0.,
    "gather": lambda s: tf.gather(s, [4, 1, 1]),
    "embedding_lookup": lambda s: tf.nn.embedding_lookup(s, [4, 1, 1]),
    "slice": lambda s: s[1:4, 0], "row": lambda s: s[-1],
    "rows": lambda s: tf.stack(list(s)),
    "raw_op": lambda s: tf.raw_ops.AddV2(x=s, y=tf.constant(0., tf.float64)),
    "raw_identity": lambda s: tf.raw_ops.Identity(input=s),
    "identity": tf.identity,
    "captured": lambda s: tf.function(lambda: s + 0)(),
    "captured_jit": lambda s: tf.function(lambda: s + 0, jit_compile=True)(),
    "argument": lambda s: tf.function(lambda x: tf.square(x))(s),
    "argument_jit": lambda s: tf.function(tf.square, jit_compile=True)(s),
    "cond": _in_cond, "loop": _in_loop,
    "dataset": lambda s: next(iter(tf.data.Dataset.from_tensors(
        tf.convert_to_tensor(s)))),
    "map": lambda s: next(iter(tf.data.Dataset.range(1).map(lambda _: s + 0))),
    "py_function": lambda s: tf.function(lambda: tf.py_function(
        lambda: s + 0, [], tf.float64))(),
    "method": lambda s: tf.function(
        lambda: s.value() if callable(s.value) else s.value + 0)(),
    "copy": lambda s: copy.copy(s).numpy(),
    "deepcopy": lambda s: copy.deepcopy(s).numpy(),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)).numpy(),
    "thread": _in_thread,
    "keras_ops": lambda s: keras.ops.add(s, 1.),
    "keras_numpy": keras.ops.convert_to_numpy,
    "keras_tensor": keras.ops.convert_to_tensor,
}
# What a keras.Variable does not do, or TensorFlow with one.
_NOT_OF_KERAS_VARIABLES = ("pickle", "deepcopy", "copy", "rows", "stack")


@pytest.mark.by_day(15)
@EVERY_KIND
@pytest.mark.parametrize("read", READS)
def test_a_read_is_up_to_date(kind, read):
  lazy, dense = both = twins(kind, steps=4)
  k = len(read) % 2
  assert lags(lazy)
  want = dense.average(k)
  if kind == "keras" and read in _NOT_OF_KERAS_VARIABLES:
    want = want.value
  np.testing.assert_allclose(READS[read](lazy.average(k)), READS[read](want),
                             rtol=1e-12)
  step_both(both)
  assert_same(lazy, dense)


@EVERY_KIND
@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
def test_a_function_reads_after_each_step_inside_of_it(kind, mode):
  lazy, dense = twins(kind)
  found = []
  for trained in lazy, dense:
    trained.step(0)

    def run(values, indices, trained=trained):
      grad = tf.IndexedSlices(values, indices, [ROWS, COLUMNS])
      reads = [tf.convert_to_tensor(trained.average())]
      for _ in range(2):
        trained.apply(grad)
        reads.append(tf.square(trained.average()))
      return reads

    if mode != "eager":
      run = tf.function(run, autograph=False, jit_compile=mode == "jit" or None)
    grad = sparse(1)
    found.append([*run(grad.values, grad.indices),
                  *run(grad.values, grad.indices)])
  assert lazy.opt.is_lazy(lazy.w)
  arrays.assert_close(*found, rtol=1e-12)


@EVERY_KIND
@pytest.mark.parametrize("how", ["plain", "async", "saved_model"])
def test_files_have_caught_up(kind, how, tmp_path):
  lazy, dense = twins(kind, steps=4)
  assert lags(lazy)
  average = lazy.average()
  got = (_saved_model(average, tmp_path) if how == "saved_model" else _on_disk(
      average, tmp_path, experimental_enable_async_checkpoint=how == "async"))
  np.testing.assert_allclose(got, dense.average(), rtol=1e-12)


@EVERY_KIND
def test_a_checkpoint_of_the_optimizer_restores_into_its_twin(kind, tmp_path):
  lazy, dense = both = twins(kind, steps=4)
  assert lags(lazy)
  path = lazy.checkpoint().write(str(tmp_path / "a"))
  dense.checkpoint().read(path).assert_consumed()
  assert_same(lazy, dense)
  step_both(both)
  assert lags(lazy)
  lazy.checkpoint().read(dense.checkpoint().write(str(tmp_path / "b")))
  assert not lags(lazy)
  assert_same(lazy, dense)


def test_a_concrete_function_that_reads_is_not_saved(tmp_path):
  lazy = V1(None)
  lazy.step()
  module, average = tf.Module(), lazy.average()
  module.average = average
  module.read = tf.function(lambda: average + 0).get_concrete_function()
  with pytest.raises(ValueError, match="Save the tf.function"):
    tf.saved_model.save(module, str(tmp_path), module.read)


@pytest.mark.by_day(0)
def test_a_frozen_function_that_reads_is_refused():
  lazy = V1(None)
  lazy.step()
  read = tf.function(lambda: lazy.average() + 0).get_concrete_function()
  with pytest.raises(ValueError):
    convert_to_constants.convert_variables_to_constants_v2(read)()


@EVERY_KIND
@pytest.mark.parametrize("lazy", [None, False])
def test_no_checkpoint_while_averages_are_in_place(kind, lazy, tmp_path):
  trained = KINDS[kind](lazy)
  trained.step()
  checkpoint = trained.checkpoint()
  path = checkpoint.write(str(tmp_path / "a"))
  want = trained.numpy()
  with trained.swapped():
    with pytest.raises(RuntimeError, match="inside averaged_weights"):
      checkpoint.write(str(tmp_path / "b"))
    with pytest.raises(RuntimeError, match="inside averaged_weights"):
      trained.checkpoint().read(path)
    # The model alone, with the averages as its weights.
    tf.train.Checkpoint(w=_value(trained.w)).write(str(tmp_path / "c"))
  arrays.assert_same(trained.numpy(), want)


def test_a_saved_step_goes_on_from_what_was_saved(tmp_path):
  lazy, dense = both = twins("keras", steps=1)
  grad = sparse(9)

  def module_of(trained):
    module = tf.Module()
    module.w, module.opt = trained.w.value, trained.opt
    module.step = tf.function(
        lambda: trained.apply(grad) or tf.square(trained.average()),
        input_signature=[])
    module.step()
    return module

  module_of_dense = module_of(dense)
  module = module_of(lazy)
  step_both(both)
  assert lags(lazy)
  tf.saved_model.save(module, str(tmp_path))
  loaded = tf.saved_model.load(str(tmp_path))
  want = module_of_dense.step()
  # The loaded average is a variable, which each step moves as a whole.
  np.testing.assert_allclose(loaded.step(), want, rtol=1e-12)
  np.testing.assert_allclose(module.step(), want, rtol=1e-12)


@EVERY_KIND
def test_an_average_that_outlives_its_variable(kind):
  lazy, dense = twins(kind, steps=1)
  average, want = lazy.average(), dense.average().numpy()
  assert lags(lazy)
  del lazy
  np.testing.assert_allclose(average.numpy(), want, rtol=1e-12)


REFUSED = {
    "handle": (AttributeError, lambda s, w: s.handle),
    "ema_update": (TypeError, lambda s, w: ops.ema_update([s], [w], 0.5)),
    "exchange": (TypeError, lambda s, w: ops.exchange([w], [s])),
    "averaging_assign": (TypeError,
                         lambda s, w: ops.averaging_assign([s], [w], [1.])),
    "read_packed": (TypeError, lambda s, w: ops.read_packed([s])),
    "catch_up": (TypeError, lambda s, w: ops.catch_up([s], [w], [w])),
    "watch": (Exception, lambda s, w: tf.GradientTape().watch(s)),
    "raw_read": (Exception, lambda s, w: tf.raw_ops.ReadVariableOp(
        resource=s, dtype=tf.float64)),
    "shape": (ValueError, lambda s, w: s.assign([1.])),
    "dtype": (ValueError, lambda s, w: tf.convert_to_tensor(s, tf.float32)),
}


@EVERY_KIND
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_read_or_write_rows_that_lag_behind_is_refused(kind, what):
  lazy, dense = twins(kind, steps=1)
  error, call = REFUSED[what]
  with pytest.raises(error):
    call(lazy.average(), _value(lazy.w))
  assert lags(lazy)
  assert_same(lazy, dense)


# Writing, and changes of the table


def _assign(trained):
  for k in (0, 1):
    trained.average(k).assign(np.ones([ROWS, COLUMNS]))


def _assign_add(trained):
  trained.average().assign_add(np.ones([ROWS, COLUMNS]))
  trained.average(1).assign_sub(np.ones([ROWS, COLUMNS]))


def _swap(trained):
  with trained.swapped():
    trained.average(1).numpy()
    tf.square(_value(trained.w))


def _swap_both(trained):
  for k in (1, 0):
    with trained.swapped(k):
      trained.average(1 - k).numpy()


def _read_and_set(trained):
  trained.numpy()
  trained.w.assign(table()[::-1])


def _read_and_scatter(trained):
  trained.numpy()
  _value(trained.w).scatter_nd_update([[3]], [[7., 8.]])


def _exchange(trained):
  ops.exchange([_value(trained.w)], [tf.Variable(table()[::-1])])


def _averaging_assign(trained):
  ops.averaging_assign([_value(trained.w)], [tf.Variable(table()[::-1])], [1.])


def _raw_apply(trained):
  ops.apply("GradientDescent", {"var": [_value(trained.w)]},
            [tf.ones([ROWS, COLUMNS], tf.float64)], {"lr": 0.25})


def _assign_packed(trained):
  w = _value(trained.w)
  ops.assign_packed([w], 2 * ops.read_packed([w]))


def _value(w):
  return w.value if isinstance(w, keras.Variable) else w


def _other_v1(trained):
  """Another optimizer trains the table, and averages it, too."""
  if not hasattr(trained, "other"):
    trained.other = wrapopt.MovingAverageOptimizer(
        tf1.train.AdagradOptimizer(0.3), 0.7)
  trained.other.apply_gradients([(sparse(77), _value(trained.w))])


class _Subclass(tf1.train.GradientDescentOptimizer):
  """An optimizer without an op of wrapopt."""


# {name: an optimizer that takes one step on the table}.
OTHERS = {
    "dense_v1": lambda: wrapopt.LazyAdamOptimizer(0.1),
    "wrapper": lambda: wrapopt.CrossShardOptimizer(sgd(0.1)),
    "wrapper_without_an_op": lambda: wrapopt.CrossShardOptimizer(
        _Subclass(0.1)),
}


def _other_keras(trained):
  if not hasattr(trained, "other"):
    trained.other = wk.SWA(keras.optimizers.Adam(0.1), average_period=1)
    w = trained.w
    if not isinstance(w, keras.Variable):
      trained.other_w = keras.Variable(table(), dtype="float64")
      trained.other_w._value = w
      w = trained.other_w
    trained.other.build([w])
    trained.other_w = w
  trained.other.apply([sparse(79)], [trained.other_w])


def _restore_averages(trained):
  """Without the table."""
  with tempfile.TemporaryDirectory() as folder:
    checkpoint = tf.train.Checkpoint(a=_value(trained.average()),
                                     b=_value(trained.average(1)))
    path = checkpoint.write(os.path.join(folder, "averages"))
    trained.step(5)
    checkpoint.read(path)


def _seed(trained):
  getattr(trained, "averaging", trained.opt).seed_averages()


CHANGES = {
    function.__name__[1:]: function for function in (
        _assign, _assign_add, _swap, _swap_both, _read_and_set,
        _read_and_scatter, _restore_averages, _exchange,
        _averaging_assign, _raw_apply, _assign_packed, _other_v1,
        _other_keras, _seed)}
CHANGES |= {
    f"other_{name}": lambda trained, make=make: make().apply_gradients(
        [(sparse(78), _value(trained.w))]) for name, make in OTHERS.items()}


@EVERY_KIND
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_comes_after_the_steps_before_it(kind, mode, change, capfd):
  lazy, dense = twins(kind, steps=2, mode=mode)
  for trained in lazy, dense:
    for _ in range(2):
      if trained is lazy:
        assert lags(lazy)
      CHANGES[change](trained)
      trained.step()
      trained.step()
  assert lags(lazy)
  assert_same(lazy, dense)
  assert "lagged behind" not in capfd.readouterr().err


def scaling(trained):
  """A function that multiplies the table."""
  return tf.function(lambda: ops.averaging_assign(
      [_value(trained.w)], [_value(trained.w)], [1.5]), autograph=False)


def test_a_graph_that_changes_the_table_keeps_later_averages_dense():
  """Its function would not know them."""
  lazy, dense = twins("v1")
  for trained in lazy, dense:
    change = scaling(trained)
    change()
    for _ in range(2):
      trained.step()
      change()
      trained.step()
  assert not lazy.opt.is_lazy(lazy.w)
  assert_same(lazy, dense)


@EVERY_KIND
@pytest.mark.parametrize("how", ["change", "step"])
def test_a_graph_that_knows_averages_without_lags_keeps_them_dense(kind, how):
  lazy, dense = twins(kind)
  for trained in lazy, dense:
    trained.step(dense=True)
    change = scaling(trained) if how == "change" else tf.function(
        lambda trained=trained: trained.apply(
            tf.ones([ROWS, COLUMNS], tf.float64)), autograph=False)
    for _ in range(2):
      change()
      trained.step()
      trained.step()
  assert not lazy.opt.is_lazy(lazy.w)
  assert_same(lazy, dense)


def test_a_function_that_knows_the_averages_settles_them():
  lazy, dense = twins("v1", steps=1)
  for trained in lazy, dense:
    change = scaling(trained)
    for _ in range(2):
      change()
      trained.step()
  assert lags(lazy)
  assert_same(lazy, dense)


@EVERY_KIND
@pytest.mark.parametrize("how", ["assign", "restore"])
def test_a_change_that_nobody_announced_is_logged(kind, how, capfd, tmp_path):
  """The buffer of the table is another one."""
  lazy = KINDS[kind](None)
  checkpoint = tf.train.Checkpoint(w=_value(lazy.w))
  path = checkpoint.write(str(tmp_path / "table"))
  lazy.step()
  before = _value(lazy.w).read_value()  # Its buffer is not used again.
  if how == "assign":
    lazy.w.assign(table()[::-1])
  else:
    checkpoint.read(path)
  del before
  assert lags(lazy)
  capfd.readouterr()
  lazy.average().numpy()
  error = capfd.readouterr().err
  assert "lagged behind when something else than its optimizer" in error
  assert "lazy=False" in error
  lazy.average().numpy()
  lazy.step()
  lazy.step()
  # Both averages had rows that lagged; each is reported once.
  assert capfd.readouterr().err.count("lagged behind") == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_swap_that_converts_settles_all_averages(dtype):
  """Averages of narrow tables are float32: no buffers are exchanged."""
  found = []
  for lazy in None, False:
    w = keras.Variable(table(), dtype=dtype)
    opt = wk.MovingAverage(keras.optimizers.SGD(0.5), DECAYS, lazy=lazy)
    for t in range(3):
      grad = tf.IndexedSlices(tf.ones([1, COLUMNS]), [t], [ROWS, COLUMNS])
      opt.apply([grad], [w])
      with opt.averaged_weights():
        opt.average(w, 0.5).numpy()
      opt.apply([grad], [w])
    assert lazy is False or opt.is_lazy(w)
    found.append([np.array(opt.average(w, d)) for d in DECAYS])
  arrays.assert_close(*found, rtol=1e-6)


@pytest.mark.parametrize("wrap", [
    lambda opt: wk.SWA(opt, average_period=2),
    lambda opt: wk.Lookahead(opt, 2),
    lambda opt: wk.SWA(wk.Lookahead(opt, 3))], ids=["swa", "lookahead", "both"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_wrappers_around(wrap, mode):
  lazy, dense = twins("keras", wrap=wrap, mode=mode)
  for trained in lazy, dense:
    for t in range(5):
      trained.step()
      if isinstance(trained.opt, wk.SWA) and t == 2:
        with trained.opt.averaged_weights():
          trained.average(1).numpy()
  assert_same(lazy, dense)


@pytest.mark.parametrize("inner", ["constraint", "use_ema", "weight_decay"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_keras_changes_all_rows(inner, mode):
  found = []
  for lazy in None, False:
    arguments = {"use_ema": dict(use_ema=True, ema_momentum=0.5,
                                 ema_overwrite_frequency=2),
                 "weight_decay": dict(weight_decay=0.1)}.get(inner, {})
    trained = Keras(lazy, mode, keras.optimizers.SGD(0.5, **arguments))
    if inner == "constraint":
      trained.w.constraint = keras.constraints.UnitNorm()
    for _ in range(5):
      trained.step()
    trained.opt.finalize_variable_values([trained.w])
    trained.step()
    found.append(trained)
  assert_same(*found)


@pytest.mark.parametrize("strategy", [
    lambda: tf.distribute.OneDeviceStrategy("cpu:0"),
    tf.distribute.experimental.CentralStorageStrategy],
                         ids=["one_device", "central"])
@pytest.mark.parametrize("kind", ["v1", "keras"])
@pytest.mark.parametrize("with_dense", [False, True])
def test_strategies(strategy, kind, with_dense):
  found = []
  for lazy in None, False:
    scope = strategy()
    count = scope.num_replicas_in_sync
    with scope.scope():
      if kind == "v1":
        w, b = tf.Variable(table()), tf.Variable([1., 2.])
        opt = wrapopt.MovingAverageOptimizer(sgd(0.5), DECAYS, lazy=lazy)
        apply = lambda g, v: opt.apply_gradients(list(zip(g, v)))
      else:
        w = keras.Variable(table(), dtype="float64")
        b = keras.Variable([1., 2.])
        opt = wk.MovingAverage(keras.optimizers.SGD(0.5), DECAYS, lazy=lazy)
        opt.build([w, b] if with_dense else [w])
        apply = opt.apply

    @tf.function
    def step(values, indices):
      def replica():
        grads = [tf.IndexedSlices(values, indices, tf.constant(
            [ROWS, COLUMNS], tf.int64))]
        apply(grads + [tf.ones([2])] if with_dense else grads,
              [w, b] if with_dense else [w])
      scope.run(replica)

    for t in range(4):
      grad = sparse(t)
      step(grad.values / count, grad.indices)
    found.append([np.array(w), *(np.array(tf.convert_to_tensor(
        opt.average(w, d))) for d in DECAYS)])
  assert not opt.is_lazy(w)
  arrays.assert_close(*found, rtol=1e-12)
  history = table()
  assert np.abs(found[0][1] - history).max() > 0.01  # It has moved.


def test_steps_outside_and_inside_of_a_strategy():
  lazy, dense = twins("v1", steps=1)
  for trained in lazy, dense:
    tf.distribute.OneDeviceStrategy("cpu:0").run(trained.step)
    trained.step()
  assert_same(lazy, dense)


# fit


def _model(lazy, decays, jit_compile=False):
  keras.utils.set_random_seed(0)
  model = keras.Sequential([keras.Input([3]), keras.layers.Embedding(50, 4),
                            keras.layers.Flatten(), keras.layers.Dense(1)])
  model.compile(wk.MovingAverage(
      keras.optimizers.SGD(0.5), decays, lazy=lazy), "mse",
                jit_compile=jit_compile)
  return model


def _data(seed=0, count=64):
  rng = np.random.default_rng(seed)
  # Of 50 rows, few are touched.
  return rng.integers(0, 20, [count, 3]), rng.normal(size=[count, 1])


def _averages_of(model, decays):
  opt, table = model.optimizer, model.layers[0].embeddings
  return [np.array(table), *(np.array(opt.average(table, d)) for d in decays)]


FITS = {
    "plain": lambda tmp_path: [],
    "evaluate": lambda tmp_path: [wk.EvaluateWithAverages()],
    "checkpoint": lambda tmp_path: [wk.EvaluateWithAverages(
        [keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))])],
    "early_stopping": lambda tmp_path: [wk.EvaluateWithAverages(
        [keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e3,
                                       restore_best_weights=True)])],
    "early_stopping_raw": lambda tmp_path: [
        keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e3)],
    "backup": lambda tmp_path: [
        keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))],
    "snapshots": lambda tmp_path: [wk.Snapshots(str(tmp_path / "s"), 3)],
}


@pytest.mark.by_day(0)
@pytest.mark.parametrize("callbacks, decays", [
    *((name, DECAYS) for name in FITS),
    *((name, [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)])
      for name in ("checkpoint", "snapshots"))])
def test_fit(callbacks, decays, tmp_path):
  found = []
  for lazy in None, False:
    model = _model(lazy, decays, jit_compile=callbacks == "evaluate")
    path = tmp_path / str(lazy)
    path.mkdir()
    x, y = _data()
    for _ in range(2):
      model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False,
                callbacks=FITS[callbacks](path), validation_data=(x, y))
    found.append(_averages_of(model, decays))
    model.save(path / "model.keras")
    loaded = keras.saving.load_model(path / "model.keras")
    arrays.assert_same(_averages_of(loaded, decays), found[-1])
    if lazy is None:
      assert model.optimizer.is_lazy(model.layers[0].embeddings)
  arrays.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_as_saved_model(tmp_path):
  model = _model(None, DECAYS)
  x, y = _data()
  model.fit(x, y, batch_size=8, verbose=0)
  model.train_on_batch(*_data(1, 8))
  tf.saved_model.save(model, str(tmp_path))
  tf.saved_model.load(str(tmp_path))
  shapes = [shape for _, shape in tf.train.list_variables(
      str(tmp_path / "variables" / "variables"))]
  assert shapes.count([50, 4]) == 3  # The table and two averages.


# Numbers


@pytest.mark.by_day(1)
@pytest.mark.parametrize("how", ["kernel", "jit", "hlo"])
def test_decays_of_zero_do_not_wear_out_the_sums(how, monkeypatch):
  """100,000 of them, then decays near 1."""
  if how == "hlo":
    monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", "hlo")
  lazy, w = tf.Variable(table()), tf.Variable(table())
  log_decays = tf.Variable(np.zeros(ROWS + 2))
  near_1 = 1 - 1e-6

  def run(indices, decay):
    ops.apply("GradientDescent", {"var": [w]},
              [tf.IndexedSlices(tf.ones([1, COLUMNS], tf.float64), indices)],
              {"lr": 0.001}, [lazy], decay, log_decays=[[log_decays]])

  run = tf.function(run, autograph=False,
                    jit_compile=None if how == "kernel" else True)
  zero = tf.constant(0., tf.float64)

  @tf.function
  def zeros(count):
    for _ in tf.range(count):
      ops.apply("GradientDescent", {"var": [w]},
                [tf.IndexedSlices(tf.ones([1, COLUMNS], tf.float64), [1])],
                {"lr": 0.}, [lazy], zero, log_decays=[[log_decays]])

  zeros(100_000 if how == "kernel" else 249)
  for _ in range(2):
    run(tf.constant([1]), zero)  # Sums become small in one of these.
  assert -1e4 <= log_decays[ROWS] < 0
  want = w.numpy()
  for t in range(20):
    run(tf.constant([t % 3]), tf.constant(near_1, tf.float64))
    want += (1 - near_1) * (w.numpy() - want)
  ops.catch_up([lazy], [w], [log_decays])
  np.testing.assert_allclose(lazy.numpy() - w.numpy(), want - w.numpy(),
                             rtol=1e-6, atol=1e-15)


# Sessions


def _graph(lazy=None, rows=ROWS, decays=DECAYS, name="w"):
  w = tf1.get_variable(name, initializer=table()[:rows], use_resource=True)
  opt = wrapopt.MovingAverageOptimizer(sgd(0.5), decays, lazy=lazy)
  values = tf1.placeholder(tf.float64, [None, COLUMNS], name="values")
  indices = tf1.placeholder(tf.int64, [None], name="indices")
  step = tf1.train.get_or_create_global_step()
  train = opt.apply_gradients(
      [(tf.IndexedSlices(values, indices, [rows, COLUMNS]), w)], step,
      name="train")
  return w, opt, train


@contextlib.contextmanager
def _session():
  """A session, and what `_graph` returns."""
  with tf.Graph().as_default(), tf1.Session() as session:
    yield session, *_graph()


def _feed(t):
  return dict(zip(("values:0", "indices:0"), gradient(t)))


def _wanted(steps, k=0):
  """The average after these steps, in a dense model."""
  value = table()
  average = value.copy()
  for t in steps:
    values, indices = gradient(t)
    np.add.at(value, indices, -0.5 * values)
    average += (1 - DECAYS[k]) * (value - average)
  return average


def assert_average(got, steps, k=0, name=""):
  np.testing.assert_allclose(got, _wanted(steps, k), rtol=1e-12, err_msg=name)


SESSION_READS = {
    "variable": lambda s: s,
    "element": lambda s: s.graph.get_tensor_by_name(s.name),
    "read_value": lambda s: s.read_value(),
    "value": lambda s: s.value(),
    "add": lambda s: s + 0,
    "identity": tf.identity,
    "gather": lambda s: tf.gather(s, list(range(ROWS))),
    "embedding_lookup": lambda s: tf.nn.embedding_lookup(s, _ORDER),
    "slice": lambda s: s[:],
    "concat": lambda s: tf.concat([s[:2], s[2:]], 0),
    "while": lambda s: tf.while_loop(
        lambda i, x: i < 1, lambda i, x: (i + 1, x + s),
        [tf.constant(0), tf.zeros([ROWS, COLUMNS], tf.float64)])[1],
    "cond": lambda s: tf.cond(
        tf1.placeholder_with_default(True, []), lambda: s + 0,
        lambda: tf.zeros([ROWS, COLUMNS], tf.float64)),
    "py_function": lambda s: tf1.py_func(lambda x: x, [s], tf.float64),
    "function": lambda s: tf.function(lambda: s + 0)(),
}


def test_sessions_read_what_is_up_to_date():
  with _session() as (session, w, opt, train):
    with tf.control_dependencies([train]):
      after = opt.average(w).read_value()
    reads = {name: read(opt.average(w, 0.5))
             for name, read in SESSION_READS.items()}
    session.run(tf1.global_variables_initializer())
    for t, (name, read) in enumerate(reads.items()):
      session.run(train, _feed(t))
      assert_average(session.run(read), range(t + 1), 1, name)
    # A step, and then a read in the same run.
    assert_average(session.run(after, _feed(t + 1)), range(t + 2))


def test_methods_of_variables_in_sessions():
  with _session() as (session, w, opt, train):
    session.run(tf1.global_variables_initializer())
    session.run(train, _feed(0))
    average = opt.average(w, 0.5)
    assert_average(average.eval(session), [0], 1)
    with pytest.raises(NotImplementedError, match="only available in eager"):
      average.numpy()
    with pytest.raises(NotImplementedError, match="only be copied and pickled "
                       "in eager mode"):
      copy.copy(average)
    new = np.full([ROWS, COLUMNS], 3.0)
    np.testing.assert_array_equal(session.run(average.assign(new)), new)
    np.testing.assert_array_equal(
        session.run(average.assign_add(new)), 2 * new)


def test_savers_of_a_list_and_of_a_dict(tmp_path):
  with _session() as (session, w, opt, train):
    average = opt.average(w, 0.5)
    savers = tf1.train.Saver([w, average]), tf1.train.Saver({"x": average})
    session.run(tf1.global_variables_initializer())
    for t, (saver, name) in enumerate(zip(
        savers, ("w/ExponentialMovingAverage_0.5", "x"))):
      session.run(train, _feed(t))
      path = saver.save(session, str(tmp_path / name[:1]))
      assert_average(tf.train.load_variable(path, name), range(t + 1), 1)
    session.run(train, _feed(2))
    savers[1].restore(session, path)
    assert_average(session.run(average), range(2), 1)


def test_gradients_with_respect_to_an_average():
  with _session() as (session, w, opt, train):
    average = opt.average(w)
    [grad] = tf.gradients(tf.reduce_sum(tf.square(average) + average), average)
    session.run(tf1.global_variables_initializer())
    session.run(train, _feed(0))
    np.testing.assert_allclose(session.run(grad), 2 * _wanted([0]) + 1,
                               rtol=1e-12)


def test_swaps_in_a_session_settle_all_averages(tmp_path):
  with _session() as (session, w, opt, train):
    # Of the same table: its averages move in all rows.
    other = wrapopt.MovingAverageOptimizer(sgd(0.5), 0.25)
    grad = tf.IndexedSlices(tf.ones([1, COLUMNS], tf.float64), [2],
                            [ROWS, COLUMNS])
    train_other = other.apply_gradients([(grad, w)])
    session.run(tf1.global_variables_initializer())
    averages = [opt.average(w), opt.average(w, 0.5), other.average(w)]
    assert opt.is_lazy(w) and not other.is_lazy(w)
    saver = tf1.train.Saver()
    want = [session.run(w) for _ in averages]
    for t in range(4):
      session.run(train, _feed(t))
      value = session.run(w)
      for k in (0, 1):
        want[k] += (1 - DECAYS[k]) * (value - want[k])
      session.run(train_other)
      value = session.run(w)
      want[2] += 0.75 * (value - want[2])
      for k in (1, 0):
        with opt.averaged_weights(session, DECAYS[k]):
          arrays.assert_close(session.run([averages[1 - k], averages[2]]),
                              [want[1 - k], want[2]], rtol=1e-12)
          with pytest.raises(tf.errors.FailedPreconditionError):
            saver.save(session, str(tmp_path / "swapped"))
    arrays.assert_close(session.run(averages), want, rtol=1e-12)


@pytest.mark.parametrize("fused", [None, False])
def test_a_gate_on_the_table_of_an_average(fused):
  with _session() as (session, w, opt, train):
    gate = wrapopt.DropStaleGradientOptimizer(
        sgd(0.5), staleness=10, fused=fused)
    train_gate = gate.minimize(tf.reduce_sum(tf.gather(w, [2])),
                               global_step=tf1.train.get_global_step())
    session.run(tf1.global_variables_initializer())
    want = table()
    for t in range(4):
      session.run(train, _feed(t))
      want += 0.1 * (session.run(w) - want)
      session.run(train_gate)
    assert opt.is_lazy(w)
    np.testing.assert_allclose(session.run(opt.average(w)), want, rtol=1e-12)


def test_an_imported_graph_reads_trains_saves_and_restores(tmp_path):
  path = str(tmp_path / "model")
  with tf.Graph().as_default() as graph, tf1.Session() as session:
    _, _, train = _graph()
    saver = tf1.train.Saver()
    session.run(tf1.global_variables_initializer())
    for t in range(3):
      session.run(train, _feed(t))
    count = len(graph.get_operations())
    for _ in range(2):
      saver.save(session, path)
    assert len(graph.get_operations()) == count
  assert dict(tf.train.list_variables(path)) == {
      "w": [ROWS, COLUMNS], "w/ExponentialMovingAverage": [ROWS, COLUMNS],
      "w/ExponentialMovingAverage_0.5": [ROWS, COLUMNS], "global_step": []}
  with tf.Graph().as_default(), tf1.Session() as session:
    tf1.train.import_meta_graph(path + ".meta").restore(session, path)
    averages = [v for v in tf1.global_variables()
                if "ExponentialMovingAverage" in v.name]
    assert len(averages) == 2
    reads = averages + [averages[0] + 0, averages[1].read_value()]
    for t in range(3, 6):
      session.run("train_with_avg", _feed(t))
      for read, k in zip(reads, (0, 1, 0, 1)):
        assert_average(session.run(read), range(t + 1), k)
    session.run("train_with_avg", _feed(6))
    saver = tf1.train.Saver()
    saver.save(session, path + "2")
    session.run("train_with_avg", _feed(7))
    saver.restore(session, path + "2")
    assert_average(session.run(averages[1]), range(7), 1)
    assert not session.run(tf1.report_uninitialized_variables()).size


def test_a_monitored_session_and_its_meta_file(tmp_path):
  with tf.Graph().as_default():
    w, opt, train = _graph()
    average = opt.average(w)
    with tf1.train.MonitoredTrainingSession(
        checkpoint_dir=str(tmp_path), save_checkpoint_steps=1) as session:
      for t in range(4):
        session.run(train, _feed(t))
  path = tf1.train.latest_checkpoint(str(tmp_path))
  assert_average(
      tf.train.load_variable(path, "w/ExponentialMovingAverage"), range(4))
  with tf.Graph().as_default(), tf1.Session() as session:
    tf1.train.import_meta_graph(path + ".meta").restore(session, path)
    names = [v.op.name for v in tf1.global_variables()]
    assert "w/ExponentialMovingAverage" in names and "w" in names
    average = tf1.global_variables()[names.index("w/ExponentialMovingAverage")]
    assert_average(session.run(average), range(4))


def test_simple_save(tmp_path):
  path = str(tmp_path / "model")
  with _session() as (session, w, opt, train):
    x = tf1.placeholder(tf.float64, [], name="x")
    y = tf.identity(opt.average(w) + x, name="y")
    session.run(tf1.global_variables_initializer())
    for t in range(3):
      session.run(train, _feed(t))
    tf1.saved_model.simple_save(session, path, {"x": x}, {"y": y})
  with tf.Graph().as_default(), tf1.Session() as session:
    tf1.saved_model.loader.load(session, ["serve"], path)
    assert_average(session.run("y:0", {"x:0": 0}), range(3))
  served = tf.saved_model.load(path).signatures["serving_default"]
  assert_average(served(x=tf.constant(0., tf.float64))["y"], range(3))


def test_a_server_that_outlives_a_job():
  """The second job has fewer rows; its sums begin anew."""
  server = tf.distribute.Server.create_local_server()
  for rows in (ROWS, 4, ROWS):
    with tf.Graph().as_default(), tf1.Session(server.target) as session:
      w, opt, _ = _graph(rows=rows)
      grad = tf.IndexedSlices(tf.ones([1, COLUMNS], tf.float64), [2],
                              [rows, COLUMNS])
      train = opt.apply_gradients([(grad, w)])
      # First, for the average takes the value of an initialized variable.
      session.run(w.initializer)
      session.run(tf1.global_variables_initializer())
      value, average = table()[:rows], table()[:rows]
      for _ in range(4):
        session.run(train)
        value[2] -= 0.5
        average += 0.1 * (value - average)
      got = session.run(opt.average(w))
      np.testing.assert_allclose(got, average, rtol=1e-12)
      session.run(train)  # Rows lag behind when the job ends.


def test_lazy_is_none_or_false():
  for lazy in (True, 0, "no"):
    with pytest.raises(ValueError, match="`lazy` must be None"):
      moving(lazy=lazy)
    with pytest.raises(ValueError, match="`lazy` must be None"):
      wk.MovingAverage("sgd", lazy=lazy)
  for dense in (V1(False), Keras(False)):
    dense.step()
    assert isinstance(dense.average(), (tf.Variable, keras.Variable))
    assert not dense.opt.is_lazy(dense.w)
  assert wk.MovingAverage.from_config(
      wk.MovingAverage("sgd", lazy=False).get_config())._lazy is False
  assert _lazy.is_lazy(None) is False
