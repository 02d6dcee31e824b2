"""The session of a worker after a restart of a parameter server."""

import lost_session_task
from wrapopt.examples import _cluster


def test_a_parameter_server_is_restarted(tmp_path, capfd):
  """Threads of hooks go on in a new session, and stderr says why."""
  with _cluster.Cluster(lost_session_task.FUNCTIONS,
                        preload=["lost_session_task"], ps=1,
                        worker=1) as cluster:
    worker = cluster.tasks["worker", 0]
    worker.ask("start", checkpoint=str(tmp_path))
    assert worker.ask("averaged") == [[1, 0.5], [0.5], [1, 0.5]]
    said = capfd.readouterr().err
    assert "session" not in said, said
    cluster.restart("ps", 0)
    assert worker.ask("seeded") == [1, 1]
  said = capfd.readouterr().err
  assert "a new session will be created" in said, said
  assert "Error: " in said, said
