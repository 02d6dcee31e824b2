"""Hosts on one machine: network namespaces of Linux, with a link each."""

import subprocess


def missing():
  """Why this process can't make hosts: a text, "" if it can."""
  try:
    with Hosts(1) as hosts:
      hosts.shape(1)
  except (OSError, subprocess.CalledProcessError) as e:
    return ("root may make network namespaces, with `ip` and `tc` of iproute2: "
            f"{e}")
  return ""


class Hosts:
  """A context with hosts, whose links meet in a switch.

  Attributes:
    hosts: A list of Hosts.
  """

  def __init__(self, count):
    self._count = count

  def __enter__(self):
    self._switch, self.hosts = None, []
    try:
      self._switch = _Namespace()
      self._switch.call("ip", "link", "add", "bridge", "type", "bridge")
      self._switch.call("ip", "link", "set", "dev", "bridge", "up")
      for k in range(self._count):
        self.hosts.append(Host(self._switch, k))
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_):
    for namespace in [self._switch, *self.hosts]:
      if namespace:
        namespace.close()

  def shape(self, megabits):
    """Limits all links to so many megabits a second, each way."""
    for host in self.hosts:
      host.shape(megabits)


class _Namespace:
  """A network namespace, which ends with this process.

  Attributes:
    pid: A process in it.
  """

  def __init__(self):
    self._process = subprocess.Popen(  # pylint: disable=consider-using-with
        ["unshare", "-n", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    self._process.stdout.readline()  # It is in the namespace.
    self.pid = self._process.pid

  def command(self, *command):
    """The command that runs another one here."""
    return ["nsenter", "-t", str(self.pid), "-n", *command]

  def call(self, *command):
    subprocess.run(self.command(*command), check=True, capture_output=True)

  def close(self):
    self._process.communicate()


class Host(_Namespace):
  """A host, whose link is up.

  Attributes:
    address: Its IP address.
  """

  DEVICE = "uplink"

  def __init__(self, switch, number):
    super().__init__()
    self._switch, self._port = switch, f"port{number}"
    self.address = f"10.77.{number // 250}.{number % 250 + 1}"
    try:
      switch.call("ip", "link", "add", self._port, "type", "veth", "peer",
                  "name", self.DEVICE, "netns", str(self.pid))
      switch.call("ip", "link", "set", "dev", self._port, "master", "bridge")
      self.resume()
      self.call("ip", "address", "add", f"{self.address}/16", "dev",
                self.DEVICE)
      for device in self.DEVICE, "lo":
        self.call("ip", "link", "set", "dev", device, "up")
    except BaseException:
      self.close()
      raise

  def shape(self, megabits):
    for place, device in (self, self.DEVICE), (self._switch, self._port):
      place.call("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate",
                 f"{megabits}mbit", "burst", "64kb", "latency", "100ms")

  def stop(self):
    """Nothing gets through, but connections stay."""
    self._switch.call("ip", "link", "set", "dev", self._port, "down")

  def resume(self):
    self._switch.call("ip", "link", "set", "dev", self._port, "up")
