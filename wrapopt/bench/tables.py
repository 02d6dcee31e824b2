"""Figures in the documents, made from the results in wrapopt/bench/results.

Each file there has the results of one run, written by `--json`. A document has
blocks

    <!-- figures: NAME -->
    ...
    <!-- end of figures -->

and this command replaces their contents. So a figure is in the results or
nowhere: edit no figure by hand. An installed package has neither documents nor
results: run this in the sources.

A ratio is the median, over the rounds, of the ratio of two times of one round.
The quotient of two medians may differ from it by some per cent, so a table has
the time of one contender and the ratios of the others to it.
"""

import json
import os
import re
import textwrap
import typing

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
_RESULTS = os.path.join("wrapopt", "bench", "results")
_DOCUMENTS = ("README.md", os.path.join("wrapopt", "bench", "README.md"))
_BLOCK = re.compile(
    r"^<!-- figures: (.*) -->\n(?:.*\n)*?<!-- end of figures -->$", re.M)

# How a document writes facts of a result.
_NAMES = {
    "2x4096x4096": "2 x 4096 x 4096", "resnet50": "ResNet-50 (161)",
    "400x256": "400 x 256", "bert-base": "BERT-base (199)",
    "keras": "Keras", "keras-jit": "Keras, jit"}
_IN_CACHES = ("400x256",)  # Their streaming limit is not that of the memory.
_MACHINES = ("quiet", "busy", "unknown")  # Older runs have not recorded it.


def add_arguments(parser):
  parser.add_argument(
      "--check", action="store_true",
      help="change nothing, and fail if a document differs from the results")


def run(options):
  """Writes the blocks of all documents, or compares them."""
  if not os.path.exists(os.path.join(_ROOT, _RESULTS)):
    raise SystemExit(f"{_ROOT} must hold the sources of wrapopt, got an "
                     "installed package. Run this in the sources.")
  differ = differing(_ROOT)
  for path, text in differ.items():
    if not options.check:
      with open(os.path.join(_ROOT, path), "w", encoding="utf-8") as file:
        file.write(text)
    print(path, "differs from the results" if options.check else "written")
  if options.check and differ:
    raise SystemExit("Run python -m wrapopt.bench tables.")


def differing(root):
  """{path: text with the blocks made from the results}, of what differs."""

  def load(name):
    with open(os.path.join(root, _RESULTS, f"{name}.json"),
              encoding="utf-8") as file:
      return json.load(file)

  differ = {}
  for path in _DOCUMENTS:
    with open(os.path.join(root, path), encoding="utf-8") as file:
      before = file.read()
    after = _BLOCK.sub(lambda match: block(match[1], load), before)
    if after != before:
      differ[path] = after
  return differ


def block(name, load):
  """The text of a block, with its markers.

  Args:
    name: Its name.
    load: A function of a run's name that returns what --json wrote.
  """
  if name not in BLOCKS:
    raise SystemExit(f"The figures must be of {', '.join(BLOCKS)}, got {name}.")
  runs = list(map(load, BLOCKS[name].runs.split()))
  return "\n".join([
      f"<!-- figures: {name} -->",
      _markdown(_lines(BLOCKS[name], sum((x["results"] for x in runs), []))),
      "", textwrap.fill(_origin(runs), 80, break_on_hyphens=False),
      "<!-- end of figures -->"])


def _origin(runs):
  """A text about runs: how, when and where they were."""
  commands = {}  # By what is said of them.
  for of_run in runs:
    facts, machine = of_run["environment"], of_run["machine"]
    if machine not in _MACHINES:
      raise ValueError(f"`machine` must be of {', '.join(_MACHINES)}, got "
                       f"{machine}.")
    commands.setdefault(
        f"{of_run['date']}, {''.join(f'{x}, ' for x in facts.get('GPU', []))}"
        f"{facts['processor']}, {facts['threads']} threads, "
        f"{of_run['results'][0]['rounds']} rounds. Machine: {machine}.",
        []).append(f"`{of_run['command']}`")
  return " ".join(f"{', '.join(of_facts)}, {facts}"
                  for facts, of_facts in commands.items())


def figure(name, value):
  """A figure or a fact of a result as text, by its name."""
  if isinstance(value, str):
    return value
  if isinstance(value, int):
    return f"{value:,}"
  if name in ("spread", "of_limit", "computes"):
    return f"{100 * value:.0f} %"
  if abs(value) >= (10 if name.startswith(("x_", "of_")) else 1000):
    return f"{value:,.0f}"
  if name.startswith(("x_", "of_")):
    return f"{value:.2f}"
  return f"{value:.3g}"


