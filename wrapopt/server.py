"""`python -m wrapopt.server` holds a part of the center of local training."""

import argparse
import os
import signal
import sys
import threading

import tensorflow as tf

import wrapopt  # Loads the ops. pylint: disable=unused-import


def start(port=0):
  """Starts a server in this process.

  Args:
    port: The port to listen at; 0 for a free one.

  Returns:
    A `tf.distribute.Server`. Keep it: the server ends with it.
  """
  config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
  return tf.distribute.Server({"server": [f"localhost:{port}"]},
                              job_name="server", task_index=0, config=config)


def main():
  """Serves until SIGTERM or SIGINT."""
  parser = argparse.ArgumentParser(
      prog="python -m wrapopt.server",
      description="Holds a part of the center of wrapopt.LocalSGD and "
      "wrapopt.DiLoCo. It trusts every process that can reach its port: run it "
      "in a private network.")
  parser.add_argument("--port", type=int, default=0,
                      help="the port; by default a free one")
  args = parser.parse_args()
  ended = threading.Event()
  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda *_: ended.set())
  server = start(args.port)
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
