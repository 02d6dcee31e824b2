"""The example that compares policies for old gradients."""

import json

from matplotlib import image
import numpy as np
import pytest

from wrapopt.examples import staleness


@pytest.mark.parametrize("method", staleness.METHODS)
def test_one_worker_is_sequential(method):
  simulation = staleness.Simulation(staleness.TASKS["cancer"])
  arguments = 1, "in turn", 0.1, 2.0, 3, [10, 20], 2
  want, _ = simulation.run(staleness.SEQUENTIAL, *arguments)
  weights = [w.numpy() for w in simulation._weights]
  got, dropped = simulation.run(method, *arguments)
  assert (got, dropped) == (want, 0)
  for w, x in zip(simulation._weights, weights):
    np.testing.assert_array_equal(w.numpy(), x)


def test_the_delay_is_exact():
  # Of four workers in turn, each gradient misses three updates, but the first.
  simulation = staleness.Simulation(staleness.TASKS["cancer"])
  seen = []
  make = simulation._make_optimizer

  def keep(*args):
    seen.append(make(*args))
    return seen[-1]

  simulation._make_optimizer = keep
  simulation.run(staleness.SCALED, 4, "in turn", 0.1, None, 0, [40], 2)
  histogram = seen[0].staleness_stats().admitted_histogram
  assert list(histogram[:5]) == [1, 1, 1, 37, 0]


def test_table_and_curves(capsys, tmp_path):
  staleness.main(["--quick", "--steps", "40", "--seeds", "2", "--tasks",
                  "digits", "cancer", "--out", str(tmp_path / "a")])
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  results = json.loads((tmp_path / "a" / "results.json").read_text())
  assert results["points"] == [10, 20, 30, 40]
  assert image.imread(tmp_path / "a" / "curves.png").shape == (700, 1200, 4)
  for found in results["tasks"].values():
    by_workers = found["workers"]["in turn"]
    assert list(by_workers) == ["2", "4"]
    for method in staleness.METHODS:
      means = []
      for of in by_workers.values():
        assert [len(run["errors"]) for run in of[method]] == [4, 4]
        means.append(np.mean([run["errors"][-1] for run in of[method]]))
      assert any(line[0] == method and line[1] == f"{means[0]:.2f}"
                 for line in lines if len(line) > 1)
  # It learns: guesses are wrong in 37 % of the samples.
  assert np.mean([run["errors"][-1] for run in
                  results["tasks"]["cancer"]["sequential"]]) < 15
