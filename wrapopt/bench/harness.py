"""The harness of the benchmarks: contests and timing.

A benchmark yields contests. A contest has contenders that do the same work,
each in a mode; the harness measures them in turns.
"""

import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import random
import re
import statistics
import time

import numpy as np
import tensorflow as tf

from wrapopt import _extras
from wrapopt import _native
from wrapopt.bench import sets
from wrapopt.bench import stream_limit
from wrapopt.bench import tables


def threads():
  """The size of TensorFlow's intra-op thread pool."""
  return (tf.config.threading.get_intra_op_parallelism_threads()
          or len(os.sched_getaffinity(0)))


def environment():
  """Facts about this process that affect the figures."""
  # pylint: disable=g-import-not-at-top
  from wrapopt.version import __version__
  torch = ({"PyTorch": importlib.metadata.version("torch")}
           if importlib.util.find_spec("torch") else {})
  gpus = [tf.config.experimental.get_device_details(gpu)["device_name"]
          for gpu in tf.config.list_physical_devices("GPU")]
  return {
      "wrapopt": __version__, "TensorFlow": tf.__version__, **torch,
      "kernels": _native.cpu_isa(), "threads": threads(),
      "processor": _processor(), **({"GPU": gpus} if gpus else {}),
      # If it is above 0 at the start, other work uses the processor.
      "load": round(os.getloadavg()[0], 2)}


def busy_cores(seconds=0.5):
  """The number of cores that other work uses, while this process sleeps."""
  before = _busy_ticks()
  time.sleep(seconds)
  return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks():
  with open("/proc/stat", encoding="utf-8") as f:
    # user, nice, system, idle, iowait, irq, softirq, steal: see proc(5).
    ticks = [int(x) for x in f.readline().split()[1:9]]
  return sum(ticks) - ticks[3] - ticks[4]


def _processor():
  with open("/proc/cpuinfo", encoding="utf-8") as f:
    found = re.search(r"^model name\s*: (.*)", f.read(), re.M)
  return found[1] if found else platform.machine()


def add_choice(parser, name, choices, default=None, what=""):
  """Adds an option whose values are some of `choices`, by default all."""
  default = list(default or choices)
  parser.add_argument(
      f"--{name}", nargs="+", choices=list(choices), metavar="NAME",
      default=default, help=f"{what or name}, of " +
      f"{', '.join(map(repr, choices))}; default " + (
          "all" if default == list(choices) else ", ".join(default)))


def add_sets(parser):
  add_choice(parser, "sets", sets.VARIABLE_SETS, what="the sets of variables")


def run(contests, n_rounds):
  """Measures contests, prints their tables and returns their results.

  Args:
    contests: An iterable of contests. Those in a row with one title are in one
      table. A generator may add figures to `results` after the contest.
    n_rounds: The number of turns of each contender.
  """
  results = []
  for title, group in itertools.groupby(contests, lambda c: c.title):
    of_title, facts = [], {}
    for contest in group:
      of_title += contest.measure(n_rounds)
      facts = contest.facts
    print(f"\n{title}\n{tables.text(of_title, facts)}", flush=True)
    results += of_title
  return results


