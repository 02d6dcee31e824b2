"""Steps that a ClusterCoordinator schedules; prints what came of them as JSON.

A program of its own, since TensorFlow ends a process that has lost its cluster.
"""

import collections
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import training
import wrapopt
from wrapopt._gates import _tokens
import wrapopt.keras as wk
from wrapopt.examples import _cluster

tf1 = tf.compat.v1
K = keras.optimizers
STEPS = 60
GRADIENTS = np.array([3., -1., .5, 2.])


@keras.saving.register_keras_serializable("tests")
class Own(K.schedules.LearningRateSchedule):
  """2^-(number of the step): the sum tells which numbers the steps had."""

  def __call__(self, step):
    return 2.0 ** -tf.cast(step, tf.float64)


def connect(cluster):
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
      tf.train.ClusterSpec(cluster.spec), rpc_layer="grpc")
  strategy = tf.distribute.ParameterServerStrategy(resolver)
  return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def schedule(coordinator, step, n):
  for _ in range(n):
    coordinator.schedule(step)
  coordinator.join()


def variables(strategy, opt, values):
  with strategy.scope():
    made = [keras.Variable(v, name=f"v{i}", dtype="float64")
            for i, v in enumerate(values)]
    opt = opt()
    if isinstance(opt, keras.optimizers.Optimizer):
      opt.build(made)
  return made, opt


def shared(strategy, make, name):
  """Variables on two servers, an optimizer, and the count of its steps."""
  with strategy.scope():
    count = tf.Variable(0, dtype=tf.int64)
  made, opt = variables(strategy, lambda: (
      make(count) if "gated" in name else make()), [np.zeros(3), np.zeros(2)])
  if name == "constraint":
    made[0].constraint = Scales()
  return made, opt, getattr(opt, "iterations", count)


class Scales(keras.constraints.Constraint):
  """Multiplies weights by a tensor of a worker, after an op of the worker."""

  def __call__(self, w):
    with tf.control_dependencies([self.after]):
      return w * self.factor


def take(made, opt, count):
  """A step whose gradients are 1."""
  with (opt.record_step() if hasattr(opt, "record_step") else
        contextlib.nullcontext()):
    gradients = [1 + 0 * v.value.read_value() for v in made]
  if getattr(made[0], "constraint", None):
    made[0].constraint.factor = gradients[1][0]
    made[0].constraint.after = tf.random.uniform([])  # It is not pruned.
  if hasattr(opt, "apply"):
    opt.apply(gradients, made)
  else:
    opt.apply_gradients(zip(gradients, [v.value for v in made]), count)


UNLOCKED = {
    "MovingAverage": lambda: wk.MovingAverage(K.SGD(1.0), 0.5),
    "PowerDecay": lambda: wk.MovingAverage(
        K.SGD(1.0), wrapopt.PowerDecay(0.1), update_every=3),
    "BEMA": lambda: wk.MovingAverage(K.SGD(1.0), wrapopt.BEMA()),
    "DropStaleGradient": lambda: wk.DropStaleGradient(K.SGD(1.0), 1000),
    "of version 1": lambda: wrapopt.MovingAverageOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), 0.5)}
