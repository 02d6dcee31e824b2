"""Averaging rounds on servers: members, means, outer steps and waits."""

import math
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

from averaging_server import Server, opened, raw_op
import averaging_task
from averaging_task import FIRST
import codes
import isas
import modes
from modes import tf1
from modes import uncompiled_mode as mode  # pylint: disable=unused-import
import numerics
from numerics import BFLOAT16, DOUBLE, DTYPES, FLOAT, HALF, random
from processes import run_python, wait_until
from threads import in_threads
from wrapopt import ops
from wrapopt._loader import ops as raw
from wrapopt.examples import _cluster

Aborted = tf.errors.AbortedError
Cancelled = tf.errors.CancelledError
InvalidArgument = tf.errors.InvalidArgumentError

SOON = 0.1  # Seconds.


def is_closed(known):
  return known[0].split()[2] == b"1"


def of_center(dtype):
  """The dtype of the mean of such values."""
  return tf.float64 if dtype == DOUBLE else tf.float32


# Rounds


def test_a_trajectory(mode):
  server = Server(mode, sizes=[3])
  variables = [mode.variable(np.zeros(2, FLOAT)), mode.variable(FLOAT.type(0)),
               mode.variable(np.int64(0))]
  assert server.place == (-1, 0)
  assert server.run("restore", "a", 0, FIRST, 0)
  assert not server.run("restore", "a", 0, (5, 2), 0)
  # Of round r, the mean of (r, 0, 1) and (r + 4, 2, 1).
  for r in range(3):
    place = (r, 1)
    assert server.place == place
    for worker, value in ("b", [r, 0, 1]), ("a", [r + 4, 2, 1]):
      known = server.enter(worker, place=place)
      assert server.stage(worker, known, np.array(value, FLOAT))
      assert list(server.run("state").numbers[:3]) == [0, 0, 1]
      accepted, known = server.run("arrive", worker, known)
      assert accepted and not is_closed(known)
      turn, _ = server.run("enter", worker, 0, place, 1, 9., 9.)
      assert turn == -1
    known = server.close(2, place)
    assert is_closed(known) and list(known[1:]) == [b"a", b"b"]
    for _ in range(2):  # The second has no effect.
      assert server.mean(known, variables, [2]) == (r + 1, 1)
    assert [x.tolist() for x in mode.values(variables)] == [
        [r + 2, 1], 1, r + 1]


def test_outer_steps(mode):
  server = Server(mode, holds_center=True, dtypes=[tf.float32, tf.float64],
                  sizes=[2, 1])

  def read(index=0, **kwargs):
    place, value = server.run(
        "center", "a", index, 1, 9., T=[tf.float32, tf.float64][index],
        **kwargs)
    return (*place, *value)

  server.restore(np.array([10, 20], FLOAT), np.ones(1), place=(3, 4))
  assert read() == (3, 4, 10, 20)
  # The mean is (2 + 3 * 10, 12 + 3 * 28) / 4 = (8, 24), so D = (2, -4) is the
  # velocity, and the step is 0.5 (D + 0.5 D) = (1.5, -3).
  assert server.bring("a", np.array([2, 12], FLOAT), np.array([3.]),
                      place=(3, 4))
  assert server.bring("b", np.array([10, 28], FLOAT), np.array([7.]),
                      place=(3, 4), weight=3.)
  known = server.close(2, (3, 4))
  for _ in range(2):
    assert tuple(server.run("outer_step", known, 0.5, 0.5, 1)) == (4, 4)
  assert read() == (4, 4, 8.5, 23) and read(what="velocities") == (
      4, 4, 2, -4)
  assert read(1) == (4, 4, 6)  # It takes no such steps.
  # Now D = 0, so the velocity halves, and the step is 0.25 of it.
  for worker in "ab":
    assert server.bring(worker, np.array([8.5, 23], FLOAT), np.zeros(1),
                        place=(4, 4))
  server.run("outer_step", server.close(2, (4, 4)), 0.5, 0.5, 1)
  assert read() == (5, 4, 8.25, 23.5) and read(what="velocities")[2:] == (
      1, -2)
  assert list(server.run("state").numbers[:3]) == [2, 1, 0]


