"""`wrapopt.MovingAverageOptimizer`: training and the averages.

Savers, checkpoints and `averaged_weights` are in
moving_average_checkpoint_test.py; all inner optimizers, dtypes and kinds of
gradients in conformance_test.py; the interface of the base class in
optimizer_contract_test.py. This process has two devices.
"""

import collections
import contextlib
import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from modes import control_flow
from processes import run_python
from threads import in_threads
from training import GRAPH_MODES
from training import MODES
from training import ancestors
from training import assert_same_bits
from training import descend
from training import ema_op
from training import exchange_op
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import moving as wrap
from training import ops_of_type
from training import session_of
from training import sgd
from training import train
from training import type_of

v1 = tf.compat.v1

# Before TensorFlow starts: a device for each of two replicas.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2)


# The argument `fused`: one pass for step and averages, or two.
FUSED = (None, False)
both_paths = pytest.mark.parametrize("fused", FUSED)


def update_op(kind, fused):
  """The type of the native op that updates averages around `sgd`."""
  if fused is None:
    return "Wrapopt>ApplyGradientDescent" + ("Ref" if kind == "ref" else "")
  return ema_op(kind)


def in_function(step):
  """`step` in a tf.function, which must not return an operation."""
  return tf.function(lambda: (step(), None)[1])


def run(session, train_op, times=1):
  for _ in range(times):
    session.run(train_op)


def stepped(*args, **kwargs):
  """An eager variable that a step has moved from 0 to 1, and its optimizer."""
  w, opt = tf.Variable(0.0, name="w"), wrap(*args, **kwargs)
  descend(opt, w)
  return w, opt


def counted(*args, **kwargs):
  """In a graph: a variable, the global step that decays know, and a step."""
  v = v1.get_variable("v", initializer=0.0)
  step = v1.train.get_or_create_global_step()
  return v, step, descend(wrap(*args, num_updates=step, **kwargs), v, step=step)


# A trajectory that can be done in the head. The variable starts at 0, and each
# step adds 1: it is 1, 2, 3, 4. The averages start at 0.


@both_paths
@pytest.mark.parametrize("mode", MODES)
def test_trajectory(mode, fused):
  # Decay 1/2: the average goes half of the way to the variable.
  #   0 -> 1: .5     .5 -> 2: 1.25     1.25 -> 3: 2.125     2.125 -> 4: 3.0625
  trace = train(mode, lambda step: wrap(0.5, fused=fused),
                {"v": np.float32(0)}, [{"v": np.float32(-1)}] * 4)
  assert [v.item() for [v] in trace.values] == [0, 1, 2, 3, 4]
  assert [time["ExponentialMovingAverage", 0] for time in trace.slots] == [
      0.5, 1.25, 2.125, 3.0625]


# Decay .9, but at most (1 + n) / (10 + n) where n, the global step, is already
# 1, 2, 3, 4: decays 2/11, 3/12, 4/13, 5/14.
#   9/11 = .818182            9/11 + 9/12 (2 - 9/11) = 75/44 = 1.704545
#   75/44 + 9/13 (3 - 75/44) = 372/143 = 2.601399
#   372/143 + 9/14 (4 - 372/143) = 3504/1001 = 3.500500
# As in 1.15.
WARM_UP = [9 / 11, 75 / 44, 372 / 143, 3504 / 1001]


V1_PROGRAM = """
import sys
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import wrapopt

v = tf.Variable(0.0, name="v")
step = tf.train.get_or_create_global_step()
opt = wrapopt.MovingAverageOptimizer(
    tf.train.GradientDescentOptimizer(1.0), 0.9, step,
    fused={"None": None, "False": False}[sys.argv[1]])
train_op = opt.minimize(-v, step)
with tf.Session() as session:
  session.run(tf.global_variables_initializer())
  for _ in range(4):
    session.run(train_op)
    print(session.run(opt.average(v)))
print(type(v).__name__, opt.average_name(v), sorted(
    {op.type for op in tf.get_default_graph().get_operations()
     if op.type.startswith("Wrapopt")}))
"""


@both_paths
def test_trajectory_after_disable_v2_behavior(fused):
  process = run_python("-c", V1_PROGRAM, str(fused))
  assert process.returncode == 0, process.stderr
  *numbers, graph = process.stdout.splitlines()
  # Four roundings in each of four steps, of numbers of at most 4 + 4.
  np.testing.assert_allclose(
      np.float64(numbers), WARM_UP, rtol=0,
      atol=4 * 4 * 8 * np.finfo(np.float32).eps / 2)
  ops = sorted([
      "Wrapopt>ApplyRef" if fused is None else update_op("ref", fused),
      "Wrapopt>CheckInitializedRef", "Wrapopt>ExchangeRef", "Wrapopt>MoveRef"])
  assert graph == f"RefVariable v/ExponentialMovingAverage {ops}"


# The constructor.


# {argument: [(error, text, values)]}; in a text, {} stands for the value.
REFUSED = {
    "opt": [(TypeError, "must be a tf.compat.v1.train.Optimizer, got "
             "builtins.str.", "sgd")],
    "average_decay": [
        (ValueError, "must be in [0, 1], got 1.5.", 1.5, np.array(1.5),
         np.float32(1.5)),
        (ValueError, "must be in [0, 1], got -0.1.", -0.1),
        (ValueError, "must be in [0, 1], got nan.", float("nan")),
        (ValueError, "must be in [0, 1], got 2.", [0.5, 2]),
        (ValueError, "must hold at least one decay, got none.", []),
        (ValueError, "must hold different decays, got {}.", [0.5, 0.5]),
        (ValueError, "must hold numbers, PowerDecays, HalfLives and BEMAs, got "
         "<function ", [0.5, lambda: 0.9]),
        (ValueError, "must hold numbers, PowerDecays, HalfLives and BEMAs, got "
         "array([0.5 , 0.75]). Pass a tensor, variable or callable alone.",
         np.array([[0.5, 0.75]])),
        (ValueError, "must be a scalar if it is a tensor or a variable, got "
         "one of shape (2,).", tf.constant([0.5, 0.75])),
        (TypeError, "must be a number, a PowerDecay, a HalfLife or a BEMA, a "
         "sequence of these, a scalar tensor or variable, or a callable, got "
         "{}.", None, "0.5", {0.5, 0.75}, object())],
    "num_updates": [
        (ValueError, "must be at least 0, got -1.", -1, np.array(-1)),
        (ValueError, "must be a scalar if it is a tensor or a variable, got "
         "one of shape (2,).", tf.ones([2])),
        (TypeError, "must be a number, tensor, variable or callable, got",
         np.ones(2))],
    "shadow_dtype": [
        (ValueError, "must be None (the dtype of each variable) or tf.float32, "
         "got {}.", tf.float64, tf.float16, tf.int32, "", 0, False, len)],
    "sequential_update": [
        (TypeError, "must be True or False, got {}.", "no", None, 2, 1.0,
         [True])],
    "fused": [(TypeError, "must be None (if there is an op), True or False, "
               "got 'no'", "no")],
}


