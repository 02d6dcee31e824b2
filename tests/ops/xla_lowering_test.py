"""Every op and a whole train step become plain HLO for CPU, GPU and TPU.

The devices are not needed: the tests inspect the input program of XLA's
compiler for the device.
"""

import os
import re

import pytest
import tensorflow as tf  # First: the next line needs its libraries.
import _xla_lower
from tensorflow.core.framework import function_pb2
from tensorflow.python.ops import handle_data_util

from processes import printed_by
import wrapopt
from wrapopt import _loader
from wrapopt import _native
from wrapopt import ops
from wrapopt.__main__ import devices_of_kernels
from xla_programs import instructions

DEVICES = ("XLA_CPU_JIT", "XLA_GPU_JIT", "XLA_TPU_JIT")
DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
SHAPE = (5, 3)
RULES = sorted(name for name, rule in _native.rules().items()
               if rule.is_update)


def lower(function, device, *args, ahead_of_time=False, with_copies=False):
  """The HLO of a function of `args`, with its variables, for a device type.

  If `with_copies`, with those that XLA adds before it chooses buffers.
  """
  concrete = tf.function(
      function, jit_compile=True).get_concrete_function(*args)
  library = function_pb2.FunctionDefLibrary()
  library.CopyFrom(concrete.graph.as_graph_def().library)
  library.function.append(concrete.function_def)
  arguments = []
  for x in concrete.inputs:
    if x.dtype == tf.resource:
      variable, = handle_data_util.get_resource_handle_data(x).shape_and_type
      arguments.append(
          (True, variable.dtype, [d.size for d in variable.shape.dim]))
    else:
      arguments.append((False, x.dtype.as_datatype_enum, x.shape.as_list()))
  return _xla_lower.lower(
      library.SerializeToString(), concrete.function_def.signature.name,
      arguments, device, ahead_of_time, with_copies)


def check(hlo, op, written, device):
  """Asserts what must hold of a program that updates variables.

  Args:
    hlo: Its text.
    op: The type of the op whose instructions it must hold.
    written: How many variables it updates.
    device: The device type that it is for.
  """
  found = instructions(hlo)
  assert any(f'op_type="{op}"' in rest for _, _, rest in found)
  opcodes = {opcode for _, opcode, _ in found}
  # Nothing that leaves the device, nor a library's function.
  assert not opcodes & {"custom-call", "infeed", "outfeed", "send", "recv",
                        "rng"}, opcodes
  # In place: so many of the program's outputs are in the buffers of its inputs.
  header = hlo.split("\n", 1)[0]
  assert header.count("may-alias") == written, header
  if device == "XLA_TPU_JIT" and op != "Wrapopt>Exchange":
    # A scalar of float64 is there to keep digits until it is converted.
    arithmetic = [line for line in found if line[0].startswith("f64[")
                  and not line[0].startswith("f64[]")
                  and line[1] in ("add", "subtract", "multiply", "divide",
                                  "sqrt", "select", "maximum", "power")]
    assert not arithmetic


def variables(dtype, count, shape=SHAPE):
  return [tf.Variable(tf.ones(shape, dtype)) for _ in range(count)]


def test_the_checks_find_what_they_look_for():
  v = tf.Variable(tf.ones(SHAPE, tf.float64))
  rate = tf.constant(0.5, tf.float64)
  hlo = lower(lambda rate: v.assign_sub(rate * v), "XLA_TPU_JIT", rate)
  check(hlo, "AssignSubVariableOp", 1, "XLA_CPU_JIT")
  with pytest.raises(AssertionError, match="f64"):
    check(hlo, "AssignSubVariableOp", 1, "XLA_TPU_JIT")
  with pytest.raises(AssertionError):
    check(hlo, "AssignSubVariableOp", 2, "XLA_CPU_JIT")
  with pytest.raises(AssertionError):
    check(hlo, "Wrapopt>EmaUpdate", 1, "XLA_CPU_JIT")
  hlo = lower(lambda x: tf.linalg.qr(x)[0], "XLA_CPU_JIT",
              tf.constant([[1.0]]))
  with pytest.raises(AssertionError, match="custom-call"):
    check(hlo, "Qr", 0, "XLA_CPU_JIT")


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
  if request.param == "XLA_CPU_JIT":
    # Without this, the ops would be calls: see xla_calls_test.py.
    monkeypatch.setenv("WRAPOPT_XLA_ON_CPU", "hlo")
  return request.param


def computed(dtype, device):
  """Variables of float64 are computed in that, on a TPU too."""
  return "XLA_CPU_JIT" if dtype == tf.float64 else device


