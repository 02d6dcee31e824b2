"""`wrapopt.MovingAverageOptimizer`: savers, checkpoints and evaluation."""

import contextlib
import functools
import glob
import os
import re
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable

import wrapopt
from checkpoint_files import values_of
from modes import address
from modes import control_flow
from threads import in_threads
from training import GRAPH_MODES
from training import assert_same_bits
from training import descend
from training import entered
from training import exchange_op
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import moving as wrap
from training import ops_of_type
from training import session_of
from wrapopt._averages import _swap

v1 = tf.compat.v1

AVERAGE = "/ExponentialMovingAverage"


def assert_contents(path, want):
  """A checkpoint holds exactly this, and numbers equal to these."""
  got = values_of(path)
  assert got.keys() == want.keys()
  for name in want:
    np.testing.assert_array_equal(np.float64(got[name]), want[name], name)


def save_and_restore(session, saver, tmp_path, train, state):
  """The path of a file, which undoes a step."""
  before = session.run(state)
  path = saver.save(session, str(tmp_path / "model"))
  session.run(train)
  saver.restore(session, path)
  assert_same_bits(session.run(state), before)
  return path


# The swapping saver. Variables start at 0 and go up by one; decay 1/2: after a
# step a variable is 1 and its average .5, after two steps 2 and 1.25.


class Model:
  """Two variables that are averaged, one that is not, and a step counter."""

  def __init__(self, opt=None):
    self.a, self.b, self.c = (v1.get_variable(n, initializer=[0.0, 0.0])
                              for n in "abc")
    self.step = v1.train.get_or_create_global_step()
    self.opt = opt or wrap(0.5)
    # Two calls: all of their variables are swapped.
    self.train = tf.group(descend(self.opt, self.a, step=self.step),
                          descend(self.opt, self.b))

  @property
  def state(self):
    return [self.a, self.opt.average(self.a), self.b, self.opt.average(self.b),
            self.c, self.step]


SWAPPED = {"a": [0.5, 0.5], "a" + AVERAGE: [1, 1], "b": [0.5, 0.5],
           "b" + AVERAGE: [1, 1], "c": [0, 0], "global_step": 1}
# The variables of the model after its first step.
STEPPED = [[1, 1], [.5, .5], [1, 1], [.5, .5], [0, 0], 1]
PLAIN = {**SWAPPED, "a": [1, 1], "a" + AVERAGE: [0.5, 0.5], "b": [1, 1],
         "b" + AVERAGE: [0.5, 0.5]}


def test_the_file_of_a_swapping_saver(kind, tmp_path):
  model = Model()
  saver = model.opt.swapping_saver()
  assert isinstance(saver, v1.train.Saver)
  with session_of() as session:
    session.run(model.train)
    path = saver.save(session, str(tmp_path / "model"))
    assert_contents(path, SWAPPED)
    # Saving changes nothing.
    assert [x.tolist() for x in session.run(model.state)] == STEPPED
    assert_contents(v1.train.Saver().save(session, str(tmp_path / "plain")),
                    PLAIN)


def stepped(model, var_list, tmp_path):
  """The path of a file after one step."""
  saver = model.opt.swapping_saver(var_list)
  with session_of() as session:
    session.run(model.train)
    return saver.save(session, str(tmp_path / "model"))


VAR_LISTS = {
    "list": lambda m: [m.a, m.opt.average(m.a), m.c],
    "tuple": lambda m: (m.a, m.opt.average(m.a), m.c),
    "iterator": lambda m: iter([m.a, m.opt.average(m.a), m.c]),
    "generator": lambda m: (
        v for v in v1.global_variables()
        if v.op.name in ("a", "c", "a" + AVERAGE)),
    "dict": lambda m: {v.op.name: v for v in (m.a, m.opt.average(m.a), m.c)},
}


@pytest.mark.parametrize("var_list", VAR_LISTS)
def test_var_list(kind, tmp_path, var_list):
  model = Model()
  assert_contents(stepped(model, VAR_LISTS[var_list](model), tmp_path),
                  {k: SWAPPED[k] for k in ("a", "a" + AVERAGE, "c")})


def test_dict_keys_may_be_any(kind, tmp_path):
  model = Model()
  saver = model.opt.swapping_saver({
      "weights": model.a, "raw/weights": model.opt.average(model.a),
      "b": model.opt.average(model.b), "b" + AVERAGE: model.b,
      "counter": model.step})
  with session_of() as session:
    session.run(model.train)
    path = save_and_restore(session, saver, tmp_path, model.train, model.state)
    # Whatever the key, a variable is swapped with its average.
    assert_contents(path, {
        "weights": [0.5, 0.5], "raw/weights": [1, 1], "b": [1, 1],
        "b" + AVERAGE: [0.5, 0.5], "counter": 1})


def reads(variable, kind):
  """Tensors that a Saver takes for the variable that they read."""
  # pylint: disable=protected-access
  if kind == "ref":
    return [variable._ref()]
  return [variable._graph_element, variable.value()]


