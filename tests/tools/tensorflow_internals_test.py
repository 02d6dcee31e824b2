"""The names of TensorFlow and Keras that wrapopt uses beyond the public API.

This file is the list, with one test for each name. A new minor version of
TensorFlow or Keras shows here what has moved. The last tests compare the list
with the sources. For C++, the compiler finds changes; see cc/README.md.
"""

import ast
import functools
import glob
import importlib
import inspect
import io
import operator
import os
import re
import sys

import keras
import pytest
import tensorflow as tf

import wrapopt
import wrapopt.keras

tf1 = tf.compat.v1

# {a module, or a name in one: the names in it that are used}
IMPORTS = {
    "keras.src.backend": ["name_scope"],
    "keras.src.backend.common.global_state": ["get_global_attribute"],
    "keras.src.models.functional": ["Functional"],
    "keras.src.saving.keras_saveable.KerasSaveable": [],
    "keras.src.saving.saving_lib": ["H5IOStore", "_save_state"],
    "keras.src.utils.python_utils": ["is_default", "pythonify_logs"],
    "tensorflow.core.framework.op_def_pb2": ["OpList.FromString"],
    "tensorflow.core.framework.variable_pb2": ["VariableDef"],
    "tensorflow.core.protobuf.trackable_object_graph_pb2": [
        "TrackableObjectGraph.FromString"],
    "tensorflow.python.client.pywrap_tf_session": [
        "TF_GetAllOpList", "TF_GetBuffer"],
    "tensorflow.python.data.experimental.ops.testing": ["sleep"],
    "tensorflow.python.distribute.coordinator.cluster_coordinator": [
        "Closure.execute_on.__code__"],
    "tensorflow.python.distribute.mirrored_strategy": ["MirroredExtended"],
    "tensorflow.python.distribute.one_device_strategy": ["OneDeviceExtended"],
    "tensorflow.python.distribute.parameter_server_strategy_v2": [
        "ParameterServerStrategyV2"],
    "tensorflow.python.distribute.ps_values": [
        "AggregatingVariable", "CachingVariable"],
    "tensorflow.python.distribute.sharded_variable": ["ShardedVariable"],
    "tensorflow.python.distribute.values_util": [
        "get_current_replica_id_as_int"],
    "tensorflow.python.eager.context": ["anonymous_name"],
    "tensorflow.python.eager.polymorphic_function.polymorphic_function": [
        "UnliftedInitializerVariable"],
    "tensorflow.python.eager.record": ["VariableWatcher"],
    "tensorflow.python.framework.auto_control_deps": [
        "register_acd_resource_resolver"],
    "tensorflow.python.framework.func_graph": ["FuncGraph"],
    "tensorflow.python.framework.kernels": ["get_registered_kernels_for_op"],
    "tensorflow.python.framework.ops": [
        "EagerTensor", "colocate_with", "prepend_name_scope",
        "register_proto_function", "strip_name_scope"],
    "tensorflow.python.framework.tensor": ["Tensor.OVERLOADABLE_OPERATORS"],
    "tensorflow.python.framework.tensor_conversion_registry": [
        "register_tensor_conversion_function"],
    "tensorflow.python.ops.cond_v2": ["cond_v2"],
    "tensorflow.python.ops.control_flow_ops": ["CondContext"],
    "tensorflow.python.ops.control_flow_v2_func_graphs": [
        "CondBranchFuncGraph", "WhileBodyFuncGraph"],
    "tensorflow.python.ops.control_flow_util": ["GraphOrParentsInXlaContext"],
    "tensorflow.python.ops.resource_variable_ops": [
        "BaseResourceVariable", "ResourceVariable"],
    "tensorflow.python.ops.variable_scope": ["_get_default_variable_store"],
    "tensorflow.python.saved_model.save_context": ["in_save_context"],
    "tensorflow.python.tpu.tpu_function": ["get_tpu_context"],
    "tensorflow.python.trackable.base": ["Trackable", "VARIABLE_VALUE_KEY"],
    "tensorflow.python.training.checkpoint_utils": ["_is_variable.__code__"],
    "tensorflow.python.training.optimizer": ["_var_key"],
    "tensorflow.python.training.saving.saveable_object": [
        "SaveSpec", "SaveableObject"],
    "tensorflow.python.training.saving.saveable_object_util": [
        "op_list_to_dict"],
    "tensorflow.python.util.object_identity": ["Reference"],
    "tensorflow.python.util.pywrap_xla_ops": ["get_cpu_kernel_names"],
}


