"""Trains a classifier of handwritten digits, and averages its weights.

TensorFlow 1 code: a graph, a session, a Saver. A small convolutional net learns
scikit-learn's 1,797 scans of digits with momentum, in small batches and with a
learning rate that is too high to converge: the accuracy of the weights
fluctuates, and that of their averages is nearly stable. At the end
`swapping_saver` writes the averages under the names of the weights, and a plain
Saver restores them into another graph, which has no averages.
"""

import os
import sys
import time

import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _extras
from wrapopt.examples import _command
from wrapopt.examples import _results

tf1 = tf.compat.v1

_BATCH = 8
_LEARNING_RATE = 0.02
_MOMENTUM = 0.9
_DECAY = 0.99
_EVALUATIONS = 40


def load_digits(seed):
  """The scans as ((images, labels) to train on, (images, labels) held out)."""
  digits = _extras.load("sklearn.datasets").load_digits()
  images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
  labels = digits.target.astype(np.int32)
  train_x, test_x, train_y, test_y = _extras.load(
      "sklearn.model_selection").train_test_split(
          images, labels, test_size=1 / 3, random_state=seed, stratify=labels)
  return (train_x, train_y), (test_x, test_y)


def logits_of(images):
  """A net of two convolutions and two dense layers, [batch, 8, 8, 1] in."""

  def layer(name, x, shape, op):
    with tf1.variable_scope(name):
      kernel = tf1.get_variable(
          "kernel", shape,
          initializer=tf1.variance_scaling_initializer(2.0))
      bias = tf1.get_variable(
          "bias", shape[-1:], initializer=tf1.zeros_initializer())
      return op(x, kernel) + bias

  def convolution(x, kernel):
    return tf.nn.conv2d(x, kernel, strides=1, padding="SAME")

  x = tf.nn.relu(layer("conv1", images, [3, 3, 1, 16], convolution))
  x = tf.nn.max_pool2d(x, 2, 2, "VALID")
  x = tf.nn.relu(layer("conv2", x, [3, 3, 16, 32], convolution))
  x = tf.nn.max_pool2d(x, 2, 2, "VALID")
  x = tf.reshape(x, [-1, 2 * 2 * 32])
  x = tf.nn.relu(layer("dense1", x, [2 * 2 * 32, 64], tf.matmul))
  return layer("dense2", x, [64, 10], tf.matmul)


def accuracy_of(logits, labels):
  return float(np.mean(np.argmax(logits, axis=-1) == labels))


def train(data, held_out, steps, seed, checkpoint):
  """Trains, and saves the averaged model.

  Args:
    data: (images, labels) to train on.
    held_out: (images, labels) to evaluate on.
    steps: The number of optimizer steps.
    seed: The seed of the initial weights and the batches.
    checkpoint: The path of the checkpoint.

  Returns:
    A list of (step, raw accuracy, averaged accuracy); the averaged model's
    logits of the held-out images at the end; and whether the optimizer took the
    step and updated the averages in one pass.
  """
  tqdm = _extras.load("tqdm").tqdm
  rng = np.random.default_rng(seed)
  every = max(1, steps // _EVALUATIONS)
  curve = []
  with tf.Graph().as_default():
    tf1.set_random_seed(seed)
    images = tf1.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf1.placeholder(tf.int32, [None])
    logits = logits_of(images)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits))
    global_step = tf1.train.get_or_create_global_step()
    opt = wrapopt.MovingAverageOptimizer(
        tf1.train.MomentumOptimizer(_LEARNING_RATE, _MOMENTUM),
        average_decay=_DECAY, num_updates=global_step)
    train_op = opt.minimize(loss, global_step=global_step)
    saver = opt.swapping_saver()

    with tf1.Session() as session:
      session.run(tf1.global_variables_initializer())

      def evaluate():
        return session.run(logits, {images: held_out[0]})

      with tqdm(range(1, steps + 1), unit="step", file=sys.stderr) as progress:
        for step in progress:
          batch = rng.choice(len(data[0]), _BATCH, replace=False)
          session.run(train_op,
                      {images: data[0][batch], labels: data[1][batch]})
          if step % every == 0 or step == steps:
            raw = evaluate()
            with opt.averaged_weights(session):
              averaged = evaluate()
            curve.append((step, accuracy_of(raw, held_out[1]),
                          accuracy_of(averaged, held_out[1])))
            progress.set_postfix(raw=f"{curve[-1][1]:.2%}",
                                 averaged=f"{curve[-1][2]:.2%}")
      saver.save(session, checkpoint)
  return curve, averaged, opt.fused


