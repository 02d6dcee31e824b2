"""What averages hold in each way to train, as one table of settings.

The model is NumPy in float64, from the values after each step. Other tests have
what differs between the halves: v1/moving_average_test.py and, of Keras's
models, keras/saving_test.py and keras/evaluate_test.py.
"""

import contextlib
import typing

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import arrays
import averages
import numerics
import wrapopt

v1 = tf.compat.v1
STEPS = 13

each_way = pytest.mark.parametrize("way", averages.WAYS, ids=str)
OF_V1 = [way for way in averages.WAYS if way.half == "v1"]


def power(gamma):
  return lambda t: (1 - 1 / t)**(gamma + 1)


def number(decay, limit=lambda t: 1):
  return lambda t: min(decay, limit(t))


def rising(n):
  """The limit of a decay at a count of n."""
  return (1 + n) / (10 + n)


class Case(typing.NamedTuple):
  """Settings, and what they mean.

  Attributes:
    settings: A function of the Run that returns arguments.
    decays: For each average, its decay as a function of the update, from 1.
    every: The averages move in the steps that it divides.
    start_step: How many steps are before averaging begins.
    half: Which half alone has these settings.
    lazy: Whether rows of averages may lag behind.
    chosen: The variables that have averages; None for all.
    is_wide: Whether averages of narrow variables are float32, as in Keras.
  """
  settings: typing.Any
  decays: list
  every: int = 1
  start_step: int = 0
  half: str | None = None
  lazy: bool = True
  chosen: tuple | None = None
  is_wide: bool = False


def decays_of(*decays, **more):
  return lambda run: {"average_decay": list(decays), **more}


def chosen(run):
  return {"average_decay": 0.75,
          "variables": [run.variables[name] for name in ("w", "table")]}


POWER, HALF_LIFE = wrapopt.PowerDecay(gamma=1), wrapopt.HalfLife(steps=10)
FRACTION = wrapopt.HalfLife(fraction=0.2)

