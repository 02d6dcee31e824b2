"""The variables that an optimizer averages, and their slots."""

import collections.abc
import contextlib
import threading
import weakref

import tensorflow as tf
from tensorflow.python.distribute import sharded_variable
from tensorflow.python.training import optimizer as tf_optimizer


class Slots(collections.abc.MutableMapping):
  """The slots of one name, as `tf.compat.v1.train.Optimizer` looks them up.

  They hold no graph: a graph's slots are in its collections, and go with it.
  """

  def __init__(self, eager=()):
    self._eager = dict(eager)
    # By graph, then by the name of a variable.
    self._of_graph = weakref.WeakKeyDictionary()

  def __reduce__(self):
    # A graph's variables are not copied, neither by TensorFlow.
    return Slots, (self._eager,)

  def __getitem__(self, key):
    slots, name = self._find(key)
    return slots[name]

  def __setitem__(self, key, slot):
    slots, name = self._find(key)
    slots[name] = slot

  def __delitem__(self, key):
    slots, name = self._find(key)
    del slots[name]

  def items(self):
    # A list, as another thread may add to what this one goes through.
    return [*self._eager.copy().items(),
            *(((graph, name), slot)
              for graph, slots in list(self._of_graph.items())
              for name, slot in list(slots.items()))]

  def __iter__(self):
    return (key for key, _ in self.items())

  def __len__(self):
    # Cheap: each look-up of a slot asks whether there are any.
    return len(self._eager) + sum(map(len, self._of_graph.values()))

  def _find(self, key):
    # The base class's key of a variable is a string in eager mode.
    if isinstance(key, str):
      return self._eager, key
    graph, name = key
    return self._of_graph.setdefault(graph, weakref.WeakValueDictionary()), name


class Averaged:
  """The variables that an optimizer averages.

  Attributes:
    lock: Held while averages are made.
    swap_lock: Held while averages are put in place of the weights or back, and
      by what must not run while they are in place.
    swapped_in: Sessions (None: eager) in which the averages are in place now.
  """

  def __init__(self):
    self.lock = threading.RLock()
    self.swap_lock = threading.RLock()
    self.swapped_in = []
    self._eager = _Variables()
    self._of_graph = weakref.WeakKeyDictionary()

  def __reduce__(self):
    # A copy averages what it is given itself.
    return Averaged, ()

  def of(self, graph):
    """The `_Variables` of a graph, or of eager mode (None)."""
    if graph is None:
      return self._eager
    return self._of_graph.setdefault(graph, _Variables())

  @contextlib.contextmanager
  def not_swapped_in(self, session, what):
    """Keeps the averages out of place for a `with` block of method `what`."""
    with self.swap_lock:
      self.refuse_swapped_in(session, what)
      yield

  @contextlib.contextmanager
  def holding_swap(self, session):
    """Keeps other threads out of `averaged_weights` for a `with` block.

    Args:
      session: A `tf.compat.v1.Session`.

    Yields:
      Whether the averages are in place of the weights in this session.
    """
    with self.swap_lock:
      yield self._is_swapped_in(session)

  def refuse_swapped_in(self, session, what, instead=""):
    if self._is_swapped_in(session):
      raise RuntimeError(
          f"{what} cannot be used inside averaged_weights: the averages are in "
          f"place of the weights. Leave the `with` block first.{instead}")

  def _is_swapped_in(self, session):
    return any(session is s for s in self.swapped_in)


class _Variables:
  """Averaged variables, in order of their first step. It holds none of them.

  Attributes:
    swaps: For each decay, the `_swap.SwapInGraph`s of the variables; none in
      eager mode.
    is_got: {id of a variable of a list `variables`: whether steps get it}.
  """

  def __init__(self):
    self._refs = {}  # By id.
    self.is_got = {}
    self.swaps = collections.defaultdict(list)

  def __contains__(self, variable):
    return id(variable) in self._refs

  def __iter__(self):
    variables = (ref() for ref in list(self._refs.values()))
    return (v for v in variables if v is not None)

  def __bool__(self):
    return any(True for _ in self)

  def add(self, variable, slots):
    """Adds a variable, which takes what `slots` hold of it with it."""
    refs, i = self._refs, id(variable)
    slots, key = list(slots), tf_optimizer._var_key(variable)

    def gone(_):
      refs.pop(i, None)
      for of_name in slots:
        of_name.pop(key, None)

    # A graph's slots go with the graph: to know its key is to hold it.
    refs[i] = weakref.ref(
        variable, gone if isinstance(key, str) else lambda _: refs.pop(i, None))


