"""ops.Compensation: steps with gradients that are compensated for their age.

The model is float64 NumPy, written from the papers.
"""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import numerics
import wrapopt
from modes import Eager
from modes import Graph
from modes import Jit
from modes import mode  # pylint: disable=unused-import
from modes import only
from modes import refused
from wrapopt import _native
from wrapopt._loader import ops as raw_ops

Compensation = wrapopt.ops.Compensation
SCALARS = {
    "ConstantDelayCompensation": {"lambda": 0.7},
    "DelayCompensation": {"lambda": 0.7, "rate": 0.3, "epsilon": 0.01},
    "GapAware": {"rate": 0.3},
}
STATES = {
    "ConstantDelayCompensation": (),
    "DelayCompensation": ("mean_square",),
    "GapAware": ("step_size",),
}
RULES = {
    "GradientDescent": (["var"], {"lr": 0.1}),
    "Momentum": (["var", "accum"],
                 {"lr": 0.1, "momentum": 0.9, "use_nesterov": False}),
    "Adam": (["var", "m", "v"],
             {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3,
              "weight_decay": 0.0, "use_nesterov": False, "beta1_power": 0.9,
              "beta2_power": 0.99}),
}
SHAPE = (7, 3)


def model(policy, rule, states, grad, origin, memory):
  """The states and the memory after a step, in float64."""
  var = states[0]
  delay = var - origin
  if policy == "GapAware":
    size = memory["step_size"]
    gap = 1 + np.divide(np.abs(delay), size, out=np.zeros_like(delay),
                        where=size > 0)
    taken = grad / gap
  else:
    by = SCALARS[policy]["lambda"]
    if policy == "DelayCompensation":
      decay = 1 - SCALARS[policy]["rate"]
      memory = {"mean_square": decay * memory["mean_square"]
                + (1 - decay) * grad ** 2}
      by = by / np.sqrt(memory["mean_square"] + SCALARS[policy]["epsilon"])
    taken = grad + by * grad * grad * delay
  new = step(rule, states, taken)
  if policy == "GapAware":
    moved, decay = np.abs(new[0] - var), 1 - SCALARS[policy]["rate"]
    memory = {"step_size": np.where(size == 0, moved, decay * size
                                    + (1 - decay) * moved)}
  return new, memory


def step(rule, states, g):
  s = RULES[rule][1]
  if rule == "GradientDescent":
    return [states[0] - s["lr"] * g]
  if rule == "Momentum":
    accum = s["momentum"] * states[1] + g
    return [states[0] - s["lr"] * accum, accum]
  m = s["beta1"] * states[1] + (1 - s["beta1"]) * g
  v = s["beta2"] * states[2] + (1 - s["beta2"]) * g * g
  rate = s["lr"] * np.sqrt(1 - s["beta2_power"]) / (1 - s["beta1_power"])
  return [states[0] - rate * m / (np.sqrt(v) + s["epsilon"]), m, v]


class Case:
  """Arrays of a step of some variables, as `dtype`."""

  def __init__(self, policy, rule, dtype, shapes=(SHAPE,), seed=0,
               grad_dtype=None):
    self.policy, self.rule = policy, rule
    rng = np.random.default_rng(seed)
    self.states = {
        name: [np.abs(rng.standard_normal(shape)).astype(dtype)
               for shape in shapes] for name in RULES[rule][0]}
    self.states["var"] = [rng.standard_normal(shape).astype(dtype)
                          for shape in shapes]
    self.grads = [rng.standard_normal(shape).astype(grad_dtype or dtype)
                  for shape in shapes]
    self.origins = [(v + rng.standard_normal(v.shape) / 4).astype(dtype)
                    for v in self.states["var"]]
    memory = np.float64 if dtype == np.float64 else np.float32
    self.memory = {
        name: [np.asarray(rng.random(shape) * (rng.random(shape) > 0.2),
                          memory) for shape in shapes]
        for name in STATES[policy]}

  def make(self, mode):
    make = lambda lists: {name: [mode.variable(x) for x in row]
                          for name, row in lists.items()}
    self.made = make(self.states), make(self.memory)
    return self.made

  def build(self, grads=None, origins=None, **kwargs):
    states, memory = self.made
    return wrapopt.ops.apply(
        self.rule, states, self.grads if grads is None else grads,
        RULES[self.rule][1], compensation=Compensation(
            self.policy, self.origins if origins is None else origins, memory,
            SCALARS[self.policy]), **kwargs)

  def got(self, mode):
    states, memory = self.made
    return ({k: mode.values(row) for k, row in states.items()},
            {k: mode.values(row) for k, row in memory.items()})

  def want(self, i, origin=None, grad=None):
    return model(self.policy, self.rule,
                 [np.float64(row[i]) for row in self.states.values()],
                 np.float64(self.grads[i] if grad is None else grad),
                 np.float64(self.origins[i] if origin is None else origin),
                 {k: np.float64(row[i]) for k, row in self.memory.items()})


