"""The averaging rounds against a model, in random programs of several threads.

No test can tell when a call of another thread has come to where it waits. So
the model is a set of states: all that are possible, whenever the calls under
way began to wait or came to their deadlines. Each answer leaves those states
that give it. An answer that leaves none is an error.
"""

import threading
import typing

import hypothesis
from hypothesis import stateful
from hypothesis import strategies
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import execute

from wrapopt import ops

WORKERS = ("a", "b", "c")
ALL = len(WORKERS)
STRANGER = "stranger"
LAST = 2**63 - 1
SOON = 0.01  # Seconds.
JOIN_SECONDS = 60
# Calls of other threads that are under way at a time.
MOST_CALLS = 3
NOTHING_YET = "nothing yet"
CANCELLED = "Cancelled: "


class Call(typing.NamedTuple):
  """A call of an op.

  Attributes:
    op: "push", "gather", "wait", "next" or "mean".
    round: Its round.
    worker: Of a push or a wait.
    value: Of a push.
    min_workers: Of a gather.
    ends: Whether it has a deadline; one of SOON.
    reset: Of a next.
  """
  op: str
  round: int = 0
  worker: str = ""
  value: int = 0
  min_workers: int = 0
  ends: bool = False
  reset: bool = False


class State(typing.NamedTuple):
  """A possible state of the rounds.

  Attributes:
    open: The open round.
    closed: Whether it has been gathered.
    values: {(worker, its value)} of the open round.
    expected: The workers that a gather expects, or None for all.
    new: The calls that have not come to the rounds yet.
    waiting: The calls that wait.
    answers: {(call, answer)} of those that are over.
    gone: Whether the rounds were deleted.
    cancelled: The calls that were cancelled before they came to the rounds.
  """
  open: int = -1
  closed: bool = False
  values: frozenset = frozenset()
  expected: typing.Optional[frozenset] = None
  new: frozenset = frozenset()
  waiting: frozenset = frozenset()
  answers: frozenset = frozenset()
  gone: bool = False
  cancelled: frozenset = frozenset()


