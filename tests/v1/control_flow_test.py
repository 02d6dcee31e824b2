"""Branches with ref variables, also while other threads build graphs."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

from modes import control_flow
from threads import in_threads
import wrapopt
from wrapopt._v1._graphs import _control_flow

tf1 = tf.compat.v1


def ref(name, value=0.0):
  return tf1.get_variable(name, initializer=value, use_resource=False)


def add(variable, value=1.0):
  return tf1.assign_add(variable, value).op


def run(graph, *fetches, feeds=({},)):
  """What is fetched at last, of a session that runs all with each feed."""
  with tf1.Session(graph=graph) as session:
    session.run(tf1.global_variables_initializer())
    for feed in feeds:
      session.run(fetches[:-1], feed)
    return session.run(fetches[-1])


@pytest.mark.parametrize("v2", [True, False])
def test_a_branch_changes_a_ref_variable(v2):
  with control_flow(v2), tf.Graph().as_default() as graph:
    v, accept = ref("v"), tf1.placeholder(tf.bool, [])
    done = _control_flow.cond(accept, lambda: add(v), has_refs=True)
    assert run(graph, done, v, feeds=[
        {accept: x} for x in (True, False, True)]) == 2


@pytest.mark.parametrize("v2", [True, False])
def test_a_branch_in_a_branch(v2):
  with control_flow(v2), tf.Graph().as_default() as graph:
    v = ref("v")
    outer, inner = (tf1.placeholder(tf.bool, []) for _ in range(2))
    done = _control_flow.cond(
        outer, lambda: _control_flow.cond(
            inner, lambda: add(v), has_refs=True), has_refs=True)
    assert run(graph, done, v, feeds=[
        {outer: x, inner: y} for x in (True, False)
        for y in (True, False)]) == 1


def test_a_branch_in_a_loop_in_a_branch():
  with control_flow(v2=False), tf.Graph().as_default() as graph:
    v, accept = ref("v"), tf1.placeholder(tf.bool, [])

    def body(i):
      done = _control_flow.cond(tf.equal(i % 2, 0), lambda: add(v, 10.0),
                                has_refs=True)
      with tf.control_dependencies([done]):
        return i + 1

    def loop():
      return tf1.while_loop(lambda i: i < 5, body, [tf.constant(0)]).op

    done = _control_flow.cond(accept, loop, has_refs=True)
    assert run(graph, done, v, feeds=[
        {accept: x} for x in (False, True, False)]) == 30


def test_a_branch_in_the_function_of_a_branch():
  # A branch of control flow v2 is a function.
  with control_flow(v2=True), tf.Graph().as_default() as graph:
    v = tf1.get_variable("v", initializer=0.0, use_resource=True)
    accept = tf1.placeholder(tf.bool, [])

    def outer():
      return _control_flow.cond(accept, lambda: v.assign_add(1).op,
                                has_refs=True)

    done = tf.cond(accept, outer, lambda: tf.constant(True))
    assert run(graph, done, v, feeds=[
        {accept: x} for x in (False, True, False)]) == 1


def test_values_of_either_branch():
  with control_flow(v2=True), tf.Graph().as_default() as graph:
    v, which = ref("v", 3.0), tf1.placeholder(tf.bool, [])
    outside = tf.constant(4.0)
    value = _control_flow.cond_of_refs(which, v.read_value, lambda: outside)
    assert value.dtype == tf.float32
    for x, want in (True, 3), (False, 4):
      got = run(graph, value[tf.newaxis], tf.no_op(), feeds=[{which: x}])
      assert got is None
      with tf1.Session() as session:
        session.run(v.initializer)
        assert session.run(value, {which: x}) == want


def test_branches_give_values_from_outside():
  """Of their own branch and of the loop that they are in."""
  with control_flow(v2=False), tf.Graph().as_default():
    outer = tf1.placeholder(tf.bool, [])
    a, b, c = map(tf.constant, (1, 10, 100))

    def body(i, total):
      return i + 1, total + _control_flow.cond_of_refs(
          outer, lambda: _control_flow.cond_of_refs(
              tf.equal(i % 2, 0), lambda: a, lambda: b), lambda: c)

    _, total = tf1.while_loop(lambda i, total: i < 5, body,
                              [tf.constant(0), tf.constant(0)])
    with tf1.Session() as session:
      assert session.run(total, {outer: True}) == 23
      assert session.run(total, {outer: False}) == 500


def test_a_meta_graph_holds_the_branches(tmp_path):
  path = str(tmp_path / "graph.meta")
  with control_flow(v2=True), tf.Graph().as_default():
    v, accept = ref("v"), tf1.placeholder(tf.bool, [], name="accept")
    done = _control_flow.cond(accept, lambda: add(v), has_refs=True)
    tf1.train.export_meta_graph(path)
  with tf.Graph().as_default() as graph:
    tf1.train.import_meta_graph(path)
    (v,) = tf1.global_variables()
    contexts = tf1.get_collection(tf1.GraphKeys.COND_CONTEXT)
    assert sorted(c.branch for c in contexts) == [0, 1]
    assert run(graph, done.name, v, feeds=[
        {"accept:0": x} for x in (True, False, True)]) == 2


def test_an_error_in_a_branch_leaves_it():
  with control_flow(v2=True), tf.Graph().as_default() as graph:
    def fail():
      raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
      _control_flow.cond(tf.constant(False), fail, has_refs=True)
    v = ref("v")
    assert run(graph, add(v), v) == 1


# Threads, each of which builds a graph of its own.


class _Meeting:
  """Two threads, each of which goes on when the other is there."""

  def __init__(self):
    self._barrier = threading.Barrier(2, timeout=60)

  def __call__(self):
    self._barrier.wait()

  def of(self, *bodies):
    """Runs two functions at once; the error of one ends the other's wait."""
    def guarded(body):
      try:
        body()
      except BaseException:
        self._barrier.abort()
        raise

    in_threads(*[functools.partial(guarded, body) for body in bodies])


