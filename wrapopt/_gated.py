"""A step that is taken only where a tensor says so."""

import contextlib

import tensorflow as tf

from wrapopt import _control_flow
from wrapopt import _fused

_Optimizer = tf.compat.v1.train.Optimizer


def apply_where(accept, opt, rule, grads_and_vars, transform, global_step,
                name, **kwargs):
  """Applies gradients with `opt` where `accept` is true, else changes nothing.

  Args:
    accept: A scalar bool tensor.
    opt: An optimizer that is no wrapper of this package.
    rule: Its `_fused.rule_of`, or None to leave the step to it.
    grads_and_vars: A list of (gradient, variable).
    transform: What becomes of an admitted gradient: a function of it, or None.
    global_step: The step variable.
    name: As in `tf.compat.v1.train.Optimizer.apply_gradients`.
    **kwargs: What else `opt.apply_gradients` takes.

  Returns:
    A list of the operations and tensors that are there when all is done, and
    whether `opt` increments the step itself.
  """
  create_slots(opt, grads_and_vars)
  if rule is not None and _fused.can_apply(grads_and_vars):
    done = _fused.apply_gradients(
        opt, rule,
        _fused.converted(hold_back(accept, grads_and_vars, transform)),
        lambda v: [], [], None, name, accept, **kwargs)
    return _present(done), False
  # An optimizer with a method of its own may want the step for more.
  increments = type(opt).apply_gradients is not _Optimizer.apply_gradients
  done = _control_flow.cond(accept, lambda: opt.apply_gradients(
      transformed(grads_and_vars, transform),
      global_step=global_step if increments else None, name=name, **kwargs),
                            any_ref(grads_and_vars))
  return _present(done), increments


def _present(done):
  return [] if done is None else [done]


def create_slots(opt, grads_and_vars):
  """Makes the slots of an optimizer before a branch of a `cond` does."""
  with _names_of_non_slots(), tf.init_scope():
    opt._create_slots([v for g, v in grads_and_vars if g is not None])


@contextlib.contextmanager
def _names_of_non_slots():
  # In TensorFlow 1.15 the branch of a cond made the inner optimizer's variables
  # that are no slots: checkpoints hold `cond/beta1_power`.
  if (tf.executing_eagerly() or
      tf.compat.v1.executing_eagerly_outside_functions() or
      tf.compat.v1.control_flow_v2_enabled()):
    yield
  else:
    with tf.name_scope("cond"):
      yield


def any_ref(grads_and_vars):
  return any(isinstance(v, tf.Variable) and not hasattr(v, "handle")
             for _, v in grads_and_vars)


# Gradients


def transformed(grads_and_vars, transform):
  if transform is None:
    return grads_and_vars
  return [(g if g is None else _on_device_of(g, transform), v)
          for g, v in grads_and_vars]


def hold_back(accept, grads_and_vars, transform):
  """Gradients for an op that ignores them where `accept` is false.

  A gradient that has to travel to the variable's machine does so only where it
  is admitted: else something empty goes in its place. On one machine it stays
  what it is, for there is nothing to save, unless it is to be transformed.

  Args:
    accept: A scalar bool tensor.
    grads_and_vars: A list of (gradient, variable).
    transform: As in `apply_where`.

  Returns:
    `grads_and_vars` with other gradients.
  """
  if tf.executing_eagerly():
    return transformed(grads_and_vars, transform)
  held = []
  for g, v in grads_and_vars:
    if g is not None and (transform is not None or _travels(g, v)):
      g = _on_device_of(g, lambda g: _held_back(accept, g, transform))
    held.append((g, v))
  return held


def _held_back(accept, g, transform):
  sparse = isinstance(g, tf.IndexedSlices)

  def admitted():
    h = transform(g) if transform else g
    return ([tf.identity(h.values), tf.identity(h.indices)] if sparse
            else [tf.identity(h)])

  def dropped():
    parts = (g.values, g.indices) if sparse else (g,)
    return [tf.zeros([0], part.dtype) for part in parts]

  # Not a shape that is known: there are two.
  parts = tf.cond(accept, admitted, dropped)
  if not sparse:
    return parts[0] if isinstance(parts, (list, tuple)) else parts
  return tf.IndexedSlices(*parts, dense_shape=g.dense_shape)


def _on_device_of(g, function):
  with tf.device(None), tf.device(g.device):
    return function(g)


def _travels(g, v):
  """Whether a gradient is on another machine of a cluster than its variable."""
  def task(device):
    spec = tf.DeviceSpec.from_string(device or "")
    return spec.job, spec.replica or 0, spec.task or 0
  home = task(v.device)
  return home[0] not in (None, "localhost") and task(g.device) != home