def test_several_vectors_in_a_call(mode):
  server = Server(mode, 1, holds_center=True, dtypes=[tf.float32] * 3,
                  sizes=[2, 0, 3])
  server.restore(np.arange(5, dtype=FLOAT), count=3)
  read = lambda index, count: server.run(
      "center", "a", index, count, 9., T=tf.float32).value.tolist()
  assert read(0, 3) == [0, 1, 2, 3, 4]
  assert read(0, 2) == [0, 1] and read(1, 1) == [] and read(1, 2) == [2, 3, 4]
  known = server.enter("a")
  # The values may come in parts, in any order, and in half precision.
  assert server.stage("a", known, HALF.type([7, 8, 9]), count=3, first=2)
  assert server.stage("a", known, HALF.type([5, 6]), HALF.type([]), count=3)
  assert server.run("arrive", "a", known).accepted
  server.run("outer_step", server.close(1), 1., 0., 3)
  assert read(0, 3) == [5, 6, 7, 8, 9]


def code_of(x, dtype):
  return codes.encode(FLOAT.type(x), dtype)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("dtype", codes.DTYPES)
def test_codes_travel(mode, dtype):
  sizes, rate, momentum = [130, 3, 200], FLOAT.type(0.7), FLOAT.type(0.9)
  server = Server(mode, 2, holds_center=True, dtypes=[tf.float32] * 3,
                  sizes=sizes, travels=dtype)
  rng = np.random.default_rng(7)
  normal = lambda: [rng.normal(size=n).astype(FLOAT) for n in sizes]

  def read(what="center"):
    place, value = server.run("center", "a", 0, 3, 9., what=what,
                              T=tf.uint8 if what == "codes" else tf.float32)
    return tuple(place), value

  center, errors = normal(), [np.zeros(n, FLOAT) for n in sizes]
  velocities = [np.zeros(n, FLOAT) for n in sizes[:2]]
  server.restore(*center)
  for what in "codes", "errors":
    with pytest.raises(tf.errors.FailedPreconditionError, match=(
        f"index must be less than 0, the number of values of the {what} of")):
      read(what)
  for r in range(4):
    mean = None
    for worker, weight in ("a", 1.), ("b", 3.):
      sent = [code_of(x, dtype) for x in normal()]
      # All vectors are one value.
      known = server.enter(worker, place=(r, 1))
      assert server.stage(worker, known, np.concatenate([c for c, _ in sent]),
                          weight=weight, count=3)
      assert server.run("arrive", worker, known).accepted
      by = FLOAT.type(weight / (1 if mean is None else 4))
      mean = [y if mean is None else m + by * (y - m)
              for m, (_, y) in zip(mean or sent, sent)]
    known = server.close(2, (r, 1))
    for _ in range(2):
      assert tuple(server.run("outer_step", known, rate, momentum, 2)) == (
          r + 1, 1)
    updates = list(mean)  # Of the last vector, which takes no outer step.
    for i in range(2):
      velocities[i] = momentum * velocities[i] - mean[i]
      updates[i] = 0 - (rate * -mean[i] + momentum * velocities[i] * rate)
    coded = [code_of(u + e, dtype) for u, e in zip(updates, errors)]
    errors = [u + e - y for u, e, (_, y) in zip(updates, errors, coded)]
    center = [c + y for c, (_, y) in zip(center, coded)]
    for what, want in (("center", center), ("errors", errors),
                       ("codes", [c for c, _ in coded])):
      place, got = read(what)
      assert place == (r + 1, 1)
      np.testing.assert_array_equal(got, np.concatenate(want))
  # A round without values moves nothing, and has no code.
  for worker in "ab":
    known = server.enter(worker, place=(4, 1))
    assert server.stage(worker, known, weight=0.)
    assert server.run("arrive", worker, known).accepted
  server.run("outer_step", server.close(2, (4, 1)), rate, momentum, 2)
  np.testing.assert_array_equal(read()[1], np.concatenate(center))
  with pytest.raises(tf.errors.FailedPreconditionError):
    read("codes")
  np.testing.assert_array_equal(read("errors")[1], np.concatenate(errors))
  # A restored center has the errors and velocities of the worker, or none.
  server.restore(*center, *errors, *velocities, place=(3, 2), generation=1)
  assert list(server.run("state").numbers[:2]) == [3, 2]
  np.testing.assert_array_equal(read("errors")[1], np.concatenate(errors))
  server.restore(*center, place=(3, 3), generation=2)
  with pytest.raises(tf.errors.FailedPreconditionError):
    read("errors")


