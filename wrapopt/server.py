"""`python -m wrapopt.server` holds a part of the center of local training.

It also lists and drops the jobs of servers.
"""

import argparse
import os
import signal
import sys
import threading
import time

import tensorflow as tf

import wrapopt  # Loads the ops. pylint: disable=unused-import
from wrapopt import _checks
from wrapopt._local import _jobs
from wrapopt._local import _server

_DAY_SECS = 24 * 3600
# How often a server looks for jobs that are old.
_LOOK_SECS = 3600.0


def start(port=0):
  """Starts a server in this process.

  Args:
    port: The port to listen at; 0 for a free one.

  Returns:
    A `tf.distribute.Server`. Keep it: the server ends with it.

  Raises:
    ValueError: If `port` is not in [0, 65535].
    OSError: If the server cannot listen at the port.
  """
  # TensorFlow takes the last 16 bits of others.
  if not 0 <= _checks.integer("port", port) <= 65535:
    raise ValueError(f"`port` must be in [0, 65535], 0 for a free one, got "
                     f"{port}.")
  config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
  try:
    return tf.distribute.Server({"server": [f"localhost:{port}"]},
                                job_name="server", task_index=0, config=config)
  except tf.errors.UnknownError as e:
    raise OSError(
        f"The server cannot listen at port {port}: another process uses it, or "
        "this user may not. End that process, or give another port or 0 for a "
        f"free one. Got: {e.message}") from None


def drop(servers, name):
  """Drops a job, with its center, from servers.

  End its workers first: a worker that goes on gives its center back, as it does
  to a server that was restarted.

  Args:
    servers: The addresses of the servers.
    name: The name of the job.

  Returns:
    Whether a server had it.
  """
  _server.check_addresses(servers)
  return any([_jobs.drop_job(address, name) for address in servers])


def drop_idle(address, secs):
  """Drops a server's jobs that no worker has called for: a list of names."""
  return [part.name for part in _jobs.parts(address).values()
          if part.idle_secs > secs and _jobs.drop(address, part.name)]


def main():
  """Runs a command."""
  parser = argparse.ArgumentParser(
      prog="python -m wrapopt.server",
      description="Holds a part of the center of wrapopt.LocalSGD and "
      "wrapopt.DiLoCo. It is a server of TensorFlow: it listens at all "
      "addresses of the machine, and every process that can reach its port may "
      "run any op in it, such as those that read and write files. So let only "
      "the workers reach it: by a firewall, in a network (or a network "
      "namespace) of their own, or through a tunnel such as SSH's, with the "
      "port closed to all others.")
  parser.add_argument("--port", type=int, default=0,
                      help="the port; by default a free one")
  parser.add_argument("--keep-days", type=float, default=7, metavar="DAYS",
                      help="how long to keep a job that no worker calls for; "
                      "7 by default")
  commands = parser.add_subparsers(
      dest="command", title="commands for servers that run")
  lists = commands.add_parser("list", help="list the jobs of servers")
  drops = commands.add_parser(
      "drop", help="drop a job, whose workers have ended, with its center")
  drops.add_argument("name", help="the name of the job")
  for command in lists, drops:
    command.add_argument("servers", nargs="+", metavar="HOST:PORT")
  args = parser.parse_args()
  if not args.keep_days > 0:
    parser.error(f"--keep-days must be more than 0, got {args.keep_days}")
  if not args.command:
    try:
      server = start(args.port)
    except (OSError, ValueError) as e:
      parser.error(str(e))
    return _serve(server, args.keep_days)
  try:
    if args.command == "list":
      _list(args.servers)
    elif not drop(args.servers, args.name):
      sys.exit(f"no server has a job named {args.name!r}")
  except tf.errors.OpError as e:
    sys.exit(f"a server of {', '.join(args.servers)} does not answer: {e}")


def _list(servers):
  for address in servers:
    print(f"{address}:")
    for part in _jobs.parts(address).values():
      print(f"  {part.name}: round {part.place[0]}, {part.bytes / 1e6:.2f} MB, "
            f"idle for {part.idle_secs} s")
      for line in part.settings.split("\n"):
        print("    " + line.replace("\t", " "))


def _serve(server, keep_days):
  """Serves until SIGTERM or SIGINT."""
  ended = threading.Event()
  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda *_: ended.set())
  port = server.target.rpartition(":")[2]
  print(f"wrapopt server listens at port {port}", flush=True)
  looked = time.monotonic()
  while not ended.wait(1.0):  # Without a limit, no signal would be handled.
    if time.monotonic() > looked + _LOOK_SECS:
      looked = time.monotonic()
      try:
        dropped = drop_idle(server.target, keep_days * _DAY_SECS)
      except tf.errors.OpError:
        continue  # It is busy.
      for name in dropped:
        print(f"wrapopt server drops {name}, idle for {keep_days} days",
              flush=True)
  print("wrapopt server ends", flush=True)
  sys.stdout.flush()
  # TensorFlow cannot stop a server that has sessions.
  os._exit(0)


if __name__ == "__main__":
  main()