@pytest.mark.parametrize("which", [0, -1])
def test_a_variable_may_be_given_by_a_tensor_that_reads_it(
    kind, tmp_path, which):
  model = Model()
  given = {"a": reads(model.a, kind)[which],
           "average": reads(model.opt.average(model.a), kind)[which]}
  v1.train.Saver(given)  # Takes them.
  assert_contents(stepped(model, given, tmp_path),
                  {"a": [0.5, 0.5], "average": [1, 1]})


def test_all_global_variables_of_now(kind, tmp_path):
  model = Model()
  early = model.opt.swapping_saver()
  v1.get_variable("late", initializer=7.0)
  late = model.opt.swapping_saver()
  with session_of() as session:
    session.run(model.train)
    assert_contents(early.save(session, str(tmp_path / "early")), SWAPPED)
    assert_contents(late.save(session, str(tmp_path / "late")),
                    {**SWAPPED, "late": 7})


def test_saveable_objects_are_saved_too(kind, tmp_path):
  model = Model()
  table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
  fill = table.insert(["x"], tf.constant([3], tf.int64))
  assert v1.get_collection(v1.GraphKeys.SAVEABLE_OBJECTS)
  saver = model.opt.swapping_saver()
  with session_of() as session:
    session.run([model.train, fill])
    path = saver.save(session, str(tmp_path / "model"))
    got = values_of(path)
    assert SWAPPED.keys() < got.keys()
    assert got["a"].tolist() == SWAPPED["a"]


@pytest.mark.parametrize("before", [None, "list", "dict"])
def test_partitioned_variables_are_swapped_slice_by_slice(
    kind, tmp_path, before):
  def initial(shape, dtype=None, partition_info=None):
    del dtype
    rows = partition_info.var_offset[0] + np.arange(shape[0])
    return np.float32(10 * rows[:, None] + np.arange(shape[1]))

  start = np.float32(10 * np.arange(5)[:, None] + np.arange(2))
  v = v1.get_variable("v", [5, 2], initializer=initial,
                      partitioner=v1.fixed_size_partitioner(2))
  w = v1.get_variable("w", initializer=[0.0])
  opt = wrap(0.5)
  train = opt.minimize(-tf.reduce_sum(v) - tf.reduce_sum(w))
  parts, shadows = list(v), opt.average(v)
  assert len(parts) == len(shadows) == 2
  saver = opt.swapping_saver({
      None: None,
      "list": [*parts, *shadows],
      "dict": {"x": v, "x_average": shadows},
  }[before])
  name, average = {"dict": ("x", "x_average")}.get(before, ("v", "v" + AVERAGE))
  want = {name: start + 0.5, average: start + 1}
  if before is None:
    want |= {"w": [0.5], "w" + AVERAGE: [1]}
  with session_of() as session:
    session.run(train)
    path = save_and_restore(session, saver, tmp_path, train,
                            [*parts, *shadows])
    # One entry for all slices, which an unpartitioned variable restores.
    assert_contents(path, want)
    assert tf.train.load_checkpoint(path).get_variable_to_shape_map()[name] == [
        5, 2]
  with graph_of(kind):
    whole = v1.get_variable("v", [5, 2])
    with v1.Session() as session:
      v1.train.Saver({name: whole}).restore(session, path)
      assert_same_bits([session.run(whole)], [start + 0.5])


def test_arguments_of_the_saver(kind, tmp_path):
  model = Model()
  saver = model.opt.swapping_saver(
      None, "my_saver", max_to_keep=2, sharded=True, pad_step_number=True,
      restore_sequentially=True, keep_checkpoint_every_n_hours=7)
  saver_def = saver.as_saver_def()
  assert saver_def.max_to_keep == 2 and saver_def.sharded
  assert saver_def.keep_checkpoint_every_n_hours == 7
  assert saver_def.restore_op_name.startswith("my_saver/")
  assert v1.train.Saver().as_saver_def().restore_op_name.startswith("save/")
  assert model.opt.swapping_saver().as_saver_def().restore_op_name.startswith(
      "swapping_saver/")
  with session_of() as session:
    for step in range(3):
      session.run(model.train)
      path = saver.save(session, str(tmp_path / "model"), step)
    assert path == str(tmp_path / "model-00000002")
    kept = glob.glob(str(tmp_path / "model-*.index"))
    assert sorted(os.path.basename(p) for p in kept) == [
        "model-00000001.index", "model-00000002.index"]
    before = session.run(model.state)
    session.run(model.train)
    saver.restore(session, path)
    assert_same_bits(session.run(model.state), before)


def test_swapping_saver_before_a_step(kind):
  v1.get_variable("v", initializer=0.0)
  opt = wrap()
  with pytest.raises(RuntimeError, match=(
      "^Must call apply_gradients or minimize before creating the "
      "swapping_saver$")):
    opt.swapping_saver()


def test_one_of_a_pair_is_missing(kind):
  model = Model()
  for given, missing in (
      ([model.a], "a" + AVERAGE),
      ([model.a, model.b, model.opt.average(model.a)], "b" + AVERAGE),
      ([model.opt.average(model.b), model.c], "b"),
      ({"x": model.opt.average(model.a)}, "a")):
    with pytest.raises(ValueError, match=(
        f"^Variable to swap {missing} is not part of variables to save. This "
        "breaks MovingAverageOptimizer.$")):
      model.opt.swapping_saver(given)
  # Without either it is a plain Saver.
  model.opt.swapping_saver([model.c])


