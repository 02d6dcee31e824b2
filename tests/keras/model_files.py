"""Saves and loads models: by Keras's files of weights, or by checkpoints."""

import tensorflow as tf


def save_by(way, path, model):
  if way == "weights":
    model.save_weights(path)
  else:
    tf.train.Checkpoint(model=model).write(path)


def load_by(way, path, model):
  """Returns the status of a checkpoint."""
  if way == "weights":
    return model.load_weights(path)
  return tf.train.Checkpoint(model=model).read(path)
