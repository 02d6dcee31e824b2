"""A step of an optimizer with given gradients, and with averages of its result.

Compares, for each optimizer of tf.compat.v1.train,

  stock         the optimizer
  stock + EMA   the optimizer, and then TensorFlow's ExponentialMovingAverage
  wrapopt K=0   the same step by `wrapopt.ops.apply`, without averages
  wrapopt K=1   `wrapopt.MovingAverageOptimizer` around the optimizer
  wrapopt K=3   the same with three averages of different decays
  limit K=...   native threads that only add, to as many arrays

All of them take the same step of the same float32 resource variables; the
results are checked. "Schedule-Free" and "averages" compare optimizers of Keras
with each other and with wrappers around them, on variables of their own; in a
v1 session, "Schedule-Free" has TensorFlow 1's Adam and
`wrapopt.ScheduleFreeOptimizer` around it. GB/s counts the least traffic of a
pass: each gradient is read, each variable, slot and average is read and
written.

A mode is how a step runs. In a tf.function, given gradients are variables that
it captures, each at a cost. "jit" is a tf.function that XLA compiles.

If PyTorch is installed, its optimizers also take the step, with their "fused"
and their "foreach" code, and `torch._foreach_lerp_` updates the average; beside
"Schedule-Free" it is AdamWScheduleFree of the package `schedulefree`.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys

import keras
import tensorflow as tf

import wrapopt
from wrapopt._v1._steps import _rules
from wrapopt._v1._steps import _step
from wrapopt.bench import harness
from wrapopt.bench import sets

_tf1 = tf.compat.v1
_DECAYS = (0.999, 0.99, 0.9)
V1 = {
    "SGD": lambda: _tf1.train.GradientDescentOptimizer(1e-3),
    "Momentum": lambda: _tf1.train.MomentumOptimizer(1e-3, 0.9),
    "Adam": lambda: _tf1.train.AdamOptimizer(1e-3),
    "Adagrad": lambda: _tf1.train.AdagradOptimizer(1e-3),
    "RMSProp": lambda: _tf1.train.RMSPropOptimizer(1e-3, momentum=0.9)}
_STOCK, _STOCK_EMA = "stock", "stock + EMA"
# {contender: the number of averages of a variable}.
_WRAPOPT = {f"wrapopt K={k}": k for k in (0, 1, len(_DECAYS))}
STEPS = {_STOCK: 0, _STOCK_EMA: 1, **_WRAPOPT}
_ADAM, _AVERAGE, _FREE = "Adam", "MovingAverage(Adam)", "ScheduleFree(Adam)"
_adam = lambda: keras.optimizers.Adam(1e-3)
_momentum = lambda: keras.optimizers.SGD(1e-3, momentum=0.9)


def _wrapped(wrapper, inner, *args):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras
  return getattr(wrapopt.keras, wrapper)(inner(), *args)


# {contender: (the function that makes it, arrays that a step writes)}.
KERAS = {
    "Schedule-Free": {
        _ADAM: (_adam, 3),
        _FREE: (lambda: _wrapped("ScheduleFree", _adam), 3),
        "ScheduleFreeAdamW": (
            lambda: keras.optimizers.ScheduleFreeAdamW(1e-3), 4),
        "SGD, momentum": (_momentum, 2),
        "ScheduleFree(SGD)": (lambda: _wrapped(
            "ScheduleFree", lambda: keras.optimizers.SGD(1e-3)), 2)},
    "averages": {
        _ADAM: (_adam, 3),
        _AVERAGE: (lambda: _wrapped("MovingAverage", _adam), 4),
        "BEMA(Adam)": (
            lambda: _wrapped("MovingAverage", _adam, wrapopt.BEMA()), 4),
        "PrimalAverage(Adam)": (lambda: _wrapped("PrimalAverage", _adam), 4)}}
_V1_FREE = {
    _ADAM: V1["Adam"],
    _FREE: lambda: wrapopt.ScheduleFreeOptimizer(V1["Adam"]())}
# {optimizer: (a class of PyTorch, its arguments)}.
_IN_TORCH = {
    "SGD": ("torch.optim.SGD", {"lr": 1e-3}),
    "Momentum": ("torch.optim.SGD", {"lr": 1e-3, "momentum": 0.9}),
    "Adam": ("torch.optim.Adam", {"lr": 1e-3}),
    "Adagrad": ("torch.optim.Adagrad", {"lr": 1e-3}),
    "RMSProp": ("torch.optim.RMSprop", {"lr": 1e-3, "momentum": 0.9}),
    "Schedule-Free": ("schedulefree.AdamWScheduleFree", {"lr": 1e-3})}
_SESSION, _TORCH = "v1 session", "PyTorch"
_PEERS = {"x_stock": _STOCK, "x_stock_ema": _STOCK_EMA,
          "x_torch": [(_TORCH, "fused"), (_TORCH, "foreach")],
          "x_adam": _ADAM, "x_average": _AVERAGE}


def add_arguments(parser):
  harness.add_sets(parser)
  harness.add_choice(parser, "optimizers", [*V1, *KERAS], V1)
  harness.add_choice(
      parser, "modes", [*MODES, _TORCH], what="how steps are run; each mode "
      "has arrays of its own, for bert-base with Adam of 4 GB")


def contests(options):
  for name in options.sets:
    for optimizer in options.optimizers:
      yield from _contest(name, optimizer, options)


def _contest(name, optimizer, options):
  shapes = sets.VARIABLE_SETS[name]
  contest = harness.Contest(
      f"{sets.described(name)}, {optimizer}",
      {"set": name, "optimizer": optimizer}, _PEERS, Expected(), shapes)
  if optimizer in V1:
    slots = len(_rules.rule_of(V1[optimizer]()).slots)
    written = {step: 1 + slots + k for step, k in STEPS.items()}
  else:
    written = {step: n for step, (_, n) in KERAS[optimizer].items()}
  for mode, contenders in MODES.items():
    if mode in options.modes:
      contest.add(*contenders(functools.partial(steps_of, shapes, optimizer)),
                  mode, written)
  with contextlib.ExitStack() as stack:
    if _TORCH in options.modes and optimizer in _IN_TORCH:
      average, decay = (("wrapopt K=1", _DECAYS[0]) if optimizer in V1 else
                        (_FREE, None))
      calls, place = stack.enter_context(_in_torch(
          shapes, *_IN_TORCH[optimizer], decay))
      contest.add(calls, place, mode=_TORCH,
                  written=dict.fromkeys(calls, written[average]))
    yield contest


def steps_of(shapes, optimizer):
  """Steps of an optimizer, with new variables on this device or in this graph.

  Each has `values` and `grads`; `contenders`; `apply`, which makes the ops of a
  contender's step and returns the op to run in a graph; `fill`, which assigns
  fixed numbers to all variables; and `sample`, which returns a sample of them
  for `harness.check`.
  """
  if optimizer in V1:
    return [Steps(shapes, V1[optimizer])]
  if tf.executing_eagerly():
    return [_OfKeras(shapes, step, make)
            for step, (make, _) in KERAS[optimizer].items()]
  return [_Alone(shapes, step, make) for step, make in _V1_FREE.items()
          if optimizer == "Schedule-Free"]


class Expected:
  """What a step makes of the numbers, as `harness.check` wants it.

  The first contender of a mode determines the values and slots of all.
  """

  def __init__(self):
    self._firsts = {}

  def __call__(self, name, before, after):
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


def variables(shapes):
  return [tf.Variable(functools.partial(tf.zeros, shape)) for shape in shapes]


class Steps:
  """The steps of all contenders, which train the same variables."""

  contenders = tuple(STEPS)

  def __init__(self, shapes, make):
    self.values, self.grads = variables(shapes), variables(shapes)
    self.opt = make()
    self.rule = _rules.rule_of(self.opt)
    self.wrappers = {
        name: wrapopt.MovingAverageOptimizer(self.opt, list(_DECAYS[:k]),
                                             fused=True)
        for name, k in _WRAPOPT.items() if k}
    self.stock = tf.train.ExponentialMovingAverage(_DECAYS[0], name="stock")

  def apply(self, step, grads_and_vars):
    if step in self.wrappers:
      return self.wrappers[step].apply_gradients(grads_and_vars)
    if step not in (_STOCK, _STOCK_EMA):
      return _rules.apply_gradients(self.opt, self.rule,
                                    _step.Step(grads_and_vars))
    update = self.opt.apply_gradients(grads_and_vars)
    if step == _STOCK:
      return update
    with tf.control_dependencies([] if update is None else [update]):
      return self.stock.apply([v for _, v in grads_and_vars])

  def averages(self):
    """{name: averages of the values}."""
    return {f"average 0 of {_STOCK_EMA}": [
        self.stock.average(v) for v in self.values], **{
            f"average {k} of {name}": [
                wrapper.average(v, decay) for v in self.values]
            for name, wrapper in self.wrappers.items()
            for k, decay in enumerate(_DECAYS[:_WRAPOPT[name]])}}

  def slots(self):
    """The inner optimizer's state, the slots first."""
    names = self.rule.slots.values()
    slots = [self.opt.get_slot(v, name) for name in names for v in self.values]
    known = {v.ref() for v in slots}
    return slots + [v for v in self.opt.variables() if v.ref() not in known]

  def fill(self):
    # No two arrays that a step reads are equal. Averages of one value start
    # equal, so that contenders can be compared.
    averages = list(self.averages().values())
    return sets.filled([self.values, self.grads, self.slots(), *averages],
                       [0, 1, 2] + [-1] * len(averages))

  def sample(self):
    rows = {"values": self.values, "slots": self.slots() or self.values,
            **self.averages()}
    return {what: harness.sample(row) for what, row in rows.items()}


