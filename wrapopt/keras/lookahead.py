"""Lookahead: slow weights to which the fast weights return at intervals."""

from typing import Any, Optional, Union

import keras

from wrapopt import _checks
from wrapopt import ops
from wrapopt._averages import _companions
from wrapopt.keras import _wrapper
from wrapopt.keras._averages import _store
from wrapopt.keras._steps import _step
from wrapopt.keras._variables import value_of


@keras.saving.register_keras_serializable("wrapopt")
class Lookahead(_wrapper.WrapperOptimizer):
  """Moves slow weights towards the weights that the inner optimizer trains.

  Each variable `v` has slow weights `s`, which start at its value before the
  first step. After every `sync_period` steps of the inner optimizer

      s += slow_step_size (v - s)
      v = s

  The slots of the inner optimizer do not change. All variables that it was
  built with move, also those without a gradient in this step: freeze a teacher
  that your own code changes (`trainable = False`). Frozen variables stay as
  they are, with their slow weights. If a variable has a constraint, it acts
  once after each step, as in Keras, and once on the weights that such a move
  has set.

  Example:

  >>> w = keras.Variable([0.0])
  >>> opt = wrapopt.keras.Lookahead(keras.optimizers.SGD(1.0), 2)
  >>> for _ in range(3):
  ...   opt.apply([tf.constant([-1.0])], [w])
  ...   print(w.numpy())
  [1.]
  [1.]
  [2.]

  References: Zhang, Lucas, Hinton and Ba, "Lookahead optimizer: k steps
  forward, 1 step back", NeurIPS 2019; `tfa.optimizers.Lookahead` of TensorFlow
  Addons.

  Differences from TensorFlow Addons: the steps between two moves write nothing;
  `sync_period` must be positive.
  """

  changes_weights = True

  def __init__(
      self, optimizer: Union[str, dict[str, Any], keras.optimizers.Optimizer],
      sync_period: int = 6, slow_step_size: float = 0.5,
      name: Optional[str] = None, *, sum_duplicates: bool = False) -> None:
    """Wraps `optimizer`.

    Args:
      optimizer: A Keras optimizer, or its name or configuration.
      sync_period: The number of steps of the inner optimizer between two moves
        of the slow weights.
      slow_step_size: The fraction of the distance that the slow weights move: a
        number in [0, 1].
      name: The name of the optimizer.
      sum_duplicates: If a batch names a row of an embedding several times,
        whether the row's gradients are summed before Adam, AdamW, Adagrad or
        RMSprop squares them, as `LazyAdam` does. One op then takes the step,
        which is faster. By default, the inner optimizer takes this step, with
        its own numbers: Keras squares each gradient and sums the squares.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer, or an argument has a
        wrong type.
      ValueError: If a number is out of range.
    """
    super().__init__(optimizer, name, sum_duplicates)
    sync_period = _checks.integer("sync_period", sync_period, 1)
    _checks.fraction("slow_step_size", slow_step_size)
    self._sync_period = sync_period
    self._slow_step_size = slow_step_size

  def _make_state(self, variables):
    slow = self._store.make_row(
        "slow", dict(enumerate(self._averageable(variables))),
        _store.float32_for_half)
    for v in self._averageable(variables):
      _companions.note(*map(value_of, (v, slow[self._var_key(v)])))
    self._store.rows = [slow]
    self._store.make_begun()

  def slow_weights(self, variable: keras.Variable) -> Any:
    """The slow weights of a variable.

    Args:
      variable: A variable that the optimizer was built with.

    Returns:
      The `keras.Variable` that holds them.

    Raises:
      RuntimeError: If the optimizer is not built.
      KeyError: If the optimizer does not have the variable.
    """
    self._require_built("slow_weights")
    self._store.seed_unbegun()
    return self._store.found(variable, *self._store.rows)

  def seed_slow_weights(self) -> None:
    """Sets all slow weights to their variables' current values.

    For weights that are set after the first step. Weights that are set before
    it are where the slow weights start.

    Raises:
      RuntimeError: If the optimizer is not built, or averages are in place.
    """
    self._require_built("seed_slow_weights")
    self._refuse_swapped_in("seed_slow_weights")
    self._store.state.seed()

  def _follow(self, step):
    self._store.mark_begun()
    fast, slow = map(list, zip(*step.moved_pairs(self._store.rows[0])))

    def sync():
      ops.averaging_assign([slow, fast], [slow, fast],
                           [1 - self._slow_step_size, self._slow_step_size])
      step.constrain()

    _step.where((step.iterations + 1) % self._sync_period == 0, sync)

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), "sync_period": self._sync_period,
            "slow_step_size": self._slow_step_size}
