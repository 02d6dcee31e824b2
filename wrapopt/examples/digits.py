"""Trains a classifier of handwritten digits, and averages its weights.

TensorFlow 1 code: a graph, a session, a Saver. A small convolutional net learns
scikit-learn's 1,797 scans of digits with momentum, in small batches and with a
learning rate that is too high to converge: the accuracy of the weights
fluctuates, and that of their averages is nearly stable. At the end
`swapping_saver` writes the averages under the names of the weights, and a plain
Saver restores them into another graph, which has no averages.
"""

import tensorflow as tf

import wrapopt
from wrapopt.examples import _report
from wrapopt.examples import _tasks

tf1 = tf.compat.v1

MEASURES = {"accuracy (%)": lambda logs: 100 * logs["accuracy"]}
TITLE = "scikit-learn digits, momentum at a constant learning rate"
SHOWN = (0.1, 1)


def train(data, held_out, steps, seed, checkpoint):
  """Trains, and saves the averaged model.

  Args:
    data: (images, labels) to train on.
    held_out: (images, labels) to evaluate on.
    steps: The number of optimizer steps.
    seed: The seed of the initial weights and the batches.
    checkpoint: The path of the checkpoint.

  Returns:
    A list of rows as of `_tasks.show_curve`; the averaged model's logits of the
    held-out images at the end; and whether the optimizer took the step and
    updated the averages in one pass.
  """
  points, rows = _report.points(steps, 40), []
  with tf.Graph().as_default():
    tf1.set_random_seed(seed)
    net = _tasks.GraphNet(data, held_out, 8, seed)
    global_step = tf1.train.get_or_create_global_step()
    opt = wrapopt.MovingAverageOptimizer(
        tf1.train.MomentumOptimizer(0.02, 0.9), average_decay=0.99,
        num_updates=global_step)
    train_op = opt.minimize(net.loss, global_step)
    saver = opt.swapping_saver()

    with tf1.Session() as session:
      session.run(tf1.global_variables_initializer())
      for step in _report.progress(range(1, steps + 1)):
        net.train(session, train_op)
        if step in points:
          raw = net.accuracy(session)
          with opt.averaged_weights(session):
            averaged, outputs = net.accuracy(session), net.outputs(session)
          rows.append({"step": step, "raw": {"accuracy": raw},
                       "averaged": {"accuracy": averaged}})
      saver.save(session, checkpoint)
  return rows, outputs, opt.fused


def restore(inputs, checkpoint):
  """Logits of the saved model, in a graph without averages."""
  with tf.Graph().as_default(), tf1.Session() as session:
    logits = _tasks.logits_of(tf.constant(inputs))
    tf1.train.Saver().restore(session, checkpoint)
    return session.run(logits)


def run(out="results/digits", steps=2000, seed=0):
  checkpoint = str(out / "model.ckpt")
  data, held_out = _tasks.load_digits(seed)
  rows, averaged, fused = train(data, held_out, steps, seed, checkpoint)
  _tasks.check_restored(checkpoint, restore(held_out[0], checkpoint), averaged)
  _tasks.show_curve(rows, MEASURES, TITLE, out, SHOWN)
  print(f"A plain Saver restores the averaged model, bit for bit, from\n"
        f"{checkpoint}")
  return {"fused": fused, "curve": rows}


main = _report.command("digits", __doc__, run)

if __name__ == "__main__":
  main()
