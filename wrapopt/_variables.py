"""Variables that optimizers make."""

import tensorflow as tf

tf1 = tf.compat.v1


def get_unique_variable(name, **options):
  """A new variable in the current variable scope.

  What is there already is another optimizer's, also in a scope that reuses.

  Args:
    name: Its name; if the scope has one of this name, `<name>_1` and so on.
    **options: Arguments of `tf.compat.v1.get_variable`.

  Returns:
    A variable.
  """
  scope = tf1.get_variable_scope()
  prefix = f"{scope.name}/" if scope.name else ""
  taken = {v.op.name for v in tf1.global_variables() + tf1.local_variables()
           } if not tf.executing_eagerly() else ()
  number = 0
  unique = name
  while prefix + unique in taken:
    number += 1
    unique = f"{name}_{number}"
  with tf1.variable_scope(scope, reuse=tf1.AUTO_REUSE,
                          auxiliary_name_scope=False):
    return tf1.get_variable(unique, **options)
