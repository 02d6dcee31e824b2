"""The initial value of an average in a graph: its variable's value."""

import functools

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt._v1._graphs import _control_flow


def initializer_of(variable):
  """The operation that initializes a variable.

  `variable.initializer` is a tensor or a variable's new value if
  `tf.compat.v1.train.init_from_checkpoint` or `warm_start` has replaced it.
  """
  initializer = variable.initializer
  return getattr(initializer, "op", initializer)


def assigned(variable, whole=None):
  """The tensor that the initializer of a variable assigns.

  Args:
    variable: A variable of a graph. Its `initial_value` may be another one:
      `warm_start` with a vocabulary replaces only the initializer.
    whole: The variable of a strategy that it is a component of.

  Raises:
    NotImplementedError: If it is not known.
  """
  inputs = initializer_of(variable).inputs
  value = inputs[1] if len(inputs) > 1 else None
  if getattr(whole, "_initializer_op", None) is not None and (
      isinstance(whole, tf.distribute.DistributedValues)):
    # It initializes all components.
    value = vars(whole).get("_initial_value")
  if value is None:
    raise NotImplementedError(
        f"The initializer of '{variable.name}' must be one of TensorFlow's "
        "that assigns a tensor, got "
        f"{(variable if whole is None else whole).initializer!r}, of which no "
        "average can start. Replace the initializer after the first call of "
        "minimize(), and call seed_averages() when the session has "
        "initialized the variables.")
  # TensorFlow knows no shape of what it reads from a file.
  value.set_shape(variable.shape)
  return value


def start_at_value(shadows, variable):
  """Makes the initializers of `shadows` take the value of `variable`.

  If one run initializes both, an average gets the same value as its variable,
  even if that value is random. If a later run initializes the average alone, it
  gets the variable's value at that time. If one run initializes both for a
  second time, the average gets the old value or the new one: an edge that put
  the two in order would also run the variable's initializer whenever the
  average's runs.

  The initializer of the variable may be replaced later. The averages follow it
  until their own initializers are taken.

  Args:
    shadows: Averages of the variable, of one dtype.
    variable: A variable of a graph.
  """
  for parts in zip(_replicas.values(variable),
                   *map(_replicas.values, shadows)):
    _start_at_value(*parts, whole=variable)


def _start_at_value(variable, *shadows, whole):
  value, initializers = None, []

  def start():
    nonlocal value, initializers
    graph = variable.graph
    if not (initializers and graph.finalized):
      now = assigned(variable, whole)
      if now is not value:
        with graph.as_default(), tf.init_scope():
          initializers = _initializers(shadows, variable, now)
        value = now
    return initializers

  start()
  for i, shadow in enumerate(shadows):
    shadow.__class__ = _following(type(shadow))
    shadow._start = lambda i=i: start()[i]


@functools.cache
def _following(cls):
  """A class of variables whose initializer is made when it is asked for."""

  class Following(cls):

    @property
    def _initializer_op(self):
      return self._start()

    @_initializer_op.setter
    def _initializer_op(self, initializer):
      # An initializer of the average's own, such as `init_from_checkpoint`'s.
      self._start = lambda: initializer

  Following.__name__, Following.__qualname__ = cls.__name__, cls.__qualname__
  return Following


def _initializers(shadows, variable, initial_value):
  """The initializers of averages: a list of operations."""
  is_ref = ops.is_ref_variable(variable)
  cond = _control_flow.cond_of_refs if is_ref else tf.cond
  with ops.device_of(variable):
    dtype = shadows[0].dtype.base_dtype
    initial_value = tf.cast(initial_value, dtype)
    value = cond(
        tf.compat.v1.is_variable_initialized(variable),
        lambda: tf.cast(variable.read_value(), dtype),
        lambda: initial_value)
    # Not as the initial value of a new variable: TensorFlow would replace each
    # ref variable in it by another cond, whose other branch is unguarded.
    return [_initializer(shadow, value, is_ref) for shadow in shadows]


def _initializer(shadow, value, is_ref):
  if isinstance(shadow, _lazy.LazyAverage):
    return shadow._assign(value)
  shadow._initial_value = value
  if is_ref:
    return tf.compat.v1.assign(
        shadow, value, validate_shape=value.shape.is_fully_defined()).op
  return tf.raw_ops.AssignVariableOp(resource=shadow.handle, value=value)
