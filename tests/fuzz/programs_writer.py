"""Writes the parts of programs that all optimizers share.

`programs_code.py` says which writer writes a program.
"""

import contextlib

import programs
import programs_model

OBJECTS = {**dict.fromkeys(programs.BETWEEN, "between"),
           "MovingAverage": "moving", "SWA": "swa", "Lookahead": "lookahead",
           "LossScale": "scaled", programs.MOVING: "moving",
           programs.GATE: "gate", programs.KERAS_GATE: "gate",
           programs.CROSS: "cross",
           programs.ELASTIC: "elastic", programs.MODEL: "rounds"}
CONSTANTS = {
    "rate": programs_model.RATE, "decay": programs_model.WEIGHT_DECAY,
    "momentum": programs_model.MOMENTUM, "b1": programs_model.BETA_1,
    "b2": programs_model.BETA_2, "e": programs_model.EPSILON,
    "accumulator": programs_model.ACCUMULATOR, "rho": programs_model.RHO,
}


class Writer:
  """Writes code, and asks the model what it must give."""

  def __init__(self, program):
    self.program = program
    self.model = programs_model.Model(program)
    self.lines, self.indent = [], ""
    self.files = []  # (name, kind, what the model had).
    self.at = ""

  def line(self, *lines):
    self.lines += [self.indent + line for line in lines]

  @contextlib.contextmanager
  def block(self, head):
    self.line(head)
    before, self.indent = self.indent, self.indent + "  "
    yield
    self.indent = before

  @property
  def variables(self):
    return self.program.variables

  def write(self):
    if self.program.setting == "numerics":
      self.line("tf.debugging.enable_check_numerics()")
    elif self.program.setting == "flags":
      self.line("name_flags_in_a_file()")
    with self.entered():
      for n, (name, *args) in enumerate(self.program.operations):
        self.at = f"{n} {name}"
        self.line(f"# {self.at}")
        getattr(self, f"write_{name}")(*args)
      self.at = "end"
      self.write_read()
    self.write_last()
    return "\n".join(self.lines) + "\n"

  def write_last(self):
    """Writes what comes after all else."""

  @contextlib.contextmanager
  def entered(self):
    self.setup(False)
    yield

  # Operations

  def write_steps(self, steps):
    for step in self.masked(steps):
      self.write_step(step)
      self.model.take(step)

  def masked(self, steps):
    """The steps, of the variables that are trained."""
    return [step for step in map(self.model.masked, steps) if any(step[1])]

  def write_read(self):
    self.check_values()
    self.check_averages()
    self.check_others()

  def check(self, what, got, want, i):
    self.line(f'check("{self.at}: {what}", {got},',
              f"      {want.tolist()!r}, {self.model.tolerance(i)!r})")

  def check_values(self):
    for i, value in enumerate(self.model.values):
      self.check(f"v{i}", self.value(i), value, i)

  def check_averages(self):
    for name in self.program.averaging:
      for k, decay in enumerate(self.decays(name)):
        for i in range(len(self.variables)):
          want = self.model.average(name, k, i)
          if want is not None:
            self.check(f"average {decay} of v{i} in {OBJECTS[name]}",
                       self.average(name, decay, i), want, i)
          elif self.program.api == "v1" and (
              self.program.mode not in programs.SESSIONS or
              not self.model.keeps(name, i)):
            self.line(f"assert {OBJECTS[name]}.average(v{i}) is None")
          elif self.program.api == "keras":
            self.line('refused("average", lambda: '
                      f"{OBJECTS[name]}.average(v{i}), KeyError)")

  def check_others(self):
    raise NotImplementedError

  def decays(self, name):
    """The decays of a wrapper, as code."""
    return list(map(decay_of, self.program.options(name).get("decays", [None])))

  def write_swap(self, k, index, inside):
    name = self.program.averaging[k]
    wants = [self.model.average(name, index, i)
             for i in range(len(self.variables))]
    if self.program.api == "v1" and all(want is None for want in wants):
      self.line('refused("averaged_weights", lambda: '
                f"{self.swapped(name, None)}.__enter__())")
      return
    values = ", ".join(map(self.value, range(len(self.variables))))
    self.line(f"before = [{values}]")
    with contextlib.ExitStack() as stack:
      if inside == "error":
        stack.enter_context(self.block("try:"))
      with self.block(f"with {self.swapped(name, self.decays(name)[index])}:"):
        for i, want in enumerate(wants):
          self.check(f"v{i} in the block", self.value(i),
                     self.model.values[i] if want is None else want, i)
        if inside == "error":
          self.line('raise KeyError("in the block")')
        elif inside == "again":
          self.line('refused("averaged_weights", lambda: '
                    f"{self.swapped(name, None)}.__enter__())")
        elif inside == "seed":
          self.line(f'refused("seed_averages", lambda: {self.seeding(name)})')
        elif inside == "save":
          self.line(f'refused("save", lambda: {self.refused_save()})')
        elif inside == "step":
          self.line('refused("step", lambda: '
                    f"{self.eager_step(self.all_of(1))})")
    if inside == "error":
      with self.block("except KeyError:"):
        self.line("pass")
    self.line(f'same("{self.at}", [{values}], before)')
    if inside in ("again", "step"):
      self.write_read()

    # A step of an empty variable changes nothing.
    in_place = [i for i, want in enumerate(wants)
                if want is not None and want.size]
    if inside == "other" and in_place:
      with self.block("def other():"):
        with self.block(
            f"with {self.swapped(name, self.decays(name)[index])}:"):
          self.line(self.other_step(in_place[0]))
      self.line('refused("a step of another optimizer", other)',
                f'same("{self.at} other", [{values}], before)')

  def all_of(self, t):
    """A step of all variables."""
    return self.model.masked((t, (True,) * len(self.variables), 0))

  def write_seed(self, k):
    name = self.program.averaging[k]
    if self.program.api == "v1" and not any(self.model.exists):
      self.line(f'refused("seed_averages", lambda: {self.seeding(name)})')
      return
    self.line(self.seeding(name))
    self.model.seed(name)

  def write_threads(self, steps):
    # Known: if a thread reads averages while the first step is taken that they
    # follow, it may set them back to the variables.
    if not self.model.have_begun:
      self.write_steps(steps)
      return
    name = self.program.averaging[0]
    reads = [self.average(name, self.decays(name)[0], i)
             for i in range(len(self.variables))
             if self.model.average(name, 0, i) is not None]
    for lines in self.tracing(self.masked(steps)):
      self.line(lines)
    with self.block("def train():"):
      self.line("pass")
      self.write_steps(steps)
    self.line(f"together(train, lambda: [[{', '.join(reads)}] for _ in "
              "range(10)])")

  def tracing(self, steps):
    """Lines to run before steps that run in a thread."""
    del steps
    return ()

  def write_save(self, how):
    if not self.model.may_save:
      return
    name = f"{len(self.files)}"
    self.line(self.saving(how, name))
    self.files.append((name, how, self.model.save()))

  def write_restore(self, how, order=None):
    if not self.files:
      return
    name, kind, saved = self.files[-1]
    new = order or (self.model.order if how == "again" else
                    tuple(range(len(self.variables))))
    if kind == "checkpoint" and any(
        x != y for x, y in zip(new, saved["order"])):
      return  # Keras's optimizer holds its variables in it, by their index.
    self.model.order = new
    self.restore(name, kind, how)
    if kind == "swapped":
      self.model.restore_swapped(saved)
    else:
      self.model.restore(saved, how != "again" or kind == "model", new)

  def write_other(self, order):
    if self.files and self.files[-1][1] in ("checkpoint", "weights"):
      _, kind, saved = self.files[-1]
      if kind == "checkpoint":
        order = saved["order"][:len(order)]
      # A wrapper must average something.
      if all(any(chosen[i] for i in order) for _, options in self.program.chain
             if (chosen := options.get("chosen"))):
        self.write_restore("fresh", order)


