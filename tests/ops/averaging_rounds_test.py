"""Model averaging on a parameter server: rounds, means and waits."""

import itertools
import math
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

import averaging_task
import modes
import numerics
from modes import at_build
from modes import called
from modes import evaluate
from modes import handle_of
from modes import uncompiled_mode as mode  # pylint: disable=unused-import
from modes import refused
from modes import tf1
from numerics import BFLOAT16, DOUBLE, DTYPES, FLOAT, HALF
from processes import run_python
from threads import in_threads
from wrapopt import _native
from wrapopt import ops
from wrapopt._loader import ops as raw
from wrapopt.examples import _cluster

Aborted = tf.errors.AbortedError
Cancelled = tf.errors.CancelledError
FailedPrecondition = tf.errors.FailedPreconditionError
InvalidArgument = tf.errors.InvalidArgumentError

FOREVER = math.inf
SOON = 0.1  # Seconds.
_count = itertools.count()


class Rounds:
  """Rounds in one mode, whose handle each op looks up anew."""

  def __init__(self, mode, num_workers, name=None, container=""):
    self.mode = mode
    self.name = name or f"rounds {next(_count)}"
    self._arguments = (num_workers, self.name, container)

  @property
  def handle(self):
    return ops.averaging_rounds(*self._arguments)

  def push(self, worker, round, *values):  # pylint: disable=redefined-builtin
    return bool(evaluate(self.mode, lambda: ops.averaging_push(
        self.handle, worker, round, values or [[0.]])))

  def gather(self, round, min_workers, timeout_secs=FOREVER):  # pylint: disable=redefined-builtin
    return [w.decode() for w in evaluate(
        self.mode, lambda: ops.averaging_gather(
            self.handle, round, min_workers, timeout_secs))]

  def mean(self, round, workers, centers, value=0):  # pylint: disable=redefined-builtin
    self.mode.run(lambda: ops.averaging_mean(self.handle, round, workers,
                                             centers, value))

  def next(self, round, reset=False):  # pylint: disable=redefined-builtin
    return int(evaluate(self.mode, lambda: ops.averaging_next(
        self.handle, round, reset)))

  def wait(self, round, timeout_secs=30., worker=""):  # pylint: disable=redefined-builtin
    return int(evaluate(self.mode, lambda: ops.averaging_wait(
        self.handle, round, timeout_secs, worker)))


def opened(mode, num_workers):
  """Rounds of which round 0 is open."""
  rounds = Rounds(mode, num_workers)
  assert rounds.next(-1, reset=True) == 0
  return rounds


def eager(num_workers):
  """The same, for threads: they can run ops, but not build one graph."""
  return opened(modes.Eager(), num_workers)


def name_of(value):
  return str(value)


def random(rng, shape, dtype):
  return np.asarray(rng.standard_normal(shape)).astype(dtype)


# Rounds


def test_a_trajectory(mode):
  rounds = Rounds(mode, 2)
  centers = [mode.variable(np.zeros(2, np.float32)),
             mode.variable(np.float32(0))]
  assert rounds.next(-1, reset=True) == 0
  # Of round r, the means of (r, 0, 1) and (r + 4, 2, 1).
  for r in range(3):
    assert rounds.wait(r - 1) == r
    assert rounds.push("b", r, np.array([r, 0, 1], np.float32))
    assert rounds.push("a", r, np.array([r + 4, 2, 1], np.float32))
    assert rounds.gather(r, 2) == ["a", "b"]
    rounds.mean(r, ["a", "b"], centers)
    assert [x.tolist() for x in mode.values(centers)] == [[r + 2, 1], 1]
    assert rounds.next(r) == r + 1


def test_the_same_name_is_the_same_rounds(mode):
  rounds = opened(mode, 2)
  with pytest.raises(InvalidArgument, match=(
      f"averaging rounds '{rounds.name}' have num_workers = 2, got num_workers "
      "= 3: use the same num_workers, or another shared_name")):
    Rounds(mode, 3, rounds.name).wait(5)
  assert Rounds(mode, 2, rounds.name).wait(-1) == 0


def test_other_names_and_containers_are_other_rounds(mode):
  one = opened(mode, 2)
  two = Rounds(mode, 3)
  three = Rounds(mode, 4, one.name, container="another")
  one.push("a", 0)
  one.next(0)
  assert [r.wait(-5) for r in (one, two, three)] == [1, -1, -1]
  assert two.next(3) == 4 and three.next(8) == 9
  assert [r.wait(-5) for r in (one, two, three)] == [1, 4, 9]


