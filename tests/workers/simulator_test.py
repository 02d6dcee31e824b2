"""The protocol of local training holds in simulated schedules."""

import inspect
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import simulator
from wrapopt._local import _codes
from wrapopt._local import _exchanges
from wrapopt._local import _job_number
from wrapopt._local import _member
from wrapopt._local import _server
from wrapopt._local import _training


@pytest.fixture(autouse=True)
def quiet():
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel("ERROR")
  yield
  logger.setLevel(level)


def search(seeds):
  """The first seed that fails, or None."""
  for seed in seeds:
    violation, _ = simulator.run(seed)
    if violation is not None:
      return seed, violation
  return None


def check(seeds):
  found = search(seeds)
  if found is not None:
    seed, violation = found
    pytest.fail(f"{violation!r}\n{simulator.command(seed)}")


def test_forty_schedules():
  check(range(40))


def test_schedules_that_have_failed():
  check([1619, 2371, 3937, 4249, 4293])


def test_ten_thousand_schedules():
  check(range(40, 10_040))


def test_a_schedule_is_repeated():
  def calls():
    violation, world = simulator.run(3)
    assert violation is None and world.round >= simulator.ROUNDS
    return world.calls, world.now
  assert calls() == calls()


# Breaks: functions of a MonkeyPatch.


def center_is_read_without_its_place(patch):
  read = _server.Server.read

  class Any:
    def __eq__(self, other):
      return True

  patch.setattr(_server.Server, "read", lambda self, place, *args: read(
      self, Any(), *args))


def one_server_does_not_follow(patch):
  """It is not told of the members, and has no values of them."""
  patch.setattr(_server.Server, "follow", lambda self, known: True)


def arrives_before_its_values(patch):
  push = _member.Member._push

  def early(self, known, arrays, weight):
    self._lead.stage(known, weight, arrays[0])
    if self._others and not self._lead.arrive(known)[0]:
      return False
    return push(self, known, arrays, weight)
  patch.setattr(_member.Member, "_push", early)


def weight_is_lost_on_one_server(patch):
  stage = _server.Server.stage

  def lossy(self, known, weight, *args):
    return stage(self, known, 1.0 if self.address == "s1" else weight, *args)
  patch.setattr(_server.Server, "stage", lossy)


def older_center_is_taken(patch):
  """A worker takes what the servers have, as before."""
  settle = _member.Member._settle

  def settle_any(self, initial=None):
    place, self.place = self.place, self.place and (-1, self.place[1])
    try:
      states, _ = self._states()
      if all(s.values and s.place == states[0].place for s in states):
        return states[0].place
    finally:
      self.place = place
    return settle(self, initial)
  patch.setattr(_member.Member, "_settle", settle_any)


def closed_round_is_left_open(patch):
  """A worker leaves the end of a closed round to its members."""
  patch.setattr(_member.Member, "_step", lambda self, known: None)


def deadline_is_of_a_call(patch):
  """As a call that ends for itself: a server that comes late is an error."""
  run = _server.Server._run

  def bare(self, *args, **kwargs):
    try:
      return run(self, *args, **kwargs)
    except tf.errors.UnavailableError as e:
      raise tf.errors.DeadlineExceededError(None, None, e.message) from e
  patch.setattr(_server.Server, "_run", bare)


def worker_begins_a_job_that_a_server_goes_on_with(patch):
  settle = textwrap.dedent(inspect.getsource(_member.Member._settle))
  known = {**vars(_member)}
  assert "latest <= 0 and" in settle
  exec(settle.replace("latest <= 0 and", ""), known)  # pylint: disable=exec-used
  patch.setattr(_member.Member, "_settle", known["_settle"])


def worker_sends_what_it_sent_before(patch):
  sync = _member.Member.sync

  def stale(self, vectors, weight):
    vectors, self.sent = getattr(self, "sent", vectors), vectors
    return sync(self, vectors, weight)
  patch.setattr(_member.Member, "sync", stale)


def worker_adds_no_errors(patch):
  encode = _codes.encode
  patch.setattr(_codes, "encode", lambda values, center, error, *args: encode(
      values, center, 0 * error, *args))


def errors_of_values_that_did_not_count_are_kept(patch):
  pull = _member.Member._pull

  def keep(self, place):
    is_new = place != self.place and self._codes
    pulled = pull(self, place)
    if pulled and is_new:
      self.errors = self._codes[1]
    return pulled
  patch.setattr(_member.Member, "_pull", keep)


def codes_are_added_to_any_center(patch):
  read = _member.Member._read

  def add(self, place, vectors, what="center", held=None):
    return read(self, place, vectors, what,
                held or (self._layout.travels and self.center) or None)
  patch.setattr(_member.Member, "_read", add)


