"""tools/mutants --bulk: its mutants, and which tests it runs for them."""

import pathlib
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Made by tools/types and tools/mutants.
TOOLS = pathlib.Path(sys.prefix).parent / ".venv-tools"
sys.path.append(str(TOOLS / "lib" / "python{}.{}".format(*sys.version_info) /
                    "site-packages"))
sys.path.append(str(ROOT / "tools" / "bulk_mutants"))

import python_runs  # pylint: disable=wrong-import-position

CC = """#include "a < b"
// a < b
bool F(int a, int b) {
  if (a < b) return G(a);
  b = a;
  return true;
}
"""
PYTHON = """def f(x, *, y):
  \"\"\"D.\"\"\"
  if x > 1:
    g(x)
  return x
"""
SOURCE = """import functools

def f(x):
  if x:
    return g(x, 1,
             y=2)
  return 0

def g(x, z, y=2):
  return x + y + z
"""
TESTS = """import os, subprocess, sys, time
import pytest
from wrapopt import a

def test_f():
  assert a.f(1) == 4
@pytest.mark.parametrize("x", [1, 2])
def test_g(x):
  assert a.g(x, 1) > x
def test_in_a_process():
  subprocess.run([sys.executable, "-c", "from wrapopt import a; a.f(0)"],
                 check=True)
"""


def found(file, source):
  sites = pytest.importorskip("sites", reason="needs .venv-tools")
  made = [site() for site in sites.sites(file, source)]
  return {(x.line, x.before, x.after) for x in made if x}


def test_mutants_of_cc():
  assert found("a.h", CC) == {
      (4, "if (a < b) return G(a);", after) for after in (
          "if (a <= b) return G(a);", "if (!(a < b)) return G(a);",
          "if (a < b) return {};")} | {
              (5, "b = a;", ";"), (6, "return true;", "return false;"),
              (6, "return true;", "return {};")}


def test_mutants_of_python():
  assert found("a.py", PYTHON) == {
      (3, "if x > 1:", after) for after in (
          "if x >= 1:", "if not x > 1:", "if x > 2:", "if x > 0:")} | {
              (4, "g(x)", "pass"),
              (3, "if x > 1: g(x)", "return None")}


def test_names_of_exceptions_with_dots_are_passed_over():
  assert found("a.py", "try:\n  x\nexcept (a.B, C):\n  pass\n") == {
      (3, "except (a.B, C):", "except (a.B, CosmicRayTestingException):")}


def test_mutants_that_change_nothing():
  """Each has its source, its line, what the line becomes, and why."""
  text = (ROOT / "tools/bulk_mutants/equal.txt").read_text(encoding="utf-8")
  for block in text.strip().split("\n\n"):
    file, before, after, *why = block.split("\n")
    assert before != after and why, block
    source = (ROOT / file).read_text(encoding="utf-8")
    # Else it would excuse the mutants of other lines.
    assert " ".join(source.split()).count(before) == 1, block


@pytest.fixture
def copy(tmp_path, monkeypatch):
  # tools/pytest_main.py has imported the real package.
  for name in [x for x in sys.modules if x.split(".")[0] == "wrapopt"]:
    monkeypatch.delitem(sys.modules, name)
  for name, text in {"wrapopt/__init__.py": "", "wrapopt/a.py": SOURCE,
                     "tests/ops/BUILD": "", "tests/ops/a_test.py": TESTS
                     }.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  return tmp_path


@pytest.mark.parametrize("line, texts", [
    (1, set()), (3, {"if x:", "return g(x, 1,", "y=2)", "return 0"}),
    (4, {"if x:"}), (6, {"return g(x, 1,", "y=2)"}), (7, {"return 0"})])
def test_the_lines_that_reach_a_line(line, texts):
  assert python_runs._reaching(SOURCE, line) == texts


def test_one_case_of_each_function_comes_first():
  tests = {"a": {"a::f[1]": 1, "a::f[2]": 2, "a::g": 4}, "b": {"b::h": 3}}
  assert python_runs.in_order(tests, 9) == {
      "b": {"b::h": 3}, "a": {"a::f[1]": 1, "a::g": 4}}


def test_a_mutant_is_run_with_the_tests_that_reach_it(copy):
  pytest.importorskip("coverage", reason="needs .venv-tools")
  reached = python_runs.Reached(copy, copy / "reached")
  reached.measure(["tests/ops/a_test.py"], time.monotonic() + 100)
  sites = pytest.importorskip("sites")
  names = lambda line: {test.partition("::")[2] for test in reached.by(
      sites.Mutant("wrapopt/a.py", line, "", "", "", ""), SOURCE).get(
          "tests/ops/a_test.py", ())}
  assert names(5) == {"test_f"}
  assert names(7) == {"test_in_a_process"}
  assert names(10) == {"test_f", "test_g[1]", "test_g[2]"}
  assert names(1) == names(10) | names(7)
  [of_file] = reached.files.values()
  del of_file["reached"]["wrapopt/a.py"]["return 0"]
  assert names(7) == names(1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("before, after, red", [
    ("", "", ""),
    ("x + y", "x - y", "tests/ops/a_test.py::test_f"),
    ("return x", "__import__('os')._exit(0)", "tests/ops/a_test.py::test_f"),
    ("return x", "while x: y", "tests/ops/a_test.py::test_f"),
    ("def g", "def h", "tests/ops/a_test.py::test_f"),
    ("import functools", "a?", "tests/ops/a_test.py::test_f is no more")])
def test_the_first_red_test(copy, before, after, red, monkeypatch):
  monkeypatch.setattr(python_runs, "_LEAST", 6)
  (copy / "wrapopt/a.py").write_text(SOURCE.replace(before, after, 1))
  tests = {"tests/ops/a_test.py": {
      f"tests/ops/a_test.py::{name}": 0.1
      for name in ("test_f", "test_g[1]", "test_g[2]")}}
  log = copy / "log"
  assert python_runs.first_red(copy, tests, log) == red, log.read_text()
