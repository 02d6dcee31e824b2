"""The modes in which a program runs TensorFlow, with one interface.

A test with the fixture `mode` runs in each of them: eagerly, in a tf.function,
in one that XLA compiles, and in v1 graphs with ref and resource variables.
"""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import arrays

tf1 = tf.compat.v1

# Where variables are put, and all that has no reason to be elsewhere: tests
# give the first its --device.
VARIABLES, OTHERS = None, None


def _on(device):
  return tf.device(device) if device else contextlib.nullcontext()


class Eager:
  """Ops run as they are called."""

  name = "eager"
  use_resource = True

  @contextlib.contextmanager
  def entered(self):
    with _on(OTHERS):
      yield self

  def variable(self, value, name=None, shape=None):
    with _on(VARIABLES):
      return tf.Variable(value, trainable=False, name=name, shape=shape)

  def run(self, build):
    """Runs the ops that `build` makes."""
    build()

  def values(self, variables):
    """The variables' values, in arrays of their own."""
    return [np.array(v.numpy()) for v in variables]


class Function(Eager):
  """Ops are traced into a tf.function, which runs then."""

  name = "function"
  jit_compile = None

  def run(self, build):
    # What AutoGraph would convert is the test: the ops' functions forbid it.
    @tf.function(jit_compile=self.jit_compile, autograph=False)
    def function():
      # A raw op is a tf.Operation here, which must not be returned.
      build()

    function()


class Jit(Function):
  """The same, compiled by XLA."""

  name = "jit"
  jit_compile = True


class Graph:
  """A v1 graph and session."""

  def __init__(self, use_resource, **config):
    self.name = "graph" if use_resource else "ref-graph"
    self.use_resource = use_resource
    self._config = config

  @contextlib.contextmanager
  def entered(self):
    with tf.Graph().as_default() as self.graph:
      with tf1.Session(config=tf1.ConfigProto(**self._config)) as self._session:
        self._initializers = []
        with _on(OTHERS):
          yield self

  @property
  def session(self):
    """The session, in which all variables have values."""
    if self._initializers:
      # Together: to run anything for the first time takes milliseconds.
      self._session.run(self._initializers)
      self._initializers = []
    return self._session

  def uninitialized(self, value, name=None, shape=None):
    # The shape of a ref variable is its value's, or nothing is known of it.
    options = ({"shape": shape} if self.use_resource
               else {"validate_shape": shape is None})

    # Elsewhere: a value that comes to the device in a buffer of its own is
    # assigned without a copy. For some dtypes, a copy there would take a kernel
    # of TensorFlow's, which the fake GPU does not have.
    with _on(OTHERS):
      initial_value = tf.constant(value)
    with _on(VARIABLES):
      return tf1.Variable(initial_value, trainable=False, name=name,
                          use_resource=self.use_resource, **options)

  def variable(self, value, name=None, shape=None):
    variable = self.uninitialized(value, name, shape)
    self._initializers.append(variable.initializer)
    return variable

  def run(self, build):
    built = build()
    self.session.run(built)

  def values(self, variables):
    # Copied: what a session returns may be the variable's own buffer.
    return [np.array(x) for x in self.session.run(list(variables))]


def with_threads(use_resource, threads):
  """A context of a Graph whose ops run in so many threads."""
  return Graph(use_resource, intra_op_parallelism_threads=threads,
               use_per_session_threads=True).entered()


def graphs(**config):
  """One with resource variables, one with ref variables."""
  return [Graph(True, **config), Graph(False, **config)]


def only(*modes):
  """A decorator for a test that takes `mode`, but not all of them."""
  return pytest.mark.parametrize("mode", modes, ids=lambda m: m.name,
                                 indirect=True)


# Those in which TensorFlow runs the ops' CPU kernels.
UNCOMPILED = (Eager(), Function(), *graphs())


@pytest.fixture(params=[*UNCOMPILED, Jit()], ids=lambda m: m.name)
def mode(request):
  with request.param.entered() as entered:
    yield entered


@pytest.fixture(params=UNCOMPILED, ids=lambda m: m.name)
def uncompiled_mode(request):
  """For ops that XLA does not compile."""
  with request.param.entered() as entered:
    yield entered


def evaluate(mode, build):
  """What the tensors are that `build` makes."""
  if mode.name == "eager":
    return tf.nest.map_structure(np.asarray, build())
  if mode.name == "function":
    return tf.nest.map_structure(np.asarray,
                                 tf.function(build, autograph=False)())
  built = build()
  return mode.session.run(built)


@contextlib.contextmanager
def control_flow(v2):
  """Version 2 or 1 of control flow in graphs."""
  def switch(on):
    (tf1.enable_control_flow_v2 if on else tf1.disable_control_flow_v2)()

  before = tf1.control_flow_v2_enabled()
  switch(v2)
  try:
    yield
  finally:
    switch(before)


def refused(mode, variables, error, text, build):
  """Asserts an error and its text, and that every bit is as it was."""
  before = mode.values(variables)
  with pytest.raises(error, match=text):
    mode.run(build)
  arrays.assert_same_bits(mode.values(variables), before)


def builds(fits, build, text):
  """Asserts that a graph takes an op, which has no outputs, or an error."""
  if fits:
    assert not build().outputs
    return
  with pytest.raises(ValueError) as error:
    build()
  assert text in str(error.value)


def unknown_shape(tensor):
  """A tensor of which the shape function knows nothing."""
  return tf1.placeholder_with_default(tensor, shape=None)


def op_types(graph):
  return [op.type for op in graph.get_operations()]


def shown(shape):
  """A shape as an error of an op has it."""
  return str(shape).replace("None", "?").replace(" ", "")


def native_name(dtype):
  """A dtype as an error of an op has it."""
  return {tf.half: "half", tf.float32: "float", tf.float64: "double"}.get(
      dtype, dtype.name)


def called(name):
  """How the op calls a variable; eager variables have a number too."""
  return rf"\(variable '{name}(/\d+)?'\)"


def handle_of(ref, dtype, shape):
  """What stands for a variable in a graph; it needs no value there."""
  if ref:
    return tf.raw_ops.VariableV2(dtype=dtype, shape=tf.TensorShape(shape))
  return tf.raw_ops.VarHandleOp(dtype=dtype, shape=tf.TensorShape(shape))


def handles(variables):
  return [getattr(v, "handle", v) for v in variables]


def at_build(mode, error):
  """What becomes of an error that the shape function can see."""
  return error if mode.name == "eager" else ValueError


def address(tensor):
  """Where the buffer of an eager tensor is."""
  return np.asarray(memoryview(tensor)).ctypes.data


def put_into_copy_on_read_mode(variable):
  """As a sparse update does: from then on readers get copies."""
  tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=[0],
                                   updates=[8.])
  assert address(variable.read_value()) != address(variable.read_value())