def test_four_workers_read_at_a_time(mode):
  server = Server(mode, holds_center=True)
  server.restore([7.])
  read = lambda worker, timeout_secs=math.inf: server.run(
      "center", worker, 0, 1, timeout_secs, T=tf.float32).value.tolist()
  for worker in "abcda":
    assert read(worker) == [7]
  with pytest.raises(tf.errors.DeadlineExceededError, match=(
      "round 0 of averaging rounds '.*' gave no turn to read within 0.1 sec")):
    read("e", 0.1)
  assert not server.run("release", "c", -1)
  assert read("e") == [7]


@pytest.mark.parametrize("of, workers, changed", [
    ("3, vectors float[1] in variables, settings ''", 3, {}),
    ("2, vectors float[2] in variables, settings ''", 2, {"sizes": [2]}),
    ("2, vectors double[1] in variables, settings ''", 2,
     {"dtypes": [tf.float64]}),
    ("2, vectors float[1], settings ''", 2, {"holds_center": True}),
    ("2, vectors float[1] that travel as int4, settings ''", 2,
     {"holds_center": True, "travels": "int4"}),
    ("2, vectors float[1] in variables, settings 's'", 2, {"settings": "s"})])
def test_the_same_name_is_the_same_rounds(mode, of, workers, changed):
  server = opened(mode)
  with pytest.raises(InvalidArgument) as e:
    assert Server(mode, workers, server.name, **changed).place
  assert (f"averaging rounds '{server.name}' have num_workers = 2, vectors "
          f"float[1] in variables, settings '', got num_workers = {of}: all "
          "workers of a job must give the same, and other jobs another name"
          ) in str(e.value)
  assert Server(mode, 2, server.name).place == FIRST


def test_the_first_line_of_settings_that_differs_is_told(mode):
  of = lambda name, *lines: Server(  # pylint: disable=g-long-lambda-assignment
      mode, name=name, holds_center=True, settings="\n".join(lines))
  server = of(None, "a = 1", "b = 2\t(told)", "c = 3")
  assert server.run("join", "a", 1, False) == 1
  assert of(server.name, "a = 1", "b = 2\t(of another)", "c = 3").place == (
      -1, 0)
  for lines, text in ((["a = 1", "b = 4\t(x)", "c = 5"],
                       r"have b = 2 \(told\), got b = 4 \(x\): all workers"),
                      (["a = 1", "b = 2"],
                       "(?s)have num_workers = 2, .* got num")):
    with pytest.raises(InvalidArgument, match=text):
      assert of(server.name, *lines).place


def test_workers_join(mode):
  """For all that the lead knows of them, see cc/rounds_test."""
  server = Server(mode)
  join = lambda worker, process, resumes=False: server.run(
      "join", worker, process, resumes)
  assert [join("a", 1), join("a", 1), join("b", 2)] == [1, 1, 2]
  with pytest.raises(InvalidArgument, match="'a' of .* is another process alr"):
    join("a", 3)
  assert [join("a", 3, True), join("a", 3)] == [2, 2]
  # The place of a worker that has left is free.
  leave = lambda *args: server.run("leave", *args)
  assert [leave("b", 1), leave("b", 2), leave("b", 2)] == [False, True, True]
  assert server.run("state").left.tolist() == [b"b"]
  assert join("c", 4, True) == 2 and not server.run("state").left.size


def test_jobs_are_listed_and_dropped():
  mode = modes.Eager()
  server = Server(mode, holds_center=True, settings="s")
  server.restore([7.], job=42)
  assert not Server(mode, holds_center=True, settings="s",
                    container="another").run("state").numbers[4]
  assert opened(mode).place == FIRST  # It holds no center.
  listed = raw.wrapopt_averaging_list()
  i = listed.names.numpy().tolist().index(server.name.encode())
  assert listed.settings[i] == b"s"
  assert listed.numbers[i].numpy().tolist() == [0, 1, 42, 0, 4]
  *_, number, job = server.run("state").numbers
  assert number > 0 and job == 42
  assert raw.wrapopt_averaging_drop(server.name)
  assert not raw.wrapopt_averaging_drop(server.name)
  assert not raw.wrapopt_averaging_drop("no rounds")
  again = Server(mode, holds_center=True, name=server.name)
  assert again.place == (-1, 0) and again.run("state").numbers[3] != number


