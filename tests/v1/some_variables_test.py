"""Averages of some variables: the argument `variables`, in tf.compat.v1.

both/averages_test.py has what averages of some variables hold, in files and in
place of the weights, too, and tables that a step does not train. Replicas are
in moving_average_test.py.
"""

import contextlib
import copy

import numpy as np
import pytest
import tensorflow as tf

from training import GRAPH_MODES
from training import ancestors
from training import descend
from training import graph_of
from training import kind  # pylint: disable=unused-import
from training import is_packed
from training import moving
from training import session_of
from training import sgd
from training import type_of
import wrapopt
import wrapopt.checkpoints

v1 = tf.compat.v1

FUSED = (None, False)
TRACED = ("eager", "function", "jit")


def adagrad():
  return v1.train.AdagradOptimizer(0.5)


def two_variables():
  return tf.Variable([0.0]), tf.Variable([0.0])


@pytest.mark.parametrize("how", [
    list, tuple, lambda chosen: lambda v: any(v is x for x in chosen)],
                         ids=["list", "tuple", "function"])
def test_ways_to_select(how):
  a, b, c = (tf.Variable([0.0]) for _ in range(3))
  opt = wrapopt.MovingAverageOptimizer(adagrad(), 0.5, variables=how([a, c]))
  descend(opt, a, b, c)
  assert [opt.average(v) is not None for v in (a, b, c)] == [True, False, True]


def test_what_is_not_averaged_costs_nothing(kind):
  graph = v1.get_default_graph()
  a, b = (v1.get_variable(name, initializer=[0.0, 0.0]) for name in "ab")
  opt = moving(0.5, variables=[a])
  descend(opt, b, a)
  assert [v.op.name for v in v1.global_variables()] == [
      "a", "b", "a/ExponentialMovingAverage"]
  assert opt.averages() == [opt.average(a)]
  assert opt.average(b) is None and not opt.is_lazy(b)
  assert opt.get_slot(b, "ExponentialMovingAverage") is None
  steps = [op for op in graph.get_operations()
           if type_of(op).startswith("Wrapopt>Apply")]
  # The second op has no average, and runs after the first one.
  assert [op.get_attr("NK") if is_packed(op) else
          len(op.inputs) for op in steps] == (
              [1, 0] if is_packed(steps[0]) else
              [len(steps[1].inputs) + 1, len(steps[1].inputs)])
  assert steps[0] in ancestors(steps[1])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("fused", FUSED)
def test_a_step_that_fails_changes_nothing(jit, fused):
  a, b = two_variables()
  opt = moving(0.5, variables=[a], fused=fused)

  @tf.function(jit_compile=jit)
  def step():
    descend(opt, b, a)

  step()
  with opt.averaged_weights():
    assert [a.numpy(), b.numpy()] == [0.5, 1]
    with pytest.raises(tf.errors.FailedPreconditionError):
      step()
    assert b.numpy() == 1


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_decay_out_of_range_changes_no_other_variable(mode):
  a, b = two_variables()
  opt = moving(tf.Variable(1.5), variables=[a])
  step = lambda: descend(opt, b, a) and None
  with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
    (tf.function(step) if mode == "function" else step)()
  assert [a.numpy(), b.numpy()] == [0, 0]


def test_dtypes_without_averages():
  # Neither an average nor a native op can be of complex numbers.
  a, c = tf.Variable([0.0]), tf.Variable(tf.zeros([1], tf.complex64))
  opt = moving(0.5, variables=lambda v: not v.dtype.is_complex)
  descend(opt, a, c)
  assert [opt.average(a).numpy(), c.numpy()] == [0.5, 1]


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_steps_of_the_others_alone(mode):
  a, b = two_variables()
  opt = moving(wrapopt.PowerDecay(gamma=0), variables=lambda v: v is a)
  steps = [lambda v=v: descend(opt, v) for v in (b, a)]
  if mode == "function":
    steps = [tf.function(lambda s=s: s() and None) for s in steps]
  steps[0]()
  with pytest.raises(RuntimeError, match="that `variables` selects before"):
    opt.averaged_weights().__enter__()
  for i in (1, 0, 1, 0):
    steps[i]()
  # They do not count as steps of the averages.
  assert opt.average_steps().numpy() == 2
  assert [a.numpy(), b.numpy(), opt.average(a).numpy()] == [2, 3, 1.5]


