"""Elastic averaging, with sessions on one server as workers.

Each worker has a device, and the centers have one. Variables of one name on one
device are the same variable. Between processes, see
workers/elastic_average_cluster_test.py.
"""

import collections
import contextlib
import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import modes
import numerics
import wrapopt
from checkpoint_files import values_of
from threads import in_threads
from wrapopt._v1._workers import _centers
from wrapopt._v1._workers import _elastic
from training import ancestors
from training import assert_same_bits
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import ops_of_type
from training import ops_that_run
from training import reads_of
from training import session_of

tf1 = tf.compat.v1
sgd = tf1.train.GradientDescentOptimizer
CENTERS = "/device:CPU:4"


def device_of_worker(number):
  return f"/device:CPU:{number}"


@pytest.fixture(scope="module")
def _server():
  return tf.distribute.Server.create_local_server(
      config=tf1.ConfigProto(device_count={"CPU": 5}))


@pytest.fixture
def target(_server):
  """A server that holds no variables yet."""
  tf1.Session.reset(_server.target)
  return _server.target


@pytest.fixture(params=[True, False], ids=["v2", "v1"])
def control_flow(request):
  with modes.control_flow(request.param):
    yield


def elastic(period, rate=None, rho=0.0, lr=1.0):
  """A function of the number of workers and the getter: an optimizer."""
  return lambda num_worker, getter: wrapopt.ElasticAverageOptimizer(
      sgd(lr), num_worker, getter, communication_period=period,
      moving_rate=rate, rho=rho)


def of_getter(getter, num_worker=1, **kwargs):
  return wrapopt.ElasticAverageOptimizer(sgd(1.0), num_worker, getter, **kwargs)


def variables_of(device="/cpu:0", partitioner=None, **initial):
  """A getter and the variables that it makes, in the current graph."""
  getter = wrapopt.ElasticAverageCustomGetter(device)
  with tf1.variable_scope("", custom_getter=getter, partitioner=partitioner):
    return getter, [tf1.get_variable(name, initializer=x)
                    for name, x in initial.items()]


class Worker:
  """A graph of one worker, which trains variables on given gradients.

  Attributes:
    opt: The optimizer.
    variables: What it trains.
    feeds: Placeholders of gradients.
    step: The global step.
    train: The training op.
  """

  def __init__(self, kind, number, initial, make, count=2):
    self.number = number
    with graph_of(kind) as self.graph, tf1.device(CENTERS):
      self.getter = wrapopt.ElasticAverageCustomGetter(device_of_worker(number))
      with tf1.variable_scope("model", custom_getter=self.getter):
        self.variables = [tf1.get_variable(f"v{i}", initializer=x)
                          for i, x in enumerate(initial)]
      self.step = tf1.train.get_or_create_global_step()
      self.opt = make(count, self.getter)
      self.feeds = [tf1.placeholder(v.dtype.base_dtype, v.shape)
                    for v in self.variables]
      with tf1.device(device_of_worker(number)):
        # Gradients that are the feeds, of a loss: the pull is added to it.
        loss = tf.add_n([tf.reduce_sum(tf.cast(f * v, tf.float64))
                         for f, v in zip(self.feeds, self.variables)])
        grads_and_vars = self.opt.compute_gradients(loss, self.variables)
      self.train = self.opt.apply_gradients(grads_and_vars, self.step)
      self.start = self.opt.get_init_op(number)
      self.init = tf1.global_variables_initializer()
      self.local_init = tf1.local_variables_initializer()

  def centers(self):
    return [self.getter._global_map[v] for v in self.variables]

  def local_centers(self):
    return [self.getter._local_map[v] for v in self.variables]

  @contextlib.contextmanager
  def session(self, target):
    """Starts; the first worker initializes what all share."""
    with tf1.Session(target, graph=self.graph) as session:
      if self.number == 0:
        session.run(self.init)
      session.run(self.local_init)
      session.run(self.start)
      yield session


def take_step(session, worker, gradients):
  session.run(worker.train, dict(zip(worker.feeds, gradients)))


def read(session, variables):
  return [np.array(x) for x in session.run(list(variables))]


