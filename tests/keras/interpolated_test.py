"""ScheduleFree and PrimalAverage of Keras: x in all of Keras that reads it.

both/interpolated_test.py has trajectories in each mode, swaps and checkpoints.
"""

import functools
import os
import re

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import arrays
import keras_versions
import numerics
import interpolated_model
from training import in_mode, native_ops, stepping
import wrapopt.keras as wk

K = keras.optimizers

MODES = ("eager", "function", "jit")
MODE = pytest.mark.parametrize("mode", MODES)
START = np.linspace(-2, 2, 12).reshape(4, 3)


def sgd(**more):
  return wk.ScheduleFree(K.SGD(0.5), **more)


def primal(opt, **more):
  """x moves fast enough for a few steps to show it."""
  return wk.PrimalAverage(opt, 0.75, 0.5, **more)


EACH = pytest.mark.parametrize("wrapper", [wk.ScheduleFree, primal],
                               ids=["schedule_free", "primal_average"])


def points(opt, v):
  return opt.average(v).numpy(), v.numpy(), opt.z(v).numpy()


def assert_points(opt, v, model, rtol, atol=0.0):
  arrays.assert_close(points(opt, v), (model.x, model.y, model.z), rtol, atol)


@pytest.mark.parametrize("make, want", [
    # z goes 1, 2, 3; x is the mean of it; y is in the middle.
    (lambda opt: wk.ScheduleFree(opt, 0.5),
     [[1, 1, 1], [1.5, 1.75, 2], [2, 2.5, 3]]),
    # x moves to the middle of the old x and the new z.
    (lambda opt: wk.PrimalAverage(opt, 0.5, 0.5),
     [[0.5, 0.75, 1], [1.25, 1.625, 2], [2.125, 2.5625, 3]])])
def test_in_the_head(make, want):
  w, opt, seen = keras.Variable([0.0]), make(K.SGD(1.0)), []
  for _ in range(3):
    opt.apply([tf.constant([-1.0])], [w])
    seen.append([float(x[0]) for x in points(opt, w)])
  assert seen == want


@pytest.mark.parametrize("make, alone", [
    # By the op: Keras computes the powers of the betas in float32.
    (lambda: K.AdamW(0.125), lambda: wk.MovingAverage(K.AdamW(0.125))),
    (lambda: K.SGD(0.125, momentum=0.5),) * 2])
def test_a_primal_average_that_is_off(make, alone):
  """x, y and z are one: the inner optimizer's."""
  v, w = (keras.Variable(START, dtype="float32") for _ in range(2))
  opt, alone = wk.PrimalAverage(make(), 0.5, 0.0), alone()
  for t in range(5):
    for o, x in ((opt, v), (alone, w)):
      o.apply([tf.fill([4, 3], t - 1.5)], [x])
  for got in points(opt, v):
    np.testing.assert_allclose(got, w.numpy(), rtol=1e-6, atol=1e-6)
  numerics.assert_same_bits(opt.z(v).numpy(), w.numpy())


def test_nesterov_s_momentum_is_a_primal_average_at_x():
  """Keras's SGD with the rate lr / (1 - m) for z, whose own points are y."""
  m, lr = 0.75, 0.125
  v, w = (keras.Variable(START, dtype="float64") for _ in range(2))
  opt = wk.PrimalAverage(K.SGD(lr / (1 - m)), m, m)
  alone = K.SGD(lr, m, nesterov=True)
  for t in range(30):
    for o, x in ((opt, v), (alone, w)):
      o.apply([0.5 * x.value + tf.sin(tf.constant(t, tf.float64))], [x])
    np.testing.assert_allclose(v.numpy(), w.numpy(), 1e-6, 1e-6)


@EACH
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("make", [
    lambda: K.SGD(0.25), lambda: K.Adamax(0.25, beta_1=0.0)])