LOCKED = {
    "Lookahead": lambda: wk.Lookahead(K.SGD(1.0), 5, 1.0),
    "SWA": lambda: wk.SWA(K.SGD(1.0), 0, 1),
    "PrimalAverage": lambda: wk.PrimalAverage(K.SGD(1.0)),
    "ScheduleFree": lambda: wk.ScheduleFree(K.SGD(1.0)),
    "constraint": lambda: wk.MovingAverage(K.SGD(1.0), 0.5),
    "clipped": lambda: wk.MovingAverage(
        K.Adamax(1.0, global_clipnorm=100.0), 0.5),
    "DropStaleGradient(Nadam)": lambda: wk.DropStaleGradient(
        K.Nadam(1.0), 1000),
    "DropStaleGradient, GapAware": lambda: wk.DropStaleGradient(
        K.SGD(1.0), 1000, policy=wrapopt.GapAware()),
    "of version 1, with powers": lambda: wrapopt.MovingAverageOptimizer(
        tf1.train.AdamOptimizer(1.0), 0.5),
    "of version 1, gated": lambda count: wrapopt.DropStaleGradientOptimizer(
        tf1.train.AdamOptimizer(1.0), 1000, global_step=count),
    "of version 1, gated, GapAware":
        lambda count: wrapopt.DropStaleGradientOptimizer(
            tf1.train.GradientDescentOptimizer(1.0), 1000, global_step=count,
            policy=wrapopt.GapAware()),
    "of version 1, without an op": lambda: wrapopt.MovingAverageOptimizer(
        tf1.train.FtrlOptimizer(1.0, -0.75), 0.5),
    "of version 1, Schedule-Free": lambda: wrapopt.ScheduleFreeOptimizer(
        tf1.train.GradientDescentOptimizer(1.0))}


# 1. Counts, and the numbers of the steps.


def counts(strategy, coordinator):
  for name, wrap in {
      "Keras": lambda opt: opt,
      "MovingAverage": lambda opt: wk.MovingAverage(opt, 0.5),
      "SWA": lambda opt: wk.SWA(opt, 0, 1),
      "Lookahead": lambda opt: wk.Lookahead(opt, 1000),
      "DropStaleGradient": lambda opt: wk.DropStaleGradient(opt, 1000),
      "MovingAverage(DropStaleGradient)": lambda opt: wk.MovingAverage(
          wk.DropStaleGradient(opt, 1000), 0.5)}.items():
    for kind in K.SGD, K.Adafactor:
      for replicas in (False, True) if name == "MovingAverage" else (True,):
        [w, other], opt = variables(
            strategy, lambda: wrap(kind(Own())), [4.0, 0.0])
        gate = next((x for x in [opt, getattr(opt, "inner_optimizer", None)]
                     if isinstance(x, wk.DropStaleGradient)), None)
        one = tf.ones([], tf.float64)

        def take():
          if gate:
            with gate.record_step():
              gradient = tf.identity(one)
          else:
            gradient = one
          opt.apply([gradient, gradient], [w, other])

        @tf.function
        def step():
          if replicas:
            strategy.run(take)
          else:
            take()

        schedule(coordinator, step, STEPS)
        yield f"{name}({kind.__name__}), replicas={replicas}", {
            "iterations": int(opt.iterations), "w": float(w),
            "other": float(other),
            "servers": len({v.value.device for v in (w, other)})}


# 2. Racing steps with recorded gradients.


def races(strategy, coordinator):
  for name, wrap in {
      "Adam": lambda: wk.MovingAverage(K.Adam(0.25, 0.5, 0.75), 0.5),
      "LazyAdam": lambda: wk.LazyAdam(0.25, 0.5, 0.75),
      "gated": lambda: wk.DropStaleGradient(K.Adam(0.25, 0.5, 0.75), 9)
  }.items():
    for attempt in range(2):
      made, opt = variables(strategy, wrap, [np.zeros(1), np.ones(1)])
      gradients = tf.constant(GRADIENTS)

      @tf.function
      def step(i):
        if isinstance(opt, wk.DropStaleGradient):
          with opt.record_step():
            g = gradients[i][None]
        else:
          g = gradients[i][None]
        opt.apply([g, 2 * g], made)

      for i in range(len(GRADIENTS)):
        coordinator.schedule(step, args=(tf.constant(i),))
      coordinator.join()
      yield f"{name} {attempt}", {
          "iterations": int(opt.iterations),
          "values": [float(v.value[0]) for v in made],
          "averages": [float(tf.convert_to_tensor(opt.average(v))[0])
                       for v in made] if hasattr(opt, "average") else None}