def float32_where_narrow(dtype):
  return tf.float32 if dtype.size < 4 else dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_ema_update(device, dtype):
  values = variables(dtype, 2)
  shadows = [variables(float32_where_narrow(dtype), 2) for _ in range(2)]
  hlo = lower(lambda d: ops.ema_update(shadows, values, [0.9, d]), device,
              tf.constant(0.5))
  check(hlo, "Wrapopt>EmaUpdate", 4, computed(dtype, device))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("rule", RULES)
def test_apply(device, rule, dtype, sparse):
  names = _native.rules()[rule].states
  states = {name: variables(dtype, 1) for name in names}
  shadows = [variables(float32_where_narrow(dtype), 1)]
  scalars = [s for s in _native.rules()[rule].scalars if not s.endswith("?")]

  def step(grad, indices, numbers, accept):
    if sparse:
      grad = tf.IndexedSlices(grad, indices, SHAPE)
    ops.apply(rule, states, [grad], dict(zip(scalars, numbers)),
              shadows=shadows, decay=[numbers[0]], accept=accept)

  hlo = lower(step, device, tf.ones((2 if sparse else 5, 3), dtype),
              tf.constant([1, 4]), [tf.constant(0.5)] * len(scalars),
              tf.constant(True))
  check(hlo, "Wrapopt>Apply", len(names) + 1, computed(dtype, device))
  # An average is that of the rounded variable: without this a compiler may
  # leave out the rounding where the number goes on as float32.
  assert ("opt-barrier" in hlo) == (dtype.size < 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_averages_that_lag_behind(device, dtype):
  value, shadow = variables(dtype, 1), variables(float32_where_narrow(dtype), 1)
  log_decays = variables(tf.float64, 1, (SHAPE[0] + 2,))
  indices = tf.constant([1, 4])
  # The log decays are of float64 on every device.
  hlo = lower(lambda i: ops.catch_up(shadow, value, log_decays, [i]), device,
              indices)
  check(hlo, "Wrapopt>CatchUp", 2, "XLA_CPU_JIT")
  hlo = lower(lambda: _loader.ops.wrapopt_read_averages(
      *([v.handle for v in row] for row in (shadow, value, log_decays)),
      T=dtype, S=shadow[0].dtype), device)
  check(hlo, "Wrapopt>ReadAverages", 2, "XLA_CPU_JIT")
  hlo = lower(lambda i, d: ops.sparse_ema_update(
      shadow, value, log_decays, [i], d), device, indices, tf.constant(0.5))
  check(hlo, "Wrapopt>SparseEmaUpdate", 2, "XLA_CPU_JIT")
  hlo = lower(lambda i, g: ops.apply(
      "GradientDescent", {"var": value}, [tf.IndexedSlices(g, i, SHAPE)],
      {"lr": 1.0}, shadows=[shadow], decay=[0.5], log_decays=[log_decays]),
              device, indices, tf.ones((2, 3), dtype))
  check(hlo, "Wrapopt>Apply", 3, "XLA_CPU_JIT")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_averaging_assign(device, dtype):
  targets, others = variables(dtype, 2), variables(dtype, 2)
  hlo = lower(
      lambda x, rate: ops.averaging_assign(
          targets, [targets, others, [x, x]], weights=[0.5, 0.25, rate],
          rate=rate),
      device, tf.ones(SHAPE, dtype), tf.constant(0.5))
  check(hlo, "Wrapopt>AveragingAssign", 2, computed(dtype, device))


@pytest.mark.parametrize("dtype", (*DTYPES, tf.int32), ids=lambda d: d.name)
def test_exchange(device, dtype):
  a, b = variables(dtype, 2), variables(dtype, 2)
  hlo = lower(lambda: ops.exchange(a, b), device)
  assert hlo.split("\n", 1)[0].count("may-alias") == 4
  # No arithmetic at all: values move.
  assert {opcode for _, opcode, _ in instructions(hlo)} <= {
      "parameter", "reshape", "copy", "tuple"}


def test_check_initialized(device):
  [v] = variables(tf.float32, 1)

  def program():
    _loader.ops.wrapopt_check_initialized([v.handle])
    return v + 1

  hlo = lower(program, device)
  # The compiler has checked the variable.
  assert {opcode for _, opcode, _ in instructions(hlo)} <= {
      "parameter", "reshape", "constant", "broadcast", "add", "tuple", "fusion",
      "copy", "call"}


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16],
                         ids=lambda d: d.name)
