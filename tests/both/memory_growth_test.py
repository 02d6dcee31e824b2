"""Nothing that runs again and again leaves memory behind.

Each path runs many steps. After a warm-up, the memory of the process must not
grow by as much as one small object a step.
"""

import contextlib
import ctypes
import gc
import inspect
import itertools
import mmap
import typing
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
import wrapopt
import wrapopt.keras
from wrapopt._loader import ops as raw

import memory
import modes
from training import sgd

tf1 = tf.compat.v1
ops = wrapopt.ops

SHAPES = [(3, 4), (4,), ()]
ROWS, COLUMNS = 50, 4
RESOURCE, REF = modes.graphs()
EAGER, FUNCTION, JIT = modes.Eager(), modes.Function(), modes.Jit()


class Size(typing.NamedTuple):
  """How many steps are made, and how many bytes each may leave behind."""
  fraction: float  # Of the steps of a night.
  most: float
  few: int  # The number of steps of a slow path,
  most_of_few: float  # and the bytes that each of these may leave behind.
  leak: int  # Bytes of a leak that must be found.


SIZES = {"daily": Size(0.005, 512, 12, 2**15, 1024),
         "at_night": Size(1, 32, 300, 2**12, 64)}


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def size(request):
  return request.param


def moving_average():
  return wrapopt.MovingAverageOptimizer(
      tf1.train.MomentumOptimizer(0.1, 0.9), 0.9)


def variables(mode):
  return [mode.variable(np.ones(shape, np.float32), name=f"w{i}")
          for i, shape in enumerate(SHAPES)]


def pairs_of(values):
  return [(tf.ones(v.shape, v.dtype), v) for v in values]


# Each path is a context with a step: a function of no arguments. A decorator
# says how often it runs at night.

PATHS = {}
_FEW = object()  # Of a slow path: see Size.


def path(steps=100_000, **arguments):
  def decorator(function):
    name = "-".join([function.__name__, *arguments.pop("ids", [])])
    takes = inspect.signature(function).parameters
    PATHS[name] = steps, lambda **given: contextlib.contextmanager(function)(
        **arguments, **{k: x for k, x in given.items() if k in takes})
    return function
  return decorator


def in_modes(*some, steps=100_000):
  """A path in each of these modes."""
  def decorator(function):
    for mode in some:
      path(steps, mode=mode, ids=[mode.name])(function)
    return function
  return decorator


def repeated(mode, build):
  """A function that runs what `build` makes; in a graph, it is made once."""
  if isinstance(mode, modes.Graph):
    op = build()
    mode.session.run(tf1.global_variables_initializer())
    return mode.session.make_callable(op)
  if isinstance(mode, modes.Function):
    return tf.function(lambda: (build(), None)[1], autograph=False,
                       jit_compile=mode.jit_compile)
  return build


@in_modes(EAGER, FUNCTION, JIT, RESOURCE, REF)
def step(mode):
  with mode.entered():
    opt, values = moving_average(), variables(mode)
    pairs = pairs_of(values)
    yield repeated(mode, lambda: opt.apply_gradients(pairs))


def lazy_step(mode, rows):
  """(optimizer, table, a step of some of its rows)."""
  opt = wrapopt.MovingAverageOptimizer(sgd(0.1), 0.9)
  table = mode.variable(np.ones([ROWS, COLUMNS], np.float32), name="table")
  slices = tf.IndexedSlices(tf.ones([len(rows), COLUMNS]), tf.constant(rows),
                            [ROWS, COLUMNS])
  train = repeated(mode, lambda: opt.apply_gradients([(slices, table)]))
  train()
  assert opt.is_lazy(table)
  return opt, table, train


@in_modes(EAGER, FUNCTION, JIT, RESOURCE)
def lazy_rows(mode):
  with mode.entered():
    yield lazy_step(mode, [1, 7, 1, 3])[2]


@in_modes(EAGER, RESOURCE, steps=20_000)
def lazy_rows_catch_up(mode):
  """The average is read after each step."""
  with mode.entered():
    opt, table, train = lazy_step(mode, [1])
    read = repeated(mode, lambda: tf.convert_to_tensor(opt.average(table)))

    def both():
      train()
      read()
    yield both


def keras_values():
  return [keras.Variable(np.ones(shape, np.float32)) for shape in SHAPES]


@in_modes(EAGER, steps=50_000)
@in_modes(FUNCTION, REF)
def schedule_free(mode):
  with mode.entered():
    opt = wrapopt.ScheduleFreeOptimizer(tf1.train.AdamOptimizer(0.1))
    pairs = pairs_of(variables(mode))
    yield repeated(mode, lambda: opt.apply_gradients(pairs))


