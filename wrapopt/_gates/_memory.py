"""The memory of a policy that compensates gradients for their age."""

import tensorflow as tf

from wrapopt import _types
from wrapopt import _lookup_cache
from wrapopt._gates import _compensation
from wrapopt._gates import _origins
from wrapopt._gates import _records

tf1 = tf.compat.v1


class Memory:
  """The slots of a policy in an optimizer of tf.compat.v1."""

  def __init__(self, opt, policy, records):
    """Makes no slot yet.

    Args:
      opt: The optimizer.
      policy: The policy.
      records: The optimizer's `_recorder.Recorder`.
    """
    self._opt, self._policy, self._records = opt, policy, records
    self._cache = _lookup_cache.LookupCache()

  def compensated(self, grads_and_vars, recorded, origins):
    """The `_compensation.Compensated` of a step."""
    grads, variables = _lookup_cache.trained(grads_and_vars)
    facts = (self._cache.get(variables) if tf.executing_eagerly()
             else None)
    for v in variables if facts is None else ():
      if v.dtype.base_dtype not in _types.FLOATS:
        raise TypeError(
            f"A compensated variable must be of a floating dtype, got "
            f"'{v.name}' of {v.dtype.base_dtype.name}.")
    pairs = list(zip(grads, variables))
    if origins is not None:
      found = _given_origins(grads_and_vars, list(origins))
    elif tf.executing_eagerly():
      found = _origins.of_values(
          pairs, lambda g, v: self._records.weights_of(g, v, recorded))
    else:
      found = _origins.in_graph(pairs)
    if facts is None:
      self._records.known.add(variables)
      self.make(variables)
      states = {name: {id(v): self._opt.get_slot(v, name) for v in variables}
                for name in self._policy._states}
      if tf.executing_eagerly():
        self._cache.add(variables)["states"] = states
    else:
      states = facts["states"]
    return _compensation.Compensated(self._policy, found, states)

  def make(self, variables):
    """Makes the missing slots of the policy."""
    with tf.init_scope(), self._opt._making_state():
      for v in variables:
        for name in self._policy._states:
          self._opt._get_or_make_slot_with_initializer(
              v, tf1.zeros_initializer(), v.shape,
              _compensation.computed_dtype(v.dtype), name,
              type(self._policy).__name__)


def _given_origins(pairs, origins):
  """The argument `origins` as {id of a variable: tensor}."""
  if len(origins) != len(pairs):
    raise ValueError(f"`origins` must hold one tensor or None for each of the "
                     f"{len(pairs)} pairs, got {len(origins)}.")
  found = {}
  for i, ((g, v), origin) in enumerate(zip(pairs, origins)):
    if g is None:
      continue
    if origin is None:
      raise ValueError(f"`origins[{i}]` must be the weights that the gradient "
                       f"of '{v.name}' was computed from, got None.")
    found[id(v)] = _checked_origin(f"`origins[{i}]`", origin, g, v)
  return found


def _checked_origin(name, origin, gradient, variable):
  origin = tf.convert_to_tensor(origin)
  if origin.dtype.base_dtype != variable.dtype.base_dtype:
    raise TypeError(
        f"{name} must be of dtype {variable.dtype.base_dtype.name}, that of "
        f"'{variable.name}', got {origin.dtype.base_dtype.name}.")
  shape = _records.tensor_of(gradient).shape
  if not origin.shape.is_compatible_with(shape):
    raise ValueError(f"{name} misshapen: got {origin.shape} but expected "
                     f"{shape} (the shape of the gradient of "
                     f"'{variable.name}').")
  if _origins.is_in_place(origin):
    raise ValueError(
        f"{name} must be a copy of the weights, got the buffer of "
        f"'{variable.name}', which every step changes. Pass a copy that was "
        "made before the gradient was computed.")
  return origin
