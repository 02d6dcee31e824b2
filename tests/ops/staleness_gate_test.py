"""The gate's ops in all modes, and their errors.

For all else, see gate_model_test.py.
"""

import numpy as np
import pytest
import tensorflow as tf

from modes import (
    at_build, called, Eager, evaluate, graphs, handle_of, only, refused,
    uncompiled_mode as mode)
from wrapopt import ops
from wrapopt._loader import ops as raw

tf1 = tf.compat.v1


class Gate:
  """The variables of a gate in one mode."""

  def __init__(self, mode, dtype=np.int64, buckets=4, step=0, count=0):
    self.mode = mode
    self.step = mode.variable(np.full([], step, dtype), name="step")
    self.counter = mode.variable(np.float32(0), name="stale_counter")
    self.histogram = mode.variable(np.full([2, buckets], count, np.int64),
                                   name="histogram")

  @property
  def variables(self):
    return [self.step, self.counter, self.histogram]

  def gate(self, recorded, limit):
    return ops.staleness_gate(*self.variables, recorded, limit)

  def record(self):
    return tuple(int(x) for x in evaluate(
        self.mode, lambda: ops.staleness_record(self.step)))

  def update(self, recorded, limit):
    """(whether it was admitted, its staleness) of one whole update."""
    def build():
      verdict = self.gate(recorded, limit)
      complete = ops.staleness_complete(verdict.ticket, self.step)
      with tf.control_dependencies([] if complete is None else [complete]):
        return tf.identity(verdict.accept), tf.identity(verdict.staleness)
    accept, staleness = evaluate(self.mode, build)
    return bool(accept), int(staleness)

  def abort(self, recorded, limit):
    """Admits an update that nobody completes."""
    accept, _, _ = evaluate(
        self.mode,
        lambda: (*self.gate(recorded, limit)[:2], tf.constant(0)))
    assert accept

  def values(self):
    step, counter, histogram = self.mode.values(self.variables)
    return int(step), float(counter), histogram.tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_trajectory(mode, dtype):
  gate = Gate(mode, dtype)
  assert gate.record() == (0, 0)
  # Three updates from the weights of step 0, with a limit of one.
  assert gate.update(0, 1) == (True, 0)
  assert gate.update(0, 1) == (True, 1)
  assert gate.update(0, 1) == (False, 2)
  # The third one changed nothing but the counts.
  assert gate.record() == (2, 0)
  assert gate.values() == (2, 1.0, [[1, 1, 0, 0], [0, 0, 1, 0]])
  assert gate.update(2, 1) == (True, 0)
  assert gate.values() == (3, 1.0, [[2, 1, 0, 0], [0, 0, 1, 0]])


FIRST, LAST = np.int64(-2**63), np.int64(2**63 - 1)


def test_the_last_steps(mode):
  gate = Gate(mode, step=LAST)
  gate.abort(LAST, 0)
  # The aborted update cannot be counted any more.
  assert gate.record() == (LAST, 0)

  def build():
    # Two in flight at once.
    first = gate.gate(LAST, 0)
    with tf.control_dependencies([first.accept]):
      second = gate.gate(LAST, 0)
    with tf.control_dependencies([second.accept]):
      return [tf.identity(x) for x in (
          first.accept, first.staleness, second.accept, second.staleness)]

  assert evaluate(mode, build) == [True, 0, True, 0]
  # The step wraps around, as TensorFlow's does, and the gate goes with it.
  assert gate.update(LAST, 0) == (True, 0)
  assert gate.values()[0] == FIRST


def test_a_histogram_that_is_full(mode):
  gate = Gate(mode, count=LAST)
  assert gate.update(0, 0) == (True, 0)
  assert gate.update(0, 0) == (False, 1)
  assert gate.values() == (1, 1.0, [[LAST] * 4] * 2)


def test_the_limit_may_be_a_tensor_or_a_variable(mode):
  gate = Gate(mode)
  limit = mode.variable(np.int32(1))
  assert gate.update(-1, limit) == (True, 1)
  assert gate.update(0, np.int64(0)) == (False, 1)


