"""The jobs of servers: to list, to drop, and to read their centers."""

from collections.abc import Sequence
import time
import typing

import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt._loader import ops as raw
from wrapopt._local import _job_number
from wrapopt._local import _layout
from wrapopt._local import _server
from wrapopt._local import _settings

_POLL_SECS = 0.1


class Part(typing.NamedTuple):
  """A server's part of a job.

  Attributes:
    name: The job's name.
    settings: What its workers have given, a text.
    place: (round, generation) of the center; round -1 without one.
    idle_secs: How long no worker has called.
    bytes: The size of the center and its velocity.
  """
  name: str
  settings: str
  place: tuple
  idle_secs: int
  bytes: int

  @property
  def fragment(self):
    """(its index, the number of fragments)."""
    return _settings.Settings.read(self.settings)[0].fragment


def parts(address):
  """A server's Parts, by name."""
  names, settings, numbers = _call(address, raw.wrapopt_averaging_list)
  return {
      name.decode(): Part(name.decode(), text.decode(), (round_, generation),
                          idle_secs, size)
      for name, text, (round_, generation, _, idle_secs, size) in zip(
          names, settings, numbers.tolist())}


def drop(address, name):
  """Drops a part: whether the server had it."""
  return bool(_call(address, raw.wrapopt_averaging_drop, name))


def drop_job(address, job):
  """Drops the parts of all fragments of a job: whether there was one."""
  return any([drop(address, name) for name, part in parts(address).items()
              if name == job or ", fragment " in part.settings and
              name == _settings.name_of(job, part.fragment[0])])


def _call(address, op, *args):
  with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
    fetches = op(*args)
  with _server.open_session(address, graph) as session:
    return session.run(fetches)


class Center(typing.NamedTuple):
  """A center that was read.

  Attributes:
    round: Its number, an int; of fragments, the sum of theirs.
    values: A list of NumPy arrays, in the order of the workers' `variables` and
      `averaged`: float64 for variables of float64, float32 for others.
    names: A list of the variables' names, in one of the workers.
  """
  round: int
  values: list
  names: list


def read_center(servers: Sequence[str], name: str, *,
                timeout_secs: float = 60) -> Center:
  """Reads the center of a job, without taking part in it.

  No round waits for the reader. Use it to evaluate a job while it trains, or to
  keep what it has trained after its workers have ended.

  Example:

  >>> server = tf.distribute.Server.create_local_server()
  >>> w = tf.Variable([1., 2.])
  >>> local = wrapopt.LocalSGD([w], [server.target], "a", num_workers=1,
  ...                          name="job")
  >>> center = wrapopt.read_center([server.target], "job")
  >>> print(center.round, center.values)
  0 [array([1., 2.], dtype=float32)]

  Args:
    servers: The addresses of the servers, as of `wrapopt.LocalSGD`.
    name: The name of the job.
    timeout_secs: How long to wait for a center, in seconds.

  Returns:
    An object with the attributes `round` (of `fragments`, the sum of their
    rounds), `values` (a NumPy array for each variable, in the order of the
    workers) and `names`.

  Raises:
    ValueError: If the servers are not all servers of the job, in its order.
    tf.errors.DeadlineExceededError: If the servers have no center of that name
      within `timeout_secs`.
  """
  _server.check_addresses(servers)
  timeout_secs = _checks.number("timeout_secs", timeout_secs)
  deadline = time.monotonic() + timeout_secs
  first, (_, fragments) = _wait_for(servers, name, timeout_secs, deadline)
  centers = [first, *(
      _wait_for(servers, _settings.name_of(name, i), timeout_secs, deadline)[0]
      for i in range(1, fragments))]
  return Center(sum(c.round for c in centers),
                [x for c in centers for x in c.values],
                [x for c in centers for x in c.names])


def _wait_for(servers, name, timeout_secs, deadline):
  """The Center of a fragment, and Part.fragment."""
  while True:
    got: dict[str, typing.Any] = {}
    try:
      for address in servers:
        got[address] = "no answer"
        got[address] = parts(address)
      center = _read(servers, [of.get(name) for of in got.values()],
                     timeout_secs)
      if center:
        return center, got[servers[0]][name].fragment
      lost = None
    except tf.errors.OpError as e:  # A server is lost, or the job was dropped.
      lost = e
    if time.monotonic() > deadline:
      raise tf.errors.DeadlineExceededError(None, None, (
          f"The servers must have a center named {name!r} within "
          f"{timeout_secs} seconds, got " + "; ".join(
              f"{address}: " + (of if isinstance(of, str) else ", ".join(
                  f"{part.name!r} of round {part.place[0]}"
                  for part in of.values()) or "none")
              for address, of in got.items())
          + (f". {lost}" if lost else ""))) from lost
    time.sleep(_POLL_SECS)


def _read(servers, found, secs):
  """The Center, or None if the servers do not have it at one round."""
  for s, (address, part) in enumerate(zip(servers, found)):
    if part is None:
      continue
    settings, index = _settings.Settings.read(part.settings)
    if (settings.servers, index) != (len(servers), s):
      raise ValueError(
          f"`servers` must be the {settings.servers} of {part.name!r}, in the "
          f"order of its workers, got {address} at {s} of {len(servers)}; its "
          f"place is {index}.")
  if found[0] is None or found[0].place[0] < 0:
    return None
  layout = _layout.Layout(
      settings.variables, len(servers), settings.dtype)
  place, vectors = found[0].place, layout.empty()
  for s, (address, part) in enumerate(zip(servers, found)):
    if not layout.pieces[s]:  # The model is smaller than the servers.
      continue
    if part is None:
      return None
    server = _server.Server(address, part.name, "", part.settings,
                            settings.num_workers, layout, s,
                            _job_number.Job(True))
    try:
      if not server.read(place, vectors, secs):
        return None
    finally:
      server.close()
  return Center(place[0], [np.array(x) for x in layout.split(vectors)],
                [v.name for v in settings.variables])
