"""Whose the averages in a file are.

A file tells of each average the path, shape and dtype of its variable, and a
checksum of the value that the variable had. A path alone does not tell: Keras
counts names up in a process, so a model that is built again has other paths,
and another model may have the same ones. If the weights are loaded from the
same file, the checksum tells.
"""

import functools
import json
import re
import typing
import zlib

import numpy as np

# The last part of the key of what tells it.
KEY = "variables"


class Owner(typing.NamedTuple):
  """The variable of an average.

  Attributes:
    path: Its path.
    shape: Its shape: a list.
    dtype: The name of its dtype.
    checksum: One of the bytes of its value; None if it has none yet.
    is_constant: Whether its value tells little: all elements are equal, or the
      only one is 0 or 1.
  """
  path: str
  shape: list
  dtype: str
  checksum: typing.Optional[int]
  is_constant: bool

  @classmethod
  def of(cls, path, like, value):
    """Describes a variable by its path and its value, an array or None."""
    shape, dtype = list(map(int, like.shape)), like.dtype.name
    if value is None:
      return cls(path, shape, dtype, None, False)
    value = np.ascontiguousarray(value).reshape(-1)
    flat = value.view(np.uint8).reshape(len(value), value.dtype.itemsize)
    return cls(path, shape, dtype, zlib.crc32(flat), bool(
        float(value[0]) in (0, 1) if len(value) == 1 else
        (flat == flat[:1]).all()))


def to_array(owners):
  """{name of averages: {index: Owner}} as an array for a file."""
  return np.frombuffer(json.dumps(owners).encode(), np.uint8)


def from_array(array):
  """The reverse of `to_array`."""
  return {name: {int(i): Owner(*owner) for i, owner in of_name.items()}
          for name, of_name in json.loads(
              np.asarray(array, np.uint8).tobytes()).items()}


def match(ours, saved, is_known):
  """Finds the averages of variables in a file.

  Args:
    ours: {key: Owner} of the variables.
    saved: {key: Owner} of the file.
    is_known: A function of a key of `ours`: whether the variable has its value
      from the file, so that an average of another value is another variable's.

  Returns:
    {key of `ours`: key of `saved`}.
  """
  found, left = {}, dict(saved)

  def take(fits):
    for key, owner in ours.items():
      if key not in found:
        other = next((other for other, its in left.items()
                      if owner.shape == its.shape and fits(key, owner, its)),
                     None)
        if other is not None:
          found[key] = other
          del left[other]

  def same_value(a, b):
    return a.checksum is not None and a.checksum == b.checksum

  def possible(key, a, b):
    return a.dtype != b.dtype or not is_known(key)

  take(lambda _, a, b: same_value(a, b) and a.path == b.path)
  take(lambda _, a, b: same_value(a, b) and is_like(a.path, b.path))
  # Of a model whose layers have other names.
  take(lambda _, a, b: same_value(a, b) and not a.is_constant)
  weights_are_loaded = any(not ours[key].is_constant for key in found)
  take(lambda key, a, b: a.path == b.path and possible(key, a, b))
  if not weights_are_loaded:
    take(lambda key, a, b: is_like(a.path, b.path) and possible(key, a, b))
  return found


def may_fit(owner, saved):
  """Whether the average of a variable may be in a file under another name.

  Args:
    owner: An Owner.
    saved: {key: Owner} of the file.
  """
  return any(owner.shape == its.shape and is_like(owner.path, its.path)
             for its in saved.values())


def is_like(path, other):
  """Whether two paths differ only in what Keras makes of them.

  Keras counts names up, and a Sequential's variables have its name in their
  paths if it has made them, not if it was loaded.
  """
  parts, others = _uncounted(path), _uncounted(other)
  n = min(len(parts), len(others))
  return parts[-n:] == others[-n:] and abs(len(parts) - len(others)) <= 1


@functools.lru_cache(maxsize=4096)
def _uncounted(path):
  return [re.sub(r"_\d+$", "", part) for part in path.split("/")]
