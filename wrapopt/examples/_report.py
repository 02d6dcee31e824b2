"""The command of an example, and what it reports: tables, figures, results."""

import argparse
import contextlib
import inspect
import itertools
import json
import pathlib
import platform
import time

import keras
import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras


def at_least(least):
  """A type of arguments: numbers of at least `least`, and of its type."""

  def parse(text):
    value = type(least)(text)
    if not value >= least:
      raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return value

  parse.__name__ = type(least).__name__  # The name in errors.
  return parse


_OPTIONS = {  # {name: arguments of `add_argument`}
    "epochs": {"type": at_least(1), "nargs": "+", "help": "when to evaluate"},
    "files": {"type": at_least(1), "help": "source files to read, at most"},
    "kill_worker": {"action": "store_true", "help": "kill one in the middle"},
    "limit": {"type": at_least(0), "help": "the largest staleness to admit"},
    "out": {"type": pathlib.Path, "help": "the folder to write to"},
    "quick": {"action": "store_true", "help": "little of all, as a trial"},
    "rest": {"type": at_least(0.01), "help": "rests of the slow one, seconds"},
    "rounds": {"type": at_least(2), "help": "rounds of averaging"},
    "seed": {"type": at_least(0), "help": "of split, weights and batches"},
    "seeds": {"type": at_least(1), "help": "the number of seeds"},
    "steps": {"type": at_least(1), "help": "steps of the optimizer"},
    "tasks": {"nargs": "+", "help": "the tasks"},
    "ways": {"nargs": "+", "help": "the ways to train"}}


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
        default = parameter.default
        options.add_argument(
            f"--{option.replace('_', '-')}", default=default,
            **({"choices": default} if option in ("tasks", "ways") else {}),
            **_OPTIONS[option])
    _run(**vars(parser.parse_args(argv)))

  return main


def _run(part, out, **given):
  # A missing package fails before the training.
  _, sklearn, _ = map(_extras.load, ("matplotlib", "sklearn", "tqdm"))
  out.mkdir(parents=True, exist_ok=True)
  start = time.perf_counter()
  results = {
      "out": str(out), **given, **part(out, **given),
      "seconds": round(time.perf_counter() - start, 2),
      "versions": {"python": platform.python_version(), **{
          package.__name__: package.__version__
          for package in (wrapopt, tf, keras, np, sklearn)}},
      "wrapopt_path": str(pathlib.Path(wrapopt.__file__).parent.absolute())}
  path = out / "results.json"
  path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
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


@contextlib.contextmanager
def _drawn(path, title, n_panels):
  """Makes a figure: yields its axes, the unused ones at last.

  Then it writes the figure and prints its path.
  """
  columns = 2 if n_panels == 4 else min(3, n_panels)
  rows = -(-n_panels // columns)
  # Readers who are colour-blind tell these colours apart.
  with _extras.load("matplotlib.style").context("petroff10"):
    figure = _extras.load("matplotlib.figure").Figure(
        (max(8, 4 * columns), max(5, 3.5 * rows)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for ax in axes[n_panels:]:
      ax.axis("off")
    yield axes
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
  print(path)


def draw_curves(path, title, x_label, panels, shown=(0, 0.9)):
  """Draws means of seeds, and as a band the least and the largest.

  Bands of many curves would hide each other: there are none of more than 7.

  Args:
    path: The image.
    title: The title.
    x_label: What the x axis shows.
    panels: Pairs. The first are the curves, {label: (x, y, format of
      Matplotlib)}; `y` are numbers, one for each of `x`, or a list of these for
      each seed. The second are properties of the axes: "title", "ylabel", ...
    shown: The quantiles that limit the y axis. The first numbers of a training
      are far off.
  """
  with _drawn(path, title, len(panels)) as axes:
    for ax, (curves, properties) in zip(axes, panels):
      means = []
      for label, (x, y, style) in curves.items():
        seeds = np.atleast_2d(y)
        means.append(seeds.mean(axis=0))
        [line] = ax.plot(x, means[-1], style, label=label)
        if len(curves) <= 7:
          ax.fill_between(x, seeds.min(axis=0), seeds.max(axis=0), alpha=0.13,
                          color=line.get_color(), linewidth=0)
      # Without those that diverge.
      best = np.nanmin([mean[-1] for mean in means])
      low, high = np.quantile(np.concatenate(
          [mean for mean in means if mean[-1] <= 10 * best]), shown)
      room = 0.1 * (high - low) or 1
      ax.set(xlabel=x_label, ylim=(low - room, high + room), **properties)
      if ax.get_xscale() == "log":
        ax.xaxis.set_major_formatter("{x:g}")
      ax.grid(alpha=0.3)
    # In the empty corner, if there is one.
    lines, labels = axes[0].get_legend_handles_labels()
    if len(axes) > len(panels):
      axes[-1].legend(lines, labels, loc="center")
    else:
      axes[0].figure.legend(lines, labels, loc="outside lower center", ncols=4,
                            fontsize="small")


def draw_staleness(path, title, panels):
  """Draws histograms of staleness: {title: {label: counts}}."""
  with _drawn(path, title, len(panels)) as axes:
    for ax, (name, bars) in zip(axes, panels.items()):
      width = 0.8 / len(bars)
      for i, (label, counts) in enumerate(bars.items()):
        ax.bar(np.arange(len(counts)) + (i + 0.5) * width - 0.4, counts, width,
               label=label)
      ax.set_yscale("symlog", linthresh=1)
      ax.yaxis.set_major_formatter("{x:g}")
      ax.set(title=name, ylabel="gradients",
             xlabel="staleness: updates that the weights lacked\n(the last "
             f"bar: {len(counts) - 1} and more)")
      ax.legend()
