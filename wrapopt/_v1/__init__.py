"""The parts of the wrappers of `tf.compat.v1.train` optimizers."""