@pytest.mark.by_day(1)
def test_two_workers(kind, control_flow, target):
  """Worker 0 walks by 1 and worker 1 by 2; rho is 0, and they meet half way.

  step 1: 1, 2. Step 2: worker 0 is at 2, the center at 0: both move by 1. Then
  worker 1 is at 4, the center at 1: both move by 1.5.
  """
  # The second variable is the same, 10 further and the other way round.
  workers = [Worker(kind, i, [np.float32(0), np.float32(10)], elastic(2, 0.5))
             for i in range(2)]
  expected = [  # worker 0, worker 1, center, what each saw of it, global step.
      (1.0, 2.0, 0.0, 0.0, 0.0, 0),
      (1.0, 2.5, 2.5, 0.0, 1.0, 2),
      (2.0, 4.5, 2.5, 0.0, 1.0, 2),
      # 3 and 2.5; then 6.5 and 2.75.
      (2.75, 4.625, 4.625, 2.5, 2.75, 4),
  ]
  with workers[0].session(target) as one, workers[1].session(target) as two:
    for x, y, center, saw_x, saw_y, step in expected:
      for session, worker, walk in ((one, workers[0], 1), (two, workers[1], 2)):
        take_step(session, worker, [np.float32(-walk), np.float32(walk)])
      for session, worker, value, saw in ((one, workers[0], x, saw_x),
                                          (two, workers[1], y, saw_y)):
        for variables, want in ((worker.variables, value),
                                (worker.centers(), center),
                                (worker.local_centers(), saw)):
          assert read(session, variables) == [want, 10 - want]
        assert session.run(worker.step) == step


class Simulation:
  """The same in NumPy, from the formulas."""

  def __init__(self, initial, workers, rate, period, rho, lr):
    self.centers = [np.array(x) for x in initial]
    self.workers = [[np.array(x) for x in initial] for _ in range(workers)]
    self.seen = [[np.array(x) for x in initial] for _ in range(workers)]
    self.steps = [0] * workers
    self.rate, self.period, self.rho, self.lr = rate, period, rho, lr
    self.exchanges = 0

  def step(self, number, gradients):
    worker, seen = self.workers[number], self.seen[number]
    for v, c, g in zip(worker, seen, gradients):
      v[...] = v - self.lr * (g + self.rho * (v - c))
    self.steps[number] += 1
    if self.steps[number] % self.period == 0:
      self.exchanges += 1
      for v, seen_c, c in zip(worker, seen, self.centers):
        seen_c[...] = c
        difference = v - c
        v[...] = v - self.rate * difference
        c[...] = c + self.rate * difference


@pytest.mark.parametrize("period, rate, rho, lr", [
    (2, None, None, 0.25), (3, 0.3, 0.7, 0.25)])
def test_three_workers_against_the_formulas(kind, target, period, rate, rho,
                                            lr):
  rng = np.random.default_rng(period)
  initial = [rng.normal(size=s) for s in ((3, 2), (), (0, 2), (5,))]
  workers = [Worker(kind, i, initial, elastic(period, rate, rho, lr), count=3)
             for i in range(3)]
  rate = 0.9 / period / 3 if rate is None else rate
  simulation = Simulation(initial, 3, rate, period,
                          rate / lr if rho is None else rho, lr)
  with contextlib.ExitStack() as stack:
    sessions = [stack.enter_context(w.session(target)) for w in workers]
    order = rng.integers(0, 3, size=40)
    for number in order:
      gradients = [rng.normal(size=x.shape) for x in initial]
      take_step(sessions[number], workers[number], gradients)
      simulation.step(number, gradients)
    eps = np.finfo(np.float64).eps
    for i, (session, worker) in enumerate(zip(sessions, workers)):
      for variables, want in (
          (worker.variables, simulation.workers[i]),
          (worker.centers(), simulation.centers),
          (worker.local_centers(), simulation.seen[i])):
        for got, x in zip(read(session, variables), want, strict=True):
          # Each step rounds some times, numbers of the size of the walk.
          numerics.assert_close(got, x, np.full_like(x, 40 * 8 * eps * 10))
    assert sessions[0].run(workers[0].step) == simulation.exchanges > 0


def test_an_exchange_rounds_as_in_1_15(kind, control_flow, target):
  """float32 bits of `v -= rate * diff; center += rate * diff`."""
  rng = np.random.default_rng(0)
  initial = [np.float32(rng.normal(size=1001) * 100), np.float32(rng.normal())]
  worker = Worker(kind, 0, initial, elastic(1, 0.3))
  gradients = [np.float32(rng.normal(size=x.shape)) for x in initial]
  with worker.session(target) as session:
    take_step(session, worker, gradients)
    v = [x - g for x, g in zip(initial, gradients)]
    differences = [x - c for x, c in zip(v, initial)]
    rate = np.float32(0.3)
    assert_same_bits(read(session, worker.variables),
                     [x - rate * d for x, d in zip(v, differences)])
    assert_same_bits(read(session, worker.centers()),
                     [c + rate * d for c, d in zip(initial, differences)])
    assert_same_bits(read(session, worker.local_centers()), initial)