@pytest.mark.parametrize("rule, make_inner", [
    ("Adam", lambda: tf.compat.v1.train.AdamOptimizer(0.1)),
    ("Momentum", lambda: tf.compat.v1.train.MomentumOptimizer(
        0.1, 0.9, use_nesterov=True)),
], ids=["Adam", "Momentum"])
def test_a_train_step(device, rule, make_inner, dtype):
  rows = tf.Variable(tf.ones((7, 4), dtype), name="rows")
  kernel = tf.Variable(tf.ones((4, 2), dtype), name="kernel")
  step = tf.Variable(0, dtype=tf.int64)
  opt = wrapopt.MovingAverageOptimizer(make_inner(), [0.99, 0.9],
                                       num_updates=step,
                                       shadow_dtype=tf.float32)

  def train(ids, labels):
    with tf.GradientTape() as tape:
      logits = tf.tanh(tf.nn.embedding_lookup(rows, ids)) @ kernel
      loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
          labels=labels, logits=logits))
    grads = tape.gradient(loss, [rows, kernel])
    assert isinstance(grads[0], tf.IndexedSlices)
    opt.apply_gradients(zip(grads, [rows, kernel]), global_step=step)
    return loss

  batch = tf.constant([1, 1, 6]), tf.constant([0, 1, 1])
  tf.function(train)(*batch)  # Makes slots and averages.
  state = [rows, kernel, step, *opt.variables()]
  log_decays = 2 if opt.is_lazy(rows) else 0
  hlo = lower(train, device, *batch)
  check(hlo, "Wrapopt>Apply", len(state) + log_decays,
        "XLA_CPU_JIT" if log_decays else device)


def test_what_is_compiled_ahead_of_time_calls_nothing_of_this_process():
  value, shadow = variables(tf.float32, 1), variables(tf.float32, 1)
  update = lambda: ops.ema_update(shadow, value, 0.5)
  check(lower(update, "XLA_CPU_JIT", ahead_of_time=True), "Wrapopt>EmaUpdate",
        1, "XLA_CPU_JIT")
  with pytest.raises(AssertionError, match="custom-call"):
    check(lower(update, "XLA_CPU_JIT"), "Wrapopt>EmaUpdate", 1, "XLA_CPU_JIT")


@pytest.fixture
def calls_on_gpu(monkeypatch):
  monkeypatch.setenv("WRAPOPT_XLA_ON_GPU", "call")


def check_gpu_call(hlo, written, operands, rule):
  """Asserts that a program for a GPU is one call, which copies nothing."""
  found = instructions(hlo)
  call, = [line for line in found if line[1] == "custom-call"]
  assert 'custom_call_target="wrapopt_gpu_update"' in call[2]
  assert f'backend_config={{rule = "{rule}"}}' in call[2]
  assert "api_version=API_VERSION_TYPED_FFI" in call[2]
  # Each result is in the buffer of an operand, which is a variable's.
  aliases = re.search(r"output_to_operand_aliasing=\{(.*?\)\})", call[2])[1]
  assert sorted(int(n) for n in re.findall(r"\((\d+), \{\}\)", aliases)) == [
      *range(2, 2 + written)]
  assert len(re.findall(r"%[\w.-]+", call[2].split(")")[0])) == operands
  assert hlo.split("\n", 1)[0].count("may-alias") == written
  assert "copy" not in {opcode for _, opcode, _ in found}


GPU_SHAPES = (SHAPE, (), (0,), (7,))


@pytest.mark.by_day(11)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("rule", RULES)
def test_apply_as_a_call_on_a_gpu(rule, dtype, calls_on_gpu):
  names, scalars = _native.rules()[rule].states, _native.rules()[rule].scalars
  scalars = [s for s in scalars if not s.endswith("?")]

  def row(of):
    return [tf.Variable(tf.ones(shape, of)) for shape in GPU_SHAPES]

  states = {name: row(dtype) for name in names}
  shadows = [row(float32_where_narrow(dtype)) for _ in range(2)]

  def step(grads, numbers, accept):
    ops.apply(rule, states, grads, dict(zip(scalars, numbers)),
              shadows=shadows, decay=[numbers[0], 0.5], accept=accept)

  args = ([tf.ones(shape, dtype) for shape in GPU_SHAPES],
          [tf.constant(0.5)] * len(scalars), tf.constant(True))
  written = (len(names) + 2) * len(GPU_SHAPES)
  check_gpu_call(lower(step, "XLA_GPU_JIT", *args, with_copies=True), written,
                 2 + written + len(GPU_SHAPES), rule)
  # For another device, and for another process.
  check(lower(step, "XLA_TPU_JIT", *args), "Wrapopt>Apply", written,
        "XLA_GPU_JIT")
  check(lower(step, "XLA_GPU_JIT", *args, ahead_of_time=True), "Wrapopt>Apply",
        written, "XLA_GPU_JIT")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_ema_update_as_a_call_on_a_gpu(dtype, calls_on_gpu):
  values = variables(dtype, 2)
  shadows = [variables(float32_where_narrow(dtype), 2) for _ in range(2)]
  hlo = lower(lambda d: ops.ema_update(shadows, values, [0.9, d]),
              "XLA_GPU_JIT", tf.constant(0.5), with_copies=True)
  check_gpu_call(hlo, 4, 8, "")


