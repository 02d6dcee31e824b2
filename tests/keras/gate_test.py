"""wrapopt.keras.DropStaleGradient in one process: numbers, records, threads."""

import copy
import functools
import glob
import threading
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_close, assert_same_bits, values
import inner_optimizers
from inner_optimizers import ADAM
import keras_versions
from model_files import load_by, save_by
import numerics
import threads
import training
import replicas  # pylint: disable=unused-import
import wrapopt
import wrapopt.keras as wk
from wrapopt.keras import _wrapper
from wrapopt.keras._steps import _rules

K = keras.optimizers

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

MODES = ("eager", "function")
MODE = pytest.mark.parametrize("mode", MODES)
MANY = 1000  # A limit that drops nothing.


def gates_in(opt):
  return [x for x in opt._wrappers() if x.is_gate] if isinstance(
      opt, _wrapper.WrapperOptimizer) else []


def stepping(opt, variables, mode="eager"):
  """A function of gradients, which are recorded, and with which it steps."""
  opt.build(variables)

  def step(*grads):
    for gate in gates_in(opt):
      # A policy that compensates finds the reads before a gradient.
      with gate.record_step(), tf.control_dependencies(
          [v.value.read_value() for v in variables]
          if gate._compensates() and mode == "function" else []):
        grads = [g if g is None else tf.nest.map_structure(
            tf.identity, g, expand_composites=True) for g in grads]
    opt.apply(list(grads), variables)

  return step if mode == "eager" else tf.function(step)


def one(inner=None, staleness=0, mode="eager", **more):
  """A variable, a gate, and a function that takes recorded steps."""
  w = keras.Variable([1.0, 2.0], dtype="float64")
  opt = wk.DropStaleGradient(inner or K.SGD(0.5), staleness, **more)
  return w, opt, stepping(opt, [w], mode)


def record(opt):
  with opt.record_step() as recorded:
    return recorded


def ones():
  return tf.ones(2, tf.float64)


def counts(opt):
  """(admitted, dropped) of a gate, and its steps."""
  found = opt.staleness_stats()
  assert int(opt._stale_counter) == found.dropped
  return int(found.admitted), int(found.dropped), int(opt.iterations)


def in_flight(opt):
  return int(wrapopt.ops.staleness_record(opt._iterations.value)[1])


def state(opt, variables):
  """All that a step may change, but the counts of gates."""
  found = [v.numpy() for v in (
      *variables, *(v for x in wk._steps._views.innermost(opt)
                    for v in x.variables))]
  for wrapper in opt._wrappers() if hasattr(opt, "_wrappers") else ():
    if not wrapper.is_gate:
      found += [tf.convert_to_tensor(s).numpy()
                for s, _ in wrapper._store.state.pairs()]
      found += [v.numpy() for v, _ in wrapper._store.state._counts.values()]
  return found


# Limits.


@MODE
def test_in_the_head(mode):
  # Three gradients of one record: the second misses one update, and the third,
  # since the second was admitted, two.
  w = keras.Variable([1.0])
  opt = wk.DropStaleGradient(K.SGD(0.25), 1)
  opt.build([w])
  apply = lambda recorded: opt.apply_recorded(recorded, [tf.ones(1)], [w])
  apply = apply if mode == "eager" else tf.function(apply)
  recorded, seen = record(opt), []
  for _ in range(4):
    apply(recorded)
    seen.append((float(w.numpy()[0]), *counts(opt)))
  assert seen == [(0.75, 1, 0, 1), (0.5, 2, 0, 2), (0.5, 2, 1, 2),
                  (0.5, 2, 2, 2)]
  stats = opt.staleness_stats()
  assert stats.admitted_histogram[:3].tolist() == [1, 1, 0]
  assert stats.dropped_histogram[:3].tolist() == [0, 0, 2]
  assert stats.drop_rate == 0.5


@MODE
def test_limits(mode):
  _, opt, step = one(staleness=-1, mode=mode)
  for _ in range(3):
    step(ones())
  assert counts(opt) == (0, 3, 0)
  limit = keras.Variable(2, dtype="int32")
  _, opt, step = one(staleness=limit, mode=mode)
  for n in 0, -1, 2**31 - 1:
    limit.assign(n)
    step(ones())
  assert counts(opt) == (2, 1, 2)
  assert opt.get_config()["staleness"] == 2**31 - 1


# 1. The numbers of the bare optimizer.

INNER = {
    # A gate takes none of these in, or Keras takes no such step.
    **{name: make for name, make in inner_optimizers.INNER.items()
       if name not in ("SGD loss_scale_factor", "LossScaleOptimizer", "Muon",
                       "ScheduleFreeAdamW") and "Multi" not in name},
    "SGD plain": lambda: K.SGD(0.125),
    "Adam schedule": lambda: K.Adam(
        **{**ADAM, "learning_rate": K.schedules.CosineDecay(0.125, 3)}),
    "LazyAdam": lambda: wk.LazyAdam(**ADAM),
    "Nadam schedule": lambda: K.Nadam(
        **{**ADAM, "learning_rate": K.schedules.InverseTimeDecay(0.125, 1, 1)}),
}


def variables_of_all_shapes(constrained=True):
  made = inner_optimizers.variables_of(numerics.DOUBLE)
  if constrained:
    made[0].constraint = keras.constraints.NonNeg()
  return made