class _Alone:
  """The step of a contender that has variables of its own."""

  def __init__(self, shapes, step, make):
    self.contenders = (step,)
    self.values, self.grads = variables(shapes), variables(shapes)
    self.opt = make()

  def apply(self, step, grads_and_vars):
    return self.opt.apply_gradients(grads_and_vars)

  def fill(self):
    slots = [v for v in self.opt.variables()
             if v.shape.rank and v.dtype == tf.float32]
    return sets.filled([self.values, self.grads, slots], range(3))

  def sample(self):
    return {}


class _OfKeras(_Alone):

  def __init__(self, shapes, step, make):
    super().__init__(shapes, step, make)
    self.values = [keras.Variable(
        lambda shape, dtype: tf.zeros(shape, dtype), shape=shape,
        dtype="float32") for shape in shapes]
    self.opt.build(self.values)

  def apply(self, step, grads_and_vars):
    self.opt.apply(*map(list, zip(*grads_and_vars)))

  def fill(self):
    own = self.opt._variables  # Not all are in `variables`.
    state = {id(v): v.value for v in (
        *self.values, *self.opt.variables,
        *(own if isinstance(own, list) else ()))
             if v.dtype == "float32" and v.shape}
    return sets.filled([state.values(), self.grads], range(2))


# How steps are run. These get a function that makes steps, and return
# {contender: function that takes a step}, a function that makes new arrays with
# the initial state, and one that returns a sample of it.