DECAYS = [0.5, 0.75]


@pytest.mark.parametrize("decay", [None, *DECAYS])
def test_which_of_several_decays_is_swapped(kind, tmp_path, decay):
  v = v1.get_variable("v", initializer=0.0)
  opt = wrap(DECAYS)
  train = descend(opt, v)
  saver = opt.swapping_saver(decay=decay)
  state = [v, *opt.averages()]
  first, second = "v" + AVERAGE, "v" + AVERAGE + "_0.75"
  with session_of() as session:
    session.run(train)
    assert session.run(state) == [1, 0.5, 0.25]
    path = save_and_restore(session, saver, tmp_path, train, state)
    assert_contents(path, {"v": 0.25, first: 0.5, second: 1} if decay == 0.75
                    else {"v": 0.5, first: 1, second: 0.25})


def test_the_saver_of_a_partitioned_float32_average(kind, tmp_path):
  v = v1.get_variable("v", [5], tf.bfloat16, v1.ones_initializer(),
                      partitioner=v1.fixed_size_partitioner(2))
  opt = wrap(0.75, shadow_dtype=tf.float32)
  train = descend(opt, *v)
  saver = opt.swapping_saver()
  with session_of() as session:
    session.run(train)
    path = save_and_restore(session, saver, tmp_path, train,
                            [*v, *opt.average(v)])
    assert dict(tf.train.list_variables(path)) == {
        n: [5] for n in ("v", "v" + AVERAGE, "v" + AVERAGE + "/full_precision")}
  with graph_of(kind):
    v = v1.get_variable("v", [5], tf.bfloat16)
    with v1.Session() as session:
      v1.train.Saver().restore(session, path)
      assert_same_bits([session.run(v)], [np.full(5, 1.25, ml_dtypes.bfloat16)])


def test_a_swapping_saver_eagerly(tmp_path):
  w, b = tf.Variable([0.0, 0.0], name="w"), tf.Variable(4.0, name="b")
  opt = wrap(0.5)
  descend(opt, w)
  name = opt.average_name(w)
  saver = opt.swapping_saver([w, opt.average(w), b])
  path = saver.save(None, str(tmp_path / "model"))
  assert_contents(path, {"w": [0.5, 0.5], name: [1, 1], "b": 4})
  descend(opt, w)
  saver.restore(None, path)
  assert_same_bits([w.numpy(), opt.average(w).numpy()],
                   np.float32([[1, 1], [0.5, 0.5]]))
  with opt.averaged_weights():
    with pytest.raises(RuntimeError, match=IN_PLACE):
      saver.save(None, path)
    checkpoint = tf.train.Checkpoint(opt=opt, w=w)
    with pytest.raises(RuntimeError, match="^tf.train.Checkpoint.write cannot"):
      checkpoint.write(path)
    # As export() of a model in Keras 3.12 does, which writes none of them.
    assert opt in tf.train.TrackableView(checkpoint).descendants()


def test_a_meta_graph_goes_on_training(kind, tmp_path):
  with session_of() as session:
    model = Model()
  with session_of() as session:
    session.run(model.train)
    model.opt.swapping_saver().save(session, str(tmp_path / "model"))
    session.run(model.train)
    want = session.run(model.state)
  names = [v.name for v in model.state]
  with tf.Graph().as_default() as graph, v1.Session() as session:
    saver = v1.train.import_meta_graph(str(tmp_path / "model.meta"))
    saver.restore(session, str(tmp_path / "model"))
    session.run(graph.get_operation_by_name(model.train.name))
    variables = {v.name: v for v in v1.global_variables()}
    assert_same_bits(session.run([variables[n] for n in names]), want)
    assert [v.name for v in v1.moving_average_variables()] == ["a:0", "b:0"]
    assert ops_of_type(exchange_op(kind))


# Checkpoints of 1.15: TensorFlow's own averages of ref variables.


@contextlib.contextmanager
def graph_of_1_15():
  with graph_of("ref"), control_flow(v2=False):
    yield


class Trained:
  """Two variables; subclasses have `train`, and `averages` of decay 1/2."""

  def __init__(self, inner):
    self.a, self.b = (v1.get_variable(n, initializer=[x, 0.0])
                      for n, x in (("a", 1.0), ("scope/b", 2.0)))
    self.step = v1.train.get_or_create_global_step()
    self.variables = [self.a, self.b]
    self.make(inner())
    self.state = [self.step, *self.variables, *self.averages]


class Stock(Trained):
  """The parts of which tf.contrib.opt.MovingAverageOptimizer was made."""

  def make(self, inner):
    with tf.control_dependencies([descend(inner, *self.variables,
                                          step=self.step)]):
      ema = v1.train.ExponentialMovingAverage(0.5)
      self.train = ema.apply(self.variables)
    self.averages = [ema.average(v) for v in self.variables]


class Wrapped(Trained):
  """The same by wrapopt."""

  def make(self, inner):
    self.opt = wrapopt.MovingAverageOptimizer(inner, 0.5)
    self.train = descend(self.opt, *self.variables, step=self.step)
    self.averages = self.opt.averages()


