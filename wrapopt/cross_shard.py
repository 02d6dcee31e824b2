"""Steps on gradients that are summed over shards."""

from collections.abc import Sequence
import contextlib
import itertools
import operator
from typing import Any, Optional

import tensorflow as tf
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.tpu import tpu_function

from wrapopt import ops
from wrapopt._types import (
    Gradient, GradsAndVars, Loss, Operation, V1Optimizer, Variable)
from wrapopt._v1._steps import _step
from wrapopt._v1._wrapper import WrapperOptimizer

_Reduction = tf.compat.v1.losses.Reduction


class CrossShardOptimizer(WrapperOptimizer):
  """Takes the inner optimizer's step on the gradients of all shards.

  Each of `n` shards computes the gradient of its own loss. The step is taken on

      g = sum over the shards s of a group of scale * (d loss_s) / (d v)

  with `scale` 1 / n for the mean of the losses and 1 for their sum. By default
  all shards are one group, and their weights stay equal. Several groups train
  independently of each other, each on the gradients of its own shards; `n` is
  then the size of a group.

  The same program runs on a laptop and on a pod. The meaning of a shard depends
  on the context in which the program is built:

  *   In a TPU shard context, such as that of `tf.compat.v1.tpu.shard`: a shard
      of the TPU computation. CrossReplicaSum sums a gradient. AllToAll gathers
      the rows of `tf.IndexedSlices`, so that they stay sparse.
  *   In `tf.distribute.Strategy.run`: a replica. The sum is the strategy's
      all-reduce, on its devices and workers. With G groups, one all-reduce
      carries the sums of all groups, which is G times the bytes. Each replica
      applies the sum of its group to its own copy of the variables, so the
      copies of different groups differ. A read or a checkpoint outside of the
      replicas takes the first copy of its process. A restored checkpoint makes
      all copies the same.
  *   Otherwise: the whole program is the only shard. The step is exactly the
      inner optimizer's, and no op is added.

  `compute_gradients` returns the shard's own gradients, multiplied by `scale`.

  Example:

  >>> w = tf.Variable([1.0])
  >>> opt = wrapopt.CrossShardOptimizer(
  ...     tf.compat.v1.train.GradientDescentOptimizer(0.5))
  >>> strategy = tf.distribute.get_strategy()  # Or one of several replicas.
  >>> strategy.run(lambda: opt.minimize(lambda: 3 * w, var_list=[w]))
  >>> w.numpy()
  array([-0.5], dtype=float32)

  References: `tf.tpu.CrossShardOptimizer` of TensorFlow 1.15, now
  `tf.compat.v1.tpu.CrossShardOptimizer`.

  Differences from 1.15: works without a TPU, in eager mode and with strategies;
  `tf.IndexedSlices` stay sparse, so the inner optimizer must have a sparse
  update; callable losses on several shards; groups may be any sequences, are
  checked in the constructor, and must not name a shard twice; one shard needs
  no CrossReplicaSum; `tf.train.Checkpoint`.
  """

  def __init__(
      self, opt: V1Optimizer, reduction: str = _Reduction.MEAN,
      name: str = "CrossShardOptimizer",
      group_assignment: Optional[Sequence[Sequence[int]]] = None) -> None:
    """Wraps `opt`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      reduction: `tf.compat.v1.losses.Reduction.MEAN` or `SUM`: whether to train
        on the mean or the sum of the losses of a group's shards.
      name: The name of the optimizer.
      group_assignment: A sequence of groups of equal size. A group is a
        sequence of shards. The groups hold each of 0, 1, ..., shards - 1 once.
        By default (None, or empty) all shards are one group.

    Raises:
      TypeError: If `opt` is not a `tf.compat.v1.train.Optimizer`.
      ValueError: If `reduction` is neither of the two, or `group_assignment`
        is not valid for any number of shards.
    """
    if reduction not in (_Reduction.SUM, _Reduction.MEAN):
      raise ValueError(
          f"`reduction` must be Reduction.SUM ({_Reduction.SUM!r}) or "
          f"Reduction.MEAN ({_Reduction.MEAN!r}) of tf.compat.v1.losses, got "
          f"{reduction!r}.")
    super().__init__(opt, name)
    self._reduction = reduction
    self._groups = _checked_groups(group_assignment)

  def compute_gradients(
      self, loss: Loss, *args: Any,
      **kwargs: Any) -> list[tuple[Optional[Gradient], Variable]]:
    """Gradients of this shard's loss, scaled for their sum over the shards.

    Args:
      loss: A tensor, or a callable that returns one; in eager mode a callable.
      *args: See `tf.compat.v1.train.Optimizer.compute_gradients`.
      **kwargs: See there.

    Returns:
      A list of (gradient, variable).

    Raises:
      ValueError: If `group_assignment` does not fit the number of shards.
      RuntimeError: If called in the scope of a strategy, outside of its `run`.
    """
    shards = _number_of_shards()
    groups = self._groups_of(shards)
    if shards > 1 and self._reduction == _Reduction.MEAN:
      unscaled, scale = loss, 1.0 / len(groups[0])
      loss = ((lambda: unscaled() * scale) if callable(unscaled)
              else unscaled * scale)
    return super().compute_gradients(loss, *args, **kwargs)

  @ops.not_converted
  def apply_gradients(self, grads_and_vars: GradsAndVars,
                      global_step: Optional[Variable] = None,
                      name: Optional[str] = None,
                      **kwargs: Any) -> Optional[Operation]:
    """Sums gradients over the shards and takes the inner optimizer's step.

    Every shard must call it with gradients of the same variables.

    Args:
      grads_and_vars: An iterable of (gradient, variable). A None gradient is
        passed to the inner optimizer.
      global_step: A variable to increment by one, or None.
      name: A name for the inner optimizer's operation.
      **kwargs: Further arguments of the inner optimizer. With
        `skip_gradients_aggregation=True` the gradients must be sums already.

    Returns:
      The result of the inner optimizer: in a graph, an `Operation`.

    Raises:
      TypeError: If a gradient cannot be converted to a tensor.
      ValueError: If there is no variable, none has a gradient,
        `group_assignment` does not fit the number of shards, or there are
        several groups and the replicas share a variable.
      RuntimeError: If called in the scope of a strategy, outside of its `run`.
    """
    return _step.apply_gradients(self._take, grads_and_vars, global_step, name,
                                 kwargs)

  def _take(self, step):
    grads_and_vars = step.grads_and_vars
    shards = _number_of_shards()
    groups = self._groups_of(shards)
    context = contextlib.nullcontext()
    in_replica = tf.distribute.has_strategy()
    if in_replica and all(g is None for g, _ in grads_and_vars):
      # A strategy would not report it.
      raise ValueError(
          "No gradients provided for any variable, got variables "
          f"{[getattr(v, 'name', v) for _, v in grads_and_vars]}.")
    if shards == 1 or step.options.get("skip_gradients_aggregation"):
      pass
    elif in_replica and len(groups) == 1:
      pass  # The strategy sums the gradients in the inner optimizer's step.
    else:
      if in_replica:
        _check_copies(grads_and_vars, groups)
        context = _ReducedContext(tf.distribute.get_replica_context())
      sums = _sums_over_replicas if _tpu_shards() is None else _sums_over_shards
      step = step._replace(grads_and_vars=_map_gradients(
          lambda gradients: sums(gradients, groups), grads_and_vars))
    with context:
      return self._inner._take(step)

  def _groups_of(self, shards):
    """The groups of `shards` shards: a list of lists."""
    if self._groups is None:
      return [list(range(shards))]
    named = sum(map(len, self._groups))
    if named != shards:
      raise ValueError(
          f"`group_assignment` must be a permutation of range({shards}), the "
          f"shards that there are here, got {named} shards in {self._groups}.")
    return self._groups


