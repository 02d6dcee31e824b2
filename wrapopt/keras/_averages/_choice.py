"""The argument `variables` of the Keras wrappers that keep averages."""

import collections

import keras
import tensorflow as tf

from wrapopt._averages import _choice
from wrapopt.keras._variables import path_of, value_of


def checked(variables):
  """An argument `variables`, checked."""
  return _choice.checked(
      variables,
      lambda x: [x] if isinstance(x, (str, keras.Variable, tf.Variable))
      else None, "a variable or the path of one")


def of(chosen, wrapper, candidates):
  """Selects the variables that an optimizer averages.

  Args:
    chosen: The result of `checked`.
    wrapper: The name of the optimizer's class.
    candidates: The variables that it can average.

  Returns:
    {index in `candidates`: variable}.

  Raises:
    TypeError: If a function does not return a bool.
    ValueError: If no variable is selected, or a listed one is no candidate.
  """
  if chosen is None or not candidates:
    return dict(enumerate(candidates))
  if callable(chosen):
    found = {i: v for i, v in enumerate(candidates)
             if _choice.answer(chosen, v, path_of(v))}
    if not found:
      raise ValueError(
          f"`variables` of a {wrapper} must select at least one variable, got "
          f"False for all {len(candidates)}.")
    return found
  by_id = {id(value_of(v)): i for i, v in enumerate(candidates)}
  paths = list(map(path_of, candidates))
  indices = set()
  for x in chosen:
    path = x if isinstance(x, str) else path_of(x)
    places = (_places(x, paths) if isinstance(x, str) else
              [by_id[id(value_of(x))]] if id(value_of(x)) in by_id
              else [])
    if len(places) != 1:
      raise ValueError(
          f"`variables` of a {wrapper} must hold variables that the optimizer "
          f"trains, or their paths, got '{path}', which is "
          f"{'a path of several of them' if places else 'none of them'}. It "
          f"trains {', '.join(map(repr, paths))}.")
    indices.update(places)
  return {i: candidates[i] for i in sorted(indices)}


def _places(path, paths):
  """The indices of the variables that a path is meant for.

  These are those of that path. If there is none, the first part of either path
  may be missing: Keras names the variables of a Sequential after it when it
  makes them, but not when it loads them.
  """
  exact = [i for i, x in enumerate(paths) if x == path]
  return exact or [i for i, x in enumerate(paths)
                   if x.endswith(f"/{path}") or path.endswith(f"/{x}")]


def serialized(chosen, wrapper, trained):
  """An argument `variables` in a configuration.

  Args:
    chosen: The result of `checked`.
    wrapper: The name of the optimizer's class.
    trained: The variables that the optimizer trains; empty if not known.

  Returns:
    None, a list of paths, or the configuration of a function.

  Raises:
    ValueError: If a function is not registered, or a path is not unique.
  """
  if chosen is None:
    return None
  if callable(chosen):
    return serialized_function(chosen, "variables", "a list", wrapper)
  paths = [x if isinstance(x, str) else path_of(x) for x in chosen]
  count = collections.Counter(map(path_of, trained))
  for path in paths:
    if count[path] > 1:
      raise ValueError(
          f"`variables` of a {wrapper} that is saved must hold variables with "
          f"paths of their own, got '{path}', which {count[path]} variables "
          "have. Give the layers different names, or save the model with "
          "save_weights().")
  return paths


def serialized_function(function, argument, other, wrapper):
  """A function that is an argument of a wrapper, in a configuration.

  Args:
    function: The function.
    argument: The name of the argument.
    other: What else it may be, for errors.
    wrapper: The name of the optimizer's class.

  Raises:
    ValueError: If it is not registered.
  """
  name = keras.saving.get_registered_name(function)
  if keras.saving.get_registered_object(name) is function:
    return keras.saving.serialize_keras_object(function)
  raise ValueError(
      f"`{argument}` of a {wrapper} that is saved must be {other}, or a "
      "function registered by keras.saving.register_keras_serializable, got "
      f"{function!r}. Save the model with save_weights().")
