"""A fuzzer of files for `wrapopt.checkpoints`.

    python tests/fuzz/fuzz_files.py --minutes 10
    python tests/fuzz/fuzz_files.py --seed 7 --case 1234   # One case again.

A case makes three small checkpoints of one format, and does one thing to them:

    damage   bytes are flipped, cut, repeated, inserted, shuffled, overwritten
    change   a file is rewritten, cut, replaced or removed at some moment of the
             run, before or after some call to the system
    race     a thread replaces or rewrites a file all the time
    full     the disk is full, or files may not become longer
    kill     SIGKILL at some moment, or at any time; then the tool runs again

The tool must write the right numbers, or raise an OSError or ValueError that
names the file. All other files stay as they were, byte for byte, no other file
appears and none stays open. It must not crash, hang or take much memory.

Known limitations: HDF5 files have no checksums, so the numbers of a damaged one
are right if they are those that h5py reads. And the HDF5 library itself may
crash, hang or take 4 gigabytes when it reads a damaged file. Such cases are
counted as "hdf5 crashes" and "hdf5 hangs" if the process was in h5py.

A case depends on its seed and number only; only races and kills at any time
depend on the machine. Cases run in processes that are forked from this one, so
TensorFlow must not have run anything in it.
"""

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import typing

import h5py
import numpy as np

import checkpoint_files
from wrapopt import checkpoints
from wrapopt.checkpoints import __main__ as command
from wrapopt.checkpoints import _h5
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source
from wrapopt.checkpoints import _tensorflow

_INPUTS = 3
_WEIGHTS = {"merge": [1, 1, 1], "weights": [0.2, 0.3, 0.5],
            "lawa": [0, 0.5, 0.5], "ema": [0.25, 0.25, 0.5],
            "command": [1, 1, 1]}
_KINDS = {"damage": 60, "change": 18, "race": 4, "full": 10, "kill": 8}

# Seconds without a result, after which a case hangs.
HANG = 60
# Bytes that a case may take, of files of some kilobytes.
_MEMORY = 1 << 29
# A known limitation: the HDF5 library allocates a string before it sees that
# the file is shorter. Its length has 32 bits.
_MEMORY_OF_HDF5 = (4 << 30) + _MEMORY
_ADDRESSES = 8 << 30

# How files appear: long ago.
_LONG_AGO = 10**9


class Case(typing.NamedTuple):
  """What a case does, which depends on its seed and number only."""
  format: str
  function: str
  kind: str
  rng: np.random.Generator


def case_of(seed, number):
  rng = np.random.default_rng([seed, number])
  format = str(rng.choice([*checkpoint_files.ENDINGS]))  # pylint: disable=redefined-builtin
  functions = [*_WEIGHTS] + ["posthoc"] * 3 * ("snapshots" in format)
  share = np.array([*_KINDS.values()]) / sum(_KINDS.values())
  return Case(format, str(rng.choice(functions)),
              str(rng.choice([*_KINDS], p=share)), rng)


# The files


class Corpus:
  """Two versions of the inputs of each format, in memory.

  Attributes:
    files: {(format, version): {name: bytes}}.
    contents: {(format, version): [contents]}.
  """

  def __init__(self):
    with tempfile.TemporaryDirectory() as directory:
      _in_child(lambda: self._write(directory))
      self.files, self.contents = {}, {}
      for format in checkpoint_files.ENDINGS:  # pylint: disable=redefined-builtin
        for version in range(2):
          at = os.path.join(directory, f"{format}-{version}")
          self.files[format, version] = _tree(at)
          self.contents[format, version] = [
              checkpoint_files.contents(format, os.path.join(at, name))
              for name in inputs_of(format)]

  @staticmethod
  def _write(directory):
    for format in checkpoint_files.ENDINGS:  # pylint: disable=redefined-builtin
      for version in range(2):
        at = os.path.join(directory, f"{format}-{version}")
        os.mkdir(at)
        for i, name in enumerate(inputs_of(format)):
          checkpoint_files.write(format, os.path.join(at, name),
                                 10 * version + i, i == _INPUTS - 1)


def inputs_of(format):  # pylint: disable=redefined-builtin
  return [f"in-{i}{checkpoint_files.ENDINGS[format]}" for i in range(_INPUTS)]


