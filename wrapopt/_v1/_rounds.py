"""The rounds of `ModelAverageOptimizer`, as one worker takes part in them."""

import collections
import dataclasses
import typing

import tensorflow as tf

from wrapopt import ops
from wrapopt._v1 import _centers

# No round has this number: a wait for its end returns at once.
_NO_ROUND = -2
# The number of the open round before a chief has opened one.
_UNOPENED = -1


class Rounds(typing.NamedTuple):
  """The rounds of one `apply_gradients`.

  Attributes:
    name: The name of the rounds, the same for all workers.
    local_step: int32 scalar variable, the number of steps of this worker.
    local_round: int64 scalar variable, the round that this worker takes part
      in: the open one when the worker last started from the centers.
  """
  name: str
  local_step: tf.Variable
  local_round: tf.Variable

  @classmethod
  def make(cls, prefix, worker_device):
    """Makes the variables. All workers make them in the same order."""
    local_step = _centers.make_local_step(worker_device)
    local_round = _centers.worker_variable("local_round", tf.int64, _UNOPENED,
                                           worker_device)
    return cls(f"{prefix}/{local_step.op.name}", local_step, local_round)


@dataclasses.dataclass(frozen=True)
class Member:
  """A worker that takes part in rounds.

  Attributes:
    name: Its name, different from those of all other workers.
    is_chief: Whether it ends the rounds.
    num_workers: The number of workers.
    min_workers: The number of workers that end a round after its time.
    round_timeout_secs: The time that the chief waits for the other workers.
    chief_timeout_secs: The time that the others wait for the chief.
    centers: The VariableMap from this worker's variables to their centers.
  """
  name: str
  is_chief: bool
  num_workers: int
  min_workers: int
  round_timeout_secs: float
  chief_timeout_secs: float
  centers: _centers.VariableMap

  def _lead(self):
    """The device of the parameter server that orders the rounds."""
    with tf.init_scope():  # A branch of a cond may be a graph of its own.
      first, *_ = self.centers.in_graph()
    return self.centers[first].device

  def _handle(self, rounds, device):
    with tf.device(None), tf.device(device):
      return ops.averaging_rounds(self.num_workers, rounds.name)

  def take_part(self, rounds, pairs, stepped, due, global_step):
    """Takes part in a round, from this worker's values to those of the centers.

    Args:
      rounds: Rounds.
      pairs: [(this worker's variable, its center)].
      stepped: The operation after which the worker's variables have the values
        to send.
      due: A tensor that is dead in a step between rounds.
      global_step: Counts the rounds.

    Returns:
      An operation on the worker.
    """
    local_vars, centers = zip(*pairs)
    groups = _centers.buckets(local_vars, centers)
    # By parameter server: the indices of its groups. The lead comes last: once
    # it counts a worker, all servers have that worker's values.
    servers = collections.defaultdict(list)
    for g, group in enumerate(groups):
      servers[centers[group[0]].device].append(g)
    servers[self._lead()] = servers.pop(self._lead(), [])
    *others, lead = servers

    with tf.control_dependencies([stepped, due]):
      values = _centers.pack(local_vars, groups)
    with ops.device_of(rounds.local_round), tf.control_dependencies([due]):
      number = tf.identity(rounds.local_round.read_value())
    numbers, handles = {}, {}

    def push(device):
      with tf.device(None), tf.device(device):
        return ops.averaging_push(handles[device], self.name,
                                  numbers[device],
                                  [values[g] for g in servers[device]])

    for device in servers:
      numbers[device] = _centers.at(device, number)
      with tf.control_dependencies([numbers[device]]):
        handles[device] = self._handle(rounds, device)
    with tf.control_dependencies([push(device) for device in others]):
      pushed = push(lead)
    with tf.control_dependencies([pushed]):
      if not self.is_chief:
        opened = ops.averaging_wait(handles[lead], numbers[lead],
                                    self.chief_timeout_secs, self.name)
      else:
        workers = ops.averaging_gather(handles[lead], numbers[lead],
                                       self.min_workers,
                                       self.round_timeout_secs)
        means = [
            ops.averaging_mean(handles[device], numbers[device], workers,
                               [centers[i] for i in groups[g]], value=value)
            for device in servers for value, g in enumerate(servers[device])]
        opened = self._end_round(means, numbers, handles, global_step)

    # The number is read before the values. If a round ends between the two, the
    # number tells that the worker missed that round.
    started = []
    for device, of_server in servers.items():
      with tf.control_dependencies([opened]):
        packed = _centers.pack(centers, [groups[g] for g in of_server])
      if of_server:  # The lead may have no group.
        started.append(_centers.assign_packed(
            local_vars, packed, [groups[g] for g in of_server]))
    with tf.control_dependencies(started), tf.device(None):
      return rounds.local_round.assign(opened).op

  def _end_round(self, means, numbers, handles, global_step):
    """Counts the step after the means, and opens the next round: its number."""
    *others, lead = handles
    with tf.control_dependencies(means):
      ended = [ops.averaging_next(handles[device], numbers[device])
               for device in others]
      with ops.device_of(global_step):
        ended.append(global_step.assign_add(1).op)
    # This lets the other workers continue. They must see the incremented step.
    with tf.control_dependencies(ended):
      return ops.averaging_next(handles[lead], numbers[lead])

  def start(self, pairs, all_rounds):
    """Starts this worker from the centers, once a round is open.

    Args:
      pairs: [(this worker's variable, its center)].
      all_rounds: The Rounds of all `apply_gradients`.

    Returns:
      An operation.
    """
    local_vars, centers = zip(*pairs)
    # The numbers are read before the values. If a round ends between the two,
    # its number tells that the worker missed it.
    opened = [self._wait(rounds, _NO_ROUND) for rounds in all_rounds]
    with tf.control_dependencies(opened):
      started = _centers.copy_packed(centers, local_vars)
    with tf.control_dependencies([started]), tf.device(None):
      return tf.group(*[
          rounds.local_round.assign(number).op
          for rounds, number in zip(all_rounds, opened, strict=True)])

  def _wait(self, rounds, number):
    return ops.averaging_wait(self._handle(rounds, self._lead()), number,
                              self.chief_timeout_secs, self.name)

  def make_ready(self, all_rounds):
    """Opens a round if this is the chief, else waits until one is open."""
    with tf.device(None), tf.device(self._lead()):
      return tf.group(*[
          self._open(rounds) if self.is_chief else self._wait(rounds, _UNOPENED)
          for rounds in all_rounds])

  def _open(self, rounds):
    """Opens a round that is later than any that a parameter server has seen."""
    lead = self._handle(rounds, self._lead())
    others = {self.centers[v].device
              for v in self.centers.in_graph()} - {self._lead()}
    opened, *elsewhere = [
        ops.averaging_wait(handle, _NO_ROUND, self.chief_timeout_secs)
        for handle in (lead, *[self._handle(rounds, device)
                               for device in sorted(others)])]
    caught_up = []
    if elsewhere:
      # A restarted lead counts rounds from the start. The other servers refuse
      # a round that is older than their own.
      latest = tf.reduce_max(tf.stack(elsewhere))
      caught_up.append(tf.cond(
          latest > opened + 1, lambda: ops.averaging_next(lead, latest - 1),
          lambda: tf.identity(opened)))
    with tf.control_dependencies(caught_up):
      return ops.averaging_next(lead, _NO_ROUND, reset=True)
