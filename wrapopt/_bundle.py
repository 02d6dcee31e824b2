"""Handles of many variables as one tensor.

Each tensor that a tf.function captures costs some 2 us in every call, each
handle in a session some 0.5 us, and an optimizer with averages has several
variables for each trained one. So the ops that update them take one tensor, a
bundle, that holds all their handles.

TensorFlow runs the ops of a function in program order if they take the same
handle. This module tells TensorFlow which handles a bundle holds.
"""

import contextlib
import os
import re

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.distribute import one_device_strategy
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.saved_model import save_context

from wrapopt._loader import ops as _raw

EagerTensor = tf_ops.EagerTensor

# Those of MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy.
_WITH_COPIES = (mirrored_strategy.MirroredExtended,
                one_device_strategy.OneDeviceExtended)
# The graphs of branches and loops.
_OF_CONTROL_FLOW = (control_flow_v2_func_graphs.CondBranchFuncGraph,
                    control_flow_v2_func_graphs.WhileBodyFuncGraph)


def replicas_have_copies():
  """Whether the replicas of the current strategy have their own variables.

  Without a strategy, they do. The replicas of a CentralStorageStrategy share
  variables, and those of a TPUStrategy are one program.
  """
  return not tf.distribute.has_strategy() or isinstance(
      tf.distribute.get_strategy().extended, _WITH_COPIES)


def allowed():
  """Whether an op may take a bundle in the current context: a bool.

  It may not:

  *   if XLA is to compile the op: XLA must see each variable;
  *   in a function that is saved: a program that loads it has other variables;
  *   in a strategy, in which a variable may consist of several. In a function,
      each replica may have its own bundle if it has its own variables.
  """
  if tf.executing_eagerly():
    return not tf.distribute.has_strategy()
  graph = tf.compat.v1.get_default_graph()
  if (control_flow_util.GraphOrParentsInXlaContext(graph) or
      _autoclusters(graph)):
    return False
  if _is_plain(graph):
    return not tf.distribute.has_strategy()
  return (isinstance(graph, func_graph.FuncGraph) and
          tf.compat.v1.executing_eagerly_outside_functions() and
          not save_context.in_save_context() and
          replicas_have_copies())


def _is_plain(graph):
  """Whether a graph is one for sessions, and not that of a function."""
  return type(graph) is tf.Graph


def _autoclusters(graph):
  """Whether XLA may choose to compile ops of a graph.

  It may be switched on later or by a session. So ops that take a bundle say
  that XLA must not compile them. TensorFlow makes other ops of the bundles that
  enter a `tf.cond` or `tf.while_loop`, which do not say so.
  """
  scope = graph._attr_scope_map.get("_XlaCompile")  # Of jit_scope().
  if scope is not None:
    return callable(scope) or scope.b
  flags = _xla_flags()
  level = re.findall(r"--tf_xla_auto_jit=(\S+)", flags)[-1:]
  return (level not in ([], ["-1"], ["0"]) or
          bool(tf.config.optimizer.get_jit()) or
          "--tf_xla_cpu_global_jit" in flags and _is_in_control_flow(graph))


def _is_in_control_flow(graph):
  """Whether a graph is that of a branch or loop of control flow v2."""
  while isinstance(graph, func_graph.FuncGraph):
    if isinstance(graph, _OF_CONTROL_FLOW):
      return True
    graph = graph.outer_graph
  return False


def _xla_flags():
  """The text of TF_XLA_FLAGS or of the file that it names."""
  flags = os.environ.get("TF_XLA_FLAGS", "")
  if flags.lstrip().startswith("-"):
    return flags
  try:
    with open(flags, encoding="utf-8", errors="replace") as file:
      return file.read()
  except OSError:
    return ""  # TensorFlow reads no flags, too.


def make(handles, device):
  """Makes a bundle.

  Args:
    handles: Handles of resource variables on one device.
    device: The device.

  Returns:
    A tensor, or None if a function's variables are on another machine, or the
    variable of a handle is not known before the program runs, such as that of
    an argument.
  """
  if not tf.executing_eagerly() and _is_plain(
      tf.compat.v1.get_default_graph()):
    return _by_name(handles, device)
  if (tf.DeviceSpec.from_string(device or "").job not in (None, "localhost") or
      not all(type(handle) is EagerTensor for handle in handles)):
    return None
  with tf.init_scope(), tf.device(None), tf.device(device):
    bundle = _raw.wrapopt_bundle(handles)
  bundle._wrapopt_handles = handles
  if not tf.executing_eagerly():
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, func_graph.FuncGraph):
      graph.mark_as_unsaveable(_NOT_SAVED)
      graph = graph.outer_graph
  return bundle