def several(strategy, coordinator):
  """Functions of several steps."""
  for name, wrap in {
      "MovingAverage": lambda: wk.MovingAverage(K.Adam(0.25), 0.5),
      # The norm is computed while the step has the lock.
      "DropStaleGradient": lambda: wk.DropStaleGradient(
          K.Adam(0.25, global_clipnorm=1.0), 1000)}.items():
    models = [variables(strategy, wrap, [np.zeros(2), np.ones(3)])
              for _ in range(2)]

    @tf.function
    def step():
      take(*models[0], None)
      take(*models[1], None)
      for _ in tf.range(2):
        take(*models[0], None)

    schedule(coordinator, step, 8)
    yield name, [int(opt.iterations) for _, opt in models]
  for name in ("PowerDecay", "Lookahead", "DropStaleGradient(Nadam)",
               "of version 1, gated"):
    made, opt, count = shared(strategy, {**UNLOCKED, **LOCKED}[name], name)

    @tf.function
    def in_branches(twice):
      for _ in tf.range(2):
        take(made, opt, count)
      take(made, opt, count)
      if twice:
        take(made, opt, count)

    for twice in (True, False) * 2:
      coordinator.schedule(in_branches, args=(tf.constant(twice),))
    coordinator.join()
    yield f"{name} in branches", [int(count)]


# 3. What a step sends.


def sent(graph):
  """Counts the messages between processes that the ops of a graph cause."""
  handles = {id(inner): outer for outer, inner in graph.captures}

  def task(op):
    device = op.device
    if op.type in ("ReadVariableOp", "ResourceGather"):
      # TensorFlow places it with its variable. A token's is not captured yet.
      device = handles.get(id(op.inputs[0]), op).device
    spec = tf.DeviceSpec.from_string(device or "")
    return f"{spec.job}:{spec.task}" if spec.job == "ps" else "worker"

  tensors, controls = set(), set()
  for op in graph.get_operations():
    for t in op.inputs:
      if (t.dtype != tf.resource and t.op.type != "Placeholder" and
          task(t.op) != task(op)):
        tensors.add((t.ref(), task(t.op), task(op)))
    for c in op.control_inputs:
      if task(c) != task(op):
        controls.add((c.name, task(c), task(op), *(
            [op.name] if os.environ.get("SHOW_TRAFFIC") else [])))
  if os.environ.get("SHOW_TRAFFIC"):
    for line in sorted(map(str, tensors | controls)):
      print(line, file=sys.stderr)
  return {"tensors": len(tensors), "controls": len(controls),
          "arguments": [t.name for t in graph.inputs
                        if t.dtype != tf.resource],
          "arrived": {kind: sorted({
              " and ".join(sorted({
                  task(op) for op in training.ancestors(applied)
                  if op.type == "Identity" and "stack" not in op.name} -
                                  {"worker"}))
              for inner in training.graphs_in(graph)
              for applied in inner.get_operations()
              if applied.type.startswith(kind)})
                      for kind in ("Wrapopt>LockSteps", "Wrapopt>Apply")},
          "updates": collections.Counter(
              f"{training.type_of(op)} on {task(op)}"
              for inner in training.graphs_in(graph)
              for op in inner.get_operations()
              if "Apply" in op.type or op.type.startswith("Assign"))}


def locked(strategy, coordinator):
  """The names of functions whose graphs TensorFlow dumps."""
  for name, make in LOCKED.items():
    made, opt, count = shared(strategy, make, name)

    @tf.function
    def locked_step():
      strategy.run(lambda: take(made, opt, count))

    schedule(coordinator, locked_step, 1)
    with strategy.scope():
      yield name, locked_step.get_concrete_function().name.decode()


