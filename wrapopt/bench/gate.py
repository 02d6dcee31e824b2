"""The staleness gate: the cost of an admitted and of a dropped step.

Momentum steps with given gradients, in a v1 session on float32 resource
variables. Compares `wrapopt.DropStaleGradientOptimizer` with

  ungated, one op        the op of the gate's step, without a gate
  ungated, stock         MomentumOptimizer
  tf.cond around stock   the same after a comparison of steps, as in 1.15

Admitted and dropped steps alternate. The benchmark checks that admitted steps
change the variables correctly and dropped steps do not change them. The cost of
a dropped step must not depend on the size of the variables, and only a little
on their number.

With --cluster, it measures the gate of Keras in a cluster instead:
wrapopt/bench/gate_cluster.py.
"""

import contextlib
import gc
import statistics

import numpy as np
import tensorflow as tf

from wrapopt._v1 import _fused
from wrapopt._v1 import _step
from wrapopt.bench import gate_cluster
from wrapopt.bench import harness
from wrapopt.drop_stale_gradient import DropStaleGradientOptimizer

_RATE, _MOMENTUM = 1e-3, 0.9
_UNGATED = "ungated, one op"
_STOCK = "ungated, stock"
_COND = "tf.cond around stock, admitted"


def add_arguments(parser):
  harness.add_arguments(parser)
  parser.add_argument(
      "--cluster", action="store_true",
      help="instead, steps of Keras that a coordinator schedules")
  parser.add_argument(
      "--workers", nargs="+", type=int, metavar="N",
      help="with --cluster: instead of the sets, three kinds of steps of N "
      "workers that race, for each N")


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  if options.cluster:
    return gate_cluster.run(options)
  return [result for name in options.sets
          for result in measure(name, harness.VARIABLE_SETS[name],
                                harness.rounds(options))]


def measure(name, shapes, n_rounds):
  """Compares all contenders on one set of variables and prints a table.

  Args:
    name: The name of the set.
    shapes: The shapes of its variables.
    n_rounds: The number of turns of each contender.

  Returns:
    A list of dicts, one for each row of the table.
  """
  session, contenders, place = _in_session(shapes)
  with contextlib.closing(session):
    seconds = harness.alternate(contenders, n_rounds, name, places=[place])
  del contenders, place
  gc.collect()  # Free the memory for the next set.
  results = [{
      "set": name,
      "contender": contender,
      "milliseconds": 1e3 * statistics.median(times),
      "spread": harness.spread(times),
      # The ratio of times, as the median of the rounds.
      "of_ungated": harness.speedup(seconds[_UNGATED], times),
      "of_stock": harness.speedup(seconds[_STOCK], times),
      "of_cond": harness.speedup(seconds[_COND], times),
      "rounds": n_rounds,
  } for contender, times in seconds.items()]
  numbers = sum(harness.sizes(shapes))
  print(f"\n{name}: {len(shapes)} variables, {numbers:,} numbers")
  print(harness.table(
      ("", "ms", "+-", "x ungated", "x stock", "x tf.cond"),
      [(r["contender"], f"{r['milliseconds']:.3f}", f"{r['spread']:.0%}",
        f"{r['of_ungated']:.3f}", f"{r['of_stock']:.3f}",
        f"{r['of_cond']:.3f}") for r in results]),
        flush=True)
  return results


def _in_session(shapes):
  """The session, {name: function that steps once}, and one for new arrays."""
  tf1 = tf.compat.v1
  graph = tf.Graph()
  with graph.as_default(), tf.device("/cpu:0"):
    def variables(name):
      return [tf1.get_variable(f"{name}{i}", use_resource=True,
                               trainable=False,
                               initializer=tf.random.uniform(shape))
              for i, shape in enumerate(shapes)]

    weights, gradients = variables("w"), variables("g")
    step = tf1.train.get_or_create_global_step()
    inner = tf1.train.MomentumOptimizer(_RATE, _MOMENTUM)
    pairs = [(g.read_value(), v) for g, v in zip(gradients, weights)]

    def gated(limit):
      opt = DropStaleGradientOptimizer(inner, tf.constant(limit, tf.int64))
      with opt.record_step(step):
        return opt.apply_gradients(pairs, step).op

    def compared(limit):
      recorded = step + 0

      def admitted():
        with tf.control_dependencies([inner.apply_gradients(pairs, step)]):
          return tf.constant(0.0)

      with tf.control_dependencies([recorded]):
        return tf.cond(step - recorded <= limit, admitted,
                       lambda: tf.constant(1.0)).op

    trains = {
        _UNGATED: _fused.apply_gradients(
            inner, _fused.rule_of(inner), _step.Step(pairs, step)),
        "gated, admitted": gated(10**9),
        _STOCK: inner.apply_gradients(pairs, step),
        _COND: compared(10**9),
        "gated, dropped": gated(-1),
        "tf.cond around stock, dropped": compared(-1),
    }
    momenta = [inner.get_slot(v, "momentum") for v in weights]
    state = [_sample(x) for x in (weights, momenta, gradients)]
    init = tf1.global_variables_initializer()
  session = tf1.Session(graph=graph)
  contenders = {name: session.make_callable(train)
                for name, train in trains.items()}

  def place():
    session.run(init)

  place()
  check_all(contenders, lambda: session.run(state))
  return session, contenders, place


def _sample(variables):
  """A sample of the numbers of each variable."""
  return tf.concat(
      [tf.reshape(v, [-1])[::max(1, v.shape.num_elements() // 100)]
       for v in variables], axis=0)


def check_all(contenders, state):
  """Raises an error unless each contender makes the right step.

  Args:
    contenders: {name: function that steps once}.
    state: A function that returns weights, momenta and gradients.
  """
  for name, step in contenders.items():
    before = [np.array(x, np.float64) for x in state()]
    step()
    after = state()
    momenta = _MOMENTUM * before[1] + before[2]
    expected = (before[:2] if name.endswith("dropped")
                else [before[0] - _RATE * momenta, momenta])
    for what, got, want in zip(("weights", "momenta"), after, expected):
      if not np.allclose(got, want, rtol=0, atol=1e-5):
        raise AssertionError(f"{name}: {what} are off by "
                             f"{np.abs(got - want).max():.3g} after one step.")
