"""Native steps in the replicas of a MirroredStrategy: their copies stay equal.

Each replica takes the step on its own copies of all variables. Over hundreds of
steps with other gradients in each replica, the copies must stay the same bits,
and be those of one process that takes the steps with the sums.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicas import mirrored
import wrapopt
import wrapopt.keras as wk

K = keras.optimizers
v1 = tf.compat.v1.train
STEPS = 150


# An average of each rule that has a native op, and what changes a step.
KERAS = {
    "SGD": lambda: wk.MovingAverage(K.SGD(0.1), [0.5, 0.99]),
    "momentum": lambda: wk.MovingAverage(
        K.SGD(0.1, momentum=0.9, nesterov=True), 0.9),
    "Adam": lambda: wk.MovingAverage(K.Adam(0.01), wrapopt.PowerDecay(0.1)),
    "amsgrad": lambda: wk.MovingAverage(K.Adam(0.01, amsgrad=True), 0.9),
    "AdamW": lambda: wk.MovingAverage(K.AdamW(0.01), 0.9, update_every=3),
    "LazyAdam": lambda: wk.MovingAverage(wk.LazyAdam(0.01), 0.9),
    "Lion": lambda: wk.MovingAverage(K.Lion(0.01), 0.9, start_step=3),
    "Adagrad": lambda: wk.MovingAverage(K.Adagrad(0.1), 0.9,
                                        dynamic_decay=True),
    "RMSprop": lambda: wk.MovingAverage(
        K.RMSprop(0.01, momentum=0.5, centered=True), 0.9),
    "some": lambda: wk.MovingAverage(
        K.SGD(0.1), 0.9, variables=lambda v: v.path == "table"),
    "summed": lambda: wk.MovingAverage(K.Adam(0.01), 0.9, sum_duplicates=True),
    "clipped": lambda: wk.MovingAverage(K.Adam(0.01, clipnorm=0.1), 0.9),
    "schedule": lambda: wk.MovingAverage(K.SGD(
        K.schedules.ExponentialDecay(0.1, 10, 0.9)), 0.9),
    "SWA": lambda: wk.SWA(K.SGD(0.1), 2, 3),
    "Lookahead": lambda: wk.MovingAverage(wk.Lookahead(K.Adam(0.01), 3), 0.9),
    "PrimalAverage": lambda: wk.PrimalAverage(K.AdamW(0.01)),
    "ScheduleFree": lambda: wk.ScheduleFree(K.AdamW(0.01)),
    "ScheduleFree SGD": lambda: wk.ScheduleFree(K.SGD(0.1)),
    "loss scaling": lambda: K.LossScaleOptimizer(
        wk.MovingAverage(K.SGD(0.1), 0.9), initial_scale=4.0),
}
SHAPES = {"matrix": [3, 5], "scalar": [], "empty": [0, 2], "table": [6, 4]}


def gradients(seed, replica):
  """A gradient for each variable; the table's is sparse, a row named twice."""
  grads = [tf.random.stateless_normal(shape, (seed, 10 * i + replica))
           for i, shape in enumerate(SHAPES.values())]
  return [*grads[:-1], tf.IndexedSlices(
      grads[-1][:3], tf.stack([1, 2 + replica, 1]),
      tf.constant(SHAPES["table"]))]


def new_variables(make):
  return [make(tf.random.stateless_normal(shape, (7, i)), name)
          for i, (name, shape) in enumerate(SHAPES.items())]


def summed(seed):
  first, second = gradients(seed, 0), gradients(seed, 1)
  a, b = first.pop(), second.pop()
  return [*map(tf.add, first, second), tf.IndexedSlices(
      tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0),
      a.dense_shape)]


def state_of(opt):
  """All variables of an optimizer, of wrappers and of optimizers inside."""
  inner = opt
  while hasattr(inner, "inner_optimizer"):
    inner = inner.inner_optimizer
  wrapper = opt if hasattr(opt, "averages_of_wrappers") else (
      opt.inner_optimizer)
  return [v.value for v in inner.variables] + [
      getattr(s, "value", s) for state in wrapper.averages_of_wrappers
      for s, _ in state.pairs()]


def check_equal_copies(variables):
  """Returns their values; fails if those of the replicas differ."""
  values = []
  for v in variables:
    first, second = (x.numpy() for x in mirrored(
        ).experimental_local_results(v))
    np.testing.assert_array_equal(
        first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8))
    values.append(first)
  return values


def take_the_rest(step):
  @tf.function
  def loop():
    for seed in tf.range(20, STEPS):
      step(seed)
  loop()


