"""What all ops of lists of variables do alike: graphs, errors, readers."""

import itertools
import typing

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from arrays import assert_same_bits
import modes
from modes import called, handles, put_into_copy_on_read_mode, refused, tf1
from modes import mode  # pylint: disable=unused-import
from wrapopt import ops
from wrapopt._loader import ops as raw
from wrapopt.ops import averaging_assign
from wrapopt.ops import ema_update
from wrapopt.ops import exchange

FLOAT = np.float32
InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError


class Op(typing.NamedTuple):
  """An op that changes the variables of its first list, or of both.

  Attributes:
    name: The name of the op.
    lists: The names of its lists in errors.
    call: Its Python function, of two lists.
    raw: The op, of two lists of handles.
    after: A function of two arrays: the arrays after the op.
    dtype: The end of the error about a variable of dtype double.
  """
  name: str
  lists: tuple
  call: typing.Callable
  raw: typing.Callable
  after: typing.Callable
  dtype: str = "must be of dtype float, the op's, got double"


OPS = [
    Op("EmaUpdate", ("shadows", "values"), lambda a, b: ema_update(a, b, 0.5),
       lambda a, b: raw.wrapopt_ema_update(
           [*a, *b], [0.5], N=len(a), NK=len(a), T=tf.float32, S=tf.float32),
       lambda a, b: ((a + b) / 2, b)),
    Op("AveragingAssign", ("targets", "sources"),
       lambda a, b: averaging_assign(a, b, rate=0.5),
       lambda a, b: raw.wrapopt_averaging_assign(
           a, b, tensors=[], weights=[1.], rate=0.5, N=len(a), T=tf.float32),
       lambda a, b: ((a + b) / 2, b)),
    Op("Exchange", ("a", "b"), exchange, raw.wrapopt_exchange,
       lambda a, b: (b, a),
       r"must be of dtype float \(the dtype of .*\), got double")]


@pytest.fixture(params=OPS, ids=[op.name for op in OPS])
def op(request):
  return request.param


def pair(mode, a=1., b=3., **kwargs):
  return (mode.variable(FLOAT([a, a]), **kwargs),
          mode.variable(FLOAT([b, b]), **kwargs))


def check(op, got, before=(1, 3), times=1):
  """Checks two arrays after the op has run so many times."""
  for _ in range(times):
    before = op.after(*before)
  for x, want in zip(got, before, strict=True):
    assert np.unique(x).tolist() == [want]


# Graphs


def test_a_function_holds_one_op(op):
  a, b = pair(modes.Eager())

  @tf.function
  def function():
    assert op.call([a], [b]) is None

  function()
  check(op, [a, b])
  function()
  check(op, [a, b], times=2)
  types = [x.type for x in
           function.get_concrete_function().graph.get_operations()]
  assert types.count(f"Wrapopt>{op.name}") == 1


@pytest.mark.parametrize("name", [*filter(str.islower, ops.__all__)])
def test_autograph_leaves_it_as_it_is(name):
  assert hasattr(getattr(ops, name), "autograph_info__")


@pytest.mark.cpu("names its devices")
@modes.only(*modes.graphs(device_count={"CPU": 2}))
@pytest.mark.parametrize("scope", [None, "/cpu:1", "/device:GPU:7"])
def test_an_op_runs_where_its_variables_live(op, mode, scope):
  pairs = []
  for device in ("/device:CPU:0", "/device:CPU:1", "/device:CPU:0"):
    with tf.device(device):
      pairs.append(pair(mode))
  known = set(mode.graph.get_operations())
  with tf.device(scope):
    done = op.call(*map(list, zip(*pairs)))
  made = [x for x in mode.graph.get_operations()
          if x not in known and op.name in x.type]
  assert sorted((x.device, x.get_attr("N")) for x in made) == [
      ("/device:CPU:0", 2), ("/device:CPU:1", 1)]
  mode.session.run(done)
  for variables in pairs:
    check(op, mode.values(variables))


