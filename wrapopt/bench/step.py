"""A step of training: an optimizer's update, with averages of its result.

Compares, for each optimizer of tf.compat.v1.train, in a v1 session, in a
tf.function and eagerly,

  stock         the optimizer
  stock + EMA   the optimizer, and then TensorFlow's ExponentialMovingAverage
  wrapopt K=0   the same step by `wrapopt.ops.apply`, without averages
  wrapopt K=1   `wrapopt.MovingAverageOptimizer` around the optimizer
  wrapopt K=3   the same with three averages of different decays
  limit K=...   native threads that only add, to as many arrays

All of them take the same step of the same float32 resource variables with given
gradients; the results are checked. GB/s counts the least traffic of a pass:
each gradient is read, each variable, slot and average is read and written.

In a tf.function, given gradients are variables that it captures, each at a
cost. A train function reads its weights and computes the gradients: "train
function" does that, here with a product. "adds" is the additional time of the
step in it.

If PyTorch is installed, its optimizers also take the step, with their "fused"
and their "foreach" code, and `torch._foreach_lerp_` updates the average.
"""

import contextlib
import functools
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

from wrapopt import MovingAverageOptimizer
from wrapopt._v1 import _fused
from wrapopt._v1 import _step
from wrapopt.bench import harness
from wrapopt.bench.stream_limit import StreamLimit

_tf1 = tf.compat.v1
_DECAYS = (0.999, 0.99, 0.9)
OPTIMIZERS = {
    "SGD": lambda: _tf1.train.GradientDescentOptimizer(1e-3),
    "Momentum": lambda: _tf1.train.MomentumOptimizer(1e-3, 0.9),
    "Adam": lambda: _tf1.train.AdamOptimizer(1e-3),
    "Adagrad": lambda: _tf1.train.AdagradOptimizer(1e-3),
    "RMSProp": lambda: _tf1.train.RMSPropOptimizer(1e-3, momentum=0.9),
}
_STOCK = "stock"
_STOCK_EMA = "stock + EMA"
# {K, the number of averages of a variable: decays}.
_WRAPOPT = {k: f"wrapopt K={k}" for k in (0, 1, len(_DECAYS))}
STEPS = [_STOCK, _STOCK_EMA, *_WRAPOPT.values()]
_SESSION, _FUNCTION, _TRAIN, _EAGER, _TORCH = (
    "v1 session", "tf.function", "train function", "eager", "PyTorch")
_GRAPHS = (_SESSION, _FUNCTION, _TRAIN)  # The modes that have one.
MODES = (*_GRAPHS, _EAGER, _TORCH)
_NO_STEP = "no step"
_TORCH_PROGRAM = os.path.join(os.path.dirname(__file__), "torch_step.py")
# By the name of an optimizer above: a class of torch.optim, and its arguments.
_IN_TORCH = {
    "SGD": ("SGD", {"lr": 1e-3}),
    "Momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "Adam": ("Adam", {"lr": 1e-3}),
    "Adagrad": ("Adagrad", {"lr": 1e-3}),
    "RMSProp": ("RMSprop", {"lr": 1e-3, "momentum": 0.9}),
}


def add_arguments(parser):
  harness.add_optimizer_arguments(parser, OPTIMIZERS)
  parser.add_argument(
      "--modes", nargs="+", choices=MODES, metavar="MODE", default=MODES,
      help=f"how steps are run, of {', '.join(map(repr, MODES))}; default all. "
      "Each mode has arrays of its own: bert-base with Adam takes 4 GB in each")


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  return harness.measure_optimizers(
      options, functools.partial(measure, modes=options.modes))


