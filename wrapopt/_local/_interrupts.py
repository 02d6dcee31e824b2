"""Calls of TensorFlow that Ctrl-C ends at once.

Python raises KeyboardInterrupt in the main thread, when it runs Python code. In
a call of TensorFlow it runs none. So the main thread waits in Python for a call
in another thread. In a `tf.function`, the main thread is in TensorFlow, and
another thread runs our code. It reads of the signal in a pipe, to which Python
writes as soon as it comes.
"""

import contextlib
import os
import signal
import threading

_POLL_SECS = 0.1

_pipe = None  # The end that is read.
_seen = 0  # The number of interrupts that were read.
_lock = threading.Lock()
_here = threading.local()


def _is_main():
  return threading.current_thread() is threading.main_thread()


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
    return
  signal.set_wakeup_fd(before)
  for end in ends:
    os.close(end)


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
  """Interrupts that come meanwhile end `run` in this thread."""
  _here.since = None if _is_main() else count()
  try:
    yield
  finally:
    _here.since = None


def run(call):
  """What `call` returns, which runs in another thread.

  Raises:
    KeyboardInterrupt: If Ctrl-C comes meanwhile. The call goes on.
  """
  done = threading.Event()
  outcome = []

  def work():
    try:
      outcome[:] = call(), None
    except BaseException as e:  # pylint: disable=broad-except
      outcome[:] = None, e
    done.set()

  threading.Thread(target=work, daemon=True).start()
  since = getattr(_here, "since", None)
  if since is None:
    done.wait()
  else:
    while count() == since and not done.wait(_POLL_SECS):
      pass
    if not done.is_set() or count() > since:
      raise KeyboardInterrupt
  result, error = outcome
  if error is not None:
    raise error
  return result