CASES = {
    "number": Case(decays_of(0.5), [number(0.5)]),
    "numbers": Case(decays_of(0.9, 0.25, 0.0, 1.0, HALF_LIFE), [
        number(x) for x in (0.9, 0.25, 0.0, 1.0, 2**-0.1)]),
    "profiles": Case(
        decays_of(POWER, HALF_LIFE, FRACTION, wrapopt.PowerDecay(gamma=0), 0.9),
        [power(1), number(2**-0.1), power(FRACTION.decay.gamma), power(0),
         number(0.9)]),
    "num_updates": Case(
        decays_of(0.9, HALF_LIFE, POWER, num_updates=3),
        [number(0.9, lambda t: rising(3)), number(2**-0.1, lambda t: rising(3)),
         power(1)]),
    "num_updates of each": Case(
        decays_of(0.25, 0.75, num_updates=8.0),
        [number(0.25), number(0.5)]),
    # A step counts itself.
    "num_updates of the step": Case(
        lambda run: dict(average_decay=[0.4, POWER], num_updates=run.count),
        [number(0.4, rising), power(1)], half="v1"),
    "num_updates by a function": Case(
        lambda run: dict(average_decay=0.9, num_updates=lambda: 10 + run.count),
        [number(0.9, lambda t: rising(10 + t))], half="v1"),
    "num_updates by a function of a number": Case(
        decays_of(0.9, num_updates=lambda: 3), [number(0.9, lambda t: 4 / 13)]),
    "dynamic_decay": Case(
        decays_of(0.4, HALF_LIFE, POWER, dynamic_decay=True),
        [number(0.4, lambda t: rising(t - 1)),
         number(2**-0.1, lambda t: rising(t - 1)), power(1)], half="keras"),
    "dynamic_decay and num_updates": Case(
        decays_of(0.9, num_updates=3, dynamic_decay=True),
        [number(0.9, lambda t: rising(min(3, t - 1)))], half="keras"),
    "start_step": Case(decays_of(0.75, POWER, start_step=3, num_updates=0),
                       [number(0.1), power(1)], start_step=3, half="keras"),
    "start_step and dynamic_decay": Case(
        decays_of(0.25, HALF_LIFE, start_step=2, dynamic_decay=True),
        [number(0.25, lambda t: rising(t - 1)),
         number(2**-0.1, lambda t: rising(t - 1))], start_step=2, half="keras"),
    "decay of a variable": Case(
        lambda run: dict(average_decay=v1.Variable(0.5, trainable=False)),
        [number(0.5)], half="v1"),
    "decay of a float64 tensor": Case(
        lambda run: dict(average_decay=tf.constant(0.5, tf.float64)),
        [number(0.5)], half="v1"),
    "decay by a function": Case(
        lambda run: dict(average_decay=lambda: tf.constant(0.5)),
        [number(0.5)], half="v1"),
    "every third": Case(
        decays_of(0.5, POWER, update_every=3), [number(0.5), power(1)],
        every=3),
    # 11 // 4 is 2.
    "every fourth, num_updates": Case(
        decays_of(0.9, POWER, update_every=4, num_updates=11),
        [number(0.9, lambda t: rising(2)), power(1)], every=4),
    "every third, num_updates of the step": Case(
        lambda run: dict(average_decay=0.9, update_every=3,
                         num_updates=run.count),
        [number(0.9, rising)], every=3, half="v1"),
    "every third, start_step": Case(
        decays_of(0.9, POWER, update_every=3, start_step=2, dynamic_decay=True),
        [number(0.9, lambda t: rising(t - 1)), power(1)], every=3,
        start_step=2, half="keras"),
    "float32": Case(decays_of(0.5, POWER, shadow_dtype=tf.float32),
                    [number(0.5), power(1)], half="v1", is_wide=True),
    "not lazy": Case(decays_of(0.5, POWER, lazy=False, update_every=2),
                     [number(0.5), power(1)], every=2, lazy=False),
    "some variables": Case(chosen, [number(0.75)], chosen=("w", "table")),
    "some variables, every third": Case(
        lambda run: {**chosen(run), "update_every": 3}, [number(0.75)], every=3,
        chosen=("w", "table")),
}
START = {"w": np.float32([1, 2]), "raw": np.float32([[3, -4]]),
         "scalar": np.array(5, np.float32), "wide": np.float64([0.5, 5]),
         "empty": np.zeros([0, 3], np.float32), "half": np.float16([0.5, -1]),
         "brain": np.array([2, 1], ml_dtypes.bfloat16),
         "table": np.float32(np.arange(12).reshape(6, 2) - 6) / 4}


def gradients_of(t, way):
  """Of step t: eighths, so that a step of sgd rounds nothing."""
  rng = np.random.default_rng(t)
  found = {name: rng.integers(-8, 9, x.shape) / 8 for name, x in START.items()}
  rows = rng.integers(0, 6, 3)
  table = rng.integers(-8, 9, [3, 2]) / 8, rows
  # XLA cannot compile the sparse steps of TensorFlow and Keras.
  if t % 4 == 2 or way.mode == "jit" and not way.one_pass:
    table = dense(table)
  return {**found, "table": table}


def dense(gradient):
  values, rows = gradient
  found = np.zeros([6, 2])
  np.add.at(found, rows, values)
  return found


def is_lazy(way, case, inner="sgd"):
  # A step of Keras's own moves all rows, and a ref variable has no other ops.
  return case.lazy and way.mode != "ref" and inner != "adam" and (
      way.one_pass or way.half == "v1" and way.mode != "jit")


def cases(*names):
  return [pytest.param(way, name, id=f"{way}-{name}")
          for name in names or CASES for way in averages.WAYS
          if CASES[name].half in (None, way.half)]


def train(run, steps):
  for t in steps:
    run.step(gradients_of(t, run.way))


