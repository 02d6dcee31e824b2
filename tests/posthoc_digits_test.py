"""The example: computed averages of other widths equal the tracked ones."""

import json

from matplotlib import image
import pytest

import processes


@pytest.fixture(scope="module", name="out")
def _out(tmp_path_factory):
  """What the command, run as a user runs it, has written."""
  out = tmp_path_factory.mktemp("posthoc_digits") / "a" / "b"
  done = processes.run_python(
      "-m", "wrapopt.examples.posthoc_digits", "--epochs", "16", "--seed", "3",
      "--out", str(out))
  assert done.returncode == 0, done.stderr
  assert "100%" in done.stderr  # The progress bar is not in the output.
  assert "width/s" not in done.stdout
  assert "UserWarning" not in done.stderr
  out.joinpath("stdout").write_text(done.stdout)
  return out


def test_widths_made_afterwards_agree_with_tracked_ones(out):
  results = json.loads((out / "results.json").read_text())
  assert results["steps"] == 800 and results["snapshots"] == 7 * 16
  rows = results["rows"]
  assert sorted({row["steps"] for row in rows}) == [200, 400, 800]
  tracked = [row for row in rows
             if row["steps"] == 800 and "tracked_accuracy" in row]
  assert [row["relative_width"] for row in tracked] == [
      0.03, 0.07, 0.15, 0.2, 0.25]
  for row in tracked:
    # An error of the profile is one of the weights only as far as the weights
    # change over the training: by much less than their size.
    assert row["weights_error"] < 0.2 * row["profile_error"]
    assert abs(row["accuracy"] - row["tracked_accuracy"]) <= 2.01 / 599
    assert row["accuracy"] > 0.9
  assert results["best"]["accuracy"] == max(
      row["accuracy"] for row in rows if row["steps"] == 800)


def test_plot_and_table(out):
  assert image.imread(out / "widths.png").shape == (600, 960, 4)
  lines = (out / "stdout").read_text().splitlines()
  assert str(out / "widths.png") in lines
  assert sum(line.split()[:1] == ["800"] for line in lines) == 9


def test_epochs_are_checked():
  done = processes.run_python(
      "-m", "wrapopt.examples.posthoc_digits", "--epochs", "3")
  assert done.returncode == 2
  assert "3 epochs of 50 steps must be a multiple of 16 steps" in done.stderr
