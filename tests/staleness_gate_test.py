"""The gate's ops: admission, counts, errors, races."""

import contextlib
import random
import threading

import numpy as np
import pytest
import tensorflow as tf

from modes import Eager
from modes import called
from modes import at_build
from modes import evaluate
from modes import graphs
from modes import handle_of
from modes import only
from modes import refused
from modes import uncompiled_mode as mode
import race
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

  def update(self, recorded, limit, increment=True):
    """(whether it was admitted, its staleness) of one whole update."""
    def build():
      verdict = self.gate(recorded, limit)
      complete = ops.staleness_complete(verdict.ticket, self.step, increment)
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


def test_buckets(mode):
  gate = Gate(mode, buckets=3)
  for recorded in (5, 0, -1, -2, -100):
    gate.update(recorded, -1)
  # A staleness of -5 counts as 0, of 2 and more as 2.
  assert gate.values() == (0, 5.0, [[0, 0, 0], [2, 1, 2]])


FIRST, LAST = np.int64(-2**63), np.int64(2**63 - 1)


@pytest.mark.parametrize("step, recorded, limit, admitted, staleness", [
    (1, FIRST, 2, False, LAST),
    (0, FIRST, 2, False, LAST),
    (-1, FIRST, 2, False, LAST),
    (-1, FIRST, LAST, True, LAST),
    (1, FIRST, LAST, True, LAST),
    (LAST, -1, 2, False, LAST),
    (LAST, 0, 2, False, LAST),
    (LAST, LAST, 0, True, 0),
    (LAST, FIRST, 2, False, LAST),
    (FIRST, 0, 0, True, FIRST),
    (FIRST, 1, 0, True, FIRST),
    (FIRST, LAST, 0, True, FIRST),
])
@only(Eager(), *graphs())
def test_staleness_ends_where_int64_does(mode, step, recorded, limit, admitted,
                                         staleness):
  gate = Gate(mode, step=step)
  assert gate.update(np.int64(recorded), np.int64(limit)) == (admitted,
                                                              staleness)


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


def test_a_negative_limit_drops_always(mode):
  gate = Gate(mode)
  for recorded in (0, 10):
    assert not gate.update(recorded, -1)[0]
  assert gate.record() == (0, 0)


def test_the_limit_may_be_a_tensor_or_a_variable(mode):
  gate = Gate(mode)
  limit = mode.variable(np.int32(1))
  assert gate.update(-1, limit) == (True, 1)
  assert gate.update(0, np.int64(0)) == (False, 1)


def test_updates_in_flight_count(mode):
  """Between admission and completion, for those who record and who ask."""
  gate = Gate(mode)

  def build():
    # In one step, for a ticket lives no longer.
    first = gate.gate(0, 0)
    with tf.control_dependencies([first.accept]):
      recorded, in_flight = ops.staleness_record(gate.step)
      late = gate.gate(recorded, 0)
    with tf.control_dependencies([late.accept]):
      soon = gate.gate(recorded, 1)
    with tf.control_dependencies([soon.accept]):
      _, both = ops.staleness_record(gate.step)
    with tf.control_dependencies([both]):
      complete = [ops.staleness_complete(t.ticket, gate.step)
                  for t in (first, late, soon)]
    with tf.control_dependencies([c for c in complete if c is not None]):
      return [tf.identity(x) for x in (
          recorded, in_flight, late.accept, late.staleness, soon.accept,
          soon.staleness, both)]

  assert evaluate(mode, build) == [0, 1, False, 1, True, 1, 2]
  assert gate.record() == (2, 0)


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


