"""Steps of `fit` in Keras, with and without averages of the weights.

Compares

  plain           Keras's optimizer
  use_ema         the same optimizer with Keras's own averages, `use_ema=True`
  wrapopt, K = 1  `wrapopt.keras.MovingAverage` around the optimizer
  wrapopt, K = 3  the same with three decays

in these modes, each in a process of its own:

  cpu       what Keras does by default on a machine that has only CPUs: no
            `jit_compile`
  mirrored  what it does by default under a strategy: the same, in a
            `MirroredStrategy` of two devices, both the CPU
  jit       `jit_compile=True` on a CPU
  hlo       the same in plain HLO: the program that wrapopt gives to a GPU or
            TPU, where `jit_compile` is Keras's default, but run on a CPU
  gpu       what Keras does by default on a machine with a GPU: `jit_compile`
            on the GPU
  gpu_call  the same with `WRAPOPT_XLA_ON_GPU=call`: XLA's program calls
            wrapopt's kernels
  gpu_ops   on the GPU without `jit_compile`

The last three need a GPU; by default they run only if TensorFlow finds one.

A step is a call of the function that `fit` calls for each batch, with an
iterator like `fit`'s: it takes a batch from the dataset, and does the forward
pass, the backward pass, the update and the metrics. Calls of `fit` itself would
add its start and end, which are no part of a step. All contenders get the same
batch, and are checked to train alike. "First step" is the seconds until it has
ended, including tracing and compilation.
"""

from concurrent import futures
import functools
import gc
import multiprocessing
import os
import time

import keras
import numpy as np
import tensorflow as tf

from wrapopt.bench import harness

_PLAIN, _USE_EMA, _ONE, _THREE = CONTENDERS = (
    "plain", "use_ema", "wrapopt, K = 1", "wrapopt, K = 3")
_DECAYS = {_USE_EMA: [0.99], _ONE: [0.99], _THREE: [0.99, 0.999, 0.9999]}
_MIRRORED, _JIT, _HLO, _GPU = "mirrored", "jit", "hlo", "gpu"
_GPU_CALL = "gpu_call"
_ON_GPU = (_GPU, _GPU_CALL, "gpu_ops")
_JITS = (_JIT, _HLO, _GPU, _GPU_CALL)
MODES = ("cpu", _MIRRORED, _JIT, _HLO, *_ON_GPU)


def _mlp(layers, width, x):
  for _ in range(layers):
    x = keras.layers.Dense(width, activation="relu")(x)
  return x


def _embedding(rows, width, x):
  return keras.layers.Embedding(rows, width)(x)


def _transformer(blocks, width, words, x):
  layers = keras.layers
  x = layers.Embedding(words, width)(x)
  for _ in range(blocks):
    y = layers.LayerNormalization()(x)
    x += layers.MultiHeadAttention(width // 64, 64, use_bias=False)(
        y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="gelu")(y)
    x += layers.Dense(width)(y)
  return layers.Dense(words, "softmax")(layers.LayerNormalization()(x))


def _dense(batch, width):
  x = np.float32(np.random.default_rng(0).normal(size=(batch, width)))
  return x, x[:, ::-1].copy()


def _ids(batch, rows, width):
  rng = np.random.default_rng(0)
  return (rng.integers(rows, size=(batch,)),
          np.float32(rng.normal(size=(batch, width))))


def _text(batch, length, words):
  ids = np.random.default_rng(0).integers(words, size=(batch, length + 1))
  return ids[:, :-1], ids[:, 1:]  # The next word.


_call = functools.partial
_OPTIMIZERS = {
    name: _call(getattr(keras.optimizers, name), rate) for name, rate in (
        ("Adam", 1e-3), ("SGD", 1e-2), ("AdamW", 1e-3), ("Lion", 1e-4))}
# {name: (function of the inputs, which returns the outputs; function that
# returns inputs and targets; loss; function of Keras's `use_ema` arguments,
# which makes the optimizer)}. Another process gets them, so none is a lambda.
MODELS = {
    f"{name}, {optimizer}": (*model, _OPTIMIZERS[optimizer])
    for name, optimizers, *model in (
        *((f"{layers} layers of {width}", ("Adam", "SGD"),
           _call(_mlp, layers, width), _call(_dense, 64, width), "mse")
          for layers, width in ((100, 32), (40, 256), (8, 1024))),
        ("embedding of 200k x 64", ("SGD",), _call(_embedding, 200_000, 64),
         _call(_ids, 256, 200_000, 64), "mse"),
        ("transformer, 6 blocks of 256", ("AdamW", "Lion"),
         _call(_transformer, 6, 256, 1000), _call(_text, 2, 64, 1000),
         "sparse_categorical_crossentropy"))
    for optimizer in optimizers}


def add_arguments(parser):
  harness.add_choice(parser, "models", MODELS)
  harness.add_choice(parser, "modes", MODES, MODES if _gpus() else [
      mode for mode in MODES if mode not in _ON_GPU])


def _gpus():
  return tf.config.list_physical_devices("GPU")


