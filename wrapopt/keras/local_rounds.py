"""Local training in `fit`."""

import os
from typing import Any, Optional, Union
import zlib

import keras
import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt.diloco import DiLoCo
from wrapopt.local_sgd import LocalSGD


class LocalRounds(keras.callbacks.Callback):
  """Takes part in the rounds of a `wrapopt.LocalSGD` or `wrapopt.DiLoCo`.

  It counts the steps that `fit` takes, and calls `step` of the object. The
  `steps_per_execution` of `compile` must divide `sync_every / fragments` and
  `overlap_steps`.

  `fit` ends with the weights of this worker: the last center, and the steps
  that this worker has taken since; with the averages, if the optimizer averages
  them. With `end_with_center=True`, it ends with the last center. Then the
  worker leaves: see `leave_at_end`.

  The `logs` of an epoch have the `scalars()` of its last round. So a
  `keras.callbacks.TensorBoard` that comes after this callback writes
  `epoch_rounds/workers` and the others; with `update_freq="batch"`, it writes
  the scalars of each round.

  A `wrapopt.keras.MovingAverage` or `SWA` averages the weights that this worker
  has had, the centers among them. `ScheduleFree`, `PrimalAverage` and
  `Lookahead` are refused in the first round: their variables are only a part of
  their state, and the rest would not follow the center.

  The first batch of a `fit` takes the center, with a warning, if something else
  has assigned to the variables: `fit` may have ended with averages, or a
  `keras.callbacks.BackupAndRestore` has restored the weights of a killed run.
  Give that callback and this one directories to let a killed job go on: that
  one has the optimizer's state and the epoch, this one the center, its velocity
  and its round. The program makes `local` with `resume=True`, since servers may
  still have the job's center, and with the `checkpoint=` of the directory
  "center" in that of this callback, since they may have lost it.

  Example:

      model.build(...)
      local = wrapopt.DiLoCo(model.trainable_variables, ["ps0:2222"],
                             worker="a", num_workers=4, sync_every=100)
      model.fit(x, y, callbacks=[wrapopt.keras.LocalRounds(local)])
  """

  def __init__(self, local: Union[LocalSGD, DiLoCo], *,
               batch_size: Optional[int] = None,
               backup_dir: Optional[str] = None,
               end_with_center: bool = False,
               leave_at_end: bool = True) -> None:
    """Makes the callback.

    Args:
      local: Of the model's variables.
      batch_size: The number of examples in a batch; needed if the weight of
        `local` is "examples".
      backup_dir: A directory for checkpoints of `local`, one at the end of each
        epoch, of which the last is kept. `fit` begins with it, unless the
        servers have a later center, and removes it when it ends. One worker
        suffices, with a directory of its own.
      end_with_center: Whether the model has the center of the servers when
        `fit` ends, and not the weights of this worker.
      leave_at_end: Whether the worker leaves when `fit` ends, so that others go
        on without it. Its next `fit` comes back. With False, rounds wait for it
        between two calls of `fit`; call `local.leave()` after the last one.

    Raises:
      TypeError: If `local` is neither a LocalSGD nor a DiLoCo.
      ValueError: If `batch_size` is less than 1.
    """
    super().__init__()
    if not isinstance(local, (LocalSGD, DiLoCo)):
      raise TypeError("`local` must be a wrapopt.LocalSGD or a wrapopt.DiLoCo, "
                      f"got {local!r}.")
    if batch_size is not None:
      batch_size = _checks.integer("batch_size", batch_size, least=1)
    self._local, self._batch_size = local, batch_size
    self._end_with_center = _checks.boolean("end_with_center", end_with_center)
    self._leave_at_end = _checks.boolean("leave_at_end", leave_at_end)
    self._folder = backup_dir and os.path.join(backup_dir, "center")
    self._checksum = _checksum(local.variables)

  def on_train_begin(self, logs: Any = None) -> None:
    steps = self.model.steps_per_execution
    fragments = self._local.fragments
    interval = self._local.sync_every // fragments
    for what, n in (("sync_every" + " / fragments" * (fragments > 1), interval),
                    ("overlap_steps", self._local.overlap_steps)):
      if n % steps:
        raise ValueError("`steps_per_execution` of compile() must divide "
                         f"{what} = {n}, got {steps}.")
    self._is_first_batch = True
    self._logged = self._local.report
    if self._folder:
      self._backups = tf.train.CheckpointManager(
          tf.train.Checkpoint(local=self._local), self._folder, max_to_keep=1)
      self._backups.restore_or_initialize()

  def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
    if not self._is_first_batch:
      return
    # Only now, since other callbacks may have restored weights and iterations.
    self._is_first_batch = False
    self._taken = int(self.model.optimizer.iterations)
    changed = _checksum(self._local.variables) != self._checksum
    if changed or not self._local.holds_center():
      self._local.take_center()
      tf.get_logger().warning(
          "The variables take the center of round %d%s.", self._local.round,
          ", since others have assigned to them" if changed else "")

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    before, self._taken = self._taken, int(self.model.optimizer.iterations)
    steps = self._taken - before
    if steps:
      self._local.step(
          steps=steps, examples=self._batch_size and self._batch_size * steps)

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    if self._local.report is not self._logged:
      self._logged = self._local.report
      if logs is not None:
        logs.update(self._local.scalars())
    # Not in the end of `fit`, which may assign averages before.
    self._checksum = _checksum(self._local.variables)
    if self._folder:
      self._backups.save()

  def on_train_end(self, logs: Any = None) -> None:
    if self._folder and tf.io.gfile.exists(self._folder):
      tf.io.gfile.rmtree(self._folder)
    if self._end_with_center:
      self._local.take_center()
      self._checksum = _checksum(self._local.variables)
    if self._leave_at_end:
      self._local.leave()


def _checksum(values):
  checksum = 0
  for value in values:
    checksum = zlib.crc32(np.asarray(value).tobytes(), checksum)
  return checksum