def test_other_names_and_containers_are_other_rounds(mode):
  one = opened(mode)
  two, three = Server(mode, 3), Server(mode, 4, one.name, container="another")
  assert two.run("restore", "", 0, (7, 3), 0)
  assert [s.place for s in (one, two, three)] == [FIRST, (7, 3), (-1, 0)]


@modes.only(*modes.graphs())
def test_rounds_without_a_name_are_nobody_else_s(mode):
  a, b = (averaging_task.rounds("") for _ in range(2))
  assert mode.session.run(averaging_task.opened(a))
  assert [tuple(mode.session.run(raw_op("state")(x).place))
          for x in (a, b)] == [FIRST, (-1, 0)]


def test_workers_end_rounds_and_count_once():
  """Each of them runs all ops, in threads."""
  workers, rounds = "abcd", 6
  server = opened(modes.Eager(), len(workers), sizes=[3])
  variables = [tf.Variable(np.full(3, np.nan, FLOAT)),
               tf.Variable(np.int32(2**31 - 1)), tf.Variable(np.int64(5))]

  def work(k, worker):
    end = tf.function(lambda known: averaging_task.mean(
        server.handle, known, variables, [1]), autograph=False)
    for r in range(rounds):
      assert server.bring(worker, np.full(3, r + k, FLOAT), place=(r, 1))
      known = server.close(len(workers), (r, 1))
      if len(known) > 1:  # Nobody has ended the next one, too.
        end(known)

  in_threads(*[lambda k=k, w=w: work(k, w) for k, w in enumerate(workers)])
  assert server.place == (rounds, 1)
  assert variables[0].numpy().tolist() == [rounds - 1 + 1.5] * 3
  # It wraps around.
  assert [int(v) for v in variables[1:]] == [-2**31 + rounds - 1, 5 + rounds]


def test_in_a_function_ops_run_in_their_order():
  center = tf.Variable([0., 0.])
  handle = opened(modes.Eager(), 1, sizes=[2]).handle
  traces = []

  @tf.function
  def step(place, value):
    traces.append(place)
    averaging_task.bring(handle, "a", [value], place)
    known = averaging_task.closed(handle, 1, place)
    return averaging_task.mean(handle, known, [center])

  place = tf.constant(FIRST, tf.int64)
  for k in range(3):
    place = step(place, tf.constant([k, 1.]))
    assert center.numpy().tolist() == [k, 1] and place[0] == k + 1
  assert len(traces) == 1


# Waits


def test_waits_hold_no_thread():
  """With one thread, what they wait for can still run."""
  waits = 5
  with tf.Graph().as_default(), tf1.Session(config=tf1.ConfigProto(
      inter_op_parallelism_threads=1, use_per_session_threads=True)) as session:
    handle = averaging_task.rounds("one thread")
    first = averaging_task.opened(handle)
    wait = averaging_task.closed(handle, 2)
    bring = [averaging_task.bring(handle, w).accepted for w in "ab"]
    session.run(first)
    answers = []
    in_threads(*waits * [lambda: answers.append(session.run(wait))],
               lambda: (time.sleep(SOON), session.run(bring[0]),
                        session.run(bring[1])))
    assert [list(x[1:]) for x in answers] == waits * [[b"a", b"b"]]


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


WAITS = ("close", "enter")


def waits_of(handle, begun):
  """Both kinds of waits, in the current graph: a turn of "a" is alive."""
  turn = averaging_task.enter(handle, "a")
  with tf.control_dependencies([begun.node(), turn]):
    return {"close": averaging_task.closed(handle, 2),
            "enter": averaging_task.enter(handle, "b", most_turns=1)}


def no_wait_is_left(run, handle):
  """After two members came: a wait would have closed the round."""
  for worker in "ab":
    assert run(lambda w=worker: averaging_task.bring(handle, w).accepted)
  known = run(lambda: raw_op("state")(handle).known)
  return not is_closed(np.asarray(known))


