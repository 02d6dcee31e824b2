"""ModelAverageOptimizer in one process; between processes, see
workers/model_average_cluster_test.py."""

import collections
import concurrent.futures
import contextlib
import itertools
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from modes import control_flow
from training import ops_that_run
from training import session_of
from training import sgd
from wrapopt import ops
from wrapopt._loader import ops as raw
from wrapopt._v1._workers import _centers

tf1 = tf.compat.v1

# Where the parameter server would be.
SERVER = "/job:localhost/task:0/device:CPU:7"


def device(worker):
  return f"/job:localhost/task:0/device:CPU:{worker}"


@pytest.fixture(scope="module")
def target():
  """A server whose devices stand for the tasks of a cluster."""
  server = tf.distribute.Server.create_local_server(
      config=tf1.ConfigProto(device_count={"CPU": 8},
                             inter_op_parallelism_threads=8))
  yield server.target


@pytest.fixture(params=[(True, True), (True, False), (False, True),
                        (False, False)], ids=lambda p: (
                            f"{'resource' if p[0] else 'ref'}-v"
                            f"{2 if p[1] else 1}"))
def kind(request):
  """Of variables and of control flow."""
  use_resource, v2 = request.param
  with control_flow(v2):
    yield use_resource


class Worker:
  """The graph of one worker."""

  def __init__(self, number=0, use_resource=True, scope=""):
    self.graph = tf.Graph()
    self.device = device(number)
    self.getter = wrapopt.ModelAverageCustomGetter(self.device)
    self._options = {"use_resource": use_resource}
    self._scope = scope

  @contextlib.contextmanager
  def build(self, getter=True):
    def place(op):
      if op.device:
        return op.device
      return (SERVER if op.type in ("VarHandleOp", "VariableV2")
              else self.device)

    with self.graph.as_default(), tf1.device(place), tf1.variable_scope(
        self._scope, custom_getter=self.getter if getter else None,
        **self._options):
      yield

  def optimizer(self, num_worker=1, is_chief=True, interval_steps=1, opt=None,
                **options):
    return wrapopt.ModelAverageOptimizer(
        opt or sgd(), num_worker, is_chief, self.getter, interval_steps,
        **options)

  @contextlib.contextmanager
  def training(self, names="v", **options):
    """(optimizer, op that adds 1 to variables, global step, variables)."""
    with self.build():
      variables = [tf1.get_variable(n, initializer=0.0) for n in names]
      step = tf1.train.create_global_step()
      opt = self.optimizer(**options)
      train = opt.apply_gradients([(tf.constant(-1.0), v) for v in variables],
                                  step)
      yield opt, train, step, *variables

  def session(self, target, opt):
    return tf1.train.MonitoredTrainingSession(
        target, hooks=[opt.make_session_run_hook()])


# What a step does


@pytest.mark.by_day(2)
def test_a_round_in_the_head(kind, target):
  """Gradient -1: two steps of 1, and the mean of one worker is its own."""
  worker = Worker(use_resource=kind, scope="head")
  with worker.build():
    v = tf1.get_variable("v", initializer=[0.0, 10.0])
    step = tf1.train.create_global_step()
    opt = worker.optimizer(interval_steps=2)
    train = opt.apply_gradients([(tf.constant([-1.0, -1.0]), v)], step)
    center = worker.getter.centers[v]
    with worker.session(target, opt) as session:
      assert session.run(train) == False  # pylint: disable=singleton-comparison
      assert session.run(v).tolist() == [1, 11]
      assert session.run(center).tolist() == [0, 10]
      assert session.run(step) == 0
      assert session.run(train) == True  # pylint: disable=singleton-comparison
      assert session.run(v).tolist() == [2, 12]
      assert session.run(center).tolist() == [2, 12]
      assert session.run(step) == 1


def test_a_variable_without_a_gradient_is_not_averaged(target):
  worker = Worker(scope="none")
  with worker.build():
    v, w = (tf1.get_variable(n, initializer=x)
            for n, x in (("v", 0.0), ("w", 5.0)))
    step = tf1.train.create_global_step()
    opt = worker.optimizer()
    train = opt.apply_gradients([(tf.constant(-1.0), v), (None, w)], step)
    center = worker.getter.centers[w]
    with worker.session(target, opt) as session:
      assert session.run([w, center]) == [5, 5]
      w.load(7.0, session._tf_sess())
      session.run(train)
      assert session.run([v, w, center, step]) == [1, 7, 5, 1]


