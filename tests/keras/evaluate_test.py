"""wrapopt.keras.EvaluateWithAverages in real fits."""

import copy
import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_close, assert_same, values
from fit_callbacks import Fails, Stop, at_epoch_end
import keras_versions
import wrapopt
import wrapopt.keras as wk

callbacks = keras.callbacks
E = wk.EvaluateWithAverages


@pytest.fixture(autouse=True)
def _seed():
  keras.utils.set_random_seed(0)


def data(n=64):
  x = np.random.default_rng(0).standard_normal((n, 3)).astype(np.float32)
  return x, x @ np.float32([[1], [-2], [0.5]]) + 1


def make(optimizer=None, **kwargs):
  model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"),
                            keras.layers.Dense(1)])
  if optimizer is None:
    optimizer = wk.MovingAverage("sgd", 0.9)
  model.compile(optimizer, loss="mse", **kwargs)
  return model


def averages(model, *decay):
  return [model.optimizer.average(v, *decay).numpy()
          for v in model.trainable_variables]


def evaluate(model, *found):
  """The loss of a model, evaluated with callbacks."""
  return model.evaluate(*data(), verbose=0, callbacks=list(found))


def validated(model, *found, **kwargs):
  """The logs of a fit that evaluates the data that it trains with."""
  x, y = data()
  return model.fit(x, y, verbose=0, validation_data=(x, y),
                   callbacks=list(found), **kwargs).history


def loss_of(weights):
  model = make("sgd")
  model.set_weights(weights)
  return evaluate(model)


def trained(optimizer=None, **kwargs):
  """A model between the steps of a training, with averages that lag behind."""
  model = make(optimizer, **kwargs)
  x, y = data()
  for _ in range(4):
    model.train_on_batch(x, y)
  return model


MODES = {"jit": {}, "function": {"jit_compile": False},
         "eager": {"run_eagerly": True}, "steps": {"steps_per_execution": 2}}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mode", MODES)
def test_evaluate_and_predict_use_averages_and_leave_the_weights(mode):
  model = trained(**MODES[mode])
  x = data()[0]
  raw, average = values(model.weights), averages(model)
  raw_loss = evaluate(model)
  # Also after it has been traced with the raw weights.
  callback = E()
  got = evaluate(model, callback)
  np.testing.assert_allclose(got, loss_of(average), rtol=1e-5)
  assert abs(got - raw_loss) > 1e-2 * raw_loss
  got = model.predict(x, verbose=0, callbacks=[callback])
  with model.optimizer.averaged_weights():
    assert_same([model.predict(x, verbose=0)], [got])
  assert np.abs(got - model.predict(x, verbose=0)).max() > 1e-3
  assert evaluate(model) == raw_loss
  assert_same(values(model.weights), raw)
  assert_same(averages(model), average)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["test", "predict"])
@pytest.mark.parametrize("when", ["begin", "batch_begin", "batch_end", "end"])
def test_nothing_stays_in_place_after_an_exception(kind, when):
  model = trained(run_eagerly=True)
  x, y = data()
  raw, average = values(model.weights), averages(model)
  uses = [lambda: evaluate(model),
          # Keras 3.12 does not reset metrics itself.
          lambda: (model.reset_metrics(), model.test_on_batch(x, y))[1],
          lambda: model.predict(x, verbose=0),
          lambda: model.predict_on_batch(x)]
  for use in uses:
    want = use()
    # Those that come later fail in their turn.
    found = [E(), Fails(f"on_{kind}_{when}")]
    with pytest.raises(Stop):
      if kind == "test":
        model.evaluate(x, y, verbose=0, callbacks=found)
      else:
        model.predict(x, verbose=0, callbacks=found)
    assert_same(values(model.weights), raw)
    assert_same(averages(model), average)
    assert_same([use()], [want])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["test", "predict"])
def test_nothing_stays_in_place_if_the_model_or_the_data_fail(kind):
  model = trained(run_eagerly=True)
  x, y = data()
  raw, average = values(model.weights), averages(model)
  want = evaluate(model)
  callback = E()
  run = {"test": model.evaluate, "predict": model.predict}[kind]

  def batches():
    yield x, y
    raise Stop

  def step(data):
    assert_same(values(model.weights), average)
    raise Stop

  # Keras tells of a generator's exception by one of TensorFlow's.
  with pytest.raises((Stop, tf.errors.OpError)):
    run(batches(), verbose=0, callbacks=[callback])
  assert_same(values(model.weights), raw)
  setattr(model, f"{kind}_step", step)
  setattr(model, f"{kind}_function", None)
  with pytest.raises(Stop):
    run(x, verbose=0, callbacks=[callback])
  assert_same(values(model.weights), raw)
  assert_same(averages(model), average)
  delattr(model, f"{kind}_step")
  setattr(model, f"{kind}_function", None)
  assert evaluate(model) == want


