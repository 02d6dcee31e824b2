"""Steps of Keras optimizers, one beside the other: `bench keras --optimizers`.

Each takes a step of the same float32 variables with given gradients, in a
tf.function, compiled and eagerly; "v1 session" is TensorFlow 1's Adam and
`wrapopt.ScheduleFreeOptimizer` around it. If PyTorch and `schedulefree` are
installed, AdamWScheduleFree of that package takes the step in another process.
"of limit" compares with native threads that only add, to as many arrays.
"""

import contextlib
import functools
import subprocess
import sys

import keras
import tensorflow as tf

import wrapopt
from wrapopt.bench import harness
from wrapopt.bench import sets

_tf1 = tf.compat.v1
_optimizers = keras.optimizers
_PEER, _AVERAGE = "Adam", "MovingAverage(Adam)"


def _wrapped(wrapper, inner, *args):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras
  return getattr(wrapopt.keras, wrapper)(inner(1e-3), *args)


# {name: (the function that makes it, arrays that a step writes)}.
OPTIMIZERS = {
    _PEER: (lambda: _optimizers.Adam(1e-3), 3),
    "ScheduleFree(Adam)": (
        lambda: _wrapped("ScheduleFree", _optimizers.Adam), 3),
    "ScheduleFreeAdamW": (lambda: _optimizers.ScheduleFreeAdamW(1e-3), 4),
    "SGD, momentum": (lambda: _optimizers.SGD(1e-3, momentum=0.9), 2),
    "ScheduleFree(SGD)": (
        lambda: _wrapped("ScheduleFree", _optimizers.SGD), 2),
    _AVERAGE: (lambda: _wrapped("MovingAverage", _optimizers.Adam), 4),
    "BEMA(Adam)": (lambda: _wrapped(
        "MovingAverage", _optimizers.Adam, wrapopt.BEMA()), 4),
    "PrimalAverage(Adam)": (
        lambda: _wrapped("PrimalAverage", _optimizers.Adam), 4),
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
  harness.add_sets(parser, [name for name in sets.VARIABLE_SETS
                            if name != "bert-base"])
  parser.add_argument(
      "--torch-python", metavar="FILE", default=sys.executable,
      help="an interpreter that has PyTorch and schedulefree; by default this")


def contests(options):
  names = options.optimizers or list(OPTIMIZERS)
  return (contest for name, shapes in harness.chosen_sets(options)
          for contest in _contest(name, shapes, names, options.torch_python))


def _contest(name, shapes, names, torch_python):
  contest = harness.Contest(
      sets.described(name, shapes), {"set": name},
      peers={"x_adam": _PEER, "x_average": _AVERAGE}, streams=(shapes, 1))
  for mode in _MODES:
    for x in names:
      make, written = OPTIMIZERS[x]
      step, place = _of_keras(mode, shapes, make)
      contest.add({x: step}, place, mode=mode, written=written)
  with contextlib.ExitStack() as stack:
    if _FREE in names and _PEER in names:
      contest.add(*harness.in_session(lambda: graph(shapes))[:2],
                  mode=_SESSION, written=3)
      if not subprocess.run(
          [torch_python, "-c", "import schedulefree"], check=False,
          capture_output=True).returncode:
        steps, place = stack.enter_context(harness.in_torch(
            torch_python, shapes, "schedulefree.AdamWScheduleFree",
            {"lr": 1e-3}, None))
        contest.add({"AdamWScheduleFree": steps["foreach"]}, place, mode=_TORCH,
                    written=3)
    yield contest


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
        v.assign(sets.numbers(v.shape, (k, i)))
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


def graph(shapes):
  """As `harness.in_session` wants it, without a state."""
  # pylint: disable=g-import-not-at-top
  from wrapopt import schedule_free

  ops, fills = {}, []
  for name, wrap in ((_PEER, lambda opt: opt),
                     (_FREE, schedule_free.ScheduleFreeOptimizer)):
    with _tf1.variable_scope(f"of{len(ops)}"):
      values, grads = ([tf.Variable(functools.partial(
          tf.zeros, shape)) for shape in shapes] for _ in range(2))
      opt = wrap(_tf1.train.AdamOptimizer(1e-3))
      ops[name] = opt.apply_gradients(
          [(g.read_value(), v) for g, v in zip(grads, values)])
      slots = [v for v in opt.variables() if v.shape.rank and
               v.dtype == tf.float32]
      fills += sets.filled([values, grads, slots], range(3))
  return ops, fills, {}
