"""wrapopt.ScheduleFreeOptimizer: numbers, modes, swaps and checkpoints."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

import numerics
import schedule_free_model
import wrapopt
from training import type_of
from wrapopt import checkpoints

# For MirroredStrategy: before anything runs.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2)

tf1 = tf.compat.v1
train = tf1.train

MODES = ("eager", "function", "jit", "resource", "ref")
MODE = pytest.mark.parametrize("mode", MODES)
START = np.linspace(-2, 2, 12).reshape(4, 3)

INNER = {
    "SGD": (train.GradientDescentOptimizer, {}, {}),
    "Adam": (train.AdamOptimizer, {"beta2": 0.99}, {
        "beta2": 0.99, "epsilon": 1e-8}),
    "RMSprop": (train.RMSPropOptimizer, {}, {"epsilon": 1e-10, "start": 1.0}),
    "Adagrad": (train.AdagradOptimizer, {}, {"start": 0.1, "epsilon": 0.0}),
}


class Run:
  """An optimizer that trains one variable in a mode."""

  def __init__(self, mode, make, dtype=np.float64, sparse=False, rate=0.25):
    self.mode, self.is_graph = mode, mode in ("resource", "ref")
    self.stack = contextlib.ExitStack()
    if self.is_graph:
      self.stack.enter_context(tf.Graph().as_default())
      self.v = tf1.get_variable("v", initializer=START.astype(dtype),
                                use_resource=mode == "resource")
      self.rate = tf1.placeholder_with_default(rate, [])
      self.grad = tf1.placeholder(dtype, START.shape)
      self.count = train.get_or_create_global_step()
    else:
      self.v = tf.Variable(START.astype(dtype))
      self.rate = tf.Variable(rate)
      self.count = tf.Variable(0, dtype=tf.int64)
    # A tensor in a graph; else read in each step.
    rate = self.rate if self.is_graph else self.rate.read_value
    self.opt = make(rate)
    self.sparse = sparse
    if self.is_graph:
      self.op = self.apply(self.grad)
      self.session = self.stack.enter_context(tf1.Session())
      self.session.run(tf1.global_variables_initializer())
    elif mode != "eager":
      self.function = tf.function(
          lambda grad: self.apply(grad) and None, jit_compile=mode == "jit")

  def apply(self, grad):
    if self.sparse:  # Each row in two parts.
      rows = list(range(4)) * 2
      grad = tf.IndexedSlices(tf.concat([grad, grad], 0) / 2,
                              tf.constant(rows), tf.constant([4, 3]))
    return self.opt.apply_gradients([(grad, self.v)], self.count)

  def step(self, grad, rate):
    if self.is_graph:
      self.session.run(self.op, {self.grad: grad, self.rate: rate})
      return
    self.rate.assign(rate)
    grad = tf.constant(grad, self.v.dtype)
    (self.apply if self.mode == "eager" else self.function)(grad)

  def read(self, *tensors):
    if self.is_graph:
      return self.session.run(list(tensors))
    return [tf.convert_to_tensor(x).numpy() for x in tensors]

  def points(self):
    return self.read(self.opt.average(self.v), self.v, self.opt.z(self.v))

  def in_place(self):
    return self.opt.averaged_weights(*([self.session] if self.is_graph else []))

  def __enter__(self):
    return self

  def __exit__(self, *args):
    self.stack.close()


def free(inner="SGD", **schedule):
  cls, arguments, _ = INNER[inner]
  return lambda rate: wrapopt.ScheduleFreeOptimizer(
      cls(rate, **arguments), **schedule)


@pytest.mark.parametrize("inner, mode, sparse", [
    *((inner, mode, False) for inner in INNER for mode in MODES),
    *(("Adam", mode, True) for mode in MODES)])
def test_trajectories(inner, mode, sparse):
  """200 steps, against the paper's formulas in float64."""
  schedule = {"warmup_steps": 20, "r": 0.5, "weight_decay_at_y": 0.0625}
  if inner == "Adam":
    schedule["momentum"] = 0.9  # Taken over.
  elif inner == "SGD":
    schedule["momentum"] = 0.75
  model = schedule_free_model.Model(
      START, schedule_free_model.Inner(inner, **INNER[inner][2]), **schedule)
  rng = np.random.default_rng(1)
  with Run(mode, free(inner, **schedule), sparse=sparse) as run:
    y = START
    for t in range(200):
      rate = 0.25 if t < 100 else 0.125
      grad = 0.5 * y + rng.normal(size=START.shape)
      model.step(grad, rate)
      run.step(grad, rate)
      y = model.y
      if t in (0, 1, 50, 199):
        # The betas of Adam and RMSProp are float32.
        for got, want in zip(run.points(), (model.x, model.y, model.z)):
          np.testing.assert_allclose(got, want, 1e-4, 1e-4)
    assert run.read(run.count) == [200]
  assert np.abs(model.z - model.x).max() > 1e-3


