"""A TensorFlow cluster of processes on this machine, which end together.

A process is told what to do by lines of JSON on its standard input, and answers
with lines of JSON. It ends when that input does: so also when the process that
started it is killed.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import threading

import tensorflow as tf

tf1 = tf.compat.v1


class Process:
  """One process of a cluster, seen from the one that started it."""

  def __init__(self, command, env):
    self.name = " ".join(command[1:])
    self.popen = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True)

  def tell(self, **message):
    self.popen.stdin.write(json.dumps(message) + "\n")
    self.popen.stdin.flush()

  def answer(self):
    """The next line that it wrote; raises RuntimeError where it has ended."""
    for line in self.popen.stdout:
      if line.startswith("{"):
        answer = json.loads(line)
        if "error" in answer:
          raise RuntimeError(f"'{self.name}' failed: {answer['error']}")
        return answer
    raise RuntimeError(f"'{self.name}' ended with status {self.popen.wait()}. "
                       "What it wrote to the standard error says why.")

  def ask(self, **message):
    self.tell(**message)
    return self.answer()

  def kill(self):
    self.popen.kill()
    self.popen.wait()
    self.popen.stdin.close()
    self.popen.stdout.close()


class Cluster:
  """Starts a process for each task and ends all of them at exit.

  Attributes:
    spec: {job: [address]}.
    tasks: {(job, number): Process}.
  """

  def __init__(self, command, **jobs):
    """Args:
      command: The arguments of Python that start a task.
      **jobs: How many tasks each job has.
    """
    ports = iter(_free_ports(sum(jobs.values())))
    self.spec = {job: [f"localhost:{next(ports)}" for _ in range(n)]
                 for job, n in jobs.items()}
    self.tasks = {}
    self._command = [sys.executable, *command]

  def __enter__(self):
    # Small operations, on a machine that others of the cluster need as well.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
      env.pop(name, None)
      env.pop(name.upper(), None)
    try:
      for job, addresses in self.spec.items():
        for number in range(len(addresses)):
          self.tasks[job, number] = Process(self._command, env)
      for (job, number), process in self.tasks.items():
        process.tell(spec=self.spec, job=job, number=number)
      for process in self.tasks.values():
        process.answer()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_):
    for process in self.tasks.values():
      process.kill()


def _free_ports(n):
  sockets = [socket.socket() for _ in range(n)]
  try:
    for s in sockets:
      s.bind(("localhost", 0))
    return [s.getsockname()[1] for s in sockets]
  finally:
    for s in sockets:
      s.close()


class Task:
  """This process as a task of a cluster.

  Attributes:
    job: The name of its job.
    number: Its number in it.
    server: Its `tf.distribute.Server`.
  """

  def __init__(self):
    self._messages = queue.Queue()
    threading.Thread(target=self._listen, daemon=True).start()
    first = self._messages.get()
    self.spec, self.job, self.number = (
        first["spec"], first["job"], first["number"])
    self.server = tf.distribute.Server(
        tf.train.ClusterSpec(self.spec), job_name=self.job,
        task_index=self.number, config=tf1.ConfigProto(
            intra_op_parallelism_threads=1, inter_op_parallelism_threads=8))
    self.write(ready=True)

  def _listen(self):
    for line in sys.stdin:
      self._messages.put(json.loads(line))
    # A thread may be inside TensorFlow: no time for goodbyes.
    os._exit(0)

  def messages(self):
    """What this task is told, for as long as somebody is there to tell."""
    while True:
      yield self._messages.get()

  def write(self, **message):
    print(json.dumps(message), flush=True)

  @property
  def device(self):
    return f"/job:{self.job}/task:{self.number}"

  def placement(self):
    """A device function: variables on the parameter servers, the rest here."""
    return tf1.train.replica_device_setter(
        cluster=tf.train.ClusterSpec(self.spec),
        worker_device=self.device)

  def session(self, graph):
    """A session that waits for no other worker, nor fails with one."""
    return tf1.Session(self.server.target, graph=graph, config=tf1.ConfigProto(
        device_filters=["/job:ps", self.device]))
