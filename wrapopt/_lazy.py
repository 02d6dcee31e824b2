"""Averages whose rows lag behind until a step touches them or somebody reads.

A step by a sparse gradient, of an optimizer that changes no other row, moves the
average of the others towards a constant. So it leaves them alone, and they make
up for it later: see `wrapopt.ops.catch_up`.
"""

import threading
import weakref

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import resource_variable_ops

from wrapopt import ops

# Made outside of a tf.function, and while one is traced.
_PLAIN = (resource_variable_ops.ResourceVariable,
          polymorphic_function.UnliftedInitializerVariable)


# Held while an average is made lazy.
_lock = threading.Lock()


def watch(average, variable):
  """Makes it possible for an average of `variable` to be lazy.

  Args:
    average: A variable that nothing in a graph or `tf.function` has read.
    variable: A variable.
  """
  if (type(average) in _PLAIN and type(variable) in _PLAIN and
      average.shape.is_fully_defined() and average.shape.rank and
      _has_kernels(average.device)):
    # The slot of an optimizer is made by TensorFlow.
    average.__class__ = LazyAverage
    average._watch(variable)


def _has_kernels(device):
  return tf.DeviceSpec.from_string(device).device_type in (None, "CPU", "GPU")


def begin(averages):
  """Makes averages of one variable lazy, where they can be.

  Returns:
    The log decays of each, or None.
  """
  with _lock:
    if not all(isinstance(s, LazyAverage) and s.can_be_lazy()
               for s in averages):
      return None
    return [s.begin() for s in averages]


def is_lazy(average):
  """Whether rows of an average may lag behind."""
  return isinstance(average, LazyAverage) and average.log_decays is not None


def catch_up(averages, variable, indices=None):
  """Brings lazy averages of a variable up to date.

  Args:
    averages: LazyAverages.
    variable: Their variable.
    indices: The rows that must be; by default all.

  Returns:
    As `wrapopt.ops.catch_up`.
  """
  return ops.catch_up(
      averages, [variable] * len(averages), [s.log_decays for s in averages],
      () if indices is None else [indices] * len(averages))


def settle(averages, variable):
  """Brings those averages of a variable up to date that are lazy.

  For a step that changes all of its rows.

  Returns:
    Operations of a graph that must run before the step: a list.
  """
  lazy = [s for s in averages if is_lazy(s)]
  done = catch_up(lazy, variable) if lazy else None
  return [] if done is None else [done]


class LazyAverage(resource_variable_ops.ResourceVariable):
  """An average that is up to date for all who take its handle.

  That is whatever reads or writes a variable: `tf.Variable`'s methods, savers,
  checkpoints, other ops. Only the steps that move some rows take the handle
  without that, as `_handle`.

  Attributes:
    log_decays: A variable that tells by how much each row lags behind, or None
      as long as no step has moved single rows. No checkpoint has it: what is
      saved has caught up.
  """

  any_is_lazy = False  # Whether there is or was one anywhere that is lazy.

  def _watch(self, variable):
    self._variable = weakref.ref(variable)
    self.log_decays = None
    # Whether a graph holds an op that counts on all rows to be up to date.
    self._is_dense = False

  def can_be_lazy(self):
    """Whether `begin` may be called."""
    return self.log_decays is not None or not self._is_dense

  def begin(self):
    """Lets rows lag behind from now on. Returns `log_decays`."""
    if self.log_decays is None:
      LazyAverage.any_is_lazy = True
      with tf.init_scope(), ops.device_of(self), tf.compat.v1.name_scope(None):
        with ops.host_of(self):
          zeros = tf.zeros([self.shape[0] + 1], tf.float64)
        # Where it has no value, as in a graph whose initializers and savers do
        # not know it, it counts as zeros.
        self.log_decays = resource_variable_ops.ResourceVariable(
            zeros, trainable=False, name=f"{self._shared_name}/log_decays", **(
                {} if tf.executing_eagerly() else {"collections": []}))
      if not tf.executing_eagerly():
        self._refer_to_caught_up()
    return self.log_decays

  def catch_up(self):
    """Brings all rows up to date: an operation in a graph, else None."""
    variable = self._variable()
    if variable is None:
      raise RuntimeError(
          f"The average '{self.name}' cannot be read: its variable is gone, and "
          "with it what rows that no step touched would move towards.")
    return catch_up([self], variable)

  def _refer_to_caught_up(self):
    # What a session runs for the variable itself.
    with tf.init_scope():
      self._graph_element = tf.raw_ops.ReadVariableOp(
          resource=self.handle, dtype=self.dtype)
    self._graph_element.set_shape(self.shape)
    # A Saver then reads and restores by the handle, not by that.
    if self._get_save_slice_info() is None:
      self._set_save_slice_info(_Whole(
          self._shared_name, self.shape.as_list(), [0] * self.shape.rank,
          self.shape.as_list()))

  @property
  def handle(self):
    handle = self._handle
    if self.log_decays is None:
      self._is_dense |= not tf.executing_eagerly()
      return handle
    caught_up = self.catch_up()
    # In a tf.function, ops that share a handle run in the order of the program.
    if (tf.executing_eagerly() or
        tf.compat.v1.get_default_graph()._add_control_dependencies):
      return handle
    with tf.control_dependencies([caught_up]), ops.device_of(self):
      result = tf.identity(handle)
    result._handle_data = handle._handle_data
    return result

  # These change nothing and read nothing.

  @property
  def device(self):
    return self._handle.device

  @property
  def graph(self):
    return self._handle.graph

  @property
  def op(self):
    return self._handle.op

  def is_initialized(self, name=None):
    return tf.raw_ops.VarIsInitializedOp(resource=self._handle, name=name)


class _Whole(tf.Variable.SaveSliceInfo):
  """All of a variable as a slice, which a Saver writes as a whole."""

  @property
  def spec(self):
    return ""
