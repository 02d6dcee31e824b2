"""Time and memory per unit as workers, pushes, variables and rows grow.

Each line is one size, and its figures are for one unit: "x first" is the ratio
of the time per unit to that of the smallest size. The parts:

  gate       workers that race for one staleness gate, each in a thread: the
             time of an admitted step (record, gate, complete), and the memory
             of an update in flight
  rounds     pushes to one averaging round, of 1000 numbers each, by as many
             workers: the time of a push (enter, stage, arrive), and of its part
             of the round's end; the bytes that the round holds per push
  variables  the variables of a MovingAverageOptimizer, of 64 numbers each, in a
             v1 session and in a tf.function: the time to build, and of a step,
             per variable; the memory per variable
  rows       the rows of a table of width 8 with a lazy average: the time of a
             step that touches 512 rows, which must not depend on the table's
             size; the first step; the memory per row

The memory is what the process has more afterwards. No part starts if it does
not fit.
"""

import collections
from concurrent import futures
import contextlib
import itertools
import math
import statistics
import threading
import time

import numpy as np
import tensorflow as tf

from wrapopt import _extras
from wrapopt._loader import ops as raw
from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt.moving_average import MovingAverageOptimizer
from wrapopt import ops

tf1 = tf.compat.v1

_SIZES = {
    "gate": (1, 10, 100, 1000),
    "rounds": (1, 10, 100, 1000),
    "variables": (10, 100, 1000, 10_000),
    "rows": (20_000, 200_000, 2_000_000, 20_000_000),
}
_PUSHED = 1000  # Numbers of a push.
_OF_VARIABLE = 64  # Numbers of a variable.
_WIDTH = 8  # Numbers of a row.
_TOUCHED = 512  # Rows of a step.
_DECAY = 0.99
# Steps of all workers of the race together; pushes of all rounds together.
_TRIES = 4000
# Bytes of the memory of each row at the peak, while its average is made: the
# value, the average, its initial value and the log decays; and as much again
# while they move to huge pages.
_PEAK_OF_ROW = 2 * (3 * 4 * _WIDTH + 8)


def add_arguments(parser):
  harness.add_choice(parser, "parts", _SIZES)
  parser.add_argument(
      "--largest", type=float, metavar="N", default=math.inf,
      help="the largest size of any part; default: no limit. --quick leaves "
      "out the largest number of variables and of rows")
  parser.add_argument("--plot", metavar="FILE", help="a file for a plot (PNG)")


def contests(options):
  if options.plot is not None:
    _extras.load("matplotlib").use("Agg")  # Fails before the run.
  results = []
  for part, mode in ((p, m) for p in options.parts for m in _PARTS[p]):
    add, unit, unit_of_bytes = _PARTS[part][mode]
    first = None
    for n in _sizes(part, options):
      contest = harness.Contest(
          f"{part}, {mode}, per {unit}",
          {"part": part, "mode": mode, "size": n}, figure="microseconds")
      yield from add(contest, n)
      result, = contest.results
      first = first or result["microseconds"]
      result.update(x_first=result["microseconds"] / first, unit=unit,
                    unit_of_bytes=unit_of_bytes)
      results.append(result)
  if options.plot is not None:
    plot(results, options.plot)


def _sizes(part, options):
  sizes = _SIZES[part]
  if options.quick and part in ("variables", "rows"):
    sizes = sizes[:-1]
  return [n for n in sizes if n <= options.largest]


# Each part yields its contest when it has a contender, and then adds figures.


class _Gate:
  """A gate, and the steps of its workers."""

  def __init__(self):
    with tf.device("/cpu:0"):
      self.step = tf.Variable(0, dtype=tf.int64)
      self.dropped = tf.Variable(0.0)
      self.histogram = tf.Variable(tf.zeros([2, 64], tf.int64))
      self._limit = tf.constant(2**62, tf.int64)  # Admits all.

  def begin(self):
    """Returns the ticket of an update in flight."""
    recorded, _ = ops.staleness_record(self.step)
    return ops.staleness_gate(self.step, self.dropped, self.histogram, recorded,
                              self._limit).ticket

  def end(self, ticket):
    ops.staleness_complete(ticket, self.step)


def _gate(contest, n):
  gate, steps = _Gate(), 0
  each = math.ceil(_TRIES / n)

  def race(_):
    nonlocal steps
    steps += n * each
    return _race(gate, n, each) / (n * each)

  contest.add({"wrapopt": harness.RemoteContender(race)})
  yield contest
  if (gate.step.numpy() != steps or gate.dropped.numpy() != 0 or
      gate.histogram.numpy()[0].sum() != steps):
    raise AssertionError(f"gate: {steps} steps were admitted, and it counted "
                         f"{gate.step.numpy()}.")
  # Over more updates than workers: pages of memory are coarse.
  count = max(n, 10_000)
  before = harness.resident_bytes()
  tickets = [gate.begin() for _ in range(count)]
  held = (harness.resident_bytes() - before) / count
  for ticket in tickets:
    gate.end(ticket)
  contest.results[0]["bytes"] = held


