"""Python in a process of its own."""

import os
import subprocess
import sys


def run_python(*args, python=sys.executable, pythonpath=(), **env):
  """Runs an interpreter, and returns what it printed and how it ended.

  Args:
    *args: Its arguments.
    python: The interpreter.
    pythonpath: Folders to search before those of this process.
    **env: Environment variables.

  Returns:
    A subprocess.CompletedProcess with text output.
  """
  path = [*pythonpath, os.environ.get("PYTHONPATH", "")]
  return subprocess.run(
      [python, *args], capture_output=True, text=True, check=False,
      env={**os.environ,
           "PYTHONPATH": os.pathsep.join(filter(None, path)),
           # Not the current folder: it is the source tree.
           "PYTHONSAFEPATH": "1",
           **env})
