"""While averages are in place of the weights, nobody trains or takes them."""

import contextlib
import copy
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import arrays
from arrays import assert_same_bits
from fit_callbacks import at_epoch_end
import keras_versions
from training import graph_of, session_of, stepping
import replicas  # pylint: disable=unused-import
import wrapopt.keras
from wrapopt import ops

tf1 = tf.compat.v1
wk, K = wrapopt.keras, keras.optimizers

NO_VALUE = (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError)
AVERAGES_IN_PLACE = (
    r" inside averaged_weights\(\): the averages are in place of the weights. "
    "Leave the `with` block first")
REFUSED = "is not initialized.* If it is an average that averaged_weights"


def raises_refused():
  return pytest.raises(tf.errors.FailedPreconditionError, match=REFUSED)


# By name: an optimizer, and the wrapper whose averages are put in place.
OPTIMIZERS = {
    "one_pass": lambda: wk.MovingAverage(K.Adam(), [0.5, 0.75]),
    "two_passes": lambda: wk.MovingAverage(K.Nadam(), 0.5),
    # None of their steps counts.
    "swa": lambda: wk.SWA(K.SGD(), 1000),
    "swa_of_two_passes": lambda: wk.SWA(K.Nadam(), 1000),
    "lookahead_around": lambda: wk.Lookahead(wk.MovingAverage(K.SGD(), 0.5),
                                             sync_period=2),
    "lookahead_inside": lambda: wk.MovingAverage(wk.Lookahead(K.SGD()), 0.5),
    "swa_around": lambda: wk.SWA(wk.MovingAverage(K.Adam(), 0.5), 1000),
    "average_inside": lambda: wk.SWA(wk.MovingAverage(K.Adam(), 0.5), 1000),
    "multi": lambda: wk.MovingAverage(K.MultiOptimizer(
        lambda v, parts=(K.SGD(), K.Nadam()): parts[v.ndim - 1]), 0.5),
    "loss_scale": lambda: wk.MovingAverage(
        K.LossScaleOptimizer(K.Adam(), initial_scale=1.0), 0.5),
    "accumulates": lambda: wk.MovingAverage(
        K.Adam(gradient_accumulation_steps=2), 0.5),
    "constraint": lambda: wk.MovingAverage(K.Adam(), 0.5),
}


def swapped(name, opt):
  return (opt.inner_optimizer if name in ("average_inside", "lookahead_around")
          else opt)


def variables_of(name):
  variables = [keras.Variable([[1.0, 2.0]]), keras.Variable([3.0]),
               keras.Variable([4.0], dtype="bfloat16")]
  if name == "constraint":
    variables[0].constraint = keras.constraints.NonNeg()
  return variables


def values(opt, variables):
  return arrays.values([*variables, opt.iterations, *opt.variables])


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", keras_versions.cases(OPTIMIZERS))
@pytest.mark.parametrize("jit", [False, True])
def test_a_compiled_step(name, jit):
  opt, variables = OPTIMIZERS[name](), variables_of(name)
  step = stepping(opt, variables, "jit" if jit else "function")
  train = lambda: step(*[tf.ones(v.shape, v.dtype) for v in variables])
  for _ in range(2):
    train()
    # The second of two accumulated gradients takes the step.
    if name == "accumulates":
      train()
      train()
    swapped(name, opt).average(variables[0])  # Averages have begun.
    before = values(opt, variables)
    with swapped(name, opt).averaged_weights():
      in_place = [v.numpy() for v in variables]
      with raises_refused():
        train()
      assert_same_bits([v.numpy() for v in variables], in_place)
    assert_same_bits(values(opt, variables), before)
    if name == "accumulates":
      train()
  train()
  assert opt.iterations.numpy() > before[len(variables)]


@pytest.mark.by_day(0)
def test_fit():
  """A callback that evaluates in the middle, and forgets to leave."""
  model = keras.Sequential([keras.layers.Dense(1)])
  opt = wk.MovingAverage(K.Adam(), 0.5)
  model.compile(opt, "mse")
  x = np.ones([8, 2], np.float32)
  model.train_on_batch(x, x[:, :1])
  before = values(opt, model.trainable_variables)
  with opt.averaged_weights(model):
    with raises_refused():
      model.train_on_batch(x, x[:, :1])
    model.evaluate(x, x[:, :1], verbose=0)
  assert_same_bits(values(opt, model.trainable_variables), before)
  model.train_on_batch(x, x[:, :1])


