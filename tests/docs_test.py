"""The examples of the README and of the docstrings do what they say."""

import doctest
import inspect
import os
import re

import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import wrapopt
from processes import run_python

README = os.path.join(os.path.dirname(os.path.dirname(__file__)), "README.md")

# What a block of the README prints, in their order.
PRINTS = (
    r"averaged weights: \[[^]]+\]\n",
    r"averaged: \[[^]]+\]\nraw:      \[[^]]+\]\n",
    "",
    r"admitted, dropped: 100 0\n",
    r"rounds: 10\n",
    r"\[0\.5, 0\.5, 2\.5, 2\.5\]\n",
    r"True False\n",
    r"\[0\.25 0\.5 \]\n",
)
# The one that saves a model.
SAVES = 2


def blocks():
  with open(README, encoding="utf-8") as f:
    return re.findall(r"^```python\n(.*?)^```$", f.read(), re.M | re.S)


def test_every_block_of_the_readme_has_a_test():
  assert len(blocks()) == len(PRINTS)


@pytest.mark.parametrize("index", range(len(PRINTS)))
def test_readme(index, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  process = run_python("-c", blocks()[index])
  assert process.returncode == 0, process.stderr
  assert re.fullmatch(PRINTS[index], process.stdout), process.stdout
  assert os.listdir(tmp_path) == (["averaged"] if index == SAVES else [])
  if index == SAVES:
    names = [name for name, _ in tf.train.list_variables("averaged/model")]
    assert {"w", "w/ExponentialMovingAverage", "w/Adam"} <= set(names)


def test_the_first_example_is_short():
  assert len(blocks()[0].splitlines()) <= 12


def documented():
  """Public functions and classes, with their methods: {name: object}."""
  found = {}
  for module in (wrapopt, wrapopt.ops, wrapopt.sysconfig):
    for name in getattr(module, "__all__", ()):
      thing = getattr(module, name)
      if callable(thing):
        found[f"{module.__name__}.{name}"] = thing
      if inspect.isclass(thing):
        found.update({
            f"{module.__name__}.{name}.{method}": function
            for method, function in vars(thing).items()
            if not method.startswith("_") and callable(function)})
  return found


@pytest.mark.parametrize("name", documented())
def test_docstring(name):
  thing = documented()[name]
  assert inspect.getdoc(thing), f"{name} has no docstring"
  tests = doctest.DocTestFinder(recurse=False).find(
      thing, name, globs={"tf": tf, "wrapopt": wrapopt})
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
