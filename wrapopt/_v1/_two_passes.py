"""Steps between z and x where no native op takes them."""

import contextlib

import tensorflow as tf

from wrapopt._averages import _replicas
from wrapopt._averages import _two_passes

_train = tf.compat.v1.train

# The tensor that TensorFlow's optimizers make of their learning rate.
_RATES = {_train.AdamOptimizer: "_lr_t"}
_RATE = "_learning_rate_tensor"


def apply_interpolated(opt, step):
  """Lets an optimizer take its step from z, which the variables hold meanwhile.

  Args:
    opt: The inner optimizer.
    step: A `_step.Step` with `points`.

  Returns:
    What its `apply_gradients` returns, or an operation.
  """
  points, schedule = step.points, step.points.schedule
  if schedule.replaces_momentum and getattr(opt, "_beta1", 0):
    raise NotImplementedError(
        "In a CentralStorageStrategy or a TPUStrategy, the AdamOptimizer of a "
        f"ScheduleFreeOptimizer must have beta1=0, got {opt._beta1}.")
  if tf.distribute.in_cross_replica_context():
    return opt.apply_gradients(step.grads_and_vars)  # TensorFlow refuses it.
  pairs = [(g, v) for g, v in step.grads_and_vars if g is not None]
  replicas = _two_passes.replicas_of(
      [v for _, v in pairs], points.z, points.state, schedule,
      [schedule.weight_decay_at_y] * len(pairs))
  rate = _RATES.get(type(opt), _RATE)

  # Of all replicas, the functions of the first one run.

  def begin():
    opt._prepare()
    share = points.settle(_replicas.values(points.state)[0].read_value())
    with tf.control_dependencies([] if tf.executing_eagerly() else [share]):
      motions = [schedule.motion(replica.read(), getattr(opt, rate), share)
                 for replica in replicas]
    return _two_passes.group(
        replica.begin(motion) for replica, motion in zip(replicas, motions)
    ), motions[0].rate

  def end():
    return _two_passes.group(replica.end() for replica in replicas)

  # Where the gradients were taken, the variables hold z soon.
  with tf.control_dependencies([] if tf.executing_eagerly() else
                               tf.nest.flatten([g for g, _ in pairs],
                                               expand_composites=True)):
    begun, now = _replicas.merged(begin)()
  with tf.control_dependencies([] if begun is None else [begun]), (
      _with_rate(opt, rate, now)):
    # y moves in all rows: the step of a sparse gradient is the dense one.
    try:
      applied = opt.apply_gradients(
          [(tf.convert_to_tensor(g), v) for g, v in pairs], step.global_step,
          step.name, **step.options)
    except BaseException:
      for replica in replicas if tf.executing_eagerly() else ():
        replica.undo()
      raise
  with tf.control_dependencies([] if applied is None else [applied]):
    return _replicas.merged(end)()


@contextlib.contextmanager
def _with_rate(opt, name, now):
  """Lets an optimizer take its step by another learning rate: `now`."""
  prepare = opt._prepare

  def prepared():
    prepare()
    dtype = tf.convert_to_tensor(getattr(opt, name)).dtype
    setattr(opt, name, tf.cast(now, dtype))

  vars(opt)["_prepare"] = prepared
  try:
    yield
  finally:
    vars(opt).pop("_prepare", None)
