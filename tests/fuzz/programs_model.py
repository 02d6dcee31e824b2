"""What a program of `programs.py` must give, in float64 NumPy.

Written from the docstrings of the wrappers and the papers of the inner
optimizers. All constants are exact in each dtype, so that only the arithmetic
of a step rounds.
"""

import copy
import typing

import ml_dtypes
import numpy as np

import programs
from programs_prelude import indices
from programs_prelude import numbers
from programs_prelude import start

BETA_1, BETA_2, EPSILON, MOMENTUM, WEIGHT_DECAY = 0.25, 0.5, 2**-10, 0.75, 0.125
RHO, ACCUMULATOR = 0.875, 0.125
RATE = 0.5

# How many roundings, of its largest value, a step of a variable takes.
_ROUNDINGS = {"float64": 64, "float32": 16, "float16": 2, "bfloat16": 2}


def is_sparse(program, t, i):
  """Whether the t-th gradient of the i-th variable is sparse."""
  # Eagerly, one variable may have both.
  return program.variables[i].rows and not (t >= 8 and program.mode == "eager")


class Gradient(typing.NamedTuple):
  """A gradient as a dense array.

  Attributes:
    sum: The gradient.
    squares: The sum of the squares of what is summed in it.
    sizes: The same of the absolute values.
    rows: Which rows it touches: an array of bool, [rows, 1], or True.
  """
  sum: np.ndarray
  squares: np.ndarray
  sizes: np.ndarray
  rows: typing.Any

  def summed(self):
    """The same, of one term."""
    return self._replace(squares=self.sum**2, sizes=np.abs(self.sum))


def gradient(program, t, i):
  """The t-th gradient of the i-th variable."""
  shape = program.variables[i].shape
  if not is_sparse(program, t, i):
    g = numbers(t, i, shape)
    return Gradient(g, g * g, np.abs(g), True)
  at = indices(t, i, shape[0])
  values = numbers(t, i, (len(at), *shape[1:]))
  sums = [np.zeros(shape) for _ in range(3)]
  for total, terms in zip(sums, (values, values**2, np.abs(values))):
    np.add.at(total, at, terms)
  rows = np.zeros((shape[0], 1), bool)
  rows[at] = True
  # TensorFlow sums the gradients of a row before it squares them, Keras after.
  g = Gradient(*sums, rows)
  return g.summed() if program.api == "v1" else g


# The inner optimizers. Each takes the variable, its slots, a Gradient, the
# learning rate and the number of the step from 1; it changes the first two.


def _descend(w, s, g, lr, t):
  del s, t
  w -= lr * g.sum


def _momentum_keras(w, s, g, lr, t, nesterov=False):
  del t
  s["m"] = MOMENTUM * s["m"] - lr * g.sum
  w += MOMENTUM * s["m"] - lr * g.sum if nesterov else s["m"]


def _momentum_v1(w, s, g, lr, t, nesterov=False):
  del t
  m = MOMENTUM * s["m"] + g.sum
  s["m"] = np.where(g.rows, m, s["m"])
  w -= np.where(g.rows, lr * (g.sum + MOMENTUM * m if nesterov else m), 0)


def _adam(w, s, g, lr, t, rows=True, beta_1=BETA_1):
  m = beta_1 * s["m"] + (1 - beta_1) * g.sum
  v = BETA_2 * s["v"] + (1 - BETA_2) * g.squares
  rate = lr * np.sqrt(1 - BETA_2**t) / (1 - beta_1**t)
  w -= np.where(rows, rate * m / (np.sqrt(v) + EPSILON), 0)
  s["m"], s["v"] = np.where(rows, m, s["m"]), np.where(rows, v, s["v"])


def _adam_without_momentum(w, s, g, lr, t):
  _adam(w, s, g, lr, t, beta_1=0)


def _lazy_adam(w, s, g, lr, t):
  _adam(w, s, g.summed(), lr, t, g.rows)


def _adagrad(w, s, g, lr, t, epsilon=0.0):
  del t
  s["a"] = s["a"] + g.squares
  w -= lr * g.sum / np.sqrt(s["a"] + epsilon)


def _rms_prop_keras(w, s, g, lr, t):
  del t
  s["v"] = RHO * s["v"] + (1 - RHO) * g.squares
  w -= lr * g.sum / np.sqrt(s["v"] + EPSILON)


