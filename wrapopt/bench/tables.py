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

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
_RESULTS = os.path.join("wrapopt", "bench", "results")
_DOCUMENTS = ("README.md", os.path.join("wrapopt", "bench", "README.md"))
_BLOCK = re.compile(
    r"^<!-- figures: (.*) -->\n(?:.*\n)*?<!-- end of figures -->$", re.M)

_SETS = {"2x4096x4096": "2 x 4096 x 4096", "resnet50": "ResNet-50 (161)",
         "400x256": "400 x 256", "bert-base": "BERT-base (199)"}
_IN_CACHES = ("400x256",)  # Whose streaming limit is not that of the memory.
_MODES = {"session": "session", "function": "`tf.function`", "keras": "Keras",
          "keras-jit": "Keras, jit"}
_MACHINES = ("quiet", "busy", "unknown")  # Older runs have not recorded it.
# The steps in the README.
_CHOSEN = (("2x4096x4096", "SGD"), ("resnet50", "Momentum"),
           ("bert-base", "Adam"))
_CHOSEN_IN_KERAS = (("100 layers of 32", "Adam"), ("8 layers of 1024", "SGD"),
                    ("transformer, 6 blocks of 256", "AdamW"))


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
  runs = _Runs(os.path.join(root, _RESULTS))
  differ = {}
  for path in _DOCUMENTS:
    with open(os.path.join(root, path), encoding="utf-8") as file:
      before = file.read()
    after = _BLOCK.sub(lambda match: block(match[1], runs), before)
    if after != before:
      differ[path] = after
  return differ


class _Runs:
  """The runs in a folder, by the names of their files."""

  def __init__(self, folder):
    self._folder = folder

  def __getitem__(self, name):
    with open(os.path.join(self._folder, f"{name}.json"),
              encoding="utf-8") as file:
      return json.load(file)


def block(name, runs):
  """The text of a block, with its markers.

  Args:
    name: Its name.
    runs: {name: what --json writes}.
  """
  if name not in BLOCKS:
    raise SystemExit(f"The figures must be of {', '.join(BLOCKS)}, got {name}.")
  *names, make = BLOCKS[name]
  of_runs = [runs[run_name] for run_name in names]
  return "\n".join([
      f"<!-- figures: {name} -->",
      make(*(of_run["results"] for of_run in of_runs)), "",
      textwrap.fill(_origin(of_runs), 80, break_on_hyphens=False),
      "<!-- end of figures -->"])


def _origin(of_runs):
  """A text about runs: how, when and where they were."""
  commands = {}  # By what is said of them.
  for of_run in of_runs:
    facts, machine = of_run["environment"], of_run["machine"]
    if machine not in _MACHINES:
      raise ValueError(f"`machine` must be of {', '.join(_MACHINES)}, got "
                       f"{machine}.")
    commands.setdefault(
        f"{of_run['date']}, {facts['processor']}, {facts['threads']} threads, "
        f"{of_run['results'][0]['rounds']} rounds. Machine: {machine}.",
        []).append(f"`{of_run['command']}`")
  return " ".join(f"{', '.join(of_facts)}, {facts}"
                  for facts, of_facts in commands.items())


def _table(header, rows):
  """A table in Markdown, without columns that have no figure."""
  columns = [column for column in zip(header, *rows) if any(column[1:])]
  header, *rows = zip(*columns)
  lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
  lines.insert(1, "|" + "---|" * len(header))
  return "\n".join(lines).replace("  |", " |")


def _by(results, *keys):
  """{values of the keys, a tuple: result}."""
  return {tuple(r.get(key) for key in keys): r for r in results}


def _firsts(results, *keys):
  """The different values of keys, tuples in the order of the results."""
  return list(dict.fromkeys(
      tuple(r.get(key) for key in keys) for r in results))


def _cell(result, key, form):
  """A figure of a result as text; none if the run lacks it."""
  value = (result or {}).get(key)
  return "" if value is None else form(value)


