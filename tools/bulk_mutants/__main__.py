"""Breaks wrapopt in generated ways: see tools/mutants and tests/README.md."""

import argparse
import collections
import datetime
import hashlib
import json
import pathlib
import random
import shutil
import subprocess
import sys
import time

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path += map(str, _ROOT.glob(".venv-tools/lib/python*/site-packages"))

# pylint: disable=wrong-import-position
import cc_runs
import python_runs
import sites

_FOLDER = _ROOT / "results/mutants"
_COPY = _FOLDER / "copy"
_FOLDERS = [f"wrapopt/{name}" for name in (
    "_averages", "_gates", "_local", "_v1", "keras", "ops", "checkpoints")]
_RUNS = _FOLDER / "runs.json"
_EQUAL = _ROOT / "tools/bulk_mutants/equal.txt"
_BUILT = ("wrapopt/_wrapopt_*", "wrapopt/bench/_*.so", "tests/cc/_*.so")


def _is_source(path):
  return path.suffix in (".py", ".h", ".cc")


def _update_copy():
  """Makes the copy of the sources; returns a digest of them all."""
  files = subprocess.run(
      ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
      cwd=_ROOT, check=True, capture_output=True, text=True).stdout
  files = {name for name in files.split("\0") if (_ROOT / name).is_file()}
  for old in list(_COPY.rglob("*.*")):
    if _is_source(old) and str(old.relative_to(_COPY)) not in files:
      old.unlink()
  built = {name: _ROOT / name for name in files}
  for root in (_ROOT, _ROOT / "bazel-bin"):
    built |= {str(path.relative_to(root)): path
              for pattern in _BUILT for path in root.glob(pattern)}
  for name, source in built.items():
    target = _COPY / name
    if not target.exists() or target.read_bytes() != source.read_bytes():
      target.parent.mkdir(parents=True, exist_ok=True)
      target.unlink(missing_ok=True)
      shutil.copyfile(source, target)
  return python_runs.digest(*(
      _ROOT / name for name in sorted(files)
      if name.startswith(("wrapopt/", "cc/", "tests/")) and
      _is_source(pathlib.Path(name))))


def _equal():
  """{(file, before, after)} of the mutants that change nothing."""
  return {tuple(block.split("\n")[:3])
          for block in _EQUAL.read_text().split("\n\n")}


def _is_rule(mutant):
  """Whether the tests in C++ make their reference from it, too."""
  return mutant.file.startswith("cc/rules/")


class _Runs:
  """Runs mutants, and remembers in a file what came out."""

  def __init__(self, limit):
    self._all = _update_copy()
    self._limit = limit
    self._path = _RUNS
    self._known = (json.loads(self._path.read_text())
                   if self._path.exists() else {})
    self._reached = python_runs.Reached(_COPY, _FOLDER / "reached")
    self._units = cc_runs.Units(_COPY, _FOLDER / "objects")
    self._green = set()  # Files of tests that are green without a mutant.

  def measure(self, rooms, deadline):
    self._reached.measure([
        str(path.relative_to(_ROOT)) for room in rooms
        for path in sorted((_ROOT / "tests" / room).glob("*_test.py"))],
                          deadline)

  def _depends_on(self, by):
    """A digest of what an outcome depends on beside the mutant."""
    if by:
      return python_runs.digest(_ROOT / by.split(":")[0])
    return f"{self._all} {self._limit} {len(self._reached.files)}"

  def outcome(self, mutant):
    """Runs a mutant, unless that is known.

    Returns:
      The name of the test that noticed the mutant; "" if no test did; None if
      the mutant does not compile, or is in code for other processors.
    """
    name = hashlib.sha256(mutant.text.encode()).hexdigest()
    by, of = self._known.get(name, (None, None))
    if of is None or of != self._depends_on(by):
      path = _COPY / mutant.file
      source = path.read_bytes()
      of_python = path.suffix == ".py"
      if not of_python:
        self._units.compile()
        if not _is_rule(mutant):
          self._units.green()
      try:
        path.write_text(mutant.text)
        by = (self._red(self._reached.by(mutant, source.decode()), path, source)
              if of_python else self._red_in_cc(mutant))
      finally:
        path.write_bytes(source)
      self._known[name] = by, self._depends_on(by)
      self._path.write_text(json.dumps(self._known, indent=0))
    return by

  def told(self, mutant):
    """How many tests reach a mutant, and how many of them run."""
    if not mutant.file.endswith(".py"):
      return ""
    tests = self._reached.by(mutant, (_ROOT / mutant.file).read_text())
    chosen = python_runs.in_order(tests, self._limit)
    return "{} of {} tests ran".format(*(
        sum(map(len, of.values())) for of in (chosen, tests)))

  def _red(self, tests, path, original):
    """The first red test in Python that is green without the mutant, or ""."""
    log = _FOLDER / "tests.log"
    chosen = python_runs.in_order(tests, self._limit)
    while by := python_runs.first_red(_COPY, chosen, log):
      file = by.split(":")[0]
      if file in self._green:
        break
      mutant = path.read_bytes()
      path.write_bytes(original)
      red = python_runs.first_red(_COPY, {file: chosen[file]}, log)
      path.write_bytes(mutant)
      if not red:
        self._green.add(file)
        break
      print(f"left out, as it is red without a mutant: {red}")
      chosen.pop(file) if red not in chosen[file] else chosen[file].pop(red)
    return by

  def _red_in_cc(self, mutant):
    by = "" if _is_rule(mutant) else self._units.red(mutant.file)
    if by == "":
      originals = {path: path.read_bytes() for path in self._units.paths()}
      try:
        for path, files in self._units.libraries(mutant.file):
          if path is None:
            return None
          by = self._red(self._named(mutant, files), path, originals[path])
          if by:
            break
      finally:
        for path, content in originals.items():
          path.write_bytes(content)
    return by

  def _named(self, mutant, files):
    """The tests that have the rule's name in theirs, or all of the files."""
    tests = {file: dict(self._reached.files[file]["tests"])
             for file in files if file in self._reached.files}
    plain = lambda name: name.lower().replace("_", "")
    named = {file: {test: seconds for test, seconds in of_file.items()
                    if plain(pathlib.Path(mutant.file).stem) in plain(test)}
             for file, of_file in tests.items()}
    named = {file: of_file for file, of_file in named.items() if of_file}
    return named if named and _is_rule(mutant) else tests


