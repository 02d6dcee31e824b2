"""The ops find and lock their variables.

There is no deadlock and no partial update, and the variable is always the
current one.
"""

import functools
import multiprocessing
import os
import threading

import numpy as np
import pytest
import tensorflow as tf

import modes
from threads import in_threads
from wrapopt import _loader
from wrapopt.ops import averaging_assign
from wrapopt.ops import ema_update
from wrapopt.ops import exchange

_raw_averaging_assign = _loader.ops.wrapopt_averaging_assign
_raw_ema_update = _loader.ops.wrapopt_ema_update

FLOAT = np.float32


def then_set(done, body):
  """Runs `body`, and tells the others that it has ended, however it did."""
  try:
    body()
  finally:
    done.set()


def update(a, b):
  return ema_update(a, b, 0.5)


def mean(a, b):
  """Of targets that are sources, and of others."""
  return averaging_assign(a, [b, a], rate=0.5)


def crossed(x, functions):
  """Calls that name the variables in every order, on either side."""
  calls = []
  for i in range(len(x)):
    a, b, c, d = (x[(i + step) % len(x)] for step in range(4))
    for function in functions:
      calls += [functools.partial(function, [a, b], [c, d]),
                functools.partial(function, [d, c], [b, a]),
                functools.partial(function, [b, d], [a, c])]
  return calls


def run_crossed():
  """In threads, then in v1 sessions that run many ops at once."""
  def run(calls):
    for _ in range(25):
      for call in calls:
        call()

  x = [tf.Variable(tf.fill([20_000], float(i))) for i in range(6)]
  calls = crossed(x, [update, mean, exchange])
  in_threads(*[functools.partial(run, calls[part::4]) for part in range(4)])
  for graph in modes.graphs(inter_op_parallelism_threads=8,
                            use_per_session_threads=True):
    with graph.entered() as mode:
      for functions in ([exchange], [update, mean, exchange]):
        x = [mode.variable(np.full(20_000, i, FLOAT)) for i in range(6)]
        every = tf.group(*[call() for call in crossed(x, functions)])
        for _ in range(25):
          mode.session.run(every)
        if functions == [exchange]:
          # Each value is still there, whole and once.
          values = mode.values(x)
          assert sorted(v[0] for v in values) == list(range(6))
          assert all(np.all(v == v[0]) for v in values)


def test_crossed_variables_do_not_deadlock():
  # A process that is caught in a deadlock does not end by itself.
  process = multiprocessing.get_context("spawn").Process(target=run_crossed)
  process.start()
  process.join(120)
  alive = process.is_alive()
  process.kill()
  process.join()
  assert not alive, "deadlock"
  assert process.exitcode == 0


def test_nobody_sees_half_an_update():
  # All elements of both variables are 0 or all are 1. A reader that locks both
  # sees no mixture, and one that reads a single variable sees none in it.
  size = 100_000
  x, copies = ([tf.Variable(tf.zeros(size)) for _ in range(2)]
               for _ in range(2))
  zero, one = tf.Variable(tf.zeros(size)), tf.Variable(tf.ones(size))
  done = threading.Event()

  def write(value):
    while not done.is_set():
      ema_update(x, [value, value], 0)

  def read_one():
    while not done.is_set():
      got = x[1].numpy()
      assert np.all(got == got[0])

  def read_both():
    seen = []
    while len(seen) < 100 or len(set(seen)) < 2:
      ema_update(copies, x, 0)
      both = np.concatenate([v.numpy() for v in copies])
      assert np.all(both == both[0])
      seen.append(both[0])

  in_threads(lambda: write(zero), lambda: write(one), read_one,
             lambda: then_set(done, read_both))


def flip(use_locking, a, b):
  """x becomes 1 - x."""
  one = tf.ones(a.shape)
  averaging_assign([a, b], [[one, one], [a, b]], [1, -1],
                   use_locking=use_locking)


@pytest.mark.parametrize("write, copy, is_whole", [
    (lambda a, b: exchange([a], [b]), lambda to, of: ema_update(to, of, 0),
     True),
    (functools.partial(flip, True), averaging_assign, True),
    (functools.partial(flip, False), averaging_assign, False)],
                         ids=["exchange", "mean", "mean without locks"])
