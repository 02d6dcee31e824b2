"""Variables and steps of `tf.distribute` strategies."""

import contextlib

import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2
from tensorflow.python.distribute import ps_values
from tensorflow.python.distribute import values_util

from wrapopt import _bundle
from wrapopt import ops

_interim = tf.__internal__.distribute.interim


def share_steps():
  """Whether a step here is one of several replicas, which share it.

  The workers of a ParameterServerStrategy do not: each takes its own.
  """
  return tf.distribute.has_strategy() and not isinstance(
      tf.distribute.get_strategy(),
      parameter_server_strategy_v2.ParameterServerStrategyV2)


def will_have_copies():
  """Whether a replica of this strategy takes steps on variables of its own."""
  return not share_steps() or _bundle.replicas_have_copies()


def have_copies():
  """Whether the step here is that of a replica with variables of its own."""
  return not share_steps() or (
      will_have_copies() and not tf.distribute.in_cross_replica_context())


def merged(function):
  """Makes replicas of a strategy call a function once, as they share state.

  Args:
    function: The function. Replicas run that of the first replica.

  Returns:
    The function itself, if there are no replicas here. Else a function that all
    replicas call: `function` gets the values of its arguments in all replicas,
    and all get its result.
  """
  if not share_steps() or tf.distribute.in_cross_replica_context():
    return function
  return ops.not_converted(lambda *of_each: _interim.maybe_merge_call(
      lambda strategy, *values: function(*(
          x for v in values for x in strategy.experimental_local_results(v))),
      tf.distribute.get_strategy(), *of_each))


def is_shared(variable):
  """Whether workers that do not wait for each other share a variable.

  These are the variables of a ParameterServerStrategy, also outside of its
  scope.
  """
  if isinstance(variable, ps_values.AggregatingVariable):
    variable = variable.get()
  return isinstance(variable, ps_values.CachingVariable)


@contextlib.contextmanager
def near(variable):
  """Puts ops on the server of a variable that workers share."""
  if not is_shared(variable):
    yield
    return
  with ops.device_of(variable):
    yield


def unreplicated(shared):
  """The context of a step that no other replica shares.

  In that of a ParameterServerStrategy, Keras could take no step outside of
  `strategy.run` or in a `tf.cond`.

  Args:
    shared: Whether workers share the variables of the step.

  Returns:
    A context manager.
  """
  if not (shared and tf.distribute.has_strategy()):
    return contextlib.nullcontext()
  return tf.distribute.ReplicaContext(tf.distribute.get_strategy(),
                                      replica_id_in_sync_group=0)


def colocated(variable):
  """The context in which variables are made on the server of a shared one."""
  if not is_shared(variable):
    return contextlib.nullcontext()
  if not tf.distribute.has_strategy():  # Outside of the scope.
    return ops.device_of(variable)
  return tf.distribute.get_strategy().extended.colocate_vars_with(variable)


def check_single_replica(subject):
  """Raises an error if a worker has several replicas, on several GPUs."""
  replicas = tf.distribute.get_strategy().num_replicas_in_sync
  if replicas > 1:
    raise NotImplementedError(
        f"{subject} in a ParameterServerStrategy must have workers with at "
        f"most one GPU, got {replicas} replicas in each worker. Start a worker "
        "for each GPU.")


def check_alone(subject, variable):
  """Raises an error for a step that several replicas take together.

  Args:
    subject: The class of the wrapper that asks for the admission of steps.
    variable: The variable that counts them.
  """
  found = len(values(variable))
  if share_steps():
    found = max(found, tf.distribute.get_strategy().num_replicas_in_sync)
  if found > 1:
    raise NotImplementedError(
        f"{subject} must be in a ParameterServerStrategy or in threads, whose "
        "steps do not wait for each other, got a strategy with "
        f"{found} replicas that take each step together: no gradient of "
        "theirs is stale. Use the optimizer inside.")


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


def number():
  """The number of the replica whose variables `here` returns."""
  return values_util.get_current_replica_id_as_int() if share_steps() else 0


def components(pairs):
  """Splits pairs of a strategy's variables into pairs of each replica."""
  return [pair for v, s in pairs for pair in zip(values(v), values(s))]


def is_first():
  """Whether this code runs in the first replica, or for all of them."""
  return (not tf.distribute.has_strategy() or
          tf.distribute.in_cross_replica_context() or
          not values_util.get_current_replica_id_as_int())
