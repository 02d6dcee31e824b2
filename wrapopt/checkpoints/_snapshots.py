"""Snapshots: files of averages, which a thread writes during training."""

import concurrent.futures
import copy
import os
import threading
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt import _composition
from wrapopt import moving_average
from wrapopt._averages import _decay
from wrapopt._averages import _replicas
from wrapopt._types import Variable
from wrapopt._v1 import _interpolation
from wrapopt._v1 import _wrapper
from wrapopt.checkpoints import _files
from wrapopt.checkpoints import _sink
from wrapopt.checkpoints import _source
from wrapopt.checkpoints import _tensorflow

_PREFIX = "snapshot-"
_DTYPES = {None: None, "float32": np.dtype(np.float32),
           "float16": np.dtype(np.float16), "bfloat16": _source.BFLOAT16}
_Path = Union[str, bytes, os.PathLike]


class Snapshots:
  """A directory of snapshots, and the thread that writes them.

  A snapshot holds the averages of one decay under the names of their variables,
  in one or several files named `snapshot-<step>-<decay>`. It appears once it is
  complete and on the disk. A note in it describes it.
  """

  # The maximum of snapshots in memory: one being written, one waiting.
  _PENDING = 2

  def __init__(self, directory, save_steps, dtype):
    """Makes the directory.

    Args:
      directory: Its path.
      save_steps: The number of steps between snapshots.
      dtype: The dtype in which averages are stored: "float32", "float16",
        "bfloat16", or None for their own dtypes.

    Raises:
      TypeError: If `save_steps` is not an integer.
      ValueError: If an argument is out of range.
    """
    save_steps = _checks.integer("save_steps", save_steps)
    if save_steps < 1:
      raise ValueError(f"`save_steps` must be at least 1, got {save_steps}.")
    name = dtype if dtype is None else tf.as_dtype(dtype).name
    if name not in _DTYPES:
      raise ValueError(
          f"`dtype` must be None, float16, bfloat16 or float32, got {name}.")
    self.directory = _files.path("directory", directory)
    if not self.directory:
      raise ValueError("`directory` must be the path of a directory, got ''. "
                       "Pass a path such as 'run/snapshots'.")
    self.save_steps = save_steps
    self._dtype = _DTYPES[name]
    self._end_run()

  def _end_run(self):
    self._last = None
    self._thread = None
    self._pending = []
    self._free = threading.BoundedSemaphore(self._PENDING)

  def copy(self):
    """The same directory, for another run."""
    copied = copy.copy(self)
    copied._end_run()
    return copied

  def begin(self, step):
    """Begins a run, after `step` steps."""
    self._last = step
    os.makedirs(self.directory, exist_ok=True)
    _sink.remove_partial(self.directory, _PREFIX)
    self._thread = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix="wrapopt-snapshots")

  def is_due(self, step):
    """Whether a snapshot is due after `step` steps."""
    return step // self.save_steps > self._last // self.save_steps

  def write(self, make_sink, step, decay, steps, averages, others=()):
    """Passes a snapshot to the thread; waits while two are pending.

    Args:
      make_sink: A function of a path and a note, which makes the Sink.
      step: The number of steps of the run.
      decay: The decay of the averages, or None.
      steps: The number of steps of the averages, or None.
      averages: {name: (array, dtype of the variable)}.
      others: {name: array} of other values in the file.

    Raises:
      The error of the thread for an earlier snapshot, if any.
    """
    self._last = step
    self._raise_errors()
    self._free.acquire()
    self._pending.append(self._thread.submit(
        self._write, make_sink, step, decay, steps, averages, dict(others)))

  def _write(self, make_sink, step, decay, steps, averages, others):
    try:
      values = {name: self._stored(name, value)
                for name, (value, _) in averages.items()}
      note = {
          "step": step, "steps": steps, "decay": str(decay),
          "gamma": (decay.gamma if isinstance(decay, _decay.PowerDecay)
                    else None),
          "others": [*others],
          "dtypes": {name: str(dtype) for name, (_, dtype) in averages.items()
                     if dtype != values[name].dtype}}
      values.update(others)
      name = f"{_PREFIX}{step}-{'average' if decay is None else decay}"
      sink = make_sink(os.path.join(self.directory, name), note)
      try:
        for variable, value in values.items():
          sink.write(variable, value)
        sink.publish()
      finally:
        sink.discard()
    finally:
      self._free.release()

  def _stored(self, name, value):
    if self._dtype is None:
      return value
    with np.errstate(over="ignore"):
      stored = value.astype(self._dtype)
    if (self._dtype == np.float16 and
        not np.array_equal(np.isfinite(stored), np.isfinite(value))):
      raise ValueError(
          f"The average of '{name}' must be at most 65504 in magnitude to be "
          f"stored in float16, got {np.abs(value[np.isfinite(value)]).max()}. "
          "Choose the dtype bfloat16 or float32.")
    return stored

  def _raise_errors(self):
    pending, self._pending = self._pending, []
    for i, future in enumerate(pending):
      if not future.done():
        self._pending.append(future)
      elif future.exception() is not None:
        self._pending.extend(pending[i + 1:])
        raise future.exception()

  def end(self):
    """Waits until all snapshots are written.

    Raises:
      The error of the thread, if any.
    """
    if self._thread is not None:
      self._thread.shutdown()
      self._raise_errors()


