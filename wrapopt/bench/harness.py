"""Shared by the benchmarks: sets of variables, timing, tables."""

import ctypes
import gc
import importlib.metadata
import importlib.util
import math
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


def _resnet50():
  """Shapes of the 161 trainable variables of ResNet-50, in layer order.

  He et al., "Deep residual learning for image recognition", 2015, table 1, for
  ImageNet's 1000 classes: 53 convolutions without bias, each with the gamma and
  beta of its batch normalization, and the kernel and bias of the dense layer,
  25,557,032 numbers together. These are the shapes in
  `tf.keras.applications.ResNet50`, less the biases that Keras gives its
  convolutions.
  """
  shapes = []

  def conv(size, inputs, outputs):
    shapes.extend([(size, size, inputs, outputs), (outputs,), (outputs,)])

  conv(7, 3, 64)
  inputs = 64
  for filters, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
    for block in range(blocks):
      if block == 0:
        conv(1, inputs, 4 * filters)  # The shortcut.
      conv(1, inputs, filters)
      conv(3, filters, filters)
      conv(1, filters, 4 * filters)
      inputs = 4 * filters
  return shapes + [(inputs, 1000), (1000,)]


def _bert_base():
  """Shapes of the 199 variables of BERT-base, 109,482,240 numbers together.

  Devlin et al., "BERT: pre-training of deep bidirectional transformers for
  language understanding", 2018: 12 layers of width 768, 3072 inside, a
  vocabulary of 30522 word pieces, 512 positions, 2 segments, and the pooler.
  """
  width, inside = 768, 3072
  norm = [(width,), (width,)]
  dense = [(width, width), (width,)]
  layer = (4 * dense + norm +
           [(width, inside), (inside,), (inside, width), (width,)] + norm)
  return ([(30522, width), (512, width), (2, width)] + norm + 12 * layer +
          dense)


VARIABLE_SETS = {
    "2x4096x4096": [(4096, 4096)] * 2,
    "resnet50": _resnet50(),
    "400x256": [(256,)] * 400,
    "bert-base": _bert_base(),
}


def sizes(shapes):
  """Numbers of elements of `shapes`."""
  return [math.prod(shape) for shape in shapes]


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
  return {
      "wrapopt": __version__,
      "TensorFlow": tf.__version__,
      **torch,
      "kernels": _native.cpu_isa(),
      "threads": threads(),
      "processor": _processor(),
      # If it is above 0 at the start, other work uses the processor.
      "load": round(os.getloadavg()[0], 2),
  }


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
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as f:
      for line in f:
        if line.startswith("model name"):
          return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return platform.machine()


def add_arguments(parser):
  """The arguments that all benchmarks take."""
  parser.add_argument(
      "--sets", nargs="+", choices=list(VARIABLE_SETS), metavar="SET",
      default=list(VARIABLE_SETS),
      help=f"the sets of variables, of {', '.join(VARIABLE_SETS)}; default all")
  parser.add_argument(
      "--quick", action="store_true",
      help="5 rounds instead of 15; not for figures")
  parser.add_argument("--json", metavar="FILE", help="a file for the results")


def add_optimizer_arguments(parser, optimizers):
  """The arguments of a benchmark that measures steps of several optimizers."""
  add_arguments(parser)
  parser.add_argument(
      "--optimizers", nargs="+", choices=list(optimizers), metavar="NAME",
      default=list(optimizers),
      help=f"the optimizers, of {', '.join(optimizers)}; default all")


def measure_optimizers(options, measure):
  """All results of `measure(set, shapes, optimizer, rounds)`."""
  return [result for name in options.sets for optimizer in options.optimizers
          for result in measure(name, VARIABLE_SETS[name], optimizer,
                                rounds(options))]


def progress(label):
  """A function that prints a line at once: the label, and what is done.

  With the seconds since this call. A case may take minutes before its table.
  """
  start = time.monotonic()

  def say(what):
    print(f"{label}: {what}, {time.monotonic() - start:.0f} s", flush=True)

  return say


def rounds(options):
  return 5 if options.quick else 15


