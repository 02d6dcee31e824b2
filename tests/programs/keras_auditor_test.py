"""Programs of users of Keras, in each pair of settings, audited."""

import contextlib
import functools
import os

# So that XLA may be switched on, before TensorFlow reads it.
os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")

import keras
import numpy as np
import pytest
import tensorflow as tf

import auditor
from auditor import Finding, Stack, WRAPPERS
import pairwise
from replicas import REPLICAS, mirrored
import wrapopt.keras as wk
from wrapopt._averages import _replicas
from wrapopt.keras._steps import _inner
from wrapopt.keras._steps import _rules

K, L = keras.optimizers, keras.layers


class Own(K.Optimizer):
  """A user's optimizer, with slots and a count of its own: heavy-ball."""

  def build(self, variables):
    if self.built:
      return
    super().build(variables)
    self.speeds = self.add_optimizer_variables(variables, "speed")
    self.seen = self.add_variable((), name="seen", initializer="zeros")

  def update_step(self, gradient, variable, learning_rate):
    rate = keras.ops.cast(learning_rate, variable.dtype)
    speed = self.speeds[self._get_variable_index(variable)]
    self.assign(speed, 0.5 * speed - rate * keras.ops.cast(
        gradient, variable.dtype))
    self.assign_add(variable, speed)

  def _backend_update_step(self, grads, trainable_variables, learning_rate):
    super()._backend_update_step(grads, trainable_variables, learning_rate)
    self.seen.assign_add(1.0)


class Signed(K.SGD):
  """A user's subclass of one that an op could take."""

  def update_step(self, gradient, variable, learning_rate):
    super().update_step(keras.ops.sign(gradient), variable, learning_rate)


class Halves(keras.constraints.Constraint):

  def __call__(self, w):
    return w / 2


class Cooling(K.schedules.LearningRateSchedule):
  """A schedule that holds a variable, which a user may set."""

  def __init__(self):
    super().__init__()
    self.factor = keras.Variable(0.5, trainable=False)

  def __call__(self, step):
    return 0.02 / (1.0 + self.factor * keras.ops.cast(step, "float32"))


class Cools(keras.callbacks.Callback):
  """Sets the variable of a schedule, or the learning rate, between steps."""

  def __init__(self, rate):
    super().__init__()
    self.rate = rate

  def on_train_batch_begin(self, batch, logs=None):
    if batch == 2:  # Also with two steps per execution.
      if isinstance(self.rate, Cooling):
        self.rate.factor.assign(2.0)
      elif isinstance(self.rate, float):
        self.model.optimizer.learning_rate = 0.005


class SwitchesOn(keras.callbacks.Callback):
  """Lets XLA compile what it likes, after a step."""

  def on_train_batch_end(self, batch, logs=None):
    tf.config.optimizer.set_jit("autoclustering")


class Subclass(keras.Model):

  def __init__(self, layers):
    super().__init__()
    self.parts = layers

  def call(self, x, training=False):
    for part in self.parts:
      x = part(x, training=training) if isinstance(
          part, (L.Dropout, L.BatchNormalization)) else part(x)
    return x


def loss_of(model, x, y):
  predicted = model(x, training=True)
  loss = tf.reduce_mean((predicted - tf.cast(y, predicted.dtype)) ** 2)
  return loss + sum(tf.cast(x, loss.dtype) for x in model.losses)


def recording(opt):
  """A block in which a gate records the step whose gradients are computed."""
  return (opt.record_step() if isinstance(opt, wk.DropStaleGradient)
          else contextlib.nullcontext())


def with_train_step(base, checked):
  """A class of models with a train_step of the user's."""
  class Trained(base):

    def train_step(self, data):
      x, y = data
      with recording(self.optimizer):
        with tf.GradientTape() as tape:
          loss = loss_of(self, x, y)
          scaled = self.optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, self.trainable_variables)
      # TensorFlow cannot lift initial values out of it.
      with tf.control_dependencies(
          [tf.debugging.check_numerics(loss, "")] if checked else []):
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
      return {"loss": loss}

  return Trained


