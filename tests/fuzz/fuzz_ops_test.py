"""The fuzzer of the raw ops: some cases of it, and that it finds what is wrong.

./tools/fuzz ops runs cases without an end.
"""

import os
import time

import numpy as np
import pytest
import tensorflow as tf

import fuzz_ops
import fuzz_ops_inputs as inputs
import fuzz_ops_models as models
import fuzz_ops_runs as runs

CASES = 150  # In the daily tests, which always run the same.

# Ops whose results no model checks, and why.
WITHOUT_MODEL = {}


def fuzzed(*argv):
  """(findings, printed lines) of the command."""
  args = fuzz_ops.parse([str(x) for x in argv])
  lines = []
  seeds = range(args.seed, args.seed + (args.count or 1))
  return fuzz_ops.fuzz(args, seeds, lines.append), lines


def test_each_op_has_a_model():
  assert fuzz_ops.without_model() == sorted(WITHOUT_MODEL)


def test_cases():
  findings, lines = fuzzed("--seed", 600, "--count", CASES)
  assert not findings.texts, "\n".join(findings.texts)
  assert findings.cases == CASES, lines
  # Otherwise most cases test only the checks of inputs.
  assert findings.share() > 0.25, "\n".join(findings.table())
  assert findings.total("compared") > 6 * CASES


def test_each_op_is_called():
  # By the numbers of the cases alone: they need not run.
  ops = {inputs.make(seed).op for seed in range(1500)}
  assert ops == set(inputs.op_defs_once())


def test_a_number_is_a_case():
  for seed in range(50):
    assert fuzz_ops.describe(inputs.make(seed)) == fuzz_ops.describe(
        inputs.make(seed))


# That it finds what is wrong. Each of these breaks the calls of proper cases.


def some_case(op, proper=True, fits=lambda case: True):
  """The first eager case of an op on one device, proper or refused."""
  for seed in range(10**5):
    case = inputs.make(seed, op, "eager")
    if (bool(case.spoiled) != proper and case.op == op and
        all(v.device == 0 for v in case.variables) and fits(case)):
      case.calls = 1
      told = fuzz_ops.run_case(inputs.make(seed, op, "eager"))
      assert told["wrong"] is None
      if told["done"] if proper else told["refused"]:
        return case
  raise AssertionError(f"no case of {op}")


def variables(case):
  """Indices of the variables with elements that are numbers."""
  return [i for i, v in enumerate(case.variables)
          if v.kind == "variable" and v.value is not None and v.value.size and
          tf.as_dtype(v.dtype).is_floating]


def assign(world, i, value):
  tf.raw_ops.AssignVariableOp(
      resource=world.handles[i],
      value=runs.tensor(value, world.case.variables[i].dtype))


def after(world, change):
  """Makes a world's calls do something else at their end."""
  call = world.call

  def changed():
    try:
      return call()
    finally:
      change()

  world.call = changed


def by_little(world, i, at=-1):
  """One element is off, by as little as its dtype can tell."""

  def change():
    value = world.snapshot()[i]
    flat = value.reshape(-1)
    ulps = 64 if value.itemsize > 2 else 2
    for _ in range(ulps):
      flat[at] = np.nextafter(flat[at], flat.dtype.type(np.inf))
    assign(world, i, value)

  return change


@pytest.mark.parametrize("op", [
    "Apply", "Apply sparse", "EmaUpdate", "AveragingAssign", "Exchange",
    "ReadAverages", "AssignPacked", "AveragingMean"])
def test_a_wrong_element_is_found(op):
  op, _, kind = op.partition(" ")
  # The op changes some variable, whose numbers are not narrow.
  case = some_case(f"Wrapopt>{op}", fits=lambda case: all(
      v.dtype in (inputs.FLOAT, inputs.DOUBLE) and np.prod(v.shape)
      for v in case.variables) and case.inputs.get("accept", [True])[0] and
                   all(x.size for x in case.inputs.get("indices", [])) and
                   (kind != "sparse" or case.attrs["NI"]))
  found = 0
  for i in range(len(case.variables)):
    def hook(world, i=i):
      if i in variables(world.case):
        after(world, by_little(world, i))

    found += fuzz_ops.run_case(case, hook)["wrong"] is not None
  assert found > 0, fuzz_ops.describe(case)


@pytest.mark.parametrize("op", ["Apply", "AveragingAssign", "Exchange"])
def test_a_refused_call_that_changes_a_variable_is_found(op):
  # A change of an infinite number by 1 is none.
  case = some_case(
      f"Wrapopt>{op}", proper=False, fits=lambda case: variables(case) and all(
          np.isfinite(np.asarray(v.value, float)).all() for v in case.variables
          if v.dtype in inputs.FLOATS and v.value is not None))

  def hook(world):
    i = variables(world.case)[0]
    after(world, lambda: assign(world, i, case.variables[i].value + 1))

  wrong = fuzz_ops.run_case(case, hook)["wrong"]
  assert "was refused" in wrong and "but changed variable" in wrong


def test_a_refused_call_that_initializes_a_variable_is_found():
  case = some_case("Wrapopt>EmaUpdate", proper=False)
  case.variables[0].value = None

  def hook(world):
    after(world, lambda: assign(world, 0, np.zeros(
        case.variables[0].shape, inputs.numpy_dtype(case.variables[0].dtype))))

  wrong = fuzz_ops.run_case(case, hook)["wrong"]
  assert "got a value, want none" in wrong


