"""Trainings between z and its average x: numbers, swaps and checkpoints.

ScheduleFree and PrimalAverage, in both halves. keras/interpolated_test.py has
what Keras adds: fit, its files, its wrappers.
"""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import arrays
import averages
import numerics
import interpolated_model
from replicas import mirrored
import wrapopt
from training import sgd
from training import type_of
from wrapopt import checkpoints

tf1 = tf.compat.v1
train = tf1.train

WAYS = [way for way in averages.WAYS if way.one_pass]
OF_V1 = [way for way in WAYS if way.half == "v1"]
SESSIONS = [way for way in WAYS if way.is_graph]
START = interpolated_model.START
running, points = interpolated_model.running, interpolated_model.points

EACH = pytest.mark.parametrize("wrapper", interpolated_model.EACH)


def ways(chosen):
  return pytest.mark.parametrize("way", chosen, ids=str)


def running_of(wrapper, *args, **more):
  return running(*args, **{**interpolated_model.EACH[wrapper], **more})


def trained(run, steps=3):
  for _ in range(steps):
    run.step(1.0)
  return points(run)


def cases():
  """Each way, and each schedule in one of each half."""
  for way in WAYS:
    eager = way.mode == "eager"
    for inner, of in interpolated_model.INNER.items():
      if (of.of_v1 if way.half == "v1" else of.of_keras) is None:
        continue
      for schedule in interpolated_model.SCHEDULES if eager else [
          "warm-up", "primal average"]:
        yield way, inner, schedule, np.float64, False
      if way.half == "keras" and eager:
        yield way, inner, "warm-up", np.float32, False
    if way.half == "v1":
      yield way, "Adam", "warm-up", np.float64, True
      yield way, "Adam", "primal average", np.float64, True


@pytest.mark.by_day(10)
@pytest.mark.parametrize("way, inner, schedule, dtype, sparse", cases())
def test_trajectories(way, inner, schedule, dtype, sparse):
  """130 steps, against the paper's formulas in float64."""
  # The betas of TensorFlow's Adam and RMSProp are float32, as are Keras's rates
  # in a function.
  tolerance = 2e-4 if dtype == np.float32 or way.half == "v1" or (
      way.mode != "eager") else 1e-9
  count = 0
  settings = interpolated_model.settings(way, inner, schedule)
  with running(way, inner, dtype, **settings) as run:
    for model, g, rate in interpolated_model.trajectory(
        run, inner, sparse=sparse, **settings):
      model.step(g, rate)
      count += 1
      if count in (1, 2, 3, 50, 130):
        arrays.assert_close(points(run), [model.x, model.y, model.z],
                            tolerance, tolerance)
    # It has moved, and the three points are apart.
    x, y, z = points(run)
    assert np.abs(x - START).max() > 0.1
    apart = "off" not in schedule
    assert (np.abs(z - x).max() > 1e-3) == apart
    assert (np.abs(y - x).max() > 1e-4) == (apart and "at x" not in schedule)
    assert count == 130
    if way.half == "v1":
      assert run.read(run.count) == [130]
    else:
      assert run.averaging.fused


@pytest.mark.by_day(2)
@ways([way for way in WAYS if way.half == "keras"])
@pytest.mark.parametrize("schedule, inner", [
    *(("warm-up", inner) for inner in ("Adamax", "Adam AMSGrad")),
    *(("primal average", inner)
      for inner in ("Adamax", "Adam AMSGrad", "SGD Nesterov"))])
def test_two_passes(schedule, inner, way):
  """Of an inner optimizer that trains z alone, by the same gradients."""
  z = keras.Variable(START, dtype="float64")
  of = interpolated_model.INNER[inner]
  alone = of.keras(interpolated_model.PRIMAL_BETA if "primal" in schedule
                   else 0.0, weight_decay=0.03125)
  alone.build([z])

  def train_z(value, g, lr):
    z.assign(value)
    alone.learning_rate = lr
    alone.apply([tf.constant(g)], [z])
    return z.numpy()

  settings = interpolated_model.settings(way, inner, schedule)
  with running(way, inner, **settings) as run:
    for model, g, _ in interpolated_model.trajectory(
        run, inner, steps=20, **settings):
      model.inner = train_z
      model.step(g, of.rate)
      # Keras's rate is a float32.
      arrays.assert_close(points(run), [model.x, model.y, model.z], 1e-5, 1e-6)
    assert not run.averaging.fused