@pytest.mark.cpu("names its devices")
@modes.only(modes.Eager(), modes.Function())
def test_the_caller_is_in_the_scope_of_a_device_that_has_no_kernel(op, mode):
  a, b = pair(mode)
  with tf.device("/device:GPU:7"):
    mode.run(lambda: op.call([a], [b]))
  check(op, mode.values([a, b]))


@modes.only(*modes.graphs())
def test_control_dependencies_of_the_caller(op, mode):
  a, b = pair(mode)
  with tf.control_dependencies([tf1.assign(b, FLOAT([9, 9]))]):
    done = op.call([a], [b])
  mode.session.run(done)
  check(op, mode.values([a, b]), before=(1, 9))


def test_program_order_in_a_function(op):
  a, b = pair(modes.Eager())

  @tf.function
  def steps():
    seen = tf.TensorArray(tf.float32, 3)
    for i in tf.range(3):
      b.assign([8., 8.])
      op.call([a], [b])
      seen = seen.write(i, a)
      b.assign([-1., -1.])
    return seen.stack()

  got, want = steps(), 1
  for x in got.numpy():
    want, _ = op.after(want, 8)
    assert x.tolist() == [want, want]
  assert b.numpy().tolist() == [-1, -1]


# Not version 2 with ref variables: TensorFlow passes these into a branch by
# value, so that not even its own assign works there.
@pytest.mark.parametrize("mode, v2", [
    (modes.Graph(True), False), (modes.Graph(True), True),
    (modes.Graph(False), False)], indirect=["mode"])
def test_in_a_cond(op, mode, v2):
  a, b = pair(mode)
  wanted = tf1.placeholder(tf.bool, [])
  with modes.control_flow(v2):
    done = tf1.cond(wanted, lambda: op.call([a], [b]), tf.no_op)
  for times, value in enumerate((False, True)):
    mode.session.run(done, {wanted: value})
    check(op, mode.values([a, b]), times=times)


def test_in_a_cond_in_a_function(op):
  a, b = pair(modes.Eager())

  @tf.function
  def maybe(wanted):
    if wanted:
      op.call([a], [b])

  for times, value in enumerate((False, True)):
    maybe(tf.constant(value))
    check(op, [a, b], times=times)


# Refusals. Each names the input and changes nothing.


@modes.only(*modes.graphs())
def test_an_uninitialized_variable(op, mode):
  a, b = pair(mode)
  c, d = mode.variable(FLOAT([5, 5])), mode.uninitialized(FLOAT([7, 7]),
                                                          name="raw")
  for x, y, name in ((d, c, op.lists[0]), (c, d, op.lists[1])):
    # TensorFlow's executor checks refs before it calls a kernel.
    refused(mode, [a, b, c], FailedPrecondition,
            {"graph": rf"{name}\[1\] {called('raw')} is not initialized: run "
                      "its initializer first",
             "ref-graph": "Attempting to use uninitialized value raw"}[
                 mode.name],
            lambda: op.call([a, x], [b, y]))  # pylint: disable=cell-var-from-loop


@pytest.mark.cpu("makes its own handle")
@modes.only(modes.Eager(), modes.Function())
def test_a_variable_that_has_no_value_yet(op, mode):
  a, b = pair(mode)
  c = mode.variable(FLOAT([5, 5]))
  empty = UninitializedVariable(shape=[2], dtype=tf.float32, name="empty")
  for x, y, name in ((empty, c, op.lists[0]), (c, empty, op.lists[1])):
    refused(mode, [a, b, c], FailedPrecondition,
            rf"{name}\[1\] {called('empty')} is not initialized: run its "
            "initializer first", lambda: op.call([a, x], [b, y]))  # pylint: disable=cell-var-from-loop


