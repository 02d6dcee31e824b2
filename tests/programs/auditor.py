"""Audits training programs: wrapopt must change nothing but what it promises.

A program is a function of a `Watch` (Keras) or a `SessionWatch` (graphs of
`tf.compat.v1`). It makes a model, passes its optimizer through `watch.wrap`,
and trains; the watch looks at the weights after each step. `audit` runs the
program twice, with wrapopt and without it. The plain run continues, after each
step, from the state of the wrapped run: so a difference is of one step. The
audit raises a `Finding` unless

- all variables equal those of the plain run, bit for bit where Keras or
  TensorFlow takes the step, to some roundings where an op of wrapopt does,
- averages equal NumPy's in float64, computed from the weights that were seen,
- `averaged_weights` puts the averages in place, and the raw weights back, bit
  for bit,
- replicas are equal,
- `fit` ends with the averages in the weights.
"""

import typing

import keras
import numpy as np
import tensorflow as tf

import wrapopt
import wrapopt.keras as wk

tf1 = tf.compat.v1

# A native op takes a step with few roundings of terms that are no larger than
# the weight, or than the largest step or slot of its variable; Keras likewise.
# Each computes 1 - beta_2 ^ t, where the rounding of beta_2 grows by 1 / (1 -
# beta_2), in float32 or float64.
ROUNDINGS_OF_A_STEP = 16
# A difference, a product, a sum, the rate; twice for the reference.
ROUNDINGS_OF_AN_AVERAGE = 4


class Finding(AssertionError):
  """An audited program differs from what wrapopt promises."""


# The wrappers in NumPy. A float64 value comes with a bound of the error that
# its float32 counterpart may have.


def _class(package, name):
  """A wrapper for Keras, or that of tf.compat.v1."""
  return getattr(package, name if package is wk else f"{name}Optimizer")


class MovingAverage:
  """s += (1 - decay) (v - s), by a function of the steps before this one."""

  def __init__(self, decay=0.75, **arguments):
    self.decay, self.arguments = decay, arguments

  def wrap(self, opt, package=wk):
    return _class(package, "MovingAverage")(opt, self.decay, **self.arguments)

  def rate(self, t):
    start = self.arguments.get("start_step", 0)
    every = self.arguments.get("update_every", 1)
    if t < start:
      return 1.0
    t -= start
    if t % every != every - 1:
      return 0.0
    if self.arguments.get("dynamic_decay"):
      t //= every
      return 1 - min(self.decay, (1 + t) / (10 + t))
    return 1 - self.decay

  def read(self, wrapped, variable):
    return wrapped.average(variable)


class Between:
  """Trains z by gradients at y, between z and its average x.

  Attributes:
    momentum: The weight of x in y.
  """
  momentum = 0.75

  def read(self, wrapped, variable):
    return wrapped.average(variable)

  def read_z(self, wrapped, variable):
    return wrapped.z(variable)


class PrimalAverage(Between):
  """x += (z - x) / 4."""

  def wrap(self, opt, package=wk):
    return _class(package, "PrimalAverage")(opt, self.momentum, 0.75)

  def rate(self, t):
    return 0.25


class ScheduleFree(Between):
  """x is the mean of all z."""

  def wrap(self, opt, package=wk):
    return _class(package, "ScheduleFree")(
        opt, self.momentum, weight_lr_power=0)

  def rate(self, t):
    return 1 / (t + 1)


class BEMA(MovingAverage):
  """s += (v - s) / (2 + t); the average is s + (v - v_0) / sqrt(2 + t)."""

  def __init__(self):
    super().__init__(wrapopt.BEMA(2, 1.0, 1, 0.5))

  def rate(self, t):
    return 1 / (3 + t)

  def derived(self, s, v, start, t):
    return s + (v - start) / np.sqrt(3 + t)


