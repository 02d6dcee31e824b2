"""Weighted sums of checkpoints, one variable after the other."""

import concurrent.futures
import contextlib
import math
import os
import re

import numpy as np

from wrapopt import _checks
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _source

# The number of elements that are added at once.
_BLOCK = 1 << 15


def weighted(inputs, output, weights, only=None, progress=None):
  """Writes a weighted sum of checkpoints.

  Args:
    inputs: Sources.
    output: The argument `output` of `wrapopt.checkpoints.merge`.
    weights: A number for each input.
    only: A regular expression, or None: see `wrapopt.checkpoints.merge`.
    progress: A function that makes a progress bar from tqdm's arguments, or
      None.

  Raises:
    The same errors as `wrapopt.checkpoints.merge`.
  """
  last, output = inputs[-1], _files.path("output", output)
  _formats.check_output(output, last)
  names = check(inputs, only)
  # Inputs of weight 0 are not read.
  summed = [(s, weight) for s, weight in zip(inputs, weights) if weight != 0]
  for source in {last, *(s for s, _ in summed)}:
    with _files.naming(source.path, "cannot be read"):
      source.verify()
  with contextlib.ExitStack() as stack:
    # Errors of what is read, and of the output, name their files already.
    with _files.naming(last.path, "cannot be copied"):
      sink = last.output().Sink(output, like=last)
      stack.callback(sink.discard)
      bar = stack.enter_context(progress(
          total=sum(s.specs[name].nbytes for s, _ in summed for name in names),
          unit="B", unit_scale=True, desc=os.path.basename(output)
      )) if progress else None
      for name, value in stack.enter_context(
          contextlib.closing(_sums(summed, names, bar))):
        sink.write(name, _rounded(value, last.dtype(name)))
      for name in sorted(last.specs.keys() - {*names}):
        sink.copy(last, name)
    sink.publish(lambda: [s.check_unchanged() for s in inputs])


def _sums(summed, names, bar):
  """Yields variables and their weighted sums in float64.

  Args:
    summed: [(Source, weight)].
    names: The names of the variables.
    bar: A progress bar, or None.
  """
  reads = (source.read(name) for name in names for source, _ in summed)
  with concurrent.futures.ThreadPoolExecutor(1) as reader:
    coming = reader.submit(next, reads)
    for name in names:
      # Nothing changes when it is added to -0, not even -0.
      total = np.full(summed[0][0].specs[name].shape, -0.0)
      for _, weight in summed:
        # One value is read while the one before is added.
        value, coming = coming.result(), reader.submit(next, reads, None)
        _add(total.reshape(-1), value.reshape(-1), weight)
        if bar is not None:
          bar.update(value.nbytes)
      yield name, total


def _add(total, value, weight):
  """Adds a weighted array, in blocks that stay in the processor's cache."""
  with np.errstate(over="ignore", invalid="ignore"):
    for begin in range(0, value.size, _BLOCK):
      block = value[begin:begin + _BLOCK].astype(np.float64)
      block *= weight
      total[begin:begin + _BLOCK] += block


def _rounded(value, dtype):
  """Rounds float64 numbers once, to nearest even."""
  with np.errstate(over="ignore", invalid="ignore"):
    if dtype != _source.BFLOAT16:
      return value.astype(dtype)
    # NumPy's bfloat16 is rounded from float32. So the first of two roundings is
    # to odd: it keeps that a number is not exact.
    near = value.astype(np.float32)
    other = np.nextafter(near, np.where(
        value > near, np.float32(np.inf), np.float32(-np.inf)))
    is_even = near.view(np.uint32) % 2 == 0
    return np.where(is_even & (near != value), other, near).astype(dtype)


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
    wanted("")  # An expression for bytes finds no string.
  except (re.error, TypeError) as e:
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
            f"one {why_not(last, name)} in {last.path}. All inputs must be of "
            "one model.")
    more = [name for name in of_source if name not in last.specs]
    if more:
      raise ValueError(
          f"{source.path} must not have variables that {last.path} lacks, got "
          f"{_few(more)}. All inputs must be of one model.")
  return names


def why_not(source, name, only=None):
  """Why a variable is not averaged.

  Args:
    source: A Source.
    name: The name of the variable.
    only: As in `weighted`.

  Returns:
    A string, such as "in the state of an optimizer".
  """
  dtype = source.specs[name].dtype
  if dtype not in _source.FLOATS:
    return f"of dtype {dtype}"
  if only is not None:
    return f"without a match of '{only}'"
  return ("without an average" if source.note else
          "in the state of an optimizer")


def checked_weights(weights, count):
  """Scales the weights of `count` inputs to a sum of 1: a list."""
  if weights is None:
    return [1 / count] * count
  weights = _checks.sequence("weights", weights)
  for weight in weights:
    if not _checks.is_number(weight) or not _is_finite(weight):
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
