"""The command of an example: its options, its tables and `results.json`."""

import argparse
import inspect
import itertools
import json
import os
import platform
import time

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras


def at_least(least, kind=int):
  """A type of arguments: numbers of at least `least`."""

  def parse(text):
    value = kind(text)
    if not value >= least:
      raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return value

  parse.__name__ = kind.__name__  # The name in errors.
  return parse


_OPTIONS = {  # {name: arguments of `add_argument`}
    "epochs": {"type": at_least(1), "nargs": "+", "metavar": "N",
               "help": "epochs after which to evaluate"},
    "files": {"type": at_least(1), "metavar": "N",
              "help": "read at most N source files"},
    "kill_worker": {"action": "store_true", "help": "kill the last worker in "
                    "the middle of the run"},
    "limit": {"type": at_least(0), "help": "the largest staleness to admit"},
    "out": {"metavar": "DIR", "help": "where to write"},
    "quick": {"action": "store_true", "help": "few candidates, evaluations and "
              "data: to see that it runs"},
    "rest": {"type": at_least(0.01, float), "metavar": "SECONDS",
             "help": "how long the slow worker rests at a time"},
    "rounds": {"type": at_least(2), "help": "rounds of averaging"},
    "seed": {"type": int, "help": "of split, weights and batches"},
    "seeds": {"type": at_least(1), "help": "the number of seeds"},
    "steps": {"type": at_least(1), "help": "steps of the optimizer"},
    "tasks": {"nargs": "+", "metavar": "TASK", "help": "the tasks"},
    "ways": {"nargs": "+", "metavar": "WAY", "help": "the ways to train"},
}


class _Help(argparse.ArgumentDefaultsHelpFormatter,
            argparse.RawDescriptionHelpFormatter):
  pass


def command(name, doc, *parts):
  """The main function of an example, which writes `results.json`.

  Args:
    name: The name of its module.
    doc: Its description.
    *parts: Functions that return results, a dict. The arguments of a function
      are options. If there are several functions, the first argument is the
      name of one.

  Returns:
    A function of the command's arguments, by default those of the process.
  """

  def main(argv=None):
    parser = argparse.ArgumentParser(
        prog=f"python -m wrapopt.examples.{name}", description=doc,
        formatter_class=_Help)
    if len(parts) > 1:
      names = parser.add_subparsers(metavar="PART", required=True)
    for part in parts:
      options = parser if len(parts) == 1 else names.add_parser(
          part.__name__, help=part.__doc__, description=part.__doc__,
          formatter_class=_Help)
      options.set_defaults(part=part)
      for option, parameter in inspect.signature(part).parameters.items():
        settings = dict(_OPTIONS[option], default=parameter.default)
        if option in ("tasks", "ways"):
          settings["choices"] = parameter.default
        options.add_argument(f"--{option.replace('_', '-')}", **settings)
    _run(**vars(parser.parse_args(argv)))

  return main


def _run(part, **given):
  # A missing package fails before the training.
  for package in ("matplotlib", "sklearn", "tqdm"):
    _extras.load(package)
  os.makedirs(given["out"], exist_ok=True)
  start = time.perf_counter()
  results = {
      **given, **part(**given),
      "seconds": round(time.perf_counter() - start, 2),
      "versions": {
          "python": platform.python_version(),
          **{package.__name__: package.__version__ for package in (
              wrapopt, tf, keras, np, _extras.load("sklearn"))}},
      "wrapopt_path": os.path.dirname(os.path.abspath(wrapopt.__file__))}
  path = os.path.join(given["out"], "results.json")
  with open(path, "w", encoding="utf-8") as f:
    json.dump(results, f, indent=2)
    f.write("\n")
  print(path)


def progress(*args, **kwargs):
  """A progress bar: a `tqdm` of these arguments."""
  return _extras.load("tqdm").tqdm(*args, **kwargs)


def print_table(title, header, rows):
  """Prints a title and a table; rows may be shorter than the header."""
  lines = [[str(cell) for cell in row] for row in (header, *rows)]
  widths = [max(map(len, column))
            for column in itertools.zip_longest(*lines, fillvalue="")]
  print(f"\n{title}")
  for line in lines:
    print("  ".join(map(str.rjust, line, widths)).rstrip())


def points(steps, evaluations):
  """Numbers of steps after which to evaluate, at equal distances."""
  return tuple(sorted({max(1, steps * i // evaluations)
                       for i in range(1, evaluations + 1)}))
