"""Local variables of workers, and the centers that all workers share.

For the optimizers that average the weights of several workers.
"""

import collections
import contextlib
import numbers

import numpy as np
import tensorflow as tf

from wrapopt import _checks
from wrapopt import ops
from wrapopt._v1._graphs import _control_flow
from wrapopt._v1._graphs import _initial_value
from wrapopt._v1._graphs._unique_variable import get_unique_variable

tf1 = tf.compat.v1

_GLOBAL = tf1.GraphKeys.GLOBAL_VARIABLES
_LOCAL = tf1.GraphKeys.LOCAL_VARIABLES

CENTER = "global_center_variable"

# Arguments of a variable scope's getter after the name, in their order.
_ARGUMENTS = (
    "shape", "dtype", "initializer", "regularizer", "reuse", "trainable",
    "collections", "caching_device", "partitioner", "validate_shape",
    "use_resource", "constraint", "synchronization", "aggregation")


def require_graph(what):
  """Raises an error in eager mode and in a strategy; `what` is the subject."""
  if tf1.executing_eagerly_outside_functions():
    raise RuntimeError(
        f"{what} must be used in a tf.Graph, got eager mode: workers share "
        "centers by their names in graphs. Build the model in "
        "`with tf.Graph().as_default():`.")
  if tf.distribute.has_strategy():
    raise NotImplementedError(
        f"{what} must not be used in a tf.distribute strategy, which places "
        "the variables. Use it between asynchronous workers.")


def check_seconds(subject, x):
  """Raises an error if `x` is not a positive number of seconds."""
  if not isinstance(x, numbers.Real) or isinstance(x, bool):
    raise TypeError(f"`{subject}` must be a number of seconds, got {x!r}.")
  if not x > 0:
    raise ValueError(f"`{subject}` must be more than 0, got {x}.")


def check_period(subject, x):
  """Checks a number of steps, which may also be a tensor or a variable."""
  if not tf.is_tensor(x) and not isinstance(x, tf.Variable):
    return _checks.integer(subject, x, least=1)
  if not x.dtype.base_dtype.is_integer or x.shape.rank not in (None, 0):
    raise TypeError(f"`{subject}` must be a scalar integer, got a tensor of "
                    f"dtype {x.dtype.base_dtype.name} and shape {x.shape}.")
  return x


class VariableMap(collections.abc.MutableMapping):
  """A dict whose keys are variables, which need not be hashable."""

  def __init__(self):
    self._items = {}  # By reference: (variable, value).

  def __getitem__(self, variable):
    if variable not in self:
      name = getattr(variable, "name", variable)
      raise KeyError(
          f"'{name}' must be a variable that the custom getter made. Make it "
          "with tf.compat.v1.get_variable and trainable=True in a "
          "variable_scope that has the getter.")
    return self._items[variable.ref()][1]

  def __setitem__(self, variable, value):
    self._items[variable.ref()] = variable, value

  def __delitem__(self, variable):
    del self._items[variable.ref()]

  def __contains__(self, variable):
    return (isinstance(variable, tf.Variable) and
            variable.ref() in self._items)

  def __iter__(self):
    return (variable for variable, _ in self._items.values())

  def __len__(self):
    return len(self._items)

  def in_graph(self):
    """The keys in the current graph: a list."""
    graph = tf1.get_default_graph()
    return [variable for variable in self if variable.graph is graph]


def slices(variable):
  """The slices of a `PartitionedVariable`; [variable] for other variables."""
  return (variable._get_variable_list()
          if hasattr(variable, "_get_variable_list") else [variable])