@pytest.mark.parametrize("mode", ["function", "resource", "ref"])
def test_one_op_and_no_copy_more(mode):
  with Run(mode, free("Adam")) as run:
    if mode == "function":
      grad = tf.zeros(START.shape, tf.float64)
      graph = run.function.get_concrete_function(grad).graph
    else:
      graph = tf1.get_default_graph()
    types = [type_of(op) for op in graph.get_operations()
             if op.type.startswith("Wrapopt>")]
    want = "Wrapopt>ApplyScheduleFreeAdam" + "Ref" * (mode == "ref")
    # The others put averages in place.
    assert [t for t in types if "Apply" in t] == [want]
    names = sorted(v.name.split(":")[0] for v in run.opt.variables())
    assert run.opt.get_slot(run.v, "m") is None
    large = [v for v in run.opt.variables() if v.shape.rank == 2]
    assert len(large) == 2
    if run.is_graph:
      # As in plain Adam, where v/Adam is the first moment.
      assert names == ["beta1_power", "beta2_power", "schedule_free",
                       "v/Adam_1", "v/ScheduleFree"]


@MODE
def test_in_place(mode):
  with Run(mode, free("Adam"), np.float32) as run:
    for _ in range(3):
      run.step(np.ones((4, 3), np.float32), 0.25)
    x, y, z = run.points()
    with run.in_place():
      numerics.assert_same_bits(run.read(run.v)[0], x)
      with pytest.raises((RuntimeError, tf.errors.FailedPreconditionError)):
        run.step(np.ones((4, 3), np.float32), 0.25)
      with pytest.raises(RuntimeError, match="inside averaged_weights"):
        with run.in_place():
          pass
    for got, want in zip(run.points(), (x, y, z)):
      numerics.assert_same_bits(got, want)
    assert run.read(run.count) == [3]
    run.step(np.ones((4, 3), np.float32), 0.25)
    assert (run.points()[0] != x).any() and run.read(run.count) == [4]


@pytest.mark.parametrize("mode", ["eager", "resource", "ref"])
def test_swapping_saver(mode, tmp_path):
  """x is in the file by the variable's name; the state comes back."""
  with Run(mode, free("Adam", r=1.0), np.float32) as run:
    for _ in range(3):
      run.step(np.ones((4, 3), np.float32), 0.25)
    if not run.is_graph:
      saver = run.opt.swapping_saver({
          "v": run.v, "v/ScheduleFree": run.opt.z(run.v),
          "schedule_free": next(x for x in run.opt.variables()
                                if x.shape == (4,))})
    else:
      saver = run.opt.swapping_saver()
    session = run.session if run.is_graph else None
    points = run.points()
    path = saver.save(session, str(tmp_path / "c"))
    file = tf.train.load_checkpoint(path)
    for name, want in zip(("v", "v/ScheduleFree/y", "v/ScheduleFree"), points):
      numerics.assert_same_bits(file.get_tensor(name), want)
    run.step(np.ones((4, 3), np.float32), 0.25)
    following = run.points()
    saver.restore(session, path)
    for got, want in zip(run.points(), points):
      numerics.assert_same_bits(got, want)
    run.step(np.ones((4, 3), np.float32), 0.25)
    if run.is_graph:
      # A plain Saver leaves x in the variable, and the training goes on.
      tf1.train.Saver().restore(session, path)
      for got, want in zip(run.points(), (points[0], points[0], points[2])):
        numerics.assert_same_bits(got, want)
      run.step(np.ones((4, 3), np.float32), 0.25)
      for got, want in zip(run.points(), following):
        np.testing.assert_allclose(got, want, 1e-5)
      with pytest.raises(ValueError, match="schedule_free is not part of var"):
        run.opt.swapping_saver([run.v, run.opt.z(run.v)])


@pytest.mark.parametrize("mode", ["resource", "ref"])
def test_snapshots_hold_x(mode, tmp_path):
  with Run(mode, free("Adam"), np.float32) as run:
    hook = checkpoints.SnapshotHook(run.opt, str(tmp_path), 2)
    with train.MonitoredSession(hooks=[hook]) as session:
      for _ in range(2):
        session.run(run.op, {run.grad: np.ones((4, 3)), run.rate: 0.25})
      x = session.run(run.opt.average(run.v))
    path = str(tmp_path / "snapshot-2-average")
    numerics.assert_same_bits(tf.train.load_variable(path, "v"), x)