def test_dtypes_together(kind, target):
  """Numbers that are exact in all of them, and 60000 near the end of half."""
  dtypes = (np.float16, tf.bfloat16.as_numpy_dtype, np.float32, np.float64)
  initial = [np.array([[60000, 2, -4]], d) for d in dtypes[:1]] + [
      np.array([[2, 4, -4]], d) for d in dtypes]
  worker = Worker(kind, 0, initial, elastic(1, 0.5))
  with worker.session(target) as session:
    take_step(session, worker, [np.full_like(x, 4) for x in initial])
    # Each walks by -4; both meet at -2. Half has steps of 32 at 60000.
    for variables in worker.variables, worker.centers():
      large, *others = [np.float64(x) for x in read(session, variables)]
      np.testing.assert_array_equal(large, [[60000, 0, -6]])
      for x in others:
        np.testing.assert_array_equal(x, [[0, 2, -6]])


@pytest.mark.parametrize("size", [1, 100000])
def test_concurrent_exchanges_lose_nothing(kind, target, size):
  """At rate 1, worker and center trade places: their sum is what it was."""
  rounds = 100 if size == 1 else 40
  workers = [Worker(kind, i, [np.zeros(size)] * 3, elastic(1, 1.0), count=4)
             for i in range(4)]
  with contextlib.ExitStack() as stack:
    sessions = [stack.enter_context(w.session(target)) for w in workers]

    together = threading.Barrier(4)

    def run(i):
      for _ in range(rounds):
        together.wait()
        take_step(sessions[i], workers[i], [np.full(size, -1.0 - i)] * 3)

    in_threads(*[functools.partial(run, i) for i in range(4)])
    places = [read(s, w.variables) for s, w in zip(sessions, workers)]
    places.append(read(sessions[0], workers[0].centers()))
    for i in range(3):
      assert_same_bits([sum(place[i] for place in places)],
                       [np.full(size, rounds * (1.0 + 2 + 3 + 4))])
    assert sessions[0].run(workers[0].step) == 4 * rounds


# What an exchange consists of


@pytest.mark.by_day(1)
def test_few_ops_and_transfers(kind, control_flow, target):
  worker = Worker(kind, 0, [np.float32([i, 1]) for i in range(20)],
                  elastic(1, rho=None))
  _, nodes = ops_that_run(
      worker.graph, worker.train, dict.fromkeys(worker.feeds, [1, 1]))
  name = "Wrapopt>AveragingAssign" + ("Ref" if kind == "ref" else "")
  assigns = [n for n in nodes if n.op == name]
  assert sorted(n.device[-len(CENTERS):] for n in assigns) == [
      device_of_worker(0), CENTERS]
  assert {n.attr["N"].i for n in assigns} == {20}
  # The edges of the graph, of which each costs a call in every step, but for
  # what belongs to the inner optimizer: a vector each way, and word that the
  # global step has been incremented.
  edges = [n.device[-len(CENTERS):] for n in nodes
           if n.op in ("_Recv", "_HostRecv") and "learning_rate" not in n.name]
  assert sorted(edges) == [device_of_worker(0)] * 2 + [CENTERS]


def ops_in_the_second_step(count, kind, period):
  # Of shapes that have no constant in common.
  values = [np.ones([i + 2, 1], np.float32) for i in range(count)]
  worker = Worker(kind, 0, values, elastic(period))
  return ops_that_run(worker.graph, worker.train,
                      dict(zip(worker.feeds, values, strict=True)), runs=2)[0]


