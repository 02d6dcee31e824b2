"""Transfers between tasks in some steps only.

In a `tf.cond`, each tensor that a branch transfers to another task costs a call
in every step: if the branch is not taken, the receiver must be told so. Each
variable that a branch captures costs further nodes. With `branch` and `Link`, a
step without transfers costs one call there and two back, whatever the number of
tensors and variables.
"""

import contextlib

import tensorflow as tf

from wrapopt._loader import ops as _raw


def branch(pred):
  """Two tensors, of which only one is there in a step.

  Args:
    pred: A scalar bool tensor.

  Returns:
    (taken, skipped). Ops that depend on `taken`, if only by a control
    dependency, run if `pred` is true. Ops that depend on `skipped` run if it is
    false.
  """
  skipped, taken = tf.raw_ops.Switch(data=pred, pred=pred)
  # A control dependency on a Switch is one on the op, which always runs.
  return tf.identity(taken), tf.identity(skipped)


def join(taken, skipped):
  """Whichever of two tensors is there."""
  return tf.raw_ops.Merge(inputs=[skipped, taken])[0]


class Link:
  """Between two devices, in the steps in which it is open."""

  def __init__(self, near, far, opened):
    """Makes a link.

    Args:
      near: The device at the near end, a CPU.
      far: The one at the far end.
      opened: A tensor that is there in the steps in which the link is open.
    """
    self._near, self._far = near, far
    with _on(near), tf.control_dependencies([opened]):
      self._out = _raw.wrapopt_route(to=far)
    with _on(far):
      self._back = _raw.wrapopt_route_back(self._out)
    self._channels = 0

  def send(self, value, after=()):
    """Sends a tensor from the near end.

    Args:
      value: A tensor.
      after: Operations that come before it is sent.

    Returns:
      (the tensor at the far end, the operation that sends it). Nothing else
      tells a session that it needs that operation.
    """
    return self._transfer(value, after, self._near, self._far, self._out)

  def send_back(self, value, after=()):
    """The same from the far end to the near one."""
    return self._transfer(value, after, self._far, self._near, self._back)

  def done(self, operations):
    """Tells the near end, by an edge of the graph, what the far end has done.

    Args:
      operations: At the far end.

    Returns:
      An operation at the near end.
    """
    with _on(self._far):
      done = tf.group(*operations)
    with _on(self._near), tf.control_dependencies([done]):
      return tf.no_op()

  def _transfer(self, value, after, source, target, route):
    # The name of an op is unique in the graph.
    channel = f"{self._out.op.name}:{self._channels}"
    self._channels += 1
    with _on(source), tf.control_dependencies(after):
      sent = _raw.wrapopt_send(route, value, channel=channel)
    with _on(target):
      return _raw.wrapopt_receive(route, T=value.dtype, channel=channel,
                                  shape=value.shape), sent


@contextlib.contextmanager
def _on(device):
  with tf.device(None), tf.device(device):
    yield