@modes.only(*modes.graphs())
def test_rounds_without_a_name_are_nobody_else_s(mode):
  a, b = (raw.wrapopt_averaging_rounds(num_workers=1) for _ in range(2))
  assert mode.session.run(ops.averaging_next(a, 6)) == 7
  assert mode.session.run([ops.averaging_wait(x, -9, 1.) for x in (a, b)]) == [
      7, -1]


# Waits


def test_waits_hold_no_thread():
  """With one thread, what they wait for can still run."""
  waits = 5
  with tf.Graph().as_default(), tf1.Session(config=tf1.ConfigProto(
      inter_op_parallelism_threads=1, use_per_session_threads=True)) as session:
    rounds = ops.averaging_rounds(2, "one thread")
    first = ops.averaging_next(rounds, 0, reset=True)
    wait = ops.averaging_wait(rounds, 0, FOREVER)
    gather = ops.averaging_gather(rounds, 0, 2, FOREVER)
    pushes = [ops.averaging_push(rounds, w, 0, [[1.]]) for w in "ab"]
    then = ops.averaging_next(rounds, 0)
    session.run(first)
    answers = []

    def chief():
      answers.append(session.run(gather).tolist())
      answers.append(session.run(then))

    in_threads(chief, *waits * [lambda: answers.append(session.run(wait))],
               lambda: (time.sleep(SOON), session.run(pushes[0]),
                        session.run(pushes[1])))
    assert answers[0] == [b"a", b"b"]
    assert answers[1:] == [1] * (waits + 1)


class Begun:
  """Tells when a step of a graph comes to where it waits."""

  def __init__(self, act=lambda: None):
    self._event = threading.Event()
    self._act = act

  def node(self):
    def begun():
      self._act()
      self._event.set()
      return np.int64(0)
    return tf.numpy_function(begun, [], tf.int64)

  def then(self, act):
    assert self._event.wait(30)
    time.sleep(SOON)
    act()


def waits_of(rounds, begun):
  """Both kinds of waits for round 0, in the current graph."""
  with tf.control_dependencies([begun.node()]):
    return {"gather": ops.averaging_gather(rounds, 0, 2, FOREVER),
            "wait": ops.averaging_wait(rounds, 0, FOREVER)}


@pytest.mark.parametrize("what", ["gather", "wait"])
def test_a_session_that_is_closed(what):
  begun = Begun()
  server = tf.distribute.Server.create_local_server()
  with tf.Graph().as_default():
    rounds = ops.averaging_rounds(2, f"closed {what}")
    first = ops.averaging_next(rounds, 0, reset=True)
    push = {w: ops.averaging_push(rounds, w, 0, [[1.]]) for w in "ab"}
    wait = waits_of(rounds, begun)[what]
    with tf1.Session(server.target) as other:
      session = tf1.Session(server.target)
      session.run(first)

      def run():
        with pytest.raises((Cancelled, Aborted)):
          session.run(wait)

      in_threads(run, lambda: begun.then(session.close))
      # Nobody has gathered them, so they may be replaced.
      assert all(other.run(push[w]) for w in "aba")


def test_an_error_beside_a_wait():
  begun = Begun()
  with tf.Graph().as_default(), tf1.Session() as session:
    rounds = ops.averaging_rounds(2, "error")
    session.run(ops.averaging_next(rounds, 0, reset=True))
    waits = waits_of(rounds, begun)
    bad = tf1.placeholder(tf.float32)
    with tf.control_dependencies([begun.node()]):
      check = tf.debugging.check_numerics(bad, "the other op")

    def run():
      with pytest.raises(InvalidArgument, match="the other op"):
        session.run([waits, check], {bad: np.nan})

    in_threads(run)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("what", ["gather", "wait"])
def test_a_wait_that_is_cancelled(what, early):
  """While it waits, or before."""
  rounds = eager(2)
  handle, manager = rounds.handle, cancellation.CancellationManager()
  begun = Begun(manager.start_cancel if early else lambda: None)

  @tf.function
  def function():
    return waits_of(handle, begun)[what]

  run = manager.get_cancelable_function(function.get_concrete_function())

  def cancelled():
    with pytest.raises(Cancelled, match=(
        ".*round 0 of averaging rounds '.*' was cancelled: its step or ")):
      run()

  in_threads(cancelled, *[] if early else [
      lambda: begun.then(manager.start_cancel)])
  assert all(rounds.push(w, 0) for w in "aba")