class Worse(callbacks.Callback):
  """Makes the averages worse from the second epoch on."""

  def on_epoch_begin(self, epoch, logs=None):
    if epoch >= 2:
      self.model.optimizer.learning_rate = -0.1


def fit(model, *found, epochs=8):
  return validated(model, Worse(), *found, epochs=epochs)["val_loss"]


@pytest.mark.by_day(0)
def test_model_checkpoint_keeps_the_best_averages(tmp_path):
  path = str(tmp_path / "best.keras")
  plain = str(tmp_path / "best.weights.h5")
  model = make()
  losses = fit(model, E([
      callbacks.ModelCheckpoint(path, save_best_only=True),
      callbacks.ModelCheckpoint(plain, save_best_only=True,
                                save_weights_only=True)]))
  best = min(losses)
  assert 0 < losses.index(best) < len(losses) - 1
  loaded = keras.models.load_model(path)
  np.testing.assert_allclose(evaluate(loaded), best, rtol=1e-5)
  # As good with its averages, and training goes on from them.
  np.testing.assert_allclose(evaluate(loaded, E()), best, rtol=1e-5)
  bare = make("sgd")
  bare.load_weights(plain)
  np.testing.assert_allclose(evaluate(bare), best, rtol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("decays, decay", [
    (0.9, None), ([0.9, 0.5], None), ([0.9, 0.5], 0.5)])
def test_early_stopping_restores_the_best_averages(decays, decay):
  model = make(wk.MovingAverage("sgd", decays))
  stopping = callbacks.EarlyStopping(patience=2, restore_best_weights=True)
  losses = fit(model, E(stopping, decay=decay), epochs=50)
  assert len(losses) < stopping.params["epochs"] == 50
  np.testing.assert_allclose(evaluate(model), min(losses), rtol=1e-5)
  # They are the averages too.
  np.testing.assert_allclose(evaluate(model, E()), min(losses), rtol=1e-5)
  for decay in model.optimizer._averages.decays:
    assert_same(averages(model, decay), values(model.weights))


def test_backup_and_restore_resumes_raw_weights(tmp_path):
  def run(model, *found):
    validated(model, E(), *found, epochs=4, shuffle=False)
    return values(model.weights)

  want = run(make())
  keras.utils.set_random_seed(0)
  model = make()

  class Dies(callbacks.Callback):

    def on_epoch_begin(self, epoch, logs=None):
      if epoch == 2:
        raise Stop

  backup = callbacks.BackupAndRestore(str(tmp_path / "backup"))
  with pytest.raises(Stop):
    run(model, backup, Dies())
  keras.utils.set_random_seed(1)
  assert_same(run(make(), backup), want)
  with pytest.raises(ValueError, match="must not contain a BackupAndRestore"):
    E([backup])


def wrappers():
  sgd = lambda: keras.optimizers.SGD(0.05)
  return {
      "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
          wk.MovingAverage(sgd(), 0.9)),
      "nested": lambda: wk.MovingAverage(wk.SWA(sgd(), average_period=1), 0.9),
      "inside": lambda: wk.Lookahead(wk.MovingAverage(sgd(), 0.9)),
      "multi": lambda: keras.optimizers.MultiOptimizer(
          keras.optimizers.OptimizerMap(
              wk.MovingAverage(sgd(), 0.9),
              {".*bias": wk.MovingAverage(sgd(), 0.9),
               "nothing": wk.MovingAverage(sgd(), 0.9)})),
  }


@pytest.mark.parametrize("kind", keras_versions.cases(wrappers()))
def test_averages_are_those_of_the_outermost_wrapper(kind):
  # The loss is scaled by Keras; MultiOptimizer has no learning rate to show.
  model = trained(wrappers()[kind]())
  opt = model.optimizer
  found = {"loss_scale": lambda v: opt.inner_optimizer,
           "nested": lambda v: opt,
           "inside": lambda v: opt.inner_optimizer,
           "multi": lambda v: opt._optimizer_map(v)}[kind]
  want = [found(v).average(v).numpy() for v in model.trainable_variables]
  raw = values(model.weights)
  got = evaluate(model, E())
  np.testing.assert_allclose(got, loss_of(want), rtol=1e-5)
  assert abs(got - loss_of(raw)) > 1e-3
  assert_same(values(model.weights), raw)


def test_a_model_that_never_trained():
  model = make()
  callback = E()
  assert evaluate(model, callback) == evaluate(model)


def test_an_optimizer_without_averages_is_an_error():
  model = make(wk.Lookahead("sgd"))
  with pytest.raises(ValueError, match="needs an optimizer that keeps averages"
                     ".*got Lookahead"):
    evaluate(model, E())
  with pytest.raises(TypeError, match="must be Keras callbacks, got str"):
    E(["early"])


def test_too_few_steps_for_an_average():
  """fit() ends with what it trained."""
  model = make(wk.SWA(keras.optimizers.SGD(0.1), 1000))
  logs = validated(model, E(), epochs=20)
  loss = evaluate(model)
  assert loss == logs["val_loss"][-1] < 0.5 * logs["loss"][0]