def _rms_prop_v1(w, s, g, lr, t):
  del t
  v = RHO * s["one"] + (1 - RHO) * g.squares
  m = MOMENTUM * s["m"] + lr * g.sum / np.sqrt(v + EPSILON)
  w -= np.where(g.rows, m, 0)
  s["one"], s["m"] = (np.where(g.rows, v, s["one"]),
                      np.where(g.rows, m, s["m"]))


def _adadelta(w, s, g, lr, t):
  del t
  a = RHO * s["m"] + (1 - RHO) * g.squares
  u = np.sqrt((s["v"] + EPSILON) / (a + EPSILON)) * g.sum
  d = RHO * s["v"] + (1 - RHO) * u * u
  w -= np.where(g.rows, lr * u, 0)
  s["m"], s["v"] = np.where(g.rows, a, s["m"]), np.where(g.rows, d, s["v"])


def _adamax(w, s, g, lr, t):
  s["m"] = BETA_1 * s["m"] + (1 - BETA_1) * g.sum
  s["v"] = np.maximum(BETA_2 * s["v"], g.sizes)
  w -= lr * s["m"] / ((1 - BETA_1**t) * (s["v"] + EPSILON))


def _decayed(step):
  def decay_first(w, s, g, lr, t):
    w -= lr * WEIGHT_DECAY * w
    step(w, s, g, lr, t)
  return decay_first


RULES = {
    "keras": {
        "SGD": _descend, "SGDW": _decayed(_descend),
        "Momentum": _momentum_keras,
        "Nesterov": lambda *args: _momentum_keras(*args, nesterov=True),
        "Adam": _adam, "AdamW": _decayed(_adam), "LazyAdam": _lazy_adam,
        "Adagrad": lambda *args: _adagrad(*args, epsilon=EPSILON),
        "RMSprop": _rms_prop_keras, "Adamax": _adamax,
        "Adam0": _adam_without_momentum},
    "v1": {
        "GradientDescent": _descend,
        "Momentum": _momentum_v1,
        "Nesterov": lambda *args: _momentum_v1(*args, nesterov=True),
        "Adam": _adam, "LazyAdam": _lazy_adam, "Adagrad": _adagrad,
        "RMSProp": _rms_prop_v1, "Adadelta": _adadelta,
        "Adam0": _adam_without_momentum},
}

_ONE_PASS_THAT_SQUARES = ("Adam", "Adam0", "AdamW", "Adagrad", "RMSprop")