def _time(x):
  return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


def _ratio(x):
  return f"{x:.2f}" if x < 10 else f"{x:,.0f}"


def _percent(x):
  return f"{100 * x:.0f} %"


_count = "{:,.0f}".format


# Each makes the table of a block from the results of a run.


def _step_session(*runs):
  results = sum(runs, [])
  found = _by(results, "mode", "set", "optimizer", "contender")
  rows = []
  for name, optimizer in _firsts(results, "set", "optimizer"):
    of = lambda contender, key, form: _cell(
        found.get(("v1 session", name, optimizer, contender)), key, form)
    limits = [of(f"wrapopt K={k}", "of_limit", _percent) for k in (1, 3)]
    rows.append([
        _SETS[name], optimizer, of("stock", "milliseconds", _time),
        of("stock + EMA", "x_stock", _ratio),
        of("wrapopt K=0", "x_stock", _ratio),
        of("wrapopt K=1", "x_stock", _ratio),
        of("wrapopt K=3", "x_stock", _ratio),
        "" if name in _IN_CACHES else ", ".join(filter(None, limits))])
  return _table(
      ["variables", "optimizer", "stock, ms", "stock + EMA, x stock",
       "wrapopt, no average, x stock", "1 average, x stock",
       "3 averages, x stock", "of the streaming limit, 1 and 3 averages"],
      rows)


def _step_modes(results):
  found = _by(results, "mode", "set", "optimizer", "contender")
  rows = []
  for name, optimizer in _firsts(results, "set", "optimizer"):
    row = [_SETS[name], optimizer]
    for mode in ("tf.function", "eager"):
      for contender, key, form in (
          ("stock", "milliseconds", _time), ("wrapopt K=0", "x_stock", _ratio),
          ("wrapopt K=1", "x_stock", _ratio)):
        row.append(_cell(found.get((mode, name, optimizer, contender)), key,
                         form))
    row.append(_cell(found.get(("eager", name, optimizer, "wrapopt K=1")),
                     "x_torch", _ratio))
    if any(row[2:]):
      rows.append(row)
  return _table(
      ["variables", "optimizer", "`tf.function`: stock, ms",
       "no average, x stock", "1 average, x stock", "eager: stock, ms",
       "no average, x stock", "1 average, x stock", "1 average, x PyTorch"],
      rows)


def _step_train(results):
  found = _by(results, "mode", "set", "optimizer", "contender")
  rows = []
  for name, optimizer in _firsts(results, "set", "optimizer"):
    figures = [
        _cell(found.get(("train function", name, optimizer, contender)),
              "adds_milliseconds", "{:.2f}".format)
        for contender in ("stock", "stock + EMA", "wrapopt K=0", "wrapopt K=1")]
    if any(figures):
      rows.append([_SETS[name], optimizer, *figures])
  return _table(["variables", "optimizer", "stock, ms", "stock + EMA, ms",
                 "wrapopt, no average, ms", "1 average, ms"], rows)


def _costs(steps, of_bert, in_keras):
  found = _by(steps + of_bert, "mode", "set", "optimizer", "contender")
  rows = [
      [f"session: {_SETS[name]}", optimizer, *(
          _cell(found.get(("v1 session", name, optimizer, contender)),
                "x_stock", _ratio)
          for contender in ("wrapopt K=1", "stock + EMA")), "", "", "", ""]
      for name, optimizer in _CHOSEN]
  found = _by(in_keras, "model", "mode", "contender")
  rows += [
      [f"`fit`: {model}", optimizer, *(
          _cell(found.get((f"{model}, {optimizer}", mode, contender)),
                "x_plain", _ratio) for mode in ("cpu", "mirrored", "hlo")
          for contender in ("wrapopt, K = 1", "use_ema"))]
      for model, optimizer in _CHOSEN_IN_KERAS]
  return _table(["step", "optimizer", *(
      f"{machine}: {contender}"
      for machine in ("CPU", "strategy", "GPU program")
      for contender in ("wrapopt", "stock"))], rows)


