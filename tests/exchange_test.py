"""exchange and its ops: bits, buffers, errors, concurrent readers."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

import modes
import numerics
from modes import address
from modes import at_build
from modes import called
from modes import handle_of
from modes import handles
from modes import mode  # pylint: disable=unused-import
from modes import put_into_copy_on_read_mode
from modes import refused
from modes import tf1
from wrapopt._loader import ops as raw
from wrapopt.ops import ema_update
from wrapopt.ops import exchange

FLOAT = np.float32
InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError

DTYPES = [np.float16, ml_dtypes.bfloat16, FLOAT, np.float64, np.int8, np.uint8,
          np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64,
          np.bool_, np.complex64, np.complex128]


def test_a_trajectory(mode):
  a, b = mode.variable([1., 2.]), mode.variable([3., 4.])
  seen = []
  for _ in range(3):
    mode.run(lambda: exchange([a], [b]))
    seen.append([x.tolist() for x in mode.values([a, b])])
  assert seen == [[[3, 4], [1, 2]], [[1, 2], [3, 4]], [[3, 4], [1, 2]]]


def random_bits(rng, shape, dtype):
  """Any bits that are a value of the dtype: a NaN's payload counts too."""
  if dtype == np.bool_:
    return rng.integers(0, 2, shape).astype(dtype)
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def as_bytes(arrays):
  return [(x.dtype, x.shape, x.tobytes()) for x in arrays]


@pytest.mark.cpu("TensorFlow has no such variables")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_bit_of_every_dtype(mode, dtype):
  rng = np.random.default_rng(1)
  shapes = [(), (0,), (1,), (3, 0), (2, 5), (10_000,)]
  x, y = ([random_bits(rng, shape, dtype) for shape in shapes]
          for _ in range(2))
  a, b = ([mode.variable(value) for value in values] for values in (x, y))
  # A constant in a graph may have lost the kind of a NaN already.
  x, y = as_bytes(mode.values(a)), as_bytes(mode.values(b))
  assert x != y
  mode.run(lambda: exchange(a, b))
  assert (as_bytes(mode.values(a)), as_bytes(mode.values(b))) == (y, x)
  mode.run(lambda: exchange(b, a))
  assert (as_bytes(mode.values(a)), as_bytes(mode.values(b))) == (x, y)


@pytest.mark.cpu("TensorFlow has no such variables")
def test_all_dtypes_at_once(mode):
  a = [mode.variable(np.zeros(3, dtype)) for dtype in DTYPES]
  b = [mode.variable(np.ones(3, dtype)) for dtype in DTYPES]
  mode.run(lambda: exchange(a, b))
  assert [x.tolist() for x in mode.values(a)] == [[1] * 3] * len(DTYPES)
  assert [x.tolist() for x in mode.values(b)] == [[0] * 3] * len(DTYPES)


def test_a_variable_stands_for_a_sequence_of_one(mode):
  a, b = mode.variable([1.]), mode.variable([2.])
  mode.run(lambda: exchange(a, iter([b])))
  assert [x.item() for x in mode.values([a, b])] == [2, 1]


@pytest.mark.cpu("adds by an op of TensorFlow's")
def test_what_comes_after_writes_to_the_right_one(mode):
  a, b, c = (mode.variable([float(i)] * 1000) for i in (1, 2, 8))
  mode.run(lambda: exchange([a], [b]))
  mode.run(lambda: a.assign_add([10.] * 1000))
  mode.run(lambda: ema_update([b], [c], 0))
  mode.run(lambda: exchange([b], [a]))
  mode.run(lambda: b.assign_add([100.] * 1000))
  assert [x[-1] for x in mode.values([a, b, c])] == [8, 112, 8]


@pytest.mark.cpu("asks for addresses")
@modes.only(modes.Eager(), modes.Function())
def test_buffers_are_traded_not_copied(mode):
  a, b = mode.variable(tf.zeros(1000)), mode.variable(tf.ones(1000))
  at_a, at_b = address(a.read_value()), address(b.read_value())
  mode.run(lambda: exchange([a], [b]))
  assert (address(a.read_value()), address(b.read_value())) == (at_b, at_a)


# Graphs


