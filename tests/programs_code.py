"""Writes programs of `programs.py` as Python code, with what they must give.

The code is what runs, and what is printed if it fails.
"""

import contextlib
import functools
import inspect

import numpy as np

import programs
import programs_model

_OBJECTS = {"MovingAverage": "moving", "SWA": "swa", "Lookahead": "lookahead",
            "LossScale": "scaled", programs.MOVING: "moving",
            programs.GATE: "gate", programs.CROSS: "cross",
            programs.ELASTIC: "elastic", programs.MODEL: "rounds"}


def code_of(program):
  """The code of a program, without the prelude."""
  return _WRITERS[program.api, program.mode](program).write()


@functools.cache
def _prelude():
  import programs_prelude  # pylint: disable=g-import-not-at-top
  return programs_prelude


def run(code):
  """Runs the code of a program."""
  namespace = {**vars(_prelude())}
  exec(compile(code, "<program>", "exec"), namespace)


def printed(code):
  """The code as a file that runs by itself."""
  return inspect.getsource(_prelude()) + "\n\n" + code


class _Writer:
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
    with self.entered():
      for n, (name, *args) in enumerate(self.program.operations):
        self.at = f"{n} {name}"
        self.line(f"# {self.at}")
        getattr(self, f"write_{name}")(*args)
      self.at = "end"
      self.write_read()
    return "\n".join(self.lines) + "\n"

  @contextlib.contextmanager
  def entered(self):
    self.setup(False)
    yield

  # Operations

  def write_steps(self, steps):
    for step in steps:
      self.write_step(step)
      self.model.take(step)

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
            self.check(f"average {decay} of v{i} in {_OBJECTS[name]}",
                       self.average(name, decay, i), want, i)
          elif not self.model.exists[i]:
            self.line(f"assert {_OBJECTS[name]}.average(v{i}) is None")

  def check_others(self):
    raise NotImplementedError

  def decays(self, name):
    """The decays of a wrapper, as code."""
    return list(map(_decay, self.program.options(name).get("decays", [None])))

  def write_swap(self, k, index, inside):
    name = self.program.averaging[k]
    wants = [self.model.average(name, index, i)
             for i in range(len(self.variables))]
    if name == programs.MOVING and all(want is None for want in wants):
      self.line('refused("averaged_weights", lambda: '
                f"{self.swapped(name, None)}.__enter__())")
      return
    values = ", ".join(map(self.value, range(len(self.variables))))
    self.line(f"before = [{values}]")
    with contextlib.ExitStack() as stack:
      if inside == "error":
        stack.enter_context(self.block("try:"))
      with self.block(
          f"with {self.swapped(name, self.decays(name)[index])}:"):
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
          trained = (True,) * len(self.variables)
          self.line('refused("step", lambda: '
                    f"{self.eager_step((1, trained, 0))})")
    if inside == "error":
      with self.block("except KeyError:"):
        self.line("pass")
    self.line(f'same("{self.at}", [{values}], before)')
    if inside in ("again", "step"):
      self.write_read()

  def write_seed(self, k):
    name = self.program.averaging[k]
    if name == programs.MOVING and not any(self.model.exists):
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
    for lines in self.tracing(steps):
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

  def write_restore(self, how):
    if not self.files:
      return
    name, kind, saved = self.files[-1]
    self.restore(name, kind, how)
    if kind == "swapped":
      self.model.restore_swapped(saved)
    else:
      self.model.restore(saved, how != "again" or kind == "model")


def _decay(decay):
  if isinstance(decay, str):
    return f"wrapopt.PowerDecay(gamma={decay.removeprefix('power_')})"
  return repr(decay)


def _grads(program, step, scale=1.0):
  """For each variable with a gradient, the code of its parts."""
  t, trained, _ = step
  found = {}
  for i, (v, is_trained) in enumerate(zip(program.variables, trained)):
    if is_trained:
      arguments = f"({t}, {i}, {v.shape!r}, {v.dtype!r}" + (
          f", {_number(scale)})" if scale != 1.0 else ")")
      found[i] = (programs_model.is_sparse(program, t, i), arguments)
  return found


def _number(x):
  return "np.inf" if x == float("inf") else repr(x)


