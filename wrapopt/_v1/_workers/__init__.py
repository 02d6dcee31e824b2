"""What workers of tf.compat.v1 share: centers."""
