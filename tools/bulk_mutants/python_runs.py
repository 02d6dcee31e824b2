"""Which tests of Python reach a line, and whether they notice a mutant.

A process that has imported what takes long to import, and nothing of wrapopt,
forks a child for each file of tests, which imports wrapopt from the copy.
"""

import ast
import collections
import contextlib
import faulthandler
import hashlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import types

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import cases  # pylint: disable=wrong-import-position

ROOMS = ("ops", "both", "v1", "checkpoints", "files", "keras", "programs",
         "workers", "fuzz")
# A test hangs after _LEAST seconds and _TIMES its own.
_LEAST, _TIMES = 60, 10
_GREEN = 77
# Processes that tests start measure what they reach, too.
_SETTINGS = """[run]
context = ${MUTANTS_TEST}
data_file = %s/started
parallel = true
patch = _exit
sigterm = true
source = %s/wrapopt
"""


def preload():
  """Imports what all tests need, which takes seconds."""
  # pylint: disable=g-import-not-at-top,unused-import
  import coverage
  import hypothesis
  import keras
  import numpy
  import tensorflow


def _child(copy, room, log, limit, function):
  """Runs function() in a fork, for a limited time; returns its status."""
  pid = os.fork()
  if pid:
    end = time.monotonic() + limit
    while (time.monotonic() < end and
           not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
      time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(pid, signal.SIGKILL)  # With the processes that it has started.
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
  try:
    os.setsid()
    # In the background, a shell lets its commands ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(copy)
    # Processes that `multiprocessing` starts import the main module.
    sys.modules["__main__"] = types.ModuleType("__main__")
    path = [str(copy), *(f"{copy}/tests/{x}" for x in ("support", room, "cc"))]
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os._exit(function())
  finally:
    os._exit(99)


def _pytest(copy, file, scratch, plugin, *args):
  return pytest.main(
      [str(copy / file), "-q", "-p", "no:cacheprovider", "-p",
       "no:faulthandler", "--import-mode=importlib", f"--rootdir={copy}",
       f"--basetemp={scratch}/pytest", *args],
      plugins=[plugin, cases.Cases()])


def nightly(room):
  """{file: expression of pytest's -k} of what runs only at night."""
  found = {}
  names = collections.defaultdict(lambda: lambda *args, **kwargs: [])
  names["pytest_room"] = lambda nightly={}, **_: found.update(nightly)
  names["dict"] = dict
  exec((room / "BUILD").read_text(), names)  # pylint: disable=exec-used
  return found


class _Measure:
  """Tells `coverage` what runs; keeps the seconds of the tests that pass.

  Attributes:
    seconds: {test: its seconds}, with those of the fixtures that it shares.
    others: The tests that do not pass.
    users: {context: the tests that reach what runs in it}. It is a test, or a
      fixture that several tests share.
  """

  def __init__(self, measured):
    self._measured = measured
    self.seconds = collections.Counter()
    self.others = set()
    self.users = collections.defaultdict(set)

  def _switch(self, context):
    os.environ["MUTANTS_TEST"] = context
    self._measured.switch_context(context)

  def pytest_runtest_logstart(self, nodeid):
    self.users[nodeid].add(nodeid)
    self._switch(nodeid)

  @pytest.hookimpl(wrapper=True)
  def pytest_fixture_setup(self, fixturedef, request):
    if fixturedef.scope == "function":
      return (yield)
    name = f"fixture {fixturedef.argname}"
    users = [item.nodeid for item in request.session.items
             if fixturedef.argname in item.fixturenames]
    self.users[name].update(users)
    test = os.environ["MUTANTS_TEST"]
    start = time.monotonic()
    self._switch(name)
    try:
      return (yield)
    finally:
      self._switch(test)
      for user in users:
        if user != test:  # Its own are counted.
          self.seconds[user] += time.monotonic() - start

  def pytest_runtest_logreport(self, report):
    self.seconds[report.nodeid] += report.duration
    if not report.passed:
      self.others.add(report.nodeid)


def _measure(copy, file, skipped, scratch, out):
  """Runs a file of tests, in a child; writes what each of them reaches."""
  import coverage  # pylint: disable=g-import-not-at-top
  settings = scratch / "settings"
  settings.write_text(_SETTINGS % (scratch, copy))
  # Processes that the tests start run this. .venv-tools stays the last place
  # where they look for packages.
  folder = str(pathlib.Path(coverage.__file__).parent.parent)
  (scratch / "sitecustomize.py").write_text(
      f"import sys\nsys.path.append({folder!r})\n"
      "import coverage\ncoverage.process_startup()\n")
  os.environ.update(
      MUTANTS_TEST="", COVERAGE_PROCESS_START=str(settings),
      PYTHONPATH=f"{os.environ['PYTHONPATH']}{os.pathsep}{scratch}")
  measured = coverage.Coverage(data_file=None, source=[str(copy / "wrapopt")],
                               messages=False)
  plugin = _Measure(measured)
  measured.start()
  _pytest(copy, file, scratch, plugin, *skipped)
  measured.stop()
  # Another process calls a test by another name if an address is in it.
  tests = [test for test in plugin.seconds
           if test not in plugin.others and " at 0x" not in test]
  numbers = {test: i for i, test in enumerate(tests)}
  reached = collections.defaultdict(lambda: collections.defaultdict(set))
  data = [measured.get_data()]
  for path in scratch.glob("started.*"):
    data.append(coverage.CoverageData(str(path)))
    data[-1].read()
  for part in data:
    for source in part.measured_files():
      texts = pathlib.Path(source).read_text().split("\n")
      for line, contexts in part.contexts_by_lineno(source).items():
        reached[os.path.relpath(source, copy)][texts[line - 1].strip()].update(
            numbers[test] for context in contexts
            for test in plugin.users[context] if test in numbers)
  whole = scratch / "out"
  whole.write_text(json.dumps({
      "tests": [(test, round(plugin.seconds[test], 3)) for test in tests],
      "reached": {source: {text: sorted(of) for text, of in texts.items() if of}
                  for source, texts in reached.items()}}))
  shutil.move(whole, out)
  return 0


def digest(*paths):
  found = hashlib.sha256()
  for path in paths:
    found.update(path.read_bytes())
  return found.hexdigest()[:16]


class Reached:
  """Which tests reach which lines. Lines are known by file and text.

  Attributes:
    files: {file of tests: {"tests": [(test, its seconds)], "reached": {source:
      {text of a line: [places in that list]}}}}.
  """

  def __init__(self, copy, folder):
    self.files = {}
    self._copy = copy
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def measure(self, files, deadline):
    """Runs files of tests that have changed; reads what is known of others."""
    for file in files:
      path = self._copy / file
      room, stem = path.parent.name, path.stem
      at_night = nightly(path.parent).get(path.name)
      known = self._folder / f"{room}-{stem}-{digest(path)}.json"
      if at_night != "all" and not known.exists():
        if time.monotonic() > deadline:
          print(f"{file}: no time was left to see what it reaches")
          continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
          scratch = pathlib.Path(scratch)
          chosen = ["--cases=day"] + (
              [f"-k=not ({at_night})"] if at_night else [])
          run = lambda: _measure(self._copy, file, chosen, scratch, known)  # pylint: disable=cell-var-from-loop
          status = _child(self._copy, room, self._folder / f"{room}-{stem}.log",
                          3600, run)
        print(f"{file}: {'ran' if status == 0 else 'FAILED'} in "
              f"{time.monotonic() - start:.0f} s", flush=True)
      if known.exists():
        self.files[file] = json.loads(known.read_text())

  def by(self, mutant, source):
    """The tests that reach a mutant: {file of tests: {test: its seconds}}.

    If no test is known to reach its line, they are those that reach its file:
    `coverage` does not see what threads of TensorFlow run.
    """

    def of(texts):
      found = {}
      for file, known in self.files.items():
        reached = known["reached"].get(mutant.file, {})
        if numbers := {i for text in reached if texts is None or text in texts
                       for i in reached[text]}:
          found[file] = dict(known["tests"][i] for i in numbers)
      return found

    return of(_reaching(source, mutant.line)) or of(None)


def _reaching(source, line):
  """The texts of lines that run when a line of a function does.

  If the line runs when the module is imported, they are those of the function
  whose head it is, or none: all tests of the file may notice it.
  """
  texts = lambda first, last: {
      text.strip() for text in source.split("\n")[first - 1:last]} - {""}
  begin = lambda node: min(
      [node, *getattr(node, "decorator_list", ())], key=lambda x: x.lineno)
  # From the outermost statement to the innermost.
  around = [node for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt) and
            begin(node).lineno <= line <= node.end_lineno]
  functions = [x for x in around if isinstance(x, ast.FunctionDef)]
  if not any(line >= x.body[0].lineno for x in functions):
    return texts(functions[0].body[0].lineno, functions[0].end_lineno
                 ) if functions else set()
  first, last = begin(around[-1]).lineno, around[-1].end_lineno
  if hasattr(around[-1], "body"):  # Only its head, or `else` and the like.
    last = around[-1].body[0].lineno - 1
    if line > last:
      first = last = line
  return texts(first, last)


