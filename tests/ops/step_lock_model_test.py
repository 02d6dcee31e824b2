"""A model of the lock of steps, run through all orders, stops and deaths.

Two servers and two workers, each of which takes one step. A step has a part
on each server, and the lock and the count are on the first one. Its events:

  g0, g1  its gradients arrive on a server: the worker must run
  lock    the first server gives it the lock
  begin   it gets its number, or is refused as a second try of a complete step
  w0, w1  a server takes its part, which reads and writes
  count   the step is counted and complete
  free    the lock is given back

One worker may stop or die after any event. If it dies, each server drops the
rest of its part at any moment, and the coordinator has another worker run the
step again. The rules of `wrapopt/_gates/_step_lock.py` can be broken one by
one.
"""

import typing

import pytest

EVENTS = ("g0", "g1", "lock", "begin", "w0", "w1", "count", "free")
WORKERS = 2
RULES = {
    "the lock waits for the gradients",
    "no op after the lock runs on the worker",
    "the lock is given back after all changes",
    "the lock ends with a step that is dropped",
    "a step that is dropped frees no lock of others",
    "a second try of a complete step is refused"}


class Try(typing.NamedTuple):
  """A try of a step.

  Attributes:
    step: Which step.
    done: Its events.
    worker: "runs", "stopped" or "dead".
    dropped: The servers that have dropped the rest.
    refused: Whether it is a second try that changes nothing.
  """
  step: int
  done: frozenset = frozenset()
  worker: str = "runs"
  dropped: frozenset = frozenset()
  refused: bool = False

  def has(self, *events):
    return self.done.issuperset(events)


class State(typing.NamedTuple):
  """Tries, the try that has the lock, and the parts that each server took."""
  tries: tuple
  holder: int | None = None
  taken: tuple = ((), ())
  has_failed: bool = False  # One worker has.

  def changed(self, i, **attributes):
    return self._replace(tries=(*self.tries[:i], self.tries[i]._replace(
        **attributes), *self.tries[i + 1:]))


def server_of(event):
  return 1 if event in ("g1", "w1") else 0


def may_happen(state, i, event, rules):
  x = state.tries[i]
  if x.has(event) or server_of(event) in x.dropped:
    return False
  needs = {
      "g0": (), "g1": (),
      "lock": (("g0", "g1") if "the lock waits for the gradients" in rules
               else ()),
      "begin": ("lock",), "w0": ("begin", "g0"), "w1": ("begin", "g1"),
      "count": ("w0", "w1"),
      "free": (("count",) if "the lock is given back after all changes" in rules
               else ("begin",))}[event]
  if x.refused:
    needs = {"free": ("begin",)}.get(event)
    if needs is None:
      return False
  if not x.has(*needs):
    return False
  if event in ("g0", "g1") or (
      event == "w1" and
      "no op after the lock runs on the worker" not in rules):
    return x.worker == "runs"
  if event == "lock":
    return state.holder is None
  if event == "begin":  # Its server waits for the end of another try.
    return all(0 in y.dropped or y.has("count") or not y.has("begin")
               for y in state.tries if y.step == x.step and y is not x)
  return True


def after(state, i, event, rules):
  x = state.tries[i]
  found = state.changed(i, done=x.done | {event})
  if event == "lock":
    return found._replace(holder=i)
  if event == "begin":
    return found.changed(i, refused=(
        "a second try of a complete step is refused" in rules and any(
            y.step == x.step and y.has("count") for y in state.tries)))
  if event in ("w0", "w1"):
    taken = list(state.taken)
    taken[server_of(event)] += (i,)
    return found._replace(taken=tuple(taken))
  return found._replace(holder=None) if event == "free" else found


def nexts(state, rules):
  """All states that may follow."""
  for i, x in enumerate(state.tries):
    for event in EVENTS:
      if may_happen(state, i, event, rules):
        yield after(state, i, event, rules)
    if not state.has_failed and i < WORKERS:
      yield state.changed(i, worker="stopped")._replace(has_failed=True)
      died = state.changed(i, worker="dead")._replace(has_failed=True)
      yield died._replace(tries=(*died.tries, Try(x.step)))
    for server in ({0, 1} - x.dropped if x.worker == "dead" else ()):
      dropped = state.changed(i, dropped=x.dropped | {server})
      if (server == 0 and state.holder == i and
          "the lock ends with a step that is dropped" in rules):
        dropped = dropped._replace(holder=None)
      waits = x.has("g0", "g1") and not x.has("lock")
      if server == 0 and waits and (
          "a step that is dropped frees no lock of others" not in rules):
        dropped = dropped._replace(holder=None)
      yield dropped


def faults(rules):
  """What goes wrong in any run with these rules: a set of sentences."""
  first = State(tuple(Try(step) for step in range(WORKERS)))
  seen, pending, found = {first}, [first], set()
  while pending:
    state = pending.pop()
    following = set(nexts(state, rules)) - {state}
    # A run may end here, if nothing but a failure or a drop can happen.
    if not any(may_happen(state, i, event, rules)
               for i in range(len(state.tries)) for event in EVENTS):
      found.update(wrong(state))
    for x in following - seen:
      seen.add(x)
      pending.append(x)
  return found, len(seen)


def wrong(state):
  """What is wrong at the end of a run."""
  dead = {x.step for x in state.tries if x.worker == "dead"}
  if any(x.worker == "dead" and x.dropped != {0, 1} for x in state.tries):
    return  # The rest of its step will be dropped.
  for step in range(WORKERS):
    tries = [x for x in state.tries if x.step == step]
    counted = sum(x.has("count") for x in tries)
    parts = [sum(state.tries[i].step == step for i in server)
             for server in state.taken]
    if tries[0].worker == "stopped":
      if counted == 0 and (parts != [0, 0] or tries[0].has("lock")):
        yield "a stopped worker has a lock, or the half of a step"
    elif counted == 0:
      yield "a step waits forever"
    if counted > 1:
      yield "a step is counted twice"
    if counted and step not in dead and parts != [1, 1]:
      yield "a part of a step is lost or taken twice"
    if counted and not all(parts):
      yield "a part of a counted step is lost"
    if max(parts) > 2:
      yield "a death takes more than a part of a step twice"
  orders = [[i for i in server if state.tries[i].has("count")]
            for server in state.taken]
  if orders[0] != orders[1]:
    yield "another step came between the parts of one"
  if state.holder is not None:
    yield "the lock is never free again"


def test_no_stop_and_no_death_stops_others():
  found, states = faults(RULES)
  assert not found
  assert states > 5_000


@pytest.mark.parametrize("rule, fault", [
    ("the lock waits for the gradients", "a step waits forever"),
    ("no op after the lock runs on the worker", "a step waits forever"),
    ("the lock is given back after all changes",
     "another step came between the parts of one"),
    ("the lock ends with a step that is dropped", "a step waits forever"),
    ("a step that is dropped frees no lock of others",
     "another step came between the parts of one"),
    ("a second try of a complete step is refused", "a step is counted twice")])
def test_each_rule_is_needed(rule, fault):
  found, _ = faults(RULES - {rule})
  assert fault in found