class Model:
  """The state of a program.

  Attributes:
    values: The variables.
    averages: {wrapper: rows of averages, a row for each decay}.
    slow: The slow weights of a Lookahead.
    z: The points that the inner optimizer trains, if others are between.
    holds_x: Whether a variable holds its average x, and not y.
    order: The variables that Keras's optimizer was built with.
    trained: Which variables `fit` trains.
    centers: The centers.
    step: The global step, or Keras's count of steps.
    dropped: How many steps a gate has dropped.
    scale: The scale of losses.
    exists: Whether a variable has averages and slots.
    has_gate: Whether a gate has its variables.
  """

  def __init__(self, program):
    self.program = program
    self.restart(False)
    self.files = []

  def restart(self, fresh):
    program = self.program
    n = range(len(program.variables))
    self.values = [np.array(start(i, v.shape, fresh))
                   for i, v in enumerate(program.variables)]
    copies = lambda: [x.copy() for x in self.values]
    self.slots = [{"m": np.zeros(v.shape), "v": np.zeros(v.shape),
                   "a": np.full(v.shape, ACCUMULATOR), "one": np.ones(v.shape)}
                  for v in program.variables]
    self.averages = {
        name: [copies() for _ in program.options(name).get("decays", [None])]
        for name in program.averaging}
    self.counts = {name: 0 for name in program.averaging}
    self.begun = {name: False for name in (
        "MovingAverage", "Lookahead", programs.PRIMAL[0], programs.FREE[0])}
    self.since = -1  # Before which step a PowerDecay's average began.
    self.slow, self.centers, self.z = copies(), copies(), copies()
    self.holds_x = [False for _ in n]
    self.weights = self.largest_rate = 0.0  # Of Schedule-Free learning.
    self.order, self.trained = tuple(n), (True,) * len(n)
    self.sums = [np.zeros(v.shape) for v in program.variables]
    self.rate = RATE
    self.step = self.updates = self.gradients = self.local_step = 0
    self.dropped = self.finite = 0
    self.scale = (program.options("LossScale")["scale"]
                  if program.has("LossScale") else 1.0)
    in_graph = program.api == "keras" or program.mode in programs.SESSIONS
    self.exists = [in_graph for _ in n]
    # Of which variables a step has made the slots.
    self.stepped = [in_graph for _ in n]
    self.has_gate = in_graph and program.has(*programs.GATES)
    if not hasattr(self, "largest"):
      self.largest, self.roundings = [1.0 for _ in n], 1

  # Files

  def save(self):
    """A copy of all that files hold."""
    return copy.deepcopy({name: x for name, x in vars(self).items()
                          if name not in ("program", "files", "largest",
                                          "roundings")})

  def restore(self, saved, fresh, order):
    """Restores a copy, into new objects if `fresh`, of some variables."""
    rate = self.rate
    if fresh:
      self.restart(True)
    made = self.exists, self.stepped, self.has_gate
    trained = self.trained
    vars(self).update(copy.deepcopy(saved))
    self.order, self.trained = order, trained
    # An average that the file lacks starts at its variable.
    for i in set(order).difference(saved["order"]):
      for row in (self.slow, self.z, *(
          row for rows in self.averages.values() for row in rows)):
        row[i] = self.values[i].copy()
    if self.program.api == "v1":
      # The rate is not saved, and what is no slot is made in the next step.
      self.rate = rate
      if self.program.mode not in programs.SESSIONS:
        self.stepped, self.has_gate = (([False] * len(self.values), False)
                                       if fresh else made[1:])

  def restore_swapped(self, saved):
    """As a plain Saver does from a file of a swapping_saver."""
    self.restore(saved, False, self.order)
    if name := self.program.between:
      self.put(name, [self.average(name, 0, i)
                      for i in range(len(self.values))])
      return
    row = self.averages[programs.MOVING][0]
    for i in range(len(row)):
      if self.keeps(programs.MOVING, i):
        self.values[i], row[i] = row[i], self.values[i]

  @property
  def may_save(self):
    """Whether all there may be is there."""
    return all(self.exists) and all(self.stepped)

  # Reading

  def average(self, name, k, i):
    """An average, or None if there is none yet."""
    if not self.exists[i] or not self.keeps(name, i):
      return None
    if not self._has_begun(name):
      return self.values[i]
    if name in programs.BETWEEN:
      m = 1 if self.holds_x[i] else self.program.options(name)["momentum"]
      return (self.values[i] - (1 - m) * self.z[i]) / m
    return self.averages[name][k][i]

  def keeps(self, name, i):
    """Whether a wrapper averages a variable."""
    chosen = self.program.options(name).get("chosen")
    return i in self.order and (chosen is None or chosen[i])

  @property
  def have_begun(self):
    """Whether all averages have begun."""
    return all(map(self._has_begun, self.averages))

  def slow_weights(self, i):
    return self.slow[i] if self.begun["Lookahead"] else self.values[i]

  def _has_begun(self, name):
    if name == "SWA":
      return self.counts[name] > 0
    return self.begun.get(name, True)

  def tolerance(self, i):
    """How far the i-th variable, and what is made of it, may be off."""
    dtype = self.program.variables[i].dtype
    # y is rounded, and x is at most twice as far from z.
    by = 4 if self.program.between else 1
    return float(by * _ROUNDINGS[dtype] * self.roundings * self.largest[i]
                 * float(ml_dtypes.finfo(dtype).eps))

  def _note(self):
    self.roundings += 1
    for i, (value, g) in enumerate(zip(self.values, self.slots)):
      found = [np.abs(x).max() for x in (value, self.z[i], g["m"]) if x.size]
      self.largest[i] = max([self.largest[i], *map(float, found)])

  # Steps

  def take(self, step):
    """Takes a step of a program."""
    t, trained, lag = step = self.masked(step)
    grads = [gradient(self.program, t, i) if is_trained else None
             for i, is_trained in enumerate(trained)]
    if self.program.api == "keras":
      self._take_keras(grads, lag)
    else:
      if self.program.mode in ("function", "jit"):
        self.make(trained)  # Traced, even if it is dropped then.
        self.has_gate = self.program.has(programs.GATE)
      self._take_v1(list(self.program.chain), grads, lag, True)
    self._note()

  def masked(self, step):
    """A step of the variables that are trained."""
    t, trained, lag = step
    return t, tuple(x and y and i in self.order for i, (x, y) in enumerate(
        zip(trained, self.trained))), lag

  def make(self, trained):
    """Makes the averages of variables with a gradient."""
    for i, is_trained in enumerate(trained):
      if is_trained and not self.exists[i]:
        self.exists[i], self.z[i] = True, self.values[i].copy()
        for row in self.averages.get(programs.MOVING, ()):
          row[i] = self.values[i].copy()

  def _inner(self, grads):
    """The step of the inner optimizer."""
    name, _ = self.program.inner
    between, rate = self.program.between, self.rate
    if between:
      rate, c, m = self._between(between)
    self.updates += 1
    for i, g in enumerate(grads):
      if g is None:
        continue
      w = self.values[i]
      if between:
        x, w = np.array(self.average(between, 0, i)), self.z[i]
        g = g._replace(rows=True).summed()  # The step is that of all rows.
      RULES[self.program.api][name](w, self.slots[i], g, rate, self.updates)
      if between:
        x += c * (w - x)
        self.values[i], self.holds_x[i] = np.array(m * x + (1 - m) * w), False
    self.begun = {name: begun or name == between
                  for name, begun in self.begun.items()}

  def _between(self, name):
    """(the rate, the weight of z in x, that of x in y) in the next step."""
    self.counts[name] += 1
    options, t, rate = self.program.options(name), self.counts[name], self.rate
    if not self._has_begun(name):
      self.z = [x.copy() for x in self.values]
    if name in programs.PRIMAL:
      return rate, 1 - options["decay"], options["momentum"]
    if options["warm_up"]:
      rate *= min(1.0, t / options["warm_up"])
    self.largest_rate = max(self.largest_rate, rate)
    weight = t**options["r"] * self.largest_rate**options["power"]
    self.weights += weight
    return rate, weight / self.weights, options["momentum"]


  def _take_keras(self, grads, lag):
    program = self.program
    if program.has(programs.KERAS_GATE):
      if lag > programs.LIMIT:
        self.dropped += 1
        return
      if program.options(programs.KERAS_GATE)["policy"] == "scale" and lag > 1:
        grads = [_scaled(g, lag) for g in grads]
    if program.has("LossScale"):
      if self._has_infinity(grads, lag):
        self.scale, self.finite = self.scale / 2, 0
        return
      self.finite += 1
      if self.finite == program.options("LossScale")["growth"]:
        self.scale, self.finite = self.scale * 2, 0
    if program.accumulates > 1:
      self.gradients += 1
      for total, g in zip(self.sums, grads):
        total += g.sum
      if self.gradients % program.accumulates:
        return
      grads = [Gradient(total / program.accumulates, None, None, True).summed()
               for total in self.sums]
      self.sums = [np.zeros_like(total) for total in self.sums]
    if (any(options.get("sum") for _, options in program.chain) and
        program.inner[0] in _ONE_PASS_THAT_SQUARES):
      grads = [g and g.summed() for g in grads]
    before, old = self.updates, [x.copy() for x in self.values]
    self._inner(grads)
    for name, options in reversed(program.chain):
      if name == "MovingAverage":
        self._move_keras(options, before, grads, old)
      elif name == "SWA":
        start, period = options["start"], options["period"]
        if epoch := options.get("epoch"):
          start, period = (start + 1) * epoch - 1, period * epoch
        since = before - start
        if since >= 0 and since % period == 0:
          n = self.counts[name]
          for s, v in zip(self.averages[name][0], self.values):
            s += (v - s) / (n + 1) if n else v - s
          self.counts[name] += 1
      elif name == "Lookahead":
        if not self.begun[name]:
          self.begun[name], self.slow = True, [x.copy() for x in old]
        if (before + 1) % options["period"] == 0:
          for i in self.order:
            if not self.trained[i]:
              continue
            self.slow[i] += options["step"] * (self.values[i] - self.slow[i])
            self.values[i] = self.slow[i].copy()

  def _has_infinity(self, grads, lag):
    return lag > programs.LIMIT and any(
        g is not None and (g.sum.size if g.rows is True
                           else (g.rows & np.ones(g.sum.shape, bool)).any())
        for g in grads)

  def _move_keras(self, options, before, grads, old):
    averages = self.averages["MovingAverage"]
    if not self.begun["MovingAverage"]:
      self.begun["MovingAverage"] = True
      for row in averages:
        row[:] = [x.copy() for x in old]
    if self.since < 0:
      self.since = before
    t = 1 + max(before - max(self.since, options["start"]), 0)
    since, every = before - options["start"], options.get("every", 1)
    if since >= 0 and t % every:
      return
    for decay, row in zip(options["decays"], averages):
      number = (0.0 if since < 0 else _decay_of(
          decay, t // every, since // every if options["warm_up"] else None))
      _move(row, self.values, grads, number)

  def _take_v1(self, chain, grads, lag, counts):
    if not chain:
      self._inner(grads)
      self.stepped = [a or g is not None for a, g in zip(self.stepped, grads)]
      if not self.program.averaging:
        self.exists = list(self.stepped)
      self.step += counts
      return
    (outer, options), *inner = chain
    if outer == programs.GATE:
      self.has_gate = True
      if lag > programs.LIMIT:
        self.dropped += 1
        return
      if options["policy"] == "scale" and lag > 1:
        grads = [_scaled(g, lag) for g in grads]
    if outer in programs.WORKERS:
      self._take_v1(inner, grads, lag, False)
      self.local_step += 1
      if self.local_step % options["period"] == 0:
        self._exchange(options["rate"] if outer == programs.ELASTIC else None)
        self.step += 1
      return
    before = self.dropped
    if outer in programs.AVERAGING:
      self.make([g is not None for g in grads])
    self._take_v1(inner, grads, lag, counts)
    if outer == programs.MOVING and self.dropped == before and any(
        g is not None and self.keeps(outer, i) for i, g in enumerate(grads)):
      self.counts[outer] += 1
      every = options.get("every", 1)
      if self.counts[outer] % every:
        return
      for decay, row in zip(options["decays"], self.averages[outer]):
        _move(row, self.values, grads, _decay_of(
            decay, self.counts[outer] // every,
            self.step // every if options["warm_up"] else None))

  def _exchange(self, rate):
    for value, center in zip(self.values, self.centers):
      difference = value - center
      # Of a model average, the only worker is the mean.
      value -= (rate or 0.0) * difference
      center += (1.0 if rate is None else rate) * difference

  # Other operations

  def seed(self, name):
    """As `seed_averages`."""
    if name in programs.BETWEEN:
      self.z = [x.copy() for x in self.values]
      self.holds_x = [False for _ in self.values]
      self.weights = self.largest_rate = 0.0
    for row in self.averages[name]:
      row[:] = [x.copy() for x in self.values]
    self.counts[name] = 0
    if name in self.begun:
      self.begun[name], self.since = True, -1

  def assign(self, i, t):
    """Assigns a variable another value."""
    self.values[i] = np.array(start(t, self.program.variables[i].shape))
    self._note()

  def end_fit(self):
    """As `fit` ends: with averages in the model."""
    # A frozen variable stays what it is: x, after an earlier end.
    averages = [(name, [self.average(name, 0, i) if trained else None
                        for i, trained in enumerate(self.trained)])
                for name in self.program.averaging
                if not self.program.options(name).get("keep")]
    for name, row in reversed(averages):  # An inner one before its outer one.
      self.put(name, row)

  def put(self, name, averages):
    """Sets variables to averages of a wrapper."""
    self.values = [np.array(value if x is None else x)
                   for value, x in zip(self.values, averages)]
    self.holds_x = [holds or name in programs.BETWEEN and x is not None
                    for holds, x in zip(self.holds_x, averages)]


def _scaled(g, by):
  return g and Gradient(g.sum / by, g.squares / by**2, g.sizes / by, g.rows)


def _decay_of(decay, t, warm_up):
  """A decay in the t-th step, from 1, of the averages."""
  if isinstance(decay, str):
    return (1 - 1 / t)**(float(decay.removeprefix("power_")) + 1)
  if warm_up is not None:
    return min(decay, (1 + warm_up) / (10 + warm_up))
  return decay


def _move(row, values, grads, decay):
  for i, g in enumerate(grads):
    if g is not None:
      # The first decay of a PowerDecay is 0: the value itself.
      row[i] = np.array(row[i] + (1 - decay) * (values[i] - row[i]))
