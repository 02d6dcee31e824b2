"""Averages checkpoints, without the model and its code.

  merge     the mean of checkpoints, a weighted mean, or the end of a learning
            rate's decay
  lawa      the mean of the latest checkpoints of a run
  ema       an exponential moving average along the checkpoints of a run
  posthoc   the average of any width, from the snapshots of a run
  list      the kind and the contents of checkpoints

A checkpoint is a .weights.h5, .weights.json or .keras file of Keras, a
.safetensors file or the .safetensors.index.json of its shards, or the prefix of
a TensorFlow checkpoint, which is the part before ".index" in the names of its
files. A directory means all checkpoints in it, sorted by name, with numbers in
names sorted by value; one with a model.safetensors or its index means that.
TensorFlow is needed for its own checkpoints only.

Before it writes, a command prints the weights of the inputs, and how many bytes
it will read, write and hold in memory. With --dry-run it ends there.

The output is a copy of the last input with averaged variables, and loads in the
same way. It appears once it is complete. Integers (counts of steps), strings
and the state of optimizers are copied from the last input. The command prints
how many variables are averaged and copied, and lists them with --verbose;
list --variables lists those of a file. A Saver's file does not distinguish the
state of optimizers from weights: choose with --only. The documentation of
wrapopt.checkpoints says by what an optimizer is recognized. Sharded weights
become one file.

The moving statistics of batch normalizations in an output do not fit its
weights. Load it into the model, then call
wrapopt.keras.recalibrate_batch_norm(model, dataset). The function of --evaluate
must do so before it evaluates.

Examples:

  python -m wrapopt.checkpoints merge a.keras b.keras --output mean.keras
  python -m wrapopt.checkpoints merge run/model-1000 run/model-2000 \\
      --weights 0.3 0.7 --output run/mean
  python -m wrapopt.checkpoints merge run --decay 1-sqrt --output run/decayed
  python -m wrapopt.checkpoints lawa run --window 5 --output averaged/model
  python -m wrapopt.checkpoints merge run/checkpoint-800 run/checkpoint-900 \\
      --output run/merged --copy-rest
  python -m wrapopt.checkpoints posthoc run/snapshots --relative-width 0.08 \\
      --output width.weights.h5
  python -m wrapopt.checkpoints posthoc run/snapshots \\
      --sweep 0.03 0.05 0.1 0.2 --evaluate my_module:accuracy --output sweep
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import sys

import numpy as np

from wrapopt import _extras
from wrapopt import checkpoints
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _formats
from wrapopt.checkpoints import _merge
from wrapopt.checkpoints import _rate_decay

_WIDTHS = (0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.13, 0.17, 0.22)


def main(argv=None):
  parser = argparse.ArgumentParser(
      prog="python -m wrapopt.checkpoints", description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(metavar="COMMAND", required=True,
                                   help="COMMAND --help lists its options")

  command = _add(commands, "merge", _run_merge, checkpoints.merge)
  command.add_argument(
      "--weights", type=float, nargs="+", metavar="W",
      help="a number for each input; they are divided by their sum. Default: "
      "the mean")
  command.add_argument(
      "--blend", type=float, metavar="A",
      help="write (1 - A) BASE + A mean")
  command.add_argument(
      "--base", metavar="BASE",
      help="the checkpoint to blend with. Default: the last input")
  command.add_argument(
      "--decay", choices=_rate_decay.SHAPES,
      help="the weights that make checkpoints of a constant learning rate into "
      "the result of this decay of it")
  command.add_argument(
      "--decay-steps", type=float, metavar="N",
      help="the number of steps of the decay. Default: from the first input to "
      "the last")
  command.add_argument(
      "--steps", type=float, nargs="+", metavar="T",
      help="the step of each input. Default: the number at the end of its name")
  command = _add(commands, "ema", _run_ema, checkpoints.ema)
  command.add_argument(
      "--decay", type=float, default=0.5, metavar="D",
      help="in [0, 1]: the weight of the old average at each checkpoint. "
      "Default: %(default)s")
  command = _add(commands, "lawa", _run_lawa, checkpoints.lawa)
  command.add_argument(
      "--window", type=int, default=5, metavar="N",
      help="the number of latest checkpoints to average. Default: %(default)s")

  command = _add(commands, "posthoc", _run_posthoc, checkpoints.posthoc)
  wanted = command.add_mutually_exclusive_group(required=True)
  wanted.add_argument(
      "--relative-width", type=float, metavar="W",
      help="the wanted average: the standard deviation of its weight over "
      "training, as a fraction of training; up to 0.288")
  wanted.add_argument("--gamma", type=float, metavar="G",
                      help="the wanted average: the exponent of its power "
                      "function")
  wanted.add_argument(
      "--sweep", type=float, nargs="*", metavar="W",
      help="evaluate averages of these widths; default: "
      f"{' '.join(map(str, _WIDTHS))}. Needs --evaluate. The output is a "
      "directory with results.json and quality.png")
  command.add_argument(
      "--evaluate", metavar="MODULE:FUNCTION",
      help="a Python function of the path of a checkpoint, which loads it and "
      "returns a number")
  command.add_argument(
      "--steps", type=float, metavar="T",
      help="the number of steps of the average. Default: all")

  command = commands.add_parser(
      "list", help="the kind and the contents of checkpoints",
      description="Prints the kind and the contents of checkpoints.")
  command.add_argument("inputs", nargs="+", metavar="INPUT",
                       help="a checkpoint, or a directory of them")
  command.add_argument("--variables", action="store_true",
                       help="also list the variables")
  command.set_defaults(run=_run_list)

  options = parser.parse_args(argv)
  try:
    options.run(options, parser)
  except (OSError, ValueError, ImportError) as e:
    sys.exit(f"{parser.prog}: error: {e}")


def _add(commands, name, run, function):
  """Adds a command that writes an average of inputs."""
  text = function.__doc__.split("\n\n  Args:")[0].replace("\n  ", "\n")
  command = commands.add_parser(
      name, help=text.splitlines()[0].removesuffix("."), description=text,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  command.add_argument("inputs", nargs="+", metavar="INPUT",
                       help="a checkpoint, or a directory of them")
  command.add_argument("--output", required=True, metavar="OUTPUT",
                       help="the path to write; must not exist")
  command.add_argument(
      "--only", metavar="REGEX",
      help="average the variables in whose names this is found; copy the "
      "others from the last input. Default: all but the state of optimizers")
  command.add_argument("--verbose", action="store_true",
                       help="list the variables, averaged and copied")
  command.add_argument("--quiet", action="store_true",
                       help="show no progress bar, which a terminal gets")
  command.add_argument("--dry-run", action="store_true",
                       help="print what would be done, and write nothing")
  command.add_argument("--allow-nan", action="store_true",
                       help="average values that are NaN, too")
  if function is not checkpoints.posthoc:
    command.add_argument(
        "--copy-rest", action="store_true",
        help="for safetensors: also copy the other files in the folder of the "
        "last input, such as the configuration and the tokenizer")
    command.add_argument(
        "--max-shard-size", metavar="SIZE",
        help="for safetensors: the largest size of a file, such as 5GB. "
        "Default: the shards of the last input")
  command.set_defaults(run=run)
  return command


def _common(options):
  """Arguments of the function of a command."""
  return {"only": options.only, "allow_nan": options.allow_nan,
          "progress": not options.quiet and sys.stderr.isatty() and
                      importlib.util.find_spec("tqdm") is not None,
          **{name: getattr(options, name)
             for name in ("copy_rest", "max_shard_size")
             if hasattr(options, name)}}


def _print_plan(plan):
  for path, weight in plan.inputs:
    print(f"  {weight:10.6f}  {path}")
  print(f"  reads {_size(plan.read_bytes)}, writes "
        f"{_size(plan.written_bytes)}, holds {_size(plan.peak_bytes)} of "
        "values in memory", flush=True)


def _size(nbytes):
  for unit in "bytes", "KB", "MB", "GB":
    if nbytes < 1000 or unit == "GB":
      return f"{nbytes:.3g} {unit}" if unit != "GB" else f"{nbytes:.2f} GB"
    nbytes /= 1000


def _paths(options):
  return [path for given in options.inputs for path in _formats.expand(given)]


def _report(options, like, remedy):
  """Prints what is averaged, and a note if there are moving statistics.

  Args:
    options: Those of the command.
    like: The path of an input.
    remedy: A sentence of the note.
  """
  with contextlib.closing(_formats.open_source(like)) as source:
    _print_parts(source, options.verbose, options.only)
    names = source.moving_statistics()
    slots = [name for name in _merge.averaged(source, options.only)
             if source.specs[name] == source.specs.get(os.path.dirname(name))]
  if slots:
    print(f"note: {len(slots)} averaged variables, such as '{slots[-1]}', have "
          "names of slots. A Saver's file does not distinguish slots from "
          "weights. Choose the variables to average with --only.",
          file=sys.stderr)
  if names:
    print(f"note: {options.output} has moving statistics of batch "
          f"normalizations, {len(names)} variables such as '{names[-1]}'. They "
          f"do not fit averaged weights. {remedy}", file=sys.stderr)


def _write(options, of, function, *args, **kwargs):
  """Writes an average and prints what is in it.

  Args:
    options: Those of the command.
    of: A function of the result, which says what the output is made of.
    function: One of `wrapopt.checkpoints`.
    *args: Its arguments after the inputs and the output.
    **kwargs: Its keyword arguments.
  """
  def confirm(plan):
    _print_plan(plan)
    return not options.dry_run

  paths = _paths(options)  # Before the output is in one of the directories.
  result = function(paths, options.output, *args, confirm=confirm, **kwargs,
                    **_common(options))
  if options.dry_run:
    print("nothing was written to", end=" ")
  print(f"{options.output}: {of(result)}")
  _report(options, paths[-1], "Load the output into the model, then compute "
          "them again: wrapopt.keras.recalibrate_batch_norm(model, dataset) or "
          "torch.optim.swa_utils.update_bn(loader, model).")


def _run_merge(options, parser):
  del parser
  _write(options, lambda fitted: "mean of the inputs" if fitted is None else (
      f"of {np.count_nonzero(fitted.weights)} of {len(fitted.weights)} inputs, "
      f"error of the decay {fitted.error:.2%}"), checkpoints.merge,
         options.weights, decay=options.decay, decay_steps=options.decay_steps,
         steps=options.steps, base=options.base, blend=options.blend)


def _run_ema(options, parser):
  del parser
  _write(options, lambda _: f"moving average of decay {options.decay:g}",
         checkpoints.ema, options.decay)


def _run_lawa(options, parser):
  del parser
  _write(options, lambda _: f"mean of the last {options.window} inputs",
         checkpoints.lawa, options.window)


def _run_posthoc(options, parser):
  if (options.sweep is None) != (options.evaluate is None):
    parser.error("--sweep and --evaluate must be given together")
  if options.sweep is not None:
    _run_sweep(options, parser)
    return
  _write(options, lambda fitted: (
      f"of {len(fitted.weights)} snapshots, error of the profile "
      f"{fitted.error:.2%}"), checkpoints.posthoc, options.relative_width,
         gamma=options.gamma, steps=options.steps)


def _run_sweep(options, parser):
  plt = _extras.load("matplotlib.pyplot")
  module, _, name = options.evaluate.partition(":")
  sys.path.insert(0, os.getcwd())
  try:
    evaluate = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError) as e:
    parser.error(f"argument --evaluate: must be MODULE:FUNCTION, got "
                 f"{options.evaluate}: {e}")
  if not options.output:
    parser.error("argument --output: must be a directory, got ''")
  paths = _paths(options)
  _report(options, paths[-1], f"The function {options.evaluate} must "
          "recalibrate them before it evaluates, or the best width may be "
          "wrong: wrapopt.keras.recalibrate_batch_norm(model, dataset).")
  made = _files.make_directories(options.output)
  try:
    widths = checkpoints.sweep(
        paths, evaluate, options.sweep or _WIDTHS, steps=options.steps,
        only=options.only, progress=_common(options)["progress"])
  except BaseException:
    _files.remove_empty(made)
    raise
  print("relative width  error of the profile  quality")
  for width in widths:
    print(f"{width.relative_width:14.4g}  {width.error:20.2%}  "
          f"{width.quality:.6g}")
  results = os.path.join(options.output, "results.json")
  with open(results, "w", encoding="utf-8") as file:
    json.dump([width._asdict() for width in widths], file, indent=2)
    file.write("\n")
  plot(plt, {"": widths}, os.path.join(options.output, "quality.png"))
  print(results)


def plot(plt, curves, path, ylabel="quality"):
  """Draws quality over width.

  Args:
    plt: matplotlib.pyplot.
    curves: {label: list of Widths}.
    path: Of the PNG.
    ylabel: The label of the quality.
  """
  figure, axes = plt.subplots(figsize=(7, 4.5), dpi=120)
  for label, widths in curves.items():
    axes.plot([w.relative_width for w in widths], [w.quality for w in widths],
              marker="o", label=label or None)
  axes.set(xscale="log", xlabel="relative width of the average", ylabel=ylabel)
  axes.grid(alpha=0.3)
  if any(curves):
    axes.legend()
  figure.tight_layout()
  figure.savefig(path)
  plt.close(figure)


def _run_list(options, parser):
  del parser
  for path in _paths(options):
    with contextlib.closing(_formats.open_source(path)) as source:
      _describe(source, options.variables)


def _describe(source, with_variables):
  specs = source.specs
  print(f"{source.path}: {source.kind}, {len(specs)} variables, "
        f"{sum(s.nbytes for s in specs.values()) / 1e6:.1f} MB")
  if source.note:
    steps = source.note["steps"]
    print(f"  snapshot of step {source.note['step']}, decay "
          f"{source.note['decay']}" + (
              "" if steps is None else f", {steps} steps averaged"))
  _print_parts(source, with_variables)


def _print_parts(source, with_variables, only=None):
  """Prints how many variables are averaged and copied, and which."""
  averaged, specs = set(_merge.averaged(source, only)), source.specs
  numbers, copied = collections.Counter(), {}
  for name, spec in specs.items():
    if name in averaged:
      numbers[str(spec.dtype)] += spec.size
    else:
      copied[name] = _merge.why_not(source, name, only)
  print("  averaged: " + ", ".join([f"{len(averaged)} variables", *(
      f"{n} numbers of {dtype}" for dtype, n in sorted(numbers.items()))]))
  print("  copied: " + ", ".join([f"{len(copied)} variables", *(
      f"{n} {why}" for why, n in sorted(
          collections.Counter(copied.values()).items()))]))
  if with_variables:
    for name, spec in sorted(specs.items()):
      print(f"  {'copied  ' if name in copied else 'averaged'}  {name}  "
            f"{spec.dtype} {list(spec.shape)}" +
            (f", {copied[name]}" if name in copied else ""))


if __name__ == "__main__":
  main()