def test_a_second_try_counts_nothing():
  step, counter = tf.Variable(0), tf.Variable(0.)
  histogram = tf.Variable(tf.zeros([2, 4], tf.int64))

  def gate(limit, token):
    return ops.staleness_gate(step, counter, histogram, 0, limit, token=token)

  for limit, token in (9, 3), (-1, 4):
    first = gate(limit, token)
    ops.staleness_complete(first.ticket, step)
    again = gate(9, token)
    assert [x.numpy() for x in (again.accept, again.staleness,
                                again.number)] == [False, -1, -1]
    ops.staleness_complete(again.ticket, step)
    accept, number, _ = ops.begin_update(step, token=token)
    assert [accept.numpy(), number.numpy()] == [False, -1]
  assert step.numpy() == counter.numpy() == 1
  assert histogram.numpy().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
  # The first try was cut off.
  lost = gate(9, 5)
  assert lost.accept and lost.number == 1
  del lost
  accept, number, ticket = ops.begin_update(step, token=5)
  assert accept and number == 1
  ops.staleness_complete(ticket, step)
  assert step.numpy() == 2


def test_a_second_try_after_the_step_was_set_back():
  """The histogram that was restored does not count the aborted update."""
  step, counter = tf.Variable(0), tf.Variable(0.)
  histogram = tf.Variable(tf.zeros([2, 4], tf.int64))

  def gate(limit, token):
    return ops.staleness_gate(step, counter, histogram, 0, limit, token=token)

  gate(-1, 1)
  gate(9, 2)  # Aborted at once.
  step.assign(7)
  histogram.assign(tf.zeros_like(histogram))
  assert gate(9, 1).staleness == -1
  assert histogram.numpy().tolist() == np.zeros([2, 4]).tolist()
  assert gate(9, 3).staleness == 8
  assert histogram.numpy().tolist() == [[0, 0, 0, 1], [0] * 4]


@only(*graphs())
def test_an_update_that_fails_is_aborted(mode):
  gate = Gate(mode)
  bad = tf1.placeholder(tf.float32)
  verdict = gate.gate(0, 0)
  with tf.control_dependencies([verdict.accept]):
    check = tf.debugging.check_numerics(bad, "the update")
  with tf.control_dependencies([check]):
    complete = ops.staleness_complete(verdict.ticket, gate.step)
  with pytest.raises(tf.errors.InvalidArgumentError, match="the update"):
    mode.session.run(complete, {bad: np.nan})
  assert gate.record() == (1, 0)
  assert gate.values()[0] == 0


def test_somebody_else_increments_the_step(mode):
  """Within the update, and then between updates."""
  gate = Gate(mode)
  other = lambda by: tf1.assign_add(gate.step, by) if (
      mode.name == "ref-graph") else gate.step.assign_add(by)

  def build():
    verdict = gate.gate(0, 0)
    with tf.control_dependencies([verdict.accept]):
      added = other(1)
    with tf.control_dependencies([added]):
      stale = gate.gate(0, 9)  # Neither missed nor counted twice.
    with tf.control_dependencies([stale.accept]):
      complete = ops.staleness_complete(verdict.ticket, gate.step,
                                        increment=False)
    with tf.control_dependencies([] if complete is None else [complete]):
      return tf.identity(stale.staleness)

  assert evaluate(mode, build) == 1
  # The second was aborted.
  assert gate.record() == (2, 0)
  assert gate.values()[0] == 1
  evaluate(mode, lambda: tf.convert_to_tensor(other(5)))
  assert gate.record() == (7, 0)
  assert gate.update(2, 4) == (False, 5)
  assert gate.update(2, 5) == (True, 5)
  # Set back, as by a checkpoint.
  evaluate(mode, lambda: tf.convert_to_tensor(other(-7)))
  assert gate.record() == (1, 0)
  assert gate.update(8, 0) == (True, -7)
  assert gate.update(1, 0) == (False, 1)


@only(Eager())
def test_a_ticket_is_completed_once(mode):
  gate = Gate(mode)
  ticket = gate.gate(0, 0).ticket
  ops.staleness_complete(ticket, gate.step)
  before = gate.values()
  with pytest.raises(tf.errors.FailedPreconditionError,
                     match="ticket must be completed once, got one whose "):
    ops.staleness_complete(ticket, gate.step)
  del ticket
  assert gate.values() == before and gate.record() == (1, 0)


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


# Races

THREADS, TRIES, LIMIT = 8, 3500, 2


