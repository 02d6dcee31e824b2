"""Results to the last bit, which are the same on all processors.

bits.json has a checksum of each result. The daily tests compare them on x86-64,
with each instruction set of the machine, and tools/aarch64 on aarch64. After a
change of a rule's arithmetic, write the file again:

    python tests/ops/bits_test.py >tests/ops/bits.json

The inputs hold no NaNs, whose bits differ between processors, and no numbers
that come near a subnormal result.
"""

import ctypes
import json
import pathlib
import platform
import sys
import zlib

import numpy as np
import pytest
import tensorflow as tf

import numerics
from numerics import DTYPES, PAIRS, WITH_KERNELS
from wrapopt import _native
from wrapopt import ops

FILE = pathlib.Path(__file__).parent / "bits.json"
ISAS = _native.cpu_isas()
RULES = _native.rules()
# More than a block of the engine, and not a multiple of a vector.
COUNT = 1003
STEPS = 3


def _numbers(rng, count, dtype, positive=False):
  """Multiples of 2^-12: no processor rounds them."""
  numbers = rng.integers(-2**13, 2**13, count) / 2**12
  return (np.abs(numbers) + 0.5 if positive else numbers).astype(dtype)


def _checksum(arrays):
  checksum = 0
  for array in arrays:
    checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
  return checksum


def _states(rng, rule, dtype, shape=COUNT):
  return [_numbers(rng, shape, dtype,
                   name in numerics.NOT_NEGATIVE.get(rule, ()))
          for name in RULES[rule].states]


def loop(rule, pair, isa):
  rng = np.random.default_rng(1)
  states = _states(rng, rule, pair[0])
  for _ in range(STEPS):
    inputs = [_numbers(rng, COUNT, pair[1]) for _ in RULES[rule].inputs]
    _native.step(rule, states, inputs, numerics.scalars(rule), isa=isa)
  return _checksum(states)


def _variables(arrays):
  return [tf.Variable(array) for array in arrays]


def _gradient(rng, dtype, is_sparse):
  """For a variable of 50 rows: of all, or of 20, of which some repeat."""
  grad = tf.constant(_numbers(rng, (20 if is_sparse else 50, 9), dtype))
  return (tf.IndexedSlices(grad, tf.constant(rng.integers(0, 50, 20)))
          if is_sparse else grad)


def _apply(rng, rule, dtype, is_sparse):
  """Steps with two averages, which lag behind if the gradient is sparse."""
  states = _variables(_states(rng, rule, dtype, (50, 9)))
  shadows = [[tf.Variable(states[0])] for _ in range(2)]
  logs = [[tf.Variable(np.zeros(52))] for _ in range(2)]
  names = [name.removesuffix("?") for name in RULES[rule].scalars]
  is_lazy = is_sparse and not RULES[rule].all_rows
  for _ in range(STEPS):
    ops.apply(rule, {name: [state] for name, state in
                     zip(RULES[rule].states, states)},
              [_gradient(rng, dtype, is_sparse)],
              dict(zip(names, numerics.scalars(rule))), shadows=shadows,
              decay=[0.5, 0.875], log_decays=logs if is_lazy else ())
  if is_lazy:
    for shadow, log in zip(shadows, logs):
      ops.catch_up(shadow, [states[0]], log)
  return [*states, *sum(shadows, [])]


def _ema_update(rng, dtype):
  values = _variables([_numbers(rng, COUNT, dtype), _numbers(rng, (), dtype)])
  shadows = _variables([_numbers(rng, COUNT, dtype), _numbers(rng, (), dtype)])
  for decay in 0.5, 0.999, 0.9:
    ops.ema_update(shadows, values, decay)
  return shadows


def _averaging_assign(rng, dtype):
  rows = [_variables([_numbers(rng, COUNT, dtype)]) for _ in range(4)]
  ops.averaging_assign(rows[0], rows[1:], [0.5, 0.25, 0.25], rate=0.75)
  return rows[0]


def results():
  """{name: a function that returns the checksum}, without the loops."""
  def checksum(function, *args):
    rng = np.random.default_rng(2)
    return _checksum([np.asarray(x) for x in function(rng, *args)])

  found = {}
  for dtype in DTYPES:
    for function in _ema_update, _averaging_assign:
      found[f"{function.__name__[1:]} {dtype}"] = (function, dtype)
    for kind in "dense", "sparse":
      for rule, info in RULES.items():
        if info.is_update:
          found[f"apply {rule} {dtype} {kind}"] = (
              _apply, rule, dtype, kind == "sparse")
  return {name: lambda of=of: checksum(*of) for name, of in found.items()}


def loops():
  return {f"{rule} {pair[0]} {pair[1]}": (rule, pair)
          for rule in WITH_KERNELS for pair in PAIRS}


@pytest.fixture(scope="module")
def expected():
  return json.loads(FILE.read_text())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", loops())
def test_a_loop(expected, name, isa):
  assert loop(*loops()[name], isa) == expected["loops"][name]


@pytest.mark.skipif(platform.machine() != "aarch64", reason="no SVE")
def test_sve_is_chosen_where_its_registers_are_longer():
  """Longer than NEON's: at 128 bits, its loops have more instructions."""
  get_length = 51  # Linux's PR_SVE_GET_VL.
  is_long = (ctypes.CDLL(None).prctl(get_length) & 0xffff) > 16
  assert ISAS[-1] == ("sve" if is_long else "baseline")


@pytest.mark.parametrize("name", results())
def test_an_op(expected, name):
  assert results()[name]() == expected["ops"][name]


def test_the_file_has_no_other_results(expected):
  assert expected["loops"].keys() == loops().keys()
  assert expected["ops"].keys() == results().keys()


if __name__ == "__main__":
  json.dump({"loops": {name: loop(*of, "") for name, of in loops().items()},
             "ops": {name: result() for name, result in results().items()}},
            sys.stdout, indent=0)
  print()
