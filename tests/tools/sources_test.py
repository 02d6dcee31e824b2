"""What holds for all sources: short lines, layers, known mutants, papers."""

import ast
import glob
import graphlib
import os
import re
import subprocess

import pytest

import mutants

# The folder of the sources, also in Bazel, whose tests get links to them.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.realpath(__file__))))
LONGEST = 80

# {why a line may be longer: (pattern of the file, pattern of the line)}
EXCEPTIONS = {
    "a row of a table is one line": (r"\.md$", r"\|"),
    "pylint reads its comment in the line that it is about": (
        r"\.py$", r".{0,80}  # pylint: disable=\S+$"),
    "Bazel's formatter keeps a load in one line": (r"(^|/)BUILD$", r"load\("),
    "a program writes it": (
        r"^(wrapopt/bench/results|tests/files/\d.*)/|/equal\.txt$", ""),
    "a word is not broken": ("", r".*\S{60}"),
}


def is_allowed(file, line):
  return any(re.search(of_file, file) and re.match(of_line, line)
             for of_file, of_line in EXCEPTIONS.values())


def long_lines():
  """[(file, number of the line, line)] of all files that git knows."""
  if not os.path.exists(os.path.join(ROOT, ".git")):
    pytest.skip("the sources are no checkout of git")
  files = subprocess.run(
      ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
      cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
  ).stdout.strip("\0").split("\0")
  found = []
  for file in files:
    path = os.path.join(ROOT, file)
    if not os.path.exists(path):
      continue  # It was removed.
    try:
      with open(path, encoding="utf-8") as f:
        content = f.read()
    except UnicodeDecodeError:
      continue  # Not a text, such as an image.
    found += [(file, i, line)
              for i, line in enumerate(content.split("\n"), 1)
              if len(line) > LONGEST and "\0" not in content]
  return found


def test_lines_are_short():
  too_long = [f"{file}:{i}: {line}" for file, i, line in long_lines()
              if not is_allowed(file, line)]
  assert not too_long, "\n".join(too_long)


@pytest.mark.parametrize("why", EXCEPTIONS)
def test_exceptions_are_used(why):
  of_file, of_line = EXCEPTIONS[why]
  assert any(re.search(of_file, file) and re.match(of_line, line)
             for file, _, line in long_lines())


@pytest.mark.parametrize("file, line, allowed", [
    ("a.md", "| " + "a " * 60, True),
    ("a.py", "| " + "a " * 60, False),
    ("a.py", "x = 1" + 60 * "." + "  # pylint: disable=invalid-name", True),
    ("a.py", "x = 1" + 90 * " ." + "  # pylint: disable=invalid-name", False),
    ("a/BUILD", "load(" + 90 * " ", True),
    ("a/BUILD", "    load(" + 90 * " ", False),
    ("a.cc", "// https://" + 90 * "a", True),
    ("a.cc", "// " + 30 * "word ", False)])
def test_what_is_allowed(file, line, allowed):
  assert is_allowed(file, line) == allowed


# The layers of the code, from the lowest: a file needs none of a higher layer.
LAYERS = [
    r"cc/(rules/|old_glibc)", r"cc/engine/", r"cc/(protocols|ops|gpu)/",
    r"cc/kernels/", r"cc/(native|xla)/",
    r"wrapopt/(_[a-z]\w+|sysconfig|version)\.py", r"wrapopt/ops/",
    r"wrapopt/_averages/", r"wrapopt/_gates/",
    r"wrapopt/lazy_adam\.py",  # It wraps no optimizer.
    r"wrapopt/_v1/_graphs/", r"wrapopt/_v1/_steps/",
    r"wrapopt/_v1/_evaluation/", r"wrapopt/_v1/_averages/",
    r"wrapopt/_v1/_workers/", r"wrapopt/_v1/", r"wrapopt/_local/",
    r"wrapopt/\w+\.py", r"wrapopt/checkpoints/",
    r"wrapopt/keras/_variables\.py", r"wrapopt/keras/_steps/",
    r"wrapopt/keras/(_evaluation/|batch_norm\.py)",
    r"wrapopt/keras/_averages/", r"wrapopt/keras/_(attributes|wrapper)\.py",
    r"wrapopt/keras/", r"wrapopt/examples/", r"wrapopt/bench/"]


def layer_of(path):
  return next(i for i, of in enumerate(LAYERS) if re.match(of, path))


def needs():
  """{path of a source: the paths of those that it imports or includes}."""
  paths = {os.path.relpath(path, ROOT) for folder in ("cc", "wrapopt")
           for path in glob.glob(f"{ROOT}/{folder}/**/*.*", recursive=True)
           if re.search(r"\.(py|h|cc|cu)$", path)}
  found = {}
  for path in sorted(paths):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
      text = f.read()
    if not path.endswith(".py"):
      found[path] = paths & {*re.findall(r'#include "(.+)"', text)}
      continue
    names = set()
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Import):
        names |= {(name.name,) for name in node.names}
      elif isinstance(node, ast.ImportFrom):
        names |= {(f"{node.module}.{name.name}", node.module)
                  for name in node.names}
    found[path] = {
        next((file for name in either for file in (
            f"{name.replace('.', '/')}.py",
            f"{name.replace('.', '/')}/__init__.py") if file in paths), None)
        for either in names} - {None}
  return found


def test_layers_point_down():
  arrows = [(a, b) for a, its in needs().items() for b in its]
  up = [f"{a} needs {b}" for a, b in arrows if layer_of(a) < layer_of(b)]
  assert not up, "\n".join(up)
  assert len(arrows) > 500  # It sees them.


def test_no_file_needs_itself():
  graphlib.TopologicalSorter(needs()).prepare()  # An error names the circle.


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_a_mutant_changes_a_source(mutant):
  """Else nobody would know before it is run."""
  with open(os.path.join(ROOT, mutant.file)) as f:
    assert mutant.before in f.read()


def papers_in(text):
  """[(name, year), ...], [title or number of arXiv, ...] that a text cites."""
  text = re.sub(r"\s*\n\s*(?://|#)?\s*", " ", text)
  titles = re.findall(
      r'"([^"]{12,200})"(?: \(\w+\))?(?:, section [\w.]+)?,'
      r' (?:[A-Za-z]+ )?(?:19|20)\d\d\b', text)
  return (re.findall(r"\b([A-Z][a-z]+)(?: et al\.| and [A-Z]\w+)?,? "
                     r"((?:19|20)\d\d)\b", text),
          titles + re.findall(r"arXiv (\d{4}\.\d{5})", text))


def test_the_list_of_papers_has_all():
  with open(os.path.join(ROOT, "wrapopt/docs/papers.md"),
            encoding="utf-8") as f:
    entries = [re.sub(r"\s+", " ", entry).lower()
               for entry in re.split(r"\n(?=[|-])", f.read())]
  count, missing = 0, []
  for pattern in "README.md", "wrapopt/**/*.py", "cc/**/*.h", "cc/**/*.cc":
    for path in glob.glob(os.path.join(ROOT, pattern), recursive=True):
      with open(path, encoding="utf-8") as f:
        names, others = papers_in(f.read())
      for words in [*names, *([other] for other in others)]:
        count += 1
        if not any(all(word.lower() in entry for word in words)
                   for entry in entries):
          missing.append(f"{os.path.relpath(path, ROOT)}: {', '.join(words)}")
  assert not missing, "\n".join(missing)
  assert count > 60
