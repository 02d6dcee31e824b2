"""Which callbacks may run with averages in place."""

import keras


def checked(callbacks, refused):
  """Callbacks as a list.

  Args:
    callbacks: A callback, or a list of them.
    refused: {class of callbacks that are an error: its name, and why}.
  """
  if isinstance(callbacks, keras.callbacks.Callback):
    callbacks = [callbacks]
  callbacks = list(callbacks or ())
  for callback in callbacks:
    if not isinstance(callback, keras.callbacks.Callback):
      raise TypeError("`callbacks` must be Keras callbacks, got "
                      f"{type(callback).__qualname__}.")
    for cls, why in refused.items():
      if isinstance(callback, cls):
        raise ValueError(f"`callbacks` must not contain {why}")
  return callbacks


def check_end(found, callbacks):
  """Raises an error if the weights at the end of `fit` are not clear.

  Args:
    found: The optimizers that keep averages.
    callbacks: Those that run with averages in place.
  """
  keeps = {optimizer.keeps_raw_weights for optimizer in found}
  if len(keeps) > 1:
    raise ValueError(
        "`keep_raw_weights` must be the same for all optimizers that keep "
        "averages in one model, got True and False.")
  if keeps == {True} and any(
      isinstance(c, keras.callbacks.EarlyStopping) and c.restore_best_weights
      for c in callbacks):
    raise ValueError(
        "`callbacks` must not contain an EarlyStopping with "
        "restore_best_weights=True if the optimizer has "
        "keep_raw_weights=True, nor may one come after a callback with "
        "swap_on_epoch=True: it sets the weights to averages at the end "
        "of fit(). Save the best averages with a ModelCheckpoint.")