def momentum_is_forgotten(patch):
  step = simulator.Part._step

  def forgetful(self, call, reply, **kwargs):
    if self.index == 0:
      self.velocities = []
    return step(self, call, reply, **kwargs)
  patch.setattr(simulator.Part, "_step", forgetful)


def worker_that_has_left_is_missed(patch):
  patch.setattr(simulator.Part, "_leave", lambda self, *_, **kwargs: True)


def lead_that_was_restarted_is_told_nothing(patch):
  patch.setattr(_server.Server, "tell_left", lambda self, worker: False)


def only_who_restores_tells_the_lead(patch):
  """Others forget who has left."""
  def forget(self, left):
    self._have_left = left
  def restore(self, *args):
    for worker in self._have_left:
      self._lead.tell_left(worker)
    return restore_in_turn(self, *args)
  restore_in_turn = _member.Member._restore_in_turn
  patch.setattr(_member.Member, "_tell_left", forget)
  patch.setattr(_member.Member, "_restore_in_turn", restore)


def worker_comes_back_as_the_same_process(patch):
  patch.setattr(_job_number.Job, "leave", lambda self: None)


def values_that_are_not_finite_count(patch):
  stage = _server.Server.stage

  def all_count(self, known, weight, arrays):
    return stage(self, known, weight, arrays or [
        np.zeros(_codes.size(self._layout.travels, len(x)), np.uint8)
        if self._layout.travels else x
        for x in self.parts(self._layout.empty())])
  patch.setattr(_server.Server, "stage", all_count)


def interrupt_is_taken_for_a_lost_server(patch):
  patch.setattr(_server, "LOST", (*_server.LOST, KeyboardInterrupt))


def examples_of_a_round_count_in_the_next(patch):
  assign = _training.LocalTraining._assign
  patch.setattr(
      _training.LocalTraining, "_assign", lambda self, turn, state: assign(
          self, turn, [state[0], self._examples.numpy(), *state[2:]]))


def values_trained_from_an_old_center_count(patch):
  due = _exchanges.Exchanges.next
  patch.setattr(_exchanges.Exchanges, "next", lambda self, *_: due(
      self, *(f.round for f in self.fragments)))


def failed_exchange_is_merged(patch):
  """As if it had succeeded."""
  result = simulator.BackgroundCall.result

  def anyway(self):
    try:
      return result(self)
    except tf.errors.OpError:
      return _member.Report(0, False, (), (), 0.0, 0)
  patch.setattr(simulator.BackgroundCall, "result", anyway)


def turn_is_kept(patch):
  release = _server.Server.release
  patch.setattr(_server.Server, "release",
                lambda self, turn=-1: release(self))


def lead_steps_first(patch):
  def step(self, known):
    outer = self._arguments.learning_rate, self._arguments.momentum
    places = [s.step(known, *outer) for s in self._servers]
    return places[0] if len(set(places)) == 1 else None
  patch.setattr(_member.Member, "_step", step)


def no_attempt_after_the_deadline(patch):
  patch.setattr(_member, "_LAST_SECS", -1)


def center_is_restored_in_any_generation(patch):
  restore = simulator.Part._restore

  def anyway(self, *args, from_generation, **kwargs):
    return restore(self, *args, from_generation=simulator.generation(
        self.rounds.known().texts), **kwargs)
  patch.setattr(simulator.Part, "_restore", anyway)


# The seeds before do not find them.
FIRST = {center_is_restored_in_any_generation: 385,
         failed_exchange_is_merged: 379,
         no_attempt_after_the_deadline: 457,
         only_who_restores_tells_the_lead: 798,
         worker_begins_a_job_that_a_server_goes_on_with: 254}

BREAKS = [
    *FIRST,
    center_is_read_without_its_place, one_server_does_not_follow,
    arrives_before_its_values, weight_is_lost_on_one_server,
    older_center_is_taken, closed_round_is_left_open, deadline_is_of_a_call,
    worker_sends_what_it_sent_before, worker_adds_no_errors,
    errors_of_values_that_did_not_count_are_kept,
    codes_are_added_to_any_center, momentum_is_forgotten,
    worker_that_has_left_is_missed,
    lead_that_was_restarted_is_told_nothing,
    worker_comes_back_as_the_same_process, values_that_are_not_finite_count,
    interrupt_is_taken_for_a_lost_server,
    examples_of_a_round_count_in_the_next,
    values_trained_from_an_old_center_count, turn_is_kept, lead_steps_first]


@pytest.mark.by_day(2)
@pytest.mark.parametrize("way", BREAKS, ids=lambda f: f.__name__)
def test_a_break_is_found(way, monkeypatch):
  way(monkeypatch)
  first = FIRST.get(way, 0)
  assert search(range(first, first + 200)) is not None