def test_nobody_sees_half_a_change(write, copy, is_whole):
  # Two variables change places, over and over: a reader that locks both sees
  # one 0 and one 1 if the two are written at once, as they are under locks.
  size = 50_000
  a, b = tf.Variable(tf.zeros(size)), tf.Variable(tf.ones(size))
  copies = [tf.Variable(tf.zeros(size)) for _ in range(2)]
  done = threading.Event()

  def change():
    while not done.is_set():
      write(a, b)

  def read():
    seen = []
    while len(seen) < 100 or len(set(seen)) < 2:
      copy(copies, [a, b])
      x, y = (v.numpy() for v in copies)
      assert np.isin([x, y], [0, 1]).all()
      if is_whole:
        assert np.all(x == x[0]) and np.all(y == 1 - x[0])
      seen.append(x[0])

  in_threads(change, lambda: then_set(done, read))


# What an op remembers of the variables that it has found.


@pytest.fixture(name="graph")
def _graph():
  with modes.Graph(use_resource=True).entered() as mode:
    yield mode


@pytest.fixture(name="busy_graph")
def _busy_graph():
  """One whose session runs many ops at once."""
  [mode, _] = modes.graphs(inter_op_parallelism_threads=8,
                           use_per_session_threads=True)
  with mode.entered():
    yield mode


def destroy(variable):
  return tf.raw_ops.DestroyResourceOp(resource=variable.handle,
                                      ignore_lookup_error=False)


def test_a_variable_that_was_destroyed_is_not_remembered(graph):
  shadow, value = (graph.variable(np.full(3, i, FLOAT)) for i in (1, 5))
  op = ema_update([shadow], [value], 0.5)
  end = destroy(shadow)
  for _ in range(3):
    graph.session.run(op)
  assert graph.values([shadow])[0][0] == 4.5
  graph.session.run(end)
  with pytest.raises(tf.errors.FailedPreconditionError,
                     match=r"shadows\[0\].* is not initialized"):
    graph.session.run(op)
  for expected in (3, 4):
    if expected == 3:
      graph.session.run(shadow.initializer)
    graph.session.run(op)
    np.testing.assert_array_equal(graph.values([shadow])[0],
                                  np.full(3, expected, FLOAT))


def test_a_variable_made_anew_gets_the_updates_while_the_old_one_is_in_use(
    graph):
  shadow, value, copy = (graph.variable(np.full(3, i, FLOAT)) for i in range(3))
  op = ema_update([shadow], [value], 0)
  # This one holds the shadow for as long as the large variables take.
  a, b = (graph.variable(np.zeros(2**22, FLOAT)) for _ in range(2))
  use = ema_update([copy, a], [shadow, b], 0.5)
  end = destroy(shadow)
  graph.session.run([op, use])
  done = threading.Event()

  def keep_in_use():
    while not done.is_set():
      try:
        graph.session.run(use)
      except tf.errors.FailedPreconditionError:
        pass  # It is not initialized yet.

  def make_anew():
    for _ in range(10):
      graph.session.run(end)
      graph.session.run(shadow.initializer)
      graph.session.run(op)
      # 0: the op updated the variable that is no more.
      np.testing.assert_array_equal(graph.values([shadow])[0], 1)

  in_threads(keep_in_use, lambda: then_set(done, make_anew))


def test_no_step_that_begins_later_updates_a_destroyed_variable(
    busy_graph):
  # Steps that overlap hold the variable for one another.
  graph = busy_graph
  shadow, value = (graph.variable(np.full(2**20, i, FLOAT)) for i in (0, 1))
  op = ema_update([shadow], [value], 0.5)
  end = destroy(shadow)
  graph.session.run(op)
  ends = [0]  # Odd: of a variable that was destroyed and is not made anew.
  done = threading.Event()
  late = []

  def step():
    while not done.is_set():
      before = ends[0]
      try:
        graph.session.run(op)
        if before % 2 and ends[0] == before:
          late.append(before)
      except tf.errors.FailedPreconditionError:
        pass

  def destroy_and_make_anew():
    for _ in range(10):
      graph.session.run(end)
      ends[0] += 1
      for _ in range(5):
        with pytest.raises(tf.errors.FailedPreconditionError):
          graph.session.run(op)
      ends[0] += 1
      graph.session.run(shadow.initializer)
      for _ in range(5):
        graph.session.run(op)

  in_threads(*[step] * 4, lambda: then_set(done, destroy_and_make_anew))
  assert not late


