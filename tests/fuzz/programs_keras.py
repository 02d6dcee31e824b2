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
    return ", ".join(f"v{i}" for i in range(len(self.variables)))

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
        self.line(
            "scaled = find(opt, keras.optimizers.LossScaleOptimizer)")
      else:
        self.line(f"{writer.OBJECTS[name]} = find(opt, wk.{name})")

  counted = "updates"

  def apply(self, grads, inside=False, step=None):
    given = ", ".join(grads.get(i, "None") for i in range(len(self.variables)))
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
      for i in range(len(self.variables)):
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
  elif name == "Lookahead":
    positional = [str(options["period"]), str(options["step"])]
  else:
    positional = [str(programs.LIMIT)]
    named["policy"] = repr(options["policy"])
  if options.get("keep"):
    named["keep_raw_weights"] = True
  if options["sum"]:
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