def test_weights_that_are_set_after_an_evaluation():
  x, y = data()
  callback = E()
  model = make()
  evaluate(model, callback)
  before = [v + 100 for v in values(model.weights)]
  model.set_weights(before)
  model.train_on_batch(x, y)
  for v, s, w in zip(values(model.weights), averages(model), before):
    np.testing.assert_allclose(s, 0.9 * w + 0.1 * v, rtol=1e-6)


def test_no_snapshots_while_averages_are_in_place(tmp_path):
  snapshots = wk.Snapshots(str(tmp_path), 1)
  with pytest.raises(ValueError, match="must not contain a Snapshots: while"):
    E([snapshots])
  model = trained()
  snapshots.set_model(model)
  snapshots.on_train_begin()
  with model.optimizer.averaged_weights():
    with pytest.raises(RuntimeError, match="must not be called inside"):
      snapshots._write(1)
  snapshots.on_train_end()


def test_each_of_several_decays():
  x, y = data()
  model = make(wk.MovingAverage("sgd", [0.9, 0.5]))
  seen = []

  losses = validated(model, E(decay=0.5), at_epoch_end(
      lambda logs: seen.append(averages(model, 0.5))), epochs=2)["val_loss"]
  np.testing.assert_allclose(losses, list(map(loss_of, seen)), rtol=1e-5)
  assert_same(values(model.weights), seen[-1])
  model.train_on_batch(x, y)
  raw, first = values(model.weights), averages(model)
  with model.optimizer.averaged_weights(decay=0.5):
    assert np.abs(values(model.weights)[0] - raw[0]).max() > 0
    assert_same(averages(model), first)
  assert_same(values(model.weights), raw)
  other = E(decay=0.7)
  with pytest.raises(ValueError, match="`decay` must be one of .* got 0.7"):
    evaluate(model, other)
  with pytest.raises(ValueError, match="`decay` must be None for a SWA"):
    make(wk.SWA("sgd")).evaluate(x, y, verbose=0, callbacks=[other])


def test_all_decays(tmp_path):
  """Metrics of each, and a checkpoint of the best of each."""
  decays = [0.9, 0.5, wrapopt.PowerDecay(gamma=2)]
  names = ["val_loss", "val_loss_0.5", "val_loss_power_2"]
  model = make(wk.MovingAverage("sgd", decays), metrics=["mae"])
  seen = []

  watch = at_epoch_end(lambda logs: seen.append(
      [averages(model, decay) for decay in decays]))
  checkpoints = [callbacks.ModelCheckpoint(
      str(tmp_path / f"{name}.keras"), monitor=name, mode="min",
      save_best_only=True)
                 for name in names]
  history = validated(model, Worse(), watch, E(checkpoints, decay="all"),
                      batch_size=16, epochs=4)
  assert set(history) == {"loss", "mae", *names,
                          *(name.replace("loss", "mae") for name in names)}
  for k, name in enumerate(names):
    np.testing.assert_allclose(
        history[name], [loss_of(found[k]) for found in seen], rtol=1e-5)
    loaded = keras.models.load_model(tmp_path / f"{name}.keras")
    np.testing.assert_allclose(
        evaluate(loaded)[0], min(history[name]), rtol=1e-5)
  assert len({history[name][-1] for name in names}) == 3
  assert_same(values(model.weights), seen[-1][0])
  history = validated(model, E(decay="all"), epochs=2, validation_freq=2)
  assert len(history["val_loss_0.5"]) == 1
  # Outside of fit, the first.
  model.optimizer.average(model.weights[0]).assign_add(model.weights[0] + 1)
  callback = E(decay="all")
  np.testing.assert_allclose(evaluate(model, callback)[0],
                             loss_of(averages(model)), rtol=1e-5)


def test_all_decays_with_recalibrated_statistics():
  x = data()[0]
  model = keras.Sequential([
      keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1),
      keras.layers.BatchNormalization()])
  model.compile(wk.MovingAverage("sgd", [0.9, 0.5]), loss="mse")
  copies = []

  watch = at_epoch_end(lambda logs: copies.append([
      model.optimizer.averaged_model(model, decay=decay, recalibrate=[x])
      for decay in (0.9, 0.5)]))
  history = validated(model, watch, E(decay="all", recalibrate=[x]), epochs=2)
  for epoch, row in enumerate(copies):
    for copied, name in zip(row, ["val_loss", "val_loss_0.5"], strict=True):
      copied.compile(loss="mse")
      np.testing.assert_allclose(evaluate(copied),
                                 history[name][epoch], rtol=1e-5)


class Noisy(keras.layers.Layer):
  """Has a seed, a count of batches and a metric, also in an evaluation."""

  def __init__(self):
    super().__init__()
    self.seed = keras.random.SeedGenerator(3)
    self.batches = self.add_weight(shape=(), trainable=False)
    self.mean = keras.metrics.Mean("noise")

  def call(self, inputs):
    self.batches.assign_add(1)
    noise = keras.random.normal([3], seed=self.seed) * self.batches
    self.mean.update_state(noise)
    return inputs + noise + keras.random.normal([3])