def check(case, mode, rtol=1e-12):
  states, memory = case.got(mode)
  for i in range(len(case.grads)):
    new, of_policy = case.want(i)
    for name, want in zip(case.states, new):
      np.testing.assert_allclose(states[name][i], want, rtol=rtol, atol=rtol)
    for name, want in of_policy.items():
      np.testing.assert_allclose(memory[name][i], want, rtol=rtol, atol=rtol)


def test_a_trajectory(mode):
  # w is 1, the gradient 2 was computed at 0.5. Constant, lambda 0.5:
  # 2 + 0.5 4 0.5 = 3, w = 1 - 0.25 3.
  w = mode.variable(np.float32([1]))
  mode.run(lambda: wrapopt.ops.apply(
      "GradientDescent", {"var": [w]}, [tf.constant([2.0])], {"lr": 0.25},
      compensation=Compensation("ConstantDelayCompensation",
                                [tf.constant([0.5])],
                                scalars={"lambda": 0.5})))
  assert mode.values([w])[0] == [0.25]
  # Gap-aware: the way of 0.5 is 2 steps of 0.25, so that 3 becomes 1 and the
  # step 0.25. The mean of the steps stays.
  w = mode.variable(np.float32([1]))
  size = mode.variable(np.float32([0.25]))
  mode.run(lambda: wrapopt.ops.apply(
      "GradientDescent", {"var": [w]}, [tf.constant([3.0])], {"lr": 0.25},
      compensation=Compensation("GapAware", [tf.constant([0.5])],
                                {"step_size": [size]}, {"rate": 0.5})))
  assert [x[0] for x in mode.values([w, size])] == [0.75, 0.25]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", SCALARS)
def test_float64_is_that_of_the_model(mode, policy, rule):
  case = Case(policy, rule, np.float64, (SHAPE, (), (0, 2), (2000,)))
  case.make(mode)
  mode.run(case.build)
  check(case, mode)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", SCALARS)
@only(Jit())
def test_hlo_is_that_of_the_model(mode, policy, rule):
  case = Case(policy, rule, np.float32)
  case.make(mode)
  mode.run(case.build)
  check(case, mode, rtol=1e-5)


@pytest.mark.parametrize("pair", [
    pair for pair in numerics.PAIRS if pair[0] != numerics.FLOAT or
    pair[1] == numerics.FLOAT], ids=str)
@pytest.mark.parametrize("policy", SCALARS)
def test_bits_are_those_of_the_rules_one_after_the_other(policy, pair):
  dtype, grad_dtype = pair
  case = Case(policy, "Momentum", dtype, ((2000,),), grad_dtype=grad_dtype)
  states, memory = case.make(Eager())
  case.build()

  compute = np.float64 if dtype == np.float64 else np.float32
  [var], [accum] = case.states["var"], case.states["accum"]
  before = np.array(var, compute)
  grad = before - case.origins[0].astype(compute)
  of_policy = [row[0] for row in case.memory.values()]
  names = _native.rules()[policy].scalars
  _native.step(policy, [*of_policy, grad], [case.grads[0]],
               [SCALARS[policy][name] for name in names])
  s = RULES["Momentum"][1]
  _native.step("Momentum", [var, accum], [grad], [s["lr"], s["momentum"], 0])
  if policy == "GapAware":
    _native.step("StepSize", [of_policy[0], before], [var], [0.3])
  for row, want in zip([*states.values(), *memory.values()],
                       [var, accum, *of_policy]):
    numerics.assert_same_bits(row[0].numpy(), want)