class SWA:
  """The mean of the weights after every second step, also of frozen ones."""

  period = 2
  counts_all = True

  def wrap(self, opt, package=wk):
    return package.SWA(opt, 0, self.period)

  def rate(self, t):
    return 1 / (t // self.period + 1) if t % self.period == 0 else 0.0

  def read(self, wrapped, variable):
    return wrapped.average(variable)


class Lookahead:
  """s += (v - s) / 2; v = s, after every second step."""

  period = 2

  def wrap(self, opt, package=wk):
    return package.Lookahead(opt, self.period, 0.5)

  def rate(self, t):
    return 0.5 if (t + 1) % self.period == 0 else 0.0

  def read(self, wrapped, variable):
    return wrapped.slow_weights(variable)


class Stack(typing.NamedTuple):
  """Wrappers around an optimizer: perhaps a Lookahead, then an average.

  Attributes:
    lookahead: A Lookahead, or None.
    average: A wrapper whose averages replace the weights, or None.
    gate: Whether a gate is around them, which no step is too old for.
  """
  lookahead: typing.Any = None
  average: typing.Any = None
  gate: bool = False

  def wrap(self, opt, package=wk):
    """[the optimizer, with each wrapper, the innermost first]."""
    made = [opt]
    for wrapper in self.parts:
      made.append(wrapper.wrap(made[-1], package))
    return made

  def outermost(self, opt, package=wk):
    """The optimizer that trains: the last of `wrap`, perhaps in a gate."""
    if not self.gate:
      return opt
    return _class(package, "DropStaleGradient")(opt, 2)

  @property
  def parts(self):
    return [wrapper for wrapper in self[:2] if wrapper is not None]

  @property
  def between(self):
    return isinstance(self.average, Between)


WRAPPERS = {
    "MovingAverage": Stack(average=MovingAverage()),
    "update_every": Stack(average=MovingAverage(update_every=2)),
    "start_step": Stack(average=MovingAverage(
        0.9, start_step=2, dynamic_decay=True)),
    "BEMA": Stack(average=BEMA()),
    "SWA": Stack(average=SWA()),
    "Lookahead": Stack(Lookahead()),
    "MovingAverage of Lookahead": Stack(Lookahead(), MovingAverage()),
    "PrimalAverage": Stack(average=PrimalAverage()),
    "ScheduleFree": Stack(average=ScheduleFree()),
    "gate": Stack(average=MovingAverage(), gate=True),
}


class Record(typing.NamedTuple):
  """The arrays of all replicas after a step, by name."""
  iterations: int
  weights: dict
  state: dict  # Of the optimizer.
  averages: list  # One dict for each wrapper, or None if they were not read.
  skipped: frozenset  # Names of the variables that the step left out.


class Run:
  """An optimizer that a program trains with, and what was seen of it."""

  def __init__(self, optimizers, outermost, stack):
    self.optimizers, self.outermost = optimizers, outermost
    self.stack = stack
    self.start, self.records, self.constraints = None, [], {}
    self.begun = False

  @property
  def inner(self):
    return self.optimizers[0]

  @property
  def wrapped(self):
    return self.optimizers[-1]


class Watch(keras.callbacks.Callback):
  """Looks at a Keras program after each step.

  As a callback, it must be the first one. A loop of its own calls `begin`
  before the first step, if the model is built, and `see` after each.

  Attributes:
    skipped: Variables that steps leave out from now on.
  """
  package = wk
  skipped = ()

  def __init__(self, stack=None, lead=None):
    """Makes a watch.

    Args:
      stack: A Stack to wrap optimizers in; None to run the plain program.
      lead: The Watch of the wrapped run, from whose state the plain run
        continues after each step.
    """
    super().__init__()
    self.stack, self.lead, self.runs = stack, lead, []

  def __deepcopy__(self, memo):
    # KerasTuner and scikit-learn copy callbacks.
    return self

  def wrap(self, optimizer):
    """The optimizer for the program to train with."""
    made, outermost = [optimizer], optimizer
    if self.stack is not None:
      made = self.stack.wrap(optimizer, self.package)
      outermost = self.stack.outermost(made[-1], self.package)
    self.runs.append(Run(made, outermost, self.stack))
    return outermost

  # Callbacks

  def on_train_batch_begin(self, batch, logs=None):
    self.begin(self.model)

  def on_train_batch_end(self, batch, logs=None):
    self.see(self.model)

  def on_train_end(self, logs=None):
    for run in self.runs:
      wrapped = run.wrapped
      if (self.stack is None or self.stack.average is None or not run.records or
          wrapped.keeps_raw_weights or not self._is_of(wrapped)):
        continue
      for v in self._averaged(run, self.model):
        average = self._average(run, self.stack.average, wrapped, v.path, v)
        _check_equal(f"after fit(), '{v.path}'", self._read(v),
                     [x.astype(v.dtype) for x in average])

  def _is_of(self, wrapped):
    opt = self.model.optimizer
    while opt is not wrapped and hasattr(opt, "inner_optimizer"):
      opt = opt.inner_optimizer
    return opt is wrapped

  # A SessionWatch overrides the following methods.

  def _variables(self, run, model):
    """{name: variable} of the model."""
    del run
    return {f"{i} {v.path}": v for i, v in enumerate(model.variables)}

  def _state(self, run):
    # A wrapper around adds its name to the path.
    return {f"{i} {v.name}": v for i, v in enumerate(run.inner.variables)}

  def _trained(self, run, model):
    """{name: variable} of the optimizer's."""
    ids = {id(v) for v in run.inner._trainable_variables}
    return {name: v for name, v in self._variables(run, model).items()
            if id(v) in ids}

  def _averaged(self, run, model):
    return self._trained(run, model).values()

  def _iterations(self, run):
    # A LossScaleOptimizer also counts the steps that it skips.
    return int(tf.convert_to_tensor(_innermost(run.inner).iterations))

  def _read(self, variable):
    value = getattr(variable, "value", variable)
    if callable(value):  # A lazy average.
      value = variable
    return [np.array(v.numpy()) for v in getattr(value, "values", [value])]

  def _average(self, run, wrapper, wrapped, name, variable):
    del run, name
    read = self._read(wrapper.read(wrapped, variable))
    # No variable holds x, so a read of it has one value for all replicas.
    return read * (len(self._read(variable)) // len(read))

  def _write(self, variable, arrays):
    value = variable.value
    for v, array in zip(getattr(value, "values", [value]), arrays):
      v.assign(array)

  def _in_place(self, run, model):
    return run.wrapped.averaged_weights(model)

  def check_loaded(self, model, loaded):
    """Checks the averages in another model, which a file was loaded into.

    A variable that has the value that it had when it was saved has the average
    that it had. Any other starts anew: its average is its value.

    Args:
      model: The model that was saved.
      loaded: The other model.
    """
    for run in self.runs if self.stack is not None else ():
      new = loaded.optimizer
      for wrapper, wrapped in reversed(list(zip(run.stack.parts,
                                                run.optimizers[1:]))):
        while not isinstance(new, type(wrapped)):
          new = new.inner_optimizer
        for v, w in zip(model.trainable_variables, loaded.trainable_variables,
                        strict=True):
          value = self._read(w)
          was_kept = np.array_equal(value, self._read(v))
          for read in [getattr(wrapper, name) for name in (
              "read", "read_z") if hasattr(wrapper, name)]:
            want = self._read(read(wrapped, v)) if was_kept else value
            _check_equal(f"average of '{w.path}' in another model",
                         self._read(read(new, w)), want)

  # Steps

  def begin(self, model):
    """Notes the weights before the first step, if they have values."""
    for run in self.runs:
      if not run.begun and model.built:
        run.start = {name: self._read(v)
                     for name, v in self._variables(run, model).items()}
      run.begun = True

  def see(self, model):
    """Looks at all that changed in a step."""
    for i, run in enumerate(self.runs):
      if not run.inner.built:
        continue
      iterations = self._iterations(run)
      # Others only accumulate gradients, or are skipped.
      if iterations != (run.records[-1].iterations if run.records else 0):
        self._see(i, run, model, iterations)

  def _see(self, i, run, model, iterations):
    variables, state = self._variables(run, model), self._state(run)
    run.constraints = {name: getattr(v, "constraint", None)
                       for name, v in variables.items()}
    weights = {name: self._read(v) for name, v in variables.items()}
    # Each replica has statistics of its own.
    for name, v in [*self._trained(run, model).items(), *state.items()]:
      _check_replicas(name, self._read(v))
    averages = None
    # Not after each step: rows of lazy averages then lag behind.
    if self.stack is not None and len(run.records) % 3 != 1:
      averages = self._read_averages(run, model)
      if self.stack.average is not None:
        self._check_block(run, model, averages[-1])
    run.records.append(Record(
        iterations, weights, {n: self._read(v) for n, v in state.items()},
        averages, frozenset(name for name, v in variables.items() if any(
            v is x for x in self.skipped))))
    if self.lead is not None:
      self._follow(self.lead.runs[i].records, run.records, variables, state)

  def _follow(self, led, seen, variables, state):
    if len(led) < len(seen):
      raise Finding(f"the plain program took {len(seen)} steps, the wrapped "
                    f"one {len(led)}")
    lead = led[len(seen) - 1]
    if lead.iterations != seen[-1].iterations:
      raise Finding(
          f"after step {len(seen)}, the plain program counts "
          f"{seen[-1].iterations} iterations, the wrapped one "
          f"{lead.iterations}")
    for of, arrays in (variables, lead.weights), (state, lead.state):
      if list(of) != list(arrays):
        raise Finding(f"the plain program has the variables {list(of)}, the "
                      f"wrapped one {list(arrays)}")
      for name, v in of.items():
        self._write(v, arrays[name])

  def _read_averages(self, run, model):
    read = []
    for wrapper, wrapped in zip(run.stack.parts, run.optimizers[1:]):
      row = {name: self._average(run, wrapper, wrapped, name, v)
             for name, v in self._trained(run, model).items()}
      for name, arrays in row.items():
        _check_replicas(f"average of '{name}'", arrays)
      read.append(row)
    return read

  def _check_block(self, run, model, averages):
    variables = self._variables(run, model)
    before = {name: self._read(v) for name, v in variables.items()}
    with self._in_place(run, model):
      for name, expected in averages.items():
        got = self._read(variables[name])
        _check_equal(f"'{name}' inside averaged_weights", got,
                     [x.astype(g.dtype) for x, g in zip(expected, got)])
    for name, v in variables.items():
      _check_equal(f"'{name}' after averaged_weights", self._read(v),
                   before[name])
    for name, v in self._trained(run, model).items():
      _check_equal(f"average of '{name}' after averaged_weights",
                   self._average(run, run.stack.parts[-1], run.wrapped, name,
                                 v),
                   averages[name])


class SessionWatch(Watch):
  """Looks at a program that builds a graph and trains in a session.

  The program builds its graph in the default graph, calls `prepare`, before the
  graph is finalized, `begin(session)` when the variables are initialized, and
  `see(session)` after each step. `hook` does it in a MonitoredSession.
  """

  package = wrapopt

  def prepare(self):
    """Makes the operations that read the averages."""
    for run in self.runs:
      run.trained = [v for v in tf1.trainable_variables()
                     if self.stack is None or
                     run.wrapped.average(v) is not None]
      run.reads = {} if self.stack is None else {
          v.op.name: tf.convert_to_tensor(run.wrapped.average(v))
          for v in run.trained}

  def hook(self):
    """A hook for a MonitoredSession."""
    return _Hook(self)

  def begin(self, session):
    self.session = session
    for run in self.runs:
      run.start = {name: self._read(v)
                   for name, v in self._variables(run, session).items()}

  def see(self, session):
    self.session = session
    for i, run in enumerate(self.runs):
      self._see(i, run, session, len(run.records) + 1)

  def _variables(self, run, session):
    del session
    others = {id(v) for v in [*run.inner.variables(),
                              *run.outermost.variables()]}
    return {v.op.name: v for v in tf1.global_variables() if id(v) not in others}

  def _state(self, run):
    return {v.op.name: v for v in run.inner.variables()}

  def _trained(self, run, session):
    return {v.op.name: v for v in run.trained}

  def _read(self, variable):
    return [np.array(self.session.run(variable))]

  def _write(self, variable, arrays):
    variable.load(arrays[0], self.session)

  def _average(self, run, wrapper, wrapped, name, v):
    return self._read(run.reads[name])

  def _in_place(self, run, session):
    return run.wrapped.averaged_weights(session)


class _Hook(tf1.train.SessionRunHook):

  def __init__(self, watch):
    self._watch = watch

  def begin(self):
    self._watch.prepare()

  def after_create_session(self, session, coord):
    self._watch.begin(session)

  def after_run(self, run_context, run_values):
    self._watch.see(run_context.session)


def run_in_graph(program, watch):
  """Runs a program in a new graph, from the same seeds, with a watch."""
  with tf.Graph().as_default():
    tf1.set_random_seed(0)
    np.random.seed(0)
    program(watch)
  return watch


def audit_in_graph(program, stack):
  """Audits a program of `tf.compat.v1`.

  Args:
    program: A function of a SessionWatch.
    stack: A Stack of wrappers.

  Returns:
    The SessionWatch of the wrapped run.
  """
  wrapped = run_in_graph(program, SessionWatch(stack))
  plain = run_in_graph(program, SessionWatch(lead=wrapped))
  _check(wrapped, plain, False)
  return wrapped


class _Idle(keras.optimizers.Optimizer):
  """Takes steps that change nothing: shows where weights start."""

  def __init__(self):
    super().__init__(learning_rate=0.0)

  def apply(self, grads, trainable_variables=None):
    if not self.built:
      self.build(trainable_variables)
    self._iterations.assign_add(1)


class _IdleWatch(Watch):

  def wrap(self, optimizer):
    return super().wrap(_Idle())


def run(program, watch):
  """Runs a Keras program from the same seeds and names, with a watch."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(0)
  program(watch)
  return watch


def audit(program, stack, rewritten=False):
  """Audits a Keras program.

  Args:
    program: A function of a Watch.
    stack: A Stack of wrappers.
    rewritten: Whether XLA or Grappler rewrites Keras's step, in another graph
      in another way. Then no step is equal bit for bit.

  Returns:
    The Watch of the wrapped run.
  """
  wrapped = run(program, Watch(stack))
  plain = run(program, Watch(lead=wrapped))
  if any(r.records and r.start is None for r in wrapped.runs):
    idle = run(program, _IdleWatch())
    for r, i in zip(wrapped.runs, idle.runs):
      if r.records and r.start is None:
        r.start = i.records[0].weights
  _check(wrapped, plain, rewritten)
  return wrapped


def _check(wrapped, plain, rewritten):
  assert wrapped.runs and len(wrapped.runs) == len(plain.runs)
  for one, other in zip(wrapped.runs, plain.runs):
    if len(one.records) != len(other.records):
      raise Finding(f"the plain program took {len(other.records)} steps, the "
                    f"wrapped one {len(one.records)}")
    replicas = any(len(x) > 1 for r in one.records for x in r.weights.values())
    # In a graph, an op always takes a step between z and x.
    exact = not rewritten and (
        replicas or not getattr(one.wrapped, "fused", True))
    Books(one, other, exact).check()
  assert any(r.records for r in wrapped.runs), "no step was seen"


def check_same(one, other):
  """Checks that two runs, by other ways, saw the same after the same steps."""
  for a, b in zip(one.runs, other.runs, strict=True):
    seen = {r.iterations: r for r in a.records}
    for record in b.records:
      before = seen[record.iterations]
      for of, arrays in (before.weights, record.weights), (
          before.state, record.state), *(
              zip(before.averages, record.averages)
              if before.averages and record.averages else ()):
        for name, want in of.items():
          _check_equal(f"step {record.iterations - 1}: '{name}'",
                       arrays[name], want)


class Books:
  """Compares the records of two runs, and computes averages."""

  def __init__(self, one, plain, exact):
    self.one, self.plain, self.exact = one, plain, exact
    self.steps = {}  # The largest element of a variable's last step.
    self.z = {}  # (value, bound), if others train between it and its average.

  def check(self):
    if not self.one.records:
      return
    trained = list(self.one.records[0].averages[0])
    # {name: [(value, bound), ...]}, one of each wrapper.
    averages = {name: [(_f64(self.one.start[name][0]), 0.0)
                       for _ in self.one.stack.parts] for name in trained}
    before, state_before = self.one.start, {}
    for n, (record, plain) in enumerate(zip(self.one.records,
                                            self.plain.records)):
      t = record.iterations - 1
      if n and record.iterations != self.one.records[n - 1].iterations + 1:
        raise Finding(f"several steps were seen at once: from "
                      f"{self.one.records[n - 1].iterations} to "
                      f"{record.iterations}")
      self.before = before
      for name, arrays in record.weights.items():
        what = f"step {t}: '{name}'"
        want, bound = plain.weights[name][0], self._bound(
            name, before, plain, trained)
        if name in record.skipped and name in averages:
          self._skipped(name, t, record, want, averages)
        elif name in averages:
          want, bound = (self._between if self.one.stack.between else
                         self._moved)(name, t, record, want, bound, averages)
        self._compare(what, arrays[0], want, bound)
      for name, arrays in record.state.items():
        self._compare(f"step {t}: '{name}' of the optimizer", arrays[0],
                      plain.state[name][0], self._bound_of_state(
                          name, state_before.get(name, [0.0])[0], plain))
      for k, row in enumerate(record.averages or ()):
        for name, arrays in row.items():
          value, bound = averages[name][k]
          if hasattr(part := self.one.stack.parts[k], "derived"):
            v, v_0 = (_f64(of[name][0])
                      for of in (record.weights, self.one.start))
            value = part.derived(value, v, v_0, t)
            bound = bound + ROUNDINGS_OF_AN_AVERAGE * np.finfo(
                np.float32).eps * (np.abs(v) + np.abs(v_0) + np.abs(value))
          self._compare(f"step {t}: average of '{name}'", arrays[0], value,
                        bound + _half_ulp(arrays[0], value), always=True)
      before, state_before = record.weights, record.state
    self.averages = averages

  def _bound(self, name, before, plain, trained):
    """How far a weight may be from the plain program's."""
    after = _f64(plain.weights[name][0])
    if self.exact or name not in trained or not after.size:
      return np.zeros_like(after)
    # A step may be the difference of larger ones: with momentum, of the last.
    step = np.abs(after - _f64(before[name][0])).max()
    step, self.steps[name] = max(step, self.steps.get(name, 0.0)), step
    # Keras computes the scalars of a step in float32.
    return (ROUNDINGS_OF_A_STEP * _eps(plain.weights[name][0]) * np.abs(after) +
            self._roundings() * np.finfo(np.float32).eps * step)

  def _bound_of_state(self, name, before, plain):
    array = plain.state[name][0]
    if self.exact or array.dtype.kind not in "fV" or not array.size:
      return 0.0
    return self._roundings() * np.finfo(np.float32).eps * max(
        np.abs(_f64(array)).max(), np.abs(_f64(before)).max())

  def _roundings(self):
    opt = _innermost(self.one.inner)
    beta = getattr(opt, "beta_2", getattr(opt, "_beta2", 0.0))
    return ROUNDINGS_OF_A_STEP + 1 / (1 - beta)

  def _between(self, name, t, record, want, bound, averages):
    """As `_moved`: the plain step from y is that from z, from another place."""
    del record
    part, (x, bound_of_x) = self.one.stack.average, averages[name][0]
    before, m, c = self.before[name][0], part.momentum, part.rate(t)
    z, bound_of_z = self.z.get(name, (_f64(before), 0.0))
    z = z + (_f64(want) - _f64(before))
    rounding = ROUNDINGS_OF_AN_AVERAGE * _eps(want) * (
        np.abs(z) + np.abs(x) + np.abs(_f64(want)))
    bound_of_z = bound_of_z + bound + rounding
    # x is read from y.
    x, bound_of_x = x + c * (z - x), (1 - c) * bound_of_x + c * bound_of_z + (
        2 / m) * rounding
    self.z[name], averages[name][0] = (z, bound_of_z), (x, bound_of_x)
    return m * x + (1 - m) * z, m * bound_of_x + (1 - m) * bound_of_z + rounding

  def _moved(self, name, t, record, want, bound, averages):
    """The weight after the wrappers, and its bound; moves the averages."""
    stack, row = self.one.stack, averages[name]
    k, value = 0, want
    if stack.lookahead is not None:
      rate = stack.lookahead.rate(t)
      row[0] = _average(row[0], _f64(want), rate, bound, want)
      if rate:
        value, bound = row[0]
        bound = bound + _half_ulp(want, value)
        # It acts on the weights, not on the slow ones.
        if (constraint := self.one.constraints.get(name)) is not None:
          # None moves two weights further apart than they were.
          value = _f64(constraint(tf.constant(value, want.dtype)))
          bound = bound + ROUNDINGS_OF_A_STEP * _eps(want) * np.abs(value)
      k = 1
    if stack.average is not None:
      row[k] = _average(row[k], _f64(record.weights[name][0]),
                        stack.average.rate(t), 0.0, want)
    return value, bound

  def _skipped(self, name, t, record, want, averages):
    """Moves the averages that count all steps, of a variable left out."""
    average = self.one.stack.average
    if getattr(average, "counts_all", False):
      averages[name][-1] = _average(
          averages[name][-1], _f64(record.weights[name][0]), average.rate(t),
          0.0, want)

  def _compare(self, what, got, want, bound, always=False):
    want = np.asarray(want)
    if np.all(np.equal(bound, 0)) and not always:
      _check_equal(what, [got], [want])
      return
    difference = np.abs(_f64(got) - _f64(want))
    if np.any(difference > bound) or np.any(np.isnan(difference) != np.isnan(
        _f64(want))):
      i = np.unravel_index(np.argmax(difference - bound), difference.shape)
      raise Finding(
          f"{what} is wrong in {np.sum(difference > bound)} of "
          f"{difference.size} elements, at {list(map(int, i))}: got "
          f"{_f64(got)[i]!r}, expected {_f64(want)[i]!r}, a difference of "
          f"{difference[i]:.3g}, allowed is "
          f"{np.broadcast_to(bound, difference.shape)[i]:.3g}")


def _average(average, value, rate, bound_of_value, like):
  """Moves (value, bound) of an average."""
  s, bound = average
  if rate == 1:
    return value, bound_of_value
  if not rate:
    return average
  return s + rate * (value - s), (
      (1 - rate) * bound + rate * bound_of_value +
      ROUNDINGS_OF_AN_AVERAGE * max(_eps(like), np.finfo(np.float64).eps) * (
          np.abs(s) + rate * (np.abs(value) + np.abs(s))))


def _eps(array):
  """The machine epsilon of the dtype of an array's average."""
  return np.finfo(np.float64 if array.dtype == np.float64 else np.float32).eps


def _half_ulp(array, value):
  """The rounding to the storage of an array."""
  if array.dtype in (np.float32, np.float64):
    return np.finfo(array.dtype).eps / 2 * np.abs(value)
  return tf.experimental.numpy.finfo(array.dtype).eps / 2 * np.abs(value)


def _innermost(opt):
  while hasattr(opt, "inner_optimizer"):
    opt = opt.inner_optimizer
  return opt


def _f64(array):
  return np.asarray(array).astype(np.float64)


def _check_equal(what, got, want):
  for i, (g, w) in enumerate(zip(got, want, strict=True)):
    g, w = np.asarray(g), np.asarray(w)
    if g.shape != w.shape or g.dtype != w.dtype or g.tobytes() != w.tobytes():
      raise Finding(f"{what}{f' in replica {i}' if len(got) > 1 else ''} is "
                    f"{_shown(g, w)}")


def _check_replicas(what, arrays):
  for i, array in enumerate(arrays[1:], 1):
    if array.tobytes() != arrays[0].tobytes():
      raise Finding(f"'{what}' of replica {i} is not that of replica 0: "
                    f"{_shown(array, arrays[0])}")


def _shown(got, want):
  if got.shape != want.shape or got.dtype != want.dtype:
    return (f"{got.dtype}{list(got.shape)}, expected "
            f"{want.dtype}{list(want.shape)}")
  where = np.flatnonzero(got.ravel() != want.ravel())
  if not where.size:
    return "the same numbers in other bits"
  i = where[0]
  return (f"{got.ravel()[i]!r}, expected {want.ravel()[i]!r} bit for bit, in "
          f"{where.size} of {got.size} elements")