def _of_sets(results, columns):
  """A table of a row for each set of variables.

  Args:
    results: Those of a benchmark.
    columns: A list of (title, contender, key of its result, form of a cell).
  """
  found = _by(results, "set", "contender")
  return _table(["variables", *(title for title, *_ in columns)], [
      [_SETS[name], *(_cell(found.get((name, contender)), key, form)
                      for _, contender, key, form in columns)]
      for (name,) in _firsts(results, "set")])


def _gate(results):
  return _of_sets(results, [
      ("stock, ungated, ms", "ungated, stock", "milliseconds", _time),
      ("wrapopt, ungated, x stock", "ungated, one op", "of_stock", _ratio),
      ("admitted, x stock", "gated, admitted", "of_stock", _ratio),
      ("admitted, x wrapopt ungated", "gated, admitted", "of_ungated", _ratio),
      ("admitted, x `tf.cond`", "gated, admitted", "of_cond", _ratio),
      ("dropped, ms", "gated, dropped", "milliseconds", _time)])


def _gate_cluster(results):
  return _of_sets(results, [
      ("Keras, ms", "Keras", "milliseconds", _time),
      ("wrapopt, ungated, x Keras", "ungated", "of_keras", _ratio),
      ("admitted, x Keras", "gated, admitted", "of_keras", _ratio),
      ("dropped, x Keras", "gated, dropped", "of_keras", _ratio)])


def _gate_workers(results):
  found = _by(results, "kind", "workers", "contender")
  rows = []
  for kind, workers in _firsts(results, "kind", "workers"):
    of = lambda contender, key, form: _cell(
        found.get((kind, workers, contender)), key, form)
    rows.append([
        kind, str(workers), of("Keras's Adam", "steps_per_second", _time),
        of("MovingAverage", "of_keras", _ratio),
        of("DropStaleGradient", "of_keras", _ratio)])
  return _table(
      ["step", "workers", "Keras's Adam, steps a second",
       "`MovingAverage`, x Keras", "`DropStaleGradient`, x Keras"], rows)


def _growth(results):
  what = {"gate": "workers that race for one gate",
          "rounds": "pushes of 1,000 numbers to one round",
          "variables": "variables of a step", "rows": "rows of a table"}
  return _table(
      ["what grows", "number", "microseconds", "of each", "bytes", "of each",
       "to build one, ms", "first step of one, ms"],
      [[f"{what[r['part']]}, {r['mode']}", _count(r["size"]),
        _time(r["microseconds"]), r["unit"], _count(r["bytes"]),
        {"gate": "update in flight", "rows": "row"}.get(r["part"], r["unit"]),
        _cell(r, "build_milliseconds", _time),
        _cell(r, "first_milliseconds", _time)]
       for r in results])


def _average(results):
  found = _by(results, "part", "set", "sources", "contender")
  rows = []
  for part, name, sources in _firsts(results, "part", "set", "sources"):
    if part == "op":
      wrapopt = found.get((part, name, sources, "wrapopt"))
      rows.append([
          _SETS[name], str(sources),
          _cell(found.get((part, name, sources, "tf.add_n, assign")),
                "milliseconds", _time),
          _cell(wrapopt, "of_add_n", _ratio),
          "" if name in _IN_CACHES else _cell(wrapopt, "of_limit", _percent)])
  return _table(
      ["variables", "S", "`tf.add_n`, `assign`, ms",
       "speed of wrapopt, x `tf.add_n`", "of the streaming limit"], rows)


