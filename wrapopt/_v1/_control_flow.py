"""Branches that may hold ref variables, and reach other tasks."""

import tensorflow as tf
from tensorflow.python.ops import control_flow_ops

tf1 = tf.compat.v1


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
