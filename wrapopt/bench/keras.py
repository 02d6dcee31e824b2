"""A step of training in Keras, with and without an average of the weights.

Compares, in `tf.function`s with and without `jit_compile`,

  plain           Keras's optimizer
  use_ema         the same optimizer with Keras's own averages, `use_ema=True`
  wrapopt         `wrapopt.keras.MovingAverage` around the optimizer
  wrapopt, K = 0  the op of wrapopt's step, without an average

on the whole step of `model.fit`: forward, backward, update. Next to its time,
the table has the number of ops in the graph of the step, including those of
called functions, and the seconds until the first step has ended, including
tracing and compilation. All contenders get the same batch, and are checked to
train alike.

Then the time to put averages in place of the weights and back, with
`averaged_weights` and with Keras's `SwapEMAWeights`.

With --optimizers, only the step of some optimizers with given gradients, beside
each other: Schedule-Free learning, and what it replaces.
"""

import gc
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

from wrapopt.bench import harness
from wrapopt.bench import keras_optimizers

_DECAY = 0.99
_PLAIN, _USE_EMA, _WRAPOPT, _WITHOUT = CONTENDERS = (
    "plain", "use_ema", "wrapopt", "wrapopt, K = 0")
_MODES = {"function": False, "jit": True}


def _mlp(layers, width):
  return [keras.layers.Dense(width, activation="relu") for _ in range(layers)]


def _dense(batch, width):
  x = np.float32(np.random.default_rng(0).normal(size=(batch, width)))
  return x, x[:, ::-1].copy()


def _ids(batch, rows, width):
  rng = np.random.default_rng(0)
  return (rng.integers(rows, size=(batch,)),
          np.float32(rng.normal(size=(batch, width))))


# {name: (layers, inputs and targets, optimizer)}, each a function. The
# arguments of the optimizer's function enable Keras's averages.
MODELS = {
    "mlp 8x1024, Adam": (
        lambda: _mlp(8, 1024), lambda: _dense(64, 1024),
        lambda **kwargs: keras.optimizers.Adam(1e-3, **kwargs)),
    "100 layers of 32, Adam": (
        lambda: _mlp(100, 32), lambda: _dense(64, 32),
        lambda **kwargs: keras.optimizers.Adam(1e-3, **kwargs)),
    "embedding 200k x 64, SGD": (
        lambda: [keras.layers.Embedding(200_000, 64)],
        lambda: _ids(256, 200_000, 64),
        lambda **kwargs: keras.optimizers.SGD(1e-2, **kwargs)),
}
_SWAP = "swap"
_SWAP_LAYERS, _SWAP_WIDTH = 25, 1024  # 100 MB and the biases.


def add_arguments(parser):
  parser.add_argument(
      "--models", nargs="+", choices=[*MODELS, _SWAP], metavar="MODEL",
      default=[*MODELS, _SWAP],
      help="which, of " + ", ".join(f"'{name}'" for name in [*MODELS, _SWAP]) +
      "; default all")
  keras_optimizers.add_arguments(parser)
  parser.add_argument(
      "--quick", action="store_true",
      help="5 rounds instead of 15: for a look, not for figures")
  parser.add_argument("--json", metavar="FILE", help="where to write results")


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  if options.optimizers is not None:
    return keras_optimizers.run(options)
  n_rounds = harness.rounds(options)
  results = []
  for name in options.models:
    if name == _SWAP:
      results += measure_swap(_SWAP_LAYERS, _SWAP_WIDTH, n_rounds)
    else:
      results += measure(name, *MODELS[name], n_rounds)
    keras.utils.clear_session()  # Free the memory for the next model.
    gc.collect()
  return results


def measure(name, layers, data, optimizer, n_rounds):
  """Compares all contenders on one model and prints a table.

  Args:
    name: The name of the model in the table.
    layers: A function that makes the model's layers.
    data: A function that returns a batch: inputs and targets.
    optimizer: A function of Keras's `use_ema` arguments that makes the
      optimizer.
    n_rounds: The number of turns of each contender.

  Returns:
    A list of dicts, one for each row of the table.
  """
  batch = tuple(map(tf.constant, data()))
  steps, models, first_seconds = {}, {}, {}
  for mode, jit in _MODES.items():
    for contender in CONTENDERS:
      key = mode, contender
      models[key] = model = _compiled(contender, layers, batch, optimizer,
                                      jit)
      steps[key], first_seconds[key] = _first_step(model, batch)
  _check_same_training(models, steps)
  ops = {key: count_ops(model.train_function_of_bench, batch)
         for key, model in models.items()}
  seconds = harness.alternate(steps, n_rounds, name)
  results = []
  for (mode, contender), times in seconds.items():
    key = mode, contender
    results.append({
        "model": name,
        "mode": mode,
        "contender": contender,
        "milliseconds": 1e3 * statistics.median(times),
        "spread": harness.spread(times),
        "x_plain": 1 / harness.speedup(times, seconds[mode, _PLAIN]),
        "ops": ops[key],
        "first_step_seconds": first_seconds[key],
        "rounds": n_rounds,
    })
  count = sum(v.shape.num_elements()
              for v in models[key].trainable_variables)
  print(f"\n{name}: {len(models[key].trainable_variables)} variables, "
        f"{count:,} numbers")
  print(harness.table(
      ("", "ms", "+-", "x plain", "ops", "first step s"),
      [(f"{r['mode']}, {r['contender']}", f"{r['milliseconds']:.3f}",
        f"{r['spread']:.0%}", f"{r['x_plain']:.3f}", f"{r['ops']}",
        f"{r['first_step_seconds']:.2f}") for r in results]), flush=True)
  return results


