"""Steps of embedding tables, whose averages cost only the touched rows.

Compares, on whole training steps (lookup, loss, gradient, update) of one table,

  plain             the optimizer, without an average
  stock average     the same with `tf.train.ExponentialMovingAverage`, or with
                    Keras's own averages, `use_ema=True`
  wrapopt           `wrapopt.MovingAverageOptimizer`, or `keras.MovingAverage`
  wrapopt, K = 0    the op of wrapopt's step, without an average

in a v1 session, in a `tf.function`, and in Keras with `jit_compile` off and on.
Each step has different indices: `uniform` ones, which rarely repeat, or `zipf`
ones, in which the share of the r-th row is 1 / r, as for words and products.
The steps of all contenders and the averages of all rows are checked. TensorFlow
has no LazyAdam: `plain` is then wrapopt's, which is also its K = 0.

Then the time of the catch-up of all rows of an average, compared with the
streaming limit: native threads that only add, over the bytes of the value and
the average.
"""

import contextlib
import gc
import itertools
import statistics
import typing

import keras
import numpy as np
import tensorflow as tf

from wrapopt import ops
from wrapopt._v1 import _fused
from wrapopt._v1 import _step
from wrapopt.bench import harness
from wrapopt.bench.stream_limit import StreamLimit
from wrapopt.lazy_adam import LazyAdamOptimizer
from wrapopt.moving_average import MovingAverageOptimizer

_DECAY = 0.99
_WIDTH = 64
# The loss is a mean, and a row in every tenth sample must not diverge.
_RATE = 4.0
_ACCUMULATOR = 0.1
_ADAM_RATE = 1e-3
_PLAIN, _STOCK, _WRAPOPT, _WITHOUT = CONTENDERS = (
    "plain", "stock average", "wrapopt", "wrapopt, K = 0")

_V1 = {
    "SGD": lambda: tf.compat.v1.train.GradientDescentOptimizer(_RATE),
    "Adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(
        _RATE, initial_accumulator_value=_ACCUMULATOR),
    "LazyAdam": lambda: LazyAdamOptimizer(_ADAM_RATE),
}


def _keras_optimizer(name, **kwargs):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras

  if name == "SGD":
    return keras.optimizers.SGD(_RATE, **kwargs)
  if name == "Adagrad":
    return keras.optimizers.Adagrad(_RATE, _ACCUMULATOR, **kwargs)
  return wrapopt.keras.LazyAdam(_ADAM_RATE, **kwargs)


def _uniform(rng, rows, count):
  return rng.integers(rows, size=count, dtype=np.int32)


def _zipf(rng, rows, count):
  # The inverse of sum(1 / r), accurate but for the first ranks, scattered over
  # the table like a hash.
  ranks = np.exp(rng.random(count) * np.log(rows + 1)).astype(np.int64) - 1
  return (ranks * 2654435761 % rows).astype(np.int32)


IDS = {"uniform": _uniform, "zipf": _zipf}
_CATCH_UP, _REF = "catch-up", "session-ref"


class Problem(typing.NamedTuple):
  """What is trained."""
  rows: int
  optimizer: str
  batches: list  # Vectors of indices.
  target: np.ndarray  # One for each sample of a batch.


class Contest(typing.NamedTuple):
  """Contenders, and the variables that they train.

  Attributes:
    steps: {name: function that takes a step with a batch}.
    batches: The batches, arguments of these functions.
    assign: A function that assigns new numbers to the tables.
    read: A function that returns some rows of a contender's table, and of its
      average or None. It makes the average catch up.
    is_lazy: A function that returns whether wrapopt's average is lazy, as far
      as the variables allow it.
  """
  steps: dict
  batches: list
  assign: typing.Callable
  read: typing.Callable
  is_lazy: typing.Callable


def add_arguments(parser):
  def add(name, default, **kwargs):
    parser.add_argument(
        f"--{name}", nargs="+", default=default,
        help=f"{kwargs.pop('what')}; default {' '.join(map(str, default))}",
        **kwargs)

  add("rows", [200_000, 1_000_000, 5_000_000], type=int, metavar="N",
      what="rows of the table")
  add("indices", [512, 8192, 200_000], type=int, metavar="N",
      what="indices of a step")
  add("ids", list(IDS), choices=list(IDS), what="how often indices repeat")
  add("optimizers", ["SGD"], choices=list(_V1),
      what="the optimizers; in Keras each contender has a table and slots of "
      "its own, for 5,000,000 rows of LazyAdam 14 GB together")
  add("modes", [*(mode for mode in MODES if mode != _REF), _CATCH_UP],
      choices=[*MODES, _CATCH_UP],
      what=f"how a step is run, and the catch-up of all rows; {_REF} is a "
      "session with ref variables, whose averages move in all rows")
  parser.add_argument(
      "--quick", action="store_true",
      help="5 rounds instead of 15: for a look, not for figures")
  parser.add_argument("--json", metavar="FILE", help="where to write results")


