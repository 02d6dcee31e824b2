"""Writes programs of the wrappers of `tf.compat.v1.train`."""

import contextlib

import programs
import programs_model
import programs_writer as writer

# The inner optimizers.
_INNER = {
    "GradientDescent": "GradientDescentOptimizer(rate)",
    "Momentum": "MomentumOptimizer(rate, {momentum})",
    "Nesterov": "MomentumOptimizer(rate, {momentum}, use_nesterov=True)",
    "Adam": "AdamOptimizer(rate, {b1}, {b2}, {e})",
    "Adam0": "AdamOptimizer(rate, 0.0, {b2}, {e})",
    "Adagrad": "AdagradOptimizer(rate, {accumulator})",
    "RMSProp": "RMSPropOptimizer(rate, {rho}, {momentum}, {e})",
    "Adadelta": "AdadeltaOptimizer(rate, {rho}, {e})",
}


class V1(writer.Functions):
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
      made = _INNER["Adam"].replace("AdamOptimizer",
                                       "wrapopt.LazyAdamOptimizer")
    else:
      made = f"tf1.train.{_INNER[name]}"
    self.line(f"opt = {made.format(**writer.CONSTANTS)}")
    for name, options in reversed(self.program.chain):
      self.line(f"opt = {writer.OBJECTS[name]} = wrapopt.{name}("
                f"{self.wrapper_arguments(name, options)})")

  def wrapper_arguments(self, name, options):
    named = {k: False for k in ("fused", "lazy") if options.get(k) is False}
    positional = ["opt"]
    if name == programs.MOVING:
      decays = ", ".join(map(writer.decay_of, options["decays"]))
      positional.append(f"[{decays}]")
      if options["warm_up"]:
        named["num_updates"] = "step"
      if options["shadow"]:
        named["shadow_dtype"] = "tf.float32"
      if options.get("every", 1) > 1:
        named["update_every"] = options.get("every", 1)
      if options.get("chosen"):
        names = [f"v{i}" for i, x in enumerate(options["chosen"]) if x]
        named["variables"] = (
            f"lambda v: any(v is x for x in [{', '.join(names)}])")
    elif name in programs.PRIMAL:
      positional += [str(options["momentum"]), str(options["decay"])]
    elif name in programs.FREE:
      positional += [str(options[k]) for k in (
          "momentum", "warm_up", "power", "r")]
    elif name == programs.GATE:
      positional.append(str(programs.LIMIT))
      named["policy"] = repr(options["policy"])
    elif name == programs.MODEL:
      positional += ["1", "True", "getter", str(options["period"])]
    elif name == programs.ELASTIC:
      positional += ["1", "getter", str(options["period"]),
                     str(options["rate"])]
      named["rho"] = 0.0
    return writer.arguments_of(positional, named)

  def apply(self, grads, inside=False, step=None):
    pairs = ", ".join(f"({g}, v{i})" for i, g in grads.items())
    recorded = ""
    if self.program.has(programs.GATE):
      recorded = ", recorded=" + ("recorded" if inside else self.recorded(step))
    return f"opt.apply_gradients([{pairs}], step{recorded})"

  def write_step(self, step):
    self.line(self.call(step))

  def set_rate(self, rate):
    self.line(f"rate.assign({rate})")

  def check_others(self):
    self.line(f'check("{self.at}: step", step.numpy(), {self.model.step})')
    self.check_gate("gate.staleness_stats().dropped")

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


