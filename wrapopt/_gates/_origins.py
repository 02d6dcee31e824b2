"""Finds the weights that a gradient was computed from.

In a graph, these are the outputs of the ops that read the variable before the
gradient: they stay on the device of the variable. In eager mode, a record of
the step keeps the values of the variables.

A value that was read shares the buffer of its resource variable. The next step
copies the variable first.
"""

import collections
import contextlib
import weakref

import tensorflow as tf
from tensorflow.python.eager import record as tf_record

from wrapopt import ops
from wrapopt._gates import _records

tf1 = tf.compat.v1

_READ = "ReadVariableOp"
_COPY = "DeepCopy"  # Of a ref variable, in a block of `record_step`.
_GATHER = "ResourceGather"
# Ops that give a ref variable's own buffer.
_IN_PLACE = ("Identity", "RefIdentity")


def copy_of(ref, name=None):
  """A copy of a ref variable's value, which steps do not change."""
  with tf1.get_default_graph().gradient_override_map({_COPY: "Identity"}):
    return tf.raw_ops.DeepCopy(x=ref, name=name)


def is_in_place(tensor):
  """Whether a tensor is a ref variable's own buffer."""
  return not hasattr(tensor, "numpy") and (
      tensor.dtype._is_ref_dtype or tensor.op.type in _IN_PLACE and
      tensor.op.inputs[0].dtype._is_ref_dtype)


class TrainedVariables:
  """The variables that an optimizer trains. It holds none of them."""

  def __init__(self):
    self._refs = {}

  def add(self, variables):
    for v in variables:
      if id(v) not in self._refs:
        self._refs[id(v)] = weakref.ref(
            v, lambda _, i=id(v): self._refs.pop(i, None))

  def __iter__(self):
    variables = [ref() for ref in list(self._refs.values())]
    return (v for v in variables if v is not None)


class Weights:
  """In eager mode: the values of variables when a step was recorded."""

  def __init__(self, known):
    self._values = {}
    self._watcher = None
    for v in known:
      try:
        self._keep(v)
      except tf.errors.FailedPreconditionError:
        pass  # It has no value yet.

  @contextlib.contextmanager
  def of_block(self):
    """Keeps the values of the variables that a block reads, too."""
    self._watcher = tf_record.VariableWatcher()
    with self._watcher:
      yield
    for v in self._watcher.watched_variables():
      self._keep(v)
    self._watcher = None

  def _keep(self, variable):
    if id(variable) not in self._values:
      # With the variable, because another one may get its `id`.
      self._values[id(variable)] = variable, tf.raw_ops.ReadVariableOp(
          resource=variable.handle, dtype=variable.dtype)

  def get(self, variable):
    if (self._watcher is not None and
        any(v is variable for v in self._watcher.watched_variables())):
      self._keep(variable)
    return self._values.get(id(variable), (None, None))[1]


def of_values(pairs, value_of):
  """The origins of gradients in eager mode.

  Args:
    pairs: A list of (gradient, variable).
    value_of: A function of a pair that returns the weights of then, or None.

  Returns:
    {id of a variable: tensor}.
  """
  origins = {}
  for g, v in pairs:
    value = value_of(g, v)
    if value is None:
      raise _not_found(
          v, "no value of it in the record", "Read it in the block of "
          "record_step(), or name it in its argument `variables` if a "
          "tf.function reads it")
    origins[id(v)] = _rows(value, g, v)
  return origins


def in_graph(pairs):
  """The same in a graph, of the ops before the gradients."""
  reads = collections.defaultdict(list)  # By what they read.
  for op in _reads_before([t.op for g, _ in pairs for t in (
      [g.values, g.indices] if isinstance(g, tf.IndexedSlices) else [g])]):
    reads[id(_records.from_outside(op.inputs[0]))].append(op)
  origins = {}
  for g, v in pairs:
    found = reads[id(_records.from_outside(_records.graph_input(v)))]
    values = [op for op in found if op.type in (_READ, _COPY)]
    gathers = [op for op in found if op.type == _GATHER]
    if isinstance(g, tf.IndexedSlices) and gathers:
      with ops.device_of(v):
        origins[id(v)] = _gathered(g, gathers)
    elif values:
      # The first of several counts: it is the oldest.
      origins[id(v)] = _rows(values[0].outputs[0], g, v)
    elif any(op.type in _IN_PLACE for op in found):
      raise _not_found(
          v, "a ref variable that is read in place, so that its old value is "
          "lost", "Build the loss in the block of record_step(), or make the "
          "variable with use_resource=True")
    else:
      raise _not_found(
          v, "no op that reads it before its gradient, outside of loops, "
          "branches and functions", "Read it in the block of record_step()")
  return origins


def _not_found(variable, got, remedy):
  return ValueError(
      "The weights that a gradient was computed from must be known for this "
      f"`policy`, got {got}: '{variable.name}'. {remedy}; or pass them to "
      "apply_gradients as `origins`.")


def _rows(value, gradient, variable):
  """The part of a variable's value that a gradient belongs to."""
  if not isinstance(gradient, tf.IndexedSlices):
    return value
  with ops.device_of(variable):
    return tf.gather(value, gradient.indices)


def _gathered(gradient, gathers):
  """The rows of a sparse gradient, from those that ops have gathered."""
  if len(gathers) == 1 and _is_reshaped(gradient.indices,
                                        gathers[0].inputs[1]):
    return tf.reshape(gathers[0].outputs[0], tf.shape(gradient.values))
  row = tf.concat([[-1], tf.shape(gradient.values)[1:]], 0)
  rows = tf.concat([tf.reshape(op.outputs[0], row) for op in gathers], 0)
  indices = tf.concat(
      [tf.reshape(tf.cast(op.inputs[1], tf.int64), [-1]) for op in gathers], 0)
  # The first of the equal ones.
  order = tf.argsort(indices, stable=True)
  wanted = tf.cast(gradient.indices, tf.int64)
  at = tf.minimum(tf.searchsorted(tf.gather(indices, order), wanted),
                  tf.size(indices) - 1)
  position = tf.gather(order, at)
  known = tf.debugging.assert_equal(
      tf.gather(indices, position), wanted,
      "A sparse gradient must hold only rows that were read before it, got "
      "others. Pass the weights to apply_gradients as `origins`.")
  with tf.control_dependencies([] if known is None else [known]):
    return tf.gather(rows, position)


def _is_reshaped(tensor, of):
  return tensor is of or (
      tensor.op.type in ("Reshape", "Identity") and tensor.op.inputs[0] is of)


def _reads_before(targets):
  """The ops that read variables and on which `targets` depend, in order."""
  here = tf1.get_default_graph()
  ends = _records.before(targets, lambda op: (
      op.type in (*_records.RECORD_OPS, _READ, _COPY, _GATHER) or
      op.type in _IN_PLACE and op.inputs[0].dtype._is_ref_dtype))
  found = [op for op in ends if op.type not in _records.RECORD_OPS and
           _is_visible(op, here)]
  # Those of graphs outside come first.
  depth = {}
  graph = here
  while graph is not None:
    depth[graph] = len(depth)
    graph = getattr(graph, "outer_graph", None)
  return sorted(found, key=lambda op: (-depth.get(op.graph, 0), op._id))


def _is_visible(op, graph):
  """Whether an op's output may be an input of ops that are made now."""
  while graph is not None and graph is not op.graph:
    graph = getattr(graph, "outer_graph", None)
  if graph is None:
    return False
  context = op._get_control_flow_context()
  now = graph._get_control_flow_context()
  while now is not None and now is not context:
    now = now.outer_context
  return now is context
