"""Steps of embedding tables, whose averages cost only the touched rows.

Compares, on whole training steps (lookup, loss, gradient, update) of one table,

  plain             the optimizer, without an average
  stock average     the same with `tf.train.ExponentialMovingAverage`, or with
                    Keras's own averages, `use_ema=True`
  wrapopt           `wrapopt.MovingAverageOptimizer`, or `keras.MovingAverage`
  wrapopt, K = 0    the op of wrapopt's step, without an average

in a v1 session, and in Keras with `jit_compile` off and on.
Each step has different indices: `uniform` ones, which rarely repeat, or `zipf`
ones, in which the share of the r-th row is 1 / r, as for words and products.
The steps of all contenders and the averages of all rows are checked. TensorFlow
has no LazyAdam: `plain` is then wrapopt's, which is also its K = 0.
"""

import functools
import itertools
import typing

import keras
import numpy as np
import tensorflow as tf

from wrapopt._v1._steps import _rules
from wrapopt._v1._steps import _step
from wrapopt.bench import harness
from wrapopt.bench import sets
from wrapopt.lazy_adam import LazyAdamOptimizer
from wrapopt.moving_average import MovingAverageOptimizer

_DECAY = 0.99
_WIDTH = 64
# The loss is a mean, and a row in every tenth sample must not diverge.
_RATE, _ADAM_RATE = 4.0, 1e-3
_PLAIN, _STOCK, _WRAPOPT, _WITHOUT = CONTENDERS = (
    "plain", "stock average", "wrapopt", "wrapopt, K = 0")

_V1 = {
    "SGD": lambda: tf.compat.v1.train.GradientDescentOptimizer(_RATE),
    "LazyAdam": lambda: LazyAdamOptimizer(_ADAM_RATE)}


def _uniform(rng, rows, count):
  return rng.integers(rows, size=count, dtype=np.int32)


def _zipf(rng, rows, count):
  # The inverse of sum(1 / r), accurate but for the first ranks, scattered over
  # the table like a hash.
  ranks = np.exp(rng.random(count) * np.log(rows + 1)).astype(np.int64) - 1
  return (ranks * 2654435761 % rows).astype(np.int32)


IDS = {"uniform": _uniform, "zipf": _zipf}


class Problem(typing.NamedTuple):
  """A table to train, its batches of indices, and its target."""
  rows: int
  optimizer: str
  batches: list  # Vectors of indices.
  target: np.ndarray  # One for each sample of a batch.


class Training(typing.NamedTuple):
  """Contenders, and the variables that they train.

  Attributes:
    steps: {name: function that takes a step with a batch}.
    batches: The batches, arguments of these functions.
    tables: {name: the table that it trains}: a step of one contender would
      bring the averages of another up to date.
    averages: {name: function that makes its average catch up and returns it}.
    run: A function that evaluates the tensors of a list that a function makes.
    is_lazy: A function that returns whether wrapopt's average is lazy.
  """
  steps: dict
  batches: list
  tables: dict
  averages: dict
  run: typing.Callable
  is_lazy: typing.Callable

  def assign(self, n):
    """Assigns new numbers to the tables."""
    self.run(lambda: [table.assign(sets.numbers(table.shape, (n, n)))
                      for table in self.tables.values()])

  def read(self, name, rows):
    """Some rows of a contender's table, and of its average if it has one."""
    # A gather from the variable itself would change how TensorFlow reads it.
    return self.run(lambda: [
        tf.gather(tf.convert_to_tensor(v), rows)
        for v in (self.tables[name], self.averages.get(name, lambda: None)())
        if v is not None])


