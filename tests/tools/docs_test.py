"""The examples in the guides and docstrings have the documented output."""

import doctest
import inspect
import itertools
import json
import multiprocessing
import os
import re
import runpy
import shlex
import sys

import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import wrapopt
import wrapopt.checkpoints
import wrapopt.keras
from wrapopt import __main__ as info
from wrapopt import _native
from wrapopt import _composition
from wrapopt.bench import __main__ as command
from wrapopt.bench import tables

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
GUIDES = ["README.md", *sorted(
    f"wrapopt/docs/{name}"
    for name in os.listdir(os.path.join(ROOT, "wrapopt", "docs"))
    if name.endswith(".md"))]


def read(guide):
  with open(os.path.join(ROOT, guide), encoding="utf-8") as f:
    return f.read()


# A block of Python and, if it prints something, the block of text after it, in
# which `...` stands for anything.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?",
                   re.M | re.S)
BLOCKS = {f"{guide}-{i}": match.groups("")
          for guide in GUIDES
          for i, match in enumerate(BLOCK.finditer(read(guide)))}


# The examples take minutes to hours: see examples_test.
COMMANDS = [line.replace("\\\n", "") for guide in GUIDES for line in re.findall(
    r"^ {4}python -m (wrapopt(?!\.examples)(?:.*\\\n)*.*)", read(guide), re.M)]


def run_main(run, program, argv, out, err, folder):
  """Runs a program, with its output and its errors in files."""
  os.chdir(folder)
  for path, number in (out, 1), (err, 2):
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
  sys.argv = [str(program), *argv]
  run(str(program), run_name="__main__")


@pytest.fixture(scope="module")
def server():
  """Forks processes that have imported what takes long, and run none of it."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(
      ["keras", "tensorflow", "wrapopt", "wrapopt.keras"])
  return context


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name, server, tmp_path):
  code, expected = BLOCKS[name]
  if "optimizers.ScheduleFreeAdamW(" in code and (
      not hasattr(keras.optimizers, "ScheduleFreeAdamW")):
    pytest.skip("Keras lacks it.")
  program, out, err = (tmp_path / name for name in ("block.py", "out", "err"))
  program.write_text(code, encoding="utf-8")
  folder = tmp_path / "folder"
  folder.mkdir()
  process = server.Process(target=run_main, args=(
      runpy.run_path, program, [], out, err, folder))
  process.start()
  process.join(300)
  assert process.exitcode == 0, err.read_text(encoding="utf-8")
  pattern = ".*?".join(map(re.escape, expected.split("...")))
  printed = out.read_text(encoding="utf-8")
  assert re.fullmatch(pattern, printed, re.S), printed
  if "saver.save(session, \"averaged/model\")" in code:
    names = [name for name, _ in tf.train.list_variables(
        str(folder / "averaged" / "model"))]
    assert {"w", "w/ExponentialMovingAverage", "w/Adam"} <= set(names)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A folder with what the commands read: checkpoints of a run."""
  folder = tmp_path_factory.mktemp("commands")
  x = np.ones((1000, 1))
  model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
  model.compile(wrapopt.keras.MovingAverage(
      "sgd", [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)]), "mse",
                steps_per_execution=250)
  manager = tf.train.CheckpointManager(
      tf.train.Checkpoint(model=model), folder / "run", max_to_keep=5)
  for name in "abcde":
    model.fit(x, 3 * x, batch_size=2, verbose=0, callbacks=[
        wrapopt.keras.Snapshots(folder / "run" / "snapshots", 250)])
    model.save(folder / f"{name}.keras")
    manager.save(int(model.optimizer.iterations))
  for step in 800, 900:
    (folder / "run" / f"checkpoint-{step}").mkdir()
    safetensors.numpy.save_file(
        {"w": np.float32([step])},
        folder / "run" / f"checkpoint-{step}" / "model.safetensors")
  return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, server, run, tmp_path):
  module, *argv = shlex.split(command)
  out, err = tmp_path / "out", tmp_path / "err"
  process = server.Process(target=run_main, args=(
      runpy.run_module, module, argv, out, err, run))
  process.start()
  process.join(300)
  assert process.exitcode == 0, err.read_text(encoding="utf-8")
  if "--output" in argv and "--dry-run" not in argv:
    output = run / argv[argv.index("--output") + 1]
    assert list(output.parent.glob(output.name + "*"))
  else:
    assert out.read_text(encoding="utf-8")


