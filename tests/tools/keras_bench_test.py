"""The benchmarks of Keras and of embeddings run, and train as they say."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import benches
import processes
from training import type_of
from wrapopt.bench import embedding
from wrapopt.bench import gate
from wrapopt.bench import harness
from wrapopt.bench import keras as bench


MLP = (functools.partial(bench._mlp, 2, 4),
       functools.partial(bench._dense, 4, 4), "mse",
       functools.partial(keras.optimizers.Adam, 1e-3))
# {file of results: (a command of them, how many results it has)}.
_COMMANDS = {
    # Four modes, two models, four contenders.
    "keras": ("keras", 4 * 2 * 4),
    # Two numbers of workers, two kinds, three contenders.
    "gate-workers": ("gate --workers 1 2", 2 * 2 * 3),
    # In Keras there is no optimizer that is wrapopt's op.
    "embedding": ("embedding --rows 60 --indices 5", 2 * (4 + 3 + 3)),
}


@pytest.fixture
def small(monkeypatch):
  benches.make_small(monkeypatch, [(4,), (), (2, 3)])
  monkeypatch.setattr(bench, "MODELS", {"first": MLP, "second": MLP})
  monkeypatch.setattr(gate, "KINDS", {
      "tiny": ([(3,), (2, 2), (5,)], 0.0), "waiting": ([(3,)], 0.001)})


@pytest.mark.parametrize("name", _COMMANDS)
def test_command(name, small, tmp_path, capfd):
  command, count = _COMMANDS[name]
  written = benches.run(f"{command} --rounds 1", tmp_path)
  benches.check_columns(name, written)
  assert len([r for r in written["results"]
              if not r["contender"].startswith("streaming limit")]) == count
  printed = capfd.readouterr().out
  if name == "keras":
    for mode, replicas in (("mirrored", 2), ("hlo", 1)):
      for model in ("first", "second"):
        assert (f"{mode}, {model}: 4 variables, 40 numbers, replicas: "
                f"{replicas}\n") in printed


PROCESS = """
import sys
import tensorflow as tf
from wrapopt.bench import keras as bench
import keras_bench_test
bench._set_up(sys.argv[1])
layers, data, loss, optimizer = keras_bench_test.MLP
model = bench._compiled(bench._ONE, layers, data(), loss, optimizer, True)
program = tf.function(
    model.train_step, jit_compile=True).experimental_get_compiler_ir(
        tuple(map(tf.constant, data())))(stage="hlo")