@pytest.mark.by_day(0)
@pytest.mark.parametrize("most_bytes", [8, 16, 4 << 20])
def test_a_step_between_exchanges(kind, most_bytes, monkeypatch):
  """It runs nothing of an exchange, and no node for each variable or vector.

  But for the variables themselves, which are sources of the graph, and the
  loss, gradient and inner optimizer's step of each.
  """
  monkeypatch.setattr(_centers, "_MOST_BYTES", most_bytes)
  n = 8
  few, many = (ops_in_the_second_step(count, kind, 9) for count in (n, 2 * n))
  variable = "VarHandleOp" if kind == "resource" else "VariableV2"
  assert many - few == collections.Counter({
      variable: 3 * n, "_Arg": n, "BroadcastTo": n, "Const": n, "Identity": n,
      **({"ApplyGradientDescent": n} if kind == "ref" else
         {"ReadVariableOp": n, "ResourceApplyGradientDescent": n})})
  assert not [op for op in many if op.startswith("Wrapopt>")]
  due = ops_in_the_second_step(n, kind, 1)
  assert {op for op in due if op.startswith("Wrapopt>AveragingAssign")}


def test_all_is_read_before_any_is_changed(kind):
  v, opt = one_variable()
  step = tf1.train.get_or_create_global_step()
  [[center], [local]] = opt._copies([v])
  applied, due = tf.no_op(), tf.constant(True)
  done = tf.group(_elastic.exchange([v], [center], [local], 0.5, [step],
                                    applied, due))
  push, pull = sorted(ops_of_type("Wrapopt>AveragingAssign" + (
      "Ref" if kind == "ref" else "")), key=lambda op: len(ancestors(op)))
  assert pull in ancestors(done) and push in ancestors(pull)
  reads = reads_of([v, center], ancestors(done))
  assert len(reads) == 2 and reads <= ancestors(push)
  assert all(applied in ancestors(read) for read in reads)
  [count] = [op for op in ancestors(done)
             if op.type in ("AssignAdd", "AssignAddVariableOp")]
  assert push in ancestors(count)
  # Other workers do the same; an increment of a resource variable locks.
  assert push.get_attr("use_locking")
  assert kind == "resource" or count.get_attr("use_locking")


def test_what_is_returned_and_collected(kind):
  v, opt = one_variable()
  train = opt.minimize(tf.reduce_sum(v), name="my_train")
  assert isinstance(train, tf.Operation) and train.name == "my_train"
  assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [train]
  applied = [op for op in ancestors(train)
             if op.type in ("ApplyGradientDescent",
                            "ResourceApplyGradientDescent")]
  assert len(applied) == 1


def one_variable(make_inner=lambda: sgd(1.0), initial=(0.0, 0.0), name="v",
                 device="/cpu:0", **kwargs):
  """A variable and an optimizer for it, in the current graph."""
  getter, [v] = variables_of(device, **{name: list(initial)})
  return v, wrapopt.ElasticAverageOptimizer(make_inner(), **{
      "num_worker": 1, "ea_custom_getter": getter, **kwargs})


# The pull towards the centers


def test_gradients_of_a_subset(kind):
  """In 1.15, a variable was pulled to the center of another."""
  getter, [a, b] = variables_of(a=1.0, b=10.0)
  opt = of_getter(getter, rho=2.0)
  loss = 5 * a + 7 * b
  [(gradient, of)] = opt.compute_gradients(loss, [b])
  assert of is b
  with session_of() as session:
    assert session.run(gradient) == 7
    session.run(b.assign(13.0))
    assert session.run(gradient) == 7 + 2 * 3


def test_all_trainable_variables_by_default(kind):
  v, opt = one_variable(rho=2.0)
  assert [x for _, x in opt.compute_gradients(tf.reduce_sum(v))] == [v]
  tf1.get_variable("other", [2])
  with pytest.raises(ValueError, match="'other:0' must have a center, got"):
    opt.compute_gradients(tf.reduce_sum(v))
  with pytest.raises(ValueError, match="'other:0' must have a center, got"):
    opt.apply_gradients([(tf.ones([2]), x)
                         for x in tf1.trainable_variables()])


def test_a_variable_that_the_loss_does_not_depend_on(kind):
  """It has the gradient of the pull; without a pull, none."""
  for rho, expected in ((2.0, [2.0, 4.0]), (0.0, None)):
    with graph_of(kind):
      v, opt = one_variable(rho=rho)
      [(gradient, _)] = opt.compute_gradients(tf.constant(1.0), [v])
      assert (gradient is None) == (expected is None)
      if expected:
        with session_of() as session:
          session.run(v.assign([1.0, 2.0]))
          assert session.run(gradient).tolist() == expected