def _eager_grad(v, is_sparse, arguments):
  return (f"sparse(*rows{arguments}, {v.shape!r})" if is_sparse
          else f"tf.constant(dense{arguments})")


def _arguments(positional, named):
  return ", ".join([*positional, *(f"{k}={x}" for k, x in named.items())])


class _Functions(_Writer):
  """Steps in functions, of which each trains some variables."""

  def setup(self, fresh):
    del fresh
    self.traced = {}

  @property
  def is_compiled(self):
    return self.program.mode in ("function", "jit")

  def call(self, step, scale=1.0):
    """A step as an expression."""
    if not self.is_compiled:
      return self.eager_step(step, scale)
    grads = _grads(self.program, step, scale)
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
        i: _eager_grad(self.variables[i], *of_i)
        for i, of_i in _grads(self.program, step, scale).items()}, step=step)

  def extra_arguments(self, step):
    del step
    return []

  def extra_parameters(self):
    return []

  def value(self, i):
    return f"v{i}.numpy()"

  def average(self, name, decay, i):
    decay = "" if decay == "None" else f", {decay}"
    return f"{_OBJECTS[name]}.average(v{i}{decay}).numpy()"

  def swapped(self, name, decay):
    decay = "" if decay in (None, "None") else f"decay={decay}"
    return f"{_OBJECTS[name]}.averaged_weights({decay})"

  def seeding(self, name):
    return f"{_OBJECTS[name]}.seed_averages()"

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
      if self.program.has(name) and not has_begun:
        self.line(self.average(name, "None", i) if name == "MovingAverage"
                  else f"lookahead.slow_weights(v{i}).numpy()")

  def write_fail(self):
    wrong = {i: f"tf.ones([5, 5, 5], {v.dtype!r})"
             for i, v in enumerate(self.variables)}
    self.line(f'refused("a gradient of another shape", lambda: '
              f"{self.apply(wrong, step=(0, (), 0))}, Exception)")
    if self.program.api == "v1":
      self.model.make((True,) * len(wrong))

  def tracing(self, steps):
    if self.is_compiled:
      for step in steps:
        self.function(step[1], _grads(self.program, step))
    return ()

  def refused_save(self):
    return self.saving("checkpoint", "refused")


# The options of the inner optimizers.
_KERAS_INNER = {
    "SGD": "SGD({rate}{more})",
    "SGDW": "SGD({rate}, weight_decay={decay}{more})",
    "Momentum": "SGD({rate}, momentum={momentum}{more})",
    "Nesterov": "SGD({rate}, momentum={momentum}, nesterov=True{more})",
    "Adam": "Adam({rate}, {b1}, {b2}, {e}{more})",
    "AdamW": "AdamW({rate}, {decay}, {b1}, {b2}, {e}{more})",
    "Adamax": "Adamax({rate}, {b1}, {b2}, {e}{more})",
    "Adagrad": "Adagrad({rate}, {accumulator}, {e}{more})",
    "RMSprop": "RMSprop({rate}, {rho}, epsilon={e}{more})",
}
_V1_INNER = {
    "GradientDescent": "GradientDescentOptimizer(rate)",
    "Momentum": "MomentumOptimizer(rate, {momentum})",
    "Nesterov": "MomentumOptimizer(rate, {momentum}, use_nesterov=True)",
    "Adam": "AdamOptimizer(rate, {b1}, {b2}, {e})",
    "Adagrad": "AdagradOptimizer(rate, {accumulator})",
    "RMSProp": "RMSPropOptimizer(rate, {rho}, {momentum}, {e})",
    "Adadelta": "AdadeltaOptimizer(rate, {rho}, {e})",
}
_CONSTANTS = {
    "rate": programs_model.RATE, "decay": programs_model.WEIGHT_DECAY,
    "momentum": programs_model.MOMENTUM, "b1": programs_model.BETA_1,
    "b2": programs_model.BETA_2, "e": programs_model.EPSILON,
    "accumulator": programs_model.ACCUMULATOR, "rho": programs_model.RHO,
}


