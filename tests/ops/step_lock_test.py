"""Tests of the lock of steps: who holds it, waits for it and gives up."""

import threading
import time

import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

import threads
from wrapopt._gates import _step_lock
from wrapopt._loader import ops as raw


class Steps:
  """Steps of functions that take the lock of one variable."""

  def __init__(self):
    self.variable = tf.Variable(0.0)
    self.events = []

  def waiting(self, name, until=lambda: None):
    """A thread of a step and what cancels it; returns when it waits."""
    manager = cancellation.CancellationManager()
    asked = threading.Event()

    def inside():
      self.events.append(f"{name} begins")
      until()
      self.events.append(f"{name} ends")
      return 0

    @tf.function
    def step():
      first = tf.py_function(lambda: asked.set() or 0, [], tf.int32)
      with _step_lock.locked(self.variable, first=[first.op]):
        tf.py_function(inside, [], tf.int32)

    function = manager.get_cancelable_function(step.get_concrete_function())

    def run():
      try:
        function()
      except tf.errors.CancelledError:
        self.events.append(f"{name} is cancelled")
      except tf.errors.InvalidArgumentError as error:
        self.events.append(f"{name} fails: {'Odd' in str(error)}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert asked.wait(60)
    time.sleep(0.1)  # A right lock passes, however short this is.
    return thread, manager


def test_who_gives_up_does_not_free_the_lock_of_another():
  steps, go = Steps(), threading.Event()
  first, _ = steps.waiting("1", go.wait)
  second, manager = steps.waiting("2")
  third, _ = steps.waiting("3")
  manager.start_cancel()
  second.join(60)
  fourth, _ = steps.waiting("4")
  assert steps.events == ["1 begins", "2 is cancelled"]
  go.set()
  for thread in first, third, fourth:
    thread.join(60)
  assert steps.events == [
      "1 begins", "2 is cancelled", "1 ends", "3 begins", "3 ends", "4 begins",
      "4 ends"]


def test_a_step_that_fails_frees_the_lock():
  steps = Steps()

  def fail():
    raise ValueError("Odd.")

  for name in "12":
    steps.waiting(name, fail)[0].join(60)
  assert steps.events == ["1 begins", "1 fails: True", "2 begins",
                          "2 fails: True"]
  with pytest.raises(ValueError, match="Odd"), _step_lock.locked(
      steps.variable):
    fail()
  steps.waiting("3")[0].join(60)
  assert steps.events[4:] == ["3 begins", "3 ends"]


def test_one_at_a_time():
  """Also of those that have been cancelled at any moment."""
  variable, inside, most = tf.Variable(0.0), [0], [0]

  def one():
    inside[0] += 1
    most[0] = max(most[0], inside[0])
    time.sleep(0.001)
    inside[0] -= 1
    return 0

  @tf.function
  def step():
    with _step_lock.locked(variable):
      tf.py_function(one, [], tf.int32)

  function = step.get_concrete_function()

  def run():
    for i in range(40):
      manager = cancellation.CancellationManager()
      timer = threading.Timer(0.0007 * i, manager.start_cancel)
      timer.start()
      try:
        manager.get_cancelable_function(function)()
      except tf.errors.CancelledError:
        pass
      timer.join()

  threads.in_threads(*[run] * 4)
  assert most == [1]


def test_locks_of_one_variable_and_of_others():
  v, w = tf.Variable(0.0), tf.Variable(0.0)
  with _step_lock.locked(v), _step_lock.locked(w), _step_lock.locked(
      v, of="other"):
    pass


def test_what_is_no_lock():
  v = tf.Variable(0.0)
  lock = raw.wrapopt_lock_steps(v.handle)
  raw.wrapopt_unlock_steps(lock)
  with pytest.raises(tf.errors.FailedPreconditionError,
                     match="lock must be unlocked once, got one that is"):
    raw.wrapopt_unlock_steps(lock)
  with pytest.raises(tf.errors.InvalidArgumentError,
                     match="lock must be of Wrapopt>LockSteps on this device"):
    raw.wrapopt_unlock_steps(v.handle)
  with pytest.raises(tf.errors.InvalidArgumentError, match="lock misshapen"):
    raw.wrapopt_unlock_steps(tf.stack([lock, lock]))
  with pytest.raises(tf.errors.InvalidArgumentError, match="variable"):
    raw.wrapopt_lock_steps(tf.stack([v.handle, v.handle]))
  with _step_lock.locked(v):  # Nobody holds it.
    pass
