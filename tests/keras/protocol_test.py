"""How a gradient goes from `apply_gradients` to the op, through the files.

A reader who follows it goes down only: from a file to those that it imports.
"""

import ast
import functools
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import wrapopt
import wrapopt.keras as wk
from wrapopt import ops

tf1 = tf.compat.v1
ROOT = os.path.dirname(wrapopt.__file__)


@functools.cache
def imported(file):
  """The files of wrapopt that a file imports."""
  with open(os.path.join(ROOT, file)) as source:
    nodes = list(ast.walk(ast.parse(source.read())))
  names = ["/".join([*node.module.split(".")[1:], *name])
           for node in nodes if isinstance(node, ast.ImportFrom) and
           node.module.startswith("wrapopt")
           for name in ([], *([x.name] for x in node.names))]
  files = [name + end for name in names for end in (".py", "/__init__.py")
           if name]
  # To import from a package says nothing of the package's own file.
  return [f for f in files if os.path.exists(os.path.join(ROOT, f)) and (
      f.endswith("ops/__init__.py") or not f.endswith("__init__.py"))]


@functools.cache
def imports(file):
  """The files of wrapopt that a file imports, directly or not."""
  found, new = set(), [file]
  while new:
    new = [f for f in imported(new.pop()) if f not in found] + new
    found.update(new)
  return found


@functools.cache
def file_of_code(code):
  # Bazel links to the files: the paths as they are, not where they lead.
  path, root = code.co_filename, ROOT + os.sep
  if not path.startswith(root):
    return None
  return path.removeprefix(root)


def file_of(frame):
  """The file of wrapopt that a frame runs, or None."""
  return file_of_code(frame.f_code)


def followed(step):
  """The way to the op that takes a step, and the calls that went up.

  Args:
    step: A function that takes the step.

  Returns:
    The files from the outermost to the one that makes the op, and a set of
    (file, file above it that it called, function).
  """
  ways, climbs = [], set()

  def event(frame, what, _):
    if what != "call":
      return
    if frame.f_code.co_name.startswith("wrapopt_apply"):
      way, at = [], frame
      while at is not None:
        file = file_of(at)
        if file and (not way or way[-1] != file):
          way.append(file)
        at = at.f_back
      ways.append(way[::-1])
    file, at = file_of(frame), frame.f_back
    if file is None:
      return
    while at is not None and file_of(at) is None:
      at = at.f_back
    caller = file_of(at) if at else None
    if caller and file != caller and (
        caller in imports(file) and file not in imports(caller)):
      climbs.add((caller, file, frame.f_code.co_name))

  sys.setprofile(event)
  try:
    step()
  finally:
    sys.setprofile(None)
  return ways, climbs


def moving(inner):
  return wrapopt.MovingAverageOptimizer(inner, 0.9)


def v1_step():
  step = tf.Variable(0, dtype=tf.int64, trainable=False)
  w = tf.Variable([1.0, 2.0])
  opt = moving(tf1.train.GradientDescentOptimizer(0.1))
  pairs = opt.compute_gradients(lambda: tf.reduce_sum(w * w), [w])
  return lambda: opt.apply_gradients(pairs, step)


def gated_step():
  step = tf.Variable(0, dtype=tf.int64, trainable=False)
  w = tf.Variable([1.0, 2.0])
  gate = wrapopt.DropStaleGradientOptimizer(
      moving(tf1.train.GradientDescentOptimizer(0.1)), 5, global_step=step)

  def take():
    # A record serves one step.
    with gate.record_step(step) as recorded:
      pass
    gate.apply_gradients([(tf.constant([1.0, 1.0]), w)], step,
                         recorded=recorded)

  return take


def keras_step():
  w = keras.Variable([1.0, 2.0])
  opt = wk.MovingAverage(keras.optimizers.SGD(0.1), 0.9)
  return lambda: opt.apply([tf.constant([1.0, 1.0])], [w])


def keras_gated_step():
  w = keras.Variable([1.0, 2.0])
  gate = wk.DropStaleGradient(keras.optimizers.SGD(0.1), 5)
  opt = wk.MovingAverage(gate, 0.9)

  def take():
    with gate.record_step():
      pass
    opt.apply([tf.constant([1.0, 1.0])], [w])

  return take


# Every step of tf.compat.v1 has the wrapper's `_take` in its middle, and a rule
# asks the gate of the step.
STEP = {"_take", "accept"}
# The hooks of a Keras wrapper, which Keras's own step lies around.
FOLLOWER = {"_averages_of", "_note_update", "_take", "inner_optimizer"}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("make, most, hooks", [
    (v1_step, 7, STEP), (gated_step, 8, STEP), (keras_step, 6, FOLLOWER),
    # `where` calls the function that it gets.
    (keras_gated_step, 8, FOLLOWER | {"_admit", "_checks", "take"})],
                         ids=["v1", "gated", "keras", "keras_gated"])
def test_a_gradient_goes_down(make, most, hooks):
  step = make()
  step()  # Makes the state.
  ways, climbs = followed(step)
  assert ways and all(way[-1] == "ops/_apply.py" for way in ways)
  assert max(map(len, ways)) <= most, ways
  assert {name for _, _, name in climbs if name != "<genexpr>"} <= hooks, climbs


def test_a_climb_is_found():
  w = keras.Variable([1.0])
  opt = wk.MovingAverage(keras.optimizers.SGD(0.1), 0.9)
  opt.build([w])
  # The state calls the wrapper that it was made with.
  _, climbs = followed(lambda: opt._store.state.save_own_variables({}))
  assert ("keras/_averages/_keras_files.py", "keras/_wrapper.py",
          "_settle") in climbs


def test_an_eager_step_finds_its_update(monkeypatch):
  made = []
  init = ops.Update.__init__
  monkeypatch.setattr(ops.Update, "__init__", lambda self, *args, **kwargs: (
      made.append(self), init(self, *args, **kwargs))[1])
  v, w = keras.Variable([1.0]), keras.Variable([1.0])
  opt = wk.MovingAverage(keras.optimizers.SGD(1.0, momentum=0.5), 0.5)
  one = tf.constant([1.0])
  for _ in range(3):
    opt.apply([one, one], [v, w])
  assert len(made) == 1
  opt.apply([one], [w])
  opt.apply([one], [w])
  assert len(made) == 2
  # A slot that somebody has replaced.
  inner = opt.inner_optimizer
  old, new = inner.momentums[0], keras.Variable([0.0])
  inner.momentums = [new, inner.momentums[1]]
  before = old.numpy(), v.numpy()
  opt.apply([one, one], [v, w])
  assert len(made) == 3
  np.testing.assert_array_equal(old, before[0])
  np.testing.assert_array_equal(new, [-1.0])
  np.testing.assert_array_equal(v, before[1] - 1.0)
