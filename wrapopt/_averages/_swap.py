"""Puts averages in place of their variables.

While an average is in place, its variable holds its value, the raw value waits
aside, and the average itself has none. So nobody can take one for the other:
TensorFlow refuses to read a variable without a value, and every op of wrapopt
refuses to use it, whoever made the step, and whenever it was compiled.
"""

import collections
import ctypes
import threading
import weakref

import tensorflow as tf
from tensorflow.python.eager import context

from wrapopt._averages import _absence
from wrapopt._averages import _derivation
from wrapopt._averages import _lazy
from wrapopt._averages import _replicas
from wrapopt._loader import ops as _raw
from wrapopt.ops import _emit
from wrapopt.ops import _packed
from wrapopt.ops import _variables

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _exchange(variable, average):
  """Whether the two can exchange their buffers."""
  return (not isinstance(average, _derivation.Derived) and
          variable.dtype.base_dtype == _lazy.stored(average).dtype.base_dtype)


class _Occupied:
  """Variables that hold averages, whichever optimizers put them there."""

  def __init__(self):
    self._lock = threading.Lock()
    self._eager = {}  # {id: variable}.
    self._of_session = weakref.WeakKeyDictionary()

  def _of(self, session):
    return (self._eager if session is None
            else self._of_session.setdefault(session, {}))

  def add(self, variables, session=None):
    """Notes variables that are about to hold averages."""
    with self._lock:
      in_place = self._of(session)
      for v in variables:
        if id(v) in in_place:
          raise RuntimeError(
              "averaged_weights() must not be called while the averages of "
              f"another optimizer are in place of a variable, got '{v.name}'. "
              "Leave the other `with` block first.")
      in_place.update((id(v), v) for v in variables)

  def has(self, variable):
    """Whether a variable of eager mode holds an average."""
    return id(variable) in self._eager

  def remove(self, variables, session=None):
    with self._lock:
      in_place = self._of(session)
      for v in variables:
        in_place.pop(id(v), None)


_occupied = _Occupied()


class SwappedIn:
  """Averages that are in place of their variables, in eager mode."""

  def __init__(self, pairs, more=(), must_stay=False):
    """Puts averages in place.

    Args:
      pairs: (variable, average) pairs. A pair of one dtype exchanges its
        buffers. In other pairs, the average is converted or computed, and
        assigned to the variable.
      more: Other variables that are to have no value meanwhile.
      must_stay: Whether the variables must hold the averages until `swap_out`.
    """
    pairs = _replicas.components(pairs)
    # For all averages of the variables, not only these.
    _lazy.settle([v for v, _ in pairs])
    self._others = [pair for pair in pairs if not _exchange(*pair)]
    self._raw = [(group, _read([v for v, _ in group]))
                 for group in _groups(self._others)]
    at_once = {}
    converted = [(group, tf.cast(_read([s for _, s in group], at_once),
                                 group[0][0].dtype)) for group, _ in self._raw]
    self._aside = _Aside(pairs, more)
    self._variables = [v for v, _ in pairs]
    self._aside.check()  # Not half of it, if a variable has no value.
    _occupied.add(self._variables)
    _absence.add(self._aside.averages)
    self._exchanged = {id(v): s for v, s in pairs if _exchange(v, s)}
    self._holders = {id(s): v for v, s in pairs if _exchange(v, s)}
    self._aside.take()
    self._aside.trade()
    _assign_groups(converted)
    self._held = [(v, _hold(v)) for v in self._variables if must_stay]

  def value(self, average):
    """The value of an average that is in place, or None for another one."""
    average = _replicas.values(average)[0]
    if id(average) in self._holders:
      return self._holders[id(average)].read_value()
    return self._aside.value(average)

  def value_before(self, variable):
    """The value that a variable or an average had before."""
    for group, raw in self._raw:
      sizes = [v.shape.num_elements() for v, _ in group]
      for (v, _), part in zip(group, tf.split(tf.reshape(raw, [-1]), sizes)):
        if v is variable:
          return tf.reshape(part, v.shape)
    average = self._exchanged.get(id(variable))
    found = (self.value(variable) if average is None
             else self._aside.value(average))
    return variable.read_value() if found is None else found

  def swap_out(self):
    """Restores all values."""
    changed = [(v, held) for v, held in self._held
               if not _has_same_bits(_hold(v), held)]
    for variable, held in changed:
      variable.assign(held)
    self._held = []
    self._aside.trade()
    _assign_groups(self._raw)
    replaced = self._aside.give_back()
    _absence.remove(self._aside.averages)
    _occupied.remove(self._variables)
    _check_unassigned(replaced)
    if changed:
      raise RuntimeError(
          "Variables that hold averages must not be changed inside "
          f"averaged_weights(), got a new value of '{changed[0][0].name}', as "
          "by a step of another optimizer. Variables and averages have their "
          "values from before the `with` block. Change them after it, or train "
          "a copy of the model.")


# The number of elements up to which variables are copied as one vector.
_SMALL = 1 << 16