@pytest.mark.parametrize("what", WAITS)
def test_a_session_that_is_closed(what):
  begun = Begun()
  server = tf.distribute.Server.create_local_server()
  with tf.Graph().as_default():
    handle = averaging_task.rounds(f"closed {what}")
    first = averaging_task.opened(handle)
    wait = waits_of(handle, begun)[what]
    with tf1.Session(server.target) as other:
      session = tf1.Session(server.target)
      session.run(first)

      def run():
        with pytest.raises((Cancelled, Aborted)):
          session.run(wait)

      in_threads(run, lambda: begun.then(session.close))
      assert no_wait_is_left(lambda build: other.run(build()), handle)


def test_an_error_beside_a_wait():
  begun = Begun()
  with tf.Graph().as_default(), tf1.Session() as session:
    handle = averaging_task.rounds("error")
    session.run(averaging_task.opened(handle))
    waits = waits_of(handle, begun)
    bad = tf1.placeholder(tf.float32)
    with tf.control_dependencies([begun.node()]):
      check = tf.debugging.check_numerics(bad, "the other op")

    def run():
      with pytest.raises(InvalidArgument, match="the other op"):
        session.run([waits, check], {bad: np.nan})

    in_threads(run)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("what", WAITS)
def test_a_wait_that_is_cancelled(what, early):
  """While it waits, or before."""
  handle = opened(modes.Eager()).handle
  manager = cancellation.CancellationManager()
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
  assert no_wait_is_left(lambda build: build(), handle)


def test_a_step_that_was_answered_may_use_the_center():
  """Also if it goes on in the thread of the op that has answered it."""
  with tf.Graph().as_default(), tf1.Session(config=tf1.ConfigProto(
      inter_op_parallelism_threads=-1)) as session:
    handle = averaging_task.rounds("inline", holds_center=True)
    session.run(raw_op("stage")(handle, "a", ["0 1 0 0 0"], 1., 1, 0, [[7.]]))
    session.run(averaging_task.opened(handle, "a"))
    begun = Begun()
    with tf.control_dependencies([waits_of(handle, begun)["enter"]]):
      center = raw_op("center")(
          handle, "a", 0, 1, 9., T=tf.float32).value
    again = raw_op("restore")(handle, "a", 1, (0, 2), 0)
    values = []
    in_threads(lambda: values.extend(session.run(center)),
               lambda: begun.then(lambda: session.run(again)))
    assert values == [7]


def test_a_container_that_is_cleared():
  begun = Begun()
  server = tf.distribute.Server.create_local_server()
  with tf.Graph().as_default():
    handle = averaging_task.rounds("cleared", container="cleared")
    wait = waits_of(handle, begun)["close"]
    session = tf1.Session(server.target)  # The server forgets it.
    session.run(averaging_task.opened(handle))

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
import averaging_task as task
import tensorflow as tf
handle = task.rounds("program")
task.opened(handle)
end = tf.function(lambda known: task.mean(handle, known, [v]))
v = tf.Variable([1.])
for place, workers in ((0, 1), "a"), ((1, 1), "ab"):
  for worker in workers:
    task.bring(handle, worker, place=place)
  end(task.closed(handle, 1, place, 0.01))

def wait(seconds):
  while True:
    try:
      task.closed(handle, 2, (2, 1), seconds)
    except tf.errors.DeadlineExceededError:
      pass

with tf.Graph().as_default():
  session = tf.compat.v1.Session()
  waits = task.closed(task.rounds("session"), 2, (-1, 0))
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
  assert "Round 1 of" not in process.stderr


def test_a_client_that_is_killed(tmp_path):
  path = tmp_path / "begun"
  with _cluster.Cluster(averaging_task.FUNCTIONS, preload=["averaging_task"],
                        ps=1, worker=1) as cluster:
    victim = cluster.tasks["worker", 0]
    victim.tell("wait", shared_name="killed", path=str(path))
    with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
      record = ops.staleness_record(averaging_task.gate()[0])
      handle = averaging_task.rounds("killed")
      with tf1.Session(f"grpc://{cluster.spec['ps'][0]}",
                       config=tf1.ConfigProto(
                           device_filters=["/job:ps"])) as session:
        wait_until(path.exists, "nobody waits")
        time.sleep(SOON)
        assert session.run(record)[1] == 1
        victim.kill()
        # Its step is over on the server, too: the ticket is gone.
        wait_until(lambda: session.run(record)[1] == 0, "an update is left")
        assert no_wait_is_left(lambda build: session.run(build()), handle)