gradients = functools.partial(inner_optimizers.tensors, dtype=numerics.DOUBLE)


def train(opt, mode, sparse):
  # Without sparse gradients and constraints, a step is one op.
  made = variables_of_all_shapes(constrained=sparse)
  step = stepping(opt, made, mode)
  for t in range(4):
    step(*gradients(t, sparse=sparse))
  return made


@functools.cache
def of_the_bare(inner, sparse):
  opt = INNER[inner]()
  made = train(opt, "eager", sparse)
  assert int(opt.iterations) == 4
  return state(opt, made)


# A trace takes longer than all eager steps.
TRACED = ("SGD", "SGD global_clipnorm", "SGD schedule", "Adam schedule",
          "LazyAdam", "RMSprop momentum", "Adafactor", "Lamb", "Nadam schedule")


@pytest.mark.by_day(3)
@pytest.mark.parametrize("inner, mode", [
    *((inner, "eager") for inner in INNER),
    *((inner, "function") for inner in TRACED)])
def test_numbers_of_the_bare_optimizer(inner, mode):
  for sparse in (True, False):
    opt = wk.DropStaleGradient(INNER[inner](), 0)
    made = train(opt, mode, sparse)
    assert counts(opt) == (4, 0, 4)
    assert sum(opt.staleness_stats().admitted_histogram[1:]) == 0
    got, want = state(opt, made), of_the_bare(inner, sparse)
    assert np.abs(got[0] - variables_of_all_shapes()[0].numpy()).max() > 0.1
    # A native op rounds once, where Keras rounds some ten times. Keras computes
    # rates of schedules in float32.
    assert_close(got, want, rtol=0,
                        atol=1e-6 if "schedule" in inner else 1e-13)


def test_all_optimizers_with_a_rule_are_tested():
  tested = {type(make()) for make in INNER.values()}
  assert _rules._RULES.keys() <= tested


