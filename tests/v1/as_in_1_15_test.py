"""Features that worked with the optimizers of 1.15 without documentation."""

import numpy as np
import pytest
import tensorflow as tf

from processes import run_python
from training import kind  # pylint: disable=unused-import
from training import session_of
import wrapopt
import wrapopt.checkpoints

tf1 = tf.compat.v1
sgd = tf1.train.GradientDescentOptimizer
pytestmark = pytest.mark.usefixtures("kind")


def variable_of(getter):
  with tf1.variable_scope("", custom_getter=getter):
    return tf1.get_variable("v", initializer=0.0)


def averaged(global_step, num_worker=1, interval_steps=1, device="/cpu:0"):
  """A model of one worker: (its training op, its variable, its hook)."""
  getter = wrapopt.ModelAverageCustomGetter(device)
  v = variable_of(getter)
  opt = wrapopt.ModelAverageOptimizer(sgd(1.0), num_worker, True, getter,
                                      interval_steps)
  return opt.minimize(-v, global_step), v, opt.make_session_run_hook()


def elastic(global_step, num_worker=1, interval_steps=1, device="/cpu:0"):
  """The same with elastic averaging, which moves the center last."""
  getter = wrapopt.ElasticAverageCustomGetter(device)
  v = variable_of(getter)
  opt = wrapopt.ElasticAverageOptimizer(
      sgd(1.0), num_worker, getter, interval_steps, moving_rate=0.0, rho=0.0)
  return (opt.minimize(-v, global_step), v, opt.make_session_run_hook(True, 0))


def gated(global_step, **kwargs):
  del kwargs
  v = tf1.get_variable("v", initializer=0.0)
  opt = wrapopt.DropStaleGradientOptimizer(sgd(1.0), 0)
  return opt.minimize(-v, global_step), v, None


def with_averages(global_step, fused=None, **kwargs):
  del kwargs
  v = tf1.get_variable("v", initializer=0.0)
  opt = wrapopt.MovingAverageOptimizer(sgd(1.0), 0.5, num_updates=global_step,
                                       fused=fused)
  return opt.minimize(-v, global_step), v, None


def with_averages_after(global_step, **kwargs):
  return with_averages(global_step, fused=False, **kwargs)


def steps(model, global_step, count=4):
  """The variable and the step after each of some steps."""
  train, v, hook = model
  with tf1.train.MonitoredSession(hooks=[hook] if hook else []) as session:
    seen = []
    for _ in range(count):
      session.run(train)
      seen.append([x.item() for x in session.run([v, global_step])])
  return seen


@pytest.mark.parametrize("make", [averaged, elastic, gated, with_averages,
                                  with_averages_after])
def test_a_step_that_is_found_by_its_name(make):
  """`get_global_step` gives a tensor where the variable is in no collection."""
  tf1.Variable(0, name="global_step", trainable=False, use_resource=False)
  step = tf1.train.get_global_step()
  assert not isinstance(step, tf.Variable)
  assert steps(make(step), step) == [[1, 1], [2, 2], [3, 3], [4, 4]]


def test_gradients_record_a_step_that_is_found_by_its_name():
  step = tf1.get_variable("global_step", initializer=0, trainable=False)
  v = tf1.get_variable("v", initializer=0.0)
  opt = wrapopt.DropStaleGradientOptimizer(sgd(1.0), 0)
  train = opt.apply_gradients(opt.compute_gradients(-v), step)
  assert steps((train, v, None), step) == [[1, 1], [2, 2], [3, 3], [4, 4]]


def test_a_hook_finds_a_step_by_its_name(tmp_path):
  step = tf1.get_variable("global_step", initializer=0, trainable=False)
  v = tf1.get_variable("v", initializer=0.0)
  opt = wrapopt.MovingAverageOptimizer(sgd(1.0), 0.5)
  hook = wrapopt.checkpoints.SnapshotHook(opt, str(tmp_path), 2)
  assert steps((opt.minimize(-v, step), v, hook), step, 2) == [[1, 1], [2, 2]]
  assert list(tmp_path.glob("*.index"))


def test_a_gate_refuses_a_step_that_cannot_count_far():
  step = tf1.get_variable("global_step", initializer=0.0, trainable=False)
  v = tf1.get_variable("v", initializer=0.0)
  opt = wrapopt.DropStaleGradientOptimizer(sgd(1.0), 0)
  for take in (lambda: opt.minimize(-v, step),
               lambda: opt.compute_gradients(-v)):
    with pytest.raises(TypeError, match="int32 or int64, got .*float32.* Make "
                       "one with tf.compat.v1.train.get_or_create_global_step"):
      take()