def test_a_function_holds_one_op_and_is_traced_once():
  traces = []
  a = [tf.Variable(1.), tf.Variable([1], dtype=tf.int32)]
  b = [tf.Variable(2.), tf.Variable([2], dtype=tf.int32)]

  @tf.function
  def swap():
    traces.append(None)
    assert exchange(a, b) is None

  swap()
  assert [x.numpy() for x in a + b] == [2, 2, 1, 1]
  swap()
  assert [x.numpy() for x in a + b] == [1, 1, 2, 2]
  assert len(traces) == 1
  types = [op.type for op in
           swap.get_concrete_function().graph.get_operations()]
  assert types.count("Wrapopt>Exchange") == 1


@modes.only(*modes.graphs())
def test_one_op_serves_all_variables(mode):
  name = {"graph": "Wrapopt>Exchange",
          "ref-graph": "Wrapopt>ExchangeRef"}[mode.name]
  a, b = ([mode.uninitialized(FLOAT([i])) for _ in range(200)] for i in (0, 1))
  mode.session.run(tf1.global_variables_initializer())
  before = len(mode.graph.get_operations())
  op = exchange(a, b, name="swap")
  assert [added.type
          for added in mode.graph.get_operations()[before:]] == [name]
  assert op.name.startswith("swap/")
  mode.session.run(op)
  assert [x.item() for x in mode.values(a + b)] == [1] * 200 + [0] * 200


@pytest.mark.cpu("names its devices")
@modes.only(*modes.graphs(device_count={"CPU": 2}))
@pytest.mark.parametrize("scope", [None, "/cpu:1", "/device:GPU:7"])
def test_an_op_runs_where_its_variables_live(mode, scope):
  pairs = []
  for device in ("/device:CPU:0", "/device:CPU:1", "/device:CPU:0"):
    with tf.device(device):
      pairs.append([mode.variable(FLOAT([i])) for i in (0, 1)])
  known = set(mode.graph.get_operations())
  with tf.device(scope):
    op = exchange(*zip(*pairs))
  exchanges = [op for op in mode.graph.get_operations()
               if op not in known and "Exchange" in op.type]
  assert sorted((op.device, op.get_attr("N")) for op in exchanges) == [
      ("/device:CPU:0", 2), ("/device:CPU:1", 1)]
  mode.session.run(op)
  assert [[x.item() for x in mode.values(pair)] for pair in pairs] == (
      [[1, 0]] * 3)


@modes.only(*modes.graphs())
def test_control_dependencies_of_the_caller(mode):
  a, b = mode.variable(FLOAT([1])), mode.variable(FLOAT([2]))
  with tf.control_dependencies([tf1.assign(a, FLOAT([4]))]):
    op = exchange([a], [b])
  mode.session.run(op)
  assert [x.item() for x in mode.values([a, b])] == [2, 4]


def test_program_order_in_a_function():
  a, b = tf.Variable(1.), tf.Variable(2.)

  @tf.function
  def steps():
    exchange([a], [b])
    a.assign_add(10.)
    exchange([a], [b])
    return a.read_value(), b.read_value()

  assert [x.numpy() for x in steps()] == [1, 12]


# Not version 2 with ref variables: TensorFlow passes these into a branch by
# value, so that not even its own assign works there.
@pytest.mark.parametrize("mode, v2", [
    (modes.Graph(True), False), (modes.Graph(True), True),
    (modes.Graph(False), False)], indirect=["mode"])
def test_in_a_cond(mode, v2):
  a, b = mode.variable(FLOAT([1])), mode.variable(FLOAT([2]))
  wanted = tf1.placeholder(tf.bool, [])
  with modes.control_flow(v2):
    op = tf1.cond(wanted, lambda: exchange([a], [b]), tf.no_op)
  mode.session.run(op, {wanted: False})
  assert [x.item() for x in mode.values([a, b])] == [1, 2]
  mode.session.run(op, {wanted: True})
  assert [x.item() for x in mode.values([a, b])] == [2, 1]


# Refusals. Each names the input and both sides, and changes nothing.


def good(mode):
  """A pair that changes when something is exchanged too early."""
  return (mode.variable(FLOAT([1, 2]), name="a0"),
          mode.variable(FLOAT([3, 4]), name="b0"))


