"""Handles of many variables as one tensor.

What a tf.function or an op of eager mode takes, it takes at a price: a function
some 2 us for each tensor that it captures, in every call, and an optimizer that
keeps averages has several variables for each one that it trains. So the ops
that update them take one tensor that holds all their handles.

TensorFlow runs the ops of a function in program order if they take the same
handle. Here it is told which handles a bundle stands for.
"""

import os
import re

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.saved_model import save_context

from wrapopt._loader import ops as _raw

EagerTensor = tf_ops.EagerTensor


def allowed():
  """Whether an op may take a bundle where it is being built: a bool.

  Not in a graph of TensorFlow 1, whose variables have no handle before a
  session runs. Not where XLA is to compile the op: it must see each variable. Not in a
  function that is saved, for the program that loads it has other variables. Not
  in a strategy, where a variable may be several.
  """
  if tf.executing_eagerly():
    return not tf.distribute.has_strategy()
  graph = tf.compat.v1.get_default_graph()
  return (isinstance(graph, func_graph.FuncGraph) and
          tf.compat.v1.executing_eagerly_outside_functions() and
          not control_flow_util.GraphOrParentsInXlaContext(graph) and
          not save_context.in_save_context() and
          not tf.distribute.has_strategy() and
          not _autoclusters(graph))


def _autoclusters(graph):
  """Whether XLA may choose the ops of a graph that it compiles."""
  scope = graph._attr_scope_map.get("_XlaCompile")  # Of jit_scope().
  if scope is not None:
    return callable(scope) or scope.b
  flag = re.search(r"--tf_xla_auto_jit=(\S+)",
                   os.environ.get("TF_XLA_FLAGS", ""))
  return (bool(flag) and flag[1] not in ("-1", "0") or
          bool(tf.config.optimizer.get_jit()))


def make(handles, device):
  """A bundle.

  Args:
    handles: Handles of resource variables that are on one device.
    device: The device.

  Returns:
    A tensor, or None if the variables are on another machine, or there is a
    handle whose variable is not known before the function runs, such as that of
    an argument.
  """
  if (tf.DeviceSpec.from_string(device or "").job not in (None, "localhost") or
      not all(type(handle) is EagerTensor for handle in handles)):
    return None
  with tf.init_scope(), tf.device(None), tf.device(device):
    bundle = _raw.wrapopt_bundle(handles)
  bundle._wrapopt_handles = handles
  if not tf.executing_eagerly():
    # Functions that are traced in those that XLA compiles are to take handles.
    control_flow_ops.XLAControlFlowContext.RequiresUniqueFunctionRetracing = (
        lambda self: True)
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, func_graph.FuncGraph):
      graph.mark_as_unsaveable(_NOT_SAVED)
      graph = graph.outer_graph
  return bundle


_NOT_SAVED = (
    "It holds the state of an optimizer as one tensor. Save the tf.function, "
    "not a concrete function of it: then it is traced once more, for that.")
_NOT_COMPILED = (
    "A function that takes the step of an optimizer of wrapopt must be traced "
    "where it is compiled: in a function with jit_compile=True, call the "
    "tf.function, not a concrete function of it.")


@auto_control_deps.register_acd_resource_resolver
def _wrapopt_bundle_resolver(op, reads, writes):
  """Adds to what an op writes that for which its bundles stand.

  Args:
    op: An op of a function that is being built.
    reads: The resource tensors that it reads.
    writes: Those that it may change, to which others are added.

  Returns:
    Whether any was added.
  """
  # The handle of a variable is a scalar.
  vectors = [t for t in writes if t.shape.rank == 1]
  if not vectors:
    return False
  captures = getattr(op.graph, "captures", ())
  inside = {id(outer): inner for outer, inner in captures}
  stand_for = {}  # {id of a bundle in the graph: ids of captured handles}
  for outer, inner in captures:
    if inner.dtype == tf.resource and inner.shape.rank == 1:
      handles = getattr(_source(outer), "_wrapopt_handles", None)
      if handles is not None:
        stand_for[id(inner)] = inner, set(map(id, handles))
  if stand_for and control_flow_util.GraphOrParentsInXlaContext(op.graph):
    raise NotImplementedError(_NOT_COMPILED)
  before = len(writes)
  for vector in vectors:
    _, handles = stand_for.get(id(vector), (None, ()))
    writes.update(inside[h] for h in handles if h in inside)
    # Others that share a variable, which nothing else in the graph may take.
    writes.update(other for other, shared in stand_for.values()
                  if not shared.isdisjoint(handles))
  return len(writes) > before


def _source(tensor):
  """The tensor that the outermost function captures."""
  while type(tensor) is not EagerTensor:
    tensor = next((outer for outer, inner in getattr(
        tensor.graph, "captures", ()) if inner is tensor), None)
    if tensor is None:
      return None
  return tensor