def test_all_shapes(make, dtype, wrapper):
  """Empty, scalar, low precision; without a gradient, nothing moves."""
  variables = [keras.Variable(np.full(shape, 2.0), dtype=dtype, name=name)
               for name, shape in (("matrix", (3, 2)), ("scalar", ()),
                                   ("empty", (0, 2)), ("unused", (2,)))]
  opt = wrapper(make())
  for _ in range(3):
    with pytest.warns(UserWarning, match="Gradients do not exist"):
      opt.apply([*(tf.ones(v.shape, dtype) for v in variables[:3]), None],
                variables)
  want = interpolated_model.Model(2.0, interpolated_model.Inner("SGD"), **(
      {"momentum": 0.75, "average_decay": 0.5} if wrapper is primal else {}))
  for _ in range(3):
    want.step(1.0, 0.25)
  eps = float(ml_dtypes.finfo(variables[0].value.dtype.as_numpy_dtype).eps)
  for v in variables[:2] if isinstance(opt.inner_optimizer, K.SGD) else ():
    assert_points(opt, v, want, 8 * eps)
  for v in variables[:2]:
    assert opt.average(v).dtype == v.dtype and v.numpy().max() < 2
  np.testing.assert_array_equal(points(opt, variables[3]), 2.0)


@pytest.mark.parametrize("wrapper, inner, rule, copies", [
    *((wk.ScheduleFree, inner, f"ScheduleFree{rule}", copies)
      for inner, rule, copies in (
          ("SGD", "SGD", 1), ("Adam", "Adam", 2), ("AdamW", "Adam", 2),
          ("RMSprop", "RMSProp", 2), ("Adagrad", "Adagrad", 2))),
    (primal, "SGD", "ScheduleFreeSGD", 1),
    (primal, "Adam", "PrimalAverageAdam", 3),
    (primal, "AdamW", "PrimalAverageAdam", 3),
    (primal, "RMSprop", "ScheduleFreeRMSProp", 2)])
def test_one_op_and_no_copy_more(wrapper, inner, rule, copies):
  variables = [keras.Variable(np.zeros(5, np.float32)) for _ in range(3)]
  opt = wrapper(interpolated_model.INNER[inner].keras(0.9))
  step = stepping(opt, variables, "function")
  args = [tf.zeros(5)] * 3
  assert native_ops(step, *args) == {"Apply" + rule: 1, "CheckInitialized": 1}
  held = [v for v in opt.variables if v.shape == (5,)]
  assert len(held) == 3 * copies
  jit = stepping(opt, variables, "jit")
  hlo = jit.experimental_get_compiler_ir(*args)("hlo")
  assert set(re.findall(r'op_type="(Wrapopt>\w+)"', hlo)) == {"Wrapopt>Apply"}


@pytest.mark.by_day(1)
@EACH
@MODE
def test_a_sparse_gradient_is_the_dense_one(mode, wrapper):
  tables = [keras.Variable(START, dtype="float32") for _ in range(4)]
  make = lambda: wrapper(K.Adam(0.1, weight_decay=0.1))
  sparse, dense = make(), make()
  two = [wrapper(K.Adamax(0.1, beta_1=0.0)) for _ in range(2)]
  opts = [sparse, dense, *two]
  steps = [stepping(opt, [v], mode) for opt, v in zip(opts, tables)]
  for t in range(4):
    # Row 1 twice.
    slices = tf.IndexedSlices(tf.fill([3, 3], 0.25 * (t + 1)),
                              tf.constant([1, 3, 1]), tf.constant([4, 3]))
    full = tf.constant(np.outer([0, 2, 0, 1], [0.25 * (t + 1)] * 3), tf.float32)
    for i, step in enumerate(steps):
      step(full if i % 2 else slices)
  for i in (0, 2):
    arrays.assert_close(points(opts[i], tables[i]),
                        points(opts[i + 1], tables[i + 1]), rtol=1e-6)
  # Rows without a gradient move, too: y to z.
  assert (tables[0].numpy()[0] != START[0]).all()


def trained(opt=None, steps=5, dtype="float32"):
  v = keras.Variable(START, dtype=dtype)
  opt = opt or sgd()
  for t in range(steps):
    opt.apply([tf.cast(tf.sin(v.value) + t, dtype)], [v])
  return opt, v