def test_a_container_that_is_cleared():
  begun = Begun()
  server = tf.distribute.Server.create_local_server()
  with tf.Graph().as_default():
    rounds = ops.averaging_rounds(2, "cleared", container="cleared")
    first = ops.averaging_next(rounds, 0, reset=True)
    wait = waits_of(rounds, begun)["wait"]
    session = tf1.Session(server.target)  # The server forgets it.
    session.run(first)

    def run():
      with pytest.raises((Aborted, Cancelled)):
        session.run(wait)

    in_threads(run, lambda: begun.then(
        lambda: tf1.Session.reset(server.target, ["cleared"])))


# Of the two rounds, one is short of a worker. At the end, threads wait, and one
# is called to its deadline again and again.
PROGRAM = """
import faulthandler, threading, time
faulthandler.dump_traceback_later(60, exit=True)
import tensorflow as tf
from wrapopt import ops
rounds = ops.averaging_rounds(2, "program")
for r, workers in (0, ["a"]), (1, ["a", "b"]):
  for worker in workers:
    ops.averaging_push(rounds, worker, r, [])
  ops.averaging_gather(rounds, r, 1, 0.01)

def wait(seconds):
  while True:
    try:
      ops.averaging_wait(rounds, 1, seconds)
    except tf.errors.DeadlineExceededError:
      pass

with tf.Graph().as_default():
  session = tf.compat.v1.Session()
  waits = ops.averaging_wait(ops.averaging_rounds(1, "session"), -1, 600.)
for target, args in ((wait, [600.]), (wait, [1e-3]), (session.run, [waits])):
  threading.Thread(target=target, args=args, daemon=True).start()
time.sleep(0.3)
print("done")
"""


def test_a_process_logs_and_ends_while_threads_wait():
  process = run_python("-c", PROGRAM, TF_CPP_MIN_LOG_LEVEL="0")
  assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
  assert ("Round 0 of averaging rounds 'program' is made of 1 of 2 workers: "
          "'a'.") in process.stderr
  assert "Round 1" not in process.stderr


def test_a_client_that_is_killed(tmp_path):
  path = tmp_path / "begun"
  with _cluster.Cluster(averaging_task.FUNCTIONS, preload=["averaging_task"],
                        ps=1, worker=1) as cluster:
    victim = cluster.tasks["worker", 0]
    victim.tell("gather", shared_name="killed", path=str(path))
    with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
      record = ops.staleness_record(averaging_task.gate()[0])
      rounds = ops.averaging_rounds(2, "killed")
      push = {w: ops.averaging_push(rounds, w, 0, [[1.]]) for w in "ab"}
      with tf1.Session(f"grpc://{cluster.spec['ps'][0]}",
                       config=tf1.ConfigProto(
                           device_filters=["/job:ps"])) as session:
        until(path.exists)
        time.sleep(SOON)
        assert session.run(record)[1] == 1
        victim.kill()
        # Its step is over on the server, too: the ticket is gone.
        until(lambda: session.run(record)[1] == 0)
        # So nobody has gathered these, and they may be replaced.
        assert all(session.run(push[w]) for w in "aba")


def until(condition):
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.02)


# Means

# Around the size of a block; the odd ones put the others at odd addresses.
SHAPES = [(), (3,), (0,), (2, 5), (511,), (1,), (512,), (3, 0), (513,),
          (2, 3001)]


def flat(arrays):
  return np.concatenate([np.ravel(a) for a in arrays])


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_mean(mode, dtype, m):
  rng = np.random.default_rng(m)
  rounds = opened(mode, 5)
  given = {f"w{k}": [random(rng, shape, dtype) for shape in SHAPES]
           for k in range(m)}
  centers = [mode.variable(np.full(shape, np.nan, dtype)) for shape in SHAPES]
  for worker, values in given.items():
    rounds.push(worker, 0, flat(values))
  rounds.mean(0, list(given), centers)
  for i, got in enumerate(mode.values(centers)):
    assert got.dtype == dtype
    numerics.assert_close(got, *numerics.mean([x[i] for x in given.values()]),
                          f"of shape {SHAPES[i]}")


