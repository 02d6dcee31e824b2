"""The averages of wrappers, for saving and restoring."""

import collections
import collections.abc
import typing
import warnings

from keras.src.saving.keras_saveable import KerasSaveable
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from wrapopt._averages import _in_place
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt._averages import _swap
from wrapopt.keras import _followers
from wrapopt.keras import _left
from wrapopt.keras import _rules

_value = _rules.value


class Count(typing.NamedTuple):
  """Values of a count, see `WrapperOptimizer._make_count`."""
  value: typing.Any
  seeded: typing.Any
  missing: typing.Any
  swapped_in: typing.Callable = lambda value: value


class Row(collections.abc.Mapping):
  """Averages by the key of their variable, in a mapping that is not tracked."""

  def __init__(self, averages):
    self._averages = averages

  def __getitem__(self, key):
    return self._averages[key]

  def __iter__(self):
    return iter(self._averages)

  def __len__(self):
    return len(self._averages)


# The suffix of names of averages that are made when the model is known.
OF_BATCH_NORM = "_of_batch_norm"


class State(KerasSaveable, tf.__internal__.tracking.AutoTrackable):
  """The averages of a wrapper, for saving and restoring.

  The key of an average is its name, such as "average", and the index of its
  variable among those that may have an average of that name, as Keras does for
  an optimizer's variables: paths differ between the models of a process. The
  name of a moving average contains its decay. An average that a file lacks
  starts at its variable's value. If the optimizer is not built, a copy of what
  Keras loads waits for the build.

  Attributes:
    name: The name in checkpoints.
    place: A variable that has no value while averages are in place, or None.
  """

  # Only averages are tracked, see `add`.
  _self_setattr_tracking = False

  def __init__(self, name, settle):
    self.name = name
    self._seed_unbegun = settle  # Called before averages are saved.
    # Whether the averages were set by a file of Keras or by `seed`, and whether
    # a file was loaded since `has_new_values`.
    self._was_set = self._is_loaded = False
    self._is_made = False  # Whether the optimizer is built.
    # The restored checkpoints that `has_new_values` and `complete` have seen:
    # whoever reads averages completes them, and a step must still know.
    self._noticed = self._completed = -1
    self._rows = collections.defaultdict(list)  # (average, variable) by name.
    self._indices = collections.defaultdict(list)  # Their places, by name.
    self._in_files = {}  # Names in files, by name, where they differ.
    # Values from a file for averages that are made later: all of them before
    # the build, then those of batch normalizations. And the checkpoint that was
    # restored last before.
    self._late, self._before_late = {}, None
    # (average, variable) pairs of variables that had no value when the averages
    # were to start, and a variable that tells whether these still have to.
    self._waiting, self._waits = [], None
    self.place = None
    self._swapped_in = None  # The `_swap.SwappedIn`, if averages are.
    self._saved = {}  # See `swap_in`: values by ids of variables.
    self._counts = {}  # (variable, Count) by name.

  def _obj_type(self):
    return "Optimizer"

  def name_in_files(self, name, in_files):
    """Gives averages another name in files and checkpoints, before `add`.

    Those of earlier versions, which have them by `name`, are still read.
    """
    self._in_files[name] = in_files

  def add(self, name, average, variable, i=None):
    """Adds an average of a name, by default the next one.

    Args:
      name: A string.
      average: The average.
      variable: Its variable.
      i: The index of the variable, if others before it have no average.
    """
    if i is None:
      i = len(self._rows[name])
    self._rows[name].append((average, variable))
    self._indices[name].append(i)
    in_files = self._in_files.get(name, name)
    self._track_trackable(_value(average), f"{in_files}.{i}")
    if in_files != name:
      self._handle_deferred_dependencies(f"{name}.{i}", _value(average))
    for key in f"{in_files}.{i}", f"{name}.{i}":
      if self._is_made and key in self._late:
        _load(average, variable, self._late.pop(key))

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    children = super()._trackable_children(save_type, **kwargs)
    if save_type == "checkpoint" and not self._is_made:
      children.update(self._late)
    if save_type != "checkpoint":
      # A function that is saved, such as a step, must find its variables.
      if self.place is not None:
        children["place"] = _value(self.place)
      # The model that is saved holds the averages that are in its place.
      children = {name: child for name, child in children.items()
                  if not _in_place.has_no_value(_lazy.stored(child))}
    return children

  def _lookup_dependency(self, name, *args, **kwargs):
    if not self._is_made:
      return None  # A checkpoint waits for the averages.
    kind, _, i = name.rpartition(".")
    found = super()._lookup_dependency(name, *args, **kwargs)
    if found is None and kind in self._in_files:
      return super()._lookup_dependency(f"{self._in_files[kind]}.{i}", *args,
                                        **kwargs)
    return found

  def add_count(self, name, variable, value):
    """Adds a variable with a Count."""
    self._counts[name] = variable, value
    self._track_trackable(variable.value, name)

  def finish(self):
    """Takes what was loaded before the optimizer was built, after the build."""
    self._is_made = True
    late, self._late = self._late, {}
    # A checkpoint that was restored after that has given its values already.
    if self._before_late is not None and self._before_late == _restored(self):
      self.load_own_variables(late)

  def has_late(self):
    """Whether a file was loaded that waits for the build."""
    return bool(self._late) and not self._is_made

  def pairs(self):
    """All (average, variable) pairs."""
    return [pair for row in self._rows.values() for pair in row]

  def seed(self):
    """Sets all averages to the values of their variables."""
    self._was_set = True
    self.complete()
    self.seed_values()
    for variable, count in self._counts.values():
      assign(variable, count.seeded)

  def seed_values(self, of=lambda variable: True):
    """As `seed`, of some variables, but leaves the counts."""
    self._start([pair for pair in self.pairs() if of(pair[1])])

  def _start(self, pairs):
    """Sets averages to the values of their variables, now or when they run.

    A `tf.function` that makes variables may also be what gives them values.
    Their averages start in its graph, by `start_in_graph`.

    Args:
      pairs: (average, variable) pairs.
    """
    if self._waits is not None and not self._waits.numpy():
      self._waiting = []  # The graph has run.
    pairs = {id(pair[0]): pair for pair in [*self._waiting, *pairs]}.values()
    self._waiting = []
    for average, variable in pairs:
      if _value(variable).is_initialized():
        seed(average, variable)
      else:
        self._waiting.append((average, variable))
    if self._waiting and self._waits is None:
      # Not one of each replica.
      self._waits = resource_variable_ops.ResourceVariable(
          True, trainable=False)
    if self._waits is not None:
      self._waits.assign(bool(self._waiting))

  def start_in_graph(self):
    """Before a step, starts the averages that wait for their variables."""
    if not self._waiting:
      return

    def start():
      for average, variable in self._waiting:
        seed(average, variable)
      self._waits.assign(False)

    _followers.where(self._waits.read_value(), start)

  def was_set(self):
    """Whether a file, a checkpoint or `seed` has ever set the averages."""
    return self._was_set or _restored(self) >= 0

  def has_new_values(self):
    """Whether a file or checkpoint was loaded since the last call, if any."""
    is_new = self._is_loaded or _restored(self) != self._noticed
    self._is_loaded, self._noticed = False, _restored(self)
    return is_new

  def complete(self):
    """Sets what the latest restored `tf.train.Checkpoint` lacked.

    An average starts at its variable's value, as if a file of Keras lacked it.
    """
    if self._waiting:
      self._start([])
    latest = _restored(self)
    if latest == self._completed:
      return
    self._completed = latest
    lacks = lambda variable: _restored(_value(variable)) < latest
    missing = [pair for pair in self.pairs() if lacks(pair[0])]
    has_averages = len(missing) < len(self.pairs())
    self._start(missing)
    for variable, count in self._counts.values():
      if lacks(variable):
        assign(variable, count.missing if has_averages else count.value)
    # The checkpoint's values for variables that do not exist.
    _warn_unread({name.rpartition(".")[0] for name in
                  self._deferred_dependencies}, "checkpoint")

  def save_own_variables(self, store):
    if not self._is_made:
      for name, value in self._late.items():
        store[name] = value
    self._seed_unbegun()
    left = [v for _, v in self.pairs() if _left.layer_of(v) is not None]
    if left:
      warnings.warn(
          f"The file gets averages of variables that have left the model, as "
          f"'{path_of(left[0])}', which quantize() has replaced. A model that "
          "is loaded from it has no averages. To save one with averages as "
          "weights, call averaged_model(model) before, and change the copy.")
    for name, row in self._rows.items():
      for i, (average, _) in zip(self._indices[name], row):
        # If the model is saved with averages in place, these are its weights.
        stored = _value(average)
        value = self._saved.get(id(_lazy.stored(stored)))
        if value is None and self._swapped_in:
          value = self._swapped_in.value(stored)
        if value is None:
          value = stored
        in_files = self._in_files.get(name, name)
        store[f"{in_files}.{i}"] = tf.cast(value, average.dtype).numpy()
    for name, (variable, count) in self._counts.items():
      value = variable.numpy()
      store[name] = count.swapped_in(value) if self._swapped_in else value

  def load_own_variables(self, store):
    self.refuse_swapped_in("load_weights")
    self._was_set = self._is_loaded = True
    # State that an earlier checkpoint lacked is in this file, or starts anew.
    self._before_late = self._completed = _restored(self)
    if not self._is_made:
      self._late = _copies(store, store.keys())
      return
    names = collections.Counter(key.rpartition(".")[0] for key in store.keys())
    # A gate has counts alone.
    has_averages = not self._rows and any(
        name in store.keys() for name in self._counts)
    unread = set(names)
    for name, row in self._rows.items():
      in_file = self._in_files.get(name, name)
      in_file = in_file if in_file in names else name
      found = names.get(in_file, 0)
      unread.discard(in_file)
      # Earlier versions averaged the statistics of all layers.
      fits = (found == len(row) or name.endswith(OF_BATCH_NORM)) and all(
          f"{in_file}.{i}" in store.keys() for i in self._indices[name])
      if found and not fits:
        others = " of other variables" if found == len(row) else ""
        warnings.warn(
            f"The file must have {len(row)} averages named '{in_file}' like "
            f"the optimizer, got {found}{others}. They start at the values of "
            "their variables.")
      for i, (average, variable) in zip(self._indices[name], row):
        _load(average, variable, store[f"{in_file}.{i}"] if fits else None)
      has_averages |= fits
    for name, (variable, count) in self._counts.items():
      assign(variable, count.value if not has_averages else
             _fitting(name, variable, store, count.missing))
    self._late = _copies(store, [
        key for key in store.keys()
        if (name := key.rpartition(".")[0]) in unread
        and name.endswith(OF_BATCH_NORM)])
    _warn_unread(unread, "file")

  def is_swapped_in(self):
    """Whether averages are in place of their variables."""
    return self._swapped_in is not None

  def refuse_swapped_in(self, what, instead=""):
    """Raises an error while averages are in place.

    Args:
      what: The name of the method that was called.
      instead: What else to do than to leave the block first.
    """
    if self.is_swapped_in():
      raise RuntimeError(
          f"{what}() must not be called inside averaged_weights(): the "
          "averages are in place of the weights. Leave the `with` block first"
          f"{instead}.")

  def swap_in(self, pairs, more=(), saved=()):
    """Puts averages in place of their variables.

    Args:
      pairs: (variable, average) pairs.
      more: Other variables that are to have no value meanwhile.
      saved: (average, value) pairs of averages that a file gets with another
        value than their own.
    """
    self._saved = {id(_lazy.stored(_value(s))): value for s, value in saved}
    self._swapped_in = _swap.SwappedIn(pairs, [_value(self.place), *more])

  def swap_out(self):
    """Undoes `swap_in`."""
    try:
      self._swapped_in.swap_out()
    finally:
      self._swapped_in, self._saved = None, {}