def _tree(directory):
  """{path: bytes} of all files; None for a directory."""
  found = {}
  for at, directories, files in os.walk(directory):
    for name in directories:
      found[os.path.relpath(os.path.join(at, name), directory)] = None
    for name in files:
      with open(os.path.join(at, name), "rb") as file:
        found[os.path.relpath(os.path.join(at, name), directory)] = file.read()
  return found


def _damaged(data, other, rng):
  """Bytes with some damage; `other` are those of another version."""
  data = bytearray(data)
  for _ in range(rng.choice([1, 1, 1, 2, 3])):
    if not data:
      break
    # Most of a file of Keras or HDF5 is in its first and last parts.
    at = int(rng.integers(len(data)))
    size = int(min(len(data) - at, rng.choice([1, 2, 4, 8, 64, 512, 4096])))
    to = int(rng.integers(len(data)))
    how = rng.choice(["flip", "flip", "flip", "byte", "cut", "remove", "repeat",
                      "insert", "swap", "zero", "stale", "empty"],
                     p=[.2, .15, .15, .1, .1,
                        .05, .05, .05, .05, .04, .05, .01])
    if how == "flip":
      data[at] ^= 1 << int(rng.integers(8))
    elif how == "byte":
      data[at] = int(rng.choice([0, 1, 0x7f, 0x80, 0xff, rng.integers(256)]))
    elif how == "cut":
      del data[at:]
    elif how == "remove":
      del data[at:at + size]
    elif how == "repeat":
      data[at:at] = data[at:at + size]
    elif how == "insert":
      data[at:at] = rng.bytes(size)
    elif how == "swap":
      block = data[at:at + size]
      data[at:at + size], data[to:to + size] = data[to:to + size], block
    elif how == "zero":
      data[at:at + size] = bytes(size)
    elif how == "stale":
      data[at:at + size] = other[at:at + size]
    else:
      data.clear()
  return bytes(data)


# Moments


# What the tools call: before and after each call is a moment.
_CALLS = [(os, name) for name in (
    "preadv", "replace", "unlink", "fsync", "open", "rmdir", "mkdir")] + [
        ("builtins", "open"), (h5py.File, "__init__"), (h5py.File, "close"),
        (h5py.Dataset, "read_direct"), (h5py.Group, "create_dataset"),
        (_source.Source, "read"), (_tensorflow.TensorFlowSink, "write"),
        (_h5.H5Sink, "write"), (_sink.Sink, "publish")]


def _some_moment(case):
  # There are about so many in a run.
  return int(case.rng.integers(
      1, 300 if checkpoint_files.ENDINGS[case.format] else 130))


@contextlib.contextmanager
def _at_moment(number, act):
  """Calls `act` once, at a moment of the calls in this block."""
  lock, count = threading.Lock(), 0

  def moment():
    nonlocal count
    with lock:
      count += 1
      is_it = count == number
    if is_it:
      act()

  def watched(function):
    def call(*args, **kwargs):
      moment()
      try:
        return function(*args, **kwargs)
      finally:
        moment()
    return call

  with contextlib.ExitStack() as stack:
    for where, name in _CALLS:
      where = sys.modules[where] if isinstance(where, str) else where
      function = getattr(where, name)
      stack.callback(setattr, where, name, function)
      setattr(where, name, watched(function))
    yield


# One case