class _Select:
  """Runs chosen tests in an order, each for a limited time."""

  def __init__(self, seconds, failed):
    self._seconds = seconds
    self._failed = failed

  def pytest_collection_modifyitems(self, items):
    order = {test: i for i, test in enumerate(self._seconds)}
    missing = order.keys() - {item.nodeid for item in items}
    if missing:
      self._failed.write_text(f"{min(missing)} is no more")
      os._exit(1)
    items[:] = sorted((item for item in items if item.nodeid in order),
                      key=lambda item: order[item.nodeid])

  def pytest_runtest_logstart(self, nodeid):
    self._failed.write_text(nodeid)
    faulthandler.dump_traceback_later(
        _LEAST + _TIMES * self._seconds[nodeid], exit=True)

  def pytest_runtest_logfinish(self):
    faulthandler.cancel_dump_traceback_later()


def in_order(tests, limit):
  """Chooses tests, the quickest first, but of each function one before two.

  Args:
    tests: {file of tests: {test: its seconds}}.
    limit: The seconds that all may take.

  Returns:
    The same of those that fit, the quickest file first.
  """
  ranks = collections.Counter()
  ranked = []
  for seconds, test, file in sorted(
      (seconds, test, file) for file, of_file in tests.items()
      for test, seconds in of_file.items()):
    ranks[test.partition("[")[0]] += 1
    ranked.append((ranks[test.partition("[")[0]], seconds, test, file))
  chosen, total = collections.defaultdict(dict), 0
  for _, seconds, test, file in sorted(ranked):
    if total + seconds <= limit or not chosen:
      chosen[file][test] = seconds
      total += seconds
  return dict(sorted(chosen.items(), key=lambda x: sum(x[1].values())))


def first_red(copy, tests, log):
  """Runs tests until one fails.

  Args:
    copy: The folder of the sources, with a mutant or without.
    tests: {file of tests: {test: its seconds}}, in their order.
    log: The file for what they print.

  Returns:
    The test that failed, crashed or hung, or "".
  """
  for file, chosen in tests.items():
    with tempfile.TemporaryDirectory() as scratch:
      scratch = pathlib.Path(scratch)
      failed = scratch / "failed"
      failed.write_text(f"{file}: import")
      def run():
        # A stale file of bytecode would hide a mutant.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        plugin = _Select(chosen, failed)  # pylint: disable=cell-var-from-loop
        # No status of a process that ends somewhere.
        return _GREEN + _pytest(copy, file, scratch, plugin, "-x")  # pylint: disable=cell-var-from-loop
      if _child(copy, file.split("/")[1], log,
                2 * _LEAST + _TIMES * sum(chosen.values()), run) != _GREEN:
        return failed.read_text()
  return ""