def alternate(contenders, n_rounds, label, places=(), turn_seconds=0.05):
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

  Returns:
    {name: [seconds per call in each round]}.
  """
  order = random.Random(0)

  def new_places():
    for place in order.sample(places, len(places)):
      place()

  new_places()
  calls = {}
  for name, call in contenders.items():
    call()  # Compiles, traces and allocates.
    call()
    calls[name] = max(1, round(turn_seconds / max(_time(call, 1), 1e-9)))
  seconds = {name: [] for name in contenders}
  with _extras.load("tqdm").tqdm(
      total=n_rounds * len(contenders), desc=label, unit="turn",
      leave=False) as progress:
    for _ in range(n_rounds):
      new_places()
      for name in order.sample(list(contenders), len(contenders)):
        contenders[name]()
        seconds[name].append(_time(contenders[name], calls[name]))
        progress.update()
  return seconds


def wait_for_huge_pages():
  """Waits until wrapopt's background thread has moved large arrays."""
  def in_huge_pages():
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
      return re.search(r"AnonHugePages:\s*(\d+)", file.read())[1]

  still, before, end = 0, None, time.monotonic() + 120
  while still < 5 and time.monotonic() < end:
    time.sleep(0.1)
    now = in_huge_pages()
    still, before = (still + 1 if now == before else 0), now


def resident_bytes():
  """Bytes of this process in memory that no file backs, without garbage."""
  gc.collect()
  # The allocator otherwise keeps what is free.
  ctypes.CDLL(None).malloc_trim(0)
  with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
    return 1024 * int(re.search(r"Anonymous:\s*(\d+)", file.read())[1])


class RemoteContender:
  """A contender in another process, which measures the time itself."""

  def __init__(self, seconds):
    """`seconds(calls)` makes that many calls and returns seconds per call."""
    self.seconds = seconds

  def __call__(self):
    self.seconds(1)


def _time(call, calls):
  if isinstance(call, RemoteContender):
    return call.seconds(calls)
  start = time.perf_counter()
  for _ in range(calls):
    call()
  return (time.perf_counter() - start) / calls


def streams(shapes, written, read=1):
  """Arrays for `StreamLimit`, made in the same way as TensorFlow's variables.

  The location of memory affects its speed. So all arrays are made by the same
  ops, in the same order.

  Args:
    shapes: Shapes.
    written: The number of arrays of each shape that are written.
    read: The number of arrays that are only read.

  Returns:
    Lists of arrays, one for each shape: `read` of them, and `written` of them.
  """
  with tf.device("/cpu:0"):
    rows = [[numbers(shape, (row, i)) for i, shape in enumerate(shapes)]
            for row in range(read + written)]
  # Without copies.
  rows = [[np.frombuffer(memoryview(x), np.float32) if 0 not in x.shape
           else np.zeros(0, np.float32) for x in row] for row in rows]
  return rows[:read], rows[read:]


def numbers(shape, seed):
  """Numbers in [0.1, 1), the same in every call, so that no page is zero."""
  return tf.random.stateless_uniform(shape, seed, 0.1, 1)


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


def report_passes(title, seconds, limits, moved, peer, common):
  """Prints a table of contenders that each make one pass over memory.

  Args:
    title: What they pass over.
    seconds: {contender: seconds of its turns}, with the streaming limits.
    limits: The names of the limits. The table has the fastest.
    moved: The bytes of a pass.
    peer: (name of a contender, key, heading): what the others are compared
      with, and where.
    common: What all results have in common: a dict.

  Returns:
    A list of dicts, one for each row of the table.
  """
  # For a small set, threads slow the limit down.
  limit = min(limits, key=lambda n: statistics.median(seconds[n]))
  contender_of_peer, key, heading = peer
  results = [{
      **common,
      "contender": contender,
      "milliseconds": 1e3 * statistics.median(times),
      "spread": spread(times),
      "gigabytes_per_second": moved / statistics.median(times) / 1e9,
      "of_limit": speedup(times, seconds[limit]),
      key: speedup(times, seconds[contender_of_peer]),
  } for contender, times in seconds.items()
             if contender == limit or contender not in limits]
  print(f"\n{title}: {moved / 1e6:,.1f} MB a pass")
  print(table(
      ("", "ms", "+-", "GB/s", "of limit", heading),
      [(r["contender"], f"{r['milliseconds']:.3f}", f"{r['spread']:.0%}",
        f"{r['gigabytes_per_second']:.1f}", f"{r['of_limit']:.0%}",
        f"{r[key]:.2f}") for r in results]), flush=True)
  return results


def table(header, rows):
  """Rows of strings as aligned text; the first column to the left."""
  rows = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*rows)]
  return "\n".join(
      "  ".join([row[0].ljust(widths[0]),
                 *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))])
      for row in rows)