def _groups(pairs):
  """Divides (variable, average) pairs: each group is read and assigned at once.
  """
  groups = collections.defaultdict(list)
  for v, s in pairs:
    is_alike = (isinstance(s, _derivation.Derived) and s.alike is not None and
                v.shape.num_elements() <= _SMALL)
    groups[(v.device, v.dtype, s.alike) if is_alike else id(v)].append((v, s))
  return list(groups.values())


def _read(xs, at_once=None):
  """The value of the variables or averages of a group; a vector of several."""
  first = xs[0]
  if len(xs) == 1:
    return (first.read_value(at_once) if isinstance(first, _derivation.Derived)
            else tf.convert_to_tensor(first))
  return (first.read_packed(xs, at_once)
          if isinstance(first, _derivation.Derived) else
          _packed.read_packed(xs))


def _assign_groups(groups):
  for group, value in groups:
    variables = [v for v, _ in group]
    if len(variables) == 1:
      variables[0].assign(value)
    else:
      _packed.assign_packed(variables, value)


def check_unoccupied(variable, what):
  """Raises an error, in eager mode, if a variable holds an average."""
  if any(map(_occupied.has, _replicas.values(variable))):
    raise RuntimeError(
        f"{what} while an average is in place of '{variable.name}'. Leave the "
        "`with` block of averaged_weights() first.")


def check(averages):
  """Makes a step of a graph or `tf.function` fail while averages are in place.

  A step's own op refuses averages without a value. This is for a step that
  changes other variables before it reaches the averages, or does not reach
  them.

  Args:
    averages: Variables that have no value then, and others that the step
      changes: in a `tf.function`, what changes these waits for this.

  Returns:
    The operations that the step must wait for: a list, empty in eager mode,
    where a step calls Python's own check.
  """
  if tf.executing_eagerly():
    return []
  # In a replica, a strategy's variable has the handle of the replica's.
  # XLA would take their handles, and may be given the bundle of the step's op
  # beside them, whose first variable is an average, too.
  with _emit.compiled_where(False):
    return _in_groups("check_initialized", [_lazy.stored(s) for s in averages])


class SwapInGraph:
  """The ops that put averages of a graph in place, made before it is finalized.

  It holds no part of the graph.
  """

  def __init__(self, pairs, more=()):
    """Makes the ops.

    Args:
      pairs: (variable, average) pairs.
      more: Other variables that are to have no value meanwhile.
    """
    pairs = _replicas.components(pairs)
    # What a session runs, by name, one after the other.
    self._prepare, self._put, self._put_back = [], [], []
    at_once = {}
    with tf.name_scope("AveragesInPlace"):
      aside = _Aside(pairs, more)
      checked = aside.check()
      self._prepare += [op.name for op in checked]
      drops = [drop for group in _groups([
          pair for pair in pairs if not _exchange(*pair)])
               for drop in self._add_copied(group, checked, at_once)]
      with tf.control_dependencies(_lazy.settle([v for v, _ in pairs])):
        self._take = [x.op.name for x in aside.take()]
      trade = [op.name for op in aside.trade()]
      self._put += trade
      self._put_back += trade
      with tf.control_dependencies(drops):  # Before another session may take.
        self._give_back = [x.name for x in aside.give_back()]

  def _add_copied(self, group, checked, at_once):
    """Adds what copies a group of pairs that can't exchange their buffers.

    Args:
      group: The pairs.
      checked: Operations that check that all averages have a value.
      at_once: As for `Derived.read_value`.

    Returns:
      The operations that drop the copies: a list.
    """
    variables, averages = zip(*group)
    first = variables[0]
    with _emit.device_of(first):
      raw, average = (_Kept(first, name) for name in ("raw", "average"))
      with tf.control_dependencies([*checked, *_lazy.settle(variables)]):
        value = tf.cast(_read(averages, at_once), first.dtype.base_dtype)
      self._prepare.append(average.assign(tf.reshape(value, [-1])).name)
      # Another session on the same servers has the same names. Only the one
      # that took the averages keeps the raw values, and copies of them: a ref
      # variable's value changes in place.
      with tf.control_dependencies(
          [raw.assign(_packed.read_packed(variables))]):
        put = _packed.assign_packed(variables, average.read())
      back = _packed.assign_packed(variables, raw.read())
      self._put.append(put.name)
      self._put_back.append(back.name)
      return [raw.drop(), average.drop()]

  @staticmethod
  def swap_in(made, variables, session):
    """Puts averages in place of their variables.

    Args:
      made: SwapInGraphs.
      variables: The variables of all of these.
      session: A `tf.compat.v1.Session`.

    Returns:
      A function that restores all values.
    """
    variables = [x for v in variables for x in _replicas.values(v)]

    def run(part):
      return session.run([name for x in made for name in getattr(x, part)])

    run("_prepare")  # Not half of it, if a variable has no value.
    _occupied.add(variables, session)
    try:
      run("_take")
    except tf.errors.OpError:
      _occupied.remove(variables, session)
      raise
    run("_put")

    def back():
      run("_put_back")
      replaced = run("_give_back")
      _occupied.remove(variables, session)
      _check_unassigned(replaced)

    return back


