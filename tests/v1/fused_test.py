"""One pass and two: the same numbers, names and files from different ops."""

import collections
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

import numerics
import wrapopt
from processes import run_python
from training import GRAPH_MODES
from training import MODES
from training import ancestors
from training import apply_ops
from training import assert_close_histories
from training import assert_close_traces
from training import assert_ema_step
from training import graph_of
from training import ops_of_type
from training import session_of
from training import train
from training import type_of

tf1 = tf.compat.v1
v1 = tf.compat.v1.train


def float32(*numbers):
  """Numbers as an optimizer passes them to its ops."""
  return [float(np.float32(x)) for x in numbers]


class Inner(collections.namedtuple("Inner", "make rule slots scalars")):
  """An inner optimizer and what is to come of it, written from its paper.

  Attributes:
    make: Makes it. The stock optimizer rounds the betas of Adam and their
      powers to the variable's dtype, in which 1 - 0.999 may be nothing: they
      are of few bits.
    rule: The name of its rule in numerics.RULES.
    slots: {name: initial value}, in the order of the rule's states.
    scalars: A function of the number of the step, from 1, that gives the
      scalars of the rule.
  """


INNER = {
    "Adadelta": Inner(
        lambda: v1.AdadeltaOptimizer(200.0, 0.9, epsilon=0.01),
        "Adadelta", {"accum": 0, "accum_update": 0},
        lambda t: float32(200, 0.9, 0.01)),
    "Adagrad": Inner(
        lambda: v1.AdagradOptimizer(0.5),
        "Adagrad", {"accumulator": 0.1}, lambda t: float32(0.5)),
    "Adam": Inner(
        lambda: v1.AdamOptimizer(0.5, 0.5, 0.75, epsilon=0.01),
        "Adam", {"m": 0, "v": 0},
        lambda t: float32(0.5, 0.5, 0.75, 0.01, 0, 0, 0.5**t, 0.75**t)),
    "CenteredRMSProp": Inner(
        lambda: v1.RMSPropOptimizer(
            0.5, 0.8, momentum=0.25, centered=True, epsilon=0.01),
        "CenteredRMSProp", {"mg": 0, "rms": 1, "momentum": 0},
        lambda t: float32(0.5, 0.8, 0.25, 0.01)),
    "Ftrl": Inner(
        lambda: v1.FtrlOptimizer(
            0.5, l1_regularization_strength=0.1,
            l2_regularization_strength=0.2,
            l2_shrinkage_regularization_strength=0.3),
        "Ftrl", {"accum": 0.1, "linear": 0},
        lambda t: float32(0.5, 0.1, 0.2, 0.3)),
    "GradientDescent": Inner(
        lambda: v1.GradientDescentOptimizer(0.3),
        "GradientDescent", {}, lambda t: float32(0.3)),
    "Momentum": Inner(
        lambda: v1.MomentumOptimizer(0.3, 0.7),
        "Momentum", {"momentum": 0}, lambda t: float32(0.3, 0.7, 0)),
    "Momentum, Nesterov": Inner(
        lambda: v1.MomentumOptimizer(lambda: 0.3, 0.7, use_nesterov=True),
        "Momentum", {"momentum": 0}, lambda t: float32(0.3, 0.7, 1)),
    "RMSProp": Inner(
        lambda: v1.RMSPropOptimizer(0.5, 0.8, momentum=0.25, epsilon=0.01),
        "RMSProp", {"rms": 1, "momentum": 0},
        lambda t: float32(0.5, 0.8, 0.25, 0.01)),
}
every_inner = pytest.mark.parametrize("inner", INNER)
every_mode = pytest.mark.parametrize("mode", MODES)
both_paths = pytest.mark.parametrize("fused", [None, False])

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
DECAYS = {f"ExponentialMovingAverage_{decay}": decay for decay in (0.5, 0.9)}
STEPS = 5


