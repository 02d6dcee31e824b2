"""Weighted sums of checkpoints, a few variables at a time."""

import collections
import concurrent.futures
import contextlib
import math
import numbers
import os
import re
import typing

import numpy as np

from wrapopt import _native
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _places
from wrapopt.checkpoints import _source

# The limit of bytes that are read and not yet summed, or twice the largest
# variable if that is more.
_IN_FLIGHT = 256 << 20
# The size in bytes of the parts in which a large variable is read.
_PART = 4 << 20


def weighted(inputs, output, weights, only=None, progress=None):
  """Writes a weighted sum of checkpoints.

  Args:
    inputs: Sources.
    output: The path of the output.
    weights: A number for each input.
    only: A regular expression, or None: see `wrapopt.checkpoints.merge`.
    progress: A function that makes a progress bar from tqdm's arguments, or
      None.

  Raises:
    The same errors as `wrapopt.checkpoints.merge`.
  """
  last = inputs[-1]
  _formats.check_output(output, last)
  names = check(inputs, only)
  specs = {name: last.specs[name]._replace(dtype=last.dtype(name))
           for name in names}
  # Inputs of weight 0 are not read.
  summed = [(s, weight) for s, weight in zip(inputs, weights) if weight != 0]
  read = sum(s.specs[name].nbytes for s, _ in summed for name in names)
  for source in inputs:
    source.drops_pages = _places.is_too_much(read)
  _verify({last, *(s for s, _ in summed)})
  # Errors of the output are those of `Sink`.
  with _files.naming(last.path, "cannot be copied"):
    sink = _formats.sink_like(last, output, specs)
  sink.drops_pages = last.drops_pages
  try:
    with contextlib.ExitStack() as stack:
      bar = stack.enter_context(progress(
          total=read, unit="B", unit_scale=True,
          desc=os.path.basename(output))) if progress else None
      _sum(*zip(*summed), names, specs, sink, bar)
      with _files.naming(last.path, "cannot be copied"):
        sink.copy(last, [name for name in last.specs if name not in specs])
    sink.publish(lambda: [s.check_unchanged() for s in inputs])
  finally:
    sink.discard()


def _verify(sources):
  """Verifies checksums of Sources that are not verified as they are read."""
  with concurrent.futures.ThreadPoolExecutor(
      len(os.sched_getaffinity(0))) as pool:
    for _ in pool.map(_verify_one, sources):
      pass


def _verify_one(source):
  with _files.naming(source.path, "cannot be read"):
    source.verify()


def averaged(source, only=None):
  """Names of the variables of a Source that are to be averaged.

  Args:
    source: A Source.
    only: As in `weighted`.

  Returns:
    A list, sorted.
  """
  try:
    wanted = (source.is_averaged if only is None else
              re.compile(only).search)
  except re.error as e:
    raise ValueError(f"`only` must be a regular expression, got {only!r}: {e}."
                    ) from e
  return sorted(name for name, spec in source.specs.items()
                if spec.dtype in _source.FLOATS and wanted(name))


def check(inputs, only=None):
  """Checks checkpoints, and returns the variables to sum.

  Args:
    inputs: Sources.
    only: As in `weighted`.

  Returns:
    A sorted list of names.

  Raises:
    ValueError: If the checkpoints have different variables or shapes, or there
      is no variable to sum.
  """
  last = inputs[-1]
  names = averaged(last, only)
  known = set(names)
  if not names:
    raise ValueError(
        f"{last.path} must have floating-point variables to average" +
        (f" that match '{only}'" if only is not None else "") +
        f", got {_few(sorted(last.specs))}.")
  for source in inputs[:-1]:
    for name in names:
      spec, expected = source.specs.get(name), last.specs[name]
      if spec is None:
        raise ValueError(
            f"{source.path} must have the variable '{name}', which {last.path} "
            f"has, got {_few(sorted(source.specs))}. All inputs must be of one "
            "model.")
      if spec.shape != expected.shape:
        raise ValueError(
            f"Variable '{name}' of {source.path} misshapen: got "
            f"{list(spec.shape)} but expected {list(expected.shape)} (its "
            f"shape in {last.path}).")
      if spec.dtype not in _source.FLOATS:
        raise ValueError(
            f"Variable '{name}' of {source.path} must be of dtype "
            f"{', '.join(map(str, _source.FLOATS))}, as in {last.path}, got "
            f"{spec.dtype}.")
    of_source = averaged(source, only)
    for name in of_source:
      if name in last.specs and name not in known:
        raise ValueError(
            f"Variable '{name}' must be averaged in all inputs or in none, got "
            f"one of dtype {source.specs[name].dtype} in {source.path} and "
            f"{_why_not(last, name)} in {last.path}. All inputs must be of one "
            "model.")
    more = [name for name in of_source if name not in last.specs]
    if more:
      raise ValueError(
          f"{source.path} must not have variables that {last.path} lacks, got "
          f"{_few(more)}. All inputs must be of one model.")
  return names


def _why_not(source, name):
  """Why a variable is not averaged by default."""
  dtype = source.specs[name].dtype
  if dtype not in _source.FLOATS:
    return f"one of dtype {dtype}"
  return ("one that is no average" if source.note else
          "state of an optimizer")