def raw_exchange(mode, a, b):
  if mode.name == "ref-graph":
    return raw.wrapopt_exchange_ref(a, b)
  return raw.wrapopt_exchange(handles(a), handles(b))


def test_a_variable_twice(mode):
  a, b = good(mode)
  c, d, e = (mode.variable([5., 6.], name=name) for name in "cde")
  for x, y, first, second in (
      ([a, c, c], [b, d, e], r"a\[1\]", r"a\[2\]"),
      ([a, c], [b, c], r"a\[1\]", r"b\[1\]"),
      ([a, d, e], [c, b, c], r"b\[0\]", r"b\[2\]")):
    refused(mode, [a, b, c, d, e], InvalidArgument,
            rf"{first} {called('c')} and {second} {called('c')} are one "
            "variable: a variable that is updated must be named once",
            lambda: exchange(x, y))  # pylint: disable=cell-var-from-loop


@modes.only(*modes.graphs())
def test_an_uninitialized_variable(mode):
  a, b = good(mode)
  c, d = mode.variable([5., 6.]), mode.uninitialized([7., 8.], name="raw")
  for x, y, where in ((c, d, r"b\[1\]"), (d, c, r"a\[1\]")):
    # TensorFlow's executor checks refs before it calls a kernel.
    refused(mode, [a, b, c], FailedPrecondition,
            {"graph": rf"{where} {called('raw')} is not initialized: run its "
                      "initializer first",
             "ref-graph": "Attempting to use uninitialized value raw"}[
                 mode.name],
            lambda: exchange([a, x], [b, y]))  # pylint: disable=cell-var-from-loop


@pytest.mark.cpu("makes its own handle")
@modes.only(modes.Eager(), modes.Function())
def test_a_variable_that_has_no_value_yet(mode):
  a, b = good(mode)
  c = mode.variable([5., 6.])
  empty = UninitializedVariable(shape=[2], dtype=tf.float32, name="empty")
  for x, y, where in ((c, empty, r"b\[1\]"), (empty, c, r"a\[1\]")):
    refused(mode, [a, b, c], FailedPrecondition,
            rf"{where} {called('empty')} is not initialized: run its "
            "initializer first", lambda: exchange([a, x], [b, y]))  # pylint: disable=cell-var-from-loop


@pytest.mark.cpu("places its op by its inputs")
@modes.only(modes.Eager(), modes.Function(), modes.Graph(True))
def test_a_resource_that_is_no_variable(mode):
  a, b = good(mode)

  def table():
    return tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.int64,
                                  shared_name="table")

  for where, x, y in ((r"b\[1\]", lambda: a, table), (r"a\[1\]", table,
                                                       lambda: a)):
    refused(mode, [a, b], InvalidArgument,
            rf"{where} {called('table')} is not a variable of this device: .*"
            "wrong type.*LookupInterface",
            lambda: raw_exchange(mode, [b, x()], [b, y()]))  # pylint: disable=cell-var-from-loop


@pytest.mark.cpu("stacks handles")
@modes.only(modes.Eager(), modes.Function(), modes.Graph(True))
def test_handles_that_are_no_scalars(mode):
  a, b = good(mode)
  c = mode.variable([5., 6.])
  refused(mode, [a, b, c], InvalidArgument,
          r"b\[1\] must be one resource handle, got a tensor of shape \[2\]",
          lambda: raw_exchange(mode, [a, c], [b, tf.stack([c.handle] * 2)]))


def test_another_dtype(mode):
  a, b = good(mode)
  c = mode.variable([5., 6.], name="c")
  d = mode.variable(np.array([7., 8.]), name="d")
  refused(mode, [a, b, c, d], TypeError,
          r"`b\[1\]` \('d:0'\) must be of dtype float32, got float64\.",
          lambda: exchange([a, c], [b, d]))
  if mode.name == "ref-graph":
    return  # A list of refs is of one dtype.
  name_c, name_d = (" " + called(name) if mode.name == "eager" else ""
                    for name in "cd")
  text = (rf"b\[1\]{name_d} must be of dtype float \(the dtype of "
          rf"a\[1\]{name_c}\), got double: buffers are exchanged, "
          "not converted")
  refused(mode, [a, b, c, d], at_build(mode, InvalidArgument), text,
          lambda: raw_exchange(mode, [a, c], [b, d]))