def _files(of):
  """The sources in a folder, or a source."""
  path = _ROOT / of
  return sorted(str(x.relative_to(_ROOT)) for x in (
      path.rglob("*") if path.is_dir() else [path]) if _is_source(x))


def _run(of, runs, args, deadline):
  """Runs a sample of the mutants of a folder or file; prints survivors."""
  equal = _equal()
  found = [site for file in _files(of)
           for site in sites.sites(file, (_ROOT / file).read_text())]
  random.Random(f"{args.seed} {of}").shuffle(found)
  counts = collections.Counter()
  for site in found:
    if (counts["noticed"] + counts["survived"] == args.sample or
        time.monotonic() > deadline):
      break
    mutant = site()
    if mutant is None:
      continue
    start = time.monotonic()
    is_equal = (mutant.file, mutant.before, mutant.after) in equal
    by = None if is_equal else runs.outcome(mutant)
    kind = ("equal" if is_equal else "invalid" if by is None else
            "noticed" if by else "survived")
    counts[kind] += 1
    if kind == "survived" or args.verbose:
      print(f"{kind}: {mutant.file}:{mutant.line}: {mutant.change} "
            f"({time.monotonic() - start:.0f} s) "
            f"{runs.told(mutant) if kind == 'survived' else by or ''}\n"
            f"  {mutant.before}\n  {mutant.after}", flush=True)
  run = counts["noticed"] + counts["survived"]
  print(f"{of}: {counts['noticed']} of {run} noticed "
        f"({100 * counts['noticed'] / max(run, 1):.0f} %); "
        f"{counts['equal']} change nothing, {counts['invalid']} are not "
        f"compiled here; {len(found)} sites", flush=True)


def main():
  folders = _FOLDERS + cc_runs.folders(_ROOT)
  parser = argparse.ArgumentParser(
      prog="tools/mutants --bulk", description="Breaks wrapopt in generated "
      "ways, and runs the tests that reach what is broken.")
  parser.add_argument("of", nargs="*", metavar="FOLDER|FILE",
                      help="by default " + ", ".join(folders))
  parser.add_argument("--sample", type=int, help="how many mutants of each; "
                      "by default all")
  parser.add_argument("--seed", default=str(datetime.datetime.now(
      datetime.timezone.utc).date()), help="draws the sample (today's date)")
  parser.add_argument("--minutes", type=float, default=1e6,
                      help="when to end; each folder gets its part")
  parser.add_argument("--limit", type=float, default=600,
                      help="seconds of tests that a mutant may take (600)")
  parser.add_argument("--rooms", nargs="*", default=python_runs.ROOMS,
                      help="the rooms of tests in Python")
  parser.add_argument("--verbose", action="store_true",
                      help="prints all mutants")
  args = parser.parse_args()
  of = [x.rstrip("/") for x in args.of] or folders
  deadline = time.monotonic() + 60 * args.minutes
  for each in of:
    if not _files(each):
      parser.error(f"{each} is no folder or file of sources")
  python_runs.preload()
  runs = _Runs(args.limit)
  runs.measure(args.rooms, deadline)
  for i, each in enumerate(of):
    now = time.monotonic()
    _run(each, runs, args, now + (deadline - now) / (len(of) - i))


if __name__ == "__main__":
  main()
