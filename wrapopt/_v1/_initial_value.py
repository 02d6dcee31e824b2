"""The initial value of an average in a graph: its variable's value."""

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _lazy
from wrapopt._v1 import _control_flow


def start_at_value(shadows, variable, initial_value):
  """Makes the initializers of `shadows` take the value of `variable`.

  If one run initializes both, an average gets the same value as its variable,
  even if that value is random. If a later run initializes the average alone, it
  gets the variable's value at that time. If one run initializes both for a
  second time, the average gets the old value or the new one: an edge that put
  the two in order would also run the variable's initializer whenever the
  average's runs.

  Args:
    shadows: Averages of the variable.
    variable: A variable of a graph.
    initial_value: Its initial value, in the dtype of the averages.
  """
  is_ref = ops.is_ref_variable(variable)
  cond = _control_flow.cond_of_refs if is_ref else tf.cond
  with ops.device_of(variable):
    value = cond(
        tf.compat.v1.is_variable_initialized(variable),
        lambda: tf.cast(variable.read_value(), initial_value.dtype),
        lambda: initial_value)
    for shadow in shadows:
      # Not as the initial value of a new variable: TensorFlow would replace
      # each ref variable in it by another cond, whose other branch is
      # unguarded.
      if isinstance(shadow, _lazy.LazyAverage):
        shadow.set_initial_value(value)
        continue
      if is_ref:
        initializer = tf.compat.v1.assign(
            shadow, value, validate_shape=value.shape.is_fully_defined()).op
      else:
        initializer = tf.raw_ops.AssignVariableOp(
            resource=shadow.handle, value=value)
      shadow._initializer_op = initializer
      shadow._initial_value = value