def prepared(make):
  """An optimizer of tf.compat.v1.train, as it is while it takes a step."""
  opt = make()
  opt.apply_gradients([(tf.constant([1.0]), tf.Variable([1.0]))])
  return opt


def graph_operation():
  with tf.Graph().as_default():
    return tf.constant(1.0).op


def ref_variable(partitioned=False):
  with tf.Graph().as_default():
    partitioner = tf1.fixed_size_partitioner(2) if partitioned else None
    return tf1.get_variable("v", [2], use_resource=False,
                            partitioner=partitioner)


def variable_store():
  module = importlib.import_module("tensorflow.python.ops.variable_scope")
  with tf.Graph().as_default():
    return module._get_default_variable_store()


def replica_context():
  strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
  return strategy.run(tf.distribute.get_replica_context)


def built(opt):
  opt.build([keras.Variable([1.0])])
  return opt


def in_keras_model():
  model = keras.Sequential([keras.layers.BatchNormalization()])
  model.build((None, 2))
  return model


# {how an owner is made: its attributes that are used}
ATTRIBUTES = {
    lambda: prepared(lambda: tf1.train.GradientDescentOptimizer(0.1)): [
        "_get_or_make_slot", "_get_or_make_slot_with_initializer",
        "_handle_deferred_dependencies", "_learning_rate_tensor",
        "_maybe_initialize_trackable", "_non_slot_dict", "_non_slot_variables",
        "_prepare", "_restore_slot_variable", "_slot_dict", "_use_locking",
        "_zeros_slot"],
    lambda: prepared(lambda: tf1.train.MomentumOptimizer(0.1, 0.9)): [
        "_learning_rate_tensor", "_momentum_tensor", "_use_nesterov"],
    lambda: prepared(lambda: tf1.train.AdamOptimizer(0.1)): [
        "_beta1", "_beta1_t", "_beta2_t", "_epsilon_t",
        "_get_beta_accumulators", "_lr_t"],
    lambda: prepared(lambda: tf1.train.AdadeltaOptimizer(0.1)): [
        "_epsilon_t", "_lr_t", "_rho_t"],
    lambda: prepared(lambda: tf1.train.RMSPropOptimizer(0.1)): [
        "_centered", "_decay_tensor", "_epsilon_tensor", "_momentum",
        "_momentum_tensor"],
    lambda: prepared(lambda: tf1.train.FtrlOptimizer(
        0.1, l2_shrinkage_regularization_strength=0.1)): [
            "_adjusted_l2_regularization_strength_tensor",
            "_l1_regularization_strength_tensor", "_learning_rate_power",
            "_l2_shrinkage_regularization_strength",
            "_l2_shrinkage_regularization_strength_tensor"],
    lambda: importlib.import_module(
        "tensorflow.python.training.optimizer"): ["_var_key"],
    lambda: importlib.import_module(
        "tensorflow.python.training.checkpoint_utils"): ["_is_variable"],
    lambda: importlib.import_module("tensorflow.python.ops.variable_scope"): [
            "_get_default_variable_store"],
    lambda: tf1.train.GradientDescentOptimizer(0.1): [
        "_create_non_slot_variable"],
    lambda: keras.Variable([1.0]): ["_initialize"],
    lambda: importlib.import_module("keras.src.saving.saving_lib"): [
        "_save_state"],
    lambda: importlib.import_module("keras.src.saving.saving_lib").H5IOStore(
        io.BytesIO(), mode="w"): [
            "_create_h5_group", "_h5_entry_group", "_h5_entry_initialized",
            "_h5_entry_path"],
    lambda: tf.constant(1.0): ["_datatype_enum"],
    lambda: tf.float32: ["_is_ref_dtype"],
    tf.Graph: ["_attr_scope_map", "_get_control_flow_context", "_get_function"],
    graph_operation: ["_add_control_inputs", "_clear_attr",
                      "_get_control_flow_context", "_id",
                      "_is_stateful", "_set_attr", "_set_device",
                      "_update_input"],
    ref_variable: ["_get_save_slice_info", "_initial_value",
                   "_initializer_op", "_ref", "_snapshot"],
    lambda: ref_variable(partitioned=True): ["_get_variable_list"],
    variable_store: ["_vars"],
    lambda: tf.Variable(1.0): ["_gather_saveables_for_checkpoint",
                               "_shared_name"],
    tf.train.Checkpoint: ["_update_uid"],
    replica_context: ["_replica_id_in_sync_group"],
    lambda: built(keras.optimizers.Adam(amsgrad=True, weight_decay=0.1)): [
        "_all_reduce_sum_gradients", "_apply_weight_decay",
        "_backend_increment_gradient_accumulators", "_backend_update_step",
        "_distribution_strategy", "_get_current_learning_rate",
        "_get_variable_index", "_iterations",
        "_momentums",
        "_overwrite_variable_with_gradient", "_track_trackable",
        "_trainable_variables", "_untrack_variable", "_use_weight_decay",
        "_var_key", "_velocities", "_velocity_hats"],
    lambda: built(keras.optimizers.Adagrad()): ["_accumulators"],
    lambda: built(keras.optimizers.RMSprop(centered=True)): [
        "_average_gradients"],
    lambda: built(keras.optimizers.SGD(use_ema=True)): [
        "_model_variables_moving_average"],
    lambda: in_keras_model().layers[0]: [
        "_post_untrack_variable", "_reduction_axes"],
    in_keras_model: ["_flatten_layers", "_get_metrics_result_or_logs",
                     "_metrics", "_trainable_variables"],
}