class CenterGetter:
  """A custom getter that makes a center for each trainable variable.

  The first call for a variable makes both. Later calls reuse them.

  Attributes:
    worker_device: The device of the worker's local variables.
    centers: A VariableMap from these variables to their centers.
  """

  def __init__(self, worker_device):
    if isinstance(worker_device, str):
      tf.DeviceSpec.from_string(worker_device)  # Raises a ValueError.
    self.worker_device = worker_device
    self.centers = VariableMap()
    # Each: a variable, a copy, and the initializers that they were made with.
    self._made = []

  def __call__(self, getter, name, *args, **kwargs):
    require_graph(type(self).__name__)
    kwargs.update(zip(_ARGUMENTS, args))
    if not _is_trainable(kwargs):
      with (tf.device(self.worker_device)
            if _LOCAL in (kwargs.get("collections") or ())
            else contextlib.nullcontext()):
        return getter(name, **kwargs)
    with tf.device(self.worker_device):
      variable = getter(name, **{
          **kwargs, "collections": _local(kwargs.get("collections"))})
    if not all(v in self.centers for v in slices(variable)):
      self._make_copies(getter, name, variable, kwargs)
    return variable

  def center_of(self, variable):
    """The center of a variable that this getter must have made."""
    if variable not in self.centers:
      raise ValueError(
          f"'{variable.name}' must have a center, got a variable that the "
          f"optimizer's {type(self).__name__} did not make. Make it with "
          "trainable=True in tf.compat.v1.variable_scope(..., "
          "custom_getter=getter).")
    return self.centers[variable]

  def _make_copies(self, getter, name, variable, kwargs):
    # In the caller's device scope: replica_device_setter chooses a parameter
    # server.
    self._copy(getter, f"{CENTER}/{name}", variable, kwargs, _GLOBAL,
               self.centers)

  def _copy(self, getter, name, variable, kwargs, collection, copies):
    """Gets a variable like `variable`, and adds it to `copies`."""
    shape = variable.get_shape()
    initial_values = {_offset(v): v.initial_value for v in slices(variable)}

    # The initial value is the same tensor as that of the worker's variable: one
    # run of the initializers gives both the same random values. The variable
    # itself is not read, because a chief initializes centers first.
    def initial_value(shape=None, dtype=None, partition_info=None):
      del shape, dtype
      offset = partition_info.var_offset if partition_info else ()
      return initial_values[tuple(offset)]

    copy = getter(name, **{
        **kwargs,
        "shape": shape if shape.is_fully_defined() else None,
        "dtype": variable.dtype.base_dtype, "initializer": initial_value,
        "trainable": False, "collections": [collection],
        # Only the worker's variable is regularized and constrained.
        "regularizer": None, "constraint": None, "caching_device": None})
    for pair in zip(slices(variable), slices(copy), strict=True):
      copies.update([pair])
      self._made.append(
          (*pair, *map(_initial_value.initializer_of, pair)))

  def follow_files(self):
    """Starts the copies where `init_from_checkpoint` starts the variables.

    It replaces the initializer of a variable alone. Then the center would start
    elsewhere, and take the worker there. A copy with such an initializer of its
    own keeps it.
    """
    graph = tf1.get_default_graph()
    for variable, copy, *made_with in self._made:
      initializer, of_copy = map(_initial_value.initializer_of,
                                 (variable, copy))
      if (variable.graph is graph and initializer is not made_with[0] and
          of_copy is made_with[1]):
        # The operation itself: a session may have been given it already.
        of_copy._update_input(1, _initial_value.assigned(variable))


def _is_trainable(kwargs):
  if kwargs.get("trainable") is None:
    return (kwargs.get("synchronization") !=
            tf.VariableSynchronization.ON_READ)
  return kwargs["trainable"]


def _offset(variable):
  info = variable._get_save_slice_info()
  return tuple(info.var_offset) if info else ()


def _local(names):
  """The collections of a local variable."""
  names = [name for name in names or () if name != _GLOBAL]
  return names if _LOCAL in names else [*names, _LOCAL]


def worker_variable(name, dtype, value, worker_device):
  """A variable of a worker, in the memory of its host."""
  if isinstance(worker_device, str):
    spec = tf.DeviceSpec.from_string(worker_device)
    if spec.device_type not in (None, "CPU"):
      # TensorFlow has no int32 counters on a GPU.
      worker_device = spec.replace(device_type="CPU",
                                   device_index=0).to_string()
  return get_unique_variable(name, np.shape(value), dtype,
                             tf1.constant_initializer(value), worker_device,
                             _LOCAL)


def make_local_step(worker_device):
  """The variable that counts a worker's steps."""
  return worker_variable("local_step", tf.int32, 0, worker_device)


def count_step(local_step, stepped, period):
  """Counts a step of a worker, and decides whether a round or exchange is due.

  The decision is made at the start of the step, so that the session's calls to
  other tasks overlap with the computation of the step.

  Args:
    local_step: The count.
    stepped: The step, an operation.
    period: The number of steps between rounds: an integer, a tensor or a
      variable.

  Returns:
    (due, not_due, counted). `due` and `not_due` are tensors on the host of the
    count. In each step, one of them is dead. `counted` is an operation that
    runs after the step.
  """
  with ops.host_of(local_step):
    count = local_step.read_value() + 1
    if isinstance(period, tf.Variable):
      period = period.read_value()
    is_due = tf.equal(count % tf.cast(period, count.dtype), 0)
    due, not_due = _control_flow.branch(is_due)
    with tf.control_dependencies([stepped, is_due]):
      now = tf.identity(local_step.assign_add(1))
    return due, not_due, tf.raw_ops.Assert(
        condition=tf.equal(now, count), data=[
            "A worker must take one step at a time, but another step was "
            "counted during this one. Run the train op from one thread. "
            "Expected and got count:", count, now])


@contextlib.contextmanager
def worker_state(device):
  """Makes local variables of the worker of all variables made inside.

  Otherwise an optimizer's slots would be global variables on the worker's
  device. A worker that is not the chief would wait for the chief to initialize
  them, and the chief has only its own.

  Args:
    device: The worker's device.

  Yields:
    None.
  """
  def create(next_creator, **kwargs):
    names = kwargs.get("collections") or [_GLOBAL]
    if _GLOBAL not in names or tf1.GraphKeys.GLOBAL_STEP in names:
      return next_creator(**kwargs)
    with tf.device(device):
      variable = next_creator(**kwargs)
    # Not by `collections`: a variable of TensorFlow 2 has none.
    made = tf1.get_collection_ref(_GLOBAL)
    made[:] = [v for v in made if v is not variable]
    if _LOCAL not in names:
      tf1.add_to_collection(_LOCAL, variable)
    return variable

  with tf1.variable_creator_scope(create):
    yield


