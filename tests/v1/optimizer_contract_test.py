"""The contract of `tf.compat.v1.train.Optimizer`, also for wrappers.

Each test also runs the bare optimizer, so that the expectations are
TensorFlow's.
"""

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import GRAPH_MODES
from training import ancestors
from training import entered
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import ops_of_type
from training import recorded
from training import sgd
from training import type_of

v1 = tf.compat.v1
DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
DECAY = 0.75

sharded = wrapopt.CrossShardOptimizer


def moving(opt, fused=None):
  return wrapopt.MovingAverageOptimizer(opt, DECAY, fused=fused)


def gated(opt):
  # A step of its own, for tests that give none.
  return wrapopt.DropStaleGradientOptimizer(opt, 0, global_step=step_variable())


OPTIMIZERS = {
    "bare": sgd,
    "CrossShard": lambda rate: sharded(sgd(rate)),
    "CrossShard(MovingAverage)": lambda rate: sharded(moving(sgd(rate))),
    "MovingAverage(CrossShard)": lambda rate: moving(sharded(sgd(rate))),
    "DropStaleGradient": lambda rate: gated(sgd(rate)),
    "DropStaleGradient(CrossShard)": lambda rate: gated(sharded(sgd(rate))),
    "DropStaleGradient(MovingAverage)": lambda rate: gated(moving(sgd(rate))),
    "MovingAverage(DropStaleGradient)": lambda rate: moving(gated(sgd(rate))),
    # Step and averages in one pass, and in two.
    "MovingAverage": lambda rate: moving(sgd(rate)),
    "MovingAverage, not fused": lambda rate: moving(sgd(rate), False),
}


@pytest.fixture(params=OPTIMIZERS)
def name(request):
  return request.param


@pytest.fixture
def make(name):
  """A function of the learning rate that makes the optimizer under test."""
  return OPTIMIZERS[name]


@pytest.fixture(params=("eager", *GRAPH_MODES))
def mode(request):
  with entered(request.param):
    yield request.param


class Runner:
  """Runs what a test makes: now in eager mode, else in a session."""

  def __init__(self):
    self._session = None

  def __call__(self, x):
    if tf.executing_eagerly():
      return tf.nest.map_structure(
          lambda t: None if t is None else np.asarray(t), x)
    if self._session is None:
      self._session = v1.Session()
      # After minimize(): there were no averages before.
      self._session.run(v1.global_variables_initializer())
      assert not self._session.run(v1.report_uninitialized_variables()).size
    return self._session.run(x)

  def close(self):
    if self._session is not None:
      self._session.close()


@pytest.fixture
def run():
  runner = Runner()
  yield runner
  runner.close()


def variables(dtype=tf.float32, **kwargs):
  # Not tf.Variable: that is a resource variable in any graph.
  return (v1.Variable([1.0, 2.0], dtype=dtype, name="a", **kwargs),
          v1.Variable([3.0, 4.0], dtype=dtype, name="b", **kwargs))


def step_variable():
  return v1.Variable(0, dtype=tf.int64, trainable=False, name="global_step")


def loss_of(x, y):
  """5 x + 3 y, whose gradients are 5 and 3; called in eager mode."""
  def loss():
    return 5 * x + 3 * y
  return loss if tf.executing_eagerly() else loss()


def check(run, opt, pairs):
  """Variables hold what they should, and averages what follows from that."""
  for variable, (before, after) in pairs:
    np.testing.assert_array_equal(np.float64(run(variable)), after)
    for o in opt, getattr(opt, "_optimizer", None):
      if not isinstance(o, wrapopt.MovingAverageOptimizer):
        continue
      # All numbers here are exact in all dtypes.
      np.testing.assert_array_equal(
          np.float64(run(o.average(variable))),
          np.add(np.multiply(DECAY, before), np.multiply(1 - DECAY, after)))


