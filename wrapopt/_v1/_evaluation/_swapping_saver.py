"""A Saver that swaps the names of variables and their averages."""

import tensorflow as tf
from tensorflow.python.training.saving import saveable_object
from tensorflow.python.training.saving import saveable_object_util

from wrapopt._averages import _derivation
from wrapopt._averages import _interpolation
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt._v1._graphs import _sessions


class SwappingSaver(tf.compat.v1.train.Saver):
  """See `MovingAverageOptimizer.swapping_saver`."""

  def __init__(self, pairs, var_list, firsts, check_saved, not_swapped_in,
               **kwargs):
    """Makes the saver.

    Args:
      pairs: (variable, average) pairs.
      var_list: As in `swapping_saver`.
      firsts: The averages of the first decay.
      check_saved: A function of the name of one of these in a file, and of all
        names in the file, that raises an error if the file must not be
        restored.
      not_swapped_in: A function of the raw session (None: eager) that returns a
        context manager. It raises an error if the averages are in place of the
        weights, and keeps other threads from putting them there.
      **kwargs: Arguments of `tf.compat.v1.train.Saver`.
    """
    self._not_swapped_in = not_swapped_in
    self._check_saved = check_saved
    named = _resolved(_named(var_list), [
        *(x for v, s in pairs for x in (v, *_variables_of(s))), *firsts])
    keys = _keys(named)
    self._firsts = {keys[s.ref()][0] for s in firsts if s.ref() in keys}
    shares = [s.share for v, s in pairs if v.ref() in keys and
              isinstance(s, _interpolation.Interpolated)]
    # Those of a list that a user chose come with their variables.
    more = {share.name.split(":")[0]: share for share in shares
            if share.ref() not in keys}
    every = {**named, **more}
    super().__init__(_swap(pairs, every, _keys(every)), **kwargs)
    self._shares = {_keys(every)[share.ref()][0] for share in shares}
    # For files of earlier versions.
    self._without_shares = self._shares and tf.compat.v1.train.Saver(
        _swap(pairs, (rest := {key: saved for key, saved in every.items()
                               if key not in self._shares}), _keys(rest)),
        **{**kwargs, "defer_build": False})

  def save(self, sess, *args, **kwargs):
    with self._not_swapped_in(_raw(sess)):
      return super().save(sess, *args, **kwargs)

  def restore(self, sess, save_path):
    restore = super().restore
    if tf.compat.v1.train.checkpoint_exists(save_path):
      saved = {name for name, _ in tf.train.list_variables(save_path)}
      for name in self._firsts:
        self._check_saved(name, saved)
      if self._shares and self._shares.isdisjoint(saved):
        restore = self._without_shares.restore
    with self._not_swapped_in(_raw(sess)):
      return restore(sess, save_path)


def _raw(session):
  return None if session is None else _sessions.raw(session)


def _named(var_list):
  """Returns the variables to save: a dict from names."""
  if isinstance(var_list, dict):
    return dict(var_list)
  if var_list is None:
    # As in a Saver.
    var_list = (
        tf.compat.v1.global_variables() +
        tf.compat.v1.get_collection(
            tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS))
  var_list = list(var_list)
  named = saveable_object_util.op_list_to_dict(
      var_list, convert_variable_to_tensor=False)
  # TensorFlow replaces these by the objects that save them.
  named.update({v.name.split(":")[0]: v for v in var_list if _has_replicas(v)})
  for key, saved in list(named.items()):
    if isinstance(saved, _lazy.Saveable):
      del named[key]
      info = saved.average._get_save_slice_info()
      if info is None:
        named[key] = saved.average
      else:
        named.setdefault(info.full_name, []).append(saved.average)
  return named


def _has_replicas(saved):
  return (isinstance(saved, tf.Variable) and
          isinstance(saved, tf.distribute.DistributedValues))


def _entry(key, variables):
  """Variables as an entry of a Saver's dict."""
  variables = [_lazy.Saveable(v, key) if isinstance(v, _lazy.LazyAverage) else v
               for v in variables]
  # A list of slices stays a list.
  if len(variables) != 1:
    return variables
  [variable] = variables
  if isinstance(variable, _lazy.Saveable):
    return variable
  if variable._get_save_slice_info():
    return variables
  if _has_replicas(variable):
    # A Saver would save only the variable of the first replica.
    [saveable] = variable._gather_saveables_for_checkpoint().values()
    return saveable(key)
  return variable


def _slices(saved):
  """The variables of an entry of a Saver's dict; [] if it has none."""
  if isinstance(saved, (list, tuple)):
    return list(saved)
  if isinstance(saved, (tf.Variable, _lazy.LazyAverage)):
    return [saved]
  if hasattr(saved, "_get_variable_list"):  # A PartitionedVariable.
    return saved._get_variable_list()
  return []


def _keys(named):
  """{variable: (its name, the number of the slice)}."""
  return {v.ref(): (key, i) for key, saved in named.items()
          for i, v in enumerate(_slices(saved))}


