"""The tasks of the clusters of chaos_test.py.

A task appends a line of JSON to its log for each session and each step. The
log outlives the task, so it tells what a killed task had done.
"""

import faulthandler
import functools
import json
import os
import signal
import time

import numpy as np
import tensorflow as tf

import chaos_books
import wrapopt

tf1 = tf.compat.v1
HOLD, STOP, STACKS = "hold", "stop_{}", "stacks"
# What the books compare: by subject, the dtypes and shapes of the variables.
VARIABLES = {
    "gate": {"step": (tf.int64, []), "a": (tf.float64, []),
             "b": (tf.float64, []), "stale_counter": (tf.float32, []),
             "histogram": (tf.int64, [2, 64])},
    "elastic_average": {"a": (tf.float64, []), "b": (tf.float64, []),
                        "step": (tf.int64, [])},
}


class Log:
  """Appends lines to a file, each with one write."""

  def __init__(self, path):
    self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

  def __call__(self, kind, **entry):
    entry = {"kind": kind, "time": time.monotonic(), **entry}
    os.write(self._file, (json.dumps(entry) + "\n").encode())


def prepare(task, folder):
  """Has SIGUSR1 append the stacks of this process to a file."""
  path = os.path.join(folder, STACKS)
  # pylint: disable-next=consider-using-with
  file = open(path, "a", encoding="utf-8")
  file.write(f"{task.device} is process {os.getpid()}.\n")
  file.flush()
  faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
  # A worker whose parameter server was restarted looks again for its variables
  # after this time, by default half a minute.
  tf1.train.SessionManager.__init__ = functools.partialmethod(
      tf1.train.SessionManager.__init__, recovery_wait_secs=0.5)


class _Hook(tf1.train.SessionRunHook):
  """Calls a function with each new session."""

  def __init__(self, function):
    self._function = function

  def after_create_session(self, session, coord):
    del coord
    self._function(session)


def _restored(folder):
  """{name: value} of the last checkpoint, from which a chief starts."""
  path = tf.train.latest_checkpoint(folder)
  if path is None:
    return None
  reader = tf.train.load_checkpoint(path)
  return {name: np.asarray(reader.get_tensor(name)).tolist()
          for name in reader.get_variable_to_shape_map()}


def gate(task, index):
  """A graph whose admitted steps add DELTA to the variables."""
  del index
  step = tf1.train.get_or_create_global_step()
  variables = [
      tf1.get_variable(name, [], tf.float64, tf1.zeros_initializer())
      for name in chaos_books.DELTA]
  opt = wrapopt.DropStaleGradientOptimizer(
      # Without locks, one of two updates at the same time may be lost.
      tf1.train.GradientDescentOptimizer(1.0, use_locking=True),
      chaos_books.LIMIT, worker=f"{task.job}_{task.number}")

  def compute(x):
    time.sleep(np.random.default_rng().uniform(0, 0.01))
    return x

  with opt.record_step(step) as recorded:
    seen = variables[0].read_value()
    computed = tf.numpy_function(compute, [seen], tf.float64)
  with tf.control_dependencies([computed]):
    gradients = [(tf.constant(-delta, tf.float64), v) for v, delta in
                 zip(variables, chaos_books.DELTA.values())]
  train = opt.apply_gradients(gradients, step, recorded=recorded)
  with tf.control_dependencies([train]):
    stats = opt.staleness_stats(worker=True)
    fetches = {"seen": tf.identity(seen), "step": step.read_value(),
               "admitted": stats.admitted_histogram,
               "dropped": stats.dropped_histogram}
  return [], fetches, {
      "admitted": opt.staleness_stats(worker=True).admitted_histogram,
      "step": step.read_value()}