@pytest.mark.parametrize("name", ["one_pass", "swa_of_two_passes"])
def test_replicas(name):
  strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
  with strategy.scope():
    opt, v = OPTIMIZERS[name](), keras.Variable([1.0])
    opt.build([v])

  train = tf.function(lambda: strategy.run(
      lambda: opt.apply([tf.constant([1.0])], [v])))
  train()
  before, average = v.numpy(), opt.average(v)
  with opt.averaged_weights():
    in_place = v.numpy()
    with raises_refused():
      train()
    for call in (lambda: opt.average(v), lambda: average.numpy(),
                 lambda: strategy.run(lambda: average + 0)):
      with raises_in_place():
        call()
    assert_same_bits([v.numpy()], [in_place])
  assert_same_bits([v.numpy()], [before])
  train()
  strategy.run(lambda: average + 0)


def test_only_the_averages_of_a_model_are_in_place():
  a, b = (keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
          for _ in range(2))
  opt = wk.SWA(K.SGD(), 0, 1)
  variables = a.trainable_variables + b.trainable_variables
  opt.apply([tf.ones(v.shape) for v in variables], variables)
  with opt.averaged_weights(a):
    for v in a.trainable_variables:
      with pytest.raises(RuntimeError, match=AVERAGES_IN_PLACE):
        opt.average(v)
    for v in b.trainable_variables:
      opt.average(v).numpy()


def test_files_of_averages(tmp_path):
  make = lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
  model, alone, loaded = make(), make(), make()
  for m in model, alone:
    opt = wk.MovingAverage(K.SGD(), 0.5)
    opt.apply([tf.ones(v.shape) for v in m.weights], m.weights)
    with opt.averaged_weights(m):
      want = [v.numpy() for v in m.weights]
      if m is alone:
        tf.train.Checkpoint(model=m).write(str(tmp_path / "c"))
        continue
      m.compile(opt)
      for objects in [{"model": m}, {"model": m, "optimizer": opt}]:
        with pytest.raises(RuntimeError, match=(
            r"^tf.train.Checkpoint.write\(\) must not be called inside "
            r"averaged_weights\(\): .* Leave the `with` block first\. To write "
            r"the averages into a file, call the model's save_weights\(\) in "
            r"the block, or write the copy that averaged_model\(model\) "
            r"makes\.$")):
          tf.train.Checkpoint(**objects).write(str(tmp_path / "c"))
      # As export() of Keras 3.12 does, which writes none of them.
      assert opt in tf.train.TrackableView(m).descendants()
      # As the error says.
      m.save_weights(tmp_path / "c.weights.h5")
      with pytest.raises(ValueError, match=r"load_weights\(\) must not be"):
        m.load_weights(tmp_path / "c.weights.h5")
    if m is model:
      tf.train.Checkpoint(model=opt.averaged_model(m)).write(
          str(tmp_path / "copy"))
      loaded.load_weights(tmp_path / "c.weights.h5")
      assert_same_bits([v.numpy() for v in loaded.weights], want)
    tf.train.Checkpoint(model=loaded).read(
        str(tmp_path / ("copy" if m is model else "c")))
    assert_same_bits([v.numpy() for v in loaded.weights], want)


def raises_in_place():
  return pytest.raises(RuntimeError, match=AVERAGES_IN_PLACE)


# The ways in which a program reads an average `s`.
READS = {
    "convert_to_tensor": tf.convert_to_tensor, "read": lambda s: s + 1,
    "row": lambda s: s[0], "numpy": lambda s: s.numpy(), "array": np.array,
    "value": lambda s: (s.value if isinstance(s, keras.Variable)
                        else s.read_value()),
    "keras": keras.ops.convert_to_numpy, "copy": copy.deepcopy,
    "function": lambda s: tf.function(lambda: tf.convert_to_tensor(s))()}

