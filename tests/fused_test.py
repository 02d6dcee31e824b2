"""One pass and two: the same numbers, from different ops."""

import numpy as np
import pytest
import tensorflow as tf

import wrapopt
from training import MODES
from training import train

v1 = tf.compat.v1.train

INNER = {
    "Adadelta": lambda: v1.AdadeltaOptimizer(200.0, epsilon=0.01),
    "Adagrad": lambda: v1.AdagradOptimizer(0.5),
    # Of few bits: the stock optimizer rounds the betas and their powers to the
    # variable's dtype, in which 1 - 0.999 may be nothing.
    "Adam": lambda: v1.AdamOptimizer(0.5, 0.5, 0.75, epsilon=0.01),
    "CenteredRMSProp": lambda: v1.RMSPropOptimizer(
        0.5, momentum=0.25, centered=True, epsilon=0.01),
    "Ftrl": lambda: v1.FtrlOptimizer(
        0.5, l1_regularization_strength=0.1, l2_regularization_strength=0.2,
        l2_shrinkage_regularization_strength=0.3),
    "GradientDescent": lambda: v1.GradientDescentOptimizer(0.5),
    "Momentum": lambda: v1.MomentumOptimizer(0.5, 0.75),
    "Momentum, Nesterov": lambda: v1.MomentumOptimizer(
        lambda: 0.5, 0.75, use_nesterov=True),
    "RMSProp": lambda: v1.RMSPropOptimizer(0.5, momentum=0.25, epsilon=0.01),
}
DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
STEPS = 5


def cases(inner):
  """{name: initial value} for each dtype and each kind of gradient."""
  start = np.array([[1.0, -0.5], [2.0, 3.0], [-1.5, 0.25]])
  return {
      f"{kind}_{dtype.name}": start.astype(dtype.as_numpy_dtype)
      for kind in ("dense", "sparse", "none") for dtype in DTYPES
      # The stock optimizer has no such kernel to compare with.
      if not (kind == "sparse" and dtype == tf.bfloat16 and "RMS" in inner)}


def gradients(initial):
  rng = np.random.default_rng(0)
  def one(name):
    kind, dtype = name.split("_")
    rows = rng.uniform(-2, 2, (3, 2)).astype(tf.as_dtype(dtype).as_numpy_dtype)
    return {"dense": rows, "none": None,
            # Row 2 has two gradients, row 1 none.
            "sparse": (rows, np.array([2, 0, 2], np.int32))}[kind]
  return [{name: one(name) for name in initial} for _ in range(STEPS)]


def close(got, want):
  """Within the roundings of all steps, each some ten of them."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype and got.shape == want.shape
  eps = float(np.finfo(np.float32).eps if got.dtype.itemsize == 4 else
              np.finfo(np.float64).eps if got.dtype.itemsize == 8 else
              tf.as_dtype(got.dtype).max and 2.0**(
                  -10 if got.dtype == np.float16 else -7))
  tolerance = 10 * STEPS * eps * max(1.0, np.abs(np.float64(want)).max())
  # A sixteen-bit stock optimizer rounds each operation; ours, the result.
  np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=0,
                             atol=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", INNER)
def test_the_numbers_of_both_are_the_same(inner, mode):
  initial = cases(inner)
  steps = gradients(initial)

  def run(fused):
    return train(mode, lambda step: wrapopt.MovingAverageOptimizer(
        INNER[inner](), [0.5, 0.9], num_updates=step, fused=fused), initial,
                 steps)

  one, two = run(True), run(False)
  assert one.optimizer.fused and not two.optimizer.fused
  for got, want in zip(one.values, two.values, strict=True):
    for g, w in zip(got, want, strict=True):
      close(g, w)
  for attribute in ("slots", "others"):
    for got, want in zip(getattr(one, attribute), getattr(two, attribute),
                         strict=True):
      assert got.keys() == want.keys()
      for key in want:
        close(got[key], want[key])
  if mode == "eager":
    return
  rule, ref = inner.split(",")[0], "Ref" if mode == "ref" else ""
  for kind in ("", "Sparse"):
    dtypes = [n for n in initial if n.startswith(kind.lower() or "dense")]
    assert one.op_types.count(f"Wrapopt>{kind}Apply{rule}{ref}") == len(dtypes)
    assert not [op for op in two.op_types if "Apply" in op and "Wrapopt" in op]
  assert f"Wrapopt>EmaUpdate{ref}" not in one.op_types
  assert f"Wrapopt>EmaUpdate{ref}" in two.op_types


def test_a_trajectory():
  # 1 - 0.5 * 1 = 0.5; the average of 1 and 0.5 is 0.75.
  v = tf.Variable([1.0])
  opt = wrapopt.MovingAverageOptimizer(
      v1.GradientDescentOptimizer(0.5), 0.5, fused=True)
  opt.apply_gradients([(tf.constant([1.0]), v)])
  assert v.numpy() == [0.5] and opt.average(v).numpy() == [0.75]


def test_what_has_no_such_op():
  class Mine(v1.MomentumOptimizer):
    pass

  for opt in (Mine(0.1, 0.9), v1.ProximalGradientDescentOptimizer(0.1),
              v1.FtrlOptimizer(0.1, learning_rate_power=-0.25)):
    assert not wrapopt.MovingAverageOptimizer(opt, fused=None).fused
    with pytest.raises(ValueError, match="`fused` must not be True: "):
      wrapopt.MovingAverageOptimizer(opt, fused=True)


def test_a_constraint_is_kept():
  v = tf.Variable([1.0], constraint=lambda x: tf.maximum(x, 0.75))
  opt = wrapopt.MovingAverageOptimizer(
      v1.GradientDescentOptimizer(0.5), 0.5, fused=True)
  opt.apply_gradients([(tf.constant([1.0]), v)])
  assert v.numpy() == [0.75] and opt.average(v).numpy() == [0.875]
