"""Keras optimizers' averages in `tf.distribute` strategies.

Replicas are two CPUs or two worker processes. workers/coordinator_test.py has
parameter servers.
"""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from arrays import assert_same, values
from processes import printed_by
from replicas import REPLICAS, mirrored
from training import ancestors
import wrapopt.keras
from wrapopt.examples import _cluster

optimizers = keras.optimizers


# By name: a wrapper, and the formula of its weights and averages. A formula
# takes the start and the steps of SGD, and returns the weights and, by the name
# that the file of a checkpoint has for them, the averages. All numbers here are
# of few bits, so that they are exact.


def ema(decay, every=1):
  def numbers(start, steps):
    w = average = start
    for i, step in enumerate(steps, 1):
      w = w + step
      if i % every == 0:
        average = decay * average + (1 - decay) * w
    return w, {"average": average}
  return numbers


def two_decays(start, steps):
  w, averages = ema(0.5)(start, steps)
  return w, {**averages,
             "average_0.75": ema(0.75)(start, steps)[1]["average"]}


def swa(start, steps):
  w, seen = start, []
  for i, step in enumerate(steps):
    w = w + step
    if i % 2 == 0:
      seen.append(w)
  return w, {"average": np.mean(seen, axis=0)}


def of_arrays(start, steps):
  w, averages = ema(0.5)(start, steps)
  return w, averages if np.shape(start) else {}


def lookahead(start, steps):
  return nested(start, steps)[0], {"slow": nested(start, steps)[1]["slow"]}


def nested(start, steps):
  w = slow = average = start
  for i, step in enumerate(steps):
    w = w + step
    if i % 2:
      w = slow = slow + (w - slow) / 2
    average = (average + w) / 2
  return w, {"slow": slow, "average": average}


WRAPPERS = {
    "MovingAverage": (lambda o: wrapopt.keras.MovingAverage(o, 0.5), ema(0.5)),
    "two decays": (lambda o: wrapopt.keras.MovingAverage(o, [0.5, 0.75]),
                   two_decays),
    "every second step": (
        lambda o: wrapopt.keras.MovingAverage(o, 0.5, update_every=2),
        ema(0.5, every=2)),
    "some variables": (
        lambda o: wrapopt.keras.MovingAverage(
            o, 0.5, variables=lambda v: v.shape != ()), of_arrays),
    "SWA": (lambda o: wrapopt.keras.SWA(o, 0, 2), swa),
    "Lookahead": (lambda o: wrapopt.keras.Lookahead(o, 2), lookahead),
    "MovingAverage of Lookahead": (
        lambda o: wrapopt.keras.MovingAverage(wrapopt.keras.Lookahead(o, 2),
                                              0.5), nested),
}

STEPS = 3
# None is empty: the sum over CPUs of gradients of shape [0, 2] has shape [0].
STARTS = {"matrix": np.array([[1, -0.5], [2, 3]], np.float32),
          "scalar": np.array(2, np.float32),
          "table": np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)}


def gradients(step, replica):
  """{variable: its gradient in a replica's step}; the table's is sparse.

  Both replicas have row 1, and each another one.
  """
  size = (1 + step) * (1 + replica * 4)
  table = np.zeros_like(STARTS["table"])
  table[[1, 2 * replica]] = size
  return {**{name: np.full_like(STARTS[name], size)
             for name in ("matrix", "scalar")}, "table": table}


def steps_of(name, replicas=REPLICAS):
  """What SGD(0.5) adds to a variable: replicas' gradients are summed."""
  return [-0.5 * sum(gradients(step, r)[name] for r in range(replicas))
          for step in range(STEPS)]


def replicas_of(variable):
  """A variable's values in all replicas of this process, NumPy arrays."""
  value = (variable.value if isinstance(variable, keras.Variable) else variable)
  return [v.numpy() for v in getattr(value, "values", [value])]


def the_one(variable):
  """A variable's value, which all replicas must have."""
  first, *others = replicas_of(variable)
  assert len(others) == REPLICAS - 1
  for other in others:
    np.testing.assert_array_equal(other, first)
  return first


def state_of(opt):
  """{name of an average: its `keras.Variable`}, of all wrappers."""
  return {f"{variable.path}/{name}": average
          for state in opt.averages_of_wrappers
          for name, row in state.rows.items()
          for average, variable in row.values()}