def test_the_averages_of_1_15():
  v = tf1.get_variable("v", initializer=0.0)
  opt = wrapopt.MovingAverageOptimizer(sgd(1.0), [0.5, 0.9])
  assert opt._ema._decay == 0.5
  assert opt._ema.average(v) is None
  assert opt._ema.average_name(v) == "v/ExponentialMovingAverage"
  train = opt.minimize(-v)
  assert opt._ema.average(v) is opt.average(v, 0.5)
  with session_of() as session:
    session.run(train)
    assert session.run(opt._ema.average(v)) == 0.5


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.uint8])
@pytest.mark.parametrize("make", [averaged, elastic, with_averages,
                                  with_averages_after])
def test_a_step_of_another_dtype(make, dtype):
  step = tf1.Variable(dtype(0), name="step", trainable=False)
  assert steps(make(step), step) == [[1, 1], [2, 2], [3, 3], [4, 4]]


@pytest.mark.parametrize("make", [averaged, elastic])
@pytest.mark.parametrize("count", [
    lambda x: np.array(x), lambda x: np.int64(x)], ids=["array", "int64"])
def test_counts_of_numpy(make, count):
  step = tf1.train.create_global_step()
  assert steps(make(step, count(1), count(2)), step) == [
      [1, 0], [2, 1], [3, 1], [4, 2]]


@pytest.mark.parametrize("make", [averaged, elastic])
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_a_period_that_changes(make, dtype):
  """Every second step at first, and then every third."""
  step = tf1.train.create_global_step()
  period = tf1.get_variable("period", initializer=tf.constant(2, dtype),
                            trainable=False)
  train, v, hook = make(step, interval_steps=period)
  change = tf1.assign(period, tf.constant(3, dtype)).op
  with tf1.train.MonitoredSession(hooks=[hook]) as session:
    seen = []
    for i in range(1, 10):
      if i == 5:
        session.run(change)
      session.run(train)
      seen.append(session.run(step).item())
    assert session.run(v) == 9
  assert seen == [0, 1, 1, 2, 2, 3, 3, 3, 4]


@pytest.mark.parametrize("make", [averaged, elastic])
def test_a_period_of_zero(make):
  step = tf1.train.create_global_step()
  train, _, hook = make(step, interval_steps=tf.constant(0))
  with tf1.train.MonitoredSession(hooks=[hook]) as session:
    with pytest.raises(tf.errors.InvalidArgumentError, match="by zero"):
      session.run(train)


@pytest.mark.parametrize("make", [averaged, elastic])
@pytest.mark.parametrize("device", ["", None])
def test_one_worker_without_a_device(make, device):
  step = tf1.train.create_global_step()
  assert steps(make(step, device=device), step) == [
      [1, 1], [2, 2], [3, 3], [4, 4]]


IN_ANOTHER_PROGRAM = """
import sys
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
graph, model = sys.argv[1:]
saver = tf.train.import_meta_graph(graph)
with tf.Session() as session:
  saver.restore(session, model)
  print(session.run("y:0", {"x:0": [2.0]}))
assert "wrapopt" not in sys.modules
"""


def test_a_meta_graph_that_needs_no_wrapopt(kind, tmp_path):
  x = tf1.placeholder(tf.float32, [1], name="x")
  w = tf1.get_variable("w", initializer=[1.0])
  y = tf.multiply(x, w, name="y")
  graph, model = str(tmp_path / "inference.meta"), str(tmp_path / "model")
  tf1.train.export_meta_graph(graph, saver_def=tf1.train.Saver().as_saver_def())
  opt = wrapopt.MovingAverageOptimizer(sgd(1.0), 0.5)
  train = opt.minimize(y)
  saver = opt.swapping_saver()
  with session_of() as session:
    session.run(train, {x: [1.0]})
    saver.save(session, model)
  # 1 and 0 give 0.5.
  process = run_python("-c", IN_ANOTHER_PROGRAM, graph, model)
  assert process.stdout == "[1.]\n", process.stderr
  if kind == "resource":  # That of the training does.
    process = run_python("-c", IN_ANOTHER_PROGRAM, f"{model}.meta", model)
    assert "Op type not registered 'Wrapopt>" in process.stderr