def drawn(x, y, size, number=None):
  """Batches of random rows, other ones each time, without end or a number."""
  rows = np.random.default_rng(3)
  for _ in itertools.count() if number is None else range(number):
    found = rows.integers(0, len(x), size)
    yield x[found], y[found]


class Shuffled(keras.utils.PyDataset):

  def __init__(self, x, y):
    super().__init__()
    self._xy, self._rows = (x, y), np.random.default_rng(5)
    self.on_epoch_end()

  def __len__(self):
    return 5

  def on_epoch_end(self):
    self._order = self._rows.permutation(len(self._xy[0]))

  def __getitem__(self, i):
    return tuple(a[self._order[7 * i:7 * i + 7]] for a in self._xy)


# By name: validation data, arguments of `fit` and of `compile`.
DRAWN = {
    "generator": lambda x, y: (drawn(x, y, 8), {"validation_steps": 3}, {}),
    "shuffle": lambda x, y: (
        tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).batch(7)
        .repeat(), {"validation_steps": 3}, {"jit_compile": True}),
    "take": lambda x, y: (
        tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).take(30)
        .batch(8), {}, {"run_eagerly": True}),
    "PyDataset": lambda x, y: (Shuffled(x, y), {}, {}),
    "executions": lambda x, y: (
        tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).take(30)
        .batch(8), {}, {"steps_per_execution": 3}),
}


@pytest.mark.by_day(0)
@pytest.mark.parametrize("kind", DRAWN)
def test_all_decays_are_evaluated_on_the_same_data(kind):
  """And with the same state: twins have the same logs, to rounding."""
  x, y = data()
  validation, for_fit, for_compile = DRAWN[kind](x, y)

  def fit(decays):
    keras.utils.set_random_seed(1)
    # TensorFlow cannot train this layer in a loop.
    noisy = [] if kind == "executions" else [Noisy()]
    model = keras.Sequential([keras.Input((3,)), *noisy, keras.layers.Dense(1)])
    model.compile(wk.MovingAverage(keras.optimizers.SGD(1e-3), decays),
                  loss="mse", metrics=["mae"], **for_compile)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0,
                        validation_data=validation, **for_fit,
                        callbacks=[E(decay="all")])
    return history.history, values(model.non_trainable_variables)

  history, state = fit([0.5, 0.5 + 1e-7, 0.9])
  names = ["val_loss", "val_mae",
           *(["val_noise"] if kind != "executions" else [])]
  for name in names:
    # The averages differ by 1e-7 of what they moved.
    np.testing.assert_allclose(history[f"{name}_0.5000001"], history[name],
                               rtol=1e-5)
  for name in names[:2]:
    differ = np.abs(np.subtract(history[f"{name}_0.9"], history[name]))
    assert differ.min() > 1e-3
  # The state is that of an evaluation of the first alone.
  if kind in ("PyDataset", "generator"):
    validation = DRAWN[kind](x, y)[0]
    alone, want = fit([0.5])
    # Keras draws batches of a generator ahead and drops them after an epoch.
    same = slice(1 if kind == "generator" else None)
    np.testing.assert_allclose(history["val_loss"][same],
                               alone["val_loss"][same], rtol=1e-5)
    assert_same(state, want)