LARGE = {HALF: 40000, BFLOAT16: 2.0**127, FLOAT: 2.0**127, DOUBLE: 2.0**1023}


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_mean_of_equal_values_is_exact(mode, dtype, m):
  large = LARGE[dtype]
  value = [*random(np.random.default_rng(0), 2000, dtype), large, -large]
  if m == 1:
    value += [-0.0, 0, np.inf, -np.inf, 2**-24]
  value = np.array(value, dtype)
  rounds = opened(mode, m)
  center = mode.variable(np.full(value.size, np.nan, dtype))
  for k in range(m):
    rounds.push(str(k), 0, value)
  rounds.mean(0, [str(k) for k in range(m)], [center])
  numerics.assert_same_bits(mode.values([center])[0], value)


# Runs in a process for each instruction set.
ON_ISA = """
import sys
import ml_dtypes
import numpy as np
import tensorflow as tf
from wrapopt import ops

results = {}
with np.load(sys.argv[1]) as given:
  for name in given:
    values = given[name].view(getattr(ml_dtypes, name, name))
    handle = ops.averaging_rounds(3, name)
    centers = [tf.Variable(np.zeros(shape, values.dtype))
               for shape in eval(sys.argv[3])]
    for worker, value in zip("abc", values):
      ops.averaging_push(handle, worker, 0, [value])
    ops.averaging_mean(handle, 0, list("abc"), centers)
    mean = np.concatenate([np.ravel(c.numpy()) for c in centers])
    results[name] = mean.view(f"u{mean.itemsize}")
np.savez(sys.argv[2], **results)
"""


def specials(dtype):
  """Three values: random numbers, infinities, NaNs and extremes."""
  rng = np.random.default_rng(3)
  size = sum(math.prod(shape) for shape in SHAPES)
  values = [random(rng, size, dtype) for _ in range(3)]
  numbers = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 2**-24, 2**-14, 1e-3])
  for value in values:
    value[rng.permutation(size)[:numbers.size]] = numbers.astype(dtype)
  return values


def test_instruction_sets_agree_bit_for_bit(tmp_path):
  isas = _native.cpu_isas()
  assert len(isas) > 1
  given = {dtype.name: specials(dtype) for dtype in DTYPES}
  np.savez(tmp_path / "given.npz", **{
      name: np.stack(values).view(f"u{values[0].itemsize}")
      for name, values in given.items()})
  results = {}

  def run(isa):
    path = str(tmp_path / isa) + ".npz"
    process = run_python("-c", ON_ISA, str(tmp_path / "given.npz"), path,
                         str(SHAPES), WRAPOPT_CPU_ISA=isa)
    assert process.returncode == 0, process.stderr
    with np.load(path) as loaded:
      results[isa] = {dtype: loaded[dtype.name].view(dtype)
                      for dtype in DTYPES}

  in_threads(*[lambda isa=isa: run(isa) for isa in isas])
  for dtype in DTYPES:
    for isa in isas:
      numerics.assert_same_numbers(results[isa][dtype],
                                   results["baseline"][dtype], isa)
    with np.errstate(invalid="ignore"):
      want, tolerance = numerics.mean(given[dtype.name])
    finite = np.isfinite(want)
    got = results["baseline"][dtype].astype(DOUBLE)
    numerics.assert_close(got[finite], want[finite], tolerance[finite])
    assert not np.isfinite(got[~finite]).any()


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_large_mean_runs_in_parallel_to_the_same_bits(use_resource):
  rng = np.random.default_rng(2)
  sizes = [700_001, 3, 0, 300_000, 513]
  given = [random(rng, sum(sizes), FLOAT) for _ in range(3)]
  results = []
  for threads in (1, 4):
    graph = modes.Graph(use_resource, intra_op_parallelism_threads=threads,
                        use_per_session_threads=True)
    with graph.entered() as mode:
      rounds = opened(mode, 3)
      centers = [mode.variable(np.zeros(size, FLOAT)) for size in sizes]
      for worker, value in zip("abc", given):
        evaluate(mode, lambda: ops.averaging_push(  # pylint: disable=cell-var-from-loop
            rounds.handle, worker, 0,  # pylint: disable=cell-var-from-loop
            [tf1.placeholder_with_default(value, value.shape)]))  # pylint: disable=cell-var-from-loop
      rounds.mean(0, list("abc"), centers)
      results.append(flat(mode.values(centers)))
  numerics.assert_same_bits(*results)
  numerics.assert_close(results[0], *numerics.mean(given))


