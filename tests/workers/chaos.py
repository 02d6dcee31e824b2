"""Kills and pauses processes of a cluster that trains, at random times."""

import collections
import json
import os
import pathlib
import random
import signal
import threading
import time
import typing

import numpy as np
import tensorflow as tf

import chaos_books
import chaos_link
import chaos_task
from wrapopt import ops
from wrapopt.examples import _cluster

tf1 = tf.compat.v1
# No wait takes longer: also on a machine with much else to do.
DEADLINE = 180
# By number: the workers. The last one is behind the link.
WORKERS = [("chief", 0), ("worker", 0), ("worker", 1)]
LINK = ("link", 0)
KINDS = {"kill": "killed", "pause": "paused", "stall": "link stalled",
         "drop": "link dropped"}


class Event(typing.NamedTuple):
  """What is done to a process or to the link.

  Attributes:
    kind: One of KINDS.
    victim: (job, number).
    after: Seconds from the end of the event before it.
    down: Seconds until the victim is restarted or resumed.
    during: Another event, during the time that this one's victim is down.
  """
  kind: str
  victim: tuple
  after: float
  down: float
  during: typing.Any = None


def plan(seed, signals, servers=2, links=chaos_link.Link.kinds):
  """A list of events, with so many kills and pauses of processes."""
  rng = random.Random(seed)
  tasks = [*[("ps", i) for i in range(servers)], *WORKERS]

  def event(victims):
    victim = rng.choice(victims)
    kind = rng.choice(links if victim == LINK else ["kill", "kill", "pause"])
    return Event(kind, victim, rng.uniform(0, 1), rng.uniform(0, 1))

  events = []
  while signals > 0:
    first = event([*tasks, LINK])
    signals -= first.victim != LINK
    if signals and first.kind != "kill" and rng.random() < 0.3:
      # While it is paused or down, another process is killed or paused.
      first = first._replace(
          during=event([t for t in tasks if t != first.victim]))
      signals -= 1
    events.append(first)
  return events


class _Cluster(_cluster.Cluster):
  """A cluster whose last worker is behind a link."""

  def __init__(self, servers, new_link):
    super().__init__(chaos_task.FUNCTIONS, preload=["chaos_task"], ps=servers,
                     chief=1, worker=2)
    self._all = [(job, i) for job, addresses in self.spec.items()
                 for i in range(len(addresses))]
    self.link = new_link(self._all, WORKERS[-1])
    self.spec = self._seen_by(WORKERS[0])

  def _seen_by(self, task):
    """The addresses by which a task reaches the others."""
    spec = {job: [] for job in self.spec}
    for other in self._all:
      spec[other[0]].append(self.link.address(task, other))
    return spec

  def _start(self, job, number):
    task = job, number
    self.tasks[task] = self.link.start(
        task, self._context, self._functions, self._seen_by(task))
    return self.tasks[task]

  def __exit__(self, *args):
    super().__exit__(*args)
    self.link.close()


class _Lines:
  """Reads a file that grows."""

  def __init__(self, path):
    self._file = open(path, "rb")  # pylint: disable=consider-using-with
    self._last = b""

  def lines(self):
    """The new lines. A part of a line that is being written comes later."""
    *lines, self._last = (self._last + self._file.read()).split(b"\n")
    return lines

  def close(self):
    self._file.close()


