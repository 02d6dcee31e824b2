"""Callbacks that tests give to Keras."""

import keras


def at_epoch_end(function):
  """Calls a function of the logs."""
  return keras.callbacks.LambdaCallback(
      on_epoch_end=lambda epoch, logs: function(logs))


def at_batch_end(function):
  """Calls a function after each step or execution of a training."""
  return keras.callbacks.LambdaCallback(
      on_train_batch_end=lambda batch, logs: function())


class Stop(BaseException):
  """As KeyboardInterrupt is."""


class Fails(keras.callbacks.Callback):
  """Raises in one of its methods."""

  def __init__(self, method):
    super().__init__()
    setattr(self, method, self._fail)

  def _fail(self, *args, **kwargs):
    raise Stop
