"""A worker's part in the rounds of servers, as ops of a TensorFlow 1 graph.

The centers are variables on the servers.
"""

import collections
import dataclasses
import typing

import tensorflow as tf

from wrapopt import ops
from wrapopt._loader import ops as raw
from wrapopt._local import _job_number
from wrapopt._v1._workers import _centers
from wrapopt.ops import _emit

# The place that is open before the first generation: without the hook, a worker
# may start from other values than the centers.
_FIRST_PLACE = (-1, 0)
# How many workers send values to a server at the same time.
_MOST_PUSHES = 4
# Instead of infinity, which tf.debugging.enable_check_numerics() refuses.
_LONGEST_SECS = 1e9


class Rounds:
  """The rounds of one `apply_gradients`.

  Attributes:
    name: The name of the rounds, the same for all workers.
    local_step: int32 scalar variable, the number of steps of this worker.
    local_round: int64 variable [2], the round that this worker takes part in
      and its generation: those that were open when the worker last started from
      the centers.
  """

  def __init__(self, prefix, worker_device):
    """Makes the variables. All workers make them in the same order."""
    self.local_step = _centers.make_local_step(worker_device)
    self.local_round = _centers.worker_variable(
        "local_round", tf.int64, _FIRST_PLACE, worker_device)
    self.name = f"{prefix}/{self.local_step.op.name}"
    self.servers = None  # By device, the leading one last: ServerParts.


class ServerPart(typing.NamedTuple):
  """What one server holds in the rounds of one `apply_gradients`.

  Attributes:
    device: The host of the centers.
    groups: Lists of indices of the variables that share a vector.
    centers: For each of the groups, its centers.
    steps: The step variables that count the rounds.
  """
  device: str
  groups: list
  centers: list
  steps: list

  def attributes(self):
    """Those of the vectors."""
    return {
        "dtypes": [tf.float64 if c[0].dtype.base_dtype == tf.float64
                   else tf.float32 for c in self.centers],
        "sizes": [sum(v.shape.num_elements() for v in c)
                  for c in self.centers]}