def test_another_dtype_behind_a_handle_that_tells_nothing():
  mode = modes.Eager()
  a, b = good(mode)
  c = mode.variable([5., 6.], name="c")
  d = mode.variable(np.array([7., 8.]), name="d")

  @tf.function(input_signature=[tf.TensorSpec([], tf.resource)] * 2)
  def swap(x, y):
    raw.wrapopt_exchange([a.handle, x], [b.handle, y])

  refused(mode, [a, b, c, d], InvalidArgument,
          rf"b\[1\] {called('d')} must be of dtype float \(the dtype of a\[1\] "
          rf"{called('c')}\), got double: buffers are exchanged, not converted",
          lambda: swap(c.handle, d.handle))


def test_another_shape(mode):
  a, b = good(mode)
  c = mode.variable([5., 6.], name="c")
  d = mode.variable([7., 8., 9.], name="d")
  refused(mode, [a, b, c, d], ValueError,
          r"`b\[1\]` \('d:0'\) misshapen: got \(3,\) but expected \(2,\) \(the "
          r"shape of a\[1\], 'c:0'\)\.", lambda: exchange([a, c], [b, d]))
  name_c, name_d = (" " + called(name) if mode.name == "eager" else ""
                    for name in "cd")
  refused(mode, [a, b, c, d], at_build(mode, InvalidArgument),
          rf"b\[1\]{name_d} misshapen: got \[3\] but expected \[2\] "
          rf"\(the shape of a\[1\]{name_c}\)",
          lambda: raw_exchange(mode, [a, c], [b, d]))


def test_shapes_that_show_when_it_runs(mode):
  a, b = good(mode)
  c = mode.variable([5., 6.], name="c")
  d, e = (mode.variable(x, name=name, shape=tf.TensorShape(None))
          for name, x in (("d", [7., 8., 9.]), ("e", [1., 1., 1.])))
  refused(mode, [a, b, c, d], InvalidArgument,
          rf"b\[1\] {called('d')} misshapen: got \[3\] but expected \[2\] "
          rf"\(the shape of a\[1\] {called('c')}\)",
          lambda: exchange([a, c], [b, d]))
  mode.run(lambda: exchange([a, e], [b, d]))
  assert [x.tolist() for x in mode.values([d, e])] == [[1, 1, 1], [7, 8, 9]]


@pytest.mark.cpu("TensorFlow has no such variables")
# XLA has none.
@modes.only(*modes.UNCOMPILED)
def test_strings(mode):
  # Their bytes lie elsewhere: TensorFlow's strings are no plain numbers.
  a, b = good(mode)
  c, d = mode.variable(["c"], name="c"), mode.variable(["d"], name="d")
  # In a graph, the shape function refuses them; it knows no names.
  name = " " + called("c") if mode.name == "eager" else ""
  with pytest.raises(at_build(mode, InvalidArgument), match=(
      rf"a\[\d\]{name} must be of a numeric dtype, got string")):
    mode.run(lambda: exchange([a, c], [b, d]))
  # Two ref ops: one for each dtype.
  if mode.name != "ref-graph":
    assert [x.tolist() for x in mode.values([a, b])] == [[1, 2], [3, 4]]
  assert [x.tolist() for x in mode.values([c, d])] == [[b"c"], [b"d"]]


X, Y = tf.Variable([1.], name="x"), tf.Variable([2.])


@pytest.mark.parametrize("a, b, error, text", [
    ([], [], ValueError, "`a` must hold at least one variable, got none."),
    ([X], [], ValueError, "`b` must hold at least one variable, got none."),
    ([X, Y], [X], ValueError, "`b` must hold one variable for each of the 2 in "
     "`a`, got 1."),
    ([X], [2.0], TypeError, "`b[0]` must be a variable, got 2.0."),
    ([None], [X], TypeError, "`a[0]` must be a variable, got None."),
])
def test_what_the_function_refuses(a, b, error, text):
  with pytest.raises(error) as e:
    exchange(a, b)
  assert str(e.value) == text
  assert [x.numpy() for x in (X, Y)] == [1, 2]


