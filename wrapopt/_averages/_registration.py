"""Conversions, gradients and graphs of LazyAverages, for TensorFlow."""

import contextlib
import sys

import tensorflow as tf
from tensorflow.core.framework import variable_pb2
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.framework import tensor as tf_tensor
from tensorflow.python.framework import tensor_conversion_registry

from wrapopt._averages import _lazy


class _Imported(_lazy.LazyAverage):
  """A LazyAverage of an imported graph, whose variables are not known."""

  may_lag = True

  # pylint: disable-next=super-init-not-called
  def __init__(self, proto, import_scope=None):
    graph = tf.compat.v1.get_default_graph()
    find = lambda name: graph.as_graph_element(
        tf_ops.prepend_name_scope(name, import_scope))
    self._element = find(proto.snapshot_name)
    self._initializer_op = find(proto.initializer_name)
    self._rows_handle, self._value_handle, self._sums_handle = (
        self._element.op.inputs)
    self.rows = None
    self._dtype, self._shape = self._element.dtype, self._element.shape
    self._value_dtype = self._element.op.get_attr("T")
    self.device = self._element.device
    self._name = self._element.op.name
    self._is_dense = False
    self._save_slice_info = (tf.Variable.SaveSliceInfo(
        save_slice_info_def=proto.save_slice_info_def,
        import_scope=import_scope)
                        if proto.HasField("save_slice_info_def") else None)
    tf.compat.v1.add_to_collection(
        tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, self)

  def _log_decays_handle(self):
    return self._sums_handle


def _add_operators():
  """Adds the operators of tensors, like those of `tf.Variable`."""
  def of_value(name):
    function = getattr(tf_tensor.Tensor, name)
    return lambda self, *args: function(self.read_value(), *args)

  for name in tf_tensor.Tensor.OVERLOADABLE_OPERATORS:
    # Averages are compared by identity, because they are in sets and dicts.
    if name not in ("__getitem__", "__eq__", "__ne__"):
      setattr(_lazy.LazyAverage, name, of_value(name))


_add_operators()


def _to_tensor(average, dtype=None, name=None, as_ref=False):
  del name
  if as_ref and not tf.executing_eagerly():
    # What tf.gradients differentiates with respect to: the same tensor for all
    # reads.
    return average._rows_handle
  if dtype is not None and not dtype.is_compatible_with(average._dtype):
    raise ValueError(
        f"'{average.name}' must be converted to {average._dtype.name}, its "
        f"dtype, got {dtype.name}. Use tf.cast.")
  return average.read_value()


tensor_conversion_registry.register_tensor_conversion_function(
    _lazy.LazyAverage, _to_tensor)


def _from_proto(proto, import_scope=None):
  # The class of the module that is imported now.
  return sys.modules[__name__]._Imported(proto, import_scope)


def _read_averages_gradient(op, *grads):
  """The gradients of averages with respect to their handles are themselves."""
  return [*grads, *[None] * (len(op.inputs) - len(grads))]


# In these registries, a name can be registered once in a process: not again by
# a module that is reloaded, or imported after it left `sys.modules`.
with contextlib.suppress(KeyError):
  tf_ops.register_proto_function(
      _lazy.COLLECTION, proto_type=variable_pb2.VariableDef,
      to_proto=lambda average, export_scope=None: average.to_own_proto(
          export_scope), from_proto=_from_proto)
with contextlib.suppress(KeyError):
  tf.RegisterGradient("Wrapopt>ReadAverages")(_read_averages_gradient)