class Model:
  """All possible states, and the calls under way: {number: Call}.

  The answer that is an error is its class and a part of its text.
  """

  def __init__(self, name=""):
    self.subject = f"averaging rounds '{name}'"
    self.calls = {}
    self.states = {State()}
    self._cancelled = set()

  # What happens by itself.

  def _settle(self):
    """Adds all states to which the calls under way may lead by themselves."""
    todo, seen = list(self.states), set(self.states)
    while todo:
      state = todo.pop()
      for after in self._events(state):
        if after not in seen:
          seen.add(after)
          todo.append(after)
    self.states = seen

  def _events(self, state):
    for i in state.new:
      if i in state.cancelled:  # Its step has ended before.
        yield _answered(state._replace(new=state.new - {i}), i, CANCELLED)
      yield self.arrive(state._replace(new=state.new - {i}), i)
    for i in state.waiting:
      if self.calls[i].ends:
        yield self.time_out(state, i)

  def arrive(self, state, i):
    """The call comes to the rounds."""
    call = self.calls[i]
    if state.gone:
      return _answered(state, i, "InvalidArgument: rounds must be those of "
                       "Wrapopt>AveragingRounds on this device: ")
    if call.round == LAST and call.op in ("push", "next"):
      return _answered(state, i, "InvalidArgument: round must be less than "
                       f"2^63 - 1, got {LAST}")
    if call.op == "push":
      return self.push(state, i)
    if call.op == "next":
      return self.next(state, i)
    if call.op == "mean":
      return _answered(state, i, self.mean(state, call.round))
    if call.op == "gather" and call.round != state.open:
      return _answered(state, i, self.not_open(state, "a gather", call.round))
    if call.worker and state.expected is not None:
      state = state._replace(expected=state.expected | {call.worker})
    state = self.answer(state._replace(waiting=state.waiting | {i}))
    if i in state.cancelled and i in state.waiting:
      return self.cancel(state, i)
    return state

  def not_open(self, state, what, r):
    where = "over" if r < state.open else "not yet open"
    return (f"FailedPrecondition: {what} must be of the open round, got round "
            f"{r} of {self.subject}, which is {where}, round {state.open} is "
            "open: run get_init_op() or the hook first")

  def next(self, state, i):
    _, r, *_, reset = self.calls[i]
    if not reset and r < state.open:
      return _answered(state, i, self.not_open(
          state, "the end of a round", r))
    r = 1 + (state.open if reset else r)
    if r > LAST:
      return _answered(state, i, (
          f"FailedPrecondition: {self.subject} cannot continue after round "
          f"{LAST}, the last: use another shared_name"))
    if reset:
      state = state._replace(expected=None)
    return self.answer(_answered(_opened(state, r), i, r))

  def mean(self, state, r):
    """The sum of the values of the first two."""
    if r != state.open:
      return self.not_open(state, "a mean", r)
    values = dict(state.values)
    for worker in WORKERS[:2]:
      if worker not in values:
        return (f"FailedPrecondition: {self.subject} must have values of "
                f"worker '{worker}' in round {r}, got values of "
                f"{_names(state)}: the worker must push before")
    return sum(values[worker] for worker in WORKERS[:2])

  def push(self, state, i):
    call = self.calls[i]
    accepted = call.round > state.open or (
        call.round == state.open and not state.closed)
    if accepted:
      if call.round > state.open:
        state = _opened(state, call.round)
      others = {x for x in state.values if x[0] != call.worker}
      if len(others) == ALL:
        return _answered(state, i, (
            f"InvalidArgument: {self.subject} have num_workers = {ALL}, but "
            f"'{call.worker}' came to round {state.open} after "
            f"{_names(state)}: give each worker a unique name"))
      state = state._replace(
          values=frozenset({*others, (call.worker, call.value)}))
    if state.expected is not None:
      state = state._replace(expected=state.expected | {call.worker})
    return self.answer(_answered(state, i, accepted))

  def answer(self, state):
    """Answers all that is ready."""
    came = {worker for worker, _ in state.values}
    for i in state.waiting:
      call = self.calls[i]
      if (call.op == "gather" and call.round == state.open and
          not state.closed and (len(came) == ALL or (
              state.expected is not None and state.expected <= came and
              len(came) >= call.min_workers))):
        state = _closed(state)
    for i in sorted(state.waiting):
      call = self.calls[i]
      if call.op == "wait":
        if call.round != state.open:
          state = _answered(state, i, state.open)
      elif call.round != state.open:
        state = _answered(state, i, (
            f"FailedPrecondition: round {call.round} of {self.subject} ended "
            f"during its gather, round {state.open} is open: there is a "
            "second chief"))
      elif state.closed:
        state = _answered(state, i, tuple(sorted(came)))
    return state

  def time_out(self, state, i):
    call, came = self.calls[i], frozenset(w for w, _ in state.values)
    limit = f"within {SOON} seconds"
    if call.op == "gather":
      if len(came) >= call.min_workers:
        return self.answer(_closed(state._replace(expected=came)))
      missed = (f"round {state.open} of {self.subject} got values of "
                f"{len(came)} workers {limit} ({_names(state)}), but needs "
                f"{call.min_workers} of {ALL}: restart the others")
    elif call.round < 0:
      missed = (f"no chief has opened {self.subject} {limit}: start the chief "
                "with its hook")
    else:
      missed = (f"the chief did not end round {call.round} of {self.subject} "
                f"{limit}: restart the chief")
    return _answered(state, i, f"DeadlineExceeded: {missed}")

  # What the test does.

  def begin(self, i, call):
    self.calls[i] = call
    self.states = {s._replace(new=s.new | {i}) for s in self.states}

  def cancel(self, state, i):
    if i in state.new:
      return state._replace(cancelled=state.cancelled | {i})
    return _answered(state, i, CANCELLED) if i in state.waiting else state

  def cancelled(self, i):
    self._settle()
    self.states = {self.cancel(s, i) for s in self.states}
    self._cancelled.add(i)

  def deleted(self):
    self._settle()
    states = set()
    for state in self.states:
      for i in state.waiting:
        state = _answered(state, i, f"Aborted: {self.subject} were deleted")
      states.add(state._replace(gone=True))
    self.states = states
    self._settle()

  def made_again(self):
    """New rounds, to which come the calls that have not come to the old."""
    self._settle()
    self.states = {State(new=s.new, answers=s.answers, cancelled=s.cancelled)
                   for s in self.states}

  def answered(self, i, answer):
    """The call has been answered: in which states is that so?"""
    self._settle()
    possible = {dict(s.answers).get(i, NOTHING_YET) for s in self.states}
    # If the op was answered before its function was cancelled, the function
    # says that it was cancelled, or gives the answer.
    right = {x for x in possible if _is(answer, x) or (
        i in self._cancelled and _is(answer, CANCELLED))} - {NOTHING_YET}
    self.states = {
        s._replace(answers=frozenset(x for x in s.answers if x[0] != i),
                   cancelled=s.cancelled - {i})
        for s in self.states if dict(s.answers).get(i, NOTHING_YET) in right}
    assert self.states, (
        f"{self.calls[i]}: got {answer!r}, expected one of {possible}")
    del self.calls[i]

  def is_over(self, i):
    """Whether the call has an answer or gets one by itself."""
    self._settle()
    return all(i not in s.waiting or self.calls[i].ends for s in self.states)

  @property
  def rounds(self):
    """The rounds that may be open."""
    return sorted({s.open for s in self.states})