@pytest.mark.by_day(10)
@pytest.mark.parametrize("way, case", cases())
def test_averages(way, case):
  case = CASES[case]
  with averages.running(way, START, case.settings) as run:
    decays = run.averaging._averages.decays
    history = {name: [] for name in START}
    found = {}
    want = dict(START)
    for t in range(STEPS):
      grads = gradients_of(t, way)
      run.step(grads)
      for name, x in zip(START, run.read(*run.variables.values())):
        g = grads[name]
        want[name] = np.asarray(want[name] - (
            dense(g) if isinstance(g, tuple) else g), START[name].dtype)
        # Also those without an average are trained as ever.
        numerics.assert_same_bits(x, want[name], name)
        history[name].append(x)
        # Not in each step: rows lag behind.
        if name != "table" or t % 5 == 4:
          found[name, t] = [run.average(name, d) for d in decays]
    for name, start in START.items():
      if case.chosen and name not in case.chosen:
        assert all(row == [None] for (n, _), row in found.items() if n == name)
        continue
      for k, decay in enumerate(case.decays):
        expected = averages.averages_of(start, history[name], decay, case.every,
                                        case.start_step)
        for (n, t), row in found.items():
          if n != name:
            continue
          assert row[k].dtype == (
              np.float32 if start.itemsize == 2 and (
                  case.is_wide or way.half == "keras") else start.dtype)
          # Narrow averages round too much to tell here.
          if row[k].itemsize > 2:
            averages.assert_close(row[k], expected[t], context=f"{name}, {t}")
    assert run.averaging.is_lazy(run.variables["table"]) == is_lazy(way, case)
    if way.half == "v1":
      counts = case.every > 1 or any(
          isinstance(d, wrapopt.PowerDecay) for d in decays)
      assert run.average_steps() == (STEPS if counts else None)


@pytest.mark.parametrize("start_step", [0, 6])
def test_dynamic_decay_counts_steps_before_the_wrapper(start_step):
  inner, w = keras.optimizers.SGD(1.0), keras.Variable([9.0])
  for _ in range(4):
    inner.apply([tf.ones(1)], [w])
  opt = wrapopt.keras.MovingAverage(
      inner, [0.9, POWER], dynamic_decay=True, start_step=start_step)
  history = [5.0]
  for _ in range(6):
    opt.apply([tf.ones(1)], [w])
    history.append(w.numpy().item())
  first = 4 if start_step == 0 else 0
  for decay, of in ((0.9, number(0.9, lambda t: rising(first + t - 1))),
                    (POWER, power(1))):
    averages.assert_close(opt.average(w, decay).numpy()[0],
                          averages.averages_of(
                              5.0, history[1:], of,
                              start_step=max(start_step - 4, 0))[-1])


@pytest.mark.by_day(2)
@pytest.mark.parametrize("inner", ["momentum", "adagrad", "adam", "lazy_adam"])
@each_way
def test_rows_of_other_optimizers(way, inner):
  """Rows lag behind if the optimizer leaves those alone that it has no gradient
  of."""
  if inner == "lazy_adam" and way.half == "keras" and not way.one_pass:
    pytest.skip("it has no step of Keras's own")
  start = {"table": START["table"]}
  with averages.running(way, start, decays_of(
      0.75, wrapopt.PowerDecay(gamma=2), update_every=3), inner) as run:
    history = []
    for t in range(STEPS):
      grads = gradients_of(t, way)
      run.step({"table": grads["table"]})
      history.append(run.value("table"))
      if t % 4 == 3:
        for decay, of in zip(run.averaging._averages.decays,
                             (number(0.75), power(2))):
          averages.assert_close(
              run.average("table", decay),
              averages.averages_of(start["table"], history, of, 3)[-1])
    moves_all = inner == "adam" or inner == "momentum" and way.half == "keras"
    assert run.averaging.is_lazy(run.variables["table"]) == (
        not moves_all and is_lazy(way, CASES["number"]))


@pytest.mark.parametrize("way", OF_V1, ids=str)
def test_an_untrained_table(way):
  """A step moves all its rows, also if other steps have let them lag behind."""
  if way.mode == "jit" and not way.one_pass:
    pytest.skip("XLA cannot compile TensorFlow's sparse step")
  start = {"table": np.zeros([3, 1], np.float32), "w": np.float32([0])}
  with averages.running(way, start, lambda run: dict(
      average_decay=0.5, variables=list(run.variables.values()))) as run:
    history = []
    for rows in ([1], None, [0], None):
      run.step({"w": [1], "table": rows and (-np.ones([1, 1]), rows)})
      history.append(run.value("table"))
    averages.assert_close(run.average("table"), averages.averages_of(
        start["table"], history, number(0.5))[-1])