@EACH
@ways([way for way in OF_V1 if way.mode in ("function", "resource", "ref")])
def test_one_op_and_no_copy_more(way, wrapper):
  with running_of(wrapper, way, "Adam") as run:
    trained(run, 1)
    graph = run.session.graph if way.is_graph else (
        run._function.get_concrete_function(
            [tf.zeros(START.shape, tf.float64)]).graph)
    types = [type_of(op) for op in graph.get_operations()
             if op.type.startswith("Wrapopt>")]
    is_free = wrapper == "schedule_free"
    name = "ScheduleFree" if is_free else "PrimalAverage"
    want = f"Wrapopt>Apply{name}Adam" + "Ref" * (way.mode == "ref")
    # The others put averages in place.
    assert [t for t in types if "Apply" in t] == [want]
    names = sorted(v.name.split(":")[0] for v in run.opt.variables())
    assert (run.opt.get_slot(run.variables["v"], "m") is None) == is_free
    large = [v for v in run.opt.variables() if v.shape.rank == 2]
    assert len(large) == 2 + (not is_free)
    if way.is_graph:
      # As in plain Adam, where v/Adam is the first moment.
      assert names == sorted([
          "beta1_power", "beta2_power", wrapper, "v/Adam_1", f"v/{name}",
          f"v/{name}/share", *["v/Adam"] * (not is_free)])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@EACH
@ways(WAYS)
def test_in_place(way, dtype, wrapper):
  with running_of(wrapper, way, "Adam", dtype) as run:
    x, y, z = trained(run)
    before = run.state()
    with run.in_place():
      numerics.assert_same_bits(run.value("v"), x)
      with pytest.raises((RuntimeError, tf.errors.FailedPreconditionError),
                         match="inside averaged_weights|is not initialized|"
                         "uninitialized value"):
        run.step(1.0)
      with pytest.raises(RuntimeError, match="inside averaged_weights"):
        with run.in_place():
          pass
      if not way.is_graph:
        with pytest.raises(RuntimeError, match="inside averaged_weights"):
          run.averaging.z(run.variables["v"])
      numerics.assert_same_bits(run.value("v"), x)
    arrays.assert_same_bits(points(run), (x, y, z))
    arrays.assert_same_bits(run.state(), before)
    with pytest.raises(KeyError), run.in_place():
      raise KeyError
    arrays.assert_same_bits(points(run), (x, y, z))
    trained(run)
    assert (run.value("v") != y).any()
    if way.half == "v1":
      assert run.read(run.count) == [6]


@EACH
@ways([way for way in OF_V1 if way.mode in ("eager", "resource", "ref")])
def test_swapping_saver(way, wrapper, tmp_path):
  """x is in the file by the variable's name; the state comes back."""
  with running_of(wrapper, way, "Adam", np.float32) as run:
    v = run.variables["v"]
    before = trained(run)
    slot = "v/" + type(run.opt).__name__.removesuffix("Optimizer")
    saver = run.opt.swapping_saver(None if way.is_graph else {
        "v": v, slot: run.opt.z(v),
        wrapper: next(x for x in run.opt.variables() if x.dtype == tf.float64)})
    path = saver.save(run.session, str(tmp_path / "c"))
    file = tf.train.load_checkpoint(path)
    arrays.assert_same_bits(
        map(file.get_tensor, ("v", f"{slot}/y", slot)), before)
    following = trained(run, 1)
    saver.restore(run.session, path)
    arrays.assert_same_bits(points(run), before)
    trained(run, 1)
    if way.is_graph:
      # A plain Saver leaves x in the variable, and the training goes on.
      train.Saver().restore(run.session, path)
      arrays.assert_same_bits(points(run), (before[0], before[0], before[2]))
      arrays.assert_close(trained(run, 1), following, 1e-5)
      with pytest.raises(ValueError, match=f"{wrapper} is not part of var"):
        run.opt.swapping_saver([v, run.opt.z(v)])


