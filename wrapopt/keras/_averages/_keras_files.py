"""The averages of a wrapper in Keras's files."""

import warnings

from keras.src.saving.keras_saveable import KerasSaveable
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from wrapopt.keras._averages import _assignments
from wrapopt.keras._averages import _last_file
from wrapopt.keras._averages import _owners
from wrapopt.keras._evaluation import _detachment
from wrapopt.keras._variables import path_of


class InKerasFiles(KerasSaveable):
  """The methods of a `_state.State` that write and read Keras's files.

  In a file of earlier versions, the index of an average alone tells whose it
  is. If the optimizer is not built, a copy of what Keras loads waits for the
  build.
  """

  def save_own_variables(self, store):
    if not self._is_made:
      for name, value in self._late.items():
        store[name] = value
    self._settle()
    left = [v for _, v in self.pairs()
            if _detachment.layer_left_by(v) is not None]
    if left:
      warnings.warn(
          f"The file gets averages of variables that have left the model, as "
          f"'{path_of(left[0])}', which quantize() has replaced. A model that "
          "is loaded from it has no averages. To save one with averages as "
          "weights, call averaged_model(model) before, and change the copy.")
    merged = [v for _, v in self.pairs() if _last_file.is_merged(v)]
    if merged:
      warnings.warn(
          f"The file gets no averages of '{path_of(merged[0])}', which Keras "
          "merges into another variable when it saves. They begin anew when it "
          "is loaded. A tf.train.Checkpoint has them. To save a model with "
          "averages as weights, save it in averaged_weights().")
    average_in_file, known = self.block.averages_in_file(), {}
    for name in self.rows:
      in_files, pairs = self.in_files_of(name), self.rows[name]
      owners = self.owners_of(name, known, "file")
      store[f"{in_files}.{_owners.KEY}"] = _owners.to_array({in_files: owners})
      for i in owners:
        store[f"{in_files}.{i}"] = average_in_file(pairs[i][0])
    for name, (variable, count) in self._counts.items():
      value = self.block.count_in_file(variable, count)
      if count.in_files is None:
        store[name] = value
      else:
        store[count.in_files.name] = count.in_files.to_file(value)

  def load_own_variables(self, store):
    self.block.refuse("load_weights")
    self._is_loaded, self._noted, self._is_assigned = True, None, False
    # State that an earlier checkpoint lacked is in this file, or starts anew.
    self._before_late = self._completed = _last_file.restored(self)
    if not self._is_made:
      self._late = _copies(store, store.keys())
      return
    self._last_file.forget()
    names = {key.rpartition(".")[0] for key in store.keys()}
    # A gate has counts alone.
    has_averages = not self.rows and any(
        name in store.keys() for name in self._counts)
    known = {}
    for name in self.rows:
      has_averages |= self._give(name, store, known)
    for name, (variable, count) in self._counts.items():
      _assignments.assign(variable, _of_file(name, variable, count, store)
             if has_averages else count.value)
    unread = names - set(map(self.in_files_of, self.rows))
    self._late = _copies(store, [
        key for key in store.keys()
        if (name := key.rpartition(".")[0]) in unread
        and name.endswith(_last_file.OF_BATCH_NORM)])
    warn_unread(unread, "file")

  def _give(self, name, store, known):
    """Loads the averages of a name; returns whether the file has any of them.

    Args:
      name: The name.
      store: A mapping from keys to arrays.
      known: As for `owners_of`.
    """
    in_files, found = self.in_files_of(name), {}
    get = lambda j: store[f"{in_files}.{j}"]
    if any(key.rpartition(".")[0] == in_files for key in store.keys()):
      if f"{in_files}.{_owners.KEY}" in store.keys():
        [saved] = _owners.from_array(get(_owners.KEY)).values()
        ours = self.owners_of(name, known, "file")
        found = _owners.match(ours, saved, lambda i: False)
        loaded = _last_file.Loaded("file", saved, get)
        self._last_file.note(name, ours, found, loaded)
        if any(not _owners.may_fit(owner, saved) for i, owner in ours.items()
               if i not in found):
          self._last_file.warn(name, ours, loaded, found)
      else:
        found = self._by_index(name, in_files, store)
    anew = []
    for i, pair in self.rows[name].items():
      if i in found and not _last_file.is_merged(pair[1]):
        _assignments.load(*pair, get(found[i]))
        self.set_averages.add(id(pair[0]))
      else:
        anew.append(pair)
    self._last_file.begin_anew(anew)
    return bool(found)

  def _by_index(self, name, in_files, store):
    """As `_owners.match`, for a file of earlier versions."""
    row = self.rows[name]
    found = [key for key in store.keys() if key.rpartition(".")[0] == in_files]
    fits = len(found) == len(row) and all(
        f"{in_files}.{i}" in store.keys() for i in row)
    shapes = [(tuple(average.shape), tuple(store[f"{in_files}.{i}"].shape))
              for i, (average, _) in row.items() if fits]
    if not fits or any(a != b for a, b in shapes):
      got = (f"shapes {[b for _, b in shapes]}" if fits else f"{len(found)}" + (
          " of other variables" if len(found) == len(row) else ""))
      warnings.warn(
          f"The file must have {len(row)} averages named '{in_files}' like the "
          f"optimizer, got {got}. They start at the values of their variables.")
      return {}
    return {i: i for i in row}


def warn_unread(names, source):
  """Warns of names of averages in a file that the optimizer lacks."""
  # Counts have no number, and so no name here.
  names = sorted(name for name in names
                 if name and not name.endswith(_last_file.OF_BATCH_NORM))
  if names:
    warnings.warn(
        f"The {source} has averages named {', '.join(map(repr, names))}, which "
        "the optimizer lacks. They are not loaded.")


def _copies(store, names):
  """Copies of values of a file, which will be closed: {name: variable}."""
  with tf.init_scope(), tf.device("CPU:0"):
    # Not of a strategy.
    return {name: resource_variable_ops.ResourceVariable(
        np.array(store[name]), trainable=False) for name in names}


def _of_file(name, variable, count, store):
  """The value of a count in a file, or that at the start."""
  if count.in_files is not None and count.in_files.name in store.keys():
    return count.in_files.from_file(np.asarray(store[count.in_files.name]))
  if name not in store.keys():
    return count.value
  value = np.asarray(store[name])
  if value.shape == tuple(variable.shape):
    return (value if count.in_files is None else
            count.in_files.of_earlier(value))
  warnings.warn(
      f"The file's '{name}' must have the shape {tuple(variable.shape)} like "
      f"the optimizer's, got {value.shape}. It is not loaded.")
  return count.value
