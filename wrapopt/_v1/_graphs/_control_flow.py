"""Branches that may hold ref variables, and reach other tasks."""

import tensorflow as tf
from tensorflow.python.ops import cond_v2
from tensorflow.python.ops import control_flow_ops
from tensorflow.python.ops import control_flow_util

from wrapopt import ops

tf1 = tf.compat.v1


class ByName:
  """A ref variable of a graph, for `seldom`: each use finds it by its name.

  A function captures the value of a ref variable, not the variable.
  """

  def __init__(self, variable):
    self.dtype, self._op = variable.dtype.base_dtype, variable.op

  def _variable(self):
    op = self._op
    return tf.raw_ops.VariableV2(
        shape=op.get_attr("shape"), dtype=self.dtype,
        container=op.get_attr("container"),
        # The name is that of the op by default.
        shared_name=op.get_attr("shared_name") or op.name)

  def read_value(self):
    return tf.identity(self._variable())

  def assign(self, value, read_value):
    del read_value
    return tf.raw_ops.Assign(
        ref=self._variable(), value=tf.convert_to_tensor(value, self.dtype)).op


def in_seldom(variable):
  """A variable of a graph, for the branches of `seldom`."""
  # TensorFlow 2 gives variables of a V1 SavedModel to functions that capture
  # them, and no names.
  return ByName(variable) if ops.is_ref_variable(variable) else variable


def may_be_seldom(variables):
  """Whether the branches of `seldom` may use variables."""
  graph = tf1.get_default_graph()
  return (type(graph) is tf.Graph and not tf.distribute.has_strategy() and
          not control_flow_util.GraphOrParentsInXlaContext(graph) and
          len({v.device for v in variables}) == 1 and
          all(v.op.type in ("VarHandleOp", "VariableV2") for v in variables))


def seldom(variables):
  """A `tf.cond` of a branch that is seldom taken, in a graph for sessions.

  Else, each variable that a branch uses costs nodes in every step, also in
  those that do not take it. Here, a branch is a function that runs only if it
  is taken.

  Args:
    variables: Those that the branches use, as `in_seldom`; see `may_be_seldom`.

  Returns:
    A function with the arguments of `tf.cond`.
  """
  def called(pred, taken, skipped):
    if type(tf1.get_default_graph()) is not tf.Graph:  # Inside a branch.
      return tf.cond(pred, taken, skipped)
    with ops.device_of(variables[0]):
      result = cond_v2.cond_v2(pred, taken, skipped, "seldom")
    op = result.op
    while op.type == "Identity":
      op = op.inputs[0].op
    for name in "_lower_using_switch_merge", "_XlaCompile":
      op._set_attr(name, tf1.AttrValue(b=False))
    # On the device of the variables, where none is given.
    places = tf1.AttrValue()
    places.list.s.extend(b"loc:@" + v.op.name.encode() for v in variables)
    op._set_attr("_class", places)
    return result

  return called


def cond(accept, step, has_refs):
  """Runs `step` if `accept` is true.

  Args:
    accept: A scalar bool tensor.
    step: A function that returns an operation, a tensor or None.
    has_refs: Whether it updates ref variables.

  Returns:
    A tensor that is computed after the step was taken or skipped; in eager
    mode, None.
  """
  if tf.executing_eagerly():
    if accept:
      step()
    return None

  def taken():
    done = step()
    if done is None:
      return tf.constant(True)
    with tf.control_dependencies([done]):
      return tf.identity(True)

  either = cond_of_refs if has_refs else tf.cond
  return either(accept, taken, lambda: tf.constant(False))


def cond_of_refs(pred, taken, skipped):
  """`tf.cond` in a graph, with branches that may hold ref variables.

  A branch of control flow v2 is a function, which captures the value of a ref
  variable, not the variable. So the branches are parts of the graph, as in
  control flow v1. `tf.cond` makes such branches only if control flow v2 is
  disabled for the whole process, in which other threads may build graphs too.

  Args:
    pred: A scalar bool tensor.
    taken: A function that returns a tensor, for `pred` true.
    skipped: A function that returns a tensor of the same dtype, for `pred`
      false.

  Returns:
    A tensor.
  """
  if tf1.get_default_graph().building_function:
    # A function cannot capture ref variables.
    return tf.cond(pred, taken, skipped)
  with tf.name_scope("cond"):
    if_true, if_false = branch(pred)
    pred = tf.identity(pred, name="pred_id")
    if_false = _result(pred, if_false, 0, skipped)
    return join(_result(pred, if_true, 1, taken), if_false)


def branch(pred):
  """Two tensors, of which only one is live in a step.

  An op runs if all that it depends on is live. The other way to a branch,
  `tf.cond`, makes functions: each variable that they capture costs nodes in
  every step.

  Args:
    pred: A scalar bool tensor.

  Returns:
    (taken, skipped). Ops that depend on `taken`, if only by a control
    dependency, run if `pred` is true. Ops that depend on `skipped` run if it is
    false.
  """
  skipped, taken = tf.raw_ops.Switch(data=pred, pred=pred)
  # A control dependency on a Switch would always be met.
  return (tf.identity(taken, name="switch_t"),
          tf.identity(skipped, name="switch_f"))


def join(taken, skipped):
  """The live one of two tensors."""
  return tf.raw_ops.Merge(inputs=[skipped, taken])[0]


def _result(pred, pivot, number, function):
  """The result of `function`, which runs if `pred` is `number` (0 or 1)."""
  context = control_flow_ops.CondContext(pred, pivot, branch=number)
  context.Enter()
  try:
    _, results = context.BuildCondBranch(function)
    context.ExitResult(results)
  finally:
    context.Exit()
  if context.outer_context is None:
    # For the MetaGraph. An outer context would save this one.
    tf1.add_to_collection(tf1.GraphKeys.COND_CONTEXT, context)
  return results[0]
