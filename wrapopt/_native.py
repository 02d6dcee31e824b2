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

for _function in (_library.wrapopt_facts, _library.wrapopt_cpu_isa,
                  _library.wrapopt_gpus, _library.wrapopt_step):
  _function.restype = ctypes.c_char_p
_library.wrapopt_step.argtypes = [
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int,
    ctypes.POINTER(ctypes.c_double), ctypes.c_size_t, ctypes.c_char_p]

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
      if not array.flags.c_contiguous:
        raise ValueError(f"{subject} must be contiguous")
      if array.size != states[0].size:
        raise ValueError(
            f"{subject} misshapen: got {array.size} elements but expected "
            f"{states[0].size} (the size of states[0])")
      if str(array.dtype) not in DTYPES:
        raise ValueError(
            f"{subject} must be of dtype float16, bfloat16, float32 or "
            f"float64, got {array.dtype}")
      if array.dtype != arrays[0].dtype:
        raise ValueError(f"{subject} must be of dtype {arrays[0].dtype} like "
                         f"the first, got {array.dtype}")
      if what == "states" and not array.flags.writeable:
        raise ValueError(f"{subject} is not writeable")

  operands = [array.ctypes.data for array in [*states, *inputs]]
  dtypes = [DTYPES.index(str(arrays[0].dtype))
            for arrays in (states, inputs or states)]
  _value(_library.wrapopt_step(
      info.number, (ctypes.c_void_p * len(operands))(*operands), *dtypes,
      (ctypes.c_double * len(scalars))(*scalars), states[0].size, isa.encode()))