def test_tf_checkpoint(tmp_path):
  runs = [Run("eager", free("Adam"), np.float32) for _ in range(2)]
  for _ in range(3):
    runs[0].step(np.ones((4, 3), np.float32), 0.25)
  objects = [tf.train.Checkpoint(v=run.v, opt=run.opt) for run in runs]
  status = objects[1].restore(objects[0].save(str(tmp_path / "c")))
  for run in runs:
    run.step(np.ones((4, 3), np.float32), 0.25)
  status.assert_consumed()  # Now that Adam has made its powers.
  for got, want in zip(runs[1].points(), runs[0].points()):
    numerics.assert_same_bits(got, want)


@pytest.mark.parametrize("mode", ["eager", "resource"])
def test_seed_averages(mode):
  with Run(mode, free(), np.float32) as run:
    for _ in range(3):
      run.step(np.ones((4, 3), np.float32), 0.25)
    _, y, _ = run.points()
    run.opt.seed_averages(*([run.session] if run.is_graph else []))
    for got in run.points():
      numerics.assert_same_bits(got, y)
    run.step(np.ones((4, 3), np.float32), 0.25)  # Again the first.
    np.testing.assert_array_equal(run.points(), [y - 0.25] * 3)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("mode", ["eager", "resource"])
def test_with_cross_shard(mode, outside):
  def make(rate):
    inner = train.GradientDescentOptimizer(rate)
    if outside:
      return wrapopt.ScheduleFreeOptimizer(wrapopt.CrossShardOptimizer(inner))
    opt = wrapopt.CrossShardOptimizer(wrapopt.ScheduleFreeOptimizer(inner))
    opt.z, opt.average = opt._optimizer.z, opt._optimizer.average
    return opt

  alone = Run("eager", free())
  for _ in range(3):
    alone.step(np.ones((4, 3)), 0.25)
  wanted = alone.points()
  with Run(mode, make) as run:
    for _ in range(3):
      run.step(np.ones((4, 3)), 0.25)
    for got, want in zip(run.points(), wanted):
      numerics.assert_same_bits(got, want)


@MODE
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision(mode, dtype):
  dtype = tf.as_dtype(dtype).as_numpy_dtype
  model = schedule_free_model.Model(START, schedule_free_model.Inner("SGD"))
  with Run(mode, free(), dtype) as run:
    for _ in range(3):
      run.step(np.ones((4, 3), dtype), 0.25)
      model.step(np.ones((4, 3)), 0.25)
    for got, want in zip(run.points(), (model.x, model.y, model.z)):
      assert got.dtype == dtype
      np.testing.assert_allclose(got.astype(np.float64), want, 0.02, 0.02)


def sgd():
  return train.GradientDescentOptimizer(1.0)


