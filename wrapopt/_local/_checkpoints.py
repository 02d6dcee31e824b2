"""The centers in checkpoints of `tf.train.Checkpoint`."""

import itertools
import os

import numpy as np
import tensorflow as tf

from wrapopt._local import _layout
from wrapopt._local import _settings


def find(path, worker):
  """The tensors of the center that is in a checkpoint, by name.

  Args:
    path: That of a checkpoint, or a directory, whose latest one is taken.
    worker: The name of the worker.

  Returns:
    NumPy arrays, by name; None if `path` is a directory without checkpoints.
  """
  folder, path = os.fspath(path), os.fspath(path)
  if not tf.io.gfile.exists(path + ".index"):
    path = tf.train.latest_checkpoint(folder)
    if path is None:
      tf.get_logger().warning(
          "There is no checkpoint in %s: worker '%s' begins without one.",
          folder, worker)
      return None
  reader = tf.train.load_checkpoint(path)
  objects = {}  # Their tensors, by the names of objects that have a center.
  for key in reader.get_variable_to_shape_map():
    name, _, tensor = key.rpartition("/.ATTRIBUTES/")
    objects.setdefault(name, {})[tensor] = key
  objects = {name: keys for name, keys in objects.items()
             if {"round", "center_0", "variables"} <= keys.keys()}
  if len(objects) != 1:
    raise ValueError(
        "`checkpoint` must be of a tf.train.Checkpoint with one LocalSGD or "
        f"DiLoCo, got {path!r} with {len(objects)} of them"
        + (f": {', '.join(sorted(objects))}" if objects else "") + ".")
  (_, keys), = objects.items()
  return {tensor: reader.get_tensor(key) for tensor, key in keys.items()}


# The names of tensors: the center, and what the codes of servers and of the
# worker that has written them have lost.
_NAMES = ("center", "velocity", "error", "own_error")


def write(described, worker, saved):
  """The tensors of a center, by name.

  Args:
    described: The `_settings.Variable`s.
    worker: The name of the worker.
    saved: For each fragment (round, center, velocities, errors of the servers,
      errors of the worker), lists of arrays, one for each of its variables.
  """
  rounds, *values = zip(*saved)
  layout = _layout.Layout(described, 1)
  tensors = {
      "round": tf.constant(rounds if len(rounds) > 1 else rounds[0], tf.int64),
      "variables": tf.constant([v.write() for v in described])}
  if any(values[-1]):
    tensors["worker"] = tf.constant(worker)
  for what, of_fragments in zip(_NAMES, values):
    if arrays := list(itertools.chain(*of_fragments)):
      tensors.update((f"{what}_{g}", tf.constant(x)) for g, x in enumerate(
          layout.flatten(arrays, layout.center_dtypes)))
  return tensors


def read(described, worker, tensors, fragments, only_finite):
  """What `write` has saved, maybe in another number of fragments.

  Args:
    described: The `_settings.Variable`s.
    worker: The name of the worker, which takes back its own errors.
    tensors: NumPy arrays, by name.
    fragments: The `_fragments.Fragment`s.
    only_finite: Whether the values must be finite.

  Returns:
    For each fragment what `Member.restore` takes: (round, center, velocities,
    errors of the servers, errors of the worker), lists of vectors, one for each
    group of its layout.
  """
  found = [
      _settings.Variable.read(text.decode()) for text in tensors["variables"]]
  for i, (got, v) in enumerate(itertools.zip_longest(found, described)):
    if got is None or v is None or got[1:] != v[1:]:
      raise ValueError(
          "A checkpoint must have the center of the same variables, in the "
          f"same order, got for variable {i}: {got and got.write()!r} in the "
          f"file, {v and v.write()!r} here.")
  layout = _layout.Layout(described, 1)
  rounds = np.ravel(tensors["round"]).tolist()
  if len(rounds) != len(fragments):
    rounds = [max(rounds)] * len(fragments)
  values = []
  is_own = tensors.get("worker") == worker.encode()
  for what in _NAMES:
    vectors = [tensors[key] for key in sorted(tensors)
               if key.startswith(what + "_") and (
                   what != "own_error" or is_own)]
    if only_finite and not all(np.isfinite(x).all() for x in vectors):
      raise ValueError("The center and the velocity of a checkpoint must be "
                       "finite, got NaN or infinity: restore an earlier one.")
    arrays = iter(layout.split(vectors) if vectors else [])
    values.append([
        f.layout.flatten(list(itertools.islice(arrays, len(f.variables))),
                         f.layout.center_dtypes)
        if vectors and (f.layout.travels or "error" not in what) else []
        for f in fragments])
  return list(zip(rounds, *values))
