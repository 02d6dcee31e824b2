"""Whether tests notice a mutant of a source in C++.

Only what includes the source is compiled again, without optimization. The tests
in C++ make their reference from the rules. So a mutant that they do not notice
is also linked into the libraries that tests in Python load.
"""

import filecmp
import functools
import pathlib
import re
import subprocess
import sysconfig
import time

import pybind11

import python_runs

_COMPILE = ["g++", "-std=c++17", "-O0", "-w", "-fPIC", "-I.",
            # As the engine: the same bits on all machines.
            "-ffp-contract=off", "-fno-gnu-unique",
            '-DWRAPOPT_VERSION="mutant"', f"-I{pybind11.get_include()}",
            f"-I{sysconfig.get_path('include')}"]


def folders(root):
  """The folders of sources that the tests in C++ include."""
  return [f"cc/{path.name}" for path in sorted((root / "cc").iterdir())
          if path.is_dir() and path.name not in (
              "gpu", "kernels", "native", "ops", "xla")]


class Units:
  """The sources of a copy, compiled."""

  def __init__(self, copy, folder):
    self._copy = copy
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    (copy / "cc/gpu/images.inc").touch()  # No GPU.
    find = lambda pattern: sorted(
        str(path.relative_to(copy)) for path in copy.glob(pattern))
    self._engine = [x for of in folders(copy) for x in find(f"{of}/*.cc")]
    # {library: (its units, options of the linker, files of tests)}.
    self._libraries = {
        "wrapopt/_wrapopt_native.so": (
            [*self._engine, "cc/native/native.cc", *find("cc/gpu/*.cc")],
            ["-Wl,-soname,_wrapopt_native.so", "-Wl,-Bsymbolic",
             "-Wl,--version-script=tools/exports_core.lds"],
            [f"tests/ops/{name}_test.py" for name in (
                "bits", "apply", "ema_update", "native",
                "averaging_assign", "lazy_averages")]),
        "tests/cc/_rounds.so": (
            [*self._engine, "tests/cc/rounds_module.cc"], [],
            ["tests/workers/simulator_test.py"])}
    # That of the launcher needs a GPU.
    self._tests = [x for x in find("tests/cc/*_test.cc") if "launcher" not in x]

  @functools.cache
  def _needs(self, unit):
    """The paths of the files that a unit is made of."""
    made = subprocess.run([*_COMPILE, "-MM", unit], cwd=self._copy, check=True,
                          capture_output=True, text=True).stdout
    return set(made.replace("\\\n", " ").split()[1:])

  def _runs(self, unit, file):
    """Whether a unit must be compiled again if a source changes."""
    if file.startswith("cc/rules/"):
      # The loops run the rules. The others include them for their names.
      return unit == "cc/engine/elementwise.cc" or (
          f'"{file}"' in (self._copy / unit).read_text())
    return file in self._needs(unit)

  @functools.cache
  def _digest(self, unit):
    return python_runs.digest(*(
        self._copy / path for path in sorted(self._needs(unit)))) + ".o"

  def _object(self, unit, changed):
    """Compiles a unit, unless it is there; returns the object, or None."""
    is_mutant = changed and self._runs(unit, changed)
    found = self._folder / "-".join([
        *unit.split("/"), "mutant.o" if is_mutant else self._digest(unit)])
    if is_mutant or not found.exists():
      done = subprocess.run(
          [*_COMPILE, "-c", unit, "-o", str(found)], cwd=self._copy,
          capture_output=True, check=False)
      if done.returncode:
        return None
    return str(found)

  def _is_left_out(self, unit):
    """Whether a unit's mutant is in code for other processors.

    The object file is then the same as without the mutant.
    """
    found = self._object(unit, unit)
    return found is not None and filecmp.cmp(
        found, self._object(unit, None), shallow=False)

  def _linked(self, units, changed, out, *options):
    """Links units; returns whether all of them compile."""
    objects = [self._object(unit, changed) for unit in units]
    return None not in objects and not subprocess.run(
        ["g++", *objects, "-o", str(out), *options, "-lpthread", "-ldl"],
        cwd=self._copy, capture_output=True, check=False).returncode

  def _failure(self, test, changed, limit):
    """What a test in C++ says: "" if it is green, None if it can't be made."""
    program = self._folder / "test"
    if not self._linked([test, *self._engine], changed, program, "-lgtest",
                        "-lgtest_main"):
      return None
    try:
      done = subprocess.run(
          [program, "--gtest_brief=1"], cwd=self._copy, timeout=limit,
          capture_output=True, text=True, errors="replace", check=False)
    except subprocess.TimeoutExpired:
      return f"{test}: it hangs"
    failed = re.search(r"\[  FAILED  \] ([\w./]+)", done.stdout)
    return done.returncode and (
        f"{test}: {failed[1] if failed else 'it crashes'}") or ""

  @functools.cache
  def compile(self):
    """Compiles all as it is, once."""
    for unit in {*self._tests, *sum(
        (units for units, _, _ in self._libraries.values()), [])}:
      if not self._object(unit, None):
        raise SystemExit(f"{unit} does not compile")

  @functools.cache
  def green(self):
    """Runs the tests in C++ as they are, once; returns {test: its seconds}."""
    seconds = {}
    for test in self._tests:
      start = time.monotonic()
      if self._failure(test, None, 300) != "":
        raise SystemExit(f"{test} is red without a mutant")
      seconds[test] = time.monotonic() - start
    return seconds

  def red(self, file):
    """The first test in C++ that notices that a source has changed.

    Args:
      file: The source, which has a mutant.

    Returns:
      The name of the test; "" if no test does; None if the mutant does not
      compile, or is in code for other processors.
    """
    if file in self._engine and self._is_left_out(file):
      return None
    # Those that include it, or the header of a unit that does.
    headers = {file} | {f"{unit[:-len('cc')]}h" for unit in self._engine
                        if self._runs(unit, file)}
    tests = [x for x in self._tests if headers & self._needs(x)]
    stem = pathlib.Path(file).stem
    for test in sorted(tests, key=lambda x: (
        stem not in x, file not in self._needs(x), len(self._needs(x)))):
      failure = self._failure(test, file, 10 + 10 * self.green()[test])
      if failure != "":
        return failure
    return ""

  def paths(self):
    return [self._copy / library for library in self._libraries]

  def libraries(self, file):
    """Links each library of the copy that has this source.

    Args:
      file: The source, which has a mutant.

    Yields:
      Pairs of the path of a library, or None if it does not compile, and the
      files of the tests that load it.
    """
    for library, (units, options, tests) in self._libraries.items():
      if any(self._runs(unit, file) for unit in units):
        path = self._copy / library
        yield path if self._linked(units, file, path, "-shared", *options
                                   ) else None, tests
