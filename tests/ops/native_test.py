"""The CPU engine on NumPy arrays: every rule, dtype and instruction set."""

import ml_dtypes
import numpy as np
import pytest

from arrays import assert_all
import numerics
from numerics import BFLOAT16, DOUBLE, DTYPES, FLOAT, HALF, name_of, PAIRS
from processes import run_forks
from wrapopt import _native

ISAS = _native.cpu_isas()
RULES = _native.rules()

# Elements of the widest vector register: 64 bytes of half.
WIDEST = 64 // 2

# float32 numbers in which something special happens to one format or another.
SPECIALS = np.array(
    [0, 1, -1, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 65504, 65519.99, 65520,
     2**-14, 2**-24, 2**-25, 1.5 * 2**-25, 2**-126, 2**-133, 2**-149, -0.0],
    np.float32)


def parametrize(**arguments):
  def decorate(test):
    for names, values in arguments.items():
      test = pytest.mark.parametrize(names, values, ids=name_of)(test)
    return test
  return decorate


def random_arrays(rng, rule, pair, count):
  states, inputs = RULES[rule].states, RULES[rule].inputs
  arrays = [rng.standard_normal(count) for _ in states + inputs]
  for k, name in enumerate(states):
    if name in numerics.NOT_NEGATIVE.get(rule, ()):
      arrays[k] = np.abs(arrays[k]) + 0.5
  return ([a.astype(pair[0]) for a in arrays[:len(states)]],
          [a.astype(pair[1]) for a in arrays[len(states):]])


def ema(state, value, rate, isa=""):
  """One step on a copy of `state`."""
  state = np.array(state)
  _native.step("Ema", [state], [np.asarray(value)], [rate], isa=isa)
  return state


@parametrize(isa=ISAS)
def test_a_trajectory(isa):
  # The rate is a quarter: 0 goes a quarter of the way to 4, which is 1; then a
  # quarter of the remaining 3, then of the remaining 2.25.
  shadow, value = np.zeros(1, FLOAT), np.full(1, 4, FLOAT)
  seen = []
  for _ in range(3):
    _native.step("Ema", [shadow], [value], [0.25], isa=isa)
    seen.append(float(shadow[0]))
  assert seen == [1, 1.75, 2.3125]


STARTS = 0, 1, 2, 3, 5


