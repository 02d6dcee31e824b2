"""Steps whose ops take the handles of all variables as one tensor."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from modes import control_flow
from training import ancestors, is_packed, session_of
from wrapopt import _bundle
from wrapopt import _loader

v1 = tf.compat.v1


def make(count=3, inner=None, decay=0.5):
  """(variables, optimizer), whose averages and slots are made."""
  variables = [tf.Variable([1.0, 2.0]) for _ in range(count)]
  opt = wrapopt.MovingAverageOptimizer(
      inner or v1.train.MomentumOptimizer(1.0, 0.5), decay, lazy=False)
  opt.apply_gradients([(tf.zeros([2]), v) for v in variables])
  return variables, opt


def step_of(opt, variables):
  opt.apply_gradients([(tf.ones([2]), v) for v in variables])


def types(function, *args):
  return [op.type for op in
          function.get_concrete_function(*args).graph.get_operations()]


def steps_in(function):
  """The ops that take a step."""
  return [op for op in function.get_concrete_function().graph.get_operations()
          if op.type == "Wrapopt>Apply"]


def bundles(function):
  """Whether the one step in a function takes one tensor of handles."""
  [op] = steps_in(function)
  return is_packed(op)


# What a function captures.


@pytest.mark.parametrize("decays", [0.5, [0.5, 0.75, 0.875]])
def test_a_step_captures_one_tensor(decays):
  variables, opt = make(20, decay=decays)
  function = tf.function(lambda: step_of(opt, variables))
  function()
  concrete = function.get_concrete_function()
  # Not 20 variables, 20 slots and 20 averages for each decay.
  assert len(concrete.captured_inputs) == 1
  [bundle] = concrete.captured_inputs
  k = len(np.atleast_1d(decays))
  assert bundle.shape == [20 * (2 + k)] and bundle.dtype == tf.resource
  assert bundles(function)
  before = len(concrete.graph.get_operations())
  more, opt = make(40, decay=decays)
  function = tf.function(lambda: step_of(opt, more))
  # Each gradient is an op.
  assert len(function.get_concrete_function().graph.get_operations()) == (
      before + 20)


def test_weights_that_are_read_are_captured_beside_it():
  variables, opt = make(5)

  @tf.function
  def function():
    with tf.GradientTape() as tape:
      loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
    opt.apply_gradients(zip(tape.gradient(loss, variables), variables))

  function()
  assert len(function.get_concrete_function().captured_inputs) == 5 + 1


# Order.


def read_all(opt, v):
  return (v.read_value(), opt.get_slot(v, "momentum").read_value(),
          opt.average(v).read_value())


def assert_history(got, want=((1, 0, 1), (0, 1, 0.5), (-1.5, 1.5, -0.5))):
  """(value, velocity, average) of the first element at each time.

  By gradients of 1 from 1: the velocity is 1, then 1/2 + 1.

  Args:
    got: What `read_all` gave before the first step and after each.
    want: What it should have given.
  """
  for at, (x, y) in enumerate(zip(got, want, strict=True)):
    np.testing.assert_array_equal([a.numpy()[0] for a in x], y, err_msg=f"{at}")


def steps_in_a_function(opt, variables):
  @tf.function
  def function():
    before = read_all(opt, variables[0])
    step_of(opt, variables)
    between = read_all(opt, variables[0])
    step_of(opt, variables)
    return before, between, read_all(opt, variables[0])

  return function


def nested(opt, variables):
  step = tf.function(lambda: step_of(opt, variables))
  read = tf.function(lambda: read_all(opt, variables[0]))
  step.get_concrete_function(), read.get_concrete_function()

  @tf.function
  def function():
    before = read()
    step()
    between = read()
    step()
    return before, between, read_all(opt, variables[0])

  return function


def in_branches(opt, variables):
  @tf.function
  def function(yes):
    before = read_all(opt, variables[0])
    if yes:
      step_of(opt, variables)
      between = read_all(opt, variables[0])
    else:
      between = before
    if yes:
      step_of(opt, variables)
    return before, between, read_all(opt, variables[0])

  return lambda: function(tf.constant(True))


def in_a_loop(opt, variables):
  @tf.function
  def function(n):
    history = [read_all(opt, variables[0])]
    seen = [tf.TensorArray(tf.float32, 2) for _ in history[0]]
    for i in tf.range(n):
      step_of(opt, variables)
      seen = [a.write(i, x)
              for a, x in zip(seen, read_all(opt, variables[0]))]
    seen = [a.stack() for a in seen]
    return history + [tuple(x[i] for x in seen) for i in range(2)]

  return lambda: function(tf.constant(2))


@pytest.mark.by_day(2)
@pytest.mark.parametrize("make_function", [
    steps_in_a_function, nested, in_branches, in_a_loop],
                         ids=lambda f: f.__name__)
def test_reads_are_in_program_order(make_function):
  variables, opt = make()
  call = make_function(opt, variables)
  for _ in range(20):
    for v in variables:
      v.assign([1.0, 2.0])
      opt.get_slot(v, "momentum").assign([0.0, 0.0])
      opt.average(v).assign([1.0, 2.0])
    assert_history(call())


def test_packs_that_share_variables_are_in_program_order():
  """Two ops that take no handle but those in their bundles."""
  variables, opt = make()
  slots = [opt.get_slot(v, "momentum") for v in variables]
  averages = [opt.average(v) for v in variables]

  @tf.function
  def function():
    step_of(opt, variables)
    wrapopt.ops.apply(
        "Momentum", {"var": variables[::-1], "accum": slots[::-1]},
        [tf.ones([2])] * len(variables), {"lr": 1.0, "momentum": 0.5},
        shadows=averages[::-1], decay=0.5)

  before = read_all(opt, variables[0])
  function()
  assert_history([before, read_all(opt, variables[0])],
                 ((1, 0, 1), (-1.5, 1.5, -0.5)))
  one, two = steps_in(function)
  assert one in two.control_inputs


def test_each_read_has_an_edge_to_the_step():
  # What happens to run in order proves little.
  variables, opt = make()
  graph = steps_in_a_function(
      opt, variables).get_concrete_function().graph
  of = {id(v.handle): i for i, v in enumerate(
      [variables[0], opt.get_slot(variables[0], "momentum"),
       opt.average(variables[0])])}
  inside = {id(inner): of[id(outer)] for outer, inner in graph.captures
            if id(outer) in of}
  order = [op for op in graph.get_operations()
           if op.type in ("ReadVariableOp", "Wrapopt>Apply")]
  steps = [i for i, op in enumerate(order) if op.type != "ReadVariableOp"]
  assert len(steps) == 2 and len(inside) == 3 and len(order) == 2 + 9
  for i, op in enumerate(order):
    if op.type == "ReadVariableOp":
      for k in steps:
        first, last = sorted([i, k])
        assert order[first] in ancestors(order[last])
  assert order[steps[0]] in ancestors(order[steps[1]])


def test_an_average_that_is_assigned_before_and_after():
  variables, opt = make()
  average = opt.average(variables[0])

  @tf.function
  def function():
    average.assign([8.0, 8.0])
    step_of(opt, variables)  # To 0, half of the way from 8.
    seen = average.read_value()
    average.assign_add([1.0, 1.0])
    return seen

  for _ in range(20):
    variables[0].assign([1.0, 1.0])
    opt.get_slot(variables[0], "momentum").assign([0.0, 0.0])
    assert function().numpy()[0] == 4.0
    assert average.numpy()[0] == 5.0


def test_exchanged_in_a_function():
  variables, opt = make()
  v, average = variables[0], opt.average(variables[0])

  @tf.function
  def function():
    step_of(opt, variables)
    wrapopt.ops.exchange([v], [average])
    swapped = v.read_value()
    wrapopt.ops.exchange([v], [average])
    step_of(opt, variables)
    return swapped, v.read_value(), average.read_value()

  assert [x.numpy()[0] for x in function()] == [0.5, -1.5, -0.5]
  with opt.averaged_weights():
    assert v.numpy()[0] == -0.5
  # The velocities are 1.75 and 1.875.
  assert [x.numpy()[0] for x in function()] == [-1.875, -5.125, -3.5]


# What is the old form.


def test_xla_sees_every_variable():
  variables, opt = make()
  function = tf.function(lambda: step_of(opt, variables), jit_compile=True)
  function()
  assert not bundles(function)
  inner = tf.function(lambda: step_of(opt, variables))
  inner()
  assert bundles(inner)
  tf.function(lambda: inner.python_function(), jit_compile=True)()
  np.testing.assert_array_equal(opt.get_slot(variables[0], "momentum"),
                                [1.75, 1.75])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("concrete", [False, True])
def test_xla_refuses_a_function_that_was_traced_without_it(concrete, nested):
  variables, opt = make()
  inner = tf.function(lambda: step_of(opt, variables))
  middle = tf.function(lambda: inner()) if nested else inner
  traced = middle.get_concrete_function()
  outer = tf.function(lambda: traced() if concrete else middle(),
                      jit_compile=True)
  with pytest.raises(NotImplementedError, match=(
      "must be traced inside the function with jit_compile=True that calls it, "
      "got one that was traced before without XLA. Call its python_function")):
    outer()
  assert variables[0].numpy().tolist() == [1.0, 2.0]


def test_a_function_that_was_traced_in_xla_takes_handles():
  variables, opt = make()
  inner = tf.function(lambda: step_of(opt, variables))
  tf.function(lambda: inner(), jit_compile=True)()
  assert not bundles(inner)
  inner()
  np.testing.assert_array_equal(opt.get_slot(variables[0], "momentum"),
                                [1.5, 1.5])


class Trainer(tf.Module):

  def __init__(self):
    super().__init__()
    self.values, opt = make(2)
    self.state = opt.variables()
    # TensorFlow 2 cannot load an optimizer of TensorFlow 1.
    self.opt = lambda: opt

  @tf.function(input_signature=[])
  def train(self):
    self.train_one_more()

  @tf.function
  def train_one_more(self):
    step_of(self.opt(), self.values)

  @tf.function(input_signature=[])
  def read(self):
    return read_all(self.opt(), self.values[0])


def test_a_function_that_is_saved(tmp_path):
  trainer = Trainer()
  trainer.train()
  assert "StatefulPartitionedCall" in types(trainer.train)
  assert bundles(trainer.train_one_more)
  tf.saved_model.save(trainer, str(tmp_path))
  loaded = tf.saved_model.load(str(tmp_path))
  assert_history([loaded.read()], [(0, 1, 0.5)])
  loaded.train()
  assert_history([loaded.read(), trainer.read()],
                 [(-1.5, 1.5, -0.5), (0, 1, 0.5)])


def test_a_concrete_function_is_not_saved(tmp_path):
  trainer = Trainer()
  trainer.concrete = trainer.train.get_concrete_function()
  with pytest.raises(ValueError, match=(
      r"Save the tf\.function, which is then traced again")):
    tf.saved_model.save(trainer, str(tmp_path))


def test_where_xla_may_choose(monkeypatch, tmp_path):
  variables, opt = make()
  def now():
    return bundles(tf.function(lambda: step_of(opt, variables)))

  def in_a_scope(compile_ops):
    def function():
      with tf.xla.experimental.jit_scope(compile_ops):
        step_of(opt, variables)
    return bundles(tf.function(function))

  assert now() and in_a_scope(False) and not in_a_scope(True)
  tf.config.optimizer.set_jit("autoclustering")
  assert not now() and in_a_scope(False)
  tf.config.optimizer.set_jit(False)
  assert now()
  for flag, usual in (("2", False), ("1", False), ("0", True), ("-1", True),
                      ("2 --tf_xla_auto_jit=0", True)):
    flags = f"--a=1 --tf_xla_auto_jit={flag} --b"
    monkeypatch.setenv("TF_XLA_FLAGS", flags)
    assert now() == usual
    # A text without a dash in front names a file of flags.
    (tmp_path / "flags").write_text(flags)
    monkeypatch.setenv("TF_XLA_FLAGS", str(tmp_path / "flags"))
    assert now() == usual
  monkeypatch.setenv("TF_XLA_FLAGS", str(tmp_path / "none"))
  assert now()


def test_where_xla_may_be_switched_on_later(monkeypatch):
  """In a branch or loop, ops that TensorFlow makes take the bundle, too."""
  variables, opt = make()
  packed = []
  def step():
    step_of(opt, variables)
    [op] = [op for op in v1.get_default_graph().get_operations()
            if op.type == "Wrapopt>Apply"]
    packed.append(is_packed(op))

  def ways():
    step()
    tf.cond(tf.reduce_all(variables[0] > 0), step, lambda: None)
    tf.while_loop(lambda i: i < 2, lambda i: (step(), i + 1)[1:], [0])
    tf.function(step)()

  tf.function(ways).get_concrete_function()
  monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")
  tf.function(ways).get_concrete_function()
  assert packed == [True, True, True, True, True, False, False, True]


def compiles(function):
  """Whether XLA may compile it, for each Apply of a function."""
  return ["_XlaCompile" not in op.node_def.attr or
          op.get_attr("_XlaCompile") for op in steps_in(function)]


def test_what_xla_must_not_compile():
  variables, opt = make()
  function = tf.function(lambda: step_of(opt, variables))
  assert compiles(function) == [False]
  tf.config.optimizer.set_jit("autoclustering")
  try:
    assert compiles(tf.function(lambda: step_of(opt, variables))) == [True]
    assert compiles(function) == [False]  # It is not traced again.
  finally:
    tf.config.optimizer.set_jit(False)


def in_a_session(wrap=lambda step: step(), device=None):
  """A graph's variable and average, the step, and the types of all ops."""
  with tf.Graph().as_default() as graph, tf.device(device):
    v = v1.get_variable("v", initializer=[1.0, 2.0], use_resource=True)
    opt = wrapopt.MovingAverageOptimizer(v1.train.GradientDescentOptimizer(1.0),
                                         0.5, sequential_update=True)
    step = wrap(lambda: opt.apply_gradients([(tf.constant([1.0, 3.0]), v)]))
    return v, opt.average(v), step, [op.type for op in graph.get_operations()]


