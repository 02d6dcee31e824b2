"""Time and memory of rounds of LocalSGD and DiLoCo as workers grow in number.

Simulated workers, each a thread of this process, take part in rounds of
`wrapopt.DiLoCo` with one server, a process of its own. Each sends 250,000
numbers of float32. They share a session with the server; real ones have one
each, as with --own-sessions. The figures are:

  milliseconds    of a round, for each worker: it sends its values, waits for
                  the end of the round, and takes the center
  x first         the ratio of that to the one of the smallest number
  peak megabytes  memory that the server has more at the peak of a round than
                  before the first one, when it holds a center alone (with
                  --own-sessions: and the first session). It holds a velocity
                  and a mean then, and the values of at most 4 workers
                  (`most_pushes`)
  bytes           how much the peak grows with each worker more than in the
                  smallest number

The values on the server do not grow with the number of workers: a worker sends
its values in its turn, and four read at a time. Calls and answers about members
take some 0.1 MB more for each of 1000 workers. An answer at the end of a round
has all names, so this part grows faster than the number of workers.
"""

from concurrent import futures
import copy
import subprocess
import sys
import threading
import time

import numpy as np
import tensorflow as tf

from wrapopt._local import _job_number
from wrapopt._local import _layout
from wrapopt._local import _member
from wrapopt._local import _server
from wrapopt._local import _settings
from wrapopt.bench import harness

_SIZES = (4, 64, 1000)
_NUMBERS = 250_000
_ARGUMENTS = _member.RoundArguments(
    min_workers=1, round_timeout_secs=300, grace_secs=float("inf"),
    most_pushes=4, learning_rate=0.7, momentum=0.9)


def add_arguments(parser):
  parser.add_argument("--workers", type=int, nargs="+", metavar="N",
                      default=_SIZES, help="numbers of workers")
  parser.add_argument("--own-sessions", action="store_true",
                      help="give each worker a session of its own")


def contests(options):
  first = None
  for n in options.workers:
    contest = harness.Contest(f"{n} workers", {"workers": n}, warm=False)
    with subprocess.Popen(
        [sys.executable, "-m", "wrapopt.server", "--port", "0"],
        stdout=subprocess.PIPE, text=True) as process:
      try:
        port = int(process.stdout.readline().split()[-1])
        job = _Job(f"localhost:{port}", n, process.pid, options.own_sessions)
        contest.add({"DiLoCo": harness.RemoteContender(job.rounds)})
        yield contest
        job.check()
      finally:
        process.kill()
    result, = contest.results
    first = first or {**result, "peak": job.peak}
    result.update(x_first=result["milliseconds"] / first["milliseconds"],
                  peak_megabytes=1e-6 * job.peak)
    if n > first["workers"]:
      result["bytes"] = (job.peak - first["peak"]) / (n - first["workers"])


class _Job:
  """Workers, and a server's process.

  Attributes:
    peak: The most bytes that the server has had in a round, beyond those
      before.
  """

  def __init__(self, address, n, pid, own_sessions):
    layout = _layout.Layout(
        [_settings.Variable("", [_NUMBERS], tf.float32, False)], 1)
    make = lambda: _server.Server(address, "bench", "", "{}", n, layout, 0,
                                  None)
    server = make()
    server.connect()
    self._workers = []
    self._values = np.full(_NUMBERS, 1.0, np.float32)
    self._pid, self.peak = pid, 0
    for k in range(n):
      # A copy has the session.
      of_worker = make() if own_sessions else copy.copy(server)
      of_worker._worker, of_worker._job = f"worker {k}", _job_number.Job(False)
      # A worker whose call fails closes its session, which may be that of all.
      of_worker.close = lambda: None
      self._workers.append(_member.Member(
          of_worker._worker, [of_worker], layout, _ARGUMENTS))
      self._workers[-1].start([np.zeros(_NUMBERS, np.float32)])
      if k == 0 or not own_sessions:
        self._before = self._bytes()

  def _bytes(self):
    """The server's memory that no file backs."""
    with open(f"/proc/{self._pid}/status", encoding="utf-8") as file:
      [line] = [line for line in file if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])

  def _watch(self, ended):
    while not ended.wait(0.005):
      self.peak = max(self.peak, self._bytes() - self._before)

  def rounds(self, calls):
    """Seconds of a round, for each worker."""
    n = len(self._workers)
    ended = threading.Event()
    with futures.ThreadPoolExecutor(n + 1) as pool:
      watch = pool.submit(self._watch, ended)
      start = time.perf_counter()
      try:
        for _ in range(calls):
          for report in pool.map(
              lambda worker: worker.sync([self._values], 1.0), self._workers):
            if len(report.workers) != n:
              raise AssertionError(f"a round of {report.workers}")
        seconds = time.perf_counter() - start
      finally:
        ended.set()  # Otherwise the pool waits for the watch forever.
      watch.result()
    return seconds / (n * calls)

  def check(self):
    """Raises an error unless the workers have the center of DiLoCo."""
    center = velocity = 0.0
    for _ in range(self._workers[0].place[0]):
      way = center - 1.0
      velocity = _ARGUMENTS.momentum * velocity + way
      center -= _ARGUMENTS.learning_rate * (
          way + _ARGUMENTS.momentum * velocity)
    for worker in self._workers:
      harness.check_close("DiLoCo", {
          "the center": (worker.center[0], np.full(_NUMBERS, center), 1e-4)})
