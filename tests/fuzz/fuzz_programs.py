"""Runs random programs that train with wrappers, and prints the first failure.

    ./tools/fuzz programs --minutes 5
    ./tools/fuzz programs --seed 1234  # The programs of this seed alone.

See `programs.py`. Each seed has 200 programs. A failure is shrunk to a small
program, and printed as code that runs by itself.
"""

import argparse
import collections
import os
import sys
import time
import traceback
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# As in the prelude, before TensorFlow reads it.
os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")

import hypothesis
from hypothesis.internal.conjecture import engine
import keras

import programs
import programs_code

_OF_A_SEED = 200


class Counts:
  """How many programs ran, by what is in them."""

  def __init__(self):
    self.of = collections.Counter()

  def add(self, program):
    self.of.update({
        "all", f"{program.api} {program.mode}", f"inner {program.inner[0]}",
        *(f"wrapper {name}" for name in program.names or ["none"]),
        *(f"operation {name}" for name, *_ in program.operations),
        *([f"setting {program.setting}"] if program.setting else []),
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
    programs_code.run(code, program.setting == "flags")
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
  parser.add_argument("--minutes", type=float, help="how long to search")
  parser.add_argument("--seed", type=int,
                      help="the first seed; without --minutes, the only one")
  parser.add_argument("--api", choices=programs.MODES)
  parser.add_argument("--mode")
  options = parser.parse_args()
  begin = time.monotonic()
  alone = options.seed is not None and options.minutes is None
  minutes = 1 if options.minutes is None else options.minutes
  until = None if alone else begin + 60 * minutes
  first = (int.from_bytes(os.urandom(4), "little") if options.seed is None
           else options.seed)
  print(f"--seed {first}")
  counts, seed = Counts(), first
  strategy = programs.programs(options.api, options.mode)
  failure = find(_OF_A_SEED, counts, strategy, seed, until)
  while not alone and time.monotonic() < until and failure is None:
    seed += 1
    failure = find(_OF_A_SEED, counts, strategy, seed, until)
  print(counts)
  seconds = time.monotonic() - begin
  print(f"{counts.of['all']} cases in {seconds:.0f} seconds, "
        f"{60 * counts.of['all'] / seconds:.0f} per minute, "
        f"{int(failure is not None)} findings")
  if failure is not None:
    print(f"FAILED with --seed {seed}. The program:\n")
    print(programs_code.printed(failure.code))
    traceback.print_exception(failure.__cause__)
    sys.exit(1)


if __name__ == "__main__":
  main()