# Means

# Around the size of a block; the odd ones put the others at odd addresses.
SHAPES = [(), (3,), (0,), (2, 5), (511,), (1,), (512,), (3, 0), (513,),
          (2, 3001)]
SIZE = sum(math.prod(shape) for shape in SHAPES)


def flat(arrays):
  return np.concatenate([np.ravel(a) for a in arrays])


def mean_of(mode, values, variables, num_workers=9):
  """Assigns the mean of vectors to variables."""
  server = opened(mode, num_workers, sizes=[values[0].size],
                  dtypes=[of_center(values[0].dtype)])
  for k, value in enumerate(values):
    assert server.bring(str(k), value)
  known = server.close(len(values), grace_secs=0.)
  assert server.mean(known, variables) == (1, 1)


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean(mode, dtype, m):
  rng = np.random.default_rng(m)
  given = [[random(rng, shape, dtype) for shape in SHAPES] for _ in range(m)]
  centers = [mode.variable(np.full(shape, np.nan, dtype)) for shape in SHAPES]
  mean_of(mode, [flat(values) for values in given], centers)
  for i, got in enumerate(mode.values(centers)):
    assert got.dtype == dtype
    numerics.assert_close(got, *numerics.mean([x[i] for x in given]),
                          f"of shape {SHAPES[i]}")


LARGE = {HALF: 40000, BFLOAT16: 2.0**127, FLOAT: 2.0**127, DOUBLE: 2.0**1023}


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_of_equal_values_is_exact(mode, dtype, m):
  large = LARGE[dtype]
  value = [*random(np.random.default_rng(0), 2000, dtype), large, -large]
  if m == 1:
    value += [-0.0, 0, np.inf, -np.inf, 2**-24]
  value = np.array(value, dtype)
  center = mode.variable(np.full(value.size, np.nan, dtype))
  mean_of(mode, m * [value], [center])
  numerics.assert_same_bits(mode.values([center])[0], value)


# Runs in a process for each instruction set.
ON_ISA = """
import sys
import averaging_rounds_test as test
import averaging_task as task
import numpy as np
import tensorflow as tf

results = []
for dtype in test.DTYPES:
  handle = task.rounds(dtype.name, 3, sizes=[test.SIZE],
                       dtypes=[test.of_center(dtype)])
  task.opened(handle)
  centers = [tf.Variable(np.zeros(shape, dtype)) for shape in test.SHAPES]
  for worker, value in zip("abc", test.specials(dtype)):
    task.bring(handle, worker, [value])
  known = task.closed(handle, 3)
  tf.function(lambda: task.mean(handle, known, centers))()
  mean = np.concatenate([np.ravel(c.numpy()) for c in centers])
  results.append(mean.view(f"u{mean.itemsize}"))
np.savez(sys.argv[1], *results)
"""


def specials(dtype):
  """Three values: random numbers, infinities, NaNs and extremes."""
  rng = np.random.default_rng(3)
  values = [random(rng, SIZE, dtype) for _ in range(3)]
  numbers = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 2**-24, 2**-14, 1e-3])
  for value in values:
    value[rng.permutation(SIZE)[:numbers.size]] = numbers.astype(dtype)
  return values


def test_instruction_sets_agree_bit_for_bit(tmp_path):
  with np.errstate(invalid="ignore"):
    wanted = [(dtype, *numerics.mean(specials(dtype))) for dtype in DTYPES]
  isas.assert_agree(isas.results_of(ON_ISA, tmp_path), wanted)


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_large_mean_runs_in_parallel_to_the_same_bits(use_resource):
  rng = np.random.default_rng(2)
  sizes = [700_001, 3, 0, 300_000, 513]
  given = [random(rng, sum(sizes), FLOAT) for _ in range(3)]
  results = []
  for threads in (1, 4):
    with modes.with_threads(use_resource, threads) as mode:
      centers = [mode.variable(np.zeros(size, FLOAT)) for size in sizes]
      mean_of(mode, given, centers)
      results.append(flat(mode.values(centers)))
  numerics.assert_same_bits(*results)
  numerics.assert_close(results[0], *numerics.mean(given))