SCHEDULES = {
    "operators": lambda step: 0.5 ** tf.cast(
        abs(-step) + step // 2 + step % 2 - (+step), tf.float64),
    "comparisons": lambda step: tf.where(step < 2, 0.5, 0.25),
    "Keras": lambda step: 0.5 / keras.ops.cast(
        keras.ops.maximum(step, 1) + keras.ops.floor_divide(step, 2),
        "float32"),
    "Python": lambda step: 0.5 / (1 + float(step) + int(step)),
    "NumPy": lambda step: float(0.5 / (1 + np.asarray(step))),
    "attributes": lambda step: 0.5 * (1 + len(step.shape) + step.ndim + len(
        tf.as_dtype(step.dtype).name)) if step.name and step.path else 0,
}


@MODE
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_compute_with_the_number(schedule, mode):
  if mode == "function" and schedule in ("Python", "NumPy"):
    return  # Without a gate, they cannot either.

  class Schedule(K.schedules.LearningRateSchedule):

    def __call__(self, step):
      return SCHEDULES[schedule](step)

  finals = []
  for gate in lambda x: wk.DropStaleGradient(x, 0), lambda x: x:
    w = keras.Variable([1.0], dtype="float64")
    step = stepping(gate(K.SGD(Schedule())), [w], mode)
    for _ in range(4):
      step(tf.ones(1, tf.float64))
    finals.append(w.numpy()[0])
  assert finals[0] == pytest.approx(finals[1], rel=1e-6)
  assert abs(finals[0] - 1) > 0.1


@MODE
@pytest.mark.parametrize("wrap", [
    lambda opt: wk.DropStaleGradient(opt, 0), wk.MovingAverage])
def test_variables_that_their_gradients_replace(wrap, mode):
  """As those of layers in float8, also alone."""
  w, scale = keras.Variable([1.0]), keras.Variable([5.0])
  scale.overwrite_with_gradient = True
  opt = wrap(K.SGD(0.5))
  opt.build([w, scale])

  def step(*grads):
    for gate in gates_in(opt):
      record(gate)
    opt.apply(list(grads), [w, scale])

  step = step if mode == "eager" else tf.function(step)
  step(tf.ones(1), tf.constant([6.0]))
  step(None, tf.constant([7.0]))
  assert (w.numpy(), scale.numpy(), int(opt.iterations)) == (0.5, 7, 2)


# 2. A dropped gradient changes nothing.

WRAPPED = {
    "alone": lambda gate, opt: gate(opt),
    "MovingAverage around": lambda gate, opt: wk.MovingAverage(
        gate(opt), [0.5, 0.75]),
    "MovingAverage inside": lambda gate, opt: gate(wk.MovingAverage(
        opt, wrapopt.PowerDecay(gamma=1), update_every=2)),
    "SWA around": lambda gate, opt: wk.SWA(gate(opt), 1, 2),
    "SWA inside": lambda gate, opt: gate(wk.SWA(opt, 0, 1)),
    "Lookahead around": lambda gate, opt: wk.Lookahead(gate(opt), 2, 0.25),
    "Lookahead inside": lambda gate, opt: gate(wk.Lookahead(opt, 2, 0.25)),
    "between": lambda gate, opt: wk.Lookahead(gate(wk.SWA(wk.MovingAverage(
        opt, 0.5), 0, 1)), 2, 0.25),
}
FEW = ("SGD Nesterov", "LazyAdam", "Nadam")


@pytest.mark.by_day(4)
@MODE
@pytest.mark.parametrize("inner, wrapped", [
    *((inner, "alone") for inner in FEW),
    *((FEW[i % 3], wrapped) for i, wrapped in enumerate(WRAPPED) if i)])
def test_a_dropped_gradient_changes_nothing(inner, wrapped, mode):
  made = variables_of_all_shapes()
  limit = tf.Variable(0)
  opt = WRAPPED[wrapped](lambda x: wk.DropStaleGradient(x, limit),
                         INNER[inner]())
  step = stepping(opt, made, mode)
  [gate] = gates_in(opt)

  def dropped(t):
    before, [admitted, drops, steps] = state(opt, made), counts(gate)
    limit.assign(-1)
    step(*gradients(t))
    limit.assign(0)
    assert_same_bits(state(opt, made), before)
    assert counts(gate) == (admitted, drops + 1, steps)

  dropped(0)  # Nothing begins with it.
  if mode == "eager":  # Averages begin at the weights of now.
    for v in made:
      v.assign(v + 1)
  for t in range(3):
    step(*gradients(t))
    dropped(t + 1)
  # As without the gate and these gradients.
  bare = WRAPPED[wrapped](lambda x: x, INNER[inner]())
  trained = variables_of_all_shapes()
  if mode == "eager":
    for v in trained:
      v.assign(v + 1)
  step = stepping(bare, trained, mode)
  for t in range(3):
    step(*gradients(t))
  assert_close(state(opt, made), state(bare, trained), 0, 1e-13)


# 3. Composition.


def test_averages_in_place():
  w = keras.Variable([1.0, 2.0], dtype="float64")
  opt = wk.MovingAverage(wk.DropStaleGradient(K.SGD(0.5), 0), 0.5)
  step = stepping(opt, [w])
  step(ones())
  [gate] = gates_in(opt)
  with opt.averaged_weights():
    assert w.numpy().tolist() == [0.75, 1.75]
    with pytest.raises(RuntimeError, match="inside averaged_weights"):
      step(ones())
  assert counts(gate) == (1, 0, 1) and in_flight(gate) == 0
  step(ones())
  assert w.numpy().tolist() == [0, 1] and counts(gate) == (2, 0, 2)


def multi_optimizer(opt):
  return K.MultiOptimizer(K.OptimizerMap(opt, {"a": K.SGD()}))


@pytest.mark.parametrize("make, text", [
    (lambda: wk.ScheduleFree(K.SGD()), "must not be or hold a ScheduleFree"),
    (lambda: wk.PrimalAverage(K.SGD()), "must not be or hold a PrimalAverage"),
    (lambda: wk.DropStaleGradient(K.SGD(), 1), "Use the lower limit"),
    (lambda: wk.SWA(wk.DropStaleGradient(K.SGD(), 1)), "Use the lower limit"),
    (lambda: K.LossScaleOptimizer(K.SGD()), "got LossScaleOptimizer"),
    (lambda: wk.SWA(K.LossScaleOptimizer(K.SGD())), "got LossScaleOptimizer"),
    pytest.param(
        lambda: multi_optimizer(K.SGD()), "got MultiOptimizer",
        marks=keras_versions.needs("MultiOptimizer"))])
def test_what_must_not_be_inside(make, text):
  with pytest.raises(ValueError, match=text):
    wk.DropStaleGradient(make(), 1)


@pytest.mark.parametrize("wrapper", [wk.ScheduleFree, wk.PrimalAverage])
def test_no_training_between_points_around_it(wrapper):
  with pytest.raises(ValueError, match="must not be or hold a DropStale"):
    wrapper(wk.DropStaleGradient(K.SGD(), 1))


@MODE
def test_a_loss_scale_around_it(mode):
  w = keras.Variable([1.0, 2.0])
  gate = wk.DropStaleGradient(K.SGD(0.5), 0)
  opt = K.LossScaleOptimizer(gate, initial_scale=4.0)
  opt.build([w])

  def step(scale):
    with gate.record_step():
      grad = w.value * 0 + scale
    opt.apply([grad], [w])

  step = step if mode == "eager" else tf.function(step)
  for scale in 4.0, np.inf, 4.0:
    step(tf.constant(scale, tf.float32))
  # The second is not tried: it is infinite.
  assert counts(gate) == (2, 0, 2)
  # The scale is halved after it, so that the third counts twice.
  assert w.numpy().tolist() == [1 - 0.5 - 1, 2 - 0.5 - 1]


@MODE
@pytest.mark.parametrize("more, text", [
    ({"gradient_accumulation_steps": 2},
     "`gradient_accumulation_steps` of SGD must be None .*, got 2"),
    ({"use_ema": True}, "`use_ema` of SGD must be False .*, got True. Use")])
def test_what_workers_must_not_share(more, text, mode):
  w, opt, step = one(K.SGD(0.5, **more), mode=mode)
  before = state(opt, [w])
  with pytest.raises(NotImplementedError, match=text):
    step(ones())
  assert_same_bits(state(opt, [w]), before)
  assert counts(opt) == (0, 0, 0) and in_flight(opt) == 0


# 4. Records.

NO_RECORD = "The step must be recorded before gradients are computed, got"


@MODE
def test_no_record(mode):
  w, opt, _ = one()
  step = lambda: opt.apply([ones()], [w])
  with pytest.raises(ValueError, match=NO_RECORD):
    (step if mode == "eager" else tf.function(step))()
  assert counts(opt) == (0, 0, 0) and w.numpy()[0] == 1


def test_an_eager_record_serves_once():
  w, opt, step = one()
  step(ones())
  with pytest.raises(ValueError, match=NO_RECORD):
    opt.apply([ones()], [w])
  recorded = record(opt)
  opt.apply_recorded(recorded, [ones()], [w])
  with pytest.raises(ValueError, match=NO_RECORD):
    opt.apply([ones()], [w])
  opt.apply_recorded(recorded, [ones()], [w])  # The caller knows it is old.
  opt.apply_recorded(recorded.numpy(), [ones()], [w])
  assert counts(opt) == (2, 2, 2)
  # Of two records, apply() uses the last one.
  first = record(opt)
  record(opt)
  opt.apply_recorded(first, [ones()], [w])
  opt.apply([ones()], [w])
  assert counts(opt) == (3, 3, 3)


def test_a_step_without_gradients_needs_no_record():
  w, opt, _ = one()
  with pytest.raises(ValueError, match="No gradients provided"):
    opt.apply([None], [w])
  opt.apply([])
  assert counts(opt) == (0, 0, 0)


@pytest.mark.parametrize("recorded", [
    None, "x", 0.5, True, tf.constant(0.5), tf.constant([1, 2]), [0],
    tf.constant("x")], ids=repr)
def test_what_is_no_record(recorded):
  w, opt, _ = one()
  record(opt)
  with pytest.raises(TypeError, match="`recorded` must be the record that rec"):
    opt.apply_recorded(recorded, [ones()], [w])
  assert counts(opt) == (0, 0, 0)
  opt.apply([ones()], [w])
  assert counts(opt) == (1, 0, 1)


def test_a_record_of_a_function_goes_to_another():
  w, opt, _ = one()

  @tf.function
  def forward():
    with opt.record_step() as recorded:
      return recorded, w.value * 1

  backward = tf.function(
      lambda recorded, grad: opt.apply_recorded(recorded, [grad], [w]))
  recorded, grad = forward()
  with pytest.raises(ValueError, match=NO_RECORD):
    opt.apply([grad], [w])
  for apply in backward, lambda r, g: opt.apply_recorded(r, [g], [w]):
    apply(recorded, grad)
  assert counts(opt) == (1, 1, 1)


def test_two_gates_in_a_function():
  made = [keras.Variable([1.0]) for _ in range(2)]
  opts = [wk.DropStaleGradient(K.SGD(0.5), 0) for _ in made]
  alone = stepping(opts[0], [made[0]])
  opts[1].build([made[1]])
  for _ in range(3):  # So that the two have different steps.
    alone(tf.ones(1))

  @tf.function
  def both():
    with opts[0].record_step(), opts[1].record_step():
      grad = made[0] + made[1]  # Depends on both records.
    for opt, v in zip(opts, made):
      opt.apply([grad], [v])

  for _ in range(2):
    both()
  assert [counts(opt) for opt in opts] == [(5, 0, 5), (2, 0, 2)]


def test_the_oldest_of_several_records_counts():
  w, opt, _ = one()

  @tf.function
  def step():
    with opt.record_step():
      a = w.value * 1
    opt.apply([a], [w])
    with opt.record_step():
      b = w.value * 1
    opt.apply([a + b], [w])  # `a` misses the first step.

  step()
  assert counts(opt) == (1, 1, 1)
  assert opt.staleness_stats().dropped_histogram[1] == 1


@pytest.mark.by_day(0)
def test_branches_loops_and_nested_functions():
  w, opt, _ = one(staleness=0)
  apply = lambda grad: opt.apply([grad], [w])

  @tf.function
  def nested():
    return w.value * 1

  @tf.function
  def step(take):
    with opt.record_step():
      grad = nested()
    if take:
      apply(grad)
    for _ in tf.range(3):
      with opt.record_step():
        grad = nested()
      apply(grad)

  for take in True, False:
    step(tf.constant(take))
  assert counts(opt) == (7, 0, 7)
  np.testing.assert_array_equal(w.numpy(), np.array([1, 2]) / 2.0**7)


def test_a_record_of_another_thread():
  w, opt, _ = one()
  record(opt)

  def other():
    with pytest.raises(ValueError, match=NO_RECORD):
      opt.apply([ones()], [w])

  threads.in_threads(other)
  opt.apply([ones()], [w])
  assert counts(opt) == (1, 0, 1)


# 5. Policies and arguments.


@MODE
def test_policies(mode):
  called = []

  def policy(staleness):
    called.append(staleness.dtype)
    return 0.1 if mode == "eager" else 1 / tf.cast(1 + staleness, tf.float64)

  for given, want in (("drop", [1, 1, 1, 1]), ("scale", [1, 1, 1 / 2, 1 / 3]),
                      (policy, [0.1] * 4 if mode == "eager" else
                       [1, 1 / 2, 1 / 3, 1 / 4])):
    dense = keras.Variable(np.zeros(2), dtype="float64")
    table = keras.Variable(np.zeros([3, 2]), dtype="float32")
    opt = wk.DropStaleGradient(K.SGD(1.0), 3, policy=given)
    opt.build([dense, table])

    def apply(recorded):
      opt.apply_recorded(recorded, [-ones(), tf.IndexedSlices(
          -tf.ones([1, 2]), [1], [3, 2])], [dense, table])

    apply = apply if mode == "eager" else tf.function(apply)
    recorded = record(opt)
    for n in range(5):
      apply(recorded)
      so_far = sum(want[:n + 1])
      np.testing.assert_allclose(dense.numpy(), [so_far] * 2, rtol=1e-15)
      np.testing.assert_allclose(table.numpy(), [[0] * 2, [so_far] * 2,
                                                 [0] * 2], rtol=1e-6)
    assert counts(opt) == (4, 1, 4)
    # As if the step had been set back since.
    before = dense.numpy()
    apply(recorded + 9)
    np.testing.assert_allclose(dense.numpy() - before, want[0], rtol=1e-15)
  # Once a step, or once a trace.
  assert called == [tf.int64] * (6 if mode == "eager" else 1)


@MODE
@pytest.mark.parametrize("result", [
    None, "x", np.ones(2), tf.constant([[1.0]]), len], ids=repr)
def test_what_a_policy_must_not_return(result, mode):
  w, opt, step = one(policy=lambda staleness: result, mode=mode)
  with pytest.raises(ValueError, match=(
      "`policy` must return a number or a scalar tensor, got")) as held:
    step(ones())
  assert w.numpy()[0] == 1 and int(opt.iterations) == 0
  assert in_flight(opt) == 0
  del held


@pytest.mark.parametrize("staleness", [
    0.5, 1.0, "1", None, True, tf.constant(1.0), [1]], ids=repr)
def test_a_limit_that_is_no_integer(staleness):
  with pytest.raises(TypeError, match="`staleness` must be an integer, got"):
    wk.DropStaleGradient(K.SGD(), staleness)


@pytest.mark.parametrize("policy", ["halve", None, 0.5], ids=repr)
def test_no_policy(policy):
  with pytest.raises(ValueError, match=(
      "`policy` must be 'drop', 'scale' or a function of the staleness, or")):
    wk.DropStaleGradient(K.SGD(), 1, policy=policy)


@pytest.mark.parametrize("kind, have_copies", [
    (tf.distribute.MirroredStrategy, True),
    (tf.distribute.experimental.CentralStorageStrategy, False)])
def test_replicas_that_wait_for_each_other(kind, have_copies):
  strategy = kind(["CPU:0", "CPU:1"])
  with strategy.scope():
    w, opt, step = one()
  for run in step, tf.function(step):
    with pytest.raises(NotImplementedError, match=(
        "DropStaleGradient must be in a ParameterServerStrategy or in threads, "
        ".* got a strategy with 2 replicas")):
      strategy.run(run, [ones()])
    if have_copies:  # Also outside of the strategy.
      with pytest.raises(NotImplementedError, match="2 replicas"):
        run(ones())
  assert w.numpy()[0] == 1 and in_flight(opt) == 0
  with strategy.scope():
    assert opt.staleness_stats().admitted == 0


# 6. Threads.


@keras.saving.register_keras_serializable("gate_test")
class PowersOfTwo(K.schedules.LearningRateSchedule):
  """2^-(number of the step): the sum tells which numbers the steps had."""

  def __call__(self, step):
    return 2.0 ** -tf.cast(step, tf.float64)


class Slowly(keras.constraints.Constraint):

  def __call__(self, weights):
    time.sleep(0.001)  # Others would change the weights meanwhile.
    return weights


def race(step, tries, n=4):
  barrier = threading.Barrier(n)

  def run():
    barrier.wait(60)
    for _ in range(tries):
      step(ones())

  threads.in_threads(*[run] * n)


@pytest.mark.by_day(1)
@MODE
@pytest.mark.parametrize("limit", [1, MANY])
@pytest.mark.parametrize("inner", ["SGD", "constrained", "Adam", "Nadam"])
def test_threads(inner, limit, mode):
  make = {"SGD": lambda: K.SGD(PowersOfTwo()),
          "constrained": lambda: K.SGD(PowersOfTwo()),
          "Adam": lambda: K.Adam(0.5, beta_1=0.5),
          "Nadam": lambda: K.Nadam(0.5, beta_1=0.5)}[inner]
  w, opt, step = one(make(), limit, mode)
  w.constraint = Slowly() if inner == "constrained" else None
  race(step, 12)
  admitted, dropped, iterations = counts(opt)
  assert iterations == admitted > 0 and admitted + dropped == 48
  assert in_flight(opt) == 0
  if limit == MANY:
    assert dropped == 0
  assert opt.staleness_stats().admitted_histogram[limit + 1:].sum() == 0
  inside = opt.inner_optimizer
  if inner in ("SGD", "constrained"):
    # With 53 bits, the sum is exact in any order.
    assert 1 - w.numpy()[0] == 2 - 2.0 ** (1 - admitted)
    return
  # Each has moved the momentum.
  if inner == "Adam":
    np.testing.assert_allclose(inside._momentums[0].numpy(),
                               1 - 0.5**admitted, rtol=1e-12)
  else:
    # A product over the numbers of the steps, each once.
    n = np.arange(1, admitted + 1)
    np.testing.assert_allclose(
        float(inside._u_product), np.prod(0.5 * (1 - 0.5 * 0.96**n)),
        rtol=1e-5)


@MODE
def test_threads_that_compensate(mode):
  w, opt, step = one(K.SGD(PowersOfTwo()), MANY, mode,
                     policy=wrapopt.DelayCompensation(0, decay=0.5))
  race(step, 12)
  admitted, _, _ = counts(opt)
  assert admitted == 48
  assert 1 - w.numpy()[0] == 2 - 2.0 ** (1 - admitted)
  # Each has moved the mean of the gradients' squares.
  [mean_square] = opt._memory["mean_square"].values()
  np.testing.assert_array_equal(mean_square, [1 - 0.5**admitted] * 2)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("policy", ["drop", wrapopt.GapAware()], ids=str)
@pytest.mark.parametrize("inner", ["SGD plain", "SGD Nesterov", "Nadam",
                                   "Lamb"])
def test_the_order_of_a_step(inner, policy):
  """Another step must not come between: the lock, all changes, the count."""
  opt = wk.DropStaleGradient(INNER[inner](), 0, policy=policy)
  made = variables_of_all_shapes(constrained="SGD" not in inner)
  is_one_op = "SGD" in inner and policy == "drop"
  step = stepping(opt, made, "function")
  function = step.get_concrete_function(
      *gradients(0, sparse="SGD" not in inner))
  [branch] = [g for g in training.graphs_in(function.graph) if any(
      op.type == "Wrapopt>StalenessComplete" for op in g.get_operations())]
  ops = {}
  for op in branch.get_operations():
    ops.setdefault(op.type, []).append(op)
  [complete] = ops["Wrapopt>StalenessComplete"]
  changes = [op for kind, found in ops.items() for op in found
             if "Assign" in kind or kind.startswith("Wrapopt>Apply")]
  assert changes and training.ancestors(complete) >= set(changes)
  assert ("Wrapopt>LockSteps" in ops) != is_one_op
  if "Wrapopt>LockSteps" in ops:
    [lock], [release] = ops["Wrapopt>LockSteps"], ops["Wrapopt>UnlockSteps"]
    assert training.ancestors(release) >= set(changes)
    for op in [*changes, *ops["ReadVariableOp"]]:
      assert lock in training.ancestors(op), op.name


@pytest.mark.by_day(1)
@pytest.mark.parametrize("wrapped", ["around", "inside"])
def test_averages_of_threads_begin_once(wrapped):
  for _ in range(20):
    w = keras.Variable([1.0, 2.0], dtype="float64")
    gate = wk.DropStaleGradient(
        K.SGD(1.0) if wrapped == "around" else
        wk.MovingAverage(K.SGD(1.0), 0.5), MANY)
    opt = wk.MovingAverage(gate, 0.5) if wrapped == "around" else gate
    race(stepping(opt, [w]), 2)
    average, value = 1.0, 1.0
    for _ in range(8):
      value -= 1
      average += (value - average) / 2
    assert w.numpy()[0] == value
    average_of = opt if wrapped == "around" else gate.inner_optimizer
    assert average_of.average(w).numpy()[0] == average


# 7. Steps that fail.


class Failing(K.Nadam):
  """Fails at the second variable, when the first one has changed."""

  fails = None

  def update_step(self, gradient, variable, learning_rate):
    if self.fails is not None and variable.shape == (2,):
      self.fails()
    super().update_step(gradient, variable, learning_rate)


class Fault:
  """An optimizer's update or a policy that fails until it is mended."""

  def __init__(self, error=None):
    """Raises an error, or by default fails when its op runs."""
    self.error, self.is_there = error, tf.Variable(True)

  def __call__(self, staleness=None):
    if self.error is not None:
      raise self.error
    tf.debugging.assert_equal(self.is_there, False)
    return 1

  def mend(self):
    self.error = None
    self.is_there.assign(False)


def two():
  return [keras.Variable(x, dtype="float64") for x in ([1.0], [1.0, 2.0])]


def assert_free(opt, step):
  """The place and the lock are free, also for other threads."""
  assert in_flight(opt) == 0
  iterations = int(opt.iterations)
  assert counts(opt) == (iterations, 0, iterations)
  threads.in_threads(step, step)
  assert int(opt.iterations) == iterations + 2
  assert in_flight(opt) == 0
  assert counts(opt) == (iterations + 2, 0, iterations + 2)


@MODE
@pytest.mark.parametrize("where, error", [
    ("optimizer", KeyError("of mine")), ("policy", KeyError("of mine")),
    ("optimizer", None)], ids=["optimizer", "policy", "when it runs"])
def test_a_step_that_fails(where, error, mode):
  made, inner, fault = two(), Failing(0.5), Fault(error)
  if where == "optimizer":
    inner.fails = fault
  opt = wk.DropStaleGradient(inner, MANY,
                             policy=fault if where == "policy" else "drop")
  step = stepping(opt, made, mode)
  grads = [tf.ones(1, tf.float64), ones()]
  for _ in range(2):
    with pytest.raises((KeyError, tf.errors.InvalidArgumentError)) as held:
      step(*grads)
    assert int(opt.iterations) == 0
  fault.mend()
  assert_free(opt, lambda: step(*grads))
  assert held.tb  # Until here.


@MODE
@pytest.mark.parametrize("inner", ["SGD", "Nadam"])
def test_a_gradient_of_a_wrong_shape(inner, mode):
  w, opt, step = one(INNER[inner](), MANY, mode)
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as held:
    step(tf.ones([3], tf.float64))
  assert w.numpy()[0] == 1
  assert_free(opt, lambda: step(ones()))
  assert held.tb


@MODE
@pytest.mark.parametrize("around", [False, True])
def test_a_step_that_has_failed_is_not_saved(around, mode, tmp_path):
  made, inner = two(), Failing(0.5)
  gate = opt = wk.DropStaleGradient(inner, MANY)
  if around:
    opt = wk.MovingAverage(gate, 0.5)
  inner.fails = fault = Fault()
  fault.mend()
  step = stepping(opt, made, mode)
  step(tf.ones(1, tf.float64), ones())
  fault.is_there.assign(True)

  def fail():
    with pytest.raises(tf.errors.InvalidArgumentError):
      step(tf.ones(1, tf.float64), ones())

  fail()
  path = tf.train.Checkpoint(opt=opt).write(str(tmp_path / "checkpoint"))
  reader = tf.train.load_checkpoint(path)
  [name] = [name for name in reader.get_variable_to_shape_map()
            if "staleness_histogram/" in name]
  assert reader.get_tensor(name)[0].sum() == 1
  fail()
  gate._store.state.save_own_variables(store := {})
  assert store["staleness_histogram"][0].sum() == 1


def test_an_unknown_variable():
  _, opt, step = one()
  other = keras.Variable([1.0])
  record(opt)
  with pytest.raises(ValueError, match="Unknown variable") as held:
    opt.apply([tf.ones(1)], [other])
  assert other.numpy() == 1
  # The aborted step may have changed weights, so the record is too old.
  assert in_flight(opt) == 0
  step(ones())
  assert counts(opt) == (1, 0, 1)
  assert held.tb


# 8. Files and checkpoints.


@keras.saving.register_keras_serializable("gate_test")
def halved(staleness):
  return 0.5 ** tf.cast(staleness, tf.float32)


def model_of(make):
  keras.utils.set_random_seed(0)
  model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
  model.compile(make(), loss="mse", jit_compile=False)
  model.optimizer.build(model.trainable_variables)
  return model


def gate_of(model):
  return gates_in(model.optimizer)[0]


def advance(model, steps=3):
  """Takes recorded steps, and has two dropped if there is a gate."""
  step = stepping(model.optimizer, model.trainable_variables)
  grads = [0.25 * tf.ones(v.shape) for v in model.trainable_variables]
  for _ in range(steps):
    step(*grads)
  for gate in gates_in(model.optimizer):
    recorded = record(gate)
    for _ in range(2):
      gate.apply_recorded(recorded.numpy() - 9, grads,
                          model.trainable_variables)
  return model


def everything(model):
  found = state(model.optimizer, model.trainable_variables)
  for gate in gates_in(model.optimizer):
    found += [gate._stale_counter.numpy(), gate._histogram.numpy()]
  return found


def gated(make, staleness=4, **more):
  return lambda: wk.DropStaleGradient(make(), staleness, **more)


SAVED = {
    "Adam": gated(K.Adam),
    "function": gated(K.SGD, policy=halved),
    "scale": gated(INNER["Nadam schedule"], policy="scale",
                   sum_duplicates=True),
    "MovingAverage around": lambda: wk.MovingAverage(gated(K.Adam)(), 0.5),
    "MovingAverage inside": gated(lambda: wk.MovingAverage(K.Adam(), 0.5)),
}


@pytest.fixture
def no_warnings():
  with warnings.catch_warnings():
    # As Keras tells of what it could not load.
    warnings.simplefilter("error", UserWarning)
    yield


@pytest.mark.by_day(1)
@pytest.mark.parametrize("way", ["model", "weights", "checkpoint"])
@pytest.mark.parametrize("kind", SAVED)
def test_saved_and_restored(kind, way, tmp_path, no_warnings):
  model = advance(model_of(SAVED[kind]))
  assert counts(gate_of(model)) == (3, 2, 3)
  want = everything(model)
  path = str(tmp_path / ("run.keras" if way == "model" else "run.weights.h5"))
  if way == "model":
    model.save(path)
    other = keras.models.load_model(path)
    assert other.optimizer.get_config() == model.optimizer.get_config()
  else:
    other = model_of(SAVED[kind])
    save_by(way, path, model)
    status = load_by(way, path, other)
    if way == "checkpoint":
      status.assert_consumed()
  assert_same_bits(everything(other), want)
  assert counts(gate_of(other)) == (3, 2, 3)
  # Both go on alike, by the numbers of the steps.
  assert_same_bits(everything(advance(other)), everything(advance(model)))
  assert counts(gate_of(other)) == (6, 4, 6)


@pytest.mark.parametrize("way", ["weights", "checkpoint"])
def test_to_a_gate_and_back(way, tmp_path, no_warnings):
  path = str(tmp_path / "run.weights.h5")

  def restored(model, to):
    save_by(way, path, model)
    load_by(way, path, to)
    return to

  bare, gate = lambda: K.Adam(0.25), gated(lambda: K.Adam(0.25))
  before = advance(model_of(bare))
  # What it counted before is of another run.
  fresh = model_of(gate)
  if way == "weights":
    advance(fresh)
  found = restored(before, fresh)
  assert counts(gate_of(found)) == (0, 0, 3)
  assert_same_bits(everything(found)[:-2], everything(before))
  advance(found)
  assert counts(gate_of(found)) == (3, 2, 6)
  assert_close(everything(found)[:-2], everything(advance(before)), 0,
                      2e-5)
  back = restored(found, model_of(bare))
  assert_same_bits(everything(back), everything(found)[:-2])
  assert_close(everything(advance(back)),
                      everything(advance(found))[:-2], 0, 2e-5)


def test_configurations():
  for make in SAVED.values():
    opt = make()
    config = opt.get_config()
    other = type(opt).from_config(copy.deepcopy(config))
    assert other.get_config() == config
  opt = wk.DropStaleGradient(K.SGD(), np.int64(3), "named", policy=halved)
  other = wk.DropStaleGradient.from_config(opt.get_config())
  assert other._policy is halved and other.name == "named"
  assert type(opt.get_config()["staleness"]) is int
  assert wk.DropStaleGradient("adam", 1).get_config()["policy"] == "drop"


# 9. Copies.


@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda opt: type(opt).from_config(opt.get_config())])
def test_copies_share_no_records(copied):
  w, opt, _ = one()
  record(opt)
  other = copied(opt)
  v = keras.Variable([1.0, 2.0], dtype="float64")
  other.build([v])
  with pytest.raises(ValueError, match=NO_RECORD):
    other.apply([ones()], [v])
  record(other)
  for _ in range(2):
    other.apply_recorded(0, [ones()], [v])
  assert counts(other) == (1, 1, 1) and counts(opt) == (0, 0, 0)
  opt.apply([ones()], [w])
  assert w.numpy()[0] == v.numpy()[0] == 0.5