def cases(inner):
  """{name: initial value} for each dtype and each kind of gradient."""
  start = np.array([[1.0, -0.5], [2.0, 3.0], [-1.5, 0.25]])
  return {
      f"{kind}_{dtype.name}": start.astype(dtype.as_numpy_dtype)
      for kind in ("dense", "sparse", "none") for dtype in DTYPES
      # The stock optimizer has no such kernel to compare with.
      if not (kind == "sparse" and dtype == tf.bfloat16 and "RMS" in inner)}


def gradients(initial):
  rng = np.random.default_rng(0)
  def one(t, name):
    kind, dtype = name.split("_")
    rows = rng.uniform(-2, 2, (3, 2)).astype(tf.as_dtype(dtype).as_numpy_dtype)
    return {"dense": rows, "none": None,
            # One row has two gradients, one has none.
            "sparse": (rows, np.array([t, 0, t], np.int32))}[kind]
  return [{name: one(1 + t % 2, name) for name in initial}
          for t in range(STEPS)]


def wrap(inner, fused, decays=0.5, **kwargs):
  return wrapopt.MovingAverageOptimizer(
      INNER[inner].make(), decays, fused=fused, **kwargs)


@pytest.fixture(scope="module")
def run():
  """The Trace of an inner optimizer's steps in a mode, made once."""
  made = {}

  def get(inner, mode, fused):
    key = inner, mode, fused
    if key not in made:
      initial = cases(inner)
      made[key] = train(
          mode, lambda step: wrap(inner, fused, list(DECAYS.values()),
                                  num_updates=step),
          initial, gradients(initial))
    return made[key]

  return get


@every_mode
@every_inner
def test_both_go_through_the_same_numbers(inner, mode, run):
  one, two = run(inner, mode, None), run(inner, mode, False)
  assert one.optimizer.fused and not two.optimizer.fused
  assert one.slots[-1].keys() == two.slots[-1].keys()
  assert one.others[-1].keys() == two.others[-1].keys()
  assert_close_traces(one, two)


@every_mode
@every_inner
def test_each_step_is_that_of_the_paper(inner, mode, run):
  # From where it is, so that nothing adds up: a float16 or bfloat16 step is
  # then held to half a unit in the last place.
  trace = run(inner, mode, None)
  _, rule, initial_slots, scalars = INNER[inner]
  names = list(cases(inner))
  for i, name in enumerate(names):
    before = {slot: np.full_like(trace.values[0][i], value)
              for slot, value in initial_slots.items()}
    before.update({slot: trace.values[0][i] for slot in DECAYS})
    for t, steps in enumerate(gradients(cases(inner)), 1):
      old, new = trace.values[t - 1][i], trace.values[t][i]
      if steps[name] is None:
        numerics.assert_same_bits(new, old)
        assert (next(iter(before)), i) not in trace.slots[t - 1]
        continue
      after = {slot: trace.slots[t - 1][slot, i] for slot in before}
      grad, rows = steps[name], np.arange(3)
      if name.startswith("sparse"):
        grad = np.zeros((3, 2))
        np.add.at(grad, steps[name][1], np.float64(steps[name][0]))
        if rule != "Adam":
          rows = np.unique(steps[name][1])
      want = numerics.reference(
          rule, [x[rows] for x in (old, *(before[s] for s in initial_slots))],
          [np.asarray(grad)[rows]], scalars(t))
      got = [new, *(after[slot] for slot in initial_slots)]
      for state, (x, (value, tolerance)) in enumerate(zip(got, want)):
        numerics.assert_close(x[rows], value, tolerance, (name, t, state))
      still = np.setdiff1d(np.arange(3), rows)
      for x, y in zip(got, (old, *(before[s] for s in initial_slots))):
        numerics.assert_same_bits(x[still], y[still], (name, t))
      for slot, decay in DECAYS.items():
        # All rows; the number of the step counts the step.
        assert_ema_step(after[slot], before[slot], new,
                        min(decay, (1 + t) / (10 + t)))
      before = after