# Many variables as a few tensors, since each transfer of a tensor to another
# task costs a call.

# Each tensor costs two or more calls in every step, also in steps that send no
# tensor: ResNet-50's five take 0.4 ms of a step longer than one does. But the
# copies, transfers and computation of several overlap: a round takes 0.75 of
# the time.
_MOST_BYTES = 24 * 2**20


def buckets(*rows):
  """Groups variables that share a tensor.

  A group holds variables of one dtype, device and kind, up to 24 MiB of them,
  or one larger variable.

  Args:
    *rows: Sequences of N variables. The i-th variables of all rows have the
      same dtype and shape: one value is read from some and assigned to others.

  Returns:
    A list of lists of indices into each row. In a list, the variables of a row
    have one device and one dtype, and are all ref variables or none; their
    indices ascend.

  Raises:
    ValueError: If the shape of a variable is not known.
  """
  groups = []
  room = {}  # By device and dtype: the last group, and the bytes left in it.
  for i, variables in enumerate(zip(*rows, strict=True)):
    for v in variables:
      if not v.shape.is_fully_defined():
        raise ValueError(
            f"The shape of '{v.name}' must be known when the graph is built, "
            f"because its value is packed with others, got {v.shape}.")
    key = (variables[0].dtype.base_dtype,
           *[(v.device, hasattr(v, "handle")) for v in variables])
    size = _bytes(variables[0])
    group, left = room.get(key, (None, 0))
    if group is None or size > left:
      group, left = [], _MOST_BYTES
      groups.append(group)
    group.append(i)
    room[key] = group, left - size
  return groups


def pack(variables, groups=None):
  """The values of variables, concatenated to vectors on their device.

  Args:
    variables: A sequence of variables.
    groups: The result of `buckets` for these and other variables; by default
      for these alone.

  Returns:
    A list with a tensor of rank 1 for each group. It holds the values after the
    caller's control dependencies. Later updates do not change it.
  """
  flats = []
  for group in buckets(variables) if groups is None else groups:
    first, *others = [variables[i] for i in group]
    if others or ops.is_ref_variable(first):
      flats.append(ops.read_packed([first, *others]))
      continue
    # The variable's buffer: a later write to the variable copies it first.
    with ops.device_of(first):
      flats.append(tf.reshape(first.read_value(), [-1]))
  return flats


def assign_packed(variables, flats, groups=None):
  """Assigns vectors from `pack` of other variables.

  Args:
    variables: A sequence of variables.
    flats: Tensors of rank 1, one for each of the groups.
    groups: As in `pack`.

  Returns:
    An operation. All of its work is on the device of the variables.
  """
  groups = buckets(variables) if groups is None else groups
  assigned = []
  for group, flat in zip(groups, flats, strict=True):
    first, *others = [variables[i] for i in group]
    if others or ops.is_ref_variable(first):
      assigned.append(ops.assign_packed([first, *others], flat))
      continue
    # The assignment takes the buffer. The shape is a constant, which the
    # control dependency makes dead if the vector is dead.
    flat = at(first.device, flat)
    with ops.device_of(first), tf.control_dependencies([flat]):
      assigned.append(first.assign(tf.reshape(flat, first.shape),
                                   read_value=False))
  with tf.device(None):
    return tf.group(*assigned)


def at(device, tensor):
  """`tensor` on the host of a device.

  A control dependency on the result crosses no task, as one on `tensor` would.
  """
  with tf.device(None), tf.device(ops.host_device(device)):
    return tf.identity(tensor)


def split(flat, variables):
  """Splits the vector of a group into tensors of its variables' shapes."""
  sizes = [v.shape.num_elements() for v in variables]
  parts = tf.split(flat, sizes) if sizes[1:] else [flat]
  return [tf.reshape(part, v.shape) for part, v in zip(parts, variables)]


def copy_packed(sources, *copies):
  """Assigns variables the values of others, in a few transfers.

  Args:
    sources: N variables.
    *copies: Rows of N variables of the same dtypes and shapes, which get the
      values of `sources`. They need not be initialized.

  Returns:
    An operation.
  """
  groups = buckets(sources, *copies)
  assigned = []
  for group, flat in zip(groups, pack(sources, groups), strict=True):
    for targets in ([row[i] for i in group] for row in copies):
      with ops.device_of(targets[0]):
        # `use_locking` locks a ref variable; a resource variable always locks.
        assigned += [v.assign(value, use_locking=True, read_value=False)
                     for v, value in zip(targets, split(flat, targets))]
  with tf.device(None):
    return tf.group(*assigned)


def _bytes(variable):
  return variable.shape.num_elements() * variable.dtype.base_dtype.size
