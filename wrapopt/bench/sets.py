"""Sets of variables of the benchmarks, and their numbers."""

import math

import numpy as np
import tensorflow as tf


def _resnet50():
  """Shapes of the 161 trainable variables of ResNet-50, in layer order.

  He et al., "Deep residual learning for image recognition", 2015, table 1, for
  ImageNet's 1000 classes: 53 convolutions without bias, each with the gamma and
  beta of its batch normalization, and the kernel and bias of the dense layer,
  25,557,032 numbers together. These are the shapes in
  `tf.keras.applications.ResNet50`, less the biases that Keras gives its
  convolutions.
  """
  shapes = []

  def conv(size, inputs, outputs):
    shapes.extend([(size, size, inputs, outputs), (outputs,), (outputs,)])

  conv(7, 3, 64)
  inputs = 64
  for filters, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
    for block in range(blocks):
      if block == 0:
        conv(1, inputs, 4 * filters)  # The shortcut.
      conv(1, inputs, filters)
      conv(3, filters, filters)
      conv(1, filters, 4 * filters)
      inputs = 4 * filters
  return shapes + [(inputs, 1000), (1000,)]


def _bert_base():
  """Shapes of the 199 variables of BERT-base, 109,482,240 numbers together.

  Devlin et al., "BERT: pre-training of deep bidirectional transformers for
  language understanding", 2018: 12 layers of width 768, 3072 inside, a
  vocabulary of 30522 word pieces, 512 positions, 2 segments, and the pooler.
  """
  width, inside = 768, 3072
  norm = [(width,), (width,)]
  dense = [(width, width), (width,)]
  layer = (4 * dense + norm +
           [(width, inside), (inside,), (inside, width), (width,)] + norm)
  return ([(30522, width), (512, width), (2, width)] + norm + 12 * layer +
          dense)


VARIABLE_SETS = {
    "2x4096x4096": [(4096, 4096)] * 2, "resnet50": _resnet50(),
    "400x256": [(256,)] * 400, "bert-base": _bert_base()}


def sizes(shapes):
  """Numbers of elements of `shapes`."""
  return [math.prod(shape) for shape in shapes]


def described(name):
  """The title of a set of variables."""
  shapes = VARIABLE_SETS[name]
  return f"{name}: {len(shapes)} variables, {sum(sizes(shapes)):,} numbers"


def numbers(shape, seed):
  """Numbers in [0.1, 1), the same in every call, so that no page is zero."""
  return tf.random.stateless_uniform(shape, seed, 0.1, 1)


def filled(rows, seeds):
  """An op that assigns fixed numbers to rows of variables, one by one.

  So arrays are made in the order of those of the streaming limit.
  """
  done = []
  for row, seed in zip(rows, seeds):
    for i, v in enumerate(row):
      with tf.control_dependencies(done):
        assigned = v.assign(numbers(v.shape, (seed, i)))
      if not tf.executing_eagerly():
        done = [assigned.op]
  return done


def streams(shapes, count):
  """Arrays for `StreamLimit`, made in the same way as TensorFlow's variables.

  The location of memory affects its speed. So all arrays are made by the same
  ops, in the same order.

  Args:
    shapes: Shapes.
    count: A number.

  Returns:
    So many lists of arrays, with one for each shape.
  """
  with tf.device("/cpu:0"):
    rows = [[numbers(shape, (row, i)) for i, shape in enumerate(shapes)]
            for row in range(count)]
  # Without copies.
  return [[np.frombuffer(memoryview(x), np.float32) if 0 not in x.shape
           else np.zeros(0, np.float32) for x in row] for row in rows]
