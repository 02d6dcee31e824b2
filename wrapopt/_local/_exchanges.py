"""A worker's exchanges with servers: its fragments, one after another."""

import atexit
import functools
import itertools
import sys
import typing

import numpy as np
import tensorflow as tf

from wrapopt._gates import _staleness
from wrapopt._local import _fragments
from wrapopt._local import _interrupts


class Exchange(typing.NamedTuple):
  """A fragment's part in a round, in another thread.

  Attributes:
    fragment: The Fragment.
    steps, examples: The numbers of those whose values it sends, since the last
      round of any fragment.
    call: The `_interrupts.Call`, which returns a Report.
  """
  fragment: _fragments.Fragment
  steps: int
  examples: int
  call: typing.Any


class Exchanges:
  """Decides which values are sent, and which ones the variables get.

  Steps and examples are those since the last round of any fragment. An exchange
  that fails leaves them as they are: the next one sends their values, unless
  the servers have those of the first.

  Attributes:
    fragments: A list of Fragments.
    report: That of the last round, or None.
  """

  def __init__(self, fragments, interval, overlap_steps, worker, weight,
               local_weight, only_finite, progress):
    """See LocalTraining.

    Args:
      fragments: A list of Fragments.
      interval: The number of steps between two exchanges.
      overlap_steps, worker, weight, local_weight, only_finite, progress: As of
        `wrapopt.LocalSGD`.
    """
    self.fragments = fragments
    self.report = None
    self._interval = interval
    self._overlap_steps = overlap_steps
    self._worker = worker
    self._weight = weight
    self._local_weight = local_weight
    self._only_finite = only_finite
    self._progress = progress
    self._exchange = None  # The one in flight.

  @property
  def round(self):
    """The number of rounds that ended, of all fragments together."""
    return sum(f.round for f in self.fragments)

  def start(self, initial, saved):
    """Takes the center; `initial` becomes it if no server has one.

    Args:
      initial: The values of all variables.
      saved: For each fragment what `Member.start` takes; or None.

    Returns:
      As `restart`.
    """
    begins, values = True, iter(initial)
    for i, f in enumerate(self.fragments):
      vectors = f.layout.flatten(
          [next(values) for _ in f.variables], f.layout.center_dtypes)
      f.member.start(vectors if begins else None, saved and saved[i])
      # If another worker has begun the job, all fragments are that worker's.
      begins = begins and all(map(np.array_equal, vectors, f.member.center))
    return self._from_centers()

  def next(self, *held):
    """The index of the turn that is due.

    Args:
      *held: The `held` of each fragment.

    Returns:
      Of n fragments: 0 to `restart`, 1 + i to `end` an exchange of fragment i,
      1 + n + i to `begin` it.
    """
    if self._exchange:
      return np.int32(1 + self._exchange.fragment.index)
    if any(round_ != f.round for round_, f in zip(held, self.fragments)):
      return np.int32(0)
    # The first one with the fewest rounds. So no two workers wait in rounds of
    # different fragments for each other, also if one has missed some rounds.
    f = min(self.fragments, key=lambda f: f.round)
    return np.int32(1 + f.index + (
        len(self.fragments) if self._overlap_steps else 0))

  def begin(self, f, steps, examples, _, *values):
    """Sends the values of a fragment, in another thread.

    Returns:
      The numbers of steps and examples, and that of steps at which the next
      turn is due.
    """
    call = _interrupts.Call(self._sync(f, steps, examples, values))
    # Python must not end while the thread is in TensorFlow.
    atexit.register(call.stop)
    self._exchange = Exchange(f, int(steps), int(examples), call)
    return [steps, examples, steps + self._overlap_steps]

  def end(self, f, steps, examples, _, __, *values):
    """Sends the values of a fragment unless they are sent, and gets the center.

    Returns:
      As `begin`, then the round of the center and new values of the variables.
    """
    if self._exchange:
      _, sent, sent_examples, _ = self._exchange
      report = self._conclude()
    else:
      sent, sent_examples = int(steps), int(examples)
      report = self._sync(f, steps, examples, values)()
    self._tell(f, report)
    for other in self.fragments:
      other.steps += sent
      other.examples += sent_examples
    f.steps = f.examples = 0
    # A worker that missed the round has nothing to mix in.
    return [steps - sent, examples - sent_examples, np.int64(self._interval),
            np.int64(f.round),
            *self._from_center(f, values if report.counted else None)]

  def restart(self, *_):
    """Takes the center, whatever the worker has done.

    Returns:
      As `begin`, then the round of each fragment and the values of all
      variables.
    """
    if self._exchange:
      self._conclude()
    for f in self.fragments:
      f.member.start(None)
    return self._from_centers()

  def _from_centers(self):
    for f in self.fragments:
      f.steps = f.examples = 0
    return [np.int64(0), np.int64(0), np.int64(self._interval),
            *(np.int64(f.round) for f in self.fragments),
            *itertools.chain(*map(self._from_center, self.fragments))]

  def wait(self):
    """Waits for an exchange in flight, which the step that is due merges."""
    if self._exchange:
      self._exchange.call.wait()

  def restore(self, saved):
    """The servers take a center, unless they have a later one."""
    self.wait()
    self._forget()
    for f, of_fragment in zip(self.fragments, saved):
      f.member.restore(*of_fragment)

  def are_current(self, held):
    """Whether no round has ended since this worker took each center.

    Args:
      held: The `held` of each fragment.
    """
    return all(
        round_ == f.round and f.member.is_current()
        for round_, f in zip(held, self.fragments)
        if not self._exchange or f is not self._exchange.fragment)

  def leave(self):
    """Ends an exchange in flight, then lets rounds go on without this worker.
    """
    try:
      if self._exchange:
        self._tell(self._exchange.fragment, self._conclude())
    finally:
      for f in self.fragments:
        f.member.leave()

  def close(self):
    if self._exchange:
      self._exchange.call.stop()
      self._forget()
    for f in self.fragments:
      f.member.close()

  def _sync(self, f, steps, examples, values):
    """A function that takes part in a fragment's round: it returns a Report."""
    weight = {"equal": 1, "steps": f.steps + int(steps),
              "examples": f.examples + int(examples)}[self._weight]
    if weight <= 0:
      raise ValueError("`examples` must be more than 0 in a round, got "
                       f"{weight}.")
    return functools.partial(
        self._take_part, f, f.layout.flatten(values, f.layout.dtypes),
        float(weight))

  def _take_part(self, f, vectors, weight):
    if bad := self._not_finite(f, f.layout.split(vectors)):
      vectors = None
      tf.get_logger().warning(
          "The values of worker '%s' do not count in round %d, since they are "
          "not finite, '%s' for one. It takes the center. If this goes on, the "
          "state of its optimizer may not be finite either: restart the "
          "worker.", self._worker, f.round, bad)
    return f.member.sync(vectors, weight)

  def _conclude(self):
    """The Report of the exchange in flight, when it is over."""
    call = self._exchange.call
    call.wait()  # Ctrl-C ends the wait, and not the exchange.
    self._forget()
    return call.result()

  def _forget(self):
    if self._exchange:
      atexit.unregister(self._exchange.call.stop)
      self._exchange = None

  def _tell(self, f, report):
    """Notes and tells what became of a round; an error if it had no values."""
    self.report = report = report._replace(fragment=f.index)
    scalars = self.scalars()
    if self._progress:
      print((f"fragment {f.index}, " if "rounds/fragment" in scalars else "") +
            f"round {report.round}: {len(report.workers)} workers "
            f"({', '.join(report.workers)}), {report.secs:.2f} s, "
            f"{report.sent / 1e6:.2f} MB sent, "
            f"{report.received / 1e6:.2f} MB received"
            + ("" if report.counted else f"; '{self._worker}' did not count")
            + (f"; not finite: {', '.join(report.not_finite)}"
               if report.not_finite else ""), file=sys.stderr)
    for key, value in scalars.items():
      tf.summary.write(key, tf.constant(value, tf.float32), self.round,
                       _staleness.metadata("scalars"))
    if report.not_finite and not report.workers:
      raise tf.errors.InvalidArgumentError(None, None, (
          f"No worker of round {report.round - 1} has finite values, got NaN "
          f"or infinity of {', '.join(report.not_finite)}. The center stays: "
          "reduce the learning rate, or clip gradients, and restart the "
          "workers from the center or a checkpoint."))

  def scalars(self):
    """See LocalTraining."""
    report = self.report
    if report is None:
      return {}
    return {"rounds/workers": len(report.workers),
            "rounds/seconds": report.secs,
            "rounds/bytes_sent": report.sent,
            "rounds/bytes_received": report.received,
            **({"rounds/fragment": report.fragment}
               if len(self.fragments) > 1 else {}),
            **{f"rounds/not_finite/{w}": 1 for w in report.not_finite}}

  def _from_center(self, f, local=None):
    """New values of a fragment, of the center and this worker's values."""
    values = f.layout.split(f.member.center)
    if local is not None and self._local_weight:
      values = [_mixed(c, v, self._local_weight)
                for c, v in zip(values, local)]
    with np.errstate(over="ignore"):
      values = [np.asarray(c, v.dtype.as_numpy_dtype)
                for c, v in zip(values, f.variables)]
    if bad := self._not_finite(f, values):
      raise tf.errors.InvalidArgumentError(None, None, (
          f"The center of round {f.round} must be finite in the variables' "
          f"dtypes, got NaN or infinity for '{bad}': reduce the outer learning "
          "rate or its momentum, and restore a checkpoint."))
    return values

  def _not_finite(self, f, values):
    """The name of a variable that may not have its value, None without any."""
    return self._only_finite and not_finite(f.variables, values)


def not_finite(variables, values):
  """The name of a variable whose value is not finite, None without any."""
  # A finite sum is one of finite numbers, and is the quicker look.
  with np.errstate(all="ignore"):
    return next((v.name for v, x in zip(variables, values)
                 if not (np.isfinite(x.sum()) or np.isfinite(x).all())), None)


def _mixed(center, local, weight):
  """center + weight (local - center), in one new array."""
  mixed = np.subtract(local, center, out=np.empty_like(center))
  mixed *= weight
  mixed += center
  return mixed
