"""Measures what local training loses if its processes and links fail.

    python local_chaos.py --workers 2 4 8 --rates 70 700 --minutes 10

In jobs of two servers and some workers, random processes are killed or stopped,
and their links go down, as a Poisson process. Step efficiency is the number of
inner steps that ended in a center, over that of a job without faults at the
same time. For each rate, jobs of all sizes run at once. Workers mostly sleep in
their inner steps, as if another device computed, so some jobs may share a
machine: two processors have enough of two jobs of four workers.
Killed processes start again at once: in half of the jobs by a fork, and in half
of them they sleep before for as long as a process needs to import TensorFlow.

Links need network namespaces. If there can be none, it says so, and links stay
up.
"""

import argparse
from concurrent import futures
import heapq
import itertools
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import numpy as np

import local_job
import local_worker
from wrapopt.bench import hosts
from wrapopt.examples import _cluster

ROUND_SECS = 3.0
STEPS = 15  # Of the slower workers: 200 ms each, and 100 ms of the others.
# How long a process or link is stopped, in seconds.
DOWN = 1.0, 5.0
# A grace that is longer: a worker that was stopped loses no round.
RULES = {"round_timeout_secs": 15.0, "grace_secs": 6.0, "min_workers": 1}


class Chaos:
  """A job with faults.

  Attributes:
    faults: A list of (time, kind, name).
    ends: The processes that ended without a fault: (time, name, status).
  """

  def __init__(self, num_workers, folder, start_secs, algorithm="DiLoCo",
               has_links=False, seed=0):
    names = ["s0", "s1", *(f"w{i}" for i in range(num_workers))]
    self._hosts = hosts.Hosts(len(names) if has_links else 0)
    self._hosts.__enter__()  # Until `run` ends.
    self._links = dict(zip(names, self._hosts.hosts))
    self._job = local_job.Job(
        num_workers, folder, self._links,
        (2222, 2222) if has_links else _cluster.free_ports(2),
        steps=STEPS, step_secs=ROUND_SECS / STEPS, saves=True,
        algorithm=algorithm, options=RULES)
    self._algorithm = algorithm
    self._names, self._start_secs = names, start_secs
    self._random = random.Random(seed)
    self._kinds = ["kill", "pause", *(["cut"] if has_links else [])]
    self._due, self._order = [], itertools.count()
    self._down = {}  # By name: what resumes it.
    self.faults, self.ends, self.starts = [], [], []

  def run(self, rate, secs):
    """Trains with so many faults in an hour."""
    job = self._job
    try:
      job.start_all()
      for name in job.names:
        # The second round, as the first one waits for the start of all.
        job.wait_for_counted(name, 0)
        job.wait_for_counted(name, len(job.lines(name)))
      self.begun = time.monotonic()
      self.until = self.begun + secs
      if rate:
        self._push(self._next(rate), self._fault, rate)
      self._push(self.until, lambda: None)
      while self._due and self._due[0][0] <= self.until:
        at, _, call, *args = heapq.heappop(self._due)
        while time.monotonic() < at:
          time.sleep(min(0.05, max(at - time.monotonic(), 0)))
          self._restart_ended()
        call(*args)
      self._until_all_count()
      job.end()
    finally:
      job.close()
      self._hosts.__exit__()
    return Result(self, job.all_lines())

  def _push(self, at, call, *args):
    heapq.heappush(self._due, (at, next(self._order), call, *args))

  def _next(self, rate):
    return time.monotonic() + self._random.expovariate(rate / 3600)

  def _fault(self, rate):
    now = time.monotonic()
    self._push(self._next(rate), self._fault, rate)
    kind = self._random.choice(self._kinds)
    up = [n for n in self._names if n not in self._down]
    if not up:
      return
    name = self._random.choice(up)
    self.faults.append((now, kind, name))
    if kind == "kill":
      self._job.tasks[name].kill()
      self._job.start(name, self._start_secs, waits=False)
      self.starts.append((now, name))
      return
    victim = self._job.tasks[name] if kind == "pause" else self._links[name]
    victim.stop()
    self._down[name] = victim
    self._push(now + self._random.uniform(*DOWN), self._resume, name)

  def _resume(self, name):
    self._down.pop(name).resume()

  def _restart_ended(self):
    for name, task in self._job.tasks.items():
      if task.exitcode is not None:
        self.ends.append((time.monotonic(), name, task.exitcode))
        self._job.start(name, self._start_secs, waits=False)

  def _until_all_count(self):
    """Ends the faults, and waits until all workers count."""
    for name in [*self._down]:
      self._resume(name)
    for name in self._job.names:
      known = len(self._job.lines(name))
      local_job.wait_until(
          lambda: (self._restart_ended(),  # pylint: disable=cell-var-from-loop
                   any(line.get("counted")
                       for line in self._job.lines(name)[known:]))[1],
          f"{name} does not count after the faults")