def graph_of(variable):
  """The graph of a variable; None in eager mode."""
  key = tf_optimizer._var_key(variable)
  return None if isinstance(key, str) else key[0]


def graph_of_state():
  """The graph that holds the variables made here; None in eager mode."""
  if tf.executing_eagerly():
    return None
  with tf.init_scope():  # Out of a tf.function.
    return (None if tf.executing_eagerly()
            else tf.compat.v1.get_default_graph())


def parts_of(x):
  """The variables that an element of a list `variables` stands for, or None."""
  if isinstance(x, tf.Variable):
    return [x]
  # A PartitionedVariable or ShardedVariable stands for its parts.
  parts = list(x) if hasattr(x, "__iter__") and not tf.is_tensor(x) else []
  return (parts if parts and all(isinstance(v, tf.Variable) for v in parts)
          else None)


def check_whole(variable):
  """Raises an error for a ShardedVariable, whose parts have the slots.

  TensorFlow would take the slot of the first part for that of the whole.
  """
  if isinstance(variable, sharded_variable.ShardedVariable):
    raise NotImplementedError(
        "A tf.train.Checkpoint with this optimizer must hold the parts of a "
        "ShardedVariable, which have the averages, got the whole of "
        f"'{variable.name}'. Write tf.train.Checkpoint("
        "parts=list(w.variables), optimizer=optimizer), without w.")


def check_listed(listed, grads_and_vars, before):
  """Raises an error if a step cannot average the listed variables.

  Args:
    listed: The variables, each once; empty if there is no list.
    grads_and_vars: The (gradient, variable) pairs of the step.
    before: The result for earlier steps of this graph, or empty.

  Returns:
    {id of a listed variable: whether the step gets it}.
  """
  got = {id(v) for _, v in grads_and_vars}
  is_got = {id(v): id(v) in got for v in listed}
  if is_got and not any(is_got.values()):
    raise ValueError(
        "`variables` must hold a variable that the optimizer trains, got "
        f"{[v.name for v in listed]}, of which apply_gradients() got none.")
  graph = graph_of_state()
  for v in listed:
    if graph_of(v) is not graph:
      raise ValueError(
          "`variables` must hold variables of the graph of the step, or of "
          f"eager mode, got '{v.name}' of another one.")
    if before.get(id(v), is_got[id(v)]) != is_got[id(v)]:
      raise ValueError(
          "`variables` must hold variables that every apply_gradients() gets, "
          f"or none does, got '{v.name}', which some calls got. If different "
          "calls get different variables, pass a function of a variable. To "
          "average a variable also in steps that do not train it, pass it with "
          "the gradient None.")
    if (isinstance(v, tf.distribute.DistributedValues) and
        v.synchronization == tf.VariableSynchronization.ON_READ):
      raise NotImplementedError(
          "In a tf.distribute strategy, `variables` must hold variables that "
          f"all replicas share, got '{v.name}', which is another one in each "
          "replica (VariableSynchronization.ON_READ).")
  return is_got


# The names of the slots of averages in files.
SLOT = "ExponentialMovingAverage"


def numbered(decay):
  """The name of averages with their decay."""
  return f"{SLOT}_{decay}"


def slot_of_saved(name, decays, slots):
  """The slot for averages that a `tf.train.Checkpoint` calls `name`, or None.

  Args:
    name: A string.
    decays: The decays of the optimizer.
    slots: For each, the name of the slots that hold its averages.
  """
  # One decay has no number.
  return slots[0] if name == SLOT else dict(
      zip(map(numbered, decays), slots)).get(name)


def another_first_decay(decays, name):
  return ValueError(
      f"`average_decay` must begin with the decay of '{name}' in the "
      f"checkpoint, got {decays}: the checkpoint has other averages of "
      f"{decays[0]}. Give the decays in the order of the run that wrote it.")
