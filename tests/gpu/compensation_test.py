"""Compensated steps on a GPU: the bits of the CPU, and one launch.

ops/compensation_test.py also runs on the GPU, and tests numbers and errors.
"""

import numpy as np
import pytest
import tensorflow as tf

import modes
import numerics
from gpu_support import arrays
from gpu_support import LAZY_RULES
from gpu_support import Log
from gpu_support import on
from gpu_support import rows_of
from gpu_support import rule_of
from gpu_support import RULES
from numerics import DOUBLE
from wrapopt import ops
from wrapopt.ops import _compensation

POLICIES = list(_compensation.POLICIES)
PAIRS = [(numerics.HALF, numerics.HALF), (numerics.BFLOAT16, numerics.FLOAT),
         (numerics.FLOAT, numerics.FLOAT), (DOUBLE, DOUBLE)]

of_pairs = pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda p: "-".join(d.name for d in p))


def policies_of(rule, pair):
  """All for one rule, for the others one: each of them with each type."""
  if rule == "Momentum":
    return POLICIES
  return [POLICIES[(RULES.index(rule) + PAIRS.index(pair)) % len(POLICIES)]]


class Steps:
  """Steps of a rule, with arrays that are the same on each device."""

  def __init__(self, rule, policy, pair, shapes, lazy=False):
    self.rule, self.policy, self.shapes = rule, policy, shapes
    self.dtype, self.grad_dtype = pair
    self.lazy = lazy
    self.rng = np.random.default_rng(7)
    self.values = [arrays(self.rng, rule, rule_of(rule)[0], shape, self.dtype)
                   for shape in shapes]
    compute = np.float64 if self.dtype == DOUBLE else np.float32
    states, scalars = _compensation.POLICIES[policy]
    # Some are 0, as those of a row that took no step.
    self.memory = {state: [np.asarray(self.rng.random(shape) *
                                      (self.rng.random(shape) > 0.2), compute)
                           for shape in shapes] for state in states}
    self.policy_scalars = dict(zip(scalars, (0.3, 0.2, 0.1)))

  def tensors(self, shapes, dtype):
    return [tf.constant(np.asarray(self.rng.normal(size=shape), dtype))
            for shape in shapes]

  def run(self, device, steps):
    """What all variables are after steps, of [(gradients, origins)]."""
    states, scalars = rule_of(self.rule)
    variables = [on(device, row) for row in self.values]
    memory = {state: on(device, row) for state, row in self.memory.items()}
    averages = [on(device, [np.zeros(shape, self.grad_dtype)
                            for shape in self.shapes]) for _ in range(2)]
    logs = [on(device, [np.zeros(shape[0] + 2) for shape in self.shapes])
            for _ in averages] if self.lazy else ()
    for grads, origins in steps:
      ops.apply(
          self.rule, {state: [row[i] for row in variables]
                      for i, state in enumerate(states)}, grads,
          dict(zip([s.rstrip("?") for s in scalars],
                   (bool(x > 0.5) if s.endswith("?") else x for s, x in zip(
                       scalars, numerics.scalars(self.rule))))),
          shadows=averages, decay=[0.75, 0.9], log_decays=logs,
          compensation=ops.Compensation(self.policy, origins, memory,
                                        self.policy_scalars))
    return [v.numpy() for row in [*variables, *memory.values(), *averages]
            for v in row] + [v.numpy()[:-1] for row in logs for v in row]

  def check(self, steps):
    for want, got in zip(self.run(modes.OTHERS, steps),
                         self.run(modes.VARIABLES, steps), strict=True):
      numerics.assert_same_numbers(got, want)


@of_pairs
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gives_the_bits_of_the_cpu(rule, pair):
  # Below, at and above what a thread and a block take; and nothing.
  shapes = [(), (0,), (7,), (8,), (2, 1023), (2049,), (20_001,)]
  for policy in policies_of(rule, pair):
    steps = Steps(rule, policy, pair, shapes)
    steps.check([(steps.tensors(shapes, steps.grad_dtype),
                  steps.tensors(shapes, steps.dtype)) for _ in range(2)])


@of_pairs
@pytest.mark.parametrize("rule", RULES)
def test_rows_give_the_bits_of_the_cpu(rule, pair):
  # Rows that are often in the gradient; each row at most once, some with their
  # neighbors; no row; rows of no elements.
  shapes = [(300, 3), (40, 5), (30, 2), (5, 0)]
  for policy in policies_of(rule, pair):
    steps = Steps(rule, policy, pair, shapes)
    indices = np.concatenate([np.arange(12), [20, 17, 18, 30]])
    grads = [rows_of(steps.rng, shapes[0], 900, steps.grad_dtype),
             tf.IndexedSlices(*steps.tensors([(16, 5)], steps.grad_dtype),
                              tf.constant(indices), shapes[1]),
             rows_of(steps.rng, shapes[2], 0, steps.grad_dtype),
             rows_of(steps.rng, shapes[3], 3, steps.grad_dtype)]
    steps.check([(grads, steps.tensors([g.values.shape for g in grads],
                                       steps.dtype))])


@of_pairs
@pytest.mark.parametrize("rule", LAZY_RULES)
def test_lazy_rows_give_the_bits_of_the_cpu(rule, pair):
  shapes = [(300, 3), (40, 2, 8), (30,)]
  for policy in policies_of(rule, pair):
    steps = Steps(rule, policy, pair, shapes, lazy=True)
    grads = [[rows_of(steps.rng, shape, count, steps.grad_dtype)
              for shape, count in zip(shapes, (400, 9, 20))] for _ in range(3)]
    steps.check([(row, steps.tensors([g.values.shape for g in row],
                                     steps.dtype)) for row in grads])


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_one_launch(policy):
  steps = Steps("Adam", policy, (numerics.FLOAT, numerics.FLOAT), [(9,)] * 5)
  log = Log()
  steps.run(modes.VARIABLES, [(steps.tensors(steps.shapes, np.float32),
                               steps.tensors(steps.shapes, np.float32))])
  log.assert_launched(("Adam_float", 5))
  assert log.kinds in ({"compensated"}, set())
