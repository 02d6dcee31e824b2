"""The share of the time in which workers compute, by how fast their links are.

Each worker of `wrapopt.DiLoCo` has a host of its own: a network namespace of
Linux, with a server that holds an equal part of the center, and a link to the
other hosts, which `tc` limits to a rate in each direction. Without the right to
make namespaces, all use the loopback device, which has no limit.

The model has 30.8 million numbers of float32, and a round 128 steps: those of a
public measurement of torchft with four GPUs, whose shares are in the table. A
step sleeps, as if a GPU computed: 30 ms. For that measurement this follows from
its shares: with the ring that sums 123 MB over four links, they all say that
128 steps take 3.7 to 4.1 s.

The figures, from the end of the first round to that of the last, means of the
workers:

  computes   the time of the steps divided by all time
  blocks     the median of the milliseconds of `step` that are not computed, of
             those steps in which values are taken or sent
  sent, received
             megabytes of a round that the link of a host has counted
"""

import json
import statistics
import subprocess
import sys
import time

import tensorflow as tf

import wrapopt
from wrapopt import server as server_module
from wrapopt.bench import harness
from wrapopt.bench import hosts as hosts_module

_WORKERS = 4
_VARIABLES, _NUMBERS = 44, 700_000
_STEPS, _STEP_SECS = 128, 0.03
_RATES = (10, 50, 200, 1000)
_PUBLISHED = {50: 0.116, 200: 0.361, 1000: 0.715}  # torchft, by megabits.
_VARIANTS = {
    "plain": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "int4, 120 steps overlap": {"dtype": "int4", "overlap_steps": 120},
    # Workers that have nothing to send reach the most that a machine allows.
    "440 numbers, 120 steps overlap": {"numbers": 10, "overlap_steps": 120}}


def add_arguments(parser):
  harness.add_choice(parser, "variants", _VARIANTS)
  parser.add_argument("--megabits", type=int, nargs="+", metavar="N",
                      default=_RATES, help="megabits a second of a link")


def contests(options):
  missing = hosts_module.missing()
  if missing:
    print(f"All use the loopback device: {missing}", flush=True)
  hosts = _Loopback() if missing else hosts_module.Hosts(_WORKERS)
  with hosts, _Workers(hosts) as workers:
    for rate in ["no limit"] if missing else options.megabits:
      yield _Contest(workers, hosts, rate, options.variants)


class _Loopback:
  """Hosts that are this one."""

  DEVICE, address = "lo", "localhost"

  def __enter__(self):
    self.hosts = [self] * _WORKERS
    return self

  def __exit__(self, *_):
    pass

  def command(self, *command):
    return command

  def shape(self, _):
    pass


class _Contest:
  """One rate of the links: as `harness.Contest`, but variants take long turns.

  Attributes:
    title, facts, results: As there.
  """

  def __init__(self, workers, hosts, rate, variants):
    self.title = f"{_WORKERS} workers, a round of {_STEPS} steps"
    self.facts = {"megabits": str(rate)}
    self._workers, self._hosts, self._rate = workers, hosts, rate
    self._variants = variants

  def measure(self, n_rounds):
    self.results = [{
        **self.facts, "contender": "torchft, published",
        "computes": _PUBLISHED[self._rate], "rounds": n_rounds,
    }] if self._rate in _PUBLISHED else []
    for name in self._variants:
      self._hosts.shape(10_000)  # The first center is not measured.
      self._workers.ask("begin", sync_every=_STEPS, **{
          "numbers": _NUMBERS, **_VARIANTS[name]})
      self._hosts.shape(self._rate)
      of_workers = self._workers.ask("train", rounds=n_rounds)
      self._hosts.shape(10_000)
      self._workers.ask("leave")
      self._workers.ask("drop")
      self.results.append({
          **self.facts, "contender": name,
          **{key: statistics.mean(w[key] for w in of_workers)
             for key in of_workers[0]}, "rounds": n_rounds})
      print(self.results[-1], flush=True)
    return self.results


class _Workers:
  """A context with a process for each worker and for each server."""

  def __init__(self, hosts):
    self._hosts = hosts.hosts

  def __enter__(self):
    self._processes, self._workers = [], []

    def start(host, *arguments):
      self._processes.append(subprocess.Popen(
          host.command(sys.executable, "-m", *arguments),
          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
      return self._processes[-1]

    try:
      servers = [start(host, "wrapopt.server") for host in self._hosts]
      # A server that listens tells its port.
      addresses = [f"{host.address}:{int(server.stdout.readline().split()[-1])}"
                   for host, server in zip(self._hosts, servers)]
      self._workers = [start(host, __name__, str(k), host.DEVICE, *addresses)
                       for k, host in enumerate(self._hosts)]
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_):
    for process in self._processes:
      process.kill()
      process.communicate()

  def ask(self, *told, **arguments):
    """Makes all workers do something at once; returns their answers."""
    for worker in self._workers:
      print(json.dumps([*told, arguments]), file=worker.stdin, flush=True)
    return [json.loads(worker.stdout.readline()) for worker in self._workers]


class _Worker:
  """A worker, in its process."""

  def __init__(self, number, device, *servers):
    self._number, self._device, self._servers = number, device, servers

  def begin(self, numbers, **arguments):
    self._local = wrapopt.DiLoCo(
        [tf.Variable(tf.random.normal([numbers])) for _ in range(_VARIABLES)],
        self._servers, f"worker {self._number}", _WORKERS,
        round_timeout_secs=1200, **arguments)

  def train(self, rounds):
    """Trains until as many rounds have ended after the first; the figures."""
    ends, blocked = [], []
    steps = 0
    while len(ends) <= rounds:
      time.sleep(_STEP_SECS)
      steps += 1
      before, report = time.monotonic(), self._local.report
      self._local.step()
      now = time.monotonic()
      blocked.append(1e3 * (now - before))
      if self._local.report is not report:  # It has taken a center.
        ends.append((now, steps, *self._counted()))
    secs, steps, sent, received = (
        last - first for first, last in zip(ends[0], ends[-1]))
    return {"computes": steps * _STEP_SECS / secs,
            "blocks": statistics.median(sorted(blocked)[-len(ends):]),
            "sent": 1e-6 * sent / rounds, "received": 1e-6 * received / rounds}

  def leave(self):
    self._local.leave()

  def drop(self):
    if self._number == "0":
      server_module.drop(self._servers, "diloco")

  def _counted(self):
    """The bytes that this host's device has sent and received."""
    with open("/proc/net/dev", encoding="utf-8") as file:
      counts, = (line.split() for line in file
                 if line.split()[0] == f"{self._device}:")
    return int(counts[9]), int(counts[1])


def _work(*arguments):
  """A worker's process: does what it is told by lines of its input."""
  tf.config.threading.set_intra_op_parallelism_threads(1)
  worker = _Worker(*arguments)
  for line in sys.stdin:
    name, of_call = json.loads(line)
    print(json.dumps(getattr(worker, name)(**of_call)), flush=True)


if __name__ == "__main__":
  _work(*sys.argv[1:])