def run(options):
  """Runs the benchmark and returns its results, one per contender."""
  n_rounds = harness.rounds(options)
  modes = [mode for mode in options.modes if mode != _CATCH_UP]
  results = []
  for optimizer, ids, rows in itertools.product(
      options.optimizers if modes else [], options.ids, options.rows):
    results += measure(optimizer, ids, rows, options.indices, modes, n_rounds)
  if _CATCH_UP in options.modes:
    for rows in options.rows:
      results += measure_catch_up(rows, n_rounds)
  return results


def measure(optimizer, ids, rows, counts, modes, n_rounds):
  """Compares all contenders on one table and prints a table.

  Args:
    optimizer: Its name.
    ids: How the indices are distributed: a name.
    rows: The number of rows of the table.
    counts: Numbers of indices of a step.
    modes: Names of modes.
    n_rounds: The number of turns of each contender.

  Returns:
    A list of dicts, one for each number of indices, mode and contender.
  """
  results = []
  for count, mode in itertools.product(counts, modes):
    problem = make_problem(rows, count, ids, optimizer)
    with MODES[mode](problem) as contest:
      check(problem, contest)
      harness.wait_for_huge_pages()
      batches = itertools.cycle(contest.batches)
      seconds = harness.alternate(
          {name: lambda step=step: step(next(batches))
           for name, step in contest.steps.items()}, n_rounds,
          f"{optimizer}, {rows:,} rows, {count:,} indices, {mode}")
    del contest, batches  # Free the memory for the next contest.
    keras.utils.clear_session()
    gc.collect()
    results += [{
        "optimizer": optimizer,
        "ids": ids,
        "rows": rows,
        "indices": count,
        "mode": mode,
        "contender": name,
        "milliseconds": 1e3 * statistics.median(times),
        "spread": harness.spread(times),
        # The ratio of times, as the median of the rounds.
        "x_plain": harness.speedup(seconds[_PLAIN], times),
        "x_without": (harness.speedup(seconds[_WITHOUT], times)
                      if _WITHOUT in seconds else None),
        "rounds": n_rounds,
    } for name, times in seconds.items()]

  print(f"\n{optimizer}, {ids}, {rows:,} x {_WIDTH}: milliseconds of a step, "
        "and how many times as long as without an average")
  print(harness.table(
      ("indices, mode", "plain", "stock average", "x", "wrapopt", "x",
       "K = 0", "x"),
      [_line(results, count, mode) for count in counts for mode in modes]),
        flush=True)
  return results


def _line(results, count, mode):
  of = {r["contender"]: r for r in results
        if (r["indices"], r["mode"]) == (count, mode)}
  ms = lambda name: f"{of[name]['milliseconds']:.3f}" if name in of else ""
  ratio = lambda name, by="x_plain": (
      f"{of[name][by]:.2f}" if of[name][by] is not None else "")
  return (f"{count:,}, {mode}", ms(_PLAIN), ms(_STOCK), ratio(_STOCK),
          ms(_WRAPOPT), ratio(_WRAPOPT), ms(_WITHOUT),
          ratio(_WRAPOPT, "x_without"))


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


# Each of these is a context with a Contest.

# Each contender has a table and an optimizer of its own: a step of one would
# bring the averages of another up to date.
_NAMES = (_PLAIN, _STOCK, _WRAPOPT, _WITHOUT)


def _without(inner, pairs):
  """A step of wrapopt's op, without an average."""
  return _fused.apply_gradients(inner, _fused.rule_of(inner),
                                _step.Step(pairs, None))


