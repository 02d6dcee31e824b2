"""The tasks of a cluster that loses a parameter server in a step."""

import threading

import keras
import tensorflow as tf

import wrapopt
import wrapopt.keras as wk

K = keras.optimizers
LIMIT = 90  # Seconds, of which none needs as many.

# By name: a function of the rate.
OPTIMIZERS = {
    "Keras": K.SGD,
    "MovingAverage": lambda rate: wk.MovingAverage(K.SGD(rate), 0.5),
    "several_ops": lambda rate: wk.MovingAverage(K.Nadam(rate), 0.5),
    "SWA": lambda rate: wk.SWA(K.SGD(rate), 0, 1),
    "Lookahead": lambda rate: wk.Lookahead(K.SGD(rate), 2),
    "ScheduleFree": lambda rate: wk.ScheduleFree(K.SGD(rate)),
    "gate": lambda rate: wk.DropStaleGradient(K.SGD(rate), 100),
    "gate_of_several_ops": lambda rate: wk.DropStaleGradient(
        K.Nadam(rate), 100),
    "v1": lambda rate: wrapopt.MovingAverageOptimizer(
        tf.compat.v1.train.AdamOptimizer(lambda: rate(0)), 0.5),
}


@keras.saving.register_keras_serializable("tests")
class Held(K.schedules.LearningRateSchedule):
  """A rate for which a step waits, when it has its number and its lock."""

  def __init__(self, device):
    self._device = device
    with tf.device(device):
      self.begun, self.rates = (tf.queue.FIFOQueue(100, [tf.float32], [[]])
                                for _ in range(2))

  def __call__(self, step):
    with tf.device(None), tf.device(self._device), tf.control_dependencies(
        [tf.convert_to_tensor(step)]), tf.control_dependencies(
            [self.begun.enqueue(0.0)]):
      return self.rates.dequeue()

  def let(self, steps):
    """Lets some steps be taken."""
    self.rates.enqueue_many(tf.fill([steps], 0.5))


class Training:
  """An optimizer of two variables, on two servers, and its steps."""

  def __init__(self, spec, kind, remaining):
    self._strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), rpc_layer="grpc"))
    self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
        self._strategy)
    self.held = Held(f"/job:ps/task:{remaining}/device:CPU:0")
    with self._strategy.scope():
      values = [tf.Variable(x) for x in ([1.0, 2.0], [3.0])]
      self._opt = OPTIMIZERS[kind](self.held)
      if kind == "v1":
        self._count = tf.Variable(0, dtype=tf.int64)
      else:
        self._opt.build(values)
        self._count = self._opt.iterations.value
    # With the lock and the gate.
    assert self._count.device.endswith("/task:0/device:CPU:0")
    assert len({v.device for v in values}) == 2
    self._checkpoint = tf.train.Checkpoint(
        opt=self._opt, count=self._count,
        **{f"v{i}": v for i, v in enumerate(values)})

    def take():
      if isinstance(self._opt, wk.DropStaleGradient):
        with self._opt.record_step():
          gradients = [tf.ones_like(v) for v in values]
      else:
        gradients = [tf.ones_like(v) for v in values]
      if kind == "v1":
        self._opt.apply_gradients(zip(gradients, values), self._count)
      else:
        self._opt.apply(gradients, values)

    self._step = tf.function(lambda: self._strategy.run(take))

  def schedule(self, steps):
    for _ in range(steps):
      self._coordinator.schedule(self._step)

  def join(self):
    """Waits for the steps; returns the error with which they end, or None."""
    ends = []

    def join():
      try:
        self._coordinator.join()
        ends.append(None)
      except tf.errors.OpError as e:
        ends.append(e)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert ends, "The coordinator waits."
    return ends[0]

  def write(self, path):
    with self._strategy.scope():
      self._checkpoint.write(path)

  def read(self, path):
    with self._strategy.scope():
      self._checkpoint.read(path).assert_existing_objects_matched()

  def state(self):
    """The number of steps, and those of all variables, with their names."""
    return int(self._count), [
        (v.name, v.numpy().tolist()) for v in tf.train.TrackableView(
            self._checkpoint).descendants() if isinstance(v, tf.Variable)]


def lose(task, kind, server, path):
  """Takes four steps, and loses a server in the next ones.

  Returns:
    The state in the checkpoint, and the errors of these steps and of others.
  """
  training = Training(task.spec, kind, 1 - server)
  training.held.let(4)
  training.schedule(4)
  assert training.join() is None
  training.write(path)
  state = training.state()
  training.held.begun.dequeue_many(training.held.begun.size())
  training.schedule(4)
  training.held.begun.dequeue()
  task.report("A step has its lock.")
  ends = [training.join()]
  training.held.let(8)
  training.schedule(4)
  ends.append(training.join())
  return state, [type(e).__name__ for e in ends]


def resume(task, kind, server, path):
  """Restores the checkpoint, in another process, and takes four steps.

  Returns:
    The states before and after.
  """
  training = Training(task.spec, kind, 1 - server)
  training.read(path)
  states = [training.state()]
  training.held.let(4)
  training.schedule(4)
  error = training.join()
  if error is not None:
    raise error
  return [*states, training.state()]


FUNCTIONS = (lose, resume)
