"""The example that compares Schedule-Free learning with schedules."""

import json

from matplotlib import image
import numpy as np
import pytest

from wrapopt.examples import schedule_free


@pytest.mark.parametrize("contender", schedule_free.CONTENDERS)
def test_a_run_does_not_depend_on_the_ones_before(contender):
  task = schedule_free.TASKS["diabetes"]
  trainer, fresh = (
      schedule_free.Trainer(task, task.load(1), contender, 20)
      for _ in range(2))
  trainer.run(1, 0.03, [20], "validation")
  errors = trainer.run(2, 0.01, [10, 20], "validation")
  assert errors == fresh.run(2, 0.01, [10, 20], "validation")
  assert errors[0] != errors[1]


def test_rates():
  constant, cosine, *others = (
      schedule_free.rates_of(contender, 2.0, 9, 3)
      for contender in schedule_free.CONTENDERS)
  np.testing.assert_allclose(constant, [2 / 3, 4 / 3, *[2] * 7], rtol=1e-6)
  np.testing.assert_allclose(
      cosine, [2 / 3, 4 / 3, 2, 2, *(
          1 + np.cos(np.pi * i / 6) for i in range(1, 6))], rtol=1e-5)
  # The warm-up is an argument of the optimizer.
  for rates in others:
    np.testing.assert_array_equal(rates, [2.0] * 9)


def test_table_and_curves(capsys, tmp_path):
  schedule_free.main([
      "--quick", "--steps", "48", "--seeds", "2", "--tasks", "digits_conv",
      "text", "--out", str(tmp_path / "a")])
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  results = json.loads((tmp_path / "a" / "results.json").read_text())
  assert list(results["tasks"]) == ["digits_conv", "text"]
  assert results["points"] == [12, 24, 36, 48]
  assert image.imread(tmp_path / "a" / "curves.png").shape == (700, 1200, 4)
  for found in results["tasks"].values():
    assert tuple(found) == schedule_free.CONTENDERS
    for contender, row in found.items():
      validation = row["validation"]
      assert len(validation) == len(results["rates"]) == 2
      assert row["rate"] == float(min(validation, key=validation.get))
      assert [len(errors) for errors in row["errors"]] == [4, 4]
      means = np.mean(row["errors"], axis=0)
      [line] = [line for line in lines if line[:-7] == contender.split() and
                line[-5] == f"{means[-1]:.2f}"]
      assert line[-7:-5] == [f"{means[i]:.2f}" for i in (0, 1)]
  # They learn: guesses are wrong in 90 % of the scans.
  assert all(np.mean(row["errors"], axis=0)[-1] < 40
             for row in results["tasks"]["digits_conv"].values())