def measure(name, shapes, optimizer, n_rounds, modes=MODES):
  """Compares all contenders on one set of variables and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    optimizer: The name of an optimizer.
    n_rounds: The number of turns of each contender.
    modes: Some of MODES.

  Returns:
    A list of dicts, one for each row of the table.
  """
  sizes = harness.sizes(shapes)
  make = OPTIMIZERS[optimizer]
  slots = len(_fused.rule_of(make()).slots)
  say = harness.progress(f"{name}, {optimizer}")
  builds = {}
  for mode in (mode for mode in _GRAPHS if mode in modes):
    builds[mode] = {step: _build(mode, shapes, make, step) for step in STEPS}
    say(f"{mode} built")
  limits, place_limits = _limits(shapes, slots)
  if not importlib.util.find_spec("torch"):
    modes = [mode for mode in modes if mode != _TORCH]
  contenders, places = dict(limits), [place_limits]
  with contextlib.ExitStack() as stack:
    def in_session():
      session, *made = _in_session(shapes, make)
      stack.enter_context(contextlib.closing(session))
      return made

    for mode, contenders_of in {
        _SESSION: in_session,
        _FUNCTION: lambda: _in_functions(shapes, make),
        _TRAIN: lambda: _in_functions(shapes, make, made=True),
        _EAGER: lambda: _eagerly(shapes, make),
        _TORCH: lambda: stack.enter_context(_in_torch(shapes, optimizer)),
    }.items():
      if mode in modes:
        of_mode, place = contenders_of()
        contenders.update(of_mode)
        places.append(place)
        say(f"{mode} checked" if mode != _TORCH else f"{mode} started")
    seconds = harness.alternate(contenders, n_rounds, f"{name}, {optimizer}",
                                places=places)
  say(f"{n_rounds} rounds done")
  # Free the memory for the next set.
  del contenders, contenders_of, of_mode, in_session, place, places
  del place_limits
  gc.collect()

  limit = {}
  for k in _WRAPOPT:
    # For a small set, threads slow the limit down.
    limit[k] = min((seconds.pop(key) for key in list(limits) if key[0] == k),
                   key=statistics.median)
  torch = min((times for (mode, _), times in seconds.items() if mode == _TORCH),
              key=statistics.median, default=None)
  results = []
  for key, times in [*((("limit", k), limit[k]) for k in limit),
                     *seconds.items()]:
    mode, step = key
    k = (step if mode == "limit" else 1 if mode == _TORCH
         else _averages(step))
    moved = 4 * sum(sizes) * (1 + 2 * (1 + slots + k))
    result = {
        "set": name,
        "optimizer": optimizer,
        "mode": mode,
        "contender": f"K={k}" if mode == "limit" else step,
        "milliseconds": 1e3 * statistics.median(times),
        "spread": harness.spread(times),
        "gigabytes_per_second": moved / statistics.median(times) / 1e9,
        "of_limit": harness.speedup(times, limit[k]),
        "rounds": n_rounds,
    }
    if mode not in ("limit", _TORCH):
      stock, stock_ema = seconds[mode, _STOCK], seconds[mode, _STOCK_EMA]
      result.update(x_stock=1 / harness.speedup(times, stock),
                    x_stock_ema=1 / harness.speedup(times, stock_ema))
      if torch is not None:
        result["x_torch"] = 1 / harness.speedup(times, torch)
    if mode == _TRAIN:
      result["adds_milliseconds"] = 1e3 * statistics.median(
          x - y for x, y in zip(times, seconds[mode, _NO_STEP]))
    if mode in _GRAPHS and step != _NO_STEP:
      result["ops"], result["build_seconds"] = builds[mode][step]
    results.append(result)
  print(f"\n{name}: {len(shapes)} variables, {sum(sizes):,} numbers, "
        f"{optimizer}: {4e-6 * sum(sizes) * (3 + 2 * slots):,.1f} MB a step, "
        f"{8e-6 * sum(sizes):,.1f} MB an average")
  print(harness.table(
      ("", "ms", "+-", "GB/s", "of limit", "x stock", "x stock+EMA", "adds",
       "ops", "build s"),
      [(f"{r['mode']}, {r['contender']}", f"{r['milliseconds']:.3f}",
        f"{r['spread']:.0%}", f"{r['gigabytes_per_second']:.1f}",
        f"{r['of_limit']:.0%}",
        *(f"{r[key]:{form}}" if key in r else "" for key, form in (
            ("x_stock", ".2f"), ("x_stock_ema", ".2f"),
            ("adds_milliseconds", ".3f"), ("ops", "d"),
            ("build_seconds", ".2f"))))
       for r in results]), flush=True)
  return results


def _averages(step):
  """The number of averages that a contender keeps of each variable."""
  if step in (_NO_STEP, _STOCK, _STOCK_EMA):
    return int(step == _STOCK_EMA)
  return next(k for k, name in _WRAPOPT.items() if name == step)


