"""The Keras benchmark runs, and its contenders train alike."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from wrapopt.bench import __main__ as command
from wrapopt.bench import harness
from wrapopt.bench import keras as bench
from wrapopt.bench import keras_optimizers
import wrapopt.keras


def adam(**kwargs):
  return keras.optimizers.Adam(1e-3, **kwargs)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
  alternate = harness.alternate
  monkeypatch.setattr(
      harness, "alternate",
      lambda *args, **kwargs: alternate(*args, turn_seconds=1e-4, **kwargs))


def test_command(monkeypatch, tmp_path):
  monkeypatch.setattr(bench, "MODELS", {
      "mlp": (lambda: bench._mlp(2, 4), lambda: bench._dense(3, 4), adam),
      "embedding": (lambda: [keras.layers.Embedding(50, 2)],
                    lambda: bench._ids(3, 50, 2),
                    lambda **kwargs: keras.optimizers.SGD(0.01, **kwargs))})
  monkeypatch.setattr(bench, "_SWAP_LAYERS", 2)
  monkeypatch.setattr(bench, "_SWAP_WIDTH", 4)
  path = tmp_path / "results.json"
  command.main(["keras", "--quick", "--models", "mlp", "embedding", "swap",
                "--json", str(path)])
  results = json.loads(path.read_text())["results"]
  names = [(r["model"], r.get("mode"), r["contender"]) for r in results]
  assert names == [
      *((model, mode, contender) for model in ("mlp", "embedding")
        for mode in ("function", "jit")
        for contender in ("plain", "use_ema", "wrapopt", "wrapopt, K = 0")),
      ("swap", None, "SwapEMAWeights"), ("swap", None, "averaged_weights")]
  ops = {name: r["ops"] for name, r in zip(names, results) if "ops" in r}
  # One op takes the place of those of four variables.
  assert ops["mlp", "jit", "wrapopt"] < ops["mlp", "jit", "plain"] < (
      ops["mlp", "jit", "use_ema"])
  assert (ops["mlp", "jit", "wrapopt, K = 0"] <
          ops["mlp", "jit", "wrapopt"])
  for r in results:
    assert r["milliseconds"] > 0 and r["rounds"] == 5
    if r["contender"] == "plain":
      assert r["x_plain"] == 1


def test_steps_of_optimizers(monkeypatch, tmp_path):
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


def models_of(optimizer):
  batch = tuple(map(tf.constant, bench._dense(3, 4)))
  models = {("function", c): bench._compiled(
      c, lambda: bench._mlp(1, 4), batch, optimizer, False)
            for c in bench.CONTENDERS}
  steps = {key: bench._first_step(model, batch)[0]
           for key, model in models.items()}
  return models, steps


def test_other_training_is_an_error():
  models, steps = models_of(adam)
  models["function", "wrapopt"].optimizer.learning_rate = 0.1
  with pytest.raises(AssertionError, match="wrapopt: the weights are off by"):
    bench._check_same_training(models, steps)


def test_averages_that_stand_still_are_an_error(monkeypatch):
  monkeypatch.setattr(bench, "_DECAY", 0.0)
  models, steps = models_of(adam)
  with pytest.raises(AssertionError, match="the averages are the weights"):
    bench._check_same_training(models, steps)


def test_ops_of_called_functions_count():
  inner = tf.function(lambda x: x + 1)
  outer = tf.function(lambda x: inner(x) * 2)
  x = tf.constant(np.float32(1))
  assert bench.count_ops(outer, x) >= (
      bench.count_ops(tf.function(lambda x: (x + 1) * 2), x) + 2)


def test_the_gate_in_a_cluster(monkeypatch, tmp_path, capsys):
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
