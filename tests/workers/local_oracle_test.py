"""DiLoCo of real processes, in all ways to train, is what NumPy makes of it."""

import os
import signal

import numpy as np
import pytest
import tensorflow as tf

import codes
from local_parts import CodedOracle, FORKS, Oracle, Process
from threads import in_threads
import wrapopt
from wrapopt import server as server_module

ROUNDS = 20


def steps_of(k):
  """The number of steps of worker k in a round, which is its weight."""
  return 1 + k % 3


def deltas(k):
  """How far its steps go: [rounds, steps, 5]."""
  return np.random.default_rng(k).normal(
      size=(ROUNDS, steps_of(k), 5)).astype(np.float32)


def train(way, k, num_workers, servers, pipe):
  """A process: sends the center after ROUNDS rounds."""
  xs = deltas(k).reshape([-1, 5])
  diloco = lambda variables: wrapopt.DiLoCo(
      variables, servers, f"w{k}", num_workers, steps_of(k),
      round_timeout_secs=120)
  if way == "fit":
    pipe.send(fit(xs, diloco))
    return
  w = tf.Variable(tf.zeros([5]))
  local = diloco([w])

  def step(x):
    w.assign_add(x)
    local.step()

  if way == "function":
    step = tf.function(step)
  for x in xs:
    step(tf.constant(x))
  pipe.send(w.numpy())


def fit(xs, diloco, epochs=1, backups=None, die=False):
  """Trains; with folders for backups, and dies in the last but one epoch."""
  os.environ.pop("TF_USE_LEGACY_KERAS", None)
  import keras  # pylint: disable=g-import-not-at-top
  import wrapopt.keras  # pylint: disable=g-import-not-at-top,redefined-outer-name
  model = keras.Sequential([keras.Input([5]), keras.layers.Dense(
      1, use_bias=False, kernel_initializer="zeros")])
  # Gradient descent adds the batch to the weights.
  model.compile(keras.optimizers.SGD(1.0),
                lambda y, p: -tf.reduce_sum(p, axis=-1))
  callbacks = [wrapopt.keras.LocalRounds(
      diloco(model.trainable_variables),
      backup_dir=backups and os.path.join(backups, "local"))]
  if backups:
    callbacks.append(keras.callbacks.BackupAndRestore(
        os.path.join(backups, "keras")))

  class Death(keras.callbacks.Callback):

    def on_epoch_begin(self, epoch, logs=None):
      self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
      if self.epoch == epochs - 2 and batch == len(xs) - 2:
        os.kill(os.getpid(), signal.SIGKILL)

  if die:
    callbacks.append(Death())
  model.fit(xs, np.zeros(len(xs)), 1, epochs, verbose=0, shuffle=False,
            callbacks=callbacks)
  return model.get_weights()[0][:, 0]


@pytest.mark.parametrize("num_workers", [2, 4], ids="{}_workers".format)
@pytest.mark.parametrize("num_servers", [1, 2], ids="{}_servers".format)
@pytest.mark.parametrize("way", ["eager", "function", "fit"])
def test_the_oracle(way, num_servers, num_workers):
  servers = [Process() for _ in range(num_servers)]
  workers = []
  try:
    for k in range(num_workers):
      pipe, end = FORKS.Pipe()
      worker = FORKS.Process(target=train, args=(
          way, k, num_workers, [s.address for s in servers], end), daemon=True)
      worker.start()
      end.close()
      workers.append((worker, pipe))
    centers = [pipe.recv() for _, pipe in workers]
  finally:
    for process in *[w for w, _ in workers], *servers:
      process.kill()
  oracle = Oracle(np.zeros(5))
  for r in range(ROUNDS):
    oracle.end_round(
        [oracle.center + deltas(k)[r].sum(axis=0) for k in range(num_workers)],
        [steps_of(k) for k in range(num_workers)])
  for center in centers:
    np.testing.assert_array_equal(center, centers[0])
    np.testing.assert_allclose(center, oracle.center, rtol=0, atol=1e-4)