@pytest.mark.parametrize("make, error, message", [
    (lambda: wrapopt.ScheduleFreeOptimizer(train.MomentumOptimizer(1.0, 0.9)),
     ValueError, "must be exactly a .* without momentum, got MomentumOpt"),
    (lambda: wrapopt.ScheduleFreeOptimizer(train.FtrlOptimizer(1.0)),
     ValueError, "got FtrlOptimizer"),
    (lambda: wrapopt.ScheduleFreeOptimizer(
        wrapopt.LazyAdamOptimizer(1.0)), ValueError, "got LazyAdamOptimizer"),
    (lambda: wrapopt.ScheduleFreeOptimizer(train.AdamOptimizer(beta1=0.5)),
     ValueError, "twice, got AdamOptimizer with beta1=0.5 and a .* with "
     "momentum=0.9. Pass beta1=0.9 or 0 to AdamOptimizer"),
    (lambda: wrapopt.ScheduleFreeOptimizer(
        train.RMSPropOptimizer(1.0, momentum=0.5)), ValueError,
     "momentum=0.5 .* Pass momentum=0 to RMSPropOptimizer"),
    (lambda: wrapopt.ScheduleFreeOptimizer(
        train.RMSPropOptimizer(1.0, centered=True)), ValueError, "centered"),
    (lambda: wrapopt.ScheduleFreeOptimizer(sgd(), 0.0), ValueError,
     "`momentum` must be finite and greater than 0"),
    (lambda: wrapopt.ScheduleFreeOptimizer(sgd(), warmup_steps=-1),
     ValueError, "`warmup_steps` must be at least 0"),
    (lambda: wrapopt.ScheduleFreeOptimizer("adam"), TypeError,
     "`opt` must be a tf.compat.v1.train.Optimizer"),
])
def test_refused(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_refused_in_a_step():
  opt = wrapopt.ScheduleFreeOptimizer(sgd())
  v = tf.Variable([1.0])
  with pytest.raises(ValueError, match="each variable once"):
    opt.apply_gradients([(tf.ones(1), v)] * 2)
  with pytest.raises(ValueError, match="No gradients provided"):
    opt.apply_gradients([(None, v)])
  w = tf.Variable([1.0], constraint=tf.abs)
  with pytest.raises(ValueError, match="must have no constraint"):
    opt.apply_gradients([(tf.ones(1), w)])
  with pytest.raises(TypeError, match="must be of dtype"):
    opt.apply_gradients([(tf.ones(1, tf.int32), tf.Variable([1]))])
  for x in (v, w):
    np.testing.assert_array_equal(x, [1.0])
  with pytest.raises(RuntimeError, match="before averaged_weights"):
    with opt.averaged_weights():
      pass


# Strategies.


@functools.cache
def two_replicas():
  return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("inner", ["SGD", "Adam", "RMSprop", "Adagrad"])
def test_in_replicas(inner, function):
  """The sum of their gradients takes the step of one process."""
  schedule = {"warmup_steps": 2, "weight_decay_at_y": 0.125}
  cls, arguments, _ = INNER[inner]
  make = lambda: wrapopt.ScheduleFreeOptimizer(cls(0.25, **arguments),
                                               **schedule)
  strategy = two_replicas()
  with strategy.scope():
    v = tf.Variable(START.astype(np.float32))
    opt = make()
  def step(g):
    strategy.run(lambda: opt.apply_gradients([(g / 2, v)]) and None)
  step = tf.function(step) if function else step
  w = tf.Variable(START.astype(np.float32))
  alone = make()
  for t in range(4):
    g = tf.fill([4, 3], float(t) - 1.5)
    step(g)
    alone.apply_gradients([(g, w)])
  for got, want in ((v, w), (opt.z(v), alone.z(w))):
    for local in strategy.experimental_local_results(got):
      np.testing.assert_allclose(local, want, 1e-5, 1e-5)
  x = alone.average(w)
  np.testing.assert_allclose(opt.average(v), x, 1e-5, 1e-5)
  raw = [np.array(r) for r in strategy.experimental_local_results(v)]
  with opt.averaged_weights():
    for local in strategy.experimental_local_results(v):
      np.testing.assert_allclose(local, x, 1e-5, 1e-5)
  for local, want in zip(strategy.experimental_local_results(v), raw):
    numerics.assert_same_bits(np.array(local), want)


def test_a_failed_step_in_replicas_changes_nothing(monkeypatch):
  strategy = two_replicas()
  with strategy.scope():
    v = tf.Variable(START)
    opt = wrapopt.ScheduleFreeOptimizer(train.AdagradOptimizer(0.25))
  step = lambda: strategy.run(
      lambda: opt.apply_gradients([(tf.ones_like(START), v)]) and None)
  for _ in range(2):
    step()
  before = [np.array(x) for x in (opt.average(v), v, opt.z(v))]

  def fail(*args):
    raise ArithmeticError

  monkeypatch.setattr(opt._optimizer, "_finish", fail)
  with pytest.raises(ArithmeticError):
    step()
  for got, want in zip((opt.average(v), v, opt.z(v)), before):
    numerics.assert_same_bits(np.array(got), want)


def test_a_momentum_is_not_taken_over_without_copies():
  strategy = tf.distribute.experimental.CentralStorageStrategy(
      ["CPU:0", "CPU:1"])
  with strategy.scope():
    v = tf.Variable([1.0])
    opt = wrapopt.ScheduleFreeOptimizer(train.AdamOptimizer(1.0))
  with pytest.raises(NotImplementedError, match="beta1=0, got 0.9"):
    strategy.run(lambda: opt.apply_gradients([(tf.ones(1), v)]) and None)
  np.testing.assert_array_equal(v, [1.0])


def test_replicas_in_a_session():
  with tf.Graph().as_default():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
      v = tf1.get_variable("v", initializer=tf.constant([1.0, 2.0]))
      opt = wrapopt.ScheduleFreeOptimizer(
          train.GradientDescentOptimizer(0.25), 0.5)
      op = strategy.group(strategy.run(
          lambda: opt.apply_gradients([(tf.ones(2) / 2, v)])))
    with tf1.Session() as session:
      session.run(tf1.global_variables_initializer())
      for _ in range(3):
        session.run(op)
      # z goes from 1 to 0.25; x is its mean.
      points = session.run([opt.average(v), v, opt.z(v)])
      np.testing.assert_allclose(
          points, [[0.5, 1.5], [0.375, 1.375], [0.25, 1.25]], 1e-6)
      with opt.averaged_weights(session):
        numerics.assert_same_bits(session.run(v), points[0])
      numerics.assert_same_bits(session.run(v), points[1])
