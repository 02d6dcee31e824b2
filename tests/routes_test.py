"""Lines between devices, and the ops under them."""

import collections
import threading

import numpy as np
import pytest
import tensorflow as tf

from wrapopt import _routes
from wrapopt._loader import ops as raw

tf1 = tf.compat.v1

NEAR, FAR = (f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (0, 1))
# Who waits for what nobody sends fails.
CONFIG = tf1.ConfigProto(device_count={"CPU": 2}, operation_timeout_in_ms=30000)
InvalidArgument = tf.errors.InvalidArgumentError


@pytest.fixture(scope="module")
def server():
  yield tf.distribute.Server.create_local_server(config=CONFIG).target


@pytest.fixture(params=["", "server"], ids=["direct", "server"])
def session(request, server):
  """Of a graph that is the default one."""
  with tf.Graph().as_default(), tf1.Session(
      server if request.param else "", config=CONFIG) as s:
    yield s


def run_counted(session, fetches, feeds=None):
  """(values, {op: how many ran})."""
  metadata = tf1.RunMetadata()
  values = session.run(
      fetches, feeds, run_metadata=metadata, options=tf1.RunOptions(
          trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True))
  ops_of = {n.name: n.op for g in metadata.partition_graphs for n in g.node}
  return values, collections.Counter(
      ops_of[n.node_name] for device in metadata.step_stats.dev_stats
      for n in device.node_stats if n.node_name in ops_of)


def both_ways(is_open, values):
  """Sends there and back; what arrives, or none of it where it is closed."""
  with tf.device(NEAR):
    taken, skipped = _routes.branch(is_open)
  line = _routes.Link(NEAR, FAR, taken)
  there, sent = zip(*map(line.send, values))
  with tf.device(FAR):
    there = [tf.identity(x) for x in there]
  back, sent_back = zip(*map(line.send_back, there))
  done = line.done(sent_back)
  with tf.device(NEAR), tf.control_dependencies([*sent, *back, done]):
    return there, list(back), _routes.join(tf.identity(taken), skipped)


VALUES = [np.float32([1, 2]), np.float64(3), np.zeros([0, 3], np.float16),
          np.array([b"a", b"bc"], object), np.arange(1 << 18), np.bool_(True)]


def test_an_open_line(session):
  is_open = tf1.placeholder(tf.bool, [])
  there, back, done = both_ways(is_open, [tf.constant(v) for v in VALUES])
  assert [x.device for x in there + back] == [FAR] * 6 + [NEAR] * 6
  assert [x.shape for x in back] == [v.shape for v in VALUES]
  for _ in range(3):
    values, ran = run_counted(session, [back, done], {is_open: True})
    assert ran["Wrapopt>Send"] == ran["Wrapopt>Receive"] == 12
    assert values[1] == True  # pylint: disable=singleton-comparison
    for got, want in zip(values[0], VALUES, strict=True):
      np.testing.assert_array_equal(got, want)
      assert got.dtype == want.dtype


def test_a_closed_line(session):
  """Nothing of it runs, and it goes on to work."""
  is_open = tf1.placeholder(tf.bool, [])
  _, back, done = both_ways(is_open, [tf.constant(v) for v in VALUES])
  for _ in range(3):
    value, ran = run_counted(session, done, {is_open: False})
    assert value == False  # pylint: disable=singleton-comparison
    assert ran["Merge"] == 1
    assert not [op for op in ran if op.startswith("Wrapopt>")]
  session.run([back, done], {is_open: True})
  with pytest.raises(tf.errors.OpError, match="Retval|was not valid"):
    session.run(back, {is_open: False})


def test_edges_of_the_graph(session):
  """One there and two back, whatever crosses."""
  is_open = tf1.placeholder(tf.bool, [])
  *_, done = both_ways(is_open, [tf.constant(v) for v in VALUES])
  metadata = tf1.RunMetadata()
  session.run(done, {is_open: True}, run_metadata=metadata,
              options=tf1.RunOptions(output_partition_graphs=True))
  edges = [n.device for g in metadata.partition_graphs for n in g.node
           if n.op in ("_Recv", "_HostRecv")
           and n.attr["send_device"].s != n.attr["recv_device"].s]
  assert sorted(edges) == [NEAR, NEAR, FAR]


