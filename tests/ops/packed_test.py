"""read_packed, assign_packed and their ops."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

import modes
from modes import at_build, evaluate, handles, refused, tf1
from modes import uncompiled_mode as mode  # pylint: disable=unused-import
from numerics import name_of, PLAIN_DTYPES
from wrapopt._loader import ops as raw
from wrapopt.ops import assign_packed
from wrapopt.ops import read_packed

FLOAT = np.float32
InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError

SHAPES = [(), (0,), (1,), (3, 0), (2, 5), (10_000,), (), (70_000,), (0,)]


def numbers(shapes, dtype, seed=1):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)
          for shape in shapes]


def packed(values):
  return np.concatenate([x.ravel() for x in values])


@pytest.mark.cpu("TensorFlow has no such variables")
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=name_of)
def test_every_element_of_every_dtype(mode, dtype):
  x, y = numbers(SHAPES, dtype), numbers(SHAPES, dtype, seed=2)
  variables = [mode.variable(value) for value in x]
  got = evaluate(mode, lambda: read_packed(variables))
  assert got.dtype == dtype and got.tobytes() == packed(x).tobytes()
  mode.run(lambda: assign_packed(variables, packed(y)))
  for value, want in zip(mode.values(variables), y, strict=True):
    assert value.shape == want.shape and value.tobytes() == want.tobytes()


@pytest.mark.parametrize("shapes", [[()], [(0,)], [(3, 0), (0,)], [(1 << 20,)],
                                    [(1,)] * 100, [(4096,), (4095,), (1,)]],
                         ids=str)
def test_sizes(mode, shapes):
  x, y = numbers(shapes, FLOAT), numbers(shapes, FLOAT, seed=2)
  variables = [mode.variable(value) for value in x]
  assert evaluate(mode, lambda: read_packed(variables)).tolist() == packed(
      x).tolist()
  mode.run(lambda: assign_packed(iter(variables), packed(y)))
  for value, want in zip(mode.values(variables), y, strict=True):
    assert value.tolist() == want.tolist()


def test_a_variable_stands_for_a_sequence_of_one(mode):
  v = mode.variable([[1., 2.]])
  assert evaluate(mode, lambda: read_packed(v)).tolist() == [1, 2]
  mode.run(lambda: assign_packed(v, [3., 4.]))
  assert mode.values([v])[0].tolist() == [[3, 4]]


def test_one_is_read_twice(mode):
  v = mode.variable([1., 2.])
  assert evaluate(mode, lambda: read_packed([v, v])).tolist() == [1, 2, 1, 2]


def test_what_was_read_does_not_change(mode):
  v = mode.variable(FLOAT([1, 2]))
  # A vector, and not another name for the variable's buffer.
  def read_and_assign():
    vector = read_packed([v])
    with tf.control_dependencies([vector]):
      assigned = assign_packed([v], FLOAT([8, 9]))
    with tf.control_dependencies([] if assigned is None else [assigned]):
      return tf.identity(vector)

  assert evaluate(mode, read_and_assign).tolist() == [1, 2]
  assert mode.values([v])[0].tolist() == [8, 9]


@modes.only(modes.Eager())
def test_readers_keep_what_they_read(mode):
  v = mode.variable(tf.zeros(1000))
  before = v.read_value()
  assign_packed([v], tf.ones(1000))
  assert not before.numpy().any() and v.numpy().all()


@modes.only(*modes.graphs())
def test_one_op_serves_all_variables(mode):
  name = {"graph": "", "ref-graph": "Ref"}[mode.name]
  variables = [mode.uninitialized(FLOAT([i])) for i in range(50)]
  mode.session.run(tf1.global_variables_initializer())
  before = len(mode.graph.get_operations())
  vector = read_packed(variables, name="read")
  assigned = assign_packed(variables, vector, name="assign")
  assert [op.type for op in mode.graph.get_operations()[before:]] == [
      f"Wrapopt>ReadPacked{name}", f"Wrapopt>AssignPacked{name}"]
  assert (vector.op.name, assigned.name) == ("read", "assign")
  assert vector.shape == [50]
  mode.session.run(assigned)
  assert [x.item() for x in mode.values(variables)] == list(range(50))


@pytest.mark.cpu("names its devices")
@modes.only(*modes.graphs(device_count={"CPU": 2}))
@pytest.mark.parametrize("scope", [None, "/cpu:0", "/device:GPU:7"])
def test_ops_run_where_the_variables_live(mode, scope):
  with tf.device("/device:CPU:1"):
    v = mode.variable(FLOAT([1]))
  with tf.device(scope):
    vector = read_packed([v])
    assigned = assign_packed([v], vector)
  assert vector.device == assigned.device == "/device:CPU:1"
  mode.session.run(assigned)


# Errors


@pytest.mark.parametrize("size", [0, 2, 4, 10])
def test_a_vector_of_another_size(mode, size):
  variables = [mode.variable(FLOAT([1, 2])), mode.variable(FLOAT(3))]
  refused(
      mode, variables, (ValueError, InvalidArgument),
      rf"packed misshapen: got \[{size}\] but expected \[3\] \(the elements of "
      "all", lambda: assign_packed(variables, tf.zeros([size])))


def test_a_vector_of_another_rank(mode):
  v = mode.variable(FLOAT([1, 2]))
  refused(mode, [v], (ValueError, InvalidArgument),
            r"packed misshapen: got \[1,2\] but expected \[2\]",
            lambda: assign_packed([v], [[1., 2.]]))


@modes.only(*modes.graphs())
def test_a_vector_whose_shape_is_known_when_it_runs(mode):
  variables = [mode.variable(FLOAT([1, 2])), mode.variable(FLOAT(3))]
  vector = tf1.placeholder(tf.float32)
  assigned = assign_packed(variables, vector)
  for value, shape in (np.ones(4), r"\[4\]"), (np.ones([3, 1]), r"\[3,1\]"):
    with pytest.raises(
        InvalidArgument, match=f"packed misshapen: got {shape} but expected "
        r"\[3\] \(the elements of all 2 variables\)"):
      mode.session.run(assigned, {vector: value})
  assert [x.tolist() for x in mode.values(variables)] == [[1, 2], 3]
  mode.session.run(assigned, {vector: np.ones(3)})
  assert [x.tolist() for x in mode.values(variables)] == [[1, 1], 1]


def test_one_is_assigned_twice(mode):
  v, w = mode.variable(FLOAT([1])), mode.variable(FLOAT([2]))
  refused(mode, [v, w], InvalidArgument, "variables.*one variable|same",
            lambda: assign_packed([v, w, v], [5., 6., 7.]))


@modes.only(*modes.graphs())
def test_one_is_not_initialized(mode):
  v = mode.variable(FLOAT([1]), name="v")
  w = mode.uninitialized(FLOAT([2]), name="w")
  for op in read_packed([v, w]), assign_packed([v, w], [5., 6.]):
    # It is TensorFlow that says so of a ref variable.
    with pytest.raises(FailedPrecondition,
                       match=r"variables\[1\] \(variable 'w'\)|value w\n"):
      mode.session.run(op)
  assert mode.values([v])[0].tolist() == [1]


@modes.only(modes.Eager())
def test_a_handle_of_nothing(mode):
  v = UninitializedVariable(shape=[1], dtype=tf.float32, name="nothing")
  with pytest.raises(FailedPrecondition, match="nothing"):
    read_packed([v])


def test_dtypes_are_checked(mode):
  v, w = mode.variable(FLOAT([1])), mode.variable(np.float64([2]))
  for build in (lambda: read_packed([v, w]),
                lambda: assign_packed([v, w], [1., 2.])):
    with pytest.raises(
        TypeError if mode.name == "ref-graph"  # TensorFlow's, for a list.
        else at_build(mode, InvalidArgument),
        match=r"variables\[1\].* must be of dtype float, the op's, got double|"
        "don't all match|float64.*float32|float32.*float64"):
      mode.run(build)
  refused(mode, [v], TypeError, "`packed` must be of dtype float32, got int32",
            lambda: assign_packed([v], [1]))


@modes.only(modes.Eager())
def test_dtypes_of_handles(mode):
  v = mode.variable(FLOAT([1]))
  match = r"variables\[0\].* must be of dtype double, the op's, got float"
  with pytest.raises(InvalidArgument, match=match):
    raw.wrapopt_read_packed(handles([v]), T=tf.float64)
  with pytest.raises(InvalidArgument, match=match):
    raw.wrapopt_assign_packed(handles([v]), tf.constant([1.], tf.float64))
  assert v.numpy() == [1]


@pytest.mark.parametrize("given, error, match", [
    ([], ValueError, "`variables` must hold at least one variable, got none"),
    ([1.0], TypeError, r"`variables\[0\]` must be a variable, got 1.0"),
])
def test_what_is_no_variable(given, error, match):
  for build in lambda: read_packed(given), lambda: assign_packed(given, [1.]):
    with pytest.raises(error, match=match):
      build()


@pytest.mark.cpu("names its devices")
@modes.only(*modes.graphs(device_count={"CPU": 2}))
def test_other_devices_and_kinds(mode):
  variables = []
  for number in range(2):
    with tf.device(f"/cpu:{number}"):
      variables.append(mode.uninitialized(FLOAT([1])))
  with pytest.raises(ValueError, match=r"`variables\[1\]`.* must be on the "
                     "device of `variables.0.`"):
    read_packed(variables)
  with tf.device("/cpu:0"):
    other = tf1.Variable(FLOAT([1]), use_resource=not mode.use_resource)
  with pytest.raises(TypeError, match=r"`variables\[1\]`.* (ref|resource) "
                     "variable"):
    assign_packed([variables[0], other], [1., 2.])