def _is(answer, expected):
  """Whether that is the answer; of an error, its class and a part of its text.
  """
  if not isinstance(answer, str) or not isinstance(expected, str):
    return answer == expected
  of, _, text = expected.partition(": ")
  return answer.startswith(of) and text in answer


def _names(state):
  return ", ".join(
      f"'{worker}'" for worker in sorted(dict(state.values))) or "none"


def _answered(state, i, answer):
  return state._replace(waiting=state.waiting - {i},
                        answers=state.answers | {(i, answer)})


def _opened(state, r):
  return state._replace(open=r, closed=False, values=frozenset())


def _closed(state):
  is_full = len(state.values) == ALL
  return state._replace(closed=True,
                        expected=None if is_full else state.expected)


def _cancelable(manager, op, *inputs, **attributes):
  """Runs an op that `manager` cancels.

  Not by its `get_cancelable_function`, which threads must not call at once.
  """
  found, = execute.execute_with_cancellation(
      f"Wrapopt>Averaging{op}", 1, [*inputs],
      tuple(x for item in attributes.items() for x in item), context.context(),
      manager)
  return found.numpy()


class Thread:
  """A call in a thread of its own."""

  def __init__(self, handle, call, center):
    self.manager = cancellation.CancellationManager()
    self._answer = None
    self._run = lambda: self._of(handle, call, center)
    self._thread = threading.Thread(target=self._body, daemon=True)
    self._thread.start()

  def _body(self):
    try:
      self._answer = self._run()
    except tf.errors.OpError as e:
      self._answer = f"{type(e).__name__}: {e}"
    except BaseException as e:  # pylint: disable=broad-exception-caught
      self._answer = e

  def _of(self, handle, call, center):
    r = tf.constant(call.round, tf.int64)
    seconds = tf.constant(SOON if call.ends else np.inf, tf.float64)
    if call.op == "push":
      return bool(ops.averaging_push(handle, call.worker, r,
                                     [[float(call.value)]]))
    if call.op == "next":
      return int(ops.averaging_next(handle, r, call.reset))
    if call.op == "mean":
      # The sum of two values is a number that float32 holds.
      ops.averaging_mean(handle, r, [*WORKERS[:2]], center)
      return int(2 * center.numpy()[0])
    if call.op == "gather":
      return tuple(w.decode() for w in _cancelable(
          self.manager, "Gather", handle, r,
          tf.constant(call.min_workers, tf.int64), seconds))
    return int(_cancelable(self.manager, "Wait", handle, r, seconds,
                           worker=call.worker))

  def join(self, seconds=None):
    self._thread.join(seconds or JOIN_SECONDS)
    assert seconds or not self._thread.is_alive(), "it waits for ever"
    return self._answer