@EACH
def test_after_the_end_the_training_goes_on(wrapper):
  """x is in the variables then; a step goes on from it."""
  opt, v = trained(wrapper(K.SGD(0.5)))
  other, w = trained(wrapper(K.SGD(0.5)))
  x, _, z = points(opt, v)
  opt.finalize_variable_values([v])
  arrays.assert_same_bits(points(opt, v), (x, x, z))
  opt.finalize_variable_values([v])
  numerics.assert_same_bits(v.numpy(), x)
  for _ in range(3):
    opt.apply([tf.ones(v.shape)], [v])
    other.apply([tf.ones(w.shape)], [w])
  arrays.assert_close(points(opt, v), points(other, w), rtol=1e-5)
  kept, v = trained(sgd(keep_raw_weights=True))
  y = v.numpy()
  kept.finalize_variable_values([v])
  numerics.assert_same_bits(v.numpy(), y)


@EACH
def test_weights_that_are_set_before_the_first_step(wrapper):
  v = keras.Variable([1.0])
  opt = wrapper(K.SGD(0.5))
  opt.build([v])
  v.assign([3.0])
  np.testing.assert_array_equal(points(opt, v), [[3.0]] * 3)
  opt.apply([tf.constant([2.0])], [v])
  np.testing.assert_array_equal(points(opt, v), (
      [[2.0]] * 3 if wrapper is wk.ScheduleFree else [[2.5], [2.375], [2.0]]))


@pytest.mark.by_day(1)
@EACH
@pytest.mark.parametrize("inner", [
    lambda: K.SGD(0.5), lambda: K.Adamax(0.5, beta_1=0.0)])
@MODE
def test_accumulated_and_skipped_steps(inner, mode, wrapper):
  """Only each second call takes a step, and none with an infinity."""
  v, w = keras.Variable([2.0, 3.0]), keras.Variable([2.0, 3.0])
  accumulating = inner()
  accumulating.gradient_accumulation_steps = 2
  opt = wrapper(K.LossScaleOptimizer(accumulating, 4.0))
  step, stock = stepping(opt, [v], mode), wrapper(inner())
  for grads in ((1.0, 3.0), (np.inf,), (2.0, np.nan, 4.0)):
    for grad in grads:
      before = arrays.values((v, *opt._variables))
      step(tf.constant([grad, grad]) * opt.scale_loss(1.0))
      if not np.isfinite(grad) or grad == grads[0]:
        arrays.assert_same_bits(arrays.values((v, *opt._variables)), before)
    if len(grads) > 1:
      stock.apply([tf.fill([2], (grads[0] + grads[-1]) / 2)], [w])
  arrays.assert_close(points(opt, v), points(stock, w), rtol=1e-6)
  assert v.numpy()[0] < 1.75


@pytest.mark.by_day(2)
@pytest.mark.parametrize("rates, more", [
    ((0.0, 0.5, np.inf, 0.5), {}), ((0.5, np.nan, 0.5), {"warmup_steps": 2}),
    ((1e30, 0.5), {"weight_lr_power": 20}), ((-np.inf, 0.5), {}),
    ((0.5,) * 7, {"r": 400})])
def test_numbers_that_overflow(rates, more):
  """Eagerly they neither warn nor fail, and are those of a function."""
  seen = {}
  for mode in ("eager", "function"):
    v, opt = keras.Variable([2.0]), sgd(**more)
    step = stepping(opt, [v], mode)
    for rate in rates:
      opt.learning_rate = rate
      with np.errstate(all="raise"):
        step(tf.constant([1.0]))
    seen[mode] = [*points(opt, v), *[x.numpy() for x in opt._variables]]
  arrays.assert_close(*seen.values(), rtol=1e-6)
  assert np.isnan(seen["eager"][0]) or rates[0] < 0


# Steps on some of three variables, and the ends of trainings, which set all of
# them to x.
END = "end"
SOME = ("abc", "bc", END, "bc", "abc", "ac", END, "ac", "bc", "abc", END)


def on_some(some):
  return [tf.fill([4, 3], i - 0.5) if name in some else None
          for i, name in enumerate("abc")]


def three():
  return [keras.Variable(START + i, dtype="float32", name=name)
          for i, name in enumerate("abc")]