def test_all_decays_need_state_in_variables():

  class Listed(keras.metrics.Metric):

    def update_state(self, *args, **kwargs):
      pass

    def result(self):
      return 0.0

  class Own(keras.Sequential):

    def make_test_function(self, force=False):
      return super().make_test_function(force)

  def fit(cls=keras.Sequential, metrics=()):
    model = cls([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(wk.MovingAverage("sgd", [0.9, 0.5]), loss="mse",
                  metrics=list(metrics), run_eagerly=True)
    callback = E(decay="all")
    try:
      validated(model, callback)
    finally:  # Nothing stays.
      evaluate(model, callback)

  with pytest.raises(ValueError, match="keep their state in variables if "
                     '`decay` is "all", got .*Listed that has none'):
    fit(metrics=["mae", Listed()])
  with pytest.raises(ValueError, match=r"make_test_function\(\) of its own, "
                     "got .*Own: other decays must"):
    fit(Own)


@pytest.mark.by_day(0)
def test_a_model_without_batch_normalizations_has_nothing_to_recalibrate():
  x = data()[0]
  model = trained()
  found = [evaluate(model, E(recalibrate=dataset)) for dataset in ([x], None)]
  assert found[0] == found[1]


def test_all_of_one_decay():
  for opt in wk.MovingAverage("sgd", 0.9), wk.SWA("sgd"):
    assert set(validated(make(opt), E(decay="all"))) == {"loss", "val_loss"}
  with pytest.raises(ValueError, match='must be a decay, None or "all", got'):
    E(decay="every")


@pytest.mark.by_day(0)
@pytest.mark.parametrize("kind", keras_versions.cases([
    "MovingAverage", "SWA", "nested", "multi"]))
def test_fit_keeps_raw_weights(kind):
  def wrap(keeps):
    moving = lambda opt: wk.MovingAverage(
        opt, [0.9, 0.5], keep_raw_weights=keeps)
    swa = lambda opt: wk.SWA(opt, average_period=1, keep_raw_weights=keeps)
    if kind == "multi":
      return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(
          moving("sgd"), {".*bias": swa("sgd")}))
    return {"MovingAverage": moving, "SWA": swa,
            "nested": lambda opt: moving(swa(opt))}[kind]("sgd")

  ends = {}
  for keeps in False, True:
    keras.utils.set_random_seed(0)
    model = make(wrap(keeps))
    raw = []
    decay = None if kind in ("SWA", "multi") else 0.5
    losses = validated(
        model, E(callbacks.EarlyStopping(), decay=decay),
        at_epoch_end(lambda logs: raw.append(values(model.weights))),
        epochs=2, shuffle=False)["val_loss"]
    ends[keeps] = values(model.weights), raw, losses, model
  assert_same(ends[True][0], ends[True][1][-1])
  assert np.abs(ends[False][0][0] - ends[True][0][0]).max() > 1e-3
  assert_same(ends[True][1], ends[False][1])
  assert ends[True][2] == ends[False][2]
  # The averages are still there, and training goes on.
  model = ends[True][3]
  np.testing.assert_allclose(
      evaluate(model, E(decay=decay)), losses[-1], rtol=1e-5)


def test_raw_weights_are_kept_by_all_or_none():
  for inner in wk.SWA("sgd"), wk.Lookahead(wk.SWA("sgd")):
    with pytest.raises(ValueError, match="with keep_raw_weights=True must not "
                       "be or hold.*got SWA. Pass keep_raw_weights=True to it"):
      wk.MovingAverage(inner, keep_raw_weights=True)
  with pytest.raises(ValueError, match="got SGD. Pass use_ema=False to it"):
    wk.SWA(keras.optimizers.SGD(use_ema=True), keep_raw_weights=True)
  with pytest.raises(TypeError, match="`keep_raw_weights` must be True or"):
    wk.SWA("sgd", keep_raw_weights=1)
  x, y = data()
  model = make(wk.MovingAverage("sgd", keep_raw_weights=True))
  with pytest.raises(ValueError, match="must not contain an EarlyStopping with "
                     "restore_best_weights=True if"):
    model.fit(x, y, verbose=0, callbacks=[E(
        callbacks.EarlyStopping(restore_best_weights=True))])
  copied = keras.optimizers.get(keras.optimizers.serialize(model.optimizer))
  assert copied.get_config()["keep_raw_weights"] is True


@keras_versions.needs("MultiOptimizer")
def test_raw_weights_are_kept_by_all_parts_or_none():
  model = make(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(
      wk.SWA("sgd"), {".*bias": wk.SWA("sgd", keep_raw_weights=True)})))
  with pytest.raises(ValueError, match="must be the same for all optimizers"):
    model.fit(*data(), verbose=0, callbacks=[E()])


def with_ema(wrap=lambda opt: opt):
  return wrap(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))


def test_swap_ema_weights():
  """Keras's callback exchanges Keras's own averages, or says what is right."""
  scaled = keras.optimizers.LossScaleOptimizer

  def fit(wrap, *others):
    keras.utils.set_random_seed(0)
    model = make(with_ema(wrap), auto_scale_loss=False, run_eagerly=True)
    swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
    logs = validated(model, *others, swap, batch_size=64, epochs=2,
                     shuffle=False)
    return values(model.weights), logs["val_loss"]

  want, losses = fit(lambda opt: opt)
  for wrap in (lambda opt: wk.Lookahead(opt, 1, 1.0),
               lambda opt: scaled(wk.Lookahead(opt, 1, 1.0)),
               lambda opt: wk.Lookahead(scaled(opt), 1, 1.0)):
    got, its_losses = fit(wrap)
    assert_close(got, want, rtol=1e-5)
    np.testing.assert_allclose(its_losses, losses, rtol=1e-5)
  text = ("SwapEMAWeights must not be used with a {}: it exchanges averages of "
          "Keras's use_ema, not those of {}. Use wrapopt.keras.EvaluateWithAv")
  for wrap, name in (
      (wk.MovingAverage, "MovingAverage"), (wk.SWA, "SWA"),
      (lambda opt: wk.MovingAverage("sgd"), "MovingAverage"),
      (lambda opt: wk.ScheduleFree("sgd"), "ScheduleFree"),
      (lambda opt: wk.Lookahead(wk.SWA(opt)), "SWA"),
      (lambda opt: scaled(wk.SWA(opt)), "SWA")):
    with pytest.raises(ValueError, match=text.format(name, name)):
      fit(wrap)
  with pytest.raises(ValueError, match=text.format("SWA", "SWA")):
    fit(wk.SWA, E())
  with pytest.raises(ValueError, match="must be used when `use_ema=True`"):
    fit(lambda opt: wk.Lookahead("sgd"))
  with pytest.raises(ValueError, match="must not contain a SwapEMAWeights"):
    E(callbacks.SwapEMAWeights())