FACTORS = {
    "wrapper": list(WRAPPERS),
    "optimizer": {
        "SGD": K.SGD,
        "Momentum": functools.partial(K.SGD, momentum=0.5, nesterov=True),
        "Adam": functools.partial(K.Adam, amsgrad=True),
        "AdamW": K.AdamW,
        "Lion": K.Lion,
        "RMSprop": functools.partial(K.RMSprop, momentum=0.5),
        "Adagrad": K.Adagrad,
        "Adamax": K.Adamax,
        "Own": Own,
        "Signed": Signed,
    },
    "model": ["functional", "unbuilt", "embedding", "subclass"],
    "train_step": ["Keras's", "own", "checked", "loop"],
    # XLA compiles what it likes: from the start, or after the first step.
    "execution": ["graph", "eager", "jit", "two steps", "clusters",
                  "clusters later"],
    "replicas": [1, REPLICAS],
    "constraint": {"none": None, "halves": Halves(),
                   "max_norm": keras.constraints.MaxNorm(0.5),
                   "non_neg": keras.constraints.NonNeg()},
    "regularizer": {"none": None, "l2": keras.regularizers.L2(0.01)},
    "clipping": {"none": {}, "clipnorm": {"clipnorm": 0.1},
                 "global_clipnorm": {"global_clipnorm": 0.1},
                 "clipvalue": {"clipvalue": 0.05}},
    "rate": {"number": lambda: 0.02,
             "schedule": lambda: K.schedules.ExponentialDecay(0.02, 2, 0.5),
             "schedule with state": Cooling},
    "weight_decay": {"none": None, "decay": 0.125, "excluded": 0.125},
    "accumulation": {"none": None, "two": 2},
    "scaling": ["none", "around", "inside"],
    "ema": {"none": {}, "ema": {"use_ema": True, "ema_momentum": 0.5},
            "overwrites": {"use_ema": True, "ema_momentum": 0.5,
                           "ema_overwrite_frequency": 2}},
    "policy": ["float32", "mixed_bfloat16", "float64"],
    "callbacks": ["none", "evaluate", "cools", "checkpoint"],
    # The first layer: from the start, or after three steps.
    "frozen": ["none", "first", "later"],
}
PLAIN = {name: next(iter(values)) for name, values in FACTORS.items()}


_CLUSTERS = {"clusters", "clusters later"}
_GRAPHS = {"graph", "jit", "two steps", *_CLUSTERS}
# No program has values of all factors in one of these.
BANNED = [
    # Averages between which one trains have no constraint and no other average,
    # and the weight decay acts on z. Schedule-Free takes no momentum.
    *({"wrapper": {"PrimalAverage", "ScheduleFree"}, factor: values}
      for factor, values in {
          "constraint": {"halves", "max_norm", "non_neg"},
          "weight_decay": {"decay", "excluded"}, "ema": {"ema", "overwrites"},
          "optimizer": {"AdamW"}}.items()),
    {"wrapper": {"ScheduleFree"}, "optimizer": {
        "Momentum", "Adam", "Lion", "RMSprop", "Adamax"}},
    # A BEMA follows from the weights, where the other puts its averages.
    {"wrapper": {"BEMA"}, "ema": {"ema", "overwrites"}},
    # A gate is the outermost wrapper, of optimizers that several workers may
    # share. A step must be recorded, and XLA does not compile it.
    *({"wrapper": {"gate"}, factor: values} for factor, values in {
        "train_step": {"Keras's"}, "execution": {"jit"}, "replicas": {REPLICAS},
        "accumulation": {"two"}, "scaling": {"around", "inside"},
        "ema": {"ema", "overwrites"}}.items()),
    # Before it is compiled again, `fit` ends with averages in the weights.
    *({"frozen": {"later"}, factor: values} for factor, values in {
        "train_step": {"Keras's", "own", "checked"},
        "execution": {"two steps"},
        "callbacks": {"evaluate", "cools", "checkpoint"}}.items()),
    # A loop of the user's has neither.
    {"train_step": {"loop"}, "execution": {"two steps"}},
    {"train_step": {"loop"}, "callbacks": {"evaluate", "cools", "checkpoint"}},
    {"wrapper": {"Lookahead"}, "callbacks": {"evaluate"}},
    # Keras constrains the weights in calls that only accumulate, too. An eager
    # average starts after them, and that of a graph at its trace.
    {"accumulation": {"two"}, "constraint": {"halves", "max_norm", "non_neg"},
     "execution": {"eager"}},
    # Without wrapopt, Keras cannot run the others, either. XLA has no
    # collectives of TensorFlow, and makes no variables.
    {"execution": {"jit", *_CLUSTERS}, "replicas": {REPLICAS}},
    {"execution": {"jit"}, "train_step": {"checked"}},
    # A step in a branch of a graph needs a merge call.
    {"replicas": {REPLICAS}, "execution": _GRAPHS, "accumulation": {"two"}},
    {"replicas": {REPLICAS}, "execution": _GRAPHS, "ema": {"overwrites"}},
    # TensorFlow loses an input of branches and loops around replicas.
    {"replicas": {REPLICAS}, "execution": {"two steps"}},
    {"replicas": {REPLICAS}, "execution": _GRAPHS, "train_step": {"loop"}},
]


