"""How a model's variables are divided between the servers of its center."""

import typing

import numpy as np
import tensorflow as tf

# The numbers of a piece, of which a call carries one or more: 256 KiB of
# float32, so that a slow link takes a second at most. Codes have whole blocks.
PIECE = 2**16


class Piece(typing.NamedTuple):
  """A part of a group that is a vector of its own on a server.

  Attributes:
    group: The index of the group.
    begin: Its first element in the group.
    end: One past its last element.
  """
  group: int
  begin: int
  end: int


class Layout:
  """The groups of variables, and the pieces of each server.

  The variables of one dtype are a group: their elements, one variable after
  another. Each server holds an equal part of each group.

  Attributes:
    travels: The dtype of the codes that travel, or None for the numbers.
    dtypes: The dtype of each group, in which workers send values.
    center_dtypes: The dtype of each group in the center: float64 for float64,
      float32 for others.
    pieces: For each server, its Pieces. Those of groups that take outer steps
      come first.
    stepped: For each server, the number of these.
  """

  def __init__(self, variables, num_servers, travels=None):
    """Divides variables.

    Args:
      variables: Variables of Settings: those that take outer steps come first.
      num_servers: The number of servers.
      travels: The dtype of the codes that travel, or None.
    """
    self.travels = travels
    self._variables = variables
    groups = {}  # (whether averaged, dtype): indices of variables.
    for i, v in enumerate(variables):
      groups.setdefault((v.averaged, v.dtype), []).append(i)
    self._groups = list(groups.values())
    self.dtypes = [tf.as_dtype(dtype) for _, dtype in groups]
    self.center_dtypes = [
        tf.float64 if dtype == tf.float64 else tf.float32
        for dtype in self.dtypes]
    self._sizes = [[int(np.prod(self._variables[i].shape)) for i in group]
                   for group in self._groups]
    self.pieces = [[] for _ in range(num_servers)]
    self.stepped = [0] * num_servers
    for g, (is_averaged, _) in enumerate(groups):
      size = sum(self._sizes[g])
      bounds = [-(-size * s // num_servers) for s in range(num_servers + 1)]
      for s in range(num_servers):
        of_server = [
            Piece(g, begin, min(begin + PIECE, bounds[s + 1]))
            for begin in range(bounds[s], bounds[s + 1], PIECE)]
        self.pieces[s] += of_server
        self.stepped[s] += 0 if is_averaged else len(of_server)

  def flatten(self, values, dtypes):
    """One vector for each group, of values of all variables (NumPy arrays)."""
    return [
        np.concatenate([np.ravel(values[i]) for i in group]).astype(
            dtype.as_numpy_dtype, copy=False)
        for group, dtype in zip(self._groups, dtypes)]

  def split(self, vectors):
    """Arrays of the shapes of all variables, of a vector for each group."""
    values = [None] * len(self._variables)
    for group, sizes, vector in zip(self._groups, self._sizes, vectors):
      for i, part in zip(group, np.split(vector, np.cumsum(sizes)[:-1])):
        values[i] = part.reshape(self._variables[i].shape)
    return values

  def empty(self):
    """A vector for each group of the center."""
    return [np.empty(sum(sizes), dtype.as_numpy_dtype)
            for sizes, dtype in zip(self._sizes, self.center_dtypes)]
