"""XLA programs on a real GPU: as calls of the GPU kernels, and as plain HLO.

`./tools/gpu_check` runs this with and without XLA's command buffers. An
emulated GPU runs no program of XLA: on a machine without a GPU, the tests run
on the CPU, if they are asked for.
"""

import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_all
import modes
import numerics
from xla_programs import (
    DTYPES, instructions, jit, Problem, program, RULES, SHAPES)

CALLS = {"wrapopt_gpu_update", "wrapopt_apply"}
STEPS = 100


def taken(rule, dtypes, steps, compiles=True):
  """A problem after some steps, of which the last but one is refused."""
  with tf.device(modes.VARIABLES):
    problem = Problem(rule, dtypes, SHAPES)
    function = problem.apply
    if compiles:
      function = jit(function)
    for step in range(steps):
      grads, scalars, decays, accept = problem.args(step != steps - 2)
      # New numbers in each step, as of a schedule.
      decays = [d / (1 + step) for d in decays]
      function(grads, scalars, decays, accept)
  found = {line[2].split('custom_call_target="')[1].split('"')[0]
           for line in instructions(program(
               function, *problem.args(), stage="optimized_hlo"))
           if line[1] == "custom-call"} if compiles else set()
  return problem, found & CALLS


def choose(monkeypatch, mode):
  for device in "CPU", "GPU":
    monkeypatch.setenv(f"WRAPOPT_XLA_ON_{device}", mode)


@pytest.mark.parametrize("mode", ["call", "hlo"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=numerics.name_of)
@pytest.mark.parametrize("rule", RULES)
def test_one_step(rule, dtypes, mode, monkeypatch):
  choose(monkeypatch, mode)
  problem, calls = taken(rule, dtypes, 1)
  assert len(calls) == (mode == "call")
  problem.check(problem.grads)


@pytest.mark.parametrize("dtypes", DTYPES, ids=numerics.name_of)
@pytest.mark.parametrize("rule", RULES)
def test_many_steps_have_the_bits_of_the_op_without_xla(
    rule, dtypes, monkeypatch):
  choose(monkeypatch, "call")
  want, _ = taken(rule, dtypes, STEPS, compiles=False)
  got, calls = taken(rule, dtypes, STEPS)
  assert len(calls) == 1
  assert_all(numerics.assert_same_numbers, got.all_values(), want.all_values())


@pytest.mark.parametrize("mode", ["call", "hlo"])
def test_a_refused_step_changes_nothing(mode, monkeypatch):
  choose(monkeypatch, mode)
  for rule in RULES:
    with tf.device(modes.VARIABLES):
      problem = Problem(rule, DTYPES[2], SHAPES)
      jit(problem.apply)(*problem.args(accept=False))
    problem.check_unchanged()


def test_calls_and_hlo_agree(monkeypatch):
  """After many steps; XLA may contract a product and a sum to one rounding."""
  found = []
  for mode in "call", "hlo":
    choose(monkeypatch, mode)
    problem, _ = taken("Momentum", DTYPES[2], STEPS)
    found.append(np.concatenate([x.ravel() for x in problem.all_values()]))
  # Each step rounds a few times; nothing amplifies it.
  np.testing.assert_allclose(*found, rtol=STEPS * 8 * 2**-24, atol=1e-5)