def on_a_worker(strategy, coordinator):
  """The error of a step that is locked, and has an op on a worker."""
  del coordinator

  class OnWorker(keras.constraints.Constraint):

    def __call__(self, w):
      with tf.device("/job:worker/task:0"):
        return tf.identity(w)

  made, opt = variables(strategy, UNLOCKED["MovingAverage"], [np.zeros(1)])
  made[0].constraint = OnWorker()
  ones = tf.ones(1, tf.float64)
  try:
    tf.function(lambda: strategy.run(
        lambda: opt.apply([ones], made))).get_concrete_function()
  except NotImplementedError as error:
    yield "error", str(error)


def traffic(strategy, coordinator):
  del coordinator
  # The last are too large to be sent before a gate admits them.
  for n, size in (2, 8), (20, 8), (3, 8192):
    for name, wrap in {
        "Keras": lambda opt: opt,
        "MovingAverage": lambda opt: wk.MovingAverage(opt, 0.5),
        "DropStaleGradient": lambda opt: wk.DropStaleGradient(opt, 3),
    }.items():
      made, opt = variables(strategy, lambda: wrap(K.Adam(0.5)),
                            [np.ones(size)] * n)

      @tf.function
      def step():
        def replica():
          if isinstance(opt, wk.DropStaleGradient):
            with opt.record_step():
              gradients = [2 * v.value.read_value() for v in made]
          else:
            gradients = [2 * v.value.read_value() for v in made]
          opt.apply(gradients, made)
        strategy.run(replica)

      with strategy.scope():
        graph = step.get_concrete_function().graph
      yield f"{name} {n}", sent(graph)


def second_tries(strategy, coordinator):
  """Steps whose tries have one token: the second one changes nothing."""
  for every in 1, 2:
    yield f"every {every}", list(_states_of_tries(strategy, coordinator, every))


def _states_of_tries(strategy, coordinator, every):
  with strategy.scope():
    model = keras.Sequential([keras.Input([3]),
                              keras.layers.BatchNormalization()])
    inner = K.SGD(1.0)
    inner.build(model.trainable_variables)
    inner.iterations.assign(3)  # The averages begin later than the optimizer.
    opt = wk.MovingAverage(inner, 0.5, average_batch_norm=True,
                           update_every=every)
    opt.build(model.trainable_variables)
    opt.set_model(model)

  @tf.function
  def step():
    opt.apply([1 + 0 * v.value for v in model.trainable_variables],
              model.trainable_variables)
    for v in model.non_trainable_variables:
      v.assign(v + 1.0)

  def state():
    return [np.ravel(tf.convert_to_tensor(x)).tolist()
            for x in (*model.trainable_variables,
                      *map(opt.average, model.variables), *opt.variables)]

  tokens = iter([5, 5, 6, 6, 7, 7, 8, 8])
  of_closure, _tokens._of_closure = _tokens._of_closure, lambda: next(tokens)
  try:
    for _ in range(8):
      schedule(coordinator, step, 1)
      yield state()
  finally:
    _tokens._of_closure = of_closure


def refused(strategy, coordinator):
  """What steps that a gate refuses change."""
  for name, policy in ("drop", "drop"), ("scale", "scale"), (
      "GapAware", wrapopt.GapAware()):
    with strategy.scope():
      model = keras.Sequential([keras.Input([3]),
                                keras.layers.BatchNormalization()])
      gate = wk.DropStaleGradient(K.Adam(0.5), -1, policy=policy)
      opt = gate if name == "GapAware" else wk.MovingAverage(
          gate, wrapopt.PowerDecay(0.1), average_batch_norm=True,
          update_every=2)
      opt.build(model.trainable_variables)
      if opt is not gate:
        opt.set_model(model)

    @tf.function
    def step():
      with gate.record_step():
        gradients = [1 + v.value for v in model.trainable_variables]
      opt.apply(gradients, model.trainable_variables)

    # All but the counts of gates, and that averages have begun.
    state = lambda: [
        tf.convert_to_tensor(x).numpy().tolist() for x in (
            *(v for inner in wrapopt.keras._steps._views.innermost(opt)
              for v in inner.variables), *model.variables,
            *(v for v in opt.variables if not v.path.endswith("/begun") and
              not any(v is other for other in gate.variables)))]
    before = state()
    schedule(coordinator, step, 5)
    with strategy.scope():
      graph = step.get_concrete_function().graph
    stats = gate.staleness_stats()
    yield name, {
        "same": state() == before, "dropped": int(stats.dropped),
        "admitted": int(stats.admitted), "branches": sum(
            op.type in ("If", "StatelessIf") for op in graph.get_operations())}