def contests(options):
  for mode in options.modes:
    if mode in _ON_GPU and not _gpus():
      raise SystemExit(f"--modes {mode} needs a GPU; TensorFlow finds none.")
    with futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), _set_up, (mode,)) as process:
      for name in options.models:
        yield from _contest(process, mode, name)


def _contest(process, mode, name):
  """Yields a contest of steps of a model, which `process` takes."""
  ask = lambda *call: process.submit(*call).result()
  of_model, first_steps = ask(_prepare, mode, *MODELS[name])
  contest = harness.Contest(
      f"{mode}, {name}: {of_model}", {"model": name, "mode": mode},
      peers={"x_plain": _PLAIN})
  contest.add({contender: harness.RemoteContender(
      functools.partial(ask, _seconds, contender)) for contender in CONTENDERS})
  yield contest
  for result in contest.results:
    result["first_step_seconds"] = first_steps[result["contender"]]


# These run in a process of a mode.

_steps: dict = {}  # {contender: function that takes a step}, of the model now.


def _set_up(mode):
  """Prepares a process for a mode, before TensorFlow starts."""
  os.environ["WRAPOPT_XLA_ON_CPU"] = "hlo" if mode == _HLO else "call"
  os.environ["WRAPOPT_XLA_ON_GPU"] = "call" if mode == _GPU_CALL else "hlo"
  if mode not in _ON_GPU:
    tf.config.set_visible_devices([], "GPU")
  tf.get_logger().setLevel("ERROR")  # A train function a model is no retracing.
  if mode == _MIRRORED:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2)


@functools.cache  # The collectives of two strategies in a process would mix.
def _strategy(mode):
  return (tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
          if mode == _MIRRORED else tf.distribute.get_strategy())


def _prepare(mode, layers, data, loss, optimizer):
  """Makes and checks the steps of all contenders.

  Args:
    mode: One of MODES, for which `_set_up` has prepared this process.
    layers: A function of the inputs that returns the outputs.
    data: A function that returns a batch: inputs and targets.
    loss: The name of the loss.
    optimizer: A function of Keras's `use_ema` arguments that makes the
      optimizer.

  Returns:
    A description of the model, and {contender: seconds of its first step}.
  """
  _steps.clear()
  keras.utils.clear_session()  # Free the memory of the last model.
  gc.collect()
  batch, models, first_steps = data(), {}, {}
  for contender in CONTENDERS:
    with _strategy(mode).scope():
      models[contender] = model = _compiled(
          contender, layers, batch, loss, optimizer, mode in _JITS)
    _steps[contender], first_steps[contender] = _first_step(model, batch)
  _check_same_training(models, _steps)
  return (f"{len(model.trainable_variables)} variables, "
          f"{model.count_params():,} numbers, replicas: "
          f"{model.distribute_strategy.num_replicas_in_sync}"), first_steps


def _seconds(contender, calls):
  def steps():
    for _ in range(calls):
      _steps[contender]()
    tf.test.experimental.sync_devices()  # A GPU runs behind.

  return harness.elapsed(steps, 1) / calls


def _compiled(contender, layers, batch, loss, optimizer, jit):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras

  decays = _DECAYS.get(contender)
  if contender == _USE_EMA:
    opt = optimizer(use_ema=True, ema_momentum=decays[0])
  else:
    opt = optimizer()
    if decays:
      opt = wrapopt.keras.MovingAverage(opt, decays)
  keras.utils.set_random_seed(0)
  inputs = keras.Input(batch[0].shape[1:], dtype=batch[0].dtype.name)
  model = keras.Model(inputs, layers(inputs))
  model.compile(opt, loss, jit_compile=jit)
  opt.build(model.trainable_variables)
  return model


def _first_step(model, batch):
  """A function that takes a step of `fit`, and the seconds of the first."""
  data = tf.data.Dataset.from_tensors(batch).repeat()
  # As `fit` does; without a strategy it is the dataset itself.
  iterator = iter(
      model.distribute_strategy.experimental_distribute_dataset(data))
  model.make_train_function()

  def step():
    model.train_function(iterator)

  start = time.perf_counter()
  step()
  return step, time.perf_counter() - start


def _check_same_training(models, steps):
  """Raises an error unless weights and averages of all contenders agree."""
  first = None
  for contender, model in models.items():
    steps[contender]()
    opt, values = model.optimizer, model.trainable_variables
    weights = _numbers(values)
    first = weights if first is None else first
    harness.check_close(contender, {"the weights": (weights, first, 2e-3)})
    for decay in _DECAYS.get(contender, ()):
      averages = _numbers(opt._model_variables_moving_average
                          if contender == _USE_EMA else
                          [opt.average(v, decay) for v in values])
      if np.array_equal(averages, weights):
        raise AssertionError(f"{contender}: the averages are the weights.")
      harness.check_close(contender, {
          "the averages": (averages, weights, 1e-2)})


def _numbers(values):
  return np.concatenate([v.numpy().reshape(-1) for v in values])