INNER = {
    "momentum": lambda: v1.train.MomentumOptimizer(1.0, 0.5),
    "adam": lambda: v1.train.AdamOptimizer(1.0),
}


@pytest.mark.parametrize("layout", ["plain", "swapped"])
@pytest.mark.parametrize("inner", INNER)
def test_a_checkpoint_of_1_15(tmp_path, inner, layout):
  with graph_of_1_15():
    stock = Stock(INNER[inner])
    names = {v.op.name: v for v in v1.global_variables()}
    if layout == "swapped":
      for v, average in zip(stock.variables, stock.averages):
        names[v.op.name], names[average.op.name] = average, v
    with session_of() as session:
      for _ in range(2):
        session.run(stock.train)
      path = v1.train.Saver(names).save(session, str(tmp_path / "model"))
      before = session.run(stock.state)
      session.run(stock.train)
      want = session.run(stock.state)

  for kind in GRAPH_MODES:
    with graph_of(kind):
      model = Wrapped(INNER[inner])
      assert {v.op.name for v in v1.global_variables()} == names.keys()
      saver = (model.opt.swapping_saver() if layout == "swapped"
               else v1.train.Saver())
      with v1.Session() as session:
        saver.restore(session, path)
        assert_same_bits(session.run(model.state), before)
        session.run(model.train)
        # Decay 1/2 loses nothing in TensorFlow's float32 either.
        assert_same_bits(session.run(model.state), want)
        # And back: it holds the names of 1.15 alone.
        assert dict(tf.train.list_variables(path)) == dict(
            tf.train.list_variables(saver.save(session, path + kind)))


# tf.train.Checkpoint.


class Eager:
  """Variables, an optimizer and a checkpoint of both."""

  def __init__(self, make_optimizer, start=1.0):
    self.w = tf.Variable([start, start], name="w")
    self.e = tf.Variable([[start], [start]], name="e")
    self.frozen = tf.Variable(start, name="frozen")
    self.opt = make_optimizer()
    self.checkpoint = tf.train.Checkpoint(
        w=self.w, e=self.e, frozen=self.frozen, opt=self.opt)

  def train(self, steps=1):
    for _ in range(steps):
      self.opt.apply_gradients([
          (tf.constant([1.0, -3.0]), self.w),
          (tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), [2, 1]),
           self.e),
          (None, self.frozen)])

  def state(self):
    # pylint: disable=protected-access
    opt = self.opt
    slots = [opt.get_slot(v, name) for name in opt.get_slot_names()
             if "Average" not in name for v in (self.w, self.e)]
    others = getattr(opt, "_optimizer", opt)._non_slot_dict
    return [x.numpy() for x in (
        self.w, self.e, self.frozen, *slots,
        *(v for _, v in sorted(others.items(), key=lambda item: item[0][0])))]

  def averages(self):
    return [self.opt.average(v, decay).numpy() for decay in (0.5, 0.75)
            for v in (self.w, self.e)]


def wrapped(inner="momentum", decays=(0.5, 0.75)):
  return lambda: wrapopt.MovingAverageOptimizer(INNER[inner](), decays)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("inner", INNER)
def test_a_checkpoint_of_the_bare_optimizer(tmp_path, inner, deferred):
  one = Eager(INNER[inner])
  one.train(2)
  path = one.checkpoint.save(str(tmp_path / "model"))
  before = one.state()
  one.train()
  two = Eager(wrapped(inner), start=8.0)
  if not deferred:
    two.train()
  status = two.checkpoint.restore(path)
  if not deferred:
    assert_same_bits(two.state(), before)
    two.opt.seed_averages()
  two.train()
  status.assert_nontrivial_match()
  status.expect_partial()
  assert_same_bits(two.state(), one.state())
  # The averages started where the weights were restored to, not at 8.
  assert_same_bits(
      two.averages()[:2],
      [np.float32(x + 0.5 * (y - x)) for x, y in zip(before, one.state()[:2])])


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("inner", INNER)
def test_the_bare_optimizer_takes_a_checkpoint(tmp_path, inner, deferred):
  one = Eager(wrapped(inner))
  one.train(2)
  path = one.checkpoint.save(str(tmp_path / "model"))
  one.train()
  two = Eager(INNER[inner], start=8.0)
  if not deferred:
    two.train()
  two.checkpoint.restore(path).expect_partial()
  two.train()
  assert_same_bits(two.state(), one.state())


# Averages of several decays are known by their decays.


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("decays", [
    [0.75, 0.5], [0.5], 0.75, [0.9, 0.75], [0.75, 0.9, 0.5], 0.9], ids=str)
def test_decays_in_another_order(tmp_path, decays, deferred):
  one, two = Eager(wrapped()), Eager(wrapped(decays=decays), 8.0)
  one.train(2)
  path = one.checkpoint.save(str(tmp_path / "model"))
  if not deferred:
    two.train()

  def averages(model, of):
    return [model.opt.average(v, decay).numpy() for v in (model.w, model.e)
            for decay in np.ravel(decays).tolist()
            if (decay in (0.5, 0.75)) == of]

  others = None if deferred else averages(two, False)
  two.checkpoint.restore(path).expect_partial()
  assert_same_bits(averages(two, True), averages(one, True))
  if not deferred:
    assert_same_bits(averages(two, False), others)
  one.train()
  two.train()
  assert_same_bits(averages(two, True), averages(one, True))
  assert_same_bits(two.state(), one.state())


