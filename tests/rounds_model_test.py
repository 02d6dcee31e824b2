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
import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import execute

from wrapopt import ops

WORKERS = ("a", "b", "c")
ALL = len(WORKERS)
STRANGER = "stranger"
JOIN_SECONDS = 60
# Calls of other threads that are under way at a time.
MOST_CALLS = 3


class Call(typing.NamedTuple):
  """A call of an op.

  Attributes:
    op: "push", "gather", "wait", "next" or "mean".
    round: Its round.
    worker: Of a push or a wait.
    value: Of a push.
    min_workers: Of a gather.
    ends: Whether it has a deadline; a short one.
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
  """All possible states, and the calls under way: {number: Call}."""

  def __init__(self):
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
        yield _answered(state._replace(new=state.new - {i}), i, "Cancelled")
      yield self.arrive(state._replace(new=state.new - {i}), i)
    for i in state.waiting:
      if self.calls[i].ends:
        yield self.time_out(state, i)

  def arrive(self, state, i):
    """The call comes to the rounds."""
    call = self.calls[i]
    if state.gone:
      return _answered(state, i, "InvalidArgument")
    workers = {worker for worker, _ in state.values}
    if call.op == "push":
      return self.push(state, i)
    if call.op == "next":
      if not call.reset and call.round < state.open:
        return _answered(state, i, "FailedPrecondition")
      r = 1 + (state.open if call.reset else call.round)
      if call.reset:
        state = state._replace(expected=None)
      return self.answer(_answered(_opened(state, r), i, r))
    if call.op == "mean":
      if call.round != state.open or not {*WORKERS[:2]} <= workers:
        return _answered(state, i, "FailedPrecondition")
      return _answered(state, i, sum(
          value for worker, value in state.values if worker in WORKERS[:2]))
    if call.op == "gather" and call.round != state.open:
      return _answered(state, i, "FailedPrecondition")
    if call.worker and state.expected is not None:
      state = state._replace(expected=state.expected | {call.worker})
    state = self.answer(state._replace(waiting=state.waiting | {i}))
    if i in state.cancelled and i in state.waiting:
      return self.cancel(state, i)
    return state

  def push(self, state, i):
    call = self.calls[i]
    accepted = call.round > state.open or (
        call.round == state.open and not state.closed)
    if accepted:
      if call.round > state.open:
        state = _opened(state, call.round)
      others = {x for x in state.values if x[0] != call.worker}
      if len(others) == ALL:
        return _answered(state, i, "InvalidArgument")
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
        state = _answered(state, i, "FailedPrecondition")
      elif state.closed:
        state = _answered(state, i, tuple(sorted(came)))
    return state

  def time_out(self, state, i):
    call, came = self.calls[i], frozenset(w for w, _ in state.values)
    if call.op == "gather" and len(came) >= call.min_workers:
      return self.answer(_closed(state._replace(expected=came)))
    return _answered(state, i, "DeadlineExceeded")

  # What the test does.

  def begin(self, i, call):
    self.calls[i] = call
    self.states = {s._replace(new=s.new | {i}) for s in self.states}

  def cancel(self, state, i):
    if i in state.new:
      return state._replace(cancelled=state.cancelled | {i})
    return _answered(state, i, "Cancelled") if i in state.waiting else state

  def cancelled(self, i):
    self._settle()
    self.states = {self.cancel(s, i) for s in self.states}
    self._cancelled.add(i)

  def deleted(self):
    self._settle()
    states = set()
    for state in self.states:
      for i in state.waiting:
        state = _answered(state, i, "Aborted")
      states.add(state._replace(gone=True))
    self.states = states
    self._settle()

  def made_again(self):
    """New rounds, to which come the calls that have not come to the old."""
    self._settle()
    self.states = {State(new=s.new, answers=s.answers, cancelled=s.cancelled)
                   for s in self.states}

  def answered(self, i, answer, text=""):
    """The call has been answered: in which states is that so?"""
    self._settle()
    possible = {dict(s.answers).get(i, "nothing yet") for s in self.states}
    # If the op was answered before its function was cancelled, the function
    # says that it was cancelled, or gives the answer.
    right = possible - {"nothing yet"} if (
        answer == "Cancelled" and i in self._cancelled) else {answer}
    self.states = {
        s._replace(answers=frozenset(x for x in s.answers if x[0] != i),
                   cancelled=s.cancelled - {i})
        for s in self.states if dict(s.answers).get(i, "nothing yet") in right}
    assert self.states, (
        f"{self.calls[i]}: got {answer!r}, expected one of {possible}: {text}")
    del self.calls[i]

  def is_over(self, i):
    """Whether the call has an answer or gets one by itself."""
    self._settle()
    return all(i not in s.waiting or self.calls[i].ends for s in self.states)

  @property
  def rounds(self):
    """The rounds that may be open."""
    return sorted({s.open for s in self.states})


def _answered(state, i, answer):
  return state._replace(waiting=state.waiting - {i},
                        answers=state.answers | {(i, answer)})


def _opened(state, r):
  return state._replace(open=r, closed=False, values=frozenset())


def _closed(state):
  is_full = len(state.values) == ALL
  return state._replace(closed=True,
                        expected=None if is_full else state.expected)


_ERRORS = {tf.errors.AbortedError: "Aborted",
           tf.errors.CancelledError: "Cancelled",
           tf.errors.DeadlineExceededError: "DeadlineExceeded",
           tf.errors.FailedPreconditionError: "FailedPrecondition",
           tf.errors.InvalidArgumentError: "InvalidArgument"}

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
    self.text = ""  # Of an error.
    self._run = lambda: self._of(handle, call, center)
    self._thread = threading.Thread(target=self._body, daemon=True)
    self._thread.start()

  def _body(self):
    try:
      self._answer = self._run()
    except tuple(_ERRORS) as e:
      self._answer = _ERRORS[type(e)]
      self.text = str(e)
    except BaseException as e:  # pylint: disable=broad-exception-caught
      self._answer = e

  def _of(self, handle, call, center):
    r = tf.constant(call.round, tf.int64)
    seconds = tf.constant(0.01 if call.ends else np.inf, tf.float64)
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
    self.model = Model()
    self.threads = {}
    self.next = 0

  def start(self, call):
    call = call._replace(round=max(-1, self.model.rounds[-1] + call.round))
    self.next += 1
    self.model.begin(self.next, call)
    self.threads[self.next] = Thread(self.handle, call, self.center)
    return self.next

  def join(self, i):
    thread = self.threads.pop(i)
    answer = thread.join()
    if isinstance(answer, BaseException):
      raise answer
    self.model.answered(i, answer, thread.text)

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