def test_a_session():
  v, average, step, types_ = in_a_session()
  assert types_.count("Wrapopt>Apply") == 1
  assert types_.count("Wrapopt>BundleByName") == 1
  for _ in range(2):  # Each session has variables of its own.
    with v1.Session(graph=v.graph) as session:
      with pytest.raises(tf.errors.FailedPreconditionError, match="'v'"):
        session.run(step)
      with v.graph.as_default():
        session.run(v1.global_variables_initializer())
      run = v1.RunMetadata()
      session.run(step, options=v1.RunOptions(output_partition_graphs=True),
                  run_metadata=run)
      # It runs no op for each variable.
      ran = [node.op for part in run.partition_graphs for node in part.node]
      assert "Wrapopt>BundleByName" in ran and "VarHandleOp" not in ran
      assert session.run([v, average])[0].tolist() == [0, -1]
      assert session.run(average).tolist() == [0.5, 0.5]


def test_a_session_of_an_imported_graph():
  v, average, _, _ = in_a_session()
  with v.graph.as_default():
    exported = v1.train.export_meta_graph()
  with tf.Graph().as_default() as graph:
    v1.train.import_meta_graph(exported, clear_devices=True,
                               import_scope="again")
    [step] = [op for op in graph.get_operations()
              if op.type == "Wrapopt>Apply"]
    with session_of() as session:
      session.run(step)
      found = {x.op.name: session.run(x).tolist()
               for x in graph.get_collection("variables")}
  assert found == {f"again/{v.op.name}": [0, -1],
                   f"again/{average.op.name}": [0.5, 0.5]}