def decay_of(decay):
  if isinstance(decay, str):
    return f"wrapopt.PowerDecay(gamma={decay.removeprefix('power_')})"
  return repr(decay)


def grads_of(program, step, scale=1.0):
  """For each variable with a gradient, the code of its parts."""
  t, trained, _ = step
  found = {}
  for i, (v, is_trained) in enumerate(zip(program.variables, trained)):
    if is_trained:
      arguments = f"({t}, {i}, {v.shape!r}, {v.dtype!r}" + (
          f", {number_of(scale)})" if scale != 1.0 else ")")
      found[i] = (programs_model.is_sparse(program, t, i), arguments)
  return found


def number_of(x):
  return "np.inf" if x == float("inf") else repr(x)


def eager_grad(v, is_sparse, arguments):
  return (f"sparse(*rows{arguments}, {v.shape!r})" if is_sparse
          else f"tf.constant(dense{arguments})")


def arguments_of(positional, named):
  return ", ".join([*positional, *(f"{k}={x}" for k, x in named.items())])


class Functions(Writer):
  """Steps in functions, of which each trains some variables."""

  def setup(self, fresh):
    del fresh
    self.traced = {}

  @property
  def is_compiled(self):
    return self.program.mode in ("function", "jit")

  def write_steps(self, steps):
    super().write_steps(steps)
    if self.program.setting == "clusters":  # After functions were traced.
      self.line("tf.config.optimizer.set_jit('autoclustering')")

  def call(self, step, scale=1.0):
    """A step as an expression."""
    if not self.is_compiled:
      return self.eager_step(step, scale)
    grads = grads_of(self.program, step, scale)
    passed = []
    for is_sparse, arguments in grads.values():
      passed.append(("*rows" if is_sparse else "dense") + arguments)
    name = self.function(step[1], grads)
    return f"{name}({', '.join(passed + self.extra_arguments(step))})"

  def function(self, trained, grads):
    """The name of the function that trains variables, which it writes."""
    name = "train_" + "".join(str(int(x)) for x in trained)
    if name in self.traced:
      return name
    self.traced[name] = True
    taken, specs = [], []
    for i, (is_sparse, _) in grads.items():
      v = self.variables[i]
      taken.append(f"g{i}")
      shape = [None, *v.shape[1:]] if is_sparse else list(v.shape)
      specs.append(f"tf.TensorSpec({shape}, {v.dtype!r})")
      if is_sparse:
        taken.append(f"i{i}")
        specs.append("tf.TensorSpec([None], tf.int64)")
    specs += ["tf.TensorSpec([], tf.int64)"] * len(self.extra_parameters())
    how = ("jit_compile=True" if self.program.mode == "jit" else
           f"input_signature=[{', '.join(specs)}]")
    self.line(f"@tf.function({how}, autograph=False)")
    with self.block(
        f"def {name}({', '.join(taken + self.extra_parameters())}):"):
      self.line(self.apply({
          i: (f"sparse(g{i}, i{i}, {self.variables[i].shape!r})"
              if is_sparse else f"g{i}")
          for i, (is_sparse, _) in grads.items()}, inside=True))
    self.line("")
    return name

  def eager_step(self, step, scale=1.0):
    return self.apply({
        i: eager_grad(self.variables[i], *of_i)
        for i, of_i in grads_of(self.program, step, scale).items()}, step=step)

  # The number of steps that a gate counts.
  counted = "step"

  def recorded(self, step):
    return (f"tf.constant({getattr(self.model, self.counted) - step[2]}, "
            "tf.int64)")

  def extra_arguments(self, step):
    return ([self.recorded(step)] if self.program.has(*programs.GATES) else [])

  def extra_parameters(self):
    return ["recorded"] if self.program.has(*programs.GATES) else []

  def check_gate(self, dropped):
    if self.model.has_gate:
      self.line(f'check("{self.at}: dropped", {dropped}, '
                f"{self.model.dropped})")

  def value(self, i):
    return f"v{i}.numpy()"

  def average(self, name, decay, i):
    decay = "" if decay == "None" else f", {decay}"
    return f"{OBJECTS[name]}.average(v{i}{decay}).numpy()"

  def swapped(self, name, decay):
    decay = "" if decay in (None, "None") else f"decay={decay}"
    return f"{OBJECTS[name]}.averaged_weights({decay})"

  def seeding(self, name):
    return f"{OBJECTS[name]}.seed_averages()"

  def write_rate(self, rate):
    self.model.rate = rate
    self.set_rate(rate)

  def write_assign(self, i, t):
    # Before user code changes a variable, it reads its averages: see the
    # docstrings of the wrappers.
    for name in self.program.averaging:
      for decay in self.decays(name):
        if self.model.average(name, 0, i) is not None:
          self.line(self.average(name, decay, i))
    v = self.variables[i]
    self.line(f"v{i}.assign(variable({t}, {v.shape!r}, {v.dtype!r}))")
    self.model.assign(i, t)
    # Known: if the first step of a function accumulates, is skipped or fails,
    # and a variable is assigned then, its average begins at the value before,
    # unless it is read.
    for name, has_begun in (self.model.begun.items()
                            if self.program.mode != "eager" else ()):
      if self.program.has(name) and not has_begun and (
          name == "Lookahead" or self.model.keeps(name, i)):
        self.line(f"lookahead.slow_weights(v{i}).numpy()"
                  if name == "Lookahead" else self.average(name, "None", i))

  def write_fail(self):
    wrong = {i: f"tf.ones([5, 5, 5], {self.variables[i].dtype!r})"
             for i in self.model.order}
    self.line(f'refused("a gradient of another shape", lambda: '
              f"{self.apply(wrong, step=(0, (), 0))}, Exception)")
    if self.program.api == "v1":
      self.model.make((True,) * len(wrong))

  def tracing(self, steps):
    if self.is_compiled:
      for step in steps:
        self.function(step[1], grads_of(self.program, step))
    return ()

  def refused_save(self):
    return self.saving("checkpoint", "refused")