# TensorFlow's words of a variable without a value, as the guide quotes them,
# and those of an op of ours.
QUOTED = ["Trying to read variable with wrong dtype. Expected float got "
          "INVALID",
          "It could mean the variable is uninitialized",
          "Attempting to use uninitialized value"]
WORDS = "|".join([*map(re.escape, QUOTED), "Expected bfloat16 got", REFUSED])


def test_the_guide_quotes_tensorflow():
  folder = os.path.dirname(wrapopt.__file__)
  with open(os.path.join(folder, "docs", "choosing.md"), encoding="utf-8") as f:
    text = f.read()
  for words in QUOTED:
    assert words in text
  for cls in (wk.MovingAverage, wrapopt.MovingAverageOptimizer,
              wrapopt.PrimalAverageOptimizer, wrapopt.ScheduleFreeOptimizer):
    assert QUOTED[0] in " ".join(cls.averaged_weights.__doc__.split())


def check_reads(average):
  for name, read in READS.items():
    with raises_in_place():
      pytest.fail(f"{name}: {read(average)}")


# By name: how a wrapper is made, and a dtype.
READABLE = {
    "variable": lambda: wk.MovingAverage(K.Adam(), [0.5, 0.75]),
    "rows_lag": lambda: wk.MovingAverage(K.SGD(1.0), [0.5, 0.75]),
    "not_lazy": lambda: wk.MovingAverage(K.SGD(1.0), 0.5, lazy=False),
    "swa": lambda: wk.SWA(K.SGD(1.0), 0, 1),
    "primal_average": lambda: wk.PrimalAverage(K.SGD(1.0)),
    "schedule_free": lambda: wk.ScheduleFree(K.SGD(1.0)),
    "inside": lambda: wk.MovingAverage(wk.Lookahead(K.SGD(1.0)), 0.5),
}


@pytest.mark.by_day(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("name", READABLE)
def test_nobody_reads_an_average(name, is_dense, dtype, tmp_path):
  v, opt = keras.Variable([[1.0], [2.0]], dtype=dtype), READABLE[name]()
  model = keras.Sequential()
  model.compile(opt, "mse")
  gradient = tf.IndexedSlices(tf.ones([1, 1], dtype), [0], [2, 1])
  opt.apply([tf.convert_to_tensor(gradient) if is_dense else gradient], [v])
  average = (opt.z(v) if name in ("primal_average", "schedule_free")
             else opt.average(v))
  functions = [tf.function(lambda: tf.convert_to_tensor(average) + 0),
               tf.function(lambda: tf.convert_to_tensor(opt.average(v)) + 0),
               tf.function(lambda: tf.convert_to_tensor(average) + 0,
                           jit_compile=True)]
  for function in functions:
    function()
  files = [str(tmp_path / x) for x in ("a", "b", "c")]
  tf.train.Checkpoint(a=average).write(files[1])
  before = values(opt, [v])
  others = [opt.average(v, 0.75).numpy()] if len(opt.decays()) > 1 else []
  with opt.averaged_weights():
    check_reads(average)
    for call in (lambda: opt.average(v), lambda: opt.seed_averages(),
                 lambda: opt.assign_averages(model, None),
                 lambda: opt.averages_by_decay(model),
                 lambda: opt.averaged_model(model),
                 lambda: opt.finalize_variable_values([v]),
                 lambda: tf.train.Checkpoint(a=average).write(files[0]),
                 lambda: tf.train.Checkpoint(a=opt).write(files[0]),
                 *([lambda: opt.z(v)] if name == "schedule_free" else [])):
      with raises_in_place():
        call()
    for function in functions:
      with pytest.raises(NO_VALUE, match=WORDS):
        function()
    table = average.rows if hasattr(average, "rows") else average.stored
    with raises_refused():
      ops.exchange([table], [tf.Variable(tf.cast(v, table.dtype))])
    assert f"dtype={average.dtype}" in repr(average)
    assert average.shape == (2, 1)
    if others:
      assert_same_bits([opt.average(v, 0.75).numpy()], others)
  assert not os.path.exists(files[0] + ".index")
  assert_same_bits(values(opt, [v]), before)
  for read in READS.values():
    read(average)
  tf.train.Checkpoint(a=average).read(files[1]).assert_consumed()
  assert_same_bits([copy.deepcopy(average).numpy()], [average.numpy()])


def test_callbacks_and_files_inside(tmp_path):
  """Those that save the model save the averages; others are refused."""
  model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
  opt = wk.MovingAverage(K.SGD(1.0), 0.5)
  model.compile(opt, "mse")
  x = np.ones([4, 2], np.float32)
  model.train_on_batch(x, x[:, :1])
  before = values(opt, model.weights)

  def run(callback):
    callback.set_params({})
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})

  def snapshot():
    snapshots = wk.Snapshots(str(tmp_path / "snapshots"), 1)
    run(snapshots)
    snapshots._write(1)

  with opt.averaged_weights(model):
    want = [v.numpy() for v in model.weights]
    for call in (
        snapshot, lambda: run(wk.EvaluateWithAverages([
            keras.callbacks.ModelCheckpoint(str(tmp_path / "no.keras"))])),
        lambda: model.evaluate(x, x[:, :1], verbose=0, callbacks=[
            wk.EvaluateWithAverages()]),
        lambda: model.predict(x, verbose=0, callbacks=[
            wk.EvaluateWithAverages()])):
      with raises_in_place():
        call()
    run(keras.callbacks.ModelCheckpoint(str(tmp_path / "yes.keras")))
    tf.saved_model.save(model, str(tmp_path / "saved"))
  assert_same_bits(values(opt, model.weights), before)
  assert not os.path.exists(tmp_path / "no.keras")
  loaded = keras.models.load_model(tmp_path / "yes.keras")
  assert_same_bits([v.numpy() for v in loaded.weights], want)
  saved = tf.train.load_checkpoint(str(tmp_path / "saved/variables/variables"))
  [kernel] = [name for name, shape in saved.get_variable_to_shape_map().items()
              if shape == [2, 1]]  # And no average of it.
  assert_same_bits([saved.get_tensor(kernel)], want[:1])