def averaged(inner):
  return wrapopt.MovingAverageOptimizer(inner, 0.5, sequential_update=True)


def gated(inner, **options):
  return wrapopt.DropStaleGradientOptimizer(inner, 3, **options)


# In one pass, and in two: then EmaUpdate takes the bundle.
V1_MAKE = {
    "Apply": lambda _: averaged(v1.train.MomentumOptimizer(1.0, 0.5)),
    "EmaUpdate": lambda _: averaged(
        v1.train.ProximalGradientDescentOptimizer(1.0)),
}
# Optimizers whose train op a V1 SavedModel may have.
V1_SAVED = {
    **V1_MAKE,
    "gate of SGD": lambda _: gated(v1.train.GradientDescentOptimizer(1.0)),
    "gate of Adam": lambda _: gated(v1.train.AdamOptimizer(0.5),
                                    policy="scale"),
    "gate of averages": lambda _: gated(averaged(v1.train.AdamOptimizer(0.5))),
    "CrossShard": lambda _: wrapopt.CrossShardOptimizer(
        v1.train.AdamOptimizer(0.5)),
    "ElasticAverage": lambda getter: wrapopt.ElasticAverageOptimizer(
        v1.train.AdamOptimizer(0.5), 1, getter, 2, 0.25, rho=0.0),
    "ModelAverage": lambda getter: wrapopt.ModelAverageOptimizer(
        v1.train.AdamOptimizer(0.5), 1, True, getter, 2),
    "ScheduleFree that holds x": lambda _: wrapopt.ScheduleFreeOptimizer(
        v1.train.GradientDescentOptimizer(1.0)),
    "PrimalAverage that holds x": lambda _: wrapopt.PrimalAverageOptimizer(
        v1.train.GradientDescentOptimizer(1.0), 0.75, 0.5),
}