# Averages in place of the weights, and files.

REFUSED = (RuntimeError, tf.errors.FailedPreconditionError)
IN_PLACE = "inside averaged_weights|is not initialized|uninitialized value"


@pytest.mark.by_day(12)
@pytest.mark.parametrize("way, case", cases(
    "numbers", "every third", "some variables, every third", "not lazy",
    "float32"))
def test_in_place(way, case):
  """Nothing trains in the block, and each bit is as it was after it."""
  case = CASES[case]
  with averages.running(way, START, case.settings) as run:
    train(run, range(4))
    decays = run.averaging._averages.decays
    of = {(name, d): run.average(name, d) for name in START for d in decays}
    state = lambda: run.state() + run.counted()
    before = state()
    values = {name: run.value(name) for name in START}
    run.finalize()
    for decay in decays:
      with run.in_place(decay):
        def check():
          for name, raw in values.items():
            average = of[name, decay]
            numerics.assert_same_bits(run.value(name), (
                raw if average is None else average).astype(raw.dtype))
            for other in decays:
              if other != decay and average is not None:
                numerics.assert_same_bits(run.average(name, other),
                                          of[name, other])
        check()
        with pytest.raises(REFUSED, match=IN_PLACE):
          train(run, [4])
        check()
      arrays.assert_same_bits(state(), before)
    train(run, [4, 5])
    run.seed()
    for name, x in START.items():
      if not case.chosen or name in case.chosen:
        for decay in decays:
          average = run.average(name, decay)
          numerics.assert_same_bits(
              average, run.value(name).astype(average.dtype))
    # A period begins when averages are seeded.
    history, seeded = [], run.value("w")
    for t in range(case.every + 1):
      train(run, [t])
      history.append(run.value("w"))
    averages.assert_close(run.average("w"), averages.averages_of(
        seeded, history, case.decays[0], case.every)[-1])


@pytest.mark.by_day(3)
@pytest.mark.parametrize("way, case, how", [
    pytest.param(*p.values, how, id=f"{p.id}-{how}")
    for p in cases("profiles", "every fourth, num_updates", "start_step",
                   "some variables, every third", "float32")
    for how in averages.files(p.values[0])])
def test_a_file_goes_on(way, case, how, tmp_path):
  """Also in the middle of a period, and while rows lag behind."""
  case = CASES[case]
  start = {name: START[name] for name in ("w", "raw", "half", "table")}

  def running(start):
    return averages.running(way, start, case.settings, "momentum")

  def check(run):
    train(run, range(6, 12))
    for got, x in zip(run.state(), want, strict=True):
      # Rows that lag behind catch up at once, or step by step.
      if got.shape == (6, 2):
        averages.assert_close(got, x)
      else:
        numerics.assert_same_bits(got, x)

  with running(start) as run:
    train(run, range(6))
    path = run.save(how, str(tmp_path / "model"))
    average = run.average("w")
    train(run, range(6, 12))
    want = run.state()
    run.restore(how, path)
    check(run)
  names = [name for name, _ in tf.train.list_variables(path)]
  assert not any("log_decays" in name for name in names)
  if way.is_graph:
    name = "w/ExponentialMovingAverage" if how == "saver" else "w"
    numerics.assert_same_bits(tf.train.load_variable(path, name), average)
    if case.chosen:
      assert sorted(names) == sorted([
          *start, "global_step", "average_steps",
          *(f"{x}/Momentum" for x in start),
          *(f"{x}/ExponentialMovingAverage" for x in case.chosen)])
  # Into an optimizer that has taken a step, and into one that has none.
  for taken in [[20]] if way.is_graph else [[20], []]:
    with running({name: x + 1 for name, x in start.items()}) as run:
      train(run, taken)
      status = run.restore(how, path)
      if taken and status is not None:
        status.assert_consumed()
      check(run)