@pytest.mark.parametrize("proper, found", [
    (True, "refused a proper call"), (False, "does not tell why")])
def test_a_refusal_without_a_reason_is_found(proper, found):
  case = some_case("Wrapopt>Apply", proper)

  def hook(world):
    def refuse():
      raise tf.errors.InvalidArgumentError(None, None, "no")
    world.call = refuse

  assert found in fuzz_ops.run_case(case, hook)["wrong"]


def test_an_accepted_call_that_is_wrong_is_found():
  # The call is of another case, whose variable has a value.
  case = some_case("Wrapopt>EmaUpdate")
  i = case.inputs["variables"][-1]

  def hook(world):
    snapshot = world.snapshot
    world.snapshot = lambda: [None if j == i else x
                              for j, x in enumerate(snapshot())]

  assert "accepted" in fuzz_ops.run_case(case, hook)["wrong"]


@pytest.mark.parametrize("op, limit, token, second", [
    ("StalenessGate", -1, 7, (False, -1, -1)),  # The first one was dropped.
    ("StalenessGate", 9, 7, (True, 1, 3)),  # It was aborted with its call.
    ("StalenessGate", -1, -1, (False, 0, -1)),  # These two are different ones.
    ("BeginUpdate", None, 7, (True, 3)),
])
def test_a_second_try(op, limit, token, second):
  case = some_case(f"Wrapopt>{op}")
  case.calls = 2
  [step] = case.inputs["step"]
  case.variables[step].value = np.array(3, case.variables[step].value.dtype)
  case.inputs["token"] = [np.array(token)]
  if limit is not None:
    case.inputs.update(recorded=[np.array(3)], limit=[np.array(limit)])

  def told(wrong=None):
    """The findings of a run in which output `wrong` of call 2 was changed."""
    seen = []

    def hook(world):
      call = world.call

      def changed():
        outputs = call()
        if seen and wrong is not None:
          x = outputs[wrong]
          outputs[wrong] = ~x if x.dtype == bool else x + 1
        seen.append(tuple(x[()] for x in outputs if x is not None))
        return outputs

      world.call = changed

    return fuzz_ops.run_case(case, hook)["wrong"], seen[1]

  assert told() == (None, second)
  for wrong in (0, 1) if op == "BeginUpdate" else (0, 1, 3):
    assert told(wrong)[0] is not None


@pytest.mark.parametrize("shape", [(2,), (0,)])
def test_xla_leaves_out_a_call_without_elements(shape):
  case = some_case("Wrapopt>EmaUpdate", fits=lambda case: all(
      v.dtype == inputs.FLOAT for v in case.variables))
  case.mode, case.bundle, case.spoiled = "jit", None, ["decays"]
  for v in case.variables:
    v.shape, v.value = shape, np.zeros(shape, np.float32)
  case.inputs["decays"] = [np.full_like(case.inputs["decays"][0], -9.)]
  told = fuzz_ops.run_case(case)
  assert told["wrong"] is None and told["done"] == (shape == (0,))


@pytest.mark.by_day(0)
def test_a_table_stays_one():
  for seed in range(20000):
    for v in inputs.make(seed, "StalenessRecord").variables:
      assert v.kind == "variable" or v.value is None, seed


def test_a_change_of_what_somebody_reads_is_found():
  case = some_case("Wrapopt>Exchange")
  case.variables[0].held = True

  def hook(world):
    world.held_values[0] = np.flip(world.held_values[0] + 1)

  assert "somebody has read" in fuzz_ops.run_case(case, hook)["wrong"]


def test_an_op_without_model_is_only_not_compared(monkeypatch):
  monkeypatch.delitem(models._MODELS, "EmaUpdate")
  assert fuzz_ops.without_model() == ["Wrapopt>EmaUpdate",
                                      "Wrapopt>EmaUpdateRef"]
  case = some_case("Wrapopt>EmaUpdate")
  i = case.inputs["variables"][0]
  spoil = lambda world: after(world, lambda: assign(
      world, i, case.variables[i].value))
  told = fuzz_ops.run_case(case, spoil)
  assert told["wrong"] is None and told["done"] == 1


# In a child. A crash that only a process with earlier cases has, and a hang.

FIRST = 5
_seen = []


def break_the_child(world):
  _seen.append(world.case.seed)
  if _seen == [FIRST, FIRST + 1]:
    world.call = os.abort
  if _seen == [FIRST + 2]:
    world.call = lambda: time.sleep(10**6)


def test_an_end_of_the_child_is_found():
  findings, lines = fuzzed("--seed", FIRST, "--count", 3, "--op", "EmaUpdate",
                           "--mode", "eager", "--deadline", 10, "--hook",
                           "fuzz_ops_test:break_the_child")
  assert findings.cases == 1, lines
  crash, hang = findings.texts
  assert crash.startswith(f"FOUND in case {FIRST + 1}: crash: SIGABRT\n")
  assert hang.startswith(
      f"FOUND in case {FIRST + 2}: hang: no end after 10 seconds\n")
  for text in crash, hang:
    assert "EmaUpdate" in text  # What was called,
    assert "in _run_calls" in text  # and the stacks of the child's threads.
  repeat = "To repeat: ./tools/fuzz ops --seed {} --op EmaUpdate --mode eager"
  assert repeat.format(f"{FIRST} --count 2") in crash
  assert f"case {FIRST + 1} alone shows nothing" in crash
  assert hang.endswith(repeat.format(FIRST + 2))