def swap_ema_weights_of(opt):
  """The weights of 7 when SwapEMAWeights has put averages of 0 in place."""
  model = keras.Sequential([keras.Input([1]), keras.layers.Dense(
      1, kernel_initializer="zeros")])
  model.compile(opt, auto_scale_loss=False)
  variables = model.trainable_variables
  opt.build(variables)
  for v in variables:
    v.assign(tf.fill(v.shape, 7.0))
  swap = callbacks.SwapEMAWeights()
  swap.set_model(model)
  try:
    swap._swap_variables()
  except ValueError:
    assert values(variables) == [7, 7]
    raise
  return values(variables)


def test_swap_ema_weights_goes_past_no_wrapper():
  """Keras follows `inner_optimizer`, and reads `use_ema` of several."""
  scaled = keras.optimizers.LossScaleOptimizer
  gate = lambda opt: wk.DropStaleGradient(opt, 1)
  exact = [wk.Lookahead, gate, lambda opt: scaled(gate(opt)),
           lambda opt: wk.Lookahead(scaled(opt))]
  averaging = [wk.MovingAverage, wk.SWA, lambda opt: wk.ScheduleFree("sgd"),
               lambda opt: wk.MovingAverage("sgd")]
  refused = [lambda opt, f=f, g=g: g(f(opt)) for f in averaging for g in (
      lambda opt: opt, scaled)] + [
          lambda opt: wk.MovingAverage(scaled(opt)),
          lambda opt: wk.MovingAverage(wk.Lookahead(opt)),
          lambda opt: wk.SWA(gate(opt)), lambda opt: wk.Lookahead(wk.SWA(opt)),
          lambda opt: scaled(gate(wk.MovingAverage("sgd")))]
  # Keras 3.12 has no MultiOptimizer.
  if hasattr(keras.optimizers, "MultiOptimizer"):
    def multi(first, second):
      return keras.optimizers.MultiOptimizer(
          keras.optimizers.OptimizerMap(second, {".*bias": first}))

    exact += [lambda opt: multi(wk.Lookahead(opt), with_ema()),
              lambda opt: multi(gate(opt), wk.Lookahead(with_ema())),
              lambda opt: wk.Lookahead(multi(opt, with_ema()))]
    refused += [lambda opt: multi(wk.SWA("sgd"), opt),
                lambda opt: scaled(multi(wk.MovingAverage("sgd"), opt)),
                lambda opt: wk.MovingAverage(multi(opt, with_ema())),
                lambda opt: wk.Lookahead(multi(opt, keras.optimizers.SGD()))]
  for wrap in exact:
    assert swap_ema_weights_of(with_ema(wrap)) == [0, 0]
  for wrap in refused:
    with pytest.raises(ValueError, match=r"EvaluateWithAverages\(\) instead"):
      swap_ema_weights_of(with_ema(wrap))
  with pytest.raises(AttributeError, match="`use_ema` of a SWA must not be"):
    wk.SWA("sgd").use_ema = True


def test_swa_counts_epochs():
  """Steps 5, 7, 9 of 2-step epochs: the ends of epochs 2, 3 and 4."""
  w = keras.Variable([0.0])
  opt = wk.SWA(keras.optimizers.SGD(1.0), 2, steps_per_epoch=2)
  for _ in range(10):
    opt.apply([tf.constant([-1.0])], [w])
  assert opt.average(w).numpy() == (6 + 8 + 10) / 3
  copied = keras.optimizers.get(keras.optimizers.serialize(opt))
  assert copied.get_config() == opt.get_config()
  assert opt.get_config()["steps_per_epoch"] == 2
  with pytest.raises(ValueError, match="`steps_per_epoch` must be at least 1"):
    wk.SWA("sgd", steps_per_epoch=0)
  x, y = data()

  def fit(inner, steps, outside=lambda opt: opt):
    make(outside(wk.SWA(inner, steps_per_epoch=steps))).fit(
        x, y, batch_size=16, verbose=0, callbacks=[E()])

  fit("sgd", 4)
  for outside in (lambda opt: opt, wk.Lookahead, wk.MovingAverage):
    with pytest.raises(ValueError, match="number of steps in an epoch of "
                       "fit.., 4, got 2. Make the SWA with that number"):
      fit("sgd", 2, outside)
  fit(keras.optimizers.SGD(gradient_accumulation_steps=2), 2)
  with pytest.raises(ValueError, match="of fit.., 1.33333, got 1. Make"):
    fit(keras.optimizers.SGD(gradient_accumulation_steps=3), 1)
  # Keras learns the number of batches in the first epoch.
  batches = lambda: ((x[i:i + 8], y[i:i + 8]) for i in range(0, 64, 8))
  for unknown in (
      lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(
          lambda *_: True), batches):
    for steps, executions in (8, 1), (7, 3), (9, 1), (5, 3):
      model = make(wk.SWA("sgd", steps_per_epoch=steps))
      model.compile(model.optimizer, "mse", steps_per_execution=executions)
      fit = lambda: model.fit(unknown(), verbose=0, callbacks=[E()])
      if (steps, executions) in [(8, 1), (7, 3)]:  # As good as is known.
        fit()
      else:
        with pytest.raises(ValueError, match=f"of fit.., [89], got {steps}."):
          fit()


