"""Writes programs of `wrapopt.keras`."""

import contextlib

import numpy as np

import programs
import programs_model
import programs_writer as writer

# The inner optimizers.
_INNER = {
    "SGD": "SGD({rate}{more})",
    "SGDW": "SGD({rate}, weight_decay={decay}{more})",
    "Momentum": "SGD({rate}, momentum={momentum}{more})",
    "Nesterov": "SGD({rate}, momentum={momentum}, nesterov=True{more})",
    "Adam": "Adam({rate}, {b1}, {b2}, {e}{more})",
    "AdamW": "AdamW({rate}, {decay}, {b1}, {b2}, {e}{more})",
    "Adam0": "Adam({rate}, 0.0, {b2}, {e}{more})",
    "Adamax": "Adamax({rate}, {b1}, {b2}, {e}{more})",
    "Adagrad": "Adagrad({rate}, {accumulator}, {e}{more})",
    "RMSprop": "RMSprop({rate}, {rho}, epsilon={e}{more})",
}


class Keras(writer.Functions):
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
    return ", ".join(f"v{i}" for i in self.model.order)

  def optimizer(self):
    name, options = self.program.inner
    more = (f", gradient_accumulation_steps={options['accumulate']}"
            if "accumulate" in options else "")
    if name == "LazyAdam":
      made = "wk." + ("LazyAdam" + _INNER["Adam"].removeprefix("Adam")
                      ).format(**writer.CONSTANTS, more=more)
    else:
      made = "keras.optimizers." + _INNER[name].format(
          **writer.CONSTANTS, more=more)
    for name, options in reversed(self.program.chain):
      made = _keras_wrapper(name, options, made)
    return made

  def find_wrappers(self):
    for name in self.program.names:
      if name == "LossScale":
        self.line("scaled = find(opt, keras.optimizers.LossScaleOptimizer)")
      else:
        self.line(f"{writer.OBJECTS[name]} = find(opt, wk.{name})")

  counted = "updates"

  def apply(self, grads, inside=False, step=None):
    given = ", ".join(grads.get(i, "None") for i in self.model.order)
    given = f"[{given}], [{self.all_variables()}]"
    if not self.program.has(programs.KERAS_GATE):
      return f"opt.apply({given})"
    recorded = "recorded" if inside else self.recorded(step)
    return f"opt.apply_recorded({recorded}, {given})"

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
      for i in self.model.order:
        self.check(f"slow weights of v{i}",
                   f"lookahead.slow_weights(v{i}).numpy()",
                   self.model.slow_weights(i), i)
    self.line(f'check("{self.at}: iterations", opt.iterations, '
              f"{self.model.updates})",
              f'check("{self.at}: rate", opt.learning_rate, '
              f"{self.model.rate})")
    self.check_gate("gate.staleness_stats().dropped")
    if self.program.has("LossScale"):
      self.line(f'check("{self.at}: scale", scaled.dynamic_scale, '
                f"{self.model.scale})")

  def checkpoint(self):
    values = ", ".join(f"v{i}.value" for i in range(len(self.variables)))
    return f"tf.train.Checkpoint(v=[{values}], opt=opt)"

  def saving(self, how, name):
    if how == "tree":
      return f"tree_{name} = copies([{self.tree()}])"
    return f'{self.checkpoint()}.write(path("{name}"))'

  def tree(self):
    values = "".join(f"v{i}, " for i in range(len(self.variables)))
    return f"{values}*opt.variables"

  def restore(self, name, kind, how):
    if how != "again":
      self.setup(True)
    if how == "fresh" or kind == "tree" and how != "again":
      self.build()
    if kind == "tree":
      self.line(f"assign_all([{self.tree()}], tree_{name})")
      return
    self.line(f'{self.checkpoint()}.read(path("{name}")).expect_partial()')
    if how == "deferred":
      self.build()

  def write_finish(self):
    self.line(f"opt.finalize_variable_values([{self.all_variables()}])")
    self.model.end_fit()

  def other_step(self, i):
    v = self.variables[i]
    return (f"keras.optimizers.SGD(0.5).apply([tf.ones({list(v.shape)}, "
            f"{v.dtype!r})], [v{i}])")


def _keras_wrapper(name, options, made):
  options = dict(options)
  if name == "LossScale":
    return (f"keras.optimizers.LossScaleOptimizer({made}, {options['scale']}, "
            f"{options['growth']})")
  named = {}
  if name == "MovingAverage":
    decays = list(map(writer.decay_of, options["decays"]))
    positional = [f"[{', '.join(decays)}]"]
    if options["warm_up"]:
      named["dynamic_decay"] = True
    if options["start"]:
      named["start_step"] = options["start"]
    if options.get("every", 1) > 1:
      named["update_every"] = options.get("every", 1)
    if options["lazy"] is False:
      named["lazy"] = False
  elif name == "SWA":
    positional = [str(options["start"]), str(options["period"])]
    if options.get("epoch"):
      named["steps_per_epoch"] = options["epoch"]
  elif name in programs.PRIMAL:
    positional = [str(options["momentum"]), str(options["decay"])]
  elif name in programs.FREE:
    positional = [str(options[k]) for k in (
        "momentum", "warm_up", "power", "r")]
  elif name == "Lookahead":
    positional = [str(options["period"]), str(options["step"])]
  else:
    positional = [str(programs.LIMIT)]
    named["policy"] = repr(options["policy"])
  if options.get("keep"):
    named["keep_raw_weights"] = True
  if options.get("sum"):
    named["sum_duplicates"] = True
  if options.get("chosen"):
    names = [f"v{i}" for i, x in enumerate(options["chosen"]) if x]
    named["variables"] = f"lambda v: v.name in {names}"
  return f"wk.{name}({made}, {writer.arguments_of(positional, named)})"


