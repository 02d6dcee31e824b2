"""Checks, when a checkpoint is written, that it can hold an optimizer."""

import tensorflow as tf


class WriteCheck(tf.__internal__.tracking.AutoTrackable):
  """A child of an optimizer, by which a checkpoint of it is refused.

  The error comes when values are read. A program may also list all objects of a
  model and write none: `model.export` of Keras 3.12 does so to find tables.
  """

  _self_setattr_tracking = False

  def __init__(self, check):
    """Makes the child of one optimizer.

    Args:
      check: A function that raises a RuntimeError while no checkpoint can hold
        the optimizer.
    """
    self._check = check

  def children(self):
    """{name: this} while no checkpoint can hold the optimizer, else {}.

    It must stand before the optimizer's other children, which are read later.
    """
    try:
      self._check()
    except RuntimeError:
      return {"write_check": self}
    return {}

  def _serialize_to_tensors(self):
    self._check()
    return {}

  def _copy_trackable_to_cpu(self, object_map):
    self._check()
    object_map[self] = self
