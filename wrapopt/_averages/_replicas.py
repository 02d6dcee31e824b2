"""The components of variables of `tf.distribute` strategies."""

import tensorflow as tf
from tensorflow.python.distribute import ps_values
from tensorflow.python.distribute import values_util


def values(variable):
  """The component variables of a strategy's variable; else [variable]."""
  if isinstance(variable, tf.distribute.DistributedValues):
    return list(variable.values)
  if isinstance(variable, ps_values.AggregatingVariable):
    return [variable.get()]
  if hasattr(variable, "of_replicas"):  # An average that no variable holds.
    return variable.of_replicas()
  return [variable]


def here(variable):
  """The component of a strategy's variable where an update or replica runs."""
  components_ = values(variable)
  if len(components_) == 1:
    return components_[0]
  return components_[values_util.get_current_replica_id_as_int()]


def components(pairs):
  """Splits pairs of a strategy's variables into pairs of each replica."""
  return [pair for v, s in pairs for pair in zip(values(v), values(s))]


def is_first():
  """Whether this code runs in the first replica, or for all of them."""
  return (not tf.distribute.has_strategy() or
          tf.distribute.in_cross_replica_context() or
          not values_util.get_current_replica_id_as_int())