def taking(opt, variables):
  """A function that takes a step in the calling replica."""
  all_grads = {name: tf.constant([[gradients(s, r)[name]
                                   for r in range(REPLICAS)]
                                  for s in range(STEPS)])
               for name in variables}

  def step(number):
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    grads = []
    for name in variables:
      grad = all_grads[name][number, replica]
      if name == "table":
        rows = tf.stack([1, 2 * replica])
        grad = tf.IndexedSlices(tf.gather(grad, rows), rows, tf.shape(grad))
      grads.append(grad)
    opt.apply(grads, list(variables.values()))
  return step


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_loop_in_replicas(wrapper, mode):
  wrap, numbers = WRAPPERS[wrapper]
  strategy = mirrored()
  with strategy.scope():
    variables = {name: keras.Variable(start, name=name)
                 for name, start in STARTS.items()}
    opt = wrap(optimizers.SGD(0.5))
    opt.build(variables.values())
  take = taking(opt, variables)
  run = lambda number: strategy.run(take, args=(number,))
  run = tf.function(run) if mode == "function" else run
  for number in range(STEPS):
    run(tf.constant(number))
  assert the_one(opt.iterations) == STEPS
  averages = state_of(opt)
  for name, variable in variables.items():
    want, wanted = numbers(STARTS[name], steps_of(name))
    np.testing.assert_array_equal(the_one(variable), want)
    for key, average in wanted.items():
      np.testing.assert_array_equal(
          the_one(averages.pop(f"{name}/{key}")), average)
  assert not averages
  if mode == "function":
    assert run.experimental_get_tracing_count() == 1


def reading(decays):
  """(optimizer, weights, a function that takes a step between two reads)."""
  with mirrored().scope():
    weights = [keras.Variable([1.0, 2.0]) for _ in range(3)]
    opt = wrapopt.keras.MovingAverage(optimizers.SGD(1.0), decays)
    opt.build(weights)
  read = lambda: tf.convert_to_tensor(opt.average(weights[0]))

  def replica():
    before = read()
    opt.apply([tf.ones([2])] * 3, weights)
    return before, read()

  return opt, weights, tf.function(lambda: mirrored().run(replica))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("decays", [[0.5], [0.5, 0.75, 0.875]])
def test_averages_of_a_replica_are_captured_as_one_tensor(decays):
  _, _, step = reading(decays)
  step()
  concrete = step.get_concrete_function()
  bundles = [x for x in concrete.captured_inputs
           if x.dtype == tf.resource and x.shape.rank == 1]
  # The bundle of a replica holds its weights, too.
  assert [x.shape[0] for x in bundles] == [3 * (1 + len(decays))] * REPLICAS
  averages = {"average", *(f"average_{d}" for d in decays[1:])}
  captured = [v.name for v in concrete.graph.variables
              if averages & set(v.name.replace(":", "/").split("/"))]
  # Those that are read beside the step.
  assert len(captured) <= REPLICAS


def test_averages_are_read_before_and_after_a_step_in_replicas():
  opt, weights, step = reading([0.5])
  average = opt.average(weights[0])
  for before, after in ((1.0, 0.0), (0.0, -1.5)):  # The gradients are summed.
    for want, seen in zip((before, after), step(), strict=True):
      for x in mirrored().experimental_local_results(seen):
        assert x.numpy()[0] == want
  # The values may be right by chance: the edges of the graph set the order.
  graph = step.get_concrete_function().graph
  handles = {id(v.handle) for v in average.value.values}
  inside = {id(inner) for outer, inner in graph.captures
            if id(outer) in handles}
  reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"
           and id(op.inputs[0]) in inside]
  steps = [op for op in graph.get_operations() if op.type == "Wrapopt>Apply"]
  assert len(inside) == len(steps) == REPLICAS and len(reads) == 2 * REPLICAS
  for handle in {id(op.inputs[0]) for op in reads}:
    before, after = [op for op in reads if id(op.inputs[0]) == handle]
    between = [op for op in steps if before in ancestors(op)]
    assert len(between) == 1 and between[0] in ancestors(after)


def test_built_by_the_first_step_in_replicas():
  """As Keras's own optimizers can be."""
  strategy = mirrored()
  with strategy.scope():
    variables = {"matrix": tf.Variable(STARTS["matrix"])}  # TensorFlow's.
    opt = wrapopt.keras.MovingAverage(optimizers.SGD(0.5), 0.5)
  for number in range(STEPS):
    strategy.run(taking(opt, variables), args=(tf.constant(number),))
  w, want = ema(0.5)(STARTS["matrix"], steps_of("matrix"))
  np.testing.assert_array_equal(the_one(variables["matrix"]), w)
  np.testing.assert_array_equal(
      the_one(opt.average(variables["matrix"])), want["average"])


# Models.

