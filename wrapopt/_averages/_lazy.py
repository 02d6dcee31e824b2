"""Averages whose rows lag behind until a step touches them or somebody reads.

A step by a sparse gradient, of an optimizer that changes no other row, moves
the averages of the other rows towards constants. So it leaves them alone, and
they catch up later: see `wrapopt.ops.catch_up`.

Nobody but this module sees the rows that lag behind. All others see a
`LazyAverage`, whose reads bring them up to date.
"""

import sys
import threading

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import variable_pb2
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops import variable_scope as tf_variable_scope
from tensorflow.python.saved_model import save_context
from tensorflow.python.trackable import base as trackable
from tensorflow.python.training import checkpoint_utils
from tensorflow.python.training.saving import saveable_object
from tensorflow.python.util import object_identity

from wrapopt import ops
from wrapopt._averages import _absence
from wrapopt._averages import _derivation
from wrapopt._averages import _replicas
from wrapopt._loader import ops as _raw
from wrapopt.ops import _emit
from wrapopt.ops import _lagging

# The collection that carries the LazyAverages of a graph into its MetaGraphDef.
COLLECTION = "wrapopt_lazy_averages"

_NOT_SAVED = (
    "The concrete function reads an average of which rows may lag behind. Save "
    "the tf.function, which is then traced again.")

settle = _lagging.settle
moving = _lagging.moving


def is_lazy(average):
  """Whether rows of an average may lag behind now."""
  return isinstance(average, LazyAverage) and average.may_lag


def stored(average):
  """The variable that holds an average, for code that has settled it."""
  return (average.rows
          if isinstance(average, (LazyAverage, _derivation.Derived))
          else average)


def make(variable, value, name):
  """Makes a LazyAverage of a variable, for code of `tf.compat.v1`.

  Args:
    variable: The variable; `may_be_lazy` must be True.
    value: Its initial value: a tensor.
    name: The last part of its name.

  Returns:
    A LazyAverage. In a graph, its `_initializer_op` must be set.
  """
  prefix = variable._shared_name
  with tf.compat.v1.variable_scope(None, f"{prefix}/{name}") as scope:
    name = scope.name
  with (tf.compat.v1.name_scope(None),
        tf.distribute.get_strategy().extended.colocate_vars_with(variable)):
    # No variable of `get_variable`, which `init_from_checkpoint` looks for.
    rows = tf.compat.v1.Variable(
        value, trainable=False, use_resource=True, name=f"{name}/rows",
        **_no_collections())
  info = variable._get_save_slice_info()
  if info is not None:
    info = tf.Variable.SaveSliceInfo(
        f"{info.full_name}/{name[len(prefix) + 1:]}", info.full_shape,
        info.var_offset, info.var_shape)
  average = LazyAverage(rows, variable, name, info)
  if not tf.executing_eagerly():
    # By the key of a slot, for the scopes that `init_from_checkpoint` maps.
    tf_variable_scope._get_default_variable_store()._vars[f"{name}/"] = average
  return average


def _no_collections():
  """The argument of a variable that is in no collection of its graph."""
  return {} if tf.executing_eagerly() else {"collections": []}


def let_lag(averages):
  """Lets rows of averages lag behind from now on, if all of them can.

  Args:
    averages: A list of averages of a variable.

  Returns:
    Whether they can.
  """
  if not all(isinstance(s, LazyAverage) and s.can_lag() for s in averages):
    return False
  for s in averages:
    s.let_lag()
  return True


