"""Branches that may hold ref variables."""

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
    pivots = tf.raw_ops.Switch(data=pred, pred=pred)
    # A control dependency on a Switch would always be met.
    pivots = [tf.identity(pivot, name=name)
              for pivot, name in zip(pivots, ("switch_f", "switch_t"))]
    pred = tf.identity(pred, name="pred_id")
    results = [_branch(pred, pivot, number, function) for
               number, (pivot, function) in
               enumerate(zip(pivots, (skipped, taken)))]
    return tf.raw_ops.Merge(inputs=results)[0]


def _branch(pred, pivot, number, function):
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