PULLED = {
    "a function": {"loss": lambda v: lambda: tf.reduce_sum(5 * v)},
    "an argument that is passed on": {
        "gate_gradients": tf1.train.Optimizer.GATE_GRAPH, "grad_loss": 3.0},
    **{f"a loss of {dtype.name}": {
        "loss": lambda v, dtype=dtype: tf.cast(tf.reduce_sum(5 * v), dtype)}
       for dtype in (tf.float16, tf.bfloat16, tf.float64)},
    **{f"{name}, {around}": {"inner": lambda make=make, wrap=wrap: wrap(
        sgd(make()))}
       for name, make in {
           "number": lambda: 0.25,
           "tensor": lambda: tf.constant(0.25),
           "variable": lambda: tf1.get_variable("lr", initializer=0.25,
                                                trainable=False),
           "callable": lambda: lambda: 0.25,
           "callable of a tensor": lambda: lambda: tf.constant(0.25),
       }.items()
       for around, wrap in {
           "bare": lambda opt: opt,
           "wrapped twice": lambda opt: wrapopt.MovingAverageOptimizer(
               wrapopt.CrossShardOptimizer(opt))}.items()},
}


@pytest.mark.parametrize("case", PULLED)
def test_the_pull(kind, case):
  """By 2 v: rho is 2, or by default 0.5 / 0.25."""
  options = dict(PULLED[case])
  if case == "a function" and kind == "ref":
    return  # TensorFlow has no gradients of a function for ref variables.
  v, opt = one_variable(
      options.pop("inner", lambda: sgd(1.0)), moving_rate=0.5,
      rho=None if "inner" in PULLED[case] else 2.0)
  loss = options.pop("loss", lambda v: tf.reduce_sum(5 * v))(v)
  scale = options.pop("grad_loss", 1.0)
  [(gradient, _)] = opt.compute_gradients(
      loss, grad_loss=tf.constant(scale, getattr(loss, "dtype", tf.float32)),
      **options)
  with session_of() as session:
    session.run(v.assign([1.0, 2.0]))
    assert session.run(gradient).tolist() == [7 * scale, 9 * scale]


def test_rates_that_are_tensors(kind, control_flow):
  rate, rho = (tf1.get_variable(name, initializer=x, trainable=False)
               for name, x in (("rate", 0.5), ("rho", 2.0)))
  v, opt = one_variable(moving_rate=rate, rho=rho, communication_period=1)
  train = opt.minimize(tf.reduce_sum(5 * v))
  with session_of() as session:
    session.run(v.assign([1.0, 2.0]))
    session.run(train)  # By 7 and 9, then half way back to 0.
    for x in v, opt._getter._global_map[v]:
      assert session.run(x).tolist() == [-3.0, -3.5]


@pytest.mark.parametrize("value", [1.5, -0.5, np.nan])
def test_a_rate_out_of_range(kind, control_flow, value):
  """Found when it runs; the center stays."""
  rate = tf1.placeholder(tf.float32, [])
  v, opt = one_variable(moving_rate=rate, rho=0.0, communication_period=1)
  step = tf1.train.get_or_create_global_step()
  train = opt.minimize(tf.reduce_sum(v), step)
  with session_of() as session:
    with pytest.raises(tf.errors.InvalidArgumentError,
                       match=r"`moving_rate` must be in \[0, 1\], got"):
      session.run(train, {rate: value})
    assert session.run(opt._getter._global_map[v]).tolist() == [0, 0]
    assert session.run(opt._getter._local_map[v]).tolist() == [0, 0]
    assert session.run(step) == 0


# Gradients of other kinds


def test_sparse_and_absent_gradients(kind, control_flow):
  """What has no gradient is not exchanged."""
  getter, [a, b] = variables_of(a=[4.0, 8.0], b=[4.0, 8.0])
  opt = of_getter(getter, communication_period=1, moving_rate=0.5)
  train = opt.apply_gradients(iter([
      (tf.IndexedSlices(tf.constant([2.0]), tf.constant([1]), [2]), a),
      (None, b)]))
  centers = [getter._global_map[v] for v in (a, b)]
  with session_of() as session:
    session.run([v.assign([0.0, 0.0]) for v in centers])
    session.run(train)
    assert np.array(session.run([a, b, *centers])).tolist() == [
        [2.0, 3.0], [4.0, 8.0], [2.0, 3.0], [0.0, 0.0]]


