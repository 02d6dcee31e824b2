"""exchange and its ops: bits, buffers, errors, concurrent readers."""

import numpy as np
import pytest
import tensorflow as tf

import modes
from modes import (
    address, at_build, builds, called, handle_of, handles, refused, shown, tf1)
from modes import mode  # pylint: disable=unused-import
from numerics import name_of, PLAIN_DTYPES
from wrapopt._loader import ops as raw
from wrapopt.ops import ema_update
from wrapopt.ops import exchange

FLOAT = np.float32
InvalidArgument = tf.errors.InvalidArgumentError



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
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=name_of)
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
  a = [mode.variable(np.zeros(3, dtype)) for dtype in PLAIN_DTYPES]
  b = [mode.variable(np.ones(3, dtype)) for dtype in PLAIN_DTYPES]
  mode.run(lambda: exchange(a, b))
  for row, x in (a, 1), (b, 0):
    assert [y.tolist() for y in mode.values(row)] == [[x] * 3] * len(a)


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


@modes.only(*modes.graphs())
def test_one_op_serves_all_variables(mode):
  name = {"graph": "Wrapopt>Exchange",
          "ref-graph": "Wrapopt>ExchangeRef"}[mode.name]
  a, b = ([mode.uninitialized(FLOAT([i])) for _ in range(50)] for i in (0, 1))
  mode.session.run(tf1.global_variables_initializer())
  before = len(mode.graph.get_operations())
  op = exchange(a, b, name="swap")
  assert [added.type
          for added in mode.graph.get_operations()[before:]] == [name]
  assert op.name.startswith("swap/")
  mode.session.run(op)
  assert [x.item() for x in mode.values(a + b)] == [1] * 50 + [0] * 50


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
    builds(fits, lambda: op(x, y),
           f"b[1] misshapen: got {shown(b)} but expected {shown(a)} (the shape "
           "of a[1])")


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