class Chaos:
  """A training whose processes are killed and paused."""

  def __init__(self, subject, folder, servers=2, new_link=chaos_link.Link,
               broken=None, deadline=DEADLINE):
    """Prepares it.

    Args:
      subject: The name of a function of chaos_task.py.
      folder: For its files.
      servers: How many parameter servers there are.
      new_link: Makes the link of the last worker.
      broken: See chaos_task.train.
      deadline: Seconds, of each wait.
    """
    self._subject, self._folder = subject, pathlib.Path(folder)
    self._servers, self._new_link = servers, new_link
    self._broken, self._deadline = broken, deadline
    self._books = {"gate": chaos_books.Gate,
                   "elastic_average": chaos_books.Elastic,
                   "model_average": chaos_books.Rounds}[subject]()
    # The chief of model averaging makes all changes, and logs them.
    self._audits = subject != "model_average"
    self._logs = [chaos_books.Log(i) for i in range(len(WORKERS))]
    self._files = [[] for _ in WORKERS]
    self._killed = set()
    self._steps = {}  # By victim: what its worker had taken when it was hit.
    self._devices = {}  # By name of a variable, on the parameter servers.
    self._lines = self._holds = self._chief_step = 0
    self.signals = collections.Counter()
    self.longest = 0.0, "nothing"
    self.unbalanced = 0  # The number of periods without books.

  def run(self, events):
    """Trains during the events; prints the figures."""
    began = time.monotonic()
    with _Cluster(self._servers, self._new_link) as self._cluster:
      try:
        for task in self._cluster.tasks:
          self._prepare(task)
        for index in range(len(WORKERS)):
          self._train(index)
        self._progress("the start")
        self.longest = 0.0, "nothing"
        if self._audits:
          self._hold()
          self._base = dict.fromkeys(self._books.names, 0)
          self._base["histogram"] = np.zeros([2, 64], int)
          self._base["aborted"] = 0
          self._audit("the start")
          self._release()
        for i, event in enumerate(events):
          self._do(event, f"event {i}: {event}")
        self._stop()
      except BaseException:
        self._tell_all()
        raise
      finally:
        for file in sum(self._files, []):
          file.close()
    if not self._audits:
      self._books.check(self._logs)
    signals = ", ".join(f"{n} {KINDS[kind]} {job}" for (kind, job), n
                        in sorted(self.signals.items()))
    print(f"{self._subject}: {self._books.summary()}; {signals}; "
          f"{self._lines} lines; {self.unbalanced} periods without books; "
          f"the longest wait was {self.longest[0]:.1f} s, for "
          f"{self.longest[1]}; {time.monotonic() - began:.0f} s")

  # Events

  def _do(self, event, what):
    print(what, flush=True)
    sessions = [log.sessions for log in self._logs]
    time.sleep(event.after)
    self._signal(event)
    if event.during:
      time.sleep(event.during.after)
      self._signal(event.during)
      time.sleep(event.during.down)
    time.sleep(event.down)
    done = [e for e in (event, event.during) if e]
    self._poll()
    for e in done:
      if e.victim in self._steps:
        # The step that was in flight, at most.
        assert self._taken(e.victim) <= self._steps[e.victim] + 1, (
            f"{e.victim} trains in spite of {what}")
    self._steps.clear()
    # First: others may wait for those that are paused.
    for e in done:
      if e.kind == "pause":
        os.kill(self._pid(e.victim), signal.SIGCONT)
      elif e.victim == LINK:
        self._cluster.link.tell("up")
    for e in done:
      if e.kind == "kill":
        if self._audits and e.victim == WORKERS[0]:
          self._restart_chief(what)
        elif self._audits and e.victim[0] == "ps":
          self._restart_server(e.victim, what)
        else:
          self._restart(e.victim)
    self._progress(what)
    hit = {self._worker(e.victim) for e in done if e.kind != "pause"}
    new = [log.sessions - n for log, n in zip(self._logs, sessions)]
    servers = any(e.kind == "kill" and e.victim[0] == "ps" for e in done)
    for worker, n in zip(WORKERS, new):
      assert servers or worker in hit or n == 0, (
          f"{worker} lost its session in {what}")
    if self._audits:
      self._hold()
      if servers and new[0] > 1:
        # The chief has restored twice. Who knows in which of the two models
        # the others have taken their first steps?
        self._begin_books(self._state())
        self.unbalanced += 1
      else:
        self._audit(what)
      self._release()

  def _worker(self, victim):
    """The worker that is hit with a victim."""
    return WORKERS[-1] if victim == LINK else victim

  def _taken(self, victim):
    """How many steps the worker has taken that is hit with a victim."""
    return self._logs[WORKERS.index(self._worker(victim))].taken

  def _signal(self, event):
    self.signals[event.kind, event.victim[0]] += 1
    if event.kind == "kill":
      process = self._cluster.tasks[event.victim].process
      self._killed.add(event.victim)
      os.kill(process.pid, signal.SIGKILL)
      process.join(self._deadline)
      assert process.exitcode == -signal.SIGKILL, (event, process.exitcode)
      if event.victim in WORKERS:
        self._poll()
        self._logs[WORKERS.index(event.victim)].end_session()
    elif event.kind == "pause":
      os.kill(self._pid(event.victim), signal.SIGSTOP)
    else:
      self._cluster.link.tell(event.kind)
    if event.victim == LINK or event.victim in WORKERS:
      self._poll()
      self._steps[event.victim] = self._taken(event.victim)

  def _pid(self, task):
    return self._cluster.tasks[task].process.pid

  def _restart(self, task):
    self._within(lambda: self._cluster.restart(*task), f"start of {task}")
    self._killed.remove(task)
    self._prepare(task)
    if task in WORKERS:
      self._train(WORKERS.index(task))

  def _restart_chief(self, what):
    """Restarts the chief while the others wait.

    They would not notice that it restores the variables. So the books are
    closed before, and begin again with the checkpoint.
    """
    self._hold(but=0)
    self._audit(what)
    chief, chief_step = self._logs[0], self._chief_step
    self._restart(WORKERS[0])
    self._hold()
    [start] = [e for e in chief.entries if e["kind"] == "start"]
    restored = self._restored(start)
    now = self._state()
    for name in self._books.names:
      assert np.array_equal(now[name], restored[name]), (name, now, restored)
    if "own" in start:  # Its own variables start from the centers.
      assert start["own"] == [restored[name] for name in chaos_books.WALKS], (
          start, restored)
    assert chief_step <= restored["step"] <= self._base["step"], (
        f"restored a wrong checkpoint: {restored}, of the steps between the "
        f"chief's last one, {chief_step}, and the end, {self._base}")
    self._base = {**restored, "aborted": self._base["aborted"]}
    self._release()

  def _restart_server(self, server, what):
    """Restarts a parameter server; the chief restores, and all go on."""
    base, chief_step, restarted = self._base, self._chief_step, time.monotonic()
    self._restart(server)

    def starts():
      self._poll()
      return [[i for i, e in enumerate(log.entries) if e["kind"] == "start"
               and e["time"] > restarted] for log in self._logs]

    self._wait(lambda: all(starts()), f"new sessions after {what}")
    first = [found[0] for found in starts()]
    restored = self._restored(self._logs[0].entries[first[0]])
    most = sum(len(log.steps(i)) + log.missing(i)
               for i, log in zip(first, self._logs))
    assert chief_step <= restored["step"] <= base["step"] + most, (
        f"restored a wrong checkpoint: {restored}, of the steps between the "
        f"chief's last one, {chief_step}, and at most {most} after {base}")
    for i, log in zip(first, self._logs):
      del log.entries[:i]
    self._books.forget()
    # A server that is still there still knows the updates that were aborted.
    self._base = {**restored, "aborted": 0 if server[1] == 0 else None}

  # The books

  def _restored(self, start):
    """What a chief's session has restored from its checkpoint."""
    return {key: np.array(start["restored"][name])
            for key, name in self._books.names.items()}

  def _state(self):
    """What the variables are now, while all workers are held."""
    def read():
      with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
        variables = {}
        for key, (dtype, shape) in chaos_task.VARIABLES[self._subject].items():
          name = self._books.names[key]
          with tf.device(self._devices[name]):
            variables[key] = tf1.get_variable(name, shape, dtype,
                                              use_resource=True)
        fetches = {key: v.read_value() for key, v in variables.items()}
        if self._subject == "gate":
          fetches["recorded"], fetches["in_flight"] = ops.staleness_record(
              variables["step"])
        with tf1.Session(
            f"grpc://{self._cluster.spec['ps'][0]}",
            config=tf1.ConfigProto(device_filters=["/job:ps"])) as session:
          deadline = time.monotonic() + self._deadline
          while True:
            now = session.run(fetches)
            # A killed worker's update is aborted when its server notices.
            if not now.get("in_flight") or time.monotonic() > deadline:
              return now
            time.sleep(0.05)
    return self._within(read, "read of the variables")

  def _audit(self, what):
    """Closes the books of a period, and begins the next."""
    now = self._state()
    try:
      self._books.balance(self._base, now, self._logs)
    except AssertionError:
      print(f"The books do not balance after {what}.")
      raise
    self._begin_books(now)

  def _begin_books(self, now):
    # Elastic averaging has no such thing.
    self._base = {**now, "aborted": now.get("recorded", now["step"])
                  - now["step"]}
    for log in self._logs:
      log.cut()

  # Waits

  def _prepare(self, task):
    process = self._cluster.tasks[task]
    self._within(lambda: process.ask("prepare", folder=str(self._folder)),
                 f"preparation of {task}")

  def _train(self, index):
    path = self._folder / f"log_{index}_{time.monotonic_ns()}"
    path.touch()
    self._files[index].append(_Lines(path))
    self._cluster.tasks[WORKERS[index]].tell(
        "train", subject=self._subject, index=index, folder=str(self._folder),
        log=str(path), broken=self._broken)

  def _poll(self):
    """Reads what the workers have logged."""
    for index, (log, files) in enumerate(zip(self._logs, self._files)):
      for line in files[-1].lines() if files else ():
        entry = json.loads(line)
        log.add(entry)
        self._lines += 1
        if index == 0 and "step" in entry:
          self._chief_step = entry["step"]
          self._devices = entry.get("devices", self._devices)

  def _wait(self, condition, what):
    began = time.monotonic()
    while not condition():
      if time.monotonic() > began + self._deadline:
        raise TimeoutError(f"no {what} in {self._deadline} seconds")
      for task, process in self._cluster.tasks.items():
        assert task in self._killed or process.process.is_alive(), (
            f"{task} has ended, before {what}")
      time.sleep(0.02)
    self.longest = max(self.longest, (time.monotonic() - began, what))

  def _within(self, function, what):
    """The result of a function, which may hang."""
    results = []

    def call():
      try:
        results.append((function(), None))
      except BaseException as e:  # pylint: disable=broad-except
        results.append((None, e))

    thread = threading.Thread(target=call, daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(self._deadline)
    if not results:
      raise TimeoutError(f"no {what} in {self._deadline} seconds")
    self.longest = max(self.longest, (time.monotonic() - began, what))
    result, error = results[0]
    if error:
      raise error
    return result

  def _progress(self, what):
    """Waits until each worker has taken two more steps."""
    self._poll()
    before = [log.taken for log in self._logs]

    def advanced():
      self._poll()
      return all(log.taken >= n + 2 for log, n in zip(self._logs, before))

    self._wait(advanced, f"steps of all workers after {what}")

  def _hold(self, but=None):
    """Waits until the workers wait between two steps."""
    self._holds += 1
    new = self._folder / "hold_new"
    new.write_text(str(self._holds), encoding="utf-8")
    new.rename(self._folder / chaos_task.HOLD)

    def held():
      self._poll()
      return all(log.held == self._holds for log in self._logs
                 if log.index != but)

    self._wait(held, "end of the workers' steps")

  def _release(self):
    (self._folder / chaos_task.HOLD).unlink()

  def _stop(self):
    # The chief last: the others need it for the end of their round.
    for index in (2, 1, 0):
      (self._folder / chaos_task.STOP.format(index)).touch()

      def ended():
        self._poll()
        return self._logs[index].ended  # pylint: disable=cell-var-from-loop

      self._wait(ended, f"end of worker {index}")

  def _tell_all(self):
    """Prints what all processes do and did."""
    for task, process in self._cluster.tasks.items():
      if process.process.is_alive():
        pid = process.process.pid
        with open(f"/proc/{pid}/status", encoding="utf-8") as f:
          print(task, pid, *[line.strip() for line in f
                             if line.startswith("State")])
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    time.sleep(2)
    stacks = self._folder / chaos_task.STACKS
    if stacks.exists():
      print(stacks.read_text(encoding="utf-8")[-20000:])
    for path in sorted(self._folder.glob("log_*")):
      print(path.name)
      for line in path.read_text(encoding="utf-8").splitlines()[-3:]:
        print(line[:300])