@pytest.mark.parametrize("argument, error, text, value", [
    (argument, error, text, value) for argument, rows in REFUSED.items()
    for error, text, *values in rows for value in values])
def test_arguments_are_checked(argument, error, text, value):
  with pytest.raises(error) as caught:
    wrapopt.MovingAverageOptimizer(**{"opt": sgd(), argument: value})
  assert (f"`{argument}` " + text.replace("{}", repr(value))) in str(
      caught.value)


@pytest.mark.parametrize("decays", [
    [0.5, 0.75], (0.5, 0.75), np.array([0.5, 0.75]), np.float32([0.5, 0.75]),
    [np.float32(0.5), np.float64(0.75)], collections.deque([0.5, 0.75])])
@both_paths
def test_decays_may_be_any_sequence(decays, fused):
  w, opt = stepped(decays, fused=fused)
  assert [x.numpy() for x in opt.averages()] == [0.5, 0.25]
  assert opt.average(w, 0.75).numpy() == 0.25
  assert opt.get_slot_names() == ["ExponentialMovingAverage_0.5",
                                  "ExponentialMovingAverage_0.75"]


# With one update, the decay is 2 / 11.
@pytest.mark.parametrize("given, want", [
    ({"average_decay": np.array(0.5)}, 0.5),
    ({"num_updates": np.array(1)}, 9 / 11),
    *(({"sequential_update": x}, 0.5) for x in (
        True, 1, np.True_, False, 0, np.False_))], ids=str)
def test_what_stands_for_a_number_or_a_bool(given, want):
  w, opt = stepped(**{"average_decay": 0.5, **given})
  assert opt.average(w).numpy() == np.float32(want)


def test_the_signature_of_1_15():
  parameters = inspect.signature(wrapopt.MovingAverageOptimizer).parameters
  assert [(p.name, p.default) for p in list(parameters.values())[1:4]] == [
      ("average_decay", 0.9999), ("num_updates", None),
      ("sequential_update", True)]


def test_the_inner_optimizer_is_not_changed():
  inner = v1.train.MomentumOptimizer(1.0, 0.5)
  opt = wrapopt.MovingAverageOptimizer(inner)
  w = tf.Variable(0.0)
  descend(opt, w)
  assert inner.get_slot_names() == ["momentum"]
  assert inner.variables() == [inner.get_slot(w, "momentum")]
  # And goes on alone.
  inner.apply_gradients([(tf.constant(0.0), w)])
  assert w.numpy() == 1.5


# Decays that are read in each step.


@both_paths
# A callable is called after the step, so that there are two passes.
@pytest.mark.parametrize("num_updates", [1000, lambda: 1000])
@pytest.mark.parametrize("graph_function", [False, True])
def test_a_decay_variable_is_read_at_each_step(
    graph_function, num_updates, fused):
  decay, w = tf.Variable(0.5), tf.Variable(0.0)
  opt = wrap(decay, num_updates, fused=fused)
  step = (in_function if graph_function else lambda f: f)(
      lambda: descend(opt, w))
  step()
  decay.assign(0.75)
  step()
  assert opt.average(w).numpy() == 0.5 + 0.25 * (2 - 0.5)


@both_paths
def test_a_decay_out_of_range_changes_no_average(fused):
  decay, w = tf.Variable(1.5), tf.Variable(0.0)
  opt = wrap(decay, fused=fused)
  with pytest.raises(tf.errors.InvalidArgumentError,
                     match=r"must be in \[0, 1\], got 1\.5"):
    descend(opt, w)
  assert opt.average(w).numpy() == 0
  # In one pass, nothing at all.
  assert w.numpy() == (0 if opt.fused else 1)


@both_paths
def test_one_minus_decay_is_computed_in_float64(fused):
  # 1 - .9999 in float32 is 1.00017e-4: TensorFlow's own averages are wrong in
  # the fifth digit.
  w, opt = stepped(0.9999, fused=fused)
  assert opt.average(w).numpy() == np.float32(1 - np.float64(0.9999))
  assert np.float32(1) - np.float32(0.9999) != opt.average(w).numpy()


# Graphs.


@both_paths
def test_other_train_ops_stay_in_the_collection(kind, fused):
  a, b, c = (v1.get_variable(n, initializer=0.0) for n in "abc")
  bare = descend(sgd(), c)
  opt = wrap(fused=fused)
  one, two = descend(opt, a), descend(opt, b)
  assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [bare, one, two]
  assert two.name == "train_with_avg_1"
  assert len(ops_of_type(update_op(kind, fused))) == 2


INCREMENT = {"ref": "AssignAdd", "resource": "AssignAddVariableOp"}


def reads_of(variable, op):
  """The ops among the ancestors of `op` that read a graph's variable."""
  holder = getattr(variable, "handle", None)
  holder = variable.op if holder is None else holder.op
  return [o for o in ancestors(op) if o.type in ("Identity", "ReadVariableOp")
          and any(t.op is holder for t in o.inputs)]


def types_before(op):
  return {o.type for o in ancestors(op)}


def test_the_average_is_updated_after_the_step(kind):
  _, step, _ = counted(0.5, fused=False)
  [update] = ops_of_type(ema_op(kind))
  assert INCREMENT[kind] in types_before(update)
  # And the number is read after it as well: control edge or input.
  reads = reads_of(step, update)
  assert reads and all(INCREMENT[kind] in types_before(op) for op in reads)