def test_an_update_that_is_not_completed_is_aborted(mode):
  gate = Gate(mode)
  gate.abort(0, 0)
  # It may have changed weights: for those who read them before, it counts.
  assert gate.record() == (1, 0)
  assert gate.values()[0] == 0
  assert gate.update(0, 0) == (False, 1)
  # For those who read them since, the limit is what it was.
  assert gate.update(1, 0) == (True, 0)
  assert gate.update(1, 0) == (False, 1)
  assert gate.update(2, 0) == (True, 0)
  assert gate.record() == (3, 0)
  # The next update has taken the one that was aborted back.
  assert gate.values() == (2, 2.0, [[2, 0, 0, 0], [0, 2, 0, 0]])


@only(Eager())
def test_a_ticket_is_of_one_gate(mode):
  gate = Gate(mode)
  ticket = gate.gate(0, 0).ticket
  other = tf.Variable(0, dtype=tf.int64)
  with pytest.raises(tf.errors.InvalidArgumentError,
                     match=r"must be the step of the gate that made the "):
    ops.staleness_complete(ticket, other)
  with pytest.raises(tf.errors.InvalidArgumentError,
                     match="ticket must be one of Wrapopt>StalenessGate"):
    ops.staleness_complete(gate.step.handle, gate.step)
  assert gate.record() == (0, 1)
  assert other.numpy() == 0
  ops.staleness_complete(ticket, gate.step)
  assert gate.record() == (1, 0)


@only(Eager())
def test_gates_of_two_steps_know_nothing_of_each_other(mode):
  one, two = Gate(mode), Gate(mode)
  verdict = one.gate(0, 0)
  assert one.record() == (0, 1) and two.record() == (0, 0)
  assert two.update(0, 0) == (True, 0)
  del verdict
  assert one.record() == (1, 0) and two.record() == (1, 0)


@pytest.mark.parametrize("which, value, text", [
    (0, np.zeros([1], np.int64), r"misshapen: got \[1\] but expected \[\] "),
    (1, np.zeros([3], np.float32), r"misshapen: got \[3\] but expected \[\] "),
    (2, np.zeros([3, 4], np.int64),
     r"misshapen: got \[3,4\] but expected \[2, B\] with B >= 1"),
    (2, np.zeros([2, 0], np.int64),
     r"misshapen: got \[2,0\] but expected \[2, B\] with B >= 1"),
    (2, np.zeros([2], np.int64),
     r"misshapen: got \[2\] but expected \[2, B\] with B >= 1")])
def test_shapes(mode, which, value, text):
  gate = Gate(mode)
  variables = gate.variables
  # Its shape is known only when the op runs.
  variables[which] = mode.variable(value, name="bad",
                                   shape=tf.TensorShape(None))
  refused(mode, [*gate.variables, variables[which]],
          tf.errors.InvalidArgumentError, called("bad") + " " + text,
          lambda: ops.staleness_gate(*variables, 0, 0).accept)


@pytest.mark.parametrize("argument", ["recorded", "limit"])
def test_shapes_of_numbers(mode, argument):
  gate = Gate(mode)
  arguments = {"recorded": 0, "limit": 0, argument: [0, 0]}
  refused(mode, gate.variables, at_build(mode, tf.errors.InvalidArgumentError),
          argument + r" misshapen: got \[2\] but expected \[\]",
          lambda: gate.gate(**arguments).accept)


@pytest.mark.parametrize("which, value, text", [
    (0, np.float32(0), "step.* must be of dtype int32 or int64, got float"),
    (1, np.float64(0),
     "stale_counter.* must be of dtype float, the op's, got double"),
    (2, np.zeros([2, 4], np.int32),
     "histogram.* must be of dtype int64, the op's, got int32")])
def test_dtypes(mode, which, value, text):
  gate = Gate(mode)
  variables = gate.variables
  variables[which] = mode.variable(value)
  error = at_build(mode, tf.errors.InvalidArgumentError)
  if mode.name == "ref-graph":  # TensorFlow knows the dtype of a ref.
    error, text = TypeError, "float32|float64|int32"
  refused(mode, [*gate.variables, variables[which]], error, text,
          lambda: ops.staleness_gate(*variables, 0, 0).accept)


@pytest.mark.parametrize("which", range(3))
def test_what_is_no_variable(which):
  variables = Gate(Eager()).variables
  variables[which] = tf.constant(variables[which].numpy())
  with pytest.raises(TypeError, match="must be a variable"):
    ops.staleness_gate(*variables, 0, 0)