def test_partitioned_variables(kind):
  with graph_of(kind), tf1.device(CENTERS):
    getter, [v] = variables_of(partitioner=tf1.fixed_size_partitioner(2),
                               v=tf.zeros([3, 2]))
    opt = of_getter(getter, communication_period=1, moving_rate=0.5, rho=2.0)
    train = opt.minimize(tf.reduce_sum(tf.convert_to_tensor(v)), var_list=v)
    with session_of(device_count={"CPU": 5}) as session:
      session.run(train)
      session.run(train)  # -0.5 - (1 + 2 * -0.5), then half way to -0.5.
      for x in (tf.concat(list(v), 0),
                tf.concat([getter._global_map[s] for s in v], 0)):
        assert session.run(x).tolist() == [[-0.5] * 2] * 3


# State


def on_cluster():
  return tf1.device(tf1.train.replica_device_setter(
      cluster={"ps": ["ps0:1", "ps1:1"], "worker": ["w0:1", "w1:1"]},
      worker_device="/job:worker/task:1"))


@pytest.mark.parametrize("device, expected", [
    ("/job:worker/task:1", "/job:worker/task:1"),
    ("/job:worker/task:1/cpu:1", "/job:worker/task:1/device:CPU:1"),
    ("/job:worker/task:1/gpu:1", "/job:worker/task:1/device:CPU:0")])
@pytest.mark.parametrize("in_scope", [True, False])
def test_the_local_step_is_the_workers(kind, device, expected, in_scope):
  with graph_of(kind), on_cluster():
    getter = wrapopt.ElasticAverageCustomGetter(device)
    make = lambda: of_getter(getter, 2)
    with tf1.variable_scope("model", custom_getter=getter):
      tf1.get_variable("v", [2])
      if in_scope:
        make(), make()
    if not in_scope:
      make(), make()
    steps = tf1.local_variables()[2:]
  prefix = "model/" if in_scope else ""
  assert [v.op.name for v in steps] == [prefix + "local_step",
                                        prefix + "local_step_1"]
  for v in steps:
    assert v.device == expected
    assert v.dtype.base_dtype == tf.int32 and not v.trainable
  assert not any("local_step" in v.name for v in tf1.global_variables())


def test_several_in_one_graph(kind, control_flow):
  step = tf1.train.get_or_create_global_step()
  (a, one), (b, two) = (
      one_variable(name=name, moving_rate=0.5, rho=0.0,
                   communication_period=period)
      for name, period in (("a", 1), ("b", 2)))
  train = [one.minimize(tf.reduce_sum(a), step, [a]),
           two.minimize(tf.reduce_sum(b), step, [b])]
  starts = [opt.get_init_op(0) for opt in (one, two)]
  with session_of() as session:
    session.run(starts)
    for _ in range(2):
      session.run(train)
    # -1 / 2, (-1.5 - 0.5) / 2; the other once, from -2.
    assert session.run([a, b])[0].tolist() == [-1.0, -1.0]
    assert session.run([a, b])[1].tolist() == [-1.0, -1.0]
    assert session.run(step) == 3


# What is refused


@pytest.mark.parametrize("error, text, arguments", [
    *((TypeError, f"`num_worker` must be an integer, got {x}",
       {"num_worker": x}) for x in (1.0, True)),
    (ValueError, "`num_worker` must be at least 1, got 0", {"num_worker": 0}),
    (TypeError, "`communication_period` must be an integer, got None",
     {"communication_period": None}),
    (ValueError, "`communication_period` must be at least 1, got -3",
     {"communication_period": -3}),
    (ValueError, "`moving_rate` must be given if `communication_period` is "
     "not an integer, got ", {"communication_period": tf.Variable(2)}),
    *((ValueError, rf"`moving_rate` must be in \[0, 1\], got {x}",
       {"moving_rate": x}) for x in (1.5, np.nan)),
    *((ValueError, f"`rho` must be finite and at least 0, got {x}", {"rho": x})
      for x in (-1, np.inf)),
    (ValueError, "`rho` must be given: AdamOptimizer must have .* got none",
     {"make_inner": tf1.train.AdamOptimizer}),
    (ValueError, "`rho` must be given: GradientDescentOptimizer must .* got 0",
     {"make_inner": lambda: sgd(0.0)}),
    (ValueError, "`start_timeout_secs` must be more than 0, got 0",
     {"start_timeout_secs": 0}),
    (TypeError, "`start_timeout_secs` must be a number of seconds, got '1'",
     {"start_timeout_secs": "1"}),
    *((TypeError, "`moving_rate` must be a number, or a scalar tensor or "
       f"variable, got {x!r}", {"moving_rate": x}) for x in ("0.5", True)),
    (TypeError, "`rho` must be a number, or a scalar tensor or variable, got ",
     {"rho": np.ones(2)}),
    (TypeError, "`synchronous` must be True or False, got 'no'",
     {"synchronous": "no"}),
    (TypeError, "`opt` must be a tf.compat.v1.train.Optimizer, got",
     {"make_inner": lambda: "sgd"}),
])
def test_wrong_arguments(error, text, arguments):
  with graph_of("resource"):
    with pytest.raises(error, match=text):
      one_variable(**arguments)
    assert not any("local_step" in v.name for v in tf1.local_variables())


