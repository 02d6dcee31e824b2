"""The variables behind those of `tf.distribute` strategies."""

import tensorflow as tf
from tensorflow.python.distribute import ps_values


def values(variable):
  """The variables behind that of a strategy; of any other, itself: a list."""
  if isinstance(variable, tf.distribute.DistributedValues):
    return list(variable.values)
  if isinstance(variable, ps_values.AggregatingVariable):
    return [variable.get()]
  return [variable]


def components(pairs):
  """Pairs of a strategy's variables as those of each of its replicas."""
  return [pair for v, s in pairs for pair in zip(values(v), values(s))]
