"""What the variables of chaos_test.py must be, from the logs of the workers.

Books of a period compare the variables at its begin and end with the steps that
the workers have logged. A step is missing from a log if its worker was killed,
or lost its session, before it wrote. A killed worker misses at most one.
"""

import collections
import itertools

import numpy as np

# The gate: what an admitted step adds to the variables, and its limit.
DELTA = {"a": 1.0, "b": -0.5}
LIMIT = 1
# Model averaging: what a step of each worker adds. The means of different sets
# of workers differ. They are integers, and so are the partial results of a
# running mean, because these are multiples of 6.
GAINS = {"a": (6.0, 60.0, 600.0), "b": (-600.0, -6.0, -60.0)}
# Elastic averaging: what a step of each worker adds, and the moving rate. Own
# values after an exchange tell the pull only if the rate is a half.
WALKS = {"a": (1.0, -3.0, 2.0), "b": (-16.0, 32.0, -15.0)}
RATE = 0.5
PERIOD = 2

CENTERS = "global_center_variable/"


class Log:
  """The log of one worker.

  Attributes:
    index: The worker.
    entries: Its lines in this period, as dicts.
    taken: How many steps it has logged since the beginning.
    sessions: How many sessions it has begun since then.
    held: The last hold that it has seen.
    ended: Whether it has stopped as it was told.
  """

  def __init__(self, index):
    self.index = index
    self.entries = []
    self.taken = self.sessions = self.held = 0
    self.ended = self._in_session = False

  def add(self, entry):
    """Adds a line."""
    kind = entry["kind"]
    assert kind != "failed", f"worker {self.index}: {entry['error']}"
    if kind == "start":
      self.end_session()
      self.sessions += 1
      self._in_session = True
    elif kind == "held":
      self.held = entry["number"]
    elif kind == "step":
      self.taken += 1
    elif kind == "end":
      self.ended = True
    else:
      assert kind == "lost", entry
    self.entries.append(entry)

  def end_session(self):
    """A step that was in flight does not come to the log."""
    if self._in_session:
      self.entries.append({"kind": "ended"})
    self._in_session = False

  def steps(self, before=None):
    """The steps among the first entries."""
    return [e for e in self.entries[:before] if e["kind"] == "step"]

  def missing(self, before=None):
    """How many steps may be missing among the first entries."""
    return sum(e["kind"] in ("ended", "lost") for e in self.entries[:before])

  def cut(self):
    """Begins a period."""
    self.entries = []


