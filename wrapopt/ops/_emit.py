"""How an op becomes part of a program: its device, attributes and result."""

import contextlib

import tensorflow as tf

# AutoGraph would rewrite the loops over variables, whose number is known. That
# takes longer than the rest of the tracing of a function.
not_converted = tf.autograph.experimental.do_not_convert


@contextlib.contextmanager
def device_of(variable):
  """Puts ops on the device of a variable, whatever tf.device() is in force."""
  with tf.device(None), tf.device(variable.device):
    yield


def host_device(device):
  """The host of a device, where an op on the device reads its scalars."""
  device = tf.DeviceSpec.from_string(device or "")
  if device.device_type in (None, "GPU"):
    device = device.replace(device_type="CPU", device_index=0)
  return device.to_string()


@contextlib.contextmanager
def host_of(variable):
  """Puts ops on the host of a variable's device."""
  with tf.device(None), tf.device(host_device(variable.device)):
    yield


def place_with(op, variable):
  """Pins an op on ref variables to the device of its variables.

  TensorFlow colocates an op with its ref inputs, but counts its arguments as if
  none were a list: it may take a tensor for a variable.

  Args:
    op: The op.
    variable: One of its variables.
  """
  op._clear_attr("_class")
  op._set_device(variable.device)


def set_variable_names(op, **variables):
  """Stores the names of an op's ref variables in the op, for its errors.

  The inputs of the op have these names too, but not in a `tf.cond` of control
  flow v1.

  Args:
    op: The op.
    **variables: The variables of each of its arguments.

  Returns:
    `op`.
  """
  names = [v.op.name.encode() for arg in op.op_def.input_arg if arg.is_ref
           for v in variables[arg.name]]
  value = tf.compat.v1.AttrValue()
  value.list.s.extend(names)
  op._set_attr("_variables", value)
  return op


def compiled_where(allowed):
  """Says whether autoclustering may compile the ops that are made inside.

  A step that is not accepted may have gradients of any shape. A program for one
  shape would refuse them. An op that takes a bundle does not show XLA its
  variables.

  Args:
    allowed: A bool.

  Returns:
    A context manager.
  """
  if allowed or tf.executing_eagerly():
    return contextlib.nullcontext()
  return tf.xla.experimental.jit_scope(compile_ops=False)


def result(operations):
  """The result of a function over ops that have no outputs."""
  # A `tf.function` runs such an op, and must not return its tf.Operation. A
  # graph of TensorFlow 1 needs the tf.Operation to run it.
  if tf.compat.v1.executing_eagerly_outside_functions():
    return None
  if len(operations) == 1:
    return operations[0]
  with tf.device(None):
    return tf.group(*operations)