def test_there_are_blocks():
  assert len(COMMANDS) >= 6
  assert len([name for name in BLOCKS if name.startswith("README")]) == 2
  assert len([name for name in BLOCKS if "migration" in name]) >= 8


def test_the_first_example_is_short():
  assert len(BLOCKS["README.md-0"][0].splitlines()) <= 12


def test_what_may_wrap_what():
  """The guide's table, whose columns omit `Optimizer`."""
  section = read("wrapopt/docs/choosing.md").partition(
      "## What may wrap what\n")[2].partition("\n## ")[0]
  header, _, *rows = [re.findall(r"[\w-]+", line)
                      for line in section.splitlines() if line[:1] == "|"]
  columns = [f"{name}Optimizer" for name in header]
  assert sorted(columns) == sorted(_composition.NAMES)
  assert {(outer, inner): word == "yes" for outer, *words in rows
          for inner, word in zip(columns, words, strict=True)} == {
              pair: pair not in _composition.REFUSED
              for pair in itertools.product(columns, repeat=2)}


def _rows(text, header):
  """The cells of the rows of a table that begins with a header: lists."""
  lines = text[text.index(f"| {header} |"):].partition("\n\n")[0].splitlines()
  return [[cell.strip() for cell in line.strip("|").split(" | ")]
          for line in lines[2:]]


def test_all_ops_are_listed():
  """The first table of ops.md, with the devices that have kernels."""
  listed = {}
  for names, _, _, kernels in _rows(read("wrapopt/docs/ops.md"), "op"):
    for name in re.findall("`(.*?)`", names):
      for ref in ["", "Ref"] if "[Ref]" in name else [""]:
        op = name.replace("[Ref]", ref)
        assert op not in listed
        # XLA knows no ref variables.
        listed[op] = set(kernels.split(", ")) - ({"XLA"} if ref else set())
  assert listed == {
      op: {"XLA" if device.startswith("XLA") else device for device in devices}
      for op, devices in info.devices_of_kernels().items()}


def test_which_ops_run_on_the_host_only():
  """The docstring of wrapopt.ops names them; no other one denies a kernel."""
  assert {op for op, devices in info.devices_of_kernels().items()
          if devices == ["CPU"]} == {
              op for op in info.devices_of_kernels() if re.match(
                  "Wrapopt>(Averaging(?!Assign)|Staleness|BeginUpdate|"
                  "(Unl|L)ockSteps)", op)}
  for name in wrapopt.ops.__all__:
    assert "no kernel" not in " ".join(
        inspect.getdoc(getattr(wrapopt.ops, name)).split())


def test_all_rules_are_listed():
  """In ops.md: the rules, their states and scalars, and the other rules."""
  text = read("wrapopt/docs/ops.md")
  listed = {}
  names = lambda cell: re.findall("`(.*?)`", cell)
  for rule, _, states, scalars, moved in _rows(
      text, "rule of `wrapopt.ops.apply`"):
    [name] = names(rule)
    listed[name] = (names(states), names(scalars), moved)
  # The gradient is read; each state and average is read and written.
  updates = {name: (rule.states, [s.strip("?") for s in rule.scalars],
                    f"{4 * (1 + 2 * len(rule.states))}, 8")
             for name, rule in _native.rules().items() if rule.is_update}
  assert listed == updates
  for i, head in enumerate(("state", "scalar")):
    assert ({name for first, _ in _rows(text, head) for name in names(first)} ==
            {name for of_rule in updates.values() for name in of_rule[i]})
  others = re.search(r"More rules are (.*?)\.\s", text, re.S)[1]
  assert ([name for name in _native.rules() if name not in listed] ==
          [name for name in re.findall("`(.*?)`", others)
           if name != "averaging_assign"])