def test_random_initial_values_are_the_centers(target):
  worker = Worker(scope="random")
  with worker.build():
    v = tf1.get_variable("v", [1000],
                         initializer=tf1.random_normal_initializer())
    step = tf1.train.create_global_step()
    opt = worker.optimizer(interval_steps=9)
    opt.apply_gradients([(v, v)], step)
    with worker.session(target, opt) as session:
      values = session.run([v, worker.getter.centers[v]])
  np.testing.assert_array_equal(*values)
  assert values[0].std() > 0.5


def test_a_partitioned_variable(target):
  """Each slice is a variable with a center."""
  worker = Worker(scope="partitioned")
  with worker.build():
    v = tf1.get_variable("v", [4, 2], initializer=tf1.ones_initializer(),
                         partitioner=tf1.fixed_size_partitioner(2))
    step = tf1.train.create_global_step()
    opt = worker.optimizer()
    train = opt.minimize(tf.reduce_sum(3 * tf.convert_to_tensor(v)), step)
    centers = [worker.getter.centers[x] for x in v]
    with worker.session(target, opt) as session:
      session.run(train)
      values = session.run([*v, *centers])
  assert len(values) == 4
  for value in values:
    assert value.tolist() == [[-2, -2], [-2, -2]]


def test_a_parameter_server_that_has_seen_later_rounds(target):
  """As one that went on running when the one that leads was restarted."""
  worker, other = Worker(), device(6)
  servers = iter([SERVER, other, SERVER])

  def place(op):
    if op.device or op.type != "VarHandleOp":
      return op.device or worker.device
    return next(servers)

  with worker.graph.as_default(), tf1.device(place), tf1.variable_scope(
      "later", use_resource=True):
    with tf1.variable_scope("", custom_getter=worker.getter):
      variables = [tf1.get_variable(n, initializer=0.0) for n in "vw"]
    step = tf1.train.create_global_step()
    opt = worker.optimizer()
    train = opt.apply_gradients([(tf.constant(-1.0), v) for v in variables],
                                step)
    centers = [worker.getter.centers[v] for v in variables]
    assert [c.device for c in centers] == [SERVER, other]
    [rounds] = opt._rounds
    assert [s.device[-len("CPU:0"):] for s in rounds.servers] == [
        "CPU:6", "CPU:7"]
    with ops.host_of(rounds.servers[0]):
      ahead = raw.wrapopt_averaging_restore(
          opt._member._handle(rounds, rounds.servers[0]), "w",
          from_generation=0, place=[42, 3], job=0)
    is_open = opt._member.are_open([rounds])
    opt.get_init_op()
    [start] = opt._starts[0].first.control_inputs
    assert start.device.endswith("CPU:7")  # That of the one that leads.
    with tf1.Session(target, graph=worker.graph) as session:
      assert session.run(ahead) and not session.run(is_open)
    with worker.session(target, opt) as session:
      assert session.run(is_open)
      for n in 1, 2:
        session.run(train)
        assert session.run([centers, step]) == [[n, n], n]


@pytest.mark.by_day(2)
@pytest.mark.parametrize("kinds", [*itertools.product([True, False], repeat=3)],
                         ids=str)
def test_resource_and_ref_variables_together(kinds, target):
  """Of two centers and the step, each of either kind."""
  worker = Worker(scope=f"kinds_{''.join(map(str, map(int, kinds)))}")
  with worker.build():
    v, w = [tf1.get_variable(n, initializer=0.0, use_resource=kind)
            for n, kind in zip("vw", kinds)]
    step = tf1.get_variable("step", [], tf.int64, tf1.zeros_initializer(),
                            trainable=False, use_resource=kinds[2])
    opt = worker.optimizer()
    train = opt.apply_gradients([(tf.constant(-1.0), v),
                                 (tf.constant(-2.0), w)], step)
    [mean] = [op.node_def for op in worker.graph.get_operations()
              if op.type == "Wrapopt>AveragingMean"]
    centers = worker.getter.centers
    refs = [x.op.name.encode() for x in (centers[v], centers[w], step)
            if ops.is_ref_variable(x)]
    assert [*mean.attr["_variables"].list.s] == refs  # For its errors.
    with worker.session(target, opt) as session:
      for n in 1, 2:
        session.run(train)
        assert session.run([worker.getter.centers[x] for x in (v, w)]) == [
            n, 2 * n]
        assert session.run(step) == n