# Shape functions


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("a, b, fits", [
    ([], [], True), ([0], [0], True), (None, [2, 3], True),
    ([None, 3], [2, None], True), (None, None, True),
    ([2, 3], [3, 2], False), ([None, 4], [2, 3], False), ([], [1], False),
])
def test_shapes(ref, a, b, fits):
  with tf.Graph().as_default():
    op = raw.wrapopt_exchange_ref if ref else raw.wrapopt_exchange
    x, y = ([handle_of(ref, tf.int32, shape) for shape in shapes]
            for shapes in (([5], a), ([5], b)))
    if fits:
      assert not op(x, y).outputs
      return
    a, b = (str(shape).replace("None", "?").replace(" ", "")
            for shape in (a, b))
    with pytest.raises(ValueError) as e:
      op(x, y)
    assert (f"b[1] misshapen: got {b} but expected {a} (the shape of a[1])"
            ) in str(e.value)


def test_a_handle_that_tells_nothing():
  with tf.Graph().as_default():
    unknown = tf1.placeholder(tf.resource, [])
    known = handle_of(False, tf.float32, [2])
    raw.wrapopt_exchange([unknown, known], [known, unknown])


# Readers


@pytest.mark.cpu("adds by an op of TensorFlow's")
@modes.only(modes.Eager(), modes.Function())
def test_readers_keep_what_they_hold(mode):
  a, b = mode.variable(tf.zeros(100)), mode.variable(tf.ones(100))
  held = [a.read_value(), b.read_value()]
  mode.run(lambda: exchange([a], [b]))
  # Later writes are in place where they may be: not into these buffers.
  a.assign_add(5. * tf.ones(100))
  ema_update([b], [a], 0.5)
  assert [x.numpy()[-1] for x in held] == [0, 1]
  assert [x.numpy()[-1] for x in (a, b)] == [6, 3]


@pytest.mark.cpu("reads from another device, which is unordered")
@modes.only(*modes.graphs())
def test_a_reader_in_the_same_graph(mode):
  a, b = mode.variable(FLOAT([1])), mode.variable(FLOAT([2]))
  held = a.read_value()
  with tf.control_dependencies([held]):
    op = exchange([a], [b])
  with tf.control_dependencies([op]):
    results = [tf.identity(held), a.read_value(), b.read_value()]
  for want in ([1, 2, 1], [2, 1, 2]):
    assert [x.item() for x in mode.session.run(results)] == want


def test_the_array_that_a_variable_was_made_from():
  # TensorFlow may use a suitable array's own memory.
  arrays = [np.full(1 << 16, i, FLOAT) for i in range(2)]
  a, b = (tf.Variable(array) for array in arrays)
  exchange([a], [b])
  for variable in (a, b):
    variable.assign_add(tf.ones(1 << 16))
  assert [np.unique(array).tolist() for array in arrays] == [[0], [1]]
  assert [np.unique(v.numpy()).tolist() for v in (a, b)] == [[2], [1]]


@pytest.mark.cpu("runs a sparse update of TensorFlow's")
@modes.only(modes.Eager(), modes.Function())
@pytest.mark.parametrize("sparse", ["a", "b", "ab"])
@pytest.mark.parametrize("read", ["", "a", "b", "ab"])
def test_copy_on_read_mode(mode, sparse, read):
  # A variable in this mode is written in place, its readers have copies. It
  # must not get a buffer in which a reader of the other variable looks.
  variables = {"a": mode.variable([1., 2.]), "b": mode.variable([3., 4.])}
  a, b = variables.values()
  for name in sparse:
    put_into_copy_on_read_mode(variables[name])
  held = [variables[name].read_value() for name in read]
  kept, before = mode.values(held), mode.values([a, b])
  mode.run(lambda: exchange([a], [b]))
  for got, want in zip(mode.values([b, a]), before):
    numerics.assert_same_bits(got, want)
  for variable in (a, b):
    tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=[1],
                                     updates=[9.])
  for got, want in zip(mode.values(held), kept):
    numerics.assert_same_bits(got, want)
  assert a.numpy().tolist() == [before[1][0], 9]
  assert b.numpy().tolist() == [before[0][0], 9]