def either(which, a, b):
  """The handle of `a` or of `b`: the very tensor that the one or other has."""
  with modes.control_flow(v2=False):
    return tf.cond(which, lambda: a.handle, lambda: b.handle)


def test_one_input_may_hand_over_one_variable_and_then_another(graph):
  a, b, c, d = (graph.variable(np.full(3, i, FLOAT)) for i in range(4))
  which = tf.compat.v1.placeholder(tf.bool, [])
  op = _raw_ema_update([either(which, a, b), either(which, c, d)], [0.5], N=1,
                       NK=1, T=tf.float32, S=tf.float32)
  for choice in (True, True, False, True, False, False):
    graph.session.run(op, {which: choice})
  # Three steps each: from 0 to 2, and from 1 to 3.
  assert [v[0] for v in graph.values([a, b, c, d])] == [1.75, 2.75, 2, 3]


def test_one_variable_in_two_places_is_seen_each_time(graph):
  a, b = (graph.variable(np.full(3, i, FLOAT)) for i in range(2))
  which = tf.compat.v1.placeholder(tf.bool, [])
  op = _raw_ema_update([either(which, a, b), b.handle], [0.5], N=1, NK=1,
                       T=tf.float32, S=tf.float32)
  for _ in range(3):
    graph.session.run(op, {which: True})
    with pytest.raises(tf.errors.InvalidArgumentError,
                       match="are one variable"):
      graph.session.run(op, {which: False})
  assert [v[0] for v in graph.values([a, b])] == [0.875, 1]


def test_a_target_that_is_a_source_at_times_is_seen_each_time(graph):
  # The order in which an op locks its variables is remembered, too.
  a, b, c = (graph.variable(np.full(3, i, FLOAT)) for i in (1, 2, 4))
  which = tf.compat.v1.placeholder(tf.bool, [])
  op = _raw_averaging_assign([a.handle], [either(which, a, b), c.handle], [],
                             [1., 1.], 1., N=1, T=tf.float32)
  want = 1
  for choice in (True, True, False, True, False, False):
    graph.session.run(op, {which: choice})
    want = (want if choice else 2) + 4
    assert [v[0] for v in graph.values([a, b, c])] == [want, 2, 4]


def test_a_target_that_is_another_s_source_at_times_is_seen_each_time(graph):
  a, b, c = (graph.variable(np.full(3, i, FLOAT)) for i in (1, 2, 4))
  which = tf.compat.v1.placeholder(tf.bool, [])
  op = _raw_averaging_assign([a.handle, b.handle],
                             [either(which, a, b), c.handle], [], [1.], 1.,
                             N=2, T=tf.float32)
  graph.session.run(op, {which: True})
  for _ in range(2):
    with pytest.raises(tf.errors.InvalidArgumentError, match=(
        r"targets\[1\].* and sources\[0\].* are one variable")):
      graph.session.run(op, {which: False})
    graph.session.run(op, {which: True})
  assert [v[0] for v in graph.values([a, b, c])] == [1, 4, 4]


def test_an_op_does_not_keep_variables_alive():
  def resident():
    with open("/proc/self/statm", encoding="ascii") as f:
      return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

  def new_variables():
    # Not of zeros or ones, which TensorFlow keeps for who asks for them next.
    return [tf.Variable(tf.random.uniform([size])) for _ in range(2)]

  size = 2**24
  new_variables()
  before = resident()  # The allocator keeps what is free now.
  shadow, value = new_variables()
  ema_update([shadow], [value], 0.5)
  del shadow, value
  new_variables()
  # Each of the two has 4 * size bytes.
  assert resident() - before < 2 * size