def allowed(row):
  """Whether a program may have these settings, together."""
  return not any(all(row.get(name) in values for name, values in ban.items())
                 for ban in BANNED)


ROWS = pairwise.covering(FACTORS, allowed)


def layers_of(row):
  first = {"kernel_constraint": FACTORS["constraint"][row["constraint"]],
           "kernel_regularizer": FACTORS["regularizer"][row["regularizer"]]}
  if row["model"] == "embedding":
    found = [L.Embedding(
        6, 3, embeddings_constraint=first["kernel_constraint"],
        embeddings_regularizer=first["kernel_regularizer"]), L.Flatten()]
  else:
    found = [L.Dense(3, "tanh", **first), L.Dropout(0.25)]
  return [*found, L.BatchNormalization(), L.Dense(1, dtype=(
      "float64" if row["policy"] == "float64" else "float32"))]


def model_of(row):
  cls = keras.Sequential
  if row["model"] == "subclass":
    cls = Subclass
  if row["train_step"] in ("own", "checked"):
    cls = with_train_step(cls, row["train_step"] == "checked")
  layers = layers_of(row)
  if row["frozen"] == "first":
    layers[0].trainable = False
  if row["model"] == "functional":
    layers.insert(0, keras.Input([4]))
  return cls(layers)


def optimizer_of(row, watch, rate):
  decay = FACTORS["weight_decay"][row["weight_decay"]]
  opt = FACTORS["optimizer"][row["optimizer"]](
      learning_rate=rate,
      gradient_accumulation_steps=FACTORS["accumulation"][row["accumulation"]],
      **({"weight_decay": decay} if decay or row["optimizer"] != "AdamW"
         else {}),
      **FACTORS["clipping"][row["clipping"]], **FACTORS["ema"][row["ema"]])
  if row["weight_decay"] == "excluded":
    opt.exclude_from_weight_decay(var_names=["bias", "gamma"])

  def scaled(opt):
    return K.LossScaleOptimizer(opt, 4.0, dynamic_growth_steps=3)

  if row["scaling"] == "inside":
    return watch.wrap(scaled(opt))
  opt = watch.wrap(opt)
  return scaled(opt) if row["scaling"] == "around" else opt


def data_of(row):
  rng = np.random.default_rng(0)
  # An execution ends with a step, for a comparison with single steps.
  n = 4 * (7 if row["accumulation"] == "none" else 8)
  x = (rng.integers(0, 6, size=[n, 2]) if row["model"] == "embedding"
       else rng.normal(size=[n, 4]).astype(np.float32))
  return x, rng.normal(size=[n, 1]).astype(np.float32)


