"""Runs all fuzzers, one after the other, with the seed of the day.

    ./tools/fuzz all --minutes 60                        # Each for an hour.
    ./tools/fuzz all --minutes 60 --seed 20260131000000  # As on 31 January.

Goes on after a finding. The last lines tell the seed, the cases and the
findings of each.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys

KINDS = ("ops", "programs", "files")
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def seed_of_the_day():
  """The date in UTC and six zeros: a day has fewer cases, each with a seed."""
  today = datetime.datetime.now(datetime.timezone.utc)
  return int(f"{today:%Y%m%d}") * 10**6


def run(kind, minutes, seed, folder=_FOLDER):
  """Runs a fuzzer, and prints what it prints.

  Args:
    kind: One of KINDS.
    minutes: How long.
    seed: A seed.
    folder: The folder of the fuzzer.

  Returns:
    Its exit status, and a line about it.
  """
  told = "it has not told how many cases"
  with subprocess.Popen(
      [sys.executable, os.path.join(folder, f"fuzz_{kind}.py"),
       f"--minutes={minutes}", f"--seed={seed}"],
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
      env={**os.environ, "PYTHONUNBUFFERED": "1",
           "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}) as process:
    for line in process.stdout:
      print(line, end="", flush=True)
      if re.match(r"\d+ cases in ", line):
        told = line.strip()
  status = process.returncode
  return status, (f"fuzz {kind} --seed {seed}: {told}"
                  f"{f'; exit status {status}' if status else ''}")


def main(argv=None, kinds=KINDS, folder=_FOLDER):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--minutes", type=float, default=1,
                      help="how long each searches")
  parser.add_argument("--seed", type=int, help="default: the seed of the day")
  options = parser.parse_args(argv)
  seed = seed_of_the_day() if options.seed is None else options.seed
  done = []
  for kind in kinds:
    print(f"\nfuzz {kind} --seed {seed}", flush=True)
    done.append(run(kind, options.minutes, seed, folder))
  print("\n" + "\n".join(line for _, line in done))
  return int(any(status for status, _ in done))


if __name__ == "__main__":
  sys.exit(main())
