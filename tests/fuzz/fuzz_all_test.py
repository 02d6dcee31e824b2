"""All fuzzers in one go: their seeds, and ten minutes of each at night."""

import datetime
import pathlib
import re

import pytest

import fuzz_all

MINUTES = 10  # At night.


def test_each_fuzzer_is_there():
  folder = pathlib.Path(fuzz_all.__file__).parent
  assert {f"fuzz_{kind}.py" for kind in (*fuzz_all.KINDS, "all")} == {
      path.name for path in folder.glob("fuzz_*.py")
      if '"--minutes"' in path.read_text() and path.name[-8:] != "_test.py"}


def test_the_seed_is_that_of_the_day():
  seed = fuzz_all.seed_of_the_day()
  date = datetime.datetime.strptime(str(seed)[:-6], "%Y%m%d").date()
  today = datetime.datetime.now(datetime.timezone.utc).date()
  # Midnight may have come between.
  assert today - date <= datetime.timedelta(days=1)
  assert str(seed).endswith("000000")


def test_all_run_though_one_finds_something(tmp_path, capfd):
  for kind, status in ("one", 0), ("two", 1), ("three", 0):
    (tmp_path / f"fuzz_{kind}.py").write_text(
        "import sys\nprint(sys.argv[1:])\nprint('3 cases in 4 seconds')\n"
        f"sys.exit({status})\n")
  run = lambda *kinds: fuzz_all.main(
      ["--minutes", "2", "--seed", "7"], kinds, tmp_path)
  assert run("one", "two", "three") == 1
  out = capfd.readouterr().out
  assert out.count("['--minutes=2.0', '--seed=7']\n") == 3
  assert out.endswith(
      "\nfuzz one --seed 7: 3 cases in 4 seconds\n"
      "fuzz two --seed 7: 3 cases in 4 seconds; exit status 1\n"
      "fuzz three --seed 7: 3 cases in 4 seconds\n")
  assert run("one", "three") == 0


@pytest.mark.parametrize("kind", fuzz_all.KINDS)
def test_at_night(kind, capfd):
  seed = fuzz_all.seed_of_the_day()
  status, line = fuzz_all.run(kind, MINUTES, seed)
  with capfd.disabled():  # In the log, also of a test that has passed.
    print(f"\n{line}", flush=True)
  assert status == 0
  assert int(re.search(r": (\d+) cases in ", line)[1]) > 0