def restore(images_held_out, checkpoint):
  """Logits of the saved model, in a graph without averages."""
  with tf.Graph().as_default():
    images = tf1.placeholder(tf.float32, [None, 8, 8, 1])
    logits = logits_of(images)
    with tf1.Session() as session:
      tf1.train.Saver().restore(session, checkpoint)
      return session.run(logits, {images: images_held_out})


def plot(curve, path):
  """Draws held-out accuracy, raw and averaged, over the steps."""
  _extras.load("matplotlib").use("Agg")
  plt = _extras.load("matplotlib.pyplot")
  steps, raw, averaged = zip(*curve)
  figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
  axes.plot(steps, 100 * np.array(raw), marker=".", color="tab:orange",
            label="raw weights")
  axes.plot(steps, 100 * np.array(averaged), marker=".", color="tab:blue",
            label=f"averaged weights (decay {_DECAY})")
  # Shows the range near the top; the first steps may be below.
  axes.set_ylim(bottom=max(0, 100 * np.quantile(raw + averaged, 0.1) - 4),
                top=100.5)
  axes.set_xlabel("optimizer steps")
  axes.set_ylabel("held-out accuracy (%)")
  axes.set_title("scikit-learn digits, momentum at a constant learning rate of "
                 f"{_LEARNING_RATE}")
  axes.grid(alpha=0.3)
  axes.legend(loc="lower right")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def print_table(curve, held_out):
  """Prints some rows of a curve, the last one too.

  Args:
    curve: A list of (step, raw accuracy, averaged accuracy).
    held_out: The number of held-out scans.
  """
  print(f"\naccuracy on {held_out} held-out scans")
  print(f"{'step':>8}  {'raw':>8}  {'averaged':>8}")
  stride = max(1, len(curve) // 8)
  for step, *both in curve[::-1][::stride][::-1]:
    print(f"{step:>8}  {both[0]:>8.2%}  {both[1]:>8.2%}")


def main(argv=None):
  start = time.perf_counter()
  parser = _command.parser("digits", __doc__)
  parser.add_argument("--steps", type=_command.count, default=2000,
                      help="steps of the optimizer; default %(default)s")
  _command.add_out(parser, "digits")
  _command.add_seed(parser)
  options = parser.parse_args(argv)
  _command.prepare(options.out, "matplotlib", "sklearn", "tqdm")
  checkpoint = os.path.join(options.out, "model.ckpt")

  data, held_out = load_digits(options.seed)
  curve, averaged_logits, fused = train(
      data, held_out, options.steps, options.seed, checkpoint)
  restored_logits = restore(held_out[0], checkpoint)
  if not np.array_equal(restored_logits, averaged_logits):
    difference = np.abs(restored_logits - averaged_logits).max()
    sys.exit(f"The model restored from {checkpoint} is not the averaged one: "
             f"logits differ by {difference}")

  _, raw, averaged = curve[-1]
  restored = accuracy_of(restored_logits, held_out[1])
  curves = os.path.join(options.out, "curves.png")
  plot(curve, curves)
  results = {
      "raw_accuracy": raw,
      "averaged_accuracy": averaged,
      "restored_accuracy": restored,
      "steps": options.steps,
      "seed": options.seed,
      "fused": fused,
      "seconds": round(time.perf_counter() - start, 2),
      "images": {"trained_on": len(data[0]), "held_out": len(held_out[0])},
      "curve": [dict(zip(("step", "raw", "averaged"), row)) for row in curve],
  }
  results_path = _results.write(options.out, results, tf, np)

  print_table(curve, len(held_out[0]))
  print(f"\nThe averaged model, restored by a plain Saver: {restored:.2%}, "
        "logits equal bit for bit.")
  print(f"{curves}\n{results_path}\n{checkpoint}.*")


if __name__ == "__main__":
  main()