def test_which_of_the_values(mode):
  rounds = opened(mode, 2)
  half = mode.variable(np.zeros(2, HALF))
  double = [mode.variable(np.zeros(shape, DOUBLE)) for shape in ((), (2, 1))]
  rounds.push("a", 0, np.array([1, 2], HALF), np.array([3, 4, 5], DOUBLE))
  rounds.push("b", 0, np.array([3, 4], HALF), np.array([5, 6, 7], DOUBLE))
  rounds.mean(0, ["b", "a"], double, value=1)
  rounds.mean(0, ["a", "b"], half)
  assert [x.tolist() for x in mode.values([half, *double])] == [
      [2, 3], 4, [[5], [6]]]


@modes.only(*modes.graphs())
def test_one_op_serves_all_centers(mode):
  centers = [mode.uninitialized(np.float32(0)) for _ in range(400)]
  rounds = opened(mode, 1)
  rounds.push("a", 0, np.arange(400, dtype=np.float32))
  known = set(mode.graph.get_operations())
  handle = rounds.handle
  op = ops.averaging_mean(handle, 0, ["a"], centers)
  assert op.type == {"graph": "Wrapopt>AveragingMean",
                     "ref-graph": "Wrapopt>AveragingMeanRef"}[mode.name]
  added = [op.type for op in mode.graph.get_operations() if op not in known]
  assert set(added) == {"Cast", "Const", "Wrapopt>AveragingRounds", op.type}
  assert added.count(op.type) == 1
  mode.session.run(tf1.global_variables_initializer())
  mode.session.run(op)
  assert flat(mode.values(centers)).tolist() == list(range(400))


@modes.only(*modes.graphs(device_count={"CPU": 2}))
@pytest.mark.parametrize("scope", [None, "/cpu:0", "/device:GPU:7"])
def test_ops_run_where_the_rounds_are(mode, scope):
  with tf.device("/device:CPU:1"):
    center = mode.variable([0.])
    handle = ops.averaging_rounds(1, "placed")
  with tf.device("/device:CPU:0"):
    elsewhere = ops.averaging_rounds(1, "placed")
  with tf.device(scope):
    op = [ops.averaging_next(handle, 0, reset=True),
          ops.averaging_push(handle, "a", 0, [[1.]]).op,
          ops.averaging_gather(handle, 0, 1, 1.),
          ops.averaging_mean(handle, 0, ["a"], center),
          ops.averaging_wait(handle, -1, 1.)]
  for node in op:
    assert getattr(node, "op", node).device == "/device:CPU:1"
    mode.session.run(node)
  assert mode.values([center])[0] == 1
  # Another device has other rounds of that name.
  assert mode.session.run(ops.averaging_wait(elsewhere, 0, 1.)) == -1


def test_in_a_function_ops_run_in_their_order():
  center = tf.Variable([0., 0.])
  handle = eager(1).handle
  traces = []

  @tf.function
  def step(r, value):
    traces.append(r)
    ops.averaging_push(handle, "a", r, [value])
    came = ops.averaging_gather(handle, r, 1, 10.)
    ops.averaging_mean(handle, r, came, center)
    return ops.averaging_next(handle, r)

  r = tf.constant(0, tf.int64)
  for k in range(3):
    r = step(r, tf.constant([k, 1.]))
    assert center.numpy().tolist() == [k, 1] and r == k + 1
  assert len(traces) == 1


# Whose buffers


@modes.only(*modes.graphs())
def test_only_what_somebody_else_holds_is_copied(mode):
  """By the memory that the op allocates."""
  size = 1 << 18
  v = mode.variable(np.zeros(size, np.float32))
  fed = tf1.placeholder(tf.float32, [size])
  handle = ops.averaging_rounds(9, "copies")
  values = {"variable": v, "fed": fed, "of an op": tf.concat([v, v], 0),
            "of a constant": tf.zeros([size])}
  temporary = {}
  for name, value in values.items():
    push = ops.averaging_push(handle, name, 0, [value], name="push")
    metadata = tf1.RunMetadata()
    mode.session.run(push, {fed: np.zeros(size, np.float32)},
                     run_metadata=metadata, options=tf1.RunOptions(
                         trace_level=tf1.RunOptions.FULL_TRACE))
    (temporary[name],) = [
        node.memory_stats.temp_memory_size
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats if node.node_name == push.op.name]
  assert temporary == {"variable": 4 * size, "fed": 4 * size, "of an op": 0,
                       "of a constant": 4 * size}