@pytest.mark.parametrize("getter", [
    None, wrapopt.ModelAverageCustomGetter("/cpu:0"), "/cpu:0"])
def test_another_getter(getter):
  with tf.Graph().as_default():
    with pytest.raises(TypeError, match="`ea_custom_getter` must be the Elastic"
                       "AverageCustomGetter of the model's variables, got"):
      of_getter(getter)


def test_in_a_strategy():
  getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
  with tf.Graph().as_default():
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
      with pytest.raises(NotImplementedError, match="tf.distribute strategy"):
        of_getter(getter)


def test_no_gradients(kind):
  v, opt = one_variable()
  before = len(tf1.get_default_graph().get_operations())
  with pytest.raises(ValueError, match="No gradients provided"):
    opt.apply_gradients([(None, v)])
  with pytest.raises(ValueError, match="No variables provided"):
    opt.apply_gradients([])
  assert len(tf1.get_default_graph().get_operations()) == before


def test_an_unknown_shape(kind):
  getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
  with tf1.variable_scope("", custom_getter=getter):
    v = tf1.get_variable("v", validate_shape=False,
                         initializer=lambda: tf1.placeholder(
                             tf.float32, [None]))
  opt = of_getter(getter)
  with pytest.raises(ValueError, match="The shape of 'v:0' must be known"):
    opt.minimize(tf.reduce_sum(v))


# Starting


def test_init_op(kind):
  """Center to both, of this optimizer's variables alone."""
  tf1.get_variable("other", [2])  # In 1.15, a KeyError.
  v, opt = one_variable(initial=(2.0, 3.0))
  start = opt.get_init_op(0)
  mine = [v, opt._getter._local_map[v]]
  with tf1.Session() as session:
    # It needs no values, nor keeps them.
    session.run(opt._getter._global_map[v].initializer)
    for before in [], [x.assign([1.0, 4.0]) for x in mine]:
      session.run(before)
      session.run(start)
      for x in session.run(mine):
        assert x.tolist() == [2.0, 3.0]


def test_init_op_is_refused(kind):
  getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
  opt = of_getter(getter, 2, synchronous=True)
  tf1.get_variable("other", [2])
  with pytest.raises(ValueError,
                     match="must have made at least one variable"):
    opt.get_init_op(0)
  for number in (-1, 2):
    with pytest.raises(ValueError, match=r"`task_index` must be in \[0, 2\), "
                       f"got {number}"):
      opt.get_init_op(number)


@contextlib.contextmanager
def monitored(target, kind, number, **kwargs):
  """(session of a worker, variable, center, local center, training op)."""
  with graph_of(kind), tf1.device(CENTERS):
    getter = wrapopt.ElasticAverageCustomGetter(device_of_worker(number))
    with tf1.variable_scope("", custom_getter=getter):
      v = tf1.get_variable("v", [3], initializer=(
          tf1.random_normal_initializer()))
    opt = wrapopt.ElasticAverageOptimizer(
        tf1.train.MomentumOptimizer(1.0, 0.5), 2, getter,
        communication_period=2, moving_rate=0.5, rho=0.0, **kwargs)
    train = opt.minimize(tf.reduce_sum(v),
                         tf1.train.get_or_create_global_step())
    hook = opt.make_session_run_hook(number == 0, task_index=number)
    with tf1.train.MonitoredTrainingSession(
        master=target, is_chief=number == 0, hooks=[hook], max_wait_secs=20,
        log_step_count_steps=None) as session:
      yield session, v, getter._global_map[v], getter._local_map[v], train


