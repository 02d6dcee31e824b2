"""Calls of TensorFlow that Ctrl-C ends at once.

Python raises KeyboardInterrupt in the main thread, when it runs Python code. In
a call of TensorFlow it runs none. So the main thread waits in Python for a call
in another thread. In a `tf.function`, the main thread is in TensorFlow, and
another thread runs our code. It reads of the signal in a pipe, to which Python
writes as soon as it comes. The function must then end without an error: Python
would raise KeyboardInterrupt in the code that makes the exception, which pybind
turns into another one.
"""

import contextlib
import os
import signal
import sys
import threading

from wrapopt import ops

_POLL_SECS = 0.1
# How long a call that is given up may take to end. One that ends together with
# Python itself would abort the process.
_END_SECS = 1.0

_pipe = None  # The end that is read.
_seen = 0  # The number of interrupts that were read.
_lock = threading.Lock()
_here = threading.local()
_stuck = None  # The main thread's frame in a function that was interrupted.


def _is_main():
  return threading.current_thread() is threading.main_thread()


def _main_frame():
  return sys._current_frames().get(threading.main_thread().ident)


@ops.not_converted  # Of what it converts, globals are copies.
def watch():
  """Lets functions that are not in the main thread learn of interrupts.

  No effect in another thread, or if other code uses Python's pipe.
  """
  global _pipe
  if _pipe is not None or not _is_main():
    return
  ends = os.pipe()
  for end in ends:
    os.set_blocking(end, False)
  before = signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
  if before == -1:
    _pipe = ends[0]
    os.register_at_fork(after_in_child=_leave_pipe)
    return
  signal.set_wakeup_fd(before)
  for end in ends:
    os.close(end)


def _leave_pipe():
  """In a child that was forked, whose interrupts are not this process's."""
  global _pipe
  _pipe = None
  signal.set_wakeup_fd(-1)


def count():
  """The number of interrupts since `watch` that Python makes exceptions of."""
  global _seen
  with _lock:
    try:
      came = os.read(_pipe, 4096) if _pipe is not None else b""
    except BlockingIOError:
      came = b""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
      _seen += came.count(signal.SIGINT)
    return _seen


@contextlib.contextmanager
def heeded():
  """Interrupts that come meanwhile end `run` in this thread.

  Raises:
    KeyboardInterrupt: Also if one came in the same call of a `tf.function`.
  """
  global _stuck
  if _is_main():
    yield
    return
  if _main_frame() is _stuck:
    raise KeyboardInterrupt
  _stuck, since = None, count()
  _here.is_over = lambda: count() > since
  try:
    yield
  except KeyboardInterrupt:
    _stuck = _main_frame()
    raise
  finally:
    _here.is_over = None


class Call:
  """A call in another thread.

  `stop` ends it as Ctrl-C ends a call in the main thread.
  """

  def __init__(self, function):
    self._done, self._stopped = threading.Event(), threading.Event()
    self._outcome = None
    threading.Thread(target=self._work, args=[function], daemon=True).start()

  def _work(self, function):
    _here.is_over = self._stopped.is_set
    try:
      self._outcome = function(), None
    except BaseException as e:  # pylint: disable=broad-except
      self._outcome = None, e
    self._done.set()

  def wait(self, secs=None):
    """Waits for its end, at most `secs`, or until an interrupt comes.

    Raises:
      KeyboardInterrupt: If Ctrl-C has come. The call goes on.
    """
    is_over = getattr(_here, "is_over", None)
    if is_over is None or secs is not None:
      self._done.wait(secs)
      return
    while not is_over() and not self._done.wait(_POLL_SECS):
      pass
    if is_over():
      raise KeyboardInterrupt

  def result(self):
    """What the function returns or raises; waits for it as `wait`."""
    self.wait()
    result, error = self._outcome
    if error is not None:
      raise error
    return result

  def stop(self, secs=2 * _END_SECS + 2 * _POLL_SECS):
    self._stopped.set()
    self.wait(secs)


def run(function, cancel):
  """What `function` returns, which runs in another thread.

  Args:
    function: A function.
    cancel: A function that ends the call, if an interrupt comes.

  Raises:
    KeyboardInterrupt: If Ctrl-C has come.
  """
  call = Call(function)
  try:
    call.wait()
  except BaseException:  # Also of what handles another signal.
    ending = threading.Thread(target=cancel, daemon=True)
    ending.start()
    ending.join(_END_SECS)
    call.wait(_END_SECS)
    raise
  return call.result()


def at_once(functions):
  """What functions return, each of which runs in a thread of its own.

  Raises:
    KeyboardInterrupt: If Ctrl-C has come. All of them end.
  """
  calls = [Call(function) for function in functions]
  try:
    for call in calls:
      call.wait()
  except BaseException:  # As in `run`.
    for call in calls:
      call.stop(0)
    for call in calls:
      call.stop()
    raise
  return [call.result() for call in calls]