ROWS = 32
BATCH = 8
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
TARGETS = INPUTS @ np.ones((4, 1), np.float32)


def compiled(wrap, inner, strategy=None, dtype="float32"):
  keras.utils.clear_session()  # Names are counted anew.
  keras.utils.set_random_seed(1)
  with strategy.scope() if strategy else contextlib.nullcontext():
    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(8, activation="tanh", dtype=dtype),
        keras.layers.Dense(1, dtype=dtype)])
    # XLA compiles no step of several devices, nor does it with Keras's own
    # optimizers.
    model.compile(wrap(inner()), "mse", jit_compile=False)
  return model


def fit(model):
  model.fit(INPUTS, TARGETS, batch_size=BATCH, epochs=2, verbose=0,
            shuffle=False)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inner", [
    lambda: optimizers.SGD(0.5), lambda: optimizers.Lion(0.5)],
                         ids=["SGD", "Lion"])
def test_a_constraint_acts_once(inner):
  def trained(wrap):
    with mirrored().scope():
      w = keras.Variable([1.0, -2.0])
      w.constraint = lambda w: w / 2  # Tells how often it acts.
      opt = wrap(inner())
      opt.build([w])
    step = tf.function(lambda: mirrored().run(
        lambda: opt.apply([tf.constant([0.25, 0.5])], [w])))
    seen = []
    for _ in range(3):
      step()
      seen.append(the_one(w))
    return opt, w, seen

  _, _, plain = trained(lambda opt: opt)
  for wrap in WRAPPERS["MovingAverage"][0], wrapopt.keras.Lookahead:
    opt, w, seen = trained(wrap)
    np.testing.assert_array_equal(seen, plain)
  opt, w, _ = trained(WRAPPERS["MovingAverage"][0])
  expected = np.array([1.0, -2.0])
  for value in plain:
    expected = (expected + value) / 2
  np.testing.assert_allclose(the_one(opt.average(w)), expected, rtol=1e-6)