def test_an_average_that_is_assigned():
  v = keras.Variable([1.0])
  opt = wk.MovingAverage(K.SGD(1.0), 0.5)
  opt.apply([tf.constant([1.0])], [v])
  average = opt.average(v)
  with pytest.raises(RuntimeError, match="must not be assigned or restored"):
    with opt.averaged_weights():
      average.assign([7.0])
  assert (v.numpy(), opt.average(v).numpy()) == (0, 0.5)
  with opt.averaged_weights():
    assert v.numpy() == 0.5
  assert (v.numpy(), opt.average(v).numpy()) == (0, 0.5)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name, dtype", [
    *((name, "float32") for name in ("variable", "schedule_free", "inside",
                                     "v1", "v1_z")),
    ("not_lazy", "bfloat16"), ("swa", "bfloat16")])
def test_what_else_changes_the_variables(name, dtype):
  """Such as a probe on an encoder that is not frozen."""
  v, head = (keras.Variable([[1.0], [2.0]], dtype=dtype) for _ in range(2))
  make = tf1.train.GradientDescentOptimizer
  opt = (wrapopt.MovingAverageOptimizer(make(1.0), 0.5) if name == "v1" else
         wrapopt.ScheduleFreeOptimizer(make(1.0)) if name == "v1_z" else
         READABLE[name]())
  own = v.value if name.startswith("v1") else v
  read = lambda: [v.numpy(), np.array(opt.average(own)),
                  *[np.array(x) for x in (
                      opt.variables() if name.startswith("v1") else
                      values(opt, [v]))]]
  g = tf.constant([[1.0], [0.5]], dtype)
  few = tf.IndexedSlices(tf.ones([1, 1], dtype), [0], [2, 1])
  for _ in range(2):
    opt.apply_gradients([(g, own)])
  sgd, lazy = K.SGD(0.1), wk.LazyAdam(0.1)
  other = K.SGD(0.1, momentum=0.5)
  ours = wk.SWA(K.SGD(0.1))
  old = tf1.train.MomentumOptimizer(0.1, 0.5)
  steps = {
      "sgd": lambda: sgd.apply([g], [v]),
      "sparse": lambda: sgd.apply([few], [v]),
      "momentum": lambda: other.apply([g, g], [head, v]),
      "function": tf.function(lambda: other.apply([g, g], [head, v])),
      "jit": tf.function(lambda: other.apply([g, g], [head, v]),
                         jit_compile=True),
      "ours": lambda: ours.apply([g], [v]),
      "lazy": lambda: lazy.apply([few], [v]),
      "v1": lambda: old.apply_gradients([(g, v.value)]),
      "assign": lambda: v.assign_add(g), "row": lambda: v.value[1].assign([7])}
  for step in steps.values():
    step()  # Slots are made, functions traced, rows in sparse steps copied.
  for kind, step in steps.items():
    before = read()
    for _ in range(2):
      with pytest.raises(RuntimeError, match=(
          "^Variables that hold averages must not be changed inside "
          "averaged_weights")):
        with opt.averaged_weights():
          step()
          step()
      assert_same_bits(read(), before)
  before = read()
  with opt.averaged_weights():  # A probe of its own, and what changes nothing.
    other.apply([g, None], [head, v])
    v.assign(v + 0)
  assert_same_bits(read(), before)
  opt.apply_gradients([(g, own)])