@pytest.mark.parametrize("mode", ["function", *GRAPH_MODES])
@every_inner
def test_these_are_the_ops(inner, mode, run):
  one, two = run(inner, mode, None), run(inner, mode, False)
  ref = "Ref" if mode == "ref" else ""
  expected = collections.Counter(
      f"Wrapopt>{'Sparse' if name.startswith('sparse') else ''}Apply"
      f"{INNER[inner].rule}{ref}"
      for name in cases(inner) if not name.startswith("none"))
  assert collections.Counter(apply_ops(one.op_types)) == expected
  assert f"Wrapopt>EmaUpdate{ref}" not in one.op_types
  assert not apply_ops(two.op_types)
  assert f"Wrapopt>EmaUpdate{ref}" in two.op_types


def test_a_trajectory():
  # 1 - 0.5 * 1 = 0.5; the average of 1 and 0.5 is 0.75.
  v = tf.Variable([1.0])
  opt = wrapopt.MovingAverageOptimizer(
      v1.GradientDescentOptimizer(0.5), 0.5, fused=True)
  opt.apply_gradients([(tf.constant([1.0]), v)])
  assert v.numpy() == [0.5] and opt.average(v).numpy() == [0.75]


# What is left to the inner optimizer.


@every_inner
def test_a_subclass_is_not_taken_apart(inner):
  made = INNER[inner].make()
  made.__class__ = type("Mine", (type(made),), {})
  assert not wrapopt.MovingAverageOptimizer(made).fused
  with pytest.raises(ValueError, match=(
      "^`fused` must not be True: Mine with these arguments has no op that "
      "takes its step and updates the averages in one pass"
      r"\. Leave `fused` at None\.$")):
    wrapopt.MovingAverageOptimizer(made, fused=True)


def test_what_a_subclass_overrides_is_called():
  class Twice(v1.GradientDescentOptimizer):

    def _resource_apply_dense(self, grad, handle):
      return super()._resource_apply_dense(2 * grad, handle)

  v = tf.Variable([1.0])
  opt = wrapopt.MovingAverageOptimizer(Twice(0.5), 0.5)
  opt.apply_gradients([(tf.constant([1.0]), v)])
  assert v.numpy() == [0.0] and opt.average(v).numpy() == [0.5]


@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("on_class", [False, True])
def test_what_is_set_on_an_optimizer_is_called(mode, on_class, monkeypatch):
  """Also on its class, and on a wrapper inside."""
  def doubled(f):
    def apply(*args, **kwargs):
      *first, grad, variable = args
      return f(*first, 2 * grad, variable, **kwargs)
    return apply

  def doubled_step(f):
    return lambda grads_and_vars, *args, **kwargs: f(
        [(2 * g, v) for g, v in grads_and_vars], *args, **kwargs)

  with graph_of(mode):
    inner = v1.GradientDescentOptimizer(0.25)
    target = v1.GradientDescentOptimizer if on_class else inner
    for name in ("_apply_dense", "_resource_apply_dense"):
      monkeypatch.setattr(target, name, doubled(getattr(target, name)))
    middle = wrapopt.MovingAverageOptimizer(inner, 0.5)
    assert not middle.fused
    middle.apply_gradients = doubled_step(middle.apply_gradients)
    step = tf1.train.get_or_create_global_step()
    opt = wrapopt.DropStaleGradientOptimizer(middle, 5, global_step=step)
    v = tf1.get_variable("v", initializer=[1.0])
    with opt.record_step(step) as recorded:
      grad = tf.constant([1.0])
    taken = opt.apply_gradients([(grad, v)], step, recorded=recorded)
    with session_of() as session:
      session.run(taken)
      value, average = session.run([v, middle.average(v)])
  # The gradient is doubled twice.
  assert value == [0.0] and average == [0.5]


@pytest.mark.parametrize("make", [
    lambda: v1.ProximalGradientDescentOptimizer(0.1),
    lambda: v1.FtrlOptimizer(0.1, learning_rate_power=-0.25)])
def test_what_has_no_such_op(make):
  assert not wrapopt.MovingAverageOptimizer(make()).fused
  with pytest.raises(ValueError, match="`fused` must not be True: "):
    wrapopt.MovingAverageOptimizer(make(), fused=True)


