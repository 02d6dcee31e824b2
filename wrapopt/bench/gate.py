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

import tensorflow as tf

from wrapopt._v1 import _fused
from wrapopt._v1 import _step
from wrapopt.bench import gate_cluster
from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt.drop_stale_gradient import DropStaleGradientOptimizer

_RATE, _MOMENTUM = 1e-3, 0.9
_UNGATED = "ungated, one op"
_STOCK = "ungated, stock"
_COND = "tf.cond around stock, admitted"


def add_arguments(parser):
  harness.add_sets(parser)
  parser.add_argument(
      "--cluster", action="store_true",
      help="instead, steps of Keras that a coordinator schedules")
  parser.add_argument(
      "--workers", nargs="+", type=int, metavar="N",
      help="with --cluster: instead of the sets, three kinds of steps of N "
      "workers that race, for each N")


def contests(options):
  if options.cluster:
    yield from gate_cluster.contests(options)
    return
  for name, shapes in harness.chosen_sets(options):
    contest = harness.Contest(
        sets.described(name, shapes), {"set": name},
        peers={"x_ungated": _UNGATED, "x_stock": _STOCK, "x_cond": _COND},
        expected=expected)
    contest.add(*harness.in_session(lambda shapes=shapes: graph(shapes)))
    yield contest


def expected(name, before, after):
  """What a step makes of weights and momenta, for `harness.check`."""
  del after
  weights, momenta = before["weights"], before["momenta"]
  if not name.endswith("dropped"):
    momenta = _MOMENTUM * momenta + before["gradients"]
    weights = weights - _RATE * momenta
  return {"weights": (weights, 1e-5), "momenta": (momenta, 1e-5)}


def graph(shapes):
  """As `harness.in_session` wants it."""
  tf1 = tf.compat.v1

  def variables(name):
    return [tf1.get_variable(f"{name}{i}", shape, use_resource=True,
                             trainable=False,
                             initializer=tf1.zeros_initializer())
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
  rows = [weights, [inner.get_slot(v, "momentum") for v in weights], gradients]
  return trains, sets.filled(rows, range(3)), dict(zip(
      ("weights", "momenta", "gradients"), map(harness.sample, rows)))