class SnapshotHook(tf.compat.v1.train.SessionRunHook):
  """Writes averages of a `MovingAverageOptimizer` as snapshots, in sessions.

  A snapshot is a checkpoint with the averages of one decay under the names of
  their variables, and nothing else: a `tf.compat.v1.train.Saver` of these
  variables restores it. A thread writes it while training goes on, and it
  appears when it is whole and on the disk. `wrapopt.checkpoints.posthoc` makes
  averages of any width of snapshots. A snapshot that is due inside
  `averaged_weights` is written by the first run after the block.

  Example:

      opt = wrapopt.MovingAverageOptimizer(
          inner, [wrapopt.PowerDecay(0.05), wrapopt.PowerDecay(0.1)])
      train_op = opt.minimize(loss, global_step)
      with tf.compat.v1.train.MonitoredTrainingSession(hooks=[
          wrapopt.checkpoints.SnapshotHook(opt, "run/snapshots", 1000)]) as s:
        ...

  If several workers share variables, give it to the chief only.
  """

  def __init__(self, opt: Union[moving_average.MovingAverageOptimizer,
                                _interpolation.InterpolatingOptimizer],
               directory: _Path, save_steps: int, dtype: Any = None, *,
               global_step: Optional[Variable] = None) -> None:
    """Makes the hook.

    Args:
      opt: A `wrapopt.MovingAverageOptimizer`, `PrimalAverageOptimizer` or
        `ScheduleFreeOptimizer`, whose train op is made before the session.
      directory: The directory of the snapshots.
      save_steps: The number of steps between snapshots.
      dtype: The dtype in which averages are stored: `tf.float32`, `tf.float16`,
        `tf.bfloat16`, or None for their own dtypes. float16 and bfloat16 halve
        the files. Averages computed from them have the dtypes of the variables.
      global_step: The variable that counts steps; by default the graph's.

    Raises:
      TypeError: If `opt` is another optimizer, or `save_steps` is not an
        integer.
      ValueError: If an argument is out of range.
    """
    if getattr(opt, "_averages", None) is None or not isinstance(
        opt, _wrapper.WrapperOptimizer):
      _composition.check_import("`opt`", opt, _wrapper.WrapperOptimizer)
      raise TypeError("`opt` must be a wrapopt.MovingAverageOptimizer, "
                      "PrimalAverageOptimizer or ScheduleFreeOptimizer, got "
                      f"{type(opt).__module__}.{type(opt).__qualname__}.")
    self._opt = opt
    self._snapshots = Snapshots(directory, save_steps, dtype)
    self._global_step = global_step

  def begin(self):
    step = self._global_step
    if step is None:
      step = _checks.step_of_graph()
    if step is None:
      raise RuntimeError(
          "SnapshotHook needs a global step, got a graph without one. Make it "
          "with tf.compat.v1.train.get_or_create_global_step().")
    graph = tf.compat.v1.get_default_graph()
    self._step = step
    self._rows = self._opt.averages_by_decay(graph)
    steps = self._opt.average_steps()
    # The first replica of a strategy stands for all.
    self._fetches = {"step": step, "rows": [
        [_replicas.values(s)[0] for _, s in row] for _, row in self._rows]}
    if steps is not None:
      self._fetches["steps"] = _replicas.values(steps)[0]

  def after_create_session(self, session, coord):
    del coord
    # The session may be a recreated one.
    self._snapshots.end()
    self._snapshots.begin(int(session.run(self._step)))

  def before_run(self, run_context):
    del run_context
    return tf.compat.v1.train.SessionRunArgs(self._step)

  def after_run(self, run_context, run_values):
    # The fetched step may be that before the increment.
    if self._snapshots.is_due(int(run_values.results) + 1):
      step = int(run_context.session.run(self._step))
      if self._snapshots.is_due(step):
        self._write(run_context.session)

  def _write(self, session):
    with self._opt._averages.averaged.holding_swap(session) as in_place:
      if in_place:
        return  # Later: the averages hold the weights.
      values = session.run(self._fetches)
    for (decay, row), arrays in zip(self._rows, values["rows"]):
      averages = {}
      for (variable, _), value in zip(row, arrays):
        _add(averages, variable, value)
      self._snapshots.write(
          _tensorflow.TensorFlowSink, int(values["step"]), decay,
          _steps_of(values.get("steps"), self._opt._averages.update_every),
          averages)

  def end(self, session):
    del session
    self._snapshots.end()


def _steps_of(steps, update_every):
  """The number of steps of averages until they moved last, or None."""
  return steps if steps is None else int(steps) // update_every * update_every


def _add(averages, variable, value):
  """Adds a copy of an average, under the name of the variable in a Saver.

  Args:
    averages: {name: (array, dtype of the variable)}.
    variable: A variable, or a slice of one.
    value: Its average.
  """
  dtype = np.dtype(variable.dtype.base_dtype.as_numpy_dtype)
  info = variable._get_save_slice_info()
  if info is None:
    averages[variable.op.name] = np.array(value), dtype
    return
  whole, _ = averages.setdefault(
      info.full_name, (np.empty(info.full_shape, value.dtype), dtype))
  whole[tuple(slice(begin, begin + length) for begin, length in zip(
      info.var_offset, info.var_shape))] = value