def _race(gate, n, each):
  """Seconds in which each of `n` threads takes `each` steps."""
  start = threading.Barrier(n + 1)

  def work():
    start.wait()
    for _ in range(each):
      gate.end(gate.begin())

  with futures.ThreadPoolExecutor(n) as pool:
    workers = [pool.submit(work) for _ in range(n)]
    start.wait()
    begin = time.perf_counter()
    for worker in workers:
      worker.result()
    return time.perf_counter() - begin


class _Rounds:
  """Averaging rounds, and the calls of their workers."""

  def __init__(self, name, n, value):
    self._value = value
    with tf.device("/cpu:0"):
      self._handle = raw.wrapopt_averaging_rounds(
          num_workers=n, dtypes=[tf.float32], sizes=[_PUSHED],
          shared_name=name)
    self._workers = [tf.constant(f"worker {i}") for i in range(n)]
    first, place = self._workers[0], tf.constant([0, 1], tf.int64)
    self._stage(first, tf.constant(["0 1 0 0 0"]), tf.zeros_like(value))
    raw.wrapopt_averaging_restore(self._handle, first, 0, place, 0)
    self._place = place

  def _stage(self, worker, known, value):
    raw.wrapopt_averaging_stage(self._handle, worker, known, 1.0, 1, 0, [value])

  def push(self):
    """All workers send the value."""
    for worker in self._workers:
      known = raw.wrapopt_averaging_enter(
          self._handle, worker, 0, self._place, 1, 60.0, 60.0).known
      self._stage(worker, known, self._value)
      raw.wrapopt_averaging_arrive(self._handle, worker, known)

  def end(self):
    """The center becomes the mean."""
    known = raw.wrapopt_averaging_close(
        self._handle, self._place, len(self._workers), 60.0, 60.0)
    self._place = raw.wrapopt_averaging_outer_step(
        self._handle, known, 1.0, 0.0, 0)

  def center(self):
    return raw.wrapopt_averaging_center(
        self._handle, self._workers[0], 0, 60.0, T=tf.float32).value