def _limits(shapes, slots):
  """{(K, threads): function that makes a pass}, and a function as below."""
  limits = {}

  def place():
    limits.clear()  # Free the old arrays first.
    read, written = harness.streams(shapes, 1 + slots + len(_DECAYS))
    for k in _WRAPOPT:
      limits[k] = StreamLimit(read, written[:1 + slots + k])

  return {(k, n): lambda k=k, n=n: limits[k].run(n)
          for k in _WRAPOPT for n in sorted({1, harness.threads()})}, place


class Steps:
  """The steps of all contenders, with one inner optimizer."""

  def __init__(self, make):
    self.opt = make()
    self.rule = _fused.rule_of(self.opt)
    self.wrappers = {
        k: MovingAverageOptimizer(self.opt, list(_DECAYS[:k]), fused=True)
        for k in _WRAPOPT if k}
    self.stock = tf.train.ExponentialMovingAverage(_DECAYS[0], name="stock")

  def apply(self, step, grads_and_vars):
    """Makes the ops of a contender's step; returns the op to run in a graph."""
    if step in (_STOCK, _STOCK_EMA):
      update = self.opt.apply_gradients(grads_and_vars)
      if step == _STOCK:
        return update
      with tf.control_dependencies([] if update is None else [update]):
        return self.stock.apply([v for _, v in grads_and_vars])
    k = _averages(step)
    if k == 0:
      return _fused.apply_gradients(self.opt, self.rule,
                                    _step.Step(grads_and_vars))
    return self.wrappers[k].apply_gradients(grads_and_vars)

  def averages(self, values):
    """Lists of the averages of `values`, each list in the same order."""
    return [[self.stock.average(v) for v in values],
            *([wrapper.average(v, decay) for v in values]
              for k, wrapper in self.wrappers.items()
              for decay in _DECAYS[:k])]

  def slots(self, values):
    """The inner optimizer's state, the slots first."""
    names = self.rule.slots.values()
    slots = [self.opt.get_slot(v, name) for name in names for v in values]
    known = {v.ref() for v in slots}
    return slots + [v for v in self.opt.variables() if v.ref() not in known]

  def fill(self, values, grads):
    """Assigns fixed numbers to all variables.

    No two arrays that a step reads are equal. The order is that of the arrays
    of the streaming limit.
    """
    rows = [values, grads, self.slots(values)]
    seeds = list(range(len(rows)))
    # Averages of one value start equal, so that contenders can be compared.
    averages = self.averages(values)
    done = []
    for row, seed in zip(rows + averages, seeds + [-1] * len(averages)):
      for i, v in enumerate(row):
        with tf.control_dependencies(done):
          filled = v.assign(harness.numbers(v.shape, (seed, i)))
        if not tf.executing_eagerly():
          done = [filled.op]
    return done

  def sample(self, values):
    """A sample of the numbers of each variable, for check_all."""
    return [
        tf.concat([tf.reshape(v, [-1])[::max(1, v.shape.num_elements() // 100)]
                   for v in row], axis=0)
        for row in (values, self.slots(values) or values,
                    *self.averages(values))]


def variables(shapes):
  """(variables, variables that hold their gradients)."""
  return [[tf.Variable(functools.partial(tf.zeros, shape)) for shape in shapes]
          for _ in range(2)]


def _pairs(values, grads):
  return [(g.read_value(), v) for g, v in zip(grads, values)]


def function(steps, step, values, grads, jit_compile=None, made=False):
  """A tf.function that takes a step.

  Args:
    steps: Steps.
    step: One of STEPS, or _NO_STEP.
    values: The variables to train.
    grads: Variables that hold their gradients.
    jit_compile: As in `tf.function`.
    made: Whether to compute gradients from `values` instead of using `grads`.

  Returns:
    A function.
  """
  @tf.function(jit_compile=jit_compile)
  def function():
    pairs = ([(0.5 * v, v) for v in values] if made
             else _pairs(values, grads))
    if step == _NO_STEP:
      with tf.control_dependencies([g for g, _ in pairs]):
        return tf.constant(0)  # Otherwise nothing would run.
    steps.apply(step, pairs)
    return None  # A result would be copied.
  return function


def _build(mode, shapes, make, step):
  """(number of ops, seconds) that it takes to build a contender's step."""
  in_graph = mode == _SESSION
  with (tf.Graph().as_default() if in_graph else contextlib.nullcontext(),
        tf.device("/cpu:0")):
    values, grads = variables(shapes)
    steps = Steps(make)
    if in_graph:
      pairs = _pairs(values, grads)
      graph = tf.compat.v1.get_default_graph()
      before = len(graph.get_operations())
    start = time.perf_counter()
    if in_graph:
      steps.apply(step, pairs)
    else:
      graph = function(steps, step, values, grads,
                       made=mode == _TRAIN).get_concrete_function().graph
      before = 0
    return (len(graph.get_operations()) - before, time.perf_counter() - start)


# Each of these returns {(mode, contender): function that takes a step}, and a
# function that makes new arrays with the initial state.


def _in_session(shapes, make):
  """Also returns the session, first."""
  graph = tf.Graph()
  with graph.as_default(), tf.device("/cpu:0"):
    values, grads = variables(shapes)
    pairs = _pairs(values, grads)
    steps = Steps(make)
    updates = {step: steps.apply(step, pairs) for step in STEPS}
    init = _tf1.global_variables_initializer()
    fill, = steps.fill(values, grads)
    state = steps.sample(values)
  session = _tf1.Session(graph=graph)
  session.run(init)
  contenders = {(_SESSION, step): session.make_callable(op)
                for step, op in updates.items()}
  place = session.make_callable(fill)
  check_all(contenders, place, lambda: session.run(state))
  return session, contenders, place


def _in_functions(shapes, make, made=False):
  with tf.device("/cpu:0"):
    values, grads = variables(shapes)
  steps = Steps(make)
  mode = _TRAIN if made else _FUNCTION
  contenders = {(mode, step): function(steps, step, values, grads, made=made)
                for step in STEPS}
  place = _start(contenders, steps, values, grads)
  if made:
    contenders = {(mode, _NO_STEP): function(steps, _NO_STEP, values, grads,
                                             made=True), **contenders}
  return contenders, place


def _eagerly(shapes, make):
  with tf.device("/cpu:0"):
    values, grads = variables(shapes)
  steps = Steps(make)
  given = []  # The gradients, as tensors.
  contenders = {
      (_EAGER, step): lambda step=step: steps.apply(step, given[:])
      for step in STEPS}

  def refresh():
    given[:] = _pairs(values, grads)

  return contenders, _start(contenders, steps, values, grads, refresh)


def _start(contenders, steps, values, grads, refresh=lambda: None):
  """Takes and checks first steps; returns the function for new arrays."""
  refresh()
  for step in contenders.values():
    step()  # Makes slots and averages.

  def place():
    with tf.device("/cpu:0"):
      steps.fill(values, grads)
    refresh()

  check_all(contenders, place, lambda: steps.sample(values))
  return place


@contextlib.contextmanager
def _in_torch(shapes, optimizer):
  name, arguments = _IN_TORCH[optimizer]
  given = (shapes, name, arguments, _DECAYS[0], harness.threads())
  with subprocess.Popen(
      [sys.executable, _TORCH_PROGRAM, json.dumps(given)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

    def ask(*line):
      process.stdin.write(json.dumps(line) + "\n")
      process.stdin.flush()
      return json.loads(process.stdout.readline())

    yield ({(_TORCH, code): harness.RemoteContender(
        functools.partial(ask, "seconds", code)) for code in ask("codes")},
           lambda: ask("place"))


def check_all(contenders, place, state):
  """Raises an error unless all contenders take the same step.

  Args:
    contenders: {(mode, contender): function that takes a step}.
    place: A function that sets the initial state.
    state: A function that returns samples of the values, of the slots, and of
      each row of Steps.averages.
  """
  first = None
  for (mode, name), step in contenders.items():
    place()
    _, _, *before = (np.array(x, np.float64) for x in state())
    step()
    values, slots, *averages = (np.array(x, np.float64) for x in state())
    first = first or (values, slots)
    updated = {_STOCK_EMA: [0], _WRAPOPT[1]: [1], _WRAPOPT[3]: [2, 3, 4]}
    expected = list(before)
    for decay, row in zip(_DECAYS, updated.get(name, [])):
      expected[row] = before[row] + (1 - decay) * (values - before[row])
    for what, got, want in (("values", values, first[0]),
                            ("slots", slots, first[1]),
                            ("averages", averages, expected)):
      # TensorFlow's 1 - decay is a float32 difference; all are of order 1.
      if not np.allclose(got, want, rtol=0, atol=1e-5):
        raise AssertionError(f"{mode}, {name}: the {what} are off by "
                             f"{np.abs(np.subtract(got, want)).max():.3g} "
                             "after one step.")