def _by_name(handles, device):
  """`make` in a graph for sessions."""
  if not all(_has_name(handle) for handle in handles):
    return None
  ops = [handle.op for handle in handles]
  with tf.control_dependencies(None), tf.device(None), tf.device(device):
    bundle = _raw.wrapopt_bundle_by_name(
        containers=[op.get_attr("container") for op in ops],
        shared_names=[op.get_attr("shared_name") for op in ops],
        dtypes=[op.get_attr("dtype") for op in ops],
        shapes=[op.get_attr("shape") for op in ops])
  # As edges from the ops do, keeps all on one device where none is given.
  places = tf.compat.v1.AttrValue()
  places.list.s.extend(b"loc:@" + op.name.encode() for op in ops)
  bundle.op._set_attr("_class", places)
  bundle.graph.add_to_collection(_BY_NAME, bundle.op)
  return bundle


# The collection of the BundleByName ops of a graph.
_BY_NAME = "wrapopt_bundles"


def _to_proto(op, export_scope=None):
  """What a MetaGraphDef says of a BundleByName: the ops of its variables."""
  names = [op.name, *(group.decode().removeprefix("loc:@")
                      for group in op.colocation_groups())]
  if export_scope and not all(
      name.startswith(f"{export_scope}/") for name in names):
    return None
  name, *inputs = (tf_ops.strip_name_scope(n, export_scope) for n in names)
  return tf.compat.v1.NodeDef(name=name, input=inputs)


def _from_proto(proto, import_scope=None):
  """The bundle in the graph that imports it.

  TensorFlow 2 imports a graph as a function, and then replaces each variable
  by one that has no name. There the bundle takes the handles themselves.
  """
  graph = tf.compat.v1.get_default_graph()
  op, *variables = (
      graph.get_operation_by_name(tf_ops.prepend_name_scope(n, import_scope))
      for n in (proto.name, *proto.input))
  if not isinstance(graph, func_graph.FuncGraph):
    return op
  [by_name] = op.outputs
  with tf.control_dependencies(None), tf.device(None), tf.device(op.device):
    bundle = _raw.wrapopt_bundle([v.outputs[0] for v in variables])
  for user in by_name.consumers():
    for i, tensor in enumerate(user.inputs):
      if tensor is by_name:
        user._update_input(i, bundle)
  return bundle.op


# Once in a process, also if this module is imported again.
with contextlib.suppress(KeyError):
  tf_ops.register_proto_function(_BY_NAME, tf.compat.v1.NodeDef, _to_proto,
                                 _from_proto)


def _has_name(handle):
  """Whether the name of a graph's variable tells which variable it is."""
  return (type(handle) is not EagerTensor and
          handle.op.type == "VarHandleOp" and
          handle.op.get_attr("shared_name").decode() not in
          ("", context.anonymous_name()))


_NOT_SAVED = (
    "The concrete function holds the state of an optimizer as one tensor. Save "
    "the tf.function, which is then traced again.")
_NOT_COMPILED = (
    "A function with an optimizer step of wrapopt must be traced inside the "
    "function with jit_compile=True that calls it, got one that was traced "
    "before without XLA. Call its python_function instead.")


def _wrapopt_bundle_resolver(op, reads, writes):
  """Adds the handles of an op's bundles to the resources that the op writes.

  Args:
    op: An op of a function that is being built.
    reads: The resource tensors that the op reads.
    writes: The resource tensors that the op may write. Handles are added to it.

  Returns:
    Whether any handle was added.
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
    # Other bundles with a common variable, whose handle the graph may lack.
    writes.update(other for other, shared in stand_for.values()
                  if not shared.isdisjoint(handles))
  return len(writes) > before


# Once in a process, also if this module is imported again. What it reads of a
# bundle are attributes of tensors.
with contextlib.suppress(KeyError):
  auto_control_deps.register_acd_resource_resolver(_wrapopt_bundle_resolver)


def _source(tensor):
  """The tensor that the outermost function captures."""
  while type(tensor) is not EagerTensor:
    tensor = next((outer for outer, inner in getattr(
        tensor.graph, "captures", ()) if inner is tensor), None)
    if tensor is None:
      return None
  return tensor
