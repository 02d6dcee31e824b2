"""A step of training with an average, compiled by XLA.

Compares, in a tf.function(jit_compile=True),

  stock         an optimizer of tf.compat.v1.train
  stock + EMA   the optimizer, and then TensorFlow's ExponentialMovingAverage
  wrapopt K=0   the same step by `wrapopt.ops.apply`, without averages
  wrapopt K=1   `wrapopt.MovingAverageOptimizer` around the optimizer

All of them take the same step of the same float32 resource variables with given
gradients; the results are checked. "trace" is the time to trace the function,
"compile" the time of its first call after that, and "HLO" the number of
instructions before and after XLA's optimization.
"""

import gc
import re
import statistics
import time

import tensorflow as tf

from wrapopt.bench import harness
from wrapopt.bench import step as step_bench

_OPTIMIZERS = ("Momentum", "Adam")
_STOCK, _STOCK_EMA = "stock", "stock + EMA"
# {contender: the contender that it is compared with}.
_PEERS = {_STOCK: _STOCK, _STOCK_EMA: _STOCK_EMA, "wrapopt K=0": _STOCK,
          "wrapopt K=1": _STOCK_EMA}


def add_arguments(parser):
  harness.add_optimizer_arguments(parser, _OPTIMIZERS)


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  return harness.measure_optimizers(options, measure)


def measure(name, shapes, optimizer, n_rounds):
  """Compares all contenders on one set of variables and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    optimizer: The name of an optimizer.
    n_rounds: The number of turns of each contender.

  Returns:
    A list of dicts, one for each row of the table.
  """
  contenders, place, builds = compiled(shapes, optimizer)
  seconds = harness.alternate(contenders, n_rounds, f"{name}, {optimizer}",
                              places=[place])
  del contenders, place
  gc.collect()  # Free the memory for the next set.
  results = [
      {
          "set": name,
          "optimizer": optimizer,
          "contender": contender,
          "milliseconds": 1e3 * statistics.median(times),
          "spread": harness.spread(times),
          "peer": _PEERS[contender],
          "x_peer": 1 / harness.speedup(times, seconds[_PEERS[contender]]),
          **builds[contender],
          "rounds": n_rounds,
      } for contender, times in seconds.items()]
  print(f"\n{name}: {len(shapes)} variables, {sum(harness.sizes(shapes)):,} "
        f"numbers, {optimizer}")
  print(harness.table(
      ("", "ms", "+-", "x", "of", "trace s", "compile s", "HLO"),
      [(r["contender"], f"{r['milliseconds']:.3f}", f"{r['spread']:.0%}",
        f"{r['x_peer']:.2f}", r["peer"], f"{r['trace_seconds']:.2f}",
        f"{r['compile_seconds']:.2f}",
        f"{r['hlo']}, {r['optimized_hlo']}") for r in results]), flush=True)
  return results


def compiled(shapes, optimizer):
  """The contenders, compiled.

  Args:
    shapes: The shapes of the variables.
    optimizer: The name of an optimizer.

  Returns:
    {contender: function that takes a step}; a function that makes new arrays
    with the initial state; and {contender: a dict of the costs of building it}.
  """
  with tf.device("/cpu:0"):
    values, grads = step_bench.variables(shapes)
  steps = step_bench.Steps(step_bench.OPTIMIZERS[optimizer])
  contenders, builds = {}, {}
  # Slots and averages are made by the first trace of a function.
  for contender in step_bench.STEPS:
    step_bench.function(steps, contender, values, grads)()
  for contender in _PEERS:
    function = step_bench.function(steps, contender, values, grads,
                                   jit_compile=True)
    times = [time.perf_counter()]
    for build in (function.get_concrete_function, function):
      build()
      times.append(time.perf_counter())
    ir = function.experimental_get_compiler_ir()
    builds[contender] = {
        "trace_seconds": times[1] - times[0],
        "compile_seconds": times[2] - times[1],
        "hlo": count_instructions(ir("hlo")),
        "optimized_hlo": count_instructions(ir("optimized_hlo")),
    }
    contenders[contender] = function

  def place():
    with tf.device("/cpu:0"):
      steps.fill(values, grads)

  step_bench.check_all({("jit", name): function
                        for name, function in contenders.items()},
                       place, lambda: steps.sample(values))
  return contenders, place, builds


def count_instructions(hlo):
  """The number of instructions in a module's text."""
  return len(re.findall(r"^ +(?:ROOT )?%?[\w.-]+ = ", hlo, re.MULTILINE))