def test_a_probe_in_a_callback():
  model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
  opt = wk.MovingAverage(K.SGD(0.1), 0.5)
  model.compile(opt, "mse")
  x = np.ones([4, 2], np.float32)
  probe = keras.Sequential([model.layers[0], keras.layers.Dense(1)])
  probe.compile("sgd", "mse")
  callback = at_epoch_end(lambda logs: probe.fit(x, x[:, :1], verbose=0))
  with pytest.raises(RuntimeError, match="as by a step of another optimizer"):
    model.fit(x, x[:, :1], verbose=0, callbacks=[
        wk.EvaluateWithAverages([callback])])
  model.layers[0].trainable = False
  probe.compile("sgd", "mse")
  model.fit(x, x[:, :1], verbose=0, callbacks=[
      wk.EvaluateWithAverages([callback])])


@pytest.mark.parametrize("first", ["outer", "inner"])
def test_two_optimizers(first):
  """Each has averages of one variable; one of them is in place."""
  v = keras.Variable([1.0])
  inner = wk.MovingAverage(K.SGD(1.0), 0.5)
  outer = wk.SWA(inner, 0, 1)
  other = wrapopt.MovingAverageOptimizer(
      tf1.train.GradientDescentOptimizer(0.0), 0.5)
  outer.apply([tf.constant([1.0])], [v])
  other.apply_gradients([(tf.constant([1.0]), v.value)])
  before = values(outer, [v])
  opts = [outer, inner] if first == "outer" else [inner, outer]
  with opts[0].averaged_weights():
    in_place = v.numpy()
    for opt in (opts[1], other):
      with pytest.raises(RuntimeError, match="must not be called"):
        with opt.averaged_weights():
          pytest.fail("entered")
    assert_same_bits([v.numpy()], [in_place])
  assert_same_bits(values(outer, [v]), before)
  with opts[1].averaged_weights():
    pass
  with other.averaged_weights():
    pass


def test_two_optimizers_in_a_session():
  with graph_of("resource"):
    w = tf1.get_variable("w", initializer=[1.0])
    opts = [wrapopt.MovingAverageOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), 0.5) for _ in range(2)]
    for opt in opts:
      opt.apply_gradients([(tf.ones([1]), w)])
    with session_of() as session, session_of() as another:
      with opts[0].averaged_weights(session):
        with pytest.raises(RuntimeError, match="of another optimizer.*'w:0'"):
          with opts[1].averaged_weights(session):
            pytest.fail("entered")
        with opts[1].averaged_weights(another):
          pass
      with opts[1].averaged_weights(session):
        pass


# v1


class Overridden(tf1.train.GradientDescentOptimizer):
  """One that no native op takes steps for."""

  def _apply_dense(self, grad, var):
    return super()._apply_dense(grad, var)

  def _resource_apply_dense(self, grad, var):
    return super()._resource_apply_dense(grad, var)


