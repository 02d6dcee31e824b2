"""The example of embeddings trains, and a plain model loads its averages."""

import json
import os

from matplotlib import image
import numpy as np
import pytest

import processes
import wrapopt
from wrapopt.examples import embeddings

_STEPS = 60


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  """What the command, run as a user runs it, has written."""
  out = tmp_path_factory.mktemp("embeddings") / "a" / "b"
  done = processes.run_python(
      "-m", "wrapopt.examples.embeddings", "--steps", str(_STEPS), "--files",
      "12", "--seed", "3", "--out", str(out))
  assert done.returncode == 0, done.stderr
  assert "100%" in done.stderr  # The progress bar is not in the output.
  assert "step/s" not in done.stdout
  assert "Warning" not in done.stderr
  out.joinpath("stdout").write_text(done.stdout)
  return out


@pytest.fixture(scope="module", name="results")
def _results(out):
  return json.loads((out / "results.json").read_text())


def test_results(results):
  assert results["steps"] == _STEPS
  assert results["seed"] == 3
  assert results["lazy"] is True
  assert results["seconds"] > 0
  assert results["table"]["rows"] >= 200_000
  assert 1000 < results["table"]["trained_rows"] < results["table"]["rows"]
  assert results["words"]["held_out"] > 100
  assert results["words"]["trained_on"] > 3 * results["words"]["held_out"]
  assert list(results["milliseconds"]) == [
      "no average", "wrapopt.keras.MovingAverage", "use_ema"]
  assert min(results["milliseconds"].values()) > 0
  assert results["wrapopt_path"] == os.path.dirname(
      os.path.abspath(wrapopt.__file__))


def test_it_learns(results):
  """Far better than a guess, and averages are not the weights."""
  curve = results["curve"]
  assert [row["step"] for row in curve] == list(range(3, _STEPS + 1, 3))
  assert curve[-1]["averaged_perplexity"] == results["averaged_perplexity"]
  for weights in "raw", "averaged":
    assert results[f"{weights}_perplexity"] < 1600  # Of 2000 words.
    assert results[f"{weights}_hits"] > 0.1  # Of a guess, 0.005.
  assert results["raw_perplexity"] != results["averaged_perplexity"]


def test_plain_keras_loads_the_averages(out, results):
  documents = embeddings.read_documents(12)
  _, (rows, words) = embeddings.make_samples(documents, seed=3)
  model = embeddings.make_model()
  model.load_weights(str(out / "averaged.weights.h5"))
  logits = model.predict(rows, verbose=0).astype(np.float64)
  losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(words)),
                                                      words]
  assert np.exp(losses.mean()) == pytest.approx(results["averaged_perplexity"],
                                                rel=1e-4)


def test_curves_and_table(out, results):
  assert image.imread(out / "curves.png").shape == (600, 1200, 4)
  lines = (out / "stdout").read_text().splitlines()
  assert [str(_STEPS), f"{results['raw_perplexity']:.1f}",
          f"{results['averaged_perplexity']:.1f}",
          f"{results['raw_hits']:.2%}",
          f"{results['averaged_hits']:.2%}"] in map(str.split, lines)
  assert str(out / "averaged.weights.h5") in lines


def test_samples():
  """Each word, with the rows of the words before it in its document."""
  documents = [("a", "b", "a", "c")] * 9 + [("a", "b")]
  (rows, words), (held_rows, held_words) = embeddings.make_samples(documents, 0)
  assert len(words) + len(held_words) == sum(map(len, documents))
  assert rows.shape == (len(words), 5) and rows.dtype == np.int32
  assert rows.min() >= 0 and rows.max() < 2**18
  # The numbers are by frequency; nobody knows a word that is held out only.
  a, b, _, c = words[:4]
  assert (a, b) == (1, 2) and c == 3
  # After "a", at the start, the same whichever document; "b a" is another.
  np.testing.assert_array_equal(rows[0], rows[4])
  assert rows[1, 0] == rows[3, 0] and rows[1, 3] != rows[3, 3]
  # Alone, a word's row depends on how far back it is.
  assert rows[1, 0] != rows[2, 1]
  assert held_rows.shape == (len(held_words), 5)


def test_rare_words_are_one(monkeypatch):
  monkeypatch.setattr(embeddings, "_VOCABULARY", 2)
  (_, words), _ = embeddings.make_samples([("a", "b", "a", "c")] * 10, 0)
  np.testing.assert_array_equal(words[:4], [1, 0, 1, 0])


def test_documents_are_those_of_the_library():
  documents = embeddings.read_documents(12)
  assert len(documents) == len(set(documents)) > 50
  assert all(words and all(w.isalpha() and w == w.lower() for w in words)
             for words in documents)


def test_steps_are_checked(capsys):
  with pytest.raises(SystemExit) as e:
    embeddings.main(["--steps", "0"])
  assert e.value.code == 2
  assert "argument --steps: must be at least 1" in capsys.readouterr().err
