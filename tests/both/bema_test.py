"""BEMA in both halves: numbers, the average in place of weights, and files."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import arrays
import averages
import numerics
import replicas  # pylint: disable=unused-import
import wrapopt
from training import moving
from wrapopt import checkpoints
from wrapopt._averages import _bias_correction
from wrapopt._averages import _decays
from wrapopt.keras._averages import _first_step
import wrapopt.keras as wk

K = keras.optimizers
v1 = tf.compat.v1
START = np.array([[2.0, -4.0], [8.0, 1.0]], np.float32)
SIMPLE = {"lag": 1, "ema_power": 1, "bias_power": 1}
DEFAULT = {"lag": 10, "multiplier": 1.0, "ema_power": 0.5, "bias_power": 0.2}
EAGER = [way for way in averages.WAYS if way.mode == "eager" and way.one_pass]
SESSIONS = [way for way in averages.WAYS if way.is_graph and way.one_pass]


def ways(chosen):
  return pytest.mark.parametrize("way", chosen, ids=str)


class Model:
  """The paper's averages of a variable, in float64."""

  def __init__(self, v, lag=10, multiplier=1.0, ema_power=0.5, bias_power=0.2,
               burn_in=0, every=1):
    self.v = self.s = self.v_0 = np.float64(v)
    self.age = lambda t: lag + multiplier * t
    self.powers, self.burn_in, self.every = (
        ema_power, bias_power), burn_in, every
    self.t = 0

  def step(self, v):
    self.v, self.t = np.float64(v), self.t + 1
    if self.t % self.every:
      return
    if self.t <= self.burn_in:
      self.s = self.v_0 = self.v
    else:
      beta = self.age(self.t) ** -self.powers[0]
      self.s = (1 - beta) * self.s + beta * self.v

  def average(self):
    return self.s + self.age(self.t) ** -self.powers[1] * (self.v - self.v_0)


def running(way, decay=None, inner="momentum", **more):
  decay = wrapopt.BEMA(**SIMPLE) if decay is None else decay
  return averages.running(way, {"v": START}, lambda run: {
      "average_decay": decay, **more}, inner)


def trained(run, steps=3):
  for t in range(steps):
    run.step(t - 3.0)
  return run.value("v"), run.average("v")


@pytest.mark.by_day(2)
@ways(averages.WAYS)
@pytest.mark.parametrize("settings, every", [
    (DEFAULT, 1), ({**SIMPLE, "multiplier": 0.5, "burn_in": 4}, 1),
    ({"burn_in": 2}, 2)], ids=["default", "burn_in", "every"])
def test_trajectory(way, settings, every):
  model = Model(START, **settings, every=every)
  with running(way, wrapopt.BEMA(**settings), update_every=every) as run:
    for t in range(12):
      run.step(np.sin(t) + 0.5)
      model.step(run.value("v"))
      averages.assert_close(run.average("v"), model.average())
    assert np.abs(model.average() - model.v).max() > 0.1
    assert np.abs(model.average() - model.s).max() > 0.1


def test_start_step():
  """Keras's start_step ends before t begins to count."""
  [way] = [way for way in EAGER if way.half == "keras"]
  model = None
  with running(way, start_step=3) as run:
    for t in range(8):
      run.step(t - 3.0)
      if t < 2:
        numerics.assert_same_bits(run.average("v"), run.value("v"))
      elif t == 2:
        model = Model(run.value("v"), **SIMPLE)
      else:
        model.step(run.value("v"))
        averages.assert_close(run.average("v"), model.average())


@pytest.mark.by_day(2)
@ways(averages.WAYS)
def test_beside_another_decay(way):
  """Each has its own numbers; one in place hides the other."""
  decays = [0.5, wrapopt.BEMA(**SIMPLE)]
  refused = pytest.raises((RuntimeError, tf.errors.FailedPreconditionError,
                           tf.errors.InvalidArgumentError))
  with running(way, decays) as both:
    trained(both)
    alone = [both.average("v", decay) for decay in decays]
    for decay, want in zip(decays, alone):
      before = both.state()
      with both.in_place(decay=decay):
        numerics.assert_same_bits(both.value("v"), want)
        with refused:
          both.average("v", decays[1])
        with refused if decay == 0.5 else contextlib.nullcontext():
          both.average("v", 0.5)
        with refused:
          both.step(1.0)
        numerics.assert_same_bits(both.value("v"), want)
      arrays.assert_same_bits(both.state(), before)
  for decay, want in zip(decays, alone):
    if way.is_graph:
      continue
    with running(way, decay) as run:
      trained(run)
      numerics.assert_same_bits(run.average("v"), want)