V1 = {
    "one_pass": lambda: wrapopt.MovingAverageOptimizer(
        tf1.train.MomentumOptimizer(1.0, 0.5), [0.5, 0.75]),
    "two_passes": lambda: wrapopt.MovingAverageOptimizer(Overridden(1.0), 0.5),
    "callable": lambda: wrapopt.MovingAverageOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), lambda: 0.5),
    "not_fused": lambda: wrapopt.MovingAverageOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), 0.5, fused=False),
    "parallel": lambda: wrapopt.MovingAverageOptimizer(
        Overridden(1.0), 0.5, sequential_update=False),
    "cross_shard": lambda: wrapopt.MovingAverageOptimizer(
        wrapopt.CrossShardOptimizer(Overridden(1.0)), 0.5),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("kind", ["ref", "resource"])
@pytest.mark.parametrize("name", V1)
def test_a_session(name, kind, dtype, gated, tmp_path):
  with graph_of(kind):
    w = tf1.get_variable("w", initializer=tf.constant([1.0, 2.0], dtype))
    averaging = opt = V1[name]()
    step = tf1.train.get_or_create_global_step()
    if gated:
      opt = wrapopt.DropStaleGradientOptimizer(opt, 5)
    train = opt.minimize(tf.reduce_sum(w), global_step=step)
    saver = tf1.train.Saver()
    with session_of() as session:
      session.run(train)
      state = [v for v in tf1.global_variables()
               if not v.name.startswith("stale")]
      before = session.run([*state, averaging.average(w)])
      for decay in averaging._averages.decays:
        with averaging.averaged_weights(session, decay):
          in_place = session.run(w)
          with pytest.raises(tf.errors.FailedPreconditionError):
            session.run(train)
          with pytest.raises(NO_VALUE):
            saver.save(session, str(tmp_path / "model"))
          assert_same_bits([session.run(w)], [in_place])
        assert_same_bits(session.run([*state, averaging.average(w)]), before)
      session.run(train)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("name", ["average", "z", "float32_of_bfloat16"])
def test_nobody_reads_an_average_of_v1(name, is_dense, tmp_path):
  make = tf1.train.GradientDescentOptimizer
  opt = (wrapopt.ScheduleFreeOptimizer(make(1.0)) if name == "z" else
         wrapopt.MovingAverageOptimizer(make(1.0), [0.5, 0.75] if
                                        name == "average" else 0.5,
                                        shadow_dtype=tf.float32))
  w = tf.Variable(tf.constant(
      [[1.0], [2.0]], tf.float32 if name != "float32_of_bfloat16"
      else tf.bfloat16))
  gradient = tf.IndexedSlices(tf.ones([1, 1], w.dtype), [0], [2, 1])
  if is_dense:
    gradient = tf.convert_to_tensor(gradient)
  opt.apply_gradients([(gradient, w)])
  taken = opt.z(w) if name == "z" else opt.average(w)
  plain = isinstance(taken, tf.Variable)
  function = tf.function(lambda: tf.convert_to_tensor(
      opt.average(w) if name == "z" else taken) + 0)
  function()
  slot = opt.get_slot_names()[0]
  module = tf.Module()
  module.opt, module.w = opt, w
  others = [np.array(opt.average(w, 0.75))] if name == "average" else []
  read = lambda: [w.numpy(), np.array(taken), *map(np.array, opt.variables())]
  before = read()
  with opt.averaged_weights():
    want = w.numpy()
    if not plain:
      check_reads(taken)
    for call in (lambda: opt.average(w), lambda: opt.get_slot(w, slot),
                 lambda: opt.variables(), lambda: opt.averages_by_decay(None),
                 lambda: tf.function(lambda: opt.average(w) + 0)(),
                 lambda: opt.z(w) if name == "z" else opt.averages(),
                 lambda: opt.z(w) if name == "z" else opt._ema.average(w)):
      with raises_in_place():
        call()
    for call in [function, *([lambda: taken + 0] if plain else [])]:
      with pytest.raises(NO_VALUE, match=WORDS):
        call()
    for call in (opt.seed_averages, lambda: copy.deepcopy(opt),
                 lambda: tf.train.Checkpoint(opt=opt).write(
                     str(tmp_path / "a"))):
      with pytest.raises(RuntimeError, match="inside averaged_weights: the a"):
        call()
    if others:
      assert_same_bits([np.array(opt.average(w, 0.75))], others)
    if name != "z":
      assert "ExponentialMovingAverage" in opt.average_name(w)
    tf.saved_model.save(module, str(tmp_path / "saved"))
  assert_same_bits(read(), before)
  assert not os.path.exists(tmp_path / "a.index")
  saved = tf.train.load_checkpoint(str(tmp_path / "saved/variables/variables"))
  assert_same_bits([saved.get_tensor("w/.ATTRIBUTES/VARIABLE_VALUE")], [want])