def test_a_constraint_is_kept():
  v = tf.Variable([1.0], constraint=lambda x: tf.maximum(x, 0.75))
  opt = wrapopt.MovingAverageOptimizer(
      v1.GradientDescentOptimizer(0.5), 0.5, fused=True)
  opt.apply_gradients([(tf.constant([1.0]), v)])
  assert v.numpy() == [0.75] and opt.average(v).numpy() == [0.875]


# Devices.


def test_one_op_per_device_and_dtype_and_kind_in_a_graph():
  # On each of two devices, of ref and of resource variables, of two dtypes,
  # with a dense, a sparse and no gradient: two variables of each.
  with tf.Graph().as_default():
    pairs, expected = [], collections.Counter()
    for device in ("/device:CPU:0", "/device:CPU:1"):
      for ref in ("", "Ref"):
        for dtype in (tf.float32, tf.float64):
          for kind in ("", "Sparse", None):
            for _ in range(2):
              with tf.device(device):
                v = tf1.Variable(np.zeros([3, 2]), dtype=dtype,
                                 use_resource=not ref)
              ones = -tf.ones([3, 2], dtype)
              pairs.append(({
                  "": ones, None: None,
                  "Sparse": tf.IndexedSlices(ones, [0, 2, 2], [3, 2]),
              }[kind], v))
            if kind is not None:
              expected[f"Wrapopt>{kind}ApplyMomentum{ref}", device, dtype, 2,
                       4] += 1
    opt = wrapopt.MovingAverageOptimizer(
        v1.MomentumOptimizer(1.0, 0.5), [0.5, 0.75])
    with tf.device("/cpu:1"):
      train_op = opt.apply_gradients(pairs)
    assert expected == collections.Counter(
        (type_of(op), op.device, op.get_attr("T"), op.get_attr("N"),
         op.get_attr("NK"))
        for op in ancestors(train_op) if op.type.startswith("Wrapopt>Apply"))
    with tf1.Session(config=tf1.ConfigProto(
        device_count={"CPU": 2})) as session:
      session.run(tf1.global_variables_initializer())
      for _ in range(2):
        session.run(train_op)
      for gradient, v in pairs:
        got = session.run(v)
        if gradient is None:
          assert not got.any() and opt.average(v) is None
          continue
        # Momentum 1/2: 1, then 1 + 1.5. The average: 1/2, then 1.5.
        first = np.ones([3, 2])
        if isinstance(gradient, tf.IndexedSlices):
          first[1], first[2] = 0, 2
        np.testing.assert_array_equal(got, 2.5 * first)
        np.testing.assert_array_equal(session.run(opt.average(v)), 1.5 * first)


TWO_DEVICES = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import wrapopt

variables = []
for device in ("/cpu:1", "/cpu:0"):
  with tf.device(device):
    variables += [tf.Variable(tf.zeros([2]), name=f"{k}{device[-1]}")
                  for k in ("dense", "sparse", "none")]
opt = wrapopt.MovingAverageOptimizer(
    tf.compat.v1.train.AdamOptimizer(1.0, 0.5, 0.75, epsilon=1e-7), 0.5)

def step():
  opt.apply_gradients([(
      {"d": -tf.ones([2]), "n": None,
       "s": tf.IndexedSlices(-tf.ones([1]), tf.constant([1]), [2])}[v.name[0]],
      v) for v in variables])

step()
function = tf.function(step)
function()
# Each step of Adam is of size 1 where all gradients are the same.
for v in variables:
  average = opt.average(v)
  print(v.name[:-2], v.device[-5:], v.numpy().round(5).tolist(), (
      None if average is None else
      (average.device[-5:], average.numpy().round(5).tolist())))
print(sorted((op.get_attr("rule").decode(), op.get_attr("NI"),
              op.get_attr("NV"), op.device[-5:])
             for op in function.get_concrete_function().graph.get_operations()
             if op.type.startswith("Wrapopt>")))
