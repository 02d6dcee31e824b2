"""Processes that are killed while they write snapshots."""

import os
import signal
import subprocess
import sys
import time

import numpy as np

from wrapopt.checkpoints import _formats

# So many that a good part of the time is that of writing them.
_VARIABLES = 200

_CHILD = f"""
VARIABLES = {_VARIABLES}""" + """
import sys
import numpy as np
from wrapopt.checkpoints import _h5, _snapshots, _tensorflow
directory, first = sys.argv[1], int(sys.argv[2])
writer = _snapshots.Snapshots(directory, 1, "float16" if first % 2 else None)
writer.begin(first)
print("ready", flush=True)
for step in range(first, 10**9):
  # Both formats; names come again, so that old snapshots are replaced.
  for ending in ("", ".weights.h5"):
    writer.write(
        lambda path, note, e=ending: (
            _h5.H5Sink if e else _tensorflow.TensorFlowSink)(path + e, note),
        step % 3, None, step, {f"v{i}": (
            np.full((9, 9), step % 1000, np.float32), np.dtype(np.float32))
                               for i in range(VARIABLES)})
"""


def check_whole(directory, variables=_VARIABLES):
  """Checks that all snapshots are whole: gives {(format, step of the average)}.

  All numbers of a snapshot are its step, modulo 1000.
  """
  seen = set()
  if any(name.startswith("snapshot") and "data" not in name
         for name in os.listdir(directory)):
    for path in _formats.expand(directory):
      source = _formats.open_source(path)
      values = [source.read(name) for name in source.specs]
      assert len(values) == variables, path
      assert all((x == source.note["steps"] % 1000).all() for x in values), path
      seen.add((source.kind, source.note["steps"]))
      source.close()
  return seen


def kill_in_a_loop(directory, kills, seconds):
  """Kills writers of snapshots, and looks at what they leave."""
  directory.mkdir()
  seen = set()
  for k in range(kills):
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(directory), str(1000 * k)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONSAFEPATH": "1"})
    assert child.stdout.readline() == b"ready\n"
    for _ in range(2000):
      if len(list(directory.glob("snapshot-*"))) > 3:
        break
      time.sleep(0.01)
    time.sleep(seconds * np.random.default_rng(k).uniform())
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    seen |= check_whole(directory)
  assert {kind for kind, _ in seen} == {"TensorFlow", "HDF5"}
  assert len(seen) > kills
  return directory