def checked_weights(weights, count):
  """Scales the weights of `count` inputs to a sum of 1: a list."""
  if weights is None:
    return [1 / count] * count
  weights = list(weights)
  for weight in weights:
    if not isinstance(weight, numbers.Real) or not _is_finite(weight):
      raise ValueError(f"`weights` must be finite numbers, got {weights}.")
  if len(weights) != count:
    raise ValueError(f"`weights` must hold one number for each of the {count} "
                     f"inputs, got {len(weights)}.")
  # In units of a power of two, which is exact: the sum of large numbers may
  # overflow.
  weights = [float(weight) for weight in weights]
  exponent = max((math.frexp(weight)[1] for weight in weights), default=0)
  scaled = [math.ldexp(weight, -exponent) for weight in weights]
  total = math.fsum(scaled)
  if not total > 0:
    raise ValueError("The sum of `weights` must be greater than 0, got "
                     f"{sum(weights):g}.")
  return [weight / total for weight in scaled]


def _is_finite(number):
  try:
    return math.isfinite(number)
  except OverflowError:  # An integer that no float can hold.
    return False


def _few(names):
  if not names:
    return "none"
  return ", ".join(map(repr, names[:3])) + (
      f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Piece(typing.NamedTuple):
  """A variable, or some rows of it.

  Attributes:
    name: The name of the variable.
    rows: A slice of the first dimension, or None.
    shape: The shape of the piece.
  """
  name: str
  rows: typing.Any
  shape: tuple[int, ...]

  @property
  def size(self):
    return math.prod(self.shape)


def _pieces(inputs, names, specs, itemsize):
  """Variables in order, in pieces of about `_PART` bytes if possible."""
  for name in names:
    shape = specs[name].shape
    nbytes = math.prod(shape) * itemsize[name]
    if nbytes <= _PART or not all(s.can_slice(name) for s in inputs):
      yield _Piece(name, None, shape)
      continue
    step = max(1, _PART * shape[0] // nbytes)
    for first in range(0, shape[0], step):
      end = min(first + step, shape[0])
      yield _Piece(name, slice(first, end), (end - first, *shape[1:]))


def _batches(pieces, itemsize, limit):
  """Lists of pieces to read together, of at most `limit` bytes or one piece."""
  batch, total = [], 0
  for piece in pieces:
    # Each piece begins at a cache line.
    nbytes = -(-piece.size * itemsize[piece.name] // 64) * 64
    if batch and total + nbytes > limit:
      yield batch, total
      batch, total = [], 0
    batch.append(piece)
    total += nbytes
  if batch:
    yield batch, total


def _sum(inputs, weights, names, specs, sink, bar):
  """Sums `names` of the inputs into the sink."""
  itemsize = {name: max(s.specs[name].dtype.itemsize for s in inputs)
              for name in names}
  pieces = list(_pieces(inputs, names, specs, itemsize))
  largest = max(piece.size * itemsize[piece.name] for piece in pieces)
  # One half is read while the other is summed.
  half = max(_IN_FLIGHT // 2, largest)
  batches = list(_batches(pieces, itemsize, half // len(inputs)))
  longest = max(nbytes for _, nbytes in batches)
  group = max(1, min(len(inputs), half // max(longest, 1)))
  rounds = [(batch, first) for batch, _ in batches
            for first in range(0, len(inputs), group)]
  buffers = [[np.empty(longest, np.uint8) for _ in range(group)]
             for _ in range(2)]
  # Batches that may wait while a file is sent to the disk.
  writable = max(1, half // longest)
  threads = len(os.sched_getaffinity(0))
  with (concurrent.futures.ThreadPoolExecutor(2 * threads) as readers,
        concurrent.futures.ThreadPoolExecutor(threads) as summers,
        concurrent.futures.ThreadPoolExecutor(1) as writer):

    def read(i):
      batch, first = rounds[i]
      return [readers.submit(_read, source, batch, buffer) for source, buffer in
              zip(inputs[first:first + group], buffers[i % 2])]

    coming, writing = read(0), collections.deque()
    for i, (batch, first) in enumerate(rounds):
      values = [future.result() for future in coming]
      if i + 1 < len(rounds):
        coming = read(i + 1)
      is_last = first + group >= len(inputs)
      if first == 0:
        sums = (None if is_last else
                [np.empty(piece.shape, np.float64) for piece in batch])
      outputs = ([np.empty(piece.shape, specs[piece.name].dtype)
                  for piece in batch] if is_last else None)
      for k, piece in enumerate(batch):
        _merge(summers, threads, [of_input[k] for of_input in values],
               weights[first:first + group], sums and sums[k],
               outputs and outputs[k], first == 0)
      if is_last:
        if len(writing) == writable:
          writing.popleft().result()
        writing.append(writer.submit(sink.write, [
            (piece.name, piece.rows, x) for piece, x in zip(batch, outputs)]))
      if bar is not None:
        bar.update(sum(x.nbytes for of_input in values for x in of_input))
      del values, outputs
    for future in writing:
      future.result()


def _read(source, batch, buffer):
  """The values of a batch: a list of arrays, in `buffer` if it is not None."""
  values, begin = [], 0
  for piece in batch:
    dtype = source.specs[piece.name].dtype
    nbytes = piece.size * dtype.itemsize
    into = buffer[begin:begin + nbytes].view(dtype).reshape(piece.shape)
    begin += -(-nbytes // 64) * 64
    values.append(source.read(piece.name, piece.rows, into))
  return values


def _merge(pool, threads, inputs, weights, sums, output, is_first):
  """Runs the native kernel, in several threads for large arrays."""
  size = inputs[0].size
  # A multiple of the kernel's block.
  step = max(1 << 16, -(-size // threads // 2048) * 2048)

  def run(begin):
    _native.merge(inputs, weights, sums, output, is_first, begin,
                  min(size, begin + step))

  if size <= step:
    run(0)
  else:
    list(pool.map(run, range(0, size, step)))