@only(*graphs())
def test_an_uninitialized_variable(mode):
  gate = Gate(mode)
  variables = gate.variables
  variables[2] = mode.uninitialized(np.zeros([2, 4], np.int64), name="late")
  with pytest.raises(tf.errors.FailedPreconditionError,
                     match="late.* is not initialized|"
                     "uninitialized value late"):
    mode.session.run(ops.staleness_gate(*variables, 0, 0).accept)
  assert gate.record() == (0, 0)


@pytest.mark.parametrize("ref", [False, True])
def test_an_update_in_a_session(ref):
  with tf.Graph().as_default(), tf1.Session() as session:
    step = tf1.Variable(5, dtype=tf.int64, use_resource=not ref)
    accept, number, ticket = ops.begin_update(step)
    assert accept.op.type.endswith("Ref") == ref
    done = ops.staleness_complete(ticket, step)
    session.run(step.initializer)
    for i in range(2):
      assert session.run([accept, number, done]) == [True, 5 + i, None]
      assert session.run(step) == 6 + i


@pytest.mark.parametrize("ref", [False, True])
def test_shape_function(ref):
  suffix = "_ref" if ref else ""
  ops_ = {name: getattr(raw, f"wrapopt_staleness_{name}{suffix}")
          for name in ("record", "gate", "complete")}
  begin = getattr(raw, f"wrapopt_begin_update{suffix}")

  def gate(step=(), counter=(), histogram=(2, 4), recorded=(), limit=(),
           token=()):
    return ops_["gate"](
        handle_of(ref, tf.int32, step), handle_of(ref, tf.float32, counter),
        handle_of(ref, tf.int64, histogram),
        tf1.placeholder(tf.int64, recorded), tf1.placeholder(tf.int64, limit),
        tf1.placeholder(tf.int64, token))

  with tf.Graph().as_default():
    for verdict in (gate(), gate(*[None] * 6),
                    gate(histogram=(None, None))):
      assert [x.shape.rank for x in verdict] == [0] * 4
    for bad, text in (
        ({"step": (1,)}, r"step\[0\] misshapen"),
        ({"counter": (1,)}, r"stale_counter\[0\] misshapen"),
        ({"histogram": (3, 4)}, r"histogram\[0\] misshapen"),
        ({"histogram": (2,)}, r"histogram\[0\] misshapen"),
        ({"recorded": (1,)}, "recorded misshapen"),
        ({"limit": (1,)}, "limit misshapen"),
        ({"token": (1,)}, "token misshapen")):
      with pytest.raises(ValueError, match=text):
        gate(**bad)
    record = ops_["record"](handle_of(ref, tf.int32, ()))
    assert [x.shape.rank for x in record] == [0, 0]
    with pytest.raises(ValueError, match=r"step\[0\] misshapen"):
      ops_["record"](handle_of(ref, tf.int32, (2,)))
    begun = begin(handle_of(ref, tf.int32, ()), tf1.placeholder(tf.int64, ()))
    assert [x.shape.rank for x in begun] == [0, 0, 0]
    for step, token, text in (((2,), (), r"step\[0\] misshapen"),
                              ((), (1,), "token misshapen")):
      with pytest.raises(ValueError, match=text):
        begin(handle_of(ref, tf.int32, step), tf1.placeholder(tf.int64, token))
    ops_["complete"](begun.ticket, handle_of(ref, tf.int32, ()))
    ops_["complete"](gate().ticket, handle_of(ref, tf.int32, ()))
    with pytest.raises(ValueError, match="ticket misshapen"):
      ops_["complete"](tf1.placeholder(tf.resource, [2]),
                       handle_of(ref, tf.int32, ()))
    if not ref:
      with pytest.raises(ValueError, match=r"step\[0\] must be of dtype int32"):
        ops_["record"](handle_of(ref, tf.float32, ()))
      with pytest.raises(ValueError, match=r"histogram\[0\] must be of dtype "
                         "int64"):
        raw.wrapopt_staleness_gate(
            handle_of(ref, tf.int32, ()), handle_of(ref, tf.float32, ()),
            handle_of(ref, tf.int32, (2, 4)), 0, 0, -1)