def saved(name, folder):
  """Saves a V1 SavedModel after a step.

  Returns:
    Its MetaGraphDef, and all variables after two further steps.
  """
  custom = getattr(wrapopt, f"{name}CustomGetter", None)
  with tf.Graph().as_default():
    getter = custom and custom("/cpu:0")
    with v1.variable_scope("", custom_getter=getter, use_resource=True):
      values = [v1.get_variable(n, initializer=[1.0, 2.0]) for n in "vw"]
    opt = V1_SAVED[name](getter)
    x = v1.placeholder(tf.float32, [], name="x")
    count = v1.train.get_or_create_global_step()
    with (opt.record_step() if name.startswith("gate")
          else contextlib.nullcontext()):
      loss = x * tf.add_n([tf.reduce_sum(v * v) for v in values])
    step = opt.minimize(loss, global_step=count)
    with tf.control_dependencies([step]):
      done = tf.identity(x, name="done")
    hook = None
    if name == "ElasticAverage":
      hook = opt.make_session_run_hook(True, 0)
    elif name == "ModelAverage":
      hook = opt.make_session_run_hook()
    if hook:
      hook.begin()
    if name.endswith("holds x"):
      savers = opt.swapping_saver(), v1.train.Saver()
    with session_of() as session:
      if hook:
        hook.after_create_session(session, tf.train.Coordinator())
      session.run(done, {x: 0.25})
      if name.endswith("holds x"):
        swapped = savers[0].save(session, f"{folder}.ckpt",
                                 write_meta_graph=False)
        savers[1].restore(session, swapped)
      v1.saved_model.simple_save(session, folder, {"x": x}, {"done": done})
      exported = v1.train.export_meta_graph()
      for _ in range(2):
        session.run(done, {x: 0.25})
      return exported, {v.op.name: session.run(v).tolist()
                        for v in v1.global_variables()}


