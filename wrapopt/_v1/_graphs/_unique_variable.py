"""Variables with unique names, for several wrappers in a graph."""

import tensorflow as tf

tf1 = tf.compat.v1


def get_unique_variable(name, shape, dtype, initializer, device, collection,
                        use_resource=None):
  """Makes a variable `<name>`, or `<name>_1` and so on if the name is taken.

  Args:
    name: Its name, in the current variable scope.
    shape: Its shape.
    dtype: Its dtype.
    initializer: Its initializer.
    device: Its device, whatever the caller's tf.device().
    collection: Its only collection.
    use_resource: As in `tf.compat.v1.get_variable`.

  Returns:
    A variable that is not trainable.
  """
  scope = tf1.get_variable_scope()
  # An existing variable belongs to another optimizer, even if the scope reuses.
  prefix = f"{scope.name}/" if scope.name else ""
  taken = set() if tf.executing_eagerly() else {
      v.op.name for v in (*tf1.global_variables(), *tf1.local_variables())}
  number = 0
  unique = name
  while prefix + unique in taken:
    number += 1
    unique = f"{name}_{number}"
  with tf.device(None), tf.device(device), tf1.variable_scope(
      scope, reuse=tf1.AUTO_REUSE, auxiliary_name_scope=False) as own:
    # The scope's settings for the model's variables do not apply.
    if not tf.executing_eagerly():  # Eager scopes have no caching device.
      own.set_caching_device(None)
    own.set_custom_getter(None)
    own.set_partitioner(None)
    own.set_regularizer(None)
    return tf1.get_variable(
        unique, shape=shape, dtype=dtype, initializer=initializer,
        trainable=False, use_resource=use_resource, collections=[collection])