def test_a_variable_may_change_after_it_was_pushed(mode):
  rounds = opened(mode, 1)
  v, center = mode.variable(np.ones(64)), mode.variable(np.zeros(64))
  rounds.push("a", 0, v)
  mode.run(lambda: tf1.assign_add(v, np.full(64, 5.)))
  rounds.mean(0, ["a"], center)
  assert mode.values([center, v])[0].tolist() == [1] * 64


@modes.only(*modes.graphs())
def test_an_array_may_change_after_it_was_fed(mode):
  # So aligned, a session takes it as it is.
  raw_bytes = np.zeros(8 * 128 + 64, np.uint8)
  start = -raw_bytes.ctypes.data % 64
  array = raw_bytes[start:start + 8 * 128].view(np.float64)
  array[:] = 1
  rounds = opened(mode, 1)
  center = mode.variable(np.zeros(128))
  fed = tf1.placeholder(tf.float64, [128])
  mode.session.run(ops.averaging_push(rounds.handle, "a", 0, [fed]),
                   {fed: array})
  array[:] = 7
  rounds.mean(0, ["a"], center)
  assert mode.values([center])[0].tolist() == [1] * 128


def test_a_tensor_outlives_what_becomes_of_its_values():
  rounds = eager(1)
  center = tf.Variable(np.zeros(64))
  value = tf.constant(np.ones(64)) + 0
  rounds.push("a", 0, value)
  before = center.read_value()
  rounds.mean(0, ["a"], center)
  rounds.next(0)
  assert value.numpy().tolist() == [1] * 64 == center.numpy().tolist()
  assert before.numpy().tolist() == [0] * 64


# Refusals


def good(mode, dtype=FLOAT):
  """Rounds with values of a and b, and two centers."""
  rounds = opened(mode, 3)
  rounds.push("a", 0, np.arange(3).astype(dtype))
  rounds.push("b", 0, np.arange(3).astype(dtype))
  return rounds, [mode.variable(np.full(n, 7).astype(dtype), name=name)
                  for n, name in ((1, "one"), (2, "two"))]


OF_B, B = "value 0 of worker 'b' ", np.zeros(3, FLOAT)


@pytest.mark.parametrize("pushed, workers, value, text", [
    ([B], "", 0, "workers must name at least one worker, got none"),
    ([B], "aba", 0, "workers must name each worker once, got 'a' twice"),
    ([B[:0]], "ab", 0, OF_B + r"misshapen: got \[0\] but expected \[3\] \(the "
     "elements of the 2 centers."),
    ([np.zeros(4, FLOAT)], "ab", 0, OF_B + r"misshapen: got \[4\] but"),
    ([B[None]], "ab", 0, OF_B + r"misshapen: got \[1,3\] but expected \[3\]"),
    ([B.astype(HALF)], "ab", 0, OF_B + r"must be of dtype float \(the dtype of "
     r"the centers\), got half"),
    ([], "b", 0, "value must be less than 0, the "),
    ([B], "b", 1, "value must be less than 1, the number of values that worker "
     "'b' pushed to averaging rounds '.*', got 1"),
])
def test_a_mean_that_is_refused(mode, pushed, workers, value, text):
  rounds, centers = good(mode)
  evaluate(mode, lambda: ops.averaging_push(rounds.handle, "b", 0, pushed))
  workers = tf1.placeholder_with_default(
      tf.constant([*workers], tf.string), [None])
  refused(mode, centers, InvalidArgument, text, lambda: ops.averaging_mean(
      rounds.handle, 0, workers, centers, value))


def test_names_that_are_no_vector_and_a_center_twice(mode):
  rounds, centers = good(mode)
  refused(mode, centers, at_build(mode, InvalidArgument),
          r"workers misshapen: got \[\] but expected \[M\]",
          lambda: ops.averaging_mean(rounds.handle, 0, "a", centers))
  refused(mode, centers, InvalidArgument,
          rf"centers\[0\] {called('one')} and centers\[1\] {called('one')} are "
          "one variable: a variable that is updated must be named once",
          lambda: ops.averaging_mean(rounds.handle, 0, ["a"], centers[:1] * 2))


@modes.only(*modes.graphs())
def test_an_uninitialized_center(mode):
  rounds, (one, _) = good(mode)
  late = mode.uninitialized(np.zeros(2, FLOAT), name="late")
  text = {"graph": r"centers\[1\] \(variable 'late'\) is not initialized: run "
                   "its initializer first",
          "ref-graph": "uninitialized value late"}[mode.name]
  refused(mode, [one], FailedPrecondition, text,
          lambda: ops.averaging_mean(rounds.handle, 0, ["a"], [one, late]))


