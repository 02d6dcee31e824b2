"""The machine code of the engine: each loop is vector code.

No result shows that a loop is slow, so the test reads the machine code: first
that of the engine's archive, in which functions have names, then that of the
library, which has none and must contain the same loops.
"""

import os
import platform
import re
import subprocess

import numpy as np
import pytest

import wrapopt
from numerics import DOUBLE, PAIRS, WITH_KERNELS
from wrapopt import _native

# On an emulated aarch64, objdump of the system is that of the host.
IS_ARM = platform.machine() == "aarch64"
OBJDUMP = "aarch64-linux-gnu-objdump" if IS_ARM else "objdump"
# Function template of cc/engine/isa_dispatch.h: the registers that it is
# to compute in.
REGISTERS = ({"Baseline": "v", "Sve": "z"} if IS_ARM else
             {"Baseline": "xmm", "X86_64_v3": "ymm", "X86_64_v4": "ymm",
              "X86_64_v4Wide": "zmm"})
CPP_NAMES = {"float16": "Half", "bfloat16": "Bfloat16", "float32": "float",
             "float64": "double"}

# Each rule, the rows of averages that move, and sums of gradients of a row:
# in float or double.
LOOPS = [*((rule, pair) for rule in [*WITH_KERNELS, "RowsMove"]
           for pair in PAIRS),
         *(("RowSum", pair) for pair in PAIRS if pair[0].itemsize > 2)]

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(\S+)\s*(.*)$")
ARITHMETIC = re.compile(
    r"^f(?:add|subr?|mul|divr?|sqrt|n?m(?:la|ls|ad|sb))$" if IS_ARM else
    r"^v?(?:add|sub|mul|div|sqrt|fn?m(?:add|sub)\d+)[ps][sd]$")
JUMP = re.compile(r"^(?:b(?:\.|$)|[ct]bn?z)" if IS_ARM else r"^j")
FETCH = re.compile(r"^prfm$" if IS_ARM else r"^prefetcht1$")


def disassemble(path):
  """[(function's name, [(address, mnemonic, operands)])]."""
  text = subprocess.run(
      [OBJDUMP, "--disassemble", "--demangle", "--no-show-raw-insn", path],
      capture_output=True, text=True, check=True).stdout
  functions = []
  for line in text.splitlines():
    if found := FUNCTION.match(line):
      functions.append((found[1], []))
    elif (found := INSTRUCTION.match(line)) and functions:
      functions[-1][1].append((int(found[1], 16), found[2], found[3]))
  return functions


def innermost_loops(code):
  """The instruction lists between a jump back and its target."""
  spans = []
  for address, mnemonic, operands in code:
    target = re.search(r"(?:^|, )([0-9a-f]+) <", operands)
    if JUMP.match(mnemonic) and target:
      if code[0][0] <= int(target[1], 16) <= address:
        spans.append((int(target[1], 16), address))
  return [[line for line in code if first <= line[0] <= last]
          for first, last in spans
          if not any((first, last) != (f, l) and first <= f and l <= last
                     for f, l in spans)]


def is_vector(mnemonic, operands, register, suffix):
  """Whether an instruction computes in whole registers."""
  if IS_ARM:
    lanes = {"v": {"s": "4s", "d": "2d"}, "z": {"s": "s", "d": "d"}}
    return bool(re.match(rf"{register}\d+\.{lanes[register][suffix]}\b",
                         operands))
  return mnemonic[-2:] == "p" + suffix and f"%{register}" in operands


def is_vector_loop(loop, register, suffix):
  """Whether a loop computes, and only in registers of full width."""
  arithmetic = [(mnemonic, operands) for _, mnemonic, operands in loop
                if ARITHMETIC.match(mnemonic)]
  return bool(arithmetic) and all(
      is_vector(*instruction, register, suffix) for instruction in arithmetic)


def plain(code):
  """Instructions as text, without what the linker fills in."""
  lines = []
  for _, mnemonic, operands in code:
    if JUMP.match(mnemonic) or mnemonic in ("call", "bl"):
      operands = ""
    operands = re.sub(r" *[<#].*", "", operands)
    lines.append(f"{mnemonic} " + re.sub(r"-?0x[0-9a-f]+\(%rip\)", "(%rip)",
                                         operands))
  return "\n".join(["", *lines, ""])


@pytest.fixture(scope="module")
def archived(request):
  """The functions of the archive, as disassemble() returns them."""
  archive = request.config.getoption("--loops")
  assert archive, "name the archive of the loops with --loops=PATH"
  return disassemble(archive)


@pytest.fixture(scope="module")
def functions(archived):
  """{(instruction set, rule or sum, state, input): its instructions}."""
  found = {}
  for name, code in archived:
    # Such as "void wrapopt::Baseline<wrapopt::(anonymous namespace)::
    # Arity<wrapopt::Adam, 3ul, 1ul, 8ul>::Loop<float, float>, ...>(...)" or
    # "... ::Baseline<wrapopt::(anonymous namespace)::RowSum<...>, ...>(...)".
    match = re.search(r"wrapopt::(\w+)<wrapopt::\(anonymous namespace\)::"
                      r"(?:Arity<wrapopt::)?(\w+)(?:, \d[^>]*>::Loop)?"
                      r"<(?:wrapopt::)?(\w+), (?:wrapopt::)?(\w+)>, ", name)
    if match:
      found.setdefault(match.groups(), []).extend(code)
  return found


@pytest.fixture(scope="module")
def loops(functions):
  """{(instruction set, rule or sum, state, input): its innermost loops}."""
  return {key: innermost_loops(code) for key, code in functions.items()}


