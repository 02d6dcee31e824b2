"""The job that a worker and its servers are part of, by its number."""

import secrets
import time

import tensorflow as tf


def new_process():
  """A number that no other process has."""
  return secrets.randbits(62) + 1


class Job:
  """The job that a worker is part of, which all of its servers serve.

  Its number tells who has begun it: more than 0 a worker that does not resume.
  A worker that resumes does not know whether others hold a center. It begins
  with less than 0, the time: of two such jobs, the older one goes on.

  Attributes:
    resumes: Whether the worker may take the center that its name has left.
    process: That of `new_process`.
  """

  def __init__(self, resumes):
    self.resumes = resumes
    self.process = new_process()
    # That of the center that this worker holds, and that of the servers' center
    # if this worker joins its job by taking it, or by giving a later one.
    self._number = self._coming = self._next = 0
    self._lead_holds = False

  def leave(self):
    """The worker comes back as another process, which resumes."""
    self.resumes = True
    self.process = new_process()

  @property
  def number(self):
    """That of a center to restore."""
    return self._coming or self._number or self._next

  def take(self):
    """The worker has taken the center of the servers."""
    self._number, self._coming = self._coming or self._number, 0

  def replace(self, is_older, is_saved):
    """The center of this worker is about to replace that of the servers.

    Args:
      is_older: Whether it is of an earlier round. Then it keeps its own number:
        the other one may be of another job, which this worker has not joined.
      is_saved: Whether it is that of a checkpoint. Then it gets an older number
        than that of the servers: a worker that holds theirs takes it; and who
        goes on from theirs nevertheless is of another job.
    """
    if is_older and self._number:
      self._coming = 0
    elif is_saved and self._coming < 0:
      self._coming += 1

  def look(self, leads, holds, rounds, number, has_taken):
    """Looks at what all servers tell, the lead first.

    Args:
      leads: Whether the server leads.
      holds: Whether it holds a center.
      rounds: The number of its rounds.
      number: That of the job that trains the center.
      has_taken: Whether this worker has taken a center. Until then, it is
        part of no job.

    Returns:
      Whether the center is of another job, and whether its job has begun anew
      without this worker's center.
    """
    if leads:
      self._lead_holds = holds
      self._next = -time.time_ns() if self.resumes else rounds
      if not has_taken:
        self._number = 0
      joins = holds and (
          not self._number or self._number < 0 and number >= self._number)
      self._coming = number if joins else 0
    is_other = holds and number > 0 and number != self.number
    if holds and not leads and not self._lead_holds:
      self._next = number  # The lead was restarted, and the job goes on.
    return (is_other,
            holds and number < 0 and
            (self._coming or self._number) not in (0, number))

  def check(self, address, state):
    """Raises an error if another job has the servers."""
    # A lead without a center was restarted: workers then restore it.
    if (self._lead_holds and (self._coming or self._number) > 0 and
        state.of_other_job):
      raise tf.errors.InvalidArgumentError(None, None, (
          f"server {address} must hold a center of this worker's job, got "
          f"round {state.place[0]} of another job of the same name: all "
          "workers of a job must have the same servers, and another job needs "
          "another name."))