class Run:
  """One run of a tool in a directory."""

  def __init__(self, corpus, case, directory):
    self.case = case
    self.corpus = corpus
    self.directory = directory
    self.names = inputs_of(case.format)
    self.files = dict(corpus.files[case.format, 0])
    self.files["previous"] = b"an earlier output"
    self.output_format = "h5" if case.format == "sharded" else case.format
    self.output = self.path("out" + checkpoint_files.ENDINGS[
        self.output_format])
    for name, data in self.files.items():
      self.put(name, data)

  def path(self, name):
    return os.path.join(self.directory, name)

  def put(self, name, data):
    with open(self.path(name), "wb") as file:
      file.write(data)
    os.utime(self.path(name), (_LONG_AGO, _LONG_AGO))
    self.files[name] = data

  @property
  def outputs(self):
    """The names of the files of the output; the last one completes it."""
    name = os.path.relpath(self.output, self.directory)
    if checkpoint_files.ENDINGS[self.output_format]:
      return [name]
    return [name + ending
            for ending in (".made.json", ".data-00000-of-00001", ".index")]

  def tool(self):
    """Runs it; returns the weights of the inputs."""
    paths = [self.path(name) for name in self.names]
    function = self.case.function
    if function == "merge":
      checkpoints.merge(paths, self.output)
    elif function == "weights":
      checkpoints.merge(paths, self.output, _WEIGHTS["weights"])
    elif function == "lawa":
      checkpoints.lawa(paths, self.output, 2)
    elif function == "ema":
      checkpoints.ema(paths, self.output)
    elif function == "posthoc":
      return checkpoints.posthoc(paths, self.output, 0.1).weights
    else:
      with contextlib.redirect_stdout(io.StringIO()):
        command.main(["list", "--variables", *paths])
        command.main(["merge", *paths, "--output", self.output, "--quiet"])
    return _WEIGHTS[function]

  def judged(self, named, versions=(), during=contextlib.nullcontext()):
    """Runs the tool and judges it.

    Args:
      named: The paths one of which an error must name.
      versions: Functions that return contents of inputs that are right, too.
      during: A context in which the tool runs.

    Returns:
      (what became of it, a finding or None).
    """
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
      with during:
        weights = self.tool()
    except BaseException as e:  # pylint: disable=broad-exception-caught
      outcome, finding = "error", self._of_error(e, named)
    else:
      outcome, finding = "right", None
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    if memory << 10 > (_MEMORY_OF_HDF5 if checkpoint_files.ENDINGS[
        self.case.format] else _MEMORY):
      finding = finding or f"takes {memory >> 10} megabytes"
    finding = finding or self._of_files(outcome == "error")
    if outcome == "right" and not finding:
      finding = self.of_numbers(weights, versions)
    return outcome, finding

  def _of_error(self, e, named):
    of_command = isinstance(e, SystemExit) and isinstance(e.code, str)
    if not of_command and type(e) is not ValueError and not (
        isinstance(e, OSError)):
      return "raises " + "".join(traceback.format_exception(e))
    if "Graph execution error" in str(e):
      return "says where in the graph: " + str(e)
    cause = e
    while cause is not None:
      if isinstance(cause, MemoryError):
        return "allocates too much: " + "".join(traceback.format_exception(e))
      cause = cause.__cause__ or cause.__context__
    if not any(path in str(e) for path in named):
      return (f"names none of {[os.path.basename(x) for x in named]}: " +
              "".join(traceback.format_exception(e)))
    return None

  def _of_files(self, failed):
    """What is wrong with the files after the run, or None."""
    there = _tree(self.directory)
    for name in self.outputs:
      data = there.pop(name, None)
      if (data is not None) != (not failed):
        return f"{'leaves' if failed else 'lacks'} {name}"
    if there != self.files:
      return "other files: " + str(sorted(
          name for name in {*there, *self.files}
          if there.get(name, 0) != self.files.get(name, 0)))
    gc.collect()  # Errors are in cycles with what they have open.
    for descriptor in os.listdir("/proc/self/fd"):
      with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(self.directory):
          os.close(int(descriptor))
          return f"leaves {path} open"
    return None

  def of_numbers(self, weights, versions=()):
    """What is wrong with the output, or None."""
    versions = [lambda: self.corpus.contents[self.case.format, 0], *versions]
    try:
      got = checkpoint_files.contents(self.output_format, self.output)
    except Exception as e:  # pylint: disable=broad-exception-caught
      got, found = None, f"an output that cannot be read: {e!r}"
    for version in versions:
      try:
        inputs = version()
        order = range(len(inputs))
        if self.case.function == "posthoc":
          notes = [checkpoint_files.note_of(x) for x in inputs]
          order = sorted(order, key=lambda i: (notes[i]["steps"],
                                               notes[i]["gamma"], i))
        inputs = [inputs[i] for i in order][-len(weights):]
        expected = checkpoint_files.mean(inputs, weights)
        expected.pop(checkpoint_files.NOTE, None)
        if got is None:
          continue
        found = checkpoint_files.difference(got, expected, inputs[-1])
        if found is None:
          return None
      except Exception as e:  # pylint: disable=broad-exception-caught
        found = f"{e!r}, while an input is read"
    return "wrong: " + str(found)

  def as_they_are(self):
    """The contents of the inputs on the disk."""
    return [checkpoint_files.contents(self.case.format, self.path(name))
            for name in self.names]