# 4. Workers that are killed.


def faults(strategy, coordinator, cluster, kills=20, n=1500):
  for name, limit in ("ungated", None), ("gated", 2), ("locked", None):
    with strategy.scope():
      made = [keras.Variable(np.zeros(3)), keras.Variable(np.zeros(2))]
      opt = K.SGD(1.0)
      opt = (wk.Lookahead(opt, 5, 1.0) if name == "locked" else
             wk.MovingAverage(opt, 0.5) if limit is None else
             wk.DropStaleGradient(opt, limit))
      opt.build(made)

    @tf.function
    def step():
      def gradients():
        # Takes some time.
        x = tf.ones([200, 200])
        for _ in tf.range(8):
          x = tf.matmul(x, x) / 200
        one = tf.cast(tf.reduce_mean(x), tf.float64)
        return [one + 0 * v.value for v in made]

      if limit is None:
        found = gradients()
      else:
        with opt.record_step():
          found = gradients()
      opt.apply(found, made)

    rng = random.Random(0)
    for _ in range(kills):
      for _ in range(n // kills):
        coordinator.schedule(step)
      time.sleep(rng.uniform(0.0, 0.4))
      cluster.restart("worker", rng.randrange(3))
    coordinator.join()
    stats = None if limit is None else opt.staleness_stats()
    yield name, {
        "scheduled": n, "iterations": int(opt.iterations),
        "w": [v.numpy().tolist() for v in made],
        "in flight": int(wrapopt.ops.staleness_record(
            opt.iterations.value)[1]),
        "admitted": stats and stats.admitted_histogram.tolist(),
        "dropped": stats and int(stats.dropped)}


def stops(strategy, coordinator, cluster, n=20, steps=30):
  """Workers that are stopped at random moments, while the others go on."""
  # To remove a function or what it used, TensorFlow calls all workers.
  rng, kept = random.Random(0), []
  for name, make in {**UNLOCKED, **LOCKED}.items():
    made, opt, count = shared(strategy, make, name)

    @tf.function
    def step():
      take(made, opt, count)

    kept.append((step, made, opt, count))
    schedule(coordinator, step, 6)
    late, scheduled = 0, 6
    queue = coordinator._cluster.closure_queue
    # To read the count, TensorFlow may wait for a worker.
    ended = lambda: (scheduled - queue._queue.qsize() -
                     queue._inflight_closure_count)
    for _ in range(n):
      pid = cluster.tasks["worker", rng.randrange(3)].process.pid
      # It goes on without a word from here, if no thread runs here.
      with subprocess.Popen(
          ["bash", "-c", f"sleep {rng.uniform(0, 0.1)}; kill -STOP {pid}; "
           f"echo; read -t 60 || echo late; kill -CONT {pid}"],
          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        stopped = threading.Thread(target=other.stdout.readline)
        stopped.start()
        until = None
        while until is None or ended() < until:
          if scheduled - ended() < 9:
            coordinator.schedule(step)
            scheduled += 1
          if until is None and not stopped.is_alive():
            until = ended() + steps
        found, _ = other.communicate("\n")
        late += "late" in found
    coordinator.join()
    yield name, {"late": late, "scheduled": scheduled,
                 "iterations": int(count),
                 "w": [v.numpy().tolist() for v in made]}


# 5. Optimizers of tf.compat.v1.


def v1(strategy, coordinator):
  train = tf1.train
  for name, wrap in {
      "MovingAverage": lambda opt, step: wrapopt.MovingAverageOptimizer(
          opt, wrapopt.PowerDecay(0.1)),
      "DropStaleGradient": lambda opt, step: wrapopt.DropStaleGradientOptimizer(
          opt, 1000, global_step=step),
      "MovingAverage(DropStaleGradient)":
          lambda opt, step: wrapopt.MovingAverageOptimizer(
              wrapopt.DropStaleGradientOptimizer(opt, 1000, global_step=step),
              0.5)}.items():
    for kind in (train.GradientDescentOptimizer, train.AdamOptimizer,
                 lambda rate: train.FtrlOptimizer(rate, -0.75)):
      for replicas in True, False:
        if not replicas and not isinstance(kind, type):
          continue  # TensorFlow's own steps are those of replicas.
        with strategy.scope():
          w, other = [tf.Variable(v, dtype=tf.float64) for v in (4.0, 0.0)]
          count = tf.Variable(0, dtype=tf.int64)
        opt = wrap(kind(0.125), count)

        def take():
          gradients = opt.compute_gradients(lambda: w + 2 * other, [w, other])
          opt.apply_gradients(gradients, count)

        @tf.function
        def step():
          if replicas:
            strategy.run(take)
          else:
            take()

        schedule(coordinator, step, STEPS)
        average = (opt.average(w) if hasattr(opt, "average") else None)
        of = kind.__name__ if isinstance(kind, type) else "Ftrl"
        yield f"{name}({of}), replicas={replicas}", {
            "count": int(count), "w": float(w), "other": float(other),
            "average": None if average is None else float(average),
            "state": sorted(float(v) for v in opt.variables()
                            if v.shape.rank == 0 and "beta" in v.name),
            "servers": len({v.device for v in (w, other)})}


# 6. Gradients of old weights, exactly: two of the same weights in a function.


def compensation(strategy, coordinator):
  for name, policy in {"none": "drop",
                       "adaptive": wrapopt.DelayCompensation(0.5, decay=0.75),
                       "gap": wrapopt.GapAware(0.75)}.items():
    values = [np.linspace(-1, 1, 5), np.linspace(1, 2, 3)]

    def make():
      made = [keras.Variable(v, dtype="float64") for v in values]
      opt = wk.DropStaleGradient(K.SGD(0.125, momentum=0.5), 5, policy=policy)
      opt.build(made)

      @tf.function
      def step():
        pairs = []
        for _ in range(2):
          with opt.record_step() as recorded:
            pairs.append((recorded, [v.value * v.value for v in made]))
        for recorded, gradients in pairs:
          opt.apply_recorded(recorded, gradients, made)

      return made, opt, step

    here, _, local = make()
    with strategy.scope():
      made, opt, step = make()
    for _ in range(3):
      local()
      coordinator.schedule(step)
      coordinator.join()
    yield name, {
        "iterations": int(opt.iterations),
        "servers": len({v.value.device for v in made}),
        "here": [v.numpy().tolist() for v in here],
        "there": [v.numpy().tolist() for v in made]}


# 7. A table with rows on both servers.


def embeddings(strategy, coordinator):
  for kind in K.SGD, wk.LazyAdam:
    found = {}
    for lazy in None, False:
      with strategy.scope():
        shards = []
        for _ in range(2):  # One on each server.
          shards.append(tf.Variable(np.ones([3, 2]), dtype=tf.float64))
        opt = wk.MovingAverage(kind(0.5), 0.75, lazy=lazy)
        opt.build(shards)
      assert len({v.device for v in shards}) == 2

      @tf.function
      def step(ids):
        with tf.GradientTape() as tape:
          rows = tf.nn.embedding_lookup(shards, ids)
          loss = tf.reduce_sum(rows * rows)
        opt.apply(tape.gradient(loss, shards), shards)

      for ids in [0, 3], [1, 2], [5, 5], [0, 1], [4, 0], [3, 3]:
        coordinator.schedule(step, args=(tf.constant(ids),))
        coordinator.join()
      read = lambda: [tf.convert_to_tensor(v).numpy().tolist() for v in shards]
      averages = [tf.convert_to_tensor(opt.average(v)).numpy().tolist()
                  for v in shards]
      values = read()
      with opt.averaged_weights():
        swapped = read()
      graph = step.get_concrete_function(tf.TensorSpec([2], tf.int32)).graph
      found[str(lazy)] = {
          "values": values, "averages": averages, "in place": swapped,
          "back": read(), "is lazy": opt.is_lazy(shards[0]),
          "iterations": int(opt.iterations),
          "reads": sum(op.type == "ResourceGather"
                       for op in graph.get_operations()),
          "whole": sum(op.type == "ReadVariableOp" and
                       op.outputs[0].shape.rank == 2
                       for op in graph.get_operations()),
          "updates": sent(graph)["updates"]}
    yield kind.__name__, found
  averages = {}
  for scope in strategy.scope(), contextlib.nullcontext():
    with scope:
      shards = [tf.Variable(np.ones([3, 2]), dtype=tf.float64)
                for _ in range(2)]
    opt = wrapopt.MovingAverageOptimizer(
        tf1.train.GradientDescentOptimizer(0.5), 0.75)

    @tf.function
    def step(ids):
      with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup(shards, ids)
        loss = tf.reduce_sum(rows * rows)
      opt.apply_gradients(zip(tape.gradient(loss, shards), shards))

    for ids in [0, 3], [1, 2], [5, 5], [0, 1], [4, 0], [3, 3]:
      if averages:
        step(tf.constant(ids))
      else:
        coordinator.schedule(step, args=(tf.constant(ids),))
        coordinator.join()
    averages["here" if averages else "there"] = {
        "is lazy": [opt.is_lazy(v) for v in shards],
        "averages": [tf.convert_to_tensor(opt.average(v)).numpy().tolist()
                     for v in shards]}
  yield "v1", averages


# 8. Averages on servers.


def averages(strategy, coordinator):
  """Averages after three steps in turn, and after twenty more at once."""
  for name, wrap in {
      "Keras": lambda opt: opt,
      "MovingAverage": lambda opt: wk.MovingAverage(opt, 0.5),
      "SWA": lambda opt: wk.SWA(opt, 0, 2),
      "Lookahead": lambda opt: wk.Lookahead(opt, 2)}.items():
    made, opt = variables(strategy, lambda: wrap(K.SGD(0.5)),
                          [np.full([1], 16.0), np.full([3, 1], 16.0)])
    found = {"states": []}

    def replica():
      opt.apply([tf.constant([3.0], tf.float64), tf.IndexedSlices(
          tf.constant([[3.0]], tf.float64), *map(tf.constant, ([1], [3, 1])))],
                made)

    step = tf.function(lambda: strategy.run(replica))

    def see():
      found["states"].append([np.ravel(v).tolist() for v in (*made, *kept)])

    for _ in range(3):
      schedule(coordinator, step, 1)
    average = getattr(opt, "slow_weights", getattr(opt, "average", None))
    kept = [average(v) for v in made] if average else []
    see()
    if hasattr(opt, "averaged_weights"):
      with opt.averaged_weights():
        found["in place"] = [np.ravel(v).tolist() for v in made]
      see()
    found["devices"] = [[v.value.device for v in of] for of in (made, kept)]
    schedule(coordinator, step, 20)
    see()
    yield name, found


def main():
  names = sys.argv[1:]
  with _cluster.Cluster([], ps=2, worker=3) as cluster:
    strategy, coordinator = connect(cluster)
    for name in names:
      for key, found in globals()[name](strategy, coordinator, *(
          [cluster] if name in ("faults", "stops") else [])):
        print(json.dumps([name, key, found]), flush=True)


if __name__ == "__main__":
  main()
  os._exit(0)