@path(steps=50_000, wrapper=lambda: wrapopt.keras.MovingAverage("adam", 0.9),
      ids=["moving_average"])
@path(steps=50_000, wrapper=lambda: wrapopt.keras.ScheduleFree("adam"),
      ids=["schedule_free"])
def keras_eager(wrapper):
  opt, values = wrapper(), keras_values()
  grads = [tf.ones(v.shape) for v in values]
  yield lambda: opt.apply(grads, values)


@path(wrapper=lambda: wrapopt.keras.MovingAverage("adam", 0.9),
      ids=["moving_average"])
@path(wrapper=lambda: wrapopt.keras.Lookahead("adam", 3), ids=["lookahead"])
@path(wrapper=lambda: wrapopt.keras.SWA("adam", 0, 3), ids=["swa"])
@path(wrapper=lambda: wrapopt.keras.ScheduleFree("adam"), ids=["schedule_free"])
@path(wrapper=lambda: wrapopt.keras.PrimalAverage("adam"),
      ids=["primal_average"])
def keras_function(wrapper):
  opt, values = wrapper(), keras_values()
  opt.build(values)
  grads = [tf.ones(v.shape) for v in values]
  yield tf.function(lambda: opt.apply(grads, values), autograph=False)


@in_modes(RESOURCE, REF)
@in_modes(EAGER, steps=50_000)
def gate(mode):
  with mode.entered():
    values = variables(mode)
    count = mode.variable(np.int64(0), name="count")
    opt = wrapopt.DropStaleGradientOptimizer(
        tf1.train.MomentumOptimizer(0.1, 0.9), 1, global_step=count)

    def build():
      with opt.record_step(count) as recorded:
        pairs = [(2 * v, v) for v in values]
      return opt.apply_gradients(pairs, count, recorded=recorded)

    yield repeated(mode, build)


@path()
def rounds():
  handle = raw.wrapopt_averaging_rounds(
      num_workers=2, shared_name="memory_growth", dtypes=[tf.float32],
      sizes=[100], holds_center=False)
  center, value = tf.Variable(tf.zeros([100])), tf.ones([100])
  raw.wrapopt_averaging_restore(handle, "", 0, [0, 1], 0)
  end = tf.function(lambda known: raw.wrapopt_averaging_mean(
      handle, known, [center.handle], [], sizes=[1]), autograph=False)
  place = tf.constant([0, 1], tf.int64)

  def turn():
    nonlocal place
    for worker in "ab":
      known = raw.wrapopt_averaging_enter(
          handle, worker, 0, place, 1, 60., 60.).known
      raw.wrapopt_averaging_stage(handle, worker, known, 1., 1, 0, [value])
      raw.wrapopt_averaging_arrive(handle, worker, known)
    place = end(raw.wrapopt_averaging_close(handle, place, 2, 60., 60.))
  yield turn


@in_modes(EAGER, FUNCTION, RESOURCE)
def averaging_assign(mode):
  with mode.entered():
    rows = [variables(mode) for _ in range(2)]
    yield repeated(mode, lambda: ops.averaging_assign(rows, rows, [0.3, 0.7]))


@in_modes(EAGER, RESOURCE, REF, steps=5_000)
def averaged_weights(mode):
  with mode.entered():
    opt, values = moving_average(), variables(mode)
    pairs = pairs_of(values)
    repeated(mode, lambda: opt.apply_gradients(pairs))()

    def enter():
      with opt.averaged_weights():
        pass
    yield enter


@path(steps=5_000, wrapper=lambda: wrapopt.keras.MovingAverage("adam", 0.9),
      ids=["moving_average"])
@path(steps=5_000, wrapper=lambda: wrapopt.keras.ScheduleFree("adam"),
      ids=["schedule_free"])
def keras_averaged_weights(wrapper):
  opt, values = wrapper(), keras_values()
  opt.apply([tf.ones(v.shape) for v in values], values)

  def enter():
    with opt.averaged_weights():
      pass
  yield enter


# Slow ones. TensorFlow may keep some bytes of each graph and file.


@path(steps=_FEW)
def checkpoint(tmp_path):
  opt, values = moving_average(), variables(EAGER)
  opt.apply_gradients(pairs_of(values))
  saved = tf.train.Checkpoint(opt=opt, values=values)
  yield lambda: saved.write(str(tmp_path / "checkpoint"))


@path(steps=_FEW)
def swapping_saver(tmp_path):
  with RESOURCE.entered() as mode:
    opt, values = moving_average(), variables(mode)
    repeated(mode, lambda: opt.apply_gradients(pairs_of(values)))()
    saver = opt.swapping_saver()
    yield lambda: saver.save(mode.session, str(tmp_path / "model"))