# 10. Summaries.


@MODE
def test_summaries(mode, tmp_path):
  w, opt, _ = one()
  for recorded in (0, 0, 1, 1):  # The second and fourth miss one.
    opt.apply_recorded(recorded, [ones()], [w])
  write = opt.write_summaries if mode == "eager" else tf.function(
      opt.write_summaries)
  write()  # Without a writer, nothing.
  with tf.summary.create_file_writer(str(tmp_path)).as_default():
    write() if mode == "eager" else tf.function(opt.write_summaries)()
  found = {}
  for path in glob.glob(f"{tmp_path}/*"):
    for event in tf.compat.v1.train.summary_iterator(path):
      for value in event.summary.value:
        assert event.step == 2
        found[value.tag] = (value.metadata.plugin_data.plugin_name,
                            tf.make_ndarray(value.tensor))
  assert found.keys() == {"Gradient_staleness_percentage",
                          "staleness/admitted", "staleness/dropped"}
  assert found["Gradient_staleness_percentage"] == ("scalars", 0.5)
  for name, want in (("admitted", [2, 0]), ("dropped", [0, 2])):
    plugin, bars = found[f"staleness/{name}"]
    assert plugin == "histograms" and bars.shape == (64, 3)
    np.testing.assert_array_equal(bars[:2, 2], want)