@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", KERAS)
def test_copies_stay_equal(name):
  strategy = mirrored()
  new = lambda: new_variables(lambda x, n: keras.Variable(x, name=n))
  with strategy.scope():
    variables, opt = new(), KERAS[name]()
    opt.build(variables)
  lone, alone = new(), KERAS[name]()
  alone.build(lone)
  step = tf.function(lambda seed: strategy.run(
      lambda: opt.apply(gradients(
          seed, tf.distribute.get_replica_context().replica_id_in_sync_group),
                        variables)))
  one = tf.function(lambda seed: alone.apply(summed(seed), lone))
  ops = ops_of(step, tf.constant(0))
  assert any(x.startswith("Wrapopt>Apply") for x in ops), ops
  for seed in range(20):
    step(tf.constant(seed))
    one(tf.constant(seed))
  values = check_equal_copies([v.value for v in variables] + state_of(opt))
  if name != "clipped":  # Each replica clips its own gradients.
    for got, want in zip(values, [v.value for v in lone] + state_of(alone),
                         strict=True):
      # Sums of a row's gradients may be in another order.
      np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  take_the_rest(step)
  check_equal_copies([v.value for v in variables] + state_of(opt))


@pytest.mark.parametrize("wrap", [lambda opt: opt,
                                  lambda opt: wk.MovingAverage(opt, 0.9)])
def test_accumulation_is_an_error_of_keras(wrap):
  """Keras's branch that takes a step cannot reach the other replica."""
  with mirrored().scope():
    variable = keras.Variable([1.0])
    opt = wrap(K.SGD(0.1, gradient_accumulation_steps=2))
    opt.build([variable])
  with pytest.raises(RuntimeError, match="merge_call"):
    tf.function(lambda: mirrored().run(
        lambda: opt.apply([tf.ones(1)], [variable])))()


V1 = {
    "GradientDescent": lambda: wrapopt.MovingAverageOptimizer(
        v1.GradientDescentOptimizer(0.1), [0.5, 0.99]),
    "Momentum": lambda: wrapopt.MovingAverageOptimizer(
        v1.MomentumOptimizer(0.1, 0.9), 0.9, update_every=3),
    "Adam": lambda: wrapopt.MovingAverageOptimizer(
        v1.AdamOptimizer(0.01), wrapopt.PowerDecay(0.1)),
    "Adagrad": lambda: wrapopt.MovingAverageOptimizer(
        v1.AdagradOptimizer(0.1), 0.9, variables=lambda v: v.shape.rank == 2),
    "Adadelta": lambda: wrapopt.MovingAverageOptimizer(
        v1.AdadeltaOptimizer(0.1), 0.9),
    "Ftrl": lambda: wrapopt.MovingAverageOptimizer(v1.FtrlOptimizer(0.1), 0.9),
    "RMSProp": lambda: wrapopt.MovingAverageOptimizer(
        v1.RMSPropOptimizer(0.01, centered=True), 0.9),
    "LazyAdam": lambda: wrapopt.MovingAverageOptimizer(
        wrapopt.LazyAdamOptimizer(0.01), 0.9),
    "ScheduleFree": lambda: wrapopt.ScheduleFreeOptimizer(
        v1.AdamOptimizer(0.01)),
}


@pytest.mark.parametrize("name", V1)
def test_copies_stay_equal_in_v1(name):
  strategy = mirrored()
  new = lambda: new_variables(lambda x, n: tf.Variable(x, name=n))
  count = lambda: tf.Variable(0, dtype=tf.int64, trainable=False)
  with strategy.scope():
    variables, opt, number = new(), V1[name](), count()
  lone, alone, lone_number = new(), V1[name](), count()

  @tf.function
  def step(seed):
    def replica():
      grads = gradients(
          seed, tf.distribute.get_replica_context().replica_id_in_sync_group)
      opt.apply_gradients(zip(grads, variables), number)
    strategy.run(replica)

  @tf.function
  def one(seed):
    alone.apply_gradients(zip(summed(seed), lone), lone_number)

  step(tf.constant(0))
  one(tf.constant(0))
  ops = ops_of(step, tf.constant(0))
  assert any(x.startswith("Wrapopt>Apply") for x in ops), ops
  for seed in range(1, 20):
    step(tf.constant(seed))
    one(tf.constant(seed))

  def held(opt, variables, number):
    slots = [opt.get_slot(v, name) for v in variables
             for name in opt.get_slot_names()]
    return [*variables, *(s for s in slots if s is not None), number]

  for got, want in zip(
      check_equal_copies(held(opt, variables, number)),
      held(alone, lone, lone_number), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  take_the_rest(step)
  check_equal_copies(held(opt, variables, number))
  assert number.numpy() == STEPS


def ops_of(function, *args):
  """The types of all ops in the graphs of a function and of called ones."""
  graph = function.get_concrete_function(*args).graph.as_graph_def()
  return {n.op for nodes in (graph.node, *(
      f.node_def for f in graph.library.function)) for n in nodes}
