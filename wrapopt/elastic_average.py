"""Elastic averaging: workers explore around a center that they share."""

import tensorflow as tf

from wrapopt import _centers

LOCAL_CENTER = "local_center_variable"


class ElasticAverageCustomGetter(_centers.CenterGetter):
  """Gives each worker variables of its own, and all of them shared centers.

  The `custom_getter` of a variable scope, inside of which a worker builds its
  model for `ElasticAverageOptimizer`, under a `replica_device_setter`.

  As `ModelAverageCustomGetter`; beside a variable `<name>` and its center
  `global_center_variable/<name>`, the worker has its own copy of the center
  from the last exchange: `local_center_variable/<name>`, not trainable, in
  LOCAL_VARIABLES, on `worker_device`.

  Example:

  >>> import tensorflow.compat.v1 as tf1
  >>> getter = wrapopt.ElasticAverageCustomGetter("/job:worker/task:0")
  >>> with tf.Graph().as_default(), tf1.device(tf1.train.replica_device_setter(
  ...     cluster={"ps": ["ps:1"], "worker": ["worker:1"]})):
  ...   with tf1.variable_scope("model", custom_getter=getter):
  ...     w = tf1.get_variable("w", [2])
  ...   for v in tf1.global_variables() + tf1.local_variables():
  ...     print(v.op.name, v.device)
  global_center_variable/model/w /job:ps/task:0
  model/w /job:worker/task:0
  local_center_variable/model/w /job:worker/task:0

  Raises, when it is called:
    RuntimeError: In eager mode.
    NotImplementedError: In a `tf.distribute` strategy.

  Reference: `tf.contrib.opt.ElasticAverageCustomGetter` of TensorFlow 1.15.

  Differences from 1.15: the caller's collections are kept, and may be None;
  reuse; all three variables start with the same value, also of a random
  initializer; regularizers and constraints are the worker's variable's alone.
  """

  def __init__(self, worker_device):
    """Makes the getter of one worker.

    Args:
      worker_device: The device of its variables, as `tf.device` takes it, such
        as "/job:worker/task:0".

    Raises:
      ValueError: If `worker_device` is a string that names no device.
    """
    super().__init__(worker_device)
    self.local_centers = _centers.VariableMap()
    # Their names in 1.15.
    self._global_map = self.centers
    self._local_map = self.local_centers

  def _make_copies(self, getter, name, variable, kwargs):
    super()._make_copies(getter, name, variable, kwargs)
    with tf.device(self.worker_device):
      self._copy(getter, f"{LOCAL_CENTER}/{name}", variable, kwargs,
                 tf.compat.v1.GraphKeys.LOCAL_VARIABLES, self.local_centers)