# Private methods and properties of base classes that classes of wrapopt
# override: {name of the base class: their names}.
OVERRIDES = {
    "tensorflow.python.client.session.BaseSession": {"_do_call"},
    "keras.src.saving.keras_saveable.KerasSaveable": {"_obj_type"},
    "tensorflow.python.distribute.distribute_lib.ReplicaContextBase": {
        "_merge_call"},
    "tensorflow.python.trackable.autotrackable.AutoTrackable": {
        "_trackable_children"},
    "tensorflow.python.trackable.base.Trackable": {
        "_copy_trackable_to_cpu", "_deferred_dependencies",
        "_export_to_saved_model_graph", "_gather_saveables_for_checkpoint",
        "_lookup_dependency", "_restore_from_tensors", "_serialize_to_tensors",
        "_trackable_children"},
    "tensorflow.python.training.optimizer.Optimizer": {
        "_apply_sparse_duplicate_indices", "_create_or_restore_slot_variable",
        "_create_slots", "_lookup_dependency",
        "_resource_apply_sparse_duplicate_indices", "_trackable_children"},
}

# Attributes of what is not TensorFlow's.
_OTHERS = {"_asdict", "_current_frames", "_exit", "_foreach_lerp_", "_getframe",
           "_replace", "_wrapopt_handles", "_wrapopt_left", "_wrapopt_other",
           "_wrapopt_weights"}