def _checked_groups(assignment):
  """A copy of a `group_assignment`: a list of lists of ints, or None."""
  wrong = f"got {assignment!r}."
  try:
    groups = [[operator.index(shard) for shard in group]
              for group in (() if assignment is None else assignment)]
  except TypeError as e:
    raise ValueError("`group_assignment` must be a list of lists of ints, "
                     f"{wrong}") from e
  if not groups:
    return None
  ids = sorted(itertools.chain(*groups))
  if not ids or ids != list(range(len(ids))):
    raise ValueError("`group_assignment` must be a permutation of "
                     f"range(shards), each shard once, {wrong}")
  if len({len(group) for group in groups}) > 1:
    raise ValueError("The groups of `group_assignment` must be of one size, "
                     f"{wrong}")
  return groups


def _tpu_shards():
  """The number of shards of the TPU computation being built, or None."""
  return tpu_function.get_tpu_context().number_of_shards


def _number_of_shards():
  if not tf.distribute.has_strategy():
    return _tpu_shards() or 1
  context = tf.distribute.get_replica_context()
  if context is None:
    raise RuntimeError(
        "CrossShardOptimizer must be used in a replica, got the scope of a "
        f"{type(tf.distribute.get_strategy()).__name__} outside of its run(). "
        "Call it in a function that you pass to strategy.run().")
  return context.num_replicas_in_sync


def _map_gradients(function, grads_and_vars):
  """Replaces all gradients but None by the results of a function of all."""
  gradients = [_of_tensors(g) for g, _ in grads_and_vars if g is not None]
  mapped = iter(function(gradients) if gradients else [])
  return [(None if g is None else next(mapped), v) for g, v in grads_and_vars]


def _of_tensors(gradient):
  if not isinstance(gradient, tf.IndexedSlices):
    return gradient
  shape = gradient.dense_shape
  return tf.IndexedSlices(
      tf.convert_to_tensor(gradient.values),
      tf.convert_to_tensor(gradient.indices),
      None if shape is None else tf.convert_to_tensor(shape))


# In a TPU shard context.