def callbacks_of(row, watch, rate, folder):
  return {
      "none": lambda: [],
      "evaluate": lambda: [] if watch.stack is None else [
          wk.EvaluateWithAverages(recalibrate=False)],
      "cools": lambda: [Cools(rate)],
      "checkpoint": lambda: [keras.callbacks.ModelCheckpoint(
          f"{folder}/last.weights.h5", save_weights_only=True,
          save_freq="epoch")],
  }[row["callbacks"]]()


def fit(row, watch, folder):
  """Trains by Keras's `fit`."""
  x, y = data_of(row)
  model, rate = model_of(row), FACTORS["rate"][row["rate"]]()
  model.compile(
      optimizer_of(row, watch, rate), "mse", auto_scale_loss=False,
      run_eagerly=row["execution"] == "eager",
      jit_compile=row["execution"] == "jit",
      steps_per_execution=2 if row["execution"] == "two steps" else 1)
  model.fit(x, y, batch_size=4, epochs=2 if row["callbacks"] != "none" else 1,
            shuffle=False, verbose=0, validation_data=(x[:4], y[:4]),
            callbacks=[watch, *callbacks_of(row, watch, rate, folder),
                       *[SwitchesOn()] * (row["execution"] == "clusters later")
                       ])


def loop(row, watch):
  """Trains by a loop of the user's."""
  model = model_of(row)
  opt = optimizer_of(row, watch, FACTORS["rate"][row["rate"]]())

  def step(x, y):
    with recording(opt):
      with tf.GradientTape() as tape:
        loss = opt.scale_loss(loss_of(model, x, y))
      grads = tape.gradient(loss, model.trainable_variables)
    opt.apply(grads, model.trainable_variables)

  strategy = tf.distribute.get_strategy()

  def run_step(*data):
    strategy.run(step, data)

  if row["execution"] != "eager":
    run_step = tf.function(run_step, jit_compile=row["execution"] == "jit")
  x, y = data_of(row)
  for i in range(0, len(x), 4):
    if row["frozen"] == "later" and i == 12:
      watch.skipped = model.layers[0].trainable_variables
      model.layers[0].trainable = False
      if row["execution"] != "eager":
        run_step = tf.function(run_step.python_function, jit_compile=(
            row["execution"] == "jit"))
    watch.begin(model)
    if row["replicas"] > 1:
      data = [strategy.experimental_distribute_values_from_function(
          lambda c, a=a, i=i: tf.constant(
              a[i + 2 * c.replica_id_in_sync_group:][:2])) for a in (x, y)]
    else:
      data = [tf.constant(a[i:i + 4]) for a in (x, y)]
    run_step(*data)
    watch.see(model)
    if row["execution"] == "clusters later":
      tf.config.optimizer.set_jit("autoclustering")


def program_of(row, folder):
  def program(watch):
    keras.config.set_dtype_policy(row["policy"])
    keras.config.set_floatx(
        "float64" if row["policy"] == "float64" else "float32")
    if row["execution"] == "clusters":
      tf.config.optimizer.set_jit("autoclustering")
    try:
      with (mirrored().scope() if row["replicas"] > 1
            else contextlib.nullcontext()):
        if row["train_step"] == "loop":
          loop(row, watch)
        else:
          fit(row, watch, folder)
    finally:
      tf.config.optimizer.set_jit(False)
      keras.config.set_dtype_policy("float32")
      keras.config.set_floatx("float32")

  return program


def name_of(row):
  return ", ".join(f"{name}={value}" for name, value in row.items()
                   if value != PLAIN[name]) or "plain"


