"""Where variables of Keras and TensorFlow are, and what files call them."""

import keras

from wrapopt.keras import _average


def value_of(variable):
  """The tf.Variable of a variable of Keras or TensorFlow."""
  if isinstance(variable, _average.Average):
    return variable.stored
  return variable.value if isinstance(variable, keras.Variable) else variable


def path_of(variable):
  """The name of a variable in checkpoints."""
  return getattr(variable, "path", None) or variable.name.split(":")[0]