class Result:
  """The figures of a job that has ended.

  Attributes:
    rate: Inner steps in a center, per second.
    pace: The same, over that of rounds that take as long as their steps. If it
      is far below 1 without faults, the machine has too many jobs.
    recoveries: For each worker that was killed, the rounds until it counts: 1
      if it counts in the first one after it has taken the center.
    commits: For each fault and survivor, the seconds until it counts.
  """

  def __init__(self, chaos, lines):
    books = self.books = local_job.Books(lines, chaos._algorithm)
    # A momentum is lost with its server only.
    lost = sum(name[0] == "s" for _, kind, name in chaos.faults
               if kind == "kill")
    assert books.momenta_lost <= lost, (books.momenta_lost, lost)
    self.lost_momenta = books.momenta_lost
    self.faults, self.ends = chaos.faults, chaos.ends
    steps, secs = books.steps(chaos.begun, chaos.until)
    self.rate = steps / secs
    self.pace = self.rate * ROUND_SECS / sum(
        map(local_worker.weight, chaos._job.names))
    self.recoveries, self.commits = [], []
    of = {}
    for line in sorted(lines, key=lambda line: line["time"]):
      of.setdefault(line["name"], []).append(line)
    hits = [(at, name) for at, _, name in chaos.faults] + [
        (at, name) for at, name, _ in chaos.ends]
    for at, name in chaos.starts:
      if name not in of:
        continue
      back = [line for line in of[name] if line["time"] > at]
      counted = next((line for line in back if line.get("counted")), None)
      if counted and not any(at < t < counted["time"] and n == name
                             for t, n in hits):
        self.recoveries.append(counted["place"][0] - back[0]["place"][0])
    for at, _, victim in chaos.faults:
      for name in of:
        counted = next((line["time"] for line in of[name]
                        if line["time"] > at and line.get("counted")), None)
        if name != victim and counted and not any(
            at - DOWN[1] - 10 < t < counted and n == name for t, n in hits):
          self.commits.append(counted - at)
    self._check_checkpoints(lines)

  @staticmethod
  def _check_checkpoints(lines):
    saved = [(line["time"], line["saved"]) for line in lines if "saved" in line]
    for line in lines:
      if "begun" in line:
        least = max((r for at, r in saved if at < line["begun"]), default=0)
        assert line["place"][0] >= least, (
            f"the center fell behind the checkpoint of round {least}: {line}")

  def row(self, control):
    """The columns of a table, with the Result of a job without faults."""
    kinds = [kind for _, kind, _ in self.faults]
    most = lambda xs: f"{max(xs):.1f}" if xs else "-"
    return [f"{kinds.count('kill')} / {kinds.count('pause')} / "
            f"{kinds.count('cut')}", len(self.ends),
            f"{100 * self.rate / control.rate:.1f} %",
            f"{control.pace:.2f}",
            " ".join(f"{n}: {self.recoveries.count(n)}"
                     for n in sorted({*self.recoveries})) or "-",
            f"{np.median(self.commits):.1f}" if self.commits else "-",
            most(self.commits), self.lost_momenta, self.books.unseen]


def import_secs():
  """How long a process takes to import TensorFlow and wrapopt: of three."""
  took = []
  for _ in range(3):
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import tensorflow, wrapopt"],
                   check=True, stderr=subprocess.DEVNULL)
    took.append(time.monotonic() - begun)
  return float(np.median(took))


def main(argv=None):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
  parser.add_argument("--rates", type=float, nargs="+", default=[70, 700],
                      help="faults in an hour, of each job")
  parser.add_argument("--minutes", type=float, default=10,
                      help="of each rate")
  parser.add_argument("--algorithm", choices=local_job.RULES, default="DiLoCo")
  parser.add_argument("--start-secs", type=float, nargs="+",
                      help="by default 0 and what an import takes here")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", help="for the logs of the workers")
  args = parser.parse_args(argv)
  no_links = hosts.missing()
  if no_links:
    print(f"Links stay up: {no_links}", flush=True)
  if args.start_secs is None:
    args.start_secs = [0, import_secs()]
  print(vars(args), flush=True)
  print("| faults an hour | workers | start | kills / pauses / cuts | ended | "
        "efficiency | pace without faults | recovery (rounds: times) | "
        "next commit: median, s | most, s | momenta lost | unseen |",
        flush=True)
  for rate in args.rates:
    cases = list(itertools.product(args.start_secs, args.workers))
    with futures.ThreadPoolExecutor(len(cases) + len(args.workers)) as pool:

      def run(secs, n, faults):
        of_job = pathlib.Path(args.folder or tempfile.mkdtemp(),
                              f"{faults:g}_{rate:g}_{n}_{secs:.0f}")
        of_job.mkdir(parents=True)
        chaos = Chaos(n, of_job, secs, args.algorithm, not no_links,
                      f"{args.seed} {faults} {secs} {n}")
        return pool.submit(chaos.run, faults, 60 * args.minutes)

      controls = {n: run(0, n, 0) for n in args.workers}
      results = [run(*case, rate) for case in cases]
      for (secs, n), result in zip(cases, results):
        print("|", " | ".join(map(str, [
            f"{rate:g}", n, f"{secs:.1f} s",
            *result.result().row(controls[n].result())])), "|", flush=True)


if __name__ == "__main__":
  main()