# What a call is made of, with a round relative to one that may be open.


def _calls(op, **fields):
  return strategies.fixed_dictionaries({
      name: strategies.sampled_from(values) for name, values in fields.items()
  }).map(lambda made: Call(op, **made))


_VALUES = range(100)
_push = _calls("push", round=[0, 0, 0, 0, 0, -1, 1], value=_VALUES,
               worker=[*WORKERS, *WORKERS, STRANGER])
_next = _calls("next", round=[0, 0, 0, -1, 2], reset=[False, True])
_mean = _calls("mean", round=[0, 0, 0, -1])
_waits = strategies.one_of(
    _calls("gather", round=[0, 0, 0, 0, -1, 1], ends=[False, True],
           min_workers=range(1, ALL + 1)),
    _calls("wait", round=[0, 0, 0, -1, 1], ends=[False, True],
           worker=["", *WORKERS]))
_count = 0


class Rounds(stateful.RuleBasedStateMachine):
  """Workers, chiefs, cancellations and restarts."""

  def __init__(self):
    super().__init__()
    global _count
    _count += 1
    self.name = f"rounds of the model {_count}"
    self.handle = ops.averaging_rounds(ALL, self.name)
    self.center = tf.Variable([0.])
    self.model = Model(self.name)
    self.threads = {}
    self.next = 0

  def start(self, call):
    """Starts a call of a round relative to the one that may be open."""
    return self.start_of(call._replace(
        round=max(-1, self.model.rounds[-1] + call.round)))

  def start_of(self, call):
    self.next += 1
    self.model.begin(self.next, call)
    self.threads[self.next] = Thread(self.handle, call, self.center)
    return self.next

  def join(self, i):
    thread = self.threads.pop(i)
    answer = thread.join()
    if isinstance(answer, BaseException):
      raise answer
    self.model.answered(i, answer)

  def join_all(self):
    """Joins those that do not wait for what is to come."""
    for i in sorted(self.threads):
      if self.model.is_over(i):
        self.join(i)

  @stateful.rule(calls=strategies.lists(
      strategies.one_of(_push, _push, _next, _waits, _waits),
      min_size=1, max_size=3))
  def at_once(self, calls):
    began = [self.start(call)
             for call in calls[:MOST_CALLS - len(self.threads)]]
    for i in began:  # Those that never wait.
      if self.model.calls[i].op in ("push", "next"):
        self.join(i)

  @stateful.rule()
  def joined(self):
    self.join_all()

  @stateful.rule(call=strategies.one_of(_push, _push, _next, _mean))
  def one(self, call):
    self.join(self.start(call))

  @stateful.rule(value=strategies.integers(0, 100))
  def whole_round(self, value):
    """A round as it is meant."""
    r = self.model.rounds[-1]
    for worker in WORKERS:
      self.join(self.start(Call("push", 0, worker, value)))
    gather = self.start(Call("gather", 0, min_workers=ALL))
    if self.model.is_over(gather):
      self.join(gather)
    if self.model.rounds[-1] == r:
      self.join(self.start(Call("mean")))
    self.join(self.start(Call("next")))

  @stateful.rule(back=strategies.sampled_from(
      ["", "push", "wait", "reset", "accepted"]),
                 min_workers=strategies.integers(1, ALL))
  def a_round_without_c(self, back, min_workers):
    """The next one does not expect c, unless c is back or the chief is new."""
    call = lambda *args, **kwargs: self.join(self.start(Call(*args, **kwargs)))
    call("next", reset=True)
    call("push", worker="a", value=1)
    call("push", worker="b", value=2)
    call("gather", min_workers=2, ends=True)
    if back == "push":
      call("push", worker="c")
    call("next", reset=back == "reset")
    if back == "wait":
      call("wait", round=-1, worker="c")
    if back == "accepted":
      call("push", worker="c")
      call("next")
    call("push", worker="a", value=3)
    call("push", worker="b", value=4)
    gather = self.start(Call("gather", min_workers=min_workers))
    if self.model.is_over(gather):
      self.join(gather)
    else:
      # Most often it has come by then, which the model does not need.
      self.threads[gather].join(0.1)
    call("push", worker="c", value=5)
    self.join_all()
    call("mean")

  @stateful.rule(which=strategies.integers(0, MOST_CALLS - 1))
  def cancel(self, which):
    # Which are under way depends on the threads, and Hypothesis wants to draw
    # the same in each run.
    calls = [i for i in sorted(self.threads)
             if self.model.calls[i].op in ("gather", "wait")]
    if calls:
      i = calls[which % len(calls)]
      self.threads[i].manager.start_cancel()
      self.model.cancelled(i)
      self.join(i)

  @stateful.rule()
  def restart(self):
    """The server's resources are lost, with all that waits."""
    self.delete()
    self.handle = ops.averaging_rounds(ALL, self.name)
    self.model.made_again()

  def delete(self):
    tf.raw_ops.DestroyResourceOp(resource=self.handle)
    self.model.deleted()
    for i in sorted(self.threads):
      self.join(i)

  def teardown(self):
    self.delete()


