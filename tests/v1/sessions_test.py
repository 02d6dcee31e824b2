"""Evaluations in a session that was lost, as with a parameter server."""

import contextlib

import pytest
import tensorflow as tf

from numerics import assert_same_bits
from training import descend
from training import graph_of
from training import moving
from wrapopt._v1._graphs import _sessions

tf1 = tf.compat.v1


class Model:
  """A variable that has walked to 1, in steps that are saved."""

  def __init__(self):
    self.v = tf1.get_variable("v", initializer=0.0)
    self.opt = moving(0.5)
    self.train = descend(self.opt, self.v,
                         step=tf1.train.get_or_create_global_step())
    self.state = [self.v, self.opt.average(self.v)]


@pytest.fixture(params=["ref", "resource"])
def model(request):
  with graph_of(request.param):
    yield Model()


@contextlib.contextmanager
def monitored(folder, hooks=()):
  with tf1.train.MonitoredTrainingSession(
      checkpoint_dir=str(folder), hooks=hooks, save_checkpoint_secs=None,
      save_checkpoint_steps=1, save_summaries_steps=None,
      log_step_count_steps=None) as session:
    yield session


def lose(session):
  """Has the next call of the raw session fail, as without its server."""
  def run(*args, **kwargs):
    del args, kwargs
    del raw.run
    raise tf.errors.AbortedError(None, None, "the server went away")

  raw = _sessions.raw(session)
  raw.run = run
  return raw


def test_without_a_loss(model, tmp_path):
  with monitored(tmp_path) as session:
    raw = _sessions.raw(session)
    assert isinstance(raw, tf1.Session)
    assert _sessions.raw(raw) is raw
    assert _sessions.in_raw(session, lambda s: s) is raw
    with raw.as_default():
      assert _sessions.raw(None) is raw
    session.run(model.train)
    assert _sessions.raw(session) is raw


def test_a_call_is_made_again_in_the_new_session(model, tmp_path):
  with monitored(tmp_path) as session:
    session.run(model.train)
    lost = lose(session)
    tried = []

    def do(raw):
      tried.append(raw)
      return raw.run(model.state)

    assert _sessions.in_raw(session, do) == [1, 0.5]
    assert len(tried) == 2 and tried[0] is lost and tried[1] is not lost
    assert _sessions.raw(session) is tried[1]


def test_a_session_that_could_not_be_made_anew_at_first(model, tmp_path):
  fail = []

  class Fail(tf1.train.SessionRunHook):

    def after_create_session(self, session, coord):
      if fail:
        raise fail.pop()

  with monitored(tmp_path, [Fail()]) as session:
    session.run(model.train)
    lost = lose(session)
    fail.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
      session.run(model.state)
    # TensorFlow has no session now, and a step function gets that before.
    raw = _sessions.raw(session)
    assert raw is not lost
    assert raw.run(model.state) == [1, 0.5]


def test_other_errors_are_the_callers(model, tmp_path):
  with monitored(tmp_path) as session:
    raw = session.run(model.state) and _sessions.raw(session)
    with pytest.raises(ZeroDivisionError):
      _sessions.in_raw(session, lambda raw: 1 // 0)
    assert _sessions.raw(session) is raw


def test_averages_are_put_in_place_in_the_new_session(model, tmp_path):
  with monitored(tmp_path) as session:
    session.run(model.train)
    raw = session.run(model.state)
    lose(session)
    with model.opt.averaged_weights(session):
      assert_same_bits(session.run(model.state[:1]), raw[1:])
    assert_same_bits(session.run(model.state), raw)


@pytest.mark.parametrize("inside", [True, False])
def test_a_session_that_is_lost_while_averages_are_in_place(
    model, inside, tmp_path):
  with monitored(tmp_path) as session:
    session.run(model.train)
    raw = session.run(model.state)
    with model.opt.averaged_weights(session):
      lose(session)
      if inside:  # The new session has restored the raw weights.
        assert_same_bits(session.run(model.state), raw)
    # They must not be exchanged for the averages now.
    assert_same_bits(session.run(model.state), raw)
    with model.opt.averaged_weights(session):
      assert_same_bits(session.run(model.state[:1]), raw[1:])


def test_averages_are_seeded_in_the_new_session(model, tmp_path):
  with monitored(tmp_path) as session:
    session.run(model.train)
    lose(session)
    model.opt.seed_averages(session)
    assert session.run(model.state) == [1, 1]
