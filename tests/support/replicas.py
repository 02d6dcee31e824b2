"""Two replicas on the CPU. Import it before TensorFlow runs anything."""

import functools

import tensorflow as tf

REPLICAS = 2
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * REPLICAS)


@functools.cache
def mirrored():
  """One for all tests: a second one's collectives have the first one's keys."""
  return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