print("custom-call" in program)
"""


@pytest.mark.parametrize("mode, calls", [("jit", "True"), ("hlo", "False")])
def test_the_program_of_a_mode(mode, calls):
  assert processes.printed_by("-c", PROCESS, mode).split() == [calls]


@pytest.mark.parametrize("name", bench.MODELS)
def test_models(name):
  layers, data, _, optimizer = bench.MODELS[name]
  inputs, _ = data()
  x = keras.Input(inputs.shape[1:], dtype=inputs.dtype.name)
  count = len(keras.Model(x, layers(x)).trainable_variables)
  assert count == {"embedding of 200k x 64": 1, "100 layers of 32": 200,
                   "40 layers of 256": 80, "8 layers of 1024": 16,
                   "transformer, 6 blocks of 256": 77}[name.rpartition(", ")[0]]
  assert optimizer().__class__.__name__ == name.rpartition(", ")[2]


@pytest.mark.parametrize("devices, strategy, jit", [
    (["CPU"], False, False), (["CPU"], True, False),
    (["CPU", "GPU"], True, False), (["CPU", "GPU"], False, True)])
def test_the_default_of_each_kind_of_machine(devices, strategy, jit,
                                             monkeypatch):
  """As the documents say of Keras."""
  scope = (tf.distribute.OneDeviceStrategy("CPU:0").scope() if strategy else
           contextlib.nullcontext())
  with scope, monkeypatch.context() as patch:
    patch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [
            tf.config.PhysicalDevice(f"/physical_device:{d}:0", d)
            for d in devices if kind in (None, d)])
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
  assert model.jit_compile == jit


def models_of():
  layers, data, loss, optimizer = MLP
  models = {c: bench._compiled(c, layers, data(), loss, optimizer, False)
            for c in bench.CONTENDERS}
  return models, {c: bench._first_step(model, data())[0]
                  for c, model in models.items()}


@pytest.mark.parametrize("contender", bench.CONTENDERS[1:])
def test_other_training_is_an_error(contender):
  models, steps = models_of()
  models[contender].optimizer.learning_rate = 0.1
  with pytest.raises(AssertionError,
                     match=f"{contender}: the weights must be off by"):
    bench._check_same_training(models, steps)


@pytest.mark.parametrize("contender", bench.CONTENDERS[1:])
def test_averages_that_stand_still_are_an_error(contender, monkeypatch):
  monkeypatch.setitem(bench._DECAYS, contender, [0.0])
  models, steps = models_of()
  with pytest.raises(AssertionError,
                     match=f"{contender}: the averages are the weights"):
    bench._check_same_training(models, steps)


def problem_of(optimizer="SGD"):
  return embedding.make_problem(60, 5, "uniform", optimizer)


@pytest.mark.parametrize("mode", ["session", "keras"])
@pytest.mark.parametrize("optimizer", ["SGD", "LazyAdam"])
def test_steps_of_embeddings_are_what_their_names_say(mode, optimizer):
  problem = problem_of(optimizer)
  training = embedding.MODES[mode](problem)
  embedding.check(problem, training)
  for name, step in training.steps.items() if mode != "session" else ():
    ops = list(map(type_of, step.__defaults__[0].get_concrete_function(
        training.batches[0]).graph.get_operations()))
    ours = name in ("wrapopt", "wrapopt, K = 0") or optimizer == "LazyAdam"
    assert sum(op.startswith("Wrapopt>SparseApply") for op in ops) == ours


def test_each_step_has_other_indices(monkeypatch):
  seen = []

  def spy(problem):
    step = lambda batch: seen.append(id(batch))
    return embedding.Training({"plain": step, "wrapopt": step},
                              problem.batches, {}, {}, None, None)

  monkeypatch.setattr(embedding, "MODES", {"spy": spy})
  monkeypatch.setattr(embedding, "check", lambda *_: None)
  harness.run([embedding._contest("SGD", "uniform", 60, 5, "spy")], 2)
  assert len(set(seen[:8])) == 8


@pytest.mark.parametrize("ids", embedding.IDS)
def test_indices(ids):
  rng = np.random.default_rng(0)
  indices = embedding.IDS[ids](rng, 1000, 20_000)
  assert indices.dtype == np.int32
  assert 0 <= indices.min() and indices.max() < 1000
  counts = np.sort(np.bincount(indices, minlength=1000))[::-1] / 20_000
  if ids == "uniform":
    assert counts[0] < 3e-3
  else:
    # 1 / (r log(rows)), to within what a draw differs by.
    np.testing.assert_allclose(counts[:4], [0.1, 0.059, 0.042, 0.032],
                               atol=0.012)


def training_of(step, is_lazy=True):
  """A Training of one contender, whose average decays by 0.99."""
  table, average = (tf.Variable(tf.zeros([60, 64])) for _ in range(2))

  def take(batch):
    numbers = [v.numpy().astype(np.float64) for v in (table, average)]
    step(*numbers, batch)
    for v, x in zip((table, average), numbers):
      v.assign(x)

  return embedding.Training(
      {"wrapopt": take}, problem_of().batches, {"wrapopt": table},
      {"wrapopt": lambda: average}, embedding._eagerly, lambda: is_lazy)


def right(table, average, batch, rate=4.0, decay=0.99, rows=slice(None)):
  problem = problem_of()
  gradient = np.zeros_like(table)
  np.add.at(gradient, batch, 2 / 5 * (table[batch] - problem.target))
  table -= rate * gradient
  average[rows] += (1 - decay) * (table[rows] - average[rows])


def test_a_step_of_embeddings_that_does_other_work_is_refused():
  embedding.check(problem_of(), training_of(right))
  for step, what in (
      (lambda *args: right(*args, rate=3.9), "the table"),
      (lambda *args: right(*args, decay=0.98), "the average"),
      (lambda *args: right(*args, rows=args[2]), "the average")):
    with pytest.raises(AssertionError, match=f"wrapopt: {what} must be off"):
      embedding.check(problem_of(), training_of(step))
  with pytest.raises(AssertionError, match="moves in all rows"):
    embedding.check(problem_of(), training_of(right, is_lazy=False))
  with pytest.raises(AssertionError, match="other rows move"):
    embedding.check(problem_of("LazyAdam"), training_of(
        lambda table, *_: np.add(table, 1, out=table)))
