"""Replaces a method of Keras's Layer, to see which variables leave it.

`Model.quantize` deletes float variables from their layers and makes others in
their place. An optimizer still holds the deleted ones, and does not know the
layers. Keras calls a method of the layer, empty in TensorFlow, when a variable
leaves it. Here, this method notes the layer at the variable.
"""

import weakref

import keras

from wrapopt.keras._steps import _views
from wrapopt.keras._variables import path_of

_of_keras = keras.layers.Layer._post_untrack_variable
# Not the function below, if this module is imported again.
_of_keras = getattr(_of_keras, "of_keras", _of_keras)


def _noted(layer, variable):
  _of_keras(layer, variable)
  variable._wrapopt_left = weakref.ref(layer)


setattr(_noted, "of_keras", _of_keras)
keras.layers.Layer._post_untrack_variable = _noted


def layer_left_by(variable):
  """The layer that a variable has left, or None.

  Also None if the variable is back, or the layer does not exist any more.
  """
  noted = getattr(variable, "_wrapopt_left", None)
  layer = noted and noted()
  if layer is None or any(v is variable for v in layer.variables):
    return None
  return layer


class DetachmentCheck:
  """Checks that no averaged variable of an optimizer was detached."""

  def __init__(self):
    # {model: those of its variables that had an average at first}, and
    # {model: its variables and optimizer when they were found right last}.
    self._had = weakref.WeakKeyDictionary()
    self._right = weakref.WeakKeyDictionary()

  def check(self, optimizer, model, before):
    """Raises an error if a variable that has an average has left its layer.

    Args:
      optimizer: A wrapper with averages.
      model: A model that must have had the variable, or None.
      before: A sentence of the error.
    """
    if model is not None:
      # An evaluation asks before and after each batch.
      now = [*map(id, model.variables), id(getattr(model, "optimizer", None))]
      if self._right.get(model) == now:
        return
    averaged = [v for v in optimizer._trainable_variables
                if optimizer._var_key(v) in optimizer._store.rows[0]]
    left = [(v, layer) for v in averaged
            if (layer := layer_left_by(v)) is not None]
    if model is not None:
      layers = set(map(id, model._flatten_layers())) if left else ()
      left = ([(v, layer) for v, layer in left if id(layer) in layers] or
              [(v, model) for v in self._replaced(optimizer, model, averaged)])
    if left:
      raise _has_left(optimizer, *left[0], before)
    if model is not None:
      _check_successors(optimizer, model, averaged)
      self._right[model] = now

  def _replaced(self, optimizer, model, averaged):
    """Those variables of layers in whose place a model has others: a list.

    Args:
      optimizer: A wrapper with averages.
      model: A model, which may be a part of what the optimizer trains.
      averaged: All variables that have an average.
    """
    its = set(map(optimizer._var_key, model.variables))
    had = self._had.setdefault(
        model, [v for v in averaged if optimizer._var_key(v) in its])
    trains, outermost = [optimizer], getattr(model, "optimizer", None)
    inside = [] if outermost is None else [outermost,
                                           *_views.within(outermost)]
    if any(opt is optimizer for opt in inside):
      had, trains = averaged, inside  # fit() trains it.
    left = [v for v in had if optimizer._var_key(v) not in its]
    if not left:
      return []
    trained = {optimizer._var_key(v) for opt in trains if opt.built
               for v in opt._trainable_variables}
    return left if any(optimizer._var_key(v) not in trained
                       for v in model.trainable_variables) else []


def _check_successors(optimizer, model, averaged):
  """Raises an error if a layer has a new variable in place of an average's.

  Keras keeps the old one in the layer, if the layer's attribute gets a new
  variable of the same name, such as a larger table.

  Args:
    optimizer: A wrapper with averages.
    model: A model.
    averaged: All variables that have an average.
  """
  averaged = set(map(optimizer._var_key, averaged))
  trained = set(map(optimizer._var_key, optimizer._trainable_variables))
  for layer in model._flatten_layers():
    names = {v.path for v in layer.variables
             if optimizer._var_key(v) in averaged}
    for v in layer.trainable_variables:
      if (v.path in names and optimizer._var_key(v) not in trained and
          not any(layer._flatten_layers(include_self=False))):
        raise RuntimeError(
            f"A variable that a {type(optimizer).__name__} averages must stay "
            f"in use, got '{v.path}', of which '{layer.name}' has another one "
            "that the optimizer does not train. So has a layer whose table was "
            "replaced by a larger one. Compile the model with a new optimizer, "
            "and set its averages, as in wrapopt/docs/embeddings.md.")


def _has_left(optimizer, variable, layer, before):
  return RuntimeError(
      f"A variable that a {type(optimizer).__name__} averages must stay in its "
      f"model, got '{path_of(variable)}', which has left '{layer.name}'."
      " quantize() and a replaced layer do this. Its average cannot be put in "
      f"its place. {before}Copy the model before, and change the copy: "
      "optimizer.averaged_model(model).quantize(\"int8\").")