class _Keras(_Functions):
  """Keras's optimizers, in custom loops."""

  def setup(self, fresh):
    super().setup(fresh)
    for i, v in enumerate(self.variables):
      self.line(f"v{i} = keras.Variable(variable({i}, {v.shape!r}, {v.dtype!r}"
                f"{', True' if fresh else ''}), dtype={v.dtype!r}, "
                f'name="v{i}")')
    self.line(f"opt = {self.optimizer()}")
    self.find_wrappers()

  def build(self):
    self.line(f"opt.build([{self.all_variables()}])")

  @contextlib.contextmanager
  def entered(self):
    self.setup(False)
    self.build()
    yield

  def all_variables(self):
    return ", ".join(f"v{i}" for i in range(len(self.variables)))

  def optimizer(self):
    name, options = self.program.inner
    more = (f", gradient_accumulation_steps={options['accumulate']}"
            if "accumulate" in options else "")
    if name == "LazyAdam":
      made = "wk." + ("LazyAdam" + _KERAS_INNER["Adam"].removeprefix("Adam")
                      ).format(**_CONSTANTS, more=more)
    else:
      made = "keras.optimizers." + _KERAS_INNER[name].format(
          **_CONSTANTS, more=more)
    for name, options in reversed(self.program.chain):
      made = _keras_wrapper(name, options, made)
    return made

  def find_wrappers(self):
    for name in self.program.names:
      if name == "LossScale":
        self.line(
            "scaled = find(opt, keras.optimizers.LossScaleOptimizer)")
      else:
        self.line(f"{_OBJECTS[name]} = find(opt, wk.{name})")

  def apply(self, grads, inside=False, step=None):
    del inside, step
    given = ", ".join(grads.get(i, "None") for i in range(len(self.variables)))
    return f"opt.apply([{given}], [{self.all_variables()}])"

  def scale(self, step):
    if not self.program.has("LossScale"):
      return 1.0
    return float("inf") if step[2] > programs.LIMIT else self.model.scale

  def write_step(self, step):
    self.line(self.call(step, self.scale(step)))

  def set_rate(self, rate):
    self.line(f"opt.learning_rate = {rate}")

  def check_others(self):
    if self.program.has("Lookahead"):
      for i in range(len(self.variables)):
        self.check(f"slow weights of v{i}",
                   f"lookahead.slow_weights(v{i}).numpy()",
                   self.model.slow_weights(i), i)
    self.line(f'check("{self.at}: iterations", opt.iterations, '
              f"{self.model.updates})",
              f'check("{self.at}: rate", opt.learning_rate, '
              f"{self.model.rate})")
    if self.program.has("LossScale"):
      self.line(f'check("{self.at}: scale", scaled.dynamic_scale, '
                f"{self.model.scale})")

  def checkpoint(self):
    values = ", ".join(f"v{i}.value" for i in range(len(self.variables)))
    return f"tf.train.Checkpoint(v=[{values}], opt=opt)"

  def saving(self, how, name):
    del how
    return f'{self.checkpoint()}.write(path("{name}"))'

  def restore(self, name, kind, how):
    del kind
    if how != "again":
      self.setup(True)
    if how == "fresh":
      self.build()
    self.line(f'{self.checkpoint()}.read(path("{name}"))')
    if how == "deferred":
      self.build()


def _keras_wrapper(name, options, made):
  options = dict(options)
  if name == "LossScale":
    return (f"keras.optimizers.LossScaleOptimizer({made}, {options['scale']}, "
            f"{options['growth']})")
  named = {}
  if name == "MovingAverage":
    decays = list(map(_decay, options["decays"]))
    positional = [f"[{', '.join(decays)}]"]
    if options["warm_up"]:
      named["dynamic_decay"] = True
    if options["start"]:
      named["start_step"] = options["start"]
    if options["lazy"] is False:
      named["lazy"] = False
  elif name == "SWA":
    positional = [str(options["start"]), str(options["period"])]
  else:
    positional = [str(options["period"]), str(options["step"])]
  if options.get("keep"):
    named["keep_raw_weights"] = True
  if options["sum"]:
    named["sum_duplicates"] = True
  return f"wk.{name}({made}, {_arguments(positional, named)})"