def _swap(pairs, named, key_of):
  """`named` with variables and averages swapped; `key_of` is its `_keys`."""
  swapped = {key: list(_slices(saved)) or saved
             for key, saved in named.items()}
  saveables = {}

  def save_by(saveable, *places):
    saveables[saveable.name] = saveable
    for key, i in places:
      swapped[key][i] = None

  for variable, average in pairs:
    stored, *others = _variables_of(average)
    group = [variable, stored, *others]
    for one in group[:2]:
      for other in group:
        if one.ref() in key_of and other.ref() not in key_of:
          raise ValueError(
              f"Variable to swap {other.name.split(':')[0]} is not part of "
              "variables to save. This breaks "
              + ("the average that follows from them." if others else
                 "MovingAverageOptimizer."))
    if variable.ref() not in key_of:
      continue
    place, of_stored = key_of[variable.ref()], key_of[stored.ref()]
    if isinstance(average, _interpolation.Interpolated):
      save_by(_InterpolatingSaveable(variable, average, place[0], of_stored[0]),
              place, of_stored)
      [state] = others
      of_state = key_of[state.ref()]
      save_by(_AtXSaveable(state, of_state[0], _of_each(state)), of_state)
      if average.share.ref() in key_of:
        of_share = key_of[average.share.ref()]
        save_by(_AtXSaveable(average.share, of_share[0],
                             lambda: tf.ones([], tf.float64)), of_share)
    elif isinstance(average, _derivation.Derived):
      save_by(_ConvertingSaveable(variable, average, place[0], of_stored[0]),
              place, of_stored)
    elif variable.dtype.base_dtype == average.dtype.base_dtype:
      (key, i), (average_key, j) = place, of_stored
      swapped[key][i], swapped[average_key][j] = average, variable
    else:
      save_by(_ConvertingSaveable(variable, average, place[0], of_stored[0]),
              place, of_stored)
  result = {}
  for key, saved in swapped.items():
    if isinstance(saved, list):
      saved = [v for v in saved if v is not None]
      if not saved:
        continue
      saved = _entry(key, saved)
    result[key] = saved
  return {**result, **saveables}


def _variables_of(average):
  """The variables that a Saver writes for an average: the first holds it."""
  if isinstance(average, _derivation.Derived):
    return average.saved
  return [average]


def _resolved(named, variables):
  """`named` with tensors that read one of `variables` replaced by the variable.
  """
  if tf.executing_eagerly():
    return named
  variables = {v.op: v for v in variables}
  return {
      key: (variables.get(_source(saved), saved)
            if isinstance(saved, tf.Tensor) else saved)
      for key, saved in named.items()}


def replaced(var_list, replacements):
  """Returns the variables to save, with some replaced: a dict from names.

  Args:
    var_list: As in a Saver.
    replacements: A mapping from variables to their replacements.

  Returns:
    A dict from names to variables, and lists of slices.
  """
  result = {}
  for key, saved in _resolved(_named(var_list), replacements).items():
    variables = [replacements.get(v, v) for v in _slices(saved)]
    result[key] = _entry(key, variables) if variables else saved
  return result


def _source(tensor):
  """The op of the variable that a tensor reads."""
  op = tensor.op
  return op.inputs[0].op if op.type == "ReadVariableOp" else op


def _spec(variable, slice_spec, name, tensor, dtype):
  return saveable_object.SaveSpec(
      tensor, slice_spec, name, dtype=dtype, device=variable.device)


def _of_each(state):
  """A function that computes the state of variables that all hold x."""
  return lambda: _interpolation.with_share(state.read_value(),
                                          _interpolation.EACH_ITS_OWN)


class _InterpolatingSaveable(saveable_object.SaveableObject):
  """Saves x, which no variable holds, by the name of its variable.

  z keeps its name. What the variable holds, y, has a name of its own.
  """

  def __init__(self, variable, average, key, z_key):
    info = variable._get_save_slice_info()
    slice_spec = info.spec if info else ""
    self._variable, self._z = variable, average.rows
    dtype = variable.dtype.base_dtype
    super().__init__(
        variable,
        [_spec(variable, slice_spec, key, average.read_value, dtype),
         _spec(variable, slice_spec, z_key, self._z.read_value, dtype),
         _spec(variable, slice_spec, f"{z_key}/y", variable.read_value,
               dtype)],
        f"{key} {slice_spec}".strip())

  def restore(self, restored_tensors, restored_shapes):
    _, z, y = restored_tensors
    return tf.group(self._variable.assign(y), self._z.assign(z))


class _AtXSaveable(saveable_object.SaveableObject):
  """Saves a number of variables that hold x, and under "/y" the real one."""

  def __init__(self, variable, key, value):
    self._variable = variable
    dtype = variable.dtype.base_dtype
    super().__init__(
        variable,
        [_spec(variable, "", key, value, dtype),
         _spec(variable, "", f"{key}/y", variable.read_value, dtype)],
        key)

  def restore(self, restored_tensors, restored_shapes):
    return self._variable.assign(restored_tensors[1])


class _ConvertingSaveable(saveable_object.SaveableObject):
  """Swaps a variable and its average of a wider dtype, or a derived one.

  The average is converted for the variable's name, since a plain Saver restores
  that name into a variable of the narrow dtype. The average's dtype represents
  the raw value exactly. The variable of the average has a name of its own.
  """

  def __init__(self, variable, average, key, average_key):
    info = variable._get_save_slice_info()
    slice_spec = info.spec if info else ""
    stored = _variables_of(average)[0]
    self._variable, self._average = variable, stored
    part = ("full_precision" if stored is average else "moving_average")

    def spec(name, tensor, dtype):
      return _spec(variable, slice_spec, name, tensor, dtype)

    super().__init__(
        variable,
        [spec(key, lambda: tf.cast(average, variable.dtype.base_dtype),
              variable.dtype.base_dtype),
         spec(average_key, lambda: tf.cast(variable, average.dtype.base_dtype),
              average.dtype.base_dtype),
         spec(f"{average_key}/{part}", lambda: tf.convert_to_tensor(stored),
              average.dtype.base_dtype)],
        f"{key} {slice_spec}".strip())

  def restore(self, restored_tensors, restored_shapes):
    _, raw, average = restored_tensors
    raw = tf.cast(raw, self._variable.dtype.base_dtype)
    return tf.group(
        *[v.assign(raw) for v in _replicas.values(self._variable)],
        *[s.assign(average) for s in _replicas.values(self._average)])