@pytest.mark.parametrize("variables, error, text", [
    ([], ValueError, "`variables` must hold at least one variable"),
    (["w"], TypeError, r"`variables\[0\]` must be a variable, got 'w'"),
    *((x, TypeError, "`variables` must be None")
      for x in ("w", 3, True, tf.Variable(1.0))),
])
def test_bad_arguments(variables, error, text):
  with pytest.raises(error, match=text):
    wrapopt.MovingAverageOptimizer(adagrad(), 0.5, variables=variables)


@pytest.mark.parametrize("kind", ["eager", *GRAPH_MODES], indirect=True)
def test_bad_variables_change_nothing(kind):
  a, b = (v1.Variable([0.0], name=name) for name in "ab")
  opt = wrapopt.MovingAverageOptimizer(adagrad(), 0.5, variables=[a])
  with pytest.raises(ValueError, match="of which apply_gradients.. got none"):
    opt.apply_gradients([(tf.ones(1), b)])
  assert opt.average(a) is None and opt.get_slot(b, "accumulator") is None
  for answer in None, 1, tf.constant(True):
    opt = wrapopt.MovingAverageOptimizer(
        adagrad(), 0.5, variables=lambda v: answer)
    with pytest.raises(TypeError, match="must return True or False, got"):
      opt.apply_gradients([(tf.ones(1), a)])
    assert opt.average(a) is None and opt.get_slot(a, "accumulator") is None


def test_partitioned_variables(kind):
  parts = v1.get_variable("p", initializer=tf.zeros([4, 2]),
                          partitioner=v1.fixed_size_partitioner(2))
  other = v1.get_variable("o", initializer=tf.zeros([4]))
  opt = wrapopt.MovingAverageOptimizer(adagrad(), 0.5, variables=[parts])
  descend(opt, *parts, other)
  assert None not in opt.average(parts) and opt.average(other) is None


def test_checkpoints_of_untrained_variables(tmp_path):
  def make():
    w, mean, opt, step = with_statistic("eager", average_decay=0.5)
    return mean, opt, tf.train.Checkpoint(w=w, mean=mean, opt=opt), step

  mean, opt, saved, step = make()
  for _ in range(2):
    step()
  path = saved.write(str(tmp_path / "saved"))
  for is_deferred in (False, True):
    mean, opt, saved, step = make()
    if is_deferred:
      saved.read(path)
    else:
      step()
      saved.read(path).assert_consumed()
      assert [mean.numpy(), opt.average(mean).numpy()] == [2, 1.5]
    step()
    assert [mean.numpy(), opt.average(mean).numpy()] == [3, 2.25]