@pytest.mark.by_day(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_minimize(make, mode, run, dtype):
  x, y = variables(dtype)
  step = step_variable()
  opt = make(4.0)
  train = opt.minimize(loss_of(x, y), step, [x, y])
  assert mode == "eager" or isinstance(train, (tf.Operation, tf.Tensor))
  run(train)
  check(run, opt, [(x, ([1, 2], [-19, -18])), (y, ([3, 4], [-9, -8]))])
  assert run(step) == 1


@pytest.mark.by_day(2)
@pytest.mark.parametrize("is_given", [True, False])
def test_minimize_takes_a_callable_in_a_graph(name, make, kind, run, is_given):
  if name == "bare" and kind == "ref":
    pytest.skip("TensorFlow looks for its variables in a tape.")
  x, y = variables()
  opt = make(4.0)
  run(opt.minimize(lambda: 5 * x + 3 * y,
                   var_list=[x, y] if is_given else None))
  check(run, opt, [(x, ([1, 2], [-19, -18])), (y, ([3, 4], [-9, -8]))])


def test_minimize_takes_all_trainable_variables_by_default(make, mode, run):
  x, y = variables()
  z = v1.Variable([7.0], trainable=False, name="c")
  opt = make(4.0)
  run(opt.minimize(loss_of(x, y) if mode != "eager"
                   else lambda: 5 * x + 3 * y + 2 * z))
  check(run, opt, [(x, ([1, 2], [-19, -18])), (y, ([3, 4], [-9, -8]))])
  assert run(z) == 7


@pytest.mark.by_day(2)
@pytest.mark.parametrize("method, sums", [
    (tf.AggregationMethod.ADD_N, 1),
    (tf.AggregationMethod.EXPERIMENTAL_TREE, 2),
    (tf.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N, 2)])
def test_aggregation_method(make, kind, run, method, sums):
  x = v1.Variable([1.0, 2.0], name="a")
  opt = make(4.0)
  train = opt.minimize(5 * x + 3 * x + 2 * x, aggregation_method=method)
  # Three terms at once, or one after the other.
  assert len(ops_of_type("AddN")) == sums
  run(train)
  check(run, opt, [(x, ([1, 2], [-39, -38]))])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_grad_loss(make, kind, run, dtype):
  x, y = variables(dtype)
  opt = make(4.0)
  run(opt.minimize(loss_of(x, y), var_list=[x, y],
                   grad_loss=tf.constant([2.0, -2.0], dtype)))
  check(run, opt, [(x, ([1, 2], [-39, 42])), (y, ([3, 4], [-21, 28]))])


def waits(pairs):
  """Whether the first gradient is there only after the second is computed."""
  (x, _), (y, _) = pairs
  y = y.op
  while y.type == "Identity":  # What gating adds.
    y = y.inputs[0].op
  return y in ancestors(x.op)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("gate, product, sum_", [
    (v1.train.Optimizer.GATE_NONE, False, False),
    (v1.train.Optimizer.GATE_OP, True, False),
    (v1.train.Optimizer.GATE_GRAPH, True, True)])
def test_gate_gradients(make, kind, run, gate, product, sum_):
  x, y = variables()
  opt = make(1.0)
  assert waits(opt.compute_gradients(
      x * y, [x, y], gate_gradients=gate)) == product
  assert waits(opt.compute_gradients(
      tf.square(x) + tf.square(y), [x, y], gate_gradients=gate)) == sum_
  run(opt.minimize(tf.square(x) + tf.square(y), var_list=[x, y],
                   gate_gradients=gate))
  check(run, opt, [(x, ([1, 2], [-1, -2])), (y, ([3, 4], [-3, -4]))])


def test_gate_gradients_must_be_one_of_three(make, kind):
  x, y = variables()
  with pytest.raises(ValueError, match="gate_gradients must be one of"):
    make(1.0).minimize(loss_of(x, y), gate_gradients=7)


@pytest.mark.parametrize("colocate", [False, True])
def test_colocate_gradients_with_ops(make, kind, colocate):
  x, _ = variables()
  with tf.device("/cpu:7"):
    square = tf.square(x, name="square")
  opt = make(1.0)
  [(gradient, _)] = opt.compute_gradients(
      square, [x], colocate_gradients_with_ops=colocate)
  assert (b"loc:@square" in gradient.op.colocation_groups()) == colocate


def test_no_variables(make, mode):
  x, y = variables(trainable=False)
  with pytest.raises(ValueError, match="No.*variable"):
    make(1.0).minimize(loss_of(x, y))
  assert not v1.get_collection(v1.GraphKeys.TRAIN_OP)


@pytest.mark.parametrize("loss_of_x, chosen", [
    (lambda x: 5 * x, slice(1, 2)), (lambda x: tf.constant(5.0), slice(2))],
                         ids=["of_one", "of_any"])
def test_no_gradients_in_minimize(make, mode, loss_of_x, chosen):
  both = variables()
  loss = lambda: loss_of_x(both[0])
  with pytest.raises(ValueError,
                     match="No gradients provided for any variable"):
    make(1.0).minimize(loss if mode == "eager" else loss(),
                       var_list=list(both[chosen]))


def test_no_gradients_for_any_variable_in_apply_gradients(make, mode):
  x, y = variables()
  opt = make(1.0)
  with pytest.raises(ValueError,
                     match="No gradients provided for any variable"):
    opt.apply_gradients([(None, x), (None, y)])
  # Nothing was made on the way.
  assert opt.variables() == []


def test_no_variables_in_apply_gradients(make, mode):
  with pytest.raises(ValueError, match="No variables provided"):
    make(1.0).apply_gradients([])


def test_gradients_as_variables(make, mode, run):
  x, y = variables()
  opt = make(4.0)
  gradients = [v1.Variable(tf.zeros([2]), trainable=False) for _ in range(2)]
  converts = [variable.assign(gradient) for variable, (gradient, _) in zip(
      gradients, opt.compute_gradients(loss_of(x, y), [x, y]))]
  train = opt.apply_gradients(zip(gradients, [x, y]))
  run(converts)
  run(train)
  check(run, opt, [(x, ([1, 2], [-19, -18])), (y, ([3, 4], [-9, -8]))])


def test_compute_gradients_with_tensors(make, mode, run):
  x = tf.constant(1.0)
  opt = make(1.0)
  pairs = opt.compute_gradients(lambda: x * x, [x])
  assert len(pairs) == 1 and pairs[0][1] is x
  assert run(pairs[0][0]) == 2
  with pytest.raises(NotImplementedError, match="update a Tensor"):
    opt.apply_gradients(pairs)


def test_a_loss_must_be_callable_in_eager_mode(make):
  x, _ = variables()
  with pytest.raises(RuntimeError, match="should be a function when eager"):
    make(1.0).compute_gradients(5 * x, [x])


def test_what_is_no_gradient(make, mode):
  x, _ = variables()
  with pytest.raises((TypeError, ValueError),
                     match="Gradient must be|unsupported type"):
    make(1.0).apply_gradients([(object(), x)])


@pytest.mark.by_day(3)
def test_the_train_op_is_the_one_in_the_collection(name, make, kind):
  x, y = variables()
  train = make(1.0).minimize(loss_of(x, y), step_variable(), [x, y])
  # One op, that runs the whole step.
  assert v1.get_collection(
      v1.GraphKeys.TRAIN_OP) == [getattr(train, "op", train)]
  ref = "Ref" if kind == "ref" else ""
  native = {type_of(op) for op in ancestors(train)
            if op.type.startswith("Wrapopt>")} - {"Wrapopt>BundleByName"}
  step = {f"Wrapopt>ApplyGradientDescent{ref}"}
  gate = {f"Wrapopt>Staleness{part}{ref}"
          for part in ("Record", "Gate", "Complete")}
  assert native == (
      set() if name in ("bare", "CrossShard") else
      {f"Wrapopt>{op}{ref}" for op in ("EmaUpdate", "CheckInitialized")}
      if "not fused" in name else step | (gate if "Drop" in name else set()))


@pytest.mark.by_day(2)
def test_constraints(make, kind, run):
  x = v1.Variable([1.0, 2.0], name="a",
                            constraint=lambda v: tf.clip_by_value(v, -0.5, 0.))
  y = v1.Variable([3.0, 4.0], name="b",
                            constraint=lambda v: tf.clip_by_value(v, 0., 1.))
  opt = make(4.0)
  run(opt.minimize(loss_of(x, y), step_variable(), [x, y]))
  check(run, opt, [(x, ([1, 2], [-0.5, -0.5])), (y, ([3, 4], [0, 0]))])


def test_skip_gradients_aggregation(make, mode, run):
  x, y = variables()
  opt = make(4.0)
  with recorded(opt, None):
    train = opt.apply_gradients(
        [(tf.constant([5.0, 5.0]), x), (None, y)],
        skip_gradients_aggregation=True)
  run(train)
  check(run, opt, [(x, ([1, 2], [-19, -18]))])


def test_an_argument_that_there_is_not(make, mode):
  x, _ = variables()
  opt = make(1.0)
  with recorded(opt, None), pytest.raises(
      TypeError, match="unexpected keyword argument 'typo'"):
    opt.apply_gradients([(tf.constant([5.0, 5.0]), x)], typo=True)


@pytest.mark.by_day(2)
def test_what_a_ref_op_returns_is_a_gradient(make, run):
  with graph_of("ref"):
    x, y = variables()
    opt = make(4.0)
    with recorded(opt, None):
      train = opt.apply_gradients([(v1.assign_add(y, [2.0, 1.0]), x)])
    run(train)
    check(run, opt, [(x, ([1, 2], [-19, -18]))])


def test_rows_that_are_lists(make, mode, run):
  x, _ = variables()
  opt = make(4.0)
  with recorded(opt, None):
    train = opt.apply_gradients(
        [(tf.IndexedSlices(tf.constant([5.0, 3.0]), [1, 1], [2]), x)])
  run(train)
  check(run, opt, [(x, ([1, 2], [1, -30]))])


@pytest.mark.by_day(3)
def test_the_name_of_a_step(make, kind):
  x, y = variables()
  make(1.0).minimize(loss_of(x, y), name="my_step")
  assert [op for op in v1.get_default_graph().get_operations()
          if op.name.startswith("my_step")]


def test_a_name_must_not_be_empty():
  with pytest.raises(ValueError, match="Must specify the optimizer name"):
    wrapopt.MovingAverageOptimizer(sgd(), name="")
  assert moving(sgd()).get_name() == "MovingAverageOptimizer"
  assert wrapopt.MovingAverageOptimizer(sgd(), name="n").get_name() == "n"
