"""Stochastic weight averaging: the mean of weights during the training."""

from typing import Any, Optional, Union

import keras

from wrapopt import _checks
from wrapopt import ops
from wrapopt.keras import _wrapper
from wrapopt.keras._averages import _averaging
from wrapopt.keras._averages import _public_methods
from wrapopt.keras._averages import _store
from wrapopt.keras._steps import _step


@keras.saving.register_keras_serializable("wrapopt")
class SWA(_public_methods.PublicMethods, _wrapper.WrapperOptimizer):
  """Keeps the mean of the weights after every `average_period` steps.

  Let i be the number of steps before this one. The average `s` of a variable
  `v` counts the step if `i >= start_averaging` and `i - start_averaging` is a
  multiple of `average_period`. With n the number of steps counted before,

      s += (v - s) / (n + 1)

  Before the first counted step, the average is its variable. n is saved and
  restored with the averages, and `seed_averages` resets it. The inner optimizer
  may have trained before: i includes its earlier steps, n does not.

  With `steps_per_epoch`, the average counts epochs, not steps: the weights
  after the last step of the epoch `start_averaging`, counted from 0, and of
  every `average_period`-th epoch from then on. The statistics of batch
  normalizations do not fit the average; `EvaluateWithAverages` recalibrates
  them:

      batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
      model.compile(wrapopt.keras.SWA(
          "sgd", start_averaging=10, steps_per_epoch=len(batches)), ...)
      model.fit(batches, epochs=20, callbacks=[
          wrapopt.keras.EvaluateWithAverages(recalibrate=batches)])

  Example:

  >>> w = keras.Variable([0.0])
  >>> opt = wrapopt.keras.SWA(keras.optimizers.SGD(1.0), 0, average_period=2)
  >>> for _ in range(3):
  ...   opt.apply([tf.constant([-1.0])], [w])
  >>> w.numpy(), opt.average(w).numpy()  # The mean of 1 and 3.
  (array([3.], dtype=float32), array([2.], dtype=float32))

  References: Izmailov et al., "Averaging weights leads to wider optima and
  better generalization", UAI 2018; `tfa.optimizers.SWA` of TensorFlow Addons.

  Differences from TensorFlow Addons: an average starts at its variable's value,
  not at zero; float16 and bfloat16 variables, whose averages are float32.
  """

  def __init__(
      self, optimizer: Union[str, dict[str, Any], keras.optimizers.Optimizer],
      start_averaging: int = 0, average_period: Optional[int] = None,
      name: Optional[str] = None, *, steps_per_epoch: Optional[int] = None,
      keep_raw_weights: bool = False,
      sum_duplicates: bool = False, variables: Any = None) -> None:
    """Wraps `optimizer`.

    Args:
      optimizer: A Keras optimizer, or its name or configuration.
      start_averaging: The number of steps before the first counted one. With
        `steps_per_epoch`, the number of epochs before the first counted one.
      average_period: The number of steps from one counted step to the next; by
        default 10. With `steps_per_epoch`, the number of epochs; by default 1.
      name: The name of the optimizer.
      steps_per_epoch: The number of steps of an epoch, if `start_averaging` and
        `average_period` are numbers of epochs: the number of batches, divided
        by `gradient_accumulation_steps` if the optimizer accumulates gradients.
        `EvaluateWithAverages` compares it with the epochs of `fit`: at the end
        of the first one, if Keras does not know the number of batches before.
        With `steps_per_execution`, up to that many batches then stay unknown.
      keep_raw_weights: Whether `fit` ends with the raw weights in the model. By
        default, it ends with the averages.
      sum_duplicates: If a batch names a row of an embedding several times,
        whether the row's gradients are summed before Adam, AdamW, Adagrad or
        RMSprop squares them, as `LazyAdam` does. One op then takes the step,
        which is faster. By default, the inner optimizer takes this step, with
        its own numbers: Keras squares each gradient and sums the squares.
      variables: Which variables are averaged; by default all. A function of a
        variable that returns True or False, or a list of variables or of their
        paths. A path may lack its first parts: "dense/kernel" is the path of
        "sequential/dense/kernel", if no other variable has it. The others are
        trained in the same way, and an evaluation uses them as they are. They
        have no average, at no cost. A model is saved with the paths of a list,
        which must then be unique; a function must be registered by
        `keras.saving.register_keras_serializable`. An average that a file lacks
        starts at its variable's value, with a warning.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer, or an argument has a
        wrong type.
      ValueError: If a number is out of range, `variables` is empty, or
        `keep_raw_weights` is True and an optimizer inside ends `fit` with its
        own averages. In `build`, if `variables` selects nothing, or lists
        anything that the optimizer does not train.
    """
    super().__init__(optimizer, name, sum_duplicates)
    self._averages = _averaging.Averages(self, keep_raw_weights, variables)
    if average_period is None:
      average_period = 10 if steps_per_epoch is None else 1
    average_period = _checks.integer("average_period", average_period, 1)
    start_averaging = _checks.integer("start_averaging",
                                             start_averaging, 0)
    if steps_per_epoch is not None:
      steps_per_epoch = _checks.integer("steps_per_epoch",
                                               steps_per_epoch, 1)
    self._arguments = {"start_averaging": start_averaging,
                    "average_period": average_period,
                    "steps_per_epoch": steps_per_epoch}
    if steps_per_epoch is not None:
      start_averaging = (start_averaging + 1) * steps_per_epoch - 1
      average_period *= steps_per_epoch
    # In steps.
    self._start_averaging = start_averaging
    self._average_period = average_period

  def _make_state(self, variables):
    self._store.rows = [self._store.make_row(
        "average", self._averages.candidates(variables),
        _store.float32_for_half)]
    self._store.make_counts("counted_steps", 0)

  def _follow(self, step):
    since = step.iterations - self._start_averaging
    counts = (since >= 0) & (since % self._average_period == 0)
    pairs = step.all_pairs(self._store.rows[0])
    counted = self._store.counts[step.part].value

    def count():
      n = counted.read_value()
      counted.assign(n + 1)
      n = ops.float64(n)
      ops.ema_update([s for _, s in pairs], [v for v, _ in pairs], n / (n + 1))

    _step.where(counts, count)

  def check_batches_per_epoch(self, batches: int, fewer: int = 0) -> None:
    """Raises an error if `steps_per_epoch` is for other epochs."""
    got = self._arguments["steps_per_epoch"]
    accumulated = self.gradient_accumulation_steps or 1
    if got is not None and not (
        batches - fewer <= got * accumulated <= batches):
      raise ValueError(
          "`steps_per_epoch` of a SWA must be the number of steps in an epoch "
          f"of fit(), {batches / accumulated:g}, got {got}. Make the SWA with "
          "that number, which must be an integer.")

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), **self._arguments}
