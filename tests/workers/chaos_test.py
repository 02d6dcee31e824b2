"""Processes that are killed and paused at random, and a link that goes down.

Each class of the sessions trains in a cluster, and books tell what its
variables must be: see chaos_books.py. WRAPOPT_CHAOS_SIGNALS sets the number of
kills and pauses for each class, and WRAPOPT_CHAOS_SEED repeats a plan of them.
"""

import os
import random

import pytest

import chaos

SUBJECTS = ["gate", "model_average", "elastic_average"]
SIGNALS = int(os.environ.get("WRAPOPT_CHAOS_SIGNALS", "34"))
SEED = int(os.environ.get("WRAPOPT_CHAOS_SEED",
                          random.SystemRandom().randrange(10**6)))
WORKER, SERVER, CHIEF = ("worker", 1), ("ps", 0), ("chief", 0)


@pytest.mark.parametrize("subject", ["gate", "model_average"])
def test_some_signals(subject, tmp_path):
  training = chaos.Chaos(subject, tmp_path, servers=1)
  training.run([
      chaos.Event("pause", WORKER, 0.3, 0.1,
                  during=chaos.Event("kill", CHIEF, 0.1, 0.1)),
      chaos.Event("drop", chaos.LINK, 0.3, 0.1,
                  during=chaos.Event("kill", SERVER, 0.1, 0.1)),
      chaos.Event("kill", WORKER, 0.3, 0.1)])
  assert training.signals.total() == 5


@pytest.mark.parametrize("subject", SUBJECTS)
def test_random_signals(subject, tmp_path):
  print(f"WRAPOPT_CHAOS_SEED={SEED} WRAPOPT_CHAOS_SIGNALS={SIGNALS}")
  training = chaos.Chaos(subject, tmp_path)
  training.run(chaos.plan(SEED, SIGNALS))
  assert sum(n for (kind, _), n in training.signals.items()
             if kind in ("kill", "pause")) == SIGNALS