@contextlib.contextmanager
def dropping():
  """Yields a function that notes objects, all but the last of which must go."""
  noted = []

  def note(*objects):
    noted.append([weakref.ref(x) for x in objects])

  yield note
  gc.collect()
  alive = [ref() for refs in noted[:-1] for ref in refs]
  assert len(noted) > 1 and not any(x is not None for x in alive), (
      f"{sum(x is not None for x in alive)} of {len(alive)} objects live on")


@path(steps=_FEW)
def made_and_dropped_eagerly():
  with dropping() as note:
    def make():
      opt, values = moving_average(), variables(EAGER)
      opt.apply_gradients(pairs_of(values))
      with opt.averaged_weights():
        pass
      note(opt, *values, *opt.averages())
      # TensorFlow keeps 36 KB, a kernel, of each name that an eager variable
      # ever had. Names of slots, of its own optimizers too, do not repeat.
      context.context().clear_kernel_cache()
    yield make


def one_for_all_graphs():
  # Without slots: TensorFlow's optimizers hold each graph that they have slots
  # in. The averages do not.
  opt = wrapopt.MovingAverageOptimizer(sgd(0.1), 0.9)
  return lambda: opt


@path(steps=_FEW, use_resource=True, optimizer=lambda: moving_average,
      ids=["graph"])
@path(steps=_FEW, use_resource=False, optimizer=lambda: moving_average,
      ids=["ref-graph"])
@path(steps=_FEW, use_resource=True, optimizer=one_for_all_graphs,
      ids=["graph", "one_optimizer"])
def made_and_dropped(use_resource, optimizer):
  optimizer_of_graph = optimizer()
  with dropping() as note:
    def make():
      with modes.Graph(use_resource).entered() as mode:
        opt, values = optimizer_of_graph(), variables(mode)
        pairs = pairs_of(values)
        repeated(mode, lambda: opt.apply_gradients(pairs))()
        with opt.averaged_weights():
          pass
        note(mode.graph, *values, *opt.averages())
    yield make


@path(steps=_FEW)
def made_and_dropped_keras():
  with dropping() as note:
    def make():
      opt = wrapopt.keras.MovingAverage("adam", 0.9)
      layer = keras.layers.Dense(3)
      layer.build((None, 4))
      opt.apply([tf.ones(v.shape) for v in layer.trainable_variables],
                layer.trainable_variables)
      note(opt, layer, *layer.trainable_variables)
      keras.backend.clear_session()
    yield make


@pytest.mark.by_day(5)
@pytest.mark.parametrize("name", PATHS)
def test_memory_does_not_grow(name, size, tmp_path):
  steps, make = PATHS[name]
  is_slow = steps is _FEW
  if is_slow:
    steps, most = size.few, size.most_of_few
  else:
    steps, most = max(200, round(steps * size.fraction)), size.most
  with make(tmp_path=tmp_path) as step_of_path:
    found = memory.growth(step_of_path, steps)
  print(f"{name}, {steps} steps: {found}")
  if is_slow and size is SIZES["daily"]:
    # Arenas of TensorFlow's threads still grow in the first steps.
    found = found._replace(resident=0)
  assert memory.per_step(found) < most, found


@pytest.mark.parametrize("leak", ["objects", "allocated", "resident"])
def test_a_leak_is_found(leak, size):
  """Each measure finds what the two others do not see."""
  steps, make = PATHS["step-function"]
  steps = round(steps * size.fraction)
  kept, count = [], itertools.count()
  malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
  malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
  free.argtypes = [ctypes.c_void_p]
  addresses = (ctypes.c_void_p * steps)()
  pages = mmap.mmap(-1, steps * size.leak,
                    flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  pages.madvise(mmap.MADV_NOHUGEPAGE)

  def leaking():
    of_path()
    i = next(count)
    if leak == "objects":
      kept.append([bytes(15) for _ in range(size.leak // 64)])
    elif leak == "allocated":
      addresses[i] = malloc(size.leak)
    else:
      pages[i * size.leak:(i + 1) * size.leak] = b"1" * size.leak

  with make() as of_path:
    found = memory.growth(leaking, steps)
  for address in addresses:
    free(address)
  pages.close()
  print(f"{leak}: {found}")
  assert memory.per_step(found) > size.most
  if leak == "objects":
    assert found.objects > 0.9 * size.leak / 64
  else:
    assert getattr(found, leak) > 0.9 * size.leak


def test_what_lives_on_is_found():
  kept = [tf.Variable(1.0) for _ in range(3)]
  with pytest.raises(AssertionError, match="2 of 2 objects live on"):
    with dropping() as note:
      for v in kept:
        note(v)
