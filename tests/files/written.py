"""Writes the files that files_test.py reads in all later versions.

    python tests/files/written.py tests/files/0.1

The folder is that of a minor version, and gets one folder for each kind of
file. `numbers.json` has what must be read from each: variables as they were
written, and after one more step, whose gradients are constants.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import wrapopt
import wrapopt.keras

v1 = tf.compat.v1
VALUE = np.float32([[1, -2], [0.5, 4], [-0.25, 8]])
GRAD = np.float32([[0.5, 0.25], [-1, 0.125], [2, -0.5]])

SESSIONS = {
    "average": lambda: wrapopt.MovingAverageOptimizer(
        v1.train.AdamOptimizer(0.125), [0.5, wrapopt.PowerDecay(0.1)]),
    "bema": lambda: wrapopt.MovingAverageOptimizer(
        v1.train.AdamOptimizer(0.125), wrapopt.BEMA()),
    "gate": lambda: wrapopt.DropStaleGradientOptimizer(
        v1.train.MomentumOptimizer(0.125, 0.5), 2),
    "lazy adam": lambda: wrapopt.LazyAdamOptimizer(0.125),
    "primal average": lambda: wrapopt.PrimalAverageOptimizer(
        v1.train.AdamOptimizer(0.125)),
    "schedule-free": lambda: wrapopt.ScheduleFreeOptimizer(
        v1.train.AdamOptimizer(0.125)),
}
KERAS = {
    "average": lambda: wrapopt.keras.MovingAverage(
        keras.optimizers.AdamW(0.125), [0.5, wrapopt.PowerDecay(0.1)]),
    "bema": lambda: wrapopt.keras.MovingAverage(
        keras.optimizers.AdamW(0.125), wrapopt.BEMA()),
    "gate": lambda: wrapopt.keras.DropStaleGradient(
        keras.optimizers.SGD(0.125, 0.5), 2),
    "lazy adam": lambda: wrapopt.keras.LazyAdam(0.125),
    "lookahead": lambda: wrapopt.keras.Lookahead(
        keras.optimizers.RMSprop(0.125), 2),
    "primal average": lambda: wrapopt.keras.PrimalAverage(
        keras.optimizers.AdamW(0.125)),
    "schedule-free": lambda: wrapopt.keras.ScheduleFree(
        keras.optimizers.Adam(0.125)),
    "swa": lambda: wrapopt.keras.SWA(keras.optimizers.SGD(0.125), 1, 1),
}


def _numbers(variables):
  """{name: [numbers]}: a float32 as its float64."""
  return {name: np.asarray(value, np.float64).ravel().tolist()
          for name, value in variables.items()}


class Session:
  """A v1 session, its Saver's files, and its graph with our ops."""

  def __init__(self, name):
    self._name = name

  def _build(self):
    for place in "resource", "ref":
      v1.get_variable(place, initializer=VALUE,
                      use_resource=place == "resource")
    step = v1.train.get_or_create_global_step()
    # Its gradients are constants.
    loss = tf.add_n([tf.reduce_sum(GRAD * var)
                     for var in v1.trainable_variables()])
    train = SESSIONS[self._name]().minimize(loss, step)
    v1.add_to_collection("train", train)
    return v1.train.Saver()

  def _values(self, session):
    return _numbers({var.op.name: session.run(var)
                     for var in v1.global_variables()})

  def write(self, folder):
    with tf.Graph().as_default(), v1.Session() as session:
      saver = self._build()
      session.run(v1.global_variables_initializer())
      (train,) = v1.get_collection("train")
      for _ in range(3):
        session.run(train)
      saver.save(session, str(folder / "model"))
      before = self._values(session)
      session.run(train)
      return [before, self._values(session)]

  def _go_on(self, make_saver, folder):
    with tf.Graph().as_default(), v1.Session() as session:
      saver = make_saver()
      session.run(v1.global_variables_initializer())
      saver.restore(session, str(folder / "model"))
      before = self._values(session)
      session.run(v1.get_collection("train"))
      return [before, self._values(session)]

  def read(self, folder):
    def make_saver():
      self._build()
      # Later versions have more variables, such as those of GPA.
      found = {name for name, _ in tf.train.list_variables(
          str(folder / "model"))}
      return v1.train.Saver([v for v in v1.global_variables()
                             if v.op.name in found])

    return self._go_on(make_saver, folder)

  def read_graph(self, folder):
    """The same in the graph of the file."""
    return self._go_on(
        lambda: v1.train.import_meta_graph(str(folder / "model.meta")), folder)


