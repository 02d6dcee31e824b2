"""The averages of wrappers, for saving and restoring."""

import collections
import typing
import warnings

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from wrapopt._averages import _absence
from wrapopt._averages import _lazy
from wrapopt.keras import _variables
from wrapopt.keras._averages import _assignments
from wrapopt.keras._averages import _keras_files
from wrapopt.keras._averages import _last_file
from wrapopt.keras._averages import _owners
from wrapopt.keras._evaluation import _block
from wrapopt.keras._variables import value_of


class CountValues(typing.NamedTuple):
  """Values of a count, see `_store.Store.make_count`."""
  value: typing.Any
  seeded: typing.Any
  swapped_in: typing.Callable = lambda value: value
  in_files: typing.Any = None


class InFiles(typing.NamedTuple):
  """What Keras's files have in place of a count.

  Attributes:
    name: Its name there.
    to_file: A function of the count, which returns what is saved.
    from_file: The reverse.
    of_earlier: A function of the count in a file of an earlier version.
  """
  name: str
  to_file: typing.Callable
  from_file: typing.Callable
  of_earlier: typing.Callable


class State(_keras_files.InKerasFiles,
            tf.__internal__.tracking.AutoTrackable):
  """The averages of a wrapper, for saving and restoring.

  The key of an average is its name, such as "average", and the index of its
  variable among those that may have an average of that name. The name of a
  moving average contains its decay. One more entry for each name tells whose
  the averages are: see `_owners`. An average that a file or checkpoint lacks
  starts at its variable's value.

  Attributes:
    name: The name in checkpoints.
    rows: {name: {index: (average, its variable)}}, see `add`.
    waiting: The `_assignments.Waiting` of its averages.
    block: The `_block.Block` in which averages are in place.
  """

  # Only averages are tracked, see `add`.
  _self_setattr_tracking = False

  def __init__(self, name, settle, steps):
    """Makes a state without averages.

    Args:
      name: Its name in checkpoints.
      settle: A function that is called before averages are saved.
      steps: A function that returns the number of steps so far.
    """
    self.name = name
    self._settle = settle
    self._kept = {}  # The averages and counts, by id.
    # The ids of averages that were set by a file or by `seed`, and whether a
    # file was loaded since `has_new_values`.
    self.set_averages, self._is_loaded = set(), False
    self._is_assigned = False  # Whether others than this package set averages.
    self._last_file = _last_file.LastFile(self, steps)
    # Whose the averages of a checkpoint are: {name in files: {index: Owner}};
    # its number; and whether it has just begun to be restored.
    self._of_checkpoint, self._number_of_checkpoint = {}, -1
    self._awaits = False
    self._marker = trackable.Trackable()
    self._is_made = False  # Whether the optimizer is built.
    # The restored checkpoints that `has_new_values` and `complete` have seen:
    # whoever reads averages completes them, and a step must still know.
    self._noticed = self._completed = -1
    self.rows = collections.defaultdict(dict)
    self._in_files = {}  # Names in files, by name, where they differ.
    # Values from a file for averages that are made later: all of them before
    # the build, then those of batch normalizations. And the checkpoint that was
    # restored last before.
    self._late, self._before_late = {}, None
    self.waiting = _assignments.Waiting()
    self.block = _block.Block()
    self._counts = {}  # (variable, CountValues) by name.
    self._noted = None  # See `note_weights`.

  def _obj_type(self):
    return "Optimizer"

  def name_in_files(self, name, in_files):
    """Gives averages another name in files and checkpoints, before `add`.
    """
    self._in_files[name] = in_files

  def add(self, name, average, variable, i):
    """Adds an average of a name.

    Args:
      name: A string.
      average: The average.
      variable: Its variable.
      i: The index of the variable among those that may have such an average.
    """
    self.rows[name][i] = average, variable
    self._keep(average)

  def _keep(self, x):
    self._kept[id(x)] = x
    _variables.states[id(x)] = self

  def in_files_of(self, name):
    return self._in_files.get(name, name)

  def _trackable_children(self, save_type="checkpoint", **kwargs):
    children = {}
    if save_type == "checkpoint":
      # First: it tells that the checkpoint knows whose the averages are.
      children[_owners.KEY] = self._marker
    children.update(super()._trackable_children(save_type, **kwargs))
    for name, row in self.rows.items():
      in_files = self.in_files_of(name)
      # Checkpoints of earlier versions have none that are what they start at.
      if save_type == "checkpoint" and all(
          getattr(average, "starts_at", None) is not None and
          average.numpy() == average.starts_at for average, _ in row.values()):
        continue
      children.update({f"{in_files}.{i}": value_of(average)
                       for i, (average, _) in row.items()})
    if save_type == "checkpoint" and not self._is_made:
      children.update({key: value for key, value in self._late.items()
                       if not key.endswith(f".{_owners.KEY}")})
    if save_type != "checkpoint":
      # A function that is saved, such as a step, must find its variables.
      if self.block.place is not None:
        children["place"] = value_of(self.block.place)
      # The model that is saved holds the averages that are in its place.
      children = {name: child for name, child in children.items()
                  if not _absence.has_no_value(_lazy.stored(child))}
    return children

  def _lookup_dependency(self, name, *args, **kwargs):
    if name == _owners.KEY:
      self._awaits = True
      return self._marker
    if not self._is_made:
      return None  # A checkpoint waits for the averages.
    kind, _, i = name.rpartition(".")
    for row_name, row in self.rows.items():
      if kind == self.in_files_of(row_name) and i.isdigit():
        # They wait until their owners are restored.
        return (value_of(row[int(i)][0])
                if int(i) in row and not self._awaits else None)
    return super()._lookup_dependency(name, *args, **kwargs)

  def _serialize_to_tensors(self):
    if not tf.executing_eagerly():
      return {}  # A SavedModel's averages stay where they are.
    owners, known = {}, {}
    for name in self.rows:
      owners[self.in_files_of(name)] = self.owners_of(name, known)
    for key, value in self._late.items():
      if key.endswith(f".{_owners.KEY}"):
        owners.update(_owners.from_array(value))
    with tf.device("CPU:0"):
      return {_owners.KEY: tf.constant(_owners.to_array(owners))}

  def _restore_from_tensors(self, restored_tensors):
    if _owners.KEY not in restored_tensors:
      return  # A SavedModel's, see above.
    self._awaits = False
    array = restored_tensors[_owners.KEY]
    if not tf.executing_eagerly():  # In a cluster, it is in a function.
      array = self._read_owners()
    self._of_checkpoint = _owners.from_array(array)
    self._number_of_checkpoint = _last_file.restored(self)
    if self._is_made:
      with tf.init_scope():
        for name in self.rows:
          self._take_deferred(name)

  def _read_owners(self):
    """Reads from the file what a function restores."""
    for positions in self._deferred_dependencies.values():
      for position in positions:
        for attribute in position.object_proto.attributes:
          key = attribute.checkpoint_key.rpartition("/.ATTRIBUTES/")[0]
          reader = tf.train.load_checkpoint(
              position.checkpoint.save_path_string)
          key = f"{key.rpartition('/')[0]}/.ATTRIBUTES/{_owners.KEY}"
          if reader.has_tensor(key):
            return reader.get_tensor(key)
    return _owners.to_array({})

  def _copy_trackable_to_cpu(self, object_map):
    object_map[self] = _Copy(self._serialize_to_tensors())

  def add_count(self, name, variable, value):
    """Adds a variable with CountValues."""
    self._counts[name] = variable, value
    self._keep(variable)
    self._track_trackable(variable.value, name)

  def note_assigned(self, variable):
    """Notes that an average or a count is about to be set, as by a state tree.
    """
    if self._kept.get(id(variable)) is variable:
      with tf.init_scope():
        self.complete()  # Not afterwards, by what was loaded before.
      self._last_file.drop(variable)
      self._is_assigned = True
      self._is_loaded, self._noted = True, None
      self.set_averages.add(id(variable))

  def variables(self):
    """The averages and counts as Keras's state trees have them: a list."""
    self._settle()
    averages = [average for average, _ in self.pairs()]
    found = [*averages, *(count for count, _ in self._counts.values())]
    if not self.block.is_entered():
      return found
    values = [*map(self.block.averages_in_file(), averages),
              *(self.block.count_in_file(*count)
                for count in self._counts.values())]
    return [_block.Shown(x.path, value) for x, value in zip(found, values)]

  def finish(self):
    """Takes what was loaded before the optimizer was built, after the build."""
    self._is_made = True
    late, self._late = self._late, {}
    for name in self.rows:
      self._take_deferred(name)
    # A checkpoint that was restored after that has given its values already.
    if (self._before_late is not None and
        self._before_late == _last_file.restored(self)):
      self.load_own_variables(late)

  def take_late(self, suffix):
    """Takes what was loaded before averages were made, after the build.

    Args:
      suffix: The end of their names.
    """
    for name in [name for name in self.rows if name.endswith(suffix)]:
      self._take_deferred(name)
      if any(key.rpartition(".")[0] == self.in_files_of(name)
             for key in self._late):
        self._give(name, self._late, {})
      if self._is_assigned and not any(
          self.was_set(average) for average, _ in self.rows[name].values()):
        warnings.warn(
            "Averages were assigned, as by a state tree or a folder of "
            f"OrbaxCheckpoint, before those named '{self.in_files_of(name)}'"
            " were made. They start at the values of their variables. If the "
            "tree has them, call set_model(model) and load it again.")

  def _take_deferred(self, name):
    """Takes what a checkpoint has of the averages of a name."""
    in_files = self.in_files_of(name)
    # Not of those that a later checkpoint without owners has.
    saved = {j: owner for j, owner in self._of_checkpoint.pop(
        in_files, {}).items() if any(
            position.checkpoint.restore_uid == self._number_of_checkpoint
            for position in self._deferred_dependencies.get(
                f"{in_files}.{j}", ())[-1:])}
    if saved:
      self._take_owned(name, saved)
    for i, (average, _) in self.rows[name].items():
      self._handle_deferred_dependencies(f"{in_files}.{i}", value_of(average))

  def has_late(self):
    """Whether a file was loaded that waits for the build."""
    return bool(self._late) and not self._is_made

  def pairs(self):
    """All (average, variable) pairs."""
    return [pair for row in self.rows.values() for pair in row.values()]

  def seed(self):
    """Sets all averages to the values of their variables."""
    self._noted = None
    self.complete()
    self.set_averages.update(id(average) for average, _ in self.pairs())
    self.seed_values()
    for variable, count in self._counts.values():
      _assignments.assign(variable, count.seeded)

  def seed_values(self, of=lambda average, variable: True):
    """As `seed`, of some averages, but leaves the counts."""
    self.waiting.start([pair for pair in self.pairs() if of(*pair)])

  def was_set(self, average):
    """Whether a file, a checkpoint or `seed` has set an average."""
    return id(average) in self.set_averages

  def has_new_values(self):
    """Whether a file or checkpoint was loaded since the last call, if any."""
    is_new = self._is_loaded or _last_file.restored(self) != self._noticed
    self._is_loaded, self._noticed = False, _last_file.restored(self)
    return is_new

  def complete(self):
    """Sets what the latest file or checkpoint lacked.

    An average of which it has none starts at its variable's value.
    """
    self.waiting.start([])
    self._complete_checkpoint()
    self._last_file.complete()

  def _complete_checkpoint(self):
    latest = _last_file.restored(self)
    if latest == self._completed:
      return
    self._completed = latest
    lacks = lambda variable: _last_file.restored(value_of(variable)) < latest
    missing = [pair for pair in self.pairs() if lacks(pair[0])]
    self.set_averages.update(id(average) for average, _ in self.pairs())
    self._last_file.begin_anew(missing)
    for variable, count in self._counts.values():
      if lacks(variable):
        _assignments.assign(variable, count.value)
        self._take_count(variable, count)
    # The checkpoint's values for variables that do not exist.
    _keras_files.warn_unread({name.rpartition(".")[0] for name in
                  self._deferred_dependencies}, "checkpoint")

  def _take_count(self, variable, count):
    """Takes a count of a file that a checkpoint has instead.

    The optimizer was not built when the checkpoint was written.
    """
    for position in self._deferred_dependencies.pop(
        count.in_files and count.in_files.name, ()):
      value = position.value_tensors()[trackable.VARIABLE_VALUE_KEY]
      _assignments.assign(variable, count.in_files.from_file(value.numpy()))

  def owners_of(self, name, known, source="checkpoint"):
    """{index: `_owners.Owner`} of the averages of a name.

    Args:
      name: The name.
      known: {id of a variable: its Owner}, to which those found are added: each
        takes a pass over the memory of its variable.
      source: "checkpoint", or "file", which has no variables that Keras merges.
    """
    found = {}
    for i, (_, variable) in self.rows[name].items():
      if source == "checkpoint" or not _last_file.is_merged(variable):
        if id(variable) not in known:
          known[id(variable)] = _last_file.owner_of(variable)
        found[i] = known[id(variable)]
    return found

  def _take_owned(self, name, saved):
    """Takes those averages of a checkpoint that are of the same variables.

    Args:
      name: The name of the averages.
      saved: {index: `_owners.Owner`} in the checkpoint.
    """
    in_files, deferred = self.in_files_of(name), self._deferred_dependencies
    ours, pairs = self.owners_of(name, {}), self.rows[name]
    found = _owners.match(ours, saved, lambda i: False)
    # The last one is of the latest checkpoint.
    self._last_file.note(name, ours, found, _last_file.Loaded(
        "checkpoint", saved,
        lambda j: deferred[f"{in_files}.{j}"][-1].value_tensors()[
            trackable.VARIABLE_VALUE_KEY]))
    for i, j in found.items():
      self._handle_deferred_dependencies(
          f"{in_files}.{j}", value_of(pairs[i][0]))
    for j in saved:
      deferred.pop(f"{in_files}.{j}", None)

  def keep_statistics(self):
    """Takes averages of statistics as they were loaded, before an eager step.
    """
    self._complete_checkpoint()
    self._last_file.keep_statistics()

  def note_weights(self, steps, variables):
    """Notes the values of variables, after a number of steps."""
    self._noted = (steps, _last_file.restored(self)), {
        id(v): _last_file.owner_of(v).checksum for v in variables}

  def set_since(self, steps, variables):
    """The first of some variables that was set since `note_weights`, or None.

    It forgets what was noted. After another step, and if averages were loaded
    or seeded, there is none.
    """
    (when, checksums), self._noted = self._noted or (None, {}), None
    if when == (steps, _last_file.restored(self)):
      for v in variables:
        if id(v) in checksums and (
            _last_file.owner_of(v).checksum != checksums[id(v)]):
          return v
    return None


class _Copy(trackable.Trackable):
  """What an asynchronous checkpoint has of a State."""

  def __init__(self, tensors):
    self._tensors = tensors

  def _serialize_to_tensors(self):
    return self._tensors
