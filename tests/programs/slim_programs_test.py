"""Programs of tf_slim, audited."""

import importlib
import sys

import foreign  # Finds the packages. pylint: disable=unused-import

import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import auditor
from auditor import MovingAverage, Stack

# TensorFlow 2.21 looks for the layers of batch_norm where tf_keras was before.
for name in ("", ".base", ".normalization"):
  sys.modules[f"tf_keras.legacy_tf_layers{name}"] = importlib.import_module(
      f"tf_keras.src.legacy_tf_layers{name}")

# tf_slim takes these from there.
ops.Tensor, ops.IndexedSlices = tf.Tensor, tf.IndexedSlices

import tf_slim as slim  # pylint: disable=g-import-not-at-top

tf1 = tf.compat.v1
train = tf1.train
tf1.disable_v2_behavior()  # As tf_slim's programs do.
STEPS = 6


@pytest.fixture
def kind(request):
  """Makes variables of a kind, "ref" or "resource"."""
  if request.param == "resource":
    tf1.enable_resource_variables()
  yield
  tf1.disable_resource_variables()


def loss_of_network():
  """A small convolutional network, as in slim's examples."""
  x = tf1.random.stateless_uniform(
      [4, 8, 8, 3], [0, tf.cast(train.get_or_create_global_step(), tf.int32)])
  with slim.arg_scope(
      [slim.conv2d, slim.fully_connected], normalizer_fn=slim.batch_norm,
      weights_regularizer=slim.l2_regularizer(0.01)):
    net = slim.conv2d(x, 4, 3, scope="conv")
    net = slim.max_pool2d(net, 2, scope="pool")
    net = slim.flatten(net)
    net = slim.fully_connected(net, 5, scope="hidden")
  logits = slim.fully_connected(net, 2, activation_fn=None, scope="logits")
  tf1.losses.sparse_softmax_cross_entropy([0, 1, 1, 0], logits)
  return tf1.losses.get_total_loss()


OPTIMIZERS = {
    "SGD": lambda: train.GradientDescentOptimizer(
        train.exponential_decay(0.1, train.get_global_step(), 2, 0.5)),
    "Momentum": lambda: train.MomentumOptimizer(0.05, 0.5),
    "Adam": lambda: train.AdamOptimizer(0.01),
    "RMSProp": lambda: train.RMSPropOptimizer(0.01, momentum=0.5),
    "ProximalAdagrad": lambda: train.ProximalAdagradOptimizer(0.05),
}
STACKS = {"MovingAverage": Stack(average=MovingAverage()),
          "update_every": Stack(average=MovingAverage(update_every=2)),
          "not fused": Stack(average=MovingAverage(fused=False))}


def train_op_of(watch, make):
  loss = loss_of_network()
  return slim.learning.create_train_op(
      loss, watch.wrap(make()), clip_gradient_norm=0.5,
      global_step=train.get_global_step())


def in_a_session(watch, make, folder):
  del folder
  train_op = train_op_of(watch, make)
  watch.prepare()
  with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    watch.begin(session)
    for _ in range(STEPS):
      session.run(train_op)
      watch.see(session)


def in_slims_loop(watch, make, folder):
  train_op = train_op_of(watch, make)
  watch.prepare()
  begun = []

  def step(session, *args):
    if not begun:
      begun.append(watch.begin(session))
    done = slim.learning.train_step(session, *args)
    watch.see(session)
    return done

  slim.learning.train(train_op, folder, step, number_of_steps=STEPS,
                      save_summaries_secs=0, save_interval_secs=1000)


def in_a_monitored_session(watch, make, folder):
  train_op = train_op_of(watch, make)
  slim.training.train(train_op, folder, hooks=[
      watch.hook(), train.StopAtStepHook(num_steps=STEPS)])


@pytest.mark.parametrize("kind", ["resource", "ref"], indirect=True)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_create_train_op(make, stack, kind, tmp_path):
  del kind
  auditor.audit_in_graph(
      lambda watch: in_a_session(watch, OPTIMIZERS[make], tmp_path),
      STACKS[stack])


@pytest.mark.parametrize("loop", [in_slims_loop, in_a_monitored_session])
@pytest.mark.parametrize("make", ["SGD", "Adam"])
def test_training_loop(make, loop, tmp_path):
  folders = iter([tmp_path / "wrapped", tmp_path / "plain"])
  auditor.audit_in_graph(
      lambda watch: loop(watch, OPTIMIZERS[make], str(next(folders))),
      STACKS["MovingAverage"])
