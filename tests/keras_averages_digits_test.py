"""The example that compares averages and statistics of batch normalizations."""

import json

from wrapopt.examples import averages_digits


def test_tables(capsys, tmp_path):
  averages_digits.main(["--epochs", "1", "2", "--seeds", "1", "--out",
                        str(tmp_path)])
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert lines.count(["after", "epochs", "1", "2"]) == 4
  rows = json.loads((tmp_path / "results.json").read_text())["rows"]
  found = {(row["epochs"], row["average"], row["statistics"]):
           row["accuracies"] for row in rows}
  assert all(len(accuracies) == 1 for accuracies in found.values())
  assert ["recalibrated", *(
      f"{found[epoch, 'PowerDecay(0.1)', 'recalibrated'][0]:.1%}"
      for epoch in (1, 2))] in lines
  # As the guide says: an average without warm-up stays at the initial weights,
  # and the statistics of the raw weights do not fit it.
  [plain] = found[2, "0.999", "recalibrated"]
  [power] = found[2, "PowerDecay(0.1)", "recalibrated"]
  assert plain < 0.6 < 0.9 < power
  [lagging] = found[1, "0.99", "raw"]
  [recalibrated] = found[1, "0.99", "recalibrated"]
  assert lagging < recalibrated - 0.2