def test_a_handle_of_something_else(mode):
  rounds, centers = good(mode)
  table = lambda: tf.raw_ops.HashTableV2(  # pylint: disable=g-long-lambda-assignment
      key_dtype=tf.int64, value_dtype=tf.int64, shared_name="table")
  for build in (
      lambda h: ops.averaging_push(h, "a", 0, []),
      lambda h: ops.averaging_gather(h, 0, 1, 1.),
      lambda h: ops.averaging_mean(h, 0, ["a"], centers),
      lambda h: ops.averaging_next(h, 0),
      lambda h: ops.averaging_wait(h, 0, 1.)):
    refused(mode, centers, InvalidArgument,
            "rounds must be those of Wrapopt>AveragingRounds on this device: ",
            lambda: build(table()))  # pylint: disable=cell-var-from-loop
  if mode.name != "ref-graph":
    refused(mode, centers, InvalidArgument,
            r"centers\[0\] .* is not a variable",
            lambda: raw.wrapopt_averaging_mean(
                rounds.handle, 0, ["a"], [table()], T=tf.float32))


@pytest.mark.parametrize("min_workers", [0, -1, 4])
def test_a_number_of_workers_out_of_range(mode, min_workers):
  rounds, centers = good(mode)
  refused(mode, centers, InvalidArgument,
          r"min_workers must be in \[1, 3\], the num_workers of averaging "
          f"rounds '{rounds.name}', got {min_workers}",
          lambda: ops.averaging_gather(rounds.handle, 0, min_workers, 1.))


@pytest.mark.parametrize("timeout_secs", [0., -1., math.nan, -math.inf])
def test_a_timeout_out_of_range(mode, timeout_secs):
  rounds, centers = good(mode)
  text = ("must be greater than 0, infinity for no deadline, got "
          f"{timeout_secs:.4g}")
  for build in (lambda t: ops.averaging_gather(rounds.handle, 0, 1, t),
                lambda t: ops.averaging_wait(rounds.handle, 0, t)):
    for given, error in (
        (lambda: timeout_secs, at_build(mode, InvalidArgument)),
        (lambda: tf.constant(timeout_secs), at_build(mode, InvalidArgument)),
        (lambda: tf1.placeholder_with_default(timeout_secs, None),
         InvalidArgument)):
      refused(mode, centers, error, "timeout_secs " + text,
              lambda: build(given()))  # pylint: disable=cell-var-from-loop


SCALARS = {
    "push": ("rounds", "worker", "round"),
    "gather": ("rounds", "round", "min_workers", "timeout_secs"),
    "mean": ("rounds", "round"),
    "mean_ref": ("rounds", "round"),
    "next": ("rounds", "round"),
    "wait": ("rounds", "round", "timeout_secs"),
}
OUTPUTS = {"push": 0, "gather": 1, "next": 0, "wait": 0}


def arguments(op, changed):
  """Placeholders for a raw op, with some other shapes; None is unknown."""
  def placeholder(name, dtype, shape=()):
    shape = changed.get(name, shape)
    return tf1.placeholder(dtype, None if shape is None else list(shape))

  made = {"rounds": placeholder("rounds", tf.resource),
          "round": placeholder("round", tf.int64)}
  if op == "push":
    made.update(worker=placeholder("worker", tf.string),
                values=[tf1.placeholder(tf.float32)])
  if op == "gather":
    made.update(min_workers=placeholder("min_workers", tf.int64))
  if op in ("gather", "wait"):
    made.update(timeout_secs=placeholder("timeout_secs", tf.float64))
  if op.startswith("mean"):
    made.update(workers=placeholder("workers", tf.string, [2]),
                centers=[handle_of(op == "mean_ref", tf.float32, [2])])
  if op == "mean":
    made.update(T=tf.float32)
  return made


