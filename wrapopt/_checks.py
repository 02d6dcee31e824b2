"""Checks of arguments, for all classes.

`wrapopt.checkpoints` uses them without TensorFlow: see `_tf`.
"""

import math
import numbers
import operator

import numpy as np

from wrapopt._tf import tf


def integer(subject, x, least=None):
  """`x` as an int; raises an error if it is none, or less than `least`."""
  try:
    if not isinstance(x, bool):
      x = operator.index(x)
      if least is not None and x < least:
        raise ValueError(f"`{subject}` must be at least {least}, got {x}.")
      return x
  except TypeError:
    pass
  raise TypeError(f"`{subject}` must be an integer, got {x!r}.")


def boolean(subject, x):
  """`x` as a bool; raises a TypeError if it is none."""
  if isinstance(x, (bool, np.bool_)):
    return bool(x)
  raise TypeError(f"`{subject}` must be True or False, got {x!r}.")


def boolean_or_01(subject, x):
  """As `boolean`, but takes 0 and 1 too, like the classes of TensorFlow 1."""
  return bool(x) if isinstance(x, int) and x in (0, 1) else boolean(subject, x)


def is_number(x):
  """Whether `x` is a real number, also of NumPy; no bool is."""
  return isinstance(x, numbers.Real) and not isinstance(x, bool)


def sequence(subject, x):
  """`x` as a list; raises a TypeError if it is no sequence."""
  try:
    return list(x)
  except TypeError:
    raise TypeError(f"`{subject}` must be a sequence, got {x!r}.") from None


def fraction(subject, x):
  """Raises an error if `x` is no number in [0, 1]."""
  if not is_number(x):
    raise TypeError(f"`{subject}` must be a number, got {x!r}.")
  if not 0 <= x <= 1:
    raise ValueError(f"`{subject}` must be in [0, 1], got {x}.")


def number(subject, x, least=None, most=math.inf):
  """`x` as a float; raises an error if it is none, or out of range.

  Args:
    subject: The name of the argument.
    x: Its value.
    least: The least finite number that it may be; None if it must be greater
      than 0.
    most: The greatest.
  """
  if not is_number(x):
    raise TypeError(f"`{subject}` must be a number, got {x!r}.")
  if (not math.isfinite(x) or x > most or
      (x <= 0 if least is None else x < least)):
    bound = "greater than 0" if least is None else f"at least {least}"
    raise ValueError(f"`{subject}` must be finite and {bound}" + (
        f", and at most {most}" if most < math.inf else "") + f", got {x}.")
  return float(x)


def number_or_tensor(subject, x, check):
  """`x`, a scalar tensor or variable, or else what `check` above allows."""
  if isinstance(x, np.ndarray) and x.ndim == 0:
    x = x.item()
  is_tensor = isinstance(x, tf.Variable) or tf.is_tensor(x)
  if not (x.shape.is_compatible_with([]) if is_tensor else is_number(x)):
    raise TypeError(f"`{subject}` must be a number, or a scalar tensor or "
                    f"variable, got {x!r}.")
  if not is_tensor:
    check(subject, x)
  return x


def fused(fused):
  """The argument `fused` of a wrapper, checked."""
  if fused is None:
    return None
  try:
    return boolean_or_01("fused", fused)
  except TypeError:
    raise TypeError("`fused` must be None (if there is an op), True or False, "
                    f"got {fused!r}.") from None


def variable_of(step):
  """The variable of `step`, if `step` is the tensor of a ref variable.

  `tf.compat.v1.train.get_global_step` returns a tensor if it finds a ref
  variable only by its name.

  Args:
    step: A step variable, a tensor, or another argument of the caller.

  Returns:
    The variable; `step` itself, if it is not the tensor of a variable.
  """
  if isinstance(step, tf.Tensor) and not tf.executing_eagerly():
    for v in (*tf.compat.v1.global_variables(),
              *tf.compat.v1.local_variables()):
      if v.name == step.name:
        return v
  return step


def step_of_graph():
  """The graph's global step: a variable, the tensor of a ref variable or None.

  As `tf.compat.v1.train.get_global_step`, which does not find a resource
  variable by its name.
  """
  if not (tf.executing_eagerly() or tf.compat.v1.get_collection(
      tf.compat.v1.GraphKeys.GLOBAL_STEP)):
    for v in tf.compat.v1.global_variables():
      if v.name == "global_step:0":
        return v
  return tf.compat.v1.train.get_global_step()


def global_step(step):
  """The variable of `step`; raises a TypeError if it is not an integer."""
  step = variable_of(step)
  if (not isinstance(step, tf.Variable) or
      step.dtype.base_dtype not in (tf.int32, tf.int64)):
    raise TypeError("`global_step` must be a variable of dtype int32 or int64, "
                    f"got {step!r}. Make one with "
                    "tf.compat.v1.train.get_or_create_global_step().")
  return step