class _Fit(_Keras):
  """Keras's `fit`."""

  def setup(self, fresh):
    _Functions.setup(self, fresh)
    specs = [[list(v.shape), v.dtype, v.rows] for v in self.variables]
    self.line(f"specs = {specs!r}",
              f"model = make_model(specs{', True' if fresh else ''})",
              f"model.compile({self.optimizer()}, loss=first, "
              "jit_compile=False)")
    self.find_model()

  def find_model(self):
    self.line("opt = model.optimizer",
              f"{self.all_variables()}, = model.trainable_variables")
    self.find_wrappers()

  def write_steps(self, steps):
    given = ", ".join(
        f"({step[0]}, {'np.inf' if self.scale(step) == float('inf') else 1.0})"
        for step in steps)
    self.line(f"model.fit(batches(specs, [{given}]), verbose=0, shuffle=False)")
    for step in steps:
      self.model.take(step)
    self.model.end_fit()

  def write_evaluate(self, t):
    name = self.program.averaging[0]
    want = largest = 0.0
    for i in range(len(self.variables)):
      g = programs_model.gradient(self.program, t, i).sum
      want += float((g * self.model.average(name, 0, i)).sum())
      largest += float(np.abs(g).sum() * (
          self.model.tolerance(i) + 1e-6 * self.model.largest[i]))
    self.line(f'check("{self.at}", model.evaluate(batches(specs, [({t}, 1.0)]),'
              " verbose=0, callbacks=[wk.EvaluateWithAverages()]), "
              f"{want!r}, {largest!r})")

  def saving(self, how, name):
    if how == "checkpoint":
      return super().saving(how, name)
    if how == "model":
      return f'model.save(path("{name}.keras"))'
    return f'model.save_weights(path("{name}.weights.h5"))'

  def restore(self, name, kind, how):
    if kind == "checkpoint":
      super().restore(name, kind, how)
      return
    if kind == "model":
      self.line(f'model = keras.models.load_model(path("{name}.keras"))')
      self.find_model()
      return
    if how != "again":
      self.setup(True)
      self.build()
    self.line(f'model.load_weights(path("{name}.weights.h5"))')


class _V1(_Functions):
  """Optimizers of tf.compat.v1, eagerly and in a tf.function."""

  def setup(self, fresh):
    super().setup(fresh)
    for i, v in enumerate(self.variables):
      self.line(f"v{i} = tf.Variable(variable({i}, {v.shape!r}, {v.dtype!r}"
                f"{', True' if fresh else ''}))")
    self.line("step = tf.Variable(0, dtype=tf.int64, trainable=False)",
              f"rate = tf.Variable({self.model.rate}, trainable=False)")
    self.make_optimizer()

  def make_optimizer(self):
    name, _ = self.program.inner
    if name == "LazyAdam":
      made = _V1_INNER["Adam"].replace("AdamOptimizer",
                                       "wrapopt.LazyAdamOptimizer")
    else:
      made = f"tf1.train.{_V1_INNER[name]}"
    self.line(f"opt = {made.format(**_CONSTANTS)}")
    for name, options in reversed(self.program.chain):
      self.line(f"opt = {_OBJECTS[name]} = wrapopt.{name}("
                f"{self.wrapper_arguments(name, options)})")

  def wrapper_arguments(self, name, options):
    named = {k: False for k in ("fused", "lazy") if options.get(k) is False}
    positional = ["opt"]
    if name == programs.MOVING:
      positional.append(f"[{', '.join(map(_decay, options['decays']))}]")
      if options["warm_up"]:
        named["num_updates"] = "step"
      if options["shadow"]:
        named["shadow_dtype"] = "tf.float32"
    elif name == programs.GATE:
      positional.append(str(programs.LIMIT))
      named["policy"] = repr(options["policy"])
    elif name == programs.MODEL:
      positional += ["1", "True", "getter", str(options["period"])]
    elif name == programs.ELASTIC:
      positional += ["1", "getter", str(options["period"]),
                     str(options["rate"])]
      named["rho"] = 0.0
    return _arguments(positional, named)

  def apply(self, grads, inside=False, step=None):
    pairs = ", ".join(f"({g}, v{i})" for i, g in grads.items())
    recorded = ""
    if self.program.has(programs.GATE):
      recorded = ", recorded=" + (
          "recorded" if inside else self.recorded(step))
    return f"opt.apply_gradients([{pairs}], step{recorded})"

  def recorded(self, step):
    return f"tf.constant({self.model.step - step[2]}, tf.int64)"

  def extra_arguments(self, step):
    return [self.recorded(step)] if self.program.has(programs.GATE) else []

  def extra_parameters(self):
    return ["recorded"] if self.program.has(programs.GATE) else []

  def write_step(self, step):
    self.line(self.call(step))

  def set_rate(self, rate):
    self.line(f"rate.assign({rate})")

  def check_others(self):
    self.line(f'check("{self.at}: step", step.numpy(), {self.model.step})')
    if self.model.has_gate:
      self.line(f'check("{self.at}: dropped", gate.staleness_stats().dropped, '
                f"{self.model.dropped})")

  def saving(self, how, name):
    del how
    return f'{self.checkpoint()}.write(path("{name}"))'

  def checkpoint(self):
    values = ", ".join(f"v{i}" for i in range(len(self.variables)))
    return f"tf.train.Checkpoint(v=[{values}], opt=opt, step=step)"

  def restore(self, name, kind, how):
    del kind
    if how != "again":
      self.setup(True)
    self.line(f'{self.checkpoint()}.read(path("{name}"))')


