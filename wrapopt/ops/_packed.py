"""Many variables as one vector, and back."""

from typing import Optional

import tensorflow as tf

from wrapopt._types import Operation, Tensor, Variables
from wrapopt.ops import _check
from wrapopt.ops import _emit
from wrapopt.ops import _lagging
from wrapopt.ops import _variables


@_emit.not_converted
def read_packed(variables: Variables, name: Optional[str] = None) -> Tensor:
  """Reads variables into one vector: one transfer takes it to another device.

  One native op reads all of them, under their locks. The vector shares no
  memory with them.

  Example:

  >>> a, b = tf.Variable([[1., 2.], [3., 4.]]), tf.Variable(5.)
  >>> packed = wrapopt.ops.read_packed([a, b])
  >>> packed.numpy()
  array([1., 2., 3., 4., 5.], dtype=float32)
  >>> wrapopt.ops.assign_packed([a, b], 2 * packed)
  >>> print(b.numpy())
  10.0

  Args:
    variables: N variables on one device and of one dtype, numeric or bool. One
      variable may stand for a sequence of one.
    name: A name for the operation.

  Returns:
    A tensor of rank 1 on the variables' device: the elements of all N, in their
    order, each in row-major order.

  Raises:
    TypeError: If they are not variables, or some are ref variables and some are
      not.
    ValueError: If they are on different devices; in a graph, if they are of
      different dtypes.
    tf.errors.InvalidArgumentError: When it runs: they are of different dtypes.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.
  """
  variables = _checked(variables)
  with _emit.device_of(variables[0]):
    # Refs tell it.
    dtype = {} if _variables.is_ref(variables[0]) else {
        "T": variables[0].dtype}
    return _emit.of_variables("read_packed", {"variables": variables},
                              name=name, **dtype)


@_emit.not_converted
def assign_packed(variables: Variables, packed: Tensor,
                  name: Optional[str] = None) -> Optional[Operation]:
  """Assigns the parts of a vector to variables, in place.

  One native op assigns all. It checks all before it changes any, and holds
  their locks.

  Example: see `read_packed`.

  Args:
    variables: N variables as for `read_packed`, all different and initialized.
    packed: A tensor of rank 1 and of their dtype: a result of `read_packed` of
      such variables.
    name: A name for the operation.

  Returns:
    As `ema_update`.

  Raises:
    TypeError: As `read_packed`, or if `packed` is of another dtype.
    ValueError: If they are on different devices, or `packed` is misshapen. If
      its shape is known only at run time, that is a
      tf.errors.InvalidArgumentError.
    tf.errors.InvalidArgumentError: When it runs: a variable is named twice, or
      as `read_packed`.
    tf.errors.FailedPreconditionError: When it runs: a variable is not
      initialized.
  """
  variables = _checked(variables)
  first = variables[0]
  with (tf.control_dependencies(_lagging.settle(variables)),
        _emit.device_of(first)):
    packed = tf.convert_to_tensor(packed)
    _check.dtype("packed", packed, (first.dtype.base_dtype,))
    return _emit.result([_emit.of_variables(
        "assign_packed", {"variables": variables}, packed=packed, name=name)])


def _checked(variables):
  """The argument `variables` as a list, checked."""
  variables = _check.variables("variables", variables)
  _check.alike("variables", variables,
               "A vector is read and assigned on one device.")
  return variables