def _rounds(contest, n):
  value = tf.range(_PUSHED, dtype=tf.float32)
  rounds = _Rounds(f"growth_{n}", n, value)
  means = []
  # So many rounds together that the clock does not matter.
  together = max(1, _TRIES // 4 // n)

  def several(_):
    push = mean = 0.0
    for _ in range(together):
      start = time.perf_counter()
      rounds.push()
      pushed = time.perf_counter()
      rounds.end()
      mean += time.perf_counter() - pushed
      push += pushed - start
    means.append(mean / (n * together))
    return push / (n * together)

  contest.add({"wrapopt": harness.RemoteContender(several)})
  yield contest
  # The mean of equal values is exact.
  if not np.array_equal(rounds.center(), value):
    raise AssertionError("rounds: the mean is wrong.")
  contest.results[0].update(
      of_mean_microseconds=1e6 * statistics.median(means),
      bytes=_bytes_of_push(n, value))


def _bytes_of_push(n, value):
  """The bytes that rounds hold per push, of as many rounds as are needed."""
  several = [_Rounds(f"growth_{n}_{k}", n, value)
             for k in range(max(1, _TRIES // n))]
  before = harness.resident_bytes()
  for rounds in several:
    rounds.push()
  held = harness.resident_bytes() - before
  for rounds in several:
    rounds.end()  # Drops the means.
  return held / (n * len(several))


def _optimizer():
  return MovingAverageOptimizer(tf1.train.GradientDescentOptimizer(0.1), _DECAY)


def _variables(contest, n):
  in_session = contest.facts["mode"] == "session"
  before = harness.resident_bytes()
  graph = tf.Graph().as_default() if in_session else contextlib.nullcontext()
  with graph, tf.device("/cpu:0"):
    values = [tf.Variable(lambda: tf.ones([_OF_VARIABLE])) for _ in range(n)]
    gradient = tf.ones([_OF_VARIABLE])
    opt = _optimizer()
    train = lambda: opt.apply_gradients([(gradient, v) for v in values])
    start = time.perf_counter()
    built = train() if in_session else tf.function(
        lambda: train() and None, autograph=False).get_concrete_function()
    build = time.perf_counter() - start
    if in_session:
      config = tf1.ConfigProto()
      # It takes longer than all else to initialize averages of thousands of
      # variables, also TensorFlow's own: there is a cond for each.
      config.graph_options.rewrite_options.disable_meta_optimizer = True
      session = tf1.Session(config=config)
      session.run(tf1.global_variables_initializer())
      step = session.make_callable(built)
      read = session.make_callable([values[-1], opt.average(values[-1])])
    else:
      step = built
      read = lambda: (values[-1].numpy(), opt.average(values[-1]).numpy())
  start = time.perf_counter()
  step()
  first = time.perf_counter() - start
  value, average = read()
  # From 1, by a gradient of 1, and the average after that.
  if not (np.allclose(value, 0.9) and
          np.allclose(average, 1 - (1 - _DECAY) * 0.1)):
    raise AssertionError("variables: the step is wrong.")
  contest.add({"wrapopt": harness.RemoteContender(
      lambda calls: harness.elapsed(step, calls) / n)})
  yield contest
  contest.results[0].update(
      build_milliseconds=1e3 * build / n, first_milliseconds=1e3 * first / n,
      bytes=(harness.resident_bytes() - before) / n)


def _rows(contest, n):
  _check_memory(n)
  rng = np.random.default_rng(0)
  with tf.device("/cpu:0"):
    # Enough of them that the rows of the first are no longer in the caches.
    batches = [tf.constant(rng.integers(0, n, _TOUCHED, np.int32))
               for _ in range(2_000_000 // _TOUCHED)]
    gradient = tf.ones([_TOUCHED, _WIDTH])
  before = harness.resident_bytes()
  with tf.device("/cpu:0"):
    table = tf.Variable(tf.zeros([n, _WIDTH]))
  _fill(table)
  opt = _optimizer()

  @tf.function(autograph=False)
  def step(indices):
    opt.apply_gradients([(tf.IndexedSlices(gradient, indices, [n, _WIDTH]),
                          table)])

  start = time.perf_counter()
  step(batches[0])
  first = time.perf_counter() - start
  if not opt.is_lazy(table):
    raise AssertionError("rows: the average is not lazy.")
  harness.wait_for_huge_pages()
  ids = itertools.cycle(batches)
  contest.add({"wrapopt": lambda: step(next(ids))})
  yield contest
  held = (harness.resident_bytes() - before) / n
  _check_rows(table, opt, step, batches[0])
  contest.results[0].update(first_milliseconds=1e3 * first, bytes=held)


def _fill(table, at_once=20_000):
  """Gives rows numbers that are not 0, few at once: what is freed may stay."""
  for begin in range(0, table.shape[0], at_once):
    count = min(at_once, table.shape[0] - begin)
    table.scatter_update(tf.IndexedSlices(
        sets.numbers([count, _WIDTH], (begin, 0)),
        tf.range(begin, begin + count)))


def _check_rows(table, opt, step, indices):
  """Raises an error unless a step moves the average of a touched row."""
  row = int(indices[0])
  read = lambda: [tf.gather(x, [row]).numpy().astype(np.float64)
                  for x in (table, opt.average(table))]
  _, before = read()
  step(indices)
  value, average = read()
  expected = before + (1 - _DECAY) * (value - before)
  if not np.abs(average - expected).max() < 1e-5:
    raise AssertionError("rows: the average is wrong.")


def _check_memory(n):
  """Raises an error if a table of `n` rows does not fit."""
  needs = n * _PEAK_OF_ROW + 2**30
  with open("/proc/meminfo", encoding="utf-8") as file:
    free = next(1024 * int(line.split()[1]) for line in file
                if line.startswith("MemAvailable:"))
  if free < needs:
    raise SystemExit(
        f"A table of {n:,} rows needs {needs / 2**30:.1f} GiB of free memory, "
        f"got {free / 2**30:.1f} GiB. Limit the rows with --largest.")


_PARTS = {  # {part: {mode: (generator, unit of the time, unit of the bytes)}}
    "gate": {"threads": (_gate, "admitted step", "update in flight")},
    "rounds": {"eager": (_rounds, "push", "push")},
    "variables": {mode: (_variables, "variable", "variable")
                  for mode in ("session", "tf.function")},
    "rows": {"tf.function": (_rows, "step", "row")},
}


def plot(results, path):
  """Writes a plot of time and memory per unit over the size of each part."""
  plt = _extras.load("matplotlib.pyplot")
  curves = collections.defaultdict(lambda: collections.defaultdict(list))
  for r in results:
    curves[r["part"]][r["mode"]].append(r)
  figure, axes = plt.subplots(2, len(curves), figsize=(4 * len(curves), 7),
                              squeeze=False, layout="constrained")
  names = {"gate": "workers", "rounds": "pushes of a round"}
  for column, (part, modes) in zip(axes.T, curves.items()):
    for ax, key, unit in zip(column, ("microseconds", "bytes"),
                             ("unit", "unit_of_bytes")):
      for mode, rows in modes.items():
        ax.plot([r["size"] for r in rows], [r[key] for r in rows], marker=".",
                label=mode)
      ax.set(xscale="log", xlabel=names.get(part, part),
             ylabel=f"{key} per {rows[0][unit]}")
      ax.set_ylim(bottom=0)
      ax.legend(fontsize=8)
    column[0].set_title(part)
  figure.savefig(path, dpi=100)
  plt.close(figure)
