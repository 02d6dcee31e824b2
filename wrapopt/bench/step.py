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
import importlib.util
import sys
import time

import tensorflow as tf

from wrapopt._v1 import _fused
from wrapopt._v1 import _step
from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt import MovingAverageOptimizer

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
# {contender: the number of averages of a variable}.
_WRAPOPT = {f"wrapopt K={k}": k for k in (0, 1, len(_DECAYS))}
_NO_STEP = "no step"
_AVERAGES = {_STOCK: 0, _STOCK_EMA: 1, **_WRAPOPT, _NO_STEP: 0}
STEPS = [_STOCK, _STOCK_EMA, *_WRAPOPT]
_SESSION, _FUNCTION, _TRAIN, _EAGER, _TORCH = (
    "v1 session", "tf.function", "train function", "eager", "PyTorch")
MODES = (_SESSION, _FUNCTION, _TRAIN, _EAGER, _TORCH)
# By the name of an optimizer above: a class of torch.optim, and its arguments.
_IN_TORCH = {
    "SGD": ("SGD", {"lr": 1e-3}),
    "Momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "Adam": ("Adam", {"lr": 1e-3}),
    "Adagrad": ("Adagrad", {"lr": 1e-3}),
    "RMSProp": ("RMSprop", {"lr": 1e-3, "momentum": 0.9}),
}


def add_arguments(parser):
  harness.add_sets(parser)
  harness.add_choice(parser, "optimizers", OPTIMIZERS)
  harness.add_choice(
      parser, "modes", MODES, what="how steps are run; each mode has arrays of "
      "its own, for bert-base with Adam of 4 GB")


def contests(options):
  for name, shapes in harness.chosen_sets(options):
    for optimizer in options.optimizers:
      yield from _contest(name, shapes, optimizer, options.modes)


def _contest(name, shapes, optimizer, modes):
  make = OPTIMIZERS[optimizer]
  slots = len(_fused.rule_of(make()).slots)
  mega = 1e-6 * sum(sets.sizes(shapes))
  contest = harness.Contest(
      f"{sets.described(name, shapes)}, {optimizer}: "
      f"{4 * mega * (3 + 2 * slots):,.1f} MB a step, {8 * mega:,.1f} MB an "
      "average", {"set": name, "optimizer": optimizer},
      peers={"x_stock": _STOCK, "x_stock_ema": _STOCK_EMA,
             "x_torch": [(_TORCH, "fused"), (_TORCH, "foreach")],
             "adds_milliseconds": _NO_STEP},
      expected=Expected(), streams=(shapes, 1))
  written = {step: 1 + slots + k for step, k in _AVERAGES.items()}
  for mode, contenders in {
      _SESSION: lambda: harness.in_session(lambda: graph(shapes, make)),
      _FUNCTION: lambda: in_functions(shapes, make),
      _TRAIN: lambda: in_functions(shapes, make, [_NO_STEP, *STEPS], made=True),
      _EAGER: lambda: _eagerly(shapes, make)}.items():
    if mode in modes:
      builds = {step: _build(mode, shapes, make, step)
                for step in STEPS if mode != _EAGER}
      contest.say(f"{mode} built")
      contest.add(*contenders(), mode, written, builds)
  with contextlib.ExitStack() as stack:
    if _TORCH in modes and importlib.util.find_spec("torch"):
      contest.add(*stack.enter_context(harness.in_torch(
          sys.executable, shapes, *_IN_TORCH[optimizer], _DECAYS[0])),
                  mode=_TORCH, written=2 + slots)
    yield contest


class Expected:
  """What a step makes of the numbers, as `harness.check` wants it.

  The first contender of a mode determines the values and slots of all.
  """

  def __init__(self):
    self._firsts = {}

  def __call__(self, name, before, after):
    if name.endswith(_NO_STEP):
      return {}
    first = self._firsts.setdefault(name.rpartition(", ")[0], after)
    want = {}
    for what, was in before.items():
      number, _, of_step = what.partition(" of ")
      if not of_step:
        want[what] = first[what]
      elif name.endswith(of_step):
        decay = _DECAYS[int(number.removeprefix("average "))]
        want[what] = was + (1 - decay) * (after["values"] - was)
      else:
        want[what] = was
    # TensorFlow's 1 - decay is a float32 difference; all are of order 1.
    return {what: (x, 1e-5) for what, x in want.items()}