@pytest.mark.by_day(0)
@ways(EAGER)
def test_a_function_that_was_traced_before(way):
  """It finds out by itself that another average is in place."""
  with running(way, [0.5, wrapopt.BEMA(**SIMPLE)]) as run:
    trained(run)
    opt, v = run.averaging, run.variables["v"]
    decays = opt._averages.decays
    read = tf.function(lambda: tf.identity(opt.average(v, decays[1])))
    want = run.average("v", decays[1])
    numerics.assert_same_bits(read().numpy(), want)
    for decay in opt._averages.decays[:2]:
      with run.in_place(decay=decay):
        with pytest.raises((tf.errors.InvalidArgumentError,
                            tf.errors.FailedPreconditionError)):
          read()
    numerics.assert_same_bits(read().numpy(), want)


@ways(EAGER + SESSIONS)
def test_seed_averages(way):
  with running(way) as run:
    trained(run)
    run.seed()
    v = run.value("v")
    numerics.assert_same_bits(run.average("v"), v)
    model = Model(v, **SIMPLE)
    for t in range(3):
      run.step(t - 3.0)
      model.step(run.value("v"))
    averages.assert_close(run.average("v"), model.average())


@pytest.mark.by_day(1)
@ways(EAGER + SESSIONS)
def test_files(way, tmp_path):
  """A run that goes on from a file gets the numbers of one that went on."""
  for how in averages.files(way):
    with running(way) as run:
      _, average = trained(run)
      before = run.state()
      path = run.save(how, str(tmp_path / how))
      following = trained(run)
      if how == "checkpoint":
        with running(way) as other:
          status = other.restore(how, path)
          numerics.assert_same_bits(other.average("v"), average)
          got = trained(other)
          status.assert_consumed()
      else:
        run.restore(how, path)
        arrays.assert_same_bits(run.state(), before)
        got = trained(run)
      arrays.assert_same_bits(got, following)
    if how == "swapping_saver":
      file = tf.train.load_checkpoint(path)
      numerics.assert_same_bits(file.get_tensor("v"), average)


@ways(SESSIONS)
def test_snapshots(way, tmp_path):
  with running(way) as run:
    op, feed = run.train_op(1.0)
    hook = checkpoints.SnapshotHook(run.opt, str(tmp_path), 2)
    with v1.train.MonitoredSession(hooks=[hook]) as session:
      for _ in range(2):
        session.run(op, feed)
      want = session.run(run.opt.average(run.variables["v"]))
    [path] = {str(p).removesuffix(".index") for p in tmp_path.glob("*.index")}
    numerics.assert_same_bits(tf.train.load_variable(path, "v"), want)


@ways(EAGER)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(way, dtype):
  value = START.astype(tf.as_dtype(dtype).as_numpy_dtype)
  model = Model(value.astype(np.float64), **SIMPLE)
  with averages.running(way, {"v": value}, lambda run: {
      "average_decay": wrapopt.BEMA(**SIMPLE),
      **({"shadow_dtype": tf.float32} if way.half == "v1" and dtype != "float64"
         else {})}, "sgd") as run:
    for t in range(4):
      run.step(t - 3.0)
      model.step(run.value("v").astype(np.float64))
    averages.assert_close(run.average("v"), model.average())
    with run.in_place():
      np.testing.assert_allclose(run.value("v").astype(np.float64),
                                 model.average(), 0.01)


@ways(EAGER)
def test_rows_that_lag(way):
  """The averages of an embedding's untouched rows catch up."""
  with running(way, inner="sgd") as lazy, running(
      way, inner="sgd", lazy=False) as dense:
    for t in range(6):
      # Row 1 in each third step.
      rows = [1] if t % 3 == 2 else [0]
      for run in lazy, dense:
        run.step({"v": (np.float32([[t, 1.0]]), rows)})
    assert lazy.averaging.is_lazy(lazy.variables["v"])
    np.testing.assert_allclose(lazy.average("v"), dense.average("v"), 1e-6)
    with lazy.in_place(), dense.in_place():
      np.testing.assert_allclose(lazy.value("v"), dense.value("v"), 1e-6)


