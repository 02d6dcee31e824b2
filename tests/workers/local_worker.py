"""A worker of a `local_job.Job`, in a process of its own."""

import hashlib
import json
import os
import time
import typing

import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt._local import _layout
from wrapopt._local import _server

SHAPES = (1000,), (3, 4), ()
# Of a sample: what each of two servers has.
PARTS = slice(3), slice(3, None)


class Settings(typing.NamedTuple):
  """Those of a job.

  Attributes:
    servers: Their addresses.
    folder: That of the files.
    num_workers: The number of workers.
    steps: The number of inner steps of a round, of the slowest workers.
    step_secs: How long these sleep in each, as if another device computed.
    start_secs: How long each process sleeps first, as if it had to import
      TensorFlow.
    saves: Whether the job has checkpoints, one for each round.
    algorithm: The name of a class of `wrapopt`.
    options: Arguments of that class.
  """
  servers: list
  folder: str
  num_workers: int
  steps: int = 1
  step_secs: float = 0
  start_secs: float = 0
  saves: bool = False
  algorithm: str = "DiLoCo"
  options: dict = {}


def delta(name):
  """How far a worker goes in each round."""
  rng = np.random.default_rng([*name.encode()])
  return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def sample(values):
  """Some of the numbers: three of the first server, four of the second."""
  return np.float64([*values[0][:3], *values[0][-3:], values[2]])


def weight(name):
  """How fast a worker is, compared with the slowest."""
  return 1 + int(name[1:]) % 2


def checksum(values):
  return hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()


def model_and_fit(sleep):
  """A model of variables of SHAPES, and a function that moves them in `fit`."""
  import keras  # pylint: disable=g-import-not-at-top
  import wrapopt.keras  # pylint: disable=g-import-not-at-top,redefined-outer-name

  class Product(keras.layers.Layer):

    def build(self, input_shape):
      self.all = [self.add_weight(shape, "zeros") for shape in SHAPES]

    def call(self, x):
      flat = [keras.ops.reshape(w, [-1]) for w in self.all]
      return keras.ops.sum(x * keras.ops.concatenate(flat), axis=-1)

  size = sum(int(np.prod(shape)) for shape in SHAPES)
  model = keras.Sequential([keras.Input([size]), Product()])
  # Gradient descent adds the batch to the variables.
  model.compile(keras.optimizers.SGD(1.0), lambda y, p: -p)
  callbacks = [keras.callbacks.LambdaCallback(
      on_train_batch_begin=lambda batch, logs: sleep())]

  def fit(local, steps, distance):
    if len(callbacks) == 1:
      callbacks.append(
          wrapopt.keras.LocalRounds(local, leave_at_end=False))
    x = np.concatenate([np.ravel(d) for d in distance]) / steps
    model.fit(np.tile(x, [steps, 1]), np.zeros(steps), 1, verbose=0,
              callbacks=callbacks)

  return model.trainable_variables, fit


def run(name, job):
  """Takes part in rounds until there is a file `stop`.

  Its log has a line of JSON when it has started, and for each round.

  Args:
    name: The worker.
    job: The Settings.
  """
  begun = time.monotonic()
  time.sleep(job.start_secs)
  log = os.open(os.path.join(job.folder, f"{name}.log"),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND)

  def note(**facts):
    values = [v.numpy() for v in variables]
    member = local._exchanges.fragments[0].member
    line = {"name": name, "place": member.place, "time": time.monotonic(),
            "checksum": checksum(values), "sample": sample(values).tolist(),
            **facts}
    os.write(log, (json.dumps(line) + "\n").encode())

  # So that each server gets the values in several parts.
  _layout.PIECE = 256
  _server._FIRST_BYTES = _server._MOST_BYTES = 1024
  steps = job.steps * weight(name)
  clock = {}

  def sleep():
    """Until the step is over, which began when the last one was."""
    clock["next"] += job.step_secs / weight(name)
    time.sleep(max(clock["next"] - time.monotonic(), 0))

  distance = delta(name)
  variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
  fit = None
  if name == "w1":
    variables, fit = model_and_fit(sleep)
  checkpoints = os.path.join(job.folder, "checkpoints")
  local = getattr(wrapopt, job.algorithm)(
      variables, job.servers, name, job.num_workers, sync_every=steps,
      resume=True, checkpoint=checkpoints if job.saves else None,
      **job.options)
  step = local.step
  if weight(name) % 2:  # Some workers train in a function.
    step = tf.function(step)

  def take_part():
    if not local.holds_center():  # Else `fit` would take another one later.
      local.take_center()
    clock["next"] = time.monotonic()
    if fit:
      return fit(local, steps, distance)
    for _ in range(steps):
      sleep()
      for v, d in zip(variables, distance):
        v.assign_add(d / steps)
      step()

  manager = tf.train.CheckpointManager(
      tf.train.Checkpoint(local=local), checkpoints, 2)
  note(begun=begun)
  stop = os.path.join(job.folder, "stop")
  while True:
    take_part()
    report = local.report
    note(counted=bool(report.counted), workers=sorted(report.workers),
         secs=report.secs)
    if job.saves and name == "w0":
      round_ = local.round
      manager.save()
      note(saved=round_)
    if os.path.exists(stop):
      break
    time.sleep(0.02)