def test_a_single_average_becomes_the_first(tmp_path):
  one = Eager(wrapped(decays=0.5))
  one.train(2)
  path = one.checkpoint.save(str(tmp_path / "model"))
  two = Eager(wrapped(decays=[0.75, 0.5]), start=8.0)
  two.train()
  two.checkpoint.restore(path).expect_partial()
  assert_same_bits([two.opt.average(two.w, 0.75).numpy()],
                   [one.opt.average(one.w).numpy()])


ANOTHER_FIRST = (
    r"^`average_decay` must begin with the decay of '.*ExponentialMovingAverage"
    r"' in the checkpoint, got \[0\.75, 0\.\d+\]: the checkpoint has other "
    r"averages of 0\.75\. Give the decays in the order of the run that wrote "
    r"it\.$")


def test_decays_in_another_order_in_a_session(kind, tmp_path):
  def make(decays):
    v = v1.get_variable("v", initializer=[0.0, 0.0])
    opt = wrap(decays)
    return opt, v, descend(opt, v), v1.train.Checkpoint(v=v, opt=opt)

  opt, v, train, checkpoint = make([0.5, 0.75])
  with session_of() as session:
    session.run([train])
    path = checkpoint.save(str(tmp_path / "model"), session=session)
    saver = v1.train.Saver()
    saver.save(session, str(tmp_path / "saver"))
    want = session.run([opt.average(v, d) for d in (0.5, 0.75)])
  with graph_of(kind):
    opt, v, _, checkpoint = make([0.75, 0.5])
    with session_of() as session:
      checkpoint.restore(path).assert_consumed().run_restore_ops(session)
      assert_same_bits(
          session.run([opt.average(v, d) for d in (0.5, 0.75)]), want)
      # A Saver knows averages by their names.
      with pytest.raises(tf.errors.NotFoundError,
                         match="v/ExponentialMovingAverage_0.5 not found"):
        v1.train.Saver().restore(session, str(tmp_path / "saver"))


@pytest.mark.parametrize("decay", [0.75, 0.25])
def test_a_swapping_saver_of_decays_in_another_order(kind, tmp_path, decay):
  path = str(tmp_path / "model")

  def make(decays):
    v = v1.get_variable("v", initializer=0.0)
    # Another optimizer, of the other order.
    u = v1.get_variable("u", initializer=0.0)
    opt, other = wrap(decays), wrap(decays[::-1])
    return opt, tf.group(descend(opt, v), descend(other, u))

  opt, train = make([0.5, 0.75, 0.25])
  with session_of() as session:
    session.run(train)
    opt.swapping_saver().save(session, path)
    opt.swapping_saver().restore(session, path)
  with graph_of(kind):
    # A plain Saver finds all names.
    opt, _ = make([0.75, 0.25])
    with session_of() as session:
      with pytest.raises(ValueError, match=ANOTHER_FIRST):
        opt.swapping_saver(decay=decay).restore(session, path)


# averaged_weights.

IN_PLACE = (r"cannot be used inside averaged_weights: the averages are in "
            r"place of the weights\. Leave the `with` block first\.$")

# Numbers that arithmetic would not bring back: two NaNs with payloads (one of
# them signaling), -0, infinities, a subnormal number, the largest.
PATTERNS = {
    np.float16: np.uint16([0x7e55, 0xfd01, 0x8000, 0x7c00, 0xfc00, 1, 0x7bff]),
    ml_dtypes.bfloat16: np.uint16(
        [0x7fd5, 0xff81, 0x8000, 0x7f80, 0xff80, 1, 0x7f7f]),
    np.float32: np.uint32([0x7fc12345, 0xff800001, 0x80000000, 0x7f800000,
                           0xff800000, 1, 0x7f7fffff]),
    np.float64: np.uint64([0x7ff8000012345678, 0xfff0000000000001, 1 << 63,
                           0x7ff0000000000000, 0xfff0000000000000, 1,
                           0x7fefffffffffffff]),
}
PATTERNS = {np.dtype(k): v.view(k) for k, v in PATTERNS.items()}


class Place:
  """An optimizer whose variables and averages hold given numbers.

  Attributes:
    session: None in eager mode.
    read: A function that gives the arrays of variables.
  """

  def __init__(self, mode, raw, averages, **kwargs):
    self.opt = wrap(0.5, **kwargs)
    if mode == "eager":
      self.session = None
      self.variables = [tf.Variable(tf.zeros(x.shape, x.dtype)) for x in raw]
      descend(self.opt, *self.variables)
    else:
      self.variables = [
          v1.get_variable(f"v{i}", initializer=np.zeros_like(x))
          for i, x in enumerate(raw)]
      descend(self.opt, *self.variables)
    self.averages = [self.opt.average(v) for v in self.variables]
    values = [*raw, *averages]
    targets = [*self.variables, *self.averages]
    if mode == "eager":
      for v, x in zip(targets, values):
        v.assign(x)
    else:
      feeds = [v1.placeholder(x.dtype, x.shape) for x in values]
      assigns = [v.assign(f) for v, f in zip(targets, feeds)]
      v1.get_default_graph().finalize()
      self.session = v1.Session()
      self.session.run([v.initializer for v in v1.global_variables()])
      self.session.run(assigns, dict(zip(feeds, values)))

  def read(self, variables):
    if self.session is None:
      return [v.numpy() for v in variables]
    return self.session.run(variables)

  def close(self):
    if self.session is not None:
      self.session.close()