def text(results, facts):
  """Results as an aligned table, whose rows are named by differing facts."""
  facts = [name for name in dict.fromkeys((*facts, "mode", "contender"))
           if len({r.get(name) for r in results}) > 1] or ["contender"]
  titles = {"milliseconds": "ms", "spread": "+-",
            "gigabytes_per_second": "GB/s"}
  columns = [(titles.get(name, name.replace("_", " ")), name) for name in
             dict.fromkeys(name for r in results for name in list(r)[
                 list(r).index("contender") + 1:] if name != "rounds")]
  lines = _lines(_Block("", {"": " ".join(facts)}, columns), results)
  widths = [max(map(len, column)) for column in zip(*lines)]
  return "\n".join("  ".join(
      [line[0].ljust(widths[0]),
       *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))])
                   for line in lines)


class _Block(typing.NamedTuple):
  """A table in Markdown: a row for each case, a column for each figure.

  Attributes:
    runs: The names of the runs, which are the files of their results.
    rows: {title of a column: names of facts, whose values it has}. Results that
      agree in all of them are a row.
    columns: (title, name of a figure, whose it is ...). Names may be several,
      "NAME|NAME", for results that have one or the other, and have a format,
      "NAME:FORMAT". It is the figure of a contender, (mode, contender), or
      without it of any. The figures of several are in one cell.
    where: {fact: value} of the results that are in the table.
    only: The first columns of the rows that are in the table; empty for all.
  """
  runs: str
  rows: dict
  columns: list
  where: dict = {}
  only: tuple = ()


def _lines(of_block, results):
  """The cells of its table, without rows and columns that have no figure."""
  rows = {}  # {cells of the facts: {(mode, contender): result}}.
  for r in results:
    if all(r.get(fact) == value for fact, value in of_block.where.items()):
      cells = tuple(", ".join(_NAMES.get(r[fact], figure(fact, r[fact]))
                              for fact in facts.split() if fact in r)
                    for facts in of_block.rows.values())
      if cells[0] in of_block.only or not of_block.only:
        of_row = rows.setdefault(cells, {})
        contender = r.get("contender")
        for who in (r.get("mode"), contender), contender, None:
          of_row.setdefault(who, r)
  lines = [[*of_block.rows, *(title for title, *_ in of_block.columns)]]
  for cells, of_row in rows.items():
    figures = [", ".join(filter(None, (_cell(of_row.get(who, {}), name)
                                       for who in whose or [None])))
               for _, name, *whose in of_block.columns]
    if any(figures):
      lines.append([*cells, *figures])
  return list(zip(*(column for column in zip(*lines) if any(column[1:]))))


def _markdown(lines):
  texts = ["| " + " | ".join(line) + " |" for line in lines]
  texts.insert(1, "|" + "---|" * len(lines[0]))
  return "\n".join(texts).replace("  |", " |")


def _cell(result, names):
  """A figure of a result as text; none if the result lacks it."""
  names, _, form = names.partition(":")
  for name in names.split("|"):
    if name in result and not (
        result[name] is None or
        name == "of_limit" and result.get("set") in _IN_CACHES):
      return (format(result[name], form) if form else
              figure(name, result[name]))
  return ""


_MS = "milliseconds"
_OF_SETS = {"variables": "set"}
_OF_STEPS = {"variables": "set", "optimizer": "optimizer"}
_OF_MODES = {"variables": "set", "mode": "mode"}
_KERAS_MODES = {"cpu": "CPU", "mirrored": "`MirroredStrategy`",
                "jit": "`jit_compile`", "hlo": "plain HLO",
                "gpu": "GPU", "gpu_ops": "GPU without `jit_compile`"}


def _keras(run):
  return _Block(run, {"model": "model"}, [
      column for mode, name in _KERAS_MODES.items() for column in (
          (f"{name}: plain, ms", _MS, (mode, "plain")),
          (f"{name}: x plain", "x_plain", (mode, "use_ema"),
           (mode, "wrapopt, K = 1"), (mode, "wrapopt, K = 3")))])


def _embedding(ids):
  return _Block("embedding", {"optimizer": "optimizer", "rows": "rows",
                              "indices": "indices", "mode": "mode"}, [
      ("plain, ms", _MS, "plain"),
      ("stock average, x plain", "x_plain", "stock average"),
      ("wrapopt, no average, x plain", "x_plain", "wrapopt, K = 0"),
      ("wrapopt, x plain", "x_plain", "wrapopt"),
      ("wrapopt, x op", "x_without", "wrapopt")], {"ids": ids})


