"""DiLoCo in `fit` of real processes is what NumPy makes of it."""

import os
import signal

import numpy as np
import tensorflow as tf

import wrapopt
from local_parts import FORKS, Oracle, Process

ROUNDS = 20


def steps_of(k):
  """The number of steps of worker k in a round, which is its weight."""
  return 1 + k % 3


def deltas(k):
  """How far its steps go: [rounds, steps, 5]."""
  return np.random.default_rng(k).normal(
      size=(ROUNDS, steps_of(k), 5)).astype(np.float32)


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
