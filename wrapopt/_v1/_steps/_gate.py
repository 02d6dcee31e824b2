"""The gate that a step must pass, and what it does to gradients."""

import typing

import tensorflow as tf

from wrapopt._gates import _compensation


class Gate(typing.NamedTuple):
  """A gate that a step must pass.

  Attributes:
    accept: A scalar bool tensor. If it is false, nothing changes.
    policy: What the gate does to accepted gradients: a function that is applied
      to each, a `_compensation.Compensated` of all of them, or None.
  """
  accept: tf.Tensor
  policy: typing.Callable | _compensation.Compensated | None = None

  @property
  def compensation(self):
    """The policy, if it compensates."""
    return (self.policy if isinstance(self.policy, _compensation.Compensated)
            else None)

  @property
  def transform(self):
    """The policy, if it is a function of each gradient."""
    return None if self.compensation else self.policy

  def transformed(self, grads_and_vars):
    """Gradients of an accepted step, to which the policy was applied."""
    if self.transform is None:
      return grads_and_vars
    return [(g if g is None else _on_device_of(g, self.transform), v)
            for g, v in grads_and_vars]

  def withheld(self, grads_and_vars):
    """Gradients for an op that ignores them if the step is not accepted.

    If a gradient and its variable are on different machines, an empty tensor
    replaces a gradient that is not accepted, to save the transfer. On one
    machine, a gradient is not changed, unless there is a `transform`.

    Args:
      grads_and_vars: Pairs of gradients and variables.

    Returns:
      The same, to which the `transform` was applied.
    """
    if tf.executing_eagerly():
      return self.transformed(grads_and_vars)
    withhold = lambda g: _withhold(self.accept, g, self.transform)
    return [(_on_device_of(g, withhold)
             if g is not None and (self.transform or _travels(g, v)) else g, v)
            for g, v in grads_and_vars]


def _withhold(accept, g, transform):
  sparse = isinstance(g, tf.IndexedSlices)

  def admitted():
    h = transform(g) if transform else g
    return ([tf.identity(h.values), tf.identity(h.indices)] if sparse
            else [tf.identity(h)])

  def dropped():
    parts = (g.values, g.indices) if sparse else (g,)
    return [tf.zeros([0], part.dtype) for part in parts]

  # The static shape is unknown, because the branches have different ones.
  parts = tf.cond(accept, admitted, dropped)
  if not sparse:
    return parts[0] if isinstance(parts, (list, tuple)) else parts
  return tf.IndexedSlices(*parts, dense_shape=g.dense_shape)


def _on_device_of(g, function):
  with tf.device(None), tf.device(g.device):
    return function(g)


def _travels(g, v):
  """Whether a gradient is on another machine of a cluster than its variable."""
  def task(device):
    spec = tf.DeviceSpec.from_string(device or "")
    return spec.job, spec.replica or 0, spec.task or 0
  home = task(v.device)
  return home[0] not in (None, "localhost") and task(g.device) != home
