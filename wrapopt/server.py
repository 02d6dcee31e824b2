"""`python -m wrapopt.server` holds a part of the center of local training."""

import argparse
import os
import signal
import sys
import threading

import tensorflow as tf

import wrapopt  # Loads the ops. pylint: disable=unused-import
from wrapopt import _checks


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


def main():
  """Serves until SIGTERM or SIGINT."""
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
  port = parser.parse_args().port
  ended = threading.Event()
  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda *_: ended.set())
  try:
    server = start(port)
  except (OSError, ValueError) as e:
    parser.error(str(e))
  port = server.target.rpartition(":")[2]
  print(f"wrapopt server listens at port {port}", flush=True)
  while not ended.wait(1.0):  # Without a limit, no signal would be handled.
    pass
  print("wrapopt server ends", flush=True)
  sys.stdout.flush()
  # TensorFlow cannot stop a server that has sessions.
  os._exit(0)


if __name__ == "__main__":
  main()
