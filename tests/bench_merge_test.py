"""The benchmark of merging runs, and its measurements are right."""

import json

from wrapopt.bench import __main__ as command
from wrapopt.bench import merge


def test_merge(tmp_path, capsys):
  results = tmp_path / "results.json"
  command.main(["merge", "--inputs", "3", "--megabytes", "8", "--rounds", "1",
                "--directory", str(tmp_path), "--json", str(results)])
  found = json.loads(results.read_text())["results"]
  assert [row["format"] for row in found] == ["tensorflow", "h5"]
  for row in found:
    assert 3 * 8 * 2**20 <= row["bytes_in"] < 3.01 * 8 * 2**20
    assert row["plain"] > 0 and row["merge"] > 0
    # A sum in float64 and an output at least, of the largest variable.
    assert row["peak_bytes"] > 0
  assert "of the limit" in capsys.readouterr().out
  assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_sizes():
  class Options:
    megabytes, variables = 1, 3
  assert merge._sizes(Options) == [131072, 65536, 65536]
  Options.variables = 1
  assert merge._sizes(Options) == [262144]