def _victim(run):
  """A file to harm, and the paths of which an error must name one."""
  rng = run.case.rng
  victim = str(rng.choice(sorted(x for x in run.files if x != "previous")))
  path = run.path(victim)
  # The prefix names a checkpoint of TensorFlow.
  if not checkpoint_files.ENDINGS[run.case.format]:
    return victim, [path.partition(".")[0]]
  # The JSON file names a checkpoint of shards.
  return victim, [path, path.partition(".weights")[0] + ".weights.json"]


def _run_damage(run):
  rng, format = run.case.rng, run.case.format  # pylint: disable=redefined-builtin
  victim, named = _victim(run)
  data = run.files[victim]
  how = rng.choice(["bytes", "missing", "directory", "twin"],
                   p=[.97, .01, .01, .01])
  if how == "bytes":
    run.put(victim, _damaged(data, run.corpus.files[format, 1][victim], rng))
  elif how == "twin":  # The file of another checkpoint.
    run.put(victim, run.corpus.files[format, 1][victim])
  else:
    os.unlink(run.path(victim))
    del run.files[victim]
    if how == "directory":
      os.mkdir(run.path(victim))
      run.files[victim] = None
  # Where nothing is written down that tells damage, it is read as it is.
  versions = ([run.as_they_are] if how == "twin" or
              format in checkpoint_files.WITHOUT_CHECKSUMS else [])
  return run.judged(named, versions)


def _run_change(run):
  rng = run.case.rng
  victim, named = _victim(run)
  path, before = run.path(victim), run.files[victim]
  other = run.corpus.files[run.case.format, 1][victim]
  how = rng.choice(["rewrite", "half", "cut", "replace", "remove", "flip"])
  cut, at = (int(rng.integers(len(before))) for _ in range(2))
  after = {"rewrite": other, "replace": other, "cut": before[:cut],
           "half": other[:cut] + before[cut:], "remove": None,
           "flip": before[:at] + bytes([before[at] ^ 1]) + before[at + 1:]}[how]

  def change():
    if how == "remove":
      _remove(path)
    elif how == "replace":
      _replace(path, after)
    else:
      _write_quietly(path, after)
    run.files[victim] = after
    if after is None:
      del run.files[victim]

  # Before it is opened, a file may become another whole one.
  return run.judged(named, [run.as_they_are], _at_moment(
      _some_moment(run.case), change))


# Not what `_at_moment` watches.
_remove = os.unlink
_open = os.open


def _write_quietly(path, data):
  descriptor = _open(path, os.O_WRONLY | os.O_CREAT, 0o644)
  os.write(descriptor, data)
  os.ftruncate(descriptor, len(data))
  os.close(descriptor)


def _replace(path, data):
  _write_quietly(path + ".new", data)
  os.rename(path + ".new", path)


def _run_race(run):
  victim, named = _victim(run)
  path = run.path(victim)
  versions = [run.corpus.files[run.case.format, v][victim] for v in range(2)]
  write = _write_quietly if run.case.rng.random() < 0.5 else _replace

  def change(end):
    turn = 0
    while not end.is_set():
      turn += 1
      write(path, versions[turn % 2])

  @contextlib.contextmanager
  def racing():
    end = threading.Event()
    thread = threading.Thread(target=change, args=[end])
    thread.start()
    try:
      yield
    finally:
      end.set()
      thread.join()
      _write_quietly(path, versions[0])

  def last():
    _write_quietly(path, versions[1])
    return run.as_they_are()

  return run.judged(named, [last], racing())


def _run_full(run):
  rng = run.case.rng
  pages, limit = int(rng.integers(1, 8)), int(rng.integers(0, 12000))
  if rng.random() < 0.5 and _tmpfs():
    disk = run.path("disk")
    os.mkdir(disk)
    run.files["disk"] = None
    _mount(disk, 4096 * pages)
    run.output = os.path.join(disk, os.path.basename(run.output))
    try:
      return run.judged([run.output])
    finally:
      _libc.umount2(disk.encode(), 2)  # MNT_DETACH
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

  @contextlib.contextmanager
  def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
      yield
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

  return run.judged([run.output], during=limited())


_libc = ctypes.CDLL(None, use_errno=True)
_own_mounts = None


