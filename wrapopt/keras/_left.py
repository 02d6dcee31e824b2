"""Variables that have left their layers, as in a model that is quantized.

`Model.quantize` deletes float variables from their layers and makes others in
their place. An optimizer still holds the deleted ones, and does not know the
layers. Keras calls a method of the layer, empty in TensorFlow, when a variable
leaves it. Here, this method notes the layer at the variable.
"""

import weakref

import keras

_of_keras = keras.layers.Layer._post_untrack_variable


def _noted(layer, variable):
  _of_keras(layer, variable)
  variable._wrapopt_left = weakref.ref(layer)


keras.layers.Layer._post_untrack_variable = _noted


def layer_of(variable):
  """The layer that a variable has left, or None.

  Also None if the variable is back, or the layer does not exist any more.
  """
  noted = getattr(variable, "_wrapopt_left", None)
  layer = noted and noted()
  if layer is None or any(v is variable for v in layer.variables):
    return None
  return layer
