"""Steps of Keras optimizers, one beside the other: `bench keras --optimizers`.

Each takes a step of the same float32 variables with given gradients, in a
tf.function, compiled and eagerly; "v1 session" is TensorFlow 1's Adam and
`wrapopt.ScheduleFreeOptimizer` around it. If PyTorch and `schedulefree` are
installed, AdamWScheduleFree of that package takes the step in another process.
"of limit" compares with native threads that only add, to as many arrays.
"""

import contextlib
import functools
import gc
import json
import os
import statistics
import subprocess
import sys

import keras
import tensorflow as tf

from wrapopt.bench import harness
from wrapopt.bench.stream_limit import StreamLimit

_tf1 = tf.compat.v1
_optimizers = keras.optimizers
_TORCH_PROGRAM = os.path.join(os.path.dirname(__file__), "torch_step.py")
_PEER = "Adam"


def _schedule_free(opt):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras
  return wrapopt.keras.ScheduleFree(opt)


# {name: (the function that makes it, arrays that a step writes)}.
OPTIMIZERS = {
    _PEER: (lambda: _optimizers.Adam(1e-3), 3),
    "ScheduleFree(Adam)": (
        lambda: _schedule_free(_optimizers.Adam(1e-3)), 3),
    "ScheduleFreeAdamW": (lambda: _optimizers.ScheduleFreeAdamW(1e-3), 4),
    "SGD, momentum": (lambda: _optimizers.SGD(1e-3, momentum=0.9), 2),
    "ScheduleFree(SGD)": (lambda: _schedule_free(_optimizers.SGD(1e-3)), 2),
}
_FREE = "ScheduleFree(Adam)"
_MODES = ("tf.function", "jit", "eager")
_SESSION, _TORCH = "v1 session", "PyTorch, schedulefree"


def add_arguments(parser):
  parser.add_argument(
      "--optimizers", nargs="*", choices=list(OPTIMIZERS), metavar="NAME",
      help="instead of models, measure steps of optimizers: of "
      + ", ".join(f"'{name}'" for name in OPTIMIZERS)
      + "; without a name all")
  parser.add_argument(
      "--sets", nargs="+", choices=list(harness.VARIABLE_SETS), metavar="SET",
      default=[name for name in harness.VARIABLE_SETS if name != "bert-base"],
      help="the sets of variables for --optimizers")
  parser.add_argument(
      "--torch-python", metavar="FILE", default=sys.executable,
      help="an interpreter that has PyTorch and schedulefree; by default this")


def run(options):
  """Measures the optimizers; returns the results, one per contender."""
  names = options.optimizers or list(OPTIMIZERS)
  return [result for name in options.sets for result in measure(
      name, harness.VARIABLE_SETS[name], names, harness.rounds(options),
      options.torch_python)]


def measure(name, shapes, names, n_rounds, torch_python=sys.executable):
  """Compares optimizers on one set of variables and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    names: Some of OPTIMIZERS.
    n_rounds: The number of turns of each contender.
    torch_python: An interpreter, which may have PyTorch and schedulefree.

  Returns:
    A list of dicts, one for each row of the table.
  """
  contenders, places, written = {}, [], {}
  say = harness.progress(name)
  limits, place_limits = _limits(shapes, sorted({
      OPTIMIZERS[x][1] for x in names}))
  contenders.update(limits)
  places.append(place_limits)
  with contextlib.ExitStack() as stack:
    for mode in _MODES:
      for x in names:
        step, place = _of_keras(mode, shapes, OPTIMIZERS[x][0])
        contenders[mode, x], written[mode, x] = step, OPTIMIZERS[x][1]
        places.append(place)
      say(f"{mode} built")
    if _FREE in names and _PEER in names:
      of_session, place = stack.enter_context(_in_session(shapes))
      contenders.update(of_session)
      written.update(dict.fromkeys(of_session, 3))
      places.append(place)
      if not subprocess.run(
          [torch_python, "-c", "import schedulefree"], check=False,
          capture_output=True).returncode:
        step, place = stack.enter_context(_in_torch(shapes, torch_python))
        contenders[_TORCH, "AdamWScheduleFree"] = step
        written[_TORCH, "AdamWScheduleFree"] = 3
        places.append(place)
    seconds = harness.alternate(contenders, n_rounds, name, places=places)
  del contenders, places, place, step
  gc.collect()
  fastest = {n: min((seconds[key] for key in limits if key[0] == n),
                    key=statistics.median) for n in set(written.values())}
  size = 4 * sum(harness.sizes(shapes))
  results = []
  for key, n in written.items():
    mode, contender = key
    times, peer = seconds[key], seconds.get((mode, _PEER))
    result = {
        "set": name, "mode": mode, "contender": contender,
        "milliseconds": 1e3 * statistics.median(times),
        "spread": harness.spread(times),
        "gigabytes_per_second":
            size * (1 + 2 * n) / statistics.median(times) / 1e9,
        "of_limit": harness.speedup(times, fastest[n]), "rounds": n_rounds}
    if peer:
      result["x_adam"] = 1 / harness.speedup(times, peer)
    results.append(result)
  print(f"\n{name}: {len(shapes)} variables, {size // 4:,} numbers")
  print(harness.table(
      ("", "ms", "+-", "GB/s", "of limit", "x Adam"),
      [(f"{r['mode']}, {r['contender']}", f"{r['milliseconds']:.3f}",
        f"{r['spread']:.0%}", f"{r['gigabytes_per_second']:.1f}",
        f"{r['of_limit']:.0%}",
        f"{r['x_adam']:.2f}" if "x_adam" in r else "") for r in results]),
        flush=True)
  return results


