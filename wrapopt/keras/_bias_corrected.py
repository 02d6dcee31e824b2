"""The base class of the Keras wrapper whose averages may be those of a BEMA."""

import functools

import tensorflow as tf

from wrapopt._averages import _bias_corrected
from wrapopt._averages import _decays
from wrapopt.keras import _averaging
from wrapopt.keras import _statistics
from wrapopt.keras import _steps
from wrapopt.keras._variables import value_of


class BiasCorrectingOptimizer(_statistics.StatisticsAveragingOptimizer):
  """A wrapper some of whose averages follow from several variables.

  Attributes:
    UNBEGUN: The first step of averages that have not begun. Other negative
      numbers are those of steps that `iterations` does not count.
  """

  UNBEGUN = -1

  def _set_decays(self, decays, start_step, update_every):
    """Sets the decays, the result of `_decays.checked`."""
    self._public_decays = decays
    self._decays = _decays.with_origins(decays)
    self._moving = _decays.moving(self._decays, at_once=not start_step)
    _decays.check_update_every(decays, update_every)
    self.follows_variables = self._decays != decays
    for x in _steps.within(self) if self.follows_variables else ():
      if x.use_ema or isinstance(x, _averaging.AveragingOptimizer):
        raise ValueError(
            "`optimizer` of a MovingAverage with a BEMA must not be or hold an "
            "optimizer that puts averages in the weights, from which the BEMA "
            f"follows, got {type(x).__qualname__}. Use one of the two.")

  def _index_of(self, decay):
    return _decays.index_of(decay, self._public_decays)

  def _moving_of(self, rows):
    """Selects the entries of averages that steps move, from a list."""
    return [rows[k] for k in self._moving]

  def _is_derived(self, k):
    return _decays.is_derived(self._decays[k])

  def _derived(self, variables, k):
    """The averages of a BEMA, which no variable holds: a list."""
    decay, steps = self._decays[k], self._readers_of_steps()
    rows = (self._rows[k],
            self._rows[_decays.place_of_origin(decay, self._decays)])
    return [_bias_corrected.BiasCorrected(
        value_of(v), *(value_of(row[key]) for row in rows), decay,
        steps[key]) for v in variables for key in [self._var_key(v)]]

  def _all_derived(self, but=None):
    """The averages of all BEMAs but one, by the index of its decay: a list."""
    return [s for k in range(len(self._public_decays))
            if self._is_derived(k) and k != but for s in self._derived(
                [v for v in self._trainable_variables
                 if self._var_key(v) in self._rows[k]], k)]

  def _of(self, variables, decay=None):
    k = self._index_of(decay)
    found = super()._of(variables, decay)
    if not self._is_derived(k):
      return found
    variables = [v for v, _ in found]
    return list(zip(variables, self._derived(variables, k)))

  def _assign(self, pairs):
    held = [(part, part.read_value()) for s in self._all_derived()
            for part in s.of_replicas()]
    super()._assign(pairs)
    for part, value in held:
      part.hold(value)

  def _beside(self, pairs, decay):
    # In a file, as when `fit` has ended: the averages stay what they are.
    def saved(swapped_in):
      return [pair for s in self._all_derived() for pair in zip(
          s.saved, (s.value_in_block(swapped_in), s.variable))]

    return self._all_derived(but=self._index_of(decay)), saved

  def _readers_of_steps(self):
    """{key of a variable: a function that reads the steps of its average}.

    The variables of one optimizer have the same function.
    """
    return {self._var_key(v): read for part, opt in self._parts().items()
            for read in [functools.partial(self._steps_now, part, opt)]
            for v in opt._trainable_variables}

  def _steps_now(self, part, opt):
    """The number of steps of a part's averages until now: an int64 tensor."""
    first = self._first[part].value.read_value()
    iterations = tf.cast(tf.convert_to_tensor(opt.iterations), tf.int64)
    return tf.where(first == self.UNBEGUN, tf.constant(0, tf.int64),
                    self._since(iterations, first))

  def _since(self, iterations, first):
    """The number of steps of averages that have begun: a number or a tensor.

    Args:
      iterations: The number of steps of the optimizer.
      first: The first step of the averages, as it is stored.
    """
    if not tf.is_tensor(first):
      return max(iterations - (
          first + 1 if first < 0 else max(first, self._start_step)), 0)
    begun = tf.where(first < 0, first + 1, tf.maximum(first, self._start_step))
    return tf.maximum(iterations - begun, tf.constant(0, tf.int64))