class Steps:
  """The steps of all contenders, with one inner optimizer."""

  def __init__(self, make):
    self.opt = make()
    self.rule = _fused.rule_of(self.opt)
    self.wrappers = {
        name: MovingAverageOptimizer(self.opt, list(_DECAYS[:k]), fused=True)
        for name, k in _WRAPOPT.items() if k}
    self.stock = tf.train.ExponentialMovingAverage(_DECAYS[0], name="stock")

  def apply(self, step, grads_and_vars):
    """Makes the ops of a contender's step; returns the op to run in a graph."""
    if step in self.wrappers:
      return self.wrappers[step].apply_gradients(grads_and_vars)
    if step not in (_STOCK, _STOCK_EMA):
      return _fused.apply_gradients(self.opt, self.rule,
                                    _step.Step(grads_and_vars))
    update = self.opt.apply_gradients(grads_and_vars)
    if step == _STOCK:
      return update
    with tf.control_dependencies([] if update is None else [update]):
      return self.stock.apply([v for _, v in grads_and_vars])

  def averages(self, values):
    """{name: averages of `values`}."""
    return {f"average 0 of {_STOCK_EMA}": [
        self.stock.average(v) for v in values], **{
            f"average {k} of {name}": [
                wrapper.average(v, decay) for v in values]
            for name, wrapper in self.wrappers.items()
            for k, decay in enumerate(_DECAYS[:_WRAPOPT[name]])}}

  def slots(self, values):
    """The inner optimizer's state, the slots first."""
    names = self.rule.slots.values()
    slots = [self.opt.get_slot(v, name) for name in names for v in values]
    known = {v.ref() for v in slots}
    return slots + [v for v in self.opt.variables() if v.ref() not in known]

  def fill(self, values, grads):
    """Assigns fixed numbers to all variables.

    No two arrays that a step reads are equal. Averages of one value start
    equal, so that contenders can be compared.
    """
    averages = list(self.averages(values).values())
    return sets.filled([values, grads, self.slots(values), *averages],
                          [0, 1, 2] + [-1] * len(averages))

  def sample(self, values):
    """A sample of all numbers, for `harness.check`."""
    rows = {"values": values, "slots": self.slots(values) or values,
            **self.averages(values)}
    return {what: harness.sample(row) for what, row in rows.items()}


def variables(shapes):
  """(variables, variables that hold their gradients)."""
  return [[tf.Variable(functools.partial(tf.zeros, shape)) for shape in shapes]
          for _ in range(2)]


def _pairs(values, grads):
  return [(g.read_value(), v) for g, v in zip(grads, values)]


def _function(steps, step, values, grads, jit_compile=None, made=False):
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
  """The costs of building a contender's step: figures."""
  in_graph = mode == _SESSION
  with (tf.Graph().as_default() if in_graph else contextlib.nullcontext(),
        tf.device("/cpu:0")):
    values, grads = variables(shapes)
    steps = Steps(make)
    before = 0
    if in_graph:
      pairs = _pairs(values, grads)
      graph_of_step = _tf1.get_default_graph()
      before = len(graph_of_step.get_operations())
    start = time.perf_counter()
    if in_graph:
      steps.apply(step, pairs)
    else:
      graph_of_step = _function(
          steps, step, values, grads,
          made=mode == _TRAIN).get_concrete_function().graph
    return {"ops": len(graph_of_step.get_operations()) - before,
            "build_seconds": time.perf_counter() - start}


# These return {contender: function that takes a step}, a function that makes
# new arrays with the initial state, and one that returns a sample of it.


def graph(shapes, make):
  """As `harness.in_session` wants it."""
  values, grads = variables(shapes)
  pairs = _pairs(values, grads)
  steps = Steps(make)
  updates = {step: steps.apply(step, pairs) for step in STEPS}
  return updates, steps.fill(values, grads), steps.sample(values)


def in_functions(shapes, make, contenders=STEPS, jit_compile=None, made=False):
  with tf.device("/cpu:0"):
    values, grads = variables(shapes)
  steps = Steps(make)
  for step in STEPS:  # Slots and averages are made by the first trace.
    _function(steps, step, values, grads)()

  def place():
    with tf.device("/cpu:0"):
      steps.fill(values, grads)

  return ({step: _function(steps, step, values, grads, jit_compile, made)
           for step in contenders}, place, lambda: steps.sample(values))


def _eagerly(shapes, make):
  with tf.device("/cpu:0"):
    values, grads = variables(shapes)
  steps = Steps(make)
  given = []  # The gradients, as tensors.
  contenders = {step: lambda step=step: steps.apply(step, given[:])
                for step in STEPS}

  def place():
    with tf.device("/cpu:0"):
      steps.fill(values, grads)
    given[:] = _pairs(values, grads)

  given[:] = _pairs(values, grads)
  for step in contenders.values():
    step()  # Makes slots and averages.
  return contenders, place, lambda: steps.sample(values)
