"""The lock of steps whose ops read what other ops of the same step write.

Several workers may share an optimizer. Then such a step begins only when all
that its ops need is on their servers, and no op of it runs on the worker. So a
worker that stops holds no lock, wherever it stops: its step has not begun, or
ends without it. If it dies, TensorFlow ends the step on the servers, and its
lock with it.
"""

import contextlib

import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt._gates import _records
from wrapopt._loader import ops as _raw

tf1 = tf.compat.v1


@contextlib.contextmanager
def locked(variable, of="", first=()):
  """The context in which one step is taken at a time.

  Args:
    variable: A variable, on whose server its lock is. If workers share it, the
      ops of the step are put on servers: on that of their first input, or on
      this one.
    of: Which lock of the variable: it has one for each string.
    first: Operations that the lock waits for.

  Yields:
    None.

  Raises:
    NotImplementedError: If an op of the step must run on a worker.
  """
  with tf.control_dependencies(first), ops.device_of(variable):
    # The lock also ends with this tensor, if the worker dies. The frames of a
    # traceback would keep it.
    locked = [_raw.wrapopt_lock_steps(variable.handle, of=of)]
  in_graph = not tf.executing_eagerly()
  try:
    with (_placed(locked[0].op, variable)
          if in_graph and _replicas.is_shared(variable) else
          contextlib.nullcontext()), _records.new_stateful_ops() as new, (
              tf.control_dependencies(locked if in_graph else ())):
      yield
  except BaseException:
    locked.clear()
    raise
  with tf.control_dependencies(_records.updates(new)), ops.device_of(variable):
    _raw.wrapopt_unlock_steps(locked.pop())


@contextlib.contextmanager
def _placed(lock, near):
  """Puts the ops of the block on servers; a lock waits for their inputs.

  Args:
    lock: The op that gets the lock.
    near: A variable on the server of ops without an input on another one.
  """
  graph = tf1.get_default_graph()
  before = set(graph.get_operations())

  def place(op):
    device = next(filter(_is_server, map(_home, op.inputs)), near.device)
    return tf.DeviceSpec.from_string(device).make_merged_spec(
        tf.DeviceSpec.from_string(op.device)).to_string()

  with tf.device(None), tf1.device(place):
    yield
  # A captured tensor comes from outside of the function.
  made = [op for op in graph.get_operations()
          if op not in before and op.type != "Placeholder"]
  for op in made:
    if not op.device and _is_read(op):
      op._set_device(_home(op.inputs[0]))
    _check(op)
  lock._add_control_inputs(_arrivals(lock, made))


def _arrivals(lock, made):
  """Brings what some ops need from outside to their servers.

  Args:
    lock: The op for which they wait.
    made: The ops.

  Returns:
    Operations that run when all has arrived.
  """
  graph, inside = lock.graph, {lock, *made}
  here, waits = {}, {}
  # At its end, a function orders ops that use the same resource.
  users = {}
  for op in graph.get_operations():
    if op not in inside:
      for resource in _resources(op):
        users.setdefault(resource, []).append(op)
  with tf.control_dependencies(None):
    for op in made:
      wait = waits.setdefault(op.device, {})
      wait.update(dict.fromkeys(x for x in op.control_inputs
                                if x not in inside))
      for resource in _resources(op):
        wait.update(dict.fromkeys(users.get(resource, ())))
      for i, t in enumerate(op.inputs):
        if t.op in inside or t.dtype == tf.resource:
          continue
        if _is_server(_home(t)) and t.op.type != "Placeholder":
          wait[t.op] = None
          continue
        key = op.device, t.ref()
        if key not in here:
          with tf.device(None), tf.device(op.device):
            here[key] = tf.identity(t)
        wait[here[key].op] = None
        op._update_input(i, here[key])
    return [_marker(device, list(wait)) for device, wait in waits.items()]


def _marker(device, wait):
  """An op on a device that waits for others, and until its branch is taken.

  TensorFlow shortens what only passes control on, and orders stateful ops as
  they were made, but not those of random numbers. In a branch, it lets only
  ops that wait for nothing else wait for the branch.
  """
  def made():
    return tf.raw_ops.RandomUniform(shape=[0], dtype=tf.float32, seed=1,
                                    seed2=1).op

  with tf.device(None), tf.device(device):
    wait = [*wait, made()]
    with tf.control_dependencies(wait):
      return made()


def _resources(op):
  """The resources by which a function orders an op, or None for no resource."""
  found = [t.ref() for t in op.inputs if t.dtype == tf.resource]
  return found or ([None] if op._is_stateful else [])


def _check(op):
  """Raises an error if an op, or one of its branches, is on a worker."""
  # TensorFlow places reads with their variables.
  if not (_is_server(op.device) or not op.device and _is_read(op)):
    raise NotImplementedError(
        "All ops of a step that several workers share must be on servers, so "
        f"that a worker that stops does not stop the others, got '{op.name}' "
        f"of type {op.type} on '{op.device}'. Remove tf.device() from the "
        "code of the optimizer and of constraints.")
  for name in ("then_branch", "else_branch", "cond", "body"):
    if name in op.node_def.attr:
      branch = op.graph._get_function(op.node_def.attr[name].func.name)
      for inner in branch.graph.get_operations():
        if inner.type != "Placeholder":
          _check(inner)


def _is_read(op):
  return op.type in ("ReadVariableOp", "ResourceGather")


def _home(tensor):
  """The device of a tensor, also if it comes from outside of a function."""
  outside = _records.from_outside(tensor)
  if not hasattr(outside, "numpy") and _is_read(outside.op):
    return _home(outside.op.inputs[0])
  return outside.device


def _is_server(device):
  return tf.DeviceSpec.from_string(device or "").job == "ps"
