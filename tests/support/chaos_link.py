"""A link between a worker and the others that can go down."""

import subprocess
import sys

import chaos_proxy
from wrapopt.examples import _cluster


class Link:
  """A proxy between a worker and its parameter servers.

  Attributes:
    kinds: What can happen to it.
  """

  kinds = ("stall", "drop")

  def __init__(self, tasks, behind):
    """Starts its process.

    Args:
      tasks: All tasks of a cluster: [(job, number)].
      behind: The task that reaches its parameter servers through the link.
    """
    ports = _cluster.free_ports(2 * len(tasks))
    self._ports = dict(zip(tasks, ports))
    self._proxies = dict(zip(tasks, ports[len(tasks):]))
    self._behind = behind
    self._process = subprocess.Popen(  # pylint: disable=consider-using-with
        [sys.executable, chaos_proxy.__file__, *[
            f"{self._proxies[t]}:{self._ports[t]}" for t in tasks
            if t[0] == "ps" or t == behind]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert self._process.stdout.readline() == "ok\n"

  def address(self, task, other):
    """The address by which a task reaches another."""
    through = (task == self._behind and other[0] == "ps" or
               task[0] == "ps" and other == self._behind)
    return f"localhost:{(self._proxies if through else self._ports)[other]}"

  def start(self, task, *args):
    """Starts the process of a task; the arguments are of _cluster.Process."""
    return _cluster.Process(*args, *task)

  def tell(self, command):
    self._process.stdin.write(command + "\n")
    self._process.stdin.flush()
    assert self._process.stdout.readline() == "ok\n"

  def close(self):
    self._process.kill()
    self._process.wait()
    self._process.stdin.close()
    self._process.stdout.close()
