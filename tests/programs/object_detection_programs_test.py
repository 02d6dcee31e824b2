"""The optimizer builder of the object detection API, and its own tests.

The package is for TensorFlow 1, and imports its `contrib`.
"""

import os

# Its messages were compiled by a protoc that is too old for others.
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"

# pylint: disable=g-import-not-at-top,wrong-import-position
import types
import unittest

import foreign  # Finds the packages. pylint: disable=unused-import

from google.protobuf import text_format
from object_detection.builders import optimizer_builder
from object_detection.builders import optimizer_builder_test
from object_detection.protos import optimizer_pb2
from object_detection.utils import learning_schedules
import pytest
import tensorflow as tf

import auditor
import wrapopt

tf1 = tf.compat.v1
tf1.disable_v2_behavior()

# The change that a user makes: `tf.contrib.opt` is wrapopt.
TENSORFLOW_1 = types.SimpleNamespace(
    **vars(tf1), contrib=types.SimpleNamespace(opt=wrapopt))
for module in (optimizer_builder, optimizer_builder_test, learning_schedules):
  module.tf = TENSORFLOW_1
learning_schedules.range = lambda *args: list(range(*args))  # As in Python 2.

CASES = [
    (case, name) for case in vars(optimizer_builder_test).values()
    if isinstance(case, type) and issubclass(case, unittest.TestCase)
    for name in unittest.TestLoader().getTestCaseNames(case)
    if name != "test_session"]


@pytest.mark.parametrize("case, name", CASES, ids=lambda x: getattr(
    x, "__name__", x))
def test_of_the_package(case, name):
  with tf.Graph().as_default():
    result = unittest.TestResult()
    case(name).run(result)
  assert result.testsRun and not result.skipped
  problems = [text for _, text in [*result.errors, *result.failures]]
  assert not problems, problems[0]


@pytest.mark.parametrize("optimizer", [
    "rms_prop_optimizer: {momentum_optimizer_value: 0.5 decay: 0.9 "
    "epsilon: 1.0 learning_rate: {exponential_decay_learning_rate: {"
    "initial_learning_rate: 0.05 decay_steps: 2 decay_factor: 0.5}}}",
    "momentum_optimizer: {momentum_optimizer_value: 0.5 learning_rate: {"
    "manual_step_learning_rate: {initial_learning_rate: 0.05 "
    "schedule: {step: 2 learning_rate: 0.01}}}}",
    "adam_optimizer: {learning_rate: {cosine_decay_learning_rate: {"
    "learning_rate_base: 0.01 total_steps: 10 warmup_steps: 2 "
    "warmup_learning_rate: 0.001}}}"], ids=["RMSProp", "Momentum", "Adam"])
def test_steps(optimizer, monkeypatch):
  """Trains with what the builder makes, with its moving average."""
  stack = auditor.Stack(average=auditor.MovingAverage())
  config = text_format.Parse(
      optimizer + f"use_moving_average: true moving_average_decay: "
      f"{stack.average.decay}", optimizer_pb2.Optimizer())

  def program(watch):
    # The builder wraps the optimizer: the watch does it in its place.
    monkeypatch.setattr(
        TENSORFLOW_1.contrib, "opt", types.SimpleNamespace(
            MovingAverageOptimizer=lambda opt, average_decay: watch.wrap(opt)))
    step = tf1.train.get_or_create_global_step()
    x = tf.random.stateless_uniform([4, 3], [0, tf.cast(step, tf.int32)])
    w = tf1.get_variable("w", [3, 2])
    b = tf1.get_variable("b", [2], initializer=tf1.zeros_initializer())
    opt, _ = optimizer_builder.build(config)
    train_op = opt.minimize(
        tf.reduce_mean(tf.tanh(x @ w + b) ** 2), global_step=step)
    watch.prepare()
    with tf1.Session() as session:
      session.run(tf1.global_variables_initializer())
      watch.begin(session)
      for _ in range(6):
        session.run(train_op)
        watch.see(session)

  auditor.audit_in_graph(program, stack)