def _limits(shapes, counts):
  """{(arrays, threads): function that makes a pass}, and one for new arrays."""
  made = {}

  def place():
    made.clear()  # Free the old arrays first.
    read, written = harness.streams(shapes, counts[-1])
    for n in counts:
      made[n] = StreamLimit(read, written[:n])

  return {(n, threads): lambda n=n, threads=threads: made[n].run(threads)
          for n in counts for threads in sorted({1, harness.threads()})}, place


def _of_keras(mode, shapes, make):
  """(function that takes a step, function that makes new arrays)."""
  variables = [keras.Variable(lambda shape, dtype: tf.zeros(shape, dtype),
                              shape=shape, dtype="float32") for shape in shapes]
  opt = make()
  opt.build(variables)
  own = opt._variables if isinstance(opt._variables, list) else ()
  values = {id(v): v.value for v in (*variables, *opt.variables, *own)
            if v.dtype == "float32" and v.shape}.values()
  held = [tf.Variable(functools.partial(tf.zeros, shape)) for shape in shapes]
  given = []  # The gradients, as tensors.

  def place():
    for k, row in enumerate((values, held)):
      for i, v in enumerate(row):
        v.assign(harness.numbers(v.shape, (k, i)))
    given[:] = [v.read_value() for v in held] if mode == "eager" else ()

  place()
  if mode == "eager":
    step = lambda: opt.apply(given, variables)
  else:
    step = tf.function(
        lambda: opt.apply([v.read_value() for v in held], variables) and None,
        jit_compile=mode == "jit", autograph=False)
  step()
  return step, place


@contextlib.contextmanager
def _in_session(shapes):
  """Yields ({(mode, contender): function}, function for new arrays)."""
  # pylint: disable=g-import-not-at-top
  from wrapopt import schedule_free

  graph = tf.Graph()
  with graph.as_default(), tf.device("/cpu:0"):
    ops, fills = {}, []
    for name, wrap in ((_PEER, lambda opt: opt),
                       (_FREE, schedule_free.ScheduleFreeOptimizer)):
      with _tf1.variable_scope(f"of{len(ops)}"):
        values, grads = ([tf.Variable(functools.partial(
            tf.zeros, shape)) for shape in shapes] for _ in range(2))
        opt = wrap(_tf1.train.AdamOptimizer(1e-3))
        ops[_SESSION, name] = opt.apply_gradients(
            [(g.read_value(), v) for g, v in zip(grads, values)])
        slots = [v for v in opt.variables() if v.shape.rank and
                 v.dtype == tf.float32]
        for i, v in enumerate((*values, *grads, *slots)):
          with tf.control_dependencies(fills[-1:]):
            fills.append(v.assign(harness.numbers(v.shape, (2, i))).op)
    init = _tf1.global_variables_initializer()
  with contextlib.closing(_tf1.Session(graph=graph)) as session:
    session.run(init)
    yield ({key: session.make_callable(op) for key, op in ops.items()},
           session.make_callable(fills[-1]))


@contextlib.contextmanager
def _in_torch(shapes, python):
  """Yields (a harness.RemoteContender, function for new arrays)."""
  given = (shapes, "schedulefree.AdamWScheduleFree", {"lr": 1e-3}, None,
           harness.threads())
  with subprocess.Popen(
      [python, _TORCH_PROGRAM, json.dumps(given)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

    def ask(*line):
      process.stdin.write(json.dumps(line) + "\n")
      process.stdin.flush()
      return json.loads(process.stdout.readline())

    ask("codes")
    yield (harness.RemoteContender(functools.partial(ask, "seconds",
                                                     "foreach")),
           lambda: ask("place"))