@pytest.mark.by_day(1)
@EACH
@keras_versions.needs("MultiOptimizer")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("around", [False, True])
@MODE
def test_multi_optimizer(mode, around, wrapper):
  """Each part takes the steps of its optimizer alone."""
  make = {"ab": lambda: K.SGD(0.5), "c": lambda: K.Adamax(0.25, beta_1=0.0)}
  parts = [make() for make in make.values()]
  if around:
    parts = [wrapper(part) for part in parts]
  opt = K.MultiOptimizer(K.OptimizerMap(parts[1], {"[ab]": parts[0]}))
  if not around:
    opt = wrapper(opt)
    parts = [opt, opt]
  variables, others = three(), three()
  alone = [(wrapper(make()), others[:2] if names == "ab" else others[2:])
           for names, make in make.items()]
  opt.build(variables)

  @functools.cache
  def stepping_on(some):
    return in_mode(lambda: opt.apply(on_some(some), variables), mode)

  held = {}
  for some in SOME:
    if some == END:
      opt.finalize_variable_values(variables)
    else:
      stepping_on(some)()
    grads, before, held = on_some(some), held, {}
    for part, (x, its) in zip(parts, alone):
      if some == END:
        x.finalize_variable_values(its)
      else:
        x.apply([grads.pop(0) for _ in its], its)
      for w in its:
        held[w.path] = points(part, variables[len(held)])
        # XLA may contract a multiplication and an addition.
        arrays.assert_close(held[w.path], points(x, w), 1e-5 * (mode == "jit"))
    # All other variables hold still.
    for name in set(before) - set(some if some != END else "abc"):
      arrays.assert_same_bits(held[name], before[name])


@EACH
def test_a_failed_step_changes_nothing(wrapper):
  class Failing(K.Adamax):

    def update_step(self, gradient, variable, learning_rate):
      super().update_step(gradient, variable, learning_rate)
      if fails:
        raise ArithmeticError

  fails = False
  opt, v = trained(wrapper(Failing(0.5, beta_1=0.0)))
  before = points(opt, v)
  fails = True
  with pytest.raises(ArithmeticError):
    opt.apply([tf.ones(v.shape)], [v])
  arrays.assert_same_bits(points(opt, v), before)


@pytest.mark.parametrize("make, error, message", [
    (lambda: wk.ScheduleFree(K.SGD(1.0, momentum=0.5)), ValueError,
     "no momentum, which would act twice, got SGD with momentum=0.5 .* Pass "
     "momentum=0 to SGD"),
    (lambda: wk.ScheduleFree(K.Adam(beta_1=0.5)), ValueError,
     "Adam with beta_1=0.5 and a ScheduleFree with momentum=0.9. Pass "
     "beta_1=0.9 or 0 to Adam"),
    (lambda: wk.ScheduleFree(K.Nadam(beta_1=0.9)), ValueError,
     "Nadam with beta_1=0.9 .* Pass beta_1=0 to Nadam"),
    (lambda: wk.ScheduleFree(K.LossScaleOptimizer(K.Lion())), ValueError,
     "Lion with beta_1=0.9"),
    (lambda: wk.ScheduleFree(wk.LazyAdam()), ValueError,
     "LazyAdam with beta_1=0.9"),
    (lambda: wk.ScheduleFree(K.SGD(use_ema=True)), ValueError,
     "that keeps averages itself, got SGD with use_ema=True"),
    (lambda: wk.ScheduleFree(K.LossScaleOptimizer(K.SGD(use_ema=True))),
     ValueError, "got SGD with use_ema=True"),
    (lambda: sgd(momentum=0.0), ValueError,
     "`momentum` must be finite and greater than 0, and at most 1, got 0.0"),
    (lambda: sgd(momentum=1.5), ValueError, "at most 1, got 1.5"),
    (lambda: sgd(momentum="a"), TypeError, "`momentum` must be a number"),
    (lambda: sgd(warmup_steps=-1), ValueError, "`warmup_steps` must be at"),
    (lambda: sgd(warmup_steps=1.5), TypeError, "must be an integer, got 1.5"),
    (lambda: sgd(r=-1), ValueError, "`r` must be finite and at least 0"),
    (lambda: sgd(weight_lr_power=np.nan), ValueError, "`weight_lr_power` must"),
    (lambda: sgd(weight_lr_power=-0.5), ValueError, "at least 0, got -0.5"),
    (lambda: sgd(weight_decay_at_y=-0.1), ValueError, "`weight_decay_at_y`"),
    (lambda: wk.ScheduleFree(1.0), TypeError, "must be a Keras 3 optimizer"),
    (lambda: wk.PrimalAverage(K.SGD(), 0.0), ValueError, "`momentum` must be"),
    (lambda: wk.PrimalAverage(K.SGD(), average_decay=-0.1), ValueError,
     "`average_decay` must be finite and at least 0, and at most 1, got -0.1"),
    (lambda: wk.PrimalAverage(wk.LazyAdam()), ValueError,
     "must not be or hold a LazyAdam, since all rows move in each step"),
    (lambda: primal(K.Adam(use_ema=True)), ValueError,
     "of a PrimalAverage must not .* got Adam with use_ema=True"),
    *((lambda make=make, outer=outer, between=between: (
        between(make(K.SGD())) if outer else make(between(K.SGD()))),
       ValueError, "must not be or hold a .*keeps an average of its own")
      for make in (wk.MovingAverage, wk.SWA, wk.Lookahead)
      for outer in (False, True) for between in (wk.ScheduleFree, primal)),
    *((lambda a=a, b=b: a(b(K.SGD())), ValueError,
       "a variable has one average of this kind")
      for a in (wk.ScheduleFree, primal) for b in (wk.ScheduleFree, primal)),
])
def test_refused(make, error, message):
  with pytest.raises(error, match=message):
    make()