@pytest.mark.parametrize("module", [
    wrapopt, wrapopt.checkpoints, wrapopt.keras, wrapopt.ops,
    wrapopt.sysconfig], ids=lambda module: module.__name__)
def test_the_changelog_names_all_that_is_public(module):
  named = set(re.findall(r"[\w.]+", " ".join(
      re.findall("`(.*?)`", read("CHANGELOG.md"), re.S))))
  named |= {part for name in named for part in name.split(".")}
  assert set(module.__all__) <= named


def test_figures():
  """All of them are in the results that the repository has."""
  assert not tables.differing(ROOT)


FIGURES = ["README.md", "wrapopt/bench/README.md"]


def test_all_figures_are_made():
  used = []
  for document in FIGURES:
    used += re.findall("<!-- figures: (.*) -->", read(document))
    # A time, a share or a ratio.
    by_hand = re.search(r"\d (ms|us|s|seconds|milliseconds|microseconds|%|"
                        r"GB/s|times)(?!\w)|\dx ", re.sub(
        "<!-- figures.*?<!-- end of figures -->", "", read(document),
        flags=re.S))
    assert not by_hand, by_hand
  assert sorted(used) == sorted(tables.BLOCKS)


@pytest.fixture
def copy(tmp_path):
  """A copy of the documents with figures, and of the results."""
  folder = "wrapopt/bench/results"
  for name in [*FIGURES, *(f"{folder}/{name}" for name in os.listdir(
      os.path.join(ROOT, folder)))]:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(read(name), encoding="utf-8")
  return tmp_path


@pytest.mark.parametrize("document, figure, other", [
    ("README.md", "| 1.24 |", "| 0.91 |"),
    ("wrapopt/bench/README.md", "Machine: quiet", "Machine: busy")])
def test_a_changed_document_is_written_again(copy, monkeypatch, document,
                                             figure, other, capsys):
  monkeypatch.setattr(tables, "_ROOT", str(copy))
  command.main(["tables", "--check"])
  path = copy / document
  text = path.read_text(encoding="utf-8")
  assert figure in text
  path.write_text(text.replace(figure, other, 1), encoding="utf-8")
  with pytest.raises(SystemExit, match="Run python -m wrapopt.bench tables."):
    command.main(["tables", "--check"])
  assert capsys.readouterr().out == f"{document} differs from the results\n"
  command.main(["tables"])
  assert path.read_text(encoding="utf-8") == text


def test_tables_need_the_sources(tmp_path, monkeypatch):
  monkeypatch.setattr(tables, "_ROOT", str(tmp_path))
  with pytest.raises(SystemExit, match="must hold the sources of wrapopt, got"):
    command.main(["tables"])


def test_a_changed_result_changes_all_documents(copy):
  path = copy / "wrapopt/bench/results/step.json"
  of_run = json.loads(path.read_text(encoding="utf-8"))
  result, = [r for r in of_run["results"]
             if (r["set"], r["optimizer"], r["mode"], r["contender"]) == (
                 "resnet50", "Momentum", "v1 session", "wrapopt K=1")]
  result["x_stock"] = 987654321.0  # No other figure.
  path.write_text(json.dumps(of_run), encoding="utf-8")
  differing = tables.differing(str(copy))
  assert list(differing) == FIGURES
  for text in differing.values():
    assert text.count("987,654,321") == 1


