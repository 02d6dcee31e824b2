"""The variables that an optimizer averages, and their slots."""

import collections.abc
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