class _Pausing(tf1.train.GradientDescentOptimizer):
  """Calls a function where it makes its step."""

  def __init__(self, pause):
    super().__init__(1.0)
    self._pause = pause

  def _apply_dense(self, grad, var):
    self._pause()
    return super()._apply_dense(grad, var)


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("wrap", [
    lambda gate: gate, lambda gate: wrapopt.MovingAverageOptimizer(gate, 0.5)],
                         ids=["gated", "averaged"])
def test_another_thread_builds_as_the_process_is_set(wrap, v2):
  meet = _Meeting()

  def wrapped():
    with tf.Graph().as_default() as graph:
      def pause():
        meet()  # This thread is in a branch of ref variables.
        meet()  # The other one has built.

      v = ref("v")
      train = wrap(wrapopt.DropStaleGradientOptimizer(
          _Pausing(pause), 0)).minimize(
              3.0 * v, tf1.train.get_or_create_global_step(), var_list=[v])
      assert run(graph, train, v) == -3

  def other():
    with tf.Graph().as_default() as graph:
      meet()
      try:
        assert tf1.control_flow_v2_enabled() == v2
        x = tf1.placeholder_with_default(True, [])
        tf.cond(x, lambda: tf.constant(1), lambda: tf.constant(2))
        made = {op.type for op in graph.get_operations()}
        assert bool(made & {"If", "StatelessIf"}) == v2, made
        assert ("Switch" in made) != v2, made
      finally:
        meet()

  with control_flow(v2):
    meet.of(wrapped, other)
    assert tf1.control_flow_v2_enabled() == v2


def test_threads_record_steps_at_once():
  """Reads of each graph's weights come after that graph's own record."""
  meet = _Meeting()

  def build(value):
    with tf.Graph().as_default() as graph:
      step = tf1.train.get_or_create_global_step()
      v = ref("v", value)
      opt = wrapopt.DropStaleGradientOptimizer(
          tf1.train.GradientDescentOptimizer(1.0), 0, global_step=step)
      before = v.value()
      with opt.record_step() as recorded:
        meet()
        read = v.value()
        meet()
        loss = 2.0 * v
      meet()
      assert v.value() is before
      assert read is not before and read.op.control_inputs == [recorded.op]
      train = opt.minimize(loss, step)
      np.testing.assert_array_equal(run(graph, train, [v, step]),
                                    [value - 2, 1])

  meet.of(lambda: build(5.0), lambda: build(7.0))
