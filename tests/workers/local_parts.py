"""The rule of DiLoCo in NumPy, and servers in processes of their own."""

import collections
import ctypes
import itertools
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import tensorflow as tf

import codes
import wrapopt
from wrapopt import server

RATE, MOMENTUM = 0.7, 0.9
_NEW_NET = 0x40000000  # CLONE_NEWNET


class Oracle:
  """The rule in NumPy float64."""

  def __init__(self, center, rate=RATE, momentum=MOMENTUM):
    self.center = np.float64(center)
    self.velocity = np.zeros_like(self.center)
    self.rate, self.momentum = rate, momentum

  def end_round(self, values, weights):
    mean = np.average(np.float64(values), axis=0, weights=weights)
    way = self.center - mean
    self.velocity = self.momentum * self.velocity + way
    self.center = self.center - self.rate * (
        way + self.momentum * self.velocity)
    return self.center


class CodedOracle:
  """The rule with codes, in the arithmetic of workers and servers: float32.

  Attributes:
    center: A vector, which the servers divide between them.
    errors: What the codes of each worker have lost, by name.
    lost: What the codes of the servers have lost.
    velocity: That of the outer steps.
  """

  def __init__(self, center, dtype, num_servers, rate=RATE, momentum=MOMENTUM):
    self.center = np.float32(center)
    size = len(self.center)
    bounds = [-(-size * s // num_servers) for s in range(num_servers + 1)]
    self._parts = [slice(*x) for x in itertools.pairwise(bounds)]
    self.errors = collections.defaultdict(lambda: np.zeros_like(self.center))
    self.lost = np.zeros_like(self.center)
    self.velocity = np.zeros_like(self.center)
    self._dtype = dtype
    self._rate, self._momentum = np.float32(rate), np.float32(momentum)

  @property
  def bytes(self):
    """The size of a code."""
    return sum(len(codes.encode(self.center[part], self._dtype)[0])
               for part in self._parts)

  def end_round(self, values, weights, got):
    """Ends a round. On each server, members arrive in an order of their own.

    Args:
      values: Those of the members, by name.
      weights: Their weights.
      got: [center, velocity, lost] of the servers, which orders must give.
    """
    for part in self._parts:
      sent = {}
      for name, x in values.items():
        _, sent[name], self.errors[name][part] = codes.encode_values(
            x[part], self.center[part], self.errors[name][part], self._dtype)
      ends = [self._end(part, [(sent[name], weights[name]) for name in order])
              for order in itertools.permutations(values)]
      of_part = [x[part].tobytes() for x in got]
      if of_part not in [[x.tobytes() for x in end] for end in ends]:
        np.testing.assert_array_equal([x[part] for x in got], ends[0])
        raise AssertionError(f"no order of {[*values]} gives these bits")
    self.center, self.velocity, self.lost = got

  def _end(self, part, sent):
    """(center, velocity, lost) of a server, of values and their weights."""
    mean, total = np.zeros_like(self.center[part]), 0.0
    for value, weight in sent:
      total += weight
      by = np.float32(weight / total)
      mean = value if by == 1 else mean + by * (value - mean)
    velocity, update = self.velocity[part], mean
    if (self._rate, self._momentum) != (1, 0):
      velocity = self._momentum * velocity - mean
      update = 0 - (self._rate * -mean + self._momentum * velocity * self._rate)
    _, moved, lost = codes.encode_values(
        update, np.float32(0), self.lost[part], self._dtype)
    return self.center[part] + moved, velocity, lost


def run_all(*functions):
  """Runs functions in threads: the list of their results."""
  results = [None] * len(functions)

  def run(i):
    try:
      results[i] = functions[i]()
    except Exception as e:  # pylint: disable=broad-exception-caught
      results[i] = e

  threads = [threading.Thread(target=run, args=(i,))
             for i in range(len(functions))]
  for t in threads:
    t.start()
  for t in threads:
    t.join(120)
    assert not t.is_alive(), "a worker waits for ever"
  for result in results:
    if isinstance(result, Exception):
      raise result
  return results


# Processes are forked from one that has imported TensorFlow.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["wrapopt.server", __name__])


class Child:
  """A process, which may be killed, stopped and resumed.

  Attributes:
    namespace: The process whose network it has, or None.
  """

  def __init__(self, target, *args, namespace=None):
    self._process = FORKS.Process(
        target=_run, args=(namespace, target, args), daemon=True)
    self._process.start()

  @property
  def pid(self):
    return self._process.pid

  @property
  def exitcode(self):
    """Its status when it has ended, of a signal less than 0; else None."""
    return self._process.exitcode

  def join(self, secs=60):
    self._process.join(secs)

  def stop(self):
    os.kill(self.pid, signal.SIGSTOP)

  def resume(self):
    os.kill(self.pid, signal.SIGCONT)

  def kill(self):
    self._process.kill()
    self._process.join()


def _run(namespace, target, args):
  if namespace:
    _join(namespace)

  def end():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=end, daemon=True).start()
  target(*args)


def _join(pid):
  """Moves this process, which has one thread, to the network of another."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f"/proc/{pid}/ns/net", "rb") as f:
    if libc.setns(f.fileno(), _NEW_NET):
      raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Process(Child):
  """A server, on a port of its own."""

  def __init__(self, port=0, host="localhost", start_secs=0, waits=True,
               namespace=None):
    pipe, end = FORKS.Pipe()
    super().__init__(_serve, port, start_secs, end, namespace=namespace)
    end.close()
    self._pipe = pipe  # The server tells its port when it listens.
    self.port = pipe.recv() if waits else port
    self.address = f"{host}:{self.port}"


class Servers:
  """Servers, and what else is started, until the end of a `with` block.

  Attributes:
    addresses: A list.
  """

  def __init__(self, number=2):
    self._processes, self._others = [Process() for _ in range(number)], []
    self.addresses = [p.address for p in self._processes]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for p in self._others + self._processes:
      p.kill()

  def start(self, target, *args):
    """Starts a process: it, and the other end of the pipe, its last argument.
    """
    pipe, end = FORKS.Pipe()
    self._others.append(Child(target, *args, end))
    end.close()
    return self._others[-1], pipe

  def __getitem__(self, i):
    return self._processes[i]

  def restart(self, i=0):
    """Kills one, and starts another on its port."""
    self[i].kill()
    self._processes[i] = Process(self[i].port)


def _serve(port, start_secs, pipe):
  time.sleep(start_secs)
  started = server.start(port)
  pipe.send(int(started.target.rpartition(":")[2]))
  while True:
    time.sleep(1)


def steps_of(local):
  """How many steps a LocalTraining has counted since its last round."""
  return local._counts[0] if local._counts else int(local._steps)


def wait_alone(traced, address, overlap_steps, pipe):
  """A worker that waits for another until it is interrupted.

  Sends the name of the exception, then what the worker has of its round. With
  `overlap_steps`, it sends "waits" first, and its program then ends.
  """
  w = tf.Variable([1.0, 2.0])
  local = wrapopt.LocalSGD([w], [address], "alone", 2, 1 + overlap_steps,
                           round_timeout_secs=600, overlap_steps=overlap_steps)

  def train():
    for i in tf.range(3 + 2 * overlap_steps):
      w.assign_add([1.0, 1.0])
      if overlap_steps and i == 2 * overlap_steps:
        tf.py_function(lambda: pipe.send("waits"), [], [])
      local.step()

  try:
    (tf.function(train) if traced else train)()
  except BaseException as e:  # pylint: disable=broad-exception-caught
    pipe.send(type(e).__name__)
  pipe.send((w.numpy().tolist(), steps_of(local), local.round))
