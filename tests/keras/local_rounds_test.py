"""LocalRounds, local training in `fit`, and what else trains the variables."""

import gc
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_close, assert_same
from fit_callbacks import at_epoch_end
import replicas  # pylint: disable=unused-import
import wrapopt
import wrapopt.keras
from wrapopt import server as server_module

X = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture
def server():
  return server_module.start()


def compiled(optimizer, **kwargs):
  keras.utils.set_random_seed(1)
  model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4),
                            keras.layers.Dense(1)])
  model.compile(optimizer, "mse", **kwargs)
  return model


def subtracting(optimizer):
  """A model from whose weights each step of SGD(1) subtracts 1."""
  model = keras.Sequential([keras.Input([3]), keras.layers.Dense(
      1, use_bias=False, kernel_initializer="zeros")])
  model.compile(optimizer, lambda y, p: tf.reduce_sum(p, axis=-1))
  return model


def fitted(optimizer, local_of=None, epochs=2, **kwargs):
  model = compiled(optimizer, **kwargs)
  callbacks = []
  if local_of is not None:
    local = local_of(model.trainable_variables)
    callbacks.append(wrapopt.keras.LocalRounds(local, batch_size=8))
  model.fit(X, Y, 8, epochs, verbose=0, shuffle=False, callbacks=callbacks)
  return model.get_weights(), local if callbacks else None


def local_of(cls, sync_every, server, **kwargs):
  return lambda variables: cls(variables, [server.target], "a", 1, sync_every,
                               round_timeout_secs=20, **kwargs)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("steps_per_execution", [1, 2, 4])
def test_one_worker_of_local_sgd_trains_as_alone(steps_per_execution, server):
  # 6 batches in an epoch: with 4 steps, an execution has the last 2 alone.
  kwargs = {"steps_per_execution": steps_per_execution}
  want, _ = fitted("adam", **kwargs)
  got, local = fitted("adam", local_of(wrapopt.LocalSGD, 4, server), **kwargs)
  assert local.round == (3 if steps_per_execution < 4 else 2)
  assert_same(got, want)


def test_the_outer_step_and_examples(server):
  sgd = lambda: keras.optimizers.SGD(0.01)
  got, local = fitted(sgd(), local_of(
      wrapopt.DiLoCo, 6, server, weight="examples"), epochs=1)
  alone, _ = fitted(sgd(), epochs=1)
  begin, _ = fitted(sgd(), epochs=0)
  assert local.round == 1
  for a, b, c in zip(got, alone, begin):
    np.testing.assert_allclose(a, c + 1.33 * (b - c), rtol=1e-5, atol=1e-6)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("steps_per_execution, sync_every", [(1, 6), (2, 8)])
