"""Which averages of a variable have rows that may lag behind.

A row that lags behind catches up with the value that its variable has now. So
all code of this package that changes a variable calls `settle` before, which
brings the averages up to date.
"""

import contextlib
import threading
import weakref

import tensorflow as tf
from tensorflow.python.saved_model import save_context

_lock = threading.Lock()
_entries: dict = {}  # {id of a variable: _Entry}
# Those with an average of which rows may lag behind now.
_lagging: dict = {}
_moved = threading.local()  # See `moving`.


class _Entry:
  """The facts about a variable.

  Attributes:
    variable: A weak reference to it.
    averages: A list of weak references to its averages.
    is_changed_in_graph: Whether a graph or `tf.function` changes it.
  """

  def __init__(self, variable, deleted):
    self.variable = weakref.ref(variable, deleted)
    self.averages = []
    self.is_changed_in_graph = False

  def let_lag(self):
    """Notes that rows of one of the averages may lag behind from now on."""
    variable = self.variable()
    if variable is not None:
      _lagging[id(variable)] = self


def _entry(variable):
  key = id(variable)
  entry = _entries.get(key)
  if entry is None or entry.variable() is not variable:

    def deleted(ref):
      # Another variable may have the same id by now.
      if key in _entries and _entries[key].variable is ref:
        del _entries[key]
        _lagging.pop(key, None)

    _lagging.pop(key, None)
    entry = _entries[key] = _Entry(variable, deleted)
  return entry


def is_changed_in_graph(variable):
  """Whether a graph or `tf.function` of this package changes a variable.

  It would not bring averages up to date that are made later.
  """
  with _lock:
    return _entry(variable).is_changed_in_graph


def add(average, variable):
  """Adds an average of a variable.

  Args:
    average: An object with the methods `catch_up()`, which brings its rows up
      to date and returns an operation or None, and `keep_dense()`, after which
      no row may lag behind. `may_lag` tells whether rows may lag behind now.
    variable: The variable.

  Returns:
    The _Entry of the variable.
  """
  with _lock:
    entry = _entry(variable)
    entry.averages.append(weakref.ref(average, entry.averages.remove))
    return entry


@contextlib.contextmanager
def moving(averages):
  """The context of a step that moves rows of averages itself.

  An inner optimizer that takes the step may call functions of this package.

  Args:
    averages: Averages, which `settle` leaves alone.
  """
  before = getattr(_moved, "averages", ())
  _moved.averages = [*before, *averages]
  try:
    yield
  finally:
    _moved.averages = before


def settle(variables, moved=()):
  """Brings the averages of variables up to date. Call it before a change.

  In a graph or `tf.function`, an average of which no row has lagged behind yet
  stays dense from now on: the graph would not bring it up to date.

  Args:
    variables: The variables that will change.
    moved: Averages that the change moves itself.

  Returns:
    The operations that the change must wait for: a list; empty in eager mode.
  """
  in_graph = not tf.executing_eagerly()
  if not in_graph and (
      not _lagging or _lagging.keys().isdisjoint(map(id, variables))):
    return []
  if in_graph and save_context.in_save_context():
    # What is saved is up to date, and the steps of a saved function are dense.
    return []
  done, moved = [], [*moved, *getattr(_moved, "averages", ())]
  for variable in variables:
    if in_graph:
      with _lock:
        entry = _entry(variable)
        entry.is_changed_in_graph = True
    elif (entry := _lagging.get(id(variable))) is None:
      continue
    for average in [ref() for ref in list(entry.averages)]:
      if average is None or any(average is other for other in moved):
        continue
      if average.may_lag:
        caught_up = average.catch_up()
        done += [] if caught_up is None else [caught_up]
      elif in_graph:
        average.keep_dense()
  return done