@pytest.mark.parametrize("way", [
    way for way in averages.WAYS if way.mode == "eager"], ids=str)
def test_functions_are_called_once_in_each_step(way):
  """Also in the steps between those that move averages."""
  calls = []
  settings = {"num_updates": lambda: calls.append("number") or 100,
              "update_every": 2, "average_decay": 0.5}
  if way.half == "v1":
    settings["average_decay"] = lambda: calls.append("decay") or 0.5
  with averages.running(way, {"w": np.float32([0])},
                        lambda run: settings) as run:
    for _ in range(4):
      run.step(-1)
    assert calls.count("number") == 4
    assert calls.count("decay") == (4 if way.half == "v1" else 0)
    assert run.average("w") == 2.5


DECAYS = [lambda: wrapopt.PowerDecay(0.1), lambda: wrapopt.HalfLife(
    fraction=0.1), lambda: wrapopt.BEMA(2), lambda: 0.9]


@pytest.fixture
def checked_numerics():
  tf.debugging.enable_check_numerics()
  yield
  tf.debugging.disable_check_numerics()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("rate", [0.0, 0.125])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_numbers_in_between_are_finite_in_keras(mode, rate, checked_numerics):
  """TensorFlow refuses each NaN and infinity."""
  wk = wrapopt.keras
  sgd = lambda: keras.optimizers.SGD(rate)
  makes = [
      *(lambda d=d: wk.MovingAverage(sgd(), d()) for d in DECAYS),
      lambda: wk.MovingAverage(wk.LazyAdam(rate), wrapopt.PowerDecay(0.1)),
      lambda: wk.SWA(sgd(), 2, 1), lambda: wk.Lookahead(sgd(), 2),
      lambda: wk.ScheduleFree(sgd()),
      lambda: wk.ScheduleFree(sgd(), warmup_steps=3),
      lambda: wk.ScheduleFree(keras.optimizers.Adamax(rate, beta_1=0.0)),
      lambda: wk.PrimalAverage(keras.optimizers.Adam(rate)),
      lambda: wk.DropStaleGradient(sgd(), 2)]
  for make in makes:
    opt, table = make(), keras.Variable(np.zeros((3, 2), np.float32))
    opt.build([table])

    def take():
      with getattr(opt, "record_step", contextlib.nullcontext)():
        grad = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]),
                                tf.constant([3, 2]))
      opt.apply([grad], [table])

    step = take if mode == "eager" else tf.function(take)
    for _ in range(3):
      step()
    opt.finalize_variable_values([table])
    step()
    if hasattr(opt, "average"):
      assert np.isfinite(np.array(opt.average(table))).all()
      with opt.averaged_weights():
        assert np.isfinite(table.numpy()).all()


@pytest.mark.by_day(0)
@pytest.mark.parametrize("rate", [0.0, 0.125])
def test_numbers_in_between_are_finite_in_a_session(rate, checked_numerics):
  """TensorFlow's checks break its ref variables, so this has resources."""
  sgd = lambda: v1.train.GradientDescentOptimizer(rate)
  average = wrapopt.MovingAverageOptimizer
  makes = [
      *(lambda d=d: average(sgd(), d()) for d in DECAYS),
      lambda: average(wrapopt.LazyAdamOptimizer(rate), wrapopt.PowerDecay(0.1)),
      lambda: wrapopt.ScheduleFreeOptimizer(sgd()),
      lambda: wrapopt.PrimalAverageOptimizer(v1.train.AdamOptimizer(rate))]
  for make in makes:
    with tf.Graph().as_default(), v1.Session() as session:
      table = v1.get_variable("v", initializer=np.zeros((3, 2), np.float32),
                              use_resource=True)
      opt, step = make(), v1.train.get_or_create_global_step()
      op = opt.minimize(tf.reduce_sum(tf.gather(table, [1])), step)
      read = tf.convert_to_tensor(opt.average(table))
      session.run(v1.global_variables_initializer())
      for _ in range(3):
        session.run(op)
      assert np.isfinite(session.run(read)).all()
