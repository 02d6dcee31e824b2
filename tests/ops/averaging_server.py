"""One server's averaging rounds in a mode, for tests."""

import itertools

import numpy as np

import averaging_task
from averaging_task import FIRST
import modes
from modes import evaluate
from wrapopt._loader import ops as raw

FOREVER = float("inf")
_count = itertools.count()


class Server:
  """Rounds in one mode, whose handle each op looks up anew.

  Without other arguments, of one float32 number in a variable.
  """

  def __init__(self, mode, num_workers=2, name=None, **attributes):
    self.mode = mode
    self.name = name or f"rounds {next(_count)}"
    self._arguments = (self.name, num_workers)
    self._attributes = attributes

  @property
  def handle(self):
    return averaging_task.rounds(*self._arguments, **self._attributes)

  def run(self, op, *args, **kwargs):
    return evaluate(self.mode, lambda: raw_op(op)(self.handle, *args, **kwargs))

  @property
  def place(self):
    return tuple(self.run("state").place)

  def enter(self, worker, **kwargs):
    return evaluate(self.mode, lambda: averaging_task.enter(
        self.handle, worker, **kwargs))

  def stage(self, worker, known, *values, weight=1., count=None, first=0):
    return bool(self.run("stage", worker, known, weight,
                         len(values) if count is None else count, first,
                         [*values]))

  def restore(self, *values, place=FIRST, generation=0, job=0, count=None):
    """Begins a new generation with a center."""
    known = np.array([f"{place[0]} {place[1]} 0 0 0"], object)
    assert self.stage("a", known, *values, count=count)
    assert self.run("restore", "a", generation, place, job)

  def bring(self, worker, *values, place=FIRST, weight=1.):
    accepted, _ = evaluate(self.mode, lambda: averaging_task.bring(
        self.handle, worker, values or [[0.]], place, weight))
    return bool(accepted)

  def close(self, min_workers, place=FIRST, grace_secs=FOREVER):
    """What the lead knows of the closed round."""
    return evaluate(self.mode, lambda: averaging_task.closed(
        self.handle, min_workers, place, 30., grace_secs))

  def mean(self, known, variables, sizes=None):
    return tuple(evaluate(in_graph(self.mode), lambda: averaging_task.mean(
        self.handle, known, variables, sizes)))


def raw_op(op):
  return getattr(raw, f"wrapopt_averaging_{op}")


def in_graph(mode):
  """TensorFlow runs no op eagerly that may take refs."""
  return modes.Function() if mode.name == "eager" else mode


def opened(mode, num_workers=2, **attributes):
  server = Server(mode, num_workers, **attributes)
  assert server.run("restore", "", 0, FIRST, 0)
  return server