def test_lacking():
  # One after the other: each reads what the last one changed.
  assert race.lacking([(10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3)
                       for i in range(3)]).tolist() == [0, 0, 0]
  # All read at 0, and are admitted one after the other.
  assert race.lacking([(0, 2 * i, 2 * i + 1, 90) for i in range(3)]
                     ).tolist() == [0, 1, 2]
  assert race.lacking([]).size == 0


class _Worker:
  """Tries updates in THREADS threads.

  However slow the machine is, the first updates of the threads meet: all read
  the weights, all ask, one after the other, and then all change the weights.

  Attributes:
    completed: (before it asked, after it was complete) of each update.
    dropped: (before it recorded, after it was refused) of each other one.
  """

  def __init__(self):
    self.completed, self.dropped = [], []
    self._met, self._turn = set(), threading.Lock()
    # Ends if a thread has failed.
    self._meeting = threading.Barrier(THREADS, timeout=600)

  def record(self):
    raise NotImplementedError

  def ask(self, recorded):
    """An update, or None."""
    raise NotImplementedError

  def complete(self, update):
    raise NotImplementedError

  def __call__(self, i):
    meets = i not in self._met
    self._met.add(i)
    wait, turn = ((self._meeting.wait, self._turn) if meets else
                  (_idle, contextlib.nullcontext()))
    began = race.now()
    recorded = self.record()
    read = race.now()
    wait()
    with turn:
      asked = race.now()
      update = self.ask(recorded)
      answered = race.now()
    wait()
    if update is None:
      self.dropped.append((began, answered))
      return None
    changed = race.now()
    self.complete(update)
    self.completed.append((asked, race.now()))
    return race.Entry(read, asked, answered, changed)


class _Native(_Worker):
  """The gate under test."""

  def __init__(self):
    super().__init__()
    self.gate = Gate(Eager())

  def record(self):
    return ops.staleness_record(self.gate.step)[0]

  def ask(self, recorded):
    verdict = self.gate.gate(recorded, LIMIT)
    return verdict.ticket if verdict.accept else None

  def complete(self, update):
    ops.staleness_complete(update, self.gate.step)


class _CheckThenApply(_Worker):
  """What 1.15 does: compares, and increments when the update is made."""

  def __init__(self):
    super().__init__()
    self.step = tf.Variable(0, dtype=tf.int64)

  def record(self):
    return self.step + 0

  def ask(self, recorded):
    return True if self.step - recorded <= LIMIT else None

  def complete(self, update):
    self.step.assign_add(1)


def _idle():
  """Lets other threads in, now and then."""
  if random.random() < 0.2:
    for _ in range(random.randrange(200)):
      pass
    tf.identity(0)


def test_the_bound_holds_however_many_race():
  worker = _Native()
  log = race.in_threads(worker, THREADS, TRIES)
  lacking = race.lacking(log)
  assert lacking.max() == LIMIT  # Some came that far, none farther.
  step, dropped, histogram = worker.gate.values()
  # Nothing got lost on the way.
  assert step == len(log)
  assert dropped == len(worker.dropped) == THREADS * TRIES - len(log)
  assert sum(histogram[0]) == len(log) and sum(histogram[1]) == dropped
  assert histogram[0][LIMIT + 1:] == [0] * (4 - LIMIT - 1)
  assert worker.gate.record() == (step, 0)
  # A dropped update may have missed more than the limit: others that may have
  # been admitted before its answer, and were not surely complete before its
  # record.
  began, answered = np.transpose(worker.dropped)
  asked, complete = np.sort(np.transpose(worker.completed))
  missed = (np.searchsorted(asked, answered, side="right") -
            np.searchsorted(complete, began, side="right"))
  assert len(missed) >= THREADS - LIMIT - 1 and missed.min() > LIMIT


def test_the_judge_sees_what_check_then_apply_lets_through():
  log = race.in_threads(_CheckThenApply(), THREADS, 1)
  # Each lacks those that asked before it.
  assert sorted(race.lacking(log)) == list(range(THREADS))