def fit_on(k, servers, folder, die, pipe):
  """A process: five rounds in an epoch."""
  diloco = lambda variables: wrapopt.DiLoCo(
      variables, servers, f"w{k}", 2, steps_of(k), round_timeout_secs=120)
  xs = deltas(k)[:5].reshape([-1, 5])
  pipe.send(fit(xs, diloco, ROUNDS // 5, f"{folder}/{k}", die))


def test_a_job_in_fit_that_was_killed(tmp_path):
  """New servers and workers go on from the backups, as if nothing was."""
  for die in True, False:
    processes = [Process(), Process()]
    pipes = []
    try:
      for k in range(2):
        pipe, end = FORKS.Pipe()
        processes.append(FORKS.Process(target=fit_on, args=(
            k, [s.address for s in processes[:2]], tmp_path, die, end),
                                       daemon=True))
        processes[-1].start()
        end.close()
        pipes.append(pipe)
      if die:
        processes[-1].join(120)
        assert processes[-1].exitcode == -signal.SIGKILL
        assert all((tmp_path / f"{k}/local/center/checkpoint").exists()
                   for k in range(2))
      else:
        centers = [pipe.recv() for pipe in pipes]
    finally:
      for process in processes:
        process.kill()
  oracle = Oracle(np.zeros(5))
  for r in range(ROUNDS):
    oracle.end_round(
        [oracle.center + deltas(k)[r % 5].sum(axis=0) for k in range(2)],
        [steps_of(k) for k in range(2)])
  for center in centers:
    np.testing.assert_array_equal(center, centers[0])
    np.testing.assert_allclose(center, oracle.center, rtol=0, atol=1e-4)
  assert not any((tmp_path / f"{k}/local/center").exists() for k in range(2))


@pytest.mark.parametrize("rule, num_servers", [("DiLoCo", 3), ("LocalSGD", 1)])
@pytest.mark.parametrize("dtype", codes.DTYPES)
def test_codes_to_the_bit(dtype, rule, num_servers):
  """Of three workers, one leaves and comes back, and one misses a round."""
  servers = [server_module.start().target for _ in range(num_servers)]
  rng = np.random.default_rng(1)
  initial = rng.normal(size=500).astype(np.float32)
  oracle = CodedOracle(initial, dtype, num_servers, *(
      [] if rule == "DiLoCo" else [1, 0]))
  weights = {f"w{k}": 1 + 2 * k for k in range(3)}
  variables = {name: [tf.Variable(initial[:7]), tf.Variable(initial[7:])]
               for name in weights}
  locals_ = {
      name: getattr(wrapopt, rule)(
          variables[name], servers, name, 3, 1, min_workers=2, dtype=dtype,
          weight="examples", round_timeout_secs=3) for name in weights}
  flat = lambda name: np.concatenate([v.numpy() for v in variables[name]])

  def train(name):
    delta = rng.normal(size=500).astype(np.float32)
    variables[name][0].assign_add(delta[:7])
    variables[name][1].assign_add(delta[7:])
    return flat(name)

  holds = {*weights}  # Those that hold the center of the last round.
  for r in range(ROUNDS):
    members = [*weights]
    if 5 <= r < 9 or r == 12:
      members.remove("w2")
    if r == 5:
      locals_["w2"].leave()
    elif r == 9:
      locals_["w2"].take_center()
      holds.add("w2")
    elif r == 13:  # It has missed a round, so what it has trained is lost.
      train("w2")
      locals_["w2"].step(1)
      assert not locals_["w2"].report.counted
      assert locals_["w2"].report[-2:] == (0, oracle.bytes)
      holds.add("w2")
    values = {name: train(name) for name in members}
    in_threads(*[lambda name=name: locals_[name].step(weights[name])
                 for name in members])
    # The servers' vectors, in full.
    got = [locals_["w0"]._member.read(what)[1][0]
           for what in ("center", "velocities", "errors")]
    oracle.end_round(values, weights, got)
    for name in members:
      local = locals_[name]
      assert local.round == r + 1 and local.report.counted
      assert flat(name).tobytes() == oracle.center.tobytes()
      assert local._member.center[0].tobytes() == oracle.center.tobytes()
      assert local.report.workers == tuple(members)
      assert local.report.sent == oracle.bytes
      assert local.report.received == (oracle.bytes if name in holds else 2000)
    holds = {*members}
    for name, local in locals_.items():
      if oracle.errors[name].any():
        [error] = local._member.errors
        np.testing.assert_array_equal(error, oracle.errors[name])
  assert oracle.bytes < {"bfloat16": 1001, "int8": 540, "int4": 300}[dtype]
  # What is held back is less than a step of the codes.
  assert 0 < abs(oracle.lost).max() < {
      "bfloat16": .1, "int8": .2, "int4": 3}[dtype]