class Places(tf1.train.SessionRunHook):
  """Notes the open place when the session has its variables."""

  def __init__(self, opt):
    self.noted = []
    self._opt = opt

  def begin(self):
    [rounds] = self._opt._rounds
    self._place = self._opt._member._states(rounds)[-1].place

  def after_create_session(self, session, coord):
    del coord
    self.noted.append(session.run(self._place).tolist())


@pytest.mark.by_day(1)
@pytest.mark.parametrize("own_saver", [False, True])
def test_rounds_stop_while_the_chief_writes_the_centers(own_saver, target,
                                                        tmp_path):
  """Other workers could end a round, which would write to some of them."""
  generation = (time.time() - 3600) * 1e3  # The clock, in milliseconds.
  for n in 1, 2:  # Initialized, and then restored.
    worker = Worker(scope=f"stops_{own_saver}")
    with worker.training() as (opt, train, step, v):
      scaffold = tf1.train.Scaffold(saver=tf1.train.Saver()
                                    if own_saver else None)
      before, after = Places(opt), Places(opt)
      with tf1.train.MonitoredTrainingSession(
          target, checkpoint_dir=str(tmp_path), scaffold=scaffold,
          hooks=[before, opt.make_session_run_hook(), after]) as session:
        session.run(train)
        assert session.run([v, worker.getter.centers[v], step]) == [n] * 3
    [[stopped, stop]], [[_, begun]] = before.noted, after.noted
    assert stopped == -1 and generation < stop < begun
    generation = begun


@pytest.mark.by_day(1)
@pytest.mark.parametrize("begins", [True, False])
def test_a_worker_waits_for_a_chief_longer_than_for_others(begins, target):
  worker = Worker(scope=f"waits_{begins}")
  with worker.training(round_timeout_secs=0.5,
                       chief_timeout_secs=60 if begins else 0.5) as (
                           opt, train, step, v):
    stop, begin = (make(opt._open_rounds())
                   for make in (opt._member.stop, opt._member.begin))
    hook = opt.make_session_run_hook()
    hook.begin()
    with session_of(target=target) as session:
      hook.after_create_session(session, None)
      session.run(train)
      session.run(stop)
      if not begins:
        with pytest.raises(tf.errors.DeadlineExceededError,
                           match="are stopped, and the chief has begun none"):
          session.run(train)
        return
      chief = threading.Timer(1.5, lambda: session.run(begin))
      chief.start()
      session.run(train)  # Takes the centers.
      chief.join()
      assert session.run([v, step]) == [1, 1]
      session.run(train)
      assert session.run([v, step]) == [2, 2]