@pytest.mark.parametrize("name", ["staleness_stats", "write_summaries"])
def test_before_it_is_built(name):
  with pytest.raises(RuntimeError, match=rf"{name}\(\) must be called after"):
    getattr(wk.DropStaleGradient(K.SGD(), 1), name)()


# 11. Compiled functions.


def test_a_compiled_step():
  """XLA has no gate, and says so; gradients can be compiled."""
  w, opt, step = one()
  with opt.record_step() as recorded:
    grad = ones()
  for refused in (step, tf.function(step),
                  lambda grad: opt.apply_recorded(recorded, [grad], [w]),
                  lambda grad: opt.apply([grad], [w])):
    with pytest.raises(NotImplementedError, match=(
        "DropStaleGradient must not be used in a function that XLA compiles.*"
        r"inside of record_step\(\). For fit\(\), call compile\(")):
      tf.function(refused, jit_compile=True, autograph=False)(grad)
  assert counts(opt) == (0, 0, 0) and w.numpy()[0] == 1

  gradient = tf.function(lambda: w.value * 1, jit_compile=True)

  @tf.function
  def train_step():
    with opt.record_step():
      grad = gradient()
    opt.apply([grad], [w])

  train_step()
  assert counts(opt) == (1, 0, 1) and w.numpy()[0] == 0.5