def _tmpfs():
  """Whether this process may mount disks, which only it sees."""
  global _own_mounts
  if _own_mounts is None:
    new_mounts, private = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
    _own_mounts = (_libc.unshare(new_mounts) == 0 and
                   _libc.mount(b"none", b"/", None, private, None) == 0)
    if not _own_mounts:
      print("No disk can be mounted here: limits of file sizes stand for full "
            "disks.", file=sys.stderr, flush=True)
  return _own_mounts


def _mount(path, size):
  if _libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, f"size={size}".encode()):
    raise OSError(ctypes.get_errno(), "a disk cannot be mounted")


def _run_kill(run):
  rng = run.case.rng
  at_call = rng.random() < 0.7
  number, seconds = _some_moment(run.case), 0.02 * rng.random()

  def tool():
    with _at_moment(number if at_call else 0,
                    lambda: os.kill(os.getpid(), signal.SIGKILL)):
      run.tool()

  pid = os.fork()
  if not pid:
    with contextlib.suppress(BaseException):
      tool()
    os._exit(0)
  if not at_call:
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
  _, status = os.waitpid(pid, 0)
  if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
    return "killed", f"crashes with signal {os.WTERMSIG(status)}"
  there = _tree(run.directory)
  for name, data in run.files.items():
    if there.get(name, 0) != data:
      return "killed", f"changes {name}"
  if run.outputs[-1] in there:
    weights = _WEIGHTS.get(run.case.function)
    finding = weights and run.of_numbers(weights)
    if finding:
      return "killed", finding
    for name in run.outputs:
      os.unlink(run.path(name))
  outcome, finding = run.judged([])
  return "killed", finding or (
      None if outcome == "right" else "the next run fails")


_RUN = {"damage": _run_damage, "change": _run_change, "race": _run_race,
        "full": _run_full, "kill": _run_kill}


def run_case(corpus, seed, number, directory):
  """Runs a case; returns (its name, its outcome, a finding or None)."""
  case = case_of(seed, number)
  at = os.path.join(directory, "case")
  os.mkdir(at)
  try:
    outcome, finding = _RUN[case.kind](Run(corpus, case, at))
  finally:
    shutil.rmtree(at)
  return f"{case.kind} {case.format} {case.function}", outcome, finding


# Processes


def _in_child(function):
  pid = os.fork()
  if not pid:
    try:
      function()
      os._exit(0)
    except BaseException:  # pylint: disable=broad-exception-caught
      traceback.print_exc()
    finally:
      os._exit(1)
  if os.waitpid(pid, 0)[1]:
    raise RuntimeError("The files cannot be made.")


class _Worker:
  """A process that runs the cases number `first`, `first + step`, ...

  Attributes:
    number: The case that it runs.
    since: When it began.
    pipe: What it writes to.
  """

  def __init__(self, corpus, seed, first, step, directory, only):
    self.number = first
    self.since = time.monotonic()
    self._directory = tempfile.mkdtemp(dir=directory)
    self._log = os.path.join(self._directory, "log")
    self.pipe, to = os.pipe()
    self.pid = os.fork()
    if self.pid:
      os.close(to)
      self._rest = b""
      return
    try:
      os.close(self.pipe)
      log = open(self._log, "w", encoding="utf-8")
      faulthandler.enable(log)
      faulthandler.register(signal.SIGUSR1, log)
      _limit_addresses()
      gc.freeze()  # A collection takes little time then.
      while True:
        while not only(case_of(seed, first)):
          first += step
        os.write(to, b"%d\n" % first)
        result = run_case(corpus, seed, first, self._directory)
        os.write(to, json.dumps([first, *result]).encode() + b"\n")
        first += step
    except BaseException:  # pylint: disable=broad-exception-caught
      traceback.print_exc()
    finally:
      os._exit(1)

  def results(self):
    """What it has sent: [[number, name, outcome, finding]]; None at its end."""
    data = os.read(self.pipe, 1 << 16)
    if not data:
      return None
    self.since = time.monotonic()
    *lines, self._rest = (self._rest + data).split(b"\n")
    results = []
    for line in map(json.loads, lines):
      if isinstance(line, int):
        self.number = line
      else:
        results.append(line)
    return results

  def is_in_hdf5(self):
    """Whether it hangs in the HDF5 library or has crashed there."""
    with contextlib.suppress(ProcessLookupError):
      os.kill(self.pid, signal.SIGUSR1)
      time.sleep(0.5)
    with open(self._log, encoding="utf-8") as log:
      # _trees calls functions of h5py that are in C.
      return re.search(r'call first\):\n  File ".*(/h5py/|/_trees.py)',
                       log.read()) is not None

  def end(self):
    """Ends it, and says how it has ended before."""
    pid, status = os.waitpid(self.pid, os.WNOHANG)
    if not pid:
      os.kill(self.pid, signal.SIGKILL)
      _, status = os.waitpid(self.pid, 0)
    os.close(self.pipe)
    shutil.rmtree(self._directory, ignore_errors=True)
    return (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status)
            else f"exit status {os.WEXITSTATUS(status)}")