@pytest.fixture(params=("eager", *GRAPH_MODES))
def place(request):
  """Makes a Place."""
  with entered(request.param), contextlib.ExitStack() as stack:
    def make(*args, **kwargs):
      made = Place(request.param, *args, **kwargs)
      stack.callback(made.close)
      return made

    make.mode = request.param
    yield make


# Errors of a read: ours of a LazyAverage, TensorFlow's of a variable.
NO_VALUE = (RuntimeError, tf.errors.InvalidArgumentError,
            tf.errors.FailedPreconditionError)


def test_averaged_weights_are_exchanged_bit_for_bit(place):
  raw = list(PATTERNS.values())
  averages = [x[::-1].copy() for x in raw]
  p = place(raw, averages)
  for _ in range(3):
    with p.opt.averaged_weights(p.session) as nothing:
      assert nothing is None
      assert_same_bits(p.read(p.variables), averages)
      for average in p.averages:
        with pytest.raises(NO_VALUE):
          p.read([average])
    assert_same_bits(p.read(p.variables), raw)
    assert_same_bits(p.read(p.averages), averages)
  if place.mode != "eager":
    # Resource variables of all dtypes share an op, ref variables do not.
    n = {"resource": [4], "ref": [1] * 4}[place.mode]
    assert [op.get_attr("N") for op in ops_of_type(
        exchange_op(place.mode))] == n


def test_buffers_are_exchanged():
  w = tf.Variable(tf.zeros([1000]))
  opt = wrap()
  descend(opt, w)

  def address_of(v):
    return address(v.read_value())

  of_weights, of_averages = before = address_of(w), address_of(opt.average(w))
  del of_weights
  with opt.averaged_weights():
    assert address_of(w) == of_averages
  assert (address_of(w), address_of(opt.average(w))) == before


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_averaged_weights_of_another_dtype(place, dtype):
  raw = PATTERNS[np.dtype(dtype)]
  average = np.float32([1.0001, 2.5, -0.0, np.inf, 1e-6, 3.0, -7.0])
  wide = PATTERNS[np.dtype(np.float32)]
  p = place([raw, wide], [average, wide[::-1].copy()], shadow_dtype=tf.float32)
  with p.opt.averaged_weights(p.session):
    assert_same_bits(p.read(p.variables), [average.astype(dtype), wide[::-1]])
  assert_same_bits(p.read(p.variables), [raw, wide])
  # The wide one did not go through the narrow dtype.
  assert_same_bits(p.read(p.averages), [average, wide[::-1]])


def test_averaged_weights_of_another_dtype_with_one_initial_value(kind):
  # Two variables that start at one and the same tensor.
  start = tf.zeros([2], tf.float16)
  a, b = v1.Variable(start), v1.Variable(start)
  opt = wrap(0.5, shadow_dtype=tf.float32)
  train = opt.apply_gradients([(tf.constant([-2, -4], tf.float16), a),
                               (tf.constant([-8, -16], tf.float16), b)])
  with session_of() as session:
    session.run(train)
    with opt.averaged_weights(session):
      assert [x.tolist() for x in session.run([a, b])] == [[1, 2], [4, 8]]
    assert [x.tolist() for x in session.run([a, b])] == [[2, 4], [8, 16]]
    assert [x.tolist() for x in session.run(opt.averages())] == [[1, 2], [4, 8]]


ONE = [np.float32([1, 2])], [np.float32([3, 4])]


def test_an_exception_inside(place):
  p = place(*ONE)
  for error in KeyError("mine"), KeyboardInterrupt(), GeneratorExit():
    with pytest.raises(type(error)) as caught:
      with p.opt.averaged_weights(p.session):
        assert p.read(p.variables)[0].tolist() == [3, 4]
        raise error
    assert caught.value is error
    assert p.read(p.variables)[0].tolist() == [1, 2]
    assert p.read(p.averages)[0].tolist() == [3, 4]


def test_nested(place):
  p = place(*ONE)
  with p.opt.averaged_weights(p.session):
    with pytest.raises(RuntimeError, match="^averaged_weights " + IN_PLACE):
      with p.opt.averaged_weights(p.session):
        pytest.fail("entered")
    with pytest.raises(RuntimeError, match="^seed_averages " + IN_PLACE):
      p.opt.seed_averages(p.session)
    # As it was.
    assert p.read(p.variables)[0].tolist() == [3, 4]
  assert p.read(p.variables)[0].tolist() == [1, 2]
  with p.opt.averaged_weights(p.session):
    assert p.read(p.variables)[0].tolist() == [3, 4]


