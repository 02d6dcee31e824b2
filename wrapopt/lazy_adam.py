"""Adam for embeddings: a step costs the rows that it touches."""

from typing import Any

import tensorflow as tf

from wrapopt import ops


class LazyAdamOptimizer(tf.compat.v1.train.AdamOptimizer):
  """Adam that updates only the rows that a sparse gradient touches.

  Adam's moments decay in each step, so Adam moves all rows of an embedding,
  whatever rows a batch touches. This optimizer updates the moments and the
  weights of the touched rows only. Each row is trained like a variable of its
  own, but the step count is common to all rows. A dense gradient is a step of
  Adam.

  Inside a `MovingAverageOptimizer`, the averages also cost only these rows.

  Example:

  >>> w = tf.Variable([[1.0], [1.0]])
  >>> opt = wrapopt.LazyAdamOptimizer(0.5)
  >>> opt.minimize(lambda: tf.nn.embedding_lookup(w, [1]), var_list=[w])
  >>> w.numpy()[:, 0].round(3)
  array([1. , 0.5], dtype=float32)

  References: Kingma and Ba, "Adam: a method for stochastic optimization", 2015;
  `tf.contrib.opt.LazyAdamOptimizer` of TensorFlow 1.15.

  Differences from 1.15: one native op for a variable's step; if a row occurs
  several times in a gradient, its gradients are summed.
  """

  def __init__(self, learning_rate: Any = 0.001, beta1: Any = 0.9,
               beta2: Any = 0.999, epsilon: Any = 1e-08,
               use_locking: bool = False, name: str = "Adam") -> None:
    """Makes the optimizer.

    Args:
      learning_rate: A number, tensor or callable.
      beta1: The decay of the first moments: a number, tensor or callable.
      beta2: The decay of the second moments, likewise.
      epsilon: Added to the root of the second moments, likewise.
      use_locking: Whether variables are locked against other updates.
      name: The name of the optimizer.
    """
    super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)

  # TensorFlow sums the gradients of each row before it calls `_apply_sparse`.
  # The op sums them itself.

  def _apply_sparse_duplicate_indices(self, grad, var):
    return self._apply_rows(grad, var)

  def _resource_apply_sparse_duplicate_indices(self, grad, handle, indices):
    return self._apply_rows(tf.IndexedSlices(grad, indices), handle)

  def _apply_rows(self, grad, var):
    beta1_power, beta2_power = self._get_beta_accumulators()
    update = ops.apply(
        "LazyAdam",
        {"var": [var], "m": [self.get_slot(var, "m")],
         "v": [self.get_slot(var, "v")]}, [grad],
        {"lr": self._lr_t, "beta1": self._beta1_t, "beta2": self._beta2_t,
         "epsilon": self._epsilon_t, "weight_decay": 0.0,
         "use_nesterov": False, "beta1_power": beta1_power,
         "beta2_power": beta2_power}, use_locking=self._use_locking)
    # In a tf.function the update runs anyway; TensorFlow needs an operation.
    return tf.no_op() if update is None else update
