"""`python -m wrapopt.bench NAME` runs a benchmark: a module in this folder.

A benchmark's module has a docstring, whose first line is its help,
`add_arguments(parser)`, and `run(options)`, which prints its tables and returns
its results for --json.
"""

import argparse
import importlib
import json

from wrapopt.bench import harness

_BENCHMARKS = ("average", "embedding", "ema", "gate", "growth", "keras",
               "merge", "step", "xla")


def main(argv=None):
  parser = argparse.ArgumentParser(
      prog="python -m wrapopt.bench",
      description="Compares wrapopt with its peers in one process, in turns.")
  commands = parser.add_subparsers(
      metavar="NAME", required=True, help="the benchmark:")
  for name in _BENCHMARKS:
    benchmark = importlib.import_module(f"wrapopt.bench.{name}")
    command = commands.add_parser(
        name, help=benchmark.__doc__.splitlines()[0],
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmark.add_arguments(command)
    command.set_defaults(name=name, run=benchmark.run)
  options = parser.parse_args(argv)

  # Opened first, so that a wrong path fails before the run.
  output = None
  if options.json is not None:
    try:
      output = open(options.json, "w", encoding="utf-8")
    except OSError as e:
      parser.error(f"argument --json: cannot write {options.json}: "
                   f"{e.strerror}")
  environment = harness.environment()
  print(", ".join(f"{key} {value}" for key, value in environment.items()))
  results = options.run(options)
  if output is not None:
    with output:
      json.dump({"benchmark": options.name, "environment": environment,
                 "results": results}, output, indent=2)
      output.write("\n")


if __name__ == "__main__":
  main()