def test_values_of_a_step_stay_in_it(session):
  """Steps that run at the same time do not get each other's."""
  x = tf1.placeholder(tf.int64, [])
  _, back, done = both_ways(tf.constant(True), [x])
  wrong = []

  def run(first):
    for i in range(first, first + 100):
      [got], _ = session.run([back, done], {x: i})
      if got != i:
        wrong.append((i, got))

  threads = [threading.Thread(target=run, args=[1000 * t]) for t in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong


def test_lines_of_one_graph_are_apart(session):
  lines = [both_ways(tf.constant(True), [tf.constant(i)])[1:] for i in range(5)]
  assert session.run(lines) == [([i], True) for i in range(5)]


def test_it_is_sent_after(session):
  v = tf1.get_variable("v", initializer=1.0, use_resource=True)
  line = _routes.Link(NEAR, FAR, tf.constant(True))
  there, sent = line.send(tf.constant(5.0), after=[v.assign(7.0).op])
  with tf.control_dependencies([there]):
    seen = v.read_value()
  session.run(v.initializer)
  for _ in range(10):
    assert session.run([seen, sent])[0] == 7
    session.run(v.initializer)


def test_ends_of_one_device(session):
  """As where the centers are on the worker."""
  line = _routes.Link(NEAR, NEAR, tf.constant(True))
  there, sent = line.send(tf.constant([1, 2]))
  back, sent_back = line.send_back(3 * there)
  assert session.run([back, sent, sent_back])[0].tolist() == [3, 6]


@pytest.mark.parametrize("near, far", [
    ("/device:CPU:0", "/device:CPU:1"), ("", "/cpu:1"), ("/cpu:1", ""),
    ("/task:0/cpu:0", "/job:localhost/cpu:1")])
def test_names_in_part(session, near, far):
  line = _routes.Link(near, far, tf.constant(True))
  there, sent = line.send(tf.constant(1))
  back, sent_back = line.send_back(there + 1)
  assert session.run([back, sent, line.done([sent_back])])[0] == 2


# Errors


def route(to=FAR):
  with tf.device(NEAR):
    return raw.wrapopt_route(to=to)


def receive(r, dtype=tf.float32, channel="c", **options):
  return raw.wrapopt_receive(r, T=dtype, channel=channel, **options)


def test_a_route_is_from_one_device_to_another(session):
  with tf.device(NEAR):
    ours = [raw.wrapopt_route_back(route()), receive(route())]
  with tf.device(FAR):
    theirs = raw.wrapopt_send(route(), 1.0, channel="c")
  for op, expected, got in (ours[0], FAR, NEAR), (ours[1], FAR, NEAR), (
      theirs, NEAR, FAR):
    with pytest.raises(InvalidArgument, match=f"must be on the device "
                       f"'{expected}', as its route says, got '{got}': name "
                       "the jobs and tasks"):
      session.run(op)


def test_a_device_that_is_none():
  with tf.Graph().as_default(), tf1.Session() as s:
    with pytest.raises(InvalidArgument, match="to must name a device, got 'x'"):
      s.run(route("x"))


@pytest.mark.parametrize("text", ["", "a;b", f"{NEAR};-1;{FAR}", "a;1;b;c"])
def test_what_is_no_route(session, text):
  with tf.device(FAR):
    ops = [raw.wrapopt_send(text, 1.0, channel="c"), receive(text),
           raw.wrapopt_route_back(text)]
  for op in ops:
    with pytest.raises(InvalidArgument, match="route must come from Wrapopt>"
                       f"Route or Wrapopt>RouteBack, got '{text}'"):
      session.run(op)


def test_a_route_is_a_scalar(session):
  for make in (lambda r: raw.wrapopt_send(r, 1.0, channel="c"), receive,
               raw.wrapopt_route_back):
    with pytest.raises(ValueError, match=r"route misshapen: got \[1\] but "
                       r"expected \[\] \(a scalar\)"):
      make(tf.constant(["x"]))
    r = tf1.placeholder(tf.string)
    with pytest.raises(InvalidArgument, match=r"route misshapen: got \[1\]"):
      session.run(make(r), {r: ["x"]})


@pytest.mark.parametrize("channel", ["", "a;b"])
def test_what_is_no_channel(session, channel):
  for op in (raw.wrapopt_send(route(), 1.0, channel=channel),
             receive(route(), channel=channel)):
    with pytest.raises(InvalidArgument, match="channel must be a name without "
                       f"';', got '{channel}'"):
      session.run(op)


@pytest.mark.parametrize("options, match", [
    ({"dtype": tf.float64},
     "the value of channel 'c' must be of dtype double, got float"),
    ({"shape": [3]},
     r"the value of channel 'c' misshapen: got \[2\] but expected \[3\]")])
def test_another_value_than_expected(session, options, match):
  r = route()
  with tf.device(NEAR):
    sent = raw.wrapopt_send(r, [1.0, 2.0], channel="c")
  with tf.device(FAR):
    got = receive(r, **options)
  with pytest.raises(InvalidArgument, match=match):
    session.run([got, sent])


def test_who_waits_ends_with_the_step(session):
  """Nobody sends; the step has a deadline, and another op that fails."""
  with tf.device(FAR):
    got = receive(route())
  with pytest.raises(tf.errors.DeadlineExceededError):
    session.run(got, options=tf1.RunOptions(timeout_in_ms=300))
  x = tf1.placeholder(tf.int32)
  with pytest.raises(InvalidArgument, match="ivi"):
    session.run([got, tf.constant(1) // x], {x: 0})


def test_a_session_can_be_closed(server):
  with tf.Graph().as_default(), tf1.Session(server, config=CONFIG) as s:
    with tf.device(FAR):
      got = receive(route())
    begun, failed = threading.Event(), []

    def run():
      begun.set()
      with pytest.raises(tf.errors.OpError) as error:
        s.run(got)
      failed.append(error.value)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    s.run(route())  # By then the other step has most likely begun, too.
    s.close()
    thread.join(60)
    assert not thread.is_alive() and failed
