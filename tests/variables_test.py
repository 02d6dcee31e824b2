"""How the ops of this package lock: no deadlock, no half of an update."""

import functools
import multiprocessing
import threading

import numpy as np
import tensorflow as tf

import modes
from wrapopt.ops import ema_update
from wrapopt.ops import exchange

FLOAT = np.float32


def in_threads(*bodies):
  """Runs functions at once. Asserts that all end, and that none raises."""
  errors = []

  def guarded(body):
    try:
      body()
    except BaseException as e:  # pylint: disable=broad-exception-caught
      errors.append(e)

  threads = [threading.Thread(target=guarded, args=[body], daemon=True)
             for body in bodies]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  if errors:
    raise errors[0]
  assert not any(thread.is_alive() for thread in threads), "deadlock"


def then_set(done, body):
  """Runs `body`, and tells the others that it has ended, however it did."""
  try:
    body()
  finally:
    done.set()


def update(a, b):
  return ema_update(a, b, 0.5)


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
    for _ in range(50):
      for call in calls:
        call()

  x = [tf.Variable(tf.fill([20_000], float(i))) for i in range(6)]
  calls = crossed(x, [update, exchange])
  in_threads(*[functools.partial(run, calls[part::4]) for part in range(4)])
  for graph in modes.graphs(inter_op_parallelism_threads=8,
                            use_per_session_threads=True):
    with graph.entered() as mode:
      for functions in ([exchange], [update, exchange]):
        x = [mode.variable(np.full(20_000, i, FLOAT)) for i in range(6)]
        every = tf.group(*[call() for call in crossed(x, functions)])
        for _ in range(50):
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


def test_nobody_sees_half_an_exchange():
  # An update that reads both variables locks both: it sees one 0 and one 1.
  size = 50_000
  a, b = tf.Variable(tf.zeros(size)), tf.Variable(tf.ones(size))
  copies = [tf.Variable(tf.zeros(size)) for _ in range(2)]
  done = threading.Event()

  def swap():
    while not done.is_set():
      exchange([a], [b])

  def read():
    seen = []
    while len(seen) < 100 or len(set(seen)) < 2:
      ema_update(copies, [a, b], 0)
      x, y = (v.numpy() for v in copies)
      assert np.all(x == x[0]) and np.all(y == 1 - x[0])
      seen.append(x[0])

  in_threads(swap, lambda: then_set(done, read))
