"""Breaks of wrapopt, each of which the books of chaos_test.py must see.

Each function breaks one worker's process, before its graph is built.
"""

import time

import tensorflow as tf

import chaos_books
from wrapopt import ops
from wrapopt._local import _in_graph
from wrapopt._v1._workers import _centers

tf1 = tf.compat.v1


def _in_worker(which):
  """Breaks one worker only."""
  def decorate(do):
    def broken(task, index):
      del task
      if index == which:
        do()
    return broken
  return decorate


@_in_worker(1)
def step_counts_twice():
  complete = ops.staleness_complete

  def twice(ticket, step, **kwargs):
    with tf.control_dependencies([complete(ticket, step, **kwargs)]):
      with tf.device(step.device):
        return step.assign_add(1, read_value=False)

  ops.staleness_complete = twice


@_in_worker(1)
def gate_lets_all_through():
  """As check-then-apply does: the record is that of the time of the gate."""
  gate = ops.staleness_gate

  def late(step, counter, histogram, recorded, limit, **kwargs):
    with tf.control_dependencies([recorded]):
      now, _ = ops.staleness_record(step)
    return gate(step, counter, histogram, now, limit, **kwargs)

  ops.staleness_gate = late


@_in_worker(2)
def update_is_lost():
  """The steps of a worker do not change the second variable."""
  chaos_books.DELTA = {**chaos_books.DELTA, "b": 0.0}


@_in_worker(2)
def worker_hangs():
  compute = tf.numpy_function
  steps = []

  def hanging(function, *args, **kwargs):
    def call(*xs):
      steps.append(1)
      if len(steps) > 20:
        time.sleep(3600)
      return function(*xs)
    return compute(call, *args, **kwargs)

  tf.numpy_function = hanging


@_in_worker(0)
def chief_saves_rarely():
  session = tf1.train.MonitoredTrainingSession
  tf1.train.MonitoredTrainingSession = lambda *args, **kwargs: session(
      *args, **{**kwargs, "save_checkpoint_steps": 10**6})


@_in_worker(2)
def round_loses_a_worker():
  """On one server, the values of a worker weigh next to nothing."""
  stage = _in_graph.raw.wrapopt_averaging_stage

  def lossy(rounds, worker, known, weight, **kwargs):
    if "/task:1" in rounds.device:
      weight = weight * 1e-9
    return stage(rounds, worker, known, weight, **kwargs)

  _in_graph.raw.wrapopt_averaging_stage = lossy


@_in_worker(1)
def worker_keeps_its_values():
  """A worker does not start from the centers after a round."""
  _centers.assign_packed = lambda variables, flats, groups: tf.group(*flats)


def _one_push_of_ten(times):
  """Of ten exchanges, one moves the center so many times as far."""
  assign = ops.averaging_assign

  def broken(targets, sources, weights=None, **kwargs):
    if weights is not None:
      by = tf.where(tf.random.uniform([]) > 0.9, float(times), 1.0)
      weights = [weights[0], weights[1] * tf.cast(by, tf.float64)]
    return assign(targets, sources, weights=weights, **kwargs)

  ops.averaging_assign = broken


@_in_worker(1)
def center_loses_a_push():
  _one_push_of_ten(0)


@_in_worker(1)
def push_counts_twice():
  _one_push_of_ten(2)