class Contest:
  """Contenders that do the same work, and how they are compared.

  Attributes:
    title: The line above the table.
    facts: {name: value} that all results have in common.
    results: Dicts, one for each contender, once it is measured.
  """

  def __init__(self, title, facts, peers=None, expected=None, streams=None,
               figure="milliseconds", **how):
    """Makes a contest without contenders.

    Args:
      title: The line above the table.
      facts: {name: value}.
      peers: {figure: contender of the same mode, or a list of (mode, contender)
        of which the fastest counts}. A figure "x_..." is the ratio of the times
        of a contender and its peer, "of_..." that of their speeds.
      expected: As in `check`: how `add` checks contenders.
      streams: The shapes of what a step reads and writes, if it is compared
        with the streaming limit. It reads one array of each more than it
        writes.
      figure: How the time of a call is given: "milliseconds", or
        "steps_per_second".
      **how: Other arguments of `alternate`.
    """
    self.title, self.facts, self.results = title, facts, []
    self._peers, self._expected, self._streams = peers or {}, expected, streams
    self._figure, self._how = figure, how
    self._contenders, self._written, self._places = {}, {}, []
    self._start = time.monotonic()
    gc.collect()  # Arrays of the last contest.

  def add(self, contenders, place=None, state=None, mode=None, written=None):
    """Adds contenders, after a check.

    Args:
      contenders: {name: function of no arguments, or RemoteContender}.
      place: A function that makes new arrays.
      state: As in `check`; None if there is nothing to check.
      mode: How they are run; None if there is one way.
      written: {name: the number of arrays of each shape that it writes}, of
        those that are compared with the streaming limit.
    """
    if state is not None:
      check({f"{mode}, {name}" if mode else name: call
             for name, call in contenders.items()},
            state, self._expected, place)
    for name, call in contenders.items():
      self._contenders[mode, name] = call
      if name in (written or ()):
        self._written[mode, name] = written[name]
    if place is not None:
      self._places.append(place)
    # A case may take minutes before its table.
    print(f"{self._label()}: {mode or len(contenders)} ready, "
          f"{time.monotonic() - self._start:.0f} s", flush=True)

  def measure(self, n_rounds):
    """Measures the contenders, frees them and returns the results."""
    limits, places = self._limits()
    seconds = alternate({**limits, **self._contenders}, n_rounds, self._label(),
                        places=[*places, *self._places], **self._how)
    self._contenders.clear()
    self._places.clear()
    gc.collect()

    def fastest(keys):
      return min((seconds[key] for key in keys if key in seconds),
                 key=statistics.median, default=None)

    for (mode, name), times in seconds.items():
      written = self._written.get((mode, name))
      median = statistics.median(times)
      result = {**self.facts, **({"mode": mode} if mode else {}),
                "contender": name, self._figure: (
                    1e3 * median if self._figure == "milliseconds" else
                    1 / median), "spread": spread(times)}
      if written is not None:
        result["gigabytes_per_second"] = (
            4e-9 * sum(sets.sizes(self._streams)) * (1 + 2 * written) / median)
        result["of_limit"] = speedup(times, seconds[_limit(written)])
      for what, peer in self._peers.items():
        peer = (seconds.get((mode, peer)) if isinstance(peer, str) else
                fastest(peer))
        if peer is not None:
          result[what] = (speedup(peer, times) if what.startswith("x_") else
                          speedup(times, peer))
      self.results.append({**result, "rounds": n_rounds})
    return self.results

  def _label(self):
    return ", ".join(map(str, self.facts.values()))

  def _limits(self):
    """{key: function that makes a pass}, [function that makes new arrays].

    A pass only adds, to as many arrays as contenders write.
    """
    counts = sorted(set(self._written.values()))
    made, passes = {}, {}

    def place():
      made.clear()  # Free the old arrays first.
      read, *written = sets.streams(self._streams, 1 + counts[-1])
      for n in counts:
        made[n] = stream_limit.StreamLimit([read], written[:n])

    for n in counts:
      passes[_limit(n)] = functools.partial(
          lambda n: made[n].run(threads()), n)
      self._written[_limit(n)] = n
    return passes, [place] if counts else []


def _limit(arrays):
  return None, f"streaming limit, {arrays} array{'s' * (arrays > 1)}"


def check(contenders, state, expected, place=None):
  """Raises an error unless each contender does what is expected.

  Args:
    contenders: {name: function}.
    state: A function that returns {what: array}.
    expected: A function of the name and of the states before and after it, in
      float64, that returns {what: (array, tolerance)}.
    place: A function that sets the initial state.
  """
  read = lambda: {what: np.array(x, np.float64) for what, x in state().items()}
  for name, call in contenders.items():
    if place is not None:
      place()
    before = read()
    call()
    after = read()
    check_close(name, {
        what: (after[what], want, tolerance)
        for what, (want, tolerance) in expected(name, before, after).items()})