def model_average(task, index):
  """A graph whose steps add the worker's number of GAINS, and are rounds."""
  getter = wrapopt.ModelAverageCustomGetter(task.device)
  with tf1.variable_scope("", custom_getter=getter):
    variables = [
        tf1.get_variable(name, [], tf.float64, tf1.zeros_initializer())
        for name in chaos_books.GAINS]
  step = tf1.train.get_or_create_global_step()
  opt = wrapopt.ModelAverageOptimizer(
      tf1.train.GradientDescentOptimizer(1.0), 3, index == 0, getter, 1,
      min_workers=1, round_timeout_secs=1.5, chief_timeout_secs=600)
  train = opt.apply_gradients(
      [(tf.constant(-gains[index], tf.float64), v)
       for v, gains in zip(variables, chaos_books.GAINS.values())], step)

  def state():
    return {"own": [v.read_value() for v in variables],
            "place": opt._rounds[0].local_round.read_value(),
            "step": step.read_value()}

  with tf.control_dependencies([train]):
    fetches = state()
  return [opt.make_session_run_hook()], fetches, state()


def elastic_average(task, index):
  """A graph whose steps walk by WALKS; the second one exchanges."""
  getter = wrapopt.ElasticAverageCustomGetter(task.device)
  with tf1.variable_scope("", custom_getter=getter):
    variables = [
        tf1.get_variable(name, [], tf.float64, tf1.zeros_initializer())
        for name in chaos_books.WALKS]
  step = tf1.train.get_or_create_global_step()
  opt = wrapopt.ElasticAverageOptimizer(
      tf1.train.GradientDescentOptimizer(1.0), 3, getter,
      communication_period=2, moving_rate=chaos_books.RATE, rho=0.0)
  train = opt.apply_gradients(
      [(tf.constant(-walks[index], tf.float64), v)
       for v, walks in zip(variables, chaos_books.WALKS.values())], step)
  with tf.control_dependencies([train]):
    fetches = {"own": [v.read_value() for v in variables],
               "seen": [getter.local_centers[v].read_value()
                        for v in variables],
               "count": opt._local_step.read_value(),
               "step": step.read_value()}
  return [opt.make_session_run_hook(index == 0, index)], fetches, {
      "own": [v.read_value() for v in variables],
      "step": step.read_value()}


def train(task, subject, index, folder, log, broken=None):
  """Trains until it is told to stop.

  Args:
    task: Its `_cluster.Task`.
    subject: The name of a function of this module.
    index: Number of the worker, 0 for the chief.
    folder: Where the files `hold` and `stop_<index>` are looked for.
    log: The path of its log.
    broken: The name of a function of chaos_breaks.py, which breaks wrapopt.
  """
  log = Log(log)
  try:
    if broken:
      import chaos_breaks  # pylint: disable=g-import-not-at-top
      getattr(chaos_breaks, broken)(task, index)
    _train(task, globals()[subject], index, folder, log)
    log("end")
  except BaseException as e:
    log("failed", error=f"{type(e).__name__}: {e}")
    raise


def _wait_while_held(path, log):
  """Waits while there is a file, and logs its number."""
  seen = None
  while True:
    try:
      with open(path, encoding="utf-8") as f:
        number = int(f.read())
    except FileNotFoundError:
      return
    if number != seen:
      log("held", number=number)
      seen = number
    time.sleep(0.02)


def _train(task, build, index, folder, log):
  is_chief = index == 0
  checkpoints = os.path.join(folder, "checkpoints")
  hold, stop = os.path.join(folder, HOLD), os.path.join(
      folder, STOP.format(index))
  values = lambda x: tf.nest.map_structure(lambda y: y.tolist(), x)
  restored = {}
  with tf.Graph().as_default(), tf1.device(task.placement()):
    hooks, fetches, after = build(task, index)

    def start(session):
      log("start", **values(session.run(after)), **restored,
          devices={v.op.name: v.device for v in tf1.global_variables()})
      restored.clear()

    # First of all hooks: the next one saves a checkpoint.
    first = _Hook(lambda session: restored.update(
        restored=_restored(checkpoints)))
    with tf1.train.MonitoredTrainingSession(
        task.server.target, is_chief, checkpoints if is_chief else None,
        hooks=[*hooks, _Hook(start)], chief_only_hooks=[first],
        save_checkpoint_steps=1, save_summaries_steps=None,
        save_summaries_secs=None, log_step_count_steps=None,
        config=task.config()) as session:
      while not os.path.exists(stop):
        _wait_while_held(hold, log)
        try:
          entry = values(session.run(fetches))
        except tf.errors.CancelledError as e:
          # See sessions.again.
          log("lost", error=str(e))
          continue
        log("step", **entry)


FUNCTIONS = (prepare, train)