def test_checkpoints(tmp_path):
  """Of averages of all variables and of some, in both directions."""
  def make(of_some):
    a, b = two_variables()
    opt = moving(0.5, variables=(lambda v: v is a) if of_some else None)
    saved = tf.train.Checkpoint(a=a, b=b, opt=opt)
    return a, b, opt, saved, lambda: descend(opt, a, b)

  for of_some in (True, False):
    a, b, opt, saved, step = make(of_some)
    step()
    path = saved.write(str(tmp_path / f"{of_some}"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert sum("ExponentialMovingAverage" in name for name in names) == (
        1 if of_some else 2)
    for then_some in (True, False):
      a, b, opt, saved, step = make(then_some)
      saved.read(path)
      assert [a.numpy(), b.numpy()] == [1, 1]
      step()
      assert opt.average(a).numpy() == 1.25
      if then_some:
        assert opt.average(b) is None
      else:
        assert opt.average(b).numpy() == (1.5 if of_some else 1.25)


def test_snapshots_hold_averages(tmp_path):
  with graph_of("resource"):
    step = v1.train.get_or_create_global_step()
    a, b = (v1.get_variable(name, initializer=[0.0]) for name in "ab")
    opt = moving(wrapopt.PowerDecay(gamma=0), variables=[a])
    train_op = descend(opt, a, b, step=step)
    hook = wrapopt.checkpoints.SnapshotHook(opt, str(tmp_path), 2)
    with v1.train.MonitoredSession(hooks=[hook]) as session:
      for _ in range(2):
        session.run(train_op)
  [path] = {str(p).split(".index")[0] for p in tmp_path.glob("*.index")}
  assert [name for name, _ in tf.train.list_variables(path)
          if name in "ab"] == ["a"]
  assert tf.train.load_variable(path, "a").tolist() == [1.5]


# Variables that no step trains.


def with_statistic(kind, opt_of=lambda opt: opt, **kwargs):
  """A weight and a statistic, to which every run adds 1, after one another.

  Returns:
    (weight, statistic, MovingAverageOptimizer, function that takes a step).
  """
  with tf.name_scope("") if kind in GRAPH_MODES else contextlib.nullcontext():
    w, mean = (v1.Variable([0.0], name=name, **(
        {"use_resource": kind == "resource"} if kind in GRAPH_MODES else {}))
               for name in ("w", "mean"))
  averaging = moving(variables=[w, mean], **kwargs)
  opt = opt_of(averaging)

  def step():
    with tf.control_dependencies([mean.assign_add([1.0])]):
      return descend(opt, w)

  return w, mean, averaging, step


def run_steps(kind, step, fetches, count=3):
  """What the fetches hold after each step."""
  seen = []
  if kind in GRAPH_MODES:
    train_op = step()
    with session_of() as session:
      for _ in range(count):
        session.run(train_op)
        seen.append([x.tolist() for x in session.run(fetches())])
    return seen
  if kind != "eager":
    step = tf.function(lambda step=step: step() and None,
                       jit_compile=kind == "jit")
  for _ in range(count):
    step()
    seen.append([x.numpy().tolist() for x in fetches()])
  return seen


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", [*TRACED, *GRAPH_MODES], indirect=True)
def test_untrained_variables(kind, fused):
  w, mean, opt, step = with_statistic(
      kind, average_decay=[0.5, 0.75], fused=fused)
  seen = run_steps(kind, step, lambda: [
      w, mean, *(opt.average(v, d) for d in (0.5, 0.75) for v in (w, mean))])
  # Both are 1, 2, 3. The averages start at 0, and in eager mode that of the
  # statistic at its value when apply_gradients() is first called.
  averages = [[0.5, 1.25, 2.125], [0.25, 0.6875, 1.265625]]
  late = [[1, 1.5, 2.25], [1, 1.25, 1.6875]]
  assert seen == [
      [[t + 1.0], [t + 1.0],
       *([row[t]] for pair in zip(averages, late if kind == "eager" else
                                  averages) for row in pair)]
      for t in range(3)]
  assert opt.averages() == [opt.average(v, d)
                            for d in (0.5, 0.75) for v in (w, mean)]


@pytest.mark.parametrize("fused", FUSED)
def test_one_op_averages_what_is_not_trained(kind, fused):
  graph = v1.get_default_graph()
  w, mean, opt, step = with_statistic(kind, average_decay=0.5, fused=fused)
  others = [v1.Variable(tf.zeros([n]), name=f"other_{n}") for n in (2, 3)]
  opt = moving(0.5, fused=fused, variables=[w, mean, *others])
  with tf.control_dependencies([mean.assign_add([1.0])]):
    opt.apply_gradients([(-tf.ones(1), w), (None, others[1])])
  native = [op for op in graph.get_operations()
            if type_of(op).startswith(("Wrapopt>Apply", "Wrapopt>Ema"))]
  assert [op.get_attr("N") for op in native] == (
      [4] if fused is False else [1, 3])
  [own] = [op for op in graph.get_operations() if "AssignAdd" in op.type]
  assert all(own in ancestors(op) for op in native)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("fused", FUSED)
def test_untrained_variables_are_exchanged(kind, fused, trained, tmp_path):
  w, mean, opt, step = with_statistic(kind, average_decay=0.5, fused=fused)
  if not trained:  # Nothing that has a gradient is averaged.
    b = v1.Variable([0.0], name="b")
    train_op = opt.apply_gradients([(None, w), (-tf.ones(1), b)])
  else:
    b, train_op = w, step()
  saver = opt.swapping_saver()
  with session_of() as session:
    session.run(mean.assign([1.0]))
    for _ in range(2):
      session.run(train_op)
    before = session.run([b, mean, opt.average(mean)])
    with opt.averaged_weights(session):
      assert session.run(mean) == before[2]
      if not trained:
        with pytest.raises(tf.errors.FailedPreconditionError):
          session.run(train_op)
        assert session.run([b, mean]) == [before[0], before[2]]
    after = session.run([b, mean, opt.average(mean)])
    assert [after[0], after[2]] == [before[0], before[2]]
    path = saver.save(session, str(tmp_path / "model"))
    session.run([mean.assign([9.0]), opt.average(mean).assign([9.0])])
    saver.restore(session, path)
    assert session.run([mean, opt.average(mean)]) == after[1:]
  reader = tf.train.load_checkpoint(path)
  assert reader.get_tensor("mean") == after[2]
  assert reader.get_tensor("mean/ExponentialMovingAverage") == after[1]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", ["eager", *GRAPH_MODES], indirect=True)
def test_steps_that_a_gate_drops_and_those_between_updates(kind, fused):
  """One variable has an average, one has none, and one is a statistic."""
  step = v1.Variable(0, dtype=tf.int64, name="step", use_resource=True)
  v, mean, averaging, _ = with_statistic(
      kind, average_decay=0.5, fused=fused, update_every=2)
  b = v1.Variable([0.0], name="b", use_resource=kind != "ref")
  gate = wrapopt.DropStaleGradientOptimizer(averaging, 0, global_step=step)
  late = (tf.Variable(0, dtype=tf.int64) if kind == "eager" else
          v1.placeholder(tf.int64, []))

  def train():
    with gate.record_step(step) as recorded:
      gradient = -tf.ones(1)
    with tf.control_dependencies([recorded]):
      moved = step.assign_add(late)
    with tf.control_dependencies([moved, mean.assign_add([1.0])]):
      gradient = tf.identity(gradient)
      return gate.apply_gradients([(gradient, v), (gradient, b)], step,
                                  recorded=recorded)

  # The fifth and sixth steps are the second and third admitted ones.
  lags = (0, 1, 1, 0, 0)
  state = lambda: (v, b, mean, averaging.average(mean))
  seen = []
  if kind == "eager":
    mean.assign([-1.0])
    for by in lags:
      late.assign(by)
      train()
      seen.append([x.numpy().item() for x in state()])
  else:
    train_op = train()
    with session_of() as session:
      session.run(mean.initializer)
      for by in lags:
        session.run(train_op, {late: by})
        seen.append([x.item() for x in session.run(state())])
  means = range(5) if kind == "eager" else range(1, 6)
  average = means[3] / 2
  assert seen == [
      [1, 1, means[0], 0], [1, 1, means[1], 0], [1, 1, means[2], 0],
      [2, 2, means[3], average], [3, 3, means[4], average]]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", ["eager", *GRAPH_MODES], indirect=True)
def test_untrained_variables_inside_cross_shard(kind, fused):
  w, mean, opt, step = with_statistic(
      kind, wrapopt.CrossShardOptimizer, average_decay=0.5, fused=fused)
  seen = run_steps(kind, step, lambda: [
      w, mean, opt.average(w), opt.average(mean)], count=2)
  late = [[1], [1.5]] if kind == "eager" else [[0.5], [1.25]]
  assert seen == [[[1], [1], [0.5], late[0]], [[2], [2], [1.25], late[1]]]


@pytest.mark.parametrize("make", ["elastic", "model"])
def test_untrained_variables_around_workers_averages(make, kind):
  getter = {"elastic": wrapopt.ElasticAverageCustomGetter,
            "model": wrapopt.ModelAverageCustomGetter}[make]("/cpu:0")
  step = v1.train.get_or_create_global_step()
  with v1.variable_scope("", custom_getter=getter):
    w = v1.get_variable("w", initializer=[0.0])
  mean = v1.get_variable("mean", initializer=[0.0], trainable=False)
  inner = (wrapopt.ElasticAverageOptimizer(sgd(), 1, getter, 1, 0.0, rho=0.0)
           if make == "elastic" else
           wrapopt.ModelAverageOptimizer(sgd(), 1, True, getter, 1))
  opt = wrapopt.MovingAverageOptimizer(inner, 0.5, variables=[w, mean])
  with tf.control_dependencies([mean.assign_add([1.0])]):
    train_op = descend(opt, w, step=step)
  hook = inner.make_session_run_hook(*(
      (True, 0) if make == "elastic" else ()))
  with v1.train.MonitoredSession(hooks=[hook]) as session:
    for _ in range(2):
      session.run(train_op)
    assert session.run([opt.average(v) for v in (w, mean)]) == [1.25, 1.25]


def normalized(is_training):
  """A model with a batch normalization as slim makes it: (loss, output)."""
  x = tf.constant([[1.0, 2.0], [3.0, 5.0], [2.0, 4.0]])
  with v1.variable_scope("net"):
    w = v1.get_variable("weights", initializer=[[0.5], [-1.5]])
    h = tf.matmul(x, w)
    with v1.variable_scope("BatchNorm"):
      beta = v1.get_variable("beta", initializer=[0.25])
      moving = [v1.get_variable(name, initializer=[value], trainable=False)
                for name, value in (("moving_mean", 0.0),
                                    ("moving_variance", 1.0))]
      if is_training:
        mean, variance = tf.nn.moments(h, [0])
        for v, now in zip(moving, (mean, variance)):
          v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, v1.assign_sub(
              v, 0.5 * (v.read_value() - now)).op)
      else:
        mean, variance = moving
      h = tf.nn.batch_normalization(h, mean, variance, beta, None, 1e-3)
  return tf.reduce_mean((h - [[1.0], [2.0], [3.0]])**2), h


def evaluated(kind, path, of_model_variables):
  """What an evaluation script of TensorFlow's models computes from a file."""
  with graph_of(kind), v1.Session() as session:
    _, output = normalized(is_training=False)
    averages = tf.train.ExponentialMovingAverage(0.5)
    names = averages.variables_to_restore(
        v1.global_variables() if of_model_variables else None)
    assert of_model_variables == (
        "net/BatchNorm/moving_mean/ExponentialMovingAverage" in names)
    v1.train.Saver(names).restore(session, path)
    return session.run(output)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", GRAPH_MODES)
def test_evaluations_of_batch_normalizations(kind, fused, tmp_path):
  """Scripts read the files of TensorFlow's own averages, and those of ours."""
  def train(name, kind, minimize):
    with graph_of(kind):
      loss, _ = normalized(is_training=True)
      variables = v1.global_variables()
      with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        train_op = minimize(sgd(0.125), loss, variables)
      with session_of() as session:
        for _ in range(3):
          session.run(train_op)
        return v1.train.Saver().save(session, str(tmp_path / name))

  def stock(opt, loss, variables):
    with tf.control_dependencies([opt.minimize(loss)]):
      return tf.train.ExponentialMovingAverage(0.5).apply(variables)

  # TensorFlow may read ref variables before they are initialized.
  paths = [train("stock", "resource", stock), train(
      "ours", kind, lambda opt, loss, variables: wrapopt.MovingAverageOptimizer(
          opt, 0.5, variables=variables, fused=fused).minimize(loss))]
  want, got = map(tf.train.load_checkpoint, paths)
  names = want.get_variable_to_shape_map()
  assert got.get_variable_to_shape_map() == names
  for name in names:
    np.testing.assert_array_equal(got.get_tensor(name), want.get_tensor(name))
  for of_model_variables in (True, False):
    np.testing.assert_array_equal(*(
        evaluated(kind, path, of_model_variables) for path in paths))


@pytest.mark.parametrize("kind", ["eager", *GRAPH_MODES], indirect=True)
def test_lists_that_no_step_can_average(kind):
  a, b, count = (v1.Variable(x, name=name) for x, name in (
      ([0.0], "a"), ([0.0], "b"), (0, "count")))
  with tf.Graph().as_default():
    of_another = v1.Variable([0.0])
  for wrong, error, text in (
      (count, TypeError, "of dtype .*, got '.*' of int32"),
      (of_another, ValueError, "got '.*' of another one")):
    opt = moving(0.5, variables=[a, wrong])
    with pytest.raises(error, match=text):
      opt.apply_gradients([(tf.ones(1), a)])
    assert opt.average(a) is None
  # Averages would move in both calls.
  opt = moving(0.5, variables=[a, b])
  opt.apply_gradients([(tf.ones(1), a)])
  with pytest.raises(ValueError, match="gets, or none does, got '.*', which "
                     "some calls got"):
    opt.apply_gradients([(tf.ones(1), b), (tf.ones(1), a)])
  opt.apply_gradients([(tf.ones(1), a)])


def test_copies():
  a, b = two_variables()
  opt = moving(0.5, variables=[a])
  copied = copy.deepcopy(opt)
  a2, b2, with_variables = copy.deepcopy((a, b, opt))
  for o, x, y in (opt, a, b), (copied, a, b), (with_variables, a2, b2):
    descend(o, x, y)
    assert o.average(x) is not None and o.average(y) is None
