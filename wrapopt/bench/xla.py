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

import re
import time

from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt.bench import step as step_bench

_OPTIMIZERS = ("Momentum", "Adam")
CONTENDERS = ("stock", "stock + EMA", "wrapopt K=0", "wrapopt K=1")


def add_arguments(parser):
  harness.add_sets(parser)
  harness.add_choice(parser, "optimizers", _OPTIMIZERS)


def contests(options):
  for name, shapes in harness.chosen_sets(options):
    for optimizer in options.optimizers:
      contest = harness.Contest(
          f"{sets.described(name, shapes)}, {optimizer}",
          {"set": name, "optimizer": optimizer},
          peers={"x_stock": "stock", "x_stock_ema": "stock + EMA"},
          expected=step_bench.Expected())
      functions, place, state = step_bench.in_functions(
          shapes, step_bench.OPTIMIZERS[optimizer], jit_compile=True,
          contenders=CONTENDERS)
      builds = {c: _build(function) for c, function in functions.items()}
      contest.add(functions, place, state, figures=builds)
      yield contest


def _build(function):
  """The costs of building a compiled function: figures."""
  times = [time.perf_counter()]
  for build in (function.get_concrete_function, function):
    build()
    times.append(time.perf_counter())
  ir = function.experimental_get_compiler_ir()
  return {"trace_seconds": times[1] - times[0],
          "compile_seconds": times[2] - times[1],
          "hlo": count_instructions(ir("hlo")),
          "optimized_hlo": count_instructions(ir("optimized_hlo"))}


def count_instructions(hlo):
  """The number of instructions in a module's text."""
  return len(re.findall(r"^ +(?:ROOT )?%?[\w.-]+ = ", hlo, re.MULTILINE))