def _pairs(steps):
  return [(g.read_value(), v) for g, v in zip(steps.grads, steps.values)]


def graph(make):
  """As `harness.in_session` wants it."""
  ops, fills, samples = {}, [], {}
  for k, steps in enumerate(make()):
    with _tf1.variable_scope(f"of{k}"):
      pairs = _pairs(steps)
      ops |= {step: steps.apply(step, pairs) for step in steps.contenders}
    fills += steps.fill()
    samples |= steps.sample()
  return ops, fills, samples


def _function(steps, step, jit_compile=None):
  """A tf.function that takes a step.

  Args:
    steps: As from `steps_of`.
    step: One of its contenders.
    jit_compile: As in `tf.function`.

  Returns:
    A function.
  """
  @tf.function(jit_compile=jit_compile, autograph=False)
  def function():
    steps.apply(step, _pairs(steps))  # No result, which would be copied.

  # TensorFlow warns of functions of one name that their calls trace.
  function.get_concrete_function()
  return function


def in_functions(make, jit_compile=None):
  with tf.device("/cpu:0"):
    group, calls = make(), {}
  for steps in group:
    for step in steps.contenders:  # The first trace makes slots and averages.
      _function(steps, step)
    for step in steps.contenders:
      calls[step] = _function(steps, step, jit_compile)
  return calls, *_placed(group)


def _eagerly(make):
  with tf.device("/cpu:0"):
    group, given, calls = make(), {}, {}

  def give():
    for steps in group:
      given[steps] = _pairs(steps)

  give()
  for steps in group:
    for step in steps.contenders:
      calls[step] = lambda steps=steps, step=step: steps.apply(
          step, given[steps][:])
      calls[step]()  # Makes slots and averages.
  return calls, *_placed(group, give)


def _placed(group, then=lambda: None):
  def place():
    with tf.device("/cpu:0"):
      for steps in group:
        steps.fill()
    then()

  return place, lambda: functools.reduce(
      dict.__or__, (steps.sample() for steps in group))


MODES = {
    _SESSION: lambda make: harness.in_session(lambda: graph(make)),
    "tf.function": in_functions,
    "jit": lambda make: in_functions(make, jit_compile=True),
    "eager": _eagerly}


@contextlib.contextmanager
def _in_torch(shapes, name, *arguments):
  """Contenders of PyTorch in another process.

  Args:
    shapes: Those of the variables.
    name: The name of a class, with its module.
    *arguments: The other arguments of torch_step.Steps, but the number of
      threads.

  Yields:
    {code: RemoteContender}, and a function that makes new arrays; none if this
    Python does not have the class.
  """
  if subprocess.run(
      [sys.executable, "-c", f"import torch, {name.rpartition('.')[0]}"],
      check=False, capture_output=True).returncode:
    yield {}, None
    return
  program = os.path.join(os.path.dirname(__file__), "torch_step.py")
  with subprocess.Popen(
      [sys.executable, program, json.dumps([
          shapes, name, *arguments, harness.threads()])],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

    def ask(*line):
      process.stdin.write(json.dumps(line) + "\n")
      process.stdin.flush()
      return json.loads(process.stdout.readline())

    yield ({code: harness.RemoteContender(functools.partial(
        ask, "seconds", code)) for code in ask("place")}, lambda: ask("place"))
