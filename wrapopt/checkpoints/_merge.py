"""Weighted sums of checkpoints, one variable after the other."""

import collections
import concurrent.futures
import contextlib
import json
import math
import os
import re
import sys
import typing

import numpy as np

from wrapopt import _checks
from wrapopt import version
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _source

# The numbers of elements that a thread sums and that it adds at once, so that
# they stay in the processor's caches.
_PART = 1 << 18
_BLOCK = 1 << 15

# The number of differences that an error lists.
_MOST = 20


class Plan(typing.NamedTuple):
  """What a weighted sum of checkpoints is going to read and write.

  Attributes:
    inputs: [(path, weight)] of the checkpoints.
    averaged: The names of the variables to average, sorted.
    copied: {name of another variable: why it is copied from the last input}.
    read_bytes: How many bytes are read.
    written_bytes: How many bytes the values of the output have.
    peak_bytes: How many bytes the values in memory have at most.
  """
  inputs: list[tuple[str, float]]
  averaged: list[str]
  copied: dict[str, str]
  read_bytes: int
  written_bytes: int
  peak_bytes: int


class Options(typing.NamedTuple):
  """How a weighted sum is written: arguments of `wrapopt.checkpoints.merge`.

  Attributes:
    only: A regular expression, or None.
    allow_nan: Whether values may be NaN.
    copy_rest: Whether other files beside the last input are copied.
    max_shard_bytes: The size of shards, or None.
    confirm: A function of a Plan that returns whether to go on, or None.
    progress: A function that makes a progress bar from tqdm's arguments, or
      None.
  """
  only: typing.Optional[str] = None
  allow_nan: bool = False
  copy_rest: bool = False
  max_shard_bytes: typing.Optional[int] = None
  confirm: typing.Any = None
  progress: typing.Any = None


def weighted(inputs, output, weights, options=Options(), made=None, unit=1.0):
  """Writes a weighted sum of checkpoints.

  Args:
    inputs: Sources.
    output: The argument `output` of `wrapopt.checkpoints.merge`.
    weights: A number for each input.
    options: Options.
    made: {name: value} of what else the output says of how it was made.
    unit: The sum is divided by it: see `checked_weights`.

  Returns:
    Whether it was written.

  Raises:
    The same errors as `wrapopt.checkpoints.merge`.
  """
  last = inputs[-1]
  output = _formats.output_of(_files.path("output", output), last,
                              options.max_shard_bytes)
  _formats.check_output(output, last)
  names = check(inputs, options.only)
  rest = _formats.rest_of(last) if options.copy_rest else []
  # Inputs of weight 0 are not read.
  summed = [(s, weight) for s, weight in zip(inputs, weights) if weight != 0]
  pace = _pace(inputs)
  if options.confirm and not options.confirm(
      _plan(inputs, [w / unit for w in weights], summed, names, pace,
            options.only)):
    return False
  for source in {last, *(s for s, _ in summed)}:
    with _files.naming(source.path, "cannot be read"):
      source.verify()
  with contextlib.ExitStack() as stack:
    # Errors of what is read, and of the output, name their files already.
    with _files.naming(last.path, "cannot be copied"):
      sink = last.output().Sink(
          output, like=last, made=_made(inputs, weights, options, made),
          **({} if options.max_shard_bytes is None else {
              "max_shard_bytes": options.max_shard_bytes}))
      stack.callback(sink.discard)
      bar = stack.enter_context(options.progress(
          total=sum(s.specs[name].nbytes for s, _ in summed for name in names),
          unit="B", unit_scale=True, desc=os.path.basename(output)
      )) if options.progress else None
      for name, part, value in stack.enter_context(
          contextlib.closing(
              _sums(summed, unit, names, last, pace, options.allow_nan))):
        sink.write(name, value, *part)
        if bar is not None:
          bar.update(value.size * sum(
              s.specs[name].dtype.itemsize for s, _ in summed))
      for name in sorted(last.specs.keys() - {*names}):
        sink.copy(last, name)
      sink.add(rest)
    sink.publish(lambda: [s.check_unchanged() for s in inputs])
  return True


