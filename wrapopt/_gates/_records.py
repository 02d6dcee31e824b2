"""Finds recorded steps and updates in graphs, and orders ops around them."""

import contextlib

import tensorflow as tf

from wrapopt import ops

tf1 = tf.compat.v1

RECORD_OPS = ("Wrapopt>StalenessRecord", "Wrapopt>StalenessRecordRef")
# Stateful ops that change nothing.
_READS = ("ReadVariableOp", "ResourceGather", "VarHandleOp",
          "Wrapopt>LockSteps")
# Ops by which a tensor enters a branch or loop of control flow version 1.
_ENTRANCES = ("Switch", "RefSwitch", "Enter", "RefEnter")


def graph_of(tensor):
  return None if hasattr(tensor, "numpy") else tensor.graph


def tensor_of(gradient):
  return (gradient.values if isinstance(gradient, tf.IndexedSlices)
          else gradient)


def graph_input(step):
  """The tensor that is the input of ops on a step variable."""
  return step.handle if hasattr(step, "handle") else step._ref()


def from_outside(tensor):
  """The tensor outside all branches, loops and functions that `tensor` is."""
  while not hasattr(tensor, "numpy"):  # An eager tensor is outside.
    if tensor.op.type in _ENTRANCES:
      tensor = tensor.op.inputs[0]
      continue
    outside = _captured(tensor)
    if outside is None:
      break
    tensor = outside
  return tensor


def _captured(tensor):
  """The tensor that a placeholder of a function's graph captures, or None."""
  if tensor.op.type != "Placeholder":
    return None
  for outside, inside in getattr(tensor.graph, "captures", ()):
    if inside is tensor:
      return outside
  return None


def records_before(targets):
  """Ops that record a step and on which `targets` depend, in order."""
  return sorted(before(targets, lambda op: op.type in RECORD_OPS),
                key=lambda op: op._id)


def before(targets, is_end):
  """Ops for which `is_end`, and from which ways of others lead to targets."""
  seen, pending = set(), list(targets)
  while pending:
    op = pending.pop()
    if op in seen:
      continue
    seen.add(op)
    if is_end(op):
      yield op
      continue
    pending += [t.op for t in op.inputs] + list(op.control_inputs)
    outside = _captured(op.outputs[0]) if op.type == "Placeholder" else None
    if not (outside is None or hasattr(outside, "numpy")):
      pending.append(outside.op)


@contextlib.contextmanager
def reads_after(recorded, read=tf.identity):
  """Makes the reads of variables in the block run after `recorded`.

  Args:
    recorded: The record.
    read: A function of a ref and a name: how ref variables are read.

  Yields:
    None.
  """
  if tf.executing_eagerly():
    yield
    return
  refs = [v for v in {v.ref(): v for v in (*tf1.global_variables(),
                                           *tf1.local_variables(),
                                           *tf1.trainable_variables())
                      if isinstance(v, tf.Variable)
                      and ops.is_ref_variable(v)}.values()]
  # A ref variable converts to a tensor that was made with the variable.
  before = [v._snapshot for v in refs]
  with tf.control_dependencies([recorded.op]):
    for v in refs:
      with ops.device_of(v):
        v._snapshot = read(v._ref(), name=v.op.name + "/read")
    try:
      yield
    finally:
      for v, snapshot in zip(refs, before):
        v._snapshot = snapshot


def when_ready(gradients):
  """An operation on the device of the gradients that waits for all of them."""
  if tf.executing_eagerly():
    return []
  with tf.device(None), tf.device(gradients[0].device):
    return [tf.group(*[tensor_of(g) for g in gradients])]


def at_servers(gradients, variables, near):
  """Sends gradients to the servers of their variables.

  Args:
    gradients: Tensors, `tf.IndexedSlices` or None.
    variables: Their tf.Variables, which workers share.
    near: One of them, or another one.

  Returns:
    The gradients there, and the operations, on the server of `near`, that wait
    until all have arrived. In eager mode the gradients as they are.
  """
  if tf.executing_eagerly():
    return gradients, []
  there = []
  for g, v in zip(gradients, variables):
    with ops.device_of(v):
      there.append(g if g is None else tf.nest.map_structure(
          tf.identity, g, expand_composites=True))
  with ops.device_of(near):
    return there, [tf.group(*tf.nest.flatten(
        [g for g in there if g is not None], expand_composites=True))]


@contextlib.contextmanager
def new_stateful_ops():
  """Yields a list; adds the stateful ops that a tf.function makes in the block.

  In a tf.function an update returns no operation to wait for. TensorFlow orders
  ops that share a resource, but a gate shares none with the weights.
  """
  new = []
  if (tf.executing_eagerly() or
      not tf1.executing_eagerly_outside_functions()):
    yield new
    return
  graph = tf1.get_default_graph()
  before = len(graph.get_operations())
  yield new
  new += [op for op in graph.get_operations()[before:]
          if op._is_stateful and op.type != "Placeholder"]


def updates(operations):
  """Operations that wait for the updates among others, one on each device."""
  by_device = {}
  for op in operations:
    if op.type not in _READS:
      by_device.setdefault(op.device, []).append(op)
  with tf.device(None):
    return [tf.group(*members) for members in by_device.values()]