def test_fragments_and_overlap_as_in_a_loop(steps_per_execution, sync_every):
  sgd = lambda: keras.optimizers.SGD(0.01)
  of = lambda: local_of(
      wrapopt.DiLoCo, sync_every, server_module.start(), local_weight=0.5,
      fragments=2, overlap_steps=2)
  got, fit = fitted(sgd(), of(), steps_per_execution=steps_per_execution)
  model = compiled(sgd())
  local = of()(model.trainable_variables)
  for x, y in zip(np.split(np.tile(X, (2, 1)), 12),
                  np.split(np.tile(Y, (2, 1)), 12)):
    model.train_on_batch(x, y)
    local.step()
  local.leave()  # Ends the last exchange, as `fit` does.
  assert fit.round == local.round == 12 * 2 // sync_every
  assert_close(got, model.get_weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.by_day(0)
def test_an_average_is_that_of_the_weights_of_the_worker(server):
  averaged = lambda: wrapopt.keras.MovingAverage(keras.optimizers.SGD(0.01),
                                                 0.5)
  # The mean of one worker changes nothing, and `fit` ends with the averages.
  want, _ = fitted(averaged())
  got, local = fitted(averaged(), local_of(wrapopt.LocalSGD, 3, server))
  assert local.round == 4
  assert_same(got, want)


def test_what_is_refused(server):
  of = local_of(wrapopt.LocalSGD, 3, server, resume=True)
  with pytest.raises(ValueError, match=(
      r"`steps_per_execution` of compile\(\) must divide")):
    fitted("sgd", of, steps_per_execution=2)
  for of_steps, kwargs in (
      ("sync_every / fragments = 3, got 2", {"fragments": 2}),
      ("overlap_steps = 1, got 3", {"overlap_steps": 1})):
    with pytest.raises(ValueError, match=of_steps):
      fitted("sgd", local_of(wrapopt.LocalSGD, 6, server, resume=True,
                             name=of_steps, **kwargs),
             steps_per_execution=int(of_steps[-1]))
  for wrapper in (wrapopt.keras.ScheduleFree, wrapopt.keras.PrimalAverage,
                  wrapopt.keras.Lookahead):
    with pytest.raises(ValueError, match="must not share .* alone"):
      fitted(wrapper(keras.optimizers.SGD(0.1)), of)
  with pytest.raises(TypeError, match="`local` must be"):
    wrapopt.keras.LocalRounds("local")


@pytest.mark.parametrize("change", ["average", "weights", "restore"])
def test_values_that_others_have_assigned_are_not_sent(
    change, tmp_path, caplog, server):
  """The next `fit` takes the center."""
  optimizer = keras.optimizers.SGD(1.0)
  if change == "average":  # `fit` ends with it.
    optimizer = wrapopt.keras.MovingAverage(optimizer, 0.5)
  model = subtracting(optimizer)
  backup = keras.callbacks.BackupAndRestore(
      str(tmp_path), delete_checkpoint=False)
  rounds = wrapopt.keras.LocalRounds(local_of(
      wrapopt.LocalSGD, 2, server)(model.trainable_variables))

  def fit(epochs):
    caplog.clear()
    model.fit(np.ones([3, 3]), np.ones(3), 1, epochs, verbose=0,
              callbacks=[rounds, *[backup] * (change == "restore")])
    return caplog.text

  # A round, which ends at -2, and a step.
  assert "take the center" not in fit(1)
  if change == "weights":
    model.set_weights([np.full([3, 1], 9.0)])
  if change == "restore":  # Of the same epoch, and so the center's are newer.
    rounds = wrapopt.keras.LocalRounds(local_of(
        wrapopt.LocalSGD, 2, server, resume=True)(model.trainable_variables))
  text = fit(2 if change == "restore" else 1)
  assert ("take the center of round 1, since others have assigned" in text)
  assert rounds._local.round == 2
  # From -2, three steps on. The average of -1, -2, -3, -3, -4 and -5, in turn.
  want = -4.140625 if change == "average" else -5.0
  np.testing.assert_array_equal(model.get_weights()[0], np.full([3, 1], want))


@pytest.mark.by_day(0)
def test_a_fit_goes_on_where_another_ended(caplog, server):
  want, _ = fitted("adam", epochs=2)
  model = compiled("adam")
  rounds = wrapopt.keras.LocalRounds(local_of(
      wrapopt.LocalSGD, 4, server)(model.trainable_variables))
  for _ in range(2):  # Six steps each.
    model.fit(X, Y, 8, 1, verbose=0, shuffle=False, callbacks=[rounds])
  assert rounds._local.round == 3 and "take the center" not in caplog.text
  assert_same(model.get_weights(), want)


@pytest.mark.by_day(0)
def test_fit_ends_with_the_center_on_request(caplog, server):
  """Also if the optimizer ends it with averages."""
  model = subtracting(
      wrapopt.keras.MovingAverage(keras.optimizers.SGD(1.0), 0.5))
  rounds = wrapopt.keras.LocalRounds(
      local_of(wrapopt.LocalSGD, 2, server)(model.trainable_variables),
      end_with_center=True)
  # The third step is after the last round.
  for center in -2, -4:
    model.fit(np.ones([3, 3]), np.ones(3), 1, verbose=0, callbacks=[rounds])
    np.testing.assert_array_equal(model.get_weights()[0],
                                  np.full([3, 1], center))
  assert rounds._local.round == 2 and "take the center" not in caplog.text


@pytest.mark.by_day(0)
@pytest.mark.parametrize("leave_at_end", [True, False])
def test_others_go_on_when_fit_has_ended(leave_at_end, caplog, server):
  """One of two workers has less data than the other."""
  model = subtracting(keras.optimizers.SGD(1.0))
  new = lambda variables, name: wrapopt.LocalSGD(
      variables, [server.target], name, 2, 1, round_timeout_secs=5)
  rounds = wrapopt.keras.LocalRounds(new(model.trainable_variables, "a"),
                                     leave_at_end=leave_at_end)
  w, seen = tf.Variable(tf.zeros([3, 1])), []
  local = new([w], "b")

  def train(steps):
    for _ in range(steps):
      w.assign_sub(tf.ones([3, 1]))
      local.step()
      seen.append(local.report.workers)

  def fit(steps):
    thread = threading.Thread(target=train, args=(steps,))
    thread.start()
    model.fit(np.ones([steps, 3]), np.ones(steps), 1, verbose=0,
              callbacks=[rounds])
    thread.join(60)

  fit(2)
  if not leave_at_end:
    with pytest.raises(tf.errors.DeadlineExceededError, match="needs 2 of 2"):
      train(1)
    return
  train(1)
  assert "take the center" not in caplog.text
  rounds._local.take_center()  # Else b might be faster.
  fit(2)
  assert seen == [("a", "b")] * 2 + [("b",)] + [("a", "b")] * 2
  np.testing.assert_array_equal(model.get_weights()[0], np.full([3, 1], -5.0))
  # Rounds that have ended meanwhile are seen.
  train(1)
  local.leave()
  model.fit(np.ones([2, 3]), np.ones(2), 1, verbose=0, callbacks=[rounds])
  assert "take the center of round 6." in caplog.text
  np.testing.assert_array_equal(model.get_weights()[0], np.full([3, 1], -8.0))


def test_a_backup_of_a_fit_without_epochs(tmp_path, server):
  model = compiled("sgd")
  rounds = wrapopt.keras.LocalRounds(
      local_of(wrapopt.LocalSGD, 2, server)(model.trainable_variables),
      backup_dir=str(tmp_path))
  for epochs in 0, 1:
    model.fit(X, Y, 8, epochs, verbose=0, callbacks=[rounds])
  assert not any(tmp_path.iterdir())


@pytest.mark.by_day(0)
def test_logs_of_epochs(server):
  """A later callback sees the scalars, such as the default TensorBoard."""
  model = compiled("sgd")
  rounds = wrapopt.keras.LocalRounds(
      local_of(wrapopt.LocalSGD, 7, server)(model.trainable_variables))
  seen = []
  later = at_epoch_end(lambda logs: seen.append(
      [logs.get(f"rounds/{key}") for key in ("workers", "bytes_sent")]))
  # An epoch has six steps, so the first one ends before a round does.
  history = model.fit(X, Y, 8, 3, verbose=0, callbacks=[rounds, later])
  assert seen == [[None, None], [1, 84], [1, 84]]
  assert len(history.history["rounds/seconds"]) == 2


def test_averages_in_place_are_not_sent(server):
  w = tf.Variable([1.0, 2.0])
  opt = wrapopt.MovingAverageOptimizer(
      tf.compat.v1.train.GradientDescentOptimizer(0.5), 0.5)
  local = local_of(wrapopt.LocalSGD, 1, server)([w])
  for call in local.step, tf.function(local.step):
    opt.apply_gradients([(tf.ones(2), w)])
    with opt.averaged_weights():
      with pytest.raises(Exception, match="an average is in place of"):
        call()
    call()
  assert local.round == 2
  np.testing.assert_array_equal(w.numpy(), [0.0, 1.0])


@pytest.mark.parametrize("make", [wrapopt.ScheduleFreeOptimizer,
                                  wrapopt.PrimalAverageOptimizer])
def test_a_part_of_a_state_is_not_shared_outside_of_fit(make, server):
  w = tf.Variable([1.0, 2.0])
  local = local_of(wrapopt.LocalSGD, 1, server)([w])
  opt = make(tf.compat.v1.train.GradientDescentOptimizer(0.5))
  opt.apply_gradients([(tf.ones(2), w)])
  for call in local.step, tf.function(local.step):
    with pytest.raises(ValueError, match="must not share .* alone"):
      call()
  assert local.round == 0
  del opt  # Then the variable is the whole model again.
  gc.collect()
  local.step()


@pytest.mark.parametrize("traced", [False, True])
def test_a_mirrored_model(traced, server):
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  with strategy.scope():
    w = tf.Variable([1.0, 2.0])
  local = local_of(wrapopt.DiLoCo, 2, server)([w])

  def train():
    w.assign_sub([1.0, 1.0])

  def step():
    strategy.run(train)
    local.step()

  if traced:
    step = tf.function(step)
  for _ in range(2):
    step()
  assert local.round == 1
  for part in w.values:  # 1.33 of the way.
    np.testing.assert_allclose(part.numpy(), [1 - 2.66, 2 - 2.66], rtol=1e-6)
  with pytest.raises(RuntimeError, match="after strategy.run"):
    strategy.run(local.step)
