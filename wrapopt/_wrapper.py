"""What every wrapper around a `tf.compat.v1.train.Optimizer` shares."""

import contextlib
import operator

import tensorflow as tf


class WrapperOptimizer(tf.compat.v1.train.Optimizer):
  """Forwards the whole base interface to the optimizer that it wraps.

  To `tf.train.Checkpoint` the wrapper looks like the inner optimizer plus the
  slots that the wrapper adds: a checkpoint of the bare inner optimizer restores
  into the wrapper, and the other way round.
  """

  def __init__(self, opt, name):
    if not isinstance(opt, tf.compat.v1.train.Optimizer):
      raise TypeError(
          "`opt` must be a tf.compat.v1.train.Optimizer, got "
          f"{type(opt).__module__}.{type(opt).__qualname__}.")
    super().__init__(use_locking=False, name=name)
    self._optimizer = opt

  def compute_gradients(self, *args, **kwargs):
    """See `tf.compat.v1.train.Optimizer.compute_gradients` of the inner."""
    return self._optimizer.compute_gradients(*args, **kwargs)

  def minimize(self, loss, global_step=None, *args, **kwargs):
    """See `tf.compat.v1.train.Optimizer.minimize`."""
    with self._recording(loss, global_step):
      return super().minimize(loss, global_step, *args, **kwargs)

  def _recording(self, loss, global_step):
    """What gradients of `loss` for a step of `global_step` are computed in."""
    if isinstance(self._optimizer, WrapperOptimizer):
      return self._optimizer._recording(loss, global_step)
    return contextlib.nullcontext()

  def _replace_train_op(self, inner, outer):
    """Puts `outer` where the inner optimizer put `inner` as the TRAIN_OP."""
    train_ops = tf.compat.v1.get_collection_ref(
        tf.compat.v1.GraphKeys.TRAIN_OP)
    inner = getattr(inner, "op", inner)
    train_ops[:] = [op for op in train_ops if op is not inner] + [outer]

  def _create_slots(self, var_list):
    # For a wrapper around this one, which makes them before its `tf.cond`.
    self._optimizer._create_slots(var_list)

  # Slots: the wrapper's own are those in its `_slots`, all others are the
  # inner optimizer's.

  def _own_slot_names(self):
    return sorted(self._slots)

  def get_slot(self, var, name):
    """The slot `name` of `var`: the inner optimizer's, or the wrapper's own."""
    if name in self._own_slot_names():
      return super().get_slot(var, name)
    return self._optimizer.get_slot(var, name)

  def get_slot_names(self):
    """Names of the slots of the inner optimizer and of the wrapper."""
    return sorted({*self._optimizer.get_slot_names(), *self._own_slot_names()})

  def variables(self):
    """The state of the inner optimizer and of the wrapper in this graph."""
    own = super().variables()
    return sorted(self._optimizer.variables() + own, key=lambda v: v.name)

  # tf.train.Checkpoint. The inner optimizer is no child of the wrapper: its
  # slots would then be found twice, which TensorFlow refuses to save. Its
  # children and slots are the wrapper's instead.

  def _trackable_children(self, *args, **kwargs):
    return {**self._optimizer._trackable_children(*args, **kwargs),
            **super()._trackable_children(*args, **kwargs)}

  def _lookup_dependency(self, name, *args, **kwargs):
    found = super()._lookup_dependency(name, *args, **kwargs)
    if found is not None:
      return found
    return self._optimizer._lookup_dependency(name, *args, **kwargs)

  @property
  def _deferred_dependencies(self):
    # What a checkpoint holds for non-slot variables (Adam's beta powers) that
    # the inner optimizer has not made yet: it looks there when it makes them.
    self._optimizer._maybe_initialize_trackable()
    return self._optimizer._deferred_dependencies

  def _create_or_restore_slot_variable(self, slot_variable_position, slot_name,
                                       variable):
    owner = (super() if slot_name in self._own_slot_names()
             else self._optimizer)
    owner._create_or_restore_slot_variable(
        slot_variable_position=slot_variable_position, slot_name=slot_name,
        variable=variable)


def check_integer(subject, x):
  """`x` as an int; raises a TypeError if it is none, and no NumPy integer."""
  try:
    if not isinstance(x, bool):
      return operator.index(x)
  except TypeError:
    pass
  raise TypeError(f"`{subject}` must be an integer, got {x!r}.")


def variable_of(step):
  """The variable of `step`, where that is a tensor of one.

  `tf.compat.v1.train.get_global_step` gives a tensor where it finds a ref
  variable by its name only.

  Args:
    step: A step variable, or what the caller was given for one.

  Returns:
    The variable; `step` itself, if it is no tensor of a variable.
  """
  if isinstance(step, tf.Tensor) and not tf.executing_eagerly():
    for v in (*tf.compat.v1.global_variables(),
              *tf.compat.v1.local_variables()):
      if v.name == step.name:
        return v
  return step


def check_global_step(step):
  """The variable of `step`, if it is an integer; else raises a TypeError."""
  step = variable_of(step)
  if (not isinstance(step, tf.Variable) or
      step.dtype.base_dtype not in (tf.int32, tf.int64)):
    raise TypeError("`global_step` must be a variable of dtype int32 or int64, "
                    f"got {step!r}.")
  return step
