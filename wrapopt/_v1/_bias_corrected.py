"""The base class of the optimizer whose averages may be those of a BEMA."""

import functools

import tensorflow as tf

from wrapopt._averages import _bias_corrected
from wrapopt._averages import _decays
from wrapopt._averages import _replicas
from wrapopt._v1 import _averaging
from wrapopt._v1 import _slots


class BiasCorrectingOptimizer(_averaging.AveragingOptimizer):
  """A wrapper some of whose averages follow from several variables."""

  def __init__(self, opt, name, decays, *args):
    """Wraps an optimizer.

    Args:
      opt: The inner optimizer.
      name: The name of this one.
      decays: The result of `_decays.checked`.
      *args: Further arguments of `AveragingOptimizer`.
    """
    super().__init__(opt, name, _decays.with_origins(decays), *args)
    self._public_decays = decays
    _decays.check_update_every(decays, self._update_every)

  def _index_of(self, decay):
    return _decays.index_of(decay, self._public_decays)

  def _is_derived(self, variable, k):
    # A variance that is corrected could be negative.
    return _decays.is_derived(self._decays[k]) and variable.trainable

  def _pairs_of(self, variables, k):
    pairs, decay = super()._pairs_of(variables, k), self._decays[k]
    if not _decays.is_derived(decay):
      return pairs
    origins = super()._pairs_of(
        variables, _decays.place_of_origin(decay, self._decays))
    # One function for all: they are read together.
    steps = functools.partial(
        self._steps_now, _slots.graph_of(pairs[0][0]) if pairs else None)
    return [(v, _bias_corrected.BiasCorrected(v, s, origin, decay, steps)
             if self._is_derived(v, k) else s)
            for (v, s), (_, origin) in zip(pairs, origins)]

  def _steps_now(self, graph):
    """The number of steps of the averages of a graph now: a tensor."""
    return _replicas.values(self._steps_of(graph))[0].read_value()

  def _derived_beside(self, variables, k):
    return [s for j in range(len(self._public_decays)) if j != k
            for v, s in self._pairs_of(variables, j) if self._is_derived(v, j)]

  def _make_average(self, variable, is_sparse):
    super()._make_average(variable, is_sparse)
    if not tf.executing_eagerly():
      for k in range(len(self._public_decays)):
        if self._is_derived(variable, k):
          [(_, average)] = self._pairs_of([variable], k)
          for part in average.of_replicas():
            part.make_element()