@pytest.mark.parametrize("sequential", [False, True])
def test_in_one_pass_the_number_is_read_before_its_increment(kind, sequential):
  # And one is added: the average counts the step that it is of.
  _, step, train_op = counted(0.9, sequential_update=sequential)
  [update] = ops_of_type(update_op(kind, None))
  assert reads_of(step, update)
  assert INCREMENT[kind] not in types_before(update)
  [increment] = [op for op in ancestors(train_op) if op.type == INCREMENT[kind]]
  assert update in ancestors(increment)


@both_paths
def test_without_order_there_is_no_control_edge(kind, fused):
  v, _, train_op = counted(0.5, sequential_update=False, fused=fused)
  [update] = ops_of_type(update_op(kind, fused))
  assert not [op for op in ancestors(update) if op.control_inputs]
  assert not {"ApplyGradientDescent", "ResourceApplyGradientDescent"} & (
      types_before(update))
  assert update in ancestors(train_op)
  with session_of() as session:
    run(session, train_op)
    # The one order or the other.
    assert session.run(tf.convert_to_tensor(v)) == 1


@both_paths
@pytest.mark.parametrize("graph_function", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_without_order_in_eager_mode_the_average_comes_after_the_step(
    called, graph_function, fused):
  # The number, too, is that after the increment: from 0 to 1 at 2/11, then to
  # 2 at 3/12.
  w, step = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
  opt = wrap(0.5, num_updates=(lambda: step) if called else step,
             sequential_update=False, fused=fused)
  take = (in_function if graph_function else lambda f: f)(
      lambda: descend(opt, w, step=step))
  take()
  take()
  np.testing.assert_allclose(opt.average(w).numpy(), WARM_UP[1], rtol=1e-6)


def ops_of_step(make_optimizer, n):
  """The ops of n variables' step: all that are made, those that run."""
  variables = [v1.get_variable(f"v{i}", [2, 2], initializer=tf.ones)
               for i in range(n)]
  gradient = tf.ones([2, 2])
  before = set(v1.get_default_graph().get_operations())
  step = make_optimizer().apply_gradients([(gradient, v) for v in variables])
  made = set(v1.get_default_graph().get_operations()) - before
  return made, ancestors(step)


@pytest.mark.parametrize("kind_", GRAPH_MODES)
@pytest.mark.parametrize("n, decays, fused", [
    (400, 0.5, None), (20, (0.5, 0.75), None), (20, (0.5, 0.75), False)])
def test_400_variables_take_one_op(kind_, n, decays, fused):
  k = np.size(decays)
  with graph_of(kind_):
    _, bare = ops_of_step(sgd, n)
  with graph_of(kind_):
    made, wrapped = ops_of_step(lambda: wrap(decays, fused=fused), n)

  # What a step runs more than the bare optimizer's, and what it runs less.
  ran = collections.Counter(map(type_of, wrapped))
  ran_bare = collections.Counter(map(type_of, bare))
  more, less = ran - ran_bare, ran_bare - ran
  holder = {"ref": "VariableV2", "resource": "VarHandleOp"}[kind_]
  # NoOp: the train op. Const: the decays.
  expected = {holder: n * k, update_op(kind_, fused): 1, "NoOp": 1, "Const": 1}
  if fused is None:
    # Const: `accept`. Cast: the learning rate to float64. Pack: the scalars.
    expected.update(Const=2, Cast=1, Pack=1)
  else:
    # The variables change before their averages, which must not be in place.
    expected["Wrapopt>CheckInitialized" + "Ref" * (kind_ == "ref")] = 1
  if kind_ == "resource":
    expected["Wrapopt>BundleByName"] = 1
    if fused is None:
      del expected[holder]  # No op for each variable.
  assert more == expected
  step_op = {"ref": "ApplyGradientDescent",
             "resource": "ResourceApplyGradientDescent"}[kind_]
  assert less == ({} if fused is not None else {step_op: n, **(
      {holder: n} if kind_ == "resource" else {})})
  [update] = [op for op in wrapped if type_of(op) == update_op(kind_, fused)]
  assert (update.get_attr("N"), update.get_attr("NK")) == (n, n * k)

  # What there is besides belongs to the averages themselves, but for the ops of
  # each decay that exchange averages and weights, and a variable without a
  # value for each average.
  rest = made - wrapped
  ref = "Ref" if kind_ == "ref" else ""
  swaps = {op for op in rest if op.name.startswith("AveragesInPlace")}
  assert collections.Counter(op.type for op in swaps) == {
      f"Wrapopt>CheckInitialized{ref}": k, f"Wrapopt>Move{ref}": 2 * k,
      exchange_op(kind_): k}
  asides = {op for op in rest if op.name.endswith("/aside")}
  assert [op.type for op in asides] == [holder] * (n * k)
  initializers = set().union(*(
      ancestors(op) for op in rest
      if op.type in ("Assign", "AssignVariableOp")))
  # Of which a tf.cond leaves some that lead nowhere.
  initializers |= {op for op in rest if "cond" in op.name}
  reads = {op for op in rest - initializers
           if op.type in ("Identity", "ReadVariableOp", "VarIsInitializedOp")
           and op.inputs[0].op.type == holder}
  assert len(reads) <= 2 * n * k
  assert rest <= swaps | asides | initializers | reads


@both_paths
def test_devices(kind, fused):
  with tf.device("/cpu:1"):
    a = v1.get_variable("a", initializer=0.0)
    b = v1.get_variable("b", initializer=0.0)
  with tf.device("/cpu:0"):
    c = v1.get_variable("c", initializer=0.0)
  opt = wrap(0.5, fused=fused)
  # Whatever the device around, an op is where its variables are.
  with tf.device("/cpu:2"):
    train_op = descend(opt, a, b, c)
  assert [opt.average(v).device for v in (a, b, c)] == [
      v.device for v in (a, b, c)]
  assert opt.average(a).device == "/device:CPU:1"
  for type_ in update_op(kind, fused), exchange_op(kind):
    assert sorted((op.device, op.get_attr("N"))
                  for op in ops_of_type(type_)) == [
                      ("/device:CPU:0", 1), ("/device:CPU:1", 2)]
  with session_of(device_count={"CPU": 3}) as session:
    run(session, train_op)
    assert session.run(opt.averages()) == [0.5] * 3
    with opt.averaged_weights(session):
      assert session.run([a, b, c]) == [0.5] * 3
    assert session.run([a, b, c]) == [1] * 3


def test_two_devices_eagerly_and_in_a_function():
  variables = []
  for device in ("/cpu:1", "/cpu:0"):
    with tf.device(device):
      variables += [tf.Variable(tf.zeros([2]), name=name)
                    for name in ("dense", "sparse", "none")]
  opt = wrapopt.MovingAverageOptimizer(
      v1.train.AdamOptimizer(1.0, 0.5, 0.75, epsilon=1e-7), 0.5)

  @tf.function
  def function():
    sparse = tf.IndexedSlices(-tf.ones([1]), tf.constant([1]), [2])
    opt.apply_gradients(zip([-tf.ones([2]), sparse, None] * 2, variables))

  function.python_function()
  function()
  # Each step of Adam is of size 1 where all gradients are the same.
  for v, want in zip(variables, [[2, 2], [0, 2], [0, 0]] * 2):
    np.testing.assert_allclose(v, want, atol=1e-5)
    average = opt.average(v)
    assert (average is None) == (want == [0, 0])
    if average is not None:
      assert average.device == v.device
      np.testing.assert_allclose(average, np.multiply(want, 0.625), atol=1e-5)
  assert [v.device[-5:] for v in variables] == ["CPU:1"] * 3 + ["CPU:0"] * 3
  # One tensor holds the handles of a dense step.
  assert sorted(
      (op.get_attr("rule"), op.get_attr("NI"), op.get_attr("NV"),
       op.device[-5:])
      for op in function.get_concrete_function().graph.get_operations()
      if op.type.startswith("Wrapopt>")) == [
          (b"Adam", 0, 1, "CPU:0"), (b"Adam", 0, 1, "CPU:1"),
          (b"Adam", 1, 4, "CPU:0"), (b"Adam", 1, 4, "CPU:1")]


@both_paths
def test_gradients_on_another_device(kind, fused):
  with tf.device("/cpu:1"):
    variables = [v1.get_variable(n, initializer=0.0) for n in "ab"]
  with tf.device("/cpu:0"):
    gradients = [tf.constant(-1.0, name=f"{v.op.name}_grad") for v in variables]
  opt = wrap(0.5, fused=fused)
  train_op = opt.apply_gradients(zip(gradients, variables))
  [update] = ops_of_type(update_op(kind, fused))
  assert update.device == "/device:CPU:1"
  # Nothing is to be put where a gradient is, and no gradient elsewhere.
  assert not [group for group in update.colocation_groups() if b"grad" in group]
  with session_of(device_count={"CPU": 2}) as session:
    run(session, train_op)
    assert session.run([*variables, *opt.averages()]) == [1, 1, 0.5, 0.5]


@both_paths
def test_control_dependencies_around_a_step_stay_out_of_the_averages(
    kind, fused):
  v = v1.get_variable("v", initializer=0.0)
  trap = v1.placeholder(tf.float32, [], name="trap").op
  opt = wrap(0.5, fused=fused)
  with tf.control_dependencies([trap]):
    train_op = descend(opt, v)
  [update] = ops_of_type(update_op(kind, fused))
  assert trap in ancestors(update)
  [exchange] = ops_of_type(exchange_op(kind))
  assert trap not in ancestors(exchange)
  assert not exchange.control_inputs
  assert trap not in ancestors(opt.average(v).initializer)
  with session_of() as session:
    with opt.averaged_weights(session):
      pass


@pytest.mark.parametrize("v2", [False, True])
def test_random_initial_values_are_those_of_the_variables(kind, v2):
  with control_flow(v2):
    a = v1.get_variable("a", [64, 64],
                        initializer=v1.random_normal_initializer())
    b = v1.Variable(a.initial_value * 2 + tf.random.normal([64, 64]))
    opt = wrap([0.5, 0.75])
    descend(opt, a, b)
    for _ in range(5):
      with session_of() as session:
        assert session.run(tf.math.count_nonzero(a)) == 64 * 64
        for v in a, b:
          assert_same_bits(
              session.run([opt.average(v), opt.average(v, 0.75)]),
              session.run([v, v]))


def test_an_initial_value_that_depends_on_another_variable():
  # TensorFlow sees to it that `a` is first: for ref variables, with control
  # flow v1.
  with graph_of("ref"), control_flow(v2=False):
    a = v1.get_variable("a", [64], initializer=v1.random_normal_initializer())
    b = v1.Variable(a * 2)
    opt = wrap()
    descend(opt, a, b)
    for _ in range(5):
      with session_of() as session:
        got = session.run([b, opt.average(b), a * 2, opt.average(a) * 2])
        assert_same_bits(got, got[:1] * 4)


@pytest.mark.parametrize("v2", [False, True])
def test_an_average_that_is_initialized_late_starts_at_the_variable(
    kind, v2):
  # A run that goes on from a checkpoint without averages: restore the
  # variables, then initialize what is missing.
  with control_flow(v2):
    v = v1.get_variable("v", initializer=1.0)
    opt = wrap(0.5)
    descend(opt, v)
    with v1.Session() as session:
      session.run(v.initializer)
      session.run(v.assign(5.0))
      session.run(v1.variables_initializer(opt.averages()))
      assert session.run([v, opt.average(v)]) == [5, 5]


# Not ref variables and v2: no function takes them. The bare optimizer fails.
@both_paths
@pytest.mark.parametrize("kind_, v2", [
    ("ref", False), ("resource", False), ("resource", True)])
def test_a_step_in_a_cond(kind_, v2, fused):
  with graph_of(kind_), control_flow(v2):
    v = v1.get_variable("v", initializer=0.0)
    go = v1.placeholder(tf.bool, [])
    opt = wrap(0.5, fused=fused)

    def step():
      with tf.control_dependencies([descend(opt, v)]):
        return tf.constant(1)

    stepped = tf.cond(go, step, lambda: tf.constant(0))
    with session_of() as session:
      assert [session.run(stepped, {go: x}) for x in (True, False, True)] == [
          1, 0, 1]
      assert session.run([v, opt.average(v)]) == [2, 1.25]
      with opt.averaged_weights(session):
        assert session.run(v) == 1.25


def test_collections(kind):
  a, b, c = (v1.get_variable(n, initializer=0.0) for n in "abc")
  opt = wrap()
  opt.apply_gradients([(tf.constant(1.0), a), (None, b)])
  descend(opt, a, c)
  assert v1.moving_average_variables() == [a, c]
  assert opt.averages() == [opt.average(a), opt.average(c)]
  for average in opt.averages():
    assert not average.trainable
    assert average in v1.global_variables()
    assert average not in v1.trainable_variables()
    assert average not in v1.local_variables()
    assert hasattr(average, "handle") == (kind == "resource")
  assert [v.name for v in v1.global_variables()] == [
      "a:0", "b:0", "c:0", "a/ExponentialMovingAverage:0",
      "c/ExponentialMovingAverage:0"]


def test_a_step_in_a_variable_scope_names_slots_as_tensorflow_does(kind):
  with v1.variable_scope("outer"):
    v = v1.get_variable("v", initializer=0.0)
    opt = wrapopt.MovingAverageOptimizer(v1.train.MomentumOptimizer(1.0, 0.5))
    descend(opt, v)
  assert opt.get_slot(v, "momentum").op.name == "outer/outer/v/Momentum"
  assert opt.average_name(v) == "outer/outer/v/ExponentialMovingAverage"


def test_two_graphs():
  opt = wrap(0.5)
  graphs = []
  for start in 0.0, 8.0:
    with graph_of("resource") as graph:
      v = v1.get_variable("v", initializer=start)
      graphs.append((graph, v, descend(opt, v), opt.averages()))
  for (graph, v, train_op, averages_), want in zip(graphs, (0.5, 8.5)):
    assert averages_ == [opt.average(v)]
    with session_of(graph) as session:
      run(session, train_op)
      # Outside of `with graph.as_default()`.
      assert session.run(opt.average(v)) == want
      with opt.averaged_weights(session):
        assert session.run(v) == want
    with graph.as_default():
      assert opt.variables() == averages_
  assert opt.averages() == []  # In eager mode there are none.


# Which variables have an average.


@both_paths
def test_a_variable_without_gradient_has_no_average(fused):
  a, b = tf.Variable(0.0, name="a"), tf.Variable(0.0, name="b")
  opt = wrap(0.5, fused=fused)
  opt.apply_gradients([(tf.constant(-1.0), a), (None, b)])
  assert opt.average(b) is None
  assert opt.average_name(b) == "b/ExponentialMovingAverage"
  assert [v.ref() for v in opt.averages()] == [opt.average(a).ref()]
  # It gets one with its first gradient, from where it is then.
  b.assign(4.0)
  opt.apply_gradients([(None, a), (tf.constant(-1.0), b)])
  assert (opt.average(a).numpy(), opt.average(b).numpy()) == (0.5, 4.5)


def test_a_variable_named_twice_is_averaged_once(kind):
  # Two losses of one variable, say. The bare optimizer takes both.
  v = v1.get_variable("v", initializer=0.0)
  opt = wrap(0.5)
  train_op = opt.apply_gradients([(tf.constant(-1.0), v)] * 2)
  [update] = ops_of_type(ema_op(kind))
  assert update.get_attr("N") == 1
  with session_of() as session:
    run(session, train_op)
    assert session.run([v, opt.average(v)]) == [2, 1]


@pytest.mark.parametrize("dtype", [tf.int32, tf.complex64])
def test_only_floats_are_averaged(dtype):
  w = tf.Variable(tf.zeros([2], dtype), name="counts")
  opt = wrap()
  with pytest.raises(TypeError, match=(
      r"^An averaged variable must be of dtype float16, bfloat16, float32 or "
      rf"float64, got 'counts:0' of {dtype.name}\.$")):
    opt.apply_gradients([(tf.ones([2], dtype), w)])
  # Before anything was done.
  assert opt.variables() == [] and not w.numpy().any()
  # Without a gradient, it does not matter.
  v = tf.Variable(0.0)
  opt.apply_gradients([(tf.constant(-1.0), v), (None, w)])


@both_paths
def test_partitioned_variables(kind, fused):
  v = v1.get_variable(
      "v", [5, 2], initializer=v1.zeros_initializer(),
      partitioner=v1.fixed_size_partitioner(2))
  opt = wrap(0.5, fused=fused)
  train_op = opt.minimize(-tf.reduce_sum(v))
  [update] = ops_of_type(update_op(kind, fused))
  assert update.get_attr("N") == 2
  assert [average.op.name for average in opt.average(v)] == [
      "v/part_0/ExponentialMovingAverage", "v/part_1/ExponentialMovingAverage"]
  assert [average.shape for average in opt.average(v)] == [[3, 2], [2, 2]]
  with session_of() as session:
    run(session, train_op)
    np.testing.assert_array_equal(
        np.concatenate(session.run(opt.average(v))), np.full([5, 2], 0.5))
    with opt.averaged_weights(session):
      assert (session.run(tf.convert_to_tensor(v)) == 0.5).all()


@both_paths
def test_a_variable_of_unknown_shape(kind, fused):
  if kind == "ref":
    v = v1.Variable(v1.placeholder_with_default([0.0, 0.0], None),
                    validate_shape=False)
  else:
    v = tf.Variable([0.0, 0.0], shape=tf.TensorShape(None))
  opt = wrap(0.5, fused=fused)
  train_op = opt.apply_gradients([(-tf.ones(2), v)])
  with session_of() as session:
    run(session, train_op)
    assert session.run(opt.average(v)).tolist() == [0.5, 0.5]


@pytest.mark.by_day(0)
def test_the_averages_in_a_function():
  # They are those of the variables, which are eager.
  a, b = tf.Variable(0.0), tf.Variable(2.0)
  opt = wrap([0.5, 0.75])
  descend(opt, a, b)
  seen = []

  @tf.function
  def function():
    seen.extend(opt.averages())
    return tf.stack(seen)

  assert function().numpy().tolist() == [0.5, 2.5, 0.25, 2.25]
  assert [x.ref() for x in seen] == [x.ref() for x in opt.averages()]


def test_the_averages_in_a_branch_of_a_graph():
  with graph_of("resource"), control_flow(v2=True):
    v = v1.get_variable("v", initializer=0.0)
    opt = wrap(0.5)
    train_op = descend(opt, v)
    value = tf.cond(tf.constant(True), lambda: tf.stack(opt.averages()),
                    lambda: tf.zeros([1]))
    with session_of() as session:
      run(session, train_op)
      assert session.run(value) == [0.5]


# Several decays.


def test_the_names_of_several_decays(kind):
  v = v1.get_variable("v", initializer=0.0)
  opt = wrap([0.999, 0.9999])
  # Also before there is an average.
  names = ["v/ExponentialMovingAverage", "v/ExponentialMovingAverage_0.9999"]
  assert [opt.average_name(v, d) for d in (0.999, 0.9999)] == names
  descend(opt, v)
  assert [opt.average_name(v, d) for d in (0.999, 0.9999)] == names
  assert [a.op.name for a in opt.averages()] == names
  assert opt.average(v) is opt.average(v, 0.999) is opt.get_slot(
      v, "ExponentialMovingAverage") is opt.get_slot(
          v, "ExponentialMovingAverage_0.999")


@pytest.mark.parametrize("call", [
    lambda opt, w: opt.average(w, 0.3),
    lambda opt, w: opt.average_name(w, decay=0.3),
    lambda opt, w: opt.swapping_saver([w], decay=0.3),
    lambda opt, w: opt.averaged_weights(decay=0.3).__enter__(),
])
def test_a_decay_that_there_is_not(call):
  w, opt = stepped([0.5, 0.75])
  with pytest.raises(ValueError, match=(
      r"^`decay` must be one of this optimizer's, \[0\.5, 0\.75\], got 0\.3"
      r"\.$")):
    call(opt, w)


# Eager mode.


def test_eager_names_are_unique():
  a, b = tf.Variable(0.0, name="same"), tf.Variable(0.0, name="same")
  opt = wrap()
  descend(opt, a, b)
  names = {opt.average_name(v) for v in (a, b)}
  assert len(names) == 2
  assert all(n.startswith("same/ExponentialMovingAverage") for n in names)


def test_a_function_that_makes_its_variables():
  opt, made = wrap(), []

  @tf.function
  def step():
    if not made:
      made.append(tf.Variable(1.0, name="late"))
    opt.minimize(lambda: made[0] * 2, var_list=made)

  with pytest.raises(RuntimeError, match=(
      r"'late:0' must have a value before its first step, got a variable that "
      r"the running tf\.function has just made\. Make it before you call the "
      r"function\.")):
    step()


@both_paths
def test_a_variable_that_is_gone_is_not_kept(fused):
  kept, w = tf.Variable(0.0), tf.Variable(tf.zeros([8]))
  opt = wrap([0.5, 0.75], fused=fused)
  descend(opt, kept, w)
  gone = [weakref.ref(v) for v in (w, opt.average(w), opt.average(w, 0.75))]
  del w
  gc.collect()
  assert [r() for r in gone] == [None] * 3
  # The optimizer goes on with the rest.
  descend(opt, kept)
  assert [x.numpy() for x in opt.averages()] == [1.25, 0.6875]
  assert len(opt.variables()) == 2
  with opt.averaged_weights():
    assert kept.numpy() == 1.25


@both_paths
def test_a_function_that_is_gone_keeps_nothing(fused):
  w, opt = tf.Variable(0.0), wrap(0.5, fused=fused)

  @tf.function
  def step():
    opt.minimize(lambda: -w, var_list=[w])

  step()
  gone = [weakref.ref(x) for x in (step, w, opt.average(w))]
  step = w = None
  gc.collect()
  assert [r() for r in gone] == [None] * 3


def graphs_left(opt):
  """Of three graphs, in which the optimizer was used: those that are kept."""
  graphs = []
  for _ in range(3):
    with graph_of("resource") as graph:
      descend(opt, v1.get_variable("v", initializer=0.0))
    graphs.append(weakref.ref(graph))
    del graph
  gc.collect()
  return [ref() is not None for ref in graphs]


@both_paths
def test_a_graph_that_is_gone_is_not_kept(fused):
  # The inner optimizer holds its learning rate in the last one.
  assert graphs_left(sgd()) == [False, False, True]
  assert graphs_left(wrap([0.5, 0.75], fused=fused)) == [False, False, True]


@both_paths
def test_a_graph_that_is_there_keeps_its_averages(kind, fused):
  opt = wrap(0.5, fused=fused)

  def build():
    # Nobody else holds the variable.
    v = v1.Variable(0.0, trainable=False, collections=[])
    return v.initializer, descend(opt, v)

  initializer, train_op = build()
  gc.collect()
  [average] = opt.averages()
  with v1.Session() as session:
    session.run(initializer)
    session.run(average.initializer)
    run(session, train_op, 2)
    with opt.averaged_weights(session):
      with pytest.raises((tf.errors.InvalidArgumentError,
                          tf.errors.FailedPreconditionError)):
        session.run(average)
    assert session.run(average) == 1.25


# Copies.


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda opt: pickle.loads(pickle.dumps(opt)),
}
# Wrappers of an inner optimizer.
COPIED = {
    "bare": lambda opt: opt,
    "average": lambda opt: wrapopt.MovingAverageOptimizer(opt, [0.5, 0.75]),
    "gate": lambda opt: wrapopt.DropStaleGradientOptimizer(opt, 0, worker="w"),
    "gate_of_average": lambda opt: wrapopt.DropStaleGradientOptimizer(
        wrapopt.MovingAverageOptimizer(opt), 0),
    "average_of_gate": lambda opt: wrapopt.MovingAverageOptimizer(
        wrapopt.DropStaleGradientOptimizer(opt, 0)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("which", COPIED)
def test_a_copy_goes_on_by_itself(which, copied):
  w, step = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
  opt = COPIED[which](v1.train.MomentumOptimizer(1.0, 0.5))
  take = lambda o: o.minimize(lambda: -w, step, [w])
  values = lambda o: {v.name: v.numpy().tolist() for v in o.variables()}
  of_new = COPIES[copied](opt)
  take(opt)
  one = COPIES[copied](opt)
  before = values(opt)
  assert values(one) == before
  # Steps add 1 + .5 to the momentum of the copy.
  take(one)
  assert one.get_slot(w, "momentum").numpy() == -1.5
  assert w.numpy() == 2.5
  assert values(opt) == before != values(one)
  take(of_new)
  assert of_new.get_slot(w, "momentum").numpy() == -1
  assert w.numpy() == 3.5


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_averages_of_its_own(copied):
  w, opt = stepped(0.5)
  one = COPIES[copied](opt)
  descend(one, w)
  # From .5 half of the way to 2.
  assert [x.numpy() for x in one.averages()] == [1.25]
  assert [x.numpy() for x in opt.averages()] == [0.5]
  with one.averaged_weights():
    assert w.numpy() == 1.25
    assert opt.average(w).numpy() == 0.5
    with pytest.raises(RuntimeError, match=(
        "^An optimizer cannot be copied inside averaged_weights: the averages "
        r"are in place of the weights\. Leave the `with` block first\.$")):
      COPIES[copied](one)
  assert w.numpy() == 2


# Threads.


@both_paths
def test_the_first_step_of_several_threads(fused):
  n = 4
  for _ in range(5):
    w, made = tf.Variable(0.0), []
    opt = wrap([0.5, 0.75], fused=fused)
    barrier = threading.Barrier(n)

    def creator(next_creator, **kwargs):
      made.append(next_creator(**kwargs))
      return made[-1]

    def step():
      with tf.variable_creator_scope(creator):
        barrier.wait(60)
        descend(opt, w)

    in_threads(*[step] * n)
    # One for each decay, and no other that had the update of a thread.
    assert [x.ref() for x in opt.averages()] == [x.ref() for x in made] == [
        opt.average(w).ref(), opt.average(w, 0.75).ref()]
    assert w.numpy() == n
    average = opt.average(w).numpy()
    with opt.averaged_weights():
      assert w.numpy() == average
    assert w.numpy() == n


# The base class.


def test_slots_and_variables(kind):
  v = v1.get_variable("v", initializer=0.0)
  inner = v1.train.AdamOptimizer(1.0)
  opt = wrapopt.MovingAverageOptimizer(inner, name="my_averages")
  assert opt.get_name() == "my_averages"
  assert opt.variables() == []
  descend(opt, v)
  assert opt.get_slot_names() == ["ExponentialMovingAverage", "m", "v"]
  for name in "m", "v":
    assert opt.get_slot(v, name) is inner.get_slot(v, name) is not None
  assert opt.get_slot(v, "ExponentialMovingAverage") is opt.average(v)
  assert opt.get_slot(v, "no such slot") is None
  assert [x.op.name for x in opt.variables()] == [
      "beta1_power", "beta2_power", "v/Adam", "v/Adam_1",
      "v/ExponentialMovingAverage"]


# tf.distribute.

STRATEGIES = {
    "Mirrored": tf.distribute.MirroredStrategy,
    "CentralStorage": tf.distribute.experimental.CentralStorageStrategy}


# The collectives of a second strategy would have the keys of the first one's.
@functools.cache
def strategy_of(name):
  return STRATEGIES[name](["/cpu:0", "/cpu:1"])


def copies(strategy, *variables):
  """For each variable, the different values that it has in replicas."""
  return [sorted({float(x[0]) for x in strategy.experimental_local_results(v)})
          for v in variables]


@pytest.mark.parametrize("strategy, devices", [
    ("Mirrored", ["CPU:0", "CPU:1"]), ("CentralStorage", [])])
def test_a_strategy(strategy, devices):
  strategy = strategy_of(strategy)
  with strategy.scope():
    w = tf.Variable([0.0, 0.0])
    opt = wrapopt.MovingAverageOptimizer(
        v1.train.MomentumOptimizer(1.0, 0.5), [0.5, 0.75])
  # Each replica's gradient is half of what all apply.
  step = in_function(lambda: strategy.run(lambda: opt.apply_gradients(
      [(tf.constant([-0.5, -0.5]), w)])))
  # Weights: 1, then 1 + 1.5. Averages: half of 1, then half way to 2.5; and a
  # quarter. The same in both replicas.
  for want in ([[1], [-1], [0.5], [0.25]], [[2.5], [-1.5], [1.5], [0.8125]]):
    step()
    assert copies(strategy, w, opt.get_slot(w, "momentum"), opt.average(w),
                  opt.average(w, 0.75)) == want
  with opt.averaged_weights():
    assert copies(strategy, w, opt.average(w, 0.75)) == [[1.5], [0.8125]]
  assert copies(strategy, w, opt.average(w)) == [[2.5], [1.5]]
  assert [v.device[-5:] for v in getattr(opt.average(w), "values", ())] == (
      devices)


@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_in_a_graph(strategy, fused, tmp_path):
  with tf.Graph().as_default() as graph:
    strategy = STRATEGIES[strategy](["/cpu:0", "/cpu:1"])
    with strategy.scope():
      w = v1.get_variable("w", initializer=[0.0, 0.0])
      h = v1.get_variable("h", initializer=tf.zeros([2], tf.float16))
      step = v1.train.get_or_create_global_step()
      opt = wrapopt.MovingAverageOptimizer(
          v1.train.MomentumOptimizer(1.0, 0.5), [0.5, 0.75],
          shadow_dtype=tf.float32, fused=fused)
    results = strategy.experimental_local_results

    def replica():
      g = tf.constant([-0.5, -0.5])
      return opt.apply_gradients([(g, w), (tf.cast(g, tf.float16), h)], step)

    train_op = results(strategy.run(replica))
    saver = opt.swapping_saver()
    values = [[results(v) for v in (x, opt.average(x), opt.average(x, 0.75))]
              for x in (w, h)]
    with session_of() as session:
      graph.finalize()

      def check(*want, which=slice(None)):
        # For w and for h, all replicas have these values.
        assert [[{float(y[0]) for y in x} for x in row] for row in session.run(
            [row[which] for row in values])] == [[{x} for x in want]] * 2

      run(session, train_op)
      check(1, 0.5, 0.25)
      run(session, train_op)
      check(2.5, 1.5, 0.8125)
      with opt.averaged_weights(session):
        check(1.5, 0.8125, which=slice(0, 3, 2))
      check(2.5, 1.5, 0.8125)
      path = saver.save(session, str(tmp_path / "model"),
                        write_meta_graph=False)
      assert tf.train.load_variable(path, "w")[0] == 1.5
      opt.seed_averages(session)
      check(2.5, 2.5, 2.5)
      saver.restore(session, path)
      check(2.5, 1.5, 0.8125)


@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slots_of_a_strategy_in_a_graph(strategy, fused):
  """As TensorFlow's `optimizer_test.testGetSlotUnderDistributedStrategy`."""
  with tf.Graph().as_default():
    opt = wrapopt.MovingAverageOptimizer(v1.train.AdamOptimizer(), fused=fused)
    kinds = []

    def replica():
      v = v1.Variable([1.0])
      opt.apply_gradients([(tf.convert_to_tensor([1.0]), v)])
      for name in opt.get_slot_names():
        kinds.append(type(opt.get_slot(v, name)) is type(v))

    STRATEGIES[strategy](["/cpu:0", "/cpu:1"]).run(replica)
    # All slots are as the variable is: m, v and the average, in two replicas.
    assert kinds == [True] * 3 * 2 and len(opt.averages()) == 1


@pytest.mark.parametrize("how", ["list", "function"])
def test_some_variables_in_a_strategy(how):
  strategy = strategy_of("Mirrored")
  with strategy.scope():
    a, b = tf.Variable([0.0]), tf.Variable([0.0])
    opt = wrap(0.5, update_every=2, variables=(
        [a] if how == "list" else lambda v: v is a))
  step = in_function(lambda: strategy.run(lambda: opt.apply_gradients(
      [(tf.constant([-0.5]), a), (tf.constant([-0.5]), b)])))
  # a is 1, 2, 3, 4; its average moves in each second step.
  for want in 0, 1, 1, 2.5:
    step()
    assert copies(strategy, opt.average(a)) == [[want]]
  assert opt.average(b) is None
  with opt.averaged_weights():
    assert copies(strategy, a, b) == [[2.5], [4]]


@pytest.mark.parametrize("is_summed_on_read", [False, True])
def test_an_untrained_variable_in_a_strategy(is_summed_on_read):
  strategy = strategy_of("Mirrored")
  with strategy.scope():
    a = tf.Variable([0.0])
    mean = tf.Variable(
        [0.0], trainable=False, aggregation=tf.VariableAggregation.MEAN,
        synchronization=(tf.VariableSynchronization.ON_READ if is_summed_on_read
                         else tf.VariableSynchronization.AUTO))
    opt = wrap(0.5, variables=[a, mean])

  def replica():
    mean.assign_add([1.0])
    opt.apply_gradients([(tf.constant([-0.5]), a)])

  step = in_function(lambda: strategy.run(replica))
  if is_summed_on_read:
    with pytest.raises(NotImplementedError,
                       match="which is another one in each replica"):
      step()
    return
  for want in 0.5, 1.25:  # Of 1 and 2.
    step()
    assert copies(strategy, opt.average(mean)) == [[want]]


# Averages before the first step


def test_a_mean_teacher(kind):
  """The loss of w is (w - teacher)^2 + w, with the rate 1.

  w = 1, teacher 1: the gradient is 1, w = 0, and the average .5.
  w = 0, teacher .5: it is 2 (0 - .5) + 1 = 0, w = 0, and the average .25.
  """
  w = v1.get_variable("w", initializer=[1.0])
  opt = wrap(0.5)
  opt.build([w])
  teacher = opt.average(w)
  train_op = opt.minimize(
      tf.reduce_sum(tf.square(w - tf.stop_gradient(teacher)) + w))
  assert opt.average(w) is teacher
  with session_of() as session:
    assert session.run(teacher) == 1
    run(session, train_op)
    assert session.run([w, teacher]) == [0, 0.5]
    run(session, train_op)
    assert session.run([w, teacher]) == [0, 0.25]
    with opt.averaged_weights(session):
      assert session.run(w) == 0.25


@pytest.mark.by_day(3)
@pytest.mark.parametrize("make", [
    lambda: wrapopt.DropStaleGradientOptimizer(wrap(0.5), 0),
    lambda: wrapopt.CrossShardOptimizer(wrap(0.5)),
    lambda: wrap([0.5, 0.75], num_updates=3, variables=lambda v: "w" in v.name),
    lambda: wrap(wrapopt.BEMA(2)),
    lambda: wrapopt.ScheduleFreeOptimizer(sgd()),
    lambda: wrapopt.PrimalAverageOptimizer(sgd()),
], ids=["gate", "shards", "chosen", "bema", "schedule_free", "primal_average"])
def test_build_makes_what_a_step_makes(make, kind):
  def trained(builds):
    with graph_of(kind) as graph:
      step = v1.train.get_or_create_global_step()
      w = v1.get_variable("w", initializer=tf.ones([4]), partitioner=(
          v1.fixed_size_partitioner(2)))
      b = v1.get_variable("b", initializer=2.0)
      opt = make()
      if builds:
        opt.build([w, b, b])
      with getattr(opt, "record_step", contextlib.nullcontext)():
        loss = tf.reduce_sum(tf.convert_to_tensor(w)) * b
      train_op = opt.minimize(loss, step)
      with session_of() as session:
        run(session, train_op, 2)
        names = [v.name for v in v1.global_variables()]
        values = dict(zip(names, session.run(v1.global_variables())))
      assert len(values) == len(names)
      in_collection = [v.name for v in graph.get_collection(
          v1.GraphKeys.MOVING_AVERAGE_VARIABLES)]
      return values, sorted(in_collection)

  (got, got_names), (want, want_names) = trained(True), trained(False)
  assert got_names == want_names
  assert sorted(got) == sorted(want)
  assert_same_bits([got[name] for name in want], want.values())


def test_build_makes_local_variables_of_a_worker(kind):
  getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
  with v1.variable_scope("", custom_getter=getter):
    w = v1.get_variable("w", initializer=1.0)
  opt = wrapopt.ElasticAverageOptimizer(wrap(0.5), 1, getter)
  opt.build([w])
  assert "w/ExponentialMovingAverage" in {
      v.op.name for v in v1.local_variables()}


def test_build_in_eager_mode():
  w = tf.Variable([1.0])
  opt, other = wrap(0.5), wrap(0.5)
  opt.build([w])
  assert opt.average(w).numpy() == [1]
  descend(opt, w)
  assert opt.average(w).numpy() == [1.5]
  with opt.averaged_weights():
    with pytest.raises(RuntimeError, match="build.. must not be called while an"
                       " average is in place"):
      other.build([w])
  assert other.average(w) is None


def test_build_checks_its_variables(kind):
  opt = wrap(0.5)
  w = v1.get_variable("w", initializer=1.0)
  with pytest.raises(TypeError, match=r"`variables\[1\]` must be a variable"):
    opt.build([w, tf.constant(1.0)])
  count = v1.get_variable("count", initializer=1)
  with pytest.raises(TypeError, match="must be of dtype .*got 'count:0' of"):
    opt.build([w, count])
  with tf.Graph().as_default():
    with pytest.raises(ValueError, match="of this graph, .* got 'w:0'"):
      opt.build([w])
  assert opt.average(w) is None