class Fit(Keras):
  """Keras's `fit`."""

  def setup(self, fresh):
    writer.Functions.setup(self, fresh)
    specs = [[list(v.shape), v.dtype, v.rows] for v in self.variables]
    self.line(f"specs = {specs!r}",
              f"model = make_model(specs{', True' if fresh else ''})")
    self.compile(self.optimizer(), range(len(self.variables)), [
        i in self.model.order for i in range(len(self.variables))])
    self.find_model()

  def compile(self, optimizer, changed, trained):
    for i in changed:
      self.line(f"model.variables[{i}].trainable = {trained[i]}")
    self.line(f"model.compile({optimizer}, loss=first, jit_compile=False)")

  def find_model(self):
    given = ", ".join(f"v{i}" for i in range(len(self.variables)))
    self.line("opt = model.optimizer", f"{given}, *_ = model.variables")
    self.find_wrappers()

  def write_steps(self, steps):
    steps = self.masked(steps)
    if not steps:
      return
    self.line(f"model.fit({self.batches(steps)}, verbose=0, shuffle=False)")
    self.take_all(steps)
    if self.program.setting == "clusters":
      self.line("tf.config.optimizer.set_jit('autoclustering')")

  def take_all(self, steps):
    for step in steps:
      self.model.take(step)
    self.model.end_fit()

  def batches(self, steps):
    given = ", ".join(
        f"({step[0]}, {'np.inf' if self.scale(step) == float('inf') else 1.0})"
        for step in steps)
    return f"batches(specs, [{given}])"

  def write_freeze(self, trained):
    # The state of the optimizer in a file depends on the variables it trains.
    trained = [x and i in self.model.order for i, x in enumerate(trained)]
    if not any(trained):
      return
    with self.block("if not opt.built:"):
      self.build()
    self.compile("opt", self.model.order, trained)
    self.model.trained = tuple(trained)

  def write_epochs(self, steps):
    """Epochs whose length the data do not tell; then begins anew.

    At their end, Keras counts a step that it does not take.
    """
    epoch = self.program.options("SWA")["epoch"]
    fit = (f"model.fit(of_unknown_length({self.batches(steps)}), epochs=2, "
           "callbacks=[wk.EvaluateWithAverages()], verbose=0)")
    if epoch and epoch * self.program.accumulates != len(steps):
      fit = (f'refused("epochs of other lengths", lambda: {fit}, ValueError)')
    self.line(fit)
    self.model.restart(False)
    self.setup(False)
    self.build()

  def loss(self, name, k, t):
    """The loss of averages on a batch, and the largest of its terms."""
    want = largest = 0.0
    for i, value in enumerate(self.model.values):
      average = self.model.average(name, k, i)
      g = programs_model.gradient(self.program, t, i).sum
      want += float((g * (value if average is None else average)).sum())
      largest += float(np.abs(g).sum() * (
          self.model.tolerance(i) + 1e-6 * self.model.largest[i]))
    return want, largest

  def write_evaluate(self, t):
    want, largest = self.loss(self.program.averaging[0], 0, t)
    self.line(f'check("{self.at}", model.evaluate(batches(specs, [({t}, 1.0)]),'
              " verbose=0, callbacks=[wk.EvaluateWithAverages()]), "
              f"{want!r}, {largest!r})")

  def write_validate(self, steps, data):
    """Averages of all decays see the same batches, whichever these are."""
    steps = self.masked(steps)
    if not steps or any(options.get("epoch") for _, options in
                        self.program.chain):
      return
    name = self.program.averaging[0]
    self.line(f"logs = validated(model, specs, {self.batches(steps)}, "
              f"{data!r})")
    for step in steps:
      self.model.take(step)
    losses = [[self.loss(name, k, t) for k in range(len(self.decays(name)))]
              for t in (3, 7, 11)]
    wants = [[want for want, _ in row] for row in losses]
    if data == "batches":
      wants = np.mean(wants, 0, keepdims=True).tolist()
    self.line(f'check_one_of("{self.at}", logs, {wants!r}, '
              f"{max(largest for row in losses for _, largest in row)!r})")
    self.model.end_fit()

  def saving(self, how, name):
    if how == "checkpoint":
      return super().saving(how, name)
    if how == "tree":
      return f"tree_{name} = copies(model.get_state_tree())"
    if how == "model":
      return f'model.save(path("{name}.keras"))'
    return f'model.save_weights(path("{name}.weights.h5"))'

  def write_save(self, how):
    # Neither a model nor a tree says which variables are trained.
    if how in ("model", "tree") and not all(
        x and i in self.model.order
        for i, x in enumerate(self.model.trained)):
      how = "weights"
    super().write_save(how)

  def restore(self, name, kind, how):
    if kind == "checkpoint":
      super().restore(name, kind, how)
    elif kind == "model":
      self.line(f'model = keras.models.load_model(path("{name}.keras"))')
      self.find_model()
    else:
      if how != "again":
        self.setup(True)
        self.build()
      self.line(f"model.set_state_tree(tree_{name})" if kind == "tree" else
                f'model.load_weights(path("{name}.weights.h5"))')
