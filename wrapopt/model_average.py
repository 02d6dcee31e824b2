"""Averages the weights that several workers train apart from each other."""

from wrapopt import _centers


class ModelAverageCustomGetter(_centers.CenterGetter):
  """Gives each worker variables of its own, and all of them shared centers.

  The `custom_getter` of a variable scope, inside of which a worker builds its
  model for `ModelAverageOptimizer`, under a `replica_device_setter`.

  A trainable variable `<name>` becomes the worker's own: on `worker_device`, in
  the collection LOCAL_VARIABLES in place of GLOBAL_VARIABLES, and in the others
  that the caller names. Beside it comes its center, which the workers share:
  `global_center_variable/<name>`, not trainable, in GLOBAL_VARIABLES, of the
  same dtype and shape, on the device that the caller's scope gives it. It
  starts with the initial value of the worker's variable, without reading the
  variable. A `PartitionedVariable` has a center for each slice. A variable that
  is got again keeps its center.

  Other variables are left alone, but for those of LOCAL_VARIABLES, which are
  put on `worker_device`.

  Example, of one worker and a parameter server:

  >>> import tensorflow.compat.v1 as tf1
  >>> getter = wrapopt.ModelAverageCustomGetter("/job:worker/task:0")
  >>> with tf.Graph().as_default(), tf1.device(tf1.train.replica_device_setter(
  ...     cluster={"ps": ["ps:1"], "worker": ["worker:1"]})):
  ...   with tf1.variable_scope("model", custom_getter=getter):
  ...     w = tf1.get_variable("w", [2])
  ...   [center] = tf1.global_variables()
  ...   for v in w, center:
  ...     print(v.op.name, v.device)
  model/w /job:worker/task:0
  global_center_variable/model/w /job:ps/task:0

  Raises, when it is called:
    RuntimeError: In eager mode.
    NotImplementedError: In a `tf.distribute` strategy.

  Reference: `tf.contrib.opt.ModelAverageCustomGetter` of TensorFlow 1.15.

  Differences from 1.15: the caller's collections are kept, and may be None;
  reuse; partitioned and resource variables.
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
    # Its name in 1.15.
    self._local_2_global = self.centers
