"""Local training in `fit`."""

from typing import Any, Optional, Union

import keras

from wrapopt.diloco import DiLoCo
from wrapopt.local_sgd import LocalSGD


class LocalRounds(keras.callbacks.Callback):
  """Takes part in the rounds of a `wrapopt.LocalSGD` or `wrapopt.DiLoCo`.

  It counts the steps that `fit` takes, and calls `step` of the object. The
  optimizer's `steps_per_execution` must divide `sync_every`.

  A `wrapopt.keras.MovingAverage` or `SWA` averages the weights that this worker
  has had, the centers among them. `ScheduleFree`, `PrimalAverage` and
  `Lookahead` are refused in the first round: their variables are only a part of
  their state, and the rest would not follow the center.

  Example:

      model.build(...)
      local = wrapopt.DiLoCo(model.trainable_variables, ["ps0:2222"],
                             worker="a", num_workers=4, sync_every=100)
      model.fit(x, y, callbacks=[wrapopt.keras.LocalRounds(local)])
  """

  def __init__(self, local: Union[LocalSGD, DiLoCo], *,
               batch_size: Optional[int] = None) -> None:
    """Makes the callback.

    Args:
      local: Of the model's variables.
      batch_size: The number of examples in a batch; needed if the weight of
        `local` is "examples".

    Raises:
      TypeError: If `local` is neither a LocalSGD nor a DiLoCo.
    """
    super().__init__()
    if not isinstance(local, (LocalSGD, DiLoCo)):
      raise TypeError("`local` must be a wrapopt.LocalSGD or a wrapopt.DiLoCo, "
                      f"got {local!r}.")
    self._local, self._batch_size = local, batch_size

  def on_train_begin(self, logs: Any = None) -> None:
    steps = self.model.steps_per_execution
    if self._local.sync_every % steps:
      raise ValueError("`steps_per_execution` must divide sync_every = "
                       f"{self._local.sync_every}, got {steps}.")
    self._taken = int(self.model.optimizer.iterations)

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    before, self._taken = self._taken, int(self.model.optimizer.iterations)
    steps = self._taken - before
    if steps:
      self._local.step(
          steps=steps, examples=self._batch_size and self._batch_size * steps)
