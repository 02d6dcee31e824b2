"""Says whether the wrapopt that is installed in this Python works.

Usage: wheel_smoke.py FOLDER_OF_THE_PACKAGE

In that folder, and nowhere else, wrapopt must be. Each public function runs its
example, each rule a step, each optimizer its own, and the raw ops work in a
process that does not import wrapopt. Any Python and any TensorFlow that the
wheel is for may run this; it needs nothing else.
"""

import doctest
import importlib.metadata
import os
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf

import wrapopt
from wrapopt import _native

# Away from this process, which has wrapopt's Python functions.
RAW_OPS = """
import sys
import tensorflow as tf
ops = tf.load_op_library(sys.argv[1])
value, shadow = tf.Variable([8.0, 4.0]), tf.Variable([0.0, 0.0])
ops.wrapopt_ema_update([shadow.handle, value.handle], decays=[0.75], N=1, NK=1,
                       T=tf.float32, S=tf.float32)
assert shadow.numpy().tolist() == [2.0, 1.0], shadow
assert "wrapopt" not in sys.modules
"""


def run_examples():
  """Runs what the docstrings of all functions and optimizers show."""
  shown = ""
  runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
  for module in wrapopt, wrapopt.ops:
    for name in module.__all__:
      for test in doctest.DocTestFinder(recurse=False).find(
          getattr(module, name), name, globs={"tf": tf, "wrapopt": wrapopt}):
        shown += "".join(example.source for example in test.examples)
        runner.run(test)
  assert runner.failures == 0
  missing = [name for name in wrapopt.ops.__all__
             if name != "StalenessVerdict" and f"ops.{name}(" not in shown]
  assert not missing, f"no example of {missing} ran"


def run_rules():
  """Takes a step of each rule, with an average of the new variable."""
  for rule, info in _native.rules().items():
    if not info.is_update:
      continue
    states = {name: [tf.Variable([1.0, 2.0] if name == "var" else [0.1, 0.1])]
              for name in info.states}
    shadow = tf.Variable([0.0, 0.0])
    scalars = {name: 0.5 for name in info.scalars if not name.endswith("?")}
    wrapopt.ops.apply(rule, states, [tf.constant([1.0, 1.0])], scalars,
                      shadows=[shadow], decay=0.5)
    new = states["var"][0].numpy()
    assert (new != [1, 2]).any() and np.isfinite(new).all(), (rule, new)
    np.testing.assert_array_equal(shadow, new / 2, rule)


def run_session():
  """Trains with ref variables, and saves the averages."""
  with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
    var = tf.compat.v1.get_variable("var", initializer=[0.0],
                                    use_resource=False)
    opt = wrapopt.MovingAverageOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(1.0), average_decay=0.5)
    train = opt.minimize(-tf.reduce_sum(var))
    with tf.compat.v1.Session() as session:
      session.run(tf.compat.v1.global_variables_initializer())
      session.run(train)
      session.run(train)
      # var goes 1, 2 and its average 0.5, 1.25.
      path = opt.swapping_saver().save(session, os.path.join(folder, "model"))
    reader = tf.train.load_checkpoint(path)
    assert reader.get_tensor("var").tolist() == [1.25]
    assert reader.get_tensor("var/ExponentialMovingAverage").tolist() == [2.0]


def run_keras():
  """Fits a Keras model with each wrapper, compiled by XLA and not."""
  import keras  # pylint: disable=g-import-not-at-top
  import wrapopt.keras  # pylint: disable=g-import-not-at-top
  x = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
  lazy_adam = wrapopt.keras.LazyAdam(0.1)
  for wrapper in (lambda opt: wrapopt.keras.MovingAverage(opt, 0.5),
                  lambda _: lazy_adam.from_config(lazy_adam.get_config()),
                  lambda opt: wrapopt.keras.PrimalAverage(opt, 0.5, 0.5),
                  wrapopt.keras.Lookahead, wrapopt.keras.ScheduleFree,
                  wrapopt.keras.SWA):
    for jit_compile in False, True:
      model = keras.Sequential([keras.layers.Dense(1)])
      model.compile(wrapper(keras.optimizers.Adam(0.1)), "mse",
                    jit_compile=jit_compile)
      losses = model.fit(x, x.sum(axis=1), epochs=3, verbose=0).history["loss"]
      assert losses[-1] < losses[0], losses
  optimizer = wrapopt.keras.DropStaleGradient(keras.optimizers.SGD(1.0), 1)
  var = keras.Variable([1.0])
  with optimizer.record_step():
    grad = tf.constant([0.25])
  optimizer.apply([grad], [var])
  assert var.numpy().tolist() == [0.75], var


def main():
  (folder,) = sys.argv[1:]
  package = os.path.dirname(os.path.realpath(wrapopt.__file__))
  assert package == os.path.join(os.path.realpath(folder), "wrapopt"), package
  assert importlib.metadata.version("wrapopt") == wrapopt.__version__
  run_examples()
  run_rules()
  run_session()
  run_keras()
  subprocess.run([sys.executable, "-c", RAW_OPS, wrapopt.sysconfig.get_lib()],
                 check=True)
  import keras  # pylint: disable=g-import-not-at-top
  names = importlib.metadata.packages_distributions()["tensorflow"]
  versions = [f"{n} {importlib.metadata.version(n)}"
              for n in sorted(set(names))]
  print(*versions, f"Keras {keras.__version__}",
        f"Python {sys.version.split()[0]}", sep=", ")


if __name__ == "__main__":
  main()