def _average_rounds(results):
  found = _by(results, "part", "set", "contender")
  rows = []
  for part, name in _firsts(results, "part", "set"):
    if part == "round":
      ours, stock = (found[part, name, contender]
                     for contender in ("wrapopt", "accumulators"))
      rows.append([
          _SETS[name], _cell(stock, "milliseconds", _time),
          _cell(ours, "of_accumulators", _ratio),
          _cell(stock, "transfers", _count), _cell(ours, "transfers", _count),
          _cell(ours, "megabytes", _time)])
  return _table(
      ["a round of", "accumulators, ms", "speed of wrapopt, x accumulators",
       "transfers of accumulators", "of wrapopt", "megabytes of each"], rows)


def _average_steps(results):
  found = _by(results, "part", "set", "contender")
  rows = []
  for part, name in _firsts(results, "part", "set"):
    if part == "step":
      of = lambda contender, key, form: _cell(
          found.get((part, name, contender)), key, form)
      rows.append([
          _SETS[name], of("GradientDescent", "milliseconds", _time),
          *(of(contender, key, form)
            for contender in ("ModelAverage", "ElasticAverage")
            for key, form in (("milliseconds_more", "{:.1f}".format),
                              ("calls", _count)))])
  return _table(
      ["variables", "inner optimizer, ms", "`ModelAverage`, ms more", "calls",
       "`ElasticAverage`, ms more", "calls"], rows)


def keras_steps(results):
  """Of each mode, the time of plain Keras and the ratios of the others."""
  found = _by(results, "model", "mode", "contender")
  modes = {"cpu": "CPU", "mirrored": "`MirroredStrategy`",
           "jit": "`jit_compile`", "hlo": "plain HLO"}
  others = "use_ema", "wrapopt, K = 1", "wrapopt, K = 3"
  rows = []
  for (model,) in _firsts([r for r in results if "mode" in r], "model"):
    row = [model]
    for mode in modes:
      of = lambda contender, key, form: _cell(
          found.get((model, mode, contender)), key, form)
      row += [of("plain", "milliseconds", _time), ", ".join(filter(
          None, (of(contender, "x_plain", _ratio) for contender in others)))]
    rows.append(row)
  return _table(["model", *(f"{mode}: {figure}" for mode in modes.values()
                            for figure in ("plain, ms", "x plain"))], rows)


def _keras_swap(results):
  found = _by(results, "model", "contender")
  keras, ours = (found["swap", contender]
                 for contender in ("SwapEMAWeights", "averaged_weights"))
  return _table(
      ["megabytes of weights", "`SwapEMAWeights`, ms",
       "`averaged_weights`, x `SwapEMAWeights`"],
      [[_cell(ours, "megabytes", _count), _cell(keras, "milliseconds", _time),
        _cell(ours, "x_keras", "{:.3f}".format)]])


def _merge(results):
  formats = {"tensorflow": "TensorFlow", "h5": "HDF5"}
  return _table(
      ["format", "checkpoints", "MB of each", "loop, s", "speed of the merge",
       "memory, MB"],
      [[formats[r["format"]], _count(r["inputs"]),
        _count(r["bytes_in"] / r["inputs"] / 2**20), _time(r["plain"]),
        _percent(r["of_limit"]), _count(r["peak_bytes"] / 1e6)]
       for r in results])


def _xla(results):
  found = _by(results, "set", "optimizer", "contender")
  rows = []
  for name, optimizer in _firsts(results, "set", "optimizer"):
    of = lambda contender, key, form: _cell(
        found.get((name, optimizer, contender)), key, form)
    rows.append([
        _SETS[name], optimizer, of("stock + EMA", "milliseconds", _time),
        of("wrapopt K=1", "x_peer", _ratio),
        of("wrapopt K=0", "x_peer", _ratio),
        of("stock + EMA", "hlo", _count), of("wrapopt K=1", "hlo", _count),
        of("stock + EMA", "optimized_hlo", _count),
        of("wrapopt K=1", "optimized_hlo", _count)])
  return _table(
      ["variables", "optimizer", "stock + EMA, ms",
       "wrapopt, 1 average, x stock + EMA", "wrapopt, no average, x stock",
       "instructions, stock + EMA", "wrapopt", "optimized, stock + EMA",
       "wrapopt"], rows)


