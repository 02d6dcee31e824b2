"""The books of chaos_test.py do not balance if a class is broken."""

import pytest

import chaos
import chaos_link

PAUSES = [chaos.Event("pause", ("worker", 1), 1.0, 0.5)] * 3
KILL = [chaos.Event("kill", ("chief", 0), 1.0, 0.5)]


@pytest.mark.parametrize("broken, subject, events, error", [
    ("step_counts_twice", "gate", PAUSES, "updates, and the step is"),
    ("gate_lets_all_through", "gate", PAUSES, "an update lacked more than 1"),
    ("update_is_lost", "gate", PAUSES, "b has .* updates"),
    ("worker_hangs", "gate", PAUSES, "in 30 seconds"),
    ("chief_saves_rarely", "gate", KILL, "restored a wrong checkpoint"),
    ("round_loses_a_worker", "model_average", PAUSES, "no workers have a mean"),
    ("worker_keeps_its_values", "model_average", PAUSES,
     "values of no round|no workers have a mean"),
    ("center_loses_a_push", "elastic_average", PAUSES, "moved by"),
    ("push_counts_twice", "elastic_average", PAUSES, "moved by"),
])
def test_a_break_is_seen(broken, subject, events, error, tmp_path):
  training = chaos.Chaos(subject, tmp_path, broken=broken, deadline=30)
  with pytest.raises((AssertionError, TimeoutError), match=error):
    training.run(events)


class _StrongLink(chaos_link.Link):
  """Never goes down."""

  def tell(self, command):
    pass


@pytest.mark.parametrize("kind", chaos_link.Link.kinds)
def test_a_link_that_stays_up_is_seen(kind, tmp_path):
  training = chaos.Chaos("gate", tmp_path, new_link=_StrongLink)
  with pytest.raises(AssertionError, match="trains in spite of"):
    training.run([chaos.Event(kind, chaos.LINK, 0.5, 2.0)])