@pytest.mark.parametrize("use_resource", [False, True])
def test_a_statistic_is_not_corrected(use_resource, tmp_path):
  """A list may hold one: corrected, a variance could be negative."""
  with tf.Graph().as_default(), v1.Session() as session:
    w, variance = (v1.get_variable(
        name, initializer=START, trainable=name == "w",
        use_resource=use_resource) for name in ("w", "variance"))
    opt = moving(wrapopt.BEMA(**SIMPLE), variables=[w, variance])
    with tf.control_dependencies([variance.assign(variance * 0.5)]):
      train = opt.minimize(tf.reduce_sum(w))
    session.run(v1.global_variables_initializer())
    models = Model(START, **SIMPLE), Model(START, **SIMPLE)
    for _ in range(3):
      session.run(train)
      for model, v in zip(models, session.run([w, variance])):
        model.step(v)
    corrected, average = session.run([opt.average(w), opt.average(variance)])
    averages.assert_close(corrected, models[0].average())
    averages.assert_close(average, models[1].s)
    with opt.averaged_weights(session):
      arrays.assert_same_bits(session.run([w, variance]), [corrected, average])
    path = opt.swapping_saver().save(session, str(tmp_path / "model"))
    for name, want in ("w", corrected), ("variance", average):
      numerics.assert_same_bits(tf.train.load_variable(path, name), want)


def test_slices_of_a_variable(tmp_path):
  with tf.Graph().as_default(), v1.Session() as session:
    whole = v1.get_variable(
        "w", [8], initializer=v1.ones_initializer(),
        partitioner=v1.fixed_size_partitioner(2))
    opt = moving(wrapopt.BEMA(**SIMPLE))
    scale = np.arange(8, dtype=np.float32)
    train = opt.minimize(tf.reduce_sum(scale * tf.convert_to_tensor(whole)))
    session.run(v1.global_variables_initializer())
    for _ in range(3):
      session.run(train)
    got = np.concatenate(session.run(opt.average(whole)))
    path = opt.swapping_saver().save(session, str(tmp_path / "model"))
    numerics.assert_same_bits(tf.train.load_variable(path, "w"), got)
  model = Model(np.ones(8), **SIMPLE)
  for t in range(1, 4):
    model.step(1 - t * scale)
  averages.assert_close(got, model.average())


def test_a_step_does_not_touch_v_0():
  """It does not get it, or with a decay of exactly 1, which leaves it alone."""
  decays = _decays.with_origins([wrapopt.BEMA()])
  assert _decays.moving(decays) == [0]
  assert _decays.moving(decays, at_once=False) == [0, 1]
  _, origin = burning = _decays.with_origins([wrapopt.BEMA(burn_in=5)])
  assert _decays.moving(burning) == [0, 1]
  assert [float(origin.at(t)) for t in (1, 5, 6, 10**9)] == [0, 0, 1, 1]
  [way] = [way for way in averages.WAYS if str(way) == "v1-function-one"]
  with running(way) as run:
    trained(run, 1)
    origin = run.opt.get_slot(run.variables["v"], (
        f"ExponentialMovingAverage_{run.opt._averages.decays[1]}"))
    numerics.assert_same_bits(origin.numpy(), START)
    graph = run._function.get_concrete_function([tf.zeros(START.shape)]).graph
    assert [op.type for op in graph.get_operations()
            if op.type.startswith("Wrapopt>Apply")] == ["Wrapopt>Apply"]
    [op] = [op for op in graph.get_operations() if op.type == "Wrapopt>Apply"]
    assert op.get_attr("NK") == 1


@pytest.mark.parametrize("make, error, message", [
    (lambda: wrapopt.BEMA(lag=0.5), ValueError, "`lag` must be finite and at "
     "least 1, got 0.5"),
    (lambda: wrapopt.BEMA(bias_power=-1), ValueError, "`bias_power` must be"),
    (lambda: wrapopt.BEMA(ema_power=-0.5), ValueError, "`ema_power` must be"),
    (lambda: wrapopt.BEMA(ema_power="a"), TypeError, "`ema_power` must be"),
    (lambda: wrapopt.BEMA(burn_in=1.5), TypeError, "must be an integer, got 1"),
    (lambda: wk.MovingAverage(K.SGD(), wrapopt.BEMA(burn_in=3), update_every=2),
     ValueError, r"`update_every` must divide the burn_in of BEMA\(.*burn_in=3"
     r"\), got 2"),
    (lambda: wk.MovingAverage(wk.SWA(K.SGD()), wrapopt.BEMA()), ValueError,
     "MovingAverage with a BEMA must not be or hold .* got SWA"),
    (lambda: wk.MovingAverage(K.SGD(use_ema=True), wrapopt.BEMA()), ValueError,
     "must not be or hold .* got SGD"),
    (lambda: wk.SWA(wk.MovingAverage(K.SGD(), [0.5, wrapopt.BEMA()])),
     ValueError, "of a SWA must not .* MovingAverage with a BEMA"),
    (lambda: moving([wrapopt.BEMA()] * 2), ValueError,
     "must hold different decays"),
])
def test_refused(make, error, message):
  with pytest.raises(error, match=message):
    make()