class Guarded:
  """Arrays with sentinels around each, at offsets from a cache line.

  The sentinels are NaNs, so that one that is read by mistake spreads.
  """

  MARGIN = 2 * WIDEST
  ROOM = 8 * WIDEST

  def __init__(self, arrays, first):
    count, size = arrays.shape[1], arrays.itemsize
    room = np.empty(arrays.shape[0] * self.ROOM * size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    self._bits = room[begin:-64 + begin].view(f"u{size}")
    # All bits set but for the sign and one more: a NaN in each of the formats.
    self._sentinel = np.iinfo(self._bits.dtype).max // 2 - 1
    self._bits[:] = self._sentinel
    assert self._bits.ctypes.data % 64 == 0
    rows = self._bits.view(arrays.dtype).reshape(-1, self.ROOM)
    self.arrays = [row[self.MARGIN + first + start:-self.MARGIN][:count]
                   for row, start in zip(rows, STARTS, strict=True)]
    for mine, array in zip(self.arrays, arrays, strict=True):
      mine[:] = array

  def take(self, context):
    """Returns the arrays; fails if a number around them has changed."""
    values = np.stack(self.arrays)
    for array in self.arrays:
      array.view(self._bits.dtype)[:] = self._sentinel
    numerics.assert_same_bits(self._bits, np.full_like(
        self._bits, self._sentinel), f"around {context}")
    return values


@parametrize(rule=RULES, pair=PAIRS, isa=ISAS)
def test_all_counts_from_all_starts(rule, pair, isa):
  rng = np.random.default_rng(1)
  scalars = numerics.scalars(rule)
  for count in range(2 * WIDEST + 2):
    context = f"count {count}, from each of {STARTS}"
    states, inputs = random_arrays(rng, rule, pair, (len(STARTS), count))
    # No two arrays begin at the same place in a vector.
    guarded = [Guarded(x, i) for i, x in enumerate(states + inputs)]
    for arrays in zip(*(g.arrays for g in guarded)):
      _native.step(rule, arrays[:len(states)], arrays[len(states):], scalars,
                   isa=isa)
    taken = [g.take(context) for g in guarded]
    for got, (want, tolerance) in zip(
        taken, numerics.reference(rule, states, inputs, scalars)):
      numerics.assert_close(got, want, tolerance, context)
    assert_all(numerics.assert_same_bits, taken[len(states):], inputs,
               f"an input, {context}")


@parametrize(isa=ISAS)
def test_a_sign_that_roundings_decide(isa):
  # That of Lion's u = 0.3 m + 0.7 g, where the terms cancel.
  g = np.random.default_rng(5).uniform(0.5, 1, 1000).astype(FLOAT)
  scalars = [0.1, 0.3, 0.4, 0.5]
  states = [np.ones(1000, FLOAT), (-7 / 3 * g.astype(DOUBLE)).astype(FLOAT)]
  (want, tolerance), _ = numerics.reference("Lion", states, [g], scalars)
  _native.step("Lion", states, [g], scalars, isa=isa)
  numerics.assert_close(states[0], want, tolerance)
  # Where a hundredth of them is left, only one sign is right.
  states[1] *= FLOAT.type(0.99)
  (_, tolerance), _ = numerics.reference("Lion", states, [g], scalars)
  assert (tolerance < 0.01 * scalars[0]).all()


@parametrize(isa=ISAS)
def test_a_sign_of_nothing(isa):
  # A gradient that is no number shows in the variable; one of zero moves none.
  states = [np.ones(2, FLOAT), np.zeros(2, FLOAT)]
  _native.step("Lion", states, [np.float32([np.nan, 0])], [0.1, 0.3, 0.4, 0],
               isa=isa)
  np.testing.assert_array_equal(states, np.float32([[np.nan, 1], [np.nan, 0]]))


@parametrize(rule=RULES, pair=PAIRS)
def test_instruction_sets_agree_bit_for_bit(rule, pair):
  rng = np.random.default_rng(2)
  # Every special number meets every other in each place of a vector.
  x, y = (a.ravel() for a in np.meshgrid(SPECIALS, SPECIALS))
  count = 4 * x.size + 2 * WIDEST + 1
  states, inputs = random_arrays(rng, rule, pair, count)
  with np.errstate(over="ignore"):
    for k, array in enumerate(states + inputs):
      array[:4 * x.size] = np.tile(np.roll((x, y)[k % 2], k // 2), 4)
  scalars = numerics.scalars(rule)

  results = {}
  for isa in ISAS:
    results[isa] = [s.copy() for s in states]
    _native.step(rule, results[isa], inputs, scalars, isa=isa)
    assert_all(numerics.assert_same_numbers, results[isa],
               results["baseline"], isa)
    # Nor does it matter where a block of a parallel run begins and ends.
    pieces = [s.copy() for s in states]
    cuts = [0, 1, 8, 37, 100, 101, 500, count]
    for begin, end in zip(cuts, cuts[1:]):
      _native.step(rule, [s[begin:end] for s in pieces],
                   [i[begin:end] for i in inputs], scalars, isa=isa)
    assert_all(numerics.assert_same_numbers, pieces, results[isa],
               f"{isa} in pieces")


def test_there_is_more_than_one_instruction_set():
  # Where there is not, the test above compares nothing.
  assert ISAS[0] == "baseline"
  assert len(ISAS) > 1, "this machine is too old to test the kernels on"


# With the rate 1 and the state 0 the result is 0 + 1 * (v - 0): the input, but
# perhaps for the sign of a zero. So the engine shows how it loads and stores.


def every(dtype):
  """All 65536 numbers of a 16-bit format."""
  return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def is_flushed(array):
  """Which numbers arithmetic takes for zero: the subnormal ones.

  Those of half are normal numbers of float, in which half is computed.
  """
  if array.dtype == HALF:
    return np.zeros(array.shape, bool)
  smallest = array.dtype.type(ml_dtypes.finfo(array.dtype).smallest_normal)
  return (array != 0) & (np.abs(array) < smallest)


def flushed(array):
  return np.where(is_flushed(array), array * array.dtype.type(0), array).astype(
      array.dtype)


def around_the_smallest_normal(rng, dtype, count):
  tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
  signs = rng.choice([-1, 1], count)
  return (signs * tiny * np.exp2(rng.uniform(-4, 4, count))).astype(dtype)


@parametrize(rule=RULES, pair=PAIRS, isa=ISAS)
def test_subnormal_numbers_are_taken_for_zero(rule, pair, isa):
  rng = np.random.default_rng(5)
  states, inputs = random_arrays(rng, rule, pair, 1000)
  for array in states + inputs:
    # Some of them; and of some rules a root of what is tiny, too.
    tiny = around_the_smallest_normal(rng, array.dtype, array.size)
    some = rng.uniform(size=array.size) < 0.7
    negative = array is not states[0] and array is not inputs[0]
    array[some] = np.abs(tiny[some]) if negative else tiny[some]
  assert any(is_flushed(array).any() for array in states + inputs) or (
      pair == (HALF, HALF))
  want = [flushed(array) for array in states]
  scalars = numerics.scalars(rule)
  _native.step(rule, want, [flushed(array) for array in inputs], scalars,
               isa=isa)
  _native.step(rule, states, inputs, scalars, isa=isa)
  for got, expected in zip(states, want):
    numerics.assert_same_numbers(got, expected)
    assert not is_flushed(got).any()


@parametrize(dtype=[BFLOAT16, FLOAT, DOUBLE], isa=ISAS)
def test_results_that_are_subnormal_become_zero(dtype, isa):
  tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
  # Three quarters of the way to the value: of the first two, 1.125 of the
  # smallest normal number, which is one, and 0.375 are left, which is none.
  state = np.array([1.5 * tiny, -1.5 * tiny, 0, 3 * tiny], dtype)
  value = np.array([0, 0, 2 * tiny, tiny], dtype)
  want = np.array([0, -0.0, 1.5 * tiny, 1.5 * tiny], dtype)
  got = ema(np.resize(state, 101), np.resize(value, 101), 0.75, isa)
  numerics.assert_same_bits(got, np.resize(want, 101))
  # The thread computes as it did before.
  assert np.float32(2**-126) / np.float32(2) > 0


def without_minus_zero(array):
  return array[~((array == 0) & np.signbit(array))]


@parametrize(dtype=[HALF, BFLOAT16], isa=ISAS)
def test_loads_of_all_numbers(dtype, isa):
  with np.errstate(invalid="ignore"):
    value = without_minus_zero(every(dtype))
    got = ema(np.zeros(value.size, FLOAT), value, 1, isa)
    numerics.assert_same_numbers(got, value.astype(FLOAT))


@parametrize(dtype=[HALF, BFLOAT16], isa=ISAS)
def test_all_numbers_survive_a_load_and_a_store(dtype, isa):
  state = every(dtype)
  state = state[~is_flushed(state)]
  # s + -1 * (v - s): with v = s that is s - 0, which keeps even the sign of a
  # zero. Infinity needs another v.
  with np.errstate(invalid="ignore"):
    value = np.where(np.isinf(state), dtype.type(1), state)
    numerics.assert_same_numbers(ema(state, value, -1, isa), state)


def floats_to_store(dtype):
  """Ties and their neighbours, random bits, and what is special."""
  rng = np.random.default_rng(3)
  each = every(dtype).astype(FLOAT)
  each = each[np.isfinite(each)]
  upwards = np.append(np.sort(each)[1:], np.float32(np.inf))
  with np.errstate(over="ignore", invalid="ignore"):
    ties = (np.sort(each).astype(DOUBLE) + upwards).astype(FLOAT) / 2
  ties = ties[np.isfinite(ties)]
  near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
  return np.concatenate([
      SPECIALS, -SPECIALS, ties, *near,
      rng.integers(0, 1 << 32, 2_000_000, np.uint32).view(FLOAT),
      # Where half has its subnormals, and a little beyond on either side.
      np.ldexp(rng.standard_normal(500_000),
               rng.integers(-27, -13, 500_000)).astype(FLOAT)])


@pytest.fixture(scope="module", params=[HALF, BFLOAT16], ids=name_of)
def stores(request):
  """(numbers, how NumPy and ml_dtypes round them to a 16-bit format)."""
  floats = without_minus_zero(floats_to_store(request.param))
  with np.errstate(over="ignore", invalid="ignore"):
    return floats, floats.astype(request.param)


@parametrize(isa=ISAS)
def test_stores_round_to_nearest_even(stores, isa):
  floats, want = stores
  numerics.assert_same_numbers(ema(np.zeros_like(want), floats, 1, isa), want)


def test_scalars_are_rounded_once_and_not_before_they_must():
  # 1 - 0.9999 as TensorFlow has it in float32 is 1.7e-5 off.
  rate = 1 - 0.9999
  assert ema(np.zeros(1), np.ones(1), rate)[0] == rate
  assert ema(np.zeros(1, FLOAT), np.ones(1, FLOAT), rate)[0] == FLOAT.type(rate)


@parametrize(dtype=DTYPES)
def test_a_state_that_equals_its_input_stays_so(dtype):
  # Not so with d * s + (1 - d) * v.
  state = np.random.default_rng(4).standard_normal(1000).astype(dtype)
  numerics.assert_same_bits(ema(state, state, 1 - 0.9999), state)


@parametrize(states=DTYPES, inputs=DTYPES)
def test_pairs_of_dtypes(states, inputs):
  state, value = np.zeros(3, states), np.ones(3, inputs)
  if (states, inputs) in PAIRS:
    assert ema(state, value, 0.5).tolist() == [0.5] * 3
  else:
    with pytest.raises(ValueError) as e:
      ema(state, value, 0.5)
    assert str(e.value) == (f"Ema has no kernel for states of dtype {states} "
                            f"and inputs of dtype {inputs}")


def test_arrays_of_any_rank():
  assert ema(np.zeros((2, 3)), np.ones((2, 3)), 0.5).tolist() == [[0.5] * 3] * 2
  assert ema(np.zeros(()), np.ones(()), 0.5) == 0.5


F3 = np.zeros(3, FLOAT)
NAMES = ", ".join(ISAS)
NO_ISA = ("the CPU instruction set must be one that this processor has "
          f"({NAMES}), got ")


@pytest.mark.parametrize("arguments, error", [
    (dict(rule="Emma"), "no rule 'Emma'"),
    (dict(states=[]), "Ema takes 1 states, got 0"),
    (dict(states=[F3.copy(), F3.copy()]), "Ema takes 1 states, got 2"),
    (dict(inputs=[]), "Ema takes 1 inputs, got 0"),
    (dict(inputs=[F3, F3]), "Ema takes 1 inputs, got 2"),
    (dict(scalars=[]), "Ema takes 1 scalars, got 0"),
    (dict(scalars=[1, 1]), "Ema takes 1 scalars, got 2"),
    (dict(states=[np.zeros(6, FLOAT)[::2]]), "states[0] must be contiguous"),
    (dict(inputs=[np.zeros(6, FLOAT)[::2]]), "inputs[0] must be contiguous"),
    (dict(inputs=[np.zeros(4, FLOAT)]),
     "inputs[0] misshapen: got 4 elements but expected 3 (the size of "
     "states[0])"),
    (dict(states=[np.zeros(3, np.int32)]),
     "states[0] must be of dtype float16, bfloat16, float32 or float64, got "
     "int32"),
    (dict(inputs=[np.zeros(3, ">f4")]),
     "inputs[0] must be of dtype float16, bfloat16, float32 or float64, got "
     ">f4"),
    (dict(isa="x86-64-v9"), NO_ISA + "'x86-64-v9'"),
])
def test_what_step_refuses(arguments, error):
  states = [np.full(3, 7, FLOAT)]
  with pytest.raises(ValueError) as e:
    _native.step(**{"rule": "Ema", "states": states, "inputs": [F3],
                    "scalars": [0.5], **arguments})
  assert str(e.value) == error
  assert states[0].tolist() == [7] * 3


def test_step_refuses_a_state_that_is_read_only():
  state = np.zeros(3, FLOAT)
  state.flags.writeable = False
  with pytest.raises(ValueError, match="not writeable"):
    _native.step("Ema", [state], [np.ones(3, FLOAT)], [0.5])
  assert state.tolist() == [0] * 3


# A process of its own, and in it the module without wrapopt, which would take
# TensorFlow with it.
LOAD = f"""
import importlib.util
import numpy as np
spec = importlib.util.spec_from_file_location("_native", {_native.__file__!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
"""

CHOOSE = """
state = np.zeros(1)
for use in (lambda: print(native.cpu_isa()),
            lambda: native.step("Ema", [state], [np.ones(1)], [0.5])):
  try:
    use()
  except ValueError as e:
    print(e)
print(state[0])
"""


def test_the_environment_names_an_instruction_set():
  assert set(ISAS) <= {"baseline", "sve", "x86-64-v3", "x86-64-v4"}
  assert ISAS == sorted(ISAS)  # On aarch64, where SVE's registers are longer.
  wants = {isa: [isa, "0.5"] for isa in ISAS}
  wants[""] = [ISAS[-1], "0.5"]  # The best is the default.
  # Instruction sets that the processor lacks are refused, too.
  for isa in {"x86-64-v3", "x86-64-v4", "AVX2", "Baseline"} - set(ISAS):
    error = f"WRAPOPT_CPU_ISA: {NO_ISA}'{isa}'"
    wants[isa] = [error, error, "0.0"]
  found = run_forks(LOAD, CHOOSE, [{"WRAPOPT_CPU_ISA": isa} for isa in wants])
  assert {isa: x.splitlines() for isa, x in zip(wants, found, strict=True)
          } == wants
