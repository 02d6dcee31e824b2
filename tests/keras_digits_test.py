"""The Keras example trains, and a plain model loads the averages it writes."""

import json
import os

import keras
from matplotlib import image
import numpy as np
import pytest

import processes
import wrapopt
from wrapopt.examples import digits
from wrapopt.examples import keras_digits

_EPOCHS = 3


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  """What the command, run as a user runs it, has written."""
  out = tmp_path_factory.mktemp("keras_digits") / "a" / "b"
  done = processes.run_python(
      "-m", "wrapopt.examples.keras_digits", "--epochs", str(_EPOCHS), "--seed",
      "3", "--out", str(out))
  assert done.returncode == 0, done.stderr
  assert "100%" in done.stderr  # The progress bar is not in the output.
  assert "step/s" not in done.stdout
  assert "UserWarning" not in done.stderr
  out.joinpath("stdout").write_text(done.stdout)
  return out


@pytest.fixture(scope="module", name="results")
def _results(out):
  return json.loads((out / "results.json").read_text())


def test_results(results):
  assert results["epochs"] == _EPOCHS
  assert results["steps"] == 50 * _EPOCHS
  assert results["seed"] == 3
  assert results["fused"] is True
  assert results["seconds"] > 0
  assert results["images"] == {"trained_on": 1198, "held_out": 599}
  assert results["versions"]["keras"] == keras.__version__
  assert results["wrapopt_path"] == os.path.dirname(
      os.path.abspath(wrapopt.__file__))


def test_it_learns(results):
  """Far better than the 10 % of a guess, and averages are not the weights."""
  curve = results["curve"]
  assert [row["step"] for row in curve] == [50, 100, 150]
  assert curve[-1]["raw"] == results["raw_accuracy"]
  assert curve[-1]["averaged"] == results["averaged_accuracy"] > 0.75
  assert any(row["raw"] != row["averaged"] for row in curve)


def test_plain_keras_loads_the_averages(out, results):
  _, (images, labels) = digits.load_digits(seed=3)
  model = keras_digits.make_model()
  model.load_weights(str(out / "averaged.weights.h5"))
  accuracy = digits.accuracy_of(model.predict(images, verbose=0), labels)
  # Keras takes the mean in float32.
  assert accuracy == results["restored_accuracy"] == pytest.approx(
      results["averaged_accuracy"], abs=1e-6)


def test_curves_and_table(out, results):
  assert image.imread(out / "curves.png").shape == (600, 960, 4)
  lines = (out / "stdout").read_text().splitlines()
  assert ["150", f"{results['raw_accuracy']:.2%}",
          f"{results['averaged_accuracy']:.2%}"] in map(str.split, lines)
  assert str(out / "averaged.weights.h5") in lines


def test_a_loaded_model_that_differs_is_an_error(monkeypatch, tmp_path):
  """As it does where the raw weights are saved."""
  save = keras.Model.save_weights

  def save_others(model, path):
    model.set_weights([w + 0.01 for w in model.get_weights()])
    save(model, path)
    model.set_weights([w - 0.02 for w in model.get_weights()])

  monkeypatch.setattr(keras.Model, "save_weights", save_others)
  with pytest.raises(SystemExit, match="is not the averaged one: logits"):
    keras_digits.main(["--epochs", "1", "--out", str(tmp_path)])
  assert not (tmp_path / "results.json").exists()


def test_epochs_are_checked(capsys):
  with pytest.raises(SystemExit) as e:
    keras_digits.main(["--epochs", "0"])
  assert e.value.code == 2
  assert "argument --epochs: must be at least 1" in capsys.readouterr().err