def check_close(name, compared):
  """Raises an error unless, of each {what: (got, want, tolerance)}, all agree.

  `name` is the contender's.
  """
  for what, (got, want, tolerance) in compared.items():
    error = np.abs(np.subtract(got, want)).max()
    if not error <= tolerance:
      raise AssertionError(f"{name}: {what} must be off by at most "
                           f"{tolerance:.3g} after a step, got {error:.3g}.")


def in_session(make):
  """Contenders in a v1 session, as arguments of `Contest.add`.

  Args:
    make: A function that makes the graph and returns {name: op}, ops that set
      the initial state, one after the other, and {what: tensor} to check.
  """
  tf1 = tf.compat.v1
  graph = tf.Graph()
  with graph.as_default(), tf.device("/cpu:0"):
    ops, fill, state = make()
    init = tf1.global_variables_initializer()
  session = tf1.Session(graph=graph)
  session.run(init)

  def place():
    for op in fill:
      session.run(op)

  place()
  return ({name: session.make_callable(op) for name, op in ops.items()}, place,
          session.make_callable(state) if state else dict)


def sample(variables):
  """A sample of the numbers of each variable, for `check`."""
  return tf.concat(
      [tf.reshape(v, [-1])[::max(1, v.shape.num_elements() // 100)]
       for v in variables], axis=0)


def alternate(contenders, n_rounds, label, places=(), turn_seconds=0.05,
              warm=True):
  """Times functions in turns, so that drifts of the machine affect all of them.

  Each round has one turn for each contender, in random order. A turn is one
  call that is not timed, to warm the caches, and then about `turn_seconds` of
  timed calls.

  The location of a large array in physical memory changes its speed by up to
  30 %, as long as the array exists. So each round has new arrays.

  Args:
    contenders: {name: function of no arguments, or RemoteContender}.
    n_rounds: The number of rounds.
    label: The label of the progress bar.
    places: Functions that make new arrays for contenders, called in random
      order.
    turn_seconds: Seconds of a turn.
    warm: Whether there are calls that are not timed; otherwise a turn is one
      call.

  Returns:
    {name: [seconds per call in each round]}.
  """
  order = random.Random(0)

  def new_places():
    for place in order.sample(places, len(places)):
      place()

  new_places()
  calls = dict.fromkeys(contenders, 1)
  for name, call in contenders.items() if warm else ():
    call()  # Compiles, traces and allocates.
    call()
    calls[name] = max(1, round(turn_seconds / max(elapsed(call, 1), 1e-9)))
  seconds = {name: [] for name in contenders}
  with _extras.load("tqdm").tqdm(
      total=n_rounds * len(contenders), desc=label, unit="turn",
      leave=False) as progress:
    for _ in range(n_rounds):
      new_places()
      for name in order.sample(list(contenders), len(contenders)):
        if warm:
          contenders[name]()
        seconds[name].append(elapsed(contenders[name], calls[name]))
        progress.update()
  return seconds


class RemoteContender:
  """A contender that measures the time itself, such as in another process."""

  def __init__(self, seconds):
    """`seconds(calls)` makes that many calls and returns seconds per call."""
    self.seconds = seconds

  def __call__(self):
    self.seconds(1)


def elapsed(call, calls):
  """Seconds per call, in `calls` calls."""
  if isinstance(call, RemoteContender):
    return call.seconds(calls)
  start = time.perf_counter()
  for _ in range(calls):
    call()
  return (time.perf_counter() - start) / calls


def speedup(seconds, reference):
  """The median ratio of speeds of `seconds` and `reference` in a round.

  The two are measured shortly after each other, so that other work on the
  machine affects both.
  """
  return statistics.median(r / s for s, r in zip(seconds, reference))


def spread(seconds):
  """Half the interquartile range, relative to the median."""
  if len(seconds) < 2:
    return 0.0
  low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
  return (high - low) / 2 / median