def test_a_step_that_failed_does_not_count(target):
  worker = Worker(scope="failed")
  with worker.build():
    v = tf1.get_variable("v", initializer=0.0)
    step = tf1.train.create_global_step()
    opt = worker.optimizer(interval_steps=2)
    divisor = tf1.placeholder(tf.int32, [])
    train = opt.apply_gradients([(-tf.cast(1 // divisor, tf.float32), v)], step)
    with session_of(target=target) as session:
      for n in range(1, 7):
        for _ in range(3):
          with pytest.raises(tf.errors.InvalidArgumentError, match="ivi"):
            session.run(train, {divisor: 0})
        assert session.run(train, {divisor: 1}) == (n % 2 == 0)
        assert session.run([v, step]) == [n, n // 2]


@pytest.mark.parametrize("timeout_secs", [600, float("inf")])
def test_checked_numerics(timeout_secs, target):
  worker = Worker(scope=f"checked_{timeout_secs}")
  tf.debugging.enable_check_numerics()
  try:
    with worker.training(round_timeout_secs=timeout_secs) as (
        opt, train, step, v):
      hook = opt.make_session_run_hook()
      hook.begin()
      with session_of(target=target) as session:
        hook.after_create_session(session, None)
        session.run(train)
        assert session.run([v, step]) == [1, 1]
  finally:
    tf.debugging.disable_check_numerics()


def test_no_clock_that_others_set_ends_a_round(target):
  worker = Worker(scope="clock")
  with worker.training(round_timeout_secs=30):
    by_type = collections.defaultdict(list)
    for op in worker.graph.get_operations():
      by_type[op.type].append(op)
      op._remove_all_control_inputs()
  assert "Timestamp" not in by_type
  # A worker that waited for its turn waits less for the others.
  [close] = by_type["Wrapopt>AveragingClose"]
  began, now = (op.outputs[0] for op in by_type["Wrapopt>AveragingClock"])
  [left] = [t for t in close.inputs if t.op.type == "Maximum"]
  with tf1.Session(target, graph=worker.graph) as session:
    assert session.run(left, {began: 100, now: 107}) == 23
    assert session.run(left, {began: 100, now: 140}) == 1


def test_two_steps_of_a_worker_at_once_are_refused(target):
  """Both would be the same step of a round, and the round would be missed."""
  worker = Worker(scope="at_once")
  with worker.build():
    v = tf1.get_variable("v", initializer=0.0)
    step = tf1.train.create_global_step()
    opt = worker.optimizer(interval_steps=2)
    begun, go_on = threading.Event(), threading.Event()

    def wait(is_slow):
      if is_slow:
        begun.set()
        assert go_on.wait(60)
      return np.float32(-1)

    is_slow = tf1.placeholder_with_default(False, [])
    gradient = tf.numpy_function(wait, [is_slow], tf.float32)
    gradient.set_shape([])
    train = opt.apply_gradients([(gradient, v)], step)
    local_step = opt._rounds[0].local_step
    with session_of(target=target) as session, (
        concurrent.futures.ThreadPoolExecutor()) as pool:
      slow = pool.submit(session.run, train, {is_slow: True})
      assert begun.wait(60)
      # The step has begun; most likely it has read the count, too.
      time.sleep(0.5)
      assert not session.run(train)
      go_on.set()
      with pytest.raises(tf.errors.InvalidArgumentError,
                         match="(?s)one step at a time.*"
                         "Expected and got.*1.*2"):
        slow.result(60)
      assert session.run([local_step, step]) == [2, 0]


def test_without_the_hook(target):
  """As in 1.15: rounds work, whatever the workers started from."""
  worker = Worker(scope="no_hook")
  with worker.training() as (opt, train, step, v):
    init = opt.get_init_op()
    with session_of(target=target) as session:
      session.run(train)
      assert session.run([v, worker.getter.centers[v], step]) == [1, 1, 1]
      session.run(v.assign(7.0))
      session.run(init)
      assert session.run(v) == 1
      session.run(train)
      assert session.run([v, worker.getter.centers[v], step]) == [2, 2, 2]


def test_a_second_apply_gradients(target):
  """Its rounds and steps are its own."""
  worker = Worker(scope="second")
  with worker.training(interval_steps=2) as (opt, train, step, v):
    w = tf1.get_variable("w", initializer=0.0)
    trains = [train, opt.apply_gradients([(tf.constant(-1.0), w)], step)]
    centers = [worker.getter.centers[x] for x in (v, w)]
    with worker.session(target, opt) as session:
      session.run(trains[0])
      session.run(trains[1])
      assert session.run(centers) == [0, 0]
      session.run(trains[0])
      assert session.run(centers) == [2, 0]
      session.run(trains[1])
      assert session.run(centers) == [2, 2]
      assert session.run(step) == 2


# Its variables, and what they are


def test_local_variables():
  worker = Worker(3)
  with worker.training(opt=tf1.train.AdamOptimizer()) as (opt, _, _, v):
    other = worker.optimizer()
  with worker.graph.as_default():
    local = {v.op.name: v for v in tf1.local_variables()}
    assert sorted(local) == [
        "beta1_power", "beta2_power", "local_round", "local_round_1",
        "local_step", "local_step_1", "v", "v/Adam", "v/Adam_1"]
    assert {v.device for v in local.values()} == {worker.device}
    assert local["local_step"].dtype.base_dtype == tf.int32
    assert not local["local_step"].trainable
    assert {v.op.name: v.device for v in tf1.global_variables()} == {
        "global_center_variable/v": SERVER, "global_step": SERVER}
    # What a checkpoint holds.
    assert sorted(v.op.name for v in tf1.train.Saver()._var_list) == [
        "global_center_variable/v", "global_step"]
  assert opt.get_slot_names() == ["m", "v"]
  assert opt.get_slot(v, "m") is local["v/Adam"]
  with worker.graph.as_default():
    assert {v.op.name for v in opt.variables()} == {
        "beta1_power", "beta2_power", "v/Adam", "v/Adam_1"}
    assert other.variables() == []


@pytest.mark.parametrize("scoped", [True, False])
def test_local_step_is_on_the_worker(scoped):
  """Wherever the constructor runs: in 1.15 all workers could share one."""
  worker = Worker(2, scope="model")
  with worker.build():
    tf1.get_variable("v", initializer=0.0)
    if scoped:
      worker.optimizer()
  if not scoped:
    with worker.graph.as_default(), tf1.device(SERVER):
      worker.optimizer()
  with worker.graph.as_default():
    [local_step] = [v for v in tf1.local_variables() if "step" in v.name]
  assert local_step.device == worker.device
  assert local_step.op.name == ("model/local_step" if scoped else "local_step")


def test_the_train_op():
  worker = Worker()
  with worker.build():
    v = tf1.get_variable("v", initializer=0.0)
    step = tf1.train.create_global_step()
    opt = worker.optimizer()
    train = opt.minimize(tf.square(v), step, name="train")
    assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [train.op]
    opt.get_init_op()
    assert opt._member.are_open(opt._rounds).shape == []
  assert train.op.name.endswith("train")
  assert train.dtype == tf.bool and train.shape == []
  # A worker that starts reads the open place before the centers.
  assert [op.type for op in opt._starts[0].first.control_inputs] == [
      "Wrapopt>AveragingState"]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("variables, most_bytes, vectors", [
    (2, 4 << 20, 1), (40, 4 << 20, 1), (40, 8, 40)])
def test_values_cross_together(variables, most_bytes, vectors, kind,
                               monkeypatch):
  """The number of transfers does not depend on the number of variables."""
  monkeypatch.setattr(_centers, "_MOST_BYTES", most_bytes)
  worker = Worker(use_resource=kind)
  with worker.build():
    vs = [tf1.get_variable(f"v{i}", initializer=tf.zeros([2]))
          for i in range(variables)]
    step = tf1.train.create_global_step()
    train = worker.optimizer().apply_gradients(
        [(tf.ones([2]), v) for v in vs], step)
  nodes = collections.defaultdict(list)
  for node in ops_that_run(worker.graph, train)[1]:
    nodes[node.op].append(node)
  # The edges of the graph, of which each costs a call in every step.
  edges = collections.Counter(
      (tf.DType(n.attr["tensor_type"].type), n.device[-len("CPU:0"):])
      for n in nodes["_Recv"] + nodes["_HostRecv"])
  assert edges == {(dtype, at): count for at in ("CPU:0", "CPU:7")
                   for dtype, count in ((tf.int64, 1), (tf.float32, vectors))}
  for op in "Enter", "Stage", "Arrive", "Close", "Mean":
    [node] = nodes[f"Wrapopt>Averaging{op}"]
    assert node.device.endswith("/device:CPU:7")
  *sizes, counter = node.attr["sizes"].list.i
  assert sum(sizes) == variables and len(sizes) == vectors and counter == 0


def nodes_that_run(variables, kind, interval):
  """{op: how many of them run} in the second step, one of gradient descent."""
  worker = Worker(use_resource=kind)
  with worker.build():
    # Of shapes that have no constant in common.
    vs = [tf1.get_variable(f"v{i}", initializer=tf.zeros([i + 2, 1]))
          for i in range(variables)]
    step = tf1.train.create_global_step()
    train = worker.optimizer(interval_steps=interval).apply_gradients(
        [(tf.ones(v.shape), v) for v in vs], step)
  return ops_that_run(worker.graph, train, runs=2)[0]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("most_bytes", [8, 16, 4 << 20])
def test_a_step_between_rounds(kind, most_bytes, monkeypatch):
  """It runs nothing of a round, and no node for each variable or vector.

  But for the variables themselves, which are sources of the graph, gradients,
  and the inner optimizer's.
  """
  monkeypatch.setattr(_centers, "_MOST_BYTES", most_bytes)
  n = 8
  few, many = (nodes_that_run(count, kind, 9) for count in (n, 2 * n))
  variable = "VarHandleOp" if kind else "VariableV2"
  assert many - few == {
      variable: 2 * n, "Const": n, "ResourceApplyGradientDescent" if kind else
      "ApplyGradientDescent": n}
  assert not few - many
  assert not [op for op in many if op.startswith("Wrapopt>")]
  a_round = nodes_that_run(2, kind, interval=1)
  assert a_round["Wrapopt>AveragingStage"] == 1


# Errors


def test_opt_and_getter_are_checked():
  worker = Worker()
  with worker.build():
    with pytest.raises(TypeError, match="`opt` must be a tf.compat.v1.train"):
      worker.optimizer(opt=keras.optimizers.SGD())
    with pytest.raises(TypeError, match=(
        r"`ma_custom_getter` must be the ModelAverageCustomGetter .* got "
        r"NoneType\.")):
      wrapopt.ModelAverageOptimizer(sgd(), 1, True, None)


@pytest.mark.parametrize("error, match, options", [
    (ValueError, "`num_worker` must be at least 1, got 0", {"num_worker": 0}),
    (TypeError, "`num_worker` must be an integer, got 1.5",
     {"num_worker": 1.5}),
    (TypeError, "`num_worker` must be an integer, got True",
     {"num_worker": True}),
    (ValueError, "`interval_steps` must be at least 1, got 0",
     {"interval_steps": 0}),
    (TypeError, "`interval_steps` must be a scalar integer, got a tensor of "
     r"dtype float32 and shape \(\)", {"interval_steps": lambda: tf.ones([])}),
    (TypeError, "`interval_steps` must be a scalar integer, got a tensor of "
     r"dtype int32 and shape \(1,\)",
     {"interval_steps": lambda: tf.ones([1], tf.int32)}),
    (ValueError, "`min_workers` must be at most 2, the number of workers, got "
     "3", {"num_worker": 2, "min_workers": 3}),
    (ValueError, "`min_workers` must be at least 1, got 0", {"min_workers": 0}),
    (ValueError, "`round_timeout_secs` must be more than 0, got 0",
     {"round_timeout_secs": 0}),
    (ValueError, "`chief_timeout_secs` must be more than 0, got nan",
     {"chief_timeout_secs": float("nan")}),
    (TypeError, "`round_timeout_secs` must be a number of seconds, got '1'",
     {"round_timeout_secs": "1"}),
    (ValueError, "`worker` must be a name, got ''", {"worker": ""}),
    (TypeError, "`is_chief` must be True or False, got 'no'",
     {"is_chief": "no"}),
])
def test_arguments_are_checked(error, match, options):
  worker = Worker()
  with worker.build(), pytest.raises(error, match=match):
    worker.optimizer(**{name: x() if callable(x) else x
                        for name, x in options.items()})


def test_a_worker_without_a_device_needs_a_name():
  with tf.Graph().as_default():
    getter = wrapopt.ModelAverageCustomGetter("")
    arguments = sgd(), 2, True, getter
    with pytest.raises(ValueError, match="`worker` must be a name if"):
      wrapopt.ModelAverageOptimizer(*arguments)
    wrapopt.ModelAverageOptimizer(*arguments, worker="me")


def test_apply_gradients_is_checked():
  worker = Worker()
  with worker.build():
    v = tf1.get_variable("v", initializer=0.0)
    step = tf1.train.create_global_step()
    opt = worker.optimizer()
    g = tf.constant(1.0)
    before = len(worker.graph.get_operations())
    for pairs, count, error, text in (
        ([], step, ValueError, "Must supply at least one variable"),
        ([(g, v)], None, ValueError, "Global step is required"),
        ([(g, v)], 3, TypeError, "`global_step` must be a variable"),
        ([(None, v)], step, ValueError, "No gradients provided")):
      with pytest.raises(error, match=text):
        opt.apply_gradients(pairs, count)
    with pytest.raises(ValueError, match="Global step is required"):
      opt.minimize(g * v)
    assert len([op for op in worker.graph.get_operations()[before:]
                if op.type.startswith(("Wrapopt", "ResourceApply"))]) == 0
    opt.apply_gradients(zip([g], [v]), step)
  with worker.build(getter=False):
    w = tf1.get_variable("w", initializer=0.0)
    with pytest.raises(ValueError, match="'w:0' must have a center, got a"):
      opt.apply_gradients([(g, w)], step)


def test_get_init_op_needs_variables(target):
  worker = Worker(scope="init")
  text = "The list of local_variables should not be empty"
  with worker.build(getter=False):
    tf1.get_variable("w", initializer=0.0)  # The getter did not make it.
  with worker.build():
    opt = worker.optimizer()
    with pytest.raises(ValueError, match=text):
      opt.get_init_op()
    mine = [tf1.get_variable(name, initializer=[1.0, 2.0]) for name in "ab"]
    step = tf1.train.create_global_step()
    opt.apply_gradients([(tf.constant([1.0, 1.0]), v) for v in mine], step)
    init = opt.get_init_op()
    assert init.type == "NoOp"
    others = [v for v in (*tf1.global_variables(), *tf1.local_variables())
              if all(v is not w for w in mine)]
    with tf1.Session(target) as session:
      session.run(tf1.variables_initializer(others))
      session.run(init)
      assert [x.tolist() for x in session.run(mine)] == [[1.0, 2.0]] * 2


@pytest.mark.by_day(1)
@pytest.mark.parametrize("made_after", [0, 1, 2])
def test_get_init_op_between_other_calls(made_after, target):
  """It starts the worker in all rounds, also of later `apply_gradients`."""
  worker = Worker(scope=f"order_{made_after}")
  with worker.build():
    v, w = [tf1.get_variable(n, initializer=0.0) for n in "vw"]
    step = tf1.train.create_global_step()
    opt = worker.optimizer()
    trains, inits = [], []
    for x in (v, w, None):
      if len(trains) == made_after:
        inits.append(opt.get_init_op())
      if x is not None:
        trains.append(opt.apply_gradients([(tf.constant(-1.0), x)], step))
    [init] = inits
    rounds = [r.local_round for r in opt._rounds]
    with worker.session(target, opt) as session:
      places = session.run(rounds)
      assert all(tuple(place) > (-1, 0) for place in places)
      session.run(trains)
      later = session.run(rounds)
      assert session.run([v, w, step]) == [1, 1, 2]
      for local in rounds:
        local.load([-1, 0], session._tf_sess())
      v.load(9.0, session._tf_sess())
      session.run(init)
      np.testing.assert_array_equal(session.run(rounds), later)
      session.run(trains)
      assert session.run([v, w, step]) == [2, 2, 4]


@pytest.mark.parametrize("is_run_before", [False, True])
def test_get_init_op_may_run_at_any_time(is_run_before, target):
  """A session that has run an op does not see what is added to it later."""
  worker = Worker(scope=f"any_time_{is_run_before}")
  with worker.build():
    v = tf1.get_variable("v", initializer=0.0)
    step = tf1.train.create_global_step()
    opt = worker.optimizer(interval_steps=2, round_timeout_secs=5.0)
    init = opt.get_init_op()
    with tf1.Session(target) as session:
      if is_run_before:
        session.run(tf1.global_variables_initializer())
        session.run(init)
      train = opt.apply_gradients([(tf.constant(-1.0), v)], step)
      hook = opt.make_session_run_hook()
      hook.begin()
      session.run([tf1.global_variables_initializer(),
                   tf1.local_variables_initializer()])
      hook.after_create_session(session, None)
      for n in (1, 2, 3):
        for _ in range(2):
          session.run(init)
        session.run(train)
        session.run(train)
        assert session.run([v, step]) == [2 * n, n]
      session.run(train)
      session.run(init)
      assert session.run(v) == 6


@pytest.mark.parametrize("is_chief", [True, False])
def test_the_hook_without_a_step(is_chief, target):
  """A program that evaluates the centers."""
  worker = Worker(scope="evaluated")
  with worker.build():
    v = tf1.get_variable("v", initializer=1.0)
    hook = worker.optimizer(2, is_chief).make_session_run_hook()
    center = worker.getter.centers[v]
    with tf1.Session(target) as session:
      session.run(center.initializer)
      session.run(center.assign(3.0))
      session.run(v.initializer)
      hook.begin()
      hook.after_create_session(session, None)
      assert session.run(v) == 3