class _Session(_V1):
  """The same in a graph and a session."""

  @contextlib.contextmanager
  def entered(self):
    with self.block("with tf.Graph().as_default():"):
      self.line("tf1.get_variable_scope().set_use_resource("
                f"{self.program.mode == 'resource'})")
      self.make_graph()
      self.line("session = tf1.Session()")
      self.initialize()
      yield
      self.line("session.close()")

  def make_graph(self):
    program = self.program
    custom = ""
    for name in programs.WORKERS:
      if program.has(name):
        self.line("getter = wrapopt."
                  f'{name.replace("Optimizer", "CustomGetter")}("/cpu:0")')
        custom = ", custom_getter=getter"
    with self.block(f'with tf1.variable_scope(""{custom}):'):
      for i, v in enumerate(self.variables):
        self.line(
            f'v{i} = tf1.get_variable("v{i}", initializer='
            f"np.asarray(start({i}, {v.shape!r}), "
            f"tf.{v.dtype}.as_numpy_dtype))")
    self.line('step = tf1.get_variable("step", initializer=np.int64(0), '
              "trainable=False)",
              'rate = tf1.get_variable("rate", initializer='
              f"np.float32({programs_model.RATE}), trainable=False, "
              "collections=[tf1.GraphKeys.LOCAL_VARIABLES])",
              "bad = tf1.placeholder(tf.float32, [])",
              'fault = tf.debugging.check_numerics(bad, "a gradient fails")',
              "recorded = tf1.placeholder_with_default("
              "tf.constant(0, tf.int64), [])",
              "new_rate = tf1.placeholder(tf.float32, [])",
              "set_rate = tf1.assign(rate, new_rate)")
    self.make_optimizer()
    for i, v in enumerate(self.variables):
      shape = [None, *v.shape[1:]] if v.rows else list(v.shape)
      self.line(f"p{i} = tf1.placeholder(tf.{v.dtype}, {shape})",
                f"g{i} = p{i} + tf.cast(fault, tf.{v.dtype})")
      if v.rows:
        self.line(f"i{i} = tf1.placeholder(tf.int64, [None])",
                  f"g{i} = sparse(g{i}, i{i}, {v.shape!r})")
    everything = (True,) * len(self.variables)
    for trained in dict.fromkeys([
        everything, *(step[1] for step in program.steps)]):
      grads = {i: f"g{i}" for i, x in enumerate(trained) if x}
      self.line(f"{self.train_op(trained)} = {self.apply(grads, inside=True)}")
    for i, v in enumerate(self.variables):
      self.line(f"n{i} = tf1.placeholder(tf.{v.dtype}, {list(v.shape)})",
                f"set_v{i} = tf1.assign(v{i}, n{i})")
    if program.has(programs.MOVING):
      self.line("averages = {}")
      for k, decay in enumerate(self.decays(programs.MOVING)):
        for i in range(len(self.variables)):
          self.line(f"averages[{k}, {i}] = tf.convert_to_tensor("
                    f"moving.average(v{i}, {decay}))")
    for name in program.names:
      if name == programs.MODEL:
        self.line("hook = rounds.make_session_run_hook()", "hook.begin()")
      elif name == programs.ELASTIC:
        self.line("hook = elastic.make_session_run_hook(True, 0)",
                  "hook.begin()")
    if program.has(programs.GATE):
      self.line("dropped = gate.staleness_stats().dropped")
    used = [rest[0] for name, *rest in program.operations if name == "save"]
    if used and not program.has(*programs.WORKERS):
      self.line("saver = tf1.train.Saver()")
    if program.has(programs.MOVING) and not program.has(*programs.WORKERS):
      self.line("swapping = moving.swapping_saver()")

  def initialize(self):
    self.line("session.run([tf1.global_variables_initializer(), "
              "tf1.local_variables_initializer()])")
    if self.program.has(*programs.WORKERS):
      self.line("hook.after_create_session(session, tf.train.Coordinator())")

  def train_op(self, trained):
    return "train_" + "".join(str(int(x)) for x in trained)

  def feed(self, step, bad="0.0"):
    fed = [f"bad: {bad}"]
    for i, (is_sparse, arguments) in _grads(self.program, step).items():
      if is_sparse:
        fed.append(f"p{i}: rows{arguments}[0], i{i}: rows{arguments}[1]")
      else:
        fed.append(f"p{i}: dense{arguments}")
    if self.program.has(programs.GATE):
      fed.append(f"recorded: {self.model.step - step[2]}")
    return fed

  def write_step(self, step):
    self.line(f"session.run({self.train_op(step[1])}, "
              f"{{{', '.join(self.feed(step))}}})")

  def write_fail(self):
    step = (1, (True,) * len(self.variables), 0)
    fed = ", ".join(self.feed(step, "np.nan"))
    self.line(f'refused("a gradient that fails", lambda: session.run('
              f"{self.train_op(step[1])}, {{{fed}}}), "
              "tf.errors.InvalidArgumentError)")

  def tracing(self, steps):
    return ()

  def set_rate(self, rate):
    self.line(f"session.run(set_rate, {{new_rate: {rate}}})")

  def value(self, i):
    return f"np.array(session.run(v{i}))"

  def average(self, name, decay, i):
    k = self.decays(name).index(decay)
    return f"session.run(averages[{k}, {i}])"

  def swapped(self, name, decay):
    decay = "" if decay is None else f", decay={decay}"
    return f"moving.averaged_weights(session{decay})"

  def seeding(self, name):
    return "moving.seed_averages(session)"

  def write_assign(self, i, t):
    for name in self.program.averaging:
      for decay in self.decays(name):
        self.line(self.average(name, decay, i))
    v = self.variables[i]
    self.line(f"session.run(set_v{i}.op, {{n{i}: np.asarray(start({t}, "
              f"{v.shape!r}), tf.{v.dtype}.as_numpy_dtype)}})")
    self.model.assign(i, t)

  def check_others(self):
    self.line(f'check("{self.at}: step", session.run(step), '
              f"{self.model.step})")
    if self.model.has_gate:
      self.line(f'check("{self.at}: dropped", session.run(dropped), '
                f"{self.model.dropped})")
    if self.program.has(*programs.WORKERS):
      for i, center in enumerate(self.model.centers):
        self.check(f"center of v{i}", f"session.run(getter.centers[v{i}])",
                   center, i)

  def refused_save(self):
    return self.saving("swapping", "refused")

  def saving(self, how, name):
    saver = "saver" if how == "saver" else "swapping"
    return (f'{saver}.save(session, path("{name}"), '
            "write_meta_graph=False)")

  def restore(self, name, kind, how):
    if how != "again" and kind != "swapped":
      self.line("session.close()", "session = tf1.Session()")
      self.initialize()
      self.set_rate(self.model.rate)
    saver = "swapping" if kind == "swapping" else "saver"
    self.line(f'{saver}.restore(session, path("{name}"))')


_WRITERS = {
    ("keras", "eager"): _Keras, ("keras", "function"): _Keras,
    ("keras", "jit"): _Keras, ("keras", "fit"): _Fit,
    ("v1", "eager"): _V1, ("v1", "function"): _V1, ("v1", "jit"): _V1,
    ("v1", "resource"): _Session, ("v1", "ref"): _Session,
}