def audit(row, folder):
  two = row["execution"] == "two steps"
  # Without Grappler, Keras's step is the same in all graphs. TensorFlow needs
  # it for branches in replicas.
  rewritten = row["replicas"] > 1 or row["execution"] in {"jit", *_CLUSTERS}
  tf.config.optimizer.set_experimental_options(
      {"disable_meta_optimizer": not rewritten})
  once = {**row, "execution": "graph"} if two else row
  seen = auditor.audit(program_of(once, folder), WRAPPERS[row["wrapper"]],
                       rewritten)
  if two:
    auditor.check_same(seen, auditor.run(program_of(row, folder),
                                         auditor.Watch(WRAPPERS[
                                             row["wrapper"]])))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_pair(row, tmp_path):
  audit(row, tmp_path)


# Daily: many settings at once.
@pytest.mark.by_day(1)
@pytest.mark.parametrize("row", [
    {"wrapper": "MovingAverage of Lookahead", "optimizer": "AdamW",
     "train_step": "checked", "model": "unbuilt", "constraint": "max_norm",
     "regularizer": "l2", "clipping": "global_clipnorm",
     "weight_decay": "excluded"},
    {"wrapper": "update_every", "optimizer": "Own", "constraint": "halves",
     "rate": "schedule with state", "accumulation": "two",
     "scaling": "around", "callbacks": "evaluate"},
    {"wrapper": "MovingAverage", "model": "embedding", "optimizer": "Adagrad",
     "train_step": "loop", "execution": "eager"},
], ids=["wrappers", "own optimizer", "rows"])
def test_program(row, tmp_path):
  audit({**PLAIN, **row}, tmp_path)


def test_each_pair_is_in_a_row():
  def pairs_of(row):
    items = list(row.items())
    return {frozenset((a, b)) for i, a in enumerate(items) for b in items[:i]}

  found = set().union(*map(pairs_of, ROWS))
  for a in FACTORS:
    for b in FACTORS:
      for x in FACTORS[a]:
        for y in FACTORS[b]:
          if a != b:
            assert (frozenset(((a, x), (b, y))) in found) == bool(
                allowed({a: x, b: y})), (a, x, b, y)
  assert all(map(allowed, ROWS))
  assert len(ROWS) < 100


# Files between programs.


def other_program(model, kind, path, make):
  """A new model, with what a file has of another."""
  if kind == "keras":
    model.save(path + ".keras")
    return keras.models.load_model(path + ".keras")
  opt = model.optimizer
  new = make(opt.from_config(opt.get_config()))
  new.optimizer.build(new.trainable_variables)
  if kind == "weights":
    model.save_weights(path + ".weights.h5")
    new.load_weights(path + ".weights.h5")
  else:
    checkpoint = lambda of: tf.train.Checkpoint(model=of, opt=of.optimizer)
    checkpoint(new).read(checkpoint(model).write(path))
  return new


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["keras", "weights", "checkpoint"])
@pytest.mark.parametrize("lora", [False, True], ids=["dense", "LoRA"])
@pytest.mark.parametrize("wrapper", [
    name for name in WRAPPERS if name != "gate"])
def test_files(wrapper, lora, kind, tmp_path):
  x = np.random.default_rng(0).normal(size=[20, 4]).astype(np.float32)

  def make(optimizer):
    model = keras.Sequential([keras.Input([4]), L.Dense(3, "tanh"), L.Dense(1)])
    if lora:
      model.layers[0].enable_lora(2)
    model.compile(optimizer, "mse")
    return model

  def program(watch):
    model = make(watch.wrap(K.SGD(0.125)))
    model.fit(x, x[:, :1] ** 2, batch_size=4, verbose=0, shuffle=False,
              callbacks=[watch])
    if watch.stack is not None:
      watch.check_loaded(model, other_program(model, kind, str(
          tmp_path / "file"), make))

  auditor.audit(program, WRAPPERS[wrapper])


# Ways to break wrapopt. Each is a function of pytest's monkeypatch.


def averages_miss_a_step(patch):
  follow = wk.MovingAverage._follow
  patch.setattr(wk.MovingAverage, "_follow", lambda self, step: (
      follow(self, step) if int(step.iterations) != 2 else None))