def _limit_addresses():
  with open("/proc/self/statm", encoding="ascii") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
  resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESSES, -1))


class Result(typing.NamedTuple):
  """What a campaign has found.

  Attributes:
    cases: How many cases ran.
    outcomes: Counter of "kind outcome".
    findings: [(number, name, finding)].
  """
  cases: int
  outcomes: collections.Counter
  findings: list


def fuzz(seed, minutes=float("inf"), cases=float("inf"), most=20, first=0,
         workers=None, only=lambda case: True, corpus=None):
  """Runs cases until the time, the number, or `most` findings are reached.

  Args:
    seed: An integer.
    minutes: The time.
    cases: The number of cases.
    most: The number of findings.
    first: The number of the first case.
    workers: The number of processes; by default that of the CPUs.
    only: A function of a Case: whether to run it.
    corpus: The Corpus; by default a new one.

  Returns:
    A Result.
  """
  workers = int(min(workers or len(os.sched_getaffinity(0)), cases))
  memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
  corpus = corpus or Corpus()
  end = time.monotonic() + 60 * minutes
  done, outcomes, findings = 0, collections.Counter(), []

  def found(number, name, finding):
    findings.append((number, name, finding))
    print(f"--seed {seed} --case {number}: {name}: {finding}", file=sys.stderr,
          flush=True)

  with tempfile.TemporaryDirectory(prefix="fuzz-files-", dir=memory) as at:
    start = lambda first: _Worker(corpus, seed, first, workers, at, only)
    running = [start(first + i) for i in range(workers)]
    try:
      while (done < cases and time.monotonic() < end and len(findings) < most):
        ready, _, _ = select.select([w.pipe for w in running], [], [], 1)
        for i, worker in enumerate(running):
          results = worker.results() if worker.pipe in ready else []
          for number, name, outcome, finding in results or ():
            done += 1
            outcomes[f"{name.split()[0]} {outcome}"] += 1
            if finding:
              found(number, name, finding)
          hangs = time.monotonic() - worker.since > HANG
          if results is None or hangs:
            case = case_of(seed, worker.number)
            is_known = case.kind != "full" and worker.is_in_hdf5()
            how = worker.end()
            how = "hangs" if hangs else f"crashes: {how}"
            done += 1
            if is_known:
              outcomes[f"hdf5 {how}"] += 1
              print(f"--seed {seed} --case {worker.number}: HDF5 {how}",
                    file=sys.stderr, flush=True)
            else:
              found(worker.number,
                    f"{case.kind} {case.format} {case.function}", how)
            running[i] = start(worker.number + workers)
    finally:
      for worker in running:
        worker.end()
  return Result(done, outcomes, findings)


def main(argv=None):
  parser = argparse.ArgumentParser(
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--minutes", type=float, default=1)
  parser.add_argument("--seed", type=int,
                      help="default: another one in each run")
  parser.add_argument("--case", type=int, help="the number of the only case")
  parser.add_argument("--most", type=int, default=20,
                      help="the number of findings after which it ends")
  options = parser.parse_args(argv)
  seed = (int.from_bytes(os.urandom(4), "little") if options.seed is None
          else options.seed)
  began = time.monotonic()
  if options.case is None:
    result = fuzz(seed, options.minutes, most=options.most)
  else:
    result = fuzz(seed, cases=1, first=options.case)
  seconds = time.monotonic() - began
  for name, count in sorted(result.outcomes.items()):
    print(f"{count:8} {name}")
  print(f"--seed {seed}")
  print(f"{result.cases} cases in {seconds:.0f} seconds, "
        f"{60 * result.cases / seconds:.0f} per minute, "
        f"{len(result.findings)} findings")
  return 1 if result.findings else 0


if __name__ == "__main__":
  sys.exit(main())