def add_arguments(parser):
  for name, default, what in (
      ("rows", [200_000, 1_000_000, 5_000_000], "rows of the table"),
      ("indices", [512, 8192, 200_000], "indices of a step")):
    parser.add_argument(
        f"--{name}", nargs="+", default=default, type=int, metavar="N",
        help=f"{what}; default {' '.join(map(str, default))}")
  harness.add_choice(parser, "ids", IDS, what="how often indices repeat")
  harness.add_choice(
      parser, "optimizers", _V1, ["SGD"], "the optimizers; in Keras each "
      "contender has a table and slots of its own, for 5,000,000 rows of "
      "LazyAdam 14 GB together")
  harness.add_choice(parser, "modes", MODES, what="how a step is run")


def contests(options):
  for optimizer, ids, rows, count, mode in itertools.product(
      options.optimizers, options.ids, options.rows, options.indices,
      options.modes):
    yield _contest(optimizer, ids, rows, count, mode)
    keras.utils.clear_session()


def _contest(optimizer, ids, rows, count, mode):
  contest = harness.Contest(
      f"{optimizer}, {ids}, {rows:,} x {_WIDTH}",
      {"optimizer": optimizer, "ids": ids, "rows": rows, "indices": count,
       "mode": mode}, peers={"x_plain": _PLAIN, "x_without": _WITHOUT})
  problem = make_problem(rows, count, ids, optimizer)
  training = MODES[mode](problem)
  check(problem, training)
  batches = itertools.cycle(training.batches)
  contest.add({name: lambda step=step: step(next(batches))
               for name, step in training.steps.items()})
  return contest


