"""Starts Python processes."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid


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


def printed_by(*args, **kwargs):
  """Runs an interpreter as `run_python` does; returns what it prints."""
  process = run_python(*args, **kwargs)
  assert process.returncode == 0, process.stderr
  return process.stdout


_FORKS = """
import json, os, sys
load, use, settings = sys.argv[1:]
exec(load)
for env in json.loads(settings):
  child = os.fork()
  if not child:
    os.environ.update(env)
    exec(use)
    sys.stdout.flush()
    os._exit(0)  # As TensorFlow takes long to end.
  if os.waitpid(child, 0)[1]:
    sys.exit(f"failed with {env}")
  print(end="\\f", flush=True)
"""


def run_forks(load, use, settings):
  """What code prints with each of some environment variables.

  Args:
    load: Code that runs once: the import of what takes long to load.
    use: Code that runs in a fork of that process for each of the settings.
    settings: Dicts of environment variables.
  """
  return printed_by("-c", _FORKS, load, use, json.dumps(settings)).split(
      "\f")[:-1]


def marked(mark):
  """Ids of the processes that have `mark` in their environment."""
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{pid}/environ", "rb") as f:
        if mark.encode() in f.read():
          found.append(int(pid))
    except OSError:
      pass  # It has ended, or is another user's.
  return found


def wait_until(condition, what):
  """Waits for up to 240 seconds; `what` is not so, or a function tells it."""
  deadline = time.monotonic() + 240
  while not condition():
    assert time.monotonic() < deadline, what() if callable(what) else what
    time.sleep(0.02)


def kill_in_the_middle(module, *args, least, log):
  """Starts a module, kills it, and waits until all that it started has ended.

  Args:
    module: Its name.
    *args: Its arguments.
    least: How many processes it must have become before it is killed.
    log: A file for what it says.
  """
  mark = uuid.uuid4().hex
  with open(log, "w", encoding="utf-8") as err:
    popen = subprocess.Popen(
        [sys.executable, "-m", module, *args], stdout=subprocess.DEVNULL,
        stderr=err, env={**os.environ, "MARK": mark, "PYTHONSAFEPATH": "1"})
    try:
      wait_until(lambda: len(marked(mark)) >= least, "no cluster")
    finally:
      popen.send_signal(signal.SIGKILL)
      popen.wait()
  wait_until(lambda: not marked(mark), "processes are left")