def trained_in_a_session(folder):
  """All variables of a V1 SavedModel after two steps in a session."""
  with tf.Graph().as_default(), v1.Session() as session:
    v1.saved_model.load(session, ["serve"], folder)
    session.run(v1.local_variables_initializer())
    for _ in range(2):
      session.run("done:0", {"x:0": 0.25})
    return {v.op.name: session.run(v).tolist()
            for v in v1.global_variables() + v1.local_variables()}


def values_by_name(variables):
  return {v.name.removesuffix(":0"): v.numpy().tolist() for v in variables}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", V1_SAVED)
def test_tensorflow_2_trains_a_saved_graph(name, tmp_path):
  first, again = str(tmp_path / "first"), str(tmp_path / "again")
  _, goes_on = saved(name, first)
  want = trained_in_a_session(first)
  is_worker = name.endswith("Average")  # Local variables begin anew.
  assert is_worker or want == goes_on
  loaded = tf.saved_model.load(first)
  train = loaded.signatures["serving_default"]
  ran = [x.type for x in train.graph.get_operations()]
  assert "Wrapopt>BundleByName" not in ran
  assert f"Wrapopt>{name}" in ran or name not in V1_MAKE
  train(x=tf.constant(0.25))
  # And TensorFlow 2 saves it. The copy has variables of its own.
  tf.saved_model.save(loaded, again, signatures={"serving_default": train})
  copy = tf.saved_model.load(again)
  for _ in range(1 + is_worker):
    copy.signatures["serving_default"](x=tf.constant(0.25))
  train(x=tf.constant(0.25))
  for model in loaded, copy:
    assert values_by_name(model.variables) == want