def test_workers_start_from_the_centers(kind, target):
  """Random initial values: each worker's are others."""
  with monitored(target, kind, 0) as (session, *variables, _):
    first, *others = session.run(variables)
    assert_same_bits(others, [first] * 2)
  with monitored(target, kind, 1) as (session, *variables, _):
    assert_same_bits(session.run(variables), [first] * 3)


def test_who_does_not_start(target):
  with pytest.raises(tf.errors.DeadlineExceededError,
                     match=r"All 2 workers must start within 0.3 .* \[1\]"):
    with monitored(target, "resource", 0, synchronous=True,
                   start_timeout_secs=0.3):
      pass


@contextlib.contextmanager
def starting(target, name):
  """Yields two functions: worker 0 starts; which workers have started."""
  with graph_of("resource"), tf1.device(CENTERS):
    opts = [one_variable(name=name, num_worker=2, synchronous=True)[1]]
    # Another of the same variables.
    opts.append(of_getter(opts[0]._getter, 2, synchronous=True))
    starts = [opt.get_init_op(0) for opt in opts]
    started = [opt._started() for opt in opts]
    with session_of(target=target) as session:
      yield (lambda i: session.run(starts[i]),
             lambda: [x.tolist() for x in session.run(started)])


def test_the_workers_of_one_optimizer_are_not_those_of_another(target):
  """Neither in one graph, nor in graphs of other models."""
  no, yes = [False, False], [True, False]
  with starting(target, "a") as (start_a, a), starting(target, "b") as (_, b):
    assert a() == b() == [no, no]
    start_a(0)
    assert a() == [yes, no] and b() == [no, no]
    start_a(1)
    assert a() == [yes, yes] and b() == [no, no]


# Checkpoints


@contextlib.contextmanager
def two_variables(kind):
  """A session, variables with other centers, one without, and the optimizer."""
  with graph_of(kind):
    getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
    with tf1.variable_scope("", custom_getter=getter):
      a = tf1.get_variable("a", initializer=[1.0])
      b = tf1.get_variable("b", initializer=tf.constant([[2.0], [3.0]]),
                           partitioner=tf1.fixed_size_partitioner(2))
    other = tf1.get_variable("other", initializer=[5.0])
    opt = of_getter(getter)
    with session_of() as session:
      session.run([v.assign(v + 10.0) for v in (a, *b)])
      yield session, a, b, other, opt


@pytest.mark.parametrize("choose, expected", [
    (lambda a, b, other: None, {"a": [1.0], "b": [2.0, 3.0], "other": [5.0]}),
    (lambda a, b, other: [a], {"a": [1.0]}),
    (lambda a, b, other: iter([a, other]), {"a": [1.0], "other": [5.0]}),
    (lambda a, b, other: [b], {"b": [2.0, 3.0]}),
    # A tensor that stands for a variable.
    (lambda a, b, other: {
        "x": a.value() if hasattr(a, "handle") else a._ref()}, {"x": [1.0]}),
    (lambda a, b, other: {"x": a, "y": b}, {"x": [1.0], "y": [2.0, 3.0]}),
    (lambda a, b, other: {"y": list(b)}, {"y": [2.0, 3.0]}),
], ids=["all", "one", "iterator", "partitioned", "tensor", "dict",
        "dict of slices"])
def test_swapping_saver(kind, tmp_path, choose, expected):
  with two_variables(kind) as (session, a, b, other, opt):
    path = opt.swapping_saver(choose(a, b, other)).save(
        session, str(tmp_path / "model"))
    assert {name: x.ravel().tolist()
            for name, x in values_of(path).items()} == expected


def test_what_the_swapping_saver_saves_is_the_model(kind, tmp_path):
  with two_variables(kind) as (session, a, b, other, opt):
    saver = opt.swapping_saver(name="s", max_to_keep=1)
    path = saver.save(session, str(tmp_path / "model"))
    centers = [opt._getter._global_map[v] for v in (a, *b)]
    session.run([v.assign(v + 1.0) for v in (*centers, other)])
    saver.restore(session, path)
    assert [x.item() for x in session.run([*centers, other, a])] == [
        1, 2, 3, 5, 11]


def test_a_swapping_saver_of_nothing(kind):
  getter = wrapopt.ElasticAverageCustomGetter("/cpu:0")
  opt = of_getter(getter)
  tf1.get_variable("other", [1])
  with pytest.raises(RuntimeError,
                     match="needs at least one center, got none"):
    opt.swapping_saver()
