"""How an op becomes part of a program: its device, attributes and result."""

import contextlib

import tensorflow as tf

from wrapopt._loader import ops as _raw
from wrapopt.ops import _variables

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


def note_refs(op, variable, **variables):
  """Places an op on ref variables, and stores their names for its errors.

  Args:
    op: The op.
    variable: One on whose device the op is to run.
    **variables: {input of refs: a variable, or a list of variables}.
  """
  # TensorFlow colocates an op with its ref inputs, but counts its arguments as
  # if none were a list: it may take a tensor for a variable.
  op._clear_attr("_class")
  op._set_device(variable.device)
  # The inputs have these names too, but not in a `tf.cond` of control flow v1.
  names = [v.op.name.encode() for arg in op.op_def.input_arg if arg.is_ref
           for v in _listed(variables[arg.name])]
  value = tf.compat.v1.AttrValue()
  value.list.s.extend(names)
  op._set_attr("_variables", value)


def of_variables(op_name, variables, **arguments):
  """Emits an op of variables, or its twin of ref variables.

  Args:
    op_name: The name of the op, as in "ema_update".
    variables: {input: a variable, or a list of variables or of handles}, all
      ref variables or none.
    **arguments: The others.

  Returns:
    As the raw op.
  """
  first, *_ = _listed(next(iter(variables.values())))
  given = {key: [_variables.handle_or_ref(v) for v in x]
                if isinstance(x, list) else _variables.handle_or_ref(x)
           for key, x in variables.items()}
  if not isinstance(first, tf.Variable) or not _variables.is_ref(first):
    return getattr(_raw, f"wrapopt_{op_name}")(**given, **arguments)
  made = getattr(_raw, f"wrapopt_{op_name}_ref")(**given, **arguments)
  op = tf.nest.flatten(made)[0]
  note_refs(op if isinstance(op, tf.Operation) else op.op, first, **variables)
  return made


def _listed(x):
  return x if isinstance(x, list) else [x]


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