@pytest.mark.parametrize("name", V1_MAKE)
def test_tensorflow_2_trains_an_imported_graph(name, tmp_path):
  # The functions of version 2 would be there already.
  with control_flow(v2=False):
    exported, want = saved(name, str(tmp_path / "model"))
  def load():
    v1.train.import_meta_graph(exported)
  wrapped = v1.wrap_function(load, [])
  wrapped.prune([], wrapped.graph.get_operation_by_name("init"))()
  train = wrapped.prune("x:0", "done:0")
  for _ in range(3):
    train(tf.constant(0.25))
  got = values_by_name(wrapped.graph.variables)
  assert {name: got[name] for name in want} == want


def test_a_part_of_a_graph_is_exported():
  with tf.Graph().as_default() as graph:
    with v1.variable_scope("part"):
      v = v1.get_variable("v", initializer=[1.0], use_resource=True)
    outside = v1.get_variable("w", initializer=[1.0], use_resource=True)
    with tf.name_scope("part/"):
      _bundle.make([v.handle], "")
      _bundle.make([v.handle, outside.handle], "")
    assert len(graph.get_collection("wrapopt_bundles")) == 2
    exported = v1.train.export_meta_graph(export_scope="part")
  # It has no ops for the other variable.
  [kept] = exported.collection_def["wrapopt_bundles"].bytes_list.value
  assert list(v1.NodeDef.FromString(kept).input) == ["v"]


@pytest.mark.parametrize("how", ["while", "cond"])
def test_a_session_with_control_flow(how):
  def wrap(step):
    def body(i):
      with tf.control_dependencies([step()]):
        return tf.add(i, 1)
    if how == "while":
      return tf.while_loop(lambda i: i < 2, body, [0])
    return tf.cond(tf.constant(True), lambda: body(0), lambda: 0)

  with control_flow(v2=False):
    v, average, step, _ = in_a_session(wrap)
    [bundle] = [op for op in v.graph.get_operations()
                if op.type == "Wrapopt>BundleByName"]
    # It is made once, and not in each turn of a loop.
    assert bundle._get_control_flow_context() is None
    with v1.Session(graph=v.graph) as session:
      session.run([x.initializer for x in v.graph.get_collection("variables")])
      session.run(step)
      if how == "cond":
        session.run(step)
      assert session.run(v).tolist() == [-1, -4]
      assert session.run(average).tolist() == [-0.25, -1.75]


def test_a_session_in_which_handles_are_lists():
  def scope(step):
    with tf.xla.experimental.jit_scope():
      return step()
  *_, types_ = in_a_session(scope)
  assert "Wrapopt>Apply" in types_
  assert not any("Bundle" in type_ for type_ in types_)
  with tf.Graph().as_default() as graph:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2])
    assert _bundle.make([handle], "") is None  # It has no name.
    assert len(graph.get_operations()) == 1


def test_the_place_of_a_pack_of_names():
  v, average, step, _ = in_a_session(device="/job:ps/task:1")
  [bundle] = [op for op in v.graph.get_operations()
            if op.type == "Wrapopt>BundleByName"]
  assert bundle.device == "/job:ps/task:1"
  assert bundle.colocation_groups() == [
      b"loc:@" + x.handle.op.name.encode() for x in (v, average)]


def test_a_pack_of_names_is_checked():
  with tf.Graph().as_default(), v1.Session() as session:
    make = _loader.ops.wrapopt_bundle_by_name
    for names, dtypes, want in (
        (["a", ""], [tf.float32] * 2, r"shared_names\[1\] must not be empty"),
        (["a", "b"], [tf.float32], "of one length, got 2, 2, 1 and 2")):
      bundle = make(containers=["", ""], shared_names=names, dtypes=dtypes,
                  shapes=[[2], [2]])
      with pytest.raises(tf.errors.InvalidArgumentError, match=want):
        session.run(bundle.op)