@modes.only(*modes.graphs())
def test_one_op_assigns_variables_of_all_kinds(mode):
  """Resource and ref variables, of several dtypes, and counters."""
  other = modes.Graph(not mode.use_resource)
  make = lambda m, value: m.uninitialized(value)  # pylint: disable=g-long-lambda-assignment
  resource, ref = (mode, other) if mode.use_resource else (other, mode)
  variables = [make(resource, np.zeros((2, 1), HALF)),
               make(resource, np.zeros(100, DOUBLE)),
               make(ref, np.zeros(2, DOUBLE)), make(ref, np.zeros(1, BFLOAT16)),
               *(make(ref, np.float32(0)) for _ in range(400)),
               make(ref, np.int32(7))]
  mode.session.run(tf1.global_variables_initializer())
  server = opened(mode, 1, sizes=[2, 102, 1, 400], dtypes=[
      tf.float32, tf.float64, tf.float32, tf.float32])
  assert server.bring("a", np.arange(2, dtype=HALF), np.arange(102.),
                      np.array([3], FLOAT), np.arange(400, dtype=FLOAT))
  server.mean(server.close(1), variables, [1, 2, 1, 400])
  assert flat([x.astype(DOUBLE) for x in mode.values(variables)]).tolist() == [
      0, 1, *range(102), 3, *range(400), 8]


# Whose buffers


@modes.only(*modes.graphs())
def test_only_what_somebody_else_holds_is_copied(mode):
  """By the memory that the op allocates."""
  size = 1 << 18
  server = opened(mode, 9, sizes=[size])
  v = mode.variable(np.zeros(size, np.float32))
  fed = tf1.placeholder(tf.float32, [size])
  values = {"variable": v, "fed": fed, "of a constant": tf.zeros([size]),
            "of an op": tf.concat([v[:1], v[1:]], 0)}
  temporary = {}
  for name, value in values.items():
    known = server.enter(name)
    staged = raw_op("stage")(server.handle, name, known, 1., 1, 0, [value])
    metadata = tf1.RunMetadata()
    assert mode.session.run(staged, {fed: np.zeros(size, np.float32)},
                            run_metadata=metadata, options=tf1.RunOptions(
                                trace_level=tf1.RunOptions.FULL_TRACE))
    (temporary[name],) = [
        node.memory_stats.temp_memory_size
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats if node.node_name == staged.op.name]
  assert temporary == {"variable": 4 * size, "fed": 4 * size, "of an op": 0,
                       "of a constant": 4 * size}


def test_a_variable_may_change_after_it_was_sent(mode):
  server = opened(mode, 1, sizes=[64], dtypes=[tf.float64])
  v, center = mode.variable(np.ones(64)), mode.variable(np.zeros(64))
  assert server.bring("a", v)
  mode.run(lambda: tf1.assign_add(v, np.full(64, 5.)))
  server.mean(server.close(1), [center])
  assert mode.values([center, v])[0].tolist() == [1] * 64


@modes.only(*modes.graphs())
def test_an_array_may_change_after_it_was_fed(mode):
  # So aligned, a session takes it as it is.
  raw_bytes = np.zeros(8 * 128 + 64, np.uint8)
  start = -raw_bytes.ctypes.data % 64
  array = raw_bytes[start:start + 8 * 128].view(np.float64)
  array[:] = 1
  server = opened(mode, 1, sizes=[128], dtypes=[tf.float64])
  center = mode.variable(np.zeros(128))
  fed = tf1.placeholder(tf.float64, [128])
  assert mode.session.run(
      averaging_task.bring(server.handle, "a", [fed]).accepted, {fed: array})
  array[:] = 7
  server.mean(server.close(1), [center])
  assert mode.values([center])[0].tolist() == [1] * 128


def test_a_tensor_outlives_what_becomes_of_its_values():
  server = Server(modes.Eager(), 1, sizes=[64], dtypes=[tf.float64],
                  holds_center=True)
  value = tf.constant(np.ones(64)) + 0
  server.restore(value)
  read = lambda: raw_op("center")(
      server.handle, "a", 0, 1, 9., T=tf.float64).value
  center = read()
  assert server.bring("a", np.full(64, 5.))
  server.run("outer_step", server.close(1), 0.5, 0., 1)
  assert [x.numpy().tolist() for x in (value, center, read())] == [
      [1] * 64, [1] * 64, [3] * 64]