def _plan(inputs, weights, summed, names, pace, only):
  """The Plan of a weighted sum: see `weighted`."""
  last = inputs[-1]
  copied = {name: why_not(last, name, only)
            for name in sorted(last.specs.keys() - {*names})}
  of_copied = sum(last.specs[name].nbytes for name in copied)
  most, threads, waiting = pace
  # A sum, the value that is added, the rounded sum; and those that wait.
  peak = max(min(most, last.specs[name].size) * (
      threads * (8 + max(s.specs[name].dtype.itemsize for s, _ in summed)) +
      (threads + waiting) * last.dtype(name).itemsize) for name in names)
  return Plan(
      [(s.path, float(weight)) for s, weight in zip(inputs, weights)], names,
      copied, of_copied + sum(
          s.specs[name].nbytes for s, _ in summed for name in names),
      of_copied + sum(last.specs[name].size * last.dtype(name).itemsize
                      for name in names), peak)


def _made(inputs, weights, options, made):
  """What the output says of how it was made: JSON."""
  return json.dumps({
      **(made or {}), "version": version.__version__,
      "inputs": [s.path for s in inputs], "weights": list(map(float, weights)),
      "only": options.only})


def _is_nan(summed, name, part):
  """The error that a part of a variable has the value NaN."""
  of = [s.path for s, _ in summed if np.isnan(s.read(name, *part)).any()]
  return ValueError(
      f"Variable '{name}' must have no NaN, got some in "
      f"{of[0] if of else 'the sum of infinite values'}. Leave "
      f"{'this input' if of else 'inputs with these'} out, or allow it: "
      "`allow_nan=True`, --allow-nan.")


def _pace(sources):
  """How sums are computed.

  Args:
    sources: Sources. If one is not read in parts, variables are summed one by
      one.

  Returns:
    The number of elements of a part, of threads, and of sums that may wait.
  """
  if all(source.in_parts for source in sources):
    threads = len(os.sched_getaffinity(0))
    return _PART, threads, 2 * threads
  return sys.maxsize, 1, 1


def _parts(size, most):
  """The parts, as `Source.read` takes them, of at most `most` elements."""
  return [()] if size <= most else (
      (begin, min(begin + most, size)) for begin in range(0, size, most))


def _sums(summed, unit, names, last, pace, allow_nan):
  """Yields names, parts of variables, and their weighted sums, rounded.

  Args:
    summed: [(Source, weight)].
    unit: As of `weighted`.
    names: The names of the variables.
    last: The Source that has the dtypes of the sums.
    pace: A `_pace`.
    allow_nan: Whether values may be NaN.
  """
  size, threads, count = pace
  waiting = collections.deque()
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for name in names:
      for part in _parts(last.specs[name].size, size):
        waiting.append(pool.submit(
            _sum, summed, unit, name, part, last.dtype(name), allow_nan))
        if len(waiting) > count:
          yield waiting.popleft().result()
    for coming in waiting:
      yield coming.result()


def _sum(summed, unit, name, part, dtype, allow_nan):
  """What `_sums` yields for one part."""
  total = None
  for source, weight in summed:
    value = source.read(name, *part)
    if total is None:
      # Nothing changes when it is added to -0, not even -0.
      total = np.full(value.shape, -0.0)
    _add(total.reshape(-1), value.reshape(-1), weight)
  if unit != 1:
    with np.errstate(over="ignore", invalid="ignore"):
      total /= unit
  # A minimum is NaN if a value is.
  if not allow_nan and np.isnan(np.min(total, initial=0)):
    raise _is_nan(summed, name, part)
  return name, part, _rounded(total, dtype)


def _add(total, value, weight):
  """Adds a weighted array, in blocks that stay in the processor's cache."""
  scratch = np.empty(min(_BLOCK, value.size))
  with np.errstate(over="ignore", invalid="ignore"):
    for begin in range(0, value.size, _BLOCK):
      block = scratch[:value.size - begin]
      block[:] = value[begin:begin + _BLOCK]
      block *= weight
      total[begin:begin + _BLOCK] += block


def _rounded(value, dtype):
  """Rounds float64 numbers once, to nearest even."""
  rounded = np.empty(value.shape, dtype)
  flat, of = rounded.reshape(-1), value.reshape(-1)
  with np.errstate(over="ignore", invalid="ignore"):
    for begin in range(0, of.size, _BLOCK):
      block = of[begin:begin + _BLOCK]
      if dtype.type.__module__ != "numpy":
        block = _to_odd(block)
      flat[begin:begin + _BLOCK] = block.astype(dtype)
  return rounded


