"""The staleness gate against a model of a few lines, in random programs."""

import hypothesis
from hypothesis import stateful
from hypothesis import strategies
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

from processes import wait_until
from threads import in_threads
from wrapopt import ops
from wrapopt._loader import ops as raw

BUCKETS = 3


class Model:
  """What the gate promises.

  A record is the number of updates that weights surely contain: those that are
  over, and those in flight that have incremented the step themselves. The
  staleness of an update is the number of the others that were admitted since.

  The gate does not know which updates have incremented the step themselves. So
  it takes one that is aborted for one of these, and may overestimate staleness
  by as many as there are in flight.

  Attributes:
    step: The step variable.
    aborted: The number of updates that ended without `complete`.
    flying: {update: whether it has incremented the step itself}.
    surplus: How many updates the gate counts too much.
    numbers: {update in flight: (number, whether it is of the present era)}.
    free: Numbers of aborted updates, of this era.
    fresh: The least number that was never given.
    lost: The buckets of aborted updates that the histogram still counts.
    tokens: {update in flight: its token}.
    cut_off: Tokens of aborted updates.
    over: Tokens of updates that are complete or were dropped.
  """

  def __init__(self):
    self.step = self.aborted = self._next = self.surplus = self.fresh = 0
    self.flying, self.numbers, self.free = {}, {}, set()
    self.buckets, self.lost = {}, []
    self.tokens, self.cut_off, self.over = {}, set(), set()
    self.counter = 0
    self.histogram = np.zeros([2, BUCKETS], int)

  def record(self):
    return self.step + self.aborted, len(self.flying)

  def ask(self, recorded, limit, token=-1, counts=True):
    """Returns (the admitted update or None, its staleness, its number)."""
    if token in self.over:
      return None, -1, -1
    self.cut_off.discard(token)
    # All numbers but those in flight and free ones are of complete updates: as
    # many as the step says, unless something else has changed it.
    if self.fresh - len(self.flying) - len(self.free) != self.step:
      self.free, self.fresh = set(), self.step + len(self.flying)
      self.numbers = {u: (n, False) for u, (n, _) in self.numbers.items()}
      self.lost.clear()
    counted = list(self.flying.values())
    self.surplus = min(self.surplus, counted.count(True))
    staleness = (self.record()[0] + counted.count(False) + self.surplus -
                 recorded)
    is_admitted = 0 <= limit and staleness <= limit
    if counts:
      # The histogram does not count aborted updates any more.
      while self.lost:
        self.histogram[0, self.lost.pop()] -= 1
      self.counter += not is_admitted
      self.histogram[int(not is_admitted),
                     min(max(staleness, 0), BUCKETS - 1)] += 1
    if not is_admitted:
      self.over |= {token} - {-1}
      return None, staleness, -1
    self._next += 1
    self.tokens[self._next] = token
    number = min(self.free | {self.fresh})
    self.free.discard(number)
    self.fresh = max(self.fresh, number + 1)
    self.numbers[self._next] = number, True
    if counts:
      self.buckets[self._next] = min(max(staleness, 0), BUCKETS - 1)
    self.flying[self._next] = False
    return self._next, staleness, number

  def count(self, update):
    self.step += 1
    self.flying[update] = True

  def complete(self, update):
    self.step += not self.flying.pop(update)
    del self.numbers[update]
    self.over |= {self.tokens.pop(update)} - {-1}

  def abort(self, update):
    self.cut_off |= {self.tokens.pop(update)} - {-1}
    number, is_present = self.numbers.pop(update)
    self.free |= {number} if is_present else set()
    if update in self.buckets and is_present:
      self.lost.append(self.buckets[update])
    self.surplus += not self.flying.pop(update)
    self.aborted += 1

  def restore(self, step):
    self.surplus = max(0, self.surplus + self.step - step)
    self.step = step


# The update of a worker whose step fails or is cancelled: once for all
# examples, since it takes long to trace.
class _Broken(Exception):
  pass


_act = None


def _call_act():
  _act()
  return np.int64(0)


@tf.function(autograph=False)
def _update_that_ends(step, counter, histogram, recorded, limit, rounds):
  verdict = raw.wrapopt_staleness_gate(
      step, counter, histogram, recorded, limit, token=-1)
  with tf.control_dependencies([verdict.accept]):
    begun = tf.numpy_function(_call_act, [], tf.int64)
  with tf.control_dependencies([begun]):
    # For ever.
    waited = raw.wrapopt_averaging_close(rounds, [-1, 0], 1, np.inf, np.inf)
  with tf.control_dependencies([waited]):
    raw.wrapopt_staleness_complete(verdict.ticket, step, increment=True)
  return verdict.accept