# Keras.


def model_of(opt):
  keras.utils.set_random_seed(1)
  model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3),
                            keras.layers.BatchNormalization(),
                            keras.layers.Dense(1)])
  model.compile(opt, "mse")
  return model


def fit(model, epochs=1, **more):
  x = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
  y = x.sum(1, keepdims=True)
  return model.fit(x, y, 8, epochs, verbose=0, shuffle=False, **more)


def optimizer(**more):
  return wk.MovingAverage(K.SGD(0.1), [0.5, wrapopt.BEMA(**SIMPLE)], **more)


def weights_of(model):
  return arrays.values(model.trainable_variables)


def averages_of(model):
  return [[model.optimizer.average(v, d).numpy() for v in
           model.trainable_variables] for d in model.optimizer.decays()]


def test_the_names_of_close_decays_differ():
  assert str(wrapopt.BEMA()) == "bema_10_1_0.5_0.2_0"
  a, b = wrapopt.BEMA(burn_in=1000000), wrapopt.BEMA(burn_in=1000001)
  assert str(a) != str(b) and repr(a) != repr(b)
  assert str(wrapopt.BEMA(lag=1e20)) == "bema_1e20_1_0.5_0.2_0"


@pytest.mark.parametrize("decays", [[wrapopt.BEMA(**SIMPLE)],
                                    [0.5, wrapopt.BEMA(**SIMPLE)]])
def test_fit_ends_with_the_average(decays):
  """And the averages are the same then, whichever is in the weights."""
  kept = model_of(wk.MovingAverage(K.SGD(0.1), decays, keep_raw_weights=True))
  model = model_of(wk.MovingAverage(K.SGD(0.1), decays))
  for m in kept, model:
    fit(m)
  want = averages_of(kept)
  assert any((a != b).any() for a, b in zip(want[0], weights_of(kept)))
  for _ in range(2):
    arrays.assert_same_bits(averages_of(model), want)
    arrays.assert_same_bits(weights_of(model), want[0])
    model.optimizer.finalize_variable_values(model.trainable_variables)
  for decay, row in zip(decays, want):
    with model.optimizer.averaged_weights(model, decay=decay):
      arrays.assert_same_bits(weights_of(model), row)
  fit(model)  # From the average.
  assert all(np.isfinite(x).all() for row in averages_of(model) for x in row)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("in_place", [1, 0, None])
def test_keras_files(in_place, tmp_path):
  path = str(tmp_path / "model.keras")
  model = model_of(optimizer(keep_raw_weights=True))
  fit(model)
  want = averages_of(model)
  if in_place is None:
    model.save(path)
  else:
    with model.optimizer.averaged_weights(
        model, decay=model.optimizer.decays()[in_place]):
      model.save(path)
  loaded = keras.saving.load_model(path)
  assert loaded.optimizer.decays() == model.optimizer.decays()
  arrays.assert_same_bits(averages_of(loaded), want)
  if in_place is None:
    for m in loaded, model:
      fit(m)
    arrays.assert_same_bits(loaded.get_weights(), model.get_weights())
    arrays.assert_same_bits(averages_of(loaded), averages_of(model))
  else:
    arrays.assert_same_bits(weights_of(loaded), want[in_place])


def test_evaluated_and_shipped(tmp_path):
  model = model_of(optimizer(average_batch_norm=True, keep_raw_weights=True))
  x = np.random.default_rng(2).normal(size=(16, 4)).astype(np.float32)
  data = x, x.sum(1, keepdims=True)
  history = fit(model, 2, validation_data=data, callbacks=[
      wk.EvaluateWithAverages(decay="all"),
      wk.Snapshots(str(tmp_path), 8)]).history
  opt, bema = model.optimizer, model.optimizer.decays()[1]
  shipped = opt.averaged_model(model, decay=bema)
  shipped.compile(loss="mse")
  [key] = [key for key in history if "bema" in key]
  np.testing.assert_allclose(shipped.evaluate(*data, verbose=0),
                             history[key][-1], 1e-5)
  # A corrected variance could be negative.
  variance = model.layers[1].moving_variance
  assert (shipped.layers[1].moving_variance.numpy() > 0).all()
  numerics.assert_same_bits(shipped.layers[1].moving_variance.numpy(),
                            opt.average(variance, bema).numpy())
  [path] = [p for p in tmp_path.glob("*16*bema*.weights.h5")]
  other = model_of("sgd")
  other.load_weights(str(path))
  arrays.assert_same_bits(weights_of(other), averages_of(model)[1])