BLOCKS = {
    # The steps in the README.
    "costs": _Block("step step-bert keras keras-gpu", {
        "step": "set optimizer model"}, [
        ("CPU: wrapopt", "x_stock|x_plain", ("v1 session", "wrapopt K=1"),
         ("cpu", "wrapopt, K = 1")),
        ("CPU: stock", "x_stock|x_plain", ("v1 session", "stock + EMA"),
         ("cpu", "use_ema")),
        *((f"{machine}: {who}", "x_plain", (mode, contender))
          for machine, mode in (("strategy", "mirrored"),
                                ("GPU", "gpu"))
          for who, contender in (("wrapopt", "wrapopt, K = 1"),
                                 ("stock", "use_ema")))],
                    only=("2 x 4096 x 4096, SGD", "ResNet-50 (161), Momentum",
                          "BERT-base (199), Adam", "100 layers of 32, Adam",
                          "8 layers of 1024, SGD",
                          "transformer, 6 blocks of 256, AdamW")),
    "step-session": _Block("step step-bert", _OF_STEPS, [
        ("stock, ms", _MS, "stock"),
        ("stock + EMA, x stock", "x_stock", "stock + EMA"),
        ("wrapopt, no average, x stock", "x_stock", "wrapopt K=0"),
        ("1 average, x stock", "x_stock", "wrapopt K=1"),
        ("3 averages, x stock", "x_stock", "wrapopt K=3"),
        ("of the streaming limit, 1 and 3 averages", "of_limit",
         "wrapopt K=1", "wrapopt K=3")], {"mode": "v1 session"}),
    "step-modes": _Block("step", _OF_STEPS, [
        ("`tf.function`: stock, ms", _MS, ("tf.function", "stock")),
        ("no average, x stock", "x_stock", ("tf.function", "wrapopt K=0")),
        ("1 average, x stock", "x_stock", ("tf.function", "wrapopt K=1")),
        ("eager: stock, ms", _MS, ("eager", "stock")),
        ("no average, x stock", "x_stock", ("eager", "wrapopt K=0")),
        ("1 average, x stock", "x_stock", ("eager", "wrapopt K=1")),
        ("1 average, x PyTorch", "x_torch", ("eager", "wrapopt K=1"))]),
    "step-jit": _Block("step-jit", _OF_STEPS, [
        ("stock + EMA, ms", _MS, "stock + EMA"),
        ("wrapopt, 1 average, x stock + EMA", "x_stock_ema", "wrapopt K=1"),
        ("wrapopt, no average, x stock", "x_stock", "wrapopt K=0")]),
    "step-schedule-free": _Block("step-schedule-free", _OF_MODES, [
        ("Adam, ms", _MS, "Adam"),
        ("`ScheduleFree(Adam)`, x Adam", "x_adam", "ScheduleFree(Adam)"),
        ("Keras's `ScheduleFreeAdamW`, x Adam", "x_adam", "ScheduleFreeAdamW"),
        ("`ScheduleFree(Adam)`, of the streaming limit", "of_limit",
         "ScheduleFree(Adam)"),
        ("SGD with momentum, ms", _MS, "SGD, momentum"),
        ("`ScheduleFree(SGD)`, ms", _MS, "ScheduleFree(SGD)"),
        ("AdamWScheduleFree, ms", _MS, ("PyTorch", "foreach"))]),
    "step-averages": _Block("step-averages", _OF_MODES, [
        ("`MovingAverage(Adam)`, x Adam", "x_adam", "MovingAverage(Adam)"),
        ("`PrimalAverage(Adam)`, x `MovingAverage(Adam)`", "x_average",
         "PrimalAverage(Adam)"),
        ("with a `BEMA`, x `MovingAverage(Adam)`", "x_average", "BEMA(Adam)")]),
    "gate": _Block("gate", _OF_SETS, [
        ("stock, ungated, ms", _MS, "ungated, stock"),
        ("wrapopt, ungated, x stock", "x_stock", "ungated, one op"),
        ("admitted, x stock", "x_stock", "gated, admitted"),
        ("admitted, x wrapopt ungated", "x_ungated", "gated, admitted"),
        ("admitted, x `tf.cond`", "x_cond", "gated, admitted"),
        ("dropped, ms", _MS, "gated, dropped")]),
    "gate-workers": _Block(
        "gate-workers", {"step": "kind", "workers": "workers"}, [
            ("Keras's Adam, steps a second", "steps_per_second",
             "Keras's Adam"),
            ("`MovingAverage`, x Keras", "of_keras", "MovingAverage"),
            ("`DropStaleGradient`, x Keras", "of_keras", "DropStaleGradient")]),
    "rounds": _Block("rounds", {"workers": "workers"}, [
        ("milliseconds of a round, for each worker", _MS, "DiLoCo"),
        ("x first", "x_first", "DiLoCo"),
        ("MB of the server at the peak", "peak_megabytes", "DiLoCo"),
        ("bytes for each worker more", "bytes:,.0f", "DiLoCo")]),
    "links": _Block("links-10 links", {"megabits": "megabits a second"}, [
        (who, "computes", who) for who in (
            "torchft, published", "plain", "bfloat16", "int8", "int4",
            "int4, 120 steps overlap", "440 numbers, 120 steps overlap")]),
    "links-bytes": _Block("links-10 links", {"megabits": "megabits a second"}, [
        (who, "sent", who) for who in ("plain", "bfloat16", "int8", "int4")]),
    "keras": _keras("keras"),
    "keras-gpu": _keras("keras-gpu"),
    "keras-busy": _keras("keras-busy"),
    "embedding-uniform": _embedding("uniform"),
    "embedding-zipf": _embedding("zipf")}
