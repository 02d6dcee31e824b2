"""The examples in the guides and docstrings have the documented output."""

import doctest
import inspect
import itertools
import multiprocessing
import os
import re
import runpy

import keras
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import wrapopt
import wrapopt.checkpoints
import wrapopt.keras
from wrapopt import __main__ as info
from wrapopt import _composition
from wrapopt import _native

ROOT = os.path.dirname(os.path.dirname(__file__))
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


def run_block(program, out, err, folder):
  """Runs a program, with its output and its errors in files."""
  os.chdir(folder)
  for path, number in (out, 1), (err, 2):
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
  runpy.run_path(str(program), run_name="__main__")


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
  program, out, err = (tmp_path / name for name in ("block.py", "out", "err"))
  program.write_text(code, encoding="utf-8")
  folder = tmp_path / "folder"
  folder.mkdir()
  process = server.Process(target=run_block, args=(program, out, err, folder))
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


def test_there_are_blocks():
  assert len([name for name in BLOCKS if name.startswith("README")]) == 3
  assert len([name for name in BLOCKS if "migration" in name]) >= 8


def test_the_first_example_is_short():
  assert len(BLOCKS["README.md-0"][0].splitlines()) <= 12


def test_what_may_wrap_what():
  """The README's table, whose columns omit `Optimizer`."""
  header, _, *rows = [
      re.findall(r"[\w-]+", line) for line in read("README.md").partition(
          "## What may wrap what\n")[2].partition("\n## ")[0].splitlines()
      if line.startswith("|")]
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
  rules = [name for name, rule in _native.rules().items() if rule.is_update]
  listed = {}
  for names, _, _, kernels in _rows(read("wrapopt/docs/ops.md"), "op"):
    for name in re.findall("`(.*?)`", names):
      for rule in rules if "<Rule>" in name else [""]:
        for ref in ["", "Ref"] if "[Ref]" in name else [""]:
          op = name.replace("<Rule>", rule).replace("[Ref]", ref)
          assert op not in listed
          # XLA knows no ref variables.
          listed[op] = set(kernels.split(", ")) - ({"XLA"} if ref else set())
  assert listed == {
      op: {"XLA" if device.startswith("XLA") else device for device in devices}
      for op, devices in info.devices_of_kernels().items()}


def test_all_rules_are_listed():
  """The second table of ops.md, and the sentence after it."""
  text = read("wrapopt/docs/ops.md")
  listed = {}
  for rule, _, states, moved in _rows(text, "rule of `wrapopt.ops.apply`"):
    name, *attributes = re.findall("`(.*?)`", rule)
    listed[name] = (re.findall("`(.*?)`", states), moved)
    scalars = [s.strip("?") for s in _native.rules()[name].scalars]
    assert set(attributes) <= set(scalars)
    assert ("weight_decay" in scalars) == ("weight_decay" in attributes)
  # The gradient is read; each state and average is read and written.
  assert listed == {
      name: (rule.states, f"{4 * (1 + 2 * len(rule.states))}, 8")
      for name, rule in _native.rules().items() if rule.is_update}
  others = re.search(r"Two more rules are (.*?)\.\s", text, re.S)[1]
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


def test_the_readme_is_short():
  assert len(read("README.md").splitlines()) <= 200


@pytest.mark.parametrize("guide", [
    *GUIDES, "CHANGELOG.md", "CONTRIBUTING.md", "cc/README.md",
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
            for method, function in vars(thing).items()
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
