"""Exponential moving averages of many variables, K averages of each.

Compares `wrapopt.ops.ema_update`, in a v1 session and in a tf.function, with

  tf.compat.v1.train.ExponentialMovingAverage   in the same v1 session
  tf.function                                   of assign_sub
  tf.function(jit_compile=True)                 of assign_sub, by XLA
  the streaming limit                           native threads that only add

All of them update the same float32 resource variables; the results are checked.
GB/s counts the least traffic of a pass: each value is read, each average is
read and written. More traffic does not give a contender more GB/s.
"""

import functools

import tensorflow as tf

from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt import ops

_DECAYS = (0.999, 0.99, 0.9)
_STOCK = "ExponentialMovingAverage, v1 session"

add_arguments = harness.add_sets


def contests(options):
  for name, shapes in harness.chosen_sets(options):
    for k in (1, len(_DECAYS)):
      yield contest(name, shapes, _DECAYS[:k])


def contest(name, shapes, decays):
  """A Contest of a set of variables, with one average for each decay."""
  k = len(decays)
  made = harness.Contest(
      f"{sets.described(name, shapes)}, K = {k}",
      {"set": name, "averages": k}, peers={"of_stock": _STOCK},
      expected=functools.partial(expected, decays), streams=(shapes, 1))
  made.add(*harness.in_session(lambda: graph(shapes, decays)), written=k)
  made.add(*functions(shapes, decays), written=k)
  return made


def expected(decays, name, before, after):
  """What an update makes of the averages, as `harness.check` wants it."""
  del name, after
  # TensorFlow's 1 - decay is a float32 difference; all are in [0, 1).
  want = {}
  for decay in decays:
    average = before[f"the average of decay {decay}"]
    want[f"the average of decay {decay}"] = (
        average + (1 - decay) * (before["value"] - average), 1e-6)
  return want


def _state(values, shadows, decays):
  return {"value": harness.sample(values), **{
      f"the average of decay {decay}": harness.sample(row)
      for decay, row in zip(decays, shadows)}}


def _fill(values, shadows):
  # The averages of a value begin alike, and not as the value is.
  return sets.filled([values, *shadows], [0] + [1] * len(shadows))


def graph(shapes, decays):
  """As `harness.in_session` wants it."""
  tf1 = tf.compat.v1
  values = [tf1.get_variable(f"v{i}", shape, use_resource=True,
                             initializer=tf1.zeros_initializer())
            for i, shape in enumerate(shapes)]
  averages = [tf1.train.ExponentialMovingAverage(d, name=f"average{k}")
              for k, d in enumerate(decays)]
  stock = tf.group(*[average.apply(values) for average in averages])
  shadows = [[average.average(v) for v in values] for average in averages]
  return ({"wrapopt, v1 session": ops.ema_update(shadows, values, decays),
           _STOCK: stock}, _fill(values, shadows),
          _state(values, shadows, decays))


def functions(shapes, decays):
  """As `harness.in_session`, but in functions."""
  with tf.device("/cpu:0"):
    values, *shadows = [[tf.Variable(tf.zeros(shape)) for shape in shapes]
                        for _ in range(1 + len(decays))]

  def place():
    with tf.device("/cpu:0"):
      _fill(values, shadows)

  def assign_sub():
    for row, decay in zip(shadows, decays):
      for shadow, value in zip(row, values):
        shadow.assign_sub((1 - decay) * (shadow - value))

  return ({
      "wrapopt, tf.function":
          tf.function(lambda: ops.ema_update(shadows, values, decays)),
      "assign_sub, tf.function": tf.function(assign_sub),
      "assign_sub, jit_compile": tf.function(assign_sub, jit_compile=True),
  }, place, lambda: _state(values, shadows, decays))