@contextlib.contextmanager
def _in_session(problem, use_resource=True):
  tf1 = tf.compat.v1
  graph = tf.Graph()
  trains, averages, tables = {}, {}, {}
  with graph.as_default(), tf.device("/cpu:0"):
    seed = tf1.placeholder(tf.int32, [2])
    numbers = harness.numbers((problem.rows, _WIDTH), seed)
    target = tf1.get_variable("target", initializer=problem.target,
                              use_resource=use_resource, trainable=False)
    ids = tf1.placeholder(tf.int32, problem.batches[0].shape)
    opt = MovingAverageOptimizer(_V1[problem.optimizer](), _DECAY)
    stock = tf.train.ExponentialMovingAverage(_DECAY)
    for i, name in enumerate(_NAMES):
      table = tables[name] = tf1.get_variable(
          f"table_{i}", [problem.rows, _WIDTH], use_resource=use_resource,
          initializer=tf1.zeros_initializer())
      inner = opt if name == _WRAPOPT else _V1[problem.optimizer]()
      pairs = inner.compute_gradients(
          _loss(tf.gather(table, ids), target), [table])
      trains[name] = (_without(inner, pairs) if name == _WITHOUT
                      else inner.apply_gradients(pairs))
      if name == _STOCK:
        with tf.control_dependencies([trains[name]]):
          trains[name] = stock.apply([table])
        averages[name] = stock.average(table)
    averages[_WRAPOPT] = opt.average(tables[_WRAPOPT])
    some = tf1.placeholder(tf.int32, [None])
    read = {name: [tf.gather(v, some) for v in (table, averages.get(name))
                   if v is not None] for name, table in tables.items()}
    assign = [table.assign(numbers).op for table in tables.values()]
    init_tables = tf1.variables_initializer(list(tables.values()))
    init = tf1.global_variables_initializer()
  session = tf1.Session(graph=graph)
  with session:
    session.run(init_tables)  # Averages start at them.
    session.run(init)
    yield Contest(
        {name: session.make_callable(train, feed_list=[ids])
         for name, train in trains.items()}, problem.batches,
        lambda n: session.run(assign, {seed: (n, n)}),
        lambda name, rows: _pair(session.run(read[name], {some: rows})),
        lambda: opt.is_lazy(tables[_WRAPOPT]) == use_resource)


@contextlib.contextmanager
def _in_functions(problem):
  with tf.device("/cpu:0"):
    tables = {name: tf.Variable(tf.zeros([problem.rows, _WIDTH]))
              for name in _NAMES}
    target = tf.constant(problem.target)
    batches = list(map(tf.constant, problem.batches))
  inner = {name: _V1[problem.optimizer]() for name in _NAMES}
  opt = MovingAverageOptimizer(inner[_WRAPOPT], _DECAY)
  stock = tf.train.ExponentialMovingAverage(_DECAY)
  stock.apply([tables[_STOCK]])  # Makes the average.

  def with_stock(pairs):
    inner[_STOCK].apply_gradients(pairs)
    stock.apply([tables[_STOCK]])

  takes = {_PLAIN: inner[_PLAIN].apply_gradients, _STOCK: with_stock,
           _WRAPOPT: opt.apply_gradients,
           _WITHOUT: lambda pairs: _without(inner[_WITHOUT], pairs)}

  def step(name):
    table, take = tables[name], takes[name]

    def function(ids):
      with tf.GradientTape() as tape:
        loss = _loss(tf.gather(table, ids), target)
      take([(tape.gradient(loss, table), table)])
    function = tf.function(function, autograph=False)
    # TensorFlow warns of functions of one name that their calls trace.
    function.get_concrete_function(batches[0])
    return function

  def assign(n):
    for table in tables.values():
      table.assign(harness.numbers(table.shape, (n, n)))

  def read(name, rows):
    average = {_STOCK: stock, _WRAPOPT: opt}.get(name)
    return _pair([tf.gather(v, rows).numpy() for v in (
        tables[name], average and average.average(tables[name]))
                  if v is not None])

  yield Contest({name: step(name) for name in _NAMES}, batches, assign, read,
                lambda: opt.is_lazy(tables[_WRAPOPT]))


@contextlib.contextmanager
def _in_keras(problem, jit):
  # pylint: disable=g-import-not-at-top
  import wrapopt.keras

  make = lambda **kwargs: _keras_optimizer(problem.optimizer, **kwargs)
  opts = {_PLAIN: make(), _STOCK: make(use_ema=True, ema_momentum=_DECAY),
          # Keras's Adagrad would take the step itself.
          _WRAPOPT: wrapopt.keras.MovingAverage(make(), _DECAY,
                                                sum_duplicates=True)}
  target = tf.constant(problem.target)
  steps, tables = {}, {}
  for name, opt in opts.items():
    # A table for each contender: TensorFlow's sparse steps put a table into a
    # mode in which a read, such as Keras's lookup of rows, copies all of it.
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

  def assign(n):
    for table in tables.values():
      table.value.assign(harness.numbers(table.shape, (n, n)))

  def read(name, rows):
    table = tables[name]
    average = {
        _STOCK: lambda: opts[_STOCK]._model_variables_moving_average[0],
        _WRAPOPT: lambda: opts[_WRAPOPT].average(table),
    }.get(name, lambda: None)()
    # A gather from the variable itself would put it into that mode.
    return _pair([tf.gather(v.value.read_value(), rows).numpy()
                  for v in (table, average) if v is not None])

  yield Contest(
      steps, [(tf.constant(ids), target) for ids in problem.batches], assign,
      read, lambda: opts[_WRAPOPT].is_lazy(tables[_WRAPOPT]))


