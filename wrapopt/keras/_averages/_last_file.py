"""What was loaded last, until the weights tell whose averages these are."""

import typing
import warnings

import numpy as np

from wrapopt._averages import _absence
from wrapopt._averages import _replicas
from wrapopt.keras._averages import _assignments
from wrapopt.keras._averages import _owners
from wrapopt.keras._variables import path_of, value_of


# The suffix of names of averages that are made when the model is known.
OF_BATCH_NORM = "_of_batch_norm"

# Keras merges these variables into others when it saves them, and loads zeros.
_MERGED = ("lora_kernel_a", "lora_kernel_b", "lora_embeddings_a",
           "lora_embeddings_b")


class Loaded(typing.NamedTuple):
  """What a file had of the averages of a name.

  Attributes:
    source: "file" or "checkpoint".
    saved: {index: `_owners.Owner`} in it.
    values: A function of these indices, or a dict, that gives the averages.
    found: {index of an average: index in the file} of those that were taken.
    sure: The indices of those whose variable had the value of the file.
  """
  source: str
  saved: dict
  values: typing.Any
  found: typing.Any = None
  sure: typing.Any = None


class LastFile:
  """What the file or checkpoint had that was loaded last into a `State`."""

  def __init__(self, state, steps):
    """Makes it of no file.

    Args:
      state: The State.
      steps: A function that returns the number of steps so far.
    """
    self._state, self._steps = state, steps
    self.forget()

  def forget(self):
    """Forgets the file."""
    # When it was loaded (`_now`); what it had that may be another variable's:
    # {name: `Loaded`}; (average, variable) pairs of which it has none; and
    # {name: whether it has all, of paths like theirs}.
    self._loaded_at, self._unsure, self._anew, self._fits = None, {}, [], {}

  def drop(self, average):
    """Forgets an average, which the user sets."""
    self._anew = [pair for pair in self._anew if pair[0] is not average]

  def complete(self):
    """Sets what the file lacked, if no step or checkpoint came after it."""
    if self._loaded_at is None:
      return
    # After that, neither the weights nor the averages are those loaded.
    if self._loaded_at == self._now():
      self._check_owners()
      self._state.waiting.start(self._anew)
    else:
      self.forget()

  def begin_anew(self, pairs):
    """Starts averages that a file lacks, again until the next step.

    Until then, the file's values of their variables may still be loaded.
    """
    self._state.set_averages.difference_update(
        id(average) for average, _ in pairs)
    if pairs:
      self._note_loading()
    self._anew += pairs
    self._state.waiting.start(pairs)

  def _now(self):
    """What changes with a step, and with another checkpoint."""
    return self._steps(), restored(self._state)

  def _note_loading(self):
    if self._loaded_at != self._now():
      self.forget()
      self._loaded_at = self._now()

  def note(self, name, ours, found, loaded):
    """Notes what was loaded, if the weights do not tell yet whose it is."""
    self._note_loading()
    self._unsure.pop(name, None)
    self._note_fit(name, ours, found, loaded)
    lacks = [i for i in ours if i not in found]
    sure = {i for i, j in found.items()
            if ours[i].checksum == loaded.saved[j].checksum}
    if len(sure) < len(found) or lacks and loaded.saved:
      self._unsure[name] = loaded._replace(found=found, sure=sure, values={
          j: np.array(loaded.values(j)) for j in loaded.saved})

  def _note_fit(self, name, ours, found, loaded):
    """Notes whether variables have averages from paths like theirs."""
    if not name.endswith(OF_BATCH_NORM):
      self._fits[name] = all(
          i in found and _owners.is_like(owner.path,
                                         loaded.saved[found[i]].path)
          for i, owner in ours.items())

  def keep_statistics(self):
    """Takes averages of statistics as they were loaded, before an eager step.

    It has run the model: statistics have other values than those loaded, which
    do not tell any more whose an average is. Paths do, if those of the other
    averages are alike, too.
    """
    unsure = {name: self._unsure.pop(name) for name in list(self._unsure)
              if name.endswith(OF_BATCH_NORM)}
    if not unsure or self._loaded_at != self._now():
      return
    self._check_owners()
    for name, loaded in unsure.items():
      pairs = self._state.rows[name]
      found = {i: j for i, j in loaded.found.items()
               if i in loaded.sure or all(self._fits.values())}
      self.begin_anew([pairs[i] for i in loaded.found if i not in found])
      self.warn(name, self._state.owners_of(name, {}, loaded.source), loaded,
                found)

  def _check_owners(self):
    """Looks again whose loaded averages are, when all weights are loaded."""
    unsure, self._unsure = self._unsure, {}
    known = {}
    for name, loaded in unsure.items():
      pairs = self._state.rows[name]

      def is_known(i):
        # A checkpoint sets a variable of Keras, or its tf.Variable.
        _, v = pairs[i]  # pylint: disable=cell-var-from-loop
        return (loaded.source == "file" or  # pylint: disable=cell-var-from-loop
                restored(self._state) in (restored(v), restored(value_of(v))))

      ours = self._state.owners_of(name, known, loaded.source)
      found = _owners.match(ours, loaded.saved, is_known)
      self._note_fit(name, ours, found, loaded)
      for i in ours:
        average, variable = pairs[i]
        if i not in found:
          if i in loaded.found:
            self.begin_anew([(average, variable)])
        elif found[i] != loaded.found.get(i):
          _assignments.load(average, variable, loaded.values[found[i]])
          self._state.set_averages.add(id(average))
          self._anew = [pair for pair in self._anew if pair[0] is not average]
      self.warn(name, ours, loaded, found)

  def warn(self, name, ours, loaded, found):
    """Warns of averages that a file lacks, or that it may have of others."""
    its, in_files = loaded.saved, self._state.in_files_of(name)
    lacks = [owner.path for i, owner in ours.items() if i not in found]
    unread = [owner.path for j, owner in its.items() if j not in found.values()]
    if lacks:
      warnings.warn(
          f"The {loaded.source} has no average named '{in_files}' of "
          f"{_listed(lacks)}, but "
          + (f"of {_listed(unread)}, with other shapes, names or values. "
             if unread else "only of others. ")
          + "An average that it lacks starts at the value of its variable.")
    guessed = [(its[j].path, ours[i].path) for i, j in found.items()
               if its[j].checksum != ours[i].checksum
               and its[j].path != ours[i].path]
    if guessed:
      warnings.warn(
          f"The {loaded.source}'s averages named '{in_files}' are taken in "
          f"their order, that of '{guessed[0][0]}' for '{guessed[0][1]}', as "
          "the names differ, and the values of the variables, too. If that is "
          "another variable, call seed_averages() or load the weights of the "
          f"{loaded.source} together with its averages.")


def owner_of(variable):
  """The `_owners.Owner` that a variable is now."""
  value = _replicas.values(value_of(variable))[0]
  has_value = not _absence.has_no_value(value) and value.is_initialized()
  return _owners.Owner.of(path_of(variable), value,
                          value.numpy() if has_value else None)


def is_merged(variable):
  """Whether Keras's files lack a variable, which is merged into another one."""
  return path_of(variable).rpartition("/")[2] in _MERGED


def _listed(paths):
  return f"'{paths[0]}'" + (f" and {len(paths) - 1} more" if paths[1:] else "")


def restored(x):
  """The number of the latest checkpoint that was restored into an object."""
  x._maybe_initialize_trackable()
  return x._update_uid