@pytest.mark.parametrize("op", SCALARS)
def test_shapes(op):
  function = getattr(raw, f"wrapopt_averaging_{op}")
  with tf.Graph().as_default():
    for changed in ({}, dict.fromkeys((*SCALARS[op], "workers"))):
      made = function(**arguments(op, changed))
      if op in OUTPUTS:
        assert made.shape.rank == OUTPUTS[op]
    for name in SCALARS[op]:
      with pytest.raises(ValueError, match=(
          rf"{name} misshapen: got \[1\] but expected \[\] \(a scalar\)")):
        function(**arguments(op, {name: [1]}))
    if op.startswith("mean"):
      with pytest.raises(ValueError, match=r"workers misshapen: got \[2,2\]"):
        function(**arguments(op, {"workers": [2, 2]}))
    if op == "mean":
      with pytest.raises(ValueError, match=(
          r"centers\[0\] must be of dtype double, the op's, got float")):
        function(**{**arguments(op, {}), "T": tf.float64})


@pytest.mark.parametrize("op", ["push", "gather", "mean", "next", "wait"])
def test_shapes_that_show_when_it_runs(op):
  rounds = eager(1)
  rounds.push("a", 0)
  center = tf.Variable([7.])
  given = {"rounds": rounds.handle, "round": tf.constant(0, tf.int64),
           "worker": tf.constant("a"), "min_workers": tf.constant(1, tf.int64),
           "timeout_secs": tf.constant(1, tf.float64),
           "workers": tf.constant(["a"])}
  more = {"push": {"values": [tf.constant([1.])]},
          "mean": {"workers": tf.constant(["a"]), "centers": [center.handle],
                   "T": tf.float32}}
  for name in (*SCALARS[op], *(["workers"] if op == "mean" else [])):
    @tf.function(input_signature=[tf.TensorSpec(None, given[name].dtype)])
    def run(bad):
      kept = {**{k: given[k] for k in SCALARS[op]}, **more.get(op, {}),
              name: bad}  # pylint: disable=cell-var-from-loop
      made = getattr(raw, f"wrapopt_averaging_{op}")(**kept)
      return None if op == "mean" else made

    with pytest.raises(InvalidArgument, match=f"{name} misshapen: got "):
      run(tf.expand_dims(given[name], 0))
  assert center.numpy() == 7


def test_what_the_functions_refuse():
  rounds = eager(2)
  handle = rounds.handle
  v, w = tf.Variable([1.]), tf.Variable([1], dtype=tf.int32)
  double = tf.Variable([1.], dtype=tf.float64)
  mean = lambda *centers, value=0: ops.averaging_mean(  # pylint: disable=g-long-lambda-assignment
      handle, 0, ["a"], list(centers), value)
  for build, error, text in (
      (lambda: ops.averaging_rounds(0, "a"), InvalidArgument,
       "'num_workers' of 0 must be at least minimum 1"),
      (lambda: ops.averaging_rounds(2, ""), ValueError,
       "`shared_name` must name the rounds, got an empty string"),
      (lambda: ops.averaging_push(handle, "a", 0, [[1.], [1]]), TypeError,
       r"`values\[1\]` must be of dtype float16 or .*, got int32"),
      (lambda: mean(), ValueError, "`centers` must hold at least one variable"),
      (lambda: mean(v, [1.]), TypeError, r"`centers\[1\]` must be a variable"),
      (lambda: mean(w), TypeError,
       r"`centers\[0\]` .*must be of dtype float16"),
      (lambda: tf.function(mean)(v, double), ValueError,
       r"centers\[1\] must be of dtype float, the op's, got double"),
      (lambda: mean(v, value=-1), InvalidArgument,
       "'value' of -1 must be at least minimum 0")):
    with pytest.raises(error, match=text):
      build()
  assert rounds.gather(0, 1, 0.01) if rounds.push("a", 0) else False


@modes.only(*modes.graphs(device_count={"CPU": 2}))
def test_centers_that_do_not_go_together(mode):
  handle = ops.averaging_rounds(1, "centers")
  other = modes.Graph(mode.name != "graph")
  v = mode.uninitialized([1.], name="v")
  with tf.device("/cpu:1"):
    far = mode.uninitialized([1.], name="far")
  with pytest.raises(ValueError, match=(
      r"`centers\[1\]` \('far:0'\) must be on the device of `centers\[0\]` "
      r"\('v:0'\), '', got '/device:CPU:1'. Each device has rounds of its "
      "own")):
    ops.averaging_mean(handle, 0, ["a"], [v, far])
  with pytest.raises(TypeError, match=r"`centers\[1\]` \('u:0'\) must be a "
                     r"(ref|resource) variable as centers\[0\]"):
    ops.averaging_mean(handle, 0, ["a"], [v, other.uninitialized([1.], "u")])