@pytest.mark.by_day(4)
@pytest.mark.parametrize("kind, raw", [
    ("stopping", True), ("checkpoint", True), ("before", True),
    ("after", False), ("inside", False), ("every epoch", False),
    ("by training", False), ("keeps raw", False)])
def test_callbacks_that_keep_raw_weights(kind, raw, tmp_path):
  stopping = callbacks.EarlyStopping(restore_best_weights=True)
  save = lambda **kwargs: callbacks.ModelCheckpoint(
      str(tmp_path / "model.keras"), **kwargs)
  given = {
      "stopping": lambda: [E(), stopping],
      "checkpoint": lambda: [save(save_best_only=True), E()],
      "before": lambda: [stopping, E(swap_on_epoch=True)],
      "after": lambda: [E(swap_on_epoch=True), stopping],
      "inside": lambda: [E([stopping, save(save_best_only=True)])],
      "every epoch": lambda: [E(), save(), callbacks.EarlyStopping()],
      "by training": lambda: [E(), save(save_best_only=True, monitor="loss")],
      "keeps raw": lambda: [E(), stopping]}[kind]()
  model = make(wk.MovingAverage(
      "sgd", 0.9, keep_raw_weights=kind == "keeps raw"))
  with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    validated(model, *given)
  name = "ModelCheckpoint" if kind == "checkpoint" else "EarlyStopping"
  assert [str(w.message) for w in seen if "raw weights" in str(w.message)] == [
      f"{name} keeps the raw weights of an epoch, and validation evaluates the "
      "averages: 'val_loss' is not that of the weights that it keeps. Pass it "
      "to EvaluateWithAverages: callbacks=[EvaluateWithAverages("
      f"[{name}(...)]), ...]."] * raw


def test_only_one_puts_averages_in_place():
  x, y = data()

  predict = at_epoch_end(
      lambda logs: model.predict(x, verbose=0, callbacks=[E()]))
  for given, error in [
      ([Worse(), E(decay=0.9), E()], r"another EvaluateWithAverages, callbacks"
       r"\[2\]. Pass all their callbacks to one; decay=\"all\" evaluates"),
      ([E([Worse(), E()])], r"in that of callbacks\[0\]: callbacks\[1\]"),
      ([E(predict)], r"set_model\(\) must not be called inside .* in a "
       "callback of an EvaluateWithAverages, pass no other one to evaluate")]:
    model = make()
    with pytest.raises((ValueError, RuntimeError), match=error):
      model.fit(x, y, verbose=0, callbacks=given)
    assert model.optimizer.iterations == (2 if "set_model" in error else 0)
  model = make()
  model.fit(x, y, verbose=0, callbacks=[E(), predict])


@pytest.mark.parametrize("name", keras_versions.cases([
    "MovingAverage", "SWA", "ScheduleFree"]))
def test_weights_that_are_set_before_another_fit(name, tmp_path):
  model = make(getattr(wk, name)("sgd"))
  initial = model.get_weights()

  def warned(*given, **kwargs):
    with warnings.catch_warnings(record=True) as seen:
      warnings.simplefilter("always")
      validated(model, *given, **kwargs)
    return [str(w.message) for w in seen if "no longer" in str(w.message)]

  assert not warned(E()) and not warned(E())
  model.set_weights(initial)
  [text] = warned(E())
  assert "kernel' was set after the last fit(), its average was not" in text
  assert not warned(E())
  if name != "ScheduleFree":  # A rate finder needs no averages.
    assert not warned()
    model.set_weights(initial)
    assert warned(E())
  model.set_weights(initial)
  model.optimizer.seed_averages()
  stopping = callbacks.EarlyStopping(restore_best_weights=True)
  assert not warned(E(stopping), epochs=9)
  assert not warned(E(swap_on_epoch=True), stopping, epochs=9)
  assert not warned(E())
  model.save_weights(tmp_path / "model.weights.h5")
  model.set_weights(initial)
  model.load_weights(tmp_path / "model.weights.h5")
  assert not warned(E())


