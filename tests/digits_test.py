"""The example trains, and its file holds the averaged model."""

import importlib
import json
import os
import sys

from matplotlib import image
import numpy as np
import pytest
import tensorflow as tf

import processes
import wrapopt
from training import type_of
from wrapopt.examples import digits

tf1 = tf.compat.v1

_STEPS = 120


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  """What the command, run as a user runs it, has written."""
  out = tmp_path_factory.mktemp("digits") / "a" / "b"
  done = processes.run_python("-m", "wrapopt.examples.digits", "--steps",
                              str(_STEPS), "--seed", "3", "--out", str(out))
  assert done.returncode == 0, done.stderr
  assert "100%" in done.stderr  # The progress bar is not in the output.
  assert "it/s" not in done.stdout and "step/s" not in done.stdout
  out.joinpath("stdout").write_text(done.stdout)
  return out


@pytest.fixture(scope="module", name="results")
def _results(out):
  return json.loads((out / "results.json").read_text())


def test_results(results):
  assert results["steps"] == _STEPS
  assert results["seed"] == 3
  assert results["fused"] is True
  assert results["seconds"] > 0
  assert results["images"] == {"trained_on": 1198, "held_out": 599}
  assert results["versions"] == {
      "wrapopt": wrapopt.__version__,
      "tensorflow": tf.__version__,
      "numpy": np.__version__,
      "python": ".".join(map(str, sys.version_info[:3])),
  }
  assert results["wrapopt_path"] == os.path.dirname(
      os.path.abspath(wrapopt.__file__))


def test_restored_is_exactly_averaged(results):
  assert results["restored_accuracy"] == results["averaged_accuracy"]


def test_it_learns(results):
  """Far better than the 10 % of a guess, and averages are not the weights."""
  curve = results["curve"]
  assert [row["step"] for row in curve] == list(range(3, _STEPS + 1, 3))
  assert curve[-1]["raw"] == results["raw_accuracy"]
  assert curve[-1]["averaged"] == results["averaged_accuracy"] > 0.75
  assert any(row["raw"] != row["averaged"] for row in curve)


def test_checkpoint_holds_averages_under_the_names_of_weights(out, results):
  """Evaluated here with NumPy's own numbers from the file."""
  reader = tf.train.load_checkpoint(str(out / "model.ckpt"))
  names = reader.get_variable_to_shape_map()
  weights = {"conv1/kernel", "conv1/bias", "conv2/kernel", "conv2/bias",
             "dense1/kernel", "dense1/bias", "dense2/kernel", "dense2/bias"}
  assert set(names) == weights | {"global_step"} | {
      f"{w}/{slot}" for w in weights
      for slot in ("Momentum", "ExponentialMovingAverage")}
  _, (images, labels) = digits.load_digits(seed=3)

  def accuracy(suffix):
    with tf.Graph().as_default(), tf1.Session() as session:
      logits = digits.logits_of(tf.constant(images))
      tf1.train.Saver({v.op.name + suffix: v for v in tf1.global_variables()}
                     ).restore(session, str(out / "model.ckpt"))
      return digits.accuracy_of(session.run(logits), labels)

  assert accuracy("") == results["averaged_accuracy"]
  assert accuracy("/ExponentialMovingAverage") == results["raw_accuracy"]


def test_curves_are_an_image(out):
  pixels = image.imread(out / "curves.png")  # Decodes all of it.
  assert pixels.shape == (600, 960, 4)
  # Both lines are there, in Matplotlib's orange and blue.
  for color in ((255, 127, 14), (31, 119, 180)):
    same = np.abs(pixels[..., :3] * 255 - color).max(axis=-1) < 1
    assert same.sum() > 500, color


def test_table(out, results):
  lines = (out / "stdout").read_text().splitlines()
  assert lines[1] == "accuracy on 599 held-out scans"
  assert lines[2].split() == ["step", "raw", "averaged"]
  last = [line for line in lines if line.split()[:1] == [str(_STEPS)]]
  assert [line.split() for line in last] == [
      [str(_STEPS), f"{results['raw_accuracy']:.2%}",
       f"{results['averaged_accuracy']:.2%}"]]
  assert (f"restored by a plain Saver: {results['restored_accuracy']:.2%}"
          in "\n".join(lines))
  assert str(out / "curves.png") in lines


def test_held_out_is_held_out():
  """No scan is in both halves, and a seed gives the same halves."""
  (train_x, train_y), (test_x, test_y) = digits.load_digits(seed=5)
  train = {x.tobytes() for x in train_x}
  assert not train & {x.tobytes() for x in test_x}
  assert sorted(np.unique(test_y)) == sorted(np.unique(train_y)) == list(
      range(10))
  (again, _), _ = digits.load_digits(seed=5)
  (other, _), _ = digits.load_digits(seed=6)
  np.testing.assert_array_equal(train_x, again)
  assert not np.array_equal(train_x, other)
  assert train_x.min() == 0 and train_x.max() == 1


def test_fused_is_what_the_optimizer_says(monkeypatch, tmp_path):
  """And the op of one pass is in the graph, or is not."""
  graphs = []

  class Two(wrapopt.MovingAverageOptimizer):

    def __init__(self, *args, **kwargs):
      graphs.append(tf1.get_default_graph())
      super().__init__(*args, **kwargs, fused=fused)

  monkeypatch.setattr(wrapopt, "MovingAverageOptimizer", Two)
  for fused in (None, False):
    digits.main(["--steps", "2", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    types = {type_of(op) for op in graphs[-1].get_operations()}
    assert results["fused"] == ("Wrapopt>ApplyMomentum" in types) == (
        fused is None)


def test_a_restored_model_that_differs_is_an_error(monkeypatch, tmp_path):
  restore = digits.restore
  monkeypatch.setattr(
      digits, "restore", lambda *args: np.nextafter(restore(*args), np.inf))
  with pytest.raises(SystemExit,
                     match="is not the averaged one: logits differ"):
    digits.main(["--steps", "2", "--out", str(tmp_path)])
  assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_steps_are_checked(steps, capsys):
  with pytest.raises(SystemExit) as e:
    digits.main(["--steps", steps])
  assert e.value.code == 2
  assert "argument --steps: " in capsys.readouterr().err


@pytest.mark.parametrize("package", ["sklearn", "matplotlib", "tqdm"])
def test_a_missing_package_is_said_before_any_work(
    package, monkeypatch, tmp_path):
  load = importlib.import_module

  def import_module(name):
    if name.split(".")[0] == package:
      raise ModuleNotFoundError(f"No module named '{package}'", name=package)
    return load(name)

  monkeypatch.setattr(importlib, "import_module", import_module)
  out = tmp_path / "out"
  with pytest.raises(SystemExit) as e:
    digits.main(["--out", str(out)])
  assert str(e.value) == (
      "The examples, benchmarks and commands need the Python module "
      f"'{package}', which is not installed. Install it and what else they "
      "need with: pip install matplotlib scikit-learn tqdm")
  assert not out.exists()


def test_a_package_that_is_broken_is_not_called_missing(monkeypatch):
  def import_module(name):
    raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

  monkeypatch.setattr(importlib, "import_module", import_module)
  with pytest.raises(ModuleNotFoundError, match="scipy"):
    digits.main([])