def _embedding(ids):
  def make(results):
    found = _by(results, "optimizer", "ids", "rows", "indices", "mode",
                "contender")
    rows = []
    for key in _firsts(results, "optimizer", "ids", "rows", "indices", "mode"):
      if key[1] == ids:
        of = lambda contender, figure, form: _cell(
            found.get((*key, contender)), figure, form)
        optimizer, _, count, indices, mode = key
        rows.append([
            optimizer, _count(count), _count(indices), _MODES[mode],
            of("plain", "milliseconds", _time),
            of("stock average", "x_plain", _ratio),
            of("wrapopt, K = 0", "x_plain", _ratio),
            of("wrapopt", "x_plain", _ratio),
            of("wrapopt", "x_without", _ratio)])
    return _table(
        ["optimizer", "rows", "indices", "mode", "plain, ms",
         "stock average, x plain", "wrapopt, no average, x plain",
         "wrapopt, x plain", "wrapopt, x op"], rows)
  return make


def _catch_up(results):
  return _table(
      ["rows", "catch-up, ms", "of the streaming limit"],
      [[_count(r["rows"]), _time(r["milliseconds"]), _percent(r["of_limit"])]
       for r in results if r["contender"] == "catch-up"])


# {name of a block: (names of runs, function of their results)}
def _keras_optimizers(results):
  found = _by(results, "set", "mode", "contender")
  rows = []
  for name, mode in _firsts(results, "set", "mode"):
    of = lambda contender, key, form: _cell(
        found.get((name, mode, contender)), key, form)
    if of("Adam", "milliseconds", _time):
      rows.append([
          _SETS[name], mode, of("Adam", "milliseconds", _time),
          of("ScheduleFree(Adam)", "x_adam", _ratio),
          of("ScheduleFreeAdamW", "x_adam", _ratio),
          "" if name in _IN_CACHES else of("ScheduleFree(Adam)", "of_limit",
                                           _percent),
          of("SGD, momentum", "milliseconds", _time),
          of("ScheduleFree(SGD)", "milliseconds", _time)])
    else:
      rows.append([_SETS[name], mode, "", "", "", "", "", "", of(
          "AdamWScheduleFree", "milliseconds", _time)])
  rows = [row + [""] * (9 - len(row)) for row in rows]
  return _table(
      ["variables", "mode", "Adam, ms", "`ScheduleFree(Adam)`, x Adam",
       "Keras's `ScheduleFreeAdamW`, x Adam",
       "`ScheduleFree(Adam)`, of the streaming limit",
       "SGD with momentum, ms", "`ScheduleFree(SGD)`, ms",
       "AdamWScheduleFree, ms"], rows)


BLOCKS = {
    "costs": ("step", "step-bert", "keras", _costs),
    "step-session": ("step", "step-bert", _step_session),
    "step-modes": ("step", _step_modes),
    "step-train": ("step", _step_train),
    "gate": ("gate", _gate),
    "gate-cluster": ("gate-cluster", _gate_cluster),
    "gate-workers": ("gate-workers", _gate_workers),
    "growth": ("growth", _growth),
    "average": ("average", _average),
    "average-rounds": ("average", _average_rounds),
    "average-steps": ("average", _average_steps),
    "keras": ("keras", keras_steps),
    "keras-optimizers": ("keras-optimizers", _keras_optimizers),
    "keras-swap": ("keras", _keras_swap),
    "merge": ("merge", _merge),
    "xla": ("xla", _xla),
    "embedding-uniform": ("embedding", _embedding("uniform")),
    "embedding-zipf": ("embedding", _embedding("zipf")),
    "catch-up": ("embedding", _catch_up),
}