def results_at_once(*bodies):
  """Runs functions at once; returns their results, of an error the error."""
  barrier, results = threading.Barrier(len(bodies)), []

  def thread(body):
    barrier.wait()
    try:
      results.append(body())
    except RuntimeError as e:
      results.append(e)

  in_threads(*[functools.partial(thread, body) for body in bodies])
  return results


@pytest.fixture
def slow_exchange(monkeypatch):
  """Other threads run before an exchange, after all checks.

  An event tells that an exchange has begun.
  """
  begun = threading.Event()

  def slow(function):
    def slowed(*args, **kwargs):
      begun.set()
      time.sleep(0.3)
      return function(*args, **kwargs)
    return slowed

  monkeypatch.setattr(_swap, "SwappedIn", slow(_swap.SwappedIn))
  monkeypatch.setattr(_swap.SwapInGraph, "swap_in",
                      slow(_swap.SwapInGraph.swap_in))
  return begun


def test_one_of_two_threads_puts_the_averages_in_place(place, slow_exchange):
  p = place(*ONE)
  refused = threading.Event()

  def enter():
    try:
      with p.opt.averaged_weights(p.session):
        refused.wait(50)
        return p.read(p.variables)[0].tolist()
    except RuntimeError:
      refused.set()
      raise

  results = results_at_once(enter, enter)
  [error] = [x for x in results if isinstance(x, RuntimeError)]
  assert re.match("averaged_weights " + IN_PLACE, str(error))
  assert [x for x in results if x is not error] == [[3, 4]]
  assert p.read(p.variables)[0].tolist() == [1, 2]
  assert p.read(p.averages)[0].tolist() == [3, 4]
  # And again.
  assert enter() == [3, 4]


def test_averages_are_not_seeded_while_they_are_put_in_place(
    place, slow_exchange):
  p, asked = place(*ONE), threading.Event()

  def enter():
    with p.opt.averaged_weights(p.session):
      assert asked.wait(50)

  def seed():
    assert slow_exchange.wait(50)
    try:
      p.opt.seed_averages(p.session)
    finally:
      asked.set()

  [error] = filter(None, results_at_once(enter, seed))
  assert re.match("seed_averages " + IN_PLACE, str(error))
  assert p.read(p.variables)[0].tolist() == [1, 2]
  assert p.read(p.averages)[0].tolist() == [3, 4]


@pytest.mark.by_day(0)
def test_averages_wait_for_a_saver(kind, tmp_path, monkeypatch):
  """A thread must not exchange what another one saves."""
  model = Model()
  saver = model.opt.swapping_saver()
  path, saving = str(tmp_path / "model"), threading.Event()
  with session_of() as session:
    session.run(model.train)
    save = v1.train.Saver.save

    def slow(*args, **kwargs):
      saving.set()
      time.sleep(0.3)
      return save(*args, **kwargs)

    monkeypatch.setattr(v1.train.Saver, "save", slow)

    def store():
      with session.graph.as_default():
        saver.save(session, path)

    def enter():
      saving.wait()
      with model.opt.averaged_weights(session):
        time.sleep(0.6)

    assert results_at_once(store, enter) == [None, None]
    assert_contents(path, SWAPPED)


def test_no_average_yet():
  opt = wrap()
  for call, what in ((opt.averaged_weights().__enter__, "averaged_weights"),
                     (opt.seed_averages, "seed_averages")):
    with pytest.raises(RuntimeError, match=(
        f"^Must call apply_gradients or minimize before {what}$")):
      call()


def test_the_default_session(kind):
  v = v1.get_variable("v", initializer=0.0)
  opt = wrap(0.5)
  train = descend(opt, v)
  for call in opt.averaged_weights().__enter__, opt.seed_averages:
    with pytest.raises(RuntimeError, match=(
        "^`session` must be given in a graph without a default session,"
        " got None.$")):
      call()
  with session_of() as session:
    train.run()
    with opt.averaged_weights():
      assert v.eval() == 0.5
    assert session.run([v, opt.average(v)]) == [1, 0.5]


def test_the_savers_while_the_averages_are_in_place(kind, tmp_path):
  model = Model()
  saver = model.opt.swapping_saver()
  path = str(tmp_path / "model")
  with session_of() as session, session_of() as other:
    session.run(model.train)
    saver.save(session, path)
    with model.opt.averaged_weights(session):
      for call in saver.save, saver.restore:
        with pytest.raises(RuntimeError, match="^swapping_saver " + IN_PLACE):
          call(session, path)
      # Another session is another matter.
      assert other.run(model.a).tolist() == [0, 0]
      saver.restore(other, path)
      with model.opt.averaged_weights(other):
        assert other.run(model.a).tolist() == [0.5, 0.5]
      assert other.run(model.a).tolist() == [1, 1]
    assert_contents(path, SWAPPED)
    saver.restore(session, path)