def test_mirrored():
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  make = lambda: wk.MovingAverage(K.SGD(0.5), wrapopt.BEMA(**SIMPLE))
  with strategy.scope():
    v = keras.Variable(START)
    opt = make()
    opt.build([v])
  w, alone = keras.Variable(START), make()
  run = tf.function(lambda g: strategy.run(lambda: opt.apply([g / 2], [v])))
  for t in range(4):
    g = tf.fill([2, 2], t - 1.5)
    run(g)
    alone.apply([g], [w])
  np.testing.assert_allclose(opt.average(v), alone.average(w), 1e-6)
  with opt.averaged_weights():
    for local in strategy.experimental_local_results(v.value):
      np.testing.assert_allclose(local, alone.average(w), 1e-6)
  want = np.array(alone.average(w))
  opt.finalize_variable_values([v])
  for local in strategy.experimental_local_results(v.value):
    np.testing.assert_allclose(local, want, 1e-6)
  np.testing.assert_allclose(opt.average(v), want, 1e-6)


def test_swap_computes_all_averages_at_once(monkeypatch):
  computed, steps = [], []
  of, steps_now = (_bias_correction.BiasCorrected._of,
                   _first_step.FirstStep.steps_now)
  monkeypatch.setattr(
      _bias_correction.BiasCorrected, "_of",
      lambda self, *args: computed.append(1) or of(self, *args))
  monkeypatch.setattr(
      _first_step.FirstStep, "steps_now",
      lambda self, *args: steps.append(1) or steps_now(self, *args))
  opt = wk.MovingAverage(K.SGD(.5), wrapopt.BEMA(**SIMPLE))
  variables = [keras.Variable(START) for _ in range(5)]
  opt.apply([tf.ones([2, 2])] * 5, variables)
  with opt.averaged_weights():
    # One vector of all.
    assert (len(computed), len(steps)) == (1, 1)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_a_swap_in_a_session_runs_as_many_ops_for_any_number(use_resource):

  def ran(n):
    with tf.Graph().as_default(), v1.Session() as session:
      variables = [v1.get_variable(f"v{i}", initializer=START,
                                   use_resource=use_resource)
                   for i in range(n)]
      opt = wrapopt.MovingAverageOptimizer(
          v1.train.GradientDescentOptimizer(.5), wrapopt.BEMA(**SIMPLE))
      step = opt.minimize(tf.add_n([tf.reduce_sum(v * v) for v in variables]))
      session.run(v1.global_variables_initializer())
      session.run(step)
      names, run = set(), session.run
      session.run = lambda fetches, *args: names.update(fetches) or run(
          fetches, *args)
      with opt.averaged_weights(session):
        pass
      graph = session.graph
      wanted = [graph.get_operation_by_name(name.partition(":")[0])
                for name in names]
      found = set()
      while wanted:  # What these need, but for the variables.
        op = wanted.pop()
        if op not in found and op.type not in ("VarHandleOp", "VariableV2"):
          found.add(op)
          wanted += [*(x.op for x in op.inputs), *op.control_inputs]
      return sorted(op.type for op in found)

  assert ran(2) == ran(40)


@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_two_sessions_on_a_server_do_not_take_each_others_weights(use_resource):
  server = tf.distribute.Server.create_local_server()

  def program():
    with tf.Graph().as_default() as graph:
      v = v1.get_variable("v", initializer=START, use_resource=use_resource)
      opt = wrapopt.MovingAverageOptimizer(
          v1.train.GradientDescentOptimizer(.1), wrapopt.BEMA(**SIMPLE))
      step = opt.minimize(tf.reduce_sum(v * v))
      return v, opt, step, v1.global_variables_initializer(), graph

  (v, opt, step, init, graph), (_, other, *_, others) = program(), program()
  with (v1.Session(server.target, graph) as session,
        v1.Session(server.target, others) as second):
    session.run(init)
    for _ in range(3):
      session.run(step)
    raw, average = session.run([v, opt.average(v)])
    assert np.abs(raw - average).max() > .01
    with opt.averaged_weights(session):
      for _ in range(20):  # Its ops run in any order.
        with pytest.raises(tf.errors.FailedPreconditionError):
          with other.averaged_weights(second):
            pass
      numerics.assert_same_bits(session.run(v), average)
    numerics.assert_same_bits(session.run(v), raw)
    with other.averaged_weights(second):
      numerics.assert_same_bits(session.run(v), average)
    numerics.assert_same_bits(session.run(v), raw)
