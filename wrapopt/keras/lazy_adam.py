"""Adam for embeddings: a step costs the rows that it touches."""

from typing import Any

import keras
import tensorflow as tf

from wrapopt import ops
from wrapopt._averages import _replicas
from wrapopt.keras._steps import _rules
from wrapopt.keras._steps import _views
from wrapopt.keras._variables import value_of


@keras.saving.register_keras_serializable("wrapopt")
class LazyAdam(keras.optimizers.Adam):
  """Adam that updates only the rows that a sparse gradient touches.

  Adam's moments decay in each step, so Adam moves all rows of an embedding,
  whatever rows a batch touches. This optimizer updates the moments and the
  weights of the touched rows only. Each row is trained like a variable of its
  own, but the step count is common to all rows. A dense gradient is a step of
  Adam.

  Inside a `MovingAverage`, the averages also cost only these rows.

  Example:

  >>> w = keras.Variable([[1.0], [1.0]])
  >>> opt = wrapopt.keras.LazyAdam(0.5)
  >>> opt.apply([tf.IndexedSlices([[1.0]], [1], [2, 1])], [w])
  >>> w.numpy()[:, 0].round(3)
  array([1. , 0.5], dtype=float32)

  The arguments are those of `keras.optimizers.Adam`; `amsgrad` must be False.

  References: Kingma and Ba, "Adam: a method for stochastic optimization", 2015;
  `tfa.optimizers.LazyAdam` of TensorFlow Addons.

  Differences from TensorFlow Addons: one native op for a variable's step.
  """

  def __init__(self, learning_rate: Any = 0.001, beta_1: float = 0.9,
               beta_2: float = 0.999, epsilon: float = 1e-07,
               amsgrad: bool = False, **kwargs: Any) -> None:
    if amsgrad:
      raise ValueError("`amsgrad` of LazyAdam must be False, got True. Use "
                       "keras.optimizers.Adam for AMSGrad.")
    kwargs.setdefault("name", "lazy_adam")
    super().__init__(learning_rate, beta_1, beta_2, epsilon, **kwargs)

  def apply(self, grads, trainable_variables=None):
    # In a step that has begun, a number is in the place of the variable.
    if _replicas.is_shared(value_of(self._iterations)):
      _views.followed(self, []).apply(grads, trainable_variables)
    else:
      super().apply(grads, trainable_variables)

  def update_step(self, gradient, variable, learning_rate):
    if not isinstance(gradient, tf.IndexedSlices):
      super().update_step(gradient, variable, learning_rate)
      return
    rule = _rules.adam(self)
    index = self._get_variable_index(variable)
    value = _replicas.here(value_of(variable))
    ops.apply("LazyAdam",
              {"var": [value],
               **{state: [_replicas.here(slots[index].value)]
                  for state, slots in rule.slots.items()}},
              [_rules.cast(gradient, value.dtype)],
              {"lr": ops.float64(tf.convert_to_tensor(learning_rate)),
               "weight_decay": 0.0, **rule.scalars})


_rules.add_rule(LazyAdam, "LazyAdam")
