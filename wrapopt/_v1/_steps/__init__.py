"""How a step of an optimizer of tf.compat.v1 in wrappers is taken."""
