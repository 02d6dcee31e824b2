"""Variables of a wrapper, of which a graph may have several."""

import tensorflow as tf

tf1 = tf.compat.v1


def get_unique_variable(name, shape, dtype, initializer, device, collection,
                        use_resource=None):
  """A new variable; where the variable scope has one of its name, `<name>_1`.

  Args:
    name: Its name, in the current variable scope.
    shape: Its shape.
    dtype: Its dtype.
    initializer: Its initializer.
    device: Where it is, whatever tf.device() the caller is in.
    collection: The only collection that it joins.
    use_resource: As in `tf.compat.v1.get_variable`.

  Returns:
    A variable that is not trainable.
  """
  scope = tf1.get_variable_scope()
  # What is there already is another optimizer's, also in a scope that reuses.
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
    # What a user wants of the model's variables is not for this one.
    if not tf.executing_eagerly():  # There it has none.
      own.set_caching_device(None)
    own.set_custom_getter(None)
    own.set_partitioner(None)
    own.set_regularizer(None)
    return tf1.get_variable(
        unique, shape=shape, dtype=dtype, initializer=initializer,
        trainable=False, use_resource=use_resource, collections=[collection])