@pytest.mark.parametrize("name", IMPORTS)
def test_import(name):
  try:
    owner = importlib.import_module(name)
  except ModuleNotFoundError:
    module, _, attribute = name.rpartition(".")
    owner = getattr(importlib.import_module(module), attribute)
  for used in IMPORTS[name]:
    assert operator.attrgetter(used)(owner) is not None


@pytest.mark.parametrize("owner, name", [
    pytest.param(owner, name, id=name)
    for owner, names in ATTRIBUTES.items() for name in names])
def test_attribute(owner, name):
  assert hasattr(owner(), name)


def overrides():
  """As OVERRIDES, of all classes of wrapopt."""
  classes = set()
  for module in list(sys.modules.values()):
    if module.__name__.startswith("wrapopt"):
      classes.update(thing for thing in vars(module).values()
                     if inspect.isclass(thing)
                     and thing.__module__.startswith("wrapopt"))
  found = {}
  for cls in classes:
    for base in cls.__mro__:
      if base.__module__.startswith(("tensorflow.", "keras.")):
        names = {name for name in vars(cls) if name in vars(base)
                 and name.startswith("_") and not name.startswith("__")
                 and name != "_abc_impl"}  # Python's, of each abstract class.
        if names:
          found.setdefault(f"{base.__module__}.{base.__name__}",
                           set()).update(names)
  return found


def test_keyword_of_evaluate():
  """EvaluateWithAverages evaluates the validation data of fit again."""
  source = inspect.getsource(inspect.unwrap(keras.Model.evaluate))
  assert "_use_cached_eval_dataset" in source


# A base class that no longer has the method calls it no more.
def test_overrides():
  assert overrides() == OVERRIDES


@functools.cache
def trees():
  folder = os.path.dirname(wrapopt.__file__)
  found = []
  for path in glob.glob(os.path.join(folder, "**", "*.py"), recursive=True):
    with open(path, encoding="utf-8") as f:
      found.append(ast.parse(f.read()))
  assert len(found) > 30
  return found


def nodes(*kinds):
  for tree in trees():
    for node in ast.walk(tree):
      if isinstance(node, kinds):
        yield node


def test_all_imports_are_listed():
  used = {}
  for tree in trees():
    imported = {alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] in ("keras", "tensorflow")
                for alias in node.names}
    for name in imported.values():
      used.setdefault(name, set())
    for node in ast.walk(tree):
      if isinstance(node, ast.Attribute):
        owner, _, name = ast.unparse(node).partition(".")
        if owner in imported and re.fullmatch(r"[\w.]+", name):
          used[imported[owner]].add(name)
  # Without a name whose attribute is in the list, such as `A` of `A.b`.
  assert {owner: sorted(x for x in names
                        if not any(y.startswith(f"{x}.") for y in names))
          for owner, names in used.items()} == IMPORTS
  for node in nodes(ast.Import):
    for alias in node.names:
      assert "." not in alias.name or alias.name.split(".")[0] not in (
          "keras", "tensorflow") or alias.name == "tensorflow.compat.v1", (
              alias.name)


def test_all_attributes_are_listed():
  # What wrapopt defines itself is its own, though TensorFlow may have the like.
  own = {node.name for node in nodes(ast.FunctionDef, ast.ClassDef)}
  own |= {node.id for node in nodes(ast.Name)
          if isinstance(node.ctx, ast.Store)}
  own |= {alias.asname or alias.name for node in nodes(ast.ImportFrom)
          for alias in node.names}
  own |= {node.attr for node in nodes(ast.Attribute)
          if isinstance(node.ctx, ast.Store)
          and ast.unparse(node.value) in ("self", "cls")}
  used = {node.attr for node in nodes(ast.Attribute)
          if node.attr.startswith("_") and not node.attr.startswith("__")}
  listed = {name for names in ATTRIBUTES.values() for name in names}
  missing = used - own - listed - _OTHERS
  assert not missing, f"used, and not in ATTRIBUTES: {sorted(missing)}"
  assert not listed - used, "in ATTRIBUTES, and not used"