"""


def test_two_devices_eagerly_and_in_a_function():
  process = run_python("-c", TWO_DEVICES)
  assert process.returncode == 0, process.stderr
  *lines, ops = process.stdout.splitlines()
  assert lines == [line for n in "10" for line in (
      f"dense{n} CPU:{n} [2.0, 2.0] ('CPU:{n}', [1.25, 1.25])",
      f"sparse{n} CPU:{n} [0.0, 2.0] ('CPU:{n}', [0.0, 1.25])",
      f"none{n} CPU:{n} [0.0, 0.0] None")]
  # One tensor holds the handles of a dense step.
  assert ops == str([("Adam", 0, 1, "CPU:0"), ("Adam", 0, 1, "CPU:1"),
                     ("Adam", 1, 4, "CPU:0"), ("Adam", 1, 4, "CPU:1")])


# Locks.

LOCKING = {
    "Adadelta": v1.AdadeltaOptimizer,
    "Adagrad": lambda **k: v1.AdagradOptimizer(0.5, **k),
    "Adam": v1.AdamOptimizer,
    "CenteredRMSProp": lambda **k: v1.RMSPropOptimizer(0.5, centered=True, **k),
    "Ftrl": lambda **k: v1.FtrlOptimizer(0.5, **k),
    "GradientDescent": lambda **k: v1.GradientDescentOptimizer(0.5, **k),
    "Momentum": lambda **k: v1.MomentumOptimizer(0.5, 0.5, **k),
    "RMSProp": lambda **k: v1.RMSPropOptimizer(0.5, **k),
}


def test_every_rule_is_locked_in_a_test():
  assert set(LOCKING) == {inner.rule for inner in INNER.values()}


@pytest.mark.parametrize("use_locking", [False, True])
@pytest.mark.parametrize("kind", GRAPH_MODES)
@pytest.mark.parametrize("rule", LOCKING)
def test_use_locking_reaches_the_op(rule, kind, use_locking):
  with graph_of(kind):
    v = tf1.get_variable("v", [2])
    wrapopt.MovingAverageOptimizer(
        LOCKING[rule](use_locking=use_locking)).apply_gradients(
            [(tf.ones([2]), v)])
    [op] = ops_of_type(f"Wrapopt>Apply{rule}" + "Ref" * (kind == "ref"))
    assert op.get_attr("use_locking") == use_locking


@pytest.mark.parametrize("kind", GRAPH_MODES)
def test_locked_steps_of_many_threads_add_up(kind):
  # Each step is atomic, averages included: in whatever order they come, what
  # they leave is what as many steps one after the other leave.
  threads, times, size = 8, 50, 100_000
  with graph_of(kind):
    v = tf1.get_variable("v", [size], initializer=tf1.zeros_initializer())
    opt = wrapopt.MovingAverageOptimizer(
        v1.MomentumOptimizer(1.0, 0.5, use_locking=True), [0.5, 0.75])
    train_op = opt.apply_gradients([(-tf.ones([size]), v)])
    state = [v, opt.get_slot(v, "momentum"), *opt.averages()]
    with session_of() as session:
      for _ in range(threads * times):
        session.run(train_op)
      want = [np.array(x) for x in session.run(state)]
      session.run(tf1.global_variables_initializer())
      start = threading.Barrier(threads)

      def work():
        start.wait()
        for _ in range(times):
          session.run(train_op)

      workers = [threading.Thread(target=work) for _ in range(threads)]
      for worker in workers:
        worker.start()
      for worker in workers:
        worker.join()
      for x, y in zip(session.run(state), want, strict=True):
        numerics.assert_same_bits(x, y)
  # 400 steps of 2, but for the first ones.
  assert want[0][0] == 2 * threads * times - 2


# Hyper-parameters.

# Learning rates: made of the global step and of a variable that holds 1, 1/2
# and 1/4 before the first three steps. Some follow one of these, some are 1.
FOLLOWING = {
    "variable": lambda step, rate: rate,
    "cast": lambda step, rate: lambda: tf.cast(rate, tf.float64),
    "callable_of_a_variable": lambda step, rate: lambda: rate,
    "exponential_decay":
        lambda step, rate: v1.exponential_decay(1.0, step, 1, 0.5),
    "piecewise_constant": lambda step, rate: v1.piecewise_constant(
        step, [0, 1], [1.0, 0.5, 0.25]),
}
CONSTANT = {
    "number": lambda step, rate: 1.0,
    "int": lambda step, rate: 1,
    "numpy": lambda step, rate: np.float64(1),
    "tensor": lambda step, rate: tf.constant(1.0),
    "float64_tensor": lambda step, rate: tf.constant(1.0, tf.float64),
    "callable": lambda step, rate: lambda: 1.0,
    "callable_of_a_tensor": lambda step, rate: lambda: tf.constant(1.0),
}


def minimize(mode, fused, make_rate):
  """Trains a variable from 0 by gradients of -1.

  Returns:
    The variable's values, and its averages of decay 1/2, after each of three
    steps.
  """
  def variable(value, **kwargs):
    return tf1.Variable(value, trainable=False, **kwargs)

  def build():
    v, rate = variable(0.0), variable(1.0)
    step = variable(0, dtype=tf.int64)
    opt = wrapopt.MovingAverageOptimizer(
        v1.GradientDescentOptimizer(make_rate(step, rate)), 0.5, fused=fused)
    assert opt.fused == (fused is None)
    return v, rate, step, opt

  got = []
  if mode in GRAPH_MODES:
    with graph_of(mode):
      v, rate, step, opt = build()
      train_op = opt.minimize(-v, step, [v])
      one_pass = apply_ops([op.type for op in ancestors(train_op)])
      assert bool(one_pass) == opt.fused
      half = rate.assign(rate / 2)
      with session_of() as session:
        for _ in range(3):
          session.run(train_op)
          got.append(session.run([v, opt.average(v)]))
          session.run(half)
  else:
    v, rate, step, opt = build()

    def take():
      # A tf.function must not return what it returns: an operation.
      opt.minimize(lambda: -v, step, [v])

    if mode == "function":
      take = tf.function(take)
    for _ in range(3):
      take()
      got.append([v.numpy(), opt.average(v).numpy()])
      rate.assign(rate / 2)
  return np.transpose(got).tolist()


@both_paths
@every_mode
@pytest.mark.parametrize("rate", CONSTANT)
def test_a_constant_learning_rate(rate, mode, fused):
  # 0 to 1, 2, 3: the average half way behind.
  assert minimize(mode, fused, CONSTANT[rate]) == [
      [1, 2, 3], [0.5, 1.25, 2.125]]


@both_paths
@every_mode
@pytest.mark.parametrize("rate", FOLLOWING)
def test_a_learning_rate_that_changes(rate, mode, fused):
  # 0 to 1, 3/2, 7/4.
  assert minimize(mode, fused, FOLLOWING[rate]) == [
      [1, 1.5, 1.75], [0.5, 1, 1.375]]


# Whatever a parameter is, of those that may be tensors.
FORMS = {
    "tensor": tf.constant,
    "variable": lambda x: tf1.Variable(x, trainable=False),
    "callable": lambda x: lambda: x,
}
PARAMETERS = {
    "Adadelta": lambda form: v1.AdadeltaOptimizer(
        form(200.0), form(0.9), epsilon=form(0.01)),
    # The betas are initial values as well, which cannot be those of variables
    # that are initialized at the same time.
    "Adam": lambda form: v1.AdamOptimizer(
        form(0.5), *map(tf.constant, (0.5, 0.75)), form(0.01)),
    "CenteredRMSProp": lambda form: v1.RMSPropOptimizer(
        form(0.5), form(0.8), form(0.25), form(0.01), centered=True),
    "Momentum": lambda form: v1.MomentumOptimizer(form(0.3), form(0.7)),
    "RMSProp": lambda form: v1.RMSPropOptimizer(
        form(0.5), form(0.8), form(0.25), form(0.01)),
}


@every_mode
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", PARAMETERS)
def test_parameters(inner, form, mode, run):
  name, initial = "dense_float32", cases(inner)
  trace = train(
      mode, lambda step: wrapopt.MovingAverageOptimizer(
          PARAMETERS[inner](FORMS[form]), 0.5),
      {name: initial[name]},
      [{name: step[name]} for step in gradients(initial)])
  assert trace.optimizer.fused
  # As if they were numbers.
  want = [values[list(initial).index(name)]
          for values in run(inner, mode, None).values]
  for [got], expected in zip(trace.values, want, strict=True):
    numerics.assert_same_bits(got, expected)


# Names and files.


@pytest.mark.parametrize("kind", GRAPH_MODES)
@every_inner
def test_a_graph_has_the_same_variables(inner, kind):
  def variables(fused):
    with graph_of(kind):
      a = tf1.get_variable("a", [3, 2])
      with tf1.variable_scope("scope"):
        b = tf1.get_variable("b", [3, 2])
      opt = wrap(inner, fused, [0.5, 0.75])
      opt.apply_gradients([
          (tf.ones([3, 2]), a),
          (tf.IndexedSlices(tf.ones([1, 2]), [1], [3, 2]), b)],
                          tf1.train.get_or_create_global_step())
      collections_ = {
          name: [v.name for v in tf1.get_collection(name)]
          for name in tf1.get_default_graph().get_all_collection_keys()
          if "variables" in name}
      return collections_, opt.get_slot_names(), [
          (v.name, v.dtype, v.shape, v.device, v.trainable)
          for v in tf1.global_variables() + opt.variables()]

  assert variables(None) == variables(False)


@every_inner
def test_eager_names_are_the_same(inner):
  def names(fused):
    v = tf.Variable([1.0], name="v")
    opt = wrap(inner, fused, [0.5, 0.75])
    opt.apply_gradients([(tf.constant([1.0]), v)])
    # Made unique in a process: v/Momentum_1.
    return sorted(re.sub(r"(_\d+)?:0$", "", x.name) for x in opt.variables())

  assert names(None) == names(False)


def go_on(kind, inner, fused, numbers, load=None, save=None):
  """Trains two variables on these gradients.

  Args:
    kind: "ref" or "resource", with a Saver, or "eager", with a Checkpoint.
    inner: A name of INNER.
    fused: As in the constructor.
    numbers: Arrays, one for each step.
    load: Where to begin.
    save: Where to save the end.

  Returns:
    {key: its value after each step} of the whole state, and the global step.
  """
  def build(variable, make_step):
    v, w = variable("v"), variable("w")
    step = make_step()
    opt = wrap(inner, fused, [0.5, 0.75], num_updates=step)

    def take(x):
      return opt.apply_gradients(
          [(x, v), (tf.IndexedSlices(x, [1, 1], [2, 2]), w)], step)

    def state():
      slots = {(slot, x.name): opt.get_slot(x, slot) for x in (v, w)
               for slot in opt.get_slot_names()}
      return {"v": v, "w": w, **slots}
    return v, w, step, opt, take, state

  history = collections.defaultdict(list)
  if kind == "eager":
    v, w, step, opt, take, state = build(
        lambda name: tf.Variable(tf.ones([2, 2]), name=name),
        lambda: tf.Variable(0, dtype=tf.int64))
    checkpoint = tf.train.Checkpoint(v=v, w=w, step=step, opt=opt)
    restored = load and checkpoint.read(load)
    for x in numbers:
      take(tf.constant(x))
      for key, value in state().items():
        history[key].append(value.numpy())
    if load:
      restored.assert_consumed()
    if save:
      checkpoint.write(save)
    return history, step.numpy()
  with graph_of(kind):
    _, _, step, _, take, state = build(
        lambda name: tf1.get_variable(name, initializer=tf.ones([2, 2])),
        tf1.train.get_or_create_global_step)
    feed = tf1.placeholder(tf.float32, [2, 2])
    train_op = take(feed)
    saver = tf1.train.Saver()
    with session_of() as session:
      if load:
        saver.restore(session, load)
      for x in numbers:
        session.run(train_op, {feed: x})
        for key, value in state().items():
          history[key].append(np.array(session.run(value)))
      if save:
        saver.save(session, save)
      return history, session.run(step)


@pytest.mark.parametrize("first", [None, False])
@pytest.mark.parametrize("kind", ["eager", *GRAPH_MODES])
@every_inner
def test_a_checkpoint_of_one_goes_on_in_the_other(
    inner, kind, first, tmp_path):
  numbers = [np.float32([[1, -2], [3, 0.5]]) * (1 + t / 4) for t in range(4)]
  path = str(tmp_path / "model")
  second = False if first is None else None
  begin, _ = go_on(kind, inner, first, numbers[:2], save=path)
  end, step = go_on(kind, inner, second, numbers[2:], load=path)
  want, want_step = go_on(kind, inner, second, numbers)
  assert step == want_step == 4
  assert begin.keys() == end.keys() == want.keys()
  assert_close_histories({key: begin[key] + end[key] for key in want}, want)


HUNDRED_STEPS = {
    "gradient_descent": lambda: v1.GradientDescentOptimizer(0.125),
    "momentum": lambda: v1.MomentumOptimizer(0.125, 0.75),
    "adagrad": lambda: v1.AdagradOptimizer(0.125),
    # Betas of few bits: see conformance_test.
    "adam": lambda: v1.AdamOptimizer(0.125, 0.5, 0.75, epsilon=0.125),
    "adadelta": lambda: v1.AdadeltaOptimizer(2.0, epsilon=0.125),
    "rms_prop": lambda: v1.RMSPropOptimizer(
        0.125, momentum=0.25, epsilon=0.125),
    "ftrl": lambda: v1.FtrlOptimizer(0.125),
}


# Not Ftrl of float16 and bfloat16: TensorFlow rounds each of its roots and
# quotients to these, and the variable is made anew of them in each step.
@pytest.mark.parametrize("inner_name, dtype", [
    (name, dtype) for name in HUNDRED_STEPS
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    if name != "ftrl" or dtype.size >= 4],
                         ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_hundred_steps_are_the_stock_optimizers(inner_name, dtype):
  eps = {tf.float16: 2**-10, tf.bfloat16: 2**-7, tf.float32: 2**-23,
         tf.float64: 2**-52}[dtype]
  rng = np.random.default_rng(0)
  start = rng.uniform(1, 2, 50)
  gradients = rng.uniform(-1, 1, (100, 50))
  variables, updates, states = [], [], []
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    gradient = tf.compat.v1.placeholder(dtype, [50])
    for wrap in (lambda opt: opt, wrapopt.MovingAverageOptimizer):
      v = tf.compat.v1.Variable(tf.cast(start, dtype))
      inner = HUNDRED_STEPS[inner_name]()
      updates.append(wrap(inner).apply_gradients([(gradient, v)]))
      variables.append(v)
      states.append([v] + [inner.get_slot(v, name)
                           for name in inner.get_slot_names()])
    fused = [op.type for op in session.graph.get_operations()
             if op.type.startswith("Wrapopt>Apply")]
    assert len(fused) == 1
    session.run(tf.compat.v1.global_variables_initializer())
    states = [[tf.cast(x, tf.float64) for x in row] for row in states]
    operands = 0
    for g in gradients:
      session.run(updates, {gradient: g.astype(dtype.as_numpy_dtype)})
      stock, ours = map(np.array, session.run(states))
      operands = operands + np.abs(stock) + np.abs(g)
      if isinstance(inner, v1.FtrlOptimizer):
        # Its linear term has sqrt(accum) / learning_rate times the variable.
        operands = operands + np.sqrt(np.abs(stock[1])) / 0.125 * np.abs(
            stock[0])
      assert np.all(np.abs(stock - ours) <= 2 * eps * operands)
    assert np.all(np.abs(stock[0] - start) > 0)