@pytest.mark.cpu("places its op by its inputs")
@modes.only(modes.Eager(), modes.Function(), modes.Graph(True))
def test_a_resource_that_is_no_variable(op, mode):
  a, b = pair(mode)

  def table():
    return tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.int64,
                                  shared_name="table")

  for name, first in ((op.lists[0], True), (op.lists[1], False)):
    refused(mode, [a, b], InvalidArgument,
            rf"{name}\[0\] {called('table')} is not a variable of this "
            "device: .*wrong type.*LookupInterface",
            lambda: op.raw(*(([table()], [b.handle]) if first else  # pylint: disable=cell-var-from-loop
                             ([a.handle], [table()]))))


def test_another_dtype_behind_a_handle_that_tells_nothing(op):
  mode = modes.Eager()
  a, b = pair(mode)
  c = mode.variable(FLOAT([5, 5]), name="c")
  d = mode.variable(np.array([7., 8.]), name="d")

  @tf.function(input_signature=[tf.TensorSpec([], tf.resource)] * 2)
  def function(x, y):
    op.raw([*handles([a]), x], [*handles([b]), y])

  refused(mode, [a, b, c, d], InvalidArgument,
          rf"{op.lists[1]}\[1\] {called('d')} {op.dtype}",
          lambda: function(c.handle, d.handle))


def test_a_handle_that_tells_nothing(op):
  with tf.Graph().as_default():
    unknown = tf1.placeholder(tf.resource, [])
    assert op.raw([unknown], [unknown]).type == f"Wrapopt>{op.name}"


# Readers


@pytest.mark.cpu("reads from another device, which is unordered")
@modes.only(*modes.graphs())
def test_a_reader_in_the_same_graph(op, mode):
  a, b = pair(mode)
  held = a.read_value()
  with tf.control_dependencies([held]):
    done = op.call([a], [b])
  with tf.control_dependencies([done]):
    results = [tf.identity(held), a.read_value(), b.read_value()]
  before = 1, 3
  for _ in range(2):
    read, *after = mode.session.run(results)
    assert mode.name == "ref-graph" or read.tolist() == [before[0]] * 2
    check(op, after, before)
    before = op.after(*before)


def test_the_array_that_a_variable_was_made_from(op):
  # TensorFlow may use a suitable array's own memory.
  arrays = [np.full(1 << 16, i, FLOAT) for i in (1, 3)]
  a, b = map(tf.Variable, arrays)
  c, d = (tf.Variable(tf.zeros(1 << 16)) for _ in range(2))
  c.assign(arrays[0])
  d.assign(tf.constant(arrays[1]))
  op.call([a, c], [b, d])
  for variable in (a, b):
    variable.assign_add(tf.ones(1 << 16))
  assert [np.unique(array).tolist() for array in arrays] == [[1], [3]]
  check(op, [x.numpy() - 1 for x in (a, b)])
  check(op, [c, d])


@pytest.mark.cpu("runs a sparse update of TensorFlow's")
@modes.only(modes.Eager(), modes.Function())
def test_copy_on_read_mode(op, mode):
  # A variable in this mode is written in place, its readers have copies. It
  # must not get a buffer in which a reader of the other variable looks.
  for sparse, read in itertools.product(["", "a", "b", "ab"], repeat=2):
    a, b = pair(mode)
    variables = {"a": a, "b": b}
    for name in sparse:
      put_into_copy_on_read_mode(variables[name])
    held = [variables[name].read_value() for name in read]
    kept, before = mode.values(held), mode.values([a, b])
    mode.run(lambda: op.call([a], [b]))  # pylint: disable=cell-var-from-loop
    assert_same_bits(mode.values([a, b]), op.after(*before))
    for variable in (a, b):
      put_into_copy_on_read_mode(variable)
      tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=[1],
                                       updates=[9.])
    assert_same_bits(mode.values(held), kept)
    assert [v.numpy()[1] for v in (a, b)] == [9, 9]
