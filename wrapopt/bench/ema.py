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

import contextlib
import gc

import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt.bench import harness
from wrapopt.bench.stream_limit import StreamLimit

_DECAYS = (0.999, 0.99, 0.9)
_STOCK = "ExponentialMovingAverage, v1 session"

add_arguments = harness.add_arguments


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  results = []
  for name in options.sets:
    for k in (1, len(_DECAYS)):
      results += measure(name, harness.VARIABLE_SETS[name], _DECAYS[:k],
                         harness.rounds(options))
  return results


def measure(name, shapes, decays, n_rounds):
  """Compares all contenders on one set of variables and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    decays: One decay for each average of a variable.
    n_rounds: The number of turns of each contender.

  Returns:
    A list of dicts, one for each row of the table.
  """
  sizes = harness.sizes(shapes)
  values, moved = sum(sizes), 4 * sum(sizes) * (1 + 2 * len(decays))
  limits, place_limits = _limits(shapes, len(decays))
  session, in_session, place_session = _in_session(shapes, decays)
  with contextlib.closing(session):
    in_functions, place_functions = _in_functions(shapes, decays)
    seconds = harness.alternate(
        {**limits, **in_session, **in_functions}, n_rounds,
        f"{name}, K = {len(decays)}",
        places=[place_limits, place_session, place_functions])
  # Free the memory for the next set.
  del in_session, in_functions, place_limits, place_session, place_functions
  gc.collect()

  return harness.report_passes(
      f"{name}: {len(shapes)} variables, {values:,} numbers, K = "
      f"{len(decays)}", seconds, limits, moved,
      (_STOCK, "of_stock", "x stock"),
      {"set": name, "averages": len(decays), "rounds": n_rounds})


# Each of these returns {name: function that updates once}, and a function that
# puts random numbers into new arrays, so that no two variables are equal and no
# page is a zero page.


def _limits(shapes, averages):
  limit = None

  def place():
    nonlocal limit
    limit = None  # Free the old arrays first.
    limit = StreamLimit(*harness.streams(shapes, averages))

  return {f"streaming limit, {n} thread{'s' if n > 1 else ''}":
              lambda n=n: limit.run(n)
          for n in sorted({1, harness.threads()})}, place


def _in_session(shapes, decays):
  """Also returns the session, first."""
  tf1 = tf.compat.v1
  graph = tf.Graph()
  with graph.as_default(), tf.device("/cpu:0"):
    values = [
        tf1.get_variable(f"v{i}", initializer=tf.random.uniform(shape),
                         use_resource=True)
        for i, shape in enumerate(shapes)]
    averages = [tf1.train.ExponentialMovingAverage(d, name=f"average{k}")
                for k, d in enumerate(decays)]
    stock = tf.group(*[average.apply(values) for average in averages])
    shadows = [[average.average(v) for v in values] for average in averages]
    fused = ops.ema_update(shadows, values, decays)
    state = _state(shadows, values)
    init_values = tf.group(*[v.initializer for v in values])
    init_averages = tf.group(*[s.initializer for row in shadows for s in row])
  session = tf1.Session(graph=graph)

  def place():
    # The averages begin equal to the values, and no update would change them.
    # So the values are initialized again. Separate runs, because in one run an
    # average may start at the old or the new value.
    for init in init_values, init_averages, init_values:
      session.run(init)

  contenders = {"wrapopt, v1 session": session.make_callable(fused),
                _STOCK: session.make_callable(stock)}
  place()
  check_all(contenders, decays, lambda: session.run(state))
  return session, contenders, place


def _in_functions(shapes, decays):
  with tf.device("/cpu:0"):
    values = [tf.Variable(tf.random.uniform(shape)) for shape in shapes]
    shadows = [[tf.Variable(tf.random.uniform(shape)) for shape in shapes]
               for _ in decays]

  def place():
    with tf.device("/cpu:0"):
      for v in [v for row in (values, *shadows) for v in row]:
        v.assign(tf.random.uniform(v.shape))

  def assign_sub():
    for row, decay in zip(shadows, decays):
      for shadow, value in zip(row, values):
        shadow.assign_sub((1 - decay) * (shadow - value))

  contenders = {
      "wrapopt, tf.function":
          tf.function(lambda: ops.ema_update(shadows, values, decays)),
      "assign_sub, tf.function": tf.function(assign_sub),
      "assign_sub, jit_compile": tf.function(assign_sub, jit_compile=True),
  }
  check_all(contenders, decays, lambda: _state(shadows, values))
  return contenders, place


def _state(shadows, values):
  """A sample of the numbers of each variable, for check_all."""

  def sample(variables):
    return tf.concat(
        [tf.reshape(v, [-1])[::max(1, v.shape.num_elements() // 100)]
         for v in variables], axis=0)

  return [sample(row) for row in shadows], sample(values)


def check_all(contenders, decays, state):
  """Raises an error unless all contenders make the same update.

  Args:
    contenders: {name: function that updates once}.
    decays: One decay for each average.
    state: A function that returns ([average for each decay], value).
  """
  for name, update in contenders.items():
    before, value = (np.array(x, np.float64) for x in state())
    update()
    after, _ = state()
    for k, decay in enumerate(decays):
      expected = before[k] + (1 - decay) * (value - before[k])
      # TensorFlow's 1 - decay is a float32 difference; all are in [0, 1).
      if not np.allclose(after[k], expected, rtol=0, atol=1e-6):
        raise AssertionError(
            f"{name}: the average of decay {decay} is off by "
            f"{np.abs(after[k] - expected).max():.3g} after one update.")
