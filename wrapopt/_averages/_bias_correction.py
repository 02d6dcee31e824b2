"""The average of a BEMA, which follows from three variables."""

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _absence
from wrapopt._averages import _derivation
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt._averages import _swap


class BiasCorrected(_derivation.Derived):
  """s + alpha_t (v - v_0)."""

  def __init__(self, variable, average, origin, decay, steps):
    """Makes the average of a variable.

    Args:
      variable: The variable v.
      average: The average s.
      origin: The average that holds v_0.
      decay: The BEMA.
      steps: A function that returns t, a number or a tensor.
    """
    super().__init__(variable, _lazy.stored(average), [average, origin])
    self._decay, self._steps = decay, steps
    self.alike = steps, decay, self.dtype

  def read_packed(self, averages, at_once):
    for s in averages:
      s._check_readable()
    return self._of(at_once, *(ops.read_packed(list(map(_lazy.stored, xs)))
                               for xs in zip(*((s.variable, *s.saved)
                                               for s in averages))))

  def _check_readable(self):
    _absence.check(self.rows)
    _swap.check_unoccupied(
        self.variable, "Another average that follows from a variable must not "
        "be read")

  def read_value(self, at_once=None):
    self._check_readable()
    return self._of({} if at_once is None else at_once, *(
        x.read_value() for x in (self.variable, *self.saved)))

  def value_in_block(self, swapped_in):
    """The average while averages, a `_swap.SwappedIn`, are in place."""
    return self._of({}, *map(swapped_in.value_before, (
        _replicas.values(x)[0]
        for x in (self.variable, *map(_lazy.stored, self.saved)))))

  def _of(self, at_once, *values):
    dtype = _derivation.computed_in(self.dtype)
    v, s, v_0 = (tf.cast(x, dtype) for x in values)
    key = self._steps, self._decay, dtype
    if key not in at_once:
      at_once[key] = tf.cast(
          ops.float64(self._decay.correction(self._steps())), dtype)
    alpha = at_once[key]
    return tf.cast(s + alpha * (v - v_0), self.dtype)

  def hold(self, value):
    """Sets s to `value`, and v_0 to v: the average is `value` then."""
    average, origin = self.saved
    average.assign(tf.cast(value, self.dtype))
    origin.assign(tf.cast(self.variable, self.dtype))

  def of_replicas(self):
    return [BiasCorrected(*parts, self._decay, self._steps)
            for parts in zip(*map(_replicas.values,
                                  (self.variable, *self.saved)))]
