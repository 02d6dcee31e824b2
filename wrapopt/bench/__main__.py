"""`python -m wrapopt.bench NAME` runs a benchmark: a module in this folder.

A benchmark's module has a docstring, whose first line is its help,
`add_arguments(parser)`, and `contests(options)`, which yields `harness.Contest`
objects. `tables` makes the figures in the documents from files of results.
"""

import argparse
import datetime
import importlib
import json
import os
import shlex
import sys

from wrapopt.bench import harness
from wrapopt.bench import tables

_BENCHMARKS = ("embedding", "gate", "keras", "links", "rounds", "step")
# More use of the processor by other work, in cores, changes figures.
_QUIET = 0.1


def main(argv=None):
  parser = argparse.ArgumentParser(
      prog="python -m wrapopt.bench",
      description="Compares wrapopt with its peers in one process, in turns. "
      "Times are medians of the rounds; ratios are medians of the rounds' "
      "ratios: \"x PEER\" of times, \"of PEER\" of speeds.")
  commands = parser.add_subparsers(
      metavar="NAME", required=True, help="the benchmark:")

  def add(name, module, run):
    command = commands.add_parser(
        name, help=module.__doc__.splitlines()[0], description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(command)
    command.set_defaults(name=name, run=run, json=None)
    return command

  for name in _BENCHMARKS:
    benchmark = importlib.import_module(f"wrapopt.bench.{name}")
    command = add(name, benchmark, benchmark.contests)
    command.add_argument("--quick", action="store_true",
                         help="5 rounds instead of 15; not for figures")
    command.add_argument("--rounds", type=int, metavar="N",
                         help="the number of turns of each contender")
    command.add_argument("--json", metavar="FILE",
                         help="a file for the results")
  add("tables", tables, tables.run)
  options = parser.parse_args(argv)
  if options.run == tables.run:
    options.run(options)
    return

  # Opened first, so that a wrong path fails before the run.
  output = None
  if options.json is not None:
    try:
      output = open(options.json, "w", encoding="utf-8")
    except OSError as e:
      parser.error(f"argument --json: cannot write {options.json}: "
                   f"{e.strerror}")
  environment = harness.environment()
  print(", ".join(f"{key} {value}" for key, value in environment.items()),
        flush=True)
  others = [harness.busy_cores()]
  results = harness.run(options.run(options), options.rounds or (
      5 if options.quick else 15))
  others.append(harness.busy_cores())
  # All figures of the run stand for this machine and this load.
  machine = "quiet" if max(others) <= _QUIET else "busy"
  print(f"\n{machine} machine: other work used {others[0]:.2f} cores before "
        f"and {others[1]:.2f} after")
  if output is not None:
    with output:
      json.dump({"benchmark": options.name, "command": _command(argv),
                 "date": datetime.date.today().isoformat(),
                 "machine": machine, "environment": environment,
                 "results": results}, output, indent=2)
      output.write("\n")


def _command(argv):
  """The command that a user types, without the file of the results."""
  words = list(sys.argv[1:] if argv is None else argv)
  if "--json" in words:
    at = words.index("--json")
    del words[at:at + 2]
  chosen = [f"{name}={os.environ[name]}" for name in (
      "WRAPOPT_XLA_ON_CPU", "WRAPOPT_XLA_ON_GPU") if os.environ.get(name)]
  return " ".join(filter(None, [*chosen, "python -m wrapopt.bench",
                                shlex.join(words)]))


if __name__ == "__main__":
  main()