def weights_come_back_rounded(patch):
  swapped_in = wk.MovingAverage.averaged_weights

  @contextlib.contextmanager
  def averaged_weights(self, model):
    with swapped_in(self, model):
      yield
    model.weights[0].assign(model.weights[0] * (1 + 2**-23))

  patch.setattr(wk.MovingAverage, "averaged_weights", averaged_weights)


def a_slot_is_forgotten(patch):
  update = _inner.Inner.update

  def forgets(self, *arguments):
    update(self, *arguments)
    self.opt._m[0].assign(tf.zeros_like(self.opt._m[0]))

  patch.setattr(_inner.Inner, "update", forgets)


def a_step_is_counted_twice(patch):
  apply_gradients = wk.MovingAverage.apply_gradients

  def counted(self, pairs):
    apply_gradients(self, pairs)
    self.iterations.assign_add(1)

  patch.setattr(wk.MovingAverage, "apply_gradients", counted)


def fit_ends_with_raw_weights(patch):
  patch.setattr(wk.MovingAverage, "finalize_variable_values",
                lambda self, variables: None)


def statistics_are_lost(patch):
  follow = wk.MovingAverage._follow

  def loses(self, step):
    follow(self, step)
    patch.model.weights[4].assign(tf.zeros([3]))

  patch.setattr(wk.MovingAverage, "_follow", loses)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("broken, error", [
    (averages_miss_a_step, "step 2: average of '0 .*kernel' is wrong"),
    (weights_come_back_rounded, "'0 .*kernel' after averaged_weights is"),
    (a_slot_is_forgotten, "step 0: '2 .*momentum' of the optimizer is"),
    (a_step_is_counted_twice, "the plain program counts 1 iterations, the wr"),
    (fit_ends_with_raw_weights, r"after fit\(\), '.*kernel' is"),
    (statistics_are_lost, "step 0: '4 .*moving_mean' is .* bit for bit"),
    (None, None),
], ids=lambda x: getattr(x, "__name__", ""))
def test_the_auditor_finds(broken, error, monkeypatch):
  def program(watch):
    model = keras.Sequential([
        keras.Input([2]), L.Dense(3), L.BatchNormalization(), L.Dense(1)])
    monkeypatch.model = model
    # Has no op: Keras takes the step.
    model.compile(watch.wrap(K.Adamax(0.125, weight_decay=0.25)), "mse",
                  run_eagerly=True)
    x = np.random.default_rng(0).normal(size=[8, 2])
    model.fit(x, x[:, :1] ** 2, batch_size=2, verbose=0, shuffle=False,
              callbacks=[watch])

  if broken is None:
    auditor.audit(program, WRAPPERS["MovingAverage"])
    return
  broken(monkeypatch)
  with pytest.raises(Finding, match=error):
    auditor.audit(program, WRAPPERS["MovingAverage"])


def test_the_auditor_finds_a_replica_that_differs(monkeypatch):
  update_of = _rules.update_of

  def differs(opt, rule, values, members, cache, averages):
    if _replicas.number() == 1:
      average = _replicas.here(averages[0][-1])
      average.assign(average + 1)
    return update_of(opt, rule, values, members, cache, averages)

  monkeypatch.setattr(_rules, "update_of", differs)
  row = {**PLAIN, "train_step": "loop", "replicas": REPLICAS}
  with pytest.raises(Finding, match="average of .* of replica 1 is not that"):
    audit(row, None)


def test_the_auditor_finds_a_step_that_is_not_taken():
  def program(watch):
    v = keras.Variable(1.0)
    opt = watch.wrap(K.SGD(0.5))
    model = keras.Sequential([])
    model._trainable_variables.append(v)
    watch.begin(model)
    for _ in range(2 if watch.stack is None else 1):
      opt.apply([tf.constant(1.0)], [v])
      watch.see(model)

  with pytest.raises(Finding, match="the plain program took 2 steps, the wrap"):
    auditor.audit(program, Stack(average=auditor.MovingAverage()))