@pytest.mark.parametrize("kind", ["ref", "resource"])
@pytest.mark.parametrize("name", ["average", "sparse", "z"])
def test_a_session_reads_no_average(name, kind, tmp_path):
  with graph_of(kind):
    w = tf1.get_variable("w", initializer=[[1.0], [2.0]])
    make = tf1.train.GradientDescentOptimizer
    opt = (wrapopt.ScheduleFreeOptimizer(make(1.0)) if name == "z" else
           wrapopt.MovingAverageOptimizer(make(1.0), 0.5))
    gradient = tf.ones([2, 1])
    if name == "sparse":
      gradient = tf.IndexedSlices(gradient, tf.constant([0, 1]), [2, 1])
    train = opt.apply_gradients([(gradient, w)])
    averages = [opt.average(w), tf.convert_to_tensor(opt.average(w)) + 0]
    saver = opt.swapping_saver()
    with session_of() as session:
      session.run(train)
      before = session.run([w, *averages])
      with opt.averaged_weights(session):
        for average in averages:
          with pytest.raises(NO_VALUE, match=WORDS):
            session.run(average)
        with pytest.raises(RuntimeError, match="inside averaged_weights: the"):
          saver.save(session, str(tmp_path / "model"))
      assert_same_bits(session.run([w, *averages]), before)


@pytest.mark.parametrize("kind", ["ref", "resource"])
def test_a_restore_inside(kind, tmp_path):
  with graph_of(kind):
    w = tf1.get_variable("w", initializer=[1.0, 2.0])
    opt = V1["one_pass"]()
    train = opt.apply_gradients([(tf.ones([2]), w)])
    saver = tf1.train.Saver()
    with session_of() as session:
      path = saver.save(session, str(tmp_path / "model"))
      session.run(train)
      with pytest.raises(RuntimeError, match="must not be assigned or restore"):
        with opt.averaged_weights(session):
          saver.restore(session, path)
      assert session.run(w).tolist() == [0, 1]
      # And it works after the block.
      saver.restore(session, path)
      with opt.averaged_weights(session):
        assert session.run(w).tolist() == [1, 2]
      assert session.run(w).tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["ref", "resource"])
def test_another_worker(kind):
  """Two sessions share the variables of a server."""
  server = tf1.train.Server.create_local_server()
  with contextlib.ExitStack() as stack:
    sessions = []
    for _ in range(2):
      stack.enter_context(graph_of(kind))
      w = tf1.get_variable("w", initializer=[1.0])
      opt = V1["one_pass"]()
      train = opt.apply_gradients([(tf.ones([1]), w)])
      session = stack.enter_context(tf1.Session(server.target))
      sessions.append((session, opt, train, w))
      if len(sessions) == 1:
        session.run(tf1.global_variables_initializer())
    (one, opt, *_), (other, its_opt, train, w) = sessions
    other.run(train)
    with one.graph.as_default(), opt.averaged_weights(one):
      with pytest.raises(tf.errors.FailedPreconditionError):
        other.run(train)
      with pytest.raises(tf.errors.FailedPreconditionError):
        with other.graph.as_default(), its_opt.averaged_weights(other):
          pytest.fail("entered")
      assert other.run(w).tolist() == [0.5]
    assert other.run(w).tolist() == [0]
    other.run(train)