def _compiled(contender, layers, batch, optimizer, jit):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras

  opt = optimizer(**({"use_ema": True, "ema_momentum": _DECAY}
                     if contender == _USE_EMA else {}))
  if contender == _WRAPOPT:
    opt = wrapopt.keras.MovingAverage(opt, _DECAY)
  elif contender == _WITHOUT:
    opt = _without_average(opt)
  keras.utils.set_random_seed(0)
  inputs = keras.Input(batch[0].shape[1:], dtype=batch[0].dtype.name)
  outputs = inputs
  for layer in layers():
    outputs = layer(outputs)
  model = keras.Model(inputs, outputs)
  model.compile(opt, "mse", jit_compile=jit)
  opt.build(model.trainable_variables)
  return model


def _without_average(opt):
  """The optimizer with wrapopt's op for its step, which nothing follows."""
  # pylint: disable=g-import-not-at-top
  from wrapopt.keras import _steps

  class Nothing(_steps.Follower):

    def _follow(self, step):
      del step

  return _steps.followed(opt, [Nothing()])


def _first_step(model, batch):
  """A function that takes a step of `fit`, and the seconds of the first."""
  start = time.perf_counter()
  # The function that `fit` calls, without an iterator.
  function = tf.function(model.train_step, jit_compile=model.jit_compile,
                         reduce_retracing=True)
  model.train_function_of_bench = function

  def step():
    function(batch)

  step()
  return step, time.perf_counter() - start


def count_ops(function, *arguments):
  """The number of ops in the graphs of a function and of called functions."""
  graph = function.get_concrete_function(*arguments).graph.as_graph_def()
  return len(graph.node) + sum(
      len(f.node_def) for f in graph.library.function)


def _check_same_training(models, steps):
  """Raises an error unless weights and averages of all contenders agree."""
  first = None
  for (mode, contender), model in models.items():
    steps[mode, contender]()
    opt, values = model.optimizer, model.trainable_variables
    weights = _numbers(values)
    first = weights if first is None else first
    if not np.allclose(weights, first, rtol=0, atol=2e-3):
      raise AssertionError(f"{mode}, {contender}: the weights are off by "
                           f"{np.abs(weights - first).max():.3g}.")
    if contender in (_USE_EMA, _WRAPOPT):
      averages = _numbers(opt._model_variables_moving_average
                         if contender == _USE_EMA else
                         [opt.average(v) for v in values])
      if np.array_equal(averages, weights):
        raise AssertionError(f"{mode}, {contender}: the averages are the "
                             "weights.")
      if not np.allclose(averages, weights, rtol=0, atol=1e-2):
        raise AssertionError(f"{mode}, {contender}: the averages are off by "
                             f"{np.abs(averages - weights).max():.3g}.")


def _numbers(values):
  return np.concatenate([v.numpy().reshape(-1) for v in values])


def measure_swap(layers, width, n_rounds):
  """Compares putting averages in place and back; as `measure`."""
  # pylint: disable=g-import-not-at-top
  batch = tuple(map(tf.constant, _dense(1, width)))
  make = lambda **kwargs: keras.optimizers.SGD(1e-2, **kwargs)
  models = {contender: _compiled(
      contender, lambda: _mlp(layers, width), batch, make, False)
            for contender in (_USE_EMA, _WRAPOPT)}
  for model in models.values():
    _first_step(model, batch)
  swap = keras.callbacks.SwapEMAWeights()
  swap.set_model(models[_USE_EMA])

  def by_callback():
    swap._swap_variables()
    swap._swap_variables()

  def by_exchange():
    with models[_WRAPOPT].optimizer.averaged_weights():
      pass

  contenders = {"SwapEMAWeights": by_callback,
                "averaged_weights": by_exchange}
  seconds = harness.alternate(contenders, n_rounds, _SWAP)
  megabytes = 4e-6 * sum(v.shape.num_elements()
                         for v in models[_WRAPOPT].trainable_variables)
  results = [{
      "model": _SWAP,
      "contender": contender,
      "megabytes": megabytes,
      "milliseconds": 1e3 * statistics.median(times),
      "spread": harness.spread(times),
      "x_keras": 1 / harness.speedup(times, seconds["SwapEMAWeights"]),
      "rounds": n_rounds,
  } for contender, times in seconds.items()]
  print(f"\naverages in place of {megabytes:.0f} MB of weights, and back")
  print(harness.table(
      ("", "ms", "+-", "x SwapEMAWeights"),
      [(r["contender"], f"{r['milliseconds']:.3f}", f"{r['spread']:.0%}",
        f"{r['x_keras']:.4f}") for r in results]), flush=True)
  return results
