"""One pass: what it takes, and that its names are those of two.

conformance_test.py has the numbers and the files.
"""

import collections
import re
import threading

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from threads import in_threads
from training import GRAPH_MODES
from training import MODES
from training import ancestors
from training import apply_ops
from training import assert_same_bits
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import ops_of_type
from training import session_of
from training import sgd
from training import train
from training import type_of

tf1 = tf.compat.v1
v1 = tf.compat.v1.train


# Each rule that has an op.
RULES = {
    "Adadelta": lambda **k: v1.AdadeltaOptimizer(200.0, epsilon=0.01, **k),
    "Adagrad": lambda **k: v1.AdagradOptimizer(0.5, **k),
    "Adam": lambda **k: v1.AdamOptimizer(0.5, 0.5, 0.75, 0.01, **k),
    "CenteredRMSProp": lambda **k: v1.RMSPropOptimizer(0.5, centered=True, **k),
    "Ftrl": lambda **k: v1.FtrlOptimizer(0.5, **k),
    "GradientDescent": lambda **k: v1.GradientDescentOptimizer(0.5, **k),
    "Momentum": lambda **k: v1.MomentumOptimizer(0.5, 0.5, **k),
    "RMSProp": lambda **k: v1.RMSPropOptimizer(0.5, **k),
}
every_rule = pytest.mark.parametrize("rule", RULES)
every_mode = pytest.mark.parametrize("mode", MODES)
both_paths = pytest.mark.parametrize("fused", [None, False])


def test_a_trajectory():
  # 1 - 0.5 * 1 = 0.5; the average of 1 and 0.5 is 0.75.
  v = tf.Variable([1.0])
  opt = wrapopt.MovingAverageOptimizer(sgd(0.5), 0.5, fused=True)
  opt.apply_gradients([(tf.constant([1.0]), v)])
  assert v.numpy() == [0.5] and opt.average(v).numpy() == [0.75]


# What is left to the inner optimizer.


@every_rule
def test_a_subclass_is_not_taken_apart(rule):
  made = RULES[rule]()
  made.__class__ = type("Mine", (type(made),), {})
  assert not wrapopt.MovingAverageOptimizer(made).fused
  with pytest.raises(ValueError, match=(
      "^`fused` must not be True: Mine with these arguments has no op that "
      "takes its step and updates the averages in one pass"
      r"\. Leave `fused` at None\.$")):
    wrapopt.MovingAverageOptimizer(made, fused=True)


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
    inner = sgd(0.25)
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


# Devices.


@pytest.mark.by_day(0)
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
    with session_of(device_count={"CPU": 2}) as session:
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


# Locks.

@pytest.mark.parametrize("use_locking", [False, True])
@every_rule
def test_use_locking_reaches_the_op(rule, kind, use_locking):
  v = tf1.get_variable("v", [2])
  wrapopt.MovingAverageOptimizer(
      RULES[rule](use_locking=use_locking)).apply_gradients(
          [(tf.ones([2]), v)])
  [op] = ops_of_type(f"Wrapopt>Apply{rule}" + "Ref" * (kind == "ref"))
  assert op.get_attr("use_locking") == use_locking


def test_locked_steps_of_many_threads_add_up(kind):
  # Each step is atomic, averages included: in whatever order they come, what
  # they leave is what as many steps one after the other leave.
  threads, times, size = 8, 50, 100_000
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

    in_threads(*[work] * threads)
    assert_same_bits(session.run(state), want)
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
    opt = wrapopt.MovingAverageOptimizer(sgd(make_rate(step, rate)), 0.5,
                                         fused=fused)
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
def test_parameters(inner, form, mode):
  start = np.float32([[1, -0.5], [2, 3]])
  steps = [{"v": start * (t + 1)} for t in range(3)]
  made = [train(mode, lambda step, f=f: wrapopt.MovingAverageOptimizer(
      PARAMETERS[inner](f), 0.5), {"v": start}, steps)
          for f in (FORMS[form], lambda x: x)]
  assert made[0].optimizer.fused
  for got, want in zip(*(trace.values for trace in made), strict=True):
    assert_same_bits(got, want)


# Names. So a file of one is one of the other.


@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", GRAPH_MODES)
@every_rule
def test_a_graph_has_the_same_variables(rule, kind):
  def variables(fused):
    with graph_of(kind):
      a = tf1.get_variable("a", [3, 2])
      with tf1.variable_scope("scope"):
        b = tf1.get_variable("b", [3, 2])
      opt = wrapopt.MovingAverageOptimizer(
          RULES[rule](), [0.5, 0.75], fused=fused)
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


@every_rule
def test_eager_names_are_the_same(rule):
  def names(fused):
    v = tf.Variable([1.0], name="v")
    opt = wrapopt.MovingAverageOptimizer(
        RULES[rule](), [0.5, 0.75], fused=fused)
    opt.apply_gradients([(tf.constant([1.0]), v)])
    # Made unique in a process: v/Momentum_1.
    return sorted(re.sub(r"(_\d+)?:0$", "", x.name) for x in opt.variables())

  assert names(None) == names(False)
