"""The exchange of `ElasticAverageOptimizer` between worker and centers."""

import collections
import numbers

import tensorflow as tf

from wrapopt import ops
from wrapopt._v1._workers import _centers

tf1 = tf.compat.v1


def learning_rate(opt):
  """The learning rate of `opt`: a number, tensor or callable."""
  lr = getattr(opt, "_learning_rate", None)
  if lr is None or isinstance(lr, numbers.Real) and not lr > 0:
    raise ValueError(
        f"`rho` must be given: {type(opt).__qualname__} must have a positive "
        "learning rate that scales gradients for the default of `rho`, got "
        f"{'none' if lr is None else lr}.")
  return lr


def penalty(rho, pairs):
  """rho / 2 sum |v - center|^2."""
  dtype = tf.float32
  if any(v.dtype.base_dtype == tf.float64 for v, _ in pairs):
    dtype = tf.float64
  distances = []
  for v, center in pairs:
    with ops.device_of(v):
      distances.append(tf.cast(tf.nn.l2_loss(v - center), dtype))
  return tf.cast(ops.float64(rho), dtype) * tf.add_n(distances)


def exchange(variables, centers, local_centers, rate, steps, applied, due):
  """Exchanges after `applied`, in the steps in which `due` is not dead.

  Args:
    variables: Variables of this worker.
    centers: Their centers.
    local_centers: This worker's copies of the centers.
    rate: The moving rate: a number, or a scalar tensor or variable.
    steps: Variables that an exchange increments.
    applied: The operation after which the variables have their values.
    due: A scalar tensor on the worker.

  Returns:
    A list of operations.
  """
  ready = [applied, due]
  if not isinstance(rate, numbers.Real):
    with tf.control_dependencies([due]), ops.host_of(due):
      rate = _checked_rate(ops.float64(rate))
    ready.append(rate)  # If it is out of range, no value leaves.
  groups = _centers.buckets(variables, centers)
  with tf.control_dependencies(ready):
    flats = _centers.pack(variables, groups)
  pushed, pulled = collections.defaultdict(list), []
  for group, flat in zip(groups, flats, strict=True):
    push, pull = _exchange_group(
        [variables[i] for i in group], [centers[i] for i in group],
        [local_centers[i] for i in group], flat, rate)
    pushed[centers[group[0]].device].append(push)
    pulled.append(pull)
  at_servers = []
  for device, pushes in pushed.items():
    with tf.device(None), tf.device(device):
      at_servers.append(tf.group(*pushes))
  with tf.control_dependencies(at_servers):
    return [*pulled, *[_increment(step) for step in steps]]


def _exchange_group(variables, centers, local_centers, flat, rate):
  """Exchanges variables of values `flat`.

  Returns:
    (the operation that moves the centers, the one that moves the variables).
  """
  together = [range(len(variables))]
  flat = _centers.at(centers[0].device, flat)
  # The centers are read once, and after the step, whose gradients depend on
  # the worker's copies of them. The dependency also makes constants dead in
  # steps without an exchange.
  with tf.control_dependencies([flat]):
    [center_flat] = _centers.pack(centers, together)
    with ops.device_of(centers[0]):
      differences = _centers.split(flat - center_flat, centers)
    far_rate = (rate if isinstance(rate, numbers.Real)
                else _centers.at(centers[0].device, rate))
    # The current centers: others may have moved them since they were read.
    pushed = ops.averaging_assign(centers, [centers, differences],
                                  weights=[1.0, far_rate])
  # The worker gets them after the push: that takes no edge of its own.
  with tf.control_dependencies([pushed]), ops.device_of(centers[0]):
    center_flat = tf.identity(center_flat)
  seen = _centers.assign_packed(local_centers, [center_flat], together)
  with tf.control_dependencies([seen]):
    return pushed, ops.averaging_assign(variables, local_centers, rate=rate)


def _checked_rate(rate):
  is_in_range = tf.logical_and(rate >= 0, rate <= 1)
  with tf.control_dependencies([tf.raw_ops.Assert(condition=is_in_range, data=[
      "`moving_rate` must be in [0, 1], got", rate])]):
    return tf.identity(rate)


def _increment(step):
  with ops.device_of(step):
    # Lock a ref variable: other workers increment it too.
    return tf1.assign_add(step, tf.ones([], step.dtype.base_dtype),
                          use_locking=True).op
