"""Networks for processes of this machine, with links that go down.

Each process has a network namespace, which a pair of virtual Ethernet devices
connects with a switch. All of them are in a namespace that nothing else uses:
see `enter_alone`. They go with the processes of this program.
"""

import ctypes
import itertools
import os
import subprocess
import sys

_NEW_NET = 0x40000000  # CLONE_NEWNET
_ALONE = "WRAPOPT_NETWORKS"
_numbers = itertools.count(2)  # 1 is this process.


def enter_alone():
  """Runs this program anew in a namespace of its own.

  Returns:
    In that one, None. If there can be none, the reason.
  """
  if _ALONE in os.environ:
    return os.environ[_ALONE] or None
  why = []
  # As a user who is root in a namespace of users, or as root.
  for flags in "-rn", "-n":
    alone = ["unshare", flags, "sh", "-c", (
        "ip link set lo up && ip link add name switch type bridge && "
        "ip address add 10.77.0.1/16 dev switch && ip link set switch up && "
        "exec \"$@\""), "sh"]
    try:
      done = subprocess.run([*alone, "true"], capture_output=True, text=True,
                            check=False)
    except FileNotFoundError as e:
      why.append(str(e))
      break
    if done.returncode == 0:
      os.environ[_ALONE] = ""
      os.execvp("unshare", [*alone, *sys.orig_argv])
    why.append(done.stderr.strip())
  os.environ[_ALONE] = "; ".join(why)
  return os.environ[_ALONE]


def join(pid):
  """Moves this process, which has one thread, to the namespace of another."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f"/proc/{pid}/ns/net", "rb") as f:
    if libc.setns(f.fileno(), _NEW_NET):
      raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Link:
  """A namespace with a link to the others, which is up.

  Attributes:
    pid: A process in it, which ends with this one.
    host: Its address.
  """

  def __init__(self):
    number = next(_numbers)
    self._name = f"link{number}"
    self.host = f"10.77.{number // 250}.{number % 250}"
    self._process = subprocess.Popen(  # pylint: disable=consider-using-with
        ["unshare", "-n", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    self._process.stdout.readline()  # It is in the namespace.
    self.pid = self._process.pid
    _ip("link", "add", "name", self._name, "type", "veth", "peer", "name",
        "far", "netns", str(self.pid))
    _ip("link", "set", self._name, "master", "switch")
    inside = "nsenter", "-t", str(self.pid), "-n"
    for arguments in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{self.host}/16", "dev", "far"),
        ("link", "set", "far", "up")):
      _ip(*arguments, before=inside)
    self.resume()

  def stop(self):
    """Nothing gets through, but connections stay."""
    _ip("link", "set", self._name, "down")

  def resume(self):
    _ip("link", "set", self._name, "up")

  def close(self):
    self._process.communicate()


def _ip(*args, before=()):
  subprocess.run([*before, "ip", *args], check=True)
