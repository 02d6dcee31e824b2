"""Steps of which only some talk to another task.

In a `tf.cond`, each tensor that crosses to another task in a branch costs a
call in every step: where the branch is not taken, the receiver has to be told
that there is none. And each variable that a branch takes from outside costs
nodes of its own. With `branch` and `Line`, a step in which nothing is to be done
costs one such call each way, whatever the number of tensors and variables.
"""

import contextlib

import tensorflow as tf

from wrapopt._loader import ops as _raw


def branch(pred):
  """Two tensors, of which only one is there in a step.

  Args:
    pred: A scalar bool tensor.

  Returns:
    (taken, skipped). What depends on `taken`, be it by control dependencies
    alone, runs where `pred` is true, and on `skipped`, where it is false.
  """
  skipped, taken = tf.raw_ops.Switch(data=pred, pred=pred)
  # A control dependency on a Switch is one on the op, which always runs.
  return tf.identity(taken), tf.identity(skipped)


def join(taken, skipped):
  """Whichever of two tensors is there."""
  return tf.raw_ops.Merge(inputs=[skipped, taken])[0]


class Line:
  """Between two devices, in the steps in which it is open.

  Attributes:
    opened: A tensor at the far end: what depends on it runs where the line is
      open.
  """

  def __init__(self, near, far, opened):
    """Makes a line.

    Args:
      near: The device at the near end, a CPU.
      far: The one at the far end.
      opened: A tensor that is there in the steps in which the line is open.
    """
    self._near, self._far = near, far
    with _on(near), tf.control_dependencies([opened]):
      self._out = _raw.wrapopt_route(to=far)
    with _on(far):
      self.opened = self._back = _raw.wrapopt_route_back(self._out)
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
    with _on(self._near), tf.control_dependencies(after):
      sent, channel = self._send(value, self._out)
    with _on(self._far):
      return _receive(value, self._out, channel), sent

  def send_back(self, values):
    """Sends tensors from the far end.

    Args:
      values: A list of tensors.

    Returns:
      A list of them at the near end. They are there once all have been sent.
    """
    with _on(self._far):
      sent = [self._send(value, self._back) for value in values]
      # Who needs what is received needs all of these.
      with tf.control_dependencies([op for op, _ in sent]):
        back = tf.identity(self._back)
    with _on(self._near):
      return [_receive(value, back, channel)
              for value, (_, channel) in zip(values, sent, strict=True)]

  def _send(self, value, route):
    # The name of an op is unique in the graph.
    channel = f"{self._out.op.name}:{self._channels}"
    self._channels += 1
    return _raw.wrapopt_send(route, value, channel=channel), channel


def _receive(value, route, channel):
  return _raw.wrapopt_receive(route, T=value.dtype, channel=channel,
                              shape=value.shape)


@contextlib.contextmanager
def _on(device):
  with tf.device(None), tf.device(device):
    yield
