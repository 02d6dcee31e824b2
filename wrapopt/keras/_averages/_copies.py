"""Copies of Keras models, with given weights."""

import functools
import itertools
import threading
import warnings

import keras
from keras.src.models import functional

# Held while a model counts as not compiled, which is undone once.
_copying = threading.RLock()

# Entries of a configuration that do not change what a layer computes.
_FREE = {"name", "seed", "trainable"}


def copied(model, weights):
  """A copy of a model, that is not compiled.

  Args:
    model: A `keras.Model`.
    weights: The values of its weights in the copy, in the order of
      `model.weights`.

  Returns:
    A `keras.Model` that shares nothing with `model`.

  Raises:
    ValueError: If Keras cannot copy the model.
  """
  why = []
  # clone_model compiles the copy of a compiled model, with a new optimizer.
  with _copying:
    compiled = model.compiled
    try:
      model.compiled = False
      for make in _from_config, keras.models.clone_model:
        try:
          copy = make(model)
          counterparts = _counterparts(model, copy)
        except Exception as e:  # Keras's, one of the model's class, or ours.
          why.append(e)
          continue
        for v, value in zip(counterparts, weights, strict=True):
          v.assign(value)
        copy.compiled = False  # Some classes compile what they make.
        return copy
    finally:
      model.compiled = compiled
  reasons = " ".join(dict.fromkeys(str(e).strip() for e in why))
  raise ValueError(
      "`model` must be one that from_config() or keras.models.clone_model can "
      f"copy, got '{model.name}', a {type(model).__qualname__}. {reasons} Give "
      "the class get_config() and build(), or make the copy yourself and call "
      "its set_weights(model.get_weights()) inside averaged_weights(model)."
  ) from why[0]


def _from_config(model):
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # If it fails, there are other ways.
    config = keras.saving.serialize_keras_object(model)
    copy = type(model).from_config(config["config"])
    if config.get("build_config") and not copy.built:
      copy.build_from_config(config["build_config"])
  return copy


def _counterparts(model, copy):
  """The weights of a copy, in the order of those of the model.

  A weight and its counterpart have the same place: attributes, and the layers
  of functional and sequential models, lead to it. Neither names that Keras
  makes nor the order of the weights matter.

  Raises:
    ValueError: If the copy is none.
  """
  # clone_model makes a plain functional model of one of a class.
  _require(type(copy).call is type(model).call,
           f"The copy is a {type(copy).__qualname__}.")
  found = _weights_at_places(model, copy)
  ours, its = model.weights, {id(v): v for v in copy.weights}
  _require(not {*map(id, model.variables)} & {*map(id, copy.variables)},
           "The copy shares variables with the model.")
  _require(len(its) == len(ours), f"The copy has {len(its)} weights, the model "
           f"{len(ours)}.")
  pairs = {id(v): [y for y in found.get(id(v), ()) if id(y) in its]
           for v in ours}
  # Those that no attribute holds.
  taken = {id(y) for ys in pairs.values() for y in ys}
  left = (y for key, y in its.items() if key not in taken)
  for v in ours:
    if not pairs[id(v)]:
      pairs[id(v)] = [y for y in itertools.islice(left, 1) if y.name == v.name]
    _require(len(pairs[id(v)]) == 1,
             f"The copy has {len(pairs[id(v)])} weights in place of "
             f"'{v.path}'.")
    y = pairs[id(v)][0]
    _require(y.shape == v.shape and y.dtype == v.dtype,
             f"The weight '{v.path}' has dtype {v.dtype} and shape {v.shape}, "
             f"in the copy {y.dtype} and {y.shape}.")
  found = [pairs[id(v)][0] for v in ours]
  _require(len({*map(id, found)}) == len(ours),
           "Weights of the model are one weight in the copy.")
  return found


def _weights_at_places(model, copy):
  """{id of a variable: a list of variables of the copy at its places}."""
  found, seen = {}, set()

  def walk(x, y):
    if isinstance(x, (dict, list, tuple)):
      for a, b in _at_same_places(x, y):
        walk(a, b)
      return
    if not isinstance(x, (keras.Variable, keras.layers.Layer)) or (
        id(x), id(y)) in seen:
      return
    seen.add((id(x), id(y)))
    if isinstance(x, keras.Variable):
      found.setdefault(id(x), []).append(y)
      return
    if x is not model:
      _compare(x, y)
    if isinstance(x, (functional.Functional, keras.Sequential)):
      names = [[layer.name for layer in m.layers] for m in (x, y)]
      walk(*(dict(zip(n, m.layers)) if {*names[0]} == {*names[1]}
             else m.layers for n, m in zip(names, (x, y))))
    walk(*({name: value for name, value in vars(layer).items()
            if name not in _attributes_of_keras()} for layer in (x, y)))

  walk(model, copy)
  return found


def _at_same_places(x, y):
  """The pairs of what two containers hold at the same places: a list."""
  if isinstance(x, dict) and isinstance(y, dict):
    return [(x[key], y[key]) for key in x if key in y]
  if isinstance(y, (list, tuple)) and len(x) == len(y):
    return list(zip(x, y))
  return []


def _compare(x, y):
  """Raises an error if a layer of a copy computes something else."""
  subject = f"The layer '{x.path or x.name}'"
  _require(type(x) is type(y), f"{subject} is a {type(x).__qualname__}, in the "
           f"copy a {type(y).__qualname__}.")
  if getattr(x, "lora_enabled", False) and not y.lora_enabled:
    y.enable_lora(x.lora_rank, x.lora_alpha)
  if isinstance(x, (functional.Functional, keras.Sequential,
                    keras.layers.InputLayer)):
    return  # It computes nothing by itself.
  settings, its = _settings(x), _settings(y)
  different = [key for key in settings if its.get(key) != settings[key]]
  _require(not different, f"{subject} has another "
           f"{', '.join(map(repr, different))} in the copy.")


def _settings(layer):
  """The numbers and words of a layer's configuration: a dict."""
  try:
    config = layer.get_config()
  except Exception:  # It has none.
    config = {}
  found = {key: repr(_listed(x)) for key, x in config.items()
           if key not in _FREE and _is_plain(x)}
  return {**found, "compute_dtype": layer.compute_dtype}


def _is_plain(x):
  return x is None or isinstance(x, (bool, int, float, str)) or (
      isinstance(x, (list, tuple)) and all(map(_is_plain, x)))


def _listed(x):
  """`x` with lists for tuples."""
  return list(map(_listed, x)) if isinstance(x, (list, tuple)) else x


@functools.cache
def _attributes_of_keras():
  """Attributes of each layer and model, which say nothing about one class."""
  x = keras.Input((1,), name="input")
  y = keras.layers.Identity(name="identity")(x)
  return {name for layer in (
      keras.layers.Layer(name="layer"), keras.Model(x, y, name="functional"),
      keras.Sequential([x], name="sequential")) for name in vars(layer)}


def _require(is_right, why):
  if not is_right:
    raise ValueError(why)
