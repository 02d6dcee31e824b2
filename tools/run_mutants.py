"""Runs mutants: see tools/mutants."""

import argparse
import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import time

_ROOT = pathlib.Path(__file__).resolve().parent.parent
# Kept from one run to the next, with what Bazel has built from it.
_COPY = _ROOT / ".mutants"


def _list():
  path = _ROOT / "tests/tools/mutants.py"
  spec = importlib.util.spec_from_file_location("mutants", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.MUTANTS


def _update_copy():
  """Copies the sources that differ, and removes those that are gone."""
  files = subprocess.run(
      ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
      cwd=_ROOT, check=True, capture_output=True, text=True).stdout
  files = {name for name in files.split("\0")
           if name and (_ROOT / name).is_file()}
  _COPY.mkdir(exist_ok=True)
  for old in _COPY.rglob("*"):
    name = str(old.relative_to(_COPY))
    is_built = name.split("/")[0].startswith(("bazel-", ".venv"))
    if old.is_file() and not is_built and name not in files:
      old.unlink()
  for name in files:
    source, target = _ROOT / name, _COPY / name
    if not target.exists() or source.read_bytes() != target.read_bytes():
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(source, target)
  for venv in _ROOT.glob(".venv*"):
    if not (_COPY / venv.name).exists():
      (_COPY / venv.name).symlink_to(venv)


def _tested(arguments):
  """Runs tools/test; returns (passed, failed, whether it could run, output)."""
  # One failure is enough.
  run = subprocess.run(["./tools/test", "--test_arg=--maxfail=1",
                        *arguments.split()], cwd=_COPY,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                       text=True, errors="replace")
  lines = run.stdout.strip().splitlines()
  counts = re.match(r"(\d+) passed, (\d+) failed", lines[-1] if lines else "")
  if counts is None or "Build did NOT complete" in run.stdout:
    return 0, 0, False, run.stdout
  return int(counts[1]), int(counts[2]), True, run.stdout


@functools.cache
def _pass_without(tests):
  """Whether tests pass in the sources as they are."""
  passed, failed, ran, _ = _tested(tests)
  return ran and passed and not failed


def _outcome(mutant):
  """(whether it was noticed, what to print)."""
  if not _pass_without(mutant.tests):
    return False, f"{mutant.tests} do not pass without it"
  path = _COPY / mutant.file
  source = path.read_text() if path.exists() else ""
  if mutant.before not in source:
    return False, f"{mutant.file} does not contain {mutant.before!r}"
  path.write_text(source.replace(mutant.before, mutant.after))
  try:
    passed, failed, ran, output = _tested(mutant.tests)
  finally:
    path.write_text(source)
  if not ran:
    return False, "does not compile:\n" + "\n".join(output.splitlines()[-40:])
  if failed == 0:
    return False, f"not noticed by {passed} tests of {mutant.tests}"
  return True, f"by {mutant.tests}"


def main():
  parser = argparse.ArgumentParser(
      prog="tools/mutants", description="Breaks wrapopt in chosen ways, and "
      "tests that the daily tests notice each. See tests/tools/mutants.py.")
  parser.add_argument("part", nargs="*", help="a part of the names of the "
                      "mutants to run; by default all")
  parts = parser.parse_args().part
  chosen = [x for x in _list()
            if not parts or any(part in x.name for part in parts)]
  if not chosen:
    parser.error(f"no mutant has one of {', '.join(parts)} in its name")
  _update_copy()
  noticed = 0
  for mutant in chosen:
    start = time.monotonic()
    is_noticed, text = _outcome(mutant)
    noticed += is_noticed
    print(f"{'noticed' if is_noticed else 'MISSED'}: {mutant.name}: {text} "
          f"({time.monotonic() - start:.0f} s)", flush=True)
  print(f"{noticed} passed, {len(chosen) - noticed} failed")
  return 0 if noticed == len(chosen) else 1


if __name__ == "__main__":
  sys.exit(main())
