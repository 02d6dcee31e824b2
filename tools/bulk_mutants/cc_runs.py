"""Whether the tests in C++ notice a mutant of a source in C++.

Only what includes the source is compiled again, without optimization. The
reference of the tests in C++ is made from the rules, so what these tests do not
notice is also linked into _wrapopt_native.so, for tests in Python.
"""

import functools
import pathlib
import re
import subprocess

import python_runs

# They compute with each rule.
OF_NATIVE = ["tests/ops/bits_test.py", "tests/ops/apply_test.py",
             "tests/ops/ema_update_test.py", "tests/ops/compensation_test.py",
             "tests/ops/averaging_assign_test.py",
             "tests/ops/lazy_averages_test.py"]
_COMPILE = ["g++", "-std=c++17", "-O0", "-w", "-fPIC", "-I.",
            # As the engine: the same bits on all machines.
            "-ffp-contract=off", "-fno-gnu-unique",
            '-DWRAPOPT_VERSION="mutant"']


class Units:
  """The sources of a copy, compiled."""

  def __init__(self, copy, folder):
    self._copy = copy
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    (copy / "cc/gpu/images.inc").touch()  # No GPU.
    find = lambda pattern: sorted(
        str(path.relative_to(copy)) for path in copy.glob(pattern))
    self._engine = [x for x in find("cc/engine/*.cc") if "old_glibc" not in x]
    self._native = self._engine + [
        "cc/native/native.cc", *(x for x in find("cc/gpu/*.cc"))]
    # That of the launcher needs a GPU.
    self._tests = [x for x in find("tests/cc/*_test.cc") if "launcher" not in x]

  @functools.cache
  def _needs(self, unit):
    """The paths of the files that a unit is made of."""
    made = subprocess.run([*_COMPILE, "-MM", unit], cwd=self._copy, check=True,
                          capture_output=True, text=True).stdout
    return set(made.replace("\\\n", " ").split()[1:])

  @functools.cache
  def _digest(self, unit):
    return python_runs.digest(*(
        self._copy / path for path in sorted(self._needs(unit)))) + ".o"

  def _object(self, unit, changed):
    """Compiles a unit, unless it is there; returns the object, or None."""
    is_mutant = changed in self._needs(unit)
    found = self._folder / "-".join([
        *unit.split("/"), "mutant.o" if is_mutant else self._digest(unit)])
    if is_mutant or not found.exists():
      done = subprocess.run(
          [*_COMPILE, "-c", unit, "-o", str(found)], cwd=self._copy,
          capture_output=True, check=False)
      if done.returncode:
        return None
    return str(found)

  def _linked(self, units, changed, out, *options):
    """Links units; returns whether all of them compile."""
    objects = [self._object(unit, changed) for unit in units]
    return None not in objects and not subprocess.run(
        ["g++", *objects, "-o", str(out), *options, "-lpthread", "-ldl"],
        cwd=self._copy, capture_output=True, check=False).returncode

  @functools.cache
  def compile(self):
    """Compiles the sources as they are, once."""
    for unit in self._native + self._tests:
      if not self._object(unit, None):
        raise SystemExit(f"{unit} does not compile")

  def red(self, file, limit):
    """The first test in C++ that notices that a source has changed.

    Args:
      file: The source, which has a mutant.
      limit: The seconds that a test may take.

    Returns:
      The name of the test; "" if none does; None if it does not compile.
    """
    stem = pathlib.Path(file).stem
    tests = [x for x in self._tests if any(
        file in self._needs(unit) for unit in [x, *self._engine])]
    tests.sort(key=lambda x: (stem not in x, file not in self._needs(x),
                              len(self._needs(x))))
    program = self._folder / "test"
    for test in tests:
      if not self._linked([test, *self._engine], file, program, "-lgtest",
                          "-lgtest_main"):
        return None
      try:
        done = subprocess.run(
            [program, "--gtest_brief=1"], cwd=self._copy, timeout=limit,
            capture_output=True, text=True, errors="replace", check=False)
      except subprocess.TimeoutExpired:
        return f"{test}: it hangs"
      if done.returncode:
        failed = re.search(r"\[  FAILED  \] ([\w./]+)", done.stdout)
        return f"{test}: {failed[1] if failed else 'it crashes'}"
    return ""

  def native(self, file):
    """Links _wrapopt_native.so in the copy again, if it has this source.

    Returns:
      Whether it has it. None if it does not compile.
    """
    if not any(file in self._needs(unit) for unit in self._native):
      return False
    return self._linked(
        self._native, file, self._copy / "wrapopt/_wrapopt_native.so",
        "-shared", "-Wl,-soname,_wrapopt_native.so", "-Wl,-Bsymbolic",
        "-Wl,--version-script=tools/exports_core.lds") or None