@keras_versions.needs("ScheduleFreeAdamW")
def test_refused_with_keras_s_own():
  for wrapper in wk.ScheduleFree, primal:
    with pytest.raises(ValueError, match="ScheduleFreeAdamW, which is Sched"):
      wrapper(K.ScheduleFreeAdamW())


def test_refused_constraints():
  v = keras.Variable([1.0])
  v.constraint = keras.constraints.NonNeg()
  opt = sgd()
  with pytest.raises(ValueError, match="must have no constraint"):
    opt.apply([tf.ones(1)], [v])
  np.testing.assert_array_equal(v.numpy(), [1.0])


# Models.


@functools.cache
def data():
  rng = np.random.default_rng(3)
  x = rng.normal(size=(64, 6)).astype(np.float32)
  return x, (x @ rng.normal(size=(6, 1))).astype(np.float32)


def model_of(opt, *more):
  model = keras.Sequential([
      keras.layers.Input((6,)), keras.layers.Dense(4, activation="tanh"), *more,
      keras.layers.Dense(1)])
  rng = np.random.default_rng(4)
  model.set_weights([rng.normal(size=w.shape) if w.ndim > 1 else w
                     for w in model.get_weights()])
  model.compile(opt, "mse")
  return model


def freeze(model, is_frozen=True):
  """Freezes the first layer or trains it again, by the same optimizer."""
  model.layers[0].trainable = not is_frozen
  model.compile(model.optimizer, "mse")


def fit(model, epochs=1, **more):
  return model.fit(*data(), batch_size=16, shuffle=False, epochs=epochs,
                   verbose=0, **more)


def test_early_stopping_restores_x():
  model = model_of(wk.ScheduleFree(K.SGD(4.0)))
  fit(model, 3, validation_data=data(),
      callbacks=[wk.EvaluateWithAverages(keras.callbacks.EarlyStopping(
          patience=10, restore_best_weights=True))])
  opt = model.optimizer
  for v in model.trainable_variables:  # The new start of all points.
    np.testing.assert_array_equal(points(opt, v), [v.numpy()] * 3)


def test_recalibrated_batch_norm():
  model = model_of(wk.ScheduleFree(K.SGD(0.5)),
                   keras.layers.BatchNormalization())
  batches = tf.data.Dataset.from_tensor_slices(data()).batch(16)
  fit(model, 2, callbacks=[wk.EvaluateWithAverages(recalibrate=batches)])
  norm = model.layers[1]
  hidden = np.tanh(data()[0] @ model.get_weights()[0] + model.get_weights()[1])
  np.testing.assert_allclose(norm.moving_mean, hidden.mean(0), rtol=1e-4)


