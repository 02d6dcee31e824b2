"""Checks of the argument `variables`, if it is a list."""

import tensorflow as tf

from wrapopt._v1 import _slots


def check(listed, grads_and_vars, before):
  """Raises an error if a step cannot average the listed variables.

  Args:
    listed: The variables, each once; empty if there is no list.
    grads_and_vars: The (gradient, variable) pairs of the step.
    before: The result for earlier steps of this graph, or empty.

  Returns:
    {id of a listed variable: whether the step gets it}.
  """
  got = {id(v) for _, v in grads_and_vars}
  is_got = {id(v): id(v) in got for v in listed}
  if is_got and not any(is_got.values()):
    raise ValueError(
        "`variables` must hold a variable that the optimizer trains, got "
        f"{[v.name for v in listed]}, of which apply_gradients() got none.")
  graph = _slots.graph_of_state()
  for v in listed:
    if _slots.graph_of(v) is not graph:
      raise ValueError(
          "`variables` must hold variables of the graph of the step, or of "
          f"eager mode, got '{v.name}' of another one.")
    if before.get(id(v), is_got[id(v)]) != is_got[id(v)]:
      raise ValueError(
          "`variables` must hold variables that every apply_gradients() gets, "
          f"or none does, got '{v.name}', which some calls got. If different "
          "calls get different variables, pass a function of a variable. To "
          "average a variable also in steps that do not train it, pass it with "
          "the gradient None.")
    if (isinstance(v, tf.distribute.DistributedValues) and
        v.synchronization == tf.VariableSynchronization.ON_READ):
      raise NotImplementedError(
          "In a tf.distribute strategy, `variables` must hold variables that "
          f"all replicas share, got '{v.name}', which is another one in each "
          "replica (VariableSynchronization.ON_READ).")
  return is_got
