"""Callbacks after an EvaluateWithAverages with `swap_on_epoch`."""

import inspect

import keras


class CallbackAfter:
  """A callback after one with `swap_on_epoch`, in Keras's list of callbacks."""

  def __init__(self, callback, evaluator):
    self._callback, self._evaluator = callback, evaluator

  def __getattr__(self, name):
    return getattr(self._callback, name)

  def on_epoch_end(self, epoch, logs=None):
    self._evaluator._run([self._callback], "on_epoch_end", epoch, logs)

  def on_train_end(self, logs=None):
    self._evaluator._end([self._callback], logs)

  @classmethod
  def all_after(cls, evaluator):
    """The callbacks after a callback whose `set_model` runs: a list."""
    found, i = cls._checked_place_of(evaluator)
    after = [cls._layers(c)[-1] for c in found.callbacks[i + 1:]]
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in after):
      raise ValueError(
          "BackupAndRestore must not come after EvaluateWithAverages("
          "swap_on_epoch=True): it would resume the training from averages. "
          "Pass it to fit() before EvaluateWithAverages.")
    return after

  @classmethod
  def list_with(cls, evaluator):
    """The callbacks of Keras's list with one whose `set_model` runs: a list."""
    found, _ = cls._place_of(evaluator)
    return ([cls._layers(c)[-1] for c in found.callbacks] if found else
            [evaluator])

  @classmethod
  def replace_after(cls, evaluator):
    """Replaces the callbacks after a callback whose `set_model` runs."""
    found, i = cls._checked_place_of(evaluator)
    for k, callback in enumerate(found.callbacks[i + 1:], i + 1):
      *around, own = cls._layers(callback)
      # Keras's own two read no weights.
      if not any(x._evaluator is evaluator for x in around) and (
          not isinstance(own, (keras.callbacks.History,
                               keras.callbacks.ProgbarLogger))):
        found.callbacks[k] = cls(callback, evaluator)

  @classmethod
  def _layers(cls, callback):
    """The CallbackAfters around a callback, and the callback: a list."""
    found = [callback]
    while isinstance(found[-1], cls):
      found.append(found[-1]._callback)
    return found

  @classmethod
  def _place_of(cls, evaluator):
    """Keras's list of callbacks that sets the model, and the index in it.

    Both are None if another one sets the model.
    """
    # Keras does not tell a callback which list it is in.
    frame = inspect.currentframe()
    while frame is not None:
      found = frame.f_locals.get("self")
      if isinstance(found, keras.callbacks.CallbackList):
        for i, callback in enumerate(found.callbacks):
          if cls._layers(callback)[-1] is evaluator:
            return found, i
      frame = frame.f_back
    return None, None

  @classmethod
  def _checked_place_of(cls, evaluator):
    found, i = cls._place_of(evaluator)
    if found is None:
      raise ValueError(
          "EvaluateWithAverages(swap_on_epoch=True) must be in the list of "
          "callbacks of fit() or in a keras.callbacks.CallbackList, got a call "
          "of set_model() by another one. Pass `callbacks` to it instead.")
    return found, i
