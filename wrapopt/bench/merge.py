"""Merging checkpoints, compared with a plain loop that moves as many bytes.

Each round reads all inputs twice: in a loop that reads them into one buffer per
thread and writes and syncs as many bytes as the output has; and in
`wrapopt.checkpoints.merge`, in a separate process, whose memory is measured.
Before each of them the files are dropped from the page cache, so that they are
read from the disk. In a file system in memory they stay there.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

from wrapopt import _extras
from wrapopt.bench import harness
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _formats

_AT_ONCE = 4 << 20  # Bytes of a read or a write of the loop.
_FORMATS = {"tensorflow": "", "h5": ".weights.h5"}

_CHILD = """
import json, re, sys, time
from wrapopt import checkpoints
inputs, output = json.loads(sys.argv[1]), sys.argv[2]
# The first session of TensorFlow has a cost that is not the merge's.
checkpoints.merge(sys.argv[3], output + "-first" + sys.argv[4])
def resident(name):
  with open("/proc/self/status") as status:
    return 1024 * int(re.search(name + r":\\s*(\\d+) kB", status.read())[1])
with open("/proc/self/clear_refs", "w") as file:
  file.write("5")  # Resets the peak.
before, start = resident("VmRSS"), time.perf_counter()
checkpoints.merge(inputs, output + sys.argv[4])
print(json.dumps({"seconds": time.perf_counter() - start,
                  "bytes": resident("VmHWM") - before}))
"""


def add_arguments(parser):
  parser.add_argument("--inputs", type=int, default=16, metavar="N",
                      help="how many checkpoints; default %(default)s")
  parser.add_argument("--megabytes", type=int, default=1024, metavar="M",
                      help="of each of them; default %(default)s")
  parser.add_argument(
      "--variables", type=int, default=16, metavar="V",
      help="float32 variables, one of them half of the bytes of all; default "
      "%(default)s")
  harness.add_choice(parser, "formats", _FORMATS)
  parser.add_argument(
      "--directory", metavar="DIR", default=None,
      help="where the checkpoints are for a while; default: that of temporary "
      "files")
  parser.set_defaults(rounds=3)


def contests(options):
  for name in options.formats:
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
      yield from _contest(options, name, directory)


def _sizes(options):
  """Numbers of elements of the variables; one has half of all."""
  total = options.megabytes * 2**20 // 4
  if options.variables == 1:
    return [total]
  return [total // 2] + [total // 2 // (options.variables - 1)] * (
      options.variables - 1)


def _contest(options, name, directory):
  sizes, ending = _sizes(options), _FORMATS[name]
  paths = [os.path.join(directory, f"in-{i}{ending}")
           for i in range(options.inputs)]
  rng = np.random.default_rng(0)
  with _extras.load("tqdm").tqdm(paths, desc=f"{name}: inputs", leave=False
                                 ) as bar:
    for path in bar:
      _write(path, {f"v{k}": rng.random(size, np.float32)
                    for k, size in enumerate(sizes)})
  files = sorted(os.path.join(directory, f) for f in os.listdir(directory))
  small = os.path.join(directory, f"small{ending}")
  _write(small, {"v": np.zeros(3, np.float32)})
  bytes_in = sum(map(os.path.getsize, files))
  bytes_out = bytes_in // options.inputs
  peaks = []

  def loop(_):
    _drop(files)
    output = os.path.join(directory, "plain")
    seconds = _plain(files, output, bytes_out)
    os.remove(output)
    return seconds

  def merge(_):
    _drop(files)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(paths),
         os.path.join(directory, "out"), small, ending],
        check=True, stdout=subprocess.PIPE, text=True, env={
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONSAFEPATH": "1"})
    found = json.loads(done.stdout.splitlines()[-1])
    peaks.append(found["bytes"])
    for file in os.listdir(directory):
      if file.startswith("out"):
        os.remove(os.path.join(directory, file))
    return found["seconds"]

  contest = harness.Contest(
      f"{options.inputs} checkpoints of {options.megabytes:,} MB",
      {"format": name, "inputs": options.inputs,
       "megabytes": options.megabytes}, peers={"of_limit": "loop"},
      figure="seconds", warm=False)
  contest.add({"loop": harness.RemoteContender(loop),
               "merge": harness.RemoteContender(merge)})
  yield contest
  _, merged = contest.results
  merged.update(
      rate=bytes_in / merged["seconds"], bytes_in=bytes_in,
      peak_megabytes=max(peaks) / 1e6,
      of_largest=max(peaks) / (max(sizes) * 4))


def _write(path, values):
  sink = _formats.format_of(path).Sink(path)
  try:
    for name, value in values.items():
      sink.write(name, value)
    sink.publish()
  finally:
    sink.discard()


def _drop(files):
  """Drops files from the page cache."""
  for file in files:
    descriptor = os.open(file, os.O_RDONLY)
    try:
      os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
      os.close(descriptor)


def _plain(files, output, bytes_out):
  """Seconds to read files, and to write and sync that many bytes."""

  def read(file):
    buffer = np.empty(_AT_ONCE, np.uint8)
    with open(file, "rb", buffering=0) as f:
      while f.readinto(buffer):
        pass

  def write():
    with open(output, "wb", buffering=0) as f:
      for _ in range(0, bytes_out, _AT_ONCE):
        f.write(block)
    _files.to_disk(output)

  block = os.urandom(_AT_ONCE)
  start = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(harness.threads() + 1) as pool:
    writing = pool.submit(write)
    list(pool.map(read, files))
    writing.result()
  return time.perf_counter() - start