# 12. fit.


class Recording(keras.Sequential):
  """As the docstring of DropStaleGradient says."""

  def train_step(self, data):
    x, y = data
    with self.optimizer.record_step():
      with tf.GradientTape() as tape:
        loss = self.compute_loss(x, y, self(x, training=True))
      grads = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply(grads, self.trainable_variables)
    return {"loss": loss}


@pytest.mark.by_day(1)
@MODE
def test_fit(mode):
  data = np.ones((8, 3)), np.ones((8, 1))
  layers = lambda: [keras.Input((3,)), keras.layers.Dense(1)]
  compiled = lambda model, opt: (model.compile(
      opt, loss="mse", jit_compile=False, run_eagerly=mode == "eager"), model)[
          -1]
  model = compiled(keras.Sequential(layers()), gated(K.SGD)())
  with pytest.raises(ValueError, match="for fit.., in a train_step.. of the"):
    model.fit(*data, batch_size=2, verbose=0)
  assert int(model.optimizer.iterations) == 0
  finals = []
  for kind, opt in ((Recording, gated(K.SGD)), (keras.Sequential, K.SGD)):
    keras.utils.set_random_seed(0)
    model = compiled(kind(layers()), opt())
    model.fit(*data, batch_size=2, verbose=0)
    finals.append(values(model.trainable_variables))
    if kind is Recording:
      assert counts(model.optimizer) == (4, 0, 4)
  assert_close(*finals, rtol=1e-6)