@pytest.mark.skipif(IS_ARM, reason="the instructions are those of x86-64")
def test_a_loop_is_found_and_judged():
  # Two additions of a vector, then a scalar tail, as objdump prints them.
  vector = [(0x10, "vmovups", "(%rax),%ymm0"),
            (0x14, "vaddps", "0x0(%rip),%ymm0,%ymm0        # 20 <f+0x20>"),
            (0x1c, "vaddps", "%ymm0,%ymm1,%ymm0"),
            (0x20, "jne", "10 <f+0x10>")]
  scalar = [(0x24, "vaddss", "%xmm0,%xmm1,%xmm0"), (0x28, "jb", "24 <f+0x24>")]
  code = [(0x0, "je", "24 <f+0x24>"), *vector, *scalar, (0x2a, "ret", ""),
          (0x2b, "jmp", "0 <f>")]
  assert innermost_loops(code) == [vector, scalar]
  assert is_vector_loop(vector, "ymm", "s")
  assert not is_vector_loop(vector, "zmm", "s")
  assert not is_vector_loop(vector, "ymm", "d")
  assert not is_vector_loop(scalar, "xmm", "s")
  assert not is_vector_loop(vector[:1], "ymm", "s")
  assert plain(vector).splitlines()[2] == "vaddps (%rip),%ymm0,%ymm0"


def test_every_rule_has_all_its_loops(loops):
  assert set(loops) == {
      (isa, name, CPP_NAMES[state.name], CPP_NAMES[value.name])
      for name, (state, value) in LOOPS for isa in templates(state)}


def templates(state):
  """The function templates that serve states of a dtype."""
  if IS_ARM:
    return list(REGISTERS)
  widest = "X86_64_v4Wide" if state.itemsize == 2 else "X86_64_v4"
  return ["Baseline", "X86_64_v3", widest]


@pytest.mark.parametrize("name, pair, isa", [
    (name, pair, isa) for name, pair in LOOPS for isa in templates(pair[0])],
                         ids=lambda x: "-".join(map(str, x))
                         if isinstance(x, tuple) else x)
def test_a_loop_is_vector_code(loops, name, pair, isa):
  state, value = (CPP_NAMES[dtype.name] for dtype in pair)
  suffix = "d" if pair[0] == DOUBLE else "s"
  assert any(is_vector_loop(loop, REGISTERS[isa], suffix)
             for loop in loops[isa, name, state, value]), (
                 f"{name} of {state} and {value} for {isa} has no loop with "
                 f"packed arithmetic in {REGISTERS[isa]} registers")


def test_codes_are_vector_code(archived):
  """Their loops over the numbers of a block may be unrolled."""
  found = {}
  for name, code in archived:
    # Such as "void wrapopt::Baseline<wrapopt::(anonymous namespace)::
    # Encode<wrapopt::(anonymous namespace)::Integers<(wrapopt::Code)1, 127>,
    # float>, ...>(...)".
    match = re.search(r"wrapopt::(\w+)<wrapopt::\(anonymous namespace\)::"
                      r"((?:En|De)code)<wrapopt::\(anonymous namespace\)::"
                      r"(\w+)(?:<\(wrapopt::Code\)\d, (\d+)> ?)?"
                      r"(?:, (?:wrapopt::)?(\w+))?>, ", name)
    if match:
      found.setdefault(match.groups(), []).extend(code)
  assert set(found) == {
      (isa, work, *kind, value) for isa in templates(np.dtype("float32"))
      for kind in (("Bfloat16s", None), ("Integers", "127"), ("Integers", "7"))
      for work, values in (("Encode", ("Half", "Bfloat16", "float")),
                           ("Decode", (None,))) for value in values}
  for (isa, work, kind, *rest), code in found.items():
    wanted = {"add", "sub"}
    if work == "Decode" or kind == "Integers":
      wanted.add("mul")
    if work == "Encode" and kind == "Integers":
      wanted.add("div")
    packed = {re.search("add|sub|mul|div", mnemonic)[0]
              for _, mnemonic, operands in code if ARITHMETIC.match(mnemonic)
              and is_vector(mnemonic, operands, REGISTERS[isa], "s")}
    assert wanted <= packed, (isa, work, kind, *rest)


@pytest.mark.parametrize("rule", WITH_KERNELS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda x: "-".join(map(str, x)))
def test_a_loop_fetches_each_array_ahead(functions, rule, pair):
  arrays = len(_native.rules()[rule].states + _native.rules()[rule].inputs)
  for isa in templates(pair[0]):
    code = functions[isa, rule, *(CPP_NAMES[dtype.name] for dtype in pair)]
    fetches = [mnemonic for _, mnemonic, _ in code if FETCH.match(mnemonic)]
    assert len(fetches) >= arrays, isa


@pytest.mark.skipif(not IS_ARM, reason="no other compiler takes loops apart")
def test_no_loop_of_sve_takes_a_vector_apart(loops):
  """g++ 12 did, for the elements of 128 bits only: see cc/BUILD."""
  assert not [(key, line) for key, found in loops.items() if key[0] == "Sve"
              for loop in found for line in loop
              if re.match(r"u?mov$", line[1])
              and re.search(r"\bv\d+\.[sd]\[", line[2])]


@pytest.mark.by_day(0)
@pytest.mark.skipif(IS_ARM, reason="the linker fills in more than one kind of "
                    "operand")
def test_one_library_holds_the_loops(loops):
  text = "\n".join(plain(code) for _, code in disassemble(_native.LIBRARY))
  missing = [key for key, found in loops.items()
             if not all(plain(loop) in text for loop in found)]
  assert not missing
  # The library of each TensorFlow calls them there.
  assert os.path.getsize(wrapopt.sysconfig.get_lib()) < 2**20
