"""XLA programs for a GPU call the GPU kernels: the calls, on an emulated GPU.

A call must be fit for a CUDA graph: here it is captured, during which the
emulated driver refuses all but launches. Then the graph is launched.
"""

import ctypes
import itertools

import numpy as np
import pytest
import tensorflow as tf  # First: the next line needs its libraries.
import _gpu_calls

from arrays import assert_all, assert_same_bits, values
import numerics
from wrapopt import ops
from xla_programs import DTYPES, Problem, RULES, SHAPES

CALL = "wrapopt_gpu_update"
# XLA's numbers of its types.
TYPES = {np.dtype(bool): 1, np.dtype(np.int32): 4, np.dtype(np.float64): 12,
         **{np.dtype(d): n for d, n in zip(numerics.DTYPES, (10, 16, 11, 12))}}
STREAM = 7


class Gpu:
  """The driver of the emulated GPU."""

  def __init__(self):
    # The kernels' launcher then finds this library by its name.
    self._driver = ctypes.CDLL("tests/fake_gpu/libcuda.so.1")
    self._contexts = itertools.count(2)

  def __getattr__(self, name):
    def call(*args):
      assert getattr(self._driver, name)(*args) == 0, name
    return call

  def use_context(self, context):
    self.cuCtxSetCurrent(ctypes.c_void_p(context))

  def use_new_context(self):
    """One into which no kernel is loaded."""
    self.use_context(next(self._contexts))

  def copy(self, array):
    """A copy of an array on the device, as an operand of a call."""
    address = ctypes.c_uint64()
    if array.size:  # XLA may give an empty array any address.
      self.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(array.nbytes))
      self.write(address, array)
    return (address.value, TYPES[array.dtype], list(array.shape))

  def write(self, address, array):
    self.cuMemcpyHtoD_v2(address, array.ctypes.data_as(ctypes.c_void_p),
                         ctypes.c_size_t(array.nbytes))

  def read(self, operand, like):
    got = np.empty_like(like)
    if got.size:
      self.cuMemcpyDtoH_v2(got.ctypes.data_as(ctypes.c_void_p),
                           ctypes.c_uint64(operand[0]),
                           ctypes.c_size_t(got.nbytes))
    return got

  def captured(self, work):
    """A graph of what `work` launches; an error if it does anything else."""
    graph = ctypes.c_void_p()
    self.cuStreamBeginCapture_v2(ctypes.c_void_p(STREAM), 0)
    try:
      work()
    finally:
      self.cuStreamEndCapture(ctypes.c_void_p(STREAM), ctypes.byref(graph))
    return graph


@pytest.fixture(scope="module", name="the_gpu")
def make_gpu():
  return Gpu()


@pytest.fixture
def gpu(the_gpu):
  the_gpu.use_context(1)
  return the_gpu


class Update:
  """A call, with its arrays on the device."""

  def __init__(self, gpu, rule, numbers, written, read):
    self._gpu = gpu
    self._rule = rule
    self._numbers = np.array(numbers, np.float64)
    written, read = ([np.asarray(x) for x in row] for row in (written, read))
    self._arrays = written
    self._accept = gpu.copy(np.array(True))
    # Nothing knows the numbers before the graph is launched.
    self._of_numbers = gpu.copy(np.full(self._numbers.shape, np.nan))
    self.written = [gpu.copy(x) for x in written]
    self._read = [gpu.copy(x) for x in read]

  def call(self, initialize=False, results=None):
    return _gpu_calls.call(
        CALL, initialize,
        [self._accept, self._of_numbers, *self.written, *self._read],
        self.written if results is None else results, self._rule, STREAM)

  def take(self, accept):
    """Captures the call and launches the graph; what is then on the device."""
    gpu = self._gpu
    assert self.call(initialize=True) == ""

    def execute():
      assert self.call() == ""

    graph = gpu.captured(execute)
    assert_same_bits(self.values(), self._arrays)
    gpu.write(ctypes.c_uint64(self._of_numbers[0]), self._numbers)
    gpu.write(ctypes.c_uint64(self._accept[0]), np.array(accept))
    gpu.cuGraphLaunch(graph, ctypes.c_void_p(STREAM))
    gpu.cuGraphDestroy(graph)
    return self.values()

  def values(self):
    return [self._gpu.read(operand, like)
            for operand, like in zip(self.written, self._arrays, strict=True)]


@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("dtypes", DTYPES, ids=numerics.name_of)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_has_the_bits_of_the_cpu(gpu, rule, dtypes, accept):
  problem = Problem(rule, dtypes, SHAPES, nesterov=True)
  got = Update(gpu, rule, problem.numbers + [1 - d for d in problem.decays],
               problem.all_values(), problem.grads).take(accept)
  problem.apply(*problem.args(accept))
  assert_all(numerics.assert_same_numbers, got, problem.all_values())
  if not accept:
    problem.check_unchanged()


@pytest.mark.parametrize("dtypes", DTYPES, ids=numerics.name_of)
def test_averages_have_the_bits_of_the_cpu(gpu, dtypes):
  problem = Problem("GradientDescent", dtypes, SHAPES)
  var, shadows = problem.states["var"], sum(problem.shadows, [])
  got = Update(gpu, "", [1, *(1 - d for d in problem.decays)], values(shadows),
               values(var)).take(True)
  ops.ema_update(problem.shadows, var, problem.decays)
  assert_all(numerics.assert_same_numbers, got, values(shadows))


def test_a_step_without_averages_and_one_of_many_variables(gpu):
  ones = [np.ones(2, np.float32)] * 3000
  for count in 1, 3000:  # One launch, and two.
    gpu.use_new_context()
    got = Update(gpu, "GradientDescent", [0.25], ones[:count],
                 ones[:count]).take(True)
    np.testing.assert_array_equal(got, [[0.75, 0.75]] * count)
  assert Update(gpu, "GradientDescent", [0.25], [], []).take(True) == []


def test_errors(gpu):
  one = np.ones(1, np.float32)
  update = Update(gpu, "GradientDescent", [0.25], [one], [one])
  other = Update(gpu, "GradientDescent", [0.25], [one], [one])
  assert "result 0 of a call another buffer than its operand" in update.call(
      results=other.written)
  wrong = Update(gpu, "Wrong", [0.25], [one], [one])
  assert "rule must be one of" in wrong.call()
  gpu.use_context(None)
  for initialize in False, True:
    assert update.call(initialize) == (
        "wrapopt_gpu_update could not run on the GPU: no CUDA context is "
        "current")


def test_a_capture_notices_what_a_graph_cannot_hold(gpu):
  """Without the stage that loads kernels, the call would load one."""
  assert _gpu_calls.may_be_captured(CALL)
  one = np.ones(1, np.float32)
  update = Update(gpu, "GradientDescent", [0.25], [one], [one])
  gpu.use_new_context()
  errors = []
  with pytest.raises(AssertionError, match="cuStreamEndCapture"):
    gpu.captured(lambda: errors.append(update.call()))
  assert "loading the image" in errors[0]
