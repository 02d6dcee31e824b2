"""The benchmark of growth runs, and its measurements are right."""

import json

import numpy as np
import pytest

from wrapopt.bench import __main__ as command
from wrapopt.bench import growth
from wrapopt.bench import harness


@pytest.fixture(autouse=True)
def few(monkeypatch):
  alternate = harness.alternate
  monkeypatch.setattr(
      harness, "alternate",
      lambda *args, **kwargs: alternate(*args, **kwargs, turn_seconds=1e-4))
  monkeypatch.setattr(growth, "_TRIES", 20)


def test_command(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(growth, "_SIZES", {
      "gate": (1, 4), "rounds": (1, 3), "variables": (1, 2, 5),
      "rows": (600, 700, 800)})
  results, plot = tmp_path / "results.json", tmp_path / "plot.png"
  command.main(["growth", "--quick", "--json", str(results), "--plot",
                str(plot)])
  found = json.loads(results.read_text())["results"]
  # --quick leaves the largest out, --largest all that are larger.
  assert [(r["part"], r["mode"], r["size"]) for r in found] == [
      ("gate", "threads", 1), ("gate", "threads", 4),
      ("rounds", "eager", 1), ("rounds", "eager", 3),
      ("variables", "session", 1), ("variables", "session", 2),
      ("variables", "tf.function", 1), ("variables", "tf.function", 2),
      ("rows", "tf.function", 600), ("rows", "tf.function", 700)]
  for r in found:
    assert r["microseconds"] > 0 and r["rounds"] == 5
    assert r["x_first"] == 1 or r["size"] not in (1, 600)
  assert plot.read_bytes().startswith(b"\x89PNG")
  blocks = capsys.readouterr().out.strip().split("\n\n")[1:-1]
  assert [block.splitlines()[0] for block in blocks] == [
      "gate, threads, per admitted step", "rounds, eager, per push",
      "variables, session, per variable",
      "variables, tf.function, per variable", "rows, tf.function, per step"]
  assert [len(block.splitlines()) for block in blocks] == [4] * 5
  command.main(["growth", "--parts", "rounds", "--largest", "2"])
  assert capsys.readouterr().out.count("\n") == 7


def test_bytes_of_what_is_pushed():
  """At least those of the values, and not much more."""
  growth._TRIES = 3000  # 12 MB.
  value = growth.tf.ones([growth._PUSHED])
  held = growth._bytes_of_push(7, value)
  assert 0.9 * 4 * growth._PUSHED < held < 2 * 4 * growth._PUSHED


def test_a_table_that_does_not_fit_is_refused():
  with pytest.raises(SystemExit, match=(
      r"A table of 1,000,000,000,000 rows needs \d+\.\d GiB of free memory, "
      r"got \d+\.\d GiB. Limit the rows with --largest.")):
    growth._rows(10**12, 5)


def test_other_work_is_refused(monkeypatch):
  monkeypatch.setattr(growth.ops, "averaging_mean", lambda *_: None)
  with pytest.raises(AssertionError, match="rounds: the mean is wrong"):
    growth._rounds(2, 1)
  monkeypatch.setattr(growth._Gate, "end", lambda *_: None)
  with pytest.raises(AssertionError, match="gate: 40 steps were admitted"):
    growth._gate(2, 1)


def test_resident_bytes():
  before = harness.resident_bytes()
  array = np.ones(4_000_000)
  assert harness.resident_bytes() - before == pytest.approx(32e6, rel=0.05)
  del array
  assert harness.resident_bytes() - before < 2e6
