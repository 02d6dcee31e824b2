"""The averages that have no value now: they are in place of the weights."""

from typing import Any

from wrapopt._averages import _replicas

# {id: variable} of eager mode, one for each replica.
_averages: dict[int, Any] = {}


def add(averages):
  """Notes variables that are about to lose their values."""
  _averages.update((id(s), s) for s in averages)


def remove(averages):
  """Notes that variables have their values again."""
  for s in averages:
    _averages.pop(id(s), None)


def has_no_value(average):
  """Whether a variable holds an average that is in place of its variable."""
  return bool(_averages) and any(
      id(s) in _averages for s in _replicas.values(average))


def check(average, what="An average must not be read", error=RuntimeError):
  """Raises an error if an average has no value.

  A session and a `tf.function` that was traced before find this out by
  themselves, when they run.

  Args:
    average: The variable that holds it, or None.
    what: The beginning of the error.
    error: Its class.
  """
  if has_no_value(average):
    raise error(
        f"{what} inside averaged_weights(): the averages are in place of the "
        "weights. Leave the `with` block first, or read the variables "
        "themselves, which hold the averages now.")
