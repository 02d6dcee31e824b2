"""A job of servers and workers that are killed and stopped, and its books."""

import collections
import json
import os

import numpy as np

import local_worker
from local_parts import Child, MOMENTUM, Process, RATE
from processes import wait_until

RULES = {"DiLoCo": (RATE, MOMENTUM), "LocalSGD": (1.0, 0.0)}


class Job:
  """Two servers, and workers that run until the end.

  Attributes:
    names: Those of the workers.
    tasks: {name: Child} of all processes.
  """

  def __init__(self, num_workers, folder, links=None, ports=(0, 0), **settings):
    """Prepares a job; `start_all` starts it.

    Args:
      num_workers: The number of workers.
      folder: For its files.
      links: {name: hosts.Host} of all processes, or None.
      ports: Those of the servers.
      **settings: Fields of local_worker.Settings, but `start_secs`.
    """
    self.folder = str(folder)
    self.names = [f"w{i}" for i in range(num_workers)]
    self.tasks, self._links, self._ports = {}, links or {}, ports
    self._settings = local_worker.Settings(
        [], self.folder, num_workers, **settings)

  def start_all(self):
    for server in "s0", "s1":
      self.start(server)
    self._settings = self._settings._replace(
        servers=[self.tasks[s].address for s in ("s0", "s1")])
    for name in self.names:
      self.start(name)

  def start(self, name, start_secs=0, waits=True):
    """Starts a process, which first sleeps."""
    link = self._links.get(name)
    network = {"namespace": link.pid} if link else {}
    if name in self.names:
      self.tasks[name] = Child(
          local_worker.run, name,
          self._settings._replace(start_secs=start_secs), **network)
    else:
      host = {"host": link.address} if link else {}
      port = self._ports[int(name[1:])]
      self.tasks[name] = Process(port, start_secs=start_secs, waits=waits,
                                 **host, **network)

  def path(self, name):
    return os.path.join(self.folder, name)

  def lines(self, name):
    """The lines of a worker's log, as dicts."""
    try:
      with open(self.path(f"{name}.log"), encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.endswith("\n")]
    except FileNotFoundError:
      return []

  def all_lines(self):
    return sum(map(self.lines, self.names), [])

  def wait_for_counted(self, name, known):
    """Waits until a worker counts in a round, after its first `known` lines."""
    wait_until(lambda: any(line.get("counted")
                           for line in self.lines(name)[known:]),
               lambda: f"{name} does not count; {self.exits()}")

  def exits(self):
    return {name: task.exitcode for name, task in self.tasks.items()}

  def end(self):
    with open(self.path("stop"), "w", encoding="utf-8"):
      pass
    for name in self.names:
      self.tasks[name].join()
      assert self.tasks[name].exitcode == 0, (name, self.exits())

  def close(self):
    for task in self.tasks.values():
      task.kill()


class Books:
  """Reads in the logs of a job's workers what the job has done.

  A place is (round, generation) of a center. The center of a round may be made
  in several generations, if servers lose it.

  Attributes:
    members: {place: names}, of the round that ended with this center.
    ended: {place: when a worker first had this center}.
    momenta_lost: How often a server had a new velocity.
    unseen: The number of rounds whose members no worker could tell.
  """

  def __init__(self, lines, algorithm="DiLoCo"):
    """Asserts what holds for the lines of any job."""
    rate, momentum = RULES[algorithm]
    of_place = collections.defaultdict(list)
    for line in lines:
      of_place[tuple(line["place"])].append(line)
    # By (generation, round), in which they were made.
    places = sorted(of_place, key=lambda place: place[::-1])
    self.members, self.ended, self.sums = {}, {}, {}
    self.momenta_lost = self.unseen = 0
    velocities = {}
    for place in places:
      noted = of_place[place]
      # All workers have the same center, also those that have come back.
      assert len({line["checksum"] for line in noted}) == 1, noted
      self.sums[place] = noted[0]["checksum"]
      self.ended[place] = min(line["time"] for line in noted)
      center = np.array(noted[0]["sample"])
      told = {tuple(line["workers"]) for line in noted if line.get("workers")}
      assert len(told) <= 1, noted
      if not told:  # It was seen after the round, or is the first one.
        before = self._latest(place[0], place)
        if not place[0]:
          velocities[place] = np.zeros_like(center)
        elif before and self.sums[before] == self.sums[place]:
          velocities[place] = velocities.get(before)
        else:
          self.unseen += 1
        continue
      [members] = told
      self.members[place] = members
      for line in noted:
        assert line.get("counted", False) <= (line["name"] in members), line
      before = self._latest(place[0] - 1, place)
      if not before:
        self.unseen += 1
        continue
      velocities[place] = self._check(
          np.array(of_place[before][0]["sample"]), center, members,
          velocities.get(before), rate, momentum)

  def _latest(self, round_, place):
    """The latest place of a round before another place, or None."""
    return max((p for p in self.sums if p[0] == round_ and p != place and
                p[1] <= place[1]), key=lambda p: p[1], default=None)

  def _check(self, before, center, members, velocity, rate, momentum):
    """Asserts that members have moved the center: the new velocity."""
    mean = np.average(
        [local_worker.sample(local_worker.delta(name)) for name in members],
        axis=0, weights=[local_worker.weight(name) for name in members])
    # Roundings of some hundred steps.
    close = 1e-5 * (1 + np.abs(before).max())
    moved = (before - center) / rate
    if not momentum:
      velocity = np.zeros_like(mean)
    elif velocity is None:  # Nobody saw the last round.
      return (moved + mean) / momentum
    new = np.empty_like(mean)
    for part in local_worker.PARTS:
      options = []
      # A server that was lost begins with a velocity of 0.
      for v in velocity[part], np.zeros_like(velocity[part]):
        v = momentum * v - mean[part]
        options.append((np.abs(rate * (momentum * v - mean[part]) -
                               rate * moved[part]).max(), v))
      error, new[part] = options[0] if options[0][0] <= options[1][0] else (
          options[1])
      self.momenta_lost += (options[1][0] < options[0][0] and
                            options[0][0] > close)
      assert error <= close, (
          f"{members} do not move {before} to {center}: they are {error} "
          "apart")
    return new

  def steps(self, since, until):
    """Inner steps that ended in a center: (their number, seconds).

    Of rounds that ended in this time, without those whose center was lost.
    """
    kept = {}
    for place in self.sums:
      if place[0] not in kept or kept[place[0]][1] < place[1]:
        kept[place[0]] = place
    counts, times = 0, []
    for round_, latest in sorted(kept.items()):
      made = [p for p in self.sums if p[0] == round_ and
              self.sums[p] == self.sums[latest]]
      time_ = min(self.ended[p] for p in made)
      if since <= time_ < until:
        if times:
          counts += max(sum(map(local_worker.weight, self.members.get(p, ())))
                        for p in made)
        times.append(time_)
    return counts, times[-1] - times[0] if times else 0