def test_an_uninitialized_variable(kind):
  a, b = (v1.get_variable(n, initializer=0.0) for n in "ab")
  opt = wrap()
  descend(opt, a, b)
  init = v1.global_variables_initializer()
  with v1.Session() as session:
    session.run([v.initializer for v in (a, *opt.averages())])
    with pytest.raises(tf.errors.FailedPreconditionError,
                       match="'b'.*is not initialized|uninitialized value b"):
      with opt.averaged_weights(session):
        pytest.fail("entered")
    # It did not get stuck.
    session.run(init)
    with opt.averaged_weights(session):
      pass


def test_a_graph_is_built_while_eager_averages_are_in_place():
  w = tf.Variable([0.0, 0.0])
  opt = wrap(0.5)
  descend(opt, w)
  with opt.averaged_weights():
    with graph_of("resource"):
      v = v1.get_variable("v", initializer=0.0)
      train_op = opt.minimize(-v)
      with session_of() as session:
        session.run(train_op)
        assert session.run([v, opt.average(v)]) == [1, 0.5]


# Monitored sessions.


@pytest.mark.by_day(0)
def test_a_monitored_session(kind, tmp_path):
  def session_for(model, save_steps=1):
    return v1.train.MonitoredTrainingSession(
        checkpoint_dir=str(tmp_path), save_checkpoint_secs=None,
        save_checkpoint_steps=save_steps, save_summaries_steps=None,
        log_step_count_steps=None,
        scaffold=v1.train.Scaffold(saver=model.opt.swapping_saver()))

  model = Model()
  with session_for(model) as session:
    assert v1.get_default_graph().finalized
    session.run(model.train)
    with model.opt.averaged_weights(session):
      assert session.run(model.a).tolist() == [0.5, 0.5]
    with pytest.raises(KeyError):
      with model.opt.averaged_weights(session):
        raise KeyError
    assert session.run(model.a).tolist() == [1, 1]
  path = tf.train.latest_checkpoint(str(tmp_path))
  assert path.endswith("model.ckpt-1")
  assert_contents(path, SWAPPED)

  # The job is started again: it goes on where it was.
  with graph_of(kind):
    model = Model()
    with session_for(model) as session:
      assert [x.tolist() for x in session.run(model.state)] == STEPPED
      session.run(model.train)
      assert session.run(model.opt.average(model.a)).tolist() == [1.25, 1.25]
      with pytest.raises(NO_VALUE):
        with model.opt.averaged_weights(session):
          session.run(model.train)
      model.opt.seed_averages(session)
      assert session.run(model.opt.average(model.a)).tolist() == [2, 2]


def test_hooks_do_not_see_the_exchange(kind):
  seen = []

  class Hook(v1.train.SessionRunHook):

    def before_run(self, run_context):
      seen.append(run_context.original_args.fetches)

  v = v1.get_variable("v", initializer=0.0)
  opt = wrap()
  train = descend(opt, v)
  with v1.train.MonitoredSession(hooks=[Hook()]) as session:
    session.run(train)
    with opt.averaged_weights(session):
      session.run(v)
    opt.seed_averages(session)
  assert seen == [train, v]


def sharded(make):
  """A ShardedVariable of two parts and its optimizer, after a step."""
  whole = sharded_variable.ShardedVariable(
      [tf.Variable(np.full([2, 2], x, np.float32)) for x in (1, 2)], "w")
  opt = make()
  opt.apply_gradients([(tf.ones([2, 2]), v) for v in whole.variables])
  return whole, opt


@pytest.mark.parametrize("make", [
    lambda: wrap(0.5), lambda: wrap(0.5, lazy=False),
    lambda: wrapopt.CrossShardOptimizer(wrap(0.5)),
    lambda: wrapopt.ScheduleFreeOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(1.0))])
def test_a_checkpoint_of_a_sharded_variable_has_its_parts(make, tmp_path):
  """TensorFlow would write the average of the first part alone."""
  whole, opt = sharded(make)
  path = str(tmp_path / "model")
  with pytest.raises(NotImplementedError, match=r"parts=list\(w.variables\)"):
    tf.train.Checkpoint(w=whole, opt=opt).write(path)
  assert not list(tmp_path.iterdir())
  tf.train.Checkpoint(parts=list(whole.variables), opt=opt).write(path)
  other, new = sharded(make)
  new.apply_gradients([(tf.ones([2, 2]), v) for v in other.variables])
  tf.train.Checkpoint(parts=list(other.variables), opt=new).read(
      path).assert_existing_objects_matched()
  average = (opt if hasattr(opt, "average") else opt.inner_optimizer).average
  got = (new if hasattr(new, "average") else new.inner_optimizer).average
  for v, w in zip(whole.variables, other.variables):
    np.testing.assert_array_equal(got(w), average(v))


def test_the_slots_of_a_whole_sharded_variable_are_not_restored(tmp_path):
  """Such as those of a file that a plain optimizer wrote."""
  whole, opt = sharded(lambda: wrap(0.5, lazy=False))
  first = tf.Variable(tf.ones([2, 2]))
  saved = wrap(0.5, lazy=False)
  saved.apply_gradients([(tf.ones([2, 2]), first)])
  path = tf.train.Checkpoint(w=first, opt=saved).write(str(tmp_path / "model"))
  with pytest.raises(NotImplementedError, match="must hold the parts"):
    tf.train.Checkpoint(w=whole, opt=opt).read(path)
