"""Schedule-Free learning where no native op takes the step."""

import contextlib

import tensorflow as tf

from wrapopt._averages import _replicas
from wrapopt._averages import _schedule_free

_train = tf.compat.v1.train

# The tensor that TensorFlow's optimizers make of their learning rate.
_RATES = {_train.AdamOptimizer: "_lr_t"}
_RATE = "_learning_rate_tensor"


def apply_schedule_free(opt, step):
  """Lets an optimizer take its step from z, which the variables hold meanwhile.

  Args:
    opt: The inner optimizer.
    step: A `_step.Step` with `points`.

  Returns:
    What its `apply_gradients` returns, or an operation.
  """
  if getattr(opt, "_beta1", 0):
    raise NotImplementedError(
        "In a CentralStorageStrategy or a TPUStrategy, the AdamOptimizer of a "
        f"ScheduleFreeOptimizer must have beta1=0, got {opt._beta1}.")
  if tf.distribute.in_cross_replica_context():
    return opt.apply_gradients(step.grads_and_vars)  # TensorFlow refuses it.
  points, schedule = step.points, step.points.schedule
  pairs = [(g, v) for g, v in step.grads_and_vars if g is not None]
  # Of each replica: variables, their z, and the state of the schedule.
  replicas = [_Replica(*parts, schedule) for parts in zip(
      zip(*(_replicas.values(v) for _, v in pairs)),
      zip(*map(_replicas.values, points.z)), _replicas.values(points.state))]
  rate = _RATES.get(type(opt), _RATE)

  # Of all replicas, the functions of the first one run.

  def begin():
    opt._prepare()
    begun = _group([replica.begin(getattr(opt, rate)) for replica in replicas])
    return begun, replicas[0].motion.rate

  def end():
    return _group([replica.end() for replica in replicas])

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


class _Replica:
  """The variables of a replica in a step."""

  def __init__(self, variables, z, state, schedule):
    self._pairs = list(zip(variables, z))
    self._state, self._schedule = state, schedule
    self.motion = None
    self._before = []

  def begin(self, learning_rate):
    state = self._state.read_value()
    self.motion = self._schedule.motion(state, learning_rate)
    read = [(v.read_value(), z.read_value()) for v, z in self._pairs]
    self._before = read
    done = []
    for (v, z), (y, z_value) in zip(self._pairs, read):
      x = _schedule_free.x_of(y, z_value, state[_schedule_free.WEIGHT])
      start = _schedule_free.start(y, z_value, self.motion,
                                   self._schedule.weight_decay_at_y)
      with tf.control_dependencies(
          [] if tf.executing_eagerly() else [x, start]):
        done += [z.assign(x, read_value=False),
                 v.assign(start, read_value=False)]
    return _group(done)

  def undo(self):
    """In eager mode, undoes `begin`, if it has run."""
    for (v, z), (y, z_value) in zip(self._pairs, self._before):
      v.assign(y)
      z.assign(z_value)

  def end(self):
    read = [(z.read_value(), v.read_value()) for v, z in self._pairs]
    done = []
    for (v, z), (x, z_value) in zip(self._pairs, read):
      y = _schedule_free.y_of(x, z_value, self.motion, self._schedule.momentum)
      with tf.control_dependencies(
          [] if tf.executing_eagerly() else [y, z_value]):
        done += [v.assign(y, read_value=False),
                 z.assign(tf.identity(z_value), read_value=False)]
    done.append(self._state.assign(self.motion.state, read_value=False))
    return _group(done)


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


def _group(operations):
  operations = [op for op in operations if op is not None]
  return (None if tf.executing_eagerly() or not operations
          else tf.group(*operations))