class Keras:
  """A model with an optimizer, in each kind of file."""

  def __init__(self, name):
    self._name = name

  def _model(self, **optimizer):
    model = keras.Sequential([
        keras.Input((3,), name="x"),
        keras.layers.Dense(2, use_bias=False, name="dense")], name="model")
    model.layers[0].kernel.assign(VALUE)
    if optimizer:
      model.compile(**optimizer, jit_compile=False)
      model.optimizer.build(model.trainable_variables)
    return model

  def _step(self, model):
    optimizer = model.optimizer
    if self._name == "gate":
      with optimizer.record_step():
        grad = tf.constant(GRAD)
    else:
      grad = tf.constant(GRAD)
    optimizer.apply([grad], model.trainable_variables)

  def _values(self, model):
    return _numbers({
        "weights": model.get_weights()[0],
        # Their names depend on what was made before.
        **{f"variable {i}": var
           for i, var in enumerate(model.optimizer.variables)}})

  def write(self, folder):
    model = self._model(optimizer=KERAS[self._name]())
    for _ in range(3):
      self._step(model)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    before = self._values(model)
    self._step(model)
    return [before, self._values(model)]

  def _go_on(self, model):
    before = self._values(model)
    self._step(model)
    return [before, self._values(model)]

  def read(self, folder):
    return self._go_on(keras.models.load_model(folder / "model.keras"))

  def read_weights(self, folder):
    model = self._model(optimizer=KERAS[self._name]())
    model.load_weights(folder / "model.weights.h5")
    return self._go_on(model)

  def read_checkpoint(self, folder):
    model = self._model(optimizer=KERAS[self._name]())
    tf.train.Checkpoint(model=model).read(
        str(folder / "checkpoint")).assert_existing_objects_matched()
    return self._go_on(model)


class SavedModel:
  """A function of raw ops that needs nothing of wrapopt but its library."""

  def write(self, folder):
    module = tf.Module()
    module.value, module.shadow = tf.Variable(VALUE), tf.Variable(0 * VALUE)
    module.momentum = tf.Variable(0 * VALUE)

    @tf.function(input_signature=[tf.TensorSpec(VALUE.shape)])
    def step(grad):
      wrapopt.ops.apply(
          "Momentum", {"var": [module.value], "accum": [module.momentum]},
          [grad], {"lr": 0.5, "momentum": 0.25}, shadows=[module.shadow],
          decay=0.75)
      return module.shadow.read_value()

    module.step = step
    module.step(GRAD)
    tf.saved_model.save(module, str(folder))
    return self._go_on(module)

  def _go_on(self, module):
    return [_numbers({"shadow": module.step(tf.constant(GRAD))})
            for _ in range(2)]

  def read(self, folder):
    return self._go_on(tf.saved_model.load(str(folder)))


class Snapshots:
  """Snapshots of two averages, and the average of a third width from them."""

  def write(self, folder):
    optimizer = wrapopt.keras.MovingAverage(
        keras.optimizers.SGD(0.125),
        [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)])
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    keras.utils.set_random_seed(1)
    model.fit(np.float32([[1], [2]] * 8), np.float32([[2], [3]] * 8),
              batch_size=2, verbose=0,
              callbacks=[wrapopt.keras.Snapshots(str(folder), 2)])
    return self.read(folder)

  def read(self, folder):
    out = folder.parent / f".{os.getpid()}.weights.h5"
    try:
      wrapopt.checkpoints.posthoc(str(folder), str(out), 0.07)
      model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
      model.load_weights(out)
    finally:
      out.unlink(missing_ok=True)
    return [_numbers(dict(enumerate(model.get_weights())))]


# {folder: how its files are written and read}
KINDS = {
    **{f"session {name}": Session(name) for name in SESSIONS},
    **{f"keras {name}": Keras(name) for name in KERAS},
    "saved model": SavedModel(),
    "snapshots": Snapshots(),
}


def main():
  folder = pathlib.Path(sys.argv[1])
  numbers = {}
  for name, kind in KINDS.items():
    own = folder / name.replace(" ", "_")
    own.mkdir(parents=True)
    numbers[name] = kind.write(own)
    (own / "checkpoint").unlink(missing_ok=True)  # Names the writer's folder.
  text = json.dumps(numbers, indent=1)
  (folder / "numbers.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