def make_problem(rows, count, ids, optimizer):
  """A Problem of steps with `count` indices."""
  rng = np.random.default_rng(0)
  # Enough batches to evict the rows of the first before it repeats.
  batches = [IDS[ids](rng, rows, count) for _ in range(
      max(8, min(2_000_000, 4 * rows) // count))]
  return Problem(rows, optimizer, batches,
                 rng.random((count, _WIDTH), np.float32))


def _loss(looked_up, target):
  return tf.reduce_mean(
      tf.reduce_sum(tf.math.squared_difference(looked_up, target), -1))


def _of_v1(problem):
  """(function that makes the ops of a step, tables, averages, is_lazy)."""
  variable = functools.partial(tf.compat.v1.Variable, use_resource=True)
  optimizers = {name: _V1[problem.optimizer]() for name in CONTENDERS}
  ours = MovingAverageOptimizer(optimizers[_WRAPOPT], _DECAY)
  stock = tf.train.ExponentialMovingAverage(_DECAY)
  target = variable(problem.target, trainable=False)
  tables = {name: variable(lambda: tf.zeros([problem.rows, _WIDTH]))
            for name in CONTENDERS}

  def take(name, ids):
    inner, table = optimizers[name], tables[name]
    pairs = inner.compute_gradients(_loss(tf.gather(table, ids), target),
                                    [table])
    if name == _WRAPOPT:
      return ours.apply_gradients(pairs)
    if name == _WITHOUT:  # wrapopt's op, without an average.
      return _rules.apply_gradients(inner, _rules.rule_of(inner),
                                    _step.Step(pairs, None))
    done = inner.apply_gradients(pairs)
    if name == _STOCK:
      with tf.control_dependencies([done]):
        return stock.apply([table])
    return done

  return take, tables, {
      _STOCK: lambda: stock.average(tables[_STOCK]),
      _WRAPOPT: lambda: ours.average(tables[_WRAPOPT]),
  }, lambda: ours.is_lazy(tables[_WRAPOPT])


def _in_session(problem):
  tf1 = tf.compat.v1
  graph = tf.Graph()
  with graph.as_default(), tf.device("/cpu:0"):
    ids = tf1.placeholder(tf.int32, problem.batches[0].shape)
    take, tables, averages, is_lazy = _of_v1(problem)
    trains = {name: take(name, ids) for name in CONTENDERS}
    # Averages start at the tables.
    inits = [tf1.variables_initializer(list(tables.values())),
             tf1.global_variables_initializer()]
  session = tf1.Session(graph=graph)
  for init in inits:
    session.run(init)

  def run(make):
    with graph.as_default(), tf.device("/cpu:0"):
      return session.run(make())

  return Training(
      {name: session.make_callable(train, feed_list=[ids])
       for name, train in trains.items()}, problem.batches, tables, averages,
      run, is_lazy)


def _eagerly(make):
  return [x.numpy() for x in make()]


def _in_keras(problem, jit):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras

  def make(**kwargs):
    return (keras.optimizers.SGD(_RATE, **kwargs)
            if problem.optimizer == "SGD" else
            wrapopt.keras.LazyAdam(_ADAM_RATE, **kwargs))

  opts = {_PLAIN: make(), _STOCK: make(use_ema=True, ema_momentum=_DECAY),
          _WRAPOPT: wrapopt.keras.MovingAverage(make(), _DECAY)}
  target = tf.constant(problem.target)
  steps, tables = {}, {}
  for name, opt in opts.items():
    # TensorFlow's sparse steps put a table into a mode in which a read, such as
    # Keras's lookup of rows, copies all of it.
    layer = keras.layers.Embedding(problem.rows, _WIDTH,
                                   embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((), dtype="int32"), layer])
    model.compile(opt, lambda y, x: _loss(x, y), jit_compile=jit)
    opt.build(model.trainable_variables)
    # The function that `fit` calls, without an iterator.
    function = tf.function(model.train_step, jit_compile=jit,
                           reduce_retracing=True)
    steps[name] = lambda batch, function=function: function(batch)
    tables[name] = layer.embeddings
  return Training(
      steps, [(tf.constant(ids), target) for ids in problem.batches],
      {name: table.value for name, table in tables.items()}, {
          _STOCK: lambda: opts[_STOCK]._model_variables_moving_average[0],
          _WRAPOPT: lambda: opts[_WRAPOPT].average(tables[_WRAPOPT])},
      _eagerly, lambda: opts[_WRAPOPT].is_lazy(tables[_WRAPOPT]))


MODES = {
    "session": _in_session,
    "keras": lambda problem: _in_keras(problem, False),
    "keras-jit": lambda problem: _in_keras(problem, True)}


def check(problem, training):
  """Raises an error unless each contender makes the right step."""
  training.assign(1)
  for step in training.steps.values():
    step(training.batches[0])  # Averages begin.
  touched = np.unique(problem.batches[1])[:50]
  others = np.setdiff1d(np.arange(min(problem.rows, 1000)),
                        problem.batches[1])[:50]
  rows = np.concatenate([touched, others]).astype(np.int32)
  for name in training.steps:
    training.read(name, rows)  # Makes averages catch up.
  training.assign(2)
  for name, step in training.steps.items():
    table, *average = training.read(name, rows)
    step(training.batches[1])
    new_table, *new_average = training.read(name, rows)
    gradient = _gradient(table.astype(np.float64), rows, problem)
    moved = table.astype(np.float64) - new_table
    if problem.optimizer == "SGD":
      # TensorFlow adds a row's gradients to the table one after the other.
      tolerance = 2e-6 * np.sqrt(np.bincount(problem.batches[1]).max())
      harness.check_close(name, {
          "the table": (moved, _RATE * gradient, tolerance)})
    # The steps of the other contenders also depend on earlier steps.
    elif not np.array_equal(moved.any(axis=1), gradient.any(axis=1)):
      raise AssertionError(f"{name}: other rows move than those with a "
                           "gradient.")
    for was, now in zip(average, new_average):
      harness.check_close(name, {"the average": (
          now, was + (1 - _DECAY) * (new_table - was), 2e-6)})
  if not training.is_lazy():
    raise AssertionError(f"{_WRAPOPT}: the average moves in all rows.")


def _gradient(values, rows, problem):
  """The gradient of some rows of given values, in the second batch."""
  result = np.zeros_like(values)
  count = len(problem.batches[1])
  for i, row in enumerate(rows):
    of_row = problem.batches[1] == row
    result[i] = np.sum(
        2 / count * (values[i] - problem.target[of_row]), axis=0)
  return result