class Session(V1):
  """The same in a graph and a session."""

  @contextlib.contextmanager
  def entered(self):
    with self.block("with tf.Graph().as_default():"):
      self.line("tf1.get_variable_scope().set_use_resource("
                f"{self.program.mode == 'resource'})")
      self.make_graph()
      if self.program.setting == "clusters":
        self.line("config = tf1.ConfigProto()",
                  "config.graph_options.optimizer_options.global_jit_level = "
                  "tf1.OptimizerOptions.ON_1")
      self.open()
      yield
      self.line("session.close()")

  def open(self):
    config = "config=config" * (self.program.setting == "clusters")
    self.line(f"session = tf1.Session({config})")
    self.initialize()

  def make_graph(self):
    program = self.program
    custom = ""
    for name in programs.WORKERS:
      if program.has(name):
        self.line("getter = wrapopt."
                  f'{name.replace("Optimizer", "CustomGetter")}("/cpu:0")')
        custom = ", custom_getter=getter"
    warm = program.setting == "warm"
    starts = [f"np.asarray(start({i}, {v.shape!r}), "
              f"tf.{v.dtype}.as_numpy_dtype)"
              for i, v in enumerate(self.variables)]
    with self.block(f'with tf1.variable_scope(""{custom}):'):
      for i, start in enumerate(starts):
        self.line(f'v{i} = tf1.get_variable("v{i}", initializer='
                  f"{f'np.zeros_like({start})' if warm else start})")
    if warm:
      values = ", ".join(f'"v{i}": {x}' for i, x in enumerate(starts))
      names = ", ".join(f'"v{i}": v{i}' for i in range(len(starts)))
      self.line("tf1.train.init_from_checkpoint("
                f"in_eager(lambda: pretrained({{{values}}})), {{{names}}})")
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
    if self.is_early:
      self.line("rounds.get_init_op()  # A hook runs one like it.")
    everything = (True,) * len(self.variables)
    for trained in dict.fromkeys([
        everything, *(step[1] for step in program.steps)]):
      grads = {i: f"g{i}" for i, x in enumerate(trained) if x}
      self.line(f"{self.train_op(trained)} = {self.apply(grads, inside=True)}")
    for i, v in enumerate(self.variables):
      self.line(f"n{i} = tf1.placeholder(tf.{v.dtype}, {list(v.shape)})",
                f"set_v{i} = tf1.assign(v{i}, n{i})")
    for name in program.averaging:
      self.line("averages = {}")
      for k, decay in enumerate(self.decays(name)):
        decay = f", {decay}" * (name == programs.MOVING)
        for i in range(len(self.variables)):
          if self.model.keeps(name, i):
            self.line(f"averages[{k}, {i}] = tf.convert_to_tensor("
                      f"{writer.OBJECTS[name]}.average(v{i}{decay}))")
    for name in program.names:
      if name == programs.MODEL:
        self.line("hook = rounds.make_session_run_hook()", "hook.begin()")
      elif name == programs.ELASTIC:
        self.line("hook = elastic.make_session_run_hook(True, 0)",
                  "hook.begin()")
    if program.has(programs.GATE):
      self.line("dropped = gate.staleness_stats().dropped")
    used = [rest[0] for name, *rest in program.operations if name == "save"]
    if used and program.has_files:
      self.line("saver = tf1.train.Saver()")
    if program.averaging and program.has_files:
      self.line(f"swapping = {self.averaging}.swapping_saver()")
    if ("export",) in program.operations:
      self.line("with tf1.control_dependencies("
                f"[{self.train_op(everything)}]):",
                '  done = tf.constant("done")')

  @property
  def averaging(self):
    """The object with the averages."""
    return writer.OBJECTS[self.program.averaging[0]]

  def initialize(self):
    self.line("session.run([tf1.global_variables_initializer(), "
              "tf1.local_variables_initializer()])")
    if self.program.has(*programs.WORKERS):
      self.line("hook.after_create_session(session, tf.train.Coordinator())")

  @property
  def is_early(self):
    """Whether the op that copies centers is made before the steps."""
    return (self.program.has(programs.MODEL) and
            self.program.options(programs.MODEL).get("early"))

  def train_op(self, trained):
    return "train_" + "".join(str(int(x)) for x in trained)

  def feed(self, step, bad="0.0"):
    fed = [f"bad: {bad}"]
    grads = writer.grads_of(self.program, step)
    for i, (is_sparse, arguments) in grads.items():
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
    decay = "" if decay in (None, "None") else f", decay={decay}"
    return f"{self.averaging}.averaged_weights(session{decay})"

  def seeding(self, name):
    return f"{self.averaging}.seed_averages(session)"

  def write_assign(self, i, t):
    for name in self.program.averaging:
      for decay in self.decays(name):
        if self.model.keeps(name, i):
          self.line(self.average(name, decay, i))
    v = self.variables[i]
    self.line(f"session.run(set_v{i}.op, {{n{i}: np.asarray(start({t}, "
              f"{v.shape!r}), tf.{v.dtype}.as_numpy_dtype)}})")
    self.model.assign(i, t)

  def check_others(self):
    self.line(f'check("{self.at}: step", session.run(step), '
              f"{self.model.step})")
    self.check_gate("session.run(dropped)")
    if self.program.has(*programs.WORKERS):
      for i, center in enumerate(self.model.centers):
        self.check(f"center of v{i}", f"session.run(getter.centers[v{i}])",
                   center, i)

  def refused_save(self):
    return self.saving("swapping", "refused")

  def saving(self, how, name):
    saver = "saver" if how == "saver" else "swapping"
    return f'{saver}.save(session, path("{name}"), write_meta_graph=False)'

  def restore(self, name, kind, how):
    if how != "again" and kind != "swapped":
      self.line("session.close()")
      self.open()
      self.set_rate(self.model.rate)
    saver = "swapping" if kind == "swapping" else "saver"
    self.line(f'{saver}.restore(session, path("{name}"))')

  def write_export(self):
    """A SavedModel, which takes a step in TensorFlow 2."""
    fed = ["bad", "recorded"] + [
        f"{letter}{i}" for i, v in enumerate(self.variables)
        for letter in "pi"[:1 + v.rows]]
    self.line("read = {")
    for i in range(len(self.variables)):
      self.line(f'    "v{i}": tf.convert_to_tensor(v{i}),')
    for name in self.program.averaging:
      self.line('    **{f"a{k}_{i}": x for (k, i), x in averages.items()},')
    self.line("}", 'exported(session, path("exported"), {',
              f'    "train": ({{{", ".join(f"{x!r}: {x}" for x in fed)}}}, '
              '{"done": done}), "read": ({}, read)})')

  def write_last(self):
    if ("export",) not in self.program.operations:
      return
    self.model.rate = programs_model.RATE  # Local variables begin anew.
    step = self.all_of(1)
    fed = [f"bad=tf.constant(0.0), recorded=tf.constant({self.model.step}, "
           "tf.int64)"]
    for i, (is_sparse, arguments) in writer.grads_of(
        self.program, step).items():
      fed.append(f"p{i}=tf.constant(rows{arguments}[0]), "
                 f"i{i}=tf.constant(rows{arguments}[1])" if is_sparse
                 else f"p{i}=tf.constant(dense{arguments})")
    self.line('loaded = tf.saved_model.load(path("exported"))',
              f'loaded.signatures["train"]({", ".join(fed)})',
              'read = loaded.signatures["read"]()')
    self.model.take(step)
    self.at = "in TensorFlow 2"
    for i, value in enumerate(self.model.values):
      self.check(f"v{i}", f'read["v{i}"].numpy()', value, i)
    for name in self.program.averaging:
      for k in range(len(self.decays(name))):
        for i in range(len(self.variables)):
          if self.model.keeps(name, i):
            self.check(f"average {k} of v{i}", f'read["a{k}_{i}"].numpy()',
                       self.model.average(name, k, i), i)