def _to_odd(value):
  """Rounds float64 numbers to float32, those between two to the odd one.

  The dtypes of ml_dtypes are rounded from float32. The last bit keeps that a
  number was not exact, so that the second rounding is right.
  """
  near = value.astype(np.float32)
  bits = near.view(np.uint32)
  wide = near.astype(np.float64)
  bits -= np.abs(wide) > np.abs(value)
  bits |= wide != value
  return near


def averaged(source, only=None):
  """Names of the variables of a Source that are to be averaged.

  Args:
    source: A Source.
    only: As in `Options`.

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
    only: As in `Options`.

  Returns:
    A sorted list of names.

  Raises:
    ValueError: If the checkpoints have different variables or shapes, or there
      is no variable to sum.
  """
  last = inputs[-1]
  names = averaged(last, only)
  if not names:
    raise ValueError(
        f"{last.path} must have floating-point variables to average" +
        (f" that match '{only}'" if only is not None else "") +
        f", got {_few(sorted(last.specs))}.")
  found = [text for source in inputs[:-1]
           for text in _differences(source, last, names, only)]
  if found:
    raise ValueError("\n".join([*found[:_MOST], *(
        [f"{len(found) - _MOST} more differences"] if found[_MOST:] else [])]))
  most, *_ = _pace(inputs)
  for name, scale in last.quantized(names).items() if only is None else ():
    for source in inputs[:-1]:
      if not all(np.array_equal(source.read(name, *part).view(np.uint8),
                                last.read(name, *part).view(np.uint8))
                 for part in _parts(last.specs[name].size, most)):
        raise ValueError(
            f"The quantized variable '{name}', with the scale '{scale}', must "
            "be equal in all inputs, since no mean of quantized numbers is "
            f"that of the weights, got others in {source.path} than in "
            f"{last.path}. Merge checkpoints from before the quantization, or "
            "choose the variables to average: `only`, --only.")
  return names


def _differences(source, last, names, only):
  """Yields why a checkpoint is not of the model of the last one."""
  for name in names:
    spec, expected = source.specs.get(name), last.specs[name]
    if spec is None:
      yield (f"{source.path} must have the variable '{name}', which "
             f"{last.path} has, got {_few(sorted(source.specs))}. All inputs "
             "must be of one model.")
    elif spec.shape != expected.shape:
      yield (f"Variable '{name}' of {source.path} misshapen: got "
             f"{list(spec.shape)} but expected {list(expected.shape)} (its "
             f"shape in {last.path}).")
    elif spec.dtype not in _source.FLOATS:
      yield (f"Variable '{name}' of {source.path} must be of dtype "
             f"{', '.join(map(str, _source.WIDE_FLOATS))} or float8, as in "
             f"{last.path}, got {spec.dtype}.")
  of_source, known = averaged(source, only), set(names)
  for name in of_source:
    if name in last.specs and name not in known:
      yield (f"Variable '{name}' must be averaged in all inputs or in none, "
             f"got one of dtype {source.specs[name].dtype} in {source.path} "
             f"and one {why_not(last, name)} in {last.path}. All inputs must "
             "be of one model.")
  more = [name for name in of_source if name not in last.specs]
  if more:
    yield (f"{source.path} must not have variables that {last.path} lacks, got "
           f"{_few(more)}. All inputs must be of one model.")


def why_not(source, name, only=None):
  """Why a variable is not averaged.

  Args:
    source: A Source.
    name: The name of the variable.
    only: As in `Options`.

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
  """Scales the weights of `count` inputs, such as to a sum near 1.

  Returns:
    A list of weights, and their sum, in (0.5, 1]. The result must be divided by
    the sum at the end: a sixth is no float64, and a mean of six that is halfway
    between two numbers would always be rounded to the lower one.
  """
  if weights is None:
    weights = [1] * count
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
  if abs(exponent) < 64 and math.isclose(
      math.ldexp(total, exponent), 1, rel_tol=count * 2.0**-52):
    return weights, 1.0  # Fractions, such as those that an output tells.
  fraction, exponent = math.frexp(total)
  exponent -= fraction == 0.5
  return ([math.ldexp(weight, -exponent) for weight in scaled],
          math.ldexp(total, -exponent))


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
