"""The Keras benchmark runs, and its contenders train alike."""

import contextlib
import functools
import json

import keras
import pytest
import tensorflow as tf

import processes
from wrapopt.bench import __main__ as command
from wrapopt.bench import gate_cluster
from wrapopt.bench import harness
from wrapopt.bench import keras as bench
from wrapopt.bench import keras_optimizers


MLP = (functools.partial(bench._mlp, 2, 4),
       functools.partial(bench._dense, 4, 4), "mse",
       functools.partial(keras.optimizers.Adam, 1e-3))


@pytest.fixture
def short_turns(monkeypatch):
  alternate = harness.alternate
  monkeypatch.setattr(
      harness, "alternate",
      lambda *args, **kwargs: alternate(
          *args, **{**kwargs, "turn_seconds": 1e-4}))


def test_command(monkeypatch, tmp_path, capfd):
  monkeypatch.setattr(bench, "MODELS", {"first": MLP, "second": MLP})
  monkeypatch.setattr(bench, "_SWAP_LAYERS", 2)
  monkeypatch.setattr(bench, "_SWAP_WIDTH", 4)
  monkeypatch.setattr(harness, "rounds", lambda options: 1)
  path = tmp_path / "results.json"
  command.main(["keras", "--models", "first", "second", "swap", "--modes",
                "mirrored", "hlo", "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  assert [(r["model"], r.get("mode"), r["contender"]) for r in results] == [
      *((model, mode, contender) for mode in ("mirrored", "hlo")
        for model in ("first", "second") for contender in bench.CONTENDERS),
      ("swap", None, "SwapEMAWeights"), ("swap", None, "averaged_weights")]
  for r in results:
    assert r["milliseconds"] > 0 and r["rounds"] == 1
    if r["contender"] == "plain":
      assert r["x_plain"] == 1
  printed = capfd.readouterr().out
  for mode, replicas in (("mirrored", 2), ("hlo", 1)):
    for model in ("first", "second"):
      assert (f"{mode}, {model}: 4 variables, 40 numbers, replicas: {replicas}"
              "\n") in printed
  header, _, *rows = [line for line in printed.splitlines()
                      if line.startswith("|")]
  assert header == ("| model | `MirroredStrategy`: plain, ms | "
                    "`MirroredStrategy`: x plain | plain HLO: plain, ms | "
                    "plain HLO: x plain |")
  assert [row.split(" | ")[0] for row in rows] == ["| first", "| second"]


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
  done = processes.run_python("-c", PROCESS, mode)
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == [calls]


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


def test_steps_of_optimizers(short_turns, monkeypatch, tmp_path):
  monkeypatch.setitem(harness.VARIABLE_SETS, "400x256", [(4,), (), (2, 3)])
  path = tmp_path / "results.json"
  command.main(["keras", "--quick", "--optimizers", "--sets", "400x256",
                "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  names = [(r["mode"], r["contender"]) for r in results]
  assert names[:15] == [
      (mode, contender) for mode in ("tf.function", "jit", "eager")
      for contender in keras_optimizers.OPTIMIZERS]
  assert names[15:17] == [("v1 session", "Adam"),
                          ("v1 session", "ScheduleFree(Adam)")]
  for r in results:
    assert r["milliseconds"] > 0 and r["gigabytes_per_second"] > 0
    assert ("x_adam" in r) == (r["mode"] != "PyTorch, schedulefree")
    if r["contender"] == "Adam":
      assert r["x_adam"] == 1


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
                     match=f"{contender}: the weights are off by"):
    bench._check_same_training(models, steps)


@pytest.mark.parametrize("contender", bench.CONTENDERS[1:])
def test_averages_that_stand_still_are_an_error(contender, monkeypatch):
  monkeypatch.setitem(bench._DECAYS, contender, [0.0])
  models, steps = models_of()
  with pytest.raises(AssertionError,
                     match=f"{contender}: the averages are the weights"):
    bench._check_same_training(models, steps)


def test_the_gate_in_a_cluster(short_turns, monkeypatch, tmp_path, capsys):
  # Each contender's step is checked before it is measured.
  monkeypatch.setitem(harness.VARIABLE_SETS, "400x256", [(3,), (2, 2), (5,)])
  path = tmp_path / "gate.json"
  command.main(["gate", "--cluster", "--quick", "--sets", "400x256", "--json",
                str(path)])
  results = json.loads(path.read_text())["results"]
  assert [r["contender"] for r in results] == [
      "Keras", "ungated", "gated, admitted", "gated, dropped"]
  assert all(r["milliseconds"] > 0 and r["rounds"] == 5 for r in results)
  assert results[0]["of_keras"] == 1
  assert "3 variables on two parameter servers" in capsys.readouterr().out


def test_workers_that_race(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(gate_cluster, "KINDS", {
      "tiny": ([(3,), (2, 2), (5,)], 0.0), "waiting": ([(3,)], 0.001)})
  path = tmp_path / "gate.json"
  command.main(["gate", "--cluster", "--quick", "--workers", "1", "2", "--json",
                str(path)])
  results = json.loads(path.read_text())["results"]
  assert [(r["workers"], r["kind"], r["contender"]) for r in results] == [
      (workers, kind, contender) for workers in (1, 2)
      for kind in ("tiny", "waiting")
      for contender in ("Keras's Adam", "MovingAverage", "DropStaleGradient")]
  assert all(r["steps_per_second"] > 0 and r["rounds"] == 5 for r in results)
  assert all(r["of_keras"] == 1 for r in results[::3])
  assert "waiting, 2 workers" in capsys.readouterr().out