@EACH
@ways(SESSIONS)
def test_snapshots_hold_x(way, wrapper, tmp_path):
  with running_of(wrapper, way, "Adam", np.float32) as run:
    op, feed = run.train_op(1.0)
    hook = checkpoints.SnapshotHook(run.opt, str(tmp_path), 2)
    with train.MonitoredSession(hooks=[hook]) as session:
      for _ in range(2):
        session.run(op, feed)
      x = session.run(run.opt.average(run.variables["v"]))
    path = str(tmp_path / "snapshot-2-average")
    numerics.assert_same_bits(tf.train.load_variable(path, "v"), x)


@EACH
@ways([way for way in WAYS if way.mode == "eager"])
def test_tf_checkpoint(way, wrapper, tmp_path):
  with running_of(wrapper, way, "Adam", np.float32) as one, running_of(
      wrapper, way, "Adam", np.float32) as two:
    before = trained(one)
    path = one.save("checkpoint", str(tmp_path / "c"))
    status = two.restore("checkpoint", path)
    if way.half == "keras":
      arrays.assert_same_bits(points(two), before)
      names = [name for name, _ in tf.train.list_variables(path)]
      for part in ("z..0", "schedule"):  # TensorFlow doubles the dot.
        assert any(f"/wrapopt_{type(one.opt).__name__}/{part}/" in name
                   for name in names)
    want = trained(one, 1)
    trained(two, 1)
    status.assert_consumed()  # Now that Adam has made its powers.
    arrays.assert_same_bits(points(two), want)


@EACH
@ways([way for way in WAYS if way.mode in ("eager", "resource")])
def test_seed_averages(way, wrapper):
  with running_of(wrapper, way, dtype=np.float32) as run:
    trained(run)
    if not way.is_graph:
      run.variables["v"].assign(run.value("v") + 1)
    y = run.value("v")
    run.seed()
    arrays.assert_same_bits(points(run), [y] * 3)
    # Again the first.
    c = 1 if wrapper == "schedule_free" else 0.125
    np.testing.assert_allclose(trained(run, 1), [
        y - 0.25 * part for part in (c, 1 - 0.75 * (1 - c), 1)], 1e-6)


@pytest.mark.parametrize("outside", [False, True])
@ways([way for way in OF_V1 if way.mode in ("eager", "resource")])
def test_with_cross_shard(way, outside):
  cross = wrapopt.CrossShardOptimizer
  with running(way) as alone:
    want = trained(alone)
  with running(way, around=(lambda opt: opt) if outside else cross,
               within=cross if outside else lambda opt: opt) as run:
    trained(run)
    arrays.assert_same_bits(points(run), want)


