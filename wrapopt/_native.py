"""Facts about the build of wrapopt, and the CPU engine on NumPy arrays.

The native library has a C interface. It depends on neither TensorFlow nor a
version of Python.
"""

import ctypes
import json
import os
import typing

from wrapopt import sysconfig

LIBRARY = os.path.join(sysconfig._folder(), "_wrapopt_native.so")

try:
  _library = ctypes.CDLL(LIBRARY)
except OSError as e:
  raise ImportError(str(e)) from None

for _function in (
    _library.wrapopt_facts, _library.wrapopt_cpu_isa, _library.wrapopt_gpus,
    _library.wrapopt_step, _library.wrapopt_encode,
    _library.wrapopt_add_decoded):
  _function.restype = ctypes.c_char_p
_library.wrapopt_step.argtypes = [
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int,
    ctypes.POINTER(ctypes.c_double), ctypes.c_size_t, ctypes.c_char_p]
_library.wrapopt_encode.argtypes = [
    ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t,
    *[ctypes.c_void_p] * 2]
_library.wrapopt_add_decoded.argtypes = [
    ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_void_p]

# In the order of the C++ enumeration `Number`.
DTYPES = ("float16", "bfloat16", "float32", "float64")


class Rule(typing.NamedTuple):
  """A line of cc/rules/rules.h."""
  number: int  # Its place in the list.
  states: list[str]
  inputs: list[str]
  scalars: list[str]  # The name of a bool has a question mark at its end.
  all_rows: bool  # Whether a sparse gradient updates all rows.

  @property
  def is_update(self) -> bool:
    """Whether the rule is an optimizer's step, which the op Apply takes."""
    return self.inputs == ["grad"]


def _value(answer, error=ValueError):
  """Returns the value in a library's answer, or raises `error`."""
  answer = json.loads(answer.decode(errors="replace"))
  if "error" in answer:
    raise error(answer["error"])
  return answer["value"]


_facts = _value(_library.wrapopt_facts())

version: str = _facts["version"]
compiler: str = _facts["compiler"]

_rules = {
    name: Rule(i, states.split(), inputs.split(), scalars.split(),
               bool(all_rows))
    for i, (name, states, inputs, scalars, all_rows)
    in enumerate(_facts["rules"])}


def rules() -> dict[str, Rule]:
  """Returns {name: Rule} of all rules."""
  return dict(_rules)


def cpu_isas() -> list[str]:
  """Returns the processor's instruction sets with kernels, the best last."""
  return list(_facts["cpu_isas"])


def cpu_isa() -> str:
  """Returns the instruction set in use: WRAPOPT_CPU_ISA, else the best."""
  return _value(_library.wrapopt_cpu_isa())


def gpu_images() -> list[str]:
  """Returns the architectures for which the GPU kernels are compiled."""
  return list(_facts["gpu_images"])


def gpus() -> list[tuple[str, str, str, list[str]]]:
  """Returns the GPUs of this machine.

  Returns:
    A list of (name, compute capability, CUDA version of the driver, images that
    the GPU uses).

  Raises:
    RuntimeError: if the driver does not answer.
  """
  return [tuple(gpu) for gpu in _value(_library.wrapopt_gpus(), RuntimeError)]


def check(subject, array, size, reason, dtypes, is_written=False):
  """Raises an error unless the library may have an array."""
  if not array.flags.c_contiguous:
    raise ValueError(f"{subject} must be contiguous")
  if array.size != size:
    raise ValueError(f"{subject} misshapen: got {array.size} elements but "
                     f"expected {size} ({reason})")
  if str(array.dtype) not in dtypes:
    names = ", ".join(dtypes[:-1]) + " or " * (len(dtypes) > 1) + dtypes[-1]
    raise ValueError(f"{subject} must be of dtype {names}, got {array.dtype}")
  if is_written and not array.flags.writeable:
    raise ValueError(f"{subject} is not writeable")


def step(rule, states, inputs, scalars, isa=""):
  """Applies `rule` to `states` in place.

  Args:
    rule: A name.
    states: Contiguous arrays of one size and dtype.
    inputs: Contiguous arrays of the same size, of one dtype.
    scalars: Numbers.
    isa: An instruction set; by default the one in use.

  Raises:
    ValueError: if an argument is wrong, or there is no kernel for it.
  """
  if rule not in _rules:
    raise ValueError(f"no rule '{rule}'")
  info = _rules[rule]
  for what, got, names in (("states", states, info.states),
                           ("inputs", inputs, info.inputs),
                           ("scalars", scalars, info.scalars)):
    if len(got) != len(names):
      raise ValueError(f"{rule} takes {len(names)} {what}, got {len(got)}")

  for what, arrays in ("states", states), ("inputs", inputs):
    for i, array in enumerate(arrays):
      subject = f"{what}[{i}]"
      check(subject, array, states[0].size, "the size of states[0]", DTYPES,
             is_written=what == "states")
      if array.dtype != arrays[0].dtype:
        raise ValueError(f"{subject} must be of dtype {arrays[0].dtype} like "
                         f"the first, got {array.dtype}")

  operands = [array.ctypes.data for array in [*states, *inputs]]
  dtypes = [DTYPES.index(str(arrays[0].dtype))
            for arrays in (states, inputs or states)]
  _value(_library.wrapopt_step(
      info.number, (ctypes.c_void_p * len(operands))(*operands), *dtypes,
      (ctypes.c_double * len(scalars))(*scalars), states[0].size, isa.encode()))


def encode(code, values, center, error, coded, new_error):
  """As EncodeFn of cc/engine/codes.h, on arrays that `check` has checked."""
  _value(_library.wrapopt_encode(
      code, DTYPES.index(str(values.dtype)), values.ctypes.data,
      center.ctypes.data, error.ctypes.data, values.size, coded.ctypes.data,
      new_error.ctypes.data))


def add_decoded(code, center, coded, total):
  """As DecodeFn, on arrays that `check` has checked."""
  _value(_library.wrapopt_add_decoded(
      code, center.ctypes.data, coded.ctypes.data, center.size,
      total.ctypes.data))
