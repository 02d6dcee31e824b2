"""Runs random programs that train with wrappers, and prints the first failure.

    ./tools/fuzz programs --minutes 5 --seed 1

See `programs.py`. A failure is shrunk to a small program, and printed as code
that runs by itself.
"""

import argparse
import collections
import os
import sys
import time
import traceback
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
from hypothesis.internal.conjecture import engine
import keras

import programs
import programs_code


class Counts:
  """How many programs ran, by what is in them."""

  def __init__(self):
    self.of = collections.Counter()

  def add(self, program):
    self.of.update({
        "all", f"{program.api} {program.mode}", f"inner {program.inner[0]}",
        *(f"wrapper {name}" for name in program.names or ["none"]),
        *(f"operation {name}" for name, *_ in program.operations),
        *(f"dtype {v.dtype}" for v in program.variables)})

  def __str__(self):
    return "\n".join(f"{n:7} {what}" for what, n in sorted(self.of.items()))


def run(program, counts=None):
  """Runs a program, and prints its code if it fails."""
  code = programs_code.code_of(program)
  if counts is not None:
    counts.add(program)
    if counts.of["all"] % 20 == 0:
      keras.utils.clear_session()
  try:
    programs_code.run(code)
  except Exception as e:
    raise Failure(program, code, e) from e


class Failure(Exception):
  """A program that failed."""

  def __init__(self, program, code, error):
    super().__init__(f"{error}\n\n{program}\n\n{code}")
    self.code = code


def find(examples, counts, strategy=None, seed=None, until=None, shrink=True):
  """Runs examples.

  Args:
    examples: How many, at most.
    counts: Counts.
    strategy: Of programs; by default of all.
    seed: A seed. By default, the examples are the same in each run.
    until: A time after which no example runs, unless one has failed.
    shrink: Whether to look for the smallest program that fails.

  Returns:
    The Failure of a program, or None.
  """
  has_failed = False

  @hypothesis.settings(
      max_examples=examples, database=None, deadline=None,
      derandomize=seed is None, report_multiple_bugs=False,
      suppress_health_check=list(hypothesis.HealthCheck),
      phases=[hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * shrink)
  @hypothesis.given(programs.programs() if strategy is None else strategy)
  def check(program):
    nonlocal has_failed
    if until is None or has_failed or time.monotonic() < until:
      try:
        run(program, counts)
      except Failure:
        has_failed = True
        raise

  if seed is not None:
    check = hypothesis.seed(seed)(check)
  # Most mutations of a program are programs that find nothing new, and slow.
  with mock.patch.object(engine.ConjectureRunner, "generate_mutations_from",
                         lambda self, data: None):
    try:
      check()
    except Failure as failure:
      return failure
  return None


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--minutes", type=float, default=1)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--api", choices=programs.MODES)
  parser.add_argument("--mode")
  options = parser.parse_args()
  begin = time.monotonic()
  until = begin + 60 * options.minutes
  counts, seed = Counts(), options.seed
  strategy = programs.programs(options.api, options.mode)
  failure = None
  while time.monotonic() < until and failure is None:
    failure = find(200, counts, strategy, seed, until)
    seed += 1
  print(counts)
  print(f"{counts.of['all'] / (time.monotonic() - begin):.1f} programs a "
        f"second, from --seed {options.seed}")
  if failure is not None:
    print(f"FAILED with --seed {seed - 1}. The program:\n")
    print(programs_code.printed(failure.code))
    traceback.print_exception(failure.__cause__)
    sys.exit(1)


if __name__ == "__main__":
  main()