def test_what_a_call_on_a_gpu_leaves_to_xla(calls_on_gpu):
  large = 2**22 + 1
  values = [tf.Variable(tf.ones((n,))) for n in (large, 3, large, large - 1)]
  shadows = [tf.Variable(tf.ones(v.shape)) for v in values]
  rate = tf.constant(0.5)

  def step(rate):
    ops.apply("GradientDescent", {"var": values}, [rate * v for v in values],
              {"lr": rate}, shadows=[shadows], decay=[rate])

  for function, written in [
      (step, 4),
      (lambda rate: ops.ema_update([shadows], values, [rate]), 2)]:
    hlo = lower(function, "XLA_GPU_JIT", rate)
    call, = [rest for _, opcode, rest in instructions(hlo)
             if opcode == "custom-call"]
    # The variables of 3 and of 2**22 numbers.
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?\)\})", call)[1]
    assert aliases.count("(") == written
    assert hlo.split("\n", 1)[0].count("may-alias") == 2 * written
  # Sparse gradients, rows that lag behind and weighted sums.
  table, average = variables(tf.float32, 1), variables(tf.float32, 1)
  log_decays = variables(tf.float64, 1, (SHAPE[0] + 2,))
  for op, function in [
      ("Wrapopt>Apply", lambda rate: ops.apply(
          "GradientDescent", {"var": table},
          [tf.IndexedSlices(tf.ones((2, 3)), tf.constant([1, 4]), SHAPE)],
          {"lr": rate}, shadows=[average], decay=[rate],
          log_decays=[log_decays])),
      ("Wrapopt>CatchUp", lambda rate: ops.catch_up(average, table,
                                                    log_decays)),
      ("Wrapopt>AveragingAssign", lambda rate: ops.averaging_assign(
          average, [table], weights=[1.0], rate=rate)),
  ]:
    hlo = lower(function, "XLA_GPU_JIT", rate)
    assert f'op_type="{op}"' in hlo
    assert "custom-call" not in hlo


ON_AMD = """
import tensorflow as tf
import xla_lowering_test as test

assert tf.test.is_built_with_rocm()
value, shadow = test.variables(tf.float32, 1), test.variables(tf.float32, 1)
print(test.lower(lambda: test.ops.ema_update(shadow, value, 0.5),
                 "XLA_GPU_JIT"))
"""


@pytest.mark.by_day(0)
def test_a_tensorflow_for_amds_gpus_calls_nothing():
  printed = printed_by(
      "-c", ON_AMD, pythonpath=[os.path.dirname(__file__)],
      LD_PRELOAD="tests/cc/built_with_rocm.so", WRAPOPT_XLA_ON_GPU="call")
  check(printed, "Wrapopt>EmaUpdate", 1, "XLA_GPU_JIT")


def test_the_choice_on_a_gpu_is_checked(monkeypatch):
  value, shadow = variables(tf.float32, 1), variables(tf.float32, 1)
  update = lambda: ops.ema_update(shadow, value, 0.5)
  for choice, called in ("hlo", False), ("", False), ("call", True):
    monkeypatch.setenv("WRAPOPT_XLA_ON_GPU", choice)
    assert ("wrapopt_gpu_update" in lower(update, "XLA_GPU_JIT")) == called
  monkeypatch.setenv("WRAPOPT_XLA_ON_GPU", "gpu")
  with pytest.raises(RuntimeError, match="WRAPOPT_XLA_ON_GPU must be 'call' or "
                     "'hlo', got 'gpu'"):
    lower(update, "XLA_GPU_JIT")


def test_no_op_is_left_out():
  """Every op has kernels for all three, and a test above, or a reason."""
  # The parameter server's side of asynchronous training: tickets, counters and
  # waits of the host, which the program of a device cannot have.
  # Messages, a clock and errors between tasks. Variables without a
  # value. Handles as one tensor: XLA must see each.
  host = re.compile("Wrapopt>(Staleness|BeginUpdate|(Unl|L)ockSteps|"
                    "AveragingRounds|"
                    "Averaging(Arrive|Center|Clock|Close|Drop|Enter|Follow)|"
                    "Averaging(Join|Leave|List|Mean|OuterStep|Raise|Release)|"
                    "Averaging(Restore|Stage|State)|"
                    "ReadPacked|AssignPacked|Bundle|Move)")
  tested = {f"Wrapopt>{name}" for name in (
      "Apply", "EmaUpdate", "CatchUp", "ReadAverages", "SparseEmaUpdate",
      "AveragingAssign", "Exchange", "CheckInitialized")}
  devices_of_ops = devices_of_kernels()
  assert tested == {op for op in devices_of_ops
                    if not op.endswith("Ref") and not host.match(op)}
  for op, devices in devices_of_ops.items():
    assert set(DEVICES) <= set(devices) or op not in tested, op