@pytest.mark.parametrize("dtype", numerics.DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", SCALARS)
def test_without_a_delay_nothing_changes(mode, policy, rule, dtype):
  special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 6e4, -6e4, 1e-7, 2],
                     np.float32).astype(dtype)
  case = Case(policy, rule, dtype, (special.shape,))
  case.grads, case.origins = [special], case.states["var"]
  case.make(mode)
  mode.run(case.build)
  got, _ = case.got(mode)
  plain = Case(policy, rule, dtype, (special.shape,))
  plain.grads = [special]
  if mode.name == "jit":
    plain.origins = plain.states["var"]
    plain.policy = "ConstantDelayCompensation"
    plain.memory = {}
    plain.make(mode)
    mode.run(plain.build)
  else:
    states = {k: [mode.variable(x) for x in row]
              for k, row in plain.states.items()}
    plain.made = states, {}
    mode.run(lambda: wrapopt.ops.apply(rule, states, plain.grads,
                                       RULES[rule][1]))
  for name, row in plain.got(mode)[0].items():
    if mode.name == "jit":
      # Programs differ in the products and sums that XLA makes one operation.
      np.testing.assert_allclose(
          np.float64(got[name][0]), np.float64(row[0]),
          rtol=float(ml_dtypes.finfo(dtype).eps) * 2)
    else:
      numerics.assert_same_numbers(got[name][0], row[0], name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", SCALARS)
def test_sparse_rows(mode, policy, rule):
  case = Case(policy, rule, np.float64, ((9, 3),))
  case.make(mode)
  rng = np.random.default_rng(5)
  # Row 4 has three gradients, the first of which has the origin that counts.
  indices = np.array([4, 0, 4, 8, 4])
  values = rng.standard_normal((5, 3))
  origins = case.states["var"][0][indices] + rng.standard_normal((5, 3)) / 4
  mode.run(lambda: case.build(
      [tf.IndexedSlices(tf.constant(values), tf.constant(indices))],
      [tf.constant(origins)]))
  states, memory = case.got(mode)

  summed = np.zeros((9, 3))
  np.add.at(summed, indices, values)
  origin = case.states["var"][0].copy()
  for i in reversed(range(5)):
    origin[indices[i]] = origins[i]
  new, of_policy = case.want(0, origin, summed)
  rows = np.isin(np.arange(9), indices)[:, np.newaxis]
  for name, old, want in zip(case.states, case.states.values(), new):
    # Adam moves all rows.
    want = want if rule == "Adam" else np.where(rows, want, old[0])
    np.testing.assert_allclose(states[name][0], want, rtol=1e-12, atol=1e-12)
  for name, want in of_policy.items():
    want = np.where(rows, want, case.memory[name][0])
    np.testing.assert_allclose(memory[name][0], want, rtol=1e-12, atol=1e-12)
    numerics.assert_same_bits(memory[name][0][~rows[:, 0]],
                              case.memory[name][0][~rows[:, 0]])


@pytest.mark.parametrize("policy", SCALARS)
def test_averages_follow_in_the_same_op(mode, policy):
  case = Case(policy, "GradientDescent", np.float64)
  case.make(mode)
  shadow = mode.variable(np.zeros(SHAPE))
  mode.run(lambda: case.build(shadows=[shadow], decay=0.25))
  check(case, mode)
  np.testing.assert_allclose(mode.values([shadow])[0],
                             0.75 * case.want(0)[0][0], rtol=1e-12)


def test_it_is_one_op():
  with Graph(True).entered() as mode:
    case = Case("GapAware", "Adam", np.float32, (SHAPE, (2,)))
    case.make(mode)
    update = case.build(shadows=[mode.variable(np.zeros(SHAPE, np.float32)),
                                 mode.variable(np.zeros(2, np.float32))],
                        decay=0.5)
    assert update.type == "Wrapopt>Apply"
    handles = {v.handle.op for of in case.made for row in of.values()
               for v in row}
    users = {op for op in mode.graph.get_operations()
             if handles & {t.op for t in op.inputs}}
    assert {op.type for op in users} <= {
        "Wrapopt>Apply", "AssignVariableOp", "ReadVariableOp",
        "VarIsInitializedOp"}


@pytest.mark.parametrize("policy", SCALARS)
def test_a_step_that_is_not_accepted_changes_nothing(mode, policy):
  for sparse in (False, True):
    case = Case(policy, "Momentum", np.float32)
    case.make(mode)
    grads = [tf.IndexedSlices(case.grads[0], np.arange(7))] if sparse else None
    mode.run(lambda: case.build(grads, accept=tf.constant(False)))
    for got, want in zip(case.got(mode), (case.states, case.memory)):
      for name, row in want.items():
        numerics.assert_same_bits(got[name][0], row[0])


def test_the_weights_that_were_read_stay(mode):
  if mode.name not in ("eager", "function"):
    pytest.skip("needs a value outside of the step")
  case = Case("ConstantDelayCompensation", "GradientDescent", np.float32)
  case.make(mode)
  [w] = case.made[0]["var"]
  held = tf.raw_ops.ReadVariableOp(resource=w.handle, dtype=w.dtype)
  mode.run(case.build)
  numerics.assert_same_bits(held.numpy(), case.states["var"][0])
  assert (w.numpy() != held.numpy()).all()


def test_the_buffer_of_a_ref_variable_is_refused():
  with Graph(False).entered() as mode:
    case = Case("ConstantDelayCompensation", "GradientDescent", np.float32)
    case.make(mode)
    [w] = case.made[0]["var"]
    with tf.device(w.device):
      read = tf.identity(w._ref())
    refused(mode, [w], tf.errors.InvalidArgumentError,
            r"origins\[0\] must be a copy of the weights, got the buffer of "
            r"var\[0\] \(variable 'Variable'\)",
            lambda: case.build(origins=[read]))


@pytest.mark.parametrize("change, error, text", [
    (dict(policy="Nonsense"), ValueError, "`policy` must be one of Constant"),
    (dict(states={}), ValueError,
     "`states` of DelayCompensation must hold mean_square, got nothing"),
    (dict(scalars={"lambda": 1}), ValueError,
     "`scalars` of DelayCompensation must hold lambda, rate, epsilon, got"),
    (dict(origins=[]), ValueError,
     "`origins` must hold one tensor for each of the 1 variables, got 0"),
    (dict(origins=[np.zeros(SHAPE)]), TypeError,
     r"`origins\[0\]` must be of dtype float32, that of .*, got float64"),
    (dict(origins=[np.zeros(3, np.float32)]), ValueError,
     r"`origins\[0\]` misshapen: got \(3,\) but expected \(7, 3\)"),
    (dict(states={"mean_square": [tf.float64]}), TypeError,
     r"`states\['mean_square'\]\[0\]` .* must be of dtype float32, got float64"
    ),
    (dict(states={"mean_square": []}), ValueError,
     r"`states\['mean_square'\]` must hold at least one variable, got none"),
])
def test_arguments_are_checked(change, error, text):
  case = Case("DelayCompensation", "GradientDescent", np.float32)
  w, memory = tf.Variable(case.states["var"][0]), tf.Variable(tf.zeros(SHAPE))
  arguments = dict(policy="DelayCompensation", origins=case.origins,
                   states={"mean_square": [memory]},
                   scalars=SCALARS["DelayCompensation"])
  if change.get("states", {}).get("mean_square") == [tf.float64]:
    change = dict(states={"mean_square": [
        tf.Variable(tf.zeros(SHAPE, tf.float64))]})
  with pytest.raises(error, match=text):
    wrapopt.ops.apply("GradientDescent", {"var": [w]}, case.grads, {"lr": 0.1},
                      compensation=Compensation(**{**arguments, **change}))
  numerics.assert_same_bits(w.numpy(), case.states["var"][0])


def raw(**changes):
  w = Eager().variable(np.ones(3, np.float32))
  memory = Eager().variable(np.zeros(3, np.float32))
  arguments = dict(
      variables=[w.handle, memory.handle], grad=[tf.ones([3])], indices=[],
      origins=list(map(tf.constant, changes.pop(
          "origins", [np.zeros(3, np.float32)]))),
      scalars=tf.constant([0.1, 1, 0.5, 0.1], tf.float64),
      decays=tf.constant([], tf.float64), accept=True, rule="GradientDescent",
      policy="DelayCompensation", NK=0, T=tf.float32)
  raw_ops.wrapopt_apply(**{**arguments, **changes})
  return w.numpy()


@pytest.mark.parametrize("changes, text", [
    (dict(policy="None"), "policy must be empty or one of "
     "ConstantDelayCompensation, DelayCompensation, GapAware, got 'None'"),
    (dict(rule="Ema"), "rule must be one of Adadelta, .*, got 'Ema'"),
    (dict(rule="Momentum", scalars=np.ones(6)),
     r"variables must be 3 \(1 var, 1 accum, 1 memory\), got 2"),
    (dict(policy="ConstantDelayCompensation", scalars=np.ones(2)),
     r"variables must be 1 \(1 var\), got 2"),
    (dict(policy=""), "origins must be 0 tensors for the policy '' and N = 1 "
     "variables, got 1"),
    (dict(scalars=np.zeros(3)), r"scalars misshapen: got \[3\] but expected "
     r"\[4\] \(lr, lambda, rate, epsilon\)"),
    (dict(origins=[np.zeros(3)]), "origins must be of dtype float, "
     "the variables', got double"),
    (dict(origins=[np.zeros(2, np.float32)]),
     r"origins\[0\] misshapen: got \[2\] but expected \[3\] \(the shape of "
     r"grad\[0\]\)"),
])
def test_the_op_checks_its_inputs(changes, text):
  assert (raw() != 1).all()
  with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=text):
    raw(**changes)


def test_low_precision_is_computed_in_float32():
  # 1 + 0.005 1 0.5 is 1 in bfloat16, but 10000 times it is not 10000.
  dtype = ml_dtypes.bfloat16
  w = tf.Variable(np.ones(1, dtype))
  wrapopt.ops.apply(
      "GradientDescent", {"var": [w]}, [np.ones(1, dtype)], {"lr": 1e4},
      compensation=Compensation(
          "ConstantDelayCompensation", [np.full(1, 0.5, dtype)],
          scalars={"lambda": 0.005}))
  assert w.numpy()[0] == dtype(1 - 1e4 * (1 + 0.005 * 0.5))
  assert w.numpy()[0] != dtype(1 - 1e4)
