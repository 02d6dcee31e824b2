"""Checks that the public functions share.

An op checks its inputs before it changes a variable: cc/ops/contracts.h has the
rules. The checks here are of what no op can see: Python objects, and, because
one call may run several ops, all variables of the call before the first op
runs.

A function that takes `subject`, the name of an argument, raises a TypeError or
a ValueError that begins with it.
"""

import numbers

import tensorflow as tf

from wrapopt._types import FLOATS, LOW_PRECISION
from wrapopt.ops import _variables


def shadow_dtypes(value_dtype):
  """The dtypes that averages of a value may have."""
  value_dtype = value_dtype.base_dtype
  return ((value_dtype, tf.float32) if value_dtype in LOW_PRECISION
          else (value_dtype,))


def variable(subject, x):
  if not isinstance(x, tf.Variable):
    raise TypeError(f"`{subject}` must be a variable, got {x!r}.")


def variables(subject, given):
  """`given`, a variable or a sequence of variables, as a list."""
  if isinstance(given, tf.Variable):
    given = [given]
  given = list(given)
  if not given:
    raise ValueError(f"`{subject}` must hold at least one variable, got none.")
  for i, x in enumerate(given):
    variable(f"{subject}[{i}]", x)
  return given


def dtype(subject, x, dtypes):
  if x.dtype.base_dtype not in dtypes:
    raise TypeError(
        f"{_describe(subject, x)} must be of dtype "
        f"{' or '.join(d.name for d in dtypes)}, got "
        f"{x.dtype.base_dtype.name}.")


def shape(subject, x, like_subject, like):
  if not x.shape.is_compatible_with(like.shape):
    raise ValueError(
        f"{_describe(subject, x)} misshapen: got {x.shape} but expected "
        f"{like.shape} (the shape of {like_subject}, '{like.name}').")


def kind(subject, x, like_subject, like):
  """A variable `x` must be a ref variable if `like` is one, and only then."""
  expected = _variables.is_ref(like)
  if isinstance(x, tf.Variable) and _variables.is_ref(x) != expected:
    kinds = {True: "ref", False: "resource"}
    raise TypeError(
        f"`{subject}` ('{x.name}') must be a {kinds[expected]} variable as "
        f"{like_subject} ('{like.name}') is, got a {kinds[not expected]} "
        "variable.")


def alike(subject, given, reason):
  """All variables must be of one kind and on one device, to be one op's.

  Args:
    subject: The name of the list of variables.
    given: The list.
    reason: Why they must be on one device.
  """
  first = given[0]
  for i, x in enumerate(given):
    kind(f"{subject}[{i}]", x, f"{subject}[0]", first)
    if x.device != first.device:
      raise ValueError(
          f"`{subject}[{i}]` ('{x.name}') must be on the device of "
          f"`{subject}[0]` ('{first.name}'), '{first.device}', got "
          f"'{x.device}'. {reason}")


def decays(decay):
  """`decay`, one decay or a sequence, as a list; numbers are checked."""
  checked = list(decay) if isinstance(decay, (list, tuple)) else [decay]
  for k, d in enumerate(checked):
    if isinstance(d, numbers.Real) and not 0 <= d <= 1:
      raise ValueError(f"`decay[{k}]` must be in [0, 1], got {d}.")
  return checked


def shadows(decay, given, values, values_name, some=False):
  """Checks the averages of `values`.

  Args:
    decay: One decay, or a sequence of K.
    given: A sequence of averages for one decay, or K of them.
    values: A list of variables.
    values_name: Its name in errors.
    some: Whether a value without averages may have None in all lists.

  Returns:
    `decay` as a list, and as many lists of averages.
  """
  several = isinstance(decay, (list, tuple))
  decay = decays(decay)
  rows = list(given) if several else [given]
  subjects = ([f"shadows[{k}]" for k in range(len(rows))] if several
              else ["shadows"])
  rows = ([list(row) for row in rows] if some else
          [variables(subject, row) for subject, row in zip(subjects, rows)])
  if len(rows) != len(decay):
    raise ValueError(
        "`shadows` must hold one sequence of variables for each of the "
        f"{len(decay)} decays, got {len(rows)}.")
  for subject, row in zip(subjects, rows):
    if len(row) != len(values):
      raise ValueError(f"`{subject}` must hold one variable for each of the "
                       f"{len(values)} values, got {len(row)}.")
    for i, (shadow, value) in enumerate(zip(row, values)):
      if some:
        if (shadow is None) != (rows[0][i] is None):
          raise ValueError(
              "`shadows` must hold one variable for each decay of a value or "
              f"None for all of them, got both for {values_name}[{i}], "
              f"'{value.name}'.")
        if shadow is None:
          continue
        variable(f"{subject}[{i}]", shadow)
      dtype(f"{subject}[{i}]", shadow, shadow_dtypes(value.dtype))
      shape(f"{subject}[{i}]", shadow, f"{values_name}[{i}]", value)
  return decay, rows


def _describe(subject, x):
  """"`values[0]` ('v:0')"; a tensor needs no name."""
  return (f"`{subject}` ('{x.name}')" if isinstance(x, tf.Variable)
          else f"`{subject}`")