class _Kept:
  """A value beside a variable that a session keeps, in a graph."""

  def __init__(self, variable, name):
    self._dtype = variable.dtype.base_dtype
    with tf.name_scope(""):
      name = tf.compat.v1.get_default_graph().unique_name(
          f"{variable.op.name}/{name}", mark_as_used=False)
      self._handle = tf.raw_ops.VarHandleOp(
          dtype=self._dtype, shape=None, shared_name=name, name=name)

  def assign(self, value):
    return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

  def read(self):
    return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)

  def drop(self):
    return tf.raw_ops.DestroyResourceOp(resource=self._handle)


class _Aside:
  """Variables, without values, beside averages and `more` variables.

  Attributes:
    averages: These.
  """

  def __init__(self, pairs, more=()):
    self.averages = [_lazy.stored(s) for _, s in pairs] + [
        _lazy.stored(x) for m in more for x in _replicas.values(m)]
    self._made = list(map(_without_value, self.averages))
    self._places = {id(s): i for i, s in enumerate(self.averages)}
    self._same = [(v, aside) for (v, s), aside in zip(pairs, self._made)
                  if _exchange(v, s)]

  def value(self, average):
    """The value that is here of an average, in eager mode, or None."""
    i = self._places.get(id(_lazy.stored(average)))
    if i is None:
      return None
    return tf.raw_ops.ReadVariableOp(
        resource=self._made[i], dtype=self.averages[i].dtype.base_dtype)

  def check(self):
    """Checks that all variables and averages have a value."""
    return _in_groups("check_initialized",
                      [v for v, _ in self._same] + self.averages)

  def take(self):
    """Moves all averages here; returns whether they took others' places."""
    return _in_groups("move", self.averages, self._made)

  def trade(self):
    """Exchanges what is here with the variables of the same dtype."""
    return _in_groups("exchange", *zip(*self._same)) if self._same else []

  def give_back(self):
    """Moves all averages back; returns whether they took others' places."""
    return _in_groups("move", self.averages, self._made, is_reversed=True)


def _without_value(like):
  """A variable without a value: a handle, or a ref in a graph."""
  arguments = {"shape": like.shape, "dtype": like.dtype.base_dtype}
  with tf.name_scope(""), _emit.device_of(like):
    if tf.executing_eagerly():  # It lives as long as this handle.
      return tf.raw_ops.VarHandleOp(
          **arguments, shared_name=context.anonymous_name())
    name = tf.compat.v1.get_default_graph().unique_name(
        f"{like.op.name}/aside", mark_as_used=False)
    if _variables.is_ref(like):
      return tf.raw_ops.VariableV2(**arguments, name=name)
    return tf.raw_ops.VarHandleOp(**arguments, shared_name=name, name=name)


def _in_groups(op, variables, others=None, is_reversed=False):
  """Calls a raw op on variables, or on pairs, of one device at a time.

  Args:
    op: Its name.
    variables: Variables.
    others: None, or as many handles or refs.
    is_reversed: Whether the op takes `others` first.

  Returns:
    A list of what the ops return.
  """
  groups = collections.defaultdict(list)
  lists = [variables] if others is None else [variables, others]
  for xs in zip(*lists):
    is_ref = _variables.is_ref(xs[0])
    # The variables of a ref op are of one dtype. Handles know their own.
    groups[is_ref, xs[0].device,
           xs[0].dtype.base_dtype if is_ref else None].append(
               [_variables.handle_or_ref(x) for x in xs])
  results = []
  for (is_ref, device, _), members in groups.items():
    arguments = list(map(list, zip(*members)))
    with tf.device(None), tf.device(device):
      results.append(getattr(_raw, f"wrapopt_{op}{'_ref' if is_ref else ''}")(
          *(reversed(arguments) if is_reversed else arguments)))
  return results


def _hold(variable):
  """The value of a variable, in eager mode, which shares its memory.

  So nobody writes to this memory: who changes the variable gives it another.
  """
  # Else, variables with sparse updates are copied.
  tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
  return tf.raw_ops.ReadVariableOp(resource=variable.handle,
                                   dtype=variable.dtype.base_dtype)


def _has_same_bits(value, held):
  """Whether a value is one that `_hold` has held, or has the same bits."""
  device = value.backing_device
  if "job:localhost/" in device and _address(value) == _address(held):
    return True
  with tf.device(device):
    return bool(tf.reduce_all(tf.bitcast(value, tf.uint8) ==
                              tf.bitcast(held, tf.uint8)))


def _address(value):
  """The address of a tensor's memory on a device of this process."""
  # Of a GPU, too, without a copy.
  managed = _get_pointer(tf.experimental.dlpack.to_dlpack(value), b"dltensor")
  return ctypes.c_void_p.from_address(managed).value  # Its first member.


def _check_unassigned(replaced):
  """Raises an error if a result of `_Aside.give_back` is true."""
  if any(map(bool, replaced)):
    raise RuntimeError(
        "Averages must not be assigned or restored inside averaged_weights(), "
        "while they are in place of their variables, got a new value of one. "
        "The variables have their values from before the `with` block; the "
        "averages may have other ones. Restore them after the block.")
