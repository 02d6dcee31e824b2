"""Runs with Keras's OrbaxCheckpoint, which another program resumes."""

import foreign  # Before packages of others.

import keras
import numpy as np
import orbax.checkpoint
import pytest

import wrapopt.keras

K = keras.optimizers
W = wrapopt.keras


def schedule():
  return K.schedules.ExponentialDecay(0.1, 3, 0.5)


OPTIMIZERS = {
    "MovingAverage": lambda: W.MovingAverage(K.Adam(schedule()), [
        0.9, wrapopt.PowerDecay(gamma=1), wrapopt.BEMA(burn_in=0)]),
    "rows": lambda: W.MovingAverage(K.SGD(0.1), 0.9),
    "statistics": lambda: W.MovingAverage(K.SGD(0.1), 0.9, update_every=2,
                                          average_batch_norm=True),
    "SWA": lambda: W.SWA(K.Adam(0.1), 2, 3),
    "Lookahead": lambda: W.Lookahead(K.Adam(schedule()), 3),
    "ScheduleFree": lambda: W.ScheduleFree(K.SGD(0.1)),
    "PrimalAverage": lambda: W.PrimalAverage(K.Adam(0.1)),
    "LazyAdam": lambda: W.MovingAverage(W.LazyAdam(0.1), 0.9),
    "DropStaleGradient": lambda: W.DropStaleGradient(
        W.MovingAverage(K.Adam(0.1), 0.9), 2),
    "LossScale": lambda: W.Lookahead(K.LossScaleOptimizer(
        W.MovingAverage(K.Adam(0.1), 0.9)), 3),
}


@keras.saving.register_keras_serializable("wrapopt_test")
class Recording(keras.Model):

  def train_step(self, data):
    with self.optimizer.record_step():
      return super().train_step(data)


def program(kind):
  """A model as in the first program of a process, which names make one."""
  keras.utils.clear_session(free_memory=False)
  keras.utils.set_random_seed(0)
  # Keras's folders do not fit a Sequential, whose variables have its name in
  # their paths if it is not loaded.
  x = keras.Input((3,), dtype="int32")
  y = keras.layers.Flatten()(keras.layers.Embedding(40, 2)(x))
  y = keras.layers.Dense(2)(keras.layers.BatchNormalization()(y))
  model = (Recording if kind == "DropStaleGradient" else keras.Model)(x, y)
  model.compile(OPTIMIZERS[kind](), "mse", jit_compile=False)
  model.optimizer.build(model.trainable_variables)
  know(model)
  return model


def know(model):
  """Tells an optimizer whose statistics it averages."""
  store = getattr(model.optimizer, "_store", None)
  if store and store.statistics:
    model.optimizer.set_model(model)


def state(model):
  """[(name, value)] of weights, optimizer and, by another way, averages."""
  return [*((v.path, v.numpy()) for v in (*model.weights,
                                          *model.optimizer.variables)),
          *(("average", average.numpy())
            for of_wrapper in model.optimizer.averages_of_wrappers
            for average, _ in of_wrapper.pairs())]


def fit(model, first, last, *callbacks):
  """Trains; returns the state at the end of the last epoch.

  The end of `fit` may set the weights to the averages.
  """
  found = {}
  x = np.arange(48, dtype=np.int32).reshape(16, 3) % 20
  model.fit(x, x[:, :2] / 20, batch_size=4, shuffle=False, verbose=0,
            initial_epoch=first, epochs=last, callbacks=[
                *callbacks, keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs: found.update(
                        state=state(model)))])
  return found["state"]


def assert_same(got, want):
  assert [path for path, _ in got] == [path for path, _ in want]
  for (path, g), (_, w) in zip(got, want):
    np.testing.assert_array_equal(g, w, path)


def resumed(kind, folder, way):
  """Another program, which has the latest state in a folder."""
  if way == "model":
    keras.utils.clear_session(free_memory=False)
    model = keras.models.load_model(folder)
    if kind == "statistics":  # Averages which the optimizer did not know.
      know(model)
      model.load_weights(folder)
    return model
  model = program(kind)
  if way == "weights":
    model.load_weights(folder)
  else:
    load = orbax.checkpoint.v1.load_checkpointables
    model.set_state_tree(load(f"{folder}/1", {"pytree": None})["pytree"])
  return model


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_program_resumes(kind, tmp_path):
  folder = str(tmp_path / "run")
  model = program(kind)
  saved = fit(model, 0, 2, keras.callbacks.OrbaxCheckpoint(
      folder, save_on_background=kind != "SWA"))
  if kind in ("rows", "LazyAdam"):
    assert model.optimizer.is_lazy(model.layers[1].embeddings)
  want = fit(program(kind), 0, 3)
  for way in "model", "weights", "tree":
    model = resumed(kind, folder, way)
    assert_same(state(model), saved)
    assert_same(fit(model, 2, 3), want)


def test_statistics_that_the_optimizer_does_not_know(tmp_path):
  folder = str(tmp_path / "run")
  fit(program("statistics"), 0, 2, keras.callbacks.OrbaxCheckpoint(folder))
  model = keras.models.load_model(folder)
  with pytest.warns(UserWarning, match="before those named 'average_0.9_of_ba"):
    know(model)
    fit(model, 2, 3)
