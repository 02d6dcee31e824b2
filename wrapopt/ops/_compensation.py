"""How a step compensates for the age of its gradients."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import tensorflow as tf

from wrapopt import _native
from wrapopt._types import Variable
from wrapopt.ops import _check

# {policy: (its states, its scalars)}, in the order of kPolicies in
# cc/rules/rules.h. The last state of the rule is the gradient.
POLICIES = {
    policy: (_native.rules()[policy].states[:-1],
             _native.rules()[policy].scalars +
             (_native.rules()["StepSize"].scalars if measures else []))
    for policy, measures in (("ConstantDelayCompensation", False),
                             ("DelayCompensation", False),
                             ("GapAware", True))}


def state_dtype(dtype):
  """The dtype of a policy's states, for a variable of that dtype."""
  return tf.float64 if dtype.base_dtype == tf.float64 else tf.float32


@dataclasses.dataclass(frozen=True)
class Compensation:
  """Compensates the gradients of an `ops.apply` for their age.

  The weights `w` have moved from `o`, the weights that a gradient `g` was
  computed from. The rule takes its step with `c` instead of `g`. All of it
  happens in the pass of the step.

  `ConstantDelayCompensation`:

      c = g + lambda g^2 (w - o)

  `DelayCompensation`:

      mean_square += rate (g^2 - mean_square)
      c = g + lambda / sqrt(mean_square + epsilon) g^2 (w - o)

  `GapAware`, whose last line follows the step from w to w2:

      c = g / (1 + |w - o| / step_size)
      step_size += rate (|w2 - w| - step_size)

  Where `w` is `o`, `c` is `g` to the bit. Where `step_size` is 0, `c` is `g`,
  and `step_size` becomes `|w2 - w|`. The states begin at zero. float16 and
  bfloat16 are compensated in float32.

  A sparse gradient changes only the rows of the states that it holds.
  Duplicate indices are summed first; the first of their origins counts.

  Example: `w` has moved by 0.5 since the gradient was computed.

  >>> w = tf.Variable([1.0])
  >>> wrapopt.ops.apply(
  ...     "GradientDescent", {"var": [w]}, [tf.constant([2.0])], {"lr": 0.1},
  ...     compensation=wrapopt.ops.Compensation(
  ...         "ConstantDelayCompensation", [tf.constant([0.5])],
  ...         scalars={"lambda": 0.5}))
  >>> print(w.numpy())  # 1 - 0.1 (2 + 0.5 2^2 0.5)
  [0.7]

  Attributes:
    policy: One of the three names.
    origins: N tensors: the weights that the gradients were computed from, of
      the shape of the gradient (for `tf.IndexedSlices`, of its values) and of
      the dtype of the variable. For a ref variable, a copy: an `identity` of
      one has its buffer.
    states: A dict from the names of the policy's states to N variables, float64
      for float64 variables, else float32.
    scalars: A dict from the names of the policy's scalars to numbers, tensors
      or variables: "lambda", "rate" (1 - decay), "epsilon".

  References: Zheng et al., "Asynchronous stochastic gradient descent with delay
  compensation", ICML 2017, arXiv 1609.08326; Barkai, Hakimi and Schuster,
  "Gap-aware mitigation of gradient staleness", ICLR 2020, arXiv 1909.10802.
  """
  policy: str
  origins: Sequence[Any]
  states: Mapping[str, Sequence[Variable]] = dataclasses.field(
      default_factory=dict)
  scalars: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.policy not in POLICIES:
      raise ValueError(f"`policy` must be one of {', '.join(POLICIES)}, got "
                       f"{self.policy!r}.")
    states, scalars = POLICIES[self.policy]
    for subject, given, names in (("states", self.states, states),
                                  ("scalars", self.scalars, scalars)):
      if given.keys() != set(names):
        raise ValueError(
            f"`{subject}` of {self.policy} must hold "
            f"{', '.join(names) or 'nothing'}, got "
            f"{', '.join(sorted(given)) or 'nothing'}.")

  def _scalars_in_order(self):
    return [self.scalars[name] for name in POLICIES[self.policy][1]]

  def _checked(self, variables, grads):
    """This with lists and tensors, for some variables.

    Args:
      variables: An object with `name`, `dtype`, `device` and `is_ref` of each.
      grads: Their gradients, tensors or `tf.IndexedSlices`.

    Returns:
      A Compensation.
    """
    origins = list(self.origins)
    if len(origins) != len(variables):
      raise ValueError(
          f"`origins` must hold one tensor for each of the {len(variables)} "
          f"variables, got {len(origins)}.")
    for i, (origin, variable, grad) in enumerate(
        zip(origins, variables, grads)):
      origins[i] = origin = tf.convert_to_tensor(origin)
      if origin.dtype.base_dtype != variable.dtype:
        raise TypeError(
            f"`origins[{i}]` must be of dtype {variable.dtype.name}, that of "
            f"'{variable.name}', got {origin.dtype.base_dtype.name}.")
      shape = (grad.values if isinstance(grad, tf.IndexedSlices)
               else grad).shape
      if not origin.shape.is_compatible_with(shape):
        raise ValueError(
            f"`origins[{i}]` misshapen: got {origin.shape} but expected "
            f"{shape} (the shape of the gradient of '{variable.name}').")
    states = {}
    for name in POLICIES[self.policy][0]:
      subject = f"states['{name}']"
      states[name] = _check.variables(subject, self.states[name])
      if len(states[name]) != len(variables):
        raise ValueError(
            f"`{subject}` of {self.policy} must hold one variable for each of "
            f"the {len(variables)} variables, got {len(states[name])}.")
      for i, (state, variable) in enumerate(zip(states[name], variables)):
        _check.dtype(f"{subject}[{i}]", state, (state_dtype(variable.dtype),))
    return dataclasses.replace(self, origins=origins, states=states)
