"""Hosts on one machine: network namespaces of Linux, with a link each."""

import os
import subprocess


def missing():
  """Why this process can't make hosts: a text, "" if it can."""
  if os.geteuid() != 0:
    return "only root may make network namespaces"
  try:
    with Hosts(1) as hosts:
      hosts.shape(1)
  except (OSError, subprocess.CalledProcessError) as e:
    return f"no network namespaces (`ip`, `tc` of iproute2): {e}"
  return ""


class Hosts:
  """A context with hosts, whose links meet in a switch.

  Attributes:
    addresses: The IP address of each host.
  """

  DEVICE = "uplink"  # Its name in each host.

  def __init__(self, count):
    self.addresses = [f"10.213.0.{k + 1}" for k in range(count)]
    # Others may make hosts on this machine, too.
    self._switch, *self._names = [
        f"wrapopt-{os.getpid()}-{name}" for name in ["switch", *range(count)]]

  def __enter__(self):
    try:
      for name in [self._switch, *self._names]:
        _call("ip", "netns", "add", name)
      self._at_switch("ip", "link", "add", "bridge", "type", "bridge")
      self._at_switch("ip", "link", "set", "bridge", "up")
      for k, name in enumerate(self._names):
        self._at_switch("ip", "link", "add", f"port{k}", "type", "veth", "peer",
                        "name", self.DEVICE, "netns", name)
        self._at_switch("ip", "link", "set", f"port{k}", "master", "bridge")
        self.connect(k, True)
        for command in (
            ["ip", "address", "add", f"{self.addresses[k]}/24", "dev",
             self.DEVICE],
            ["ip", "link", "set", self.DEVICE, "up"],
            ["ip", "link", "set", "lo", "up"]):
          _call(*self.command(k, command))
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_):
    for name in [self._switch, *self._names]:
      subprocess.run(["ip", "netns", "delete", name], check=False,
                     capture_output=True)

  def command(self, k, command):
    """The command that runs `command`, a list, on host k."""
    return ["ip", "netns", "exec", self._names[k], *command]

  def shape(self, megabits):
    """Limits all links to so many megabits a second, each way."""
    limit = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb",
             "latency", "100ms"]
    for k in range(len(self._names)):
      self._at_switch("tc", "qdisc", "replace", "dev", f"port{k}", *limit)
      _call(*self.command(
          k, ["tc", "qdisc", "replace", "dev", self.DEVICE, *limit]))

  def connect(self, k, is_up):
    """Plugs the link of host k in or out: no end gets to know."""
    self._at_switch("ip", "link", "set", f"port{k}", "up" if is_up else "down")

  def _at_switch(self, *command):
    _call("ip", "netns", "exec", self._switch, *command)


def _call(*command):
  subprocess.run(command, check=True, capture_output=True)