@dataclasses.dataclass(frozen=True)
class Member:
  """A worker that takes part in rounds.

  Attributes:
    name: Its name, different from those of all other workers.
    num_workers: The number of workers.
    min_workers: The number of workers that end a round after its time.
    round_timeout_secs: The time that a worker waits for others in a round.
    chief_timeout_secs: The time that it then waits on while rounds are stopped.
    process: That of `new_process`.
  """
  name: str
  num_workers: int
  min_workers: int
  round_timeout_secs: float
  chief_timeout_secs: float
  process: int = dataclasses.field(default_factory=_job_number.new_process)

  def _handle(self, rounds, server):
    return raw.wrapopt_averaging_rounds(
        num_workers=self.num_workers, shared_name=rounds.name,
        holds_center=False, settings=f"{len(rounds.servers)} servers",
        **server.attributes())

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
    rounds.servers = _servers(groups, centers, global_step)
    with tf.control_dependencies([stepped, due]):
      values = _centers.pack(local_vars, groups)
      with ops.device_of(rounds.local_round):
        place = tf.identity(rounds.local_round.read_value())
    opened = self._average(rounds, place, dict(zip(map(tuple, groups), values)))
    # The place is read before the values. If a round ends between the two, the
    # place tells that the worker missed that round.
    started = []
    for server in rounds.servers:
      if server.groups:
        with tf.control_dependencies([opened]):
          packed = _centers.pack(centers, server.groups)
        started.append(
            _centers.assign_packed(local_vars, packed, server.groups))
    with tf.control_dependencies(started), tf.device(None):
      return rounds.local_round.assign(opened).op

  def _average(self, rounds, place, values):
    """Sends values and ends the round: the place that is open then."""
    *others, lead = rounds.servers
    handles = {}

    def at(server, tensor):
      """The tensor at a server, whose handle is there by then."""
      tensor = _centers.at(server.device, tensor)
      if server.device not in handles:
        with ops.host_of(server), tf.control_dependencies([tensor]):
          handles[server.device] = self._handle(rounds, server)
      return tensor

    def stage(server, known):
      with ops.host_of(server), tf.control_dependencies([known]):
        return raw.wrapopt_averaging_stage(
            handles[server.device], self.name, known, ops.float64(1.0),
            count=len(server.groups), first=0,
            values=[values[tuple(g)] for g in server.groups])

    def end(server, known):
      # The size of a counter is 0. Resource variables come first.
      sized = [*((len(c), c) for c in server.centers),
               *((0, [step]) for step in server.steps)]
      sized.sort(key=lambda s: ops.is_ref_variable(s[1][0]))
      listed = [v for _, vs in sized for v in vs]
      refs = [v for v in listed if ops.is_ref_variable(v)]
      with ops.host_of(server), tf.control_dependencies([known]):
        opened = raw.wrapopt_averaging_mean(
            handles[server.device], known,
            [v.handle for v in listed if not ops.is_ref_variable(v)], refs,
            sizes=[size for size, _ in sized])
      if refs:
        _emit.note_refs(opened.op, server, refs=refs)
      return opened

    place = at(lead, place)
    with ops.host_of(lead), tf.control_dependencies([place]):
      limit = tf.constant(min(self.round_timeout_secs, _LONGEST_SECS),
                          tf.float64)
      began = raw.wrapopt_averaging_clock()
      _, known = raw.wrapopt_averaging_enter(
          handles[lead.device], self.name, self.process, place,
          most_turns=_MOST_PUSHES, turn_secs=limit, timeout_secs=limit,
          stopped_secs=self.chief_timeout_secs)
    staged = [stage(server, at(server, known)) for server in others]
    with tf.control_dependencies(staged):
      staged = stage(lead, known)
    with ops.host_of(lead), tf.control_dependencies([staged]):
      arrived, _ = raw.wrapopt_averaging_arrive(
          handles[lead.device], self.name, known)
    with ops.host_of(lead), tf.control_dependencies([arrived]):
      # The wait for a turn and this one take no longer than one deadline.
      waited = raw.wrapopt_averaging_clock() - began
      left = tf.maximum(limit - waited, tf.minimum(limit, 1.0))
      # No grace is shorter than the wait: the round waits for all workers.
      closed = raw.wrapopt_averaging_close(
          handles[lead.device], place, self.min_workers, timeout_secs=left,
          grace_secs=limit, stopped_secs=self.chief_timeout_secs)
    ended = [end(server, at(server, closed)) for server in others]
    with tf.control_dependencies(ended):
      return end(lead, closed)

  def start(self, pairs):
    """Starts this worker from the centers: a `Start`.

    Args:
      pairs: [(this worker's variable, its center)].
    """
    local_vars, centers = zip(*pairs)
    with tf.device(None):
      first = tf.no_op()
    with tf.control_dependencies([first]):
      copied = _centers.copy_packed(centers, local_vars)
    with tf.control_dependencies([copied]), tf.device(None):
      return Start(self, first, copied, tf.no_op())

  def _states(self, rounds, worker=""):
    """The state of each server; `worker` is the name of one that starts."""
    states = []
    for server in rounds.servers:
      with ops.host_of(server):
        states.append(raw.wrapopt_averaging_state(
            self._handle(rounds, server), worker=worker))
    return states

  def are_open(self, all_rounds):
    """Whether a generation has begun in each: a bool tensor."""
    return tf.reduce_all([True, *[
        self._states(rounds)[-1].place[0] > -1 for rounds in all_rounds]])

  def begin(self, all_rounds):
    """Begins a generation: a round that is later than any that servers know."""
    return tf.group(*[self._begin(rounds, False) for rounds in all_rounds])

  def stop(self, all_rounds):
    """Stops all rounds until `begin`, so that no round writes to the centers.

    A worker that sends values waits, and then takes the centers.
    """
    return tf.group(*[self._begin(rounds, True) for rounds in all_rounds])

  def _begin(self, rounds, stops):
    states = [state.place for state in self._states(rounds)]
    round_, generation = tf.unstack(
        tf.reduce_max(tf.stack(states), axis=0) + 1)
    # Later than that of a worker whose servers have lost all.
    now = tf.cast(tf.timestamp() * 1e3, tf.int64)
    place = tf.stack([tf.constant(-1, tf.int64) if stops else round_,
                      tf.maximum(generation, now)])
    begun = []
    for server, state in zip(rounds.servers, states, strict=True):
      with ops.host_of(server), tf.control_dependencies(begun):
        begun = [raw.wrapopt_averaging_restore(
            self._handle(rounds, server), self.name, from_generation=state[1],
            place=place, job=0)]
    return begun[0].op


class Start(typing.NamedTuple):
  """The ops that start a worker from the centers.

  Attributes:
    member: The Member.
    first: The operation that runs before the centers are read.
    copied: The operation that copies them.
    op: The operation that does all of it.
  """
  member: Member
  first: tf.Operation
  copied: tf.Operation
  op: tf.Operation

  def also_in(self, rounds):
    """Lets the worker then take part in what is open of some Rounds."""
    with tf.init_scope():
      # The place is read before the values. If a round ends between the two,
      # its number tells that the worker missed it.
      place = self.member._states(rounds, self.member.name)[-1].place
      with tf.control_dependencies([self.copied]), tf.device(None):
        taken = rounds.local_round.assign(place).op
    self.first._add_control_inputs([place.op])
    self.op._add_control_inputs([taken])


def _servers(groups, centers, global_step):
  """The ServerParts, the leading one last.

  It decides who is part of a round: once it does, all servers have the values.
  """
  by_device = collections.defaultdict(list)
  for group in groups:
    by_device[ops.host_device(centers[group[0]].device)].append(group)
  lead = next(iter(by_device))
  steps = ops.host_device(global_step.device)
  by_device[steps] += []
  by_device[lead] = by_device.pop(lead)
  servers = []
  for device, of_device in by_device.items():
    # The order of the vectors is that of the op that assigns their means.
    of_device.sort(key=lambda g: ops.is_ref_variable(centers[g[0]]))
    servers.append(ServerPart(
        device, of_device, [[centers[i] for i in g] for g in of_device],
        [global_step] if device == steps else []))
  return servers