def _sums_over_shards(gradients, groups):
  """Sums over the shards of this shard's group."""
  def sum_of(gradient):
    with framework_ops.colocate_with(gradient):
      if not isinstance(gradient, tf.IndexedSlices):
        return tf.compat.v1.tpu.cross_replica_sum(gradient, groups)
      # TPUs have no collectives of 64-bit integers. Row numbers fit into 32
      # bits.
      indices = _gather_rows(tf.cast(gradient.indices, tf.int32), groups)
      return tf.IndexedSlices(_gather_rows(gradient.values, groups),
                              tf.cast(indices, gradient.indices.dtype),
                              gradient.dense_shape)

  return [sum_of(gradient) for gradient in gradients]


def _gather_rows(x, groups):
  """The rows of all shards of a group, in the group's order."""
  # One copy for each shard of the group.
  size = len(groups[0])
  return tf.raw_ops.AllToAll(
      input=tf.concat([x] * size, axis=0), group_assignment=groups,
      concat_dimension=0, split_dimension=0, split_count=size)


# In a replica of a strategy, whose collectives include all replicas.


def _check_copies(grads_and_vars, groups):
  for gradient, variable in grads_and_vars:
    if gradient is not None and not isinstance(
        variable, tf.distribute.DistributedValues):
      raise ValueError(
          "Every replica must have its own copy of a variable if there are "
          f"several groups, {groups}, got one copy for all of "
          f"'{getattr(variable, 'name', variable)}'. Make it in the scope of a "
          "strategy that mirrors variables.")


def _sums_over_replicas(gradients, groups):
  """Sums over the replicas of this replica's group."""
  if len(groups[0]) == 1:
    return gradients
  context = tf.distribute.get_replica_context()
  group_of = [i for _, i in sorted((replica, i)
                                   for i, group in enumerate(groups)
                                   for replica in group)]
  mine = tf.gather(group_of, context.replica_id_in_sync_group)

  def place(gradient):
    """Puts a gradient in this group's place among those of all groups."""
    if isinstance(gradient, tf.IndexedSlices):
      indices = tf.cast(gradient.indices, tf.int64)
      return tf.IndexedSlices(
          # No collective gathers bfloat16.
          tf.cast(gradient.values, tf.float32)
          if gradient.dtype == tf.bfloat16 else gradient.values,
          indices * len(groups) + tf.cast(mine, tf.int64),
          gradient.dense_shape)
    flat = tf.reshape(gradient, [1, -1])
    here = tf.equal(tf.range(len(groups)), mine)
    # Not a product: a number that is not finite would spread to all groups.
    return tf.where(here[:, tf.newaxis], flat, tf.zeros_like(flat))

  def take(total, gradient):
    if not isinstance(gradient, tf.IndexedSlices):
      return tf.reshape(total[mine], tf.shape(gradient))
    here = tf.equal(total.indices % len(groups), tf.cast(mine, tf.int64))
    indices = tf.boolean_mask(total.indices // len(groups), here)
    return tf.IndexedSlices(
        tf.cast(tf.boolean_mask(total.values, here), gradient.dtype),
        tf.cast(indices, gradient.indices.dtype), gradient.dense_shape)

  totals = context.all_reduce(tf.distribute.ReduceOp.SUM,
                              [place(gradient) for gradient in gradients])
  return list(map(take, totals, gradients))


class _ReducedContext(tf.distribute.ReplicaContext):
  """A replica's context in which an optimizer does not sum gradients.

  In a replica, an optimizer calls `merge_call` of the context with a function
  of the strategy. The function sums the gradients of all replicas and then
  updates each replica's copies of variables, slots and other state. In this
  context, the function gets a strategy whose sum is each replica's own
  gradient.
  """

  def __init__(self, context):
    super().__init__(context.strategy, context._replica_id_in_sync_group)
    self._context = context

  def _merge_call(self, fn, args, kwargs):
    return self._context._merge_call(
        lambda strategy, *args, **kwargs: fn(_reduced(strategy), *args,
                                             **kwargs), args, kwargs)


class _Changed:
  """An object with some of its attributes replaced."""

  def __init__(self, unchanged, **attributes):
    self._unchanged = unchanged
    vars(self).update(attributes)

  def __getattr__(self, name):
    return getattr(self._unchanged, name)


def _reduced(strategy):
  """A strategy whose sum of gradients is each replica's own gradient."""

  def batch_reduce_to(reduce_op, value_destination_pairs, options=None):
    del reduce_op, options
    return [value for value, _ in value_destination_pairs]

  def call_for_each_replica(fn, args=(), kwargs=None):
    def in_replica(*args, **kwargs):
      with _ReducedContext(tf.distribute.get_replica_context()):
        return fn(*args, **kwargs)
    return strategy.extended.call_for_each_replica(in_replica, args, kwargs)

  return _Changed(strategy, extended=_Changed(
      strategy.extended, batch_reduce_to=batch_reduce_to,
      call_for_each_replica=call_for_each_replica))