class Gate(stateful.RuleBasedStateMachine):
  """Workers that record, ask, complete, fail and come back."""

  records = stateful.Bundle("records")
  saved = stateful.Bundle("saved")

  @stateful.initialize(dtype=strategies.sampled_from([tf.int32, tf.int64]))
  def start(self, dtype):
    self.dtype = dtype
    self.make()

  @stateful.rule()
  @stateful.precondition(lambda self: not self.tickets)
  def make(self):
    """The first gate, or one in its place after a restart of the server."""
    self.step = tf.Variable(0, dtype=self.dtype)
    self.counter = tf.Variable(0.)
    self.histogram = tf.Variable(tf.zeros([2, BUCKETS], tf.int64))
    self.model = Model()
    self.tickets = {}

  def __init__(self):
    super().__init__()
    self.tickets, self.tokens = {}, 0

  def gate(self, recorded, limit, token=-1):
    verdict = ops.staleness_gate(self.step, self.counter, self.histogram,
                                 recorded, limit, token=token)
    return (bool(verdict.accept), int(verdict.staleness), int(verdict.number),
            verdict.ticket)

  @stateful.rule(target=records)
  def record(self):
    recorded, in_flight = (int(x) for x in ops.staleness_record(self.step))
    assert (recorded, in_flight) == self.model.record()
    return recorded

  def token(self, data):
    """None, that of an update that has ended, or a new one."""
    ended = sorted(self.model.over | self.model.cut_off)
    self.tokens += 1
    kinds = [[-1], [self.tokens], ended] if ended else [[-1], [self.tokens]]
    return data.draw(strategies.sampled_from(
        data.draw(strategies.sampled_from(kinds))))

  # Some records are of a gate that is gone, or of a step that was set back: it
  # may be far ahead.
  @stateful.rule(recorded=records, limit=strategies.integers(-1, 3),
                 ahead=strategies.sampled_from([0, 0, 0, 9]),
                 data=strategies.data())
  def ask(self, recorded, limit, ahead, data):
    recorded += ahead
    token = self.token(data)
    accept, staleness, number, ticket = self.gate(recorded, limit, token)
    update, *expected = self.model.ask(recorded, limit, token)
    assert (accept, staleness, number) == (update is not None, *expected)
    if accept:
      self.tickets[update] = ticket
    else:  # It may be completed all the same, and nothing happens.
      ops.staleness_complete(ticket, self.step)

  @stateful.rule(recorded=records, limit=strategies.integers(0, 3),
                 threads=strategies.integers(2, 5))
  def ask_at_once(self, recorded, limit, threads):
    """The answers are those of one after another, in any order."""
    got = []
    in_threads(*threads * [lambda: got.append(self.gate(recorded, limit))])
    expected = [self.model.ask(recorded, limit) for _ in range(threads)]
    # By number: those that were not admitted have none.
    got.sort(key=lambda x: x[:3])
    expected.sort(key=lambda x: (x[0] is not None, *x[1:]))
    assert [x[:3] for x in got] == [
        (update is not None, *x) for update, *x in expected]
    self.tickets.update((update, x[3]) for (update, *_), x in zip(expected, got)
                        if update is not None)

  @stateful.rule(recorded=records, data=strategies.data())
  def begin(self, recorded, data):
    """Without a limit or counters."""
    token = self.token(data)
    update, _, number = self.model.ask(recorded, np.inf, token, counts=False)
    accept, got, ticket = ops.begin_update(self.step, token=token)
    assert (bool(accept), int(got)) == (update is not None, number)
    if update is not None:
      self.tickets[update] = ticket

  @stateful.rule(data=strategies.data())
  @stateful.precondition(lambda self: self.tickets)
  def complete(self, data):
    update = data.draw(strategies.sampled_from(sorted(self.tickets)))
    ticket = self.tickets.pop(update)
    increment = not self.model.flying[update]
    ops.staleness_complete(ticket, self.step, increment)
    self.model.complete(update)
    with pytest.raises(tf.errors.FailedPreconditionError, match=(
        "ticket must be completed once, got one whose ")):
      ops.staleness_complete(ticket, self.step, increment)

  # Of an update that has incremented the step itself, the gate would take the
  # one or the other number for the one of now.
  @stateful.rule()
  @stateful.precondition(
      lambda self: self.tickets and not any(self.model.flying.values()))
  def end_all_at_once(self):
    """Half of those that can complete, the others abort; threads ask, too."""
    self.gate(0, -1)  # Notes the step, if it was restored.
    self.model.ask(0, -1)
    ends = []
    for i, update in enumerate(sorted(self.tickets)):
      ticket = self.tickets.pop(update)
      counted = self.model.flying[update]
      if i % 2:
        self.model.complete(update)
        ends.append(lambda t=ticket, c=counted: ops.staleness_complete(
            t, self.step, not c))
      else:
        self.model.abort(update)
        holder = [ticket]
        ends.append(holder.clear)
      del ticket
    in_threads(*ends, lambda: self.gate(0, -1))
    ends.clear()
    # Where in the order it asked is not known: with a negative limit only the
    # counts tell, when another one has taken all back that were aborted.
    self.gate(0, -1)
    self.model.counter += 2
    self.model.lost.clear()
    self.model.histogram = self.histogram.numpy()
    assert self.model.histogram.sum() == (
        self.model.histogram[0].sum() + self.model.counter)

  @stateful.rule(data=strategies.data())
  @stateful.precondition(
      lambda self: False in self.model.flying.values())
  def count(self, data):
    """The update's optimizer increments the step itself."""
    update = data.draw(strategies.sampled_from(sorted(
        u for u, counted in self.model.flying.items() if not counted)))
    self.step.assign_add(1)
    self.model.count(update)

  @stateful.rule(data=strategies.data())
  @stateful.precondition(lambda self: self.tickets)
  def drop(self, data):
    """A worker is gone, whether it has incremented the step or not."""
    update = data.draw(strategies.sampled_from(sorted(self.tickets)))
    del self.tickets[update]
    self.model.abort(update)

  @stateful.rule(recorded=records, limit=strategies.integers(-1, 3),
                 cancels=strategies.booleans())
  def fail(self, recorded, limit, cancels):
    """A step that fails or is cancelled between admission and completion."""
    global _act
    manager = cancellation.CancellationManager()

    def broken():
      raise _Broken()

    _act = manager.start_cancel if cancels else broken
    arguments = (self.step.handle, self.counter.handle, self.histogram.handle,
                 tf.constant(recorded, tf.int64), tf.constant(limit, tf.int64),
                 _rounds())
    run = manager.get_cancelable_function(
        _update_that_ends.get_concrete_function(*arguments))
    ended = []

    def step():
      try:
        run(*arguments)
      except (tf.errors.CancelledError, tf.errors.UnknownError) as e:
        ended.append(type(e))

    in_threads(step)
    assert ended == [tf.errors.CancelledError if cancels else
                     tf.errors.UnknownError]
    update, *_ = self.model.ask(recorded, limit)
    if update is not None:
      self.model.abort(update)
    # A step may drop its tensors just after it has returned.
    wait_until(lambda: ops.staleness_record(self.step)[1] ==
               len(self.model.flying), "the update is not aborted")

  @stateful.rule(target=saved)
  def save(self):
    return int(self.step)

  # Forward only at rest: the gate takes a step that grows for one that an
  # update in flight increments.
  @stateful.rule(step=saved)
  @stateful.precondition(lambda self: not any(self.model.flying.values()))
  def restore(self, step):
    if self.tickets:
      step = min(step, self.model.step)
    self.step.assign(step)
    self.model.restore(step)

  @stateful.invariant()
  def state(self):
    if not hasattr(self, "model"):
      return
    recorded, in_flight = ops.staleness_record(self.step)
    assert (int(recorded), int(in_flight)) == self.model.record()
    assert int(self.step) == self.model.step
    assert float(self.counter) == self.model.counter
    np.testing.assert_array_equal(self.histogram, self.model.histogram)


def _rounds():
  # No worker comes to a round of these.
  return raw.wrapopt_averaging_rounds(num_workers=1,
                                      shared_name="gate_model_test")


TestGate = Gate.TestCase
TestGate.settings = hypothesis.settings(max_examples=60, stateful_step_count=25)


def test_an_abort_that_counts_twice():
  """An update that has incremented the step itself and then fails.

  The gate counts it as an increment and as aborted, as the next record does.
  """
  step, counter = tf.Variable(0), tf.Variable(0.)
  histogram = tf.Variable(tf.zeros([2, BUCKETS], tf.int64))
  gate = lambda recorded, limit: ops.staleness_gate(step, counter, histogram,
                                                    recorded, limit)
  first, second = gate(0, 1), gate(0, 1)
  assert first.accept and second.accept
  step.assign_add(1)  # By the second's optimizer.
  del second
  # The weights contain the second's changes, and may lack the first's.
  recorded, in_flight = ops.staleness_record(step)
  assert in_flight == 1
  assert gate(recorded, 0).staleness == 1
