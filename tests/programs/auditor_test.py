"""The auditor, on programs of `tf.compat.v1` in a session."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import auditor
from auditor import Finding, MovingAverage, Stack
import wrapopt

tf1 = tf.compat.v1
train = tf1.train
STACK = Stack(average=MovingAverage())


def program(make, resource=True, steps=5, constrained=True):
  """Trains a network with an embedding and, perhaps, a constraint."""
  def run(watch):
    tf1.get_variable_scope().set_use_resource(resource)
    ids = tf1.placeholder(tf.int32, [None])
    table = tf1.get_variable("table", [6, 3])
    w = tf1.get_variable("w", [3, 2], constraint=(
        (lambda w: w / 2) if constrained else None))
    b = tf1.get_variable("b", [2], initializer=tf1.zeros_initializer())
    loss = tf.reduce_sum(tf.tanh(tf.gather(table, ids) @ w + b) ** 2)
    step = train.get_or_create_global_step()
    train_op = watch.wrap(make()).minimize(loss, global_step=step)
    watch.prepare()
    with tf1.Session() as session:
      session.run(tf1.global_variables_initializer())
      watch.begin(session)
      for i in range(steps):
        session.run(train_op, {ids: [i, 2, 2]})
        watch.see(session)

  return run


OPTIMIZERS = {
    "Adam": lambda: train.AdamOptimizer(0.01),
    "Adagrad": lambda: train.AdagradOptimizer(0.1),
    "Momentum": lambda: train.MomentumOptimizer(0.1, 0.5),
    "ProximalAdagrad": lambda: train.ProximalAdagradOptimizer(0.1),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("stack", [
    STACK, Stack(average=MovingAverage(update_every=2)),
    Stack(average=MovingAverage(fused=False))],
                         ids=["all", "update_every", "not fused"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_programs(make, stack, resource):
  auditor.audit_in_graph(program(OPTIMIZERS[make], resource), stack)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("name", ["BEMA", "PrimalAverage", "ScheduleFree",
                                  "gate"])
def test_wrappers(name, resource):
  stack = auditor.WRAPPERS[name]
  auditor.audit_in_graph(program(
      lambda: train.AdagradOptimizer(0.1), resource,
      constrained=not stack.between), stack)


def averages_have_another_decay(patch):
  patch.setattr(MovingAverage, "wrap", lambda self, opt, package: (
      wrapopt.MovingAverageOptimizer(opt, self.decay + 1e-6)))


def weights_stay_averages(patch):
  in_place = wrapopt.MovingAverageOptimizer.averaged_weights

  @contextlib.contextmanager
  def averaged_weights(self, session):
    with in_place(self, session):
      v = tf1.trainable_variables()[0]
      value = session.run(v)
      yield
    v.load(value, session)

  patch.setattr(wrapopt.MovingAverageOptimizer, "averaged_weights",
                averaged_weights)


def steps_are_taken_twice(patch):
  wrap = MovingAverage.wrap
  patch.setattr(MovingAverage, "wrap", lambda self, opt, package: wrap(
      self, train.GradientDescentOptimizer(0.2), package))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("broken, error", [
    (averages_have_another_decay, "step 0: average of '.*' is wrong"),
    (weights_stay_averages, "'table' after averaged_weights is"),
    (steps_are_taken_twice, "step 0: '.*' is wrong"),
], ids=lambda x: getattr(x, "__name__", ""))
def test_the_auditor_finds(broken, error, monkeypatch):
  broken(monkeypatch)
  with pytest.raises(Finding, match=error):
    auditor.audit_in_graph(
        program(lambda: train.GradientDescentOptimizer(0.1)), STACK)


@pytest.mark.by_day(0)
def test_a_step_that_is_not_taken():
  def one_more(watch):
    program(OPTIMIZERS["Adam"], steps=3 if watch.stack is None else 2)(watch)

  with pytest.raises(Finding, match="the plain program took 3 steps, the wrap"):
    auditor.audit_in_graph(one_more, STACK)


def test_an_average_by_hand():
  seen = auditor.audit_in_graph(
      program(lambda: train.GradientDescentOptimizer(0.0)), STACK)
  start, first = seen.runs[0].start["w"][0], seen.runs[0].records[0]
  np.testing.assert_array_equal(first.weights["w"][0], start / 2)
  np.testing.assert_allclose(first.averages[0]["w"][0], 0.875 * start)
