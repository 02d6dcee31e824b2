"""Many kills during a snapshot leave only complete snapshots."""

from snapshot_kills import kill_in_a_loop


def test_kills(tmp_path):
  kill_in_a_loop(tmp_path / "snapshots", 20, 1)