@pytest.mark.by_day(2)
@EACH
@ways(OF_V1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision(way, dtype, wrapper):
  dtype = tf.as_dtype(dtype).as_numpy_dtype
  model = interpolated_model.Model(START, interpolated_model.Inner("SGD"),
                                   **interpolated_model.EACH[wrapper])
  with running_of(wrapper, way, dtype=dtype) as run:
    for got in trained(run):
      assert got.dtype == dtype
    for _ in range(3):
      model.step(np.ones((4, 3)), 0.25)
    arrays.assert_close([x.astype(np.float64) for x in points(run)],
                        [model.x, model.y, model.z], 0.02, 0.02)


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
    (lambda: wrapopt.PrimalAverageOptimizer(train.MomentumOptimizer(1.0, 0.9)),
     ValueError, "PrimalAverageOptimizer must be exactly a .* got MomentumOpt"),
    (lambda: wrapopt.PrimalAverageOptimizer(
        train.RMSPropOptimizer(1.0, momentum=0.5)), ValueError,
     "no momentum, which has no op, got .* Pass momentum=0 to RMSPropOpt"),
    (lambda: wrapopt.PrimalAverageOptimizer(sgd(), average_decay=1.5),
     ValueError, "`average_decay` must be .* at most 1, got 1.5"),
    (lambda: wrapopt.PrimalAverageOptimizer(sgd(), 0), ValueError,
     "`momentum` must be finite and greater than 0"),
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
  opt._optimizer._finish = lambda *args: None
  with pytest.raises(ValueError, match="exactly .* got GradientDescentOpt"):
    opt.apply_gradients([(tf.ones(1), v)])
  for x in (v, w):
    np.testing.assert_array_equal(x, [1.0])
  with pytest.raises(RuntimeError, match="before averaged_weights"):
    with opt.averaged_weights():
      pass


# Strategies.


@pytest.mark.by_day(2)
@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("wrapper, inner", [
    *(("schedule_free", inner)
      for inner in ("SGD", "Adam", "RMSprop", "Adagrad")),
    ("primal_average", "Adam")])
def test_in_replicas(wrapper, inner, function):
  """The sum of their gradients takes the step of one process."""
  make = lambda: {
      "schedule_free": lambda opt: wrapopt.ScheduleFreeOptimizer(
          opt, warmup_steps=2, weight_decay_at_y=0.125),
      "primal_average": lambda opt: wrapopt.PrimalAverageOptimizer(
          opt, 0.75, 0.5)}[wrapper](
              interpolated_model.INNER[inner].v1(0.25, 0.9))
  strategy = mirrored()
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
  raw = arrays.values(strategy.experimental_local_results(v))
  with opt.averaged_weights():
    for local in strategy.experimental_local_results(v):
      np.testing.assert_allclose(local, x, 1e-5, 1e-5)
  arrays.assert_same_bits(
      arrays.values(strategy.experimental_local_results(v)), raw)


@EACH
def test_refused_in_replicas_without_copies(wrapper):
  strategy = tf.distribute.experimental.CentralStorageStrategy(
      ["CPU:0", "CPU:1"])
  with strategy.scope():
    v = tf.Variable([1.0])
    opt = {"schedule_free": wrapopt.ScheduleFreeOptimizer,
           "primal_average": wrapopt.PrimalAverageOptimizer}[wrapper](sgd())
  with pytest.raises(NotImplementedError, match=(
      "Optimizer must be in .* got a CentralStorageStrategy. Use a")):
    strategy.run(lambda: opt.apply_gradients([(tf.ones(1), v)]) and None)
  np.testing.assert_array_equal(v, [1.0])
  assert not opt.variables()


def test_replicas_in_a_session():
  with tf.Graph().as_default():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
      v = tf1.get_variable("v", initializer=tf.constant([1.0, 2.0]))
      opt = wrapopt.ScheduleFreeOptimizer(sgd(0.25), 0.5)
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


class Several:
  """Three variables and their x, y and z in float64; gradients are 1."""

  SHARE, DECAY, RATE = 0.7, 0.9, 0.25

  def __init__(self):
    self.points = {name: [np.array([i, i + 1.0])] * 3
                   for i, name in enumerate("abc")}

  def step(self, names):
    for name in names:
      x, _, z = self.points[name]
      z = z - self.RATE
      x = self.DECAY * x + (1 - self.DECAY) * z
      self.points[name] = [x, self.SHARE * x + (1 - self.SHARE) * z, z]

  def hold_x(self):
    self.points = {name: [x, x, z] for name, (x, _, z) in self.points.items()}

  def check(self, read):
    for name, want in self.points.items():
      np.testing.assert_allclose(read(name), want, 1e-10)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", ["resource", "ref", "mirrored"])
def test_some_variables_hold_x_in_a_session(kind, is_late, tmp_path):
  """Steps on some variables after a plain Saver has set all to x."""
  # In a strategy, a train op is in its scope.
  with tf.Graph().as_default(), tf1.Session() as session, (
      tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
      if kind == "mirrored" else tf.distribute.get_strategy()).scope():
    strategy, model = tf.distribute.get_strategy(), Several()
    v = {name: tf1.get_variable(
        name, initializer=tf.constant(x), use_resource=kind != "ref")
         for name, (x, _, _) in model.points.items()}
    opt = wrapopt.PrimalAverageOptimizer(sgd(model.RATE), model.SHARE,
                                         model.DECAY)
    # A later `minimize` makes z of variables that the first does not know.
    names = ["a", "abc", "bc"] if is_late else ["abc", "a", "bc"]

    def minimize(some):
      loss = tf.add_n([tf.reduce_sum(v[name]) for name in some])
      return opt.minimize(loss / strategy.num_replicas_in_sync,
                          var_list=[v[name] for name in some])

    steps = {some: strategy.group(strategy.run(minimize, [some]))
             if kind == "mirrored" else minimize(some) for some in names}
    session.run(tf1.global_variables_initializer())
    swapping, plain = opt.swapping_saver(), train.Saver()

    def step(some):
      session.run(steps[some])
      model.step(some)
      check()

    def check():
      for i in range(strategy.num_replicas_in_sync):
        model.check(functools.partial(read, i))

    def read(i, name):
      y, z = (strategy.experimental_local_results(x)[i]
              for x in (v[name], opt.z(v[name])))
      return session.run([opt.average(v[name]), y, z])

    step("abc")
    step("bc")
    plain.restore(session, swapping.save(session, str(tmp_path / "x")))
    model.hold_x()
    check()
    step("a")
    before = dict(model.points)
    paths = [(saver, saver.save(session, str(tmp_path / str(i))))
             for i, saver in enumerate((plain, swapping))]
    for some in ("a", "bc", "abc"):
      step(some)
    for saver, path in paths:
      saver.restore(session, path)
      model.points = dict(before)
      check()
      for some in ("a", "abc", "bc"):
        step(some)
    with opt.averaged_weights(session):
      for name, (x, _, _) in model.points.items():
        np.testing.assert_allclose(session.run(v[name]), x, 1e-10)
    check()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("mode", ["eager", "function", "jit", "mirrored"])
def test_some_variables_hold_x_in_keras(mode, one_pass, tmp_path):
  """Steps on some variables after all were set to x, as by `fit`."""
  model = Several()
  strategy = (mirrored() if mode == "mirrored" else
              tf.distribute.get_strategy())

  def make():
    v = {name: keras.Variable(x, dtype="float64")
         for name, (x, _, _) in Several().points.items()}
    cls = keras.optimizers.SGD if one_pass else type(
        "Own", (keras.optimizers.SGD,), {})
    opt = wrapopt.keras.PrimalAverage(cls(model.RATE), model.SHARE, model.DECAY)
    opt.build(list(v.values()))
    assert opt.fused == one_pass
    part = tf.ones([2], tf.float64) / strategy.num_replicas_in_sync

    def apply(some):
      # A variable without a gradient is left out, or has None.
      strategy.run(lambda: opt.apply([tf.identity(part) if name in some else
                                      None for name in v], list(v.values())))

    steps = {some: apply if mode == "eager" else tf.function(
        apply, jit_compile=mode == "jit") for some in ("a", "bc", "abc")}
    return v, opt, steps

  with strategy.scope():
    v, opt, steps = make()

  def step(*of):
    for some in of:
      steps[some](some)
      model.step(some)
      check()

  def check():
    for i in range(strategy.num_replicas_in_sync):
      model.check(lambda name: (opt.average(v[name]), *(  # pylint: disable=cell-var-from-loop
          strategy.experimental_local_results(x.value)[i]
          for x in (v[name], opt.z(v[name])))))

  step("abc", "a", "bc")
  for _ in range(2):  # The functions are traced once.
    opt.finalize_variable_values(list(v.values()))
    model.hold_x()
    step("a", "a", "abc", "bc")
  opt.finalize_variable_values(list(v.values()))
  model.hold_x()
  step("bc")
  path = tf.train.Checkpoint(opt=opt, **v).save(str(tmp_path / "c"))
  before = dict(model.points)
  step("abc")
  for another in (False, True):
    if another:
      with strategy.scope():
        v, opt, steps = make()
    tf.train.Checkpoint(opt=opt, **v).restore(path)
    model.points = dict(before)
    check()
    step("bc", "abc", "a")