class LazyAverage(trackable.Trackable):
  """An average of a variable with rows. Reading it brings it up to date.

  It is no `tf.Variable`, but TensorFlow converts it to a tensor like one. It
  has a `tf.Variable`'s methods to read and assign it, and is saved and restored
  as one. It has no `handle`: an op that takes the handle would read rows that
  lag behind. Make the optimizer with `lazy=False` to get a variable.

  Attributes:
    name: Its name in graphs and checkpoints, with ":0".
    device: The name of its device.
    log_decays: The variable that tells how far rows lag behind, or None.
    rows: The variable that holds it. Only this package uses it.
    initializer: In a graph, the operation that initializes it.
  """

  trainable = False

  def __init__(self, rows, variable, name, slice_info=None):
    """Makes an average that holds the value of `rows`.

    Args:
      rows: A new variable, which nobody else uses.
      variable: The variable that it is an average of.
      name: Its name in graphs, or in checkpoints of Savers.
      slice_info: A `SaveSliceInfo`, if it is a part of a partitioned variable.
    """
    self.rows, self.device = rows, rows.device
    self._name = name
    self._dtype, self._shape = rows.dtype, rows.shape
    self._save_slice_info = slice_info
    # Not the variable, which an average does not keep alive. Its value stays.
    self._rows_handle, self._value_handle = rows.handle, variable.handle
    self._value_dtype = variable.dtype
    self.log_decays = self._element = self._initializer_op = None
    self._lock = threading.Lock()
    self._entry = _lagging.add(self, variable)
    self._is_dense = False
    if not tf.executing_eagerly():
      self.let_lag()
      with tf.compat.v1.name_scope(None), ops.device_of(rows):
        # The name as it is, though it is also a scope.
        self._element = self._read_op(f"{name}/")
      for collection in tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, COLLECTION:
        tf.compat.v1.add_to_collection(collection, self)

  # The rows that lag behind.

  @property
  def may_lag(self):
    """Whether rows may lag behind now."""
    return self.log_decays is not None

  def can_lag(self):
    """Whether a step here may let rows lag behind."""
    return not (self._is_dense or _replicas.share_steps() or
                not tf.executing_eagerly() and save_context.in_save_context())

  def keep_dense(self):
    """No row may lag behind from now on."""
    self._is_dense = True

  def let_lag(self):
    """Lets rows lag behind from now on."""
    with self._lock:
      if self.log_decays is None:
        with (tf.init_scope(), ops.device_of(self),
              tf.compat.v1.name_scope(None)):
          with ops.host_of(self):
            zeros = self._zeros()
          self.log_decays = resource_variable_ops.ResourceVariable(
              zeros, trainable=False, name=f"{self._name}/log_decays",
              **_no_collections())
        self._entry.let_lag()

  def _zeros(self):
    return tf.zeros([self._shape[0] + 2], tf.float64)

  def catch_up(self, indices=None):
    """Brings rows up to date.

    Args:
      indices: A vector of row numbers; by default all rows.

    Returns:
      An operation in a graph, else None.
    """
    # Not autoclustered: before a session's initializers have run, the op has
    # nothing to do, but XLA would miss the values.
    with ops.device_of(self), _emit.compiled_where(False):
      return _raw.wrapopt_catch_up(
          [self._rows_handle], [self._value_handle],
          [self._log_decays_handle()], [] if indices is None else [indices],
          T=self._value_dtype, S=self._dtype)

  def _read_op(self, name=None):
    [value] = _raw.wrapopt_read_averages(
        [self._rows_handle], [self._value_handle], [self._log_decays_handle()],
        T=self._value_dtype, S=self._dtype, name=name)
    value.set_shape(self._shape)
    return value

  def _log_decays_handle(self):
    return self.log_decays.handle

  # Reading

  def read_value(self):
    """The average now: a tensor."""
    _absence.check(self.rows)
    if not tf.executing_eagerly():
      if save_context.in_save_context():
        return self._read_rows()
      graph = tf.compat.v1.get_default_graph()
      if not self.may_lag and not self._is_dense:
        self.let_lag()
      if self.may_lag and isinstance(graph, func_graph.FuncGraph):
        graph.mark_as_unsaveable(_NOT_SAVED)
    if not self.may_lag:
      return self._read_rows()
    with ops.device_of(self):
      return self._read_op()

  def _read_rows(self):
    with ops.device_of(self):
      value = tf.raw_ops.ReadVariableOp(resource=self._rows_handle,
                                        dtype=self._dtype)
    value.set_shape(self._shape)
    return value

  def value(self):
    """The average now: a tensor."""
    return self.read_value()

  def numpy(self):
    """In eager mode, the average now: an array."""
    if not tf.executing_eagerly():
      raise NotImplementedError("numpy() is only available in eager mode.")
    return self.read_value().numpy()

  def eval(self, session=None):
    """In a graph, the average in a session: an array."""
    return self._element.eval(session=session)

  def __array__(self, dtype=None, copy=None):
    del copy  # The array of a session or of numpy() may be read-only.
    return np.array(self.numpy(), dtype)

  def _as_graph_element(self):
    # For a session that fetches or feeds it.
    return self._element

  # Writing

  def assign(self, value, use_locking=None, name=None, read_value=True):
    """Sets the average, as `tf.Variable.assign`.

    Args:
      value: A tensor, or what can be converted to one.
      use_locking: Ignored.
      name: A name for the operation.
      read_value: Whether to return the new value in a graph.

    Returns:
      In a graph, the new value, or the operation; else the average itself.
    """
    del use_locking
    value = tf.convert_to_tensor(value, self._dtype)
    assigned = self._assign(value, name)
    if tf.executing_eagerly() or tf.compat.v1.get_default_graph(
        ).building_function:
      return self
    if not read_value:
      return assigned
    with tf.control_dependencies([assigned]):
      return self.read_value()

  def load(self, value, session=None):
    """In a graph, sets the average in a session, as `tf.Variable.load`.

    Args:
      value: An array.
      session: The session; by default the default session.
    """
    session = session or tf.compat.v1.get_default_session()
    if session is None:
      raise ValueError("load() needs a session or a default session, got None.")
    session.run(self.initializer, {self.initializer.inputs[1]: value})

  def _assign(self, value, name=None):
    if not self._shape.is_compatible_with(value.shape):
      raise ValueError(
          f"A value for '{self.name}' misshapen: got {value.shape} but "
          f"expected {self._shape}.")
    zeroed = []
    if self.may_lag and not (
        not tf.executing_eagerly() and save_context.in_save_context()):
      with ops.device_of(self):
        zeroed.append(tf.raw_ops.AssignVariableOp(
            resource=self._log_decays_handle(), value=self._zeros()))
    elif not tf.executing_eagerly():
      # The graph does not know of rows that lag behind later.
      self.keep_dense()
    with tf.control_dependencies([op for op in zeroed if op is not None]):
      with ops.device_of(self):
        return tf.raw_ops.AssignVariableOp(
            resource=self._rows_handle, value=value, name=name)

  def assign_add(self, delta, use_locking=None, name=None, read_value=True):
    """Adds to the average, as `tf.Variable.assign_add`."""
    return self.assign(self.read_value() + tf.cast(delta, self._dtype),
                       use_locking, name, read_value)

  def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
    """Subtracts from the average, as `tf.Variable.assign_sub`."""
    return self.assign(self.read_value() - tf.cast(delta, self._dtype),
                       use_locking, name, read_value)

  @property
  def initializer(self):
    return self._initializer_op

  def is_initialized(self, name=None):
    return tf.raw_ops.VarIsInitializedOp(resource=self._rows_handle, name=name)

  # The attributes that TensorFlow asks a variable for.

  @property
  def name(self):
    return f"{self._name}:0"

  @property
  def dtype(self):
    return self._dtype

  @property
  def shape(self):
    return self._shape

  @property
  def op(self):
    return self._element.op

  @property
  def graph(self):
    return self._rows_handle.graph

  @property
  def _in_graph_mode(self):
    return self._element is not None

  @property
  def _graph_key(self):
    return self.rows._graph_key

  def get_shape(self):
    return self.shape

  def _get_save_slice_info(self):
    return self._save_slice_info

  def ref(self):
    """A hashable reference, as `tf.Variable.ref`."""
    return object_identity.Reference(self)

  def __repr__(self):
    return (f"<LazyAverage '{self.name}' shape={self._shape} "
            f"dtype={self._dtype.name}>")

  def __getitem__(self, index):
    return self.read_value()[index]

  def __iter__(self):
    return iter(self.read_value())

  def __reduce__(self):
    # A copy is an average of nothing: a variable.
    if not tf.executing_eagerly():
      raise NotImplementedError(
          f"'{self.name}' can only be copied and pickled in eager mode.")
    return _variable, (self.numpy(), self._name)

  # tf.train.Checkpoint, and Savers.

  def _serialize_to_tensors(self):
    return {trackable.VARIABLE_VALUE_KEY: self.read_value()}

  def _restore_from_tensors(self, restored_tensors):
    return self._assign(restored_tensors[trackable.VARIABLE_VALUE_KEY])

  def _gather_saveables_for_checkpoint(self):
    info = self._save_slice_info
    return {trackable.VARIABLE_VALUE_KEY: lambda name=(
        info.full_name if info else self._name): Saveable(self, name)}

  def _copy_trackable_to_cpu(self, object_map):
    if self not in object_map:
      with tf.init_scope(), tf.device(ops.host_device(self.device)):
        object_map[self] = tf.Variable(
            tf.zeros(self._shape, self._dtype), trainable=False,
            name=self._name)
    object_map[self].assign(self.read_value())

  # tf.saved_model: the average is saved as a variable, and the functions that
  # are saved read it as one.

  @property
  def _should_act_as_resource_variable(self):
    # `init_from_checkpoint` and `warm_start` ask for this, and then treat it as
    # a Saver does. Others would take its handle.
    if save_context.in_save_context() or (
        sys._getframe(2).f_code is checkpoint_utils._is_variable.__code__):
      return True
    raise AttributeError("_should_act_as_resource_variable")

  def _export_to_saved_model_graph(self, object_map=None, tensor_map=None,
                                   options=None, **kwargs):
    exported = self.rows._export_to_saved_model_graph(
        object_map=object_map, tensor_map=tensor_map, options=options, **kwargs)
    object_map[self] = object_map[self.rows]
    return exported

  def _write_object_proto(self, proto, options):
    self.rows._write_object_proto(proto, options)
    proto.variable.name = self._name

  # The meta graph.

  def to_proto(self, export_scope=None):
    """None: the graph's collection of variables leaves it to another one."""
    del export_scope

  def to_own_proto(self, export_scope=None):
    """The average for a MetaGraphDef: a VariableDef, or None."""
    info = self._save_slice_info
    if export_scope and not self._name.startswith(export_scope):
      return None
    strip = lambda name: tf_ops.strip_name_scope(name, export_scope)
    return variable_pb2.VariableDef(
        variable_name=strip(self._rows_handle.name),
        snapshot_name=strip(self._element.name),
        initializer_name=strip(self._initializer_op.name), is_resource=True,
        save_slice_info_def=info and info.to_proto(export_scope))


class Saveable(saveable_object.SaveableObject):
  """A LazyAverage in a checkpoint."""

  def __init__(self, average, name):
    self.average = average
    info = average._get_save_slice_info()
    slice_spec = info.spec if info else ""
    element = average._as_graph_element()
    spec = saveable_object.SaveSpec(
        average.read_value if element is None else element, slice_spec, name,
        dtype=average._dtype, device=average.device)
    # The parts of a variable have one name in the file.
    super().__init__(average, [spec], f"{name} {slice_spec}".strip())

  def restore(self, restored_tensors, restored_shapes):
    [value] = restored_tensors
    if restored_shapes is not None:
      value = tf.reshape(value, restored_shapes[0])
    return self.average._assign(value)


def _variable(value, name):
  return tf.Variable(value, trainable=False, name=name)
