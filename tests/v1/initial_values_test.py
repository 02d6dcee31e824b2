"""Variables that start from a file: averages start where they do."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import session_of
import wrapopt

tf1 = tf.compat.v1
TABLE = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
# The rows of the new vocabulary. The third word is unknown: its row is 0.
NEW_ROWS = np.float32([TABLE[3], TABLE[2], [0, 0], TABLE[0]])


def sgd():
  return tf1.train.GradientDescentOptimizer(0.25)


def moving(decay=0.5, **kwargs):
  return wrapopt.MovingAverageOptimizer(sgd(), decay, **kwargs)


WRAPPERS = {
    "moving": moving,
    "several": lambda: moving([0.5, wrapopt.PowerDecay(0.1)], fused=False),
    "bema": lambda: moving(wrapopt.BEMA(2)),
    "schedule_free": lambda: wrapopt.ScheduleFreeOptimizer(sgd()),
    "primal_average": lambda: wrapopt.PrimalAverageOptimizer(sgd()),
    "gate": lambda: wrapopt.DropStaleGradientOptimizer(moving(), 10),
    "shards": lambda: wrapopt.CrossShardOptimizer(moving()),
    "compensated": lambda: wrapopt.DropStaleGradientOptimizer(
        sgd(), 10, policy=wrapopt.DelayCompensation()),
    "lazy_adam": lambda: wrapopt.LazyAdamOptimizer(0.1),
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
  """The path of a file with values, beside vocabularies.

  `TABLE` is "table", "half" and "average" there. The file of the same path with
  "-whole" is that of a model of 1.15.
  """
  folder = tmp_path_factory.mktemp("pretrained")
  (folder / "old").write_text("a\nb\nc\nd\n")
  (folder / "new").write_text("d\nc\nx\na\n")
  with tf.Graph().as_default():
    tf1.get_variable("table", initializer=TABLE)
    tf1.get_variable("half", initializer=TABLE.astype(np.float16))
    tf1.get_variable("average", initializer=TABLE)
    tf1.get_variable("table/ExponentialMovingAverage", initializer=3 * TABLE)
    tf1.train.create_global_step()
    variables = {v.op.name: v for v in tf1.global_variables()}
    with session_of() as session:
      tf1.train.Saver(variables).save(
          session, str(folder / "model-whole"), write_meta_graph=False)
      return tf1.train.Saver(
          {x: variables[x] for x in ("table", "half", "average")}).save(
              session, str(folder / "model"), write_meta_graph=False)


def by_variable(path, variable):
  parts = variable if isinstance(variable, tf.Variable) else list(variable)
  tf1.train.init_from_checkpoint(path, {"table": parts})


def by_name(path, variable):
  del variable
  tf1.train.init_from_checkpoint(path, {"table": "table"})


def by_warm_start(path, variable):
  del variable
  tf1.train.warm_start(path)


def by_vocabulary(path, variable):
  del variable
  folder = path.rpartition("/")[0]
  tf1.train.warm_start(path, "table", {"table": tf1.train.VocabInfo(
      f"{folder}/new", 4, 0, f"{folder}/old")})


def table(is_partitioned=False, dtype=tf.float32, name="table"):
  partitioner = tf1.fixed_size_partitioner(2) if is_partitioned else None
  return tf1.get_variable(
      name, [4, 2], dtype, tf1.random_normal_initializer(),
      partitioner=partitioner)


def minimized(opt, variable, is_sparse=False):
  step = tf1.train.get_or_create_global_step()
  with (opt.record_step(step) if hasattr(opt, "record_step")
        else contextlib.nullcontext()):
    x = (tf.nn.embedding_lookup(variable, [0, 2]) if is_sparse
         else tf.convert_to_tensor(variable))
    loss = tf.reduce_sum(tf.square(x))
  return opt.minimize(loss, step)


def assert_half_way(got, a, b):
  """Two roundings, of numbers below 32."""
  np.testing.assert_allclose(got, (a + b) / 2, rtol=0, atol=2 * 32 * 2**-24)


def averaging(opt):
  """The optimizer that keeps averages: `opt`, its inner optimizer, or None."""
  inner = getattr(opt, "inner_optimizer", None)
  return next((o for o in (opt, inner) if hasattr(o, "average")), None)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("load, is_partitioned", [
    (by_name, False), (by_vocabulary, False), (by_warm_start, False),
    (by_variable, True), (by_vocabulary, True)],
    ids=["name", "vocabulary", "warm_start", "parts", "vocabulary_parts"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("ignore:Each step updates all rows")
def test_averages_start_at_values_of_a_file(
    name, kind, is_sparse, is_partitioned, load, is_first, pretrained,
    tmp_path):
  """Whether the file is named before or after the step is made."""
  want = NEW_ROWS if load is by_vocabulary else TABLE
  tf1.set_random_seed(1)
  variable = table(is_partitioned)
  parts = list(variable) if is_partitioned else [variable]
  opt = WRAPPERS[name]()
  if is_first:
    load(pretrained, variable)
  train = minimized(opt, variable, is_sparse)
  if not is_first:
    load(pretrained, variable)
  with session_of() as session:
    def values(of):
      return np.concatenate([np.array(session.run(of(v))) for v in parts])

    raw = lambda: values(tf.convert_to_tensor)
    np.testing.assert_array_equal(raw(), want)
    if averaging(opt) is None:
      session.run(train)
      return
    average = averaging(opt).average
    assert [average(v).shape for v in parts] == [v.shape for v in parts]
    assert all(s.shape.is_fully_defined() for s in opt.variables())
    np.testing.assert_array_equal(values(average), want)
    session.run(train)
    averages, weights = values(average), raw()
    with averaging(opt).averaged_weights(session):
      np.testing.assert_array_equal(raw(), averages)
    np.testing.assert_array_equal(raw(), weights)
    saver = averaging(opt).swapping_saver()
    path = saver.save(session, str(tmp_path / "model"))
    saver.restore(session, path)
    np.testing.assert_array_equal(raw(), weights)
    session.run(train)


def test_converted_averages_are_put_in_place(kind, pretrained):
  """An average of another dtype is assigned, also in a finalized graph."""
  graph = tf1.get_default_graph()
  half = table(dtype=tf.float16, name="half")
  tf1.train.init_from_checkpoint(pretrained, {"half": half})
  opt = moving(shadow_dtype=tf.float32)
  train = minimized(opt, half)
  with session_of() as session:
    graph.finalize()
    session.run(train)
    average, weights = session.run([opt.average(half), half])
    np.testing.assert_array_equal(average, 0.75 * TABLE)
    with opt.averaged_weights(session):
      np.testing.assert_array_equal(session.run(half), average)
    np.testing.assert_array_equal(session.run(half), weights)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_averages_of_replicas(is_first, pretrained):
  with graph_of("resource"):
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
      variable = table()
      opt = moving()
      if is_first:
        by_name(pretrained, variable)
      train = strategy.run(lambda: opt.apply_gradients(
          [(tf.ones([4, 2]), variable)]))
      if not is_first:
        by_name(pretrained, variable)
      with session_of(device_count={"CPU": 2}) as session:
        [average] = opt.averages()
        assert average.shape == [4, 2]
        for v in (*variable.values, *average.values):
          np.testing.assert_array_equal(session.run(v), TABLE)
        session.run(strategy.experimental_local_results(train))


# Averages that start from a file themselves.


def by_average(path, opt, variable):
  tf1.train.init_from_checkpoint(path, {"average": opt.average(variable)})


def by_key(path, opt, variable):
  # TensorFlow's key of a slot.
  name = opt.average_name(variable)
  tf1.train.init_from_checkpoint(path, {"average": f"{name}/"})


def by_scope(path, opt, variable):
  del opt, variable
  tf1.train.init_from_checkpoint(f"{path}-whole", {"/": "/"})


def by_list(path, opt, variable):
  tf1.train.warm_start(path, [opt.average(variable)], None,
                       {opt.average_name(variable): "average"})


@pytest.mark.parametrize("load", [by_average, by_key, by_scope, by_list])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.filterwarnings("ignore:Each step updates all rows")
def test_an_initializer_of_the_averages_own(kind, is_sparse, load, pretrained):
  variable = table()
  opt = moving()
  train = minimized(opt, variable, is_sparse)
  average = opt.average(variable)
  assert opt.is_lazy(variable) == (is_sparse and kind == "resource")
  load(pretrained, opt, variable)
  with session_of() as session:
    values = lambda: np.array(session.run([variable, average]))
    raw, got = values()
    np.testing.assert_array_equal(got, 3 * TABLE if load is by_scope
                                  else TABLE)
    assert (load is by_scope) == np.array_equal(raw, TABLE)
    session.run(train)
    raw, now = values()
    # A step has touched rows 0 and 2, and halved them.
    assert_half_way(now, raw, got)


def test_parts_of_lagging_averages_start_from_a_file(pretrained):
  with graph_of("resource"):
    variable = table(is_partitioned=True)
    opt = moving()
    minimized(opt, variable, is_sparse=True)
    tf1.train.init_from_checkpoint(pretrained,
                                   {"average": opt.average(variable)})
    with session_of() as session:
      np.testing.assert_array_equal(
          np.concatenate(session.run(opt.averages())), TABLE)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.filterwarnings("ignore:Each step updates all rows")
def test_averages_are_loaded(kind, is_sparse):
  """By `load` of a variable, which needs no op in a finalized graph."""
  graph = tf1.get_default_graph()
  variable = table()
  opt = moving()
  train = minimized(opt, variable, is_sparse)
  average = opt.average(variable)
  with pytest.raises(ValueError, match="default session"):
    average.load(TABLE)
  with session_of() as session:
    graph.finalize()
    session.run(train)
    average.load(TABLE, session)
    np.testing.assert_array_equal(session.run(average), TABLE)
    with session.as_default():
      average.load(2 * TABLE)
    raw = session.run(variable)
    session.run(train)
    now, raw = session.run([average, variable])
    assert_half_way(now, raw, 2 * TABLE)


def test_a_lagging_average_has_no_handle():
  with graph_of("resource"):
    variable = table()
    opt = moving()
    minimized(opt, variable, is_sparse=True)
    average = opt.average(variable)
    assert not resource_variable_ops.is_resource_variable(average)
    assert not hasattr(average, "handle")


def test_averages_keep_following_their_variables(kind, pretrained):
  """Also after the initializers were taken, and in a finalized graph."""
  graph = tf1.get_default_graph()
  variable = table()
  opt = moving()
  minimized(opt, variable)
  session_of().close()
  by_name(pretrained, variable)
  double = tf1.assign(variable, 2 * TABLE).op
  with session_of() as session:
    graph.finalize()
    np.testing.assert_array_equal(session.run(opt.average(variable)), TABLE)
    session.run(double)
    opt.seed_averages(session)
    np.testing.assert_array_equal(
        session.run(opt.average(variable)), 2 * TABLE)


def test_an_initializer_that_is_not_known(kind):
  variable = table()
  variable._initializer_op = tf.group(variable.initializer)
  with pytest.raises(NotImplementedError, match="The initializer of "
                     "'table:0' must be .* that assigns a tensor, got .*NoOp"
                     ".* seed_averages"):
    minimized(moving(), variable)


def averaged(getter, global_step, loss):
  opt = wrapopt.ModelAverageOptimizer(sgd(), 1, True, getter, 100)
  return opt.minimize(loss(), global_step), opt.make_session_run_hook


def elastic(getter, global_step, loss):
  opt = wrapopt.ElasticAverageOptimizer(sgd(), 1, getter, 100)
  return (opt.minimize(loss(), global_step),
          lambda: opt.make_session_run_hook(True, 0))


GETTERS = {averaged: wrapopt.ModelAverageCustomGetter,
           elastic: wrapopt.ElasticAverageCustomGetter}


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("load, is_partitioned", [
    (by_name, False), (by_warm_start, False), (by_vocabulary, True)])
@pytest.mark.parametrize("has_own_init_op", [False, True])
@pytest.mark.parametrize("make", GETTERS)
def test_centers_start_at_values_of_a_file(
    kind, make, has_own_init_op, load, is_partitioned, is_first, pretrained):
  """Not the worker at a random center."""
  want = NEW_ROWS if load is by_vocabulary else TABLE
  getter = GETTERS[make]("/cpu:0")
  with tf1.variable_scope("", custom_getter=getter):
    variable = table(is_partitioned)
  step = tf1.train.get_or_create_global_step()
  parts = list(variable) if is_partitioned else [variable]
  copies = [getter.centers] + (
      [getter.local_centers] if make is elastic else [])
  scaffold = None
  if has_own_init_op:
    scaffold = tf1.train.Scaffold(init_op=tf1.global_variables_initializer())
  if is_first:
    load(pretrained, variable)
  train, make_hook = make(
      getter, step, lambda: tf.reduce_sum(tf.convert_to_tensor(variable)))
  if not is_first:
    load(pretrained, variable)
  with tf1.train.MonitoredTrainingSession(
      hooks=[make_hook()], scaffold=scaffold) as session:
    for of in (lambda v: v, *(copy.__getitem__ for copy in copies)):
      np.testing.assert_array_equal(
          np.concatenate(session.run([of(v) for v in parts])), want)
    session.run(train)


@pytest.mark.parametrize("make", GETTERS)
def test_a_center_with_an_initializer_of_its_own(kind, make, pretrained):
  getter = GETTERS[make]("/cpu:0")
  with tf1.variable_scope("", custom_getter=getter):
    variable = table()
  center = getter.centers[variable]
  tf1.train.init_from_checkpoint(pretrained, {"table": center})
  variable._initializer_op = variable.assign(2 * TABLE).op
  step = tf1.train.get_or_create_global_step()
  _, make_hook = make(getter, step, lambda: tf.reduce_sum(variable))
  with tf1.train.MonitoredTrainingSession(hooks=[make_hook()]) as session:
    for v in (variable, center):
      np.testing.assert_array_equal(session.run(v), TABLE)
