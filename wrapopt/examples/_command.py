"""What the commands of all examples have in common."""

import argparse
import os

from wrapopt import _extras


def parser(name, doc):
  """An argument parser of the example `name`, with its docstring as help."""
  return argparse.ArgumentParser(
      prog=f"python -m wrapopt.examples.{name}", description=doc,
      formatter_class=argparse.RawDescriptionHelpFormatter)


def add_out(to, name):
  """Adds the option --out to a parser."""
  to.add_argument("--out", default=f"results/{name}", metavar="DIR",
                  help="where to write; default %(default)s")


def count(text):
  """An argument that is a count: an integer above 0."""
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
  return value


def add_tasks(to, tasks):
  """Adds the options --seeds and --tasks, some of the names `tasks`."""
  to.add_argument("--seeds", type=count, default=3,
                  help="the number of seeds; default %(default)s")
  to.add_argument("--tasks", nargs="+", choices=tasks, default=list(tasks),
                  metavar="TASK", help=f"of {', '.join(tasks)}; default all")


def evaluation_points(steps, evaluations):
  """Numbers of steps after which to evaluate, at equal distances."""
  return sorted({max(1, steps * i // evaluations)
                 for i in range(1, evaluations + 1)})


def add_seed(to):
  """Adds the option --seed to a parser."""
  to.add_argument("--seed", type=int, default=0,
                  help="of split, weights and batches; default %(default)s")


def prepare(out, *packages):
  """Imports packages and makes a folder, before the training.

  A missing package then fails first.

  Args:
    out: The folder.
    *packages: Names of packages that the example needs.
  """
  for package in packages:
    _extras.load(package)
  os.makedirs(out, exist_ok=True)