class AtEpochEnd(callbacks.Callback):
  """Sees weights at the end of each epoch, and of each batch."""

  def __init__(self):
    super().__init__()
    self.seen, self.in_batches = [], []

  def on_train_batch_end(self, batch, logs=None):
    self.in_batches.append(values(self.model.weights))

  def on_epoch_end(self, epoch, logs=None):
    self.seen.append(values(self.model.weights))
    with pytest.raises(RuntimeError, match="must not be called inside"):
      self.model.optimizer.apply([tf.ones_like(v) for v in
                                  self.model.trainable_variables])


@pytest.mark.by_day(0)
@pytest.mark.parametrize("decay", [None, 0.5])
def test_callbacks_after_it_see_averages_at_the_end_of_an_epoch(
    decay, tmp_path):
  path = str(tmp_path / "best.weights.h5")
  model = make(wk.MovingAverage("sgd", [0.9, 0.5]))
  x, y = data()
  wants, raw, batches = [], [], []

  class Watch(callbacks.Callback):

    def on_train_batch_end(self, batch, logs=None):
      batches.append(values(model.weights))

    def on_epoch_begin(self, epoch, logs=None):
      if raw:
        assert_same(values(model.weights), raw[-1])

    def on_epoch_end(self, epoch, logs=None):
      raw.append(values(model.weights))
      wants.append(averages(model, decay))

  after = AtEpochEnd()
  losses = fit(
      model, callbacks.BackupAndRestore(str(tmp_path / "backup")), Watch(),
      E(decay=decay, swap_on_epoch=True),
      after, callbacks.ModelCheckpoint(path, save_best_only=True,
                                       save_weights_only=True), epochs=5)
  assert_same(after.seen, wants)
  assert_same(after.in_batches, batches)
  assert_same(values(model.weights), wants[-1])
  assert 0 < losses.index(min(losses)) < 4
  # An optimizer that is not built, as KerasTuner loads it.
  loaded = make(wk.MovingAverage("sgd", [0.9, 0.5]))
  loaded.load_weights(path)
  for found in [], [E(decay=decay)]:
    np.testing.assert_allclose(
        loaded.evaluate(x, y, verbose=0, callbacks=found), min(losses),
        rtol=1e-5)


def test_early_stopping_after_it_restores_averages():
  model = make()
  found = E(swap_on_epoch=True)
  losses = fit(model, found, callbacks.EarlyStopping(
      patience=1, restore_best_weights=True), epochs=50)
  assert len(losses) < 50
  np.testing.assert_allclose(evaluate(model), min(losses), rtol=1e-5)
  assert_same(averages(model), values(model.weights))
  with pytest.raises(ValueError, match="nor may one come after a callback with "
                     "swap_on_epoch=True"):
    fit(make(wk.MovingAverage("sgd", keep_raw_weights=True)), found,
        callbacks.EarlyStopping(restore_best_weights=True))


def test_an_exception_of_a_callback_after_it_leaves_raw_weights():
  raw = []

  model = make()
  keep = at_epoch_end(lambda logs: raw.append(values(model.weights)))
  found = E(swap_on_epoch=True)
  with pytest.raises(Stop):
    fit(model, keep, found, Fails("on_epoch_end"))
  assert_same(values(model.weights), raw[-1])
  assert not model.optimizer._store.state.block.is_entered()
  given = callbacks.CallbackList([found, AtEpochEnd()], model=model)
  given.set_model(model)  # Once more.
  model.fit(*data(), verbose=0, callbacks=given)


def test_a_backup_after_it_is_refused(tmp_path):
  path = tmp_path / "backup"
  found = E(swap_on_epoch=True)
  with pytest.raises(ValueError, match="BackupAndRestore must not come after "
                     ".* Pass it to fit.. before EvaluateWithAverages"):
    fit(make(), found, callbacks.BackupAndRestore(str(path)))
  assert not path.exists()
  with pytest.raises(ValueError, match="must be in the list of callbacks of f"):
    found.set_model(make())
  with pytest.raises(TypeError, match="`swap_on_epoch` must be True or False"):
    E(swap_on_epoch=1)


def test_copies_of_the_callback(tmp_path):
  """KerasTuner copies callbacks before each trial, and not what they read."""
  x = data()[0]
  batches = tf.data.Dataset.from_tensor_slices(x).batch(16)

  def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((3,)), keras.layers.Dense(4),
        keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(wk.MovingAverage("sgd", [0.9, 0.5]), "mse", jit_compile=False)
    return model

  given = [
      wk.Snapshots(str(tmp_path / "{}"), 2),
      E(callbacks.EarlyStopping(restore_best_weights=True), decay="all",
        recalibrate=batches, swap_on_epoch=True)]
  found = []
  for copied in map(lambda f: f(given), [lambda x: x, copy.deepcopy]):
    assert copied[1]._dataset is batches
    found.append(validated(build(), *copied))
  assert found[0] == found[1]
  assert set(found[0]) == {"loss", "val_loss", "val_loss_0.5"}
  assert copied[1]._callbacks[0] is not given[1]._callbacks[0]