TestRounds = Rounds.TestCase
# Threads come in another order each time, so there is nothing to shrink.
TestRounds.settings = hypothesis.settings(
    max_examples=25, stateful_step_count=15,
    phases=[hypothesis.Phase.generate])


# Programs that random ones seldom are: each a list of calls, of rounds by their
# numbers. A program goes on while a call waits.


def push(workers, r, value=1):
  """Of several workers: "ab" are a and b."""
  return [Call("push", r, worker, value) for worker in workers]


def gather(r, min_workers, soon=False):
  return [Call("gather", r, min_workers=min_workers, ends=soon)]


def wait(r, worker="", soon=False):
  return [Call("wait", r, worker, ends=soon)]


def end(r, reset=False):
  return [Call("next", r, reset=reset)]


def mean(r):
  return [Call("mean", r)]


OPEN = end(-1, reset=True)
# Round 0 is of a and b, and round 1 is open: c is late.
WITHOUT_C = [*OPEN, *push("ab", 0), *gather(0, 2, True), *end(0)]
PROGRAMS = {
    "no round is open": [
        *wait(0), *wait(-1, soon=True), *gather(0, 1), *end(-1)],
    "no chief opens rounds": [
        *push("ab", -1, 3), *push("c", -1), *gather(-1, 1), *mean(-1), *end(-1),
        *push("a", -1)],
    "a push replaces the last one": [
        *OPEN, *push("a", 0, 1), *push("ab", 0, 7), *push("a", 0, 3), *mean(0)],
    "rounds that are over": [
        *OPEN, *push("a", 0), *end(0), *push("a", 0), *push("a", -2), *end(0),
        *gather(0, 1), *mean(0)],
    "a push after the gather": [
        *OPEN, *push("abc", 0, 2), *gather(0, 3), *push("a", 0, 50), *mean(0),
        *mean(0), *end(0), *push("a", 1)],
    "a push after the deadline": [
        *OPEN, *push("ab", 0), *gather(0, 1, True), *push("c", 0),
        *gather(0, 1), *gather(0, 3)],
    "a push opens a round to come": [
        *OPEN, *push("abc", 0), *gather(0, 3), *push("ab", 57, 4), *wait(0),
        *push("a", 56), *mean(57), *push("a", 58), *mean(58)],
    "more workers than there are": [
        *OPEN, *push("abc", 0), *push(["d"], 0), *push("b", 0, 5),
        *gather(0, 3), *mean(0)],
    "the end of a round": [
        *OPEN, *end(0), *end(1), *end(0), *end(7), *end(0, True),
        *end(99, True), *wait(9), *gather(57, 1)],
    "the last round": [
        *OPEN, *push("a", LAST), *end(LAST), *end(LAST - 1), *end(0, True),
        *end(LAST - 1), *wait(0)],
    "too few came in time": [
        *OPEN, *push("b", 0), *gather(0, 3, True), *push("a", 0),
        *gather(0, 3, True), *gather(0, 3), *push("c", 0)],
    "all are waited for": [
        *OPEN, *push("ab", 0), *gather(0, 1), *gather(0, 3), *push("c", 0)],
    "a failed gather takes nobody for dead": [
        *OPEN, *push("a", 0), *gather(0, 2, True), *push("b", 0), *gather(0, 2),
        *push("c", 0)],
    "a dead worker is waited for once": [
        *WITHOUT_C, *push("b", 1), *gather(1, 1), *push("a", 1), *end(1),
        *push("ab", 2), *gather(2, 2)],
    "all who are expected may be too few": [
        *OPEN, *push("a", 0), *gather(0, 1, True), *end(0), *push("a", 1),
        *gather(1, 2), *push("b", 1)],
    "all are needed": [
        *WITHOUT_C, *push("ab", 1), *gather(1, 3), *push("c", 1)],
    "a new chief expects all": [
        *WITHOUT_C, *end(1, True), *push("ab", 2), *gather(2, 1),
        *push("c", 2)],
    **{f"a worker {is_back} is waited for again": [
        *calls, *push("ab", r), *gather(r, 1), *push("c", r), *end(r),
        *push("ab", r + 1), *gather(r + 1, 2, True), *end(r + 1),
        *push("ab", r + 2), *gather(r + 2, 2)]
       for is_back, calls, r in (
           ("that was refused", [*WITHOUT_C[:-1], *push("c", 0), *end(0)], 1),
           ("that waits", [*WITHOUT_C, *wait(-1, "c")], 1),
           ("that pushes", [*WITHOUT_C, *push("c", 1), *end(1)], 2))},
    **{f"waits end with {name}": [*OPEN, *push("a", 0), *wait(0), *gather(0, 2),
                                  *calls]
       for name, calls in (("the round", end(0)), ("a reset", end(0, True)),
                           ("a later push", push("b", 1)))},
    "nobody waits for a round that is not open": [
        *OPEN, *end(4), *wait(-1), *wait(4), *wait(6), *wait(100)],
    "a wait for the first round": [*wait(-1), *OPEN],
    "a chief that does not end a round": [
        *OPEN, *end(6), *wait(7, soon=True), *end(7), *wait(7)],
    "gathers of one round give the same": [
        *OPEN, *gather(0, 3), *gather(0, 1), *push("ab", 0),
        *gather(0, 2, True)],
    "rounds that are deleted": [*OPEN, *gather(0, 2), *wait(0)],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name):
  machine = Rounds()
  for call in PROGRAMS[name]:
    i = machine.start_of(call)
    if machine.model.is_over(i):
      machine.join(i)
    else:
      # Most often it has come by then, which the model does not need.
      machine.threads[i].join(0.05)
  machine.join_all()
  machine.restart()
  # The same name means new rounds.
  machine.join(machine.start_of(*wait(0)))
  machine.teardown()


def test_another_answer_is_seen():
  for answer in (2, "FailedPreconditionError: of another text"):
    machine = Rounds()
    machine.model.begin(1, *end(-1))
    with pytest.raises(AssertionError, match="expected one of"):
      machine.model.answered(1, answer)
    machine.delete()