class Gate:
  """Each admitted step adds DELTA; the gate's counts are those of the logs."""

  names = {**{name: name for name in DELTA}, "step": "global_step",
           "stale_counter": "stale_counter",
           "histogram": "staleness_histogram"}

  def __init__(self):
    self._counts = {}  # By worker: the counts of its session.
    self.admitted = self.dropped = 0

  def balance(self, base, now, logs):
    """Asserts that the books of a period balance.

    Args:
      base: {name: value} at the begin of the period.
      now: At its end: the same, "recorded" and "in_flight" of the gate's step.
      logs: Of the workers.
    """
    logged, seen = np.zeros([2, 64], int), []
    for log in logs:
      for entry in log.entries:
        if entry["kind"] == "start":
          assert sum(entry["admitted"]) == 0, entry
          self._counts[log.index] = np.zeros([2, 64], int)
        elif entry["kind"] == "step":
          counts = np.array([entry["admitted"], entry["dropped"]])
          new = counts - self._counts[log.index]
          self._counts[log.index] = counts
          logged += new
          # Another step of this session may have no line.
          if not any(e["kind"] == "lost" for e in log.entries):
            assert new.min() == 0 and new.sum() == 1, (log.index, entry)
          if new[0].any():
            seen.append(entry["seen"])
    missing = sum(log.missing() for log in logs)
    counted = (np.array(now["histogram"]) - base["histogram"]).astype(int)
    unlogged = counted - logged
    about = (f"\nbase {base}\nnow {now}\nlogged {logged.sum(1)}, and at most "
             f"{missing} more\nseen {sorted(seen)}")
    steps = now["step"] - base["step"]
    aborted = (missing if base["aborted"] is None else
               now["recorded"] - now["step"] - base["aborted"])
    # A part of what is missing never reached the gate, which takes back what
    # was aborted.
    assert unlogged.min() >= -aborted and unlogged.sum() <= missing, (
        f"the gate counted {counted.sum(1)}{about}")
    assert not counted[0, LIMIT + 1:].any(), f"admitted beyond the limit{about}"
    assert now["stale_counter"] - base["stale_counter"] == counted[1].sum(), (
        f"stale_counter is not that of the histogram{about}")
    # A killed worker's update may have come to none, one or all variables, and
    # to the step or not.
    most = steps + aborted
    least = logged[0].sum() - aborted
    assert steps <= counted[0].sum() <= most, (
        f"the gate admitted {counted[0].sum()} updates, and the step is "
        f"{steps}, with {aborted} aborted{about}")
    for name, delta in DELTA.items():
      applied = (now[name] - base[name]) / delta
      assert least <= steps <= applied <= most, (
          f"{name} has {applied} of {least} to {most} updates, and the step "
          f"{steps}{about}")
    assert now["in_flight"] == 0, f"an update did not end{about}"
    # The worker of an update saw all that were admitted before it but LIMIT.
    # So did that of the j-th, in the order of what they saw.
    seen = (np.sort(seen) - base["a"]) / DELTA["a"]
    assert (seen >= np.arange(len(seen)) - LIMIT).all(), (
        f"an update lacked more than {LIMIT} others{about}")
    assert not len(seen) or seen[-1] < most, f"seen too early{about}"
    self.admitted += int(most)
    self.dropped += int(counted[1].sum())

  def forget(self):
    """All sessions have ended."""
    self._counts = {}

  def summary(self):
    return f"{self.admitted} admitted, {self.dropped} dropped"


class Elastic:
  """A center moves by what the workers' variables are pulled by."""

  names = {**{name: CENTERS + name for name in WALKS}, "step": "global_step"}

  def __init__(self):
    self._own = {}  # By worker: its own values and its count of steps.
    self.exchanges = 0

  def balance(self, base, now, logs):
    """As Gate.balance."""
    # `lost` are values before pulls that are not logged.
    pulls, seen, lost = [], [[base[name], now[name]] for name in WALKS], []
    values = [0.0]
    for log in logs:
      walk = np.array([w[log.index] for w in WALKS.values()])
      for entry in log.entries:
        own, count = self._own.get(log.index, (None, 0))
        if entry["kind"] in ("lost", "ended"):
          # The step that is not logged.
          if own is not None and (count + 1) % PERIOD == 0:
            lost.append(own + walk)
          self._own.pop(log.index, None)
        if entry["kind"] == "start":
          self._own[log.index] = np.array(entry["own"]), 0
        elif entry["kind"] == "step":
          new, center = np.array(entry["own"]), np.array(entry["seen"])
          values += [*new, *center]
          before = None if own is None else own + walk
          if entry["count"] % PERIOD == 0:
            pulls.append(new - center)  # The rate is a half.
            for i, x in enumerate(center):
              seen[i].append(x)
            before = None if own is None else before - RATE * (before - center)
          if before is not None:
            assert entry["count"] == count + 1, (log.index, entry)
            # Two roundings, of numbers that are below 2 ** 30.
            assert np.abs(new - before).max() < 2.0 ** -20, (log.index, entry)
          self._own[log.index] = new, entry["count"]
    missing = len(lost)
    steps = now["step"] - base["step"]
    about = f"\nbase {base}\nnow {now}\nexchanges {len(pulls)}, lost {lost}"
    assert len(pulls) <= steps <= len(pulls) + missing, (
        f"{steps} exchanges were counted{about}")
    # Four roundings for each exchange: of the difference, the center, the
    # worker's value and the pull that is computed here.
    roundings = 4 * (len(pulls) + 1) * np.finfo(float).eps * np.abs(
        values + [x for xs in seen for x in xs]).max()
    for i, name in enumerate(WALKS):
      unlogged = now[name] - base[name] - sum(pull[i] for pull in pulls)
      # A lost pull was towards a center of this period, or was none.
      most = max([abs(pull[i]) for pull in pulls] + [0]) * missing
      ends = [(RATE * (own[i] - max(seen[i]) - most),
               RATE * (own[i] - min(seen[i]) + most)) for own in lost]
      least = sum(min(0, low) for low, _ in ends)
      most = sum(max(0, high) for _, high in ends)
      assert least - roundings <= unlogged <= most + roundings, (
          f"{name} moved by {unlogged} more than by the pulls, which must be "
          f"in [{least}, {most}] +- {roundings}{about}")
    self.exchanges += int(steps)

  def forget(self):
    """All sessions have ended."""
    self._own = {}

  def summary(self):
    return f"{self.exchanges} exchanges"