def model_points(model):
  return [x for v in model.weights for x in points(model.optimizer, v)]


def x_in_some(model):
  """Trains a model, then its second layer: the first one holds x."""
  fit(model)
  freeze(model)
  for _ in range(2):
    model.train_on_batch(*data())
  for i, v in enumerate(model.weights):
    x, y, _ = points(model.optimizer, v)
    assert (x == y).all() == (i < 2)


@pytest.mark.by_day(1)
@EACH
@pytest.mark.parametrize("holds, way", [
    ("y", "model"), ("x", "model"), *(("x in some", way) for way in (
        "model", "weights", "before the build"))])
def test_keras_files(holds, way, wrapper, tmp_path):
  """A run that goes on from a file gets the numbers of one that went on."""
  path = str(tmp_path / ("model.keras" if way == "model" else "m.weights.h5"))
  late = way == "before the build"
  # Keras loads no slots before they are made.
  make = lambda: model_of(wrapper(
      "sgd" if late else "adam", keep_raw_weights=holds == "y", **(
          {"warmup_steps": 6, "r": 1.0} if wrapper is wk.ScheduleFree else {})))
  model = make()
  (x_in_some if holds == "x in some" else fit)(model)
  if way == "model":
    if holds == "x in some":
      freeze(model, False)  # Else, the loaded optimizer lacks the layer.
    model.save(path)
    loaded = keras.saving.load_model(path)
  else:
    model.save_weights(path)
    loaded = make()
    if not late:
      loaded.optimizer.build(loaded.weights)
    loaded.load_weights(path)
    if late:
      loaded.optimizer.build(loaded.weights)
  if way == "model":
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
  arrays.assert_same_bits(model_points(loaded), model_points(model))
  for is_frozen in (True, False) if holds == "x in some" else ():
    for x in (loaded, model):
      freeze(x, is_frozen)
      x.train_on_batch(*data())
    arrays.assert_same_bits(model_points(loaded), model_points(model))
  for x in (loaded, model):
    fit(x)
  arrays.assert_same_bits(model_points(loaded), model_points(model))


@EACH
@pytest.mark.parametrize("holds", ["y", "x in some"])
def test_a_file_of_averages_in_place(holds, wrapper, tmp_path):
  """It holds x as the weights; a training goes on from it as from y."""
  path = str(tmp_path / "model.keras")
  opt = wrapper("adam", keep_raw_weights=holds == "y")
  model = model_of(opt)
  (fit if holds == "y" else x_in_some)(model)
  freeze(model, False)
  with opt.averaged_weights():
    model.save(path)
  loaded = keras.saving.load_model(path)
  for v, w in zip(model.trainable_variables, loaded.trainable_variables):
    x, _, z = points(opt, v)
    arrays.assert_same_bits(points(loaded.optimizer, w), (x, x, z))


@pytest.mark.by_day(0)
def test_files_without_its_state(tmp_path):
  """Those of the plain optimizer: all points start at the weights."""
  path = str(tmp_path / "model.weights.h5")
  plain = model_of("adam")
  fit(plain)
  plain.save_weights(path)
  model = model_of(wk.ScheduleFree("adam"))
  model.optimizer.build(model.trainable_variables)
  model.load_weights(path, skip_mismatch=True)
  for v, w in zip(model.trainable_variables, plain.trainable_variables):
    np.testing.assert_array_equal(points(model.optimizer, v), [w.numpy()] * 3)


def test_snapshots_hold_x(tmp_path):
  model = model_of(wk.ScheduleFree(K.SGD(0.1), keep_raw_weights=True))
  fit(model, callbacks=[wk.Snapshots(str(tmp_path), save_steps=4)])
  [file] = [f for f in os.listdir(tmp_path) if f.endswith(".weights.h5")]
  other = model_of("sgd")
  other.load_weights(str(tmp_path / file))
  arrays.assert_same(other.get_weights(), [
      model.optimizer.average(v) for v in model.trainable_variables])