def _pair(arrays):
  """A table and its average, or None."""
  table, *average = arrays
  return table, average[0] if average else None


MODES = {
    "session": _in_session,
    _REF: lambda problem: _in_session(problem, use_resource=False),
    "function": _in_functions,
    "keras": lambda problem: _in_keras(problem, False),
    "keras-jit": lambda problem: _in_keras(problem, True),
}


def check(problem, contest):
  """Raises an error unless each contender makes the right step."""
  contest.assign(1)
  for step in contest.steps.values():
    step(contest.batches[0])  # Averages begin.
  touched = np.unique(problem.batches[1])[:50]
  others = np.setdiff1d(np.arange(min(problem.rows, 1000)),
                        problem.batches[1])[:50]
  rows = np.concatenate([touched, others]).astype(np.int32)
  for name in contest.steps:
    contest.read(name, rows)  # Makes averages catch up.
  contest.assign(2)
  for name, step in contest.steps.items():
    table, average = contest.read(name, rows)
    step(contest.batches[1])
    new_table, new_average = contest.read(name, rows)
    gradient = _gradient(table.astype(np.float64), rows, problem)
    moved = table.astype(np.float64) - new_table
    if problem.optimizer == "SGD":
      # TensorFlow adds a row's gradients to the table one after the other.
      _check_close(name, "the table", moved, _RATE * gradient,
                   np.sqrt(np.bincount(problem.batches[1]).max()))
    # The steps of the other contenders also depend on earlier steps.
    elif not np.array_equal(moved.any(axis=1), gradient.any(axis=1)):
      raise AssertionError(f"{name}: other rows move than those with a "
                           "gradient.")
    if average is not None:
      _check_close(name, "the average", new_average,
                   average + (1 - _DECAY) * (new_table - average))
  if not contest.is_lazy():
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


def _check_close(name, what, got, want, roundings=1):
  error = np.abs(got - want).max()
  if not error <= 2e-6 * roundings:
    raise AssertionError(f"{name}: {what} is off by {error:.3g} after one "
                         "step.")


def measure_catch_up(rows, n_rounds):
  """Compares the catch-up of all rows with the streaming limit."""
  catch_up, place = _catching_up(rows)
  limit = None

  def place_limit():
    nonlocal limit
    limit = None  # Free the old arrays first.
    limit = StreamLimit(*harness.streams([(rows, _WIDTH)], 1))

  seconds = harness.alternate(
      {_CATCH_UP: catch_up,
       "streaming limit": lambda: limit.run(harness.threads())},
      n_rounds, f"{rows:,} rows, {_CATCH_UP}", places=[place, place_limit])
  del catch_up, place, limit
  gc.collect()
  moved = 3 * 4 * rows * _WIDTH
  results = [{
      "mode": _CATCH_UP,
      "rows": rows,
      "contender": name,
      "milliseconds": 1e3 * statistics.median(times),
      "spread": harness.spread(times),
      "gigabytes_per_second": moved / statistics.median(times) / 1e9,
      "of_limit": harness.speedup(times, seconds["streaming limit"]),
      "rounds": n_rounds,
  } for name, times in seconds.items()]
  print(f"\nall rows of {rows:,} x {_WIDTH} catch up: {moved / 1e6:,.1f} MB")
  print(harness.table(
      ("", "ms", "+-", "GB/s", "of limit"),
      [(r["contender"], f"{r['milliseconds']:.3f}", f"{r['spread']:.0%}",
        f"{r['gigabytes_per_second']:.1f}", f"{r['of_limit']:.0%}")
       for r in results]), flush=True)
  return results


def _catching_up(rows):
  """A function that makes all rows catch up, and one that makes new arrays."""
  with tf.device("/cpu:0"):
    value, shadow = (tf.Variable(tf.zeros([rows, _WIDTH])) for _ in range(2))
    log_decays = tf.Variable(tf.zeros([rows + 2], tf.float64))

  @tf.function(autograph=False)
  def catch_up():
    # A step of one row, so that the others lag behind.
    ops.sparse_ema_update([shadow], [value], [log_decays], [[0]], _DECAY)
    ops.catch_up([shadow], [value], [log_decays])

  def place():
    with tf.device("/cpu:0"):
      value.assign(harness.numbers(value.shape, (1, 1)))
      shadow.assign(harness.numbers(value.shape, (2, 2)))
    catch_up()
    harness.wait_for_huge_pages()

  place()
  before, now = (v[-1].numpy().astype(np.float64) for v in (shadow, value))
  catch_up()
  _check_close(_CATCH_UP, "the average", shadow[-1].numpy(),
               before + (1 - _DECAY) * (now - before))
  return catch_up, place