class Rounds:
  """The centers move by the mean gain of those that took part in a round."""

  # By the workers of a round: how the centers move.
  moves = {workers: tuple(float(np.mean([gains[w] for w in workers]))
                          for gains in GAINS.values())
           for n in (1, 2, 3)
           for workers in itertools.combinations(range(3), n)}

  def __init__(self):
    self.rounds = collections.Counter()

  def check(self, logs):
    """Asserts what holds for the logs of a whole training.

    A worker that starts, or has ended a round, has the centers of its place: a
    round and a generation, which begins when the chief restores the centers.
    """
    assert len(set(self.moves.values())) == len(self.moves)
    seen = collections.defaultdict(lambda: collections.defaultdict(
        collections.Counter))
    first = {}
    for log in logs:
      for entry in log.entries:
        if entry["kind"] not in ("start", "step"):
          continue
        round_, generation = entry["place"]
        if round_ < 0:  # It has seen centers that the chief restored just then.
          continue
        seen[generation][round_][tuple(entry["own"])] += 1
        if "restored" in entry:
          restored = entry["restored"] or {}
          first[generation] = round_, entry["step"] - round_
          assert entry["own"] == [restored.get(CENTERS + name, 0)
                                  for name in GAINS], entry
          assert entry["step"] == restored.get("global_step", 0), entry
    assert sorted(seen) == sorted(first), (sorted(seen), first)
    for generation, rounds in seen.items():
      self._check_generation(rounds, first[generation])
    for log in logs:
      # Each round has its step, unless others went on, or the chief restored
      # an earlier one, while the worker read.
      for entry in log.entries:
        if entry["kind"] in ("start", "step") and entry["place"][0] >= 0:
          round_, generation = entry["place"]
          steps = min([first[generation][1] + round_, *(
              sum(first[g]) for g in first if g > generation)])
          assert entry["step"] >= steps, (entry, first)
      # A step sends its values once.
      took_part = sum(n for who, n in self.rounds.items() if log.index in who)
      assert 0 < took_part <= len(log.steps()) + log.missing(), (
          log.index, took_part, len(log.steps()), log.missing())

  def _check_generation(self, seen, first):
    of_move = {move: who for who, move in self.moves.items()}
    numbers = sorted(seen)
    assert numbers[0] == first[0], (numbers, first)
    # A worker that is stopped while it reads has some values of later rounds.
    centers = {r: seen[r].most_common(1)[0][0] for r in numbers}
    for r, last in zip(numbers[1:], numbers):
      move = tuple(c - a for c, a in zip(centers[r], centers[last]))
      # Of some rounds, all workers that took part were killed before they
      # logged them.
      sums = {tuple(map(sum, zip(*moves))): moves for moves in
              itertools.combinations_with_replacement(of_move, r - last)}
      assert move in sums, (
          f"no workers have a mean of {move}: from {centers[last]} in round "
          f"{last} to {centers[r]} in round {r}")
      self.rounds.update(of_move[m] for m in sums[move])
    for r in numbers:
      for own in seen[r]:
        for i, x in enumerate(own):
          assert any(x == centers[n][i] for n in numbers if n >= r), (
              f"a worker has values of no round: {own} in round {r}")

  def summary(self):
    return ", ".join(f"{n} rounds of {list(who)}"
                     for who, n in sorted(self.rounds.items()))
