"""Trains while the network of one worker goes down and comes back.

    python -m chaos_namespaces SUBJECT FOLDER SEED SIGNALS

The worker has a network namespace of its own, which a pair of virtual Ethernet
devices connects with the others. Run it with `command()`, in a namespace that
nothing else uses.
"""

import ctypes
import os
import subprocess
import sys

import chaos
import chaos_link
from wrapopt.examples import _cluster

_CLONE_NEWNET = 0x40000000
_NEAR, _FAR = "10.77.0.1", "10.77.0.2"


def command():
  """What to run this with: (arguments, None), or (None, why it cannot be)."""
  why = []
  # As a user who is root in a namespace of users, or as root.
  for flags in ("-rn", "-n"):
    arguments = ["unshare", flags]
    try:
      done = subprocess.run(
          [*arguments, "ip", "link", "add", "near", "type", "veth", "peer",
           "name", "far"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
      return None, "unshare is not installed"
    if done.returncode == 0:
      return arguments, None
    why.append(f"`{' '.join(done.args)}`: {done.stderr.strip()}")
  return None, "; ".join(why)


def _ip(*args, check=True):
  subprocess.run(["ip", *args], check=check, stderr=None if check else
                 subprocess.DEVNULL)


class _Process(_cluster.Process):
  """A process with a network of its own."""

  # pylint: disable-next=super-init-not-called
  def __init__(self, context, do, spec, job, number):
    self.name = f"/job:{job}/task:{number}"
    self._pipe, end = context.Pipe()
    self.process = context.Process(
        target=_run, args=(end, do, spec, job, number), daemon=True)
    self.process.start()
    end.close()
    assert self._pipe.recv() == "alone"
    # That of a killed worker goes when the kernel gets to it.
    _ip("link", "delete", "near", check=False)
    _ip("link", "add", "near", "type", "veth", "peer", "name", "far",
        "netns", str(self.process.pid))
    _ip("address", "add", f"{_NEAR}/30", "dev", "near")
    _ip("link", "set", "near", "up")
    self._pipe.send("connected")


def _run(pipe, *args):
  if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
  pipe.send("alone")
  assert pipe.recv() == "connected"
  _ip("link", "set", "lo", "up")
  _ip("address", "add", f"{_FAR}/30", "dev", "far")
  _ip("link", "set", "far", "up")
  _cluster._run(pipe, *args)


class Link:
  """As chaos_link.Link."""

  kinds = ("stall",)

  def __init__(self, tasks, behind):
    self._ports = dict(zip(tasks, chaos_link.free_ports(len(tasks))))
    self._behind = behind
    _ip("link", "set", "lo", "up")

  def address(self, task, other):
    host = "localhost"
    if (task == self._behind) != (other == self._behind):
      host = _FAR if other == self._behind else _NEAR
    return f"{host}:{self._ports[other]}"

  def start(self, task, *args):
    process = _Process if task == self._behind else _cluster.Process
    return process(*args, *task)

  def tell(self, command):
    _ip("link", "set", "near", "up" if command == "up" else "down")

  def close(self):
    pass  # The devices go with the namespaces.


def _main(subject, folder, seed, signals):
  events = chaos.plan(int(seed), int(signals), links=Link.kinds)
  # Half of all, not one of seven.
  events = [event._replace(kind="stall", victim=chaos.LINK, during=None)
            if i % 2 else event for i, event in enumerate(events)]
  chaos.Chaos(subject, folder, new_link=Link).run(events)


if __name__ == "__main__":
  _main(*sys.argv[1:])