def _warn_unread(names, source):
  """Warns of names of averages in a file that the optimizer lacks."""
  # Counts have no number, and so no name here.
  names = sorted(name for name in names
                 if name and not name.endswith(OF_BATCH_NORM))
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


def _fitting(name, variable, store, missing):
  """The value of a count in a file, or `missing` if it does not fit."""
  if name not in store.keys():
    return missing
  value = np.asarray(store[name])
  if value.shape == tuple(variable.shape):
    return value
  warnings.warn(
      f"The file's '{name}' must have the shape {tuple(variable.shape)} like "
      f"the optimizer's, got {value.shape}. It is not loaded.")
  return missing


def _restored(trackable):
  """The number of the latest checkpoint that was restored into an object."""
  trackable._maybe_initialize_trackable()
  return trackable._update_uid


def _load(average, variable, value):
  """Assigns an average its value from a file, or seeds it.

  A value of another shape belongs to another variable; Keras has reported it.
  """
  if value is not None and tuple(value.shape) == tuple(average.shape):
    for s in _replicas.values(_value(average)):
      s.assign(tf.cast(value, s.dtype))
  else:
    seed(average, variable)


def assign_all(pairs):
  """Assigns averages to their variables: (variable, average) pairs."""
  pairs = list(pairs)
  # For all averages of the variables, not only these.
  _lazy.settle([v for v, _ in _replicas.components(
      [(_value(v), _value(s)) for v, s in pairs])])
  for v, s in _replicas.components([(_value(v), _value(s)) for v, s in pairs]):
    v.assign(tf.cast(s, v.dtype))


def seed(average, variable):
  """Sets an average to its variable, or to the number `starts_at` if it has one.
  """
  start = getattr(average, "starts_at", None)
  for s, v in _replicas.components([(_value(average), _value(variable))]):
    s.assign(tf.cast(v, s.dtype) if start is None else start)


def assign(variable, number):
  # In a replica, a variable of all replicas cannot be assigned.
  for v in _replicas.values(variable.value):
    v.assign(number)


def path_of(variable):
  """The name of a variable in checkpoints."""
  return getattr(variable, "path", None) or variable.name.split(":")[0]