@pytest.mark.by_day(0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_averages_in_place_of_weights(dtype):
  """On all replicas, and back bit for bit, after an error too."""
  wrap, _ = WRAPPERS["MovingAverage"]
  inner = lambda: optimizers.SGD(0.1)
  model = compiled(wrap, inner, mirrored(), dtype)
  fit(model)
  model.train_on_batch(INPUTS[:BATCH], TARGETS[:BATCH])  # Raw weights again.
  opt = model.optimizer
  variables = model.trainable_variables
  raw = [the_one(v) for v in variables]
  averages = [the_one(opt.average(v)) for v in variables]
  assert {a.dtype.name for a in averages} == {"float32"}
  averages = [a.astype(dtype) for a in averages]
  plain = compiled(lambda opt: opt, inner, dtype=dtype)
  plain.set_weights(averages)
  with pytest.raises(KeyError, match="an error"):
    with opt.averaged_weights(model):
      assert_same(map(the_one, variables), averages)
      assert model.evaluate(INPUTS, TARGETS, verbose=0) == pytest.approx(
          plain.evaluate(INPUTS, TARGETS, verbose=0),
          rel=1e-5 if dtype == "float32" else 1e-2)
      raise KeyError("an error")
  assert not any(map(np.array_equal, raw, averages))
  assert_same(map(the_one, variables), raw)
  assert_same([the_one(opt.average(v)).astype(dtype) for v in variables],
              averages)
  opt.seed_averages()
  for v, value in zip(variables, raw):
    np.testing.assert_array_equal(
        the_one(opt.average(v)), value.astype(np.float32))
    opt.average(v).assign(np.ones_like(value))
  opt.finalize_variable_values(variables)
  for v in variables:
    np.testing.assert_array_equal(the_one(v), np.ones_like(the_one(v)))


@pytest.mark.by_day(0)
def test_one_process_goes_on_from_a_checkpoint_of_replicas(tmp_path):
  wrap, _ = WRAPPERS["MovingAverage of Lookahead"]
  nadam = lambda: optimizers.Nadam(0.01)
  model = compiled(wrap, nadam, mirrored())
  fit(model)
  path = tf.train.Checkpoint(model=model, opt=model.optimizer).save(
      str(tmp_path / "checkpoint"))
  restored = compiled(wrap, nadam)
  restored.optimizer.build(restored.trainable_variables)
  tf.train.Checkpoint(model=restored, opt=restored.optimizer).restore(
      path).assert_consumed()
  want, got = (
      [*m.optimizer.inner_optimizer.inner_optimizer.variables, *m.weights,
       *(average for state in m.optimizer.averages_of_wrappers
         for average, _ in state.pairs())] for m in (model, restored))
  # Nadam has two slots and a product; there are two averages.
  assert len(want) == 3 + 4 * (2 + 1 + 2)
  assert_same(values(want), values(got))


# Processes: worker r's gradient is 1 + r. Keras 3.15 has no `fit` there, around
# no optimizer.
WORKERS = """
import json
import multiprocessing
import os
import sys

import keras
import tensorflow as tf
import wrapopt.keras

def work(workers, index, all_done):
  os.environ["TF_CONFIG"] = json.dumps({
      "cluster": {"worker": workers},
      "task": {"type": "worker", "index": index}})
  # A worker whose peers are gone must end.
  strategy = tf.distribute.MultiWorkerMirroredStrategy(
      communication_options=tf.distribute.experimental.CommunicationOptions(
          timeout_seconds=120))
  assert strategy.num_replicas_in_sync == len(workers)
  found = {}
  for name, wrap in {
      "ema": lambda opt: wrapopt.keras.MovingAverage(opt, 0.5),
      "swa": lambda opt: wrapopt.keras.SWA(opt, 0, 2),
      "lookahead": lambda opt: wrapopt.keras.Lookahead(opt, 2)}.items():
    with strategy.scope():
      w = keras.Variable([16.0], name="w")
      opt = wrap(keras.optimizers.SGD(0.5))
      opt.build([w])

    @tf.function
    def step():
      def replica():
        shard = tf.distribute.get_replica_context().replica_id_in_sync_group
        opt.apply([tf.reshape(1.0 + tf.cast(shard, tf.float32), [1])], [w])
      strategy.run(replica)

    for _ in range(3):
      step()
    average = (opt.slow_weights if name == "lookahead" else opt.average)(w)
    found[name] = [w.numpy().item(), average.numpy().item()]
    if name == "ema":
      with opt.averaged_weights():
        found[name].append(w.numpy().item())
      found[name].append(w.numpy().item())
  # In one piece: others write to the same pipe.
  os.write(1, f"{json.dumps([index, found])}\\n".encode())
  # A worker that ends aborts the collective that a slower one is still in.
  all_done.wait(120)

# They start fast: the import is done, and nothing of TensorFlow has run yet.
context = multiprocessing.get_context("fork")
workers = sys.argv[1:]
all_done = context.Barrier(len(workers))
processes = [
    context.Process(target=work, args=(workers, index, all_done), daemon=True)
    for index in range(len(workers))]
for process in processes:
  process.start()
for process in processes:
  process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def run(*args):
  printed = printed_by(*args, CUDA_VISIBLE_DEVICES="-1",
                       no_grpc_proxy="localhost")
  return [json.loads(line) for line in printed.splitlines()]


def test_worker_processes():
  addresses = [f"localhost:{port}" for port in _cluster.free_ports(2)]
  found = dict(run("-c", WORKERS, *addresses))
  start, steps = np.array(16.0), [np.array(-1.5)] * 3
  want = {name: [float(w), float(averages.popitem()[1])]
          for name, numbers in (
              ("ema", ema(0.5)), ("swa", swa), ("lookahead", lookahead))
          for w, averages in [numbers(start, steps)]}
  w, average = want["ema"]
  want["ema"] += [average, w]  # In place, and back.
  for both in found.values():
    assert both == want
  assert sorted(found) == [0, 1]


class Halving(keras.optimizers.SGD):
  """Decays weights in each replica by itself, like Keras's Muon."""

  def _apply_weight_decay(self, variables):
    for v in variables:
      v.assign(v * 0.5)


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("wrapper", ["MovingAverage", "Lookahead"])
def test_averages_of_all_replicas_begin_at_the_same_value(wrapper, function):
  """When a replica's step begins, the weights of another have decayed."""
  strategy = mirrored()
  with strategy.scope():
    v = keras.Variable([8.0])
    opt = (wrapopt.keras.MovingAverage(Halving(0.25), 0.5)
           if wrapper == "MovingAverage" else
           wrapopt.keras.Lookahead(Halving(0.25), 2))
    opt.build([v])
  step = lambda: strategy.run(lambda: opt.apply([tf.constant([0.5])], [v]))
  (tf.function(step) if function else step)()
  average = opt._store.rows[0]
  # The gradients of the two replicas sum up to 1.
  value = 8.0 / 2 - 0.25
  want = (8.0 + value) / 2 if wrapper == "MovingAverage" else 8.0
  for x, expected in (v, value), (average[opt._var_key(v)], want):
    got = [part.numpy().item() for part in
           strategy.experimental_local_results(x.value)]
    assert got == [expected] * 2