def test_table_of_figures():
  """A column without a figure is left out."""
  of_run = {
      "command": "python -m wrapopt.bench gate", "date": "2030-01-02",
      "machine": "quiet", "environment": {"processor": "P", "threads": 8},
      "results": [
          {"set": "400x256", "contender": "ungated, stock", "rounds": 15,
           "milliseconds": 0.12345},
          {"set": "400x256", "contender": "gated, admitted", "x_stock": 0.5},
          {"set": "resnet50", "contender": "ungated, stock",
           "milliseconds": 12345.6}]}
  assert tables.block("gate", {"gate": of_run}.get) == """\
<!-- figures: gate -->
| variables | stock, ungated, ms | admitted, x stock |
|---|---|---|
| 400 x 256 | 0.123 | 0.50 |
| ResNet-50 (161) | 12,346 | |

`python -m wrapopt.bench gate`, 2030-01-02, P, 8 threads, 15 rounds. Machine:
quiet.
<!-- end of figures -->"""
  with pytest.raises(SystemExit, match="The figures must be of costs, .*, got"):
    tables.block("gates", {}.get)


def test_runs_of_one_machine_are_described_together():
  def run_of(name, machine):
    return {"command": f"bench {name}", "date": "2030-01-02",
            "machine": machine, "results": [{"rounds": 15}],
            "environment": {"processor": "P", "threads": 8}}

  facts = "2030-01-02, P, 8 threads, 15 rounds. Machine:"
  assert tables._origin([run_of("a", "quiet"), run_of("b", "quiet")]) == (
      f"`bench a`, `bench b`, {facts} quiet.")
  assert tables._origin([run_of("a", "quiet"), run_of("b", "busy")]) == (
      f"`bench a`, {facts} quiet. `bench b`, {facts} busy.")
  with pytest.raises(ValueError, match="must be of quiet, .*, got idle"):
    tables._origin([run_of("a", "idle")])


def test_the_readme_is_short():
  assert len(read("README.md").splitlines()) <= 200


@pytest.mark.parametrize("guide", [
    *GUIDES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "cc/README.md",
    "tests/README.md", "wrapopt/bench/README.md", "wrapopt/examples/README.md"])
def test_links(guide):
  for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(guide)):
    path = os.path.normpath(os.path.join(ROOT, os.path.dirname(guide), target))
    assert os.path.exists(path), f"{guide} names {target}"


def documented():
  """Public functions and classes, with their methods: {name: object}."""
  found = {}
  for module in (wrapopt, wrapopt.checkpoints, wrapopt.keras, wrapopt.ops,
                 wrapopt.sysconfig):
    for name in module.__all__:
      thing = getattr(module, name)
      if callable(thing):
        found[f"{module.__name__}.{name}"] = thing
      if inspect.isclass(thing):
        found.update({
            f"{module.__name__}.{name}.{method}": function
            for base in thing.__mro__
            if base is thing or base.__name__.endswith("Methods")
            for method, function in vars(base).items()
            if not method.startswith("_") and callable(function)
            # A method of a class of TensorFlow or Keras is described there.
            and not any(method in vars(base) for base in thing.__mro__
                        if not base.__module__.startswith("wrapopt"))})
  return found


@pytest.mark.parametrize("name", documented())
def test_docstring(name):
  thing = documented()[name]
  assert inspect.getdoc(thing), f"{name} has no docstring"
  tests = doctest.DocTestFinder(recurse=False).find(
      thing, name, globs={"keras": keras, "tf": tf, "wrapopt": wrapopt})
  runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
  for test in tests:
    runner.run(test)
  assert runner.failures == 0


@pytest.mark.parametrize("name", [
    name for name, thing in documented().items()
    if name.startswith("wrapopt.ops.") and inspect.isfunction(thing)])
def test_what_autograph_leaves_alone(name):
  assert api.is_autograph_artifact(documented()[name])


@pytest.mark.parametrize("name", [
    "wrapopt.CrossShardOptimizer", "wrapopt.DropStaleGradientOptimizer",
    "wrapopt.ElasticAverageCustomGetter", "wrapopt.ElasticAverageOptimizer",
    "wrapopt.ModelAverageCustomGetter", "wrapopt.ModelAverageOptimizer",
    "wrapopt.MovingAverageOptimizer", "wrapopt.ops.averaging_assign",
    "wrapopt.ops.ema_update", "wrapopt.ops.exchange",
    "wrapopt.ops.staleness_gate"])
def test_what_has_an_example(name):
  assert ">>> " in inspect.getdoc(documented()[name])
